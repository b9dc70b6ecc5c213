/* Exchanges within a sequence group (stages/trainer/exchanges.h) of two ranks in one process, with nets of two shapes, the
 * larger one second: what each rank computes is, bit for bit, what the same nets compute in lockstep with the bytes brought
 * by hand (sequence_world.h). Where ranks reach each other's memory, and where a plan is apart. */
#include "stages/trainer/exchanges.h"
#include "supervisor/run/run.h"
#include "tests/unit/run_fixture.h"
#include "tests/unit/sequence_world.h"
#include "tests/unit/shm_fixture.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 2, SHAPES = 2 };

/* A rank's process. */
struct member {
    lg_stage st;
    lg_exchanges *exchanges;
};

/* What a rank has computed. */
struct result {
    char *out, *grads;
};

struct group {
    struct shm_fixture f;
    lg_run run;
    lg_board *board;
    struct world of[SHAPES];
    struct member member[RANKS];
    struct result want[SHAPES][RANKS];
};

static void need(int rc)
{
    if (rc < 0) fail_msg("%s", lg_err_text());
}

static size_t grads_bytes(const struct world *w)
{
    return w->f.params.count * lg_dtype_bytes(w->f.type);
}

static char *copy_of(const void *data, size_t bytes)
{
    char *to = malloc(bytes);
    assert_non_null(to);
    return memcpy(to, data, bytes);
}

static void clear(struct world *w)
{
    for (int r = 0; r < RANKS; r++) {
        memset(w->rank[r].out.data, 0, lg_tensor_bytes(&w->rank[r].out));
        memset(w->rank[r].grads, 0, grads_bytes(w));
    }
}

/* With memory of its own for what arrives. */
static void compute_by_hand(struct group *g, int shape)
{
    struct world *w = &g->of[shape];
    clear(w);
    world_run(w, false);
    for (int r = 0; r < RANKS; r++) {
        const struct rank *k = &w->rank[r];
        g->want[shape][r] = (struct result){copy_of(k->out.data, lg_tensor_bytes(&k->out)),
                                            copy_of(k->grads, grads_bytes(w))};
    }
}

static void open_member(struct group *g, int r, bool apart)
{
    struct member *m = &g->member[r];
    lg_denoiser *const nets[SHAPES] = {g->of[0].rank[r].net, g->of[1].rank[r].net};
    m->st = (lg_stage){.role = LG_ROLE_trainer,
                       .index = r,
                       .config = g->run.config,
                       .plan = g->run.plan,
                       .board = g->board,
                       .row = lg_board_row(g->board, LG_ROLE_trainer, r)};
    m->st.plan.apart = apart;
    need(lg_path(m->st.run_dir, "%s", g->run.dir));
    need(lg_path(m->st.runtime_dir, "%s", g->f.dir));
    need(lg_path(m->st.keeper, "%s", g->f.keeper));
    need(lg_bus_open(&(struct lg_bus_spec){.runtime_dir = g->f.dir,
                                           .role = LG_ROLE_trainer,
                                           .index = r,
                                           .incarnation = 1,
                                           .plan = &m->st.plan},
                     &m->st.bus));
    need(lg_exchanges_open(&m->st, g->of[0].f.device, g->of[0].f.stream, nets, SHAPES,
                           &m->exchanges));
}

/* Ranks whose memory is as large as the nets of all shapes need. */
static void check_regions(const struct group *g)
{
    size_t need_of[SHAPES];
    for (int k = 0; k < SHAPES; k++)
        need_of[k] = lg_denoiser_bytes_of(g->of[k].rank[0].net)->exchanged;
    assert_true(need_of[0] < need_of[1]);
    for (int r = 0; r < RANKS; r++) {
        const lg_stage *st = &g->member[r].st;
        assert_int_equal(st->n_regions, RANKS);
        for (int i = 0; i < st->n_regions; i++) {
            assert_true(st->region[i]->bytes >= need_of[1]);
            memset(st->region[i]->payload, 0xff, st->region[i]->bytes); /* NaN */
        }
    }
}

static void open_group(struct group *g, bool apart)
{
    static const int sides[SHAPES] = {6, 10};
    char path[LG_PATH_BYTES];
    *g = (struct group){0};
    for (int k = 0; k < SHAPES; k++) {
        struct lg_denoiser_config c = denoiser_fixture_dit();
        c.height = c.width = sides[k];
        world_open(
            &g->of[k], "host", &c,
            &(struct lg_denoiser_mode){.batch = DENOISER_FIXTURE_BATCH,
                                       .train = true,
                                       .sequence = {.degree = RANKS, .kind = LG_SEQUENCE_ULYSSES}});
        compute_by_hand(g, k);
    }
    assert_true(lg_denoiser_same_events(g->of[0].rank[0].net, g->of[1].rank[0].net));
    shm_fixture_open(&g->f, RANKS);
    shm_fixture_start_keeper(&g->f);
    run_fixture_make(&g->run, "ranks = 2\n[parallel]\nsp = 2\n"
                              "[model]\nkind = \"dit\"\nhidden = 48\ndepth = 1\nheads = 2\n");
    need(lg_path(path, "%s/board", g->run.dir));
    need(lg_board_create(path, &(struct lg_board_spec){.plan = &g->run.plan, .max_steps = 100},
                         &g->board));
    for (int r = 0; r < RANKS; r++) open_member(g, r, apart);
    check_regions(g);
    for (int r = 0; r < RANKS; r++) {
        assert_true(lg_exchanges_is_late(g->member[r].exchanges));
        lg_exchanges_join(g->member[r].exchanges, 0);
    }
    for (int r = 0; r < RANKS; r++) {
        uint64_t micro = 1;
        assert_true(lg_exchanges_begin(g->member[r].exchanges, 0, &micro));
        assert_int_equal(micro, 0);
    }
}

static void close_group(struct group *g)
{
    for (int r = 0; r < RANKS; r++) {
        struct member *m = &g->member[r];
        lg_exchanges_close(&m->exchanges);
        lg_bus_close(&m->st.bus);
        for (int i = 0; i < m->st.n_regions; i++) lg_region_close(&m->st.region[i]);
        for (int k = 0; k < SHAPES; k++) {
            free(g->want[k][r].out);
            free(g->want[k][r].grads);
        }
    }
    for (int k = 0; k < SHAPES; k++) world_close(&g->of[k]);
    lg_board_close(&g->board);
    run_fixture_close(&g->run);
    shm_fixture_close(&g->f);
}

/* Events of rank r from *at on, until it waits for the other or its backward is done; returns how many. */
static int go(struct group *g, int shape, int r, uint64_t micro, int *at)
{
    const struct rank *k = &g->of[shape].rank[r];
    lg_exchanges *x = g->member[r].exchanges;
    const int from = *at;
    int n, n_forward;
    const struct lg_denoiser_event *e = lg_denoiser_events(k->net, &n, &n_forward);
    for (; *at < n; (*at)++) {
        if (*at == n_forward) lg_denoiser_begin_backward(k->net, &k->in, k->dout, false);
        if (e[*at].kind == LG_EVENT_RUN)
            lg_denoiser_run(k->net, g->of[0].f.stream, &e[*at]);
        else if (e[*at].kind == LG_EVENT_EXCHANGE &&
                 !lg_exchanges_go(x, k->net, micro, e[*at].exchange))
            break;
    }
    if (*at == n && from < n) {
        lg_stream_sync(g->of[0].f.stream);
        lg_exchanges_end_micro(x, micro);
    }
    return *at - from;
}

static void check_micro(struct group *g, int shape, uint64_t micro)
{
    struct world *w = &g->of[shape];
    int at[RANKS] = {0}, n, n_forward;
    (void)lg_denoiser_events(w->rank[0].net, &n, &n_forward);
    clear(w);
    world_begin_forward(w);
    assert_true(go(g, shape, 0, micro, &at[0]) > 0);
    assert_int_equal(go(g, shape, 0, micro, &at[0]), 0); /* the other has sent nothing */
    while (at[0] < n || at[1] < n)
        for (int r = RANKS - 1; r >= 0; r--)
            if (at[r] < n) assert_true(go(g, shape, r, micro, &at[r]) > 0);
    for (int r = 0; r < RANKS; r++) {
        const struct rank *k = &w->rank[r];
        const struct result *want = &g->want[shape][r];
        assert_memory_equal(k->out.data, want->out, lg_tensor_bytes(&k->out));
        assert_memory_equal(k->grads, want->grads, grads_bytes(w));
    }
}

static void check(bool apart)
{
    static const int shapes[] = {1, 0, 0, 1};
    static struct group g;
    open_group(&g, apart);
    for (size_t i = 0; i < LG_ARRAY_LEN(shapes); i++) check_micro(&g, shapes[i], i);
    close_group(&g);
}

static void test_within_reach(void **state)
{
    (void)state;
    check(false);
}

static void test_apart(void **state)
{
    (void)state;
    check(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_within_reach),
                                       cmocka_unit_test(test_apart)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
