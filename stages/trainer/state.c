/* Persistent trainer state; see state.h. */
#include "stages/trainer/state.h"
#include "config/manifest.h"
#include "config/texts.h"
#include "stages/nets/adapter_file.h"
#include "stages/nets/storage.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the keys of [model] do not say; the rest of it they say already (config/model_from.h). */
static int take_from(const char *dir, struct lg_denoiser_config *ret)
{
    char path[LG_PATH_BYTES];
    struct lg_denoiser_config from;
    LG_TRY(lg_path(path, "%s/config.json", dir));
    LG_TRY(lg_denoiser_config_load(path, &from));
    if (from.channels != ret->channels)
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"in_channels\" is %d, but latents have %d channels",
                       path, from.channels, ret->channels);
    if ((from.kind == LG_PIXART || from.kind == LG_LATTE || from.kind == LG_LTX) &&
        from.text[0].width != ret->text[0].width)
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"caption_channels\" is %d, but text.model has width %d",
                       path, from.text[0].width, ret->text[0].width);
    if (from.kind == LG_SD3 && ret->n_texts < from.n_texts)
        ret->text[2].width = from.text[2].width; /* zeros have any */
    if (from.kind == LG_SD3 &&
        (from.text[2].width != ret->text[2].width ||
         from.text[0].pooled + from.text[1].pooled != ret->text[0].pooled + ret->text[1].pooled))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"joint_attention_dim\" is %d and \"pooled_projection_dim\" %d, but "
                       "text.t5 has width %d, and both CLIP have pooled widths of %d together",
                       path, from.text[2].width, from.text[0].pooled + from.text[1].pooled,
                       ret->text[2].width, ret->text[0].pooled + ret->text[1].pooled);
    if (from.kind == LG_FLUX &&
        (from.text[1].width != ret->text[1].width || from.text[0].pooled != ret->text[0].pooled))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"joint_attention_dim\" is %d and \"pooled_projection_dim\" %d, but "
                       "text.t5 has width %d, and text.clip_l a pooled width of %d",
                       path, from.text[1].width, from.text[0].pooled, ret->text[1].width,
                       ret->text[0].pooled);
    if (from.kind == LG_SD2 && from.text[0].width != ret->text[0].width)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"cross_attention_dim\" is %d, but text.model has width %d", path,
                       from.text[0].width, ret->text[0].width);
    if (from.kind == LG_SDXL &&
        (from.text[0].width + from.text[1].width != ret->text[0].width + ret->text[1].width ||
         from.text[1].pooled != ret->text[1].pooled))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"cross_attention_dim\" is %d and pooled texts are %d wide, but both "
                       "CLIP have width %d together, and text.clip_g a pooled width of %d",
                       path, from.text[0].width + from.text[1].width, from.text[1].pooled,
                       ret->text[0].width + ret->text[1].width, ret->text[1].pooled);
    ret->unet = from.unet;
    ret->norm_eps = from.norm_eps;
    ret->sample_size = from.sample_size;
    ret->interpolation = from.interpolation;
    ret->size_conditions = from.size_conditions;
    ret->no_attention_bias = from.no_attention_bias;
    ret->positions_side = from.positions_side;
    ret->qk_norm = from.qk_norm;
    memcpy(ret->dual, from.dual, sizeof ret->dual);
    ret->singles = from.singles;
    ret->guidance = from.guidance;
    memcpy(ret->axes, from.axes, sizeof ret->axes);
    return 0;
}

/* What no key says of a new one: parts of FLUX.1's proportions, without guidance. */
static void choose_flux(struct lg_denoiser_config *c)
{
    const int d = c->hidden / LG_MAX(c->heads, 1);
    c->singles = c->depth * 2 / 3;
    c->axes[0] = LG_MAX(d / 16 * 2, 2);
    c->axes[1] = (d - c->axes[0]) / 4 * 2;
    c->axes[2] = d - c->axes[0] - c->axes[1];
}

/* What a cell of the latent shows; a clip of files of any rate counts as LTX-Video's, 25 frames a second. */
static void choose_cells(const lg_config *c, const lg_plan *p, struct lg_denoiser_config *ret)
{
    enum { RATE = 25 };
    const double rate = c->data_fps > 0 ? c->data_fps : RATE;
    if (p->latent_frames > 1)
        ret->cell_seconds = (double)(p->frames - 1) / (p->latent_frames - 1) / rate;
    if (p->image_height) ret->cell_pixels = (double)p->image_height / p->latent_height;
}

int lg_net_config_of(const lg_config *c, const lg_plan *p, struct lg_denoiser_config *ret)
{
    *ret = (struct lg_denoiser_config){
        .kind = lg_denoiser_kind_of(c->model_kind),
        .channels = p->latent_channels,
        .frames = p->latent_frames,
        .height = p->latent_height,
        .width = p->latent_width,
        .patch = (int)c->model_patch,
        .hidden = (int)c->model_hidden,
        .depth = (int)c->model_depth,
        .heads = (int)c->model_heads,
        .mlp_ratio = (int)c->model_mlp_ratio,
        .num_classes = p->num_classes,
        .n_texts = p->n_texts,
        .norm_eps = 1e-6,
        .learned_variance = c->model_learned_variance,
    };
    for (int k = 0; k < p->n_texts; k++) {
        const struct lg_plan_text *t = &p->text[k];
        ret->text[k] = (struct lg_denoiser_text){
            .length = t->dim ? t->length : 0, .width = t->dim, .pooled = t->pooled};
    }
    if (ret->kind == LG_SD3 && ret->n_texts == 2) { /* zeros, of a new one as wide as both CLIP */
        struct lg_text_config text[LG_TEXTS_MAX];
        lg_config_texts(c, text);
        ret->text[2] = (struct lg_denoiser_text){.length = (int)text[2].length,
                                                 .width = ret->text[0].width + ret->text[1].width};
    }
    if (ret->kind == LG_SD3) { /* of a new one; as many positions as SD3 has for its sample_size */
        ret->qk_norm = true;
        ret->positions_side = 3 * LG_MAX(ret->height / LG_MAX(ret->patch, 1), 1);
    }
    if (ret->kind == LG_FLUX) choose_flux(ret);
    if (ret->kind == LG_LTX) choose_cells(c, p, ret);
    if (c->model_from[0]) LG_TRY(take_from(c->model_from, ret));
    if (c->model_guidance != 1 && !ret->guidance)
        return LG_FAIL(LG_ERR_CONFIG,
                       "model.guidance = %g, but the model has no embedding of guidance: remove it",
                       c->model_guidance);
    return lg_denoiser_config_check(ret);
}

struct lg_training lg_training_of(const lg_config *c)
{
    struct lg_training t = {.groups = (const char *const *)c->trainer_groups.v,
                            .is_8_bit = !strcmp(c->trainer_optimizer, "adamw8bit"),
                            .frozen = lg_storage_of(c->model_frozen)};
    if (!strcmp(c->adapter_kind, "lora"))
        t.adapter = (struct lg_adapter){.rank = (int)c->adapter_rank,
                                        .alpha = c->adapter_alpha > 0 ? c->adapter_alpha
                                                                      : (double)c->adapter_rank,
                                        .targets = (const char *const *)c->adapter_targets.v};
    return t;
}

int lg_net_adapter_of(const lg_config *c, const struct lg_denoiser_config *net, const lg_params *t,
                      float **ret)
{
    const struct lg_training training = lg_training_of(c);
    const struct lg_adapter_start start = {
        .net = net, .adapter = &training.adapter, .path = c->adapter_from};
    *ret = malloc(t->count * sizeof **ret);
    if (!*ret) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu weights of an adapter", t->count);
    return lg_adapter_begin(&start, t, *ret);
}

int lg_net_table_of(const lg_config *c, const lg_plan *p, struct lg_denoiser_config *ret,
                    lg_params *ret_all)
{
    const struct lg_training training = lg_training_of(c);
    LG_TRY(lg_net_config_of(c, p, ret));
    LG_TRY(lg_denoiser_table(ret, &training, ret_all));
    return 0;
}

size_t lg_trainer_state_bytes(size_t shard)
{
    return LG_MAX(shard, (size_t)1) * sizeof(float);
}

struct lg_piece lg_trainer_piece(const lg_trainer_state *s, int rank, int unit)
{
    return lg_shard_piece(&s->params, unit, rank % s->shards, s->shards);
}

size_t lg_trainer_shard(const lg_trainer_state *s, int rank)
{
    return lg_shard_count(&s->params, rank % s->shards, s->shards);
}

int lg_trainer_state_open(lg_stage *st, lg_device *const device[], lg_trainer_state **ret)
{
    lg_trainer_state *s = calloc(1, sizeof *s);
    LG_ASSERT(s);
    *ret = s; /* half-built objects may be closed */
    s->ranks = st->plan.instances[LG_ROLE_trainer];
    s->shards = st->plan.shards;
    s->training = lg_training_of(st->config);
    LG_TRY(lg_net_table_of(st->config, &st->plan, &s->net, &s->all));
    s->params = lg_params_trained(&s->all);
    for (int r = 0; r < s->ranks; r++) {
        const size_t bytes = lg_trainer_state_bytes(lg_trainer_shard(s, r));
        for (int side = 0; side < 2; side++)
            LG_TRY(lg_stage_region(
                st,
                &(struct lg_stage_memory){.bytes = bytes,
                                          .front_bytes = sizeof(struct lg_state_front),
                                          .device = device[r],
                                          .role = LG_ROLE_trainer,
                                          .index = r,
                                          .front_only = !device[r],
                                          .is_made = lg_trainer_began(st->board)},
                &s->side[r][side], "trainer/%d/state/%c", r, "ab"[side]));
    }
    return 0;
}

/* Not lg_trainer_began: the other ranks do not open it. */
int lg_trainer_moments_open(lg_stage *st, lg_device *d, lg_trainer_state *s, int rank)
{
    const struct lg_board_row *row = lg_board_row(st->board, LG_ROLE_trainer, rank);
    s->layout[rank] = lg_moments_layout_of(&s->params, rank % s->shards, s->shards);
    return lg_stage_region(
        st,
        &(struct lg_stage_memory){
            .bytes = lg_moments_bytes(&s->layout[rank]),
            .front_bytes = sizeof(struct lg_stamp),
            .device = d,
            .role = LG_ROLE_trainer,
            .index = rank,
            .is_made = atomic_load_explicit(&row->commit, memory_order_acquire) != LG_MARK_NONE},
        &s->moments[rank], "trainer/%d/moments", rank);
}

void lg_trainer_state_close(lg_trainer_state **s)
{
    if (!*s) return;
    for (int r = 0; r < (*s)->ranks; r++) lg_moments_layout_free(&(*s)->layout[r]);
    lg_params_free(&(*s)->all);
    free(*s);
    *s = NULL;
}

struct lg_state_view lg_trainer_state_view(const lg_trainer_state *s, int rank, uint64_t state)
{
    const lg_region *r = s->side[rank][state & 1];
    struct lg_state_front *front = r->front;
    return (struct lg_state_view){&front->stamp, &front->scalars, r->payload, front->device};
}

struct lg_chunk lg_trainer_chunk(const lg_trainer_state *s, int rank, int k, uint64_t t)
{
    return lg_moments_chunk(&s->layout[rank], s->moments[rank]->payload, k, t);
}

int lg_trainer_state_expect(lg_stage *st, const lg_trainer_state *s, uint64_t state)
{
    for (int r = 0; r < s->ranks; r++) LG_TRY(lg_stage_expect(st, s->side[r][state & 1], state));
    return 0;
}

bool lg_ema_is_apart(const lg_config *c)
{
    return c->memory_offload_ema && !c->memory_offload_optimizer && !strcmp(c->_device, "cuda");
}

int lg_ema_region(lg_stage *st, const lg_trainer_state *s, lg_device *d, int rank, int side,
                  lg_region **ret)
{
    const size_t count = lg_trainer_shard(s, rank);
    return lg_stage_region(
        st,
        &(struct lg_stage_memory){
            .bytes = LG_MAX(count, (size_t)1) * sizeof(float),
            .front_bytes = sizeof(struct lg_stamp),
            .device = lg_ema_is_apart(st->config) ? NULL : d,
            .role = LG_ROLE_trainer,
            .index = rank,
            .is_made = atomic_load_explicit(&lg_board_row(st->board, LG_ROLE_ema, 0)->commit,
                                            memory_order_acquire) != LG_MARK_NONE},
        ret, "ema/%d/state/%c", rank, "ab"[side]);
}

int lg_state_device(lg_stage *st, int rank, lg_device **ret)
{
    if (st->config->memory_offload_optimizer) return lg_stage_host_device(st, LG_ROLE_trainer, ret);
    return lg_stage_device(st, LG_ROLE_trainer, rank, ret);
}

int lg_state_devices(lg_stage *st, lg_device *ret[LG_INSTANCES_MAX])
{
    for (int r = 0; r < st->plan.instances[LG_ROLE_trainer]; r++)
        LG_TRY(lg_state_device(st, r, &ret[r]));
    return 0;
}

void lg_state_device_name(const lg_config *c, int rank, char ret[LG_DEVICE_NAME_BYTES])
{
    if (c->memory_offload_optimizer)
        snprintf(ret, LG_DEVICE_NAME_BYTES, "host");
    else
        lg_stage_device_name(c, LG_ROLE_trainer, rank, ret);
}

int lg_state_processes(const lg_config *c, int ranks, struct lg_stage_bytes *rows, int cap, int *n)
{
    if (c->memory_offload_optimizer) return 0;
    for (int r = 0; r < ranks; r++) {
        int gpu = lg_plan_gpu(c, LG_ROLE_trainer, r);
        bool first = gpu >= 0;
        for (int q = 0; q < r; q++) first = first && lg_plan_gpu(c, LG_ROLE_trainer, q) != gpu;
        if (!first) continue;
        LG_ASSERT(*n < cap);
        snprintf(rows[*n].name, sizeof rows[*n].name, "private");
        lg_stage_device_name(c, LG_ROLE_trainer, r, rows[*n].device);
        rows[(*n)++].processes = 1;
    }
    return 0;
}

int lg_run_origin(lg_stage *st, lg_origin *ret, char ret_dir[LG_PATH_BYTES])
{
    char path[LG_PATH_BYTES], *text;
    size_t bytes;
    LG_TRY(lg_path(path, "%s/resume", st->run_dir));
    ret_dir[0] = 0;
    if (lg_path_exists(path)) {
        LG_TRY(lg_read_file(path, LG_PATH_BYTES - 1, &text, &bytes));
        text[strcspn(text, "\n")] = 0;
        snprintf(ret_dir, LG_PATH_BYTES, "%s", text);
        free(text);
    }
    if (ret_dir[0]) {
        *ret = LG_ORIGIN_RESUME;
    } else if (st->config->trainer_init_from[0]) {
        *ret = LG_ORIGIN_INIT;
        snprintf(ret_dir, LG_PATH_BYTES, "%s", st->config->trainer_init_from);
    } else if (st->config->model_from[0] && !st->config->model_fresh) {
        *ret = LG_ORIGIN_INIT;
        snprintf(ret_dir, LG_PATH_BYTES, "%s", st->config->model_from);
    } else {
        *ret = LG_ORIGIN_SEED;
    }
    return 0;
}

/* What is not trained is the same in every checkpoint of a run; the one that it went on from may be gone by now. */
static int find_checkpoint(lg_stage *st, char dir[LG_PATH_BYTES])
{
    char checkpoints[LG_PATH_BYTES], newest[LG_PATH_BYTES];
    lg_manifest *m = calloc(1, sizeof *m);
    LG_ASSERT(m);
    int rc = lg_path(checkpoints, "%s/checkpoints", st->run_dir);
    if (rc == 0) rc = lg_manifest_newest(checkpoints, st->config->job_name, newest, m);
    if (rc == 0) memcpy(dir, newest, LG_PATH_BYTES);
    if (rc < 0) lg_err_clear();
    free(m);
    return 0;
}

int lg_frozen_read(lg_stage *st, const lg_trainer_state *s, size_t first, size_t count, float *ret)
{
    const lg_params frozen = lg_params_frozen(&s->all);
    const size_t at = s->all.trained_count + first;
    const bool adapts = s->training.adapter.rank;
    char from[LG_PATH_BYTES], dir[LG_PATH_BYTES];
    lg_origin origin;
    LG_TRY(lg_run_origin(st, &origin, from));
    if (adapts) {
        snprintf(from, sizeof from, "%s", lg_config_begins_with(st->config));
        origin = LG_ORIGIN_INIT;
    }
    switch (origin) {
    case LG_ORIGIN_SEED:
        lg_params_init(&frozen, (uint64_t)st->config->job_seed, ret, at, count);
        return 0;
    case LG_ORIGIN_INIT:
        LG_TRY(lg_checkpoint_weights_dir(from, "ema", dir));
        break;
    case LG_ORIGIN_RESUME:
        LG_TRY(find_checkpoint(st, from));
        LG_TRY(lg_path(dir, "%s/model", from));
        break;
    }
    return lg_denoiser_load_range(&s->net, adapts ? &frozen : &s->all, dir, ret, at, count);
}
