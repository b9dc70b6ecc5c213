/* Recomputation: what the forward of a block made need not be kept for its backward; it can be made again.
 *
 * In a block's backward the nodes are repeated that make what was dropped, from what was kept, each in front of its first
 * reader: the same operations on the same bytes, so the same bits. What other blocks read is always kept, as the residual stream between
 * two blocks and the projection that is added to it, but where the classes below say otherwise. Called after
 * lg_graph_grad and lg_graph_fuse.
 *
 *     LG_DROP_ALL                      x, y of each block: its last residual stream and last projection, which the next
 *                                      block's first node adds and norms, and whose backward reads y
 *     with LG_DROP_RESULTS             x + y alone; the next block repeats its norm of it, and this one is repeated up to y,
 *                                      while the backward of the next still waits for that (a norm alone has the bits that it
 *                                      has behind a residual: ops.def)
 *     with LG_DROP_ENTRY in blocks     nothing of these; in front of their backwards the forwards of the group are
 *     1 .. n - 1 of each n             repeated from what enters its first block, up to what enters its last */
#pragma once
#include "kernels/graph/graph.h"

/* What of a block is dropped; bits. */
enum {
    LG_DROP_NORMS = 1, /* results of norms */
    LG_DROP_MLP = 2,   /* results of linears with an activation, and what stood before it */
    LG_DROP_ALL = 4,   /* everything the block made, for itself */
    LG_DROP_RESULTS =
        8, /* with that: and for a residual with which the next block begins, which keeps the sum */
    LG_DROP_ENTRY =
        16, /* with both, not of the first block: and that sum, with which this one begins */
    /* With ALL: what MLP names is made for its backward by itself, not when the rest of the block is, which makes it, too,
     * where it needs it. Chunks of a hidden layer are then there one at a time. */
    LG_DROP_APART = 32,
};

/* drop[i]: of block i, in the order of lg_graph_begin_block. */
void lg_graph_recompute(lg_graph *g, const unsigned *drop);

/* What dequantize_rows made is never kept: it is made anew in front of each node that reads it, so that memory holds such
 * matrices one at a time. After lg_graph_recompute. */
void lg_graph_repeat_weights(lg_graph *g);
