/* Checkpoints, ledger and metrics on a disk that loses power (tests/sim/disk.h): the real
 * publishing, retention, records and choice of what to continue from.
 *
 * A run is lives in a row: each begins as `lgsup start` does, trains on (one record a step),
 * publishes every few steps while the trainer goes on, and ends at a drawn change of the disk by a
 * power cut or by the death of its processes. Moreover the machine is cut, and its processes die,
 * in a copy of the disk at every change of it, and a start is made of what is left. After every
 * one:
 *   - a start finds a checkpoint at least as new as the newest whose publishing was reported;
 *   - what it finds is whole, and its bytes are those of its step;
 *   - the ledger is complete up to it, metrics.jsonl has a line for every step up to it and no other;
 *   - after retention `keep` checkpoints are left, the newest among them, and no leftovers.
 * The run itself: tests/sim/disk_world.h.
 * Arguments: tests/unit/seeds.h.
 */
#include "base/log.h"
#include "tests/sim/disk_world.h"
#include "tests/unit/seeds.h"
#include <inttypes.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { RANDOM_MS = 4000, RANDOM_SEEDS = 130, LIE_SEEDS_MAX = 100 };

static struct world g;

/* false: g.why. */
static bool run_seed(uint64_t seed, enum disk_lie lie)
{
    open_world(&g, seed, lie);
    int failed = setjmp(g.failed);
    if (!failed) live_on(&g);
    lg_records_close(&g.now.records);
    return !failed;
}

static bool run(const struct seeds_run *r, char *ret_why, size_t bytes)
{
    g.trace = r->told;
    bool passed = run_seed(r->seed, (enum disk_lie)r->bug);
    snprintf(ret_why, bytes, "%s", g.why);
    return passed;
}

static const char *lie_name(int l)
{
    static const char *const name[] = {"HONEST",
#define X(name, what) #name,
                                       DISK_LIES_LIST(X)
#undef X
    };
    return name[l];
}

static const char *lie_what(int l)
{
    static const char *const what[] = {"nothing",
#define X(name, what) what,
                                       DISK_LIES_LIST(X)
#undef X
    };
    return what[l];
}

static const struct seeds_spec g_spec = {.program = "test_sim_disk",
                                         .bugs = DISK_LIES,
                                         .bug_name = lie_name,
                                         .bug_what = lie_what,
                                         .run = run};

static int make_world(void **state)
{
    (void)state;
    memset(&g, 0, sizeof g);
    make_net(&g);
    lg_log_set_level(LG_ERROR + 1);
    return 0;
}
static int end_world(void **state)
{
    (void)state;
    disk_format(0, DISK_HONEST);
    lg_params_free(&g.params);
    free(g.values);
    return 0;
}

/* One undisturbed life, cut at each change with everything lost, kept, and much in between. */
static void test_every_change(void **state)
{
    (void)state;
    static const int fates[] = {0,  16, 1,  2,  4,  6,  8,  10, 12, 14, 15,
                                -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, DISK_DEATH};
    for (volatile uint64_t seed = 11; seed <= 12; seed++) { /* outlives setjmp */
        open_world(&g, seed, DISK_HONEST);
        g.every = 5;
        g.keep = 1;
        g.fate = fates;
        g.n_fates = LG_ARRAY_LEN(fates);
        if (setjmp(g.failed)) fail_msg("change %" PRIu64 ": %s", disk_changes() + 1, g.why);
        assert_true(start(&g, true));
        live(&g);
        look_at_futures(&g);
        lg_records_close(&g.now.records);
        assert_int_equal(g.now.published, DISK_STEPS_MAX);
        print_message("%" PRIu64 " changes, %zu futures of each\n", disk_changes(),
                      LG_ARRAY_LEN(fates));
        assert_true(disk_changes() > 200);
    }
}

/* A start dies at that change, the next one publishes, and of what is not durable then nothing is kept. Returns whether
 * it died. */
static bool first_start_dies(uint64_t at)
{
    open_world(&g, 11, DISK_HONEST);
    g.n_fates = 0;
    if (setjmp(g.failed)) fail_msg("change %" PRIu64 ": %s", disk_changes(), g.why);
    disk_die_at(at);
    const bool died = !start(&g, true);
    lg_records_close(&g.now.records);
    lg_err_clear();
    disk_die_at(0);
    disk_revive();
    assert_true(start(&g, g.now.no_board));
    live(&g);
    lg_records_close(&g.now.records);
    assert_int_equal(g.now.published, DISK_STEPS_MAX);
    disk_power_loss(0);
    assert_true(start(&g, true));
    lg_records_close(&g.now.records);
    assert_int_equal(g.now.published, DISK_STEPS_MAX);
    return died;
}

static void test_first_start_dies(void **state)
{
    (void)state;
    uint64_t at = 1;
    while (first_start_dies(at)) at++;
    print_message("%" PRIu64 " changes\n", at - 1);
    assert_true(at > 10);
}

/* Seeds at which a promise was once broken, or seemed to be. */
static void test_former_failures(void **state)
{
    (void)state;
    static const uint64_t seeds[] = {650,        1676,       1902,       1071956978,
                                     1071957557, 1071957558, 1071957873, 1071958291};
    for (size_t i = 0; i < LG_ARRAY_LEN(seeds); i++)
        if (!run_seed(seeds[i], DISK_HONEST)) fail_msg("seed %" PRIu64 ": %s", seeds[i], g.why);
}

static void test_random(void **state)
{
    (void)state;
    double cpu_s;
    memset(&g.count, 0, sizeof g.count);
    uint64_t runs = seeds_honest(&g_spec, RANDOM_SEEDS, RANDOM_MS, &cpu_s);
    const struct counts *c = &g.count;
    assert_true(runs > 0);
    uint64_t all = c->cuts + c->kills + c->futures;
    print_message("%" PRIu64 " runs, %" PRIu64 " checkpoints; %" PRIu64 " power cuts and %" PRIu64
                  " deaths ended lives, %" PRIu64 " and %" PRIu64
                  " were looked at (%.0f/s of CPU of all); of these %" PRIu64
                  " left what another had left, %" PRIu64 " starts were made\n",
                  runs, c->publishes, c->cuts, c->kills, c->futures - c->future_deaths,
                  c->future_deaths, (double)all / cpu_s, c->known, c->futures - c->known);
    assert_true(c->cuts > runs && c->kills > runs && c->publishes > runs);
    assert_true(c->futures > 200 * runs && c->futures - c->known > 50 * runs);
}

/* Each promise of the disk is needed: when it is broken, some run must notice. */
static void test_lies(void **state)
{
    (void)state;
    assert_int_equal(seeds_missed_bugs(&g_spec, LIE_SEEDS_MAX), 0);
}

int main(int argc, char **argv)
{
    if (argc > 1) make_world(NULL);
    int code = seeds_replay(argc, argv, &g_spec);
    if (code >= 0) return code;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_change),
                                       cmocka_unit_test(test_first_start_dies),
                                       cmocka_unit_test(test_former_failures),
                                       cmocka_unit_test(test_random), cmocka_unit_test(test_lies)};
    return cmocka_run_group_tests(tests, make_world, end_world);
}
