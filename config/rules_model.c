/* Rules of the model and of what it is conditioned on: text encoders, captions, labels. */
#include "config/models.h"
#include "config/pretrained.h"
#include "config/rules_private.h"
#include <stdlib.h>
#include <string.h>

static void check_model(struct lg_rules *r)
{
    const lg_config *c = r->c;
    struct lg_vae_info vae;
    if (c->model_from[0]) lg_pretrained_compare(c, &r->problems);
    if (c->model_fresh && !c->model_from[0])
        lg_broken(
            r, "model.fresh",
            "model.fresh is for the shape of model.from, which is empty: name a folder with a "
            "config.json, or remove it");
    if (!c->model_from[0] && (!strcmp(c->model_kind, "sd2") || !strcmp(c->model_kind, "sdxl")))
        lg_broken(r, "model.from",
                  "model.kind = \"%s\" takes its shape from model.from, which is empty: name a "
                  "published folder, or one that lg-random-model has made",
                  c->model_kind);
    if (c->model_hidden % c->model_heads != 0)
        lg_broken(r, "model.hidden",
                  "model.hidden = %lld does not divide by model.heads = %lld: change one of them",
                  (long long)c->model_hidden, (long long)c->model_heads);
    if (c->model_hidden % 4 != 0)
        lg_broken(
            r, "model.hidden",
            "model.hidden = %lld does not divide by 4, as the position embedding needs: set it to "
            "%lld",
            (long long)c->model_hidden, (long long)(c->model_hidden + 3) / 4 * 4);
    if (c->vae_model[0]) {
        if (lg_vae_info_load(c->vae_model, &vae) < 0) {
            lg_broken(r, "vae.model", "vae.model: %s", lg_err_message());
            lg_err_clear();
            return;
        }
        lg_rules_geometry(r, &vae);
        return;
    }
    lg_rules_latents(r);
}

/* What is done with captions, and whether there are any. */
static void check_captions(struct lg_rules *r)
{
    const lg_config *c = r->c;
    const struct {
        const char *key;
        bool is_set;
    } keys[] = {{"data.caption", strcmp(c->data_caption, "listed") != 0},
                {"data.shuffle_tags", c->data_shuffle_tags},
                {"data.keep_tags", c->data_keep_tags > 0}};
    for (size_t i = 0; i < LG_ARRAY_LEN(keys); i++)
        if (keys[i].is_set && !lg_rules_has_text(c))
            lg_broken(
                r, keys[i].key,
                "%s has no meaning with model.kind = \"%s\", which reads no captions: remove it",
                keys[i].key, c->model_kind);
    if (c->data_keep_tags && !c->data_shuffle_tags)
        lg_broken(r, "data.keep_tags",
                  "data.keep_tags = %lld, but all tags keep their places: set data.shuffle_tags = "
                  "true, or remove it",
                  (long long)c->data_keep_tags);
}

/* Is it an encoder of the kind that the denoiser was made for, with the outputs that it takes? */
static void check_encoder(struct lg_rules *r, const struct lg_text_config *t,
                          const struct lg_text_info *is)
{
    static const char *const name[LG_TEXT_KINDS] = {[LG_TEXT_T5] = "T5", [LG_TEXT_CLIP] = "CLIP"};
    const struct lg_denoiser_text_info *want = t->info;
    char key[48];
    lg_rules_key_of(t, "model", key);
    if (want->encoder != LG_TEXT_KINDS && want->encoder != is->kind)
        lg_broken(r, key, "%s: %s is a %s, but model.kind = \"%s\" has a %s there", key, t->model,
                  name[is->kind], r->c->model_kind, name[want->encoder]);
    else if ((want->states == LG_TEXT_EMBEDS || want->pooled == LG_TEXT_EMBEDS) && !is->projection)
        lg_broken(r, key,
                  "%s: %s has no projection (\"architectures\" of its config.json names no "
                  "CLIPTextModelWithProjection), which model.kind = \"%s\" takes",
                  key, t->model, r->c->model_kind);
}

static void check_text(struct lg_rules *r, const struct lg_text_config *t)
{
    struct lg_text_info is = {0};
    char key[48];
    lg_rules_key_of(t, "model", key);
    if (!t->model[0]) {
        lg_broken(r, "model.kind",
                  "model.kind = \"%s\" needs %s: name the text encoder's folder, or set "
                  "model.kind = \"dit\" for class labels",
                  r->c->model_kind, key);
        return;
    }
    if (lg_text_info_load(t->model, &is) < 0) {
        lg_broken(r, key, "%s: %s", key, lg_err_message());
        lg_err_clear();
        return;
    }
    check_encoder(r, t, &is);
    if (is.length_max && t->length > is.length_max) {
        char length[48];
        lg_rules_key_of(t, "length", length);
        lg_broken(r, length,
                  "%s = %lld: the text encoder in %s takes %d tokens at most "
                  "(max_position_embeddings of its config.json)",
                  length, (long long)t->length, key, is.length_max);
    }
}

static void check_conditioning(struct lg_rules *r)
{
    const lg_config *c = r->c;
    struct lg_text_config text[LG_TEXTS_MAX];
    const int texts = lg_config_texts(c, text);
    for (int k = 0; k < texts; k++) check_text(r, &text[k]);
    check_captions(r);
    if (texts) return;
    for (int i = 0; i < c->sample_captions.n; i++) {
        const char *label = c->sample_captions.v[i];
        char *end = NULL;
        errno = 0;
        long long n = strtoll(label, &end, 10);
        if (errno || end == label || *end || n < 0 || n >= c->model_num_classes)
            lg_broken(
                r, "sample.captions",
                "sample.captions[%d] = \"%.40s\": with model.kind = \"dit\" expected a label from "
                "0 to %lld (model.num_classes = %lld)",
                i, label, (long long)c->model_num_classes - 1, (long long)c->model_num_classes);
    }
}

void lg_rules_model(struct lg_rules *r)
{
    check_model(r);
    check_conditioning(r);
}
