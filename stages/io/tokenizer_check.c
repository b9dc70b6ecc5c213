/* The fields of a sentencepiece model that decide whether the library survives it; see
 * tokenizer_check.h. Field numbers are those of sentencepiece_model.proto.
 *
 * A message is a row of fields: number and type in a varint, then a varint, 4 or 8 bytes, or a length
 * and as many bytes. A field may stand there several times, of which the library takes the last, or
 * of messages a mixture: so each one must be good by itself. What has another type than it should is
 * an unknown field to the library, and skipped here too. */
#include "stages/io/tokenizer_check.h"
#include "base/utf8.h"
#include "stages/io/charsmap.h"
#include <stdlib.h>
#include <string.h>

enum { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 }; /* types */
enum {
    PIECES = 1,
    TRAINER = 2,
    NORMALIZER = 3,
    SELF_TEST = 4,
    DENORMALIZER = 5
}; /* of the model */
enum { PIECE_TEXT = 1, PIECE_TYPE = 3, TYPE_USER_DEFINED = 4 };
enum { TRAINER_MODEL_TYPE = 3, MODEL_UNIGRAM = 1 };
enum { NORMALIZER_CHARSMAP = 2 };

struct text {
    const uint8_t *at;
    size_t bytes;
};

struct field {
    uint64_t number;
    int type;
    uint64_t value;   /* of a varint */
    struct text text; /* of LENGTH */
};

struct model {
    const char *path;
    struct text *user; /* user-defined pieces */
    size_t n_user, user_capacity, n_pieces;
};

static bool take_varint(struct text *t, uint64_t *ret)
{
    *ret = 0;
    for (int shift = 0; shift < 64 && t->bytes; shift += 7) {
        uint8_t b = *t->at;
        t->at++;
        t->bytes--;
        *ret |= (uint64_t)(b & 0x7F) << shift;
        if (b < 0x80) return true;
    }
    return false;
}

/* Takes a field from the front of *t. False: there is none, or it is cut off or of an unknown type. */
static bool take_field(struct text *t, struct field *ret)
{
    uint64_t key, bytes = 0;
    *ret = (struct field){0};
    if (!take_varint(t, &key) || key >> 3 == 0) return false;
    ret->number = key >> 3;
    ret->type = (int)(key & 7);
    switch (ret->type) {
    case VARINT:
        return take_varint(t, &ret->value);
    case FIXED64:
        bytes = 8;
        break;
    case FIXED32:
        bytes = 4;
        break;
    case LENGTH:
        if (!take_varint(t, &bytes)) return false;
        break;
    default:
        return false;
    }
    if (bytes > t->bytes) return false;
    ret->text = (struct text){t->at, (size_t)bytes};
    t->at += bytes;
    t->bytes -= (size_t)bytes;
    return true;
}

static int damaged(const struct model *m, const char *what)
{
    return LG_FAIL(LG_ERR_CORRUPT,
                   "%s: %s: no sentencepiece model, or damaged; copy or download it again", m->path,
                   what);
}

static int add_user_defined(struct model *m, struct text piece)
{
    if (m->n_user == m->user_capacity) {
        size_t capacity = LG_MAX(2 * m->user_capacity, (size_t)64);
        struct text *p = realloc(m->user, capacity * sizeof *p);
        if (!p) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", m->path);
        m->user = p;
        m->user_capacity = capacity;
    }
    m->user[m->n_user++] = piece;
    return 0;
}

static int check_piece(struct model *m, struct text t)
{
    struct field f;
    struct text piece = {0};
    bool user_defined = false;
    if (++m->n_pieces > LG_PIECES_MAX) return damaged(m, "more than 1,048,576 pieces");
    while (t.bytes) {
        if (!take_field(&t, &f)) return damaged(m, "a piece is cut off");
        if (f.number == PIECE_TYPE && f.type == VARINT)
            user_defined |= f.value == TYPE_USER_DEFINED;
        if (f.number != PIECE_TEXT || f.type != LENGTH) continue;
        piece = f.text;
        if (piece.bytes > LG_PIECE_BYTES_MAX) return damaged(m, "a piece of more than 1024 bytes");
        if (memchr(piece.at, 0, piece.bytes) || !lg_utf8_valid((const char *)piece.at, piece.bytes))
            return damaged(m, "a piece is no UTF-8 text");
    }
    if (piece.bytes == 0) return damaged(m, "an empty piece");
    if (user_defined) LG_TRY(add_user_defined(m, piece));
    return 0;
}

static int check_trainer(const struct model *m, struct text t)
{
    struct field f;
    while (t.bytes) {
        if (!take_field(&t, &f)) return damaged(m, "its trainer_spec is cut off");
        if (f.number == TRAINER_MODEL_TYPE && f.type == VARINT && f.value != MODEL_UNIGRAM)
            return LG_FAIL(
                LG_ERR_MISMATCH,
                "%s: a sentencepiece model of type %llu; T5's is 1 (unigram): it belongs "
                "to another kind of model",
                m->path, (unsigned long long)f.value);
    }
    return 0;
}

static int check_normalizer(const struct model *m, struct text t)
{
    struct field f;
    while (t.bytes) {
        if (!take_field(&t, &f)) return damaged(m, "its normalizer_spec is cut off");
        if (f.number != NORMALIZER_CHARSMAP || f.type != LENGTH || f.text.bytes == 0) continue;
        const char *wrong = lg_charsmap_check(f.text.at, f.text.bytes);
        if (wrong)
            return LG_FAIL(
                LG_ERR_CORRUPT,
                "%s: its character table (precompiled_charsmap) %s: the file is damaged; "
                "copy or download it again",
                m->path, wrong);
    }
    return 0;
}

static int by_bytes(const void *a, const void *b)
{
    const struct text *x = a, *y = b;
    int d = memcmp(x->at, y->at, LG_MIN(x->bytes, y->bytes));
    return d ? d : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* In order, what begins a piece stands before it, with nothing between them but what it begins. */
static int check_nesting(const struct model *m)
{
    const struct text *open[LG_PIECES_NESTED_MAX];
    int depth = 0;
    if (m->n_user) qsort(m->user, m->n_user, sizeof *m->user, by_bytes);
    for (size_t i = 0; i < m->n_user; i++) {
        const struct text *p = &m->user[i];
        while (depth && (open[depth - 1]->bytes > p->bytes ||
                         memcmp(open[depth - 1]->at, p->at, open[depth - 1]->bytes) != 0))
            depth--;
        if (depth == LG_PIECES_NESTED_MAX)
            return damaged(m, "more than 32 user-defined pieces begin one another");
        open[depth++] = p;
    }
    return 0;
}

static int check_model(struct model *m, struct text t)
{
    struct field f;
    while (t.bytes) {
        if (!take_field(&t, &f)) return damaged(m, "it is cut off");
        if (f.type != LENGTH) continue;
        if (f.number == PIECES) LG_TRY(check_piece(m, f.text));
        if (f.number == TRAINER) LG_TRY(check_trainer(m, f.text));
        if (f.number == NORMALIZER || f.number == DENORMALIZER) LG_TRY(check_normalizer(m, f.text));
        if (f.number == SELF_TEST && f.text.bytes > LG_SELF_TEST_BYTES_MAX)
            return damaged(m, "a self-test of more than 64 KiB");
    }
    if (m->n_pieces == 0) return damaged(m, "no pieces in it");
    LG_TRY(check_nesting(m));
    return 0;
}

int lg_tokenizer_check(const char *path, const void *data, size_t bytes)
{
    struct model m = {.path = path};
    int rc = check_model(&m, (struct text){data, bytes});
    free(m.user);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
