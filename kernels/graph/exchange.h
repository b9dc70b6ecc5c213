/* Exchanges: a graph may be one rank's part of a computation that P ranks make together, each of a part of the same
 * values. Where it needs what others have made it holds an exchange: a node that gives from a value of its own to all
 * ranks and has a new one afterwards, of what all of them gave.
 *
 *   all-to-all   cut along one dimension before, along another afterwards: own tokens of all heads, then all
 *                tokens of own heads
 *   gather       cut before, whole afterwards
 *   scatter      whole before, but only a term of a sum; afterwards (P, ...): own part of each rank's term, to be added
 *
 * No operation moves the bytes: a program stops at an exchange (lg_program_run_nodes must not meet one), and its caller
 * brings what lg_program_sends names into the memory of every rank, its own as well. What arrives lies in memory
 * that the caller gives, so that peers may have it mapped.
 *
 * Graphs of the ranks differ in how much they have, and in what they have nothing of, never in what is done with an
 * exchange: the same ones come in the same order, are used by the same nodes, and so lie at the same places of their
 * memory, where each has room for the rank with most. An exchange has its place from the exchange before on: as soon as a rank has what all others gave to exchange i - 1, its part of
 * exchange i may be written into their memory, whether they have come to it or not. Only for exchange 0 the caller
 * must know that the others' last run is over.
 *
 * Differentiation turns an exchange round: all-to-all the other way, a gather into a scatter whose parts are added in
 * rank order. What a rank's backward makes of what all ranks hold alike (weights, conditions) is its term of a sum. */
#pragma once
#include "kernels/graph/program.h"

/* Rank p has [at[p], at[p + 1]) of dimension dim; dim -1: all of all. */
struct lg_cut {
    int dim;
    int64_t at[LG_RANKS_MAX + 1];
};
struct lg_cuts {
    int rank, degree; /* which one of how many */
    struct lg_cut before, after;
};
/* n things of `each` elements in a row, as evenly as whole things go: rank p's begin at p n / degree. */
struct lg_cut lg_cut_evenly(int dim, int64_t n, int64_t each, int degree);

/* Records an exchange of `from`, which is contiguous; returns what there is afterwards, a new value. */
lg_tensor lg_graph_exchange(lg_graph *g, const char *name, const struct lg_cuts *c, lg_tensor from);

/* ---- of a program ---- */

/* Exchanges are numbered from 0 in the order of the nodes. */
int lg_program_exchanges(const lg_program *p);
bool lg_program_is_exchange(const lg_program *p, int node);
/* What every rank needs for what arrives, 64-byte aligned: lg_program_memory.exchanged. */
size_t lg_program_exchanged_bytes(const lg_program *p);

/* A part of an exchange on its way: two tensors of one shape, rows apart. */
struct lg_sent {
    lg_tensor from; /* in this rank's memory */
    lg_tensor to;   /* in the receiver's */
};
/* What this rank gives rank `to`, whose memory for what arrives is mapped here at `theirs`. */
struct lg_sent lg_program_sends(const lg_program *p, const struct lg_program_memory *m,
                                int exchange, int to, void *theirs);
/* Where exchange i arrives in the memory for it: bytes. */
struct lg_arrival {
    size_t at, bytes;
};
struct lg_arrival lg_program_arrival(const lg_program *p, int exchange);
/* Bytes that this rank gives to others in one run. */
size_t lg_program_traffic(const lg_program *p);
/* Enqueues the copy, a copy_rows for all rows that lie evenly apart in both. It also takes a rank's part of a whole. */
void lg_send(lg_stream *s, struct lg_sent x);
