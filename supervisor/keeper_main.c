/* lg-keeper SOCKET [READY_FD]: holds the fds of a run's memory; see shm/keeper.h.
 * lg-keeper --store SOCKET: the same as a service with an fd store; see shm/keeper_store.h.
 *
 * It leaves the session of whoever started it, so that neither a terminal nor lgsup's death ends it.
 * READY_FD gets one byte when it listens; a service manager gets READY=1. Ends by `drop ""`, SIGTERM
 * or SIGINT. Exit code: 0, or that of the error. */
#include "base/log.h"
#include "shm/keeper.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    bool store = argc == 3 && !strcmp(argv[1], "--store");
    char *end = NULL;
    long ready_fd = argc == 3 && !store ? strtol(argv[2], &end, 10) : -1;
    if (argc < 2 || argc > 3 || (argv[1][0] == '-' && !store) ||
        (end && (*end || ready_fd < 0 || ready_fd > 1 << 20))) {
        fprintf(stderr, "usage: lg-keeper SOCKET [READY_FD]\n"
                        "       lg-keeper --store SOCKET\n");
        return -LG_ERR_USAGE;
    }
    setsid(); /* fails only where we lead a group already: then we have our own */
    if (ready_fd >= 0) fcntl((int)ready_fd, F_SETFD, FD_CLOEXEC);
    lg_log_set_role("keeper");
    int rc = store ? lg_keeper_serve_stored(argv[2]) : lg_keeper_serve(argv[1], (int)ready_fd);
    if (rc < 0) lg_log_error("the keeper cannot go on");
    return -rc;
}
