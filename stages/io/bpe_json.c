/* See bpe_json.h. */
#include "stages/io/bpe_json.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/json_tree.h"
#include "stages/io/bpe.h"
#include <stdlib.h>
#include <string.h>

enum { ADDED_TOKENS_MAX = 1 << 18 /* of JSON */ };

/* A value of the file: the reader before its first token, and its text. */
struct value {
    bool found;
    lg_json before;
    const char *text;
    size_t bytes;
};

/* After a KEY: passes over its value. */
static int take_value(lg_json *j, struct value *ret)
{
    if (ret->found) return lg_json_fail(j, "this key stands there twice");
    *ret = (struct value){.found = true, .before = *j};
    lg_json first = *j;
    LG_TRY(lg_json_next(&first));
    const bool is_open = first.kind == LG_JSON_OBJECT || first.kind == LG_JSON_ARRAY;
    LG_TRY(lg_json_skip(j));
    if (!is_open) return 0;
    ret->text = lg_json_end(&first) - 1;
    ret->bytes = (size_t)(lg_json_end(j) - ret->text);
    return 0;
}

enum { TYPE, SUFFIX, VOCAB, MERGES, KEYS };
static const char *const MODEL_KEYS[KEYS] = {
    [TYPE] = "type", [SUFFIX] = "end_of_word_suffix", [VOCAB] = "vocab", [MERGES] = "merges"};

static int find_in_model(lg_json *j, struct value model[KEYS])
{
    LG_TRY(lg_json_expect(j, LG_JSON_OBJECT, "\"model\" is no object"));
    for (;;) {
        LG_TRY(lg_json_next(j));
        if (j->kind == LG_JSON_OBJECT_END) return 0;
        int k = 0;
        while (k < KEYS && !lg_json_is(j, MODEL_KEYS[k])) k++;
        if (k < KEYS)
            LG_TRY(take_value(j, &model[k]));
        else
            LG_TRY(lg_json_skip(j));
    }
}

static int find(lg_json *j, struct value model[KEYS], struct value *added)
{
    bool has_model = false;
    LG_TRY(lg_json_expect(j, LG_JSON_OBJECT, "this is not a JSON object"));
    for (;;) {
        LG_TRY(lg_json_next(j));
        if (j->kind == LG_JSON_OBJECT_END) break;
        if (lg_json_is(j, "model")) {
            if (has_model) return lg_json_fail(j, "\"model\" stands there twice");
            has_model = true;
            LG_TRY(find_in_model(j, model));
        } else if (lg_json_is(j, "added_tokens")) {
            LG_TRY(take_value(j, added));
        } else {
            LG_TRY(lg_json_skip(j));
        }
    }
    LG_TRY(lg_json_next(j)); /* nothing comes behind */
    return 0;
}

static bool is_string(const struct value *v, const char *text)
{
    lg_json j = v->before;
    return v->found && lg_json_next(&j) == 0 && j.kind == LG_JSON_STRING && lg_json_is(&j, text);
}

static int put(struct lg_bpe_json *x, const lg_json *token, char behind)
{
    if (token->kind != LG_JSON_STRING) return lg_json_fail(token, "a merge is not two tokens");
    /* Never longer than in the file, where each has two quotes. */
    x->merges_bytes += lg_json_text(token, x->merges + x->merges_bytes);
    x->merges[x->merges_bytes++] = behind;
    return 0;
}

/* "a b" each, or ["a", "b"] each. */
static int take_merges(struct lg_bpe_json *x, const struct value *v)
{
    lg_json j = v->before;
    x->merges = malloc(v->bytes + 1);
    if (!x->merges) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", x->path);
    LG_TRY(lg_json_expect(&j, LG_JSON_ARRAY, "\"merges\" is no list"));
    for (;;) {
        LG_TRY(lg_json_next(&j));
        if (j.kind == LG_JSON_ARRAY_END) return 0;
        if (j.kind != LG_JSON_ARRAY) {
            LG_TRY(put(x, &j, '\n'));
            continue;
        }
        for (int i = 0; i < 2; i++) {
            LG_TRY(lg_json_next(&j));
            LG_TRY(put(x, &j, i ? '\n' : ' '));
        }
        LG_TRY(lg_json_expect(&j, LG_JSON_ARRAY_END, "a merge is not two tokens"));
    }
}

static int read_all(struct lg_bpe_json *x, size_t bytes)
{
    lg_json j;
    struct value model[KEYS] = {0}, added = {0};
    lg_json_open(&j, &(struct lg_json_source){.label = x->path,
                                              .data = x->data,
                                              .bytes = bytes,
                                              .tokens_max = 8 * (uint64_t)LG_BPE_VOCAB_MAX});
    LG_TRY(find(&j, model, &added));
    if (!is_string(&model[TYPE], "BPE") || !is_string(&model[SUFFIX], "</w>"))
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s: its model is not the BPE of a CLIP (\"type\": \"BPE\", "
                       "\"end_of_word_suffix\": \"</w>\"); the tokenizer of a T5 is read from "
                       "spiece.model: fetch it",
                       x->path);
    if (!model[VOCAB].bytes || !model[MERGES].bytes)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: its model has no \"%s\"", x->path,
                       model[VOCAB].bytes ? "merges" : "vocab");
    x->vocab = model[VOCAB].text;
    x->vocab_bytes = model[VOCAB].bytes;
    x->vocab_at = (size_t)(x->vocab - x->data);
    LG_TRY(take_merges(x, &model[MERGES]));
    if (added.bytes)
        LG_TRY(lg_json_tree(x->path, added.text, added.bytes, ADDED_TOKENS_MAX, &x->added));
    return 0;
}

int lg_bpe_json_read(const char *dir, struct lg_bpe_json *ret)
{
    size_t bytes;
    LG_TRY(lg_path(ret->path, "%s/tokenizer.json", dir));
    LG_TRY(lg_read_file(ret->path, LG_BPE_VOCAB_BYTES_MAX, &ret->data, &bytes));
    LG_TRY(read_all(ret, bytes));
    return 0;
}

void lg_bpe_json_free(struct lg_bpe_json *x)
{
    cJSON_Delete(x->added);
    free(x->merges);
    free(x->data);
    *x = (struct lg_bpe_json){0};
}
