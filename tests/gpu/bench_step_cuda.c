/* Times a training step of a published net in bf16 on one GPU, by default of DiT-XL/2 at 256x256 (latents 4x32x32), and
 * every operation of it at its shape. The step: forward, loss, backward, the gradients' norm, AdamW on fp32 state, which
 * writes the weights in bf16 too. EMA is another process's work and not in it. Inputs are random.
 *
 * usage: bench_step_cuda [BATCH [STEPS [PRECISION [step|NET]]]]      (256, 10, bf16)
 *
 * A NET with adapters (LoRA) trains them alone. From the environment: LG_BENCH_RECOMPUTE, words of memory.recompute,
 * LG_BENCH_MLP_CHUNKS, its mlp_chunks, and LG_BENCH_FROZEN, how what is frozen is stored (fp8, int8).
 *
 * Prints ms a step (median), images a second, model TFLOP/s, bytes on the GPU; then all operations of a
 * step with their time within it (op_times.h); then, unless "step" or a net of `presets` is said, the large ones of DiT-XL/2
 * alone, in a loop: milliseconds a call, calls a step, TFLOP/s or GB/s (bytes that must move, each once), share of the
 * step. */
#include "base/clock.h"
#include "stages/nets/denoiser.h"
#include "stages/nets/storage.h"
#include "tests/gpu/gpu_test.h"
#include "tests/gpu/op_times.h"
#include "tests/unit/denoiser_fixture.h"
#include <string.h>

enum { CALLS = 40, STEPS_MAX = 100, WARM_UP = 3, TIMED_STEPS = 5 };
static lg_device *device;
static lg_stream *stream;
static lg_dtype type;
static int64_t batch = 256;

/* SD3.5-medium and FLUX.1-dev with latents of side x side; MMDiT's texts are 77 tokens of CLIP and 256 or 512 of T5. */
#define SD35_MEDIUM(side)                                                                          \
    {                                                                                              \
        .kind = LG_SD3, .channels = 16, .height = side, .width = side, .patch = 2, .hidden = 1536, \
        .depth = 24, .heads = 24, .mlp_ratio = 4, .n_texts = 3,                                    \
        .text = {{.length = 77, .width = 768, .pooled = 768},                                      \
                 {.length = 77, .width = 1280, .pooled = 1280},                                    \
                 {.length = 256, .width = 4096}},                                                  \
        .norm_eps = 1e-6, .sample_size = 128, .positions_side = 384, .qk_norm = true, .dual = {    \
            (1 << 13) - 1                                                                          \
        }                                                                                          \
    }
#define FLUX(side)                                                                                 \
    {                                                                                              \
        .kind = LG_FLUX, .channels = 16, .height = side, .width = side, .patch = 2,                \
        .hidden = 3072, .depth = 57, .heads = 24, .mlp_ratio = 4, .n_texts = 2,                    \
        .text = {{.pooled = 768}, {.length = 512, .width = 4096}}, .norm_eps = 1e-6,               \
        .singles = 38, .axes = {16, 56, 56}, .guidance = true                                      \
    }
/* The U-Nets of SD 2.1 and SDXL. */
#define SD21(side)                                                                                 \
    {                                                                                              \
        .kind = LG_SD2, .channels = 4, .height = side, .width = side, .patch = 1, .hidden = 320,   \
        .depth = 21, .heads = 5, .mlp_ratio = 4, .n_texts = 1,                                     \
        .text = {{.length = 77, .width = 1024}}, .norm_eps = 1e-5, .unet = {                       \
            .levels = 4,                                                                           \
            .layers = 2,                                                                           \
            .channels = {320, 640, 1280, 1280},                                                    \
            .heads = {5, 10, 20, 20},                                                              \
            .depths = {1, 1, 1, 0},                                                                \
            .middle_depth = 1,                                                                     \
            .groups = 32                                                                           \
        }                                                                                          \
    }
#define SDXL(side)                                                                                 \
    {                                                                                              \
        .kind = LG_SDXL, .channels = 4, .height = side, .width = side, .patch = 1, .hidden = 320,  \
        .depth = 75, .heads = 5, .mlp_ratio = 4, .n_texts = 2,                                     \
        .text = {{.length = 77, .width = 768}, {.length = 77, .width = 1280, .pooled = 1280}},     \
        .norm_eps = 1e-5, .size_conditions = true, .unet = {                                       \
            .levels = 3,                                                                           \
            .layers = 2,                                                                           \
            .channels = {320, 640, 1280},                                                          \
            .heads = {5, 10, 20},                                                                  \
            .depths = {0, 2, 10},                                                                  \
            .middle_depth = 10,                                                                    \
            .groups = 32,                                                                          \
            .number_waves = 256                                                                    \
        }                                                                                          \
    }
/* LTX-Video with latents of so many frames of h x w, and Latte-1 at 256 px. */
#define LTX(f, h, w)                                                                               \
    {                                                                                              \
        .kind = LG_LTX, .channels = 128, .frames = f, .height = h, .width = w, .patch = 1,         \
        .hidden = 2048, .depth = 28, .heads = 32, .mlp_ratio = 4, .n_texts = 1,                    \
        .text = {{.length = 128, .width = 4096}}, .norm_eps = 1e-6                                 \
    }
#define LATTE(f, side)                                                                             \
    {                                                                                              \
        .kind = LG_LATTE, .channels = 4, .frames = f, .height = side, .width = side, .patch = 2,   \
        .hidden = 1152, .depth = 28, .heads = 16, .mlp_ratio = 4, .n_texts = 1,                    \
        .text = {{.length = 120, .width = 4096}}, .norm_eps = 1e-6, .sample_size = 64              \
    }
static const struct preset {
    const char *name;
    struct lg_denoiser_config c;
    int rank; /* of adapters on its attentions; 0: all is trained */
} presets[] = {
    {"DiT-XL/2", DENOISER_SHAPE(LG_DIT, 4, 32, 32, 2, 1152, 28, 16, 4, 1000, 0, 0, 1e-6), 0},
    {"DiT-XL/2-512", DENOISER_SHAPE(LG_DIT, 4, 64, 64, 2, 1152, 28, 16, 4, 1000, 0, 0, 1e-6), 0},
    {"PixArt-Sigma-512",
     DENOISER_SHAPE(LG_PIXART, 4, 64, 64, 2, 1152, 28, 16, 4, 0, 300, 4096, 1e-6), 0},
    {"PixArt-Sigma-1024",
     DENOISER_SHAPE(LG_PIXART, 4, 128, 128, 2, 1152, 28, 16, 4, 0, 300, 4096, 1e-6), 0},
    {"SD3.5-medium-512", SD35_MEDIUM(64), 0},
    {"SD3.5-medium-1024", SD35_MEDIUM(128), 0},
    {"FLUX.1-LoRA-512", FLUX(64), 16},
    {"FLUX.1-LoRA-1024", FLUX(128), 16},
    {"SD21-512", SD21(64), 0},
    {"SD21-768", SD21(96), 0},
    {"SDXL-1024-lora", SDXL(128), 16},
    {"LTX-2496", LTX(13, 12, 16), 0},  /* 97 frames of 384 x 512 */
    {"LTX-16000", LTX(16, 25, 40), 0}, /* 121 frames of 800 x 1280 */
    {"Latte-16x256", LATTE(16, 32), 0},
};
static const struct preset *preset = presets;
static size_t allocated;
static double step_ms, listed_ms;

static void *alloc(size_t bytes)
{
    void *p;
    gpu_need(lg_device_alloc(device, bytes, &p));
    allocated += bytes;
    return p;
}

/* Elements of the compute type, uniform in scale (-1, 1); repeats after a million. */
static lg_tensor noise(int64_t a, int64_t b, double scale)
{
    enum { PERIOD = 1 << 20 };
    static float host[PERIOD];
    size_t e = lg_dtype_bytes(type), n = (size_t)(a * b);
    lg_tensor t = lg_t2(alloc(n * e), type, a, b);
    uint32_t h = 12345;
    for (int i = 0; i < PERIOD; i++) {
        h = h * 1664525u + 1013904223u;
        host[i] = (float)(scale * ((double)h * 0x1p-31 - 1));
    }
    void *staged;
    gpu_need(lg_device_alloc(device, sizeof host, &staged));
    lg_stream_upload(stream, staged, host, sizeof host);
    for (size_t at = 0; at < n; at += PERIOD) {
        int64_t k = (int64_t)LG_MIN(n - at, (size_t)PERIOD);
        lg_cast(stream, &(struct lg_cast_args){.x = lg_t1(staged, LG_F32, k),
                                               .y = lg_t1((char *)t.data + at * e, type, k)});
    }
    lg_stream_sync(stream);
    lg_device_free(device, &staged);
    return t;
}

static lg_tensor vector(int64_t n, double scale)
{
    return lg_t1(noise(1, n, scale).data, type, n);
}

static double now_ms(void)
{
    return (double)lg_now_ns() * 1e-6;
}

/* ---- the step ---- */

struct step {
    struct lg_denoiser_config c;
    lg_denoiser *net;
    lg_params params;
    struct lg_denoiser_input in;
    lg_tensor out, target, weight, loss;
    void *weights;          /* as they are stored; what is trained comes first: */
    lg_tensor w;            // (n), compute type
    lg_tensor grads;        // (n), fp32
    lg_tensor master, m, v; // (n), fp32
    lg_tensor squares;      // (pieces), f64
    void *scratch;
    size_t scratch_bytes;
};

static lg_tensor like4(lg_tensor flat, const struct lg_denoiser_config *c)
{
    return lg_t4(flat.data, flat.dtype, batch, c->channels, lg_denoiser_rows(c), c->width);
}

static void fill_fp32(lg_tensor t, float value)
{
    float *host = malloc(lg_tensor_bytes(&t));
    LG_ASSERT(host);
    for (int64_t i = 0; i < lg_numel(&t); i++) host[i] = value;
    lg_stream_upload(stream, t.data, host, lg_tensor_bytes(&t));
    lg_stream_sync(stream);
    free(host);
}

/* B whole numbers below `end`, above 0. */
static void fill_numbers(lg_tensor t, int end)
{
    int32_t *host = malloc(lg_tensor_bytes(&t));
    LG_ASSERT(host);
    for (int64_t i = 0; i < t.dim[0]; i++) host[i] = (int32_t)(1 + i * 389 % (end - 1));
    lg_stream_upload(stream, t.data, host, lg_tensor_bytes(&t));
    lg_stream_sync(stream);
    free(host);
}

static void optimize(struct step *s)
{
    struct lg_reduce_ranks_args reduce = {.count = 1, .y = s->grads, .squares = s->squares};
    reduce.x[0] = s->grads;
    lg_reduce_ranks(stream, &reduce);
    lg_adamw(stream, &(struct lg_adamw_args){.w = s->master,
                                             .m = s->m,
                                             .v = s->v,
                                             .grad = s->grads,
                                             .w_out = s->master,
                                             .m_out = s->m,
                                             .v_out = s->v,
                                             .working = {s->w},
                                             .copies = 1,
                                             .lr = 1e-4,
                                             .beta1 = 0.9,
                                             .beta2 = 0.999,
                                             .eps = 1e-8,
                                             .grad_scale = 1,
                                             .t = 10});
}

/* Random in numbers of the compute type; as codes of 8 bits none of them is a NaN. */
static void open_weights(struct step *s)
{
    enum { PERIOD = 1 << 20 };
    static uint16_t host[PERIOD];
    const size_t bytes = lg_stored_bytes(&s->params, type), n = (bytes + 1) / 2;
    const bool coded = lg_storage_any(&s->params);
    LG_ASSERT(lg_dtype_bytes(type) == 2);
    s->weights = noise(1, (int64_t)n, 0.03).data;
    if (!coded) return;
    lg_stream_download(stream, host, s->weights, sizeof host);
    lg_stream_sync(stream);
    for (int i = 0; i < PERIOD; i++) host[i] &= 0xffbf;
    for (size_t at = 0; at < n; at += PERIOD)
        lg_stream_upload(stream, (uint16_t *)s->weights + at, host,
                         2 * LG_MIN(n - at, (size_t)PERIOD));
    lg_stream_sync(stream);
}

static void open_texts(struct step *s)
{
    for (int k = 0; k < s->c.n_texts; k++) {
        const int64_t L = s->c.text[k].length, E = s->c.text[k].width, P = s->c.text[k].pooled;
        struct lg_text_states *x = &s->in.text[k];
        if (L) x->states = lg_t3(noise(batch * L, E, 1).data, type, batch, L, E);
        if (P) x->pooled = noise(batch, P, 1);
        if (!L) continue;
        x->length = lg_t1(alloc((size_t)batch * 4), LG_I32, batch);
        fill_numbers(x->length, (int)L + 1);
    }
}

static void open_step(struct step *s)
{
    s->c = preset->c;
    double before = now_ms();
    const char *const recompute[] = {getenv("LG_BENCH_RECOMPUTE"), NULL};
    const char *frozen = getenv("LG_BENCH_FROZEN"), *chunks = getenv("LG_BENCH_MLP_CHUNKS");
    const struct lg_training training = {.adapter = {.rank = preset->rank, .alpha = preset->rank},
                                         .frozen = lg_storage_of(frozen ? frozen : "auto")};
    const struct lg_denoiser_mode mode = {.batch = (int)batch,
                                          .train = true,
                                          .recompute = recompute,
                                          .mlp_chunks = chunks ? atoi(chunks) : 1,
                                          .training = training};
    gpu_need(lg_denoiser_table(&s->c, &training, &s->params));
    gpu_need(lg_denoiser_open(device, &s->c, &mode, &s->net));
    struct lg_denoiser_bytes bytes;
    gpu_need(lg_denoiser_plan(device, &s->c, &mode, &bytes));
    allocated += bytes.activations + bytes.scratch;
    printf("opened in %.1f s; activations %.1f GiB, scratch %.2f GiB\n", (now_ms() - before) * 1e-3,
           (double)bytes.activations * 0x1p-30, (double)bytes.scratch * 0x1p-30);
    int64_t n = (int64_t)s->params.trained_count;
    int64_t values = batch * s->c.channels * lg_denoiser_rows(&s->c) * s->c.width;
    open_weights(s);
    s->w = lg_t1(s->weights, type, n);
    printf("weights %.1f GiB, %.1f M trained\n",
           (double)lg_stored_bytes(&s->params, type) * 0x1p-30, (double)n * 1e-6);
    lg_tensor *fp32[] = {&s->master, &s->m, &s->v, &s->grads};
    for (size_t i = 0; i < LG_ARRAY_LEN(fp32); i++)
        *fp32[i] = lg_t1(alloc((size_t)n * 4), LG_F32, n);
    lg_cast(stream, &(struct lg_cast_args){.x = s->w, .y = s->master});
    int64_t pieces = (n + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE;
    s->squares = lg_t1(alloc((size_t)pieces * sizeof(double)), LG_F64, pieces);
    s->in.x = like4(noise(1, values, 1.5), &s->c);
    s->target = like4(noise(1, values, 1), &s->c);
    s->out = like4(noise(1, values, 1), &s->c);
    s->in.t = lg_t1(alloc((size_t)batch * 4), LG_F32, batch);
    s->weight = lg_t1(alloc((size_t)batch * 4), LG_F32, batch);
    s->loss = lg_t1(alloc((size_t)batch * 4), LG_F32, batch);
    fill_fp32(s->in.t, 421);
    fill_fp32(s->weight, 1.0f / (float)batch);
    if (s->c.kind == LG_DIT) {
        s->in.label = lg_t1(alloc((size_t)batch * 4), LG_I32, batch);
        fill_numbers(s->in.label, 1000);
    }
    open_texts(s);
    const int64_t numbers = lg_denoiser_numbers(&s->c);
    if (numbers) {
        s->in.size = lg_t2(alloc((size_t)(batch * numbers) * 4), LG_F32, batch, numbers);
        fill_fp32(s->in.size, 1024);
    }
    if (s->c.guidance) {
        s->in.guidance = lg_t1(alloc((size_t)batch * 4), LG_F32, batch);
        fill_fp32(s->in.guidance, 3500);
    }
    lg_stream *dry, *real = stream;
    gpu_need(lg_stream_open_dry(device, &dry));
    stream = dry;
    optimize(s);
    stream = real;
    s->scratch_bytes = lg_stream_scratch_need(dry);
    s->scratch = alloc(s->scratch_bytes);
    lg_stream_close(&dry);
}

static void run_step(struct step *s)
{
    lg_denoiser_forward(s->net, stream, s->weights, &s->in, s->out);
    lg_mse_loss(stream, &(struct lg_mse_loss_args){.pred = s->out,
                                                   .target = s->target,
                                                   .weight = s->weight,
                                                   .loss = s->loss,
                                                   .dpred = s->out});
    lg_denoiser_backward(s->net, stream, s->weights, &s->in, s->out, s->grads.data, false);
    lg_stream_set_scratch(stream, s->scratch, s->scratch_bytes);
    optimize(s);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench_step(int steps)
{
    struct step s = {0};
    double ms[STEPS_MAX];
    open_step(&s);
    for (int i = 0; i < WARM_UP; i++) run_step(&s);
    lg_stream_sync(stream);
    for (int i = 0; i < steps; i++) {
        double before = now_ms();
        run_step(&s);
        lg_stream_sync(stream);
        ms[i] = now_ms() - before;
    }
    qsort(ms, (size_t)steps, sizeof *ms, ascending);
    step_ms = ms[steps / 2];
    double flops = (preset->rank ? 2 : 3) * lg_denoiser_flops(&s.c) * (double)batch;
    printf("step: %.1f ms (%.1f to %.1f), %.0f img/s, %.0f TFLOP/s, %.1f GiB\n", step_ms, ms[0],
           ms[steps - 1], (double)batch / step_ms * 1e3, flops / step_ms * 1e-9,
           (double)allocated * 0x1p-30);
    op_times_start(device);
    for (int i = 0; i < TIMED_STEPS; i++) run_step(&s);
    op_times_print(stream, TIMED_STEPS);
    double before = now_ms();
    for (int i = 0; i < CALLS; i++) optimize(&s);
    lg_stream_sync(stream);
    double opt_ms = (now_ms() - before) / CALLS;
    printf("  the gradients' norm, AdamW with weights in 16 bits: %.2f ms\n", opt_ms);
    listed_ms += opt_ms;
    lg_denoiser_close(&s.net);
    lg_params_free(&s.params);
}

/* ---- single operations ---- */

/* Prints a row for `body`, run CALLS times. */
#define ROW(name, times, flops, bytes, body)                                                       \
    do {                                                                                           \
        body;                                                                                      \
        lg_stream_sync(stream);                                                                    \
        double before_ = now_ms();                                                                 \
        for (int c_ = 0; c_ < CALLS; c_++) body;                                                   \
        lg_stream_sync(stream);                                                                    \
        print_row(name, times, (now_ms() - before_) / CALLS, flops, bytes);                        \
    } while (0)

static double last_ms;
static void print_row(const char *name, int times, double ms, double flops, double bytes)
{
    last_ms = ms;
    listed_ms += ms * times;
    printf("  %-34s %8.3f ms x %3d = %6.1f ms  ", name, ms, times, ms * times);
    if (flops > 0)
        printf("%6.0f TFLOP/s", flops / ms * 1e-9);
    else
        printf("%6.0f GB/s   ", bytes / ms * 1e-6);
    printf("  %4.1f %%\n", 100 * ms * times / step_ms);
    fflush(stdout);
}

/* Scratch memory that serves every operation here. */
static void take_scratch(size_t bytes)
{
    lg_stream_set_scratch(stream, alloc(bytes), bytes);
}

/* The same for what `body` takes more than that of the row before. */
#define ROW_MORE(name, times, bytes, body)                                                         \
    do {                                                                                           \
        double less_ = last_ms;                                                                    \
        body;                                                                                      \
        lg_stream_sync(stream);                                                                    \
        double before_ = now_ms();                                                                 \
        for (int c_ = 0; c_ < CALLS; c_++) body;                                                   \
        lg_stream_sync(stream);                                                                    \
        print_row(name, times, (now_ms() - before_) / CALLS - less_, 0, bytes);                    \
    } while (0)

/* below: the activation of the layer before, which dx goes through. Gradients of biases are made on the
 * way down: by what comes behind the layer. */
struct layer {
    const char *name;
    int64_t N, K;
    lg_act act, below;
};
static void bench_linear(int64_t M, const struct layer *l)
{
    const char *name = l->name;
    int64_t N = l->N, K = l->K;
    lg_act act = l->act;
    char row[64];
    double flops = 2.0 * (double)M * (double)N * (double)K;
    lg_tensor x = noise(M, K, 1), w = noise(N, K, 0.03), bias = vector(N, 0.1), y = noise(M, N, 1);
    lg_tensor pre = act ? noise(M, N, 1) : LG_NONE, dw = noise(N, K, 1);
    snprintf(row, sizeof row, "%s forward", name);
    ROW(row, 28, flops, 0,
        lg_linear_forward(stream,
                          &(struct lg_linear_forward_args){
                              .x = x, .w = w, .bias = bias, .y = y, .pre = pre, .act = act}));
    snprintf(row, sizeof row, "%s dx", name);
    ROW(row, 28, flops, 0,
        lg_linear_backward_data(stream,
                                &(struct lg_linear_backward_data_args){.dy = y, .w = w, .dx = x}));
    lg_tensor below = LG_NONE, dbelow = LG_NONE;
    if (l->below) {
        below = noise(M, K, 1), dbelow = vector(K, 1);
        snprintf(row, sizeof row, "  with GELU backward, dbias");
        struct lg_linear_backward_data_args through = {
            .dy = y, .w = w, .dx = x, .act = l->below, .pre = below, .dbias = dbelow};
        ROW_MORE(row, 28, 6 * (double)(M * K), lg_linear_backward_data(stream, &through));
    }
    snprintf(row, sizeof row, "%s dw", name);
    ROW(row, 28, flops, 0,
        lg_linear_backward_weight(
            stream, &(struct lg_linear_backward_weight_args){.dy = y, .x = x, .dw = dw}));
    lg_tensor *all[] = {&x, &w, &bias, &y, &pre, &dw, &below, &dbelow};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]->data);
}

static lg_tensor head_view(lg_tensor t, int64_t T, int64_t H, int64_t d, int64_t from)
{
    return lg_split(lg_split(lg_slice(t, 1, from, H * d), 1, d), 0, T);
}

static void bench_attention(int64_t T, int64_t H, int64_t d)
{
    int64_t D = H * d, rows = batch * T;
    double flops = 4.0 * (double)(batch * T * T) * (double)D, scale = 1 / sqrt((double)d);
    lg_tensor qkv = noise(rows, 3 * D, 1), dqkv = noise(rows, 3 * D, 1), o = noise(rows, D, 1);
    lg_tensor dout = noise(rows, D, 1),
              lse = lg_t3(alloc((size_t)(rows * H) * 4), LG_F32, batch, H, T);
    ROW("attention forward", 28, flops, 0,
        lg_attention_forward(
            stream, &(struct lg_attention_forward_args){.q = head_view(qkv, T, H, d, 0),
                                                        .k = head_view(qkv, T, H, d, D),
                                                        .v = head_view(qkv, T, H, d, 2 * D),
                                                        .o = head_view(o, T, H, d, 0),
                                                        .lse = lse,
                                                        .scale = scale}));
    struct lg_attention_backward_args back = {.dout = head_view(dout, T, H, d, 0),
                                              .o = head_view(o, T, H, d, 0),
                                              .q = head_view(qkv, T, H, d, 0),
                                              .k = head_view(qkv, T, H, d, D),
                                              .v = head_view(qkv, T, H, d, 2 * D),
                                              .lse = lse,
                                              .dq = head_view(dqkv, T, H, d, 0),
                                              .dk = head_view(dqkv, T, H, d, D),
                                              .dv = head_view(dqkv, T, H, d, 2 * D),
                                              .scale = scale};
    ROW("attention backward", 28, 2.5 * flops, 0, lg_attention_backward(stream, &back));
    back.dbias = vector(3 * D, 1);
    ROW_MORE("  with dbias of q, k, v", 28, 2 * (double)(3 * rows * D),
             lg_attention_backward(stream, &back));
    lg_tensor *all[] = {&qkv, &dqkv, &o, &dout, &lse, &back.dbias};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]->data);
}

static lg_tensor tokens(lg_tensor t, int64_t T)
{
    return lg_t3(t.data, t.dtype, batch, T, t.dim[1]);
}
static lg_tensor chunk(lg_tensor mod, int64_t D, int i)
{
    return lg_slice(mod, 1, i * D, D);
}

static void bench_rows(int64_t T, int64_t D)
{
    int64_t rows = batch * T;
    double unit = (double)(rows * D) * (double)lg_dtype_bytes(type);
    lg_tensor x = tokens(noise(rows, D, 1), T), y = tokens(noise(rows, D, 1), T);
    lg_tensor z = tokens(noise(rows, D, 1), T), mod = noise(batch, 6 * D, 1);
    lg_tensor dmod = noise(batch, 6 * D, 1), dbias = vector(D, 1);
    lg_tensor mean = lg_t2(alloc((size_t)rows * 4), LG_F32, batch, T), rstd = mean;
    rstd.data = alloc((size_t)rows * 4);
    ROW("norm, modulate", 57, 0, 2 * unit,
        lg_norm_modulate_forward(stream,
                                 &(struct lg_norm_modulate_forward_args){.x = x,
                                                                         .shift = chunk(mod, D, 0),
                                                                         .scale = chunk(mod, D, 1),
                                                                         .y = y,
                                                                         .mean = mean,
                                                                         .rstd = rstd,
                                                                         .eps = 1e-6}));
    ROW("norm, modulate backward", 57, 0, 4 * unit,
        lg_norm_modulate_backward(
            stream, &(struct lg_norm_modulate_backward_args){.dy = y,
                                                             .x = x,
                                                             .mean = mean,
                                                             .rstd = rstd,
                                                             .scale = chunk(mod, D, 1),
                                                             .dx = z,
                                                             .dshift = chunk(dmod, D, 0),
                                                             .dscale = chunk(dmod, D, 1),
                                                             .accumulate = true}));
    ROW("gated residual", 56, 0, 3 * unit,
        lg_gate_residual_forward(stream, &(struct lg_gate_residual_forward_args){
                                             .x = x, .y = y, .gate = chunk(mod, D, 2), .out = z}));
    ROW("gated residual backward", 56, 0, 3 * unit,
        lg_gate_residual_backward(
            stream, &(struct lg_gate_residual_backward_args){.dout = x,
                                                             .y = y,
                                                             .gate = chunk(mod, D, 2),
                                                             .dy = z,
                                                             .dgate = chunk(dmod, D, 2),
                                                             .dbias = dbias}));
    lg_tensor *all[] = {&x, &y, &z, &mod, &dmod, &dbias, &mean, &rstd};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]->data);
}

int main(int argc, char **argv)
{
    batch = argc > 1 ? atol(argv[1]) : 256;
    int steps = argc > 2 ? atoi(argv[2]) : 10;
    LG_ASSERT(batch >= 1 && steps >= 1 && steps <= STEPS_MAX);
    device = gpu_open("cuda:0", argc > 3 ? argv[3] : "bf16");
    type = lg_device_dtype(device);
    gpu_need(lg_stream_open(device, &stream));
    for (size_t i = 0; argc > 4 && i < LG_ARRAY_LEN(presets); i++)
        if (!strcmp(argv[4], presets[i].name)) preset = &presets[i];
    printf("%s, %s, batch %lld\n", lg_device_fingerprint(device), preset->name, (long long)batch);
    bench_step(steps);
    if (argc > 4) return 0;
    int64_t T = 256, D = 1152, M = batch * T;
    take_scratch((size_t)2 << 30);
    bench_linear(M, &(struct layer){.name = "qkv", .N = 3 * D, .K = D});
    bench_linear(M, &(struct layer){.name = "out", .N = D, .K = D});
    bench_linear(M, &(struct layer){.name = "up", .N = 4 * D, .K = D, .act = LG_ACT_GELU_TANH});
    bench_linear(M, &(struct layer){.name = "down", .N = D, .K = 4 * D, .below = LG_ACT_GELU_TANH});
    bench_attention(T, 16, 72);
    bench_rows(T, D);
    printf("  listed: %.1f of %.1f ms\n", listed_ms, step_ms);
    lg_stream_close(&stream);
    lg_device_close(&device);
    return 0;
}
