/* tokenizer.json, in which Hugging Face's tokenizers library keeps all of a tokenizer and as which alone transformers 5 saves
 * one. Here it is looked through for the parts that are read: bpe_json.h, spiece_json.h. Nothing in it is trusted. */
#pragma once
#include "base/check.h"
#include "base/fs.h"
#include "base/json.h"
#include <cjson/cJSON.h>

enum { LG_TOKENIZER_JSON_BYTES_MAX = 64 << 20 };

/* A value: the reader before its first token; of an object or a list its text, from the first brace to the last. */
struct lg_json_value {
    bool found;
    lg_json before;
    const char *text;
    size_t bytes;
};

/* Keys of "model", and of the file itself. */
#define LG_TOKENIZER_JSON_MODEL(X) X(type) X(end_of_word_suffix) X(vocab) X(merges) X(byte_fallback)
#define LG_TOKENIZER_JSON_OWN(X)   X(added_tokens) X(normalizer) X(pre_tokenizer)

struct lg_tokenizer_json {
    char path[LG_PATH_BYTES];
    char *data; /* the file */
    size_t bytes;
#define X(key) struct lg_json_value key;
    LG_TOKENIZER_JSON_MODEL(X)
    LG_TOKENIZER_JSON_OWN(X)
#undef X
};

/* Zero it before; free it after, also after an error. A key that stands there twice is LG_ERR_CORRUPT. */
int lg_tokenizer_json_read(const char *path, struct lg_tokenizer_json *ret);
void lg_tokenizer_json_free(struct lg_tokenizer_json *x);
/* Is it this string? */
bool lg_json_value_is(const struct lg_json_value *v, const char *text);
/* Is its model a BPE's? LG_ERR_CORRUPT as above. */
int lg_tokenizer_json_is_bpe(const char *path, bool *ret);
/* The list of added tokens, NULL where there is none; the caller deletes it. */
int lg_tokenizer_json_added(const struct lg_tokenizer_json *x, cJSON **ret);
