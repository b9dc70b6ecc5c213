/* The keeper: its four requests, its survival of rude clients. */
#include "shm/keeper_wire.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct shm_fixture f;

static int setup(void **state)
{
    shm_fixture_open(&f, 1);
    shm_fixture_start_keeper(&f);
    return 0;
}

static int teardown(void **state)
{
    shm_fixture_close(&f);
    lg_err_clear();
    return 0;
}

static void assert_holds(const char *name, const char *text)
{
    assert_true(shm_fixture_holds(&f, name, text));
}

static void put(const char *name, const char *text, int want)
{
    assert_int_equal(shm_fixture_put(&f, name, text), want);
}

/* Whoever has ended a keeper may bind its path at once: the file is gone with the answer. */
static void test_path_is_free_when_it_ends(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        assert_int_equal(lg_keeper_drop(f.keeper, ""), 0);
        assert_int_equal(access(f.keeper, F_OK), -1);
        waitpid(f.keeper_pid, NULL, 0);
        shm_fixture_start_keeper(&f);
    }
}

/* One whose lgsup died before it listened is known to nobody: it ends by itself. */
static void test_ends_when_nobody_waits(void **state)
{
    (void)state;
    char path[sizeof f.keeper + 8];
    int ready[2], status = -1, rc = 0;
    snprintf(path, sizeof path, "%s.stray", f.keeper);
    assert_int_equal(pipe(ready), 0);
    close(ready[0]);
    pid_t pid = fork();
    if (pid == 0) scratch_exit(lg_keeper_serve(path, ready[1]) < 0);
    close(ready[1]);
    for (int i = 0; i < 5000 && rc == 0; i++) {
        rc = waitpid(pid, &status, WNOHANG);
        usleep(1000);
    }
    if (rc == 0) kill(pid, SIGKILL);
    assert_int_equal(rc, pid);
    assert_int_equal(status, 0);
    assert_int_equal(access(path, F_OK), -1);
}

static void test_put_get_list_drop(void **state)
{
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int fd;
    assert_int_equal(lg_keeper_get(f.keeper, "a", &bytes, &fd), LG_ERR_NOTFOUND);
    assert_int_equal(lg_keeper_list(f.keeper, 0, name, &bytes), LG_ERR_NOTFOUND);
    put("a", "alpha", 0);
    put("vae/0/weights", "beta", 0);
    put("a", "other", LG_ERR_BUSY); /* the old one stays */
    assert_holds("a", "alpha");
    assert_holds("vae/0/weights", "beta");
    assert_int_equal(lg_keeper_list(f.keeper, 1, name, &bytes), 0);
    assert_string_equal(name, "vae/0/weights");
    assert_int_equal(bytes, 4);
    assert_int_equal(lg_keeper_list(f.keeper, -1, name, &bytes), LG_ERR_NOTFOUND);
    assert_int_equal(lg_keeper_drop(f.keeper, "a"), 0);
    assert_int_equal(lg_keeper_drop(f.keeper, "a"), 0);
    assert_int_equal(lg_keeper_get(f.keeper, "a", &bytes, &fd), LG_ERR_NOTFOUND);
    assert_holds("vae/0/weights", "beta");
}

static void test_drop_all_ends_it(void **state)
{
    put("a", "alpha", 0);
    assert_int_equal(lg_keeper_drop(f.keeper, ""), 0);
    assert_int_equal(shm_fixture_await_keeper(&f), 0);
    assert_int_equal(lg_keeper_drop(f.keeper, ""), LG_ERR_IO);
    assert_non_null(strstr(lg_err_message(), "no keeper listens"));
    assert_int_equal(access(f.keeper, F_OK), -1);
}

static void test_bad_requests(void **state)
{
    char path[200], name[100];
    memset(path, 'x', sizeof path - 1);
    path[0] = '/';
    path[sizeof path - 1] = 0;
    assert_int_equal(lg_keeper_drop(path, "a"), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "107"));
    assert_int_equal(lg_keeper_serve(path, -1), LG_ERR_CONFIG);
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    assert_int_equal(lg_keeper_drop(f.keeper, name), LG_ERR_CONFIG);
    put("", "alpha", LG_ERR_USAGE);
    assert_int_equal(lg_keeper_put(f.keeper, "a", 1, -1), LG_ERR_USAGE); /* without an fd */
}

static void test_full_table(void **state)
{
    char name[32];
    int fd = shm_fixture_memory("x");
    for (int i = 0; i < LG_KEEPER_REGIONS_MAX; i++) {
        snprintf(name, sizeof name, "r/%d", i);
        assert_int_equal(lg_keeper_put(f.keeper, name, 1, fd), 0);
    }
    assert_int_equal(lg_keeper_put(f.keeper, "more", 1, fd), LG_ERR_NOSPACE);
    assert_int_equal(lg_keeper_drop(f.keeper, "r/500"), 0);
    assert_int_equal(lg_keeper_put(f.keeper, "more", 1, fd), 0);
    assert_holds("r/1023", "x");
    close(fd);
}

static int raw_connection(void)
{
    struct sockaddr_un address;
    assert_int_equal(lg_keeper_address(f.keeper, &address), 0);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(s, (struct sockaddr *)&address, sizeof address), 0);
    return s;
}

/* Silent, truncated, overlong and wrong messages, an fd too many, death before the answer. */
static void test_rude_clients(void **state)
{
    enum { SILENT = 80 }; /* more than the keeper has connections */
    put("a", "alpha", 0);
    int s = raw_connection();
    assert_int_equal(send(s, "xx", 2, 0), 2);
    struct pollfd p = {.fd = s, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 2000), 1); /* hung up */
    close(s);

    char big[4096] = {0};
    s = raw_connection();
    assert_int_equal(send(s, big, sizeof big, 0), sizeof big);
    close(s);

    struct lg_keeper_message q = {.magic = LG_KEEPER_MAGIC, .op = 77};
    memset(q.name, 'a', sizeof q.name); /* no NUL */
    s = raw_connection();
    assert_int_equal(send(s, &q, sizeof q, 0), sizeof q);
    p.fd = s;
    assert_int_equal(poll(&p, 1, 2000), 1);
    close(s);

    for (int i = 0; i < 50; i++) { /* asks and is gone */
        q = (struct lg_keeper_message){.magic = LG_KEEPER_MAGIC, .op = LG_KEEPER_GET, .name = "a"};
        s = raw_connection();
        assert_int_equal(send(s, &q, sizeof q, 0), sizeof q);
        close(s);
    }
    assert_holds("a", "alpha");

    int silent[SILENT];
    for (int i = 0; i < SILENT; i++) silent[i] = raw_connection();
    assert_holds("a", "alpha"); /* after the silent ones were hung up */
    for (int i = 0; i < SILENT; i++) close(silent[i]);
    assert_holds("a", "alpha");
}

/* Another user, for whom somebody has opened the directory and the socket: neither is he heard, nor
 * does he believe a keeper that is not his. Exit code of what he sees. */
static int as_another_user(void)
{
    enum { NOBODY = 65534 };
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    if (setgid(NOBODY) < 0 || setuid(NOBODY) < 0) return 10;
    int s = raw_connection();
    struct lg_keeper_message q = {.magic = LG_KEEPER_MAGIC, .op = LG_KEEPER_GET, .name = "a"};
    send(s, &q, sizeof q, MSG_NOSIGNAL);
    struct pollfd p = {.fd = s, .events = POLLIN};
    if (poll(&p, 1, 2000) != 1) return 11;
    if (recv(s, &q, sizeof q, 0) > 0) return 12; /* an answer */
    if (lg_keeper_list(f.keeper, 0, name, &bytes) != LG_ERR_IO) return 13;
    return strstr(lg_err_message(), "belongs to user 0, not to 65534") ? 0 : 14;
}

static void test_other_users_are_refused(void **state)
{
    int status;
    if (geteuid() != 0) skip();
    put("a", "alpha", 0);
    assert_int_equal(chmod(f.dir, 0755), 0);
    assert_int_equal(chmod(f.keeper, 0666), 0);
    pid_t child = fork();
    if (child == 0) _exit(as_another_user());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_holds("a", "alpha");
}

static void test_who_listens(void **state)
{
    int pid;
    char nobody[200];
    assert_int_equal(lg_keeper_pid(f.keeper, &pid), 0);
    assert_int_equal(pid, f.keeper_pid);
    snprintf(nobody, sizeof nobody, "%s/nobody", f.dir);
    assert_int_equal(lg_keeper_pid(nobody, &pid), LG_ERR_IO);
}

/* ---- who listens is not a keeper, or one that goes wrong ---- */

/* What a pretended keeper answers to one question; the caller's question is checked by the real one. */
struct answer {
    size_t bytes; /* of the message; 0: hangs up instead */
    uint32_t magic;
    int32_t code;
    bool fd; /* one comes along */
};

static int listener_at(const char *path, int backlog)
{
    struct sockaddr_un address;
    assert_int_equal(lg_keeper_address(path, &address), 0);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(s, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(s, backlog), 0);
    return s;
}

static void answer_one(int listener, const struct answer *a)
{
    struct lg_keeper_message m;
    int got, s = accept(listener, NULL, NULL), fd = a->fd ? shm_fixture_memory("x") : -1;
    if (s < 0 || lg_keeper_receive(s, &m, &got, 0) != (int)sizeof m) scratch_exit(1);
    if (got >= 0) close(got);
    m.magic = a->magic;
    m.code = a->code;
    memset(m.name, 'n', sizeof m.name); /* without an end */
    if (a->bytes == sizeof m)
        lg_keeper_send(s, &m, fd, 0);
    else if (a->bytes)
        send(s, &m, a->bytes, 0);
    if (fd >= 0) close(fd);
    close(s);
}

static int open_fds(void)
{
    int n = 0;
    for (int fd = 0; fd < 256; fd++) n += fcntl(fd, F_GETFD, 0) >= 0;
    return n;
}

enum { ASK_PUT, ASK_GET, ASK_LIST, ASK_DROP, ASKS };

static int ask(int what, const char *path)
{
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int fd, rc = LG_ERR_FAILED, mine = shm_fixture_memory("mine");
    if (what == ASK_PUT) rc = lg_keeper_put(path, "a", 1, mine);
    if (what == ASK_GET && (rc = lg_keeper_get(path, "a", &bytes, &fd)) == 0) close(fd);
    if (what == ASK_LIST && (rc = lg_keeper_list(path, 0, name, &bytes)) == 0)
        rc = strnlen(name, sizeof name) < sizeof name ? 0 : LG_ERR_FAILED; /* it has an end */
    if (what == ASK_DROP) rc = lg_keeper_drop(path, "a");
    close(mine);
    return rc;
}

/* Whatever comes back, a client says what is wrong, believes nothing, and keeps no fd of it. */
static void test_wrong_keepers(void **state)
{
    (void)state;
    enum { WHOLE = sizeof(struct lg_keeper_message), M = LG_KEEPER_MAGIC };
    static const struct answer answers[] = {
        {0, 0, 0, false},     {5, M, 0, false},      {WHOLE, M + 1, 0, false}, {WHOLE, 1, 0, true},
        {WHOLE, M, -6, true}, {WHOLE, M, -2, false}, {WHOLE, M, 0, false},     {WHOLE, M, 0, true},
    };
    static const struct {
        int rc[ASKS]; /* of put, get, list, drop */
        const char *says;
    } want[] = {
        {{LG_ERR_IO, LG_ERR_IO, LG_ERR_IO, LG_ERR_IO}, "connection closed"},
        {{LG_ERR_MISMATCH, LG_ERR_MISMATCH, LG_ERR_MISMATCH, LG_ERR_MISMATCH}, "not a keeper"},
        {{LG_ERR_MISMATCH, LG_ERR_MISMATCH, LG_ERR_MISMATCH, LG_ERR_MISMATCH}, "not a keeper"},
        {{LG_ERR_MISMATCH, LG_ERR_MISMATCH, LG_ERR_MISMATCH, LG_ERR_MISMATCH}, "not a keeper"},
        {{LG_ERR_NOSPACE, LG_ERR_NOSPACE, LG_ERR_NOSPACE, LG_ERR_NOSPACE}, "is full"},
        {{LG_ERR_USAGE, LG_ERR_USAGE, LG_ERR_USAGE, LG_ERR_USAGE}, "refuses region"},
        {{0, LG_ERR_IO, 0, 0}, "lost on its way"},
        {{0, 0, 0, 0}, ""},
    };
    char path[sizeof f.keeper + 8];
    int status;
    snprintf(path, sizeof path, "%s.wrong", f.keeper);
    int listener = listener_at(path, 8);
    pid_t child = fork();
    if (child == 0) {
        for (size_t i = 0; i < LG_ARRAY_LEN(answers); i++)
            for (int k = 0; k < ASKS; k++) answer_one(listener, &answers[i]);
        scratch_exit(0);
    }
    int before = open_fds();
    for (size_t i = 0; i < LG_ARRAY_LEN(answers); i++)
        for (int k = 0; k < ASKS; k++) {
            int rc = ask(k, path);
            if (rc != want[i].rc[k]) fail_msg("answer %zu, request %d: %d", i, k, rc);
            if (rc < 0 && !strstr(lg_err_message(), want[i].says))
                fail_msg("answer %zu, request %d: %s", i, k, lg_err_message());
            lg_err_clear();
        }
    assert_int_equal(open_fds(), before);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    close(listener);
}

/* A keeper that hangs costs five seconds, then its caller knows: whether it took the call or not. */
static void test_silent_keepers(void **state)
{
    (void)state;
    static const char *const says[] = {"does not answer within 5 s", "accepts nobody for 5 s"};
    pid_t child[2];
    int status;
    for (int full = 0; full < 2; full++) {
        char path[sizeof f.keeper + 8];
        snprintf(path, sizeof path, "%s.%d", f.keeper, full);
        int listener = listener_at(path, 0);
        child[full] = fork();
        if (child[full]) {
            close(listener);
            continue;
        }
        struct sockaddr_un address;
        int first = socket(AF_UNIX, SOCK_SEQPACKET, 0);
        if (lg_keeper_address(path, &address) < 0) scratch_exit(1);
        if (full && connect(first, (struct sockaddr *)&address, sizeof address) < 0)
            scratch_exit(2); /* the queue has room for one */
        if (lg_keeper_drop(path, "a") != LG_ERR_TIMEOUT) scratch_exit(3);
        scratch_exit(strstr(lg_err_message(), says[full]) ? 0 : 4);
    }
    for (int full = 0; full < 2; full++) {
        assert_int_equal(waitpid(child[full], &status, 0), child[full]);
        assert_int_equal(status, 0);
    }
}

/* Clients die at any moment of a put: the name is either there, whole, or not. */
static void test_killed_clients(void **state)
{
    for (int i = 0; i < 40; i++) {
        pid_t child = fork();
        if (child == 0) {
            int fd = memfd_create("x", MFD_CLOEXEC);
            if (write(fd, "gamma", 5) < 0) _exit(1);
            for (;;) {
                lg_keeper_put(f.keeper, "g", 5, fd);
                lg_keeper_drop(f.keeper, "g");
            }
        }
        usleep((useconds_t)(500 + i * 37));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        uint64_t bytes;
        int fd, rc = lg_keeper_get(f.keeper, "g", &bytes, &fd);
        assert_true(rc == 0 || rc == LG_ERR_NOTFOUND);
        if (rc == 0) close(fd);
    }
    assert_int_equal(lg_keeper_drop(f.keeper, "g"), 0);
    put("g", "delta", 0);
    assert_holds("g", "delta");
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_path_is_free_when_it_ends),
        T(test_ends_when_nobody_waits),
        T(test_put_get_list_drop),
        T(test_drop_all_ends_it),
        T(test_bad_requests),
        T(test_full_table),
        T(test_rude_clients),
        T(test_killed_clients),
        T(test_other_users_are_refused),
        T(test_who_listens),
        T(test_wrong_keepers),
        T(test_silent_keepers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
