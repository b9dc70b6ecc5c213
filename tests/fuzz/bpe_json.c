/* Fuzz target: the tokenizer.json of a CLIP. What is taken apart is an object and as many lines as there are merges; what
 * opens as a tokenizer has a token for every byte. */
#include "stages/io/bpe_json.h"
#include "stages/io/bpe.h"
#include "tests/fuzz/fuzz.h"
#include <string.h>

LG_FUZZ_TARGET(bpe_json)
{
    static const char *dir;
    lg_fuzz_file(0, data, bytes);
    if (!dir) dir = lg_fuzz_link("tokenizer.json", 0);
    struct lg_bpe_json x = {0};
    const int rc = lg_bpe_json_read(dir, &x);
    LG_ASSERT(rc == 0 || rc == LG_ERR_CORRUPT || rc == LG_ERR_MISMATCH);
    if (rc == 0) {
        LG_ASSERT(x.vocab->text >= x.file.data);
        LG_ASSERT((size_t)(x.vocab->text - x.file.data) + x.vocab->bytes <= bytes);
        LG_ASSERT(x.merges_bytes <= bytes);
        LG_ASSERT(x.merges_bytes == 0 || x.merges[x.merges_bytes - 1] == '\n');
    }
    lg_bpe_json_free(&x);
    lg_bpe *t = NULL;
    const int opened = lg_bpe_open(dir, &t);
    LG_ASSERT(opened == 0 || opened == LG_ERR_CORRUPT || opened == LG_ERR_MISMATCH);
    LG_ASSERT(opened != 0 || (rc == 0 && lg_bpe_pieces(t) >= 512));
    lg_bpe_close(&t);
}
