/* Attention which ref64 would take too long for: over more heads than the GPU has multiprocessors, so that a block
 * takes several (short_attention.cu, short_attention_forward.cu), and over thousands of tokens
 * (long_attention.cu, long_attention_forward.cu). 16-bit results against those in fp32 from the same inputs;
 * samples with equal inputs in both halves of the batch have equal bits; the same bits twice, whatever scratch
 * memory held, and dbias, accumulated the second time, is twice what it was. In bf16, dq and dk of a head err hardly more
 * than where nothing is rounded but dS and the results, though keys have much in common: o_low is given where there are
 * many tokens (kernels/graph/grad.c); and o of few. o, lse and dv are right as well where scores climb from tile to tile of keys,
 * which the forward does not expect. Tokens of two streams give the bits that they give in one.
 *
 * usage: test_long_attention_cuda [FIRST]      FIRST: number of the first of SHAPES, CLIMBING and STREAMS */
#include "kernels/graph/grad.h"
#include "kernels/ops.h"
#include "kernels/streams.h"
#include "tests/gpu/gpu_test.h"

enum { OUTPUTS = 8, SAMPLES_MAX = 32 };
enum { DQ, DK, DV, O, LSE, DBIAS }; /* that of q, k, v */
static const char *const NAMES[OUTPUTS] = {"dq",  "dk",         "dv",         "o",
                                           "lse", "dbias of q", "dbias of k", "dbias of v"};
/* B is even. Where Tk is Tq, q, k and v lie in one buffer. length: of keys of the first sample of each half, the next have one more
 * each; 0: all have all. few: heads under sanitize.sh, where a block still takes several of the first, and of 513 tokens; 0: not
 * looked at. */
struct shape {
    int64_t d, B, Tq, Tk, H, length, few;
};
#define LONG(d)                                                                                    \
    {d, 2, 513, 513, 70, 0, 28}, {d, 2, 1000, 1000, 9, 0, 2}, {d, 2, 1000, 700, 5, 0, 2},          \
        {d, 2, 640, 1300, 5, 0, 2}, {d, 2, 2048, 2048, 5, 0, 0}, {d, 2, 4096, 4096, 4, 0, 0},      \
    {                                                                                              \
        d, 2, 4429, 4429, 3, 0, 0                                                                  \
    }
static const struct shape SHAPES[] = {
    {64, 26, 256, 256, 16, 0, 6}, /* 416 heads: three or four a block */
    {72, 26, 256, 256, 16, 0, 6},
    LONG(64),
    {64, 2, 4096, 128, 5, 0, 0}, /* few keys: queries in parts */
    {64, 2, 4100, 200, 67, 0, 0},
    {64, 2, 4100, 511, 3, 0, 0},
    {64, 4, 4991, 128, 5, 77, 0},
    {64, 2, 2496, 77, 70, 0, 0}, /* at most 128 keys: more heads than blocks, parts, lengths */
    {64, 4, 5200, 120, 3, 33, 0},
    {64, 4, 300, 120, 9, 1, 3},
    {64, 2, 900, 120, 9, 0, 2},
    {64, 2, 256, 128, 67, 0, 2},
    {72, 2, 1000, 120, 67, 0, 2},
    {64, 2, 600, 200, 5, 0, 2}, /* more keys */
    {72, 2, 600, 200, 5, 0, 2},
    {72, 2, 4096, 300, 5, 0, 0},
    {72, 4, 1000, 300, 9, 128, 3},
    {72, 4, 700, 600, 5, 513, 2},
    {72, 4, 5200, 128, 3, 77, 0},
    {72, 4, 700, 16, 9, 3, 3},
    {64, 4, 1000, 300, 9, 128, 3},
    {64, 4, 700, 600, 5, 513, 2},
    LONG(72),
    LONG(128)};
/* Of these scores climb (see climb()). */
static const struct shape CLIMBING[] = {
    {64, 2, 640, 700, 5, 0, 2},    {64, 2, 2048, 2048, 3, 0, 0}, {64, 4, 700, 600, 5, 513, 2},
    {72, 2, 640, 700, 5, 0, 2},    {72, 2, 2048, 2048, 3, 0, 0}, {128, 2, 640, 700, 5, 0, 2},
    {128, 2, 2048, 2048, 3, 0, 0},
};
/* Streams that end with a tile of keys and of queries, within both, after a few rows, before the last few; one of keys alone and of
 * queries alone, few keys in parts, and ends for which tokens are brought together. */
/* first: tokens of the first of two streams, 0: there is one. */
struct firsts {
    int64_t queries, keys;
};
static const struct streams {
    struct shape z;
    struct firsts first;
} STREAMS[] = {
    {{64, 4, 4429, 4429, 3, 0, 0}, {4096, 4096}}, {{64, 4, 900, 900, 9, 0, 2}, {512, 512}},
    {{64, 6, 700, 700, 5, 0, 0}, {304, 304}},     {{64, 2, 1000, 700, 5, 0, 2}, {0, 16}},
    {{64, 4, 1000, 700, 3, 0, 0}, {992, 0}},      {{64, 4, 4100, 200, 3, 0, 0}, {0, 80}},
    {{64, 4, 4100, 200, 3, 0, 0}, {2064, 128}},   {{64, 4, 1000, 1000, 3, 0, 0}, {333, 333}},
    {{72, 4, 700, 200, 5, 0, 0}, {320, 80}},      {{72, 4, 700, 700, 5, 0, 2}, {592, 592}},
    {{72, 2, 640, 1300, 3, 0, 0}, {384, 512}},    {{128, 4, 700, 700, 5, 0, 2}, {176, 176}},
    {{128, 2, 640, 1300, 3, 0, 0}, {512, 1024}},
};
enum {
    FIRST_CLIMBING = LG_ARRAY_LEN(SHAPES),
    FIRST_STREAMS = FIRST_CLIMBING + LG_ARRAY_LEN(CLIMBING),
    SHAPE_COUNT = FIRST_STREAMS + LG_ARRAY_LEN(STREAMS)
};

static lg_device *device;
static lg_stream *stream;
static lg_dtype type;
static bool climbs;          /* of the shape that is looked at */
static struct firsts firsts; /* of the run */

static void *alloc(int64_t count, lg_dtype t)
{
    void *p;
    gpu_need(lg_device_alloc(device, (size_t)count * lg_dtype_bytes(t), &p));
    return p;
}

/* Samples b and b + B / 2 are equal; values rounded to bf16, in scale (-1, 1) + mean. */
static double *values_of(int64_t count, uint32_t seed, double scale, double mean)
{
    size_t n = (size_t)count;
    double *v = malloc(n * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < n / 2; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = v[i + n / 2] = gpu_to_bf16(scale * ((double)seed * 0x1p-31 - 1) + mean);
    }
    return v;
}
/* Rows of samples of T tokens as two streams, of which the first has so many, or (back) as they were. */
static void to_streams(double *v, int64_t count, int64_t B, int64_t T, int64_t first, bool back)
{
    const size_t row = (size_t)(count / (B * T)), bytes = row * sizeof *v;
    double *was = malloc((size_t)count * sizeof *v);
    LG_ASSERT(was);
    memcpy(was, v, (size_t)count * sizeof *v);
    for (int64_t i = 0; i < B * T; i++) {
        const size_t at = (size_t)lg_stream_row(B, T, first, i / T, i % T);
        memcpy(v + (back ? (size_t)i : at) * row, was + (back ? at : (size_t)i) * row, bytes);
    }
    free(was);
}
static void *put(double *v, int64_t count)
{
    void *p = alloc(count, type);
    gpu_put(stream, p, type, v, (size_t)count);
    free(v);
    return p;
}
static void *filled(int64_t count, uint32_t seed, double scale, double mean)
{
    return put(values_of(count, seed, scale, mean), count);
}
/* Gives column 0 of q's and k's heads values by which scores, from each tile of 128 keys to the one before it, stay, climb by 12
 * and once by 132, which exp() has no numbers for, fall as fast, or climb by 0.75 and once by 8.25: one in four queries each,
 * and any 16 neighbours have all four. Rows of 3 D elements. */
static void climb(double *rows, const struct shape *z, int64_t T, bool of_queries, bool of_keys)
{
    static const double QUERY[] = {0, 16, -16, 1};
    const double factor = 8 / sqrt((double)z->d); /* scores are divided by its root */
    for (int64_t r = 0; r < z->B * T; r++)
        for (int64_t h = 0; h < z->H; h++) {
            double *q = rows + r * 3 * z->H * z->d + h * z->d, *k = q + z->H * z->d;
            int64_t tiles = (T - 1) / 128 - r % T / 128;
            if (of_queries) *q = QUERY[r % T / 3 % 4];
            if (of_keys) *k = gpu_to_bf16((6 * (double)tiles + (tiles >= 3 ? 60 : 0)) / factor);
        }
}
enum { SEED_QKV = 1, SEED_DOUT = 3, SEED_KV = 5, SCALE_QKV = 2, FEW_KEYS = 128 };
static const double MEAN_QKV = 0.5; /* what keys have in common */

/* Slice i of rows of 3 D elements. */
static lg_tensor slice(void *packed, const struct shape *z, int64_t T, int i)
{
    int64_t D = z->H * z->d;
    return lg_split(lg_slice(lg_t3(packed, type, z->B, T, 3 * D), 2, i * D, D), 2, z->d);
}

/* Forward, for o and lse, and backward. */
static void enqueue(lg_stream *s, const struct lg_attention_backward_args *a)
{
    lg_attention_forward(s, &(struct lg_attention_forward_args){.q = a->q,
                                                                .k = a->k,
                                                                .v = a->v,
                                                                .k_length = a->k_length,
                                                                .o = a->o,
                                                                .lse = a->lse,
                                                                .o_low = a->o_low,
                                                                .scale = a->scale,
                                                                .first_queries = a->first_queries,
                                                                .first_keys = a->first_keys});
    lg_attention_backward(s, a);
}

/* Outputs of a run, as doubles; packed: what q's or k's gradients lie in. */
static void download(const struct lg_attention_backward_args *a, void *const packed[3],
                     const struct shape *z, double *ret[OUTPUTS])
{
    int64_t D = z->H * z->d;
    for (int i = 0; i < 3; i++) {
        int64_t rows = z->B * (i ? z->Tk : z->Tq);
        double *all = gpu_get(stream, packed[i], type, (size_t)(rows * 3 * D));
        ret[i] = malloc((size_t)(rows * D) * sizeof(double));
        ret[DBIAS + i] = gpu_get(stream, (float *)a->dbias.data + i * D, LG_F32, (size_t)D);
        LG_ASSERT(ret[i]);
        for (int64_t r = 0; r < rows; r++)
            memcpy(ret[i] + r * D, all + (3 * r + i) * D, (size_t)D * sizeof(double));
        to_streams(ret[i], rows * D, z->B, rows / z->B, i ? firsts.keys : firsts.queries, true);
        free(all);
    }
    ret[O] = gpu_get(stream, a->o.data, type, (size_t)(z->B * z->Tq * D));
    to_streams(ret[O], z->B * z->Tq * D, z->B, z->Tq, firsts.queries, true);
    ret[LSE] = gpu_get(stream, a->lse.data, LG_F32, (size_t)(z->B * z->Tq * z->H));
}

/* Bytes of NaNs, or of counters that have counted. */
static void poison(void *scratch, size_t bytes, int byte)
{
    void *v = malloc(bytes);
    LG_ASSERT(v || !bytes);
    memset(v, byte, bytes);
    lg_stream_upload(stream, scratch, v, bytes);
    lg_stream_sync(stream);
    free(v);
}

/* Two runs; the second accumulates dbias. */
static void results(const struct shape *z, const char *precision, double *ret[2][OUTPUTS])
{
    lg_stream *dry;
    int64_t B = z->B, H = z->H, d = z->d, D = H * d, values = B * z->Tq * D;
    bool one = z->Tq == z->Tk;
    device = gpu_open("cuda:0", precision);
    type = lg_device_dtype(device);
    gpu_need(lg_stream_open(device, &stream));
    gpu_need(lg_stream_open_dry(device, &dry));
    double *first = values_of(3 * values, SEED_QKV, SCALE_QKV, MEAN_QKV), *other = NULL;
    if (!one) other = values_of(3 * B * z->Tk * D, SEED_KV, SCALE_QKV, MEAN_QKV);
    if (climbs) climb(first, z, z->Tq, true, one);
    if (climbs && !one) climb(other, z, z->Tk, false, true);
    double *dout = values_of(values, SEED_DOUT, 1, 0);
    to_streams(first, 3 * values, B, z->Tq, firsts.queries, false);
    if (!one) to_streams(other, 3 * B * z->Tk * D, B, z->Tk, firsts.keys, false);
    to_streams(dout, values, B, z->Tq, firsts.queries, false);
    void *q = put(first, 3 * values), *dq = filled(3 * values, 2, 1, 0);
    void *kv = one ? q : put(other, 3 * B * z->Tk * D);
    void *dkv = one ? dq : filled(3 * B * z->Tk * D, 6, 1, 0);
    struct lg_attention_backward_args a = {
        .dout = lg_t4(put(dout, values), type, B, z->Tq, H, d),
        .o = lg_t4(filled(values, 4, 1, 0), type, B, z->Tq, H, d),
        .q = slice(q, z, z->Tq, 0),
        .k = slice(kv, z, z->Tk, 1),
        .v = slice(kv, z, z->Tk, 2),
        .lse = lg_t3(alloc(B * H * z->Tq, LG_F32), LG_F32, B, H, z->Tq),
        .dq = slice(dq, z, z->Tq, 0),
        .dk = slice(dkv, z, z->Tk, 1),
        .dv = slice(dkv, z, z->Tk, 2),
        .dbias = lg_t1(alloc(3 * D, LG_F32), LG_F32, 3 * D),
        .scale = 1 / sqrt((double)d),
        .first_queries = (int)firsts.queries,
        .first_keys = (int)firsts.keys};
    if (lg_dtype_bytes(type) == 2 && LG_MIN(z->Tq, z->Tk) >= LG_GRAD_MANY_TOKENS)
        a.o_low = lg_t4(filled(values, 7, 1, 0), type, B, z->Tq, H, d);
    if (z->length) {
        double lengths[SAMPLES_MAX];
        LG_ASSERT(B <= SAMPLES_MAX);
        for (int64_t b = 0; b < B; b++) lengths[b] = (double)(z->length + b % (B / 2));
        a.k_length = lg_t1(alloc(B, LG_I32), LG_I32, B);
        gpu_put(stream, a.k_length.data, LG_I32, lengths, (size_t)B);
    }
    enqueue(dry, &a);
    size_t bytes = lg_stream_scratch_need(dry);
    void *scratch = gpu_scratch(device, bytes);
    lg_stream_set_scratch(stream, scratch, bytes);
    for (int i = 0; i < 2; i++) {
        a.accumulate_dbias = i == 1;
        if (!gpu_sanitized()) poison(scratch, bytes, i ? 1 : 0xFF);
        enqueue(stream, &a);
        download(&a, (void *const[]){dq, dkv, dkv}, z, ret[i]);
    }
    void *all[] = {q,        dq,         one ? NULL : kv, one ? NULL : dkv, a.dout.data,
                   a.o.data, a.lse.data, a.dbias.data,    a.k_length.data,  a.o_low.data,
                   scratch};
    for (size_t i = 0; i < LG_ARRAY_LEN(all) - gpu_sanitized(); i++)
        if (all[i]) lg_device_free(device, &all[i]);
    lg_stream_close(&dry);
    lg_stream_close(&stream);
    lg_device_close(&device);
}

static void report(bool ok, const struct shape *z, const struct gpu_precision *p, int output,
                   const char *what, double error)
{
    gpu_count(ok);
    if (!ok || error >= 0)
        printf("%sd = %d, %d x %d heads of %d, %d tokens in %s: %s %s %.2e\n", ok ? "" : "FAIL ",
               (int)z->d, (int)z->B, (int)z->H, (int)z->Tq, (int)z->Tk, p->name, NAMES[output],
               what, error);
}

/* The first sample's last head in fp64: dq (Tq, d) and dk (Tk, d). once: dS, dq and dk are rounded
 * to bf16; o: (Tq, H, d), which dS is made of, or NULL. */
static void head_in_fp64(const struct shape *z, const double *o, bool once, double *dq, double *dk)
{
    int64_t T = z->Tq, K = z->Tk, d = z->d, D = z->H * d, from = D - d;
    double *qkv = values_of(3 * z->B * T * D, SEED_QKV, SCALE_QKV, MEAN_QKV), *kv = qkv,
           scale = 1 / sqrt((double)d);
    double *dout = values_of(z->B * T * D, SEED_DOUT, 1, 0), *p = malloc((size_t)K * 2 * sizeof *p),
           *dp = p + K;
    LG_ASSERT(p);
    if (K != T) kv = values_of(3 * z->B * K * D, SEED_KV, SCALE_QKV, MEAN_QKV);
    memset(dk, 0, (size_t)(K * d) * sizeof *dk);
    for (int64_t i = 0; i < T; i++) {
        const double *q = qkv + 3 * i * D + from, *g = dout + i * D + from;
        double total = 0, exact = 0, rounded = 0;
        for (int64_t j = 0; j < K; j++) {
            const double *k = kv + (3 * j + 1) * D + from, *v = k + D;
            double score = 0, sum = 0;
            for (int64_t c = 0; c < d; c++) score += q[c] * k[c], sum += g[c] * v[c];
            p[j] = exp(score * scale), dp[j] = sum;
            total += p[j];
        }
        for (int64_t j = 0; j < K; j++) p[j] /= total, exact += p[j] * dp[j];
        for (int64_t c = 0; o && c < d; c++) rounded += g[c] * o[i * D + from + c];
        for (int64_t c = 0; c < d; c++) dq[i * d + c] = 0;
        for (int64_t j = 0; j < K; j++) {
            const double *k = kv + (3 * j + 1) * D + from;
            double ds = p[j] * (dp[j] - (o ? rounded : exact));
            if (once) ds = gpu_to_bf16(ds);
            for (int64_t c = 0; c < d; c++)
                dq[i * d + c] += ds * scale * k[c], dk[j * d + c] += ds * scale * q[c];
        }
    }
    for (int64_t i = 0; once && i < T * d; i++) dq[i] = gpu_to_bf16(dq[i]);
    for (int64_t i = 0; once && i < K * d; i++) dk[i] = gpu_to_bf16(dk[i]);
    if (kv != qkv) free(kv);
    free(qkv), free(dout), free(p);
}
/* Whether dq and dk err at most a tenth more than where each value is rounded once; heads of 64 a half more, where dS is
 * made of P as it was rounded (kernels/cuda/long_attention.cu); without o_low it would be 2.4 times as much. With few keys nothing
 * is made of o (kernels/cuda/cross_attention.cu). */
static void check_roundings(const struct shape *z, const struct gpu_precision *p,
                            double *const got[OUTPUTS])
{
    int64_t T = LG_MAX(z->Tq, z->Tk), d = z->d, D = z->H * d;
    size_t n = (size_t)(T * d);
    double *x = malloc(n * 5 * sizeof *x);
    LG_ASSERT(x);
    head_in_fp64(z, NULL, false, x, x + n);
    const bool many = LG_MIN(z->Tq, z->Tk) >= LG_GRAD_MANY_TOKENS, few = z->Tk <= FEW_KEYS;
    head_in_fp64(z, many || few ? NULL : got[O], true, x + 2 * n, x + 3 * n);
    for (int o = DQ; o <= DK; o++) {
        const size_t values = (size_t)((o == DQ ? z->Tq : z->Tk) * d);
        for (size_t i = 0; i < values; i++)
            x[4 * n + i] = got[o][(int64_t)i / d * D + D - d + (int64_t)i % d];
        double ours = gpu_error(x + 4 * n, x + (size_t)o * n, values, 1e-30);
        double once = gpu_error(x + (size_t)(2 + o) * n, x + (size_t)o * n, values, 1e-30);
        report(ours <= (many && d == 64 ? 1.5 : 1.1) * once, z, p, o,
               "error over that of one rounding", ours / once);
    }
    free(x);
}
/* Of what has to be few enough for fp64. */
static bool checks_roundings(const struct shape *z)
{
    return z->Tq <= 1000 && !z->length && !climbs && (z->Tq == z->Tk || z->Tk <= FEW_KEYS);
}

/* Two streams beside one. */
static void check_streams(const struct shape *z, const struct gpu_precision *p)
{
    double *want[2][OUTPUTS], *got[2][OUTPUTS];
    results(z, p->name, got);
    firsts = (struct firsts){0, 0};
    results(z, p->name, want);
    for (int o = 0; o < OUTPUTS; o++) {
        const int64_t rows = z->B * (o == DK || o == DV ? z->Tk : z->Tq), D = z->H * z->d;
        const size_t n = (size_t)(o < LSE ? rows * D : o == LSE ? rows * z->H : D);
        bool same = true;
        /* Sums of rows that lie in another order. */
        if (o < DBIAS) same = !memcmp(got[0][o], want[0][o], n * sizeof(double));
        report(same, z, p, o, "differs in two streams", -1);
        report(gpu_error(got[0][o], want[0][o], n, 1e-30) < 1e-4, z, p, o, "of two streams", -1);
        for (int i = 0; i < 2; i++) free(got[i][o]), free(want[i][o]);
    }
}

static void check(const struct shape *z, const struct gpu_precision *p)
{
    if (firsts.queries || firsts.keys) {
        check_streams(z, p);
        return;
    }
    double *want[2][OUTPUTS], *got[2][OUTPUTS];
    results(z, p->name, got);
    if (gpu_sanitized())
        memcpy(want, got, sizeof want);
    else
        results(z, "fp32", want);
    if (!gpu_sanitized() && p->round == LG_BF16 && checks_roundings(z))
        check_roundings(z, p, got[0]);
    for (int o = 0; o < OUTPUTS; o++) {
        int64_t rows = z->B * (o == DK || o == DV ? z->Tk : z->Tq), D = z->H * z->d;
        size_t n = (size_t)(o < LSE ? rows * D : o == LSE ? rows * z->H : D);
        /* The bias of k: 0 against 0. */
        double error = gpu_error(got[0][o], want[0][o], n, 1e-30);
        bool again = true, halves = true;
        for (size_t i = 0; i < n; i++) again &= got[1][o][i] == (o < DBIAS ? 1 : 2) * got[0][o][i];
        for (size_t i = 0; o < DBIAS && i < n / 2; i++)
            halves &= got[0][o][i] == got[0][o][i + n / 2];
        /* With scores as far apart dq and dk are sums of what cancels. */
        if (!climbs || o == O || o == LSE || o == DV)
            report(error <= sqrt(2) * p->tolerance, z, p, o, "error", error);
        report(again, z, p, o, "differs the second time", -1);
        report(halves, z, p, o, "differs in the second half", -1);
        for (int i = 0; i < 2; i++) {
            if (want[i][o] != got[i][o]) free(want[i][o]);
            free(got[i][o]);
        }
    }
}

/* What sanitize.sh looks at has to be short. */
static bool wanted(const struct shape *z, const struct gpu_precision *p)
{
    return strstr("fp16 bf16", p->name) && (!gpu_sanitized() || z->few);
}
static struct shape looked_at(struct shape z)
{
    if (gpu_sanitized()) z.H = z.few;
    return z;
}

int main(int argc, char **argv)
{
    size_t from = argc > 1 ? (size_t)atoi(argv[1]) : 0;
    for (int k = 0; k < GPU_PRECISION_COUNT; k++)
        for (size_t i = from; i < SHAPE_COUNT; i++) {
            climbs = i >= FIRST_CLIMBING && i < FIRST_STREAMS;
            struct shape z = i < FIRST_CLIMBING  ? SHAPES[i]
                             : i < FIRST_STREAMS ? CLIMBING[i - FIRST_CLIMBING]
                                                 : STREAMS[i - FIRST_STREAMS].z;
            firsts = i < FIRST_STREAMS ? (struct firsts){0, 0} : STREAMS[i - FIRST_STREAMS].first;
            if (!wanted(&z, &GPU_PRECISIONS[k]) || !gpu_my_turn()) continue;
            z = looked_at(z);
            check(&z, &GPU_PRECISIONS[k]);
        }
    return gpu_summary();
}
