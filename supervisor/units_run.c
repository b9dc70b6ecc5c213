/* lgsup's and a role's life under systemd; see units.h.
 *
 * Who gives out incarnations: systemd runs one process of a unit at a time, and starts the next when
 * the former is gone. So `lgsup role` may do here what lgsup does elsewhere (board.h, rule 2): bury
 * the former one, when the kernel says that it is dead, and enlist the next. Counters come from the
 * board, so no incarnation is ever given twice. It needs no lgsup for that: a stage that dies while
 * lgsup is away comes back all the same.
 *
 * Leaving an old board for a new one: lgsup stores a final run_state, then buries and kills whom the
 * rows name; `lgsup role` enlists, then looks at run_state. With a full fence on both sides at least
 * one of them sees the other, so nobody is left on a board that has been given up. The same with
 * `wanted` when it is scaled down; who enlists just before is found as a stray (scale.c). */
#include "base/clock.h"
#include "base/log.h"
#include "shm/board.h"
#include "shm/keeper.h"
#include "supervisor/supervise.h"
#include "supervisor/units.h"
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LOOK_MS = 20,
    ORPHAN_S_MAX = 60,
    ASK_AFTER_MS = 1000,
    ASK_AGAIN_MS = 30000,
    SYSTEMCTL_BYTES_MAX = 1 << 16,
    UNIT_BYTES = LG_UNITS_BYTES + 48
};
#define SYSTEMCTL "/usr/bin/systemctl"

/* ---- a role ---- */

struct seat {
    lg_role role;
    int index;
    const char *dir, *runtime;
    char board[LG_PATH_BYTES], runtime_record[LG_PATH_BYTES], keeper[LG_PATH_BYTES];
};

static int take_seat(const char *role, const char *index, const char *dir, struct seat *ret)
{
    char *end;
    int r = lg_role_find(role);
    long k = strtol(index, &end, 10);
    if (r < 0 || r >= LG_ROLE_keeper)
        return LG_FAIL(LG_ERR_USAGE, "there is no role %s that stages have", role);
    if (!*index || *end || k < 0 || k >= LG_INSTANCES_MAX)
        return LG_FAIL(LG_ERR_USAGE, "an instance is a number from 0 to %d, not %s",
                       LG_INSTANCES_MAX - 1, index);
    *ret = (struct seat){.role = (lg_role)r, .index = (int)k, .dir = dir};
    ret->runtime = getenv("RUNTIME_DIRECTORY");
    if (!ret->runtime)
        return LG_FAIL(LG_ERR_USAGE, "lgsup role is for the units that `lgsup units` writes: "
                                     "RUNTIME_DIRECTORY is not set");
    LG_TRY(lg_path(ret->board, "%s/board", dir));
    LG_TRY(lg_path(ret->runtime_record, "%s/runtime", dir));
    LG_TRY(lg_path(ret->keeper, "%s/keeper", ret->runtime));
    return 0;
}

/* Is the run on this board one that goes on, here? */
static bool is_open(const struct seat *seat, lg_board *b)
{
    char runtime[LG_PATH_BYTES];
    int pid;
    return atomic_load(&b->s->run_state) < LG_RUN_DONE && !atomic_load(&b->s->quit) &&
           (uint32_t)seat->index < atomic_load(&b->s->wanted[seat->role]) &&
           atomic_load(&lg_board_row(b, LG_ROLE_keeper, 0)->ready) &&
           lg_read_line(seat->runtime_record, runtime, sizeof runtime) == 0 &&
           !strcmp(runtime, seat->runtime) && lg_path_exists(seat->keeper) &&
           lg_keeper_pid(seat->keeper, &pid) == 0;
}

/* The row's former process: gone, and buried? A STARTING row is our unit's last attempt, or lgsup's
 * of a time before the units. */
static bool bury_former(const struct seat *seat, lg_board *b)
{
    lg_life state;
    lg_incarnation former = lg_board_life(b, seat->role, seat->index, &state);
    if (state == LG_LIFE_NONE || state == LG_LIFE_DEAD) return true;
    if (state == LG_LIFE_RUNNING && !lg_board_is_dead(b, former)) return false;
    lg_board_bury(b, former);
    return true;
}

/* 0 when there is nothing to join (yet). */
static lg_incarnation enlist(const struct seat *seat)
{
    lg_board *b = NULL;
    lg_incarnation me = 0;
    if (lg_path_exists(seat->board) && lg_board_open(seat->board, 0, &b) == 0 && is_open(seat, b) &&
        bury_former(seat, b)) {
        lg_board_row(b, seat->role, seat->index)->cause[0] = 0;
        me = lg_board_enlist(b, seat->role, seat->index);
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load(&b->s->run_state) >= LG_RUN_DONE ||
            (uint32_t)seat->index >= atomic_load(&b->s->wanted[seat->role])) {
            lg_board_bury(b, me);
            me = 0;
        }
    }
    lg_board_close(&b);
    lg_err_clear();
    return me;
}

/* stdout and stderr to the role's own log, as lgsup's children have them. */
static void open_log(const struct seat *seat)
{
    char path[LG_PATH_BYTES];
    if (lg_path(path, "%s/logs/%s.%d.log", seat->dir, lg_role_name(seat->role), seat->index) < 0)
        return;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0) return; /* then the journal has it */
    dup2(fd, 1);
    dup2(fd, 2);
    close(fd);
}

static int become(const struct seat *seat, lg_incarnation me)
{
    char program[LG_PATH_BYTES], index[16], incarnation[16];
    LG_TRY(lg_program_path(lg_role_program(seat->role), program));
    snprintf(index, sizeof index, "%d", seat->index);
    snprintf(incarnation, sizeof incarnation, "%" PRIu32, me);
    open_log(seat);
    execl(program, program, "--run", seat->dir, "--index", index, "--incarnation", incarnation,
          NULL);
    return LG_FAIL(LG_ERR_IO, "cannot run %s: %s", program, strerror(errno));
}

static bool has_lgsup(const char *dir)
{
    int pidfd = lg_run_holder(dir, NULL);
    if (pidfd >= 0) close(pidfd);
    return pidfd >= 0;
}

int lg_units_role(const char *role, const char *index, const char *dir)
{
    struct seat seat;
    LG_TRY(take_seat(role, index, dir, &seat));
    int64_t supervised_ns = lg_now_ns();
    while (lg_now_ns() - supervised_ns < ORPHAN_S_MAX * LG_S_NS) {
        lg_incarnation me = enlist(&seat);
        if (me) LG_TRY(become(&seat, me));
        if (has_lgsup(dir)) supervised_ns = lg_now_ns();
        poll(NULL, 0, LOOK_MS);
    }
    return 0;
}

/* ---- lgsup ---- */

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
    if (lg_child_capture(SYSTEMCTL, argv, SYSTEMCTL_BYTES_MAX, &text, &code) < 0) {
        lg_log_error("cannot ask systemd why it ends lgsup: the run is stopped");
        return false;
    }
    bool has = false;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        has |= is_job(line, unit, type) || is_job(line, unit, other);
    free(text);
    return has;
}

static void lgsup_unit(const lg_run *r, char ret[UNIT_BYTES])
{
    snprintf(ret, UNIT_BYTES, "%ssup.service", r->units);
}

bool lg_units_is_restart(const lg_run *r)
{
    char unit[UNIT_BYTES];
    if (!lg_run_in_units(r)) return false;
    lgsup_unit(r, unit);
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
    lgsup_unit(r, unit);
    char *argv[] = {(char *)"systemctl",      (char *)"show", (char *)"--property=ActiveState",
                    (char *)"--property=Job", unit,           NULL};
    if (lg_child_capture(SYSTEMCTL, argv, SYSTEMCTL_BYTES_MAX, &text, &code) < 0) {
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

static void unit_name(const lg_run *r, lg_role role, int index, char ret[UNIT_BYTES])
{
    snprintf(ret, UNIT_BYTES, "%s-%s@%d.service", r->units, lg_role_name(role), index);
}

/* Fails with systemctl's first line. */
static int systemctl(const char *verb, char *unit)
{
    char *text = NULL;
    int code = 0;
    char *argv[] = {(char *)"systemctl", (char *)verb, (char *)"--no-block", unit, NULL};
    LG_TRY(lg_child_capture(SYSTEMCTL, argv, SYSTEMCTL_BYTES_MAX, &text, &code));
    int rc = code ? LG_FAIL(LG_ERR_FAILED, "%.200s", first_line(text)) : 0;
    free(text);
    return rc;
}

/* For a unit that nobody starts: one that was not in the plan when the units were written, or that
 * ended well although the run goes on. */
static void ask_systemd(lg_supervisor *s, const struct lg_instance *i)
{
    char unit[UNIT_BYTES];
    unit_name(s->run, i->role, i->index, unit);
    if (systemctl("start", unit) < 0)
        lg_progress_say(&s->progress, LG_WARN, "%s is not running and cannot be started: %.300s",
                        unit, lg_err_message());
    lg_err_clear();
}

int lg_units_start(const lg_run *r, lg_role role, int index)
{
    char unit[UNIT_BYTES];
    unit_name(r, role, index, unit);
    if (systemctl("is-active", unit) == 0) return 0; /* anybody may ask that */
    lg_err_clear();
    if (systemctl("start", unit) < 0)
        return LG_FAIL(LG_ERR_FAILED, "systemctl start %s: %.200s", unit, lg_err_message());
    return 0;
}

void lg_units_forget(lg_supervisor *s, struct lg_instance *i)
{
    char unit[UNIT_BYTES];
    lg_life state;
    lg_incarnation now = lg_board_life(s->board, i->role, i->index, &state);
    if (state == LG_LIFE_DEAD) i->incarnation = now;
    unit_name(s->run, i->role, i->index, unit);
    if (systemctl("stop", unit) < 0)
        lg_err_clear(); /* then it waits in vain until the run is over */
}

/* It came and died between two looks. */
static void was_lost(lg_supervisor *s, struct lg_instance *i, lg_incarnation who)
{
    i->unborn = 0;
    i->incarnation = who;
    i->exit_code = LG_EXIT_UNKNOWN;
    lg_instance_raise(s, i, LG_INSTANCE_EVENT_died);
}

void lg_units_look(lg_supervisor *s, struct lg_instance *i, int64_t now_ns)
{
    struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    lg_life state;
    lg_incarnation now = lg_board_life(s->board, i->role, i->index, &state);
    if (state == LG_LIFE_RUNNING) {
        int pid = (int)atomic_load(&row->pid);
        int pidfd = pid ? lg_board_pidfd(s->board, i->role, i->index) : -1;
        i->unborn = 0;
        if (pidfd >= 0) {
            i->child = (struct lg_child){.pid = pid, .pidfd = pidfd};
            i->incarnation = now;
            i->spawned_ns = now_ns;
        } else if (lg_board_is_dead(s->board, now)) {
            lg_board_bury(s->board, now);
            was_lost(s, i, now);
        }
        return;
    }
    if (i->unborn && i->unborn != now) { /* it ended before it could join */
        was_lost(s, i, i->unborn);
        return;
    }
    if (state == LG_LIFE_STARTING) {
        i->unborn = now;
        i->spawned_ns = now_ns;
        return;
    }
    if (now_ns - i->spawned_ns < ASK_AFTER_MS * LG_MS_NS) return;
    i->spawned_ns = now_ns + (ASK_AGAIN_MS - ASK_AFTER_MS) * LG_MS_NS;
    ask_systemd(s, i);
}
