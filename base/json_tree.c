/* Bounded trees of JSON; see json_tree.h. A name is told from others by a hash of it and of the number
 * of its object: equal hashes are refused as equal names. */
#include "base/json_tree.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/printable.h"
#include "base/utf8.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct names {
    uint64_t *hash;
    size_t n, capacity;
    char *copy; /* of a name, without escapes */
    size_t copy_bytes;
    char *spelled; /* the document for cJSON, once there was an infinity in it */
};

static int no_memory(const lg_json *j)
{
    return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", j->source.label);
}

static int add_name(struct names *k, const lg_json *j, uint64_t object)
{
    if (j->bytes + 1 > k->copy_bytes) {
        free(k->copy);
        k->copy_bytes = j->bytes + 1;
        k->copy = malloc(k->copy_bytes);
        if (!k->copy) return no_memory(j);
    }
    if (k->n == k->capacity) {
        size_t capacity = LG_MAX(2 * k->capacity, (size_t)64);
        uint64_t *p = realloc(k->hash, capacity * sizeof *p);
        if (!p) return no_memory(j);
        k->hash = p;
        k->capacity = capacity;
    }
    size_t n = lg_json_text(j, k->copy);
    k->hash[k->n++] = lg_hash(k->copy, n) ^ object * UINT64_C(0x9E3779B97F4A7C15);
    return 0;
}

/* cJSON knows no infinities: a number that strtod makes one takes the place of each. */
static int spell_infinity(struct names *k, const lg_json *j)
{
    const char *data = j->source.data, *number = *j->text == '-' ? "-1e999" : "1e999";
    if (!k->spelled) {
        k->spelled = malloc(j->source.bytes);
        if (!k->spelled) return no_memory(j);
        memcpy(k->spelled, data, j->source.bytes);
    }
    char *at = k->spelled + (j->text - data);
    memset(at, ' ', j->bytes);
    memcpy(at, number, strlen(number));
    return 0;
}

static int by_value(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static int check(lg_json *j, struct names *k)
{
    uint64_t objects = 0, object[LG_JSON_DEPTH_MAX + 1] = {0};
    do {
        LG_TRY(lg_json_next(j));
        if (j->kind == LG_JSON_OBJECT) object[j->depth] = ++objects;
        if (j->kind == LG_JSON_KEY) LG_TRY(add_name(k, j, object[j->depth]));
        if (j->kind == LG_JSON_NUMBER && j->text[j->bytes - 1] == 'y') LG_TRY(spell_infinity(k, j));
    } while (j->kind != LG_JSON_END);
    if (k->n) qsort(k->hash, k->n, sizeof *k->hash, by_value);
    for (size_t i = 1; i < k->n; i++)
        if (k->hash[i] == k->hash[i - 1])
            return LG_FAIL(LG_ERR_CORRUPT, "%s: a name appears twice in one object",
                           j->source.label);
    return 0;
}

int lg_json_tree(const char *label, const char *data, size_t bytes, size_t tokens_max, cJSON **ret)
{
    lg_json j;
    struct names k = {0};
    lg_json_open(&j, &(struct lg_json_source){.label = label,
                                              .data = data,
                                              .bytes = bytes,
                                              .tokens_max = tokens_max,
                                              .infinities = true});
    int rc = check(&j, &k);
    cJSON *root = rc < 0 ? NULL : cJSON_ParseWithLength(k.spelled ? k.spelled : data, bytes);
    free(k.hash);
    free(k.copy);
    free(k.spelled);
    LG_TRY(rc);
    if (!root) /* out of memory, or a number of more than 63 characters */
        return LG_FAIL(LG_ERR_CORRUPT, "%s: it cannot be read as JSON", label);
    *ret = root;
    return 0;
}

void lg_json_add_text(cJSON *object, const char *name, const char *text)
{
    const size_t bytes = strlen(text), room = 4 * bytes + 1; /* a byte becomes \xff at most */
    char *shown = NULL;
    if (!lg_utf8_valid(text, bytes)) {
        shown = malloc(room);
        LG_ASSERT(shown);
        lg_printable(shown, room, text, bytes, LG_NEWLINES_KEPT);
    }
    cJSON_AddStringToObject(object, name, shown ? shown : text);
    free(shown);
}

void lg_json_add_exact(cJSON *object, const char *name, double value)
{
    char digits[32];
    snprintf(digits, sizeof digits, "%.15g", value);
    if (strtod(digits, NULL) != value) snprintf(digits, sizeof digits, "%.17g", value);
    cJSON_AddRawToObject(object, name, digits);
}
