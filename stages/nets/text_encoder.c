/* Text encoders as nets that run; see text_encoder.h. What they compute stands in t5.c and clip.c.
 *
 * Invariants: the table of a shard depends on (config, shard, shards) alone. The net runs the same
 * shapes every time; rows of padding are computed like others. */
#include "stages/nets/text_encoder.h"
#include "base/fs.h"
#include "stages/nets/encoders.h"
#include "stages/nets/model_config.h"
#include "stages/nets/weights.h"
#include <stdlib.h>
#include <string.h>

/* ---- the kinds ---- */

static const char t5_embedding[] = "shared.weight", t5_alias[] = "encoder.embed_tokens.weight";
static const char clip_prefix[] = "text_model.";

static const struct model {
    const char *type;         /* config.json's model_type */
    const char *extra[6];     /* prefixes of tensors that a file may hold beside, up to NULL */
    bool length;              /* it asks for the captions' lengths */
    const char *first, *also; /* the first parameter's name, and what it may be called instead */
    size_t
        prefix; /* > 0: then all names lack so many bytes in front; else that one alone is another */
} MODELS[LG_TEXT_KINDS] = {
    [LG_TEXT_T5] = {.type = LG_T5_MODEL_TYPE,
                    .extra = {"decoder.", "lm_head.", t5_embedding, t5_alias},
                    .length = true,
                    .first = t5_embedding,
                    .also = t5_alias},
    /* A whole CLIPModel has the pictures' half as well; position_ids are 0, 1, 2 ... */
    [LG_TEXT_CLIP] = {.type = LG_CLIP_MODEL_TYPE,
                      .extra = {"vision_model.", "visual_projection.", "text_projection.",
                                "logit_scale", "text_model.embeddings.position_ids"},
                      .first = "text_model.embeddings.token_embedding.weight",
                      .also = "embeddings.token_embedding.weight",
                      .prefix = sizeof clip_prefix - 1},
};

static int parse_kind(const lg_model_config *m, void *ret)
{
    int *kind = ret;
    const char *type;
    LG_TRY(lg_model_config_string(m, "model_type", NULL, &type));
    for (*kind = 0; *kind < LG_TEXT_KINDS; ++*kind)
        if (!strcmp(type, MODELS[*kind].type)) return 0;
    return LG_FAIL(LG_ERR_CONFIG,
                   "%s: \"model_type\" is \"%.64s\"; text encoders of \"t5\" and "
                   "\"clip_text_model\" can be read",
                   m->path, type);
}

int lg_text_encoder_config_load(const char *dir, struct lg_text_encoder_config *ret)
{
    char path[LG_PATH_BYTES];
    struct lg_text_encoder_config c = {0};
    int kind = 0;
    LG_TRY(lg_path(path, "%s/config.json", dir));
    LG_TRY(lg_model_config_read(path, parse_kind, &kind));
    c.kind = (lg_text_encoder_kind)kind;
    if (c.kind == LG_TEXT_T5)
        LG_TRY(lg_t5_config_load(dir, &c.t5));
    else
        LG_TRY(lg_clip_config_load(dir, &c.clip));
    *ret = c;
    return 0;
}

struct lg_text_encoder_sizes lg_text_encoder_sizes(const struct lg_text_encoder_config *c)
{
    if (c->kind == LG_TEXT_T5)
        return (struct lg_text_encoder_sizes){
            .vocab = c->t5.vocab, .layers = c->t5.layers, .width = c->t5.d_model};
    return (struct lg_text_encoder_sizes){.vocab = c->clip.vocab,
                                          .layers = c->clip.layers,
                                          .width = c->clip.hidden,
                                          .projection = c->clip.projection,
                                          .length_max = c->clip.positions};
}

unsigned lg_text_encoder_outputs(const struct lg_text_encoder_config *c)
{
    unsigned all = LG_TEXT_BIT(LG_TEXT_STATES);
    if (c->kind == LG_TEXT_T5) return all;
    all |= LG_TEXT_BIT(LG_TEXT_PENULTIMATE) | LG_TEXT_BIT(LG_TEXT_POOLED);
    return c->clip.projection ? all | LG_TEXT_BIT(LG_TEXT_EMBEDS) : all;
}

static void describe(lg_net *n, const struct lg_text_encoder_config *c, int shards,
                     const struct lg_text_io *io)
{
    if (c->kind == LG_TEXT_T5)
        lg_t5_describe(n, &c->t5, shards, io);
    else
        lg_clip_describe(n, &c->clip, shards, io);
}

/* The dimensions of an output of B captions of L tokens, all tokens as one. */
static lg_tensor output_shape(const struct lg_text_encoder_config *c, lg_text_output k,
                              lg_dtype type, int64_t B, int64_t L)
{
    const struct lg_text_encoder_sizes z = lg_text_encoder_sizes(c);
    const bool of_tokens = k == LG_TEXT_STATES || k == LG_TEXT_PENULTIMATE;
    return lg_t2(NULL, type, of_tokens ? B * L : B, k == LG_TEXT_EMBEDS ? z.projection : z.width);
}

/* ---- parameters ---- */

/* Of all shards, each a unit. */
static int table(const struct lg_text_encoder_config *c, int shards, lg_params *ret)
{
    const int layers = lg_text_encoder_sizes(c).layers;
    const int most = LG_MIN(layers, (int)LG_TEXT_SHARDS_MAX);
    if (shards < 1 || shards > most)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%d shards of a text encoder with %d layers: 1 to %d are possible", shards,
                       layers, most);
    lg_net n = lg_net_declare(1);
    const lg_tensor one = lg_t1(NULL, LG_I32, 1);
    struct lg_text_io io = {.ids = one, .length = one, .ends = one};
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++)
        if (lg_text_encoder_outputs(c) & LG_TEXT_BIT(k))
            io.out[k] = output_shape(c, (lg_text_output)k, n.type, 1, 1);
    describe(&n, c, shards, &io);
    *ret = lg_net_finish(&n);
    lg_storage_set(ret, c->storage, 0);
    if (c->storage == LG_STORAGE_AUTO || lg_storage_any(ret)) return 0;
    lg_params_free(ret);
    return LG_FAIL(LG_ERR_CONFIG,
                   "the text encoder has no linear of at least %d elements in its layers to store "
                   "in 8 bits: leave its storage at \"auto\"",
                   LG_STORAGE_MIN);
}

int lg_text_encoder_params(const struct lg_text_encoder_config *c, int shard, int shards,
                           lg_params *ret)
{
    lg_params all;
    LG_TRY(table(c, shards, &all));
    LG_ASSERT(shard >= 0 && shard < shards);
    *ret = lg_params_of_unit(&all, shard);
    lg_params_free(&all);
    return 0;
}

/* A checkpoint may know the parameters by their other names. */
static int name_parameters(const char *path, const struct model *m, lg_params *t)
{
    lg_weights *w = NULL;
    LG_TRY(lg_weights_open(path, &w));
    const bool other = !lg_weights_find(w, m->first) && lg_weights_find(w, m->also);
    lg_weights_close(&w);
    if (!other) return 0;
    if (!m->prefix) strcpy(t->p[0].name, m->also);
    for (int i = 0; m->prefix && i < t->n; i++)
        if (!strncmp(t->p[i].name, m->first, m->prefix))
            memmove(t->p[i].name, t->p[i].name + m->prefix, strlen(t->p[i].name + m->prefix) + 1);
    return 0;
}

/* The file's names and shapes are held to those of all shards. */
int lg_text_encoder_load_range(const struct lg_text_encoder_config *c, const char *dir,
                               const struct lg_text_range *r, float *ret)
{
    const struct model *m = &MODELS[c->kind];
    char path[LG_PATH_BYTES];
    lg_params all = {0};
    int rc;
    LG_TRY(lg_path(path, "%s/model.safetensors", dir));
    LG_TRY(table(c, r->shards, &all));
    LG_TRY_GOTO(rc, name_parameters(path, m, &all), out);
    LG_TRY_GOTO(
        rc,
        lg_params_load(&all, path, m->extra, ret, all.unit[r->shard].first + r->first, r->count),
        out);
out:
    lg_params_free(&all);
    return rc;
}

int lg_text_encoder_load(const struct lg_text_encoder_config *c, const char *dir, int shard,
                         int shards, float *ret)
{
    lg_params part;
    LG_TRY(lg_text_encoder_params(c, shard, shards, &part));
    const struct lg_text_range all = {.shard = shard, .shards = shards, .count = part.count};
    lg_params_free(&part);
    return lg_text_encoder_load_range(c, dir, &all, ret);
}

/* ---- the net ---- */

/* ids, length, ends, outputs; then the weights. */
enum { BOUND_MAX = 3 + LG_TEXT_OUTPUTS + LG_TEXT_SHARDS_MAX };

struct lg_text_encoder {
    lg_device *device;
    lg_program *program;
    lg_dtype dtype;
    struct lg_text_encoder_config config;
    int64_t batch, length;
    unsigned outputs;
    int shards;
    void *arena, *scratch;
};

static bool wants(const lg_text_encoder *net, lg_text_output k)
{
    return net->outputs & LG_TEXT_BIT(k);
}

static bool wants_ends(const lg_text_encoder *net)
{
    return wants(net, LG_TEXT_POOLED) || wants(net, LG_TEXT_EMBEDS);
}

static lg_tensor shape_of(const lg_text_encoder *net, lg_text_output k)
{
    return output_shape(&net->config, k, net->dtype, net->batch, net->length);
}

static int make_program(const lg_text_encoder *net, lg_program **ret)
{
    static const char *const NAMES[LG_TEXT_OUTPUTS] = {"out", "penultimate", "pooled", "embeds"};
    const int64_t M = net->batch * net->length;
    const lg_tensor each = lg_t1(NULL, LG_I32, net->batch);
    lg_params all;
    LG_TRY(table(&net->config, net->shards, &all));
    lg_net n = lg_net_record(net->device, &all, net->batch);
    struct lg_text_io io = {.ids = lg_graph_bind(n.g, "ids", lg_t1(NULL, LG_I32, M))};
    if (MODELS[net->config.kind].length) io.length = lg_graph_bind(n.g, "length", each);
    if (wants_ends(net)) io.ends = lg_graph_bind(n.g, "ends", each);
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++)
        if (wants(net, (lg_text_output)k))
            io.out[k] = lg_graph_bind(n.g, NAMES[k], shape_of(net, (lg_text_output)k));
    lg_net_bind(&n);
    describe(&n, &net->config, net->shards, &io);
    int rc = lg_net_compile(&n, ret);
    lg_params_free(&all);
    return rc;
}

static void *ints_of(const lg_tensor *t, int64_t count)
{
    LG_ASSERT(t->dtype == LG_I32 && lg_numel(t) == count);
    return t->data;
}

void lg_text_encoder_forward(lg_text_encoder *net, lg_stream *s, const void *const *weights,
                             const struct lg_text_io *io)
{
    void *bound[BOUND_MAX];
    int n = 0;
    LG_ASSERT(io->ids.rank == 2 && io->ids.dim[0] == net->batch);
    bound[n++] = ints_of(&io->ids, net->batch * net->length);
    if (MODELS[net->config.kind].length) bound[n++] = ints_of(&io->length, net->batch);
    if (wants_ends(net)) bound[n++] = ints_of(&io->ends, net->batch);
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++) {
        const lg_tensor *out = &io->out[k];
        LG_ASSERT((out->rank != 0) == wants(net, (lg_text_output)k));
        if (!out->rank) continue;
        lg_tensor shape = shape_of(net, (lg_text_output)k);
        LG_ASSERT(out->dtype == net->dtype && out->dim[0] == net->batch &&
                  lg_numel(out) == lg_numel(&shape) && out->dim[out->rank - 1] == shape.dim[1]);
        bound[n++] = out->data;
    }
    for (int i = 0; i < net->shards; i++) bound[n++] = (void *)(uintptr_t)weights[i];
    lg_program_run(
        net->program, s,
        &(struct lg_program_memory){.arena = net->arena, .scratch = net->scratch, .bound = bound},
        LG_PROGRAM_ALL);
}

/* A net without memory, its sizes known. */
static int plan(lg_device *d, const struct lg_text_encoder_config *c,
                const struct lg_text_encoder_shape *shape, int shards, lg_text_encoder **ret)
{
    const unsigned outputs = shape->outputs ? shape->outputs : LG_TEXT_BIT(LG_TEXT_STATES);
    const int longest = lg_text_encoder_sizes(c).length_max;
    LG_ASSERT(shape->batch >= 1 && shape->length >= 1);
    if (longest && shape->length > longest)
        return LG_FAIL(LG_ERR_CONFIG,
                       "captions of %d tokens: the text encoder takes %d at most "
                       "(max_position_embeddings): make them shorter",
                       shape->length, longest);
    if (outputs & ~lg_text_encoder_outputs(c))
        return LG_FAIL(LG_ERR_CONFIG,
                       "the text encoder has no such output: a pooled state is CLIP's, text_embeds "
                       "those of a CLIPTextModelWithProjection");
    lg_text_encoder *net = calloc(1, sizeof *net);
    if (!net) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a text encoder");
    *net = (lg_text_encoder){.device = d,
                             .dtype = lg_device_dtype(d),
                             .config = *c,
                             .batch = shape->batch,
                             .length = shape->length,
                             .outputs = outputs,
                             .shards = shards};
    int rc = make_program(net, &net->program);
    if (rc < 0) {
        lg_text_encoder_close(&net);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = net;
    return 0;
}

int lg_text_encoder_plan(lg_device *d, const struct lg_text_encoder_config *c,
                         const struct lg_text_encoder_shape *shape, size_t *ret_bytes)
{
    lg_text_encoder *net = NULL;
    LG_TRY(plan(d, c, shape, 1, &net));
    *ret_bytes = lg_program_arena_bytes(net->program) + lg_program_scratch_bytes(net->program);
    lg_text_encoder_close(&net);
    return 0;
}

int lg_text_encoder_print(lg_device *d, const struct lg_text_encoder_config *c,
                          const struct lg_text_encoder_shape *shape, FILE *to)
{
    lg_text_encoder *net = NULL;
    LG_TRY(plan(d, c, shape, 1, &net));
    lg_program_print(net->program, to);
    lg_text_encoder_close(&net);
    return 0;
}

int lg_text_encoder_open(lg_device *d, const struct lg_text_encoder_config *c,
                         const struct lg_text_encoder_shape *shape, int shards,
                         lg_text_encoder **ret)
{
    lg_text_encoder *net = NULL;
    int rc;
    LG_TRY(plan(d, c, shape, shards, &net));
    size_t arena = lg_program_arena_bytes(net->program);
    size_t scratch = lg_program_scratch_bytes(net->program);
    LG_TRY_GOTO(rc, lg_device_alloc(d, arena, &net->arena), fail);
    if (scratch) LG_TRY_GOTO(rc, lg_device_alloc(d, scratch, &net->scratch), fail);
    *ret = net;
    return 0;
fail:
    lg_text_encoder_close(&net);
    return rc;
}

void lg_text_encoder_close(lg_text_encoder **net)
{
    if (!*net) return;
    lg_device_free((*net)->device, &(*net)->arena);
    lg_device_free((*net)->device, &(*net)->scratch);
    lg_program_free(&(*net)->program);
    free(*net);
    *net = NULL;
}
