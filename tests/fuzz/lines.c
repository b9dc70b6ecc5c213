/* Fuzz target: the metadata.jsonl of a folder of pictures. Every line that is taken lies in the file, holds no end of a line,
 * and is found by its picture's name. */
#include "stages/io/source_lines.h"
#include "tests/fuzz/fuzz.h"
#include <string.h>

LG_FUZZ_TARGET(lines)
{
    static const char *dir;
    lg_fuzz_file(0, data, bytes);
    if (!dir) dir = lg_fuzz_link(LG_LINES_NAME, 0);
    struct lg_lines x = {0};
    int rc = lg_lines_add(&x, dir, LG_LINES_NAME, 7);
    LG_ASSERT(rc == 0 || rc == LG_ERR_CONFIG);
    for (size_t i = 0; i < x.count; i++) {
        const struct lg_line *l = &x.line[i];
        LG_ASSERT(l->at + l->bytes <= bytes && l->file == 7 && l->number >= 1);
        LG_ASSERT(!memchr(data + l->at, '\n', l->bytes));
    }
    if (rc == 0 && lg_lines_sort(&x) == 0)
        for (size_t i = 0; i < x.count; i++)
            LG_ASSERT(lg_lines_find(&x, x.line[i].path) == &x.line[i]);
    lg_lines_free(&x);
}
