/* Rounding is a property of the host backend's source (kernels/host/isa.h), not of what the compiler
 * does to it. Two sides of that:
 *
 * An element's bits depend on its own inputs alone. Every operation of columns.def works on columns,
 * which are filled by their class, of which there are a few, so columns of one class must come out equal,
 * whatever their place in a whole vector or behind the last one, their neighbours, the row's length
 * and address, and the number of threads that share the work. Where a statistic of the whole row
 * enters (a mean, a softmax) that holds among rows of one length. In and around the inputs lies NaN
 * where nothing may be read.
 *
 * The library computes the same bits as one that is compiled without optimization, for every case of
 * op_cases.def: no value comes from a fused, folded or reordered expression. The lines "bits" let
 * tests/check.sh compare with a build for sanitizers. */
#include "base/check.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "tests/unit/columns.h"
#include "tests/unit/isas.h"
#include "tests/unit/op_cases.h"
#include <libgen.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <cmocka.h>

enum {
    CLASSES = 7,
    THREADS_MAX = 3,
    ELEMENT_MAX = 8, /* bytes */
    FAILURES_SHOWN_MAX = 20,
    SCRATCH_BYTES = 8 << 20,
};
static const int OFFSETS[] = {0, 1, 3, 7, 8, 13}; /* of the widest, the first and the last */
enum { OFFSET_MAX = 13 };

/* Not here: oneDNN's, whose rows test_host.c holds apart, and those that round nothing, which
 * op_cases.def knows as exact. */
static const char *const ELSEWHERE[] = {
    "linear_forward", "linear_backward_data", "linear_backward_weight", "conv2d_forward",
    "conv2d_backward_data", "conv2d_backward_weight", "upsample2x_forward", "embedding_forward",
    "t5_bias_forward", "patchify_forward", "unpatchify_forward", "unpatchify_backward",
    "nchw_to_nhwc", "nhwc_to_nchw", "copy_rows", "posterior_split", "conv3d_forward",
    /* two of those here: */
    "residual_norm_forward", "norm_residual_backward", "norm_conv2d_forward",
    /* group_norm_forward's first half: */
    "group_mean_var_forward"};

static void every_operation_has_its_place(void **state)
{
#define LG_OP(name, ...)                                                                           \
    {                                                                                              \
        int here = 0, elsewhere = 0;                                                               \
        for (const struct column_work *w = COLUMN_WORK; w->op; w++) here += !strcmp(w->op, #name); \
        for (size_t i = 0; i < LG_ARRAY_LEN(ELSEWHERE); i++)                                       \
            elsewhere += !strcmp(ELSEWHERE[i], #name);                                             \
        if ((here > 0) + elsewhere != 1) fail_msg(#name " is nowhere, or twice");                  \
    }
#include "kernels/ops.def"
#undef LG_OP
}

static const char *g_isa;

static lg_device *open_host(int threads)
{
    lg_device *d = NULL;
    if (lg_device_open("host", &(struct lg_device_options){.isa = g_isa, .threads = threads}, &d) <
        0) {
        printf("  cannot open host: %s\n", lg_err_text());
        fflush(stdout);
        _exit(2);
    }
    return d;
}

/* Memory of a child, and what every class of columns was found to be. */
struct trial {
    lg_stream *stream[THREADS_MAX];
    char *in[COLUMN_INS], *out[COLUMN_OUTS];
    size_t bytes; /* of each */
    const struct column_work *work;
    int variant;
    struct found {
        bool known;
        char bits[ELEMENT_MAX];
    } * found; /* [COLUMN_OUTS][COLUMN_ROWS][classes] */
};

static int64_t class_of(const struct column_work *w, int64_t column)
{
    return w->place_enters ? column : (column * 5 + column / 23) % CLASSES;
}

/* The value of all columns of a class in one row of input k: one in eight is a zero of either sign. */
static void write_value(char *at, lg_dtype type, uint64_t k, uint64_t row, uint64_t class)
{
    const uint64_t key[] = {k, row, class};
    const uint64_t u = XXH3_64bits(key, sizeof key);
    const bool zero = u % 8 == 0;
    const double x = (double)(int64_t)u * 0x1p-63;
    const float f = zero ? x < 0 ? -0.0f : 0.0f : (float)x;
    const double d = zero ? (double)f : x;
    const uint16_t half = zero ? (uint16_t)(u >> 48) & 0x8000 : (uint16_t)(u >> 48) & 0xbfff;
    if (type == LG_F32) memcpy(at, &f, sizeof f);
    if (type == LG_F64) memcpy(at, &d, sizeof d);
    if (type == LG_F16 || type == LG_BF16) memcpy(at, &half, sizeof half);
    if (type == LG_U8) *at = (char)(u >> 56);
}

static void write_inputs(const struct trial *t, struct column_call *c, int offset)
{
    const size_t size = lg_dtype_bytes(t->work->in_type);
    for (int k = 0; k < COLUMN_INS; k++) {
        c->in[k] = NULL;
        if (!t->work->in[k]) continue;
        const size_t bytes = ((size_t)(t->work->in[k] * c->n) + OFFSET_MAX + COLUMN_VECTOR) * size;
        LG_ASSERT(bytes <= t->bytes);
        memset(t->in[k], 0xFF, bytes);
        char *at = c->in[k] = t->in[k] + (size_t)offset * size;
        for (int row = 0; row < t->work->in[k]; row++)
            for (int64_t i = 0; i < c->n; i++, at += size)
                write_value(at, t->work->in_type, (uint64_t)k, (uint64_t)row,
                            (uint64_t)class_of(t->work, i));
    }
}

/* Of one row of output k: the number of the first column that differs from its class, or -1. */
static int64_t stray_column(const struct trial *t, const struct column_call *c, int k, int row)
{
    const size_t size = lg_dtype_bytes(t->work->out_type);
    const int64_t classes = t->work->place_enters ? t->work->wide : CLASSES;
    for (int64_t i = 0; i < c->n; i++) {
        const char *bits = (const char *)c->out[k] + (size_t)(row * c->n + i) * size;
        struct found *f = &t->found[(k * COLUMN_ROWS + row) * classes + class_of(t->work, i)];
        if (!f->known) memcpy(f->bits, bits, size);
        f->known = true;
        if (memcmp(f->bits, bits, size)) return i;
    }
    return -1;
}

static int check_call(const struct trial *t, int64_t n, int offset, int threads)
{
    struct column_call c = {.stream = t->stream[threads - 1], .n = n, .variant = t->variant};
    write_inputs(t, &c, offset);
    for (int k = 0; k < COLUMN_OUTS; k++) {
        memset(t->out[k], 0xFF,
               LG_MIN(t->bytes, (size_t)(n + COLUMN_VECTOR) * COLUMN_ROWS * ELEMENT_MAX));
        c.out[k] = t->out[k] + (size_t)offset * lg_dtype_bytes(t->work->out_type);
    }
    t->work->run(&c);
    lg_stream_sync(c.stream);
    for (int k = 0; k < COLUMN_OUTS; k++)
        for (int row = 0; row < t->work->out[k]; row++) {
            int64_t i = stray_column(t, &c, k, row);
            if (i < 0) continue;
            printf(
                "  %s: %s, variant %d: column %d of %d (row %d of output %d, %d elements off, %d "
                "threads) has bits of its own\n",
                g_isa, t->work->op, t->variant, (int)i, (int)n, row, k, offset, threads);
            return 1;
        }
    return 0;
}

/* Every length, at every offset; the last and the widest with several threads too. */
static int check_work(struct trial *t)
{
    const struct column_work *w = t->work;
    const int64_t classes = w->place_enters ? w->wide : CLASSES;
    const size_t bytes = (size_t)(COLUMN_OUTS * COLUMN_ROWS * classes) * sizeof *t->found;
    int failures = 0;
    t->found = calloc(1, bytes);
    LG_ASSERT(t->found);
    for (int n = 1; n <= COLUMN_SHORT + (w->wide > 0) && !failures; n++) {
        const int wide = n > COLUMN_SHORT ? w->wide : n;
        if (w->row_enters) memset(t->found, 0, bytes);
        for (size_t o = 0; o < LG_ARRAY_LEN(OFFSETS) && !failures;
             o += n > COLUMN_SHORT ? LG_ARRAY_LEN(OFFSETS) - 1 : 1)
            for (int threads = 1; threads <= (n < COLUMN_SHORT ? 1 : THREADS_MAX); threads++)
                failures += check_call(t, wide, OFFSETS[o], threads);
    }
    free(t->found);
    return failures;
}

static void *take(lg_device *d, size_t bytes)
{
    void *p = NULL;
    LG_ASSERT(lg_device_alloc(d, bytes, &p) == 0);
    return p;
}

static int check_places(const char *isa)
{
    lg_device *device[THREADS_MAX];
    struct trial t = {
        .bytes =
            LG_MAX((size_t)COLUMN_FLAT, (size_t)COLUMN_WIDE * COLUMN_ROWS) * ELEMENT_MAX + 1024};
    int failures = 0;
    g_isa = isa;
    for (int i = 0; i < THREADS_MAX; i++) {
        device[i] = open_host(i + 1);
        LG_ASSERT(lg_stream_open(device[i], &t.stream[i]) == 0);
        lg_stream_set_scratch(t.stream[i], take(device[i], SCRATCH_BYTES), SCRATCH_BYTES);
    }
    for (int k = 0; k < COLUMN_INS; k++) t.in[k] = take(device[0], t.bytes);
    for (int k = 0; k < COLUMN_OUTS; k++) t.out[k] = take(device[0], t.bytes);
    for (t.work = COLUMN_WORK; t.work->op && failures < FAILURES_SHOWN_MAX; t.work++)
        for (t.variant = t.work->first; t.variant < t.work->first + t.work->variants; t.variant++)
            failures += check_work(&t);
    for (int i = 0; i < THREADS_MAX; i++) {
        lg_stream_close(&t.stream[i]);
        lg_device_close(&device[i]);
    }
    return failures;
}

static void bits_depend_on_no_place(void **state)
{
    for_each_isa(check_places);
}

/* One number for all outputs of each case. */
static void hash_cases(uint64_t *hash)
{
    lg_device *d = open_host(1);
    for (int i = 0; i < op_case_count(); i++) {
        struct op_result r;
        op_case_run(i, d, NULL, &r);
        hash[i] = 0;
        for (int o = 0; o < r.n_out; o++)
            hash[i] =
                XXH3_64bits_withSeed(r.out[o].v, (size_t)r.out[o].count * sizeof(double), hash[i]);
        op_result_free(&r);
    }
    lg_device_close(&d);
}

/* Two libraries cannot share a process: oneDNN takes one of them for all. */
static int check_against_unoptimized(const char *isa)
{
    char self[1024], folder[1100];
    const int cases = op_case_count();
    const size_t bytes = 2 * (size_t)cases * sizeof(uint64_t);
    int status = 1, failures = 0;
    uint64_t *hash = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    LG_ASSERT(hash != MAP_FAILED);
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    LG_ASSERT(length > 0);
    self[length] = 0;
    snprintf(folder, sizeof folder, "%s/../unoptimized/lib", dirname(self));
    g_isa = isa;
    fflush(NULL);
    pid_t child = fork();
    LG_ASSERT(child >= 0);
    if (child == 0) {
        setenv("LG_BACKEND_DIR", folder, 1);
        hash_cases(hash + cases);
        _exit(0);
    }
    LG_ASSERT(waitpid(child, &status, 0) == child);
    if (status != 0) return 1;
    hash_cases(hash);
    printf("  bits %s %016llx\n", isa,
           (unsigned long long)XXH3_64bits(hash, (size_t)cases * sizeof *hash));
    for (int i = 0; i < cases; i++) {
        if (hash[i] == hash[cases + i]) continue;
        printf("  %s: %s(%s) has other bits where nothing is optimized\n", isa, op_case_op(i),
               op_case_shape(i));
        failures++;
    }
    munmap(hash, bytes);
    return failures;
}

static void bits_depend_on_no_optimization(void **state)
{
    for_each_isa(check_against_unoptimized);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_has_its_place),
        cmocka_unit_test(bits_depend_on_no_place),
        cmocka_unit_test(bits_depend_on_no_optimization),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
