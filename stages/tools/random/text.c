/* See text.h. */
#include "stages/tools/random/text.h"
#include "base/check.h"
#include "base/fs.h"
#include <stdlib.h>

void lg_random_text_begin(struct lg_random_text *t)
{
    *t = (struct lg_random_text){0};
    t->file = open_memstream(&t->data, &t->bytes);
    LG_ASSERT(t->file);
}

int lg_random_text_publish(struct lg_random_text *t, const char *dir, const char *name)
{
    char path[LG_PATH_BYTES];
    int rc = lg_close_text(t->file) < 0 ? LG_FAIL(LG_ERR_NOSPACE, "no memory for %s", name)
                                        : lg_path(path, "%s/%s", dir, name);
    if (rc == 0) rc = lg_publish_file(path, t->data, t->bytes);
    free(t->data);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
