/* lg-emoji: makes the example's data set from packages of the distribution.
 *
 * usage: lg-emoji [--font FILE] [--names FILE] [--size 64] [--per-shard 1000] [--only NAME]...
 *                 [--list FILE] DIR
 *
 * Reads the fully-qualified emoji of emoji-test.txt (package unicode-data), shapes each with
 * HarfBuzz into one glyph of NotoColorEmoji.ttf (fonts-noto-color-emoji; those it has no glyph for
 * are left out), and writes DIR/emoji-00000.tar ...: `<number>.png` and `<number>.txt`, the emoji's
 * name.
 *
 * The picture: the glyph's bitmap cut to the box of its visible pixels, centred on a white square
 * two pixels larger than the box's longer side at each end, resized with Lanczos. White shows
 * through the soft edges twice (the glyph lies over white, and that over white again with the same
 * alpha): the example's autoencoder was trained on pictures with edges of this kind. The same
 * packages give the same bytes. A shard appears under its name only when complete.
 *
 * --only (repeatable) keeps the emoji of exactly these names, --list those of a text file: one name a
 * line, lines that are empty or begin with # are skipped; "NAME = CAPTION" gives that one another caption. A name that no
 * emoji has is an error.
 * Exit codes: those of every program here (base/check.h, negated). */
#include "base/check.h"
#include "base/fs.h"
#include "stages/io/picture.h"
#include "stages/io/resize.h"
#include "stages/io/tar.h"
#include <ft2build.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include FT_FREETYPE_H
#include <hb.h>

enum {
    POINTS_MAX = 16, /* code points of one emoji; the longest today has 10 */
    ONLY_MAX = 1024,
    SIZE_MAX_PIXELS = 1024,
    MARGIN = 2, /* pixels of white around the bitmap */
    NAMES_BYTES_MAX = 16 << 20
};

struct options {
    const char *font, *names, *list, *dir;
    int size, per_shard;
    const char *only[ONLY_MAX];    /* names to keep; none: all of them */
    const char *caption[ONLY_MAX]; /* NULL: the name */
    bool made[ONLY_MAX];           /* whether that name's picture has been made */
    int n_only;
};

struct emoji {
    hb_codepoint_t point[POINTS_MAX];
    int n_points;
    char name[256];
};

struct maker {
    struct options options;
    FT_Library freetype;
    FT_Face face;
    hb_font_t *shaper;
    hb_buffer_t *run;
    lg_picture square; /* the glyph on white */
    lg_resize_scratch scratch;
    uint8_t *out;    /* (size, size, 3) */
    char *list_text; /* of options.list */
    lg_tar_writer *shard;
    int n_made, n_without_glyph;
};

/* ---- emoji-test.txt ---- */

/* "1F468 200D 1F9B0 ; fully-qualified # 👨‍🦰 E11.0 man: red hair"; false for other lines. */
static bool parse_line(char *line, struct emoji *e)
{
    char *semicolon = strchr(line, ';'), *hash = semicolon ? strchr(semicolon, '#') : NULL;
    if (!hash) return false;
    static const char status[] = "fully-qualified";
    char *s = semicolon + 1 + strspn(semicolon + 1, " ");
    if (strncmp(s, status, sizeof status - 1) != 0) return false;
    e->n_points = 0;
    for (s = line; s < semicolon && e->n_points < POINTS_MAX;) {
        char *end;
        unsigned long point = strtoul(s, &end, 16);
        if (end == s || point == 0 || point > 0x10ffff) return false;
        e->point[e->n_points++] = (hb_codepoint_t)point;
        s = end + strspn(end, " ");
    }
    /* After '#': the emoji itself, the version "E11.0", the name. */
    s = hash + 1 + strspn(hash + 1, " ");
    for (int skip = 0; skip < 2; skip++) {
        s += strcspn(s, " ");
        s += strspn(s, " ");
    }
    size_t len = strcspn(s, "\r\n");
    while (len && s[len - 1] == ' ') len--;
    if (len == 0 || len >= sizeof e->name || e->n_points == 0) return false;
    memcpy(e->name, s, len);
    e->name[len] = 0;
    return true;
}

/* Index of a name in o->only; -1 when it is not there. */
static int find_name(const struct options *o, const char *name)
{
    for (int i = 0; i < o->n_only; i++)
        if (strcmp(o->only[i], name) == 0) return i;
    return -1;
}

/* Adds the names of a list file to o->only; they point into `text`. */
static int add_listed(struct options *o, char *text)
{
    char *save = NULL;
    for (char *line = strtok_r(text, "\r\n", &save); line; line = strtok_r(NULL, "\r\n", &save)) {
        if (line[0] == '#') continue;
        char *caption = strstr(line, " = ");
        if (caption) *caption = 0, caption += 3;
        if (find_name(o, line) >= 0) continue;
        if (o->n_only == ONLY_MAX)
            return LG_FAIL(LG_ERR_CONFIG, "%s names more than %d emoji", o->list, (int)ONLY_MAX);
        o->caption[o->n_only] = caption;
        o->only[o->n_only++] = line;
    }
    return 0;
}

static int check_all_made(const struct options *o)
{
    for (int i = 0; i < o->n_only; i++)
        if (!o->made[i])
            return LG_FAIL(LG_ERR_CONFIG, "no emoji of %s that %s can draw is called \"%s\"",
                           o->names, o->font, o->only[i]);
    return 0;
}

/* ---- the glyph ---- */

/* The one glyph that draws the whole emoji, or 0. */
static hb_codepoint_t shape(struct maker *m, const struct emoji *e)
{
    unsigned n = 0;
    hb_buffer_clear_contents(m->run);
    hb_buffer_set_flags(m->run, HB_BUFFER_FLAG_REMOVE_DEFAULT_IGNORABLES);
    hb_buffer_add_utf32(m->run, e->point, e->n_points, 0, e->n_points);
    hb_buffer_guess_segment_properties(m->run);
    hb_shape(m->shaper, m->run, NULL, 0);
    const hb_glyph_info_t *glyph = hb_buffer_get_glyph_infos(m->run, &n);
    return n == 1 ? glyph[0].codepoint : 0;
}

struct box {
    int x0, y0, x1, y1; /* the ends are outside */
};

/* Where alpha is not zero; false when it is zero everywhere. */
static bool visible_box(const FT_Bitmap *b, struct box *ret)
{
    struct box r = {.x0 = (int)b->width, .y0 = (int)b->rows};
    for (int y = 0; y < (int)b->rows; y++)
        for (int x = 0; x < (int)b->width; x++) {
            if (!b->buffer[y * b->pitch + 4 * x + 3]) continue;
            r.x0 = LG_MIN(r.x0, x);
            r.y0 = LG_MIN(r.y0, y);
            r.x1 = LG_MAX(r.x1, x + 1);
            r.y1 = LG_MAX(r.y1, y + 1);
        }
    *ret = r;
    return r.x0 < r.x1;
}

/* Draws the glyph into m->out. */
static int draw(struct maker *m, hb_codepoint_t glyph, const char *name)
{
    FT_Error bad = FT_Load_Glyph(m->face, glyph, FT_LOAD_COLOR);
    const FT_Bitmap *b = &m->face->glyph->bitmap;
    struct box box;
    if (bad || b->pixel_mode != FT_PIXEL_MODE_BGRA || !visible_box(b, &box))
        return LG_FAIL(LG_ERR_CORRUPT, "%s has no colour bitmap for \"%s\" (FreeType error %d)",
                       m->options.font, name, bad);
    int w = box.x1 - box.x0, h = box.y1 - box.y0, side = LG_MAX(w, h) + 2 * MARGIN;
    LG_TRY(lg_picture_reserve(&m->square, side, side));
    memset(m->square.rgb, 255, (size_t)side * (size_t)side * 3);
    int left = (side - w) / 2, top = (side - h) / 2, size = m->options.size;
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++) {
            /* blue, green, red, alpha; the colours are already multiplied by alpha */
            const uint8_t *p = b->buffer + (box.y0 + y) * b->pitch + 4 * (box.x0 + x);
            uint8_t *q =
                m->square.rgb + 3 * ((size_t)(top + y) * (size_t)side + (size_t)(left + x));
            for (int c = 0; c < 3; c++) {
                unsigned once = LG_MIN(p[2 - c] + 255u - p[3], 255u);
                q[c] = (uint8_t)((once * p[3] + 255 * (255 - p[3]) + 127) / 255);
            }
        }
    LG_TRY(lg_resize(
        &(struct lg_resize_args){
            .rgb = m->square.rgb,
            .width = side,
            .height = side,
            .full_w = size,
            .full_h = size,
            .out_w = size,
            .out_h = size,
            .out = m->out,
        },
        &m->scratch));
    return 0;
}

/* ---- shards ---- */

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

static int make_all(struct maker *m, char *names)
{
    struct emoji e;
    char *save = NULL;
    for (char *line = strtok_r(names, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (!parse_line(line, &e)) continue;
        int wanted = find_name(&m->options, e.name);
        if (m->options.n_only > 0 && wanted < 0) continue;
        hb_codepoint_t glyph = shape(m, &e);
        if (!glyph) {
            m->n_without_glyph++;
            continue;
        }
        LG_TRY(draw(m, glyph, e.name));
        const char *caption = wanted >= 0 ? m->options.caption[wanted] : NULL;
        LG_TRY(add(m, caption ? caption : e.name));
        if (wanted >= 0) m->options.made[wanted] = true;
    }
    LG_TRY(check_all_made(&m->options));
    if (m->n_made == 0)
        return LG_FAIL(LG_ERR_CONFIG, "no emoji of %s is in %s", m->options.names, m->options.font);
    LG_TRY(lg_tar_writer_finish(&m->shard));
    return 0;
}

/* ---- start ---- */

static int open_font(struct maker *m)
{
    const char *font = m->options.font;
    if (!lg_path_exists(font))
        return LG_FAIL(LG_ERR_NOTFOUND, "no font at %s; install fonts-noto-color-emoji", font);
    if (FT_Init_FreeType(&m->freetype)) return LG_FAIL(LG_ERR_FAILED, "FreeType does not start");
    if (FT_New_Face(m->freetype, font, 0, &m->face))
        return LG_FAIL(LG_ERR_CORRUPT, "%s is not a font FreeType can read", font);
    if (m->face->num_fixed_sizes < 1 || FT_Select_Size(m->face, 0))
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s has no colour bitmaps (CBDT); install "
                       "fonts-noto-color-emoji",
                       font);
    hb_blob_t *blob = hb_blob_create_from_file_or_fail(font);
    if (!blob) return LG_FAIL(LG_ERR_IO, "HarfBuzz cannot read %s", font);
    hb_face_t *face = hb_face_create(blob, 0);
    m->shaper = hb_font_create(face);
    hb_face_destroy(face);
    hb_blob_destroy(blob);
    m->run = hb_buffer_create();
    return 0;
}

static int run(struct maker *m)
{
    const struct options *o = &m->options;
    if (o->list) {
        size_t list_bytes;
        LG_TRY(lg_read_file(o->list, NAMES_BYTES_MAX, &m->list_text, &list_bytes));
        LG_TRY(add_listed(&m->options, m->list_text));
        if (o->n_only == 0) return LG_FAIL(LG_ERR_CONFIG, "%s names no emoji", o->list);
    }
    LG_TRY(open_font(m));
    m->out = malloc((size_t)o->size * (size_t)o->size * 3);
    if (!m->out) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a picture");
    LG_TRY(lg_mkdirs(o->dir));
    char *names;
    size_t bytes;
    if (!lg_path_exists(o->names))
        return LG_FAIL(LG_ERR_NOTFOUND, "no list of names at %s; install unicode-data", o->names);
    LG_TRY(lg_read_file(o->names, NAMES_BYTES_MAX, &names, &bytes));
    int rc = make_all(m, names);
    free(names);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

static void destroy(struct maker *m)
{
    lg_tar_writer_abort(&m->shard);
    lg_picture_free(&m->square);
    lg_resize_free(&m->scratch);
    free(m->out);
    free(m->list_text);
    if (m->run) hb_buffer_destroy(m->run);
    if (m->shaper) hb_font_destroy(m->shaper);
    if (m->face) FT_Done_Face(m->face);
    if (m->freetype) FT_Done_FreeType(m->freetype);
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
            o->font = optarg;
            break;
        case 'n':
            o->names = optarg;
            break;
        case 's':
            o->size = atoi(optarg);
            break;
        case 'p':
            o->per_shard = atoi(optarg);
            break;
        case 'o':
            if (o->n_only == ONLY_MAX) return -1;
            o->only[o->n_only++] = optarg;
            break;
        case 'l':
            o->list = optarg;
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
    struct maker m = {.options = {.font = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
                                  .names = "/usr/share/unicode/emoji/emoji-test.txt",
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
               m.options.size, m.options.size, m.options.dir, m.n_without_glyph);
    destroy(&m);
    return -rc;
}
