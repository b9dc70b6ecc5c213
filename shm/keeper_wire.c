/* Sending and receiving one message with at most one fd. */
#include "shm/keeper_wire.h"
#include <string.h>
#include <unistd.h>

/* Room for more fds than asked for, so that a peer that sends several does not leave any open. */
enum { FDS_MAX = 4 };

union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
};

int lg_keeper_send(int socket, const struct lg_keeper_message *m, int fd, int flags)
{
    union control control;
    memset(&control, 0, sizeof control);
    struct iovec io = {.iov_base = (void *)m, .iov_len = sizeof *m};
    struct msghdr h = {.msg_iov = &io, .msg_iovlen = 1};
    if (fd >= 0) {
        h.msg_control = control.bytes;
        h.msg_controllen = CMSG_SPACE(sizeof fd);
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    ssize_t n;
    do n = sendmsg(socket, &h, MSG_NOSIGNAL | flags);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -1 : 0;
}

static void take_fds(struct msghdr *h, int *ret_fd)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(h); c; c = CMSG_NXTHDR(h, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (*ret_fd < 0)
                *ret_fd = fd;
            else
                close(fd);
        }
    }
}

int lg_keeper_receive(int socket, struct lg_keeper_message *ret, int *ret_fd, int flags)
{
    union control control;
    struct iovec io = {.iov_base = ret, .iov_len = sizeof *ret};
    struct msghdr h = {.msg_iov = &io,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    *ret_fd = -1;
    ssize_t n;
    do n = recvmsg(socket, &h, MSG_CMSG_CLOEXEC | flags);
    while (n < 0 && errno == EINTR);
    if (n < 0) return -1;
    take_fds(&h, ret_fd);
    if (h.msg_flags & MSG_TRUNC) return 1; /* longer than a message: a wrong length */
    return (int)n;
}
