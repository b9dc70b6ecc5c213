/* Drawing latents with a denoiser: Euler for flow, DDIM (Song et al. 2020) with trailing timesteps
 * and eta 0 for eps and v, classifier-free guidance (Ho & Salimans 2022).
 *
 * Every step of all three is linear: x' = cx x + cm m, m the net's prediction; with guidance m = u
 * + g (c - u), c and u being the conditional and unconditional halves of one batch. So a step is
 * one forward and one lg_combine. */
#pragma once
#include "stages/nets/denoiser.h"
#include "stages/nets/objective.h"

enum { LG_SAMPLER_STEPS_MAX = 1000 };

struct lg_sampler_step {
    double t;      /* as the net sees it */
    double cx, cm; /* x' = cx x + cm m */
};
/* Step i of `steps`. flow: t goes 1, 1 - 1/steps, ..., 1/steps, 0. eps, v: round(1000 - i 1000 /
 * steps) - 1, as diffusers' "trailing" spacing; the last step goes to alpha_bar = 1. */
struct lg_sampler_step lg_sampler_step_at(lg_objective_kind kind, int steps, int i);

typedef struct lg_sampler lg_sampler;

/* A sampler for `pictures` at once on d, with a net of its own (batch pictures, twice that when
 * guided). *ret_bytes of the plan: all device memory, the net's included. */
int lg_sampler_plan(lg_device *d, const struct lg_denoiser_config *c, int pictures, bool guided,
                    size_t *ret_bytes);
int lg_sampler_open(lg_device *d, const struct lg_denoiser_config *c, int pictures, bool guided,
                    lg_sampler **ret);
void lg_sampler_close(lg_sampler **s);
/* Rows that the conditions must have: pictures, or 2 pictures when guided. */
int lg_sampler_batch(const lg_sampler *s);

struct lg_sampler_run {
    lg_objective_kind objective;
    int steps;           /* 1 to LG_SAMPLER_STEPS_MAX */
    double guidance;     /* 1 unless guided */
    uint64_t seed;       /* of the initial noise: Philox SAMPLE (seed, picture's index) */
    uint64_t first;      /* index of the first picture */
    const void *weights; /* flat, on the device */
    /* Conditions on the device, of lg_sampler_batch rows: [conditional; unconditional]. */
    lg_tensor label;       // (B) i32: DiT; unconditional rows hold num_classes
    lg_tensor text;        // (B, L, E): PixArt
    lg_tensor text_length; // (B) i32: PixArt
};
/* out (pictures, C, H, W) on the device, in its compute type. Returns after the stream's work is
 * done. For a given number of pictures, a picture's latent depends on (seed, index, condition)
 * alone, not on its neighbours. */
int lg_sampler_draw(lg_sampler *s, lg_stream *stream, const struct lg_sampler_run *run,
                    lg_tensor out);
