/* For adapter_file.c, adapter_whole.c and kohya.c. */
#pragma once
#include "base/fs.h"
#include "stages/nets/adapter.h"
#include "stages/nets/params.h"

/* "MODULE.lora_A.weight" -> MODULE; false: it is the other half. */
bool lg_adapter_module(const char *name, char ret[LG_PARAM_NAME_BYTES]);

/* What adapter_config.json says; the list and its texts are freed by lg_adapter_read_free, after a failure too. */
struct lg_adapter_read {
    struct lg_adapter adapter;
    char base[LG_PATH_BYTES];
    char **target;
};
int lg_adapter_read(const char *dir, struct lg_adapter_read *ret);
void lg_adapter_read_free(struct lg_adapter_read *r);
