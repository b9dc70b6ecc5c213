/* Captions in metadata.jsonl; see source_lines.h. */
#include "stages/io/source_lines.h"
#include "base/fs.h"
#include "base/heartbeat.h"
#include "base/json.h"
#include "base/log.h"
#include "stages/io/source.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool lg_lines_is(const char *path)
{
    const char *slash = strrchr(path, '/');
    return !strcmp(slash ? slash + 1 : path, LG_LINES_NAME);
}

/* What one file is read with. */
struct reader {
    struct lg_lines *to;
    const char *relative; /* the file's own name, which ends in metadata.jsonl */
    const char *path;
    uint32_t file;
    uint64_t number, nameless;
};

static int take(const struct reader *r, const struct lg_line *line, const lg_json *name)
{
    struct lg_lines *x = r->to;
    size_t folder = strlen(r->relative) - strlen(LG_LINES_NAME);
    if (x->count == x->capacity) {
        size_t more = LG_MAX(2 * x->capacity, (size_t)256);
        struct lg_line *p = realloc(x->line, more * sizeof *p);
        if (!p) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the lines of %s", r->path);
        x->line = p;
        x->capacity = more;
    }
    char *path = malloc(folder + name->bytes + 1), *text = path + folder;
    if (!path) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the lines of %s", r->path);
    memcpy(path, r->relative, folder);
    lg_json_text(name, text);
    while (text[0] == '.' && text[1] == '/') memmove(text, text + 2, strlen(text + 2) + 1);
    x->line[x->count] = *line;
    x->line[x->count++].path = path;
    return 0;
}

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
    return take(r, &line, &name);
}

static bool is_blank(const char *s, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (s[i] != ' ' && s[i] != '\t' && s[i] != '\r') return false;
    return true;
}

int lg_lines_add(struct lg_lines *x, const char *folder, const char *relative, uint32_t file)
{
    char path[LG_PATH_BYTES], *data = NULL;
    size_t bytes = 0;
    LG_TRY(lg_path(path, "%s/%s", folder, relative));
    LG_TRY(lg_read_file(path, LG_LINES_BYTES_MAX, &data, &bytes));
    struct reader r = {.to = x, .relative = relative, .path = path, .file = file};
    int rc = 0;
    for (size_t at = 0, end; rc == 0 && at < bytes; at = end + 1) {
        const char *newline = memchr(data + at, '\n', bytes - at);
        end = newline ? (size_t)(newline - data) : bytes;
        r.number++;
        if (!is_blank(data + at, end - at)) rc = take_line(&r, data, at, end - at);
        if (r.number % 1024 == 0) lg_heartbeat();
    }
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

int lg_lines_sort(struct lg_lines *x)
{
    if (x->count) qsort(x->line, x->count, sizeof *x->line, by_path);
    for (size_t i = 1; i < x->count; i++) {
        const struct lg_line *a = &x->line[i - 1], *b = &x->line[i];
        if (!strcmp(a->path, b->path))
            return LG_FAIL(LG_ERR_CONFIG,
                           "data.path: %s has two lines of " LG_LINES_NAME ", %" PRIu64
                           " and %" PRIu64 "%s: remove one",
                           a->path, LG_MIN(a->number, b->number), LG_MAX(a->number, b->number),
                           a->file == b->file ? "" : " of two such files");
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
