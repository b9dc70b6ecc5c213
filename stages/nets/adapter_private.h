/* For adapter_file.c, adapter_whole.c, adapter_begin.c and kohya.c. */
#pragma once
#include "base/fs.h"
#include "stages/io/safetensors.h"
#include "stages/nets/adapter.h"
#include "stages/nets/params.h"

enum { LG_ADAPTER_PREFIX_BYTES = 16 };
/* What stands before names in diffusers' layout, where a pipeline has a U-Net or a transformer: "unet." or "transformer.", told
 * by the names of the net's modules. */
const char *lg_adapter_prefix(const lg_params *t);

/* The name that a tensor has in diffusers' older layout, "MODULE.lora.down.weight" and "..lora.up.weight", which its training
 * scripts of U-Nets write, and back. False: it has no other, or that is too long. */
bool lg_adapter_older_name(const char *name, char *ret, size_t bytes);

/* Row i of t from a file in either layout; to: its elements. */
int lg_adapter_read_param(const lg_st_file *f, const char *path, const lg_params *t, int i,
                          float *to);

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
