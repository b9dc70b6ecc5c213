/* See spiece_json.h.
 *
 * Of what transformers adds to a T5's pieces, <extra_id_0> and on, no caption has any: they are left out, as they are in
 * spiece.model. */
#include "stages/io/spiece_json.h"
#include "stages/io/spiece.h"
#include "stages/io/tokenizer_check.h"
#include "stages/io/tokenizer_json.h"
#include <stdlib.h>
#include <string.h>

enum { VARINT = 0, LENGTH = 2, FIXED32 = 5 }; /* types of fields */
enum { PIECE = 1, TRAINER = 2, NORMALIZER = 3 };
enum { PIECE_TEXT = 1, PIECE_SCORE = 2, PIECE_TYPE = 3 };
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN = 2, TYPE_CONTROL = 3 };
enum { MODEL_TYPE = 3, MODEL_UNIGRAM = 1, UNK_ID = 40, BOS_ID = 41, EOS_ID = 42, PAD_ID = 43 };
enum { CHARSMAP = 2 };
enum { PIECE_BYTES_MORE = 32 /* of a piece beside its text */, TRAINER_BYTES = 32, UNK = 2 };

/* ---- a message ---- */

struct message {
    char *at;
    size_t bytes;
};

static void put_varint(struct message *m, uint64_t v)
{
    for (; v >= 0x80; v >>= 7) m->at[m->bytes++] = (char)(v | 0x80);
    m->at[m->bytes++] = (char)v;
}
static void put_number(struct message *m, int field, uint64_t v)
{
    put_varint(m, (uint64_t)field << 3 | VARINT);
    put_varint(m, v);
}
static void put_bytes(struct message *m, int field, const char *data, size_t bytes)
{
    put_varint(m, (uint64_t)field << 3 | LENGTH);
    put_varint(m, bytes);
    memcpy(m->at + m->bytes, data, bytes);
    m->bytes += bytes;
}

/* ---- pieces ---- */

static void put_piece(struct message *m, const char *text, size_t bytes, float score, int type)
{
    char room[LG_PIECE_BYTES_MAX + PIECE_BYTES_MORE];
    struct message p = {.at = room};
    put_bytes(&p, PIECE_TEXT, text, bytes);
    put_varint(&p, PIECE_SCORE << 3 | FIXED32);
    memcpy(p.at + p.bytes, &score, sizeof score); /* little-endian */
    p.bytes += sizeof score;
    put_number(&p, PIECE_TYPE, (uint64_t)type);
    put_bytes(m, PIECE, p.at, p.bytes);
}

static bool is_added(const cJSON *added, const char *text)
{
    const cJSON *v;
    cJSON_ArrayForEach(v, added)
    {
        const char *content = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(v, "content"));
        if (content && !strcmp(content, text)) return true;
    }
    return false;
}

static int take_score(const lg_json *j, float *ret)
{
    char digits[64];
    if (j->kind != LG_JSON_NUMBER || j->bytes >= sizeof digits)
        return lg_json_fail(j, "a piece's score is no number");
    memcpy(digits, j->text, j->bytes);
    digits[j->bytes] = 0;
    *ret = (float)strtod(digits, NULL);
    return 0;
}

/* The piece of this number. *has_added: one before was left out. */
static int take_piece(const struct lg_tokenizer_json *f, lg_json *j, int number, const cJSON *added,
                      bool *has_added, struct message *m)
{
    static const char *const FIRST[] = {
        [LG_SPIECE_PAD] = "<pad>", [LG_SPIECE_EOS] = "</s>", [UNK] = "<unk>"};
    char text[LG_PIECE_BYTES_MAX + 1];
    float score = 0;
    if (j->kind != LG_JSON_ARRAY) return lg_json_fail(j, "a piece is no list of text and score");
    LG_TRY(lg_json_expect(j, LG_JSON_STRING, "a piece is no list of text and score"));
    if (j->bytes > LG_PIECE_BYTES_MAX) return lg_json_fail(j, "a piece of more than 1024 bytes");
    const size_t bytes = lg_json_text(j, text);
    LG_TRY(lg_json_next(j));
    LG_TRY(take_score(j, &score));
    LG_TRY(lg_json_expect(j, LG_JSON_ARRAY_END, "a piece is no list of text and score"));
    const bool is_first = number < (int)LG_ARRAY_LEN(FIRST);
    if (is_first && strcmp(text, FIRST[number]) != 0)
        return LG_FAIL(
            LG_ERR_MISMATCH,
            "%s: its piece %d is \"%.64s\", which in a T5's is %s: it belongs to another "
            "kind of model",
            f->path, number, text, FIRST[number]);
    if (!is_first && is_added(added, text)) {
        *has_added = true;
        return 0;
    }
    if (*has_added) /* its number would become another */
        return LG_FAIL(LG_ERR_MISMATCH, "%s: its piece %d, \"%.64s\", stands behind added tokens",
                       f->path, number, text);
    put_piece(m, text, bytes, score,
              !is_first       ? TYPE_NORMAL
              : number == UNK ? TYPE_UNKNOWN
                              : TYPE_CONTROL);
    return 0;
}

static int take_pieces(const struct lg_tokenizer_json *f, const cJSON *added, struct message *m)
{
    lg_json j = f->vocab.before;
    bool has_added = false;
    LG_TRY(lg_json_expect(&j, LG_JSON_ARRAY, "\"vocab\" is no list"));
    for (int n = 0;; n++) {
        LG_TRY(lg_json_next(&j));
        if (j.kind == LG_JSON_ARRAY_END) return 0;
        if (n == LG_PIECES_MAX) return lg_json_fail(&j, "more than 1,048,576 pieces");
        LG_TRY(take_piece(f, &j, n, added, &has_added, m));
    }
}

/* ---- what else it says ---- */

/* What is added must be what every T5 has. */
static int check_added(const struct lg_tokenizer_json *f, const cJSON *added)
{
    static const char extra[] = "<extra_id_";
    const cJSON *v;
    cJSON_ArrayForEach(v, added)
    {
        const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(v, "content"));
        if (!text || (strcmp(text, "<pad>") && strcmp(text, "</s>") && strcmp(text, "<unk>") &&
                      strncmp(text, extra, sizeof extra - 1)))
            return LG_FAIL(
                LG_ERR_MISMATCH,
                "%s: \"added_tokens\" has \"%.64s\", which no T5 has: it is not supported", f->path,
                text ? text : "");
    }
    return 0;
}

/* Every "type" within must be one of these. *ret_map: where the table of characters is, or NULL. */
static int check_types(const struct lg_tokenizer_json *f, const struct lg_json_value *v,
                       const char *const *known, lg_json *ret_map)
{
    lg_json j = v->before;
    if (!v->bytes) return 0;
    LG_TRY(lg_json_next(&j));
    for (const int depth = j.depth; j.depth >= depth;) {
        const bool is_type = j.kind == LG_JSON_KEY && lg_json_is(&j, "type");
        const bool is_map = j.kind == LG_JSON_KEY && lg_json_is(&j, "precompiled_charsmap");
        LG_TRY(lg_json_next(&j));
        if (is_map && ret_map) *ret_map = j;
        const char *const *k = known;
        while (is_type && *k && !(j.kind == LG_JSON_STRING && lg_json_is(&j, *k))) k++;
        if (is_type && !*k)
            return LG_FAIL(LG_ERR_MISMATCH,
                           "%s: it treats texts as no T5's does (\"%.*s\"): it belongs to another "
                           "kind of model",
                           f->path, (int)LG_MIN(j.bytes, (size_t)64), j.text ? j.text : "");
    }
    return 0;
}

/* ret has room for the text. False: it is no base64 (RFC 4648). */
static bool decode_base64(const char *text, size_t n, char *ret, size_t *ret_bytes)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t bits = 0;
    int have = 0;
    *ret_bytes = 0;
    while (n && text[n - 1] == '=') n--;
    for (size_t i = 0; i < n; i++) {
        const char *d = text[i] ? strchr(digits, text[i]) : NULL;
        if (!d) return false;
        bits = bits << 6 | (uint32_t)(d - digits);
        have += 6;
        if (have < 8) continue;
        have -= 8;
        ret[(*ret_bytes)++] = (char)(bits >> have);
    }
    return true;
}

static int put_rest(const struct lg_tokenizer_json *f, struct message *m)
{
    static const char *const NORMAL[] = {"Sequence", "Precompiled", "Replace", NULL},
                             *const SPLIT[] = {"Sequence", "WhitespaceSplit", "Metaspace", NULL};
    lg_json map = {0};
    LG_TRY(check_types(f, &f->normalizer, NORMAL, &map));
    LG_TRY(check_types(f, &f->pre_tokenizer, SPLIT, NULL));
    char room[TRAINER_BYTES], *text = malloc(2 * map.bytes + 16);
    struct message t = {.at = room};
    put_number(&t, MODEL_TYPE, MODEL_UNIGRAM);
    put_number(&t, UNK_ID, UNK);
    put_number(&t, BOS_ID, UINT64_MAX); /* -1: none */
    put_number(&t, EOS_ID, LG_SPIECE_EOS);
    put_number(&t, PAD_ID, LG_SPIECE_PAD);
    put_bytes(m, TRAINER, t.at, t.bytes);
    if (!text) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", f->path);
    struct message n = {.at = text + map.bytes + 1};
    size_t bytes = 0;
    if (map.kind == LG_JSON_STRING &&
        !decode_base64(text, lg_json_text(&map, text), text, &bytes)) {
        free(text);
        return lg_json_fail(&map, "its character table is no base64");
    }
    if (bytes) put_bytes(&n, CHARSMAP, text, bytes);
    put_bytes(m, NORMALIZER, n.at, n.bytes);
    free(text);
    return 0;
}

static int make(const struct lg_tokenizer_json *f, struct message *m)
{
    cJSON *added = NULL;
    lg_json fallback = f->byte_fallback.before;
    const bool has_bytes =
        f->byte_fallback.found && lg_json_next(&fallback) == 0 && fallback.kind == LG_JSON_TRUE;
    if (!lg_json_value_is(&f->type, "Unigram") || !f->vocab.bytes || has_bytes)
        return LG_FAIL(
            LG_ERR_MISMATCH,
            "%s: its model is not the Unigram of a T5: it belongs to another kind of text "
            "encoder",
            f->path);
    /* A piece has eight bytes or more in the file beside its text. */
    m->at = malloc(4 * f->bytes + TRAINER_BYTES);
    if (!m->at) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", f->path);
    LG_TRY(lg_tokenizer_json_added(f, &added));
    int rc = check_added(f, added);
    if (rc == 0) rc = take_pieces(f, added, m);
    if (rc == 0) rc = put_rest(f, m);
    cJSON_Delete(added);
    LG_TRY(rc);
    return 0;
}

int lg_spiece_json_read(const char *path, char **ret, size_t *ret_bytes)
{
    struct lg_tokenizer_json f = {0};
    struct message m = {0};
    int rc;
    LG_TRY_GOTO(rc, lg_tokenizer_json_read(path, &f), out);
    LG_TRY_GOTO(rc, make(&f, &m), out);
    *ret = m.at;
    *ret_bytes = m.bytes;
    m.at = NULL;
out:
    free(m.at);
    lg_tokenizer_json_free(&f);
    return rc;
}
