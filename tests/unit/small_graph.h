/* A small graph with all it needs, for the tests of kernels/graph. What is bound has memory of its own: an input
 * standard normals, other ones for each number and seed; a result NaN; a gradient, which is a bound sum, SMALL_FILL.
 * Samples B, tokens T, D = H d features unless a test says otherwise. Failures end the test. */
#pragma once
#include "kernels/graph/grad.h"
#include "kernels/graph/program.h"

enum { SMALL_BOUND_MAX = 256, SMALL_B = 2, SMALL_T = 3, SMALL_H = 2, SMALL_D = 4 };
#define SMALL_FILL 7.0

struct small_graph {
    lg_device *device;
    lg_stream *stream;
    lg_dtype type;
    uint64_t seed;
    lg_graph *g;
    lg_stream *s; /* g's */
    lg_program *p;
    void *arena, *scratch;
    lg_tensor on[SMALL_BOUND_MAX]; /* what is bound, by number, in the graph */
    void *data[SMALL_BOUND_MAX];
    bool wanted[SMALL_BOUND_MAX];
    int gradient[SMALL_BOUND_MAX]; /* the number of its gradient, once there is one */
    int n, out, dout;
};

/* device: "ref64", "host"; isa may be NULL. */
void small_open(struct small_graph *f, const char *device, const char *isa);
void small_close(struct small_graph *f);
/* Begins an empty graph; what there was is freed. */
void small_begin(struct small_graph *f, uint64_t seed);

/* Shapes of the device's type; without data. */
lg_tensor small_t1(const struct small_graph *f, int64_t a);
lg_tensor small_t2(const struct small_graph *f, int64_t a, int64_t b);
lg_tensor small_t3(const struct small_graph *f, int64_t a, int64_t b, int64_t c);

lg_tensor small_input(struct small_graph *f, const char *name, lg_tensor shape);
/* An input whose gradient is wanted. */
lg_tensor small_wanted(struct small_graph *f, const char *name, lg_tensor shape);
lg_tensor small_ints(struct small_graph *f, const char *name, int64_t n, const int32_t *v);
/* The result that the loss is made of. */
lg_tensor small_out(struct small_graph *f, lg_tensor shape);

/* Nodes; each returns its result, a new value. Rows of x are its last dimension. */
lg_tensor small_linear(struct small_graph *f, lg_tensor x, lg_tensor w, lg_tensor bias, lg_act act);
lg_tensor small_act(struct small_graph *f, lg_tensor x);
void small_act_into(struct small_graph *f, lg_tensor x, lg_tensor y);
lg_tensor small_mul(struct small_graph *f, lg_tensor a, lg_tensor b);
lg_tensor small_add(struct small_graph *f, lg_tensor a, lg_tensor b);
lg_tensor small_norm(struct small_graph *f, lg_tensor x, lg_tensor shift, lg_tensor scale);
lg_tensor small_residual(struct small_graph *f, lg_tensor x, lg_tensor y, lg_tensor gate);
/* q, k, v: (B, T, D), slices of rows perhaps; the result (B, T, D) is a new value. */
lg_tensor small_attention(struct small_graph *f, lg_tensor q, lg_tensor k, lg_tensor v,
                          lg_tensor k_length);
/* A transformer's block with weights of its own, all wanted; mod (B, 6 D): its modulation. */
lg_tensor small_block(struct small_graph *f, lg_tensor x, lg_tensor mod);

/* A graph of this seed, up to its out: differentiable operations on (B, T, D), values that several nodes read, in
 * slices, in halves, by one node twice; weights used twice; frozen parameters; blocks. */
void small_random(struct small_graph *f, uint64_t seed);

/* The backward of <out, dout> for all wanted inputs; dout: another input. */
void small_grad(struct small_graph *f);
/* The graph stays. */
void small_compile(struct small_graph *f);
/* The arena is filled with NaN before a forward, and kept before a backward alone. */
void small_run(struct small_graph *f, enum lg_program_part part, bool add);
/* The program as text, without the backend's matters; the caller frees it. */
char *small_text(struct small_graph *f);
/* Nodes of this operation in such a text. */
int small_count(const char *text, const char *op);
void small_assert_print(struct small_graph *f, const char *expected);

/* The number of a bound tensor, and element e of what is bound as i. */
int small_number(const struct small_graph *f, lg_tensor t);
int64_t small_numel(const struct small_graph *f, int i);
double small_get(const struct small_graph *f, int i, int64_t e);
void small_set(struct small_graph *f, int i, int64_t e, double value);
/* Fills the wanted gradients with SMALL_FILL again. */
void small_fill_gradients(struct small_graph *f);

/* The gradients of a run against finite differences of the forward; `what` for the message. */
void small_check_gradients(struct small_graph *f, const char *what);

/* In a child. */
bool small_aborts(void (*what)(void));
