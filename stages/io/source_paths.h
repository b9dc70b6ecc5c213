/* From data.path to the shards and folders it means; part of source.h. */
#pragma once
#include "base/check.h"

struct lg_place {
    char *path;
    bool is_folder; /* a plain folder of pictures, else a tar */
};
/* Links of a folder that lead out of it (or nowhere), which are left out. */
struct lg_links_out {
    size_t count;
    char first[512];
};
void lg_links_out_add(struct lg_links_out *links, const char *path);
/* One line in the log, if there are any. */
void lg_links_out_log(const struct lg_links_out *links, const char *folder);

/* Sorted by path, no two alike, at least one. The caller frees with lg_places_free. A part that
 * matches nothing is LG_ERR_CONFIG, naming it. */
int lg_places_find(const char *path, struct lg_place **ret, size_t *ret_count);
void lg_places_free(struct lg_place **places, size_t count);
