/* See param_groups.h. */
#include "config/param_groups.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FACTOR_MAX 1e6

static int refuse(const char *text, const char *why)
{
    return LG_FAIL(LG_ERR_CONFIG,
                   "trainer.groups: \"%s\": %s; expected \"PATTERN frozen\", with "
                   "storage=auto|fp8|int8 if wanted, or \"PATTERN lr=X decay=Y "
                   "optimizer=adamw|adamw8bit\" with one or more of these, as \"*.bias decay=0\"",
                   text, why);
}

/* "NAME=REST": REST, else NULL. */
static const char *value_of(const char *word, const char *name)
{
    const size_t n = strlen(name);
    return strncmp(word, name, n) ? NULL : word + n;
}

/* "NAME=X", X a plain number; false: it is none, or out of bounds. */
static bool factor(const char *word, const char *name, double *ret)
{
    const char *digits = value_of(word, name);
    char *end;
    if (!digits || !*digits || digits[strspn(digits, "0123456789.")]) return false;
    *ret = strtod(digits, &end);
    return !*end && *ret <= FACTOR_MAX;
}

bool lg_storage_find(const char *word, lg_storage *ret)
{
    static const char *const words[] = {
        [LG_STORAGE_AUTO] = "auto", [LG_STORAGE_FP8] = "fp8", [LG_STORAGE_INT8] = "int8"};
    for (size_t i = 0; i < LG_ARRAY_LEN(words); i++) {
        if (strcmp(word, words[i])) continue;
        *ret = (lg_storage)i;
        return true;
    }
    return false;
}

static bool take_word(const char *word, struct lg_param_group *g)
{
    const char *value;
    if (!strcmp(word, "frozen")) return g->is_frozen = true;
    if ((value = value_of(word, "storage=")))
        return g->has_storage = lg_storage_find(value, &g->storage);
    if ((value = value_of(word, "optimizer="))) {
        g->is_8_bit = !strcmp(value, "adamw8bit");
        return g->has_optimizer = g->is_8_bit || !strcmp(value, "adamw");
    }
    return factor(word, "lr=", &g->lr) || factor(word, "decay=", &g->decay);
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
    for (const char *w; (w = strtok_r(NULL, " ", &save)); words++)
        if (!take_word(w, &g))
            return refuse(
                text,
                "it has a word that is none of these, or a factor that is no number from 0 to 1e6");
    if (!words) return refuse(text, "it does not say what becomes of them");
    if (g.is_frozen && words > 1 + g.has_storage)
        return refuse(text, "what is frozen has no factors and no optimizer");
    *ret = g;
    return 0;
}
