/* Programs that lgsup starts beside a run end with it: what nobody waits for any more is not made. */
#pragma once
#include "base/check.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* owner: pid of our parent; NULL: nobody. LG_ERR_USAGE when it is not, or has died already. */
static inline int lg_end_with(const char *owner)
{
    if (!owner) return 0;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
        return LG_FAIL(LG_ERR_IO, "prctl: %s", strerror(errno));
    if (getppid() != (pid_t)strtol(owner, NULL, 10))
        return LG_FAIL(LG_ERR_USAGE, "--owner %s is not our parent, or has died", owner);
    return 0;
}
