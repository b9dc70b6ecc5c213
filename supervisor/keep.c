/* lgsup's side of the keeper; see keep.h. */
#include "supervisor/keep.h"
#include "base/clock.h"
#include "base/log.h"
#include "shm/region.h"
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/stat.h>
#include <unistd.h>

enum { READY_MS_MAX = 5000, LOOK_MS = 5, END_MS_MAX = 2000, FD_SCAN_MAX = 4096 };

int lg_keep_init(lg_keep *k, const char *run_dir, const char *runtime_dir, bool service)
{
    k->child = LG_CHILD_NONE;
    k->service = service;
    LG_TRY(lg_path(k->socket, "%s/keeper", runtime_dir));
    LG_TRY(lg_path(k->log, "%s/logs/keeper.0.log", run_dir));
    LG_TRY(lg_path(k->regions, "%s/regions", run_dir));
    return 0;
}

/* ---- copies ---- */

static const struct lg_keep_copy *find(const lg_keep *k, const char *name)
{
    for (int i = 0; i < k->n_copies; i++)
        if (!strcmp(k->copy[i].name, name)) return &k->copy[i];
    return NULL;
}

/* Takes the fd over. */
static void add(lg_keep *k, const char *name, uint64_t bytes, int fd)
{
    if (k->n_copies == LG_KEEPER_REGIONS_MAX || find(k, name)) {
        close(fd);
        return;
    }
    struct lg_keep_copy *c = &k->copy[k->n_copies++];
    snprintf(c->name, sizeof c->name, "%s", name);
    c->bytes = bytes;
    c->fd = fd;
}

/* The names go to a file, so that a later lgsup can tell whether it has found all of them. */
static void record_names(const lg_keep *k)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return;
    for (int i = 0; i < k->n_copies; i++) fprintf(f, "%s\n", k->copy[i].name);
    if (lg_close_text(f) < 0 || lg_publish_file(k->regions, text, bytes) < 0)
        lg_log_error("cannot record the names of the regions");
    free(text);
}

void lg_keep_refresh(lg_keep *k)
{
    int before = k->n_copies;
    for (int i = 0; i < LG_KEEPER_REGIONS_MAX; i++) {
        char name[LG_REGION_NAME_BYTES];
        uint64_t bytes;
        int fd;
        if (lg_keeper_list(k->socket, i, name, &bytes) < 0) break;
        if (!find(k, name) && lg_keeper_get(k->socket, name, &bytes, &fd) == 0)
            add(k, name, bytes, fd);
    }
    lg_err_clear(); /* the end of the list is NOTFOUND */
    if (k->n_copies != before) record_names(k);
}

bool lg_keep_is_whole(const lg_keep *k, char ret_missing[LG_REGION_NAME_BYTES])
{
    char *text, *rest = NULL;
    size_t bytes;
    if (lg_read_file(k->regions, (size_t)LG_KEEPER_REGIONS_MAX * LG_REGION_NAME_BYTES, &text,
                     &bytes) < 0) {
        lg_err_clear();
        snprintf(ret_missing, LG_REGION_NAME_BYTES, "(no list)");
        return false;
    }
    bool whole = true;
    for (char *name = strtok_r(text, "\n", &rest); name && whole;
         name = strtok_r(NULL, "\n", &rest)) {
        /* The payloads of regions on GPUs, "<name>@", cannot be found from outside: those who map
         * them deposit them at the new keeper by themselves. */
        whole = name[strlen(name) - 1] == '@' || find(k, name) != NULL;
        if (!whole) snprintf(ret_missing, LG_REGION_NAME_BYTES, "%.63s", name);
    }
    free(text);
    return whole;
}

/* A sealed memfd whose first page is the head of a region of this run. Takes the fd over. */
static void add_if_region(lg_keep *k, int fd, uint64_t run_id)
{
    struct lg_region_head head;
    bool ours =
        fcntl(fd, F_GET_SEALS) > 0 && pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head &&
        head.version == LG_LAYOUT_VERSION && head.layout_hash == lg_layout_hash() &&
        head.run_id == run_id && head.name[0] && memchr(head.name, 0, sizeof head.name) != NULL;
    if (ours)
        add(k, head.name, head.bytes, fd);
    else
        close(fd);
}

void lg_keep_salvage(lg_keep *k, int pid, uint64_t run_id)
{
    char dir_path[64];
    snprintf(dir_path, sizeof dir_path, "/proc/%d/fd", pid);
    DIR *dir = opendir(dir_path);
    if (!dir) return;
    struct dirent *e;
    for (int n = 0; n < FD_SCAN_MAX && (e = readdir(dir)); n++) {
        char path[384], target[64];
        snprintf(path, sizeof path, "%s/%s", dir_path, e->d_name);
        ssize_t bytes = readlink(path, target, sizeof target - 1);
        if (bytes <= 7 || strncmp(target, "/memfd:", 7) != 0) continue;
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0) add_if_region(k, fd, run_id);
    }
    closedir(dir);
}

/* ---- the process ---- */

static int spawn_keeper(lg_keep *k, const char *socket, int *ret_ready_fd)
{
    char program[LG_PATH_BYTES];
    int fds[2];
    LG_TRY(lg_program_path(lg_role_program(LG_ROLE_keeper), program));
    if (pipe2(fds, O_CLOEXEC) < 0) return LG_FAIL(LG_ERR_IO, "pipe: %s", strerror(errno));
    char *argv[] = {program, (char *)socket, (char *)"3", NULL};
    int rc = lg_child_spawn(
        &(struct lg_spawn){.program = program, .argv = argv, .log = k->log, .pass_fd = fds[1]},
        &k->child);
    close(fds[1]);
    if (rc < 0) close(fds[0]);
    LG_TRY(rc);
    *ret_ready_fd = fds[0];
    return 0;
}

static int wait_until_it_listens(const lg_keep *k, int ready_fd)
{
    char byte, last[160];
    struct pollfd p = {.fd = ready_fd, .events = POLLIN};
    bool said = poll(&p, 1, READY_MS_MAX) == 1;
    if (said && read(ready_fd, &byte, 1) == 1) return 0;
    lg_last_words(k->log, last, sizeof last);
    if (said)
        return LG_FAIL(LG_ERR_FAILED, "lg-keeper ended before it listened: %s",
                       *last ? last : "it said nothing");
    return LG_FAIL(LG_ERR_TIMEOUT, "lg-keeper does not listen after %d ms: %s", READY_MS_MAX, last);
}

static int fill(const lg_keep *k, const char *socket)
{
    for (int i = 0; i < k->n_copies; i++)
        LG_TRY(lg_keeper_put(socket, k->copy[i].name, k->copy[i].bytes, k->copy[i].fd));
    return 0;
}

static void stop_process(lg_keep *k)
{
    if (k->child.pidfd < 0) return;
    lg_child_signal(&k->child, SIGKILL);
    lg_child_wait(&k->child, END_MS_MAX);
    lg_child_reap(&k->child);
}

/* The keeper does not know the board, so its row is written for it: pid and start time; its life
 * stays STARTING, nobody joins. */
static void enter_board(const lg_keep *k, lg_board *board)
{
    struct lg_board_row *row = lg_board_row(board, LG_ROLE_keeper, 0);
    lg_life state;
    lg_incarnation former = lg_board_life(board, LG_ROLE_keeper, 0, &state);
    if (state != LG_LIFE_NONE) {
        lg_board_bury(board, former);
        atomic_fetch_add(&row->restarts, 1);
    }
    lg_incarnation now = lg_board_enlist(board, LG_ROLE_keeper, 0);
    atomic_store(&row->pid, (uint32_t)k->child.pid);
    atomic_store(&row->start_time, lg_process_start_time(k->child.pid));
    atomic_store(&row->phase, LG_PHASE_WAITING);
    atomic_store(&row->ready, now);
    if (state != LG_LIFE_NONE) atomic_fetch_add(&board->s->keeper_epoch, 1);
}

/* Nobody listens there: no harm done. */
static void end_stray(const char *socket)
{
    if (lg_path_exists(socket)) lg_keeper_drop(socket, "");
    lg_err_clear();
}

void lg_keep_end_strays(const char *runtime_dir)
{
    static const char *const names[] = {"keeper", "keeper.new"};
    char socket[LG_PATH_BYTES];
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++)
        if (lg_path(socket, "%s/%s", runtime_dir, names[i]) == 0) end_stray(socket);
}

/* ---- the service ---- */

/* Whoever listens at `socket` is the keeper from now on. LG_ERR_NOTFOUND when nobody does. */
static int meet(lg_keep *k, const char *socket)
{
    int pid = 0;
    int rc = lg_path_exists(socket) ? lg_keeper_pid(socket, &pid) : LG_ERR_NOTFOUND;
    lg_err_clear();
    if (rc < 0) return LG_ERR_NOTFOUND;
    int pidfd = pidfd_open(pid, 0);
    if (pidfd < 0) return LG_ERR_NOTFOUND; /* dead again */
    k->child = (struct lg_child){.pid = pid, .pidfd = pidfd};
    return 0;
}

/* Waits for the manager to have started it. *ret_fresh: it is the one at keeper.new. */
static int wait_for_service(lg_keep *k, const char *fresh, bool *ret_fresh)
{
    int64_t deadline_ns = lg_now_ns() + READY_MS_MAX * LG_MS_NS;
    do {
        *ret_fresh = false;
        if (meet(k, k->socket) == 0) return 0;
        *ret_fresh = true;
        if (meet(k, fresh) == 0) return 0;
        poll(NULL, 0, LOOK_MS);
    } while (lg_now_ns() < deadline_ns);
    return LG_FAIL(LG_ERR_TIMEOUT,
                   "no keeper listens at %s after %d ms: its unit is not running "
                   "(`systemctl status '*-keeper'`)",
                   k->socket, READY_MS_MAX);
}

/* One with a store has what we have; one without gets it. */
static int fill_service(lg_keep *k, const char *socket)
{
    for (int i = 0; i < k->n_copies; i++) {
        int rc = lg_keeper_put(socket, k->copy[i].name, k->copy[i].bytes, k->copy[i].fd);
        if (rc != LG_ERR_BUSY) LG_TRY(rc);
        lg_err_clear();
    }
    return 0;
}

/* Makes it forget everything. */
static int clear_service(const char *socket)
{
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int rc = 0;
    for (int i = 0; i < LG_KEEPER_REGIONS_MAX && rc == 0; i++) {
        rc = lg_keeper_list(socket, 0, name, &bytes);
        if (rc == 0) rc = lg_keeper_drop(socket, name);
    }
    if (rc == LG_ERR_NOTFOUND) { /* the end of the list */
        lg_err_clear();
        return 0;
    }
    LG_TRY(rc);
    return 0;
}

void lg_keep_forget(const char *runtime_dir)
{
    char socket[LG_PATH_BYTES];
    if (lg_path(socket, "%s/keeper", runtime_dir) == 0 && lg_path_exists(socket))
        clear_service(socket);
    lg_err_clear();
}

static int start_service(lg_keep *k, const char *fresh, lg_board *board)
{
    bool is_fresh;
    LG_TRY(wait_for_service(k, fresh, &is_fresh));
    const char *socket = is_fresh ? fresh : k->socket;
    lg_life before;
    lg_board_life(board, LG_ROLE_keeper, 0, &before);
    int rc = before == LG_LIFE_NONE ? clear_service(socket) : 0;
    if (rc == 0) rc = fill_service(k, socket);
    if (rc == 0 && is_fresh && rename(fresh, k->socket) < 0)
        rc = LG_FAIL(LG_ERR_IO, "cannot rename %s: %s", fresh, strerror(errno));
    if (rc < 0) {
        lg_child_reap(&k->child);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    enter_board(k, board);
    return 0;
}

static int adopt_service(lg_keep *k, lg_board *board)
{
    const struct lg_board_row *row = lg_board_row(board, LG_ROLE_keeper, 0);
    if (meet(k, k->socket) < 0) return LG_FAIL(LG_ERR_NOTFOUND, "the keeper is dead");
    if ((int)atomic_load(&row->pid) != k->child.pid ||
        atomic_load(&row->start_time) != lg_process_start_time(k->child.pid))
        enter_board(k, board);
    return 0;
}

int lg_keep_start(lg_keep *k, lg_board *board)
{
    char fresh[LG_PATH_BYTES];
    int ready_fd;
    LG_TRY(lg_path(fresh, "%s.new", k->socket));
    if (k->service) {
        LG_TRY(start_service(k, fresh, board));
        return 0;
    }
    /* Of an lgsup that died in here: before the rename, or after it and before its keeper stood on
     * the board. What such a keeper holds an adoption has copied. */
    end_stray(k->socket);
    end_stray(fresh);
    LG_TRY(spawn_keeper(k, fresh, &ready_fd));
    int rc = wait_until_it_listens(k, ready_fd);
    close(ready_fd);
    if (rc == 0) rc = fill(k, fresh);
    if (rc == 0 && rename(fresh, k->socket) < 0)
        rc = LG_FAIL(LG_ERR_IO, "cannot rename %s: %s", fresh, strerror(errno));
    if (rc < 0) {
        stop_process(k);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    enter_board(k, board);
    return 0;
}

int lg_keep_adopt(lg_keep *k, lg_board *board)
{
    if (k->service) return adopt_service(k, board);
    const struct lg_board_row *row = lg_board_row(board, LG_ROLE_keeper, 0);
    int pid = (int)atomic_load(&row->pid);
    int pidfd = pid > 0 ? pidfd_open(pid, 0) : -1;
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    if (pidfd < 0 || lg_process_start_time(pid) != atomic_load(&row->start_time) ||
        poll(&p, 1, 0) != 0) {
        if (pidfd >= 0) close(pidfd);
        return LG_FAIL(LG_ERR_NOTFOUND, "the keeper is dead");
    }
    k->child = (struct lg_child){.pid = pid, .pidfd = pidfd};
    return 0;
}

void lg_keep_leave(lg_keep *k)
{
    if (k->child.pidfd >= 0) close(k->child.pidfd);
    k->child = LG_CHILD_NONE;
    for (int i = 0; i < k->n_copies; i++) close(k->copy[i].fd);
    k->n_copies = 0;
}

void lg_keep_end(lg_keep *k)
{
    if (k->service && k->child.pidfd >= 0) {
        if (clear_service(k->socket) < 0) lg_log_error("the keeper still holds memory of this run");
        lg_child_reap(&k->child);
    } else if (k->child.pidfd >= 0) {
        if (lg_keeper_drop(k->socket, "") < 0) lg_child_signal(&k->child, SIGTERM);
        lg_err_clear();
        if (lg_child_wait(&k->child, END_MS_MAX) == 0) lg_child_reap(&k->child);
        stop_process(k);
    }
    lg_keep_leave(k);
}
