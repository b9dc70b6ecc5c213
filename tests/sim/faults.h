/* Fail-nth: a piece of code is run again and again, each time in a process of its own; in run n the
 * nth of the calls in faults.calls fails as the system may make it fail (or is interrupted, or does
 * only a part). Whatever fails, the code must come back with an error and a message, or do without;
 * it must not crash, hang, or leave a file descriptor open. An assertion is accepted for memory
 * that is not there, and for nothing else.
 *
 * Or the process dies there: nothing after that call happens, as with SIGKILL. Then only `after`
 * can tell whether what was promised still holds. */
#pragma once
#include <stdbool.h>

struct fault_scenario {
    const char *name;
    int (*run)(void); /* 0 or an lg_err; everything that it opens it closes */
    int every; /* only each every-th call fails (scenarios that take long); 0: 1. Of those a part where
                         * tests/unit/seeds.h says so. */
    bool dies;          /* instead of failing */
    int (*after)(void); /* in the test's own process, after each run; < 0: with a message */
};

/* From here on calls count (and fail): what comes before it in `run` is preparation. */
void faults_begin(void);
/* No call fails any more: for what a scenario tidies up. */
void faults_end(void);
/* Runs the scenario with every fault. Returns how many there were, or < 0: what failed was printed.
 * */
int faults_each(const struct fault_scenario *s);

/* The error stays for the caller to see, whatever tidying up says. */
#define TIDY(...)                                                                                  \
    do {                                                                                           \
        faults_end();                                                                              \
        __VA_ARGS__;                                                                               \
    } while (0)

/* A cmocka test test_FUNCTION of every step-th fault. */
#define SCENARIO(function, step)                                                                   \
    static void test_##function(void **state)                                                      \
    {                                                                                              \
        (void)state;                                                                               \
        int n = faults_each(                                                                       \
            &(struct fault_scenario){.name = #function, .run = function, .every = step});          \
        print_message("%d faults\n", n);                                                           \
        assert_true(n > 0);                                                                        \
    }
