#include "base/clock.h"
#include <time.h>

static int64_t read_clock(clockid_t id)
{
    struct timespec ts;
    clock_gettime(id, &ts);
    return (int64_t)ts.tv_sec * LG_S_NS + ts.tv_nsec;
}

int64_t lg_now_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

int64_t lg_cpu_ns(void)
{
    return read_clock(CLOCK_PROCESS_CPUTIME_ID);
}
