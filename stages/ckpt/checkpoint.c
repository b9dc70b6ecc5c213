/* Checkpoint files; see checkpoint.h. */
#include "stages/ckpt/checkpoint.h"
#include "stages/io/safetensors.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KINDS = 3 };
static const char *const kind_name[KINDS] = {"exp_avg", "exp_avg_sq", "master"};

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

int lg_checkpoint_write(const char *dir, const struct lg_checkpoint_net *net,
                        const struct lg_snapshot *s, lg_manifest *manifest)
{
    static const char *const files[] = {
        "model/config.json", "model/diffusion_pytorch_model.safetensors", "ema/config.json",
        "ema/diffusion_pytorch_model.safetensors", "optimizer.safetensors"};
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/model", dir));
    LG_TRY(lg_mkdirs(path));
    LG_TRY(lg_denoiser_save(net->config, net->source, path, s->w));
    LG_TRY(lg_fsync_dir(path));
    LG_TRY(lg_path(path, "%s/ema", dir));
    LG_TRY(lg_mkdirs(path));
    LG_TRY(lg_denoiser_save(net->config, net->source, path, s->ema));
    LG_TRY(lg_fsync_dir(path));
    LG_TRY(lg_path(path, "%s/optimizer.safetensors", dir));
    LG_TRY(write_optimizer(path, net->params, s));
    for (size_t i = 0; i < LG_ARRAY_LEN(files); i++)
        LG_TRY(lg_manifest_add(manifest, dir, files[i]));
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
