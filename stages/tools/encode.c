/* lg-encode: pictures to latents, captions to hidden states, latents to pictures, data sets to latent
 * shards. `lgsup encode` and `lgsup decode` become this program. */
#include "stages/encode/encode.h"
#include "base/check.h"
#include "base/inherit.h"
#include "base/log.h"
#include "base/printable.h"
#include "config/models.h"
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage_text[] =
    "usage: lg-encode vae    --model DIR [options] IN.safetensors OUT.safetensors\n"
    "       lg-encode text   --model DIR [options] IN.safetensors|IN.txt OUT.safetensors\n"
    "       lg-encode decode vae --model DIR [options] IN.safetensors OUT.safetensors\n"
    "       lg-encode dataset --vae DIR --data PATH --out DIR [options]\n"
    "vae:     pixels (N,3,H,W) u8 -> latent_mean, latent_logvar (N,C,h,w); clips (N,3,F,H,W)\n"
    "         -> (N,C,f,h,w)\n"
    "text:    token_ids (N,L) i32, or a caption per line -> text_hidden (N,L,D), token_ids\n"
    "decode:  latent_mean -> decoded (N,3,H,W), about [-1, 1]\n"
    "dataset: tar shards or a folder of pictures -> tar shards of latents that lg-loader reads\n"
    "  --model DIR       the model, diffusers or Hugging Face layout (--vae DIR is the same)\n"
    "  --device NAME     host (default), cuda:0 or another backend\n"
    "  --precision P     on a GPU: fp32 (default), tf32, bf16, fp16\n"
    "  --threads N       default 2\n"
    "  --batch N         samples at once (default 16); results do not depend on the number of "
    "samples\n"
    "  --slice N         pictures, or of a clip frames, in flight in the autoencoder (default: "
    "about "
    "a\n"
    "                    megapixel of pictures, 16 of frames)\n"
    "  --tile N          clips larger on a side in tiles of N pixels, which are blended (default: "
    "whole)\n"
    "  --length L        text: token ids per caption of a text file (default: the longest a CLIP "
    "takes, 77; T5 120)\n"
    "  --spiece FILE     text: the sentencepiece model (default DIR/spiece.model)\n"
    "  --size N          dataset: side of the pictures in pixels (default 64)\n"
    "  --shard-size N    dataset: samples per shard (default 1000)";

struct options {
    const char *model, *device, *precision, *spiece, *data, *out;
    int threads, batch, slice, tile, length, size, shard_size;
    char **words; /* what is not an option */
    int n_words;
};

static int number(const char *name, const char *text, int min, int max, int *ret)
{
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (!*text || *end || errno || v < min || v > max)
        return LG_FAIL(LG_ERR_USAGE, "--%s %s: a whole number from %d to %d is wanted", name, text,
                       min, max);
    *ret = (int)v;
    return 0;
}

/* One row per option: where its text or number goes. */
struct row {
    const char *name;
    const char **text;
    int *number, min, max;
};

static int set_option(const struct row *row, const char *value)
{
    if (row->number) return number(row->name, value, row->min, row->max, row->number);
    *row->text = value;
    return 0;
}

static int parse(int argc, char **argv, struct options *o)
{
    *o = (struct options){
        .device = "host", .threads = 2, .batch = 16, .size = 64, .shard_size = 1000};
    const struct row table[] = {
        {.name = "model", .text = &o->model},
        {.name = "vae", .text = &o->model},
        {.name = "device", .text = &o->device},
        {.name = "precision", .text = &o->precision},
        {.name = "spiece", .text = &o->spiece},
        {.name = "data", .text = &o->data},
        {.name = "out", .text = &o->out},
        {.name = "threads", .number = &o->threads, .min = 1, .max = 1024},
        {.name = "batch", .number = &o->batch, .min = 1, .max = 4096},
        {.name = "slice", .number = &o->slice, .min = 1, .max = 4096},
        {.name = "tile", .number = &o->tile, .min = 1, .max = 16384},
        {.name = "length", .number = &o->length, .min = 1, .max = 4096},
        {.name = "size", .number = &o->size, .min = 8, .max = 4096},
        {.name = "shard-size", .number = &o->shard_size, .min = 1, .max = 1000000},
    };
    struct option longs[LG_ARRAY_LEN(table) + 1] = {0};
    for (size_t i = 0; i < LG_ARRAY_LEN(table); i++)
        longs[i] = (struct option){table[i].name, required_argument, NULL, 0};
    for (int c, which; (c = getopt_long(argc, argv, "", longs, &which)) != -1;) {
        if (c) return LG_FAIL(LG_ERR_USAGE, "`lgsup encode --help` lists every option");
        LG_TRY(set_option(&table[which], optarg));
    }
    o->words = argv + optind;
    o->n_words = argc - optind;
    return 0;
}

typedef int file_fn(const struct lg_encode_options *, const char *in, const char *out);

static int on_files(const struct options *o, const struct lg_encode_options *e, int first,
                    file_fn *work)
{
    if (!o->model || o->n_words != first + 2) return LG_FAIL(LG_ERR_USAGE, "%s", usage_text);
    LG_TRY(work(e, o->words[first], o->words[first + 1]));
    return 0;
}

/* The shortest text that is the same number again. */
static const char *shortest(double v, char ret[32])
{
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(ret, 32, "%.*g", digits, v);
        if (strtod(ret, NULL) == v) break;
    }
    return ret;
}

/* What a run has to be told of latents, since it does not see the autoencoder that made them. */
static int print_keys(const struct options *o)
{
    struct lg_vae_info vae;
    char scaling[32], shift[32];
    LG_TRY(lg_vae_info_read(o->model, &vae));
    lg_print(stdout,
             "in a pipeline.toml, without vae.model:\n[data]\npath = \"%s\"\nlatent_channels = %d\n"
             "latent_size = %d\nlatent_scaling = %s\nlatent_shift = %s\n",
             o->out, vae.latent_channels, o->size / vae.factor,
             shortest(vae.scaling_factor, scaling), shortest(vae.shift_factor, shift));
    return 0;
}

static int on_dataset(const struct options *o, const struct lg_encode_options *e)
{
    if (!o->model || !o->data || !o->out || o->n_words != 1)
        return LG_FAIL(LG_ERR_USAGE, "%s", usage_text);
    struct lg_encode_dataset_spec spec = {
        .o = *e, .data = o->data, .out = o->out, .shard_size = o->shard_size, .size = o->size};
    struct lg_encode_dataset_result r;
    LG_TRY(lg_encode_dataset(&spec, &r));
    lg_print(stdout, "%s: %llu latents in %d shards, %llu pictures left out\n", o->out,
             (unsigned long long)r.encoded, r.shards, (unsigned long long)r.left_out);
    LG_TRY(print_keys(o));
    return 0;
}

static int dispatch(const struct options *o, const struct lg_encode_options *e)
{
    const char *command = o->n_words > 0 ? o->words[0] : "";
    if (!strcmp(command, "vae")) return on_files(o, e, 1, lg_encode_pictures);
    if (!strcmp(command, "text")) return on_files(o, e, 1, lg_encode_captions);
    if (!strcmp(command, "dataset")) return on_dataset(o, e);
    if (!strcmp(command, "decode") && o->n_words > 1 && !strcmp(o->words[1], "vae"))
        return on_files(o, e, 2, lg_decode_pictures);
    return LG_FAIL(LG_ERR_USAGE, "%s", usage_text);
}

static int run(int argc, char **argv)
{
    struct options o;
    struct lg_encode_options e = {0};
    LG_TRY(parse(argc, argv, &o));
    if (o.n_words && !strcmp(o.words[0], "encode")) o.words++, o.n_words--; /* as lgsup calls it */
    if (!o.n_words) return LG_FAIL(LG_ERR_USAGE, "%s", usage_text);
    struct lg_device_options options = {.threads = o.threads, .precision = o.precision};
    LG_TRY(lg_device_open(o.device, &options, &e.device));
    e.model = o.model;
    e.batch = o.batch;
    e.slice = o.slice;
    e.tile = o.tile;
    e.length = o.length;
    e.spiece = o.spiece;
    int rc = dispatch(&o, &e);
    lg_device_close(&e.device);
    return rc;
}

int main(int argc, char **argv)
{
    lg_inherit();
    lg_log_set_role("encode");
    if (argc > 1 && !strcmp(argv[argc - 1], "--help")) return puts(usage_text) < 0;
    int rc = run(argc, argv);
    if (rc < 0) fprintf(stderr, "lg-encode: %s\n", lg_err_message());
    return -rc;
}
