/* Fuzz target: a data set of one shard, built from the input: .json, .txt, .cls, pictures and latents
 * of several samples, every one of which is read and made into a sample.
 *
 * Input: options, 1 byte; then members: kind, 1 byte (low 4 bits: the extension, bit 4: a new key),
 * length, 2 bytes, little-endian, content. */
#include "stages/io/source.h"
#include "stages/io/tar.h"
#include "tests/fuzz/fuzz.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MEMBERS_MAX = 32, SIDE = 16, CLASSES = 10 };
static const char *const EXTENSIONS[] = {".json", ".txt",  ".cls", ".png",
                                         ".JPEG", ".webp", ".jpg", ".latent.safetensors"};

struct shard {
    uint8_t *data;
    size_t bytes;
};

static void add_block(struct shard *t, const void *data, size_t bytes)
{
    size_t padded = (bytes + LG_TAR_BLOCK - 1) / LG_TAR_BLOCK * LG_TAR_BLOCK;
    t->data = realloc(t->data, t->bytes + padded + 1);
    LG_ASSERT(t->data);
    memset(t->data + t->bytes, 0, padded);
    if (bytes) memcpy(t->data + t->bytes, data, bytes);
    t->bytes += padded;
}

static void add_member(struct shard *t, const char *name, const void *data, size_t bytes)
{
    char header[LG_TAR_BLOCK] = {0};
    unsigned sum = 0;
    snprintf(header, 100, "%s", name);
    snprintf(header + 124, 12, "%011zo", bytes);
    memset(header + 148, ' ', 8);
    header[156] = '0';
    memcpy(header + 257, "ustar", 6);
    for (int i = 0; i < LG_TAR_BLOCK; i++) sum += (unsigned char)header[i];
    snprintf(header + 148, 8, "%06o", sum);
    add_block(t, header, sizeof header);
    add_block(t, data, bytes);
}

static void build(struct lg_fuzz_input *in, struct shard *t)
{
    char name[64], end[2 * LG_TAR_BLOCK] = {0};
    for (int i = 0, key = 0; in->bytes && i < MEMBERS_MAX; i++) {
        unsigned kind = lg_fuzz_u8(in);
        key += kind >> 4 & 1;
        size_t bytes;
        char *content = lg_fuzz_take(in, lg_fuzz_u16(in), &bytes);
        snprintf(name, sizeof name, "%04d%s", key,
                 EXTENSIONS[(kind & 15) % LG_ARRAY_LEN(EXTENSIONS)]);
        add_member(t, name, content, bytes);
        free(content);
    }
    add_block(t, end, sizeof end);
}

static void check_item(const lg_item *item)
{
    LG_ASSERT(item->key && item->n_captions >= 0 && item->n_captions <= LG_SOURCE_CAPTIONS_MAX);
    for (int i = 0; i < item->n_captions; i++) {
        const char *c = item->caption[i];
        size_t n = strlen(c);
        LG_ASSERT(c >= item->data && c + n < item->data + item->capacity);
        LG_ASSERT(n == 0 || !strchr(" \t\r\n", c[0]));
        LG_ASSERT(n == 0 || !strchr(" \t\r\n", c[n - 1]));
    }
    LG_ASSERT(item->label >= -1);
}

static void read_all(lg_source *s)
{
    static uint8_t pixels[3 * SIDE * SIDE];
    struct lg_sample_rule rule = {
        .shape = {1, SIDE, SIDE}, .num_classes = CLASSES, .no_shuffle = true};
    lg_item item = {0};
    lg_sample sample = {0};
    for (uint64_t i = 0; i < lg_source_count(s); i++) {
        int rc = lg_source_read(s, i, &item);
        LG_ASSERT(rc == 0 || rc == LG_ERR_VOID);
        if (rc == 0) check_item(&item);
        lg_err_clear();
        rc = lg_source_sample(s, &rule, i, pixels, &sample);
        LG_ASSERT(rc == 0 || rc == LG_ERR_VOID);
        LG_ASSERT(sample.key && sample.key[0] && sample.caption);
        LG_ASSERT(rc < 0 || sample.label < CLASSES);
        lg_err_clear();
    }
    lg_sample_free(&sample);
    lg_item_free(&item);
}

LG_FUZZ_TARGET(captions)
{
    struct lg_fuzz_input in = {data, bytes};
    struct shard t = {0};
    unsigned o = lg_fuzz_u8(&in);
    struct lg_source_options options = {.need_caption = o & 1, .need_label = o & 2};
    lg_source *s = NULL;
    build(&in, &t);
    int rc = lg_source_open(lg_fuzz_file(0, t.data, t.bytes), &options, &s);
    LG_ASSERT(rc == 0 || rc == LG_ERR_CONFIG);
    if (rc == 0) read_all(s);
    lg_source_close(&s);
    free(t.data);
}
