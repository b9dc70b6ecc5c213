/* Which vectors loops over pixels use; see wide.h. */
#include "stages/io/wide.h"

static bool is_forbidden;

bool lg_wide(void)
{
#if LG_HAS_WIDE
    return !is_forbidden && __builtin_cpu_supports("avx2");
#else
    return false;
#endif
}

void lg_wide_allow(bool is_allowed)
{
    is_forbidden = !is_allowed;
}
