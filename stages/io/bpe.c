/* Byte-level BPE; see bpe.h.
 *
 * Design: text goes through these hands, each of which calls the next: bytes cut at special tokens (encode), characters
 * composed and lower-cased (normalize), words (split), bytes (merge_word), tokens (push). Once there are as many tokens as
 * are wanted, no further word is looked at.
 *
 * A word's symbols are a doubly linked list, its possible merges a heap by (rank, place), as in Hugging Face's tokenizers:
 * an entry whose symbols have changed meanwhile is recognised when it comes out, by the token that they would make. */
#include "stages/io/bpe.h"
#include "base/utf8.h"
#include "stages/io/bpe_files.h"
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum {
    REPLACEMENT = 0xFFFD,
    DOTTED_I = 0x130,
    DOT_ABOVE = 0x307,
    CODES_OF_ONE_MAX = 4,
    CLASSES = 256
};
#define NORMAL_FORM_C (UTF8PROC_STABLE | UTF8PROC_COMPOSE)

struct symbol {
    int32_t id;
    int32_t before, after; /* -1: none. id < 0: it is part of another one now */
};
struct candidate {
    uint32_t rank;
    int32_t at, whole;
};

/* How a special token is looked for: as its bytes, or as characters in normal form and lower case. */
struct special {
    size_t n;
    utf8proc_int32_t *code;
};

struct lg_bpe {
    struct lg_bpe_files files;
    struct special special[LG_BPE_SPECIALS];
    /* of the text at hand; memory is kept */
    utf8proc_int32_t *code, *composed;
    size_t code_room, composed_room;
    char *bytes; /* of a word */
    size_t bytes_room;
    struct symbol *symbol;
    struct candidate *heap;
    size_t symbol_room, heap_room, n_heap;
    int32_t *ids; /* the caller's */
    int n, n_max;
};

/* Memory for `count` elements of *p, of which *room are there. What a caption needs there must be. */
static void grow(void *p, size_t *room, size_t count, size_t bytes)
{
    void *old;
    memcpy(&old, p, sizeof old);
    if (count <= *room) return;
    *room = LG_MAX(2 * *room, LG_MAX(count, (size_t)256));
    old = realloc(old, *room * bytes);
    LG_ASSERT(old);
    memcpy(p, &old, sizeof old);
}

static void push(lg_bpe *t, int32_t id)
{
    if (t->n < t->n_max) t->ids[t->n++] = id;
}

/* ---- a word ---- */

static bool goes_before(struct candidate a, struct candidate b)
{
    return a.rank != b.rank ? a.rank < b.rank : a.at < b.at;
}

static void heap_push(lg_bpe *t, struct candidate c)
{
    grow(&t->heap, &t->heap_room, t->n_heap + 1, sizeof *t->heap);
    size_t i = t->n_heap++;
    for (; i && goes_before(c, t->heap[(i - 1) / 2]); i = (i - 1) / 2)
        t->heap[i] = t->heap[(i - 1) / 2];
    t->heap[i] = c;
}

static struct candidate heap_pop(lg_bpe *t)
{
    const struct candidate first = t->heap[0], c = t->heap[--t->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < t->n_heap; i = child) {
        if (child + 1 < t->n_heap && goes_before(t->heap[child + 1], t->heap[child])) child++;
        if (!goes_before(t->heap[child], c)) break;
        t->heap[i] = t->heap[child];
    }
    t->heap[i] = c;
    return first;
}

/* The merge of symbol `at` with the one behind it; NULL: none. */
static const struct lg_bpe_merge *merge_at(const lg_bpe *t, int32_t at)
{
    const struct symbol *s = &t->symbol[at];
    return s->after < 0 ? NULL : lg_bpe_find(&t->files, s->id, t->symbol[s->after].id);
}

static void consider(lg_bpe *t, int32_t at)
{
    const struct lg_bpe_merge *m = at < 0 ? NULL : merge_at(t, at);
    if (m) heap_push(t, (struct candidate){.rank = m->rank, .at = at, .whole = m->whole});
}

static void merge_word(lg_bpe *t, const char *word, size_t bytes)
{
    const int32_t n = (int32_t)bytes;
    if (n == 0) return;
    grow(&t->symbol, &t->symbol_room, bytes, sizeof *t->symbol);
    for (int32_t i = 0; i < n; i++) {
        const uint8_t byte = (uint8_t)word[i];
        const int32_t id = i + 1 < n ? t->files.byte[byte] : t->files.last[byte];
        t->symbol[i] = (struct symbol){.id = id, .before = i - 1, .after = i + 1 < n ? i + 1 : -1};
    }
    t->n_heap = 0;
    for (int32_t i = 0; i < n; i++) consider(t, i);
    while (t->n_heap) {
        const struct candidate c = heap_pop(t);
        struct symbol *s = &t->symbol[c.at];
        const struct lg_bpe_merge *m = s->id < 0 ? NULL : merge_at(t, c.at);
        if (!m || m->whole != c.whole) continue;
        struct symbol *gone = &t->symbol[s->after];
        s->id = c.whole;
        s->after = gone->after;
        if (s->after >= 0) t->symbol[s->after].before = c.at;
        gone->id = -1;
        consider(t, s->before);
        consider(t, c.at);
    }
    for (int32_t i = 0; i >= 0; i = t->symbol[i].after) push(t, t->symbol[i].id);
}

/* ---- characters ---- */

/* White_Space of Unicode, which is what \s means to the tokenizer's patterns. */
static bool is_space(utf8proc_int32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

static bool is_letter(utf8proc_int32_t c)
{
    const utf8proc_category_t k = utf8proc_category(c);
    return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}

static bool is_digit(utf8proc_int32_t c)
{
    const utf8proc_category_t k = utf8proc_category(c);
    return k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO;
}

static bool is_other(utf8proc_int32_t c)
{
    return !is_space(c) && !is_letter(c) && !is_digit(c);
}

static void put_word(lg_bpe *t, const utf8proc_int32_t *c, size_t n)
{
    size_t bytes = 0;
    grow(&t->bytes, &t->bytes_room, 4 * n, 1);
    for (size_t i = 0; i < n; i++) bytes += lg_utf8_put((uint32_t)c[i], t->bytes + bytes);
    merge_word(t, t->bytes, bytes);
}

/* Whether the characters begin with this text of ASCII. */
static bool begins(const utf8proc_int32_t *c, size_t n, const char *text)
{
    size_t i = 0;
    while (text[i] && i < n && c[i] == text[i]) i++;
    return !text[i];
}

/* Characters of the word that c begins with; 0: it begins with white space. */
static size_t word_length(const utf8proc_int32_t *c, size_t n)
{
    static const char *const contractions[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    size_t i = 0;
    for (size_t k = 0; k < LG_ARRAY_LEN(contractions); k++)
        if (begins(c, n, contractions[k])) return strlen(contractions[k]);
    if (is_digit(*c)) return 1;
    while (i < n && is_letter(c[i])) i++;
    if (i) return i;
    while (i < n && is_other(c[i])) i++;
    return i;
}

/* Characters of what the pattern takes whole although it is of several words: the special tokens' usual names, where they
 * are no special tokens (in capitals). 0: c does not begin so. */
static size_t name_length(const utf8proc_int32_t *c, size_t n)
{
    static const char *const names[] = {"<|startoftext|>", "<|endoftext|>"};
    for (size_t k = 0; k < LG_ARRAY_LEN(names); k++)
        if (begins(c, n, names[k])) return strlen(names[k]);
    return 0;
}

static void split(lg_bpe *t, const utf8proc_int32_t *c, size_t n)
{
    while (n && t->n < t->n_max) {
        const size_t name = name_length(c, n), length = name ? name : word_length(c, n);
        if (name) {
            put_word(t, c, 2);
            put_word(t, c + 2, name - 4);
            put_word(t, c + name - 2, 2);
        } else {
            put_word(t, c, length);
        }
        c += LG_MAX(length, (size_t)1);
        n -= LG_MAX(length, (size_t)1);
    }
}

/* ---- normal form ---- */

static int class_of(utf8proc_int32_t c)
{
    return utf8proc_get_property(c)->combining_class;
}

/* Sorts marks by their class, equal ones in their order, by counting: a text may consist of nothing else. */
static void order_marks(lg_bpe *t, utf8proc_int32_t *c, size_t n)
{
    size_t at[CLASSES + 1] = {0};
    bool ordered = true;
    for (size_t i = 1; i < n; i++) ordered = ordered && class_of(c[i - 1]) <= class_of(c[i]);
    if (ordered) return;
    grow(&t->code, &t->code_room, n, sizeof *c);
    for (size_t i = 0; i < n; i++) at[class_of(c[i]) + 1]++;
    for (int k = 1; k < CLASSES; k++) at[k] += at[k - 1];
    for (size_t i = 0; i < n; i++) t->code[at[class_of(c[i])]++] = c[i];
    memcpy(c, t->code, n * sizeof *c);
}

/* The bytes, in normal form C and lower case, as t->composed; returns how many characters. */
static size_t normalize(lg_bpe *t, const char *text, size_t bytes)
{
    size_t n = 0, marks = 0;
    /* One more: there is an array for no text, too. */
    grow(&t->composed, &t->composed_room, 2 * CODES_OF_ONE_MAX * bytes + 1, sizeof *t->composed);
    utf8proc_int32_t *c = t->composed;
    for (size_t at = 0, step; at < bytes; at += step) {
        uint32_t code = REPLACEMENT;
        step = LG_MAX(lg_utf8_next(text + at, bytes - at, &code), (size_t)1);
        utf8proc_ssize_t made = utf8proc_decompose_char((utf8proc_int32_t)code, c + n,
                                                        CODES_OF_ONE_MAX, NORMAL_FORM_C, NULL);
        LG_ASSERT(made >= 1 && made <= CODES_OF_ONE_MAX);
        n += (size_t)made;
    }
    for (size_t i = 0; i <= n; i++) {
        if (i < n && class_of(c[i]) > 0) continue;
        order_marks(t, c + marks, i - marks);
        marks = i + 1;
    }
    const utf8proc_ssize_t left = utf8proc_normalize_utf32(c, (utf8proc_ssize_t)n, NORMAL_FORM_C);
    LG_ASSERT(left >= 0);
    n = (size_t)left;
    size_t more = 0;
    for (size_t i = 0; i < n; i++) more += c[i] == DOTTED_I;
    const size_t lower = n + more;
    for (size_t i = n; i-- > 0;) { /* backwards, since the dotted I becomes two: i and its dot */
        if (c[i] == DOTTED_I) c[i + more--] = DOT_ABOVE;
        c[i + more] = utf8proc_tolower(c[i]);
    }
    return lower;
}

/* ---- a caption ---- */

/* What stands at `at` in a text of `n`: the longest special token there, or NULL. */
static const struct special *special_at(const lg_bpe *t, bool normalized, const void *at, size_t n)
{
    const struct special *found = NULL;
    for (const struct special *s = t->special; s < t->special + t->files.n_specials; s++) {
        const struct lg_bpe_special *f = &t->files.special[s - t->special];
        if (f->normalized != normalized || s->n > n || s->n == 0 || (found && found->n >= s->n))
            continue;
        if (!memcmp(at, normalized ? (const void *)s->code : f->text,
                    s->n * (normalized ? sizeof *s->code : 1)))
            found = s;
    }
    return found;
}

static void push_special(lg_bpe *t, const struct special *s)
{
    push(t, t->files.special[s - t->special].id);
}

/* Text in which no special token is that is looked for as it is. */
static void encode_text(lg_bpe *t, const char *text, size_t bytes)
{
    const size_t n = normalize(t, text, bytes);
    size_t from = 0;
    for (size_t i = 0; i < n && t->n < t->n_max;) {
        const struct special *s = special_at(t, true, t->composed + i, n - i);
        i += s ? 0 : 1;
        if (!s) continue;
        split(t, t->composed + from, i - from);
        push_special(t, s);
        from = i += s->n;
    }
    split(t, t->composed + from, n - from);
}

void lg_bpe_encode(lg_bpe *t, const char *text, int length, int32_t *ret_ids, int *ret_length)
{
    const size_t bytes = strlen(text);
    size_t from = 0;
    LG_ASSERT(length >= 2 && bytes < INT32_MAX / 16);
    t->ids = ret_ids + 1;
    t->n = 0;
    t->n_max = length - 2;
    for (size_t at = 0; at < bytes && t->n < t->n_max;) {
        const struct special *s = special_at(t, false, text + at, bytes - at);
        at += s ? 0 : 1;
        if (!s) continue;
        encode_text(t, text + from, at - from);
        push_special(t, s);
        from = at += s->n;
    }
    if (t->n < t->n_max) encode_text(t, text + from, bytes - from);
    ret_ids[0] = t->files.bos;
    ret_ids[t->n + 1] = t->files.eos;
    for (int i = t->n + 2; i < length; i++) ret_ids[i] = t->files.pad;
    *ret_length = t->n + 2;
}

/* ---- the tokenizer ---- */

int lg_bpe_open(const char *dir, lg_bpe **ret)
{
    lg_bpe *t = calloc(1, sizeof *t);
    if (!t) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a tokenizer");
    int rc = lg_bpe_files_read(dir, &t->files);
    if (rc < 0) {
        lg_bpe_close(&t);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    for (int i = 0; i < t->files.n_specials; i++) {
        const struct lg_bpe_special *f = &t->files.special[i];
        struct special *s = &t->special[i];
        s->n = strlen(f->text);
        if (!f->normalized) continue;
        s->n = normalize(t, f->text, s->n);
        s->code = malloc((s->n + 1) * sizeof *s->code);
        LG_ASSERT(s->code);
        memcpy(s->code, t->composed, s->n * sizeof *s->code);
    }
    *ret = t;
    return 0;
}

void lg_bpe_close(lg_bpe **t)
{
    if (!*t) return;
    for (int i = 0; i < LG_BPE_SPECIALS; i++) free((*t)->special[i].code);
    lg_bpe_files_free(&(*t)->files);
    free((*t)->code);
    free((*t)->composed);
    free((*t)->bytes);
    free((*t)->symbol);
    free((*t)->heap);
    free(*t);
    *t = NULL;
}

int lg_bpe_pieces(const lg_bpe *t)
{
    return t->files.pieces;
}

int lg_bpe_bos(const lg_bpe *t)
{
    return t->files.bos;
}

int lg_bpe_eos(const lg_bpe *t)
{
    return t->files.eos;
}

int lg_bpe_pad(const lg_bpe *t)
{
    return t->files.pad;
}
