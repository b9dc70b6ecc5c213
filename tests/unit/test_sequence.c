/* Sequence parallelism of denoisers: P ranks as P nets of one process, run in lockstep from exchange to exchange, are
 * together the unsplit net. Outputs in a row, and gradients added up, agree with its own to rounding: 1e-5 of a
 * tensor's norm on the host (as test_denoiser_host.c), 1e-12 in double. The bytes of an exchange are brought as early as
 * exchange.h allows: what is there before is NaN from the exchange before on. */
#include "kernels/graph/exchange.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/small_graph.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS_MAX = 4, B = DENOISER_FIXTURE_BATCH };

static const char *const none[] = {NULL}, *const norms[] = {"norms", NULL},
                         *const block[] = {"block", NULL};

/* ---- strided tensors ---- */

static void *element(const lg_tensor *t, int64_t n)
{
    int64_t at = 0;
    for (int i = t->rank - 1; i >= 0; i--) at += n % t->dim[i] * t->stride[i], n /= t->dim[i];
    return (char *)t->data + at * (int64_t)lg_dtype_bytes(t->dtype);
}

static void copy(const lg_tensor *from, const lg_tensor *to)
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

struct rank {
    lg_denoiser *net;
    struct lg_band band;
    struct lg_denoiser_input in;
    lg_tensor out, dout;
    void *grads, *exchanged;
};

struct world {
    struct denoiser_fixture f; /* the unsplit net, and the device */
    struct rank rank[RANKS_MAX];
    int n, exchanges; /* ranks; of a forward and its backward */
    size_t offloaded;
    char *arena; /* of what was copied */
};

static void *alloc(struct world *w, size_t bytes)
{
    void *p;
    if (lg_device_alloc(w->f.device, bytes, &p) < 0) fail_msg("%s", lg_err_text());
    return p;
}

static lg_tensor band_of(const struct rank *r, lg_tensor whole)
{
    return lg_slice(whole, 2, r->band.first, r->band.height);
}

static lg_tensor own(struct world *w, const struct rank *r, lg_tensor whole)
{
    lg_tensor from = band_of(r, whole), to = lg_tensor_of(NULL, from.dtype, 4, from.dim);
    to.data = alloc(w, lg_tensor_bytes(&to));
    copy(&from, &to);
    return to;
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
    r->in.x = own(w, r, w->f.in.x);
    r->out = own(w, r, w->f.out);
    r->dout = own(w, r, w->f.dout);
}

static void open_world(struct world *w, const char *device, const struct lg_denoiser_config *c,
                       const struct lg_denoiser_mode *mode)
{
    *w = (struct world){.n = mode->sequence.degree};
    denoiser_fixture_open(&w->f, device, NULL, c, true);
    for (int i = 0; i < w->n; i++) open_rank(w, i, *mode);
    for (int i = 0; i < w->n; i++) /* who writes into it need not ask */
        assert_int_equal(lg_denoiser_bytes_of(w->rank[i].net)->exchanged,
                         lg_denoiser_bytes_of(w->rank[0].net)->exchanged);
    w->offloaded = lg_denoiser_bytes_of(w->rank[0].net)->host;
}

static void close_world(struct world *w)
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
static void go_all(struct world *w, int from, int to, int exchanges)
{
    for (int i = from; i < to; i++) {
        const int before = w->exchanges;
        go(w, i);
        if (w->exchanges > before && w->exchanges < exchanges) exchange(w, w->exchanges, true);
    }
}

static void run(struct world *w, bool accumulate)
{
    int n, forward, exchanges = 0;
    const struct lg_denoiser_event *e = lg_denoiser_events(w->rank[0].net, &n, &forward);
    for (int i = 0; i < n; i++) exchanges += e[i].kind == LG_EVENT_EXCHANGE;
    const lg_params *p = &w->f.params;
    const size_t each = lg_dtype_bytes(w->f.type);
    for (int i = 0; i < w->n; i++) {
        struct rank *r = &w->rank[i];
        for (int u = 0; u < p->n_units; u++) {
            const size_t at = p->unit[u].first * each;
            lg_denoiser_set_weights(r->net, u, (char *)w->f.weights + at);
            lg_denoiser_set_gradient(r->net, u, (char *)r->grads + at);
        }
        lg_denoiser_begin_forward(r->net, &r->in, r->out);
    }
    w->exchanges = 0;
    exchange(w, 0, true);
    go_all(w, 0, forward, exchanges);
    for (int i = 0; i < w->n; i++)
        lg_denoiser_begin_backward(w->rank[i].net, &w->rank[i].in, w->rank[i].dout, accumulate);
    go_all(w, forward, n, exchanges);
    assert_int_equal(w->exchanges, exchanges);
}

/* ---- against the unsplit net ---- */

static double tolerance(const struct world *w)
{
    return w->f.type == LG_F64 ? 1e-12 : 1e-5;
}

static int near(const struct world *w, const char *name, const void *data, const double *want,
                size_t n, double floor)
{
    struct distance d = denoiser_fixture_distance(&w->f, data, want, n);
    if (d.diff <= tolerance(w) * fmax(d.norm, floor)) return 0;
    printf("  %d ranks, %s: distance %.3e, norm %.3e\n", w->n, name, d.diff, d.norm);
    return 1;
}

static double *doubles(const struct world *w, const void *data, size_t n)
{
    double *v = malloc(n * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < n; i++) v[i] = denoiser_fixture_get(&w->f, data, i);
    return v;
}

static int compare_out(struct world *w)
{
    const size_t n = (size_t)lg_numel(&w->f.out);
    double *want = doubles(w, w->f.out.data, n);
    memset(w->f.out.data, 0xff, lg_tensor_bytes(&w->f.out));
    for (int i = 0; i < w->n; i++) {
        lg_tensor to = band_of(&w->rank[i], w->f.out);
        copy(&w->rank[i].out, &to);
    }
    int wrong = near(w, "out", w->f.out.data, want, n, 0);
    free(want);
    return wrong;
}

/* floor: norm below which a tensor counts as zero (to_k.bias has no gradient but rounding). */
static int compare_grads(struct world *w, bool last)
{
    const lg_params *p = &w->f.params;
    const size_t each = lg_dtype_bytes(w->f.type);
    int wrong = 0;
    double total = 0, *want = doubles(w, w->f.grads, p->count);
    for (size_t i = 0; i < p->count; i++) total += want[i] * want[i];
    for (size_t i = 0; i < p->count; i++) {
        double sum = 0;
        for (int r = 0; r < w->n; r++) sum += denoiser_fixture_get(&w->f, w->rank[r].grads, i);
        denoiser_fixture_set(&w->f, w->f.grads, i, sum);
    }
    const double floor = 0.01 * sqrt(total / p->n);
    for (const struct lg_param *q = p->p; q < p->p + p->n; q++)
        wrong += near(w, q->name, (char *)w->f.grads + q->offset * each, want + q->offset, q->count,
                      floor);
    for (size_t i = 0; i < p->count && !last; i++)
        denoiser_fixture_set(&w->f, w->f.grads, i, want[i]);
    free(want);
    return wrong;
}

/* What the first micro-batch leaves of what was there would be seen. */
static void fill_gradients(struct world *w)
{
    for (const struct lg_param *q = w->f.params.p; q < w->f.params.p + w->f.params.n; q++)
        for (int r = 0; r < w->n; r++)
            memset((char *)w->rank[r].grads + q->offset * lg_dtype_bytes(w->f.type), 0xff,
                   q->count * lg_dtype_bytes(w->f.type));
}

static void next_input(struct world *w)
{
    for (int64_t i = 0; i < lg_numel(&w->f.in.x); i++) {
        double v = denoiser_fixture_get(&w->f, w->f.in.x.data, (size_t)i);
        denoiser_fixture_set(&w->f, w->f.in.x.data, (size_t)i, 1.0 - 0.5 * v);
    }
    for (int i = 0; i < w->n; i++) {
        lg_tensor from = band_of(&w->rank[i], w->f.in.x);
        copy(&from, &w->rank[i].in.x);
    }
}

/* To what is there anyhow. */
static void add_ones(struct world *w)
{
    for (const struct lg_param *q = w->f.params.p; q < w->f.params.p + w->f.params.n; q++)
        for (size_t i = q->offset; i < q->offset + q->count; i++) {
            double was = denoiser_fixture_get(&w->f, w->f.grads, i);
            denoiser_fixture_set(&w->f, w->f.grads, i, was + w->n);
            for (int r = 0; r < w->n; r++) {
                was = denoiser_fixture_get(&w->f, w->rank[r].grads, i);
                denoiser_fixture_set(&w->f, w->rank[r].grads, i, was + 1);
            }
        }
}

/* Three micro-batches. */
static void check_world(struct world *w)
{
    int wrong = 0;
    fill_gradients(w);
    for (int micro = 0; micro < 3; micro++) {
        if (micro == 2) wrong += compare_grads(w, false);
        if (micro == 2) add_ones(w);
        denoiser_fixture_forward(&w->f);
        denoiser_fixture_backward(&w->f, micro > 0);
        run(w, micro > 0);
        wrong += compare_out(w);
        next_input(w);
    }
    wrong += compare_grads(w, true);
    assert_int_equal(wrong, 0);
}

static void check(const char *device, const struct lg_denoiser_config *c,
                  const struct lg_denoiser_mode *mode)
{
    struct world w;
    open_world(&w, device, c, mode);
    check_world(&w);
    close_world(&w);
}

static struct lg_denoiser_mode split(int degree, enum lg_sequence_kind kind)
{
    return (struct lg_denoiser_mode){
        .batch = B, .train = true, .sequence = {.degree = degree, .kind = kind}};
}

/* Five rows and five heads over two, three and four ranks. */
static struct lg_denoiser_config dit(void)
{
    struct lg_denoiser_config c = denoiser_fixture_dit();
    c.height = c.width = 10;
    c.heads = 5;
    c.hidden = 40;
    return c;
}

static void check_kinds(const struct lg_denoiser_config *c, int degree_max)
{
    const char *const *const recompute[] = {none, norms, block};
    for (int degree = 2; degree <= degree_max; degree++)
        for (int k = 0; k < 2; k++)
            for (size_t i = 0; i < LG_ARRAY_LEN(recompute); i++) {
                struct lg_denoiser_mode mode = split(degree, (enum lg_sequence_kind)k);
                mode.recompute = recompute[i];
                check("host", c, &mode);
                if (i != 1) check("ref64", c, &mode);
            }
}

static void test_dit(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = dit();
    check_kinds(&c, 4);
}

/* Four rows of six, and three heads; then four heads. */
static void test_pixart(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    check_kinds(&c, 3);
    c.heads = 4;
    const struct lg_denoiser_mode ulysses = split(4, LG_SEQUENCE_ULYSSES),
                                  fastseq = split(4, LG_SEQUENCE_FASTSEQ);
    check("host", &c, &ulysses);
    check("host", &c, &fastseq);
}

/* Eight rows and four heads over three ranks: what has enough bytes on one of them alone waits on all. */
static void test_offload(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_dit();
    c.height = c.width = 16;
    c.depth = 5;
    c.heads = 4;
    c.hidden = 48;
    for (int degree = 2; degree <= 3; degree++)
        for (int k = 0; k < 2; k++) {
            struct lg_denoiser_mode mode = split(degree, (enum lg_sequence_kind)k);
            struct world w, kept;
            open_world(&kept, "host", &c, &mode);
            mode.offload = true;
            open_world(&w, "host", &c, &mode);
            assert_true(w.offloaded > 0);
            assert_true(lg_denoiser_bytes_of(w.rank[0].net)->exchanged <
                        lg_denoiser_bytes_of(kept.rank[0].net)->exchanged);
            check_world(&w);
            close_world(&w);
            close_world(&kept);
        }
}

/* A budget that one rank alone would have kept with less recomputation. */
static void test_budget(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = dit();
    for (int k = 0; k < 2; k++) {
        struct lg_denoiser_mode mode = split(3, (enum lg_sequence_kind)k);
        size_t bytes[2];
        for (int i = 0; i < 2; i++) {
            struct world w;
            mode.recompute = i ? block : none;
            open_world(&w, "host", &c, &mode);
            bytes[i] = lg_denoiser_bytes_of(w.rank[2].net)->activations +
                       lg_denoiser_bytes_of(w.rank[2].net)->exchanged;
            close_world(&w);
        }
        assert_true(bytes[1] < bytes[0]);
        for (int i = 1; i < 8; i++) {
            char word[48];
            snprintf(word, sizeof word, "budget:%zu",
                     bytes[1] + (bytes[0] - bytes[1]) * (size_t)i / 8);
            mode.recompute = (const char *const[]){word, NULL};
            check("host", &c, &mode);
        }
    }
}

/* ---- what is refused ---- */

static void refuse(const struct lg_denoiser_config *c, int degree, const char *expected)
{
    const struct lg_denoiser_mode mode = split(degree, LG_SEQUENCE_ULYSSES);
    lg_device *d;
    lg_denoiser *net;
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    assert_int_equal(lg_denoiser_compile(d, c, &mode, &net), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), expected));
    lg_err_clear();
    lg_device_close(&d);
}

static void at_once(int degree)
{
    const struct lg_denoiser_mode mode = split(degree, LG_SEQUENCE_FASTSEQ);
    struct lg_denoiser_config c = dit();
    struct world w;
    open_world(&w, "host", &c, &mode);
    lg_denoiser_forward(w.rank[0].net, w.f.stream, w.f.weights, &w.rank[0].in, w.rank[0].out);
}

static void whole_at_once(void)
{
    at_once(1);
}
static void split_at_once(void)
{
    at_once(2);
}

static void test_refused(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    refuse(&c, 4, "3 heads of attention cannot be split among 4 ranks");
    refuse(&c, 5, "4 rows of patches (a latent of height 8, patches of 2) cannot be split");
    assert_false(small_aborts(whole_at_once));
    assert_true(small_aborts(split_at_once));
}

/* ---- one rank ---- */

static char *print_of(const struct lg_denoiser_config *c, struct lg_sequence s)
{
    const struct lg_denoiser_mode mode = {.batch = B, .train = true, .sequence = s};
    char *text = NULL;
    size_t bytes = 0;
    lg_device *d;
    FILE *to = open_memstream(&text, &bytes);
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    assert_int_equal(lg_denoiser_print(d, c, &mode, to), 0);
    fclose(to);
    lg_device_close(&d);
    return text;
}

static void test_one_rank_is_the_net(void **state)
{
    (void)state;
    const struct lg_denoiser_config c[] = {dit(), denoiser_fixture_pixart()};
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 2; k++) {
            const struct lg_sequence one = {.degree = 1, .kind = (enum lg_sequence_kind)k};
            char *want = print_of(&c[i], (struct lg_sequence){0}), *got = print_of(&c[i], one);
            assert_string_equal(got, want);
            assert_null(strstr(want, "exchange"));
            free(want);
            free(got);
        }
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dit),     cmocka_unit_test(test_pixart),
        cmocka_unit_test(test_offload), cmocka_unit_test(test_budget),
        cmocka_unit_test(test_refused), cmocka_unit_test(test_one_rank_is_the_net),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
