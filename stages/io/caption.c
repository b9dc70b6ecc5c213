/* See caption.h. */
#include "stages/io/caption.h"
#include "base/philox.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

struct lg_tag {
    size_t at, bytes; /* in the text */
};

enum lg_caption_choice lg_caption_choice_of(const char *text)
{
    return !strcmp(text, "first")    ? LG_CAPTION_FIRST
           : !strcmp(text, "random") ? LG_CAPTION_RANDOM
                                     : LG_CAPTION_LISTED;
}

/* Without white space at its ends. */
static const char *trim(const char *s, size_t *bytes)
{
    while (*bytes && isspace((unsigned char)*s)) s++, --*bytes;
    while (*bytes && isspace((unsigned char)s[*bytes - 1])) --*bytes;
    return s;
}

const char *lg_caption_line(const char **text, size_t *ret_bytes)
{
    while (**text) {
        size_t bytes = strcspn(*text, "\r\n");
        const char *line = *text;
        *text += bytes + ((*text)[bytes] != 0);
        line = trim(line, &bytes);
        if (!bytes) continue;
        *ret_bytes = bytes;
        return line;
    }
    return NULL;
}

/* ---- choosing ---- */

/* [0, count) */
static uint64_t pick(uint32_t word, uint64_t count)
{
    return word * count >> 32;
}

/* Line `wanted` of all captions, NULL: there are fewer, *ret_count of them. */
static const char *find_line(const char *const *caption, int count, uint64_t wanted,
                             size_t *ret_bytes, uint64_t *ret_count)
{
    *ret_count = 0;
    for (int i = 0; i < count; i++) {
        const char *text = caption[i], *line;
        while ((line = lg_caption_line(&text, ret_bytes)))
            if ((*ret_count)++ == wanted) return line;
    }
    return NULL;
}

static int reserve(void **data, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity) return 0;
    void *p = realloc(*data, need * size);
    if (!p) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a caption of %zu bytes", need);
    *data = p;
    *capacity = need;
    return 0;
}

static const char *choose(const struct lg_caption_rule *rule, uint32_t word,
                          const char *const *caption, int count, size_t *ret_bytes)
{
    const char *text = "";
    uint64_t lines;
    *ret_bytes = 0;
    if (count > 0 && rule->choice == LG_CAPTION_LISTED) {
        text = caption[pick(word, (uint64_t)count)];
        *ret_bytes = strlen(text);
        return text;
    }
    find_line(caption, count, UINT64_MAX, ret_bytes, &lines);
    if (!lines) return text;
    const uint64_t wanted = rule->choice == LG_CAPTION_RANDOM ? pick(word, lines) : 0;
    return find_line(caption, count, wanted, ret_bytes, &lines);
}

/* ---- tags ---- */

/* Cuts text at commas; at most one tag more than commas. */
static size_t cut_tags(const char *text, size_t bytes, struct lg_tag *ret)
{
    size_t n = 0;
    for (size_t at = 0, end; at <= bytes; at = end + 1) {
        const char *comma = memchr(text + at, ',', bytes - at);
        end = comma ? (size_t)(comma - text) : bytes;
        size_t length = end - at;
        const char *tag = trim(text + at, &length);
        if (length) ret[n++] = (struct lg_tag){.at = (size_t)(tag - text), .bytes = length};
    }
    return n;
}

/* Fisher and Yates: the i-th exchange takes word i of the stream. */
static void shuffle(struct lg_tag *tag, size_t n, uint64_t seed, uint64_t sample)
{
    lg_philox_out words = {0};
    for (size_t i = 0; i + 1 < n; i++) {
        if (i % 4 == 0) words = lg_philox(seed, LG_PURPOSE_TAGS, sample, i / 4);
        const size_t k = i + (size_t)pick(words.v[i % 4], n - i);
        const struct lg_tag t = tag[i];
        tag[i] = tag[k];
        tag[k] = t;
    }
}

/* Tags and ", " between them may be longer than what was written without the space. */
static int shuffle_tags(const struct lg_caption_rule *rule, uint64_t seed, uint64_t n,
                        const char *text, size_t bytes, lg_caption *c)
{
    size_t commas = 0;
    for (size_t i = 0; i < bytes; i++) commas += text[i] == ',';
    LG_TRY(reserve((void **)&c->tag, &c->tag_capacity, commas + 1, sizeof *c->tag));
    LG_TRY(reserve((void **)&c->text, &c->capacity, bytes + commas + 1, 1));
    const size_t tags = cut_tags(text, bytes, c->tag);
    const size_t kept = (size_t)LG_MIN((uint64_t)rule->keep_tags, tags);
    shuffle(c->tag + kept, tags - kept, seed, n);
    char *to = c->text;
    for (size_t i = 0; i < tags; i++) {
        if (i) to = (char *)memcpy(to, ", ", 2) + 2;
        to = (char *)memcpy(to, text + c->tag[i].at, c->tag[i].bytes) + c->tag[i].bytes;
    }
    *to = 0;
    return 0;
}

int lg_caption_choose(const struct lg_caption_rule *rule, uint64_t seed, uint64_t n,
                      const char *const *caption, int count, lg_caption *c, const char **ret)
{
    size_t bytes;
    const uint32_t word = lg_philox(seed, LG_PURPOSE_CAPTION, n, 0).v[0];
    const char *text = choose(rule, word, caption, count, &bytes);
    *ret = text;
    if (!text[bytes] && !rule->shuffle_tags) return 0;
    if (rule->shuffle_tags) {
        LG_TRY(shuffle_tags(rule, seed, n, text, bytes, c));
    } else {
        LG_TRY(reserve((void **)&c->text, &c->capacity, bytes + 1, 1));
        memcpy(c->text, text, bytes);
        c->text[bytes] = 0;
    }
    *ret = c->text;
    return 0;
}

void lg_caption_free(lg_caption *c)
{
    free(c->text);
    free(c->tag);
    *c = (lg_caption){0};
}
