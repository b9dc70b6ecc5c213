/* Heartbeats of long work.
 *
 * A process is watched by its heartbeat (shm/board.h): late means that it hangs. Work that takes long
 * but makes progress (reading and writing large files, indexing, hashing, taking memory, computing)
 * calls lg_heartbeat() after each bounded piece that is done. A piece that hangs, a write() or an
 * operation that never comes back, gives none, and neither does a loop that only waits: whoever waits
 * for another process says so by another phase (stages/stage_memory.c: for the one that fills a region,
 * which is watched itself), and no lock is waited for without a limit.
 *
 * Nothing is known here of boards: a stage says once what a heartbeat is. It is the calling thread's
 * own, so that a helper thread never speaks for the one that does the work. Without a hook (tools,
 * lgsup) it costs nothing; with one about 30 ns, a look at the clock and a store. */
#pragma once

/* From now on lg_heartbeat() of this thread calls beat(arg); NULL: nothing. */
void lg_heartbeat_set(void (*beat)(void *arg), void *arg);

/* Exported by the program, so that backends loaded at run time beat as well. */
#pragma GCC visibility push(default)
/* A bounded piece of long work is done. */
void lg_heartbeat(void);
#pragma GCC visibility pop
