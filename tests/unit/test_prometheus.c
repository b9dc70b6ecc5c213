/* Figures for Prometheus: the text, against the format's grammar; the listener, against clients that are
 * slow, rude or many. */
#include "base/check.h"
#include "base/clock.h"
#include "supervisor/views/prometheus.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include <arpa/inet.h>
#include <ctype.h>
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { ANSWER_MAX = 1 << 18, TURNS_MAX = 200 };

static struct shm_fixture f;
static lg_run g_run;
static lg_config g_config;
static lg_prometheus g_server;
static int g_port;

static int setup(void **state)
{
    (void)state;
    shm_fixture_open(&f, 2);
    g_config.job_name = (char *)"a \"b\\c\nd";
    lg_run_init(&g_run, "/tmp");
    g_run.config = &g_config;
    for (g_port = 20000 + getpid() % 12000; lg_prometheus_open(g_port, &g_server) < 0; g_port++)
        assert_true(g_port < 60000);
    lg_err_clear();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    lg_prometheus_close(&g_server);
    shm_fixture_close(&f);
    return 0;
}

/* ---- the text ---- */

static const char *take_name(const char *at)
{
    assert_true(isalpha((unsigned char)*at) || *at == '_' || *at == ':');
    while (isalnum((unsigned char)*at) || *at == '_' || *at == ':') at++;
    return at;
}

/* {a="..",b=".."}, or nothing */
static const char *take_labels(const char *at)
{
    if (*at != '{') return at;
    for (at++; *at != '}'; at += *at == ',') {
        at = take_name(at);
        assert_int_equal(*at++, '=');
        assert_int_equal(*at++, '"');
        for (; *at != '"'; at++) {
            assert_true(*at);
            if (*at == '\\') {
                at++;
                assert_true(*at == 'n' || *at == '\\' || *at == '"');
            }
        }
        at++;
        assert_true(*at == ',' || *at == '}');
    }
    return at + 1;
}

static char g_type[128], g_family[128];
static char g_seen[4096][160];
static int g_n_seen;

static void check_sample(const char *line)
{
    char *end;
    const char *name = take_name(line), *labels = take_labels(name);
    assert_int_equal(*labels, ' ');
    assert_true(labels[1]);
    strtod(labels + 1, &end);
    if (*end) fail_msg("no number: %s", line);
    if (strlen(g_family) != (size_t)(name - line) || strncmp(line, g_family, strlen(g_family)))
        fail_msg("not below its type (%s): %s", g_family, line);
    bool total = !strcmp(g_family + LG_MAX(strlen(g_family), (size_t)6) - 6, "_total");
    assert_int_equal(total, !strcmp(g_type, "counter"));
    for (int i = 0; i < g_n_seen; i++)
        if (!strncmp(g_seen[i], line, (size_t)(labels - line) + 1)) fail_msg("twice: %s", line);
    snprintf(g_seen[g_n_seen++], sizeof g_seen[0], "%.*s", (int)(labels - line) + 1, line);
}

static void check_line(char *line)
{
    char what[8] = "", name[128] = "", rest[128] = "";
    if (line[0] != '#') {
        check_sample(line);
        return;
    }
    assert_int_equal(sscanf(line, "# %7s %127s %127[^\n]", what, name, rest), 3);
    if (!strcmp(what, "HELP")) {
        assert_string_not_equal(name, g_family); /* a family stands in one place */
        for (int i = 0; i < g_n_seen; i++)
            assert_false(!strncmp(g_seen[i], name, strlen(name)) &&
                         strchr("{ ", g_seen[i][strlen(name)]));
        snprintf(g_family, sizeof g_family, "%s", name);
        return;
    }
    assert_string_equal(what, "TYPE");
    assert_string_equal(name, g_family);
    assert_true(!strcmp(rest, "gauge") || !strcmp(rest, "counter"));
    snprintf(g_type, sizeof g_type, "%s", rest);
}

static void check_grammar(const char *text)
{
    char *copy = strdup(text), *rest = NULL;
    g_n_seen = 0;
    g_family[0] = g_type[0] = 0;
    assert_int_equal(text[strlen(text) - 1], '\n');
    for (char *line = strtok_r(copy, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        check_line(line);
    free(copy);
}

static void assert_has(const char *text, const char *line)
{
    if (!strstr(text, line)) fail_msg("no line \"%s\" in:\n%s", line, text);
}

static void test_text(void **state)
{
    (void)state;
    shm_fixture_join(f.board, LG_ROLE_vae, 1);
    lg_board_bury(f.board, shm_fixture_join(f.board, LG_ROLE_text, 0));
    struct lg_board_row *vae = lg_board_row(f.board, LG_ROLE_vae, 1);
    atomic_store(&vae->samples, 123456);
    atomic_store(&vae->restarts, 2);
    atomic_store(&vae->busy_ns, 1500 * LG_MS_NS);
    atomic_store(&lg_board_row(f.board, LG_ROLE_text, 0)->pid, 0);
    atomic_store(&f.board->s->run_state, LG_RUN_DRAINING);
    char *text = lg_prometheus_text(&g_run, f.board);
    check_grammar(text);
    assert_null(strstr(text, "lg_loss")); /* no step yet */
    free(text);
    atomic_store(&f.board->s->metrics.step, 7);
    atomic_store(&f.board->s->metrics.loss, 0.0 / 0.0);
    atomic_store(&f.board->s->metrics.grad_norm, 0.1);
    atomic_store(&f.board->s->metrics.voids, 12345678901);
    atomic_store(&lg_board_row(f.board, LG_ROLE_ckpt, 0)->published, lg_mark_of(40));
    text = lg_prometheus_text(&g_run, f.board);
    check_grammar(text);
    free(text);
    atomic_store(&f.board->s->metrics.loss, (double)INFINITY);
    atomic_store(&f.board->s->metrics.grad_norm, -(double)INFINITY);
    text = lg_prometheus_text(&g_run, f.board);
    check_grammar(text);
    assert_has(text, "\nlg_loss +Inf\n");
    assert_null(strstr(text, "lg_loss_vb")); /* no variance is learned */
    assert_has(text, "\nlg_gradient_norm -Inf\n");
    free(text);
    atomic_store(&f.board->s->metrics.loss, 0.0 / 0.0);
    atomic_store(&f.board->s->metrics.grad_norm, 0.1);
    text = lg_prometheus_text(&g_run, f.board);
    assert_has(text, "\nlg_run_info{job=\"a \\\"b\\\\c\\nd\",dir=\"/tmp\"} 1\n");
    assert_has(text, "\nlg_run_state{state=\"draining\"} 1\n");
    assert_has(text, "\nlg_run_state{state=\"running\"} 0\n");
    assert_has(text, "\nlg_max_steps 10\n");
    assert_has(text, "\nlg_loss NaN\n");
    free(text);
    atomic_store(&f.board->s->metrics.loss, 2.5);
    atomic_store(&f.board->s->metrics.loss_vb, 0.5);
    atomic_store(&f.board->s->metrics.has_vb, 1);
    text = lg_prometheus_text(&g_run, f.board);
    check_grammar(text);
    assert_has(text, "\nlg_loss 2.5\n");
    assert_has(text, "\nlg_loss_mse 2\n");
    assert_has(text, "\nlg_loss_vb 0.5\n");
    assert_has(text, "\nlg_gradient_norm 0.10000000000000001\n");
    assert_has(text, "\nlg_void_samples_total 12345678901\n");
    assert_has(text, "\nlg_checkpoint_step 40\n");
    assert_has(text, "\nlg_process_up{role=\"text\",index=\"0\"} 0\n");
    assert_has(text, "\nlg_process_up{role=\"vae\",index=\"1\"} 1\n");
    assert_has(text, "\nlg_process_restarts_total{role=\"vae\",index=\"1\"} 2\n");
    assert_has(text, "\nlg_process_samples_total{role=\"vae\",index=\"1\"} 123456\n");
    assert_has(text, "\nlg_process_busy_seconds_total{role=\"vae\",index=\"1\"} 1.5\n");
    free(text);
}

/* ---- the listener ---- */

static int dial(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)g_port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    assert_true(connect(fd, (struct sockaddr *)&at, sizeof at) == 0 || errno == EINPROGRESS);
    return fd;
}

/* As lgsup's loop does, but never waiting for long. */
static void turn(void)
{
    struct pollfd p[LG_PROMETHEUS_FDS_MAX];
    int n = lg_prometheus_poll(&g_server, p);
    assert_true(n >= 1 && n <= LG_PROMETHEUS_FDS_MAX);
    poll(p, (nfds_t)n, 5);
    lg_prometheus_serve(&g_server, &g_run, f.board);
}

/* A connection in the listener's queue may take nothing before it is accepted. */
static void say(int fd, const char *text)
{
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    for (int i = 0; i < TURNS_MAX && poll(&p, 1, 0) == 0; i++) turn();
    if (send(fd, text, strlen(text), MSG_NOSIGNAL) != (ssize_t)strlen(text))
        fail_msg("send: %s", strerror(errno));
}

/* Turns until the server hangs up; the whole answer. */
static const char *hear(int fd)
{
    static char answer[ANSWER_MAX];
    size_t at = 0;
    for (int i = 0; i < TURNS_MAX; i++) {
        turn();
        ssize_t n = recv(fd, answer + at, sizeof answer - 1 - at, 0);
        if (n > 0) at += (size_t)n;
        if (n == 0 || (n < 0 && errno == ECONNRESET)) break;
        assert_true(i + 1 < TURNS_MAX);
    }
    answer[at] = 0;
    close(fd);
    return answer;
}

static const char *ask(const char *request)
{
    int fd = dial();
    turn();
    say(fd, request);
    return hear(fd);
}

static void assert_begins(const char *text, const char *with)
{
    if (strncmp(text, with, strlen(with))) fail_msg("expected \"%s\", got: %.300s", with, text);
}

static void test_answers(void **state)
{
    (void)state;
    const char *answer = ask("GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n");
    assert_begins(answer, "HTTP/1.0 200 OK\r\n");
    assert_has(answer, "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n");
    const char *body = strstr(answer, "\r\n\r\n") + 4;
    check_grammar(body);
    assert_int_equal(atoi(strstr(answer, "Content-Length: ") + 16), strlen(body));
    size_t whole = strlen(body);
    answer = ask("HEAD /metrics HTTP/1.0\r\n\r\n");
    assert_begins(answer, "HTTP/1.0 200 OK\r\n");
    assert_string_equal(strstr(answer, "\r\n\r\n"), "\r\n\r\n");
    assert_true(atoi(strstr(answer, "Content-Length: ") + 16) > (int)whole / 2);
    assert_begins(ask("GET /metrics?x=1 HTTP/1.0\r\n\r\n"), "HTTP/1.0 200 OK\r\n");
    assert_begins(ask("GET / HTTP/1.0\r\n\r\n"), "HTTP/1.0 404 ");
    assert_begins(ask("GET /metricsx HTTP/1.0\r\n\r\n"), "HTTP/1.0 404 ");
    assert_begins(ask("POST /metrics HTTP/1.0\r\n\r\n"), "HTTP/1.0 405 ");
    assert_begins(ask("hello\n\n"), "HTTP/1.0 400 ");
}

static void test_slow_and_rude_clients(void **state)
{
    (void)state;
    static char flood[3 * LG_PROMETHEUS_REQUEST_BYTES];
    int silent = dial(), slow = dial();
    turn();
    for (const char *at = "GET /metrics HTTP/1.0\r\n\r\n"; *at; at++) { /* byte by byte */
        assert_int_equal(send(slow, at, 1, MSG_NOSIGNAL), 1);
        turn();
    }
    assert_begins(hear(slow), "HTTP/1.0 200 OK\r\n");
    memset(flood, 'a', sizeof flood - 1);
    assert_begins(ask(flood), "HTTP/1.0 431 ");
    int gone = dial();
    turn();
    say(gone, "GET /met");
    close(gone);
    turn();
    turn();
    int zero = dial(), reset = dial();
    turn();
    assert_int_equal(send(zero, "GET \0\n\n", 7, MSG_NOSIGNAL), 7); /* no text: hung up on */
    assert_string_equal(hear(zero), "");
    say(reset, "GET /met"); /* gone with a reset instead of an end */
    setsockopt(reset, SOL_SOCKET, SO_LINGER, &(struct linger){.l_onoff = 1}, sizeof(struct linger));
    turn();
    close(reset);
    turn();
    turn();
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++) /* a deadline that has passed */
        if (g_server.client[i].fd >= 0) g_server.client[i].deadline_ns = lg_now_ns();
    assert_string_equal(hear(silent), "");
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++) assert_int_equal(g_server.client[i].fd, -1);
}

static void test_many_clients(void **state)
{
    (void)state;
    enum { MANY = LG_PROMETHEUS_CLIENTS_MAX + 3 };
    struct pollfd p[LG_PROMETHEUS_FDS_MAX];
    int fd[MANY];
    for (int i = 0; i < MANY; i++) fd[i] = dial();
    for (int i = 0; i < 5; i++) turn();
    /* every place is taken by a silent client: the loop must not spin on the listener */
    assert_int_equal(lg_prometheus_poll(&g_server, p), LG_PROMETHEUS_CLIENTS_MAX);
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++) assert_int_not_equal(p[i].fd, g_server.fd);
    assert_int_equal(poll(p, LG_PROMETHEUS_CLIENTS_MAX, 20), 0);
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++) say(fd[i], "GET /metrics HTTP/1.0\n\n");
    for (int i = 0; i < LG_PROMETHEUS_CLIENTS_MAX; i++)
        assert_begins(hear(fd[i]), "HTTP/1.0 200 OK\r\n");
    for (int i = LG_PROMETHEUS_CLIENTS_MAX; i < MANY; i++) say(fd[i], "GET /metrics HTTP/1.0\n\n");
    for (int i = LG_PROMETHEUS_CLIENTS_MAX; i < MANY; i++)
        assert_begins(hear(fd[i]), "HTTP/1.0 200 OK\r\n");
}

static void test_port_is_taken(void **state)
{
    (void)state;
    lg_prometheus other = {0};
    assert_int_equal(lg_prometheus_open(g_port, &other), LG_ERR_BUSY);
    assert_non_null(strstr(lg_err_message(), "supervisor.prometheus_port"));
    lg_err_clear();
    lg_prometheus_close(&other); /* nothing to close */
    lg_prometheus_serve(&other, &g_run, f.board);
    assert_int_equal(lg_prometheus_poll(&other, (struct pollfd[LG_PROMETHEUS_FDS_MAX]){0}), 0);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_text),         TEST(test_answers),       TEST(test_slow_and_rude_clients),
        TEST(test_many_clients), TEST(test_port_is_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
