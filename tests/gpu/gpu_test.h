/* What the GPU tests share: counting results, opening devices. No test library: these programs run on
 * machines where nothing of ours is installed. */
#pragma once
#include "base/check.h"
#include "kernels/device.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int gpu_passed, gpu_failed;

/* One result. What failed is printed by whoever found it. */
static inline void gpu_count(bool ok)
{
    *(ok ? &gpu_passed : &gpu_failed) += 1;
}
/* The last line of a program; its value is the exit status. */
static inline int gpu_summary(void)
{
    printf("%d passed, %d failed\n", gpu_passed, gpu_failed);
    return gpu_failed != 0 || gpu_passed == 0;
}
static inline void gpu_need(int rc)
{
    if (rc == 0) return;
    fprintf(stderr, "%s\n", lg_err_text());
    exit(2);
}
static inline lg_device *gpu_open(const char *name, const char *precision)
{
    lg_device *d = NULL;
    gpu_need(lg_device_open(name, &(struct lg_device_options){.precision = precision}, &d));
    return d;
}

/* A precision under test: relative error in the 2-norm that one operation may have against ref64 on the
 * same (rounded) inputs. fp32: sums of a thousand terms stay below 2e-6. tf32: rounding an operand to 11
 * bits costs 2e-4 (2^-11 / sqrt(3), times 0.7 for where in a binade it lies), two of them 2.9e-4, a
 * fifth on top for small samples. fp16: results rounded to 11 bits. bf16: to 8 bits. */
struct gpu_precision {
    const char *name;
    lg_dtype round;
    double tolerance;
};
static const struct gpu_precision GPU_PRECISIONS[] = {{"fp32", LG_F32, 1e-5},
                                                      {"tf32", LG_F32, 3.5e-4},
                                                      {"fp16", LG_F16, 2e-3},
                                                      {"bf16", LG_BF16, 1e-2}};
enum { GPU_PRECISION_COUNT = 4 };
