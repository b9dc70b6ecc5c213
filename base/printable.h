/* Text that others wrote (names of files, captions, messages of libraries and of other processes),
 * made fit for a terminal or a log: what would move the cursor, change colours, reorder or hide text,
 * or begin a line of its own is shown as an escape. Valid UTF-8 that is only letters stays as it is.
 *
 * Escaped are control characters (U+0000 to U+001F but the tab, U+007F to U+009F), the separators
 * U+2028 and U+2029, what switches the direction of writing (U+202A to U+202E, U+2066 to U+2069): as
 * \x1b below U+0080, \u{9b} above; and bytes that are not UTF-8, as \xff. A backslash stays, so text
 * that went through once stays the same. */
#pragma once
#include <stddef.h>
#include <stdio.h>

typedef enum lg_newlines {
    LG_NEWLINES_ESCAPED, /* one line */
    LG_NEWLINES_INDENTED, /* each is followed by four spaces at least: no line looks like a first one */
    LG_NEWLINES_KEPT,
} lg_newlines;

/* Writes text[0 .. bytes) into ret with a NUL behind it; what does not fit is left out, whole
 * characters only. Returns the length. room >= 1; the two may not overlap. */
size_t lg_printable(char *ret, size_t room, const char *text, size_t bytes, lg_newlines newlines);
/* The same to a stream, of any length. */
void lg_print_text(FILE *to, const char *text, size_t bytes, lg_newlines newlines);
/* printf for text with strings of others in it: everything, newlines apart, becomes printable. */
void lg_print(FILE *to, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
