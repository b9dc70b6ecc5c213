/* Fuzz target: a spiece.model, or a tokenizer.json. What opens tokenises captions to ids below the number of pieces. The
 * input is tried as it is and as the character table of a whole model, where its offsets count. */
#include "stages/io/charsmap.h"
#include "stages/io/tokenizer.h"
#include "tests/fuzz/fuzz.h"
#include <string.h>

/* Four pieces and the ids that T5 wants. */
static const uint8_t model[] =
    "\x0a\x09\x0a\x05<pad>\x18\x03"
    "\x0a\x08\x0a\x04</s>\x18\x03"
    "\x0a\x09\x0a\x05<unk>\x18\x02"
    "\x0a\x03\x0a\x01"
    "a"
    "\x12\x12\x18\x01\xc0\x02\x02\xc8\x02\xff\xff\xff\xff\x0f\xd0\x02\x01\xd8\x02";
enum { TABLE_MAX = 1 << 16, LENGTH = 16 };

static void tokenise(lg_tokenizer *t)
{
    static const char *const captions[] = {"a", "A red AB square ",
                                           "\xc3\xa9\xe7\x8c\xab\xf0\x9f\x98\x80",
                                           "\x01\x7f\xff\xf0\x9f </s>"};
    int32_t ids[LENGTH];
    for (size_t i = 0; i < LG_ARRAY_LEN(captions); i++) {
        int used = -1;
        LG_ASSERT(lg_tokenizer_encode(t, captions[i], LENGTH, ids, &used) == 0);
        LG_ASSERT(used >= 1 && used <= LENGTH && ids[used - 1] == lg_tokenizer_eos(t));
        for (int k = 0; k < LENGTH; k++) LG_ASSERT(ids[k] >= 0 && ids[k] < lg_tokenizer_pieces(t));
    }
}

static int try_model(const void *data, size_t bytes)
{
    lg_tokenizer *t = NULL;
    int rc = lg_tokenizer_open(lg_fuzz_file(0, data, bytes), &t);
    LG_ASSERT(rc == 0 || rc == LG_ERR_CORRUPT || rc == LG_ERR_MISMATCH);
    if (rc == 0) tokenise(t);
    lg_tokenizer_close(&t);
    lg_err_clear();
    return rc;
}

static size_t put_varint(uint8_t *to, size_t v)
{
    size_t n = 0;
    for (; v > 127; v >>= 7) to[n++] = (uint8_t)(v | 128);
    to[n++] = (uint8_t)v;
    return n;
}

LG_FUZZ_TARGET(spiece)
{
    static uint8_t with_table[sizeof model + TABLE_MAX + 16];
    try_model(data, bytes);
    if (bytes == 0 || bytes > TABLE_MAX) return;
    uint8_t head[8] = {2 << 3 | 2};
    size_t head_bytes = 1 + put_varint(head + 1, bytes), at = sizeof model;
    memcpy(with_table, model, at); /* the NUL behind it is the pad's id */
    with_table[at++] = 3 << 3 | 2;
    at += put_varint(with_table + at, head_bytes + bytes);
    memcpy(with_table + at, head, head_bytes);
    memcpy(with_table + at + head_bytes, data, bytes);
    int rc = try_model(with_table, at + head_bytes + bytes);
    LG_ASSERT((rc == 0) == !lg_charsmap_check(data, bytes));
}
