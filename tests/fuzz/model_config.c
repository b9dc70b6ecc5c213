/* Fuzz target: a model's config.json, read by everything that reads one. What loads must give a table
 * of parameters without overflow; the planner's readers find empty weight files beside it. */
#include "config/models.h"
#include "stages/nets/autoencoder.h"
#include "stages/nets/denoiser.h"
#include "stages/nets/text_encoder.h"
#include "tests/fuzz/fuzz.h"
#include <math.h>

static void check_params(lg_params *t)
{
    size_t at = 0;
    for (int i = 0; i < t->n; i++) {
        LG_ASSERT(t->p[i].offset >= at && t->p[i].count <= SIZE_MAX / 2);
        at = t->p[i].offset + t->p[i].count;
    }
    LG_ASSERT(t->n > 0 && t->count >= at && t->count <= SIZE_MAX / 8);
    lg_params_free(t);
}

static void read_denoiser(const char *path)
{
    struct lg_denoiser_config c;
    lg_params t;
    if (lg_denoiser_config_load(path, &c) < 0) return;
    LG_ASSERT(isfinite(lg_denoiser_flops(&c)) && lg_denoiser_flops(&c) > 0);
    if (lg_denoiser_params(&c, &t) == 0) check_params(&t);
}

static void read_text_encoder(const char *dir)
{
    struct lg_text_encoder_config c;
    lg_params t;
    if (lg_text_encoder_config_load(dir, &c) < 0) return;
    if (lg_text_encoder_params(&c, 0, 1, &t) == 0) check_params(&t);
}

static void read_vae(const char *dir)
{
    struct lg_autoencoder_config c;
    lg_params t;
    if (lg_autoencoder_config_load(dir, &c) < 0) return;
    LG_ASSERT(c.factor >= 1 && c.factor_time >= 1);
    if (lg_autoencoder_params(&c, LG_AEKL_ENCODER, &t) == 0) check_params(&t);
    if (lg_autoencoder_params(&c, LG_AEKL_DECODER, &t) == 0) check_params(&t);
}

LG_FUZZ_TARGET(model_config)
{
    static const char *dir;
    if (!dir) {
        lg_fuzz_write("diffusion_pytorch_model.safetensors", "", 0);
        lg_fuzz_write("model.safetensors", "", 0);
        lg_fuzz_write("spiece.model", "", 0);
        dir = lg_fuzz_link("config.json", 0);
    }
    struct lg_vae_info vae;
    struct lg_text_info text;
    read_denoiser(lg_fuzz_file(0, data, bytes));
    lg_err_clear();
    read_text_encoder(dir);
    lg_err_clear();
    read_vae(dir);
    lg_err_clear();
    if (lg_vae_info_load(dir, &vae) == 0)
        LG_ASSERT(vae.latent_channels >= 1 && vae.factor >= 1 && vae.scaling_factor != 0);
    lg_err_clear();
    if (lg_text_info_load(dir, &text) == 0) LG_ASSERT(text.dim >= 1 && text.layers >= 1);
}
