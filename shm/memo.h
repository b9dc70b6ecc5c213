/* What an encoder has made, remembered: a bounded table in host memory that all instances of a role share. Inputs that come
 * again (small data sets, captions that many pictures have) are copied instead of encoded. What an encoder makes of an input
 * depends on nothing but the input (kernels/README.md, rule 6), so nothing but the speed changes.
 *
 * An entry is written once and stays: a full table takes nothing more.
 *
 * Access rule:
 *   state    0; then, by compare-and-swap, that somebody writes key and payload; then, by the same, with release, that they
 *            are there. Who reads a key or payload has seen that with acquire. Whoever dies in between leaves an entry that
 *            nobody reads, and that nobody takes again: one place less, no wrong byte.
 *   Two who make the same at the same time may both enter it; either will do. */
#pragma once
#include "base/check.h"
#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct lg_memo_key {
    uint64_t word[2]; /* XXH3-128 of the input */
};

struct lg_memo_entry {
    _Atomic(uint64_t) state;
    struct lg_memo_key key;
    uint64_t reserved;
};
static_assert(sizeof(struct lg_memo_entry) == 32, "two in a cache line");

typedef struct lg_memo {
    struct lg_memo_entry *entry;
    uint8_t *payload;
    uint64_t entries; /* 0: it remembers nothing */
    size_t bytes;     /* of a payload */
} lg_memo;

struct lg_memo_key lg_memo_key_of(const void *input, size_t bytes);
/* Of an input that is these bytes and a number, such as their shape's. */
struct lg_memo_key lg_memo_key_with(struct lg_memo_key key, uint64_t number);
/* Of the table, and how many entries of `bytes` fit into so many. */
size_t lg_memo_bytes(uint64_t entries, size_t bytes);
uint64_t lg_memo_entries(size_t room, size_t bytes);
/* Over memory that is zero, or that another has laid out so. */
lg_memo lg_memo_over(void *memory, uint64_t entries, size_t bytes);

/* The payload, or NULL. */
const void *lg_memo_find(const lg_memo *m, struct lg_memo_key key);
/* Where to write the payload, which lg_memo_end then publishes; NULL: there is no room, or it is there already. */
void *lg_memo_begin(lg_memo *m, struct lg_memo_key key);
void lg_memo_end(lg_memo *m, const void *payload);

/* text.memo, vae.memo: "auto" (SIZE_MAX), "0", or a size, in bytes; false: it is none of these. */
bool lg_memo_parse(const char *text, size_t *ret);
