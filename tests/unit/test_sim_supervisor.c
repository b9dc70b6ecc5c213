/* The supervisor on a pretended machine (tests/sim/supervisor.h), over thousands of seeds; then with
 * machines that are broken in one way, which must be noticed.
 *
 *     test_sim_supervisor                       everything
 *     test_sim_supervisor SEED [TROUBLE]        one run, told on stderr
 *     test_sim_supervisor FROM-TO [TROUBLE]     many
 */
#include "tests/sim/supervisor.h"
#include "tests/unit/seeds.h"
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { HONEST_MS = 3000, HONEST_SEEDS = 600, TROUBLE_SEEDS_MAX = 1500 };

static struct sim_machine_result g_sum;

static bool run(const struct seeds_run *run, char *ret_why, size_t bytes)
{
    struct sim_machine_result r;
    sim_machine_run(&(struct sim_machine_options){.run = {.seed = run->seed, .trace = run->told},
                                                  .trouble = (enum sim_trouble)run->bug},
                    &r);
    snprintf(ret_why, bytes, "%s", r.run.why);
    for (size_t i = offsetof(struct sim_machine_result, run.steps) / sizeof(uint64_t);
         i < sizeof r / sizeof(uint64_t); i++) /* every figure is one of these */
        ((uint64_t *)&g_sum)[i] += ((uint64_t *)&r)[i];
    return !r.run.failed;
}

static const char *trouble_name(int t)
{
    static const char *const name[] = {"HONEST",
#define X(name, what) #name,
                                       SIM_MACHINE_TROUBLES(X)
#undef X
    };
    return name[t];
}

static const char *trouble_what(int t)
{
    static const char *const what[] = {"nothing",
#define X(name, what) what,
                                       SIM_MACHINE_TROUBLES(X)
#undef X
    };
    return what[t];
}

/* Memory of an lgsup that is killed is given back by the machine (tests/sim/machine_calls.c), but for the text
 * of a file that was about to be published: open_memstream allocates it inside libc. */
const char *__lsan_default_suppressions(void);
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void)
{
    return "leak:_IO_mem_finish\n";
}

static const struct seeds_spec g_spec = {.program = "test_sim_supervisor",
                                         .bugs = SIM_TROUBLES,
                                         .bug_name = trouble_name,
                                         .bug_what = trouble_what,
                                         .run = run};

static void check_swaps(uint64_t runs)
{
    uint64_t done = 0;
    const struct sim_machine_result *s = &g_sum;
    for (int r = 0; r < LG_ROLE_keeper; r++) {
        if (runs > HONEST_SEEDS) assert_true(s->swaps[r] > 0);
        done += s->swaps[r];
    }
    print_message("%" PRIu64 " swap orders, %" PRIu64 " while a checkpoint was written: %" PRIu64
                  " carried out (%" PRIu64 " of all ranks), %" PRIu64
                  " refused or rolled back, %" PRIu64 " cut short by a death of lgsup; %" PRIu64
                  " processes took over\n",
                  s->swap_orders, s->swaps_in_write, done, s->swaps[LG_ROLE_trainer],
                  s->swap_errors, s->swap_deaths, s->successions);
    assert_true(done > runs / 2 && s->swap_errors > runs && s->swap_deaths > runs / 10);
    assert_true(s->swaps_in_write > runs / 4 && s->successions > runs / 2);
}

static void test_honest(void **state)
{
    (void)state;
    double cpu_s;
    memset(&g_sum, 0, sizeof g_sum);
    uint64_t runs = seeds_honest(&g_spec, HONEST_SEEDS, HONEST_MS, &cpu_s);
    assert_true(runs > 0);
    const struct sim_machine_result *s = &g_sum;
    print_message("%" PRIu64 " runs, %" PRIu64 " steps, %" PRIu64 " kills (%.0f/s of CPU), %" PRIu64
                  " of lgsup, %" PRIu64 " of the keeper; %" PRIu64 " starts, %" PRIu64
                  " hangs, %" PRIu64 " sleeps, %" PRIu64 " messages, %" PRIu64
                  " takeovers, %" PRIu64 " commits, %" PRIu64 " parked, %" PRIu64
                  " lost their memory; %" PRIu64 " went on from it after they were parked, %" PRIu64
                  " scale orders; %" PRIu64 " times the keeper's socket was removed\n",
                  runs, s->run.steps, s->run.kills, (double)s->run.kills / cpu_s, s->lgsup_deaths,
                  s->keeper_deaths, s->starts, s->hangs, s->sleeps, s->messages, s->run.takeovers,
                  s->run.commits, s->parks, s->memory_losses, s->memory_resumes, s->scales,
                  s->unreachables);
    print_message("%" PRIu64
                  " times the keeper and all who hold the training state died at once, %" PRIu64
                  " of them lgsup and all but a swap's processes; %" PRIu64
                  " processes waited for copies; %" PRIu64 " were stopped before they had joined\n",
                  s->disasters, s->spared, s->waits, s->unjoined);
    assert_true(s->disasters > runs / 4 && s->spared > runs / 20 && s->waits > runs &&
                s->unjoined > runs / 10);
    print_message("%" PRIu64 " parked by a role that hung in each try, %" PRIu64
                  " kills of those that were idle or had got something done\n",
                  s->stuck_parks, s->gentle_kills);
    assert_true((s->stuck_parks > 0 || runs < 400) && s->gentle_kills > runs / 10);
    assert_true((s->memory_resumes > 0 || runs < 400) && s->scales > runs / 2 &&
                s->unreachables > runs / 10);
    assert_true(s->run.kills > 10 * runs && s->lgsup_deaths > runs && s->hangs > runs / 10 &&
                s->keeper_deaths > runs / 10 && s->parks > 0 && s->sleeps > runs / 20);
    assert_true(s->memory_losses > 0 || runs < 400); /* each judged by machine_memory.c */
    check_swaps(runs);
}

static void test_troubles(void **state)
{
    (void)state;
    assert_int_equal(seeds_missed_bugs(&g_spec, TROUBLE_SEEDS_MAX), 0);
}

int main(int argc, char **argv)
{
    int code = seeds_replay(argc, argv, &g_spec);
    if (code >= 0) return code;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_honest),
                                       cmocka_unit_test(test_troubles)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
