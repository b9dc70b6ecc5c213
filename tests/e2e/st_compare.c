/* Compares tensors of two safetensors files. For the end-to-end scripts.
 *
 *     st_compare A B TOLERANCE TENSOR[=NAME_IN_B] ...
 *
 * Prints shape and relative error (2-norm of the difference over 2-norm in B) of each tensor. Exits
 * 1 when one is missing, has another shape, or is not within TOLERANCE. */
#include "stages/io/safetensors.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool same_shape(const struct lg_st_entry *a, const struct lg_st_entry *b)
{
    return a->rank == b->rank && !memcmp(a->dim, b->dim, (size_t)a->rank * sizeof a->dim[0]);
}

/* 2-norm of a - b over that of b; NaN when one of them holds NaN. */
static int relative_error(const struct lg_st_entry *a, const struct lg_st_entry *b, double *ret)
{
    size_t count = 1;
    for (int i = 0; i < a->rank; i++) count *= (size_t)a->dim[i];
    float *x = calloc(2 * LG_MAX(count, (size_t)1), sizeof *x), *y = x + count;
    LG_ASSERT(x);
    int rc = lg_st_read_f32(a, x, 0, count);
    if (rc == 0) rc = lg_st_read_f32(b, y, 0, count);
    double difference = 0, norm = 0;
    for (size_t i = 0; rc == 0 && i < count; i++) {
        difference += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        norm += (double)y[i] * y[i];
    }
    free(x);
    if (rc == 0) *ret = difference == 0 ? 0 : sqrt(difference / norm);
    return rc;
}

static int compare(const lg_st_file *fa, const lg_st_file *fb, const char *names, double tolerance)
{
    char name[256];
    snprintf(name, sizeof name, "%s", names);
    char *equals = strchr(name, '=');
    const char *name_b = equals ? equals + 1 : name;
    if (equals) *equals = 0;
    const struct lg_st_entry *a = lg_st_find(fa, name), *b = lg_st_find(fb, name_b);
    if (!a || !b)
        return LG_FAIL(LG_ERR_NOTFOUND, "no tensor %s in %s", a ? name_b : name, a ? "B" : "A");
    printf("%s (", name);
    for (int i = 0; i < a->rank; i++) printf("%s%lld", i ? ", " : "", (long long)a->dim[i]);
    if (!same_shape(a, b)) {
        puts(")");
        return LG_FAIL(LG_ERR_MISMATCH, "%s has another shape in B", name);
    }
    double error = NAN;
    LG_TRY(relative_error(a, b, &error));
    printf(") %.3g\n", error);
    if (!(error <= tolerance))
        return LG_FAIL(LG_ERR_MISMATCH, "%s differs by %g, more than %g", name, error, tolerance);
    return 0;
}

int main(int argc, char **argv)
{
    lg_st_file *a = NULL, *b = NULL;
    int rc = 0;
    if (argc < 5) {
        fprintf(stderr, "usage: st_compare A B TOLERANCE TENSOR[=NAME_IN_B] ...\n");
        return 2;
    }
    if (lg_st_open(argv[1], &a) < 0 || lg_st_open(argv[2], &b) < 0) rc = 1;
    for (int i = 4; !rc && i < argc; i++) rc = compare(a, b, argv[i], strtod(argv[3], NULL)) < 0;
    if (rc) fprintf(stderr, "st_compare: %s\n", lg_err_message());
    lg_st_close(&a);
    lg_st_close(&b);
    return rc;
}
