/* What the passes over a graph see of it. Only kernels/graph and its own test include this. */
#pragma once
#include "kernels/graph/exchange.h"
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
    bool sum;        /* bound: what is written there is added, when the run says so */
    int again;       /* the value in whose memory it lies and to which its writer adds; -1: none */
    int next;        /* the value that is so made of this one; -1: none */
    size_t room;     /* of what arrives in an exchange: bytes of the rank with most; 0: of others */
    int first, last; /* nodes: the first that writes, the last that uses; -1: none does */
};

enum lg_node_kind {
    LG_NODE_CALL,
    LG_NODE_REMOVED,
    /* of a value that waits in host memory for its backward (offload.h); args: struct lg_copy_args */
    LG_NODE_OUT,      /* begins to copy it there */
    LG_NODE_OUT_DONE, /* from here on its memory may be another's */
    LG_NODE_IN,       /* begins to copy it into a new value */
    LG_NODE_IN_DONE,  /* from here on that may be read */
    /* a part of a bound sum to which nothing comes (grad.h): zeros, unless the run adds; or what lg_graph_zero says;
     * args: lg_copy_args.t, .is_value */
    LG_NODE_ZERO,
    LG_NODE_EXCHANGE, /* the caller's (exchange.h); args: struct lg_exchange_args */
};

struct lg_copy_args {
    lg_tensor t;    /* the value, or the new one */
    bool is_value;  /* of a zero: of no sum */
    int copy;       /* its number */
    size_t host_at; /* bytes from the start of the host memory */
};

struct lg_exchange_args {
    lg_tensor from, to;
    struct lg_cuts cuts;
};

struct lg_node {
    enum lg_node_kind kind;
    lg_op_id op; /* of a call, else LG_OP_COUNT */
    size_t args; /* bytes from the start of graph.args */
    int block;   /* -1: in none */
    bool backward;
};

struct lg_graph {
    lg_stream stream; /* first: the operations get it */
    struct lg_value *value;
    int n_values, n_bound;
    struct lg_node *node;
    int n_nodes;
    char *args;
    size_t args_bytes;
    struct lg_lent *lent;
    int n_lent;
    bool *is_placed; /* [n_bound], or NULL: lg_graph_place_input */
    bool ahead;
    int n_copies;
    size_t host_bytes;   /* where these wait */
    int block, n_blocks; /* of the nodes to come; -1: none */
    bool backward;       /* the nodes to come belong to it */
    bool repeated;       /* recomputation has been decided: it is too late to fuse */
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

/* Do these two of one value meet? Rows of a packed buffer lie among each other: those of one stride are told apart, of others
 * it is taken that they do. */
bool lg_graph_share_bytes(const struct lg_use *a, const struct lg_use *b);

/* The value in which a tensor of the graph lies, and how many bytes behind its start. */
static inline int lg_graph_value_of(const lg_tensor *t)
{
    return (int)((uintptr_t)t->data >> LG_VALUE_SHIFT) - 1;
}
static inline size_t lg_graph_offset_of(const lg_tensor *t)
{
    return (uintptr_t)t->data & (((uintptr_t)1 << LG_VALUE_SHIFT) - 1);
}
/* Valid until a node is added. */
static inline void *lg_graph_args(const lg_graph *g, int node)
{
    return g->args + g->node[node].args;
}

/* Records a node that is no call. */
void lg_graph_record(lg_graph *g, enum lg_node_kind kind, const void *args, size_t bytes);
/* A new value like this one. */
lg_tensor lg_graph_twin(lg_graph *g, int value);

/* A value that continues t's: it lies there and holds what was there, to which the one node that writes it adds.
 * Nobody may use the old one from then on. Returns t in it. */
lg_tensor lg_graph_again(lg_graph *g, lg_tensor t);

/* For passes that change nodes; call lg_graph_index before `first` and `last` are looked at again. */
void lg_graph_replace(lg_graph *g, int node, lg_op_id op, const void *args);
void lg_graph_remove(lg_graph *g, int node);
/* Appends a copy of a node; returns its number. */
int lg_graph_copy(lg_graph *g, int node);
/* Moves the nodes from `from` to the end before node `to`. */
void lg_graph_move(lg_graph *g, int from, int to);
/* Nodes to be inserted before node `before`, in the order of the array; sorted by that. */
struct lg_insertion {
    int before;
    struct lg_node node;
};
void lg_graph_insert(lg_graph *g, const struct lg_insertion *in, int n);
/* Arguments of a copy, for its nodes. */
size_t lg_graph_add_copy(lg_graph *g, const struct lg_copy_args *args);
/* Takes removed nodes out, finds out anew who writes and uses the values, and checks single assignment. */
void lg_graph_index(lg_graph *g);
/* The same without the check, which looks at all nodes between two that write parts of a value: for a pass that calls it for each
 * block, and the other one at its end. */
void lg_graph_index_again(lg_graph *g);
