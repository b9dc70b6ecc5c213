/* Low-rank adapters in the layout of kohya-ss/sd-scripts: one safetensors file, of each linear
 *
 *   lora_unet_NAME.lora_down.weight   (n r, in)     A
 *   lora_unet_NAME.lora_up.weight     (out, n r)    B
 *   lora_unet_NAME.alpha              ()            n alpha: what is added is (alpha / r) B A
 *
 * with the dots of NAME as underscores. Names are those of the published originals (kohya.def), where one linear may be n
 * of ours: then the A of these lie below one another, and B is block-diagonal, which is the same sum; parts that are not
 * adapted have rows of zeros in B and none in A. Files of others, which were trained as that one linear, have one A of rank r
 * and any B: then each part has this A and its rows of B. */
#pragma once
#include "stages/io/safetensors.h"
#include "stages/nets/adapter.h"
#include "stages/nets/params.h"

struct lg_kohya {
    const char *kind; /* model.kind of the net */
    const struct lg_adapter *adapter;
    const lg_params *t;     /* the adapter's table */
    const lg_params *whole; /* the net's: how many outputs a part has that is not adapted */
};
/* LG_ERR_MISMATCH: a linear that the original does not have. */
int lg_kohya_save(const struct lg_kohya *k, const float *weights, const char *path);

/* Is the file in this layout? */
bool lg_kohya_is(const lg_st_file *f);
/* All of k->t, (t->count) fp32. B is scaled where the file's alpha / rank is not the adapter's. path is for messages.
 * LG_ERR_MISMATCH: another adapter's: a linear, rank or part is missing in one of them. */
int lg_kohya_load(const struct lg_kohya *k, const lg_st_file *f, const char *path, float *ret);
