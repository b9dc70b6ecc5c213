/* The size of a picture from its first bytes; see picture.h. Written from the formats: PNG (RFC 2083, 3.2 and 11.2.2),
 * JPEG (ITU-T T.81, B.1 and B.2.2), WebP through libwebp. A JPEG's frame header may stand behind any number of other
 * segments (a thumbnail, a colour profile), which are stepped over by their lengths. */
#include "stages/io/picture.h"
#include <string.h>
#include <webp/decode.h>

static unsigned be16(const uint8_t *p)
{
    return (unsigned)p[0] << 8 | p[1];
}

static int64_t be32(const uint8_t *p)
{
    return (int64_t)be16(p) << 16 | be16(p + 2);
}

static int found(int64_t width, int64_t height, struct lg_picture_size *ret)
{
    LG_TRY(lg_picture_check_bounds(width, height));
    *ret = (struct lg_picture_size){(int)width, (int)height};
    return 0;
}

/* SOF0 to SOF15 without the other segments among them (DHT, JPG, DAC). */
static bool is_frame(uint8_t marker)
{
    return marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
}

static bool has_no_length(uint8_t marker)
{
    return marker == 0x01 || (marker >= 0xd0 && marker <= 0xd8);
}

static int jpeg_size(const uint8_t *p, size_t bytes, size_t *ret_need, struct lg_picture_size *ret)
{
    enum { FRAME_BYTES = 9 }; /* marker, length, precision, height, width */
    for (size_t at = 2; at + FRAME_BYTES <= bytes;) {
        const uint8_t marker = p[at + 1];
        if (p[at] != 0xff) return LG_FAIL(LG_ERR_VOID, "JPEG is damaged: no marker at %zu", at);
        if (marker == 0xff) { /* fill */
            at++;
        } else if (has_no_length(marker)) {
            at += 2;
        } else if (is_frame(marker)) {
            return found(be16(p + at + 7), be16(p + at + 5), ret);
        } else if (marker == 0xda || marker == 0xd9 || be16(p + at + 2) < 2) {
            return LG_FAIL(LG_ERR_VOID, "JPEG is damaged: no size before its data");
        } else {
            at += 2 + be16(p + at + 2);
        }
        *ret_need = at + FRAME_BYTES;
    }
    return 0;
}

int lg_picture_size(const void *data, size_t bytes, size_t *ret_need, struct lg_picture_size *ret)
{
    const uint8_t *p = data;
    *ret_need = LG_PICTURE_HEAD_BYTES;
    *ret = (struct lg_picture_size){0};
    if (bytes >= 24 && memcmp(p, "\x89PNG\r\n\x1a\n", 8) == 0) {
        if (memcmp(p + 12, "IHDR", 4) != 0)
            return LG_FAIL(LG_ERR_VOID, "PNG is damaged: no IHDR at its beginning");
        return found(be32(p + 16), be32(p + 20), ret);
    }
    if (bytes >= 3 && memcmp(p, "\xff\xd8\xff", 3) == 0) return jpeg_size(p, bytes, ret_need, ret);
    if (bytes >= 12 && memcmp(p, "RIFF", 4) == 0 && memcmp(p + 8, "WEBP", 4) == 0) {
        int width = 0, height = 0;
        if (WebPGetInfo(data, bytes, &width, &height)) return found(width, height, ret);
        if (bytes < LG_PICTURE_HEAD_BYTES) return 0;
        return LG_FAIL(LG_ERR_VOID, "WebP is damaged");
    }
    if (bytes < LG_PICTURE_HEAD_BYTES) return 0;
    return LG_FAIL(LG_ERR_VOID, "picture is neither PNG, JPEG nor WebP");
}
