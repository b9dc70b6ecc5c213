/* See keep_jobs.h. While the loop runs lg_keep's copies are touched by these jobs alone. */
#include "supervisor/core/keep_jobs.h"
#include "base/clock.h"
#include "supervisor/core/supervise.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

struct keep_job {
    struct lg_job job;
    lg_keep *keep;
    lg_board *board; /* replace */
    int pid, rc;     /* look: whom, and what it answered */
    bool whole, lost;
    void (*then)(lg_supervisor *s, bool whole);
    /* replace */
    int64_t given_ns;
    uint64_t run_id;
    struct lg_child child; /* the new one */
    int n_copies;
    char how[64], why[256];
    char socket[LG_PATH_BYTES]; /* move */
    int n_holders;
    int holder[]; /* pids of all that map regions */
};

static struct keep_job *make(lg_supervisor *s, void (*work)(struct lg_job *),
                             void (*done)(struct lg_job *, void *), int n_holders)
{
    struct keep_job *j = calloc(1, sizeof *j + sizeof j->holder[0] * (size_t)n_holders);
    LG_ASSERT(j);
    j->job = (struct lg_job){.work = work, .done = done};
    j->keep = &s->keep;
    j->child = LG_CHILD_NONE;
    return j;
}

/* ---- is it well? ---- */

static void look(struct lg_job *job)
{
    struct keep_job *j = (struct keep_job *)job;
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    j->rc = lg_keeper_list(j->keep->socket, LG_KEEPER_REGIONS_MAX, name, &bytes);
}

static void looked(struct lg_job *job, void *context)
{
    lg_supervisor *s = context;
    const struct keep_job *j = (struct keep_job *)job;
    s->keep_look_waits = false;
    if (j->rc != LG_ERR_TIMEOUT) return;                                /* NOTFOUND: it is well */
    if (s->keep.child.pidfd < 0 || s->keep.child.pid != j->pid) return; /* dead already */
    lg_progress_say(&s->progress, LG_WARN, "keeper: killed: it does not answer");
    s->keeper_since_ns = INT64_MAX;
    lg_child_signal(&s->keep.child, SIGKILL);
}

void lg_keep_look(lg_supervisor *s)
{
    if (s->keep_look_waits || s->keep.child.pidfd < 0) return;
    struct keep_job *j = make(s, look, looked, 0);
    j->pid = s->keep.child.pid;
    s->keep_look_waits = lg_background_give(s, LG_WORKER_keeper, &j->job);
}

/* ---- its socket is gone, or lies elsewhere ---- */

static void move(struct lg_job *job)
{
    struct keep_job *j = (struct keep_job *)job;
    snprintf(j->keep->socket, sizeof j->keep->socket, "%s", j->socket);
}

static void moved(struct lg_job *job, void *context)
{
    (void)job, (void)context;
}

void lg_keep_move(lg_supervisor *s)
{
    struct keep_job *j = make(s, move, moved, 0);
    if (lg_path(j->socket, "%s/keeper", s->run->runtime_dir) < 0 ||
        !lg_background_give(s, LG_WORKER_keeper, &j->job))
        lg_err_clear(); /* the socket stays unreachable, so it is tried again */
}

static void salvage(struct lg_job *job)
{
    struct keep_job *j = (struct keep_job *)job;
    lg_keep_salvage(j->keep, j->pid, j->run_id);
}

static void salvaged(struct lg_job *job, void *context)
{
    lg_supervisor *s = context;
    const struct keep_job *j = (struct keep_job *)job;
    if (s->keep.child.pidfd < 0 || s->keep.child.pid != j->pid) return; /* dead already */
    lg_progress_say(&s->progress, LG_WARN, "keeper: killed: its socket was removed");
    s->keeper_since_ns = INT64_MAX;
    lg_child_signal(&s->keep.child, SIGKILL);
}

void lg_keep_abandon(lg_supervisor *s)
{
    struct keep_job *j = make(s, salvage, salvaged, 0);
    j->pid = s->keep.child.pid;
    j->run_id = s->board->s->preamble.run_id;
    lg_background_give(s, LG_WORKER_keeper, &j->job);
}

/* ---- copies ---- */

static void copy(struct lg_job *job)
{
    struct keep_job *j = (struct keep_job *)job;
    char missing[LG_REGION_NAME_BYTES];
    j->rc = lg_keep_refresh(j->keep);
    snprintf(j->why, sizeof j->why, "%s", lg_err_message());
    if (j->then) j->whole = lg_keep_is_whole(j->keep, missing);
}

static bool waits_for_copies(lg_supervisor *s, const struct lg_instance *i)
{
    const struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    lg_incarnation who = atomic_load_explicit(&row->uncopied, memory_order_acquire);
    return who && who == i->incarnation;
}

/* LG_ERR_BUSY: a payload is not there yet, which is nothing to speak of. */
static void on_failed_copy(lg_supervisor *s, const struct keep_job *j)
{
    s->copies_due = true;
    if (j->rc == LG_ERR_BUSY) return;
    if (!s->copies_failed)
        lg_progress_say(&s->progress, LG_WARN,
                        "no second copy of the run's memory yet, so nobody uses it: %s", j->why);
    s->copies_failed = true;
}

static void copied(struct lg_job *job, void *context)
{
    lg_supervisor *s = context;
    const struct keep_job *j = (struct keep_job *)job;
    s->copies_asked = false;
    if (j->rc < 0) {
        on_failed_copy(s, j);
        return;
    }
    s->copies_failed = false;
    for (int i = 0; i < s->n_instances; i++)
        if (waits_for_copies(s, &s->instance[i]))
            lg_control_nudge(s->control, s->instance[i].role, s->instance[i].index,
                             s->instance[i].incarnation);
}

void lg_keep_look_at_copies(lg_supervisor *s)
{
    bool due = s->copies_due;
    for (int i = 0; i < s->n_instances; i++) due |= waits_for_copies(s, &s->instance[i]);
    if (!due || s->copies_asked || s->keep.child.pidfd < 0 || s->step >= LG_RUN_STEP_leaving)
        return;
    s->copies_asked = lg_background_give(s, LG_WORKER_keeper, &make(s, copy, copied, 0)->job);
    s->copies_due = !s->copies_asked;
}

static void asked_whole(struct lg_job *job, void *context)
{
    const struct keep_job *j = (struct keep_job *)job;
    j->then(context, j->whole);
}

void lg_keep_ask_whole(lg_supervisor *s, void (*then)(lg_supervisor *s, bool whole))
{
    struct keep_job *j = make(s, copy, asked_whole, 0);
    j->then = then;
    if (!lg_background_give(s, LG_WORKER_keeper, &j->job)) then(s, false);
}

/* ---- another ---- */

/* Only right after an adoption can there be regions in use of which we have no copy. A service comes
 * back with them. */
static bool lacks_memory(struct keep_job *j)
{
    const lg_keep *k = j->keep;
    char missing[LG_REGION_NAME_BYTES] = "";
    if (k->service || k->complete || lg_keep_is_whole(k, missing)) return false;
    snprintf(j->why, sizeof j->why,
             "memory of this run is lost: the keeper has died and region %s is in nobody's hands",
             missing);
    return true;
}

static void start_another(struct lg_job *job)
{
    struct keep_job *j = (struct keep_job *)job;
    for (int i = 0; i < j->n_holders; i++) lg_keep_salvage(j->keep, j->holder[i], j->run_id);
    j->n_copies = j->keep->n_copies;
    j->lost = lacks_memory(j);
    if (j->lost) return;
    for (int i = 0; i < LG_KEEP_STARTS_MAX; i++) {
        j->rc = lg_keep_launch(j->keep, j->board, false, &j->child);
        if (j->rc == 0) return;
        snprintf(j->why, sizeof j->why, "%s", lg_err_message());
    }
}

static void give_up(lg_supervisor *s, const char *why)
{
    if (s->step >= LG_RUN_STEP_leaving) return; /* which has its own cause */
    snprintf(s->cause, sizeof s->cause, "%.250s", why);
    lg_run_raise(s, LG_RUN_EVENT_crash_loop);
}

static void started_another(struct lg_job *job, void *context)
{
    lg_supervisor *s = context;
    const struct keep_job *j = (struct keep_job *)job;
    char why[300];
    if (j->lost) {
        s->keep.lost = true;
        give_up(s, j->why);
    } else if (j->rc < 0 && lg_sockets_were_lost(s, j->given_ns) && !s->sockets_failed) {
        lg_sockets_look(s); /* it had no directory to listen in */
        lg_keep_replace(s, j->how);
    } else if (j->rc < 0) {
        snprintf(why, sizeof why, "the keeper cannot be restarted: %.200s", j->why);
        give_up(s, why);
    } else {
        lg_keep_enter(&s->keep, s->board, &j->child);
        s->keeper_since_ns = lg_now_ns();
        s->copies_due = true;
        lg_progress_say(&s->progress, LG_WARN, "keeper: %s; restarted with %d regions", j->how,
                        j->n_copies);
    }
}

void lg_keep_replace(lg_supervisor *s, const char *how)
{
    struct keep_job *j = make(s, start_another, started_another, s->n_instances);
    s->keeper_since_ns = INT64_MAX;
    j->given_ns = lg_now_ns();
    j->board = s->board;
    j->run_id = s->board->s->preamble.run_id;
    snprintf(j->how, sizeof j->how, "%s", how);
    for (int i = 0; i < s->n_instances; i++)
        if (s->instance[i].child.pidfd >= 0) j->holder[j->n_holders++] = s->instance[i].child.pid;
    if (lg_background_give(s, LG_WORKER_keeper, &j->job)) return;
    give_up(s, "the keeper cannot be restarted: too much waits for it");
}
