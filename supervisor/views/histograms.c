/* From lg-histogram's JSON to an event record; see histograms.h. */
#include "supervisor/views/histograms.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>

enum { TAG_BYTES = 160 };

struct counted {
    struct lg_tf_histogram *v; /* (n) */
    int n;
    double *numbers; /* limits and counts of all of them */
    char (*tags)[TAG_BYTES];
};

static const cJSON *field(const cJSON *j, const char *name)
{
    return cJSON_GetObjectItemCaseSensitive(j, name);
}

static double *copy_numbers(const cJSON *array, double *to)
{
    for (const cJSON *e = array->child; e; e = e->next) *to++ = e->valuedouble;
    return to;
}

/* Are they all there? *ret_numbers: how many limits and counts. */
static bool is_well_formed(const cJSON *h, size_t *ret_numbers)
{
    static const char *const numbers[] = {"min", "max", "count", "sum", "sum_squares"};
    const cJSON *limits = field(h, "limits"), *counts = field(h, "counts");
    int n = cJSON_GetArraySize(limits);
    bool well = cJSON_IsString(field(h, "group")) && n >= 1 && cJSON_IsArray(limits) &&
                cJSON_IsArray(counts) && cJSON_GetArraySize(counts) == n;
    for (size_t i = 0; i < LG_ARRAY_LEN(numbers); i++)
        well = well && cJSON_IsNumber(field(h, numbers[i]));
    *ret_numbers = 2 * (size_t)n;
    return well;
}

static int allocate(const cJSON *list, struct counted *ret)
{
    size_t total = 0, bytes;
    int n = cJSON_IsArray(list) ? cJSON_GetArraySize(list) : 0;
    for (const cJSON *h = n ? list->child : NULL; h; h = h->next) {
        if (!is_well_formed(h, &bytes)) n = 0;
        total += bytes;
    }
    if (n == 0) return LG_FAIL(LG_ERR_CORRUPT, "these are no histograms");
    ret->v = calloc((size_t)n, sizeof *ret->v);
    ret->tags = calloc((size_t)n, sizeof *ret->tags);
    ret->numbers = calloc(total, sizeof *ret->numbers);
    if (!ret->v || !ret->tags || !ret->numbers)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for histograms");
    return 0;
}

static int collect(const cJSON *list, struct counted *ret)
{
    LG_TRY(allocate(list, ret));
    double *to = ret->numbers;
    for (const cJSON *h = list->child; h; h = h->next) {
        struct lg_tf_histogram *v = &ret->v[ret->n];
        char *tag = ret->tags[ret->n++];
        snprintf(tag, TAG_BYTES, "ema/%.150s", field(h, "group")->valuestring);
        *v = (struct lg_tf_histogram){.tag = tag,
                                      .min = field(h, "min")->valuedouble,
                                      .max = field(h, "max")->valuedouble,
                                      .count = field(h, "count")->valuedouble,
                                      .sum = field(h, "sum")->valuedouble,
                                      .sum_squares = field(h, "sum_squares")->valuedouble,
                                      .n = cJSON_GetArraySize(field(h, "limits")),
                                      .limits = to};
        v->counts = to = copy_numbers(field(h, "limits"), to);
        to = copy_numbers(field(h, "counts"), to);
    }
    return 0;
}

int lg_histograms_record(const char *text, double wall_s, uint64_t step, struct lg_tf_buffer *ret)
{
    struct counted c = {0};
    cJSON *root = cJSON_Parse(text);
    int rc = collect(field(root, "histograms"), &c);
    if (rc == 0) {
        size_t bytes = LG_TF_HISTOGRAM_EXTRA;
        for (int i = 0; i < c.n; i++)
            bytes += LG_TF_HISTOGRAM_EXTRA + TAG_BYTES + 16 * (size_t)c.v[i].n;
        *ret = (struct lg_tf_buffer){.data = malloc(bytes), .cap = bytes};
        if (ret->data)
            lg_tf_histograms(ret, wall_s, step, c.v, c.n);
        else
            rc = LG_FAIL(LG_ERR_NOSPACE, "no memory for histograms");
    }
    cJSON_Delete(root);
    free(c.v);
    free(c.tags);
    free(c.numbers);
    LG_TRY(rc);
    return 0;
}
