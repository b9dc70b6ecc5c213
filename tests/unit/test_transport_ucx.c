/* The transport over UCX, between two of them in one process over loopback: what transport.h promises. */
#include "base/clock.h"
#include "stages/exchange/transport.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { WAIT_S = 20, LONG = 3 << 20, NOTES = 8 };

static const struct lg_transport_kind *const g_kind = &lg_transport_ucx;
static lg_transport *g_side[2];
static uint32_t g_port;
static const char *const g_address =
    "127.0.0.1"; /* of both: UCX connects within one address of lo */

static void open_side(int i)
{
    const struct lg_transport_spec spec = {
        .hosts = 2, .host = i, .address = g_address, .port = g_port + (uint32_t)i};
    const int rc = g_kind->open(&spec, &g_side[i]);
    if (rc < 0) print_message("%s\n", lg_err_message());
    assert_int_equal(rc, 0);
}

static void connect_to(int i, int peer)
{
    const int rc = g_kind->connect(g_side[i], peer, g_address, g_port + (uint32_t)peer);
    if (rc < 0) print_message("%s\n", lg_err_message());
    assert_int_equal(rc, 0);
}

static int close_both(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++)
        if (g_side[i]) g_kind->close(&g_side[i]);
    return 0;
}

static void progress(void)
{
    for (int i = 0; i < 2; i++)
        if (g_side[i]) g_kind->progress(g_side[i]);
}

static bool wait_for(const struct lg_transfer *m)
{
    const int64_t end = lg_now_ns() + WAIT_S * LG_S_NS;
    while (!m->done && lg_now_ns() < end) progress();
    return m->done;
}

static struct lg_transfer transfer(uint64_t tag, void *data, size_t bytes)
{
    return (struct lg_transfer){.tag = tag, .data = data, .bytes = bytes, .posted = true};
}

/* A byte from side i to the other one: they are connected. UCX 1.13 aborts when a process goes in the middle of that
 * (an assertion in its tcp_sockcm_ep.c), which costs a run no more than a restart of lg-exchange. */
static void greet(int i)
{
    char a = 'a', b = 0;
    struct lg_transfer out = transfer(1 + (uint64_t)i, &a, 1),
                       in = transfer(1 + (uint64_t)i, &b, 1);
    g_kind->receive(g_side[1 - i], &in);
    g_kind->send(g_side[i], 1 - i, &out);
    assert_true(wait_for(&in) && wait_for(&out));
    assert_true(!in.failed && b == 'a');
}

static int open_both(void **state)
{
    (void)state;
    g_port = 20000 + (uint32_t)getpid() % 12000; /* below those that connections get */
    for (int i = 0; i < 2; i++) open_side(i);
    for (int i = 0; i < 2; i++) connect_to(i, 1 - i);
    for (int i = 0; i < 2; i++) greet(i);
    return 0;
}

/* Short ones and one of several pieces, which come into the places of their tags. */
static void test_messages(void **state)
{
    (void)state;
    const size_t size[] = {1, 16, 400, 70000, LONG};
    for (size_t k = 0; k < LG_ARRAY_LEN(size); k++) {
        unsigned char *from[2], *to[2];
        struct lg_transfer out[2], in[2];
        for (int i = 0; i < 2; i++) {
            from[i] = malloc(size[k]);
            to[i] = calloc(1, size[k]);
            for (size_t b = 0; b < size[k]; b++) from[i][b] = (unsigned char)(b * 7 + (size_t)i);
            in[i] = transfer(100 + (uint64_t)i, to[i], size[k]);
            g_kind->receive(g_side[1], &in[i]);
        }
        for (int i = 1; i >= 0; i--) { /* in the other order */
            out[i] = transfer(100 + (uint64_t)i, from[i], size[k]);
            g_kind->send(g_side[0], 1, &out[i]);
        }
        for (int i = 0; i < 2; i++) {
            assert_true(wait_for(&in[i]) && wait_for(&out[i]));
            assert_false(in[i].failed || out[i].failed);
            assert_memory_equal(from[i], to[i], size[k]);
            free(from[i]);
            free(to[i]);
        }
    }
}

static void test_notes_wait_in_order(void **state)
{
    (void)state;
    int said[NOTES], heard[NOTES] = {0};
    struct lg_transfer out[NOTES], in[NOTES];
    for (int i = 0; i < NOTES; i++) {
        said[i] = 1000 + i;
        out[i] = transfer(LG_TAG_NOTE, &said[i], sizeof said[i]);
        g_kind->send(g_side[0], 1, &out[i]);
        if (i == NOTES / 2) assert_true(wait_for(&out[0]));
    }
    for (int i = 0; i < 1000; i++) progress();
    for (int i = 0; i < NOTES; i++) {
        in[i] = transfer(LG_TAG_NOTE, &heard[i], sizeof heard[i]);
        g_kind->receive(g_side[1], &in[i]);
    }
    for (int i = 0; i < NOTES; i++) {
        assert_true(wait_for(&in[i]));
        assert_false(in[i].failed);
        assert_int_equal(heard[i], said[i]);
    }
}

/* An answer that nobody waits for goes away, also a long one, and its sender is done with it. */
static void test_unwanted(void **state)
{
    (void)state;
    char *data = calloc(1, LONG), word = 0;
    struct lg_transfer unwanted[] = {transfer(7, data, LONG), transfer(8, data, 10)};
    struct lg_transfer out = transfer(9, data, 1), in = transfer(9, &word, 1);
    g_kind->receive(g_side[1], &in);
    for (int i = 0; i < 2; i++) g_kind->send(g_side[0], 1, &unwanted[i]);
    g_kind->send(g_side[0], 1, &out);
    assert_true(wait_for(&in) && wait_for(&out));
    for (int i = 0; i < 2; i++) assert_true(wait_for(&unwanted[i]));
    assert_false(g_kind->has_failed(g_side[0], 1));
    free(data);
}

static void test_size_and_cancel(void **state)
{
    (void)state;
    char data[64] = {0}, small[16], large[128];
    struct lg_transfer out[2], in[] = {transfer(20, small, sizeof small),
                                       transfer(21, large, sizeof large), transfer(22, small, 1)};
    for (int i = 0; i < 3; i++) g_kind->receive(g_side[1], &in[i]);
    for (int i = 0; i < 2; i++) {
        out[i] = transfer(20 + (uint64_t)i, data, sizeof data);
        g_kind->send(g_side[0], 1, &out[i]);
        assert_true(wait_for(&in[i]) && in[i].failed);
    }
    g_kind->cancel(g_side[1], &in[2]);
    assert_true(wait_for(&in[2]) && in[2].failed);
}

static bool fails(int i, int peer)
{
    const int64_t end = lg_now_ns() + WAIT_S * LG_S_NS;
    while (!g_kind->has_failed(g_side[i], peer) && lg_now_ns() < end) progress();
    return g_kind->has_failed(g_side[i], peer);
}

/* A process goes, with all of its connections; another one comes at its address. */
static void test_successor(void **state)
{
    (void)state;
    char a = 'a', b = 0;
    g_kind->close(&g_side[1]);
    assert_true(fails(0, 1));
    struct lg_transfer lost = transfer(30, &a, 1);
    g_kind->send(g_side[0], 1, &lost);
    g_kind->disconnect(g_side[0], 1);
    assert_true(wait_for(&lost) && lost.failed);
    open_side(1);
    connect_to(0, 1);
    connect_to(1, 0);
    struct lg_transfer out = transfer(31, &a, 1), in = transfer(31, &b, 1);
    g_kind->receive(g_side[1], &in);
    g_kind->send(g_side[0], 1, &out);
    assert_true(wait_for(&in) && !in.failed && b == 'a');
}

/* What is on its way when the connection is cut off is done, as failed, on both sides or whole. */
static void test_cut_off(void **state)
{
    (void)state;
    char *from = calloc(1, LONG), *to = calloc(1, LONG);
    struct lg_transfer out = transfer(40, from, LONG), in = transfer(40, to, LONG);
    g_kind->receive(g_side[1], &in);
    g_kind->send(g_side[0], 1, &out);
    for (int i = 0; i < 3; i++) progress();
    g_kind->disconnect(g_side[0], 1);
    assert_true(wait_for(&out));
    for (int i = 0; i < 1000 && !in.done; i++) progress();
    if (!in.done) g_kind->cancel(g_side[1], &in);
    assert_true(wait_for(&in));
    free(from);
    free(to);
}

/* A message has begun to come, and its sender does nothing any more, as on a host without power: the place comes back when all
 * is cut off, and who is still there can connect again. */
static void test_half_a_message(void **state)
{
    (void)state;
    char *from = calloc(1, LONG), *to = calloc(1, LONG);
    struct lg_transfer out = transfer(41, from, LONG), in = transfer(41, to, LONG);
    g_kind->receive(g_side[1], &in);
    g_kind->send(g_side[0], 1, &out);
    g_kind->progress(g_side[0]); /* says that it will come */
    for (int i = 0; i < 1000; i++) g_kind->progress(g_side[1]);
    assert_false(in.done);
    g_kind->cancel(g_side[1], &in);
    g_kind->cut_off(g_side[1]);
    const int64_t end = lg_now_ns() + WAIT_S * LG_S_NS;
    while (!in.done && lg_now_ns() < end) g_kind->progress(g_side[1]);
    assert_true(in.done && in.failed);
    assert_true(fails(0, 1));
    g_kind->disconnect(g_side[0], 1);
    assert_true(wait_for(&out));
    connect_to(0, 1);
    greet(0);
    free(from);
    free(to);
}

/* Memory that is shared would be read at once. */
static int open_both_by_tcp(void **state)
{
    setenv("UCX_TLS", "tcp", 1);
    const int rc = open_both(state);
    unsetenv("UCX_TLS");
    return rc;
}

/* Whom nobody connects to is not let in. */
static void test_stranger(void **state)
{
    (void)state;
    char a = 'a', b = 0;
    g_port = 20000 + (uint32_t)getpid() % 12000; /* below those that connections get */
    for (int i = 0; i < 2; i++) open_side(i);
    connect_to(1, 0);
    struct lg_transfer out = transfer(50, &a, 1), in = transfer(50, &b, 1);
    g_kind->receive(g_side[0], &in);
    g_kind->send(g_side[1], 0, &out);
    assert_true(fails(1, 0));
    assert_false(in.done);
    g_kind->cancel(g_side[0], &in);
    assert_true(wait_for(&in) && in.failed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_messages, open_both, close_both),
        cmocka_unit_test_setup_teardown(test_notes_wait_in_order, open_both, close_both),
        cmocka_unit_test_setup_teardown(test_unwanted, open_both, close_both),
        cmocka_unit_test_setup_teardown(test_size_and_cancel, open_both, close_both),
        cmocka_unit_test_setup_teardown(test_successor, open_both, close_both),
        cmocka_unit_test_setup_teardown(test_cut_off, open_both, close_both),
        cmocka_unit_test_setup_teardown(test_half_a_message, open_both_by_tcp, close_both),
        cmocka_unit_test_teardown(test_stranger, close_both)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
