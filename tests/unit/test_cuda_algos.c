/* The files of pinned algorithms: first come counts, the run's own file before the shared one. */
#include "base/fs.h"
#include "kernels/cuda/algos.c"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static char dir[SCRATCH_BYTES], shared[128], run[128];

static int setup(void **state)
{
    scratch_folder(dir);
    snprintf(shared, sizeof shared, "%s/cache/shared", dir);
    snprintf(run, sizeof run, "%s/algorithms", dir);
    setenv("LG_CUDA_CACHE", shared, 1);
    unsetenv("LG_CUDA_RUN_FILE");
    return 0;
}

static int teardown(void **state)
{
    return lg_remove_tree(dir);
}

static struct lg_cuda_algos *algos(void)
{
    struct lg_cuda_algos *a;
    assert_int_equal(lg_cuda_algos_open("GPU", 1, 2, &a), 0);
    return a;
}

static void test_first_counts(void **state)
{
    struct lg_cuda_algos *a = algos(), *b = algos();
    assert_null(lg_cuda_algos_find(a, "gemm 1"));
    assert_string_equal(lg_cuda_algos_pin(a, "gemm 1", "fast"), "fast");
    assert_string_equal(lg_cuda_algos_pin(b, "gemm 1", "other"), "fast"); /* b had not seen it */
    lg_cuda_algos_close(&a);
    a = algos();
    assert_string_equal(lg_cuda_algos_find(a, "gemm 1"), "fast");
    lg_cuda_algos_close(&a);
    lg_cuda_algos_close(&b);
}

static void test_a_run_keeps_its_own(void **state)
{
    struct lg_cuda_algos *a = algos();
    lg_cuda_algos_pin(a, "used", "one");
    lg_cuda_algos_pin(a, "not used", "one");
    lg_cuda_algos_close(&a);
    setenv("LG_CUDA_RUN_FILE", run, 1);
    a = algos();
    struct lg_cuda_algos *b = algos();
    assert_string_equal(lg_cuda_algos_find(a, "used"), "one");
    assert_string_equal(lg_cuda_algos_find(b, "used"), "one");
    assert_string_equal(lg_cuda_algos_pin(b, "new", "two"), "two");
    lg_cuda_algos_close(&a);
    lg_cuda_algos_close(&b);
    char *text;
    size_t bytes;
    assert_int_equal(lg_read_file(run, 4096, &text, &bytes), 0);
    assert_string_equal(text, "used = one\nnew = two\n"); /* once each, and no more */
    free(text);
    /* The shared file is lost and filled with other choices: the run goes on with its own. */
    assert_int_equal(unlink(shared), 0);
    unsetenv("LG_CUDA_RUN_FILE");
    a = algos();
    lg_cuda_algos_pin(a, "used", "changed");
    lg_cuda_algos_close(&a);
    setenv("LG_CUDA_RUN_FILE", run, 1);
    a = algos();
    assert_string_equal(lg_cuda_algos_find(a, "used"), "one");
    assert_string_equal(lg_cuda_algos_pin(a, "new", "three"), "two");
    lg_cuda_algos_close(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_first_counts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_run_keeps_its_own, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
