/* Objectives: see the header for the conventions. All in double; the caller rounds once. */
#include "stages/nets/objective.h"
#include "base/philox.h"
#include <math.h>
#include <string.h>

static const char *const NAMES[] = {"eps", "v", "flow"};

int lg_objective_check(const struct lg_objective *o)
{
    if (!(o->min_snr_gamma >= 0))
        return LG_FAIL(LG_ERR_CONFIG, "min_snr_gamma = %g; it cannot be negative",
                       o->min_snr_gamma);
    if (o->kind == LG_OBJECTIVE_FLOW && o->min_snr_gamma > 0)
        return LG_FAIL(
            LG_ERR_CONFIG,
            "min_snr_gamma = %g, but min-SNR weighting is for eps and v; set it to 0 for "
            "flow",
            o->min_snr_gamma);
    return 0;
}

const char *lg_objective_name(lg_objective_kind kind)
{
    LG_ASSERT((size_t)kind < LG_ARRAY_LEN(NAMES));
    return NAMES[kind];
}

int lg_objective_parse(const char *name, lg_objective_kind *ret)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(NAMES); i++) {
        if (strcmp(name, NAMES[i])) continue;
        *ret = (lg_objective_kind)i;
        return 0;
    }
    return LG_FAIL(LG_ERR_CONFIG, "unknown objective \"%s\": eps, v and flow exist", name);
}

double lg_alpha_bar(int t)
{
    /* O(t), at most a thousand products: no table, so no state and no initialisation order. */
    const double first = 1e-4, last = 0.02;
    LG_ASSERT(t >= -1 && t < LG_TRAIN_TIMESTEPS);
    double a = 1.0;
    for (int i = 0; i <= t; i++) a *= 1.0 - (first + (last - first) * i / (LG_TRAIN_TIMESTEPS - 1));
    return a;
}

static double min_snr_weight(const struct lg_objective *o, double alpha_bar)
{
    if (o->min_snr_gamma == 0) return 1.0;
    double snr = alpha_bar / (1.0 - alpha_bar), low = LG_MIN(snr, o->min_snr_gamma);
    return low / (o->kind == LG_OBJECTIVE_EPS ? snr : snr + 1.0);
}

void lg_objective_at(const struct lg_objective *o, double t, struct lg_objective_sample *ret)
{
    if (o->kind == LG_OBJECTIVE_FLOW) {
        LG_ASSERT(t >= 0 && t <= 1);
        *ret = (struct lg_objective_sample){
            .t = LG_TRAIN_TIMESTEPS * t, .coef = {1.0 - t, t, -1.0, 1.0}, .weight = 1.0};
        return;
    }
    LG_ASSERT(t == floor(t));
    double a = lg_alpha_bar((int)t), s = sqrt(a), r = sqrt(1.0 - a);
    bool v = o->kind == LG_OBJECTIVE_V;
    *ret = (struct lg_objective_sample){
        .t = t, .coef = {s, r, v ? -r : 0.0, v ? s : 1.0}, .weight = min_snr_weight(o, a)};
}

void lg_objective_draw(const struct lg_objective *o, uint64_t seed, uint64_t n,
                       struct lg_objective_sample *ret)
{
    lg_philox_out p = lg_philox(seed, LG_PURPOSE_TIMESTEP, n, 0);
    double t = lg_uniform_f64(p.v[0]);
    if (o->timesteps == LG_TIMESTEPS_LOGIT_NORMAL) {
        double z[2];
        lg_normal_pair(p.v[0], p.v[1], z);
        t = 1.0 / (1.0 + exp(-z[0]));
    }
    if (o->kind != LG_OBJECTIVE_FLOW)
        t = LG_MIN(floor(LG_TRAIN_TIMESTEPS * t), LG_TRAIN_TIMESTEPS - 1);
    lg_objective_at(o, t, ret);
}
