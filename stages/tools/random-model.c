/* lg-random-model: models with random weights and data sets of noise, for measuring where pretrained
 * weights and real pictures are not at hand. What it makes has the shapes, files and names of the real
 * thing; nothing can be learned from it.
 *
 * Weights are uniform with the variance of the usual initialisation; an element is a function of the seed, its tensor's
 * name and its place there, so equal commands give equal bytes. Models are described in random/model.h, data in
 * random/data.h.
 *
 * A pipeline is a folder as diffusers has it: model_index.json, transformer or unet (fp32; those of FLUX, SD3.5 large and
 * LTX-Video, which are large, in --dtype, as the other parts are), vae, scheduler and, but for DiT, its text_encoder and
 * tokenizer, or several of them. The tiny ones are tiny in all parts; PixArt's has a variance and conditions of a size,
 * SD3's one block with a second attention and CLIPs of two widths.
 *
 * Exit codes: those of every program here (base/check.h, negated). */
#include "base/check.h"
#include "base/fs.h"
#include "stages/tools/random/data.h"
#include "stages/tools/random/model.h"
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char USAGE[] =
    "usage: lg-random-model vae --preset sd|sdxl|sd3|flux|ltx|ltx-095|tiny|tiny-sd3|tiny-ltx|\n"
    "                       tiny-ltx-095 DIR\n"
    "       lg-random-model t5 --preset base|xl|xxl|tiny|tiny-wide --spiece FILE DIR\n"
    "       lg-random-model clip --preset l|l-projected|h|bigg|tiny|tiny-g DIR\n"
    "       lg-random-model pipeline --preset dit-xl-2|pixart-alpha|pixart-sigma|sd3-medium|\n"
    "                       sd35-medium|sd35-large|flux-dev|flux-schnell|sd21|sdxl|latte-1|\n"
    "                       ltx-video|tiny-dit|tiny-pixart|tiny-sd3|tiny-flux|tiny-sd2|tiny-sdxl|\n"
    "                       tiny-latte|tiny-ltx [--spiece FILE] DIR\n"
    "       lg-random-model transformer --preset (as pipeline; a U-Net too) DIR\n"
    "       lg-random-model pictures --count N [--size 256] [--ratio 1] [--classes 1000] DIR\n"
    "       lg-random-model clips --count N [--size 256] [--frames 25] [--format gif] [--classes "
    "1000]\n"
    "                       DIR\n"
    "       lg-random-model latents --count N [--size 32] [--channels 4] [--frames F]\n"
    "                       [--classes 1000] DIR\n"
    "  all: [--seed 0]   models: [--dtype f32|f16|bf16]   data: [--per-shard 1000]\n";

enum {
    PICTURE_SIDE = 256,
    LATENT_SIDE = 32,
    CLIP_FRAMES = 25
}; /* unless the options say otherwise */

struct options {
    const char *kind, *dtype, *format;
    struct lg_random_model model;
    struct lg_random_data data;
};

static const struct {
    const char *kind;
    int (*make)(const struct lg_random_model *m);
} MODEL[] = {
    {"vae", lg_random_vae_make},
    {"t5", lg_random_t5_make},
    {"clip", lg_random_clip_make},
    {"pipeline", lg_random_pipeline_make},
    {"transformer", lg_random_transformer_make},
};

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

static int parse_format(const char *name, lg_clip_format *ret)
{
    for (int i = 0; i < LG_CLIP_FORMATS; i++)
        if (i != LG_CLIP_png && !strcmp(name, lg_clip_format_name((lg_clip_format)i))) {
            *ret = (lg_clip_format)i;
            return 0;
        }
    return LG_FAIL(LG_ERR_USAGE, "no format \"%s\": gif, webp, mp4, webm and mkv exist", name);
}

static int run(struct options *o)
{
    static const char *const DATA[] = {[LG_RANDOM_PICTURES] = "pictures",
                                       [LG_RANDOM_CLIPS] = "clips",
                                       [LG_RANDOM_LATENTS] = "latents"};
    LG_TRY(parse_dtype(o->dtype, &o->model.dtype));
    for (size_t i = 0; i < LG_ARRAY_LEN(DATA); i++) {
        if (strcmp(o->kind, DATA[i]) != 0) continue;
        o->data.kind = (enum lg_random_kind)i;
        if (!o->data.size) o->data.size = i == LG_RANDOM_LATENTS ? LATENT_SIDE : PICTURE_SIDE;
        if (i == LG_RANDOM_CLIPS) {
            if (!o->data.frames) o->data.frames = CLIP_FRAMES;
            LG_TRY(parse_format(o->format, &o->data.format));
        }
        LG_TRY(lg_random_data_make(&o->data));
        return 0;
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(MODEL); i++) {
        if (strcmp(o->kind, MODEL[i].kind) != 0) continue;
        LG_TRY(lg_mkdirs(o->model.dir));
        LG_TRY(MODEL[i].make(&o->model));
        return 0;
    }
    return LG_FAIL(LG_ERR_USAGE,
                   "\"%s\" cannot be made: vae, t5, clip, pipeline, transformer, pictures, clips "
                   "and latents can",
                   o->kind);
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
        {"preset", required_argument, NULL, 'p'},
        {"spiece", required_argument, NULL, 's'},
        {"count", required_argument, NULL, 'n'},
        {"size", required_argument, NULL, 'z'},
        {"classes", required_argument, NULL, 'c'},
        {"channels", required_argument, NULL, 'h'},
        {"frames", required_argument, NULL, 'f'},
        {"per-shard", required_argument, NULL, 'm'},
        {"seed", required_argument, NULL, 'e'},
        {"dtype", required_argument, NULL, 'd'},
        {"ratio", required_argument, NULL, 'r'},
        {"format", required_argument, NULL, 'o'},
        {0},
    };
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        long *to = c == 'n'   ? &o->data.count
                   : c == 'z' ? &o->data.size
                   : c == 'r' ? &o->data.ratio
                   : c == 'c' ? &o->data.classes
                   : c == 'h' ? &o->data.channels
                   : c == 'f' ? &o->data.frames
                              : &o->data.per_shard;
        if (c == '?') return -1;
        if (c == 'p')
            o->model.preset = optarg;
        else if (c == 's')
            o->model.spiece = optarg;
        else if (c == 'd')
            o->dtype = optarg;
        else if (c == 'o')
            o->format = optarg;
        else if (c == 'e')
            o->model.seed = o->data.seed = strtoull(optarg, NULL, 10);
        else if ((*to = number(optarg)) < 0)
            return -1;
    }
    if (optind != argc - 2) return -1;
    o->kind = argv[optind];
    o->model.dir = o->data.dir = argv[optind + 1];
    return 0;
}

int main(int argc, char **argv)
{
    struct options o = {
        .dtype = "bf16",
        .format = "gif",
        .model = {.preset = ""},
        .data = {.ratio = 1, .classes = 1000, .channels = 4, .per_shard = 1000},
    };
    if (argc == 2 && !strcmp(argv[1], "--help")) return fputs(USAGE, stdout) < 0;
    if (parse_options(argc, argv, &o) < 0) {
        fputs(USAGE, stderr);
        return -LG_ERR_USAGE;
    }
    int rc = run(&o);
    if (rc < 0) fprintf(stderr, "lg-random-model: %s\n", lg_err_text());
    return -rc;
}
