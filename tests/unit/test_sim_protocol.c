/* Runs the simulation of sim.h over thousands of seeds, then with each planted violation, which it
 * must notice.
 *
 *     test_sim_protocol                  everything
 *     test_sim_protocol SEED [PLANT]     one run with a trace on stderr
 */
#include "base/clock.h"
#include "tests/unit/sim.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { HONEST_MS = 3000, HONEST_SEEDS_MIN = 300, PLANT_SEEDS_MAX = 2000 };

static volatile uint64_t current_seed;

static void on_abort(int signal)
{
    char text[96];
    int n = snprintf(text, sizeof text, "seed %llu: replay with test_sim_protocol %llu\n",
                     (unsigned long long)current_seed, (unsigned long long)current_seed);
    if (write(2, text, (size_t)n) < 0) _exit(3);
}

static void test_honest(void **state)
{
    signal(SIGABRT, on_abort);
    int64_t start = lg_now_ns();
    struct sim_result sum = {0};
    uint64_t seed = 1;
    for (; seed <= HONEST_SEEDS_MIN || lg_now_ns() - start < HONEST_MS * LG_MS_NS; seed++) {
        struct sim_result r;
        current_seed = seed;
        sim_run(&(struct sim_options){.seed = seed}, &r);
        if (r.failed)
            fail_msg("%s\nreplay with: test_sim_protocol %llu", r.why, (unsigned long long)seed);
        sum.steps += r.steps;
        sum.kills += r.kills;
        sum.takeovers += r.takeovers;
        sum.commits += r.commits;
        sum.checkpoints += r.checkpoints;
        sum.drains += r.drains;
    }
    double s = (double)(lg_now_ns() - start) / LG_S_NS;
    print_message("%llu runs, %llu steps, %llu kills (%.0f/s), %llu takeovers, %llu commits, %llu "
                  "checkpoints, %llu drains in %.1f s\n",
                  (unsigned long long)seed - 1, (unsigned long long)sum.steps,
                  (unsigned long long)sum.kills, (double)sum.kills / s,
                  (unsigned long long)sum.takeovers, (unsigned long long)sum.commits,
                  (unsigned long long)sum.checkpoints, (unsigned long long)sum.drains, s);
    /* A simulation in which nothing happens would find nothing. */
    assert_true(sum.kills > seed && sum.takeovers > seed / 10 && sum.checkpoints > seed);
}

/* Exit code of a child: seeds needed, saturated; 255: not noticed. An assertion of the real code is
 * a way of noticing too, hence the child. */
static int noticed_after(enum sim_plant plant, char *ret_why, size_t bytes)
{
    int out[2];
    assert_int_equal(pipe(out), 0);
    fflush(stdout);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(out[1], 2);
        for (uint64_t seed = 1; seed <= PLANT_SEEDS_MAX; seed++) {
            struct sim_result r;
            current_seed = seed;
            sim_run(&(struct sim_options){.seed = seed, .plant = plant}, &r);
            if (!r.failed) continue;
            fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed, r.why);
            _exit(1);
        }
        _exit(0);
    }
    close(out[1]);
    ssize_t n = read(out[0], ret_why, bytes - 1);
    ret_why[n > 0 ? n : 0] = 0;
    close(out[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) || WEXITSTATUS(status) == 1;
}

static void test_plants(void **state)
{
    int missed = 0;
    for (int p = SIM_HONEST + 1; p < SIM_PLANTS; p++) {
        char why[1024];
        int noticed = noticed_after((enum sim_plant)p, why, sizeof why);
        why[strcspn(why, "\n")] = 0;
        print_message("%s %-17s %s\n                         %s\n", noticed ? "caught" : "MISSED",
                      sim_plant_name((enum sim_plant)p), sim_plant_what((enum sim_plant)p), why);
        missed += !noticed;
    }
    assert_int_equal(missed, 0);
}

static int replay(int argc, char **argv)
{
    struct sim_options o = {.seed = strtoull(argv[1], NULL, 10), .trace = true};
    for (int p = 0; argc > 2 && p < SIM_PLANTS; p++)
        if (strcmp(argv[2], sim_plant_name((enum sim_plant)p)) == 0) o.plant = (enum sim_plant)p;
    struct sim_result r;
    sim_run(&o, &r);
    printf("seed %llu, plant %s: %s (%llu steps, %llu kills)\n", (unsigned long long)o.seed,
           sim_plant_name(o.plant), r.failed ? r.why : "passed", (unsigned long long)r.steps,
           (unsigned long long)r.kills);
    return r.failed;
}

int main(int argc, char **argv)
{
    if (argc > 1) return replay(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_honest),
                                       cmocka_unit_test(test_plants)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
