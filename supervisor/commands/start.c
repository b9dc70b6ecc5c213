/* `lgsup start`; see start.h. Order, each step failing with nothing left behind but the run
 * directory: config, run directory, lock, leftovers of an earlier lgsup, what to continue from,
 * files, room on every device, runtime directory, board, supervise, end. */
#include "supervisor/commands/start.h"
#include "base/log.h"
#include "base/printable.h"
#include "supervisor/commands/check.h"
#include "supervisor/commands/detach.h"
#include "supervisor/commands/finish.h"
#include "supervisor/commands/hosts.h"
#include "supervisor/commands/park_resume.h"
#include "supervisor/core/former.h"
#include "supervisor/core/park.h"
#include "supervisor/core/supervise.h"
#include "supervisor/launch/launcher.h"
#include "supervisor/run/folder.h"
#include "supervisor/run/processes.h"
#include "supervisor/run/terminal.h"
#include "supervisor/run/waiting.h"
#include "supervisor/views/status.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_over(lg_board *b)
{
    return atomic_load(&b->s->run_state) >= LG_RUN_DONE;
}

/* What the run's own files say counts; a changed config has to wait for the next start. */
static int adopt_board(lg_run *r, lg_board *b, struct lg_supervise_spec *spec, int *ret_exit)
{
    lg_run_state outcome;
    LG_TRY(lg_run_load(r));
    LG_TRY(lg_launcher_check_owner(r));
    if (r->plan.hash != b->s->preamble.plan_hash)
        return LG_FAIL(LG_ERR_MISMATCH, "%s/plan.json is not the plan of the processes that live",
                       r->dir);
    LG_TRY(lg_run_runtime_restore(r, !lg_launcher_of(r)->keeper_is_service));
    spec->run = r;
    spec->board = b;
    spec->adopt = true;
    LG_TRY(lg_hosts_rejoin(r, b, &spec->cluster));
    const int rc = lg_supervise(spec, ret_exit, &outcome);
    r->follows = !lg_hosts_is_leader(b);
    lg_cluster_close(&spec->cluster);
    LG_TRY(rc);
    lg_finish(r, outcome, spec->quiet, ret_exit);
    return 0;
}

int lg_start_adopt(lg_run *r, bool drain, bool quiet, int ready_fd, bool *ret_adopted,
                   int *ret_exit)
{
    lg_board *b = NULL;
    *ret_adopted = false;
    int rc = lg_former_open(r, &b);
    if (rc == LG_ERR_NOTFOUND) return 0;
    LG_TRY(rc);
    struct lg_supervise_spec spec = {.drain = drain, .quiet = quiet, .ready_fd = ready_fd};
    /* Everybody may be dead this very moment, and the memory in the keeper's store. */
    bool service = lg_launcher_of(r)->keeper_is_service;
    if ((service || lg_leftovers_live(b)) && !is_over(b)) {
        rc = adopt_board(r, b, &spec, ret_exit);
        *ret_adopted = rc == 0;
    }
    if (r->memory_lost || is_over(b)) lg_leftovers_kill(b, !service);
    lg_board_close(&b);
    if (r->memory_lost) { /* back to the checkpoint */
        lg_terminal_say(STDERR_FILENO, "warning: %s; starting again from the newest checkpoint\n",
                        lg_err_message());
        lg_err_clear();
        r->memory_lost = false;
        rc = 0;
    }
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

static int make_board(const lg_run *r, const struct lg_cluster_place *among, lg_board **ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, path, "regions")); /* of an earlier start */
    unlink(path);
    LG_TRY(lg_run_path(r, path, "board"));
    LG_TRY(
        lg_board_create(path,
                        &(struct lg_board_spec){.plan = &r->plan,
                                                .lineage = r->lineage,
                                                .start_step = r->start_step,
                                                .max_steps = (uint64_t)r->config->trainer_max_steps,
                                                .checkpoint_every = r->config->checkpoint_every,
                                                .data = r->data,
                                                .n_data = r->n_data,
                                                .data_may_change = r->config->data_allow_changed,
                                                .comes = among->comes,
                                                .life = among->life},
                        ret));
    return 0;
}

static void say_what(const lg_run *r, bool quiet)
{
    if (quiet) return;
    if (r->resume[0])
        lg_terminal_say(STDOUT_FILENO, "resuming %s at step %" PRIu64 " from %s\n",
                        r->config->job_name, r->start_step, r->resume);
    else
        lg_terminal_say(STDOUT_FILENO, "starting %s in %s\n", r->config->job_name, r->dir);
}

static void leave_earlier_runtime(lg_run *r)
{
    char units[LG_UNITS_BYTES];
    if (lg_launcher_recorded_units(r, units) == 0 && lg_run_runtime_load(r) == 0) {
        if (!units[0]) lg_keep_end_strays(r->runtime_dir);
        if (lg_launcher_of(r)->keeper_is_service)
            lg_keep_forget(r->runtime_dir);
        else
            lg_processes_end_keepers(r);
    }
    lg_err_clear();
    lg_launcher_of(r)->runtime_remove(r);
}

/* And finds out by which way GPUs reach each other. */
static int check_room(lg_run *r)
{
    char config[LG_PATH_BYTES];
    const int apart = r->plan.apart;
    LG_TRY(lg_run_path(r, config, "config.toml"));
    LG_TRY(lg_check_room(config, r));
    if (r->plan.apart != apart) LG_TRY(lg_run_save_config(r));
    return 0;
}

/* spec->cluster: of several hosts, or NULL; then `among` is all 0. */
static int begin_among(lg_run *r, const struct lg_cluster_place *among,
                       struct lg_supervise_spec *spec, int *ret_exit)
{
    lg_board *b = NULL;
    lg_run_state outcome;
    say_what(r, spec->quiet);
    LG_TRY(lg_run_save(r));
    leave_earlier_runtime(r); /* which may have held memory that is needed now */
    LG_TRY(check_room(r));
    LG_TRY(lg_launcher_record_owner(r));
    LG_TRY(lg_launcher_of(r)->runtime_create(r));
    int rc = make_board(r, among, &b);
    spec->run = r;
    spec->board = b;
    if (rc == 0 && spec->cluster) lg_cluster_attach(spec->cluster, b);
    if (rc == 0) rc = lg_supervise(spec, ret_exit, &outcome);
    r->follows = rc == 0 && !lg_hosts_is_leader(b);
    lg_cluster_close(&spec->cluster); /* before its board */
    lg_board_close(&b);
    if (rc < 0) {
        lg_launcher_of(r)->runtime_remove(r);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    lg_finish(r, outcome, spec->quiet, ret_exit);
    return 0;
}

static bool is_at_its_end(const lg_run *r)
{
    return r->start_step >= (uint64_t)r->config->trainer_max_steps;
}

static void say_nothing_to_do(const lg_run *r)
{
    lg_terminal_say(STDOUT_FILENO,
                    "nothing to do: %s is at step %" PRIu64 " of trainer.max_steps = %" PRId64 "\n",
                    r->config->job_name, r->start_step, r->config->trainer_max_steps);
    if (r->resume[0])
        lg_terminal_say(STDOUT_FILENO, "checkpoint  %s\n", r->resume);
    else
        lg_terminal_say(STDOUT_FILENO, "checkpoints are where another host's job.dir is\n");
}

static int begin(lg_run *r, bool quiet, int ready_fd, int *ret_exit)
{
    struct lg_supervise_spec spec = {.quiet = quiet, .ready_fd = ready_fd};
    struct lg_cluster_place among;
    const struct lg_hosts_waiting how = {.quiet = quiet, .ready_fd = ready_fd};
    int rc = lg_hosts_join(r, &how, &among, &spec.cluster);
    if (rc == LG_ERR_STOP) {
        if (!quiet && among.host < 0)
            lg_terminal_say(STDOUT_FILENO, "stopped while it waited: no step was made here\n");
        else if (!quiet)
            lg_terminal_say(STDOUT_FILENO, "the run has ended without this machine\n");
        *ret_exit = 0;
        return 0;
    }
    LG_TRY(rc);
    if (spec.cluster && is_at_its_end(r)) {
        lg_hosts_part(&spec.cluster);
        if (!quiet) say_nothing_to_do(r);
        *ret_exit = 0;
        return 0;
    }
    rc = begin_among(r, &among, &spec, ret_exit);
    lg_cluster_close(&spec.cluster);
    LG_TRY(rc);
    return 0;
}

/* Nothing that lives, or keeps memory, may lose its files. */
static int refuse_living(lg_run *r)
{
    lg_board *b = NULL;
    int rc = lg_former_open(r, &b);
    if (rc == LG_ERR_NOTFOUND) return 0;
    LG_TRY(rc);
    bool lives = lg_leftovers_live(b) || lg_park_is_kept(r->dir, NULL);
    if (!lives && !is_over(b)) rc = lg_launcher_check_owner(r);
    lg_board_close(&b);
    if (lives)
        return LG_FAIL(
            LG_ERR_BUSY,
            "--set-aside: the run in %s lives, or its memory is kept: end it with `lgsup "
            "stop %s` first",
            r->dir, r->dir);
    LG_TRY(rc);
    return 0;
}

static int set_aside(lg_run *r, lg_config *config, bool quiet, int ready_fd)
{
    char to[LG_PATH_BYTES];
    if (lg_config_shares_checkpoints(config))
        return LG_FAIL(LG_ERR_USAGE,
                       "--set-aside: the checkpoints in %s are those of all hosts: for a new run "
                       "name another folder (hosts.shared) and another job.dir",
                       config->hosts_shared);
    LG_TRY(refuse_living(r));
    LG_TRY(lg_folder_set_aside(r, config, to));
    if (ready_fd >= 0) lg_detach_log(r->dir); /* its log has moved too */
    if (*to && !quiet) printf("the former run's files are in %s\n", to);
    return 0;
}

/* Takes *config over. */
static int start_locked(lg_run *r, lg_config **config, bool quiet, int ready_fd, int *ret_exit)
{
    bool adopted;
    lg_waiting_forget(r);
    LG_TRY(lg_folder_finish_aside(r));
    LG_TRY(lg_park_resume(&(struct lg_park_start){r, config, quiet, ready_fd}, &adopted, ret_exit));
    if (adopted) return 0;
    LG_TRY(lg_start_adopt(r, false, quiet, ready_fd, &adopted, ret_exit));
    if (adopted) return 0;
    lg_config *c = *config;
    *config = NULL;
    LG_TRY(lg_run_decide(r, c));
    LG_TRY(lg_folder_check(r));
    lg_run_remove_leftovers(r); /* nobody of an earlier run lives */
    /* Without a folder that all see the others do not know, and ask who has the newest checkpoint. */
    if (is_at_its_end(r) && (r->plan.hosts == 1 || lg_config_shares_checkpoints(c))) {
        if (!quiet) say_nothing_to_do(r);
        *ret_exit = 0;
        return 0;
    }
    LG_TRY(begin(r, quiet, ready_fd, ret_exit));
    return 0;
}

struct place {
    const char *dir;   /* the run's */
    const char *units; /* lg_start_args */
    bool quiet, set_aside;
    int ready_fd;
};

static int start_here(const struct place *p, lg_config **config, int *ret_exit)
{
    lg_run *r = malloc(sizeof *r);
    if (!r) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the run");
    lg_run_init(r, p->dir);
    int rc = lg_run_create(r);
    if (rc == 0 && p->ready_fd >= 0) lg_detach_log(p->dir); /* which has a folder now */
    if (p->units) snprintf(r->units, sizeof r->units, "%s", p->units);
    if (rc == 0) rc = lg_launcher_of(r)->lock(r);
    if (rc == 0) rc = lg_former_check(r);
    if (rc == 0 && p->set_aside) rc = set_aside(r, *config, p->quiet, p->ready_fd);
    if (rc == 0) rc = lg_run_share_checkpoints(r, *config);
    if (rc == 0) rc = start_locked(r, config, p->quiet, p->ready_fd, ret_exit);
    lg_run_close(r);
    free(r);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

/* In the background: the result goes to the parent, if it still waits, and to the log. */
static void run_detached(struct lg_detached *d, const char *dir, bool set_aside, lg_config **config)
{
    struct lg_status *st = calloc(1, sizeof *st);
    const char *message = "the run has ended; see `lgsup status`";
    char text[4096];
    int exit_code = 0;
    int rc = start_here(
        &(struct place){.dir = dir, .quiet = true, .set_aside = set_aside, .ready_fd = d->fd},
        config, &exit_code);
    lg_config_free(config);
    if (rc < 0) {
        exit_code = -rc;
        snprintf(text, sizeof text, "%s", lg_err_message());
        message = text;
        lg_log_error("the start failed");
    } else if (st && lg_status_read(dir, st) == 0 && st->cause[0]) {
        message = st->cause;
    }
    lg_terminal_finish();
    lg_detach_end(d, exit_code, message);
}

static int start_detached(const char *dir, bool set_aside, lg_config **config, int *ret_exit)
{
    struct lg_detached d;
    LG_TRY(lg_detach(dir, &d));
    if (!d.is_parent) run_detached(&d, dir, set_aside, config);
    LG_TRY(lg_detach_wait(&d, ret_exit));
    return 0;
}

int lg_start(const struct lg_start_args *args, int *ret_exit)
{
    lg_config *config = NULL;
    int rc;
    LG_TRY(lg_raise_open_files()); /* its processes inherit it */
    LG_TRY(lg_config_load(args->file, args->set, args->n_set, &config));
    LG_TRY_GOTO(rc, lg_config_check(config), out);
    char dir[LG_PATH_BYTES];
    LG_TRY_GOTO(rc, lg_path(dir, "%s", config->job_dir), out);
    if (args->detach)
        LG_TRY_GOTO(rc, start_detached(dir, args->set_aside, &config, ret_exit), out);
    else
        LG_TRY_GOTO(rc,
                    start_here(&(struct place){.dir = dir,
                                               .units = args->units,
                                               .quiet = args->units != NULL,
                                               .set_aside = args->set_aside,
                                               .ready_fd = -1},
                               &config, ret_exit),
                    out);
out:
    lg_config_free(&config);
    return rc;
}
