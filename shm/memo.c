/* See memo.h. Open addressing with linear probing; an entry is looked for at a bounded number of places, since those that
 * nobody finishes are never emptied. */
#include "shm/memo.h"
#include "base/bytes.h"
#include <string.h>
#include <xxhash.h>

enum { PROBES = 16 };
enum { EMPTY, WRITTEN, THERE };

struct lg_memo_key lg_memo_key_of(const void *input, size_t bytes)
{
    const XXH128_hash_t h = XXH3_128bits(input, bytes);
    return (struct lg_memo_key){{h.low64, h.high64}};
}

struct lg_memo_key lg_memo_key_with(struct lg_memo_key key, uint64_t number)
{
    const uint64_t input[] = {key.word[0], key.word[1], number};
    return lg_memo_key_of(input, sizeof input);
}

static size_t padded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

size_t lg_memo_bytes(uint64_t entries, size_t bytes)
{
    return padded(entries * sizeof(struct lg_memo_entry)) + entries * padded(bytes);
}

uint64_t lg_memo_entries(size_t room, size_t bytes)
{
    if (room < 64) return 0; /* what rounding the entries' heads up may take */
    return (room - 64) / (sizeof(struct lg_memo_entry) + padded(bytes));
}

lg_memo lg_memo_over(void *memory, uint64_t entries, size_t bytes)
{
    return (lg_memo){.entry = memory,
                     .payload = (uint8_t *)memory + padded(entries * sizeof(struct lg_memo_entry)),
                     .entries = entries,
                     .bytes = bytes};
}

static bool is_key(const struct lg_memo_entry *e, struct lg_memo_key key)
{
    return e->key.word[0] == key.word[0] && e->key.word[1] == key.word[1];
}

const void *lg_memo_find(const lg_memo *m, struct lg_memo_key key)
{
    for (uint64_t p = 0; p < PROBES && p < m->entries; p++) {
        const uint64_t i = (key.word[0] + p) % m->entries;
        const uint64_t state = atomic_load_explicit(&m->entry[i].state, memory_order_acquire);
        if (state == EMPTY) return NULL;
        if (state == THERE && is_key(&m->entry[i], key)) return m->payload + i * padded(m->bytes);
    }
    return NULL;
}

void *lg_memo_begin(lg_memo *m, struct lg_memo_key key)
{
    for (uint64_t p = 0; p < PROBES && p < m->entries; p++) {
        const uint64_t i = (key.word[0] + p) % m->entries;
        uint64_t state = EMPTY;
        /* Acquire: of one that is there the key is read. */
        if (atomic_compare_exchange_strong_explicit(&m->entry[i].state, &state, WRITTEN,
                                                    memory_order_acquire, memory_order_acquire)) {
            m->entry[i].key = key;
            return m->payload + i * padded(m->bytes);
        }
        if (state == THERE && is_key(&m->entry[i], key)) return NULL;
    }
    return NULL;
}

void lg_memo_end(lg_memo *m, const void *payload)
{
    const uint64_t i = (uint64_t)((const uint8_t *)payload - m->payload) / padded(m->bytes);
    LG_ASSERT(i < m->entries);
    atomic_store_explicit(&m->entry[i].state, THERE, memory_order_release);
}

bool lg_memo_parse(const char *text, size_t *ret)
{
    if (!strcmp(text, "auto")) return *ret = SIZE_MAX, true;
    if (!strcmp(text, "0")) return *ret = 0, true;
    return lg_bytes_parse(text, ret);
}
