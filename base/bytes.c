/* See bytes.h. */
#include "base/bytes.h"
#include "base/check.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *lg_bytes_text(uint64_t bytes, char ret[32])
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    size_t u = 0;
    while (v >= 1024 && u + 1 < LG_ARRAY_LEN(unit)) v /= 1024, u++;
    snprintf(ret, 32, u ? "%.1f %s" : "%.0f %s", v, unit[u]);
    return ret;
}

bool lg_bytes_parse(const char *text, size_t *ret)
{
    static const struct {
        const char *unit;
        double bytes;
    } units[] = {{"", 1},     {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
                 {"KB", 1e3}, {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
    const size_t whole = strspn(text, "0123456789");
    if (!whole) return false;
    const size_t point = text[whole] == '.' ? strspn(text + whole + 1, "0123456789") : 0;
    const char *end = text + whole + (point ? 1 + point : 0);
    const double n = strtod(text, NULL);
    for (size_t i = 0; i < LG_ARRAY_LEN(units); i++) {
        double bytes = n * units[i].bytes;
        if (strcmp(end, units[i].unit) || bytes < 1 || bytes >= 0x1p62) continue;
        *ret = (size_t)bytes;
        return true;
    }
    return false;
}
