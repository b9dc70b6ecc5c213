/* See bytes.h. */
#include "base/bytes.h"
#include "base/check.h"
#include <stdio.h>

const char *lg_bytes_text(uint64_t bytes, char ret[32])
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    size_t u = 0;
    while (v >= 1024 && u + 1 < LG_ARRAY_LEN(unit)) v /= 1024, u++;
    snprintf(ret, 32, u ? "%.1f %s" : "%.0f %s", v, unit[u]);
    return ret;
}
