/* See launch_jobs.h. */
#include "supervisor/core/launch_jobs.h"
#include "supervisor/core/supervise.h"
#include "supervisor/run/gpus.h"
#include <stdio.h>
#include <stdlib.h>

struct launch_job {
    struct lg_job job;
    const struct lg_launcher *launcher;
    char units[LG_UNITS_BYTES];
    lg_role role;
    int index; /* request, dismiss */
    struct lg_launch_order order;
    char dir[LG_PATH_BYTES]; /* of the run: ask_gpus */
    int64_t came_ns;
    void (*on_signal)(lg_supervisor *, bool restart, int64_t came_ns);
    bool restart;
    int rc;
    char why[512];
};

static struct launch_job *make(const lg_supervisor *s, void (*work)(struct lg_job *),
                               void (*done)(struct lg_job *, void *))
{
    struct launch_job *j = calloc(1, sizeof *j);
    LG_ASSERT(j);
    j->job = (struct lg_job){.work = work, .done = done};
    j->launcher = s->launcher;
    snprintf(j->units, sizeof j->units, "%s", s->run->units);
    return j;
}

static void keep_result(struct launch_job *j, int rc)
{
    j->rc = rc;
    if (rc < 0) snprintf(j->why, sizeof j->why, "%s", lg_err_message());
    lg_err_clear();
}

static void request(struct lg_job *job)
{
    struct launch_job *j = (struct launch_job *)job;
    keep_result(j, j->launcher->request(j->units, j->role, j->index));
}

static void requested(struct lg_job *job, void *context)
{
    lg_supervisor *s = context;
    const struct launch_job *j = (struct launch_job *)job;
    if (j->rc < 0) lg_progress_say(&s->progress, LG_WARN, "%s", j->why);
}

static void prepare(struct lg_job *job)
{
    struct launch_job *j = (struct launch_job *)job;
    const struct lg_launch_order *o = &j->order;
    keep_result(j, j->launcher->prepare(j->units, o->role, o->first, o->n - 1));
}

static void prepared(struct lg_job *job, void *context)
{
    const struct launch_job *j = (struct launch_job *)job;
    j->order.then(context, &j->order, j->rc, j->why);
}

static void give_order(lg_supervisor *s, lg_worker_kind which, struct launch_job *j,
                       const struct lg_launch_order *o, const char *why_not)
{
    j->order = *o;
    if (!lg_background_give(s, which, &j->job)) o->then(s, o, LG_ERR_BUSY, why_not);
}

/* Config and plan are read again: a job owns what it works with. */
static void ask_gpus(struct lg_job *job)
{
    struct launch_job *j = (struct launch_job *)job;
    lg_run *r = malloc(sizeof *r);
    LG_ASSERT(r);
    lg_run_init(r, j->dir);
    int rc = lg_run_load(r);
    if (rc == 0) rc = lg_run_gpus_scale(r, j->order.role, j->order.n);
    keep_result(j, rc);
    lg_run_close(r);
    free(r);
}

static void asked_gpus(struct lg_job *job, void *context)
{
    const struct launch_job *j = (struct launch_job *)job;
    if (j->rc < 0)
        j->order.then(context, &j->order, j->rc, j->why);
    else
        give_order(context, LG_WORKER_launcher, make(context, prepare, prepared), &j->order,
                   "systemd does not take any more");
}

void lg_launch_prepare(lg_supervisor *s, const struct lg_launch_order *o)
{
    const bool asks =
        o->n > o->first && lg_run_gpus_are_new(s->run->config, &s->run->plan, o->role, o->n);
    struct launch_job *j = asks ? make(s, ask_gpus, asked_gpus) : make(s, prepare, prepared);
    if (asks) snprintf(j->dir, sizeof j->dir, "%s", s->run->dir);
    give_order(s, asks ? LG_WORKER_gpus : LG_WORKER_launcher, j, o,
               asks ? "lg-device does not answer" : "systemd does not take any more");
}

static void dismiss(struct lg_job *job)
{
    struct launch_job *j = (struct launch_job *)job;
    j->launcher->dismiss(j->units, j->role, j->index);
}

static void give_of(lg_supervisor *s, struct launch_job *j, lg_role role, int index)
{
    j->role = role;
    j->index = index;
    lg_background_give(s, LG_WORKER_launcher, &j->job);
}

void lg_launch_request(lg_supervisor *s, lg_role role, int index)
{
    give_of(s, make(s, request, requested), role, index);
}

void lg_launch_dismiss(lg_supervisor *s, lg_role role, int index)
{
    give_of(s, make(s, dismiss, NULL), role, index);
}

static void ask_restart(struct lg_job *job)
{
    struct launch_job *j = (struct launch_job *)job;
    j->restart = j->launcher->is_restart(j->units);
}

static void asked_restart(struct lg_job *job, void *context)
{
    const struct launch_job *j = (struct launch_job *)job;
    j->on_signal(context, j->restart, j->came_ns);
}

void lg_launch_ask_restart(lg_supervisor *s, int64_t came_ns,
                           void (*then)(lg_supervisor *, bool, int64_t))
{
    struct launch_job *j = make(s, ask_restart, asked_restart);
    j->came_ns = came_ns;
    j->on_signal = then;
    if (!lg_background_give(s, LG_WORKER_launcher, &j->job)) then(s, false, came_ns);
}
