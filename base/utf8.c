/* UTF-8; see utf8.h. */
#include "base/utf8.h"
#include "base/check.h"

enum { SURROGATES = 0xD800, SURROGATES_END = 0xE000, CODE_END = 0x110000 };

size_t lg_utf8_next(const char *s, size_t bytes, uint32_t *ret_code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000}; /* by length */
    if (bytes == 0) return 0;
    uint8_t head = (uint8_t)s[0];
    size_t n = head < 0x80 ? 1 : head < 0xC2 ? 0 : head < 0xE0 ? 2 : head < 0xF0 ? 3 : 4;
    if (n == 0 || n > bytes || head > 0xF4) return 0;
    uint32_t code = n == 1 ? head : head & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        uint8_t c = (uint8_t)s[i];
        if ((c & 0xC0) != 0x80) return 0;
        code = code << 6 | (c & 0x3F);
    }
    if (code < least[n] || code >= CODE_END || (code >= SURROGATES && code < SURROGATES_END))
        return 0;
    if (ret_code) *ret_code = code;
    return n;
}

bool lg_utf8_valid(const char *s, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        if ((uint8_t)s[at] < 0x80) {
            at++;
            continue;
        }
        size_t n = lg_utf8_next(s + at, bytes - at, NULL);
        if (n == 0) return false;
        at += n;
    }
    return true;
}

size_t lg_utf8_put(uint32_t code, char ret[4])
{
    LG_ASSERT(code < CODE_END && (code < SURROGATES || code >= SURROGATES_END));
    if (code < 0x80) {
        ret[0] = (char)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = n; --i > 0; code >>= 6) ret[i] = (char)(0x80 | (code & 0x3F));
    ret[0] = (char)(0xF00u >> n | code);
    return n;
}
