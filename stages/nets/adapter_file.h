/* Files of low-rank adapters, in a folder of their own:
 *
 *   pytorch_lora_weights.safetensors   diffusers' layout: "transformer.MODULE.lora_A.weight" and "..lora_B.weight", of a U-Net "unet.MODULE..", fp32;
 *                                      its header's "lora_adapter_metadata" is JSON with rank, alpha and modules, without
 *                                      which diffusers would take alpha for the rank
 *   adapter_config.json                peft's: r, lora_alpha, target_modules, base_model_name_or_path
 *
 * Sources: diffusers 0.36, loaders/lora_base.py and utils/peft_utils.py; peft 0.18, LoraConfig. */
#pragma once
#include "base/fs.h"
#include "stages/nets/denoiser.h"

#define LG_ADAPTER_WEIGHTS "pytorch_lora_weights.safetensors"
#define LG_ADAPTER_CONFIG  "adapter_config.json"

/* Into a folder that is there, each file fsynced. t: the adapter's table (lg_params_trained); base: the folder of the net that
 * it adapts, or of a checkpoint. */
int lg_adapter_save(const struct lg_adapter *a, const char *base, const lg_params *t,
                    const char *dir, const float *weights);
/* All of t, (t->count) fp32 on the host. LG_ERR_MISMATCH: another adapter's. */
int lg_adapter_load(const lg_params *t, const char *dir, float *ret);

/* Is there an adapter in this folder? */
bool lg_adapter_is(const char *dir);
/* The folder of the net that the adapter in this folder adapts, as its adapter_config.json names it. */
int lg_adapter_base(const char *dir, char ret_base[LG_PATH_BYTES]);

/* A folder with a net or with an adapter of one: the net's config, and its weights, to which the adapter is added,
 * W + (alpha / rank) B A (as many floats as lg_denoiser_params says). The adapter's weights may be in kohya's layout, which
 * their keys tell, under the same file's name beside an adapter_config.json. */
int lg_whole_config_load(const char *dir, struct lg_denoiser_config *ret);
int lg_whole_load(const struct lg_denoiser_config *c, const char *dir, float *ret_weights);

/* The adapter in this folder as a file in kohya's layout (kohya.h). */
int lg_adapter_export_kohya(const char *dir, const char *path);
