/* See first_frame.h. */
#include "stages/sample/first_frame.h"
#include "base/fs.h"
#include "stages/encode/batches.h"
#include "stages/io/picture.h"
#include "stages/io/resize.h"
#include <stdlib.h>

static void *alloc(size_t count, size_t bytes)
{
    return calloc(count ? count : 1, bytes);
}

/* pixels (3, height, width). */
static int read_pixels(const char *path, int height, int width, uint8_t *pixels)
{
    lg_resize_scratch scratch = {0};
    lg_picture picture = {0};
    char *data = NULL;
    size_t bytes;
    int rc;
    LG_TRY(lg_read_file(path, LG_PICTURE_BYTES_MAX, &data, &bytes));
    LG_TRY_GOTO(rc, lg_picture_decode(data, bytes, LG_MAX(height, width), &picture), out);
    LG_TRY_GOTO(rc,
                lg_fit(&(struct lg_fit_args){.rgb = picture.rgb,
                                             .width = picture.width,
                                             .height = picture.height,
                                             .out_w = width,
                                             .out_h = height,
                                             .crop_x = -1,
                                             .crop_y = -1,
                                             .out = pixels},
                       &scratch),
                out);
out:
    lg_picture_free(&picture);
    lg_resize_free(&scratch);
    free(data);
    if (rc < 0) return LG_FAIL(rc, "%s: %s", path, lg_err_message());
    return 0;
}

static int encode(const struct lg_first_frame_spec *s, const struct lg_autoencoder_config *c,
                  const uint8_t *pixels, float *mean)
{
    const size_t values = (size_t)c->latent_channels * (size_t)s->height * (size_t)s->width;
    const struct lg_vae_batches_spec spec = {.device = s->device,
                                             .dir = s->vae_dir,
                                             .config = *c,
                                             .shape = {.half = LG_AEKL_ENCODER,
                                                       .batch = 1,
                                                       .frames = 1,
                                                       .height = s->height * c->factor,
                                                       .width = s->width * c->factor}};
    lg_vae_batches *vae = NULL;
    float *logvar = alloc(values, sizeof *logvar);
    LG_ASSERT(logvar);
    int rc = lg_vae_batches_open(&spec, &vae);
    if (rc == 0) lg_vae_batches_encode(vae, pixels, 1, mean, logvar);
    lg_vae_batches_close(&vae);
    free(logvar);
    for (size_t i = 0; i < values && rc == 0; i++)
        mean[i] = (float)(((double)mean[i] - c->shift_factor) * c->scaling_factor);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

int lg_first_frame_encode(const struct lg_first_frame_spec *s, float **ret_latent)
{
    struct lg_autoencoder_config c;
    LG_TRY(lg_autoencoder_config_load(s->vae_dir, &c));
    if (c.latent_channels != s->channels)
        return LG_FAIL(LG_ERR_MISMATCH, "%s has %d latent channels, the transformer %d", s->vae_dir,
                       c.latent_channels, s->channels);
    const int height = s->height * c.factor, width = s->width * c.factor;
    uint8_t *pixels = alloc((size_t)height * (size_t)width, 3);
    float *latent =
        alloc((size_t)s->channels * (size_t)s->height * (size_t)s->width, sizeof *latent);
    LG_ASSERT(pixels && latent);
    int rc = read_pixels(s->path, height, width, pixels);
    if (rc == 0) rc = encode(s, &c, pixels, latent);
    free(pixels);
    if (rc < 0) {
        free(latent);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret_latent = latent;
    return 0;
}
