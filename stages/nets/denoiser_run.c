/* Running a denoiser: at once, or in stretches; see denoiser.h. */
#include "stages/nets/denoiser_private.h"
#include "stages/nets/storage.h"
#include <stdlib.h>

/* ---- events ---- */

static void add_event(lg_denoiser *net, struct lg_denoiser_event e)
{
    net->event[net->n_events++] = e;
}

/* Who is done before node n, then who is needed from it on. range: of the units' weights, then of their gradients. */
static void add_uses(lg_denoiser *net, const struct lg_node_range *range, int n)
{
    static const enum lg_denoiser_event_kind kind[2][2] = {
        {LG_EVENT_WEIGHTS, LG_EVENT_WEIGHTS_DONE}, {LG_EVENT_GRADIENT, LG_EVENT_GRADIENT_DONE}};
    const int units = net->params.n_units;
    for (int done = 1; done >= 0; done--)
        for (int i = 0; i < units + net->params.trained_units; i++)
            if (range[i].end && (done ? range[i].end : range[i].first) == n)
                add_event(net, (struct lg_denoiser_event){.kind = kind[i / units][done],
                                                          .unit = i % units});
}

/* Of units that the loss does not depend on: nothing writes them. */
static void add_unused_gradients(lg_denoiser *net, const struct lg_node_range *range)
{
    const int units = net->params.n_units;
    for (int u = 0; u < net->params.trained_units; u++) {
        if (range[units + u].end) continue;
        add_event(net, (struct lg_denoiser_event){.kind = LG_EVENT_GRADIENT, .unit = u});
        add_event(net, (struct lg_denoiser_event){.kind = LG_EVENT_GRADIENT_DONE, .unit = u});
    }
}

static void add_run(lg_denoiser *net, int from, int to)
{
    if (from < to)
        add_event(net, (struct lg_denoiser_event){.kind = LG_EVENT_RUN, .from = from, .to = to});
}

static void add_exchange(lg_denoiser *net)
{
    int number = 0;
    for (int i = 0; i < net->n_events; i++) number += net->event[i].kind == LG_EVENT_EXCHANGE;
    add_event(net, (struct lg_denoiser_event){.kind = LG_EVENT_EXCHANGE, .exchange = number});
}

static bool is_boundary(const lg_denoiser *net, const struct lg_node_range *range, int n)
{
    for (int i = 0; i < net->params.n_units + net->params.trained_units; i++)
        if (range[i].end && (range[i].first == n || range[i].end == n)) return true;
    return false;
}

static void find_events_of(lg_denoiser *net, enum lg_program_part part, int from, int to)
{
    const int bound = net->params.n_units + net->params.trained_units;
    struct lg_node_range *range = calloc((size_t)bound, sizeof *range);
    LG_ASSERT(range);
    for (int i = 0; i < bound; i++)
        range[i] = lg_program_uses(net->program, BOUND_WEIGHTS + i, part);
    int begun = from;
    for (int n = from; n <= to; n++) {
        const bool exchange = n < to && lg_program_is_exchange(net->program, n);
        if (!exchange && !is_boundary(net, range, n)) continue;
        add_run(net, begun, n);
        add_uses(net, range, n);
        if (exchange) add_exchange(net);
        begun = n + exchange;
    }
    add_run(net, begun, to);
    if (part == LG_PROGRAM_BACKWARD) add_unused_gradients(net, range);
    free(range);
}

void lg_denoiser_find_events(lg_denoiser *net)
{
    const int forward = lg_program_nodes(net->program, LG_PROGRAM_FORWARD);
    /* Six of a unit, and the exchanges, and what is run before each. */
    const int exchanges = lg_program_exchanges(net->program);
    net->event = calloc((size_t)(12 * net->params.n_units + 2 * exchanges + 4), sizeof *net->event);
    LG_ASSERT(net->event);
    find_events_of(net, LG_PROGRAM_FORWARD, 0, forward);
    net->n_forward = net->n_events;
    if (net->mode.train)
        find_events_of(net, LG_PROGRAM_BACKWARD, forward,
                       lg_program_nodes(net->program, LG_PROGRAM_ALL));
}

const struct lg_denoiser_event *lg_denoiser_events(const lg_denoiser *net, int *ret_n,
                                                   int *ret_forward)
{
    *ret_n = net->n_events;
    *ret_forward = net->n_forward;
    return net->event;
}

/* From event i on, the next that is no run; n_events: none. */
static int next_of_caller(const lg_denoiser *net, int i)
{
    while (i < net->n_events && net->event[i].kind == LG_EVENT_RUN) i++;
    return i;
}

bool lg_denoiser_same_events(const lg_denoiser *a, const lg_denoiser *b)
{
    for (int i = 0, k = 0;; i++, k++) {
        i = next_of_caller(a, i);
        k = next_of_caller(b, k);
        if (i == a->n_events || k == b->n_events) return i == a->n_events && k == b->n_events;
        const struct lg_denoiser_event *x = &a->event[i], *y = &b->event[k];
        if (x->kind != y->kind || x->unit != y->unit || x->exchange != y->exchange ||
            (i < a->n_forward) != (k < b->n_forward))
            return false;
    }
}

/* ---- running ---- */

static void check_texts(const lg_denoiser *net, const struct lg_denoiser_input *in)
{
    const int64_t B = net->mode.batch;
    const lg_dtype type = lg_device_dtype(net->device);
    const struct lg_denoiser_text_info *has;
    lg_denoiser_texts(net->config.kind, &has);
    for (int k = 0; k < net->config.n_texts; k++) {
        const struct lg_denoiser_text *t = &net->config.text[k];
        const struct lg_text_states *x = &in->text[k];
        if (t->length)
            LG_ASSERT(x->states.rank == 3 && x->states.dim[0] == B && x->states.dtype == type &&
                      x->states.dim[1] == t->length && x->states.dim[2] == t->width);
        if (t->pooled)
            LG_ASSERT(x->pooled.rank == 2 && x->pooled.dim[0] == B && x->pooled.dtype == type &&
                      x->pooled.dim[1] == t->pooled);
        if (has[k].padding != LG_PADDING_SEEN)
            LG_ASSERT(x->length.rank == 1 && x->length.dim[0] == B);
    }
}

static void check_input(const lg_denoiser *net, const struct lg_denoiser_input *in, lg_tensor out)
{
    const struct lg_denoiser_config *c = &net->config;
    const int64_t B = net->mode.batch, want[4] = {B, c->channels, net->band.height, c->width};
    const lg_dtype type = lg_device_dtype(net->device);
    for (int i = 0; i < 4; i++)
        LG_ASSERT(in->x.dim[i] == want[i] &&
                  out.dim[i] == (i == 1 ? lg_denoiser_out_channels(c) : want[i]));
    LG_ASSERT(in->x.dtype == type && out.dtype == type);
    LG_ASSERT(lg_numel(&in->t) == B * net->times &&
              in->t.dtype == lg_denoiser_grad_type(net->device));
    const int64_t numbers = lg_denoiser_numbers(c) * B;
    if (numbers) LG_ASSERT(lg_numel(&in->size) == numbers && in->size.dtype == in->t.dtype);
    if (lg_denoiser_has_ratio(c))
        LG_ASSERT(lg_numel(&in->ratio) == B && in->ratio.dtype == in->t.dtype);
    if (c->guidance) LG_ASSERT(lg_numel(&in->guidance) == B && in->guidance.dtype == in->t.dtype);
    if (lg_denoiser_info(c->kind)->labels) LG_ASSERT(in->label.rank == 1 && in->label.dim[0] == B);
    check_texts(net, in);
}

static void begin(lg_denoiser *net, const struct lg_denoiser_input *in, lg_tensor out)
{
    check_input(net, in, out);
    net->bound[BOUND_X] = in->x.data;
    net->bound[BOUND_T] = in->t.data;
    net->bound[BOUND_LABEL] = in->label.data;
    for (int k = 0; k < LG_TEXTS_MAX; k++) {
        void **of = &net->bound[BOUND_TEXT + 3 * k];
        of[0] = in->text[k].states.data;
        of[1] = in->text[k].pooled.data;
        of[2] = in->text[k].length.data;
    }
    net->bound[BOUND_SIZE] = in->size.data;
    net->bound[BOUND_RATIO] = in->ratio.data;
    net->bound[BOUND_GUIDANCE] = in->guidance.data;
    net->bound[BOUND_POSITIONS] = net->positions;
}

void lg_denoiser_begin_forward(lg_denoiser *net, const struct lg_denoiser_input *in, lg_tensor out)
{
    begin(net, in, out);
    net->bound[BOUND_OUT] = out.data;
    net->adds = false;
    net->kept = false;
}

void lg_denoiser_begin_backward(lg_denoiser *net, const struct lg_denoiser_input *in,
                                lg_tensor dout, bool accumulate)
{
    LG_ASSERT(net->kept);
    begin(net, in, dout);
    net->bound[BOUND_DOUT] = dout.data;
    net->adds = accumulate;
    net->kept = false;
}

void lg_denoiser_set_weights(lg_denoiser *net, int unit, const void *weights)
{
    LG_ASSERT(unit >= 0 && unit < net->params.n_units);
    net->bound[BOUND_WEIGHTS + unit] = (void *)weights;
}

void lg_denoiser_set_gradient(lg_denoiser *net, int unit, void *gradient)
{
    LG_ASSERT(unit >= 0 && unit < net->params.trained_units);
    net->bound[BOUND_WEIGHTS + net->params.n_units + unit] = gradient;
}

void lg_denoiser_set_exchanged(lg_denoiser *net, void *memory)
{
    net->exchanged = memory;
}

void lg_denoiser_set_lent(lg_denoiser *net, void *gradients)
{
    LG_ASSERT(net->mode.lends);
    net->lent = gradients;
}

static struct lg_program_memory memory_of(const lg_denoiser *net)
{
    return (struct lg_program_memory){.arena = net->arena,
                                      .scratch = net->scratch,
                                      .host = net->host,
                                      .exchanged = net->exchanged,
                                      .lent = net->lent,
                                      .bound = net->bound,
                                      .add = net->adds};
}

void *lg_denoiser_weights_place(const lg_denoiser *net, int unit, bool backward)
{
    const struct lg_program_memory m = memory_of(net);
    LG_ASSERT(unit >= 0 && unit < net->params.trained_units);
    return lg_program_input_at(net->program, &m, BOUND_WEIGHTS + unit, backward);
}

struct lg_sent lg_denoiser_sends(const lg_denoiser *net, int exchange, int to, void *theirs)
{
    const struct lg_program_memory m = memory_of(net);
    return lg_program_sends(net->program, &m, exchange, to, theirs);
}

struct lg_arrival lg_denoiser_arrival(const lg_denoiser *net, int exchange)
{
    return lg_program_arrival(net->program, exchange);
}

static void run_nodes(lg_denoiser *net, lg_stream *s, int from, int to)
{
    const struct lg_program_memory m = memory_of(net);
    lg_program_run_nodes(net->program, s, &m, from, to);
    if (to == lg_program_nodes(net->program, LG_PROGRAM_FORWARD)) net->kept = net->mode.train;
}

void lg_denoiser_run(lg_denoiser *net, lg_stream *s, const struct lg_denoiser_event *e)
{
    LG_ASSERT(e->kind == LG_EVENT_RUN);
    run_nodes(net, s, e->from, e->to);
}

lg_dtype lg_denoiser_grad_type(const lg_device *d)
{
    return lg_device_dtype(d) == LG_F64 ? LG_F64 : LG_F32;
}

static void *of_unit(const lg_denoiser *net, const void *flat, int unit, lg_dtype type)
{
    return (char *)flat + lg_stored_unit_at(&net->params, unit, type);
}

void lg_denoiser_forward(lg_denoiser *net, lg_stream *s, const void *weights,
                         const struct lg_denoiser_input *in, lg_tensor out)
{
    LG_ASSERT(!lg_sequence_is_split(&net->mode.sequence)); /* it runs in stretches */
    lg_denoiser_begin_forward(net, in, out);
    for (int u = 0; u < net->params.n_units; u++)
        lg_denoiser_set_weights(net, u, of_unit(net, weights, u, lg_device_dtype(net->device)));
    run_nodes(net, s, 0, lg_program_nodes(net->program, LG_PROGRAM_FORWARD));
}

void lg_denoiser_backward(lg_denoiser *net, lg_stream *s, const void *weights,
                          const struct lg_denoiser_input *in, lg_tensor dout, void *grads,
                          bool accumulate)
{
    const lg_dtype type = lg_denoiser_grad_type(net->device);
    LG_ASSERT(!lg_sequence_is_split(&net->mode.sequence));
    lg_denoiser_begin_backward(net, in, dout, accumulate);
    for (int u = 0; u < net->params.n_units; u++) {
        lg_denoiser_set_weights(net, u, of_unit(net, weights, u, lg_device_dtype(net->device)));
        if (u < net->params.trained_units)
            lg_denoiser_set_gradient(net, u, of_unit(net, grads, u, type));
    }
    run_nodes(net, s, lg_program_nodes(net->program, LG_PROGRAM_FORWARD),
              lg_program_nodes(net->program, LG_PROGRAM_ALL));
}
