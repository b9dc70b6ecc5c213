/* What the denoiser is trained to predict: conventions of noise, target, timestep and loss weight.
 *
 * flow (rectified flow; Liu et al. 2022, Lipman et al. 2022): x_t = (1 - t) x0 + t e with t in (0,
 * 1), target e - x0, the net sees 1000 t. eps (Ho et al. 2020) and v (Salimans & Ho 2022): x_t =
 * sqrt(A) x0 + sqrt(1 - A) e, A the running product of 1 - beta over 1000 linear betas from 1e-4 to
 * 0.02, t an integer in 0..999; target e, or sqrt(A) e - sqrt(1 - A) x0.
 *
 * Timesteps: uniform, or logit-normal (Esser et al. 2024): t = sigmoid(z), z standard normal; for
 * eps and v floor(1000 t). Loss weight of eps and v: min-SNR (Hang et al. 2023), with snr = A / (1
 * - A) min(snr, gamma) / snr for eps, min(snr, gamma) / (snr + 1) for v; 1 without gamma, and with
 * flow. */
#pragma once
#include "base/check.h"
#include <stdint.h>

/* In the order of the configuration's enums. */
typedef enum lg_objective_kind {
    LG_OBJECTIVE_EPS,
    LG_OBJECTIVE_V,
    LG_OBJECTIVE_FLOW
} lg_objective_kind;
typedef enum lg_timesteps_kind {
    LG_TIMESTEPS_UNIFORM,
    LG_TIMESTEPS_LOGIT_NORMAL
} lg_timesteps_kind;
enum { LG_TRAIN_TIMESTEPS = 1000 };

struct lg_objective {
    lg_objective_kind kind;
    lg_timesteps_kind timesteps;
    double min_snr_gamma; /* 0: off */
};
/* LG_ERR_CONFIG for a gamma with flow or below 0. */
int lg_objective_check(const struct lg_objective *o);
/* "eps", "v", "flow". */
const char *lg_objective_name(lg_objective_kind kind);
/* LG_ERR_CONFIG for another name. */
int lg_objective_parse(const char *name, lg_objective_kind *ret);

/* Running product of 1 - beta up to and including step t, 0 <= t < 1000; 1 for t = -1. */
double lg_alpha_bar(int t);

struct lg_objective_sample {
    double t;       /* as the net sees it: 1000 t of flow, 0..999 else */
    double coef[4]; /* for lg_diffuse_forward: x_t = c0 x0 + c1 e, target = c2 x0 + c3 e */
    double weight;  /* of this sample's loss; a void sample's weight is set to 0 by the caller */
};
/* Of global sample n, from Philox TIMESTEP (seed, n). o has passed the check. */
void lg_objective_draw(const struct lg_objective *o, uint64_t seed, uint64_t n,
                       struct lg_objective_sample *ret);
/* The same at a given timestep: t in [0, 1] for flow, a whole number in 0..999 else. */
void lg_objective_at(const struct lg_objective *o, double t, struct lg_objective_sample *ret);
