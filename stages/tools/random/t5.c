/* The encoders of T5, with their sentencepiece model. */
#include "base/check.h"
#include "base/fs.h"
#include "stages/io/tokenizer.h"
#include "stages/nets/text_encoder.h"
#include "stages/tools/random/text.h"
#include "stages/tools/random/weights.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    VOCAB_STEP = 128, /* vocab_size is rounded up to this */
    SPIECE_BYTES_MAX = 64 << 20,
};

static const struct preset {
    const char *name;
    int d_model, d_kv, d_ff, heads, layers;
} PRESET[] = {{"base", 768, 64, 2048, 12, 12},
              {"xl", 2048, 64, 5120, 32, 24},
              {"xxl", 4096, 64, 10240, 64, 24},
              {"tiny", 64, 16, 128, 4, 2},
              {"tiny-wide", 192, 16, 128, 4, 2}};

static const struct preset *find(const char *name)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(PRESET); i++)
        if (!strcmp(name, PRESET[i].name)) return &PRESET[i];
    return NULL;
}

int lg_random_t5_width(const char *preset)
{
    const struct preset *p = find(preset);
    return p ? p->d_model : 0;
}

static int write_config(const struct lg_random_model *m, const struct preset *p, int vocab)
{
    struct lg_random_text t;
    lg_random_text_begin(&t);
    fprintf(t.file,
            "{\n  \"architectures\": [\"T5EncoderModel\"],\n  \"model_type\": \"t5\",\n"
            "  \"d_model\": %d,\n  \"d_kv\": %d,\n  \"d_ff\": %d,\n  \"num_heads\": %d,\n"
            "  \"num_layers\": %d,\n  \"vocab_size\": %d,\n"
            "  \"feed_forward_proj\": \"gated-gelu\",\n  \"dense_act_fn\": \"gelu_new\",\n"
            "  \"is_gated_act\": true,\n  \"layer_norm_epsilon\": 1e-06,\n"
            "  \"relative_attention_num_buckets\": 32,\n"
            "  \"relative_attention_max_distance\": 128,\n"
            "  \"eos_token_id\": 1,\n  \"pad_token_id\": 0\n}\n",
            p->d_model, p->d_kv, p->d_ff, p->heads, p->layers, vocab);
    return lg_random_text_publish(&t, m->dir, "config.json");
}

/* Copies the tokenizer; *ret_vocab: its pieces, rounded up. */
static int copy_spiece(const struct lg_random_model *m, int *ret_vocab)
{
    char path[LG_PATH_BYTES], *data;
    size_t bytes;
    lg_tokenizer *t = NULL;
    if (!m->spiece)
        return LG_FAIL(LG_ERR_USAGE,
                       "t5 needs --spiece FILE, a T5 sentencepiece model, for example "
                       "examples/emoji/text_encoder/spiece.model");
    LG_TRY(lg_tokenizer_open(m->spiece, &t));
    *ret_vocab = (lg_tokenizer_pieces(t) + VOCAB_STEP - 1) / VOCAB_STEP * VOCAB_STEP;
    lg_tokenizer_close(&t);
    LG_TRY(lg_path(path, "%s/spiece.model", m->dir));
    LG_TRY(lg_read_file(m->spiece, SPIECE_BYTES_MAX, &data, &bytes));
    int rc = lg_publish_file(path, data, bytes);
    free(data);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* The deviations of transformers' T5: the scores are not divided by sqrt(d_kv), so q is smaller. */
static void set_deviations(const struct lg_t5_config *c, lg_params *t)
{
    for (int i = 0; i < t->n; i++) {
        struct lg_param *p = &t->p[i];
        if (p->rank == 1)
            p->init = LG_INIT_ONE;
        else if (!strcmp(p->name, "shared.weight"))
            lg_random_set_deviation(p, 1);
        else if (lg_random_ends_with(p, "relative_attention_bias.weight"))
            lg_random_set_deviation(p, 1 / sqrt(c->d_model));
        else if (lg_random_ends_with(p, "SelfAttention.q.weight"))
            lg_random_set_deviation(p, 1 / sqrt((double)c->d_model * c->d_kv));
        else
            lg_random_set_deviation(p, 1 / sqrt(lg_random_fan_in(p)));
    }
}

int lg_random_t5_make(const struct lg_random_model *m)
{
    const struct preset *preset = find(m->preset);
    if (!preset)
        return LG_FAIL(LG_ERR_USAGE, "no t5 preset \"%s\": base, xl, xxl, tiny and tiny-wide exist",
                       m->preset);
    struct lg_text_encoder_config c;
    lg_params t = {0};
    int vocab = 0;
    LG_TRY(copy_spiece(m, &vocab));
    LG_TRY(write_config(m, preset, vocab));
    LG_TRY(lg_text_encoder_config_load(m->dir, &c));
    LG_TRY(lg_text_encoder_params(&c, 0, 1, &t));
    set_deviations(&c.t5, &t);
    int rc = lg_random_weights_write(m, "model.safetensors", &t);
    lg_params_free(&t);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
