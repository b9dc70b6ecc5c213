/* Convolutions through cuDNN, NHWC: x * w + bias in one plan, the residual by an elementwise addition; and
 * their backward by data and by weight. One over time is made frame by frame, so that a frame's bits do not depend on how many
 * there are. (What tile_conv.cu, picture_conv.cu and conv_weight.cu take does not
 * come here.)
 *
 * The first time a shape is seen its engine configurations are timed on noise; one counts only if every
 * sample of a batch of equal samples gets the same bits, twice, and the gradient of the filters the same bits
 * in every run (cuDNN's notes on determinism are not reliable). The fastest is pinned by engine and knobs (algos.h). Engines that compile at run time are
 * left out. fp32 without tf32 stays with the own kernel: cuDNN's fast fp32 engines are tf32 in truth. So
 * does in tf32 what has few values (gemm.c says why), by those of one sample: its bits may not depend on
 * the batch. */
#include "base/heartbeat.h"
#include "kernels/cuda/algos.h"
#include "kernels/cuda/conv_columns.h"
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/cudnn_api.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum uid { X = 1, W, BIAS, Y, UID_COUNT };
enum { CONFIGURATIONS_MAX = 48, KNOBS_MAX = 24, NOTES_MAX = 16, RUNS = 3 };
#define WORKSPACE_MAX ((int64_t)256 << 20)

/* Places in the key. */
enum {
    N_TYPE,
    N_N,
    N_H,
    N_W,
    N_CI,
    N_HO,
    N_WO,
    N_CO,
    N_KH,
    N_KW,
    N_STRIDE,
    N_TOP,
    N_LEFT,
    N_BOTTOM,
    N_RIGHT,
    N_OUT, /* type of what is written */
    N_T,   /* frames that one of y sees; 0: pictures */
    N_COUNT
};

typedef cudnnBackendDescriptor_t desc;

/* Pictures, filters, or one clip, whose memory is NHWC. */
struct map {
    int64_t n, c, t, h, w; /* t 0: pictures */
};
static desc picture(struct cudnn_graph *g, int64_t uid, cudnnDataType_t type, const struct map *m)
{
    const int64_t c = m->c, h = m->h, w = m->w, frame = h * w * c;
    if (!m->t)
        return cudnn_tensor(g, &(struct cudnn_tensor_spec){.uid = uid,
                                                           .type = type,
                                                           .dim = {m->n, c, h, w},
                                                           .stride = {frame, 1, c * w, c}});
    return cudnn_tensor(g,
                        &(struct cudnn_tensor_spec){.uid = uid,
                                                    .type = type,
                                                    .rank = 5,
                                                    .dim = {m->n, c, m->t, h, w},
                                                    .stride = {m->t * frame, 1, frame, c * w, c}});
}

static desc convolution_of(struct cudnn_graph *g, const int64_t *n)
{
    const int skip = n[N_T] ? 0 : 1; /* time comes first */
    int64_t dims = 3 - skip, before[3] = {0, n[N_TOP], n[N_LEFT]};
    int64_t after[3] = {0, n[N_BOTTOM], n[N_RIGHT]}, dilation[3] = {1, 1, 1};
    int64_t stride[3] = {1, n[N_STRIDE], n[N_STRIDE]};
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    desc c = cudnn_make(g, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    cudnn_set(g, c, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims);
    cudnn_set(g, c, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    cudnn_set(g, c, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
    cudnn_set(g, c, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, dims, before + skip);
    cudnn_set(g, c, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, dims, after + skip);
    cudnn_set(g, c, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, dims, stride + skip);
    cudnn_set(g, c, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, dims, dilation + skip);
    cudnn_finish(g, c);
    return c;
}

/* What is convolved and the result, in the roles of a forward; `writes`: the one that is made of the others. */
struct roles {
    desc x, w, y;
    enum uid writes;
};
static void add_convolution(struct cudnn_graph *g, const int64_t *n, const struct roles *r)
{
    float one = 1, none = 0;
    desc c = convolution_of(g, n), op;
#define ADD(DESCRIPTOR, KIND, X_NAME, W_NAME, Y_NAME)                                              \
    op = cudnn_make(g, CUDNN_BACKEND_OPERATION_CONVOLUTION_##DESCRIPTOR##_DESCRIPTOR);             \
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_CONVOLUTION_##KIND##_##X_NAME, r->x);               \
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_CONVOLUTION_##KIND##_##W_NAME, r->w);               \
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_CONVOLUTION_##KIND##_##Y_NAME, r->y);               \
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_CONVOLUTION_##KIND##_CONV_DESC, c);                 \
    cudnn_set(g, op, CUDNN_ATTR_OPERATION_CONVOLUTION_##KIND##_ALPHA, CUDNN_TYPE_FLOAT, 1, &one);  \
    cudnn_set(g, op, CUDNN_ATTR_OPERATION_CONVOLUTION_##KIND##_BETA, CUDNN_TYPE_FLOAT, 1, &none)
    switch (r->writes) {
    case X:
        ADD(BACKWARD_DATA, BWD_DATA, DX, W, DY);
        break;
    case W:
        ADD(BACKWARD_FILTER, BWD_FILTER, X, DW, DY);
        break;
    default:
        ADD(FORWARD, FORWARD, X, W, Y);
        break;
    }
#undef ADD
    cudnn_operation(g, op);
}

static enum uid written_by(int64_t op)
{
    return op == LG_OP_conv2d_backward_data ? X : op == LG_OP_conv2d_backward_weight ? W : Y;
}
static lg_dtype type_of(const int64_t *n, enum uid of, enum uid writes)
{
    return (lg_dtype)n[of == writes ? N_OUT : N_TYPE];
}

/* Returns the operation graph. */
static desc describe(struct cudnn_graph *g, int64_t op, const int64_t *n)
{
    enum uid writes = written_by(op);
    const int64_t one = n[N_T] ? 1 : 0;
    const struct map x_map = {n[N_N], n[N_CI], n[N_T], n[N_H], n[N_W]};
    const struct map w_map = {n[N_CO], n[N_CI], n[N_T], n[N_KH], n[N_KW]};
    const struct map y_map = {n[N_N], n[N_CO], one, n[N_HO], n[N_WO]};
    const struct map b_map = {1, n[N_CO], one, 1, 1};
    struct roles r = {.x = picture(g, X, cudnn_type(type_of(n, X, writes)), &x_map),
                      .w = picture(g, W, cudnn_type(type_of(n, W, writes)), &w_map),
                      .writes = writes};
    desc y = picture(g, Y, cudnn_type(type_of(n, Y, writes)), &y_map);
    r.y = writes == Y ? picture(g, 0, CUDNN_DATA_FLOAT, &y_map) : y;
    add_convolution(g, n, &r);
    if (writes == Y)
        cudnn_pointwise(
            g, &(struct cudnn_pointwise_spec){.mode = CUDNN_POINTWISE_ADD,
                                              .precision = CUDNN_DATA_FLOAT,
                                              .x = r.y,
                                              .b = picture(g, BIAS, cudnn_type(n[N_TYPE]), &b_map),
                                              .y = y});
    return cudnn_operation_graph(g);
}

/* ---- engine and knobs as text: "ENGINE KNOB:VALUE KNOB:VALUE" ---- */

/* Reads one attribute of `type` into a fresh descriptor of the graph. */
static desc inner(struct cudnn_graph *g, desc of, cudnnBackendAttributeName_t name,
                  cudnnBackendDescriptorType_t type)
{
    int64_t got;
    desc d = cudnn_make(g, type);
    if (!g->failed &&
        g->c->api.BackendGetAttribute(of, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &got, &d))
        g->failed = true;
    return d;
}

static bool compiles_at_run_time(struct cudnn_graph *g, desc engine)
{
    cudnnBackendBehaviorNote_t notes[NOTES_MAX];
    int64_t n = 0;
    if (g->c->api.BackendGetAttribute(engine, CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE,
                                      CUDNN_TYPE_BEHAVIOR_NOTE, NOTES_MAX, &n, notes))
        return false;
    for (int64_t i = 0; i < n && i < NOTES_MAX; i++)
        if (notes[i] == CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION) return true;
    return false;
}

/* False for a configuration that does not count. */
static bool to_text(struct lg_cudnn *c, desc configuration, char ret[LG_CUDA_VALUE_BYTES])
{
    struct cudnn_graph g = {.c = c};
    desc engine =
        inner(&g, configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    desc knob[KNOBS_MAX];
    int64_t id, got, n = 0;
    bool ok = !g.failed && !compiles_at_run_time(&g, engine) &&
              !c->api.BackendGetAttribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64,
                                          1, &got, &id);
    for (int i = 0; i < KNOBS_MAX; i++)
        knob[i] = cudnn_make(&g, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    ok = ok && !g.failed &&
         !c->api.BackendGetAttribute(configuration, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                                     CUDNN_TYPE_BACKEND_DESCRIPTOR, KNOBS_MAX, &n, knob);
    int at = ok ? snprintf(ret, LG_CUDA_VALUE_BYTES, "%lld", (long long)id) : 0;
    for (int64_t i = 0; ok && i < n && i < KNOBS_MAX; i++) {
        cudnnBackendKnobType_t type;
        int64_t value;
        ok = !c->api.BackendGetAttribute(knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE,
                                         CUDNN_TYPE_KNOB_TYPE, 1, &got, &type) &&
             !c->api.BackendGetAttribute(knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE,
                                         CUDNN_TYPE_INT64, 1, &got, &value);
        if (ok)
            at += snprintf(ret + at, LG_CUDA_VALUE_BYTES - (size_t)at, " %d:%lld", (int)type,
                           (long long)value);
    }
    cudnn_graph_free(&g);
    return ok && at < LG_CUDA_VALUE_BYTES;
}

static bool from_text(struct cudnn_graph *g, desc graph, const char *text, struct cudnn_plan *ret)
{
    long long id, value;
    int used, type, n = 0;
    desc knob[KNOBS_MAX];
    if (sscanf(text, "%lld%n", &id, &used) != 1) return false;
    int64_t index = id;
    desc engine = cudnn_make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnn_set_desc(g, engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph);
    cudnn_set(g, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &index);
    cudnn_finish(g, engine);
    for (text += used; n < KNOBS_MAX && sscanf(text, " %d:%lld%n", &type, &value, &used) == 2;
         text += used) {
        cudnnBackendKnobType_t kind = (cudnnBackendKnobType_t)type;
        int64_t v = value;
        knob[n] = cudnn_make(g, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
        cudnn_set(g, knob[n], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &kind);
        cudnn_set(g, knob[n], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &v);
        cudnn_finish(g, knob[n++]);
    }
    desc configuration = cudnn_make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    cudnn_set_desc(g, configuration, CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    if (n)
        cudnn_set(g, configuration, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                  CUDNN_TYPE_BACKEND_DESCRIPTOR, n, knob);
    cudnn_finish(g, configuration);
    return !g->failed && cudnn_compile(g->c, configuration, &ret->plan, &ret->workspace);
}

/* ---- the choice ---- */

/* Memory for the trials: N equal samples of noise. What is written is `pieces` equal pieces. */
struct trial {
    char *memory;
    struct cudnn_binding bind;
    void *out, *before, *workspace;
    int64_t pieces, piece_bytes;
    cudaStream_t stream;
    cudaEvent_t event[2];
};

static bool trial_open(int64_t op, const int64_t *n, struct trial *ret)
{
    const enum uid writes = written_by(op);
    const int64_t T = LG_MAX(n[N_T], 1);
    const int64_t each[UID_COUNT] = {[X] = T * n[N_H] * n[N_W] * n[N_CI],
                                     [W] = n[N_CO] * T * n[N_KH] * n[N_KW] * n[N_CI],
                                     [BIAS] = n[N_CO],
                                     [Y] = n[N_HO] * n[N_WO] * n[N_CO]};
    size_t at[UID_COUNT], end = 0;
    int64_t pieces[UID_COUNT];
    for (enum uid i = X; i < UID_COUNT; i++) {
        pieces[i] = i == X || i == Y ? n[N_N] : 1;
        at[i] = end;
        end +=
            lg_cuda_round_up((size_t)(pieces[i] * each[i]) * lg_dtype_bytes(type_of(n, i, writes)));
    }
    *ret = (struct trial){.pieces = pieces[writes],
                          .piece_bytes = each[writes] * (int64_t)lg_dtype_bytes(n[N_OUT])};
    const size_t at_work = end + lg_cuda_round_up((size_t)ret->piece_bytes);
    if (cudaMalloc((void **)&ret->memory, at_work + (size_t)WORKSPACE_MAX) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    LG_CUDA(cudaStreamCreateWithFlags(&ret->stream, cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) LG_CUDA(cudaEventCreate(&ret->event[i]));
    for (enum uid i = X; i < UID_COUNT; i++) {
        const lg_dtype type = type_of(n, i, writes);
        char *p = ret->memory + at[i];
        for (int64_t k = 0; k < pieces[i]; k++, p += (size_t)each[i] * lg_dtype_bytes(type))
            cuda_fill_noise(ret->stream, p, type, each[i], (uint32_t)i);
        if (i != BIAS || writes == Y) cudnn_bind(&ret->bind, i, ret->memory + at[i]);
    }
    ret->out = ret->memory + at[writes];
    ret->before = ret->memory + end;
    ret->workspace = ret->memory + at_work;
    return true;
}

static void trial_close(struct trial *t)
{
    LG_CUDA(cudaStreamSynchronize(t->stream));
    for (int i = 0; i < 2; i++) LG_CUDA(cudaEventDestroy(t->event[i]));
    LG_CUDA(cudaStreamDestroy(t->stream));
    LG_CUDA(cudaFree(t->memory));
}

/* Milliseconds of `runs` runs; negative when one fails. */
static float time_runs(struct lg_cudnn *c, const struct cudnn_plan *p, struct trial *t, int runs)
{
    float ms;
    LG_CUDA(cudaEventRecord(t->event[0], t->stream));
    for (int i = 0; i < runs; i++)
        if (cudnn_execute(c, p->plan, &t->bind, t->workspace, t->stream)) return -1;
    LG_CUDA(cudaEventRecord(t->event[1], t->stream));
    LG_CUDA(cudaEventSynchronize(t->event[1]));
    LG_CUDA(cudaEventElapsedTime(&ms, t->event[0], t->event[1]));
    return ms;
}

/* Milliseconds of a run; negative when it fails, its bits move, or it is far from `best`. */
static float try_plan(struct lg_cudnn *c, const struct cudnn_plan *p, struct trial *t, float best)
{
    if (p->workspace > WORKSPACE_MAX) return -1;
    if (cudnn_execute(c, p->plan, &t->bind, t->workspace, t->stream)) return -1;
    LG_CUDA(cudaMemcpyAsync(t->before, t->out, (size_t)t->piece_bytes, cudaMemcpyDeviceToDevice,
                            t->stream));
    float ms = time_runs(c, p, t, 1);
    if (ms < 0 || (best >= 0 && ms > 2 * best)) return -1;
    ms = time_runs(c, p, t, RUNS);
    if (!cuda_all_equal(t->stream, t->out, t->before, t->piece_bytes, t->pieces)) return -1;
    return ms / RUNS;
}

/* The text of the fastest configuration; "none" when there is none. */
static void tune(struct cudnn_graph *g, desc graph, const struct cudnn_key *key,
                 char ret[LG_CUDA_VALUE_BYTES])
{
    static const cudnnBackendHeurMode_t MODES[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
    struct lg_cudnn *c = g->c;
    struct trial t;
    float best = -1;
    snprintf(ret, LG_CUDA_VALUE_BYTES, "none");
    if (g->failed || !trial_open(key->op, key->n, &t)) return;
    for (size_t m = 0; m < LG_ARRAY_LEN(MODES) && best < 0; m++) {
        desc found[CONFIGURATIONS_MAX];
        int count = cudnn_configurations(g, graph, MODES[m], found, CONFIGURATIONS_MAX);
        for (int i = 0; i < count; i++) {
            char text[LG_CUDA_VALUE_BYTES];
            struct cudnn_plan p = {0};
            lg_heartbeat(); /* the one before has been compiled and timed */
            if (!to_text(c, found[i], text)) continue;
            if (!cudnn_compile(c, found[i], &p.plan, &p.workspace)) continue;
            float ms = try_plan(c, &p, &t, best);
            cudnn_drop(c, &p.plan);
            if (ms < 0 || (best >= 0 && ms >= best)) continue;
            best = ms;
            memcpy(ret, text, sizeof text);
        }
    }
    trial_close(&t);
}

static bool build(struct lg_cudnn *c, const struct cudnn_key *key, struct cudnn_plan *ret)
{
    struct cudnn_graph g = {.c = c};
    const int64_t *n = key->n;
    char name[LG_CUDA_KEY_BYTES], mine[LG_CUDA_VALUE_BYTES], time[16] = "";
    if (n[N_T]) snprintf(time, sizeof time, "3d-%d", (int)n[N_T]);
    static const char *const KINDS[UID_COUNT] = {[X] = "-data", [W] = "-weight", [Y] = ""};
    snprintf(name, sizeof name,
             "conv%s%s %s%s%s x%lldx%lldx%lldx%lld w%lldx%lldx%lld s%lld p%lld,%lld,%lld,%lld",
             time, KINDS[written_by(key->op)], lg_dtype_name((lg_dtype)n[N_TYPE]),
             n[N_OUT] != n[N_TYPE] ? "-" : "",
             n[N_OUT] != n[N_TYPE] ? lg_dtype_name((lg_dtype)n[N_OUT]) : "", (long long)n[N_N],
             (long long)n[N_H], (long long)n[N_W], (long long)n[N_CI], (long long)n[N_CO],
             (long long)n[N_KH], (long long)n[N_KW], (long long)n[N_STRIDE], (long long)n[N_TOP],
             (long long)n[N_LEFT], (long long)n[N_BOTTOM], (long long)n[N_RIGHT]);
    desc graph = describe(&g, key->op, n);
    const char *value = lg_cuda_algos_find(c->device->algos, name);
    if (!value) {
        tune(&g, graph, key, mine);
        value = lg_cuda_algos_pin(c->device->algos, name, mine);
    }
    bool none = !strcmp(value, "none"), ok = !none && from_text(&g, graph, value, ret);
    if (!none && !ok)
        lg_cuda_fatal(name,
                      "its pinned engine is not one of this cuDNN: remove the line from the "
                      "file in $LG_CUDA_CACHE or ~/.cache/lg",
                      __FILE__, __LINE__);
    cudnn_graph_free(&g);
    return ok;
}

/* ---- calls ---- */

/* Backward calls in the words of a forward: its x, w, y. */
static struct lg_conv2d_forward_args of_data(const struct lg_conv2d_backward_data_args *a)
{
    return (struct lg_conv2d_forward_args){.x = a->dx,
                                           .w = a->w,
                                           .y = a->dy,
                                           .stride = a->stride,
                                           .top = a->top,
                                           .left = a->left,
                                           .bottom = a->bottom,
                                           .right = a->right};
}
static struct lg_conv2d_forward_args of_weight(const struct lg_conv2d_backward_weight_args *a)
{
    return (struct lg_conv2d_forward_args){.x = a->x,
                                           .w = a->dw,
                                           .y = a->dy,
                                           .stride = a->stride,
                                           .top = a->top,
                                           .left = a->left,
                                           .bottom = a->bottom,
                                           .right = a->right};
}

static bool in_fp32(const lg_cuda_device *d, const struct lg_conv2d_forward_args *a)
{
    int64_t N = a->x.dim[0], x = lg_numel(&a->x) / N, y = lg_numel(&a->y) / N;
    return a->x.dtype == LG_F32 && !(d->tf32 && lg_cuda_enough_for_tf32(x, lg_numel(&a->w), y));
}
static struct cudnn_plan *plan_of(lg_cuda_device *d, lg_op_id op,
                                  const struct lg_conv2d_forward_args *a, lg_dtype out)
{
    if (!d->cudnn || in_fp32(d, a)) return NULL;
    struct cudnn_key key;
    memset(&key, 0, sizeof key);
    _Static_assert(N_COUNT <= sizeof key.n / sizeof key.n[0], "the key has room");
    int64_t n[] = {a->x.dtype,
                   a->x.dim[0],
                   a->x.dim[1],
                   a->x.dim[2],
                   a->x.dim[3],
                   a->y.dim[1],
                   a->y.dim[2],
                   a->y.dim[3],
                   a->w.dim[1],
                   a->w.dim[2],
                   a->stride,
                   a->top,
                   a->left,
                   a->bottom,
                   a->right,
                   out,
                   0};
    key.op = op;
    memcpy(key.n, n, sizeof n);
    return cudnn_plan_of(d->cudnn, &key, build);
}
static struct cudnn_plan *forward_plan(lg_cuda_device *d, const struct lg_conv2d_forward_args *a)
{
    return plan_of(d, LG_OP_conv2d_forward, a, a->x.dtype);
}
static struct cudnn_plan *data_plan(lg_cuda_device *d, const struct lg_conv2d_backward_data_args *a)
{
    struct lg_conv2d_forward_args f = of_data(a);
    return plan_of(d, LG_OP_conv2d_backward_data, &f, f.x.dtype);
}
/* In dw's type, or in the compute type where no engine writes fp32. Not in tf32: there cuDNN cuts operands instead of rounding
 * them, and errs by 7.7e-4. */
static struct cudnn_plan *weight_plan(lg_cuda_device *d,
                                      const struct lg_conv2d_backward_weight_args *a,
                                      lg_dtype *ret_out)
{
    struct lg_conv2d_forward_args f = of_weight(a);
    if (f.x.dtype == LG_F32) return NULL;
    struct cudnn_plan *plan = plan_of(d, LG_OP_conv2d_backward_weight, &f, *ret_out = a->dw.dtype);
    if (plan || a->dw.dtype == f.x.dtype) return plan;
    return plan_of(d, LG_OP_conv2d_backward_weight, &f, *ret_out = f.x.dtype);
}

/* Scratch: what is made before it is added to what is there, or has another type; the workspace. */
static size_t sum_bytes(const struct lg_conv2d_forward_args *a)
{
    return a->residual.rank ? lg_cuda_round_up(lg_tensor_bytes(&a->y)) : 0;
}
static size_t dx_bytes(const struct lg_conv2d_backward_data_args *a)
{
    return a->accumulate ? lg_cuda_round_up(lg_tensor_bytes(&a->dx)) : 0;
}
static size_t dw_bytes(const struct lg_conv2d_backward_weight_args *a, lg_dtype out)
{
    if (!a->accumulate && out == a->dw.dtype) return 0;
    return lg_cuda_round_up((size_t)lg_numel(&a->dw) * lg_dtype_bytes(out));
}

size_t lg_cudnn_conv2d_scratch(lg_cuda_device *d, const struct lg_conv2d_forward_args *a)
{
    const struct cudnn_plan *plan = forward_plan(d, a);
    return plan ? sum_bytes(a) + (size_t)plan->workspace : 0;
}

bool lg_cudnn_conv2d(lg_stream *s, const struct lg_conv2d_forward_args *a)
{
    lg_cuda_device *d = lg_cuda_device_of(s);
    cudaStream_t stream = lg_cuda_stream_of(s);
    const struct cudnn_plan *plan = forward_plan(d, a);
    if (!plan) return false;
    struct cudnn_binding b = {0};
    lg_tensor sum = a->y;
    if (a->residual.data) sum.data = s->scratch;
    cudnn_bind(&b, X, a->x.data);
    cudnn_bind(&b, W, a->w.data);
    cudnn_bind(&b, BIAS, a->bias.data);
    cudnn_bind(&b, Y, sum.data);
    cudnn_run(d->cudnn, plan->plan, &b, (char *)s->scratch + sum_bytes(a), stream);
    if (a->residual.data)
        cuda_add_forward(s, &(struct lg_add_forward_args){.a = sum, .b = a->residual, .y = a->y});
    return true;
}

/* One frame of y and the frames that it sees: t pictures as one. */
static struct cudnn_plan *time_plan(lg_cuda_device *d, const struct lg_conv3d_forward_args *a)
{
    const struct lg_conv2d_forward_args one = {
        .x = lg_slice(a->x, 0, 0, 1), .w = a->w, .y = lg_slice(a->y, 0, 0, 1)};
    if (!d->cudnn || in_fp32(d, &one)) return NULL;
    struct cudnn_key key;
    memset(&key, 0, sizeof key);
    const int64_t *x = a->x.dim, *w = a->w.dim, *y = a->y.dim;
    const int64_t after[] = {(y[1] - 1) * a->stride + w[2] - x[1] - a->pad,
                             (y[2] - 1) * a->stride + w[3] - x[2] - a->pad};
    const int64_t n[N_COUNT] = {[N_TYPE] = a->x.dtype,
                                [N_N] = 1,
                                [N_H] = x[1],
                                [N_W] = x[2],
                                [N_CI] = x[3],
                                [N_HO] = y[1],
                                [N_WO] = y[2],
                                [N_CO] = y[3],
                                [N_KH] = w[2],
                                [N_KW] = w[3],
                                [N_STRIDE] = a->stride,
                                [N_TOP] = a->pad,
                                [N_LEFT] = a->pad,
                                [N_BOTTOM] = after[0],
                                [N_RIGHT] = after[1],
                                [N_OUT] = a->x.dtype,
                                [N_T] = w[1]};
    if (after[0] < 0 || after[1] < 0) return NULL;
    key.op = LG_OP_conv3d_forward;
    memcpy(key.n, n, sizeof n);
    return cudnn_plan_of(d->cudnn, &key, build);
}

size_t lg_cudnn_conv3d_scratch(lg_cuda_device *d, const struct lg_conv3d_forward_args *a)
{
    const struct cudnn_plan *plan = time_plan(d, a);
    if (!plan) return 0;
    const size_t sum = a->residual.rank ? lg_cuda_round_up(lg_tensor_bytes(&a->y)) : 0;
    return sum + (size_t)plan->workspace;
}

bool lg_cudnn_conv3d(lg_stream *s, const struct lg_conv3d_forward_args *a)
{
    lg_cuda_device *d = lg_cuda_device_of(s);
    const struct cudnn_plan *plan = time_plan(d, a);
    if (!plan) return false;
    lg_tensor sum = a->y;
    char *scratch = s->scratch;
    if (a->residual.data) {
        sum.data = scratch;
        scratch += lg_cuda_round_up(lg_tensor_bytes(&a->y));
    }
    for (int64_t i = 0; i < sum.dim[0]; i++) {
        struct cudnn_binding b = {0};
        cudnn_bind(&b, X, lg_slice(a->x, 0, i * a->stride_time, 1).data);
        cudnn_bind(&b, W, a->w.data);
        cudnn_bind(&b, BIAS, a->bias.data);
        cudnn_bind(&b, Y, lg_slice(sum, 0, i, 1).data);
        cudnn_run(d->cudnn, plan->plan, &b, scratch, lg_cuda_stream_of(s));
    }
    if (a->residual.data)
        cuda_add_forward(s, &(struct lg_add_forward_args){.a = sum, .b = a->residual, .y = a->y});
    return true;
}

bool lg_cudnn_conv2d_data_scratch(lg_cuda_device *d, const struct lg_conv2d_backward_data_args *a,
                                  size_t *ret)
{
    const struct cudnn_plan *plan = data_plan(d, a);
    if (plan) *ret = dx_bytes(a) + (size_t)plan->workspace;
    return plan != NULL;
}

bool lg_cudnn_conv2d_data(lg_stream *s, const struct lg_conv2d_backward_data_args *a)
{
    lg_cuda_device *d = lg_cuda_device_of(s);
    const struct cudnn_plan *plan = data_plan(d, a);
    if (!plan) return false;
    struct cudnn_binding b = {0};
    lg_tensor made = a->dx;
    if (a->accumulate) made.data = s->scratch;
    cudnn_bind(&b, X, made.data);
    cudnn_bind(&b, W, a->w.data);
    cudnn_bind(&b, Y, a->dy.data);
    cudnn_run(d->cudnn, plan->plan, &b, (char *)s->scratch + dx_bytes(a), lg_cuda_stream_of(s));
    if (a->accumulate)
        cuda_add_forward(s, &(struct lg_add_forward_args){.a = a->dx, .b = made, .y = a->dx});
    return true;
}

bool lg_cudnn_conv2d_weight_scratch(lg_cuda_device *d,
                                    const struct lg_conv2d_backward_weight_args *a, size_t *ret)
{
    lg_dtype out;
    const struct cudnn_plan *plan = weight_plan(d, a, &out);
    if (plan) *ret = dw_bytes(a, out) + (size_t)plan->workspace;
    return plan != NULL;
}

bool lg_cudnn_conv2d_weight(lg_stream *s, const struct lg_conv2d_backward_weight_args *a)
{
    lg_cuda_device *d = lg_cuda_device_of(s);
    lg_dtype out;
    const struct cudnn_plan *plan = weight_plan(d, a, &out);
    if (!plan) return false;
    struct cudnn_binding b = {0};
    const size_t apart = dw_bytes(a, out);
    lg_tensor made = lg_t1(apart ? s->scratch : a->dw.data, out, lg_numel(&a->dw));
    cudnn_bind(&b, X, a->x.data);
    cudnn_bind(&b, W, made.data);
    cudnn_bind(&b, Y, a->dy.data);
    cudnn_run(d->cudnn, plan->plan, &b, (char *)s->scratch + apart, lg_cuda_stream_of(s));
    if (apart) cuda_add_converted(lg_cuda_stream_of(s), made, a->dw, a->accumulate);
    return true;
}
