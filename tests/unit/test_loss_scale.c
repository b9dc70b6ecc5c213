/* The factor on the loss: where it begins, how it is halved and doubled, where there is none. */
#include "base/check.h"
#include "stages/trainer/loss_scale.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static lg_config config(const char *precision, int64_t scale, int64_t steps)
{
    lg_config c;
    memset(&c, 0, sizeof c);
    c._precision = (char *)precision;
    c.trainer_loss_scale = scale;
    c.trainer_loss_scale_steps = steps;
    return c;
}

static void test_first(void **state)
{
    (void)state;
    lg_config none = config("bf16", 0, 10), half = config("fp16", 0, 10);
    lg_config own = config("fp32", 8, 10), half_own = config("fp16", 2, 10);
    assert_int_equal(lg_loss_scale_first(&none).scale, 1);
    assert_int_equal(lg_loss_scale_first(&half).scale, 65536);
    assert_int_equal(lg_loss_scale_first(&own).scale, 8);
    assert_int_equal(lg_loss_scale_first(&half_own).scale, 2);
}

static void test_none(void **state)
{
    (void)state;
    lg_config c = config("bf16", 0, 1);
    struct lg_loss_scale s = lg_loss_scale_first(&c);
    for (int i = 0; i < 10; i++) {
        s = lg_loss_scale_next(&c, s, i % 2);
        assert_true(s.scale == 1 && s.steps == 0);
    }
}

static void test_moves(void **state)
{
    (void)state;
    lg_config c = config("fp16", 4, 3);
    struct lg_loss_scale s = lg_loss_scale_first(&c);
    static const struct {
        bool finite;
        uint64_t scale, steps;
    } want[] = {{true, 4, 1},  {true, 4, 2}, {true, 8, 0},  {true, 8, 1},
                {false, 4, 0}, {true, 4, 1}, {false, 2, 0}, {false, 1, 0},
                {false, 1, 0}, {true, 1, 1}, {true, 1, 2},  {true, 2, 0}};
    for (size_t i = 0; i < LG_ARRAY_LEN(want); i++) {
        s = lg_loss_scale_next(&c, s, want[i].finite);
        assert_int_equal(s.scale, want[i].scale);
        assert_int_equal(s.steps, want[i].steps);
    }
}

static void test_bounded(void **state)
{
    (void)state;
    lg_config c = config("fp16", LG_LOSS_SCALE_MAX / 2, 1);
    struct lg_loss_scale s = lg_loss_scale_first(&c);
    for (int i = 0; i < 5; i++) s = lg_loss_scale_next(&c, s, true);
    assert_int_equal(s.scale, LG_LOSS_SCALE_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first),
        cmocka_unit_test(test_none),
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
