/* lg-keeper SOCKET [READY_FD]: holds the fds of a run's memory; see shm/keeper.h.
 *
 * It leaves the session of whoever started it, so that neither a terminal nor lgsup's death ends it.
 * READY_FD gets one byte when it listens. Ends by `drop ""`, SIGTERM or SIGINT. Exit code: 0, or
 * that of the error. */
#include "base/log.h"
#include "shm/keeper.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    char *end = NULL;
    long ready_fd = argc == 3 ? strtol(argv[2], &end, 10) : -1;
    if (argc < 2 || argc > 3 || (end && (*end || ready_fd < 0 || ready_fd > 1 << 20))) {
        fprintf(stderr, "usage: lg-keeper SOCKET [READY_FD]\n");
        return -LG_ERR_USAGE;
    }
    setsid(); /* fails only where we lead a group already: then we have our own */
    if (ready_fd >= 0) fcntl((int)ready_fd, F_SETFD, FD_CLOEXEC);
    lg_log_set_role("keeper");
    int rc = lg_keeper_serve(argv[1], (int)ready_fd);
    if (rc < 0) lg_log_error("the keeper cannot go on");
    return -rc;
}
