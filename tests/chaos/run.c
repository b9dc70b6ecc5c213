/* One run: starts lgsup, watches the board, lets faults fall, starts lgsup again where it was killed,
 * and compares the end.
 *
 * The board is mapped and read, never written. Everything is looked at about once a millisecond: what
 * is measured here is as exact as that. A fault falls when the run has got over the last one (a
 * commit, the replacement ready), a random moment later; one in eight falls on top of the last. */
#include "base/clock.h"
#include "tests/chaos/chaos.h"
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    STUCK_S = 60,         /* without a committed step */
    RUN_S_MAX = 900,      /* a run as a whole */
    REFUSED_MAX = 20,     /* starts of lgsup that a failing call has ended, in a row */
    RESTART_MS_MAX = 200, /* a killed lgsup stays away for so long at most */
    OVERLAP_MS_MAX = 30,
    OVERLAP_MAX = 3,
    EARLY_MS_MAX = 100, /* the first fault comes so long after the start at most */
    BOARD_LOOK_MS = 20,
    LEAVE_MS_MAX = 15000
};

void chaos_fail(struct chaos_run *r, const char *fmt, ...)
{
    va_list ap;
    if (r->why[0]) return; /* the first reason counts */
    va_start(ap, fmt);
    vsnprintf(r->why, sizeof r->why, fmt, ap);
    va_end(ap);
}

/* ---- lgsup ---- */

static void exec_lgsup(const struct chaos_run *r, int out)
{
    char program[LG_PATH_BYTES + 8], dir[LG_PATH_BYTES + 16], steps[64],
        keep[64] = "checkpoint.keep=3";
    char shim[LG_PATH_BYTES + 32], control[LG_PATH_BYTES + 64];
    snprintf(program, sizeof program, "%s/lgsup", r->o->bin);
    snprintf(dir, sizeof dir, "job.dir=%s", r->dir);
    snprintf(steps, sizeof steps, "trainer.max_steps=%" PRId64, r->o->steps);
    if (r->number < 0) snprintf(keep, sizeof keep, "checkpoint.keep=1000000");
    char *argv[] = {program,
                    (char *)"start",
                    (char *)r->o->pipeline,
                    (char *)"--set",
                    dir,
                    (char *)"--set",
                    steps,
                    (char *)"--set",
                    keep,
                    (char *)"--set",
                    (char *)"supervisor.hang_s=2",
                    NULL};
    setenv("XDG_RUNTIME_DIR", r->runtime, 1);
    unsetenv("LG_BIN_DIR");
    if (r->preload) {
        snprintf(shim, sizeof shim, "%s/libchaos.so", r->o->tools);
        snprintf(control, sizeof control, "%s/control.%d", r->o->home, r->slot);
        setenv("LG_CHAOS_CONTROL", control, 1);
        setenv("LD_PRELOAD", shim, 1);
    }
    if (CHAOS_SANITIZED) {
        /* The shim stands before the runtime, and does it no harm. */
        snprintf(control, sizeof control, "verify_asan_link_order=0:log_path=%s/sanitizer.%d",
                 r->o->home, r->slot);
        setenv("ASAN_OPTIONS", control, 1);
        setenv("UBSAN_OPTIONS", strchr(control, ':') + 1, 1);
    }
    dup2(out, 1);
    dup2(out, 2);
    execv(program, argv);
    _exit(127);
}

void chaos_start_lgsup(struct chaos_run *r)
{
    int fds[2];
    LG_ASSERT(pipe2(fds, O_CLOEXEC) == 0);
    r->started_ns = lg_now_ns();
    r->spoke_ns = 0;
    r->killed_lgsup = false;
    r->pid = fork();
    LG_ASSERT(r->pid >= 0);
    if (r->pid == 0) exec_lgsup(r, fds[1]);
    close(fds[1]);
    if (r->out_fd >= 0) close(r->out_fd);
    r->out_fd = fds[0];
    fcntl(r->out_fd, F_SETFL, O_NONBLOCK);
    r->start_at_ns = 0;
    r->starts++;
}

static void spoke(struct chaos_run *r, bool adopted)
{
    if (r->spoke_ns) return;
    r->spoke_ns = lg_now_ns();
    for (int i = 0; i < r->n_events; i++) {
        struct chaos_event *e = &r->event[i];
        if (e->waits && e->role == LG_ROLE_lgsup && e->adopt_ms < 0 && adopted)
            e->adopt_ms = (double)(r->spoke_ns - r->started_ns) / LG_MS_NS;
    }
}

/* What lgsup prints goes to DIR.out; "adopted" tells that it has taken the run over. */
static void listen_to_lgsup(struct chaos_run *r)
{
    char text[4096], path[LG_PATH_BYTES + 8];
    ssize_t n;
    while (r->out_fd >= 0 && (n = read(r->out_fd, text, sizeof text - 1)) > 0) {
        text[n] = 0;
        if (strstr(text, "adopted ")) spoke(r, true);
        if (strstr(text, "starting ") || strstr(text, "resuming ")) spoke(r, false);
        snprintf(path, sizeof path, "%s.out", r->dir);
        int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd >= 0) lg_write_all(fd, text, (size_t)n), close(fd);
    }
}

static void last_words(const struct chaos_run *r, char *ret, size_t bytes)
{
    char path[LG_PATH_BYTES + 8], *text, *line = NULL, *rest = NULL;
    size_t n;
    ret[0] = 0;
    snprintf(path, sizeof path, "%s.out", r->dir);
    if (lg_read_file(path, 64 << 20, &text, &n) < 0) {
        lg_err_clear();
        return;
    }
    for (char *t = strtok_r(text, "\n", &rest); t; t = strtok_r(NULL, "\n", &rest))
        if (t[0] != ' ' && !strncmp(t, "error", 5)) line = t;
    if (line) snprintf(ret, bytes, "%.300s", line);
    free(text);
}

static void on_lgsup_end(struct chaos_run *r, int status)
{
    char words[320];
    r->pid = 0;
    listen_to_lgsup(r);
    int64_t now = lg_now_ns();
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        r->done = true;
        return;
    }
    if (WIFSIGNALED(status) && r->killed_lgsup) {
        r->start_at_ns = now + (int64_t)chaos_draw(r, RESTART_MS_MAX) * LG_MS_NS;
        return;
    }
    last_words(r, words, sizeof words);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    r->refused++;
    r->refused_in_row++;
    if (code == -LG_ERR_PARKED || !r->preload || r->refused_in_row > REFUSED_MAX)
        chaos_fail(r, "lgsup ended with %d: %s", code, words);
    r->start_at_ns = now + 50 * LG_MS_NS; /* a user would start it again */
}

static void reap(struct chaos_run *r)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        if (pid == r->pid) on_lgsup_end(r, status);
}

/* ---- the board ---- */

static void look_for_board(struct chaos_run *r)
{
    char path[LG_PATH_BYTES + 8];
    struct stat st;
    snprintf(path, sizeof path, "%s/board", r->dir);
    if (stat(path, &st) < 0 || (r->board && st.st_ino == r->board_inode)) return;
    lg_board *fresh = NULL;
    if (lg_board_open(path, 0, &fresh) < 0) {
        lg_err_clear();
        return;
    }
    lg_board_close(&r->board);
    r->board = fresh;
    r->board_inode = st.st_ino;
    r->progress_ns = lg_now_ns();
}

static bool is_final(const struct chaos_run *r)
{
    return r->commit != LG_MARK_NONE && (int64_t)lg_mark_state(r->commit) >= r->o->steps;
}

static void look_at_event(struct chaos_run *r, struct chaos_event *e, int64_t now)
{
    struct lg_board_shared *b = r->board->s;
    bool same = b->run_id == e->run_id;
    double ms = (double)(now - e->at_ns) / LG_MS_NS;
    lg_mark from = same ? e->commit : lg_mark_of(b->start_step);
    if (e->commit_ms < 0 && r->commit > from) e->commit_ms = ms;
    if (e->incarnation && e->ready_ms < 0 && e->role != LG_ROLE_lgsup) {
        uint32_t ready = atomic_load(&lg_board_row(r->board, (lg_role)e->role, e->index)->ready);
        if (ready && (!same || ready != e->incarnation)) e->ready_ms = ms;
    }
    bool replaced =
        !e->incarnation || (e->role == LG_ROLE_lgsup ? r->spoke_ns > e->at_ns : e->ready_ms >= 0);
    e->waits = !(e->commit_ms >= 0 && replaced) && !is_final(r);
}

static void look_at_board(struct chaos_run *r, int64_t now)
{
    if (!r->board) return;
    lg_mark commit = lg_board_global_commit(r->board);
    if (commit != r->commit) {
        r->commit = commit;
        r->progress_ns = now;
        memset(r->role_kills, 0, sizeof r->role_kills);
        r->refused_in_row = 0;
    }
    for (int i = 0; i < r->n_events; i++)
        if (r->event[i].waits) look_at_event(r, &r->event[i], now);
}

static bool is_calm(const struct chaos_run *r)
{
    if (!r->pid || chaos_lasts(r)) return false;
    for (int i = LG_MAX(0, r->n_events - 64); i < r->n_events; i++)
        if (r->event[i].waits) return false;
    return true;
}

/* ---- the end ---- */

/* Processes whose parent we are, orphans of the run included: we are their subreaper. `who` (may be
 * NULL) gets their names. */
static int children(int signal, char *who, size_t bytes)
{
    int n = 0, self = getpid();
    DIR *dir = opendir("/proc");
    struct dirent *e;
    while (dir && (e = readdir(dir))) {
        char path[300], text[512];
        int pid = atoi(e->d_name), parent = 0;
        if (pid <= 0) continue;
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
        if (fd >= 0) close(fd);
        if (got <= 0) continue;
        text[got] = 0;
        const char *at = strrchr(text, ')');
        if (!at || sscanf(at + 1, " %*c %d", &parent) != 1 || parent != self) continue;
        if (who) {
            size_t used = strlen(who);
            snprintf(who + used, bytes - used, " %.60s", text);
        }
        if (signal) kill(pid, signal);
        n++;
    }
    if (dir) closedir(dir);
    while (waitpid(-1, NULL, WNOHANG) > 0) continue;
    return n;
}

/* Nobody may be left; those that are still leaving get a while. */
static void end_processes(struct chaos_run *r)
{
    int64_t until = lg_now_ns() + (r->why[0] ? 0 : LEAVE_MS_MAX * LG_MS_NS);
    bool left = true;
    while (left && lg_now_ns() < until) {
        pid_t pid;
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) continue;
        left = pid == 0;
        if (left) usleep(2000);
    }
    char who[300] = "";
    if (left && !r->why[0] && children(0, who, sizeof who))
        chaos_fail(r, "processes are left running after the end:%s", who);
    for (int i = 0; i < 1000 && children(SIGKILL, NULL, 0); i++) usleep(2000);
}

static void tell_stuck(struct chaos_run *r)
{
    chaos_fail(r, "stuck: no step committed for %d s after step %" PRIu64, STUCK_S,
               r->commit ? lg_mark_state(r->commit) : 0);
    for (int role = 0; r->board && role < LG_ROLE_COUNT; role++)
        for (int k = 0; k < 4; k++) {
            struct lg_board_row *row = lg_board_row(r->board, (lg_role)role, k);
            lg_life life;
            lg_incarnation i = lg_board_life(r->board, (lg_role)role, k, &life);
            if (life == LG_LIFE_NONE) continue;
            printf("# %s.%d pid %u incarnation %u life %d phase %u ready %u commit %" PRIu64
                   " grads %" PRIu64 " partial %" PRIu64 " staged %" PRIu64 " published %" PRIu64
                   "\n",
                   lg_role_name((lg_role)role), k, atomic_load(&row->pid), i, (int)life,
                   atomic_load(&row->phase), atomic_load(&row->ready), atomic_load(&row->commit),
                   atomic_load(&row->grads), atomic_load(&row->partial), atomic_load(&row->staged),
                   atomic_load(&row->published));
        }
    fflush(stdout);
}

/* ---- the loop ---- */

static void act(struct chaos_run *r, int64_t now)
{
    chaos_follow(r, now);
    bool calm = is_calm(r);
    if (!calm) r->calm_ns = 0;
    if (calm && !r->calm_ns) {
        r->calm_ns = now;
        r->overlap = 0;
        r->next_ns = now + (int64_t)chaos_draw(r, (uint32_t)r->o->gap_ms) * LG_MS_NS;
    }
    bool on_top = r->overlap > 0 && r->overlap <= OVERLAP_MAX;
    if (!r->board || now < r->next_ns || (!calm && !on_top)) return;
    if (!chaos_strike(r, now)) return;
    r->calm_ns = 0;
    if (chaos_draw(r, 8) == 0 && r->overlap < OVERLAP_MAX) {
        r->overlap++;
        r->next_ns = now + (int64_t)chaos_draw(r, OVERLAP_MS_MAX) * LG_MS_NS;
    } else {
        r->overlap = 0;
    }
}

static void loop(struct chaos_run *r, bool quiet)
{
    int64_t began = lg_now_ns(), board_look = 0;
    if (r->preload) chaos_arm(r, began);
    chaos_start_lgsup(r);
    r->progress_ns = began;
    r->next_ns = began + (int64_t)chaos_draw(r, EARLY_MS_MAX) * LG_MS_NS;
    r->overlap = 1; /* the first one need not wait for a commit */
    while (!r->done && !r->why[0]) {
        poll(NULL, 0, 1);
        int64_t now = lg_now_ns();
        listen_to_lgsup(r);
        reap(r);
        if (now >= board_look) {
            look_for_board(r);
            board_look = now + BOARD_LOOK_MS * LG_MS_NS;
        }
        look_at_board(r, now);
        if (r->done) break;
        if (!r->pid && now >= r->start_at_ns) {
            chaos_start_lgsup(r);
            r->progress_ns = now;
        }
        if (chaos_interrupted()) chaos_fail(r, "interrupted");
        if (!quiet) act(r, now);
        if (now - r->progress_ns > STUCK_S * LG_S_NS) tell_stuck(r);
        if (now - began > RUN_S_MAX * LG_S_NS)
            chaos_fail(r, "not at its end after %d s", RUN_S_MAX);
    }
}

/* ---- memory and files ---- */

static void map_control(struct chaos_run *r)
{
    char path[LG_PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/control.%d", r->o->home, r->slot);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    LG_ASSERT(fd >= 0 && ftruncate(fd, sizeof *r->control) == 0);
    r->control = mmap(NULL, sizeof *r->control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    LG_ASSERT(r->control != MAP_FAILED);
    close(fd);
    atomic_store(&r->control->armed, 0);
    atomic_store(&r->control->disk_full, 0);
    atomic_store(&r->control->fired, 0);
}

static void open_run(struct chaos_run *r, const struct chaos_options *o, int64_t n, int slot)
{
    r->o = o;
    r->number = n;
    r->slot = slot;
    r->seed = o->seed * 1000003 + (uint64_t)n;
    r->out_fd = r->stopped_fd = -1;
    r->preload = n >= 0 && n % 2 == 0; /* every other: the shim costs a little */
    if (o->only)
        r->preload = !strcmp(o->only, chaos_fault_name[CHAOS_syscall]) ||
                     !strcmp(o->only, chaos_fault_name[CHAOS_disk]);
    snprintf(r->runtime, sizeof r->runtime, "/tmp/lgx.XXXXXX"); /* short: socket paths end at 107 */
    LG_ASSERT(mkdtemp(r->runtime));
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    signal(SIGPIPE, SIG_IGN);
    map_control(r);
}

static void close_run(struct chaos_run *r)
{
    end_processes(r);
    if (r->out_fd >= 0) close(r->out_fd);
    lg_board_close(&r->board);
    munmap(r->control, sizeof *r->control);
    lg_remove_tree(r->runtime);
    lg_err_clear();
}

static void clean(const char *dir)
{
    char out[LG_PATH_BYTES + 8];
    snprintf(out, sizeof out, "%s.out", dir);
    lg_remove_tree(dir);
    unlink(out);
    lg_err_clear();
}

/* ---- the record ---- */

static cJSON *event_json(const struct chaos_event *e)
{
    cJSON *j = cJSON_CreateObject();
    cJSON_AddStringToObject(j, "fault", chaos_fault_name[e->fault]);
    if (e->role >= 0) cJSON_AddStringToObject(j, "role", lg_role_name((lg_role)e->role));
    cJSON_AddBoolToObject(j, "killed", e->killed);
    cJSON_AddBoolToObject(j, "alone", e->alone);
    if (e->commit_ms >= 0) cJSON_AddNumberToObject(j, "commit_ms", e->commit_ms);
    if (e->ready_ms >= 0) cJSON_AddNumberToObject(j, "ready_ms", e->ready_ms);
    if (e->adopt_ms >= 0) cJSON_AddNumberToObject(j, "adopt_ms", e->adopt_ms);
    return j;
}

struct cpu_times {
    double busy_s, own_s;
};

/* Of the machine, and of this process and everything it has reaped. */
static struct cpu_times cpu_now(void)
{
    struct cpu_times t = {0};
    double user, nice, system, idle, wait, irq, soft;
    struct rusage u;
    FILE *f = fopen("/proc/stat", "re");
    if (f && fscanf(f, "cpu %lf %lf %lf %lf %lf %lf %lf", &user, &nice, &system, &idle, &wait, &irq,
                    &soft) == 7)
        t.busy_s = (user + nice + system + irq + soft) / (double)sysconf(_SC_CLK_TCK);
    if (f) fclose(f);
    for (int who = 0; who < 2; who++) {
        getrusage(who ? RUSAGE_CHILDREN : RUSAGE_SELF, &u);
        t.own_s += (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
                   1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    }
    return t;
}

static cJSON *record(const struct chaos_run *r, double wall_s, struct cpu_times before)
{
    struct cpu_times after = cpu_now();
    double foreign_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s);
    cJSON *j = cJSON_CreateObject(), *faults = cJSON_CreateObject(), *events = cJSON_CreateArray();
    cJSON_AddNumberToObject(j, "run", (double)r->number);
    cJSON_AddNumberToObject(j, "seed", (double)r->o->seed);
    cJSON_AddStringToObject(j, "commit", r->o->commit);
    cJSON_AddNumberToObject(j, "jobs", (double)r->o->jobs);
    cJSON_AddStringToObject(j, "pipeline", r->o->name);
    cJSON_AddNumberToObject(j, "steps", (double)r->o->steps);
    cJSON_AddNumberToObject(j, "wall_s", wall_s);
    cJSON_AddNumberToObject(j, "foreign_cores", LG_MAX(foreign_s / wall_s, 0.0));
    cJSON_AddBoolToObject(j, "shim", r->preload);
    cJSON_AddBoolToObject(j, "sanitized", CHAOS_SANITIZED);
    cJSON_AddStringToObject(j, "why", r->why);
    cJSON_AddNumberToObject(j, "kills", (double)r->kills);
    cJSON_AddNumberToObject(j, "starts", r->starts);
    cJSON_AddNumberToObject(j, "refused", r->refused);
    cJSON_AddNumberToObject(j, "sites_failed", (double)r->sites_failed);
    cJSON_AddNumberToObject(j, "sites_missed", (double)r->sites_missed);
    cJSON_AddNumberToObject(j, "messages", (double)r->garbage);
    for (int f = 0; f < CHAOS_FAULTS; f++)
        cJSON_AddNumberToObject(faults, chaos_fault_name[f], (double)r->count[f]);
    cJSON_AddItemToObject(j, "faults", faults);
    for (int i = 0; i < r->n_events; i++) cJSON_AddItemToArray(events, event_json(&r->event[i]));
    cJSON_AddItemToObject(j, "events", events);
    return j;
}

/* For whoever looks for the reason. */
static void keep(const struct chaos_run *r)
{
    char kept[LG_PATH_BYTES], kept_out[LG_PATH_BYTES], out[LG_PATH_BYTES];
    if (lg_path(kept, "%s/failed.%" PRId64, r->o->home, r->number) < 0 ||
        lg_path(kept_out, "%s.out", kept) < 0 || lg_path(out, "%s.out", r->dir) < 0)
        return;
    clean(kept);
    if (rename(r->dir, kept) < 0 || rename(out, kept_out) < 0)
        printf("# run %" PRId64 " could not be kept: %s\n", r->number, strerror(errno));
}

/* A process that ASan or UBSan ended is restarted like any other that died; its report remains. */
static void find_sanitizer_reports(struct chaos_run *r)
{
    char pattern[LG_PATH_BYTES + 32];
    glob_t g;
    snprintf(pattern, sizeof pattern, "%s/sanitizer.%d.*", r->o->home, r->slot);
    if (glob(pattern, 0, NULL, &g) == 0)
        chaos_fail(r, "a sanitizer has reported: %s", g.gl_pathv[0]);
    globfree(&g);
}

cJSON *chaos_run(const struct chaos_options *o, int64_t n, int slot)
{
    struct chaos_run *r = calloc(1, sizeof *r);
    char reference[LG_PATH_BYTES + 16], why[400] = "";
    LG_ASSERT(r);
    open_run(r, o, n, slot);
    LG_ASSERT(lg_path(r->dir, "%s/run.%d", o->home, slot) == 0);
    clean(r->dir);
    chaos_shuffle(r);
    struct cpu_times before = cpu_now();
    int64_t began = lg_now_ns();
    loop(r, false);
    double wall_s = (double)(lg_now_ns() - began) / LG_S_NS;
    close_run(r);
    find_sanitizer_reports(r);
    cJSON *j = record(r, wall_s, before);
    snprintf(reference, sizeof reference, "%s/reference", o->home);
    if (!r->why[0] && chaos_compare(o, r->dir, reference, why, sizeof why) < 0) {
        cJSON_ReplaceItemInObject(j, "why", cJSON_CreateString(why));
        chaos_fail(r, "%s", why);
    }
    if (r->why[0] && !chaos_interrupted()) keep(r);
    free(r);
    return j;
}

int chaos_reference(const struct chaos_options *o, const char *dir)
{
    struct chaos_run *r = calloc(1, sizeof *r);
    LG_ASSERT(r);
    open_run(r, o, -1, 0);
    LG_ASSERT(lg_path(r->dir, "%s", dir) == 0);
    clean(dir);
    loop(r, true);
    close_run(r);
    int rc = r->why[0] ? -1 : 0;
    if (rc < 0) printf("FAIL chaos: the undisturbed run: %s\n", r->why);
    free(r);
    return rc;
}
