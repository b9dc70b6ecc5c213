/* The tokenizer.json of a T5, as transformers 5 saves it: made here of the example's spiece.model, it gives the same ids for
 * ten thousand texts, with and without the <extra_id_N> that are no caption's; what is not a T5's is refused. */
#include "base/fs.h"
#include "base/philox.h"
#include "base/utf8.h"
#include "stages/io/tokenizer.h"
#include "tests/unit/scratch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define MODEL "examples/emoji/text_encoder/spiece.model"
enum { TEXTS = 10000, LENGTH = 48, EXTRA = 100 };

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) < 0) fail_msg("%s", lg_err_text());                                             \
    } while (0)

/* ---- spiece.model to tokenizer.json ---- */

struct reader {
    const uint8_t *at, *end;
};

static uint64_t varint(struct reader *r)
{
    uint64_t v = 0;
    for (int shift = 0;; shift += 7) {
        assert_true(r->at < r->end);
        v |= (uint64_t)(*r->at & 0x7F) << shift;
        if (*r->at++ < 0x80) return v;
    }
}
/* Of fields with bytes in them. */
static struct reader bytes_of(struct reader *r)
{
    const uint64_t n = varint(r);
    assert_true(n <= (uint64_t)(r->end - r->at));
    const struct reader ret = {r->at, r->at + n};
    r->at += n;
    return ret;
}

static void put_piece(FILE *f, struct reader piece, bool is_first)
{
    struct reader text = {0};
    float score = 0;
    while (piece.at < piece.end) {
        const uint64_t key = varint(&piece);
        if (key == (1 << 3 | 2)) {
            text = bytes_of(&piece);
        } else if (key == (2 << 3 | 5)) {
            memcpy(&score, piece.at, 4);
            piece.at += 4;
        } else {
            assert_int_equal(key & 7, 0);
            varint(&piece);
        }
    }
    fprintf(f, "%s[\"", is_first ? "" : ", ");
    for (const uint8_t *c = text.at; c < text.end; c++)
        fprintf(f, "%s%c", *c == '"' || *c == '\\' ? "\\" : "", *c);
    fprintf(f, "\", %.17g]", (double)score);
}

static void put_base64(FILE *f, struct reader r)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (; r.at < r.end; r.at += LG_MIN(3, r.end - r.at)) {
        const int n = (int)LG_MIN(3, r.end - r.at);
        const uint32_t v =
            (uint32_t)r.at[0] << 16 | (n > 1 ? (uint32_t)r.at[1] << 8 : 0) | (n > 2 ? r.at[2] : 0);
        for (int i = 0; i < 4; i++) putc(i > n ? '=' : digits[v >> (18 - 6 * i) & 63], f);
    }
}

/* Writes "t/tokenizer.json". */
static const char *json_of_model(int extra)
{
    char *data, *out = NULL;
    size_t bytes, size;
    struct reader map = {0};
    OK(lg_read_file(MODEL, 1 << 24, &data, &bytes));
    struct reader r = {(const uint8_t *)data, (const uint8_t *)data + bytes};
    FILE *f = open_memstream(&out, &size);
    assert_non_null(f);
    fprintf(
        f, "{\"version\": \"1.0\", \"model\": {\"type\": \"Unigram\", \"unk_id\": 2, \"vocab\": [");
    for (bool is_first = true; r.at < r.end;) {
        const uint64_t key = varint(&r);
        struct reader field = bytes_of(&r);
        if (key >> 3 == 1) put_piece(f, field, is_first), is_first = false;
        while (key >> 3 == 3 && field.at < field.end) {
            const uint64_t inner = varint(&field);
            if (inner == (2 << 3 | 2))
                map = bytes_of(&field);
            else if ((inner & 7) == 2)
                bytes_of(&field);
            else
                varint(&field);
        }
    }
    for (int i = extra - 1; i >= 0; i--) fprintf(f, ", [\"<extra_id_%d>\", 0.0]", i);
    fprintf(f,
            "], \"byte_fallback\": false}, \"added_tokens\": [{\"id\": 0, \"content\": \"<pad>\"}");
    for (int i = 0; i < extra; i++) fprintf(f, ", {\"content\": \"<extra_id_%d>\"}", i);
    fprintf(f, "], \"normalizer\": {\"type\": \"Precompiled\", \"precompiled_charsmap\": \"");
    put_base64(f, map);
    fprintf(
        f, "\"}, \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": "
           "\"WhitespaceSplit\"}, {\"type\": \"Metaspace\", \"replacement\": \"\xe2\x96\x81\"}]}}");
    assert_int_equal(lg_close_text(f), 0);
    assert_true(map.end - map.at > 1000);
    scratch_write("t/tokenizer.json", out);
    free(data), free(out);
    return scratch_path("t");
}

/* ---- the same ids ---- */

/* Words of what captions have, and now and then of anything. */
static void random_text(uint64_t i, char *text)
{
    static const char *const words[] = {"red",
                                        "a",
                                        "smiling face with",
                                        "Caf\xc3\xa9",
                                        "\xef\xbc\xa1",
                                        "<extra_id_3>",
                                        "\xe2\x84\xab",
                                        "</s>",
                                        "it's",
                                        "12",
                                        "\t\n"};
    size_t n = 0;
    for (uint32_t k = 0, most = 1 + lg_philox(1, LG_PURPOSE_CROP, i, 99).v[0] % 12; k < most; k++) {
        const lg_philox_out drawn = lg_philox(1, LG_PURPOSE_CROP, i, k);
        const uint32_t *v = drawn.v;
        if (v[0] % 4) {
            n += (size_t)sprintf(text + n, "%s", words[v[1] % LG_ARRAY_LEN(words)]);
        } else {
            const uint32_t code = 1 + v[1] % (v[0] % 8 ? 0x2FF : 0xD7FF);
            n += lg_utf8_put(code, text + n);
        }
        if (v[2] % 3) text[n++] = ' ';
    }
    text[n] = 0;
}

static void check_same(const char *dir)
{
    lg_tokenizer *model = NULL, *json = NULL;
    OK(lg_tokenizer_open(MODEL, &model));
    OK(lg_tokenizer_open(dir, &json));
    assert_int_equal(lg_tokenizer_pieces(json), lg_tokenizer_pieces(model));
    for (uint64_t i = 0; i < TEXTS; i++) {
        int32_t want[LENGTH], got[LENGTH];
        int want_used, got_used;
        char text[1024];
        random_text(i, text);
        OK(lg_tokenizer_encode(model, text, LENGTH, want, &want_used));
        OK(lg_tokenizer_encode(json, text, LENGTH, got, &got_used));
        if (want_used != got_used || memcmp(want, got, sizeof want) != 0)
            fail_msg("text %d, \"%s\", has other tokens", (int)i, text);
    }
    lg_tokenizer_close(&model);
    lg_tokenizer_close(&json);
}

static void test_same_as_its_model(void **state)
{
    (void)state;
    check_same(json_of_model(0));
    check_same(json_of_model(EXTRA));
}

static void test_refused(void **state)
{
    (void)state;
#define PIECES "[\"<pad>\", 0], [\"</s>\", 0], [\"<unk>\", 0], [\"a\", -1.5]"
#define T5(pieces, more)                                                                           \
    "{\"model\": {\"type\": \"Unigram\", \"vocab\": [" pieces "]}, \"added_tokens\": []" more "}"
    static const struct {
        const char *content;
        int code;
        const char *why;
    } BAD[] = {
        {T5(PIECES, ""), 0, NULL},
        {T5(PIECES, ", \"normalizer\": null, \"pre_tokenizer\": {\"type\": \"Metaspace\"}"), 0,
         NULL},
        {"{", LG_ERR_CORRUPT, "tokenizer.json"},
        {"{\"model\": {\"type\": \"WordPiece\"}}", LG_ERR_MISMATCH, "not the Unigram of a T5"},
        {"{\"model\": {\"type\": \"Unigram\"}}", LG_ERR_MISMATCH, "not the Unigram of a T5"},
        {"{\"model\": {\"type\": \"Unigram\", \"byte_fallback\": true, \"vocab\": []}}",
         LG_ERR_MISMATCH, "not the Unigram"},
        {T5("", ""), LG_ERR_CORRUPT, "no pieces"},
        {T5("[\"<unk>\", 0]", ""), LG_ERR_MISMATCH,
         "its piece 0 is \"<unk>\", which in a T5's is <pad>"},
        {T5("3", ""), LG_ERR_CORRUPT, "no list of text and score"},
        {T5("[\"<pad>\", 0, 1]", ""), LG_ERR_CORRUPT, "no list of text and score"},
        {T5("[\"<pad>\", \"0\"]", ""), LG_ERR_CORRUPT, "score is no number"},
        {T5(PIECES ", [\"\", 0]", ""), LG_ERR_CORRUPT, "an empty piece"},
        {T5(PIECES, ", \"normalizer\": {\"type\": \"Lowercase\"}"), LG_ERR_MISMATCH, "Lowercase"},
        {T5(PIECES,
            ", \"normalizer\": {\"type\": \"Precompiled\", \"precompiled_charsmap\": \"*\"}"),
         LG_ERR_CORRUPT, "base64"},
        {T5(PIECES,
            ", \"normalizer\": {\"type\": \"Precompiled\", \"precompiled_charsmap\": \"AAAA\"}"),
         LG_ERR_CORRUPT, "character table"},
        {T5(PIECES, ", \"pre_tokenizer\": {\"type\": \"ByteLevel\"}"), LG_ERR_MISMATCH,
         "ByteLevel"},
        {"{\"model\": {\"type\": \"Unigram\", \"vocab\": [" PIECES
         "]}, \"added_tokens\": [{\"content\": \"<style>\"}]}",
         LG_ERR_MISMATCH, "<style>"},
        {"{\"model\": {\"type\": \"Unigram\", \"vocab\": [" PIECES
         ", [\"<extra_id_0>\", 0], [\"b\", 0]]}, \"added_tokens\": [{\"content\": "
         "\"<extra_id_0>\"}]}",
         LG_ERR_MISMATCH, "behind added tokens"},
    };
#undef PIECES
#undef T5
    for (size_t i = 0; i < LG_ARRAY_LEN(BAD); i++) {
        lg_tokenizer *t = NULL;
        scratch_write("t/tokenizer.json", BAD[i].content);
        const int rc = lg_tokenizer_open(scratch_path("t"), &t);
        if (rc != BAD[i].code || (rc < 0 && !strstr(lg_err_message(), BAD[i].why)))
            fail_msg("%s: %d, \"%s\"", BAD[i].content, rc, rc < 0 ? lg_err_message() : "");
        lg_err_clear();
        lg_tokenizer_close(&t);
    }
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, scratch_setup, scratch_teardown)
    const struct CMUnitTest tests[] = {TEST(test_same_as_its_model), TEST(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
