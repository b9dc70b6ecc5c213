/* The table of character replacements in a sentencepiece model (`precompiled_charsmap`), checked
 * before the library sees it: the library follows its offsets wherever they point.
 *
 * Layout: 4 bytes, little-endian: size of the trie in bytes; the trie; replacement texts, each with a
 * NUL behind it. The trie is a double array (darts-clone): an array of 32-bit units. A state is an
 * index b; byte c leads from it to unit b ^ c if that unit carries the label c, and from there to the
 * state (b ^ c) ^ offset. A unit with the leaf bit ends a key, whose value, the place of its
 * replacement, is in the unit at the new state's index. */
#pragma once
#include "base/check.h"

enum {
    LG_CHARSMAP_UNITS_MAX = 1 << 18, /* of nmt_nfkc, which T5 has, there are 44,288 */
    LG_CHARSMAP_TEXT_MAX = 255,      /* bytes of a replacement; Unicode's longest has 33 */
    LG_CHARSMAP_KEYS_MAX = 32        /* keys that begin one another: the library's array for them */
};

/* NULL, or what is wrong, in words that follow "its character table". After NULL every state that any
 * text reaches lies inside the trie, and every replacement is UTF-8 that ends inside the table.
 * Memory: 5 bytes a unit. Time: below 0.1 s for a table that programs wrote, a few seconds at the
 * worst. */
const char *lg_charsmap_check(const void *data, size_t bytes);
