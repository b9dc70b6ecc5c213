/* The denoiser of a pipeline: a transformer or a U-Net. */
#include "base/check.h"
#include "base/fs.h"
#include "stages/tools/random/pipelines.h"
#include "stages/tools/random/weights.h"
#include <math.h>
#include <stdlib.h>

enum { LARGE_HIDDEN = 2048 };

/* Its sizes are those of the parts. */
static struct lg_denoiser_config net_of(const struct lg_random_pipeline *p)
{
    struct lg_denoiser_config c = p->net;
    c.patch = c.kind == LG_LTX ? 1 : 2, c.mlp_ratio = 4, c.width = c.height;
    c.learned_variance = c.kind == LG_DIT || c.kind == LG_PIXART || c.kind == LG_LATTE;
    c.norm_eps = p->t5 ? 1e-6 : 1e-5;
    const int channels = lg_random_vae_channels(p->vae);
    if (channels) c.channels = channels;
    for (int i = 0; i < lg_random_pipeline_clips(p); i++) {
        struct lg_denoiser_text *t = &c.text[c.n_texts++];
        t->pooled = lg_random_clip_width(p->clip[i]);
        if (c.kind == LG_SD3 || lg_random_pipeline_is_unet(p)) t->length = 77, t->width = t->pooled;
        if (lg_random_pipeline_is_unet(p) && !i) t->pooled = 0;
    }
    if (lg_random_pipeline_is_unet(p)) {
        c.patch = 1, c.hidden = c.unet.channels[0], c.heads = c.unet.heads[0];
        c.depth = lg_unet_blocks(&c.unet);
        c.size_conditions = c.kind == LG_SDXL;
    }
    if (!p->t5) return c;
    struct lg_denoiser_text *t = &c.text[c.n_texts++];
    t->width = lg_random_t5_width(p->t5);
    t->length = p->family->t5_length;
    return c;
}

/* The weights of norms of queries and keys are near 1. */
static bool is_norm(const struct lg_param *p)
{
    return p->rank == 1 && p->init == LG_INIT_ONE;
}

/* Written as it is drawn: FLUX in fp32 takes 48 GB. */
static int write_large(const struct lg_random_model *m, const struct lg_denoiser_config *c,
                       const lg_params *t)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_random_weights_write(m, "diffusion_pytorch_model.safetensors", t));
    LG_TRY(lg_path(path, "%s/config.json", m->dir));
    return lg_denoiser_config_save(c, NULL, path);
}

static int write_fp32(const struct lg_random_model *m, const struct lg_denoiser_config *c,
                      const lg_params *t)
{
    float *w = malloc(t->count * sizeof *w);
    if (!w) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu weights", t->count);
    lg_params_init(t, m->seed, w, 0, t->count);
    const int rc = lg_denoiser_save(c, m->dir, &(struct lg_denoiser_weights){.t = t, .trained = w});
    free(w);
    return rc;
}

/* No weight begins at zero, as what is trained does not; tables stay what they are. */
static void set_deviations(lg_params *t)
{
    for (int i = 0; i < t->n; i++) {
        struct lg_param *p = &t->p[i];
        if (!p->is_fixed && !is_norm(p))
            lg_random_set_deviation(p, p->rank > 1 ? 1 / sqrt(lg_random_fan_in(p)) : 0.02);
    }
}

int lg_random_transformer_make(const struct lg_random_model *m)
{
    const struct lg_random_pipeline *p;
    lg_params t;
    LG_TRY(lg_random_pipeline_find(m->preset, &p));
    const struct lg_denoiser_config c = net_of(p);
    LG_TRY(lg_denoiser_params(&c, &t));
    set_deviations(&t);
    const int rc = c.hidden >= LARGE_HIDDEN ? write_large(m, &c, &t) : write_fp32(m, &c, &t);
    lg_params_free(&t);
    return rc;
}
