/* A run directory seen from lgsup: its lock and its runtime directory (supervisor/run/run.h), what a start
 * continues from (resume.c), the programs that were swapped in (programs.h), and orders from the
 * command line that are refused before anybody is asked (order.h). */
#include "base/check.h"
#include "base/clock.h"
#include "config/manifest.h"
#include "shm/board.h"
#include "supervisor/commands/finish.h"
#include "supervisor/commands/order.h"
#include "supervisor/core/scale.h"
#include "supervisor/launch/launcher.h"
#include "supervisor/run/child.h"
#include "supervisor/run/programs.h"
#include "supervisor/run/run.h"
#include "supervisor/views/preview.h"
#include "tests/unit/run_fixture.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static lg_run r;

static int setup(void **state)
{
    (void)state;
    unsetenv("LG_BIN_DIR");
    setenv("XDG_RUNTIME_DIR", "relative", 1); /* of no use */
    unsetenv("RUNTIME_DIRECTORY");
    run_fixture_make(&r, "[sample]\ncaptions = [\"a cat\"]\n");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    run_fixture_close(&r);
    return 0;
}

static void assert_says(int rc, int code, const char *part)
{
    if (rc != code) fail_msg("result %d, expected %d: %s", rc, code, lg_err_message());
    if (!strstr(lg_err_message(), part)) fail_msg("\"%s\" lacks \"%s\"", lg_err_message(), part);
    lg_err_clear();
}

/* ---- the lock ---- */

static void write_holder(int pid, uint64_t start)
{
    char line[64];
    snprintf(line, sizeof line, "%d %llu\n", pid, (unsigned long long)start);
    scratch_write("run/lock", line);
}

/* Who is recorded counts only while the very process lives: pid and start time. */
static void test_holder(void **state)
{
    (void)state;
    int pid = 0, me = (int)getpid();
    uint64_t start = lg_process_start_time(me);
    assert_int_equal(lg_run_holder(r.dir, &pid), -1); /* no file */
    scratch_write("run/lock", "nonsense\n");
    assert_int_equal(lg_run_holder(r.dir, &pid), -1);
    write_holder(-5, start);
    assert_int_equal(lg_run_holder(r.dir, &pid), -1);
    write_holder(me, start + 1); /* its pid belongs to another by now */
    assert_int_equal(lg_run_holder(r.dir, &pid), -1);
    assert_int_equal(pid, 0);
    write_holder(me, start);
    int fd = lg_run_holder(r.dir, &pid);
    assert_true(fd >= 0 && pid == me);
    close(fd);
}

/* The kernel lets go of a file lock before the process has ended: a start waits for the end itself. */
static void test_former_holder_is_waited_for(void **state)
{
    (void)state;
    int go[2];
    char byte;
    assert_int_equal(pipe(go), 0);
    pid_t former = fork();
    if (former == 0) {
        close(go[1]);
        if (read(go[0], &byte, 1) < 0) _exit(1);
        usleep(200000);
        _exit(0);
    }
    close(go[0]);
    write_holder(former, lg_process_start_time(former));
    close(go[1]);
    assert_int_equal(lg_run_lock(&r), 0);
    assert_int_equal(lg_process_start_time(former) && waitpid(former, NULL, WNOHANG) == 0, 0);
    int pid = 0, fd = lg_run_holder(r.dir, &pid);
    assert_int_equal(pid, getpid()); /* recorded */
    close(fd);
    lg_run_close(&r);
    assert_int_equal(lg_run_lock(&r), 0); /* our own former record is no obstacle */
}

/* A killed lgsup's newest child has a copy of the lock until it becomes another program: the next start waits for that. */
static void test_lock_is_held_by_a_copy(void **state)
{
    (void)state;
    pid_t former = fork();
    if (former == 0) {
        if (lg_run_lock(&r) < 0) _exit(1);
        if (fork() == 0) {
            usleep(300000);
            _exit(0);
        }
        raise(SIGKILL);
    }
    int how;
    assert_int_equal(waitpid(former, &how, 0), former);
    assert_true(WIFSIGNALED(how));
    int fd = open(scratch_path("run/lock"), O_RDWR | O_CLOEXEC);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), -1); /* it is held */
    close(fd);
    assert_int_equal(lg_run_lock(&r), 0);
}

/* One that was stopped has the lock for ever, and stands on no board: the next start ends it, and no one else who
 * has the file open. */
static void test_stopped_copy_of_the_lock_is_ended(void **state)
{
    (void)state;
    int how;
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    pid_t former = fork();
    if (former == 0) {
        if (lg_run_lock(&r) < 0) _exit(1);
        pid_t copy = fork();
        if (copy == 0) {
            raise(SIGSTOP);
            _exit(0);
        }
        waitpid(copy, &how, WUNTRACED);
        raise(SIGKILL);
    }
    assert_int_equal(waitpid(former, &how, 0), former);
    assert_true(WIFSIGNALED(how));
    pid_t opener = fork();
    if (opener == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (open(scratch_path("run/lock"), O_RDWR) >= 0) raise(SIGSTOP);
        _exit(0);
    }
    assert_int_equal(waitpid(opener, &how, WUNTRACED), opener);
    assert_int_equal(lg_run_lock(&r), 0);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    assert_int_equal(waitpid(opener, &how, WNOHANG), 0);
    kill(opener, SIGKILL);
    waitpid(opener, &how, 0);
    assert_true(waitpid(-1, &how, 0) > 0 && WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
}

static void test_lock_is_taken(void **state)
{
    (void)state;
    char want[64], line[128];
    int fd = open(scratch_write("run/lock", ""), O_RDWR | O_CLOEXEC);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    assert_says(lg_run_lock(&r), LG_ERR_BUSY, "already supervised by lgsup (pid 0)");
    write_holder((int)getpid(), lg_process_start_time((int)getpid()));
    snprintf(want, sizeof want, "lgsup (pid %d)", (int)getpid());
    assert_says(lg_run_lock(&r), LG_ERR_BUSY, want);
    /* Pids and start times of another boot are a stranger's; who it is stands there. */
    snprintf(line, sizeof line, "%d %llu 00000000-0000-0000-0000-000000000000 far\n",
             (int)getppid(), (unsigned long long)lg_process_start_time((int)getppid()));
    assert_int_equal(pwrite(fd, line, strlen(line), 0), (int)strlen(line));
    assert_int_equal(lg_run_holder(r.dir, NULL), -1);
    assert_says(lg_run_lock(&r), LG_ERR_BUSY, "on far, which cannot be seen from here");
    close(fd);
    unlink(scratch_path("run/lock"));
    assert_int_equal(symlink(scratch_write("elsewhere", ""), scratch_path("run/lock")), 0);
    assert_says(lg_run_lock(&r), LG_ERR_IO, "cannot open");
    unlink(scratch_path("run/lock"));
    mkdir(scratch_path("run/lock"), 0700);
    assert_says(lg_run_lock(&r), LG_ERR_IO, "cannot open");
}

/* ---- the runtime directory ---- */

static void test_runtime_dir_of_units(void **state)
{
    (void)state;
    char long_path[200], name[32];
    snprintf(r.units, sizeof r.units, "lg-fake-");
    const struct lg_launcher *launcher = lg_launcher_of(&r);
    assert_says(launcher->runtime_create(&r), LG_ERR_CONFIG, "RUNTIME_DIRECTORY is not set");
    memset(long_path, 'a', sizeof long_path - 1);
    long_path[0] = '/', long_path[sizeof long_path - 1] = 0;
    const char *const bad[] = {"relative", "/a:/b", long_path};
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        setenv("RUNTIME_DIRECTORY", bad[i], 1);
        assert_says(launcher->runtime_create(&r), LG_ERR_CONFIG, "not one short path");
    }
    setenv("RUNTIME_DIRECTORY", "/nowhere/at/all", 1);
    assert_says(launcher->runtime_create(&r), LG_ERR_NOTFOUND, "the directory of the sockets");
    snprintf(name, sizeof name, "lg-%u-sockets", (unsigned)getuid()); /* as if it were lgsup's */
    const char *dir = scratch_path(name);
    mkdir(dir, 0700);
    chmod(dir, 0750); /* somebody else could bind a socket in it */
    setenv("RUNTIME_DIRECTORY", dir, 1);
    assert_says(launcher->runtime_create(&r), LG_ERR_IO, "mode 0700");
    chmod(dir, 0700);
    assert_int_equal(launcher->runtime_create(&r), 0);
    assert_string_equal(r.runtime_dir, dir);
    launcher->runtime_remove(&r);
    assert_true(lg_path_exists(dir)); /* systemd's to remove */
    assert_false(lg_path_exists(scratch_path("run/runtime")));
}

/* One that nobody could find again, as its record cannot be written, is not left behind. */
static void test_runtime_dir_without_a_record(void **state)
{
    (void)state;
    const char *base = scratch_path("base");
    setenv("XDG_RUNTIME_DIR", base, 1);
    mkdir(base, 0700);
    mkdir(scratch_path("run/runtime"), 0700);
    assert_true(lg_run_runtime_create(&r) < 0);
    assert_string_equal(r.runtime_dir, "");
    assert_int_equal(rmdir(base), 0); /* it is empty */
}

static void test_runtime_dir(void **state)
{
    (void)state;
    struct stat st;
    char dir[LG_PATH_BYTES], link[LG_PATH_BYTES];
    setenv("XDG_RUNTIME_DIR", scratch_path("base"), 1);
    mkdir(scratch_path("base"), 0700);
    assert_int_equal(lg_run_runtime_create(&r), 0);
    assert_memory_equal(r.runtime_dir, scratch_path("base"), strlen(scratch_path("base")));
    snprintf(dir, sizeof dir, "%s", r.runtime_dir);
    assert_true(stat(dir, &st) == 0 && (st.st_mode & 0777) == 0700);
    assert_int_equal(lg_run_runtime_load(&r), 0);
    chmod(dir, 0755);
    assert_says(lg_run_runtime_load(&r), LG_ERR_IO, "must be a directory of user");
    chmod(dir, 0700);
    /* A record that names something else: nothing but the record is removed. */
    scratch_write("keep/file", "");
    chmod(scratch_path("keep"), 0700);
    const char *const others[] = {scratch_path("keep"), scratch_path("keep/file"),
                                  scratch_path("none"), "nonsense"};
    for (size_t i = 0; i < LG_ARRAY_LEN(others); i++) {
        scratch_write("run/runtime", others[i]);
        r.runtime_dir[0] = 0;
        lg_run_runtime_remove(&r);
        snprintf(r.runtime_dir, sizeof r.runtime_dir, "%s", others[i]);
        lg_run_runtime_remove(&r);
        assert_true(lg_path_exists(scratch_path("keep/file")));
    }
    snprintf(link, sizeof link, "%s/lg-%u-link", scratch_path("base"), (unsigned)getuid());
    assert_int_equal(symlink(scratch_path("keep"), link), 0); /* named like ours, a link */
    snprintf(r.runtime_dir, sizeof r.runtime_dir, "%s", link);
    lg_run_runtime_remove(&r);
    assert_true(lg_path_exists(scratch_path("keep/file")));
    assert_true(lg_path_exists(dir));
    snprintf(r.runtime_dir, sizeof r.runtime_dir, "%s", dir);
    lg_run_runtime_remove(&r);
    assert_false(lg_path_exists(dir));
}

/* ---- what a start continues from ---- */

static int decide(const char *const *set)
{
    int rc = lg_run_decide(&r, run_fixture_config(set));
    return rc;
}
#define DECIDE(...) decide((const char *const[]){__VA_ARGS__, NULL})

static void test_newest_checkpoint(void **state)
{
    (void)state;
    run_fixture_checkpoint(&r, r.dir, 20);
    run_fixture_checkpoint(&r, r.dir, 40);
    assert_int_equal(decide(NULL), 0);
    assert_int_equal(r.start_step, 40);
    assert_non_null(strstr(r.resume, "fake_step40"));
    assert_int_equal(DECIDE("trainer.auto_resume=false"), 0); /* a new run */
    assert_int_equal(r.start_step, 0);
    assert_string_equal(r.resume, "");
    scratch_write("run/checkpoints/fake_step40/state", "stale\n"); /* same size, other bytes */
    assert_says(decide(NULL), LG_ERR_CORRUPT, "cannot go on from");
}

/* Any seed that a config may have comes back. */
static void test_seeds(void **state)
{
    (void)state;
    static const int64_t seeds[] = {0, 999999999999999, 1000000000000001, (INT64_C(1) << 53) + 1,
                                    INT64_MAX};
    char dir[LG_PATH_BYTES], *text;
    size_t bytes;
    lg_manifest m;
    const int64_t own = r.config->job_seed;
    for (size_t i = 0; i < LG_ARRAY_LEN(seeds); i++) {
        r.config->job_seed = seeds[i];
        run_fixture_checkpoint(&r, scratch_path("seeds"), 20 + i);
        assert_int_equal(lg_manifest_newest(scratch_path("seeds/checkpoints"), "fake", dir, &m), 0);
        assert_int_equal(m.step, 20 + i);
        assert_true(m.seed == (uint64_t)seeds[i]);
    }
    r.config->job_seed = own;
    /* As builds wrote them that knew no text, and what is none. */
    const char *const path = scratch_path("seeds/checkpoints/fake_step20/manifest.json");
    assert_int_equal(lg_read_file(path, 1 << 16, &text, &bytes), 0);
    char *seed = strstr(text, "\"seed\":\t0");
    assert_non_null(seed);
    static const struct {
        const char *is;
        int rc;
    } was[] = {{"9.2233720368547758e+18", 0},
               {"1.8446744073709552e+19", LG_ERR_CORRUPT},
               {"\"18446744073709551616\"", LG_ERR_CORRUPT},
               {"\"\"", LG_ERR_CORRUPT},
               {"\"-1\"", LG_ERR_CORRUPT},
               {"\"7 \"", LG_ERR_CORRUPT}};
    for (size_t i = 0; i < LG_ARRAY_LEN(was); i++) {
        char changed[4096];
        snprintf(changed, sizeof changed, "%.*s\"seed\": %s%s", (int)(seed - text), text, was[i].is,
                 seed + strlen("\"seed\":\t0"));
        scratch_write("seeds/checkpoints/fake_step20/manifest.json", changed);
        assert_int_equal(lg_manifest_load(scratch_path("seeds/checkpoints/fake_step20"), &m),
                         was[i].rc);
        lg_err_clear();
    }
    free(text);
}

/* A checkpoint of another plan, or of a run whose plan.json is of another build, is refused by name. */
static void test_checkpoint_of_another_plan(void **state)
{
    (void)state;
    lg_run other = r;
    other.plan.hash++;
    run_fixture_checkpoint(&other, r.dir, 20);
    assert_says(decide(NULL), LG_ERR_MISMATCH, "was made by another plan");
    scratch_write("run/plan.json", "{\"format\": 1, \"torn");
    assert_true(decide(NULL) < 0);
    assert_non_null(strstr(lg_err_message(), "plan.json"));
    unlink(scratch_path("run/plan.json")); /* nothing is known of its plan but the hash */
    assert_says(decide(NULL), LG_ERR_MISMATCH, "was made by another plan");
}

/* A key that trainer.resume_changes names may differ, but only from the plan that the checkpoint was made by: a folder
 * with files of two runs is refused. */
static void test_resume_changes(void **state)
{
    (void)state;
    const char *const set[] = {"trainer.lr=0.5", "trainer.resume_changes=[\"trainer.lr\"]", NULL};
    lg_run other = r;
    run_fixture_checkpoint(&r, r.dir, 20);
    assert_says(DECIDE("trainer.lr=0.5"), LG_ERR_MISMATCH, "trainer.lr");
    assert_int_equal(decide(set), 0);
    assert_int_equal(r.start_step, 20);
    other.config = r.config;
    other.plan.hash++;
    run_fixture_checkpoint(&other, r.dir, 40);
    assert_says(decide(set), LG_ERR_MISMATCH, "by another plan than its run's");
    unlink(scratch_path("run/plan.json")); /* nothing is known of its plan but the hash */
    assert_says(decide(set), LG_ERR_MISMATCH, "was made by another plan");
}

static void test_resume_from(void **state)
{
    (void)state;
    char set[LG_PATH_BYTES + 32];
    snprintf(set, sizeof set, "trainer.resume_from=%s",
             scratch_path("other/checkpoints/fake_step20"));
    run_fixture_checkpoint(&r, scratch_path("other"), 20);
    assert_int_equal(DECIDE(set, "trainer.max_steps=90"), 0);
    assert_int_equal(r.plan.lr_steps, 60); /* the schedule stays as long as it was */
    assert_int_equal(DECIDE(set), 0);      /* its run is gone: the manifest alone tells */
    assert_int_equal(r.start_step, 20);
    char *toml = lg_config_to_toml(r.config);
    scratch_write("other/config.toml", toml);
    free(toml);
    assert_int_equal(lg_plan_save(&r.plan, scratch_path("other/plan.json")), 0);
    assert_int_equal(DECIDE(set), 0);
    assert_int_equal(r.start_step, 20);
    assert_says(DECIDE(set, "job.seed=9"), LG_ERR_MISMATCH, "job.seed");
    scratch_write("other/config.toml", "[job\n");
    assert_true(DECIDE(set) < 0);
    unlink(scratch_path("other/config.toml"));
    assert_int_equal(DECIDE(set), 0);
    run_fixture_checkpoint(&r, r.dir, 40); /* auto_resume goes first */
    assert_int_equal(DECIDE(set), 0);
    assert_int_equal(r.start_step, 40);
    scratch_write("other/checkpoints/fake_step20/manifest.json", "{");
    assert_true(DECIDE(set, "trainer.auto_resume=false") < 0);
}

/* ---- what a writer that died has left ---- */

/* One half written and one half removed go, all else stays; where hosts share the folder another may be writing them. */
static void test_leftovers(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        bool goes;
    } dir[] = {{"fake_step20", false},
               {"fake_step40", false},
               {".tmp-fake_step60.ff", true},
               {".old-fake_step20", true},
               {".tmp-another_step60.ff", false}};
    char path[LG_PATH_BYTES], set[LG_PATH_BYTES + 32];
    for (size_t i = 0; i < LG_ARRAY_LEN(dir); i++) {
        snprintf(path, sizeof path, "run/checkpoints/%s/state", dir[i].name);
        scratch_write(path, "state\n");
    }
    lg_config *own = r.config;
    snprintf(set, sizeof set, "hosts.shared=%s", scratch_path("shared"));
    r.config = run_fixture_config((const char *const[]){set, "hosts.count=2", "hosts.key=k",
                                                        "hosts.list=[\"a\", \"b\"]", NULL});
    for (int shares = 1; shares >= 0; shares--) {
        lg_run_remove_leftovers(&r);
        for (size_t i = 0; i < LG_ARRAY_LEN(dir); i++) {
            snprintf(path, sizeof path, "run/checkpoints/%s", dir[i].name);
            assert_int_equal(lg_path_exists(scratch_path(path)), shares || !dir[i].goes);
        }
        if (!shares) break;
        lg_config_free(&r.config);
        r.config = own;
    }
}

/* ---- DIR/programs ---- */

static int load(const char *text)
{
    lg_programs p;
    if (text) scratch_write("run/programs", text);
    int rc = lg_programs_load(&p, r.dir, 0xab);
    lg_programs_free(&p);
    return rc;
}

static void test_programs(void **state)
{
    (void)state;
    lg_programs p;
    assert_int_equal(lg_programs_load(&p, r.dir, 0xab), 0);
    assert_null(lg_programs_get(&p, LG_ROLE_vae, 0));
    assert_false(lg_programs_revert(&p, LG_ROLE_vae, 0)); /* nothing to go back to */
    assert_int_equal(lg_programs_set(&p, LG_ROLE_vae, 0, "/a"), 0);
    assert_int_equal(lg_programs_set(&p, LG_ROLE_vae, 0, "/b"), 0);
    assert_int_equal(lg_programs_set(&p, LG_ROLE_text, 3, "/c d"), 0);
    assert_says(lg_programs_set(&p, LG_ROLE_text, 3, "/a\tb"), LG_ERR_USAGE, "a tab");
    assert_says(lg_programs_set(&p, LG_ROLE_text, 3, "/a\n"), LG_ERR_USAGE, "line's end");
    assert_int_equal(lg_programs_save(&p), 0);
    lg_programs_free(&p);
    assert_int_equal(lg_programs_load(&p, r.dir, 0xab), 0);
    assert_string_equal(lg_programs_get(&p, LG_ROLE_vae, 0), "/b");
    assert_string_equal(lg_programs_get(&p, LG_ROLE_text, 3), "/c d");
    assert_null(lg_programs_get(&p, LG_ROLE_text, 0));
    assert_true(lg_programs_revert(&p, LG_ROLE_vae, 0));
    assert_string_equal(lg_programs_get(&p, LG_ROLE_vae, 0), "/a");
    assert_false(lg_programs_revert(&p, LG_ROLE_vae, 0)); /* one step back, not two */
    assert_true(lg_programs_revert(&p, LG_ROLE_text, 3));
    assert_null(lg_programs_get(&p, LG_ROLE_text, 3)); /* the one beside lgsup */
    assert_int_equal(lg_programs_save(&p), 0);
    lg_programs_free(&p);
    assert_int_equal(lg_programs_load(&p, r.dir, 0xab), 0);
    assert_false(lg_programs_revert(&p, LG_ROLE_vae, 0));
    lg_programs_free(&p);
    assert_int_equal(lg_programs_load(&p, r.dir, 0xac), 0); /* of an earlier start: not ours */
    assert_int_equal(p.n, 0);
    lg_programs_free(&p);
}

/* A damaged file is not guessed at: other programs than the user's would run. */
static void test_damaged_programs(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        "programs of old\n",
        "run ab\nvae.0\n",
        "run ab\nvae.0\t/a\n",
        "run ab\nvae\t/a\t-\n",
        "run ab\nlvae.0\t/a\t-\n",
        "run ab\nvae.0x\t/a\t-\n",
        "run ab\nvae.-1\t/a\t-\n",
        "run ab\nvae.64\t/a\t-\n",
        "run ab\nvae.0\t/a\t-\nvae.0\t/b\t-\n",
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++)
        assert_says(load(bad[i]), LG_ERR_CORRUPT, "run/programs is damaged: remove it");
    assert_int_equal(load("run ab\nvae.0\t/a\t-\n"), 0);
    assert_int_equal(load("run ac\nnonsense\n"), 0);
    unlink(scratch_path("run/programs"));
    mkdir(scratch_path("run/programs"), 0700);
    assert_true(load(NULL) < 0);
    lg_err_clear();
}

/* ---- orders that nobody has to be asked about ---- */

static void test_orders_refused(void **state)
{
    (void)state;
    static const char *const no_number[] = {"", "x", "3x", "99999999999", "-99999999999"};
    static const char *const no_instance[] = {"vae.", "vae.x", "vae.1x", "vae.-1", "vae.64"};
    char deep[600], longest[700], here[LG_PATH_BYTES];
    assert_non_null(getcwd(here, sizeof here));
    for (size_t i = 0; i < LG_ARRAY_LEN(no_number); i++)
        assert_says(lg_order_scale(&(struct lg_order_to){.dir = r.dir}, "vae", no_number[i]),
                    LG_ERR_USAGE, "not a number");
    for (size_t i = 0; i < LG_ARRAY_LEN(no_instance); i++)
        assert_says(lg_order_swap(&(struct lg_order_to){.dir = r.dir}, no_instance[i], NULL),
                    LG_ERR_USAGE, "is no instance");
    assert_says(lg_order_swap(&(struct lg_order_to){.dir = r.dir}, "lvae.0", NULL), LG_ERR_USAGE,
                "no role \"lvae\"");
    assert_says(lg_order_swap(&(struct lg_order_to){.dir = r.dir}, "vae", "no/such/program"),
                LG_ERR_NOTFOUND, "no program");
    assert_says(lg_order_swap(&(struct lg_order_to){.dir = r.dir}, "vae", "/bin/true"),
                LG_ERR_NOTFOUND, "no lgsup is in charge");
    assert_int_equal(chdir("/bin"), 0); /* a relative path is one from here */
    assert_says(lg_order_swap(&(struct lg_order_to){.dir = r.dir}, "vae", "true"), LG_ERR_NOTFOUND,
                "no lgsup is in charge");
    assert_int_equal(chdir(here), 0);
    memset(deep, 'a', sizeof deep);
    for (size_t i = 0; i < sizeof deep; i += 100) deep[i] = '/';
    deep[sizeof deep - 1] = 0;
    snprintf(longest, sizeof longest, "x%s", deep);
    assert_int_equal(lg_mkdirs(scratch_path(longest)), 0);
    assert_says(lg_order_swap(&(struct lg_order_to){.dir = r.dir}, "vae", scratch_path(longest)),
                LG_ERR_USAGE, "longer than");
    assert_says(lg_order_scale(&(struct lg_order_to){.dir = scratch_path("x")}, "vae", "2"),
                LG_ERR_NOTFOUND, "is not a run directory");
    /* The moment in which lgsup has the lock and no sockets yet. */
    write_holder((int)getpid(), lg_process_start_time((int)getpid()));
    assert_says(lg_order_scale(&(struct lg_order_to){.dir = r.dir}, "vae", "2"), LG_ERR_BUSY,
                "only just starting, or ending");
}

/* ---- folders ---- */

/* Names that are there are made durable once more; where that cannot be, they are somebody else's. */
static void test_folders_of_others(void **state)
{
    (void)state;
    enum { NOBODY = 65534 };
    char dir[] = "/tmp/lg-test-folders-XXXXXX", own[64], run[80];
    assert_int_equal(lg_mkdirs("/proc/self"), 0); /* no fsync there */
    assert_int_equal(lg_mkdirs("/"), 0);
    if (geteuid() != 0) return;
    assert_non_null(mkdtemp(dir));
    snprintf(own, sizeof own, "%s/own", dir);
    snprintf(run, sizeof run, "%s/own//run/", dir);
    assert_true(mkdir(own, 0700) == 0 && chown(own, NOBODY, NOBODY) == 0 && chmod(dir, 0711) == 0);
    assert_int_equal(seteuid(NOBODY), 0);
    const int rc = lg_mkdirs(run), again = lg_mkdirs(own);
    assert_int_equal(seteuid(0), 0);
    assert_true(lg_path_exists(run));
    assert_int_equal(lg_remove_tree(dir), 0);
    assert_int_equal(rc, 0);
    assert_int_equal(again, 0);
}

/* ---- which checkpoints get a picture ---- */

static uint64_t next_preview(uint64_t past)
{
    struct lg_preview_job job;
    return lg_preview_next(&r, LG_PREVIEW_PICTURES, past, &job) ? job.step : 0;
}

static void test_next_preview(void **state)
{
    (void)state;
    static const char *const others[] = {"fake",         "fake_stepx", "fake_step", "fake_step10x",
                                         "other_step10", "fake_step30" /* no manifest */};
    assert_int_equal(next_preview(0), 0); /* not asked for */
    assert_int_equal(DECIDE("sample.every=10", "checkpoint.every=10"), 0);
    for (size_t i = 0; i < LG_ARRAY_LEN(others); i++) {
        char name[64];
        snprintf(name, sizeof name, "run/checkpoints/%s", others[i]);
        lg_mkdirs(scratch_path(name));
    }
    assert_int_equal(next_preview(0), 0);
    run_fixture_checkpoint(&r, r.dir, 40);
    run_fixture_checkpoint(&r, r.dir, 20);
    run_fixture_checkpoint(&r, r.dir, 15);
    assert_int_equal(next_preview(0), 20);
    assert_int_equal(next_preview(20), 40);
    assert_int_equal(next_preview(40), 0);
    scratch_write("run/samples/step20.png", "png");
    assert_int_equal(next_preview(0), 40);
    struct timespec old[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    assert_int_equal(utimensat(AT_FDCWD, scratch_path("run/samples/step20.png"), old, 0), 0);
    assert_int_equal(next_preview(0), 20); /* a former life's picture */
    struct stat st;                        /* in the same second, by a nanosecond */
    assert_int_equal(stat(scratch_path("run/checkpoints/fake_step20/manifest.json"), &st), 0);
    old[0] = old[1] = (struct timespec){.tv_sec = st.st_mtim.tv_sec, .tv_nsec = 0};
    struct timespec newer[2] = {{.tv_sec = st.st_mtim.tv_sec, .tv_nsec = 1},
                                {.tv_sec = st.st_mtim.tv_sec, .tv_nsec = 1}};
    assert_int_equal(
        utimensat(AT_FDCWD, scratch_path("run/checkpoints/fake_step20/manifest.json"), newer, 0),
        0);
    assert_int_equal(utimensat(AT_FDCWD, scratch_path("run/samples/step20.png"), old, 0), 0);
    assert_int_equal(next_preview(0), 20);
    assert_int_equal(utimensat(AT_FDCWD, scratch_path("run/samples/step20.png"), newer, 0), 0);
    assert_int_equal(next_preview(0), 40);
}

static void test_preview_result(void **state)
{
    (void)state;
    assert_int_equal(lg_preview_result(&r, LG_PREVIEW_PICTURES, 0), 0);
    assert_says(lg_preview_result(&r, LG_PREVIEW_PICTURES, 137), LG_ERR_FAILED,
                "lg-sample: signal 9 (Killed) (all of");
    assert_says(lg_preview_result(&r, LG_PREVIEW_PICTURES, 5), LG_ERR_FAILED,
                "exit 5 CORRUPT (all of it: ");
    scratch_write("run/logs/sample.log",
                  "2026-01-01T00:00:00.000Z error sample no ink\n    at x\n");
    assert_says(lg_preview_result(&r, LG_PREVIEW_PICTURES, 5), LG_ERR_FAILED,
                "exit 5 CORRUPT: no ink (all");
    scratch_write("run/logs/sample.log",
                  "2026-01-01T00:00:00.000Z error sample no ink\nlibc: bad\n");
    assert_says(lg_preview_result(&r, LG_PREVIEW_PICTURES, 5), LG_ERR_FAILED,
                "CORRUPT: libc: bad (all");
}

/* ---- the end ---- */

static int finish(lg_run_state outcome, bool quiet, int code)
{
    lg_finish(&r, outcome, quiet, &code);
    return code;
}

/* A run that is done must have a checkpoint; its pictures are an extra. */
static void test_finish(void **state)
{
    (void)state;
    lg_mkdirs(scratch_path("bin"));
    setenv("LG_BIN_DIR", scratch_path("bin"), 1);
    assert_int_equal(finish(LG_RUN_DONE, true, 0), -LG_ERR_CORRUPT);
    assert_int_equal(finish(LG_RUN_DONE, true, 130), 130);
    assert_int_equal(finish(LG_RUN_STOPPED, true, 0), 0);
    run_fixture_checkpoint(&r, r.dir, 60);
    assert_int_equal(finish(LG_RUN_DONE, true, 0), 0); /* no lg-sample: a warning */
    assert_int_equal(symlink("/bin/true", scratch_path("bin/lg-sample")), 0);
    assert_int_equal(finish(LG_RUN_DONE, true, 0), 0);
    assert_int_equal(finish(LG_RUN_DONE, false, 0), 0);
}

/* ---- programs that are started ---- */

static void test_program_path(void **state)
{
    (void)state;
    char path[LG_PATH_BYTES];
    unsetenv("LG_BIN_DIR");
    assert_says(lg_program_path("lg-nothing", path), LG_ERR_NOTFOUND, "lg-nothing is missing");
    assert_int_equal(lg_program_path("test_run", path), 0); /* beside the running one */
    setenv("LG_BIN_DIR", "", 1);
    assert_int_equal(lg_program_path("test_run", path), 0);
    setenv("LG_BIN_DIR", "/bin", 1);
    assert_says(lg_program_path("test_run", path), LG_ERR_NOTFOUND, "/bin/test_run is missing");
    assert_int_equal(lg_program_path("true", path), 0);
}

static void test_capture(void **state)
{
    (void)state;
    char *text = NULL, how[64];
    int code = 0;
    struct lg_capture c;
    char *say[] = {(char *)"sh", (char *)"-c", (char *)"echo out; echo err >&2; exit 3", NULL};
    char *flood[] = {(char *)"sh", (char *)"-c", (char *)"while :; do echo much; done", NULL};
    char *hang[] = {(char *)"sleep", (char *)"1000", NULL};
    assert_int_equal(lg_child_capture("/bin/sh", say, 8, &text, &code), 0); /* exactly 8 */
    assert_string_equal(text, "out\nerr\n");
    assert_int_equal(code, 3);
    free(text);
    assert_says(lg_child_capture("/bin/sh", say, 7, &text, &code), LG_ERR_CORRUPT,
                "more than 7 bytes");
    assert_says(lg_child_capture("/bin/sh", flood, 100000, &text, &code), LG_ERR_CORRUPT,
                "more than 100000 bytes"); /* and it is ended */
    assert_says(lg_child_capture("/no/such/program", say, 7, &text, &code), LG_ERR_NOTFOUND,
                "cannot start /no/such/program");
    assert_int_equal(lg_capture_begin("/bin/sleep", hang, &c), 0);
    c.timeout_ms = 50;
    assert_says(lg_capture_end(&c, 100, &text, &code), LG_ERR_TIMEOUT, "no end of its output");
    assert_string_equal(lg_child_json("warning: {\n{\"a\": 1}\n"), "{\"a\": 1}\n");
    assert_string_equal(lg_child_json("nothing"), "");
    lg_exit_text(LG_EXIT_UNKNOWN, how, sizeof how);
    assert_string_equal(how, "ended");
    lg_exit_text(0, how, sizeof how);
    assert_string_equal(how, "exit 0");
}

struct entry {
    int pid;
    bool die, refuse, stop; /* what befalls it, or the child, when it is entered */
    bool begun;             /* the program had by then */
};

static int enter(void *where, const struct lg_child *child)
{
    struct entry *e = where;
    e->pid = child->pid;
    e->begun = lg_path_exists(scratch_path("began"));
    if (e->die) raise(SIGKILL);
    if (e->stop) kill(child->pid, SIGSTOP);
    return e->refuse ? LG_FAIL(LG_ERR_IO, "it cannot be written down") : 0;
}

static int spawn_held(const char *program, const char *script, struct entry *e,
                      struct lg_child *ret)
{
    char *argv[] = {(char *)"sh", (char *)"-c", (char *)script, (char *)scratch_path("began"),
                    NULL};
    return lg_child_spawn(&(struct lg_spawn){.program = program,
                                             .argv = argv,
                                             .log = scratch_path("held.log"),
                                             .pass_fd = -1,
                                             .enter = enter,
                                             .where = e},
                          ret);
}

/* A child is entered before its program begins, and what begins has nothing of ours. */
static void test_child_is_entered_before_it_begins(void **state)
{
    (void)state;
    struct entry e = {0};
    struct lg_child c = LG_CHILD_NONE;
    char want[64], words[64];
    sigset_t usr1, before;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    int low = dup(2), high = fcntl(2, F_DUPFD, 60); /* these would be inherited */
    sigprocmask(SIG_BLOCK, &usr1, &before);
    signal(SIGUSR1, SIG_IGN);
    int rc = spawn_held(
        "/bin/sh",
        "touch $0; set -- $(cat /proc/$$/stat); n=0; i=2; "
        "while [ $((i += 1)) -lt 100 ]; do [ ! -e /proc/$$/fd/$i ] || n=$((n + 1)); done; "
        "echo pid $1 session $6 fds $n; kill -USR1 $$; exit 3",
        &e, &c);
    sigprocmask(SIG_SETMASK, &before, NULL);
    signal(SIGUSR1, SIG_DFL);
    close(low);
    close(high);
    assert_int_equal(rc, 0);
    assert_true(e.pid == c.pid && !e.begun);
    snprintf(want, sizeof want, "pid %d session %d fds 0", c.pid, c.pid);
    assert_int_equal(lg_child_wait(&c, 60000), 0);
    assert_int_equal(lg_child_reap(&c), LG_EXIT_SIGNAL + SIGUSR1);
    lg_last_words(scratch_path("held.log"), words, sizeof words);
    assert_string_equal(words, want);
    assert_true(lg_path_exists(scratch_path("began")));

    e.refuse = true; /* who cannot be written down is not started */
    unlink(scratch_path("began"));
    assert_says(spawn_held("/bin/sh", "touch $0", &e, &c), LG_ERR_IO, "it cannot be written down");
    assert_int_equal(waitpid(e.pid, NULL, 0), -1);
    assert_false(lg_path_exists(scratch_path("began")));
    e.refuse = false;

    assert_says(spawn_held("/no/such/program", "", &e, &c), LG_ERR_NOTFOUND,
                "cannot start /no/such/program");
    assert_int_equal(waitpid(e.pid, NULL, 0), -1); /* it has been waited for */
}

/* fd 3 is what it was given, wherever that lay, and there is no other. */
static void test_held_child_gets_an_fd(void **state)
{
    (void)state;
    struct entry e = {0};
    struct lg_child c = LG_CHILD_NONE;
    char word[8] = "";
    for (int at = 3; at < 60; at += 50) {
        int p[2], to;
        assert_int_equal(pipe2(p, O_CLOEXEC), 0);
        assert_true((to = fcntl(p[1], F_DUPFD_CLOEXEC, at)) >= at);
        char *argv[] = {(char *)"sh", (char *)"-c",
                        (char *)"[ ! -e /proc/$$/fd/4 ] && echo yes >&3", NULL};
        assert_int_equal(lg_child_spawn(&(struct lg_spawn){.program = "/bin/sh",
                                                           .argv = argv,
                                                           .log = scratch_path("held.log"),
                                                           .pass_fd = to,
                                                           .enter = enter,
                                                           .where = &e},
                                        &c),
                         0);
        close(p[1]);
        close(to);
        assert_int_equal(read(p[0], word, 4), 4);
        assert_string_equal(word, "yes\n");
        assert_int_equal(read(p[0], word, 1), 0); /* nobody else has it */
        close(p[0]);
        assert_int_equal(lg_child_wait(&c, 60000), 0);
        assert_int_equal(lg_child_reap(&c), 0);
    }
}

/* lgsup dies before it has written down whom it starts: nobody would end a program that hangs. */
static void test_child_that_was_not_entered_never_begins(void **state)
{
    (void)state;
    int how;
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    pid_t former = fork();
    if (former == 0) {
        struct entry e = {.die = true};
        struct lg_child c;
        spawn_held("/bin/sh", "touch $0", &e, &c);
        _exit(1);
    }
    assert_int_equal(waitpid(former, &how, 0), former);
    assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
    pid_t left = waitpid(-1, &how, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    assert_true(left > 0 && WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 127);
    assert_false(lg_path_exists(scratch_path("began")));
}

/* It counts as started: the caller has more to do, and whoever watches it will see that it hangs. */
static void test_stopped_child_is_not_waited_for(void **state)
{
    (void)state;
    struct entry e = {.stop = true};
    struct lg_child c;
    int64_t before_ns = lg_now_ns();
    assert_int_equal(spawn_held("/bin/sh", "touch $0", &e, &c), 0);
    assert_true(lg_now_ns() - before_ns < 10 * LG_S_NS);
    assert_false(lg_path_exists(scratch_path("began")));
    lg_child_signal(&c, SIGCONT);
    assert_int_equal(lg_child_wait(&c, 10000), 0);
    assert_int_equal(lg_child_reap(&c), 0);
    assert_true(lg_path_exists(scratch_path("began")));
    unlink(scratch_path("began"));
}

/* Whoever reads a log for a death's reason gets the message, not the trace, and a library's words when
 * they came last. */
static void test_last_words(void **state)
{
    (void)state;
    static const struct {
        const char *log, *words;
    } logs[] = {
        {"", ""},
        {"plain words\n", "plain words"},
        {"2026-01-01T00:00:00.000Z info  vae.0 ready\n", "ready"},
        {"2026-01-01T00:00:00.000Z info  vae.0 ready\n    at a (b.c:1)\n", "ready"},
        {"2026-01-01T00:00:00.000Z info  vae.0 ready\nterminate called\n", "terminate called"},
        {"2026-01-01X00:00:00.000Z is no time, is it\n",
         "2026-01-01X00:00:00.000Z is no time, is it"},
        {"2026-01-01T00:00:00.000X is no time, is it\n",
         "2026-01-01T00:00:00.000X is no time, is it"},
        {"2026.01-01T00:00:00.000Z is no time, is it\n",
         "2026.01-01T00:00:00.000Z is no time, is it"},
        {"    at somewhere\n", "    at somewhere"}};
    char words[256];
    for (size_t i = 0; i < LG_ARRAY_LEN(logs); i++) {
        lg_last_words(scratch_write("log", logs[i].log), words, sizeof words);
        assert_string_equal(words, logs[i].words);
    }
    lg_last_words(scratch_path("no-log"), words, sizeof words);
    assert_string_equal(words, "");
}

/* The writer's last removals may have failed, or it died in one: nothing half-removed is left, however
 * the run ended. */
static void test_finish_removes_leftovers(void **state)
{
    (void)state;
    scratch_write("run/checkpoints/.old-fake_step20/model/half.safetensors", "half");
    scratch_write("run/checkpoints/.tmp-fake_step40/manifest.json", "{");
    scratch_write("run/checkpoints/notes/of a user", "stays");
    finish(LG_RUN_STOPPED, true, 0);
    assert_false(lg_path_exists(scratch_path("run/checkpoints/.old-fake_step20")));
    assert_false(lg_path_exists(scratch_path("run/checkpoints/.tmp-fake_step40")));
    assert_true(lg_path_exists(scratch_path("run/checkpoints/notes/of a user")));
}

int main(void)
{
#define TEST(t) cmocka_unit_test_setup_teardown(t, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_holder),
        TEST(test_former_holder_is_waited_for),
        TEST(test_lock_is_held_by_a_copy),
        TEST(test_stopped_copy_of_the_lock_is_ended),
        TEST(test_lock_is_taken),
        TEST(test_runtime_dir_of_units),
        TEST(test_runtime_dir_without_a_record),
        TEST(test_runtime_dir),
        TEST(test_newest_checkpoint),
        TEST(test_checkpoint_of_another_plan),
        TEST(test_resume_changes),
        TEST(test_seeds),
        TEST(test_resume_from),
        TEST(test_leftovers),
        TEST(test_programs),
        TEST(test_damaged_programs),
        TEST(test_orders_refused),
        TEST(test_folders_of_others),
        TEST(test_next_preview),
        TEST(test_preview_result),
        TEST(test_finish),
        TEST(test_finish_removes_leftovers),
        TEST(test_program_path),
        TEST(test_capture),
        TEST(test_child_is_entered_before_it_begins),
        TEST(test_held_child_gets_an_fd),
        TEST(test_child_that_was_not_entered_never_begins),
        TEST(test_stopped_child_is_not_waited_for),
        TEST(test_last_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
