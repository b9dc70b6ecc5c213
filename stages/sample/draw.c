/* Drawing pictures; see draw.h. One function per stage of the way; each opens what it needs and closes
 * it again, so that only one net is in memory at a time. */
#include "stages/sample/draw.h"
#include "base/fs.h"
#include "config/models.h"
#include "stages/encode/batches.h"
#include "stages/encode/port.h"
#include "stages/io/tokenizer.h"
#include "stages/nets/adapter_file.h"
#include "stages/nets/denoiser.h"
#include "stages/nets/sampler.h"
#include "stages/sample/decode_noise.h"
#include "stages/sample/first_frame.h"
#include <stdlib.h>
#include <string.h>

enum { PICTURES_MAX = 8, TEXT_BATCH = 8, DECODE_BATCH = 4 };

/* Conditions of all prompts, then one row for the unconditional half. */
struct conditions {
    struct text {
        float *out[LG_TEXT_OUTPUTS]; // (n + 1, L, E) or (n + 1, P): what the model takes
        int32_t *length;             // (n + 1)
    } text[LG_TEXTS_MAX];
    int32_t *label; // (n + 1)
};

static void conditions_free(struct conditions *c)
{
    for (int k = 0; k < LG_TEXTS_MAX; k++) {
        for (int i = 0; i < LG_TEXT_OUTPUTS; i++) free(c->text[k].out[i]);
        free(c->text[k].length);
    }
    free(c->label);
}

static int alloc(size_t count, size_t bytes, void *ret)
{
    void *p = calloc(LG_MAX(count, (size_t)1), bytes);
    if (!p) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu x %zu bytes", count, bytes);
    memcpy(ret, &p, sizeof p);
    return 0;
}

static int device_alloc(lg_device *d, lg_tensor *t)
{
    return lg_device_alloc(d, lg_tensor_bytes(t), &t->data);
}

/* ---- conditions ---- */

static int tokenize(const struct lg_draw_spec *s, int k, int32_t *ids, int32_t *length)
{
    const int L = s->text[k].length;
    lg_tokenizer *t = NULL;
    LG_TRY(lg_tokenizer_open(s->text[k].dir, &t));
    int rc = 0;
    for (int i = 0; i <= s->n && rc == 0; i++) {
        int n;
        rc = lg_tokenizer_encode(t, i < s->n ? s->prompts[i] : s->negative, L,
                                 ids + (size_t)i * (size_t)L, &n);
        length[i] = n;
    }
    lg_tokenizer_close(&t);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* Sizes of text k as its encoder makes it. */
static struct lg_denoiser_text text_of(const struct lg_draw_spec *s, int k,
                                       const struct lg_denoiser_text_info *has,
                                       const struct lg_text_encoder_config *c)
{
    const struct lg_text_encoder_sizes z = lg_text_encoder_sizes(c);
    struct lg_denoiser_text t = {0};
    if (has->states != LG_TEXT_OUTPUTS) t.length = s->text[k].length, t.width = z.width;
    if (has->pooled != LG_TEXT_OUTPUTS)
        t.pooled = has->pooled == LG_TEXT_EMBEDS ? z.projection : z.width;
    return t;
}

static int encode_text(const struct lg_draw_spec *s, int k, const struct lg_denoiser_text_info *has,
                       struct lg_denoiser_text *net, struct text *ret)
{
    struct lg_text_batches_spec spec = {.device = s->device,
                                        .dir = s->text[k].dir,
                                        .batch = TEXT_BATCH,
                                        .length = s->text[k].length,
                                        .attends_padding = has->padding != LG_PADDING_MASKED};
    lg_text_batches *encoder = NULL;
    int32_t *ids = NULL;
    int rc;
    LG_TRY(lg_text_encoder_config_load(s->text[k].dir, &spec.config));
    spec.config.storage = s->text[k].storage;
    const struct lg_denoiser_text t = text_of(s, k, has, &spec.config);
    if (t.width != net->width || t.pooled != net->pooled)
        return LG_FAIL(LG_ERR_MISMATCH, "%s has width %d, the transformer wants %d", s->text[k].dir,
                       t.width != net->width ? t.width : t.pooled,
                       t.width != net->width ? net->width : net->pooled);
    *net = t; /* the length is not in diffusers' config */
    const size_t rows = (size_t)s->n + 1, L = (size_t)s->text[k].length;
    LG_TRY_GOTO(rc, alloc(rows * L, sizeof *ids, &ids), out);
    if (t.width) {
        spec.outputs |= LG_TEXT_BIT(has->states);
        LG_TRY_GOTO(rc, alloc(rows * L * (size_t)t.width, sizeof(float), &ret->out[has->states]),
                    out);
    }
    if (t.pooled) {
        spec.outputs |= LG_TEXT_BIT(has->pooled);
        LG_TRY_GOTO(rc, alloc(rows * (size_t)t.pooled, sizeof(float), &ret->out[has->pooled]), out);
    }
    LG_TRY_GOTO(rc, alloc(rows, sizeof(int32_t), &ret->length), out);
    LG_TRY_GOTO(rc, tokenize(s, k, ids, ret->length), out);
    LG_TRY_GOTO(rc, lg_text_batches_open(&spec, &encoder), out);
    lg_text_batches_encode_all(encoder, ids, (int64_t)rows, ret->out);
out:
    lg_text_batches_close(&encoder);
    free(ids);
    return rc;
}

static bool is_given(const struct lg_draw_text *t)
{
    return t->dir && *t->dir;
}

/* One encoder after the other, so that one is in memory at a time. */
static int encode_texts(const struct lg_draw_spec *s, struct lg_denoiser_config *net,
                        struct conditions *c)
{
    const struct lg_denoiser_text_info *has;
    const int n = lg_denoiser_texts(net->kind, &has);
    for (int k = 0; k < n; k++) {
        if (has[k].is_optional && !is_given(&s->text[k])) {
            net->n_texts = k;
            net->text[k].length = s->text[k].length;
            break;
        }
        LG_TRY(encode_text(s, k, &has[k], &net->text[k], &c->text[k]));
    }
    return 0;
}

static int parse_labels(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                        struct conditions *c)
{
    LG_TRY(alloc((size_t)s->n + 1, sizeof(int32_t), &c->label));
    for (int i = 0; i < s->n; i++) {
        char *end;
        long v = strtol(s->prompts[i], &end, 10);
        if (!*s->prompts[i] || *end || v < 0 || v >= net->num_classes)
            return LG_FAIL(LG_ERR_USAGE, "\"%s\" is not a label between 0 and %d", s->prompts[i],
                           net->num_classes - 1);
        c->label[i] = (int32_t)v;
    }
    c->label[s->n] = net->num_classes;
    return 0;
}

/* ---- latents ---- */

/* Rows of the sampler's batch: prompts [first, first + P), padded with the unconditional row, then P
 * unconditional rows when guided. */
static void gather_rows(const struct lg_draw_spec *s, size_t row_bytes, const void *from, void *to,
                        int first, int batch)
{
    for (int i = 0; i < batch; i++) {
        int prompt = i < PICTURES_MAX && first + i < s->n ? first + i : s->n;
        memcpy((char *)to + (size_t)i * row_bytes, (const char *)from + (size_t)prompt * row_bytes,
               row_bytes);
    }
}

struct drawing {
    lg_sampler *sampler;
    lg_stream *stream;
    lg_tensor label, size, ratio;
    struct drawn_text {
        struct lg_port states, pooled;
        lg_tensor length;
    } text[LG_TEXTS_MAX];
    struct lg_port first_frame, out;
    int32_t *staging; // (B): labels or lengths
    void *weights;
};

static int load_weights(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                        struct drawing *d)
{
    lg_params params;
    float *weights;
    LG_TRY(lg_denoiser_params(net, &params));
    size_t count = params.count;
    lg_params_free(&params);
    LG_TRY(alloc(count, sizeof *weights, &weights));
    int rc = lg_whole_load(net, s->weights_dir, weights);
    if (rc == 0) rc = lg_put_weights(s->device, d->stream, weights, count, &d->weights);
    free(weights);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* The pictures' own size: what is wanted is one that was never larger. */
static int upload_size(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                       struct drawing *d)
{
    struct lg_vae_info vae;
    const int B = lg_sampler_batch(d->sampler);
    float *v;
    LG_TRY(lg_vae_info_read(s->vae_dir, &vae));
    const int numbers = lg_denoiser_numbers(net), height = net->height * vae.factor,
              width = net->width * vae.factor;
    const int number[] = {height, width, 0, 0, height, width}; /* it is whole */
    LG_TRY(alloc((size_t)B * (size_t)(numbers + 1), sizeof *v, &v));
    for (int i = 0; i < B; i++) {
        for (int k = 0; k < numbers; k++) v[numbers * i + k] = (float)number[k];
        v[numbers * B + i] = (float)net->height / (float)net->width;
    }
    d->size = lg_t2(NULL, LG_F32, B, numbers);
    int rc = device_alloc(s->device, &d->size);
    if (rc == 0) lg_stream_upload(d->stream, d->size.data, v, lg_tensor_bytes(&d->size));
    if (rc == 0 && lg_denoiser_has_ratio(net)) {
        d->ratio = lg_t1(NULL, LG_F32, B);
        rc = device_alloc(s->device, &d->ratio);
        if (rc == 0)
            lg_stream_upload(d->stream, d->ratio.data, v + numbers * B, lg_tensor_bytes(&d->ratio));
    }
    lg_stream_sync(d->stream);
    free(v);
    return rc;
}

static int open_text(const struct lg_draw_spec *s, const struct lg_denoiser_text *t, int64_t B,
                     struct drawn_text *ret)
{
    if (t->length)
        LG_TRY(lg_port_open(s->device, lg_t3(NULL, LG_F32, B, t->length, t->width), &ret->states));
    if (t->pooled) LG_TRY(lg_port_open(s->device, lg_t2(NULL, LG_F32, B, t->pooled), &ret->pooled));
    ret->length = lg_t1(NULL, LG_I32, B);
    return device_alloc(s->device, &ret->length);
}

static bool has_first(const struct lg_draw_spec *s)
{
    return s->first_frame && *s->first_frame;
}

static int open_first_frame(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                            struct drawing *d)
{
    const struct lg_first_frame_spec spec = {.device = s->device,
                                             .path = s->first_frame,
                                             .vae_dir = s->vae_dir,
                                             .channels = net->channels,
                                             .height = net->height,
                                             .width = net->width};
    const lg_tensor shape = lg_t4(NULL, LG_F32, 1, net->channels, net->height, net->width);
    float *latent;
    LG_TRY(lg_first_frame_encode(&spec, &latent));
    int rc = lg_port_open(s->device, shape, &d->first_frame);
    if (rc == 0) {
        memcpy(d->first_frame.host, latent, (size_t)lg_numel(&shape) * sizeof *latent);
        lg_port_put(&d->first_frame, d->stream);
        lg_stream_sync(d->stream);
    }
    free(latent);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int drawing_open(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                        struct drawing *d)
{
    const struct lg_sampler_spec spec = {.net = net,
                                         .pictures = PICTURES_MAX,
                                         .guided = s->guidance != 1 && !net->guidance,
                                         .has_first = has_first(s)};
    LG_TRY(lg_stream_open(s->device, &d->stream));
    if (has_first(s)) LG_TRY(open_first_frame(s, net, d));
    LG_TRY(lg_sampler_open(s->device, &spec, &d->sampler));
    LG_TRY(load_weights(s, net, d));
    const int64_t B = lg_sampler_batch(d->sampler);
    lg_tensor out =
        lg_t4(NULL, LG_F32, PICTURES_MAX, net->channels, lg_denoiser_rows(net), net->width);
    LG_TRY(lg_port_open(s->device, out, &d->out));
    LG_TRY(alloc((size_t)B, sizeof *d->staging, &d->staging));
    if (net->size_conditions) LG_TRY(upload_size(s, net, d));
    if (lg_denoiser_info(net->kind)->labels) {
        d->label = lg_t1(NULL, LG_I32, B);
        return device_alloc(s->device, &d->label);
    }
    for (int k = 0; k < net->n_texts; k++) LG_TRY(open_text(s, &net->text[k], B, &d->text[k]));
    return 0;
}

static void drawing_close(const struct lg_draw_spec *s, struct drawing *d)
{
    lg_device_free(s->device, &d->weights);
    lg_device_free(s->device, &d->label.data);
    lg_device_free(s->device, &d->size.data);
    lg_device_free(s->device, &d->ratio.data);
    for (int k = 0; k < LG_TEXTS_MAX; k++) {
        lg_port_close(s->device, &d->text[k].states);
        lg_port_close(s->device, &d->text[k].pooled);
        lg_device_free(s->device, &d->text[k].length.data);
    }
    lg_port_close(s->device, &d->first_frame);
    lg_port_close(s->device, &d->out);
    lg_sampler_close(&d->sampler);
    lg_stream_close(&d->stream);
    free(d->staging);
}

static void upload_port(const struct lg_draw_spec *s, struct drawing *d, const float *from,
                        struct lg_port *p, int first)
{
    if (!p->host) return;
    const size_t row = lg_tensor_bytes(&p->f32) / (size_t)p->f32.dim[0];
    gather_rows(s, row, from, p->host, first, (int)p->f32.dim[0]);
    lg_port_put(p, d->stream);
}

static void upload_ints(const struct lg_draw_spec *s, struct drawing *d, const int32_t *from,
                        const lg_tensor *to, int first)
{
    gather_rows(s, sizeof *d->staging, from, d->staging, first, (int)to->dim[0]);
    lg_stream_upload(d->stream, to->data, d->staging, lg_tensor_bytes(to));
    lg_stream_sync(d->stream);
}

/* The conditions of the pictures from `first` on. */
static void upload_rows(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                        const struct conditions *c, struct drawing *d, int first)
{
    const struct lg_denoiser_text_info *has;
    lg_denoiser_texts(net->kind, &has);
    if (d->label.data) upload_ints(s, d, c->label, &d->label, first);
    for (int k = 0; k < net->n_texts; k++) {
        struct drawn_text *t = &d->text[k];
        if (net->text[k].length)
            upload_port(s, d, c->text[k].out[has[k].states], &t->states, first);
        if (net->text[k].pooled)
            upload_port(s, d, c->text[k].out[has[k].pooled], &t->pooled, first);
        upload_ints(s, d, c->text[k].length, &t->length, first);
    }
    lg_stream_sync(d->stream);
}

/* One batch of pictures, from `first` on. */
static int draw_batch(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                      const struct conditions *c, struct drawing *d, int first)
{
    struct lg_sampler_run run = {.method = s->method,
                                 .steps = s->steps,
                                 .guidance = s->guidance,
                                 .seed = s->seed,
                                 .first = (uint64_t)first,
                                 .weights = d->weights,
                                 .first_frame = d->first_frame.device,
                                 .label = d->label,
                                 .size = d->size,
                                 .ratio = d->ratio};
    for (int k = 0; k < net->n_texts; k++)
        run.text[k] = (struct lg_text_states){.states = d->text[k].states.device,
                                              .pooled = d->text[k].pooled.device,
                                              .length = d->text[k].length};
    upload_rows(s, net, c, d, first);
    LG_TRY(lg_sampler_draw(d->sampler, d->stream, &run, d->out.device));
    lg_port_get(&d->out, d->stream);
    lg_stream_sync(d->stream);
    return 0;
}

/* latents: host (n, C, h, w). */
static int draw_latents(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                        const struct conditions *c, float *latents)
{
    struct drawing d = {0};
    int rc = drawing_open(s, net, &d);
    size_t per = (size_t)(net->channels * lg_denoiser_rows(net) * net->width);
    for (int first = 0; rc == 0 && first < s->n; first += PICTURES_MAX) {
        rc = draw_batch(s, net, c, &d, first);
        if (rc < 0) break;
        size_t rows = (size_t)LG_MIN(PICTURES_MAX, s->n - first);
        memcpy(latents + (size_t)first * per, d.out.host, rows * per * sizeof *latents);
    }
    drawing_close(s, &d);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* ---- pixels ---- */

static int decode(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                  float *latents, lg_pictures *ret)
{
    struct lg_vae_batches_spec spec = {.device = s->device, .dir = s->vae_dir};
    const int frames = lg_denoiser_frames(net);
    const size_t cells = (size_t)net->height * (size_t)net->width;
    const size_t values = (size_t)s->n * (size_t)(net->channels * frames) * cells;
    lg_vae_batches *vae = NULL;
    LG_TRY(lg_autoencoder_config_load(s->vae_dir, &spec.config));
    const struct lg_autoencoder_config *c = &spec.config;
    if (c->latent_channels != net->channels)
        return LG_FAIL(LG_ERR_MISMATCH, "%s has %d latent channels, the transformer %d", s->vae_dir,
                       c->latent_channels, net->channels);
    ret->n = s->n;
    ret->frames = (frames - 1) * c->factor_time + 1;
    ret->height = net->height * c->factor;
    ret->width = net->width * c->factor;
    spec.shape = (struct lg_autoencoder_shape){.half = LG_AEKL_DECODER,
                                               .batch = ret->frames > 1 ? 1 : DECODE_BATCH,
                                               .frames = ret->frames,
                                               .height = ret->height,
                                               .width = ret->width};
    for (size_t i = 0; i < values; i++)
        latents[i] = (float)((double)latents[i] / c->scaling_factor + c->shift_factor);
    const struct lg_decode_noise noise = {.vae_dir = s->vae_dir,
                                          .channels = net->channels,
                                          .values = values / (size_t)(s->n * net->channels),
                                          .seed = s->seed,
                                          .share = s->decode_noise < 0 ? s->decode_timestep
                                                                       : s->decode_noise};
    spec.decoding = (struct lg_decoding){.timestep = s->decode_timestep, .seed = s->seed};
    if (c->kind == LG_VAE_LTX && c->ltx.has_timestep && noise.share > 0)
        LG_TRY(lg_decode_noise_mix(&noise, latents, s->n));
    const size_t pixels = (size_t)ret->height * (size_t)ret->width;
    LG_TRY(alloc((size_t)(s->n * ret->frames) * 3, pixels, &ret->pixels));
    LG_TRY(lg_vae_batches_open(&spec, &vae));
    lg_vae_batches_decode(vae, latents, s->n, NULL, ret->pixels);
    lg_vae_batches_close(&vae);
    return 0;
}

/* What was asked for, in cells of the latent. */
static int resize_net(const struct lg_draw_spec *s, struct lg_denoiser_config *net)
{
    struct lg_vae_info vae;
    if (!s->frames && !s->height && !s->width) return 0;
    LG_TRY(lg_vae_info_load(s->vae_dir, &vae));
    const int unit = vae.factor * net->patch;
    if (s->height % unit || s->width % unit)
        return LG_FAIL(LG_ERR_USAGE,
                       "%d x %d pixels: with %s and patches of %d cells sides are multiples of %d",
                       s->height, s->width, s->vae_dir, net->patch, unit);
    if (s->height) net->height = s->height / vae.factor;
    if (s->width) net->width = s->width / vae.factor;
    if (s->frames && !(net->frames = lg_vae_latent_frames(&vae, s->frames)))
        return LG_FAIL(LG_ERR_USAGE, "%d frames: with %s it is a multiple of %d, and one more",
                       s->frames, s->vae_dir, vae.factor_time);
    return 0;
}

int lg_draw(const struct lg_draw_spec *s, lg_pictures *ret)
{
    struct lg_denoiser_config net;
    struct conditions c = {0};
    float *latents = NULL;
    int rc;
    *ret = (lg_pictures){0};
    LG_TRY(lg_whole_config_load(s->weights_dir, &net));
    LG_TRY(resize_net(s, &net));
    if (has_first(s) && lg_denoiser_frames(&net) < 2)
        return LG_FAIL(LG_ERR_USAGE,
                       "a first frame, %s, is for clips of several latent frames; "
                       "this model draws pictures, or --frames is too few",
                       s->first_frame);
    LG_TRY_GOTO(rc,
                lg_denoiser_info(net.kind)->labels ? parse_labels(s, &net, &c)
                                                   : encode_texts(s, &net, &c),
                out);
    LG_TRY_GOTO(rc,
                alloc((size_t)s->n * (size_t)(net.channels * lg_denoiser_rows(&net) * net.width),
                      sizeof *latents, &latents),
                out);
    LG_TRY_GOTO(rc, draw_latents(s, &net, &c, latents), out);
    LG_TRY_GOTO(rc, decode(s, &net, latents, ret), out);
out:
    if (rc < 0) lg_pictures_free(ret);
    conditions_free(&c);
    free(latents);
    return rc;
}
