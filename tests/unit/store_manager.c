/* See store_manager.h. */
#include "tests/unit/store_manager.h"
#include "base/check.h"
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { HIGH_FD = 200 };

static const char *field(const char *text, const char *key, char ret[STORE_NAME_BYTES])
{
    const char *at = strstr(text, key);
    if (!at) return NULL;
    at += strlen(key);
    snprintf(ret, STORE_NAME_BYTES, "%.*s", (int)strcspn(at, "\n"), at);
    return ret;
}

void store_manager_add(struct store_manager *m, const char *name, int fd)
{
    pthread_mutex_lock(&m->mutex);
    LG_ASSERT(m->n_stored < STORE_FDS_MAX);
    for (int i = 0; i < m->n_stored; i++)
        if (strcmp(m->stored[i].name, name) == 0) m->doubled = true;
    snprintf(m->stored[m->n_stored].name, STORE_NAME_BYTES, "%s", name);
    m->stored[m->n_stored++].fd = fd;
    pthread_mutex_unlock(&m->mutex);
}

/* name NULL: all. */
static void drop(struct store_manager *m, const char *name)
{
    pthread_mutex_lock(&m->mutex);
    for (int i = m->n_stored - 1; i >= 0; i--) {
        if (name && strcmp(m->stored[i].name, name) != 0) continue;
        close(m->stored[i].fd);
        m->stored[i] = m->stored[--m->n_stored];
    }
    pthread_mutex_unlock(&m->mutex);
}

void store_manager_clear(struct store_manager *m)
{
    drop(m, NULL);
}

void store_manager_deafen(struct store_manager *m)
{
    m->deaf = true;
    while (!m->is_deaf) usleep(1000);
}

int store_manager_count(struct store_manager *m)
{
    pthread_mutex_lock(&m->mutex);
    int n = m->n_stored;
    pthread_mutex_unlock(&m->mutex);
    return n;
}

static void obey(struct store_manager *m, const char *text, int fd)
{
    char name[STORE_NAME_BYTES];
    if (strstr(text, "FDSTORE=1")) {
        LG_ASSERT(field(text, "FDNAME=", name));
        snprintf(m->last_store, sizeof m->last_store, "%s", text);
        store_manager_add(m, name, fd);
        return;
    }
    if (strstr(text, "FDSTOREREMOVE=1") && field(text, "FDNAME=", name)) drop(m, name);
    if (strstr(text, "READY=1")) m->ready = true;
    if (strstr(text, "BARRIER=1")) {
        while (m->hold && !m->over && !m->let) usleep(1000);
        if (m->let) m->let--;
        m->n_barriers++;
    }
    if (fd >= 0) close(fd);
}

static void *manage(void *arg)
{
    struct store_manager *m = arg;
    while (!m->over) {
        char text[512];
        union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct iovec io = {.iov_base = text, .iov_len = sizeof text - 1};
        struct msghdr h = {.msg_iov = &io,
                           .msg_iovlen = 1,
                           .msg_control = control.bytes,
                           .msg_controllen = sizeof control.bytes};
        struct pollfd p = {.fd = m->socket, .events = POLLIN};
        m->is_deaf = m->deaf;
        if (m->is_deaf) usleep(1000);
        if (m->is_deaf || poll(&p, 1, 20) <= 0) continue;
        ssize_t n = recvmsg(m->socket, &h, MSG_CMSG_CLOEXEC);
        if (n < 0) continue;
        text[n] = 0;
        int fd = -1;
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        if (c && c->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(c), sizeof fd);
        obey(m, text, fd);
    }
    return arg;
}

/* Where a test lets pthread_create fail (tests/sim/faults.c), that is for the code that it tests. */
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *),
                          void *arg) __attribute__((weak));
#define create_thread (__real_pthread_create ? __real_pthread_create : pthread_create)

void store_manager_start(struct store_manager *m, const char *dir)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    *m = (struct store_manager){.mutex = PTHREAD_MUTEX_INITIALIZER};
    snprintf(m->path, sizeof m->path, "%.90s/notify", dir);
    snprintf(at.sun_path, sizeof at.sun_path, "%s", m->path);
    m->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    LG_ASSERT(bind(m->socket, (struct sockaddr *)&at, sizeof at) == 0);
    LG_ASSERT(create_thread(&m->thread, NULL, manage, m) == 0);
    setenv("NOTIFY_SOCKET", m->path, 1);
}

void store_manager_stop(struct store_manager *m)
{
    m->over = true;
    pthread_join(m->thread, NULL);
    close(m->socket);
    store_manager_clear(m);
    unsetenv("NOTIFY_SOCKET");
}

void store_manager_pass(struct store_manager *m)
{
    char names[STORE_FDS_MAX * STORE_NAME_BYTES] = "", number[16];
    for (int i = 0; i < m->n_stored; i++) {
        LG_ASSERT(fcntl(m->stored[i].fd, F_DUPFD, HIGH_FD + i) == HIGH_FD + i);
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ":" : "",
                 m->stored[i].name);
    }
    for (int i = 0; i < m->n_stored; i++) LG_ASSERT(dup2(HIGH_FD + i, 3 + i) == 3 + i);
    snprintf(number, sizeof number, "%d", m->n_stored);
    setenv("LISTEN_FDS", number, 1);
    setenv("LISTEN_FDNAMES", names, 1);
    snprintf(number, sizeof number, "%d", (int)getpid());
    setenv("LISTEN_PID", number, 1);
}
