/* One micro-batch; see batch.h.
 *
 * Latents and text states are used where they lie in the window (text states across the bus are copied): the samples
 * of a micro-batch are neighbours in their rank's regions. The small arrays (numbers, coefficients, timesteps, weights,
 * labels, lengths) travel in one copy. Latents that a loader provides lie with the host in fp32; a
 * device elsewhere gets a copy in its own type. */
#include "stages/trainer/batch.h"
#include "kernels/ops.h"
#include <stdlib.h>
#include <string.h>

enum { VARIANCE_TERMS = 6 };

/* Offsets in the device block, in bytes, each a multiple of 64. */
struct layout {
    size_t n, coef, t, weight, label, text_length[LG_TEXTS_MAX], uploaded; /* host and device */
    size_t size, ratio, guidance, terms;               /* likewise, of what the net has */
    size_t mean, logvar, staged;                       /* device, latents from the host only */
    size_t states[LG_TEXTS_MAX], pooled[LG_TEXTS_MAX]; /* likewise, texts */
    size_t clean_coef;                                 /* host and device, frame_times */
    size_t clean;                                      /* device, likewise: latents without noise */
    size_t x_t, target;                                /* device only */
    size_t band_x_t, band_target, total;               /* likewise; of a band, where there is one */
};

struct lg_batch {
    struct lg_batch_options *kind; /* (n) */
    struct lg_batch_options o;     /* that of the batch that is loaded */
    lg_device *on;
    lg_dtype type;
    bool copies; /* latents */
    bool *clean; /* (B): the first frame is */
    struct layout at;
    char *host, *device;
    struct lg_batch_tensors tensors;
    lg_tensor x_t, target; /* of whole latents */
};

static size_t take(size_t *used, size_t bytes)
{
    size_t at = *used;
    *used += (bytes + 63) / 64 * 64;
    return at;
}

static bool copies_latents(const lg_device *d, const struct lg_batch_options *o)
{
    return o->latents_on_host && !lg_device_is_host(d);
}

/* Of a sample: of the noise, and of the variance if there is one. */
static size_t weights_of(const struct lg_batch_options *o)
{
    return o->net->learned_variance ? 2 : 1;
}

static struct lg_band band_of(const struct lg_batch_options *o)
{
    const struct lg_band whole = {.height = lg_denoiser_rows(o->net), .share = 1};
    return o->band.height ? o->band : whole;
}

/* Rows of the latent that share a timestep. */
static int time_rows(const struct lg_batch_options *o)
{
    const struct lg_band band = band_of(o);
    return lg_denoiser_time_rows(o->net, &band, o->frame_times);
}

/* Timesteps of a sample. */
static size_t times_of(const struct lg_batch_options *o)
{
    return (size_t)(band_of(o).height / time_rows(o));
}

static bool may_be_clean(const struct lg_batch_options *o)
{
    return o->frame_times && lg_denoiser_frames(o->net) > 1;
}

static struct layout layout_of(const lg_device *d, const struct lg_batch_options *o)
{
    size_t B = (size_t)o->size, used = 0, f = sizeof(float);
    size_t values = B * (size_t)(o->net->channels * lg_denoiser_rows(o->net) * o->net->width);
    size_t latent = values * lg_dtype_bytes(lg_device_dtype(d));
    struct layout l = {0};
    l.n = take(&used, B * sizeof(int64_t));
    l.coef = take(&used, B * 4 * f);
    l.t = take(&used, times_of(o) * B * f);
    l.weight = take(&used, weights_of(o) * B * f);
    l.label = take(&used, B * sizeof(int32_t));
    for (int k = 0; k < o->net->n_texts; k++) l.text_length[k] = take(&used, B * sizeof(int32_t));
    const size_t numbers = (size_t)lg_denoiser_numbers(o->net);
    if (numbers) l.size = take(&used, numbers * B * f);
    if (lg_denoiser_has_ratio(o->net)) l.ratio = take(&used, B * f);
    if (o->net->guidance) l.guidance = take(&used, B * f);
    if (o->net->learned_variance) l.terms = take(&used, VARIANCE_TERMS * B * f);
    if (may_be_clean(o)) l.clean_coef = take(&used, B * 4 * f);
    l.uploaded = used;
    if (copies_latents(d, o)) {
        l.mean = take(&used, latent);
        l.logvar = take(&used, latent);
        l.staged = take(&used, values * f);
    }
    for (int k = 0; k < o->net->n_texts && o->texts_on_host; k++) {
        const struct lg_denoiser_text *t = &o->net->text[k];
        const size_t one = lg_dtype_bytes(lg_device_dtype(d));
        l.states[k] = take(&used, B * (size_t)(t->length * t->width) * one);
        l.pooled[k] = take(&used, B * (size_t)t->pooled * one);
    }
    if (may_be_clean(o)) l.clean = take(&used, latent);
    l.x_t = take(&used, latent);
    l.target = take(&used, latent);
    if (o->band.height) {
        const size_t band = latent / (size_t)lg_denoiser_rows(o->net) * (size_t)o->band.height;
        l.band_x_t = take(&used, band);
        l.band_target = take(&used, band);
    }
    l.total = used;
    return l;
}

size_t lg_batch_bytes(const lg_device *d, const struct lg_batch_options *o, int n)
{
    size_t most = 0;
    for (int k = 0; k < n; k++) most = LG_MAX(most, layout_of(d, &o[k]).total);
    return most;
}

static lg_tensor latent_tensor(const lg_batch *b, void *data)
{
    return lg_t4(data, b->type, b->o.size, b->o.net->channels, lg_denoiser_rows(b->o.net),
                 b->o.net->width);
}

static lg_tensor band_tensor(const lg_batch *b, void *data)
{
    lg_tensor whole = latent_tensor(b, data);
    return lg_t4(data, whole.dtype, whole.dim[0], whole.dim[1], b->o.band.height, whole.dim[3]);
}

/* From here on its tensors are those of this kind. */
static void use(lg_batch *b, const struct lg_batch_options *o)
{
    b->o = *o;
    b->at = layout_of(b->on, o);
    struct lg_batch_tensors *t = &b->tensors;
    *t = (struct lg_batch_tensors){0};
    t->in.x = b->x_t = latent_tensor(b, b->device + b->at.x_t);
    t->target = b->target = latent_tensor(b, b->device + b->at.target);
    if (o->band.height) {
        t->in.x = band_tensor(b, b->device + b->at.band_x_t);
        t->target = band_tensor(b, b->device + b->at.band_target);
    }
    t->in.t = lg_t1(b->device + b->at.t, LG_F32, o->size * (int64_t)times_of(o));
    t->weight = lg_t1(b->device + b->at.weight, LG_F32, o->size);
    if (o->net->learned_variance) {
        t->weight = lg_t2(t->weight.data, LG_F32, o->size, 2);
        t->terms = lg_t2(b->device + b->at.terms, LG_F32, o->size, VARIANCE_TERMS);
    }
    const int numbers = lg_denoiser_numbers(o->net);
    if (numbers) t->in.size = lg_t2(b->device + b->at.size, LG_F32, o->size, numbers);
    if (lg_denoiser_has_ratio(o->net))
        t->in.ratio = lg_t1(b->device + b->at.ratio, LG_F32, o->size);
    if (o->net->guidance) t->in.guidance = lg_t1(b->device + b->at.guidance, LG_F32, o->size);
    const struct lg_denoiser_info *has = lg_denoiser_info(o->net->kind);
    if (has->labels) t->in.label = lg_t1(b->device + b->at.label, LG_I32, o->size);
    for (int k = 0; k < o->net->n_texts; k++)
        t->in.text[k].length = lg_t1(b->device + b->at.text_length[k], LG_I32, o->size);
}

int lg_batch_open(lg_device *d, const struct lg_batch_options *o, int n, lg_batch **ret)
{
    lg_batch *b = calloc(1, sizeof *b);
    LG_ASSERT(b && n >= 1);
    *ret = b;
    b->on = d;
    b->kind = calloc((size_t)n, sizeof *b->kind);
    LG_ASSERT(b->kind);
    memcpy(b->kind, o, (size_t)n * sizeof *o);
    b->type = lg_device_dtype(d);
    b->copies = copies_latents(d, o);
    size_t uploaded = 0, rows = 0;
    for (int k = 0; k < n; k++) uploaded = LG_MAX(uploaded, layout_of(d, &o[k]).uploaded);
    for (int k = 0; k < n; k++) rows = LG_MAX(rows, (size_t)o[k].size);
    b->host = calloc(1, uploaded);
    b->clean = calloc(rows, sizeof *b->clean);
    LG_ASSERT(b->host && b->clean);
    void *device;
    LG_TRY(lg_device_alloc(d, lg_batch_bytes(d, o, n), &device));
    b->device = device;
    use(b, &b->kind[0]);
    return 0;
}

void lg_batch_close(lg_batch **b)
{
    if (!*b) return;
    free((*b)->host);
    free((*b)->clean);
    free((*b)->kind);
    free(*b);
    *b = NULL;
}

const struct lg_batch_tensors *lg_batch_tensors(const lg_batch *b)
{
    return &b->tensors;
}

const float *lg_batch_weights(const lg_batch *b)
{
    return (const float *)(b->host + b->at.weight);
}

/* Of a sample: that of the draw, and of a clean first frame 0. */
static void gather_times(lg_batch *b, size_t row, double t)
{
    const size_t times = times_of(&b->o);
    float *to = (float *)(b->host + b->at.t) + row * times;
    for (size_t i = 0; i < times; i++) {
        const int at = band_of(&b->o).first + (int)i * time_rows(&b->o);
        to[i] = b->clean[row] && at < b->o.net->height ? 0 : (float)t;
    }
}

static void gather_row(lg_batch *b, lg_window *w, const struct lg_batch_spec *spec, size_t row)
{
    const uint64_t n = spec->first + row;
    const struct lg_slot *slot = lg_window_slot(w, n);
    const struct lg_denoiser_config *net = b->o.net;
    const struct lg_objective objective = lg_objective_of_size(
        spec->objective, (int64_t)(lg_denoiser_rows(net) / net->patch) * (net->width / net->patch));
    struct lg_objective_sample draw;
    lg_objective_draw(&objective, spec->seed, spec->of_run + row, &draw);
    ((int64_t *)(b->host + b->at.n))[row] = (int64_t)(spec->of_run + row);
    for (int i = 0; i < 4; i++)
        ((float *)(b->host + b->at.coef))[4 * row + (size_t)i] = (float)draw.coef[i];
    for (int i = 0; i < 4 && may_be_clean(&b->o); i++)
        ((float *)(b->host + b->at.clean_coef))[4 * row + (size_t)i] = i == 0; /* x0 */
    b->clean[row] = may_be_clean(&b->o) && draw.first_is_clean;
    gather_times(b, row, draw.t);
    const int frames = lg_denoiser_frames(net);
    const double share = band_of(&b->o).share * (b->clean[row] ? frames / (frames - 1.0) : 1);
    const size_t per = weights_of(&b->o);
    const double weight[] = {draw.weight, draw.variance_weight};
    for (size_t i = 0; i < per; i++)
        ((float *)(b->host + b->at.weight))[per * row + i] =
            slot->is_void || slot->is_absent ? 0 : (float)(weight[i] / spec->divisor * share);
    for (size_t i = 0; i < VARIANCE_TERMS && net->learned_variance; i++)
        ((float *)(b->host + b->at.terms))[VARIANCE_TERMS * row + i] = (float)draw.variance[i];
    if (net->guidance)
        ((float *)(b->host + b->at.guidance))[row] = (float)(LG_TRAIN_TIMESTEPS * b->o.guidance);
    const uint32_t number[] = {slot->original_height,
                               slot->original_width,
                               slot->crop_top,
                               slot->crop_left,
                               (uint32_t)(net->height * b->o.factor),
                               (uint32_t)(net->width * b->o.factor)};
    const size_t numbers = (size_t)lg_denoiser_numbers(net);
    LG_ASSERT(numbers <= LG_ARRAY_LEN(number));
    for (size_t i = 0; i < numbers; i++)
        ((float *)(b->host + b->at.size))[numbers * row + i] = (float)number[i];
    if (lg_denoiser_has_ratio(net))
        ((float *)(b->host + b->at.ratio))[row] = (float)net->height / (float)net->width;
    ((int32_t *)(b->host + b->at.label))[row] = slot->label;
    for (int k = 0; k < net->n_texts; k++)
        ((int32_t *)(b->host + b->at.text_length[k]))[row] = slot->text_length[k];
}

static void take_band(lg_batch *b, lg_stream *s, lg_tensor whole, lg_tensor to)
{
    lg_tensor rows = lg_slice(whole, 2, b->o.band.first, b->o.band.height);
    lg_send(s, (struct lg_sent){.from = rows, .to = to});
}

/* The host's fp32 values as a tensor of the device. */
static lg_tensor bring(lg_batch *b, lg_stream *s, const void *host, size_t at)
{
    lg_tensor to = latent_tensor(b, b->device + at), staged = to;
    staged.data = b->type == LG_F32 ? to.data : b->device + b->at.staged;
    staged.dtype = LG_F32;
    lg_stream_upload(s, staged.data, host, lg_tensor_bytes(&staged));
    if (b->type != LG_F32) lg_cast(s, &(struct lg_cast_args){.x = staged, .y = to});
    return to;
}

/* Noise and target of all samples, as coef (B, 4) says. */
struct diffusion {
    lg_tensor mean, logvar;
    size_t coef;
    lg_tensor x_t;
};

static void diffuse(lg_batch *b, lg_stream *s, const struct lg_batch_spec *spec,
                    const struct diffusion *d)
{
    const int64_t B = b->o.size;
    lg_diffuse_forward(
        s, &(struct lg_diffuse_forward_args){.mean = d->mean,
                                             .logvar = d->logvar,
                                             .n = lg_t1(b->device + b->at.n, LG_I64, B),
                                             .coef = lg_t2(b->device + d->coef, LG_F32, B, 4),
                                             .x_t = d->x_t,
                                             .target = b->target,
                                             .seed = spec->seed,
                                             .scaling_factor = spec->scaling_factor,
                                             .shift_factor = spec->shift_factor});
}

/* Rows [0, rows) of the first C channels of a sample of a batch of latents. */
static lg_tensor first_rows(const lg_batch *b, lg_tensor of, int row, int rows)
{
    of = lg_slice(lg_slice(of, 0, row, 1), 1, 0, b->o.net->channels);
    return lg_slice(of, 2, 0, rows);
}

/* Where x_t has noise and should not: from latents without any. */
static void clean_first_frames(lg_batch *b, lg_stream *s, lg_tensor without_noise)
{
    const int rows = b->o.net->height;
    for (int i = 0; i < b->o.size; i++)
        if (b->clean[i])
            lg_send(s, (struct lg_sent){.from = first_rows(b, without_noise, i, rows),
                                        .to = first_rows(b, b->x_t, i, rows)});
}

static bool any_is_clean(const lg_batch *b)
{
    for (int64_t i = 0; i < b->o.size; i++)
        if (b->clean[i]) return true;
    return false;
}

/* Of the window, where it lies or copied to `at`. */
static lg_tensor text_of(lg_batch *b, lg_stream *s, lg_tensor x, size_t at)
{
    const void *from = x.data;
    if (!b->o.texts_on_host) return x;
    x.data = b->device + at;
    lg_stream_copy(s, x.data, from, lg_tensor_bytes(&x));
    return x;
}

static void use_text(lg_batch *b, lg_stream *s, const lg_window *w, int k, uint64_t n)
{
    const struct lg_denoiser_text *t = &b->o.net->text[k];
    struct lg_text_states *in = &b->tensors.in.text[k];
    if (t->length)
        in->states =
            text_of(b, s, lg_t3(lg_window_states(w, k, n), b->type, b->o.size, t->length, t->width),
                    b->at.states[k]);
    if (t->pooled)
        in->pooled = text_of(b, s, lg_t2(lg_window_pooled(w, k, n), b->type, b->o.size, t->pooled),
                             b->at.pooled[k]);
}

void lg_batch_load(lg_batch *b, lg_stream *s, lg_window *w, const struct lg_batch_spec *spec)
{
    use(b, &b->kind[spec->kind]);
    const int64_t B = b->o.size;
    const uint64_t n = spec->first;
    LG_ASSERT(lg_window_run(w, n, n + (uint64_t)B) == (uint64_t)B);
    for (size_t row = 0; row < (size_t)B; row++) gather_row(b, w, spec, row);
    lg_stream_upload(s, b->device, b->host, b->at.uploaded);
    lg_tensor mean = latent_tensor(b, lg_window_mean(w, n));
    lg_tensor logvar = latent_tensor(b, lg_window_logvar(w, n));
    if (b->copies) {
        mean = bring(b, s, mean.data, b->at.mean);
        logvar = bring(b, s, logvar.data, b->at.logvar);
    }
    for (int k = 0; k < b->o.net->n_texts; k++) use_text(b, s, w, k, n);
    struct diffusion d = {.mean = mean, .logvar = logvar, .coef = b->at.clean_coef};
    if (any_is_clean(b)) {
        d.x_t = latent_tensor(b, b->device + b->at.clean);
        diffuse(b, s, spec, &d);
    }
    d.coef = b->at.coef, d.x_t = b->x_t;
    diffuse(b, s, spec, &d);
    if (any_is_clean(b)) clean_first_frames(b, s, latent_tensor(b, b->device + b->at.clean));
    if (!b->o.band.height) return;
    take_band(b, s, b->x_t, b->tensors.in.x);
    take_band(b, s, b->target, b->tensors.target);
}

/* What is the target's counts as no error. */
static void leave_out(lg_batch *b, lg_stream *s, lg_tensor pred)
{
    const struct lg_band band = band_of(&b->o);
    const int rows = LG_MIN(b->o.net->height - band.first, band.height);
    for (int i = 0; i < b->o.size && rows > 0; i++)
        if (b->clean[i])
            lg_send(s, (struct lg_sent){.from = first_rows(b, b->tensors.target, i, rows),
                                        .to = first_rows(b, pred, i, rows)});
}

void lg_batch_loss(lg_batch *b, lg_stream *s, lg_tensor pred, lg_tensor loss)
{
    const struct lg_batch_tensors *t = &b->tensors;
    leave_out(b, s, pred);
    if (t->terms.rank)
        lg_learned_range_loss(s, &(struct lg_learned_range_loss_args){.pred = pred,
                                                                      .target = t->target,
                                                                      .x_t = t->in.x,
                                                                      .terms = t->terms,
                                                                      .weight = t->weight,
                                                                      .loss = loss,
                                                                      .dpred = pred});
    else
        lg_mse_loss(s, &(struct lg_mse_loss_args){.pred = pred,
                                                  .target = t->target,
                                                  .weight = t->weight,
                                                  .loss = loss,
                                                  .dpred = pred});
}
