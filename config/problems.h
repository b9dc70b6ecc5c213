/* Collects what is wrong with a config, so that one run of `lgsup check` shows all of it. */
#pragma once
#include "base/check.h"
#include <stdio.h>

enum { LG_PROBLEMS_MAX = 20, LG_PROBLEM_BYTES = 720 };

/* Start with {0}. */
struct lg_problems {
    FILE *out;
    char *text;
    size_t bytes;
    int n; /* those beyond LG_PROBLEMS_MAX are counted, not kept */
};
/* One line; control characters from the user's file become '?'. */
void lg_problem(struct lg_problems *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* 0 when there is none; else fails with code: the only one as it is, or "title: 3 errors" and a
 * line for each. Frees what p holds. */
int lg_problems_end(struct lg_problems *p, int code, const char *title);
