/* The files of a byte-level BPE tokenizer (bpe.h). Nothing in them is trusted. */
#pragma once
#include "base/check.h"

/* Two tokens that make a third one. */
struct lg_bpe_merge {
    int32_t left, right, whole; /* left < 0: an empty place */
    uint32_t rank;
};

enum { LG_BPE_SPECIALS = 4 };
struct lg_bpe_special {
    char *text;
    int32_t id;
    bool normalized; /* it is looked for in text that is composed and lower-cased */
};

struct lg_bpe_files {
    int pieces;
    int32_t byte[256], last[256]; /* of a byte within a word, and of a word's last one */
    struct lg_bpe_merge *merge;   /* by lg_bpe_find */
    uint64_t merge_mask;          /* places - 1, a power of two */
    struct lg_bpe_special special[LG_BPE_SPECIALS]; /* different texts */
    int n_specials;
    int32_t bos, eos, pad;
};
/* Zero it before; free it after, also after an error. */
int lg_bpe_files_read(const char *dir, struct lg_bpe_files *ret);
void lg_bpe_files_free(struct lg_bpe_files *f);
/* The merge of these two; NULL: there is none. */
const struct lg_bpe_merge *lg_bpe_find(const struct lg_bpe_files *f, int32_t left, int32_t right);
