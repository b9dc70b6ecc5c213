/* See recompute.h.
 *
 * Per block, the last one first: the values that are dropped are those of its forward nodes that the classes name
 * and no other block reads. From those that the backward reads the walk goes back through the block's nodes to
 * what is kept; these nodes are repeated, in their order, each before its first reader, with new values for all their
 * results, and the readers get these. With LG_DROP_ENTRY the same is then done with groups of blocks, as if each were one. */
#include "kernels/graph/recompute.h"
#include "base/check.h"
#include "kernels/graph/graph_private.h"
#include <stdlib.h>
#include <string.h>

struct repeat {
    lg_graph *g;
    const unsigned *drop; /* by block */
    int first, last;      /* blocks: one, or those of a group */
    int n_values;         /* before anything was repeated */
    bool *dropped, *needed;
    lg_tensor *again; /* by value: its second making; rank 0: none */
};

static unsigned class_of(const lg_graph *g, int node, const struct lg_use *out)
{
    const char *name = out->operand->name;
    switch (g->node[node].op) {
    case LG_OP_norm_modulate_forward:
    case LG_OP_residual_norm_forward:
    case LG_OP_rms_norm_forward:
    case LG_OP_layer_norm_forward:
    case LG_OP_group_norm_forward:
        return strstr(name, "out") ? 0 : LG_DROP_NORMS;
    case LG_OP_linear_forward: {
        const struct lg_linear_forward_args *a = lg_graph_args(g, node);
        return a->act != LG_ACT_NONE ? LG_DROP_MLP : 0;
    }
    case LG_OP_glu_forward:
        return LG_DROP_MLP;
    default:
        return 0;
    }
}

static bool is_inside(const struct repeat *r, int block)
{
    return r->first <= block && block <= r->last;
}

static bool is_forward_inside(const struct repeat *r, int node)
{
    return !r->g->node[node].backward && is_inside(r, r->g->node[node].block);
}

static bool is_of_residual(const struct lg_use *u)
{
    return !strncmp(u->operand->name, "residual.", 9);
}

static bool is_made_in(const lg_graph *g, const lg_tensor *t, int from, int to)
{
    const int node = g->value[lg_graph_value_of(t)].first,
              block = node < 0 ? -1 : g->node[node].block;
    return from <= block && block <= to;
}

/* Does this node join blocks [from, to], in which it is, to those before: by a residual of what these made, and the first
 * norm in here? Its sum is what enters the blocks. */
static bool joins(const lg_graph *g, int node, int from, int to)
{
    if (g->node[node].op != LG_OP_residual_norm_forward) return false;
    const struct lg_residual_norm_forward_args *a = lg_graph_args(g, node);
    return !is_made_in(g, &a->residual.x, from, to) && !is_made_in(g, &a->residual.y, from, to);
}

/* With LG_DROP_RESULTS that sum is kept, and the norm alone is repeated. */
static bool is_entry(const struct repeat *r, int node)
{
    return (r->drop[r->first] & LG_DROP_RESULTS) && joins(r->g, node, r->first, r->last);
}

/* Is what this residual added up kept, so that a norm of it is all that has to be repeated? Read and write are then half of
 * the bytes. Only once find_dropped is done. */
static bool repeats_norm_alone(const struct repeat *r, int node)
{
    if (r->g->node[node].op != LG_OP_residual_norm_forward) return false;
    const struct lg_residual_norm_forward_args *a = lg_graph_args(r->g, node);
    return is_entry(r, node) || !r->dropped[lg_graph_value_of(&a->residual.out)];
}

/* What counts of a node that is repeated whole, or its norm alone. */
static int uses_of(const struct repeat *r, int node, bool norm_alone,
                   struct lg_use use[LG_USES_MAX])
{
    const int count = lg_graph_uses(r->g, node, use);
    int n = 0;
    for (int i = 0; i < count; i++)
        if (!norm_alone || !is_of_residual(&use[i])) use[n++] = use[i];
    return n;
}

/* Is this node, elsewhere in the forward, content with what is made here being dropped? Who joins its block to these is: it
 * keeps its sum instead, unless that is made again with all else. */
static bool keeps_sum(const struct repeat *r, int node, const struct lg_use *u)
{
    const lg_graph *g = r->g;
    const int block = g->node[node].block;
    const unsigned of = block < 0 ? 0 : r->drop[block];
    const bool repeats_it = (of & (LG_DROP_ALL | LG_DROP_NORMS)) && !(of & LG_DROP_RESULTS);
    return g->node[node].op == LG_OP_residual_norm_forward && is_of_residual(u) &&
           !u->operand->out && !repeats_it && (block < 0 || joins(g, node, block, block));
}

/* What another block's node uses is kept: it reads that, or has made a part of it. */
static void find_dropped(struct repeat *r, unsigned classes)
{
    struct lg_use use[LG_USES_MAX];
    const bool results = classes & LG_DROP_RESULTS;
    for (int own = 1; own >= 0; own--)
        for (int n = 0; n < r->g->n_nodes && !r->g->node[n].backward; n++) {
            if (is_forward_inside(r, n) != own) continue;
            const int count = uses_of(r, n, own && is_entry(r, n), use);
            for (int i = 0; i < count; i++)
                if (!own)
                    r->dropped[use[i].value] &= results && keeps_sum(r, n, &use[i]);
                else if (use[i].operand->out && r->g->value[use[i].value].bound < 0 &&
                         (classes & (LG_DROP_ALL | class_of(r->g, n, &use[i]))))
                    r->dropped[use[i].value] = true;
        }
}

/* The first node of the backward that reads something dropped; marks all that is read there. -1: none. */
static int find_readers(struct repeat *r)
{
    struct lg_use use[LG_USES_MAX];
    int first = -1;
    for (int n = 0; n < r->g->n_nodes; n++) {
        int count = r->g->node[n].backward ? lg_graph_uses(r->g, n, use) : 0;
        for (int i = 0; i < count; i++) {
            if (use[i].value >= r->n_values || !r->dropped[use[i].value]) continue;
            r->needed[use[i].value] = true;
            if (first < 0) first = n;
        }
    }
    return first;
}

/* Marks what has to be made for what is needed; returns which nodes are to be repeated. */
static bool *find_repeated(struct repeat *r)
{
    struct lg_use use[LG_USES_MAX];
    bool *repeated = calloc((size_t)LG_MAX(r->g->n_nodes, 1), sizeof *repeated);
    LG_ASSERT(repeated);
    for (int n = r->g->n_nodes - 1; n >= 0; n--) {
        if (!is_forward_inside(r, n)) continue;
        const int count = uses_of(r, n, repeats_norm_alone(r, n), use);
        for (int i = 0; i < count; i++)
            repeated[n] |= use[i].operand->out && r->needed[use[i].value];
        for (int i = 0; repeated[n] && i < count; i++)
            if (!use[i].operand->out && r->dropped[use[i].value]) r->needed[use[i].value] = true;
    }
    return repeated;
}

/* The tensor's view of the value that was made again. */
static lg_tensor moved(const struct repeat *r, const struct lg_use *u)
{
    lg_tensor t = *u->t;
    t.data = (char *)r->again[u->value].data + u->offset;
    return t;
}

/* Records node n once more, its results in new values, its operands in those where there are some. */
static void repeat_node(struct repeat *r, int n)
{
    struct lg_use use[LG_USES_MAX];
    int copy = lg_graph_copy(r->g, n);
    if (repeats_norm_alone(r, n)) {
        const struct lg_residual_norm_forward_args both =
            *(struct lg_residual_norm_forward_args *)lg_graph_args(r->g, copy);
        lg_graph_replace(r->g, copy, LG_OP_norm_modulate_forward, &both.norm);
    }
    int count = lg_graph_uses(r->g, copy, use);
    for (int i = 0; i < count; i++) { /* these calls move the values, not the arguments */
        if (use[i].operand->out && !r->again[use[i].value].rank)
            r->again[use[i].value] = lg_graph_twin(r->g, use[i].value);
    }
    for (int i = 0; i < count; i++)
        if (r->again[use[i].value].rank) *(lg_tensor *)use[i].t = moved(r, &use[i]);
    r->g->node[copy].backward = true;
}

static void read_again(struct repeat *r, int from, int to)
{
    struct lg_use use[LG_USES_MAX];
    for (int n = from; n < to; n++) {
        int count = r->g->node[n].backward ? lg_graph_uses(r->g, n, use) : 0;
        for (int i = 0; i < count; i++)
            if (use[i].value < r->n_values && r->again[use[i].value].rank &&
                r->dropped[use[i].value])
                *(lg_tensor *)use[i].t = moved(r, &use[i]);
    }
}

/* Must node a stay in front of b? One of them makes something that both use. */
static bool must_precede(const lg_graph *g, int a, int b)
{
    struct lg_use of_a[LG_USES_MAX], of_b[LG_USES_MAX];
    const int n = lg_graph_uses(g, a, of_a), m = lg_graph_uses(g, b, of_b);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < m; k++) {
            const struct lg_use *x = &of_a[i], *y = &of_b[k];
            if (x->value != y->value || !lg_graph_share_bytes(x, y)) continue;
            if (x->operand->out || y->operand->out) return true;
        }
    return false;
}

/* Moves each of the nodes [from, to), the last one first, to where what it makes is used, so that it takes memory from there
 * on alone. What ranks exchange stays where it is, since its order must be the same on all of them. */
static void sink(lg_graph *g, int from, int to)
{
    for (int n = to - 1; n >= from; n--) {
        const struct lg_node node = g->node[n];
        int last = n;
        if (node.kind != LG_NODE_CALL) continue;
        while (last + 1 < g->n_nodes && !must_precede(g, n, last + 1)) last++;
        if (last + 1 == g->n_nodes) continue;
        memmove(g->node + n, g->node + n + 1, (size_t)(last - n) * sizeof node);
        g->node[last] = node;
    }
}

static void recompute_blocks(lg_graph *g, const unsigned *drop, int from, int to, unsigned classes)
{
    size_t n_values = (size_t)LG_MAX(g->n_values, 1);
    struct repeat r = {.g = g, .drop = drop, .first = from, .last = to, .n_values = g->n_values};
    r.dropped = calloc(n_values, sizeof *r.dropped);
    r.needed = calloc(n_values, sizeof *r.needed);
    r.again = calloc(n_values, sizeof *r.again);
    LG_ASSERT(r.dropped && r.needed && r.again);
    find_dropped(&r, classes);
    int first = find_readers(&r);
    if (first >= 0) {
        bool *repeated = find_repeated(&r);
        int nodes = g->n_nodes;
        for (int n = 0; n < nodes && !g->node[n].backward; n++)
            if (repeated[n]) repeat_node(&r, n);
        read_again(&r, first, nodes);
        const int more = g->n_nodes - nodes;
        lg_graph_move(g, nodes, first);
        sink(g, first, first + more);
        free(repeated);
    }
    free(r.dropped);
    free(r.needed);
    free(r.again);
    lg_graph_index_again(g);
}

void lg_graph_recompute(lg_graph *g, const unsigned *drop)
{
    g->repeated = true;
    for (int b = 0; b < g->n_blocks; b++) {
        const unsigned whole = LG_DROP_ALL | LG_DROP_RESULTS;
        LG_ASSERT(!(drop[b] & (LG_DROP_RESULTS | LG_DROP_APART)) || (drop[b] & LG_DROP_ALL));
        LG_ASSERT(!(drop[b] & LG_DROP_ENTRY) || (b && (drop[b] & drop[b - 1] & whole) == whole));
    }
    for (int b = g->n_blocks - 1; b >= 0; b--) {
        if (drop[b] & LG_DROP_APART) recompute_blocks(g, drop, b, b, LG_DROP_MLP);
        if (drop[b]) recompute_blocks(g, drop, b, b, drop[b]);
    }
    for (int b = g->n_blocks - 1, last = b; b >= 0; b--) {
        if (drop[b] & LG_DROP_ENTRY) continue;
        if (b < last && drop[b]) recompute_blocks(g, drop, b, last, drop[b]);
        last = b - 1;
    }
    lg_graph_index(g);
}

/* ---- matrices of 8 bits ---- */

static bool dequantizes(const lg_graph *g, int node)
{
    return node >= 0 && g->node[node].op == LG_OP_dequantize_rows;
}

/* What made this matrix once more, into a new value that use number i of the node reads from now on. */
static struct lg_node make_for(lg_graph *g, int node, int i)
{
    struct lg_use use[LG_USES_MAX];
    lg_graph_uses(g, node, use);
    const lg_tensor again = lg_graph_twin(g, use[i].value);
    const int copy = lg_graph_copy(g, g->value[use[i].value].first);
    struct lg_node made = g->node[copy];
    ((struct lg_dequantize_rows_args *)lg_graph_args(g, copy))->w.data = again.data;
    lg_graph_uses(g, node, use); /* the copy has moved the arguments */
    ((lg_tensor *)use[i].t)->data = (char *)again.data + use[i].offset;
    made.block = g->node[node].block;
    made.backward = g->node[node].backward;
    lg_graph_remove(g, copy);
    return made;
}

void lg_graph_repeat_weights(lg_graph *g)
{
    const int nodes = g->n_nodes;
    struct lg_insertion *in = calloc((size_t)LG_MAX(nodes, 1) * 2, sizeof *in);
    int made = 0;
    LG_ASSERT(in);
    for (int n = 0; n < nodes; n++) {
        struct lg_use use[LG_USES_MAX];
        const int count = lg_graph_uses(g, n, use);
        for (int i = 0; i < count; i++) {
            if (use[i].operand->out || !dequantizes(g, g->value[use[i].value].first)) continue;
            LG_ASSERT(made < 2 * nodes);
            in[made++] = (struct lg_insertion){.before = n, .node = make_for(g, n, i)};
        }
    }
    for (int n = 0; n < nodes; n++)
        if (dequantizes(g, n)) lg_graph_remove(g, n);
    lg_graph_insert(g, in, made);
    lg_graph_index(g);
    free(in);
}
