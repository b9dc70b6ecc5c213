/* Captions to the token ids of a CLIP: byte-level BPE as in GPT-2 and CLIP (Sennrich et al. 2016; Radford et al. 2021),
 * token for token what transformers' CLIPTokenizer gives.
 *
 * A tokenizer's folder has
 *   vocab.json               {"token": id}: ids 0 to n - 1, each once. Among them each byte as one character (bytes that
 *                            do not print stand for themselves 256 and more further up), alone and with </w> behind it,
 *                            which ends a word
 *   merges.txt               two tokens a line, which together are a token, by rank; the first line may be #version ..
 *   tokenizer_config.json, special_tokens_map.json   either may be absent: which tokens begin, end and pad a caption, by
 *                            default <|startoftext|>, <|endoftext|>, and the end again. The first file's words count if it
 *                            has added_tokens_decoder, else the second's do
 * or, without vocab.json, tokenizer.json, which has the vocabulary, the merges and the added tokens (bpe_json.h).
 *
 * A caption: the special tokens in it are taken out; the rest is composed (NFC) and lower-cased; words are 's 't 're 've 'm
 * 'll 'd, letters together, one digit, or what else is no white space, together; a word's bytes are merged, the pair of
 * lowest rank first. What letters, digits and marks are, utf8proc says (Unicode 15.0 in Debian 12), of which
 * transformers has other versions: a caption with characters that are newer than one of them may get other tokens. */
#pragma once
#include "base/check.h"

enum {
    LG_BPE_VOCAB_MAX = 1 << 20,
    LG_BPE_TOKEN_BYTES_MAX = 1024,
    LG_BPE_VOCAB_BYTES_MAX = 64 << 20,
    LG_BPE_MERGES_BYTES_MAX = 64 << 20,
};

typedef struct lg_bpe lg_bpe;

/* dir: the tokenizer's folder. LG_ERR_NOTFOUND, LG_ERR_CORRUPT, LG_ERR_MISMATCH (special tokens that CLIP has none of). */
int lg_bpe_open(const char *dir, lg_bpe **ret);
void lg_bpe_close(lg_bpe **t);
/* Number of tokens: every id is below. */
int lg_bpe_pieces(const lg_bpe *t);
int lg_bpe_bos(const lg_bpe *t);
int lg_bpe_eos(const lg_bpe *t);
int lg_bpe_pad(const lg_bpe *t);
/* Ids of a caption (UTF-8; each byte that belongs to no character becomes U+FFFD): the begin, length - 2 of its tokens at
 * most, the end, then padding. *ret_length: ids before the padding. length >= 2. A tokenizer is used by one thread at a
 * time. Time: n log n of the caption's bytes. */
void lg_bpe_encode(lg_bpe *t, const char *text, int length, int32_t *ret_ids, int *ret_length);
