/* lg-emoji: makes the example's data set from packages of the distribution.
 *
 * usage: lg-emoji [--font FILE] [--names FILE] [--size 64] [--per-shard 1000] [--only NAME]...
 *                 [--list FILE] DIR
 *
 * Emoji as stages/tools/emoji/font.h tells, resized with Lanczos, in DIR/emoji-00000.tar ...: `<number>.png` and
 * `<number>.txt`, the emoji's name. A shard appears under its name only when complete.
 *
 * --only (repeatable) keeps the emoji of exactly these names, --list those of a text file (emoji/font.h). A name that no
 * emoji has is an error.
 * Exit codes: those of every program here (base/check.h, negated). */
#include "base/fs.h"
#include "stages/io/resize.h"
#include "stages/io/tar.h"
#include "stages/tools/emoji/font.h"
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE_MAX_PIXELS = 1024 };

struct options {
    struct emoji_options emoji;
    const char *dir;
    int size, per_shard;
};

struct maker {
    struct options options;
    emoji_set *set;
    lg_resize_scratch scratch;
    uint8_t *out; /* (size, size, 3) */
    lg_tar_writer *shard;
    int n_made;
};

static int resize(struct maker *m, const lg_picture *square)
{
    const int size = m->options.size;
    return lg_resize(&(struct lg_resize_args){.rgb = square->rgb,
                                              .width = square->width,
                                              .height = square->height,
                                              .full_w = size,
                                              .full_h = size,
                                              .out_w = size,
                                              .out_h = size,
                                              .out = m->out},
                     &m->scratch);
}

static int add(struct maker *m, const char *name)
{
    const struct options *o = &m->options;
    char path[LG_PATH_BYTES], member[32];
    if (m->n_made % o->per_shard == 0) {
        if (m->shard) LG_TRY(lg_tar_writer_finish(&m->shard));
        LG_TRY(lg_path(path, "%s/emoji-%05d.tar", o->dir, m->n_made / o->per_shard));
        LG_TRY(lg_tar_writer_open(path, &m->shard));
    }
    uint8_t *png;
    size_t bytes;
    LG_TRY(lg_picture_encode_png(m->out, o->size, o->size, &png, &bytes));
    snprintf(member, sizeof member, "%05d.png", m->n_made);
    int rc = lg_tar_writer_add(m->shard, member, png, bytes);
    free(png);
    snprintf(member, sizeof member, "%05d.txt", m->n_made);
    if (rc == 0) rc = lg_tar_writer_add(m->shard, member, name, strlen(name));
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    m->n_made++;
    return 0;
}

static int make_all(struct maker *m)
{
    const struct emoji *e;
    int more;
    while ((more = emoji_next(m->set, &e)) > 0) {
        LG_TRY(resize(m, &e->picture));
        LG_TRY(add(m, e->caption));
    }
    LG_TRY(more);
    LG_TRY(lg_tar_writer_finish(&m->shard));
    return 0;
}

static int run(struct maker *m)
{
    const struct options *o = &m->options;
    LG_TRY(emoji_open(&o->emoji, &m->set));
    m->out = malloc((size_t)o->size * (size_t)o->size * 3);
    if (!m->out) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a picture");
    LG_TRY(lg_mkdirs(o->dir));
    LG_TRY(make_all(m));
    return 0;
}

static void destroy(struct maker *m)
{
    lg_tar_writer_abort(&m->shard);
    lg_resize_free(&m->scratch);
    free(m->out);
    emoji_close(&m->set);
}

static int parse_options(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        {"font", required_argument, NULL, 'f'},
        {"names", required_argument, NULL, 'n'},
        {"size", required_argument, NULL, 's'},
        {"per-shard", required_argument, NULL, 'p'},
        {"only", required_argument, NULL, 'o'},
        {"list", required_argument, NULL, 'l'},
        {0},
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
            o->size = atoi(optarg);
            break;
        case 'p':
            o->per_shard = atoi(optarg);
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
    if (optind != argc - 1 || o->size < 8 || o->size > SIZE_MAX_PIXELS || o->per_shard < 1)
        return -1;
    o->dir = argv[optind];
    return 0;
}

int main(int argc, char **argv)
{
    struct maker m = {.options = {.emoji = {.font = EMOJI_FONT, .names = EMOJI_NAMES},
                                  .size = 64,
                                  .per_shard = 1000}};
    if (parse_options(argc, argv, &m.options) < 0) {
        fprintf(stderr,
                "usage: lg-emoji [--font FILE] [--names FILE] [--size 8..%d]\n"
                "                [--per-shard N] [--only NAME]... [--list FILE] DIR\n",
                SIZE_MAX_PIXELS);
        return -LG_ERR_USAGE;
    }
    int rc = run(&m);
    if (rc < 0)
        fprintf(stderr, "lg-emoji: %s\n", lg_err_text());
    else
        printf("%d emoji of %d x %d in %s (%d without a glyph left out)\n", m.n_made,
               m.options.size, m.options.size, m.options.dir, emoji_without_glyph(m.set));
    destroy(&m);
    return -rc;
}
