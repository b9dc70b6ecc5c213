/* Reading a pipeline.toml.
 *
 * The schema's table drives everything: defaults are set, then the file's items, then the
 * overrides, each checked for name, type and range where it stands; problems are collected and
 * reported together. What is wrong between keys is the business of rules.c and rules_*.c.
 *
 * Paths are stored absolute, so that the saved effective config means the same from anywhere.
 * Memory: strings of a few bytes; running out of it here is treated as a bug. */
#include "config/config.h"
#include "base/fs.h"
#include "base/utf8.h"
#include "config/pretrained.h"
#include "config/problems.h"
#include "config/schema.h"
#include "config/texts.h"
#include "config/toml.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *copy(const char *s)
{
    char *p = strdup(s);
    LG_ASSERT(p);
    return p;
}

/* Where a value came from: a line of the file, or --set. */
struct origin {
    const char *file; /* NULL: --set */
    int line, column;
    const char *dir; /* relative paths start here */
};

static void complain(struct lg_problems *p, const struct origin *o, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void complain(struct lg_problems *p, const struct origin *o, const char *fmt, ...)
{
    char text[LG_PROBLEM_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (o->file)
        lg_problem(p, "%s:%d:%d: %s", o->file, o->line, o->column, text);
    else
        lg_problem(p, "--set: %s", text);
}

/* ---- paths ---- */

/* dir/path without "//", "/./" and a slash at the end. ".." stays: links may make it mean more. */
static void join_path(FILE *out, const char *dir, const char *path, size_t bytes)
{
    char all[2 * LG_PATH_BYTES];
    int n = path[0] == '/' ? snprintf(all, sizeof all, "%.*s", (int)bytes, path)
                           : snprintf(all, sizeof all, "%s/%.*s", dir, (int)bytes, path);
    LG_ASSERT(n >= 0 && n < (int)sizeof all); /* both are checked to fit LG_PATH_BYTES */
    bool empty = true;
    for (const char *part = all; *part;) {
        size_t len = strcspn(part, "/");
        if (len && !(len == 1 && part[0] == '.')) {
            fprintf(out, "/%.*s", (int)len, part);
            empty = false;
        }
        part += len + strspn(part + len, "/");
    }
    if (empty) fputc('/', out);
}

/* data.path and that of a source may be comma lists. */
static bool is_list_of_paths(const lg_key *k)
{
    return !strcmp(k->name, "data.path") || !strcmp(k->section, "data.source");
}

/* Of a comma list each part is a path. The caller frees. */
static char *absolute(const char *dir, const char *path, bool list)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    LG_ASSERT(out);
    for (const char *part = path; *path;) {
        size_t len = list ? lg_path_list_part(part) : strlen(part);
        join_path(out, dir, part, len);
        if (!part[len]) break;
        fputc(',', out);
        part += len + 1;
    }
    LG_ASSERT(lg_close_text(out) == 0);
    return text;
}

/* ---- values ---- */

static void set_text(void *of, const lg_key *k, const char *value, const struct origin *o,
                     struct lg_problems *p)
{
    char **field = lg_key_field(of, k), *text;
    if (k->type == LG_KEY_PATH) {
        if (strlen(value) >= LG_PATH_BYTES || strlen(o->dir) >= LG_PATH_BYTES) {
            complain(p, o, "%s is longer than the %d bytes of a path", k->name, LG_PATH_BYTES);
            return;
        }
        text = absolute(o->dir, value, is_list_of_paths(k));
    } else {
        text = copy(value);
    }
    if (!lg_utf8_valid(text, strlen(text))) {
        complain(p, o, "%s is not valid UTF-8", k->name);
        free(text);
        return;
    }
    free(*field);
    *field = text;
}

static bool is_choice(const char *choices, const char *value)
{
    size_t len = strlen(value);
    for (const char *c = choices; *c;) {
        size_t n = strcspn(c, "|");
        if (n == len && strncmp(c, value, n) == 0) return true;
        c += n + (c[n] == '|');
    }
    return false;
}

static void set_list(void *of, const lg_key *k, char *const *v, int n, const struct origin *o,
                     struct lg_problems *p)
{
    struct lg_strlist *list = lg_key_field(of, k);
    if (n > LG_LIST_MAX) {
        complain(p, o, "%s has %d entries: expected at most %d", k->name, n, LG_LIST_MAX);
        return;
    }
    for (int i = 0; i < list->n; i++) free(list->v[i]);
    free(list->v);
    *list = (struct lg_strlist){.v = calloc((size_t)n + 1, sizeof *list->v)};
    LG_ASSERT(list->v);
    while (list->n < n) {
        if (!lg_utf8_valid(v[list->n], strlen(v[list->n])))
            complain(p, o, "%s[%d] is not valid UTF-8", k->name, list->n);
        list->v[list->n] = copy(v[list->n]);
        list->n++;
    }
}

/* A text or a whole number alone is a list of one. False: the item is something else. */
static bool set_list_from(void *of, const lg_key *k, const struct lg_toml_item *item,
                          const struct origin *o, struct lg_problems *p)
{
    char digits[24], *one = item->type == LG_TOML_INT ? digits : item->text;
    snprintf(digits, sizeof digits, "%lld", (long long)item->i);
    if (item->type == LG_TOML_LIST)
        set_list(of, k, item->list, item->n_list, o, p);
    else if (item->type == LG_TOML_TEXT || item->type == LG_TOML_INT)
        set_list(of, k, &one, 1, o, p);
    else
        return false;
    return true;
}

/* [height, width]: a list's entries are texts. False: it is no such list, or out of range. */
static bool read_sides(const lg_key *k, const struct lg_toml_item *item, struct lg_sides *ret)
{
    int64_t side[2] = {item->i, item->i};
    if (item->type != LG_TOML_INT && item->n_list != 2) return false;
    for (int i = 0; i < 2; i++) {
        char *end = NULL;
        errno = 0;
        if (item->type == LG_TOML_LIST) side[i] = strtoll(item->list[i], &end, 10);
        if ((end && (*end || end == item->list[i])) || errno) return false;
        if (side[i] < k->int_min || side[i] > k->int_max) return false;
    }
    *ret = (struct lg_sides){.height = side[0], .width = side[1]};
    return true;
}

/* The value as the user wrote it, shortened, for messages. */
static void describe(const struct lg_toml_item *item, char *ret, size_t bytes)
{
    switch (item->type) {
    case LG_TOML_TEXT:
        snprintf(ret, bytes, "the text \"%.60s\"", item->text);
        return;
    case LG_TOML_INT:
        snprintf(ret, bytes, "%lld", (long long)item->i);
        return;
    case LG_TOML_NUM:
        snprintf(ret, bytes, "%g", item->d);
        return;
    case LG_TOML_BOOL:
        snprintf(ret, bytes, "%s", item->b ? "true" : "false");
        return;
    default:
        snprintf(ret, bytes, "%s", lg_toml_type_name(item->type));
        return;
    }
}

static void set_value(void *of, const lg_key *k, const struct lg_toml_item *item,
                      const struct origin *o, struct lg_problems *p);

static void free_sources(struct lg_data_sources *l)
{
    for (int i = 0; i < l->n; i++) free(l->v[i].path);
    free(l->v);
    *l = (struct lg_data_sources){0};
}

static const lg_key *source_key(const char *name)
{
    const lg_key *k;
    for (int i = 0; (k = lg_source_key_at(i)); i++)
        if (!strcmp(k->key, name)) return k;
    return NULL;
}

/* The table's keys; name: "data.source[1]" */
static void set_source(struct lg_data_source *s, const char *name, const lg_toml *t,
                       const struct origin *of, struct lg_problems *p)
{
    char full[64];
    for (int i = 0; i < t->n; i++) {
        const lg_key *k = source_key(t->items[i].key);
        struct origin o = *of;
        o.line = t->items[i].line;
        o.column = t->items[i].column;
        if (!k) {
            complain(p, &o, "unknown key %s.%.40s: a source has path, weight and repeats", name,
                     t->items[i].key);
            continue;
        }
        snprintf(full, sizeof full, "%s.%s", name, k->key);
        lg_key named = *k;
        named.name = full;
        set_value(s, &named, &t->items[i], &o, p);
    }
    if (!s->path[0])
        complain(p, of, "%s has no path: name tar shards or a folder of pictures", name);
}

static void set_sources(void *of, const lg_key *k, const struct lg_toml_item *item,
                        const struct origin *o, struct lg_problems *p)
{
    struct lg_data_sources *l = lg_key_field(of, k);
    char name[32];
    if (item->n_tables > LG_DATA_SOURCES_MAX) {
        complain(p, o, "%s has %d tables: expected at most %d", k->name, item->n_tables,
                 LG_DATA_SOURCES_MAX);
        return;
    }
    free_sources(l);
    l->v = calloc((size_t)item->n_tables + 1, sizeof *l->v);
    LG_ASSERT(l->v);
    for (; l->n < item->n_tables; l->n++) {
        struct lg_data_source *s = &l->v[l->n];
        snprintf(name, sizeof name, "%s[%d]", k->name, l->n);
        *s = (struct lg_data_source){.path = copy(""), .repeats = 1};
        set_source(s, name, &item->tables[l->n], o, p);
    }
}

static bool is_empty_list(const struct lg_toml_item *item)
{
    return item->type == LG_TOML_LIST && item->n_list == 0;
}

static void set_value(void *of, const lg_key *k, const struct lg_toml_item *item,
                      const struct origin *o, struct lg_problems *p)
{
    char expected[200], got[100];
    double number = item->type == LG_TOML_INT ? (double)item->i : item->d;
    bool in_range = true;
    switch (k->type) {
    case LG_KEY_INT:
        if (k->has_auto && item->type == LG_TOML_TEXT && !strcmp(item->text, "auto")) {
            *(int64_t *)lg_key_field(of, k) = LG_AUTO;
            return;
        }
        if (item->type != LG_TOML_INT) break;
        in_range = item->i >= k->int_min && item->i <= k->int_max;
        if (in_range) *(int64_t *)lg_key_field(of, k) = item->i;
        goto range;
    case LG_KEY_NUM:
        if (item->type != LG_TOML_INT && item->type != LG_TOML_NUM) break;
        in_range = number >= k->num_min && number <= k->num_max; /* false for nan */
        if (in_range) *(double *)lg_key_field(of, k) = number;
        goto range;
    case LG_KEY_BOOL:
        if (item->type != LG_TOML_BOOL) break;
        *(bool *)lg_key_field(of, k) = item->b;
        return;
    case LG_KEY_SIDES:
        if (item->type != LG_TOML_INT && item->type != LG_TOML_LIST) break;
        in_range = read_sides(k, item, lg_key_field(of, k));
        goto range;
    case LG_KEY_ENUM:
        if (item->type != LG_TOML_TEXT) break;
        in_range = is_choice(k->choices, item->text);
        if (in_range) set_text(of, k, item->text, o, p);
        goto range;
    case LG_KEY_STR:
    case LG_KEY_PATH:
        if (item->type != LG_TOML_TEXT) break;
        set_text(of, k, item->text, o, p);
        return;
    case LG_KEY_LIST:
        if (!set_list_from(of, k, item, o, p)) break;
        return;
    case LG_KEY_TABLES:
        if (item->type != LG_TOML_TABLES && !is_empty_list(item)) break;
        set_sources(of, k, item, o, p);
        return;
    }
    lg_key_expected(k, expected, sizeof expected);
    describe(item, got, sizeof got);
    complain(p, o, "%s: expected %s, got %s", k->name, expected, got);
    return;
range:
    if (in_range) return;
    lg_key_expected(k, expected, sizeof expected);
    describe(item, got, sizeof got);
    complain(p, o, "%s is out of range: expected %s, got %s", k->name, expected, got);
}

void lg_config_set(lg_config *c, const lg_key *k, const struct lg_toml_item *item, const char *file,
                   struct lg_problems *p)
{
    set_value(c, k, item, &(struct origin){.file = file, .dir = "/"}, p);
}

/* ---- names ---- */

static void unknown_key(const char *name, const struct origin *o, struct lg_problems *p)
{
    const char *ours = lg_key_from_litegen(name), *same = lg_key_from_script(name);
    if (!strncmp(name, "data.source.", 12) || !strncmp(name, "data.source[", 12)) {
        complain(p, o,
                 "%.80s cannot be set alone: write all sources, as "
                 "data.source=[{path = \"a\", weight = 0.9}, {path = \"b\"}]",
                 name);
        return;
    }
    if (ours && ours[0])
        complain(p, o, "unknown key %s: LiteGen's %s is called %s here", name, name, ours);
    else if (ours)
        complain(p, o, "unknown key %s: LiteGen's %s is not in this version", name, name);
    else if (same)
        complain(p, o, "unknown key %.80s: it is called %s here (docs/config.md)", name, same);
    else
        complain(p, o, "unknown key %.80s: the nearest known key is %s", name,
                 lg_key_nearest(name));
}

static void unknown_encoder(const char *section, const struct origin *o, struct lg_problems *p)
{
#define LG_ENCODER(name) " [text." #name "]"
    complain(p, o, "unknown section [%.80s]: text encoders have these:%s", section,
#include "config/encoders.def"
    );
#undef LG_ENCODER
}

static void apply_file(lg_config *c, const lg_toml *t, const char *dir, struct lg_problems *p)
{
    const char *skip = NULL; /* everything below this unknown or misplaced table is silent */
    for (int i = 0; i < t->n; i++) {
        const struct lg_toml_item *item = &t->items[i];
        struct origin o = {c->file, item->line, item->column, dir};
        if (skip && strncmp(item->key, skip, strlen(skip)) == 0 && item->key[strlen(skip)] == '.')
            continue;
        int index = lg_key_find(item->key);
        bool top = !strchr(item->key, '.');
        if (index >= 0) {
            c->lines[index] = item->line;
            set_value(c, lg_key_at(index), item, &o, p);
        } else if (lg_section_known(item->key)) {
            if (item->type == LG_TOML_TABLE) continue;
            complain(p, &o, "%s is a section: write [%s] once, its keys below it", item->key,
                     item->key);
        } else if (item->type == LG_TOML_TABLE && top) {
            complain(p, &o, "unknown section [%.80s]: the nearest known section is [%s]", item->key,
                     lg_section_nearest(item->key));
        } else if (item->type == LG_TOML_TABLE && !strncmp(item->key, "text.", 5)) {
            unknown_encoder(item->key, &o, p);
        } else {
            unknown_key(item->key, &o, p);
        }
        if (item->type == LG_TOML_TABLE) skip = item->key;
    }
}

/* What stands behind "=" in an override: TOML, or a bare word for keys that hold text. */
static void override_value(lg_config *c, const lg_key *k, const char *text, const struct origin *o,
                           struct lg_problems *p)
{
    bool textual = k->type == LG_KEY_STR || k->type == LG_KEY_PATH || k->type == LG_KEY_ENUM;
    bool quoted = text[0] == '"' || text[0] == '\'';
    lg_toml *t = NULL;
    bool parsed = (quoted || !textual) && lg_toml_parse_value(text, &t) == 0;
    struct lg_toml_item word = {.type = LG_TOML_TEXT, .text = (char *)text};
    if (!parsed) lg_err_clear();
    if (!parsed && k->type == LG_KEY_LIST && text[0] == '[')
        complain(
            p, o,
            "%s: %.60s is no list: expected one like [\"a\", 2], with its quotes (for a shell: "
            "--set '%s=[\"a\"]')",
            k->name, text, k->name);
    else
        set_value(c, k, parsed ? &t->items[0] : &word, o, p);
    lg_toml_free(&t);
}

static void apply_override(lg_config *c, const char *text, const char *cwd, struct lg_problems *p)
{
    struct origin o = {.dir = cwd};
    const char *eq = strchr(text, '=');
    char name[128];
    if (!eq || eq == text || eq - text >= (ptrdiff_t)sizeof name) {
        complain(p, &o, "expected key=value, got \"%.80s\"", text);
        return;
    }
    snprintf(name, sizeof name, "%.*s", (int)(eq - text), text);
    int index = lg_key_find(name);
    if (index < 0) {
        unknown_key(name, &o, p);
        return;
    }
    c->lines[index] = -1;
    override_value(c, lg_key_at(index), eq + 1, &o, p);
}

/* ---- life ---- */

static void set_defaults(lg_config *c, const char *dir, struct lg_problems *p)
{
    struct origin o = {.file = c->file, .dir = dir};
    for (int i = 0; i < lg_key_count(); i++) {
        const lg_key *k = lg_key_at(i);
        void *field = lg_key_field(c, k);
        switch (k->type) {
        case LG_KEY_INT:
            *(int64_t *)field = k->int_def;
            break;
        case LG_KEY_NUM:
            *(double *)field = k->num_def;
            break;
        case LG_KEY_BOOL:
            *(bool *)field = k->bool_def;
            break;
        case LG_KEY_SIDES:
            *(struct lg_sides *)field = (struct lg_sides){k->int_def, k->int_def};
            break;
        case LG_KEY_STR:
        case LG_KEY_PATH:
        case LG_KEY_ENUM:
            set_text(c, k, k->text_def, &o, p);
            break;
        case LG_KEY_LIST:
            set_list(c, k, NULL, 0, &o, p);
            break;
        case LG_KEY_TABLES:
            break; /* none */
        }
    }
}

/* The folder of the file as the user named it, and the working directory; both absolute. */
static int find_folders(const char *file, char ret_dir[PATH_MAX], char ret_cwd[PATH_MAX])
{
    char parent[LG_PATH_BYTES];
    LG_TRY(lg_path(parent, "%s", file));
    char *slash = strrchr(parent, '/');
    if (slash)
        slash[slash == parent] = 0;
    else
        strcpy(parent, ".");
    if (!realpath(parent, ret_dir))
        return LG_FAIL(lg_err_from_errno(errno), "cannot find the folder of %s: %s", file,
                       strerror(errno));
    if (!getcwd(ret_cwd, PATH_MAX))
        return LG_FAIL(lg_err_from_errno(errno), "cannot find the working directory: %s",
                       strerror(errno));
    return 0;
}

int lg_config_load(const char *file, const char *const *overrides, int n_overrides, lg_config **ret)
{
    char dir[PATH_MAX], cwd[PATH_MAX];
    lg_toml *t = NULL;
    LG_TRY(lg_toml_parse_file(file, &t));
    int rc = find_folders(file, dir, cwd);
    if (rc < 0) {
        lg_toml_free(&t);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    struct lg_problems problems = {0};
    lg_config *c = calloc(1, sizeof *c);
    LG_ASSERT(c);
    c->file = copy(file);
    c->lines = calloc((size_t)lg_key_count(), sizeof *c->lines);
    c->chosen = calloc((size_t)lg_key_count(), sizeof *c->chosen);
    LG_ASSERT(c->lines && c->chosen);
    set_defaults(c, dir, &problems);
    apply_file(c, t, dir, &problems);
    for (int i = 0; i < n_overrides; i++) apply_override(c, overrides[i], cwd, &problems);
    lg_toml_free(&t);
    lg_pretrained_choose(c, &problems);
    lg_texts_settle(c, &problems);
    rc = lg_problems_end(&problems, LG_ERR_CONFIG, file);
    if (rc < 0) {
        lg_config_free(&c);
        return rc;
    }
    *ret = c;
    return 0;
}

int lg_config_keys(void)
{
    return lg_key_count();
}

char *lg_config_key_text(const lg_config *c, int i)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    LG_ASSERT(out);
    fprintf(out, "%s = ", lg_key_at(i)->name);
    lg_key_print(out, c, lg_key_at(i));
    LG_ASSERT(lg_close_text(out) == 0);
    return text;
}

void lg_config_free(lg_config **c)
{
    if (!c || !*c) return;
    for (int i = 0; i < lg_key_count(); i++) {
        const lg_key *k = lg_key_at(i);
        void *field = lg_key_field(*c, k);
        if (k->type == LG_KEY_LIST) {
            struct lg_strlist *list = field;
            for (int j = 0; j < list->n; j++) free(list->v[j]);
            free(list->v);
        } else if (k->type == LG_KEY_STR || k->type == LG_KEY_PATH || k->type == LG_KEY_ENUM) {
            free(*(char **)field);
        } else if (k->type == LG_KEY_TABLES) {
            free_sources(field);
        }
    }
    for (int i = 0; i < lg_key_count(); i++) free((*c)->chosen[i]);
    free((*c)->chosen);
    free((*c)->lines);
    free((*c)->file);
    free(*c);
    *c = NULL;
}
