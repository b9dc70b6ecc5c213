/* trainer.groups as data: which parameters are trained how. */
#pragma once
#include "base/check.h"

struct lg_param_group {
    char pattern[112]; /* of names, as a shell's: * and ? and [...] */
    bool is_frozen;    /* not trained at all */
    double lr, decay;  /* factors on trainer.lr and trainer.weight_decay */
};

/* text: "PATTERN frozen", or "PATTERN lr=X decay=Y" with one or both. LG_ERR_CONFIG says what is wrong. */
int lg_param_group_parse(const char *text, struct lg_param_group *ret);
