/* lg-graph: the program of a net as text: values with shape, bytes, place, first and last use; nodes in order;
 * the arena, scratch memory and floating-point operations.
 *
 * usage: lg-graph DIR|FILE.toml [--batch 1] [--length TOKENS] [--size 256] [--device host] [--train]
 *                 [--recompute WORDS ...] [--set KEY=VALUE ...]
 *
 * DIR: a T5 or CLIP text encoder (--length tokens; by default 120, or as many as a CLIP takes) or an AutoencoderKL
 * (--size pixels a side; encoder, then decoder) as transformers and diffusers write them, or a denoiser as
 * diffusers writes it; its config.json is enough. FILE.toml: the denoiser of a pipeline, with its micro-batch and on its device where the options do not say
 * otherwise.
 *
 * --train: a denoiser's forward and backward. --recompute: as memory.recompute (docs/config.md), words with commas
 * between them; in place of what the pipeline says.
 *
 * A device that times algorithms when it meets a shape for the first time does so here. Exit codes: those of every
 * program here (base/check.h, negated). */
#include "base/check.h"
#include "base/fs.h"
#include "stages/nets/autoencoder.h"
#include "stages/nets/model_config.h"
#include "stages/nets/text_encoder.h"
#include "stages/stage.h"
#include "stages/trainer/rank_memory.h"
#include "stages/trainer/state.h"
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BATCH_MAX = 1 << 16,
    LENGTH_USUAL = 120,
    LENGTH_MAX = 1 << 16,
    SIDE_MAX = 1 << 14,
    SETS_MAX = 64
};

struct options {
    const char *of, *device;  /* device NULL: not said */
    long batch, length, size; /* batch 0: not said */
    bool train;
    char *word[LG_LIST_MAX + 1]; /* of --recompute; they point into argv */
    int n_words;
    const char *set[SETS_MAX];
    int n_sets;
};

static int usage(void)
{
    return LG_FAIL(LG_ERR_USAGE,
                   "usage: lg-graph DIR|FILE.toml [--batch 1] [--length TOKENS] [--size 256] "
                   "[--device host] [--train] [--recompute WORDS ...] [--set KEY=VALUE ...]");
}

static int number(const char *name, const char *text, long max, long *ret)
{
    char *end;
    long n = strtol(text, &end, 10);
    if (end == text || *end || n < 1 || n > max)
        return LG_FAIL(LG_ERR_USAGE, "--%s %s: expected a number from 1 to %ld", name, text, max);
    *ret = n;
    return 0;
}

/* Cuts text at its commas. */
static int add_words(struct options *o, char *text)
{
    for (char *word; (word = strsep(&text, ","));) {
        if (o->n_words == LG_LIST_MAX)
            return LG_FAIL(LG_ERR_USAGE, "--recompute: more than %d words", LG_LIST_MAX);
        o->word[o->n_words++] = word;
    }
    return 0;
}

static int add_set(struct options *o, const char *text)
{
    if (o->n_sets == SETS_MAX) return LG_FAIL(LG_ERR_USAGE, "more than %d --set", SETS_MAX);
    o->set[o->n_sets++] = text;
    return 0;
}

static int parse_option(struct options *o, int c)
{
    switch (c) {
    case 'b':
        return number("batch", optarg, BATCH_MAX, &o->batch);
    case 'l':
        return number("length", optarg, LENGTH_MAX, &o->length);
    case 's':
        return number("size", optarg, SIDE_MAX, &o->size);
    case 'd':
        o->device = optarg;
        return 0;
    case 't':
        o->train = true;
        return 0;
    case 'r':
        return add_words(o, optarg);
    case 'S':
        return add_set(o, optarg);
    default:
        return usage();
    }
}

static bool is_pipeline(const char *of)
{
    size_t n = strlen(of);
    return n > 5 && !strcmp(of + n - 5, ".toml");
}

static int parse(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        {"batch", required_argument, NULL, 'b'},     {"length", required_argument, NULL, 'l'},
        {"size", required_argument, NULL, 's'},      {"device", required_argument, NULL, 'd'},
        {"train", no_argument, NULL, 't'},           {"set", required_argument, NULL, 'S'},
        {"recompute", required_argument, NULL, 'r'}, {0}};
    *o = (struct options){.size = 256};
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) LG_TRY(parse_option(o, c));
    if (optind + 1 != argc) return usage();
    o->of = argv[optind];
    if (o->n_words && !o->train)
        return LG_FAIL(LG_ERR_USAGE, "--recompute needs --train: a forward alone keeps nothing");
    if (o->n_sets && !is_pipeline(o->of))
        return LG_FAIL(LG_ERR_USAGE, "--set is for a FILE.toml, which %s is not", o->of);
    return 0;
}

static int print_denoiser(const struct options *o, lg_device *d,
                          const struct lg_denoiser_config *net, struct lg_denoiser_mode mode)
{
    mode.train = o->train;
    if (o->batch) mode.batch = (int)o->batch;
    if (o->n_words) mode.recompute = (const char *const *)o->word;
    LG_TRY(lg_denoiser_print(d, net, &mode, stdout));
    return 0;
}

/* ---- a folder ---- */

enum kind { TEXT_ENCODER, AUTOENCODER, DENOISER };

static int find_kind(const char *path, enum kind *ret)
{
    static const char start[] = "Autoencoder";
    lg_model_config m = {0};
    LG_TRY(lg_model_config_open(path, &m));
    const cJSON *class = cJSON_GetObjectItemCaseSensitive(m.root, "_class_name");
    const char *name = cJSON_IsString(class) ? class->valuestring : "";
    *ret = !class ? TEXT_ENCODER : !strncmp(name, start, sizeof start - 1) ? AUTOENCODER : DENOISER;
    lg_model_config_close(&m);
    return 0;
}

static int print_text_encoder(const struct options *o, lg_device *d)
{
    struct lg_text_encoder_config c;
    LG_TRY(lg_text_encoder_config_load(o->of, &c));
    const int most = lg_text_encoder_sizes(&c).length_max, usual = most ? most : LENGTH_USUAL;
    const struct lg_text_encoder_shape shape = {.batch = (int)LG_MAX(o->batch, 1),
                                                .length = o->length ? (int)o->length : usual};
    LG_TRY(lg_text_encoder_print(d, &c, &shape, stdout));
    return 0;
}

static int print_autoencoder(const struct options *o, lg_device *d)
{
    struct lg_autoencoder_config c;
    LG_TRY(lg_autoencoder_config_load(o->of, &c));
    const struct lg_autoencoder_shape shape = {.half = LG_AEKL_BOTH,
                                               .batch = (int)LG_MAX(o->batch, 1),
                                               .height = (int)o->size,
                                               .width = (int)o->size};
    LG_TRY(lg_autoencoder_print(d, &c, &shape, stdout));
    return 0;
}

static int print_folder(const struct options *o, lg_device *d)
{
    char path[LG_PATH_BYTES];
    struct lg_denoiser_config net;
    enum kind kind;
    LG_TRY(lg_path(path, "%s/config.json", o->of));
    LG_TRY(find_kind(path, &kind));
    if (kind == DENOISER) {
        LG_TRY(lg_denoiser_config_load(path, &net));
        /* As a rank trains it that has one micro-batch in a step. */
        LG_TRY(print_denoiser(o, d, &net, (struct lg_denoiser_mode){.batch = 1, .lends = true}));
        return 0;
    }
    if (o->train)
        return LG_FAIL(LG_ERR_USAGE, "--train: %s is no denoiser, and nothing else is trained",
                       o->of);
    LG_TRY(kind == TEXT_ENCODER ? print_text_encoder(o, d) : print_autoencoder(o, d));
    return 0;
}

static int open_and_print_folder(const struct options *o)
{
    lg_device *d;
    LG_TRY(lg_device_open(o->device ? o->device : "host", NULL, &d));
    int rc = print_folder(o, d);
    lg_device_close(&d);
    LG_TRY(rc);
    return 0;
}

/* ---- a pipeline ---- */

static int print_trained(const struct options *o, const lg_config *c)
{
    lg_plan plan;
    struct lg_denoiser_config net;
    lg_device *d;
    LG_TRY(lg_config_check(c));
    LG_TRY(lg_plan_make(c, NULL, &plan));
    LG_TRY(lg_net_config_of(c, &plan, &net));
    LG_TRY(o->device ? lg_device_open(o->device, NULL, &d)
                     : lg_stage_plan_device(c, &plan, LG_ROLE_trainer, 0, &d));
    int rc = print_denoiser(o, d, &net, lg_rank_mode(c, &plan, 0));
    lg_device_close(&d);
    LG_TRY(rc);
    return 0;
}

static int print_pipeline(const struct options *o)
{
    lg_config *c;
    LG_TRY(lg_config_load(o->of, o->set, o->n_sets, &c));
    int rc = print_trained(o, c);
    lg_config_free(&c);
    LG_TRY(rc);
    return 0;
}

int main(int argc, char **argv)
{
    struct options o;
    int rc = parse(argc, argv, &o);
    if (rc == 0) rc = is_pipeline(o.of) ? print_pipeline(&o) : open_and_print_folder(&o);
    if (rc == 0 && (fflush(stdout) != 0 || ferror(stdout)))
        rc = LG_FAIL(LG_ERR_IO, "cannot write the program");
    if (rc < 0) fprintf(stderr, "lg-graph: %s\n", lg_err_message());
    return -rc;
}
