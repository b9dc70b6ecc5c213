/* The keeper's clients: connect, ask, hear, disconnect. Every wait is bounded by the socket's own
 * timeouts. An answer that never comes leaves the caller with a question, not with a wrong belief:
 * put and drop may be asked again, get and list change nothing. */
#include "shm/keeper_wire.h"
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { WAIT_S_MAX = 5 };

int lg_keeper_address(const char *path, struct sockaddr_un *ret)
{
    size_t n = strlen(path);
    if (n == 0 || n > LG_SOCKET_PATH_MAX)
        return LG_FAIL(LG_ERR_CONFIG,
                       "the socket path \"%s\" has %zu bytes; Unix sockets allow 1 to %d: use a "
                       "shorter runtime directory",
                       path, n, LG_SOCKET_PATH_MAX);
    memset(ret, 0, sizeof *ret);
    ret->sun_family = AF_UNIX;
    memcpy(ret->sun_path, path, n + 1);
    return 0;
}

static int connect_to(const char *path, int *ret_fd)
{
    struct sockaddr_un address;
    LG_TRY(lg_keeper_address(path, &address));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) return LG_FAIL(LG_ERR_IO, "cannot make a socket: %s", strerror(errno));
    struct timeval limit = {.tv_sec = WAIT_S_MAX};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    int rc;
    do rc = connect(fd, (struct sockaddr *)&address, sizeof address);
    while (rc < 0 && errno == EINTR);
    if (rc < 0) {
        int e = errno;
        close(fd);
        if (e == EAGAIN)
            return LG_FAIL(LG_ERR_TIMEOUT, "the keeper at %s accepts nobody for %d s", path,
                           WAIT_S_MAX);
        return LG_FAIL(LG_ERR_IO, "no keeper listens at %s: %s", path, strerror(e));
    }
    *ret_fd = fd;
    return 0;
}

/* The kernel's word on who listens (since its listen()). Another user's process that squats on the
 * path must not be believed. */
static int peer_pid(const char *path, int s, int *ret_pid)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    if (getsockopt(s, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) < 0)
        return LG_FAIL(LG_ERR_IO, "SO_PEERCRED of %s: %s", path, strerror(errno));
    if (peer.uid != geteuid())
        return LG_FAIL(LG_ERR_IO,
                       "who listens at %s belongs to user %u, not to %u: not a keeper "
                       "of ours",
                       path, (unsigned)peer.uid, (unsigned)geteuid());
    *ret_pid = peer.pid;
    return 0;
}

static int no_answer(const char *path, int e)
{
    if (e == EAGAIN)
        return LG_FAIL(LG_ERR_TIMEOUT, "the keeper at %s does not answer within %d s", path,
                       WAIT_S_MAX);
    return LG_FAIL(LG_ERR_IO, "the keeper at %s went away: %s", path,
                   e ? strerror(e) : "connection closed");
}

/* fd: sent along (or -1). *ret_fd: the answer's fd or -1; the caller's. */
static int ask(const char *path, const struct lg_keeper_message *question, int fd,
               struct lg_keeper_message *ret, int *ret_fd)
{
    int s, pid, rc;
    LG_TRY(connect_to(path, &s));
    if ((rc = peer_pid(path, s, &pid)) < 0) {
        close(s);
        return rc;
    }
    rc = lg_keeper_send(s, question, fd, 0);
    if (rc == 0) rc = lg_keeper_receive(s, ret, ret_fd, 0);
    int e = errno;
    close(s);
    if (rc < 0) return no_answer(path, e);
    if (rc != (int)sizeof *ret || ret->magic != LG_KEEPER_MAGIC) {
        if (*ret_fd >= 0) close(*ret_fd);
        return rc ? LG_FAIL(LG_ERR_MISMATCH, "who listens at %s is not a keeper of this build",
                            path)
                  : no_answer(path, 0);
    }
    if (ret->code < 0 && *ret_fd >= 0) close(*ret_fd);
    return 0;
}

static int message_of(uint32_t op, const char *name, struct lg_keeper_message *ret)
{
    if (strlen(name) >= LG_REGION_NAME_BYTES)
        return LG_FAIL(LG_ERR_CONFIG, "the region name \"%.80s\" is longer than %d bytes", name,
                       LG_REGION_NAME_BYTES - 1);
    *ret = (struct lg_keeper_message){.magic = LG_KEEPER_MAGIC, .op = op};
    snprintf(ret->name, sizeof ret->name, "%s", name);
    return 0;
}

static int refused(const struct lg_keeper_message *answer, const char *name)
{
    switch (answer->code) {
    case LG_ERR_NOTFOUND:
        return LG_FAIL(LG_ERR_NOTFOUND, "the keeper has no region %s", name);
    case LG_ERR_BUSY:
        return LG_FAIL(LG_ERR_BUSY, "the keeper already has a region %s", name);
    case LG_ERR_NOSPACE:
        return LG_FAIL(LG_ERR_NOSPACE, "the keeper's table of %d regions is full (region %s)",
                       LG_KEEPER_REGIONS_MAX, name);
    default:
        return LG_FAIL(answer->code, "the keeper refuses region %s: %s", name,
                       lg_err_name(answer->code));
    }
}

int lg_keeper_put(const char *socket_path, const char *name, uint64_t bytes, int fd)
{
    struct lg_keeper_message q, a;
    int got = -1;
    LG_TRY(message_of(LG_KEEPER_PUT, name, &q));
    q.bytes = bytes;
    LG_TRY(ask(socket_path, &q, fd, &a, &got));
    if (got >= 0) close(got);
    return a.code < 0 ? refused(&a, name) : a.code;
}

int lg_keeper_get(const char *socket_path, const char *name, uint64_t *ret_bytes, int *ret_fd)
{
    struct lg_keeper_message q, a;
    int got = -1;
    LG_TRY(message_of(LG_KEEPER_GET, name, &q));
    LG_TRY(ask(socket_path, &q, -1, &a, &got));
    if (a.code < 0) return refused(&a, name);
    if (got < 0)
        return LG_FAIL(LG_ERR_IO,
                       "the fd of region %s was lost on its way: too many open files here?", name);
    *ret_bytes = a.bytes;
    *ret_fd = got;
    return a.code;
}

int lg_keeper_list(const char *socket_path, int k, char ret_name[LG_REGION_NAME_BYTES],
                   uint64_t *ret_bytes)
{
    struct lg_keeper_message q, a;
    int got = -1;
    LG_TRY(message_of(LG_KEEPER_LIST, "", &q));
    q.k = k;
    LG_TRY(ask(socket_path, &q, -1, &a, &got));
    if (got >= 0) close(got);
    if (a.code < 0) return refused(&a, "(list)");
    a.name[LG_REGION_NAME_BYTES - 1] = 0;
    memcpy(ret_name, a.name, LG_REGION_NAME_BYTES);
    *ret_bytes = a.bytes;
    return 0;
}

int lg_keeper_drop(const char *socket_path, const char *name)
{
    struct lg_keeper_message q, a;
    int got = -1;
    LG_TRY(message_of(LG_KEEPER_DROP, name, &q));
    LG_TRY(ask(socket_path, &q, -1, &a, &got));
    if (got >= 0) close(got);
    return a.code < 0 ? refused(&a, name) : 0;
}

int lg_keeper_pid(const char *socket_path, int *ret_pid)
{
    int s;
    LG_TRY(connect_to(socket_path, &s));
    int rc = peer_pid(socket_path, s, ret_pid);
    close(s);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
