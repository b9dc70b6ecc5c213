/* The JSON header of a safetensors file: from bytes to entries. Part of safetensors.h, whose promises
 * about what is checked are kept here and in safetensors.c.
 *
 * Read token by token (base/json.h) and given up at the first thing that has no place there, so what a
 * refused header costs is bounded by what was right before: 100 bytes of memory a tensor, of which a
 * megabyte of header describes at most 20,000. */
#pragma once
#include "stages/io/safetensors.h"

enum {
    LG_ST_HEADER_BYTES_MAX = 100000000, /* the limit of the reference implementation */
    LG_ST_ENTRIES_MAX = 1 << 20,
    LG_ST_METADATA_MAX = 1 << 16, /* keys */
};

struct lg_st_header {
    struct lg_st_entry *entry; /* as the header has them; data is not set */
    int count;
    const char **metadata; /* key, value, key, value ...; sorted by key */
    size_t n_metadata;     /* pairs */
    char *text;            /* where names, keys and values live */
};

struct lg_st_header_source {
    const char *label; /* for messages */
    const char *json;
    size_t bytes, data_start; /* data_start: where in the file the data begin, behind the header */
};
/* Each entry has a name, dtype, shape, and bytes that fit both its shape and its offsets. Whether the
 * entries tile the file and have different names is for the caller to see. LG_ERR_CORRUPT,
 * LG_ERR_NOSPACE; *ret is to be freed in any case. */
int lg_st_header_parse(const struct lg_st_header_source *source, struct lg_st_header *ret);
void lg_st_header_free(struct lg_st_header *h);
const char *lg_st_header_metadata(const struct lg_st_header *h, const char *key);
