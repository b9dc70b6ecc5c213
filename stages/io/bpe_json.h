/* The tokenizer.json of a CLIP, taken apart into what a byte-level BPE has in files of its own (bpe.h). */
#pragma once
#include "stages/io/tokenizer_json.h"

struct lg_bpe_json {
    struct lg_tokenizer_json file;
    const struct lg_json_value *vocab; /* the object that vocab.json would be */
    char *merges;                      /* what merges.txt would be */
    size_t merges_bytes;
    cJSON *added; /* the list of added tokens, or NULL */
};

/* Zero it before; free it after, also after an error. LG_ERR_MISMATCH: it is no BPE whose words end in </w>. */
int lg_bpe_json_read(const char *dir, struct lg_bpe_json *ret);
void lg_bpe_json_free(struct lg_bpe_json *x);
