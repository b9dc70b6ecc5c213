/* What is done when an instance changes; see states.def.
 *
 * The first restart is immediate: the replacement is exec'd before anything is printed or counted
 * for people. A process that dies again and again before it was ready is given a little more time
 * each time, so that a passing trouble (a full disk) does not use up the restarts at once. */
#include "base/clock.h"
#include "shm/commit.h"
#include "supervisor/core/keep_jobs.h"
#include "supervisor/core/launch_jobs.h"
#include "supervisor/core/supervise.h"
#include "supervisor/core/swap.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { RETRY_MS_MIN = 50, RETRY_MS_MAX = 1000, RETRY_DOUBLINGS_MAX = 5 };

void lg_instance_name(const struct lg_instance *i, char ret[32])
{
    snprintf(ret, 32, "%s.%d", lg_role_name(i->role), i->index);
}

int lg_instance_log(const lg_supervisor *s, const struct lg_instance *i, char ret[LG_PATH_BYTES])
{
    char name[32];
    lg_instance_name(i, name);
    return lg_run_path(s->run, ret, "logs/%s.log", name);
}

static bool is_ready(const lg_supervisor *s, const struct lg_instance *i)
{
    return atomic_load(&lg_board_row(s->board, i->role, i->index)->ready) == i->incarnation;
}

void lg_instance_nothing(lg_supervisor *s, struct lg_instance *i)
{
    (void)s, (void)i;
}

/* 0: there is none. */
static int64_t bytes_of(const char *log)
{
    struct stat st;
    return stat(log, &st) == 0 ? (int64_t)st.st_size : 0;
}

static int start_process(lg_supervisor *s, struct lg_instance *i)
{
    char log[LG_PATH_BYTES];
    struct lg_launched started = {.incarnation = i->incarnation, .child = LG_CHILD_NONE};
    LG_TRY(lg_instance_log(s, i, log));
    i->log_bytes = bytes_of(log);
    struct lg_launch l = {.run = s->run,
                          .board = s->board,
                          .role = i->role,
                          .index = i->index,
                          .program = lg_programs_get(&s->programs, i->role, i->index),
                          .log = log};
    int rc = s->launcher->start(&l, &started);
    if (started.incarnation) i->incarnation = started.incarnation;
    i->child = started.child;
    LG_TRY(rc);
    return 0;
}

void lg_instance_spawn(lg_supervisor *s, struct lg_instance *i)
{
    i->said[0] = 0;
    i->late_looks = 0;
    i->late = false;
    i->spawned_ns = lg_now_ns();
    if (start_process(s, i) == 0) {
        i->spawned_ns = lg_now_ns(); /* the machine may have slept meanwhile */
        return;
    }
    snprintf(i->said, sizeof i->said, "%s", lg_err_message());
    lg_err_clear();
    i->exit_code = -LG_ERR_FAILED;
    lg_instance_raise(s, i, LG_INSTANCE_EVENT_died);
}

void lg_instance_welcome(lg_supervisor *s, struct lg_instance *i)
{
    i->early_deaths = 0;
    s->copies_due = true; /* of what it has created */
}

void lg_instance_sigkill(struct lg_instance *i)
{
    if (i->child.pidfd < 0) return;
    lg_child_signal(&i->child, SIGKILL);
    if (!i->killed_ns) i->killed_ns = lg_now_ns();
}

void lg_instance_kill(lg_supervisor *s, struct lg_instance *i)
{
    char name[32];
    const lg_config *c = s->run->config;
    i->late = true;
    lg_instance_sigkill(i);
    lg_instance_name(i, name);
    if (is_ready(s, i))
        snprintf(i->said, sizeof i->said,
                 "it was without a heartbeat for %" PRId64 " s (supervisor.hang_s)",
                 c->supervisor_hang_s);
    else
        snprintf(i->said, sizeof i->said,
                 "it was not ready, and without a heartbeat for %" PRId64 " s (supervisor.ready_s)",
                 c->supervisor_ready_s);
    lg_progress_say(&s->progress, LG_WARN, "%s: killed: %s", name, i->said);
}

/* The best known reason: its own words on the board, its last error event, its log's last line. */
static void explain(lg_supervisor *s, const struct lg_instance *i, char *ret, size_t bytes)
{
    const struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    char log[LG_PATH_BYTES];
    ret[0] = 0;
    if (row->cause[0])
        snprintf(ret, bytes, "%.*s", (int)strnlen(row->cause, sizeof row->cause), row->cause);
    else if (i->said[0])
        snprintf(ret, bytes, "%s", i->said);
    else if (i->exit_code < LG_EXIT_SIGNAL && lg_instance_log(s, i, log) == 0 &&
             (!i->log_bytes || bytes_of(log) != i->log_bytes)) /* else they are its predecessor's */
        lg_last_words(log, ret, bytes);
}

static bool wants_to_park(lg_supervisor *s, const struct lg_instance *i)
{
    return i->exit_code == -LG_ERR_PARKED ||
           (i->exit_code == LG_EXIT_UNKNOWN && lg_board_row(s->board, i->role, i->index)->cause[0]);
}

/* What an instance was at, for people: the step protocol knows. */
static void doing(const lg_supervisor *s, const struct lg_instance *i, char *ret, size_t bytes)
{
    struct lg_action a = {.kind = LG_DO_WAIT};
    if (i->role == LG_ROLE_trainer) a = lg_trainer_next(s->board, i->index);
    if (i->role == LG_ROLE_ema) a = lg_ema_next(s->board);
    if (i->role == LG_ROLE_ckpt) a = lg_ckpt_next(s->board);
    if (!is_ready(s, i))
        snprintf(ret, bytes, "setting up");
    else if (a.kind == LG_DO_WRITE)
        snprintf(ret, bytes, "writing the checkpoint of step %" PRIu64, a.step);
    else if (a.kind == LG_DO_INIT)
        snprintf(ret, bytes, "reading the state of step %" PRIu64, a.step);
    else if (a.kind < LG_DO_WAIT)
        snprintf(ret, bytes, "at work for step %" PRIu64, a.step);
    else
        snprintf(ret, bytes, "at work");
}

/* Why its failures are too many: what it was at, how long the tries took, what to do. */
static void tell_failures(lg_supervisor *s, const struct lg_instance *i)
{
    const struct lg_failures *f = &i->failures;
    char name[32], at[64], took[48] = "", why[LG_CAUSE_BYTES], how[64];
    lg_instance_name(i, name);
    doing(s, i, at, sizeof at);
    if (f->count > 1 && f->longest_ns >= LG_S_NS)
        snprintf(took, sizeof took, ", each after %.0f to %.0f s", (double)f->shortest_ns / LG_S_NS,
                 (double)f->longest_ns / LG_S_NS);
    explain(s, i, why, sizeof why);
    lg_exit_text(i->exit_code, how, sizeof how);
    int n = snprintf(s->cause, sizeof s->cause,
                     "%.16s failed %d times in a row %.48s%s; last: ", name, f->count, at, took);
    if (i->late)
        snprintf(s->cause + n, sizeof s->cause - (size_t)n,
                 "%.240s; look at its disk, or raise that limit", why);
    else
        snprintf(s->cause + n, sizeof s->cause - (size_t)n, "%.40s%s%.300s", how, *why ? "; " : "",
                 why);
}

/* Which rule of intensity.h is broken. */
enum excess { NOT_TOO_OFTEN, TOO_MANY_DEATHS, TOO_MANY_FAILURES };

static enum excess count_death(lg_supervisor *s, struct lg_instance *i, int64_t died_ns)
{
    struct lg_intensity *t = &s->intensity[i->role];
    const struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    struct lg_death d = {.exit_code = i->exit_code,
                         .late = i->late,
                         .ready = is_ready(s, i),
                         .phase = (lg_phase)atomic_load(&row->phase),
                         .progress = lg_own_progress(row, i->role),
                         .lived_ns = died_ns - i->spawned_ns};
    if (i->excused) return NOT_TOO_OFTEN;
    bool deaths = lg_intensity_exceeded(t, died_ns, lg_board_global_commit(s->board));
    bool failures = lg_failures_exceeded(&i->failures, t->deaths_max, &d);
    return deaths ? TOO_MANY_DEATHS : failures ? TOO_MANY_FAILURES : NOT_TOO_OFTEN;
}

static void park_for(lg_supervisor *s, const struct lg_instance *i, enum excess excess)
{
    char name[32], why[LG_CAUSE_BYTES], how[64];
    lg_instance_name(i, name);
    lg_exit_text(i->exit_code, how, sizeof how);
    explain(s, i, why, sizeof why);
    if (excess == NOT_TOO_OFTEN) /* it asks for it */
        snprintf(s->cause, sizeof s->cause, "%s: %.470s", name, why);
    else if (excess == TOO_MANY_DEATHS)
        snprintf(s->cause, sizeof s->cause,
                 "%.16s died %d times without a committed step; last: %.40s%s%.380s", name,
                 s->intensity[i->role].deaths_max + 1, how, *why ? "; " : "", why);
    else
        tell_failures(s, i);
    lg_run_raise(s, LG_RUN_EVENT_crash_loop);
}

/* A program that was swapped in and dies too often is taken out again before the run is parked. */
static bool go_back(lg_supervisor *s, struct lg_instance *i)
{
    const char *now = lg_programs_get(&s->programs, i->role, i->index);
    char name[32], bad[512];
    snprintf(bad, sizeof bad, "%s", now ? now : "");
    if (!now || !lg_programs_revert(&s->programs, i->role, i->index)) return false;
    lg_background_save_programs(s, NULL, 0); /* unwritten, the next lgsup finds out again */
    s->intensity[i->role].count = 0;
    i->failures = (struct lg_failures){0};
    lg_instance_name(i, name);
    lg_progress_say(&s->progress, LG_WARN,
                    "%s died too often with the program %s that was swapped in: back to the former "
                    "one",
                    name, bad);
    return true;
}

static int64_t retry_delay_ns(const lg_supervisor *s, const struct lg_instance *i)
{
    if (i->excused && (s->keeper_since_ns == INT64_MAX || s->sockets_since_ns == INT64_MAX))
        return RETRY_MS_MIN * LG_MS_NS;
    if (i->early_deaths < 2) return 0;
    int doublings = LG_MIN(i->early_deaths - 2, RETRY_DOUBLINGS_MAX);
    return LG_MIN(RETRY_MS_MIN << doublings, RETRY_MS_MAX) * LG_MS_NS;
}

void lg_instance_restart(lg_supervisor *s, struct lg_instance *i)
{
    struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    int64_t died_ns = lg_now_ns();
    int exit_code = i->exit_code;
    char name[32], how[64], why[LG_CAUSE_BYTES];
    bool asked = wants_to_park(s, i);
    enum excess excess = count_death(s, i, died_ns);
    if (asked || (excess != NOT_TOO_OFTEN && !go_back(s, i))) {
        park_for(s, i, asked ? NOT_TOO_OFTEN : excess);
        return;
    }
    i->early_deaths = is_ready(s, i) ? 0 : i->early_deaths + !i->excused;
    i->retry_ns = died_ns + retry_delay_ns(s, i);
    i->excused = false;
    explain(s, i, why, sizeof why);
    atomic_fetch_add_explicit(&row->restarts, 1, memory_order_relaxed);
    if (i->retry_ns <= died_ns) lg_instance_raise(s, i, LG_INSTANCE_EVENT_start);
    lg_instance_name(i, name);
    lg_exit_text(exit_code, how, sizeof how);
    lg_progress_say(&s->progress, LG_WARN, "%s: %s%s%s; restarted", name, how, *why ? ": " : "",
                    why);
}

void lg_instance_ask(lg_supervisor *s, struct lg_instance *i)
{
    struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    if (i->child.pidfd < 0) { /* nobody has come yet (lg_scale_adjust) */
        lg_instance_raise(s, i, LG_INSTANCE_EVENT_left);
        return;
    }
    atomic_store_explicit(&row->leave, i->incarnation, memory_order_release);
    lg_control_nudge(s->control, i->role, i->index, i->incarnation);
}

void lg_instance_succeed(lg_supervisor *s, struct lg_instance *i)
{
    i->said[0] = 0;
    i->late_looks = 0;
    i->late = i->excused = false;
    lg_board_row(s->board, i->role, i->index)->cause[0] = 0;
    if (!lg_swap_succeed(s, i)) lg_instance_spawn(s, i);
}

void lg_instance_forget(lg_supervisor *s, struct lg_instance *i)
{
    char name[32], how[64];
    i->incarnation = s->launcher->last_of(s->board, i->role, i->index, i->incarnation);
    lg_board_vacate(s->board, i->incarnation);
    lg_launch_dismiss(s, i->role, i->index);
    atomic_fetch_add(&s->board->s->members_epoch, 1);
    lg_instance_name(i, name);
    lg_exit_text(i->exit_code, how, sizeof how);
    if (i->exit_code > 0)
        lg_progress_say(&s->progress, LG_WARN, "%s: %s before it could leave; its work passes on",
                        name, how);
    else
        lg_progress_say(&s->progress, LG_INFO, "%s has left", name);
}

void lg_instance_rest(lg_supervisor *s, struct lg_instance *i)
{
    (void)s, (void)i;
}

void lg_instance_depart(lg_supervisor *s, struct lg_instance *i)
{
    char name[32], how[64];
    if (i->exit_code == 0 || i->exit_code == LG_EXIT_UNKNOWN || s->step != LG_RUN_STEP_leaving)
        return;
    lg_instance_name(i, name);
    lg_exit_text(i->exit_code, how, sizeof how);
    lg_progress_say(&s->progress, LG_WARN, "%s: %s while leaving", name, how);
}
