/* The end of a run; see finish.h. Pictures are an extra: when they cannot be drawn, the run is done
 * all the same, with a warning. */
#include "supervisor/finish.h"
#include "config/manifest.h"
#include "supervisor/child.h"
#include "supervisor/tensorboard.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

static int run_sampler(const lg_run *r, const char *checkpoint, const char *picture)
{
    char program[LG_PATH_BYTES], config[LG_PATH_BYTES], log[LG_PATH_BYTES];
    struct lg_child c;
    LG_TRY(lg_program_path("lg-sample", program));
    LG_TRY(lg_run_path(r, config, "config.toml"));
    LG_TRY(lg_run_path(r, log, "logs/sample.log"));
    char *argv[] = {program, (char *)"--from", (char *)checkpoint, (char *)"--config",
                    config,  (char *)"-o",     (char *)picture,    NULL};
    LG_TRY(lg_child_spawn(
        &(struct lg_spawn){.program = program, .argv = argv, .log = log, .pass_fd = -1}, &c));
    while (lg_child_wait(&c, LOOK_MS) == LG_ERR_TIMEOUT)
        if (interrupted()) lg_child_signal(&c, SIGKILL);
    int code = lg_child_reap(&c);
    if (code != 0) {
        char how[64], last[256];
        lg_exit_text(code, how, sizeof how);
        lg_last_words(log, last, sizeof last);
        return LG_FAIL(LG_ERR_FAILED, "lg-sample: %s: %s (all of it: %s)", how, last, log);
    }
    return 0;
}

static void draw(const lg_run *r, const char *checkpoint, uint64_t step, bool quiet)
{
    char picture[LG_PATH_BYTES];
    if (r->config->sample_captions.n == 0) return;
    int rc = lg_run_path(r, picture, "samples/step%" PRIu64 ".png", step);
    if (!quiet) printf("drawing %d pictures ...\n", r->config->sample_captions.n);
    fflush(stdout);
    if (rc == 0) rc = run_sampler(r, checkpoint, picture);
    if (rc < 0)
        fprintf(stderr, "warning: no pictures: %s\n", lg_err_message());
    else if (!quiet)
        printf("pictures    %s\n", picture);
    lg_err_clear();
}

/* Pictures that came last. Best effort. */
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
    lg_run_runtime_remove(r);
    lg_manifest *m = calloc(1, sizeof *m);
    int rc = m ? lg_run_path(r, checkpoints, "checkpoints") : LG_ERR_NOSPACE;
    if (rc == 0) rc = lg_manifest_newest(checkpoints, r->config->job_name, newest, m);
    if (rc == 0 && outcome == LG_RUN_DONE) {
        draw(r, newest, m->step, quiet);
        add_to_tensorboard(r, m->step);
    }
    if (rc == 0 && !quiet) printf("checkpoint  %s\n", newest);
    if (rc < 0 && outcome == LG_RUN_DONE && *exit_code == 0) {
        fprintf(stderr, "error: the run is done, but no complete checkpoint is in %s\n",
                checkpoints);
        *exit_code = -LG_ERR_CORRUPT;
    }
    if (!quiet) printf("%s: %s\n", r->config->job_name, lg_run_state_name(outcome));
    fflush(stdout);
    lg_err_clear();
    free(m);
}
