/* Objectives: see the header for the conventions. All in double; the caller rounds once. */
#include "stages/nets/objective.h"
#include "base/philox.h"
#include <math.h>
#include <string.h>

#define PI         3.14159265358979323846
#define MODE_SCALE 1.29 /* the paper's */

static const char *const NAMES[] = {"eps", "v", "flow"};
static const char *const TIMESTEPS[] = {"uniform", "logit_normal", "mode"};
static const char *const SHIFTS_BY[] = {"constant", "tokens", "tokens_ltx"};
static const char *const WEIGHTINGS[] = {"none", "sigma_sqrt", "cosmap"};

/* Of a key whose choices are these. */
static int choice(const char *const *names, size_t n, const char *value)
{
    size_t i = 0;
    while (strcmp(names[i], value)) LG_ASSERT(++i < n);
    return (int)i;
}

int lg_objective_of(const lg_config *c, struct lg_objective *ret)
{
    struct lg_objective o = {
        .min_snr_gamma = c->trainer_min_snr_gamma,
        .timesteps_mean = c->trainer_timesteps_mean,
        .timesteps_std = c->trainer_timesteps_std,
        .betas = {.first = c->trainer_beta_start,
                  .last = c->trainer_beta_end,
                  .scaled_linear = !strcmp(c->trainer_beta_schedule, "scaled_linear"),
                  .zero_snr = c->trainer_zero_snr},
        .flow_shift = c->trainer_flow_shift,
        .clean_first_frame = c->trainer_clean_first_frame,
        .has_variance = c->model_learned_variance,
        .variance_weight = strcmp(c->trainer_variance_loss, "none") ? 1 : 0};
    LG_TRY(lg_objective_parse(c->trainer_objective, &o.kind));
    o.timesteps =
        (lg_timesteps_kind)choice(TIMESTEPS, LG_ARRAY_LEN(TIMESTEPS), c->trainer_timesteps);
    o.shift_by =
        (lg_flow_shift_by)choice(SHIFTS_BY, LG_ARRAY_LEN(SHIFTS_BY), c->trainer_flow_shift_by);
    o.weighting =
        (lg_weighting_kind)choice(WEIGHTINGS, LG_ARRAY_LEN(WEIGHTINGS), c->trainer_loss_weighting);
    LG_TRY(lg_objective_check(&o));
    *ret = o;
    return 0;
}

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
    if (o->kind != LG_OBJECTIVE_FLOW && (o->weighting || (o->flow_shift && o->flow_shift != 1)))
        return LG_FAIL(LG_ERR_CONFIG, "flow_shift and loss_weighting are for flow; remove them");
    if (o->shift_by && (o->kind != LG_OBJECTIVE_FLOW || (o->flow_shift && o->flow_shift != 1)))
        return LG_FAIL(
            LG_ERR_CONFIG,
            "flow_shift_by = \"%s\" is for flow, and says what flow_shift is: remove one of them",
            SHIFTS_BY[o->shift_by]);
    if (o->kind != LG_OBJECTIVE_FLOW && o->clean_first_frame > 0)
        return LG_FAIL(LG_ERR_CONFIG,
                       "clean_first_frame = %g is for flow, where timestep 0 is "
                       "without noise; remove it",
                       o->clean_first_frame);
    if (o->betas.zero_snr && o->kind != LG_OBJECTIVE_V)
        return LG_FAIL(LG_ERR_CONFIG,
                       "zero_snr leaves nothing of the picture at the last timestep, where only v "
                       "can be predicted; remove it, or set the objective to v");
    if (o->has_variance && o->variance_weight > 0 && o->kind != LG_OBJECTIVE_EPS)
        return LG_FAIL(LG_ERR_CONFIG,
                       "a learned variance is trained with eps alone; set the objective to eps, or "
                       "variance_loss to none");
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

/* ---- the noise schedule ---- */

static double beta(const struct lg_betas *b, int t)
{
    const double first = b->last > 0 ? b->first : 1e-4, last = b->last > 0 ? b->last : 0.02;
    if (!b->scaled_linear) return first + (last - first) * t / (LG_TRAIN_TIMESTEPS - 1);
    const double root = sqrt(first) + (sqrt(last) - sqrt(first)) * t / (LG_TRAIN_TIMESTEPS - 1);
    return root * root;
}

/* O(t), at most a thousand products: no table, so no state and no initialisation order. */
static double product(const struct lg_betas *b, int t)
{
    double a = 1.0;
    for (int i = 0; i <= t; i++) a *= 1.0 - beta(b, i);
    return a;
}

double lg_alpha_bar(const struct lg_betas *b, int t)
{
    LG_ASSERT(t >= -1 && t < LG_TRAIN_TIMESTEPS);
    if (!b->zero_snr || t < 0) return product(b, t);
    const double first = sqrt(product(b, 0)), last = sqrt(product(b, LG_TRAIN_TIMESTEPS - 1));
    const double root = (sqrt(product(b, t)) - last) * first / (first - last);
    return root * root;
}

/* Bounds and means of the posterior q(x_{t-1} | x_t, x0); at t = 0, where its variance is 0, the lower bound is that of
 * t = 1. */
static void variance_terms(const struct lg_betas *b, int t, double ret[6])
{
    const int known = LG_MAX(t, 1);
    const double bar = lg_alpha_bar(b, t), s = sqrt(bar), r = sqrt(1 - bar);
    const double posterior =
        beta(b, known) * (1 - lg_alpha_bar(b, known - 1)) / (1 - lg_alpha_bar(b, known));
    ret[0] = log(posterior);
    ret[1] = log(beta(b, t));
    ret[2] = beta(b, t) * sqrt(lg_alpha_bar(b, t - 1)) / (1 - bar) * (r / s);
    ret[3] = 1 / s;
    ret[4] = -r / s;
    ret[5] = t == 0;
}

/* ---- samples ---- */

struct lg_objective lg_objective_of_size(const struct lg_objective *o, int64_t tokens)
{
    static const struct line {
        int few, many; /* tokens */
        double of_few, of_many;
    } lines[] = {[LG_FLOW_SHIFT_TOKENS] = {256, 4096, 0.5, 1.15},
                 [LG_FLOW_SHIFT_TOKENS_LTX] = {1024, 4096, 0.95, 2.05}};
    const struct line *l = &lines[o->shift_by];
    struct lg_objective of = *o;
    if (!o->shift_by) return of;
    of.flow_shift =
        exp(l->of_few + (l->of_many - l->of_few) * (double)(tokens - l->few) / (l->many - l->few));
    of.shift_by = LG_FLOW_SHIFT_CONSTANT;
    return of;
}

double lg_flow_shift(const struct lg_objective *o, double t)
{
    const double k = o->flow_shift > 0 ? o->flow_shift : 1;
    return k * t / (1 + (k - 1) * t);
}

static double flow_weight(lg_weighting_kind weighting, double t)
{
    if (weighting == LG_WEIGHTING_SIGMA_SQRT) return 1 / (t * t);
    if (weighting == LG_WEIGHTING_COSMAP) return 2 / (PI * (1 - 2 * t + 2 * t * t));
    return 1.0;
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
        *ret = (struct lg_objective_sample){.t = LG_TRAIN_TIMESTEPS * t,
                                            .coef = {1.0 - t, t, -1.0, 1.0},
                                            .weight = flow_weight(o->weighting, t)};
        return;
    }
    LG_ASSERT(t == floor(t));
    double a = lg_alpha_bar(&o->betas, (int)t), s = sqrt(a), r = sqrt(1.0 - a);
    bool v = o->kind == LG_OBJECTIVE_V;
    *ret = (struct lg_objective_sample){
        .t = t, .coef = {s, r, v ? -r : 0.0, v ? s : 1.0}, .weight = min_snr_weight(o, a)};
    if (!o->has_variance) return;
    ret->variance_weight = o->variance_weight;
    if (o->variance_weight > 0) variance_terms(&o->betas, (int)t, ret->variance);
}

void lg_objective_draw(const struct lg_objective *o, uint64_t seed, uint64_t n,
                       struct lg_objective_sample *ret)
{
    lg_philox_out p = lg_philox(seed, LG_PURPOSE_TIMESTEP, n, 0);
    double t = lg_uniform_f64(p.v[0]);
    if (o->timesteps == LG_TIMESTEPS_LOGIT_NORMAL) {
        const double deviation = o->timesteps_std > 0 ? o->timesteps_std : 1;
        double z[2];
        lg_normal_pair(p.v[0], p.v[1], z);
        t = 1.0 / (1.0 + exp(-(o->timesteps_mean + deviation * z[0])));
    } else if (o->timesteps == LG_TIMESTEPS_MODE) {
        const double c = cos(PI / 2 * t);
        t = fmin(fmax(1 - t - MODE_SCALE * (c * c - 1 + t), 0), 1);
    }
    if (o->kind == LG_OBJECTIVE_FLOW)
        t = lg_flow_shift(o, t);
    else
        t = LG_MIN(floor(LG_TRAIN_TIMESTEPS * t), LG_TRAIN_TIMESTEPS - 1);
    lg_objective_at(o, t, ret);
    ret->first_is_clean = lg_uniform_f64(p.v[2]) < o->clean_first_frame;
}
