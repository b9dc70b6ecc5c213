/* Going on with a parked run; see park_resume.h.
 *
 * Going on is an adoption in which every stage is dead: the board's marks say where each was. The
 * config of the start counts, so that its mistakes can be mended, as far as the memory that is there
 * allows: the same plan (or the start is refused, as always), the same window, shards and places. */
#include "supervisor/commands/park_resume.h"
#include "base/printable.h"
#include "config/schema.h"
#include "supervisor/commands/finish.h"
#include "supervisor/core/park.h"
#include "supervisor/core/supervise.h"
#include "supervisor/run/terminal.h"
#include "supervisor/views/status.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool same_words(struct lg_strlist a, struct lg_strlist b)
{
    if (a.n != b.n) return false;
    for (int i = 0; i < a.n; i++)
        if (strcmp(a.v[i], b.v[i]) != 0) return false;
    return true;
}

/* NULL: the memory fits; else what has changed. Keys marked [bits] (device, trainer.ranks ...) have been
 * found the same before. */
static const char *changed(const lg_config *old_config, const lg_plan *old, const lg_config *now,
                           const lg_plan *plan)
{
    if (plan->window_slots != old->window_slots) return "the window (window.batches)";
    if (now->memory_cast_weights != old_config->memory_cast_weights)
        return "which weights are kept (memory.cast_weights)";
    if (plan->shards != old->shards || plan->scatters != old->scatters ||
        plan->gathers != old->gathers)
        return "how state, gradients and weights are cut (parallel)";
    if (plan->apart != old->apart) return "the way between GPUs (parallel.exchange)";
    if (plan->scatters && !same_words(old_config->memory_recompute, now->memory_recompute))
        return "memory.recompute, and with it the order in which gradients leave,";
    if (now->memory_offload_optimizer != old_config->memory_offload_optimizer)
        return "where the state lies (memory.offload_optimizer)";
    if (now->memory_offload_ema != old_config->memory_offload_ema)
        return "where the average lies (memory.offload_ema)";
    for (int r = 0; r < LG_ROLE_keeper; r++)
        for (int k = 0; k < LG_INSTANCES_MAX; k++)
            if (lg_plan_gpu(old_config, (lg_role)r, k) != lg_plan_gpu(now, (lg_role)r, k))
                return "the GPU of a role";
    return NULL;
}

/* What the new config may change in a run whose memory is there. */
static void refresh_board(lg_board *b, const lg_plan *old, const lg_run *r)
{
    struct lg_board_shared *s = b->s;
    for (lg_role role = 0; lg_role_scales(role); role++) {
        if (r->plan.instances[role] != old->instances[role]) /* else what `lgsup scale` has said */
            atomic_store(&s->wanted[role], (uint32_t)r->plan.instances[role]);
    }
    s->max_steps = (uint64_t)r->config->trainer_max_steps;
    s->checkpoint_every = r->config->checkpoint_every;
    lg_park_reopen(b);
}

static int resume_here(const struct lg_park_start *p, lg_board *b, const lg_plan *old,
                       int *ret_exit)
{
    lg_run *r = p->run;
    lg_run_state outcome;
    LG_TRY(lg_run_save_config(r));
    LG_TRY(lg_run_runtime_restore(r, true));
    if (!p->quiet)
        lg_terminal_say(STDOUT_FILENO, "going on with %s at step %" PRIu64 " from memory\n",
                        r->config->job_name, lg_status_step(b));
    refresh_board(b, old, r);
    LG_TRY(lg_supervise(&(struct lg_supervise_spec){.run = r,
                                                    .board = b,
                                                    .adopt = true,
                                                    .parked = true,
                                                    .quiet = p->quiet,
                                                    .ready_fd = p->ready_fd},
                        ret_exit, &outcome));
    lg_finish(r, outcome, p->quiet, ret_exit);
    return 0;
}

/* Its checkpoints carry the name, which is a part of their lineage. */
static int check_name(const lg_config *old_config, const lg_config *now)
{
    char where[LG_PATH_BYTES + 64];
    if (!strcmp(old_config->job_name, now->job_name)) return 0;
    lg_key_where(now, "job.name", where, sizeof where);
    return LG_FAIL(
        LG_ERR_MISMATCH,
        "%sjob.name was \"%s\" when the run began, which is parked with its memory, and is "
        "\"%s\" now: set it back, or choose another job.dir",
        where, old_config->job_name, now->job_name);
}

/* A start that lacks a program is refused before anything is touched, as every start is. */
static int check_programs(const lg_plan *plan)
{
    char path[LG_PATH_BYTES];
    for (int r = 0; r < LG_ROLE_keeper; r++)
        if (plan->instances[r]) LG_TRY(lg_program_path(lg_role_program((lg_role)r), path));
    return 0;
}

/* 0: *ret_why is "" and the run has ended, or it says why memory cannot be used. */
static int resume(const struct lg_park_start *p, lg_board *b, int *ret_exit, char *ret_why,
                  size_t bytes)
{
    lg_run *r = p->run;
    *ret_why = 0;
    LG_TRY(lg_run_load(r));
    if (!lg_status_row_alive(lg_board_row(b, LG_ROLE_keeper, 0))) {
        snprintf(ret_why, bytes, "its keeper has died");
        return 0;
    }
    lg_config *old_config = r->config;
    lg_plan old = r->plan, plan;
    const char *what = NULL;
    int rc = lg_config_compatible(old_config, *p->config, NULL, NULL);
    if (rc == 0) rc = check_name(old_config, *p->config);
    if (rc == 0) rc = lg_plan_resume(*p->config, &old, &plan);
    if (rc == 0) rc = check_programs(&plan);
    if (rc == 0) what = changed(old_config, &old, *p->config, &plan);
    if (rc == 0 && !what && (*p->config)->data_allow_changed && atomic_load(&b->s->data.changed))
        what = "the data set"; /* samples of the old one are on their way in it */
    if (what) snprintf(ret_why, bytes, "%s has changed", what);
    if (rc < 0 || what) return rc;
    r->config = *p->config;
    r->plan = plan;
    *p->config = old_config; /* the caller frees it */
    rc = resume_here(p, b, &old, ret_exit);
    if (r->memory_lost) {
        r->memory_lost = false;
        snprintf(ret_why, bytes, "%s", lg_err_message());
        lg_err_clear();
        *p->config = r->config;
        r->config = old_config;
        rc = 0;
    }
    return rc;
}

int lg_park_resume(const struct lg_park_start *p, bool *ret_resumed, int *ret_exit)
{
    lg_board *b = NULL;
    char why[512];
    *ret_resumed = false;
    if (lg_park_open(p->run->dir, &b) < 0) return 0;
    if (!atomic_load(&b->s->memory_kept) || lg_launcher_of(p->run)->keeper_is_service) {
        lg_board_close(&b);
        return 0;
    }
    int rc = resume(p, b, ret_exit, why, sizeof why);
    *ret_resumed = rc == 0 && !*why;
    if (rc == 0 && *why) {
        lg_terminal_say(STDERR_FILENO,
                        "warning: the parked run's memory cannot be used: %s; starting again from "
                        "the newest checkpoint\n",
                        why);
        atomic_store(&b->s->memory_kept, 0);
        atomic_store(&b->s->run_state, LG_RUN_PARKED);
        lg_leftovers_kill(b, true);
    }
    lg_board_close(&b);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

int lg_park_release(lg_run *r)
{
    lg_board *b = NULL;
    if (lg_park_open(r->dir, &b) < 0)
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "the board of the parked run in %s cannot be opened any more", r->dir);
    lg_leftovers_kill(b, true);
    atomic_store(&b->s->memory_kept, 0);
    atomic_store(&b->s->run_state, LG_RUN_STOPPED);
    lg_status_save(r->dir, b);
    lg_board_close(&b);
    lg_launcher_of(r)->runtime_remove(r);
    return 0;
}
