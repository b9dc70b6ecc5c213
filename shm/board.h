/* The board: one file, RUN/board, mapped by every process. It keeps apart the *liveness* of the
 * process that fills a row now and the *progress* of the logical instance, which outlives it.
 *
 * Rules (who writes, who reads, what if the writer dies):
 *  1. header: written by lgsup before any process starts. `drain`, `run_state`: lgsup alone. A
 *     decision that must survive (drain, wanted, leave, quit, a final run_state) is stored here before
 *     anything else says so: a file, a message, a line for people, or a word that only follows from it
 *     (run_state draining from drain). lgsup dying after the store: the next one completes it.
 *  2. row.life = {pid, incarnation, state} in one word. lgsup stores {0, i, STARTING} before fork,
 *     after the pidfd of the row's former process has fired. (Under systemd `lgsup role` does, in the
 *     process that becomes the child; systemd runs one of a row at a time: supervisor/launch/role.c.)
 *     Then row.pid and last row.start_time name the process: no program begins before they do, whatever
 *     its role. lgsup stores them while the forked child waits at a pipe; `lgsup role` stores its own before
 *     it enlists. Whoever comes later thus knows everybody who may come to the board, also one that hangs or
 *     was stopped before it has joined. The child turns the word into {pid, i, RUNNING} by compare-and-swap,
 *     or exits: a child that comes too late writes nothing. The keeper does not know the board: its word stays
 *     STARTING, and row.ready, which lgsup stores when the keeper holds what its predecessor held, says that it
 *     is the keeper. lgsup stores DEAD when the pidfd has fired.
 *     lgsup dying: before start_time is stored, the child finds the pipe's end and exits (until then it has
 *     a copy of the lock, and the next lgsup ends it if it does not: supervisor/run/lock.c); the next lgsup
 *     turns {0, i, STARTING} without a start_time into DEAD. After it, the process has begun or is ending;
 *     the next lgsup watches it by its pidfd, joined or not, as if it had started it, kills it if it is late,
 *     and enlists another only when it is dead. A keeper that is not ready and that nobody can reach is
 *     ended after its memory has been copied.
 *  3. An incarnation is dead when its row carries another one, or DEAD, or when pidfd_open(pid)
 *     says ESRCH, the start time differs, or the pidfd is readable. Nothing else proves death. A
 *     life word without a pid is judged by its state alone.
 *  4. Marks are written by the row's own process with release and read with acquire; they never
 *     decrease. A mark is stored after everything it announces is visible. Dying before the store:
 *     the work is done again by the next incarnation, giving the same bytes.
 *  5. verdict[s % LG_VERDICTS]: any rank, once, by compare-and-swap from an older step's value.
 *  6. Figures for people (heartbeat, phase, progress, metrics) are relaxed; nothing is decided by
 *     them except that lgsup kills what hangs, and parks the run when an instance gets nothing done.
 *  7. How lgsup steers one process; each word names an incarnation, so that it never speaks to a
 *     later process of the row. row.leave: that incarnation exits 0 as soon as it has finished what
 *     it has begun (a claimed chunk, a checkpoint), with phase DONE. lgsup dying after the store: it
 *     leaves all the same, and the next lgsup decides by `wanted` whether another takes the place.
 *  8. A standby process is to take over logical instance K of its role, while another process still
 *     is K. It waits in a spare row J of the role; J.standby names its incarnation. It is complete
 *     (J.ready) but works at nothing. When K's process is gone lgsup enlists a new incarnation k in row K, names
 *     the standby's process there (rule 2) and stores J.takes = k; the standby vacates row J, joins row K as k
 *     (by compare-and-swap) and works. A new lgsup ends whoever still stands in a row J, before it looks at
 *     rows K. So lgsup dying before the store: the standby is ended, K is started anew. After it: the same,
 *     or it has left row J and is adopted as K, joined or not.
 *  9. Memory of which there is one copy is not used (region.h, `copied`). row.uncopied: that incarnation
 *     has opened regions that lgsup has no copy of, and does no work before it has. Stored by the row's
 *     process before `ready`; 0 when it goes on. lgsup copies as long as a row asks for it. Whoever dies,
 *     the successor looks at the regions themselves: the word is a request, it proves nothing.
 * 10. row.lost: that incarnation has found that memory is lost of which a mark says that it was made; it
 *     exits with LG_ERR_PARKED. Stored by the row's process before it exits, never cleared: what is left
 *     of the run's memory is worth nothing, and lgsup keeps none of it. Dying before the store: the
 *     successor finds the same.
 */
#pragma once
#include "base/exact_sum.h"
#include "config/plan.h"
#include "shm/data_set.h"
#include "shm/hosts.h"
#include "shm/layout.h"
#include "shm/preamble.h"
#include "shm/turns.h"

typedef enum lg_life {
    LG_LIFE_NONE,
    LG_LIFE_STARTING,
    LG_LIFE_RUNNING,
    LG_LIFE_DEAD,
} lg_life;

typedef enum lg_phase {
    LG_PHASE_SETUP,   /* loading, mapping: a heartbeat every ready_s at least, until it is ready */
    LG_PHASE_WAITING, /* for a peer or for data, however long; its loop gives the heartbeats */
    LG_PHASE_WORKING, /* a heartbeat after each bounded piece (base/heartbeat.h), every hang_s at least */
    LG_PHASE_DONE, /* nothing left to do in this run; stays until told to exit */
} lg_phase;

typedef enum lg_run_state {
    LG_RUN_STARTING,
    LG_RUN_RUNNING,
    LG_RUN_DRAINING,
    LG_RUN_DONE,
    LG_RUN_STOPPED,
    LG_RUN_PARKED,
    LG_RUN_FAILED,
} lg_run_state;
const char *lg_run_state_name(lg_run_state s); /* "running" */

enum lg_verdict_flag {
    LG_VERDICT_GO = 1,
    LG_VERDICT_CHECKPOINT = 2,
    LG_VERDICT_STOP = 4,
    LG_VERDICT_YIELD = 8, /* ranks that shall leave do so before this step (board.h, rule 7) */
};
enum { LG_VERDICTS = 64, LG_VERDICT_BITS = 8 };

/* A weighted sum of samples' losses, and how much of it is the variational bound of a learned variance. */
struct lg_loss_sum {
    double all, vb;
};

struct lg_board_row {
    /* liveness */
    _Atomic(uint64_t) life;       /* pid << 40 | incarnation << 8 | lg_life */
    _Atomic(uint32_t) pid;        /* the same pid, from before it has joined (rule 2) */
    _Atomic(uint32_t) restarts;   /* lgsup */
    _Atomic(uint64_t) start_time; /* of pid: /proc/PID/stat field 22; 0: nobody has begun */
    _Atomic(int64_t) heartbeat_ns;
    _Atomic(uint32_t) phase; /* lg_phase */
    _Atomic(uint32_t) ready; /* incarnation that finished its setup */
    /* lgsup steers (rules 7 and 8) */
    _Atomic(uint32_t) leave; /* this incarnation shall leave */
    _Atomic(uint32_t)
        standby; /* this incarnation is a standby process, which waits to take another row */
    _Atomic(uint32_t) takes; /* the incarnation that it becomes; 0: not yet */
    /* its memory (rules 9 and 10) */
    _Atomic(uint32_t) uncopied; /* this incarnation waits until lgsup has copies */
    _Atomic(uint32_t) lost;     /* this incarnation has found that memory is lost */
    /* progress */
    _Atomic(lg_mark) commit;  /* trainer: state committed; ema: EMA state committed */
    _Atomic(lg_mark) grads;   /* trainer: gradients of step s lie in the grad region: mark_of(s) */
    _Atomic(lg_mark) partial; /* trainer: sums of step s below are valid */
    _Atomic(uint64_t) given, added; /* trainer: numbers of scattered gradients (shm/scatter.h) */
    _Atomic(uint64_t) lives, joined, sent,
        made; /* trainer: of its sequence group (shm/sequence.h) */
    /* of several hosts (shm/hosts.h): trainer; exchange */
    _Atomic(lg_mark) local, exchanged, fetched;
    _Atomic(uint64_t) entered;
    _Atomic(lg_mark) staged; /* ckpt: snapshot of state s lies in the staging region */
    /* ckpt: of that snapshot the moments, which come first: as staged, or one checkpoint ahead */
    _Atomic(lg_mark) staged_moments;
    _Atomic(lg_mark) published; /* ckpt: checkpoint of state s is complete on disk */
    struct lg_exact_sum
        sum_squares[2]; /* trainer, [s & 1]: of this rank's shard of the summed gradient */
    struct lg_loss_sum loss_so_far[2]; /* trainer: see shm/scatter.h */
    /* [s & 1]: trainer: of this rank's samples, valid with grads; exchange: of all hosts, valid with exchanged */
    struct lg_loss_sum loss_sum[2];
    /* figures */
    _Atomic(uint64_t) samples; /* encoded, loaded or trained by this logical instance */
    _Atomic(uint64_t) busy_ns; /* time spent working */
    _Atomic(uint64_t) wait_ns; /* time spent waiting for data */
    /* why this process gave up; written by it before it exits with LG_ERR_PARKED */
    char cause[LG_CAUSE_BYTES];
};

struct lg_board_metrics { /* rank 0, relaxed; bits of doubles */
    _Atomic(uint64_t) step;
    _Atomic(double) loss, loss_vb, grad_norm, lr, samples_per_s, data_wait_s;
    _Atomic(uint32_t) has_vb; /* 0: no variance is learned, and loss_vb is nothing */
    _Atomic(uint64_t) voids, skipped;
};

struct lg_board_shared {
    struct lg_board_preamble preamble; /* at the file's beginning, for ever */
    uint64_t lineage; /* of the run (config/lineage.h), in everything that it writes */
    uint64_t start_step, max_steps; /* max_steps: lgsup, before start */
    uint64_t batch;                 /* samples per step, of several hosts on this one */
    int64_t checkpoint_every;       /* 0: only the last step */
    int ranks;
    int sequence; /* ranks that compute a micro-batch together (shm/sequence.h); 1: each by itself */
    bool scatters; /* gradients leave unit by unit (shm/scatter.h) */
    bool has_ema;
    _Atomic(uint32_t) next_counter; /* lgsup: of incarnations; begins elsewhere on every board */
    _Atomic(uint32_t) run_state;    /* lg_run_state */
    _Atomic(uint32_t) drain;        /* lgsup: 1 asks the ranks for a STOP verdict */
    _Atomic(uint32_t) quit;         /* lgsup: 1 asks every stage to exit 0 now (the run is over) */
    _Atomic(uint32_t) keeper_epoch; /* lgsup: grows with each new keeper: stages deposit again */
    /* lgsup: grows when sockets have been removed, or their directory has another path (DIR/runtime):
     * a stage whose own socket is not there binds it again. Dying after the store: nothing is missing
     * that the next lgsup would not find missing as well. */
    _Atomic(uint32_t) sockets_epoch;
    _Atomic(uint32_t) yield; /* lgsup: 1 asks for a YIELD verdict: ranks told to leave go there */
    _Atomic(uint32_t) memory_kept; /* lgsup: 1 with run_state parked: the keeper has stayed */
    /* lgsup: grows when rows have been filled or vacated for good, and when it has begun: dying before
     * the store it leaves the saying to the next one. */
    _Atomic(uint32_t) members_epoch;
    /* lgsup: instances that shall run; from the plan, then by `lgsup scale`. A later lgsup makes it
     * so, wherever its predecessor has died. */
    _Atomic(uint32_t) wanted[LG_ROLES_MAX];
    char cause[LG_CAUSE_BYTES];             /* lgsup: why it parked or failed */
    _Atomic(uint64_t) verdict[LG_VERDICTS]; /* step << LG_VERDICT_BITS | flags; 0: none */
    struct lg_board_metrics metrics;
    struct lg_board_data data;                /* shm/data_set.h has its rules */
    struct lg_board_hosts hosts;              /* shm/hosts.h has its rules */
    struct lg_turn_shared turn[LG_TURNS_MAX]; /* by lg_plan_turn; shm/turns.h has their rules */
    _Alignas(128) struct lg_board_row row[LG_ROWS];
};

struct lg_board {
    struct lg_board_shared *s;
    int fd;
};

struct lg_board_spec {
    const lg_plan *plan;
    uint64_t lineage, start_step, max_steps;
    int64_t checkpoint_every;
    const struct lg_data_part *data; /* n_data parts: what the run was trained on so far */
    int n_data;
    bool data_may_change;
    bool comes;    /* of several hosts, to a run that goes on (shm/hosts.h) */
    uint64_t life; /* of this host among several */
};
/* Creates (replacing) the file, fully allocated. */
int lg_board_create(const char *path, const struct lg_board_spec *spec, lg_board **ret);
/* Maps an existing one that fits (lg_board_look: LG_ERR_MISMATCH, LG_ERR_CORRUPT), with the plan's
 * hash unless plan_hash is 0. LG_ERR_NOTFOUND: no such file. */
int lg_board_open(const char *path, uint64_t plan_hash, lg_board **ret);
void lg_board_close(lg_board **b);

static inline struct lg_board_row *lg_board_row(lg_board *b, lg_role role, int index)
{
    return &b->s->row[lg_row(role, index)];
}

/* lgsup: gives the row a new incarnation and stores STARTING (rule 2). The row must be empty or
 * DEAD. */
lg_incarnation lg_board_enlist(lg_board *b, lg_role role, int index);
/* The same for a standby process (rule 8): no look at the board takes it for a member of the run. */
lg_incarnation lg_board_enlist_standby(lg_board *b, lg_role role, int index);
/* The same by the process that is to join, which is named with it. 0: it cannot be. */
lg_incarnation lg_board_enlist_self(lg_board *b, lg_role role, int index);
/* Its process, which is not wanted after all and stays alive: the row is DEAD and names nobody. */
void lg_board_retract(lg_board *b, lg_incarnation me);
/* lgsup: names the process of a row that says that `who` is STARTING (rule 2). start_time: of that process. */
void lg_board_enter(lg_board *b, lg_incarnation who, int pid, uint64_t start_time);
/* The child: STARTING -> RUNNING with its pid. LG_ERR_MISMATCH when the row does not say that `me`
 * is STARTING: not wanted any more; nothing was written. */
int lg_board_join(lg_board *b, lg_incarnation me);
/* lgsup, when the pidfd has fired. No effect when the row carries another incarnation. */
void lg_board_bury(lg_board *b, lg_incarnation who);
/* lgsup, when the pidfd has fired and nobody is to follow; or a standby process for its own row (rule 8):
 * the row is empty again, its figures and marks stay. No effect when it carries another. */
void lg_board_vacate(lg_board *b, lg_incarnation who);
/* Rule 3. Costs system calls when the row still carries `who`; never blocks. */
bool lg_board_is_dead(lg_board *b, lg_incarnation who);
/* {incarnation, state} of a row. */
lg_incarnation lg_board_life(lg_board *b, lg_role role, int index, lg_life *ret_state);

/* pidfd of a row's process, joined or not, after comparing its start time; -1 when it is dead or has never
 * begun; LG_ERR_BUSY, without a text, when that cannot be told (no fds left, say): it must be taken for alive. */
int lg_board_pidfd(lg_board *b, lg_role role, int index);
/* /proc/PID/stat field 22, or 0 when there is no such process. */
uint64_t lg_process_start_time(int pid);

/* Global commit: the least mark over the ranks; LG_MARK_NONE until all have one. Acquire. */
lg_mark lg_board_global_commit(lg_board *b);

void lg_board_beat(struct lg_board_row *row, lg_phase phase);
/* The work of this phase goes on: the heartbeat alone. */
void lg_board_beat_on(struct lg_board_row *row);
