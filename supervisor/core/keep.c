/* lgsup's side of the keeper; see keep.h. */
#include "supervisor/core/keep.h"
#include "base/clock.h"
#include "shm/region.h"
#include "supervisor/launch/launcher.h"
#include "supervisor/run/terminal.h"
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
static int record_names(lg_keep *k)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the names of the regions");
    for (int i = 0; i < k->n_copies; i++) fprintf(f, "%s\n", k->copy[i].name);
    int rc = lg_close_text(f);
    if (rc == 0) rc = lg_publish_file(k->regions, text, bytes);
    free(text);
    LG_TRY(rc);
    k->n_recorded = k->n_copies;
    return 0;
}

static int copy_all(lg_keep *k)
{
    int rc = 0;
    for (int i = 0; i < LG_KEEPER_REGIONS_MAX; i++) {
        char name[LG_REGION_NAME_BYTES];
        uint64_t bytes;
        int fd;
        rc = lg_keeper_list(k->socket, i, name, &bytes);
        if (rc < 0) break;
        if (find(k, name)) continue;
        LG_TRY(lg_keeper_get(k->socket, name, &bytes, &fd));
        add(k, name, bytes, fd);
    }
    if (rc < 0 && rc != LG_ERR_NOTFOUND) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    lg_err_clear(); /* the end of the list */
    return 0;
}

static bool is_payload(const char *name)
{
    return name[strlen(name) - 1] == '@';
}

static int note_copies(lg_keep *k)
{
    int result = 0;
    for (int i = 0; i < k->n_copies; i++) {
        struct lg_keep_copy *c = &k->copy[i];
        char payload[LG_REGION_NAME_BYTES + 1];
        if (c->noted || is_payload(c->name)) continue;
        snprintf(payload, sizeof payload, "%s@", c->name);
        int rc = lg_region_note_copy(c->fd, find(k, payload) != NULL);
        if (rc < 0 && rc != LG_ERR_BUSY) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
        c->noted = rc == 0;
        result = rc < 0 ? rc : result;
    }
    return result;
}

int lg_keep_refresh(lg_keep *k)
{
    LG_TRY(copy_all(k));
    k->complete = true;
    if (k->n_copies != k->n_recorded) LG_TRY(record_names(k));
    return note_copies(k);
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
        whole = is_payload(name) || find(k, name) != NULL;
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

lg_incarnation lg_keep_enlist(lg_board *board)
{
    lg_life state;
    lg_incarnation former = lg_board_life(board, LG_ROLE_keeper, 0, &state);
    if (state != LG_LIFE_NONE) lg_board_bury(board, former);
    return lg_board_enlist(board, LG_ROLE_keeper, 0);
}

static int spawn_keeper(const lg_keep *k, lg_board *board, const char *socket, struct lg_child *ret,
                        int *ret_ready_fd)
{
    char program[LG_PATH_BYTES];
    int fds[2];
    LG_TRY(lg_program_path(lg_role_program(LG_ROLE_keeper), program));
    if (pipe2(fds, O_CLOEXEC) < 0) return LG_FAIL(LG_ERR_IO, "pipe: %s", strerror(errno));
    char *argv[] = {program, (char *)socket, (char *)"3", NULL};
    struct lg_launch_seat seat = {board, lg_keep_enlist(board)};
    int rc = lg_child_spawn(&(struct lg_spawn){.program = program,
                                               .argv = argv,
                                               .log = k->log,
                                               .pass_fd = fds[1],
                                               .enter = lg_launch_enter,
                                               .where = &seat},
                            ret);
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
    if (!*last) snprintf(last, sizeof last, "it said nothing");
    if (said) return LG_FAIL(LG_ERR_FAILED, "lg-keeper ended before it listened: %s", last);
    return LG_FAIL(LG_ERR_TIMEOUT, "lg-keeper does not listen after %d ms: %s", READY_MS_MAX, last);
}

static int fill(const lg_keep *k, const char *socket)
{
    for (int i = 0; i < k->n_copies; i++)
        LG_TRY(lg_keeper_put(socket, k->copy[i].name, k->copy[i].bytes, k->copy[i].fd));
    return 0;
}

static void stop_process(struct lg_child *c)
{
    if (c->pidfd < 0) return;
    lg_child_signal(c, SIGKILL);
    lg_child_wait(c, END_MS_MAX);
    lg_child_reap(c);
}

bool lg_keep_is_first(lg_board *board)
{
    return atomic_load(&lg_board_row(board, LG_ROLE_keeper, 0)->ready) == 0;
}

bool lg_keep_is_ready(lg_board *board)
{
    lg_incarnation now = lg_board_life(board, LG_ROLE_keeper, 0, NULL);
    return now && atomic_load(&lg_board_row(board, LG_ROLE_keeper, 0)->ready) == now;
}

/* The epoch first: were we to die in between, a keeper that counts as the run's would lack what stages
 * hold of which we had no copy, and nobody would tell them to deposit it. */
void lg_keep_enter(lg_keep *k, lg_board *board, const struct lg_child *c)
{
    struct lg_board_row *row = lg_board_row(board, LG_ROLE_keeper, 0);
    bool first = lg_keep_is_first(board);
    k->child = *c;
    atomic_store(&row->phase, LG_PHASE_WAITING);
    if (!first) {
        atomic_fetch_add(&row->restarts, 1);
        atomic_fetch_add(&board->s->keeper_epoch, 1);
    }
    atomic_store(&row->ready, lg_board_life(board, LG_ROLE_keeper, 0, NULL));
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
static int meet(const char *socket, struct lg_child *ret)
{
    int pid = 0;
    int rc = lg_path_exists(socket) ? lg_keeper_pid(socket, &pid) : LG_ERR_NOTFOUND;
    lg_err_clear();
    if (rc < 0) return LG_ERR_NOTFOUND;
    int pidfd = pidfd_open(pid, 0);
    if (pidfd < 0) return LG_ERR_NOTFOUND; /* dead again */
    *ret = (struct lg_child){.pid = pid, .pidfd = pidfd};
    return 0;
}

/* Waits for the manager to have started it. *ret_fresh: it is the one at keeper.new. */
static int wait_for_service(const lg_keep *k, const char *fresh, struct lg_child *ret,
                            bool *ret_fresh)
{
    int64_t deadline_ns = lg_now_ns() + READY_MS_MAX * LG_MS_NS;
    do {
        *ret_fresh = false;
        if (meet(k->socket, ret) == 0) return 0;
        *ret_fresh = true;
        if (meet(fresh, ret) == 0) return 0;
        poll(NULL, 0, LOOK_MS);
    } while (lg_now_ns() < deadline_ns);
    return LG_FAIL(LG_ERR_TIMEOUT,
                   "no keeper listens at %s after %d ms: its unit is not running "
                   "(`systemctl status '*-keeper'`)",
                   k->socket, READY_MS_MAX);
}

/* One with a store has what we have; one without gets it. */
static int fill_service(const lg_keep *k, const char *socket)
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

/* systemd has started it, so it is systemd who knows it until it is named here. */
static int name_service(lg_board *board, const struct lg_child *c)
{
    struct lg_launch_seat seat = {board, lg_keep_enlist(board)};
    LG_TRY(lg_launch_enter(&seat, c));
    return 0;
}

static int launch_service(const lg_keep *k, lg_board *board, const char *fresh, bool first,
                          struct lg_child *ret)
{
    bool is_fresh;
    LG_TRY(wait_for_service(k, fresh, ret, &is_fresh));
    const char *socket = is_fresh ? fresh : k->socket;
    int rc = name_service(board, ret);
    if (rc == 0 && first) rc = clear_service(socket);
    if (rc == 0) rc = fill_service(k, socket);
    if (rc == 0 && is_fresh && rename(fresh, k->socket) < 0)
        rc = LG_FAIL(LG_ERR_IO, "cannot rename %s: %s", fresh, strerror(errno));
    if (rc < 0) {
        lg_child_reap(ret);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    return 0;
}

static int adopt_service(lg_keep *k, lg_board *board)
{
    const struct lg_board_row *row = lg_board_row(board, LG_ROLE_keeper, 0);
    struct lg_child c;
    if (meet(k->socket, &c) < 0) return LG_FAIL(LG_ERR_NOTFOUND, "the keeper is dead");
    bool named = (int)atomic_load(&row->pid) == c.pid &&
                 atomic_load(&row->start_time) == lg_process_start_time(c.pid);
    int rc = named ? 0 : name_service(board, &c);
    if (rc < 0) {
        lg_child_reap(&c);
        return LG_FAIL(LG_ERR_IO, "%s; start again", lg_err_message());
    }
    k->child = c;
    if (!lg_keep_is_ready(board)) lg_keep_enter(k, board, &c);
    return 0;
}

/* The keeper that an lgsup which dies in here leaves stands on the board from before it begins. Before the
 * rename it is ended by the next, after it is taken over. */
static int launch_process(const lg_keep *k, lg_board *board, const char *fresh,
                          struct lg_child *ret)
{
    int ready_fd;
    LG_TRY(spawn_keeper(k, board, fresh, ret, &ready_fd));
    int rc = wait_until_it_listens(k, ready_fd);
    close(ready_fd);
    if (rc == 0) rc = fill(k, fresh);
    if (rc == 0 && rename(fresh, k->socket) < 0)
        rc = LG_FAIL(LG_ERR_IO, "cannot rename %s: %s", fresh, strerror(errno));
    if (rc < 0) {
        stop_process(ret);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    return 0;
}

int lg_keep_launch(const lg_keep *k, lg_board *board, bool first, struct lg_child *ret)
{
    char fresh[LG_PATH_BYTES];
    *ret = LG_CHILD_NONE;
    LG_TRY(lg_path(fresh, "%s.new", k->socket));
    if (k->service)
        LG_TRY(launch_service(k, board, fresh, first, ret));
    else
        LG_TRY(launch_process(k, board, fresh, ret));
    return 0;
}

/* Before it listened: it may have been killed or stopped, and the next one is well. */
static bool ended_or_hung(const lg_keep *k, int rc)
{
    return !k->service && (rc == LG_ERR_FAILED || rc == LG_ERR_TIMEOUT);
}

int lg_keep_start(lg_keep *k, lg_board *board)
{
    struct lg_child c;
    bool first = lg_keep_is_first(board);
    if (first) { /* a run begins: nobody uses anything yet */
        k->complete = true;
        LG_TRY(record_names(k));
    }
    int rc = lg_keep_launch(k, board, first, &c);
    for (int n = 1; n < LG_KEEP_STARTS_MAX && ended_or_hung(k, rc); n++) {
        lg_terminal_say(STDERR_FILENO, "warning: %s; another is started\n", lg_err_message());
        rc = lg_keep_launch(k, board, first, &c);
    }
    LG_TRY(rc);
    lg_keep_enter(k, board, &c);
    return 0;
}

bool lg_keep_is_reachable(const lg_keep *k)
{
    return lg_path_exists(k->socket);
}

bool lg_keep_answers(const lg_keep *k, int pid)
{
    int its = 0;
    if (k->service) return true; /* it is looked for where it listens */
    if (lg_keeper_pid(k->socket, &its) < 0) lg_err_clear();
    return its == pid;
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
    if (!lg_keep_is_ready(board)) lg_keep_enter(k, board, &k->child);
    return 0;
}

void lg_keep_leave(lg_keep *k)
{
    if (k->child.pidfd >= 0) close(k->child.pidfd);
    k->child = LG_CHILD_NONE;
    for (int i = 0; i < k->n_copies; i++) close(k->copy[i].fd);
    k->n_copies = k->n_recorded = 0;
}

void lg_keep_end(lg_keep *k)
{
    if (k->service && k->child.pidfd >= 0) {
        if (clear_service(k->socket) < 0)
            lg_terminal_say(STDERR_FILENO,
                            "warning: the keeper still holds memory of this run: %s\n",
                            lg_err_message());
        lg_err_clear();
        lg_child_reap(&k->child);
    } else if (k->child.pidfd >= 0) {
        if (lg_keeper_drop(k->socket, "") < 0) lg_child_signal(&k->child, SIGTERM);
        lg_err_clear();
        if (lg_child_wait(&k->child, END_MS_MAX) == 0) lg_child_reap(&k->child);
        stop_process(&k->child);
    }
    lg_keep_leave(k);
}
