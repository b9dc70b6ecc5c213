/* `lgsup scale` and `lgsup swap`; see order.h. */
#include "supervisor/commands/order.h"
#include "base/printable.h"
#include "bus/control.h"
#include "supervisor/commands/elsewhere.h"
#include "supervisor/core/scale.h"
#include "supervisor/run/waiting.h"
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SAY_MS = 10000, ELSEWHERE_MS = 5000 };

static void say(void)
{
    printf("waiting until it is carried out (Ctrl-C ends the waiting, not the order)\n");
    fflush(stdout);
}

static int find_role(const char *name, lg_role *ret)
{
    int role = lg_role_find(name);
    if (role < 0)
        return LG_FAIL(LG_ERR_USAGE,
                       "there is no role \"%s\": loader, text (with several encoders text.NAME), "
                       "vae, trainer, ema and ckpt are the roles of a run",
                       name);
    *ret = (lg_role)role;
    return 0;
}

/* The pidfd of the lgsup in charge. */
static int find_lgsup(lg_run *r, int *ret_pidfd)
{
    LG_TRY(lg_waiting_refuse(r->dir));
    LG_TRY(lg_run_is_there(r->dir));
    int pidfd = lg_run_holder(r->dir, NULL);
    if (pidfd < 0)
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "no lgsup is in charge of %s: see `lgsup status`, and `lgsup start` it",
                       r->dir);
    int rc = lg_run_runtime_load(r);
    if (rc < 0) {
        close(pidfd);
        return LG_FAIL(LG_ERR_BUSY, "the run in %s is only just starting, or ending", r->dir);
    }
    *ret_pidfd = pidfd;
    return 0;
}

/* Waits until it is carried out. *ret_text: what lgsup says, also with an error. */
static int send(const char *dir, const struct lg_message *m, char ret_text[LG_MESSAGE_TEXT_MAX + 1])
{
    int pidfd;
    struct lg_message answer;
    lg_run *r = malloc(sizeof *r);
    if (!r) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the run");
    lg_run_init(r, dir);
    int rc = find_lgsup(r, &pidfd);
    if (rc == 0) {
        rc = lg_control_order(
            r->runtime_dir, m,
            &(struct lg_control_wait){.pidfd = pidfd, .say_ms = SAY_MS, .say = say}, &answer);
        close(pidfd);
    }
    if (rc == 0 && answer.kind != LG_MESSAGE_ok)
        rc = LG_FAIL(answer.level ? -answer.level : LG_ERR_FAILED, "%s", answer.text);
    snprintf(ret_text, LG_MESSAGE_TEXT_MAX + 1, "%s", rc < 0 ? lg_err_message() : answer.text);
    lg_run_close(r);
    free(r);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

static int send_here(const char *dir, const struct lg_message *m)
{
    char text[LG_MESSAGE_TEXT_MAX + 1];
    LG_TRY(send(dir, m, text));
    lg_print(stdout, "%s\n", text);
    return 0;
}

/* ---- to several hosts ---- */

/* This host's part, while the others are waited for. */
struct here {
    const char *dir;
    struct lg_message m;
    pthread_t thread;
    bool runs;
    int code;
    char text[LG_MESSAGE_TEXT_MAX + 1];
};

static void *order_here(void *arg)
{
    struct here *h = arg;
    h->code = send(h->dir, &h->m, h->text);
    lg_err_clear();
    return NULL;
}

static int print_answer(const struct lg_machine *m, const struct here *here)
{
    char name[LG_MACHINE_NAME_BYTES], why[LG_MACHINE_WHY_BYTES];
    const char *why_not = m->own ? NULL : lg_machine_why_not(m, why);
    const int code = m->own ? here->code : m->code ? m->code : why_not ? LG_ERR_TIMEOUT : 0;
    lg_print(stdout, "%s  %s%s\n", lg_machine_name(m, name), code ? "not done: " : "",
             m->own    ? here->text
             : why_not ? why_not
                       : m->text);
    return code;
}

static bool has_part(const struct lg_machine *m)
{
    return m->wanted && m->host >= 0; /* machines to spare have no processes */
}

/* Each host answers for itself; what one refuses the others may have carried out. */
static int print_answers(const lg_elsewhere *e, const struct here *here)
{
    int first = 0, failed = 0;
    for (int i = 0; i < e->n; i++) {
        if (!has_part(&e->machine[i])) continue;
        const int code = print_answer(&e->machine[i], here);
        if (code && !first) first = code;
        failed += code != 0;
    }
    if (first)
        return LG_FAIL(first, "not carried out on %d host%s", failed, failed == 1 ? "" : "s");
    return 0;
}

static int send_everywhere(lg_elsewhere *e, struct here *here, const struct lg_question *q)
{
    for (int i = 0; i < e->n; i++) {
        if (!has_part(&e->machine[i])) continue;
        if (i != e->own)
            lg_elsewhere_put(e, i, q);
        else if (pthread_create(&here->thread, NULL, order_here, here) == 0)
            here->runs = true;
        else
            return LG_FAIL(LG_ERR_NOSPACE, "cannot start a thread");
    }
    lg_elsewhere_wait(e, ELSEWHERE_MS);
    if (here->runs) pthread_join(here->thread, NULL);
    LG_TRY(print_answers(e, here));
    return 0;
}

static int send_all(const struct lg_order_to *to, const struct lg_message *m)
{
    lg_elsewhere *e;
    struct lg_question *q = calloc(1, sizeof *q);
    struct here *here = calloc(1, sizeof *here);
    LG_ASSERT(q && here);
    int rc = lg_elsewhere_open(to->dir, to->host, &e);
    q->kind = m->kind == LG_MESSAGE_scale ? LG_QUESTION_scale : LG_QUESTION_swap;
    q->role = (int)m->role;
    q->number = m->level;
    q->index = m->kind == LG_MESSAGE_swap && !m->level ? -1 : m->index;
    snprintf(q->text, sizeof q->text, "%s", m->text);
    here->dir = to->dir;
    here->m = *m;
    if (rc == 0) rc = e ? send_everywhere(e, here, q) : send_here(to->dir, m);
    lg_elsewhere_close(&e);
    free(here);
    free(q);
    LG_TRY(rc);
    return 0;
}

int lg_order_scale(const struct lg_order_to *to, const char *role_name, const char *number)
{
    lg_role role;
    char *end;
    LG_TRY(find_role(role_name, &role));
    long n = strtol(number, &end, 10);
    if (end == number || *end || n < INT_MIN || n > INT_MAX)
        return LG_FAIL(LG_ERR_USAGE, "\"%s\" is not a number of instances", number);
    LG_TRY(lg_scale_check(role, (int)n));
    LG_TRY(send_all(to,
                    &(struct lg_message){.kind = LG_MESSAGE_scale, .role = role, .level = (int)n}));
    return 0;
}

static int parse_what(const char *what, struct lg_message *ret)
{
    char name[32], *end;
    snprintf(name, sizeof name, "%s", what);
    char *dot = lg_role_find(name) < 0 ? strrchr(name, '.') : NULL; /* text.t5 is a role */
    if (dot) *dot = 0;
    LG_TRY(find_role(name, &ret->role));
    if (!dot) return 0;
    long index = strtol(dot + 1, &end, 10);
    if (end == dot + 1 || *end || index < 0 || index >= LG_INSTANCES_MAX)
        return LG_FAIL(LG_ERR_USAGE, "\"%s\" is no instance: ROLE.INDEX, as in vae.1", what);
    ret->index = (int)index;
    ret->level = 1;
    return 0;
}

/* Links are left as they are: what a link names when a process is started is what runs. */
static int absolute_path(const char *program, bool elsewhere, char ret[LG_PATH_BYTES])
{
    char here[PATH_MAX];
    if (elsewhere && program[0] == '/') { /* that host looks */
        LG_TRY(lg_path(ret, "%s", program));
        return 0;
    }
    if (access(program, X_OK) < 0 || !getcwd(here, sizeof here))
        return LG_FAIL(LG_ERR_NOTFOUND, "%s is no program that can be executed: %s", program,
                       strerror(errno));
    if (program[0] == '/')
        LG_TRY(lg_path(ret, "%s", program));
    else
        LG_TRY(lg_path(ret, "%s/%s", here, program));
    return 0;
}

int lg_order_swap(const struct lg_order_to *to, const char *what, const char *program)
{
    struct lg_message m = {.kind = LG_MESSAGE_swap};
    char absolute[LG_PATH_BYTES] = "";
    LG_TRY(parse_what(what, &m));
    if (program) LG_TRY(absolute_path(program, to->host != NULL, absolute));
    if (strlen(absolute) > LG_MESSAGE_TEXT_MAX)
        return LG_FAIL(LG_ERR_USAGE, "the path %s is longer than %d bytes", absolute,
                       LG_MESSAGE_TEXT_MAX);
    snprintf(m.text, sizeof m.text, "%.*s", LG_MESSAGE_TEXT_MAX, absolute);
    LG_TRY(send_all(to, &m));
    return 0;
}

int lg_order_take(const char *dir)
{
    LG_TRY(send_here(dir, &(struct lg_message){.kind = LG_MESSAGE_take}));
    return 0;
}
