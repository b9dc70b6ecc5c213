/* The denoisers as one type: checks, planning, opening; denoiser_recompute.c says what is recomputed, denoiser_run.c runs them.
 *
 * Design: a net is its model's description (models.h), recorded as a graph; its backward is derived. What the
 * program needs of memory is the plan, so the plan cannot drift from what forward and backward do. Each unit of the
 * parameters is bound by itself, and so is its gradient.
 *
 * Invariant: nothing is allocated after lg_denoiser_open. */
#include "kernels/graph/fuse.h"
#include "kernels/graph/grad.h"
#include "kernels/graph/offload.h"
#include "kernels/graph/recompute.h"
#include "stages/nets/denoiser_private.h"
#include "stages/nets/storage.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    DEPTH_MAX = LG_DENOISER_DEPTH_MAX,
    OFFLOAD_MIN = 32 << 10 /* bytes of a value that are worth a copy */
};

/* One size of a text: something if it is wanted, else 0. */
static int check_text_size(const char *text, const char *what, int value, bool is_wanted)
{
    if (is_wanted ? value >= 1 && value <= LG_MODEL_WIDTH_MAX : value == 0) return 0;
    if (!is_wanted)
        return LG_FAIL(LG_ERR_CONFIG, "model: %s of text.%s is %d, but the model wants none", what,
                       text, value);
    return LG_FAIL(LG_ERR_CONFIG, "model: %s of text.%s is %d; 1 to %d are possible", what, text,
                   value, LG_MODEL_WIDTH_MAX);
}

static int check_texts(const struct lg_denoiser_config *c)
{
    const struct lg_denoiser_text_info *has;
    const int n = lg_denoiser_texts(c->kind, &has);
    if (c->n_texts != n && !(c->n_texts == n - 1 && has[n - 1].is_optional))
        return LG_FAIL(LG_ERR_CONFIG, "model: %d texts; a %s has %d", c->n_texts,
                       lg_denoiser_info(c->kind)->name, n);
    for (int k = 0; k < n; k++) {
        const struct lg_denoiser_text *t = &c->text[k];
        const bool states = has[k].states != LG_TEXT_OUTPUTS;
        LG_TRY(check_text_size(has[k].name, "the length", t->length, states));
        LG_TRY(check_text_size(has[k].name, "the width", t->width, states));
        LG_TRY(check_text_size(has[k].name, "the pooled width", t->pooled,
                               has[k].pooled != LG_TEXT_OUTPUTS));
    }
    return 0;
}

int lg_denoiser_numbers(const struct lg_denoiser_config *c)
{
    const int own = lg_model_of(c->kind)->size_numbers;
    return !c->size_conditions ? 0 : own ? own : 2;
}

bool lg_denoiser_has_ratio(const struct lg_denoiser_config *c)
{
    return c->size_conditions && !lg_model_of(c->kind)->size_numbers;
}

int lg_denoiser_config_check(const struct lg_denoiser_config *c)
{
#define WANT(cond, ...)                                                                            \
    if (!(cond)) return LG_FAIL(LG_ERR_CONFIG, "model: " __VA_ARGS__)
    WANT(c->kind < LG_DENOISER_KINDS, "unknown kind %d", (int)c->kind);
    WANT(c->channels >= 1 && c->channels <= LG_MODEL_SIDE_MAX, "%d latent channels", c->channels);
    WANT(c->height >= 1 && c->height <= LG_MODEL_SIDE_MAX && c->width >= 1 &&
             c->width <= LG_MODEL_SIDE_MAX,
         "a latent of %d x %d; 1 to %d are possible", c->height, c->width, LG_MODEL_SIDE_MAX);
    WANT(c->frames >= 0 && c->frames <= LG_MODEL_SIDE_MAX &&
             (int64_t)lg_denoiser_frames(c) * c->height <= LG_MODEL_ROWS_MAX,
         "%d frames of height %d of the latent; at most %d frames, and %d rows of all of them",
         c->frames, c->height, LG_MODEL_SIDE_MAX, LG_MODEL_ROWS_MAX);
    WANT(lg_denoiser_frames(c) == 1 || lg_denoiser_info(c->kind)->clips,
         "%d frames of the latent; a %s takes pictures: set data.frames = 1", c->frames,
         lg_denoiser_info(c->kind)->name);
    WANT(c->patch >= 1 && c->height % c->patch == 0 && c->width % c->patch == 0,
         "a latent of %d x %d cannot be cut into patches of %d; change patch or data.size",
         c->height, c->width, c->patch);
    WANT(c->hidden >= 4 && c->hidden <= LG_MODEL_WIDTH_MAX && c->hidden % 4 == 0,
         "hidden = %d; the sinusoidal positions want a multiple of 4, at most %d", c->hidden,
         LG_MODEL_WIDTH_MAX);
    WANT(c->heads >= 1 && c->hidden % c->heads == 0,
         "hidden = %d does not divide into %d heads; change hidden or heads", c->hidden, c->heads);
    WANT(c->depth >= 1 && c->depth <= DEPTH_MAX, "depth = %d; 1 to %d are possible", c->depth,
         DEPTH_MAX);
    WANT(c->mlp_ratio == 4, "mlp_ratio = %d; diffusers' models have 4 built in, set it to 4",
         c->mlp_ratio);
    WANT(c->sample_size >= 0 && c->sample_size <= LG_MODEL_SIDE_MAX,
         "sample_size = %d; 1 to %d are possible", c->sample_size, LG_MODEL_SIDE_MAX);
    WANT(c->interpolation >= 0 && c->interpolation < 1e6,
         "interpolation_scale = %g; it lies between 0 and 1e6", c->interpolation);
    WANT(c->norm_eps > 0 && c->norm_eps < 1, "norm_eps = %g; it lies between 0 and 1", c->norm_eps);
#undef WANT
    LG_TRY(check_texts(c));
    return lg_model_of(c->kind)->check(c);
}

/* Rows of the latent that stay together when a sequence is split: of patches, or frames. */
static int rows_together(const struct lg_denoiser_config *c)
{
    return lg_model_of(c->kind)->has_frame_table ? c->height : c->patch;
}

int lg_denoiser_band(const struct lg_denoiser_config *c, const struct lg_sequence *s,
                     struct lg_band *ret)
{
    const int together = rows_together(c), rows = lg_denoiser_rows(c) / together;
    *ret = (struct lg_band){.height = lg_denoiser_rows(c), .share = 1};
    if (!lg_sequence_is_split(s)) return 0;
    LG_ASSERT(s->rank >= 0 && s->rank < s->degree);
    if (!lg_denoiser_info(c->kind)->is_split)
        return LG_FAIL(LG_ERR_CONFIG,
                       "a %s has no sequence that several ranks could share: set parallel.sp = 1",
                       lg_denoiser_info(c->kind)->name);
    const struct lg_model *m = lg_model_of(c->kind);
    if (m->has_frame_table && (s->degree > rows || s->degree > LG_RANKS_MAX))
        return LG_FAIL(
            LG_ERR_CONFIG,
            "a sequence of %d frames of the latent, which a %s has whole, cannot be split "
            "among %d ranks; use at most %d",
            rows, lg_denoiser_info(c->kind)->name, s->degree, LG_MIN(rows, LG_RANKS_MAX));
    if (m->turns_channels && s->kind == LG_SEQUENCE_FASTSEQ)
        return LG_FAIL(LG_ERR_CONFIG,
                       "a %s has norms over the queries and keys of all heads, which parallel."
                       "sp_kind = \"fastseq\" would make apart: set it to \"ulysses\"",
                       lg_denoiser_info(c->kind)->name);
    if (s->degree > rows || s->degree > LG_RANKS_MAX)
        return LG_FAIL(LG_ERR_CONFIG,
                       "a sequence of %d rows of patches (a latent of height %d, patches of %d) "
                       "cannot be split among %d ranks; use at most %d",
                       rows, lg_denoiser_rows(c), c->patch, s->degree, LG_MIN(rows, LG_RANKS_MAX));
    if (m->text_tokens && s->degree > m->text_tokens(c))
        return LG_FAIL(LG_ERR_CONFIG,
                       "texts of %d tokens cannot be split among %d ranks of a sequence; use at "
                       "most %d",
                       m->text_tokens(c), s->degree, m->text_tokens(c));
    if (s->degree > c->heads)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%d heads of attention cannot be split among %d ranks of a sequence; use at "
                       "most %d",
                       c->heads, s->degree, c->heads);
    const struct lg_cut cut = lg_cut_evenly(0, rows, together, s->degree);
    ret->first = (int)cut.at[s->rank];
    ret->height = (int)cut.at[s->rank + 1] - ret->first;
    ret->share = (double)ret->height / lg_denoiser_rows(c);
    return 0;
}

static int common_divisor(int a, int b)
{
    return b ? common_divisor(b, a % b) : a;
}

int lg_denoiser_time_rows(const struct lg_denoiser_config *c, const struct lg_band *band,
                          bool frame_times)
{
    if (!frame_times || lg_denoiser_frames(c) == 1) return band->height;
    return common_divisor(common_divisor(c->height, band->first), band->height);
}

/* ---- the description ---- */

/* Of so many rows of the latent. */
static int64_t tokens(const struct lg_denoiser_config *c, int height)
{
    return (int64_t)(height / c->patch) * (c->width / c->patch);
}

/* So many rows of so many samples, with so many timesteps each. */
struct samples {
    int64_t batch, times;
    int height;
    lg_dtype type, stats;
};

/* What is fixed of them, of the compute type; or, angles, of statistics': of their tokens, or, where texts are in the sequence, of
 * all. rank 0: nothing. */
static lg_tensor positions_shape(const struct lg_denoiser_config *c, struct samples s)
{
    const struct lg_model *m = lg_model_of(c->kind);
    const int64_t of_frames = lg_denoiser_frames(c) > 1 ? s.batch * (s.height / c->height) : 0;
    if (m->has_frame_table) return lg_t2(NULL, s.type, tokens(c, c->height) + of_frames, c->hidden);
    if (m->scale) return lg_t2(NULL, s.type, tokens(c, s.height), c->hidden);
    if (m->turns_channels) return lg_t3(NULL, s.stats, 2, tokens(c, s.height), c->hidden / 2);
    if (!m->angles) return LG_NONE;
    const int64_t all = m->text_tokens(c) + tokens(c, lg_denoiser_rows(c));
    return lg_t3(NULL, s.stats, 2, all, c->hidden / c->heads / 2);
}

/* Shapes alone. */
static struct lg_model_input input_shapes(const struct lg_denoiser_config *c, struct samples s)
{
    const int64_t B = s.batch;
    struct lg_model_input in = {.x = lg_t4(NULL, s.type, B, c->channels, s.height, c->width),
                                .t = lg_t1(NULL, s.stats, B * s.times)};
    in.positions = positions_shape(c, s);
    if (lg_denoiser_info(c->kind)->labels) in.label = lg_t1(NULL, LG_I32, B);
    const struct lg_denoiser_text_info *has;
    lg_denoiser_texts(c->kind, &has);
    for (int k = 0; k < c->n_texts; k++) {
        const struct lg_denoiser_text *t = &c->text[k];
        if (t->length) in.text[k].states = lg_t3(NULL, s.type, B, t->length, t->width);
        if (t->pooled) in.text[k].pooled = lg_t2(NULL, s.type, B, t->pooled);
        if (has[k].padding != LG_PADDING_SEEN) in.text[k].length = lg_t1(NULL, LG_I32, B);
    }
    if (lg_denoiser_numbers(c)) in.size = lg_t1(NULL, s.stats, lg_denoiser_numbers(c) * B);
    if (lg_denoiser_has_ratio(c)) in.ratio = lg_t1(NULL, s.stats, B);
    if (c->guidance) in.guidance = lg_t1(NULL, s.stats, B);
    return in;
}

static const struct lg_training ALL = {0};
static lg_tensor output_shape(const struct lg_denoiser_config *c, lg_tensor x)
{
    return lg_t4(NULL, x.dtype, x.dim[0], lg_denoiser_out_channels(c), x.dim[2], x.dim[3]);
}

static struct lg_params_grouping grouping_of(const struct lg_training *how)
{
    return (struct lg_params_grouping){how->groups, how->is_8_bit};
}

/* One run of the description for its parameters and products. */
static lg_net declared(const struct lg_denoiser_config *c, const struct lg_training *how)
{
    const struct lg_params_grouping grouping = grouping_of(how);
    lg_net n = lg_net_declare(1);
    n.adapter = how->adapter;
    n.in_blocks = lg_params_in_blocks(&grouping);
    struct lg_model_input in =
        input_shapes(c, (struct samples){n.batch, 1, lg_denoiser_rows(c), n.type, n.stats});
    lg_model_of(c->kind)->describe(&n, c, &in, output_shape(c, in.x));
    return n;
}

int lg_denoiser_params(const struct lg_denoiser_config *c, lg_params *ret)
{
    return lg_denoiser_table(c, &ALL, ret);
}

static int check_targets(const struct lg_adapter *a, const lg_params *t)
{
    for (const char *const *target = a->targets; target && *target; target++) {
        const struct lg_adapter one = {.rank = 1, .targets = (const char *const[]){*target, NULL}};
        bool fits = false;
        for (int i = 0; i < t->n && !fits; i++) {
            char module[LG_PARAM_NAME_BYTES];
            size_t n = strlen(t->p[i].name), tail = sizeof LG_ADAPTER_UP - 1;
            if (!lg_adapter_owns(t->p[i].name)) continue;
            snprintf(module, sizeof module, "%.*s", (int)(n - tail), t->p[i].name);
            fits = lg_adapter_takes(&one, module);
        }
        if (!fits)
            return LG_FAIL(LG_ERR_CONFIG,
                           "adapter.targets: \"%s\" fits none of the model's linears; write "
                           "\"attention\", \"linear\", or patterns of their names, as "
                           "\"transformer_blocks.*.attn1.to_q\"",
                           *target);
    }
    return 0;
}

/* Does anything in 8 bits have its storage of this group? 0: of none that has one of its own, that is, of model.frozen. */
static bool stores(const lg_params *t, int group)
{
    for (int i = t->trained; i < t->n; i++)
        if (t->p[i].in_8_bits && (t->group[t->p[i].group].has_storage ? t->p[i].group : 0) == group)
            return true;
    return false;
}

static int store_frozen(lg_storage storage, lg_params *t)
{
    char what[sizeof t->group->pattern + 48] = "model.frozen";
    lg_storage_set(t, storage, t->trained);
    for (int g = 0; g < t->n_groups; g++) {
        const struct lg_param_group *of = &t->group[g];
        if (g) snprintf(what, sizeof what, "storage of trainer.groups' \"%s\"", of->pattern);
        if ((g ? of->storage : storage) != LG_STORAGE_AUTO && !stores(t, g))
            return LG_FAIL(LG_ERR_CONFIG,
                           "%s is for the matrices of at least %d elements in blocks that are not "
                           "trained, of which there are none here; leave it at \"auto\"",
                           what, LG_STORAGE_MIN);
    }
    return 0;
}

static int sort_table(const struct lg_training *how, lg_params *t)
{
    const struct lg_params_grouping grouping = grouping_of(how);
    if (how->adapter.rank) {
        LG_TRY(check_targets(&how->adapter, t));
        for (int i = 0; i < t->n; i++) t->p[i].is_fixed |= !lg_adapter_owns(t->p[i].name);
    }
    LG_TRY(lg_params_group(t, &grouping));
    LG_TRY(lg_params_split(t));
    return store_frozen(how->frozen, t);
}

int lg_denoiser_table(const struct lg_denoiser_config *c, const struct lg_training *how,
                      lg_params *ret)
{
    LG_TRY(lg_denoiser_config_check(c));
    lg_net n = declared(c, how);
    *ret = lg_net_finish(&n);
    int rc = sort_table(how, ret);
    if (rc < 0) lg_params_free(ret);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

double lg_denoiser_flops(const struct lg_denoiser_config *c)
{
    lg_net n = declared(c, &ALL);
    double flops = n.flops;
    lg_params t = lg_net_finish(&n);
    lg_params_free(&t);
    return flops;
}

/* ---- the graph ---- */

/* An input that the model does not have is bound to nothing. */
static void bind_input(lg_graph *g, const char *name, lg_tensor *t)
{
    static const lg_tensor none = {.dtype = LG_I32, .rank = 1, .dim = {1}};
    lg_tensor bound = lg_graph_bind(g, name, t->rank ? *t : none);
    if (t->rank) *t = bound;
}

/* Names are those of a net with one text where there is one: "text", else "text.t5". */
static void bind_text(lg_graph *g, const char *of, struct lg_text_states *text)
{
    struct {
        const char *name;
        lg_tensor *t;
    } bound[] = {
        {"text", &text->states}, {"pooled", &text->pooled}, {"text length", &text->length}};
    for (size_t i = 0; i < LG_ARRAY_LEN(bound); i++) {
        char name[48];
        snprintf(name, sizeof name, "%s%s%s", bound[i].name, *of ? "." : "", of);
        bind_input(g, name, bound[i].t);
    }
}

static void bind_inputs(lg_graph *g, const struct lg_denoiser_config *c, struct lg_model_input *in)
{
    const struct lg_denoiser_text_info *has;
    const int texts = lg_denoiser_texts(c->kind, &has);
    struct {
        const char *name;
        lg_tensor *t;
    } bound[] = {
        [BOUND_X] = {"x", &in->x},
        [BOUND_T] = {"t", &in->t},
        [BOUND_LABEL] = {"label", &in->label},
        [BOUND_SIZE] = {"size", &in->size},
        [BOUND_RATIO] = {"ratio", &in->ratio},
        [BOUND_GUIDANCE] = {"guidance", &in->guidance},
        [BOUND_POSITIONS] = {"positions", &in->positions},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(bound); i++) bind_input(g, bound[i].name, bound[i].t);
    for (int k = 0; k < LG_TEXTS_MAX; k++)
        bind_text(g, texts > 1 && k < texts ? has[k].name : "", &in->text[k]);
}

static lg_tensor bind_gradient(lg_graph *g, const struct lg_param_unit *unit, lg_dtype type)
{
    char name[48];
    snprintf(name, sizeof name, "d %s", unit->name);
    return lg_graph_bind_sum(g, name, lg_t1(NULL, type, (int64_t)unit->count));
}

static void add_backward(lg_denoiser *net, const lg_net *n, lg_tensor out, lg_tensor dout)
{
    const int units = net->params.trained_units;
    const lg_dtype type = lg_denoiser_grad_type(net->device);
    struct lg_gradient given = {out, dout}, *wanted = calloc((size_t)units, sizeof *wanted);
    LG_ASSERT(wanted);
    for (int u = 0; u < units; u++)
        wanted[u] =
            (struct lg_gradient){n->weights[u], bind_gradient(n->g, &net->params.unit[u], type)};
    lg_graph_grad(n->g, &(struct lg_gradients){.given = &given,
                                               .n_given = 1,
                                               .wanted = wanted,
                                               .n_wanted = units,
                                               .unread = n->unread,
                                               .n_unread = n->n_unread});
    free(wanted);
}

static struct lg_cut cut_tokens(const struct lg_denoiser_config *c, const struct lg_sequence *s)
{
    const int together = rows_together(c);
    return lg_cut_evenly(1, lg_denoiser_rows(c) / together, tokens(c, together), s->degree);
}

/* Where texts are no part of the sequence: of nothing. */
static struct lg_cut cut_texts(const struct lg_denoiser_config *c, const struct lg_sequence *s)
{
    const struct lg_model *m = lg_model_of(c->kind);
    if (!m->text_tokens) return (struct lg_cut){.dim = 1};
    return lg_cut_evenly(1, m->text_tokens(c), 1, s->degree);
}

/* Forward and, with train, backward; nothing is repeated yet. */
static lg_net record(lg_denoiser *net)
{
    lg_net n = lg_net_record(net->device, &net->params, net->mode.batch);
    const struct lg_denoiser_config *c = &net->config;
    struct lg_model_input in =
        input_shapes(c, (struct samples){n.batch, net->times, net->band.height, n.type, n.stats});
    n.sequence = net->mode.sequence;
    n.adapter = net->mode.training.adapter;
    n.mlp_chunks = net->mode.mlp_chunks;
    if (lg_net_is_split(&n)) {
        n.tokens = cut_tokens(c, &n.sequence);
        n.texts = cut_texts(c, &n.sequence);
    }
    bind_inputs(n.g, c, &in);
    const lg_tensor shape = output_shape(c, in.x);
    lg_tensor out = lg_graph_bind(n.g, "out", shape), dout = lg_graph_bind(n.g, "d out", shape);
    lg_net_bind(&n);
    net->model->describe(&n, c, &in, out);
    if (net->mode.train) add_backward(net, &n, out, dout);
    lg_graph_fuse(n.g);
    return n;
}

/* Parameters that are one product are one part. */
static void lend_gradients(const lg_denoiser *net, lg_graph *g)
{
    const lg_params *t = &net->params;
    const size_t element = lg_dtype_bytes(lg_denoiser_grad_type(net->device));
    for (int i = 0, end; i < t->trained; i = end) {
        const struct lg_param *p = &t->p[i], *last = p;
        for (end = i + 1; end < t->trained && t->p[end].packed; end++) last = &t->p[end];
        lg_graph_lend(g,
                      (struct lg_lent){.bound = BOUND_WEIGHTS + t->n_units + p->unit,
                                       .at = p->offset * element,
                                       .bytes = (last->offset + last->count - p->offset) * element,
                                       .offset = (p->offset - t->unit[p->unit].first) * element});
    }
}

static void recompute(const lg_denoiser *net, lg_graph *g, const unsigned *drop)
{
    const int blocks = net->config.depth;
    unsigned *of = calloc((size_t)blocks, sizeof *of);
    LG_ASSERT(of);
    for (int b = 0; b < blocks; b++) {
        of[b] = drop[b];
        if (net->mode.mlp_chunks > 1 && (drop[b] & LG_DROP_ALL)) of[b] |= LG_DROP_APART;
    }
    lg_graph_recompute(g, of);
    free(of);
}

int lg_denoiser_compile_dropping(lg_denoiser *net, const unsigned *drop)
{
    lg_net n = record(net);
    lg_program_free(&net->program);
    if (net->mode.train) recompute(net, n.g, drop);
    if (net->mode.train) lg_graph_repeat_weights(n.g);
    if (net->mode.train && net->mode.offload)
        lg_graph_offload(n.g, OFFLOAD_MIN, net->mode.offload_keep);
    if (net->mode.train && net->mode.lends) lend_gradients(net, n.g);
    for (int u = 0; u < net->params.trained_units && net->mode.places_weights; u++)
        lg_graph_place_input(n.g, BOUND_WEIGHTS + u, net->mode.ahead);
    return lg_net_compile(&n, &net->program);
}

void lg_denoiser_set_band(lg_denoiser *net, const struct lg_band *band)
{
    net->band = *band;
    net->times = band->height / lg_denoiser_time_rows(&net->config, band, net->mode.frame_times);
}

/* ---- planning ---- */

static lg_tensor positions_of(const lg_denoiser *net)
{
    lg_tensor t =
        positions_shape(&net->config, (struct samples){net->mode.batch, 1, net->band.height,
                                                       lg_device_dtype(net->device),
                                                       lg_denoiser_grad_type(net->device)});
    t.data = net->positions;
    return t;
}

static size_t positions_bytes(const lg_denoiser *net)
{
    lg_tensor t = positions_of(net);
    return t.rank ? lg_tensor_bytes(&t) : 0;
}

int lg_denoiser_compile(lg_device *d, const struct lg_denoiser_config *c,
                        const struct lg_denoiser_mode *mode, lg_denoiser **ret)
{
    struct lg_band band;
    LG_TRY(lg_denoiser_config_check(c));
    LG_TRY(lg_denoiser_band(c, &mode->sequence, &band));
    LG_ASSERT(mode->batch >= 1);
    if (mode->frame_times && !lg_denoiser_info(c->kind)->clips)
        return LG_FAIL(LG_ERR_CONFIG, "a %s has no frames that could have timesteps of their own",
                       lg_denoiser_info(c->kind)->name);
    lg_denoiser *net = calloc(1, sizeof *net);
    LG_ASSERT(net);
    *net = (lg_denoiser){.config = *c, .model = lg_model_of(c->kind), .device = d, .mode = *mode};
    lg_denoiser_set_band(net, &band);
    int rc;
    LG_TRY_GOTO(rc, lg_denoiser_table(c, &mode->training, &net->params), fail);
    net->bound = calloc((size_t)(BOUND_WEIGHTS + 2 * net->params.n_units), sizeof *net->bound);
    LG_ASSERT(net->bound);
    LG_TRY_GOTO(rc, lg_denoiser_compile_mode(net), fail);
    net->bytes.activations = lg_program_arena_bytes(net->program) + positions_bytes(net);
    net->bytes.scratch = lg_program_scratch_bytes(net->program);
    net->bytes.host = lg_program_host_bytes(net->program);
    net->bytes.exchanged = lg_program_exchanged_bytes(net->program);
    net->bytes.lent = lg_program_lent_bytes(net->program);
    net->bytes.traffic = lg_program_traffic(net->program);
    lg_denoiser_find_events(net);
    *ret = net;
    return 0;
fail:
    lg_denoiser_close(&net);
    return rc;
}

int lg_denoiser_plan(lg_device *d, const struct lg_denoiser_config *c,
                     const struct lg_denoiser_mode *mode, struct lg_denoiser_bytes *ret)
{
    lg_denoiser *net;
    LG_TRY(lg_denoiser_compile(d, c, mode, &net));
    *ret = net->bytes;
    lg_denoiser_close(&net);
    return 0;
}

const struct lg_denoiser_bytes *lg_denoiser_bytes_of(const lg_denoiser *net)
{
    return &net->bytes;
}

int lg_denoiser_print(lg_device *d, const struct lg_denoiser_config *c,
                      const struct lg_denoiser_mode *mode, FILE *to)
{
    lg_denoiser *net;
    LG_TRY(lg_denoiser_compile(d, c, mode, &net));
    if (net->bytes.recomputed[0]) fprintf(to, "recomputed: %s\n", net->bytes.recomputed);
    lg_program_print(net->program, to);
    lg_denoiser_close(&net);
    return 0;
}

/* ---- life ---- */

/* From texts, then the image to the order in which a split sequence has its tokens (joint.h): each rank's text, then its
 * image. */
static void deal_angles(const lg_denoiser *net, float *angles)
{
    const struct lg_sequence *s = &net->mode.sequence;
    const struct lg_cut text = cut_texts(&net->config, s), x = cut_tokens(&net->config, s);
    const int64_t pairs = net->config.hidden / net->config.heads / 2, S = text.at[s->degree];
    const int64_t each = (S + x.at[s->degree]) * pairs; /* of cosines, and of sines */
    float *from = malloc((size_t)each * sizeof *from);
    LG_ASSERT(from);
    for (float *to = angles, *end = angles + 2 * each; to < end;) {
        memcpy(from, to, (size_t)each * sizeof *from);
        for (int p = 0; p < s->degree; p++) {
            const int64_t rows[2][2] = {{text.at[p], text.at[p + 1]},
                                        {S + x.at[p], S + x.at[p + 1]}};
            for (int i = 0; i < 2; i++) {
                const int64_t count = (rows[i][1] - rows[i][0]) * pairs;
                memcpy(to, from + rows[i][0] * pairs, (size_t)count * sizeof *to);
                to += count;
            }
        }
    }
    free(from);
}

/* Of two tables of all tokens the band's, (2, T, pairs). */
static void take_angles(const lg_denoiser *net, float *angles)
{
    const struct lg_denoiser_config *c = &net->config;
    const size_t pairs = (size_t)c->hidden / 2,
                 all = (size_t)tokens(c, lg_denoiser_rows(c)) * pairs;
    const size_t first = (size_t)tokens(c, net->band.first) * pairs;
    const size_t own = (size_t)tokens(c, net->band.height) * pairs;
    memmove(angles, angles + first, own * sizeof *angles);
    memmove(angles + own, angles + all + first, own * sizeof *angles);
}

/* Those of the band, or, where texts are in the sequence, of all. ret has place for those of the whole latent. */
static void compute_positions(const lg_denoiser *net, float *ret)
{
    const struct lg_denoiser_config *c = &net->config;
    if (net->model->angles) {
        net->model->angles(c, ret);
        if (net->model->turns_channels)
            take_angles(net, ret);
        else if (lg_sequence_is_split(&net->mode.sequence))
            deal_angles(net, ret);
        return;
    }
    const int side = c->sample_size ? c->sample_size : c->height;
    const size_t D = (size_t)c->hidden, place = (size_t)tokens(c, c->height) * D;
    const struct lg_grid grid = {.rows = c->height / c->patch,
                                 .columns = c->width / c->patch,
                                 .base = side / c->patch,
                                 .scale = c->interpolation > 0 ? c->interpolation
                                                               : net->model->scale(side)};
    lg_net_positions(&grid, c->hidden, ret);
    if (!net->model->has_frame_table) {
        const size_t first = (size_t)tokens(c, net->band.first) * D;
        memmove(ret, ret + first, (size_t)tokens(c, net->band.height) * D * sizeof *ret);
    } else if (lg_denoiser_frames(c) > 1) {
        const int frames = net->band.height / c->height;
        for (int b = 0; b < net->mode.batch; b++)
            lg_net_frame_positions(net->band.first / c->height, frames, c->hidden,
                                   ret + place + (size_t)b * (size_t)frames * D);
    }
}

static int upload_positions(lg_denoiser *net)
{
    const struct lg_denoiser_config *c = &net->config;
    lg_tensor pos = positions_of(net), from = pos;
    const size_t count = (size_t)lg_numel(&pos);
    void *staged = NULL;
    lg_stream *s = NULL;
    float *host =
        malloc(LG_MAX(count, (size_t)(tokens(c, lg_denoiser_rows(c)) * c->hidden)) * sizeof *host);
    LG_ASSERT(host);
    compute_positions(net, host);
    int rc;
    LG_TRY_GOTO(rc, lg_device_alloc(net->device, count * sizeof *host, &staged), out);
    LG_TRY_GOTO(rc, lg_stream_open(net->device, &s), out);
    lg_stream_upload(s, staged, host, count * sizeof *host);
    from.data = staged;
    from.dtype = LG_F32;
    lg_cast(s, &(struct lg_cast_args){.x = from, .y = pos});
    lg_stream_sync(s);
out:
    if (s) lg_stream_close(&s);
    lg_device_free(net->device, &staged);
    free(host);
    return rc;
}

static int open_host(lg_denoiser *net, size_t bytes)
{
    if (!bytes) return 0;
    void *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host == MAP_FAILED)
        return LG_FAIL(LG_ERR_NOSPACE, "no %zu bytes of host memory for offloaded activations",
                       bytes);
    net->host = host;
    net->host_bytes = bytes;
    LG_TRY(lg_device_pin(net->device, host, bytes));
    net->is_pinned = true;
    return 0;
}

static void close_host(lg_denoiser *net)
{
    if (!net->host || net->borrows) return;
    if (net->is_pinned) lg_device_unpin(net->device, net->host);
    munmap(net->host, net->host_bytes);
}

/* The largest that any of them needs; activations: the arena alone. */
static struct lg_denoiser_bytes largest(lg_denoiser *const *nets, int n)
{
    struct lg_denoiser_bytes most = nets[0]->bytes;
    most.activations = 0;
    for (int i = 0; i < n; i++) {
        const size_t arena = lg_program_arena_bytes(nets[i]->program);
        if (arena > most.activations)
            memcpy(most.recomputed, nets[i]->bytes.recomputed, sizeof most.recomputed);
        most.activations = LG_MAX(most.activations, arena);
        most.scratch = LG_MAX(most.scratch, nets[i]->bytes.scratch);
        most.host = LG_MAX(most.host, nets[i]->bytes.host);
        most.exchanged = LG_MAX(most.exchanged, nets[i]->bytes.exchanged);
        most.traffic = LG_MAX(most.traffic, nets[i]->bytes.traffic);
        most.lent = LG_MAX(most.lent, nets[i]->bytes.lent);
    }
    return most;
}

struct lg_denoiser_bytes lg_denoiser_bytes_of_all(lg_denoiser *const *nets, int n)
{
    struct lg_denoiser_bytes b = largest(nets, n);
    for (int i = 0; i < n; i++) b.activations += positions_bytes(nets[i]);
    return b;
}

int lg_denoiser_open_all(lg_denoiser *const *nets, int n)
{
    lg_denoiser *owner = nets[0];
    const struct lg_denoiser_bytes most = largest(nets, n);
    if (most.activations) /* else all of them lie in what is lent */
        LG_TRY(lg_device_alloc(owner->device, most.activations, &owner->arena));
    if (most.scratch) LG_TRY(lg_device_alloc(owner->device, most.scratch, &owner->scratch));
    LG_TRY(open_host(owner, most.host));
    for (int i = 0; i < n; i++) {
        lg_denoiser *net = nets[i];
        LG_ASSERT(net->device == owner->device);
        if (i) {
            net->borrows = true;
            net->arena = owner->arena;
            net->scratch = owner->scratch;
            net->host = owner->host;
        }
        if (positions_bytes(net)) {
            LG_TRY(lg_device_alloc(net->device, positions_bytes(net), &net->positions));
            LG_TRY(upload_positions(net));
        }
        if (net->bytes.host) LG_TRY(lg_program_open_lanes(net->program, net->device));
    }
    return 0;
}

int lg_denoiser_open(lg_device *d, const struct lg_denoiser_config *c,
                     const struct lg_denoiser_mode *mode, lg_denoiser **ret)
{
    lg_denoiser *net;
    LG_TRY(lg_denoiser_compile(d, c, mode, &net));
    int rc;
    LG_TRY_GOTO(rc, lg_denoiser_open_all(&net, 1), fail);
    *ret = net;
    return 0;
fail:
    lg_denoiser_close(&net);
    return rc;
}

void lg_denoiser_close(lg_denoiser **net)
{
    if (!*net) return;
    if (!(*net)->borrows) {
        lg_device_free((*net)->device, &(*net)->arena);
        lg_device_free((*net)->device, &(*net)->scratch);
    }
    lg_device_free((*net)->device, &(*net)->positions);
    lg_program_free(&(*net)->program); /* its lanes are done before their memory goes */
    close_host(*net);
    lg_params_free(&(*net)->params);
    free((*net)->event);
    free((*net)->bound);
    free(*net);
    *net = NULL;
}
