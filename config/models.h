/* What the plan needs to know of the models it names, read from their folders without loading a
 * weight. The nets themselves read the rest (stages/nets). */
#pragma once
#include "base/check.h"
#include "base/fs.h"
#include "config/denoisers.h"

typedef enum lg_vae_kind { LG_VAE_KL, LG_VAE_LTX } lg_vae_kind;
struct lg_vae_info {
    lg_vae_kind kind; /* AutoencoderKL, which sees each frame alone, or AutoencoderKLLTXVideo */
    int latent_channels;
    int factor; /* pixels per latent cell on a side */
    int factor_time; /* frames per latent frame, but the first, which is a latent frame itself; 1: all are */
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
/* The same of config.json alone, without identity: the weights need not be there. */
int lg_vae_info_read(const char *dir, struct lg_vae_info *ret);
/* Latent frames of so many frames of pixels: (frames - 1) / factor_time + 1; 0: it takes no such number, for it wants a multiple
 * of factor_time, and one more. */
int lg_vae_latent_frames(const struct lg_vae_info *vae, int frames);
/* A folder in Hugging Face layout: config.json, whose model_type says whether it is a T5 or a CLIP, the tokenizer
 * (tokenizer_files.h), model.safetensors (or index and parts). */
int lg_text_info_load(const char *dir, struct lg_text_info *ret);
/* Identity, as in lg_text_info, of the weights of a diffusion transformer in diffusers layout. */
int lg_denoiser_identity(const char *dir, uint64_t *ret);
/* Of its config.json alone. */
int lg_denoiser_shape_identity(const char *dir, uint64_t *ret);
