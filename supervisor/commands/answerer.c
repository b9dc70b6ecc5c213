/* Answers for other hosts; see answerer.h. */
#include "supervisor/commands/answerer.h"
#include "base/clock.h"
#include "supervisor/commands/log_files.h"
#include "supervisor/views/status.h"
#include "supervisor/views/top.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOP_SESSION_S = 5, COLUMNS_MIN = 20, COLUMNS_MAX = 400 };

struct context {
    char dir[LG_PATH_BYTES];
    struct lg_top top;
    lg_top_line line[LG_TOP_LINES_MAX];
    int64_t top_ns; /* of the last reading; 0: never */
};

static int put_json(const struct lg_status *st, struct lg_reply *ret)
{
    cJSON *j = lg_status_json(st);
    ret->text = cJSON_PrintUnformatted(j);
    cJSON_Delete(j);
    if (!ret->text) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the status");
    ret->bytes = strlen(ret->text);
    return 0;
}

static int put_text(const struct lg_status *st, struct lg_reply *ret)
{
    FILE *f = open_memstream(&ret->text, &ret->bytes);
    if (!f) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the status");
    lg_status_print(st, f);
    fclose(f);
    return 0;
}

static int answer_status(const struct context *c, bool json, struct lg_reply *ret)
{
    struct lg_status *st = malloc(sizeof *st);
    if (!st) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the status");
    int rc = lg_status_read(c->dir, st);
    if (rc == 0) rc = json ? put_json(st, ret) : put_text(st, ret);
    free(st);
    LG_TRY(rc);
    if (ret->bytes > LG_ANSWER_TEXT_MAX)
        return LG_FAIL(LG_ERR_NOSPACE, "the status has %zu bytes, an answer %d at most", ret->bytes,
                       (int)LG_ANSWER_TEXT_MAX);
    return 0;
}

/* Rates are taken over a row of readings; those of a former onlooker say nothing. */
static int answer_top(struct context *c, const struct lg_question *q, struct lg_reply *ret)
{
    const int64_t now_ns = lg_now_ns();
    int heading;
    if (c->top_ns && now_ns - c->top_ns > TOP_SESSION_S * LG_S_NS) {
        lg_top_close(&c->top);
        memset(&c->top, 0, sizeof c->top);
        LG_TRY(lg_path(c->top.dir, "%s", c->dir));
    }
    c->top_ns = now_ns;
    LG_TRY(lg_top_read(&c->top));
    const struct lg_top_look look = {.columns = LG_MAX(COLUMNS_MIN, LG_MIN(q->number, COLUMNS_MAX)),
                                     .utf8 = q->flag != 0};
    const int n = lg_top_text(&c->top, &look, c->line, &heading);
    FILE *f = open_memstream(&ret->text, &ret->bytes);
    if (!f) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a screen");
    for (int i = 0; i < n && ftell(f) + LG_TOP_LINE_BYTES < LG_ANSWER_TEXT_MAX; i++)
        fprintf(f, "%s\n", c->line[i]);
    fclose(f);
    return 0;
}

static int answer(void *context, const struct lg_question *q, struct lg_reply *ret)
{
    struct context *c = context;
    int rc;
    if (q->kind == LG_QUESTION_logs)
        rc = lg_logs_answer(c->dir, q, ret);
    else if (q->kind == LG_QUESTION_top)
        rc = answer_top(c, q, ret);
    else
        rc = answer_status(c, q->kind == LG_QUESTION_json, ret);
    LG_TRY(rc);
    return 0;
}

int lg_answerer_make(const char *dir, struct lg_answerer *ret)
{
    struct context *c = calloc(1, sizeof *c);
    if (!c) return LG_FAIL(LG_ERR_NOSPACE, "no memory for answers to other hosts");
    *ret = (struct lg_answerer){answer, c};
    LG_TRY(lg_path(c->dir, "%s", dir));
    LG_TRY(lg_path(c->top.dir, "%s", dir));
    return 0;
}
