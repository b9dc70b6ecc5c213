/* Emoji by name; see font.h. */
#include "stages/tools/emoji/font.h"
#include "base/fs.h"
#include <ft2build.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include FT_FREETYPE_H
#include <hb.h>

enum {
    POINTS_MAX = 16, /* code points of one emoji; the longest today has 10 */
    MARGIN = 2,      /* pixels of white around the bitmap */
    NAMES_BYTES_MAX = 16 << 20
};

struct line {
    hb_codepoint_t point[POINTS_MAX];
    int n_points;
    char name[256];
};

struct wanted {
    const char *name, *caption; /* NULL: the name */
    bool made;
};

struct emoji_set {
    const char *font, *names_file;
    struct wanted wanted[EMOJI_ONLY_MAX];
    int n_wanted, n_made, n_without_glyph;
    FT_Library freetype;
    FT_Face face;
    hb_font_t *shaper;
    hb_buffer_t *run;
    char *list_text, *names, *next_line; /* the rest of the names */
    struct line line;
    struct emoji emoji;
};

/* ---- emoji-test.txt ---- */

/* "1F468 200D 1F9B0 ; fully-qualified # 👨‍🦰 E11.0 man: red hair"; false for other lines. */
static bool parse_line(char *line, struct line *e)
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

/* NULL when the name was not asked for. */
static struct wanted *find_name(emoji_set *s, const char *name)
{
    for (int i = 0; i < s->n_wanted; i++)
        if (strcmp(s->wanted[i].name, name) == 0) return &s->wanted[i];
    return NULL;
}

static int want(emoji_set *s, const char *name, const char *caption)
{
    if (find_name(s, name)) return 0;
    if (s->n_wanted == EMOJI_ONLY_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "more than %d emoji are asked for", (int)EMOJI_ONLY_MAX);
    s->wanted[s->n_wanted++] = (struct wanted){.name = name, .caption = caption};
    return 0;
}

/* The names of a list file; they point into s->list_text. */
static int add_listed(emoji_set *s, const char *list)
{
    size_t bytes;
    char *save = NULL;
    LG_TRY(lg_read_file(list, NAMES_BYTES_MAX, &s->list_text, &bytes));
    for (char *line = strtok_r(s->list_text, "\r\n", &save); line;
         line = strtok_r(NULL, "\r\n", &save)) {
        if (line[0] == '#') continue;
        char *caption = strstr(line, " = ");
        if (caption) *caption = 0, caption += 3;
        LG_TRY(want(s, line, caption));
    }
    return s->n_wanted ? 0 : LG_FAIL(LG_ERR_CONFIG, "%s names no emoji", list);
}

static int check_all_made(const emoji_set *s)
{
    for (int i = 0; i < s->n_wanted; i++)
        if (!s->wanted[i].made)
            return LG_FAIL(LG_ERR_CONFIG, "no emoji of %s that %s can draw is called \"%s\"",
                           s->names_file, s->font, s->wanted[i].name);
    if (s->n_made == 0)
        return LG_FAIL(LG_ERR_CONFIG, "no emoji of %s is in %s", s->names_file, s->font);
    return 0;
}

/* ---- the glyph ---- */

/* The one glyph that draws the whole emoji, or 0. */
static hb_codepoint_t shape(emoji_set *s, const struct line *e)
{
    unsigned n = 0;
    hb_buffer_clear_contents(s->run);
    hb_buffer_set_flags(s->run, HB_BUFFER_FLAG_REMOVE_DEFAULT_IGNORABLES);
    hb_buffer_add_utf32(s->run, e->point, e->n_points, 0, e->n_points);
    hb_buffer_guess_segment_properties(s->run);
    hb_shape(s->shaper, s->run, NULL, 0);
    const hb_glyph_info_t *glyph = hb_buffer_get_glyph_infos(s->run, &n);
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

/* Draws the glyph on white. */
static int draw(emoji_set *s, hb_codepoint_t glyph)
{
    FT_Error bad = FT_Load_Glyph(s->face, glyph, FT_LOAD_COLOR);
    const FT_Bitmap *b = &s->face->glyph->bitmap;
    lg_picture *square = &s->emoji.picture;
    struct box box;
    if (bad || b->pixel_mode != FT_PIXEL_MODE_BGRA || !visible_box(b, &box))
        return LG_FAIL(LG_ERR_CORRUPT, "%s has no colour bitmap for \"%s\" (FreeType error %d)",
                       s->font, s->line.name, bad);
    int w = box.x1 - box.x0, h = box.y1 - box.y0, side = LG_MAX(w, h) + 2 * MARGIN;
    LG_TRY(lg_picture_reserve(square, side, side));
    memset(square->rgb, 255, (size_t)side * (size_t)side * 3);
    int left = (side - w) / 2, top = (side - h) / 2;
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++) {
            /* blue, green, red, alpha; the colours are already multiplied by alpha */
            const uint8_t *p = b->buffer + (box.y0 + y) * b->pitch + 4 * (box.x0 + x);
            uint8_t *q = square->rgb + 3 * ((size_t)(top + y) * (size_t)side + (size_t)(left + x));
            for (int c = 0; c < 3; c++) {
                unsigned once = LG_MIN(p[2 - c] + 255u - p[3], 255u);
                q[c] = (uint8_t)((once * p[3] + 255 * (255 - p[3]) + 127) / 255);
            }
        }
    return 0;
}

/* ---- start, one after the other ---- */

static int open_font(emoji_set *s)
{
    const char *font = s->font;
    if (!lg_path_exists(font))
        return LG_FAIL(LG_ERR_NOTFOUND, "no font at %s; install fonts-noto-color-emoji", font);
    if (FT_Init_FreeType(&s->freetype)) return LG_FAIL(LG_ERR_FAILED, "FreeType does not start");
    if (FT_New_Face(s->freetype, font, 0, &s->face))
        return LG_FAIL(LG_ERR_CORRUPT, "%s is not a font FreeType can read", font);
    if (s->face->num_fixed_sizes < 1 || FT_Select_Size(s->face, 0))
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s has no colour bitmaps (CBDT); install "
                       "fonts-noto-color-emoji",
                       font);
    hb_blob_t *blob = hb_blob_create_from_file_or_fail(font);
    if (!blob) return LG_FAIL(LG_ERR_IO, "HarfBuzz cannot read %s", font);
    hb_face_t *face = hb_face_create(blob, 0);
    s->shaper = hb_font_create(face);
    hb_face_destroy(face);
    hb_blob_destroy(blob);
    s->run = hb_buffer_create();
    return 0;
}

static int open_all(emoji_set *s, const struct emoji_options *o)
{
    size_t bytes;
    if (o->list) LG_TRY(add_listed(s, o->list));
    for (int i = 0; i < o->n_only; i++) LG_TRY(want(s, o->only[i], NULL));
    LG_TRY(open_font(s));
    if (!lg_path_exists(o->names))
        return LG_FAIL(LG_ERR_NOTFOUND, "no list of names at %s; install unicode-data", o->names);
    LG_TRY(lg_read_file(o->names, NAMES_BYTES_MAX, &s->names, &bytes));
    s->next_line = s->names;
    return 0;
}

int emoji_open(const struct emoji_options *o, emoji_set **ret)
{
    emoji_set *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a set of emoji");
    s->font = o->font;
    s->names_file = o->names;
    int rc = open_all(s, o);
    if (rc < 0) {
        emoji_close(&s);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = s;
    return 0;
}

int emoji_next(emoji_set *s, const struct emoji **ret)
{
    for (char *line; (line = strsep(&s->next_line, "\n"));) {
        if (!parse_line(line, &s->line)) continue;
        struct wanted *w = find_name(s, s->line.name);
        if (s->n_wanted > 0 && !w) continue;
        hb_codepoint_t glyph = shape(s, &s->line);
        if (!glyph) {
            s->n_without_glyph++;
            continue;
        }
        LG_TRY(draw(s, glyph));
        s->n_made++;
        if (w) w->made = true;
        s->emoji.name = s->line.name;
        s->emoji.caption = w && w->caption ? w->caption : s->line.name;
        *ret = &s->emoji;
        return 1;
    }
    LG_TRY(check_all_made(s));
    return 0;
}

int emoji_without_glyph(const emoji_set *s)
{
    return s->n_without_glyph;
}

void emoji_close(emoji_set **set)
{
    emoji_set *s = *set;
    if (!s) return;
    lg_picture_free(&s->emoji.picture);
    free(s->list_text);
    free(s->names);
    if (s->run) hb_buffer_destroy(s->run);
    if (s->shaper) hb_font_destroy(s->shaper);
    if (s->face) FT_Done_Face(s->face);
    if (s->freetype) FT_Done_FreeType(s->freetype);
    free(s);
    *set = NULL;
}
