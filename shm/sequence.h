/* Ranks that compute a micro-batch together, each on its part of the sequence (stages/trainer/exchanges.h): what they
 * may write into each other's memory, and how they begin again when one of them has died; as functions of the board,
 * like those of commit.h. The ranks [k P, (k + 1) P) are a *sequence group* of degree P.
 *
 * What members give each other within a micro-batch is not kept, so they share its fate: with a new process in the group
 * all begin again together. There is nobody who decides it:
 *
 *   row.lives    processes of this rank so far. Writer: the process that comes, before anything else. It comes after
 *                its predecessor's pidfd has fired, so nothing of that is on its way any more. The sum over the members is
 *                the group's *epoch*: it grows with each new process, and is the same for all who look.
 *   row.joined   {epoch, micro-batch}: this process writes no more into others' memory for an earlier epoch (its stream is
 *                done), and wants to begin with that micro-batch, the first that it has not wholly given away. Release.
 *   row.sent     {epoch, number}: how far it has come in that epoch, below. Release, after its stream is done.
 *   row.made     {epoch, step}: its gradient of the step is whole, made in that epoch. Release.
 *
 * Micro-batches are numbered over the run: step M + m. An epoch e begins for a member when it sees {e, .} in every member's
 * `joined`: with the least of the micro-batches there, which stands, since nobody joins an epoch twice; or with the first of
 * its step, when that is later: who has joined in the step before, and then found that all is made there, has said a
 * micro-batch of that one. It stores sent = {e, number of that micro-batch's begin}. A micro-batch with X exchanges has the
 * numbers g (X + 1) + i:
 *
 *   SEND(g, i)   writes its part of exchange i into every member's memory; needs every member's sent >= {e, g (X + 1) + i}:
 *                for i = 0, that all have done with the micro-batch before; else, that they have sent exchange i - 1,
 *                from which on the place of the next one is free (kernels/graph/exchange.h). Then sent = .. + i + 1.
 *   GO ON        behind exchange i needs every member's sent >= {e, g (X + 1) + i + 1}.
 *   END(g)       its stream is done with the micro-batch: sent = {e, (g + 1) (X + 1)}.
 *
 * A member that sees another epoch stops where it is, waits for its stream, and joins that one. What is given away already
 * (shm/scatter.h) is not given again, only computed.
 *
 * The end of FORWARD(s): when the words `made` of all members are equal and of step s, all have made their gradients in one
 * epoch, and each may mark them (grads). Whoever looks asks this first, before the epoch: then nobody begins again what
 * another takes for done. For an epoch only begins when all have joined it, and who has joined it stores no `made` of an
 * earlier one any more, and who has stored the last `made` asks before it joins.
 *
 * Dying before a store: the successor is of a new epoch, in which all begin again. After `made`: the successor finds the
 * words equal, or all begin again. Words are written by the row's process alone and never decrease. */
#pragma once
#include "shm/board.h"

enum { LG_SEQUENCE_EPOCH_SHIFT = 40 };

/* A process of this rank has come. */
void lg_sequence_enter(lg_board *b, int rank);
uint64_t lg_sequence_epoch(lg_board *b, int rank);
void lg_sequence_join(lg_board *b, int rank, uint64_t epoch, uint64_t micro);
/* Have all joined it? Then *ret_micro is the one to begin with. first: of the step. */
bool lg_sequence_begins(lg_board *b, int rank, uint64_t epoch, uint64_t first, uint64_t *ret_micro);
void lg_sequence_send(lg_board *b, int rank, uint64_t epoch, uint64_t number);
/* Have all come so far? */
bool lg_sequence_sent(lg_board *b, int rank, uint64_t epoch, uint64_t number);
void lg_sequence_mark_made(lg_board *b, int rank, uint64_t epoch, uint64_t step);
bool lg_sequence_is_made(lg_board *b, int rank, uint64_t step);
