/* Encoders over any number of samples; see batches.h. Each batch passes through one host buffer per
 * tensor, zeroed beyond the last sample. */
#include "stages/encode/batches.h"
#include "stages/encode/port.h"
#include "stages/stored.h"
#include <stdlib.h>
#include <string.h>

enum { SLICE_PIXELS = 1 << 20 };

/* Elements of one sample. */
static size_t sample_of(const struct lg_port *p)
{
    return (size_t)(lg_numel(&p->f32) / p->f32.dim[0]);
}

/* n samples to the device, zeros behind them. */
static void put(struct lg_port *p, lg_stream *s, const float *values, int64_t n)
{
    size_t count = (size_t)n * sample_of(p), all = (size_t)lg_numel(&p->f32);
    memcpy(p->host, values, count * sizeof *values);
    memset(p->host + count, 0, (all - count) * sizeof *values);
    lg_port_put(p, s);
}

/* ---- pictures ---- */

struct lg_vae_batches {
    lg_device *device;
    lg_stream *stream;
    lg_autoencoder *net;
    void *weights;
    int64_t batch;
    struct lg_decoding decoding;
    struct lg_port mean, logvar, image; /* mean is the decoder's input */
    lg_tensor pixels;                   // (B, 3, F H, W)
    uint8_t *host_pixels;
};

static int vae_weights(lg_vae_batches *b, const struct lg_vae_batches_spec *spec)
{
    lg_params t = {0};
    float *w = NULL;
    int rc;
    LG_TRY_GOTO(rc, lg_autoencoder_params(&spec->config, spec->shape.half, &t), out);
    w = malloc(t.count * sizeof *w);
    if (!w) {
        rc = LG_FAIL(LG_ERR_NOSPACE, "no memory for the %zu weights of %s", t.count, spec->dir);
        goto out;
    }
    LG_TRY_GOTO(rc, lg_autoencoder_load(&spec->config, spec->dir, spec->shape.half, w), out);
    LG_TRY_GOTO(rc, lg_put_weights(b->device, b->stream, w, t.count, &b->weights), out);
out:
    free(w);
    lg_params_free(&t);
    return rc;
}

static int vae_ports(lg_vae_batches *b, const struct lg_vae_batches_spec *spec)
{
    const struct lg_autoencoder_shape *s = &spec->shape;
    const int f = spec->config.factor, frames = LG_MAX(s->frames, 1);
    const int latents = lg_autoencoder_latent_frames(&spec->config, frames);
    lg_tensor latent = lg_t4(NULL, LG_F32, s->batch, spec->config.latent_channels,
                             latents * (s->height / f), s->width / f);
    b->pixels = lg_t4(NULL, LG_U8, s->batch, 3, (int64_t)frames * s->height, s->width);
    LG_TRY(lg_port_open(b->device, latent, &b->mean));
    if (s->half & LG_AEKL_DECODER) LG_TRY(lg_port_open(b->device, b->pixels, &b->image));
    if (s->half & LG_AEKL_ENCODER) LG_TRY(lg_port_open(b->device, latent, &b->logvar));
    LG_TRY(lg_device_alloc(b->device, lg_tensor_bytes(&b->pixels), &b->pixels.data));
    b->host_pixels = malloc(lg_tensor_bytes(&b->pixels));
    if (!b->host_pixels) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a batch of pictures");
    return 0;
}

static int vae_open(lg_vae_batches *b, const struct lg_vae_batches_spec *spec)
{
    struct lg_autoencoder_shape shape = spec->shape;
    b->device = spec->device;
    b->batch = shape.batch;
    b->decoding = spec->decoding;
    if (!shape.slice && shape.frames > 1) {
        shape.slice = lg_autoencoder_slice(&spec->config, shape.height, shape.width);
    } else if (!shape.slice) {
        int64_t fit = SLICE_PIXELS / ((int64_t)shape.height * shape.width);
        shape.slice = (int)LG_MAX(1, LG_MIN(fit, shape.batch));
    }
    LG_TRY(
        lg_autoencoder_open_all(b->device, &spec->config, &shape, 1, &b->net)); /* checks sizes */
    LG_TRY(lg_stream_open(b->device, &b->stream));
    LG_TRY(vae_weights(b, spec));
    LG_TRY(vae_ports(b, spec));
    return 0;
}

int lg_vae_batches_open(const struct lg_vae_batches_spec *spec, lg_vae_batches **ret)
{
    lg_vae_batches *b = calloc(1, sizeof *b);
    if (!b) return LG_FAIL(LG_ERR_NOSPACE, "no memory for an autoencoder");
    int rc = vae_open(b, spec);
    if (rc < 0) {
        lg_vae_batches_close(&b);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = b;
    return 0;
}

void lg_vae_batches_close(lg_vae_batches **b)
{
    if (!*b) return;
    lg_vae_batches *v = *b;
    lg_autoencoder_close(&v->net);
    if (v->stream) lg_stream_close(&v->stream);
    lg_port_close(v->device, &v->mean);
    lg_port_close(v->device, &v->logvar);
    lg_port_close(v->device, &v->image);
    lg_device_free(v->device, &v->pixels.data);
    lg_device_free(v->device, &v->weights);
    free(v->host_pixels);
    free(v);
    *b = NULL;
}

void lg_vae_batches_encode(lg_vae_batches *b, const uint8_t *pixels, int64_t n, float *ret_mean,
                           float *ret_logvar)
{
    size_t picture = lg_tensor_bytes(&b->pixels) / (size_t)b->batch, latent = sample_of(&b->mean);
    for (int64_t first = 0; first < n; first += b->batch) {
        size_t at = (size_t)first, count = (size_t)LG_MIN(b->batch, n - first);
        memset(b->host_pixels, 0, lg_tensor_bytes(&b->pixels));
        memcpy(b->host_pixels, pixels + at * picture, count * picture);
        lg_stream_upload(b->stream, b->pixels.data, b->host_pixels, lg_tensor_bytes(&b->pixels));
        lg_autoencoder_encode(b->net, b->stream, b->weights, b->pixels, b->mean.device,
                              b->logvar.device);
        lg_port_get(&b->mean, b->stream);
        lg_port_get(&b->logvar, b->stream);
        lg_stream_sync(b->stream);
        memcpy(ret_mean + at * latent, b->mean.host, count * latent * sizeof(float));
        memcpy(ret_logvar + at * latent, b->logvar.host, count * latent * sizeof(float));
    }
}

void lg_vae_batches_decode(lg_vae_batches *b, const float *latent, int64_t n, float *ret_image,
                           uint8_t *ret_pixels)
{
    size_t picture = sample_of(&b->image);
    for (int64_t first = 0; first < n; first += b->batch) {
        size_t at = (size_t)first * picture, count = (size_t)LG_MIN(b->batch, n - first);
        struct lg_decoding decoding = b->decoding;
        decoding.first += (uint64_t)first;
        lg_autoencoder_set_decoding(b->net, &decoding);
        put(&b->mean, b->stream, latent + (size_t)first * sample_of(&b->mean), (int64_t)count);
        lg_autoencoder_decode(b->net, b->stream, b->weights, b->mean.device, b->image.device,
                              b->pixels);
        lg_port_get(&b->image, b->stream);
        lg_stream_download(b->stream, b->host_pixels, b->pixels.data, lg_tensor_bytes(&b->pixels));
        lg_stream_sync(b->stream);
        if (ret_image) memcpy(ret_image + at, b->image.host, count * picture * sizeof(float));
        if (ret_pixels) memcpy(ret_pixels + at, b->host_pixels, count * picture);
    }
}

/* ---- captions ---- */

struct lg_text_batches {
    lg_device *device;
    lg_stream *stream;
    lg_text_encoder *net;
    void *weights;
    int64_t batch, length;
    struct lg_text_encoder_config config;
    bool attends_padding;
    lg_tensor ids, lengths, ends; // (B, L), (B), (B)
    int32_t *host_ids, *host_lengths, *host_ends;
    struct lg_port out[LG_TEXT_OUTPUTS]; /* those that are wanted */
};

static bool is_of_caption(lg_text_output k)
{
    return k == LG_TEXT_POOLED || k == LG_TEXT_EMBEDS;
}

static int text_weights(lg_text_batches *b, const struct lg_text_batches_spec *spec)
{
    lg_params t = {0};
    float *w = NULL;
    int rc;
    LG_TRY_GOTO(rc, lg_text_encoder_params(&spec->config, 0, 1, &t), out);
    w = malloc(t.count * sizeof *w);
    if (!w) {
        rc = LG_FAIL(LG_ERR_NOSPACE, "no memory for the %zu weights of %s", t.count, spec->dir);
        goto out;
    }
    LG_TRY_GOTO(rc, lg_text_encoder_load(&spec->config, spec->dir, 0, 1, w), out);
    LG_TRY_GOTO(
        rc,
        lg_device_alloc(b->device, lg_stored_bytes(&t, lg_device_dtype(b->device)), &b->weights),
        out);
    const struct lg_stored_piece all = {
        .table = &t, .values = w, .count = t.count, .memory = b->weights};
    LG_TRY_GOTO(rc, lg_stored_put(b->device, &all), out);
out:
    free(w);
    lg_params_free(&t);
    return rc;
}

static int text_open(lg_text_batches *b, const struct lg_text_batches_spec *spec)
{
    int64_t B = b->batch = spec->batch, L = b->length = spec->length;
    b->device = spec->device;
    const unsigned outputs = spec->outputs ? spec->outputs : LG_TEXT_BIT(LG_TEXT_STATES);
    const struct lg_text_encoder_shape shape = {
        .batch = (int)B, .length = (int)L, .outputs = outputs};
    const struct lg_text_encoder_sizes z = lg_text_encoder_sizes(&spec->config);
    b->config = spec->config;
    b->attends_padding = spec->attends_padding;
    LG_TRY(lg_text_encoder_open(b->device, &spec->config, &shape, 1, &b->net));
    LG_TRY(lg_stream_open(b->device, &b->stream));
    LG_TRY(text_weights(b, spec));
    b->ids = lg_t2(NULL, LG_I32, B, L);
    b->lengths = lg_t1(NULL, LG_I32, B);
    b->ends = lg_t1(NULL, LG_I32, B);
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++) {
        const int width = k == LG_TEXT_EMBEDS ? z.projection : z.width;
        if (!(outputs & LG_TEXT_BIT(k))) continue;
        lg_tensor shape_of = is_of_caption((lg_text_output)k) ? lg_t2(NULL, LG_F32, B, width)
                                                              : lg_t3(NULL, LG_F32, B, L, width);
        LG_TRY(lg_port_open(b->device, shape_of, &b->out[k]));
    }
    LG_TRY(lg_device_alloc(b->device, lg_tensor_bytes(&b->ends), &b->ends.data));
    LG_TRY(lg_device_alloc(b->device, lg_tensor_bytes(&b->ids), &b->ids.data));
    LG_TRY(lg_device_alloc(b->device, lg_tensor_bytes(&b->lengths), &b->lengths.data));
    b->host_ids = malloc(lg_tensor_bytes(&b->ids));
    b->host_lengths = malloc(lg_tensor_bytes(&b->lengths));
    b->host_ends = malloc(lg_tensor_bytes(&b->ends));
    if (!b->host_ids || !b->host_lengths || !b->host_ends)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for a batch of captions");
    return 0;
}

int lg_text_batches_open(const struct lg_text_batches_spec *spec, lg_text_batches **ret)
{
    lg_text_batches *b = calloc(1, sizeof *b);
    if (!b) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a text encoder");
    int rc = text_open(b, spec);
    if (rc < 0) {
        lg_text_batches_close(&b);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = b;
    return 0;
}

void lg_text_batches_close(lg_text_batches **b)
{
    if (!*b) return;
    lg_text_batches *t = *b;
    lg_text_encoder_close(&t->net);
    if (t->stream) lg_stream_close(&t->stream);
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++) lg_port_close(t->device, &t->out[k]);
    lg_device_free(t->device, &t->ends.data);
    lg_device_free(t->device, &t->ids.data);
    lg_device_free(t->device, &t->lengths.data);
    lg_device_free(t->device, &t->weights);
    free(t->host_ids);
    free(t->host_lengths);
    free(t->host_ends);
    free(t);
    *b = NULL;
}

/* Rows beyond the last caption get one end token: the attention needs a key. */
static void fill_batch(lg_text_batches *b, const int32_t *ids, int64_t count)
{
    for (int64_t i = 0; i < b->batch; i++) {
        int32_t *row = b->host_ids + i * b->length;
        memset(row, 0, (size_t)b->length * sizeof *row);
        row[0] = 1;
        if (i < count) memcpy(row, ids + i * b->length, (size_t)b->length * sizeof *row);
        int32_t n = 0;
        while (n < b->length && row[n]) n++;
        b->host_lengths[i] = b->attends_padding ? (int32_t)b->length : n;
        if (b->config.kind == LG_TEXT_CLIP)
            b->host_ends[i] =
                (int32_t)(i * b->length) + lg_clip_end(&b->config.clip, row, (int)b->length);
    }
}

void lg_text_batches_encode_all(lg_text_batches *b, const int32_t *ids, int64_t n,
                                float *const ret[LG_TEXT_OUTPUTS])
{
    struct lg_text_io io = {.ids = b->ids, .length = b->lengths, .ends = b->ends};
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++) io.out[k] = b->out[k].device;
    for (int64_t first = 0; first < n; first += b->batch) {
        int64_t count = LG_MIN(b->batch, n - first);
        fill_batch(b, ids + first * b->length, count);
        lg_stream_upload(b->stream, b->ids.data, b->host_ids, lg_tensor_bytes(&b->ids));
        lg_stream_upload(b->stream, b->lengths.data, b->host_lengths, lg_tensor_bytes(&b->lengths));
        lg_stream_upload(b->stream, b->ends.data, b->host_ends, lg_tensor_bytes(&b->ends));
        lg_text_encoder_forward(b->net, b->stream, (const void *const[]){b->weights}, &io);
        for (int k = 0; k < LG_TEXT_OUTPUTS; k++)
            if (b->out[k].host) lg_port_get(&b->out[k], b->stream);
        lg_stream_sync(b->stream);
        for (int k = 0; k < LG_TEXT_OUTPUTS; k++) {
            if (!b->out[k].host) continue;
            const size_t sample = sample_of(&b->out[k]);
            memcpy(ret[k] + (size_t)first * sample, b->out[k].host,
                   (size_t)count * sample * sizeof(float));
        }
    }
}

void lg_text_batches_encode(lg_text_batches *b, const int32_t *ids, int64_t n, float *ret_states)
{
    lg_text_batches_encode_all(b, ids, n,
                               (float *const[LG_TEXT_OUTPUTS]){[LG_TEXT_STATES] = ret_states});
}
