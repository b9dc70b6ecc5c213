/* Bytes that grow; in liblg-av.so, too. */
#include "stages/io/clip_write_private.h"
#include <stdlib.h>
#include <string.h>

int lg_clip_put(struct lg_clip_bytes *b, const void *data, size_t bytes)
{
    if (bytes > b->capacity - b->count) {
        size_t capacity = LG_MAX(2 * b->capacity, b->count + bytes + 4096);
        uint8_t *larger = realloc(b->data, capacity);
        if (!larger) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a clip of %zu bytes", capacity);
        b->data = larger;
        b->capacity = capacity;
    }
    memcpy(b->data + b->count, data, bytes);
    b->count += bytes;
    return 0;
}
