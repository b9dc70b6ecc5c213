/* memory.recompute as data: which blocks of a net keep what of their forward. */
#pragma once
#include "base/check.h"
#include <stddef.h>

enum lg_recompute_kind {
    LG_RECOMPUTE_NONE,
    LG_RECOMPUTE_NORMS,   /* results of norms, in every block */
    LG_RECOMPUTE_MLP,     /* the feed-forward's hidden layer, in every block */
    LG_RECOMPUTE_BLOCKS,  /* all of `block` */
    LG_RECOMPUTE_UNIFORM, /* all but what enters each group of blocks */
    LG_RECOMPUTE_BUDGET,  /* whatever it takes */
};

struct lg_recompute {
    enum lg_recompute_kind kind;
    bool *block; /* [blocks] */
    int group;   /* with LG_RECOMPUTE_UNIFORM: blocks, from 1 to `blocks` */
    size_t budget;
};

/* words: as in docs/config.md, up to NULL; NULL and no words mean none. Numbers are decimal digits, those of a ratio
 * and of a size perhaps with a point; a size ends in nothing (bytes), KiB, MiB, GiB, TiB, KB, MB, GB or TB and is at
 * least a byte. LG_ERR_CONFIG says what is wrong. Free with lg_recompute_free. */
int lg_recompute_parse(const char *const *words, int blocks, struct lg_recompute *ret);
void lg_recompute_free(struct lg_recompute *r);
