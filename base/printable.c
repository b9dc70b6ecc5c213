/* Printable text; see printable.h. */
#include "base/printable.h"
#include "base/check.h"
#include "base/utf8.h"
#include <stdlib.h>
#include <string.h>

enum { PIECE_BYTES = 16, INDENT = 4 };

struct piece {
    char text[PIECE_BYTES];
    size_t bytes;
};

static bool is_harmless(uint32_t c)
{
    if (c < 0x20) return c == '\t';
    if (c >= 0x7F && c <= 0x9F) return false;
    return !(c == 0x2028 || c == 0x2029 || (c >= 0x202A && c <= 0x202E) ||
             (c >= 0x2066 && c <= 0x2069));
}

static size_t indent_missing(const char *s, size_t bytes)
{
    size_t n = 0;
    while (n < INDENT && n < bytes && s[n] == ' ') n++;
    return INDENT - n;
}

/* Takes one character, or one byte that is none, from the front of s: its bytes, and what is shown. */
static size_t take(const char *s, size_t bytes, lg_newlines newlines, struct piece *ret)
{
    uint32_t code = 0;
    size_t n = lg_utf8_next(s, bytes, &code);
    int shown = 0;
    if (n && code == '\n' && newlines != LG_NEWLINES_ESCAPED) {
        size_t spaces = newlines == LG_NEWLINES_INDENTED ? indent_missing(s + 1, bytes - 1) : 0;
        shown = snprintf(ret->text, PIECE_BYTES, "\n%*s", (int)spaces, "");
    } else if (n && is_harmless(code)) {
        memcpy(ret->text, s, n);
        shown = (int)n;
    } else if (n == 0 || code < 0x80) {
        n = 1;
        shown = snprintf(ret->text, PIECE_BYTES, "\\x%02x", (unsigned)(uint8_t)*s);
    } else {
        shown = snprintf(ret->text, PIECE_BYTES, "\\u{%x}", (unsigned)code);
    }
    ret->bytes = (size_t)shown;
    return n;
}

size_t lg_printable(char *ret, size_t room, const char *text, size_t bytes, lg_newlines newlines)
{
    LG_ASSERT(room >= 1);
    size_t at = 0;
    struct piece p;
    for (size_t from = 0; from < bytes;) {
        from += take(text + from, bytes - from, newlines, &p);
        if (p.bytes > room - 1 - at) break;
        memcpy(ret + at, p.text, p.bytes);
        at += p.bytes;
    }
    ret[at] = 0;
    return at;
}

void lg_print_text(FILE *to, const char *text, size_t bytes, lg_newlines newlines)
{
    struct piece p;
    for (size_t from = 0; from < bytes;) {
        size_t plain = from; /* ASCII in one go */
        while (plain < bytes && text[plain] >= ' ' && text[plain] < 0x7F) plain++;
        if (plain > from) {
            fwrite(text + from, 1, plain - from, to);
            from = plain;
            continue;
        }
        from += take(text + from, bytes - from, newlines, &p);
        fwrite(p.text, 1, p.bytes, to);
    }
}

void lg_print(FILE *to, const char *fmt, ...)
{
    char *text = NULL;
    va_list ap;
    va_start(ap, fmt);
    int n = vasprintf(&text, fmt, ap);
    va_end(ap);
    if (n < 0) return; /* no memory: nothing could be said about it */
    lg_print_text(to, text, (size_t)n, LG_NEWLINES_KEPT);
    free(text);
}
