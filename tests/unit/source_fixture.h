/* Small data sets in the scratch folder, for the programs test_source and test_samples. What cannot
 * be made fails the test. */
#pragma once
#include "stages/io/source.h"
#include "stages/io/tar.h"

int source_setup(void **state);
int source_teardown(void **state);
#define SOURCE_TEST(f) cmocka_unit_test_setup_teardown(f, source_setup, source_teardown)

/* A PNG of w x h in one shade; free() it. */
uint8_t *flat_png(int w, int h, int shade, size_t *ret_bytes);
/* A shard; names are those of the scratch folder. */
lg_tar_writer *tar_open(const char *name);
void put_text(lg_tar_writer *w, const char *name, const char *text);
void put_png(lg_tar_writer *w, const char *name, int shade); /* 12 x 8 */
/* `count` samples of .png (shade = first + i) and .txt ("caption <first + i>"). Its path. */
const char *make_shard(const char *name, int first, int count);
void write_png(const char *name, int shade);
lg_source *open_source(const char *path);
