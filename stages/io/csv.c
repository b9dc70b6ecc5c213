/* The CSV reader; see csv.h. */
#include "stages/io/csv.h"
#include <inttypes.h>
#include <string.h>

void lg_csv_open(lg_csv *c, const struct lg_csv_source *source)
{
    *c = (lg_csv){.source = *source, .is_last = true, .next_line = 1};
    if (!c->source.data) c->source.data = "";
    if (!c->source.record_bytes_max) c->source.record_bytes_max = SIZE_MAX;
    if (!c->source.code) c->source.code = LG_ERR_CORRUPT;
    if (source->bytes >= 3 && memcmp(c->source.data, "\xef\xbb\xbf", 3) == 0) c->next = 3;
    c->line = 1;
}

int lg_csv_fail(const lg_csv *c, const char *what)
{
    return LG_FAIL(c->source.code, "%s:%" PRIu64 ": %s", c->source.label, c->line, what);
}

static int fail_long(const lg_csv *c, const char *why)
{
    return LG_FAIL(c->source.code, "%s:%" PRIu64 ": the record is longer than %zu bytes%s",
                   c->source.label, c->line, c->source.record_bytes_max, why);
}

/* Bytes of the end of a line that stands at a place; 0: there is none. */
static size_t line_end(const lg_csv *c, size_t at)
{
    const char *s = c->source.data;
    if (at < c->source.bytes && s[at] == '\n') return 1;
    return at + 1 < c->source.bytes && s[at] == '\r' && s[at + 1] == '\n' ? 2 : 0;
}

static void begin_record(lg_csv *c)
{
    for (size_t n; (n = line_end(c, c->next)) > 0; c->next_line++) c->next += n;
    c->begin = c->next;
    c->line = c->next_line;
    c->column = 0;
    c->is_end = c->next == c->source.bytes;
}

/* Where the quoted field ends that begins at c->next. The bound is looked at here, since a quote that is missing makes all that
 * follows one field. */
static int end_of_quoted(lg_csv *c, size_t *ret_end)
{
    const char *s = c->source.data;
    const size_t left = c->source.bytes - c->begin;
    const bool bounded = c->source.record_bytes_max < left;
    const size_t limit = c->begin + (bounded ? c->source.record_bytes_max : left);
    for (size_t at = c->next + 1; at < limit; at++) {
        if (s[at] == '\n') c->next_line++;
        if (s[at] != '"') continue;
        if (at + 1 == c->source.bytes || s[at + 1] != '"') {
            *ret_end = at + 1;
            return 0;
        }
        at++;
    }
    return bounded ? fail_long(c, ": is there a quote too many, or one missing?")
                   : lg_csv_fail(c, "a quote that does not end");
}

static int end_of_plain(const lg_csv *c, size_t *ret_end)
{
    const char *s = c->source.data;
    size_t at = c->next;
    while (at < c->source.bytes && s[at] != ',' && s[at] != '\n' && s[at] != '\r') {
        if (s[at] == '"')
            return lg_csv_fail(c, "a quote inside a field that does not begin with one: the field "
                                  "must stand in quotes, and each quote in it twice");
        at++;
    }
    *ret_end = at;
    return 0;
}

/* Passes what stands behind a field. */
static int pass_end(lg_csv *c, size_t end)
{
    const size_t n = line_end(c, end);
    c->is_last = n > 0 || end == c->source.bytes;
    c->next = end + n;
    c->next_line += n > 0;
    if (c->is_last) return 0;
    if (c->source.data[end] == '\r')
        return lg_csv_fail(c, "a carriage return outside quotes that no line feed follows");
    if (c->source.data[end] != ',')
        return lg_csv_fail(c, "text behind the quote that ends a field");
    c->next++;
    return 0;
}

static int count_fields(lg_csv *c)
{
    const size_t fields = c->column + 1;
    if (!c->columns && c->is_last) c->columns = fields;
    if (!c->columns || (c->is_last ? fields == c->columns : fields < c->columns)) return 0;
    return LG_FAIL(c->source.code,
                   "%s:%" PRIu64 ": the record has %s fields than the header, which has %zu%s",
                   c->source.label, c->line, fields < c->columns ? "fewer" : "more", c->columns,
                   fields < c->columns ? "" : ": a field with a comma must stand in quotes");
}

int lg_csv_next(lg_csv *c)
{
    if (c->is_last)
        begin_record(c);
    else
        c->column++;
    c->at = c->next;
    c->bytes = 0;
    if (c->is_end) return 0;
    size_t end = 0;
    const bool is_quoted = c->next < c->source.bytes && c->source.data[c->next] == '"';
    LG_TRY(is_quoted ? end_of_quoted(c, &end) : end_of_plain(c, &end));
    if (end - c->begin > c->source.record_bytes_max) return fail_long(c, "");
    c->bytes = end - c->at;
    LG_TRY(pass_end(c, end));
    LG_TRY(count_fields(c));
    return 0;
}

/* What stands between the quotes, where there are any. */
static const char *inside(const lg_csv *c, size_t *ret_bytes)
{
    const char *s = c->source.data + c->at;
    const bool is_quoted = c->bytes > 0 && s[0] == '"';
    *ret_bytes = c->bytes - (is_quoted ? 2 : 0);
    return s + is_quoted;
}

bool lg_csv_is(const lg_csv *c, const char *text)
{
    size_t bytes;
    const char *s = inside(c, &bytes);
    return bytes == strlen(text) && memcmp(s, text, bytes) == 0;
}

size_t lg_csv_text(const lg_csv *c, char *ret)
{
    size_t bytes, n = 0;
    const char *s = inside(c, &bytes);
    for (size_t i = 0; i < bytes; i++) {
        ret[n++] = s[i];
        i += s[i] == '"'; /* in quotes alone, where it stands twice */
    }
    ret[n] = 0;
    return n;
}
