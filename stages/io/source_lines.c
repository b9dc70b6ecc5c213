/* Captions in metadata.jsonl and metadata.csv; see source_lines.h. */
#include "stages/io/source_lines.h"
#include "base/fs.h"
#include "base/heartbeat.h"
#include "base/json.h"
#include "base/log.h"
#include "stages/io/csv.h"
#include "stages/io/source.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool is_csv(const char *path)
{
    return !strcmp(last_part(path), LG_LINES_CSV_NAME);
}

bool lg_lines_is(const char *path)
{
    return is_csv(path) || !strcmp(last_part(path), LG_LINES_NAME);
}

/* What one file is read with. */
struct reader {
    struct lg_lines *to;
    const char *relative; /* the file's own name, which ends in metadata.jsonl or metadata.csv */
    const char *path;
    uint16_t file;
    uint64_t number, nameless;
};

/* The caller writes the picture's name, of at most name_bytes and a NUL, to *ret_name, then has it tidied. */
static int take(const struct reader *r, const struct lg_line *line, size_t name_bytes,
                char **ret_name)
{
    struct lg_lines *x = r->to;
    size_t folder = (size_t)(last_part(r->relative) - r->relative);
    if (x->count == x->capacity) {
        size_t more = LG_MAX(2 * x->capacity, (size_t)256);
        struct lg_line *p = realloc(x->line, more * sizeof *p);
        if (!p) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the lines of %s", r->path);
        x->line = p;
        x->capacity = more;
    }
    char *path = malloc(folder + name_bytes + 1);
    if (!path) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the lines of %s", r->path);
    memcpy(path, r->relative, folder);
    x->line[x->count] = *line;
    x->line[x->count++].path = path;
    *ret_name = path + folder;
    return 0;
}

static void tidy(char *name)
{
    while (name[0] == '.' && name[1] == '/') memmove(name, name + 2, strlen(name + 2) + 1);
}

/* ---- metadata.jsonl ---- */

static int take_line(struct reader *r, const char *data, size_t at, size_t bytes)
{
    char label[LG_PATH_BYTES + 32];
    snprintf(label, sizeof label, "%s:%" PRIu64, r->path, r->number);
    if (bytes > LG_SOURCE_TEXT_BYTES_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "%s: the line is longer than %d bytes", label,
                       LG_SOURCE_TEXT_BYTES_MAX);
    lg_json j, name = {0};
    lg_json_open(&j, &(struct lg_json_source){.label = label,
                                              .data = data + at,
                                              .bytes = bytes,
                                              .origin = at,
                                              .code = LG_ERR_CONFIG,
                                              .loose_text = true});
    LG_TRY(lg_json_expect(&j, LG_JSON_OBJECT, "the line is no JSON object"));
    while (j.kind != LG_JSON_END) {
        bool is_name = j.kind == LG_JSON_KEY && j.depth == 1 && lg_json_is(&j, "file_name");
        if (is_name && name.text) return lg_json_fail(&j, "its file_name stands there twice");
        if (is_name) {
            LG_TRY(lg_json_expect(&j, LG_JSON_STRING, "its file_name is no string"));
            name = j;
        } else
            LG_TRY(lg_json_next(&j));
    }
    if (!name.text) {
        r->nameless++;
        return 0;
    }
    const struct lg_line line = {
        .at = at, .bytes = (uint32_t)bytes, .file = r->file, .number = r->number};
    char *text;
    LG_TRY(take(r, &line, name.bytes, &text));
    lg_json_text(&name, text);
    tidy(text);
    return 0;
}

static bool is_blank(const char *s, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (s[i] != ' ' && s[i] != '\t' && s[i] != '\r') return false;
    return true;
}

static int take_lines(struct reader *r, const char *data, size_t bytes)
{
    for (size_t at = 0, end; at < bytes; at = end + 1) {
        const char *newline = memchr(data + at, '\n', bytes - at);
        end = newline ? (size_t)(newline - data) : bytes;
        r->number++;
        if (!is_blank(data + at, end - at)) LG_TRY(take_line(r, data, at, end - at));
        if (r->number % 1024 == 0) lg_heartbeat();
    }
    return 0;
}

/* ---- metadata.csv ---- */

/* Columns, of captions the later going before. */
static const char *const COLUMNS[] = {"file_name", "text", "caption", "captions"};
enum { FILE_NAME, TEXT, CAPTION, CAPTIONS, COLUMNS_N };
_Static_assert(LG_ARRAY_LEN(COLUMNS) == COLUMNS_N, "a name for each");

/* Where they stand. False: the file is about something else. */
static int take_header(const struct reader *r, lg_csv *c, size_t column[COLUMNS_N], bool *ret)
{
    bool is_twice = false;
    for (int k = 0; k < COLUMNS_N; k++) column[k] = SIZE_MAX;
    do {
        LG_TRY(lg_csv_next(c));
        for (int k = 0; k < COLUMNS_N && !c->is_end; k++) {
            if (!lg_csv_is(c, COLUMNS[k])) continue;
            is_twice |= column[k] != SIZE_MAX;
            column[k] = c->column;
        }
    } while (!c->is_last && !c->is_end);
    const bool is_named = column[FILE_NAME] != SIZE_MAX;
    if (is_named && is_twice)
        return lg_csv_fail(c, "the header has file_name or a column of captions twice");
    if (is_named && column[CAPTIONS] != SIZE_MAX)
        return lg_csv_fail(c, "lists in a column captions are read from " LG_LINES_NAME
                              " alone; a column with one caption is called text or caption");
    *ret = is_named && (column[TEXT] != SIZE_MAX || column[CAPTION] != SIZE_MAX);
    if (!*ret)
        lg_log(LG_WARN,
               "%s lists no captions: its header has no column %s; expected a first line "
               "like file_name,text",
               r->path, is_named ? "text or caption" : "file_name");
    return 0;
}

/* A record; none at the end. */
static int take_record(struct reader *r, lg_csv *c, const size_t column[COLUMNS_N])
{
    lg_csv name = {0}, caption = {0};
    do {
        LG_TRY(lg_csv_next(c));
        if (c->is_end) return 0;
        if (lg_csv_is(c, "")) continue;
        if (c->column == column[FILE_NAME]) name = *c;
        if (c->column == column[CAPTION] || (c->column == column[TEXT] && !caption.bytes))
            caption = *c;
    } while (!c->is_last);
    if (!name.bytes) {
        r->nameless++;
        return 0;
    }
    const struct lg_line line = {.at = caption.at,
                                 .bytes = (uint32_t)caption.bytes,
                                 .file = r->file,
                                 .is_csv = true,
                                 .number = c->line};
    char *text;
    LG_TRY(take(r, &line, name.bytes, &text));
    lg_csv_text(&name, text);
    tidy(text);
    return 0;
}

static int take_csv(struct reader *r, const char *data, size_t bytes)
{
    lg_csv c;
    size_t column[COLUMNS_N];
    bool is_ours = false;
    lg_csv_open(&c, &(struct lg_csv_source){.label = r->path,
                                            .data = data,
                                            .bytes = bytes,
                                            .record_bytes_max = LG_SOURCE_TEXT_BYTES_MAX,
                                            .code = LG_ERR_CONFIG});
    LG_TRY(take_header(r, &c, column, &is_ours));
    while (is_ours && !c.is_end) {
        LG_TRY(take_record(r, &c, column));
        if (++r->number % 1024 == 0) lg_heartbeat();
    }
    return 0;
}

/* ---- all ---- */

int lg_lines_add(struct lg_lines *x, const char *folder, const char *relative, uint16_t file)
{
    char path[LG_PATH_BYTES], *data = NULL;
    size_t bytes = 0;
    LG_TRY(lg_path(path, "%s/%s", folder, relative));
    LG_TRY(lg_read_file(path, LG_LINES_BYTES_MAX, &data, &bytes));
    struct reader r = {.to = x, .relative = relative, .path = path, .file = file};
    int rc = is_csv(relative) ? take_csv(&r, data, bytes) : take_lines(&r, data, bytes);
    free(data);
    if (rc == LG_ERR_CONFIG)
        return LG_FAIL(rc, "%s: mend the line, or rename the file if it lists no captions",
                       lg_err_message());
    if (rc == 0 && r.nameless)
        lg_log(LG_WARN, "%s: %" PRIu64 " lines have no file_name, and are no captions", path,
               r.nameless);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int by_path(const void *a, const void *b)
{
    const struct lg_line *x = a, *y = b;
    return strcmp(x->path, y->path);
}

static int fail_twice(const struct lg_line *a, const struct lg_line *b)
{
    if (a->is_csv != b->is_csv)
        return LG_FAIL(LG_ERR_CONFIG,
                       "data.path: %s has two lines, %" PRIu64 " of a " LG_LINES_NAME
                       " and %" PRIu64 " of a " LG_LINES_CSV_NAME ": remove one",
                       a->path, (a->is_csv ? b : a)->number, (a->is_csv ? a : b)->number);
    return LG_FAIL(LG_ERR_CONFIG,
                   "data.path: %s has two lines of %s, %" PRIu64 " and %" PRIu64 "%s: remove one",
                   a->path, a->is_csv ? LG_LINES_CSV_NAME : LG_LINES_NAME,
                   LG_MIN(a->number, b->number), LG_MAX(a->number, b->number),
                   a->file == b->file ? "" : " of two such files");
}

int lg_lines_sort(struct lg_lines *x)
{
    if (x->count) qsort(x->line, x->count, sizeof *x->line, by_path);
    for (size_t i = 1; i < x->count; i++) {
        const struct lg_line *a = &x->line[i - 1], *b = &x->line[i];
        if (!strcmp(a->path, b->path)) return fail_twice(a, b);
    }
    return 0;
}

const struct lg_line *lg_lines_find(const struct lg_lines *x, const char *path)
{
    const struct lg_line key = {.path = (char *)path};
    return x->count ? bsearch(&key, x->line, x->count, sizeof *x->line, by_path) : NULL;
}

void lg_lines_free(struct lg_lines *x)
{
    for (size_t i = 0; i < x->count; i++) free(x->line[i].path);
    free(x->line);
    *x = (struct lg_lines){0};
}
