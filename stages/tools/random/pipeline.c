/* A whole pipeline in diffusers' layout. */
#include "base/check.h"
#include "base/fs.h"
#include "stages/tools/random/ltx_vae.h"
#include "stages/tools/random/model.h"
#include "stages/tools/random/pipelines.h"
#include "stages/tools/random/text.h"
#include <string.h>

/* "text_encoder", "text_encoder_2" .. of what; returns it. */
static const char *part_name(const char *what, int i, char ret[32])
{
    snprintf(ret, 32, i ? "%s_%d" : "%s", what, i + 1);
    return ret;
}

/* ---- model_index.json ---- */

static const char *clip_class(const struct lg_random_pipeline *p, int i)
{
    return p->net.kind == LG_SD3 || (p->net.kind == LG_SDXL && i) ? "CLIPTextModelWithProjection"
                                                                  : "CLIPTextModel";
}

static int write_index(const struct lg_random_model *m, const struct lg_random_pipeline *p)
{
    const int clips = lg_random_pipeline_clips(p);
    char name[32];
    struct lg_random_text t;
    lg_random_text_begin(&t);
    fprintf(t.file, "{\n  \"_class_name\": \"%s\",\n  \"scheduler\": [\"diffusers\", \"%s\"],\n",
            p->family->class, p->family->scheduler);
    for (int i = 0; i < clips + !!p->t5; i++)
        fprintf(t.file, "  \"%s\": [\"transformers\", \"%s\"],\n",
                part_name("text_encoder", i, name),
                i < clips ? clip_class(p, i) : "T5EncoderModel");
    for (int i = 0; i < clips + !!p->t5; i++)
        fprintf(t.file, "  \"%s\": [\"transformers\", \"%s\"],\n", part_name("tokenizer", i, name),
                i < clips ? "CLIPTokenizer"
                : clips   ? "T5TokenizerFast"
                          : "T5Tokenizer");
    fprintf(t.file,
            "  \"%s\": [\"diffusers\", \"%s\"],\n"
            "  \"vae\": [\"diffusers\", \"%s\"]\n}\n",
            lg_random_pipeline_is_unet(p) ? "unet" : "transformer", p->family->denoiser,
            lg_random_ltx_vae(p->vae) ? "AutoencoderKLLTXVideo" : "AutoencoderKL");
    return lg_random_text_publish(&t, m->dir, "model_index.json");
}

/* ---- the scheduler ---- */

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

static int write_scheduler(const struct lg_random_model *m, const struct lg_random_pipeline *p)
{
    char betas[sizeof SCALED_BETAS + 16];
    struct lg_random_text t;
    snprintf(betas, sizeof betas, SCALED_BETAS,
             !strcmp(p->name, "sd21") ? "v_prediction" : "epsilon");
    const bool flux = p->net.kind == LG_FLUX;
    lg_random_text_begin(&t);
    fprintf(t.file, "{\n  \"_class_name\": \"%s\",\n%s}\n", p->family->scheduler,
            flux && p->net.guidance         ? DYNAMIC_SHIFT
            : flux                          ? NO_SHIFT
            : p->net.kind == LG_SD3         ? SHIFT
            : p->net.kind == LG_LTX         ? LTX_SHIFT
            : lg_random_pipeline_is_unet(p) ? betas
                                            : BETAS);
    return lg_random_text_publish(&t, m->dir, "scheduler_config.json");
}

/* ---- parts ---- */

/* A part that lies in a folder of its own. */
static int part_of(const struct lg_random_model *m, const char *preset, const char *name,
                   char dir[LG_PATH_BYTES], struct lg_random_model *ret)
{
    *ret = *m;
    LG_TRY(lg_path(dir, "%s/%s", m->dir, name));
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
static int make_clip_part(const struct lg_random_model *m, const struct lg_random_pipeline *p,
                          int i)
{
    struct lg_random_model encoder, tokenizer;
    char dir[LG_PATH_BYTES], beside[LG_PATH_BYTES], name[32];
    struct lg_random_text t;
    LG_TRY(part_of(m, p->clip[i], part_name("text_encoder", i, name), dir, &encoder));
    LG_TRY(lg_random_clip_make(&encoder));
    LG_TRY(part_of(m, "", part_name("tokenizer", i, name), beside, &tokenizer));
    LG_TRY(move_file("vocab.json", dir, beside));
    LG_TRY(move_file("merges.txt", dir, beside));
    if (!i) return 0;
    lg_random_text_begin(&t);
    fputs("{\"pad_token\": \"!\"}\n", t.file);
    return lg_random_text_publish(&t, beside, "special_tokens_map.json");
}

static int make_t5_part(const struct lg_random_model *m, const struct lg_random_pipeline *p, int i)
{
    struct lg_random_model encoder, tokenizer;
    char dir[LG_PATH_BYTES], beside[LG_PATH_BYTES], name[32];
    LG_TRY(part_of(m, p->t5, part_name("text_encoder", i, name), dir, &encoder));
    LG_TRY(lg_random_t5_make(&encoder));
    LG_TRY(part_of(m, "", part_name("tokenizer", i, name), beside, &tokenizer));
    return move_file("spiece.model", dir, beside);
}

static int make_texts(const struct lg_random_model *m, const struct lg_random_pipeline *p)
{
    for (int i = 0; i < lg_random_pipeline_clips(p); i++) LG_TRY(make_clip_part(m, p, i));
    if (p->t5) LG_TRY(make_t5_part(m, p, lg_random_pipeline_clips(p)));
    return 0;
}

int lg_random_pipeline_make(const struct lg_random_model *m)
{
    const struct lg_random_pipeline *p;
    struct lg_random_model part;
    char dir[LG_PATH_BYTES];
    LG_TRY(lg_random_pipeline_find(m->preset, &p));
    LG_TRY(make_texts(m, p));
    LG_TRY(part_of(m, p->vae, "vae", dir, &part));
    LG_TRY(lg_random_vae_make(&part));
    LG_TRY(part_of(m, p->name, lg_random_pipeline_is_unet(p) ? "unet" : "transformer", dir, &part));
    LG_TRY(lg_random_transformer_make(&part));
    LG_TRY(part_of(m, "", "scheduler", dir, &part));
    LG_TRY(write_scheduler(&part, p));
    return write_index(m, p);
}
