/* The plan: config and models' config.json turned into numbers, sealed by a hash.
 *
 * Every field of lg_plan stands once in PLAN_FIELDS, with a mark whether it decides bits. Saving,
 * loading, hashing and comparing walk over that list. plan.json holds a second hash, the seal, over
 * the whole of its content, so that a damaged file is found whatever was damaged.
 *
 * Hashes are taken over text ("name=value;"): independent of padding and byte order. */
#include "config/plan.h"
#include "base/fs.h"
#include "base/json_tree.h"
#include "config/denoisers.h"
#include "config/manifest.h"
#include "config/models.h"
#include "config/schema.h"
#include "config/texts.h"
#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { PLAN_FORMAT = 2, PLAN_BYTES_MAX = 1 << 16, PLAN_TOKENS_MAX = 1 << 12 };
#define JSON_INT_MAX 9007199254740992.0 /* 2^53: JSON numbers are doubles */

static const struct {
    const char *name, *program;
} roles[] = {
#define LG_ROLE(n, p) {#n, p},
#define LG_ENCODER(n) {"text." #n, "lg-text"},
#include "config/roles.def"
#undef LG_ENCODER
#undef LG_ROLE
};

const char *lg_role_name(lg_role r)
{
    LG_ASSERT(r >= 0 && r < LG_ROLE_COUNT);
    return roles[r].name;
}

const char *lg_role_program(lg_role r)
{
    LG_ASSERT(r >= 0 && r < LG_ROLE_COUNT);
    return roles[r].program;
}

int lg_role_find(const char *name)
{
    for (int i = 0; i < LG_ROLE_COUNT; i++)
        if (strcmp(roles[i].name, name) == 0) return i;
    return -1;
}

/* ---- the list of fields ---- */

typedef enum field_type {
    FIELD_I32,
    FIELD_I64,
    FIELD_NUM,
    FIELD_LATER, /* an I32 that is absent when it is what it was in builds that did not know it: see before() */
    FIELD_TEXT,
    FIELD_ROLES,
    FIELD_BUCKETS,
    FIELD_TEXTS,
    FIELD_TEXT_SHARDS,
    FIELD_HASH
} field_type;

/* X(field, type, decides bits); Y(name, field, type, decides bits) */
#define PLAN_FIELDS(X, Y)                                                                          \
    Y(image_size, image_height, FIELD_I32, true)                                                   \
    X(image_width, FIELD_LATER, true)                                                              \
    X(frames, FIELD_LATER, true)                                                                   \
    X(latent_channels, FIELD_I32, true)                                                            \
    Y(latent_size, latent_height, FIELD_I32, true)                                                 \
    X(latent_width, FIELD_LATER, true)                                                             \
    X(latent_frames, FIELD_LATER, true)                                                            \
    X(factor_time, FIELD_LATER, true)                                                              \
    X(buckets, FIELD_BUCKETS, true)                                                                \
    X(scaling_factor, FIELD_NUM, true)                                                             \
    X(shift_factor, FIELD_NUM, true)                                                               \
    Y(text_length, text[0].length, FIELD_I32, true)                                                \
    Y(text_dim, text[0].dim, FIELD_I32, true)                                                      \
    Y(texts, text, FIELD_TEXTS, true)                                                              \
    X(num_classes, FIELD_I32, true)                                                                \
    X(batch, FIELD_I64, true)                                                                      \
    X(rank_batch, FIELD_I64, true)                                                                 \
    X(micro_batch, FIELD_I64, true)                                                                \
    X(hosts, FIELD_LATER, true)                                                                    \
    X(host, FIELD_LATER, false)                                                                    \
    X(sequence, FIELD_I32, true)                                                                   \
    X(shards, FIELD_I32, false)                                                                    \
    X(scatters, FIELD_I32, false)                                                                  \
    X(gathers, FIELD_I32, false)                                                                   \
    X(apart, FIELD_LATER, false)                                                                   \
    X(sums_micro_batches, FIELD_I32, true)                                                         \
    X(window_slots, FIELD_I64, false)                                                              \
    X(loader_chunk, FIELD_I32, true)                                                               \
    Y(text_chunk, text[0].chunk, FIELD_I32, true)                                                  \
    X(vae_chunk, FIELD_I32, true)                                                                  \
    X(instances, FIELD_ROLES, false)                                                               \
    Y(text_shards, text[0].shards, FIELD_I32, false)                                               \
    Y(texts_shards, text, FIELD_TEXT_SHARDS, false)                                                \
    X(threads, FIELD_ROLES, true)                                                                  \
    X(isa, FIELD_TEXT, true)                                                                       \
    X(precision, FIELD_TEXT, true)                                                                 \
    X(element_bytes, FIELD_I32, true)                                                              \
    X(lr_steps, FIELD_I64, false)                                                                  \
    X(bits_hash, FIELD_HASH, true)

static const struct field {
    const char *name;
    field_type type;
    bool bits;
    size_t offset, size;
} fields[] = {
#define Y(name, field, type, bits)                                                                 \
    {#name, type, bits, offsetof(lg_plan, field), sizeof(((lg_plan *)NULL)->field)},
#define X(name, type, bits) Y(name, name, type, bits)
    PLAN_FIELDS(X, Y)
#undef X
#undef Y
};

static const void *field_of(const lg_plan *p, const struct field *f)
{
    return (const char *)p + f->offset;
}

/* Of a FIELD_LATER: pictures were squares, nothing had frames, and there was one host. */
static int before(const lg_plan *p, const struct field *f)
{
    switch (f->offset) {
    case offsetof(lg_plan, image_width):
        return p->image_height;
    case offsetof(lg_plan, latent_width):
        return p->latent_height;
    case offsetof(lg_plan, apart):
    case offsetof(lg_plan, host):
        return 0;
    default:
        return 1;
    }
}

/* The roles of one encoder of several, and of several hosts, are named only in a run that has them, as in builds that had
 * none. */
static bool has_role(const lg_plan *p, lg_role r)
{
    const bool is_optional = r == LG_ROLE_exchange || (lg_role_is_text(r) && r != LG_ROLE_text);
    return !is_optional || p->instances[r];
}

/* "text.clip_l:77:768:768:8,text.t5:256:4096:0:8": tokens, width, pooled width, chunk. */
static void print_texts(FILE *out, const lg_plan *p)
{
    for (int k = 0; k < p->n_texts; k++) {
        const struct lg_plan_text *t = &p->text[k];
        fprintf(out, "%s%s:%d:%d:%d:%d", k ? "," : "", roles[t->role].name, t->length, t->dim,
                t->pooled, t->chunk);
    }
}

/* "latent_size=16;": also what messages show. */
static void print_field(FILE *out, const lg_plan *p, const struct field *f)
{
    const void *at = field_of(p, f);
    char text[LG_BUCKETS_TEXT_BYTES];
    fprintf(out, "%s=", f->name);
    switch (f->type) {
    case FIELD_I32:
    case FIELD_LATER:
        fprintf(out, "%d", *(const int *)at);
        break;
    case FIELD_I64:
        fprintf(out, "%" PRId64, *(const int64_t *)at);
        break;
    case FIELD_NUM:
        fprintf(out, "%.17g", *(const double *)at);
        break;
    case FIELD_TEXT:
        fprintf(out, "%s", (const char *)at);
        break;
    case FIELD_HASH:
        fprintf(out, "%016" PRIx64, *(const uint64_t *)at);
        break;
    case FIELD_BUCKETS:
        lg_buckets_print(at, text);
        fputs(text, out);
        break;
    case FIELD_TEXTS:
        print_texts(out, p);
        break;
    case FIELD_TEXT_SHARDS:
        for (int k = 0; k < p->n_texts; k++) fprintf(out, "%s%d", k ? "," : "", p->text[k].shards);
        break;
    case FIELD_ROLES:
        for (int r = 0; r < LG_ROLE_COUNT; r++)
            if (has_role(p, (lg_role)r))
                fprintf(out, "%s%s:%d", r ? "," : "", roles[r].name, ((const int *)at)[r]);
        break;
    }
    fputc(';', out);
}

/* Runs without buckets, or with one text, are those of builds that had no others: neither key nor field is in their
 * hashes. */
static bool is_none(const lg_plan *p, const struct field *f)
{
    if (f->type == FIELD_TEXTS || f->type == FIELD_TEXT_SHARDS) return p->n_texts < 2;
    if (f->type == FIELD_LATER) return *(const int *)field_of(p, f) == before(p, f);
    return f->type == FIELD_BUCKETS && ((const struct lg_buckets *)field_of(p, f))->n == 0;
}

static uint64_t hash_fields(const lg_plan *p, bool bits_only)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    LG_ASSERT(out);
    fprintf(out, "format=%d;", PLAN_FORMAT);
    for (size_t i = 0; i < LG_ARRAY_LEN(fields); i++)
        if ((fields[i].bits || !bits_only) && !is_none(p, &fields[i]))
            print_field(out, p, &fields[i]);
    LG_ASSERT(lg_close_text(out) == 0);
    uint64_t hash = lg_hash(text, bytes);
    free(text);
    return hash;
}

/* ---- instruction sets ---- */

/* Best first. Each stands for what oneDNN and our kernels ask for under that name. */
static bool machine_has(const char *isa)
{
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(isa, "avx512") == 0)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (strcmp(isa, "avx2") == 0) return avx2;
    return strcmp(isa, "sse2") == 0;
}

const char *lg_plan_machine_isa(void)
{
    return machine_has("avx512") ? "avx512" : machine_has("avx2") ? "avx2" : "sse2";
}

/* ---- placement ---- */

/* One pass over the list: its length, and entry `wanted` of it if that is there. */
static int walk_gpus(const char *list, int wanted, int *ret_entry)
{
    int n = 0;
    for (const char *at = list;; at++, n++) {
        at += strspn(at, " ");
        size_t digits = strspn(at, "0123456789");
        long number = digits >= 1 && digits <= 4 ? strtol(at, NULL, 10) : LG_GPUS_MAX;
        if (number >= LG_GPUS_MAX || n == LG_GPUS_MAX) return LG_ERR_CONFIG;
        if (n == wanted) *ret_entry = (int)number;
        at += digits;
        at += strspn(at, " ");
        if (!*at) return n + 1;
        if (*at != ',') return LG_ERR_CONFIG;
    }
}

int lg_gpus_at(const char *list, int index)
{
    LG_ASSERT(index >= 0);
    int entry = 0, n = walk_gpus(list, 0, &entry);
    if (n > 0) walk_gpus(list, index % n, &entry);
    return n < 0 ? n : entry;
}

int lg_plan_gpu(const lg_config *c, lg_role role, int index)
{
    if (strcmp(c->_device, "cuda") != 0) return -1;
    const bool state_on_host = c->memory_offload_optimizer;
    if (lg_role_is_text(role)) return lg_gpus_at(lg_text_keys(c, role).gpus, index);
    switch (role) {
    case LG_ROLE_vae:
        return lg_gpus_at(c->vae_gpus, index);
    case LG_ROLE_trainer:
        return lg_gpus_at(c->trainer_gpus, index);
    case LG_ROLE_exchange: /* for the state; where it adds there, for gradients */
        if (!strcmp(c->hosts_transport, "nccl")) return lg_gpus_at(c->trainer_gpus, index);
        return state_on_host ? -1 : lg_gpus_at(c->trainer_gpus, index);
    case LG_ROLE_ema:
        return state_on_host ? -1 : lg_gpus_at(c->trainer_gpus, index);
    case LG_ROLE_ckpt:
        return state_on_host ? -1 : lg_gpus_at(c->trainer_gpus, 0);
    default:
        return -1;
    }
}

int lg_plan_turn(const lg_config *c, const int instances[LG_ROLE_COUNT], lg_role role, int index)
{
    const int gpu = lg_plan_gpu(c, role, index);
    const bool host = gpu < 0 && strcmp(c->_turns, "always") == 0;
    bool takes = false;
    int others = -1;
    for (lg_role r = LG_ROLE_text; r <= LG_ROLE_trainer; r++) { /* those that compute */
        takes = takes || r == role;
        for (int i = 0; i < instances[r]; i++) others += lg_plan_gpu(c, r, i) == gpu;
    }
    if (!takes || others < 1 || strcmp(c->_turns, "never") == 0) return -1;
    return host ? 0 : gpu;
}

/* ---- making ---- */

static int set_isa(lg_plan *p, const char *isa)
{
    if (!isa) isa = lg_plan_machine_isa();
    if (!machine_has(isa))
        return LG_FAIL(
            LG_ERR_MISMATCH,
            "the run was started with the instruction set %.20s, which this machine lacks "
            "(its best is %s): continue on a machine that has it, or start a new run "
            "with trainer.init_from",
            isa, lg_plan_machine_isa());
    LG_ASSERT(strlen(isa) < sizeof p->isa);
    strcpy(p->isa, isa);
    return 0;
}

/* Of the models that a run reads and never writes; 0: there is none. */
struct identities {
    uint64_t vae, text[LG_TEXTS_MAX], from,
        base; /* from: what the transformer begins with; base: what an adapter adapts */
};

/* A key that decides nothing as it stands, as runs from before there was one are. */
static bool is_silent(const lg_config *c, bool has_buckets, const char *key)
{
    if (!strcmp(key, "data.buckets")) return !has_buckets;
    if (!strcmp(key, "data.frames")) return c->data_frames == 1;
    if (!strcmp(key, "data.fps")) return c->data_fps == 0;
    if (!strcmp(key, "data.stride")) return c->data_stride == 1;
    if (!strcmp(key, "data.latent_frames")) return !c->data_latent_frames;
    if (!strcmp(key, "data.caption")) return !strcmp(c->data_caption, "listed");
    if (!strcmp(key, "data.shuffle_tags")) return !c->data_shuffle_tags;
    if (!strcmp(key, "data.keep_tags")) return !c->data_keep_tags;
    if (!strcmp(key, "hosts.count")) return c->hosts_count == 1;
    if (!strcmp(key, "trainer.clean_first_frame")) return c->trainer_clean_first_frame == 0;
    if (!strcmp(key, "model.frozen")) return !strcmp(c->model_frozen, "auto");
    return false;
}

/* The same for the keys of text encoders. */
static bool is_silent_text(const lg_config *c, const lg_key *k)
{
    if (strcmp(k->key, "storage") != 0) return false;
    return !strcmp(*(char *const *)lg_key_field((lg_config *)c, k), "auto");
}

static uint64_t hash_bits(const lg_config *c, bool has_buckets, const struct identities *of)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    LG_ASSERT(out);
    for (int i = 0; i < lg_key_count(); i++) {
        const lg_key *k = lg_key_at(i);
        if (!lg_key_bits(k) || is_silent(c, has_buckets, k->name) || is_silent_text(c, k)) continue;
        if (!lg_key_applies(c, k)) continue;
        fprintf(out, "%s=", k->name);
        lg_key_print(out, c, k);
        fputc(';', out);
    }
    if (lg_config_updates_for_gpu(c)) fputs("updates=host;", out);
    fprintf(out, "vae=%016" PRIx64 ";text=%016" PRIx64 ";", of->vae, of->text[0]);
    for (int k = 1; k < LG_TEXTS_MAX; k++)
        if (of->text[k]) fprintf(out, "text%d=%016" PRIx64 ";", k, of->text[k]);
    if (c->model_from[0]) fprintf(out, "from=%016" PRIx64 ";", of->from);
    if (of->base) fprintf(out, "base=%016" PRIx64 ";", of->base);
    LG_ASSERT(lg_close_text(out) == 0);
    uint64_t hash = lg_hash(text, bytes);
    free(text);
    return hash;
}

static int plan_latents(lg_plan *p, const lg_config *c, uint64_t *ret_identity)
{
    *ret_identity = 0;
    p->frames = (int)c->data_frames;
    p->factor_time = 1;
    if (!c->vae_model[0]) {
        const struct lg_sides cells = lg_config_latent_size(c);
        p->latent_channels = (int)c->data_latent_channels;
        p->latent_frames = (int)(c->data_latent_frames ? c->data_latent_frames : c->data_frames);
        p->latent_height = (int)cells.height;
        p->latent_width = (int)cells.width;
        p->scaling_factor = c->data_latent_scaling;
        p->shift_factor = c->data_latent_shift;
        return 0;
    }
    struct lg_vae_info vae;
    LG_TRY(lg_vae_info_load(c->vae_model, &vae));
    p->image_height = (int)c->data_size.height;
    p->image_width = (int)c->data_size.width;
    p->latent_channels = vae.latent_channels;
    p->latent_frames = lg_vae_latent_frames(&vae, p->frames);
    p->latent_height = p->image_height / vae.factor;
    p->latent_width = p->image_width / vae.factor;
    p->factor_time = vae.factor_time;
    p->scaling_factor = vae.scaling_factor;
    p->shift_factor = vae.shift_factor;
    p->vae_chunk = (int)c->vae_chunk;
    p->instances[LG_ROLE_vae] = (int)c->vae_instances;
    *ret_identity = vae.identity;
    LG_TRY(
        lg_buckets_make(&c->data_buckets,
                        &(struct lg_buckets_spec){.height = p->image_height,
                                                  .width = p->image_width,
                                                  .frames = p->frames,
                                                  .unit = vae.factor * (int)c->model_patch,
                                                  .factor_time = vae.factor_time,
                                                  .micro_batch = (int)c->trainer_micro_batch_size},
                        &p->buckets));
    return 0;
}

/* Features of what the denoiser takes; 0: it takes none. */
static int width_of(const struct lg_text_info *text, lg_text_output output)
{
    return output == LG_TEXT_OUTPUTS ? 0 : output == LG_TEXT_EMBEDS ? text->projection : text->dim;
}

static int plan_text(lg_plan *p, const struct lg_text_config *t, uint64_t *ret_identity)
{
    struct lg_text_info text;
    LG_TRY(lg_text_info_load(t->model, &text));
    int64_t shards = t->shards ? t->shards : t->instances;
    p->text[p->n_texts++] = (struct lg_plan_text){.role = t->role,
                                                  .length = (int)t->length,
                                                  .dim = width_of(&text, t->info->states),
                                                  .pooled = width_of(&text, t->info->pooled),
                                                  .chunk = (int)t->chunk,
                                                  .shards = (int)LG_MIN(shards, text.layers)};
    p->instances[t->role] = (int)t->instances;
    p->threads[t->role] = (int)t->threads;
    *ret_identity = text.identity;
    return 0;
}

static int plan_conditioning(lg_plan *p, const lg_config *c, uint64_t ret_identity[LG_TEXTS_MAX])
{
    struct lg_text_config text[LG_TEXTS_MAX];
    const int n = lg_config_texts(c, text);
    if (lg_denoiser_info(lg_denoiser_kind_of(c->model_kind))->labels)
        p->num_classes = (int)c->model_num_classes;
    if (!n) p->threads[LG_ROLE_text] = (int)c->text_threads; /* as ever, though nobody has them */
    for (int k = 0; k < n; k++) LG_TRY(plan_text(p, &text[k], &ret_identity[k]));
    return 0;
}

int lg_plan_text_of(const lg_plan *p, lg_role role)
{
    for (int k = 0; k < p->n_texts; k++)
        if (p->text[k].role == role) return k;
    return -1;
}

static int find_base(const lg_config *c, uint64_t *ret)
{
    char dir[LG_PATH_BYTES];
    *ret = 0;
    if (!strcmp(c->adapter_kind, "none")) return 0;
    LG_TRY(lg_checkpoint_weights_dir(lg_config_begins_with(c), "ema", dir));
    return lg_denoiser_identity(dir, ret);
}

int lg_plan_make(const lg_config *c, const char *isa, lg_plan *ret)
{
    lg_plan p = {0};
    struct identities of = {0};
    for (lg_role r = 0; r < LG_ROLE_COUNT; r++) {
        p.threads[r] = 1;
        p.instances[r] = !lg_role_is_text(r) && r != LG_ROLE_vae && r != LG_ROLE_exchange;
    }
    LG_TRY(set_isa(&p, isa));
    LG_TRY(plan_latents(&p, c, &of.vae));
    LG_TRY(plan_conditioning(&p, c, of.text));
    if (c->model_from[0])
        LG_TRY(c->model_fresh ? lg_denoiser_shape_identity(c->model_from, &of.from)
                              : lg_denoiser_identity(c->model_from, &of.from));
    LG_TRY(find_base(c, &of.base));
    p.batch = c->trainer_global_batch_size;
    p.sequence = (int)c->parallel_sp;
    p.hosts = (int)c->hosts_count;
    p.host = c->hosts_number < 0 || c->hosts_number >= c->hosts_count
                 ? 0
                 : (int)c->hosts_number; /* see hosts.number */
    p.rank_batch = lg_plan_host_batch(&p) * p.sequence / c->trainer_ranks;
    p.micro_batch = c->trainer_micro_batch_size;
    p.shards = !c->parallel_zero   ? 1
               : c->parallel_group ? (int)c->parallel_group
                                   : (int)c->trainer_ranks;
    p.scatters = c->parallel_zero >= 2;
    p.gathers = c->parallel_zero == 3 || c->memory_cast_weights;
    p.apart = !strcmp(c->parallel_exchange, "host");
    p.sums_micro_batches = p.scatters && p.rank_batch > p.micro_batch;
    p.window_slots = c->window_batches * lg_plan_host_batch(&p);
    p.loader_chunk = (int)c->loader_chunk;
    p.instances[LG_ROLE_loader] = (int)c->loader_instances;
    p.instances[LG_ROLE_trainer] = (int)c->trainer_ranks;
    if (p.hosts > 1) {
        p.instances[LG_ROLE_exchange] = (int)c->trainer_ranks;
        p.threads[LG_ROLE_exchange] = (int)c->trainer_threads;
    }
    p.threads[LG_ROLE_vae] = (int)c->vae_threads;
    p.threads[LG_ROLE_trainer] = (int)c->trainer_threads;
    LG_ASSERT(strlen(c->_precision) < sizeof p.precision);
    strcpy(p.precision, c->_precision);
    bool half = !strcmp(p.precision, "bf16") || !strcmp(p.precision, "fp16");
    p.element_bytes = half ? 2 : 4;
    p.lr_steps = c->trainer_lr_steps ? c->trainer_lr_steps : c->trainer_max_steps;
    p.bits_hash = hash_bits(c, p.buckets.n > 0, &of);
    p.hash = hash_fields(&p, true);
    LG_ASSERT(p.latent_height > 0 && p.latent_width > 0 && p.latent_frames > 0);
    LG_ASSERT(p.rank_batch % p.micro_batch == 0); /* lg_config_check */
    *ret = p;
    return 0;
}

struct lg_plan_shape lg_plan_shape(const lg_plan *p, int k)
{
    LG_ASSERT(k >= 0 && k < lg_plan_shapes(p));
    if (!p->buckets.n)
        return (struct lg_plan_shape){.frames = p->frames,
                                      .height = p->image_height,
                                      .width = p->image_width,
                                      .latent_frames = p->latent_frames,
                                      .latent_height = p->latent_height,
                                      .latent_width = p->latent_width,
                                      .rows = (int)p->micro_batch};
    const struct lg_bucket *b = &p->buckets.of[k];
    const int factor = p->image_height / p->latent_height;
    return (struct lg_plan_shape){.frames = b->frames,
                                  .height = b->height,
                                  .width = b->width,
                                  .latent_frames = (b->frames - 1) / p->factor_time + 1,
                                  .latent_height = b->height / factor,
                                  .latent_width = b->width / factor,
                                  .rows = b->rows};
}

static void field_text(const lg_plan *p, const struct field *f, char ret[256])
{
    FILE *out = fmemopen(ret, 256, "w");
    LG_ASSERT(out);
    print_field(out, p, f);
    fclose(out);
    ret[255] = 0;
}

int lg_plan_resume(const lg_config *c, const lg_plan *old, lg_plan *ret)
{
    lg_plan p;
    LG_TRY(lg_plan_make(c, old->isa, &p));
    for (size_t i = 0; i < LG_ARRAY_LEN(fields) && p.hash != old->hash; i++) {
        char before[256], now[256];
        if (!fields[i].bits) continue;
        field_text(old, &fields[i], before);
        field_text(&p, &fields[i], now);
        if (strcmp(before, now) == 0) continue;
        if (fields[i].type == FIELD_HASH)
            return LG_FAIL(LG_ERR_MISMATCH,
                           "a [bits] key, or a file of vae.model, text.model, model.from or of the "
                           "model that an adapter adapts, is not what it was when "
                           "the run began: restore it, or choose another job.dir");
        if (fields[i].offset == offsetof(lg_plan, sums_micro_batches))
            return LG_FAIL(
                LG_ERR_MISMATCH,
                "a rank has several micro-batches, which parallel.zero = 0 and 1 add up in another "
                "order than 2 and 3, and the run began with the others: set it back, or name it in "
                "trainer.resume_changes and choose another job.dir");
        return LG_FAIL(LG_ERR_MISMATCH,
                       "the plan differs from the run's: %s before, %s now: restore the models and "
                       "keys, or choose another job.dir",
                       before, now);
    }
    LG_ASSERT(p.hash == old->hash);
    p.lr_steps = old->lr_steps;
    if (!strcmp(c->parallel_exchange, "auto")) p.apart = old->apart;
    for (int k = 0; k < p.n_texts; k++) p.text[k].shards = old->text[k].shards;
    *ret = p;
    return 0;
}

/* ---- plan.json ---- */

static void put_texts(cJSON *json, const lg_plan *p, const struct field *f)
{
    if (is_none(p, f)) return;
    cJSON *list = cJSON_AddArrayToObject(json, f->name);
    for (int k = 0; k < p->n_texts; k++) {
        const struct lg_plan_text *t = &p->text[k];
        if (f->type == FIELD_TEXT_SHARDS) {
            cJSON_AddItemToArray(list, cJSON_CreateNumber(t->shards));
            continue;
        }
        cJSON *o = cJSON_CreateObject();
        cJSON_AddStringToObject(o, "role", roles[t->role].name);
        cJSON_AddNumberToObject(o, "length", t->length);
        cJSON_AddNumberToObject(o, "dim", t->dim);
        cJSON_AddNumberToObject(o, "pooled", t->pooled);
        cJSON_AddNumberToObject(o, "chunk", t->chunk);
        cJSON_AddItemToArray(list, o);
    }
}

static void put_field(cJSON *json, const lg_plan *p, const struct field *f)
{
    const void *at = field_of(p, f);
    char hex[20], text[LG_BUCKETS_TEXT_BYTES];
    cJSON *table;
    switch (f->type) {
    case FIELD_LATER:
        if (is_none(p, f)) return;
        /* fall through */
    case FIELD_I32:
        cJSON_AddNumberToObject(json, f->name, *(const int *)at);
        return;
    case FIELD_I64:
        cJSON_AddNumberToObject(json, f->name, (double)*(const int64_t *)at);
        return;
    case FIELD_NUM:
        lg_json_add_exact(json, f->name, *(const double *)at);
        return;
    case FIELD_TEXT:
        cJSON_AddStringToObject(json, f->name, at);
        return;
    case FIELD_HASH:
        snprintf(hex, sizeof hex, "%016" PRIx64, *(const uint64_t *)at);
        cJSON_AddStringToObject(json, f->name, hex);
        return;
    case FIELD_BUCKETS:
        lg_buckets_print(at, text);
        cJSON_AddStringToObject(json, f->name, text);
        return;
    case FIELD_TEXTS:
    case FIELD_TEXT_SHARDS:
        put_texts(json, p, f);
        return;
    case FIELD_ROLES:
        table = cJSON_AddObjectToObject(json, f->name);
        for (int r = 0; r < LG_ROLE_COUNT; r++)
            if (has_role(p, (lg_role)r))
                cJSON_AddNumberToObject(table, roles[r].name, ((const int *)at)[r]);
        return;
    }
}

int lg_plan_save(const lg_plan *p, const char *path)
{
    char hex[20];
    LG_ASSERT(p->hash == hash_fields(p, true));
    cJSON *json = cJSON_CreateObject();
    LG_ASSERT(json);
    cJSON_AddNumberToObject(json, "format", PLAN_FORMAT);
    for (size_t i = 0; i < LG_ARRAY_LEN(fields); i++) put_field(json, p, &fields[i]);
    snprintf(hex, sizeof hex, "%016" PRIx64, p->hash);
    cJSON_AddStringToObject(json, "hash", hex);
    snprintf(hex, sizeof hex, "%016" PRIx64, hash_fields(p, false));
    cJSON_AddStringToObject(json, "seal", hex);
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    LG_ASSERT(text);
    int rc = lg_publish_file(path, text, strlen(text));
    free(text);
    LG_TRY(rc);
    return 0;
}

static bool get_int(const cJSON *json, const char *name, double max, int64_t *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(json, name);
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0 && v->valuedouble <= max)) return false;
    *ret = (int64_t)v->valuedouble;
    return true;
}

static bool get_hash(const cJSON *json, const char *name, uint64_t *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(json, name);
    if (!cJSON_IsString(v) || strlen(v->valuestring) != 16) return false;
    char *end = NULL;
    *ret = strtoull(v->valuestring, &end, 16);
    return *end == 0;
}

static bool get_text(const cJSON *json, struct lg_plan_text *t)
{
    const struct {
        const char *name;
        int *to;
    } number[] = {
        {"length", &t->length}, {"dim", &t->dim}, {"pooled", &t->pooled}, {"chunk", &t->chunk}};
    const cJSON *role = cJSON_GetObjectItemCaseSensitive(json, "role");
    const int found = cJSON_IsString(role) ? lg_role_find(role->valuestring) : -1;
    if (found < 0 || !lg_role_is_text((lg_role)found)) return false;
    t->role = (lg_role)found;
    for (size_t i = 0; i < LG_ARRAY_LEN(number); i++) {
        int64_t n;
        if (!get_int(json, number[i].name, INT32_MAX, &n)) return false;
        *number[i].to = (int)n;
    }
    return true;
}

/* Absent: there is one at most, which fields of its own have told. */
static bool get_texts(const cJSON *list, lg_plan *p)
{
    const cJSON *item;
    p->text[0].role = LG_ROLE_text;
    p->n_texts = p->text[0].length > 0;
    if (!list) return true;
    p->n_texts = 0;
    if (!cJSON_IsArray(list)) return false;
    cJSON_ArrayForEach(item, list)
    {
        if (p->n_texts == LG_TEXTS_MAX || !get_text(item, &p->text[p->n_texts++])) return false;
    }
    return p->n_texts > 1;
}

static bool get_shards(const cJSON *list, lg_plan *p)
{
    if (!list) return p->n_texts < 2;
    if (cJSON_GetArraySize(list) != p->n_texts) return false;
    for (int k = 0; k < p->n_texts; k++) {
        const cJSON *v = cJSON_GetArrayItem(list, k);
        if (!cJSON_IsNumber(v) || !(v->valuedouble >= 1 && v->valuedouble <= 64)) return false;
        p->text[k].shards = (int)v->valuedouble;
    }
    return true;
}

static bool get_field(const cJSON *json, lg_plan *p, const struct field *f)
{
    void *at = (char *)p + f->offset;
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(json, f->name);
    int64_t n;
    switch (f->type) {
    case FIELD_LATER:
        *(int *)at = before(p, f);
        if (!v) return true;
        /* fall through */
    case FIELD_I32:
        if (!get_int(json, f->name, f->offset == offsetof(lg_plan, apart) ? 1 : INT32_MAX, &n))
            return false;
        *(int *)at = (int)n;
        return true;
    case FIELD_I64:
        return get_int(json, f->name, JSON_INT_MAX, at);
    case FIELD_NUM:
        if (!cJSON_IsNumber(v)) return false;
        *(double *)at = v->valuedouble;
        return true;
    case FIELD_TEXT:
        if (!cJSON_IsString(v) || strlen(v->valuestring) >= f->size) return false;
        strcpy(at, v->valuestring);
        return true;
    case FIELD_HASH:
        return get_hash(json, f->name, at);
    case FIELD_BUCKETS:
        if (!v) return true; /* of a build that had none */
        if (cJSON_IsString(v) && lg_buckets_parse(v->valuestring, at) == 0) return true;
        lg_err_clear();
        return false;
    case FIELD_TEXTS:
        return get_texts(v, p);
    case FIELD_TEXT_SHARDS:
        return get_shards(v, p);
    case FIELD_ROLES:
        break;
    }
    for (lg_role r = 0; r < LG_ROLE_COUNT; r++) {
        const bool is_optional = r == LG_ROLE_exchange || (lg_role_is_text(r) && r != LG_ROLE_text);
        if (is_optional && !cJSON_GetObjectItemCaseSensitive(v, roles[r].name)) {
            ((int *)at)[r] = f->offset == offsetof(lg_plan, threads); /* the run has none */
            continue;
        }
        if (!get_int(v, roles[r].name, INT32_MAX, &n)) return false;
        ((int *)at)[r] = (int)n;
    }
    return true;
}

static int parse_plan(const cJSON *json, const char *path, lg_plan *p)
{
    int64_t format = 0;
    uint64_t hash = 0, seal = 0;
    if (!get_int(json, "format", INT32_MAX, &format))
        return LG_FAIL(LG_ERR_CORRUPT, "%s is not a plan", path);
    if (format != PLAN_FORMAT)
        return LG_FAIL(LG_ERR_MISMATCH, "%s has format %lld, this build reads %d", path,
                       (long long)format, PLAN_FORMAT);
    for (size_t i = 0; i < LG_ARRAY_LEN(fields); i++)
        if (!get_field(json, p, &fields[i]))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: %s is missing or wrong", path, fields[i].name);
    if (!get_hash(json, "hash", &hash) || !get_hash(json, "seal", &seal) ||
        hash != hash_fields(p, true) || seal != hash_fields(p, false))
        return LG_FAIL(LG_ERR_CORRUPT, "%s was changed after it was written: its hash is wrong",
                       path);
    p->hash = hash;
    return 0;
}

int lg_plan_load(const char *path, lg_plan *ret)
{
    char *data = NULL;
    size_t bytes = 0;
    lg_plan p = {0};
    LG_TRY(lg_read_file(path, PLAN_BYTES_MAX, &data, &bytes));
    cJSON *json = NULL;
    int rc = lg_json_tree(path, data, bytes, PLAN_TOKENS_MAX, &json);
    free(data);
    if (rc == LG_ERR_CORRUPT)
        return LG_FAIL(LG_ERR_CORRUPT, "%s is not a plan: %s", path, lg_err_message());
    if (rc == 0) rc = parse_plan(json, path, &p);
    cJSON_Delete(json);
    LG_TRY(rc);
    *ret = p;
    return 0;
}
