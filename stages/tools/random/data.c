/* See data.h. */
#include "stages/tools/random/data.h"
#include "base/check.h"
#include "base/fs.h"
#include "base/philox.h"
#include "stages/io/safetensors.h"
#include "stages/io/tar.h"
#include "stages/tools/random/paint.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h> /* wants stdio.h before it */

enum {
    JPEG_QUALITY = 90,
    FPS = 25,
    SIDE_MAX = 4096,
    RATIO_MAX = 16,
    CHANNELS_MAX = 1024,
    FRAMES_MAX = 4096,
    CLASSES_MAX = 10000000,
    COUNT_MAX = 100000000,
};

/* ---- pictures ---- */

static struct lg_random_sides sides_of(const struct lg_random_data *d, uint64_t n)
{
    if (d->ratio == 1) return (struct lg_random_sides){(int)d->size, (int)d->size};
    const double u = lg_uniform_f64(lg_philox(d->seed, LG_PURPOSE_TEST, n, 1 << 22).v[0]);
    const double stretch = pow((double)d->ratio, u - 0.5);
    return (struct lg_random_sides){(int)LG_MAX(lround((double)d->size * stretch), 1),
                                    (int)LG_MAX(lround((double)d->size / stretch), 1)};
}

/* libjpeg's own error handler ends the program: it only fails here without memory. */
static void compress(const uint8_t *rgb, struct lg_random_sides s, uint8_t **ret, size_t *ret_bytes)
{
    struct jpeg_compress_struct j;
    struct jpeg_error_mgr err;
    unsigned long bytes = 0;
    unsigned char *data = NULL;
    j.err = jpeg_std_error(&err);
    jpeg_create_compress(&j);
    jpeg_mem_dest(&j, &data, &bytes);
    j.image_width = (JDIMENSION)s.width;
    j.image_height = (JDIMENSION)s.height;
    j.input_components = 3;
    j.in_color_space = JCS_RGB;
    jpeg_set_defaults(&j);
    jpeg_set_quality(&j, JPEG_QUALITY, TRUE);
    jpeg_start_compress(&j, TRUE);
    while (j.next_scanline < j.image_height) {
        JSAMPROW row = (JSAMPROW)(uintptr_t)(rgb + (size_t)j.next_scanline * (size_t)s.width * 3);
        jpeg_write_scanlines(&j, &row, 1);
    }
    jpeg_finish_compress(&j);
    jpeg_destroy_compress(&j);
    *ret = data;
    *ret_bytes = bytes;
}

static int add_picture(const struct lg_random_data *d, lg_tar_writer *w, uint64_t n, uint8_t *room)
{
    char name[64];
    uint8_t *jpeg;
    size_t bytes;
    const struct lg_random_sides s = sides_of(d, n);
    lg_random_paint_picture(d->seed, n, s, room);
    compress(room, s, &jpeg, &bytes);
    snprintf(name, sizeof name, "%08" PRIu64 ".jpg", n);
    int rc = lg_tar_writer_add(w, name, jpeg, bytes);
    free(jpeg);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* ---- clips ---- */

static int add_clip(const struct lg_random_data *d, lg_tar_writer *w, uint64_t n, uint8_t *room)
{
    const struct lg_random_sides s = {(int)d->size, (int)d->size};
    const struct lg_clip clip = {
        .frames = (int)d->frames, .height = s.height, .width = s.width, .fps = FPS, .rgb = room};
    char name[64];
    uint8_t *data;
    size_t bytes;
    lg_random_paint_clip(d->seed, n, s, clip.frames, room);
    LG_TRY(lg_clip_encode(&clip, d->format, &data, &bytes));
    snprintf(name, sizeof name, "%08" PRIu64 ".%s", n, lg_clip_format_name(d->format));
    int rc = lg_tar_writer_add(w, name, data, bytes);
    free(data);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* ---- latents ---- */

/* Of one sample: (C, h, w), or with --frames, even of one, the (C, f, h, w) of a clip. */
static size_t latent_elements(const struct lg_random_data *d)
{
    return (size_t)(d->channels * d->size * d->size * (d->frames ? d->frames : 1));
}

/* Mean: standard normal; logvar: -10, as of a trained autoencoder's order. */
static int add_latent(const struct lg_random_data *d, lg_tar_writer *w, uint64_t n, uint8_t *room)
{
    const int64_t clip[4] = {d->channels, d->frames, d->size, d->size};
    const int64_t picture[3] = {d->channels, d->size, d->size};
    const int64_t *dim = d->frames ? clip : picture;
    const int rank = d->frames ? 4 : 3;
    size_t count = latent_elements(d), bytes = 0;
    float *x = (float *)(void *)room;
    char name[64];
    lg_st_writer *st = NULL;
    void *data = NULL;
    int rc;
    LG_TRY(lg_st_writer_open_memory(&st));
    LG_TRY_GOTO(rc, lg_st_writer_declare(st, "latent_mean", LG_F32, rank, dim), fail);
    LG_TRY_GOTO(rc, lg_st_writer_declare(st, "latent_logvar", LG_F32, rank, dim), fail);
    lg_philox_normal_f32(x, count, d->seed, LG_PURPOSE_TEST, n, 0);
    LG_TRY_GOTO(rc, lg_st_writer_data(st, x, count * sizeof *x), fail);
    for (size_t i = 0; i < count; i++) x[i] = -10;
    LG_TRY_GOTO(rc, lg_st_writer_data(st, x, count * sizeof *x), fail);
    LG_TRY(lg_st_writer_finish_memory(&st, &data, &bytes));
    snprintf(name, sizeof name, "%08" PRIu64 ".latent.safetensors", n);
    rc = lg_tar_writer_add(w, name, data, bytes);
    free(data);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
fail:
    lg_st_writer_abort(&st);
    return rc;
}

/* ---- shards ---- */

static int add_texts(const struct lg_random_data *d, lg_tar_writer *w, uint64_t n)
{
    static const char *const COLOUR[] = {"red", "green", "blue", "yellow", "black", "white"};
    static const char *const THING[] = {"apple", "house", "face", "star", "dog", "heart", "moon"};
    lg_philox_out p = lg_philox(d->seed, LG_PURPOSE_TEST, n, 1 << 20);
    char name[64], text[128];
    int bytes =
        snprintf(text, sizeof text, "a %s %s beside a %s %s", COLOUR[p.v[0] % LG_ARRAY_LEN(COLOUR)],
                 THING[p.v[1] % LG_ARRAY_LEN(THING)], COLOUR[p.v[2] % LG_ARRAY_LEN(COLOUR)],
                 THING[p.v[3] % LG_ARRAY_LEN(THING)]);
    snprintf(name, sizeof name, "%08" PRIu64 ".txt", n);
    LG_TRY(lg_tar_writer_add(w, name, text, (size_t)bytes));
    bytes = snprintf(text, sizeof text, "%u",
                     (unsigned)(lg_philox(d->seed, LG_PURPOSE_TEST, n, 1 << 21).v[0] %
                                (unsigned long)d->classes));
    snprintf(name, sizeof name, "%08" PRIu64 ".cls", n);
    LG_TRY(lg_tar_writer_add(w, name, text, (size_t)bytes));
    return 0;
}

static int (*const ADD[])(const struct lg_random_data *, lg_tar_writer *, uint64_t, uint8_t *) = {
    [LG_RANDOM_PICTURES] = add_picture,
    [LG_RANDOM_CLIPS] = add_clip,
    [LG_RANDOM_LATENTS] = add_latent,
};

static int write_shards(const struct lg_random_data *d)
{
    const size_t pixels = (size_t)((d->size + d->ratio) * (d->size + d->ratio) * 3);
    const size_t room_bytes = d->kind == LG_RANDOM_PICTURES ? pixels
                              : d->kind == LG_RANDOM_CLIPS  ? pixels * (size_t)d->frames
                                                            : latent_elements(d) * sizeof(float);
    uint8_t *room = malloc(room_bytes);
    LG_ASSERT(room);
    lg_tar_writer *w = NULL;
    int rc = 0;
    for (long n = 0; n < d->count && rc == 0; n++) {
        if (n % d->per_shard == 0) {
            char path[LG_PATH_BYTES];
            if (w) LG_TRY_GOTO(rc, lg_tar_writer_finish(&w), out);
            LG_TRY_GOTO(rc, lg_path(path, "%s/noise-%05ld.tar", d->dir, n / d->per_shard), out);
            LG_TRY_GOTO(rc, lg_tar_writer_open(path, &w), out);
        }
        rc = ADD[d->kind](d, w, (uint64_t)n, room);
        if (rc == 0) rc = add_texts(d, w, (uint64_t)n);
    }
    if (rc == 0) LG_TRY_GOTO(rc, lg_tar_writer_finish(&w), out);
out:
    lg_tar_writer_abort(&w);
    free(room);
    return rc;
}

static int check_range(const char *what, long v, long min, long max)
{
    if (v >= min && v <= max) return 0;
    return LG_FAIL(LG_ERR_USAGE, "--%s %ld: %ld to %ld are possible", what, v, min, max);
}

int lg_random_data_make(const struct lg_random_data *d)
{
    LG_TRY(check_range("count", d->count, 1, COUNT_MAX));
    LG_TRY(check_range("size", d->size, 1, SIDE_MAX));
    LG_TRY(check_range("ratio", d->ratio, 1, RATIO_MAX));
    LG_TRY(check_range("channels", d->channels, 1, CHANNELS_MAX));
    LG_TRY(check_range("frames", d->frames, d->kind == LG_RANDOM_CLIPS, FRAMES_MAX));
    LG_TRY(check_range("classes", d->classes, 1, CLASSES_MAX));
    LG_TRY(check_range("per-shard", d->per_shard, 1, COUNT_MAX));
    LG_TRY(lg_mkdirs(d->dir));
    LG_TRY(write_shards(d));
    return 0;
}
