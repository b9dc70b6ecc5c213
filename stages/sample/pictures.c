/* The grid; see pictures.h. */
#include "stages/sample/pictures.h"
#include "stages/io/clip_write.h"
#include <stdlib.h>
#include <string.h>

enum { GAP = 2 };

void lg_pictures_free(lg_pictures *p)
{
    free(p->pixels);
    *p = (lg_pictures){0};
}

struct grid {
    int columns, rows;
    size_t width, height; /* pixels */
};

static struct grid grid_of(const lg_pictures *p, int columns, bool in_strips)
{
    if (columns <= 0 && in_strips) columns = 1;
    if (columns <= 0)
        for (columns = 1; columns * columns < p->n;) columns++;
    columns = LG_MIN(columns, p->n);
    const int rows = (p->n + columns - 1) / columns;
    return (struct grid){.columns = columns,
                         .rows = rows,
                         .width = (size_t)columns * (size_t)(p->width + 2 * GAP),
                         .height = (size_t)rows * (size_t)(p->height + 2 * GAP)};
}

/* Frame f of picture i into the grid's frame. */
static void put(const lg_pictures *p, const struct grid *g, int i, int f, uint8_t *rgb)
{
    const size_t plane = (size_t)p->height * (size_t)p->width;
    const size_t left = (size_t)(i % g->columns) * (size_t)(p->width + 2 * GAP) + GAP,
                 top = (size_t)(i / g->columns) * (size_t)(p->height + 2 * GAP) + GAP;
    for (int c = 0; c < 3; c++) {
        const uint8_t *from =
            p->pixels + ((size_t)(3 * i + c) * (size_t)p->frames + (size_t)f) * plane;
        for (int y = 0; y < p->height; y++)
            for (int x = 0; x < p->width; x++)
                rgb[3 * ((top + (size_t)y) * g->width + left + (size_t)x) + (size_t)c] = *from++;
    }
}

int lg_pictures_save(const lg_pictures *p, const struct lg_grid_look *look, const char *path)
{
    lg_clip_format format;
    LG_TRY(lg_clip_format_of(path, &format));
    const struct grid g = grid_of(p, look->columns, format == LG_CLIP_png && p->frames > 1);
    const size_t frame = g.width * g.height * 3, all = frame * (size_t)p->frames;
    uint8_t *rgb = malloc(all);
    if (!rgb) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a grid of %zu bytes", all);
    memset(rgb, 255, all);
    for (int f = 0; f < p->frames; f++)
        for (int i = 0; i < p->n; i++) put(p, &g, i, f, rgb + frame * (size_t)f);
    int rc = lg_clip_save(&(struct lg_clip){.frames = p->frames,
                                            .height = (int)g.height,
                                            .width = (int)g.width,
                                            .fps = look->fps,
                                            .rgb = rgb},
                          path);
    free(rgb);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
