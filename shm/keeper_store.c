/* See keeper_store.h. The messages are those of sd_notify(3), whose own functions wait until the
 * manager's queue has room.
 *
 * FDPOLL=0: a memfd or an exported GPU allocation has no end that could be polled for, and must not
 * be thrown out of the store by a guess. The barrier makes "stored" mean "survives me": the manager
 * reads notifications in order and closes the barrier's pipe when it has come to it. */
#include "shm/keeper_store.h"
#include "base/check.h"
#include "base/log.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

enum { STORED_NAME_BYTES = LG_REGION_NAME_BYTES + 24 };

bool lg_store_fits(const char *name)
{
    if (!*name) return false;
    for (const char *c = name; *c; c++)
        if (*c <= ' ' || *c >= 127 || *c == ':' || *c == '=') return false;
    return true;
}

int lg_store_open(struct lg_store *ret)
{
    const char *path = getenv("NOTIFY_SOCKET");
    *ret = (struct lg_store){.socket = -1, .at = {.sun_family = AF_UNIX}};
    if (!path || !*path) return 0;
    size_t n = strlen(path);
    if (n >= sizeof ret->at.sun_path || (*path != '/' && *path != '@'))
        return LG_FAIL(LG_ERR_CONFIG, "NOTIFY_SOCKET=%s is no socket's path", path);
    memcpy(ret->at.sun_path, path, n + 1);
    /* A name in the abstract namespace begins with a zero and does not end with one. */
    ret->at_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + (*path == '/'));
    if (*path == '@') ret->at.sun_path[0] = 0;
    ret->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (ret->socket < 0) return LG_FAIL(LG_ERR_IO, "cannot make a socket: %s", strerror(errno));
    return 0;
}

void lg_store_close(struct lg_store *s)
{
    if (s->socket >= 0) close(s->socket);
    s->socket = -1;
}

/* fd -1: none. */
static int tell(const struct lg_store *s, const char *text, int fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof fd)];
    } control = {0};
    struct iovec io = {.iov_base = (char *)text, .iov_len = strlen(text)};
    struct msghdr h = {
        .msg_name = (void *)&s->at, .msg_namelen = s->at_bytes, .msg_iov = &io, .msg_iovlen = 1};
    if (s->socket < 0) return LG_FAIL(LG_ERR_IO, "NOTIFY_SOCKET is not set");
    if (fd >= 0) {
        h.msg_control = control.bytes;
        h.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        *c = (struct cmsghdr){
            .cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    if (sendmsg(s->socket, &h, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return 0;
    switch (errno) {
    case EAGAIN:
    case EINTR:
    case ENOBUFS:
    case ENOMEM:
    case ETOOMANYREFS: /* fds on their way */
        return LG_ERR_BUSY;
    default:
        return LG_FAIL(LG_ERR_IO, "cannot speak to the service manager: %s", strerror(errno));
    }
}

int lg_store_put(const struct lg_store *s, const char *name, uint64_t bytes, int fd)
{
    char text[STORED_NAME_BYTES + 40];
    LG_ASSERT(lg_store_fits(name) && fd >= 0);
    snprintf(text, sizeof text, "FDSTORE=1\nFDPOLL=0\nFDNAME=%s=%" PRIu64, name, bytes);
    return tell(s, text, fd);
}

int lg_store_drop(const struct lg_store *s, const char *name, uint64_t bytes)
{
    char text[STORED_NAME_BYTES + 40];
    snprintf(text, sizeof text, "FDSTOREREMOVE=1\nFDNAME=%s=%" PRIu64, name, bytes);
    return tell(s, text, -1);
}

int lg_store_barrier(const struct lg_store *s, int *ret_fd)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC | O_NONBLOCK) < 0) return LG_ERR_BUSY; /* no fds now */
    int rc = tell(s, "BARRIER=1", fds[1]);
    close(fds[1]);
    if (rc < 0)
        close(fds[0]);
    else
        *ret_fd = fds[0];
    return rc;
}

int lg_store_ready(const struct lg_store *s, const char *status)
{
    char text[160];
    snprintf(text, sizeof text, "READY=1\nSTATUS=%s", status);
    return tell(s, text, -1);
}

/* "NAME=BYTES"; anything else in the store is not ours. */
static bool split(char *stored, uint64_t *ret_bytes)
{
    char *bytes = strrchr(stored, '='), *end;
    if (!bytes || bytes == stored || bytes - stored >= LG_REGION_NAME_BYTES) return false;
    *bytes++ = 0;
    errno = 0;
    *ret_bytes = strtoull(bytes, &end, 10);
    return errno == 0 && end != bytes && !*end && lg_store_fits(stored);
}

int lg_store_reclaim(void (*take)(void *arg, const char *name, uint64_t bytes, int fd), void *arg)
{
    char **names = NULL;
    int taken = 0, n = sd_listen_fds_with_names(1, &names);
    for (int i = 0; i < n; i++) {
        uint64_t bytes;
        int fd = SD_LISTEN_FDS_START + i;
        if (split(names[i], &bytes)) {
            take(arg, names[i], bytes, fd);
            taken++;
        } else {
            lg_log(LG_WARN, "the service manager's store has an fd that is no region: %s",
                   names[i]);
            close(fd);
        }
        free(names[i]);
    }
    free(names);
    return taken;
}
