/* The factor on the loss. Gradients that are too small for 16 bits grow by it; it is taken off again where the gradient's
 * norm is and where the optimizer reads it. A power of two, so that in fp32 it changes no bit. Micikevicius et al.,
 * "Mixed Precision Training", 2018. */
#pragma once
#include "config/config.h"

#define LG_LOSS_SCALE_MAX ((int64_t)1 << 40)

struct lg_loss_scale {
    uint64_t scale; /* 1: none */
    uint64_t steps; /* finite ones since it last changed */
};
/* A run's first; {1} where there is none. */
struct lg_loss_scale lg_loss_scale_first(const lg_config *c);
/* After a step; finite: its gradient was. Without a factor in the config nothing changes. */
struct lg_loss_scale lg_loss_scale_next(const lg_config *c, struct lg_loss_scale s, bool finite);
