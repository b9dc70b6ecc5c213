/* Where two states of a data set differ: the list of its parts; part of source.h.
 *
 * A part is a tar shard, or a stretch of up to LG_PART_ITEMS items of a folder; of several sources also how often each
 * comes, before its shards. The list holds each part's
 * name, items and hash; a data set whose fingerprint is another is compared with it part by part. It only
 * serves the message: nothing is decided by it. */
#pragma once
#include "stages/io/source_index.h"

enum { LG_PART_ITEMS = 1024 };

enum lg_part_kind { LG_PART_SHARD, LG_PART_STRETCH, LG_PART_SOURCE };
struct lg_part {
    char *name; /* of the shard; of a stretch, its first key; "data.source[1]" */
    uint64_t items, hash;
    enum lg_part_kind kind;
};
struct lg_parts {
    struct lg_part *at;
    size_t count, capacity;
};
int lg_parts_of(const struct lg_index *x, struct lg_parts *ret);
/* "" when the lists are the same. */
void lg_parts_compare(const struct lg_parts *was, const struct lg_parts *is, char *ret,
                      size_t bytes);
/* DIR/data.json: {"hash": "...", "items": N, "parts": [{"shard": name | "from": key | "source": name, "items": n,
 * "hash": "..."}]}. */
int lg_parts_save(const struct lg_parts *p, uint64_t hash, const char *path);
/* LG_ERR_MISMATCH, without a text: it is the list of another data set than that with `hash`. */
int lg_parts_load(const char *path, uint64_t hash, struct lg_parts *ret);
void lg_parts_free(struct lg_parts *p);
