/* See autoencoder.h: what the two kinds have in common, and who runs what. Pictures of an AutoencoderKL run in slices of several
 * (autoencoder_kl_run.c), everything else as a clip (autoencoder_video.c). */
#include "base/fs.h"
#include "stages/nets/autoencoder_private.h"
#include "stages/nets/encoders.h"
#include "stages/nets/weights.h"
#include <stdlib.h>

int lg_autoencoder_config_load(const char *dir, struct lg_autoencoder_config *ret)
{
    struct lg_autoencoder_config c = {0};
    struct lg_vae_info info;
    LG_TRY(lg_vae_info_read(dir, &info));
    c.kind = info.kind;
    if (c.kind == LG_VAE_LTX) {
        LG_TRY(lg_aeltx_config_load(dir, &c.ltx));
        c.latent_channels = c.ltx.latent_channels;
        c.factor = c.ltx.factor;
        c.factor_time = c.ltx.factor_time;
        c.scaling_factor = c.ltx.scaling_factor;
        if (c.factor != info.factor || c.factor_time != info.factor_time)
            return LG_FAIL(LG_ERR_CONFIG,
                           "%s/config.json: spatio_temporal_scaling has entries for more blocks "
                           "than there are",
                           dir);
    } else {
        LG_TRY(lg_aekl_config_load(dir, &c.kl));
        c.latent_channels = c.kl.latent_channels;
        c.factor = lg_aekl_factor(&c.kl);
        c.factor_time = 1;
        c.scaling_factor = c.kl.scaling_factor;
        c.shift_factor = c.kl.shift_factor;
    }
    *ret = c;
    return 0;
}

int lg_autoencoder_latent_frames(const struct lg_autoencoder_config *c, int frames)
{
    return lg_vae_latent_frames(&(struct lg_vae_info){.factor_time = c->factor_time}, frames);
}

int lg_autoencoder_slice(const struct lg_autoencoder_config *c, int height, int width)
{
    const int64_t pixels = c->kind == LG_VAE_KL ? 1 << 20 : 1 << 24;
    return (int)LG_MAX(pixels / ((int64_t)height * width), 1);
}

/* ---- parameters ---- */

int lg_autoencoder_params(const struct lg_autoencoder_config *c, lg_aekl_half half, lg_params *ret)
{
    if (c->kind == LG_VAE_KL) return lg_aekl_params(&c->kl, half, ret);
    lg_net n = lg_net_declare(1);
    lg_aeltx_declare_statistics(&n, &c->ltx);
    const struct lg_video_slice whole = {.frames = 1, .is_first = true, .is_last = true};
    const struct lg_video_shape shape = {1, c->factor, c->factor, LG_U8};
    for (lg_aekl_half h = LG_AEKL_ENCODER; h <= LG_AEKL_DECODER; h++) {
        struct lg_video clip = lg_video_of(c, h, &whole);
        const struct lg_video_ends ends = lg_video_ends_of(c, h, &shape, 1, n.type);
        if (half & h) lg_video_describe(&n, c, h, &clip, &ends);
    }
    *ret = lg_net_finish(&n);
    return 0;
}

int lg_autoencoder_load(const struct lg_autoencoder_config *c, const char *dir, lg_aekl_half half,
                        float *ret)
{
    if (c->kind == LG_VAE_KL) return lg_aekl_load(&c->kl, dir, half, ret);
    const char *extra[4] = {"decoder.timestep_scale_multiplier"};
    int n = 1;
    if (!(half & LG_AEKL_ENCODER)) extra[n++] = "encoder.";
    if (!(half & LG_AEKL_DECODER)) extra[n++] = "decoder.";
    char path[LG_PATH_BYTES];
    lg_params t = {0};
    LG_TRY(lg_path(path, "%s/diffusion_pytorch_model.safetensors", dir));
    LG_TRY(lg_autoencoder_params(c, half, &t));
    int rc = lg_params_load(&t, path, extra, ret, 0, ret ? t.count : 0);
    lg_params_free(&t);
    return rc;
}

/* ---- nets ---- */

/* One of the two. */
struct lg_autoencoder {
    lg_device *device;
    struct lg_net_memory need;
    lg_aekl *pictures;
    lg_video_net *clips;
    char *arena, *scratch; /* the owner's: of all */
};

static int plan(lg_device *d, const struct lg_autoencoder_config *c,
                const struct lg_autoencoder_shape *shape, lg_autoencoder **ret)
{
    lg_autoencoder *a = calloc(1, sizeof *a);
    if (!a) return LG_FAIL(LG_ERR_NOSPACE, "no memory for an autoencoder");
    int rc;
    a->device = d;
    if (c->kind == LG_VAE_KL && shape->frames <= 1) {
        const struct lg_aekl_shape pictures = {shape->half, shape->batch, shape->height,
                                               shape->width, shape->slice};
        LG_TRY_GOTO(rc, lg_aekl_make(d, &c->kl, &pictures, &a->pictures), fail);
        a->need = lg_aekl_memory(a->pictures);
    } else {
        LG_TRY_GOTO(rc, lg_video_net_make(d, c, shape, &a->clips), fail);
        a->need = lg_video_net_memory(a->clips);
    }
    *ret = a;
    return 0;
fail:
    lg_autoencoder_close(&a);
    return rc;
}

static void close_all(lg_autoencoder **a, int n)
{
    for (int i = n - 1; i >= 0; i--) lg_autoencoder_close(&a[i]);
}

/* *ret_most: the largest of all. */
static int plan_all(lg_device *d, const struct lg_autoencoder_config *c,
                    const struct lg_autoencoder_shape *shapes, int n, lg_autoencoder **ret,
                    struct lg_net_memory *ret_most)
{
    int rc = 0;
    *ret_most = (struct lg_net_memory){0, 0};
    for (int i = 0; i < n; i++) ret[i] = NULL;
    for (int i = 0; i < n && rc == 0; i++) {
        rc = plan(d, c, &shapes[i], &ret[i]);
        if (rc < 0) continue;
        ret_most->arena = LG_MAX(ret_most->arena, ret[i]->need.arena);
        ret_most->scratch = LG_MAX(ret_most->scratch, ret[i]->need.scratch);
    }
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

int lg_autoencoder_plan_all(lg_device *d, const struct lg_autoencoder_config *c,
                            const struct lg_autoencoder_shape *shapes, int n, size_t *ret_bytes)
{
    lg_autoencoder **a = calloc((size_t)n, sizeof *a);
    struct lg_net_memory most;
    LG_ASSERT(a);
    int rc = plan_all(d, c, shapes, n, a, &most);
    if (rc == 0) *ret_bytes = most.arena + most.scratch;
    close_all(a, n);
    free(a);
    return rc;
}

int lg_autoencoder_fit_slice(lg_device *d, const struct lg_autoencoder_config *c, size_t bytes,
                             struct lg_autoencoder_shape *shape)
{
    const int all = shape->frames > 1 ? shape->frames : shape->batch;
    for (int parts = 1;; parts *= 2) {
        lg_autoencoder *a = NULL;
        shape->slice = (all + parts - 1) / parts;
        LG_TRY(plan(d, c, shape, &a));
        const size_t need = a->need.arena;
        lg_autoencoder_close(&a);
        if (need <= bytes || shape->slice == 1) return 0;
    }
}

int lg_autoencoder_open_all(lg_device *d, const struct lg_autoencoder_config *c,
                            const struct lg_autoencoder_shape *shapes, int n, lg_autoencoder **ret)
{
    struct lg_net_memory most;
    int rc;
    LG_TRY_GOTO(rc, plan_all(d, c, shapes, n, ret, &most), fail);
    LG_TRY_GOTO(rc, lg_device_alloc(d, most.arena, (void **)&ret[0]->arena), fail);
    if (most.scratch)
        LG_TRY_GOTO(rc, lg_device_alloc(d, most.scratch, (void **)&ret[0]->scratch), fail);
    for (int i = 0; i < n; i++) {
        if (ret[i]->pictures) lg_aekl_lend(ret[i]->pictures, ret[0]->arena, ret[0]->scratch);
        if (ret[i]->clips) lg_video_net_lend(ret[i]->clips, ret[0]->arena, ret[0]->scratch);
    }
    return 0;
fail:
    close_all(ret, n);
    return rc;
}

void lg_autoencoder_close(lg_autoencoder **a)
{
    if (!*a) return;
    lg_aekl_close(&(*a)->pictures);
    lg_video_net_close(&(*a)->clips);
    lg_device_free((*a)->device, (void **)&(*a)->arena);
    lg_device_free((*a)->device, (void **)&(*a)->scratch);
    free(*a);
    *a = NULL;
}

int lg_autoencoder_print(lg_device *d, const struct lg_autoencoder_config *c,
                         const struct lg_autoencoder_shape *shape, FILE *to)
{
    lg_autoencoder *a = NULL;
    LG_TRY(plan(d, c, shape, &a));
    if (a->pictures)
        lg_aekl_print_programs(a->pictures, to);
    else
        lg_video_net_print(a->clips, to);
    lg_autoencoder_close(&a);
    return 0;
}

double lg_autoencoder_flops(const lg_autoencoder *a)
{
    return a->pictures ? lg_aekl_flops(a->pictures) : lg_video_net_flops(a->clips);
}

void lg_autoencoder_encode(lg_autoencoder *a, lg_stream *s, const void *weights, lg_tensor pixels,
                           lg_tensor mean, lg_tensor logvar)
{
    if (a->pictures)
        lg_aekl_encode(a->pictures, s, weights, pixels, mean, logvar);
    else
        lg_video_net_encode(a->clips, s, weights, pixels, mean, logvar);
}

void lg_autoencoder_set_decoding(lg_autoencoder *a, const struct lg_decoding *d)
{
    if (a->clips) lg_video_net_set_decoding(a->clips, d);
}

void lg_autoencoder_decode(lg_autoencoder *a, lg_stream *s, const void *weights, lg_tensor latent,
                           lg_tensor image, lg_tensor pixels)
{
    if (a->pictures)
        lg_aekl_decode(a->pictures, s, weights, latent, image, pixels);
    else
        lg_video_net_decode(a->clips, s, weights, latent, image, pixels);
}
