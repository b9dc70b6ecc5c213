/* lg-forward: one forward of a denoiser in diffusers' layout, safetensors in, safetensors out:
 * how a checkpoint is compared with other programs (tests/parity/check_diffusers.py). */
#include "base/fs.h"
#include "stages/encode/port.h"
#include "stages/io/safetensors.h"
#include "stages/nets/denoiser.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage_text[] =
    "usage: lg-forward MODEL_DIR IN.safetensors OUT.safetensors [DEVICE [PRECISION]]\n"
    "  MODEL_DIR   config.json and diffusion_pytorch_model.safetensors of a DiT or PixArt\n"
    "  IN          x (B,C,H,W), t (B) as the net sees it; DiT: label (B) int32;\n"
    "              PixArt: text (B,L,E), text_length (B) int32\n"
    "  OUT         out (B,C,H,W) fp32\n"
    "  DEVICE      host (default), ref64, cuda:0; PRECISION on a GPU: fp32 (default), tf32, bf16, "
    "fp16";

struct job {
    const char *dir, *in_path, *out_path;
    lg_device *device;
    lg_stream *stream;
    lg_st_file *in;
    struct lg_denoiser_config config;
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

static int upload_entry(const struct job *j, const char *name, int rank, lg_tensor *ret)
{
    const struct lg_st_entry *e;
    LG_TRY(find(j, name, rank, &e));
    lg_tensor t = {.rank = rank};
    memcpy(t.dim, e->dim, (size_t)rank * sizeof *e->dim);
    size_t n = (size_t)lg_numel(&t);
    float *v = malloc(n * sizeof *v);
    if (!v) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %s", name);
    int rc = lg_st_read_f32(e, v, 0, n);
    t.dtype = lg_device_dtype(j->device);
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

static int read_input(struct job *j, struct lg_denoiser_input *ret)
{
    struct lg_denoiser_config *c = &j->config;
    LG_TRY(upload_entry(j, "x", 4, &ret->x));
    int64_t B = ret->x.dim[0];
    if (B < 1 || B > 4096 || ret->x.dim[1] != c->channels || ret->x.dim[2] != c->height ||
        ret->x.dim[3] != c->width)
        return LG_FAIL(LG_ERR_USAGE, "%s: x is not (B, %d, %d, %d)", j->in_path, c->channels,
                       c->height, c->width);
    LG_TRY(upload_entry(j, "t", 1, &ret->t));
    if (ret->t.dim[0] != B) return LG_FAIL(LG_ERR_USAGE, "%s: t is not (B)", j->in_path);
    if (c->kind == LG_DIT) return upload_i32(j, "label", B, 0, c->num_classes, &ret->label);
    LG_TRY(upload_entry(j, "text", 3, &ret->text));
    if (ret->text.dim[0] != B || ret->text.dim[2] != c->text_dim || ret->text.dim[1] > 65536)
        return LG_FAIL(LG_ERR_USAGE, "%s: text is not (B, L, %d)", j->in_path, c->text_dim);
    c->text_length = (int)ret->text.dim[1]; /* the weights do not depend on it */
    return upload_i32(j, "text_length", B, 1, c->text_length, &ret->text_length);
}

static int load_weights(const struct job *j, void **ret)
{
    lg_params t;
    LG_TRY(lg_denoiser_params(&j->config, &t));
    float *w = malloc(t.count * sizeof *w);
    int rc = w ? lg_denoiser_load(&j->config, j->dir, w)
               : LG_FAIL(LG_ERR_NOSPACE, "no memory for the weights");
    if (rc == 0) rc = lg_put_weights(j->device, j->stream, w, t.count, ret);
    free(w);
    lg_params_free(&t);
    return rc;
}

static int write_output(const struct job *j, const struct lg_port *out)
{
    lg_st_writer *w = NULL;
    int rc;
    lg_port_get(out, j->stream);
    lg_stream_sync(j->stream);
    LG_TRY(lg_st_writer_open(j->out_path, &w));
    LG_TRY_GOTO(rc, lg_st_writer_declare(w, "out", LG_F32, 4, out->f32.dim), fail);
    LG_TRY_GOTO(rc, lg_st_writer_data(w, out->host, lg_tensor_bytes(&out->f32)), fail);
    return lg_st_writer_finish(&w, NULL);
fail:
    lg_st_writer_abort(&w);
    return rc;
}

static int run(struct job *j, const char *device, const char *precision)
{
    char path[LG_PATH_BYTES];
    struct lg_denoiser_input in = {0};
    struct lg_port out = {0};
    void *weights = NULL;
    LG_TRY(lg_path(path, "%s/config.json", j->dir));
    LG_TRY(lg_denoiser_config_load(path, &j->config));
    LG_TRY(lg_st_open(j->in_path, &j->in));
    LG_TRY(lg_device_open(device, &(struct lg_device_options){.precision = precision}, &j->device));
    LG_TRY(lg_stream_open(j->device, &j->stream));
    LG_TRY(read_input(j, &in));
    LG_TRY(load_weights(j, &weights));
    LG_TRY(lg_denoiser_open(j->device, &j->config, (int)in.x.dim[0], false, &j->net));
    LG_TRY(lg_port_open(j->device, in.x, &out));
    lg_denoiser_forward(j->net, j->stream, weights, &in, out.device);
    int rc = write_output(j, &out);
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
    if (j.stream) lg_stream_close(&j.stream);
    lg_device_close(&j.device);
    if (j.in) lg_st_close(&j.in);
    return -rc;
}
