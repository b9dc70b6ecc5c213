/* Formats by name, bounds, PNG; see clip_write.h. */
#include "base/fs.h"
#include "stages/io/av.h"
#include "stages/io/clip_write_private.h"
#include "stages/io/picture.h"
#include <stdlib.h>
#include <string.h>

static const char *const names[LG_CLIP_FORMATS] = {
#define LG_CLIP_FORMAT(name, is_exact, text) #name,
#include "stages/io/clip_formats.def"
#undef LG_CLIP_FORMAT
};

const char lg_clip_endings[] =
#define LG_CLIP_FORMAT(name, is_exact, text) " ." #name
#include "stages/io/clip_formats.def"
#undef LG_CLIP_FORMAT
    ;

const char *lg_clip_format_name(lg_clip_format f)
{
    LG_ASSERT((int)f >= 0 && f < LG_CLIP_FORMATS);
    return names[f];
}

int lg_clip_format_of(const char *path, lg_clip_format *ret)
{
    const char *slash = strrchr(path, '/'), *dot = strrchr(slash ? slash : path, '.');
    for (int i = 0; dot && i < LG_CLIP_FORMATS; i++)
        if (strcmp(dot + 1, names[i]) == 0) {
            *ret = (lg_clip_format)i;
            return 0;
        }
    return LG_FAIL(LG_ERR_USAGE,
                   "%s: the name of the file says what is written; it has to end in one of:%s",
                   path, lg_clip_endings);
}

/* The frames side by side. */
static int strip(const struct lg_clip *c, struct lg_clip_bytes *out)
{
    const size_t row = (size_t)c->width * 3, rows = (size_t)c->height, n = (size_t)c->frames;
    uint8_t *rgb = malloc(n * rows * row);
    if (!rgb) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %d frames side by side", c->frames);
    for (size_t y = 0; y < rows; y++)
        for (size_t f = 0; f < n; f++)
            memcpy(rgb + (y * n + f) * row, c->rgb + (f * rows + y) * row, row);
    int rc = lg_picture_encode_png(rgb, c->frames * c->width, c->height, &out->data, &out->count);
    free(rgb);
    return rc;
}

static int write_film(const struct lg_clip *c, lg_clip_format format, struct lg_clip_bytes *out)
{
    const struct lg_clip_film_writer *w;
    LG_TRY(lg_av_find(LG_CLIP_FILM_WRITER, (const void **)&w));
    return w->write(c, format, out);
}

static int check(const struct lg_clip *c, lg_clip_format format)
{
    LG_ASSERT(c->frames >= 1 && c->width >= 1 && c->height >= 1);
    if (format != LG_CLIP_png && LG_MAX(c->width, c->height) > LG_CLIP_SIDE_MAX)
        return LG_FAIL(LG_ERR_USAGE,
                       "%d x %d pixels are too many for a .%s file: a side has at most %d",
                       c->height, c->width, names[format], (int)LG_CLIP_SIDE_MAX);
    if (!(c->fps >= LG_CLIP_FPS_MIN && c->fps <= LG_CLIP_FPS_MAX))
        return LG_FAIL(LG_ERR_USAGE, "%g frames per second: %g to %d are possible", c->fps,
                       LG_CLIP_FPS_MIN, LG_CLIP_FPS_MAX);
    return 0;
}

int lg_clip_encode(const struct lg_clip *clip, lg_clip_format format, uint8_t **ret_data,
                   size_t *ret_bytes)
{
    struct lg_clip_bytes out = {0};
    LG_TRY(check(clip, format));
    int rc = format == LG_CLIP_png    ? strip(clip, &out)
             : format == LG_CLIP_gif  ? lg_clip_write_gif(clip, &out)
             : format == LG_CLIP_webp ? lg_clip_write_webp(clip, &out)
                                      : write_film(clip, format, &out);
    if (rc < 0) {
        free(out.data);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret_data = out.data;
    *ret_bytes = out.count;
    return 0;
}

int lg_clip_save(const struct lg_clip *clip, const char *path)
{
    lg_clip_format format;
    uint8_t *data;
    size_t bytes;
    LG_TRY(lg_clip_format_of(path, &format));
    LG_TRY(lg_clip_encode(clip, format, &data, &bytes));
    int rc = lg_publish_file(path, data, bytes);
    free(data);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
