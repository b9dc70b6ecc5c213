/* What lgsup shows on a terminal: the line of progress, and the screen of `lgsup top` with all it reads
 * of a run. The run is a directory with a board, a keeper and a window; its one process is this one. */
#include "base/check.h"
#include "base/clock.h"
#include "shm/keeper.h"
#include "shm/region.h"
#include "supervisor/run/terminal.h"
#include "supervisor/views/progress.h"
#include "supervisor/views/top.h"
#include "supervisor/views/view.h"
#include "tests/unit/run_fixture.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { WAIT_MS_MAX = 20000 };

static lg_run r;
static lg_board *b;
static pid_t g_keeper;
static char g_socket[LG_PATH_BYTES];

static int setup(void **state)
{
    (void)state;
    struct lg_board_spec spec = {.plan = &r.plan, .max_steps = 60};
    unsetenv("XDG_RUNTIME_DIR");
    run_fixture_make(&r, "");
    assert_int_equal(lg_run_runtime_create(&r), 0);
    assert_int_equal(lg_board_create(scratch_path("run/board"), &spec, &b), 0);
    assert_int_equal(lg_path(g_socket, "%s/keeper", r.runtime_dir), 0);
    atomic_store(&b->s->run_state, LG_RUN_RUNNING);
    shm_fixture_join(b, LG_ROLE_vae, 1);
    g_keeper = 0;
    return 0;
}

static void end_keeper(void)
{
    if (!g_keeper) return;
    kill(g_keeper, SIGKILL);
    waitpid(g_keeper, NULL, 0);
    g_keeper = 0;
}

static int teardown(void **state)
{
    (void)state;
    end_keeper();
    lg_board_close(&b);
    run_fixture_close(&r);
    return 0;
}

static void start_keeper(void)
{
    int ready[2];
    char byte;
    assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
    g_keeper = fork();
    if (g_keeper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        scratch_exit(lg_keeper_serve(g_socket, ready[1]) < 0);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
}

/* ---- a program on a terminal ---- */

struct terminal {
    pid_t pid;
    int fd;
    char text[1 << 17]; /* all that it has shown */
    size_t n;
};
static struct terminal g_terminal;

/* Reads for a moment. False: the program has ended. */
static bool look(void)
{
    struct terminal *t = &g_terminal;
    struct pollfd p = {.fd = t->fd, .events = POLLIN};
    if (poll(&p, 1, 20) <= 0) return true;
    ssize_t got = read(t->fd, t->text + t->n, sizeof t->text - 1 - t->n);
    if (got <= 0) return false; /* EIO: nobody has it open any more */
    t->n += (size_t)got;
    t->text[t->n] = 0;
    return true;
}

static void wait_for_text(const char *part)
{
    int64_t end = lg_now_ns() + WAIT_MS_MAX * LG_MS_NS;
    bool lives = true;
    while (lives && lg_now_ns() < end && !strstr(g_terminal.text, part)) lives = look();
    if (!strstr(g_terminal.text, part))
        fail_msg("\"%s\" is not on the terminal:\n%s", part, g_terminal.text);
}

/* Waits for its end: exit code, 128 + n by a signal. */
static int end_of_terminal(void)
{
    int status = 0;
    int64_t end = lg_now_ns() + WAIT_MS_MAX * LG_MS_NS;
    bool open = true;
    while (waitpid(g_terminal.pid, &status, WNOHANG) == 0) {
        if (lg_now_ns() > end) {
            kill(g_terminal.pid, SIGKILL);
            fail_msg("it does not end; it has shown:\n%s", g_terminal.text);
        }
        if (open)
            open = look();
        else
            usleep(1000);
    }
    while (open && look() &&
           poll(&(struct pollfd){.fd = g_terminal.fd, .events = POLLIN}, 1, 0) > 0)
        continue;
    close(g_terminal.fd);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void on_terminal(int columns, int rows, int (*run)(void))
{
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    g_terminal.n = 0;
    g_terminal.text[0] = 0;
    fflush(NULL);
    g_terminal.pid = forkpty(&g_terminal.fd, NULL, NULL, &size);
    assert_true(g_terminal.pid >= 0);
    if (g_terminal.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int rc = run();
        if (rc < 0) printf("error: %s\n", lg_err_message());
        fflush(NULL);
        scratch_exit(-rc);
    }
}

/* ---- lgsup top ---- */

static int top(void)
{
    return lg_top(r.dir, false, NULL);
}

static void test_keys_end_the_screen(void **state)
{
    (void)state;
    static const char *const keys[] = {"q", "Q", "\033"};
    setenv("TERM", "xterm", 1);
    for (size_t i = 0; i < LG_ARRAY_LEN(keys); i++) {
        on_terminal(140, 40, top);
        wait_for_text("last beat");
        assert_int_equal(write(g_terminal.fd, "x", 1), 1); /* any other is none */
        assert_int_equal(write(g_terminal.fd, keys[i], strlen(keys[i])), (int)strlen(keys[i]));
        assert_int_equal(end_of_terminal(), 0);
        assert_non_null(strstr(g_terminal.text, "fake: running"));
        assert_non_null(strstr(g_terminal.text, "vae.1"));
    }
}

/* Two hosts, of which this is the first. */
static int g_chosen;

static void read_hosts(void *context, const struct lg_top_look *look)
{
    (void)context, (void)look;
}

static int list_hosts(void *context, lg_top_line *line)
{
    (void)context;
    for (int i = 0; i < 2; i++)
        snprintf(line[i], LG_TOP_LINE_BYTES, "%s host %d", i == g_chosen ? ">" : " ", i);
    return 2;
}

static int frame_of_host(void *context, lg_top_line *line, int room)
{
    (void)context;
    assert_true(room > 1);
    snprintf(line[0], LG_TOP_LINE_BYTES, "what the other one shows");
    return g_chosen ? 1 : -1;
}

static bool next_host(void *context)
{
    (void)context;
    g_chosen = !g_chosen;
    return g_chosen;
}

static const struct lg_top_hosts hosts = {NULL, read_hosts, list_hosts, frame_of_host, next_host};

static int top_of_hosts(void)
{
    return lg_top(r.dir, false, &hosts);
}

static int top_of_hosts_once(void)
{
    return lg_top(r.dir, true, &hosts);
}

/* The tab key shows the next host, and after the last one the first again; as text all are shown. */
static void test_hosts_on_the_screen(void **state)
{
    (void)state;
    setenv("TERM", "xterm", 1);
    on_terminal(140, 40, top_of_hosts);
    wait_for_text("> host 0");
    wait_for_text("last beat");
    assert_null(strstr(g_terminal.text, "what the other one shows"));
    assert_int_equal(write(g_terminal.fd, "\t", 1), 1);
    wait_for_text("what the other one shows");
    const size_t before = g_terminal.n;
    assert_int_equal(write(g_terminal.fd, "\t", 1), 1);
    for (int i = 0; i < 500 && !strstr(g_terminal.text + before, "last beat"); i++) look();
    assert_non_null(strstr(g_terminal.text + before, "last beat"));
    assert_int_equal(write(g_terminal.fd, "q", 1), 1);
    assert_int_equal(end_of_terminal(), 0);
    on_terminal(140, 40, top_of_hosts_once);
    assert_int_equal(end_of_terminal(), 0);
    assert_non_null(strstr(g_terminal.text, "> host 1"));
    assert_non_null(strstr(g_terminal.text, "last beat"));
    assert_non_null(strstr(g_terminal.text, "what the other one shows"));
}

/* Lines are cut to the terminal, and a larger one shows more at once. */
static void test_a_small_terminal(void **state)
{
    (void)state;
    setenv("TERM", "xterm", 1);
    on_terminal(20, 3, top);
    wait_for_text("lgsup top  fake: run");
    assert_null(strstr(g_terminal.text, "running"));
    struct winsize size = {.ws_row = 40, .ws_col = 140};
    assert_int_equal(ioctl(g_terminal.fd, TIOCSWINSZ, &size), 0);
    wait_for_text("fake: running");
    wait_for_text("last beat");
    assert_int_equal(write(g_terminal.fd, "q", 1), 1);
    assert_int_equal(end_of_terminal(), 0);
}

static void test_an_unknown_terminal(void **state)
{
    (void)state;
    setenv("TERM", "no-such-terminal", 1);
    on_terminal(80, 25, top);
    assert_int_equal(end_of_terminal(), -LG_ERR_FAILED);
    assert_non_null(strstr(g_terminal.text, "the terminal no-such-terminal is not known"));
    unsetenv("TERM");
    on_terminal(80, 25, top);
    assert_int_equal(end_of_terminal(), -LG_ERR_FAILED);
    assert_non_null(strstr(g_terminal.text, "(no TERM)"));
    setenv("TERM", "xterm", 1);
}

/* The directory goes while somebody looks: the terminal is given back, then the reason is said. */
static void test_the_run_goes_away(void **state)
{
    (void)state;
    setenv("TERM", "xterm", 1);
    on_terminal(140, 40, top);
    wait_for_text("last beat");
    rename(r.dir, scratch_path("elsewhere"));
    assert_int_equal(end_of_terminal(), -LG_ERR_NOTFOUND);
    const char *left = strstr(g_terminal.text, "\033[?1049l"), *said;
    assert_non_null(left);
    said = strstr(left, "is not a run directory");
    assert_non_null(said);
    rename(scratch_path("elsewhere"), r.dir);
}

/* ---- what it reads ---- */

static struct lg_top *read_top(struct lg_top *t)
{
    if (!t) t = calloc(1, sizeof *t);
    assert_non_null(t);
    snprintf(t->dir, sizeof t->dir, "%s", r.dir);
    assert_int_equal(lg_top_read(t), 0);
    return t;
}

static void free_top(struct lg_top *t)
{
    lg_top_close(t);
    free(t);
}

static void test_processes(void **state)
{
    (void)state;
    struct lg_top *t = read_top(NULL);
    int row = lg_row(LG_ROLE_vae, 1);
    assert_true(t->has_board);
    assert_int_equal(t->process[row].n_points, 1);
    assert_true(t->process[row].private_bytes > 0 && t->process[row].shared_bytes > 0);
    for (int i = 0; i < 2 * LG_TOP_POINTS; i++) {
        atomic_store(&lg_board_row(b, LG_ROLE_vae, 1)->samples, (uint64_t)i);
        read_top(t);
    }
    assert_int_equal(t->process[row].n_points, LG_TOP_POINTS); /* the newest */
    assert_int_equal(t->process[row].point[0].samples, LG_TOP_POINTS);
    assert_int_equal(t->process[row].point[LG_TOP_POINTS - 1].samples, 2 * LG_TOP_POINTS - 1);
    lg_board_bury(b, lg_board_life(b, LG_ROLE_vae, 1, NULL));
    shm_fixture_join(b, LG_ROLE_vae, 1); /* another process: its counters begin anew */
    read_top(t);
    assert_int_equal(t->process[row].n_points, 1);
    atomic_fetch_add(&lg_board_row(b, LG_ROLE_vae, 1)->start_time, 1); /* a reused pid */
    read_top(t);
    assert_int_equal(t->process[row].n_points, 0);
    assert_true(t->process[row].private_bytes == 0);
    unlink(scratch_path("run/board"));
    scratch_write("run/status.json", "{\"format\": 1}");
    read_top(t);
    assert_false(t->has_board);
    free_top(t);
}

static struct lg_region_spec region_spec(const char *name, size_t bytes, uint64_t run_id)
{
    return (struct lg_region_spec){.keeper = g_socket,
                                   .name = name,
                                   .bytes = bytes,
                                   .plan_hash = r.plan.hash,
                                   .run_id = run_id};
}

static void make_region(const char *name, size_t bytes, uint64_t run_id)
{
    lg_region *region = NULL;
    struct lg_region_spec spec = region_spec(name, bytes, run_id);
    assert_int_equal(lg_region_open(&spec, &region), 0);
    lg_region_close(&region);
}

static void test_window(void **state)
{
    (void)state;
    struct lg_region_spec spec = region_spec("", 0, b->s->preamble.run_id);
    struct lg_window_geometry g;
    struct lg_window_places nowhere = {0};
    lg_window *w = NULL;
    struct lg_top *t = read_top(NULL);
    assert_null(t->slot); /* no keeper */
    start_keeper();
    make_region("other", 100, b->s->preamble.run_id);
    read_top(t);
    assert_null(t->slot); /* no window yet: looked for again at the next reading */
    assert_int_equal(t->n_regions, 1);
    lg_window_geometry_of(&r.plan, &g);
    assert_int_equal(lg_window_open(&spec, &g, &nowhere, &w), 0);
    read_top(t);
    assert_non_null(t->slot);
    assert_int_equal(t->n_regions, 6);
    assert_int_equal(t->ready[LG_FIELD_LATENT], 0);
    uint64_t first = lg_window_first(b);
    for (uint64_t n = first; n < first + 3; n++)
        atomic_store(&lg_window_slot(w, n)->ready[LG_FIELD_LATENT], n + 1);
    read_top(t);
    assert_int_equal(t->ready[LG_FIELD_LATENT], 3);
    assert_int_equal(t->ready[LG_FIELD_TEXT], 0);
    end_keeper(); /* what is mapped stays */
    read_top(t);
    assert_int_equal(t->ready[LG_FIELD_LATENT], 3);
    scratch_write("run/runtime", "/nowhere"); /* the run is over */
    read_top(t);
    assert_null(t->slot);
    lg_window_close(&w);
    free_top(t);
}

/* What calls itself the window is looked at before it is believed. */
static void test_window_of_others(void **state)
{
    (void)state;
    struct lg_window_geometry g;
    lg_window_geometry_of(&r.plan, &g);
    start_keeper();
    make_region("window/0/control", g.slots * sizeof(struct lg_slot), b->s->preamble.run_id + 1);
    struct lg_top *t = read_top(NULL);
    assert_null(t->slot); /* another run's */
    lg_keeper_drop(g_socket, "window/0/control");
    make_region("window/0/control", 8, b->s->preamble.run_id);
    read_top(t);
    assert_null(t->slot); /* too small */
    lg_keeper_drop(g_socket, "window/0/control");
    int fd = memfd_create("lg-test", MFD_CLOEXEC);
    size_t bytes = LG_PAGE_BYTES + g.slots * sizeof(struct lg_slot);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(lg_keeper_put(g_socket, "window/0/control", bytes, fd), 0);
    read_top(t);
    assert_null(t->slot); /* of another layout */
    close(fd);
    free_top(t);
}

/* The newest events, without the figures that are repeated. */
static void test_events(void **state)
{
    (void)state;
    char text[8192];
    size_t at = 0;
    struct lg_top *t = read_top(NULL);
    assert_int_equal(t->n_events, 0); /* no log */
    for (int i = 0; i < LG_TOP_EVENTS + 3; i++)
        at += (size_t)snprintf(text + at, sizeof text - at,
                               "2026-01-01T00:00:00.000Z warn  lgsup step 1 event %d\n"
                               "2026-01-01T00:00:00.000Z info  lgsup step 1/2  loss 1  2 samples/s "
                               " ETA\n2026-01-01T00:00:00.000Z info  lgsup step 1/2 | vae 1\n"
                               "    at somewhere (a.c:1)\nshort\n"
                               "a line of a library that has no stamp\n",
                               i);
    scratch_write("run/logs/lgsup.log", text);
    read_top(t);
    assert_int_equal(t->n_events, LG_TOP_EVENTS);
    assert_non_null(strstr(t->event[0], "event 3"));
    assert_non_null(strstr(t->event[LG_TOP_EVENTS - 1], "event 10"));
    free_top(t);
}

/* ---- the line of progress ---- */

static struct lg_view view;
static lg_progress p;
static lg_worker *disk;

static void commit(uint64_t step)
{
    atomic_store(&lg_board_row(b, LG_ROLE_trainer, 0)->commit, lg_mark_of(step));
}

static void begin_progress(void)
{
    struct lg_worker_spec spec = {.name = "disk", .jobs_max = 16, .wake_fd = -1};
    view = (struct lg_view){.run = &r, .board = b};
    view.role[LG_ROLE_vae].all = 2;
    view.role[LG_ROLE_vae].well = 1;
    view.role[LG_ROLE_ema].all = view.role[LG_ROLE_ema].well = 1;
    assert_int_equal(lg_worker_open(&spec, &disk), 0);
    lg_progress_open(&p, &(struct lg_progress_spec){.run_dir = r.dir, .disk = disk});
}

static int progress(void)
{
    begin_progress();
    lg_progress_show(&p, &view);
    lg_progress_say(&p, LG_WARN, "something");
    while (!lg_terminal_is_idle()) usleep(100);
    p.next_ns = 0;
    lg_progress_show(&p, &view);
    lg_progress_last(&p, &view);
    lg_progress_close(&p);
    bool all = lg_worker_close(&disk, 10000);
    return lg_terminal_finish() && all ? 0 : 1;
}

/* The line is cut to the terminal and goes before an event is written. */
static void test_progress_on_a_terminal(void **state)
{
    (void)state;
    on_terminal(19, 5, progress);
    assert_int_equal(end_of_terminal(), 0);
    const char *t = g_terminal.text;
    assert_non_null(strstr(t, "\rstep 0/60 | vae 1/\033[K"));
    assert_non_null(strstr(t, "\r\033[Kwarning: something\r\n\rstep 0/60"));
    assert_string_equal(t + g_terminal.n - 2, "\r\n");
    on_terminal(0, 0, progress); /* one that does not say how wide it is */
    assert_int_equal(end_of_terminal(), 0);
    assert_non_null(strstr(g_terminal.text, "\rstep 0/60 | vae 1/2 ema ok\033[K"));
}

/* The whole lines of lgsup's log; *ret_last: the last of them. */
static int count_logged(const char **ret_last)
{
    static char *text;
    size_t bytes;
    int n = 0;
    free(text);
    assert_int_equal(lg_read_file(scratch_path("run/logs/lgsup.log"), 1 << 20, &text, &bytes), 0);
    *ret_last = "";
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        *ret_last = line;
        n++;
    }
    return n;
}

static void assert_logged(const char *part)
{
    const char *last;
    int before = count_logged(&last);
    p.quiet = true;
    p.next_log_ns = 0;
    lg_progress_show(&p, &view);
    /* The disk's worker writes it. */
    for (int i = 0; i < 1000 && count_logged(&last) == before; i++) poll(NULL, 0, 5);
    if (!strstr(last, part)) fail_msg("\"%s\" lacks \"%s\"", last, part);
}

/* Speed over the last while, the time that is left, the share of waiting: told from the board. */
static void test_figures(void **state)
{
    (void)state;
    static const struct {
        uint64_t max;
        const char *eta;
    } left[] = {{30, "ETA 10s"},
                {260, "ETA 4m00s"},
                {7220, "ETA 2h00m"},
                {10, "ETA 0s"},
                {UINT64_C(40000000), "ETA -"}};
    begin_progress();
    assert_logged("step 0/60 |"); /* no speed is known */
    commit(20);
    for (size_t i = 0; i < LG_ARRAY_LEN(left); i++) {
        p.n_points = 1;
        p.point[0].ns = lg_now_ns() - 20 * LG_S_NS; /* a step a second */
        p.point[0].step = 0;
        b->s->max_steps = left[i].max;
        assert_logged(left[i].eta);
    }
    atomic_store(&b->s->metrics.step, 20);
    atomic_store(&b->s->metrics.samples_per_s, 0.0); /* not known: does not count */
    assert_logged("data wait 0%");
    atomic_store(&b->s->metrics.samples_per_s, (double)b->s->batch);
    atomic_store(&b->s->metrics.data_wait_s, 0.5);
    assert_logged("data wait 50%"); /* the first counts as it is */
    assert_logged("data wait 50%"); /* the same step counts once */
    atomic_store(&b->s->metrics.step, 21);
    atomic_store(&b->s->metrics.data_wait_s, 7.0); /* longer than the step: all of it */
    assert_logged("data wait 55%");
    for (int i = 0; i < 2 * LG_RATE_POINTS; i++) { /* a bounded memory of the past */
        p.point[p.n_points - 1].ns -= 2 * LG_S_NS;
        assert_logged("step 20/");
    }
    assert_int_equal(p.n_points, LG_RATE_POINTS);
    lg_progress_close(&p);
    lg_progress_say(&p, LG_INFO, "nobody hears this"); /* no log: no harm */
    lg_progress_close(&p);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(t) cmocka_unit_test_setup_teardown(t, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_hosts_on_the_screen),
        TEST(test_keys_end_the_screen),
        TEST(test_a_small_terminal),
        TEST(test_an_unknown_terminal),
        TEST(test_the_run_goes_away),
        TEST(test_processes),
        TEST(test_window),
        TEST(test_window_of_others),
        TEST(test_events),
        TEST(test_progress_on_a_terminal),
        TEST(test_figures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
