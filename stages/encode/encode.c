/* Encoding and decoding safetensors files; see encode.h.
 *
 * The output's temporary is opened before the model is loaded, so that an unwritable place is found
 * at once; it appears under its name only when it is complete. Results are held in memory: a file's
 * tensors follow one another, and the log-variance comes out together with the mean. */
#include "stages/encode/encode.h"
#include "base/fs.h"
#include "stages/encode/batches.h"
#include "stages/io/safetensors.h"
#include "stages/io/tokenizer.h"
#include <stdlib.h>
#include <string.h>

#define TEXT_BYTES_MAX ((size_t)1 << 30)
enum { LENGTH_DEFAULT = 120 }; /* of a T5 */
enum { SIDE_MAX = 1 << 14 };

/* The tensor `name` of rank `rank`, with at least one sample. */
static int find(const lg_st_file *f, const char *path, const char *name, int rank,
                const char *shape, const struct lg_st_entry **ret)
{
    const struct lg_st_entry *e = lg_st_find(f, name);
    if (!e) return LG_FAIL(LG_ERR_MISMATCH, "%s has no tensor \"%s\" %s", path, name, shape);
    if (e->rank != rank)
        return LG_FAIL(LG_ERR_MISMATCH, "%s: \"%s\" has %d dimensions, wanted is %s", path, name,
                       e->rank, shape);
    for (int i = 0; i < rank; i++)
        if (e->dim[i] < 1 || e->dim[i] > INT32_MAX)
            return LG_FAIL(LG_ERR_MISMATCH, "%s: dimension %d of \"%s\" is %lld, wanted is %s",
                           path, i, name, (long long)e->dim[i], shape);
    *ret = e;
    return 0;
}

static int check_type(const struct lg_st_entry *e, const char *path, lg_dtype want)
{
    if (e->dtype != want)
        return LG_FAIL(LG_ERR_MISMATCH, "%s: \"%s\" is %s, wanted is %s", path, e->name,
                       lg_st_type_name(e->dtype), lg_st_type_name(want));
    return 0;
}

static int room(size_t samples, size_t sample, float **ret)
{
    *ret = calloc(samples, sample * sizeof **ret);
    if (!*ret)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu results of %zu values", samples, sample);
    return 0;
}

/* Declares f32 tensors of (n, dim[1..]) and writes them one after the other. */
static int write_f32(lg_st_writer *w, int rank, const int64_t *dim, int count,
                     const char *const *names, float *const *values)
{
    size_t bytes = sizeof(float);
    for (int i = 0; i < rank; i++) bytes *= (size_t)dim[i];
    for (int i = 0; i < count; i++) LG_TRY(lg_st_writer_declare(w, names[i], LG_F32, rank, dim));
    for (int i = 0; i < count; i++) LG_TRY(lg_st_writer_data(w, values[i], bytes));
    return 0;
}

/* ---- pictures ---- */

/* What a file has: pictures (N, C, H, W), or clips (N, C, F, H, W). */
struct clips {
    int rank;
    int64_t n, channels, frames, height, width;
};
static int find_clips(const lg_st_file *f, const char *in, const char *name, const char *shape,
                      const struct lg_st_entry **ret, struct clips *ret_clips)
{
    const struct lg_st_entry *e = lg_st_find(f, name);
    const int rank = e && e->rank == 5 ? 5 : 4;
    LG_TRY(find(f, in, name, rank, shape, ret));
    e = *ret;
    *ret_clips = (struct clips){.rank = rank,
                                .n = e->dim[0],
                                .channels = e->dim[1],
                                .frames = rank == 5 ? e->dim[2] : 1,
                                .height = e->dim[rank - 2],
                                .width = e->dim[rank - 1]};
    return 0;
}

static int write_clips(lg_st_writer *w, const struct clips *c, int count, const char *const *names,
                       float *const *values)
{
    const int64_t picture[] = {c->n, c->channels, c->height, c->width};
    const int64_t clip[] = {c->n, c->channels, c->frames, c->height, c->width};
    LG_TRY(write_f32(w, c->rank, c->rank == 5 ? clip : picture, count, names, values));
    return 0;
}

static int allocate(const struct clips *c, float **ret)
{
    LG_TRY(room((size_t)c->n, (size_t)(c->channels * c->frames * c->height * c->width), ret));
    return 0;
}

static int open_vae(const struct lg_encode_options *o, lg_aekl_half half,
                    const struct lg_autoencoder_config *c, const struct clips *pixels,
                    lg_vae_batches **ret)
{
    if (pixels->height > SIDE_MAX || pixels->width > SIDE_MAX || pixels->frames > SIDE_MAX)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%lld frames of %lld x %lld pixels: at most %d are possible of each",
                       (long long)pixels->frames, (long long)pixels->width,
                       (long long)pixels->height, SIDE_MAX);
    return lg_vae_batches_open(
        &(struct lg_vae_batches_spec){.device = o->device,
                                      .dir = o->model,
                                      .config = *c,
                                      .shape = {.half = half,
                                                .batch = pixels->frames > 1 ? 1 : o->batch,
                                                .frames = (int)pixels->frames,
                                                .height = (int)pixels->height,
                                                .width = (int)pixels->width,
                                                .slice = o->slice,
                                                .tile = o->tile}},
        ret);
}

static int encode_pixels(const struct lg_encode_options *o, const lg_st_file *f, const char *in,
                         lg_st_writer *w)
{
    const struct lg_st_entry *e;
    struct lg_autoencoder_config c;
    struct clips pixels;
    lg_vae_batches *vae = NULL;
    float *latent[2] = {NULL, NULL};
    int rc;
    LG_TRY(find_clips(f, in, "pixels", "(N, 3, H, W) or (N, 3, F, H, W) u8", &e, &pixels));
    LG_TRY(check_type(e, in, LG_U8));
    if (pixels.channels != 3)
        return LG_FAIL(LG_ERR_MISMATCH, "%s: \"pixels\" has %lld channels, wanted is (N, 3, H, W)",
                       in, (long long)pixels.channels);
    LG_TRY(lg_autoencoder_config_load(o->model, &c));
    LG_TRY_GOTO(rc, open_vae(o, LG_AEKL_ENCODER, &c, &pixels, &vae), out);
    struct clips made = pixels;
    made.channels = c.latent_channels;
    made.frames = lg_autoencoder_latent_frames(&c, (int)pixels.frames);
    made.height /= c.factor;
    made.width /= c.factor;
    for (int i = 0; i < 2; i++) LG_TRY_GOTO(rc, allocate(&made, &latent[i]), out);
    lg_vae_batches_encode(vae, e->data, made.n, latent[0], latent[1]);
    rc = write_clips(w, &made, 2, (const char *const[]){"latent_mean", "latent_logvar"}, latent);
out:
    lg_vae_batches_close(&vae);
    free(latent[0]);
    free(latent[1]);
    return rc;
}

static int decode_latents(const struct lg_encode_options *o, const lg_st_file *f, const char *in,
                          lg_st_writer *w)
{
    const struct lg_st_entry *e;
    struct lg_autoencoder_config c;
    struct clips latents;
    lg_vae_batches *vae = NULL;
    float *latent = NULL, *image = NULL;
    int rc;
    LG_TRY(find_clips(f, in, "latent_mean", "(N, C, h, w) or (N, C, f, h, w)", &e, &latents));
    LG_TRY(lg_autoencoder_config_load(o->model, &c));
    if (latents.channels != c.latent_channels)
        return LG_FAIL(LG_ERR_MISMATCH, "%s: \"latent_mean\" has %lld channels, the model in %s %d",
                       in, (long long)latents.channels, o->model, c.latent_channels);
    struct clips made = latents;
    made.channels = 3;
    made.frames = (latents.frames - 1) * c.factor_time + 1;
    made.height *= c.factor;
    made.width *= c.factor;
    LG_TRY_GOTO(rc, open_vae(o, LG_AEKL_DECODER, &c, &made, &vae), out);
    LG_TRY_GOTO(rc, allocate(&latents, &latent), out);
    LG_TRY_GOTO(rc, allocate(&made, &image), out);
    LG_TRY_GOTO(rc, lg_st_read_f32(e, latent, 0, e->bytes / lg_dtype_bytes(e->dtype)), out);
    lg_vae_batches_decode(vae, latent, made.n, image, NULL);
    rc = write_clips(w, &made, 1, (const char *const[]){"decoded"}, &image);
out:
    lg_vae_batches_close(&vae);
    free(latent);
    free(image);
    return rc;
}

/* ---- captions ---- */

struct ids {
    int32_t *v; // (n, length)
    int64_t n, length;
};

/* Of a T5 a row is ids, then zeros, which its attention leaves out; to a CLIP padding is ids like others. */
static int check_ids(const struct ids *ids, const char *in, const struct lg_text_encoder_config *c)
{
    const int vocab = lg_text_encoder_sizes(c).vocab;
    const bool zeros_end = c->kind == LG_TEXT_T5;
    for (int64_t i = 0; i < ids->n; i++) {
        const int32_t *row = ids->v + i * ids->length;
        int64_t n = 0;
        while (n < ids->length && row[n]) n++;
        if (zeros_end && !n)
            return LG_FAIL(
                LG_ERR_MISMATCH,
                "%s: row %lld of \"token_ids\" is padding alone; an empty caption is the "
                "end token (1)",
                in, (long long)i);
        for (int64_t k = 0; k < ids->length; k++) {
            if (row[k] < 0 || row[k] >= vocab)
                return LG_FAIL(LG_ERR_MISMATCH,
                               "%s: row %lld of \"token_ids\" holds id %d; the model has 0 to %d",
                               in, (long long)i, row[k], vocab - 1);
            if (zeros_end && k > n && row[k])
                return LG_FAIL(LG_ERR_MISMATCH,
                               "%s: row %lld of \"token_ids\" has padding (0) before other ids", in,
                               (long long)i);
        }
    }
    return 0;
}

static int allocate_ids(struct ids *ids, int64_t n, int64_t length)
{
    ids->n = n;
    ids->length = length;
    ids->v = calloc((size_t)n, (size_t)length * sizeof *ids->v);
    if (!ids->v)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for the ids of %lld captions", (long long)n);
    return 0;
}

static int read_ids(const char *in, struct ids *ids)
{
    lg_st_file *f = NULL;
    const struct lg_st_entry *e;
    int rc;
    LG_TRY(lg_st_open(in, &f));
    LG_TRY_GOTO(rc, find(f, in, "token_ids", 2, "(N, L) i32", &e), out);
    LG_TRY_GOTO(rc, check_type(e, in, LG_I32), out);
    LG_TRY_GOTO(rc, allocate_ids(ids, e->dim[0], e->dim[1]), out);
    memcpy(ids->v, e->data, e->bytes);
out:
    lg_st_close(&f);
    return rc;
}

/* The line at *at, ended in place, or NULL after the last one. The text has room for a zero at end. */
static char *next_line(char **at, char *end)
{
    char *line = *at;
    if (line >= end) return NULL;
    char *stop = memchr(line, '\n', (size_t)(end - line));
    if (!stop) stop = end;
    *at = stop + 1;
    *stop = 0;
    if (stop > line && stop[-1] == '\r') stop[-1] = 0;
    return line;
}

static int64_t count_lines(const char *text, size_t bytes)
{
    int64_t n = bytes > 0 && text[bytes - 1] != '\n';
    for (size_t i = 0; i < bytes; i++) n += text[i] == '\n';
    return n;
}

static int tokenize(const struct lg_encode_options *o, const char *in, char *text, size_t bytes,
                    struct ids *ids)
{
    lg_tokenizer *t = NULL;
    int rc;
    if (!bytes)
        return LG_FAIL(LG_ERR_MISMATCH, "%s is empty: it should hold a caption per line", in);
    if (memchr(text, 0, bytes))
        return LG_FAIL(LG_ERR_CORRUPT, "%s holds a zero byte: it is no text file", in);
    LG_TRY(lg_tokenizer_open(o->spiece ? o->spiece : o->model, &t));
    LG_TRY_GOTO(rc, allocate_ids(ids, count_lines(text, bytes), o->length), out);
    char *at = text, *line;
    for (int64_t i = 0; (line = next_line(&at, text + bytes)); i++)
        LG_TRY_GOTO(rc, lg_tokenizer_encode(t, line, o->length, ids->v + i * ids->length, NULL),
                    out);
out:
    lg_tokenizer_close(&t);
    return rc;
}

static int read_captions(const struct lg_encode_options *o, const char *in, struct ids *ids)
{
    char *text = NULL;
    size_t bytes;
    LG_TRY(lg_read_file(in, TEXT_BYTES_MAX, &text, &bytes));
    int rc = tokenize(o, in, text, bytes, ids);
    free(text);
    return rc;
}

static bool is_text_file(const char *path)
{
    size_t n = strlen(path);
    return n > 4 && !strcmp(path + n - 4, ".txt");
}

static int encode_ids(const struct lg_encode_options *o, const struct ids *ids,
                      const struct lg_text_encoder_config *c, lg_st_writer *w)
{
    lg_text_batches *text = NULL;
    float *states = NULL;
    int64_t dim[3] = {ids->n, ids->length, lg_text_encoder_sizes(c).width};
    size_t bytes = (size_t)(ids->n * ids->length) * sizeof *ids->v;
    int rc;
    struct lg_text_batches_spec spec = {.device = o->device,
                                        .dir = o->model,
                                        .config = *c,
                                        .batch = o->batch,
                                        .length = (int)ids->length};
    LG_TRY_GOTO(rc, lg_text_batches_open(&spec, &text), out);
    LG_TRY_GOTO(rc, room((size_t)ids->n, (size_t)(dim[1] * dim[2]), &states), out);
    lg_text_batches_encode(text, ids->v, ids->n, states);
    LG_TRY_GOTO(rc, lg_st_writer_declare(w, "token_ids", LG_I32, 2, dim), out);
    LG_TRY_GOTO(rc, lg_st_writer_declare(w, "text_hidden", LG_F32, 3, dim), out);
    LG_TRY_GOTO(rc, lg_st_writer_data(w, ids->v, bytes), out);
    rc = lg_st_writer_data(w, states, bytes * (size_t)dim[2]);
out:
    lg_text_batches_close(&text);
    free(states);
    return rc;
}

/* ---- files ---- */

typedef int file_fn(const struct lg_encode_options *o, const lg_st_file *f, const char *in,
                    lg_st_writer *w);

static int with_files(const struct lg_encode_options *o, const char *in, const char *out,
                      file_fn *work)
{
    lg_st_file *f = NULL;
    lg_st_writer *w = NULL;
    int rc;
    LG_TRY_GOTO(rc, lg_st_open(in, &f), out);
    LG_TRY_GOTO(rc, lg_st_writer_open(out, &w), out);
    LG_TRY_GOTO(rc, work(o, f, in, w), out);
    LG_TRY_GOTO(rc, lg_st_writer_finish(&w, NULL), out);
out:
    lg_st_writer_abort(&w);
    lg_st_close(&f);
    return rc;
}

int lg_encode_pictures(const struct lg_encode_options *o, const char *in, const char *out)
{
    return with_files(o, in, out, encode_pixels);
}

int lg_decode_pictures(const struct lg_encode_options *o, const char *in, const char *out)
{
    return with_files(o, in, out, decode_latents);
}

int lg_encode_captions(const struct lg_encode_options *given, const char *in, const char *out)
{
    struct lg_encode_options options = *given, *o = &options;
    struct lg_text_encoder_config c;
    struct ids ids = {0};
    lg_st_writer *w = NULL;
    int rc;
    LG_TRY_GOTO(rc, lg_text_encoder_config_load(o->model, &c), out);
    if (!o->length) o->length = lg_text_encoder_sizes(&c).length_max;
    if (!o->length) o->length = LENGTH_DEFAULT;
    LG_TRY_GOTO(rc, is_text_file(in) ? read_captions(o, in, &ids) : read_ids(in, &ids), out);
    LG_TRY_GOTO(rc, check_ids(&ids, in, &c), out);
    LG_TRY_GOTO(rc, lg_st_writer_open(out, &w), out);
    LG_TRY_GOTO(rc, encode_ids(o, &ids, &c, w), out);
    LG_TRY_GOTO(rc, lg_st_writer_finish(&w, NULL), out);
out:
    lg_st_writer_abort(&w);
    free(ids.v);
    return rc;
}
