/* Samplers: see the header for the methods.
 *
 * Design: the state x lies in the first half of the net's input batch; guidance copies it into the
 * second half before each forward. The timesteps of the whole trajectory are uploaded before the
 * first step, so that the steps need no word from the host.
 *
 * Invariant: out rows [0, n) of the net belong to the conditional, [n, 2n) to the unconditional
 * half. */
#include "stages/nets/sampler.h"
#include "base/philox.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct lg_sampler {
    lg_device *device;
    lg_denoiser *net;
    int pictures, batch;
    bool guided;
    int out_channels;
    int64_t tokens; /* patches of the latent */
    int times; /* timesteps of a sample: 1, or one for each frame, of which the first is given */
    bool is_distilled; /* guidance is a condition of the net */
    lg_dtype type, time_type;
    int64_t shape[4];     // (B, C, H, W)
    lg_tensor x;          // (B, C, H, W)
    lg_tensor pred;       // (B, C, H, W)
    lg_tensor out;        // (B, 2C, H, W): the net's, where it has a variance too; else pred
    lg_tensor picture[2]; // (pictures, C, H, W): predicted in this step and the one before
    lg_tensor noise;      // (pictures, C, H, W) fp32, for the upload
    lg_tensor guidance32, guidance; // (B) fp32 and as the net takes it
    lg_tensor t32, t; // (LG_SAMPLER_STEPS_MAX, B times) fp32 and as the net takes them
    void *memory;
};

/* ---- coefficients ---- */

static const char *const SAMPLERS[] = {"auto", "ddim", "euler", "dpm++"};
static const char *const SPACINGS[] = {"auto", "trailing", "linspace"};

int lg_sampler_method_of(const lg_config *c, struct lg_sampler_method *ret)
{
    struct lg_objective o;
    struct lg_sampler_method m = {0};
    LG_TRY(lg_objective_of(c, &o));
    while (strcmp(SAMPLERS[m.sampler], c->sample_sampler))
        LG_ASSERT(++m.sampler < LG_ARRAY_LEN(SAMPLERS));
    while (strcmp(SPACINGS[m.spacing], c->sample_spacing))
        LG_ASSERT(++m.spacing < LG_ARRAY_LEN(SPACINGS));
    m.objective = o.kind;
    m.betas = o.betas;
    m.flow_shift = o.flow_shift;
    m.shift_by = o.shift_by;
    m.flow_end = c->sample_flow_end;
    LG_TRY(lg_sampler_method_check(&m));
    *ret = m;
    return 0;
}

int lg_sampler_method_check(const struct lg_sampler_method *m)
{
    const bool flow = m->objective == LG_OBJECTIVE_FLOW;
    if (m->sampler != LG_SAMPLER_AUTO && flow != (m->sampler == LG_SAMPLER_EULER))
        return LG_FAIL(LG_ERR_CONFIG,
                       "sample.sampler = \"%s\" with trainer.objective = \"%s\": euler is flow's, "
                       "ddim and dpm++ are for eps and v; set it to \"auto\"",
                       SAMPLERS[m->sampler], lg_objective_name(m->objective));
    return 0;
}

static bool is_linspace(const struct lg_sampler_method *m)
{
    if (m->spacing != LG_SPACING_AUTO) return m->spacing == LG_SPACING_LINSPACE;
    return m->sampler == LG_SAMPLER_DPM;
}

static double shifted_time(const struct lg_sampler_method *m, int steps, int i)
{
    const struct lg_objective o = {.flow_shift = m->flow_shift};
    double t = 1.0 - (double)i / steps;
    if (is_linspace(m) && steps > 1) {
        const double last = lg_flow_shift(&o, 1.0 / LG_TRAIN_TIMESTEPS);
        t = 1.0 + (last - 1.0) * i / (steps - 1);
    }
    return lg_flow_shift(&o, t);
}

static double flow_time(const struct lg_sampler_method *m, int steps, int i)
{
    if (i == steps) return 0;
    const double t = shifted_time(m, steps, i);
    if (m->flow_end <= 0 || steps == 1) return t;
    return 1 - (1 - t) * (1 - m->flow_end) / (1 - shifted_time(m, steps, steps - 1));
}

static struct lg_sampler_step flow_step(const struct lg_sampler_method *m, int steps, int i)
{
    double t = flow_time(m, steps, i), next = flow_time(m, steps, i + 1);
    return (struct lg_sampler_step){.t = LG_TRAIN_TIMESTEPS * t, .cx = 1.0, .cm = next - t};
}

/* -1: no noise. */
static int timestep(const struct lg_sampler_method *m, int steps, int i)
{
    if (i == steps) return -1;
    /* Half to even, as numpy rounds. */
    if (is_linspace(m))
        return (int)nearbyint((steps - i) * ((double)(LG_TRAIN_TIMESTEPS - 1) / steps));
    return (int)nearbyint(LG_TRAIN_TIMESTEPS - i * ((double)LG_TRAIN_TIMESTEPS / steps)) - 1;
}

/* With s = sqrt(A), r = sqrt(1 - A): x = s x0 + r e, and the next x is s' x0 + r' e. */
static struct lg_sampler_step ddim_step(const struct lg_sampler_method *m, int steps, int i)
{
    int t = timestep(m, steps, i);
    double a = lg_alpha_bar(&m->betas, t), b = lg_alpha_bar(&m->betas, timestep(m, steps, i + 1));
    double s = sqrt(a), r = sqrt(1 - a), s1 = sqrt(b), r1 = sqrt(1 - b);
    if (m->objective == LG_OBJECTIVE_EPS) /* x0 = (x - r m) / s, e = m */
        return (struct lg_sampler_step){.t = t, .cx = s1 / s, .cm = r1 - s1 * r / s};
    /* x0 = s x - r m, e = r x + s m */
    return (struct lg_sampler_step){.t = t, .cx = s1 * s + r1 * r, .cm = r1 * s - s1 * r};
}

/* s and r before step i; without a picture (zero_snr) a trace of it stays, as diffusers has it. */
static double noise_before(const struct lg_sampler_method *m, int steps, int i, double *ret_r)
{
    double a = lg_alpha_bar(&m->betas, timestep(m, steps, i));
    if (a == 0) a = 0x1p-24;
    *ret_r = sqrt(1 - a);
    return sqrt(a);
}

/* In lambda = log(s / r), whose steps h are the solver's. */
static struct lg_sampler_step dpm_step(const struct lg_sampler_method *m, int steps, int i)
{
    double r, r1, s = noise_before(m, steps, i, &r), s1 = noise_before(m, steps, i + 1, &r1);
    struct lg_sampler_step p = {.t = timestep(m, steps, i), .multistep = true};
    const bool eps = m->objective == LG_OBJECTIVE_EPS;
    p.px = eps ? 1 / s : s;
    p.pm = eps ? -r / s : -r;
    p.cx = r1 / r;
    p.c[0] = s1 - s * p.cx; /* -s' (exp(-h) - 1) */
    if (i == 0 || i == steps - 1) return p;
    double r0, s0 = noise_before(m, steps, i - 1, &r0), now = log(s / r);
    const double h = log(s1 / r1) - now, before = now - log(s0 / r0);
    if (before == 0) return p; /* 1000 steps, evenly from 999 to 0, have one twice */
    p.c[1] = -0.5 * p.c[0] * h / before;
    p.c[0] -= p.c[1];
    return p;
}

struct lg_sampler_step lg_sampler_step_at(const struct lg_sampler_method *m, int steps, int i)
{
    LG_ASSERT(steps >= 1 && steps <= LG_SAMPLER_STEPS_MAX && i >= 0 && i < steps);
    if (m->objective == LG_OBJECTIVE_FLOW) return flow_step(m, steps, i);
    return m->sampler == LG_SAMPLER_DPM ? dpm_step(m, steps, i) : ddim_step(m, steps, i);
}

/* ---- memory ---- */

static lg_tensor place(char *base, size_t *used, lg_tensor t)
{
    t.data = base ? base + *used : NULL;
    *used += (lg_tensor_bytes(&t) + 63) / 64 * 64;
    return t;
}

/* Cuts the sampler's own memory; returns its bytes. */
static size_t layout(lg_sampler *s, void *base)
{
    const int64_t *d = s->shape;
    size_t used = 0;
    s->x = place(base, &used, lg_t4(NULL, s->type, d[0], d[1], d[2], d[3]));
    s->pred = place(base, &used, lg_t4(NULL, s->type, d[0], d[1], d[2], d[3]));
    s->out = s->pred;
    if (s->out_channels > d[1])
        s->out = place(base, &used, lg_t4(NULL, s->type, d[0], s->out_channels, d[2], d[3]));
    for (int i = 0; i < 2; i++)
        s->picture[i] = place(base, &used, lg_t4(NULL, s->type, s->pictures, d[1], d[2], d[3]));
    s->noise = place(base, &used, lg_t4(NULL, LG_F32, s->pictures, d[1], d[2], d[3]));
    if (s->is_distilled) {
        s->guidance32 = place(base, &used, lg_t1(NULL, LG_F32, d[0]));
        s->guidance = place(base, &used, lg_t1(NULL, s->time_type, d[0]));
    }
    s->t32 = place(base, &used, lg_t2(NULL, LG_F32, LG_SAMPLER_STEPS_MAX, d[0] * s->times));
    s->t = place(base, &used, lg_t2(NULL, s->time_type, LG_SAMPLER_STEPS_MAX, d[0] * s->times));
    return used;
}

static lg_sampler describe(lg_device *d, const struct lg_sampler_spec *spec)
{
    const struct lg_denoiser_config *c = spec->net;
    LG_ASSERT(spec->pictures >= 1);
    int batch = spec->guided ? 2 * spec->pictures : spec->pictures;
    return (lg_sampler){.device = d,
                        .pictures = spec->pictures,
                        .batch = batch,
                        .guided = spec->guided,
                        .out_channels = lg_denoiser_out_channels(c),
                        .tokens = (int64_t)(lg_denoiser_rows(c) / c->patch) * (c->width / c->patch),
                        .times = spec->has_first ? lg_denoiser_frames(c) : 1,
                        .is_distilled = c->guidance,
                        .type = lg_device_dtype(d),
                        .time_type = lg_denoiser_grad_type(d),
                        .shape = {batch, c->channels, lg_denoiser_rows(c), c->width}};
}

static struct lg_denoiser_mode mode_of(const lg_sampler *s)
{
    return (struct lg_denoiser_mode){.batch = s->batch, .frame_times = s->times > 1};
}

static int check_first(const struct lg_sampler_spec *spec)
{
    if (spec->has_first && lg_denoiser_frames(spec->net) < 2)
        return LG_FAIL(LG_ERR_CONFIG,
                       "a first frame is given, but there is no other to draw: it is "
                       "for clips, whose latents have several frames");
    return 0;
}

int lg_sampler_plan(lg_device *d, const struct lg_sampler_spec *spec, size_t *ret_bytes)
{
    lg_sampler s = describe(d, spec);
    const struct lg_denoiser_mode mode = mode_of(&s);
    struct lg_denoiser_bytes net;
    LG_TRY(check_first(spec));
    LG_TRY(lg_denoiser_plan(d, spec->net, &mode, &net));
    *ret_bytes = net.activations + net.scratch + layout(&s, NULL);
    return 0;
}

int lg_sampler_open(lg_device *d, const struct lg_sampler_spec *spec, lg_sampler **ret)
{
    LG_TRY(check_first(spec));
    lg_sampler *s = malloc(sizeof *s);
    LG_ASSERT(s);
    *s = describe(d, spec);
    const struct lg_denoiser_mode mode = mode_of(s);
    int rc;
    LG_TRY_GOTO(rc, lg_denoiser_open(d, spec->net, &mode, &s->net), fail);
    LG_TRY_GOTO(rc, lg_device_alloc(d, layout(s, NULL), &s->memory), fail);
    layout(s, s->memory);
    *ret = s;
    return 0;
fail:
    lg_sampler_close(&s);
    return rc;
}

void lg_sampler_close(lg_sampler **s)
{
    if (!*s) return;
    lg_denoiser_close(&(*s)->net);
    lg_device_free((*s)->device, &(*s)->memory);
    free(*s);
    *s = NULL;
}

int lg_sampler_batch(const lg_sampler *s)
{
    return s->batch;
}

/* ---- drawing ---- */

/* Rows [from, from + pictures) of a (B, C, H, W) tensor. */
static lg_tensor half_of(const lg_sampler *s, lg_tensor t, int from)
{
    return lg_slice(t, 0, from, s->pictures);
}

/* Noise and timesteps go up in fp32 and are cast on the device. *ret_staged holds them until the
 * caller has synchronised; the caller frees it. */
static void upload(lg_sampler *s, lg_stream *stream, const struct lg_sampler_run *run,
                   float **ret_staged)
{
    size_t each = (size_t)(s->shape[1] * s->shape[2] * s->shape[3]), n = (size_t)s->pictures;
    const size_t of_step = (size_t)(s->batch * s->times), times = (size_t)run->steps * of_step;
    float *staged = malloc((n * each + times) * sizeof *staged), *t = staged + n * each;
    LG_ASSERT(staged);
    for (size_t i = 0; i < n; i++)
        lg_philox_normal_f32(staged + i * each, each, run->seed, LG_PURPOSE_SAMPLE, run->first + i,
                             0);
    for (size_t i = 0; i < times; i++)
        t[i] = s->times > 1 && i % (size_t)s->times == 0
                   ? 0 /* the frame that is given */
                   : (float)lg_sampler_step_at(&run->method, run->steps, (int)(i / of_step)).t;
    lg_stream_upload(stream, s->noise.data, staged, n * each * sizeof *staged);
    lg_cast(stream, &(struct lg_cast_args){.x = s->noise, .y = half_of(s, s->x, 0)});
    const int64_t wide = (int64_t)of_step;
    lg_tensor t32 = lg_t2(s->t32.data, LG_F32, run->steps, wide);
    lg_stream_upload(stream, t32.data, t, times * sizeof *staged);
    lg_cast(stream, &(struct lg_cast_args){.x = t32,
                                           .y = lg_t2(s->t.data, s->time_type, run->steps, wide)});
    *ret_staged = staged;
}

/* What the net takes of guidance, as it takes timesteps: a thousand times the scale. */
static void upload_guidance(lg_sampler *s, lg_stream *stream, double guidance)
{
    if (!s->is_distilled) return;
    float *v = malloc((size_t)s->batch * sizeof *v);
    LG_ASSERT(v);
    for (int i = 0; i < s->batch; i++) v[i] = (float)(LG_TRAIN_TIMESTEPS * guidance);
    lg_stream_upload(stream, s->guidance32.data, v, (size_t)s->batch * sizeof *v);
    lg_cast(stream, &(struct lg_cast_args){.x = s->guidance32, .y = s->guidance});
    lg_stream_sync(stream);
    free(v);
}

/* The noise alone, without the variance. */
static void take_noise(lg_sampler *s, lg_stream *stream)
{
    if (s->out.data == s->pred.data) return;
    const int64_t B = s->batch, n = lg_numel(&s->pred) / B, all = lg_numel(&s->out) / B;
    lg_tensor rows = lg_t2(s->out.data, s->type, B, all);
    lg_copy_rows(stream, &(struct lg_copy_rows_args){.x = lg_slice(rows, 1, 0, n),
                                                     .y = lg_t2(s->pred.data, s->type, B, n)});
}

/* y = cx x + cm m, m being guided. */
static void combine(lg_sampler *s, lg_stream *stream, const struct lg_sampler_run *run,
                    const double c[2], lg_tensor y)
{
    lg_tensor x = half_of(s, s->x, 0), cond = half_of(s, s->pred, 0);
    struct lg_combine_args a = {.x = {x, cond}, .c = {c[0], c[1]}, .count = 2, .y = y};
    if (s->guided) {
        a.x[2] = half_of(s, s->pred, s->pictures);
        a.c[1] = c[1] * run->guidance;
        a.c[2] = c[1] * (1.0 - run->guidance);
        a.count = 3;
    }
    lg_combine(stream, &a);
}

/* Over what a step has made of it. */
static void keep_first(lg_sampler *s, lg_stream *stream, const struct lg_sampler_run *run)
{
    for (int i = 0; i < s->pictures && s->times > 1; i++)
        lg_send(stream, (struct lg_sent){
                            .from = run->first_frame,
                            .to = lg_slice(lg_slice(s->x, 0, i, 1), 2, 0, s->shape[2] / s->times)});
}

static void step(lg_sampler *s, lg_stream *stream, const struct lg_sampler_run *run, int i)
{
    struct lg_sampler_step c = lg_sampler_step_at(&run->method, run->steps, i);
    lg_tensor x = half_of(s, s->x, 0), picture = s->picture[i & 1], before = s->picture[~i & 1];
    const int64_t of_step = s->batch * s->times;
    keep_first(s, stream, run);
    if (s->guided)
        lg_stream_copy(stream, half_of(s, s->x, s->pictures).data, x.data, lg_tensor_bytes(&x));
    struct lg_denoiser_input in = {
        .x = s->x,
        .t = lg_t1((char *)s->t.data + (size_t)(i * of_step) * lg_dtype_bytes(s->time_type),
                   s->time_type, of_step),
        .label = run->label,
        .size = run->size,
        .ratio = run->ratio,
        .guidance = s->guidance};
    memcpy(in.text, run->text, sizeof in.text);
    lg_denoiser_forward(s->net, stream, run->weights, &in, s->out);
    take_noise(s, stream);
    if (!c.multistep) {
        combine(s, stream, run, (double[]){c.cx, c.cm}, x);
        return;
    }
    combine(s, stream, run, (double[]){c.px, c.pm}, picture);
    lg_combine(stream, &(struct lg_combine_args){.x = {x, picture, before},
                                                 .c = {c.cx, c.c[0], c.c[1]},
                                                 .count = c.c[1] != 0 ? 3 : 2,
                                                 .y = x});
}

/* The shift of the latent's size. */
static struct lg_sampler_method sized(const lg_sampler *s, const struct lg_sampler_method *m)
{
    const struct lg_objective o = {.flow_shift = m->flow_shift, .shift_by = m->shift_by};
    struct lg_sampler_method of = *m;
    of.flow_shift = lg_objective_of_size(&o, s->tokens).flow_shift;
    of.shift_by = LG_FLOW_SHIFT_CONSTANT;
    return of;
}

int lg_sampler_draw(lg_sampler *s, lg_stream *stream, const struct lg_sampler_run *wanted,
                    lg_tensor out)
{
    struct lg_sampler_run sized_run = *wanted, *run = &sized_run;
    run->method = sized(s, &wanted->method);
    if (run->steps < 1 || run->steps > LG_SAMPLER_STEPS_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "%d sampler steps; 1 to %d are possible", run->steps,
                       LG_SAMPLER_STEPS_MAX);
    LG_TRY(lg_sampler_method_check(&run->method));
    LG_ASSERT(s->guided || s->is_distilled || run->guidance == 1.0);
    if (s->times > 1 && run->method.objective != LG_OBJECTIVE_FLOW)
        return LG_FAIL(LG_ERR_CONFIG, "a first frame is given to models of flow alone, not of %s",
                       lg_objective_name(run->method.objective));
    float *staged;
    upload_guidance(s, stream, run->guidance);
    upload(s, stream, run, &staged);
    for (int i = 0; i < run->steps; i++) step(s, stream, run, i);
    keep_first(s, stream, run);
    lg_tensor x = half_of(s, s->x, 0);
    LG_ASSERT(out.dtype == s->type && lg_numel(&out) == lg_numel(&x));
    lg_stream_copy(stream, out.data, x.data, lg_tensor_bytes(&x));
    lg_stream_sync(stream);
    free(staged);
    return 0;
}
