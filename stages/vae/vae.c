/* The VAE stage: pixels -> mean and log-variance of the latent.
 *
 * Instances are data parallel: each claims whole chunks. The weights lie once in the region
 * vae/0/weights, filled by whoever comes first. A chunk always runs at the same padded shape and a
 * picture always at the same row of it (`slice` rows in flight at once), so its bits depend on
 * nothing else. */
#include "base/log.h"
#include "stages/nets/autoencoder_kl.h"
#include "stages/roles.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct vae {
    struct lg_aekl_config net_config;
    lg_device *device;
    lg_stream *stream;
    lg_aekl *net;
    lg_window *window;
    const void *weights;
    lg_tensor pixels, mean, logvar;
    uint8_t *host_pixels;           // (B, 3, S, S)
    float *host_mean, *host_logvar; // (B, C, h, h)
};

static struct lg_aekl_shape shape_of(const lg_config *c, const lg_plan *p)
{
    return (struct lg_aekl_shape){.half = LG_AEKL_ENCODER,
                                  .batch = p->vae_chunk,
                                  .height = p->image_size,
                                  .width = p->image_size,
                                  .slice = (int)c->vae_slice};
}

static int weights_count(const struct lg_aekl_config *c, size_t *ret)
{
    lg_params t;
    LG_TRY(lg_aekl_params(c, LG_AEKL_ENCODER, &t));
    *ret = t.count;
    lg_params_free(&t);
    return 0;
}

static int vae_bytes(const lg_config *c, const lg_plan *p, struct lg_stage_bytes *rows, int cap,
                     int *ret_n)
{
    struct lg_aekl_config net;
    struct lg_aekl_shape shape = shape_of(c, p);
    size_t count, activations;
    lg_device *d;
    *ret_n = 0;
    if (!p->instances[LG_ROLE_vae]) return 0;
    LG_ASSERT(cap >= 2);
    LG_TRY(lg_aekl_config_load(c->vae_model, &net));
    LG_TRY(weights_count(&net, &count));
    LG_TRY(lg_device_open(c->_device, NULL, &d));
    int rc = lg_aekl_plan(d, &net, &shape, &activations);
    lg_device_close(&d);
    LG_TRY(rc);
    snprintf(rows[0].name, sizeof rows[0].name, "vae/0/weights");
    rows[0].bytes = count * sizeof(float);
    snprintf(rows[1].name, sizeof rows[1].name, "private");
    rows[1].bytes = (size_t)p->instances[LG_ROLE_vae] * activations;
    *ret_n = 2;
    return 0;
}

static int fill_weights(lg_stage *st, void *payload, void *arg)
{
    const struct vae *v = st->state;
    lg_log(LG_INFO, "reading the encoder from %s", st->config->vae_model);
    return lg_aekl_load(&v->net_config, st->config->vae_model, LG_AEKL_ENCODER, payload);
}

static int vae_open(lg_stage *st)
{
    struct vae *v = calloc(1, sizeof *v);
    LG_ASSERT(v);
    st->state = v;
    const lg_plan *p = &st->plan;
    const int64_t B = p->vae_chunk, S = p->image_size, C = p->latent_channels, h = p->latent_size;
    struct lg_aekl_shape shape = shape_of(st->config, p);
    size_t count;
    lg_region *r;
    LG_TRY(lg_aekl_config_load(st->config->vae_model, &v->net_config));
    LG_TRY(lg_stage_window(st, &v->window));
    LG_TRY(weights_count(&v->net_config, &count));
    LG_TRY(lg_stage_region(st, count * sizeof(float), &r, "vae/0/weights"));
    LG_TRY(lg_stage_fill(st, r, fill_weights, NULL));
    v->weights = r->payload;
    LG_TRY(lg_stage_device(st, &v->device));
    LG_TRY(lg_stream_open(v->device, &v->stream));
    LG_TRY(lg_aekl_open(v->device, &v->net_config, &shape, &v->net));
    void *pixels, *mean, *logvar;
    LG_TRY(lg_device_alloc(v->device, (size_t)(B * 3 * S * S), &pixels));
    LG_TRY(lg_device_alloc(v->device, (size_t)(B * C * h * h) * sizeof(float), &mean));
    LG_TRY(lg_device_alloc(v->device, (size_t)(B * C * h * h) * sizeof(float), &logvar));
    v->pixels = lg_t4(pixels, LG_U8, B, 3, S, S);
    v->mean = lg_t4(mean, LG_F32, B, C, h, h);
    v->logvar = lg_t4(logvar, LG_F32, B, C, h, h);
    v->host_pixels = calloc(lg_tensor_bytes(&v->pixels), 1);
    v->host_mean = calloc(lg_tensor_bytes(&v->mean), 1);
    v->host_logvar = calloc(lg_tensor_bytes(&v->mean), 1);
    LG_ASSERT(v->host_pixels && v->host_mean && v->host_logvar);
    return 0;
}

static int encode(lg_stage *st, struct vae *v, const struct lg_claim *claim)
{
    lg_window *w = v->window;
    bool wanted[4096];
    int n_wanted = 0;
    LG_ASSERT(claim->count <= LG_ARRAY_LEN(wanted));
    for (uint64_t i = 0; i < claim->count; i++) {
        wanted[i] = lg_window_wanted(w, claim, LG_FIELD_LATENT, claim->n + i);
        if (!wanted[i]) continue;
        memcpy(v->host_pixels + i * w->g.pixels_bytes,
               w->pixels + (claim->n + i) % w->g.slots * w->g.pixels_bytes, w->g.pixels_bytes);
        n_wanted++;
    }
    lg_stream_upload(v->stream, v->pixels.data, v->host_pixels, lg_tensor_bytes(&v->pixels));
    lg_aekl_encode(v->net, v->stream, v->weights, v->pixels, v->mean, v->logvar);
    lg_stream_download(v->stream, v->host_mean, v->mean.data, lg_tensor_bytes(&v->mean));
    lg_stream_download(v->stream, v->host_logvar, v->logvar.data, lg_tensor_bytes(&v->logvar));
    lg_stream_sync(v->stream);
    const size_t half = w->g.latent_bytes / 2;
    for (uint64_t i = 0; i < claim->count; i++) {
        if (!wanted[i]) continue;
        uint8_t *to = w->latent + (claim->n + i) % w->g.slots * w->g.latent_bytes;
        memcpy(to, (uint8_t *)v->host_mean + i * half, half);
        memcpy(to + half, (uint8_t *)v->host_logvar + i * half, half);
        lg_window_publish(w, LG_FIELD_LATENT, claim->n + i);
    }
    return n_wanted;
}

static int vae_step(lg_stage *st)
{
    struct vae *v = st->state;
    struct lg_claim claim;
    uint64_t end = lg_stage_end(st);
    int rc = lg_window_claim(v->window, st->board, st->me, LG_FIELD_LATENT, 1u << LG_FIELD_SOURCE,
                             end, &claim);
    if (rc == LG_ERR_BUSY || rc == LG_ERR_STOP) return LG_STEP_IDLE;
    LG_TRY(rc);
    int n = encode(st, v, &claim);
    atomic_fetch_add_explicit(&st->row->samples, (uint64_t)n, memory_order_relaxed);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static void vae_close(lg_stage *st)
{
    struct vae *v = st->state;
    lg_aekl_close(&v->net);
    lg_stream_close(&v->stream);
    lg_device_close(&v->device);
    lg_window_close(&v->window);
    free(v->host_pixels);
    free(v->host_mean);
    free(v->host_logvar);
    free(v);
    st->state = NULL;
}

const struct lg_stage_def lg_vae_def = {
    .role = LG_ROLE_vae,
    .bytes = vae_bytes,
    .open = vae_open,
    .step = vae_step,
    .close = vae_close,
};
