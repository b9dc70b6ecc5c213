/* lg-graph: the program of a net as text: values with shape, bytes, place, first and last use; nodes in order;
 * the arena, scratch memory and floating-point operations.
 *
 * usage: lg-graph DIR [--batch 1] [--length 120] [--size 256] [--device host]
 *
 * DIR: a T5 encoder (--length tokens) or an AutoencoderKL (--size pixels a side; encoder, then decoder) as
 * transformers and diffusers write them; its config.json is enough. A device that times algorithms when it meets a
 * shape for the first time does so here. Exit codes: those of every program here (base/check.h, negated). */
#include "base/check.h"
#include "base/fs.h"
#include "stages/nets/autoencoder_kl.h"
#include "stages/nets/model_config.h"
#include "stages/nets/t5.h"
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH_MAX = 1 << 16, LENGTH_MAX = 1 << 16, SIDE_MAX = 1 << 14 };

struct options {
    const char *dir, *device;
    long batch, length, size;
};

static int usage(void)
{
    return LG_FAIL(LG_ERR_USAGE,
                   "usage: lg-graph DIR [--batch 1] [--length 120] [--size 256] [--device host]");
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

static int parse(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {{"batch", required_argument, NULL, 'b'},
                                          {"length", required_argument, NULL, 'l'},
                                          {"size", required_argument, NULL, 's'},
                                          {"device", required_argument, NULL, 'd'},
                                          {0}};
    *o = (struct options){.device = "host", .batch = 1, .length = 120, .size = 256};
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) switch (c) {
        case 'b':
            LG_TRY(number("batch", optarg, BATCH_MAX, &o->batch));
            break;
        case 'l':
            LG_TRY(number("length", optarg, LENGTH_MAX, &o->length));
            break;
        case 's':
            LG_TRY(number("size", optarg, SIDE_MAX, &o->size));
            break;
        case 'd':
            o->device = optarg;
            break;
        default:
            return usage();
        }
    if (optind + 1 != argc) return usage();
    o->dir = argv[optind];
    return 0;
}

static int print(const struct options *o, lg_device *d)
{
    char path[LG_PATH_BYTES];
    struct lg_t5_config t5;
    struct lg_aekl_config vae;
    LG_TRY(lg_path(path, "%s/config.json", o->dir));
    lg_model_config m = {0};
    LG_TRY(lg_model_config_open(path, &m));
    bool is_vae = cJSON_GetObjectItemCaseSensitive(m.root, "_class_name") != NULL;
    lg_model_config_close(&m);
    if (!is_vae) {
        LG_TRY(lg_t5_config_load(o->dir, &t5));
        LG_TRY(lg_t5_print(d, &t5, (int)o->batch, (int)o->length, stdout));
        return 0;
    }
    LG_TRY(lg_aekl_config_load(o->dir, &vae));
    const struct lg_aekl_shape shape = {.half = LG_AEKL_BOTH,
                                        .batch = (int)o->batch,
                                        .height = (int)o->size,
                                        .width = (int)o->size};
    LG_TRY(lg_aekl_print(d, &vae, &shape, stdout));
    return 0;
}

int main(int argc, char **argv)
{
    struct options o;
    lg_device *d = NULL;
    int rc = parse(argc, argv, &o);
    if (rc == 0) rc = lg_device_open(o.device, NULL, &d);
    if (rc == 0) rc = print(&o, d);
    if (rc == 0 && (fflush(stdout) != 0 || ferror(stdout)))
        rc = LG_FAIL(LG_ERR_IO, "cannot write the program");
    if (rc < 0) fprintf(stderr, "lg-graph: %s\n", lg_err_message());
    lg_device_close(&d);
    return -rc;
}
