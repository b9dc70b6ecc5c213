/* Recomputation: what the forward of a block made need not be kept for its backward; it can be made again.
 *
 * In front of a block's backward the nodes are repeated that make what was dropped, from what was kept: the same
 * operations on the same bytes, so the same bits. What other blocks read (the residual stream between two blocks,
 * and the projection that the fused backward of the next block's norm reads) is always kept. Called after
 * lg_graph_grad and lg_graph_fuse. */
#pragma once
#include "kernels/graph/graph.h"

/* What of a block is dropped; bits. */
enum {
    LG_DROP_NORMS = 1, /* results of norms */
    LG_DROP_MLP = 2,   /* results of linears with an activation, and what stood before it */
    LG_DROP_ALL = 4,   /* everything the block made */
};

/* drop[i]: of block i, in the order of lg_graph_begin_block. */
void lg_graph_recompute(lg_graph *g, const unsigned *drop);

/* What dequantize_rows made is never kept: it is made anew in front of each node that reads it, so that memory holds such
 * matrices one at a time. After lg_graph_recompute. */
void lg_graph_repeat_weights(lg_graph *g);
