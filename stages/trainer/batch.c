/* One micro-batch; see batch.h. Payloads are gathered from the ring of slots into one host staging
 * block laid out like the device block, and travel in one copy. */
#include "stages/trainer/batch.h"
#include "kernels/ops.h"
#include <stdlib.h>
#include <string.h>

/* Offsets in the staging block, in bytes, each a multiple of 64. */
struct layout {
    size_t mean, logvar, n, coef, t, weight, label, text, text_length,
        uploaded;              /* host and device */
    size_t x_t, target, total; /* device only */
};

struct lg_batch {
    struct lg_denoiser_config net;
    int64_t size; /* B */
    struct layout at;
    char *host, *device;
    struct lg_batch_tensors tensors;
};

static size_t take(size_t *used, size_t bytes)
{
    size_t at = *used;
    *used += (bytes + 63) / 64 * 64;
    return at;
}

static struct layout layout_of(const struct lg_denoiser_config *net, int64_t size)
{
    size_t B = (size_t)size, used = 0, f = sizeof(float);
    size_t latent = B * (size_t)(net->channels * net->height * net->width) * f;
    struct layout l = {0};
    l.mean = take(&used, latent);
    l.logvar = take(&used, latent);
    l.n = take(&used, B * sizeof(int64_t));
    l.coef = take(&used, B * 4 * f);
    l.t = take(&used, B * f);
    l.weight = take(&used, B * f);
    l.label = take(&used, B * sizeof(int32_t));
    l.text_length = take(&used, B * sizeof(int32_t));
    l.text = take(&used, B * (size_t)net->text_length * (size_t)net->text_dim * f);
    l.uploaded = used;
    l.x_t = take(&used, latent);
    l.target = take(&used, latent);
    l.total = used;
    return l;
}

size_t lg_batch_bytes(const struct lg_denoiser_config *net, int64_t size)
{
    struct layout l = layout_of(net, size);
    return l.uploaded + l.total;
}

static lg_tensor latent_tensor(const lg_batch *b, size_t at)
{
    return lg_t4(b->device + at, LG_F32, b->size, b->net.channels, b->net.height, b->net.width);
}

int lg_batch_open(lg_device *d, const struct lg_denoiser_config *net, int64_t size, lg_batch **ret)
{
    LG_ASSERT(lg_device_dtype(d) == LG_F32);
    lg_batch *b = calloc(1, sizeof *b);
    LG_ASSERT(b);
    *ret = b;
    b->net = *net;
    b->size = size;
    b->at = layout_of(net, size);
    b->host = calloc(1, b->at.uploaded);
    LG_ASSERT(b->host);
    void *device;
    LG_TRY(lg_device_alloc(d, b->at.total, &device));
    b->device = device;
    struct lg_batch_tensors *t = &b->tensors;
    t->in.x = latent_tensor(b, b->at.x_t);
    t->target = latent_tensor(b, b->at.target);
    t->in.t = lg_t1(b->device + b->at.t, LG_F32, size);
    t->weight = lg_t1(b->device + b->at.weight, LG_F32, size);
    if (net->kind == LG_DIT) t->in.label = lg_t1(b->device + b->at.label, LG_I32, size);
    if (net->kind == LG_PIXART) {
        t->in.text = lg_t3(b->device + b->at.text, LG_F32, size, net->text_length, net->text_dim);
        t->in.text_length = lg_t1(b->device + b->at.text_length, LG_I32, size);
    }
    return 0;
}

void lg_batch_close(lg_batch **b)
{
    if (!*b) return;
    free((*b)->host);
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

static void gather_row(lg_batch *b, lg_window *w, const struct lg_batch_spec *spec, size_t row)
{
    const uint64_t n = spec->first + row;
    const struct lg_slot *slot = lg_window_slot(w, n);
    const size_t at = n % w->g.slots, half = w->g.latent_bytes / 2;
    struct lg_objective_sample draw;
    lg_objective_draw(spec->objective, spec->seed, n, &draw);
    memcpy(b->host + b->at.mean + row * half, w->latent + at * w->g.latent_bytes, half);
    memcpy(b->host + b->at.logvar + row * half, w->latent + at * w->g.latent_bytes + half, half);
    ((int64_t *)(b->host + b->at.n))[row] = (int64_t)n;
    for (int i = 0; i < 4; i++)
        ((float *)(b->host + b->at.coef))[4 * row + (size_t)i] = (float)draw.coef[i];
    ((float *)(b->host + b->at.t))[row] = (float)draw.t;
    ((float *)(b->host + b->at.weight))[row] =
        slot->is_void ? 0 : (float)(draw.weight / spec->divisor);
    ((int32_t *)(b->host + b->at.label))[row] = slot->label;
    if (b->net.kind != LG_PIXART) return;
    ((int32_t *)(b->host + b->at.text_length))[row] = slot->text_length;
    memcpy(b->host + b->at.text + row * w->g.text_bytes, w->text + at * w->g.text_bytes,
           w->g.text_bytes);
}

void lg_batch_load(lg_batch *b, lg_stream *s, lg_window *w, const struct lg_batch_spec *spec)
{
    for (size_t row = 0; row < (size_t)b->size; row++) gather_row(b, w, spec, row);
    lg_stream_upload(s, b->device, b->host, b->at.uploaded);
    lg_diffuse_forward(s, &(struct lg_diffuse_forward_args){
                              .mean = latent_tensor(b, b->at.mean),
                              .logvar = latent_tensor(b, b->at.logvar),
                              .n = lg_t1(b->device + b->at.n, LG_I64, b->size),
                              .coef = lg_t2(b->device + b->at.coef, LG_F32, b->size, 4),
                              .x_t = b->tensors.in.x,
                              .target = b->tensors.target,
                              .seed = spec->seed,
                              .scaling_factor = spec->scaling_factor,
                              .shift_factor = spec->shift_factor});
}
