/* What is done when an instance changes; see states.def.
 *
 * The first restart is immediate: the replacement is exec'd before anything is printed or counted
 * for people. A process that dies again and again before it was ready is given a little more time
 * each time, so that a passing trouble (a full disk) does not use up the restarts at once. */
#include "base/clock.h"
#include "supervisor/supervise.h"
#include "supervisor/swap.h"
#include "supervisor/units.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

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

void lg_instance_nothing(lg_supervisor *s, struct lg_instance *i)
{
    (void)s, (void)i;
}

int lg_instance_exec(const lg_supervisor *s, const struct lg_exec *e, struct lg_child *ret)
{
    char program[LG_PATH_BYTES], index[16], incarnation[16];
    const char *chosen = e->program ? e->program : lg_programs_get(&s->programs, e->role, e->index);
    if (chosen)
        LG_TRY(lg_path(program, "%s", chosen));
    else
        LG_TRY(lg_program_path(lg_role_program(e->role), program));
    snprintf(index, sizeof index, "%d", e->index);
    snprintf(incarnation, sizeof incarnation, "%" PRIu32, e->incarnation);
    char *argv[] = {program, (char *)"--run",         s->run->dir, (char *)"--index",
                    index,   (char *)"--incarnation", incarnation, NULL};
    LG_TRY(lg_child_spawn(
        &(struct lg_spawn){.program = program, .argv = argv, .log = e->log, .pass_fd = -1}, ret));
    return 0;
}

static int start_process(lg_supervisor *s, struct lg_instance *i)
{
    char log[LG_PATH_BYTES];
    LG_TRY(lg_instance_log(s, i, log));
    LG_TRY(lg_instance_exec(s, &(struct lg_exec){i->role, i->index, i->incarnation, NULL, log},
                            &i->child));
    return 0;
}

void lg_instance_spawn(lg_supervisor *s, struct lg_instance *i)
{
    struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    i->said[0] = 0;
    i->late_looks = 0;
    if (lg_run_in_units(s->run)) { /* systemd's matter: watch.c looks who comes */
        i->spawned_ns = lg_now_ns();
        return;
    }
    row->cause[0] = 0;
    i->incarnation = lg_board_enlist(s->board, i->role, i->index);
    i->spawned_ns = lg_now_ns();
    if (start_process(s, i) == 0) return;
    snprintf(i->said, sizeof i->said, "%s", lg_err_message());
    lg_err_clear();
    i->exit_code = -LG_ERR_FAILED;
    lg_board_bury(s->board, i->incarnation);
    lg_instance_raise(s, i, LG_INSTANCE_EVENT_died);
}

void lg_instance_welcome(lg_supervisor *s, struct lg_instance *i)
{
    i->early_deaths = 0;
    lg_keep_refresh(&s->keep); /* what it has created, before it can die */
}

void lg_instance_kill(lg_supervisor *s, struct lg_instance *i)
{
    char name[32];
    const lg_config *c = s->run->config;
    bool ready = atomic_load(&lg_board_row(s->board, i->role, i->index)->ready) == i->incarnation;
    lg_child_signal(&i->child, SIGKILL);
    lg_instance_name(i, name);
    if (ready)
        snprintf(i->said, sizeof i->said,
                 "it was without a heartbeat for %" PRId64 " s (supervisor.hang_s)",
                 c->supervisor_hang_s);
    else
        snprintf(i->said, sizeof i->said,
                 "it was not ready after %" PRId64 " s (supervisor.ready_s)",
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
    else if (i->exit_code < LG_EXIT_SIGNAL && lg_instance_log(s, i, log) == 0)
        lg_last_words(log, ret, bytes);
}

static bool wants_to_park(lg_supervisor *s, const struct lg_instance *i)
{
    return i->exit_code == -LG_ERR_PARKED ||
           (i->exit_code == LG_EXIT_UNKNOWN && lg_board_row(s->board, i->role, i->index)->cause[0]);
}

static void park_for(lg_supervisor *s, const struct lg_instance *i, bool asked)
{
    char name[32], why[LG_CAUSE_BYTES], how[64];
    lg_instance_name(i, name);
    lg_exit_text(i->exit_code, how, sizeof how);
    explain(s, i, why, sizeof why);
    if (asked)
        snprintf(s->cause, sizeof s->cause, "%s: %.200s", name, why);
    else
        snprintf(s->cause, sizeof s->cause,
                 "%.16s died %d times without a committed step; last: %.40s; %.90s", name,
                 s->intensity[i->role].deaths_max + 1, how, why);
    lg_run_raise(s, LG_RUN_EVENT_crash_loop);
}

/* A program that was swapped in and dies too often is taken out again before the run is parked. */
static bool go_back(lg_supervisor *s, const struct lg_instance *i)
{
    const char *now = lg_programs_get(&s->programs, i->role, i->index);
    char name[32], bad[512];
    snprintf(bad, sizeof bad, "%s", now ? now : "");
    if (!now || !lg_programs_revert(&s->programs, i->role, i->index)) return false;
    if (lg_programs_save(&s->programs) < 0)
        lg_err_clear(); /* then the next lgsup finds out again */
    s->intensity[i->role].count = 0;
    lg_instance_name(i, name);
    lg_progress_say(&s->progress, LG_WARN,
                    "%s died too often with the program %s that was swapped in: back to the former "
                    "one",
                    name, bad);
    return true;
}

static int64_t retry_delay_ns(const struct lg_instance *i)
{
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
    bool too_often = !i->excused && lg_intensity_exceeded(&s->intensity[i->role], died_ns,
                                                          lg_board_global_commit(s->board));
    i->excused = false;
    if (asked || (too_often && !go_back(s, i))) {
        park_for(s, i, asked);
        return;
    }
    i->early_deaths = atomic_load(&row->ready) == i->incarnation ? 0 : i->early_deaths + 1;
    i->retry_ns = died_ns + retry_delay_ns(i);
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
    if (i->child.pidfd < 0) { /* in units: nobody has come yet (lg_scale_adjust) */
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
    i->excused = false;
    lg_board_row(s->board, i->role, i->index)->cause[0] = 0;
    if (!lg_swap_succeed(s, i)) lg_instance_spawn(s, i);
}

void lg_instance_forget(lg_supervisor *s, struct lg_instance *i)
{
    char name[32], how[64];
    if (lg_run_in_units(s->run)) lg_units_forget(s, i);
    lg_board_vacate(s->board, i->incarnation);
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

void lg_instance_part(lg_supervisor *s, struct lg_instance *i)
{
    char name[32], how[64];
    if (i->exit_code == 0 || i->exit_code == LG_EXIT_UNKNOWN || s->step != LG_RUN_STEP_leaving)
        return;
    lg_instance_name(i, name);
    lg_exit_text(i->exit_code, how, sizeof how);
    lg_progress_say(&s->progress, LG_WARN, "%s: %s while leaving", name, how);
}
