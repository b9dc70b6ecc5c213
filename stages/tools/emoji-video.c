/* lg-emoji-video: makes the video example's data set from packages of the distribution.
 *
 * usage: lg-emoji-video [--font FILE] [--names FILE] [--size 32] [--frames 8] [--fps 8] [--variants 2]
 *                       [--per-shard 1000] [--only NAME]... [--list FILE] DIR
 *
 * Each emoji (emoji/font.h) does each of the things of emoji/motions.def on white, in DIR/clips-00000.tar ...: `<number>.webp`,
 * a lossless animation, and `<number>.txt`, "a red heart moves left"; `variants` clips of each, which differ in where the emoji
 * is. Of emoji number i one direction (i mod 4) and one other motion are held out: their captions stand in DIR/held-out.txt
 * instead, a line each. The same packages give the same bytes. A shard appears under its name only when complete.
 * Exit codes: those of every program here (base/check.h, negated). */
#include "base/fs.h"
#include "base/philox.h"
#include "stages/io/clip_write.h"
#include "stages/io/tar.h"
#include "stages/tools/emoji/font.h"
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE_MAX_PIXELS = 512, FRAMES_MAX = 256, VARIANTS_MAX = 100 };

typedef enum motion {
#define LG_MOTION(name, caption) MOTION_##name,
#include "stages/tools/emoji/motions.def"
#undef LG_MOTION
    MOTIONS
} motion;
static const char *const motion_captions[MOTIONS] = {
#define LG_MOTION(name, caption) caption,
#include "stages/tools/emoji/motions.def"
#undef LG_MOTION
};
enum { DIRECTIONS = MOTION_down + 1 };

struct options {
    struct emoji_options emoji;
    const char *dir;
    int size, frames, variants, per_shard;
    double fps;
};

struct maker {
    struct options options;
    emoji_set *set;
    uint8_t *rgb; /* (frames, size, size, 3) */
    lg_tar_writer *shard;
    FILE *held_out;
    int n_emoji, n_made, n_held_out;
};

/* ---- a frame ---- */

/* Lengths in sides of the frame. */
struct pose {
    double x, y;    /* centre */
    double side;    /* of the emoji's square */
    double angle;   /* clockwise, in turns */
    double opacity; /* 0..1 */
};

/* At t from 0 to 1. x, y: where the emoji is on the whole. */
static struct pose pose_at(motion m, double t, double x, double y)
{
    const double way = 0.38 * (t - 0.5); /* the square just stays inside */
    struct pose p = {.x = x, .y = y, .side = 0.6, .opacity = 1};
    switch (m) {
    case MOTION_left:
        p.x = 0.5 - way;
        break;
    case MOTION_right:
        p.x = 0.5 + way;
        break;
    case MOTION_up:
        p.y = 0.5 - way;
        break;
    case MOTION_down:
        p.y = 0.5 + way;
        break;
    case MOTION_turns:
        p.angle = t * 7 / 16;
        break;
    case MOTION_grows:
        p.side = 0.25 + 0.55 * t;
        break;
    case MOTION_shrinks:
        p.side = 0.8 - 0.55 * t;
        break;
    case MOTION_fades:
        p.opacity = 1 - 0.9 * t;
        break;
    case MOTIONS:
        LG_ASSERT(!"a motion");
    }
    return p;
}

/* Each pixel is the mean of GRID x GRID points of the emoji. Coordinates are whole numbers of 2^-16 source pixels, so that a
 * libm whose sine differs in its last bit changes nothing. */
enum { GRID = 8, ONE = 1 << 16 };

static void draw_frame(const lg_picture *square, const struct pose *p, int size, uint8_t *out)
{
    const double scale = square->width / (p->side * size) / GRID; /* source pixels a step */
    const int64_t c = lround(cos(2 * M_PI * p->angle) * scale * ONE),
                  s = lround(sin(2 * M_PI * p->angle) * scale * ONE);
    const int64_t middle = (int64_t)square->width * ONE / 2;
    const int opacity = (int)lround(p->opacity * 256), n = GRID * GRID;
    const int64_t x0 = lround(p->x * size * GRID * 2), y0 = lround(p->y * size * GRID * 2);
    for (int py = 0; py < size; py++)
        for (int px = 0; px < size; px++, out += 3) {
            int sum[3] = {0};
            for (int i = 0; i < n; i++) { /* from the centre, in half steps */
                const int64_t dx = 2 * (px * GRID + i % GRID) + 1 - x0,
                              dy = 2 * (py * GRID + i / GRID) + 1 - y0;
                const int64_t u = middle + (dx * c + dy * s) / 2,
                              v = middle + (dy * c - dx * s) / 2;
                const int64_t at_x = u >> 16, at_y = v >> 16;
                const bool in =
                    at_x >= 0 && at_y >= 0 && at_x < square->width && at_y < square->height;
                for (int k = 0; k < 3; k++)
                    sum[k] += in ? square->rgb[3 * (at_y * square->width + at_x) + k] : 255;
            }
            for (int k = 0; k < 3; k++) /* rounded, over white */
                out[k] =
                    (uint8_t)((sum[k] * opacity + 255 * n * (256 - opacity) + n * 128) / (n * 256));
        }
}

/* ---- clips ---- */

static int add(struct maker *m, const char *caption)
{
    const struct options *o = &m->options;
    const struct lg_clip clip = {
        .frames = o->frames, .height = o->size, .width = o->size, .fps = o->fps, .rgb = m->rgb};
    char path[LG_PATH_BYTES], member[32];
    uint8_t *data;
    size_t bytes;
    if (m->n_made % o->per_shard == 0) {
        if (m->shard) LG_TRY(lg_tar_writer_finish(&m->shard));
        LG_TRY(lg_path(path, "%s/clips-%05d.tar", o->dir, m->n_made / o->per_shard));
        LG_TRY(lg_tar_writer_open(path, &m->shard));
    }
    LG_TRY(lg_clip_encode(&clip, LG_CLIP_webp, &data, &bytes));
    snprintf(member, sizeof member, "%05d.webp", m->n_made);
    int rc = lg_tar_writer_add(m->shard, member, data, bytes);
    free(data);
    snprintf(member, sizeof member, "%05d.txt", m->n_made);
    if (rc == 0) rc = lg_tar_writer_add(m->shard, member, caption, strlen(caption));
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    m->n_made++;
    return 0;
}

/* Up to 1/16 off the middle, chosen by the clip's number. */
static int add_clip(struct maker *m, const lg_picture *square, motion what, const char *caption)
{
    const int size = m->options.size, frames = m->options.frames;
    const lg_philox_out r =
        lg_philox4x32((const uint32_t[4]){(uint32_t)m->n_made}, (const uint32_t[2]){0});
    const double x = 0.5 + (lg_uniform_f64(r.v[0]) - 0.5) / 8,
                 y = 0.5 + (lg_uniform_f64(r.v[1]) - 0.5) / 8;
    for (int f = 0; f < frames; f++) {
        const struct pose p = pose_at(what, frames > 1 ? (double)f / (frames - 1) : 0, x, y);
        draw_frame(square, &p, size, m->rgb + (size_t)f * (size_t)size * (size_t)size * 3);
    }
    return add(m, caption);
}

static bool is_held_out(int emoji, motion m)
{
    return (int)m < DIRECTIONS ? (int)m == emoji % DIRECTIONS
                               : (int)m - DIRECTIONS == emoji / DIRECTIONS % (MOTIONS - DIRECTIONS);
}

static int add_emoji(struct maker *m, const struct emoji *e)
{
    char caption[512];
    for (int i = 0; i < MOTIONS; i++) {
        snprintf(caption, sizeof caption, "a%s %s %s", strchr("aeiou", e->caption[0]) ? "n" : "",
                 e->caption, motion_captions[i]);
        if (is_held_out(m->n_emoji, (motion)i)) {
            fprintf(m->held_out, "%s\n", caption);
            m->n_held_out++;
            continue;
        }
        for (int v = 0; v < m->options.variants; v++)
            LG_TRY(add_clip(m, &e->picture, (motion)i, caption));
    }
    m->n_emoji++;
    return 0;
}

static int make_all(struct maker *m)
{
    const struct emoji *e;
    int more;
    while ((more = emoji_next(m->set, &e)) > 0) LG_TRY(add_emoji(m, e));
    LG_TRY(more);
    LG_TRY(lg_tar_writer_finish(&m->shard));
    return 0;
}

static int run(struct maker *m)
{
    const struct options *o = &m->options;
    char path[LG_PATH_BYTES], *captions = NULL;
    size_t bytes;
    LG_TRY(emoji_open(&o->emoji, &m->set));
    m->rgb = malloc((size_t)o->frames * (size_t)o->size * (size_t)o->size * 3);
    m->held_out = open_memstream(&captions, &bytes);
    if (!m->rgb || !m->held_out) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a clip");
    LG_TRY(lg_mkdirs(o->dir));
    LG_TRY(lg_path(path, "%s/held-out.txt", o->dir));
    int rc = make_all(m);
    fclose(m->held_out);
    if (rc == 0) rc = lg_publish_file(path, captions, bytes);
    free(captions);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static void destroy(struct maker *m)
{
    lg_tar_writer_abort(&m->shard);
    free(m->rgb);
    emoji_close(&m->set);
}

/* A whole number from 1 to max; 0: it is none. */
static int count(const char *text, int max)
{
    char *end;
    long v = strtol(text, &end, 10);
    return *text && !*end && v >= 1 && v <= max ? (int)v : 0;
}

static int parse_options(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        {"font", required_argument, NULL, 'f'},      {"names", required_argument, NULL, 'n'},
        {"size", required_argument, NULL, 's'},      {"frames", required_argument, NULL, 't'},
        {"fps", required_argument, NULL, 'r'},       {"variants", required_argument, NULL, 'v'},
        {"per-shard", required_argument, NULL, 'p'}, {"only", required_argument, NULL, 'o'},
        {"list", required_argument, NULL, 'l'},      {0},
    };
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        switch (c) {
        case 'f':
            o->emoji.font = optarg;
            break;
        case 'n':
            o->emoji.names = optarg;
            break;
        case 's':
            o->size = count(optarg, SIZE_MAX_PIXELS);
            break;
        case 't':
            o->frames = count(optarg, FRAMES_MAX);
            break;
        case 'r':
            o->fps = count(optarg, LG_CLIP_FPS_MAX);
            break;
        case 'v':
            o->variants = count(optarg, VARIANTS_MAX);
            break;
        case 'p':
            o->per_shard = count(optarg, 1000000);
            break;
        case 'o':
            if (o->emoji.n_only == EMOJI_ONLY_MAX) return -1;
            o->emoji.only[o->emoji.n_only++] = optarg;
            break;
        case 'l':
            o->emoji.list = optarg;
            break;
        default:
            return -1;
        }
    }
    if (optind != argc - 1 || !o->size || !o->frames || !o->fps || !o->variants || !o->per_shard)
        return -1;
    o->dir = argv[optind];
    return 0;
}

int main(int argc, char **argv)
{
    struct maker m = {.options = {.emoji = {.font = EMOJI_FONT, .names = EMOJI_NAMES},
                                  .size = 32,
                                  .frames = 8,
                                  .fps = 8,
                                  .variants = 2,
                                  .per_shard = 1000}};
    if (parse_options(argc, argv, &m.options) < 0) {
        fprintf(stderr,
                "usage: lg-emoji-video [--font FILE] [--names FILE] [--size 1..%d] [--frames "
                "1..%d] [--fps N]\n"
                "                      [--variants 1..%d] [--per-shard N] [--only NAME]... [--list "
                "FILE] DIR\n",
                SIZE_MAX_PIXELS, FRAMES_MAX, VARIANTS_MAX);
        return -LG_ERR_USAGE;
    }
    int rc = run(&m);
    if (rc < 0)
        fprintf(stderr, "lg-emoji-video: %s\n", lg_err_text());
    else
        printf("%d clips of %d emoji, %d frames of %d x %d, in %s (%d combinations held out)\n",
               m.n_made, m.n_emoji, m.options.frames, m.options.size, m.options.size, m.options.dir,
               m.n_held_out);
    destroy(&m);
    return -rc;
}
