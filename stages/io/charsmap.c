/* Checking a double-array trie; see charsmap.h.
 *
 * Every state that can be reached is visited. Each keeps the largest number of keys that end on any
 * way to it, and is visited again when that number grows; as it may not pass KEYS_MAX, circles end. */
#include "stages/io/charsmap.h"
#include "base/utf8.h"
#include <stdlib.h>
#include <string.h>

enum { PREFIX_BYTES = 4, UNIT_BYTES = 4, LABELS = 256, WAITING = 0x80 };

struct walk {
    const uint8_t *trie;
    uint32_t units;
    const char *texts;
    size_t texts_bytes;
    uint8_t *keys;  /* of each state: 0 not seen, else most keys on the way + 1; WAITING: in todo */
    uint32_t *todo; /* states to visit */
    uint32_t n_todo; /* at most units: a state is in there once */
};

static uint32_t unit(const struct walk *w, uint32_t i)
{
    const uint8_t *p = w->trie + (size_t)i * UNIT_BYTES;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static bool is_leaf(uint32_t u)
{
    return u >> 8 & 1;
}

static uint32_t label(uint32_t u)
{
    return u & (UINT32_C(1) << 31 | 0xFF);
}

static uint32_t offset(uint32_t u)
{
    return u >> 10 << ((u & 1 << 9) >> 6);
}

/* Whatever byte comes next, the unit that it leads to is looked at. */
static const char *arrive(struct walk *w, uint32_t state, unsigned keys)
{
    if ((state | (LABELS - 1)) >= w->units) return "leads out of itself";
    if (keys > LG_CHARSMAP_KEYS_MAX) return "has more than 32 keys that begin one another";
    if ((w->keys[state] & ~WAITING) > (int)keys) return NULL;
    if (!(w->keys[state] & WAITING)) w->todo[w->n_todo++] = state;
    w->keys[state] = (uint8_t)(WAITING | (keys + 1));
    return NULL;
}

static const char *check_text(const struct walk *w, uint32_t value)
{
    size_t at = value & INT32_MAX;
    if (at >= w->texts_bytes) return "names a replacement behind its end";
    size_t left = LG_MIN(w->texts_bytes - at, (size_t)LG_CHARSMAP_TEXT_MAX + 1);
    size_t n = strnlen(w->texts + at, left);
    if (n == left) return "has a replacement without an end, or of more than 255 bytes";
    return lg_utf8_valid(w->texts + at, n) ? NULL : "has a replacement that is not UTF-8";
}

static const char *visit(struct walk *w, uint32_t state)
{
    unsigned keys = (w->keys[state] &= (uint8_t)~WAITING) - 1u;
    for (uint32_t c = 0; c < LABELS; c++) {
        uint32_t u = unit(w, state ^ c), next = state ^ c ^ offset(u);
        if (label(u) != c) continue;
        const char *wrong = arrive(w, next, keys + is_leaf(u));
        if (!wrong && is_leaf(u)) wrong = check_text(w, unit(w, next));
        if (wrong) return wrong;
    }
    return NULL;
}

static const char *walk_all(struct walk *w)
{
    const char *wrong = arrive(w, offset(unit(w, 0)), 0);
    while (!wrong && w->n_todo) wrong = visit(w, w->todo[--w->n_todo]);
    return wrong;
}

const char *lg_charsmap_check(const void *data, size_t bytes)
{
    const uint8_t *p = data;
    if (bytes < PREFIX_BYTES) return "is cut off";
    uint32_t trie =
        (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    if (trie >= bytes - PREFIX_BYTES) return "is cut off";
    if (trie == 0 || trie % UNIT_BYTES) return "has a trie of an impossible size";
    if (trie / UNIT_BYTES > LG_CHARSMAP_UNITS_MAX) return "has a trie of more than 1 MiB";
    struct walk w = {.trie = p + PREFIX_BYTES,
                     .units = trie / UNIT_BYTES,
                     .texts = (const char *)p + PREFIX_BYTES + trie,
                     .texts_bytes = bytes - PREFIX_BYTES - trie};
    w.keys = calloc(w.units, sizeof *w.keys);
    w.todo = calloc(w.units, sizeof *w.todo);
    const char *wrong = w.keys && w.todo ? walk_all(&w) : "does not fit into memory";
    free(w.keys);
    free(w.todo);
    return wrong;
}
