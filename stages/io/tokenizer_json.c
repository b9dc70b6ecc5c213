/* See tokenizer_json.h. */
#include "stages/io/tokenizer_json.h"
#include "base/json_tree.h"
#include <stdlib.h>

enum { JSON_TOKENS_MAX = 8 << 20, ADDED_TOKENS_MAX = 1 << 18 };

/* After a KEY: passes over its value. */
static int take_value(lg_json *j, struct lg_json_value *ret)
{
    if (ret->found) return lg_json_fail(j, "this key stands there twice");
    *ret = (struct lg_json_value){.found = true, .before = *j};
    lg_json first = *j;
    LG_TRY(lg_json_next(&first));
    const bool is_open = first.kind == LG_JSON_OBJECT || first.kind == LG_JSON_ARRAY;
    LG_TRY(lg_json_skip(j));
    if (!is_open) return 0;
    ret->text = lg_json_end(&first) - 1;
    ret->bytes = (size_t)(lg_json_end(j) - ret->text);
    return 0;
}

static int take_own(lg_json *j, struct lg_tokenizer_json *x)
{
#define X(key)                                                                                     \
    if (lg_json_is(j, #key)) return take_value(j, &x->key);
    LG_TOKENIZER_JSON_OWN(X)
#undef X
    return lg_json_skip(j);
}

static int take_of_model(lg_json *j, struct lg_tokenizer_json *x)
{
#define X(key)                                                                                     \
    if (lg_json_is(j, #key)) return take_value(j, &x->key);
    LG_TOKENIZER_JSON_MODEL(X)
#undef X
    return lg_json_skip(j);
}

static int find(lg_json *j, struct lg_tokenizer_json *x)
{
    bool has_model = false;
    LG_TRY(lg_json_expect(j, LG_JSON_OBJECT, "this is not a JSON object"));
    for (;;) {
        LG_TRY(lg_json_next(j));
        if (j->kind == LG_JSON_OBJECT_END) return lg_json_next(j); /* nothing comes behind */
        if (!lg_json_is(j, "model")) {
            LG_TRY(take_own(j, x));
            continue;
        }
        if (has_model) return lg_json_fail(j, "\"model\" stands there twice");
        has_model = true;
        LG_TRY(lg_json_expect(j, LG_JSON_OBJECT, "\"model\" is no object"));
        for (;;) {
            LG_TRY(lg_json_next(j));
            if (j->kind == LG_JSON_OBJECT_END) break;
            LG_TRY(take_of_model(j, x));
        }
    }
}

int lg_tokenizer_json_read(const char *path, struct lg_tokenizer_json *ret)
{
    lg_json j;
    LG_TRY(lg_path(ret->path, "%s", path));
    LG_TRY(lg_read_file(path, LG_TOKENIZER_JSON_BYTES_MAX, &ret->data, &ret->bytes));
    lg_json_open(&j, &(struct lg_json_source){.label = ret->path,
                                              .data = ret->data,
                                              .bytes = ret->bytes,
                                              .tokens_max = JSON_TOKENS_MAX});
    LG_TRY(find(&j, ret));
    return 0;
}

void lg_tokenizer_json_free(struct lg_tokenizer_json *x)
{
    free(x->data);
    *x = (struct lg_tokenizer_json){0};
}

bool lg_json_value_is(const struct lg_json_value *v, const char *text)
{
    lg_json j = v->before;
    return v->found && lg_json_next(&j) == 0 && j.kind == LG_JSON_STRING && lg_json_is(&j, text);
}

int lg_tokenizer_json_is_bpe(const char *path, bool *ret)
{
    struct lg_tokenizer_json x = {0};
    int rc = lg_tokenizer_json_read(path, &x);
    *ret = rc == 0 && lg_json_value_is(&x.type, "BPE");
    lg_tokenizer_json_free(&x);
    return rc;
}

int lg_tokenizer_json_added(const struct lg_tokenizer_json *x, cJSON **ret)
{
    *ret = NULL;
    if (x->added_tokens.bytes)
        LG_TRY(lg_json_tree(x->path, x->added_tokens.text, x->added_tokens.bytes, ADDED_TOKENS_MAX,
                            ret));
    return 0;
}
