/* The schema as a table, and what can be said about a key without a file: nearest names, ranges,
 * values as TOML. The table is schema.def expanded once; its order is the order of every output. */
#include "config/schema.h"
#include <float.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* A key of the section "" has the name "key" and not ".key". */
#define NAMED(s, k, d)                                                                             \
    .section = #s, .key = #k, .name = #s "." #k + (sizeof #s == 1), .raw_doc = (d),                \
    .offset = offsetof(lg_config, s##_##k)

static const lg_key keys[] = {
#define LG_SECTION(s, d)
#define LG_INT(s, k, def, min, max, d)                                                             \
    {NAMED(s, k, d), .type = LG_KEY_INT, .int_def = (def), .int_min = (min), .int_max = (max)},
#define LG_INT_AUTO(s, k, def, min, max, d)                                                        \
    {NAMED(s, k, d),   .type = LG_KEY_INT, .int_def = (def),                                       \
     .int_min = (min), .int_max = (max),   .has_auto = true},
#define LG_NUM(s, k, def, min, max, d)                                                             \
    {NAMED(s, k, d), .type = LG_KEY_NUM, .num_def = (def), .num_min = (min), .num_max = (max)},
#define LG_BOOL(s, k, def, d) {NAMED(s, k, d), .type = LG_KEY_BOOL, .bool_def = (def)},
#define LG_SIDES(s, k, def, min, max, d)                                                           \
    {NAMED(s, k, d), .type = LG_KEY_SIDES, .int_def = (def), .int_min = (min), .int_max = (max)},
#define LG_STR(s, k, def, d)  {NAMED(s, k, d), .type = LG_KEY_STR, .text_def = (def)},
#define LG_PATH(s, k, def, d) {NAMED(s, k, d), .type = LG_KEY_PATH, .text_def = (def)},
#define LG_ENUM(s, k, def, ch, d)                                                                  \
    {NAMED(s, k, d), .type = LG_KEY_ENUM, .text_def = (def), .choices = (ch)},
#define LG_LIST(s, k, d)   {NAMED(s, k, d), .type = LG_KEY_LIST},
#define LG_TABLES(s, k, d) {NAMED(s, k, d), .type = LG_KEY_TABLES},
#include "config/schema.def"
#undef LG_TEXT_KEYS
#undef LG_RESTARTS
#undef LG_SECTION
#undef LG_INT
#undef LG_INT_AUTO
#undef LG_NUM
#undef LG_BOOL
#undef LG_SIDES
#undef LG_STR
#undef LG_PATH
#undef LG_ENUM
#undef LG_LIST
#undef LG_TABLES
};

const lg_section lg_sections[] = {
#define LG_SECTION(s, d) {#s, d},
#define LG_INT(s, k, def, min, max, d)
#define LG_NUM(s, k, def, min, max, d)
#define LG_BOOL(s, k, def, d)
#define LG_SIDES(s, k, def, min, max, d)
#define LG_STR(s, k, def, d)
#define LG_PATH(s, k, def, d)
#define LG_ENUM(s, k, def, ch, d)
#define LG_LIST(s, k, d)
#define LG_TABLES(s, k, d)
#include "config/schema.def"
#undef LG_SECTION
#undef LG_INT
#undef LG_NUM
#undef LG_BOOL
#undef LG_SIDES
#undef LG_STR
#undef LG_PATH
#undef LG_ENUM
#undef LG_LIST
#undef LG_TABLES
#undef LG_TEXT_KEYS
#undef LG_RESTARTS
};
const int lg_section_count = (int)LG_ARRAY_LEN(lg_sections);

/* Their names are told by who prints them: data.source[1].weight. */
static const lg_key source_keys[] = {
#define OF_SOURCE(k, d)                                                                            \
    .section = "data.source", .key = #k, .name = #k, .raw_doc = (d),                               \
    .offset = offsetof(struct lg_data_source, k)
#define LG_PATH(k, def, d) {OF_SOURCE(k, d), .type = LG_KEY_PATH, .text_def = (def)},
#define LG_NUM(k, def, min, max, d)                                                                \
    {OF_SOURCE(k, d), .type = LG_KEY_NUM, .num_def = (def), .num_min = (min), .num_max = (max)},
#define LG_INT(k, def, min, max, d)                                                                \
    {OF_SOURCE(k, d), .type = LG_KEY_INT, .int_def = (def), .int_min = (min), .int_max = (max)},
#include "config/source.def"
#undef LG_PATH
#undef LG_NUM
#undef LG_INT
#undef OF_SOURCE
};
const struct lg_key *lg_source_key_at(int i)
{
    return i >= 0 && i < (int)LG_ARRAY_LEN(source_keys) ? &source_keys[i] : NULL;
}

static const struct {
    const char *theirs, *ours;
} litegen[] = {
#define LG_LITEGEN(theirs, ours, note) {theirs, ours},
#include "config/litegen.def"
#undef LG_LITEGEN
};

static const struct {
    const char *theirs, *ours;
} scripts[] = {
#define LG_SCRIPT(theirs, ours, note) {theirs, ours},
#include "config/scripts.def"
#undef LG_SCRIPT
};

int lg_key_count(void)
{
    return (int)LG_ARRAY_LEN(keys);
}

const lg_key *lg_key_at(int i)
{
    LG_ASSERT(i >= 0 && i < lg_key_count());
    return &keys[i];
}

const char *lg_key_encoder(const lg_key *k)
{
    static const char prefix[] = "text.";
    return strncmp(k->section, prefix, sizeof prefix - 1) ? NULL : k->section + sizeof prefix - 1;
}

static const char bits_mark[] = "[bits] ";

bool lg_key_bits(const lg_key *k)
{
    return strncmp(k->raw_doc, bits_mark, sizeof bits_mark - 1) == 0;
}

const char *lg_key_doc(const lg_key *k)
{
    return k->raw_doc + (lg_key_bits(k) ? sizeof bits_mark - 1 : 0);
}

int lg_key_find(const char *name)
{
    for (int i = 0; i < lg_key_count(); i++)
        if (strcmp(keys[i].name, name) == 0) return i;
    return -1;
}

bool lg_section_known(const char *name)
{
    for (int i = 0; i < lg_section_count; i++)
        if (strcmp(lg_sections[i].name, name) == 0) return true;
    return false;
}

/* Insertions, deletions, replacements and swaps of neighbours (Damerau-Levenshtein, optimal string
 * alignment) that turn a into b; both are cut at NAME_MAX_BYTES. */
static int edit_distance(const char *a, const char *b)
{
    enum { NAME_MAX_BYTES = 64 };
    int d[NAME_MAX_BYTES + 1][NAME_MAX_BYTES + 1];
    int n = (int)strnlen(a, NAME_MAX_BYTES), m = (int)strnlen(b, NAME_MAX_BYTES);
    for (int i = 0; i <= n; i++) d[i][0] = i;
    for (int j = 0; j <= m; j++) d[0][j] = j;
    for (int i = 1; i <= n; i++)
        for (int j = 1; j <= m; j++) {
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            best = LG_MIN(best, d[i - 1][j] + 1);
            best = LG_MIN(best, d[i][j - 1] + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                best = LG_MIN(best, d[i - 2][j - 2] + 1);
            d[i][j] = best;
        }
    return d[n][m];
}

const char *lg_key_nearest(const char *name)
{
    const char *dot = strchr(name, '.'), *bare = dot ? dot + 1 : name;
    size_t section = dot ? (size_t)(dot - name) : 0;
    const lg_key *best = &keys[0];
    int best_distance = INT_MAX;
    for (int i = 0; i < lg_key_count(); i++) {
        const lg_key *k = &keys[i];
        /* Half steps: a key of another section is one and a half letters further than one of the section that was written. */
        bool same = strlen(k->section) == section && strncmp(k->section, name, section) == 0;
        int distance = 2 * edit_distance(name, k->name);
        distance = LG_MIN(distance, 2 * edit_distance(bare, k->key) + (same ? 0 : 3));
        if (distance < best_distance) {
            best_distance = distance;
            best = k;
        }
    }
    return best->name;
}

const char *lg_section_nearest(const char *name)
{
    const char *best = "";
    int best_distance = INT_MAX;
    for (int i = 0; i < lg_section_count; i++) {
        if (!lg_sections[i].name[0]) continue;
        int distance = edit_distance(name, lg_sections[i].name);
        if (distance < best_distance) {
            best_distance = distance;
            best = lg_sections[i].name;
        }
    }
    return best;
}

const char *lg_key_from_litegen(const char *name)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(litegen); i++)
        if (strcmp(litegen[i].theirs, name) == 0) return litegen[i].ours;
    return NULL;
}

const char *lg_key_from_script(const char *name)
{
    const char *dot = strrchr(name, '.'), *bare = dot ? dot + 1 : name;
    for (size_t i = 0; i < LG_ARRAY_LEN(scripts); i++)
        if (strcmp(scripts[i].theirs, bare) == 0) return scripts[i].ours;
    return NULL;
}

void lg_key_expected(const lg_key *k, char *ret, size_t bytes)
{
    switch (k->type) {
    case LG_KEY_INT:
        if (k->int_max == INT64_MAX)
            snprintf(ret, bytes, "a whole number, at least %lld", (long long)k->int_min);
        else
            snprintf(ret, bytes, "%sa whole number from %lld to %lld",
                     k->has_auto ? "\"auto\" or " : "", (long long)k->int_min,
                     (long long)k->int_max);
        return;
    case LG_KEY_NUM:
        snprintf(ret, bytes, "a number from %g to %g", k->num_min, k->num_max);
        return;
    case LG_KEY_BOOL:
        snprintf(ret, bytes, "true or false");
        return;
    case LG_KEY_SIDES:
        snprintf(ret, bytes, "a whole number from %lld to %lld, or a list of two, [height, width]",
                 (long long)k->int_min, (long long)k->int_max);
        return;
    case LG_KEY_STR:
        snprintf(ret, bytes, "a text in quotes");
        return;
    case LG_KEY_PATH:
        snprintf(ret, bytes, "a path in quotes");
        return;
    case LG_KEY_LIST:
        snprintf(ret, bytes, "a text, a whole number, or a list of them like [\"a\", 2]");
        return;
    case LG_KEY_TABLES:
        snprintf(ret, bytes, "tables [[%s]]", k->name);
        return;
    case LG_KEY_ENUM:
        break;
    }
    size_t at = (size_t)snprintf(ret, bytes, "one of \"");
    for (const char *c = k->choices; *c && at + 5 < bytes; c++)
        if (*c == '|')
            at += (size_t)snprintf(ret + at, bytes - at, "\", \"");
        else
            ret[at++] = *c;
    snprintf(ret + at, bytes - at, "\"");
}

static void print_text(FILE *out, const char *s)
{
    fputc('"', out);
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else if (c == '\n')
            fputs("\\n", out);
        else if (c == '\t')
            fputs("\\t", out);
        else if (c < 0x20 || c == 0x7f)
            fprintf(out, "\\u%04X", c);
        else
            fputc(c, out);
    }
    fputc('"', out);
}

/* The shortest form that reads back as the same double. */
static void print_number(FILE *out, double v)
{
    char text[40];
    for (int digits = 6; digits <= DBL_DECIMAL_DIG; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if (strtod(text, NULL) == v) break;
    }
    fputs(text, out);
    if (!strpbrk(text, ".e")) fputs(".0", out); /* to TOML a whole number has another type */
}

/* As a list of tables, on one line; what is not given stays so. */
static void print_sources(FILE *out, const struct lg_data_sources *l)
{
    fputc('[', out);
    for (int i = 0; i < l->n; i++) {
        fputs(i ? ", {" : "{", out);
        const char *before = "";
        for (int j = 0; lg_source_key_at(j); j++) {
            const lg_key *k = lg_source_key_at(j);
            if (k->type == LG_KEY_NUM && *(double *)lg_key_field(&l->v[i], k) == k->num_def)
                continue;
            fprintf(out, "%s%s = ", before, k->key);
            lg_key_print(out, &l->v[i], k);
            before = ", ";
        }
        fputc('}', out);
    }
    fputc(']', out);
}

void lg_key_print(FILE *out, const void *of, const lg_key *k)
{
    const void *field = lg_key_field(of, k);
    const struct lg_sides *sides = field;
    switch (k->type) {
    case LG_KEY_INT:
        if (k->has_auto && *(const int64_t *)field == LG_AUTO)
            fputs("\"auto\"", out);
        else
            fprintf(out, "%lld", (long long)*(const int64_t *)field);
        return;
    case LG_KEY_SIDES:
        if (sides->height == sides->width)
            fprintf(out, "%lld", (long long)sides->height);
        else
            fprintf(out, "[%lld, %lld]", (long long)sides->height, (long long)sides->width);
        return;
    case LG_KEY_NUM:
        print_number(out, *(const double *)field);
        return;
    case LG_KEY_BOOL:
        fputs(*(const bool *)field ? "true" : "false", out);
        return;
    case LG_KEY_STR:
    case LG_KEY_PATH:
    case LG_KEY_ENUM:
        print_text(out, *(char *const *)field);
        return;
    case LG_KEY_TABLES:
        print_sources(out, field);
        return;
    case LG_KEY_LIST:
        break;
    }
    const struct lg_strlist *list = field;
    fputc('[', out);
    for (int i = 0; i < list->n; i++) {
        if (i) fputs(", ", out);
        print_text(out, list->v[i]);
    }
    fputc(']', out);
}

void lg_key_where(const lg_config *c, const char *name, char *ret, size_t bytes)
{
    int i = lg_key_find(name);
    LG_ASSERT(i >= 0);
    if (c->lines[i] > 0)
        snprintf(ret, bytes, "%s:%d: ", c->file, c->lines[i]);
    else if (c->lines[i] < 0)
        snprintf(ret, bytes, "--set: ");
    else
        snprintf(ret, bytes, "%s: ", c->file);
}
