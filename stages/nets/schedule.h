/* The learning rate as a function of the step: linear warm-up, then constant, cosine or linear
 * decay to a final share of the peak. A pure function: a replayed step has the same rate. */
#pragma once
#include "base/check.h"
#include <stdint.h>

/* In the order of the configuration's enum. */
typedef enum lg_schedule_kind {
    LG_SCHEDULE_CONSTANT,
    LG_SCHEDULE_COSINE,
    LG_SCHEDULE_LINEAR
} lg_schedule_kind;

struct lg_schedule {
    lg_schedule_kind kind;
    double peak;
    int64_t warmup_steps;
    int64_t steps;      /* the whole schedule, warm-up included; beyond it the final rate holds */
    double final_ratio; /* end of cosine and linear, in units of peak */
};
/* Rate of the update made by step s = 0, 1, ...: peak (s + 1) / warmup_steps during the warm-up,
 * then by p = (s - warmup_steps) / (steps - warmup_steps), at most 1: peak (final + (1 - final)
 * f(p)), f being (1 + cos(pi p)) / 2 or 1 - p. */
double lg_schedule_rate(const struct lg_schedule *s, int64_t step);
