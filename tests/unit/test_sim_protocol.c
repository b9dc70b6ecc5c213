/* Runs the simulation of sim.h over thousands of seeds, then with each planted violation, which it
 * must notice.
 *
 *     test_sim_protocol                      everything
 *     test_sim_protocol SEED [PLANT]         one run with a trace on stderr
 *     test_sim_protocol FROM-TO [PLANT]      many
 */
#include "tests/unit/seeds.h"
#include "tests/unit/sim.h"
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { HONEST_MS = 3000, HONEST_SEEDS = 6000, PLANT_SEEDS_MAX = 6000 };

static struct sim_result g_sum;

static bool run(const struct seeds_run *run, char *ret_why, size_t bytes)
{
    struct sim_result r;
    sim_run(&(struct sim_options){.seed = run->seed,
                                  .plant = (enum sim_plant)run->bug,
                                  .trace = run->told},
            &r);
    snprintf(ret_why, bytes, "%s", r.why);
    g_sum.steps += r.steps;
    g_sum.kills += r.kills;
    g_sum.takeovers += r.takeovers;
    g_sum.commits += r.commits;
    g_sum.checkpoints += r.checkpoints;
    g_sum.drains += r.drains;
    g_sum.losses += r.losses;
    g_sum.losses_seen += r.losses_seen;
    g_sum.repeats += r.repeats;
    return !r.failed;
}

static const char *plant_name(int p)
{
    return sim_plant_name((enum sim_plant)p);
}

static const char *plant_what(int p)
{
    return sim_plant_what((enum sim_plant)p);
}

static const struct seeds_spec g_spec = {.program = "test_sim_protocol",
                                         .bugs = SIM_PLANTS,
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
    print_message(
        "%" PRIu64 " runs, %" PRIu64 " steps, %" PRIu64 " kills (%.0f/s of CPU), %" PRIu64
        " takeovers, %" PRIu64 " commits, %" PRIu64 " checkpoints, %" PRIu64 " drains, %" PRIu64
        " times memory was lost, %" PRIu64 " times it was needed, %" PRIu64
        " times a rank began again with its group, in %.1f s\n",
        runs, g_sum.steps, g_sum.kills, (double)g_sum.kills / cpu_s, g_sum.takeovers, g_sum.commits,
        g_sum.checkpoints, g_sum.drains, g_sum.losses, g_sum.losses_seen, g_sum.repeats, cpu_s);
    /* A simulation in which nothing happens would find nothing. */
    assert_true(g_sum.kills > runs && g_sum.takeovers > runs / 10 && g_sum.checkpoints > runs);
    assert_true(g_sum.losses > runs / 20 && g_sum.losses_seen > g_sum.losses / 4);
    assert_true(g_sum.losses_seen < g_sum.losses && g_sum.repeats > runs);
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
                                       cmocka_unit_test(test_plants)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
