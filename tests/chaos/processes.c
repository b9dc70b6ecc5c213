/* Processes of a run: who lives, and their deaths.
 *
 * Signals go by pidfd, after the start time was compared, so they reach the process that the board
 * names or nobody. Of one role at most DEATHS_MAX processes are killed between two commits: more
 * would, rightly, park the run (supervisor.restarts_max). */
#include "base/clock.h"
#include "tests/chaos/chaos.h"
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <unistd.h>

enum { DEATHS_MAX = 4, TRIES_MAX = 32 };

bool chaos_may_die(const struct chaos_run *r, int role)
{
    return r->role_kills[role] < DEATHS_MAX;
}

static int keeper_pidfd(lg_board *b)
{
    struct lg_board_row *row = lg_board_row(b, LG_ROLE_keeper, 0);
    int pid = (int)atomic_load(&row->pid);
    int fd = pid > 0 ? pidfd_open(pid, 0) : -1;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (fd < 0 ||
        (lg_process_start_time(pid) == atomic_load(&row->start_time) && poll(&p, 1, 0) == 0))
        return fd;
    close(fd);
    return -1;
}

bool chaos_find_victim(struct chaos_run *r, int role, int index, struct chaos_victim *ret)
{
    *ret = (struct chaos_victim){.role = role, .index = index, .pidfd = -1};
    ret->incarnation = lg_board_life(r->board, (lg_role)role, index, NULL);
    if (role == LG_ROLE_lgsup)
        ret->pidfd = r->pid ? pidfd_open(r->pid, 0) : -1;
    else if (role == LG_ROLE_keeper)
        ret->pidfd = keeper_pidfd(r->board);
    else
        ret->pidfd = lg_board_pidfd(r->board, (lg_role)role, index);
    return ret->pidfd >= 0;
}

int chaos_instances(struct chaos_run *r, int role)
{
    int n = 0;
    while (n < LG_INSTANCES_MAX && lg_board_life(r->board, (lg_role)role, n, NULL) != 0) n++;
    return n;
}

bool chaos_draw_victim(struct chaos_run *r, lg_role last, struct chaos_victim *ret)
{
    struct {
        int role, index;
    } all[LG_ROWS];
    int n = 0;
    for (int role = 0; role <= (int)last; role++)
        for (int k = 0; k < chaos_instances(r, role); k++) {
            all[n].role = role;
            all[n++].index = k;
        }
    for (int t = 0; n && t < TRIES_MAX; t++) {
        uint32_t i = chaos_draw(r, (uint32_t)n);
        if (chaos_may_die(r, all[i].role) && chaos_find_victim(r, all[i].role, all[i].index, ret))
            return true;
    }
    return false;
}

/* Nothing that waits still is alone any more, and what comes now is not either. */
struct chaos_event *chaos_note(struct chaos_run *r, chaos_fault f, int role, int index)
{
    bool alone = true;
    for (int i = 0; i < r->n_events; i++) {
        if (!r->event[i].waits) continue;
        alone = r->event[i].alone = false;
    }
    if (r->n_events == CHAOS_EVENTS_MAX) r->n_events--;
    struct chaos_event *e = &r->event[r->n_events++];
    *e = (struct chaos_event){.fault = f,
                              .role = role,
                              .index = index,
                              .at_ns = lg_now_ns(),
                              .commit = r->commit,
                              .run_id = r->board ? chaos_run_id(r->board) : 0,
                              .commit_ms = -1,
                              .ready_ms = -1,
                              .adopt_ms = -1,
                              .alone = alone,
                              .waits = true};
    return e;
}

/* All at one moment: the signals follow each other without anything in between. */
void chaos_kill_all(struct chaos_run *r, chaos_fault f, struct chaos_victim *v, int n)
{
    r->commit = lg_board_global_commit(r->board);
    for (int i = 0; i < n; i++) {
        struct chaos_event *e = chaos_note(r, f, v[i].role, v[i].index);
        e->incarnation = v[i].incarnation;
        e->killed = true;
        e->alone = e->alone || (i > 0 && r->event[r->n_events - 2].fault == f);
        if (v[i].role == LG_ROLE_lgsup) r->killed_lgsup = true;
    }
    for (int i = 0; i < n; i++)
        if (pidfd_send_signal(v[i].pidfd, SIGKILL, NULL, 0) == 0) r->kills++;
    for (int i = 0; i < n; i++) {
        r->role_kills[v[i].role]++;
        close(v[i].pidfd);
    }
}

int chaos_children(int parent, int *ret_pid, int max)
{
    int n = 0;
    DIR *dir = opendir("/proc");
    struct dirent *e;
    while (dir && n < max && (e = readdir(dir))) {
        char path[300], text[512];
        int pid = atoi(e->d_name), of = 0;
        if (pid <= 0) continue;
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
        if (fd >= 0) close(fd);
        if (got <= 0) continue;
        text[got] = 0;
        const char *at = strrchr(text, ')');
        if (at && sscanf(at + 1, " %*c %d", &of) == 1 && of == parent) ret_pid[n++] = pid;
    }
    if (dir) closedir(dir);
    return n;
}
