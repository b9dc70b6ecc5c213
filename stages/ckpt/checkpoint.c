/* Checkpoint files; see checkpoint.h. */
#include "stages/ckpt/checkpoint.h"
#include "stages/io/safetensors.h"
#include "stages/nets/adapter_file.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KINDS = 3 };
static const char *const kind_name[KINDS] = {"exp_avg", "exp_avg_sq", "master"};

static bool is_adapter(const struct lg_contents *c)
{
    return c->adapter && c->adapter->rank;
}

static int declare(lg_st_writer *w, const lg_params *params)
{
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < params->n; i++) {
            const struct lg_param *p = &params->p[i];
            char name[LG_PARAM_NAME_BYTES + 16];
            snprintf(name, sizeof name, "%s.%s", kind_name[k], p->name);
            LG_TRY(lg_st_writer_declare(w, name, LG_F32, p->rank, p->dim));
        }
    return 0;
}

static int stream_data(lg_st_writer *w, const lg_params *params, const struct lg_snapshot *s)
{
    const float *of[KINDS] = {s->m, s->v, s->w};
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < params->n; i++) {
            const struct lg_param *p = &params->p[i];
            LG_TRY(lg_st_writer_data(w, of[k] + p->offset, p->count * sizeof(float)));
        }
    return 0;
}

static int write_optimizer(const char *path, const lg_params *params, const struct lg_snapshot *s)
{
    lg_st_writer *w = NULL;
    int rc;
    LG_TRY_GOTO(rc, lg_st_writer_open(path, &w), fail);
    LG_TRY_GOTO(rc, lg_st_writer_metadata(w, "format", "pt"), fail);
    LG_TRY_GOTO(rc, declare(w, params), fail);
    LG_TRY_GOTO(rc, stream_data(w, params, s), fail);
    LG_TRY(lg_st_writer_finish(&w, NULL));
    return 0;
fail:
    lg_st_writer_abort(&w);
    return rc;
}

/* One set of weights, in a folder of its own. */
static int write_weights(const char *dir, const struct lg_contents *c, const float *trained)
{
    const struct lg_denoiser_weights w = {
        .t = c->params, .trained = trained, .frozen = c->frozen, .source = c->source};
    LG_TRY(lg_mkdirs(dir));
    if (is_adapter(c)) {
        const lg_params t = lg_params_trained(c->params);
        LG_TRY(lg_adapter_save(c->adapter, c->base, &t, dir, trained));
    } else {
        LG_TRY(lg_denoiser_save(c->net, dir, &w));
    }
    LG_TRY(lg_fsync_dir(dir));
    return 0;
}

int lg_checkpoint_write(const char *dir, const struct lg_contents *c, lg_manifest *manifest)
{
    static const char *const whole[] = {
        "model/config.json",     "model/diffusion_pytorch_model.safetensors",
        "ema/config.json",       "ema/diffusion_pytorch_model.safetensors",
        "optimizer.safetensors", NULL};
    static const char *const adapter[] = {
        "adapter/" LG_ADAPTER_CONFIG, "adapter/" LG_ADAPTER_WEIGHTS, "ema/" LG_ADAPTER_CONFIG,
        "ema/" LG_ADAPTER_WEIGHTS,    "optimizer.safetensors",       NULL};
    const lg_params trained = lg_params_trained(c->params);
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/%s", dir, is_adapter(c) ? "adapter" : "model"));
    LG_TRY(write_weights(path, c, c->state.w));
    LG_TRY(lg_path(path, "%s/ema", dir));
    LG_TRY(write_weights(path, c, c->state.ema));
    LG_TRY(lg_path(path, "%s/optimizer.safetensors", dir));
    LG_TRY(write_optimizer(path, &trained, &c->state));
    for (const char *const *f = is_adapter(c) ? adapter : whole; *f; f++)
        LG_TRY(lg_manifest_add(manifest, dir, *f));
    return 0;
}

/* The part of parameter p that lies in [first, first + count) of the flat buffer. */
static int read_part(const lg_st_file *f, const char *kind, const struct lg_param *p, size_t first,
                     size_t count, float *dst)
{
    size_t from = LG_MAX(p->offset, first), to = LG_MIN(p->offset + p->count, first + count);
    char name[LG_PARAM_NAME_BYTES + 16];
    if (from >= to || !dst) return 0;
    snprintf(name, sizeof name, "%s.%s", kind, p->name);
    const struct lg_st_entry *e = lg_st_find(f, name);
    if (!e) return LG_FAIL(LG_ERR_MISMATCH, "optimizer.safetensors has no tensor %s", name);
    size_t elements = 1;
    for (int d = 0; d < e->rank; d++) elements *= (size_t)e->dim[d];
    if (elements != p->count)
        return LG_FAIL(LG_ERR_MISMATCH, "optimizer.safetensors: %s has %zu values, the net has %zu",
                       name, elements, p->count);
    LG_TRY(lg_st_read_f32(e, dst + (from - first), from - p->offset, to - from));
    return 0;
}

int lg_checkpoint_read_optimizer(const char *dir, const lg_params *params, size_t first,
                                 size_t count, float *w, float *m, float *v)
{
    char path[LG_PATH_BYTES];
    lg_st_file *f;
    float *of[KINDS] = {m, v, w};
    LG_TRY(lg_path(path, "%s/optimizer.safetensors", dir));
    LG_TRY(lg_st_open(path, &f));
    int rc = 0;
    for (int k = 0; k < KINDS && rc == 0; k++)
        for (int i = 0; i < params->n && rc == 0; i++)
            rc = read_part(f, kind_name[k], &params->p[i], first, count, of[k]);
    lg_st_close(&f);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
