/* The index of a data set: which bytes of which file make item i. Part of source.h.
 *
 * Built once by lg_index_build and never changed. Compact, for millions of items: one entry of 16
 * bytes per item, one of 16 per member, names in one arena. */
#pragma once
#include "stages/io/source.h"
#include "stages/io/source_paths.h"

enum lg_member_kind {
    LG_MEMBER_PICTURE,
    LG_MEMBER_LATENT,
    LG_MEMBER_TXT,
    LG_MEMBER_JSON,
    LG_MEMBER_CLS,
    LG_MEMBER_CLIP,  /* where options.clips says so */
    LG_MEMBER_LINE,  /* of a folder's metadata.jsonl, where there is neither .txt nor .json */
    LG_MEMBER_FIELD, /* likewise, of its metadata.csv: the one with the caption */
    LG_MEMBER_KINDS
};
enum { LG_LINE_FILE_SHIFT = 48 };

struct lg_index_member {
    /* tar: offset of the content; folder: offset in names of the relative path; LINE, FIELD: number of its line_file <<
     * LG_LINE_FILE_SHIFT | offset in it */
    uint64_t at;
    uint32_t bytes; /* UINT32_MAX stands for more */
    uint8_t kind;   /* enum lg_member_kind; at most one of each kind per item */
};

struct lg_index_entry {
    uint64_t key_at; /* in names */
    uint32_t shard, first_member;
};

/* What came from one path. */
struct lg_index_source {
    size_t first_shard, n_shards;
    uint64_t first, count; /* items */
    uint64_t repeats;
    double weight; /* 0: none */
    uint64_t hash, n_of_kind[LG_MEMBER_KINDS];
};

struct lg_index {
    struct lg_index_source *source; /* (n_sources) */
    int n_sources;
    struct lg_place *shard;
    uint64_t *shard_bytes; /* of each tar; 0 for a folder */
    size_t n_shards;
    struct lg_index_entry
        *entry; /* (count + 1): the last one closes the members of the one before */
    size_t count, entry_capacity;
    struct lg_index_member *member;
    size_t n_members, member_capacity;
    char *names; /* NUL-terminated strings */
    size_t names_bytes, names_capacity;
    struct lg_index_line_file {
        uint64_t name_at, bytes; /* relative to its folder */
    } * line_file;               /* (n_line_files) */
    size_t n_line_files;
    size_t links_out; /* of folders, left out */
    struct lg_left_out left_out;
    uint64_t hash;
    uint64_t n_of_kind[LG_MEMBER_KINDS];
};

int lg_index_build(const struct lg_source_spec *spec, int n,
                   const struct lg_source_options *options, struct lg_index *ret);
/* Which source's is this item? */
int lg_index_source_of(const struct lg_index *x, uint64_t item);
void lg_index_free(struct lg_index *x);
/* The file name of a shard without its folder; "" for a plain folder. */
const char *lg_index_shard_name(const struct lg_index *x, size_t shard);
