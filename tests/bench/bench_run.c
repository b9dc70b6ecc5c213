/* Figures of a whole run: starts the pipeline, watches it through the board, and prints JSON lines.
 *
 *   alone     each role by itself: all other stages are stopped (SIGSTOP), the role works through a
 *             window of 1024 samples that the roles before it have filled
 *   pipeline  all together: samples/s, CPU share of each role, time the trainer waits for data, memory
 *   recovery  SIGKILL to the replacement's readiness, and to its first claim (encoders, loader: that
 *             waits until a slot is free), mark (ema) or the next global commit (trainer)
 *
 * Usage: bench_run BIN_DIR CONFIG DIR [kills per role] */
#include "base/clock.h"
#include "shm/commit.h"
#include "shm/window.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WAIT_S = 60, STEPS = 100000, PIPELINE_S = 20, BATCHES = 64 };

static const lg_role roles[] = {LG_ROLE_loader,  LG_ROLE_text, LG_ROLE_vae,
                                LG_ROLE_trainer, LG_ROLE_ema,  LG_ROLE_ckpt};

struct run {
    char dir[LG_PATH_BYTES], lgsup[LG_PATH_BYTES];
    lg_plan plan;
    lg_board *board;
    lg_window *window;
};

static void nap_us(long us)
{
    nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL);
}

static int instances(const struct run *r, lg_role role)
{
    return r->plan.instances[role];
}

static struct lg_board_row *row(const struct run *r, lg_role role, int i)
{
    return lg_board_row(r->board, role, i);
}

static int run_program(const char *const argv[])
{
    pid_t pid = fork();
    int status;
    if (pid == 0) {
        if (!freopen("/dev/null", "w", stdout)) _exit(127);
        execv(argv[0], (char *const *)argv);
        _exit(127);
    }
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static int start(struct run *r, const char *config)
{
    char dir[LG_PATH_BYTES], steps[64], batches[64], path[LG_PATH_BYTES];
    LG_TRY(lg_path(dir, "job.dir=%s", r->dir));
    snprintf(steps, sizeof steps, "trainer.max_steps=%d", STEPS);
    snprintf(batches, sizeof batches, "window.batches=%d", BATCHES);
    const char *argv[] = {r->lgsup, "start",
                          config,   "--detach",
                          "--set",  dir,
                          "--set",  steps,
                          "--set",  batches,
                          "--set",  "sample.captions=[]",
                          "--set",  "checkpoint.every=0",
                          "--set",  "supervisor.restarts_max=1000",
                          "--set",  "supervisor.hang_s=3600",
                          NULL};
    int rc = run_program(argv);
    if (rc) return LG_FAIL(LG_ERR_FAILED, "lgsup start gave %d", rc);
    LG_TRY(lg_path(path, "%s/plan.json", r->dir));
    LG_TRY(lg_plan_load(path, &r->plan));
    LG_TRY(lg_path(path, "%s/board", r->dir));
    LG_TRY(lg_board_open(path, r->plan.hash, &r->board));
    struct lg_window_geometry g;
    char *runtime, keeper[LG_PATH_BYTES];
    size_t bytes;
    lg_window_geometry_of(&r->plan, &g);
    LG_TRY(lg_path(path, "%s/runtime", r->dir));
    LG_TRY(lg_read_file(path, LG_PATH_BYTES - 1, &runtime, &bytes));
    runtime[strcspn(runtime, "\n")] = 0;
    rc = lg_path(keeper, "%s/keeper", runtime);
    free(runtime);
    LG_TRY(rc);
    return lg_window_open(&(struct lg_region_spec){.keeper = keeper,
                                                   .plan_hash = r->plan.hash,
                                                   .run_id = r->board->s->preamble.run_id},
                          &g, &(struct lg_window_places){0}, &r->window);
}

static void stop(struct run *r)
{
    const char *argv[] = {r->lgsup, "stop", r->dir, NULL};
    lg_window_close(&r->window);
    lg_board_close(&r->board);
    if (run_program(argv)) fprintf(stderr, "bench_run: lgsup stop failed\n");
}

static void signal_role(const struct run *r, lg_role role, int sig)
{
    for (int i = 0; i < instances(r, role); i++)
        kill((pid_t)atomic_load(&row(r, role, i)->pid), sig);
}

static uint64_t samples_of(const struct run *r, lg_role role)
{
    uint64_t n = 0;
    for (int i = 0; i < instances(r, role); i++) n += atomic_load(&row(r, role, i)->samples);
    return n;
}

/* User + system time of a role's processes, s. */
static double cpu_of(const struct run *r, lg_role role)
{
    double sum = 0;
    for (int i = 0; i < instances(r, role); i++) {
        char path[64];
        unsigned long user = 0, sys = 0;
        snprintf(path, sizeof path, "/proc/%u/stat", atomic_load(&row(r, role, i)->pid));
        FILE *f = fopen(path, "r");
        if (!f) continue;
        if (fscanf(f, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
                   &sys) == 2)
            sum += (double)(user + sys) / (double)sysconf(_SC_CLK_TCK);
        fclose(f);
    }
    return sum;
}

/* Proportional set size of one process, MiB. */
static double memory_of(pid_t pid)
{
    char path[64], line[256];
    double kib = 0;
    snprintf(path, sizeof path, "/proc/%d/smaps_rollup", pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "Pss: %lf", &kib) == 1) break;
    if (f) fclose(f);
    return kib / 1024;
}

static uint64_t commit_of(const struct run *r)
{
    lg_mark m = lg_board_global_commit(r->board);
    return m ? lg_mark_state(m) : 0;
}

/* Lets `role` alone work until it makes no more progress for 0.4 s; the time runs from its first to
 * its last counted sample. */
static void alone(const struct run *r, lg_role role)
{
    uint64_t first = samples_of(r, role), last = first, seen;
    double cpu = cpu_of(r, role);
    int64_t began = 0, ended = lg_now_ns();
    signal_role(r, role, SIGCONT);
    while (lg_now_ns() - ended < 400 * LG_MS_NS) {
        nap_us(500);
        if ((seen = samples_of(r, role)) == last) continue;
        ended = lg_now_ns();
        if (!began) began = ended, first = seen, cpu = cpu_of(r, role);
        last = seen;
    }
    cpu = cpu_of(r, role) - cpu;
    signal_role(r, role, SIGSTOP);
    double sec = (double)(ended - began) / 1e9;
    if (last > first)
        printf("{\"bench\": \"alone\", \"role\": \"%s\", \"instances\": %d, \"samples\": %" PRIu64
               ", \"samples_per_s\": %.1f, \"cores\": %.2f}\n",
               lg_role_name(role), instances(r, role), last - first, (double)(last - first) / sec,
               cpu / sec);
}

/* The loader has filled the window before anybody could stop it: its rate is what it counted by the
 * time that it worked. */
static void loader_alone(const struct run *r)
{
    double busy = 0;
    for (int i = 0; i < instances(r, LG_ROLE_loader); i++)
        busy += (double)atomic_load(&row(r, LG_ROLE_loader, i)->busy_ns) / 1e9;
    printf("{\"bench\": \"alone\", \"role\": \"loader\", \"instances\": %d, \"samples\": %" PRIu64
           ", \"samples_per_s\": %.1f, \"cores\": 1}\n",
           instances(r, LG_ROLE_loader), samples_of(r, LG_ROLE_loader),
           (double)samples_of(r, LG_ROLE_loader) / busy);
}

static void bench_alone(const struct run *r)
{
    static const lg_role order[] = {LG_ROLE_text, LG_ROLE_vae};
    for (size_t i = 0; i < LG_ARRAY_LEN(roles); i++) signal_role(r, roles[i], SIGSTOP);
    loader_alone(r);
    for (size_t i = 0; i < LG_ARRAY_LEN(order); i++)
        if (instances(r, order[i])) alone(r, order[i]);
    /* The trainer cannot run without the EMA keeper behind it; its share of the CPU is small. */
    signal_role(r, LG_ROLE_ema, SIGCONT);
    alone(r, LG_ROLE_trainer);
    for (size_t i = 0; i < LG_ARRAY_LEN(roles); i++) signal_role(r, roles[i], SIGCONT);
}

static void bench_pipeline(const struct run *r)
{
    double cpu[LG_ROLE_COUNT], wait = 0;
    nap_us(3000000); /* the window has filled */
    for (size_t i = 0; i < LG_ARRAY_LEN(roles); i++) cpu[roles[i]] = cpu_of(r, roles[i]);
    uint64_t step = commit_of(r), first = step;
    int64_t start_ns = lg_now_ns(), end = start_ns + PIPELINE_S * LG_S_NS;
    while (lg_now_ns() < end) {
        nap_us(2000);
        uint64_t now = commit_of(r);
        if (now > step) wait += atomic_load(&r->board->s->metrics.data_wait_s), step = now;
    }
    double sec = (double)(lg_now_ns() - start_ns) / 1e9, total = 0;
    printf("{\"bench\": \"pipeline\", \"samples_per_s\": %.1f, \"step_ms\": %.2f, "
           "\"data_wait_percent\": %.2f, \"seconds\": %.1f}\n",
           (double)((step - first) * r->board->s->batch) / sec, sec / (double)(step - first) * 1e3,
           100 * wait / sec, sec);
    for (size_t i = 0; i < LG_ARRAY_LEN(roles); i++) {
        double mib = 0, used = (cpu_of(r, roles[i]) - cpu[roles[i]]) / sec;
        for (int k = 0; k < instances(r, roles[i]); k++)
            mib += memory_of((pid_t)atomic_load(&row(r, roles[i], k)->pid));
        total += mib;
        printf(
            "{\"bench\": \"pipeline_role\", \"role\": \"%s\", \"instances\": %d, \"cores\": %.3f, "
            "\"pss_mib\": %.1f}\n",
            lg_role_name(roles[i]), instances(r, roles[i]), used, mib);
    }
    printf("{\"bench\": \"memory\", \"pss_mib\": %.1f}\n", total);
}

/* ---- recovery ---- */

static bool has_claimed(const struct run *r, lg_field f, lg_incarnation who)
{
    for (uint64_t i = 0; i < r->window->g.slots; i++)
        if (atomic_load(&r->window->slot[i].claim[f]) >> 32 == who) return true;
    return false;
}

/* Has the new incarnation done what counts as being back? */
static bool is_back(const struct run *r, lg_role role, int i, lg_incarnation old, lg_mark commit,
                    lg_mark own)
{
    lg_incarnation now = lg_board_life(r->board, role, i, NULL);
    if (now == old) return false;
    switch (role) {
    case LG_ROLE_loader:
        return has_claimed(r, LG_FIELD_SOURCE, now);
    case LG_ROLE_text:
        return has_claimed(r, LG_FIELD_TEXT, now);
    case LG_ROLE_vae:
        return has_claimed(r, LG_FIELD_LATENT, now);
    case LG_ROLE_trainer:
        return lg_board_global_commit(r->board) > commit;
    case LG_ROLE_ema:
        return atomic_load(&row(r, role, i)->commit) > own;
    default:
        return atomic_load(&row(r, role, i)->ready) == now;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void bench_recovery(const struct run *r, lg_role role, int kills)
{
    double *ms = calloc((size_t)kills, sizeof *ms), *ready_ms = calloc((size_t)kills, sizeof *ms);
    LG_ASSERT(ms && ready_ms);
    for (int k = 0; k < kills; k++) {
        int i = k % instances(r, role);
        nap_us(400000 + 37000 * (k % 7));
        lg_incarnation old = lg_board_life(r->board, role, i, NULL);
        lg_mark commit = lg_board_global_commit(r->board),
                own = atomic_load(&row(r, role, i)->commit);
        int64_t start_ns = lg_now_ns();
        kill((pid_t)atomic_load(&row(r, role, i)->pid), SIGKILL);
        while (!ready_ms[k] || !is_back(r, role, i, old, commit, own)) {
            lg_incarnation now = lg_board_life(r->board, role, i, NULL);
            if (!ready_ms[k] && now != old && atomic_load(&row(r, role, i)->ready) == now)
                ready_ms[k] = (double)(lg_now_ns() - start_ns) / 1e6;
            if (lg_now_ns() - start_ns > WAIT_S * LG_S_NS) {
                fprintf(stderr, "bench_run: %s did not come back\n", lg_role_name(role));
                break;
            }
            nap_us(200);
        }
        ms[k] = (double)(lg_now_ns() - start_ns) / 1e6;
    }
    qsort(ms, (size_t)kills, sizeof *ms, by_value);
    qsort(ready_ms, (size_t)kills, sizeof *ms, by_value);
    printf("{\"bench\": \"recovery\", \"role\": \"%s\", \"kills\": %d, \"ready_p50_ms\": %.1f, "
           "\"ready_max_ms\": %.1f, \"p50_ms\": %.1f, \"max_ms\": %.1f, \"until\": \"%s\"}\n",
           lg_role_name(role), kills, ready_ms[kills / 2], ready_ms[kills - 1], ms[kills / 2],
           ms[kills - 1],
           role == LG_ROLE_trainer ? "next global commit"
           : role == LG_ROLE_ema   ? "next mark"
           : role == LG_ROLE_ckpt  ? "ready"
                                   : "first claim");
    fflush(stdout);
    free(ms);
    free(ready_ms);
}

int main(int argc, char **argv)
{
    static struct run r;
    int kills = argc > 4 ? atoi(argv[4]) : 9;
    if (argc < 4 || kills < 1) {
        fprintf(stderr, "usage: bench_run BIN_DIR CONFIG DIR [kills per role]\n");
        return 2;
    }
    snprintf(r.lgsup, sizeof r.lgsup, "%.4000s/lgsup", argv[1]);
    snprintf(r.dir, sizeof r.dir, "%s", argv[3]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (start(&r, argv[2]) < 0) {
        fprintf(stderr, "bench_run: %s\n", lg_err_text());
        return 1;
    }
    bench_alone(&r);
    bench_pipeline(&r);
    for (size_t i = 0; i < LG_ARRAY_LEN(roles); i++)
        if (instances(&r, roles[i])) bench_recovery(&r, roles[i], kills);
    stop(&r);
    return 0;
}
