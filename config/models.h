/* What the plan needs to know of the models it names, read from their folders without loading a
 * weight. The nets themselves read the rest (stages/nets). */
#pragma once
#include "base/check.h"
#include "base/fs.h"
#include "config/denoisers.h"

struct lg_vae_info {
    int latent_channels;
    int factor; /* pixels per latent cell on a side: 2^(len(block_out_channels) - 1) */
    double scaling_factor, shift_factor;
    uint64_t identity; /* see lg_text_info */
};
struct lg_text_info {
    lg_text_encoder_kind kind;
    int dim, layers;
    int projection; /* width of text_embeds; 0: the model has none */
    int length_max; /* tokens of a caption; 0: any */
    /* Hash of what would give other bits: config.json, the tokenizer, and of each weight file its
     * name, size, first and last 64 KiB. Not of the folder's path. */
    uint64_t identity;
};
/* A folder in diffusers layout: config.json and diffusion_pytorch_model.safetensors (or its index
 * and parts). LG_ERR_CONFIG names the folder and the missing file or key. */
int lg_vae_info_load(const char *dir, struct lg_vae_info *ret);
/* A folder in Hugging Face layout: config.json, whose model_type says whether it is a T5 or a CLIP, the tokenizer
 * (tokenizer_files.h), model.safetensors (or index and parts). */
int lg_text_info_load(const char *dir, struct lg_text_info *ret);
/* Identity, as in lg_text_info, of the weights of a diffusion transformer in diffusers layout. */
int lg_denoiser_identity(const char *dir, uint64_t *ret);
/* Of its config.json alone. */
int lg_denoiser_shape_identity(const char *dir, uint64_t *ret);
