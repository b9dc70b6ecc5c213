/* CSV that somebody else wrote, read field by field: no memory, and time of one pass. The grammar is that of RFC 4180: fields
 * between commas, records between ends of lines, LF or CRLF, which may be missing after the last one. A field that begins with
 * a quote ends with one; in between, commas and ends of lines are text, and a quote is written twice. White space is text. All
 * records have as many fields as the first, the header. Beyond RFC 4180, a UTF-8 byte order mark in front and empty lines
 * are passed over. What does not fit the grammar is refused, since a guess would give one picture another's caption: a quote
 * that does not end, one inside a field that does not begin with one, text behind the quote that ends a field, a carriage return
 * alone outside quotes. Bytes need not be UTF-8.
 *
 *     lg_csv c;
 *     lg_csv_open(&c, &(struct lg_csv_source){.label = path, .data = data, .bytes = bytes});
 *     LG_TRY(lg_csv_next(&c));
 *     while (!c.is_end) LG_TRY(lg_csv_next(&c));
 *
 * Not Debian's libcsv (3.0.3): it hands out copies of fields but not where they stand, so that one could not be read again
 * alone; its errors have no line and no cause; and it takes spaces off fields and a carriage return for an end of a line. */
#pragma once
#include "base/check.h"

struct lg_csv_source {
    const char
        *label; /* begins every message, which also says the line that the record begins in */
    const char *data;
    size_t bytes;
    size_t record_bytes_max; /* longer ones are refused; 0: there is no bound */
    int code;                /* of failures; 0 is LG_ERR_CORRUPT */
};

/* A reader may be copied, to keep a field or to go back to where it was. */
typedef struct lg_csv {
    bool is_end;      /* there is no more record, and no field; comes again and again */
    bool is_last;     /* the last field is the last of its record, too */
    size_t at, bytes; /* where the last field stands in the data, with its quotes */
    size_t column;    /* of the last field: 0, 1, ... */
    uint64_t line;    /* that its record begins in: 1, 2, ... */
    /* private */
    struct lg_csv_source source;
    size_t next, begin, columns;
    uint64_t next_line;
} lg_csv;

/* The data stays the caller's and must outlive the reader. */
void lg_csv_open(lg_csv *c, const struct lg_csv_source *source);
/* Reads the next field. */
int lg_csv_next(lg_csv *c);
/* Fails as the reader does: label, line, text. Returns the code. */
int lg_csv_fail(const lg_csv *c, const char *what);

/* Is the last field this text, which holds no quote? */
bool lg_csv_is(const lg_csv *c, const char *text);
/* Writes the last field's text, without what quotes it, and a NUL; ret needs c->bytes + 1 bytes and may be where the field
 * stands. Returns the text's bytes. */
size_t lg_csv_text(const lg_csv *c, char *ret);
