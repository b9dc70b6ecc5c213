/* `lgsup swap`: instances of a role go over to another program while training goes on.
 *
 * A process of the new program is started beside each old one and stands by (shm/board.h, rule 8): it
 * has attached, so its layout is right, opened everything and said that it is ready. Only then are the
 * old ones told to leave; each leaves when it has finished what it has begun (a chunk, a checkpoint's
 * write), and the one that stood by takes its row. Trainer ranks stand by without memory of their own,
 * leave all before the same step, and open it after they have taken over.
 *
 * Rolled back, all of them together: a program that dies or is not ready within supervisor.ready_s,
 * before or after it has taken over, or that was built with another layout. What had not been replaced
 * goes on undisturbed, what had is started again with the former program. One swap at a time.
 *
 * lgsup dies meanwhile: before the hand-over, the next one ends those that stand by and nothing has
 * happened; after it, DIR/programs says what each instance runs, and the next one sees to it. */
#pragma once
#include "supervisor/supervise.h"
#include <poll.h>

/* An order from the command line: every instance of the role, or one (index >= 0). program: absolute
 * path, "" for the program in force again (its file may have been replaced). Answered when it is over. */
void lg_swap_order(lg_supervisor *s, const struct lg_peer *peer, lg_role role, int index,
                   const char *program);
/* Does what follows from the board. */
void lg_swap_look(lg_supervisor *s);
/* An instance has left and somebody stands by for it: makes that process the instance. False: nobody
 * does, start one. */
bool lg_swap_succeed(lg_supervisor *s, struct lg_instance *i);
/* Death of those that stand by: fills LG_INSTANCES_MAX entries at most, returns how many; told which
 * one fired. */
int lg_swap_poll(const lg_supervisor *s, struct pollfd *p);
void lg_swap_on_death(lg_supervisor *s, int which);
/* Something a process that stands by has said before it died. */
void lg_swap_on_event(lg_supervisor *s, const struct lg_message *m);
/* The run's end: whatever is under way is given up and those that stand by are killed. */
void lg_swap_cancel(lg_supervisor *s);
/* Releases it; everybody has gone, or is left to the next lgsup. */
void lg_swap_free(lg_supervisor *s);
