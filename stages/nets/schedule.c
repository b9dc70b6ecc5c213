/* The learning rate: see the header. The warm-up ends with the peak at step warmup_steps - 1; step
 * warmup_steps is the decay's first and has the peak too. */
#include "stages/nets/schedule.h"
#include <math.h>

double lg_schedule_rate(const struct lg_schedule *s, int64_t step)
{
    LG_ASSERT(step >= 0);
    if (step < s->warmup_steps) return s->peak * (double)(step + 1) / (double)s->warmup_steps;
    if (s->kind == LG_SCHEDULE_CONSTANT) return s->peak;
    int64_t length = s->steps - s->warmup_steps;
    double p = length > 0 ? LG_MIN((double)(step - s->warmup_steps) / (double)length, 1.0) : 1.0;
    double f =
        s->kind == LG_SCHEDULE_COSINE ? 0.5 * (1.0 + cos(3.14159265358979323846 * p)) : 1 - p;
    return s->peak * (s->final_ratio + (1.0 - s->final_ratio) * f);
}
