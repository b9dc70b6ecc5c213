/* Links (kernels/link.h) of a device that is none, as TCP connections to the first address of this machine that is not
 * loopback's, or else to loopback. Who makes the id listens, and is the one who sends. As with the real ones, whoever has
 * lost the other side may never hear of it: a connection that ends is silence. */
#include "kernels/link.h"
#include "base/check.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct stub_id {
    struct sockaddr_in at;
    int listener; /* of the process that has made it */
};
_Static_assert(sizeof(struct stub_id) <= sizeof(struct lg_link_id), "an id");

struct stub_link {
    lg_link base;
    bool sends, is_silent;
    int listener, fd; /* -1: none, or not yet */
    size_t moved;     /* bytes of the first message that is not done */
};

static struct in_addr own_address(void)
{
    struct in_addr found = {.s_addr = htonl(INADDR_LOOPBACK)};
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) < 0) return found;
    for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET) continue;
        if (i->ifa_flags & IFF_LOOPBACK || !(i->ifa_flags & IFF_UP)) continue;
        found = ((const struct sockaddr_in *)(const void *)i->ifa_addr)->sin_addr;
        break;
    }
    freeifaddrs(all);
    return found;
}

static int link_new_id(lg_device *d, struct lg_link_id *ret)
{
    struct stub_id id = {.at = {.sin_family = AF_INET, .sin_addr = own_address()}};
    socklen_t n = sizeof id.at;
    (void)d;
    id.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (id.listener < 0 || bind(id.listener, (struct sockaddr *)&id.at, n) < 0 ||
        listen(id.listener, 1) < 0 || getsockname(id.listener, (struct sockaddr *)&id.at, &n) < 0)
        return LG_FAIL(LG_ERR_IO, "no link (stub): %s", strerror(errno));
    memset(ret, 0, sizeof *ret);
    memcpy(ret->bytes, &id, sizeof id);
    return 0;
}

static int link_open(lg_device *d, const struct lg_link_id *name, bool sends, lg_link **ret)
{
    struct stub_id id;
    struct stub_link *l = calloc(1, sizeof *l);
    (void)d;
    LG_ASSERT(l);
    memcpy(&id, name->bytes, sizeof id);
    *l = (struct stub_link){.sends = sends, .listener = sends ? id.listener : -1, .fd = -1};
    *ret = &l->base;
    if (sends) return 0;
    l->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    LG_ASSERT(l->fd >= 0);
    connect(l->fd, (struct sockaddr *)&id.at, sizeof id.at); /* what becomes of it, reading finds */
    return 0;
}

static void link_close(lg_link *base)
{
    struct stub_link *l = (struct stub_link *)base;
    if (l->fd >= 0) close(l->fd);
    if (l->listener >= 0) close(l->listener);
    free(l);
}

static ssize_t move(struct stub_link *l, char *at, size_t n)
{
    if (l->sends) return send(l->fd, at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
    const ssize_t got = recv(l->fd, at, n, MSG_DONTWAIT);
    if (got == 0) l->is_silent = true;
    return got;
}

static int link_progress(lg_link *base)
{
    struct stub_link *l = (struct stub_link *)base;
    if (l->fd < 0) l->fd = accept4(l->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    while (l->fd >= 0 && !l->is_silent && base->done < base->given) {
        const struct lg_link_place *p = &base->place[base->done % LG_LINK_DEPTH];
        const ssize_t n = move(l, (char *)p->data + l->moved, p->bytes - l->moved);
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOTCONN)
            l->is_silent = true;
        if (n <= 0) break;
        l->moved += (size_t)n;
        if (l->moved < p->bytes) continue;
        l->moved = 0;
        base->done++;
    }
    return 0;
}

extern const struct lg_link_calls lg_backend_links;
__attribute__((visibility("default"))) const struct lg_link_calls lg_backend_links = {
    .new_id = link_new_id, .open = link_open, .close = link_close, .progress = link_progress};
