/* Shapes, strides and views: where each element of one lies. */
#include "base/check.h"
#include "kernels/tensor.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static float memory[120];

static const float *element(lg_tensor t, const int64_t *index)
{
    int64_t at = 0;
    for (int i = 0; i < t.rank; i++) at += index[i] * t.stride[i];
    return (const float *)t.data + at;
}
#define AT(t, ...) (element(t, (const int64_t[]){__VA_ARGS__}) - memory)

static lg_tensor t3(int64_t a, int64_t b, int64_t c)
{
    return lg_t3(memory, LG_F32, a, b, c);
}

static void constructors(void **state)
{
    const int64_t dim[LG_RANK_MAX] = {2, 3, 1, 4, 1, 5};
    lg_tensor t = lg_tensor_of(memory, LG_F32, LG_RANK_MAX, dim), small = t3(2, 3, 4);
    assert_int_equal(lg_numel(&t), 120);
    assert_int_equal(lg_tensor_bytes(&t), 480);
    assert_int_equal(AT(t, 1, 2, 0, 3, 0, 4), 119);
    assert_true(lg_is_contiguous(&t) && lg_is_contiguous(&small));
    for (int i = small.rank; i < LG_RANK_MAX; i++)
        assert_true(small.dim[i] == 1 && small.stride[i] == 1);
}

/* Columns 4 to 7 of (2, 3, 12), as 2 heads of 2. */
static void views(void **state)
{
    lg_tensor part = lg_slice(t3(2, 3, 12), 2, 4, 4), heads = lg_split(part, 2, 2);
    assert_true(part.dim[2] == 4 && heads.rank == 4 && heads.dim[2] == 2 && heads.dim[3] == 2);
    assert_int_equal(AT(part, 1, 2, 3), 12 * 5 + 7);
    assert_int_equal(AT(heads, 1, 2, 1, 0), 12 * 5 + 6);
    assert_true(!lg_is_contiguous(&part) && !lg_is_contiguous(&heads));
    assert_int_equal(lg_numel(&heads), 24);
    assert_int_equal(lg_row_stride(&heads, 2), 12);
    lg_tensor rows = lg_split(lg_t2(memory, LG_F32, 6, 12), 0, 3), again = t3(2, 3, 12);
    assert_memory_equal(&rows, &again, sizeof rows);
    rows = lg_slice(again, 0, 1, 1);
    assert_true(lg_is_contiguous(&rows) && AT(rows, 0, 0, 0) == 36);
    lg_tensor absent = lg_slice(lg_t2(NULL, LG_F32, 2, 4), 1, 2, 2);
    assert_null(absent.data);
}

static void merging(void **state)
{
    lg_tensor part = lg_slice(t3(2, 3, 12), 2, 0, 4), middle = lg_slice(t3(2, 6, 4), 1, 0, 3);
    assert_true(lg_dims_merge(&part, 0, 2, 12) && !lg_dims_merge(&part, 0, 2, 4));
    assert_true(lg_dims_merge(&part, 2, 3, 1) && !lg_dims_merge(&part, 1, 3, 1));
    assert_true(!lg_dims_merge(&middle, 0, 2, 4) && lg_dims_merge(&middle, 1, 3, 1));
    lg_tensor turned = t3(2, 3, 4);
    turned.stride[1] = 1, turned.stride[2] = 3;
    assert_false(lg_is_contiguous(&turned));
    part.stride[1] = INT64_MAX / 2; /* no multiple of it is compared, nor overflows */
    assert_false(lg_dims_merge(&part, 0, 2, INT64_MAX / 2));
}

/* Of a dimension of 1 no stride counts, and a single row has at least its length. */
static void dimensions_of_1(void **state)
{
    lg_tensor t = lg_slice(t3(2, 5, 12), 1, 0, 1); /* rows 60 apart */
    assert_int_equal(lg_row_stride(&t, 2), 60);
    t.stride[1] = -7;
    assert_int_equal(lg_row_stride(&t, 2), 60);
    assert_true(lg_dims_merge(&t, 0, 2, 60) && !lg_is_contiguous(&t));
    t = lg_slice(t, 0, 0, 1);
    assert_true(lg_is_contiguous(&t));
    assert_int_equal(lg_row_stride(&t, 2), 12);
    t.stride[1] = 36;
    assert_int_equal(lg_row_stride(&t, 2), 36);
    assert_int_equal(lg_row_stride(&LG_NONE, 1), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(constructors),
        cmocka_unit_test(views),
        cmocka_unit_test(merging),
        cmocka_unit_test(dimensions_of_1),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
