/* How often each role may die: its own section's word, else the supervisor's; counted by it. */
#include "base/clock.h"
#include "supervisor/intensity.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static lg_config *load(const char *text)
{
    lg_config *c = NULL;
    if (lg_config_load(scratch_write("p.toml", text), NULL, 0, &c) < 0)
        fail_msg("%s", lg_err_text());
    return c;
}

static void assert_policy(const lg_config *c, const char *role, int64_t deaths_max,
                          int64_t window_s)
{
    struct lg_restart_policy p = lg_restart_policy(c, (lg_role)lg_role_find(role));
    if (p.deaths_max != deaths_max || p.window_s != window_s)
        fail_msg("%s: %lld in %lld s", role, (long long)p.deaths_max, (long long)p.window_s);
}

static const char *const roles[] = {"loader", "text", "vae", "trainer", "ema", "ckpt"};

static void test_the_supervisors(void **state)
{
    (void)state;
    lg_config *c = load("[supervisor]\nrestarts_max = 7\nrestart_window_s = 90\n");
    for (size_t r = 0; r < LG_ARRAY_LEN(roles); r++) assert_policy(c, roles[r], 7, 90);
    lg_config_free(&c);
}

/* Each role's number is another, so that none can be taken for its neighbour's. */
static void test_of_its_own(void **state)
{
    (void)state;
    lg_config *c = load("[loader]\nrestarts_max = 11\n[text]\nrestarts_max = 12\n"
                        "[vae]\nrestarts_max = 13\nrestart_window_s = 33\n"
                        "[trainer]\nrestarts_max = 14\n[ema]\nrestarts_max = 15\n"
                        "[checkpoint]\nrestart_window_s = 36\n");
    assert_policy(c, "loader", 11, 60);
    assert_policy(c, "text", 12, 60);
    assert_policy(c, "vae", 13, 33);
    assert_policy(c, "trainer", 14, 60);
    assert_policy(c, "ema", 15, 60);
    assert_policy(c, "ckpt", 5, 36);
    lg_config_free(&c);
}

static void test_counts(void **state)
{
    (void)state;
    lg_config *c = load("[vae]\nrestarts_max = 1\nrestart_window_s = 10\n");
    struct lg_restart_policy p = lg_restart_policy(c, LG_ROLE_vae);
    struct lg_intensity t;
    assert_int_equal(lg_intensity_init(&t, p.deaths_max, p.window_s), 0);
    assert_false(lg_intensity_exceeded(&t, 0, 3));
    assert_true(lg_intensity_exceeded(&t, 10 * LG_S_NS, 3));
    assert_false(lg_intensity_exceeded(&t, 11 * LG_S_NS, 3)); /* the first is too old */
    lg_intensity_free(&t);
    lg_config_free(&c);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, scratch_setup, scratch_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_the_supervisors),
        TEST(test_of_its_own),
        TEST(test_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
