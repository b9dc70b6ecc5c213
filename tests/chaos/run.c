/* One run: starts lgsup, watches the board, lets faults fall, starts lgsup again where it was killed,
 * and compares the end.
 *
 * The board is mapped and read, never written. Everything is looked at about once a millisecond: what
 * is measured here is as exact as that. A fault falls when the run has got over the last one (a
 * commit, the replacement ready), a random moment later; one in eight falls on top of the last. */
#include "base/clock.h"
#include "base/fs.h"
#include "tests/chaos/chaos.h"
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
    STUCK_S = 60,     /* without a committed step */
    RUN_S_MAX = 1800, /* a run as a whole */
    OVERLAP_MS_MAX = 30,
    OVERLAP_MAX = 3,
    FINAL_STRIKES_MAX = 8,
    EARLY_MS_MAX = 100, /* the first fault comes so long after the start at most */
    BOARD_LOOK_MS = 20,
    LEAVE_MS_MAX = 15000,
    TAIL_LINES = 12,
    LOG_BYTES_MAX = 64 << 20,
    HANG_S = 2, /* supervisor.hang_s; in one run of three: */
    HANG_S_LONG = 5
};

void chaos_fail(struct chaos_run *r, const char *fmt, ...)
{
    va_list ap;
    if (r->why[0]) return; /* the first reason counts */
    va_start(ap, fmt);
    vsnprintf(r->why, sizeof r->why, fmt, ap);
    va_end(ap);
}

static void reap(struct chaos_run *r)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        if (pid == r->pid) chaos_lgsup_ended(r, status);
        if (pid == r->episode.child) chaos_child_ended(r, status);
    }
}

/* ---- the board ---- */

void chaos_look_for_board(struct chaos_run *r)
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

bool chaos_is_final(const struct chaos_run *r)
{
    return r->commit != LG_MARK_NONE && (int64_t)lg_mark_state(r->commit) >= r->o->steps;
}

int64_t chaos_steps_left(const struct chaos_run *r)
{
    return r->o->steps - (r->commit == LG_MARK_NONE ? 0 : (int64_t)lg_mark_state(r->commit));
}

bool chaos_has_published(const struct chaos_run *r)
{
    lg_mark published = atomic_load(&lg_board_row(r->board, LG_ROLE_ckpt, 0)->published);
    return published > lg_mark_of(r->board->s->start_step);
}

static void look_at_event(struct chaos_run *r, struct chaos_event *e, int64_t now)
{
    struct lg_board_shared *b = r->board->s;
    bool same = chaos_run_id(r->board) == e->run_id;
    double ms = (double)(now - e->at_ns) / LG_MS_NS;
    lg_mark from = same ? e->commit : lg_mark_of(b->start_step);
    if (e->commit_ms < 0 && r->commit > from) e->commit_ms = ms;
    if (e->incarnation && e->ready_ms < 0 && e->role != LG_ROLE_lgsup) {
        uint32_t ready = atomic_load(&lg_board_row(r->board, (lg_role)e->role, e->index)->ready);
        if (ready && (!same || ready != e->incarnation)) e->ready_ms = ms;
    }
    bool replaced =
        !e->incarnation || (e->role == LG_ROLE_lgsup ? r->spoke_ns > e->at_ns : e->ready_ms >= 0);
    e->waits = !(e->commit_ms >= 0 && replaced) && !chaos_is_final(r);
}

static void look_at_board(struct chaos_run *r, int64_t now)
{
    if (!r->board) return;
    lg_mark commit = lg_board_global_commit(r->board);
    lg_mark published = atomic_load(&lg_board_row(r->board, LG_ROLE_ckpt, 0)->published);
    if (published != r->published) { /* on a slow disk the last one takes its time */
        r->published = published;
        r->progress_ns = now;
    }
    if (commit != r->commit) {
        r->commit = commit;
        r->progress_ns = now;
        memset(r->role_kills, 0, sizeof r->role_kills);
        r->refused_in_row = 0;
    }
    for (int i = 0; i < r->n_events; i++)
        if (r->event[i].waits) look_at_event(r, &r->event[i], now);
}

bool chaos_is_calm(const struct chaos_run *r)
{
    if (!r->pid || chaos_lasts(r)) return false;
    for (int i = LG_MAX(0, r->n_events - 64); i < r->n_events; i++)
        if (r->event[i].waits) return false;
    return true;
}

/* ---- the end ---- */

/* Our children, orphans of the run included: we are their subreaper. `who` (may be NULL) gets their
 * names. */
static int children(int signal, char *who, size_t bytes)
{
    int pid[CHAOS_STOPPED_MAX], n = chaos_children(getpid(), pid, CHAOS_STOPPED_MAX);
    for (int i = 0; i < n; i++) {
        char path[64], name[32] = "";
        snprintf(path, sizeof path, "/proc/%d/comm", pid[i]);
        FILE *f = who ? fopen(path, "re") : NULL;
        if (f && !fgets(name, sizeof name, f)) name[0] = 0;
        if (f) fclose(f);
        name[strcspn(name, "\n")] = 0;
        size_t used = who ? strlen(who) : 0;
        if (who) snprintf(who + used, bytes - used, " %s (%d)", name, pid[i]);
        if (signal) kill(pid[i], signal);
    }
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

/* The last lines of a log, which is gone with the run. */
static void print_tail(const char *dir, const char *name)
{
    char path[LG_PATH_BYTES], *text = NULL;
    size_t bytes = 0;
    if (lg_path(path, "%s/logs/%s.log", dir, name) < 0 ||
        lg_read_file(path, LOG_BYTES_MAX, &text, &bytes) < 0) {
        lg_err_clear();
        return;
    }
    size_t from = bytes;
    for (int lines = 0; from && lines <= TAIL_LINES; from--) lines += text[from - 1] == '\n';
    printf("# %s.log: ...\n", name);
    for (char *line = text + from + (from > 0), *end; line < text + bytes; line = end + 1) {
        end = strchr(line, '\n');
        if (!end) break;
        printf("#     %.*s\n", (int)(end - line), line);
    }
    free(text);
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
                   " grads %" PRIu64 " partial %" PRIu64 " staged %" PRIu64 " (moments %" PRIu64
                   ") published %" PRIu64 "\n",
                   lg_role_name((lg_role)role), k, atomic_load(&row->pid), i, (int)life,
                   atomic_load(&row->phase), atomic_load(&row->ready), atomic_load(&row->commit),
                   atomic_load(&row->grads), atomic_load(&row->partial), atomic_load(&row->staged),
                   atomic_load(&row->staged_moments), atomic_load(&row->published));
            char name[64];
            snprintf(name, sizeof name, "%s.%d", lg_role_name((lg_role)role), k);
            if (role != LG_ROLE_lgsup && atomic_load(&row->ready) != i) print_tail(r->dir, name);
        }
    print_tail(r->dir, "lgsup");
    fflush(stdout);
}

/* ---- the loop ---- */

static void act(struct chaos_run *r, int64_t now)
{
    chaos_follow(r, now);
    bool calm = chaos_is_calm(r);
    if (!calm) r->calm_ns = 0;
    if (calm && !r->calm_ns) {
        r->calm_ns = now;
        r->overlap = 0;
        r->next_ns = now + (int64_t)chaos_draw(r, (uint32_t)r->o->gap_ms) * LG_MS_NS;
    }
    bool on_top = r->overlap > 0 && r->overlap <= OVERLAP_MAX;
    if (!r->board || now < r->next_ns || (!calm && !on_top)) return;
    /* The run's end is struck, too, but has to come. */
    if (chaos_is_final(r) && r->final_strikes++ >= FINAL_STRIKES_MAX) return;
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
        chaos_listen(r);
        reap(r);
        if (now >= board_look) {
            chaos_look_for_board(r);
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
    atomic_store(&r->control->slow_ms, 0);
    atomic_store(&r->control->clock_s, 0);
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
    for (int f = 0; o->only && f < CHAOS_FAULTS; f++)
        if (!strcmp(o->only, chaos_fault_name[f])) r->preload = chaos_needs_shim((chaos_fault)f);
    r->hang_s = n >= 0 && n % 3 == 2 ? HANG_S_LONG : HANG_S;
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
    chaos_cgroup_close(r);
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
    cJSON *impossible = cJSON_CreateArray();
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
    cJSON_AddStringToObject(j, "mode", chaos_mode(r));
    cJSON_AddStringToObject(j, "why", r->why);
    cJSON_AddNumberToObject(j, "kills", (double)r->kills);
    cJSON_AddNumberToObject(j, "oom_kills", (double)r->oom_kills);
    cJSON_AddNumberToObject(j, "starts", r->starts);
    cJSON_AddNumberToObject(j, "refused", r->refused);
    cJSON_AddNumberToObject(j, "stops", r->stops);
    cJSON_AddNumberToObject(j, "sites_failed", (double)r->sites_failed);
    cJSON_AddNumberToObject(j, "sites_missed", (double)r->sites_missed);
    cJSON_AddNumberToObject(j, "messages", (double)r->garbage);
    for (int f = 0; f < CHAOS_FAULTS; f++)
        cJSON_AddNumberToObject(faults, chaos_fault_name[f], (double)r->count[f]);
    cJSON_AddItemToObject(j, "faults", faults);
    for (int f = 0; f < CHAOS_FAULTS; f++)
        if (r->impossible[f])
            cJSON_AddItemToArray(impossible, cJSON_CreateString(chaos_fault_name[f]));
    cJSON_AddItemToObject(j, "impossible", impossible);
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

/* A data set and a control group of its own. */
static void make_surroundings(struct chaos_run *r)
{
    if (r->o->data[0]) {
        LG_ASSERT(lg_path(r->data, "%s/data.%d", r->o->home, r->slot) == 0);
        if (chaos_restore_data(r) < 0) chaos_fail(r, "the driver could not copy the data set");
    }
    chaos_cgroup_open(r);
    for (int f = 0; f < CHAOS_FAULTS; f++) {
        r->impossible[f] = !chaos_is_possible(r, (chaos_fault)f);
        if (r->impossible[f] && r->number == 0)
            printf("# skip %s: needs %s\n", chaos_fault_name[f],
                   f == CHAOS_memory ? "root, and a control group with a memory limit"
                                     : "a data set that is a small folder");
    }
}

cJSON *chaos_run(const struct chaos_options *o, int64_t n, int slot)
{
    struct chaos_run *r = calloc(1, sizeof *r);
    char reference[LG_PATH_BYTES + 16], why[400] = "";
    LG_ASSERT(r);
    open_run(r, o, n, slot);
    LG_ASSERT(lg_path(r->dir, "%s/run.%d", o->home, slot) == 0);
    clean(r->dir);
    make_surroundings(r);
    chaos_shuffle(r);
    struct cpu_times before = cpu_now();
    int64_t began = lg_now_ns();
    loop(r, false);
    double wall_s = (double)(lg_now_ns() - began) / LG_S_NS;
    close_run(r);
    find_sanitizer_reports(r);
    cJSON *j = record(r, wall_s, before);
    snprintf(reference, sizeof reference, "%s/reference", o->home);
    if (!r->why[0] && chaos_compare(r, reference, why, sizeof why) < 0) {
        cJSON_ReplaceItemInObject(j, "why", cJSON_CreateString(why));
        chaos_fail(r, "%s", why);
    }
    if (r->why[0] && !chaos_interrupted()) keep(r);
    free(r);
    return j;
}

int chaos_undisturbed(const struct chaos_options *o, const char *dir, const char *data)
{
    struct chaos_run *r = calloc(1, sizeof *r);
    LG_ASSERT(r);
    open_run(r, o, -1, 0);
    LG_ASSERT(lg_path(r->dir, "%s", dir) == 0);
    snprintf(r->data, sizeof r->data, "%s", data ? data : "");
    clean(dir);
    loop(r, true);
    close_run(r);
    int rc = r->why[0] ? -1 : 0;
    if (rc < 0) printf("FAIL chaos: the undisturbed run: %s\n", r->why);
    free(r);
    return rc;
}
