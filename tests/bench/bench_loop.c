/* How soon lgsup acts, whatever hangs. A run of CONFIG is supervised
 *
 *   idle      with a terminal that takes everything and an idle disk
 *   terminal  with a full pipe that nobody reads as its terminal
 *   disk      on a disk on which every write and sync of lgsup takes a second (tests/stub/stall.c)
 *
 * and in each case it is measured, as percentiles:
 *
 *   restart   SIGKILL of a stage -> its replacement is enlisted on the board, which comes right before
 *             its exec
 *   answer    a message to lgsup -> its answer is there
 *   drain     the message of `lgsup stop` -> the word that makes the ranks stop is on the board (once a
 *             run, so the largest of RUNS)
 *
 * Prints JSON lines. Usage: bench_loop BUILD CONFIG DIR [kills per run] */
#include "base/clock.h"
#include "bus/control.h"
#include "shm/board.h"
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RUNS = 3, SAMPLES_MAX = 4096, WAIT_S = 60, ASK_MS = 20000 };

static const char *const cases[] = {"idle", "terminal", "disk"};
enum { IDLE, TERMINAL, DISK, CASES };

struct figures {
    double ms[SAMPLES_MAX];
    int n;
};

struct run {
    char dir[LG_PATH_BYTES], stall[LG_PATH_BYTES], runtime[LG_PATH_BYTES];
    const char *build, *config;
    int which, pipe_fd;
    pid_t pid;
    lg_board *board;
};

static void nap_us(long us)
{
    nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL);
}

static void add(struct figures *f, int64_t since_ns)
{
    if (f->n < SAMPLES_MAX) f->ms[f->n++] = (double)(lg_now_ns() - since_ns) / LG_MS_NS;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void print(const char *what, const char *name, struct figures *f)
{
    if (f->n == 0) return;
    qsort(f->ms, (size_t)f->n, sizeof f->ms[0], by_value);
    printf("{\"bench\": \"loop\", \"case\": \"%s\", \"what\": \"%s\", \"samples\": %d, "
           "\"p50_ms\": %.2f, \"p99_ms\": %.2f, \"max_ms\": %.2f}\n",
           name, what, f->n, f->ms[f->n / 2], f->ms[(f->n * 99) / 100], f->ms[f->n - 1]);
    fflush(stdout);
}

/* stdout and stderr of lgsup. */
static void set_terminal(int which, int pipe_fd)
{
    char zeros[4096] = {0};
    int fd = which == TERMINAL ? pipe_fd : open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (which == TERMINAL) {
        fcntl(fd, F_SETFL, O_NONBLOCK);
        while (write(fd, zeros, sizeof zeros) > 0) continue;
        fcntl(fd, F_SETFL, 0);
    }
    dup2(fd, 1);
    dup2(fd, 2);
}

static int start(struct run *r)
{
    char dir[LG_PATH_BYTES + 16], lgsup[LG_PATH_BYTES], shim[LG_PATH_BYTES];
    int fds[2];
    snprintf(dir, sizeof dir, "job.dir=%s", r->dir);
    LG_TRY(lg_path(lgsup, "%s/bin/lgsup", r->build));
    LG_TRY(lg_path(shim, "%s/tests/stub/libstall.so", r->build));
    const char *argv[] = {lgsup,
                          "start",
                          r->config,
                          "--set",
                          dir,
                          "--set",
                          "trainer.max_steps=100000000",
                          "--set",
                          "sample.captions=[]",
                          "--set",
                          "supervisor.restarts_max=1000000",
                          NULL};
    if (pipe2(fds, O_CLOEXEC) < 0) return LG_FAIL(LG_ERR_IO, "pipe: %s", strerror(errno));
    r->pid = fork();
    if (r->pid == 0) {
        setenv("LG_STALL", r->stall, 1);
        if (r->which == DISK) setenv("LD_PRELOAD", shim, 1);
        set_terminal(r->which, fds[1]);
        execv(argv[0], (char *const *)argv);
        _exit(127);
    }
    close(fds[1]);
    r->pipe_fd = fds[0];
    return 0;
}

static bool all_ready(const struct run *r)
{
    for (int role = 0; role < LG_ROLE_keeper; role++)
        for (int k = 0; k < (int)atomic_load(&r->board->s->wanted[role]); k++) {
            const struct lg_board_row *row = lg_board_row(r->board, (lg_role)role, k);
            lg_incarnation who = lg_board_life(r->board, (lg_role)role, k, NULL);
            if (!who || atomic_load(&row->ready) != who) return false;
        }
    return true;
}

static int wait_until_it_runs(struct run *r)
{
    char path[LG_PATH_BYTES], *text;
    size_t bytes;
    int64_t until_ns = lg_now_ns() + WAIT_S * LG_S_NS;
    LG_TRY(lg_path(path, "%s/board", r->dir));
    while (lg_now_ns() < until_ns &&
           (!r->board || !all_ready(r) || !lg_board_global_commit(r->board))) {
        nap_us(1000);
        if (!r->board && lg_path_exists(path) && lg_board_open(path, 0, &r->board) < 0)
            lg_err_clear();
    }
    if (!r->board) return LG_FAIL(LG_ERR_TIMEOUT, "%s: no run within %d s", r->dir, WAIT_S);
    LG_TRY(lg_path(path, "%s/runtime", r->dir));
    LG_TRY(lg_read_file(path, LG_PATH_BYTES - 1, &text, &bytes));
    text[strcspn(text, "\n")] = 0;
    int rc = lg_path(r->runtime, "%s", text);
    free(text);
    LG_TRY(rc);
    return 0;
}

static int measure_restart(struct run *r, lg_role role, int index, struct figures *f)
{
    const struct lg_board_row *row = lg_board_row(r->board, role, index);
    int64_t until_ns = lg_now_ns() + WAIT_S * LG_S_NS;
    while (!all_ready(r) && lg_now_ns() < until_ns) nap_us(1000);
    nap_us(20000 + rand() % 60000); /* at any moment of the loop */
    lg_incarnation before = lg_board_life(r->board, role, index, NULL);
    int64_t since_ns = lg_now_ns();
    kill((pid_t)atomic_load(&row->pid), SIGKILL);
    while (lg_board_life(r->board, role, index, NULL) == before) {
        if (lg_now_ns() - since_ns > WAIT_S * LG_S_NS)
            return LG_FAIL(LG_ERR_TIMEOUT, "%s.%d is not started again", lg_role_name(role), index);
        nap_us(50);
    }
    add(f, since_ns);
    return 0;
}

static int measure_answer(struct run *r, struct figures *f)
{
    struct lg_message ping = {.kind = LG_MESSAGE_ping, .role = LG_ROLE_lgsup}, answer;
    int64_t since_ns = lg_now_ns();
    LG_TRY(lg_control_ask(r->runtime, &ping, ASK_MS, &answer));
    add(f, since_ns);
    return 0;
}

/* The word is looked for by this process while another sends the message. */
static int measure_drain(struct run *r, struct figures *f)
{
    struct lg_message stop = {.kind = LG_MESSAGE_stop, .role = LG_ROLE_lgsup}, answer;
    int64_t since_ns = lg_now_ns();
    pid_t asks = fork();
    if (asks == 0) _exit(lg_control_ask(r->runtime, &stop, ASK_MS, &answer) < 0);
    while (!atomic_load(&r->board->s->drain) && lg_now_ns() - since_ns < WAIT_S * LG_S_NS)
        nap_us(50);
    add(f, since_ns);
    waitpid(asks, NULL, 0);
    return 0;
}

static int measure(struct run *r, int kills, struct figures f[3])
{
    static const lg_role victims[] = {LG_ROLE_loader, LG_ROLE_text, LG_ROLE_vae, LG_ROLE_ema};
    LG_TRY(start(r));
    LG_TRY(wait_until_it_runs(r));
    int fd = r->which == DISK ? open(r->stall, O_WRONLY | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) close(fd);
    for (int k = 0; k < kills; k++) {
        LG_TRY(measure_restart(r, victims[k % (int)LG_ARRAY_LEN(victims)], 0, &f[0]));
        LG_TRY(measure_answer(r, &f[1]));
    }
    LG_TRY(measure_drain(r, &f[2]));
    return 0;
}

static void end(struct run *r)
{
    int status;
    unlink(r->stall);
    lg_board_close(&r->board);
    if (waitpid(r->pid, &status, 0) != r->pid || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fprintf(stderr, "bench_loop: lgsup did not end well: status %d\n", status);
    close(r->pipe_fd);
}

int main(int argc, char **argv)
{
    static struct figures f[3];
    static struct run r;
    int kills = argc > 4 ? atoi(argv[4]) : 100;
    if (argc < 4 || kills < 1) {
        fprintf(stderr, "usage: bench_loop BUILD CONFIG DIR [kills per run]\n");
        return 2;
    }
    for (int which = 0; which < CASES; which++) {
        memset(f, 0, sizeof f);
        for (int n = 0; n < RUNS; n++) {
            r = (struct run){.build = argv[1], .config = argv[2], .which = which};
            int rc = lg_path(r.dir, "%s/%s%d", argv[3], cases[which], n);
            if (rc == 0) rc = lg_path(r.stall, "%s.stall", r.dir);
            if (rc == 0) rc = measure(&r, kills, f);
            if (rc < 0) {
                fprintf(stderr, "bench_loop: %s\n", lg_err_text());
                return 1;
            }
            end(&r);
        }
        print("restart", cases[which], &f[0]);
        print("answer", cases[which], &f[1]);
        print("drain", cases[which], &f[2]);
    }
    return 0;
}
