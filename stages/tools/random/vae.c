/* Autoencoders: AutoencoderKL by the table below, AutoencoderKLLTXVideo by ltx_vae.h. */
#include "base/check.h"
#include "stages/nets/autoencoder.h"
#include "stages/tools/random/ltx_vae.h"
#include "stages/tools/random/text.h"
#include "stages/tools/random/weights.h"
#include <math.h>
#include <string.h>

static const struct preset {
    const char *name, *channels;
    int layers, latent_channels, sample_size;
    double scaling, shift; /* shift 0: it has none, but quant convs */
} PRESET[] = {{"sd", "128, 256, 512, 512", 2, 4, 256, 0.18215, 0},
              {"sdxl", "128, 256, 512, 512", 2, 4, 1024, 0.13025, 0},
              {"sd3", "128, 256, 512, 512", 2, 16, 1024, 1.5305, 0.0609},
              {"flux", "128, 256, 512, 512", 2, 16, 1024, 0.3611, 0.1159},
              {"tiny", "32, 32, 32, 32", 1, 4, 256, 0.18215, 0},
              {"tiny-sd3", "32, 32, 32, 32", 1, 16, 256, 1.5305, 0.0609}};

static const struct preset *find(const char *name)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(PRESET); i++)
        if (!strcmp(name, PRESET[i].name)) return &PRESET[i];
    return NULL;
}

int lg_random_vae_channels(const char *preset)
{
    const struct preset *p = find(preset);
    return p ? p->latent_channels : 0;
}

static void print_config(FILE *f, const struct preset *v)
{
    fprintf(
        f,
        "{\n  \"_class_name\": \"AutoencoderKL\",\n  \"act_fn\": \"silu\",\n"
        "  \"block_out_channels\": [%s],\n"
        "  \"down_block_types\": [\"DownEncoderBlock2D\", \"DownEncoderBlock2D\", "
        "\"DownEncoderBlock2D\", \"DownEncoderBlock2D\"],\n"
        "  \"up_block_types\": [\"UpDecoderBlock2D\", \"UpDecoderBlock2D\", \"UpDecoderBlock2D\", "
        "\"UpDecoderBlock2D\"],\n"
        "  \"in_channels\": 3,\n  \"out_channels\": 3,\n  \"latent_channels\": %d,\n"
        "  \"layers_per_block\": %d,\n  \"norm_num_groups\": 32,\n  \"sample_size\": %d,\n",
        v->channels, v->latent_channels, v->layers, v->sample_size);
    if (v->shift)
        fprintf(f,
                "  \"shift_factor\": %g,\n  \"use_post_quant_conv\": false,\n"
                "  \"use_quant_conv\": false,\n",
                v->shift);
    fprintf(f, "  \"scaling_factor\": %g\n}\n", v->scaling);
}

static int write_config(const struct lg_random_model *m)
{
    const struct preset *p = find(m->preset);
    const char *ltx = lg_random_ltx_vae(m->preset);
    struct lg_random_text t;
    if (!p && !ltx)
        return LG_FAIL(LG_ERR_USAGE,
                       "no vae preset \"%s\": sd, sdxl, sd3, flux, ltx, ltx-095, tiny, tiny-sd3, "
                       "tiny-ltx and tiny-ltx-095 exist",
                       m->preset);
    lg_random_text_begin(&t);
    if (ltx)
        fputs(ltx, t.file);
    else
        print_config(t.file, p);
    return lg_random_text_publish(&t, m->dir, "config.json");
}

int lg_random_vae_make(const struct lg_random_model *m)
{
    struct lg_autoencoder_config c;
    lg_params t = {0};
    LG_TRY(write_config(m));
    LG_TRY(lg_autoencoder_config_load(m->dir, &c));
    LG_TRY(lg_autoencoder_params(&c, LG_AEKL_BOTH, &t));
    for (int i = 0; i < t.n; i++) {
        struct lg_param *p = &t.p[i];
        if (p->rank > 1)
            lg_random_set_deviation(p, 1 / sqrt(lg_random_fan_in(p)));
        else
            p->init = lg_random_ends_with(p, ".bias") || lg_random_ends_with(p, "latents_mean")
                          ? LG_INIT_ZERO
                          : LG_INIT_ONE;
    }
    int rc = lg_random_weights_write(m, "diffusion_pytorch_model.safetensors", &t);
    lg_params_free(&t);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
