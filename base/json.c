/* The JSON reader; see json.h. A state says what may come next; a bit for each depth whether it is an
 * object or an array. */
#include "base/json.h"
#include "base/utf8.h"
#include <stdio.h>
#include <string.h>

enum { VALUE, VALUE_OR_END, KEY, KEY_OR_END, COMMA_OR_END, NOTHING }; /* lg_json.expect */

void lg_json_open(lg_json *j, const struct lg_json_source *source)
{
    *j = (lg_json){.source = *source, .expect = VALUE};
    j->at = source->data ? source->data : "";
    j->end = j->at + source->bytes;
    if (source->bytes >= 3 && memcmp(j->at, "\xef\xbb\xbf", 3) == 0) j->at += 3;
    j->left = source->tokens_max ? source->tokens_max : UINT64_MAX;
    if (!j->source.code) j->source.code = LG_ERR_CORRUPT;
}

static size_t place(const lg_json *j, const char *at)
{
    const char *start = j->source.data ? j->source.data : "";
    return (size_t)(at - start) + j->source.origin;
}

static int fail_at(const lg_json *j, const char *at, const char *what)
{
    return LG_FAIL(j->source.code, "%s is not JSON: %s (at byte %zu)", j->source.label, what,
                   place(j, at));
}

int lg_json_fail(const lg_json *j, const char *what)
{
    return LG_FAIL(j->source.code, "%s: %s (at byte %zu)", j->source.label, what,
                   place(j, j->text ? j->text : j->at));
}

static void skip_space(lg_json *j)
{
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t'))
        j->at++;
}

/* ---- texts ---- */

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* The four digits at s, or -1. */
static int32_t hex4(const char *s, const char *end)
{
    int32_t v = 0;
    if (end - s < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int d = hex_digit(s[i]);
        if (d < 0) return -1;
        v = v << 4 | d;
    }
    return v;
}

/* The escape at s, which is a backslash: its length and code point, or 0. */
static size_t escape(const char *s, const char *end, uint32_t *ret_code)
{
    static const char names[] = "\"\\/bfnrt", codes[] = "\"\\/\b\f\n\r\t";
    if (end - s < 2) return 0;
    const char *name = s[1] ? strchr(names, s[1]) : NULL;
    if (name) {
        *ret_code = (uint8_t)codes[name - names];
        return 2;
    }
    int32_t high = s[1] == 'u' ? hex4(s + 2, end) : -1;
    if (high < 0) return 0;
    *ret_code = (uint32_t)high;
    if (high < 0xD800 || high > 0xDFFF) return 6;
    int32_t low = end - s >= 8 && s[6] == '\\' && s[7] == 'u' ? hex4(s + 8, end) : -1;
    if (high > 0xDBFF || low < 0xDC00 || low > 0xDFFF) return 0; /* half of a pair */
    *ret_code = 0x10000 + ((uint32_t)(high - 0xD800) << 10) + (uint32_t)(low - 0xDC00);
    return 12;
}

/* A text whose first quote has been passed. */
static int take_text(lg_json *j)
{
    const char *s = j->at;
    bool loose = j->source.loose_text;
    uint32_t code;
    j->text = s;
    j->escaped = false;
    while (s < j->end && *s != '"') {
        uint8_t c = (uint8_t)*s;
        size_t n = 1;
        if (c == '\\') {
            j->escaped = true;
            n = escape(s, j->end, &code);
            if (n == 0) return fail_at(j, s, "an impossible escape in a text");
            if (code == 0 && !loose) return fail_at(j, s, "a NUL in a text");
        } else if (c < 0x20 && !loose) {
            return fail_at(j, s, "a control character in a text");
        } else if (c >= 0x80 && !loose) {
            n = lg_utf8_next(s, (size_t)(j->end - s), NULL);
            if (n == 0) return fail_at(j, s, "a text that is not UTF-8");
        }
        s += n;
    }
    if (s >= j->end) return fail_at(j, j->end, "it ends within a text");
    j->bytes = (size_t)(s - j->text);
    j->at = s + 1;
    return 0;
}

size_t lg_json_text(const lg_json *j, char *ret)
{
    LG_ASSERT(j->kind == LG_JSON_KEY || j->kind == LG_JSON_STRING);
    char *to = ret;
    for (const char *s = j->text, *end = s + j->bytes; s < end;) {
        uint32_t code = 0;
        if (*s != '\\') {
            *to++ = *s++;
            continue;
        }
        s += escape(s, end, &code);
        to += lg_utf8_put(code, to);
    }
    *to = 0;
    return (size_t)(to - ret);
}

bool lg_json_is(const lg_json *j, const char *text)
{
    char copy[256];
    size_t n = strlen(text);
    if (j->kind != LG_JSON_KEY && j->kind != LG_JSON_STRING) return false;
    if (!j->escaped) return j->bytes == n && memcmp(j->text, text, n) == 0;
    if (j->bytes >= sizeof copy) return false;
    return lg_json_text(j, copy) == n && memcmp(copy, text, n) == 0;
}

/* ---- numbers and words ---- */

static const char *digits(const char *s, const char *end)
{
    while (s < end && *s >= '0' && *s <= '9') s++;
    return s;
}

static int take_number(lg_json *j)
{
    static const char infinity[] = "Infinity";
    const char *s = j->at, *from;
    j->text = s;
    if (*s == '-') s++;
    if (j->source.infinities && (size_t)(j->end - s) >= sizeof infinity - 1 &&
        memcmp(s, infinity, sizeof infinity - 1) == 0) {
        j->at = s + sizeof infinity - 1;
        j->bytes = (size_t)(j->at - j->text);
        j->kind = LG_JSON_NUMBER;
        return 0;
    }
    from = s;
    s = digits(s, j->end);
    bool good = s > from && (*from != '0' || s == from + 1);
    if (s < j->end && *s == '.') {
        from = ++s;
        s = digits(s, j->end);
        good &= s > from;
    }
    if (s < j->end && (*s == 'e' || *s == 'E')) {
        s++;
        if (s < j->end && (*s == '+' || *s == '-')) s++;
        from = s;
        s = digits(s, j->end);
        good &= s > from;
    }
    if (!good) return fail_at(j, j->at, "a malformed number");
    j->bytes = (size_t)(s - j->text);
    j->at = s;
    j->kind = LG_JSON_NUMBER;
    return 0;
}

bool lg_json_u64(const lg_json *j, uint64_t *ret)
{
    uint64_t v = 0;
    if (j->kind != LG_JSON_NUMBER) return false;
    for (size_t i = 0; i < j->bytes; i++) {
        if (j->text[i] < '0' || j->text[i] > '9') return false;
        if (__builtin_mul_overflow(v, 10, &v) ||
            __builtin_add_overflow(v, (uint64_t)(j->text[i] - '0'), &v))
            return false;
    }
    *ret = v;
    return true;
}

static int take_word(lg_json *j)
{
    static const struct {
        const char *word;
        lg_json_kind kind;
    } words[] = {{"true", LG_JSON_TRUE}, {"false", LG_JSON_FALSE}, {"null", LG_JSON_NULL}};
    for (size_t i = 0; i < LG_ARRAY_LEN(words); i++) {
        size_t n = strlen(words[i].word);
        if ((size_t)(j->end - j->at) < n || memcmp(j->at, words[i].word, n) != 0) continue;
        j->text = j->at;
        j->bytes = n;
        j->at += n;
        j->kind = words[i].kind;
        return 0;
    }
    return fail_at(j, j->at, "a value was expected");
}

/* ---- structure ---- */

static bool in_object(const lg_json *j)
{
    return j->is_object >> (j->depth - 1) & 1;
}

static int take_open(lg_json *j, bool object)
{
    if (j->depth == LG_JSON_DEPTH_MAX) return lg_json_fail(j, "nested more than 64 deep");
    uint64_t bit = UINT64_C(1) << j->depth++;
    j->is_object = object ? j->is_object | bit : j->is_object & ~bit;
    j->text = j->at++;
    j->bytes = 1;
    j->kind = object ? LG_JSON_OBJECT : LG_JSON_ARRAY;
    j->expect = object ? KEY_OR_END : VALUE_OR_END;
    return 0;
}

static int take_close(lg_json *j)
{
    j->kind = in_object(j) ? LG_JSON_OBJECT_END : LG_JSON_ARRAY_END;
    j->text = j->at++;
    j->bytes = 1;
    j->depth--;
    j->expect = j->depth ? COMMA_OR_END : NOTHING;
    return 0;
}

static int take_key(lg_json *j)
{
    if (*j->at != '"') return fail_at(j, j->at, "a name in quotes was expected");
    j->at++;
    LG_TRY(take_text(j));
    skip_space(j);
    if (j->at == j->end || *j->at != ':') return fail_at(j, j->at, "a colon was expected");
    j->at++;
    j->kind = LG_JSON_KEY;
    j->expect = VALUE;
    return 0;
}

static int take_value(lg_json *j)
{
    j->expect = j->depth ? COMMA_OR_END : NOTHING;
    switch (*j->at) {
    case '{':
        return take_open(j, true);
    case '[':
        return take_open(j, false);
    case '"':
        j->at++;
        LG_TRY(take_text(j));
        j->kind = LG_JSON_STRING;
        return 0;
    default:
        return *j->at == '-' || (*j->at >= '0' && *j->at <= '9') ||
                       (*j->at == 'I' && j->source.infinities)
                   ? take_number(j)
                   : take_word(j);
    }
}

int lg_json_next(lg_json *j)
{
    skip_space(j);
    if (j->expect == NOTHING) {
        if (j->at < j->end) return fail_at(j, j->at, "it goes on after its end");
        j->kind = LG_JSON_END;
        return 0;
    }
    if (j->left-- == 0) {
        j->left = 0;
        return lg_json_fail(j, "more values in it than there may be");
    }
    if (j->at == j->end) return fail_at(j, j->at, "it ends too early");
    if (j->expect == COMMA_OR_END && *j->at == ',') {
        j->at++;
        j->expect = in_object(j) ? KEY : VALUE;
        skip_space(j);
        if (j->at == j->end) return fail_at(j, j->at, "it ends too early");
    } else if (j->expect != VALUE && j->expect != KEY && *j->at == (in_object(j) ? '}' : ']')) {
        return take_close(j);
    } else if (j->expect == COMMA_OR_END) {
        return fail_at(j, j->at, "a comma or the end of a list was expected");
    }
    return j->expect == KEY || j->expect == KEY_OR_END ? take_key(j) : take_value(j);
}

int lg_json_skip(lg_json *j)
{
    int depth = j->depth;
    do LG_TRY(lg_json_next(j));
    while (j->depth > depth);
    return 0;
}

const char *lg_json_end(const lg_json *j)
{
    return j->at;
}

int lg_json_expect(lg_json *j, lg_json_kind kind, const char *what)
{
    LG_TRY(lg_json_next(j));
    return j->kind == kind ? 0 : lg_json_fail(j, what);
}
