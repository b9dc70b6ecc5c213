/* Finding the processes of a run in /proc; see processes.h.
 *
 * A pidfd is opened before a process is looked at and asked after it: what was seen in between was
 * that process. One that ends meanwhile, or may not be looked at, is passed over: it is no process of
 * ours, or it is dead. */
#include "supervisor/run/processes.h"
#include "base/clock.h"
#include "shm/preamble.h"
#include "shm/region.h"
#include "supervisor/run/child.h"
#include "supervisor/run/stuck.h"
#include <ctype.h>
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

enum { LOOK_MS_MAX = 4000, END_S_MAX = 180, FDS_MAX = 65536, WORDS_BYTES = 1 << 16 };

/* For ever: a keeper of any build is recognised by it. */
static_assert(offsetof(struct lg_region_head, run_id) == offsetof(struct lg_board_preamble, run_id),
              "");

struct file {
    bool known;
    dev_t dev;
    ino_t ino;
};

/* What the processes are found by. */
struct trail {
    char dir[LG_PATH_BYTES], board_path[LG_PATH_BYTES], runtime[LG_PATH_BYTES];
    struct file board, lock;
    uint64_t run_id; /* 0: not known */
};

static struct file file_at(const char *path)
{
    struct stat st;
    if (stat(path, &st) < 0) return (struct file){0};
    return (struct file){.known = true, .dev = st.st_dev, .ino = st.st_ino};
}

static int make_trail(const lg_run *r, struct trail *ret)
{
    char path[LG_PATH_BYTES];
    struct lg_board_preamble p;
    int code;
    memset(ret, 0, sizeof *ret);
    LG_TRY(lg_path(ret->dir, "%s", r->dir));
    LG_TRY(lg_run_path(r, ret->board_path, "board"));
    ret->board = file_at(ret->board_path);
    LG_TRY(lg_run_path(r, path, "lock"));
    ret->lock = file_at(path);
    LG_TRY(lg_run_path(r, path, "runtime"));
    if (lg_path_exists(path)) LG_TRY(lg_read_line(path, ret->runtime, sizeof ret->runtime));
    lg_board_standing standing = lg_board_look(ret->board_path, &p, &code);
    if (standing != LG_BOARD_MISSING && standing != LG_BOARD_UNREADABLE) ret->run_id = p.run_id;
    lg_err_clear();
    return 0;
}

/* ---- one process ---- */

/* A file of /proc/PID; bytes read, 0 when it cannot be. */
static size_t read_proc(int pid, const char *name, char *ret, size_t bytes)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    size_t at = 0;
    ssize_t n;
    while (at < bytes - 1 && (n = read(fd, ret + at, bytes - 1 - at)) > 0) at += (size_t)n;
    close(fd);
    ret[at] = 0;
    return at;
}

/* Calls look(path of the open file's link, what it points to) for every fd until one says yes. */
typedef bool fd_look(const struct trail *t, const char *link, const struct stat *st);
static bool any_fd(const struct trail *t, int pid, fd_look *look)
{
    char dir_path[64], link[384];
    snprintf(dir_path, sizeof dir_path, "/proc/%d/fd", pid);
    DIR *dir = opendir(dir_path);
    if (!dir) return false;
    struct dirent *e;
    bool yes = false;
    for (int n = 0; !yes && n < FDS_MAX && (e = readdir(dir)); n++) {
        struct stat st;
        snprintf(link, sizeof link, "%s/%s", dir_path, e->d_name);
        yes = isdigit((unsigned char)e->d_name[0]) && stat(link, &st) == 0 && look(t, link, &st);
    }
    closedir(dir);
    return yes;
}

static bool is_file(const struct file *f, const struct stat *st)
{
    return f->known && f->dev == st->st_dev && f->ino == st->st_ino;
}

static bool is_lock(const struct trail *t, const char *link, const struct stat *st)
{
    (void)link;
    return is_file(&t->lock, st);
}

static bool is_board(const struct trail *t, const char *link, const struct stat *st)
{
    (void)link;
    return is_file(&t->board, st);
}

static bool is_region(const struct trail *t, const char *link, const struct stat *st)
{
    uint64_t run_id = 0;
    char target[16];
    if (!S_ISREG(st->st_mode) || readlink(link, target, sizeof target) < 7 ||
        strncmp(target, "/memfd:", 7) != 0)
        return false;
    int fd = open(link, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = pread(fd, &run_id, sizeof run_id, offsetof(struct lg_region_head, run_id));
    close(fd);
    return n == (ssize_t)sizeof run_id && run_id == t->run_id;
}

/* By the path as well: a board that was replaced meanwhile has another inode, "(deleted)" behind its
 * name, and may still be mapped. */
static bool maps_board(const struct trail *t, int pid)
{
    char path[64], *line = NULL;
    size_t room = 0;
    bool yes = false;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *f = fopen(path, "re");
    if (!f) return false;
    while (!yes && getline(&line, &room, f) > 0) {
        char *name = strchr(line, '/');
        if (!name) continue;
        name[strcspn(name, "\n")] = 0;
        size_t n = strlen(t->board_path);
        yes = !strncmp(name, t->board_path, n) && (!name[n] || !strcmp(name + n, " (deleted)"));
    }
    free(line);
    fclose(f);
    return yes;
}

/* Does a command line hold these two words, one after the other? second NULL: one that begins so. */
static bool has_words(const char *words, size_t bytes, const char *first, const char *second)
{
    for (const char *w = words; w < words + bytes; w += strlen(w) + 1) {
        if (!second && !strncmp(w, first, strlen(first))) return true;
        const char *next = w + strlen(w) + 1;
        if (second && !strcmp(w, first) && next < words + bytes && !strcmp(next, second))
            return true;
    }
    return false;
}

static bool is_keeper(const struct trail *t, int pid, const char *words, size_t bytes)
{
    char socket[LG_PATH_BYTES + 16];
    snprintf(socket, sizeof socket, "%s/keeper", t->runtime);
    return (t->runtime[0] && has_words(words, bytes, socket, NULL)) ||
           (t->run_id && any_fd(t, pid, is_region));
}

/* *ret is filled but for its pidfd. */
static bool belongs(const struct trail *t, int pid, struct lg_process *ret)
{
    static char words[WORDS_BYTES];
    *ret = (struct lg_process){.pid = pid, .pidfd = -1};
    read_proc(pid, "comm", ret->name, sizeof ret->name);
    ret->name[strcspn(ret->name, "\n")] = 0;
    size_t bytes = read_proc(pid, "cmdline", words, sizeof words);
    bool is_lgsup = !strcmp(ret->name, "lgsup");
    if (any_fd(t, pid, is_lock))
        ret->kind = LG_PROCESS_lgsup;
    else if (!strcmp(ret->name, "lg-keeper") && is_keeper(t, pid, words, bytes))
        ret->kind = LG_PROCESS_keeper;
    else if (!is_lgsup && (has_words(words, bytes, "--run", t->dir) || maps_board(t, pid) ||
                           any_fd(t, pid, is_board)))
        ret->kind = LG_PROCESS_stage;
    else
        return false;
    return true;
}

static bool lives(int pidfd)
{
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    return poll(&p, 1, 0) == 0;
}

static bool look_at(const struct trail *t, int pid, struct lg_process *ret)
{
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d", pid);
    if (pid == getpid() || stat(path, &st) < 0 || st.st_uid != geteuid()) return false;
    int pidfd = pidfd_open(pid, 0);
    if (pidfd < 0) return false;
    if (belongs(t, pid, ret) && lives(pidfd)) {
        ret->pidfd = pidfd;
        return true;
    }
    close(pidfd);
    return false;
}

int lg_processes_find(const lg_run *r, struct lg_process ret[LG_PROCESSES_MAX], int *ret_n)
{
    struct trail *t = malloc(sizeof *t);
    DIR *proc = opendir("/proc");
    int rc = !t      ? LG_FAIL(LG_ERR_NOSPACE, "no memory to look for processes")
             : !proc ? LG_FAIL(LG_ERR_IO, "cannot read /proc: %s", strerror(errno))
                     : make_trail(r, t);
    struct dirent *e;
    *ret_n = 0;
    while (rc == 0 && *ret_n < LG_PROCESSES_MAX && (e = readdir(proc)))
        if (isdigit((unsigned char)e->d_name[0]) && look_at(t, atoi(e->d_name), &ret[*ret_n]))
            ++*ret_n;
    if (proc) closedir(proc);
    free(t);
    return rc;
}

void lg_processes_close(struct lg_process *p, int n)
{
    for (int i = 0; i < n; i++) close(p[i].pidfd);
}

/* LG_ERR_TIMEOUT: not within LOOK_MS_MAX. */
static int wait_for_end(const struct lg_process *p, int64_t deadline_ns,
                        lg_process_on_wait *on_wait)
{
    const struct lg_child c = {.pid = p->pid, .pidfd = p->pidfd};
    char place[256];
    while (lg_child_wait(&c, LOOK_MS_MAX) < 0) {
        lg_process_place(p->pid, place, sizeof place);
        if (lg_now_ns() >= deadline_ns)
            return LG_FAIL(LG_ERR_TIMEOUT,
                           "%s (pid %d) was killed and has not ended in %d s; the kernel has it in "
                           "%s (D: it waits for a device or a disk, and ends when that answers)",
                           p->name, p->pid, END_S_MAX, place);
        if (on_wait) on_wait(p, place);
    }
    return 0;
}

void lg_processes_kill(const struct lg_process *p, int n)
{
    for (int i = 0; i < n; i++)
        lg_child_signal(&(struct lg_child){.pid = p[i].pid, .pidfd = p[i].pidfd}, SIGKILL);
}

int lg_processes_wait(const struct lg_process *p, int n, lg_process_on_wait *on_wait)
{
    const int64_t deadline_ns = lg_now_ns() + END_S_MAX * LG_S_NS;
    for (int i = 0; i < n; i++) LG_TRY(wait_for_end(&p[i], deadline_ns, on_wait));
    return 0;
}

int lg_processes_only(struct lg_process *p, int n, lg_process_kind kind)
{
    int m = 0;
    for (int i = 0; i < n; i++) {
        const struct lg_process one = p[i];
        if (one.kind != kind) continue;
        p[i] = p[m];
        p[m++] = one;
    }
    return m;
}

void lg_processes_end_keepers(const lg_run *r)
{
    struct lg_process *found = calloc(LG_PROCESSES_MAX, sizeof *found);
    int n = 0;
    if (found && lg_processes_find(r, found, &n) == 0) {
        const int keepers = lg_processes_only(found, n, LG_PROCESS_keeper);
        lg_processes_kill(found, keepers);
        lg_processes_wait(found, keepers, NULL);
    }
    lg_processes_close(found, n);
    free(found);
    lg_err_clear();
}
