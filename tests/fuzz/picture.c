/* Fuzz target: a PNG, JPEG or WebP in memory, at full size and reduced. A PNG is decoded again with
 * the sums of its chunks set right, which a mutation hardly ever does by itself. */
#include "stages/io/picture.h"
#include "tests/fuzz/fuzz.h"
#include <stdlib.h>
#include <string.h>

enum { PNG_SIGNATURE = 8, CHUNK_OVERHEAD = 12 };

static void decode(const void *data, size_t bytes, int side_min)
{
    lg_picture pic = {0};
    int rc = lg_picture_decode(data, bytes, side_min, &pic);
    LG_ASSERT(rc == 0 || rc == LG_ERR_VOID);
    if (rc == 0) {
        LG_ASSERT(pic.width >= 1 && pic.width <= LG_PICTURE_SIDE_MAX);
        LG_ASSERT(pic.height >= 1 && pic.height <= LG_PICTURE_SIDE_MAX);
        LG_ASSERT(pic.rgb && pic.capacity >= (size_t)pic.width * (size_t)pic.height * 3);
    }
    lg_picture_free(&pic);
    lg_err_clear();
}

static uint32_t crc32_of(const uint8_t *p, size_t bytes)
{
    uint32_t c = UINT32_MAX;
    for (size_t i = 0; i < bytes; i++) {
        c ^= p[i];
        for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ UINT32_C(0xEDB88320) : c >> 1;
    }
    return ~c;
}

static uint32_t big_endian(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void set_sums(uint8_t *png, size_t bytes)
{
    for (size_t at = PNG_SIGNATURE; bytes - at >= CHUNK_OVERHEAD;) {
        size_t n = big_endian(png + at);
        if (n > bytes - at - CHUNK_OVERHEAD) return;
        uint32_t crc = crc32_of(png + at + 4, n + 4);
        for (int i = 0; i < 4; i++) png[at + 8 + n + (size_t)i] = (uint8_t)(crc >> (24 - 8 * i));
        at += n + CHUNK_OVERHEAD;
    }
}

/* What tells a size says so again with more of the file, and no decoder finds another. */
static void check_size(const uint8_t *data, size_t bytes)
{
    struct lg_picture_size size, more;
    lg_picture pic = {0};
    size_t need, again;
    if (lg_picture_size(data, bytes / 2, &need, &size) == 0 && size.width) {
        LG_ASSERT(lg_picture_size(data, bytes, &again, &more) == 0);
        LG_ASSERT(size.width == more.width && size.height == more.height);
    }
    if (lg_picture_size(data, bytes, &need, &size) == 0) {
        LG_ASSERT(size.width ? size.height > 0 : need > bytes);
        if (size.width && lg_picture_decode(data, bytes, 0, &pic) == 0)
            LG_ASSERT(size.width == pic.width && size.height == pic.height);
    }
    lg_picture_free(&pic);
    lg_err_clear();
}

LG_FUZZ_TARGET(picture)
{
    check_size(data, bytes);
    decode(data, bytes, 0);
    decode(data, bytes, 8);
    if (bytes < PNG_SIGNATURE || memcmp(data, "\x89PNG\r\n\x1a\n", PNG_SIGNATURE)) return;
    uint8_t *copy = malloc(bytes);
    LG_ASSERT(copy);
    memcpy(copy, data, bytes);
    set_sums(copy, bytes);
    decode(copy, bytes, 0);
    free(copy);
}
