/* Captions to the token ids of a T5: sentencepiece behind a plain C face. */
#pragma once
#include "base/check.h"

enum { LG_SPIECE_PAD = 0, LG_SPIECE_EOS = 1 };

typedef struct lg_spiece lg_spiece;

/* path: the sentencepiece model, or a tokenizer.json (spiece_json.h). LG_ERR_CORRUPT when it does not load, LG_ERR_MISMATCH when its end and padding are not
 * T5's (1 and 0). */
int lg_spiece_open(const char *path, lg_spiece **ret);
void lg_spiece_close(lg_spiece **t);
/* Number of pieces: every id is below. (A T5's vocabulary may be larger: it is padded.) */
int lg_spiece_pieces(const lg_spiece *t);
/* Ids of a caption (UTF-8; bytes that are not become U+FFFD), cut to length - 1, then the end token, then padding.
 * *ret_length: ids before the padding, at least 1. length >= 1. A tokenizer is used by one thread at a time. */
int lg_spiece_encode(lg_spiece *t, const char *text, int length, int32_t *ret_ids, int *ret_length);
