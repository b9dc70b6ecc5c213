/* A list of error lines in a memory stream, handed to LG_FAIL as one message at the end. */
#include "config/problems.h"
#include "base/fs.h"
#include <stdlib.h>

void lg_problem(struct lg_problems *p, const char *fmt, ...)
{
    char line[LG_PROBLEM_BYTES];
    if (p->n++ >= LG_PROBLEMS_MAX) return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    if (!p->out) p->out = open_memstream(&p->text, &p->bytes);
    LG_ASSERT(p->out); /* no memory for a few lines: nothing else would work either */
    fprintf(p->out, "\n  %s", line);
}

int lg_problems_end(struct lg_problems *p, int code, const char *title)
{
    if (p->n == 0) return 0;
    LG_ASSERT(lg_close_text(p->out) == 0);
    int rc;
    if (p->n == 1)
        rc = LG_FAIL(code, "%s", p->text + 3);
    else if (p->n <= LG_PROBLEMS_MAX)
        rc = LG_FAIL(code, "%s: %d errors:%s", title, p->n, p->text);
    else
        rc = LG_FAIL(code, "%s: %d errors, the first %d:%s", title, p->n, LG_PROBLEMS_MAX, p->text);
    free(p->text);
    *p = (struct lg_problems){0};
    return rc;
}
