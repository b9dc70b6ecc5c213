/* The step protocol, walked through by hand; the simulation (test_sim_protocol) tries the rest. */
#include "shm/commit.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct lg_board_shared shared;
static lg_board board = {&shared, -1}, *b = &board;

static void begin(int ranks, uint64_t start, uint64_t max, int64_t every)
{
    memset(&shared, 0, sizeof shared);
    shared.ranks = ranks;
    shared.start_step = start;
    shared.max_steps = max;
    shared.checkpoint_every = every;
    shared.has_ema = true;
    shared.batch = 4;
}

static void assert_action(struct lg_action a, lg_action_kind kind, uint64_t step)
{
    assert_int_equal(a.kind, kind);
    assert_int_equal(a.step, step);
}

static void assert_waits(struct lg_action a, const char *for_what)
{
    assert_int_equal(a.kind, LG_DO_WAIT);
    if (!strstr(a.why, for_what)) fail_msg("waits for %s, not for %s", a.why, for_what);
}

static void test_one_step(void **state)
{
    begin(2, 5, 100, 0);
    assert_action(lg_trainer_next(b, 0), LG_DO_INIT, 5);
    assert_waits(lg_ema_next(b), "first state");
    lg_trainer_mark_init(b, 0);
    assert_waits(lg_trainer_next(b, 0), "commits");
    lg_trainer_mark_init(b, 1);
    assert_action(lg_ema_next(b), LG_DO_INIT, 5);
    assert_action(lg_trainer_next(b, 0), LG_DO_DECIDE, 5);
    assert_int_equal(lg_commit_verdict(b, 5), 0);
    assert_int_equal(lg_commit_decide(b, 5), LG_VERDICT_GO);
    assert_action(lg_trainer_next(b, 0), LG_DO_FORWARD, 5);
    assert_action(lg_trainer_next(b, 1), LG_DO_FORWARD, 5);
    lg_trainer_mark_grads(b, 0, 5, (struct lg_loss_sum){2.5, 0.5});
    assert_waits(lg_trainer_next(b, 0), "gradients");
    lg_trainer_mark_grads(b, 1, 5, (struct lg_loss_sum){1.5, 0.25});
    assert_action(lg_trainer_next(b, 0), LG_DO_REDUCE, 5);
    struct lg_exact_sum squares[2];
    memset(squares, 0, sizeof squares);
    lg_exact_sum_add(&squares[0], 9.0);
    lg_trainer_mark_partial(b, 0, 5, &squares[0]);
    assert_waits(lg_trainer_next(b, 0), "sums");
    assert_true(lg_exact_sum_total(&lg_board_row(b, LG_ROLE_trainer, 0)->sum_squares[1]) == 9.0);
    assert_true(lg_board_row(b, LG_ROLE_trainer, 1)->loss_sum[1].all == 1.5);
    assert_true(lg_board_row(b, LG_ROLE_trainer, 1)->loss_sum[1].vb == 0.25);
    lg_trainer_mark_partial(b, 1, 5, &squares[1]);
    assert_action(lg_trainer_next(b, 0), LG_DO_UPDATE, 5); /* the other side is empty: no floor */
    lg_trainer_mark_commit(b, 0, 5);
    assert_waits(lg_trainer_next(b, 0), "commits");
    assert_action(lg_trainer_next(b, 1), LG_DO_UPDATE, 5);
    lg_trainer_mark_commit(b, 1, 5);
    assert_action(lg_trainer_next(b, 1), LG_DO_DECIDE, 6);
    assert_int_equal(lg_board_global_commit(b), lg_mark_of(6));
}

/* All ranks through step s. */
static void go(uint64_t s)
{
    for (int r = 0; r < shared.ranks; r++) {
        if (lg_trainer_next(b, r).kind == LG_DO_DECIDE) lg_commit_decide(b, s);
        assert_action(lg_trainer_next(b, r), LG_DO_FORWARD, s);
        lg_trainer_mark_grads(b, r, s, (struct lg_loss_sum){0});
    }
    for (int r = 0; r < shared.ranks; r++)
        lg_trainer_mark_partial(b, r, s, &(struct lg_exact_sum){0});
    for (int r = 0; r < shared.ranks; r++) {
        assert_action(lg_trainer_next(b, r), LG_DO_UPDATE, s);
        lg_trainer_mark_commit(b, r, s);
    }
}

static void init(void)
{
    for (int r = 0; r < shared.ranks; r++) lg_trainer_mark_init(b, r);
    if (shared.has_ema) lg_ema_mark(b, shared.start_step);
}

static void ema(uint64_t e)
{
    assert_action(lg_ema_next(b), LG_DO_ADVANCE, e);
    lg_ema_mark(b, e);
}

static void stage_moments(uint64_t s)
{
    assert_action(lg_ckpt_next(b), LG_DO_STAGE_MOMENTS, s);
    lg_ckpt_mark_staged_moments(b, s);
}

static void write_rest(uint64_t s)
{
    assert_action(lg_ckpt_next(b), LG_DO_STAGE, s);
    lg_ckpt_mark_staged(b, s);
    assert_action(lg_ckpt_next(b), LG_DO_WRITE, s);
    lg_ckpt_mark_published(b, s);
}

static void write_all(uint64_t s)
{
    stage_moments(s);
    write_rest(s);
}

/* Up to the point where the update of step s waits. */
static void go_to_update(uint64_t s)
{
    lg_commit_decide(b, s);
    lg_trainer_mark_grads(b, 0, s, (struct lg_loss_sum){0});
    lg_trainer_mark_partial(b, 0, s, &(struct lg_exact_sum){0});
}

static void test_floors(void **state)
{
    begin(1, 0, 100, 1);
    init();
    go(0); /* makes state 1, to be checkpointed */
    go_to_update(1);
    assert_waits(lg_trainer_next(b, 0),
                 "checkpoint staging");                    /* would move the moments of state 1 */
    stage_moments(1);                                      /* which wait for nobody */
    assert_action(lg_trainer_next(b, 0), LG_DO_UPDATE, 1); /* overwrites weights of state 0 */
    assert_waits(lg_ckpt_next(b), "ema");
    lg_trainer_mark_commit(b, 0, 1);
    go_to_update(2);
    assert_waits(lg_trainer_next(b, 0), "ema"); /* would overwrite state 1 */
    assert_waits(lg_ckpt_next(b), "ema");
    ema(1);
    assert_waits(lg_trainer_next(b, 0), "checkpoint staging");
    assert_action(lg_ckpt_next(b), LG_DO_STAGE, 1);
    lg_ckpt_mark_staged(b, 1);
    assert_action(lg_trainer_next(b, 0), LG_DO_UPDATE, 2);
    assert_action(lg_ckpt_next(b), LG_DO_WRITE, 1);
}

static void test_checkpoints_do_not_queue(void **state)
{
    begin(1, 0, 100, 2);
    init();
    go(0);
    assert_int_equal(lg_commit_decide(b, 1), LG_VERDICT_GO | LG_VERDICT_CHECKPOINT);
    go(1); /* state 2 is due */
    ema(1);
    ema(2);
    stage_moments(2);
    assert_action(lg_ckpt_next(b), LG_DO_STAGE, 2);
    lg_ckpt_mark_staged(b, 2);
    go(2);
    assert_int_equal(lg_commit_decide(b, 3), LG_VERDICT_GO); /* 2 is not published yet */
    ema(3);
    lg_ckpt_mark_published(b, 2);
    assert_int_equal(lg_commit_decide(b, 3), LG_VERDICT_GO); /* what was said stays */
    go(3);
    ema(4);
    assert_waits(lg_ckpt_next(b), "to come");
    go(4);
    ema(5);
    assert_int_equal(lg_commit_decide(b, 5), LG_VERDICT_GO | LG_VERDICT_CHECKPOINT);
}

/* Due checkpoints are passed over while an earlier one is not even staged. */
static void test_slow_writer(void **state)
{
    begin(1, 0, 100, 1);
    init();
    go(0);
    assert_int_equal(lg_commit_decide(b, 1), LG_VERDICT_GO); /* state 1 is waiting */
    stage_moments(1);
    go(1);
    ema(1);
    ema(2);
    assert_int_equal(lg_commit_decide(b, 2), LG_VERDICT_GO); /* still, for the other half */
    write_rest(1);
    go(2);
    assert_int_equal(lg_commit_decide(b, 3), LG_VERDICT_GO | LG_VERDICT_CHECKPOINT);
}

/* The last state is written even if the one before is still under way. */
static void test_last_checkpoint(void **state)
{
    uint64_t final = 0;
    begin(1, 7, 9, 1);
    init();
    assert_false(lg_commit_final(b, &final));
    go(7);
    ema(8);
    stage_moments(8);
    go(8);
    assert_true(lg_commit_final(b, &final));
    assert_int_equal(final, 9);
    assert_int_equal(lg_commit_verdict(b, 8),
                     LG_VERDICT_GO | LG_VERDICT_CHECKPOINT | LG_VERDICT_STOP);
    assert_action(lg_trainer_next(b, 0), LG_DO_DONE, 9);
    assert_false(lg_commit_complete(b));
    ema(9);
    assert_action(lg_ema_next(b), LG_DO_DONE, 9);
    write_rest(8);
    assert_false(lg_commit_complete(b));
    write_all(9);
    assert_action(lg_ckpt_next(b), LG_DO_DONE, 9);
    assert_true(lg_commit_complete(b));
}

static void test_drain(void **state)
{
    uint64_t final = 0;
    begin(2, 0, 1000, 0);
    init();
    go(0);
    ema(1);
    atomic_store(&shared.drain, 1);
    assert_int_equal(lg_commit_decide(b, 1),
                     LG_VERDICT_GO | LG_VERDICT_CHECKPOINT | LG_VERDICT_STOP);
    assert_true(lg_commit_final(b, &final));
    assert_int_equal(final, 2);
    go(1);
    assert_action(lg_trainer_next(b, 1), LG_DO_DONE, 2);
    ema(2);
    write_all(2);
    assert_true(lg_commit_complete(b));
    assert_true(lg_commit_final(b, &final));
    assert_int_equal(final, 2);
}

/* Ranks that are told to leave go at the same state: before the first step whose verdict says so. */
static void test_yield(void **state)
{
    (void)state;
    begin(2, 0, 100, 0);
    init();
    lg_commit_decide(b, 0);
    lg_trainer_mark_grads(b, 0, 0, (struct lg_loss_sum){0});
    atomic_store(&shared.yield, 1);
    for (int r = 0; r < 2; r++) assert_false(lg_trainer_may_leave(b, r)); /* step 0 is under way */
    lg_trainer_mark_grads(b, 1, 0, (struct lg_loss_sum){0});
    for (int r = 0; r < 2; r++) lg_trainer_mark_partial(b, r, 0, &(struct lg_exact_sum){0});
    assert_false(lg_trainer_may_leave(b, 0));
    lg_trainer_mark_commit(b, 0, 0);
    assert_false(lg_trainer_may_leave(b, 0)); /* the other one may need it to live: not yet */
    lg_trainer_mark_commit(b, 1, 0);
    assert_action(lg_trainer_next(b, 1), LG_DO_DECIDE, 1);
    assert_false(lg_trainer_may_leave(b, 1));
    assert_int_equal(lg_commit_decide(b, 1), LG_VERDICT_GO | LG_VERDICT_YIELD);
    for (int r = 0; r < 2; r++) assert_true(lg_trainer_may_leave(b, r));
    lg_trainer_mark_grads(b, 0, 1, (struct lg_loss_sum){0}); /* one that need not leave goes on */
    assert_false(lg_trainer_may_leave(b, 0));
    assert_true(lg_trainer_may_leave(b, 1));
    atomic_store(&shared.yield, 0);
    assert_true(lg_trainer_may_leave(b, 1)); /* what was said stays */
}

static void test_nothing_to_do(void **state)
{
    uint64_t final = 0;
    begin(1, 10, 10, 1);
    assert_true(lg_commit_final(b, &final));
    assert_int_equal(final, 10);
    assert_action(lg_ckpt_next(b), LG_DO_DONE, 10);
    assert_false(lg_commit_complete(b)); /* not before everybody has the state */
    shared.has_ema = false;
    assert_false(lg_commit_complete(b));
    shared.has_ema = true;
    init();
    assert_action(lg_trainer_next(b, 0), LG_DO_DONE, 10);
    assert_true(lg_commit_complete(b));
}

/* The ring of verdicts goes round several times; without EMA. */
static void test_long_run(void **state)
{
    uint64_t final = 0;
    begin(3, 0, 5 * LG_VERDICTS + 1, 10);
    shared.has_ema = false;
    init();
    for (uint64_t s = 0; s < shared.max_steps; s++) {
        assert_false(lg_commit_final(b, &final));
        go(s);
        if (lg_commit_verdict(b, s) & LG_VERDICT_CHECKPOINT) write_all(s + 1);
        assert_int_equal((s + 1) % 10 == 0 || s + 1 == shared.max_steps,
                         (lg_commit_verdict(b, s) & LG_VERDICT_CHECKPOINT) != 0);
        if (s >= LG_VERDICTS) assert_int_equal(lg_commit_verdict(b, s - LG_VERDICTS), 0);
    }
    assert_true(lg_commit_complete(b));
    assert_true(lg_commit_final(b, &final));
    assert_int_equal(final, shared.max_steps);
}

/* A checkpoint that is published is in nobody's way: the next step may have one, too. */
static void test_checkpoint_every_step(void **state)
{
    begin(1, 0, 100, 1);
    shared.has_ema = false;
    lg_trainer_mark_init(b, 0);
    for (uint64_t s = 0; s < 5; s++) {
        go(s);
        assert_true(lg_commit_verdict(b, s) & LG_VERDICT_CHECKPOINT);
        write_all(s + 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checkpoint_every_step),
        cmocka_unit_test(test_one_step),
        cmocka_unit_test(test_floors),
        cmocka_unit_test(test_checkpoints_do_not_queue),
        cmocka_unit_test(test_slow_writer),
        cmocka_unit_test(test_last_checkpoint),
        cmocka_unit_test(test_drain),
        cmocka_unit_test(test_yield),
        cmocka_unit_test(test_nothing_to_do),
        cmocka_unit_test(test_long_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
