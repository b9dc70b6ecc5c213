/* Slurm's node lists; see places.h. */
#include "supervisor/hosts/places.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 256, GROUPS_MAX = 4, RANGE_MAX = 65536 };

struct walk {
    int (*fn)(void *arg, const char *name);
    void *arg;
    const char *list;
    int n;
};

static int bad(const struct walk *w)
{
    return LG_FAIL(LG_ERR_CONFIG, "\"%s\" is no node list of Slurm's", w->list);
}

/* "7" or "07-12" at *p, which is moved behind it. */
static bool take_range(const char **p, unsigned long *ret_low, unsigned long *ret_high,
                       int *ret_width)
{
    char *end;
    if (!isdigit((unsigned char)**p)) return false;
    *ret_low = *ret_high = strtoul(*p, &end, 10);
    *ret_width = (int)(end - *p);
    if (*end == '-') {
        if (!isdigit((unsigned char)end[1])) return false;
        *ret_high = strtoul(end + 1, &end, 10);
    }
    *p = end;
    return *ret_high >= *ret_low && *ret_high - *ret_low < RANGE_MAX;
}

/* What stands before the rest is settled; the rest may have more groups. */
static int expand(struct walk *w, const char *before, const char *rest, int groups)
{
    char name[NAME_BYTES];
    unsigned long low, high;
    int width;
    const size_t plain = strcspn(rest, "[]");
    if (strlen(before) + plain >= sizeof name) return bad(w);
    snprintf(name, sizeof name, "%s%.*s", before, (int)plain, rest);
    if (!rest[plain]) {
        w->n++;
        return name[0] ? w->fn(w->arg, name) : bad(w);
    }
    const char *p = rest + plain + 1, *close = strchr(p, ']');
    if (rest[plain] == ']' || !close || groups == GROUPS_MAX) return bad(w);
    for (;; p++) {
        if (!take_range(&p, &low, &high, &width) || (*p != ',' && p != close)) return bad(w);
        for (unsigned long v = low; v <= high; v++) {
            char longer[NAME_BYTES];
            const int n = snprintf(longer, sizeof longer, "%s%0*lu", name, width, v);
            if (n < 0 || n >= (int)sizeof longer) return bad(w);
            LG_TRY(expand(w, longer, close + 1, groups + 1));
        }
        if (p == close) return 0;
    }
}

int lg_hostlist_expand(const char *list, int (*fn)(void *arg, const char *name), void *arg)
{
    struct walk w = {.fn = fn, .arg = arg, .list = list};
    char item[NAME_BYTES];
    int depth = 0;
    const char *from = list;
    for (const char *p = list;; p++) {
        depth += *p == '[' ? 1 : *p == ']' ? -1 : 0;
        if (depth < 0 || depth > 1) return bad(&w);
        if (*p && (*p != ',' || depth)) continue;
        const int n = snprintf(item, sizeof item, "%.*s", (int)(p - from), from);
        if (depth || n < 1 || n >= (int)sizeof item) return bad(&w);
        LG_TRY(expand(&w, "", item, 0));
        if (!*p) return w.n;
        from = p + 1;
    }
}
