/* See tokenizer.h. */
#include "stages/io/tokenizer.h"
#include "config/tokenizer_files.h"
#include "stages/io/bpe.h"
#include "stages/io/spiece.h"
#include "stages/io/tokenizer_json.h"
#include <stdlib.h>
#include <sys/stat.h>

/* One of the two. */
struct lg_tokenizer {
    lg_spiece *spiece;
    lg_bpe *bpe;
};

static int open_any(lg_tokenizer *t, const char *path)
{
    struct lg_tokenizer_files f;
    struct stat st;
    char file[LG_PATH_BYTES];
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode)) {
        LG_TRY(lg_spiece_open(path, &t->spiece));
        return 0;
    }
    LG_TRY(lg_tokenizer_files_find(path, LG_TOKENIZER_KINDS, &f));
    LG_TRY(lg_tokenizer_files_path(&f, file));
    bool is_bpe = f.kind == LG_TOKENIZER_BPE;
    if (f.kind == LG_TOKENIZER_JSON) LG_TRY(lg_tokenizer_json_is_bpe(file, &is_bpe));
    if (!is_bpe)
        LG_TRY(lg_spiece_open(file, &t->spiece));
    else
        LG_TRY(lg_bpe_open(f.dir, &t->bpe));
    return 0;
}

int lg_tokenizer_open(const char *path, lg_tokenizer **ret)
{
    lg_tokenizer *t = calloc(1, sizeof *t);
    if (!t) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a tokenizer");
    int rc = open_any(t, path);
    if (rc < 0) {
        free(t);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = t;
    return 0;
}

void lg_tokenizer_close(lg_tokenizer **t)
{
    if (!*t) return;
    lg_spiece_close(&(*t)->spiece);
    lg_bpe_close(&(*t)->bpe);
    free(*t);
    *t = NULL;
}

int lg_tokenizer_pieces(const lg_tokenizer *t)
{
    return t->bpe ? lg_bpe_pieces(t->bpe) : lg_spiece_pieces(t->spiece);
}

int lg_tokenizer_eos(const lg_tokenizer *t)
{
    return t->bpe ? lg_bpe_eos(t->bpe) : LG_SPIECE_EOS;
}

int lg_tokenizer_pad(const lg_tokenizer *t)
{
    return t->bpe ? lg_bpe_pad(t->bpe) : LG_SPIECE_PAD;
}

int lg_tokenizer_encode(lg_tokenizer *t, const char *text, int length, int32_t *ret_ids,
                        int *ret_length)
{
    int used = 1;
    LG_ASSERT(length >= 1);
    if (!t->bpe)
        LG_TRY(lg_spiece_encode(t->spiece, text, length, ret_ids, &used));
    else if (length == 1)
        ret_ids[0] = lg_bpe_eos(t->bpe);
    else
        lg_bpe_encode(t->bpe, text, length, ret_ids, &used);
    if (ret_length) *ret_length = used;
    return 0;
}
