/* The data set of a run: what loaders agree on (shm/data_set.h), what a manifest says of it, which sample is
 * which item behind a change, and how a message names the difference (stages/io/source_parts.h). */
#include "config/data_set.h"
#include "config/manifest.h"
#include "stages/io/permute.h"
#include "stages/io/source_parts.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include "tests/unit/source_fixture.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static struct shm_fixture f;

static int setup(void **state)
{
    source_setup(state);
    shm_fixture_open(&f, 2);
    return 0;
}

static int teardown(void **state)
{
    shm_fixture_close(&f);
    return source_teardown(state);
}

/* A board of a run that goes on at `step` (4 samples each), trained on these parts. */
static void board(uint64_t step, bool may_change, const struct lg_data_part *data, int n)
{
    struct lg_board_spec spec = {.plan = &f.plan,
                                 .start_step = step,
                                 .max_steps = 1000,
                                 .data = data,
                                 .n_data = n,
                                 .data_may_change = may_change};
    lg_board_close(&f.board);
    assert_int_equal(lg_board_create(f.board_path, &spec, &f.board), 0);
}

static void assert_agrees(uint64_t items, uint64_t hash)
{
    struct lg_data_part want;
    assert_int_equal(lg_data_agree(f.board, items, hash, &want), 0);
}

/* Refused; what is expected has so many items. */
static void assert_differs(uint64_t items, uint64_t hash, uint64_t expected)
{
    struct lg_data_part want = {.items = 99};
    assert_int_equal(lg_data_agree(f.board, items, hash, &want), LG_ERR_MISMATCH);
    assert_int_equal(want.items, expected);
}

static struct lg_data_part g_part[LG_DATA_PARTS_MAX];
static void assert_part(int n, int at, struct lg_data_part want)
{
    assert_int_equal(lg_data_parts(f.board, g_part), n);
    assert_true(lg_data_same(&g_part[at], &want));
}

static void test_a_new_run(void **state)
{
    (void)state;
    assert_int_equal(lg_data_parts(f.board, g_part), 0);
    assert_agrees(10, 0xa);
    assert_part(1, 0, (struct lg_data_part){0, 0, 10, 0xa});
    assert_differs(11, 0xb, 10);
    assert_agrees(10, 0xa); /* a later loader */
    assert_part(1, 0, (struct lg_data_part){0, 0, 10, 0xa});
}

/* The first loader dies after it has won and before it has stored the number of items. */
static void test_the_first_dies_between(void **state)
{
    (void)state;
    atomic_store(&f.board->s->data.hash, 0xa);
    assert_int_equal(lg_data_parts(f.board, g_part), 0);
    assert_differs(11, 0xb, 0);
    assert_agrees(10, 0xa);
    assert_part(1, 0, (struct lg_data_part){0, 0, 10, 0xa});
}

static void test_a_resume(void **state)
{
    (void)state;
    const struct lg_data_part known = {0, 0, 10, 0xa};
    board(6, false, &known, 1);
    assert_part(1, 0, known); /* also before any loader has come */
    assert_differs(11, 0xb, 10);
    assert_differs(11, 0xb, 10); /* and for ever: nothing was stored */
    assert_agrees(10, 0xa);
    assert_differs(11, 0xb, 10);
    assert_part(1, 0, known);
    /* A checkpoint of a build that did not know. */
    board(6, false, NULL, 0);
    assert_agrees(11, 0xb);
    assert_part(1, 0, (struct lg_data_part){0, 0, 11, 0xb});
}

static void test_an_allowed_change(void **state)
{
    (void)state;
    const struct lg_data_part known[] = {{0, 0, 10, 0xa}, {24, 3, 7, 0xb}};
    board(6, true, known, 1);
    assert_agrees(7, 0xb); /* sample 24 lies in epoch 2 of ten items: 3 is the next */
    assert_part(2, 1, known[1]);
    assert_part(2, 0, known[0]);
    assert_differs(10, 0xa, 7); /* allowed once, not for every loader */
    board(6, true, known, 1);
    assert_agrees(10, 0xa); /* allowed, and not so */
    assert_part(1, 0, known[0]);
    board(13, true, known, 2); /* a second one: (52 - 24) samples are 4 whole epochs of 7 */
    assert_agrees(8, 0xc);
    assert_part(3, 2, (struct lg_data_part){52, 7, 8, 0xc});
    board(6, true, known, 2); /* nothing was trained on the second: it is forgotten */
    assert_agrees(8, 0xc);
    assert_part(2, 1, (struct lg_data_part){24, 3, 8, 0xc});
}

static void test_tokenizers(void **state)
{
    (void)state;
    assert_true(lg_data_same_tokenizer(f.board, 0, 5));
    assert_true(lg_data_same_tokenizer(f.board, 0, 5));
    assert_false(lg_data_same_tokenizer(f.board, 0, 7));
    assert_true(lg_data_same_tokenizer(f.board, 0, 5));
    assert_true(lg_data_same_tokenizer(f.board, 2, 7)); /* each text has its own */
    assert_false(lg_data_same_tokenizer(f.board, 2, 5));
}

/* Loaders that come at one time, of two minds: one wins, and all who think so agree. */
struct mind {
    lg_board *board;
    pthread_barrier_t *begin;
    uint64_t hash;
    int rc;
};
static void *make_up(void *arg)
{
    struct mind *m = arg;
    struct lg_data_part want;
    pthread_barrier_wait(m->begin);
    m->rc = lg_data_agree(m->board, 10 * m->hash, m->hash, &want);
    return NULL;
}

static void test_of_two_minds(void **state)
{
    (void)state;
    enum { THREADS = 6, ROUNDS = 300 };
    int won[3] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t thread[THREADS];
        pthread_barrier_t begin;
        struct mind mind[THREADS];
        board(0, false, NULL, 0);
        pthread_barrier_init(&begin, NULL, THREADS);
        for (int i = 0; i < THREADS; i++) {
            mind[i] = (struct mind){f.board, &begin, 1 + (uint64_t)i % 2, 0};
            assert_int_equal(pthread_create(&thread[i], NULL, make_up, &mind[i]), 0);
        }
        for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
        pthread_barrier_destroy(&begin);
        assert_int_equal(lg_data_parts(f.board, g_part), 1);
        assert_int_equal(g_part[0].items, 10 * g_part[0].hash);
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(mind[i].rc, mind[i].hash == g_part[0].hash ? 0 : LG_ERR_MISMATCH);
        won[g_part[0].hash]++;
    }
    print_message("%d and %d rounds\n", won[1], won[2]);
}

/* ---- manifests ---- */

static lg_manifest *manifest(uint64_t step, const struct lg_data_part *data, int n)
{
    static lg_manifest m;
    m = (lg_manifest){.name = "m",
                      .step = step,
                      .next_n = step * 4,
                      .isa = "sse2",
                      .ranks = 1,
                      .threads = 1,
                      .n_data = n};
    if (n) memcpy(m.data, data, sizeof *data * (size_t)n);
    scratch_write("m/state", "a state");
    assert_int_equal(lg_manifest_add(&m, scratch_path("m"), "state"), 0);
    return &m;
}

static int round_trip(uint64_t step, const struct lg_data_part *data, int n, lg_manifest *ret)
{
    assert_int_equal(lg_manifest_save(manifest(step, data, n), scratch_path("m")), 0);
    int rc = lg_manifest_load(scratch_path("m"), ret);
    lg_err_clear();
    return rc;
}

static void test_manifests(void **state)
{
    (void)state;
    static lg_manifest got, older;
    const struct lg_data_part two[] = {{0, 0, 10, 0xa}, {24, 3, UINT64_C(1) << 40, UINT64_MAX}};
    assert_int_equal(round_trip(13, two, 2, &got), 0);
    assert_int_equal(got.n_data, 2);
    for (int i = 0; i < 2; i++) assert_true(lg_data_same(&got.data[i], &two[i]));
    /* One history, seen from two steps of it. */
    older = got;
    assert_true(lg_manifest_same_data(&older, &got));
    older.n_data = 1;
    older.step = 6;
    older.next_n = 24;
    assert_true(lg_manifest_same_data(&older, &got));
    older.next_n = 28; /* trained on the first behind where the newer one says it had changed */
    assert_false(lg_manifest_same_data(&older, &got));
    older.next_n = 24;
    older.data[0].hash++;
    assert_false(lg_manifest_same_data(&older, &got));
    older.n_data = 0; /* of a build that did not know */
    assert_true(lg_manifest_same_data(&older, &got));
    older = got;
    older.data[1].first++;
    assert_false(lg_manifest_same_data(&older, &got));
    assert_int_equal(round_trip(13, two, 0, &got), 0);
    assert_int_equal(got.n_data, 0);
    /* What would lead to a division by nothing, or behind the end. */
    const struct lg_data_part bad[][2] = {{{0, 0, 0, 0xa}, {24, 3, 7, 0xb}},
                                          {{0, 0, 10, 0}, {24, 3, 7, 0xb}},
                                          {{0, 0, 10, 0xa}, {0, 3, 7, 0xb}},
                                          {{24, 0, 10, 0xa}, {20, 3, 7, 0xb}},
                                          {{0, 0, 10, 0xa}, {53, 3, 7, 0xb}}};
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++)
        assert_int_equal(round_trip(13, bad[i], 2, &got), LG_ERR_CORRUPT);
}

/* ---- samples ---- */

/* Behind a change every item of the new data set comes once before any comes twice, in an order of its own. */
static void test_samples_of_a_part(void **state)
{
    (void)state;
    enum { ITEMS = 7, FIRST = 24, EPOCH = 3 };
    lg_source *s = open_source(make_shard("a.tar", 0, ITEMS));
    static uint8_t pixels[3 * 8 * 8];
    lg_sample x = {0};
    struct lg_sample_rule rule = {.seed = 5, .shape = {1, 8, 8}, .first = FIRST, .epoch = EPOCH};
    for (uint64_t epoch = EPOCH; epoch < EPOCH + 3; epoch++) {
        unsigned seen = 0;
        for (uint64_t i = 0; i < ITEMS; i++) {
            uint64_t n = FIRST + (epoch - EPOCH) * ITEMS + i;
            assert_int_equal(lg_source_sample(s, &rule, n, pixels, &x), 0);
            assert_int_equal(x.item, lg_permute(5, epoch, i, ITEMS));
            seen |= 1u << x.item;
        }
        assert_int_equal(seen, (1u << ITEMS) - 1);
    }
    lg_sample_free(&x);
    lg_source_close(&s);
}

/* ---- what a message says ---- */

static uint64_t save_parts(const char *path)
{
    lg_source *s = open_source(path);
    uint64_t hash = lg_source_hash(s);
    assert_int_equal(lg_source_parts_save(s, lg_source_hash(s), scratch_path("data.json")), 0);
    lg_source_close(&s);
    return hash;
}

static void assert_difference(const char *path, uint64_t was, const char *words)
{
    char text[128];
    lg_source *s = open_source(path);
    lg_source_parts_compare(s, scratch_path("data.json"), was, text, sizeof text);
    lg_source_close(&s);
    if (!strstr(text, words) || (!*words && *text)) fail_msg("\"%s\", not \"%s\"", text, words);
}

static void test_differences_of_shards(void **state)
{
    (void)state;
    lg_mkdirs(scratch_path("d"));
    for (char c = 'a'; c <= 'c'; c++) {
        char name[] = {'d', '/', c, '.', 't', 'a', 'r', 0};
        make_shard(name, c, 4);
    }
    char d[LG_PATH_BYTES];
    snprintf(d, sizeof d, "%s", scratch_path("d"));
    uint64_t was = save_parts(d);
    assert_difference(d, was, "");
    assert_difference(d, was + 1, ""); /* the list is of another one: nothing is known */
    make_shard("d/b.tar", 'b', 5);
    assert_difference(d, was, "shard b.tar (4 items, now 5)");
    make_shard("d/b.tar", 'b', 4);
    assert_difference(d, was, "");
    make_shard("d/aa.tar", 'x', 1);
    assert_difference(d, was, "shard aa.tar is new");
    unlink(scratch_path("d/aa.tar"));
    unlink(scratch_path("d/a.tar"));
    assert_difference(d, was, "shard a.tar is gone");
    make_shard("d/a.tar", 'a', 4);
    unlink(scratch_path("d/c.tar"));
    assert_difference(d, was, "shard c.tar is gone");
    make_shard("d/c.tar", 'c', 4);
    make_shard("d/d.tar", 'd', 4);
    assert_difference(d, was, "shard d.tar is new");
    static const char *const bad[] = {"", "{", "[]", "{\"hash\": \"1\"}", "{\"parts\": 1}"};
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        scratch_write("data.json", bad[i]);
        assert_difference(d, was, "");
    }
    assert_true(save_parts(d) != was);
    make_shard("d/d.tar", 'd', 3);
    assert_difference(d, was, "");
}

static void test_differences_of_folders(void **state)
{
    (void)state;
    enum { FILES = LG_PART_ITEMS + 20 };
    for (int i = 0; i < FILES; i++) {
        char name[32];
        snprintf(name, sizeof name, "p/%05d.png", i);
        scratch_write(name, "not looked into");
    }
    char p[LG_PATH_BYTES];
    snprintf(p, sizeof p, "%s", scratch_path("p"));
    uint64_t was = save_parts(p);
    scratch_write("p/01030.png", "of another size");
    assert_difference(p, was, "");
    scratch_write("p/01030.png", "of another size than it was");
    assert_difference(p, was, "in the files from 01024 on");
    scratch_write("p/01030.png", "not looked into");
    unlink(scratch_path("p/00003.png"));
    assert_difference(p, was, "in the files from 00000 on");
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_a_new_run),
        T(test_the_first_dies_between),
        T(test_a_resume),
        T(test_an_allowed_change),
        T(test_tokenizers),
        T(test_of_two_minds),
        T(test_manifests),
        T(test_samples_of_a_part),
        T(test_differences_of_shards),
        T(test_differences_of_folders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
