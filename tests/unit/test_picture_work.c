/* Pictures that ask for much work: what is beyond the bounds of picture.h is void, by counts alone;
 * what encoders write is not. The files are made here, byte by byte where no encoder would. */
#include "stages/io/picture.h"
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static_assert(LG_JPEG_BLOCKS_MAX >= 20 * 3 * (LG_PICTURE_PIXELS_MAX / 64),
              "20 scans over three components of the largest picture");

struct bytes {
    uint8_t *data;
    size_t count, capacity;
};

static void add(struct bytes *b, const void *data, size_t count)
{
    if (b->count + count > b->capacity) {
        b->capacity = 2 * (b->count + count);
        b->data = realloc(b->data, b->capacity);
        assert_non_null(b->data);
    }
    memcpy(b->data + b->count, data, count);
    b->count += count;
}

static void add_segment(struct bytes *b, int marker, const void *data, size_t count)
{
    uint8_t head[4] = {0xff, (uint8_t)marker, (uint8_t)((count + 2) >> 8), (uint8_t)(count + 2)};
    add(b, head, sizeof head);
    add(b, data, count);
}

/* Huffman tables: DC has the one symbol 0, code 0; AC has 0xE0 (2^14 blocks without coefficients and
 * as many as 14 bits say), code 0, and 0x00 to 0xD0 (fewer), codes of five bits from 10000 on. */
static void add_tables(struct bytes *b)
{
    uint8_t quantisation[65] = {0}, dc[18] = {0x00, 1}, ac[32] = {0x10, 1, 0, 0, 0, 14};
    memset(quantisation + 1, 1, 64);
    ac[17] = 0xe0;
    for (int k = 0; k < 14; k++) ac[18 + k] = (uint8_t)(k << 4);
    add_segment(b, 0xdb, quantisation, sizeof quantisation);
    add_segment(b, 0xc4, dc, sizeof dc);
    add_segment(b, 0xc4, ac, sizeof ac);
}

static void add_scan(struct bytes *b, int first, int last)
{
    uint8_t scan[6] = {1, 1, 0, (uint8_t)first, (uint8_t)last, 0};
    add_segment(b, 0xda, scan, sizeof scan);
}

/* One bit a block. */
static void add_dc_scan(struct bytes *b, size_t blocks)
{
    add_scan(b, 0, 0);
    for (size_t i = 0; i < blocks / 8; i++) add(b, "", 1);
    assert_int_equal(blocks % 8, 0);
}

struct bits {
    struct bytes *to;
    unsigned word, count;
};

static void put_bits(struct bits *b, unsigned value, unsigned count)
{
    while (count-- > 0) {
        b->word = b->word << 1 | (value >> count & 1);
        if (++b->count < 8) continue;
        uint8_t byte = (uint8_t)b->word;
        add(b->to, &byte, 1);
        if (byte == 0xff) add(b->to, "", 1);
        b->word = b->count = 0;
    }
}

/* Two bytes for up to 32767 blocks. */
static void add_ac_scan(struct bytes *b, size_t blocks)
{
    struct bits bits = {.to = b};
    add_scan(b, 1, 63);
    while (blocks) {
        unsigned k = 0, run = (unsigned)LG_MIN(blocks, (size_t)32767);
        while (run >> (k + 1)) k++;
        if (k == 14)
            put_bits(&bits, 0, 1);
        else
            put_bits(&bits, 16 + k, 5);
        put_bits(&bits, run - (1u << k), k);
        blocks -= run;
    }
    while (bits.count) put_bits(&bits, 1, 1);
}

/* A grey progressive JPEG whose scans after the first say nothing. */
static struct bytes grey_jpeg(int width, int height, int scans)
{
    struct bytes b = {0};
    uint8_t frame[9] = {8,
                        (uint8_t)(height >> 8),
                        (uint8_t)height,
                        (uint8_t)(width >> 8),
                        (uint8_t)width,
                        1,
                        1,
                        0x11,
                        0};
    size_t blocks = (size_t)(width / 8) * (size_t)(height / 8);
    add(&b, "\xff\xd8", 2);
    add_tables(&b);
    add_segment(&b, 0xc2, frame, sizeof frame);
    add_dc_scan(&b, blocks);
    size_t from = b.count;
    add_ac_scan(&b, blocks);
    size_t scan_bytes = b.count - from;
    struct bytes all = {0};
    add(&all, b.data, from);
    for (int i = 1; i < scans; i++) add(&all, b.data + from, scan_bytes);
    add(&all, "\xff\xd9", 2);
    free(b.data);
    return all;
}

static void is_whole(const struct bytes *b, int width, int height)
{
    lg_picture pic = {0};
    if (lg_picture_decode(b->data, b->count, 0, &pic) < 0) fail_msg("%s", lg_err_text());
    assert_int_equal(pic.width, width);
    assert_int_equal(pic.height, height);
    lg_picture_free(&pic);
}

static void is_void(const void *data, size_t bytes, const char *why)
{
    lg_picture pic = {0};
    assert_int_equal(lg_picture_decode(data, bytes, 0, &pic), LG_ERR_VOID);
    if (!strstr(lg_err_message(), why)) fail_msg("%s, not %s", lg_err_message(), why);
    lg_err_clear();
    lg_picture_free(&pic);
}

static void test_scans(void **state)
{
    (void)state;
    struct bytes b = grey_jpeg(64, 64, LG_JPEG_SCANS_MAX);
    is_whole(&b, 64, 64);
    free(b.data);
    b = grey_jpeg(64, 64, LG_JPEG_SCANS_MAX + 1);
    is_void(b.data, b.count, "too much work: scan 1001 passes over block 64064");
    free(b.data);
}

/* 69,632 blocks a scan: the 964th goes over the bound. Two minutes in 300 kB when it has none. */
static void test_blocks(void **state)
{
    (void)state;
    enum { W = 2176, H = 2048, BLOCKS = W / 8 * H / 8 };
    char why[80];
    struct bytes b = grey_jpeg(W, H, 20);
    is_whole(&b, W, H);
    free(b.data);
    b = grey_jpeg(W, H, LG_JPEG_SCANS_MAX);
    int scan = LG_JPEG_BLOCKS_MAX / BLOCKS + 1;
    assert_true(scan < LG_JPEG_SCANS_MAX && b.count < 300000);
    snprintf(why, sizeof why, "scan %d passes over block %d", scan, scan * BLOCKS);
    is_void(b.data, b.count, why);
    free(b.data);
}

static void test_bytes(void **state)
{
    (void)state; /* refused before a byte behind these is looked at */
    static const char jpeg[16] = "\xff\xd8\xff", webp[16] = "RIFF\x04\0\0\0WEBP";
    static const char png[16] = "\x89PNG\r\n\x1a\n";
    is_void(jpeg, (size_t)LG_JPEG_BYTES_MAX + 1, "JPEG of 134217729 bytes");
    is_void(webp, (size_t)LG_WEBP_BYTES_MAX + 1, "WebP of 134217729 bytes");
    is_void(png, (size_t)LG_PICTURE_BYTES_MAX + 1, "picture of 268435457 bytes");
}

/* Its decoder makes up what is missing without a word, 150 ns for each byte that there is. */
static void test_arithmetic_coding(void **state)
{
    (void)state;
    struct jpeg_compress_struct c;
    struct jpeg_error_mgr errors;
    unsigned char *data = NULL;
    unsigned long bytes = 0;
    uint8_t row[16 * 3] = {0};
    c.err = jpeg_std_error(&errors);
    jpeg_create_compress(&c);
    jpeg_mem_dest(&c, &data, &bytes);
    c.image_width = c.image_height = 16;
    c.input_components = 3;
    c.in_color_space = JCS_RGB;
    jpeg_set_defaults(&c);
    c.arith_code = TRUE;
    jpeg_start_compress(&c, TRUE);
    while (c.next_scanline < c.image_height) jpeg_write_scanlines(&c, &(JSAMPROW){row}, 1);
    jpeg_finish_compress(&c);
    jpeg_destroy_compress(&c);
    is_void(data, bytes, "arithmetic coding");
    free(data);
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

/* A PNG of noise with `rows` rows that says it has `said`. */
static struct bytes png_with_more(int width, int rows, int said)
{
    enum { IHDR = 12, IHDR_BYTES = 17, HEIGHT = 20, SUM = 29 };
    struct bytes b = {0};
    size_t count = (size_t)width * (size_t)rows * 3;
    uint8_t *rgb = malloc(count);
    uint64_t x = 1;
    for (size_t i = 0; i < count; i++) {
        x = x * UINT64_C(6364136223846793005) + 1442695040888963407;
        rgb[i] = (uint8_t)(x >> 56);
    }
    assert_int_equal(lg_picture_encode_png(rgb, width, rows, &b.data, &b.count), 0);
    free(rgb);
    for (int i = 0; i < 4; i++) b.data[HEIGHT + i] = (uint8_t)(said >> (24 - 8 * i));
    uint32_t sum = crc32_of(b.data + IHDR, IHDR_BYTES);
    for (int i = 0; i < 4; i++) b.data[SUM + i] = (uint8_t)(sum >> (24 - 8 * i));
    return b;
}

/* libpng unpacks all that follows the last row: 100 kB for each second, if it were left to. */
static void test_png_with_more(void **state)
{
    (void)state;
    struct bytes b = png_with_more(16, 20, 16); /* sloppy writers do this */
    is_whole(&b, 16, 16);
    free(b.data);
    b = png_with_more(16, 2000, 16);
    is_void(b.data, b.count, "data after the last pixel");
    free(b.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scans),         cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_bytes),         cmocka_unit_test(test_arithmetic_coding),
        cmocka_unit_test(test_png_with_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
