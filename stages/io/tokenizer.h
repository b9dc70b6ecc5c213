/* Captions to token ids, by the tokenizer that a text encoder's files bring: sentencepiece (spiece.h) or byte-level BPE
 * (bpe.h). */
#pragma once
#include "base/check.h"

typedef struct lg_tokenizer lg_tokenizer;

/* path: a sentencepiece model, or the folder of a text encoder or of its tokenizer (config/tokenizer_files.h).
 * LG_ERR_NOTFOUND; LG_ERR_CORRUPT when it does not load, LG_ERR_MISMATCH when it is another kind of model's. */
int lg_tokenizer_open(const char *path, lg_tokenizer **ret);
void lg_tokenizer_close(lg_tokenizer **t);
/* Number of pieces: every id is below. */
int lg_tokenizer_pieces(const lg_tokenizer *t);
int lg_tokenizer_eos(const lg_tokenizer *t);
int lg_tokenizer_pad(const lg_tokenizer *t);
/* Ids of a caption (UTF-8; bytes that are not become U+FFFD), cut so that the end token, and a BPE's begin, find room in
 * `length`, then padding. *ret_length (may be NULL): ids before the padding, at least 1. length >= 1, of which one alone
 * holds the end. A tokenizer is used by one thread at a time. */
int lg_tokenizer_encode(lg_tokenizer *t, const char *text, int length, int32_t *ret_ids,
                        int *ret_length);
