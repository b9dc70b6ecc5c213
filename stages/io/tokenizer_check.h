/* A sentencepiece model, looked through before the library that interprets it gets it: the library
 * believes what it reads, and some of it ends the process (charsmap.h) or its stack. */
#pragma once
#include "base/check.h"

enum {
    LG_PIECES_MAX = 1 << 20,   /* mT5 has 250,112 */
    LG_PIECE_BYTES_MAX = 1024, /* the library recurses by this length */
    LG_PIECES_NESTED_MAX = 32, /* user-defined pieces that begin one another: its array holds 64 */
    LG_SELF_TEST_BYTES_MAX =
        64 << 10 /* sentences that the library encodes when it loads the model */
};

/* `data` is the content of `path`, the serialised ModelProto. LG_ERR_CORRUPT when it is none or asks
 * for more than the bounds, LG_ERR_MISMATCH when it is another kind of model than T5's (unigram). */
int lg_tokenizer_check(const char *path, const void *data, size_t bytes);
