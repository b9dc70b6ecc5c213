/* The text encoders of CLIP, with a small tokenizer. */
#include "base/check.h"
#include "stages/nets/text_encoder.h"
#include "stages/tools/random/text.h"
#include "stages/tools/random/weights.h"
#include <math.h>
#include <string.h>

static const struct preset {
    const char *name;
    int vocab, hidden, mlp, heads, layers;
    const char *act, *class;
} PRESET[] = {
    {"l", 49408, 768, 3072, 12, 12, "quick_gelu", "CLIPTextModel"},
    {"l-projected", 49408, 768, 3072, 12, 12, "quick_gelu", "CLIPTextModelWithProjection"},
    {"h", 49408, 1024, 4096, 16, 23, "gelu", "CLIPTextModel"},
    {"bigg", 49408, 1280, 5120, 20, 32, "gelu", "CLIPTextModelWithProjection"},
    {"tiny", 1920, 64, 128, 4, 3, "quick_gelu", "CLIPTextModelWithProjection"},
    {"tiny-g", 1920, 96, 192, 6, 2, "gelu", "CLIPTextModelWithProjection"}};

static const struct preset *find(const char *name)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(PRESET); i++)
        if (!strcmp(name, PRESET[i].name)) return &PRESET[i];
    return NULL;
}

int lg_random_clip_width(const char *preset)
{
    const struct preset *p = find(preset);
    return p ? p->hidden : 0;
}

/* ---- the tokenizer ---- */

enum { LETTERS = 26, BYTES = 256, PRINTING_MORE = 68 };

/* The 256 characters that stand for bytes, in the order of GPT-2. */
static int byte_chars(uint32_t ret[BYTES])
{
    int n = 0;
    for (uint32_t c = '!'; c < BYTES + PRINTING_MORE; c++)
        if (c <= '~' || (c >= 0xA1 && c != 0xAD)) ret[n++] = c;
    return n;
}

/* Bytes, bytes that end a word, pairs of letters in a word and at its end, begin and end of a caption, as the published
 * vocabularies have them; *ret_end: the last one's id. */
static int write_vocab(const char *dir, int *ret_end)
{
    struct lg_random_text t;
    uint32_t chars[BYTES];
    int id = 0;
    LG_ASSERT(byte_chars(chars) == BYTES);
    lg_random_text_begin(&t);
    for (int last = 0; last < 2; last++)
        for (int i = 0; i < BYTES; i++, id++)
            fprintf(t.file, "%s\"\\u%04x%s\": %d", id ? ", " : "{", chars[i], last ? "</w>" : "",
                    id);
    for (int last = 0; last < 2; last++)
        for (int i = 0; i < LETTERS * LETTERS; i++, id++)
            fprintf(t.file, ", \"%c%c%s\": %d", 'a' + i / LETTERS, 'a' + i % LETTERS,
                    last ? "</w>" : "", id);
    fprintf(t.file, ", \"<|startoftext|>\": %d, \"<|endoftext|>\": %d}\n", id, id + 1);
    *ret_end = id + 1;
    return lg_random_text_publish(&t, dir, "vocab.json");
}

static int write_merges(const char *dir)
{
    struct lg_random_text t;
    lg_random_text_begin(&t);
    fprintf(t.file, "#version: 0.2\n");
    for (int last = 0; last < 2; last++)
        for (int i = 0; i < LETTERS * LETTERS; i++)
            fprintf(t.file, "%c %c%s\n", 'a' + i / LETTERS, 'a' + i % LETTERS, last ? "</w>" : "");
    return lg_random_text_publish(&t, dir, "merges.txt");
}

/* ---- the encoder ---- */

static int write_config(const char *dir, const struct preset *p, int end)
{
    struct lg_random_text t;
    lg_random_text_begin(&t);
    fprintf(t.file,
            "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"clip_text_model\",\n"
            "  \"vocab_size\": %d,\n  \"hidden_size\": %d,\n  \"intermediate_size\": %d,\n"
            "  \"projection_dim\": %d,\n  \"num_attention_heads\": %d,\n"
            "  \"num_hidden_layers\": %d,\n  \"max_position_embeddings\": 77,\n"
            "  \"hidden_act\": \"%s\",\n  \"layer_norm_eps\": 1e-05,\n"
            "  \"bos_token_id\": %d,\n  \"eos_token_id\": %d\n}\n",
            p->class, p->vocab, p->hidden, p->mlp, p->hidden, p->heads, p->layers, p->act, end - 1,
            end);
    return lg_random_text_publish(&t, dir, "config.json");
}

/* The deviations of transformers' CLIP. */
static void set_deviations(const struct lg_clip_config *c, lg_params *t)
{
    const double depth = 1 / sqrt(2.0 * c->layers);
    for (int i = 0; i < t->n; i++) {
        struct lg_param *p = &t->p[i];
        if (p->rank == 1)
            p->init = lg_random_ends_with(p, "weight") ? LG_INIT_ONE : LG_INIT_ZERO;
        else if (lg_random_ends_with(p, "token_embedding.weight"))
            lg_random_set_deviation(p, 0.02);
        else if (lg_random_ends_with(p, "position_embedding.weight"))
            lg_random_set_deviation(p, 0.01);
        else if (lg_random_ends_with(p, "_proj.weight") &&
                 !lg_random_ends_with(p, "out_proj.weight"))
            lg_random_set_deviation(p, depth / sqrt(c->hidden));
        else if (lg_random_ends_with(p, "fc1.weight"))
            lg_random_set_deviation(p, 1 / sqrt(2.0 * c->hidden));
        else if (lg_random_ends_with(p, "fc2.weight"))
            lg_random_set_deviation(p, depth / sqrt(c->hidden));
        else
            lg_random_set_deviation(p, 1 / sqrt(c->hidden));
    }
}

int lg_random_clip_make(const struct lg_random_model *m)
{
    const struct preset *preset = find(m->preset);
    if (!preset)
        return LG_FAIL(LG_ERR_USAGE,
                       "no clip preset \"%s\": l, l-projected, h, bigg, tiny and tiny-g exist",
                       m->preset);
    struct lg_text_encoder_config c;
    lg_params t = {0};
    int end = 0;
    LG_TRY(write_vocab(m->dir, &end));
    LG_TRY(write_merges(m->dir));
    LG_TRY(write_config(m->dir, preset, end));
    LG_TRY(lg_text_encoder_config_load(m->dir, &c));
    LG_TRY(lg_text_encoder_params(&c, 0, 1, &t));
    set_deviations(&c.clip, &t);
    int rc = lg_random_weights_write(m, "model.safetensors", &t);
    lg_params_free(&t);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
