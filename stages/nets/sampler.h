/* Drawing latents with a denoiser, in diffusers' definitions: Euler for flow; for eps and v DDIM (Song et al. 2020) with
 * eta 0, or DPM-Solver++ (Lu et al. 2022): multistep, order 2, midpoint, the first and last step of order 1, the last one to
 * no noise at all. Classifier-free guidance (Ho & Salimans 2022). Of a net that predicts a variance, too, only the noise is
 * used.
 *
 * Every step is linear in the state x, the net's prediction m and, with DPM-Solver++, the picture that the step before
 * predicted; with guidance m = u + g (c - u), c and u being the conditional and unconditional halves of one batch. So a step
 * is one forward and one lg_combine or two. */
#pragma once
#include "stages/nets/denoiser.h"
#include "stages/nets/objective.h"

enum { LG_SAMPLER_STEPS_MAX = 1000 };

/* In the order of the configuration's enums. */
typedef enum lg_sampler_kind {
    LG_SAMPLER_AUTO, /* ddim for eps and v, euler for flow */
    LG_SAMPLER_DDIM,
    LG_SAMPLER_EULER,
    LG_SAMPLER_DPM
} lg_sampler_kind;
typedef enum lg_spacing_kind {
    LG_SPACING_AUTO, /* linspace for DPM-Solver++, else trailing */
    LG_SPACING_TRAILING,
    LG_SPACING_LINSPACE
} lg_spacing_kind;

struct lg_sampler_method {
    lg_sampler_kind sampler;
    lg_spacing_kind spacing;
    lg_objective_kind objective;
    struct lg_betas betas;     /* eps, v */
    double flow_shift;         /* flow; 0: 1 */
    lg_flow_shift_by shift_by; /* flow: it is the one of the net's size (lg_objective_of_size) */
    double flow_end;           /* flow: below */
};
/* Of [sample] and [trainer]. */
int lg_sampler_method_of(const lg_config *c, struct lg_sampler_method *ret);
/* LG_ERR_CONFIG for a sampler of another objective. */
int lg_sampler_method_check(const struct lg_sampler_method *m);

struct lg_sampler_step {
    double t;      /* as the net sees it */
    double cx, cm; /* x' = cx x + cm m, and with DPM-Solver++: */
    bool multistep;
    double px, pm; /* the picture that is predicted: p = px x + pm m */
    double c[2];   /* x' = cx x + c[0] p + c[1] (p of the step before) */
};
/* Step i of `steps`. Trailing: flow: t goes 1, 1 - 1/steps, ..., 1/steps, each shifted, then 0; eps, v: round(1000 - i 1000 /
 * steps) - 1. With flow_end 1 - t is scaled so that t before the last step is that (diffusers' shift_terminal; 0: it is not). Linspace: flow: from 1 to the shifted 1/1000, each shifted, then 0; eps, v: from 999 downwards, the last one
 * (steps + 1 would end at 0). The last step goes to alpha_bar = 1. */
struct lg_sampler_step lg_sampler_step_at(const struct lg_sampler_method *m, int steps, int i);

typedef struct lg_sampler lg_sampler;

/* A sampler for `pictures` at once on a device, with a net of its own (batch pictures, twice that when guided). */
struct lg_sampler_spec {
    const struct lg_denoiser_config *net;
    int pictures;
    bool guided;
    bool has_first; /* clips begin with a frame that is given: flow alone */
};
/* *ret_bytes: all device memory, the net's included. */
int lg_sampler_plan(lg_device *d, const struct lg_sampler_spec *spec, size_t *ret_bytes);
/* LG_ERR_CONFIG: has_first of a net without frames, or of one frame. */
int lg_sampler_open(lg_device *d, const struct lg_sampler_spec *spec, lg_sampler **ret);
void lg_sampler_close(lg_sampler **s);
/* Rows that the conditions must have: pictures, or 2 pictures when guided. */
int lg_sampler_batch(const lg_sampler *s);

struct lg_sampler_run {
    struct lg_sampler_method method;
    int steps;       /* 1 to LG_SAMPLER_STEPS_MAX */
    double guidance; /* 1 unless guided, or a condition of the net: then no second half is drawn */
    uint64_t seed;   /* of the initial noise: Philox SAMPLE (seed, picture's index) */
    uint64_t first;  /* index of the first picture */
    const void *weights; /* flat, on the device */
    /* Conditions on the device, of lg_sampler_batch rows: [conditional; unconditional]. */
    lg_tensor label; // (B) i32: DiT; unconditional rows hold num_classes
    struct lg_text_states text[LG_TEXTS_MAX];
    lg_tensor size, ratio; // (B, k), (B), as in lg_denoiser_input
    /* With has_first: the first frame of all clips' latents, without noise, (1, C, h, w) of the device's type. It stays as it is, at
     * timestep 0, while the others are drawn, as diffusers' LTXImageToVideoPipeline does it. */
    lg_tensor first_frame;
};
/* out (pictures, C, H, W) on the device, in its compute type. Returns after the stream's work is
 * done. For a given number of pictures, a picture's latent depends on (seed, index, condition)
 * alone, not on its neighbours. */
int lg_sampler_draw(lg_sampler *s, lg_stream *stream, const struct lg_sampler_run *run,
                    lg_tensor out);
