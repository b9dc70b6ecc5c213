/* What the loop wants of the keeper (keep.h), done by the keeper's worker: the loop goes on meanwhile,
 * whoever dies, and acts when the answer is there.
 *
 * The jobs are done one after the other, so a call that waits for a keeper which hangs holds up the
 * next, never the loop. At the latest after 5 s it is known to hang, and is killed; what waits for it
 * fails at that moment, and the job that starts another is the next in line. */
#pragma once
#include <stdbool.h>

struct lg_supervisor;

/* Is the keeper well? It has no heartbeat: it is asked for something. One that does not answer is
 * killed, because it holds up everybody who starts; a new one knows all that it knew. */
void lg_keep_look(struct lg_supervisor *s);
/* Memory is used when we have a copy of it (shm/board.h, rule 9). At every look while a copy is due or
 * somebody waits for one, one attempt at a time; who waits is nudged when it is there. */
void lg_keep_look_at_copies(struct lg_supervisor *s);
/* The keeper has died (`how`): salvages what has no copy yet, starts another. When that fails several
 * times the run is parked. */
void lg_keep_replace(struct lg_supervisor *s, const char *how);
/* The runtime directory lies elsewhere from now on, and the keeper's socket with it. */
void lg_keep_move(struct lg_supervisor *s);
/* The keeper lives, but its socket was removed and nobody new reaches it: copies what it holds, then kills
 * it; another follows as after any death. */
void lg_keep_abandon(struct lg_supervisor *s);
/* A parked run: is there a keeper that has every region? then: in the loop, with the answer. */
void lg_keep_ask_whole(struct lg_supervisor *s, void (*then)(struct lg_supervisor *s, bool whole));
