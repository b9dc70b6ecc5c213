/* Gradients that leave unit by unit (ZeRO-2 and 3): what may be overwritten and what may be added, as pure functions of
 * the board, like those of commit.h. stages/trainer/gradients.h has the memory.
 *
 * The gradients of a step are made unit by unit in the order of the backward, micro-batch after micro-batch, the same
 * on every rank. A *number* counts them: step << 32 | units so far in the step; with the step's last it becomes
 * (step + 1) << 32. Numbers never decrease.
 *
 *   row.given   the rank's gradients below this number have lain in its ring. Writer: the rank, release, when its
 *               stream is done with the unit. Readers: whoever adds, acquire.
 *   row.added   of what all ranks have given below it, this rank has added its piece to its sum. Writer: the rank,
 *               release, when the stream that adds is done. Readers: whoever wants to overwrite, acquire.
 *
 * GIVE(n)  needs every rank's added above the number of what lies where it writes: a place is free when nobody has to
 *          read it any more. Then given = n + 1. What is given is not written again: a rank that must repeat a
 *          micro-batch of which some units are given lets these go elsewhere.
 * ADD(n)   needs every rank's given above n. Reads all ranks' unit and the own sum so far, writes the sum in another
 *          place (a torn one is made again). Then added = n + 1.
 *
 * Both happen within FORWARD(s), while marks of s or s + 1 are all that there are: FORWARD(s) needs every commit of s,
 * REDUCE(s) the own added at the end of s. Nobody who gives waits for another's given, and nobody who adds for another's
 * added, so the rank that is least far can always go on.
 *
 * Dying before a store: the successor writes the same bytes again. After it: it goes on behind. The loss of the
 * micro-batches that are done stands in row.loss_so_far[m & 1], m their number in the step: stored before the last given
 * of a micro-batch, read by a successor, and by who begins a micro-batch again with others (shm/sequence.h). */
#pragma once
#include "shm/board.h"

enum { LG_SCATTER_STEP_BITS = 32 };

static inline uint64_t lg_scatter_begin(uint64_t step)
{
    return step << LG_SCATTER_STEP_BITS;
}
/* The number after `count` of the `all` units of a step. */
static inline uint64_t lg_scatter_number(uint64_t step, uint64_t count, uint64_t all)
{
    return count == all ? lg_scatter_begin(step + 1) : lg_scatter_begin(step) + count;
}
/* How many of them a number of this step, or of its end, says. */
static inline uint64_t lg_scatter_count(uint64_t number, uint64_t step, uint64_t all)
{
    return number >= lg_scatter_begin(step + 1) ? all
                                                : number - LG_MIN(number, lg_scatter_begin(step));
}

/* The least over the ranks. Acquire. */
uint64_t lg_scatter_given_by_all(lg_board *b);
uint64_t lg_scatter_added_by_all(lg_board *b);
/* The own words. */
uint64_t lg_scatter_given(lg_board *b, int rank);
uint64_t lg_scatter_added(lg_board *b, int rank);
/* The stores that follow the work; numbers grow. */
void lg_scatter_mark_given(lg_board *b, int rank, uint64_t number);
void lg_scatter_mark_added(lg_board *b, int rank, uint64_t number);
/* After `micros` micro-batches of the step. */
void lg_scatter_keep_loss(lg_board *b, int rank, uint64_t micros, struct lg_loss_sum loss_sum);
struct lg_loss_sum lg_scatter_loss(lg_board *b, int rank, uint64_t micros);
