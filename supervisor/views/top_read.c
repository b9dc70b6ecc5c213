/* Reading a run for `lgsup top`; see top.h. */
#include "base/clock.h"
#include "base/fs.h"
#include "shm/keeper.h"
#include "supervisor/run/run.h"
#include "supervisor/views/top.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PROC_BYTES_MAX = 8192, LOG_TAIL_BYTES = 65536 };

/* ---- processes ---- */

/* A small file of /proc, which has no size. False when it is not there. */
static bool read_proc(char ret[PROC_BYTES_MAX], const char *fmt, int pid)
{
    char path[64];
    snprintf(path, sizeof path, fmt, pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, ret, PROC_BYTES_MAX - 1) : -1;
    if (fd >= 0) close(fd);
    ret[LG_MAX(n, 0)] = 0;
    return n > 0;
}

/* "Name:   123 kB" of a /proc file, in bytes. */
static uint64_t kilobytes(const char *text, const char *name)
{
    const char *at = strstr(text, name);
    return at ? strtoull(at + strlen(name), NULL, 10) * 1024 : 0;
}

static uint64_t cpu_ns(int pid)
{
    char text[PROC_BYTES_MAX];
    unsigned long long user = 0, system = 0;
    const char *at = read_proc(text, "/proc/%d/stat", pid) ? strrchr(text, ')') : NULL;
    if (at) sscanf(at, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user, &system);
    return (user + system) * (uint64_t)(LG_S_NS / sysconf(_SC_CLK_TCK));
}

static void add_point(struct lg_top_process *p, const struct lg_board_row *row, lg_incarnation who)
{
    if (p->who != who) p->n_points = 0;
    p->who = who;
    if (p->n_points == LG_TOP_POINTS)
        memmove(p->point, p->point + 1, sizeof p->point[0] * (size_t)--p->n_points);
    p->point[p->n_points++] = (struct lg_top_counters){.at_ns = lg_now_ns(),
                                                       .samples = atomic_load(&row->samples),
                                                       .busy_ns = atomic_load(&row->busy_ns),
                                                       .cpu_ns = cpu_ns(p->is.pid)};
}

static void read_process(struct lg_top *t, lg_board *b, int i)
{
    char text[PROC_BYTES_MAX];
    const struct lg_status_instance *is = &t->status.instance[i];
    const struct lg_board_row *row = lg_board_row(b, is->role, is->index);
    struct lg_top_process *p = &t->process[t->row[i]];
    p->is = *is;
    p->private_bytes = p->shared_bytes = 0;
    if (!is->pid) {
        p->n_points = 0;
        return;
    }
    if (read_proc(text, "/proc/%d/status", is->pid)) {
        p->private_bytes = kilobytes(text, "RssAnon:");
        p->shared_bytes = kilobytes(text, "RssFile:") + kilobytes(text, "RssShmem:");
    }
    add_point(p, row, lg_board_life(b, is->role, is->index, &(lg_life){0}));
}

/* ---- window and regions ---- */

static void unmap(struct lg_top *t)
{
    if (t->slot)
        munmap((uint8_t *)t->slot - LG_PAGE_BYTES,
               LG_PAGE_BYTES + t->window.slots * sizeof(struct lg_slot));
    t->slot = NULL;
    t->run_id = 0;
    t->region_bytes = 0;
    t->n_regions = 0;
}

static void map_control(struct lg_top *t, const char *keeper)
{
    uint64_t bytes, wanted = LG_PAGE_BYTES + t->window.slots * sizeof(struct lg_slot);
    struct stat st;
    int fd;
    if (lg_keeper_get(keeper, "window/0/control", &bytes, &fd) < 0) return;
    void *at = MAP_FAILED;
    if (fstat(fd, &st) == 0 && (uint64_t)st.st_size >= wanted)
        at = mmap(NULL, wanted, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return;
    const struct lg_region_head *head = at;
    t->slot = (const struct lg_slot *)((uint8_t *)at + LG_PAGE_BYTES);
    if (head->layout_hash != lg_layout_hash() || head->run_id != t->run_id) unmap(t);
}

/* Once a start of the run: regions do not change afterwards. Nobody is waited for: what is not there
 * yet is looked for again at the next reading. */
static void find_regions(struct lg_top *t, const lg_run *run, uint64_t run_id)
{
    char keeper[LG_PATH_BYTES], name[LG_REGION_NAME_BYTES];
    uint64_t bytes, sum = 0;
    int n = 0;
    if (t->run_id == run_id && t->slot) return;
    unmap(t);
    t->run_id = run_id;
    lg_window_geometry_of(&run->plan, &t->window);
    if (lg_path(keeper, "%s/keeper", run->runtime_dir) < 0) return;
    for (; n < LG_KEEPER_REGIONS_MAX && lg_keeper_list(keeper, n, name, &bytes) == 0; n++)
        sum += bytes;
    if (n) map_control(t, keeper);
    t->n_regions = n;
    t->region_bytes = sum;
}

/* Samples from F on whose field is complete (window.h, rule 1). */
static void count_ready(struct lg_top *t, lg_board *b)
{
    uint64_t first = lg_window_first(b), slots = t->window.slots;
    memset(t->ready, 0, sizeof t->ready);
    for (uint64_t n = first; n < first + slots; n++)
        for (int f = 0; f < LG_FIELD_COUNT; f++)
            t->ready[f] +=
                atomic_load_explicit(&t->slot[n % slots].ready[f], memory_order_relaxed) >= n + 1;
}

static void read_window(struct lg_top *t, lg_board *b)
{
    lg_run *run = malloc(sizeof *run);
    if (!run) return;
    lg_run_init(run, t->dir);
    bool lives = lg_run_load(run) == 0 && lg_run_runtime_load(run) == 0;
    if (lives)
        find_regions(t, run, b->s->preamble.run_id);
    else
        unmap(t);
    if (t->slot) count_ready(t, b);
    lg_run_close(run);
    free(run);
}

/* ---- machine and events ---- */

static void read_machine(struct lg_top *t)
{
    char text[PROC_BYTES_MAX];
    if (read_proc(text, "/proc/meminfo", 0)) {
        t->host_bytes = kilobytes(text, "MemTotal:");
        t->host_used_bytes = t->host_bytes - kilobytes(text, "MemAvailable:");
    }
    t->n_gpus = lg_gpus_read(NULL, t->gpu);
}

/* Lines of lgsup.log that tell of something: not the figures it repeats. */
static bool is_event(const char *line)
{
    const char *at = line;
    for (int word = 0; word < 3; word++) { /* time, level, "lgsup" */
        at += strcspn(at, " ");
        at += strspn(at, " ");
    }
    return strlen(line) > 24 && line[23] == 'Z' && !strstr(at, " samples/s ") && !strstr(at, " | ");
}

static void read_events(struct lg_top *t)
{
    char path[LG_PATH_BYTES], *text = malloc(LOG_TAIL_BYTES + 1), *rest = NULL;
    int fd = -1;
    if (text && lg_path(path, "%s/logs/lgsup.log", t->dir) == 0)
        fd = open(path, O_RDONLY | O_CLOEXEC);
    t->n_events = 0;
    if (fd >= 0) {
        off_t end = lseek(fd, 0, SEEK_END);
        ssize_t n = pread(fd, text, LOG_TAIL_BYTES, LG_MAX(end - LOG_TAIL_BYTES, 0));
        close(fd);
        text[LG_MAX(n, 0)] = 0;
        for (char *l = strtok_r(text, "\n", &rest); l; l = strtok_r(NULL, "\n", &rest)) {
            if (!is_event(l)) continue;
            if (t->n_events == LG_TOP_EVENTS)
                memmove(t->event, t->event + 1, sizeof t->event[0] * (size_t)--t->n_events);
            snprintf(t->event[t->n_events++], sizeof t->event[0], "%s", l);
        }
    }
    free(text);
}

/* ---- all of it ---- */

static void read_board(struct lg_top *t)
{
    char path[LG_PATH_BYTES];
    lg_board *b = NULL;
    t->has_board = lg_path(path, "%s/board", t->dir) == 0 && lg_board_open(path, 0, &b) == 0;
    if (!t->has_board) {
        unmap(t);
        return;
    }
    t->batch = b->s->batch;
    for (int i = 0; i < t->status.n_instances; i++) {
        t->row[i] = lg_row(t->status.instance[i].role, t->status.instance[i].index);
        read_process(t, b, i);
    }
    read_window(t, b);
    lg_board_close(&b);
}

int lg_top_read(struct lg_top *t)
{
    LG_TRY(lg_status_read(t->dir, &t->status));
    t->now = time(NULL);
    read_board(t);
    t->n_metrics = lg_metrics_tail(t->dir, t->metric, LG_TOP_METRICS);
    read_machine(t);
    read_events(t);
    lg_err_clear();
    return 0;
}

void lg_top_close(struct lg_top *t)
{
    unmap(t);
}
