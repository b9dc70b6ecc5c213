/* AutoencoderKL as a net that runs: memory, slices; see autoencoder_kl.h. What it
 * computes stands in autoencoder_kl.c.
 *
 * A net runs one slice of pictures at a time, always the same number: a last slice that is not
 * full is staged, so that the shapes, and with them the bits of a picture, never depend on how
 * many there are. Each half is a program (kernels/graph) for one slice. Their arenas, the picture of
 * a slice, the staging of one where the batch needs it, and the backend's scratch are the net's memory;
 * encoder and decoder share all of it. */
#include "stages/nets/autoencoder_private.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE_MAX = 1 << 14, ARENA_ALIGN = 64 };

int lg_aekl_factor(const struct lg_aekl_config *c)
{
    return 1 << (c->blocks - 1);
}

/* ---- parameters ---- */

struct shapes {
    lg_tensor pixels, latent, picture;
};

static struct shapes shapes_of(const lg_net *n, const struct lg_aekl_config *c, int64_t height,
                               int64_t width)
{
    const int64_t B = n->batch, f = lg_aekl_factor(c);
    return (struct shapes){.pixels = lg_t4(NULL, LG_U8, B, c->in_channels, height, width),
                           .latent =
                               lg_t4(NULL, n->type, B, c->latent_channels, height / f, width / f),
                           .picture = lg_t4(NULL, n->type, B, height, width, c->out_channels)};
}

int lg_aekl_params(const struct lg_aekl_config *c, lg_aekl_half half, lg_params *ret)
{
    lg_net n = lg_net_declare(1);
    const struct shapes s = shapes_of(&n, c, lg_aekl_factor(c), lg_aekl_factor(c));
    if (half & LG_AEKL_ENCODER) lg_aekl_describe_encoder(&n, c, s.pixels, s.latent, s.latent);
    if (half & LG_AEKL_DECODER) lg_aekl_describe_decoder(&n, c, s.latent, s.picture);
    *ret = lg_net_finish(&n);
    return 0;
}

/* ---- the net ---- */

/* Where the tensors of a slice are staged: bytes from the arena's start. */
struct stage_at {
    size_t pixels, latent, logvar, image;
};

/* What the programs bind, in this order. */
enum { ENCODE_PIXELS, ENCODE_MEAN, ENCODE_LOGVAR, ENCODE_WEIGHTS, ENCODE_BOUND };
enum { DECODE_LATENT, DECODE_PICTURE, DECODE_WEIGHTS, DECODE_BOUND };

struct lg_aekl {
    lg_device *device;
    struct lg_aekl_config c;
    struct lg_aekl_shape shape; /* slice >= 1 */
    lg_dtype dtype;
    lg_params table;
    lg_program *encode, *decode; /* of one slice; NULL: not this half */
    size_t picture_at; /* of the decoder: (slice, H, W, 3), bytes from the arena's start */
    struct stage_at stage;
    char *arena, *scratch;
    size_t arena_bytes, scratch_bytes; /* that it needs */
    bool borrows;                      /* arena and scratch are another net's */
};

static int64_t latent_side(const lg_aekl *net, int pixels)
{
    return pixels / lg_aekl_factor(&net->c);
}

/* What a half reads and writes: pixels, their mean and logvar; or a latent, its image and pixels. */
enum { HALF_TENSORS = 3 };
struct half {
    void (*run)(const lg_aekl *net, lg_stream *s, const void *weights, const lg_tensor *t);
    lg_tensor t[HALF_TENSORS]; /* the first is read */
    size_t stage[HALF_TENSORS];
};

static void run_program(const lg_aekl *net, lg_program *p, lg_stream *s, void *const *bound)
{
    lg_program_run(
        p, s,
        &(struct lg_program_memory){.arena = net->arena, .scratch = net->scratch, .bound = bound},
        LG_PROGRAM_ALL);
}

static void encode_slice(const lg_aekl *net, lg_stream *s, const void *weights, const lg_tensor *t)
{
    run_program(net, net->encode, s,
                (void *[ENCODE_BOUND]){[ENCODE_PIXELS] = t[0].data,
                                       [ENCODE_MEAN] = t[1].data,
                                       [ENCODE_LOGVAR] = t[2].data,
                                       [ENCODE_WEIGHTS] = (void *)(uintptr_t)weights});
}

static void decode_slice(const lg_aekl *net, lg_stream *s, const void *weights, const lg_tensor *t)
{
    lg_tensor x = lg_t4(net->arena + net->picture_at, net->dtype, net->shape.slice,
                        net->shape.height, net->shape.width, net->c.out_channels);
    run_program(net, net->decode, s,
                (void *[DECODE_BOUND]){[DECODE_LATENT] = t[0].data,
                                       [DECODE_PICTURE] = x.data,
                                       [DECODE_WEIGHTS] = (void *)(uintptr_t)weights});
    if (t[1].rank) lg_nhwc_to_nchw(s, &(struct lg_nhwc_to_nchw_args){.x = x, .y = t[1]});
    if (t[2].rank) lg_nhwc_to_pixels(s, &(struct lg_nhwc_to_pixels_args){.x = x, .y = t[2]});
}

/* ---- slices ---- */

/* Pictures [first, first + n) of a batch; absent stays absent. */
static lg_tensor samples_of(lg_tensor t, int64_t first, int64_t n)
{
    if (!t.rank || !t.data) return LG_NONE;
    return lg_slice(t, 0, first, n);
}

/* The staging of a slice in the shape of t; absent where t is. */
static lg_tensor staged(const lg_aekl *net, lg_tensor t, size_t at)
{
    if (!t.rank || !t.data) return LG_NONE;
    t.data = net->arena + at;
    t.dim[0] = net->shape.slice;
    return t;
}

static void copy(lg_stream *s, lg_tensor to, lg_tensor from)
{
    if (!to.rank || !from.rank) return;
    lg_tensor less = to.dim[0] < from.dim[0] ? to : from;
    lg_stream_copy(s, to.data, from.data, lg_tensor_bytes(&less));
}

static void check_batch(const lg_aekl *net, lg_tensor t, int64_t channels, int64_t h, int64_t w)
{
    LG_ASSERT(t.rank == 4 && t.dim[0] == net->shape.batch && t.dim[1] == channels &&
              t.dim[2] == h && t.dim[3] == w && t.data);
}

/* The whole batch; what fills no slice is staged. */
static void run_slices(const lg_aekl *net, lg_stream *s, const void *weights, const struct half *h)
{
    const int batch = net->shape.batch, n = net->shape.slice, rest = batch % n;
    lg_tensor part[HALF_TENSORS], stage[HALF_TENSORS];
    for (int first = 0; first + n <= batch; first += n) {
        for (int i = 0; i < HALF_TENSORS; i++) part[i] = samples_of(h->t[i], first, n);
        h->run(net, s, weights, part);
    }
    if (!rest) return;
    for (int i = 0; i < HALF_TENSORS; i++) {
        part[i] = samples_of(h->t[i], batch - rest, rest);
        stage[i] = staged(net, h->t[i], h->stage[i]);
    }
    copy(s, stage[0], part[0]);
    h->run(net, s, weights, stage);
    for (int i = 1; i < HALF_TENSORS; i++) copy(s, part[i], stage[i]);
}

void lg_aekl_encode(lg_aekl *net, lg_stream *s, const void *weights, lg_tensor pixels,
                    lg_tensor mean, lg_tensor logvar)
{
    const struct lg_aekl_shape *b = &net->shape;
    const struct stage_at *at = &net->stage;
    int64_t h = latent_side(net, b->height), w = latent_side(net, b->width);
    LG_ASSERT(b->half & LG_AEKL_ENCODER);
    check_batch(net, pixels, net->c.in_channels, b->height, b->width);
    check_batch(net, mean, net->c.latent_channels, h, w);
    check_batch(net, logvar, net->c.latent_channels, h, w);
    run_slices(net, s, weights,
               &(struct half){.run = encode_slice,
                              .t = {pixels, mean, logvar},
                              .stage = {at->pixels, at->latent, at->logvar}});
}

void lg_aekl_decode(lg_aekl *net, lg_stream *s, const void *weights, lg_tensor latent,
                    lg_tensor image, lg_tensor pixels)
{
    const struct lg_aekl_shape *b = &net->shape;
    const struct stage_at *at = &net->stage;
    LG_ASSERT(b->half & LG_AEKL_DECODER);
    check_batch(net, latent, net->c.latent_channels, latent_side(net, b->height),
                latent_side(net, b->width));
    if (image.data) check_batch(net, image, net->c.out_channels, b->height, b->width);
    if (pixels.data) check_batch(net, pixels, net->c.out_channels, b->height, b->width);
    run_slices(net, s, weights,
               &(struct half){.run = decode_slice,
                              .t = {latent, image, pixels},
                              .stage = {at->latent, at->image, at->pixels}});
}

/* ---- memory ---- */

static size_t reserve(lg_aekl *net, size_t elements, lg_dtype dtype)
{
    size_t at = net->arena_bytes, bytes = elements * lg_dtype_bytes(dtype);
    net->arena_bytes += (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    return at;
}

static void cut_arena(lg_aekl *net)
{
    const struct lg_aekl_shape *b = &net->shape;
    size_t picture = (size_t)b->slice * (size_t)b->height * (size_t)b->width * 3;
    reserve(net,
            LG_MAX(net->encode ? lg_program_arena_bytes(net->encode) : 0,
                   net->decode ? lg_program_arena_bytes(net->decode) : 0),
            LG_U8); /* the programs', at the arena's start */
    if (net->decode) net->picture_at = reserve(net, picture, net->dtype);
    if (b->batch % b->slice == 0) return;
    size_t latent = (size_t)(b->slice * latent_side(net, b->height) * latent_side(net, b->width)) *
                    (size_t)net->c.latent_channels;
    net->stage.pixels = reserve(net, picture, LG_U8);
    net->stage.latent = reserve(net, latent, net->dtype);
    if (b->half & LG_AEKL_ENCODER) net->stage.logvar = reserve(net, latent, net->dtype);
    if (b->half & LG_AEKL_DECODER) net->stage.image = reserve(net, picture, net->dtype);
}

static void record_encoder(lg_net *n, const struct lg_aekl_config *c, const struct shapes *s)
{
    lg_tensor pixels = lg_graph_bind(n->g, "pixels", s->pixels);
    lg_tensor mean = lg_graph_bind(n->g, "mean", s->latent);
    lg_tensor logvar = lg_graph_bind(n->g, "logvar", s->latent);
    lg_net_bind(n);
    lg_aekl_describe_encoder(n, c, pixels, mean, logvar);
}

static void record_decoder(lg_net *n, const struct lg_aekl_config *c, const struct shapes *s)
{
    lg_tensor latent = lg_graph_bind(n->g, "latent", s->latent);
    lg_tensor picture = lg_graph_bind(n->g, "picture", s->picture);
    lg_net_bind(n);
    lg_aekl_describe_decoder(n, c, latent, picture);
}

/* Of one slice. */
static int make_program(lg_aekl *net, lg_aekl_half half, lg_program **ret)
{
    lg_net n = lg_net_record(net->device, &net->table, net->shape.slice);
    const struct shapes s = shapes_of(&n, &net->c, net->shape.height, net->shape.width);
    (half == LG_AEKL_ENCODER ? record_encoder : record_decoder)(&n, &net->c, &s);
    LG_TRY(lg_net_compile(&n, ret));
    net->scratch_bytes = LG_MAX(net->scratch_bytes, lg_program_scratch_bytes(*ret));
    return 0;
}

static int check_shape(const struct lg_aekl_config *c, const struct lg_aekl_shape *b)
{
    int f = lg_aekl_factor(c);
    LG_ASSERT(b->batch >= 1 && b->slice >= 0 && (b->half & LG_AEKL_BOTH));
    if (b->height < f || b->width < f || b->height > SIDE_MAX || b->width > SIDE_MAX ||
        b->height % f || b->width % f)
        return LG_FAIL(
            LG_ERR_CONFIG,
            "pictures of %d x %d pixels: this autoencoder wants multiples of %d, at most %d",
            b->width, b->height, f, SIDE_MAX);
    return 0;
}

int lg_aekl_make(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                 lg_aekl **ret)
{
    LG_TRY(check_shape(c, shape));
    lg_aekl *net = calloc(1, sizeof *net);
    if (!net) return LG_FAIL(LG_ERR_NOSPACE, "no memory for an autoencoder");
    net->device = d;
    net->c = *c;
    net->shape = *shape;
    net->shape.slice = shape->slice ? LG_MIN(shape->slice, shape->batch) : shape->batch;
    net->dtype = lg_device_dtype(d);
    int rc;
    LG_TRY_GOTO(rc, lg_aekl_params(c, shape->half, &net->table), fail);
    if (shape->half & LG_AEKL_ENCODER)
        LG_TRY_GOTO(rc, make_program(net, LG_AEKL_ENCODER, &net->encode), fail);
    if (shape->half & LG_AEKL_DECODER)
        LG_TRY_GOTO(rc, make_program(net, LG_AEKL_DECODER, &net->decode), fail);
    cut_arena(net);
    *ret = net;
    return 0;
fail:
    lg_aekl_close(&net);
    return rc;
}

int lg_aekl_print(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                  FILE *to)
{
    lg_aekl *net = NULL;
    LG_TRY(lg_aekl_make(d, c, shape, &net));
    lg_aekl_print_programs(net, to);
    lg_aekl_close(&net);
    return 0;
}

void lg_aekl_print_programs(const lg_aekl *net, FILE *to)
{
    if (net->encode) {
        fprintf(to, "encoder\n");
        lg_program_print(net->encode, to);
    }
    if (net->decode) {
        fprintf(to, "%sdecoder\n", net->encode ? "\n" : "");
        lg_program_print(net->decode, to);
    }
}

struct lg_net_memory lg_aekl_memory(const lg_aekl *net)
{
    return (struct lg_net_memory){net->arena_bytes, net->scratch_bytes};
}

void lg_aekl_lend(lg_aekl *net, char *arena, char *scratch)
{
    net->borrows = true;
    net->arena = arena;
    net->scratch = scratch;
}

double lg_aekl_flops(const lg_aekl *net)
{
    return (net->encode ? lg_program_flops(net->encode) : 0) +
           (net->decode ? lg_program_flops(net->decode) : 0);
}

/* The largest of all. */
static struct lg_net_memory largest(lg_aekl *const *nets, int n)
{
    struct lg_net_memory most = {0, 0};
    for (int i = 0; i < n; i++) {
        most.arena = LG_MAX(most.arena, nets[i]->arena_bytes);
        most.scratch = LG_MAX(most.scratch, nets[i]->scratch_bytes);
    }
    return most;
}

static int plan_all(lg_device *d, const struct lg_aekl_config *c,
                    const struct lg_aekl_shape *shapes, int n, lg_aekl **ret)
{
    int rc = 0;
    for (int i = 0; i < n; i++) ret[i] = NULL;
    for (int i = 0; i < n && rc == 0; i++) rc = lg_aekl_make(d, c, &shapes[i], &ret[i]);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

static void close_all(lg_aekl **nets, int n)
{
    for (int i = n - 1; i >= 0; i--) lg_aekl_close(&nets[i]);
}

int lg_aekl_plan_all(lg_device *d, const struct lg_aekl_config *c,
                     const struct lg_aekl_shape *shapes, int n, size_t *ret_bytes)
{
    lg_aekl **nets = calloc((size_t)n, sizeof *nets);
    LG_ASSERT(nets);
    int rc = plan_all(d, c, shapes, n, nets);
    if (rc == 0) {
        const struct lg_net_memory m = largest(nets, n);
        *ret_bytes = m.arena + m.scratch;
    }
    close_all(nets, n);
    free(nets);
    return rc;
}

int lg_aekl_plan(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                 size_t *ret_bytes)
{
    LG_TRY(lg_aekl_plan_all(d, c, shape, 1, ret_bytes));
    return 0;
}

int lg_aekl_open_all(lg_device *d, const struct lg_aekl_config *c,
                     const struct lg_aekl_shape *shapes, int n, lg_aekl **ret)
{
    int rc;
    LG_TRY_GOTO(rc, plan_all(d, c, shapes, n, ret), fail);
    const struct lg_net_memory m = largest(ret, n);
    LG_TRY_GOTO(rc, lg_device_alloc(d, m.arena, (void **)&ret[0]->arena), fail);
    if (m.scratch) LG_TRY_GOTO(rc, lg_device_alloc(d, m.scratch, (void **)&ret[0]->scratch), fail);
    for (int i = 1; i < n; i++) lg_aekl_lend(ret[i], ret[0]->arena, ret[0]->scratch);
    return 0;
fail:
    close_all(ret, n);
    return rc;
}

int lg_aekl_open(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                 lg_aekl **ret)
{
    LG_TRY(lg_aekl_open_all(d, c, shape, 1, ret));
    return 0;
}

void lg_aekl_close(lg_aekl **net)
{
    if (!*net) return;
    if (!(*net)->borrows) {
        lg_device_free((*net)->device, (void **)&(*net)->arena);
        lg_device_free((*net)->device, (void **)&(*net)->scratch);
    }
    lg_params_free(&(*net)->table);
    lg_program_free(&(*net)->encode);
    lg_program_free(&(*net)->decode);
    free(*net);
    *net = NULL;
}
