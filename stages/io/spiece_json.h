/* The tokenizer.json of a T5, as the sentencepiece model that it was made from: the same tokens, since both know the same
 * pieces, scores and replacements of characters. */
#pragma once
#include "base/check.h"

/* The serialised ModelProto (sentencepiece_model.proto), malloc'd. LG_ERR_MISMATCH: it is no Unigram, normalises otherwise, or
 * has added tokens that no T5 has. */
int lg_spiece_json_read(const char *path, char **ret, size_t *ret_bytes);
