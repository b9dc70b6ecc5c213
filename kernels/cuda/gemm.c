/* Matrix products by cuBLASLt, with one pinned algorithm per problem.
 *
 * Design: when all rows and pointers lie on 16 bytes, cuBLASLt is asked: the first time a problem is
 * seen (when a net is planned on a dry stream) its candidates are timed on noise of the same shape and
 * the fastest is pinned (algos.h). cuBLASLt proposes eight at most; for long products its other tiles
 * and cluster shapes are tried too, and ever fewer meet again in ever longer turns, since under load the power
 * limit of the GPU decides, and not the clock at which a short run ends: on an H200 at 690 W the fastest in long
 * runs had been 9th, 17th, 27th and 29th of the first, and took 2 to 4 % less than the best of their first six to
 * ten. (A whole step at that limit gains less: what counts there is energy.) An epilogue that could also be a launch
 * of its own is timed against that, and pinned as "none" where it loses.
 *
 * Pieces: a long weight gradient is also tried with its output cut along the longer side into two to four equal
 * pieces, all done by one call, as a batch. There 4608 x 1536 over 32768 tokens took 0.670 ms in three pieces and
 * 0.748 whole without split-K, 8192 x 2048 over 9984 tokens 0.484 in two and 0.497 whole; others are faster whole.
 * Each sum runs over the same k in the same order, so an algorithm gives the same bits in pieces.
 *
 * Determinism: candidates that split the inner dimension are left out, except for weight gradients and for dx and
 * adapters' h of few elements, which may be cut along k (split-K): the partial sums meet in a workspace and are then
 * added in order; none uses atomics. All rows are split alike, so a row of y or dx does not depend on its place or its
 * neighbours.
 *
 * tf32: cuBLASLt rounds both operands to nearest, to 11 bits (what tests measure fits nothing else). In
 * simulations that is an error of 2.94e-4 in the 2-norm for normal values, 2.61e-4 for uniform ones, and
 * one product's scatters about it by a relative 0.7 sqrt(1/MN + 1/MK + 1/NK). Where one of the three
 * matrices has few values (lg_cuda_enough_for_tf32) that leads beyond 3e-4; such a product waits for
 * memory or is over at once, and is done in fp32. (GELU or SiLU behind a product makes of 2.94e-4 up to
 * 3.05e-4, where values about 0.1 to 1 meet its bend.) Attention of wide heads would meet two such
 * errors, 4.1e-4, and asks for fp32.
 *
 * fp32: what a sum of k products loses by rounding grows with the root of k, as it is added up one by one. So long sums are made
 * of pieces of at most SUM_MAX products, one call each, which are added up in the output, in order.
 *
 * cuBLASLt is column-major: D (m, n) of ours is its D^T (n, m) = op(B) op(A). */
#include "kernels/cuda/gemm.h"
#include "base/heartbeat.h"
#include "base/log.h"
#include "kernels/cuda/algos.h"
#include <assert.h>
#include <cublasLt.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROPOSED_MAX = 24, OTHERS_MAX = 384, PLANS_MAX = 4096 };
enum { PIECES_MAX = 4, PIECE_MULTIPLE = 128 }; /* of the output; rows or columns of one */
enum { CANDIDATES_MAX = PIECES_MAX * (PROPOSED_MAX + OTHERS_MAX) };
enum { RUNS = 3, LONG_RUNS = 15 };
enum { SUM_MAX = 256 };
#define LONG_FLOPS    2e10 /* from here on every tile is tried */
#define WORKSPACE_MAX ((size_t)32 << 20)

/* What decides an algorithm. Compared as bytes: zero it first. */
struct problem {
    int64_t m, n, k, lda, ldb, ldd, batch, next_a, next_b, next_d; /* batch >= 1 */
    int32_t in, out, a_rows, b_rows, tf32, split_k;
    int32_t epilogue;
    int32_t side; /* BIAS_GELU: keeps the sum before GELU. BIAS_GRADIENT: type of the gradient */
};
struct plan {
    struct problem of;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
    int pieces; /* equal ones of the output, along its longer side; 1: the whole */
    bool none;  /* cuBLASLt has nothing: own kernel */
};
struct lg_cuda_gemm {
    lg_cuda_device *device;
    cublasLtHandle_t lt;
    pthread_mutex_t mutex;
    struct plan *plans;
    int n_plans;
};

#define LT(call)                                                                                   \
    do {                                                                                           \
        cublasStatus_t s_ = (call);                                                                \
        if (s_ != CUBLAS_STATUS_SUCCESS)                                                           \
            lg_cuda_fatal(#call, cublasLtGetStatusString(s_), __FILE__, __LINE__);                 \
    } while (0)

int lg_cuda_gemm_open(lg_cuda_device *d, struct lg_cuda_gemm **ret)
{
    struct lg_cuda_gemm *g = calloc(1, sizeof *g);
    if (!g) return LG_FAIL(LG_ERR_NOSPACE, "no memory for cuBLASLt's plans");
    g->device = d;
    pthread_mutex_init(&g->mutex, NULL);
    cublasStatus_t s = cublasLtCreate(&g->lt);
    if (s != CUBLAS_STATUS_SUCCESS) {
        free(g);
        return LG_FAIL(LG_ERR_FAILED, "cuBLASLt does not start: %s", cublasLtGetStatusString(s));
    }
    *ret = g;
    return 0;
}

void lg_cuda_gemm_close(struct lg_cuda_gemm **g)
{
    if (!*g) return;
    cublasLtDestroy((*g)->lt);
    pthread_mutex_destroy(&(*g)->mutex);
    free((*g)->plans);
    free(*g);
    *g = NULL;
}

size_t lg_cuda_gemm_version(void)
{
    return cublasLtGetVersion();
}

/* ---- a problem in cuBLASLt's words ---- */

static cudaDataType_t data_type(int32_t t)
{
    return t == LG_F32 ? CUDA_R_32F : t == LG_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* On 16 bytes everywhere? */
static bool fits(const struct lg_cuda_product *x)
{
    const struct cuda_any_gemm *g = &x->g;
    int64_t e = (int64_t)lg_dtype_bytes(g->in), lda = g->sa_k == 1 ? g->sa_m : g->sa_k;
    int64_t ldb = g->sb_k == 1 ? g->sb_n : g->sb_k, out = (int64_t)lg_dtype_bytes(g->out);
    const bool next = x->batch <= 1 || (x->next_a * e % 16 == 0 && x->next_b * e % 16 == 0 &&
                                        x->next_d * out % 16 == 0);
    return lg_cuda_aligned_16(g->a) && lg_cuda_aligned_16(g->b) && lg_cuda_aligned_16(g->d) &&
           lda * e % 16 == 0 && ldb * e % 16 == 0 && g->ldd * out % 16 == 0 && next;
}

static struct problem problem_of(const lg_cuda_device *d, const struct lg_cuda_product *x)
{
    const struct cuda_any_gemm *g = &x->g;
    struct problem p;
    memset(&p, 0, sizeof p);
    p.m = g->m, p.n = g->n, p.k = g->k;
    p.a_rows = g->sa_k == 1, p.b_rows = g->sb_k == 1;
    p.lda = p.a_rows ? g->sa_m : g->sa_k;
    p.ldb = p.b_rows ? g->sb_n : g->sb_k;
    p.ldd = g->ldd;
    p.batch = 1;
    if (x->batch > 1) {
        p.batch = x->batch;
        p.next_a = x->next_a, p.next_b = x->next_b, p.next_d = x->next_d;
    }
    p.in = (int32_t)g->in, p.out = (int32_t)g->out;
    p.split_k = x->split_k;
    p.tf32 = d->tf32 && !x->exact && lg_cuda_enough_for_tf32(g->m * g->n, g->m * g->k, g->n * g->k);
    p.epilogue = (int32_t)x->epilogue;
    if (p.epilogue == BIAS_GELU) p.side = x->keep_pre;
    if (p.epilogue == BIAS_GRADIENT) p.side = (int32_t)x->bias_type;
    return p;
}

struct words {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
};

struct operands {
    const void *a, *b;
    void *d, *workspace;
    void *bias; /* read, or with BIAS_GRADIENT written: sums of a over k */
    void *pre;  /* with BIAS_GELU: the sum before GELU, where kept */
    float beta;
};

static void put_epilogue(const struct problem *p, const struct operands *x, struct words *w)
{
    static const cublasLtEpilogue_t KINDS[] = {
        [PLAIN] = CUBLASLT_EPILOGUE_DEFAULT,
        [BIAS] = CUBLASLT_EPILOGUE_BIAS,
        [BIAS_GELU] = CUBLASLT_EPILOGUE_GELU_BIAS,
        [BIAS_GRADIENT] = CUBLASLT_EPILOGUE_BGRADB,
    };
    cublasLtEpilogue_t kind = KINDS[p->epilogue];
    if (p->epilogue == BIAS_GELU && p->side) kind = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
#define PUT(what, value)                                                                           \
    LT(cublasLtMatmulDescSetAttribute(&w->desc, CUBLASLT_MATMUL_DESC_##what, &value, sizeof value))
    PUT(EPILOGUE, kind);
    if (p->epilogue == PLAIN) return;
    PUT(BIAS_POINTER, x->bias);
    if (p->epilogue == BIAS_GELU && p->side) {
        PUT(EPILOGUE_AUX_POINTER, x->pre);
        PUT(EPILOGUE_AUX_LD, p->ldd);
    }
    if (p->epilogue == BIAS_GRADIENT) {
        cudaDataType_t type = data_type(p->side);
        PUT(BIAS_DATA_TYPE, type);
    }
#undef PUT
}

/* `batch` matrices, `next` elements apart. */
static void repeat(cublasLtMatrixLayoutOpaque_t *layout, int64_t batch, int64_t next)
{
    int32_t count = (int32_t)batch;
    LT(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                        sizeof count));
    LT(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &next,
                                        sizeof next));
}

/* The longer side is cut into whole tiles, and no piece is narrower than the other side. */
static bool can_be_cut(const struct problem *p, int pieces)
{
    int64_t longer = LG_MAX(p->m, p->n), shorter = LG_MIN(p->m, p->n);
    return p->split_k && p->batch == 1 && p->epilogue == PLAIN && pieces >= 2 &&
           pieces <= PIECES_MAX && longer % (pieces * PIECE_MULTIPLE) == 0 &&
           longer / pieces >= shorter;
}

/* The problem as it is asked: pieces are a batch, which shares the operand that is not cut. */
static struct problem asked(const struct plan *plan)
{
    struct problem p = plan->of;
    if (plan->pieces == 1) return p;
    p.batch = plan->pieces;
    if (p.m > p.n) {
        p.m /= p.batch;
        p.next_a = p.m * (p.a_rows ? p.lda : 1), p.next_d = p.m * p.ldd;
    } else {
        p.n /= p.batch;
        p.next_b = p.n * (p.b_rows ? p.ldb : 1), p.next_d = p.n;
    }
    return p;
}

static void put_into_words(const struct plan *plan, const struct operands *x, struct words *w)
{
    const struct problem in_pieces = asked(plan), *p = &in_pieces;
    cublasComputeType_t compute = p->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasOperation_t ta = p->b_rows ? CUBLAS_OP_T : CUBLAS_OP_N; /* theirs, A: our b */
    cublasOperation_t tb = p->a_rows ? CUBLAS_OP_N : CUBLAS_OP_T;
    LT(cublasLtMatmulDescInit(&w->desc, compute, CUDA_R_32F));
    LT(cublasLtMatmulDescSetAttribute(&w->desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta));
    LT(cublasLtMatmulDescSetAttribute(&w->desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb));
    put_epilogue(p, x, w);
    LT(cublasLtMatrixLayoutInit(&w->a, data_type(p->in), (uint64_t)(p->b_rows ? p->k : p->n),
                                (uint64_t)(p->b_rows ? p->n : p->k), p->ldb));
    LT(cublasLtMatrixLayoutInit(&w->b, data_type(p->in), (uint64_t)(p->a_rows ? p->k : p->m),
                                (uint64_t)(p->a_rows ? p->m : p->k), p->lda));
    LT(cublasLtMatrixLayoutInit(&w->d, data_type(p->out), (uint64_t)p->n, (uint64_t)p->m, p->ldd));
    if (p->batch == 1) return;
    repeat(&w->a, p->batch, p->next_b);
    repeat(&w->b, p->batch, p->next_a);
    repeat(&w->d, p->batch, p->next_d);
}

static cublasStatus_t multiply(struct lg_cuda_gemm *g, const struct words *w,
                               const struct plan *plan, const struct operands *x,
                               cudaStream_t stream)
{
    float one = 1;
    return cublasLtMatmul(
        g->lt, (cublasLtMatmulDesc_t)&w->desc, &one, x->b, (cublasLtMatrixLayout_t)&w->a, x->a,
        (cublasLtMatrixLayout_t)&w->b, &x->beta, x->d, (cublasLtMatrixLayout_t)&w->d, x->d,
        (cublasLtMatrixLayout_t)&w->d, &plan->algo, x->workspace, plan->workspace, stream);
}

/* ---- the choice ---- */

/* The output is cut, or k is split: not both. */
static bool may_split_k(const struct plan *plan)
{
    return plan->of.split_k && plan->pieces == 1;
}

/* No split-K, or partial sums that meet in the workspace when the problem allows them. */
static bool deterministic(const struct plan *plan)
{
    uint32_t scheme = 0;
    int32_t splits = 1;
    size_t got;
    cublasLtMatmulAlgoConfigGetAttribute(&plan->algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                         &scheme, sizeof scheme, &got);
    cublasLtMatmulAlgoConfigGetAttribute(&plan->algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                                         sizeof splits, &got);
    if (splits <= 1 && scheme == CUBLASLT_REDUCTION_SCHEME_NONE) return true;
    return may_split_k(plan) && scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

/* What cuBLASLt proposes for the problem and pieces of `plan`. */
static int proposed(struct lg_cuda_gemm *g, const struct plan *plan, const struct words *w,
                    struct plan ret[PROPOSED_MAX])
{
    cublasLtMatmulHeuristicResult_t found[PROPOSED_MAX];
    cublasLtMatmulPreferenceOpaque_t want;
    size_t workspace = WORKSPACE_MAX;
    uint32_t alignment = 16,
             schemes = may_split_k(plan) ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : 0;
    int n = 0, count = 0;
    LT(cublasLtMatmulPreferenceInit(&want));
#define PREFER(what, value)                                                                        \
    LT(cublasLtMatmulPreferenceSetAttribute(&want, CUBLASLT_MATMUL_PREF_##what, &value,            \
                                            sizeof value))
    PREFER(MAX_WORKSPACE_BYTES, workspace);
    PREFER(REDUCTION_SCHEME_MASK, schemes);
    PREFER(MIN_ALIGNMENT_A_BYTES, alignment);
    PREFER(MIN_ALIGNMENT_B_BYTES, alignment);
    PREFER(MIN_ALIGNMENT_C_BYTES, alignment);
    PREFER(MIN_ALIGNMENT_D_BYTES, alignment);
#undef PREFER
    cublasStatus_t s = cublasLtMatmulAlgoGetHeuristic(
        g->lt, (cublasLtMatmulDesc_t)&w->desc, (cublasLtMatrixLayout_t)&w->a,
        (cublasLtMatrixLayout_t)&w->b, (cublasLtMatrixLayout_t)&w->d, (cublasLtMatrixLayout_t)&w->d,
        &want, PROPOSED_MAX, found, &count);
    if (s == CUBLAS_STATUS_NOT_SUPPORTED) return 0;
    LT(s);
    for (int i = 0; i < count; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        ret[n] = *plan;
        ret[n].algo = found[i].algo;
        ret[n].workspace = found[i].workspaceSize;
        if (deterministic(&ret[n])) n++;
    }
    return n;
}

/* Adds the other tiles, cluster shapes and variants of the first proposal's kernel, without split-K. */
static int with_other_tiles(struct lg_cuda_gemm *g, const struct words *w,
                            struct plan found[PROPOSED_MAX + OTHERS_MAX], int n)
{
    static const uint16_t CLUSTERS[] = {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1,
                                        CUBLASLT_CLUSTER_SHAPE_1x2x1};
    static const int32_t TILES[] = {
        CUBLASLT_MATMUL_TILE_64x256,  CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_MATMUL_TILE_256x64,
        CUBLASLT_MATMUL_TILE_128x256, CUBLASLT_MATMUL_TILE_256x128, CUBLASLT_MATMUL_TILE_96x128,
        CUBLASLT_MATMUL_TILE_128x160, CUBLASLT_MATMUL_TILE_160x128, CUBLASLT_MATMUL_TILE_192x128,
        CUBLASLT_MATMUL_TILE_128x192, CUBLASLT_MATMUL_TILE_192x64,  CUBLASLT_MATMUL_TILE_64x192,
        CUBLASLT_MATMUL_TILE_144x128, CUBLASLT_MATMUL_TILE_168x128, CUBLASLT_MATMUL_TILE_192x192,
        CUBLASLT_MATMUL_TILE_256x96};
    enum { VARIANTS = 8, COMBINATIONS = 3 * VARIANTS * (int)LG_ARRAY_LEN(TILES) };
    static_assert((int)COMBINATIONS <= (int)OTHERS_MAX, "each has room");
    int32_t no_split = 1;
    uint32_t no_scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
    for (int i = 0; i < COMBINATIONS; i++) {
        cublasLtMatmulHeuristicResult_t checked;
        int32_t variant = i / 3 % VARIANTS;
        struct plan *plan = &found[n];
        *plan = found[0];
#define SET(what, value)                                                                           \
    LT(cublasLtMatmulAlgoConfigSetAttribute(&plan->algo, CUBLASLT_ALGO_CONFIG_##what, &value,      \
                                            sizeof value))
        SET(TILE_ID, TILES[i / 3 / VARIANTS]);
        SET(CLUSTER_SHAPE_ID, CLUSTERS[i % 3]);
        SET(CUSTOM_OPTION, variant);
        SET(SPLITK_NUM, no_split);
        SET(REDUCTION_SCHEME, no_scheme);
#undef SET
        if (cublasLtMatmulAlgoCheck(g->lt, (cublasLtMatmulDesc_t)&w->desc,
                                    (cublasLtMatrixLayout_t)&w->a, (cublasLtMatrixLayout_t)&w->b,
                                    (cublasLtMatrixLayout_t)&w->d, (cublasLtMatrixLayout_t)&w->d,
                                    &plan->algo, &checked) != CUBLAS_STATUS_SUCCESS)
            continue;
        plan->workspace = checked.workspaceSize;
        bool new = plan->workspace <= WORKSPACE_MAX &&deterministic(plan);
        for (int j = 0; new &&j < n; j++)
            new = memcmp(&plan->algo, &found[j].algo, sizeof plan->algo) != 0;
        if (new) n++;
    }
    return n;
}

/* Where candidates are timed. */
struct trial {
    struct operands x;
    cudaStream_t stream;
    cudaEvent_t event[2];
};

/* Milliseconds of one run, or infinity when it does not run. */
static float time_one(struct lg_cuda_gemm *g, const struct trial *t, const struct plan *plan,
                      int runs)
{
    struct words w;
    float ms;
    put_into_words(plan, &t->x, &w);
    if (multiply(g, &w, plan, &t->x, t->stream) != CUBLAS_STATUS_SUCCESS) return INFINITY;
    LG_CUDA(cudaEventRecord(t->event[0], t->stream));
    for (int i = 0; i < runs; i++)
        if (multiply(g, &w, plan, &t->x, t->stream) != CUBLAS_STATUS_SUCCESS) return INFINITY;
    LG_CUDA(cudaEventRecord(t->event[1], t->stream));
    LG_CUDA(cudaEventSynchronize(t->event[1]));
    LG_CUDA(cudaEventElapsedTime(&ms, t->event[0], t->event[1]));
    lg_heartbeat();
    return ms / (float)runs;
}

/* Memory for one run, filled with noise; false when the GPU has no room for it. */
static bool make_operands(const struct problem *p, cudaStream_t stream, void **ret_memory,
                          struct operands *ret)
{
    size_t in = lg_dtype_bytes((lg_dtype)p->in), out = lg_dtype_bytes((lg_dtype)p->out);
    int64_t a = p->lda * (p->a_rows ? p->m : p->k), b = p->ldb * (p->b_rows ? p->n : p->k);
    int64_t d = p->ldd * p->m, bias = LG_MAX(p->n, p->m), more = p->batch - 1;
    a += more * p->next_a, b += more * p->next_b, d += more * p->next_d;
    size_t at_b = lg_cuda_round_up((size_t)a * in);
    size_t at_bias = at_b + lg_cuda_round_up((size_t)b * in);
    size_t at_d = at_bias + lg_cuda_round_up((size_t)bias * sizeof(float));
    size_t at_pre = at_d + lg_cuda_round_up((size_t)d * out);
    size_t at_work = at_pre + (p->epilogue == BIAS_GELU ? lg_cuda_round_up((size_t)d * out) : 0);
    char *memory;
    if (cudaMalloc((void **)&memory, at_work + WORKSPACE_MAX) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    cuda_fill_noise(stream, memory, (lg_dtype)p->in, a, 1);
    cuda_fill_noise(stream, memory + at_b, (lg_dtype)p->in, b, 2);
    cuda_fill_noise(stream, memory + at_bias, (lg_dtype)p->in, bias, 3);
    cuda_fill_noise(stream, memory + at_d, (lg_dtype)p->out, d, 4);
    *ret_memory = memory;
    *ret = (struct operands){.a = memory,
                             .b = memory + at_b,
                             .d = memory + at_d,
                             .workspace = memory + at_work,
                             .bias = memory + at_bias,
                             .pre = memory + at_pre};
    return true;
}

static struct plan plan_locked(struct lg_cuda_gemm *g, const struct problem *p);

/* The launch that an epilogue saves: GELU over d, or the column sums of a. */
static void run_apart(struct lg_cuda_gemm *g, const struct problem *p, const struct operands *x,
                      cudaStream_t stream)
{
    if (p->epilogue == BIAS_GELU) {
        lg_cuda_stream s = {.base.device = &g->device->base, .cuda = stream};
        lg_tensor d = lg_t2(x->d, (lg_dtype)p->out, p->m, p->ldd), pre = d;
        pre.data = x->pre;
        cuda_act_forward(&s.base,
                         &(struct lg_act_forward_args){.x = pre, .y = d, .act = LG_ACT_GELU_TANH});
    } else {
        cuda_column_sums(stream, lg_t2((void *)x->a, (lg_dtype)p->in, p->k, p->m), p->m,
                         lg_t1(x->bias, (lg_dtype)p->side, p->m), false, x->workspace);
    }
}

/* Milliseconds of the product and what the epilogue does as two launches. */
static float time_apart(struct lg_cuda_gemm *g, const struct problem *p, const struct trial *t)
{
    struct problem alone = *p;
    float ms;
    alone.epilogue = p->epilogue == BIAS_GELU ? BIAS : PLAIN;
    alone.side = 0;
    struct plan plan = plan_locked(g, &alone);
    if (plan.none) return INFINITY;
    float product_ms = time_one(g, t, &plan, LONG_RUNS);
    run_apart(g, p, &t->x, t->stream);
    LG_CUDA(cudaEventRecord(t->event[0], t->stream));
    for (int i = 0; i < LONG_RUNS; i++) run_apart(g, p, &t->x, t->stream);
    LG_CUDA(cudaEventRecord(t->event[1], t->stream));
    LG_CUDA(cudaEventSynchronize(t->event[1]));
    LG_CUDA(cudaEventElapsedTime(&ms, t->event[0], t->event[1]));
    return product_ms + ms / LONG_RUNS;
}

struct timed {
    int candidate;
    float ms; /* of one run */
    int runs; /* of one turn */
};
static int by_time(const void *a, const void *b)
{
    float x = ((const struct timed *)a)->ms, y = ((const struct timed *)b)->ms;
    return (x > y) - (x < y);
}

/* As many runs as last about `ms`, within bounds. */
static int runs_in(float ms, float one_ms)
{
    return (int)fminf(LONG_RUNS, fmaxf(RUNS, ms / one_ms));
}

/* The fastest of n candidates. Each runs briefly; of many, ever fewer go on to ever longer turns. */
static struct timed race(struct lg_cuda_gemm *g, const struct trial *t, const struct plan *found,
                         int n)
{
    static const struct {
        int stay, turns;
        float turn_ms; /* within the bounds of runs_in */
    } STAGES[] = {{40, 1, 3}, {12, 1, INFINITY}, {6, 3, INFINITY}};
    const bool many = n > PROPOSED_MAX;
    struct timed all[CANDIDATES_MAX];
    for (int i = 0; i < n; i++)
        all[i] = (struct timed){i, time_one(g, t, &found[i], many ? 1 : RUNS), 0};
    qsort(all, (size_t)n, sizeof *all, by_time);
    for (size_t s = many ? 0 : LG_ARRAY_LEN(STAGES) - 1; s < LG_ARRAY_LEN(STAGES); s++) {
        n = LG_MIN(n, STAGES[s].stay);
        for (int i = 0; i < n; i++)
            all[i].runs = runs_in(STAGES[s].turn_ms, all[i].ms), all[i].ms = 0;
        for (int turn = 0; turn < STAGES[s].turns; turn++)
            for (int i = 0; i < n; i++)
                all[i].ms +=
                    time_one(g, t, &found[all[i].candidate], all[i].runs) / (float)STAGES[s].turns;
        qsort(all, (size_t)n, sizeof *all, by_time);
    }
    return all[0];
}

/* The fastest of n candidates; the first when there is no room to try. */
static struct plan fastest(struct lg_cuda_gemm *g, const struct problem *p,
                           const struct plan *found, int n)
{
    struct trial t;
    void *memory;
    struct plan plan = found[0];
    bool fused = p->epilogue == BIAS_GELU || p->epilogue == BIAS_GRADIENT;
    LG_CUDA(cudaStreamCreateWithFlags(&t.stream, cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) LG_CUDA(cudaEventCreate(&t.event[i]));
    if (make_operands(p, t.stream, &memory, &t.x)) {
        struct timed best = race(g, &t, found, n);
        plan = found[best.candidate];
        if (fused) plan.none = isinf(best.ms) || time_apart(g, p, &t) <= best.ms;
        LG_CUDA(cudaStreamSynchronize(t.stream));
        LG_CUDA(cudaFree(memory));
    }
    for (int i = 0; i < 2; i++) LG_CUDA(cudaEventDestroy(t.event[i]));
    LG_CUDA(cudaStreamDestroy(t.stream));
    return plan;
}

/* What is proposed; of a long product also its pieces, and the other tiles of all of these. */
static int candidates(struct lg_cuda_gemm *g, const struct problem *p,
                      struct plan ret[CANDIDATES_MAX])
{
    const bool is_long =
        2.0 * (double)(p->batch * p->m) * (double)p->n * (double)p->k >= LONG_FLOPS;
    struct operands nothing = {0};
    struct words w;
    int n = 0;
    for (int pieces = 1; pieces <= (is_long ? PIECES_MAX : 1); pieces++) {
        struct plan plan = {.of = *p, .pieces = pieces};
        if (pieces > 1 && !can_be_cut(p, pieces)) continue;
        put_into_words(&plan, &nothing, &w);
        int more = proposed(g, &plan, &w, ret + n);
        if (is_long && more > 0) more = with_other_tiles(g, &w, ret + n, more);
        n += more;
    }
    return n;
}

static struct plan tune(struct lg_cuda_gemm *g, const struct problem *p)
{
    struct plan plan = {.of = *p, .none = true}, *found = calloc(CANDIDATES_MAX, sizeof *found);
    LG_ASSERT(found);
    int n = candidates(g, p, found);
    if (n > 0) plan = fastest(g, p, found, n);
    free(found);
    return plan;
}

static const char *const EPILOGUE_NAMES[] = {
    [PLAIN] = "", [BIAS] = " bias", [BIAS_GELU] = " gelu", [BIAS_GRADIENT] = " dbias-"};

static void write_key(const struct problem *p, char ret[LG_CUDA_KEY_BYTES])
{
    int at = snprintf(
        ret, LG_CUDA_KEY_BYTES, "gemm m%lld n%lld k%lld a%c%lld b%c%lld d%lld %s-%s%s%s%s%s",
        (long long)p->m, (long long)p->n, (long long)p->k, p->a_rows ? 'r' : 'c', (long long)p->lda,
        p->b_rows ? 'r' : 'c', (long long)p->ldb, (long long)p->ldd, lg_dtype_name((lg_dtype)p->in),
        lg_dtype_name((lg_dtype)p->out), p->tf32 ? " tf32" : "", EPILOGUE_NAMES[p->epilogue],
        p->epilogue == BIAS_GRADIENT           ? lg_dtype_name((lg_dtype)p->side)
        : p->epilogue == BIAS_GELU && !p->side ? "-only"
                                               : "",
        p->split_k ? " parts" : "") /* the name it has in existing files */;
    if (p->batch > 1)
        snprintf(ret + at, LG_CUDA_KEY_BYTES - (size_t)at, " x%lld+%lld,%lld,%lld",
                 (long long)p->batch, (long long)p->next_a, (long long)p->next_b,
                 (long long)p->next_d);
}

/* "none", or the workspace's bytes and the algorithm's eight words; " in 3": in three pieces. */
static void write_value(const struct plan *plan, char ret[LG_CUDA_VALUE_BYTES])
{
    if (plan->none) {
        snprintf(ret, LG_CUDA_VALUE_BYTES, "none");
        return;
    }
    int at = snprintf(ret, LG_CUDA_VALUE_BYTES, "%zu", plan->workspace);
    for (size_t i = 0; i < LG_ARRAY_LEN(plan->algo.data); i++)
        at += snprintf(ret + at, LG_CUDA_VALUE_BYTES - (size_t)at, " %llx",
                       (unsigned long long)plan->algo.data[i]);
    if (plan->pieces > 1)
        snprintf(ret + at, LG_CUDA_VALUE_BYTES - (size_t)at, " in %d", plan->pieces);
}

static bool read_value(const char *value, const struct problem *p, struct plan *ret)
{
    int used = 0;
    *ret = (struct plan){.of = *p, .pieces = 1, .none = !strcmp(value, "none")};
    if (ret->none) return true;
    if (sscanf(value, "%zu%n", &ret->workspace, &used) != 1) return false;
    for (size_t i = 0; i < LG_ARRAY_LEN(ret->algo.data); i++) {
        unsigned long long word;
        value += used;
        if (sscanf(value, " %llx%n", &word, &used) != 1) return false;
        ret->algo.data[i] = word;
    }
    value += used;
    if (*value && (sscanf(value, " in %d%n", &ret->pieces, &used) != 1 || value[used] ||
                   !can_be_cut(p, ret->pieces)))
        return false;
    return ret->workspace <= WORKSPACE_MAX;
}

/* From the file of pinned algorithms, else tuned and pinned. */
static struct plan make_plan(struct lg_cuda_gemm *g, const struct problem *p)
{
    struct lg_cuda_algos *algos = g->device->algos;
    char key[LG_CUDA_KEY_BYTES], mine[LG_CUDA_VALUE_BYTES];
    struct plan plan;
    struct words w;
    write_key(p, key);
    const char *value = lg_cuda_algos_find(algos, key);
    if (!value) {
        plan = tune(g, p);
        write_value(&plan, mine);
        value = lg_cuda_algos_pin(algos, key, mine);
    }
    bool good = read_value(value, p, &plan);
    if (good && !plan.none) {
        cublasLtMatmulHeuristicResult_t checked;
        put_into_words(&plan, &(struct operands){0}, &w);
        good = cublasLtMatmulAlgoCheck(g->lt, &w.desc, &w.a, &w.b, &w.d, &w.d, &plan.algo,
                                       &checked) == CUBLAS_STATUS_SUCCESS;
    }
    if (!good)
        lg_cuda_fatal(key,
                      "its pinned algorithm is not one of this cuBLASLt: remove the line "
                      "from the file in $LG_CUDA_CACHE or ~/.cache/lg",
                      __FILE__, __LINE__);
    return plan;
}

static struct plan plan_locked(struct lg_cuda_gemm *g, const struct problem *p)
{
    for (int i = 0; i < g->n_plans; i++)
        if (!memcmp(&g->plans[i].of, p, sizeof *p)) return g->plans[i];
    struct plan plan = make_plan(g, p); /* may add others */
    LG_ASSERT(g->n_plans < PLANS_MAX);
    g->plans = reallocarray(g->plans, (size_t)g->n_plans + 1, sizeof *g->plans);
    LG_ASSERT(g->plans);
    return g->plans[g->n_plans++] = plan;
}

/* A product as calls of cuBLASLt, each of `piece` elements of k; the epilogue is the last one's, whose k may be smaller. */
struct calls {
    int64_t k, piece;
    struct plan part, last; /* part: all but the last */
};
static int64_t piece_of(const struct problem *p)
{
    if (p->in != LG_F32 || p->out != LG_F32 || p->tf32 || p->k <= SUM_MAX) return p->k;
    int64_t pieces = (p->k + SUM_MAX - 1) / SUM_MAX;
    int64_t least = (p->k + pieces - 1) / pieces;
    return (least + 31) / 32 * 32; /* rows on 16 bytes; SUM_MAX is a multiple */
}

/* False when cuBLASLt is not asked, or does not do it. */
static bool calls_of(lg_cuda_device *d, const struct lg_cuda_product *x, struct calls *ret)
{
    if (!fits(x) || !lg_cuda_aligned_16(x->bias) || !lg_cuda_aligned_16(x->pre)) return false;
    struct problem last = problem_of(d, x), part = last;
    *ret = (struct calls){.k = last.k, .piece = piece_of(&last)};
    last.k = (ret->k - 1) % ret->piece + 1;
    part.k = ret->piece;
    part.epilogue = PLAIN, part.side = 0;
    /* Its sums are over the k of one call. */
    if (last.epilogue == BIAS_GRADIENT && ret->piece < ret->k) return false;
    LG_CUDA(cudaSetDevice(d->index));
    pthread_mutex_lock(&d->gemm->mutex);
    ret->last = plan_locked(d->gemm, &last);
    if (ret->piece < ret->k) ret->part = plan_locked(d->gemm, &part);
    pthread_mutex_unlock(&d->gemm->mutex);
    return !ret->last.none && !ret->part.none;
}

bool lg_cuda_gemm_plan(lg_cuda_device *d, const struct lg_cuda_product *x, size_t *ret_workspace)
{
    struct calls c;
    if (!calls_of(d, x, &c)) return false;
    *ret_workspace = LG_MAX(c.last.workspace, c.part.workspace);
    return true;
}

bool lg_cuda_gemm_run(lg_stream *s, const struct lg_cuda_product *x)
{
    lg_cuda_device *d = lg_cuda_device_of(s);
    const struct cuda_any_gemm *g = &x->g;
    const size_t e = lg_dtype_bytes(g->in);
    struct calls c;
    struct words w;
    if (!calls_of(d, x, &c)) return false;
    for (int64_t at = 0; at < c.k; at += c.piece) {
        const struct plan *plan = at + c.piece >= c.k ? &c.last : &c.part;
        struct operands o = {.a = (const char *)g->a + (size_t)(at * g->sa_k) * e,
                             .b = (const char *)g->b + (size_t)(at * g->sb_k) * e,
                             .d = g->d,
                             .workspace = x->workspace ? x->workspace : s->scratch,
                             .bias = x->bias,
                             .pre = x->pre,
                             .beta = g->accumulate || at > 0 ? 1 : 0};
        put_into_words(plan, &o, &w);
        LT(multiply(d->gemm, &w, plan, &o, lg_cuda_stream_of(s)));
    }
    return true;
}
