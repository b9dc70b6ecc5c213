/* systemd units: the text that `lgsup units` writes. What a run does as units: test_units_run. */
#include "supervisor/commands/units_write.h"
#include "supervisor/run/child.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervise_fixture.h"
#include <dirent.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static void test_quote(void **state)
{
    (void)state;
    static const struct {
        const char *word, *command, *path;
    } cases[] = {
        {"plain", "\"plain\"", "\"plain\""},
        {"a b", "\"a b\"", "\"a b\""},
        {"50%", "\"50%%\"", "\"50%%\""},
        {"$HOME", "\"$$HOME\"", "\"$HOME\""},
        {"q\"\\", "\"q\\\"\\\\\"", "\"q\\\"\\\\\""},
        {"", "\"\"", "\"\""},
    };
    char got[64];
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        assert_int_equal(lg_units_quote(cases[i].word, true, got, sizeof got), 0);
        assert_string_equal(got, cases[i].command);
        assert_int_equal(lg_units_quote(cases[i].word, false, got, sizeof got), 0);
        assert_string_equal(got, cases[i].path);
    }
    assert_int_equal(lg_units_quote("two\nlines", true, got, sizeof got), LG_ERR_CONFIG);
    assert_int_equal(lg_units_quote("\x7f", true, got, sizeof got), LG_ERR_CONFIG);
    assert_int_equal(lg_units_quote("%%%%%%%%%%", true, got, 16), LG_ERR_CONFIG);
}

static void test_prefix(void **state)
{
    (void)state;
    static const char *const good[] = {"lg", "a", "job_2"};
    static const char *const bad[] = {
        "", "2a", "_a", "A", "a-b", "a/b", "a.b", "a b", "abcdefghijklmnopqrstuvwxyz0123456"};
    for (size_t i = 0; i < LG_ARRAY_LEN(good); i++) assert_true(lg_units_is_prefix(good[i]));
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) assert_false(lg_units_is_prefix(bad[i]));
}

static void test_fill(void **state)
{
    (void)state;
    char *text;
    const struct lg_units_value values[] = {{"A", "1"}, {"A_B", "@A@"}};
    assert_int_equal(lg_units_fill("x@0.service @A@@A_B@ a@A mail@b @", values, 2, &text), 0);
    assert_string_equal(text, "x@0.service 1@A@ a@A mail@b @"); /* values are not filled again */
    free(text);
}

/* From the scratch folder, where the run's folder is made. */
static void write_units(const char *dir)
{
    char cwd[LG_PATH_BYTES];
    assert_non_null(getcwd(cwd, sizeof cwd));
    assert_int_equal(chdir(scratch_path("")), 0);
    assert_exit(RUN("units", g_file, "--dir", dir, "--prefix", "job", "--set", "job.dir=a run, 5%",
                    "--set", "checkpoint.every=7"),
                0);
    assert_int_equal(chdir(cwd), 0);
}

static void test_units_are_written(void **state)
{
    (void)state;
    char unit[LG_PATH_BYTES], line[2 * LG_PATH_BYTES];
    write_units(scratch_path("units"));
    assert_output(
        "/units'/job* /etc/systemd/system/ && "); /* for a shell, whatever is in the path */
    snprintf(unit, sizeof unit, "%s", scratch_path("units/jobsup.service"));
    assert_has(unit, "Type=notify\n");
    assert_has(unit, "WatchdogSec=");
    assert_has(unit,
               "Wants=job-keeper.service job-end.service job-loader@0.service job-text@0.service "
               "job-text@1.service job-vae@0.service job-vae@1.service "
               "job-trainer@0.service job-trainer@1.service job-ema@0.service "
               "job-ckpt@0.service\n");
    snprintf(line, sizeof line,
             "ExecStart=\"%s\" start \"%s\" --units job --set \"job.dir=a run, 5%%%%\" --set "
             "\"checkpoint.every=7\"\n",
             scratch_path("bin/lgsup"), g_file);
    assert_has(unit, line);
    snprintf(line, sizeof line, "ReadWritePaths=\"%s/a run, 5%%%%\" ", scratch_path(""));
    line[strlen(line) - strlen("/a run, 5%%\" ") - 1] = 0; /* up to the folder */
    assert_has(unit, line);
    assert_has(unit, "/a run, 5%%\" -\"");
    assert_has(unit, "OOMPolicy=continue\n");
    assert_has(unit, "DeviceAllow=char-nvidia* rw\n");
    assert_has(scratch_path("units/job-keeper.service"), "FileDescriptorStoreMax=1024\n");
    assert_has(scratch_path("units/job-keeper.service"), "--store /run/job/keeper\n");
    assert_has(scratch_path("units/job-end.service"), "PartOf=jobsup.service\n");
    assert_has(scratch_path("units/job-end.service"), "/bin/lgsup\" stop --units job \"");
    assert_has(scratch_path("units/job-vae@.service"), "/bin/lgsup\" role vae %i \"");
    assert_has(scratch_path("units/job-vae@.service"), "Slice=job.slice\n");
    assert_has(scratch_path("units/job.slice"), "MemoryMax=");
    assert_exit(RUN("units", g_file, "--prefix", "a-b"), 2);
    assert_exit(RUN("units", g_file, "--set", "trainer.rankz=1"), 3);
}

/* What cannot stand in a unit file is refused by name, before a unit or a folder is made. */
static void test_units_that_cannot_be(void **state)
{
    (void)state;
    char cwd[LG_PATH_BYTES], quoted[LG_PATH_BYTES + 16];
    const char *units = scratch_path("units");
    assert_non_null(getcwd(cwd, sizeof cwd));
    assert_exit(RUN("units", g_file, "--dir", units, "--set", "job.dir=two\nlines"), 3);
    assert_output("has a control character in it");
    assert_false(lg_path_exists("two\nlines"));
    snprintf(quoted, sizeof quoted, "%s", scratch_path("a \"folder\""));
    assert_int_equal(mkdir(quoted, 0700), 0);
    assert_int_equal(chdir(quoted), 0);
    assert_exit(RUN("units", g_file, "--dir", units), 3);
    assert_int_equal(chdir(cwd), 0);
    assert_output("call it in another directory: ");
    snprintf(quoted, sizeof quoted, "job.dir=%s", scratch_path("plain/run"));
    scratch_write("plain", "no folder");
    assert_exit(RUN("units", g_file, "--set", quoted), 4);
    unlink(scratch_path("bin/lgsup"));
    assert_exit(RUN("units", g_file, "--dir", units), 8);
    assert_output("bin/lgsup is missing");
    assert_false(lg_path_exists(units));
}

/* Every text is whole, no process may do more than it needs (systemd/README.md), and systemd, where it is, has nothing to
 * say against it. */
static void test_units_are_valid(void **state)
{
    (void)state;
    char command[3 * LG_PATH_BYTES], *text;
    size_t bytes;
    int n = 0;
    write_units(scratch_path("units"));
    DIR *d = opendir(scratch_path("units"));
    for (struct dirent *e; (e = readdir(d));) {
        char path[512];
        if (e->d_name[0] == '.') continue;
        n++;
        snprintf(path, sizeof path, "units/%.200s", e->d_name);
        assert_int_equal(lg_read_file(scratch_path(path), 1 << 20, &text, &bytes), 0);
        for (const char *at = text; (at = strchr(at, '@')); at++)
            if (at[1] >= 'A' && at[1] <= 'Z') fail_msg("%s: not filled: %.20s", path, at);
        if (strstr(path, ".service") && !strstr(text, "\nCapabilityBoundingSet=CAP_DAC_OVERRIDE\n"
                                                      "SystemCallFilter=@system-service\n"
                                                      "SystemCallFilter=~@privileged @keyring\n"))
            fail_msg("%s: may call what it does not need", path);
        free(text);
    }
    closedir(d);
    assert_int_equal(n, 4 + 6);
    if (access("/usr/bin/systemd-analyze", X_OK) < 0) skip();
    snprintf(command, sizeof command,
             "cd '%s' && for u in job.slice jobsup.service job-end.service job-keeper.service "
             "job-*@.service; do "
             "systemd-analyze verify --man=no \"$PWD/${u/@/@1}\" 2>&1; done | grep -F \"$PWD\"",
             scratch_path("units"));
    char bash[4 * LG_PATH_BYTES];
    snprintf(bash, sizeof bash, "%s", command);
    const char *words[] = {"bash", "-c", bash, NULL};
    int exit_code = -1;
    assert_int_equal(
        lg_child_capture("/bin/bash", (char *const *)words, 1 << 16, &text, &exit_code), 0);
    assert_string_equal(text, "");
    free(text);
}

/* The unit of a run of several hosts (examples/hosts): what systemd knows of it, and that a stop of it is no stop of the
 * run. */
static void test_unit_of_a_host(void **state)
{
    (void)state;
    const char *unit = "examples/hosts/lg-host.service";
    char bash[2 * LG_PATH_BYTES], *text;
    int exit_code = -1;
    assert_has(unit, "KillSignal=SIGKILL\n");
    assert_has(unit, "RestartForceExitStatus=4 7 9\n"); /* docs/exit-codes.md: IO, BUSY, TIMEOUT */
    assert_has(unit, "WantedBy=multi-user.target\n");
    assert_int_equal(-LG_ERR_IO, 4);
    assert_int_equal(-LG_ERR_BUSY, 7);
    assert_int_equal(-LG_ERR_TIMEOUT, 9);
    if (access("/usr/bin/systemd-analyze", X_OK) < 0) skip();
    snprintf(bash, sizeof bash,
             "sed 's|/usr/local/bin/lgsup|/bin/true|' %s >'%s/lg-host.service' && "
             "systemd-analyze verify --man=no '%s/lg-host.service' 2>&1 | grep -F lg-host",
             unit, scratch_path(""), scratch_path(""));
    const char *words[] = {"bash", "-c", bash, NULL};
    assert_int_equal(
        lg_child_capture("/bin/bash", (char *const *)words, 1 << 16, &text, &exit_code), 0);
    assert_string_equal(text, "");
    free(text);
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unit_of_a_host), cmocka_unit_test(test_quote),
        cmocka_unit_test(test_prefix),         cmocka_unit_test(test_fill),
        LGSUP_TEST(test_units_are_written),    LGSUP_TEST(test_units_that_cannot_be),
        LGSUP_TEST(test_units_are_valid),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
