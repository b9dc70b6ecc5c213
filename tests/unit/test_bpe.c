/* The byte-level BPE of CLIP: token for token what transformers' CLIPTokenizer makes of 10,000 nasty strings and of all
 * captions of examples/emoji (tests/golden/make_bpe.py); files that are damaged. */
#include "base/fs.h"
#include "base/utf8.h"
#include "config/tokenizer_files.h"
#include "stages/io/bpe.h"
#include "stages/io/tar.h"
#include "stages/io/tokenizer.h"
#include "tests/golden/bpe/golden.h"
#include "tests/unit/scratch.h"
#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define GOLDEN     "tests/golden/bpe"
#define EMOJI_DATA "examples/emoji/data"
enum { GROUP = 100, SHORT = 77, LONG = 900, TEXT_MAX = 1 << 14 };

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) < 0) fail_msg("%s", lg_err_text());                                             \
    } while (0)

/* ---- the strings ---- */

/* splitmix64 */
static uint64_t below(uint64_t *s, uint64_t n)
{
    uint64_t z = *s += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return (z ^ (z >> 31)) % n;
}

struct text {
    char v[TEXT_MAX];
    size_t n;
};

static void put(struct text *t, uint64_t code)
{
    assert_true(t->n + 8 < sizeof t->v);
    t->n += lg_utf8_put((uint32_t)code, t->v + t->n);
}

static void put_from(struct text *t, uint64_t *s, uint32_t first, uint64_t range, uint64_t most)
{
    for (uint64_t n = 1 + below(s, most); n > 0; n--) put(t, first + below(s, range));
}

/* As in make_bpe.py, but for bytes that belong to no character. */
static void nasty(uint64_t seed, struct text *t)
{
    uint64_t s = seed;
    t->n = 0;
    for (uint64_t left = 1 + below(&s, 12); left > 0; left--) {
        const uint64_t kind = below(&s, 14);
        if (kind <= 2) {
            for (uint64_t n = 1 + below(&s, 8); n > 0; n--) {
                const uint32_t first = below(&s, 3) ? 97 : 65;
                put(t, first + below(&s, 26));
            }
        } else if (kind == 3) {
            put(t, (uint64_t)NASTY_SPACES[below(&s, LG_ARRAY_LEN(NASTY_SPACES))]);
        } else if (kind <= 5) {
            const char *piece = NASTY_PIECES[below(&s, LG_ARRAY_LEN(NASTY_PIECES))];
            memcpy(t->v + t->n, piece, strlen(piece));
            t->n += strlen(piece);
        } else if (kind == 6) {
            put_from(t, &s, 0x300, 0x70, 5);
        } else if (kind == 7) {
            put_from(t, &s, 0x4E00, 20000, 3);
        } else if (kind == 8) {
            put_from(t, &s, 0x600, 0x100, 4);
        } else if (kind == 9) {
            put_from(t, &s, 0x1100, 0x100, 5);
        } else if (kind == 10) {
            const bool low = below(&s, 2);
            put(t, low ? 1 + below(&s, 31) : 127 + below(&s, 33));
        } else if (kind == 11) {
            put_from(t, &s, 0xA0, 0x2F00, 3);
        } else if (kind == 12) {
            const uint64_t bad = below(&s, 66);
            t->v[t->n++] = (char)(bad < 64 ? 0x80 + bad : 0xFE + bad - 64);
        } else if (below(&s, 20) == 0) {
            for (uint64_t n = 300 + below(&s, 300); n > 0; n--) put(t, 97 + below(&s, 4));
        } else {
            put_from(t, &s, 48, 10, 4);
        }
    }
    t->v[t->n] = 0;
}

static uint64_t fold(uint64_t h, lg_bpe *t, const char *text, int length)
{
    int32_t ids[LONG];
    int used = -1;
    lg_bpe_encode(t, text, length, ids, &used);
    assert_in_range(used, 2, length);
    h = (h ^ (uint64_t)length) * 0x100000001B3 + 1;
    for (int i = 0; i < length; i++) {
        h = (h ^ (uint64_t)ids[i]) * 0x100000001B3 + 1;
        if (i >= used) assert_int_equal(ids[i], lg_bpe_pad(t));
    }
    return h;
}

/* Hashes of a group of strings; `take` says string i is `text`. */
struct hashes {
    const char *what;
    lg_bpe *t;
    const uint64_t *want;
    uint64_t h;
    size_t n, n_want;
    int wrong;
};

static void finish_group(struct hashes *x)
{
    const size_t group = (x->n - 1) / GROUP;
    if (x->n == 0) return;
    assert_true(group < x->n_want);
    if (x->h == x->want[group]) return;
    print_message("%s: strings %zu to %zu differ\n", x->what, group * GROUP, x->n - 1);
    x->wrong++;
}

static void take(struct hashes *x, const char *text)
{
    if (x->n % GROUP == 0) {
        finish_group(x);
        x->h = 0xCBF29CE484222325;
    }
    x->h = fold(fold(x->h, x->t, text, SHORT), x->t, text, LONG);
    x->n++;
}

static void check_hashes(struct hashes *x)
{
    finish_group(x);
    assert_int_equal((x->n + GROUP - 1) / GROUP, x->n_want);
    assert_int_equal(x->wrong, 0);
}

/* ---- the tokenizer ---- */

static void copy(const char *name)
{
    char from[LG_PATH_BYTES], *data;
    size_t bytes;
    OK(lg_path(from, "%s/%s", GOLDEN, name));
    OK(lg_read_file(from, 1 << 24, &data, &bytes));
    assert_true(mkdir(scratch_path("t"), 0700) == 0 || errno == EEXIST);
    OK(lg_path(from, "t/%s", name));
    OK(lg_publish_file(scratch_path(from), data, bytes));
    free(data);
}

/* A folder with the golden vocabulary and these words on special tokens, either NULL. */
static const char *folder(const char *map, const char *config)
{
    copy("vocab.json");
    copy("merges.txt");
    unlink(scratch_path("t/special_tokens_map.json"));
    unlink(scratch_path("t/tokenizer_config.json"));
    if (map) scratch_write("t/special_tokens_map.json", map);
    if (config) scratch_write("t/tokenizer_config.json", config);
    return scratch_path("t");
}

static void put_quoted(FILE *f, const char *text, size_t n)
{
    putc('"', f);
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '"' || text[i] == '\\') putc('\\', f);
        putc(text[i], f);
    }
    putc('"', f);
}

/* A folder of tokenizer.json alone, as transformers 5 saves it; in_pairs: or as older ones did. */
static const char *json_folder(bool in_pairs, const char *added, const char *config)
{
    char *vocab, *merges, *out = NULL;
    size_t bytes, size;
    OK(lg_read_file(GOLDEN "/vocab.json", 1 << 24, &vocab, &bytes));
    OK(lg_read_file(GOLDEN "/merges.txt", 1 << 24, &merges, &bytes));
    FILE *f = open_memstream(&out, &size);
    assert_non_null(f);
    fprintf(f, "{\"version\": \"1.0\", \"normalizer\": {\"vocab\": [{}]}, ");
    if (added) fprintf(f, "\"added_tokens\": %s, ", added);
    fprintf(f,
            "\"model\": {\"type\": \"BPE\", \"dropout\": null, \"end_of_word_suffix\": \"</w>\", "
            "\"vocab\": %s, \"merges\": [",
            vocab);
    const char *line = strchr(merges, '\n') + 1, *comma = "";
    for (const char *end; (end = strchr(line, '\n')); line = end + 1, comma = ", ") {
        const char *space = memchr(line, ' ', (size_t)(end - line));
        fprintf(f, "%s%s", comma, in_pairs ? "[" : "");
        if (in_pairs) {
            put_quoted(f, line, (size_t)(space - line));
            fprintf(f, ", ");
            put_quoted(f, space + 1, (size_t)(end - space - 1));
        } else {
            put_quoted(f, line, (size_t)(end - line));
        }
        fprintf(f, "%s", in_pairs ? "]" : "");
    }
    fprintf(f, "]}}\n");
    assert_int_equal(lg_close_text(f), 0);
    scratch_write("j/tokenizer.json", out);
    unlink(scratch_path("j/tokenizer_config.json"));
    if (config) scratch_write("j/tokenizer_config.json", config);
    free(vocab), free(merges), free(out);
    return scratch_path("j");
}

static void check_nasty(const char *what, const char *dir, const uint64_t *want, size_t n_want)
{
    static struct text text;
    struct hashes x = {.what = what, .want = want, .n_want = n_want};
    OK(lg_bpe_open(dir, &x.t));
    for (uint64_t i = 0; i < n_want * GROUP; i++) {
        bool skipped = false;
        for (size_t k = 0; k < LG_ARRAY_LEN(NASTY_SKIPPED); k++)
            skipped = skipped || i == (uint64_t)NASTY_SKIPPED[k];
        nasty(i, &text);
        take(&x, skipped ? "" : text.v);
    }
    check_hashes(&x);
    lg_bpe_close(&x.t);
}

static void test_nasty_strings(void **state)
{
    (void)state;
    check_nasty("as by default", GOLDEN, NASTY_0, LG_ARRAY_LEN(NASTY_0));
    scratch_make();
    check_nasty("as SD 2", folder(MAP_1, CONFIG_1), NASTY_1, LG_ARRAY_LEN(NASTY_1));
    check_nasty("as SDXL", folder(MAP_2, CONFIG_2), NASTY_2, LG_ARRAY_LEN(NASTY_2));
    static const char both[] = "[{\"id\": 1, \"content\": \"<|startoftext|>\"}, "
                               "{\"id\": 2, \"content\": \"<|endoftext|>\", \"special\": true}]";
    check_nasty("tokenizer.json", json_folder(true, both, NULL), NASTY_0, LG_ARRAY_LEN(NASTY_0));
    check_nasty("tokenizer.json, merges as texts, as SDXL", json_folder(false, NULL, CONFIG_2),
                NASTY_2, LG_ARRAY_LEN(NASTY_2));
    scratch_remove();
}

struct shard {
    int fd;
    struct hashes *to;
};

static int take_caption(void *ctx, const struct lg_tar_member *m)
{
    const struct shard *s = ctx;
    char text[4096];
    const size_t n = strlen(m->name);
    if (n < 4 || strcmp(m->name + n - 4, ".txt") != 0) return 0;
    assert_true(m->size < sizeof text);
    assert_int_equal(pread(s->fd, text, m->size, (off_t)m->offset), m->size);
    size_t end = m->size, from = 0;
    while (end && isspace((unsigned char)text[end - 1])) end--;
    text[end] = 0;
    while (isspace((unsigned char)text[from])) from++;
    take(s->to, text + from);
    return 0;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static void test_emoji_captions(void **state)
{
    (void)state;
    struct hashes x = {.what = EMOJI_DATA, .want = EMOJI, .n_want = LG_ARRAY_LEN(EMOJI)};
    struct dirent **entry = NULL;
    const int n = scandir(EMOJI_DATA, &entry, NULL, by_name);
    if (n < 0) fail_msg("%s is not there: make example-data", EMOJI_DATA);
    OK(lg_bpe_open(GOLDEN, &x.t));
    for (int i = 0; i < n; i++) {
        char path[LG_PATH_BYTES];
        uint64_t bytes;
        struct shard s = {.to = &x};
        if (strstr(entry[i]->d_name, ".tar")) {
            OK(lg_path(path, "%s/%s", EMOJI_DATA, entry[i]->d_name));
            OK(lg_open_file(path, &s.fd, &bytes));
            OK(lg_tar_scan(s.fd, path, take_caption, &s, NULL));
            close(s.fd);
        }
        free(entry[i]);
    }
    free(entry);
    check_hashes(&x);
    lg_bpe_close(&x.t);
}

/* Words and runs of marks that a caption may consist of: time as of a sort, not of the square. */
static void test_long_texts(void **state)
{
    (void)state;
    enum { BYTES = 1 << 20 };
    lg_bpe *t = NULL;
    char *text = malloc(BYTES + 1);
    int32_t ids[SHORT];
    int used;
    OK(lg_bpe_open(GOLDEN, &t));
    for (int kind = 0; kind < 3; kind++) {
        static const char *const units[] = {"re", "\xcc\x96\xcc\x80", "<|"};
        for (size_t i = 0; i < BYTES; i += strlen(units[kind]))
            memcpy(text + i, units[kind], strlen(units[kind]));
        text[BYTES] = 0;
        const clock_t begin = clock();
        lg_bpe_encode(t, text, SHORT, ids, &used);
        assert_int_equal(used, SHORT);
        assert_true((clock() - begin) / CLOCKS_PER_SEC < 20);
    }
    free(text);
    lg_bpe_close(&t);
}

static void test_ends(void **state)
{
    (void)state;
    lg_tokenizer *t = NULL;
    int32_t ids[8];
    int used;
    OK(lg_tokenizer_open(GOLDEN, &t));
    const int bos = lg_tokenizer_pieces(t) - 2, eos = bos + 1;
    assert_int_equal(lg_tokenizer_eos(t), eos);
    OK(lg_tokenizer_encode(t, "", 4, ids, &used));
    assert_true(used == 2 && ids[0] == bos && ids[1] == eos && ids[2] == eos && ids[3] == eos);
    OK(lg_tokenizer_encode(t, "red red red red", 4, ids, &used));
    assert_true(used == 4 && ids[0] == bos && ids[1] == ids[2] && ids[3] == eos);
    OK(lg_tokenizer_encode(t, "red", 2, ids, &used));
    assert_true(used == 2 && ids[0] == bos && ids[1] == eos);
    OK(lg_tokenizer_encode(t, "red", 1, ids, &used));
    assert_true(used == 1 && ids[0] == eos);
    lg_tokenizer_close(&t);
}

/* ---- where it lies ---- */

static void test_places(void **state)
{
    (void)state;
    struct lg_tokenizer_files f;
    char path[LG_PATH_BYTES];
    scratch_make();
    scratch_write("p/tokenizer_2/vocab.json", "{}");
    scratch_write("p/tokenizer_2/merges.txt", "");
    scratch_write("p/tokenizer/spiece.model", "");
    scratch_write("p/text_encoder_2/config.json", "{}");
    scratch_write("p/text_encoder/config.json", "{}");
    scratch_write("p/other/merges.txt", "");
    scratch_write("p/text_encoder_3/config.json", "{}");
    scratch_write("p/tokenizer_3/tokenizer.json", "{}");
    OK(lg_tokenizer_files_find(scratch_path("p/text_encoder_2"), LG_TOKENIZER_BPE, &f));
    assert_string_equal(f.dir, scratch_path("p/tokenizer_2"));
    OK(lg_path(path, "%s/", scratch_path("p/text_encoder")));
    OK(lg_tokenizer_files_find(path, LG_TOKENIZER_KINDS, &f));
    assert_int_equal(f.kind, LG_TOKENIZER_SPIECE);
    assert_string_equal(f.dir, scratch_path("p/tokenizer"));
    assert_int_equal(lg_tokenizer_files_find(path, LG_TOKENIZER_BPE, &f), LG_ERR_NOTFOUND);
    assert_non_null(strstr(
        lg_err_message(), "text_encoder//vocab.json with merges.txt, or tokenizer.json, does not"));
    assert_non_null(strstr(lg_err_message(), "p/tokenizer:"));
    OK(lg_tokenizer_files_find(scratch_path("p/tokenizer_2"), LG_TOKENIZER_BPE, &f));
    uint64_t before, after;
    OK(lg_tokenizer_files_hash(&f, &before));
    scratch_write("p/tokenizer_2/special_tokens_map.json", "{}"); /* it decides bits as well */
    OK(lg_tokenizer_files_hash(&f, &after));
    assert_int_not_equal(before, after);
    OK(lg_tokenizer_files_find(scratch_path("p/text_encoder_3"), LG_TOKENIZER_BPE, &f));
    assert_int_equal(f.kind, LG_TOKENIZER_JSON);
    assert_string_equal(f.dir, scratch_path("p/tokenizer_3"));
    OK(lg_tokenizer_files_hash(&f, &before));
    scratch_write("p/tokenizer_3/tokenizer_config.json", "{}");
    OK(lg_tokenizer_files_hash(&f, &after));
    assert_int_not_equal(before, after);
    assert_int_equal(lg_tokenizer_files_find(scratch_path("p/other"), LG_TOKENIZER_KINDS, &f),
                     LG_ERR_NOTFOUND);
    lg_err_clear();
    scratch_remove();
}

/* ---- damaged files ---- */

static void refused(const char *file, const char *content, int code, const char *why)
{
    lg_bpe *t = NULL;
    char name[64];
    folder(NULL, NULL);
    snprintf(name, sizeof name, "t/%s", file);
    scratch_write(name, content);
    const int rc = lg_bpe_open(scratch_path("t"), &t);
    if (rc != code || !strstr(lg_err_message(), why))
        fail_msg("%s: \"%.40s\": %d, \"%s\"", file, content, rc, lg_err_message());
    lg_err_clear();
}

static void test_damaged_files(void **state)
{
    (void)state;
    scratch_make();
    static const struct {
        const char *file, *content;
        int code;
        const char *why;
    } BAD[] = {
        {"vocab.json", "", LG_ERR_CORRUPT, "vocab.json"},
        {"vocab.json", "[1]", LG_ERR_CORRUPT, "not a JSON object"},
        {"vocab.json", "{}", LG_ERR_CORRUPT, "byte 0x00 has no token of its own"},
        {"vocab.json", "{\"a\": 0, \"a\": 1}", LG_ERR_CORRUPT, "appears twice"},
        {"vocab.json", "{\"a\": 0, \"b\": 0}", LG_ERR_CORRUPT, "id 0 is given twice"},
        {"vocab.json", "{\"a\": 0, \"b\": 2}", LG_ERR_CORRUPT,
         "id 2 is given twice or is not below"},
        {"vocab.json", "{\"a\": -1}", LG_ERR_CORRUPT, "no whole number"},
        {"vocab.json", "{\"a\": {\"b\": 1}}", LG_ERR_CORRUPT, "no whole number"},
        {"vocab.json", "{\"a\": 0", LG_ERR_CORRUPT, "vocab.json"},
        {"merges.txt", "#version: 0.2\na", LG_ERR_CORRUPT,
         "line 2 of the merges is not two tokens"},
        {"merges.txt", "#version: 0.2\na b c\n", LG_ERR_CORRUPT,
         "line 2 of the merges is not two tokens"},
        {"merges.txt", "nobody knows\n", LG_ERR_CORRUPT, "line 1 of the merges has a token"},
        {"merges.txt", "#version: 0.2\n\n", LG_ERR_CORRUPT,
         "line 2 of the merges is not two tokens"},
        {"merges.txt", "r e\r\nr e\r\n", LG_ERR_CORRUPT, "line 2 of the merges repeats"},
        {"special_tokens_map.json", "7", LG_ERR_CORRUPT, "not a JSON object"},
        {"special_tokens_map.json", "{\"pad_token\": 7}", LG_ERR_CORRUPT,
         "\"pad_token\" is no token"},
        {"special_tokens_map.json", "{\"pad_token\": \"<pad>\"}", LG_ERR_CORRUPT, "does not know"},
        {"special_tokens_map.json", "{\"pad_token\": {\"content\": \"!\", \"lstrip\": true}}",
         LG_ERR_MISMATCH, "lstrip"},
        {"tokenizer_config.json", "{\"added_tokens_decoder\": {\"9\": {\"content\": \"<style>\"}}}",
         LG_ERR_MISMATCH, "<style>"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(BAD); i++)
        refused(BAD[i].file, BAD[i].content, BAD[i].code, BAD[i].why);
    char line[4096];
    memset(line, 'a', sizeof line);
    line[1500] = ' ';
    line[4095] = 0;
    refused("merges.txt", line, LG_ERR_CORRUPT, "line 1 of the merges is not two tokens");
    memcpy(line, "{\"", 2);
    memcpy(line + 4000, "\": 0}", 6);
    line[1500] = 'a';
    refused("vocab.json", line, LG_ERR_CORRUPT, "more than 1024 bytes");
    folder(NULL, NULL);
    unlink(scratch_path("t/merges.txt"));
    lg_bpe *t = NULL;
    assert_int_equal(lg_bpe_open(scratch_path("t"), &t), LG_ERR_NOTFOUND);
    lg_err_clear();
    unlink(scratch_path("t/vocab.json"));
    static const struct {
        const char *content;
        int code;
        const char *why;
    } JSON[] = {
        {"[]", LG_ERR_CORRUPT, "not a JSON object"},
        {"{}", LG_ERR_MISMATCH, "not the BPE of a CLIP"},
        {"{\"model\": {\"type\": \"Unigram\", \"vocab\": [[\"a\", 0]]}}", LG_ERR_MISMATCH,
         "another kind of text encoder"},
        {"{\"model\": {\"type\": \"BPE\", \"end_of_word_suffix\": null}}", LG_ERR_MISMATCH, "</w>"},
        {"{\"model\": 3}", LG_ERR_CORRUPT, "no object"},
        {"{\"model\": {}, \"model\": {}}", LG_ERR_CORRUPT, "twice"},
#define CLIP "{\"model\": {\"type\": \"BPE\", \"end_of_word_suffix\": \"</w>\""
        {CLIP "}}", LG_ERR_CORRUPT, "has no \"vocab\""},
        {CLIP ", \"vocab\": {}}}", LG_ERR_CORRUPT, "has no \"merges\""},
        {CLIP ", \"vocab\": {}, \"vocab\": {}}}", LG_ERR_CORRUPT, "twice"},
        {CLIP ", \"vocab\": {}, \"merges\": {}}}", LG_ERR_CORRUPT, "no list"},
        {CLIP ", \"vocab\": {}, \"merges\": [1]}}", LG_ERR_CORRUPT, "not two tokens"},
        {CLIP ", \"vocab\": {}, \"merges\": [[\"a\"]]}}", LG_ERR_CORRUPT, "not two tokens"},
        {CLIP ", \"vocab\": {}, \"merges\": [[\"a\", \"b\", \"c\"]]}}", LG_ERR_CORRUPT,
         "not two tokens"},
        {CLIP ", \"vocab\": {}, \"merges\": []}}", LG_ERR_CORRUPT, "byte 0x00"},
        {CLIP ", \"vocab\": {}, \"merges\": []}} {", LG_ERR_CORRUPT, "tokenizer.json"},
        {CLIP ", \"vocab\": {\"a\": x}, \"merges\": []}}", LG_ERR_CORRUPT, "tokenizer.json"},
#undef CLIP
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(JSON); i++) {
        scratch_write("t/tokenizer.json", JSON[i].content);
        const int rc = lg_bpe_open(scratch_path("t"), &t);
        if (rc != JSON[i].code || !strstr(lg_err_message(), JSON[i].why))
            fail_msg("\"%s\": %d, \"%s\"", JSON[i].content, rc, lg_err_message());
        lg_err_clear();
    }
    json_folder(true, "[{\"content\": \"<style>\"}]", NULL);
    assert_int_equal(lg_bpe_open(scratch_path("j"), &t), LG_ERR_MISMATCH);
    assert_non_null(strstr(lg_err_message(), "tokenizer.json: \"added_tokens\" has \"<style>\""));
    lg_err_clear();
    scratch_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nasty_strings), cmocka_unit_test(test_emoji_captions),
        cmocka_unit_test(test_long_texts),    cmocka_unit_test(test_ends),
        cmocka_unit_test(test_places),        cmocka_unit_test(test_damaged_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
