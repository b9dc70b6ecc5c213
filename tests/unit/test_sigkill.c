/* SIGKILL at random moments, for real: a keeper, a board, a window in regions, and worker processes
 * that load, encode and train. The parent plays lgsup: it enlists, forks, kills, waits for the death
 * and starts the next one, sometimes late, so that siblings find the death themselves by pidfd.
 *
 * Payloads are written over garbage, slowly enough to be cut in half. Every reader checks every
 * word; a wrong one ends its process with WRONG, which the parent notices.
 */
#include "base/clock.h"
#include "shm/window.h"
#include "tests/unit/shm_fixture.h"
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { KILLS = 120, KILL_US_MAX = 20000, SECONDS_MAX = 60, WRONG = 42, FAILED = 43 };
enum { BATCH = 8, SLOTS = 48, PAYLOAD = 4096, WORDS = PAYLOAD / 8 };

static struct shm_fixture f;
static const struct lg_window_geometry geometry = {.slots = SLOTS,
                                                   .batch = BATCH,
                                                   .chunk = {6, 8, 0},
                                                   .pixels_bytes = PAYLOAD,
                                                   .latent_bytes = 2 * PAYLOAD,
                                                   .ranks = 2};

static struct process {
    lg_role role;
    int index;
    pid_t pid;
    lg_incarnation me;
} process[] = {
    {LG_ROLE_loader, 0, 0, 0}, {LG_ROLE_loader, 1, 0, 0},  {LG_ROLE_vae, 0, 0, 0},
    {LG_ROLE_vae, 1, 0, 0},    {LG_ROLE_trainer, 0, 0, 0},
};

static uint64_t word(lg_field field, uint64_t n, uint64_t i)
{
    return (n * WORDS + i) * 4 + (uint64_t)field;
}

static uint64_t *payload(lg_window *w, lg_field field, uint64_t n)
{
    return (uint64_t *)(field == LG_FIELD_SOURCE ? lg_window_pixels(w, n) : lg_window_mean(w, n));
}

static void check(lg_window *w, lg_field field, uint64_t n)
{
    for (uint64_t i = 0; i < WORDS; i++)
        if (payload(w, field, n)[i] != word(field, n, i)) _exit(WRONG);
}

static void write_payload(lg_window *w, lg_field field, uint64_t n)
{
    volatile uint64_t *to = payload(w, field, n);
    for (uint64_t i = 0; i < WORDS; i++) to[i] = UINT64_MAX;
    for (uint64_t i = 0; i < WORDS; i++) to[i] = word(field, n, i);
}

static void encode(lg_window *w, struct process *p)
{
    lg_field field = p->role == LG_ROLE_loader ? LG_FIELD_SOURCE : LG_FIELD_LATENT;
    unsigned needs = field == LG_FIELD_SOURCE ? 0 : 1u << LG_FIELD_SOURCE;
    for (;;) {
        struct lg_claim c;
        if (lg_window_claim(w, f.board, p->me, field, needs, UINT64_MAX / 2, &c) < 0) {
            usleep(50);
            continue;
        }
        for (uint64_t n = c.n; n < c.n + c.count; n++) {
            if (!lg_window_wanted(w, &c, field, n)) continue;
            if (needs) check(w, LG_FIELD_SOURCE, n);
            write_payload(w, field, n);
            lg_window_publish(w, field, n);
        }
    }
}

static void train(lg_window *w)
{
    _Atomic(lg_mark) *commit = &lg_board_row(f.board, LG_ROLE_trainer, 0)->commit;
    if (atomic_load(commit) == LG_MARK_NONE) atomic_store(commit, lg_mark_of(0));
    for (uint64_t s = lg_mark_state(atomic_load(commit));;) {
        if (!lg_window_range_ready(w, 1u << LG_FIELD_LATENT, s * BATCH, BATCH)) {
            usleep(50);
            continue;
        }
        for (uint64_t n = s * BATCH; n < (s + 1) * BATCH; n++) check(w, LG_FIELD_LATENT, n);
        atomic_store_explicit(commit, lg_mark_of(++s), memory_order_release);
    }
}

static void start(struct process *p)
{
    p->me = lg_board_enlist(f.board, p->role, p->index);
    p->pid = fork();
    assert_true(p->pid >= 0);
    if (p->pid) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves nothing behind */
    lg_window *w;
    struct lg_region_spec spec = {
        .keeper = f.keeper, .plan_hash = f.plan.hash, .run_id = f.board->s->preamble.run_id};
    if (lg_board_join(f.board, p->me) < 0 ||
        lg_window_open(&spec, &geometry, &(struct lg_window_places){0}, &w) < 0) {
        fprintf(stderr, "%s\n", lg_err_text());
        _exit(FAILED);
    }
    if (p->role == LG_ROLE_trainer) train(w);
    encode(w, p);
}

/* Waits until the pidfd says that it is over, which must be by our SIGKILL, and buries it. */
static void kill_one(struct process *p)
{
    int fd = lg_board_pidfd(f.board, p->role, p->index);
    kill(p->pid, SIGKILL);
    if (fd >= 0) { /* it had joined */
        struct pollfd event = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&event, 1, -1), 1);
        assert_true(lg_board_is_dead(f.board, p->me));
        close(fd);
    }
    int status;
    assert_int_equal(waitpid(p->pid, &status, 0), p->pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == WRONG)
        fail_msg("role %d read a wrong word", (int)p->role);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    lg_board_bury(f.board, p->me);
}

static void test_sigkill(void **state)
{
    unsigned seed = 1;
    f.board->s->batch = BATCH;
    for (size_t i = 0; i < LG_ARRAY_LEN(process); i++) start(&process[i]);
    int64_t begin = lg_now_ns();
    int kills = 0;
    while (kills < KILLS && lg_now_ns() - begin < SECONDS_MAX * LG_S_NS) {
        usleep((useconds_t)(rand_r(&seed) % KILL_US_MAX));
        struct process *p = &process[(size_t)rand_r(&seed) % LG_ARRAY_LEN(process)];
        kill_one(p);
        kills++;
        if (rand_r(&seed) % 3 == 0) usleep(5000); /* siblings go on without it */
        start(p);
    }
    double seconds = (double)(lg_now_ns() - begin) / LG_S_NS;
    lg_mark now = lg_board_global_commit(f.board);
    uint64_t steps = now ? lg_mark_state(now) : 0;
    for (int ms = 0; ms < 10000 && lg_board_global_commit(f.board) < now + 3; ms++) usleep(1000);
    assert_true(lg_board_global_commit(f.board) >= now + 3); /* still going on */
    for (size_t i = 0; i < LG_ARRAY_LEN(process); i++) kill_one(&process[i]);
    print_message("%d kills in %.1f s, %llu steps of %d samples\n", kills, seconds,
                  (unsigned long long)steps, BATCH);
    assert_true(kills >= 100 && steps > 100);
}

static int setup(void **state)
{
    shm_fixture_open(&f, 1);
    shm_fixture_start_keeper(&f);
    return 0;
}

static int teardown(void **state)
{
    shm_fixture_close(&f);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_sigkill, setup, teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
