/* vocab.json and merges.txt, or tokenizer.json, and the special tokens; see bpe.h for what stands in them.
 *
 * Design: the vocabulary is read token by token into one block of texts and a hash table of them (open addressing, at most
 * half full), which the merges need and which is gone afterwards. */
#include "stages/io/bpe_files.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/json_tree.h"
#include "base/utf8.h"
#include "stages/io/bpe.h"
#include "stages/io/bpe_json.h"
#include <stdlib.h>
#include <string.h>

enum { SMALL_BYTES_MAX = 4 << 20, SMALL_TOKENS_MAX = 1 << 18 };
static const char word_end[] = "</w>", header[] = "#version";

/* ---- the vocabulary ---- */

struct vocab {
    char path[LG_PATH_BYTES];
    char *text; /* of all tokens, one behind the other */
    size_t bytes;
    struct {
        size_t at;
        int32_t bytes, id; /* bytes < 0: an empty place */
    } * place;
    uint64_t mask;
    int n;
};

static uint64_t mix(uint64_t a, uint64_t b)
{
    const uint64_t pair[2] = {a, b};
    return lg_hash(pair, sizeof pair);
}

/* The place of this text, or the empty one where it would stand. */
static size_t place_of(const struct vocab *v, const char *text, size_t bytes)
{
    uint64_t i = lg_hash(text, bytes) & v->mask;
    while (v->place[i].bytes >= 0 && ((size_t)v->place[i].bytes != bytes ||
                                      memcmp(v->text + v->place[i].at, text, bytes) != 0))
        i = (i + 1) & v->mask;
    return i;
}

static int32_t id_of(const struct vocab *v, const char *text, size_t bytes)
{
    const size_t i = place_of(v, text, bytes);
    return v->place[i].bytes < 0 ? -1 : v->place[i].id;
}

static int make_places(struct vocab *v, uint64_t tokens)
{
    uint64_t places = 16;
    while (places < 2 * tokens) places *= 2;
    v->place = malloc(places * sizeof *v->place);
    if (!v->place) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", v->path);
    for (uint64_t i = 0; i < places; i++) v->place[i].bytes = -1;
    v->mask = places - 1;
    return 0;
}

static int add_token(struct vocab *v, const lg_json *key, const lg_json *value)
{
    uint64_t id;
    if (key->bytes > LG_BPE_TOKEN_BYTES_MAX)
        return lg_json_fail(key, "a token of more than 1024 bytes");
    if (value->kind != LG_JSON_NUMBER || !lg_json_u64(value, &id) || id >= LG_BPE_VOCAB_MAX)
        return lg_json_fail(value, "a token's id is no whole number below 1,048,576");
    if (v->n == LG_BPE_VOCAB_MAX) return lg_json_fail(value, "more than 1,048,576 tokens");
    char *text = v->text + v->bytes; /* the file is longer than its texts */
    const size_t bytes = lg_json_text(key, text), at = place_of(v, text, bytes);
    if (v->place[at].bytes >= 0) return lg_json_fail(value, "a token appears twice");
    v->place[at].at = v->bytes;
    v->place[at].bytes = (int32_t)bytes;
    v->place[at].id = (int32_t)id;
    v->bytes += bytes;
    v->n++;
    return 0;
}

/* origin: of data in its file. */
static int parse_vocab(struct vocab *v, const char *data, size_t bytes, size_t origin)
{
    lg_json j, counter, key;
    const struct lg_json_source source = {.label = v->path,
                                          .data = data,
                                          .bytes = bytes,
                                          .origin = origin,
                                          .tokens_max = 2 * (uint64_t)LG_BPE_VOCAB_MAX + 8};
    uint64_t tokens = 0;
    lg_json_open(&j, &source);
    LG_TRY(lg_json_expect(&j, LG_JSON_OBJECT, "this is not a JSON object"));
    counter = j;
    do {
        LG_TRY(lg_json_next(&counter));
        tokens += counter.kind == LG_JSON_KEY;
    } while (counter.kind != LG_JSON_END);
    v->text = malloc(bytes + 1);
    if (!v->text) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", v->path);
    LG_TRY(make_places(v, tokens));
    for (;;) {
        LG_TRY(lg_json_next(&j));
        if (j.kind == LG_JSON_OBJECT_END) return 0;
        key = j;
        LG_TRY(lg_json_next(&j));
        LG_TRY(add_token(v, &key, &j));
    }
}

/* Ids are 0 .. n - 1, each once. */
static int check_ids(const struct vocab *v)
{
    uint8_t *seen = calloc((size_t)v->n + 1, 1);
    if (!seen) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", v->path);
    int32_t wrong = -1;
    for (uint64_t i = 0; i <= v->mask; i++) {
        if (v->place[i].bytes < 0) continue;
        if (v->place[i].id >= v->n || seen[v->place[i].id]++) wrong = v->place[i].id;
    }
    free(seen);
    if (wrong >= 0)
        return LG_FAIL(
            LG_ERR_CORRUPT,
            "%s: id %d is given twice or is not below the number of tokens, %d: the file "
            "is damaged, or tokens lie in a file that is not read",
            v->path, wrong, v->n);
    return 0;
}

static int read_vocab(const char *dir, const struct lg_bpe_json *json, struct vocab *v)
{
    char *data = NULL;
    size_t bytes;
    int rc;
    if (json->vocab) {
        LG_TRY(lg_path(v->path, "%s", json->file.path));
        rc = parse_vocab(v, json->vocab->text, json->vocab->bytes,
                         (size_t)(json->vocab->text - json->file.data));
    } else {
        LG_TRY(lg_path(v->path, "%s/vocab.json", dir));
        LG_TRY(lg_read_file(v->path, LG_BPE_VOCAB_BYTES_MAX, &data, &bytes));
        rc = parse_vocab(v, data, bytes, 0);
    }
    free(data);
    LG_TRY(rc);
    LG_TRY(check_ids(v));
    return 0;
}

static void free_vocab(struct vocab *v)
{
    free(v->text);
    free(v->place);
}

/* GPT-2's byte_encoder: what prints stands for itself, the others in order for 256 and on. */
static uint32_t char_of_byte(int byte)
{
#define PRINTS(b) (((b) >= '!' && (b) <= '~') || ((b) >= 0xA1 && (b) <= 0xAC) || (b) >= 0xAE)
    if (PRINTS(byte)) return (uint32_t)byte;
    uint32_t before = 0;
    for (int b = 0; b < byte; b++) before += !PRINTS(b);
    return 256 + before;
#undef PRINTS
}

static int find_bytes(const struct vocab *v, struct lg_bpe_files *f)
{
    for (int b = 0; b < 256; b++) {
        char text[4 + sizeof word_end];
        const size_t n = lg_utf8_put(char_of_byte(b), text);
        memcpy(text + n, word_end, sizeof word_end);
        f->byte[b] = id_of(v, text, n);
        f->last[b] = id_of(v, text, n + sizeof word_end - 1);
        if (f->byte[b] < 0 || f->last[b] < 0)
            return LG_FAIL(LG_ERR_CORRUPT,
                           "%s: byte 0x%02X has no token of its own%s: is it the vocabulary of "
                           "another kind of tokenizer?",
                           v->path, b, f->byte[b] < 0 ? "" : " that ends a word (</w>)");
    }
    return 0;
}

/* ---- merges ---- */

static size_t merge_place(const struct lg_bpe_files *f, int32_t left, int32_t right)
{
    uint64_t i = mix((uint64_t)left, (uint64_t)right) & f->merge_mask;
    while (f->merge[i].left >= 0 && (f->merge[i].left != left || f->merge[i].right != right))
        i = (i + 1) & f->merge_mask;
    return i;
}

const struct lg_bpe_merge *lg_bpe_find(const struct lg_bpe_files *f, int32_t left, int32_t right)
{
    const struct lg_bpe_merge *m = &f->merge[merge_place(f, left, right)];
    return m->left < 0 ? NULL : m;
}

static int merge_fail(const char *path, uint32_t line, const char *why)
{
    return LG_FAIL(LG_ERR_CORRUPT, "%s: line %u of the merges %s", path, line, why);
}

/* Line `number` of the file, which says the merge of this rank. */
static int add_merge(const struct vocab *v, struct lg_bpe_files *f, const char *path,
                     uint32_t number, uint32_t rank, const char *line, size_t bytes)
{
    const char *space = memchr(line, ' ', bytes);
    const size_t left = space ? (size_t)(space - line) : 0, right = bytes - left - 1;
    if (!space || bytes > 2 * LG_BPE_TOKEN_BYTES_MAX || memchr(space + 1, ' ', right))
        return merge_fail(path, number, "is not two tokens with a space between");
    char both[2 * LG_BPE_TOKEN_BYTES_MAX];
    memcpy(both, line, left);
    memcpy(both + left, space + 1, right);
    const struct lg_bpe_merge m = {.left = id_of(v, line, left),
                                   .right = id_of(v, space + 1, right),
                                   .whole = id_of(v, both, left + right),
                                   .rank = rank};
    if (m.left < 0 || m.right < 0 || m.whole < 0)
        return merge_fail(path, number,
                          "has a token, or makes one, that the vocabulary does not know: the two "
                          "belong to different tokenizers, or one is damaged");
    struct lg_bpe_merge *to = &f->merge[merge_place(f, m.left, m.right)];
    if (to->left >= 0) return merge_fail(path, number, "repeats an earlier one");
    *to = m;
    return 0;
}

static int parse_merges(const struct vocab *v, struct lg_bpe_files *f, const char *path,
                        const char *data, size_t bytes)
{
    const char *end = data + bytes;
    uint64_t lines = 1, places = 16;
    uint32_t number = 1, rank = 0;
    for (const char *p = data; (p = memchr(p, '\n', (size_t)(end - p))); p++) lines++;
    if (lines > LG_BPE_VOCAB_MAX)
        return LG_FAIL(LG_ERR_CORRUPT, "%s has more than 1,048,576 lines", path);
    while (places < 2 * lines) places *= 2;
    f->merge = malloc(places * sizeof *f->merge);
    if (!f->merge) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", path);
    for (uint64_t i = 0; i < places; i++) f->merge[i].left = -1;
    f->merge_mask = places - 1;
    for (const char *line = data, *stop; line < end; line = stop + 1, number++) {
        stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        size_t n = (size_t)(stop - line);
        if (n && line[n - 1] == '\r') n--;
        if (number == 1 && n >= sizeof header - 1 && !memcmp(line, header, sizeof header - 1))
            continue;
        LG_TRY(add_merge(v, f, path, number, rank++, line, n));
    }
    return 0;
}

static int read_merges(const char *dir, const struct lg_bpe_json *json, const struct vocab *v,
                       struct lg_bpe_files *f)
{
    char path[LG_PATH_BYTES], *data;
    size_t bytes;
    if (json->vocab) {
        LG_TRY(parse_merges(v, f, json->file.path, json->merges, json->merges_bytes));
        return 0;
    }
    LG_TRY(lg_path(path, "%s/merges.txt", dir));
    LG_TRY(lg_read_file(path, LG_BPE_MERGES_BYTES_MAX, &data, &bytes));
    int rc = parse_merges(v, f, path, data, bytes);
    free(data);
    LG_TRY(rc);
    return 0;
}

/* ---- special tokens ---- */

enum { BOS, EOS, UNK, PAD };
static const struct {
    const char *key, *text;
} ROLES[LG_BPE_SPECIALS] = {[BOS] = {"bos_token", "<|startoftext|>"},
                            [EOS] = {"eos_token", "<|endoftext|>"},
                            [UNK] = {"unk_token", "<|endoftext|>"},
                            [PAD] = {"pad_token", "<|endoftext|>"}};

struct role {
    const char *text;
    bool normalized;
};

/* NULL: there is no such file. The caller deletes it. */
static int read_object(const char *dir, const char *name, cJSON **ret)
{
    char path[LG_PATH_BYTES], *data;
    size_t bytes;
    *ret = NULL;
    LG_TRY(lg_path(path, "%s/%s", dir, name));
    if (!lg_path_exists(path)) return 0;
    LG_TRY(lg_read_file(path, SMALL_BYTES_MAX, &data, &bytes));
    int rc = lg_json_tree(path, data, bytes, SMALL_TOKENS_MAX, ret);
    free(data);
    LG_TRY(rc);
    if (!cJSON_IsObject(*ret)) {
        cJSON_Delete(*ret);
        *ret = NULL;
        return LG_FAIL(LG_ERR_CORRUPT, "%s is not a JSON object", path);
    }
    return 0;
}

static bool flag(const cJSON *o, const char *key)
{
    return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, key));
}

/* A token: its text, or an object with its text and how it is looked for. */
static int read_role(const char *dir, const char *file, const char *key, const cJSON *v,
                     struct role *ret)
{
    const cJSON *text = cJSON_IsObject(v) ? cJSON_GetObjectItemCaseSensitive(v, "content") : v;
    if (!text || cJSON_IsNull(v)) return 0;
    if (!cJSON_IsString(text) || !text->valuestring[0])
        return LG_FAIL(LG_ERR_CORRUPT, "%s/%s: \"%s\" is no token", dir, file, key);
    if (flag(v, "lstrip") || flag(v, "rstrip") || flag(v, "single_word"))
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s/%s: \"%s\" is looked for in a way that no CLIP has (lstrip, rstrip, "
                       "single_word)",
                       dir, file, key);
    *ret = (struct role){text->valuestring, flag(v, "normalized")};
    return 0;
}

/* The roles of the tokens that are added, whose entries say how each is looked for; others are not supported. */
static int read_added(const char *dir, const char *file, const char *key, const cJSON *added,
                      struct role role[LG_BPE_SPECIALS])
{
    const cJSON *v;
    cJSON_ArrayForEach(v, added)
    {
        struct role r = {0};
        bool known = false;
        LG_TRY(read_role(dir, file, key, v, &r));
        for (int k = 0; r.text && k < LG_BPE_SPECIALS; k++) {
            if (strcmp(role[k].text, r.text) != 0) continue;
            role[k].normalized = r.normalized;
            known = true;
        }
        if (!known)
            return LG_FAIL(
                LG_ERR_MISMATCH,
                "%s/%s: \"%s\" has \"%.64s\", which is none of the tokens that begin, end or pad a "
                "caption",
                dir, file, key, r.text ? r.text : "");
    }
    return 0;
}

static int add_special(const char *dir, const struct vocab *v, const char *key,
                       const struct role *role, struct lg_bpe_files *f, int32_t *ret)
{
    *ret = id_of(v, role->text, strlen(role->text));
    if (*ret < 0)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s: \"%s\" is \"%.64s\", which the vocabulary does not know", dir, key,
                       role->text);
    for (int i = 0; i < f->n_specials; i++)
        if (f->special[i].id == *ret) return 0;
    char *text = strdup(role->text);
    if (!text) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a tokenizer");
    f->special[f->n_specials++] =
        (struct lg_bpe_special){.text = text, .id = *ret, .normalized = role->normalized};
    return 0;
}

/* in_json: what tokenizer.json says is added, or NULL. */
static int take_specials(const char *dir, const cJSON *config, const cJSON *map,
                         const cJSON *in_json, const struct vocab *v, struct lg_bpe_files *f)
{
    struct role role[LG_BPE_SPECIALS];
    int32_t id[LG_BPE_SPECIALS];
    static const char decoder[] = "added_tokens_decoder";
    const cJSON *added = cJSON_GetObjectItemCaseSensitive(config, decoder);
    for (int k = 0; k < LG_BPE_SPECIALS; k++) {
        const char *key = ROLES[k].key;
        role[k] = (struct role){.text = ROLES[k].text};
        LG_TRY(read_role(dir, "tokenizer_config.json", key,
                         cJSON_GetObjectItemCaseSensitive(config, key), &role[k]));
        if (!added && !in_json)
            LG_TRY(read_role(dir, "special_tokens_map.json", key,
                             cJSON_GetObjectItemCaseSensitive(map, key), &role[k]));
    }
    if (added)
        LG_TRY(read_added(dir, "tokenizer_config.json", decoder, added, role));
    else if (in_json)
        LG_TRY(read_added(dir, "tokenizer.json", "added_tokens", in_json, role));
    for (int k = 0; k < LG_BPE_SPECIALS; k++)
        LG_TRY(add_special(dir, v, ROLES[k].key, &role[k], f, &id[k]));
    f->bos = id[BOS], f->eos = id[EOS], f->pad = id[PAD];
    return 0;
}

static int read_specials(const char *dir, const struct lg_bpe_json *json, const struct vocab *v,
                         struct lg_bpe_files *f)
{
    cJSON *config = NULL, *map = NULL;
    int rc;
    LG_TRY_GOTO(rc, read_object(dir, "tokenizer_config.json", &config), out);
    LG_TRY_GOTO(rc, read_object(dir, "special_tokens_map.json", &map), out);
    LG_TRY_GOTO(rc, take_specials(dir, config, map, json->added, v, f), out);
out:
    cJSON_Delete(config);
    cJSON_Delete(map);
    return rc;
}

/* ---- all ---- */

/* Is it a folder of tokenizer.json alone? */
static int read_json(const char *dir, struct lg_bpe_json *ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/vocab.json", dir));
    if (lg_path_exists(path)) return 0;
    LG_TRY(lg_path(path, "%s/tokenizer.json", dir));
    if (!lg_path_exists(path)) return 0;
    LG_TRY(lg_bpe_json_read(dir, ret));
    return 0;
}

int lg_bpe_files_read(const char *dir, struct lg_bpe_files *ret)
{
    struct vocab v = {0};
    struct lg_bpe_json json = {0};
    int rc;
    LG_TRY_GOTO(rc, read_json(dir, &json), out);
    LG_TRY_GOTO(rc, read_vocab(dir, &json, &v), out);
    LG_TRY_GOTO(rc, find_bytes(&v, ret), out);
    LG_TRY_GOTO(rc, read_merges(dir, &json, &v, ret), out);
    LG_TRY_GOTO(rc, read_specials(dir, &json, &v, ret), out);
    ret->pieces = v.n;
out:
    lg_bpe_json_free(&json);
    free_vocab(&v);
    return rc;
}

void lg_bpe_files_free(struct lg_bpe_files *f)
{
    free(f->merge);
    for (int i = 0; i < f->n_specials; i++) free(f->special[i].text);
    *f = (struct lg_bpe_files){0};
}
