/* What is asked of another host, and what it answers (supervisor/hosts/answers.h): machines are addresses of the loopback
 * interface, sockets are real, one thread has both ends. */
#include "base/clock.h"
#include "base/fs.h"
#include "shm/board.h"
#include "supervisor/commands/log_files.h"
#include "supervisor/hosts/answers.h"
#include "tests/unit/scratch.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include <cmocka.h>

enum { SILENCE_MS = 600, LINEAGE = 77, PATIENCE_MS = 5000, ASKED_AT_ONCE = 30 };

static int g_port; /* of this process: programs of several builds run at once */
static char g_address[LG_PLACES_MAX][LG_HOST_ADDRESS_BYTES] = {"127.0.0.1", "127.0.0.2"};
static lg_channel *g_server, *g_client;
static lg_answers *g_answers;
static struct lg_answer g_own = {.host = 0, .phase = LG_GROUP_member, .leads = 1};
static pthread_mutex_t g_gate = PTHREAD_MUTEX_INITIALIZER; /* held: the worker is not done */
static size_t g_text_bytes;
static int g_code;

static int answerer(void *context, const struct lg_question *q, struct lg_reply *ret)
{
    (void)context;
    pthread_mutex_lock(&g_gate);
    pthread_mutex_unlock(&g_gate);
    if (g_code) return LG_FAIL(g_code, "no such thing");
    ret->bytes = g_text_bytes;
    ret->text = malloc(g_text_bytes + 1);
    assert_non_null(ret->text);
    memset(ret->text, 'a' + (int)q->kind, g_text_bytes);
    ret->more = true;
    return 0;
}

static int setup(void **state)
{
    (void)state;
    struct lg_cluster_key key;
    assert_int_equal(zmq_curve_keypair(key.public_, key.secret), 0);
    struct lg_channel_spec s = {
        .places = 2, .port = g_port, .address = g_address, .key = key, .silence_ms = SILENCE_MS};
    if (lg_channel_open(&s, &g_server) < 0) fail_msg("%s", lg_err_message());
    s.place = 1;
    if (lg_channel_open_asker(&s, &g_client) < 0) fail_msg("%s", lg_err_message());
    const struct lg_answers_spec a = {{answerer, NULL}, LINEAGE, -1};
    assert_int_equal(lg_answers_open(&a, &g_answers), 0);
    g_text_bytes = 10;
    g_code = 0;
    g_own.phase = LG_GROUP_member;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    lg_answers_close(&g_answers);
    lg_channel_close(&g_client);
    lg_channel_close(&g_server);
    return 0;
}

static struct lg_question question(lg_question_kind kind)
{
    static uint64_t id;
    return (struct lg_question){.magic = LG_QUESTION_MAGIC,
                                .layout = lg_layout_hash(),
                                .lineage = LINEAGE,
                                .id = ++id,
                                .kind = kind};
}

static void serve(void)
{
    static unsigned char message[LG_CHANNEL_BYTES];
    for (size_t n; (n = lg_channel_receive(g_server, message, sizeof message)) > 0;)
        lg_answers_hear(g_answers, g_server, &g_own, message, n);
    lg_answers_turn(g_answers, g_server, &g_own, lg_now_ns());
}

static void ask(const void *q, size_t bytes)
{
    for (int i = 0; i < PATIENCE_MS && !lg_channel_send(g_client, 0, q, bytes); i++) {
        lg_channel_wait(g_server, -1, 1);
        serve();
    }
}

/* The next answer within ms, and its text; false: none. */
static unsigned char g_answer[LG_ANSWER_BYTES_MAX];
static bool answered(int ms, struct lg_answer *ret, const char **ret_text)
{
    for (const int64_t until_ns = lg_now_ns() + ms * LG_MS_NS; lg_now_ns() < until_ns;) {
        lg_channel_wait(g_server, -1, 1);
        serve();
        const size_t n = lg_channel_take(g_client, 0, g_answer, sizeof g_answer);
        if (!n) continue;
        assert_true(n >= sizeof *ret);
        memcpy(ret, g_answer, sizeof *ret);
        assert_true(ret->magic == LG_ANSWER_MAGIC);
        assert_int_equal(ret->bytes, n - sizeof *ret);
        *ret_text = (const char *)g_answer + sizeof *ret;
        return true;
    }
    return false;
}

static void expect_answer(const struct lg_question *q, int code, const char *text)
{
    struct lg_answer a;
    const char *said;
    ask(q, sizeof *q);
    assert_true(answered(PATIENCE_MS, &a, &said));
    assert_true(a.id == q->id);
    assert_int_equal(a.code, code);
    assert_int_equal(a.bytes, strlen(text));
    assert_memory_equal(said, text, strlen(text));
    assert_int_equal(a.place, 0);
    assert_int_equal(a.host, 0);
    assert_int_equal(a.leads, 1);
}

static void test_texts(void **state)
{
    (void)state;
    struct lg_question q = question(LG_QUESTION_json);
    expect_answer(&q, 0, "bbbbbbbbbb");
    g_code = LG_ERR_NOTFOUND;
    q = question(LG_QUESTION_top);
    expect_answer(&q, LG_ERR_NOTFOUND, "no such thing");
}

static void test_text_has_a_limit(void **state)
{
    (void)state;
    struct lg_answer a;
    const char *text;
    const struct lg_question q = question(LG_QUESTION_status);
    g_text_bytes = 10 * LG_ANSWER_TEXT_MAX;
    ask(&q, sizeof q);
    assert_true(answered(PATIENCE_MS, &a, &text));
    assert_int_equal(a.bytes, LG_ANSWER_TEXT_MAX);
    assert_int_equal(a.more, 1);
    assert_int_equal(text[a.bytes - 1], 'a');
}

static void test_another_run_or_build(void **state)
{
    (void)state;
    struct lg_question q = question(LG_QUESTION_status);
    q.lineage++;
    expect_answer(&q, LG_ERR_NOTFOUND, "another run is there");
    q = question(LG_QUESTION_scale);
    q.layout++;
    expect_answer(&q, LG_ERR_MISMATCH, "another build of lgsup runs there");
    g_own.phase = LG_GROUP_joining; /* it has no processes: nothing to show, nothing to order */
    q = question(LG_QUESTION_scale);
    expect_answer(&q, 0, "");
    struct lg_question taken;
    uint64_t order;
    assert_false(lg_answers_take_order(g_answers, &taken, &order));
}

/* From who has the key, but makes no sense. */
static void test_nonsense_is_dropped(void **state)
{
    (void)state;
    struct lg_question bad[8];
    struct lg_answer a;
    const char *text;
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) bad[i] = question(LG_QUESTION_swap);
    bad[0].magic++;
    bad[1].kind = LG_QUESTION_KINDS;
    bad[2].role = -1;
    bad[3].role = LG_ROLE_COUNT;
    bad[4].index = -2;
    bad[5].index = LG_INSTANCES_MAX;
    bad[6].n_files = LG_QUESTION_FILES_MAX + 1;
    memset(bad[7].text, 'x', sizeof bad[7].text);
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        ask(&bad[i], sizeof bad[i]);
        if (answered(50, &a, &text)) fail_msg("question %zu was answered", i);
    }
    const struct lg_question good = question(LG_QUESTION_status);
    for (size_t bytes = 1; bytes < sizeof good; bytes += 1000) ask(&good, bytes);
    assert_false(answered(100, &a, &text));
    expect_answer(&good, 0, "aaaaaaaaaa");
}

/* Many at once: what is too many is said to be so, and afterwards all is as before. */
static void test_too_many_at_once(void **state)
{
    (void)state;
    struct lg_answer a;
    const char *text;
    int busy = 0, done = 0;
    pthread_mutex_lock(&g_gate);
    for (int i = 0; i < ASKED_AT_ONCE; i++) {
        const struct lg_question q = question(LG_QUESTION_status);
        ask(&q, sizeof q);
        if (answered(20, &a, &text)) busy += a.code == LG_ERR_BUSY;
    }
    pthread_mutex_unlock(&g_gate);
    while (answered(500, &a, &text)) { /* of one asker's a few are dropped */
        busy += a.code == LG_ERR_BUSY;
        done += a.code == 0;
    }
    assert_in_range(done, 1, LG_ANSWERS_JOBS_MAX + 1);
    assert_true(busy >= ASKED_AT_ONCE - LG_ANSWERS_JOBS_MAX - 1);
    const struct lg_question q = question(LG_QUESTION_status);
    expect_answer(&q, 0, "aaaaaaaaaa");
}

static void test_orders(void **state)
{
    (void)state;
    struct lg_question q = question(LG_QUESTION_scale), taken;
    struct lg_answer a;
    const char *text;
    uint64_t order;
    q.role = LG_ROLE_vae;
    q.number = 3;
    ask(&q, sizeof q);
    assert_true(answered(PATIENCE_MS, &a, &text));
    assert_true(a.under_way && a.id == q.id);
    assert_true(lg_answers_take_order(g_answers, &taken, &order));
    assert_int_equal(taken.number, 3);
    uint64_t other;
    assert_false(lg_answers_take_order(g_answers, &taken, &other)); /* each once */
    assert_true(answered(PATIENCE_MS, &a, &text)); /* who waits hears that it is under way */
    assert_true(a.under_way);
    lg_answers_end_order(g_answers, order, LG_ERR_BUSY, "later");
    assert_true(answered(PATIENCE_MS, &a, &text));
    assert_false(a.under_way);
    assert_int_equal(a.code, LG_ERR_BUSY);
    assert_memory_equal(text, "later", 5);
    assert_false(answered(1200, &a, &text)); /* and nothing more */
    for (int i = 0; i < LG_ANSWERS_ORDERS_MAX; i++) {
        q = question(LG_QUESTION_scale);
        ask(&q, sizeof q);
        assert_true(answered(PATIENCE_MS, &a, &text));
    }
    q = question(LG_QUESTION_swap);
    ask(&q, sizeof q);
    do assert_true(answered(PATIENCE_MS, &a, &text));
    while (a.under_way);
    assert_true(a.id == q.id);
    assert_int_equal(a.code, LG_ERR_BUSY);
}

/* ---- logs ---- */

/* Asks until there is no more; what has come of the one file, and in how many answers. */
static char *whole_log(const char *role, bool follow, size_t *ret_bytes, int *ret_answers)
{
    struct lg_question q = {.kind = LG_QUESTION_logs, .flag = follow};
    struct lg_reply r;
    struct lg_log_piece p;
    char *all = NULL;
    snprintf(q.text, sizeof q.text, "%s", role);
    *ret_bytes = 0;
    *ret_answers = 0;
    do {
        assert_int_equal(lg_logs_answer(scratch_path("."), &q, &r), 0);
        assert_true(r.bytes <= LG_ANSWER_TEXT_MAX);
        ++*ret_answers;
        for (size_t at = 0; at < r.bytes; at += p.bytes) {
            memcpy(&p, r.text + at, sizeof p);
            at += sizeof p;
            assert_true(p.bytes <= r.bytes - at && p.bytes > 0);
            all = realloc(all, *ret_bytes + p.bytes);
            memcpy(all + *ret_bytes, r.text + at, p.bytes);
            *ret_bytes += p.bytes;
            q.n_files = 1;
            q.file[0].name = lg_hash(p.name, strlen(p.name));
            q.file[0].shown = p.shown;
        }
        free(r.text);
    } while (r.more && *ret_answers < 1000);
    return all;
}

static void test_logs_in_pieces(void **state)
{
    (void)state;
    enum { LINES = 9000 };
    char *text = malloc(LINES * 100 + 100), *got;
    size_t bytes = 0, n;
    int answers;
    scratch_make();
    for (int i = 0; i < LINES; i++)
        bytes += (size_t)sprintf(text + bytes, "2026-01-01T00:00:00.000Z line %d of many\n", i);
    bytes += (size_t)sprintf(text + bytes, "last words");
    scratch_write("logs/vae.0.log", text);
    scratch_write("secret.log", "not a log of a process");
    got = whole_log("vae", false, &n, &answers);
    assert_int_equal(n, bytes);
    assert_memory_equal(got, text, bytes);
    assert_true(answers > 1);
    free(got);
    got = whole_log("vae.0", true, &n, &answers); /* more may come behind "last words" */
    assert_int_equal(n, bytes - strlen("last words"));
    free(got);
    got = whole_log("../secret", false, &n, &answers);
    assert_int_equal(n, 0);
    free(got);
    struct lg_question q = {
        .kind = LG_QUESTION_logs}; /* of several files none gets more than its room */
    struct lg_reply r;
    for (int i = 1; i < 8; i++) {
        char name[32];
        snprintf(name, sizeof name, "logs/vae.%d.log", i);
        scratch_write(name, text);
    }
    assert_int_equal(lg_logs_answer(scratch_path("."), &q, &r), 0);
    assert_true(r.more && r.bytes > LG_ANSWER_TEXT_MAX / 2 && r.bytes <= LG_ANSWER_TEXT_MAX);
    free(r.text);
    memset(text, 'x', bytes); /* a line that is longer than an answer is cut, and not waited for */
    scratch_write("logs/vae.0.log", text);
    got = whole_log("vae.0", true, &n, &answers);
    assert_true(n > bytes / 2);
    free(got);
    free(text);
    scratch_remove();
}

int main(void)
{
    g_port = 10000 + (int)getpid() % 20000;
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {T(test_texts),
                                       T(test_text_has_a_limit),
                                       T(test_another_run_or_build),
                                       T(test_nonsense_is_dropped),
                                       T(test_too_many_at_once),
                                       T(test_orders),
                                       cmocka_unit_test(test_logs_in_pieces)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
