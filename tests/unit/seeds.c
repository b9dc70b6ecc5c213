/* See seeds.h. A planted bug may break anything, so its runs are made in a child. */
#include "tests/unit/seeds.h"
#include "base/check.h"
#include "base/clock.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WHY_BYTES = 1024 };

static const struct seeds_spec *g_spec;
static volatile uint64_t g_seed;

static void on_abort(int signal)
{
    char text[128];
    int n = snprintf(text, sizeof text, "replay with: %s %" PRIu64 "\n", g_spec->program, g_seed);
    if (write(2, text, (size_t)n) < 0) _exit(3);
}

static bool run(const struct seeds_spec *spec, const struct seeds_run *r, char *ret_why)
{
    struct sigaction act = {.sa_handler = on_abort};
    g_spec = spec;
    g_seed = r->seed;
    sigaction(SIGABRT, &act, NULL);
    ret_why[0] = 0;
    return spec->run(r, ret_why, WHY_BYTES);
}

static int bug_of(const struct seeds_spec *spec, const char *name)
{
    for (int b = 0; b < spec->bugs; b++)
        if (!strcmp(name, spec->bug_name(b))) return b;
    return -1;
}

int seeds_replay(int argc, char **argv, const struct seeds_spec *spec)
{
    char why[WHY_BYTES], *rest = NULL;
    int failures = 0;
    if (argc < 2) return -1;
    uint64_t from = strtoull(argv[1], &rest, 10);
    uint64_t to = *rest == '-' ? strtoull(rest + 1, &rest, 10) : from;
    struct seeds_run r = {.bug = argc > 2 ? bug_of(spec, argv[2]) : 0, .told = to == from};
    if (*rest || !from || r.bug < 0) {
        fprintf(stderr, "usage: %s [SEED | FROM-TO] [BUG]; bugs:\n", spec->program);
        for (int b = 0; b < spec->bugs; b++)
            fprintf(stderr, "  %-17s %s\n", spec->bug_name(b), spec->bug_what(b));
        return 2;
    }
    for (r.seed = from; r.seed <= to; r.seed++) {
        bool passed = run(spec, &r, why);
        if (!passed || r.told)
            printf("seed %" PRIu64 ", %s: %s\n", r.seed, spec->bug_name(r.bug),
                   passed ? "passed" : why);
        failures += !passed;
    }
    return failures > 0;
}

bool checks_everything(void)
{
    return getenv("CHECK_ALL") != NULL;
}

bool checks_a_part(void)
{
#ifdef __SANITIZE_ADDRESS__
    return !checks_everything();
#else
    return false;
#endif
}

uint64_t seeds_honest(const struct seeds_spec *spec, uint64_t seeds, int cpu_ms, double *ret_cpu_s)
{
    char why[WHY_BYTES];
    const char *fresh = getenv("LG_SEEDS");
    int64_t start_ns = lg_cpu_ns(), cpu_ns = fresh ? cpu_ms * LG_MS_NS : 0;
    uint64_t first = fresh ? strtoull(fresh, NULL, 10) : 1, n = 0;
    LG_ASSERT(first > 0);
    if (checks_a_part()) seeds = (seeds + SANITIZED_PART - 1) / SANITIZED_PART;
    for (; n < seeds || lg_cpu_ns() - start_ns < cpu_ns; n++) {
        struct seeds_run r = {.seed = first + n};
        if (run(spec, &r, why)) continue;
        fprintf(stderr, "%s\nreplay with: %s %" PRIu64 "\n", why, spec->program, r.seed);
        return 0;
    }
    *ret_cpu_s = (double)(lg_cpu_ns() - start_ns) / LG_S_NS;
    return n;
}

static bool is_noticed(const struct seeds_spec *spec, int bug, uint64_t seeds_max, char *ret_why)
{
    int out[2], status;
    LG_ASSERT(pipe(out) == 0);
    fflush(stdout);
    pid_t child = fork();
    LG_ASSERT(child >= 0);
    if (child == 0) {
        dup2(out[1], 2);
        signal(SIGSEGV, SIG_DFL);
        struct seeds_run r = {.seed = 1, .bug = bug};
        for (; r.seed <= seeds_max; r.seed++) {
            if (run(spec, &r, ret_why)) continue;
            fprintf(stderr, "seed %" PRIu64 ": %s\n", r.seed, ret_why);
            _exit(1);
        }
        _exit(0);
    }
    close(out[1]);
    ssize_t n = read(out[0], ret_why, WHY_BYTES - 1);
    ret_why[n > 0 ? n : 0] = 0;
    ret_why[strcspn(ret_why, "\n")] = 0;
    close(out[0]);
    LG_ASSERT(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) || WEXITSTATUS(status) != 0;
}

int seeds_missed_bugs(const struct seeds_spec *spec, uint64_t seeds_max)
{
    int missed = 0;
    for (int b = 1; b < spec->bugs && !checks_a_part(); b++) {
        char why[WHY_BYTES];
        bool noticed = is_noticed(spec, b, seeds_max, why);
        printf("%s %-17s %s\n                         %s\n", noticed ? "caught" : "MISSED",
               spec->bug_name(b), spec->bug_what(b), why);
        missed += !noticed;
    }
    return missed;
}
