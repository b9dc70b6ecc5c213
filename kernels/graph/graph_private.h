/* What the passes over a graph see of it. Only kernels/graph includes this. */
#pragma once
#include "kernels/graph/graph.h"
#include "kernels/op_table.h"

enum { LG_VALUE_SHIFT = 40, LG_VALUE_NAME_BYTES = 48 };

/* Value i begins at the address (i + 1) << LG_VALUE_SHIFT. */
struct lg_value {
    char name[LG_VALUE_NAME_BYTES];
    lg_dtype dtype;
    int rank;
    int64_t dim[LG_RANK_MAX];
    size_t bytes;
    int bound;       /* its number, -1: none */
    int first, last; /* nodes: the first that writes, the last that uses; -1: none does */
};

struct lg_node {
    lg_op_id op;
    size_t args; /* bytes from the start of graph.args */
};

struct lg_graph {
    lg_stream stream; /* first: the operations get it */
    struct lg_value *value;
    int n_values, n_bound;
    struct lg_node *node;
    int n_nodes;
    char *args;
    size_t args_bytes;
};

/* A tensor of a node, with what its operation says of it. */
struct lg_use {
    const struct lg_operand *operand;
    int number, element; /* of the operand, and in it where it is an array */
    const lg_tensor *t;
    int value;
    size_t offset; /* bytes in the value */
};
enum { LG_USES_MAX = LG_OPERANDS_MAX + LG_RANKS_MAX };
/* Those of node n that are there; returns how many. */
int lg_graph_uses(const lg_graph *g, int n, struct lg_use ret[LG_USES_MAX]);
