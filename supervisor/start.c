/* `lgsup start`; see start.h. Order, each step failing with nothing left behind but the run
 * directory: config, run directory, lock, leftovers of an earlier lgsup, what to continue from,
 * files, room on every device, runtime directory, board, supervise, end. */
#include "supervisor/start.h"
#include "base/clock.h"
#include "base/log.h"
#include "config/manifest.h"
#include "supervisor/check.h"
#include "supervisor/detach.h"
#include "supervisor/finish.h"
#include "supervisor/park.h"
#include "supervisor/status.h"
#include "supervisor/supervise.h"
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LOOK_MS = 50, HOLDER_S_MAX = 1800 /* lg-end.service's TimeoutStopSec= */ };

/* LG_ERR_NOTFOUND: there is none, or one of another boot or build: nothing that lives. Any other
 * failure says nothing about that, so nothing may be started over it. */
static int open_board(const lg_run *r, lg_board **ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, path, "board"));
    int rc = lg_board_open(path, 0, ret);
    if (rc != LG_ERR_NOTFOUND && rc != LG_ERR_MISMATCH) return rc;
    lg_err_clear();
    return LG_ERR_NOTFOUND;
}

static bool is_over(lg_board *b)
{
    return atomic_load(&b->s->run_state) >= LG_RUN_DONE;
}

/* Units whose processes these are, or "". */
static void read_units(const lg_run *r, char ret[LG_UNITS_BYTES])
{
    char path[LG_PATH_BYTES];
    ret[0] = 0;
    if (lg_run_path(r, path, "systemd") == 0) lg_read_line(path, ret, LG_UNITS_BYTES);
    lg_err_clear();
}

static int record_units(const lg_run *r)
{
    char path[LG_PATH_BYTES], line[LG_UNITS_BYTES + 1];
    LG_TRY(lg_run_path(r, path, "systemd"));
    int n = snprintf(line, sizeof line, "%s\n", r->units);
    if (lg_run_in_units(r))
        LG_TRY(lg_publish_file(path, line, (size_t)n));
    else
        unlink(path);
    return 0;
}

/* systemd and lgsup must not both start what dies. */
static int check_owner(const lg_run *r)
{
    char units[LG_UNITS_BYTES];
    read_units(r, units);
    if (!strcmp(units, r->units)) return 0;
    if (units[0])
        return LG_FAIL(LG_ERR_BUSY,
                       "the processes of %s are units of systemd's: use `systemctl start %ssup` "
                       "and `systemctl stop %ssup`",
                       r->dir, units, units);
    return LG_FAIL(LG_ERR_BUSY,
                   "the processes of %s were not started by systemd: end them with `lgsup stop "
                   "%s` first",
                   r->dir, r->dir);
}

/* What the run's own files say counts; a changed config has to wait for the next start. */
static int adopt_board(lg_run *r, lg_board *b, struct lg_supervise_spec *spec, int *ret_exit)
{
    lg_run_state outcome;
    LG_TRY(lg_run_load(r));
    LG_TRY(check_owner(r));
    if (r->plan.hash != b->s->plan_hash)
        return LG_FAIL(LG_ERR_MISMATCH, "%s/plan.json is not the plan of the processes that live",
                       r->dir);
    LG_TRY(lg_run_runtime_load(r));
    spec->run = r;
    spec->board = b;
    spec->adopt = true;
    LG_TRY(lg_supervise(spec, ret_exit, &outcome));
    lg_finish(r, outcome, spec->quiet, ret_exit);
    return 0;
}

int lg_start_adopt(lg_run *r, bool drain, bool quiet, int ready_fd, bool *ret_adopted,
                   int *ret_exit)
{
    lg_board *b = NULL;
    *ret_adopted = false;
    int rc = open_board(r, &b);
    if (rc == LG_ERR_NOTFOUND) return 0;
    LG_TRY(rc);
    struct lg_supervise_spec spec = {.drain = drain, .quiet = quiet, .ready_fd = ready_fd};
    /* In units everybody may be dead this very moment, and the memory in the keeper's store. */
    if ((lg_run_in_units(r) || lg_leftovers_live(b)) && !is_over(b)) {
        rc = adopt_board(r, b, &spec, ret_exit);
        *ret_adopted = rc == 0;
    }
    if (rc == LG_ERR_NOTFOUND || is_over(b)) lg_leftovers_kill(b, !lg_run_in_units(r));
    lg_board_close(&b);
    if (rc == LG_ERR_NOTFOUND) { /* memory is lost: back to the checkpoint */
        fprintf(stderr, "warning: %s; starting again from the newest checkpoint\n",
                lg_err_message());
        lg_err_clear();
        rc = 0;
    }
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

static int make_board(const lg_run *r, lg_board **ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, path, "regions")); /* of an earlier start */
    unlink(path);
    LG_TRY(lg_run_path(r, path, "board"));
    LG_TRY(
        lg_board_create(path,
                        &(struct lg_board_spec){.plan = &r->plan,
                                                .start_step = r->start_step,
                                                .max_steps = (uint64_t)r->config->trainer_max_steps,
                                                .checkpoint_every = r->config->checkpoint_every},
                        ret));
    return 0;
}

static void say_what(const lg_run *r, bool quiet)
{
    if (quiet) return;
    if (r->resume[0])
        printf("resuming %s at step %" PRIu64 " from %s\n", r->config->job_name, r->start_step,
               r->resume);
    else
        printf("starting %s in %s\n", r->config->job_name, r->dir);
    fflush(stdout);
}

static void leave_earlier_runtime(lg_run *r)
{
    char units[LG_UNITS_BYTES];
    read_units(r, units);
    if (lg_run_runtime_load(r) == 0) {
        if (!units[0]) lg_keep_end_strays(r->runtime_dir);
        if (lg_run_in_units(r)) lg_keep_forget(r->runtime_dir);
    }
    lg_err_clear();
    lg_run_runtime_remove(r);
}

static int check_room(const lg_run *r)
{
    char config[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, config, "config.toml"));
    LG_TRY(lg_check_room(config, r->config, &r->plan));
    return 0;
}

static int begin(lg_run *r, bool quiet, int ready_fd, int *ret_exit)
{
    lg_board *b = NULL;
    lg_run_state outcome;
    say_what(r, quiet);
    LG_TRY(lg_run_save(r));
    leave_earlier_runtime(r); /* which may have held memory that is needed now */
    LG_TRY(check_room(r));
    LG_TRY(record_units(r));
    LG_TRY(lg_run_runtime_create(r));
    LG_TRY(make_board(r, &b));
    int rc = lg_supervise(
        &(struct lg_supervise_spec){.run = r, .board = b, .quiet = quiet, .ready_fd = ready_fd},
        ret_exit, &outcome);
    lg_board_close(&b);
    if (rc < 0) {
        lg_run_runtime_remove(r);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    lg_finish(r, outcome, quiet, ret_exit);
    return 0;
}

/* A writer may have died in the middle of a removal with nobody left to end it: no successor, no memory. */
static void remove_leftovers(const lg_run *r)
{
    char checkpoints[LG_PATH_BYTES];
    if (lg_run_path(r, checkpoints, "checkpoints") < 0)
        lg_err_clear();
    else
        lg_manifest_remove_leftovers(checkpoints);
}

/* Takes *config over. */
static int start_locked(lg_run *r, lg_config **config, bool quiet, int ready_fd, int *ret_exit)
{
    bool adopted;
    LG_TRY(lg_park_resume(&(struct lg_park_start){r, config, quiet, ready_fd}, &adopted, ret_exit));
    if (adopted) return 0;
    LG_TRY(lg_start_adopt(r, false, quiet, ready_fd, &adopted, ret_exit));
    if (adopted) return 0;
    lg_config *c = *config;
    *config = NULL;
    LG_TRY(lg_run_decide(r, c));
    remove_leftovers(r); /* nobody of an earlier run lives */
    if (r->start_step >= (uint64_t)c->trainer_max_steps) {
        if (!quiet)
            printf("nothing to do: %s is at step %" PRIu64 " of trainer.max_steps = %" PRId64
                   "\ncheckpoint  %s\n",
                   c->job_name, r->start_step, c->trainer_max_steps, r->resume);
        *ret_exit = 0;
        return 0;
    }
    LG_TRY(begin(r, quiet, ready_fd, ret_exit));
    return 0;
}

struct place {
    const char *dir;   /* the run's */
    const char *units; /* lg_start_args */
    bool quiet;
    int ready_fd;
};

/* Under systemd. Who holds a run of the same units is the unit's former process or ends the run in its
 * place (stop.c): waited for. From the lock on a signal waits for the loop: a stop is then ours to
 * obey, and `lgsup stop --units` relies on it. */
static int lock_in_units(lg_run *r)
{
    char units[LG_UNITS_BYTES];
    for (int64_t began_ns = lg_now_ns();;) {
        read_units(r, units);
        lg_supervise_hold_signals(true);
        int rc = lg_run_lock(r);
        if (rc != LG_ERR_BUSY || strcmp(units, r->units) ||
            lg_now_ns() - began_ns > HOLDER_S_MAX * LG_S_NS)
            return rc;
        lg_err_clear();
        lg_supervise_hold_signals(false);
        struct pollfd holder = {.fd = lg_run_holder(r->dir, NULL), .events = POLLIN};
        poll(&holder, 1, LOOK_MS);
        if (holder.fd >= 0) close(holder.fd);
    }
}

static int start_here(const struct place *p, lg_config **config, int *ret_exit)
{
    lg_run *r = malloc(sizeof *r);
    if (!r) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the run");
    lg_run_init(r, p->dir);
    int rc = lg_run_create(r);
    if (p->units) snprintf(r->units, sizeof r->units, "%s", p->units);
    if (rc == 0) rc = p->units ? lock_in_units(r) : lg_run_lock(r);
    if (rc == 0) rc = start_locked(r, config, p->quiet, p->ready_fd, ret_exit);
    lg_run_close(r);
    free(r);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

/* In the background: the result goes to the parent, if it still waits, and to the log. */
static void run_detached(struct lg_detached *d, const char *dir, lg_config **config)
{
    struct lg_status *st = calloc(1, sizeof *st);
    const char *message = "the run has ended; see `lgsup status`";
    char text[4096];
    int exit_code = 0;
    int rc = start_here(&(struct place){.dir = dir, .quiet = true, .ready_fd = d->fd}, config,
                        &exit_code);
    lg_config_free(config);
    if (rc < 0) {
        exit_code = -rc;
        snprintf(text, sizeof text, "%s", lg_err_message());
        message = text;
        lg_log_error("the start failed");
    } else if (st && lg_status_read(dir, st) == 0 && st->cause[0]) {
        message = st->cause;
    }
    lg_detach_end(d, exit_code, message);
}

static int start_detached(const char *dir, lg_config **config, int *ret_exit)
{
    struct lg_detached d;
    LG_TRY(lg_detach(dir, &d));
    if (!d.is_parent) run_detached(&d, dir, config);
    LG_TRY(lg_detach_wait(&d, ret_exit));
    return 0;
}

int lg_start(const struct lg_start_args *args, int *ret_exit)
{
    lg_config *config = NULL;
    int rc;
    LG_TRY(lg_config_load(args->file, args->set, args->n_set, &config));
    LG_TRY_GOTO(rc, lg_config_check(config), out);
    char dir[LG_PATH_BYTES];
    LG_TRY_GOTO(rc, lg_path(dir, "%s", config->job_dir), out);
    if (args->detach)
        LG_TRY_GOTO(rc, start_detached(dir, &config, ret_exit), out);
    else
        LG_TRY_GOTO(rc,
                    start_here(&(struct place){.dir = dir,
                                               .units = args->units,
                                               .quiet = args->units != NULL,
                                               .ready_fd = -1},
                               &config, ret_exit),
                    out);
out:
    lg_config_free(&config);
    return rc;
}
