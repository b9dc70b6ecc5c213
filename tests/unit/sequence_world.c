/* See sequence_world.h. */
#include "tests/unit/sequence_world.h"
#include "stages/nets/storage.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* ---- strided tensors ---- */

static void *element(const lg_tensor *t, int64_t n)
{
    int64_t at = 0;
    for (int i = t->rank - 1; i >= 0; i--) at += n % t->dim[i] * t->stride[i], n /= t->dim[i];
    return (char *)t->data + at * (int64_t)lg_dtype_bytes(t->dtype);
}

void world_copy(const lg_tensor *from, const lg_tensor *to)
{
    assert_int_equal(from->rank, to->rank);
    assert_memory_equal(from->dim, to->dim, sizeof from->dim);
    for (int64_t i = 0; i < lg_numel(from); i++)
        memcpy(element(to, i), element(from, i), lg_dtype_bytes(to->dtype));
}

static void poison(const lg_tensor *t)
{
    for (int64_t i = 0; i < lg_numel(t); i++)
        memset(element(t, i), 0xff, lg_dtype_bytes(t->dtype)); /* NaN */
}

/* ---- ranks ---- */

static void *alloc(struct world *w, size_t bytes)
{
    void *p;
    if (lg_device_alloc(w->f.device, bytes, &p) < 0) fail_msg("%s", lg_err_text());
    return p;
}

lg_tensor world_band(const struct rank *r, lg_tensor whole)
{
    return lg_slice(whole, 2, r->band.first, r->band.height);
}

static lg_tensor own(struct world *w, const struct rank *r, lg_tensor whole)
{
    lg_tensor from = world_band(r, whole), to = lg_tensor_of(NULL, from.dtype, 4, from.dim);
    to.data = alloc(w, lg_tensor_bytes(&to));
    world_copy(&from, &to);
    return to;
}

/* Of the stretches of the band those of their frames. */
static lg_tensor own_times(struct world *w, const struct rank *r)
{
    const struct lg_denoiser_config *c = &w->f.config;
    const int64_t rows = lg_denoiser_time_rows(c, &r->band, true), k = r->band.height / rows;
    const int64_t B = w->f.in.x.dim[0];
    lg_tensor t = lg_t1(NULL, w->f.type, B * k);
    t.data = alloc(w, lg_tensor_bytes(&t));
    for (int64_t i = 0; i < B * k; i++)
        denoiser_fixture_set(
            &w->f, t.data, (size_t)i,
            denoiser_fixture_frame_time(&w->f, i / k, (r->band.first + i % k * rows) / c->height));
    return t;
}

static void open_rank(struct world *w, int i, struct lg_denoiser_mode mode)
{
    struct rank *r = &w->rank[i];
    mode.sequence.rank = i;
    if (lg_denoiser_open(w->f.device, &w->f.config, &mode, &r->net) < 0 ||
        lg_denoiser_band(&w->f.config, &mode.sequence, &r->band) < 0)
        fail_msg("%s", lg_err_text());
    const size_t bytes = lg_denoiser_bytes_of(r->net)->exchanged;
    r->exchanged = alloc(w, bytes);
    memset(r->exchanged, 0xff, bytes);
    lg_denoiser_set_exchanged(r->net, r->exchanged);
    r->grads = alloc(w, w->f.params.count * lg_dtype_bytes(w->f.type));
    r->in = w->f.in;
    if (mode.frame_times) r->in.t = own_times(w, r);
    r->in.x = own(w, r, w->f.in.x);
    r->out = own(w, r, w->f.out);
    r->dout = own(w, r, w->f.dout);
}

void world_open(struct world *w, const char *device, const struct lg_denoiser_config *c,
                const struct lg_denoiser_mode *mode)
{
    *w = (struct world){.n = mode->sequence.degree};
    const struct lg_denoiser_mode whole = {.batch = mode->batch,
                                           .train = true,
                                           .training = mode->training,
                                           .frame_times = mode->frame_times};
    denoiser_fixture_open_mode(&w->f, device, c, &whole);
    for (int i = 0; i < w->n; i++) open_rank(w, i, *mode);
    for (int i = 0; i < w->n; i++) { /* who writes into it need not ask */
        int n[2], forward[2];
        assert_int_equal(lg_denoiser_bytes_of(w->rank[i].net)->exchanged,
                         lg_denoiser_bytes_of(w->rank[0].net)->exchanged);
        (void)lg_denoiser_events(w->rank[0].net, &n[0], &forward[0]);
        (void)lg_denoiser_events(w->rank[i].net, &n[1], &forward[1]);
        assert_true(n[0] == n[1] && forward[0] == forward[1]);
    }
    w->offloaded = lg_denoiser_bytes_of(w->rank[0].net)->host;
}

void world_close(struct world *w)
{
    for (int i = 0; i < w->n; i++) lg_denoiser_close(&w->rank[i].net);
    denoiser_fixture_close(&w->f);
}

static void exchange(struct world *w, int number, bool poisons)
{
    for (int from = 0; from < w->n; from++)
        for (int to = 0; to < w->n; to++) {
            struct lg_sent x =
                lg_denoiser_sends(w->rank[from].net, number, to, w->rank[to].exchanged);
            if (poisons)
                poison(&x.to);
            else
                lg_send(w->f.stream, x);
        }
}

/* Event i of all ranks, which must be the same. */
static void go(struct world *w, int i)
{
    const struct lg_denoiser_event *first = NULL;
    for (int r = 0; r < w->n; r++) {
        int n, forward;
        const struct lg_denoiser_event *e = &lg_denoiser_events(w->rank[r].net, &n, &forward)[i];
        if (!first) first = e;
        assert_true(e->kind == first->kind && e->unit == first->unit);
        assert_int_equal(e->exchange, first->exchange);
        if (e->kind == LG_EVENT_RUN) lg_denoiser_run(w->rank[r].net, w->f.stream, e);
    }
    lg_stream_sync(w->f.stream);
    if (first->kind != LG_EVENT_EXCHANGE) return;
    assert_int_equal(first->exchange, w->exchanges++);
    exchange(w, first->exchange, false);
    lg_stream_sync(w->f.stream);
}

/* Before the events after exchange i, the place of exchange i + 1 is anybody's. */
void world_go(struct world *w, int from, int to, int exchanges)
{
    for (int i = from; i < to; i++) {
        const int before = w->exchanges;
        go(w, i);
        if (w->exchanges > before && w->exchanges < exchanges) exchange(w, w->exchanges, true);
    }
}

void world_begin_forward(struct world *w)
{
    const lg_params *p = &w->f.params;
    const size_t each = lg_dtype_bytes(w->f.type);
    for (int i = 0; i < w->n; i++) {
        struct rank *r = &w->rank[i];
        for (int u = 0; u < p->n_units; u++) {
            lg_denoiser_set_weights(r->net, u,
                                    (char *)w->f.weights + lg_stored_unit_at(p, u, w->f.type));
            if (u < p->trained_units)
                lg_denoiser_set_gradient(r->net, u, (char *)r->grads + p->unit[u].first * each);
        }
        lg_denoiser_begin_forward(r->net, &r->in, r->out);
    }
    w->exchanges = 0;
    exchange(w, 0, true);
}

void world_run(struct world *w, bool accumulate)
{
    int n, forward, exchanges = 0;
    const struct lg_denoiser_event *e = lg_denoiser_events(w->rank[0].net, &n, &forward);
    for (int i = 0; i < n; i++) exchanges += e[i].kind == LG_EVENT_EXCHANGE;
    world_begin_forward(w);
    world_go(w, 0, forward, exchanges);
    for (int i = 0; i < w->n; i++)
        lg_denoiser_begin_backward(w->rank[i].net, &w->rank[i].in, w->rank[i].dout, accumulate);
    world_go(w, forward, n, exchanges);
    assert_int_equal(w->exchanges, exchanges);
}
