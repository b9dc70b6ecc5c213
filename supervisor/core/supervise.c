/* The poll loop and the two tables; see supervise.h and states.def.
 *
 * One iteration: sleep until a message, a signal, a death, a worker's result or the next look; handle
 * what came; look at the board. Deaths come before everything else, and of these the keeper's first:
 * whoever dies with it may have died of it.
 *
 * Interrupts: the first drains, a second kills. Those that come within a second are one, because
 * signals that were pending while lgsup could not run (SIGSTOP, a suspended machine) all arrive at
 * once, and because nobody can have read by then that another one kills. */
#include "supervisor/core/supervise.h"
#include "base/clock.h"
#include "supervisor/core/keep_jobs.h"
#include "supervisor/core/launch_jobs.h"
#include "supervisor/core/scale.h"
#include "supervisor/core/swap.h"
#include "supervisor/core/view_jobs.h"
#include "supervisor/run/signals.h"
#include "supervisor/run/terminal.h"
#include "supervisor/views/notify.h"
#include "supervisor/views/status.h"
#include "supervisor/views/view.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

enum {
    LOOK_MS = 50,
    ONE_INTERRUPT_MS = 1000,
    /* instances, standby processes, four others */
    POLL_MAX = LG_INSTANCE_TABLE + LG_INSTANCES_MAX + 4 + LG_EXTRAS_FDS_MAX
};

/* ---- the tables ---- */

static const struct {
    void (*action)(lg_supervisor *);
    lg_run_step next;
} run_rule[LG_RUN_STEP_COUNT][LG_RUN_EVENT_COUNT] = {
#define LG_RUN_RULE(state, event, act, then)                                                       \
    [LG_RUN_STEP_##                                                                                \
        state][LG_RUN_EVENT_##event] = {.action = lg_run_##act, .next = LG_RUN_STEP_##then},
#include "supervisor/core/states.def"
#undef LG_RUN_RULE
};

static const struct {
    void (*action)(lg_supervisor *, struct lg_instance *);
    lg_instance_state next;
} instance_rule[LG_INSTANCE_STATE_COUNT][LG_INSTANCE_EVENT_COUNT] = {
#define LG_INSTANCE_RULE(state, event, act, then)                                                  \
    [LG_INSTANCE_##state][LG_INSTANCE_EVENT_##event] = {.action = lg_instance_##act,               \
                                                        .next = LG_INSTANCE_##then},
#include "supervisor/core/states.def"
#undef LG_INSTANCE_RULE
};

void lg_run_raise(lg_supervisor *s, lg_run_event e)
{
    lg_run_step from = s->step;
    if (!run_rule[from][e].action) return;
    s->step = run_rule[from][e].next;
    run_rule[from][e].action(s);
}

void lg_instance_raise(lg_supervisor *s, struct lg_instance *i, lg_instance_event e)
{
    lg_instance_state from = i->state;
    if (!instance_rule[from][e].action) return;
    i->state = instance_rule[from][e].next;
    instance_rule[from][e].action(s, i);
}

/* ---- what happened ---- */

/* Exit 0 with nothing left to do is no death. */
static lg_instance_event kind_of_end(lg_supervisor *s, const struct lg_instance *i)
{
    const struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    bool finished = atomic_load(&row->phase) == LG_PHASE_DONE;
    bool clean = i->exit_code == 0 || i->exit_code == LG_EXIT_UNKNOWN;
    return finished && clean ? LG_INSTANCE_EVENT_left : LG_INSTANCE_EVENT_died;
}

static void on_death(lg_supervisor *s, struct lg_instance *i)
{
    i->exit_code = lg_child_reap(&i->child);
    i->killed_ns = 0;
    i->stuck = false;
    lg_board_bury(s->board, i->incarnation);
    /* Who sets up needs the keeper and the sockets, and cannot help it when they are not there. */
    bool set_up = atomic_load(&lg_board_row(s->board, i->role, i->index)->ready) == i->incarnation;
    if (!set_up && (i->spawned_ns <= s->keeper_since_ns || lg_sockets_were_lost(s, i->spawned_ns)))
        i->excused = true;
    if (i->was_standby)
        lg_board_vacate(s->board, i->was_standby); /* it may have died before it did so */
    i->was_standby = 0;
    lg_instance_raise(s, i, kind_of_end(s, i));
}

static void on_keeper_death(lg_supervisor *s)
{
    char how[64];
    lg_exit_text(lg_child_reap(&s->keep.child), how, sizeof how);
    if (s->step < LG_RUN_STEP_leaving) lg_keep_replace(s, how);
}

/* Half of `systemctl restart`: the next lgsup takes over what this one leaves, as after a death, and
 * training goes on. */
static void hand_over(lg_supervisor *s)
{
    lg_progress_say(&s->progress, LG_INFO, "restarted by systemd: the run goes on meanwhile");
    lg_notify_stopping(s->background.worker[LG_WORKER_notify], "handing over to the next lgsup");
    lg_progress_close(&s->progress);
    lg_background_finish(s, LG_WORKER_disk);
    lg_background_finish(s, LG_WORKER_notify);
    lg_terminal_finish();
    _exit(0);
}

static void interrupt(lg_supervisor *s, int64_t came_ns)
{
    bool same = s->interrupted_ns && came_ns - s->interrupted_ns < ONE_INTERRUPT_MS * LG_MS_NS;
    if (same) return;
    s->interrupted_ns = came_ns;
    lg_run_raise(s, LG_RUN_EVENT_interrupt);
}

static void on_term(lg_supervisor *s, bool restart, int64_t came_ns)
{
    if (restart) hand_over(s);
    interrupt(s, came_ns);
}

static void on_signal(lg_supervisor *s)
{
    struct signalfd_siginfo info;
    while (read(s->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGHUP) {
            if (lg_signals_asks_drain(info.ssi_code)) lg_run_raise(s, LG_RUN_EVENT_stop);
        } else if (info.ssi_signo == SIGTERM) {
            lg_launch_ask_restart(s, lg_now_ns(), on_term);
        } else {
            interrupt(s, lg_now_ns());
        }
    }
}

/* ---- what the views are shown ---- */

static struct lg_view make_view(const lg_supervisor *s)
{
    struct lg_view v = {.run = s->run,
                        .board = s->board,
                        .announced = s->announced,
                        .ending = s->step >= LG_RUN_STEP_draining,
                        .leaving = s->step >= LG_RUN_STEP_leaving};
    for (int k = 0; k < s->n_instances; k++) {
        const struct lg_instance *i = &s->instance[k];
        if (i->state >= LG_INSTANCE_draining) continue;
        v.role[i->role].all++;
        v.role[i->role].well += i->state == LG_INSTANCE_ready || i->state == LG_INSTANCE_resting;
    }
    return v;
}

/* views: something has come that they wait for. */
static void show(lg_supervisor *s, bool views)
{
    struct lg_view v = make_view(s);
    lg_notify_look(s->background.worker[LG_WORKER_notify], &v);
    lg_progress_show(&s->progress, &v);
    lg_views_look(s, views);
}

/* ---- the loop ---- */

static int fill_poll(const lg_supervisor *s, struct pollfd *p, struct lg_instance **who)
{
    int n = 0;
    for (int i = 0; i < s->n_instances; i++) {
        if (s->instance[i].child.pidfd < 0) continue;
        who[n] = &s->instance[i];
        p[n++] = (struct pollfd){.fd = s->instance[i].child.pidfd, .events = POLLIN};
    }
    return n;
}

static void iterate(lg_supervisor *s)
{
    struct pollfd p[POLL_MAX];
    struct lg_instance *who[POLL_MAX];
    lg_instances_sweep(s);
    int n = fill_poll(s, p, who);
    int standbys = lg_swap_poll(s, p + n);
    int keeper = n + standbys, others = keeper + 1;
    p[keeper] = (struct pollfd){.fd = s->keep.child.pidfd, .events = POLLIN};
    p[others] = (struct pollfd){.fd = s->signal_fd, .events = POLLIN};
    p[others + 1] = (struct pollfd){.fd = lg_control_fd(s->control), .events = POLLIN};
    p[others + 2] = (struct pollfd){.fd = s->background.wake_fd, .events = POLLIN};
    int all = others + 3 + lg_views_poll(s, p + others + 3);
    bool views = false;
    if (poll(p, (nfds_t)all, LOOK_MS) > 0) {
        if (p[keeper].revents) on_keeper_death(s);
        for (int i = 0; i < n; i++)
            if (p[i].revents) on_death(s, who[i]);
        for (int i = 0; i < standbys; i++)
            if (p[n + i].revents) lg_swap_on_death(s, i);
        if (p[others].revents) on_signal(s);
        for (int i = others + 3; i < all; i++) views |= p[i].revents != 0;
    }
    lg_background_collect(s);
    lg_cluster_look(s);
    lg_watch_look(s);
    lg_sockets_look(s);
    show(s, views);
    lg_control_handle(s); /* last: ZeroMQ's fd is edge-triggered */
}

/* ---- beginning and end ---- */

/* adopt: the board says who is there, lg_adopt_instances adds them. */
static int make_instances(lg_supervisor *s, bool adopt)
{
    const lg_plan *plan = &s->run->plan;
    s->instance = calloc(LG_INSTANCE_TABLE, sizeof *s->instance);
    if (!s->instance) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the instances");
    for (int r = 0; r < LG_ROLE_keeper; r++) {
        struct lg_restart_policy policy = lg_restart_policy(s->run->config, (lg_role)r);
        LG_TRY(lg_intensity_init(&s->intensity[r], policy.deaths_max, policy.window_s));
        for (int k = 0; k < plan->instances[r] && !adopt; k++) lg_instance_add(s, (lg_role)r, k);
    }
    return 0;
}

static int open_signals(lg_supervisor *s)
{
    sigset_t set = lg_signals();
    lg_signals_hold(true);
    signal(SIGPIPE, SIG_IGN);
    s->signal_fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    if (s->signal_fd < 0) return LG_FAIL(LG_ERR_IO, "signalfd: %s", strerror(errno));
    return 0;
}

/* Our own row, so that status and the next lgsup know who we are. */
static int enter_board(lg_supervisor *s)
{
    lg_life state;
    lg_incarnation former = lg_board_life(s->board, LG_ROLE_lgsup, 0, &state);
    if (state != LG_LIFE_NONE) {
        lg_board_bury(s->board, former); /* the run's lock says that it is gone */
        atomic_fetch_add(&lg_board_row(s->board, LG_ROLE_lgsup, 0)->restarts, 1);
    }
    LG_TRY(lg_board_join(s->board, lg_board_enlist(s->board, LG_ROLE_lgsup, 0)));
    return 0;
}

static int open_supervisor(lg_supervisor *s, const struct lg_supervise_spec *spec)
{
    LG_TRY(open_signals(s));
    LG_TRY(lg_background_open(&s->background));
    lg_progress_open(&s->progress,
                     &(struct lg_progress_spec){.run_dir = s->run->dir,
                                                .quiet = spec->quiet,
                                                .disk = s->background.worker[LG_WORKER_disk]});
    s->progress.step = lg_status_step(s->board);
    LG_TRY(make_instances(s, spec->adopt));
    LG_TRY(enter_board(s));
    LG_TRY(lg_programs_load(&s->programs, s->run->dir, s->board->s->preamble.run_id));
    LG_TRY(
        lg_keep_init(&s->keep, s->run->dir, s->run->runtime_dir, s->launcher->keeper_is_service));
    LG_TRY(lg_control_open(s->run->runtime_dir, &s->control));
    if (spec->adopt)
        LG_TRY(lg_adopt_instances(s, spec->parked));
    else
        LG_TRY(lg_keep_start(&s->keep, s->board));
    return 0;
}

/* What the keeper's worker is at comes to its end first: the keeper may have been started just now. */
static void end_keeper(lg_supervisor *s)
{
    if (s->background.worker[LG_WORKER_keeper] && !lg_background_finish(s, LG_WORKER_keeper)) {
        lg_child_signal(&s->keep.child, SIGKILL);
        return;
    }
    if (s->keeps_memory)
        lg_keep_leave(&s->keep);
    else
        lg_keep_end(&s->keep);
    if (s->step == LG_RUN_STEP_over && !s->keeps_memory)
        atomic_store(&s->board->s->preamble.ended, LG_BOARD_ENDED);
}

/* False: something still works with it, and it must not be freed. */
static bool close_supervisor(lg_supervisor *s)
{
    end_keeper(s);
    lg_control_close(&s->control);
    for (int r = 0; r < LG_ROLE_COUNT; r++) lg_intensity_free(&s->intensity[r]);
    for (int i = 0; i < s->n_instances; i++)
        if (s->instance[i].child.pidfd >= 0) close(s->instance[i].child.pidfd);
    free(s->instance);
    lg_swap_free(s);
    lg_programs_free(&s->programs);
    if (s->signal_fd >= 0) close(s->signal_fd);
    lg_progress_close(&s->progress);
    return lg_background_close(&s->background);
}

static void run_until_over(lg_supervisor *s, bool drain)
{
    if (drain) lg_run_raise(s, LG_RUN_EVENT_stop);
    if (atomic_load(&s->board->s->quit)) lg_run_raise(s, LG_RUN_EVENT_complete);
    for (int i = 0; i < s->n_instances; i++)
        lg_instance_raise(s, &s->instance[i], LG_INSTANCE_EVENT_start);
    /* A former lgsup may have died between filling or vacating a row and saying so. */
    atomic_fetch_add(&s->board->s->members_epoch, 1);
    while (s->step != LG_RUN_STEP_over) iterate(s);
    lg_views_close(s);
    struct lg_view v = make_view(s);
    lg_progress_last(&s->progress, &v);
    atomic_store(&s->board->s->run_state, s->outcome);
    snprintf(s->board->s->cause, sizeof s->board->s->cause, "%s", s->cause);
    lg_board_bury(s->board, lg_board_life(s->board, LG_ROLE_lgsup, 0, NULL));
    lg_background_save_status(s);
}

int lg_supervise(const struct lg_supervise_spec *spec, int *ret_exit, lg_run_state *ret_outcome)
{
    lg_supervisor *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the supervisor");
    s->run = spec->run;
    s->board = spec->board;
    s->launcher = lg_launcher_of(spec->run);
    s->cluster = spec->cluster;
    s->ready_fd = spec->ready_fd;
    s->signal_fd = s->progress.log_fd = s->background.wake_fd = -1;
    s->keep.child = LG_CHILD_NONE;
    int rc = open_supervisor(s, spec);
    if (rc == 0) {
        run_until_over(s, spec->drain);
        *ret_exit = s->exit_code;
        *ret_outcome = s->outcome;
    }
    if (close_supervisor(s)) free(s);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
