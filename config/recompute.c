/* See recompute.h. */
#include "config/recompute.h"
#include "base/bytes.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int refuse(const char *word, const char *why)
{
    return LG_FAIL(
        LG_ERR_CONFIG,
        "memory.recompute: \"%.60s\" %s; expected \"none\", \"norms\", \"mlp\", \"block\", a "
        "list of blocks like [0, 2, 5], \"every:N\", \"ratio:R\", \"uniform:N\" or \"budget:SIZE\"",
        word, why);
}

static size_t digits(const char *text)
{
    return strspn(text, "0123456789");
}

/* The whole text is digits; what is too large for an int64_t is as large as that. */
static bool whole(const char *text, int64_t *ret)
{
    size_t n = digits(text);
    if (!n || text[n]) return false;
    *ret = strtoll(text, NULL, 10);
    return true;
}

/* Digits, perhaps with a point between them; *ret_end: what follows. */
static bool decimal(const char *text, double *ret, const char **ret_end)
{
    size_t n = digits(text), more = text[n] == '.' ? digits(text + n + 1) : 0;
    if (!n) return false;
    *ret_end = text + n + (more ? 1 + more : 0);
    *ret = strtod(text, NULL);
    return true;
}

/* LiteGen's rule for selective_ratio: block i, from 1, is recomputed when i (1 - r) reaches the cutoff, which starts
 * at 0.5 and grows by 1 at each. */
static void choose_ratio(double r, int blocks, bool *ret)
{
    double cutoff = 0.5;
    for (int i = 1; i <= blocks; i++) {
        ret[i - 1] = i * (1 - r) >= cutoff;
        cutoff += ret[i - 1];
    }
}

static int parse_blocks(const char *const *words, int blocks, bool *ret)
{
    for (; *words; words++) {
        int64_t i;
        if (!whole(*words, &i)) return refuse(*words, "is no number of a block");
        if (i >= blocks)
            return LG_FAIL(LG_ERR_CONFIG,
                           "memory.recompute: there is no block %.60s: the net has %d, from 0 on",
                           *words, blocks);
        ret[i] = true;
    }
    return 0;
}

/* What is more than the net's blocks is as many. */
static int parse_count(const char *word, const char *n, int blocks, int *ret)
{
    int64_t count;
    if (!whole(n, &count) || count < 1) return refuse(word, "has no whole number of at least 1");
    *ret = (int)LG_MIN(count, (int64_t)LG_MAX(blocks, 1));
    return 0;
}

static int parse_every(const char *word, const char *n, int blocks, bool *ret)
{
    int every;
    LG_TRY(parse_count(word, n, blocks, &every));
    for (int i = 0; i < blocks; i++) ret[i] = i % every == 0;
    return 0;
}

static int parse_ratio(const char *word, const char *r, int blocks, bool *ret)
{
    double ratio;
    const char *end;
    if (!decimal(r, &ratio, &end) || *end || ratio > 1)
        return refuse(word, "has no number from 0 to 1");
    choose_ratio(ratio, blocks, ret);
    return 0;
}

static int parse_word(const char *word, int blocks, struct lg_recompute *r)
{
    if (!strcmp(word, "none")) return 0;
    if (!strcmp(word, "norms")) return r->kind = LG_RECOMPUTE_NORMS, 0;
    if (!strcmp(word, "mlp")) return r->kind = LG_RECOMPUTE_MLP, 0;
    if (!strncmp(word, "budget:", 7)) {
        r->kind = LG_RECOMPUTE_BUDGET;
        return lg_bytes_parse(word + 7, &r->budget)
                   ? 0
                   : refuse(word, "has no size like 10GiB or 512MiB");
    }
    if (!strncmp(word, "uniform:", 8)) {
        r->kind = LG_RECOMPUTE_UNIFORM;
        return parse_count(word, word + 8, blocks, &r->group);
    }
    r->kind = LG_RECOMPUTE_BLOCKS;
    if (!strncmp(word, "every:", 6)) return parse_every(word, word + 6, blocks, r->block);
    if (!strncmp(word, "ratio:", 6)) return parse_ratio(word, word + 6, blocks, r->block);
    if (strcmp(word, "block") != 0) return refuse(word, "is unknown");
    for (int i = 0; i < blocks; i++) r->block[i] = true;
    return 0;
}

int lg_recompute_parse(const char *const *words, int blocks, struct lg_recompute *ret)
{
    static const char *const nothing[] = {"none", NULL};
    struct lg_recompute r = {.block = calloc((size_t)LG_MAX(blocks, 1), sizeof *r.block)};
    int64_t n;
    int rc;
    LG_ASSERT(r.block);
    if (!words || !words[0]) words = nothing;
    if (words[1] || whole(words[0], &n)) {
        r.kind = LG_RECOMPUTE_BLOCKS;
        rc = parse_blocks(words, blocks, r.block);
    } else {
        rc = parse_word(words[0], blocks, &r);
    }
    if (rc < 0) {
        lg_recompute_free(&r);
        return rc;
    }
    *ret = r;
    return 0;
}

void lg_recompute_free(struct lg_recompute *r)
{
    free(r->block);
    r->block = NULL;
}
