/* What is shown of a run: `lgsup top`, `lgsup status --json` and its schema, previews. */
#include "base/clock.h"
#include "base/fs.h"
#include "supervisor/commands/cli.h"
#include "supervisor/views/tensorboard.h"
#include "tests/unit/scratch.h"
#include "tests/unit/status_schema.h"
#include "tests/unit/supervise_fixture.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pty.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* On a terminal: the screen comes, and goes at the key q. */
static void assert_top_on_a_terminal(void)
{
    char text[65536];
    size_t n = 0;
    int fd, status = -1;
    bool shown = false;
    setenv("TERM", "xterm", 1);
    struct winsize size = {.ws_row = 40, .ws_col = 140};
    pid_t pid = forkpty(&fd, NULL, NULL, &size);
    if (pid == 0) {
        char *argv[] = {(char *)"lgsup", (char *)"top", g_run, NULL};
        scratch_exit(lg_cli_main(3, argv));
    }
    assert_true(pid > 0);
    /* By the clock: a terminal that was hung up is ready at every look. */
    for (int64_t end = lg_now_ns() + 60 * LG_S_NS; lg_now_ns() < end;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t got = poll(&p, 1, LOOK_US / 1000) > 0 ? read(fd, text + n, sizeof text - 1 - n) : 0;
        n += (size_t)LG_MAX(got, 0);
        text[n] = 0;
        if (!shown && strstr(text, "fake: running") && strstr(text, "last beat")) {
            shown = true;
            assert_int_equal(write(fd, "q", 1), 1);
        }
        if (waitpid(pid, &status, WNOHANG) == pid) break;
    }
    close(fd);
    assert_true(shown);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_top(void **state)
{
    (void)state;
    assert_exit(RUN("top", g_run), 8);
    assert_output("is not a run directory");
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready"); /* the screen is not rewritten as a whole */
    assert_top_on_a_terminal();
    kill_one("vae", 1);
    wait_for_output("vae.1: signal 9");
    wait_for_log("vae.1: signal 9");
    scratch_kill(g_lgsup);
    g_lgsup = 0;
    unlink(g_out);
    assert_exit(RUN("top", "--once", g_run), 0); /* lgsup is dead */
    assert_output("fake: running");
    assert_output("lgsup.0            -  dead");
    assert_output("vae.1: signal 9 (Killed); restarted"); /* the newest event */
    assert_output("regions 88 B (11)");
    assert_exit(RUN("stop", g_run), 0);
    unlink(g_out);
    assert_exit(RUN("top", g_run), 0); /* no terminal */
    assert_output("fake: stopped");
}

static cJSON *load_json(const char *path)
{
    char *text;
    size_t bytes;
    assert_int_equal(lg_read_file(path, 1 << 20, &text, &bytes), 0);
    cJSON *j = cJSON_Parse(text);
    assert_non_null(j);
    free(text);
    return j;
}

/* What the command prints now; the caller deletes it. */
static cJSON *assert_status_follows_schema(void)
{
    unlink(g_out);
    assert_exit(RUN("status", "--json", g_run), 0);
    cJSON *j = load_json(g_out);
    if (!status_follows_schema(j)) {
        show_output();
        fail();
    }
    return j;
}

static void test_status_follows_its_schema(void **state)
{
    (void)state;
    scratch_write("run/fault", "text 0 unready");
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(3);
    cJSON *j = assert_status_follows_schema(); /* one is in its setup */
    assert_string_equal(cJSON_GetObjectItem(j, "state")->valuestring, "starting");
    cJSON_Delete(j);
    scratch_kill(g_lgsup);
    g_lgsup = 0;
    kill_one("vae", 1);
    usleep(100000);
    j = assert_status_follows_schema(); /* two are dead */
    status_schema_is_strict(j);
    cJSON_Delete(j);
    assert_exit(RUN("stop", g_run), 0);
    cJSON_Delete(assert_status_follows_schema());
    j = load_json(scratch_path("run/status.json"));
    assert_true(status_follows_schema(j));
    cJSON_Delete(j);
    unlink(scratch_path("run/board")); /* as after a restart of the machine */
    cJSON_Delete(assert_status_follows_schema());
}

static bool has_preview(int step)
{
    char name[64];
    snprintf(name, sizeof name, "run/samples/step%d.png", step);
    return lg_path_exists(scratch_path(name));
}

static void wait_for_preview(int step)
{
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (has_preview(step)) return;
    show_output();
    fail_msg("no preview of step %d", step);
}

/* The first step from `from` on, in strides of 40, that gets a preview. A checkpoint is left out while
 * the one before it is still written, so which ones there are depends on the machine. */
static int wait_for_a_preview(int from)
{
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        for (int s = from; s < from + 40 * 200; s += 40)
            if (has_preview(s)) return s;
    show_output();
    fail_msg("no preview from step %d on", from);
    return 0;
}

static void test_previews(void **state)
{
    (void)state;
    char text[64], name[64];
    assert_exit(RUN("start", g_file, "--set", "sample.every=30"), 3);
    assert_output("sample.every = 30 is not a multiple of checkpoint.every = 20");
    g_lgsup = LAUNCH("start", g_file, "--set", "sample.every=40", "--set", "checkpoint.keep=100000",
                     "--set", "trainer.max_steps=100000");
    int first = wait_for_a_preview(40);
    wait_for_a_preview(first + 40);
    end_by_stop();
    for (int s = 20; s < 2000; s += 40) assert_false(has_preview(s));
    snprintf(text, sizeof text, "preview of step %d drawn", first);
    assert_output(text);
    snprintf(name, sizeof name, "run/samples/step%d.png", first);
    unlink(scratch_path(name)); /* as if its drawing had been cut off */
    g_lgsup = LAUNCH("start", g_file, "--set", "sample.every=40", "--set", "checkpoint.keep=100000",
                     "--set", "trainer.max_steps=100000");
    wait_for_preview(first);
    end_by_stop();
}

/* What training was too quick for is drawn at the end. */
static void test_previews_at_the_end(void **state)
{
    (void)state;
    assert_exit(RUN("start", g_file, "--set", "sample.every=20"), 0);
    assert_true(has_preview(20) && has_preview(60));
    assert_true(has_preview(40) ==
                lg_path_exists(scratch_path("run/checkpoints/fake_step40/manifest.json")));
    struct stat before, after; /* and only once */
    assert_int_equal(stat(scratch_path("run/samples/step20.png"), &before), 0);
    assert_exit(RUN("start", g_file, "--set", "sample.every=20", "--set", "trainer.max_steps=80"),
                0);
    assert_int_equal(stat(scratch_path("run/samples/step20.png"), &after), 0);
    assert_true(before.st_ino == after.st_ino);
    assert_true(has_preview(80));
}

static void test_previews_that_fail(void **state)
{
    (void)state;
    scratch_write("run/sample_fault", "crash");
    g_lgsup = LAUNCH("start", g_file, "--set", "sample.every=20", "--set",
                     "trainer.max_steps=100000", "--set", "checkpoint.keep=100000");
    wait_for_output("preview of step 20: lg-sample: exit 5 CORRUPT: a lens is missing");
    wait_for_output("sample.log); drawn again");
    wait_for_output("sample.log); given up");
    scratch_write("run/sample_fault", "hang"); /* neither does a hanging one keep the run */
    wait_for_step(g_status.step + 5);
    usleep(2500000);
    end_by_stop();
    assert_false(has_preview(20));
    unlink(scratch_path("run/sample_fault")); /* the next start tries again */
    g_lgsup = LAUNCH("start", g_file, "--set", "sample.every=20", "--set",
                     "trainer.max_steps=100000", "--set", "checkpoint.keep=100000");
    wait_for_preview(20);
    end_by_stop();
}

/* While training goes on, and at the end what it was too quick for; without captions, too. */
static void test_histograms(void **state)
{
    (void)state;
    char name[64];
    static lg_tensorboard t;
    assert_exit(RUN("start", g_file, "--set", "tensorboard.enabled=true", "--set",
                    "tensorboard.histograms_every=20", "--set", "sample.captions=[]"),
                0);
    for (int step = 20; step <= 60; step += 20) {
        snprintf(name, sizeof name, "run/checkpoints/fake_step%d/manifest.json", step);
        bool is = lg_path_exists(scratch_path(name));
        snprintf(name, sizeof name, "run/histograms/step%d.json", step);
        assert_true(lg_path_exists(scratch_path(name)) == is);
    }
    assert_true(lg_path_exists(scratch_path("run/histograms/step60.json")));
    assert_false(has_preview(60));
    assert_int_equal(lg_tensorboard_open(g_run, 60, &t), 0);
    assert_int_equal(t.last_histogram, 60);
    lg_tensorboard_close(&t);
}

/* A port of ours that nobody else can have. */
static int take_port(int *ret_fd)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    *ret_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(*ret_fd, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(*ret_fd, 1), 0);
    assert_int_equal(getsockname(*ret_fd, (struct sockaddr *)&at, &bytes), 0);
    return ntohs(at.sin_port);
}

/* What watches a run never keeps it from training. */
static void test_extras_that_fail(void **state)
{
    (void)state;
    char set[64];
    int fd;
    snprintf(set, sizeof set, "supervisor.prometheus_port=%d", take_port(&fd));
    scratch_write("run/tensorboard", "in the way");
    assert_exit(RUN("start", g_file, "--set", set, "--set", "tensorboard.enabled=true"), 0);
    assert_output("warning: no event files for TensorBoard: ");
    assert_output("warning: no figures for Prometheus: cannot listen at 127.0.0.1:");
    assert_state("done", 60);
    close(fd);
    unlink(scratch_path("run/tensorboard"));
    unlink(g_out);
    assert_exit(RUN("start", g_file, "--set", set, "--set", "tensorboard.enabled=true", "--set",
                    "trainer.max_steps=80"),
                0);
    assert_false(output_has("no figures") || output_has("no event files"));
    assert_true(lg_path_exists(scratch_path("run/tensorboard/events.out.tfevents.0000000001.lg")));
}

/* The run is done: pictures that do not come to an end are given up at an interrupt. */
static void test_drawing_is_interrupted(void **state)
{
    (void)state;
    scratch_write("run/sample_fault", "hang");
    g_lgsup = LAUNCH("start", g_file);
    wait_for_output("drawing 1 pictures");
    kill(g_lgsup, SIGINT);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_output("warning: no pictures of step 60: lg-sample: signal 9 (Killed)");
    assert_state("done", 60);
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        LGSUP_TEST(test_top),
        LGSUP_TEST(test_status_follows_its_schema),
        LGSUP_TEST(test_previews),
        LGSUP_TEST(test_previews_at_the_end),
        LGSUP_TEST(test_previews_that_fail),
        LGSUP_TEST(test_histograms),
        LGSUP_TEST(test_extras_that_fail),
        LGSUP_TEST(test_drawing_is_interrupted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
