/* Where a text encoder's tokenizer lies, and which files of it decide bits.
 *
 * It lies in the encoder's own folder, or, in a folder of diffusers', beside it: text_encoder has tokenizer, text_encoder_2
 * has tokenizer_2. */
#pragma once
#include "base/check.h"
#include "base/fs.h"

typedef enum lg_tokenizer_kind {
    LG_TOKENIZER_SPIECE, /* spiece.model: T5's */
    LG_TOKENIZER_BPE,    /* vocab.json, merges.txt and what names the special tokens: CLIP's */
    LG_TOKENIZER_JSON,   /* either of them in tokenizer.json: goes for both */
    LG_TOKENIZER_KINDS
} lg_tokenizer_kind;

struct lg_tokenizer_files {
    lg_tokenizer_kind kind;
    char dir[LG_PATH_BYTES];
};

/* dir: the text encoder's folder, or the tokenizer's. LG_ERR_NOTFOUND: no tokenizer of that kind; LG_TOKENIZER_KINDS: of
 * any, of which spiece.model is the first. */
int lg_tokenizer_files_find(const char *dir, lg_tokenizer_kind kind,
                            struct lg_tokenizer_files *ret);
/* Of the contents of its files. */
int lg_tokenizer_files_hash(const struct lg_tokenizer_files *f, uint64_t *ret);
/* The file, or the first of its files, for messages. */
int lg_tokenizer_files_path(const struct lg_tokenizer_files *f, char ret[LG_PATH_BYTES]);
