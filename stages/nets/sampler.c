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

struct lg_sampler {
    lg_device *device;
    lg_denoiser *net;
    int pictures, batch;
    bool guided;
    lg_dtype type, time_type;
    int64_t shape[4]; // (B, C, H, W)
    lg_tensor x;      // (B, C, H, W)
    lg_tensor pred;   // (B, C, H, W)
    lg_tensor noise;  // (pictures, C, H, W) fp32, for the upload
    lg_tensor t32, t; // (LG_SAMPLER_STEPS_MAX, B) fp32 and as the net takes them
    void *memory;
};

/* ---- coefficients ---- */

static struct lg_sampler_step flow_step(int steps, int i)
{
    double t = 1.0 - (double)i / steps, next = 1.0 - (double)(i + 1) / steps;
    return (struct lg_sampler_step){.t = LG_TRAIN_TIMESTEPS * t, .cx = 1.0, .cm = next - t};
}

static int trailing(int steps, int i)
{
    if (i == steps) return -1;
    /* Half to even, as numpy rounds. */
    return (int)nearbyint(LG_TRAIN_TIMESTEPS - i * ((double)LG_TRAIN_TIMESTEPS / steps)) - 1;
}

/* With s = sqrt(A), r = sqrt(1 - A): x = s x0 + r e, and the next x is s' x0 + r' e. */
static struct lg_sampler_step ddim_step(lg_objective_kind kind, int steps, int i)
{
    int t = trailing(steps, i);
    double a = lg_alpha_bar(t), b = lg_alpha_bar(trailing(steps, i + 1));
    double s = sqrt(a), r = sqrt(1 - a), s1 = sqrt(b), r1 = sqrt(1 - b);
    if (kind == LG_OBJECTIVE_EPS) /* x0 = (x - r m) / s, e = m */
        return (struct lg_sampler_step){.t = t, .cx = s1 / s, .cm = r1 - s1 * r / s};
    /* x0 = s x - r m, e = r x + s m */
    return (struct lg_sampler_step){.t = t, .cx = s1 * s + r1 * r, .cm = r1 * s - s1 * r};
}

struct lg_sampler_step lg_sampler_step_at(lg_objective_kind kind, int steps, int i)
{
    LG_ASSERT(steps >= 1 && steps <= LG_SAMPLER_STEPS_MAX && i >= 0 && i < steps);
    return kind == LG_OBJECTIVE_FLOW ? flow_step(steps, i) : ddim_step(kind, steps, i);
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
    s->noise = place(base, &used, lg_t4(NULL, LG_F32, s->pictures, d[1], d[2], d[3]));
    s->t32 = place(base, &used, lg_t2(NULL, LG_F32, LG_SAMPLER_STEPS_MAX, d[0]));
    s->t = place(base, &used, lg_t2(NULL, s->time_type, LG_SAMPLER_STEPS_MAX, d[0]));
    return used;
}

static lg_sampler describe(lg_device *d, const struct lg_denoiser_config *c, int pictures,
                           bool guided)
{
    LG_ASSERT(pictures >= 1);
    int batch = guided ? 2 * pictures : pictures;
    return (lg_sampler){.device = d,
                        .pictures = pictures,
                        .batch = batch,
                        .guided = guided,
                        .type = lg_device_dtype(d),
                        .time_type = lg_denoiser_grad_type(d),
                        .shape = {batch, c->channels, c->height, c->width}};
}

int lg_sampler_plan(lg_device *d, const struct lg_denoiser_config *c, int pictures, bool guided,
                    size_t *ret_bytes)
{
    lg_sampler s = describe(d, c, pictures, guided);
    struct lg_denoiser_bytes net;
    LG_TRY(lg_denoiser_plan(d, c, &(struct lg_denoiser_mode){.batch = s.batch}, &net));
    *ret_bytes = net.activations + net.scratch + layout(&s, NULL);
    return 0;
}

int lg_sampler_open(lg_device *d, const struct lg_denoiser_config *c, int pictures, bool guided,
                    lg_sampler **ret)
{
    lg_sampler *s = malloc(sizeof *s);
    LG_ASSERT(s);
    *s = describe(d, c, pictures, guided);
    int rc;
    LG_TRY_GOTO(rc, lg_denoiser_open(d, c, &(struct lg_denoiser_mode){.batch = s->batch}, &s->net),
                fail);
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
    size_t batch = (size_t)s->batch, times = (size_t)run->steps * batch;
    float *staged = malloc((n * each + times) * sizeof *staged), *t = staged + n * each;
    LG_ASSERT(staged);
    for (size_t i = 0; i < n; i++)
        lg_philox_normal_f32(staged + i * each, each, run->seed, LG_PURPOSE_SAMPLE, run->first + i,
                             0);
    for (size_t i = 0; i < times; i++)
        t[i] = (float)lg_sampler_step_at(run->objective, run->steps, (int)(i / batch)).t;
    lg_stream_upload(stream, s->noise.data, staged, n * each * sizeof *staged);
    lg_cast(stream, &(struct lg_cast_args){.x = s->noise, .y = half_of(s, s->x, 0)});
    lg_tensor t32 = lg_t2(s->t32.data, LG_F32, run->steps, s->batch);
    lg_stream_upload(stream, t32.data, t, times * sizeof *staged);
    lg_cast(stream, &(struct lg_cast_args){
                        .x = t32, .y = lg_t2(s->t.data, s->time_type, run->steps, s->batch)});
    *ret_staged = staged;
}

static void step(lg_sampler *s, lg_stream *stream, const struct lg_sampler_run *run, int i)
{
    struct lg_sampler_step c = lg_sampler_step_at(run->objective, run->steps, i);
    lg_tensor x = half_of(s, s->x, 0), cond = half_of(s, s->pred, 0);
    if (s->guided)
        lg_stream_copy(stream, half_of(s, s->x, s->pictures).data, x.data, lg_tensor_bytes(&x));
    struct lg_denoiser_input in = {
        .x = s->x,
        .t = lg_t1((char *)s->t.data + (size_t)i * (size_t)s->batch * lg_dtype_bytes(s->time_type),
                   s->time_type, s->batch),
        .label = run->label,
        .text = run->text,
        .text_length = run->text_length};
    lg_denoiser_forward(s->net, stream, run->weights, &in, s->pred);
    struct lg_combine_args a = {.x = {x, cond}, .c = {c.cx, c.cm}, .count = 2, .y = x};
    if (s->guided) {
        a.x[2] = half_of(s, s->pred, s->pictures);
        a.c[1] = c.cm * run->guidance;
        a.c[2] = c.cm * (1.0 - run->guidance);
        a.count = 3;
    }
    lg_combine(stream, &a);
}

int lg_sampler_draw(lg_sampler *s, lg_stream *stream, const struct lg_sampler_run *run,
                    lg_tensor out)
{
    if (run->steps < 1 || run->steps > LG_SAMPLER_STEPS_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "%d sampler steps; 1 to %d are possible", run->steps,
                       LG_SAMPLER_STEPS_MAX);
    LG_ASSERT(s->guided || run->guidance == 1.0);
    float *staged;
    upload(s, stream, run, &staged);
    for (int i = 0; i < run->steps; i++) step(s, stream, run, i);
    lg_tensor x = half_of(s, s->x, 0);
    LG_ASSERT(out.dtype == s->type && lg_numel(&out) == lg_numel(&x));
    lg_stream_copy(stream, out.data, x.data, lg_tensor_bytes(&x));
    lg_stream_sync(stream);
    free(staged);
    return 0;
}
