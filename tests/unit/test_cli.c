/* lgsup's command line: texts and exit codes of what goes wrong before anything runs. */
#include "base/check.h"
#include "base/fs.h"
#include "supervisor/cli.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { ARGS_MAX = 16 };
static char *g_out;

static int setup(void **state)
{
    (void)state;
    scratch_make();
    setenv("LG_BIN_DIR", scratch_path("bin"), 1);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    scratch_remove();
    free(g_out);
    g_out = NULL;
    return 0;
}

/* Exit code of `lgsup words...`; what it prints lands in g_out. */
static int run(const char *const *words)
{
    char *argv[ARGS_MAX] = {(char *)"lgsup"}, out[LG_PATH_BYTES];
    int argc = 1, status;
    size_t bytes;
    for (; words[argc - 1]; argc++) argv[argc] = (char *)words[argc - 1];
    snprintf(out, sizeof out, "%s", scratch_path("out"));
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        int fd = open(out, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
        int code = lg_cli_main(argc, argv);
        fflush(NULL);
        scratch_exit(code);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    free(g_out);
    g_out = NULL;
    assert_int_equal(lg_read_file(out, 1 << 20, &g_out, &bytes), 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void expect(int code, const char *part, const char *const *words)
{
    int got = run(words);
    if (got != code || !strstr(g_out, part))
        fail_msg("exit %d, expected %d with \"%s\"; output:\n%s", got, code, part, g_out);
}
#define EXPECT(code, part, ...)                                                                    \
    expect((code), (part), (const char *const[]){__VA_ARGS__ __VA_OPT__(, ) NULL})

static void test_help(void **state)
{
    (void)state;
    EXPECT(0, "lgsup start");
    EXPECT(0, "lgsup verify", "help");
    EXPECT(0, "lgsup doctor", "--help");
    EXPECT(0, "[-f] [ROLE[.INDEX]] DIR", "help", "logs");
    EXPECT(0, "lgsup 0.", "version");
}

static void test_wrong_words(void **state)
{
    (void)state;
    EXPECT(2, "there is no command strat", "strat");
    EXPECT(2, "usage: lgsup start FILE", "start");
    EXPECT(2, "usage: lgsup start FILE", "start", "a", "b");
    EXPECT(2, "does not know --detatch", "start", "a", "--detatch");
    EXPECT(2, "does not know --json", "stop", "--json", "x");
    EXPECT(2, "--set needs section.key=value", "start", "a", "--set");
    EXPECT(2, "--set needs section.key=value; got max_steps", "check", "a", "--set", "max_steps");
    EXPECT(2, "usage: lgsup logs", "logs", "-f");
    EXPECT(2, "usage: lgsup doctor", "doctor", "x");
}

static void test_places_that_do_not_exist(void **state)
{
    (void)state;
    const char *nowhere = scratch_path("nowhere");
    EXPECT(8, "nowhere", "check", nowhere);
    EXPECT(8, "is not a run directory", "status", nowhere);
    EXPECT(8, "is not a run directory", "stop", nowhere);
    EXPECT(8, "is not a run directory", "logs", nowhere);
    EXPECT(8, "neither a complete checkpoint", "verify", nowhere);
    EXPECT(8, "lg-sample is missing", "sample", "a cat");
}

/* Schema errors come before anything is asked of the roles, with file, line and key. */
static void test_check_names_the_line(void **state)
{
    (void)state;
    const char *file = scratch_write("p.toml", "[job]\nname = \"x\"\n[trainer]\nmaxsteps = 3\n");
    EXPECT(3, "p.toml:4", "check", file);
    EXPECT(3, "max_steps", "start", file);
    EXPECT(3, "trainer.ranks", "check", scratch_write("q.toml", ""), "--set",
           "trainer.ranks=\"two\"");
}

static void write_program(const char *name, const char *text)
{
    assert_int_equal(chmod(scratch_write(name, text), 0700), 0);
}

static void test_becomes_the_programs(void **state)
{
    (void)state;
    write_program("bin/lg-encode", "#!/bin/sh\necho \"encode got: $*\"\nexit 5\n");
    write_program("bin/lg-sample", "#!/bin/sh\necho \"sample got: $*\"\n");
    EXPECT(5, "encode got: vae --model m in out", "encode", "vae", "--model", "m", "in", "out");
    EXPECT(5, "encode got: decode vae", "decode", "vae");
    EXPECT(0, "sample got: a cat -o x.png", "sample", "a cat", "-o", "x.png");
}

static void test_logs_are_merged_by_time(void **state)
{
    (void)state;
    scratch_write("run/logs/vae.0.log", "2026-01-01T00:00:01.000Z info  vae.0 one\n"
                                        "2026-01-01T00:00:03.000Z error vae.0 three\n    at x\n");
    scratch_write("run/logs/vae.10.log", "2026-01-01T00:00:02.000Z info  vae.10 two\n");
    scratch_write("run/logs/ema.0.log", "2026-01-01T00:00:02.500Z info  ema.0 between\n");
    EXPECT(0,
           "2026-01-01T00:00:01.000Z info  vae.0 one\n2026-01-01T00:00:02.000Z info  vae.10 two\n"
           "2026-01-01T00:00:02.500Z info  ema.0 between\n"
           "2026-01-01T00:00:03.000Z error vae.0 three\n    at x\n",
           "logs", scratch_path("run"));
    EXPECT(0, "vae.10 two", "logs", "vae.10", scratch_path("run"));
    assert_null(strstr(g_out, "vae.0"));
    EXPECT(0, "vae.0 three", "logs", "vae", scratch_path("run"));
    assert_null(strstr(g_out, "ema"));
    EXPECT(8, "no log of text", "logs", "text", scratch_path("run"));
}

static void test_doctor(void **state)
{
    (void)state;
    EXPECT(8, "MISSING  lg-trainer", "doctor"); /* an empty bin/ */
    assert_non_null(strstr(g_out, "ok       memfd_create"));
    assert_non_null(strstr(g_out, "ok       pidfd_open"));
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_help),
        TEST(test_wrong_words),
        TEST(test_places_that_do_not_exist),
        TEST(test_check_names_the_line),
        TEST(test_becomes_the_programs),
        TEST(test_logs_are_merged_by_time),
        TEST(test_doctor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
