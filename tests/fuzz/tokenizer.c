/* Fuzz target: a caption of any bytes. Input: length, 1 byte, then the text. */
#include "stages/io/tokenizer.h"
#include "tests/fuzz/fuzz.h"
#include <stdlib.h>

LG_FUZZ_TARGET(tokenizer)
{
    static lg_tokenizer *t; /* reachable at exit: no leak */
    if (!t) LG_ASSERT(lg_tokenizer_open("examples/emoji/text_encoder", &t) == 0);
    struct lg_fuzz_input in = {data, bytes};
    int length = 1 + (int)lg_fuzz_u8(&in) % 128, used = -1;
    char *text = lg_fuzz_text(&in);
    int32_t *ids = malloc((size_t)length * sizeof *ids);
    LG_ASSERT(ids && lg_tokenizer_encode(t, text, length, ids, &used) == 0);
    LG_ASSERT(used >= 1 && used <= length && ids[used - 1] == lg_tokenizer_eos(t));
    for (int i = 0; i < length; i++) {
        LG_ASSERT(ids[i] >= 0 && ids[i] < lg_tokenizer_pieces(t));
        LG_ASSERT(i < used || ids[i] == lg_tokenizer_pad(t));
    }
    free(ids);
    free(text);
}
