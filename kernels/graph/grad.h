/* The backward of a graph, derived: appends to the forward that a graph holds the nodes that compute gradients.
 *
 * Nodes are visited in reverse, each by its operation's rule. Contributions to one value are added in that
 * order: by the operation itself where it can add to what is there (ADDS in ops.def), else by lg_add_forward.
 * A gradient may be another one: that of a residual's input is that of its output. What is added to while
 * somebody else still needs it is copied first.
 *
 * A value that is read in parts (the slices of a packed q, k, v; the chunks of a modulation) has one gradient, of
 * which each reader writes its part; the parts must cover it. A forward may name outputs that only a backward
 * needs (pre, lse, o_low): where they are absent they are switched on here.
 *
 * Source of the formulas: kernels/ref64, held to finite differences by tests/unit/test_ops_fd.c. */
#pragma once
#include "kernels/graph/graph.h"

/* Attention over so many queries and keys keeps what its output lost by rounding (ops.def: o_low). Of fewer, it is a larger part of all
 * activations, and sums over fewer keys cancel less. */
enum { LG_GRAD_MANY_TOKENS = 512 };

struct lg_gradient {
    lg_tensor of; /* a whole value of the graph */
    lg_tensor is; /* another of the same shape */
};

/* given: gradients of what the forward made. wanted: bound values of the forward, and what is to get their
 * gradients: made by lg_graph_bind_sum, whole, of its own type. Of a wanted value that the given ones do not depend on
 * nothing is written. Nodes recorded afterwards belong to the backward. */
struct lg_gradients {
    const struct lg_gradient *given, *wanted;
    int n_given, n_wanted;
    /* Parts of wanted values that no node reads, though nodes read others of the value (a rank's part of a weight):
     * their gradients are zeros, with the first that is written there. */
    const lg_tensor *unread;
    int n_unread;
};
void lg_graph_grad(lg_graph *g, const struct lg_gradients *x);
