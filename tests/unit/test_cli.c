/* lgsup's command line: texts and exit codes of what goes wrong before anything runs. */
#include "base/fs.h"
#include "supervisor/commands/cli.h"
#include "supervisor/run/child.h"
#include "tests/unit/command_fixture.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static void test_help(void **state)
{
    (void)state;
    EXPECT(0, "lgsup start");
    EXPECT(0, "lgsup verify", "help");
    EXPECT(0, "lgsup doctor", "--help");
    EXPECT(0, "[-f] [--host H] [ROLE[.INDEX]] DIR", "help", "logs");
    EXPECT(0, "lgsup stop", "-h");
    EXPECT(0, "lgsup 0.", "version");
    EXPECT(0, "lgsup 0.", "--version");
    EXPECT(2, "usage: lgsup version", "version", "x");
    EXPECT(2, "usage: lgsup help [COMMAND]", "help", "start", "stop");
    EXPECT(2, "there is no command strat; `lgsup help` lists them", "help", "strat");
    EXPECT(0, "[DIR] the\nworking directory where it is left out", "help");
}

/* Behind a command, wherever it stands; nothing else is done. A program of its own answers itself. */
static void test_help_of_a_command(void **state)
{
    (void)state;
    EXPECT(0, "lgsup start FILE [--detach", "start", "--help");
    command_never("lgsup stop");
    EXPECT(0, "lgsup start FILE", "start", "nowhere.toml", "-h");
    EXPECT(0, "lgsup keys FILE\n", "keys", scratch_path("key"), "--help");
    assert_false(lg_path_exists(scratch_path("key")));
    EXPECT(0, "lgsup data DIR|FILE", "data", "--help");
    EXPECT(0, "lgsup doctor\n    does", "doctor", "--help");
    EXPECT(0, "`lgsup sample --help` lists every option", "help", "sample");
    command_program("lg-sample", "echo \"sample got: $*\"");
    EXPECT(0, "sample got: --help\n", "sample", "--help");
}

static void as_another_user(void)
{
    if (geteuid() == 0) assert_int_equal(seteuid(65534), 0);
}

/* That a folder cannot be looked into is another thing than that it is no run's. */
static void test_another_users_run(void **state)
{
    (void)state;
    static const char *const commands[] = {"status", "top", "stop", "logs", "verify"};
    const char *run = scratch_path("run");
    scratch_write("run/config.toml", "");
    assert_int_equal(lg_mkdirs(scratch_path("run/logs")), 0);
    assert_int_equal(chmod(run, 0), 0);
    g_command_before = as_another_user;
    for (size_t i = 0; i < LG_ARRAY_LEN(commands); i++) {
        EXPECT(4, "cannot look into ", commands[i], run);
        command_also("Permission denied");
    }
    EXPECT(4, "Permission denied", "scale", "vae", "2", run);
    g_command_before = NULL;
    assert_int_equal(chmod(run, 0700), 0);
}

static void test_wrong_words(void **state)
{
    (void)state;
    EXPECT(2, "there is no command strat", "strat");
    EXPECT(2, "usage: lgsup start FILE", "start");
    EXPECT(2, "usage: lgsup start FILE", "start", "a", "b");
    EXPECT(2, "does not know --detatch", "start", "a", "--detatch");
    EXPECT(2, "does not know --json", "stop", "--json", "x");
    EXPECT(2, "usage: lgsup stop [--kill | --units PREFIX] DIR", "stop", "--units", "a-b", "x");
    EXPECT(2, "--set needs section.key=value", "start", "a", "--set");
    EXPECT(2, "--set needs section.key=value; got max_steps", "check", "a", "--set", "max_steps");
    EXPECT(2, "usage: lgsup logs", "logs", "-f");
    EXPECT(2, "usage: lgsup doctor\n", "doctor", "x");
    EXPECT(2, "usage: lgsup data DIR|FILE", "data", "a", "b");
    EXPECT(2, "lgsup data does not know --size", "data", "a", "--size");
    EXPECT(2, "usage: lgsup top", "top");
    EXPECT(2, "usage: lgsup logs", "logs", "a", "b", "c");
    EXPECT(2, "usage: lgsup scale ROLE N [--host H] [DIR]", "scale", "vae");
    EXPECT(2, "usage: lgsup scale", "scale", "vae", "2", "run", "x");
    EXPECT(2, "usage: lgsup swap ROLE", "swap");
    EXPECT(2, "usage: lgsup swap", "swap", "vae", "run", "x");
    EXPECT(2, "usage: lgsup role ROLE INDEX DIR", "role", "vae", "0");
}

/* A flag belongs to its commands, and one with a value needs it. */
static void test_flags(void **state)
{
    (void)state;
    static const char *const commands[] = {"start", "stop", "status", "top",    "logs",
                                           "scale", "swap", "check",  "verify", "units"};
    static const char *const flags[] = {"--set",    "--set=a.b=1", "--bin",  "--detach", "--units",
                                        "--dir",    "--prefix",    "--json", "--once",   "-f",
                                        "--follow", "--sets",      "-x"};
    for (size_t i = 0; i < LG_ARRAY_LEN(flags); i++) /* verify knows none of them */
        EXPECT(2, "lgsup verify does not know ", "verify", flags[i], "x");
    for (size_t i = 0; i < LG_ARRAY_LEN(commands); i++) {
        char said[96];
        snprintf(said, sizeof said, "lgsup %s does not know --detatch; usage: lgsup %s ",
                 commands[i], commands[i]);
        EXPECT(2, said, commands[i], "x", "--detatch");
    }
    EXPECT(2, "--units needs a value", "start", "a", "--units");
    EXPECT(2, "--dir needs a value", "units", "a", "--dir");
    EXPECT(2, "--prefix needs a value", "units", "a", "--prefix");
    EXPECT(2, "--bin needs a value", "swap", "vae", "--bin");
    EXPECT(2, "usage: lgsup start", "start", "a", "--units", "lg", "--detach");
    EXPECT(2, "usage: lgsup start", "start", "a", "--units", "a-b");
    EXPECT(2, "--set needs section.key=value; got =3", "check", "a", "--set==3");
    EXPECT(2, "--set needs section.key=value; got nothing", "check", "a", "--set");
    EXPECT(8, "- is not a run directory", "status", "-"); /* a dash alone is a word */
}

static void test_too_many_words(void **state)
{
    (void)state;
    enum { SETS = 257, WORDS = 1022 };
    static const char *words[WORDS + 2];
    words[0] = "check", words[1] = "a";
    for (int i = 0; i < SETS; i++) words[2 + i] = "--set=job.seed=1";
    command_expect(2, "more than 256 --set", words);
    words[2 + SETS - 1] = NULL;
    command_expect(8, "a: No such file", words); /* as many as are taken */
    words[0] = "sample";
    for (int i = 1; i <= WORDS; i++) words[i] = "x";
    command_program("lg-sample", "echo $#");
    command_expect(2, "more than 1021 words", words);
    words[WORDS] = NULL;
    command_expect(0, "1021\n", words);
}

/* LG_TRACE tells the way of an error through the program, too. */
static void test_trace(void **state)
{
    (void)state;
    EXPECT(8, "is not a run directory", "status", scratch_path("nowhere"));
    command_never("status.c:");
    setenv("LG_TRACE", "1", 1);
    EXPECT(8, "is not a run directory", "status", scratch_path("nowhere"));
    unsetenv("LG_TRACE");
    command_also("supervisor/views/status.c:");
}

static void test_places_that_do_not_exist(void **state)
{
    (void)state;
    char nowhere[LG_PATH_BYTES]; /* scratch_path's buffers come round */
    snprintf(nowhere, sizeof nowhere, "%s", scratch_path("nowhere"));
    EXPECT(8, "nowhere", "check", nowhere);
    EXPECT(8, "is not a run directory", "status", nowhere);
    EXPECT(8, "is not a run directory", "stop", nowhere);
    EXPECT(8, "is not a run directory", "logs", nowhere);
    EXPECT(8, "neither a complete checkpoint", "verify", nowhere);
    EXPECT(8, "is not a run directory", "top", nowhere);
    EXPECT(8, "is not a run directory", "scale", "vae", "2", nowhere);
    EXPECT(8, "is not a run directory", "swap", "vae", nowhere);
    EXPECT(8, "nowhere", "units", nowhere);
    EXPECT(8, "lg-sample is missing", "sample", "a cat");
    EXPECT(8, "lg-encode is missing", "encode", "vae");
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

static void test_becomes_the_programs(void **state)
{
    (void)state;
    command_program("lg-encode", "echo \"encode got: $*\"\nexit 5");
    command_program("lg-sample", "echo \"sample got: $*\"");
    EXPECT(5, "encode got: vae --model m in out", "encode", "vae", "--model", "m", "in", "out");
    EXPECT(5, "encode got: decode vae", "decode", "vae");
    EXPECT(0, "sample got: a cat -o x.png", "sample", "a cat", "-o", "x.png");
    command_program("lg-loader", "echo \"loader got: $*\"");
    EXPECT(0, "loader got: --look photos --set data.size=32\n", "data", "--set", "data.size=32",
           "photos");
    assert_int_equal(chmod(scratch_write("bin/lg-sample", "#!/no/such/shell\n"), 0700), 0);
    EXPECT(8, "bin/lg-sample: No such file", "sample", "a cat");
    command_also("cannot run ");
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
    command_never("vae.0");
    EXPECT(0, "vae.0 three", "logs", "vae", scratch_path("run"));
    command_never("ema");
    EXPECT(8, "no log of text", "logs", "text", scratch_path("run"));
    scratch_write("run/logs/vae.1.log", "a library's \x1b[2J\xc2\x9b line \xe6\x97\xa5\xff\r\n");
    EXPECT(0, "a library's \\x1b[2J\\u{9b} line \xe6\x97\xa5\\xff\\x0d\n", "logs", "vae.1",
           scratch_path("run"));
}

/* What is no log of the run, or none of the role that was asked for, is left out. */
static void test_logs_are_chosen(void **state)
{
    (void)state;
    char longest[128];
    snprintf(longest, sizeof longest, "run/logs/%064d.log", 0);
    EXPECT(8, "no logs/ in it", "logs", scratch_path(""));
    assert_int_equal(lg_mkdirs(scratch_path("run/logs")), 0);
    EXPECT(8, "no log of any process", "logs", scratch_path("run"));
    scratch_write("run/logs/vae.0.log", "2026-01-01T00:00:01.000Z info  vae.0 one\n");
    scratch_write("run/logs/vae.1.log", "");
    scratch_write("run/logs/vaex.0.log", "another\n");
    scratch_write("run/logs/vae.0.txt", "text\n");
    scratch_write("run/logs/.log", "hidden\n");
    scratch_write(longest, "long\n");
    assert_int_equal(lg_mkdirs(scratch_path("run/logs/ema.0.log")), 0); /* cannot be read */
    EXPECT(0, "vae.0 one\n", "logs", "vae", scratch_path("run"));
    command_never("another");
    EXPECT(0, "another\n", "logs", scratch_path("run"));
    command_never("text");
    command_never("hidden");
    command_never("long");
}

/* What a dying process said last has often no end of line, and is what the user looks for. */
static void test_logs_show_the_last_words(void **state)
{
    (void)state;
    scratch_write("run/logs/vae.0.log", "2026-01-01T00:00:03.000Z info  vae.0 one\nSegmentation");
    scratch_write("run/logs/vae.1.log", "2026-01-01T00:00:04.000Z info  vae.1 two\n"
                                        "2026-01-01 a line without its own time\n"
                                        "2026-01-01T00:00:05.000+ nor this, longer than a time\n");
    EXPECT(0,
           "vae.0 one\nSegmentation\n2026-01-01T00:00:04.000Z info  vae.1 two\n"
           "2026-01-01 a line without its own time\n2026-01-01T00:00:05.000+ nor this",
           "logs", scratch_path("run"));
}

static void append(const char *name, const char *text)
{
    FILE *f = fopen(scratch_path(name), "a");
    assert_true(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

static void read_until(int fd, char *text, size_t bytes, const char *part)
{
    size_t n = strlen(text);
    while (!strstr(text, part)) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t got = poll(&p, 1, 20000) > 0 ? read(fd, text + n, bytes - 1 - n) : 0;
        if (got <= 0) fail_msg("nothing about \"%s\" in:\n%s", part, text);
        text[n += (size_t)got] = 0;
    }
}

/* -f shows what comes, of new files as well, in whole lines; and ends with its reader. */
static void test_logs_follow(void **state)
{
    (void)state;
    char text[4096] = "";
    char *argv[] = {(char *)"lgsup", (char *)"logs", (char *)"--follow",
                    (char *)scratch_path("run"), NULL};
    int fds[2], status;
    assert_int_equal(lg_mkdirs(scratch_path("run/logs")), 0);
    assert_int_equal(pipe(fds), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[0]);
        dup2(fds[1], 1);
        close(fds[1]);
        signal(SIGPIPE, SIG_IGN);
        scratch_exit(lg_cli_main(4, argv));
    }
    close(fds[1]);
    append("run/logs/vae.0.log", "2026-01-01T00:00:01.000Z info  vae.0 one\n");
    read_until(fds[0], text, sizeof text, "vae.0 one\n");
    append("run/logs/ema.0.log", "2026-01-01T00:00:02.000Z info  ema.0 two\nthe first half");
    read_until(fds[0], text, sizeof text, "ema.0 two\n");
    append("run/logs/ema.0.log", " and the second\n");
    read_until(fds[0], text, sizeof text, "the first half and the second\n");
    close(fds[0]);
    append("run/logs/ema.0.log", "nobody reads this\n");
    for (int i = 0; i < 2000 && waitpid(pid, &status, WNOHANG) == 0; i++) usleep(10000);
    assert_true(kill(pid, 0) < 0); /* it was reaped */
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* The keeper's own command line: a program that only lgsup and systemd start. */
static void keeper_expect(int code, const char *part, const char *a, const char *b, const char *c)
{
    char here[LG_PATH_BYTES], program[LG_PATH_BYTES], *text;
    int got;
    assert_int_equal(lg_program_dir(here), 0);
    assert_int_equal(lg_path(program, "%s/../bin/lg-keeper", here), 0);
    char *argv[] = {(char *)"lg-keeper", (char *)a, (char *)b, (char *)c, NULL};
    assert_int_equal(lg_child_capture(program, argv, 1 << 16, &text, &got), 0);
    if (got != code || !strstr(text, part)) fail_msg("exit %d, said:\n%s", got, text);
    free(text);
}

static void test_keeper_words(void **state)
{
    (void)state;
    const char *socket = scratch_path("keeper"), *usage = "usage: lg-keeper SOCKET [READY_FD]\n";
    keeper_expect(2, usage, NULL, NULL, NULL);
    keeper_expect(2, usage, "--help", NULL, NULL); /* which names no socket */
    keeper_expect(2, usage, "--store", NULL, NULL);
    keeper_expect(2, usage, socket, "2", "3");
    keeper_expect(2, usage, socket, "2x", NULL);
    keeper_expect(2, usage, socket, "-2", NULL);
    keeper_expect(2, usage, socket, "1048577", NULL);
    keeper_expect(8, "the keeper cannot go on", scratch_path("no/keeper"), NULL, NULL);
    keeper_expect(8, "the keeper cannot go on", "--store", scratch_path("no/keeper"), NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        COMMAND_TEST(test_help),
        COMMAND_TEST(test_help_of_a_command),
        COMMAND_TEST(test_another_users_run),
        COMMAND_TEST(test_wrong_words),
        COMMAND_TEST(test_places_that_do_not_exist),
        COMMAND_TEST(test_check_names_the_line),
        COMMAND_TEST(test_becomes_the_programs),
        COMMAND_TEST(test_flags),
        COMMAND_TEST(test_too_many_words),
        COMMAND_TEST(test_trace),
        COMMAND_TEST(test_logs_are_merged_by_time),
        COMMAND_TEST(test_logs_are_chosen),
        COMMAND_TEST(test_logs_show_the_last_words),
        COMMAND_TEST(test_logs_follow),
        COMMAND_TEST(test_keeper_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
