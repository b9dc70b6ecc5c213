/* The step protocol: what a trainer rank, the EMA keeper and the checkpoint writer may do next. Pure
 * functions of the board: the answer follows from shared words alone, so a replacement asks the same
 * question and goes on where its predecessor died. The stages do the work and store the mark; the
 * simulation calls the same functions with pretended work.
 *
 * Why no epoch, no abort and no agreement round: gradients lie in regions, so what a dead rank had
 * published is still there, and what it had not is computed again by its replacement from the same
 * samples. Survivors just wait for the mark. (NCCL will need epochs; the order of marks stays.)
 *
 * State s of a rank's shard (master weights, scalars) lies in side s & 1 of its state regions. Its moments
 * lie once, in a region of their own, and rotate with each update (stages/trainer/moments.h). Step s, rank r:
 *
 *   FORWARD(s)  needs every rank's commit >= s, and the rank's samples ready. Reads all shards' side
 *               s & 1. Writes r's grad region and its loss sum. Then grads = mark(s). If grads is
 *               already there the work is NOT repeated: others may be reading it.
 *   ADD(s)      where gradients are scattered (shm/scatter.h): as far as all ranks have given. In FORWARD
 *               a rank does it by the way; this is what is left of it.
 *   REDUCE(s)   needs every rank's grads >= mark(s), or where gradients are scattered that its own sum is
 *               whole. Adds shard r of all ranks' gradients in rank order, or finds it added;
 *               publishes the sum of squares. Then partial = mark(s). Reads only: a replacement that
 *               finds partial set adds again for its UPDATE, without publishing.
 *   UPDATE(s)   needs every partial >= mark(s) and the floors: it overwrites weights and scalars of state
 *               s - 1, so ema.commit >= mark(s - 1) and, if state s - 1 was to be checkpointed,
 *               ckpt.staged >= mark(s - 1); and it destroys the moments of state s, so that if state s
 *               itself is to be checkpointed ckpt.staged_moments >= mark(s). Writes side (s + 1) & 1 of
 *               shard r, and shard r of every rank's working weights, which nobody reads between the
 *               last FORWARD(s) and FORWARD(s + 1). Rank 0 writes the step's record (metrics, ledger)
 *               before. Then commit = mark(s + 1).
 *               The shard is updated chunk by chunk. A chunk's moments go where those of the chunk before
 *               have been read, so a chunk is begun after the one before it counts: after the moments'
 *               stamp says so, which it does when its weights, moments and working weights are there. A
 *               chunk that counts is never updated again; a replacement goes on with the next one.
 *
 * Each of these memories carries a stamp of its own (stamp.h), set before the mark: states, gradients, EMA
 * states, moments, staging (one for its moments, one for the rest). Whoever is about to read one because of a
 * mark compares them first.
 *
 * With several hosts (shm/hosts.h) REDUCE(s) ends with local = mark(s) instead of partial. When the exchange process of
 * the rank has marked the step exchanged, TOTAL(s) takes the squares of what has come and sets partial; and UPDATE(s)
 * needs, too, that every host of the epoch has exchanged s. The verdict is the leading host's. The checkpoint is
 * written by the leader; the writers of the others, which stage it like that one, take it for published when that
 * one has, and write it themselves when they have become the leader in between.
 *
 * A rank's gradients are overwritten in FORWARD(s + 1), after every rank has committed s + 1, that
 * is after every reader of step s is done. Likewise its sums on the board.
 *
 * EMA:  INIT makes EMA state start_step (after every rank's INIT, so that it may read theirs).
 *       ADVANCE(e) makes EMA state e from EMA state e - 1 and the weights of state e (needs global
 *       commit >= mark(e)); it overwrites EMA state e - 2, which is staged if it had to be:
 *       UPDATE(e - 1) has waited for that.
 * ckpt: STAGE_MOMENTS(S) copies the moments of state S (needs its global commit, and staging free:
 *       published == staged), then staged_moments = mark(S). STAGE(S) copies the rest of it and EMA state S
 *       (needs EMA's mark), then staged = mark(S). WRITE(S) publishes what is staged. So the moments, which
 *       the ranks wait for first, wait for nobody; a successor that finds them marked leaves them alone, for
 *       UPDATE(S) may be under way.
 */
#pragma once
#include "shm/board.h"

typedef enum lg_action_kind {
    LG_DO_INIT,    /* trainer, ema: make state start_step, then commit = mark(start_step) */
    LG_DO_DECIDE,  /* trainer: call lg_commit_decide(b, step) and ask again */
    LG_DO_FORWARD, /* trainer */
    LG_DO_ADD,     /* trainer */
    LG_DO_REDUCE,  /* trainer; with several hosts into `outgoing`, and mark_local */
    LG_DO_TOTAL,   /* trainer, with several hosts: the squares of `incoming` */
    LG_DO_UPDATE,  /* trainer */
    LG_DO_ADVANCE, /* ema: make EMA state `step` */
    /* ckpt: the first half of a snapshot */
    LG_DO_STAGE_MOMENTS,
    LG_DO_STAGE, /* ckpt */
    LG_DO_WRITE, /* ckpt */
    LG_DO_WAIT,  /* for what `why` says */
    LG_DO_DONE,  /* nothing will ever be left to do in this run */
} lg_action_kind;

/* The one reason that others compare with. */
#define LG_WHY_STAGING "checkpoint staging"

struct lg_action {
    lg_action_kind kind;
    uint64_t step;   /* the s (or e, S) above */
    const char *why; /* of WAIT: "ranks", "gradients of rank 1", "ema", "checkpoint staging" ... */
};

/* The caller checks sample readiness itself before FORWARD. */
struct lg_action lg_trainer_next(lg_board *b, int rank);
struct lg_action lg_ema_next(lg_board *b);
struct lg_action lg_ckpt_next(lg_board *b);

/* Sets verdict[s] if nobody has; returns the flags in force. CHECKPOINT when (s + 1) is a multiple
 * of checkpoint_every, the last step or a drain, unless an earlier checkpoint is not published yet
 * (then only for the last step and a drain); STOP for the last step and a drain; YIELD when lgsup
 * asks for it. Call it when lg_trainer_next() says so. */
unsigned lg_commit_decide(lg_board *b, uint64_t step);
/* Has a rank made its first state? It had opened the window and every rank's memory before. */
bool lg_trainer_began(lg_board *b);
/* Flags of step s, 0 when none are set (or the ring has moved on). */
unsigned lg_commit_verdict(lg_board *b, uint64_t step);
/* May a rank that shall leave go now? Only between steps: before FORWARD of a step whose verdict says
 * YIELD, so that all ranks that leave do it at the same state; or when nothing is left to do. */
bool lg_trainer_may_leave(lg_board *b, int rank);
/* True when the run's final state is known (a STOP verdict, or nothing to do from the start);
 * *ret_state gets it, else it is untouched. */
bool lg_commit_final(lg_board *b, uint64_t *ret_state);
/* True when everything is finished: all ranks at the final state, EMA too, checkpoint published. */
bool lg_commit_complete(lg_board *b);

/* The stores that follow the work. Each asserts that the mark follows from the one before. */
void lg_trainer_mark_init(lg_board *b, int rank);
/* loss_sum: of this rank's samples; stored before the mark, since the process may die right after.
 */
void lg_trainer_mark_grads(lg_board *b, int rank, uint64_t step, struct lg_loss_sum loss_sum);
/* With several hosts: the shard's sum over this host's ranks lies in `outgoing`. */
void lg_trainer_mark_local(lg_board *b, int rank, uint64_t step);
/* sum_squares: of this rank's shard; stored before the mark likewise. */
void lg_trainer_mark_partial(lg_board *b, int rank, uint64_t step,
                             const struct lg_exact_sum *sum_squares);
void lg_trainer_mark_commit(lg_board *b, int rank, uint64_t step);
void lg_ema_mark(lg_board *b, uint64_t state);
void lg_ckpt_mark_staged_moments(lg_board *b, uint64_t state);
void lg_ckpt_mark_staged(lg_board *b, uint64_t state);
void lg_ckpt_mark_published(lg_board *b, uint64_t state);
