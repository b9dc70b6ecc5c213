/* lg-forward: one forward, and with dout one backward, of a denoiser in diffusers' layout, safetensors
 * in, safetensors out: how a checkpoint and the nets are compared with other programs
 * (tests/parity/check_diffusers.py, tests/gpu/parity_nets.py). */
#include "base/fs.h"
#include "stages/encode/port.h"
#include "stages/io/safetensors.h"
#include "stages/nets/adapter_file.h"
#include "stages/nets/denoiser.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage_text[] =
    "usage: lg-forward MODEL_DIR IN.safetensors OUT.safetensors [DEVICE [PRECISION]]\n"
    "  MODEL_DIR   config.json and diffusion_pytorch_model.safetensors of a denoiser,\n"
    "              or an adapter of one (adapter_config.json), which is added to its weights\n"
    "  IN          x (B,C,H,W), t (B) as the net sees it; DiT: label (B) int32;\n"
    "              PixArt: text (B,L,E), text_length (B) int32; with conditions of a size: size\n"
    "              (2 B), original height and width of each, ratio (B), height / width\n"
    "              SD3: text.clip_l, text.clip_g, text.t5 and pooled.clip_l, pooled.clip_g (B,P);\n"
    "              SD 2: text; SDXL: text.clip_l, text.clip_g, pooled.clip_g and size (6 B): "
    "height and width\n"
    "              of the original, top and left of the crop, height and width of the target\n"
    "              FLUX: pooled.clip_l, text.t5, with guidance: guidance (B), 1000 times its "
    "scale\n"
    "              dout (B,C or 2C,H,W), if there: the gradient of the output, asks for a "
    "backward\n"
    "  OUT         out (B,C or 2C,H,W); after a backward grad.NAME of every parameter; all fp32\n"
    "  DEVICE      host (default), ref64, cuda:0; PRECISION on a GPU: fp32 (default), tf32, bf16, "
    "fp16";

struct job {
    const char *dir, *in_path, *out_path;
    lg_device *device;
    lg_stream *stream;
    lg_st_file *in;
    struct lg_denoiser_config config;
    lg_params params;
    lg_denoiser *net;
};

static int find(const struct job *j, const char *name, int rank, const struct lg_st_entry **ret)
{
    const struct lg_st_entry *e = lg_st_find(j->in, name);
    if (!e || e->rank != rank)
        return LG_FAIL(LG_ERR_USAGE, "%s: no tensor \"%s\" with %d dimensions", j->in_path, name,
                       rank);
    *ret = e;
    return 0;
}

/* Timesteps and the like stay in fp32 where the compute type has 16 bits: bf16 knows 8 digits of 999. */
static int upload_numbers(const struct job *j, const char *name, int64_t n, lg_tensor *ret)
{
    const struct lg_st_entry *e;
    LG_TRY(find(j, name, 1, &e));
    if (e->dim[0] != n)
        return LG_FAIL(LG_ERR_USAGE, "%s: %s has not %lld numbers", j->in_path, name, (long long)n);
    lg_tensor wide = lg_t1(NULL, LG_F32, n), own = wide;
    own.dtype = lg_device_dtype(j->device) == LG_F64 ? LG_F64 : LG_F32;
    float *v = malloc(lg_tensor_bytes(&wide));
    if (!v) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %s", name);
    int rc;
    LG_TRY_GOTO(rc, lg_st_read_f32(e, v, 0, (size_t)n), out);
    LG_TRY_GOTO(rc, lg_device_alloc(j->device, lg_tensor_bytes(&wide), &wide.data), out);
    LG_TRY_GOTO(rc, lg_device_alloc(j->device, lg_tensor_bytes(&own), &own.data), out);
    lg_stream_upload(j->stream, wide.data, v, lg_tensor_bytes(&wide));
    lg_cast(j->stream, &(struct lg_cast_args){.x = wide, .y = own});
    lg_stream_sync(j->stream);
    *ret = own;
out:
    free(v);
    return rc;
}

static int upload_entry(const struct job *j, const char *name, int rank, lg_tensor *ret)
{
    const struct lg_st_entry *e;
    LG_TRY(find(j, name, rank, &e));
    lg_tensor t = lg_tensor_of(NULL, lg_device_dtype(j->device), rank, e->dim);
    size_t n = (size_t)lg_numel(&t);
    float *v = malloc(n * sizeof *v);
    if (!v) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %s", name);
    int rc = lg_st_read_f32(e, v, 0, n);
    if (rc == 0) rc = lg_put_weights(j->device, j->stream, v, n, &t.data);
    free(v);
    LG_TRY(rc);
    *ret = t;
    return 0;
}

/* int32 numbers in [min, max]: what lies outside would be read as another row of a table. */
static int upload_i32(const struct job *j, const char *name, int64_t n, int min, int max,
                      lg_tensor *ret)
{
    const struct lg_st_entry *e;
    LG_TRY(find(j, name, 1, &e));
    if (e->dtype != LG_I32 || e->dim[0] != n)
        return LG_FAIL(LG_ERR_USAGE, "%s: \"%s\" is not %lld int32", j->in_path, name,
                       (long long)n);
    for (int64_t i = 0; i < n; i++) {
        int32_t v;
        memcpy(&v, (const char *)e->data + (size_t)i * sizeof v, sizeof v);
        if (v < min || v > max)
            return LG_FAIL(LG_ERR_USAGE, "%s: %s[%lld] is %d, must be %d to %d", j->in_path, name,
                           (long long)i, (int)v, min, max);
    }
    *ret = lg_t1(NULL, LG_I32, n);
    LG_TRY(lg_device_alloc(j->device, e->bytes, &ret->data));
    lg_stream_upload(j->stream, ret->data, e->data, e->bytes);
    lg_stream_sync(j->stream);
    return 0;
}

/* "text", or of a model that has several "text.t5". */
static const char *text_name(const struct job *j, const char *what, const char *text, char ret[48])
{
    snprintf(ret, 48, "%s%s%s", what, j->config.n_texts > 1 ? "." : "",
             j->config.n_texts > 1 ? text : "");
    return ret;
}

static int read_text(struct job *j, int64_t B, const struct lg_denoiser_text_info *has,
                     struct lg_denoiser_text *c, struct lg_text_states *ret)
{
    char name[48];
    if (c->length) {
        text_name(j, "text", has->name, name);
        LG_TRY(upload_entry(j, name, 3, &ret->states));
        if (ret->states.dim[0] != B || ret->states.dim[2] != c->width || ret->states.dim[1] > 65536)
            return LG_FAIL(LG_ERR_USAGE, "%s: %s is not (B, L, %d)", j->in_path, name, c->width);
        c->length = (int)ret->states.dim[1]; /* the weights do not depend on it */
    }
    if (c->pooled) {
        text_name(j, "pooled", has->name, name);
        LG_TRY(upload_entry(j, name, 2, &ret->pooled));
        if (ret->pooled.dim[0] != B || ret->pooled.dim[1] != c->pooled)
            return LG_FAIL(LG_ERR_USAGE, "%s: %s is not (B, %d)", j->in_path, name, c->pooled);
    }
    if (has->padding == LG_PADDING_SEEN) return 0;
    return upload_i32(j, text_name(j, "text_length", has->name, name), B, 1, c->length,
                      &ret->length);
}

static int read_texts(struct job *j, int64_t B, struct lg_denoiser_input *ret)
{
    const struct lg_denoiser_text_info *has;
    const int n = lg_denoiser_texts(j->config.kind, &has);
    for (int k = 0; k < n; k++) {
        char name[48];
        if (has[k].is_optional && !lg_st_find(j->in, text_name(j, "text", has[k].name, name))) {
            j->config.n_texts = k; /* zeros */
            break;
        }
        LG_TRY(read_text(j, B, &has[k], &j->config.text[k], &ret->text[k]));
    }
    return 0;
}

static int read_input(struct job *j, struct lg_denoiser_input *ret)
{
    struct lg_denoiser_config *c = &j->config;
    LG_TRY(upload_entry(j, "x", 4, &ret->x));
    int64_t B = ret->x.dim[0];
    if (B < 1 || B > 4096 || ret->x.dim[1] != c->channels || ret->x.dim[2] != lg_denoiser_rows(c) ||
        ret->x.dim[3] != c->width)
        return LG_FAIL(LG_ERR_USAGE, "%s: x is not (B, %d, %d, %d)", j->in_path, c->channels,
                       lg_denoiser_rows(c), c->width);
    LG_TRY(upload_numbers(j, "t", B, &ret->t));
    const int numbers = lg_denoiser_numbers(c);
    if (numbers) LG_TRY(upload_numbers(j, "size", numbers * B, &ret->size));
    if (lg_denoiser_has_ratio(c)) LG_TRY(upload_numbers(j, "ratio", B, &ret->ratio));
    if (c->guidance) LG_TRY(upload_numbers(j, "guidance", B, &ret->guidance));
    if (lg_denoiser_info(c->kind)->labels)
        return upload_i32(j, "label", B, 0, c->num_classes, &ret->label);
    return read_texts(j, B, ret);
}

static int load_weights(const struct job *j, void **ret)
{
    float *w = malloc(j->params.count * sizeof *w);
    int rc = w ? lg_whole_load(&j->config, j->dir, w)
               : LG_FAIL(LG_ERR_NOSPACE, "no memory for the weights");
    if (rc == 0) rc = lg_put_weights(j->device, j->stream, w, j->params.count, ret);
    free(w);
    return rc;
}

static lg_tensor output_shape(const struct job *j, lg_tensor x)
{
    return lg_t4(NULL, x.dtype, x.dim[0], lg_denoiser_out_channels(&j->config), x.dim[2], x.dim[3]);
}

/* The gradients of all parameters as fp32 on the host, to be freed; NULL where no dout asks for them. */
static int backward(const struct job *j, const void *weights, const struct lg_denoiser_input *in,
                    float **ret)
{
    if (!lg_st_find(j->in, "dout")) return 0;
    lg_tensor dout, own = lg_t1(NULL, lg_denoiser_grad_type(j->device), (int64_t)j->params.count);
    LG_TRY(upload_entry(j, "dout", 4, &dout));
    lg_tensor shape = output_shape(j, in->x);
    if (memcmp(dout.dim, shape.dim, sizeof dout.dim))
        return LG_FAIL(LG_ERR_USAGE, "%s: dout has not the shape of the output", j->in_path);
    LG_TRY(lg_device_alloc(j->device, lg_tensor_bytes(&own), &own.data));
    lg_denoiser_backward(j->net, j->stream, weights, in, dout, own.data, false);
    lg_tensor wide = own;
    wide.dtype = LG_F32;
    if (own.dtype != LG_F32) {
        LG_TRY(lg_device_alloc(j->device, lg_tensor_bytes(&wide), &wide.data));
        lg_cast(j->stream, &(struct lg_cast_args){.x = own, .y = wide});
    }
    *ret = malloc(lg_tensor_bytes(&wide));
    if (!*ret) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the gradients");
    lg_stream_download(j->stream, *ret, wide.data, lg_tensor_bytes(&wide));
    lg_stream_sync(j->stream);
    return 0;
}

static int write_tensors(const struct job *j, lg_st_writer *w, const struct lg_port *out,
                         const float *grads)
{
    LG_TRY(lg_st_writer_declare(w, "out", LG_F32, 4, out->f32.dim));
    for (int i = 0; grads && i < j->params.n; i++) {
        const struct lg_param *p = &j->params.p[i];
        char name[LG_PARAM_NAME_BYTES + 8];
        snprintf(name, sizeof name, "grad.%s", p->name);
        LG_TRY(lg_st_writer_declare(w, name, LG_F32, p->rank, p->dim));
    }
    LG_TRY(lg_st_writer_data(w, out->host, lg_tensor_bytes(&out->f32)));
    for (int i = 0; grads && i < j->params.n; i++) {
        const struct lg_param *p = &j->params.p[i];
        LG_TRY(lg_denoiser_write_values(w, p, grads + p->offset));
    }
    return 0;
}

static int write_output(const struct job *j, const struct lg_port *out, const float *grads)
{
    lg_st_writer *w = NULL;
    lg_port_get(out, j->stream);
    lg_stream_sync(j->stream);
    LG_TRY(lg_st_writer_open(j->out_path, &w));
    int rc = write_tensors(j, w, out, grads);
    if (rc == 0) return lg_st_writer_finish(&w, NULL);
    lg_st_writer_abort(&w);
    return rc;
}

static int run(struct job *j, const char *device, const char *precision)
{
    struct lg_denoiser_input in = {0};
    struct lg_port out = {0};
    void *weights = NULL;
    float *grads = NULL;
    int rc;
    LG_TRY(lg_whole_config_load(j->dir, &j->config));
    LG_TRY(lg_st_open(j->in_path, &j->in));
    LG_TRY(lg_device_open(device, &(struct lg_device_options){.precision = precision}, &j->device));
    LG_TRY(lg_stream_open(j->device, &j->stream));
    LG_TRY(read_input(j, &in));
    LG_TRY(lg_denoiser_params(&j->config, &j->params));
    LG_TRY(load_weights(j, &weights));
    const struct lg_denoiser_mode mode = {.batch = (int)in.x.dim[0],
                                          .train = lg_st_find(j->in, "dout")};
    LG_TRY(lg_denoiser_open(j->device, &j->config, &mode, &j->net));
    LG_TRY(lg_port_open(j->device, output_shape(j, in.x), &out));
    lg_denoiser_forward(j->net, j->stream, weights, &in, out.device);
    LG_TRY_GOTO(rc, backward(j, weights, &in, &grads), done);
    LG_TRY_GOTO(rc, write_output(j, &out, grads), done);
done:
    free(grads);
    lg_port_close(j->device, &out);
    return rc;
}

int main(int argc, char **argv)
{
    if (argc < 4 || argc > 6) {
        fprintf(stderr, "%s\n", usage_text);
        return -LG_ERR_USAGE;
    }
    struct job j = {.dir = argv[1], .in_path = argv[2], .out_path = argv[3]};
    int rc = run(&j, argc > 4 ? argv[4] : "host", argc > 5 ? argv[5] : NULL);
    if (rc < 0) fprintf(stderr, "lg-forward: %s\n", lg_err_text());
    lg_denoiser_close(&j.net);
    lg_params_free(&j.params);
    if (j.stream) lg_stream_close(&j.stream);
    lg_device_close(&j.device);
    if (j.in) lg_st_close(&j.in);
    return -rc;
}
