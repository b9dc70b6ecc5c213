/* The line between supervisors: who is heard, and what strangers get and slow down. Machines are addresses of the loopback
 * interface (127.0.0.1, 127.0.0.2, ...), sockets are real. */
#include "base/clock.h"
#include "base/fs.h"
#include "supervisor/hosts/channel.h"
#include "tests/unit/scratch.h"
#include <arpa/inet.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include <cmocka.h>

enum {
    SILENCE_MS = 600,
    STRANGERS = 10000,
    OPEN_MAX =
        3000, /* of them at once: more than the server may have at the same time is not needed */
    RECORD_BYTES = 1 << 16
};

static struct lg_cluster_key g_key, g_other;
static int g_port; /* of this process: programs of several builds run at once */
static char g_address[LG_PLACES_MAX][LG_HOST_ADDRESS_BYTES] = {"127.0.0.1", "127.0.0.2"};

static struct lg_cluster_key new_key(void)
{
    struct lg_cluster_key k;
    assert_int_equal(zmq_curve_keypair(k.public_, k.secret), 0);
    return k;
}

static int setup(void **state)
{
    (void)state;
    g_key = new_key();
    g_other = new_key();
    assert_true(lg_raise_open_files() <= 0);
    lg_err_clear();
    return 0;
}

static lg_channel *open_at(int place, const struct lg_cluster_key *key, int port)
{
    lg_channel *c = NULL;
    struct lg_channel_spec s = {.place = place,
                                .places = 2,
                                .port = port,
                                .address = g_address,
                                .key = *key,
                                .silence_ms = SILENCE_MS};
    if (lg_channel_open(&s, &c) < 0) fail_msg("%s", lg_err_message());
    return c;
}

/* Sends a number again and again until it has come, for at most `ms`. Returns how long it took in ms; -1: it has not
 * come. Whatever else comes is counted. */
static int g_others;
static int passes(lg_channel *from, lg_channel *to, int place, int ms)
{
    static uint32_t number;
    const uint32_t wanted = ++number;
    const int64_t began_ns = lg_now_ns();
    uint32_t got[2];
    for (int64_t sent_ns = 0; lg_now_ns() - began_ns < ms * LG_MS_NS;) {
        if (lg_now_ns() - sent_ns > 20 * LG_MS_NS) {
            lg_channel_send(from, place, &wanted, sizeof wanted);
            sent_ns = lg_now_ns();
        }
        lg_channel_wait(to, -1, 5);
        for (size_t n; (n = lg_channel_receive(to, got, sizeof got)) > 0;) {
            if (n == sizeof wanted && got[0] == wanted)
                return (int)((lg_now_ns() - began_ns) / LG_MS_NS);
            g_others += n != sizeof wanted || got[0] > wanted;
        }
    }
    return -1;
}

static void test_two_hear_each_other(void **state)
{
    (void)state;
    lg_channel *a = open_at(0, &g_key, g_port), *b = open_at(1, &g_key, g_port);
    assert_true(passes(a, b, 1, 5000) >= 0);
    assert_true(passes(b, a, 0, 5000) >= 0);
    lg_channel_close(&b); /* and one that comes again is heard again */
    b = open_at(1, &g_key, g_port);
    assert_true(passes(b, a, 0, 5000) >= 0);
    assert_true(passes(a, b, 1, 5000) >= 0);
    lg_channel_close(&a);
    lg_channel_close(&b);
}

static void test_other_key_is_refused(void **state)
{
    (void)state;
    char who[LG_HOST_ADDRESS_BYTES];
    lg_channel *a = open_at(0, &g_key, g_port), *b = open_at(1, &g_other, g_port);
    assert_int_equal(passes(b, a, 0, 1500), -1);
    assert_int_equal(passes(a, b, 1, 500), -1);
    /* Knowing the public half alone does not help, with a pair of one's own. */
    lg_channel_close(&b);
    struct lg_cluster_key half = g_other;
    memcpy(half.public_, g_key.public_, sizeof half.public_);
    b = open_at(1, &half, g_port);
    assert_int_equal(passes(b, a, 0, 1500), -1);
    lg_channel_close(&b);
    /* A client that knows the server's public key, and proves a pair of its own: our handler refuses it. */
    void *context = zmq_ctx_new(), *s = zmq_socket(context, ZMQ_DEALER);
    int no = 0;
    zmq_setsockopt(s, ZMQ_LINGER, &no, sizeof no);
    assert_int_equal(zmq_setsockopt(s, ZMQ_CURVE_SERVERKEY, g_key.public_, LG_KEY_TEXT), 0);
    assert_int_equal(zmq_setsockopt(s, ZMQ_CURVE_PUBLICKEY, g_other.public_, LG_KEY_TEXT), 0);
    assert_int_equal(zmq_setsockopt(s, ZMQ_CURVE_SECRETKEY, g_other.secret, LG_KEY_TEXT), 0);
    char url[64];
    snprintf(url, sizeof url, "tcp://127.0.0.2:0;127.0.0.1:%d", g_port);
    assert_int_equal(zmq_connect(s, url), 0);
    int refused = 0;
    char got[8];
    for (int i = 0; i < 200 && !refused; i++) {
        zmq_send(s, "x", 1, ZMQ_DONTWAIT);
        lg_channel_wait(a, -1, 10);
        assert_int_equal(lg_channel_receive(a, got, sizeof got), 0);
        refused = lg_channel_refused(a, who);
    }
    assert_int_equal(refused, 1);
    assert_string_equal(who, "127.0.0.2");
    zmq_close(s);
    zmq_ctx_term(context);
    lg_channel_close(&a);
}

static int stranger(const char *from)
{
    struct sockaddr_in own = {.sin_family = AF_INET},
                       to = {.sin_family = AF_INET, .sin_port = htons(g_port)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    inet_pton(AF_INET, from, &own.sin_addr);
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    struct linger hard = {.l_onoff = 1}; /* no port stays taken after its end */
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    if (bind(fd, (struct sockaddr *)&own, sizeof own) < 0 ||
        connect(fd, (struct sockaddr *)&to, sizeof to) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* 10,000 connections, from another machine and from one of the list (without its key), most with garbage; two hosts
 * hear each other all the time. */
static void test_strangers_slow_nothing(void **state)
{
    (void)state;
    static int fd[OPEN_MAX];
    unsigned char garbage[512];
    int slowest = 0, made = 0, open = 0, answered = 0;
    lg_channel *a = open_at(0, &g_key, g_port), *b = open_at(1, &g_key, g_port);
    assert_true(passes(b, a, 0, 5000) >= 0);
    g_others = 0;
    for (int i = 0; i < OPEN_MAX; i++) fd[i] = -1;
    for (size_t i = 0; i < sizeof garbage; i++) garbage[i] = (unsigned char)(i * 167 + 13);
    for (int i = 0; i < STRANGERS; i++) {
        int *place = &fd[i % OPEN_MAX];
        if (*place >= 0) close(*place);
        *place = stranger(i % 2 ? "127.0.0.3" : "127.0.0.2");
        made += *place >= 0;
        open += *place >= 0;
        if (i % 3 && *place >= 0)
            (void)!send(*place, garbage + i % 64, 1 + (size_t)i % 400, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (i % 100) continue;
        const int ms = passes(b, a, 0, 3000);
        if (ms < 0) fail_msg("not heard any more after %d strangers", i);
        slowest = LG_MAX(slowest, ms);
    }
    print_message("%d connections of strangers, a message took at most %d ms\n", made, slowest);
    assert_true(made > STRANGERS * 9 / 10);
    assert_true(slowest < SILENCE_MS);
    for (int i = 0; i < OPEN_MAX; i++) {
        unsigned char got[256];
        if (fd[i] < 0) continue;
        /* Of the list: at most a greeting, 64 bytes of ZMTP. Others: nothing. */
        const ssize_t n = recv(fd[i], got, sizeof got, MSG_DONTWAIT);
        answered += n > 64;
        close(fd[i]);
    }
    assert_int_equal(answered, 0);
    assert_int_equal(g_others, 0);
    assert_true(passes(b, a, 0, 3000) >= 0 && passes(a, b, 1, 3000) >= 0);
    lg_channel_close(&a);
    lg_channel_close(&b);
}

/* Between a host and the other, in the middle: records what the one sends. */
struct relay {
    int listener, in, out;
    unsigned char record[RECORD_BYTES];
    size_t bytes;
};

static int bound(const char *address, int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    inet_pton(AF_INET, address, &at.sin_addr);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    return fd;
}

static void relay_turn(struct relay *r)
{
    unsigned char data[4096];
    struct pollfd p[] = {{.fd = r->in < 0 ? r->listener : r->in, .events = POLLIN},
                         {.fd = r->out, .events = POLLIN}};
    poll(p, 2, 2);
    if (p[0].revents && r->in < 0) {
        r->in = accept(r->listener, NULL, NULL);
        r->out = stranger("127.0.0.2");
    } else if (p[0].revents) {
        const ssize_t n = recv(r->in, data, sizeof data, MSG_DONTWAIT);
        if (n > 0 && r->bytes + (size_t)n <= sizeof r->record) {
            memcpy(r->record + r->bytes, data, (size_t)n);
            r->bytes += (size_t)n;
            (void)!send(r->out, data, (size_t)n, MSG_NOSIGNAL);
        }
    }
    if (p[1].revents) {
        const ssize_t n = recv(r->out, data, sizeof data, MSG_DONTWAIT);
        if (n > 0) (void)!send(r->in, data, (size_t)n, MSG_NOSIGNAL);
    }
}

/* Everything that a host has sent, sent once more by somebody else: nothing is heard. */
static void test_replay(void **state)
{
    (void)state;
    static struct relay r = {.in = -1, .out = -1};
    char got[64];
    lg_channel *a = open_at(0, &g_key, g_port);
    strcpy(g_address[0], "127.0.0.9"); /* where b believes a to be */
    r.listener = bound("127.0.0.9", g_port);
    assert_int_equal(listen(r.listener, 4), 0);
    lg_channel *b = open_at(1, &g_key, g_port);
    strcpy(g_address[0], "127.0.0.1");
    int heard = 0;
    for (int i = 0; i < 2000 && heard < 3; i++) {
        lg_channel_send(b, 0, "beat", 5);
        relay_turn(&r);
        lg_channel_wait(a, -1, 1);
        heard += lg_channel_receive(a, got, sizeof got) == 5;
    }
    assert_true(heard >= 3);
    lg_channel_close(&b);
    close(r.in);
    close(r.out);
    close(r.listener);
    for (int quiet = 0; quiet < 50;
         quiet++) { /* what the host itself had sent is still on its way */
        lg_channel_wait(a, -1, 5);
        if (lg_channel_receive(a, got, sizeof got)) quiet = 0;
    }
    for (int again = 0; again < 3; again++) {
        const int fd = stranger("127.0.0.2");
        assert_true(fd >= 0 && r.bytes > 500);
        for (size_t at = 0; at < r.bytes; at += 64) {
            (void)!send(fd, r.record + at, LG_MIN((size_t)64, r.bytes - at), MSG_NOSIGNAL);
            lg_channel_wait(a, -1, 2);
            assert_int_equal(lg_channel_receive(a, got, sizeof got), 0);
        }
        for (int i = 0; i < 50; i++) {
            lg_channel_wait(a, -1, 5);
            assert_int_equal(lg_channel_receive(a, got, sizeof got), 0);
        }
        close(fd);
    }
    lg_channel_close(&a);
}

/* A machine does not read for a while, more comes than it queues, and who has sent it goes: it hears the next one. */
static void test_reads_late(void **state)
{
    (void)state;
    static char beat[LG_CHANNEL_BYTES / 4];
    lg_channel *a = open_at(0, &g_key, g_port), *b = open_at(1, &g_key, g_port);
    assert_true(passes(b, a, 0, 5000) >= 0);
    int sent = 0;
    for (int i = 0; i < 200; i++) {
        sent += lg_channel_send(b, 0, beat, sizeof beat);
        usleep(1000);
    }
    assert_true(sent > 32); /* queues have room for less */
    lg_channel_close(&b);
    usleep(3 * SILENCE_MS * 1000);
    b = open_at(1, &g_key, g_port);
    assert_true(passes(b, a, 0, 5000) >= 0);
    lg_channel_close(&a);
    lg_channel_close(&b);
}

static void test_longer_than_a_message(void **state)
{
    (void)state;
    char *much = calloc(1, LG_CHANNEL_BYTES), got[16];
    lg_channel *a = open_at(0, &g_key, g_port), *b = open_at(1, &g_key, g_port);
    assert_true(passes(b, a, 0, 5000) >= 0);
    lg_channel_send(b, 0, much, LG_CHANNEL_BYTES);
    size_t n = 0;
    for (int i = 0; i < 500 && n != sizeof got; i++) { /* numbers may still come before it */
        lg_channel_wait(a, -1, 5);
        n = lg_channel_receive(a, got, sizeof got);
    }
    assert_int_equal(n, sizeof got); /* cut to the room that there is */
    free(much);
    lg_channel_close(&a);
    lg_channel_close(&b);
}

static void test_key_file(void **state)
{
    (void)state;
    struct lg_cluster_key k;
    scratch_make();
    const char *path = scratch_path("cluster.key");
    assert_int_equal(lg_cluster_key_load(path, &k), LG_ERR_NOTFOUND);
    assert_int_equal(lg_cluster_key_make(path), 0);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    assert_int_equal(lg_cluster_key_load(path, &k), 0);
    assert_int_equal(lg_cluster_key_make(path), LG_ERR_BUSY); /* hosts may use it */
    assert_int_equal(chmod(path, 0640), 0);
    assert_int_equal(lg_cluster_key_load(path, &k), LG_ERR_CONFIG);
    assert_int_equal(chmod(path, 0600), 0);
    FILE *f = fopen(path, "w"); /* halves of two pairs */
    fprintf(f, "public = \"%s\"\nsecret = \"%s\"\n", g_key.public_, g_other.secret);
    fclose(f);
    assert_int_equal(lg_cluster_key_load(path, &k), LG_ERR_CONFIG);
    f = fopen(path, "w");
    fputs("public = \"short\"\n", f);
    fclose(f);
    assert_int_equal(lg_cluster_key_load(path, &k), LG_ERR_CONFIG);
    lg_err_clear();
    scratch_remove();
}

int main(void)
{
    g_port = 10000 + (int)getpid() % 20000;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_two_hear_each_other),
                                       cmocka_unit_test(test_other_key_is_refused),
                                       cmocka_unit_test(test_longer_than_a_message),
                                       cmocka_unit_test(test_reads_late),
                                       cmocka_unit_test(test_replay),
                                       cmocka_unit_test(test_strangers_slow_nothing),
                                       cmocka_unit_test(test_key_file)};
    return cmocka_run_group_tests(tests, setup, NULL);
}
