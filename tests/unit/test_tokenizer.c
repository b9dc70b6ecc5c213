/* Tokenizer models that are damaged or made to hurt: opening refuses them with a message, or what
 * opens tokenises any text; none ends the process. */
#include "base/fs.h"
#include "base/philox.h"
#include "stages/io/charsmap.h"
#include "stages/io/tokenizer.h"
#include "stages/io/tokenizer_check.h"
#include "tests/unit/scratch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define MODEL "examples/emoji/text_encoder/spiece.model"
enum { RANDOM_TABLES = 60, CHANGED_TABLES = 200, CHANGED_MODELS = 200 };

static const char *const captions[] = {
    "a red square",
    "caf\xc3\xa9 \xe7\x8c\xab \xf0\x9f\x98\x80 \xef\xb7\xba\xe2\x84\xab\xef\xbc\xa1",
    "\x01\x7f\xc3\xff\xf0\x9f\x98 </s><pad>"};

static uint32_t draw(uint64_t stream, uint64_t i)
{
    return lg_philox(stream, LG_PURPOSE_CROP, i, 0).v[0];
}

/* ---- writing models ---- */

struct bytes {
    uint8_t *data;
    size_t count;
};

static void add(struct bytes *b, const void *data, size_t count)
{
    b->data = realloc(b->data, b->count + count + 1);
    assert_non_null(b->data);
    if (count) memcpy(b->data + b->count, data, count);
    b->count += count;
}

static void add_varint(struct bytes *b, uint64_t v)
{
    for (; v > 127; v >>= 7) add(b, &(uint8_t){(uint8_t)(v | 128)}, 1);
    add(b, &(uint8_t){(uint8_t)v}, 1);
}

static void add_field(struct bytes *b, unsigned number, const void *data, size_t count)
{
    add_varint(b, number << 3 | 2);
    add_varint(b, count);
    add(b, data, count);
}

static void add_number(struct bytes *b, unsigned number, uint64_t v)
{
    add_varint(b, number << 3);
    add_varint(b, v);
}

enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4 };

static void add_piece(struct bytes *model, const void *text, size_t count, int type)
{
    struct bytes piece = {0};
    float score = -1;
    add_field(&piece, 1, text, count);
    add_varint(&piece, 2 << 3 | 5);
    add(&piece, &score, 4);
    add_number(&piece, 3, (uint64_t)type);
    add_field(model, 1, piece.data, piece.count);
    free(piece.data);
}

/* The pieces that T5 needs, and one. */
static struct bytes small_model(void)
{
    struct bytes model = {0}, trainer = {0};
    add_piece(&model, "<pad>", 5, CONTROL);
    add_piece(&model, "</s>", 4, CONTROL);
    add_piece(&model, "<unk>", 5, UNKNOWN);
    add_piece(&model, "a", 1, NORMAL);
    add_number(&trainer, 3, 1);
    add_number(&trainer, 40, 2);
    add_number(&trainer, 41, UINT64_MAX);
    add_number(&trainer, 42, 1);
    add_number(&trainer, 43, 0);
    add_field(&model, 2, trainer.data, trainer.count);
    free(trainer.data);
    return model;
}

static void add_charsmap(struct bytes *model, const void *table, size_t count)
{
    struct bytes normalizer = {0};
    add_field(&normalizer, 2, table, count);
    add_field(model, 3, normalizer.data, normalizer.count);
    free(normalizer.data);
}

/* Opens and frees the model. What opens must tokenise; returns what opening did. */
static int try_model(struct bytes *model)
{
    lg_tokenizer *t = NULL;
    const char *path = scratch_path("spiece.model");
    FILE *f = fopen(path, "wb");
    assert_true(f && fwrite(model->data, 1, model->count, f) == model->count && fclose(f) == 0);
    int rc = lg_tokenizer_open(path, &t), length;
    int32_t ids[32];
    for (size_t i = 0; rc == 0 && i < LG_ARRAY_LEN(captions); i++) {
        assert_int_equal(lg_tokenizer_encode(t, captions[i], 32, ids, &length), 0);
        assert_true(length >= 1 && length <= 32);
    }
    if (rc < 0) assert_true(strlen(lg_err_message()) > strlen(path));
    lg_tokenizer_close(&t);
    free(model->data);
    *model = (struct bytes){0};
    return rc;
}

static void refused(struct bytes model, int code, const char *why)
{
    int rc = try_model(&model);
    if (rc != code || !strstr(lg_err_message(), why))
        fail_msg("%d %s: %s", rc, why, lg_err_message());
    lg_err_clear();
}

/* ---- the emoji example's model and its table ---- */

static struct bytes emoji_model(void)
{
    struct bytes b;
    assert_int_equal(lg_read_file(MODEL, 1 << 24, (char **)&b.data, &b.count), 0);
    return b;
}

/* The table is the longest field there is: found by its size, 237,561 bytes, as a varint. */
static size_t find_charsmap(const struct bytes *model, size_t *ret_bytes)
{
    static const uint8_t head[] = {2 << 3 | 2, 0xf9, 0xbf, 0x0e};
    uint8_t *at = memmem(model->data, model->count, head, sizeof head);
    assert_non_null(at);
    *ret_bytes = 237561;
    return (size_t)(at - model->data) + sizeof head;
}

static void test_whole(void **state)
{
    (void)state;
    struct bytes model = emoji_model();
    size_t bytes, at = find_charsmap(&model, &bytes);
    assert_null(lg_charsmap_check(model.data + at, bytes));
    assert_int_equal(try_model(&model), 0);
    model = small_model();
    assert_int_equal(try_model(&model), 0);
}

static void test_random_charsmaps(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < RANDOM_TABLES; i++) {
        struct bytes model = small_model();
        uint32_t table[1024];
        for (uint32_t k = 0; k < LG_ARRAY_LEN(table); k++) table[k] = draw(i, k);
        table[0] = (uint32_t)(i % 2 ? 512 : 768) * 4;
        add_charsmap(&model, table, sizeof table);
        refused(model, LG_ERR_CORRUPT, "character table");
    }
}

/* One to four changed bytes anywhere in the table of the example. */
static void test_changed_charsmaps(void **state)
{
    (void)state;
    struct bytes whole = emoji_model();
    size_t bytes, at = find_charsmap(&whole, &bytes);
    int refusals = 0;
    for (uint64_t i = 0; i < CHANGED_TABLES; i++) {
        struct bytes model = small_model();
        uint8_t *table = malloc(bytes);
        memcpy(table, whole.data + at, bytes);
        for (uint32_t k = 0; k <= i % 4; k++)
            table[draw(i, 2 * k) % bytes] ^= (uint8_t)(1 + draw(i, 2 * k + 1) % 255);
        add_charsmap(&model, table, bytes);
        free(table);
        int rc = try_model(&model);
        assert_true(rc == 0 || rc == LG_ERR_CORRUPT);
        refusals += rc < 0;
        lg_err_clear();
    }
    assert_true(refusals > CHANGED_TABLES / 10 && refusals < CHANGED_TABLES);
    free(whole.data);
}

/* A trie of 512 units: "A" leads from state 256 to `state`, which says `value` if it is a leaf. */
static struct bytes table_with(uint32_t state, bool leaf, uint32_t value, const char *texts,
                               size_t texts_bytes)
{
    uint32_t units[513] = {512 * 4};
    struct bytes b = {0};
    units[1 + 0] = 256 << 10;
    units[1 + (256 ^ 'A')] = (state ^ 256 ^ 'A') << 10 | (uint32_t)leaf << 8 | 'A';
    if (state < 512) units[1 + state] = value | (uint32_t)leaf << 31;
    add(&b, units, sizeof units);
    add(&b, texts, texts_bytes);
    return b;
}

static void check_table(struct bytes b, const char *why)
{
    const char *wrong = lg_charsmap_check(b.data, b.count);
    if (!wrong != !why || (why && !strstr(wrong, why))) fail_msg("%s, not %s", wrong, why);
    struct bytes model = small_model();
    add_charsmap(&model, b.data, b.count);
    if (why)
        refused(model, LG_ERR_CORRUPT, why);
    else
        assert_int_equal(try_model(&model), 0);
    free(b.data);
}

static void test_each_fault_of_a_charsmap(void **state)
{
    (void)state;
    char longest[LG_CHARSMAP_TEXT_MAX + 2];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    check_table(table_with(257, true, 1, "\0a", 3), NULL);
    check_table(table_with(257, true, 2, "\0a", 3), NULL); /* the empty text */
    check_table(table_with(257, true, 1, longest, sizeof longest), NULL);
    check_table(table_with(257, true, 3, "\0a", 3), "behind its end");
    check_table(table_with(257, true, 1, "\0a", 2), "without an end");
    check_table(table_with(257, true, 0, longest, sizeof longest), "more than 255 bytes");
    check_table(table_with(257, true, 1, "\0\xc3", 3), "not UTF-8");
    check_table(table_with(512, false, 0, "", 1), "leads out of itself");
    check_table(table_with(1 << 20, false, 0, "", 1), "leads out of itself");
    check_table(table_with(256, false, 0, "", 1), NULL); /* a circle without a key: "AAA..." ends */
    struct bytes b = table_with(256, true, 0, "", 1);    /* each of "A", "AA", "AAA" ... is a key */
    check_table(b, "begin one another");
    /* 300 units: state 256 is one of them, but byte 255 would lead from it to unit 511. */
    uint32_t short_table[302] = {300 * 4, 256 << 10};
    check_table((struct bytes){memcpy(malloc(sizeof short_table), short_table, sizeof short_table),
                               sizeof short_table},
                "leads out of itself");
    b = table_with(257, true, 1, "\0a", 3);
    for (size_t cut = 0; cut <= 2052; cut++) {
        uint8_t *part = malloc(cut + 1); /* a sanitizer sees what is read behind it */
        memcpy(part, b.data, cut);
        assert_string_equal(lg_charsmap_check(part, cut), "is cut off");
        free(part);
    }
    free(b.data);
}

static void test_pieces(void **state)
{
    (void)state;
    size_t huge = 16 << 20;
    char *text = malloc(huge);
    memset(text, 'b', huge);
    struct bytes m = small_model();
    add_piece(&m, text, LG_PIECE_BYTES_MAX, NORMAL);
    assert_int_equal(try_model(&m), 0);
    m = small_model();
    add_piece(&m, text, huge, NORMAL); /* the library would recurse once a byte */
    refused(m, LG_ERR_CORRUPT, "more than 1024 bytes");
    for (int type = NORMAL; type <= USER_DEFINED; type += USER_DEFINED - NORMAL) {
        m = small_model();
        for (int i = 1; i <= LG_PIECES_NESTED_MAX; i++) add_piece(&m, text, (size_t)i, type);
        add_piece(&m, "c", 1, type);
        assert_int_equal(try_model(&m), 0);
    }
    m = small_model();
    for (int i = 1; i <= 1000; i++) add_piece(&m, text, (size_t)i, USER_DEFINED);
    refused(m, LG_ERR_CORRUPT, "begin one another");
    free(text);
    m = small_model();
    add_piece(&m, "b\0c", 3, USER_DEFINED);
    refused(m, LG_ERR_CORRUPT, "no UTF-8 text");
    m = small_model();
    add_piece(&m, "\xed\xa0\x80", 3, NORMAL);
    refused(m, LG_ERR_CORRUPT, "no UTF-8 text");
    m = small_model();
    add_piece(&m, "", 0, NORMAL);
    refused(m, LG_ERR_CORRUPT, "empty piece");
}

static void test_other_fields(void **state)
{
    (void)state;
    struct bytes m = small_model(), t = {0};
    add_number(&t, 3, 2);
    add_field(&m, 2, t.data, t.count);
    refused(m, LG_ERR_MISMATCH, "type 2");
    free(t.data);
    m = small_model();
    char *text = calloc(1, LG_SELF_TEST_BYTES_MAX + 1);
    add_field(&m, 4, text, LG_SELF_TEST_BYTES_MAX + 1);
    free(text);
    refused(m, LG_ERR_CORRUPT, "self-test");
    m = small_model();
    add_varint(&m, 9 << 3 | 3); /* a group */
    refused(m, LG_ERR_CORRUPT, "cut off");
    m = (struct bytes){0};
    add_number(&m, 9, 1);
    refused(m, LG_ERR_CORRUPT, "no pieces");
}

/* Changed bytes outside the table: lengths, types, pieces, specs. */
static void test_changed_models(void **state)
{
    (void)state;
    struct bytes whole = emoji_model();
    size_t bytes, table = find_charsmap(&whole, &bytes), room = whole.count - bytes;
    for (uint64_t i = 0; i < CHANGED_MODELS; i++) {
        struct bytes model = {0};
        add(&model, whole.data, whole.count);
        for (uint32_t k = 0; k <= i % 3; k++) {
            size_t at = draw(i, 2 * k + 100) % room;
            at += at >= table ? bytes : 0;
            model.data[at] ^= (uint8_t)(1 + draw(i, 2 * k + 101) % 255);
        }
        int rc = try_model(&model);
        assert_true(rc == 0 || rc == LG_ERR_CORRUPT || rc == LG_ERR_MISMATCH);
        lg_err_clear();
    }
    free(whole.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),
        cmocka_unit_test(test_random_charsmaps),
        cmocka_unit_test(test_changed_charsmaps),
        cmocka_unit_test(test_each_fault_of_a_charsmap),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_other_fields),
        cmocka_unit_test(test_changed_models),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
