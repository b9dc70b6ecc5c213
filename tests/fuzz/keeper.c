/* Fuzz target: requests to a keeper, well formed and not, with no, one or several descriptors. The
 * keeper serves in a thread and is ended after each input; no descriptor may be left open.
 *
 * Input: requests: what, 1 byte; op, 1 byte; k, 2 bytes; size, 2 bytes; length of the name, 1 byte;
 * name. Bits of `what`: 0-1 number of descriptors (3: five of them), 2 wrong magic, 3 `size` bytes of
 * the name alone are sent instead of a request, 4 connect anew before, 5 do not wait for the answer. */
#include "shm/keeper.h"
#include "shm/keeper_wire.h"
#include "tests/fuzz/fuzz.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { REQUESTS_MAX = 32, FDS_MAX = 5, ANSWER_S = 5 };

struct server {
    char path[LG_SOCKET_PATH_MAX + 1];
    int ready;
    pthread_t thread;
};

static void *serve(void *arg)
{
    struct server *s = arg;
    LG_ASSERT(lg_keeper_serve(s->path, s->ready) == 0);
    lg_err_clear();
    return NULL;
}

static void start(struct server *s)
{
    int p[2];
    char byte;
    int n = snprintf(s->path, sizeof s->path, "%s/keeper", lg_fuzz_dir());
    LG_ASSERT(n < (int)sizeof s->path && pipe2(p, O_CLOEXEC) == 0);
    s->ready = p[1];
    LG_ASSERT(pthread_create(&s->thread, NULL, serve, s) == 0);
    LG_ASSERT(read(p[0], &byte, 1) == 1);
    close(p[0]);
    close(p[1]);
}

static int connect_to(const struct server *s)
{
    struct sockaddr_un address;
    struct timeval limit = {.tv_sec = ANSWER_S};
    LG_ASSERT(lg_keeper_address(s->path, &address) == 0);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    LG_ASSERT(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    LG_ASSERT(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    return fd;
}

/* False when the keeper has hung up. */
static bool send_raw(int socket, const void *data, size_t bytes, int n_fds)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
    } control = {0};
    struct iovec io = {.iov_base = (void *)data, .iov_len = bytes};
    struct msghdr h = {.msg_iov = &io, .msg_iovlen = 1};
    int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    LG_ASSERT(fd >= 0);
    if (n_fds) {
        h.msg_control = control.bytes;
        h.msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof fd);
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        *c = (struct cmsghdr){.cmsg_level = SOL_SOCKET,
                              .cmsg_type = SCM_RIGHTS,
                              .cmsg_len = CMSG_LEN((size_t)n_fds * sizeof fd)};
        for (int i = 0; i < n_fds; i++)
            memcpy(CMSG_DATA(c) + (size_t)i * sizeof fd, &fd, sizeof fd);
    }
    bool sent = sendmsg(socket, &h, MSG_NOSIGNAL) >= 0;
    close(fd);
    return sent;
}

/* False when the keeper has hung up, as it must after a bad request. */
static bool check_answer(int socket, bool good, uint32_t op)
{
    struct lg_keeper_message a;
    int fd = -1, n = lg_keeper_receive(socket, &a, &fd, 0);
    if (n > 0) {
        LG_ASSERT(good && n == (int)sizeof a && a.magic == LG_KEEPER_MAGIC && a.op == op);
        LG_ASSERT(a.code <= 0 && memchr(a.name, 0, sizeof a.name));
        LG_ASSERT((fd >= 0) == (op == LG_KEEPER_GET && a.code == 0));
    } else {
        LG_ASSERT(!good && (n == 0 || errno == ECONNRESET));
    }
    if (fd >= 0) close(fd);
    return n > 0;
}

/* One request; *socket is -1 when none is connected. Returns false when the keeper was ended. */
static bool request(const struct server *s, struct lg_fuzz_input *in, int *socket)
{
    unsigned what = lg_fuzz_u8(in), op = lg_fuzz_u8(in);
    int16_t k = (int16_t)lg_fuzz_u16(in);
    unsigned size = lg_fuzz_u16(in), length = lg_fuzz_u8(in);
    size_t n;
    char *name = lg_fuzz_take(in, length, &n);
    struct lg_keeper_message q = {.magic = what & 4 ? 0 : LG_KEEPER_MAGIC, .op = op, .k = k};
    q.bytes = size;
    memcpy(q.name, name, LG_MIN(n, sizeof q.name));
    /* An empty packet reads as the end of the stream; there is none to send without content. */
    bool raw = what & 8;
    size_t bytes = raw ? LG_MAX((size_t)1, LG_MIN(n, (size_t)size)) : sizeof q;
    if (raw && bytes == sizeof q) memcpy(&q, name, sizeof q);
    bool good = bytes == sizeof q && q.magic == LG_KEEPER_MAGIC && memchr(q.name, 0, sizeof q.name);
    bool ends = good && q.op == LG_KEEPER_DROP && !q.name[0];
    if (*socket >= 0 && what & 16) close(*socket), *socket = -1;
    if (*socket < 0) *socket = connect_to(s);
    int n_fds = (what & 3) == 3 ? FDS_MAX : (int)(what & 3);
    bool sent = send_raw(*socket, raw ? (void *)name : &q, bytes, n_fds);
    free(name);
    bool leave = what & 32 && !ends;
    if (!sent || leave || !check_answer(*socket, good, q.op)) {
        close(*socket);
        *socket = -1;
    }
    return !ends;
}

LG_FUZZ_TARGET(keeper)
{
    struct lg_fuzz_input in = {data, bytes};
    struct server s;
    lg_fuzz_dir();
    int before = lg_fuzz_fds(), socket = -1;
    bool alive = true;
    sigset_t timer, old; /* libFuzzer's must not interrupt; every wait here has its own limit */
    sigemptyset(&timer);
    sigaddset(&timer, SIGALRM);
    LG_ASSERT(pthread_sigmask(SIG_BLOCK, &timer, &old) == 0);
    start(&s);
    for (int i = 0; alive && in.bytes && i < REQUESTS_MAX; i++) alive = request(&s, &in, &socket);
    if (socket >= 0) close(socket);
    if (alive) LG_ASSERT(lg_keeper_drop(s.path, "") == 0);
    LG_ASSERT(pthread_join(s.thread, NULL) == 0);
    LG_ASSERT(lg_fuzz_fds() == before);
    LG_ASSERT(pthread_sigmask(SIG_SETMASK, &old, NULL) == 0);
}
