/* `lgsup swap`: the order, the looks that raise events, the table; see swap.h and states.def. */
#include "base/clock.h"
#include "supervisor/core/scale.h"
#include "supervisor/core/swap_actions.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the table ---- */

static const struct {
    void (*action)(lg_supervisor *);
    lg_swap_state next;
} rule[LG_SWAP_STATE_COUNT][LG_SWAP_EVENT_COUNT] = {
#define LG_SWAP_RULE(state, event, act, then)                                                      \
    [LG_SWAP_##state][LG_SWAP_EVENT_##event] = {.action = lg_swap_##act, .next = LG_SWAP_##then},
#include "supervisor/core/states.def"
#undef LG_SWAP_RULE
};

void lg_swap_raise(lg_supervisor *s, lg_swap_event e)
{
    lg_swap_state from = s->swap->state;
    if (!rule[from][e].action) return;
    s->swap->state = rule[from][e].next;
    rule[from][e].action(s);
}

/* An event that ends the swap, if it is not over. */
static void fail(lg_supervisor *s, lg_swap_event e, int fault, const char *why)
{
    s->swap->fault = fault;
    snprintf(s->swap->why, sizeof s->swap->why, "%s", why);
    lg_swap_raise(s, e);
}

void lg_swap_cancel(lg_supervisor *s)
{
    if (!s->swap) return;
    fail(s, LG_SWAP_EVENT_run_ends, LG_ERR_BUSY, "was not put in its place, because the run ends");
}

/* ---- standbys ---- */

int lg_swap_poll(const lg_supervisor *s, struct pollfd *p)
{
    if (!s->swap) return 0;
    for (int k = 0; k < s->swap->n; k++)
        p[k] = (struct pollfd){.fd = s->swap->standby[k].child.pidfd, .events = POLLIN};
    return s->swap->n;
}

static void on_end(lg_supervisor *s, const struct lg_standby *p, int exit_code)
{
    const struct lg_swap *w = s->swap;
    const struct lg_board_row *row = &s->board->s->row[lg_incarnation_row(p->incarnation)];
    char how[64], words[200] = "", why[320], log[LG_PATH_BYTES];
    lg_exit_text(exit_code, how, sizeof how);
    if (row->cause[0])
        snprintf(words, sizeof words, "%.190s", row->cause);
    else if (w->said[0])
        snprintf(words, sizeof words, "%.190s", w->said);
    else if (lg_swap_log(s, p->index, log) == 0)
        lg_last_words(log, words, sizeof words);
    snprintf(why, sizeof why, "ended before it was ready: %s%s%s", how, *words ? ": " : "", words);
    bool ours = exit_code > 0 && exit_code <= -LG_ERR_STOP;
    fail(s, LG_SWAP_EVENT_died, ours ? -exit_code : LG_ERR_FAILED, why);
}

void lg_swap_on_death(lg_supervisor *s, int which)
{
    if (!s->swap || which >= s->swap->n) return;
    struct lg_standby *p = &s->swap->standby[which];
    if (p->child.pidfd < 0) return; /* it became the instance while deaths were handled */
    int exit_code = lg_child_reap(&p->child);
    on_end(s, p, exit_code);
    lg_board_vacate(s->board, p->incarnation);
}

void lg_swap_on_event(lg_supervisor *s, const struct lg_message *m)
{
    if (!s->swap || m->level < LG_ERROR) return;
    for (int k = 0; k < s->swap->n; k++)
        if (s->swap->standby[k].incarnation == m->incarnation)
            snprintf(s->swap->said, sizeof s->swap->said, "%.400s", m->text);
}

bool lg_swap_succeed(lg_supervisor *s, struct lg_instance *i)
{
    struct lg_swap *w = s->swap;
    if (!w || w->state != LG_SWAP_handing || w->role != i->role) return false;
    for (int k = 0; k < w->n; k++) {
        struct lg_standby *p = &w->standby[k];
        if (p->index != i->index || p->became || p->child.pidfd < 0) continue;
        int spare = lg_incarnation_row(p->incarnation) % LG_INSTANCES_MAX;
        const struct lg_board_row *from = lg_board_row(s->board, i->role, spare);
        i->incarnation = p->became = lg_board_enlist(s->board, i->role, i->index);
        lg_board_enter(s->board, p->became, p->child.pid, atomic_load(&from->start_time));
        i->spawned_ns = lg_now_ns();
        i->was_standby = p->incarnation;
        i->child = p->child;
        p->child = LG_CHILD_NONE;
        /* Release: it sees its row enlisted. */
        atomic_store_explicit(&lg_board_row(s->board, i->role, spare)->takes, p->became,
                              memory_order_release);
        lg_control_nudge(s->control, i->role, spare, p->incarnation);
        return true;
    }
    return false;
}

/* ---- looks ---- */

static void look_at_preparing(lg_supervisor *s)
{
    const struct lg_swap *w = s->swap;
    int n_ready = 0;
    int64_t limit_s = s->run->config->supervisor_ready_s, now_ns = lg_now_ns();
    bool late = false;
    for (int k = 0; k < w->n; k++) {
        lg_incarnation who = w->standby[k].incarnation;
        const struct lg_board_row *row = &s->board->s->row[lg_incarnation_row(who)];
        bool ready = atomic_load_explicit(&row->ready, memory_order_acquire) == who;
        int64_t beat_ns = atomic_load_explicit(&row->heartbeat_ns, memory_order_relaxed);
        n_ready += ready;
        late |= !ready && now_ns - LG_MAX(beat_ns, w->start_ns) > limit_s * LG_S_NS;
    }
    if (n_ready == w->n) {
        lg_swap_raise(s, LG_SWAP_EVENT_all_ready);
    } else if (late) {
        char why[128];
        snprintf(why, sizeof why,
                 "was not ready, and without a heartbeat for %" PRId64
                 " s (supervisor.ready_s): killed",
                 limit_s);
        fail(s, LG_SWAP_EVENT_late, LG_ERR_TIMEOUT, why);
    }
}

static void look_at_handing(lg_supervisor *s)
{
    const struct lg_swap *w = s->swap;
    int n_well = 0;
    for (int k = 0; k < w->n; k++) {
        const struct lg_standby *p = &w->standby[k];
        const struct lg_instance *i = lg_instance_find(s, w->role, p->index);
        if (!i || i->state == LG_INSTANCE_resting) {
            n_well++; /* nothing is left to do for it in this run */
        } else if (p->became && (i->incarnation != p->became || i->state == LG_INSTANCE_doomed ||
                                 i->state == LG_INSTANCE_down)) {
            fail(s, LG_SWAP_EVENT_relapsed, LG_ERR_FAILED,
                 *i->said ? i->said : "ended as soon as it had taken over");
            return;
        } else {
            n_well += p->became && i->state == LG_INSTANCE_ready;
        }
    }
    if (n_well == w->n) lg_swap_raise(s, LG_SWAP_EVENT_settled);
}

static void look_at_over(lg_supervisor *s)
{
    /* At the run's end the disk is waited for elsewhere, and not for ever. */
    if (s->swap->reverting && s->step < LG_RUN_STEP_leaving) return;
    for (int k = 0; k < s->swap->n; k++)
        if (s->swap->standby[k].child.pidfd >= 0) return;
    lg_swap_raise(s, LG_SWAP_EVENT_all_gone);
}

/* The word stays as long as a rank goes by it, also when the swap has failed meanwhile. */
static void end_yield(lg_supervisor *s)
{
    if (!atomic_load(&s->board->s->yield)) return;
    for (int i = 0; i < s->n_instances; i++)
        if (s->instance[i].role == LG_ROLE_trainer && s->instance[i].state == LG_INSTANCE_yielding)
            return;
    atomic_store(&s->board->s->yield, 0);
}

void lg_swap_look(lg_supervisor *s)
{
    end_yield(s);
    if (!s->swap) return;
    if (s->step != LG_RUN_STEP_running) lg_swap_cancel(s);
    if (s->swap->state == LG_SWAP_preparing) look_at_preparing(s);
    if (s->swap->state == LG_SWAP_handing) look_at_handing(s);
    if (s->swap->state == LG_SWAP_over) look_at_over(s);
}

/* ---- the order ---- */

static int check_order(lg_supervisor *s, lg_role role, int index)
{
    if (s->step != LG_RUN_STEP_running)
        return LG_FAIL(LG_ERR_BUSY, "the run is %s: swap while it is running",
                       lg_run_state_name((lg_run_state)atomic_load(&s->board->s->run_state)));
    LG_TRY(s->launcher->check_standby(s->run, role));
    if (s->swap)
        return LG_FAIL(LG_ERR_BUSY, "another swap is under way: try again when it is over");
    if (role >= LG_ROLE_keeper)
        return LG_FAIL(LG_ERR_USAGE,
                       "%s cannot be swapped: loader, text, vae, trainer, ema and "
                       "ckpt can (end lgsup and start another to replace it)",
                       lg_role_name(role));
    if (role == LG_ROLE_trainer && index >= 0)
        return LG_FAIL(LG_ERR_USAGE, "all ranks run one program: `lgsup swap trainer` replaces "
                                     "them together");
    if (index >= 0 && !lg_instance_find(s, role, index))
        return LG_FAIL(LG_ERR_NOTFOUND, "there is no %s.%d: see `lgsup status`", lg_role_name(role),
                       index);
    for (int i = 0; i < s->n_instances; i++)
        if (s->instance[i].role == role && s->instance[i].state == LG_INSTANCE_draining)
            return LG_FAIL(LG_ERR_BUSY, "an instance of %s is leaving: try again in a moment",
                           lg_role_name(role));
    return 0;
}

static int choose_program(const lg_supervisor *s, struct lg_swap *w, int index, const char *program)
{
    const char *now = lg_programs_get(&s->programs, w->role, LG_MAX(index, 0));
    if (*program || now)
        LG_TRY(lg_path(w->program, "%s", *program ? program : now));
    else
        LG_TRY(lg_program_path(lg_role_program(w->role), w->program));
    if (w->program[0] != '/' || access(w->program, X_OK) < 0)
        return LG_FAIL(LG_ERR_NOTFOUND, "the program %s is missing or not executable (%s)",
                       w->program, strerror(errno));
    return 0;
}

/* The highest row of the role that nobody has. */
static int spare_index(lg_supervisor *s, lg_role role)
{
    for (int k = LG_INSTANCES_MAX - 1; k >= 0; k--) {
        lg_life life;
        lg_board_life(s->board, role, k, &life);
        if (life == LG_LIFE_NONE && !lg_instance_find(s, role, k)) return k;
    }
    return -1;
}

static int start_standby(lg_supervisor *s, struct lg_swap *w, int index)
{
    char log[LG_PATH_BYTES];
    int spare = spare_index(s, w->role);
    if (spare < 0)
        return LG_FAIL(LG_ERR_BUSY,
                       "there is no free row beside %s.%d: at most %d processes of a role, scale "
                       "it down first",
                       lg_role_name(w->role), index, LG_INSTANCES_MAX);
    LG_TRY(lg_swap_log(s, index, log));
    unlink(log);
    struct lg_launched started;
    struct lg_launch l = {.run = s->run,
                          .board = s->board,
                          .role = w->role,
                          .index = index,
                          .program = w->program,
                          .log = log};
    LG_TRY(s->launcher->start_standby(&l, spare, &started));
    w->standby[w->n++] = (struct lg_standby){
        .index = index, .incarnation = started.incarnation, .child = started.child};
    return 0;
}

/* A standby for each instance that the order concerns. */
static int start(lg_supervisor *s, struct lg_swap *w, int index, const char *program)
{
    if (index >= 0)
        snprintf(w->what, sizeof w->what, "%s.%d", lg_role_name(w->role), index);
    else
        snprintf(w->what, sizeof w->what, "%s", lg_role_name(w->role));
    LG_TRY(choose_program(s, w, index, program));
    for (int i = 0; i < s->n_instances; i++) {
        const struct lg_instance *p = &s->instance[i];
        if (p->role == w->role && (index < 0 || p->index == index))
            LG_TRY(start_standby(s, w, p->index));
    }
    if (!w->n) return LG_FAIL(LG_ERR_NOTFOUND, "this run has no %s", lg_role_name(w->role));
    return 0;
}

static int begin(lg_supervisor *s, lg_role role, int index, const char *program)
{
    lg_instances_sweep(s); /* who has just left for good needs no successor */
    LG_TRY(check_order(s, role, index));
    struct lg_swap *w = s->swap = calloc(1, sizeof *w);
    if (!w) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a swap");
    w->id = ++s->last_swap;
    w->role = role;
    w->start_ns = lg_now_ns();
    w->state = LG_SWAP_starting;
    int rc = start(s, w, index, program);
    lg_swap_raise(s, rc < 0 ? LG_SWAP_EVENT_refused : LG_SWAP_EVENT_started);
    LG_TRY(rc);
    return 0;
}

void lg_swap_order(lg_supervisor *s, const struct lg_peer *peer, lg_role role, int index,
                   const char *program)
{
    bool busy = s->swap != NULL;
    int rc = begin(s, role, index, program);
    if (rc < 0) {
        lg_swap_answer(s, peer, rc, lg_err_message());
        lg_err_clear();
        if (s->swap && !busy) look_at_over(s);
        return;
    }
    s->swap->peer = *peer;
    lg_progress_say(&s->progress, LG_INFO, "swap: %s is to run %s", s->swap->what,
                    s->swap->program);
}
