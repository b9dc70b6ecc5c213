/* Fuzz target: CSV and the metadata.csv of a folder of pictures. Fields come in the order in which they stand, each record has
 * as many as the first, and each, read alone, is the same text; so is the caption of a record. A NUL in front: no record may
 * be longer than ten bytes. */
#include "stages/io/csv.h"
#include "stages/io/source_lines.h"
#include "tests/fuzz/fuzz.h"
#include <stdlib.h>
#include <string.h>

/* The only field of these bytes. */
static lg_csv alone(const char *field, size_t bytes)
{
    lg_csv c;
    lg_csv_open(&c, &(struct lg_csv_source){.label = "it", .data = field, .bytes = bytes});
    LG_ASSERT(lg_csv_next(&c) == 0 && c.is_last && c.at + c.bytes == bytes);
    return c;
}

static void read_fields(const char *data, size_t bytes, size_t record_bytes_max)
{
    lg_csv c;
    lg_csv_open(&c, &(struct lg_csv_source){.label = "it",
                                            .data = data,
                                            .bytes = bytes,
                                            .record_bytes_max = record_bytes_max,
                                            .code = LG_ERR_CONFIG});
    char *text = malloc(2 * bytes + 2), *again = text + bytes + 1;
    LG_ASSERT(text);
    size_t end = 0, begin = 0, columns = 0, column = 0;
    uint64_t line = 1;
    int rc;
    while ((rc = lg_csv_next(&c)) == 0 && !c.is_end) {
        if (c.column == 0) begin = c.at;
        LG_ASSERT(c.column == column && c.at >= end && c.at + c.bytes <= bytes && c.line >= line);
        LG_ASSERT(!record_bytes_max || c.at + c.bytes - begin <= record_bytes_max);
        LG_ASSERT(!columns || (column < columns && c.is_last == (column + 1 == columns)));
        end = c.at + c.bytes;
        line = c.line;
        column = c.is_last ? 0 : column + 1;
        if (c.is_last) columns = c.column + 1;
        const size_t n = lg_csv_text(&c, text);
        LG_ASSERT(n <= c.bytes && text[n] == 0);
        const bool has_mark = c.bytes >= 3 && memcmp(data + c.at, "\xef\xbb\xbf", 3) == 0;
        if (!c.bytes || has_mark) continue; /* which a reader passes over */
        const lg_csv field = alone(data + c.at, c.bytes);
        LG_ASSERT(lg_csv_text(&field, again) == n && memcmp(text, again, n) == 0);
    }
    LG_ASSERT(rc == 0 || rc == LG_ERR_CONFIG);
    if (rc == 0) LG_ASSERT(column == 0 && lg_csv_next(&c) == 0 && c.is_end);
    free(text);
}

static void read_captions(const char *data, size_t bytes)
{
    static const char *dir;
    lg_fuzz_file(0, data, bytes);
    if (!dir) dir = lg_fuzz_link(LG_LINES_CSV_NAME, 0);
    struct lg_lines x = {0};
    int rc = lg_lines_add(&x, dir, LG_LINES_CSV_NAME, 7);
    LG_ASSERT(rc == 0 || rc == LG_ERR_CONFIG);
    for (size_t i = 0; i < x.count; i++) {
        const struct lg_line *l = &x.line[i];
        LG_ASSERT(l->at + l->bytes <= bytes && l->file == 7 && l->is_csv && l->number >= 2);
        if (!l->bytes) continue;
        const lg_csv field = alone(data + l->at, l->bytes);
        LG_ASSERT(!lg_csv_is(&field, "") || field.at == 3); /* a byte order mark alone */
    }
    if (rc == 0 && lg_lines_sort(&x) == 0)
        for (size_t i = 0; i < x.count; i++)
            LG_ASSERT(lg_lines_find(&x, x.line[i].path) == &x.line[i]);
    lg_lines_free(&x);
}

LG_FUZZ_TARGET(csv)
{
    const char *text = bytes ? (const char *)data : "";
    const size_t bounded = bytes && !data[0];
    read_fields(text + bounded, bytes - bounded, bounded ? 10 : 0);
    lg_err_clear();
    read_captions(text, bytes);
}
