/* Fuzz target: a CLIP tokenizer's files and a caption, separated by NULs: vocab.json (empty: a whole vocabulary of few
 * tokens), merges.txt, tokenizer_config.json, and the rest. What opens tokenises to ids below the number of tokens. */
#include "stages/io/bpe.h"
#include "base/utf8.h"
#include "tests/fuzz/fuzz.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB, MERGES, CONFIG, WHOLE_MAX = 1 << 15, LENGTHS = 2 };

/* All bytes and a few more, as the JSON that lists them. */
static const char *whole_vocabulary(void)
{
    static char text[WHOLE_MAX];
    size_t n = 0;
    int id = 0;
    if (text[0]) return text;
#define TOKEN(...)                                                                                 \
    do {                                                                                           \
        n += (size_t)snprintf(text + n, WHOLE_MAX - n, "%s", id ? "\": " : "{");                   \
        if (id) n += (size_t)snprintf(text + n, WHOLE_MAX - n, "%d, ", id - 1);                    \
        n += (size_t)snprintf(text + n, WHOLE_MAX - n, "\"" __VA_ARGS__);                          \
        id++;                                                                                      \
    } while (0)
    for (int last = 0; last < 2; last++)
        for (unsigned code = '!'; code < 256 + 68; code++) {
            const bool prints = code <= '~' || (code >= 0xA1 && code <= 0xFF && code != 0xAD);
            if (prints || code >= 256) TOKEN("\\u%04x%s", code, last ? "</w>" : "");
        }
    TOKEN("ab");
    TOKEN("ab</w>");
    TOKEN("ba");
    TOKEN("<|startoftext|>");
    TOKEN("<|endoftext|>");
    snprintf(text + n, WHOLE_MAX - n, "\": %d}", id - 1);
    return text;
}

static void put_file(int slot, const char *text)
{
    lg_fuzz_file(slot, text, strlen(text));
}

LG_FUZZ_TARGET(bpe)
{
    static const char *const names[] = {"vocab.json", "merges.txt", "tokenizer_config.json"};
    static const int lengths[LENGTHS] = {2, 77};
    struct lg_fuzz_input in = {data, bytes};
    static const char *dir;
    lg_bpe *t = NULL;
    char *text[3], *caption;
    if (!dir)
        for (int i = 0; i < 3; i++) dir = lg_fuzz_link(names[i], i);
    for (int i = 0; i < 3; i++) text[i] = lg_fuzz_text(&in);
    caption = lg_fuzz_text(&in);
    put_file(VOCAB, text[VOCAB][0] ? text[VOCAB] : whole_vocabulary());
    put_file(MERGES, text[MERGES]);
    put_file(CONFIG, text[CONFIG][0] ? text[CONFIG] : "{}");
    const int rc = lg_bpe_open(dir, &t);
    LG_ASSERT(rc == 0 || rc == LG_ERR_CORRUPT || rc == LG_ERR_MISMATCH);
    for (int k = 0; rc == 0 && k < LENGTHS; k++) {
        int used = -1;
        int32_t *ids = malloc((size_t)lengths[k] * sizeof *ids);
        LG_ASSERT(ids);
        lg_bpe_encode(t, caption, lengths[k], ids, &used);
        LG_ASSERT(used >= 2 && used <= lengths[k]);
        LG_ASSERT(ids[0] == lg_bpe_bos(t) && ids[used - 1] == lg_bpe_eos(t));
        for (int i = 0; i < lengths[k]; i++) {
            LG_ASSERT(ids[i] >= 0 && ids[i] < lg_bpe_pieces(t));
            LG_ASSERT(i < used || ids[i] == lg_bpe_pad(t));
        }
        free(ids);
    }
    LG_ASSERT(rc == 0 || text[VOCAB][0] || text[MERGES][0] || text[CONFIG][0]);
    lg_bpe_close(&t);
    for (int i = 0; i < 3; i++) free(text[i]);
    free(caption);
}
