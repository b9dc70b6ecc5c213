/* The directory of the sockets was removed under a living run (a session's end clears /run/user/UID, say).
 *
 * Connections that stand go on; nobody new can connect. Once a second lgsup looks whether the files are
 * there, and makes again what is not: the directory (at another path where its parent is gone, too), its
 * own socket, the keeper (a new one, filled from our copies, as after a death) and, by a word on the
 * board, the stages' (stages/stage.c). */
#include "base/clock.h"
#include "base/log.h"
#include "bus/wake.h"
#include "supervisor/core/keep_jobs.h"
#include "supervisor/core/supervise.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SOCKETS_LOOK_MS = 1000, KEEPER_LOOKS = 2 };

static bool is_there(const lg_supervisor *s, const char *name)
{
    char path[LG_PATH_BYTES];
    return lg_path(path, "%s/%s", s->run->runtime_dir, name) < 0 || lg_path_exists(path);
}

struct restore_job {
    struct lg_job job;
    lg_run run; /* of ours its directories alone */
    bool may_move;
    int rc;
    char why[256];
};

static void restore(struct lg_job *job)
{
    struct restore_job *j = (struct restore_job *)job;
    j->rc = lg_run_runtime_restore(&j->run, j->may_move);
    if (j->rc < 0) snprintf(j->why, sizeof j->why, "%s", lg_err_message());
    lg_err_clear();
}

static void restored(struct lg_job *job, void *context)
{
    lg_supervisor *s = context;
    struct restore_job *j = (struct restore_job *)job;
    s->sockets_wait = false;
    if (j->rc == 0) {
        memcpy(s->run->runtime_dir, j->run.runtime_dir, sizeof s->run->runtime_dir);
        lg_keep_move(s);
        j->rc = lg_control_listen_again(s->control, s->run->runtime_dir);
        if (j->rc < 0) snprintf(j->why, sizeof j->why, "%s", lg_err_message());
    }
    if (j->rc == 0) s->last_sockets_look_ns = 0; /* are the others there? */
    if (j->rc == 0)
        lg_progress_say(&s->progress, LG_WARN,
                        "the directory of the sockets was removed: made again at %s",
                        s->run->runtime_dir);
    else if (!s->sockets_failed)
        lg_progress_say(&s->progress, LG_ERROR, "%s; the run goes on, but nobody can join it",
                        j->why);
    s->sockets_failed = j->rc < 0;
    lg_err_clear();
}

/* The directory is the keeper's as well, so its worker makes it, before it starts another keeper. */
static void restore_own(lg_supervisor *s)
{
    if (s->sockets_wait) return;
    struct restore_job *j = calloc(1, sizeof *j);
    LG_ASSERT(j);
    j->job = (struct lg_job){.work = restore, .done = restored};
    j->run.lock_fd = -1;
    memcpy(j->run.dir, s->run->dir, sizeof j->run.dir);
    memcpy(j->run.runtime_dir, s->run->runtime_dir, sizeof j->run.runtime_dir);
    j->may_move = !s->launcher->keeper_is_service;
    s->sockets_wait = lg_background_give(s, LG_WORKER_keeper, &j->job);
}

/* Another one knows all that the old one knew; who maps memory deposits it there as well. */
static void look_at_keeper(lg_supervisor *s)
{
    bool missing = s->keep.child.pidfd >= 0 && !is_there(s, "keeper");
    s->sockets_missing = missing ? s->sockets_missing + 1 : 0;
    if (s->sockets_missing < KEEPER_LOOKS || s->sockets_wait || s->sockets_failed) return;
    s->sockets_missing = 0;
    lg_keep_abandon(s);
}

static bool lacks_wakes(const lg_supervisor *s)
{
    for (int i = 0; i < s->n_instances; i++) {
        const struct lg_instance *p = &s->instance[i];
        char path[LG_PATH_BYTES];
        if (p->state == LG_INSTANCE_ready &&
            lg_bus_socket(s->run->runtime_dir, p->role, p->index, path) == 0 &&
            !lg_path_exists(path))
            return true;
    }
    return false;
}

static bool are_lost(const lg_supervisor *s)
{
    return !is_there(s, "lgsup") || (s->keep.child.pidfd >= 0 && !is_there(s, "keeper"));
}

bool lg_sockets_were_lost(lg_supervisor *s, int64_t since_ns)
{
    if (are_lost(s)) {
        s->sockets_since_ns = INT64_MAX;
        s->last_sockets_look_ns = 0; /* no need to wait for the next look */
    }
    return since_ns <= s->sockets_since_ns;
}

void lg_sockets_look(lg_supervisor *s)
{
    int64_t now_ns = lg_now_ns();
    if (now_ns - s->last_sockets_look_ns < SOCKETS_LOOK_MS * LG_MS_NS ||
        s->step >= LG_RUN_STEP_leaving)
        return;
    s->last_sockets_look_ns = now_ns;
    bool lost = are_lost(s) || s->sockets_since_ns == INT64_MAX;
    if (!is_there(s, "lgsup")) restore_own(s);
    look_at_keeper(s);
    if (lost) s->sockets_since_ns = are_lost(s) ? INT64_MAX : now_ns;
    if (!s->sockets_wait && !s->sockets_failed && lacks_wakes(s)) {
        atomic_fetch_add(&s->board->s->sockets_epoch, 1);
        lg_nudge_all(s);
    }
}
