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

/* 2 or 4 bytes at `at`, in the order that the Exif data has. */
static uint32_t exif_number(const uint8_t *p, size_t at, int bytes, bool big)
{
    uint32_t v = 0;
    for (int i = 0; i < bytes; i++) v = v << 8 | p[at + (size_t)(big ? i : bytes - 1 - i)];
    return v;
}

/* What an APP1 segment says (Exif 2.3, 4.6.4 A), from 1 to 8; 0: nothing, or nothing that can be read. */
static int exif_orientation(const uint8_t *segment, size_t bytes)
{
    enum { NAME_BYTES = 6, HEAD_BYTES = 8, ENTRY_BYTES = 12, TAG = 0x0112, SHORT = 3 };
    if (bytes < NAME_BYTES + HEAD_BYTES || memcmp(segment, "Exif\0", 6) != 0) return 0;
    const uint8_t *p = segment + NAME_BYTES;
    const size_t n = bytes - NAME_BYTES;
    const bool big = p[0] == 'M';
    if (memcmp(p, big ? "MM" : "II", 2) != 0 || exif_number(p, 2, 2, big) != 42) return 0;
    size_t at = exif_number(p, 4, 4, big);
    if (at > n || n - at < 2) return 0;
    size_t entries = exif_number(p, at, 2, big);
    for (at += 2; entries-- && n - at >= ENTRY_BYTES; at += ENTRY_BYTES) {
        if (exif_number(p, at, 2, big) != TAG) continue;
        const uint32_t v = exif_number(p, at + 8, 2, big);
        return exif_number(p, at + 2, 2, big) == SHORT && v >= 1 && v <= 8 ? (int)v : 0;
    }
    return 0;
}

/* Steps from segment to segment up to the frame. ret->width 0: more bytes are needed. */
static int jpeg_size(const uint8_t *p, size_t bytes, size_t *ret_need, struct lg_picture_size *ret,
                     int *ret_orientation)
{
    enum { FRAME_BYTES = 9 }; /* marker, length, precision, height, width */
    int orientation = 0;
    for (size_t at = 2; at + FRAME_BYTES <= bytes;) {
        const uint8_t marker = p[at + 1];
        if (p[at] != 0xff) return LG_FAIL(LG_ERR_VOID, "JPEG is damaged: no marker at %zu", at);
        if (marker == 0xff) { /* fill */
            at++;
        } else if (has_no_length(marker)) {
            at += 2;
        } else if (is_frame(marker)) {
            *ret_orientation = LG_MAX(orientation, 1);
            return orientation < LG_ORIENTATION_TURNED
                       ? found(be16(p + at + 7), be16(p + at + 5), ret)
                       : found(be16(p + at + 5), be16(p + at + 7), ret);
        } else if (marker == 0xda || marker == 0xd9 || be16(p + at + 2) < 2) {
            return LG_FAIL(LG_ERR_VOID, "JPEG is damaged: no size before its data");
        } else {
            const size_t end = at + 2 + be16(p + at + 2);
            if (marker == 0xe1 && !orientation && end <= bytes)
                orientation = exif_orientation(p + at + 4, end - at - 4);
            at = end;
        }
        *ret_need = at + FRAME_BYTES;
    }
    return 0;
}

int lg_jpeg_orientation(const void *data, size_t bytes)
{
    struct lg_picture_size size = {0};
    size_t need = 0;
    int orientation = 1;
    if (jpeg_size(data, bytes, &need, &size, &orientation) < 0) lg_err_clear();
    return orientation;
}

int lg_picture_size(const void *data, size_t bytes, size_t *ret_need, struct lg_picture_size *ret)
{
    const uint8_t *p = data;
    int orientation;
    *ret_need = LG_PICTURE_HEAD_BYTES;
    *ret = (struct lg_picture_size){0};
    if (bytes >= 24 && memcmp(p, "\x89PNG\r\n\x1a\n", 8) == 0) {
        if (memcmp(p + 12, "IHDR", 4) != 0)
            return LG_FAIL(LG_ERR_VOID, "PNG is damaged: no IHDR at its beginning");
        return found(be32(p + 16), be32(p + 20), ret);
    }
    if (bytes >= 3 && memcmp(p, "\xff\xd8\xff", 3) == 0)
        return jpeg_size(p, bytes, ret_need, ret, &orientation);
    if (bytes >= 12 && memcmp(p, "RIFF", 4) == 0 && memcmp(p + 8, "WEBP", 4) == 0) {
        int width = 0, height = 0;
        if (WebPGetInfo(data, bytes, &width, &height)) return found(width, height, ret);
        if (bytes < LG_PICTURE_HEAD_BYTES) return 0;
        return LG_FAIL(LG_ERR_VOID, "WebP is damaged");
    }
    if (bytes < LG_PICTURE_HEAD_BYTES) return 0;
    return LG_FAIL(LG_ERR_VOID, "picture is neither PNG, JPEG nor WebP");
}
