/* `lgsup logs [-f] [--host H] [ROLE[.INDEX]] DIR`: the lines of all processes in the order of their time; of several
 * hosts with a column that says on which. */
#pragma once
#include "base/check.h"

struct lg_logs_args {
    const char *dir, *role; /* role: NULL for all, "vae" or "vae.1" */
    const char *host;       /* NULL: all */
    bool follow;            /* goes on until it is interrupted */
};
int lg_logs(const struct lg_logs_args *args);
