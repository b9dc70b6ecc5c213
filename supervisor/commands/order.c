/* `lgsup scale` and `lgsup swap`; see order.h. */
#include "supervisor/commands/order.h"
#include "base/printable.h"
#include "bus/control.h"
#include "supervisor/core/scale.h"
#include "supervisor/run/run.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SAY_MS = 10000 };

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
    char path[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, path, "config.toml"));
    if (!lg_path_exists(path))
        return LG_FAIL(LG_ERR_NOTFOUND, "%s is not a run directory (no config.toml in it)", r->dir);
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

static int send(const char *dir, const struct lg_message *m)
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
    if (rc == 0) lg_print(stdout, "%s\n", answer.text);
    lg_run_close(r);
    free(r);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

int lg_order_scale(const char *dir, const char *role_name, const char *number)
{
    lg_role role;
    char *end;
    LG_TRY(find_role(role_name, &role));
    long n = strtol(number, &end, 10);
    if (end == number || *end || n < INT_MIN || n > INT_MAX)
        return LG_FAIL(LG_ERR_USAGE, "\"%s\" is not a number of instances", number);
    LG_TRY(lg_scale_check(role, (int)n));
    LG_TRY(
        send(dir, &(struct lg_message){.kind = LG_MESSAGE_scale, .role = role, .level = (int)n}));
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
static int absolute_path(const char *program, char ret[LG_PATH_BYTES])
{
    char here[PATH_MAX];
    if (access(program, X_OK) < 0 || !getcwd(here, sizeof here))
        return LG_FAIL(LG_ERR_NOTFOUND, "%s is no program that can be executed: %s", program,
                       strerror(errno));
    if (program[0] == '/')
        LG_TRY(lg_path(ret, "%s", program));
    else
        LG_TRY(lg_path(ret, "%s/%s", here, program));
    return 0;
}

int lg_order_swap(const char *dir, const char *what, const char *program)
{
    struct lg_message m = {.kind = LG_MESSAGE_swap};
    char absolute[LG_PATH_BYTES] = "";
    LG_TRY(parse_what(what, &m));
    if (program) LG_TRY(absolute_path(program, absolute));
    if (strlen(absolute) > LG_MESSAGE_TEXT_MAX)
        return LG_FAIL(LG_ERR_USAGE, "the path %s is longer than %d bytes", absolute,
                       LG_MESSAGE_TEXT_MAX);
    snprintf(m.text, sizeof m.text, "%.*s", LG_MESSAGE_TEXT_MAX, absolute);
    LG_TRY(send(dir, &m));
    return 0;
}

int lg_order_take(const char *dir)
{
    LG_TRY(send(dir, &(struct lg_message){.kind = LG_MESSAGE_take}));
    return 0;
}
