/* Running an autoencoder on clips: clip by clip, tile by tile, slice by slice; see autoencoder_video.c. */
#include "base/philox.h"
#include "kernels/ops.h"
#include "stages/nets/autoencoder_video.h"
#include <stdlib.h>

/* What a program binds, in this order. */
enum { FROM, TO, TO_LOGVAR, CARRIED, CARRIES, NOISE, TIMESTEP, WEIGHTS, BOUND };
static const double TIMESTEP_FACTOR = 1000;

struct run {
    const lg_video_net *net;
    lg_stream *s;
    const void *weights;
};

static void *place(const lg_video_net *net, size_t at)
{
    return net->arena + at;
}

static char *frame_of(void *data, int64_t frame, const lg_tensor *like)
{
    return (char *)data + (size_t)(frame * like->stride[1]) * lg_dtype_bytes(like->dtype);
}

/* A slice from frame `at` on, the i-th of its tile. */
static void run_slice(const struct run *r, const struct lg_video_side *side, int i,
                      const struct lg_video_slice *slice, void *const ends[3])
{
    const lg_video_net *net = r->net;
    void *bound[BOUND] = {[FROM] = ends[0],
                          [TO] = ends[1],
                          [TO_LOGVAR] = ends[2],
                          [CARRIED] = place(net, net->at.carried[i % 2]),
                          [CARRIES] = place(net, net->at.carried[(i + 1) % 2]),
                          [NOISE] = place(net, net->at.noise),
                          [TIMESTEP] = place(net, net->at.timestep),
                          [WEIGHTS] = (void *)(uintptr_t)r->weights};
    lg_program_run(
        side->program[lg_video_kind(side, slice)], r->s,
        &(struct lg_program_memory){.arena = net->arena, .scratch = net->scratch, .bound = bound},
        LG_PROGRAM_ALL);
}

/* pixels (3, F, H, W), mean and logvar (C, f, h, w): of a clip, or of a tile. */
static void encode_frames(const struct run *r, lg_tensor pixels, lg_tensor mean, lg_tensor logvar)
{
    struct lg_video_slice slice;
    for (int at = 0, from = 0, i = 0; lg_video_next_slice(r->net, LG_AEKL_ENCODER, &at, &slice);
         from = at, i++) {
        const int64_t latent = lg_video_latents(&r->net->c, from);
        run_slice(r, &r->net->encoder, i, &slice,
                  (void *[]){frame_of(pixels.data, from, &pixels),
                             frame_of(mean.data, latent, &mean),
                             frame_of(logvar.data, latent, &logvar)});
    }
}

/* latent (C, f, h, w), images (3, F, H, W) of the compute type and in u8, either may be absent. */
static void decode_frames(const struct run *r, lg_tensor latent, const lg_tensor images[2])
{
    const lg_video_net *net = r->net;
    const int p = lg_video_patch(&net->c);
    void *patches = place(net, net->at.patches);
    struct lg_video_slice slice;
    for (int at = 0, from = 0, i = 0; lg_video_next_slice(net, LG_AEKL_DECODER, &at, &slice);
         from = at, i++) {
        run_slice(r, &net->decoder, i, &slice,
                  (void *[]){frame_of(latent.data, lg_video_latents(&net->c, from), &latent),
                             patches, NULL});
        const lg_tensor x = lg_t4(patches, net->dtype, slice.frames, net->tile.height / p,
                                  net->tile.width / p, 3 * p * p);
        for (int k = 0; k < 2; k++)
            if (images[k].data)
                lg_patches_to_clip_forward(
                    r->s, &(struct lg_patches_to_clip_forward_args){
                              .x = x, .y = lg_slice(images[k], 1, from, slice.frames), .patch = p});
    }
}

/* (C, F, H, W) as planes (C F, H, W). */
static lg_tensor planes(lg_tensor t)
{
    return lg_t3(t.data, t.dtype, t.dim[0] * t.dim[1], t.dim[2], t.dim[3]);
}

/* A tile, and how many of what is cut a cell has on a side. */
struct tile {
    int row, column, factor;
};

static void take(const struct run *r, const struct tile *t, lg_tensor of, lg_tensor to)
{
    lg_tile_take(r->s,
                 &(struct lg_tile_take_args){.x = planes(of),
                                             .y = planes(to),
                                             .top = r->net->rows.at[t->row] * t->factor,
                                             .left = r->net->columns.at[t->column] * t->factor});
}

/* The weights of one side, at `at`. */
static lg_tensor weights_of(const struct run *r, const struct lg_tiles *tiles, int i, int factor,
                            size_t at)
{
    const int count = tiles->size * factor;
    const lg_tensor t = lg_t1(place(r->net, at), r->net->stats, count);
    double *v = malloc((size_t)count * sizeof *v);
    float *f = malloc((size_t)count * sizeof *f);
    LG_ASSERT(v && f);
    lg_tiles_weights(tiles, i, factor, v);
    for (int k = 0; k < count; k++) f[k] = (float)v[k];
    lg_stream_upload(r->s, t.data, t.dtype == LG_F64 ? (void *)v : f, lg_tensor_bytes(&t));
    lg_stream_sync(r->s);
    free(v);
    free(f);
    return t;
}

static void add(const struct run *r, const struct tile *t, lg_tensor tile, lg_tensor to)
{
    const lg_video_net *net = r->net;
    lg_tile_add(r->s,
                &(struct lg_tile_add_args){
                    .x = planes(tile),
                    .rows = weights_of(r, &net->rows, t->row, t->factor, net->at.rows),
                    .columns = weights_of(r, &net->columns, t->column, t->factor, net->at.columns),
                    .y = planes(to),
                    .top = net->rows.at[t->row] * t->factor,
                    .left = net->columns.at[t->column] * t->factor});
}

static void zero(const struct run *r, lg_tensor t)
{
    lg_stream_zero(r->s, t.data, lg_tensor_bytes(&t));
}

/* A clip's, or a tile's. */
static lg_tensor pixels_at(const struct lg_video_shape *s, void *data, lg_dtype type)
{
    return lg_t4(data, type, 3, s->frames, s->height, s->width);
}

static lg_tensor latents_at(const lg_video_net *net, const struct lg_video_shape *s, void *data)
{
    return lg_t4(data, net->dtype, net->c.latent_channels, lg_video_latents(&net->c, s->frames),
                 s->height / net->c.factor, s->width / net->c.factor);
}

#define EACH_TILE(net, t, f)                                                                       \
    for (struct tile t = {.factor = (f)}; t.row < (net)->rows.n; t.row++)                          \
        for (t.column = 0; t.column < (net)->columns.n; t.column++)

static void encode_clip(const struct run *r, lg_tensor pixels, lg_tensor mean, lg_tensor logvar)
{
    const lg_video_net *net = r->net;
    if (!net->is_tiled) {
        encode_frames(r, pixels, mean, logvar);
        return;
    }
    const lg_tensor of_tile = pixels_at(&net->tile, place(net, net->at.pixels), net->dtype);
    const lg_tensor made[] = {latents_at(net, &net->tile, place(net, net->at.latent)),
                              latents_at(net, &net->tile, place(net, net->at.logvar))};
    zero(r, mean);
    zero(r, logvar);
    EACH_TILE(net, t, net->c.factor)
    {
        const struct tile cells = {t.row, t.column, 1};
        take(r, &t, pixels, of_tile);
        encode_frames(r, of_tile, made[0], made[1]);
        add(r, &cells, made[0], mean);
        add(r, &cells, made[1], logvar);
    }
}

/* What tile i of clip n is decoded with, beside its latent. */
static void begin_decoding(const struct run *r, uint64_t n, uint64_t i)
{
    const lg_video_net *net = r->net;
    const double t64 = TIMESTEP_FACTOR * net->decoding.timestep;
    const float t32 = (float)t64;
    const size_t count = (size_t)net->decoder.noise;
    lg_stream_upload(r->s, place(net, net->at.timestep),
                     net->stats == LG_F64 ? (const void *)&t64 : &t32, lg_dtype_bytes(net->stats));
    float *noise = malloc(LG_MAX(count, (size_t)1) * sizeof *noise);
    LG_ASSERT(noise);
    lg_philox_normal_f32(noise, count, net->decoding.seed, LG_PURPOSE_DECODE, n, i * count);
    if (count) {
        const lg_tensor f32 = lg_t1(place(net, net->at.noise32), LG_F32, (int64_t)count);
        lg_stream_upload(r->s, f32.data, noise, count * sizeof *noise);
        lg_cast(r->s,
                &(struct lg_cast_args){
                    .x = f32, .y = lg_t1(place(net, net->at.noise), net->dtype, (int64_t)count)});
    }
    lg_stream_sync(r->s);
    free(noise);
}

/* The n-th of the run's. */
static void decode_clip(const struct run *r, uint64_t n, lg_tensor latent, lg_tensor image,
                        lg_tensor pixels)
{
    const lg_video_net *net = r->net;
    uint64_t tiles = 0;
    if (!net->is_tiled) {
        begin_decoding(r, n, 0);
        decode_frames(r, latent, (lg_tensor[]){image, pixels});
        return;
    }
    const lg_tensor of_tile = latents_at(net, &net->tile, place(net, net->at.latent));
    const lg_tensor made = pixels_at(&net->tile, place(net, net->at.image), net->dtype);
    const struct lg_video_shape whole = {net->shape.frames, net->shape.height, net->shape.width,
                                         LG_U8};
    if (!image.data) image = pixels_at(&whole, place(net, net->at.whole), net->dtype);
    zero(r, image);
    EACH_TILE(net, t, net->c.factor)
    {
        const struct tile cells = {t.row, t.column, 1};
        take(r, &cells, latent, of_tile);
        begin_decoding(r, n, tiles++);
        decode_frames(r, of_tile, (lg_tensor[]){made, LG_NONE});
        add(r, &t, made, image);
    }
    if (!pixels.data) return;
    const int64_t rows = lg_numel(&image) / image.dim[3], wide = image.dim[3];
    lg_nhwc_to_pixels(
        r->s, &(struct lg_nhwc_to_pixels_args){.x = lg_t4(image.data, net->dtype, 1, rows, wide, 1),
                                               .y = lg_t4(pixels.data, LG_U8, 1, 1, rows, wide)});
}

/* Sample b of a batch (B, C, F H, W); absent stays absent. */
static lg_tensor sample(lg_tensor batch, int64_t b, lg_tensor like)
{
    if (!batch.rank || !batch.data) return LG_NONE;
    LG_ASSERT(lg_numel(&batch) == batch.dim[0] * lg_numel(&like) && batch.dtype == like.dtype);
    like.data = (char *)batch.data + (size_t)b * lg_tensor_bytes(&like);
    return like;
}

void lg_video_net_encode(lg_video_net *net, lg_stream *s, const void *weights, lg_tensor pixels,
                         lg_tensor mean, lg_tensor logvar)
{
    const struct run r = {net, s, weights};
    const struct lg_video_shape whole = {net->shape.frames, net->shape.height, net->shape.width,
                                         LG_U8};
    const lg_tensor in = pixels_at(&whole, NULL, LG_U8), out = latents_at(net, &whole, NULL);
    LG_ASSERT(net->encoder.n_kinds && pixels.dim[0] == net->shape.batch);
    for (int64_t b = 0; b < net->shape.batch; b++)
        encode_clip(&r, sample(pixels, b, in), sample(mean, b, out), sample(logvar, b, out));
}

void lg_video_net_decode(lg_video_net *net, lg_stream *s, const void *weights, lg_tensor latent,
                         lg_tensor image, lg_tensor pixels)
{
    const struct run r = {net, s, weights};
    const struct lg_video_shape whole = {net->shape.frames, net->shape.height, net->shape.width,
                                         LG_U8};
    const lg_tensor in = latents_at(net, &whole, NULL);
    LG_ASSERT(net->decoder.n_kinds && latent.dim[0] == net->shape.batch);
    for (int64_t b = 0; b < net->shape.batch; b++)
        decode_clip(&r, net->decoding.first + (uint64_t)b, sample(latent, b, in),
                    sample(image, b, pixels_at(&whole, NULL, net->dtype)),
                    sample(pixels, b, pixels_at(&whole, NULL, LG_U8)));
}
