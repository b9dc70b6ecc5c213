/* A program as text; see program.h. */
#include "base/check.h"
#include "kernels/graph/program_private.h"
#include <inttypes.h>
#include <stdlib.h>

static void print_dims(int rank, const int64_t *dim, FILE *to)
{
    for (int i = 0; i < rank; i++) fprintf(to, "%s%" PRId64, i ? "," : "", dim[i]);
}

static void print_value(const lg_program *p, int i, FILE *to)
{
    const struct lg_placed *v = &p->value[i];
    fprintf(to, "v%d %s %s ", i, v->of.name, lg_dtype_name(v->of.dtype));
    print_dims(v->of.rank, v->of.dim, to);
    fprintf(to, ": %zu bytes", v->of.bytes);
    if (v->of.bound >= 0)
        fprintf(to, ", bound %d", v->of.bound);
    else if (v->of.first >= 0)
        fprintf(to, " at %zu%s", v->at,
                v->where == LG_PLACE_EXCHANGED ? " of what arrives"
                : v->where == LG_PLACE_LENT    ? " of what is lent"
                                               : "");
    if (v->of.bound < 0 && v->storage != i) fprintf(to, " in place of v%d", v->storage);
    if (v->of.first >= 0) fprintf(to, ", made by n%d", v->of.first);
    if (v->of.last >= 0) fprintf(to, ", used up to n%d", v->of.last);
    fprintf(to, "\n");
}

/* name=v3+64(8,48), of a view with gaps name=v3+64(8,16/48), its row stride; behind > what is written. */
static void print_place(const lg_program *p, const struct lg_place *l, FILE *to)
{
    const lg_tensor *t = (const lg_tensor *)(const void *)(p->args + l->tensor);
    fprintf(to, " %s%s", l->operand->out ? ">" : "", l->operand->name);
    if (l->operand->max) fprintf(to, "[%d]", l->element);
    fprintf(to, "=v%d", l->value);
    if (l->in_value) fprintf(to, "+%zu", l->in_value);
    fputc('(', to);
    print_dims(t->rank, t->dim, to);
    if (!lg_is_contiguous(t)) fprintf(to, "/%" PRId64, lg_row_stride(t, l->operand->row));
    fputc(')', to);
}

/* "n12", "n12 b3" in block 3, "n40 b3 backward": what is made again there has the name of a forward's operation. */
static void print_part(const struct lg_node *node, int n, FILE *to)
{
    fprintf(to, "n%d", n);
    if (node->block >= 0) fprintf(to, " b%d", node->block);
    if (node->backward) fprintf(to, " backward");
}

/* Bytes of the storages that are in use while each node runs; the node with most. */
static int find_peak(const lg_program *p, size_t *ret_bytes)
{
    int most = -1;
    int *last = malloc(sizeof *last * (size_t)LG_MAX(p->n_values, 1));
    LG_ASSERT(last);
    for (int i = 0; i < p->n_values; i++) last[i] = -1;
    for (int i = 0; i < p->n_values; i++)
        last[p->value[i].storage] = LG_MAX(last[p->value[i].storage], p->value[i].of.last);
    *ret_bytes = 0;
    for (int n = 0; n < p->n_nodes; n++) {
        size_t bytes = 0;
        for (int i = 0; i < p->n_values; i++) {
            const struct lg_value *v = &p->value[i].of;
            if (v->bound < 0 && !v->room && p->value[i].storage == i && v->first >= 0 &&
                v->first <= n && n <= last[i])
                bytes += v->bytes;
        }
        if (bytes > *ret_bytes) most = n, *ret_bytes = bytes;
    }
    free(last);
    return most;
}

static double elements(const lg_tensor *t)
{
    return (double)lg_numel(t);
}

static double conv_flops(const struct lg_conv2d_forward_args *a)
{
    return 2 * elements(&a->y) * elements(&a->w) / (double)a->w.dim[0];
}

static double node_flops(lg_op_id op, const void *args)
{
    switch (op) {
    case LG_OP_linear_forward: {
        const struct lg_linear_forward_args *a = args;
        return 2 * elements(&a->y) * (double)a->x.dim[1];
    }
    case LG_OP_linear_backward_data: {
        const struct lg_linear_backward_data_args *a = args;
        return 2 * elements(&a->dx) * (double)a->dy.dim[1];
    }
    case LG_OP_linear_backward_weight: {
        const struct lg_linear_backward_weight_args *a = args;
        return 2 * elements(&a->dw) * (double)a->x.dim[0];
    }
    case LG_OP_attention_forward: { /* q k^T and p v */
        const struct lg_attention_forward_args *a = args;
        return 4 * elements(&a->q) * (double)a->k.dim[1];
    }
    case LG_OP_attention_backward: { /* q k^T again, dp, dq, dk, dv */
        const struct lg_attention_backward_args *a = args;
        return 10 * elements(&a->q) * (double)a->k.dim[1];
    }
    case LG_OP_conv2d_forward:
        return conv_flops(args);
    case LG_OP_conv2d_backward_data: {
        const struct lg_conv2d_backward_data_args *a = args;
        return 2 * elements(&a->dy) * elements(&a->w) / (double)a->w.dim[0];
    }
    case LG_OP_conv2d_backward_weight: {
        const struct lg_conv2d_backward_weight_args *a = args;
        return 2 * elements(&a->dy) * elements(&a->dw) / (double)a->dw.dim[0];
    }
    case LG_OP_conv3d_forward: {
        const struct lg_conv3d_forward_args *a = args;
        return 2 * elements(a->y.rank ? &a->y : &a->normed) * elements(&a->w) / (double)a->w.dim[0];
    }
    case LG_OP_norm_conv2d_forward:
        return conv_flops(&((const struct lg_norm_conv2d_forward_args *)args)->conv);
    default:
        return 0;
    }
}

double lg_program_flops(const lg_program *p)
{
    double sum = 0;
    for (int n = 0; n < p->n_nodes; n++)
        if (p->node[n].kind == LG_NODE_CALL)
            sum += node_flops(p->node[n].op, p->args + p->node[n].args);
    return sum;
}

static void print_cut(const struct lg_cut *c, int degree, FILE *to)
{
    if (c->dim < 0) {
        fprintf(to, "whole");
        return;
    }
    fprintf(to, "dimension %d at", c->dim);
    for (int i = 0; i <= degree; i++) fprintf(to, " %" PRId64, c->at[i]);
}

/* "exchange: rank 0 of 2, dimension 1 at 0 8 16 to dimension 3 at 0 1 2" */
static void print_exchange(const struct lg_cuts *c, FILE *to)
{
    fprintf(to, " exchange: rank %d of %d, ", c->rank, c->degree);
    print_cut(&c->before, c->degree, to);
    fprintf(to, " to ");
    print_cut(&c->after, c->degree, to);
}

static void print_what(const lg_program *p, int n, FILE *to)
{
    static const char *const copies[] = {[LG_NODE_OUT] = "begin to copy to the host",
                                         [LG_NODE_OUT_DONE] = "that copy is done",
                                         [LG_NODE_IN] = "begin to copy from the host",
                                         [LG_NODE_IN_DONE] = "that copy is done"};
    const void *args = p->args + p->node[n].args;
    if (p->node[n].kind == LG_NODE_CALL) {
        const struct lg_op_info *op = lg_op_info(p->node[n].op);
        fprintf(to, " %s", op->name);
        lg_scalars_print(op, args, 9, to);
    } else if (p->node[n].kind == LG_NODE_EXCHANGE) {
        print_exchange(&((const struct lg_exchange_args *)args)->cuts, to);
    } else if (p->node[n].kind == LG_NODE_ZERO) {
        fprintf(to, " zero");
    } else {
        const struct lg_copy_args *a = args;
        fprintf(to, " %s: %d, at %zu", copies[p->node[n].kind], a->copy, a->host_at);
    }
}

void lg_program_print(const lg_program *p, FILE *to)
{
    size_t most;
    int at = 0, peak = find_peak(p, &most);
    for (int i = 0; i < p->n_values; i++) print_value(p, i, to);
    for (int n = 0; n < p->n_nodes; n++) {
        print_part(&p->node[n], n, to);
        print_what(p, n, to);
        fprintf(to, " |");
        for (; at < p->n_places && p->place[at].node == n; at++) print_place(p, &p->place[at], to);
        fprintf(to, "\n");
    }
    fprintf(to, "%d nodes, %d values, arena %zu bytes", p->n_nodes, p->n_values, p->arena_bytes);
    if (peak >= 0) fprintf(to, ", of which n%d uses %zu", peak, most);
    if (p->lent_bytes) fprintf(to, ", %zu bytes of what is lent", p->lent_bytes);
    if (p->exchanged_bytes) fprintf(to, ", %zu bytes of what arrives", p->exchanged_bytes);
    if (p->host_bytes) fprintf(to, ", %zu bytes in host memory", p->host_bytes);
    fprintf(to, "; scratch %zu bytes; %.4g GFLOP\n", p->scratch_bytes, 1e-9 * lg_program_flops(p));
}
