/* What the denoiser is trained to predict: conventions of noise, target, timestep and loss weight.
 * As diffusers' schedulers and training scripts have them, names included, where nothing else is said.
 *
 * flow (rectified flow; Liu et al. 2022, Lipman et al. 2022): x_t = (1 - t) x0 + t e with t in (0,
 * 1), target e - x0, the net sees 1000 t. eps (Ho et al. 2020) and v (Salimans & Ho 2022): x_t =
 * sqrt(A) x0 + sqrt(1 - A) e, A the running product of 1 - beta over 1000 betas (lg_betas), t an integer in 0..999;
 * target e, or sqrt(A) e - sqrt(1 - A) x0.
 *
 * Timesteps (Esser et al. 2024): t in (0, 1) uniform; or logit-normal: t = sigmoid(z), z normal; or "mode": with u
 * uniform 1 - u - 1.29 (cos^2(pi u / 2) - 1 + u). Flow then shifts towards noise: k t / (1 + (k - 1) t); eps and v take
 * floor(1000 t). Loss weight of eps and v: min-SNR (Hang et al. 2023), with snr = A / (1 - A) min(snr, gamma) / snr
 * for eps, min(snr, gamma) / (snr + 1) for v; 1 without gamma. Of flow: 1, t^-2 or 2 / (pi (1 - 2 t + 2 t^2)). */
#pragma once
#include "config/config.h"
#include <stdint.h>

/* In the order of the configuration's enums. */
typedef enum lg_objective_kind {
    LG_OBJECTIVE_EPS,
    LG_OBJECTIVE_V,
    LG_OBJECTIVE_FLOW
} lg_objective_kind;
typedef enum lg_timesteps_kind {
    LG_TIMESTEPS_UNIFORM,
    LG_TIMESTEPS_LOGIT_NORMAL,
    LG_TIMESTEPS_MODE
} lg_timesteps_kind;
typedef enum lg_weighting_kind {
    LG_WEIGHTING_NONE,
    LG_WEIGHTING_SIGMA_SQRT, /* t^-2 */
    LG_WEIGHTING_COSMAP
} lg_weighting_kind;
/* What flow_shift follows from: nothing, or exp(m) with m linear in the tokens of a picture or clip: */
typedef enum lg_flow_shift_by {
    LG_FLOW_SHIFT_CONSTANT,
    LG_FLOW_SHIFT_TOKENS,    /* 0.5 for 256 and 1.15 for 4096 (FLUX) */
    LG_FLOW_SHIFT_TOKENS_LTX /* 0.95 for 1024 and 2.05 for 4096 (LTX-Video) */
} lg_flow_shift_by;
enum { LG_TRAIN_TIMESTEPS = 1000 };

/* The noise schedule of eps and v. All 0: linear from 1e-4 to 0.02 (Ho et al. 2020). */
struct lg_betas {
    double first, last;
    bool scaled_linear; /* their square roots lie evenly apart, as in latent diffusion */
    bool zero_snr; /* sqrt(A) shifted and scaled so that it is 0 at t = 999 (Lin et al. 2023) */
};
/* Running product of 1 - beta up to and including step t, 0 <= t < 1000; 1 for t = -1. */
double lg_alpha_bar(const struct lg_betas *b, int t);

struct lg_objective {
    lg_objective_kind kind;
    lg_timesteps_kind timesteps;
    double timesteps_mean, timesteps_std; /* of the normal; std 0: 1 */
    double min_snr_gamma;                 /* 0: off */
    struct lg_betas betas;
    double flow_shift;         /* 0: 1 */
    lg_flow_shift_by shift_by; /* what it follows from: lg_objective_of_size */
    lg_weighting_kind weighting;
    double clean_first_frame; /* flow: share of clips whose first frame has no noise */
    bool has_variance;        /* the net predicts one as well (lg_learned_range_loss) */
    double variance_weight;   /* of its loss */
};
/* Of the keys of [trainer]; has_variance is the model's. */
int lg_objective_of(const lg_config *c, struct lg_objective *ret);
/* LG_ERR_CONFIG for what does not belong together: a gamma with flow or below 0, a variance without eps ... */
int lg_objective_check(const struct lg_objective *o);
/* For pictures or clips of so many tokens, patches of the latent: where the shift follows from them it is this one's
 * flow_shift. */
struct lg_objective lg_objective_of_size(const struct lg_objective *o, int64_t tokens);
/* k t / (1 + (k - 1) t) */
double lg_flow_shift(const struct lg_objective *o, double t);
/* "eps", "v", "flow". */
const char *lg_objective_name(lg_objective_kind kind);
/* LG_ERR_CONFIG for another name. */
int lg_objective_parse(const char *name, lg_objective_kind *ret);

struct lg_objective_sample {
    double t;       /* as the net sees it: 1000 t of flow, 0..999 else */
    double coef[4]; /* for lg_diffuse_forward: x_t = c0 x0 + c1 e, target = c2 x0 + c3 e */
    bool
        first_is_clean; /* of a clip of several frames: the first one is x0, at timestep 0, and not in the loss */
    double weight; /* of this sample's loss; a void sample's weight is set to 0 by the caller */
    double variance[6]; /* with has_variance: lg_learned_range_loss's terms */
    double variance_weight;
};
/* Of global sample n, from Philox TIMESTEP (seed, n). o has passed the check. */
void lg_objective_draw(const struct lg_objective *o, uint64_t seed, uint64_t n,
                       struct lg_objective_sample *ret);
/* The same at a given timestep: t in [0, 1] for flow, a whole number in 0..999 else. */
void lg_objective_at(const struct lg_objective *o, double t, struct lg_objective_sample *ret);
