/* Drawing pictures and clips: captions or labels -> conditions -> latents -> pixels, with weights of a checkpoint
 * or a diffusers folder. Everything runs in this process, at fixed padded batches: a picture depends on
 * (weights, seed, index, condition, steps, guidance) alone. */
#pragma once
#include "kernels/device.h"
#include "stages/nets/sampler.h"
#include "stages/nets/storage.h"
#include "stages/sample/pictures.h"

struct lg_draw_spec {
    const char *weights_dir; /* diffusers folder of the transformer */
    const char *vae_dir;
    /* The text encoders, in the order of the model's table: a folder (NULL or "": zeros take its place, where the model allows
     * that), and tokens per caption and storage, as trained. */
    struct lg_draw_text {
        const char *dir;
        int length;
        lg_storage storage; /* of its weights */
    } text[LG_TEXTS_MAX];
    struct lg_sampler_method method;
    const char *const *prompts; /* captions, or labels in decimal for a DiT */
    int n;
    const char
        *negative; /* what the unconditional half sees: "" as trained, or a negative prompt */
    int steps;
    double guidance; /* 1: off */
    uint64_t seed;
    const char *first_frame; /* clips: a picture that all of them begin with; NULL or "": none */
    double decode_timestep, decode_noise; /* lg_decode_noise.h; noise below 0: as the timestep */
    int frames, height, width;            /* pixels of a picture; 0: as the net was trained */
    lg_device *device;
};

/* LG_ERR_USAGE, beside what files and devices fail with: a label or a size that the models do not take, a first frame of
 * pictures. */
int lg_draw(const struct lg_draw_spec *spec, lg_pictures *ret);
