/* See texts.h. */
#include "config/texts.h"
#include "config/schema.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct lg_text_config lg_text_keys(const lg_config *c, lg_role of)
{
#define KEYS(is_of, part)                                                                          \
    if (of == (is_of))                                                                             \
        return (struct lg_text_config){.role = of,                                                 \
                                       .section = lg_role_name(of),                                \
                                       .model = c->part##_model,                                   \
                                       .memo = c->part##_memo,                                     \
                                       .storage = c->part##_storage,                               \
                                       .gpus = c->part##_gpus,                                     \
                                       .instances = c->part##_instances,                           \
                                       .shards = c->part##_shards,                                 \
                                       .length = c->part##_length,                                 \
                                       .chunk = c->part##_chunk,                                   \
                                       .threads = c->part##_threads,                               \
                                       .restarts_max = c->part##_restarts_max,                     \
                                       .restart_window_s = c->part##_restart_window_s,             \
                                       .dropout = c->part##_dropout};
#define LG_ENCODER(name) KEYS(LG_ROLE_text_##name, text.name)
    KEYS(LG_ROLE_text, text)
#include "config/encoders.def"
#undef LG_ENCODER
#undef KEYS
    LG_ASSERT(!"a role of a text encoder");
    return (struct lg_text_config){0};
}

static int texts_of(const lg_config *c, const struct lg_denoiser_text_info **ret)
{
    return lg_denoiser_texts(lg_denoiser_kind_of(c->model_kind), ret);
}

static lg_role role_of(const struct lg_denoiser_text_info *text)
{
    char name[32];
    snprintf(name, sizeof name, "text.%s", text->name);
    const int role = lg_role_find(name);
    LG_ASSERT(role >= 0);
    return (lg_role)role;
}

int lg_config_texts(const lg_config *c, struct lg_text_config ret[LG_TEXTS_MAX])
{
    const struct lg_denoiser_text_info *has;
    const int n = texts_of(c, &has);
    for (int k = 0; k < n; k++) {
        ret[k] = lg_text_keys(c, n == 1 ? LG_ROLE_text : role_of(&has[k]));
        ret[k].info = &has[k];
    }
    return n && has[n - 1].is_optional && !*ret[n - 1].model ? n - 1 : n;
}

void lg_texts_names(const lg_config *c, char *ret, size_t bytes)
{
    const struct lg_denoiser_text_info *has;
    const int n = texts_of(c, &has);
    size_t at = (size_t)snprintf(ret, bytes, "%s", n ? "" : "none");
    for (int k = 0; k < n && at < bytes; k++)
        at += (size_t)snprintf(ret + at, bytes - at, "%s%s", k ? ", " : "", has[k].name);
}

/* ---- settling ---- */

/* The key of [text] that key i of [text.NAME] stands for. */
static int common_key(int i)
{
    char name[64];
    snprintf(name, sizeof name, "text.%s", lg_key_at(i)->key);
    const int common = lg_key_find(name);
    LG_ASSERT(common >= 0);
    return common;
}

static bool is_written(const lg_config *c, int i)
{
    return c->lines[i] || c->chosen[i];
}

/* With where it comes from, so that a message finds the line. */
static void copy_key(lg_config *c, int to, int from)
{
    const lg_key *k = lg_key_at(from);
    void *a = lg_key_field(c, lg_key_at(to));
    const void *b = lg_key_field(c, k);
    switch (k->type) {
    case LG_KEY_INT:
        *(int64_t *)a = *(const int64_t *)b;
        break;
    case LG_KEY_NUM:
        *(double *)a = *(const double *)b;
        break;
    default:
        LG_ASSERT(k->type == LG_KEY_STR || k->type == LG_KEY_PATH || k->type == LG_KEY_ENUM);
        free(*(char **)a);
        *(char **)a = strdup(*(char *const *)b);
        LG_ASSERT(*(char **)a);
    }
    c->lines[to] = c->lines[from];
    free(c->chosen[to]);
    c->chosen[to] = c->chosen[from] ? strdup(c->chosen[from]) : NULL;
    LG_ASSERT(!c->chosen[from] == !c->chosen[to]);
}

static void refuse(const lg_config *c, int i, struct lg_problems *p)
{
    const lg_key *k = lg_key_at(i);
    char where[LG_PROBLEM_BYTES / 2], names[64];
    lg_key_where(c, k->name, where, sizeof where);
    lg_texts_names(c, names, sizeof names);
    lg_problem(p, "%s%s: model.kind = \"%s\" has no such text encoder: its text encoders are: %s",
               where, k->name, c->model_kind, names);
}

/* Is it a text that may go without an encoder, and that none is named for? */
static bool is_zeros(const lg_config *c, const struct lg_denoiser_text_info *text)
{
    char name[32];
    if (!text->is_optional) return false;
    snprintf(name, sizeof name, "text.%s.model", text->name);
    return !**(char *const *)lg_key_field((lg_config *)c, lg_key_at(lg_key_find(name)));
}

/* What counts of such a one. */
static bool is_of_zeros(const lg_key *k)
{
    return !strcmp(k->key, "model") || !strcmp(k->key, "length");
}

/* A key of its section says how it is encoded. */
static bool lacks_model(const lg_config *c, int i, const struct lg_denoiser_text_info *text)
{
    return is_written(c, i) && !is_of_zeros(lg_key_at(i)) && !c->text_model[0] && is_zeros(c, text);
}

static void refuse_model(const lg_config *c, int i, struct lg_problems *p)
{
    const lg_key *k = lg_key_at(i);
    char where[LG_PROBLEM_BYTES / 2];
    lg_key_where(c, k->name, where, sizeof where);
    lg_problem(p,
               "%s%s without %s.model: name the encoder's folder, or remove the section, and zeros "
               "take this text's place",
               where, k->name, k->section);
}

static void settle_key(lg_config *c, int i, const struct lg_denoiser_text_info *text, bool is_only)
{
    const int common = common_key(i);
    if (is_only) {
        if (is_written(c, i)) copy_key(c, common, i);
        return;
    }
    if (is_written(c, i)) return;
    copy_key(c, i, common);
    if (!strcmp(lg_key_at(i)->key, "length") && !is_written(c, common))
        *(int64_t *)lg_key_field(c, lg_key_at(i)) = text->length;
}

void lg_texts_settle(lg_config *c, struct lg_problems *p)
{
    const struct lg_denoiser_text_info *has;
    const int n = texts_of(c, &has);
    for (int i = 0; i < lg_key_count(); i++) {
        const char *name = lg_key_encoder(lg_key_at(i));
        int text = 0;
        if (!name) continue;
        while (text < n && strcmp(has[text].name, name)) text++;
        if (text < n && lacks_model(c, i, &has[text])) refuse_model(c, i, p);
        if (text < n)
            settle_key(c, i, &has[text], n == 1);
        else if (is_written(c, i))
            refuse(c, i, p);
    }
}

bool lg_key_applies(const lg_config *c, const lg_key *k)
{
    if (!strcmp(k->name, "model.guidance")) return !strcmp(c->model_kind, "flux");
    if (!strcmp(k->name, "trainer.flow_shift_by"))
        return strcmp(c->trainer_flow_shift_by, "constant");
    if (!strcmp(k->name, "sample.flow_end")) return c->sample_flow_end > 0;
    const struct lg_denoiser_text_info *has;
    const int n = texts_of(c, &has);
    const char *name = lg_key_encoder(k);
    for (int i = 0; name && i < n; i++)
        if (!strcmp(has[i].name, name)) return n > 1 && (is_of_zeros(k) || !is_zeros(c, &has[i]));
    if (name) return false;
    if (strcmp(k->section, "text")) return true;
    return n < 2 && (strcmp(k->key, "dropout") || c->text_dropout > 0);
}
