/* The diffusion transformers as one type: checks, planning, opening, dispatch by kind.
 *
 * Design: a net is its config, one block of device memory for activations and one for the scratch
 * of its operations. Both sizes come from running the net itself on a dry stream, its activations
 * laid out at an address that is never read; so the plan cannot drift from what forward and
 * backward do.
 *
 * Invariant: nothing is allocated after lg_denoiser_open. */
#include "stages/nets/denoiser.h"
#include "stages/nets/dit.h"
#include "stages/nets/pixart.h"
#include <stdlib.h>

struct lg_denoiser {
    struct lg_denoiser_config config;
    lg_device *device;
    int batch;
    bool train;
    struct lg_dit *dit; /* exactly one of the two */
    struct lg_pixart *pixart;
    void *activations, *scratch;
    struct lg_denoiser_bytes bytes;
};

enum { SIDE_MAX = 4096, HIDDEN_MAX = 1 << 16, DEPTH_MAX = 1024, TEXT_MAX = 1 << 16 };

int lg_denoiser_config_check(const struct lg_denoiser_config *c)
{
#define WANT(cond, ...)                                                                            \
    if (!(cond)) return LG_FAIL(LG_ERR_CONFIG, "model: " __VA_ARGS__)
    WANT(c->kind == LG_DIT || c->kind == LG_PIXART, "unknown kind %d", (int)c->kind);
    WANT(c->channels >= 1 && c->channels <= SIDE_MAX, "%d latent channels", c->channels);
    WANT(c->height >= 1 && c->height <= SIDE_MAX && c->width >= 1 && c->width <= SIDE_MAX,
         "a latent of %d x %d; 1 to %d are possible", c->height, c->width, SIDE_MAX);
    WANT(c->patch >= 1 && c->height % c->patch == 0 && c->width % c->patch == 0,
         "a latent of %d x %d cannot be cut into patches of %d; change patch or data.size",
         c->height, c->width, c->patch);
    WANT(c->kind == LG_PIXART || c->height == c->width,
         "a latent of %d x %d, but DiT is defined for squares only; use pixart", c->height,
         c->width);
    WANT(c->hidden >= 4 && c->hidden <= HIDDEN_MAX && c->hidden % 4 == 0,
         "hidden = %d; the sinusoidal positions want a multiple of 4, at most %d", c->hidden,
         HIDDEN_MAX);
    WANT(c->heads >= 1 && c->hidden % c->heads == 0,
         "hidden = %d does not divide into %d heads; change hidden or heads", c->hidden, c->heads);
    WANT(c->depth >= 1 && c->depth <= DEPTH_MAX, "depth = %d; 1 to %d are possible", c->depth,
         DEPTH_MAX);
    WANT(c->mlp_ratio == 4, "mlp_ratio = %d; diffusers' models have 4 built in, set it to 4",
         c->mlp_ratio);
    WANT(c->kind != LG_DIT || c->num_classes >= 1, "num_classes = %d; DiT wants at least one",
         c->num_classes);
    WANT(c->kind != LG_PIXART || (c->text_length >= 1 && c->text_length <= TEXT_MAX),
         "text_length = %d; 1 to %d are possible", c->text_length, TEXT_MAX);
    WANT(c->kind != LG_PIXART || (c->text_dim >= 1 && c->text_dim <= HIDDEN_MAX),
         "text_dim = %d; 1 to %d are possible", c->text_dim, HIDDEN_MAX);
    WANT(c->norm_eps > 0 && c->norm_eps < 1, "norm_eps = %g; it lies between 0 and 1", c->norm_eps);
#undef WANT
    return 0;
}

int lg_denoiser_params(const struct lg_denoiser_config *c, lg_params *ret)
{
    LG_TRY(lg_denoiser_config_check(c));
    lg_params t = {0};
    if (c->kind == LG_DIT)
        lg_dit_params(c, &t);
    else
        lg_pixart_params(c, &t);
    *ret = t;
    return 0;
}

double lg_denoiser_flops(const struct lg_denoiser_config *c)
{
    struct lg_tf_dims n = lg_tf_dims_of(c, 1);
    double T = (double)n.T, D = (double)n.D, F = (double)n.F, P = (double)n.P;
    double L = (double)n.L, E = (double)n.E;
    double block = 2 * T * D * (4 * D + 2 * F) + 4 * T * T * D; /* qkv, out, mlp; q k^T and p v */
    double rest = 4 * T * D * P + 2 * D * (LG_TF_FREQUENCIES + D);
    if (c->kind == LG_DIT) {
        block += 2 * D * 6 * D;
        rest += 2 * D * 2 * D;
    } else {
        block += 2 * D * (2 * T * D + 2 * L * D) + 4 * T * L * D;
        rest += 2 * D * 6 * D + 2 * L * D * (E + D);
    }
    return c->depth * block + rest;
}

/* ---- dispatch ---- */

static void net_new(lg_denoiser *net)
{
    if (net->config.kind == LG_DIT)
        net->dit = lg_dit_new(&net->config, net->batch, net->train);
    else
        net->pixart = lg_pixart_new(&net->config, net->batch, net->train);
}

static void net_free(lg_denoiser *net)
{
    lg_dit_free(&net->dit);
    lg_pixart_free(&net->pixart);
}

/* Lays the activations out from base on; returns their bytes. */
static size_t net_layout(lg_denoiser *net, void *base)
{
    lg_dtype type = lg_device_dtype(net->device);
    bool half = type == LG_F16 || type == LG_BF16;
    struct lg_tf_arena a = {
        .base = base, .type = type, .stat_type = half ? LG_F32 : type, .train = net->train};
    if (net->dit)
        lg_dit_layout(net->dit, &a);
    else
        lg_pixart_layout(net->pixart, &a);
    return a.used;
}

static void net_forward(lg_denoiser *net, const struct lg_tf_pass *p,
                        const struct lg_denoiser_input *in, lg_tensor out)
{
    if (net->dit)
        lg_dit_forward(net->dit, p, in, out);
    else
        lg_pixart_forward(net->pixart, p, in, out);
}

static void net_backward(lg_denoiser *net, const struct lg_tf_pass *p,
                         const struct lg_denoiser_input *in, lg_tensor dout)
{
    if (net->dit)
        lg_dit_backward(net->dit, p, in, dout);
    else
        lg_pixart_backward(net->pixart, p, in, dout);
}

/* ---- planning ---- */

/* Addresses for the dry run: far apart, never read. */
#define DRY_ADDRESS(i) ((void *)((uintptr_t)(i) << 44))

static void dry_run(lg_denoiser *net, lg_stream *s)
{
    const struct lg_denoiser_config *c = &net->config;
    lg_dtype type = lg_device_dtype(net->device);
    int64_t B = net->batch;
    struct lg_denoiser_input in = {
        .x = lg_t4(DRY_ADDRESS(2), type, B, c->channels, c->height, c->width),
        .t = lg_t1(DRY_ADDRESS(3), type, B)};
    if (net->dit) {
        in.label = lg_t1(DRY_ADDRESS(4), LG_I32, B);
    } else {
        in.text = lg_t3(DRY_ADDRESS(5), type, B, c->text_length, c->text_dim);
        in.text_length = lg_t1(DRY_ADDRESS(6), LG_I32, B);
    }
    lg_tensor out = in.x;
    out.data = DRY_ADDRESS(7);
    struct lg_tf_pass p = {.s = s, .type = type, .w = DRY_ADDRESS(8)};
    net_forward(net, &p, &in, out);
    p.g = DRY_ADDRESS(9);
    if (!net->train) return;
    net_backward(net, &p, &in, out);
    p.accumulate = true; /* adding may want more scratch than writing */
    net_backward(net, &p, &in, out);
}

/* net has config, device, batch and train; fills bytes. Leaves the layout at a dry address. */
static int measure(lg_denoiser *net)
{
    lg_stream *s;
    net->bytes.activations = net_layout(net, DRY_ADDRESS(1));
    LG_TRY(lg_stream_open_dry(net->device, &s));
    dry_run(net, s);
    net->bytes.scratch = lg_stream_scratch_need(s);
    lg_stream_close(&s);
    return 0;
}

static int new_measured(lg_device *d, const struct lg_denoiser_config *c, int batch, bool train,
                        lg_denoiser **ret)
{
    LG_TRY(lg_denoiser_config_check(c));
    LG_ASSERT(batch >= 1);
    lg_denoiser *net = calloc(1, sizeof *net);
    LG_ASSERT(net);
    *net = (lg_denoiser){.config = *c, .device = d, .batch = batch, .train = train};
    net_new(net);
    int rc;
    LG_TRY_GOTO(rc, measure(net), fail);
    *ret = net;
    return 0;
fail:
    lg_denoiser_close(&net);
    return rc;
}

int lg_denoiser_plan(lg_device *d, const struct lg_denoiser_config *c, int batch, bool train,
                     struct lg_denoiser_bytes *ret)
{
    lg_denoiser *net;
    LG_TRY(new_measured(d, c, batch, train, &net));
    *ret = net->bytes;
    lg_denoiser_close(&net);
    return 0;
}

/* ---- life ---- */

/* Computes the sinusoidal positions and brings them to the device in its compute type. */
static int upload_positions(lg_denoiser *net)
{
    lg_tensor pos = net->dit ? lg_dit_positions(net->dit) : lg_pixart_positions(net->pixart);
    size_t bytes = (size_t)lg_numel(&pos) * sizeof(float);
    void *staged = NULL;
    lg_stream *s = NULL;
    float *host = malloc(bytes);
    LG_ASSERT(host);
    lg_tf_positions(&net->config, host);
    int rc;
    LG_TRY_GOTO(rc, lg_device_alloc(net->device, bytes, &staged), out);
    LG_TRY_GOTO(rc, lg_stream_open(net->device, &s), out);
    lg_stream_upload(s, staged, host, bytes);
    lg_cast(s,
            &(struct lg_cast_args){.x = lg_t2(staged, LG_F32, pos.dim[0], pos.dim[1]), .y = pos});
    lg_stream_sync(s);
out:
    if (s) lg_stream_close(&s);
    lg_device_free(net->device, &staged);
    free(host);
    return rc;
}

int lg_denoiser_open(lg_device *d, const struct lg_denoiser_config *c, int batch, bool train,
                     lg_denoiser **ret)
{
    lg_denoiser *net;
    LG_TRY(new_measured(d, c, batch, train, &net));
    int rc;
    LG_TRY_GOTO(rc, lg_device_alloc(d, net->bytes.activations, &net->activations), fail);
    if (net->bytes.scratch)
        LG_TRY_GOTO(rc, lg_device_alloc(d, net->bytes.scratch, &net->scratch), fail);
    net_layout(net, net->activations);
    LG_TRY_GOTO(rc, upload_positions(net), fail);
    *ret = net;
    return 0;
fail:
    lg_denoiser_close(&net);
    return rc;
}

void lg_denoiser_close(lg_denoiser **net)
{
    if (!*net) return;
    lg_device_free((*net)->device, &(*net)->activations);
    lg_device_free((*net)->device, &(*net)->scratch);
    net_free(*net);
    free(*net);
    *net = NULL;
}

static void check_input(const lg_denoiser *net, const struct lg_denoiser_input *in, lg_tensor out)
{
    const struct lg_denoiser_config *c = &net->config;
    const int64_t want[4] = {net->batch, c->channels, c->height, c->width};
    for (int i = 0; i < 4; i++) LG_ASSERT(in->x.dim[i] == want[i] && out.dim[i] == want[i]);
    LG_ASSERT(in->t.dim[0] == net->batch);
    if (net->dit) {
        LG_ASSERT(in->label.rank == 1 && in->label.dim[0] == net->batch);
    } else {
        LG_ASSERT(in->text.rank == 3 && in->text.dim[0] == net->batch);
        LG_ASSERT(in->text.dim[1] == c->text_length && in->text.dim[2] == c->text_dim);
        LG_ASSERT(in->text_length.rank == 1 && in->text_length.dim[0] == net->batch);
    }
}

void lg_denoiser_forward(lg_denoiser *net, lg_stream *s, const void *weights,
                         const struct lg_denoiser_input *in, lg_tensor out)
{
    check_input(net, in, out);
    lg_stream_set_scratch(s, net->scratch, net->bytes.scratch);
    struct lg_tf_pass p = {.s = s, .type = lg_device_dtype(net->device), .w = weights};
    net_forward(net, &p, in, out);
}

lg_dtype lg_denoiser_grad_type(const lg_device *d)
{
    return lg_device_dtype(d) == LG_F64 ? LG_F64 : LG_F32;
}

void lg_denoiser_backward(lg_denoiser *net, lg_stream *s, const void *weights,
                          const struct lg_denoiser_input *in, lg_tensor dout, void *grads,
                          bool accumulate)
{
    check_input(net, in, dout);
    LG_ASSERT(net->train);
    lg_stream_set_scratch(s, net->scratch, net->bytes.scratch);
    struct lg_tf_pass p = {.s = s,
                           .type = lg_device_dtype(net->device),
                           .w = weights,
                           .g = grads,
                           .accumulate = accumulate};
    net_backward(net, &p, in, dout);
}
