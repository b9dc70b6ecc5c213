/* AutoencoderKL; see autoencoder_kl.h. Here: configuration, loading, memory, slices. The layers
 * are in aekl_layers.c.
 *
 * A net runs one slice of pictures at a time, always the same number: a last slice that is not
 * full is staged, so that the shapes, and with them the bits of a picture, never depend on how
 * many there are. Each half is a program (kernels/graph) for one slice. Their arenas, the picture of
 * a slice, the staging of one where the batch needs it, and the backend's scratch are the net's memory;
 * encoder and decoder share all of it. */
#include "stages/nets/autoencoder_kl.h"
#include "base/fs.h"
#include "kernels/graph/program.h"
#include "stages/nets/aekl_layers.h"
#include "stages/nets/model_config.h"
#include "stages/nets/weights.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHANNELS_MAX = 1 << 14, LAYERS_MAX = 64, SIDE_MAX = 1 << 14, ARENA_ALIGN = 64 };

/* ---- configuration ---- */

static int check_block_types(const lg_model_config *m, const char *key, const char *type,
                             int blocks)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(m->root, key), *j;
    if (!list || cJSON_IsNull(list)) return 0;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != blocks)
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is not a list as long as block_out_channels (%d)",
                       m->path, key, blocks);
    cJSON_ArrayForEach(j, list)
    {
        if (!cJSON_IsString(j) || strcmp(j->valuestring, type))
            return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" has an entry other than \"%s\"", m->path, key,
                           type);
    }
    return 0;
}

static int check_absent(const lg_model_config *m, const char *key)
{
    const cJSON *j = cJSON_GetObjectItemCaseSensitive(m->root, key);
    if (j && !cJSON_IsNull(j))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"%s\" is set: latents with statistics per channel are not "
                       "supported",
                       m->path, key);
    return 0;
}

static int parse_config(const lg_model_config *m, struct lg_aekl_config *c)
{
    const char *kind;
    LG_TRY(lg_model_config_string(m, "_class_name", NULL, &kind));
    LG_TRY(lg_model_config_expect(m, "_class_name", "AutoencoderKL", "diffusers' AutoencoderKL"));
    LG_TRY(lg_model_config_expect(m, "act_fn", "silu", "an AutoencoderKL"));
    LG_TRY(lg_model_config_int(m, "in_channels", 3, 3, 3, &c->in_channels));
    LG_TRY(lg_model_config_int(m, "out_channels", 3, 3, 3, &c->out_channels));
    LG_TRY(lg_model_config_int(m, "latent_channels", 1, 1024, 4, &c->latent_channels));
    LG_TRY(lg_model_config_ints(m, "block_out_channels", 1, CHANNELS_MAX, LG_AEKL_BLOCKS_MAX,
                                c->block_out_channels, &c->blocks));
    LG_TRY(check_block_types(m, "down_block_types", "DownEncoderBlock2D", c->blocks));
    LG_TRY(check_block_types(m, "up_block_types", "UpDecoderBlock2D", c->blocks));
    LG_TRY(lg_model_config_int(m, "layers_per_block", 1, LAYERS_MAX, 1, &c->layers_per_block));
    LG_TRY(lg_model_config_int(m, "norm_num_groups", 1, CHANNELS_MAX, 32, &c->norm_groups));
    for (int i = 0; i < c->blocks; i++)
        if (c->block_out_channels[i] % c->norm_groups)
            return LG_FAIL(LG_ERR_CONFIG,
                           "%s: norm_num_groups %d does not divide block_out_channels[%d] = %d",
                           m->path, c->norm_groups, i, c->block_out_channels[i]);
    LG_TRY(lg_model_config_bool(m, "mid_block_add_attention", true, &c->mid_attention));
    LG_TRY(lg_model_config_bool(m, "use_quant_conv", true, &c->quant_conv));
    LG_TRY(lg_model_config_bool(m, "use_post_quant_conv", true, &c->post_quant_conv));
    LG_TRY(lg_model_config_double(m, "scaling_factor", 0.18215, &c->scaling_factor));
    LG_TRY(lg_model_config_double(m, "shift_factor", 0, &c->shift_factor));
    if (!(c->scaling_factor > 0))
        return LG_FAIL(LG_ERR_CONFIG, "%s: scaling_factor %g is not positive", m->path,
                       c->scaling_factor);
    LG_TRY(check_absent(m, "latents_mean"));
    LG_TRY(check_absent(m, "latents_std"));
    return 0;
}

int lg_aekl_config_load(const char *dir, struct lg_aekl_config *ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/config.json", dir));
    lg_model_config m = {0};
    struct lg_aekl_config c = {0};
    int rc;
    LG_TRY_GOTO(rc, lg_model_config_open(path, &m), out);
    LG_TRY_GOTO(rc, parse_config(&m, &c), out);
    *ret = c;
out:
    lg_model_config_close(&m);
    return rc;
}

int lg_aekl_factor(const struct lg_aekl_config *c)
{
    return 1 << (c->blocks - 1);
}

/* ---- parameters ---- */

int lg_aekl_params(const struct lg_aekl_config *c, lg_aekl_half half, lg_params *ret)
{
    lg_params t = {0};
    struct lg_aekl_build b = {.c = c, .table = &t};
    if (half & LG_AEKL_ENCODER) lg_aekl_encoder(&b, LG_NONE);
    if (half & LG_AEKL_DECODER) lg_aekl_decoder(&b, LG_NONE, LG_NONE);
    *ret = t;
    return 0;
}

/* Files from before diffusers 0.18 call the projections of the mid attention by other names. */
static void use_old_name(const lg_weights *w, struct lg_param *p)
{
    static const char *const names[][2] = {{".to_q.", ".query."},
                                           {".to_k.", ".key."},
                                           {".to_v.", ".value."},
                                           {".to_out.0.", ".proj_attn."}};
    if (lg_weights_find(w, p->name)) return;
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) {
        const char *at = strstr(p->name, names[i][0]);
        if (!at) continue;
        char old[LG_PARAM_NAME_BYTES];
        int n = snprintf(old, sizeof old, "%.*s%s%s", (int)(at - p->name), p->name, names[i][1],
                         at + strlen(names[i][0]));
        if (n > 0 && (size_t)n < sizeof old && lg_weights_find(w, old)) strcpy(p->name, old);
    }
}

int lg_aekl_load(const struct lg_aekl_config *c, const char *dir, lg_aekl_half half, float *ret)
{
    static const char *const of_encoder[] = {"encoder.", "quant_conv."};
    static const char *const of_decoder[] = {"decoder.", "post_quant_conv."};
    const char *extra[5] = {0};
    int n = 0;
    for (int i = 0; i < 2; i++) {
        if (!(half & LG_AEKL_ENCODER)) extra[n++] = of_encoder[i];
        if (!(half & LG_AEKL_DECODER)) extra[n++] = of_decoder[i];
    }
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/diffusion_pytorch_model.safetensors", dir));
    lg_params t = {0};
    lg_weights *w = NULL;
    int rc;
    LG_TRY_GOTO(rc, lg_aekl_params(c, half, &t), out);
    LG_TRY_GOTO(rc, lg_weights_open(path, &w), out);
    for (int i = 0; i < t.n; i++) use_old_name(w, &t.p[i]);
    LG_TRY_GOTO(rc, lg_params_load(&t, path, extra, ret, 0, t.count), out);
out:
    lg_weights_close(&w);
    lg_params_free(&t);
    return rc;
}

/* ---- the net ---- */

struct stage_at {
    size_t pixels, mean, logvar, image; /* bytes from the arena's start */
};

/* What the programs bind, in this order. */
enum { ENCODE_PIXELS, ENCODE_WEIGHTS, ENCODE_MEAN, ENCODE_LOGVAR, ENCODE_BOUND };
enum { DECODE_LATENT, DECODE_WEIGHTS, DECODE_PICTURE, DECODE_BOUND };

struct lg_aekl {
    lg_device *device;
    struct lg_aekl_config c;
    struct lg_aekl_shape shape; /* slice >= 1 */
    lg_dtype dtype;
    lg_params table;
    int decoder_row;             /* first row of the decoder */
    lg_program *encode, *decode; /* of one slice; NULL: not this half */
    size_t picture_at; /* of the decoder: (slice, H, W, 3), bytes from the arena's start */
    struct stage_at stage;
    char *arena, *scratch;
    size_t arena_bytes, scratch_bytes;
};

static int64_t latent_side(const lg_aekl *net, int pixels)
{
    return pixels / lg_aekl_factor(&net->c);
}

/* One slice. Tensors have `slice` pictures. */
static void encode_slice(const lg_aekl *net, lg_stream *s, const void *weights, lg_tensor pixels,
                         lg_tensor mean, lg_tensor logvar)
{
    void *const bound[ENCODE_BOUND] = {[ENCODE_PIXELS] = pixels.data,
                                       [ENCODE_WEIGHTS] = (void *)(uintptr_t)weights,
                                       [ENCODE_MEAN] = mean.data,
                                       [ENCODE_LOGVAR] = logvar.data};
    lg_program_run(
        net->encode, s,
        &(struct lg_program_memory){.arena = net->arena, .scratch = net->scratch, .bound = bound});
}

static void decode_slice(const lg_aekl *net, lg_stream *s, const void *weights, lg_tensor latent,
                         lg_tensor image, lg_tensor pixels)
{
    lg_tensor x = lg_t4(net->arena + net->picture_at, net->dtype, net->shape.slice,
                        net->shape.height, net->shape.width, net->c.out_channels);
    void *const bound[DECODE_BOUND] = {[DECODE_LATENT] = latent.data,
                                       [DECODE_WEIGHTS] = (void *)(uintptr_t)weights,
                                       [DECODE_PICTURE] = x.data};
    lg_program_run(
        net->decode, s,
        &(struct lg_program_memory){.arena = net->arena, .scratch = net->scratch, .bound = bound});
    if (image.rank) lg_nhwc_to_nchw(s, &(struct lg_nhwc_to_nchw_args){.x = x, .y = image});
    if (pixels.rank) lg_nhwc_to_pixels(s, &(struct lg_nhwc_to_pixels_args){.x = x, .y = pixels});
}

/* ---- slices ---- */

/* Pictures [first, first + n) of a batch; absent stays absent. */
static lg_tensor samples_of(lg_tensor t, int64_t first, int64_t n)
{
    if (!t.rank || !t.data) return LG_NONE;
    t.data = (char *)t.data + (size_t)first * (lg_tensor_bytes(&t) / (size_t)t.dim[0]);
    t.dim[0] = n;
    return t;
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

void lg_aekl_encode(lg_aekl *net, lg_stream *s, const void *weights, lg_tensor pixels,
                    lg_tensor mean, lg_tensor logvar)
{
    const struct lg_aekl_shape *b = &net->shape;
    int64_t h = latent_side(net, b->height), w = latent_side(net, b->width);
    LG_ASSERT(b->half & LG_AEKL_ENCODER);
    check_batch(net, pixels, net->c.in_channels, b->height, b->width);
    check_batch(net, mean, net->c.latent_channels, h, w);
    check_batch(net, logvar, net->c.latent_channels, h, w);
    int first = 0, n = b->slice;
    for (; first + n <= b->batch; first += n)
        encode_slice(net, s, weights, samples_of(pixels, first, n), samples_of(mean, first, n),
                     samples_of(logvar, first, n));
    if (first == b->batch) return;
    n = b->batch - first;
    lg_tensor stage_pixels = staged(net, pixels, net->stage.pixels);
    lg_tensor stage_mean = staged(net, mean, net->stage.mean);
    lg_tensor stage_logvar = staged(net, logvar, net->stage.logvar);
    copy(s, stage_pixels, samples_of(pixels, first, n));
    encode_slice(net, s, weights, stage_pixels, stage_mean, stage_logvar);
    copy(s, samples_of(mean, first, n), stage_mean);
    copy(s, samples_of(logvar, first, n), stage_logvar);
}

void lg_aekl_decode(lg_aekl *net, lg_stream *s, const void *weights, lg_tensor latent,
                    lg_tensor image, lg_tensor pixels)
{
    const struct lg_aekl_shape *b = &net->shape;
    LG_ASSERT(b->half & LG_AEKL_DECODER);
    check_batch(net, latent, net->c.latent_channels, latent_side(net, b->height),
                latent_side(net, b->width));
    if (image.data) check_batch(net, image, net->c.out_channels, b->height, b->width);
    if (pixels.data) check_batch(net, pixels, net->c.out_channels, b->height, b->width);
    int first = 0, n = b->slice;
    for (; first + n <= b->batch; first += n)
        decode_slice(net, s, weights, samples_of(latent, first, n), samples_of(image, first, n),
                     samples_of(pixels, first, n));
    if (first == b->batch) return;
    n = b->batch - first;
    lg_tensor stage_latent = staged(net, latent, net->stage.mean);
    lg_tensor stage_image = staged(net, image, net->stage.image);
    lg_tensor stage_pixels = staged(net, pixels, net->stage.pixels);
    copy(s, stage_latent, samples_of(latent, first, n));
    decode_slice(net, s, weights, stage_latent, stage_image, stage_pixels);
    copy(s, samples_of(image, first, n), stage_image);
    copy(s, samples_of(pixels, first, n), stage_pixels);
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
    net->stage.mean = reserve(net, latent, net->dtype);
    if (b->half & LG_AEKL_ENCODER) net->stage.logvar = reserve(net, latent, net->dtype);
    if (b->half & LG_AEKL_DECODER) net->stage.image = reserve(net, picture, net->dtype);
}

static struct lg_aekl_build build(const lg_aekl *net, lg_graph *g)
{
    return (struct lg_aekl_build){
        .c = &net->c, .table = (lg_params *)(uintptr_t)&net->table, .g = g, .t = net->dtype};
}

static lg_tensor bind_weights(const lg_aekl *net, lg_graph *g)
{
    return lg_graph_bind(g, "weights", lg_t1(NULL, net->dtype, (int64_t)net->table.count));
}

static lg_tensor latent_shape(const lg_aekl *net)
{
    return lg_t4(NULL, net->dtype, net->shape.slice, net->c.latent_channels,
                 latent_side(net, net->shape.height), latent_side(net, net->shape.width));
}

static void describe_encoder(const lg_aekl *net, lg_graph *g)
{
    const struct lg_aekl_shape *p = &net->shape;
    struct lg_aekl_build b = build(net, g);
    lg_tensor pixels = lg_graph_bind(
        g, "pixels", lg_t4(NULL, LG_U8, p->slice, net->c.in_channels, p->height, p->width));
    b.weights = bind_weights(net, g);
    lg_tensor mean = lg_graph_bind(g, "mean", latent_shape(net));
    lg_tensor logvar = lg_graph_bind(g, "logvar", latent_shape(net));
    lg_posterior_split(lg_graph_stream(g),
                       &(struct lg_posterior_split_args){
                           .x = lg_aekl_encoder(&b, pixels), .mean = mean, .logvar = logvar});
}

static void describe_decoder(const lg_aekl *net, lg_graph *g)
{
    const struct lg_aekl_shape *p = &net->shape;
    struct lg_aekl_build b = build(net, g);
    b.next = net->decoder_row;
    lg_tensor latent = lg_graph_bind(g, "latent", latent_shape(net));
    b.weights = bind_weights(net, g);
    lg_tensor picture = lg_graph_bind(
        g, "picture", lg_t4(NULL, net->dtype, p->slice, p->height, p->width, net->c.out_channels));
    lg_aekl_decoder(&b, latent, picture);
}

static int make_program(lg_aekl *net, void (*describe)(const lg_aekl *, lg_graph *),
                        lg_program **ret)
{
    lg_graph *g = lg_graph_new(net->device);
    describe(net, g);
    int rc = lg_graph_compile(g, ret);
    lg_graph_free(&g);
    LG_TRY(rc);
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

/* A net without memory, its sizes known. */
static int plan(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
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
    lg_params encoder = {0};
    int rc;
    LG_TRY_GOTO(rc, lg_aekl_params(c, shape->half & LG_AEKL_ENCODER, &encoder), fail);
    LG_TRY_GOTO(rc, lg_aekl_params(c, shape->half, &net->table), fail);
    net->decoder_row = encoder.n;
    lg_params_free(&encoder);
    if (shape->half & LG_AEKL_ENCODER)
        LG_TRY_GOTO(rc, make_program(net, describe_encoder, &net->encode), fail);
    if (shape->half & LG_AEKL_DECODER)
        LG_TRY_GOTO(rc, make_program(net, describe_decoder, &net->decode), fail);
    cut_arena(net);
    *ret = net;
    return 0;
fail:
    lg_params_free(&encoder);
    lg_aekl_close(&net);
    return rc;
}

int lg_aekl_plan(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                 size_t *ret_bytes)
{
    lg_aekl *net = NULL;
    LG_TRY(plan(d, c, shape, &net));
    *ret_bytes = net->arena_bytes + net->scratch_bytes;
    lg_aekl_close(&net);
    return 0;
}

int lg_aekl_print(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                  FILE *to)
{
    lg_aekl *net = NULL;
    LG_TRY(plan(d, c, shape, &net));
    if (net->encode) {
        fprintf(to, "encoder\n");
        lg_program_print(net->encode, to);
    }
    if (net->decode) {
        fprintf(to, "%sdecoder\n", net->encode ? "\n" : "");
        lg_program_print(net->decode, to);
    }
    lg_aekl_close(&net);
    return 0;
}

int lg_aekl_open(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                 lg_aekl **ret)
{
    lg_aekl *net = NULL;
    int rc;
    LG_TRY(plan(d, c, shape, &net));
    LG_TRY_GOTO(rc, lg_device_alloc(d, net->arena_bytes, (void **)&net->arena), fail);
    if (net->scratch_bytes)
        LG_TRY_GOTO(rc, lg_device_alloc(d, net->scratch_bytes, (void **)&net->scratch), fail);
    *ret = net;
    return 0;
fail:
    lg_aekl_close(&net);
    return rc;
}

void lg_aekl_close(lg_aekl **net)
{
    if (!*net) return;
    lg_device_free((*net)->device, (void **)&(*net)->arena);
    lg_device_free((*net)->device, (void **)&(*net)->scratch);
    lg_params_free(&(*net)->table);
    lg_program_free(&(*net)->encode);
    lg_program_free(&(*net)->decode);
    free(*net);
    *net = NULL;
}
