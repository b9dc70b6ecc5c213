/* The keeper beside a service manager's fd store. The manager is a thread of the test that listens at
 * NOTIFY_SOCKET and does what systemd does: takes fds by name, drops them, closes barriers in order,
 * and starts the next keeper with all it has. */
#include "base/check.h"
#include "base/clock.h"
#include "shm/keeper.h"
#include "shm/keeper_store.h"
#include "tests/unit/shm_fixture.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { STORED_MAX = 16, WAIT_MS_MAX = 10000, HIGH_FD = 200 };

static struct shm_fixture f;
static struct manager {
    int socket;
    pthread_t thread;
    pthread_mutex_t mutex;
    struct {
        char name[128];
        int fd;
    } stored[STORED_MAX];
    int n_stored;
    char last_store[512]; /* the text that came with the last fd */
    _Atomic(bool) hold, over, ready;
    _Atomic(int) n_barriers;
} m;

/* ---- the manager ---- */

static const char *field(const char *text, const char *key, char ret[128])
{
    const char *at = strstr(text, key);
    if (!at) return NULL;
    at += strlen(key);
    snprintf(ret, 128, "%.*s", (int)strcspn(at, "\n"), at);
    return ret;
}

static void store_one(const char *text, int fd)
{
    char name[128];
    pthread_mutex_lock(&m.mutex);
    snprintf(m.last_store, sizeof m.last_store, "%s", text);
    LG_ASSERT(m.n_stored < STORED_MAX && field(text, "FDNAME=", name));
    memcpy(m.stored[m.n_stored].name, name, sizeof name);
    m.stored[m.n_stored++].fd = fd;
    pthread_mutex_unlock(&m.mutex);
}

static void remove_one(const char *text)
{
    char name[128];
    if (!field(text, "FDNAME=", name)) return;
    pthread_mutex_lock(&m.mutex);
    for (int i = m.n_stored - 1; i >= 0; i--) {
        if (strcmp(m.stored[i].name, name) != 0) continue;
        close(m.stored[i].fd);
        m.stored[i] = m.stored[--m.n_stored];
    }
    pthread_mutex_unlock(&m.mutex);
}

static void obey(const char *text, int fd)
{
    if (strstr(text, "FDSTORE=1")) {
        store_one(text, fd);
        return;
    }
    if (strstr(text, "FDSTOREREMOVE=1")) remove_one(text);
    if (strstr(text, "READY=1")) m.ready = true;
    if (strstr(text, "BARRIER=1")) {
        while (m.hold && !m.over) usleep(1000);
        m.n_barriers++;
    }
    if (fd >= 0) close(fd);
}

static void *manage(void *arg)
{
    while (!m.over) {
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
        struct pollfd p = {.fd = m.socket, .events = POLLIN};
        if (poll(&p, 1, 20) <= 0) continue;
        ssize_t n = recvmsg(m.socket, &h, MSG_CMSG_CLOEXEC);
        if (n < 0) continue;
        text[n] = 0;
        int fd = -1;
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        if (c && c->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(c), sizeof fd);
        obey(text, fd);
    }
    return arg;
}

static void start_manager(void)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%.90s/notify", f.dir);
    m = (struct manager){.mutex = PTHREAD_MUTEX_INITIALIZER};
    m.socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(m.socket, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(pthread_create(&m.thread, NULL, manage, NULL), 0);
    setenv("NOTIFY_SOCKET", at.sun_path, 1);
}

static void stop_manager(void)
{
    m.over = true;
    pthread_join(m.thread, NULL);
    close(m.socket);
    for (int i = 0; i < m.n_stored; i++) close(m.stored[i].fd);
    unsetenv("NOTIFY_SOCKET");
}

/* In the child: fds from 3 on and the variables, as sd_listen_fds(3) wants them. */
static void pass_stored(void)
{
    char names[STORED_MAX * 128] = "", number[16];
    for (int i = 0; i < m.n_stored; i++) {
        LG_ASSERT(fcntl(m.stored[i].fd, F_DUPFD, HIGH_FD + i) == HIGH_FD + i);
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ":" : "",
                 m.stored[i].name);
    }
    for (int i = 0; i < m.n_stored; i++) LG_ASSERT(dup2(HIGH_FD + i, 3 + i) == 3 + i);
    snprintf(number, sizeof number, "%d", m.n_stored);
    setenv("LISTEN_FDS", number, 1);
    setenv("LISTEN_FDNAMES", names, 1);
    snprintf(number, sizeof number, "%d", (int)getpid());
    setenv("LISTEN_PID", number, 1);
}

static void start_keeper(void)
{
    m.ready = false;
    f.keeper_pid = fork();
    if (f.keeper_pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (m.n_stored) pass_stored();
        _exit(lg_keeper_serve_stored(f.keeper) < 0);
    }
    for (int i = 0; i < WAIT_MS_MAX && !m.ready; i++) usleep(1000);
    assert_true(m.ready);
}

/* ---- the tests ---- */

static char g_fresh[200];

static int setup(void **state)
{
    shm_fixture_open(&f, 1);
    snprintf(g_fresh, sizeof g_fresh, "%s.new", f.keeper);
    start_manager();
    start_keeper();
    return rename(g_fresh, f.keeper); /* nothing is stored yet: the first one waits to be named */
}

static int teardown(void **state)
{
    shm_fixture_close(&f);
    stop_manager();
    lg_err_clear();
    return 0;
}

static int memory(const char *text)
{
    int fd = memfd_create("test", MFD_CLOEXEC);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    return fd;
}

static int put(const char *name, const char *text)
{
    int fd = memory(text), rc = lg_keeper_put(f.keeper, name, strlen(text), fd);
    close(fd);
    return rc;
}

static void assert_holds(const char *name, const char *text)
{
    int fd;
    uint64_t bytes;
    char got[64] = {0};
    assert_int_equal(lg_keeper_get(f.keeper, name, &bytes, &fd), 0);
    assert_int_equal(bytes, strlen(text));
    assert_int_equal(pread(fd, got, sizeof got - 1, 0), strlen(text));
    assert_string_equal(got, text);
    close(fd);
}

static void assert_lacks(const char *name)
{
    int fd;
    uint64_t bytes;
    assert_int_equal(lg_keeper_get(f.keeper, name, &bytes, &fd), LG_ERR_NOTFOUND);
}

static void test_what_is_stored(void **state)
{
    assert_int_equal(put("vae/0/weights", "alpha"), 0);
    assert_int_equal(m.n_stored, 1);
    assert_string_equal(m.last_store, "FDSTORE=1\nFDPOLL=0\nFDNAME=vae/0/weights=5");
    assert_int_equal(m.n_barriers, 1);
    assert_int_equal(put("vae/0/weights", "beta"), LG_ERR_BUSY);
    assert_int_equal(m.n_stored, 1); /* not a second one of the name */
}

/* The answer waits for the barrier: a name that somebody was told of survives. */
static void test_put_waits_for_the_store(void **state)
{
    int status;
    m.hold = true;
    pid_t child = fork();
    if (child == 0) _exit(put("a", "alpha") != 0);
    usleep(300000);
    assert_int_equal(waitpid(child, &status, WNOHANG), 0);
    m.hold = false;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_holds("a", "alpha");
}

static void test_next_keeper_has_everything(void **state)
{
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    assert_int_equal(put("a", "alpha"), 0);
    assert_int_equal(put("ckpt/0/staging@", "gamma!"), 0);
    assert_int_equal(put("dropped", "delta"), 0);
    assert_int_equal(lg_keeper_drop(f.keeper, "dropped"), 0);
    assert_int_equal(m.n_stored, 2);
    for (int i = 0; i < 3; i++) {
        shm_fixture_kill_keeper(&f);
        start_keeper();
        assert_int_equal(access(g_fresh, F_OK), -1); /* it is at its place at once */
        assert_holds("a", "alpha");
        assert_holds("ckpt/0/staging@", "gamma!");
        assert_lacks("dropped");
        assert_int_equal(lg_keeper_list(f.keeper, 2, name, &bytes), LG_ERR_NOTFOUND);
    }
    assert_int_equal(put("b", "beta"), 0);
    assert_int_equal(lg_keeper_drop(f.keeper, "a"), 0); /* also of what came from the store */
    shm_fixture_kill_keeper(&f);
    start_keeper();
    assert_holds("b", "beta");
    assert_lacks("a");
}

/* Without anything from the store nobody knows whether nothing is missing: somebody has to say so. */
static void test_empty_store(void **state)
{
    int fd;
    uint64_t bytes;
    shm_fixture_kill_keeper(&f);
    start_keeper();
    assert_int_equal(lg_keeper_get(f.keeper, "a", &bytes, &fd), LG_ERR_IO);
    assert_int_equal(rename(g_fresh, f.keeper), 0);
    assert_lacks("a");
}

/* "Ends" is not "forgets": the unit is stopped or restarted by its manager, who has the store. */
static void test_sigterm_keeps_the_store(void **state)
{
    int status;
    assert_int_equal(put("a", "alpha"), 0);
    kill(f.keeper_pid, SIGTERM);
    assert_int_equal(waitpid(f.keeper_pid, &status, 0), f.keeper_pid);
    assert_int_equal(status, 0);
    assert_int_equal(m.n_stored, 1);
    start_keeper();
    assert_holds("a", "alpha");
    assert_int_equal(lg_keeper_drop(f.keeper, ""), 0);
    assert_int_equal(waitpid(f.keeper_pid, &status, 0), f.keeper_pid);
    f.keeper_pid = 0;
    assert_int_equal(m.n_stored, 0);
}

static void test_what_cannot_be_stored_is_not_put(void **state)
{
    assert_int_equal(put("a:b", "alpha"), LG_ERR_USAGE);
    assert_int_equal(put("a=b", "alpha"), LG_ERR_USAGE);
    char path[200];
    snprintf(path, sizeof path, "%s/notify", f.dir);
    assert_int_equal(unlink(path), 0); /* no manager any more */
    assert_int_equal(put("a", "alpha"), LG_ERR_IO);
    assert_lacks("a");
}

/* Somebody else's fd in the store, or a wrong name, is let go. */
static void test_strange_fds_in_the_store(void **state)
{
    static const char *const names[] = {"stored", "x=", "=5", "a=5x", "good=5"};
    shm_fixture_kill_keeper(&f);
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) {
        snprintf(m.stored[i].name, sizeof m.stored[i].name, "%s", names[i]);
        m.stored[i].fd = memory("alpha");
        m.n_stored++;
    }
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    start_keeper();
    assert_holds("good", "alpha");
    assert_int_equal(lg_keeper_list(f.keeper, 1, name, &bytes), LG_ERR_NOTFOUND);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_what_is_stored),
        T(test_put_waits_for_the_store),
        T(test_next_keeper_has_everything),
        T(test_empty_store),
        T(test_sigterm_keeps_the_store),
        T(test_what_cannot_be_stored_is_not_put),
        T(test_strange_fds_in_the_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
