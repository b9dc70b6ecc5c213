/* What an exchanger says to a host that takes nothing, or answers nothing: host 0 of 3, and a transport that only counts. */
#include "shm/commit.h"
#include "stages/exchange/exchanger_private.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

enum { HOSTS = 3, COUNT = 64, MESSAGE_BYTES = 64, TURN_MS = 5 };

struct lg_transport {
    struct lg_transfer *under_way[HOSTS][256];
    int n[HOSTS], most[HOSTS]; /* sends that are not done; the most there were */
    int notes[HOSTS], connects[HOSTS];
    bool takes[HOSTS];
};

static lg_transport g_net;
static int64_t g_now;
static lg_board g_board;
static lg_exchanger *g_x;
static float g_outgoing[COUNT], g_incoming[COUNT], g_parts[8 * COUNT];

static int net_open(const struct lg_transport_spec *spec, lg_transport **ret)
{
    *ret = spec->arg;
    return 0;
}

static void net_close(lg_transport **t)
{
    *t = NULL;
}

static int net_connect(lg_transport *t, int peer, const char *address, uint32_t port)
{
    (void)address;
    (void)port;
    t->connects[peer]++;
    return 0;
}

static void net_disconnect(lg_transport *t, int peer)
{
    for (int i = 0; i < t->n[peer]; i++)
        t->under_way[peer][i]->done = t->under_way[peer][i]->failed = true;
    t->n[peer] = 0;
}

static bool net_has_failed(lg_transport *t, int peer)
{
    (void)t;
    (void)peer;
    return false;
}

static void net_cut_off(lg_transport *t)
{
    (void)t;
}

static void net_send(lg_transport *t, int peer, struct lg_transfer *m)
{
    t->notes[peer] += (m->tag & LG_TAG_NOTE) != 0;
    m->done = t->takes[peer];
    if (m->done) return;
    assert_true(t->n[peer] < 256);
    t->under_way[peer][t->n[peer]++] = m;
    t->most[peer] = LG_MAX(t->most[peer], t->n[peer]);
}

static void net_receive(lg_transport *t, struct lg_transfer *m)
{
    (void)t;
    (void)m;
}

static void net_cancel(lg_transport *t, struct lg_transfer *m)
{
    (void)t;
    m->done = m->failed = true;
}

static bool net_progress(lg_transport *t)
{
    (void)t;
    return false;
}

static const struct lg_transport_kind g_kind = {.name = "counting",
                                                .open = net_open,
                                                .close = net_close,
                                                .connect = net_connect,
                                                .disconnect = net_disconnect,
                                                .has_failed = net_has_failed,
                                                .cut_off = net_cut_off,
                                                .send = net_send,
                                                .receive = net_receive,
                                                .cancel = net_cancel,
                                                .progress = net_progress};

static int64_t now(void)
{
    return g_now;
}

static size_t state_bytes(void *arg, uint64_t state)
{
    (void)arg;
    (void)state;
    return sizeof g_outgoing;
}

static int open_all(void **state)
{
    (void)state;
    struct lg_hosts_record e = {.formation = 1, .number = 1, .members = lg_hosts_all(HOSTS)};
    struct lg_board_shared *s = calloc(1, sizeof *s);
    if (!s) return -1;
    *s = (struct lg_board_shared){
        .max_steps = 1000, .batch = 1, .ranks = 1, .sequence = 1, .hosts = {.count = HOSTS}};
    g_board = (lg_board){s, -1};
    g_net = (lg_transport){0};
    lg_hosts_enter(&g_board, &e);
    lg_trainer_mark_init(&g_board, 0);
    return lg_exchanger_open(&(struct lg_exchanger_spec){.board = &g_board,
                                                         .transport = &g_kind,
                                                         .transport_arg = &g_net,
                                                         .outgoing = g_outgoing,
                                                         .incoming = g_incoming,
                                                         .count = COUNT,
                                                         .parts = g_parts,
                                                         .message_bytes = MESSAGE_BYTES,
                                                         .state_bytes = state_bytes,
                                                         .now = now,
                                                         .life = 1},
                             &g_x);
}

static int close_all(void **state)
{
    (void)state;
    lg_exchanger_close(&g_x);
    free(g_board.s);
    return 0;
}

static void pass(int ms)
{
    const char *why;
    for (int i = 0; i < ms; i += TURN_MS) {
        g_now += TURN_MS * INT64_C(1000000);
        assert_true(lg_exchanger_step(g_x, &why) >= 0);
    }
}

/* A host that takes no note keeps few places, so that the others hear us. */
static void test_deaf_host_keeps_few_places(void **state)
{
    (void)state;
    g_net.takes[2] = true;
    pass(60000);
    assert_true(g_net.connects[1] > 5 && g_net.connects[1] < 20); /* patience grows to 8 s */
    assert_true(g_net.most[1] <= 6); /* HELLO, CARD, and what is asked */
    const int before = g_net.notes[2];
    pass(1000);
    assert_true(g_net.notes[2] - before >= 3);
}

/* One that takes all notes and answers none is told all of them again and again: any of them may be lost. */
static void test_all_is_said_again(void **state)
{
    (void)state;
    g_net.takes[1] = g_net.takes[2] = true;
    pass(20000); /* the patience is 8 s by now */
    const int before = g_net.notes[1];
    pass(2000);
    const int notes = g_net.notes[1] - before, rounds = 8;      /* every 250 ms */
    assert_in_range(notes, 4 * (rounds - 1), 4 * (rounds + 2)); /* HELLO, CARD, PART, TOTAL */
}

static void hear_ask(uint64_t epoch)
{
    const struct lg_note note = {.magic = LG_NOTE_MAGIC,
                                 .kind = LG_NOTE_ASK,
                                 .epoch = epoch,
                                 .host = 1,
                                 .life = 7,
                                 .session = 8,
                                 .of.ask = {.id = 9}};
    struct lg_transfer *m = &g_x->in[g_x->next_note].transfer;
    assert_int_equal(m->bytes, sizeof note);
    *(struct lg_note *)m->data = note;
    m->done = true;
    pass(TURN_MS);
}

/* A host that is shut out, or is not in this epoch yet, is not answered, and is not taken for the one that has its number. */
static void test_other_epochs_are_not_heard(void **state)
{
    (void)state;
    const struct lg_hosts_record e = {.formation = 1, .number = 2, .members = lg_hosts_all(HOSTS)};
    const struct lg_peer *p = &g_x->peer[1];
    lg_hosts_enter(&g_board, &e);
    pass(TURN_MS);
    hear_ask(1);
    assert_int_equal(p->life, 0);
    assert_int_equal(p->answer[LG_ASK_PART].asked.id, 0);
    hear_ask(3);
    assert_int_equal(p->life, 0);
    assert_int_equal(p->answer[LG_ASK_PART].asked.id, 0);
    hear_ask(2);
    assert_int_equal(p->life, 7);
    assert_int_equal(p->answer[LG_ASK_PART].asked.id, 9);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_all, close_all)

int main(void)
{
    const struct CMUnitTest tests[] = {TEST(test_deaf_host_keeps_few_places),
                                       TEST(test_all_is_said_again),
                                       TEST(test_other_epochs_are_not_heard)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
