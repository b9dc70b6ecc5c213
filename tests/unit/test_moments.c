/* Rotating moments: where the chunks lie (stages/trainer/moments.h), and real trainer ranks whose updates are cut off at
 * every call that computes: a successor goes on, and every byte of the state is that of an undisturbed run.
 *
 * The test plays loader, encoders, EMA keeper and checkpoint writer; one step in SKIPPED has a latent that is no
 * number, and is skipped. */
#include "shm/keeper.h"
#include "stages/roles.h"
#include "stages/trainer/rank.h"
#include "tests/unit/ckpt_world.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* ---- places ---- */

/* Chunk k of the update from t to t + 1 is written where, at that moment, nothing lies that is still to be read; and
 * whoever asks afterwards finds every chunk where it has been written. */
static void test_places(void **state)
{
    (void)state;
    for (int n = 0; n <= LG_MOMENTS_CHUNKS; n++) {
        int at[LG_MOMENTS_CHUNKS + 1]; /* the chunk that lies at a place; -1: free */
        for (uint64_t t = 0; t < 100; t++) {
            memset(at, 0xff, sizeof at);
            for (int k = 0; k < n; k++) {
                int place = lg_moments_place(n, k, t);
                assert_true(place >= 0 && place <= n && at[place] == -1);
                at[place] = k;
            }
            for (int k = 0; k < n; k++) {
                int from = lg_moments_place(n, k, t), to = lg_moments_place(n, k, t + 1);
                assert_int_equal(at[from], k);
                assert_int_equal(at[to], -1);
                at[to] = k;
                at[from] = -1;
            }
        }
        assert_int_equal(lg_moments_place(n, 0, 0), 0);
    }
    assert_int_equal(lg_moments_place(16, 0, 1), 16);
    assert_int_equal(lg_moments_place(16, 5, UINT64_MAX), (5 + 17 - UINT64_MAX % 17) % 17);
}

/* One tensor of this many elements, then a small one, a gap, and a large one; in one unit. */
static lg_params table_of(size_t first, bool in_blocks)
{
    lg_params t = {.in_blocks = in_blocks};
    lg_params_begin_unit(&t, "all");
    lg_params_add(&t, &(struct lg_param){.name = "a", .rank = 1, .dim = {(int64_t)first}});
    if (!in_blocks) return t;
    lg_params_add(&t, &(struct lg_param){.name = "b", .rank = 1, .dim = {1037}});
    lg_params_add(&t, &(struct lg_param){.name = "c", .rank = 2, .dim = {70, 100}});
    return t;
}

struct span {
    const char *from, *to;
};
static int spans_of(const struct lg_chunk *c, struct span ret[6])
{
    const size_t blocks = c->count / LG_ADAMW8_BLOCK;
    int n = 0;
    ret[n++] = (struct span){(char *)c->m, (char *)(c->m + c->full)};
    ret[n++] = (struct span){(char *)c->v, (char *)(c->v + c->full)};
    if (!c->m_code) return n;
    ret[n++] = (struct span){(char *)c->m_max, (char *)(c->m_max + blocks)};
    ret[n++] = (struct span){(char *)c->v_max, (char *)(c->v_max + blocks)};
    ret[n++] = (struct span){(char *)c->m_code, (char *)(c->m_code + c->count)};
    ret[n++] = (struct span){(char *)c->v_code, (char *)(c->v_code + c->count)};
    return n;
}

/* Chunks follow each other, the last one is shorter, none is empty; no two places overlap, nor what lies in one. */
static void check_chunks(const lg_moments_layout *l)
{
    const int n = lg_moments_chunks(l->count);
    const char *payload = (const char *)(uintptr_t)4096, *end_of_it = payload + lg_moments_bytes(l);
    struct span seen[6 * LG_MOMENTS_CHUNKS];
    size_t end = 0;
    int n_seen = 0;
    assert_true(n <= LG_MOMENTS_CHUNKS);
    for (int k = 0; k < n; k++) {
        struct lg_chunk c = lg_moments_chunk(l, (void *)(uintptr_t)payload, k, 7);
        assert_int_equal(c.first, end);
        assert_true(c.count > 0 && c.first % LG_UNIT_ALIGN == 0);
        assert_int_equal(c.m_code != NULL, l->in_blocks);
        if (!l->in_blocks) assert_int_equal(c.full, c.count);
        const int spans = spans_of(&c, seen + n_seen);
        for (struct span *s = seen + n_seen; s < seen + n_seen + spans; s++) {
            assert_true(s->from >= payload && s->to <= end_of_it);
            for (struct span *o = seen; o < s; o++)
                assert_true(o->to <= s->from || s->to <= o->from);
        }
        n_seen += spans;
        end += c.count;
    }
    assert_int_equal(end, l->count);
}

static void test_chunks(void **state)
{
    (void)state;
    static const size_t size[] = {1,     4095,  4096,   4097,    65535,
                                  65536, 65537, 131071, 1048576, 10000019};
    for (size_t i = 0; i < LG_ARRAY_LEN(size); i++)
        for (int blocks = 0; blocks < 2; blocks++)
            for (int shards = 1; shards < 4; shards++)
                for (int shard = 0; shard < shards; shard++) {
                    lg_params t = table_of(size[i], blocks);
                    lg_moments_layout l = lg_moments_layout_of(&t, shard, shards);
                    check_chunks(&l);
                    lg_moments_layout_free(&l);
                    lg_params_free(&t);
                }
    /* 16.5 bytes of state a parameter: 8 of weights, 8.5 of moments. */
    lg_params t = table_of(1 << 20, false);
    lg_moments_layout l = lg_moments_layout_of(&t, 0, 1);
    assert_int_equal(lg_moments_chunks(1 << 20), 16);
    assert_int_equal(lg_moments_bytes(&l), (size_t)(1 << 20) / 2 * 17);
    lg_params_free(&t);
}

/* In blocks: what is coded and what is fp32 is found where it belongs, in any part of any chunk; 10.2 bytes of state a
 * parameter. */
static void test_blocks(void **state)
{
    (void)state;
    lg_params t = table_of(4097, true);
    lg_moments_layout l = lg_moments_layout_of(&t, 0, 1);
    bool coded;
    assert_int_equal(t.p[1].offset, 4352); /* a block that nobody shares */
    assert_int_equal(t.p[2].offset, 4352 + 1280);
    assert_int_equal(lg_params_coded_end(&t, 0, t.count, &coded), 4352);
    assert_true(coded);
    assert_int_equal(lg_params_coded_end(&t, 4352 + 256, t.count, &coded), 4352 + 1280);
    assert_false(coded);
    assert_int_equal(l.full, 1280);
    struct lg_chunk c = lg_moments_chunk(&l, (void *)4096, 1, 3); /* from element 4096 */
    assert_true(c.first == 4096 && c.full == 1280);
    struct lg_chunk b = lg_moments_part(&l, &c, 4352 + 512, 768);
    assert_true(b.full == 768 && b.m == c.m + 512 && b.v == c.v + 512);
    struct lg_chunk last = lg_moments_part(&l, &c, 4352 + 1280, 512);
    assert_true(last.full == 0 && last.m_code == c.m_code + 1536 && last.v_max == c.v_max + 6);
    lg_moments_layout_free(&l);
    lg_params_free(&t);
    t = table_of(100 << 20, true);
    l = lg_moments_layout_of(&t, 0, 1);
    const double bytes = (double)lg_moments_bytes(&l) / (double)t.count;
    if (!(bytes > 2.15 && bytes < 2.17)) fail_msg("%f bytes of moments a parameter", bytes);
    lg_moments_layout_free(&l);
    lg_params_free(&t);
}

/* Small tensors that are one product make a large one; parameters of which only one is trained otherwise share no
 * block. */
static void test_products(void **state)
{
    (void)state;
    static const char *const groups[] = {"k lr=0.5", NULL};
    lg_params t = {.in_blocks = true};
    lg_params_begin_unit(&t, "all");
    lg_params_add(&t, &(struct lg_param){.name = "q", .rank = 1, .dim = {2000}});
    lg_params_add_packed(&t, &(struct lg_param){.name = "k", .rank = 1, .dim = {2096}});
    lg_params_add(&t, &(struct lg_param){.name = "alone", .rank = 1, .dim = {4095}});
    assert_true(lg_params_is_coded(&t, 0) && lg_params_is_coded(&t, 1));
    assert_false(lg_params_is_coded(&t, 2));
    assert_int_equal(lg_params_in_tensor(&t, 1), 2000);
    assert_int_equal(lg_params_group(&t, &(struct lg_params_grouping){.texts = groups}),
                     LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "q and k are one product"));
    lg_err_clear();
    lg_params_free(&t);
}

/* A group's own optimizer, either way. */
static void test_groups(void **state)
{
    (void)state;
    static const char *const full[] = {"a optimizer=adamw", "? lr=2", NULL};
    static const char *const coded[] = {"a optimizer=adamw8bit decay=0", NULL};
    static const struct lg_params_grouping all[] = {{full, true}, {coded, false}, {full, false}};
    static const bool want[][3] = {{false, true, false}, {true, false, false}, {false}};
    for (size_t k = 0; k < LG_ARRAY_LEN(all); k++) {
        lg_params t = {.in_blocks = lg_params_in_blocks(&all[k])};
        bool is_coded;
        assert_int_equal(t.in_blocks, k != 2);
        lg_params_begin_unit(&t, "all");
        lg_params_add(&t, &(struct lg_param){.name = "a", .rank = 1, .dim = {8192}});
        lg_params_add(&t, &(struct lg_param){.name = "b", .rank = 1, .dim = {4096}});
        lg_params_add(&t, &(struct lg_param){.name = "s", .rank = 1, .dim = {100}});
        assert_int_equal(lg_params_group(&t, &all[k]), 0);
        for (int i = 0; i < t.n; i++) assert_int_equal(lg_params_is_coded(&t, i), want[k][i]);
        assert_int_equal(lg_params_coded_end(&t, 0, t.count, &is_coded),
                         k == 2 ? t.count : (size_t)8192);
        assert_int_equal(is_coded, want[k][0]);
        lg_params_free(&t);
    }
}

static void test_piece_within(void **state)
{
    (void)state;
    const struct lg_piece p = {.first = 1000, .count = 50, .at = 300};
    struct lg_piece q = lg_piece_within(p, 310, 20);
    assert_true(q.first == 1010 && q.at == 310 && q.count == 20);
    q = lg_piece_within(p, 0, 1000);
    assert_true(q.first == 1000 && q.at == 300 && q.count == 50);
    q = lg_piece_within(p, 290, 20);
    assert_true(q.first == 1000 && q.at == 300 && q.count == 10);
    assert_int_equal(lg_piece_within(p, 0, 300).count, 0);
    assert_int_equal(lg_piece_within(p, 350, 10).count, 0);
}

/* ---- deaths ---- */

enum { RANKS = 2, STEPS = 100, SKIPPED = 7, TRIES_MAX = 1000 };

static struct ckpt_world w;
static lg_stage rank[RANKS];
static jmp_buf death;
static int calls, dies_at; /* calls of the update so far; at which it dies, 0: never */
static bool loses_copies;  /* the next that dies */

static void one_call(void)
{
    if (dies_at && ++calls == dies_at) longjmp(death, 1);
}

void __real_lg_adamw(lg_stream *s, const struct lg_adamw_args *a);
void __wrap_lg_adamw(lg_stream *s, const struct lg_adamw_args *a);
void __wrap_lg_adamw(lg_stream *s, const struct lg_adamw_args *a)
{
    one_call();
    __real_lg_adamw(s, a);
}

void __real_lg_adamw8(lg_stream *s, const struct lg_adamw8_args *a);
void __wrap_lg_adamw8(lg_stream *s, const struct lg_adamw8_args *a);
void __wrap_lg_adamw8(lg_stream *s, const struct lg_adamw8_args *a)
{
    one_call();
    __real_lg_adamw8(s, a);
}

/* Dies before, when a part of what the chunk writes is there, and after, when it does not count yet. */
void __real_lg_stream_sync(lg_stream *s);
void __wrap_lg_stream_sync(lg_stream *s);
void __wrap_lg_stream_sync(lg_stream *s)
{
    one_call();
    __real_lg_stream_sync(s);
    one_call();
}

static int try_open_rank(int r)
{
    lg_stage *st = &rank[r];
    *st = (lg_stage){.role = LG_ROLE_trainer,
                     .index = r,
                     .config = w.run.config,
                     .plan = w.run.plan,
                     .board = w.board,
                     .row = lg_board_row(w.board, LG_ROLE_trainer, r)};
    snprintf(st->run_dir, sizeof st->run_dir, "%s", w.run.dir);
    snprintf(st->runtime_dir, sizeof st->runtime_dir, "%s", w.f.dir);
    snprintf(st->keeper, sizeof st->keeper, "%s", w.f.keeper);
    assert_int_equal(lg_bus_open(&(struct lg_bus_spec){.runtime_dir = st->runtime_dir,
                                                       .role = LG_ROLE_trainer,
                                                       .index = r,
                                                       .incarnation = (lg_incarnation)(1 + r),
                                                       .plan = &st->plan},
                                 &st->bus),
                     0);
    return lg_trainer_def.open(st);
}

static void open_rank(int r)
{
    assert_int_equal(try_open_rank(r), 0);
}

static void close_rank(int r)
{
    lg_stage *st = &rank[r];
    lg_trainer_def.close(st);
    for (int i = 0; i < st->n_regions; i++) lg_region_close(&st->region[i]);
    for (int i = 0; i < st->n_devices; i++) lg_device_close(&st->device[i]);
    lg_bus_close(&st->bus);
}

/* The working weights of rank 1 are new. */
static void lose_copies(void)
{
    for (int i = 0; i < rank[1].n_regions; i++) {
        lg_region *r = rank[1].region[i];
        if (strcmp(r->name, "trainer/1/working") != 0) continue;
        memset(r->front, 0, sizeof(struct lg_working_front));
        memset(r->payload, 0, r->bytes);
        loses_copies = false;
    }
}

static void fill_floats(void *to, size_t bytes, uint64_t n)
{
    float *f = to;
    for (size_t i = 0; i < bytes / sizeof *f; i++)
        f[i] = (float)((n * 131 + i * 31) % 257) / 128 - 1;
}

/* The samples of a step. */
static void make_samples(uint64_t step)
{
    lg_window *window = ((struct trainer *)rank[0].state)->window;
    for (uint64_t n = step * w.board->s->batch; n < (step + 1) * w.board->s->batch; n++) {
        struct lg_slot *slot = lg_window_slot(window, n);
        fill_floats(lg_window_mean(window, n), window->g.latent_bytes / 2, n);
        fill_floats(lg_window_logvar(window, n), window->g.latent_bytes / 2, n + 1);
        fill_floats(lg_window_states(window, 0, n), window->g.text[0].states_bytes, n + 2);
        if (step % SKIPPED == 3) *(float *)lg_window_mean(window, n) = NAN;
        slot->key_hash = n;
        slot->text_length[0] = 1 + (int32_t)(n % 3);
        for (int f = 0; f <= LG_FIELD_TEXT; f++) lg_window_publish(window, (lg_field)f, n);
    }
}

static void play_others(void)
{
    struct lg_action a = lg_ema_next(w.board);
    if (a.kind == LG_DO_INIT || a.kind == LG_DO_ADVANCE) lg_ema_mark(w.board, a.step);
    a = lg_ckpt_next(w.board);
    if (a.kind == LG_DO_STAGE_MOMENTS) lg_ckpt_mark_staged_moments(w.board, a.step);
    if (a.kind == LG_DO_STAGE) lg_ckpt_mark_staged(w.board, a.step);
    if (a.kind == LG_DO_WRITE) lg_ckpt_mark_published(w.board, a.step);
}

/* One step of a rank; it may die in an update. true: it did, and lives again. */
static bool dies(int r, int at)
{
    const bool updates = lg_trainer_next(w.board, r).kind == LG_DO_UPDATE;
    if (setjmp(death)) {
        dies_at = 0;
        if (loses_copies) lose_copies();
        close_rank(r);
        open_rank(r);
        return true;
    }
    calls = 0;
    dies_at = updates ? at : 0;
    int rc = lg_trainer_def.step(&rank[r]);
    dies_at = 0;
    if (rc < 0) fail_msg("%s", lg_err_message());
    return false;
}

static bool is_at(uint64_t state)
{
    lg_mark all = lg_board_global_commit(w.board);
    return all != LG_MARK_NONE && lg_mark_state(all) >= state;
}

/* Ranks go on until state `state`; rank 0 or 1 dies once, at call `at` of its update. Did it? */
static bool go_on(uint64_t state, int at)
{
    bool died = false;
    if (state) make_samples(state - 1);
    for (int i = 0; i < TRIES_MAX && !is_at(state); i++) {
        play_others();
        for (int r = 0; r < RANKS; r++) {
            struct lg_action a = lg_trainer_next(w.board, r);
            if (a.kind == LG_DO_DECIDE && a.step >= state) continue;
            died |= dies(r, !died && r == at % RANKS ? at / RANKS : 0);
        }
    }
    assert_true(is_at(state));
    return died;
}

/* Weights, moments in their order, then what every rank computes with; of all ranks. */
static char *copy_state(uint64_t state, size_t *ret_bytes)
{
    const lg_trainer_state *s = w.trainer;
    size_t bytes = 0, n = 0;
    for (int r = 0; r < RANKS; r++)
        bytes += (lg_trainer_shard(s, r) + s->params.count) * sizeof(float) +
                 lg_moments_whole_bytes(&s->layout[r]);
    char *all = calloc(bytes, 1);
    for (int r = 0; r < RANKS; r++) {
        const size_t shard = lg_trainer_shard(s, r);
        struct lg_state_view v = lg_trainer_state_view(s, r, state);
        assert_true(lg_stamp_is(v.stamp, state) && lg_stamp_is(s->moments[r]->front, state));
        memcpy(all + n, v.w, shard * sizeof(float));
        n += shard * sizeof(float);
        for (int k = 0; k < lg_moments_chunks(shard); k++) {
            struct lg_chunk c = lg_trainer_chunk(s, r, k, v.scalars->optimizer_steps);
            struct span span[6];
            const int spans = spans_of(&c, span);
            for (struct span *p = span; p < span + spans; n += (size_t)(p->to - p->from), p++)
                memcpy(all + n, p->from, (size_t)(p->to - p->from));
        }
        struct trainer *t = rank[r].state;
        assert_int_equal(lg_working_begin(t->working, state), 0);
        for (int u = 0; u < s->params.n_units; u++)
            memcpy(all + n + s->params.unit[u].first * sizeof(float),
                   lg_working_unit(t->working, u), s->params.unit[u].count * sizeof(float));
        n += s->params.count * sizeof(float);
    }
    assert_int_equal(n, bytes);
    *ret_bytes = bytes;
    return all;
}

static void open_run_with(const char *more)
{
    ckpt_world_open(&w,
                    &(struct ckpt_world_spec){
                        .device = "host", .ranks = RANKS, .hidden = 48, .depth = 3, .more = more});
    for (int r = 0; r < RANKS; r++) open_rank(r);
    go_on(0, 0);
}

static void open_run(void)
{
    open_run_with(NULL);
}

static void close_run(void)
{
    for (int r = 0; r < RANKS; r++) close_rank(r);
    ckpt_world_close(&w);
}

/* In step s of the others a rank dies at call s of its update, or, where an update has so many more, at each `stride`th:
 * a state in host memory, from which weights go up, has the same bytes. */
static const struct disturbed {
    const char *more;
    int stride;
} disturbed[] = {
    {NULL, 1},
    {"[memory]\noffload_optimizer = true\n", 3},
    {"[memory]\noffload_optimizer = true\n[parallel]\nzero = 3\n", 5},
};
/* The same with moments of 8 bits. */
#define IN_BLOCKS "optimizer = \"adamw8bit\"\n"
static const struct disturbed disturbed_8bit[] = {
    {IN_BLOCKS, 1},
    {IN_BLOCKS "[memory]\noffload_optimizer = true\n[parallel]\nzero = 3\n", 5},
};

/* cmocka compares byte by byte: only to say where they differ. */
static void assert_same(const char *got, const char *want, size_t bytes)
{
    if (memcmp(got, want, bytes)) assert_memory_equal(got, want, bytes);
}

static void check_deaths(const char *undisturbed, const struct disturbed *runs, size_t n)
{
    static char *want[STEPS + 1];
    size_t bytes = 0;
    open_run_with(undisturbed);
    const int chunks = lg_moments_chunks(lg_trainer_shard(w.trainer, 0));
    for (uint64_t s = 1; s <= STEPS; s++) {
        go_on(s, 0);
        want[s] = copy_state(s, &bytes);
        /* Else the comparison would show nothing. */
        assert_true(s == 1 ||
                    (memcmp(want[s], want[s - 1], bytes) == 0) == ((s - 1) % SKIPPED == 3));
    }
    close_run();
    for (size_t i = 0; i < n; i++) {
        int deaths = 0;
        open_run_with(runs[i].more);
        for (uint64_t s = 1; s <= STEPS; s++) {
            deaths += go_on(s, RANKS + (int)s * runs[i].stride);
            char *got = copy_state(s, &bytes);
            assert_same(got, want[s], bytes);
            free(got);
        }
        print_message("%d chunks, %d deaths\n", chunks, deaths);
        assert_true(chunks > 3 && deaths > 2 * RANKS * chunks);
        close_run();
    }
    for (uint64_t s = 1; s <= STEPS; s++) free(want[s]);
}

static void test_dies_at_each_chunk(void **state)
{
    (void)state;
    check_deaths(NULL, disturbed, LG_ARRAY_LEN(disturbed));
    check_deaths(IN_BLOCKS, disturbed_8bit, LG_ARRAY_LEN(disturbed_8bit));
}

/* Working weights of which a part was lost while a rank was dead in the middle of its update: they are made from the
 * state again. */
static void test_lost_copies(void **state)
{
    (void)state;
    size_t bytes = 0;
    open_run();
    go_on(1, 0);
    go_on(2, 0);
    char *want = copy_state(2, &bytes);
    close_run();
    open_run();
    go_on(1, 0);
    loses_copies = true;
    assert_true(go_on(2, RANKS * 20)); /* the middle */
    assert_false(loses_copies);
    char *got = copy_state(2, &bytes);
    assert_same(got, want, bytes);
    free(got);
    free(want);
    close_run();
}

/* Memory that was lost is noticed before anything is computed with it. */
static void assert_parks(int r, const char *says)
{
    rank[r].me = 7;
    assert_int_equal(lg_trainer_def.step(&rank[r]), LG_ERR_PARKED);
    assert_int_equal(atomic_exchange(&rank[r].row->lost, 0), 7);
    if (!strstr(rank[r].row->cause, says)) fail_msg("no \"%s\" in: %s", says, rank[r].row->cause);
    lg_err_clear();
}

static void test_lost(void **state)
{
    (void)state;
    open_run();
    go_on(1, 0);
    make_samples(1);
    while (lg_trainer_next(w.board, 1).kind != LG_DO_UPDATE) {
        play_others();
        for (int r = 0; r < RANKS; r++)
            if (lg_trainer_next(w.board, r).kind != LG_DO_UPDATE)
                assert_true(lg_trainer_def.step(&rank[r]) >= 0);
    }
    struct lg_stamp *moments = w.trainer->moments[1]->front;
    struct lg_stamp *to = lg_trainer_state_view(w.trainer, 1, 2).stamp;
    lg_stamp_clear(moments);
    assert_parks(1, "trainer/1/moments does not hold state 1, but nothing");
    lg_stamp_set(moments, 0);
    assert_parks(1, "trainer/1/moments does not hold state 1, but 0");
    lg_stamp_set_parts(moments, 1, 2); /* of which the chunks have to lie in the other side */
    lg_stamp_clear(to);
    assert_parks(1, "trainer/1/state/a does not hold state 2, but nothing");
    lg_stamp_set(moments, 2);
    assert_parks(1, "trainer/1/state/a does not hold state 2, but nothing");
    lg_stamp_set(moments, 1);
    assert_true(lg_trainer_def.step(&rank[1]) >= 0);
    assert_true(lg_stamp_is(moments, 2) && lg_stamp_is(to, 2));
    close_run();
}

/* What another rank's working weights are gathered from. */
static void test_gathered_lost(void **state)
{
    (void)state;
    open_run_with("[memory]\noffload_optimizer = true\n[parallel]\nzero = 3\n");
    go_on(1, 0);
    make_samples(1);
    while (lg_trainer_next(w.board, 0).kind != LG_DO_FORWARD) {
        play_others();
        assert_true(lg_trainer_def.step(&rank[0]) >= 0);
    }
    struct lg_stamp *working = NULL;
    for (int i = 0; i < rank[0].n_regions; i++)
        if (!strcmp(rank[0].region[i]->name, "trainer/1/working"))
            working = rank[0].region[i]->front;
    assert_non_null(working);
    assert_true(lg_stamp_is(working, 1));
    lg_stamp_clear(working);
    assert_parks(0, "trainer/1/working does not hold state 1, but nothing");
    lg_stamp_set(working, 0);
    assert_parks(0, "trainer/1/working does not hold state 1, but 0");
    lg_stamp_set(working, 1);
    assert_true(lg_trainer_def.step(&rank[0]) >= 0);
    close_run();
}

/* A rank's moments are nobody else's: that another rank has begun does not say that they were made, that it has begun
 * itself does. */
static void test_gone(void **state)
{
    (void)state;
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "host", .ranks = RANKS});
    open_rank(0);
    assert_int_equal(lg_trainer_def.step(&rank[0]), LG_STEP_WORKED);
    assert_true(lg_trainer_began(w.board));
    assert_int_equal(lg_keeper_drop(w.f.keeper, "trainer/1/moments"), 0);
    open_rank(1);
    assert_int_equal(lg_trainer_def.step(&rank[1]), LG_STEP_WORKED);
    close_rank(1);
    assert_int_equal(lg_keeper_drop(w.f.keeper, "trainer/1/moments"), 0);
    assert_int_equal(try_open_rank(1), LG_ERR_PARKED);
    assert_non_null(strstr(rank[1].row->cause, "trainer/1/moments is lost"));
    lg_err_clear();
    close_run();
}

/* Working weights are their group's alone, here each rank's own: the same. */
static void test_working_gone(void **state)
{
    (void)state;
    ckpt_world_open(&w, &(struct ckpt_world_spec){
                            .device = "host",
                            .ranks = RANKS,
                            .more = "[parallel]\nzero = 0\n[memory]\noffload_optimizer = true\n"});
    open_rank(0);
    assert_int_equal(lg_trainer_def.step(&rank[0]), LG_STEP_WORKED);
    assert_true(lg_trainer_began(w.board));
    open_rank(1);
    assert_int_equal(lg_trainer_def.step(&rank[1]), LG_STEP_WORKED);
    close_rank(1);
    assert_int_equal(lg_keeper_drop(w.f.keeper, "trainer/1/working"), 0);
    assert_int_equal(try_open_rank(1), LG_ERR_PARKED);
    assert_non_null(strstr(rank[1].row->cause, "trainer/1/working is lost"));
    lg_err_clear();
    close_run();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_piece_within),
        cmocka_unit_test(test_dies_at_each_chunk),
        cmocka_unit_test(test_lost_copies),
        cmocka_unit_test(test_lost),
        cmocka_unit_test(test_gathered_lost),
        cmocka_unit_test(test_gone),
        cmocka_unit_test(test_working_gone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
