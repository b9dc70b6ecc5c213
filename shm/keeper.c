/* The keeper's server: one poll loop over a table of fds and a few connections.
 *
 * It must outlive everybody, so it does next to nothing: it never blocks on a client (non-blocking
 * sockets, an answer that does not go out at once closes the connection), drops who is silent for
 * IDLE_NS_MAX, ignores SIGPIPE, allocates nothing, and keeps all tables of fixed size. It waits only
 * for the service manager, when that keeps a second copy (keeper_store.h).
 *
 * Invariants: table[0 .. count) is dense, names are unique, each entry owns its fd.
 */
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "shm/keeper_store.h"
#include "shm/keeper_wire.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CONNECTIONS_MAX = 64, BACKLOG = 128, TICK_MS = 250 };
#define IDLE_NS_MAX (2 * LG_S_NS)

struct entry {
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int fd;
};

struct connection {
    int fd; /* -1: free */
    int64_t since_ns;
};

struct keeper {
    struct entry table[LG_KEEPER_REGIONS_MAX];
    int count;
    struct connection connection[CONNECTIONS_MAX];
    int listener, signals;
    const char *path; /* of the listener's file while it is ours to remove */
    bool stored;      /* the service manager has what the table has */
    bool starved;     /* accept failed, most likely for want of fds: leave it alone for one tick */
    bool over;
};

static int find(const struct keeper *k, const char *name)
{
    for (int i = 0; i < k->count; i++)
        if (strcmp(k->table[i].name, name) == 0) return i;
    return -1;
}

/* When it cannot be told whether the store has it, it is taken out: a second fd of the same name must
 * never lie there. */
static int store(const struct lg_keeper_message *q, int fd)
{
    int rc = lg_store_put(q->name, q->bytes, fd);
    if (rc == 0) return 0;
    lg_log_error("a region was not stored");
    if (lg_store_drop(q->name, q->bytes) < 0) lg_log_error("and may lie in the store");
    return rc;
}

/* Takes *fd (sets it to -1) when it stores it. */
static int do_put(struct keeper *k, const struct lg_keeper_message *q, int *fd)
{
    if (!q->name[0] || *fd < 0) return LG_ERR_USAGE;
    if (k->stored && !lg_store_fits(q->name)) return LG_ERR_USAGE;
    if (find(k, q->name) >= 0) return LG_ERR_BUSY;
    if (k->count == LG_KEEPER_REGIONS_MAX) return LG_ERR_NOSPACE;
    /* First the store: dying in between leaves there what nobody was told of, and a later put of the
     * same name finds it in the next keeper: BUSY. */
    if (k->stored) LG_TRY(store(q, *fd));
    struct entry *e = &k->table[k->count++];
    memcpy(e->name, q->name, sizeof e->name);
    e->bytes = q->bytes;
    e->fd = *fd;
    *fd = -1;
    return 0;
}

/* A store that does not follow keeps the memory, not the truth: whoever makes a region of that name
 * again notices the other run's head. */
static void forget(struct keeper *k, int i)
{
    if (k->stored && lg_store_drop(k->table[i].name, k->table[i].bytes) < 0)
        lg_log_error("a dropped region stays in the store");
    close(k->table[i].fd);
    k->table[i] = k->table[--k->count];
}

/* Before the last answer, not after: whoever has asked us to end may bind the same path at once. */
static void leave_path(struct keeper *k)
{
    if (k->path) unlink(k->path);
    k->path = NULL;
}

static int do_drop(struct keeper *k, const char *name)
{
    int i = find(k, name);
    if (i >= 0) forget(k, i);
    if (!name[0]) {
        while (k->count) forget(k, k->count - 1);
        leave_path(k);
        k->over = true;
    }
    return 0;
}

/* Fills the answer; *ret_fd: an fd of the table to send along, or -1. */
static void answer(struct keeper *k, const struct lg_keeper_message *q, int *fd,
                   struct lg_keeper_message *a, int *ret_fd)
{
    *a = (struct lg_keeper_message){.magic = LG_KEEPER_MAGIC, .op = q->op};
    *ret_fd = -1;
    int i = -1;
    switch (q->op) {
    case LG_KEEPER_PUT:
        a->code = do_put(k, q, fd);
        lg_err_clear();
        return;
    case LG_KEEPER_DROP:
        a->code = do_drop(k, q->name);
        return;
    case LG_KEEPER_GET:
        i = find(k, q->name);
        break;
    case LG_KEEPER_LIST:
        i = q->k >= 0 && q->k < k->count ? q->k : -1;
        break;
    default:
        a->code = LG_ERR_USAGE;
        return;
    }
    if (i < 0) {
        a->code = LG_ERR_NOTFOUND;
        return;
    }
    memcpy(a->name, k->table[i].name, sizeof a->name);
    a->bytes = k->table[i].bytes;
    if (q->op == LG_KEEPER_GET) *ret_fd = k->table[i].fd;
}

static void hang_up(struct connection *c)
{
    close(c->fd);
    c->fd = -1;
}

static void serve_one(struct keeper *k, struct connection *c)
{
    struct lg_keeper_message q, a;
    int got, send_fd;
    int n = lg_keeper_receive(c->fd, &q, &got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    bool good = n == (int)sizeof q && q.magic == LG_KEEPER_MAGIC &&
                memchr(q.name, 0, sizeof q.name) != NULL;
    if (good) {
        answer(k, &q, &got, &a, &send_fd);
        good = lg_keeper_send(c->fd, &a, send_fd, MSG_DONTWAIT) == 0;
    }
    if (got >= 0) close(got);
    if (!good)
        hang_up(c);
    else
        c->since_ns = lg_now_ns();
}

static bool is_owner(int fd)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

static void accept_one(struct keeper *k, struct connection *slot)
{
    int fd = accept4(k->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        k->starved = true;
        return;
    }
    if (!is_owner(fd)) {
        lg_log(LG_WARN, "refused a connection of another user");
        close(fd);
        return;
    }
    *slot = (struct connection){.fd = fd, .since_ns = lg_now_ns()};
}

static void on_signal(struct keeper *k)
{
    struct signalfd_siginfo info;
    while (read(k->signals, &info, sizeof info) == (ssize_t)sizeof info)
        if (info.ssi_signo != SIGCHLD) k->over = true;
    while (waitpid(-1, NULL, WNOHANG) > 0) continue;
}

static void loop(struct keeper *k)
{
    struct pollfd p[2 + CONNECTIONS_MAX];
    struct connection *of[2 + CONNECTIONS_MAX];
    while (!k->over) {
        struct connection *vacant = NULL;
        int n = 2;
        for (int i = 0; i < CONNECTIONS_MAX; i++) {
            struct connection *c = &k->connection[i];
            if (c->fd >= 0 && lg_now_ns() - c->since_ns > IDLE_NS_MAX) hang_up(c);
            if (c->fd < 0) {
                vacant = c;
                continue;
            }
            of[n] = c;
            p[n++] = (struct pollfd){.fd = c->fd, .events = POLLIN};
        }
        p[0] = (struct pollfd){.fd = k->signals, .events = POLLIN};
        p[1] = (struct pollfd){.fd = vacant && !k->starved ? k->listener : -1, .events = POLLIN};
        int wait_ms = n > 2 || k->starved ? TICK_MS : -1;
        k->starved = false;
        if (poll(p, (nfds_t)n, wait_ms) < 0) continue; /* EINTR */
        if (p[0].revents) on_signal(k);
        if (p[1].revents) accept_one(k, vacant);
        for (int i = 2; i < n; i++)
            if (p[i].revents) serve_one(k, of[i]);
    }
}

static int listen_at(const char *path, int *ret_fd)
{
    struct sockaddr_un address;
    LG_TRY(lg_keeper_address(path, &address));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return LG_FAIL(LG_ERR_IO, "cannot make a socket: %s", strerror(errno));
    unlink(path);
    mode_t old = umask(0177);
    int bad = bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, BACKLOG) < 0
                  ? errno
                  : 0;
    umask(old);
    if (bad) {
        close(fd);
        return LG_FAIL(lg_err_from_errno(bad), "cannot listen at %s: %s", path, strerror(bad));
    }
    *ret_fd = fd;
    return 0;
}

static int watch_signals(int *ret_fd)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGCHLD);
    signal(SIGPIPE, SIG_IGN);
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0 ||
        (*ret_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK)) < 0)
        return LG_FAIL(LG_ERR_IO, "cannot watch signals: %s", strerror(errno));
    return 0;
}

static void raise_fd_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void take(void *arg, const char *name, uint64_t bytes, int fd)
{
    struct keeper *k = arg;
    if (k->count == LG_KEEPER_REGIONS_MAX || find(k, name) >= 0) {
        close(fd);
        return;
    }
    struct entry *e = &k->table[k->count++];
    snprintf(e->name, sizeof e->name, "%s", name);
    e->bytes = bytes;
    e->fd = fd;
}

static int open_stored(struct keeper *k, const char *socket_path)
{
    char path[LG_PATH_BYTES], status[64];
    int n = lg_store_reclaim(take, k);
    LG_TRY(lg_path(path, "%s%s", socket_path, n ? "" : ".new"));
    LG_TRY(listen_at(path, &k->listener));
    snprintf(status, sizeof status, "holds %d regions from the store", n);
    lg_log(LG_INFO, "%s", status);
    lg_store_ready(status);
    return 0;
}

static int serve(struct keeper *k, const char *socket_path, int ready_fd)
{
    int rc;
    for (int i = 0; i < CONNECTIONS_MAX; i++) k->connection[i].fd = -1;
    raise_fd_limit();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    LG_TRY_GOTO(rc, watch_signals(&k->signals), out);
    LG_TRY_GOTO(rc, k->stored ? open_stored(k, socket_path) : listen_at(socket_path, &k->listener),
                out);
    if (!k->stored) k->path = socket_path; /* a stored one comes back, perhaps under another name */
    /* Whoever started us is dead. Its successor may have looked for strays at this path before we
     * were there, so nobody would ever end us. (Had the byte been written before that death, the path
     * would have been there, too, for the successor to find.) */
    if (ready_fd >= 0 && write(ready_fd, "", 1) < 0)
        lg_log(LG_WARN, "nobody waits for me: leaving");
    else
        loop(k);
    leave_path(k);
    k->stored = false; /* ending is not forgetting */
    while (k->count) forget(k, k->count - 1);
out:
    for (int i = 0; i < CONNECTIONS_MAX; i++)
        if (k->connection[i].fd >= 0) hang_up(&k->connection[i]);
    if (k->listener >= 0) close(k->listener);
    if (k->signals >= 0) close(k->signals);
    return rc;
}

int lg_keeper_serve(const char *socket_path, int ready_fd)
{
    static struct keeper k; /* 90 KiB; one per process */
    k = (struct keeper){.listener = -1, .signals = -1};
    LG_TRY(serve(&k, socket_path, ready_fd));
    return 0;
}

int lg_keeper_serve_stored(const char *socket_path)
{
    static struct keeper k;
    k = (struct keeper){.listener = -1, .signals = -1, .stored = true};
    LG_TRY(serve(&k, socket_path, -1));
    return 0;
}
