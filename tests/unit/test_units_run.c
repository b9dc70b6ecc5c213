/* The life of a run as systemd units, whose processes somebody else starts. That somebody is a
 * process of the test here (the real one: tests/systemd/run.sh). The units' text: test_units. */
#include "base/check.h"
#include "base/clock.h"
#include "base/fs.h"
#include "supervisor/launch/launcher.h"
#include "supervisor/launch/role.h"
#include "supervisor/launch/systemd.h"
#include "supervisor/run/child.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervise_fixture.h"
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static char g_rt[LG_PATH_BYTES];
static pid_t g_manager; /* 0: none */

/* ---- scaffolding ---- */

/* systemctl is a script of the test: how the real one answers on a machine without systemd, unless
 * the test writes another. */
static int g_patience_ms;   /* for it; 0: as long as lgsup has */
static int g_systemctl_pid; /* of the last one that was begun */
int __real_lg_capture_begin(const char *program, char *const *argv, struct lg_capture *ret);
int __wrap_lg_capture_begin(const char *program, char *const *argv, struct lg_capture *ret);
int __wrap_lg_capture_begin(const char *program, char *const *argv, struct lg_capture *ret)
{
    if (strcmp(program, "/usr/bin/systemctl")) return __real_lg_capture_begin(program, argv, ret);
    LG_TRY(__real_lg_capture_begin(scratch_path("bin/systemctl"), argv, ret));
    g_systemctl_pid = ret->child.pid;
    return 0;
}
int __real_lg_capture_end(struct lg_capture *c, size_t bytes_max, char **ret_text, int *ret_exit);
int __wrap_lg_capture_end(struct lg_capture *c, size_t bytes_max, char **ret_text, int *ret_exit);
int __wrap_lg_capture_end(struct lg_capture *c, size_t bytes_max, char **ret_text, int *ret_exit)
{
    bool systemctl = c->child.pid == g_systemctl_pid;
    LG_ASSERT(!systemctl || c->timeout_ms <= 10000); /* a third of lgsup's watchdog */
    if (systemctl && g_patience_ms) c->timeout_ms = g_patience_ms;
    return __real_lg_capture_end(c, bytes_max, ret_text, ret_exit);
}

/* A role becomes its program: in a build for coverage it leaves its share of the count first. */
extern void __gcov_dump(void) __attribute__((weak));
int __wrap_execl(const char *program, const char *word, ...);
int __wrap_execl(const char *program, const char *word, ...)
{
    char *argv[16] = {(char *)word};
    va_list ap;
    va_start(ap, word);
    for (size_t n = 1; argv[n - 1]; n++) {
        LG_ASSERT(n < LG_ARRAY_LEN(argv));
        argv[n] = va_arg(ap, char *);
    }
    va_end(ap);
    if (__gcov_dump) __gcov_dump();
    return execv(program, argv);
}

static void write_systemctl(const char *script)
{
    char text[1024];
    snprintf(text, sizeof text, "#!/bin/sh\n%s\n", script);
    assert_int_equal(chmod(scratch_write("bin/systemctl", text), 0700), 0);
}

static int setup(void **state)
{
    if (lgsup_setup(state) < 0) return -1;
    snprintf(g_rt, sizeof g_rt, "%s", scratch_path("rt"));
    assert_int_equal(mkdir(g_rt, 0700), 0);
    setenv("RUNTIME_DIRECTORY", g_rt, 1);
    write_systemctl("echo System has not been booted with systemd; exit 1");
    g_manager = 0;
    return 0;
}

static void end(pid_t *pid, int sig)
{
    if (*pid <= 0) return;
    kill(*pid, sig);
    waitpid(*pid, NULL, 0);
    *pid = 0;
}

static int teardown(void **state)
{
    end(&g_manager, SIGTERM); /* takes its units along */
    return lgsup_teardown(state);
}

static void wait_for_text(const char *path, const char *part)
{
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (file_has(path, part)) return;
    assert_has(path, part);
}

/* ---- whoever starts the units ---- */

struct unit {
    const char *role; /* NULL: the keeper */
    const char *index;
    pid_t pid; /* 0: ended well */
};
static volatile sig_atomic_t g_over;

static void on_term(int sig)
{
    (void)sig;
    g_over = 1;
}

static pid_t start_unit(const struct unit *u)
{
    pid_t pid = fork();
    if (pid != 0) return pid;
    signal(SIGTERM, SIG_DFL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char program[LG_PATH_BYTES + 16], socket[LG_PATH_BYTES + 16], nobody[16];
    if (u->role) scratch_exit(-lg_units_role(u->role, u->index, g_run));
    snprintf(program, sizeof program, "%s/lg-keeper", getenv("LG_BIN_DIR"));
    snprintf(socket, sizeof socket, "%s/keeper.new", g_rt);             /* without a store */
    snprintf(nobody, sizeof nobody, "%d", open("/dev/null", O_WRONLY)); /* asks when it is ready */
    execl(program, program, socket, nobody, NULL);
    _exit(1);
}

/* All but the one that is named; Restart=on-failure, 11 excepted; the keeper always. */
static void manage_units(const char *but)
{
    struct unit u[] = {{.index = ""},       {"loader", "0", 0},  {"text", "0", 0},
                       {"text", "1", 0},    {"vae", "0", 0},     {"vae", "1", 0},
                       {"trainer", "0", 0}, {"trainer", "1", 0}, {"ema", "0", 0},
                       {"ckpt", "0", 0}};
    struct sigaction a = {.sa_handler = on_term}; /* without SA_RESTART */
    sigaction(SIGTERM, &a, NULL);
    for (size_t i = 0; i < LG_ARRAY_LEN(u); i++) {
        char name[32];
        snprintf(name, sizeof name, "%s.%s", u[i].role ? u[i].role : "keeper", u[i].index);
        if (!but || strcmp(name, but) != 0) u[i].pid = start_unit(&u[i]);
    }
    while (!g_over) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        for (size_t i = 0; pid > 0 && i < LG_ARRAY_LEN(u); i++) {
            if (u[i].pid != pid) continue;
            bool well = WIFEXITED(status) && (!WEXITSTATUS(status) || WEXITSTATUS(status) == 11);
            u[i].pid = well && u[i].role ? 0 : start_unit(&u[i]);
        }
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(u); i++)
        if (u[i].pid > 0) kill(u[i].pid, SIGKILL);
    while (wait(NULL) > 0) continue;
    _exit(0);
}

static void start_units(void)
{
    fflush(NULL);
    g_manager = fork();
    if (g_manager == 0) manage_units(NULL);
}

/* All but one: "vae.1". */
static void start_units_but(const char *one)
{
    fflush(NULL);
    g_manager = fork();
    if (g_manager == 0) manage_units(one);
}

/* Those that ended well as well, as Wants= does. */
static void start_units_again(void)
{
    end(&g_manager, SIGTERM);
    start_units();
}

/* The board may say so a moment after the process has come back. */
static void wait_for_restart(const char *role, int index)
{
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (read_status() && instance(role, index) && instance(role, index)->restarts >= 1) return;
    fail_msg("%s.%d was not restarted", role, index);
}

static void wait_for_state(const char *state)
{
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (read_status() && !strcmp(g_status.state, state)) return;
    show_output();
    assert_state(state, 0);
}

/* With the units of all processes at work: what is given to one that is starting may come too early.
 * On a run that an earlier lgsup has left, which says "running" by itself, wait for "adopted" too. */
static void start_with_units(void)
{
    g_lgsup = LAUNCH("start", g_file, "--units", "job", "--set", "trainer.max_steps=100000");
    wait_for_state("running");
}

/* ---- lives ---- */

static void test_whole_run(void **state)
{
    (void)state;
    assert_exit(RUN("units", g_file), 0); /* into the run directory: in nobody's way there */
    assert_has(scratch_path("run/units/lgsup.service"), "Type=notify\n");
    start_units();
    assert_exit(RUN("start", g_file, "--units", "job"), 0);
    assert_state("done", 60);
    assert_int_equal(instance("vae", 1)->restarts, 0);
    assert_true(lg_path_exists(g_rt)); /* systemd's, not ours */
    assert_has(scratch_path("run/systemd"), "job\n");
    assert_has(scratch_path("run/logs/vae.1.log"), "ready after");
    assert_exit(RUN("verify", g_run), 0);
    /* The same units go on when there is more to do. */
    start_units_again();
    assert_exit(RUN("start", g_file, "--units", "job", "--set", "trainer.max_steps=80"), 0);
    assert_state("done", 80);
}

static void test_deaths(void **state)
{
    (void)state;
    static const struct {
        const char *role;
        int index;
    } victims[] = {{"loader", 0}, {"text", 1}, {"vae", 0},    {"trainer", 1},
                   {"ema", 0},    {"ckpt", 0}, {"keeper", 0}, {"trainer", 0}};
    start_units();
    start_with_units();
    for (size_t i = 0; i < LG_ARRAY_LEN(victims); i++) {
        wait_for_step(g_status.step + 3);
        kill_one(victims[i].role, victims[i].index);
    }
    wait_for_step(g_status.step + 3);
    for (size_t i = 0; i < LG_ARRAY_LEN(victims); i++)
        wait_for_restart(victims[i].role, victims[i].index);
    /* lgsup dies, and a rank that comes back without it; then the next lgsup. */
    kill_lgsup();
    kill_one("trainer", 0);
    wait_for_step(g_status.step + 5);
    start_with_units();
    wait_for_text(scratch_path("run/logs/lgsup.log"), "adopted ");
    wait_for_step(g_status.step + 5);
    assert_exit(RUN("stop", g_run), 0);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_state("stopped", 0);
    assert_exit(RUN("verify", g_run), 0);
}

/* lgsup and the keeper at once: the next lgsup takes the memory from the stages. */
static void test_salvage(void **state)
{
    (void)state;
    start_units();
    start_with_units();
    wait_for_step(5);
    kill_lgsup();
    kill_one("keeper", 0);
    start_with_units();
    wait_for_text(scratch_path("run/logs/lgsup.log"), "adopted 9 of 9 processes");
    wait_for_step(g_status.step + 5);
    kill_one("trainer", 1); /* whose memory only the new keeper can give */
    wait_for_step(g_status.step + 5);
    wait_for_state("running");
}

/* Memory is in nobody's hands: a new board; whoever waited on the old one comes to the new. */
static void test_lost_memory(void **state)
{
    (void)state;
    start_units();
    start_with_units();
    wait_for_step(25);
    kill_lgsup();
    kill(g_manager, SIGSTOP); /* nobody comes back yet */
    kill_one("keeper", 0);
    kill_one("trainer", 0);
    kill_one("trainer", 1);
    kill(g_manager, SIGCONT);
    g_lgsup = LAUNCH("start", g_file, "--units", "job", "--set", "trainer.max_steps=100000");
    wait_for_text(g_out, "starting again from the newest checkpoint");
    assert_has(g_out, "in nobody's hands");
    wait_for_state("running");
    wait_for_step(40);
}

static void test_crash_loop_parks(void **state)
{
    (void)state;
    assert_int_equal(lg_mkdirs(g_run), 0);
    scratch_write("run/fault", "trainer 0 crash");
    start_units();
    assert_exit(RUN("start", g_file, "--units", "job"), 11);
    assert_state("parked", 0);
    assert_non_null(strstr(g_status.cause, "trainer.0 died 4 times"));
    unlink(scratch_path("run/fault"));
    start_units_again();
    assert_exit(RUN("start", g_file, "--units", "job"), 0);
    assert_state("done", 60);
}

static void test_a_stage_parks_the_run(void **state)
{
    (void)state;
    assert_int_equal(lg_mkdirs(g_run), 0);
    scratch_write("run/fault", "trainer 1 park");
    start_units();
    assert_exit(RUN("start", g_file, "--units", "job"), 11);
    assert_state("parked", 0);
}

/* ---- systemctl ---- */

static bool is_restart(const lg_run *r)
{
    return lg_launcher_of(r)->is_restart(r->units);
}

static void test_restart_or_stop(void **state)
{
    (void)state;
    static const struct {
        const char *script;
        bool restart;
    } cases[] = {
        {"echo 7 jobsup.service restart running", true},
        {"echo 6 jobsup.service start waiting; echo 7 jobsup.service restart waiting", true},
        {"echo 7 jobsup.service stop running", false},
        {"echo 7 otherjobsup.service restart running", false},
        {"echo No jobs running.", false},
        {"echo restart", false},
        {"exit 0", false},
        {"exit 1", false},
    };
    static lg_run r = {.units = "job"}, by_hand;
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        write_systemctl(cases[i].script);
        if (is_restart(&r) != cases[i].restart) fail_msg("wrong: %s", cases[i].script);
    }
    write_systemctl("[ \"$*\" = 'list-jobs --plain --no-legend --full jobsup.service' ] && "
                    "echo 7 jobsup.service restart running");
    assert_true(is_restart(&r));
    assert_false(is_restart(&by_hand));                                       /* nobody is asked */
    write_systemctl("echo 7 jobsup.service restart running; exec sleep 100"); /* does not answer */
    g_patience_ms = 100;
    assert_false(is_restart(&r));
    g_patience_ms = 0;
    unlink(scratch_path("bin/systemctl"));
    assert_false(is_restart(&r));
}

/* `systemctl restart`: lgsup goes, training goes on, the next lgsup takes over. Then `systemctl
 * stop`. */
static void test_sigterm(void **state)
{
    (void)state;
    start_units();
    start_with_units();
    wait_for_step(3);
    write_systemctl("echo 7 jobsup.service restart running");
    kill(g_lgsup, SIGTERM);
    assert_exit(exit_of(g_lgsup), 0);
    assert_has(scratch_path("run/logs/lgsup.log"), "restarted by systemd");
    wait_for_step(g_status.step + 5);
    start_with_units();
    wait_for_text(scratch_path("run/logs/lgsup.log"), "adopted ");
    write_systemctl("echo 7 jobsup.service stop running");
    kill(g_lgsup, SIGTERM);
    int code = exit_of(g_lgsup);
    g_lgsup = 0;
    assert_exit(code, 0);
    assert_state("stopped", 0);
    assert_exit(RUN("verify", g_run), 0);
}

static void assert_no_stage(void)
{
    lg_board *b = NULL;
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    for (int r = 0; r < LG_ROLE_keeper; r++)
        for (int k = 0; k < LG_INSTANCES_MAX; k++)
            assert_false(lg_status_row_alive(lg_board_row(b, (lg_role)r, k)));
    lg_board_close(&b);
}

/* What a systemctl of TELLS says from now on, all of it at once. */
#define TELLS                                                                                      \
    "[ \"$*\" = 'list-jobs --plain --no-legend --full job-end.service' ] && "                      \
    "cat \"${0%/*}/jobs\" && exit; "                                                               \
    "[ \"$*\" = 'show --property=ActiveState --property=Job jobsup.service' ] && "                 \
    "cat \"${0%/*}/says\""
static void says(const char *text)
{
    char path[LG_PATH_BYTES];
    snprintf(path, sizeof path, "%s", scratch_path("bin/says"));
    assert_int_equal(lg_publish_file(path, text, strlen(text)), 0);
}

static void wait_for_holder(void)
{
    int pidfd = -1;
    for (int look = 0; look < LOOKS_MAX && pidfd < 0; look++, usleep(LOOK_US))
        pidfd = lg_run_holder(g_run, NULL);
    assert_true(pidfd >= 0);
    close(pidfd);
}

static void assert_lives(pid_t pid)
{
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
}

/* It lives some looks longer, and training goes on. */
static void assert_waits(pid_t pid)
{
    int64_t began_ns = lg_now_ns();
    wait_for_step(g_status.step + 5);
    while (lg_now_ns() - began_ns < 400 * LG_MS_NS) poll(NULL, 0, 20);
    assert_lives(pid);
}

static void test_what_systemd_intends(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        lg_units_intent intent;
    } cases[] = {
        {"ActiveState=active\n", LG_UNITS_UP},
        {"ActiveState=reloading\n", LG_UNITS_UP},
        {"ActiveState=activating\n", LG_UNITS_UP},
        {"Job=12\nActiveState=activating\n", LG_UNITS_UP},
        {"ActiveState=active\nJob=12\n", LG_UNITS_CHANGING},
        {"Job=12\nActiveState=inactive\n", LG_UNITS_CHANGING},
        {"ActiveState=failed\nJob=12\n", LG_UNITS_CHANGING},
        {"ActiveState=deactivating\n", LG_UNITS_CHANGING},
        {"ActiveState=inactive\n", LG_UNITS_DOWN},
        {"ActiveState=failed\nJob=\n", LG_UNITS_DOWN},
        {"Job=0\nActiveState=failed\n", LG_UNITS_DOWN},
        {"Failed to connect to bus\n", LG_UNITS_DOWN},
        {"", LG_UNITS_DOWN},
    };
    static lg_run r = {.units = "job"};
    write_systemctl(TELLS);
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        says(cases[i].text);
        if (lg_units_look_at_lgsup(&r) != cases[i].intent) fail_msg("wrong: %s", cases[i].text);
    }
    unlink(scratch_path("bin/systemctl"));
    assert_int_equal(lg_units_look_at_lgsup(&r), LG_UNITS_DOWN);
}

/* A stop that comes when lgsup has the run but not its loop yet. */
static void test_a_stop_at_once(void **state)
{
    (void)state;
    start_units();
    pid_t lgsup = LAUNCH("start", g_file, "--units", "job", "--set", "trainer.max_steps=100000");
    int pidfd;
    while ((pidfd = lg_run_holder(g_run, NULL)) < 0) assert_lives(lgsup);
    assert_int_equal(pidfd_send_signal(pidfd, SIGTERM, NULL, 0), 0);
    close(pidfd);
    assert_exit(exit_of(lgsup), 0);
    assert_state("stopped", 0);
}

/* A run that somebody ends in its place: lgsup waits, and can be told not to. */
static void test_start_after_the_end(void **state)
{
    (void)state;
    char line[64];
    int n = snprintf(line, sizeof line, "%d %llu\n", (int)getpid(),
                     (unsigned long long)lg_process_start_time((int)getpid()));
    start_units();
    start_with_units();
    assert_exit(RUN("stop", g_run), 0);
    assert_exit(exit_of(g_lgsup), 0);
    int lock = open(scratch_path("run/lock"), O_RDWR | O_CLOEXEC);
    assert_int_equal(flock(lock, LOCK_EX | LOCK_NB), 0);
    assert_int_equal(ftruncate(lock, 0), 0);
    assert_int_equal(pwrite(lock, line, (size_t)n, 0), n);
    g_lgsup = LAUNCH("start", g_file, "--units", "job", "--set", "trainer.max_steps=100000");
    pid_t other = LAUNCH("start", g_file, "--units", "job");
    pid_t alien = LAUNCH("start", g_file, "--units", "else");
    assert_exit(exit_of(alien), 7); /* of other units: told so at once */
    poll(NULL, 0, 500);
    assert_lives(g_lgsup);
    assert_lives(other);
    kill(other, SIGTERM);
    assert_exit(exit_of(other), 128 + SIGTERM);
    assert_int_equal(ftruncate(lock, 0), 0);
    assert_int_equal(flock(lock, LOCK_UN), 0); /* the children have it too */
    close(lock);
    start_units_again();
    wait_for_state("running");
}

/* lgsup's unit is stopped while it has no process: what its neighbour does then. */
static void test_the_end_without_lgsup(void **state)
{
    (void)state;
    assert_exit(RUN("stop", g_run, "--units", "job"), 0);
    assert_has(g_out, "it has never begun");
    start_units();
    start_with_units();
    wait_for_step(
        1); /* from here on everybody's memory has its second copy, and nobody needs lgsup */
    assert_exit(RUN("stop", g_run, "--units", "job"), 0);
    assert_has(g_out, "it is in the hands of lgsup");
    /* lgsup dies; systemd is going to start it again, does so, and it has the run. */
    kill_lgsup();
    unlink(g_out);
    says("ActiveState=activating");
    write_systemctl(TELLS);
    pid_t ender = LAUNCH("stop", g_run, "--units", "job");
    assert_waits(ender);
    says("ActiveState=inactive\nJob=7");
    assert_waits(ender);
    says("ActiveState=activating\nJob=7");
    start_with_units();
    assert_exit(exit_of(ender), 0);
    assert_has(g_out, "it is in the hands of lgsup");
    /* A restart; the next lgsup did not want to: that ends nothing. */
    kill_lgsup();
    says("ActiveState=failed");
    for (int i = 0; i < 2; i++) {
        scratch_write("bin/jobs", i ? "9 job-end.service start waiting\n"
                                    : "9 job-end.service restart running\n");
        unlink(g_out);
        assert_exit(RUN("stop", g_run, "--units", "job"), 0);
        assert_has(g_out, "started again, lgsup has ended");
        wait_for_step(g_status.step + 5);
    }
    /* A stop; lgsup dies before it has obeyed. */
    says("ActiveState=activating");
    start_with_units();
    wait_for_holder();
    says("ActiveState=active\nJob=8");
    ender = LAUNCH("stop", g_run, "--units", "job");
    assert_waits(ender);
    says("ActiveState=deactivating\nJob=8");
    assert_waits(ender);
    int keeper = instance("keeper", 0)->pid;
    kill_lgsup();
    assert_waits(ender);
    scratch_write("bin/jobs", "9 job-end.service stop running\n");
    says("ActiveState=failed");
    assert_exit(exit_of(ender), 0);
    assert_state("stopped", 0);
    assert_no_stage();
    assert_exit(RUN("verify", g_run), 0);
    assert_exit(RUN("stop", g_run, "--units", "job"), 0);
    assert_has(g_out, "nothing runs here");
    assert_int_equal(kill(keeper, 0), 0); /* is systemd's */
}

/* One that was started by hand is none of its business. */
static void test_the_end_of_others(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_state("running");
    wait_for_step(5);
    scratch_write("run/fault", "trainer 1 park");
    assert_exit(exit_of(g_lgsup), 11);
    assert_exit(RUN("stop", g_run, "--units", "job"), 0);
    assert_has(g_out, "it keeps its memory");
    assert_true(read_status() && g_status.memory_kept);
    unlink(scratch_path("run/fault"));
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_state("running");
    kill_lgsup();
    assert_exit(RUN("stop", g_run, "--units", "job"), 7);
    assert_has(g_out, "were not started by systemd");
    wait_for_step(g_status.step + 3);
}

/* A unit that nobody starts is asked for; that it cannot be had is said, with systemd's words. */
static void test_a_unit_that_nobody_starts(void **state)
{
    (void)state;
    write_systemctl("echo \"$*\" >>\"${0%/*}/asked\"; echo Unit not found.; exit 5");
    start_units_but("vae.1");
    g_lgsup = LAUNCH("start", g_file, "--units", "job", "--set", "trainer.max_steps=100000");
    wait_for_text(scratch_path("run/logs/lgsup.log"),
                  "job-vae@1.service is not running and cannot be started: Unit not found.");
    assert_has(scratch_path("bin/asked"), "start --no-block job-vae@1.service\n");
    assert_false(file_has(scratch_path("bin/asked"), "vae@0"));
    wait_for_step(3); /* the others go on */
    assert_exit(RUN("stop", g_run), 0);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
}

/* Whoever it is asked for, a systemctl that does not answer holds up nobody: a stop is obeyed meanwhile. */
static void test_systemctl_hangs(void **state)
{
    (void)state;
    enum { OBEYED_MS_MAX = 3000 };
    g_patience_ms = 3 * OBEYED_MS_MAX;
    write_systemctl("echo >>\"${0%/*}/asked\"; exec sleep 100");
    start_units_but("vae.1");
    g_lgsup = LAUNCH("start", g_file, "--units", "job", "--set", "trainer.max_steps=100000");
    g_patience_ms = 0;
    lg_board *b = NULL;
    for (int look = 0; look < LOOKS_MAX && !lg_path_exists(scratch_path("bin/asked")); look++)
        usleep(LOOK_US);
    assert_true(lg_path_exists(scratch_path("bin/asked"))); /* now it hangs */
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    int64_t start_ns = lg_now_ns(), limit_ns = OBEYED_MS_MAX * LG_MS_NS;
    pid_t stop = LAUNCH("stop", g_run);
    while (!atomic_load(&b->s->drain) && lg_now_ns() - start_ns < 2 * limit_ns) usleep(LOOK_US);
    int64_t took_ns = lg_now_ns() - start_ns;
    lg_board_close(&b);
    assert_exit(exit_of(stop), 0);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    if (took_ns > limit_ns) fail_msg("a stop was obeyed after %g s", (double)took_ns / LG_S_NS);
}

/* ---- sd_notify ---- */

struct heard {
    int ready, alive, stopping, steps;
    bool alive_after_ready;
};

static void hear(const char *text, struct heard *h)
{
    h->ready += strstr(text, "READY=1") != NULL;
    h->alive += strstr(text, "WATCHDOG=1") != NULL;
    h->stopping += strstr(text, "STOPPING=1") != NULL;
    h->steps += strstr(text, "STATUS=running: step ") != NULL;
    h->alive_after_ready |= h->ready && strstr(text, "WATCHDOG=1");
}

/* Until the process has ended. */
static void listen_to(int s, pid_t pid, struct heard *ret)
{
    struct timeval soon = {.tv_usec = 50000};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon);
    *ret = (struct heard){0};
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US)) {
        char text[512];
        bool gone = waitpid(pid, NULL, WNOHANG) == pid;
        for (ssize_t n; (n = recv(s, text, sizeof text - 1, 0)) > 0;) {
            text[n] = 0;
            hear(text, ret);
        }
        if (gone) return;
    }
    kill(pid, SIGKILL);
    fail_msg("lgsup is still there after %d looks", LOOKS_MAX);
}

static void test_what_systemd_hears(void **state)
{
    (void)state;
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%.90s", scratch_path("notify"));
    int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(s, (struct sockaddr *)&at, sizeof at), 0);
    setenv("NOTIFY_SOCKET", at.sun_path, 1);
    setenv("WATCHDOG_USEC", "200000", 1);
    pid_t pid = LAUNCH("start", g_file, "--set", "trainer.max_steps=600");
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    struct heard h;
    listen_to(s, pid, &h);
    close(s);
    assert_state("done", 600);
    assert_int_equal(h.ready, 1);
    assert_int_equal(h.stopping, 1);
    assert_true(h.alive >= 4 && h.alive_after_ready);
    assert_true(h.steps >= 1);
}

/* Either systemd starts what dies, or lgsup: never both. */
static void test_two_owners(void **state)
{
    (void)state;
    start_units();
    start_with_units();
    wait_for_step(3);
    kill_lgsup();
    assert_exit(RUN("start", g_file), 7);
    assert_has(g_out, "systemctl start jobsup");
    assert_exit(RUN("stop", g_run), 7);
    wait_for_step(g_status.step + 3); /* no harm done */
}

/* Fewer: whose unit it is. More: only where systemd starts them, which it does not for these. */
static void test_scale(void **state)
{
    (void)state;
    write_systemctl("echo \"$*\" >>\"${0%/*}/asked\"; echo Access denied; exit 4");
    start_units();
    start_with_units();
    wait_for_step(3);
    assert_exit(RUN("scale", "vae", "1", g_run), 0);
    assert_has(g_out, "vae: 1 ready");
    wait_for_text(scratch_path("bin/asked"), "stop --no-block job-vae@1.service\n");
    assert_false(file_has(scratch_path("bin/asked"), "vae@0"));
    assert_exit(RUN("scale", "vae", "3", g_run), 1);
    assert_has(g_out, "systemctl start job-vae@1.service: Access denied");
    assert_has(g_out, "as root run `systemctl start job-vae@{1..2}`, and scale again");
    assert_exit(RUN("swap", "vae", g_run), 2);
    assert_has(g_out, "systemctl restart 'job-vae@*'");
    wait_for_step(g_status.step + 3); /* no harm done */
    assert_int_equal(g_status.wanted[LG_ROLE_vae], 1);
}

static void test_needs_its_units(void **state)
{
    (void)state;
    assert_exit(RUN("start", g_file, "--units", "a-b"), 2);
    assert_exit(RUN("role", "vae", "64", g_run), 2);
    assert_exit(RUN("role", "vae", "", g_run), 2);
    assert_exit(RUN("role", "keeper", "0", g_run), 2);
    assert_exit(RUN("role", "vae", "0"), 2);
    assert_exit(RUN("role", "vae", "-1", g_run), 2);
    assert_exit(RUN("role", "vae", "1x", g_run), 2);
    assert_has(g_out, "an instance is a number from 0 to 63, not 1x");
    assert_exit(RUN("role", "baker", "0", g_run), 2);
    assert_has(g_out, "there is no role baker that stages have");
    assert_int_equal(chmod(g_rt, 0755), 0);
    assert_exit(RUN("start", g_file, "--units", "job"), 4);
    assert_has(g_out, "mode 0700");
    unsetenv("RUNTIME_DIRECTORY");
    assert_exit(RUN("start", g_file, "--units", "job"), 3);
    assert_exit(RUN("role", "vae", "0", g_run), 2);
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_whole_run),
        TEST(test_deaths),
        TEST(test_salvage),
        TEST(test_lost_memory),
        TEST(test_crash_loop_parks),
        TEST(test_a_stage_parks_the_run),
        TEST(test_restart_or_stop),
        TEST(test_sigterm),
        TEST(test_what_systemd_intends),
        TEST(test_a_stop_at_once),
        TEST(test_start_after_the_end),
        TEST(test_the_end_without_lgsup),
        TEST(test_the_end_of_others),
        TEST(test_a_unit_that_nobody_starts),
        TEST(test_systemctl_hangs),
        TEST(test_what_systemd_hears),
        TEST(test_two_owners),
        TEST(test_scale),
        TEST(test_needs_its_units),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
