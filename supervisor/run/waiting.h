/* DIR/waiting: that lgsup waits in DIR for the other hosts of its run, and for what. Two lines, the job's name and a sentence. It is
 * removed when the run begins; it counts only while the lgsup that holds DIR/lock lives, so one that died there leaves nothing to
 * repair. Where it is still there after the end, nothing had begun. */
#pragma once
#include "supervisor/run/run.h"

struct lg_waiting {
    int pid; /* of lgsup */
    char job[128], what[300];
};
/* What cannot be written is not said; the waiting goes on. */
void lg_waiting_say(const lg_run *r, const char *what);
/* Removes it. By the lock's holder alone. */
void lg_waiting_forget(const lg_run *r);
/* Does a living lgsup wait in `dir`? */
bool lg_waiting_read(const char *dir, struct lg_waiting *ret);
/* 0, or where one does LG_ERR_BUSY: nothing runs there yet, and for what it waits. */
int lg_waiting_refuse(const char *dir);
/* Nobody holds the run: did the last lgsup end while it waited? */
bool lg_waiting_was_last(const char *dir);
