/* Runs the simulation of sim_hosts.h over thousands of seeds, then with each planted violation, which it must notice.
 *
 *     test_sim_hosts                      everything
 *     test_sim_hosts SEED [PLANT]         one run with a trace on stderr
 *     test_sim_hosts FROM-TO [PLANT]      many
 */
#include "tests/unit/seeds.h"
#include "tests/unit/sim_hosts.h"
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { HONEST_MS = 6000, HONEST_SEEDS = 300, PLANT_SEEDS_MAX = 1500 };

static struct sim_hosts_result g_sum;

static bool run(const struct seeds_run *run, char *ret_why, size_t bytes)
{
    struct sim_hosts_result r;
    sim_hosts_run(&(struct sim_hosts_options){.seed = run->seed,
                                              .plant = (enum sim_hosts_plant)run->bug,
                                              .trace = run->told},
                  &r);
    snprintf(ret_why, bytes, "%s", r.why);
    uint64_t *to = &g_sum.turns, *from = &r.turns;
    for (size_t i = 0; i < (sizeof r - offsetof(struct sim_hosts_result, turns)) / sizeof *to; i++)
        to[i] += from[i];
    return !r.failed;
}

static const char *plant_name(int p)
{
    return sim_hosts_plant_name((enum sim_hosts_plant)p);
}

static const char *plant_what(int p)
{
    return sim_hosts_plant_what((enum sim_hosts_plant)p);
}

static const struct seeds_spec g_spec = {.program = "test_sim_hosts",
                                         .bugs = SIM_HOSTS_PLANTS,
                                         .bug_name = plant_name,
                                         .bug_what = plant_what,
                                         .run = run};

static void test_honest(void **state)
{
    (void)state;
    double cpu_s;
    memset(&g_sum, 0, sizeof g_sum);
    uint64_t runs = seeds_honest(&g_spec, HONEST_SEEDS, HONEST_MS, &cpu_s);
    assert_true(runs > 0);
    print_message("%" PRIu64 " runs, %" PRIu64 " turns, %" PRIu64 " commits, %" PRIu64
                  " processes killed, %" PRIu64 " hosts dead (%" PRIu64 " that led), %" PRIu64
                  " shut out, %" PRIu64 " taken in, %" PRIu64 " epochs, %" PRIu64
                  " times cut off, %" PRIu64 " connections failed, %" PRIu64 " drains, in %.1f s\n",
                  runs, g_sum.turns, g_sum.commits, g_sum.kills, g_sum.host_deaths, g_sum.leaders,
                  g_sum.shut_out, g_sum.taken_in, g_sum.epochs, g_sum.cuts, g_sum.failures,
                  g_sum.drains, cpu_s);
    /* A simulation in which nothing happens would find nothing. */
    assert_true(g_sum.kills > 10 * runs && g_sum.host_deaths > runs && g_sum.leaders > runs / 4);
    assert_true(g_sum.shut_out > runs / 2 && g_sum.taken_in > runs && g_sum.cuts > runs);
    assert_true(g_sum.failures > runs && g_sum.drains > 0);
}

/* Connections that go silent, of which the transport tells nobody: as one is made; one that had been heard; two of the same two
 * at once. Notes that are lost: one of many; a leader's only card, with whose verdicts a host that comes would have learned that
 * its state is to be written. */
static void test_what_is_lost_in_silence(void **state)
{
    (void)state;
    const uint64_t seeds[] = {9, 24, 2015, 2305, 3, 107362};
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        char why[256] = "";
        if (!run(&(struct seeds_run){.seed = seeds[i]}, why, sizeof why))
            fail_msg("seed %" PRIu64 ": %s", seeds[i], why);
    }
}

static void test_plants(void **state)
{
    (void)state;
    assert_int_equal(seeds_missed_bugs(&g_spec, PLANT_SEEDS_MAX), 0);
}

int main(int argc, char **argv)
{
    int code = seeds_replay(argc, argv, &g_spec);
    if (code >= 0) return code;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_honest),
                                       cmocka_unit_test(test_what_is_lost_in_silence),
                                       cmocka_unit_test(test_plants)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
