/* An autoencoder as a net that runs on clips: its slices of frames, tiles and memory; see autoencoder.h.
 *
 * Clips run one after the other, a clip tile by tile, a tile slice by slice. Each half has a program (kernels/graph) for every
 * kind of slice that there is: the first, those behind it, and what is left. Between slices of a causal net its convolutions'
 * last frames are carried in two places that take turns. What a tile reads and writes is staged, since a part of a frame
 * has no rows that operations take; what it made is added to the whole under weights that are 1 but where tiles overlap,
 * and there rise and fall linearly, so that the weights of all tiles are 1 in sum. All this is the net's memory, which
 * encoder and decoder share. */
#include "stages/nets/autoencoder_video.h"
#include "kernels/graph/fuse.h"
#include <stdlib.h>

enum { SIDE_MAX = 1 << 14, FRAMES_MAX = 1 << 14, ARENA_ALIGN = 64 };

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

int lg_video_patch(const struct lg_autoencoder_config *c)
{
    return c->kind == LG_VAE_LTX ? c->ltx.patch : 1;
}

int lg_video_latents(const struct lg_autoencoder_config *c, int frames)
{
    return (frames + c->factor_time - 1) / c->factor_time;
}

struct lg_video_ends lg_video_ends_of(const struct lg_autoencoder_config *c, lg_aekl_half half,
                                      const struct lg_video_shape *clip, int frames, lg_dtype type)
{
    const int64_t H = clip->height, W = clip->width, f = c->factor, p = lg_video_patch(c);
    const int64_t all = lg_video_latents(c, clip->frames), some = lg_video_latents(c, frames);
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

bool lg_video_next_slice(const lg_video_net *net, lg_aekl_half half, int *at,
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

int lg_video_kind(const struct lg_video_side *side, const struct lg_video_slice *slice)
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
static int make_program(lg_video_net *net, struct lg_video_side *side, int k)
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
    side->noise = clip.noise_at;
    lg_net n = lg_net_record(net->device, &net->table, 1);
    const int64_t frames = net->tile.frames, latents = lg_video_latents(c, net->tile.frames);
    const bool encodes = side->half == LG_AEKL_ENCODER;
    ends.from = bind(&n, "from", ends.from, encodes ? frames : latents);
    ends.to[0] = bind(&n, "to", ends.to[0], encodes ? latents : ends.to[0].dim[1]);
    ends.to[1] = encodes ? bind(&n, "logvar", ends.to[1], latents)
                         : lg_graph_bind(n.g, "none", lg_t1(NULL, net->dtype, 1));
    const lg_tensor carried = lg_t1(NULL, net->dtype, LG_MAX(clip.at, 1));
    clip.at = clip.noise_at = 0;
    clip.carried = lg_graph_bind(n.g, "carried", carried);
    clip.carries = lg_graph_bind(n.g, "carries", carried);
    clip.noise = lg_graph_bind(n.g, "noise", lg_t1(NULL, net->dtype, LG_MAX(side->noise, 1)));
    clip.timestep = lg_graph_bind(n.g, "timestep", lg_t1(NULL, net->stats, 1));
    lg_net_bind(&n);
    lg_video_describe(&n, c, side->half, &clip, &ends);
    lg_graph_fuse(n.g);
    LG_TRY(lg_net_compile(&n, &side->program[k]));
    net->need.scratch = LG_MAX(net->need.scratch, lg_program_scratch_bytes(side->program[k]));
    net->need.arena = LG_MAX(net->need.arena, lg_program_arena_bytes(side->program[k]));
    return 0;
}

static int make_side(lg_video_net *net, struct lg_video_side *side, lg_aekl_half half)
{
    struct lg_video_slice slice;
    side->half = half;
    for (int at = 0; lg_video_next_slice(net, half, &at, &slice);) {
        const int k = lg_video_kind(side, &slice);
        if (k < side->n_kinds) continue;
        LG_ASSERT(k < LG_VIDEO_KINDS_MAX);
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
    return (size_t)net->c.latent_channels * (size_t)lg_video_latents(&net->c, s->frames) *
           ((size_t)s->height / f) * ((size_t)s->width / f);
}

static void cut_arena(lg_video_net *net)
{
    const struct lg_autoencoder_shape *b = &net->shape;
    const struct lg_video_shape whole = {b->frames, b->height, b->width, LG_U8};
    struct lg_video_places *at = &net->at;
    int most = 0;
    net->need.arena = (net->need.arena + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    for (int i = 0; i < 2; i++)
        at->carried[i] =
            reserve(net, (size_t)LG_MAX(net->encoder.carried, net->decoder.carried), net->dtype);
    for (int k = 0; k < net->decoder.n_kinds; k++) most = LG_MAX(most, net->decoder.kind[k].frames);
    const struct lg_video_shape slice = {most, net->tile.height, net->tile.width, LG_U8};
    at->patches = reserve(net, pixels_of(&slice), net->dtype);
    at->noise = reserve(net, (size_t)net->decoder.noise, net->dtype);
    at->noise32 = reserve(net, (size_t)net->decoder.noise, LG_F32);
    at->timestep = reserve(net, net->decoder.n_kinds > 0, net->stats);
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

void lg_video_net_set_decoding(lg_video_net *net, const struct lg_decoding *d)
{
    net->decoding = *d;
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
    for (int k = 0; k < LG_VIDEO_KINDS_MAX; k++) {
        lg_program_free(&(*net)->encoder.program[k]);
        lg_program_free(&(*net)->decoder.program[k]);
    }
    lg_params_free(&(*net)->table);
    free(*net);
    *net = NULL;
}

static void print_side(const struct lg_video_side *side, const char *name, FILE *to)
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

static double side_flops(const lg_video_net *net, const struct lg_video_side *side)
{
    struct lg_video_slice slice;
    double sum = 0;
    for (int at = 0; side->n_kinds && lg_video_next_slice(net, side->half, &at, &slice);)
        sum += lg_program_flops(side->program[lg_video_kind(side, &slice)]);
    return sum * net->rows.n * net->columns.n;
}

double lg_video_net_flops(const lg_video_net *net)
{
    return side_flops(net, &net->encoder) + side_flops(net, &net->decoder);
}
