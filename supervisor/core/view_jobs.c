/* See view_jobs.h. */
#include "supervisor/core/view_jobs.h"
#include "base/clock.h"
#include "supervisor/core/supervise.h"
#include <stdlib.h>

enum { LOOK_MS = 250 };

struct look_job {
    struct lg_job job;
    lg_extras *extras;
    struct lg_news news;
};

static void look(struct lg_job *job)
{
    struct look_job *j = (struct look_job *)job;
    lg_extras_look(j->extras, &j->news);
}

static void looked(struct lg_job *job, void *context)
{
    lg_supervisor *s = context;
    const struct look_job *j = (struct look_job *)job;
    s->view_waits = false;
    for (int i = 0; i < j->news.n; i++)
        lg_progress_say(&s->progress, j->news.item[i].level, "%s", j->news.item[i].text);
}

static void end(struct lg_job *job)
{
    lg_extras_close(((struct look_job *)job)->extras);
}

static bool give(lg_supervisor *s, void (*work)(struct lg_job *),
                 void (*done)(struct lg_job *, void *))
{
    struct look_job *j = calloc(1, sizeof *j);
    if (!j) return false;
    j->job.work = work;
    j->job.done = done;
    j->extras = s->extras;
    return lg_background_give(s, LG_WORKER_views, &j->job);
}

int lg_views_poll(const lg_supervisor *s, struct pollfd ret[LG_EXTRAS_FDS_MAX])
{
    return s->extras && !s->view_waits ? lg_extras_poll(s->extras, ret) : 0;
}

void lg_views_look(lg_supervisor *s, bool something_came)
{
    int64_t now_ns = lg_now_ns();
    if (s->view_waits || (now_ns < s->next_view_ns && !something_came)) return;
    if (!s->extras && lg_extras_are_wanted(s->run->config)) s->extras = lg_extras_make(s->run->dir);
    if (!s->extras) return;
    s->next_view_ns = now_ns + LOOK_MS * LG_MS_NS;
    s->view_waits = give(s, look, looked);
}

void lg_views_close(lg_supervisor *s)
{
    if (!s->extras) return;
    give(s, end, NULL);
    s->extras = NULL;
    s->view_waits = true; /* no more of them */
    lg_background_finish(s, LG_WORKER_views);
}
