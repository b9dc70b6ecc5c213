/* The listener; see prometheus.h. The text it serves: prometheus_text.c. */
#include "supervisor/views/prometheus.h"
#include "base/clock.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int lg_prometheus_open(int port, lg_prometheus *ret)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return LG_FAIL(LG_ERR_IO, "socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) < 0 ||
        listen(fd, LG_PROMETHEUS_CLIENTS_MAX) < 0) {
        int bad = errno;
        close(fd);
        return LG_FAIL(bad == EADDRINUSE ? LG_ERR_BUSY : LG_ERR_IO,
                       "cannot listen at 127.0.0.1:%d (supervisor.prometheus_port): %s", port,
                       strerror(bad));
    }
    *ret = (lg_prometheus){.open = true, .fd = fd};
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++) ret->client[i].fd = -1;
    return 0;
}

static void hang_up(struct lg_prometheus_client *c)
{
    if (c->fd >= 0) close(c->fd);
    free(c->answer);
    c->fd = -1;
    c->answer = NULL;
}

void lg_prometheus_close(lg_prometheus *p)
{
    if (!p->open) return;
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++) hang_up(&p->client[i]);
    close(p->fd);
    p->open = false;
}

static struct lg_prometheus_client *free_client(lg_prometheus *p)
{
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++)
        if (p->client[i].fd < 0) return &p->client[i];
    return NULL;
}

int lg_prometheus_poll(const lg_prometheus *p, struct pollfd ret[LG_PROMETHEUS_FDS_MAX])
{
    int n = 0;
    if (!p->open) return 0;
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++) {
        const struct lg_prometheus_client *c = &p->client[i];
        if (c->fd < 0) continue;
        ret[n++] = (struct pollfd){.fd = c->fd, .events = c->answer ? POLLOUT : POLLIN};
    }
    /* With every place taken the others wait in the listener's queue. */
    if (n < LG_PROMETHEUS_CLIENTS_MAX) ret[n++] = (struct pollfd){.fd = p->fd, .events = POLLIN};
    return n;
}

static void accept_some(lg_prometheus *p)
{
    for (struct lg_prometheus_client *c; (c = free_client(p));) {
        int fd = accept4(p->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return;
        c->fd = fd;
        c->request_bytes = c->answer_bytes = c->sent = 0;
        c->deadline_ns = lg_now_ns() + LG_PROMETHEUS_CLIENT_MS_MAX * LG_MS_NS;
    }
}

/* Takes body over. */
static void set_answer(struct lg_prometheus_client *c, const char *status, char *body, bool head)
{
    int n = -1;
    if (body)
        n = asprintf(&c->answer,
                     "HTTP/1.0 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                     "Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
                     status, strlen(body), head ? "" : body);
    free(body);
    if (n < 0) {
        c->answer = NULL;
        hang_up(c);
        return;
    }
    c->answer_bytes = (size_t)n;
}

static void make_answer(struct lg_prometheus_client *c, const lg_run *run, lg_board *b)
{
    char method[8], path[256];
    if (sscanf(c->request, "%7s %255s", method, path) != 2)
        set_answer(c, "400 Bad Request", strdup("this is no HTTP request\n"), false);
    else if (strcmp(method, "GET") && strcmp(method, "HEAD"))
        set_answer(c, "405 Method Not Allowed", strdup("only GET and HEAD\n"), false);
    else if (strcmp(path, "/metrics") && strncmp(path, "/metrics?", 9))
        set_answer(c, "404 Not Found", strdup("the figures are at /metrics\n"), false);
    else
        set_answer(c, "200 OK", lg_prometheus_text(run, b), method[0] == 'H');
}

/* False: the connection is gone. */
static bool take_request(struct lg_prometheus_client *c, const lg_run *run, lg_board *b)
{
    size_t room = sizeof c->request - 1 - c->request_bytes;
    ssize_t n = recv(c->fd, c->request + c->request_bytes, room, 0);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return false;
    c->request_bytes += (size_t)n;
    c->request[c->request_bytes] = 0;
    if (memchr(c->request, 0, c->request_bytes)) return false;
    if (strstr(c->request, "\r\n\r\n") || strstr(c->request, "\n\n"))
        make_answer(c, run, b);
    else if (c->request_bytes == sizeof c->request - 1)
        set_answer(c, "431 Request Header Fields Too Large", strdup("too long\n"), false);
    return c->fd >= 0;
}

/* False: all is sent, or the connection is gone. */
static bool send_answer(struct lg_prometheus_client *c)
{
    ssize_t n = send(c->fd, c->answer + c->sent, c->answer_bytes - c->sent, MSG_NOSIGNAL);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    c->sent += (size_t)n;
    return c->sent < c->answer_bytes;
}

void lg_prometheus_serve(lg_prometheus *p, const lg_run *run, lg_board *b)
{
    if (!p->open) return;
    accept_some(p);
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++) {
        struct lg_prometheus_client *c = &p->client[i];
        if (c->fd < 0) continue;
        bool stays = lg_now_ns() < c->deadline_ns;
        if (stays && !c->answer) stays = take_request(c, run, b);
        if (stays && c->answer) stays = send_answer(c);
        if (!stays) hang_up(c);
    }
}
