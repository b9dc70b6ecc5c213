/* See param_groups.h. */
#include "config/param_groups.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FACTOR_MAX 1e6

static int refuse(const char *text, const char *why)
{
    return LG_FAIL(LG_ERR_CONFIG,
                   "trainer.groups: \"%s\": %s; expected \"PATTERN frozen\" or \"PATTERN lr=X "
                   "decay=Y\" with one or both factors, as \"*.bias decay=0\"",
                   text, why);
}

/* "NAME=X", X a plain number; false: it is none, or out of bounds. */
static bool factor(const char *word, const char *name, double *ret)
{
    size_t n = strlen(name);
    const char *digits = word + n;
    char *end;
    if (strncmp(word, name, n) || !*digits || digits[strspn(digits, "0123456789.")]) return false;
    *ret = strtod(digits, &end);
    return !*end && *ret <= FACTOR_MAX;
}

int lg_param_group_parse(const char *text, struct lg_param_group *ret)
{
    struct lg_param_group g = {.lr = 1, .decay = 1};
    char copy[512], *save = NULL;
    int words = 0;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy)
        return refuse("...", "it is too long");
    const char *pattern = strtok_r(copy, " ", &save);
    if (!pattern) return refuse(text, "it is empty");
    if (strlen(pattern) >= sizeof g.pattern)
        return refuse(text, "its pattern is longer than any name");
    strcpy(g.pattern, pattern);
    for (const char *w; (w = strtok_r(NULL, " ", &save)); words++) {
        if (!strcmp(w, "frozen"))
            g.is_frozen = true;
        else if (!factor(w, "lr=", &g.lr) && !factor(w, "decay=", &g.decay))
            return refuse(
                text,
                "it has a word that is none of these, or a factor that is no number from 0 to 1e6");
    }
    if (!words) return refuse(text, "it does not say what becomes of them");
    if (g.is_frozen && words > 1) return refuse(text, "what is frozen has no factors");
    *ret = g;
    return 0;
}
