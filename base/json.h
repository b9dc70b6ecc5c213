/* JSON that somebody else wrote, read token by token: no tree, no recursion, no memory. The grammar is
 * that of RFC 8259, nothing more unless it is asked for: no comments, no NaN, nothing after the end, texts of valid UTF-8
 * without NUL. Depth and number of tokens are bounded, so the time is that of one pass at most.
 *
 *     lg_json j;
 *     lg_json_open(&j, &(struct lg_json_source){.label = path, .data = data, .bytes = bytes,
 *                                               .tokens_max = 1000});
 *     LG_TRY(lg_json_next(&j));          // OBJECT
 *     while (...) LG_TRY(lg_json_next(&j));   // KEY, value, KEY, value, OBJECT_END, END
 *
 * What the reader cannot know without memory is left to its user: whether a key appears twice
 * (lg_json_tree looks). A reader may be copied to go back to where it was. */
#pragma once
#include "base/check.h"

enum { LG_JSON_DEPTH_MAX = 64 };

typedef enum lg_json_kind {
    LG_JSON_NONE, /* before the first token */
    LG_JSON_OBJECT,
    LG_JSON_OBJECT_END,
    LG_JSON_ARRAY,
    LG_JSON_ARRAY_END,
    LG_JSON_KEY, /* its value is the next token */
    LG_JSON_STRING,
    LG_JSON_NUMBER,
    LG_JSON_TRUE,
    LG_JSON_FALSE,
    LG_JSON_NULL,
    LG_JSON_END, /* of the document; comes again and again */
} lg_json_kind;

struct lg_json_source {
    const char *label; /* begins every message, which also says at which byte */
    const void *data;
    size_t bytes;
    uint64_t tokens_max; /* more are refused; 0: as many as there are */
    size_t origin;       /* of `data` in its file: added to the byte that messages name */
    int code;            /* of failures; 0 is LG_ERR_CORRUPT */
    bool loose_text;     /* texts may hold raw control characters, NUL and invalid UTF-8 */
    bool infinities;     /* Infinity and -Infinity, as Python writes them, are NUMBERs, too */
};

typedef struct lg_json {
    lg_json_kind kind; /* of the last token */
    const char *text;  /* KEY, STRING: what stands between the quotes; NUMBER: its digits */
    size_t bytes;      /* of text */
    int depth;         /* open objects and arrays, this token's own included */
    uint64_t left;     /* tokens that may still come; the user may set it anew */
    /* private */
    struct lg_json_source source;
    const char *at, *end;
    uint64_t is_object; /* bit d: what was opened at depth d */
    int expect;
    bool escaped;
} lg_json;

/* The data stays the caller's and must outlive the reader. A byte order mark is passed over. */
void lg_json_open(lg_json *j, const struct lg_json_source *source);
/* Reads the next token. */
int lg_json_next(lg_json *j);
/* After KEY, or where a value is to come: reads all of that value. Its last token stays in *j. */
int lg_json_skip(lg_json *j);
/* Reads the next token, which must be of this kind; else "...: `what` is not ...". */
int lg_json_expect(lg_json *j, lg_json_kind kind, const char *what);
/* Fails as the reader does: label, byte of the last token, text. Returns the code. */
int lg_json_fail(const lg_json *j, const char *what);

/* KEY, STRING: is it this text? */
bool lg_json_is(const lg_json *j, const char *text);
/* KEY, STRING: writes the text without escapes and a NUL; ret needs j->bytes + 1 bytes, and is never
 * longer than that. Returns its bytes. */
size_t lg_json_text(const lg_json *j, char *ret);
/* Where the last token ends, in the data. */
const char *lg_json_end(const lg_json *j);
/* NUMBER: a whole number without sign, fraction and exponent that fits; else false. */
bool lg_json_u64(const lg_json *j, uint64_t *ret);
