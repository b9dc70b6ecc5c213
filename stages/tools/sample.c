/* lg-sample: draws pictures, or clips, from a checkpoint (its EMA weights), a run's newest one, or a diffusers
 * folder. What is not said on the command line comes from the run's config.toml. */
#include "config/sample.h"
#include "base/inherit.h"
#include "base/log.h"
#include "base/printable.h"
#include "config/config.h"
#include "config/manifest.h"
#include "config/plan.h"
#include "config/texts.h"
#include "stages/ckpt/checkpoint.h"
#include "stages/io/clip_write.h"
#include "stages/sample/draw.h"
#include "stages/tools/owner.h"
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage_text[] =
    "usage: lg-sample [\"caption\" ...] --from DIR -o FILE [options]\n"
    "  --from DIR        run directory (its newest checkpoint), checkpoint, or diffusers folder\n"
    "  -o FILE           the grid; what it is says the name's ending:\n"
#define LG_CLIP_FORMAT(name, is_exact, text) "      ." #name ": " text "\n"
#include "stages/io/clip_formats.def"
#undef LG_CLIP_FORMAT
    "  --config FILE     pipeline.toml with models and sampler (default: the run's own)\n"
    "  --seed N --steps N --guidance X --negative TEXT --columns N\n"
    "  --first-frame FILE    a picture that all clips begin with\n"
    "  --size N|HxW      pixels of a picture, --frames N and --fps X of a clip (default: as "
    "trained)\n"
    "  --weights ema|model   which weights of a checkpoint (default ema)\n"
    "  --device NAME         host, cuda:0 (default: the config's, the first GPU of trainer.gpus)\n"
    "  --owner PID           end when this process, which must be our parent, has died\n"
    "  --precision P         on a GPU: fp32 (default), tf32, bf16, fp16\n"
    "Without captions those of [sample] captions are drawn.";

struct options {
    const char *from, *out, *config, *negative, *weights, *device, *precision;
    const char *owner;
    const char *seed, *steps, *guidance, *columns, *fps; /* NULL: from the config */
    const char *first_frame;                             /* NULL: from the config */
    const char *size, *frames;                           /* NULL: as trained */
    const char *const *captions;
    int n_captions;
    bool help;
};

static int parse(int argc, char **argv, struct options *o)
{
    static const struct option longs[] = {{"from", required_argument, 0, 'f'},
                                          {"out", required_argument, 0, 'o'},
                                          {"config", required_argument, 0, 'c'},
                                          {"seed", required_argument, 0, 's'},
                                          {"steps", required_argument, 0, 'n'},
                                          {"guidance", required_argument, 0, 'g'},
                                          {"negative", required_argument, 0, 'x'},
                                          {"columns", required_argument, 0, 'k'},
                                          {"size", required_argument, 0, 'z'},
                                          {"frames", required_argument, 0, 't'},
                                          {"fps", required_argument, 0, 'r'},
                                          {"first-frame", required_argument, 0, 'i'},
                                          {"weights", required_argument, 0, 'w'},
                                          {"device", required_argument, 0, 'd'},
                                          {"precision", required_argument, 0, 'p'},
                                          {"owner", required_argument, 0, 'O'},
                                          {"help", no_argument, 0, 'h'},
                                          {0}};
    *o = (struct options){.weights = "ema"};
    for (int c; (c = getopt_long(argc, argv, "o:h", longs, NULL)) != -1;) switch (c) {
        case 'f':
            o->from = optarg;
            break;
        case 'o':
            o->out = optarg;
            break;
        case 'c':
            o->config = optarg;
            break;
        case 's':
            o->seed = optarg;
            break;
        case 'n':
            o->steps = optarg;
            break;
        case 'g':
            o->guidance = optarg;
            break;
        case 'x':
            o->negative = optarg;
            break;
        case 'k':
            o->columns = optarg;
            break;
        case 'z':
            o->size = optarg;
            break;
        case 't':
            o->frames = optarg;
            break;
        case 'r':
            o->fps = optarg;
            break;
        case 'i':
            o->first_frame = optarg;
            break;
        case 'w':
            o->weights = optarg;
            break;
        case 'd':
            o->device = optarg;
            break;
        case 'p':
            o->precision = optarg;
            break;
        case 'O':
            o->owner = optarg;
            break;
        case 'h':
            o->help = true;
            return 0;
        default: /* getopt has said what it does not know */
            return LG_FAIL(LG_ERR_USAGE, "`lgsup sample --help` lists every option");
        }
    o->captions = (const char *const *)argv + optind;
    o->n_captions = argc - optind;
    if (!o->from || !o->out)
        return LG_FAIL(LG_ERR_USAGE, "%s is missing; `lgsup sample --help` lists every option",
                       o->from ? "-o FILE, the picture to write,"
                               : "--from DIR, the run, checkpoint or model to draw from,");
    return 0;
}

/* from -> folder of the weights and, when it belongs to a run, the run's config.toml. */
static int resolve(const struct options *o, char weights[LG_PATH_BYTES], char config[LG_PATH_BYTES])
{
    char dir[LG_PATH_BYTES], path[LG_PATH_BYTES];
    config[0] = 0;
    LG_TRY(lg_path(dir, "%s", o->from));
    LG_TRY(lg_path(path, "%s/checkpoints", dir));
    if (lg_path_exists(path)) { /* a run directory */
        lg_config *c;
        lg_manifest *m = calloc(1, sizeof *m);
        LG_ASSERT(m);
        LG_TRY(lg_path(config, "%s/config.toml", dir));
        LG_TRY(lg_config_load(config, NULL, 0, &c));
        int rc = lg_manifest_newest(path, c->job_name, dir, m);
        lg_config_free(&c);
        free(m);
        LG_TRY(rc);
    } else if (errno == EACCES) {
        return LG_FAIL(LG_ERR_IO, "cannot look into %s: %s", dir, strerror(errno));
    } else if (lg_manifest_exists(dir)) {
        LG_TRY(lg_path(config, "%s/../../config.toml", dir));
    }
    if (o->config) LG_TRY(lg_path(config, "%s", o->config));
    if (!config[0])
        return LG_FAIL(LG_ERR_USAGE,
                       "%s belongs to no run: name its pipeline.toml with --config (VAE, text "
                       "encoder and objective come from there)",
                       o->from);
    return lg_checkpoint_weights_dir(dir, o->weights, weights);
}

static int number(const char *text, const char *what, double min, double max, double fallback,
                  double *ret)
{
    char *end;
    *ret = fallback;
    if (!text) return 0;
    *ret = strtod(text, &end);
    if (!*text || *end || !(*ret >= min && *ret <= max))
        return LG_FAIL(LG_ERR_USAGE, "--%s %s: a number from %g to %g is wanted", what, text, min,
                       max);
    return 0;
}

static int count(const char *text, const char *what, int min, int max, int64_t fallback, int *ret)
{
    double value;
    LG_TRY(number(text, what, min, max, (double)fallback, &value));
    *ret = (int)value;
    if (value != *ret)
        return LG_FAIL(LG_ERR_USAGE, "--%s %s: a whole number from %d to %d is wanted", what, text,
                       min, max);
    return 0;
}

/* A whole number, as sample.seed. */
static int seed_of(const char *text, int64_t fallback, uint64_t *ret)
{
    *ret = (uint64_t)fallback;
    if (!text) return 0;
    errno = 0;
    *ret = strtoull(text, NULL, 10);
    if (!*text || text[strspn(text, "0123456789")] || errno || *ret > INT64_MAX)
        return LG_FAIL(LG_ERR_USAGE, "--seed %s: a whole number from 0 to %" PRId64 " is wanted",
                       text, INT64_MAX);
    return 0;
}

/* "64" or "32x48", height first. */
static int parse_size(const char *text, int *ret_height, int *ret_width)
{
    char *end;
    if (!text) return 0;
    long height = strtol(text, &end, 10), width = height;
    if (*end == 'x') width = strtol(end + 1, &end, 10);
    if (*end || height < 1 || width < 1 || LG_MAX(height, width) > LG_CLIP_SIDE_MAX)
        return LG_FAIL(LG_ERR_USAGE, "--size %s: one side of a square, or HEIGHTxWIDTH, is wanted",
                       text);
    *ret_height = (int)height;
    *ret_width = (int)width;
    return 0;
}

/* Pictures are drawn in fp32 whatever the run trains in: it costs seconds. */
static int open_device(const struct options *o, const lg_config *c, lg_device **ret)
{
    char name[32];
    int gpu = lg_plan_gpu(c, LG_ROLE_trainer, 0);
    if (gpu < 0)
        snprintf(name, sizeof name, "%s", c->_device);
    else
        snprintf(name, sizeof name, "%s:%d", c->_device, gpu);
    struct lg_device_options options = {.threads = 2, .precision = o->precision};
    return lg_device_open(o->device ? o->device : name, &options, ret);
}

static int draw(const struct options *o, const lg_config *c, const char *weights)
{
    double guidance, fps;
    int columns;
    lg_clip_format format;
    lg_pictures pictures;
    struct lg_draw_spec s = {.weights_dir = weights,
                             .vae_dir = c->vae_model,
                             .prompts = o->captions,
                             .n = o->n_captions,
                             .decode_timestep = c->sample_decode_timestep,
                             .decode_noise = c->sample_decode_noise,
                             .first_frame = o->first_frame ? o->first_frame : c->sample_first_frame,
                             .negative = o->negative ? o->negative : c->sample_negative};
    struct lg_text_config text[LG_TEXTS_MAX] = {0};
    lg_config_texts(c, text);
    for (int k = 0; k < LG_TEXTS_MAX && text[k].info; k++)
        s.text[k] = (struct lg_draw_text){.dir = text[k].model,
                                          .length = (int)text[k].length,
                                          .storage = lg_storage_of(text[k].storage)};
    LG_TRY(seed_of(o->seed, c->sample_seed, &s.seed));
    LG_TRY(count(o->steps, "steps", 1, 1000, c->sample_steps, &s.steps));
    LG_TRY(number(o->guidance, "guidance", 0, 100, c->sample_guidance, &guidance));
    LG_TRY(count(o->columns, "columns", 0, 1000, c->sample_columns, &columns));
    LG_TRY(count(o->frames, "frames", 1, LG_FRAMES_MAX, 0, &s.frames));
    LG_TRY(number(o->fps, "fps", LG_CLIP_FPS_MIN, LG_CLIP_FPS_MAX, lg_sample_fps(c), &fps));
    LG_TRY(parse_size(o->size, &s.height, &s.width));
    LG_TRY(lg_clip_format_of(o->out, &format)); /* before all the work */
    s.guidance = guidance;
    if (!s.n) {
        s.prompts = (const char *const *)c->sample_captions.v;
        s.n = c->sample_captions.n;
    }
    if (!s.n) return LG_FAIL(LG_ERR_USAGE, "no caption: give some, or set [sample] captions");
    if (!c->vae_model[0])
        return LG_FAIL(LG_ERR_CONFIG, "%s: vae.model is empty: there is nothing to decode with",
                       c->file);
    LG_TRY(lg_sampler_method_of(c, &s.method));
    LG_TRY(open_device(o, c, &s.device));
    int rc = lg_draw(&s, &pictures);
    lg_device_close(&s.device);
    LG_TRY(rc);
    rc =
        lg_pictures_save(&pictures, &(struct lg_grid_look){.columns = columns, .fps = fps}, o->out);
    char what[64];
    const char *s_of_many = s.n == 1 ? "" : "s";
    snprintf(what, sizeof what, "picture%s", s_of_many);
    if (pictures.frames > 1)
        snprintf(what, sizeof what, "clip%s of %d frames", s_of_many, pictures.frames);
    lg_pictures_free(&pictures);
    LG_TRY(rc);
    lg_print(stdout, "%s: %d %s from %s, seed %" PRIu64 ", %d steps, guidance %g\n", o->out, s.n,
             what, weights, s.seed, s.steps, s.guidance);
    return 0;
}

static int run(int argc, char **argv)
{
    struct options o;
    char weights[LG_PATH_BYTES], config[LG_PATH_BYTES];
    lg_config *c;
    LG_TRY(parse(argc, argv, &o));
    if (o.help) return puts(usage_text) < 0 ? LG_FAIL(LG_ERR_IO, "cannot write the usage") : 0;
    LG_TRY(lg_end_with(o.owner));
    LG_TRY(resolve(&o, weights, config));
    LG_TRY(lg_config_load(config, NULL, 0, &c));
    int rc = draw(&o, c, weights);
    lg_config_free(&c);
    return rc;
}

int main(int argc, char **argv)
{
    lg_inherit();
    lg_log_set_role("sample");
    int rc = run(argc, argv);
    if (rc < 0) fprintf(stderr, "lg-sample: %s\n", lg_err_message());
    return -rc;
}
