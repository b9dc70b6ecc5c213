/* The data set on the board: all loaders of a run see the same one.
 *
 * Access rule:
 *   known[], n_known, may_change   lgsup, before any process starts: the parts that the checkpoint was trained
 *                                  on which the run goes on from (none: a new run, or one of a build that
 *                                  did not know), and whether another data set may follow on them.
 *   hash       0 until the first loader has its index; that one sets it by compare-and-swap, and nobody ever
 *              changes it. Every later loader compares.
 *   items      stored by every loader whose hash is that, before it makes its first sample: always the same
 *              number. So a loader that dies between the two leaves hash without items, and whoever agrees
 *              with it fills them in; without samples nobody needs them.
 *   tokenizer  likewise, of each text: the hash of the tokenizer's file, from the first loader that has read it. The plan has
 *              compared it with the checkpoint's; this is for loaders that come later in the run.
 *   changed    stored (1) by a loader that parks the run since it sees another data set; for the next start,
 *              which clears it. Dying before: the next loader sees the same and stores it. */
#pragma once
#include "config/data_set.h"
#include "config/denoisers.h"
#include <stdatomic.h>

struct lg_board;

struct lg_board_data {
    struct lg_data_part known[LG_DATA_PARTS_MAX];
    uint32_t n_known, may_change;
    _Atomic(uint64_t) hash, items, tokenizer[LG_TEXTS_MAX];
    _Atomic(uint32_t) changed;
};

/* A loader's index has this identity. 0: so has the run's data set. LG_ERR_MISMATCH, without a text: the run
 * is trained on another, *ret_expected (items 0: not known). */
int lg_data_agree(struct lg_board *b, uint64_t items, uint64_t hash,
                  struct lg_data_part *ret_expected);
/* A loader has read a tokenizer of text `text` with this hash (not 0): is it the run's? */
bool lg_data_same_tokenizer(struct lg_board *b, int text, uint64_t hash);
/* All parts of the run, in order; the last one is what it is trained on now. Until a loader has agreed: those
 * of the checkpoint. Returns their number. */
int lg_data_parts(struct lg_board *b, struct lg_data_part ret[LG_DATA_PARTS_MAX]);
