/* The models that lg-random-model makes: config.json and safetensors in a folder, as diffusers and transformers write them,
 * and what a tokenizer needs. A preset that does not exist is LG_ERR_USAGE. */
#pragma once
#include "kernels/tensor.h"
#include <stdint.h>

struct lg_random_model {
    const char *preset, *dir; /* dir exists */
    const char *spiece;       /* a sentencepiece model, for T5; NULL: none is given */
    uint64_t seed;
    lg_dtype dtype;
};

int lg_random_vae_make(const struct lg_random_model *m);
/* With a copy of the sentencepiece model, which decides vocab_size. */
int lg_random_t5_make(const struct lg_random_model *m);
/* With vocab.json and merges.txt of a small tokenizer, which knows pairs of letters. */
int lg_random_clip_make(const struct lg_random_model *m);
/* A transformer or U-Net alone. The preset is a pipeline's. */
int lg_random_transformer_make(const struct lg_random_model *m);
/* Every part in a folder of its own, and model_index.json. */
int lg_random_pipeline_make(const struct lg_random_model *m);

/* What a denoiser has to fit; 0: there is no such preset. */
int lg_random_vae_channels(const char *preset); /* of the latent; not of LTX's */
int lg_random_t5_width(const char *preset);
int lg_random_clip_width(const char *preset);
