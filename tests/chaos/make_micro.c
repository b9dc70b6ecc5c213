/* make_micro: the encoders and pictures of examples/micro, made from nothing but numbers.
 *
 * usage: make_micro SPIECE_MODEL DIR
 *
 * Writes DIR/vae (diffusers layout), DIR/text_encoder (Hugging Face layout; the tokenizer is a copy
 * of SPIECE_MODEL) and DIR/data/micro-00000.tar: small shapes in colours, with captions; in
 * DIR/sizes/sizes-00000.tar they lie on pictures of 40 sizes (for data.buckets). The
 * encoders' weights are random, of a scale that keeps activations near 1: they encode nothing
 * sensible, but every picture and caption its own way, which is all that a crash campaign needs.
 * The same program gives the same bytes. */
#include "base/fs.h"
#include "base/philox.h"
#include "stages/io/picture.h"
#include "stages/io/safetensors.h"
#include "stages/io/tar.h"
#include "stages/nets/autoencoder_kl.h"
#include "stages/nets/text_encoder.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE = 16, SIDE_MAX = 48, SPIECE_BYTES_MAX = 16 << 20 };

static const char vae_config[] =
    "{\"_class_name\": \"AutoencoderKL\", \"act_fn\": \"silu\", \"in_channels\": 3,\n"
    " \"out_channels\": 3, \"latent_channels\": 4, \"block_out_channels\": [8, 16, 16],\n"
    " \"down_block_types\": [\"DownEncoderBlock2D\", \"DownEncoderBlock2D\", "
    "\"DownEncoderBlock2D\"],\n"
    " \"up_block_types\": [\"UpDecoderBlock2D\", \"UpDecoderBlock2D\", \"UpDecoderBlock2D\"],\n"
    " \"layers_per_block\": 1, \"norm_num_groups\": 8, \"scaling_factor\": 1.0,\n"
    " \"mid_block_add_attention\": true, \"use_quant_conv\": true,\n"
    " \"use_post_quant_conv\": true, \"sample_size\": 16}\n";
static const char t5_config[] =
    "{\"model_type\": \"t5\", \"vocab_size\": 2048, \"d_model\": 32, \"d_kv\": 16, \"d_ff\": 64,\n"
    " \"num_heads\": 2, \"num_layers\": 2, \"relative_attention_num_buckets\": 32,\n"
    " \"relative_attention_max_distance\": 128, \"layer_norm_epsilon\": 1e-06,\n"
    " \"feed_forward_proj\": \"gated-gelu\", \"dense_act_fn\": \"gelu_new\"}\n";

static int write_text(const char *dir, const char *name, const char *text)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/%s", dir, name));
    LG_TRY(lg_publish_file(path, text, strlen(text)));
    return 0;
}

/* Norm weights 1, biases 0, the rest normal with variance 1 / fan-in. */
static int stream_param(lg_st_writer *w, const struct lg_param *p, uint64_t seed, uint64_t index)
{
    float *v = calloc(p->count, sizeof *v);
    LG_ASSERT(v);
    bool is_bias = strstr(p->name, ".bias") != NULL;
    double scale = p->rank < 2 ? 0 : 1 / sqrt((double)(p->count / (size_t)p->dim[0]));
    for (size_t i = 0; i < p->count; i++) {
        double pair[2];
        lg_philox_out out = lg_philox(seed, LG_PURPOSE_INIT, index, i);
        lg_normal_pair(out.v[0], out.v[1], pair);
        v[i] = p->rank < 2 ? !is_bias : (float)(scale * pair[0]);
    }
    int rc = lg_st_writer_data(w, v, p->count * sizeof *v);
    free(v);
    return rc;
}

static int write_weights(const char *dir, const char *name, const lg_params *t, uint64_t seed)
{
    char path[LG_PATH_BYTES];
    lg_st_writer *w = NULL;
    int rc;
    LG_TRY(lg_path(path, "%s/%s", dir, name));
    LG_TRY_GOTO(rc, lg_st_writer_open(path, &w), fail);
    LG_TRY_GOTO(rc, lg_st_writer_metadata(w, "format", "pt"), fail);
    for (int i = 0; i < t->n; i++)
        LG_TRY_GOTO(rc, lg_st_writer_declare(w, t->p[i].name, LG_F32, t->p[i].rank, t->p[i].dim),
                    fail);
    for (int i = 0; i < t->n; i++)
        LG_TRY_GOTO(rc, stream_param(w, &t->p[i], seed, (uint64_t)i), fail);
    LG_TRY(lg_st_writer_finish(&w, NULL));
    return 0;
fail:
    lg_st_writer_abort(&w);
    return rc;
}

static int make_vae(const char *root)
{
    char dir[LG_PATH_BYTES];
    struct lg_aekl_config c;
    lg_params t;
    LG_TRY(lg_path(dir, "%s/vae", root));
    LG_TRY(lg_mkdirs(dir));
    LG_TRY(write_text(dir, "config.json", vae_config));
    LG_TRY(lg_aekl_config_load(dir, &c));
    LG_TRY(lg_aekl_params(&c, LG_AEKL_BOTH, &t));
    int rc = write_weights(dir, "diffusion_pytorch_model.safetensors", &t, 1);
    lg_params_free(&t);
    return rc;
}

static int make_t5(const char *root, const char *spiece)
{
    char dir[LG_PATH_BYTES], path[LG_PATH_BYTES], *tokenizer;
    struct lg_text_encoder_config c;
    lg_params t;
    size_t bytes;
    LG_TRY(lg_path(dir, "%s/text_encoder", root));
    LG_TRY(lg_mkdirs(dir));
    LG_TRY(write_text(dir, "config.json", t5_config));
    LG_TRY(lg_text_encoder_config_load(dir, &c));
    LG_TRY(lg_text_encoder_params(&c, 0, 1, &t));
    int rc = write_weights(dir, "model.safetensors", &t, 2);
    lg_params_free(&t);
    LG_TRY(rc);
    LG_TRY(lg_read_file(spiece, SPIECE_BYTES_MAX, &tokenizer, &bytes));
    rc = lg_path(path, "%s/spiece.model", dir);
    if (rc == 0) rc = lg_publish_file(path, tokenizer, bytes);
    free(tokenizer);
    return rc;
}

static const struct {
    const char *name;
    uint8_t rgb[3];
} colours[] = {{"red", {220, 40, 40}},     {"green", {40, 170, 70}},   {"blue", {50, 90, 220}},
               {"orange", {240, 150, 30}}, {"purple", {130, 60, 170}}, {"black", {20, 20, 20}}};
static const char *const shapes[] = {"circle", "square", "bar", "ring"};
static const char *const places[] = {"left", "centre", "right"};

struct size {
    int width, height;
};
static const struct size square = {SIDE, SIDE};

static bool inside(int shape, int place, const struct size *s, int x, int y)
{
    int dx = x - (s->width / 4 + s->width / 4 * place), dy = y - s->height / 2;
    int r2 = dx * dx + dy * dy;
    switch (shape) {
    case 0:
        return r2 <= 16;
    case 1:
        return abs(dx) <= 3 && abs(dy) <= 3;
    case 2:
        return abs(dx) <= 1;
    default:
        return r2 <= 20 && r2 >= 9;
    }
}

static int add_picture(lg_tar_writer *w, int number, int colour, int shape, int place,
                       const struct size *size)
{
    uint8_t rgb[SIDE_MAX * SIDE_MAX * 3], *png;
    char name[32], caption[64];
    size_t bytes;
    memset(rgb, 255, sizeof rgb);
    for (int y = 0; y < size->height; y++)
        for (int x = 0; x < size->width; x++)
            if (inside(shape, place, size, x, y))
                memcpy(rgb + (y * size->width + x) * 3, colours[colour].rgb, 3);
    snprintf(name, sizeof name, "%05d.png", number);
    snprintf(caption, sizeof caption, "a %s %s, %s", colours[colour].name, shapes[shape],
             places[place]);
    LG_TRY(lg_picture_encode_png(rgb, size->width, size->height, &png, &bytes));
    int rc = lg_tar_writer_add(w, name, png, bytes);
    free(png);
    LG_TRY(rc);
    snprintf(name, sizeof name, "%05d.txt", number);
    LG_TRY(lg_tar_writer_add(w, name, caption, strlen(caption)));
    return 0;
}

/* The sizes of picture i: 40 of them, most about square, the farthest 1 to 4. */
static struct size size_of(int i)
{
    static const int width[] = {16, 18, 20, 22, 24, 26, 28, 32, 36, 48};
    const int k = i % 40, shorter = k % 2 ? 15 : 12, longer = width[k / 2 % 10];
    return k < 20 ? (struct size){longer, shorter} : (struct size){shorter, longer};
}

static int make_data(const char *root, const char *name, bool sizes)
{
    char dir[LG_PATH_BYTES], path[LG_PATH_BYTES];
    lg_tar_writer *w = NULL;
    int rc = 0, number = 0;
    LG_TRY(lg_path(dir, "%s/%s", root, sizes ? "sizes" : "data"));
    LG_TRY(lg_mkdirs(dir));
    LG_TRY(lg_path(path, "%s/%s-00000.tar", dir, name));
    LG_TRY(lg_tar_writer_open(path, &w));
    const int colour_count = (int)LG_ARRAY_LEN(colours);
    for (int c = 0; c < (sizes ? 2 : 1) * colour_count; c++)
        for (int s = 0; s < (int)LG_ARRAY_LEN(shapes); s++)
            for (int p = 0; p < (int)LG_ARRAY_LEN(places) && rc == 0; p++, number++) {
                const struct size size = sizes ? size_of(number) : square;
                rc = add_picture(w, number, c % colour_count, s, p, &size);
            }
    if (rc < 0) lg_tar_writer_abort(&w);
    LG_TRY(rc);
    LG_TRY(lg_tar_writer_finish(&w));
    return 0;
}

static int make_all(const char *spiece, const char *root)
{
    LG_TRY(lg_mkdirs(root));
    LG_TRY(make_vae(root));
    LG_TRY(make_t5(root, spiece));
    LG_TRY(make_data(root, "micro", false));
    LG_TRY(make_data(root, "sizes", true));
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: make_micro SPIECE_MODEL DIR\n");
        return -LG_ERR_USAGE;
    }
    int rc = make_all(argv[1], argv[2]);
    if (rc < 0) fprintf(stderr, "make_micro: %s\n", lg_err_text());
    return -rc;
}
