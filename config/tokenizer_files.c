/* See tokenizer_files.h. */
#include "config/tokenizer_files.h"
#include <string.h>

enum { FILES_MAX = 4 };

/* The first `needed` must be there. */
static const struct {
    const char *name[FILES_MAX];
    int count, needed;
} KINDS[LG_TOKENIZER_KINDS] = {
    [LG_TOKENIZER_SPIECE] = {{"spiece.model"}, 1, 1},
    [LG_TOKENIZER_BPE] =
        {{"vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"}, 4, 2},
    [LG_TOKENIZER_JSON] = {{"tokenizer.json", "tokenizer_config.json"}, 2, 1},
};

static bool goes_for(int kind, lg_tokenizer_kind wanted)
{
    return wanted == LG_TOKENIZER_KINDS || kind == (int)wanted || kind == LG_TOKENIZER_JSON;
}

static int look(const char *dir, int kind, bool *ret_found)
{
    char path[LG_PATH_BYTES];
    *ret_found = true;
    for (int i = 0; i < KINDS[kind].needed; i++) {
        LG_TRY(lg_path(path, "%s/%s", dir, KINDS[kind].name[i]));
        *ret_found = *ret_found && lg_path_exists(path);
    }
    return 0;
}

/* ".../text_encoder_2" -> ".../tokenizer_2"; empty for a folder of another name. */
static int beside(const char *dir, char ret[LG_PATH_BYTES])
{
    static const char own[] = "text_encoder";
    size_t end = strlen(dir);
    while (end > 1 && dir[end - 1] == '/') end--;
    size_t name = end;
    while (name && dir[name - 1] != '/') name--;
    ret[0] = 0;
    if (end - name < sizeof own - 1 || memcmp(dir + name, own, sizeof own - 1) != 0) return 0;
    const size_t rest = name + sizeof own - 1;
    LG_TRY(lg_path(ret, "%.*stokenizer%.*s", (int)name, dir, (int)(end - rest), dir + rest));
    return 0;
}

int lg_tokenizer_files_find(const char *dir, lg_tokenizer_kind kind, struct lg_tokenizer_files *ret)
{
    char place[2][LG_PATH_BYTES];
    LG_TRY(lg_path(place[0], "%s", dir));
    LG_TRY(beside(dir, place[1]));
    for (int p = 0; p < 2; p++)
        for (int k = 0; place[p][0] && k < LG_TOKENIZER_KINDS; k++) {
            bool found;
            if (!goes_for(k, kind)) continue;
            LG_TRY(look(place[p], k, &found));
            if (!found) continue;
            ret->kind = (lg_tokenizer_kind)k;
            strcpy(ret->dir, place[p]);
            return 0;
        }
    static const char *const WANTED[] = {
        [LG_TOKENIZER_SPIECE] = "spiece.model, or tokenizer.json, does not exist",
        [LG_TOKENIZER_BPE] = "vocab.json with merges.txt, or tokenizer.json, does not exist",
        [LG_TOKENIZER_JSON] = "tokenizer.json does not exist",
        [LG_TOKENIZER_KINDS] =
            "spiece.model, or tokenizer.json, does not exist, nor vocab.json with merges.txt"};
    return LG_FAIL(LG_ERR_NOTFOUND, "%s/%s%s%s: the tokenizer belongs there", dir, WANTED[kind],
                   place[1][0] ? ", nor in " : "", place[1]);
}

int lg_tokenizer_files_hash(const struct lg_tokenizer_files *f, uint64_t *ret)
{
    uint64_t hash[FILES_MAX] = {0};
    char path[LG_PATH_BYTES];
    for (int i = 0; i < KINDS[f->kind].count; i++) {
        LG_TRY(lg_path(path, "%s/%s", f->dir, KINDS[f->kind].name[i]));
        if (i < KINDS[f->kind].needed || lg_path_exists(path))
            LG_TRY(lg_hash_file(path, &hash[i], NULL));
    }
    *ret = KINDS[f->kind].count == 1 ? hash[0] : lg_hash(hash, sizeof hash);
    return 0;
}

int lg_tokenizer_files_path(const struct lg_tokenizer_files *f, char ret[LG_PATH_BYTES])
{
    LG_TRY(lg_path(ret, "%s/%s", f->dir, KINDS[f->kind].name[0]));
    return 0;
}
