/* See loss_scale.h. */
#include "stages/trainer/loss_scale.h"
#include <string.h>

enum { FIRST = 1 << 16 };

static uint64_t first_scale(const lg_config *c)
{
    if (c->trainer_loss_scale) return (uint64_t)c->trainer_loss_scale;
    return strcmp(c->_precision, "fp16") ? 0 : FIRST;
}

struct lg_loss_scale lg_loss_scale_first(const lg_config *c)
{
    return (struct lg_loss_scale){.scale = LG_MAX(first_scale(c), (uint64_t)1)};
}

struct lg_loss_scale lg_loss_scale_next(const lg_config *c, struct lg_loss_scale s, bool finite)
{
    if (!first_scale(c)) return s;
    if (!finite) return (struct lg_loss_scale){.scale = LG_MAX(s.scale / 2, (uint64_t)1)};
    if (++s.steps < (uint64_t)c->trainer_loss_scale_steps) return s;
    return (struct lg_loss_scale){.scale = LG_MIN(2 * s.scale, (uint64_t)LG_LOSS_SCALE_MAX)};
}
