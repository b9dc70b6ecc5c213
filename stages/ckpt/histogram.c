/* Histograms of a checkpoint's weights; see histogram.h.
 *
 * A group may lie scattered over the file: all groups are open until the end (12 KiB each, some
 * hundred of them). Empty buckets in a row are written as one, as TensorBoard's writer does. */
#include "stages/ckpt/histogram.h"
#include "base/fs.h"
#include "stages/nets/weights.h"
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 1 << 16, GROUPS_MAX = 4096, POSITIVE = LG_HISTOGRAM_LIMITS / 2 };

const double *lg_histogram_limits(void)
{
    static double limit[LG_HISTOGRAM_LIMITS]; /* filling it twice gives the same */
    if (limit[LG_HISTOGRAM_LIMITS - 1] == DBL_MAX) return limit;
    int n = 0;
    for (double v = 1e-12; v < 1e20; v *= 1.1, n++) {
        LG_ASSERT(n < POSITIVE - 1);
        limit[POSITIVE + 1 + n] = v;
        limit[POSITIVE - 1 - n] = -v;
    }
    LG_ASSERT(n == POSITIVE - 1);
    limit[0] = -DBL_MAX;
    limit[LG_HISTOGRAM_LIMITS - 1] = DBL_MAX;
    return limit;
}

/* ---- counting ---- */

void lg_histogram_begin(lg_histogram *h, const char *group)
{
    *h = (lg_histogram){.min = DBL_MAX, .max = -DBL_MAX};
    snprintf(h->group, sizeof h->group, "%s", group);
}

/* The first limit above x; x is finite and below DBL_MAX, being a float. */
static int bucket_of(const double *limit, double x)
{
    int low = 0, high = LG_HISTOGRAM_LIMITS - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (limit[middle] > x)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

void lg_histogram_add(lg_histogram *h, const float *v, size_t n)
{
    const double *limit = lg_histogram_limits();
    for (size_t i = 0; i < n; i++) {
        double x = (double)v[i];
        if (!isfinite(x)) {
            h->nonfinite++;
            continue;
        }
        h->min = fmin(h->min, x);
        h->max = fmax(h->max, x);
        h->sum += x;
        h->sum_squares += x * x;
        h->count++;
        h->bucket[bucket_of(limit, x)]++;
    }
}

void lg_histogram_group(const char *name, char ret[128])
{
    size_t end = 0;
    for (int part = 0; part < 3 && name[end]; part++) {
        size_t from = end ? end + 1 : 0, bytes = strcspn(name + from, ".");
        bool last = !name[from + bytes];
        if (end && last && (!strcmp(name + from, "weight") || !strcmp(name + from, "bias"))) break;
        end = from + bytes;
    }
    snprintf(ret, 128, "%.*s", (int)LG_MIN(end, (size_t)127), name);
}

/* ---- a checkpoint ---- */

struct groups {
    lg_histogram *v;
    int n;
};

static int group_of(struct groups *g, const char *name, lg_histogram **ret)
{
    char group[128];
    /* It stands in JSON as it is. */
    if (name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")])
        return LG_FAIL(LG_ERR_CORRUPT, "\"%.80s\" is no name of a parameter", name);
    lg_histogram_group(name, group);
    for (int i = g->n - 1; i >= 0; i--)
        if (!strcmp(g->v[i].group, group)) {
            *ret = &g->v[i];
            return 0;
        }
    if (g->n == GROUPS_MAX) return LG_FAIL(LG_ERR_CORRUPT, "more than %d groups", GROUPS_MAX);
    lg_histogram *more = realloc(g->v, sizeof *more * (size_t)(g->n + 1));
    if (!more) return LG_FAIL(LG_ERR_NOSPACE, "no memory for histograms");
    g->v = more;
    lg_histogram_begin(*ret = &g->v[g->n++], group);
    return 0;
}

static int count_all(const lg_weights *w, struct groups *g)
{
    float *piece = malloc(PIECE * sizeof *piece);
    if (!piece) return LG_FAIL(LG_ERR_NOSPACE, "no memory for histograms");
    int rc = 0;
    for (int i = 0; i < lg_weights_count(w) && rc == 0; i++) {
        const struct lg_st_entry *e = lg_weights_at(w, i);
        lg_histogram *h = NULL;
        size_t total = 1;
        for (int d = 0; d < e->rank; d++) total *= (size_t)e->dim[d];
        rc = group_of(g, e->name, &h);
        for (size_t at = 0, n; at < total && rc == 0; at += n) {
            n = LG_MIN(total - at, (size_t)PIECE);
            rc = lg_st_read_f32(e, piece, at, n);
            if (rc == 0) lg_histogram_add(h, piece, n);
        }
    }
    free(piece);
    LG_TRY(rc);
    return 0;
}

/* Which buckets are written: a row of empty ones as its last. */
static bool is_written(const lg_histogram *h, int i)
{
    return h->bucket[i] || i + 1 == LG_HISTOGRAM_LIMITS || h->bucket[i + 1];
}

static void print(FILE *out, const lg_histogram *h)
{
    const double *limit = lg_histogram_limits();
    fprintf(out,
            "{\"group\": \"%s\", \"min\": %.17g, \"max\": %.17g, \"count\": %" PRIu64
            ", \"nonfinite\": %" PRIu64 ", \"sum\": %.17g, \"sum_squares\": %.17g,\n \"limits\": [",
            h->group, h->count ? h->min : 0, h->count ? h->max : 0, h->count, h->nonfinite, h->sum,
            h->sum_squares);
    for (int i = 0, n = 0; i < LG_HISTOGRAM_LIMITS; i++)
        if (is_written(h, i)) fprintf(out, "%s%.17g", n++ ? "," : "", limit[i]);
    fputs("],\n \"counts\": [", out);
    for (int i = 0, n = 0; i < LG_HISTOGRAM_LIMITS; i++)
        if (is_written(h, i)) fprintf(out, "%s%" PRIu64, n++ ? "," : "", h->bucket[i]);
    fputs("]}", out);
}

static int publish(const struct groups *g, const char *path)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) return LG_FAIL(LG_ERR_NOSPACE, "no memory for histograms");
    fputs("{\"histograms\": [\n", out);
    for (int i = 0; i < g->n; i++) {
        print(out, &g->v[i]);
        fputs(i + 1 < g->n ? ",\n" : "\n", out);
    }
    fputs("]}\n", out);
    int rc = lg_close_text(out) == 0 ? lg_publish_file(path, text, bytes)
                                     : LG_FAIL(LG_ERR_NOSPACE, "no memory for histograms");
    free(text);
    LG_TRY(rc);
    return 0;
}

int lg_histograms_write(const char *weights_dir, const char *path)
{
    char file[LG_PATH_BYTES];
    lg_weights *w = NULL;
    struct groups g = {0};
    LG_TRY(lg_path(file, "%s/diffusion_pytorch_model.safetensors", weights_dir));
    LG_TRY(lg_weights_open(file, &w));
    int rc = count_all(w, &g);
    if (rc == 0) rc = publish(&g, path);
    lg_weights_close(&w);
    free(g.v);
    LG_TRY(rc);
    return 0;
}
