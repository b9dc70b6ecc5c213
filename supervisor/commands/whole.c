/* Status and screen of all hosts; see whole.h. */
#include "supervisor/commands/whole.h"
#include "base/json_tree.h"
#include "base/printable.h"
#include "supervisor/commands/elsewhere.h"
#include "supervisor/run/terminal.h"
#include "supervisor/views/status.h"
#include "supervisor/views/top.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ASK_MS = 2000, TOP_ASK_MS = 500, TOKENS_MAX = 1 << 17 };

/* Without the others (the key cannot be read, say) this host is shown all the same. */
static int open_elsewhere(const char *dir, const char *host, lg_elsewhere **ret)
{
    const int rc = lg_elsewhere_open(dir, host, ret);
    if (rc == 0) return 0;
    if (host) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    lg_terminal_say(STDERR_FILENO, "lgsup: only this host is shown: %s\n", lg_err_message());
    lg_err_clear();
    *ret = NULL;
    return 0;
}

/* ---- status ---- */

static void print_machine(const lg_elsewhere *e, int i, const struct lg_status *own)
{
    char name[LG_MACHINE_NAME_BYTES], why[LG_MACHINE_WHY_BYTES];
    const struct lg_machine *m = &e->machine[i];
    const char *why_not = m->own ? NULL : lg_machine_why_not(m, why);
    lg_print(stdout, "== %s%s%s\n", lg_machine_name(m, name), why_not ? "  " : "",
             why_not ? why_not : "");
    if (m->own)
        lg_status_print(own, stdout);
    else if (!why_not)
        lg_print_text(stdout, m->text, m->bytes, LG_NEWLINES_KEPT);
    putchar('\n');
}

static void print_missing(const lg_elsewhere *e)
{
    for (int h = -1; (h = lg_elsewhere_missing(e, h + 1)) >= 0;)
        printf("== host %d  is missing: no machine has taken its number\n", h);
}

/* What another host says is JSON, or nothing. NULL: ret_why says why there is none, else it is empty. */
static cJSON *status_of(const struct lg_machine *m, const struct lg_status *own,
                        char ret_why[LG_MACHINE_WHY_BYTES])
{
    cJSON *j = NULL;
    ret_why[0] = 0;
    if (m->own) return lg_status_json(own);
    if (lg_machine_why_not(m, ret_why)) return NULL;
    if (lg_json_tree("its status", m->text, m->bytes, TOKENS_MAX, &j) < 0)
        snprintf(ret_why, LG_MACHINE_WHY_BYTES, "%s", lg_err_message());
    lg_err_clear();
    return j;
}

static cJSON *machine_json(const struct lg_machine *m, const struct lg_status *own)
{
    char why[LG_MACHINE_WHY_BYTES];
    cJSON *status = status_of(m, own, why), *j = cJSON_CreateObject();
    cJSON_AddNumberToObject(j, "place", m->place);
    cJSON_AddItemToObject(j, "host",
                          m->host >= 0 ? cJSON_CreateNumber(m->host) : cJSON_CreateNull());
    cJSON_AddStringToObject(j, "address", m->address);
    cJSON_AddBoolToObject(j, "this", m->own);
    cJSON_AddBoolToObject(j, "leads", m->leads);
    cJSON_AddBoolToObject(j, "answers", m->own || m->answered);
    cJSON_AddItemToObject(j, "silent_s",
                          !m->own && m->silent_ms >= 0
                              ? cJSON_CreateNumber((double)m->silent_ms / 1e3)
                              : cJSON_CreateNull());
    lg_json_add_text(j, "why", why);
    cJSON_AddItemToObject(j, "status", status ? status : cJSON_CreateNull());
    return j;
}

static int print_json(const lg_elsewhere *e, const char *host, const struct lg_status *own)
{
    char name[LG_MACHINE_NAME_BYTES], why[LG_MACHINE_WHY_BYTES];
    cJSON *j = NULL, *all = NULL;
    for (int i = 0; e && host && i < e->n; i++) {
        if (!e->machine[i].wanted) continue;
        j = status_of(&e->machine[i], own, why);
        if (!j)
            return LG_FAIL(LG_ERR_CORRUPT, "%s: %s", lg_machine_name(&e->machine[i], name), why);
    }
    if (!j) {
        j = lg_status_json(own);
        if (e) all = cJSON_AddArrayToObject(j, "hosts");
    }
    for (int i = 0; all && i < e->n; i++)
        cJSON_AddItemToArray(all, machine_json(&e->machine[i], own));
    char *text = cJSON_Print(j);
    puts(text ? text : "{}");
    free(text);
    cJSON_Delete(j);
    return 0;
}

/* Of --host: the one that was wanted and has not answered. */
static int fail_silent(const lg_elsewhere *e)
{
    char name[LG_MACHINE_NAME_BYTES], why[LG_MACHINE_WHY_BYTES];
    for (int i = 0; i < e->n; i++) {
        const struct lg_machine *m = &e->machine[i];
        const char *is = m->own || !m->wanted ? NULL : lg_machine_why_not(m, why);
        if (is)
            return LG_FAIL(m->code ? m->code : LG_ERR_TIMEOUT, "%s %s", lg_machine_name(m, name),
                           is);
    }
    return 0;
}

static void print_text(const lg_elsewhere *e, const char *host, const struct lg_status *own)
{
    if (!e) lg_status_print(own, stdout);
    for (int i = 0; e && i < e->n; i++)
        if (e->machine[i].wanted) print_machine(e, i, own);
    if (e && !host) print_missing(e);
}

static int show_status(lg_elsewhere *e, const char *dir, const char *host, bool json)
{
    struct lg_status *own = malloc(sizeof *own);
    if (!own) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the status");
    int rc = lg_status_read(dir, own);
    if (rc == 0 && e) {
        lg_elsewhere_put_all(
            e, &(struct lg_question){.kind = json ? LG_QUESTION_json : LG_QUESTION_status});
        lg_elsewhere_wait(e, ASK_MS);
        if (host) rc = fail_silent(e);
    }
    if (rc == 0 && json)
        rc = print_json(e, host, own);
    else if (rc == 0)
        print_text(e, host, own);
    free(own);
    LG_TRY(rc);
    return 0;
}

int lg_whole_status(const char *dir, const char *host, bool json)
{
    lg_elsewhere *e;
    LG_TRY(open_elsewhere(dir, host, &e));
    const int rc = show_status(e, dir, host, json);
    lg_elsewhere_close(&e);
    LG_TRY(rc);
    return 0;
}

/* ---- top ---- */

struct screens {
    lg_elsewhere *e;
    int chosen; /* machine */
};

static void read_others(void *context, const struct lg_top_look *look)
{
    struct screens *s = context;
    lg_elsewhere_put_all(s->e, &(struct lg_question){.kind = LG_QUESTION_top,
                                                     .number = look->columns,
                                                     .flag = look->utf8});
    lg_elsewhere_wait(s->e, TOP_ASK_MS);
}

/* A line for each machine. */
static int list_hosts(void *context, lg_top_line *line)
{
    const struct screens *s = context;
    int n = 0;
    for (int i = 0; i < s->e->n; i++) {
        char name[LG_MACHINE_NAME_BYTES], why[LG_MACHINE_WHY_BYTES], text[LG_TOP_LINE_BYTES];
        const struct lg_machine *m = &s->e->machine[i];
        const char *is = m->own ? NULL : lg_machine_why_not(m, why);
        if (!m->wanted) continue;
        snprintf(text, sizeof text, "%s %s%s%s", i == s->chosen ? ">" : " ",
                 lg_machine_name(m, name), is ? "  " : "", is ? is : "");
        lg_printable(line[n++], LG_TOP_LINE_BYTES, text, strlen(text), LG_NEWLINES_ESCAPED);
    }
    return n;
}

/* The chosen one's; -1: this host's. */
static int frame_of(void *context, lg_top_line *line, int room)
{
    const struct screens *s = context;
    const struct lg_machine *m = &s->e->machine[s->chosen];
    int n = 0;
    if (m->own) return -1;
    for (const char *at = m->text; at && *at && n < room;) {
        const size_t bytes = strcspn(at, "\n");
        lg_printable(line[n++], LG_TOP_LINE_BYTES, at, bytes, LG_NEWLINES_ESCAPED);
        at += bytes + (at[bytes] == '\n');
    }
    return n;
}

/* False: that was the last one, and the first is chosen again. */
static bool choose_next(void *context)
{
    struct screens *s = context;
    const int before = s->chosen;
    do s->chosen = (s->chosen + 1) % s->e->n;
    while (!s->e->machine[s->chosen].wanted);
    return s->chosen > before;
}

int lg_whole_top(const char *dir, const char *host, bool once)
{
    struct screens s = {0};
    struct lg_top_hosts hosts = {&s, read_others, list_hosts, frame_of, choose_next};
    LG_TRY(open_elsewhere(dir, host, &s.e));
    while (s.e && !s.e->machine[s.chosen].wanted) s.chosen++;
    const int rc = lg_top(dir, once, s.e ? &hosts : NULL);
    lg_elsewhere_close(&s.e);
    LG_TRY(rc);
    return 0;
}
