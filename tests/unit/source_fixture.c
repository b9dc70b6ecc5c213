/* See source_fixture.h. */
#include "tests/unit/source_fixture.h"
#include "base/fs.h"
#include "base/log.h"
#include "stages/io/picture.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

int source_setup(void **state)
{
    (void)state;
    scratch_make();
    lg_log_set_level(LG_ERROR);
    return 0;
}

int source_teardown(void **state)
{
    (void)state;
    scratch_remove();
    lg_err_clear();
    return 0;
}

/* A PNG of w x h in one shade. */
uint8_t *flat_png(int w, int h, int shade, size_t *ret_bytes)
{
    uint8_t *rgb = malloc((size_t)(w * h * 3)), *png;
    memset(rgb, shade, (size_t)(w * h * 3));
    assert_int_equal(lg_picture_encode_png(rgb, w, h, &png, ret_bytes), 0);
    free(rgb);
    return png;
}

lg_tar_writer *tar_open(const char *name)
{
    lg_tar_writer *w;
    assert_int_equal(lg_tar_writer_open(scratch_path(name), &w), 0);
    return w;
}

void put_text(lg_tar_writer *w, const char *name, const char *text)
{
    assert_int_equal(lg_tar_writer_add(w, name, text, strlen(text)), 0);
}

void put_png(lg_tar_writer *w, const char *name, int shade)
{
    size_t bytes;
    uint8_t *png = flat_png(12, 8, shade, &bytes);
    assert_int_equal(lg_tar_writer_add(w, name, png, bytes), 0);
    free(png);
}

/* `count` samples of .png (shade = first + i) and .txt ("caption <first + i>"). */
const char *make_shard(const char *name, int first, int count)
{
    lg_tar_writer *w = tar_open(name);
    for (int i = first; i < first + count; i++) {
        char member[32], caption[32];
        snprintf(member, sizeof member, "%05d.png", i);
        put_png(w, member, i);
        snprintf(member, sizeof member, "%05d.txt", i);
        snprintf(caption, sizeof caption, " caption %d\r\n", i);
        put_text(w, member, caption);
    }
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    return scratch_path(name);
}

void write_png(const char *name, int shade)
{
    size_t bytes;
    uint8_t *png = flat_png(12, 8, shade, &bytes);
    scratch_write(name, ""); /* its folder */
    assert_int_equal(lg_publish_file(scratch_path(name), png, bytes), 0);
    free(png);
}

lg_source *open_source(const char *path)
{
    lg_source *s = NULL;
    if (lg_source_open(path, NULL, &s) < 0) fail_msg("%s", lg_err_text());
    return s;
}
