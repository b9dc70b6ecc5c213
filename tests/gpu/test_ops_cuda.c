/* The CUDA backend against ref64: every case of op_cases.def in every precision. Error in the 2-norm,
 * the same bits twice, on another device object too; a sample's bits whatever its neighbours and slot;
 * right results also where tensors lie on 8 bytes only.
 *
 * usage: test_ops_cuda [OPERATIONS [PRECISION]]
 *
 * OPERATIONS: those whose name contains one of these words, separated by commas; with a "!" before them the
 * others; "": all. */
#include "tests/gpu/gpu_test.h"
#include "tests/unit/op_cases.h"
#include <string.h>

/* Infinities must agree; so must what lies beyond fp16's range. */
static double relative_error(const struct op_output *got, const struct op_output *want,
                             const struct gpu_precision *p)
{
    double difference = 0, norm = 0, largest = p->round == LG_F16 ? 65519 : INFINITY;
    for (int64_t i = 0; i < want->count; i++) {
        if (isinf(got->v[i]) && (got->v[i] > 0 ? want->v[i] > largest : want->v[i] < -largest))
            continue;
        if (isinf(want->v[i]) && got->v[i] == want->v[i]) continue;
        difference += (got->v[i] - want->v[i]) * (got->v[i] - want->v[i]);
        norm += want->v[i] * want->v[i];
    }
    /* Of numbers of size one, which may cancel to nearly nothing: it is they that are rounded. */
    if (!strcmp(want->name, "mean")) norm = fmax(norm, (double)want->count);
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static bool same_bits(const double *a, const double *b, int64_t n)
{
    return memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

static bool complain(int i, const struct gpu_precision *p, const char *what, const char *output,
                     double error)
{
    printf("FAIL %s(%s) in %s: %s %s", op_case_op(i), op_case_shape(i), p->name, output, what);
    if (error >= 0 || isnan(error)) printf(" (%.3g)", error);
    printf("\n");
    return false;
}

static bool agrees(int i, const struct gpu_precision *p, const struct op_result *got,
                   const struct op_result *want, const char *how, double *worst)
{
    bool ok = true;
    /* Attention is one product behind another; with tf32 none of them is in tf32. */
    bool two = strstr(op_case_op(i), "attention") && p->round != LG_F32;
    double tolerance = p->tolerance * (two ? sqrt(2) : 1);
    if (got->wrote_outside) ok = complain(i, p, "wrote outside its outputs", how, -1);
    for (int o = 0; o < want->n_out; o++) {
        double error = relative_error(&got->out[o], &want->out[o], p);
        if (!(error <= (want->out[o].exact ? 0 : tolerance)))
            ok = complain(i, p, how, want->out[o].name, error);
        if (got->out[o].twin && !same_bits(got->out[o].v, got->out[o - 1].v, got->out[o].count))
            ok = complain(i, p, "has bits of its own", got->out[o].name, -1);
        if (error > *worst) *worst = error;
    }
    return ok;
}

static bool repeats(int i, const struct gpu_precision *p, lg_device *cuda,
                    const struct op_variant *v, const struct op_result *before)
{
    struct op_result after;
    bool ok = true;
    op_case_run(i, cuda, v, &after);
    for (int o = 0; o < after.n_out; o++)
        if (!same_bits(before->out[o].v, after.out[o].v, after.out[o].count))
            ok = complain(i, p, "has other bits now", after.out[o].name, -1);
    op_result_free(&after);
    return ok;
}

/* Samples of one parity move one slot on, strangers take the others' places. */
static bool alone(int i, const struct gpu_precision *p, lg_device *cuda, struct op_variant v,
                  const struct op_result *before, int parity)
{
    uint64_t ids[OP_BATCH_MAX] = {0};
    struct op_result after;
    bool ok = true;
    int64_t B = before->batch;
    for (int64_t b = 0; b < B; b++) ids[(b + 1) % B] = (uint64_t)(b % 2 == parity ? b : 1000 + b);
    v.ids = ids;
    op_case_run(i, cuda, &v, &after);
    for (int o = 0; o < after.n_out; o++) {
        if (!before->out[o].per_sample) continue;
        int64_t each = after.out[o].count / B;
        for (int64_t b = parity; ok && b < B; b += 2)
            if (!same_bits(before->out[o].v + b * each, after.out[o].v + (b + 1) % B * each, each))
                ok = complain(i, p, "depends on neighbours or slot", after.out[o].name, -1);
    }
    op_result_free(&after);
    return ok;
}

/* Only runs it. */
static void sanitize_case(int i, const struct gpu_precision *p, lg_device *cuda)
{
    struct op_variant v = {.round = p->round, .fresh_scratch = gpu_fresh};
    for (int off = 0; off < 2; off++) {
        struct op_result got;
        v.misaligned = off;
        op_case_run(i, cuda, &v, &got);
        gpu_count(!got.wrote_outside ||
                  complain(i, p, "wrote outside its outputs", off ? "misaligned" : "aligned", -1));
        op_result_free(&got);
    }
}

static void check_case(int i, const struct gpu_precision *p, lg_device *ref, lg_device *cuda,
                       double *worst)
{
    struct op_variant v = {.round = p->round}, off = {.round = p->round, .misaligned = true};
    struct op_result want, got, shifted;
    op_case_run(i, ref, &v, &want);
    op_case_run(i, cuda, &v, &got);
    gpu_count(agrees(i, p, &got, &want, "differs from ref64", worst));
    gpu_count(repeats(i, p, cuda, &v, &got));
    gpu_count(alone(i, p, cuda, v, &got, 0) & alone(i, p, cuda, v, &got, 1));
    op_case_run(i, cuda, &off, &shifted);
    gpu_count(agrees(i, p, &shifted, &want, "differs from ref64 when misaligned", worst));
    op_result_free(&want);
    op_result_free(&got);
    op_result_free(&shifted);
}

/* Does the operation's name contain one of the words? */
static bool named(const char *operation, const char *words)
{
    bool others = *words == '!';
    char copy[256], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", words + others);
    if (!*copy) return true;
    for (char *word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest))
        if (strstr(operation, word)) return !others;
    return others;
}

int main(int argc, char **argv)
{
    const char *operations = argc > 1 ? argv[1] : "", *precision = argc > 2 ? argv[2] : "";
    lg_device *ref = gpu_open("ref64", NULL);
    for (int k = 0; k < GPU_PRECISION_COUNT; k++) {
        const struct gpu_precision *p = &GPU_PRECISIONS[k];
        if (!strstr(p->name, precision)) continue;
        lg_device *cuda = gpu_open("cuda:0", p->name);
        double worst = 0;
        if (k == 0) printf("%s\n", lg_device_fingerprint(cuda));
        for (int i = 0; i < op_case_count(); i++) {
            if (!named(op_case_op(i), operations) || !gpu_my_turn()) continue;
            if (gpu_sanitized())
                sanitize_case(i, p, cuda);
            else
                check_case(i, p, ref, cuda, &worst);
        }
        if (!gpu_sanitized())
            printf("%s: largest error %.2e, tolerance %.1e\n", p->name, worst, p->tolerance);
        lg_device_close(&cuda);
    }
    lg_device_close(&ref);
    return gpu_summary();
}
