/* See bpe_json.h. */
#include "stages/io/bpe_json.h"
#include <stdlib.h>

static int put(struct lg_bpe_json *x, const lg_json *token, char behind)
{
    if (token->kind != LG_JSON_STRING) return lg_json_fail(token, "a merge is not two tokens");
    /* Never longer than in the file, where each has two quotes. */
    x->merges_bytes += lg_json_text(token, x->merges + x->merges_bytes);
    x->merges[x->merges_bytes++] = behind;
    return 0;
}

/* "a b" each, or ["a", "b"] each. */
static int take_merges(struct lg_bpe_json *x, const struct lg_json_value *v)
{
    lg_json j = v->before;
    x->merges = malloc(v->bytes + 1);
    if (!x->merges) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", x->file.path);
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

int lg_bpe_json_read(const char *dir, struct lg_bpe_json *ret)
{
    char path[LG_PATH_BYTES];
    const struct lg_tokenizer_json *f = &ret->file;
    LG_TRY(lg_path(path, "%s/tokenizer.json", dir));
    LG_TRY(lg_tokenizer_json_read(path, &ret->file));
    if (!lg_json_value_is(&f->type, "BPE") || !lg_json_value_is(&f->end_of_word_suffix, "</w>"))
        return LG_FAIL(
            LG_ERR_MISMATCH,
            "%s: its model is not the BPE of a CLIP (\"type\": \"BPE\", "
            "\"end_of_word_suffix\": \"</w>\"): it belongs to another kind of text encoder",
            path);
    if (!f->vocab.bytes || !f->merges.bytes)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: its model has no \"%s\"", path,
                       f->vocab.bytes ? "merges" : "vocab");
    ret->vocab = &f->vocab;
    LG_TRY(take_merges(ret, &f->merges));
    LG_TRY(lg_tokenizer_json_added(f, &ret->added));
    return 0;
}

void lg_bpe_json_free(struct lg_bpe_json *x)
{
    cJSON_Delete(x->added);
    free(x->merges);
    lg_tokenizer_json_free(&x->file);
    *x = (struct lg_bpe_json){0};
}
