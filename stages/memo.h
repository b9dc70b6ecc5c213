/* An encoder's memo (shm/memo.h): region memo/<role>, in host memory, opened when the first chunk is claimed, since only then
 * it is known how many items the data set has.
 *
 * Nothing hangs on it but speed, so it is no region like others: it is used without a second copy, and given to no new
 * keeper. Where it is lost, or cannot be had, inputs are encoded again; two instances may have two. */
#pragma once
#include "shm/memo.h"
#include "stages/stage.h"

struct lg_stage_memo_options {
    const char *role, *size; /* "text"; its key memo */
    size_t bytes;            /* of what is made of one input */
    uint64_t
        of_item; /* inputs that come of one item of the data set; 0: too many to remember with "auto" */
};

typedef struct lg_stage_memo {
    lg_region *region;
    lg_memo table;
    bool is_open;          /* or has been tried */
    uint64_t found, asked; /* samples */
} lg_stage_memo;

/* What it may take at most, for the plan. */
size_t lg_stage_memo_bytes(const struct lg_stage_memo_options *o);
/* Where there is no room it remembers nothing, and says so in the log. */
void lg_stage_memo_open(lg_stage *st, const struct lg_stage_memo_options *o, lg_stage_memo *ret);
/* what: "captions", for the log */
void lg_stage_memo_close(lg_stage_memo *m, const char *what);
const void *lg_stage_memo_look(lg_stage_memo *m, struct lg_memo_key key);
