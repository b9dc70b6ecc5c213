/* An adapter with the net that it adapts: see adapter_file.h. */
#include "base/heartbeat.h"
#include "config/manifest.h"
#include "stages/io/safetensors.h"
#include "stages/nets/adapter_file.h"
#include "stages/nets/adapter_private.h"
#include "stages/nets/kohya.h"
#include <stdio.h>
#include <stdlib.h>

/* w (N, K) += scale b (N, r) a (r, K) */
static void add_product(float *w, const float *a, const float *b, int64_t N, int64_t K, int64_t r,
                        double scale)
{
    for (int64_t n = 0; n < N; n++) {
        for (int64_t i = 0; i < r; i++) {
            const float f = (float)(scale * (double)b[n * r + i]);
            for (int64_t k = 0; k < K; k++) w[n * K + k] += f * a[i * K + k];
        }
        lg_heartbeat();
    }
}

static void merge(const struct lg_adapter *adapter, const lg_params *t, const float *low,
                  const lg_params *whole, float *weights)
{
    char module[LG_PARAM_NAME_BYTES], name[LG_PARAM_NAME_BYTES + 16];
    for (int i = 0; i < t->n; i++) {
        const struct lg_param *a = &t->p[i];
        if (!lg_adapter_module(a->name, module)) continue;
        snprintf(name, sizeof name, "%s" LG_ADAPTER_UP, module);
        const struct lg_param *b = &t->p[lg_params_find(t, name)];
        snprintf(name, sizeof name, "%s.weight", module);
        const struct lg_param *w = &whole->p[lg_params_find(whole, name)];
        add_product(weights + w->offset, low + a->offset, low + b->offset, b->dim[0], a->dim[1],
                    a->dim[0], lg_adapter_scale(adapter));
    }
}

/* An adapter in memory, beside the tables of its net. */
struct loaded {
    lg_params all; /* with the adapter's; what is trained of it is the adapter */
    lg_params adapter, whole;
    float *low; /* (adapter.count) */
};

static void loaded_free(struct loaded *l)
{
    free(l->low);
    lg_params_free(&l->whole);
    lg_params_free(&l->all);
}

static struct lg_kohya kohya_of(const struct lg_denoiser_config *c, const struct lg_adapter_read *r,
                                const struct loaded *l)
{
    return (struct lg_kohya){.kind = lg_denoiser_info(c->kind)->name,
                             .adapter = &r->adapter,
                             .t = &l->adapter,
                             .whole = &l->whole};
}

/* The weights, in whichever layout they are. */
static int load_any(const struct lg_denoiser_config *c, const char *dir,
                    const struct lg_adapter_read *r, struct loaded *l)
{
    const struct lg_kohya k = kohya_of(c, r, l);
    char path[LG_PATH_BYTES];
    lg_st_file *f;
    LG_TRY(lg_path(path, "%s/" LG_ADAPTER_WEIGHTS, dir));
    LG_TRY(lg_st_open(path, &f));
    int rc = lg_kohya_is(f) ? lg_kohya_load(&k, f, path, l->low)
                            : lg_adapter_load(&l->adapter, dir, l->low);
    lg_st_close(&f);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int load(const struct lg_denoiser_config *c, const char *dir,
                const struct lg_adapter_read *r, struct loaded *ret)
{
    const struct lg_training training = {.adapter = r->adapter};
    LG_TRY(lg_denoiser_table(c, &training, &ret->all));
    LG_TRY(lg_denoiser_params(c, &ret->whole));
    ret->adapter = lg_params_trained(&ret->all);
    ret->low = malloc(ret->adapter.count * sizeof *ret->low);
    if (!ret->low)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu weights of an adapter",
                       ret->adapter.count);
    return load_any(c, dir, r, ret);
}

static int load_merged(const struct lg_denoiser_config *c, const char *dir,
                       const struct lg_adapter_read *r, float *ret)
{
    char base[LG_PATH_BYTES];
    struct loaded l = {0};
    LG_TRY(lg_checkpoint_weights_dir(r->base, "ema", base));
    LG_TRY(lg_denoiser_load(c, base, ret));
    int rc = load(c, dir, r, &l);
    if (rc == 0) merge(&r->adapter, &l.adapter, l.low, &l.whole, ret);
    loaded_free(&l);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

int lg_adapter_export_kohya(const char *dir, const char *path)
{
    struct lg_denoiser_config c;
    struct lg_adapter_read r = {0};
    struct loaded l = {0};
    LG_TRY(lg_whole_config_load(dir, &c));
    int rc = lg_adapter_read(dir, &r);
    if (rc == 0) rc = load(&c, dir, &r, &l);
    const struct lg_kohya k = kohya_of(&c, &r, &l);
    if (rc == 0) rc = lg_kohya_save(&k, l.low, path);
    loaded_free(&l);
    lg_adapter_read_free(&r);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

int lg_whole_config_load(const char *dir, struct lg_denoiser_config *ret)
{
    char path[LG_PATH_BYTES], base[LG_PATH_BYTES];
    if (lg_adapter_is(dir))
        LG_TRY(lg_adapter_base(dir, base));
    else
        LG_TRY(lg_path(base, "%s", dir));
    LG_TRY(lg_path(path, "%s/config.json", base));
    return lg_denoiser_config_load(path, ret);
}

int lg_whole_load(const struct lg_denoiser_config *c, const char *dir, float *ret_weights)
{
    struct lg_adapter_read r = {0};
    if (!lg_adapter_is(dir)) return lg_denoiser_load(c, dir, ret_weights);
    int rc = lg_adapter_read(dir, &r);
    if (rc == 0) rc = load_merged(c, dir, &r, ret_weights);
    lg_adapter_read_free(&r);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
