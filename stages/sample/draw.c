/* Drawing pictures; see draw.h. One function per stage of the way; each opens what it needs and closes
 * it again, so that only one net is in memory at a time. */
#include "stages/sample/draw.h"
#include "base/fs.h"
#include "config/models.h"
#include "stages/encode/batches.h"
#include "stages/encode/port.h"
#include "stages/io/picture.h"
#include "stages/io/tokenizer.h"
#include "stages/nets/adapter_file.h"
#include "stages/nets/denoiser.h"
#include "stages/nets/sampler.h"
#include <stdlib.h>
#include <string.h>

enum { PICTURES_MAX = 8, TEXT_BATCH = 8, DECODE_BATCH = 4, GAP = 2 };

/* Conditions of all prompts, then one row for the unconditional half. */
struct conditions {
    float *text;          // (n + 1, L, E)
    int32_t *text_length; // (n + 1)
    int32_t *label;       // (n + 1)
};

static void conditions_free(struct conditions *c)
{
    free(c->text);
    free(c->text_length);
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

static int tokenize(const struct lg_draw_spec *s, int32_t *ids, int32_t *length)
{
    lg_tokenizer *t = NULL;
    LG_TRY(lg_tokenizer_open(s->text_dir, &t));
    int rc = 0;
    for (int i = 0; i <= s->n && rc == 0; i++) {
        int n;
        rc = lg_tokenizer_encode(t, i < s->n ? s->prompts[i] : s->negative, s->text_length,
                                 ids + (size_t)i * (size_t)s->text_length, &n);
        length[i] = n;
    }
    lg_tokenizer_close(&t);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int encode_text(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                       struct conditions *c)
{
    struct lg_text_batches_spec spec = {
        .device = s->device, .dir = s->text_dir, .batch = TEXT_BATCH, .length = s->text_length};
    lg_text_batches *encoder = NULL;
    int32_t *ids = NULL;
    int rc;
    LG_TRY(lg_text_encoder_config_load(s->text_dir, &spec.config));
    const int width = lg_text_encoder_sizes(&spec.config).width;
    if (width != net->text[0].width)
        return LG_FAIL(LG_ERR_MISMATCH, "%s has width %d, the transformer wants %d", s->text_dir,
                       width, net->text[0].width);
    size_t rows = (size_t)s->n + 1, L = (size_t)s->text_length;
    LG_TRY_GOTO(rc, alloc(rows * L, sizeof *ids, &ids), out);
    LG_TRY_GOTO(rc, alloc(rows * L * (size_t)net->text[0].width, sizeof(float), &c->text), out);
    LG_TRY_GOTO(rc, alloc(rows, sizeof(int32_t), &c->text_length), out);
    LG_TRY_GOTO(rc, tokenize(s, ids, c->text_length), out);
    LG_TRY_GOTO(rc, lg_text_batches_open(&spec, &encoder), out);
    lg_text_batches_encode(encoder, ids, (int64_t)rows, c->text);
out:
    lg_text_batches_close(&encoder);
    free(ids);
    return rc;
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
    lg_tensor label, text_length, size, ratio;
    struct lg_port text, out;
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
    struct lg_aekl_config vae;
    const int B = lg_sampler_batch(d->sampler);
    float *v;
    LG_TRY(lg_aekl_config_load(s->vae_dir, &vae));
    LG_TRY(alloc((size_t)B * 3, sizeof *v, &v));
    for (int i = 0; i < B; i++) {
        v[2 * i] = (float)(net->height * lg_aekl_factor(&vae));
        v[2 * i + 1] = (float)(net->width * lg_aekl_factor(&vae));
        v[2 * B + i] = (float)net->height / (float)net->width;
    }
    d->size = lg_t2(NULL, LG_F32, B, 2);
    d->ratio = lg_t1(NULL, LG_F32, B);
    int rc = device_alloc(s->device, &d->size);
    if (rc == 0) rc = device_alloc(s->device, &d->ratio);
    if (rc == 0) {
        lg_stream_upload(d->stream, d->size.data, v, lg_tensor_bytes(&d->size));
        lg_stream_upload(d->stream, d->ratio.data, v + 2 * B, lg_tensor_bytes(&d->ratio));
        lg_stream_sync(d->stream);
    }
    free(v);
    return rc;
}

static int drawing_open(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                        struct drawing *d)
{
    LG_TRY(lg_sampler_open(s->device, net, PICTURES_MAX, s->guidance != 1, &d->sampler));
    LG_TRY(lg_stream_open(s->device, &d->stream));
    LG_TRY(load_weights(s, net, d));
    const int64_t B = lg_sampler_batch(d->sampler);
    lg_tensor out = lg_t4(NULL, LG_F32, PICTURES_MAX, net->channels, net->height, net->width);
    LG_TRY(lg_port_open(s->device, out, &d->out));
    LG_TRY(alloc((size_t)B, sizeof *d->staging, &d->staging));
    if (net->size_conditions) LG_TRY(upload_size(s, net, d));
    if (lg_denoiser_info(net->kind)->labels) {
        d->label = lg_t1(NULL, LG_I32, B);
        return device_alloc(s->device, &d->label);
    }
    lg_tensor text = lg_t3(NULL, LG_F32, B, net->text[0].length, net->text[0].width);
    LG_TRY(lg_port_open(s->device, text, &d->text));
    d->text_length = lg_t1(NULL, LG_I32, B);
    return device_alloc(s->device, &d->text_length);
}

static void drawing_close(const struct lg_draw_spec *s, struct drawing *d)
{
    lg_device_free(s->device, &d->weights);
    lg_device_free(s->device, &d->label.data);
    lg_device_free(s->device, &d->text_length.data);
    lg_device_free(s->device, &d->size.data);
    lg_device_free(s->device, &d->ratio.data);
    lg_port_close(s->device, &d->text);
    lg_port_close(s->device, &d->out);
    lg_sampler_close(&d->sampler);
    lg_stream_close(&d->stream);
    free(d->staging);
}

/* The conditions of the pictures from `first` on. */
static void upload_rows(const struct lg_draw_spec *s, const struct conditions *c, struct drawing *d,
                        int first)
{
    const lg_tensor *whole = d->label.data ? &d->label : &d->text_length;
    gather_rows(s, sizeof *d->staging, d->label.data ? c->label : c->text_length, d->staging, first,
                (int)whole->dim[0]);
    lg_stream_upload(d->stream, whole->data, d->staging, lg_tensor_bytes(whole));
    if (d->text.host) {
        const lg_tensor *text = &d->text.f32;
        size_t row = lg_tensor_bytes(text) / (size_t)text->dim[0];
        gather_rows(s, row, c->text, d->text.host, first, (int)text->dim[0]);
        lg_port_put(&d->text, d->stream);
    }
    lg_stream_sync(d->stream);
}

/* latents: host (n, C, h, w). */
static int draw_latents(const struct lg_draw_spec *s, const struct lg_denoiser_config *net,
                        const struct conditions *c, float *latents)
{
    struct drawing d = {0};
    int rc = drawing_open(s, net, &d);
    size_t per = (size_t)(net->channels * net->height * net->width);
    for (int first = 0; rc == 0 && first < s->n; first += PICTURES_MAX) {
        upload_rows(s, c, &d, first);
        rc = lg_sampler_draw(
            d.sampler, d.stream,
            &(struct lg_sampler_run){.method = s->method,
                                     .steps = s->steps,
                                     .guidance = s->guidance,
                                     .seed = s->seed,
                                     .first = (uint64_t)first,
                                     .weights = d.weights,
                                     .label = d.label,
                                     .text = {{.states = d.text.device, .length = d.text_length}},
                                     .size = d.size,
                                     .ratio = d.ratio},
            d.out.device);
        if (rc < 0) break;
        size_t rows = (size_t)LG_MIN(PICTURES_MAX, s->n - first);
        lg_port_get(&d.out, d.stream);
        lg_stream_sync(d.stream);
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
    const size_t values = (size_t)s->n * (size_t)(net->channels * net->height * net->width);
    lg_vae_batches *vae = NULL;
    LG_TRY(lg_aekl_config_load(s->vae_dir, &spec.config));
    const struct lg_aekl_config *c = &spec.config;
    if (c->latent_channels != net->channels)
        return LG_FAIL(LG_ERR_MISMATCH, "%s has %d latent channels, the transformer %d", s->vae_dir,
                       c->latent_channels, net->channels);
    ret->n = s->n;
    ret->size = net->height * lg_aekl_factor(c);
    spec.shape = (struct lg_aekl_shape){
        .half = LG_AEKL_DECODER, .batch = DECODE_BATCH, .height = ret->size, .width = ret->size};
    for (size_t i = 0; i < values; i++)
        latents[i] = (float)((double)latents[i] / c->scaling_factor + c->shift_factor);
    LG_TRY(alloc((size_t)s->n * 3 * (size_t)ret->size, (size_t)ret->size, &ret->pixels));
    LG_TRY(lg_vae_batches_open(&spec, &vae));
    lg_vae_batches_decode(vae, latents, s->n, NULL, ret->pixels);
    lg_vae_batches_close(&vae);
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
    if (lg_denoiser_info(net.kind)->text)
        net.text[0].length = s->text_length; /* not in diffusers' config */
    LG_TRY_GOTO(rc,
                lg_denoiser_info(net.kind)->labels ? parse_labels(s, &net, &c)
                                                   : encode_text(s, &net, &c),
                out);
    LG_TRY_GOTO(rc,
                alloc((size_t)s->n * (size_t)(net.channels * net.height * net.width),
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

void lg_pictures_free(lg_pictures *p)
{
    free(p->pixels);
    *p = (lg_pictures){0};
}

int lg_pictures_save_grid(const lg_pictures *p, int columns, const char *path)
{
    if (columns <= 0)
        for (columns = 1; columns * columns < p->n;) columns++;
    columns = LG_MIN(columns, p->n);
    const int rows = (p->n + columns - 1) / columns, cell = p->size + 2 * GAP;
    const int width = columns * cell, height = rows * cell;
    uint8_t *rgb, *png = NULL;
    size_t bytes;
    LG_TRY(alloc((size_t)width * (size_t)height, 3, &rgb));
    memset(rgb, 255, (size_t)width * (size_t)height * 3);
    for (int i = 0; i < p->n; i++)
        for (int c = 0; c < 3; c++)
            for (int y = 0; y < p->size; y++)
                for (int x = 0; x < p->size; x++) {
                    size_t at = (size_t)(i / columns * cell + GAP + y) * (size_t)width +
                                (size_t)(i % columns * cell + GAP + x);
                    rgb[at * 3 + (size_t)c] =
                        p->pixels[((size_t)(i * 3 + c) * (size_t)p->size + (size_t)y) *
                                      (size_t)p->size +
                                  (size_t)x];
                }
    int rc = lg_picture_encode_png(rgb, width, height, &png, &bytes);
    if (rc == 0) rc = lg_publish_file(path, png, bytes);
    free(rgb);
    free(png);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
