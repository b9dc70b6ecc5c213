/* Limits of memory that control groups set, told by a tree of files of this test. */
#include "base/cgroup.h"
#include "tests/sim/control_groups.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static void assert_self(const char *told, const char *want)
{
    char group[LG_PATH_BYTES];
    control_group_is(told);
    lg_cgroup_self(group);
    assert_string_equal(group, want);
}

static void test_self(void **state)
{
    (void)state;
    char group[LG_PATH_BYTES];
    lg_cgroup_self(group);
    assert_string_equal(group, "/"); /* nothing is told */
    assert_self("0::/lg.slice/lgsup.service\n", "/lg.slice/lgsup.service");
    assert_self("9:name=systemd:/user\n4:memory:/limited\n0::/\n", "/");
    assert_self("4:memory:/limited\n0::/user.slice/a.scope\n", "/user.slice/a.scope");
    assert_self("0::/../../other\n", "/"); /* of a container that does not see it */
    assert_self("10::/no\n", "/");
    assert_self("", "/");
}

static void test_parent(void **state)
{
    (void)state;
    static const struct {
        const char *group, *above;
    } cases[] = {{"/a/b/c", "/a/b"}, {"/a/b", "/a"}, {"/a", "/"}, {"/", "/"}};
    char above[LG_PATH_BYTES];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_cgroup_parent(cases[i].group, above);
        assert_string_equal(above, cases[i].above);
    }
}

static void assert_limit(const char *group, uint64_t bytes, uint64_t free_bytes, const char *whose)
{
    struct lg_cgroup_limit l;
    lg_cgroup_limit(group, &l);
    if (l.bytes != bytes || l.free_bytes != free_bytes || strcmp(l.group, whose) != 0)
        fail_msg("%s: %llu of %s, %llu free", group, (unsigned long long)l.bytes, l.group,
                 (unsigned long long)l.free_bytes);
}

/* The least of a group's limit and of all above it holds; so does the least of what they have left. */
static void test_limit(void **state)
{
    (void)state;
    assert_limit("/lg.slice/a.service", LG_CGROUP_NONE, LG_CGROUP_NONE, "");
    control_group("/lg.slice", "memory.max", "max\n");
    control_group("/lg.slice", "memory.current", "400\n");
    assert_limit("/lg.slice/a.service", LG_CGROUP_NONE, LG_CGROUP_NONE, "");
    control_group("/lg.slice", "memory.max", "1000\n");
    assert_limit("/lg.slice/a.service", 1000, 600, "/lg.slice");
    assert_limit("/lg.slice", 1000, 600, "/lg.slice");
    assert_limit("/other.slice", LG_CGROUP_NONE, LG_CGROUP_NONE, "");
    control_group("/lg.slice/a.service", "memory.max", "800\n");
    control_group("/lg.slice/a.service", "memory.current", "10\n");
    assert_limit("/lg.slice/a.service", 800, 600, "/lg.slice/a.service"); /* siblings use 390 */
    assert_limit("/lg.slice", 1000, 600, "/lg.slice");
    control_group("/", "memory.max", "500\n"); /* of the container */
    assert_limit("/lg.slice/a.service", 500, 600, "/");
    control_group("/", "memory.current", "499\n");
    assert_limit("/lg.slice/a.service", 500, 1, "/");
    /* A cache that would be given back; more use than the limit, which was lowered meanwhile. */
    control_group("/", "memory.stat", "anon 1\ninactive_file 99\ninactive_file_more 400\n");
    assert_limit("/lg.slice/a.service", 500, 100, "/");
    control_group("/", "memory.stat", "anon 1\n");
    control_group("/", "memory.current", "501\n");
    assert_limit("/lg.slice/a.service", 500, 0, "/");
    control_group("/", "memory.max", "few\n");
    assert_limit("/lg.slice/a.service", 800, 600, "/lg.slice/a.service");
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, control_groups_setup, control_groups_teardown)
    const struct CMUnitTest tests[] = {TEST(test_self), TEST(test_parent), TEST(test_limit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
