/* The end of a run; see finish.h. Pictures are an extra: when they cannot be drawn, the run is done
 * all the same, with a warning. */
#include "supervisor/commands/finish.h"
#include "base/printable.h"
#include "config/manifest.h"
#include "config/sample.h"
#include "supervisor/core/park.h"
#include "supervisor/launch/launcher.h"
#include "supervisor/run/processes.h"
#include "supervisor/run/terminal.h"
#include "supervisor/views/notify.h"
#include "supervisor/views/preview.h"
#include "supervisor/views/tensorboard.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_MS = 100 };

/* Signals are still blocked from the supervisor's loop: taken one by one here. */
static bool interrupted(void)
{
    sigset_t set;
    struct timespec now = {0};
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    return sigtimedwait(&set, NULL, &now) > 0;
}

static int make_one(const lg_run *r, const struct lg_preview_job *job, bool *ret_interrupted)
{
    struct lg_child c;
    LG_TRY(lg_preview_spawn(r, job, &c));
    while (lg_child_wait(&c, LOOK_MS) == LG_ERR_TIMEOUT) {
        lg_notify_alive();
        if (!interrupted()) continue;
        lg_child_signal(&c, SIGKILL);
        *ret_interrupted = true;
    }
    LG_TRY(lg_preview_result(r, job->kind, lg_child_reap(&c)));
    return 0;
}

/* Of the checkpoints that training has left behind. */
static void count(const lg_run *r, uint64_t last)
{
    struct lg_preview_job job = {0};
    bool stop = false;
    while (!stop && lg_preview_next(r, LG_PREVIEW_HISTOGRAMS, job.step, &job) && job.step <= last)
        if (make_one(r, &job, &stop) < 0)
            lg_terminal_say(STDERR_FILENO, "warning: no histograms of step %" PRIu64 ": %s\n",
                            job.step, lg_err_message());
    lg_err_clear();
}

/* The final grid, after the previews that training has left behind. */
static void draw(const lg_run *r, const char *newest, uint64_t last, bool quiet)
{
    struct lg_preview_job job = {0};
    char path[LG_PATH_BYTES];
    bool is_last = false, stop = false;
    if (r->config->sample_captions.n == 0) return;
    if (!quiet)
        lg_terminal_say(STDOUT_FILENO, "drawing %d %s ...\n", r->config->sample_captions.n,
                        lg_sample_is_clip(r->config) ? "clips" : "pictures");
    while (!is_last && !stop) {
        if (!lg_preview_next(r, LG_PREVIEW_PICTURES, job.step, &job) || job.step >= last) {
            is_last = true;
            job = (struct lg_preview_job){.kind = LG_PREVIEW_PICTURES, .step = last};
            snprintf(job.checkpoint, sizeof job.checkpoint, "%s", newest);
        }
        if (make_one(r, &job, &stop) < 0)
            lg_terminal_say(STDERR_FILENO, "warning: no pictures of step %" PRIu64 ": %s\n",
                            job.step, lg_err_message());
        else if (!quiet && lg_preview_path(r, job.kind, job.step, path) == 0)
            lg_terminal_say(STDOUT_FILENO, "%-11s %s\n",
                            lg_sample_is_clip(r->config) ? "clips" : "pictures", path);
        lg_err_clear();
    }
}

/* What came last. Best effort. */
static void add_to_tensorboard(const lg_run *r, uint64_t step)
{
    lg_tensorboard t;
    if (!r->config->tensorboard_enabled || lg_tensorboard_open(r->dir, step, &t) < 0) return;
    lg_tensorboard_flush(&t, step);
    lg_tensorboard_close(&t);
}

void lg_finish(lg_run *r, lg_run_state outcome, bool quiet, int *exit_code)
{
    char checkpoints[LG_PATH_BYTES], newest[LG_PATH_BYTES];
    if (outcome != LG_RUN_PARKED || !lg_park_is_kept(r->dir, NULL)) {
        if (!lg_launcher_of(r)->keeper_is_service) lg_processes_end_keepers(r);
        lg_launcher_of(r)->runtime_remove(r);
    }
    lg_manifest *m = calloc(1, sizeof *m);
    int rc = m ? lg_run_path(r, checkpoints, "checkpoints") : LG_ERR_NOSPACE;
    if (rc == 0) lg_run_remove_leftovers(r); /* nobody writes any more */
    if (rc == 0) rc = lg_manifest_newest(checkpoints, r->config->job_name, newest, m);
    if (rc == 0 && outcome == LG_RUN_DONE && !r->follows) {
        count(r, m->step);
        draw(r, newest, m->step, quiet);
        add_to_tensorboard(r, m->step);
    }
    if (rc == 0 && !quiet) lg_terminal_say(STDOUT_FILENO, "checkpoint  %s\n", newest);
    if (rc == LG_ERR_NOTFOUND && r->plan.hosts > 1) {
        if (!quiet)
            lg_terminal_say(STDOUT_FILENO, "checkpoints are where the leading host's job.dir is\n");
    } else if (rc < 0 && outcome == LG_RUN_DONE && *exit_code == 0) {
        lg_terminal_say(STDERR_FILENO,
                        "error: the run is done, but no complete checkpoint is in %s\n",
                        checkpoints);
        *exit_code = -LG_ERR_CORRUPT;
    }
    if (!quiet)
        lg_terminal_say(STDOUT_FILENO, "%s: %s\n", r->config->job_name, lg_run_state_name(outcome));
    lg_err_clear();
    free(m);
}
