/* trainer.groups as data: which parameters are trained how, and how what is frozen lies in memory. */
#pragma once
#include "base/check.h"

/* How what is not trained lies in memory: in the type of the computation, or matrices in 8 bits. */
typedef enum lg_storage { LG_STORAGE_AUTO, LG_STORAGE_FP8, LG_STORAGE_INT8 } lg_storage;
/* The words of the keys: "auto", "fp8", "int8". */
bool lg_storage_find(const char *word, lg_storage *ret);

struct lg_param_group {
    char pattern[112];               /* of names, as a shell's: * and ? and [...] */
    bool is_frozen;                  /* not trained at all */
    bool has_storage, has_optimizer; /* of its own; else as the config says of all: */
    lg_storage storage;              /* model.frozen's, of what of it is frozen */
    bool is_8_bit;                   /* trainer.optimizer is adamw8bit */
    double lr, decay;                /* factors on trainer.lr and trainer.weight_decay */
};

/* text: "PATTERN WORD ..", of the words frozen, lr=X, decay=Y, optimizer=adamw|adamw8bit, storage=auto|fp8|int8; what is
 * frozen has none of the first three others. LG_ERR_CONFIG says what is wrong. */
int lg_param_group_parse(const char *text, struct lg_param_group *ret);
