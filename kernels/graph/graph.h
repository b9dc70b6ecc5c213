/* A net described once: a list of operations in single-assignment form, recorded from plain calls.
 *
 *     lg_graph *g = lg_graph_new(device);
 *     lg_stream *s = lg_graph_stream(g);
 *     lg_tensor x = lg_graph_bind(g, "x", lg_t2(NULL, LG_F32, 8, 48));
 *     lg_tensor y = lg_graph_value(g, "y", lg_t2(NULL, LG_F32, 8, 96));
 *     lg_linear_forward(s, &(struct lg_linear_forward_args){.x = x, .w = w, .y = y});
 *
 * On the graph's stream an operation does not run: it is checked as always and becomes a node. A tensor there
 * points into a *value*: memory that does not exist yet and is as large as its tensor. A pointer into the middle
 * of one, or other dimensions or strides, are views, made by the same arithmetic as on real memory (lg_at,
 * lg_slice, lg_split). Values are of two kinds:
 *
 *   bound   lies where the caller says at each run: weights, inputs, results
 *   others  lie where lg_graph_compile (program.h) puts them; what is dead gives its place to what comes later,
 *           and an output lies on an input where ops.def allows it and nobody needs that input any more
 *
 * Single assignment: every byte of a value is written by one node, and read by later ones only. Of a bound value
 * what nobody writes is an input. A node may not write where it reads (whether that is done in place is the
 * compiler's matter), nor, but in what differentiation adds (grad.h), add to what is there. Shapes are fixed; there is
 * no control flow. A net that keeps to less is a bug: LG_ASSERT.
 *
 * A graph knows operations, no backend's insides, and no role. */
#pragma once
#include "kernels/device.h"
#include "kernels/ops.h"

typedef struct lg_graph lg_graph;

/* For this device's compute type; it stays the caller's and may be shared. */
lg_graph *lg_graph_new(lg_device *d);
void lg_graph_free(lg_graph **g);
/* Records; the graph's. Takes operations alone, no copies. */
lg_stream *lg_graph_stream(lg_graph *g);
/* A new value of this shape (shape.data is ignored), contiguous; names are for people and need not differ. */
lg_tensor lg_graph_value(lg_graph *g, const char *name, lg_tensor shape);
/* A bound one. Their numbers, from 0 in the order of these calls, are what lg_program_run asks for. */
lg_tensor lg_graph_bind(lg_graph *g, const char *name, lg_tensor shape);

/* A bound one into which every run writes a result, or to which it adds it: program.h, `add`. */
lg_tensor lg_graph_bind_sum(lg_graph *g, const char *name, lg_tensor shape);

/* Memory of the caller's in which a part of a bound sum will lie, and which holds nothing until a node uses that: `bytes` at
 * `at` of lg_program_memory.lent may be values' until then. For runs that overwrite their sums. In the order of their places,
 * those of one sum together; what is not lent stays as it is. */
struct lg_lent {
    int bound; /* the sum's number */
    size_t at, bytes;
    size_t offset; /* bytes in the sum */
};
void lg_graph_lend(lg_graph *g, struct lg_lent part);
/* A bound input whose bytes come for each use: it gets a place in the program's memory, in the forward and in the backward
 * apart, from its first use to its last; with `ahead` from the first use of the one before it (lg_program_input_at). */
void lg_graph_place_input(lg_graph *g, int bound, bool ahead);

/* Writes zeros to t, which is contiguous. */
void lg_graph_zero(lg_graph *g, lg_tensor t);

/* What is recorded until the end belongs to one block of the net, the unit of recomputation. Blocks are
 * numbered from 0; what is recorded outside belongs to none. */
void lg_graph_begin_block(lg_graph *g);
void lg_graph_end_block(lg_graph *g);

/* The tensor of this shape and these strides `elements` of its type behind the start of t: a view of the same
 * value. */
static inline lg_tensor lg_at(lg_tensor t, int64_t elements, lg_tensor shape)
{
    shape.data = t.data ? (char *)t.data + elements * (int64_t)lg_dtype_bytes(shape.dtype) : NULL;
    return shape;
}
