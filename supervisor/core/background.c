/* See background.h. */
#include "supervisor/core/background.h"
#include "supervisor/core/supervise.h"
#include "supervisor/views/status.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static const struct {
    const char *name;
    int jobs_max, patience_ms;
} kinds[LG_WORKER_COUNT] = {
#define X(name, jobs_max, patience_ms) [LG_WORKER_##name] = {"lg-" #name, jobs_max, patience_ms},
    LG_WORKERS(X)
#undef X
};

int lg_background_open(struct lg_background *b)
{
    *b = (struct lg_background){.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (b->wake_fd < 0) return LG_FAIL(LG_ERR_IO, "eventfd: %s", strerror(errno));
    for (int k = 0; k < LG_WORKER_COUNT; k++)
        LG_TRY(lg_worker_open(&(struct lg_worker_spec){.name = kinds[k].name,
                                                       .jobs_max = kinds[k].jobs_max,
                                                       .wake_fd = b->wake_fd},
                              &b->worker[k]));
    return 0;
}

bool lg_background_give(lg_supervisor *s, lg_worker_kind which, struct lg_job *job)
{
    return lg_worker_give(s->background.worker[which], job);
}

bool lg_background_is_idle(const lg_supervisor *s, lg_worker_kind which)
{
    return lg_worker_is_idle(s->background.worker[which]);
}

void lg_background_collect(lg_supervisor *s)
{
    eventfd_t n;
    if (eventfd_read(s->background.wake_fd, &n) < 0) n = 0; /* nothing has been raised */
    for (int k = 0; k < LG_WORKER_COUNT; k++) lg_worker_collect(s->background.worker[k], s);
}

bool lg_background_finish(lg_supervisor *s, lg_worker_kind which)
{
    bool idle;
    do {
        idle = lg_worker_wait(s->background.worker[which], kinds[which].patience_ms);
        if (idle) lg_worker_collect(s->background.worker[which], s); /* which may give more */
    } while (idle && !lg_background_is_idle(s, which));
    return idle;
}

bool lg_background_close(struct lg_background *b)
{
    bool all = true;
    for (int k = 0; k < LG_WORKER_COUNT; k++)
        all = lg_worker_close(&b->worker[k], kinds[k].patience_ms) && all;
    if (b->wake_fd >= 0) close(b->wake_fd);
    b->wake_fd = -1;
    return all;
}

/* ---- the status ---- */

struct status_job {
    struct lg_job job;
    char dir[LG_PATH_BYTES];
};

/* With a board of its own, which stays when the supervisor closes its. */
static void save_status(struct lg_job *job)
{
    const struct status_job *j = (struct status_job *)job;
    char path[LG_PATH_BYTES];
    lg_board *b = NULL;
    if (lg_path(path, "%s/board", j->dir) < 0 || lg_board_open(path, 0, &b) < 0) return;
    lg_status_save(j->dir, b);
    lg_board_close(&b);
}

void lg_background_save_status(lg_supervisor *s)
{
    struct status_job *j = calloc(1, sizeof *j);
    if (!j) return; /* the next time, in some seconds */
    j->job.work = save_status;
    j->job.latest = true;
    snprintf(j->dir, sizeof j->dir, "%s", s->run->dir);
    lg_background_give(s, LG_WORKER_disk, &j->job);
}

/* ---- files ---- */

struct publish_job {
    struct lg_job job;
    struct lg_publication file;
    int rc;
    char why[256];
};

static void publish(struct lg_job *job)
{
    struct publish_job *j = (struct publish_job *)job;
    j->rc = j->file.text ? lg_publish_file(j->file.path, j->file.text, j->file.bytes)
                         : LG_FAIL(LG_ERR_NOSPACE, "no memory to write %s", j->file.path);
    snprintf(j->why, sizeof j->why, "%s", lg_err_message());
}

static void published(struct lg_job *job, void *context)
{
    lg_supervisor *s = context;
    const struct publish_job *j = (struct publish_job *)job;
    if (j->file.then)
        j->file.then(s, j->file.tag, j->rc, j->why);
    else if (j->rc < 0)
        lg_progress_say(&s->progress, LG_WARN, "%s", j->why);
}

static void release(struct lg_job *job)
{
    free(((struct publish_job *)job)->file.text);
    free(job);
}

void lg_background_publish(lg_supervisor *s, const struct lg_publication *p)
{
    struct publish_job *j = calloc(1, sizeof *j);
    LG_ASSERT(j);
    j->job = (struct lg_job){.work = publish, .done = published, .release = release};
    j->file = *p;
    if (lg_background_give(s, LG_WORKER_disk, &j->job)) return;
    if (p->then)
        p->then(s, p->tag, LG_ERR_BUSY, "the disk does not take any more");
    else
        lg_progress_say(&s->progress, LG_WARN, "the disk does not take %s any more", p->path);
}

void lg_background_save_programs(lg_supervisor *s,
                                 void (*then)(lg_supervisor *, uint64_t, int, const char *),
                                 uint64_t tag)
{
    struct lg_publication p = {.then = then, .tag = tag};
    snprintf(p.path, sizeof p.path, "%s", s->programs.file);
    p.text = lg_programs_text(&s->programs, &p.bytes);
    lg_background_publish(s, &p);
}
