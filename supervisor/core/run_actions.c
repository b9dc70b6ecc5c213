/* What is done when the run changes; see states.def. */
#include "base/clock.h"
#include "shm/commit.h"
#include "supervisor/core/keep_jobs.h"
#include "supervisor/core/park.h"
#include "supervisor/core/supervise.h"
#include "supervisor/views/status.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

enum { LEAVE_MS_MAX = 10000, EXIT_INTERRUPTED = 130 };

static void set_run_state(lg_supervisor *s, lg_run_state state)
{
    atomic_store(&s->board->s->run_state, state);
    lg_background_save_status(s);
}

void lg_run_announce(lg_supervisor *s)
{
    if (s->step == LG_RUN_STEP_running) set_run_state(s, LG_RUN_RUNNING);
    lg_progress_say(&s->progress, LG_INFO, "every role is ready");
    if (s->ready_fd < 0) return;
    char byte = 0;
    ssize_t ignored = write(s->ready_fd, &byte, 1);
    (void)ignored;
}

/* The word that the ranks obey comes first: whoever finds it, wherever we have died, completes the
 * rest (lg_adopt_instances). It is also the whole action when a run that drains is told to stop. */
void lg_run_drain_again(lg_supervisor *s)
{
    atomic_store(&s->board->s->drain, 1);
    lg_nudge_all(s);
    if (atomic_load(&s->board->s->run_state) != LG_RUN_DRAINING) set_run_state(s, LG_RUN_DRAINING);
}

void lg_run_drain(lg_supervisor *s)
{
    lg_run_drain_again(s);
    lg_progress_say(
        &s->progress, LG_INFO,
        "stopping: the step in flight is finished and a checkpoint published (interrupt "
        "again to kill)");
}

static void tell_to_leave(lg_supervisor *s)
{
    s->leave_by_ns = lg_now_ns() + LEAVE_MS_MAX * LG_MS_NS;
    atomic_store(&s->board->s->quit, 1);
    for (int i = 0; i < s->n_instances; i++)
        lg_instance_raise(s, &s->instance[i], LG_INSTANCE_EVENT_leave);
}

static void kill_all(lg_supervisor *s)
{
    tell_to_leave(s);
    for (int i = 0; i < s->n_instances; i++) lg_instance_sigkill(&s->instance[i]);
}

void lg_run_leave(lg_supervisor *s)
{
    uint64_t final = 0;
    lg_commit_final(s->board, &final);
    s->outcome = final >= s->board->s->max_steps ? LG_RUN_DONE : LG_RUN_STOPPED;
    tell_to_leave(s);
    lg_nudge_all(s);
}

void lg_run_hurry(lg_supervisor *s)
{
    for (int i = 0; i < s->n_instances; i++) {
        struct lg_instance *p = &s->instance[i];
        char name[32];
        if (p->child.pidfd < 0) continue;
        lg_instance_name(p, name);
        lg_progress_say(&s->progress, LG_WARN, "%s was told to leave and is still there: killed",
                        name);
    }
    kill_all(s);
}

/* On the board before anybody is killed: should lgsup die meanwhile, the next one must not take what
 * is left for a run that goes on or has ended well. */
static void end_as(lg_supervisor *s, lg_run_state outcome, int exit_code)
{
    s->outcome = outcome;
    s->exit_code = exit_code;
    snprintf(s->board->s->cause, sizeof s->board->s->cause, "%s", s->cause);
    set_run_state(s, outcome);
}

void lg_run_kill(lg_supervisor *s)
{
    snprintf(s->cause, sizeof s->cause, "killed by a second interrupt");
    end_as(s, LG_RUN_FAILED, EXIT_INTERRUPTED);
    kill_all(s);
}

/* The keeper has answered. It is asked beside the killing, and said to have the memory only now: should
 * lgsup die before, the next start goes on from a checkpoint. */
static void on_memory(lg_supervisor *s, bool whole)
{
    s->asks_keeper = false;
    s->keeps_memory = whole && s->keep.child.pidfd >= 0;
    atomic_store(&s->board->s->memory_kept, s->keeps_memory);
    if (s->keeps_memory)
        lg_progress_say(&s->progress, LG_ERROR,
                        "memory is kept: remove the cause, then `lgsup start` goes on from step "
                        "%" PRIu64 "; `lgsup stop` lets the memory go, and a start then goes on "
                        "from the newest checkpoint",
                        lg_status_step(s->board));
    else
        lg_progress_say(&s->progress, LG_ERROR,
                        "%s`lgsup start` goes on from the newest checkpoint",
                        lg_park_is_lost(&s->keep, s->board) ? "" : "remove the cause, then ");
}

void lg_run_park(lg_supervisor *s)
{
    atomic_store(&s->board->s->memory_kept, 0);
    /* A start on another data set than the checkpoint's is refused like any other that would change the
     * result; only a loader could say so. */
    bool refused = atomic_load(&s->board->s->data.changed) &&
                   lg_status_step(s->board) <= s->board->s->start_step;
    end_as(s, LG_RUN_PARKED, refused ? -LG_ERR_MISMATCH : -LG_ERR_PARKED);
    lg_progress_say(&s->progress, LG_ERROR, "parked: %s", s->cause);
    kill_all(s);
    s->asks_keeper = lg_park_may_keep(&s->keep, s->board);
    if (s->asks_keeper)
        lg_keep_ask_whole(s, on_memory);
    else
        on_memory(s, false);
}

/* Its state is older than the others', or will be: when it comes again it takes theirs. */
void lg_run_lose(lg_supervisor *s)
{
    end_as(s, LG_RUN_FAILED, -LG_ERR_BUSY);
    lg_progress_say(&s->progress, LG_ERROR, "%s; `lgsup start` joins them again", s->cause);
    kill_all(s);
}

void lg_run_finish(lg_supervisor *s)
{
    (void)s; /* the loop ends with the state */
}
