/* The checkpoint writer with a trainer and an EMA keeper that the test plays (ckpt_world.h): whole runs
 * of its process, a disk that refuses, each of its calls that fails, its death at each of them. Every
 * time what counts is the same: the checkpoint of each wanted state appears, with that state's bytes,
 * though the trainer goes on; an older one stays until then. */
#include "base/clock.h"
#include "bus/control.h"
#include "shm/keeper.h"
#include "stages/roles.h"
#include "tests/sim/faults.h"
#include "tests/unit/ckpt_world.h"
#include "tests/unit/scratch.h"
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { WAIT_MS_MAX = 20000, STEPS_MAX = 50 };

static struct ckpt_world w;
static int64_t g_skew_ns; /* added to every look at the clock */

int64_t __real_lg_now_ns(void);
int64_t __wrap_lg_now_ns(void);
int64_t __wrap_lg_now_ns(void)
{
    return __real_lg_now_ns() + g_skew_ns;
}

static void assert_checkpoint(uint64_t state)
{
    const char *wrong = ckpt_world_wrong(&w, state);
    if (wrong) fail_msg("checkpoint of state %" PRIu64 ": %s", state, wrong);
}

static void wait_until_published(uint64_t state)
{
    for (int i = 0; i < WAIT_MS_MAX && ckpt_world_published(&w) < state; i++) usleep(1000);
    assert_int_equal(ckpt_world_published(&w), state);
}

static void wait_for_exit(pid_t child, int want)
{
    int status = -1, rc = 0;
    for (int i = 0; i < WAIT_MS_MAX && rc == 0; i++) {
        rc = waitpid(child, &status, WNOHANG);
        usleep(1000);
    }
    if (rc == 0) kill(child, SIGKILL);
    assert_int_equal(rc, child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), want);
}

/* From the first state to the last, the process as lgsup starts it. */
static void test_whole_run(void **state)
{
    (void)state;
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "host", .ranks = 2, .steps = 10});
    pid_t writer = ckpt_writer_start(&w);
    static const uint64_t wanted[] = {3, 6, 9, 10}; /* each third, and the last */
    for (size_t i = 0; i < LG_ARRAY_LEN(wanted); i++) {
        ckpt_world_play(&w, wanted[i]);
        wait_until_published(wanted[i]);
        assert_checkpoint(wanted[i]);
        if (i) assert_checkpoint(wanted[i - 1]);
        assert_true(i < CKPT_KEEP || !ckpt_world_has(&w, wanted[i - CKPT_KEEP]));
    }
    _Atomic(uint32_t) *phase = &lg_board_row(w.board, LG_ROLE_ckpt, 0)->phase;
    for (int i = 0; i < WAIT_MS_MAX && *phase != LG_PHASE_DONE; i++) usleep(1000);
    assert_int_equal(*phase, LG_PHASE_DONE);
    assert_true(lg_commit_complete(w.board));
    atomic_store(&w.board->s->quit, 1);
    wait_for_exit(writer, 0);
    ckpt_world_close(&w);
}

/* "No room" is told to lgsup with what it means, training goes on, the checkpoint comes later. */
static bool heard(lg_control *c, const char *words)
{
    struct lg_peer peer;
    struct lg_message m;
    for (int i = 0; i < WAIT_MS_MAX / 10; i++, usleep(10000))
        while (lg_control_receive(c, &peer, &m))
            if (m.kind == LG_MESSAGE_event && strstr(m.text, words)) return true;
    return false;
}

static void test_no_room(void **state)
{
    (void)state;
    lg_control *c = NULL;
    char place[LG_PATH_BYTES], aside[LG_PATH_BYTES];
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "host", .ranks = 1});
    assert_int_equal(lg_path(place, "%s/checkpoints", w.run.dir), 0);
    assert_int_equal(lg_path(aside, "%s/aside", w.run.dir), 0);
    pid_t writer = ckpt_writer_start(&w);
    assert_int_equal(lg_control_open(w.f.dir, &c), 0);
    ckpt_world_play(&w, 3);
    wait_until_published(3);
    /* Nothing can be made where a file lies, whoever tries. */
    assert_int_equal(rename(place, aside), 0);
    scratch_write("run/checkpoints", "");
    ckpt_world_play(&w, 6);
    assert_true(heard(c, "checkpoint of step 6 not written, next try in 1 s (training goes on, "
                         "and does not end before it is written"));
    ckpt_world_play(&w, 8); /* state 6 is overwritten */
    assert_int_equal(lg_mark_state(lg_board_global_commit(w.board)), 8);
    assert_int_equal(ckpt_world_staged(&w), 6);
    assert_int_equal(ckpt_world_published(&w), 3);
    assert_int_equal(unlink(place), 0);
    assert_int_equal(rename(aside, place), 0);
    assert_checkpoint(3);
    wait_until_published(6);
    assert_true(heard(c, "could be written now"));
    assert_checkpoint(6);
    atomic_store(&w.board->s->quit, 1);
    wait_for_exit(writer, 0);
    lg_control_close(&c);
    ckpt_world_close(&w);
}

static int step(lg_stage *st)
{
    int rc = lg_ckpt_def.step(st);
    lg_err_clear();
    return rc;
}

/* Both halves. */
static void stage(lg_stage *st, uint64_t state)
{
    assert_int_equal(step(st), LG_STEP_WORKED);
    assert_true(ckpt_world_staged(&w) < state);
    assert_int_equal(step(st), LG_STEP_WORKED);
    assert_int_equal(ckpt_world_staged(&w), state);
}

/* Twice as late each time, 30 s at most; not before its time, however often the loop comes by. */
static void test_back_off(void **state)
{
    (void)state;
    static const int after_s[] = {1, 2, 4, 8, 16, 30, 30};
    static lg_stage st;
    char place[LG_PATH_BYTES];
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "host", .ranks = 1});
    assert_int_equal(lg_path(place, "%s/checkpoints", w.run.dir), 0);
    assert_int_equal(lg_remove_tree(place), 0);
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    assert_int_equal(step(&st), LG_STEP_IDLE);
    assert_non_null(st.waiting_for);
    ckpt_world_play(&w, 3);
    stage(&st, 3);
    for (size_t i = 0; i < LG_ARRAY_LEN(after_s); i++) {
        scratch_write("run/checkpoints", ""); /* in the way */
        assert_int_equal(step(&st), LG_STEP_IDLE);
        assert_int_equal(unlink(place), 0);
        g_skew_ns += after_s[i] * LG_S_NS - LG_S_NS / 2;
        assert_int_equal(step(&st), LG_STEP_IDLE); /* had it tried now, it would have worked */
        assert_int_equal(ckpt_world_published(&w), 0);
        g_skew_ns += LG_S_NS / 2;
    }
    assert_int_equal(step(&st), LG_STEP_WORKED);
    assert_int_equal(ckpt_world_published(&w), 3);
    assert_checkpoint(3);
    ckpt_writer_close(&st);
    ckpt_world_close(&w);
}

/* What is not trained is read from a checkpoint for each one: from the newest, since that from which the run went on is
 * removed in its time. */
static void test_frozen_after_a_removal(void **state)
{
    (void)state;
    static lg_stage st;
    char from[LG_PATH_BYTES];
    ckpt_world_open(
        &w, &(struct ckpt_world_spec){.device = "host",
                                      .ranks = 1,
                                      .more = "groups = [\"transformer_blocks.* frozen\"]\n"});
    const lg_params frozen = lg_params_frozen(&w.trainer->all);
    const size_t first = w.trainer->all.trained_count, count = w.trainer->all.count - first;
    float *made = malloc(count * sizeof *made), *read = malloc(count * sizeof *read);
    assert_true(made && read && frozen.n > 0);
    assert_int_equal(lg_frozen_read(&w.player, w.trainer, 0, count, made), 0);
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    for (uint64_t s = 3; s <= 12; s += CKPT_EVERY) {
        ckpt_world_play(&w, s);
        stage(&st, s);
        assert_int_equal(step(&st), LG_STEP_WORKED);
        assert_int_equal(ckpt_world_published(&w), s);
        if (s > 3) continue;
        assert_int_equal(lg_path(from, "%s/checkpoints/world_step3", w.run.dir), 0);
        scratch_write("run/resume", from);
    }
    assert_false(ckpt_world_has(&w, 3));
    memset(read, 0xff, count * sizeof *read);
    assert_int_equal(lg_frozen_read(&w.player, w.trainer, 0, count, read), 0);
    for (const struct lg_param *p = frozen.p; p < frozen.p + frozen.n; p++)
        assert_memory_equal(read + p->offset - first, made + p->offset - first,
                            p->count * sizeof *read);
    free(made);
    free(read);
    ckpt_writer_close(&st);
    ckpt_world_close(&w);
}

/* ---- GPUs: a stand-in whose memory is not the host's (tests/stub/cuda.c) ---- */

static void use_stub(const char *kind)
{
    char here[LG_PATH_BYTES], path[LG_PATH_BYTES];
    assert_int_equal(lg_program_dir(here), 0);
    assert_int_equal(lg_path(path, "%s/stub", here), 0);
    setenv("LG_BACKEND_DIR", path, 1);
    assert_int_equal(lg_path(path, "%s/../lib/liblg-host.so", here), 0);
    setenv("LG_STUB_HOST", path, 1);
    setenv("LG_STUB_MEMORY", "1", 1);
    setenv("LG_STUB", kind, 1);
}

static void forget_stub(void)
{
    unsetenv("LG_BACKEND_DIR");
    unsetenv("LG_STUB_MEMORY");
}

/* What a mark speaks of is not what lies there: the writer parks the run and says that memory is lost, and
 * no file is written. */
static void assert_lost(lg_stage *st, const char *says)
{
    st->me = 7;
    assert_int_equal(lg_ckpt_def.step(st), LG_ERR_PARKED);
    assert_int_equal(atomic_exchange(&st->row->lost, 0), 7);
    if (!strstr(st->row->cause, says)) fail_msg("no \"%s\" in: %s", says, st->row->cause);
    lg_err_clear();
}

static void test_memory_of_another_state(void **state)
{
    (void)state;
    lg_stage st;
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "host", .ranks = 2});
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    ckpt_world_play(&w, 3);
    struct lg_stamp *rank = lg_trainer_state_view(w.trainer, 1, 3).stamp, *ema = w.ema[0][1]->front;
    struct lg_stamp *moments = w.trainer->moments[1]->front, *staged = NULL, *staged_moments;
    for (int i = 0; i < st.n_regions; i++)
        if (!strcmp(st.region[i]->name, "ckpt/0/staging")) staged = st.region[i]->front;
    assert_non_null(staged);
    staged_moments = staged + 1;
    lg_stamp_set_parts(moments, 3, 1);
    assert_lost(&st, "trainer/1/moments does not hold state 3, but a part of 3");
    lg_stamp_clear(moments);
    assert_lost(&st, "trainer/1/moments does not hold state 3, but nothing");
    lg_stamp_set(moments, 3);
    lg_stamp_clear(rank); /* whose scalars say where the moments lie */
    assert_lost(&st, "trainer/1/state/b does not hold state 3, but nothing");
    lg_stamp_set(rank, 3);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_true(lg_stamp_is(staged_moments, 3) && !lg_stamp_is(staged, 3));
    lg_stamp_clear(moments); /* nobody needs them any more */
    lg_stamp_clear(rank);
    assert_lost(&st, "trainer/1/state/b does not hold state 3, but nothing");
    lg_stamp_set(rank, 1);
    assert_lost(&st, "trainer/1/state/b does not hold state 3, but 1");
    lg_stamp_set(rank, 3);
    lg_stamp_clear(ema);
    assert_lost(&st, "ema/0/state/b does not hold state 3, but nothing");
    lg_stamp_set(ema, 3);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_int_equal(ckpt_world_staged(&w), 3);
    assert_true(lg_stamp_is(staged, 3));
    lg_stamp_clear(staged_moments);
    assert_lost(&st, "ckpt/0/staging (moments) does not hold state 3, but nothing");
    lg_stamp_set(staged_moments, 3);
    lg_stamp_clear(staged);
    assert_lost(&st, "ckpt/0/staging does not hold state 3, but nothing");
    assert_false(ckpt_world_has(&w, 3));
    lg_stamp_set(staged, 3);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_null(ckpt_world_wrong(&w, 3));
    ckpt_writer_close(&st);
    ckpt_world_close(&w);
}

/* Regions of which marks speak are not made anew. */
static void test_memory_that_is_gone(void **state)
{
    (void)state;
    static const char *const gone[] = {"trainer/0/state/a", "trainer/0/moments", "ema/0/state/b",
                                       "ckpt/0/staging"};
    lg_stage st;
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "host", .ranks = 1});
    assert_int_equal(ckpt_writer_open(&w, &st), 0); /* nothing is made yet: it makes the regions */
    ckpt_world_play(&w, 3);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED); /* half of it is enough */
    ckpt_writer_close(&st);
    for (size_t i = 0; i < LG_ARRAY_LEN(gone); i++) {
        uint64_t bytes;
        int fd;
        assert_int_equal(lg_keeper_get(w.f.keeper, gone[i], &bytes, &fd), 0);
        assert_int_equal(lg_keeper_drop(w.f.keeper, gone[i]), 0);
        assert_int_equal(ckpt_writer_open(&w, &st), LG_ERR_PARKED);
        if (!strstr(st.row->cause, gone[i])) fail_msg("%s: %s", gone[i], st.row->cause);
        ckpt_writer_close(&st);
        lg_err_clear();
        assert_int_equal(lg_keeper_put(w.f.keeper, gone[i], bytes, fd), 0);
        close(fd);
    }
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_null(ckpt_world_wrong(&w, 3));
    ckpt_writer_close(&st);
    ckpt_world_close(&w);
}

/* Between its two halves of staging the writer dies, and the ranks update the state whose moments are staged: the
 * successor has to leave those alone. Nor do the ranks go on before, or over the other half. */
static void test_dies_between_the_halves(void **state)
{
    (void)state;
    lg_stage st;
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "host", .ranks = 2, .depth = 2});
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    ckpt_world_play(&w, 5);
    assert_int_equal(lg_mark_state(lg_board_global_commit(w.board)), 3);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    ckpt_writer_close(&st);
    ckpt_world_play(&w, 5);
    assert_int_equal(lg_mark_state(lg_board_global_commit(w.board)), 4);
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_int_equal(ckpt_world_staged(&w), 3);
    ckpt_world_play(&w, 5);
    assert_int_equal(lg_mark_state(lg_board_global_commit(w.board)), 5);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_checkpoint(3);
    ckpt_writer_close(&st);
    ckpt_world_close(&w);
}

/* The staging region is pinned a piece at a step, only while there is nothing else to do; a state that
 * comes when some of it is pinned is copied so that no copy leaves its piece (the stand-in asserts it). */
static void test_on_gpus(void **state)
{
    (void)state;
    static lg_stage st;
    int pieces = 0;
    use_stub("two");
    ckpt_world_open(
        &w, &(struct ckpt_world_spec){.device = "cuda", .ranks = 2, .hidden = 256, .depth = 4});
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    assert_int_equal(step(&st), LG_STEP_WORKED); /* one piece */
    ckpt_world_play(&w, 3);
    stage(&st, 3); /* at once, not after the rest */
    assert_int_equal(step(&st), LG_STEP_WORKED);
    assert_int_equal(ckpt_world_published(&w), 3);
    assert_checkpoint(3);
    while (step(&st) == LG_STEP_WORKED) pieces++;
    assert_true(pieces >= 1);
    ckpt_world_play(&w, 6);
    while (step(&st) == LG_STEP_WORKED) continue;
    assert_checkpoint(6);
    ckpt_writer_close(&st);
    ckpt_world_close(&w);
    forget_stub();
}

/* Memory that cannot be pinned ends the process with the reason: lgsup starts it again, or parks. */
static void test_unpinnable(void **state)
{
    (void)state;
    static lg_stage st;
    use_stub("unpinnable");
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "cuda", .ranks = 1});
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    assert_int_equal(lg_ckpt_def.step(&st), LG_ERR_NOSPACE);
    assert_non_null(strstr(lg_err_message(), "no memory can be pinned"));
    ckpt_writer_close(&st);
    ckpt_world_close(&w);
    forget_stub();
}

/* What `lgsup check` adds up: the region that it opens, and one context on each of the ranks' GPUs. */
static void test_bytes(void **state)
{
    (void)state;
    struct lg_stage_bytes rows[8];
    static lg_stage st;
    int n = 0;
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "host", .ranks = 2});
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    assert_int_equal(lg_ckpt_def.bytes(w.run.config, &w.run.plan, LG_ROLE_ckpt, rows, 8, &n), 0);
    assert_int_equal(n, 1);
    assert_string_equal(rows[0].name, st.region[st.n_regions - 1]->name);
    assert_int_equal(rows[0].bytes, st.region[st.n_regions - 1]->bytes);
    ckpt_writer_close(&st);
    w.run.config->model_heads = 3; /* of a width of 16 */
    assert_int_equal(lg_ckpt_def.bytes(w.run.config, &w.run.plan, LG_ROLE_ckpt, rows, 8, &n),
                     LG_ERR_CONFIG);
    assert_int_equal(ckpt_writer_open(&w, &st), LG_ERR_CONFIG);
    ckpt_writer_close(&st);
    ckpt_world_close(&w);
}

/* ---- each call ---- */

static uint64_t last; /* checkpoint that was made good */

static uint64_t due(void)
{
    return ckpt_world_published(&w) + CKPT_EVERY;
}

static int steps_until_published(lg_stage *st, uint64_t state)
{
    int rc = 0;
    for (int i = 0; rc >= 0 && i < STEPS_MAX && ckpt_world_published(&w) < state; i++) {
        rc = lg_ckpt_def.step(st);
        if (rc == LG_STEP_IDLE) break;
    }
    return LG_MIN(rc, 0);
}

/* A writer that comes up when a state is to be staged, until it is published. */
static int write_one(void)
{
    static lg_stage st;
    uint64_t wanted = due();
    ckpt_world_play(&w, wanted);
    faults_begin();
    int rc = ckpt_writer_open(&w, &st);
    if (rc == 0) rc = steps_until_published(&st, wanted);
    faults_end();
    if (rc == 0 && ckpt_world_published(&w) < wanted) {
        g_skew_ns += LG_S_NS; /* it has put it off: now it works */
        rc = steps_until_published(&st, wanted);
        if (rc == 0 && ckpt_world_published(&w) < wanted)
            rc = LG_FAIL(LG_ERR_FAILED, "not written at the second try");
    }
    ckpt_writer_close(&st);
    return rc;
}

/* The trainer goes on as far as it can: over the state itself where that is staged. The older
 * checkpoint is there before and after a successor has done what is left. */
static int is_made_good(void)
{
    static lg_stage st;
    uint64_t wanted = lg_mark_state(lg_board_global_commit(w.board)) / CKPT_EVERY * CKPT_EVERY;
    if (last && ckpt_world_wrong(&w, last))
        return LG_FAIL(LG_ERR_FAILED, "the older checkpoint: %s", ckpt_world_wrong(&w, last));
    ckpt_world_play(&w, wanted + CKPT_EVERY - 1);
    LG_TRY(ckpt_writer_open(&w, &st));
    LG_TRY(steps_until_published(&st, wanted));
    ckpt_writer_close(&st);
    const char *wrong = ckpt_world_wrong(&w, wanted);
    if (wrong) return LG_FAIL(LG_ERR_FAILED, "checkpoint of %" PRIu64 ": %s", wanted, wrong);
    if (last && last != wanted && ckpt_world_wrong(&w, last))
        return LG_FAIL(LG_ERR_FAILED, "the older checkpoint: %s", ckpt_world_wrong(&w, last));
    last = wanted;
    return 0;
}

static void each_call(const char *name, bool dies)
{
    last = 0;
    ckpt_world_open(&w, &(struct ckpt_world_spec){.device = "host", .ranks = 2});
    int n = faults_each(&(struct fault_scenario){
        .name = name, .run = write_one, .dies = dies, .after = is_made_good});
    print_message("%d faults\n", n);
    assert_true(n > 0);
    ckpt_world_close(&w);
}

static void test_each_call_fails(void **state)
{
    (void)state;
    each_call("a writer whose calls fail", false);
}

static void test_dies_at_each_call(void **state)
{
    (void)state;
    each_call("a writer that dies", true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_run),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_back_off),
        cmocka_unit_test(test_memory_of_another_state),
        cmocka_unit_test(test_memory_that_is_gone),
        cmocka_unit_test(test_dies_between_the_halves),
        cmocka_unit_test(test_frozen_after_a_removal),
        cmocka_unit_test(test_on_gpus),
        cmocka_unit_test(test_unpinnable),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_each_call_fails),
        cmocka_unit_test(test_dies_at_each_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
