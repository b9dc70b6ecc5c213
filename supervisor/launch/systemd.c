/* Processes that systemd starts: the launcher's second row; see launcher.h and systemd.h. How a unit's
 * process takes its place on the board: role.c. */
#include "supervisor/launch/systemd.h"
#include "base/cgroup.h"
#include "base/clock.h"
#include "base/log.h"
#include "supervisor/launch/launcher.h"
#include "supervisor/run/signals.h"
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LOOK_MS = 50,
    HOLDER_S_MAX = 1800, /* lg-end.service's TimeoutStopSec= */
    SYSTEMCTL_BYTES_MAX = 1 << 16,
    SYSTEMCTL_MS_MAX = 10000,
    UNIT_BYTES = LG_UNITS_BYTES + 48
};
#define SYSTEMCTL "/usr/bin/systemctl"

/* ---- what systemd says ---- */

static int run_systemctl(char *const *argv, char **ret_text, int *ret_exit)
{
    struct lg_capture c;
    LG_TRY(lg_capture_begin(SYSTEMCTL, argv, &c));
    c.timeout_ms = SYSTEMCTL_MS_MAX;
    LG_TRY(lg_capture_end(&c, SYSTEMCTL_BYTES_MAX, ret_text, ret_exit));
    return 0;
}

/* LINE of `systemctl list-jobs`: "ID UNIT TYPE STATE". */
static bool is_job(const char *line, const char *unit, const char *type)
{
    char name[256], its[64];
    return sscanf(line, "%*s %255s %63s", name, its) == 2 && !strcmp(name, unit) &&
           !strcmp(its, type);
}

/* Has systemd a job of this type, or of the other, for the unit? */
static bool has_job(char *unit, const char *type, const char *other)
{
    char *text = NULL, *rest = NULL;
    int code;
    char *argv[] = {(char *)"systemctl",
                    (char *)"list-jobs",
                    (char *)"--plain",
                    (char *)"--no-legend",
                    (char *)"--full",
                    unit,
                    NULL};
    if (run_systemctl(argv, &text, &code) < 0) {
        lg_log_error("cannot ask systemd why it ends lgsup: the run is stopped");
        return false;
    }
    bool has = false;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        has |= is_job(line, unit, type) || is_job(line, unit, other);
    free(text);
    return has;
}

static void lgsup_unit(const char *units, char ret[UNIT_BYTES])
{
    snprintf(ret, UNIT_BYTES, "%ssup.service", units);
}

static bool systemd_is_restart(const char *units)
{
    char unit[UNIT_BYTES];
    lgsup_unit(units, unit);
    return has_job(unit, "restart", "restart");
}

/* A restart is a start when its first half is done. */
bool lg_units_end_comes_back(const lg_run *r)
{
    char unit[UNIT_BYTES];
    snprintf(unit, sizeof unit, "%s-end.service", r->units);
    return has_job(unit, "restart", "start");
}

/* Both come from one look of systemd's. A unit without a job has no line for it. */
static lg_units_intent intent_of(char *text)
{
    char *rest = NULL, state[32] = "";
    unsigned job = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        sscanf(line, "ActiveState=%31s", state);
        sscanf(line, "Job=%u", &job);
    }
    if (!strcmp(state, "activating")) return LG_UNITS_UP; /* after a death as well, without a job */
    if (!strcmp(state, "deactivating") || job) return LG_UNITS_CHANGING;
    return !strcmp(state, "active") || !strcmp(state, "reloading") ? LG_UNITS_UP : LG_UNITS_DOWN;
}

lg_units_intent lg_units_look_at_lgsup(const lg_run *r)
{
    char unit[UNIT_BYTES], *text = NULL;
    int code;
    lgsup_unit(r->units, unit);
    char *argv[] = {(char *)"systemctl",      (char *)"show", (char *)"--property=ActiveState",
                    (char *)"--property=Job", unit,           NULL};
    if (run_systemctl(argv, &text, &code) < 0) {
        lg_log_error("cannot ask systemd what becomes of lgsup's unit");
        return LG_UNITS_DOWN;
    }
    lg_units_intent intent = intent_of(text);
    free(text);
    return intent;
}

static const char *first_line(char *text)
{
    text[strcspn(text, "\n")] = 0;
    return text;
}

static void unit_name(const char *units, lg_role role, int index, char ret[UNIT_BYTES])
{
    snprintf(ret, UNIT_BYTES, "%s-%s@%d.service", units, lg_role_name(role), index);
}

/* Fails with systemctl's first line. */
static int systemctl(const char *verb, char *unit)
{
    char *text = NULL;
    int code = 0;
    char *argv[] = {(char *)"systemctl", (char *)verb, (char *)"--no-block", unit, NULL};
    LG_TRY(run_systemctl(argv, &text, &code));
    int rc = code ? LG_FAIL(LG_ERR_FAILED, "%.200s", first_line(text)) : 0;
    free(text);
    return rc;
}

/* ---- the row ---- */

/* Nobody: systemd starts it, and it takes an incarnation by itself (role.c). */
static int systemd_start(const struct lg_launch *l, struct lg_launched *ret)
{
    (void)l;
    *ret = (struct lg_launched){.child = LG_CHILD_NONE};
    return 0;
}

static struct lg_sighting systemd_look(lg_board *b, lg_role role, int index)
{
    lg_life state;
    lg_incarnation now = lg_board_life(b, role, index, &state), then;
    struct lg_sighting seen = {LG_SEEN_NOBODY, now, LG_CHILD_NONE};
    if (state != LG_LIFE_STARTING && state != LG_LIFE_RUNNING) return seen;
    seen.what = LG_SEEN_UNCLEAR;
    int pidfd = lg_board_pidfd(b, role, index);
    int pid = (int)atomic_load(&lg_board_row(b, role, index)->pid);
    then = lg_board_life(b, role, index, &state);
    if (pidfd >= 0 && then == now) {
        seen.what = LG_SEEN_SOMEBODY;
        seen.child = (struct lg_child){.pid = pid, .pidfd = pidfd};
    } else if (pidfd >= 0) { /* of the next one, it may be */
        close(pidfd);
    } else if (pidfd == -1) { /* it came and died between two looks */
        lg_board_bury(b, now);
        seen.what = LG_SEEN_DEAD;
    }
    return seen;
}

/* For a unit that nobody starts: one that was not in the plan when the units were written, or that
 * ended well although the run goes on. */
static int systemd_request(const char *units, lg_role role, int index)
{
    char unit[UNIT_BYTES];
    unit_name(units, role, index, unit);
    if (systemctl("start", unit) < 0)
        return LG_FAIL(LG_ERR_FAILED, "%s is not running and cannot be started: %.300s", unit,
                       lg_err_message());
    return 0;
}

/* Who is not root needs a polkit rule. The unit waits until the board wants it. */
static int start_unit(const char *units, lg_role role, int index)
{
    char unit[UNIT_BYTES];
    unit_name(units, role, index, unit);
    if (systemctl("is-active", unit) == 0) return 0; /* anybody may ask that */
    lg_err_clear();
    if (systemctl("start", unit) < 0)
        return LG_FAIL(LG_ERR_FAILED, "systemctl start %s: %.200s", unit, lg_err_message());
    return 0;
}

static int systemd_prepare(const char *units, lg_role role, int first, int last)
{
    for (int k = first; k <= last; k++)
        if (start_unit(units, role, k) < 0)
            return LG_FAIL(LG_ERR_FAILED,
                           "%.250s: as root run `systemctl start %s-%s@{%d..%d}`, and scale again",
                           lg_err_message(), units, lg_role_name(role), first, last);
    return 0;
}

/* Where systemd has started the unit again meanwhile, what is left of that one. */
static lg_incarnation systemd_last_of(lg_board *b, lg_role role, int index, lg_incarnation last)
{
    lg_life state;
    lg_incarnation now = lg_board_life(b, role, index, &state);
    return state == LG_LIFE_DEAD ? now : last;
}

static void systemd_dismiss(const char *units, lg_role role, int index)
{
    char unit[UNIT_BYTES];
    unit_name(units, role, index, unit);
    if (systemctl("stop", unit) < 0)
        lg_err_clear(); /* then it waits in vain until the run is over */
}

static int systemd_check_standby(const lg_run *r, lg_role role)
{
    return LG_FAIL(LG_ERR_USAGE,
                   "the processes are units of systemd's, where nobody can stand by: install "
                   "the program beside lgsup and `systemctl restart '%s-%s@*'`; the same with "
                   "the former one leads back",
                   r->units, lg_role_name(role));
}

static int systemd_start_standby(const struct lg_launch *l, int spare, struct lg_launched *ret)
{
    (void)spare, (void)ret;
    return systemd_check_standby(l->run, l->role);
}

/* Who holds a run of the same units is the unit's former process or ends the run in its place
 * (commands/stop.c): waited for. From the lock on a signal waits for the loop: a stop is then ours to
 * obey, and `lgsup stop --units` relies on it. */
static int systemd_lock(lg_run *r)
{
    char units[LG_UNITS_BYTES];
    for (int64_t began_ns = lg_now_ns();;) {
        LG_TRY(lg_launcher_recorded_units(r, units));
        lg_signals_hold(true);
        int rc = lg_run_lock(r);
        if (rc != LG_ERR_BUSY || strcmp(units, r->units) ||
            lg_now_ns() - began_ns > HOLDER_S_MAX * LG_S_NS)
            return rc;
        lg_err_clear();
        lg_signals_hold(false);
        struct pollfd holder = {.fd = lg_run_holder(r->dir, NULL), .events = POLLIN};
        poll(&holder, 1, LOOK_MS);
        if (holder.fd >= 0) close(holder.fd);
    }
}

/* The slice, which all units of the run are in: a limit of lgsup's own unit says nothing of the others. */
static void systemd_run_group(const lg_run *r, const char *own, char ret[LG_PATH_BYTES])
{
    (void)r;
    lg_cgroup_parent(own, ret);
}

static void systemd_process_group(const lg_run *r, const char *own, lg_role role, int index,
                                  char ret[LG_PATH_BYTES])
{
    char slice[LG_PATH_BYTES], unit[UNIT_BYTES];
    systemd_run_group(r, own, slice);
    unit_name(r->units, role, index, unit);
    snprintf(ret, LG_PATH_BYTES, "%.3800s/%s", strcmp(slice, "/") ? slice : "", unit);
}

/* RuntimeDirectory= of the units. */
static int systemd_runtime_create(lg_run *r)
{
    LG_TRY(lg_run_runtime_use(r, getenv("RUNTIME_DIRECTORY")));
    return 0;
}

static void systemd_runtime_remove(lg_run *r)
{
    lg_run_runtime_forget(r);
}

const struct lg_launcher lg_launcher_systemd = {
    .joins_unasked = true,
    .keeper_is_service = true,
#define LG_LAUNCHER(result, function, arguments) .function = systemd_##function,
#include "supervisor/launch/launcher.def"
#undef LG_LAUNCHER
};
