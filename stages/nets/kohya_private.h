/* For kohya.c: which linear of the published original a linear of ours is a part of (kohya.def). */
#pragma once
#include "stages/nets/kohya.h"

enum { LG_KOHYA_PARTS_MAX = 4 };
typedef char lg_kohya_name[LG_PARAM_NAME_BYTES];

struct lg_kohya_part {
    const struct lg_param *down, *up; /* of the adapter; NULL: it is not adapted */
    int64_t outputs;
};
struct lg_kohya_linear {
    lg_kohya_name name;
    struct lg_kohya_part part[LG_KOHYA_PARTS_MAX];
    int parts, adapted;
    int64_t outputs, inputs, rank; /* rank: of one part */
    bool is_swapped;
};

/* *ret_begins: parameter i of the adapter is the A of the first adapted part of a linear, which is *ret. LG_ERR_MISMATCH: the
 * original has none of its name. */
int lg_kohya_linear_at(const struct lg_kohya *k, int i, struct lg_kohya_linear *ret,
                       bool *ret_begins);
