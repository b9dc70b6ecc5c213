/* lg-random-model: models with random weights and data sets of noise, for measuring where pretrained
 * weights and real pictures are not at hand. What it makes has the shapes, files and names of the real
 * thing; nothing can be learned from it.
 *
 * usage: lg-random-model vae --preset sd|sdxl|sd3|flux|ltx|ltx-095|tiny|tiny-sd3|tiny-ltx|tiny-ltx-095 DIR
 *        lg-random-model t5 --preset base|xl|xxl|tiny|tiny-wide --spiece FILE DIR
 *        lg-random-model clip --preset l|l-projected|h|bigg|tiny|tiny-g DIR
 *        lg-random-model pipeline --preset dit-xl-2|pixart-alpha|pixart-sigma|sd3-medium|sd35-medium|sd35-large|flux-dev|
 *                        flux-schnell|sd21|sdxl|tiny-dit|tiny-pixart|tiny-sd3|tiny-flux|tiny-sd2|tiny-sdxl
 *                        [--spiece FILE] DIR
 *        lg-random-model transformer --preset (as pipeline; a U-Net too) DIR
 *        lg-random-model pictures --count N [--size 256] [--ratio 1] [--classes 1000] DIR
 *        lg-random-model latents --count N [--size 32] [--channels 4] [--frames F]
 *                        [--classes 1000] DIR
 *   all: [--seed 0]    models: [--dtype f32|f16|bf16]    data: [--per-shard 1000]
 *
 * Models: config.json and safetensors as diffusers and transformers write them; t5 also a copy of
 * --spiece, a sentencepiece model, which decides vocab_size, clip a small tokenizer, which knows pairs of letters. Weights are uniform with the variance of
 * the usual initialisation; element e of tensor i is a function of (seed, i, e), so equal commands give
 * equal bytes.
 *
 * A pipeline is a folder as diffusers has it: model_index.json, transformer or unet (fp32; FLUX and SD3.5 large, which are
 * published so, as the other parts), vae, scheduler and, but for DiT, its text_encoder and tokenizer, or several of them. The
 * tiny ones are tiny in all parts; PixArt's has a variance and
 * conditions of a size, SD3's one block with a second attention and CLIPs of two widths.
 *
 * Data: tar shards of 00000000.jpg (or .latent.safetensors), .txt (a caption of a few words) and .cls.
 * The pictures are smooth coloured noise, about as large as photographs once compressed; with --ratio R they have
 * about size^2 pixels, and ratios of all kinds from 1 : R to R : 1.
 * Exit codes: those of every program here (base/check.h, negated). */
#include "base/check.h"
#include "base/fs.h"
#include "base/philox.h"
#include "stages/io/safetensors.h"
#include "stages/io/tar.h"
#include "stages/io/tokenizer.h"
#include "stages/nets/autoencoder.h"
#include "stages/nets/denoiser.h"
#include "stages/nets/text_encoder.h"
#include "stages/tools/random/ltx_vae.h"
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h> /* wants stdio.h before it */

enum {
    CHUNK = 1 << 16,  /* elements that are made at once */
    VOCAB_STEP = 128, /* vocab_size is rounded up to this */
    SPIECE_BYTES_MAX = 64 << 20,
    GRID = 24,  /* random colours on a side of a picture */
    GRAIN = 25, /* range of the noise on each pixel */
    JPEG_QUALITY = 90,
    SIDE_MAX = 4096,
    RATIO_MAX = 16,
    FRAMES_MAX = 4096,
    COUNT_MAX = 100000000,
};

struct options {
    const char *kind, *preset, *spiece, *dir;
    long count, size, ratio, classes, channels, frames, per_shard;
    uint64_t seed;
    const char *dtype;
};

/* ---- weights ---- */

/* Round to nearest, ties to even. */
static uint16_t bf16_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static const void *convert(const float *x, size_t n, lg_dtype to, void *room)
{
    if (to == LG_F32) return x;
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        if (to == LG_BF16) {
            h = bf16_of(x[i]);
        } else {
            _Float16 f = (_Float16)x[i];
            memcpy(&h, &f, sizeof h);
        }
        memcpy((char *)room + 2 * i, &h, sizeof h);
    }
    return room;
}

/* Tensor by tensor, in pieces: a T5-XXL need not fit in memory. Values are drawn in file order. */
static int write_data(lg_st_writer *w, const lg_params *t, uint64_t seed, lg_dtype dtype)
{
    float *x = malloc(CHUNK * sizeof *x);
    uint16_t *room = malloc(CHUNK * sizeof *room);
    LG_ASSERT(x && room);
    int rc = 0;
    for (int i = 0; i < t->n && rc == 0; i++) {
        const struct lg_param *p = &t->p[i];
        for (size_t from = 0, n; from < p->count && rc == 0; from += n) {
            n = LG_MIN(p->count - from, (size_t)CHUNK);
            lg_params_init(t, seed, x, p->offset + from, n);
            rc = lg_st_writer_data(w, convert(x, n, dtype, room), n * lg_dtype_bytes(dtype));
        }
    }
    free(x);
    free(room);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int write_weights(const char *path, const lg_params *t, uint64_t seed, lg_dtype dtype)
{
    lg_st_writer *w = NULL;
    int rc;
    LG_TRY(lg_st_writer_open(path, &w));
    LG_TRY_GOTO(rc, lg_st_writer_metadata(w, "format", "pt"), fail);
    for (int i = 0; i < t->n; i++)
        LG_TRY_GOTO(rc, lg_st_writer_declare(w, t->p[i].name, dtype, t->p[i].rank, t->p[i].dim),
                    fail);
    LG_TRY_GOTO(rc, write_data(w, t, seed, dtype), fail);
    LG_TRY(lg_st_writer_finish(&w, NULL));
    return 0;
fail:
    lg_st_writer_abort(&w);
    return rc;
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), e = strlen(end);
    return n >= e && !strcmp(name + n - e, end);
}

/* A uniform distribution of this standard deviation. */
static void set_deviation(struct lg_param *p, double deviation)
{
    p->init = LG_INIT_UNIFORM;
    p->init_scale = deviation * sqrt(3.0);
}

static double fan_in(const struct lg_param *p)
{
    double n = 1;
    for (int i = 1; i < p->rank; i++) n *= (double)p->dim[i];
    return n;
}

/* ---- the autoencoder ---- */

static const struct vae_preset {
    const char *name, *channels;
    int layers, latent_channels, sample_size;
    double scaling, shift; /* shift 0: it has none, but quant convs */
} VAE[] = {{"sd", "128, 256, 512, 512", 2, 4, 256, 0.18215, 0},
           {"sdxl", "128, 256, 512, 512", 2, 4, 1024, 0.13025, 0},
           {"sd3", "128, 256, 512, 512", 2, 16, 1024, 1.5305, 0.0609},
           {"flux", "128, 256, 512, 512", 2, 16, 1024, 0.3611, 0.1159},
           {"tiny", "32, 32, 32, 32", 1, 4, 256, 0.18215, 0},
           {"tiny-sd3", "32, 32, 32, 32", 1, 16, 256, 1.5305, 0.0609}};

static int write_vae_config(const struct options *o, const struct vae_preset *v)
{
    char path[LG_PATH_BYTES], shift[128] = "", text[1024];
    if (v->shift)
        snprintf(shift, sizeof shift,
                 "  \"shift_factor\": %g,\n  \"use_post_quant_conv\": false,\n"
                 "  \"use_quant_conv\": false,\n",
                 v->shift);
    int n = snprintf(
        text, sizeof text,
        "{\n  \"_class_name\": \"AutoencoderKL\",\n  \"act_fn\": \"silu\",\n"
        "  \"block_out_channels\": [%s],\n"
        "  \"down_block_types\": [\"DownEncoderBlock2D\", \"DownEncoderBlock2D\", "
        "\"DownEncoderBlock2D\", \"DownEncoderBlock2D\"],\n"
        "  \"up_block_types\": [\"UpDecoderBlock2D\", \"UpDecoderBlock2D\", \"UpDecoderBlock2D\", "
        "\"UpDecoderBlock2D\"],\n"
        "  \"in_channels\": 3,\n  \"out_channels\": 3,\n  \"latent_channels\": %d,\n"
        "  \"layers_per_block\": %d,\n  \"norm_num_groups\": 32,\n  \"sample_size\": %d,\n%s"
        "  \"scaling_factor\": %g\n}\n",
        v->channels, v->latent_channels, v->layers, v->sample_size, shift, v->scaling);
    LG_ASSERT(n > 0 && n < (int)sizeof text);
    LG_TRY(lg_path(path, "%s/config.json", o->dir));
    LG_TRY(lg_publish_file(path, text, (size_t)n));
    return 0;
}

static int write_config(const struct options *o)
{
    const char *ltx = lg_random_ltx_vae(o->preset);
    char path[LG_PATH_BYTES];
    for (size_t i = 0; i < LG_ARRAY_LEN(VAE) && !ltx; i++)
        if (!strcmp(o->preset, VAE[i].name)) return write_vae_config(o, &VAE[i]);
    if (!ltx)
        return LG_FAIL(LG_ERR_USAGE,
                       "no vae preset \"%s\": sd, sdxl, sd3, flux, ltx, ltx-095, tiny, tiny-sd3, "
                       "tiny-ltx and tiny-ltx-095 exist",
                       o->preset);
    LG_TRY(lg_path(path, "%s/config.json", o->dir));
    LG_TRY(lg_publish_file(path, ltx, strlen(ltx)));
    return 0;
}

static int make_vae(const struct options *o, lg_dtype dtype)
{
    struct lg_autoencoder_config c;
    lg_params t = {0};
    char path[LG_PATH_BYTES];
    LG_TRY(write_config(o));
    LG_TRY(lg_autoencoder_config_load(o->dir, &c));
    LG_TRY(lg_autoencoder_params(&c, LG_AEKL_BOTH, &t));
    for (int i = 0; i < t.n; i++) {
        struct lg_param *p = &t.p[i];
        if (p->rank > 1)
            set_deviation(p, 1 / sqrt(fan_in(p)));
        else
            p->init = ends_with(p->name, ".bias") || ends_with(p->name, "latents_mean")
                          ? LG_INIT_ZERO
                          : LG_INIT_ONE;
    }
    LG_TRY(lg_path(path, "%s/diffusion_pytorch_model.safetensors", o->dir));
    int rc = write_weights(path, &t, o->seed, dtype);
    lg_params_free(&t);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* ---- T5 ---- */

static const struct t5_preset {
    const char *name;
    int d_model, d_kv, d_ff, heads, layers;
} T5[] = {{"base", 768, 64, 2048, 12, 12},
          {"xl", 2048, 64, 5120, 32, 24},
          {"xxl", 4096, 64, 10240, 64, 24},
          {"tiny", 64, 16, 128, 4, 2},
          {"tiny-wide", 192, 16, 128, 4, 2}};

static int write_t5_config(const struct options *o, const struct t5_preset *p, int vocab)
{
    char path[LG_PATH_BYTES], text[1024];
    int n = snprintf(text, sizeof text,
                     "{\n  \"architectures\": [\"T5EncoderModel\"],\n  \"model_type\": \"t5\",\n"
                     "  \"d_model\": %d,\n  \"d_kv\": %d,\n  \"d_ff\": %d,\n  \"num_heads\": %d,\n"
                     "  \"num_layers\": %d,\n  \"vocab_size\": %d,\n"
                     "  \"feed_forward_proj\": \"gated-gelu\",\n  \"dense_act_fn\": \"gelu_new\",\n"
                     "  \"is_gated_act\": true,\n  \"layer_norm_epsilon\": 1e-06,\n"
                     "  \"relative_attention_num_buckets\": 32,\n"
                     "  \"relative_attention_max_distance\": 128,\n"
                     "  \"eos_token_id\": 1,\n  \"pad_token_id\": 0\n}\n",
                     p->d_model, p->d_kv, p->d_ff, p->heads, p->layers, vocab);
    LG_ASSERT(n > 0 && n < (int)sizeof text);
    LG_TRY(lg_path(path, "%s/config.json", o->dir));
    LG_TRY(lg_publish_file(path, text, (size_t)n));
    return 0;
}

/* Copies the tokenizer; *ret_vocab: its pieces, rounded up. */
static int copy_spiece(const struct options *o, int *ret_vocab)
{
    char path[LG_PATH_BYTES], *data;
    size_t bytes;
    lg_tokenizer *t = NULL;
    if (!o->spiece)
        return LG_FAIL(LG_ERR_USAGE,
                       "t5 needs --spiece FILE, a T5 sentencepiece model, for example "
                       "examples/emoji/text_encoder/spiece.model");
    LG_TRY(lg_tokenizer_open(o->spiece, &t));
    *ret_vocab = (lg_tokenizer_pieces(t) + VOCAB_STEP - 1) / VOCAB_STEP * VOCAB_STEP;
    lg_tokenizer_close(&t);
    LG_TRY(lg_path(path, "%s/spiece.model", o->dir));
    LG_TRY(lg_read_file(o->spiece, SPIECE_BYTES_MAX, &data, &bytes));
    int rc = lg_publish_file(path, data, bytes);
    free(data);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* The deviations of transformers' T5: the scores are not divided by sqrt(d_kv), so q is smaller. */
static void set_t5(const struct lg_t5_config *c, lg_params *t)
{
    for (int i = 0; i < t->n; i++) {
        struct lg_param *p = &t->p[i];
        if (p->rank == 1)
            p->init = LG_INIT_ONE;
        else if (!strcmp(p->name, "shared.weight"))
            set_deviation(p, 1);
        else if (ends_with(p->name, "relative_attention_bias.weight"))
            set_deviation(p, 1 / sqrt(c->d_model));
        else if (ends_with(p->name, "SelfAttention.q.weight"))
            set_deviation(p, 1 / sqrt((double)c->d_model * c->d_kv));
        else
            set_deviation(p, 1 / sqrt(fan_in(p)));
    }
}

static int make_t5(const struct options *o, lg_dtype dtype)
{
    const struct t5_preset *preset = NULL;
    for (size_t i = 0; i < LG_ARRAY_LEN(T5); i++)
        if (!strcmp(o->preset, T5[i].name)) preset = &T5[i];
    if (!preset)
        return LG_FAIL(LG_ERR_USAGE, "no t5 preset \"%s\": base, xl, xxl, tiny and tiny-wide exist",
                       o->preset);
    struct lg_text_encoder_config c;
    lg_params t = {0};
    char path[LG_PATH_BYTES];
    int vocab = 0;
    LG_TRY(copy_spiece(o, &vocab));
    LG_TRY(write_t5_config(o, preset, vocab));
    LG_TRY(lg_text_encoder_config_load(o->dir, &c));
    LG_TRY(lg_text_encoder_params(&c, 0, 1, &t));
    set_t5(&c.t5, &t);
    LG_TRY(lg_path(path, "%s/model.safetensors", o->dir));
    int rc = write_weights(path, &t, o->seed, dtype);
    lg_params_free(&t);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* ---- CLIP ---- */

static const struct clip_preset {
    const char *name;
    int vocab, hidden, mlp, heads, layers;
    const char *act, *class;
} CLIP[] = {{"l", 49408, 768, 3072, 12, 12, "quick_gelu", "CLIPTextModel"},
            {"l-projected", 49408, 768, 3072, 12, 12, "quick_gelu", "CLIPTextModelWithProjection"},
            {"h", 49408, 1024, 4096, 16, 23, "gelu", "CLIPTextModel"},
            {"bigg", 49408, 1280, 5120, 20, 32, "gelu", "CLIPTextModelWithProjection"},
            {"tiny", 1920, 64, 128, 4, 3, "quick_gelu", "CLIPTextModelWithProjection"},
            {"tiny-g", 1920, 96, 192, 6, 2, "gelu", "CLIPTextModelWithProjection"}};

static int publish_text(const char *dir, const char *name, FILE *f, char *const *text,
                        const size_t *bytes)
{
    char path[LG_PATH_BYTES];
    int rc = lg_close_text(f) < 0 ? LG_FAIL(LG_ERR_NOSPACE, "no memory for %s", name)
                                  : lg_path(path, "%s/%s", dir, name);
    if (rc == 0) rc = lg_publish_file(path, *text, *bytes);
    free(*text);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

enum { LETTERS = 26, BYTES = 256, PRINTING_MORE = 68 };

/* The 256 characters that stand for bytes, in the order of GPT-2. */
static int byte_chars(uint32_t ret[BYTES])
{
    int n = 0;
    for (uint32_t c = '!'; c < BYTES + PRINTING_MORE; c++)
        if (c <= '~' || (c >= 0xA1 && c != 0xAD)) ret[n++] = c;
    return n;
}

/* Bytes, bytes that end a word, pairs of letters in a word and at its end, begin and end of a caption, as the published
 * vocabularies have them; *ret_end: the last one's id. */
static int write_vocab(const char *dir, int *ret_end)
{
    char *text = NULL;
    size_t bytes = 0;
    uint32_t chars[BYTES];
    int id = 0;
    FILE *f = open_memstream(&text, &bytes);
    LG_ASSERT(f && byte_chars(chars) == BYTES);
    for (int last = 0; last < 2; last++)
        for (int i = 0; i < BYTES; i++, id++)
            fprintf(f, "%s\"\\u%04x%s\": %d", id ? ", " : "{", chars[i], last ? "</w>" : "", id);
    for (int last = 0; last < 2; last++)
        for (int i = 0; i < LETTERS * LETTERS; i++, id++)
            fprintf(f, ", \"%c%c%s\": %d", 'a' + i / LETTERS, 'a' + i % LETTERS, last ? "</w>" : "",
                    id);
    fprintf(f, ", \"<|startoftext|>\": %d, \"<|endoftext|>\": %d}\n", id, id + 1);
    *ret_end = id + 1;
    LG_TRY(publish_text(dir, "vocab.json", f, &text, &bytes));
    return 0;
}

static int write_merges(const char *dir)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    LG_ASSERT(f);
    fprintf(f, "#version: 0.2\n");
    for (int last = 0; last < 2; last++)
        for (int i = 0; i < LETTERS * LETTERS; i++)
            fprintf(f, "%c %c%s\n", 'a' + i / LETTERS, 'a' + i % LETTERS, last ? "</w>" : "");
    LG_TRY(publish_text(dir, "merges.txt", f, &text, &bytes));
    return 0;
}

static int write_clip_config(const char *dir, const struct clip_preset *p, int end)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    LG_ASSERT(f);
    fprintf(f,
            "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"clip_text_model\",\n"
            "  \"vocab_size\": %d,\n  \"hidden_size\": %d,\n  \"intermediate_size\": %d,\n"
            "  \"projection_dim\": %d,\n  \"num_attention_heads\": %d,\n"
            "  \"num_hidden_layers\": %d,\n  \"max_position_embeddings\": 77,\n"
            "  \"hidden_act\": \"%s\",\n  \"layer_norm_eps\": 1e-05,\n"
            "  \"bos_token_id\": %d,\n  \"eos_token_id\": %d\n}\n",
            p->class, p->vocab, p->hidden, p->mlp, p->hidden, p->heads, p->layers, p->act, end - 1,
            end);
    LG_TRY(publish_text(dir, "config.json", f, &text, &bytes));
    return 0;
}

/* The deviations of transformers' CLIP. */
static void set_clip(const struct lg_clip_config *c, lg_params *t)
{
    const double depth = 1 / sqrt(2.0 * c->layers);
    for (int i = 0; i < t->n; i++) {
        struct lg_param *p = &t->p[i];
        if (p->rank == 1)
            p->init = ends_with(p->name, "weight") ? LG_INIT_ONE : LG_INIT_ZERO;
        else if (ends_with(p->name, "token_embedding.weight"))
            set_deviation(p, 0.02);
        else if (ends_with(p->name, "position_embedding.weight"))
            set_deviation(p, 0.01);
        else if (ends_with(p->name, "_proj.weight") && !ends_with(p->name, "out_proj.weight"))
            set_deviation(p, depth / sqrt(c->hidden));
        else if (ends_with(p->name, "fc1.weight"))
            set_deviation(p, 1 / sqrt(2.0 * c->hidden));
        else if (ends_with(p->name, "fc2.weight"))
            set_deviation(p, depth / sqrt(c->hidden));
        else
            set_deviation(p, 1 / sqrt(c->hidden));
    }
}

static int make_clip(const struct options *o, lg_dtype dtype)
{
    const struct clip_preset *preset = NULL;
    for (size_t i = 0; i < LG_ARRAY_LEN(CLIP); i++)
        if (!strcmp(o->preset, CLIP[i].name)) preset = &CLIP[i];
    if (!preset)
        return LG_FAIL(LG_ERR_USAGE,
                       "no clip preset \"%s\": l, l-projected, h, bigg, tiny and tiny-g exist",
                       o->preset);
    struct lg_text_encoder_config c;
    lg_params t = {0};
    char path[LG_PATH_BYTES];
    int end = 0;
    LG_TRY(write_vocab(o->dir, &end));
    LG_TRY(write_merges(o->dir));
    LG_TRY(write_clip_config(o->dir, preset, end));
    LG_TRY(lg_text_encoder_config_load(o->dir, &c));
    LG_TRY(lg_text_encoder_params(&c, 0, 1, &t));
    set_clip(&c.clip, &t);
    LG_TRY(lg_path(path, "%s/model.safetensors", o->dir));
    int rc = write_weights(path, &t, o->seed, dtype);
    lg_params_free(&t);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* ---- a pipeline ---- */

enum { CLIPS_MAX = 2, LARGE_HIDDEN = 2048 };
#define UNET "UNet2DConditionModel"
static const struct pipeline_preset {
    const char *name, *class, *transformer, *scheduler, *vae;
    const char *clip[CLIPS_MAX], *t5; /* NULL: it has none */
    struct lg_denoiser_config net;
} PIPELINE[] = {
    {"dit-xl-2",
     "DiTPipeline",
     "DiTTransformer2DModel",
     "DDIMScheduler",
     "sd",
     {NULL},
     NULL,
     {.kind = LG_DIT, .height = 32, .hidden = 1152, .depth = 28, .heads = 16, .num_classes = 1000}},
    {"pixart-alpha",
     "PixArtAlphaPipeline",
     "PixArtTransformer2DModel",
     "DPMSolverMultistepScheduler",
     "sd",
     {NULL},
     "xxl",
     {.kind = LG_PIXART,
      .height = 128,
      .hidden = 1152,
      .depth = 28,
      .heads = 16,
      .size_conditions = true}},
    {"pixart-sigma",
     "PixArtSigmaPipeline",
     "PixArtTransformer2DModel",
     "DPMSolverMultistepScheduler",
     "sdxl",
     {NULL},
     "xxl",
     {.kind = LG_PIXART, .height = 128, .hidden = 1152, .depth = 28, .heads = 16}},
    {"sd3-medium",
     "StableDiffusion3Pipeline",
     "SD3Transformer2DModel",
     "FlowMatchEulerDiscreteScheduler",
     "sd3",
     {"l-projected", "bigg"},
     "xxl",
     {.kind = LG_SD3,
      .height = 128,
      .hidden = 1536,
      .depth = 24,
      .heads = 24,
      .positions_side = 192}},
    {"sd35-medium",
     "StableDiffusion3Pipeline",
     "SD3Transformer2DModel",
     "FlowMatchEulerDiscreteScheduler",
     "sd3",
     {"l-projected", "bigg"},
     "xxl",
     {.kind = LG_SD3,
      .height = 128,
      .hidden = 1536,
      .depth = 24,
      .heads = 24,
      .positions_side = 384,
      .qk_norm = true,
      .dual = {0x1fff}}},
    {"sd35-large",
     "StableDiffusion3Pipeline",
     "SD3Transformer2DModel",
     "FlowMatchEulerDiscreteScheduler",
     "sd3",
     {"l-projected", "bigg"},
     "xxl",
     {.kind = LG_SD3,
      .height = 128,
      .hidden = 2432,
      .depth = 38,
      .heads = 38,
      .positions_side = 192,
      .qk_norm = true}},
    {"flux-dev",
     "FluxPipeline",
     "FluxTransformer2DModel",
     "FlowMatchEulerDiscreteScheduler",
     "flux",
     {"l"},
     "xxl",
     {.kind = LG_FLUX,
      .height = 128,
      .hidden = 3072,
      .depth = 57,
      .heads = 24,
      .singles = 38,
      .axes = {16, 56, 56},
      .guidance = true}},
    {"flux-schnell",
     "FluxPipeline",
     "FluxTransformer2DModel",
     "FlowMatchEulerDiscreteScheduler",
     "flux",
     {"l"},
     "xxl",
     {.kind = LG_FLUX,
      .height = 128,
      .hidden = 3072,
      .depth = 57,
      .heads = 24,
      .singles = 38,
      .axes = {16, 56, 56}}},
    {"tiny-dit",
     "DiTPipeline",
     "DiTTransformer2DModel",
     "DDIMScheduler",
     "tiny",
     {NULL},
     NULL,
     {.kind = LG_DIT, .height = 4, .hidden = 48, .depth = 2, .heads = 4, .num_classes = 7}},
    {"tiny-pixart",
     "PixArtAlphaPipeline",
     "PixArtTransformer2DModel",
     "DPMSolverMultistepScheduler",
     "tiny",
     {NULL},
     "tiny",
     {.kind = LG_PIXART,
      .height = 4,
      .hidden = 48,
      .depth = 2,
      .heads = 4,
      .size_conditions = true}},
    {"tiny-sd3",
     "StableDiffusion3Pipeline",
     "SD3Transformer2DModel",
     "FlowMatchEulerDiscreteScheduler",
     "tiny-sd3",
     {"tiny", "tiny-g"},
     "tiny-wide",
     {.kind = LG_SD3,
      .height = 4,
      .hidden = 48,
      .depth = 3,
      .heads = 3,
      .positions_side = 6,
      .qk_norm = true,
      .dual = {1}}},
    {"tiny-flux",
     "FluxPipeline",
     "FluxTransformer2DModel",
     "FlowMatchEulerDiscreteScheduler",
     "tiny",
     {"tiny"},
     "tiny",
     {.kind = LG_FLUX,
      .height = 4,
      .hidden = 64,
      .depth = 3,
      .heads = 4,
      .singles = 2,
      .axes = {4, 6, 6},
      .guidance = true}},
    {"sd21",
     "StableDiffusionPipeline",
     UNET,
     "DDIMScheduler",
     "sd",
     {"h"},
     NULL,
     {.kind = LG_SD2,
      .height = 96,
      .unet = {.levels = 4,
               .layers = 2,
               .channels = {320, 640, 1280, 1280},
               .heads = {5, 10, 20, 20},
               .depths = {1, 1, 1, 0},
               .middle_depth = 1,
               .groups = 32}}},
    {"sdxl",
     "StableDiffusionXLPipeline",
     UNET,
     "EulerDiscreteScheduler",
     "sdxl",
     {"l", "bigg"},
     NULL,
     {.kind = LG_SDXL,
      .height = 128,
      .unet = {.levels = 3,
               .layers = 2,
               .channels = {320, 640, 1280},
               .heads = {5, 10, 20},
               .depths = {0, 2, 10},
               .middle_depth = 10,
               .groups = 32,
               .number_waves = 256}}},
    {"latte-1",
     "LattePipeline",
     "LatteTransformer3DModel",
     "DDIMScheduler",
     "sd",
     {NULL},
     "xxl",
     {.kind = LG_LATTE, .frames = 16, .height = 64, .hidden = 1152, .depth = 28, .heads = 16}},
    {"tiny-latte",
     "LattePipeline",
     "LatteTransformer3DModel",
     "DDIMScheduler",
     "tiny",
     {NULL},
     "tiny",
     {.kind = LG_LATTE, .frames = 4, .height = 4, .hidden = 48, .depth = 2, .heads = 4}},
    {"tiny-ltx",
     "LTXPipeline",
     "LTXVideoTransformer3DModel",
     "FlowMatchEulerDiscreteScheduler",
     "tiny-ltx",
     {NULL},
     "tiny",
     {.kind = LG_LTX,
      .channels = 8,
      .frames = 2,
      .height = 4,
      .hidden = 64,
      .depth = 2,
      .heads = 4}},
    {"ltx-video",
     "LTXPipeline",
     "LTXVideoTransformer3DModel",
     "FlowMatchEulerDiscreteScheduler",
     "ltx",
     {NULL},
     "xxl",
     {.kind = LG_LTX,
      .channels = 128,
      .frames = 16,
      .height = 16,
      .hidden = 2048,
      .depth = 28,
      .heads = 32}},
    {"tiny-sd2",
     "StableDiffusionPipeline",
     UNET,
     "DDIMScheduler",
     "tiny",
     {"tiny"},
     NULL,
     {.kind = LG_SD2,
      .height = 4,
      .unet = {.levels = 3,
               .layers = 1,
               .channels = {16, 32, 32},
               .heads = {2, 4, 4},
               .depths = {1, 1, 0},
               .middle_depth = 1,
               .groups = 8}}},
    {"tiny-sdxl",
     "StableDiffusionXLPipeline",
     UNET,
     "EulerDiscreteScheduler",
     "tiny",
     {"tiny", "tiny-g"},
     NULL,
     {.kind = LG_SDXL,
      .height = 4,
      .unet = {.levels = 2,
               .layers = 1,
               .channels = {16, 32},
               .heads = {2, 4},
               .depths = {0, 2},
               .middle_depth = 2,
               .groups = 8,
               .number_waves = 16}}},
};

static bool is_unet(const struct pipeline_preset *p)
{
    return p->net.kind == LG_SD2 || p->net.kind == LG_SDXL;
}

static int clips_of(const struct pipeline_preset *p)
{
    int n = 0;
    while (n < CLIPS_MAX && p->clip[n]) n++;
    return n;
}

/* "text_encoder", "text_encoder_2" .. of what; returns it. */
static const char *part_name(const char *what, int i, char ret[32])
{
    snprintf(ret, 32, i ? "%s_%d" : "%s", what, i + 1);
    return ret;
}

static const char BETAS[] = "  \"beta_start\": 0.0001,\n  \"beta_end\": 0.02,\n"
                            "  \"beta_schedule\": \"linear\",\n  \"num_train_timesteps\": 1000,\n"
                            "  \"prediction_type\": \"epsilon\"\n";
static const char SCALED_BETAS[] =
    "  \"beta_start\": 0.00085,\n  \"beta_end\": 0.012,\n"
    "  \"beta_schedule\": \"scaled_linear\",\n  \"num_train_timesteps\": 1000,\n"
    "  \"prediction_type\": \"%s\"\n";
static const char SHIFT[] = "  \"num_train_timesteps\": 1000,\n  \"shift\": 3.0\n";
static const char NO_SHIFT[] = "  \"num_train_timesteps\": 1000,\n  \"shift\": 1.0\n";
static const char DYNAMIC_SHIFT[] = "  \"base_image_seq_len\": 256,\n  \"base_shift\": 0.5,\n"
                                    "  \"max_image_seq_len\": 4096,\n  \"max_shift\": 1.15,\n"
                                    "  \"num_train_timesteps\": 1000,\n  \"shift\": 3.0,\n"
                                    "  \"use_dynamic_shifting\": true\n";

static const char LTX_SHIFT[] = "  \"base_image_seq_len\": 1024,\n  \"base_shift\": 0.95,\n"
                                "  \"max_image_seq_len\": 4096,\n  \"max_shift\": 2.05,\n"
                                "  \"num_train_timesteps\": 1000,\n  \"shift\": 1.0,\n"
                                "  \"shift_terminal\": 0.1,\n  \"use_dynamic_shifting\": true\n";

static const char *clip_class(const struct pipeline_preset *p, int i)
{
    return p->net.kind == LG_SD3 || (p->net.kind == LG_SDXL && i) ? "CLIPTextModelWithProjection"
                                                                  : "CLIPTextModel";
}

static int write_index(const struct options *o, const struct pipeline_preset *p)
{
    const int clips = clips_of(p);
    char *text = NULL, name[32];
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    LG_ASSERT(f);
    fprintf(f, "{\n  \"_class_name\": \"%s\",\n  \"scheduler\": [\"diffusers\", \"%s\"],\n",
            p->class, p->scheduler);
    for (int i = 0; i < clips + !!p->t5; i++)
        fprintf(f, "  \"%s\": [\"transformers\", \"%s\"],\n", part_name("text_encoder", i, name),
                i < clips ? clip_class(p, i) : "T5EncoderModel");
    for (int i = 0; i < clips + !!p->t5; i++)
        fprintf(f, "  \"%s\": [\"transformers\", \"%s\"],\n", part_name("tokenizer", i, name),
                i < clips ? "CLIPTokenizer"
                : clips   ? "T5TokenizerFast"
                          : "T5Tokenizer");
    fprintf(f,
            "  \"%s\": [\"diffusers\", \"%s\"],\n"
            "  \"vae\": [\"diffusers\", \"%s\"]\n}\n",
            is_unet(p) ? "unet" : "transformer", p->transformer,
            lg_random_ltx_vae(p->vae) ? "AutoencoderKLLTXVideo" : "AutoencoderKL");
    LG_TRY(publish_text(o->dir, "model_index.json", f, &text, &bytes));
    return 0;
}

static int write_scheduler(const char *dir, const struct pipeline_preset *p)
{
    char path[LG_PATH_BYTES], text[512], betas[sizeof SCALED_BETAS + 16];
    snprintf(betas, sizeof betas, SCALED_BETAS,
             !strcmp(p->name, "sd21") ? "v_prediction" : "epsilon");
    const bool flux = p->net.kind == LG_FLUX;
    const int n = snprintf(text, sizeof text, "{\n  \"_class_name\": \"%s\",\n%s}\n", p->scheduler,
                           flux && p->net.guidance ? DYNAMIC_SHIFT
                           : flux                  ? NO_SHIFT
                           : p->net.kind == LG_SD3 ? SHIFT
                           : p->net.kind == LG_LTX ? LTX_SHIFT
                           : is_unet(p)            ? betas
                                                   : BETAS);
    LG_ASSERT(n > 0 && n < (int)sizeof text);
    LG_TRY(lg_path(path, "%s/scheduler_config.json", dir));
    return lg_publish_file(path, text, (size_t)n);
}

/* Its sizes are those of the parts. */
static struct lg_denoiser_config net_of(const struct pipeline_preset *p)
{
    struct lg_denoiser_config c = p->net;
    c.patch = c.kind == LG_LTX ? 1 : 2, c.mlp_ratio = 4, c.width = c.height;
    c.learned_variance = c.kind == LG_DIT || c.kind == LG_PIXART || c.kind == LG_LATTE;
    c.norm_eps = p->t5 ? 1e-6 : 1e-5;
    for (size_t k = 0; k < LG_ARRAY_LEN(VAE); k++)
        if (!strcmp(p->vae, VAE[k].name)) c.channels = VAE[k].latent_channels;
    for (int i = 0; i < clips_of(p); i++) {
        struct lg_denoiser_text *t = &c.text[c.n_texts++];
        for (size_t k = 0; k < LG_ARRAY_LEN(CLIP); k++)
            if (!strcmp(p->clip[i], CLIP[k].name)) t->pooled = CLIP[k].hidden;
        if (c.kind == LG_SD3 || is_unet(p)) t->length = 77, t->width = t->pooled;
        if (is_unet(p) && !i) t->pooled = 0;
    }
    if (is_unet(p)) {
        c.patch = 1, c.hidden = c.unet.channels[0], c.heads = c.unet.heads[0];
        c.depth = lg_unet_blocks(&c.unet);
        c.size_conditions = c.kind == LG_SDXL;
    }
    if (!p->t5) return c;
    struct lg_denoiser_text *t = &c.text[c.n_texts++];
    for (size_t k = 0; k < LG_ARRAY_LEN(T5); k++)
        if (!strcmp(p->t5, T5[k].name)) t->width = T5[k].d_model;
    t->length = !strcmp(p->class, "PixArtAlphaPipeline")   ? 120
                : !strcmp(p->class, "PixArtSigmaPipeline") ? 300
                : c.kind == LG_LATTE                       ? 120
                : c.kind == LG_LTX                         ? 128
                : c.kind == LG_SD3                         ? 256
                                                           : 512;
    return c;
}

/* The weights of norms of queries and keys are near 1. */
static bool is_norm(const struct lg_param *p)
{
    return p->rank == 1 && p->init == LG_INIT_ONE;
}

/* Written as it is drawn: FLUX in fp32 takes 48 GB. */
static int write_large(const char *dir, const struct lg_denoiser_config *c, const lg_params *t,
                       const struct options *o, lg_dtype dtype)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/diffusion_pytorch_model.safetensors", dir));
    LG_TRY(write_weights(path, t, o->seed, dtype));
    LG_TRY(lg_path(path, "%s/config.json", dir));
    return lg_denoiser_config_save(c, NULL, path);
}

/* No weight begins at zero, as what is trained does not; tables stay what they are. */
static int write_transformer(const char *dir, const struct pipeline_preset *preset,
                             const struct options *o, lg_dtype dtype)
{
    const struct lg_denoiser_config net = net_of(preset), *c = &net;
    lg_params t;
    LG_TRY(lg_denoiser_params(c, &t));
    for (int i = 0; i < t.n; i++)
        if (!t.p[i].is_fixed && !is_norm(&t.p[i]))
            set_deviation(&t.p[i], t.p[i].rank > 1 ? 1 / sqrt(fan_in(&t.p[i])) : 0.02);
    if (c->hidden >= LARGE_HIDDEN) {
        const int rc = write_large(dir, c, &t, o, dtype);
        lg_params_free(&t);
        return rc;
    }
    float *w = malloc(t.count * sizeof *w);
    int rc = w ? 0 : LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu weights", t.count);
    if (rc == 0) {
        lg_params_init(&t, o->seed, w, 0, t.count);
        rc = lg_denoiser_save(c, dir, &(struct lg_denoiser_weights){.t = &t, .trained = w});
    }
    free(w);
    lg_params_free(&t);
    return rc;
}

/* The options of a part that lies in a folder of its own. */
static int part_of(const struct options *o, const char *preset, const char *name,
                   char dir[LG_PATH_BYTES], struct options *ret)
{
    *ret = *o;
    LG_TRY(lg_path(dir, "%s/%s", o->dir, name));
    ret->preset = preset;
    ret->dir = dir;
    return lg_mkdirs(dir);
}

/* A file of a text encoder's folder goes to its tokenizer's. */
static int move_file(const char *name, const char *from_dir, const char *to_dir)
{
    char from[LG_PATH_BYTES], to[LG_PATH_BYTES];
    LG_TRY(lg_path(from, "%s/%s", from_dir, name));
    LG_TRY(lg_path(to, "%s/%s", to_dir, name));
    if (rename(from, to) == 0) return 0;
    return LG_FAIL(lg_err_from_errno(errno), "cannot rename %s: %s", from, strerror(errno));
}

/* The second CLIP of SD3 is padded by what its tokenizer has as its first word. */
static int make_clip_part(const struct options *o, const struct pipeline_preset *p, int i,
                          lg_dtype dtype)
{
    static const char pad[] = "{\"pad_token\": \"!\"}\n";
    struct options encoder, tokenizer;
    char dir[LG_PATH_BYTES], beside[LG_PATH_BYTES], path[LG_PATH_BYTES], name[32];
    LG_TRY(part_of(o, p->clip[i], part_name("text_encoder", i, name), dir, &encoder));
    LG_TRY(make_clip(&encoder, dtype));
    LG_TRY(part_of(o, "", part_name("tokenizer", i, name), beside, &tokenizer));
    LG_TRY(move_file("vocab.json", dir, beside));
    LG_TRY(move_file("merges.txt", dir, beside));
    if (!i) return 0;
    LG_TRY(lg_path(path, "%s/special_tokens_map.json", beside));
    return lg_publish_file(path, pad, strlen(pad));
}

static int make_t5_part(const struct options *o, const struct pipeline_preset *p, int i,
                        lg_dtype dtype)
{
    struct options encoder, tokenizer;
    char dir[LG_PATH_BYTES], beside[LG_PATH_BYTES], name[32];
    LG_TRY(part_of(o, p->t5, part_name("text_encoder", i, name), dir, &encoder));
    LG_TRY(make_t5(&encoder, dtype));
    LG_TRY(part_of(o, "", part_name("tokenizer", i, name), beside, &tokenizer));
    return move_file("spiece.model", dir, beside);
}

static int make_texts(const struct options *o, const struct pipeline_preset *p, lg_dtype dtype)
{
    for (int i = 0; i < clips_of(p); i++) LG_TRY(make_clip_part(o, p, i, dtype));
    if (p->t5) LG_TRY(make_t5_part(o, p, clips_of(p), dtype));
    return 0;
}

static int find_pipeline(const char *name, const struct pipeline_preset **ret)
{
    char names[512];
    size_t at = 0;
    for (size_t i = 0; i < LG_ARRAY_LEN(PIPELINE); i++) {
        *ret = &PIPELINE[i];
        if (!strcmp(name, PIPELINE[i].name)) return 0;
        at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", i ? ", " : "",
                               PIPELINE[i].name);
        LG_ASSERT(at < sizeof names);
    }
    return LG_FAIL(LG_ERR_USAGE, "no pipeline preset \"%s\": there are %s", name, names);
}

static int make_pipeline(const struct options *o, lg_dtype dtype)
{
    const struct pipeline_preset *p;
    LG_TRY(find_pipeline(o->preset, &p));
    struct options part;
    char dir[LG_PATH_BYTES];
    LG_TRY(make_texts(o, p, dtype));
    LG_TRY(part_of(o, p->vae, "vae", dir, &part));
    LG_TRY(make_vae(&part, dtype));
    LG_TRY(part_of(o, "", is_unet(p) ? "unet" : "transformer", dir, &part));
    LG_TRY(write_transformer(dir, p, o, dtype));
    LG_TRY(part_of(o, "", "scheduler", dir, &part));
    LG_TRY(write_scheduler(dir, p));
    return write_index(o, p);
}

static int make_transformer(const struct options *o, lg_dtype dtype)
{
    const struct pipeline_preset *p;
    LG_TRY(find_pipeline(o->preset, &p));
    return write_transformer(o->dir, p, o, dtype);
}

/* ---- data ---- */

/* GRID x GRID random colours, interpolated, and grain on each pixel. */
struct sides {
    int width, height;
};

static struct sides sides_of(const struct options *o, uint64_t n)
{
    if (o->ratio == 1) return (struct sides){(int)o->size, (int)o->size};
    const double u = lg_uniform_f64(lg_philox(o->seed, LG_PURPOSE_TEST, n, 1 << 22).v[0]);
    const double stretch = pow((double)o->ratio, u - 0.5);
    return (struct sides){(int)LG_MAX(lround((double)o->size * stretch), 1),
                          (int)LG_MAX(lround((double)o->size / stretch), 1)};
}

static void paint(uint64_t seed, uint64_t n, struct sides s, uint8_t *rgb)
{
    uint8_t grid[(GRID + 1) * (GRID + 1) * 3 + 16];
    for (size_t i = 0; i < (GRID + 1) * (GRID + 1) * 3; i += 16) {
        lg_philox_out p = lg_philox(seed, LG_PURPOSE_TEST, n, i / 16);
        memcpy(grid + i, p.v, 16);
    }
    uint32_t noise = (uint32_t)(n * 2654435761u) ^ (uint32_t)seed;
    for (int y = 0; y < s.height; y++)
        for (int x = 0; x < s.width; x++) {
            int gx = x * GRID * 256 / s.width, gy = y * GRID * 256 / s.height;
            int fx = gx & 255, fy = gy & 255;
            const uint8_t *a = grid + 3 * ((gy >> 8) * (GRID + 1) + (gx >> 8));
            const uint8_t *b = a + 3 * (GRID + 1);
            noise = noise * 1664525u + 1013904223u;
            int grain = (int)((noise >> 16) % GRAIN) - GRAIN / 2;
            for (int c = 0; c < 3; c++) {
                int top = a[c] * (256 - fx) + a[3 + c] * fx;
                int low = b[c] * (256 - fx) + b[3 + c] * fx;
                int v = ((top * (256 - fy) + low * fy) >> 16) + grain;
                *rgb++ = (uint8_t)LG_MAX(0, LG_MIN(255, v));
            }
        }
}

/* libjpeg's own error handler ends the program: it only fails here without memory. */
static void compress(const uint8_t *rgb, struct sides s, uint8_t **ret, size_t *ret_bytes)
{
    struct jpeg_compress_struct j;
    struct jpeg_error_mgr err;
    unsigned long bytes = 0;
    unsigned char *data = NULL;
    j.err = jpeg_std_error(&err);
    jpeg_create_compress(&j);
    jpeg_mem_dest(&j, &data, &bytes);
    j.image_width = (JDIMENSION)s.width;
    j.image_height = (JDIMENSION)s.height;
    j.input_components = 3;
    j.in_color_space = JCS_RGB;
    jpeg_set_defaults(&j);
    jpeg_set_quality(&j, JPEG_QUALITY, TRUE);
    jpeg_start_compress(&j, TRUE);
    while (j.next_scanline < j.image_height) {
        JSAMPROW row = (JSAMPROW)(uintptr_t)(rgb + (size_t)j.next_scanline * (size_t)s.width * 3);
        jpeg_write_scanlines(&j, &row, 1);
    }
    jpeg_finish_compress(&j);
    jpeg_destroy_compress(&j);
    *ret = data;
    *ret_bytes = bytes;
}

static int add_picture(const struct options *o, lg_tar_writer *w, uint64_t n, uint8_t *room)
{
    char name[64];
    uint8_t *jpeg;
    size_t bytes;
    const struct sides s = sides_of(o, n);
    paint(o->seed, n, s, room);
    compress(room, s, &jpeg, &bytes);
    snprintf(name, sizeof name, "%08" PRIu64 ".jpg", n);
    int rc = lg_tar_writer_add(w, name, jpeg, bytes);
    free(jpeg);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* Of one sample: (C, h, w), or with --frames, even of one, the (C, f, h, w) of a clip. */
static size_t latent_elements(const struct options *o)
{
    return (size_t)(o->channels * o->size * o->size * (o->frames ? o->frames : 1));
}

/* Mean: standard normal; logvar: -10, as of a trained autoencoder's order. */
static int add_latent(const struct options *o, lg_tar_writer *w, uint64_t n, uint8_t *room)
{
    const int64_t clip[4] = {o->channels, o->frames, o->size, o->size};
    const int64_t picture[3] = {o->channels, o->size, o->size};
    const int64_t *dim = o->frames ? clip : picture;
    const int rank = o->frames ? 4 : 3;
    size_t count = latent_elements(o), bytes = 0;
    float *x = (float *)(void *)room;
    char name[64];
    lg_st_writer *st = NULL;
    void *data = NULL;
    int rc;
    LG_TRY(lg_st_writer_open_memory(&st));
    LG_TRY_GOTO(rc, lg_st_writer_declare(st, "latent_mean", LG_F32, rank, dim), fail);
    LG_TRY_GOTO(rc, lg_st_writer_declare(st, "latent_logvar", LG_F32, rank, dim), fail);
    lg_philox_normal_f32(x, count, o->seed, LG_PURPOSE_TEST, n, 0);
    LG_TRY_GOTO(rc, lg_st_writer_data(st, x, count * sizeof *x), fail);
    for (size_t i = 0; i < count; i++) x[i] = -10;
    LG_TRY_GOTO(rc, lg_st_writer_data(st, x, count * sizeof *x), fail);
    LG_TRY(lg_st_writer_finish_memory(&st, &data, &bytes));
    snprintf(name, sizeof name, "%08" PRIu64 ".latent.safetensors", n);
    rc = lg_tar_writer_add(w, name, data, bytes);
    free(data);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
fail:
    lg_st_writer_abort(&st);
    return rc;
}

static int add_texts(const struct options *o, lg_tar_writer *w, uint64_t n)
{
    static const char *const COLOUR[] = {"red", "green", "blue", "yellow", "black", "white"};
    static const char *const THING[] = {"apple", "house", "face", "star", "dog", "heart", "moon"};
    lg_philox_out p = lg_philox(o->seed, LG_PURPOSE_TEST, n, 1 << 20);
    char name[64], text[128];
    int bytes =
        snprintf(text, sizeof text, "a %s %s beside a %s %s", COLOUR[p.v[0] % LG_ARRAY_LEN(COLOUR)],
                 THING[p.v[1] % LG_ARRAY_LEN(THING)], COLOUR[p.v[2] % LG_ARRAY_LEN(COLOUR)],
                 THING[p.v[3] % LG_ARRAY_LEN(THING)]);
    snprintf(name, sizeof name, "%08" PRIu64 ".txt", n);
    LG_TRY(lg_tar_writer_add(w, name, text, (size_t)bytes));
    bytes = snprintf(text, sizeof text, "%u",
                     (unsigned)(lg_philox(o->seed, LG_PURPOSE_TEST, n, 1 << 21).v[0] %
                                (unsigned long)o->classes));
    snprintf(name, sizeof name, "%08" PRIu64 ".cls", n);
    LG_TRY(lg_tar_writer_add(w, name, text, (size_t)bytes));
    return 0;
}

static int make_data(const struct options *o, bool pictures)
{
    size_t room_bytes = pictures ? (size_t)((o->size + o->ratio) * (o->size + o->ratio) * 3)
                                 : latent_elements(o) * sizeof(float);
    uint8_t *room = malloc(room_bytes);
    LG_ASSERT(room);
    lg_tar_writer *w = NULL;
    int rc = 0;
    for (long n = 0; n < o->count && rc == 0; n++) {
        if (n % o->per_shard == 0) {
            char path[LG_PATH_BYTES];
            if (w) LG_TRY_GOTO(rc, lg_tar_writer_finish(&w), out);
            LG_TRY_GOTO(rc, lg_path(path, "%s/noise-%05ld.tar", o->dir, n / o->per_shard), out);
            LG_TRY_GOTO(rc, lg_tar_writer_open(path, &w), out);
        }
        rc = pictures ? add_picture(o, w, (uint64_t)n, room) : add_latent(o, w, (uint64_t)n, room);
        if (rc == 0) rc = add_texts(o, w, (uint64_t)n);
    }
    if (rc == 0) LG_TRY_GOTO(rc, lg_tar_writer_finish(&w), out);
out:
    lg_tar_writer_abort(&w);
    free(room);
    return rc;
}

/* ---- start ---- */

static int parse_dtype(const char *name, lg_dtype *ret)
{
    static const lg_dtype KNOWN[] = {LG_F32, LG_F16, LG_BF16};
    for (size_t i = 0; i < LG_ARRAY_LEN(KNOWN); i++)
        if (!strcmp(name, lg_dtype_name(KNOWN[i]))) {
            *ret = KNOWN[i];
            return 0;
        }
    return LG_FAIL(LG_ERR_USAGE, "no type \"%s\": f32, f16 and bf16 exist", name);
}

static int check_range(const char *what, long v, long min, long max)
{
    if (v >= min && v <= max) return 0;
    return LG_FAIL(LG_ERR_USAGE, "--%s %ld: %ld to %ld are possible", what, v, min, max);
}

static int run(struct options *o)
{
    lg_dtype dtype = LG_BF16;
    LG_TRY(parse_dtype(o->dtype, &dtype));
    bool pictures = !strcmp(o->kind, "pictures"), latents = !strcmp(o->kind, "latents");
    bool vae = !strcmp(o->kind, "vae"), clip = !strcmp(o->kind, "clip");
    bool whole = !strcmp(o->kind, "pipeline"), transformer = !strcmp(o->kind, "transformer");
    if (!pictures && !latents && !vae && !clip && !whole && !transformer &&
        strcmp(o->kind, "t5") != 0)
        return LG_FAIL(LG_ERR_USAGE,
                       "\"%s\" cannot be made: vae, t5, clip, pipeline, transformer, pictures and "
                       "latents can",
                       o->kind);
    if (!pictures && !latents) {
        LG_TRY(lg_mkdirs(o->dir));
        LG_TRY(whole         ? make_pipeline(o, dtype)
               : transformer ? make_transformer(o, dtype)
               : vae         ? make_vae(o, dtype)
               : clip        ? make_clip(o, dtype)
                             : make_t5(o, dtype));
        return 0;
    }
    if (!o->size) o->size = pictures ? 256 : 32;
    LG_TRY(check_range("count", o->count, 1, COUNT_MAX));
    LG_TRY(check_range("size", o->size, 1, SIDE_MAX));
    LG_TRY(check_range("ratio", o->ratio, 1, RATIO_MAX));
    LG_TRY(check_range("channels", o->channels, 1, 1024));
    LG_TRY(check_range("frames", o->frames, 0, FRAMES_MAX));
    LG_TRY(check_range("classes", o->classes, 1, 10000000));
    LG_TRY(check_range("per-shard", o->per_shard, 1, COUNT_MAX));
    LG_TRY(lg_mkdirs(o->dir));
    LG_TRY(make_data(o, pictures));
    return 0;
}

/* A whole number of at least 0, else -1. */
static long number(const char *text)
{
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    return errno || end == text || *end || v < 0 ? -1 : v;
}

static int parse_options(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        {"preset", required_argument, NULL, 'p'},  {"spiece", required_argument, NULL, 's'},
        {"count", required_argument, NULL, 'n'},   {"size", required_argument, NULL, 'z'},
        {"classes", required_argument, NULL, 'c'}, {"channels", required_argument, NULL, 'h'},
        {"frames", required_argument, NULL, 'f'},  {"per-shard", required_argument, NULL, 'm'},
        {"seed", required_argument, NULL, 'e'},    {"dtype", required_argument, NULL, 'd'},
        {"ratio", required_argument, NULL, 'r'},   {0},
    };
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        long *to = c == 'n'   ? &o->count
                   : c == 'z' ? &o->size
                   : c == 'r' ? &o->ratio
                   : c == 'c' ? &o->classes
                   : c == 'h' ? &o->channels
                   : c == 'f' ? &o->frames
                              : &o->per_shard;
        if (c == '?') return -1;
        if (c == 'p')
            o->preset = optarg;
        else if (c == 's')
            o->spiece = optarg;
        else if (c == 'd')
            o->dtype = optarg;
        else if (c == 'e')
            o->seed = strtoull(optarg, NULL, 10);
        else if ((*to = number(optarg)) < 0)
            return -1;
    }
    if (optind != argc - 2) return -1;
    o->kind = argv[optind];
    o->dir = argv[optind + 1];
    return 0;
}

int main(int argc, char **argv)
{
    struct options o = {.preset = "",
                        .ratio = 1,
                        .classes = 1000,
                        .channels = 4,
                        .per_shard = 1000,
                        .dtype = "bf16"};
    if (parse_options(argc, argv, &o) < 0) {
        fprintf(
            stderr,
            "usage: lg-random-model vae --preset "
            "sd|sdxl|sd3|flux|ltx|ltx-095|tiny|tiny-sd3|tiny-ltx|tiny-ltx-095 DIR\n"
            "       lg-random-model t5 --preset base|xl|xxl|tiny|tiny-wide --spiece FILE DIR\n"
            "       lg-random-model clip --preset l|l-projected|h|bigg|tiny|tiny-g DIR\n"
            "       lg-random-model pipeline --preset "
            "dit-xl-2|pixart-alpha|pixart-sigma|sd3-medium|"
            "sd35-medium|\n"
            "                       tiny-dit|tiny-pixart|tiny-sd3|tiny-flux [--spiece FILE] DIR\n"
            "       lg-random-model pictures --count N [--size 256] [--ratio 1] [--classes 1000] "
            "DIR\n"
            "       lg-random-model latents --count N [--size 32] [--channels 4] [--frames F] "
            "[--classes 1000] DIR\n"
            "  all: [--seed 0]   models: [--dtype f32|f16|bf16]   data: [--per-shard 1000]\n");
        return -LG_ERR_USAGE;
    }
    int rc = run(&o);
    if (rc < 0) fprintf(stderr, "lg-random-model: %s\n", lg_err_text());
    return -rc;
}
