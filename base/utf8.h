/* UTF-8 as Unicode defines it: the shortest form, no surrogates, nothing above U+10FFFF. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the character at s[0 .. bytes), 1 to 4, and its code point (ret_code may be NULL); 0 when
 * there is no complete, valid one. NUL is a character. */
size_t lg_utf8_next(const char *s, size_t bytes, uint32_t *ret_code);
bool lg_utf8_valid(const char *s, size_t bytes);
/* Writes the UTF-8 of a code point (no surrogate, at most U+10FFFF) and returns its bytes, 1 to 4. */
size_t lg_utf8_put(uint32_t code, char ret[4]);
