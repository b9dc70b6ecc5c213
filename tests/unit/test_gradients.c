/* Scattered gradients (stages/trainer/gradients.h) of two ranks in one process, driven by hand: who is ahead waits where
 * others have yet to add; whoever dies, wherever, the sums are the same; memory that was lost is noticed; with several
 * hosts, what is said to have left for the others lies there. */
#include "stages/trainer/gradients.h"
#include "supervisor/run/run.h"
#include "tests/unit/run_fixture.h"
#include "tests/unit/shm_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 2, MICROS = 2, STEP = 3 };

/* What dies with a process. */
struct rank {
    lg_stage st;
    lg_device *device;
    lg_stream *compute;
    lg_denoiser *net;
    lg_trainer_state *state;
    lg_gradients *gradients;
    const struct lg_denoiser_event *event;
    int n, n_forward, at; /* at: of the backward's events */
    uint64_t micro;
    struct lg_loss_sum loss;
    float **place; /* of each unit, between its events */
};

struct world {
    struct shm_fixture f;
    lg_run run;
    lg_board *board;
    struct rank rank[RANKS];
};

static void need(int rc)
{
    if (rc < 0) fail_msg("%s", lg_err_text());
}

static void open_rank(struct world *w, int r)
{
    struct rank *k = &w->rank[r];
    *k = (struct rank){0};
    k->st = (lg_stage){.role = LG_ROLE_trainer,
                       .index = r,
                       .config = w->run.config,
                       .plan = w->run.plan,
                       .board = w->board,
                       .row = lg_board_row(w->board, LG_ROLE_trainer, r)};
    need(lg_path(k->st.run_dir, "%s", w->run.dir));
    need(lg_path(k->st.runtime_dir, "%s", w->f.dir));
    need(lg_path(k->st.keeper, "%s", w->f.keeper));
    need(lg_bus_open(&(struct lg_bus_spec){.runtime_dir = w->f.dir,
                                           .role = LG_ROLE_trainer,
                                           .index = r,
                                           .incarnation = 1,
                                           .plan = &k->st.plan},
                     &k->st.bus));
    need(lg_stage_device(&k->st, LG_ROLE_trainer, r, &k->device));
    need(lg_stream_open(k->device, &k->compute));
    lg_device *maps[LG_INSTANCES_MAX];
    for (int q = 0; q < RANKS; q++) maps[q] = k->device;
    need(lg_trainer_state_open(&k->st, maps, &k->state));
    const struct lg_denoiser_mode mode = {.batch = 1, .train = true};
    need(lg_denoiser_compile(k->device, &k->state->net, &mode, &k->net));
    k->event = lg_denoiser_events(k->net, &k->n, &k->n_forward);
    k->at = k->n_forward;
    k->place = calloc((size_t)k->state->params.n_units, sizeof *k->place);
    need(lg_gradients_open(&k->st, k->device, k->compute, k->state, k->net, &k->gradients));
}

static void close_rank(struct rank *k)
{
    lg_gradients_close(&k->gradients);
    lg_denoiser_close(&k->net);
    lg_stream_close(&k->compute);
    lg_trainer_state_close(&k->state);
    lg_bus_close(&k->st.bus);
    for (int i = 0; i < k->st.n_regions; i++) lg_region_close(&k->st.region[i]);
    for (int i = 0; i < k->st.n_devices; i++) lg_device_close(&k->st.device[i]);
    free(k->place);
}

static void open_world_of(struct world *w, const char *groups, int hosts)
{
    char more[512], path[LG_PATH_BYTES];
    memset(w, 0, sizeof *w);
    snprintf(more, sizeof more,
             "ranks = %d\nmicro_batch_size = %d\n%s[parallel]\nzero = 2\n"
             "[model]\nkind = \"pixart\"\nhidden = 48\ndepth = 4\nheads = 2\npatch = 4\n%s",
             RANKS, 4 / hosts, groups,
             hosts == 2 ? "[hosts]\ncount = 2\nkey = \"k\"\nlist = [\"a\", \"b\"]\n" : "");
    shm_fixture_open(&w->f, RANKS);
    shm_fixture_start_keeper(&w->f);
    run_fixture_make(&w->run, more);
    struct lg_board_spec spec = {
        .plan = &w->run.plan, .start_step = STEP, .max_steps = 100, .checkpoint_every = 0};
    need(lg_path(path, "%s/board", w->run.dir));
    need(lg_board_create(path, &spec, &w->board));
    for (int r = 0; r < RANKS; r++) open_rank(w, r);
    for (int r = 0; r < RANKS; r++) lg_trainer_mark_init(w->board, r);
}

static void open_world(struct world *w, const char *groups)
{
    open_world_of(w, groups, 1);
}

static void close_world(struct world *w)
{
    for (int r = 0; r < RANKS; r++) close_rank(&w->rank[r]);
    lg_board_close(&w->board);
    run_fixture_close(&w->run);
    shm_fixture_close(&w->f);
}

/* Element i of the flat gradient; every sum of a few is exact. */
static float value(int r, uint64_t micro, size_t i)
{
    return (float)((i * 31 + (size_t)r * 1009 + (size_t)micro * 7919) % 4093) - 2000;
}

static double loss_of(int r, uint64_t micro)
{
    return 1 + r + 0.125 * (double)micro;
}

static void begin(struct rank *k)
{
    need(lg_gradients_begin(k->gradients, STEP, UINT64_MAX, &k->micro, &k->loss));
    k->at = k->n_forward;
    if (k->micro < MICROS) lg_gradients_begin_micro(k->gradients, k->micro);
}

static bool is_frozen(const lg_params *t, size_t i)
{
    static int p; /* mostly that of the element before */
    for (int n = 0; n <= t->n; n++, p++) {
        if (p >= t->n) p = 0;
        if (i >= t->p[p].offset && i - t->p[p].offset < t->p[p].count)
            return t->group[t->p[p].group].is_frozen;
    }
    return true; /* a gap */
}

/* Of all ranks and micro-batches. */
static float sum_of(const lg_params *t, size_t i)
{
    float sum = 0;
    if (is_frozen(t, i)) return 0;
    for (uint64_t m = 0; m < MICROS; m++)
        for (int q = 0; q < RANKS; q++) sum += value(q, m, i);
    return sum;
}

/* What a backward writes. */
static void write_unit(struct rank *k, int unit)
{
    const struct lg_param_unit *u = &k->state->params.unit[unit];
    for (size_t i = 0; i < u->count; i++)
        if (!is_frozen(&k->state->params, u->first + i))
            k->place[unit][i] = value(k->st.index, k->micro, u->first + i);
}

/* One event of its backward; false: it waits, or its step is done. */
static bool go(struct rank *k)
{
    if (k->micro == MICROS) return false;
    if (k->at == k->n) {
        k->loss.all += loss_of(k->st.index, k->micro);
        k->loss.vb += loss_of(k->st.index, k->micro) / 2;
        lg_gradients_end_micro(k->gradients, k->loss);
        k->at = k->n_forward;
        if (++k->micro < MICROS) lg_gradients_begin_micro(k->gradients, k->micro);
        return true;
    }
    const struct lg_denoiser_event *e = &k->event[k->at];
    if (e->kind == LG_EVENT_GRADIENT) {
        if (!lg_gradients_place(k->gradients, e->unit, &k->place[e->unit])) return false;
    } else if (e->kind == LG_EVENT_GRADIENT_DONE) {
        write_unit(k, e->unit);
        lg_gradients_done(k->gradients, e->unit);
    }
    k->at++;
    return true;
}

static bool add(struct rank *k)
{
    int added = lg_gradients_add(k->gradients);
    need(added);
    return added;
}

static void check_sums(struct world *w)
{
    struct lg_exact_sum all = {0};
    double squares = 0;
    for (int r = 0; r < RANKS; r++) {
        struct rank *k = &w->rank[r];
        struct lg_exact_sum own;
        assert_true(k->loss.all == loss_of(r, 0) + loss_of(r, 1));
        assert_true(k->loss.vb == k->loss.all / 2);
        assert_true(lg_scatter_added(w->board, r) == lg_scatter_begin(STEP + 1));
        need(lg_gradients_reduce(k->gradients, STEP, &own));
        lg_exact_sum_merge(&all, &own);
        const float *sum = lg_gradients_sum(k->gradients);
        for (int u = 0; u < k->state->params.n_units; u++) {
            struct lg_piece p = lg_trainer_piece(k->state, r, u);
            for (size_t i = 0; i < p.count; i++) {
                const float want = sum_of(&k->state->params, p.first + i);
                squares += (double)want * want;
                if (sum[p.at + i] != want)
                    fail_msg("unit %d, element %zu: %g, not %g", u, p.first + i,
                             (double)sum[p.at + i], (double)want);
            }
        }
    }
    assert_true(fabs(lg_exact_sum_total(&all) - squares) <= 1e-6 * squares);
}

static void run_to_end(struct world *w)
{
    for (bool more = true; more;) {
        more = false;
        for (int r = 0; r < RANKS; r++) {
            struct rank *k = &w->rank[r];
            bool went = go(k);
            if (!went) lg_gradients_flush(k->gradients);
            more |= went;
            more |= add(k);
        }
    }
    for (int r = 0; r < RANKS; r++) assert_int_equal(w->rank[r].micro, MICROS);
}

static void test_together(void **state)
{
    (void)state;
    static struct world w;
    open_world(&w, "groups = [\"*attn2* frozen\"]\n");
    for (int r = 0; r < RANKS; r++) begin(&w.rank[r]);
    run_to_end(&w);
    check_sums(&w);
    close_world(&w);
}

/* A rank alone comes as far as its ring has room, and leaves what nobody has added as it is. */
static void test_ahead(void **state)
{
    (void)state;
    static struct world w;
    open_world(&w, "");
    struct rank *k = &w.rank[0];
    for (int r = 0; r < RANKS; r++) begin(&w.rank[r]);
    while (go(k)) assert_false(add(k)); /* the other has given nothing */
    lg_gradients_flush(k->gradients);
    assert_true(k->micro == 0 && k->at < k->n);
    assert_int_equal(k->event[k->at].kind, LG_EVENT_GRADIENT);
    const uint64_t given = lg_scatter_given(w.board, 0) - lg_scatter_begin(STEP);
    assert_true(given >= 3 && given < (uint64_t)k->state->params.n_units);
    assert_false(go(k));
    /* The other gives unit after unit, and adds; that is not enough before this one has added, too. */
    for (uint64_t n = 1;; n++) {
        while (lg_scatter_given(w.board, 1) < lg_scatter_begin(STEP) + n)
            assert_true(go(&w.rank[1]));
        assert_true(add(&w.rank[1]));
        assert_false(go(k));
        assert_true(add(k));
        if (go(k)) break;
        assert_true(n < given);
    }
    run_to_end(&w);
    check_sums(&w);
    close_world(&w);
}

static void replace(struct world *w, int r)
{
    close_rank(&w->rank[r]);
    open_rank(w, r);
    begin(&w->rank[r]);
}

/* Rank 0 dies after so many moves of both; then rank 1, a few later. False: the step was over before. */
static bool dies_after(int moves)
{
    static struct world w;
    bool died = false;
    open_world(&w, "");
    for (int r = 0; r < RANKS; r++) begin(&w.rank[r]);
    for (int i = 0; i < moves + 7; i++) {
        struct rank *k = &w.rank[i % 3 == 0]; /* rank 0 moves more often */
        bool went = go(k);
        if (!went) lg_gradients_flush(k->gradients);
        if (i % 2) add(k);
        if (i == moves) replace(&w, 0), died = w.rank[0].micro < MICROS;
        if (i == moves + 6) replace(&w, 1);
    }
    run_to_end(&w);
    check_sums(&w);
    close_world(&w);
    return died;
}

static void test_deaths(void **state)
{
    (void)state;
    int moves = 0;
    while (dies_after(moves)) moves += 3;
    assert_true(moves > 30); /* it died in the middle often enough */
}

/* What the process of rank k has opened by this name. */
static lg_region *region_of(const struct rank *k, const char *name)
{
    for (int i = 0; i < k->st.n_regions; i++)
        if (!strcmp(k->st.region[i]->name, name)) return k->st.region[i];
    fail_msg("no region %s", name);
    return NULL;
}

static void test_lost(void **state)
{
    (void)state;
    static struct world w;
    open_world(&w, "");
    for (int r = 0; r < RANKS; r++) begin(&w.rank[r]);
    for (int r = 0; r < RANKS; r++)
        while (lg_scatter_given(w.board, r) == lg_scatter_begin(STEP)) assert_true(go(&w.rank[r]));
    lg_region *ring = region_of(&w.rank[0], "trainer/1/grad"),
              *sum = region_of(&w.rank[0], "trainer/0/sum");
    lg_stamp_clear(ring->front);
    assert_int_equal(lg_gradients_add(w.rank[0].gradients), LG_ERR_PARKED);
    assert_non_null(strstr(lg_err_message(), "trainer/1/grad"));
    lg_err_clear();
    lg_stamp_set(ring->front, STEP);
    assert_true(add(&w.rank[0]));
    assert_true(add(&w.rank[1]));
    lg_stamp_clear(sum->front);
    while (!lg_scatter_given_by_all(w.board) ||
           lg_scatter_given_by_all(w.board) == lg_scatter_added(w.board, 0))
        for (int r = 0; r < RANKS; r++) assert_true(go(&w.rank[r]));
    assert_int_equal(lg_gradients_add(w.rank[0].gradients), LG_ERR_PARKED);
    assert_non_null(strstr(lg_err_message(), "trainer/0/sum"));
    lg_err_clear();
    close_world(&w);
}

/* A program that was built otherwise lays the ring out otherwise. */
static void test_other_build(void **state)
{
    (void)state;
    static struct world w;
    open_world(&w, "");
    struct rank *k = &w.rank[0];
    struct lg_gradients_front *front = region_of(k, "trainer/1/grad")->front;
    atomic_store(&front->ring, 77);
    lg_gradients_close(&k->gradients);
    assert_int_equal(
        lg_gradients_open(&k->st, k->device, k->compute, k->state, k->net, &k->gradients),
        LG_ERR_MISMATCH);
    lg_err_clear();
    close_world(&w);
}

/* ---- several hosts ---- */

static lg_region *outgoing_of(const struct rank *k)
{
    char name[64];
    snprintf(name, sizeof name, "trainer/%d/outgoing", k->st.index);
    return region_of(k, name);
}

static size_t left_of(const struct rank *k)
{
    const struct lg_outgoing_front *front = outgoing_of(k)->front;
    return lg_leaving_of(&front->leaving, STEP);
}

/* What its exchange process may read, and send at once, are sums; returns how much that is. */
static size_t check_left(const struct rank *k)
{
    const float *out = outgoing_of(k)->payload;
    const size_t shard = lg_trainer_shard(k->state, k->st.index), left = left_of(k);
    assert_true(left <= shard);
    for (int u = 0; u < k->state->params.n_units; u++) {
        const struct lg_piece p = lg_trainer_piece(k->state, k->st.index, u);
        for (size_t i = 0; i < p.count; i++) {
            if (p.at + i < shard - left) continue;
            const float want = sum_of(&k->state->params, p.first + i);
            if (out[p.at + i] != want)
                fail_msg(
                    "%zu of %zu elements of rank %d have left, but of unit %d number %zu is %g,"
                    " not %g",
                    left, shard, k->st.index, u, i, (double)out[p.at + i], (double)want);
        }
    }
    return left;
}

/* A shard leaves for the other hosts from its end on, in many parts, each when it is added and not before. */
static void test_leaves(void **state)
{
    (void)state;
    static struct world w;
    size_t left[RANKS] = {0};
    int parts[RANKS] = {0};
    open_world_of(&w, "", 2);
    for (int r = 0; r < RANKS; r++) {
        const size_t shard = lg_trainer_shard(w.rank[r].state, r);
        memset(outgoing_of(&w.rank[r])->payload, 0xff, shard * sizeof(float)); /* NaN */
        begin(&w.rank[r]);
    }
    for (bool more = true; more;) {
        more = false;
        for (int r = 0; r < RANKS; r++) {
            struct rank *k = &w.rank[r];
            const bool went = go(k);
            if (!went) lg_gradients_flush(k->gradients);
            const bool added = add(k);
            more |= went || added;
            if (!added) continue;
            const size_t now = check_left(k);
            assert_true(now >= left[r]);
            parts[r] += now > left[r];
            left[r] = now;
        }
    }
    for (int r = 0; r < RANKS; r++) {
        assert_int_equal(left[r], lg_trainer_shard(w.rank[r].state, r));
        assert_true(parts[r] >= 4);
    }
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_together),    cmocka_unit_test(test_ahead),
        cmocka_unit_test(test_deaths),      cmocka_unit_test(test_lost),
        cmocka_unit_test(test_other_build), cmocka_unit_test(test_leaves)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
