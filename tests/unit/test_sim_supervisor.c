/* The supervisor on a pretended machine (tests/sim/supervisor.h), over thousands of seeds; then with
 * machines that are broken in one way, which must be noticed.
 *
 *     test_sim_supervisor                   everything
 *     test_sim_supervisor SEED [TROUBLE]    one run, told on stderr (TROUBLE: of enum sim_trouble)
 */
#include "base/clock.h"
#include "tests/sim/supervisor.h"
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { HONEST_MS = 3000, HONEST_SEEDS_MIN = 150, TROUBLE_SEEDS_MAX = 1500 };

static volatile uint64_t current_seed;

static void on_abort(int signal)
{
    char text[96];
    int n = snprintf(text, sizeof text, "seed %llu: replay with test_sim_supervisor %llu\n",
                     (unsigned long long)current_seed, (unsigned long long)current_seed);
    if (write(2, text, (size_t)n) < 0) _exit(3);
}

static void test_honest(void **state)
{
    (void)state;
    struct sigaction act = {.sa_handler = on_abort};
    sigaction(SIGABRT, &act, NULL);
    int64_t start = lg_cpu_ns();
    struct sim_machine_result sum = {0}, r;
    uint64_t seed = 1;
    for (; seed <= HONEST_SEEDS_MIN || lg_cpu_ns() - start < HONEST_MS * LG_MS_NS; seed++) {
        current_seed = seed;
        sim_machine_run(&(struct sim_machine_options){.run = {.seed = seed}}, &r);
        if (r.run.failed)
            fail_msg("%s\nreplay with: test_sim_supervisor %" PRIu64, r.run.why, seed);
        for (size_t i = 0; i < sizeof r / sizeof(uint64_t); i++) /* every figure is one of these */
            if (i >= offsetof(struct sim_machine_result, run.steps) / sizeof(uint64_t))
                ((uint64_t *)&sum)[i] += ((uint64_t *)&r)[i];
    }
    double s = (double)(lg_cpu_ns() - start) / LG_S_NS;
    print_message(
        "%" PRIu64 " runs, %" PRIu64 " steps, %" PRIu64 " kills (%.0f/s of CPU), %" PRIu64
        " of lgsup, %" PRIu64 " of the keeper; %" PRIu64 " starts, %" PRIu64 " hangs, %" PRIu64
        " sleeps, %" PRIu64 " messages, %" PRIu64 " takeovers, %" PRIu64 " commits, %" PRIu64
        " parked, %" PRIu64 " lost their memory; %" PRIu64
        " went on from it after they were parked, %" PRIu64 " scale orders\n",
        seed - 1, sum.run.steps, sum.run.kills, (double)sum.run.kills / s, sum.lgsup_deaths,
        sum.keeper_deaths, sum.starts, sum.hangs, sum.sleeps, sum.messages, sum.run.takeovers,
        sum.run.commits, sum.parks, sum.memory_losses, sum.memory_resumes, sum.scales);
    assert_true((sum.memory_resumes > 0 || seed < 400) && sum.scales > seed / 2);
    assert_true(sum.run.kills > 10 * seed && sum.lgsup_deaths > seed && sum.hangs > seed / 10 &&
                sum.keeper_deaths > seed / 10 && sum.parks > 0 && sum.sleeps > seed / 20);
    assert_true(sum.memory_losses < seed / 10);
}

/* In a child: an assertion of the real code is a way of noticing too. */
static bool noticed(enum sim_trouble trouble, char *ret_why, size_t bytes)
{
    int out[2], status;
    assert_int_equal(pipe(out), 0);
    fflush(stdout);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(out[1], 2);
        signal(SIGSEGV, SIG_DFL);
        for (uint64_t seed = 1; seed <= TROUBLE_SEEDS_MAX; seed++) {
            struct sim_machine_result r;
            current_seed = seed;
            sim_machine_run(
                &(struct sim_machine_options){.run = {.seed = seed}, .trouble = trouble}, &r);
            if (!r.run.failed) continue;
            fprintf(stderr, "seed %" PRIu64 ": %s\n", seed, r.run.why);
            _exit(1);
        }
        _exit(0);
    }
    close(out[1]);
    ssize_t n = read(out[0], ret_why, bytes - 1);
    ret_why[n > 0 ? n : 0] = 0;
    ret_why[strcspn(ret_why, "\n")] = 0;
    close(out[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) || WEXITSTATUS(status) != 0;
}

static void test_troubles(void **state)
{
    (void)state;
    int missed = 0;
    for (int t = SIM_NO_TROUBLE + 1; t < SIM_TROUBLES; t++) {
        char why[1024];
        bool yes = noticed((enum sim_trouble)t, why, sizeof why);
        print_message("%s trouble %d: %s\n", yes ? "caught" : "MISSED", t, why);
        missed += !yes;
    }
    assert_int_equal(missed, 0);
}

static int replay(int argc, char **argv)
{
    struct sim_machine_result r;
    struct sim_machine_options o = {.run = {.seed = strtoull(argv[1], NULL, 10), .trace = true},
                                    .trouble = argc > 2 ? (enum sim_trouble)atoi(argv[2]) : 0};
    sim_machine_run(&o, &r);
    printf("seed %s: %s (%" PRIu64 " steps, %" PRIu64 " kills)\n", argv[1],
           r.run.failed ? r.run.why : "passed", r.run.steps, r.run.kills);
    return r.run.failed;
}

int main(int argc, char **argv)
{
    if (argc > 1) return replay(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_honest),
                                       cmocka_unit_test(test_troubles)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
