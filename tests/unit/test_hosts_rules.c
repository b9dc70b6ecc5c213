/* What follows from the cards of several hosts (shm/hosts.h), one rule a test, on the board of host 1 of 3: a new leader hears
 * all who are left before it decides, and what was said in another epoch is not believed. */
#include "shm/board.h"
#include "shm/commit.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { HOSTS = 3, ME = 1, ALL = 7, WITHOUT_0 = 6, WITHOUT_2 = 3, STATE = 40 };

static lg_board g_board;

static int open_board(void **state)
{
    (void)state;
    struct lg_board_shared *s = calloc(1, sizeof *s);
    if (!s) return -1;
    *s = (struct lg_board_shared){.start_step = STATE,
                                  .max_steps = 1000,
                                  .batch = 4,
                                  .checkpoint_every = 100,
                                  .ranks = 1,
                                  .sequence = 1,
                                  .hosts = {.count = HOSTS, .host = ME, .comes = true}};
    g_board = (lg_board){s, -1};
    return 0;
}

static int close_board(void **state)
{
    (void)state;
    free(g_board.s);
    return 0;
}

static void enter(uint64_t number, uint64_t members, int leader)
{
    const struct lg_hosts_record e = {
        .formation = 1, .number = number, .members = members, .leader = leader};
    lg_hosts_enter(&g_board, &e);
    lg_exchange_mark_entered(&g_board, 0, number);
}

/* A host with state `step`, which has not exchanged that step. */
static struct lg_host_said at(uint64_t step)
{
    return (struct lg_host_said){.commit = lg_mark_of(step), .exchanged = lg_mark_of(step - 1)};
}

static void say_own(uint64_t epoch)
{
    struct lg_host_said own;
    assert_true(lg_hosts_say(&g_board, epoch, &own));
    lg_hosts_hear(&g_board, ME, epoch, &own);
}

static void hear(int h, uint64_t epoch, struct lg_host_said said)
{
    lg_hosts_hear(&g_board, h, epoch, &said);
}

/* Epoch 1, led by host 0; all have state STATE. Its word for that step has not come here. */
static void begin(void)
{
    enter(1, ALL, 0);
    lg_exchange_mark_fetched(&g_board, 0);
    lg_trainer_mark_init(&g_board, 0);
    hear(0, 1, at(STATE));
    say_own(1);
    hear(2, 1, at(STATE));
    const struct lg_action a = lg_trainer_next(&g_board, 0);
    assert_int_equal(a.kind, LG_DO_WAIT);
    assert_string_equal(a.why, "the leading host's word");
}

/* Host 0, which led, has told host 2 to yield, and died. */
static void test_new_leader_adopts(void **state)
{
    (void)state;
    const uint64_t word = (uint64_t)STATE << LG_VERDICT_BITS | LG_VERDICT_GO | LG_VERDICT_YIELD;
    struct lg_host_said other = at(STATE);
    begin();
    enter(2, WITHOUT_0, ME);
    assert_true(lg_hosts_is_leader(&g_board));
    assert_int_equal(lg_trainer_next(&g_board, 0).kind, LG_DO_WAIT);
    say_own(2);
    assert_false(lg_hosts_may_decide(&g_board));
    assert_int_equal(lg_trainer_next(&g_board, 0).kind, LG_DO_WAIT); /* host 2 has not spoken yet */
    other.verdict[0] = word;
    hear(2, 2, other);
    assert_int_equal(lg_trainer_next(&g_board, 0).kind, LG_DO_FORWARD);
    assert_int_equal(lg_commit_verdict(&g_board, STATE), LG_VERDICT_GO | LG_VERDICT_YIELD);
}

static void test_new_leader_decides(void **state)
{
    (void)state;
    begin();
    enter(2, WITHOUT_0, ME);
    say_own(2);
    hear(2, 2, at(STATE)); /* has not heard host 0 either */
    assert_true(lg_hosts_may_decide(&g_board));
    assert_int_equal(lg_trainer_next(&g_board, 0).kind, LG_DO_DECIDE);
}

/* The former leader, too, who leads another epoch: its members may not be the same lives. */
static void test_leader_again(void **state)
{
    (void)state;
    begin();
    enter(2, WITHOUT_2, ME);
    say_own(2);
    hear(0, 2, at(STATE));
    assert_true(lg_hosts_may_decide(&g_board));
    enter(3, ALL, ME);
    assert_false(lg_hosts_may_decide(&g_board));
    say_own(3);
    hear(0, 3, at(STATE));
    assert_false(lg_hosts_may_decide(&g_board));
    hear(2, 2, at(STATE)); /* a card that is late */
    assert_false(lg_hosts_may_decide(&g_board));
    hear(2, 3, at(STATE));
    assert_true(lg_hosts_may_decide(&g_board));
}

/* Host 2 had exchanged the step, and more, when it died; another life has its number. */
static void test_former_life_is_not_believed(void **state)
{
    (void)state;
    const struct lg_host_said far = {.commit = lg_mark_of(STATE),
                                     .exchanged = lg_mark_of(STATE),
                                     .published = lg_mark_of(STATE),
                                     .asks = LG_HOST_ASKS_DRAIN};
    begin();
    hear(0, 1, far);
    hear(2, 1, far);
    enter(2, WITHOUT_2, 0);
    say_own(2);
    hear(0, 2, at(STATE));
    enter(3, ALL, 0);
    say_own(3);
    struct lg_host_said done = at(STATE);
    done.exchanged = lg_mark_of(STATE);
    hear(0, 3, done);
    hear(ME, 3, done);
    assert_false(lg_hosts_have_exchanged(&g_board, STATE));
    assert_int_equal(lg_hosts_asks(&g_board) & LG_HOST_ASKS_DRAIN, 0);
    assert_false(lg_hosts_published(&g_board, STATE));
    hear(2, 2, far); /* a card that is late */
    assert_false(lg_hosts_have_exchanged(&g_board, STATE));
    hear(2, 3, at(STATE)); /* the new one has exchanged nothing */
    assert_false(lg_hosts_have_exchanged(&g_board, STATE));
    hear(2, 3, done);
    assert_true(lg_hosts_have_exchanged(&g_board, STATE));
    hear(2, 2, at(STATE)); /* nor does a late one take away what is known */
    assert_true(lg_hosts_have_exchanged(&g_board, STATE));
}

/* What a survivor said before the death may be overtaken: it had not exchanged the step then, and has by now. */
static void test_rest_is_of_this_epoch(void **state)
{
    (void)state;
    uint64_t rest;
    begin();
    enter(2, WITHOUT_2, 0);
    say_own(2);
    assert_false(lg_hosts_settled(&g_board, &rest));
    struct lg_host_said ahead = at(STATE + 1); /* and it has even updated */
    hear(0, 2, ahead);
    assert_false(lg_hosts_settled(&g_board, &rest));
    enter(3, WITHOUT_0, ME);
    say_own(3);
    assert_false(lg_hosts_settled(&g_board, &rest));
    hear(2, 3, at(STATE));
    assert_true(lg_hosts_settled(&g_board, &rest));
    assert_int_equal(rest, STATE);
}

/* All have exchanged the step, and will update. A card from before that, by a connection that was given up, comes last: who
 * believed it would call the survivors settled in a state that they are about to leave. */
static void test_late_card_takes_nothing_back(void **state)
{
    (void)state;
    uint64_t rest;
    struct lg_host_said done = at(STATE);
    done.exchanged = done.published = lg_mark_of(STATE);
    begin();
    enter(2, WITHOUT_2, 0);
    hear(ME, 2, done);
    hear(0, 2, at(STATE));
    assert_true(lg_hosts_settled(&g_board, &rest));
    hear(0, 2, done);
    assert_false(lg_hosts_settled(&g_board, &rest));
    hear(0, 2, at(STATE));
    assert_false(lg_hosts_settled(&g_board, &rest));
    assert_true(lg_hosts_have_exchanged(&g_board, STATE));
    assert_int_equal(lg_hosts_write(&g_board, STATE), LG_HOST_WRITTEN);
    hear(0, 2, at(STATE + 1));
    hear(0, 2, done);
    assert_false(
        lg_hosts_settled(&g_board, &rest)); /* host 0 has state STATE + 1, this one STATE */
}

/* Of the leader of the epoch before it was known that it had the files; the new one has not said so. */
static void test_files_of_this_epochs_leader(void **state)
{
    (void)state;
    struct lg_host_said has = at(STATE);
    has.published = lg_mark_of(STATE);
    begin();
    hear(2, 1, has);
    assert_int_equal(lg_hosts_write(&g_board, STATE), LG_HOST_WRITE_WAIT);
    hear(0, 1, has);
    assert_int_equal(lg_hosts_write(&g_board, STATE), LG_HOST_WRITTEN);
    enter(2, WITHOUT_0, 2);
    assert_int_equal(lg_hosts_write(&g_board, STATE), LG_HOST_WRITE_WAIT);
    hear(2, 2, has);
    assert_int_equal(lg_hosts_write(&g_board, STATE), LG_HOST_WRITTEN);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_board, close_board)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_new_leader_adopts),
        TEST(test_new_leader_decides),
        TEST(test_leader_again),
        TEST(test_former_life_is_not_believed),
        TEST(test_rest_is_of_this_epoch),
        TEST(test_late_card_takes_nothing_back),
        TEST(test_files_of_this_epochs_leader),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
