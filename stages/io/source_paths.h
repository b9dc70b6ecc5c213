/* From data.path to the shards and folders it means; part of source.h. */
#pragma once
#include "base/check.h"

struct lg_place {
    char *path;
    bool is_folder; /* a plain folder of pictures, else a tar */
};
/* Sorted by path, no two alike, at least one. The caller frees with lg_places_free. A part that
 * matches nothing is LG_ERR_CONFIG, naming it. */
int lg_places_find(const char *path, struct lg_place **ret, size_t *ret_count);
void lg_places_free(struct lg_place **places, size_t count);
