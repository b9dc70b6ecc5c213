/* Going into the background: the parent waits until the child says that the run is ready, or why it
 * is not. */
#pragma once
#include "base/check.h"
#include "base/fs.h"

struct lg_detached {
    bool is_parent;
    int fd; /* parent: reads; child: one byte 0 written here means ready */
    char log[LG_PATH_BYTES];
};
/* Forks twice. The child has its own session, no stdin, and its output in DIR/logs/lgsup.log. */
int lg_detach(const char *dir, struct lg_detached *ret);
/* Child: its output goes to DIR/logs/lgsup.log from here on, which is made when it is not there. */
void lg_detach_log(const char *dir);
/* Parent: until ready (*ret_exit = 0) or the child has ended; prints or returns its error. */
int lg_detach_wait(struct lg_detached *d, int *ret_exit);
/* Child: tells a parent that still waits, and exits. */
void lg_detach_end(struct lg_detached *d, int exit_code, const char *message)
    __attribute__((noreturn));
