/* `lgsup swap`: instances of a role go over to another program while training goes on.
 *
 * A standby process of the new program is started beside each old one (shm/board.h, rule 8): it has
 * attached, so its layout is right, opened everything and said that it is ready. Only then are the
 * old ones told to leave; each leaves when it has finished what it has begun (a chunk, a checkpoint's
 * write), and its standby takes its row. Trainer ranks all leave before the same step, and their
 * standbys open memory of their own only after they have taken over.
 *
 * Rolled back, all of them together: a program that dies or, while it sets up, gives no heartbeat for
 * supervisor.ready_s, before or after it has taken over, or that was built with another layout. What had
 * not been replaced goes on undisturbed, what had is started again with the former program. One swap at a
 * time.
 *
 * lgsup dies meanwhile: before the hand-over, the next one ends the standbys and nothing has
 * happened; after it, DIR/programs says what each instance runs, and the next one sees to it. */
#pragma once
#include "supervisor/core/supervise.h"
#include <poll.h>

/* An order from the command line: every instance of the role, or one (index >= 0). program: absolute
 * path, "" for the program in force again (its file may have been replaced). Answered when it is over. */
void lg_swap_order(lg_supervisor *s, const struct lg_peer *peer, lg_role role, int index,
                   const char *program);
/* Does what follows from the board. */
void lg_swap_look(lg_supervisor *s);
/* An instance has left and has a standby: makes that process the instance. False: it has none, start
 * one. */
bool lg_swap_succeed(lg_supervisor *s, struct lg_instance *i);
/* Death of standbys: fills LG_INSTANCES_MAX entries at most, returns how many; told which one fired. */
int lg_swap_poll(const lg_supervisor *s, struct pollfd *p);
void lg_swap_on_death(lg_supervisor *s, int which);
/* Something a standby has said before it died. */
void lg_swap_on_event(lg_supervisor *s, const struct lg_message *m);
/* The run's end: whatever is under way is given up and the standbys are killed. */
void lg_swap_cancel(lg_supervisor *s);
/* Releases it; everybody has gone, or is left to the next lgsup. */
void lg_swap_free(lg_supervisor *s);
