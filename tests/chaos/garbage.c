/* Messages that nobody of ours would send, to every socket of a run: bytes that are no ZeroMQ, ZeroMQ
 * messages that are no msgpack, msgpack that is cut or has one field out of range, requests to the
 * keeper that are too short, too long or of an unknown kind. A message that happens to be a valid
 * one is not sent: it might rightly stop the run. */
#include "base/clock.h"
#include "bus/message.h"
#include "shm/keeper_wire.h"
#include "tests/chaos/chaos.h"
#include <dirent.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

enum { BYTES_MAX = 700, MESSAGES = 12, LINGER_MS = 20 };

static size_t random_bytes(struct chaos_run *r, unsigned char *p, size_t max)
{
    size_t n = 1 + chaos_draw(r, (uint32_t)max);
    for (size_t i = 0; i < n; i++) p[i] = (unsigned char)chaos_draw(r, 256);
    return n;
}

static int connect_raw(const char *path, int type)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof a.sun_path) return -1;
    strcpy(a.sun_path, path);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

static void send_raw(struct chaos_run *r, const char *path)
{
    unsigned char bytes[BYTES_MAX];
    static const unsigned char greeting[] = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3};
    int fd = connect_raw(path, SOCK_STREAM);
    if (fd < 0) return;
    size_t n = random_bytes(r, bytes, BYTES_MAX);
    if (chaos_draw(r, 2)) memcpy(bytes, greeting, LG_MIN(n, sizeof greeting)); /* looks like ZMTP */
    if (send(fd, bytes, n, MSG_NOSIGNAL) > 0) r->garbage++;
    close(fd);
}

static void ask_keeper(struct chaos_run *r, const char *path)
{
    unsigned char bytes[BYTES_MAX];
    int fd = connect_raw(path, SOCK_SEQPACKET);
    if (fd < 0) return;
    size_t n = random_bytes(r, bytes, BYTES_MAX);
    if (chaos_draw(r, 2)) { /* the right size and magic, nothing else */
        struct lg_keeper_message m;
        random_bytes(r, (unsigned char *)&m, sizeof m);
        m.magic = LG_KEEPER_MAGIC;
        m.op = LG_KEEPER_DROP + 1 + chaos_draw(r, 1000);
        memcpy(bytes, &m, sizeof m);
        n = sizeof m;
    }
    if (send(fd, bytes, n, MSG_NOSIGNAL) > 0) r->garbage++;
    close(fd);
}

/* A valid message, then cut, or with one byte changed, or something else altogether. */
static size_t spoil(struct chaos_run *r, unsigned char *p)
{
    struct lg_message m = {.kind = LG_MESSAGE_event,
                           .role = (lg_role)chaos_draw(r, LG_ROLE_COUNT),
                           .index = (int)chaos_draw(r, 4),
                           .incarnation = chaos_draw(r, 4096),
                           .level = (int)chaos_draw(r, 4)};
    snprintf(m.text, sizeof m.text, "not meant");
    switch (chaos_draw(r, 3)) {
    case 0:
        return chaos_draw(r, (uint32_t)lg_message_pack(&m, p));
    case 1: {
        size_t n = lg_message_pack(&m, p);
        p[chaos_draw(r, (uint32_t)n)] ^= (unsigned char)(1u << chaos_draw(r, 8));
        return n;
    }
    default:
        return random_bytes(r, p, BYTES_MAX);
    }
}

static void send_spoiled(struct chaos_run *r, void *socket)
{
    unsigned char bytes[BYTES_MAX];
    struct lg_message parsed;
    for (int i = 0; i < MESSAGES; i++) {
        size_t n = spoil(r, bytes);
        if (lg_message_unpack(bytes, n, &parsed) == 0) continue;
        lg_err_clear();
        int more = chaos_draw(r, 4) == 0 ? ZMQ_SNDMORE : 0;
        if (zmq_send(socket, bytes, n, ZMQ_DONTWAIT | more) >= 0) r->garbage++;
    }
    zmq_send(socket, "", 0, ZMQ_DONTWAIT); /* ends an open multi-part message */
    lg_err_clear();
}

static void send_zmq(struct chaos_run *r, const char *path, int type)
{
    char address[LG_PATH_BYTES];
    int linger = LINGER_MS;
    void *context = zmq_ctx_new(), *socket = context ? zmq_socket(context, type) : NULL;
    if (socket && lg_path(address, "ipc://%s", path) == 0) {
        zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
        if (zmq_connect(socket, address) == 0) send_spoiled(r, socket);
    }
    if (socket) zmq_close(socket);
    if (context) zmq_ctx_term(context);
}

void chaos_garbage(struct chaos_run *r)
{
    char record[LG_PATH_BYTES + 16], path[LG_PATH_BYTES + 300], *dir_path;
    size_t n;
    snprintf(record, sizeof record, "%s/runtime", r->dir);
    if (lg_read_file(record, LG_PATH_BYTES - 1, &dir_path, &n) < 0) {
        lg_err_clear();
        return;
    }
    dir_path[strcspn(dir_path, "\n")] = 0;
    DIR *dir = opendir(dir_path);
    struct dirent *e;
    while (dir && (e = readdir(dir))) {
        if (e->d_name[0] == '.' || chaos_draw(r, 3) == 0) continue;
        snprintf(path, sizeof path, "%s/%s", dir_path, e->d_name);
        if (!strncmp(e->d_name, "keeper", 6))
            ask_keeper(r, path);
        else if (chaos_draw(r, 2))
            send_raw(r, path);
        else /* XPUB and ROUTER both hear what such a peer sends */
            send_zmq(r, path, !strcmp(e->d_name, "lgsup") ? ZMQ_DEALER : ZMQ_XSUB);
    }
    if (dir) closedir(dir);
    free(dir_path);
}
