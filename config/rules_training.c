/* Rules of training: schedules and the optimizer, adapters and frozen weights, the objective and its
 * noise, memory, and the previews that checkpoints give. */
#include "config/param_groups.h"
#include "config/recompute.h"
#include "config/rules_private.h"
#include <string.h>

static void check_training(struct lg_rules *r)
{
    const lg_config *c = r->c;
    int64_t steps = c->trainer_lr_steps ? c->trainer_lr_steps : c->trainer_max_steps;
    if (c->trainer_min_snr_gamma > 0 && strcmp(c->trainer_objective, "flow") == 0)
        lg_broken(
            r, "trainer.min_snr_gamma",
            "trainer.min_snr_gamma = %g has no meaning with trainer.objective = \"flow\": set it "
            "to 0, or the objective to \"eps\" or \"v\"",
            c->trainer_min_snr_gamma);
    for (int i = 0; i < c->trainer_groups.n; i++) {
        struct lg_param_group g;
        if (lg_param_group_parse(c->trainer_groups.v[i], &g) < 0)
            lg_broken(r, "trainer.groups", "%s", lg_err_message());
    }
    if (c->trainer_loss_scale & (c->trainer_loss_scale - 1))
        lg_broken(r, "trainer.loss_scale",
                  "trainer.loss_scale = %lld: expected a power of two, as 65536; another factor "
                  "would round every gradient",
                  (long long)c->trainer_loss_scale);
    if (c->trainer_beta1 >= 1)
        lg_broken(r, "trainer.beta1", "trainer.beta1 = %g: expected less than 1, usually 0.9",
                  c->trainer_beta1);
    if (c->trainer_beta2 >= 1)
        lg_broken(r, "trainer.beta2", "trainer.beta2 = %g: expected less than 1, usually 0.999",
                  c->trainer_beta2);
    if (strcmp(c->trainer_lr_schedule, "constant") != 0 && c->trainer_warmup_steps >= steps)
        lg_broken(r, "trainer.warmup_steps",
                  "trainer.warmup_steps = %lld leaves nothing of the %lld steps (%s) to "
                  "trainer.lr_schedule = \"%s\": make the warm-up shorter",
                  (long long)c->trainer_warmup_steps, (long long)steps,
                  c->trainer_lr_steps ? "trainer.lr_steps" : "trainer.max_steps",
                  c->trainer_lr_schedule);
}

static void check_adapter(struct lg_rules *r)
{
    const lg_config *c = r->c;
    if (c->adapter_from[0] &&
        (lg_rules_is_dir(c->adapter_from) || !lg_path_exists(c->adapter_from)))
        lg_broken(r, "adapter.from",
                  "adapter.from: %s %s: expected the file of an adapter's weights, .safetensors",
                  c->adapter_from,
                  lg_rules_is_dir(c->adapter_from) ? "is a directory" : "does not exist");
    if (strcmp(c->adapter_kind, "none")) {
        if (!lg_config_begins_with(c)[0])
            lg_broken(
                r, "adapter.kind",
                "adapter.kind = \"%s\" adapts a model that is there: name its folder as model.from "
                "or pipeline, or a checkpoint as trainer.init_from",
                c->adapter_kind);
        return;
    }
    const struct {
        const char *key;
        bool is_set;
    } keys[] = {{"adapter.targets", c->adapter_targets.n > 0},
                {"adapter.from", c->adapter_from[0] != 0}};
    for (size_t i = 0; i < LG_ARRAY_LEN(keys); i++)
        if (keys[i].is_set)
            lg_broken(
                r, keys[i].key,
                "%s has no meaning without an adapter: set adapter.kind = \"lora\", or remove it",
                keys[i].key);
}

static void check_frozen(struct lg_rules *r)
{
    const lg_config *c = r->c;
    const bool adapts = strcmp(c->adapter_kind, "none") != 0;
    bool freezes = adapts;
    for (int i = 0; i < c->trainer_groups.n; i++) {
        struct lg_param_group g;
        if (lg_param_group_parse(c->trainer_groups.v[i], &g) < 0) continue;
        freezes = freezes || g.is_frozen;
        if (g.has_storage && !g.is_frozen && !adapts)
            lg_broken(
                r, "trainer.groups",
                "trainer.groups: \"%s\" has a storage, which is for weights that are not trained: "
                "freeze them, or remove it",
                c->trainer_groups.v[i]);
    }
    lg_err_clear();
    if (!strcmp(c->model_frozen, "auto") || freezes) return;
    lg_broken(r, "model.frozen",
              "model.frozen = \"%s\" is for weights that are not trained, but all are: set "
              "adapter.kind = \"lora\", freeze some with trainer.groups, or remove it",
              c->model_frozen);
}

static bool is_objective(const lg_config *c, const char *name)
{
    return strcmp(c->trainer_objective, name) == 0;
}

/* What belongs to some objectives alone. */
static void check_noise(struct lg_rules *r)
{
    const lg_config *c = r->c;
    const bool flow = is_objective(c, "flow"), linear = !strcmp(c->trainer_beta_schedule, "linear");
    const struct {
        const char *key, *of;
        bool is_set, fits;
    } keys[] = {
        {"trainer.flow_shift", "flow", c->trainer_flow_shift != 1, flow},
        {"trainer.flow_shift_by", "flow", strcmp(c->trainer_flow_shift_by, "constant") != 0, flow},
        {"sample.flow_end", "flow", c->sample_flow_end > 0, flow},
        {"trainer.loss_weighting", "flow", strcmp(c->trainer_loss_weighting, "none") != 0, flow},
        {"trainer.clean_first_frame", "flow", c->trainer_clean_first_frame > 0, flow},
        {"trainer.beta_schedule", "eps or v", !linear, !flow},
        {"trainer.beta_start", "eps or v", c->trainer_beta_start != 1e-4, !flow},
        {"trainer.beta_end", "eps or v", c->trainer_beta_end != 0.02, !flow},
        {"trainer.zero_snr", "v", c->trainer_zero_snr, is_objective(c, "v")},
        {"sample.first_frame", "flow", c->sample_first_frame[0] != 0, flow},
        {"sample.sampler", "flow", !strcmp(c->sample_sampler, "euler"), flow},
        {"sample.sampler", "eps or v",
         !strcmp(c->sample_sampler, "ddim") || !strcmp(c->sample_sampler, "dpm++"), !flow},
    };
    if (strcmp(c->trainer_flow_shift_by, "constant") && c->trainer_flow_shift != 1)
        lg_broken(
            r, "trainer.flow_shift",
            "trainer.flow_shift = %g with trainer.flow_shift_by = \"%s\", which says what the "
            "shift is: remove it",
            c->trainer_flow_shift, c->trainer_flow_shift_by);
    for (size_t i = 0; i < LG_ARRAY_LEN(keys); i++)
        if (keys[i].is_set && !keys[i].fits)
            lg_broken(r, keys[i].key,
                      "%s has no meaning with trainer.objective = \"%s\", it is for %s: remove it",
                      keys[i].key, c->trainer_objective, keys[i].of);
    if (c->trainer_beta_start > c->trainer_beta_end)
        lg_broken(r, "trainer.beta_start",
                  "trainer.beta_start = %g is above trainer.beta_end = %g: noise grows with time",
                  c->trainer_beta_start, c->trainer_beta_end);
}

static void check_variance(struct lg_rules *r)
{
    const lg_config *c = r->c;
    const bool trained = strcmp(c->trainer_variance_loss, "none") != 0;
    if (!c->model_learned_variance && !trained)
        lg_broken(r, "trainer.variance_loss",
                  "trainer.variance_loss = \"none\" without model.learned_variance: remove it");
    if (c->model_learned_variance && trained && !is_objective(c, "eps"))
        lg_broken(
            r, "trainer.variance_loss",
            "trainer.objective = \"%s\", but a learned variance is trained with \"eps\" alone: "
            "set the objective to that, or trainer.variance_loss to \"none\"",
            c->trainer_objective);
}

static void check_memory(struct lg_rules *r)
{
    const lg_config *c = r->c;
    struct lg_recompute recompute;
    if (lg_recompute_parse((const char *const *)c->memory_recompute.v, (int)c->model_depth,
                           &recompute) < 0) {
        lg_broken(r, "memory.recompute", "%s", lg_err_message());
        lg_err_clear();
        return;
    }
    lg_recompute_free(&recompute);
    if (c->memory_cast_weights && c->memory_offload_optimizer)
        lg_broken(r, "memory.cast_weights",
                  "memory.cast_weights = true casts weights where the GPU has them, which with "
                  "memory.offload_optimizer lie in host memory: set one of the two to false");
}

/* Previews and histograms are made of checkpoints. */
static void check_multiple(struct lg_rules *r, const char *key, int64_t every)
{
    int64_t checkpoint = r->c->checkpoint_every;
    if (every && (checkpoint == 0 || every % checkpoint != 0))
        lg_broken(
            r, key,
            "%s = %lld is not a multiple of checkpoint.every = %lld, and it needs a checkpoint "
            "each time: set it to one%s",
            key, (long long)every, (long long)checkpoint,
            checkpoint ? "" : ", and checkpoint.every above 0");
}

static void check_previews(struct lg_rules *r)
{
    const lg_config *c = r->c;
    int64_t every = c->sample_every;
    check_multiple(r, "sample.every", every);
    check_multiple(r, "tensorboard.histograms_every", c->tensorboard_histograms_every);
    if (c->tensorboard_histograms_every && !c->tensorboard_enabled)
        lg_broken(
            r, "tensorboard.histograms_every",
            "tensorboard.histograms_every = %lld without event files: set tensorboard.enabled "
            "= true, or remove it",
            (long long)c->tensorboard_histograms_every);
    if (!every) return;
    if (c->sample_captions.n == 0)
        lg_broken(r, "sample.every",
                  "sample.every = %lld, but there is nothing to draw: name some sample.captions",
                  (long long)every);
    if (!c->vae_model[0])
        lg_broken(
            r, "sample.every",
            "sample.every = %lld needs vae.model, whose decoder draws the pictures: name it, or "
            "set sample.every to 0",
            (long long)every);
}

void lg_rules_training(struct lg_rules *r)
{
    check_training(r);
    check_adapter(r);
    check_frozen(r);
    check_noise(r);
    check_variance(r);
    check_memory(r);
    check_previews(r);
}
