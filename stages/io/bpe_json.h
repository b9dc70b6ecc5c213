/* tokenizer.json, in which Hugging Face's tokenizers library keeps all of a tokenizer: taken apart into what a byte-level
 * BPE has in files of its own (bpe.h). transformers 5 saves a CLIP tokenizer so, without vocab.json and merges.txt. */
#pragma once
#include "base/check.h"
#include "base/fs.h"
#include <cjson/cJSON.h>

struct lg_bpe_json {
    char path[LG_PATH_BYTES];
    char *data;        /* the file */
    const char *vocab; /* the object that vocab.json would be, in data */
    size_t vocab_bytes, vocab_at;
    char *merges; /* what merges.txt would be */
    size_t merges_bytes;
    cJSON *added; /* the list of added tokens, or NULL */
};

/* Zero it before; free it after, also after an error. LG_ERR_MISMATCH: it is no byte-level BPE whose words end in </w>. */
int lg_bpe_json_read(const char *dir, struct lg_bpe_json *ret);
void lg_bpe_json_free(struct lg_bpe_json *x);
