/* Offload: what the forward of a block keeps for its backward waits in host memory meanwhile.
 *
 * A value is copied out when its last reader in the forward has been enqueued, on a lane beside the computation, and
 * its place is another's when the next block's forward is done; it is copied into a new value when the backward of
 * the block that precedes its reader's begins. So two blocks' values lie in the arena at a time, and each copy has the
 * time of about one block. What is wanted back at once (the last two blocks') stays, and what is small; of the blocks before
 * them as many as the caller wants: it costs their place, and saves their copies.
 *
 * Bits do not change. Called after lg_graph_recompute, before lg_graph_compile. */
#pragma once
#include "kernels/graph/graph.h"

/* bytes_min: smaller values stay; keep: and those of so many blocks, the last ones of the forward, of which two stay in any
 * case. Returns the bytes of host memory. */
size_t lg_graph_offload(lg_graph *g, size_t bytes_min, int keep);
