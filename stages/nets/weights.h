/* A model's tensors as one set, whether they lie in one safetensors file or in the shards that an
 * index.json names (the layout of diffusers and transformers: {"weight_map": {tensor: file}}).
 * Files are mapped, nothing is copied. */
#pragma once
#include "stages/io/safetensors.h"

typedef struct lg_weights lg_weights;

/* path: "DIR/model.safetensors"; or "DIR/model.safetensors.index.json", which is also looked for
 * when path itself does not exist, and then the variant that diffusers calls fp16: DIR/model.fp16.safetensors and
 * DIR/model.safetensors.index.fp16.json. LG_ERR_NOTFOUND when none exists, LG_ERR_CORRUPT when the
 * index is not what it should be or names a tensor that its shard lacks. */
int lg_weights_open(const char *path, lg_weights **ret);
void lg_weights_close(lg_weights **w);
/* The file or index that was opened, for messages. */
const char *lg_weights_path(const lg_weights *w);
int lg_weights_count(const lg_weights *w);
const struct lg_st_entry *lg_weights_at(const lg_weights *w, int i);
/* NULL when there is none. Valid until close. */
const struct lg_st_entry *lg_weights_find(const lg_weights *w, const char *name);
