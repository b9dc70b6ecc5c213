/* The transport over NCCL, with a stand-in for GPUs whose links are TCP (tests/stub), between two of them in one process: what
 * transport.h promises of messages on a device, and what nccl.c says of links that break. */
#include "base/clock.h"
#include "base/fs.h"
#include "kernels/device.h"
#include "stages/exchange/transport.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { WAIT_S = 20, LONG = 48 << 20, MANY = 40 };

static const struct lg_transport_kind *const g_kind = &lg_transport_nccl;
static lg_transport *g_side[2];
static lg_device *g_device;
static uint32_t g_port;

static void open_side(int i)
{
    const struct lg_transport_spec spec = {.hosts = 2,
                                           .host = i,
                                           .address = "127.0.0.1",
                                           .port = g_port + (uint32_t)i,
                                           .arg = g_device};
    const int rc = g_kind->open(&spec, &g_side[i]);
    if (rc < 0) print_message("%s\n", lg_err_message());
    assert_int_equal(rc, 0);
}

static void connect_to(int i, int peer)
{
    assert_int_equal(g_kind->connect(g_side[i], peer, "127.0.0.1", g_port + (uint32_t)peer), 0);
}

static int open_both(void **state)
{
    static uint32_t runs;
    (void)state;
    g_port = 20000 + ((uint32_t)getpid() * 8 + 2 * runs++) % 12000;
    for (int i = 0; i < 2; i++) open_side(i);
    for (int i = 0; i < 2; i++) connect_to(i, 1 - i);
    return 0;
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

static bool fails(int i)
{
    const int64_t end = lg_now_ns() + WAIT_S * LG_S_NS;
    while (!g_kind->has_failed(g_side[i], 1 - i) && lg_now_ns() < end) progress();
    return g_kind->has_failed(g_side[i], 1 - i);
}

/* On the device (which is the host's memory, in truth). */
static unsigned char *memory(size_t bytes)
{
    void *p = NULL;
    assert_int_equal(lg_device_alloc(g_device, bytes, &p), 0);
    return p;
}

static struct lg_transfer transfer(uint64_t tag, void *data, size_t bytes)
{
    return (struct lg_transfer){
        .tag = tag, .data = data, .bytes = bytes, .on_device = true, .posted = true};
}

static void send(int from, struct lg_transfer *m)
{
    g_kind->send(g_side[from], 1 - from, m);
}

static void receive(int at, struct lg_transfer *m)
{
    g_kind->receive(g_side[at], m);
}

/* More than a link holds, both ways at once, into places that were posted in the other order; and beside them one in the
 * host's memory, and a note. */
static void test_messages(void **state)
{
    (void)state;
    static struct lg_transfer out[2][MANY], in[2][MANY];
    for (int s = 0; s < 2; s++)
        for (int i = MANY - 1; i >= 0; i--) {
            const size_t bytes = 1000 * (size_t)(i + 1);
            in[1 - s][i] = transfer(100 + (uint64_t)i, memory(bytes), bytes);
            receive(1 - s, &in[1 - s][i]);
        }
    for (int i = 0; i < MANY; i++)
        for (int s = 0; s < 2; s++) {
            const size_t bytes = 1000 * (size_t)(i + 1);
            unsigned char *data = memory(bytes);
            for (size_t b = 0; b < bytes; b++) data[b] = (unsigned char)(b * 7 + (size_t)(i + s));
            out[s][i] = transfer(100 + (uint64_t)i, data, bytes);
            send(s, &out[s][i]);
        }
    char word = 'w', got = 0, note = 'n', heard = 0;
    struct lg_transfer host = {.tag = 9, .data = &word, .bytes = 1, .posted = true},
                       at = {.tag = 9, .data = &got, .bytes = 1, .posted = true},
                       says = {.tag = LG_TAG_NOTE, .data = &note, .bytes = 1, .posted = true},
                       hears = {.tag = LG_TAG_NOTE, .data = &heard, .bytes = 1, .posted = true};
    receive(1, &at);
    receive(1, &hears);
    send(0, &host);
    send(0, &says);
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < MANY; i++) {
            assert_true(wait_for(&out[s][i]) && wait_for(&in[1 - s][i]));
            assert_false(out[s][i].failed || in[1 - s][i].failed);
            assert_memory_equal(out[s][i].data, in[1 - s][i].data, out[s][i].bytes);
        }
    assert_true(wait_for(&at) && wait_for(&hears) && got == 'w' && heard == 'n');
}

/* After whatever went wrong: the connection is made anew, and a message gets through. */
static void expect_goes_on(int from)
{
    unsigned char *data = memory(LONG), *to = memory(LONG);
    memset(data, 'x', LONG);
    g_kind->disconnect(g_side[from], 1 - from);
    connect_to(from, 1 - from);
    struct lg_transfer out = transfer(70, data, LONG), in = transfer(70, to, LONG);
    receive(1 - from, &in);
    send(from, &out);
    assert_true(wait_for(&in) && wait_for(&out));
    assert_false(in.failed || out.failed);
    assert_memory_equal(data, to, LONG);
}

/* One that nobody waits for, or of another size, breaks the connection, for a link cannot leave it out; what follows comes
 * into no other place. */
static void test_unwanted(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        unsigned char *data = memory(100), *to = memory(100);
        memset(data, 'u', 100);
        struct lg_transfer first = transfer(7, data, 100), next = transfer(8, data, 100);
        struct lg_transfer small = transfer(7, to, 50), place = transfer(8, to, 100);
        if (k) receive(1, &small);
        receive(1, &place);
        send(0, &first);
        send(0, &next);
        assert_true(fails(0));
        g_kind->disconnect(g_side[0], 1);
        assert_true(wait_for(&first) && wait_for(&next));
        assert_false(place.done);
        assert_true(to[0] != 'u');
        g_kind->cancel(g_side[1], &place);
        assert_true(place.done && place.failed);
        if (k) g_kind->cancel(g_side[1], &small);
        connect_to(0, 1);
        expect_goes_on(0);
    }
}

/* A place that the link has is given back by closing it, and then nothing is written there any more. */
static void test_cancel_under_way(void **state)
{
    (void)state;
    unsigned char *data = memory(LONG), *to = memory(LONG);
    struct lg_transfer out = transfer(20, data, LONG), in = transfer(20, to, LONG);
    memset(data, 'c', LONG);
    receive(1, &in);
    send(0, &out);
    const int64_t end = lg_now_ns() + WAIT_S * LG_S_NS;
    while (!to[0] && lg_now_ns() < end) progress();
    assert_true(to[0] && !in.done);
    g_kind->cancel(g_side[1], &in);
    assert_true(in.done && in.failed);
    memset(to, 0, LONG);
    assert_true(fails(0));
    for (int i = 0; i < 100; i++) progress();
    assert_int_equal(to[LONG - 1], 0);
    expect_goes_on(0);
}

/* A process goes in the middle of a message, and another one comes at its address. */
static void test_successor(void **state)
{
    (void)state;
    unsigned char *data = memory(LONG), *to = memory(LONG);
    struct lg_transfer out = transfer(30, data, LONG), in = transfer(30, to, LONG);
    memset(data, 's', LONG);
    receive(1, &in);
    send(0, &out);
    const int64_t end = lg_now_ns() + WAIT_S * LG_S_NS;
    while (!to[0] && lg_now_ns() < end) progress();
    g_kind->close(&g_side[0]);
    assert_true(out.done && out.failed);
    for (int i = 0; i < 100; i++) progress();
    assert_false(in.done); /* links do not say that the other side is gone */
    g_kind->cancel(g_side[1], &in);
    assert_true(in.done && in.failed);
    open_side(0);
    connect_to(0, 1);
    assert_true(fails(1));
    expect_goes_on(1);
    expect_goes_on(0);
}

static int use_stub(void **state)
{
    char here[LG_PATH_BYTES], path[LG_PATH_BYTES];
    (void)state;
    assert_int_equal(lg_program_dir(here), 0);
    assert_int_equal(lg_path(path, "%s/../lib/liblg-host.so", here), 0);
    setenv("LG_STUB_HOST", path, 1);
    assert_int_equal(lg_path(path, "%s/stub", here), 0);
    setenv("LG_BACKEND_DIR", path, 1);
    setenv("LG_STUB", "two", 1);
    setenv("LG_STUB_MEMORY", "1", 1);
    const int rc = lg_device_open("cuda:0", NULL, &g_device);
    if (rc < 0) print_message("%s\n", lg_err_message());
    return rc;
}

static int close_stub(void **state)
{
    (void)state;
    lg_device_close(&g_device);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_messages, open_both, close_both),
        cmocka_unit_test_setup_teardown(test_unwanted, open_both, close_both),
        cmocka_unit_test_setup_teardown(test_cancel_under_way, open_both, close_both),
        cmocka_unit_test_setup_teardown(test_successor, open_both, close_both)};
    return cmocka_run_group_tests(tests, use_stub, close_stub);
}
