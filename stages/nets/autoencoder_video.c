/* An autoencoder as a net that runs on clips: slices of frames, tiles; see autoencoder.h.
 *
 * Clips run one after the other, a clip tile by tile, a tile slice by slice. Each half has a program (kernels/graph) for every
 * kind of slice that there is: the first, those behind it, and what is left. Between slices of a causal net its convolutions'
 * last frames are carried in two places that take turns. What a tile reads and writes is staged, since a part of a frame
 * has no rows that operations take; what it made is added to the whole under weights that are 1 but where tiles overlap,
 * and there rise and fall linearly, so that the weights of all tiles are 1 in sum. All this is the net's memory, which
 * encoder and decoder share. */
#include "stages/nets/autoencoder_private.h"
#include "stages/nets/tiles.h"
#include <stdlib.h>
#include <string.h>

enum { SIDE_MAX = 1 << 14, FRAMES_MAX = 1 << 14, ARENA_ALIGN = 64, KINDS_MAX = 3 };
/* What a program binds, in this order. */
enum { FROM, TO, TO_LOGVAR, CARRIED, CARRIES, WEIGHTS, BOUND };

/* One half. */
struct side {
    lg_aekl_half half;
    int n_kinds;
    struct lg_video_slice kind[KINDS_MAX];
    lg_program *program[KINDS_MAX];
    int64_t carried; /* elements that a slice hands the next one */
};

/* Where things lie: bytes from the arena's start. */
struct places {
    size_t carried[2], patches;           /* of a slice */
    size_t pixels, latent, logvar, image; /* of a tile */
    size_t whole;                         /* the decoder's pictures, where its caller wants none */
    size_t rows, columns;                 /* weights of a tile */
};

struct lg_video_net {
    lg_device *device;
    struct lg_autoencoder_config c;
    struct lg_autoencoder_shape shape;
    lg_dtype dtype, stats;
    lg_params table;
    struct side encoder, decoder; /* without kinds: there is none */
    struct lg_tiles rows, columns;
    struct lg_video_shape tile; /* of pixels; the whole clip's where it is not cut */
    bool is_tiled;
    struct places at;
    char *arena, *scratch;
    struct lg_net_memory need;
};

/* ---- descriptions ---- */

static bool is_causal(const struct lg_autoencoder_config *c, lg_aekl_half half)
{
    return c->kind == LG_VAE_LTX && (half == LG_AEKL_ENCODER || c->ltx.decoder_is_causal);
}

struct lg_video lg_video_of(const struct lg_autoencoder_config *c, lg_aekl_half half,
                            const struct lg_video_slice *slice)
{
    return (struct lg_video){
        .is_first = slice->is_first, .is_last = slice->is_last, .is_causal = is_causal(c, half)};
}

static int patch_of(const struct lg_autoencoder_config *c)
{
    return c->kind == LG_VAE_LTX ? c->ltx.patch : 1;
}

static int latent_frames(const struct lg_autoencoder_config *c, int frames)
{
    return (frames + c->factor_time - 1) / c->factor_time;
}

struct lg_video_ends lg_video_ends_of(const struct lg_autoencoder_config *c, lg_aekl_half half,
                                      const struct lg_video_shape *clip, int frames, lg_dtype type)
{
    const int64_t H = clip->height, W = clip->width, f = c->factor, p = patch_of(c);
    const int64_t all = latent_frames(c, clip->frames), some = latent_frames(c, frames);
    const lg_tensor pixels = lg_t4(NULL, clip->pixels, 3, clip->frames, H, W);
    const lg_tensor latent = lg_t4(NULL, type, c->latent_channels, all, H / f, W / f);
    if (half == LG_AEKL_ENCODER)
        return (struct lg_video_ends){lg_slice(pixels, 1, 0, frames),
                                      {lg_slice(latent, 1, 0, some), lg_slice(latent, 1, 0, some)}};
    return (struct lg_video_ends){lg_slice(latent, 1, 0, some),
                                  {lg_t4(NULL, type, frames, H / p, W / p, 3 * p * p)}};
}

void lg_video_describe(lg_net *n, const struct lg_autoencoder_config *c, lg_aekl_half half,
                       struct lg_video *clip, const struct lg_video_ends *ends)
{
    if (c->kind == LG_VAE_LTX)
        (half == LG_AEKL_ENCODER ? lg_aeltx_describe_encoder
                                 : lg_aeltx_describe_decoder)(n, &c->ltx, clip, ends);
    else
        (half == LG_AEKL_ENCODER ? lg_aekl_describe_video_encoder
                                 : lg_aekl_describe_video_decoder)(n, &c->kl, ends);
}

/* ---- slices ---- */

/* Slice i of a clip, counted from frame *at on; false behind the last one. */
static bool next_slice(const lg_video_net *net, lg_aekl_half half, int *at,
                       struct lg_video_slice *ret)
{
    const struct lg_autoencoder_config *c = &net->c;
    const int frames = net->shape.frames, time = c->factor_time;
    const bool is_cut = c->kind == LG_VAE_KL || is_causal(c, half);
    if (*at >= frames) return false;
    int most = frames;
    if (net->shape.slice && is_cut) /* whole latent frames, of which the first is one frame */
        most = *at ? LG_MAX(net->shape.slice / time, 1) * time
                   : (net->shape.slice - 1) / time * time + 1;
    ret->frames = LG_MIN(most, frames - *at);
    ret->is_first = *at == 0 || c->kind == LG_VAE_KL;
    ret->is_last = ret->frames == frames || c->kind == LG_VAE_KL; /* else it may have a successor */
    *at += ret->frames;
    return true;
}

static int kind_of(const struct side *side, const struct lg_video_slice *slice)
{
    int k = 0;
    while (k < side->n_kinds &&
           (side->kind[k].frames != slice->frames || side->kind[k].is_first != slice->is_first))
        k++;
    return k;
}

/* ---- planning ---- */

static lg_tensor bind(lg_net *n, const char *name, lg_tensor part, int64_t frames)
{
    lg_tensor all = part;
    all.dim[1] = frames;
    return lg_slice(lg_graph_bind(n->g, name, all), 1, 0, part.dim[1]);
}

/* Records slice kind k; its clip says what is carried. */
static int make_program(lg_video_net *net, struct side *side, int k)
{
    const struct lg_video_slice *slice = &side->kind[k];
    const struct lg_autoencoder_config *c = &net->c;
    struct lg_video clip = lg_video_of(c, side->half, slice);
    struct lg_video_ends ends =
        lg_video_ends_of(c, side->half, &net->tile, slice->frames, net->dtype);
    lg_net counted = lg_net_declare(1);
    counted.type = net->dtype;
    lg_video_describe(&counted, c, side->half, &clip, &ends);
    lg_params unused = lg_net_finish(&counted);
    lg_params_free(&unused);
    side->carried = LG_MAX(side->carried, clip.at);
    lg_net n = lg_net_record(net->device, &net->table, 1);
    const int64_t frames = net->tile.frames, latents = latent_frames(c, net->tile.frames);
    const bool encodes = side->half == LG_AEKL_ENCODER;
    ends.from = bind(&n, "from", ends.from, encodes ? frames : latents);
    ends.to[0] = bind(&n, "to", ends.to[0], encodes ? latents : ends.to[0].dim[1]);
    ends.to[1] = encodes ? bind(&n, "logvar", ends.to[1], latents)
                         : lg_graph_bind(n.g, "none", lg_t1(NULL, net->dtype, 1));
    const lg_tensor carried = lg_t1(NULL, net->dtype, LG_MAX(clip.at, 1));
    clip.at = 0;
    clip.carried = lg_graph_bind(n.g, "carried", carried);
    clip.carries = lg_graph_bind(n.g, "carries", carried);
    lg_net_bind(&n);
    lg_video_describe(&n, c, side->half, &clip, &ends);
    LG_TRY(lg_net_compile(&n, &side->program[k]));
    net->need.scratch = LG_MAX(net->need.scratch, lg_program_scratch_bytes(side->program[k]));
    net->need.arena = LG_MAX(net->need.arena, lg_program_arena_bytes(side->program[k]));
    return 0;
}

static int make_side(lg_video_net *net, struct side *side, lg_aekl_half half)
{
    struct lg_video_slice slice;
    side->half = half;
    for (int at = 0; next_slice(net, half, &at, &slice);) {
        const int k = kind_of(side, &slice);
        if (k < side->n_kinds) continue;
        LG_ASSERT(k < KINDS_MAX);
        side->kind[side->n_kinds++] = slice;
        LG_TRY(make_program(net, side, k));
    }
    return 0;
}

static size_t reserve(lg_video_net *net, size_t elements, lg_dtype dtype)
{
    size_t at = net->need.arena, bytes = elements * lg_dtype_bytes(dtype);
    net->need.arena += (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    return at;
}

static size_t pixels_of(const struct lg_video_shape *s)
{
    return 3 * (size_t)s->frames * (size_t)s->height * (size_t)s->width;
}

static size_t latents_of(const lg_video_net *net, const struct lg_video_shape *s)
{
    const size_t f = (size_t)net->c.factor;
    return (size_t)net->c.latent_channels * (size_t)latent_frames(&net->c, s->frames) *
           ((size_t)s->height / f) * ((size_t)s->width / f);
}

static void cut_arena(lg_video_net *net)
{
    const struct lg_autoencoder_shape *b = &net->shape;
    const struct lg_video_shape whole = {b->frames, b->height, b->width, LG_U8};
    struct places *at = &net->at;
    int most = 0;
    net->need.arena = (net->need.arena + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    for (int i = 0; i < 2; i++)
        at->carried[i] =
            reserve(net, (size_t)LG_MAX(net->encoder.carried, net->decoder.carried), net->dtype);
    for (int k = 0; k < net->decoder.n_kinds; k++) most = LG_MAX(most, net->decoder.kind[k].frames);
    const struct lg_video_shape slice = {most, net->tile.height, net->tile.width, LG_U8};
    at->patches = reserve(net, pixels_of(&slice), net->dtype);
    if (!net->is_tiled) return;
    at->pixels = reserve(net, pixels_of(&net->tile), net->dtype);
    at->latent = reserve(net, latents_of(net, &net->tile), net->dtype);
    at->logvar = reserve(net, latents_of(net, &net->tile), net->dtype);
    if (net->decoder.n_kinds) {
        at->image = reserve(net, pixels_of(&net->tile), net->dtype);
        at->whole = reserve(net, pixels_of(&whole), net->dtype);
    }
    at->rows = reserve(net, (size_t)net->tile.height, net->stats);
    at->columns = reserve(net, (size_t)net->tile.width, net->stats);
}

static int check_shape(const struct lg_autoencoder_config *c, const struct lg_autoencoder_shape *b)
{
    const int f = c->factor;
    LG_ASSERT(b->batch >= 1 && b->slice >= 0 && b->tile >= 0 && (b->half & LG_AEKL_BOTH));
    if (b->height < f || b->width < f || b->height > SIDE_MAX || b->width > SIDE_MAX ||
        b->height % f || b->width % f)
        return LG_FAIL(
            LG_ERR_CONFIG,
            "frames of %d x %d pixels: this autoencoder wants multiples of %d, at most %d",
            b->width, b->height, f, SIDE_MAX);
    if (b->frames > FRAMES_MAX || !lg_autoencoder_latent_frames(c, b->frames))
        return LG_FAIL(LG_ERR_CONFIG,
                       "a clip of %d frames: this autoencoder wants a multiple of %d and one more, "
                       "at most %d",
                       b->frames, c->factor_time, FRAMES_MAX);
    return 0;
}

int lg_video_net_make(lg_device *d, const struct lg_autoencoder_config *c,
                      const struct lg_autoencoder_shape *shape, lg_video_net **ret)
{
    struct lg_autoencoder_shape b = *shape;
    b.frames = LG_MAX(b.frames, 1);
    LG_TRY(check_shape(c, &b));
    lg_video_net *net = calloc(1, sizeof *net);
    if (!net) return LG_FAIL(LG_ERR_NOSPACE, "no memory for an autoencoder");
    int rc;
    net->device = d;
    net->c = *c;
    net->shape = b;
    net->dtype = lg_device_dtype(d);
    net->stats = net->dtype == LG_F64 ? LG_F64 : LG_F32;
    net->rows = lg_tiles_cut(b.height / c->factor, b.tile / c->factor);
    net->columns = lg_tiles_cut(b.width / c->factor, b.tile / c->factor);
    net->is_tiled = net->rows.n > 1 || net->columns.n > 1;
    net->tile =
        (struct lg_video_shape){b.frames, net->rows.size * c->factor, net->columns.size * c->factor,
                                net->is_tiled ? net->dtype : LG_U8};
    LG_TRY_GOTO(rc, lg_autoencoder_params(c, b.half, &net->table), fail);
    if (b.half & LG_AEKL_ENCODER)
        LG_TRY_GOTO(rc, make_side(net, &net->encoder, LG_AEKL_ENCODER), fail);
    if (b.half & LG_AEKL_DECODER)
        LG_TRY_GOTO(rc, make_side(net, &net->decoder, LG_AEKL_DECODER), fail);
    cut_arena(net);
    *ret = net;
    return 0;
fail:
    lg_video_net_close(&net);
    return rc;
}

struct lg_net_memory lg_video_net_memory(const lg_video_net *net)
{
    return net->need;
}

void lg_video_net_lend(lg_video_net *net, char *arena, char *scratch)
{
    net->arena = arena;
    net->scratch = scratch;
}

void lg_video_net_close(lg_video_net **net)
{
    if (!*net) return;
    for (int k = 0; k < KINDS_MAX; k++) {
        lg_program_free(&(*net)->encoder.program[k]);
        lg_program_free(&(*net)->decoder.program[k]);
    }
    lg_params_free(&(*net)->table);
    free(*net);
    *net = NULL;
}

static void print_side(const struct side *side, const char *name, FILE *to)
{
    for (int k = 0; k < side->n_kinds; k++) {
        fprintf(to, "%s, %d frames%s\n", name, side->kind[k].frames,
                side->kind[k].is_first ? "" : " behind others");
        lg_program_print(side->program[k], to);
    }
}

void lg_video_net_print(const lg_video_net *net, FILE *to)
{
    print_side(&net->encoder, "encoder", to);
    print_side(&net->decoder, "decoder", to);
}

static double side_flops(const lg_video_net *net, const struct side *side)
{
    struct lg_video_slice slice;
    double sum = 0;
    for (int at = 0; side->n_kinds && next_slice(net, side->half, &at, &slice);)
        sum += lg_program_flops(side->program[kind_of(side, &slice)]);
    return sum * net->rows.n * net->columns.n;
}

double lg_video_net_flops(const lg_video_net *net)
{
    return side_flops(net, &net->encoder) + side_flops(net, &net->decoder);
}

/* ---- running ---- */

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
static void run_slice(const struct run *r, const struct side *side, int i,
                      const struct lg_video_slice *slice, void *const ends[3])
{
    const lg_video_net *net = r->net;
    void *bound[BOUND] = {[FROM] = ends[0],
                          [TO] = ends[1],
                          [TO_LOGVAR] = ends[2],
                          [CARRIED] = place(net, net->at.carried[i % 2]),
                          [CARRIES] = place(net, net->at.carried[(i + 1) % 2]),
                          [WEIGHTS] = (void *)(uintptr_t)r->weights};
    lg_program_run(
        side->program[kind_of(side, slice)], r->s,
        &(struct lg_program_memory){.arena = net->arena, .scratch = net->scratch, .bound = bound},
        LG_PROGRAM_ALL);
}

/* pixels (3, F, H, W), mean and logvar (C, f, h, w): of a clip, or of a tile. */
static void encode_frames(const struct run *r, lg_tensor pixels, lg_tensor mean, lg_tensor logvar)
{
    struct lg_video_slice slice;
    for (int at = 0, from = 0, i = 0; next_slice(r->net, LG_AEKL_ENCODER, &at, &slice);
         from = at, i++) {
        const int64_t latent = latent_frames(&r->net->c, from);
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
    const int p = patch_of(&net->c);
    void *patches = place(net, net->at.patches);
    struct lg_video_slice slice;
    for (int at = 0, from = 0, i = 0; next_slice(net, LG_AEKL_DECODER, &at, &slice);
         from = at, i++) {
        run_slice(r, &net->decoder, i, &slice,
                  (void *[]){frame_of(latent.data, latent_frames(&net->c, from), &latent), patches,
                             NULL});
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
    return lg_t4(data, net->dtype, net->c.latent_channels, latent_frames(&net->c, s->frames),
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

static void decode_clip(const struct run *r, lg_tensor latent, lg_tensor image, lg_tensor pixels)
{
    const lg_video_net *net = r->net;
    if (!net->is_tiled) {
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
        decode_clip(&r, sample(latent, b, in),
                    sample(image, b, pixels_at(&whole, NULL, net->dtype)),
                    sample(pixels, b, pixels_at(&whole, NULL, LG_U8)));
}
