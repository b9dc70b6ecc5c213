/* Fuzz target: the index.json of a model in parts, in a folder with one whole part and a damaged one.
 * Nothing outside the folder may be opened, and every tensor that the index lists must be there. */
#include "stages/nets/weights.h"
#include "tests/fuzz/fuzz.h"
#include <assert.h>
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

static const char *make_folder(void)
{
    static const char header[] = "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                                 "\"y\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[4,8]}}";
    char file[8 + sizeof header - 1 + 8] = {sizeof header - 1}; /* zeros as data */
    static_assert(sizeof header - 1 < 128, "the length is one byte");
    memcpy(file + 8, header, sizeof header - 1);
    lg_fuzz_write("a.safetensors", file, sizeof file);
    lg_fuzz_write("b.safetensors", file, sizeof file / 2);
    return lg_fuzz_link("m.safetensors.index.json", 0);
}

static void check_listed(const lg_weights *w, const char *data, size_t bytes)
{
    cJSON *root = cJSON_ParseWithLength(data, bytes), *e;
    cJSON_ArrayForEach(e, cJSON_GetObjectItemCaseSensitive(root, "weight_map"))
        LG_ASSERT(lg_weights_find(w, e->string) && !strchr(e->valuestring, '/'));
    cJSON_Delete(root);
}

LG_FUZZ_TARGET(weights)
{
    static char path[4200];
    if (!path[0]) snprintf(path, sizeof path, "%s/m.safetensors", make_folder());
    lg_fuzz_file(0, data, bytes);
    lg_weights *w = NULL;
    if (lg_weights_open(path, &w) < 0) {
        LG_ASSERT(!w && lg_err_message()[0]);
        return;
    }
    LG_ASSERT(lg_weights_count(w) == 2 && lg_weights_find(w, "x") && lg_weights_find(w, "y"));
    for (int i = 0; i < lg_weights_count(w); i++)
        LG_ASSERT(lg_weights_find(w, lg_weights_at(w, i)->name) == lg_weights_at(w, i));
    check_listed(w, (const char *)data, bytes);
    lg_weights_close(&w);
}
