/* The keeper's server: one poll loop over a table of fds (keeper_table.h) and a few connections.
 *
 * It must outlive everybody, so it does next to nothing: it never blocks, on a client (non-blocking
 * sockets, an answer that does not go out at once closes the connection) or on the service manager
 * (a question that needs the manager's word waits in its connection, and others are answered
 * meanwhile), drops who is silent for IDLE_NS_MAX, ignores SIGPIPE, allocates nothing, and keeps
 * all tables of fixed size.
 */
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "shm/keeper_table.h"
#include "shm/keeper_wire.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CONNECTIONS_MAX = 64, BACKLOG = 128, TICK_MS = 250 };
#define IDLE_NS_MAX   (2 * LG_S_NS)
#define ANSWER_NS_MAX (3 * LG_S_NS) /* a client waits a little longer */

struct connection {
    int fd;           /* -1: free */
    int64_t since_ns; /* of its last question or answer */
    bool waits;       /* `question` has not been answered yet */
    struct lg_keeper_message question;
    int got; /* the fd that came with it; -1: none, or it has been taken */
};

struct keeper {
    struct lg_keeper_table table;
    struct connection connection[CONNECTIONS_MAX];
    int listener, signals;
    const char *path; /* of the listener's file while it is ours to remove */
    bool starved;     /* accept failed, most likely for want of fds: leave it alone for one tick */
    bool over;
};

/* Before the last answer, not after: whoever has asked us to end may bind the same path at once. */
static void leave_path(struct keeper *k)
{
    if (k->path) unlink(k->path);
    k->path = NULL;
}

static int drop(struct keeper *k, const char *name, bool late)
{
    int rc = lg_table_drop(&k->table, name, late);
    if (!*name && rc != LG_TABLE_LATER) {
        leave_path(k);
        k->over = true;
    }
    return rc;
}

/* Fills the answer; *ret_fd: an fd of the table to send along, or -1. false: later. */
static bool answer(struct keeper *k, struct connection *c, struct lg_keeper_message *a, int *ret_fd)
{
    const struct lg_keeper_message *q = &c->question;
    const struct lg_keeper_entry *e = NULL;
    bool late = lg_now_ns() - c->since_ns > ANSWER_NS_MAX;
    *a = (struct lg_keeper_message){.magic = LG_KEEPER_MAGIC, .op = q->op};
    *ret_fd = -1;
    switch (q->op) {
    case LG_KEEPER_PUT:
        a->code = lg_table_put(&k->table, c, q->name, q->bytes, &c->got, late);
        if (a->code == LG_TABLE_LATER) return false;
        if (a->code == 0 && k->table.stored) a->code = LG_KEEPER_STORED;
        return true;
    case LG_KEEPER_DROP:
        a->code = drop(k, q->name, late);
        return a->code != LG_TABLE_LATER;
    case LG_KEEPER_GET:
        e = lg_table_get(&k->table, q->name);
        break;
    case LG_KEEPER_LIST:
        e = lg_table_kth(&k->table, q->k);
        break;
    default:
        a->code = LG_ERR_USAGE;
        return true;
    }
    if (!e) {
        a->code = LG_ERR_NOTFOUND;
        return true;
    }
    memcpy(a->name, e->name, sizeof a->name);
    a->bytes = e->bytes;
    if (q->op == LG_KEEPER_GET) *ret_fd = e->fd;
    if (q->op == LG_KEEPER_GET && k->table.stored)
        a->code = LG_KEEPER_STORED; /* KEPT: there, too */
    return true;
}

static void end_question(struct connection *c)
{
    if (c->got >= 0) close(c->got);
    c->got = -1;
    c->waits = false;
}

static void hang_up(struct keeper *k, struct connection *c)
{
    lg_table_leave(&k->table, c);
    end_question(c);
    close(c->fd);
    c->fd = -1;
}

static void try_to_answer(struct keeper *k, struct connection *c)
{
    struct lg_keeper_message a;
    int send_fd;
    if (!answer(k, c, &a, &send_fd)) return;
    end_question(c);
    c->since_ns = lg_now_ns();
    if (lg_keeper_send(c->fd, &a, send_fd, MSG_DONTWAIT) < 0) hang_up(k, c);
}

/* A question, or the end; while one waits, the end. */
static void hear(struct keeper *k, struct connection *c)
{
    if (c->waits) {
        hang_up(k, c);
        return;
    }
    int n = lg_keeper_receive(c->fd, &c->question, &c->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    c->waits = true;
    c->since_ns = lg_now_ns();
    if (n != (int)sizeof c->question || c->question.magic != LG_KEEPER_MAGIC ||
        memchr(c->question.name, 0, sizeof c->question.name) == NULL)
        hang_up(k, c);
    else
        try_to_answer(k, c);
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
    *slot = (struct connection){.fd = fd, .since_ns = lg_now_ns(), .got = -1};
}

static void on_signal(struct keeper *k)
{
    struct signalfd_siginfo info;
    while (read(k->signals, &info, sizeof info) == (ssize_t)sizeof info)
        if (info.ssi_signo != SIGCHLD) k->over = true;
    while (waitpid(-1, NULL, WNOHANG) > 0) continue;
}

enum { P_SIGNALS, P_LISTENER, P_BARRIER, P_FIRST };

/* What to poll for, and how long. *ret_vacant: NULL when all connections are taken. */
static int gather(struct keeper *k, struct pollfd *p, struct connection **of,
                  struct connection **ret_vacant, int *ret_wait_ms)
{
    int n = P_FIRST;
    *ret_vacant = NULL;
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        struct connection *c = &k->connection[i];
        if (c->fd >= 0 && !c->waits && lg_now_ns() - c->since_ns > IDLE_NS_MAX) hang_up(k, c);
        if (c->fd < 0) {
            *ret_vacant = c;
            continue;
        }
        of[n] = c;
        p[n++] = (struct pollfd){.fd = c->fd, .events = c->waits ? 0 : POLLIN};
    }
    p[P_SIGNALS] = (struct pollfd){.fd = k->signals, .events = POLLIN};
    p[P_LISTENER] =
        (struct pollfd){.fd = *ret_vacant && !k->starved ? k->listener : -1, .events = POLLIN};
    p[P_BARRIER] = (struct pollfd){.fd = k->table.barrier, .events = POLLIN};
    int store_ms = lg_table_wait_ms(&k->table), wait_ms = n > P_FIRST || k->starved ? TICK_MS : -1;
    *ret_wait_ms = store_ms >= 0 && (wait_ms < 0 || store_ms < wait_ms) ? store_ms : wait_ms;
    k->starved = false;
    return n;
}

static void loop(struct keeper *k)
{
    struct pollfd p[P_FIRST + CONNECTIONS_MAX];
    struct connection *of[P_FIRST + CONNECTIONS_MAX], *vacant;
    int wait_ms;
    while (!k->over) {
        int n = gather(k, p, of, &vacant, &wait_ms);
        if (poll(p, (nfds_t)n, wait_ms) < 0) continue; /* EINTR */
        if (p[P_SIGNALS].revents) on_signal(k);
        if (p[P_LISTENER].revents) accept_one(k, vacant);
        for (int i = P_FIRST; i < n; i++)
            if (p[i].revents) hear(k, of[i]);
        lg_table_turn(&k->table);
        for (int i = P_FIRST; i < n; i++)
            if (of[i]->fd >= 0 && of[i]->waits) try_to_answer(k, of[i]);
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

static int open_stored(struct keeper *k, const char *socket_path)
{
    char path[LG_PATH_BYTES];
    int n = lg_table_reclaim(&k->table);
    LG_TRY(lg_path(path, "%s%s", socket_path, n ? "" : ".new"));
    LG_TRY(listen_at(path, &k->listener));
    snprintf(k->table.ready, sizeof k->table.ready, "holds %d regions from the store", n);
    lg_log(LG_INFO, "%s", k->table.ready);
    lg_table_turn(&k->table);
    return 0;
}

static int serve(struct keeper *k, const char *socket_path, int ready_fd)
{
    bool stored = k->table.stored;
    int rc;
    for (int i = 0; i < CONNECTIONS_MAX; i++)
        k->connection[i] = (struct connection){.fd = -1, .got = -1};
    if (lg_raise_open_files() < 0)
        lg_log_error("goes on with few files"); /* lgsup has refused it */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    LG_TRY_GOTO(rc, watch_signals(&k->signals), out);
    LG_TRY_GOTO(rc, stored ? open_stored(k, socket_path) : listen_at(socket_path, &k->listener),
                out);
    if (!stored) k->path = socket_path; /* a stored one comes back, perhaps under another name */
    /* Whoever started us is dead. Its successor may have looked for strays at this path before we
     * were there, so nobody would ever end us. (Had the byte been written before that death, the path
     * would have been there, too, for the successor to find.) */
    if (ready_fd >= 0 && write(ready_fd, "", 1) < 0)
        lg_log(LG_WARN, "nobody waits for me: leaving");
    else
        loop(k);
    leave_path(k);
out:
    for (int i = 0; i < CONNECTIONS_MAX; i++)
        if (k->connection[i].fd >= 0) hang_up(k, &k->connection[i]);
    if (k->listener >= 0) close(k->listener);
    if (k->signals >= 0) close(k->signals);
    return rc;
}

static int open_and_serve(const char *socket_path, int ready_fd, bool stored)
{
    static struct keeper k; /* 130 KiB; one per process */
    k = (struct keeper){.listener = -1, .signals = -1};
    LG_TRY(lg_table_open(&k.table, stored));
    int rc = serve(&k, socket_path, ready_fd);
    lg_table_close(&k.table); /* ending is not forgetting: the store keeps what it has */
    return rc;
}

int lg_keeper_serve(const char *socket_path, int ready_fd)
{
    LG_TRY(open_and_serve(socket_path, ready_fd, false));
    return 0;
}

int lg_keeper_serve_stored(const char *socket_path)
{
    LG_TRY(open_and_serve(socket_path, -1, true));
    return 0;
}
