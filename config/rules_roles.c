/* Rules of the roles: their GPUs, restarts and memos, and the chunks that they take of the window. */
#include "base/bytes.h"
#include "config/plan.h"
#include "config/rules_private.h"
#include <string.h>

static void check_gpus(struct lg_rules *r, const char *key, const char *list)
{
    if (lg_gpus_at(list, 0) < 0)
        lg_broken(
            r, key,
            "%s = \"%.60s\": expected GPU numbers from 0 to %d with commas between them, at most "
            "%d, as \"0\" or \"0,1\"",
            key, list, LG_GPUS_MAX - 1, LG_GPUS_MAX);
    else if (strcmp(r->c->_device, "host") == 0 && strcmp(list, "0") != 0)
        lg_broken(
            r, key,
            "%s = \"%.60s\" has no meaning with device = \"host\": remove it, or set device = "
            "\"cuda\"",
            key, list);
}

static void check_device(struct lg_rules *r)
{
    const lg_config *c = r->c;
    if (strcmp(c->_device, "host") == 0 && strcmp(c->_precision, "fp32") != 0)
        lg_broken(
            r, "precision",
            "precision = \"%s\" needs device = \"cuda\": the host computes in fp32 alone; set "
            "precision = \"fp32\"",
            c->_precision);
    struct lg_text_config text[LG_TEXTS_MAX];
    const int n = lg_config_texts(c, text);
    char key[48];
    if (!n) check_gpus(r, "text.gpus", c->text_gpus);
    for (int k = 0; k < n; k++) check_gpus(r, lg_rules_key_of(&text[k], "gpus", key), text[k].gpus);
    check_gpus(r, "vae.gpus", c->vae_gpus);
    check_gpus(r, "trainer.gpus", c->trainer_gpus);
}

static void check_restarts(struct lg_rules *r)
{
    const lg_config *c = r->c;
    const struct {
        const char *key, *why;
        int64_t value;
        bool absent;
    } of[] = {
        {"text.restarts_max", "model.kind is \"dit\"", c->text_restarts_max, !lg_rules_has_text(c)},
        {"text.restart_window_s", "model.kind is \"dit\"", c->text_restart_window_s,
         !lg_rules_has_text(c)},
        {"vae.restarts_max", "vae.model is empty", c->vae_restarts_max, !c->vae_model[0]},
        {"vae.restart_window_s", "vae.model is empty", c->vae_restart_window_s, !c->vae_model[0]},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(of); i++)
        if (of[i].absent && of[i].value)
            lg_broken(r, of[i].key,
                      "%s = %lld has no meaning: %s, so this run has no such role; remove it",
                      of[i].key, (long long)of[i].value, of[i].why);
}

static void check_memo(struct lg_rules *r, const char *key, const char *text)
{
    size_t bytes;
    if (strcmp(text, "auto") && strcmp(text, "0") && !lg_bytes_parse(text, &bytes))
        lg_broken(r, key, "%s = \"%.60s\": expected \"auto\", \"0\" or a size, as \"512MiB\"", key,
                  text);
}

static void check_text_memos(struct lg_rules *r)
{
    struct lg_text_config text[LG_TEXTS_MAX];
    const int n = lg_config_texts(r->c, text);
    char key[48];
    if (!n) check_memo(r, "text.memo", r->c->text_memo);
    for (int k = 0; k < n; k++) check_memo(r, lg_rules_key_of(&text[k], "memo", key), text[k].memo);
}

void lg_rules_roles(struct lg_rules *r)
{
    check_device(r);
    check_restarts(r);
    check_text_memos(r);
    check_memo(r, "vae.memo", r->c->vae_memo);
}

static void check_window_role(struct lg_rules *r, const char *role, int64_t instances,
                              int64_t chunk)
{
    char key[48];
    snprintf(key, sizeof key, "%s.chunk", role);
    int64_t batch = r->c->trainer_global_batch_size / r->c->hosts_count;
    if (batch < 1) return; /* said already: there is none for each host */
    int64_t batches = r->c->window_batches;
    int64_t window = batches * batch, need = 2 * batch + instances * chunk;
    if (window % chunk != 0)
        lg_broken(r, key,
                  "the window of %lld samples (window.batches = %lld x trainer.global_batch_size = "
                  "%lld) is not a multiple of %s = %lld: choose a chunk that divides %lld",
                  (long long)window, (long long)batches, (long long)batch, key, (long long)chunk,
                  (long long)window);
    if (window < need)
        lg_broken(
            r, "window.batches",
            "the window of %lld samples is too small: two batches of %lld and a chunk for every "
            "%s instance (%s.instances = %lld x %s = %lld) need %lld: set window.batches to at "
            "least %lld",
            (long long)window, (long long)batch, role, role, (long long)instances, key,
            (long long)chunk, (long long)need, (long long)((need + batch - 1) / batch));
}

void lg_rules_window(struct lg_rules *r)
{
    const lg_config *c = r->c;
    check_window_role(r, "loader", c->loader_instances, c->loader_chunk);
    struct lg_text_config text[LG_TEXTS_MAX];
    const int n = lg_config_texts(c, text);
    for (int k = 0; k < n; k++)
        check_window_role(r, text[k].section, text[k].instances, text[k].chunk);
    if (c->vae_model[0]) check_window_role(r, "vae", c->vae_instances, c->vae_chunk);
    const bool clips = c->data_frames > 1; /* of which slices are frames */
    const long long most = clips ? c->data_frames : c->vae_chunk;
    if (c->vae_slice > most)
        lg_broken(r, "vae.slice",
                  "vae.slice = %lld is larger than %s = %lld: set it to at most %lld",
                  (long long)c->vae_slice, clips ? "data.frames" : "vae.chunk", most, most);
}
