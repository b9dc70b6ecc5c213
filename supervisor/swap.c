/* `lgsup swap`; see swap.h.
 *
 * Life of a swap: preparing (processes of the new program set up in spare rows) -> handing over (the
 * old ones leave, rows change hands) -> over. It is answered when those that stood by in vain are gone
 * too: their rows are never given to others before.
 *
 * DIR/programs is written before the first old process is told to leave: nothing is written to disk
 * between the departure of one and the other's first step. */
#include "supervisor/swap.h"
#include "base/clock.h"
#include "supervisor/scale.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct stander {
    int index;                  /* of the instance that it stands by for */
    lg_incarnation incarnation; /* in the spare row */
    lg_incarnation became;      /* in the instance's row; 0: not yet */
    struct lg_child child;      /* while it stands by */
    bool ready;
};

struct lg_swap {
    lg_role role;
    char program[LG_PATH_BYTES];
    char what[48]; /* "vae.1" or "trainer", for people */
    struct lg_peer peer;
    enum { PREPARING, HANDING, OVER } phase;
    int64_t start_ns;
    char said[LG_CAUSE_BYTES]; /* the last error event of one that stands by */
    int code;                  /* over: how it has ended, and what is answered */
    char text[LG_MESSAGE_TEXT_MAX + 1];
    struct stander stander[LG_INSTANCES_MAX];
    int n;
};

static int log_path(const lg_supervisor *s, const struct lg_swap *w, int index,
                    char ret[LG_PATH_BYTES])
{
    return lg_run_path(s->run, ret, "logs/%s.%d.next.log", lg_role_name(w->role), index);
}

/* ---- the end ---- */

static void answer(lg_supervisor *s, const struct lg_peer *peer, int code, const char *text)
{
    struct lg_message m = {
        .kind = code < 0 ? LG_MESSAGE_error : LG_MESSAGE_ok, .role = LG_ROLE_lgsup, .level = -code};
    snprintf(m.text, sizeof m.text, "%s", text);
    lg_control_answer(s->control, peer, &m);
}

/* What has been replaced goes back by being killed: nothing is lost by that, ever. */
static void roll_back(lg_supervisor *s, struct lg_swap *w)
{
    for (int k = 0; k < w->n; k++) {
        lg_programs_revert(&s->programs, w->role, w->stander[k].index);
        struct lg_instance *i = lg_instance_find(s, w->role, w->stander[k].index);
        if (!w->stander[k].became || !i) continue;
        i->excused = i->child.pidfd >= 0;
        lg_child_signal(&i->child, SIGKILL);
    }
    if (lg_programs_save(&s->programs) == 0) return;
    lg_progress_say(&s->progress, LG_WARN, "%s", lg_err_message());
    lg_err_clear();
}

static void fail(lg_supervisor *s, int code, const char *why)
{
    struct lg_swap *w = s->swap;
    if (w->phase == OVER) return;
    if (w->phase == HANDING) roll_back(s, w);
    w->phase = OVER;
    w->code = code;
    for (int k = 0; k < w->n; k++) lg_child_signal(&w->stander[k].child, SIGKILL);
    snprintf(w->text, sizeof w->text,
             "%s goes on with its former program: the new one, %.120s, %.160s", w->what, w->program,
             why);
    lg_progress_say(&s->progress, LG_WARN, "swap rolled back: %s", w->text);
}

static void complete(lg_supervisor *s)
{
    struct lg_swap *w = s->swap;
    w->phase = OVER;
    snprintf(w->text, sizeof w->text, "%s runs %.300s", w->what, w->program);
    lg_progress_say(&s->progress, LG_INFO, "swapped: %s (%.0f ms)", w->text,
                    (double)(lg_now_ns() - w->start_ns) / LG_MS_NS);
}

void lg_swap_cancel(lg_supervisor *s)
{
    if (!s->swap || s->swap->phase == OVER) return;
    fail(s, LG_ERR_BUSY, "was not put in its place, because the run ends");
}

void lg_swap_free(lg_supervisor *s)
{
    if (!s->swap) return;
    for (int k = 0; k < s->swap->n; k++)
        if (s->swap->stander[k].child.pidfd >= 0) close(s->swap->stander[k].child.pidfd);
    free(s->swap);
    s->swap = NULL;
}

/* ---- those that stand by ---- */

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

static int start_stander(lg_supervisor *s, struct lg_swap *w, int index)
{
    char log[LG_PATH_BYTES];
    int spare = spare_index(s, w->role);
    if (spare < 0)
        return LG_FAIL(LG_ERR_BUSY,
                       "there is no free row beside %s.%d: at most %d processes of a role, scale "
                       "it down first",
                       lg_role_name(w->role), index, LG_INSTANCES_MAX);
    LG_TRY(log_path(s, w, index, log));
    unlink(log);
    struct stander *t = &w->stander[w->n++];
    struct lg_board_row *row = lg_board_row(s->board, w->role, spare);
    row->cause[0] = 0;
    *t = (struct stander){.index = index,
                          .child = LG_CHILD_NONE,
                          .incarnation = lg_board_enlist_stander(s->board, w->role, spare)};
    int rc = lg_instance_exec(s, &(struct lg_exec){w->role, index, t->incarnation, w->program, log},
                              &t->child);
    if (rc < 0) {
        lg_board_vacate(s->board, t->incarnation);
        w->n--;
    }
    LG_TRY(rc);
    /* As it will say itself when it joins: so that a later lgsup can end one that never comes so far. */
    atomic_store(&row->pid, (uint32_t)t->child.pid);
    atomic_store(&row->start_time, lg_process_start_time(t->child.pid));
    return 0;
}

static void on_stander_end(lg_supervisor *s, const struct stander *t, int exit_code)
{
    struct lg_swap *w = s->swap;
    const struct lg_board_row *row = &s->board->s->row[lg_incarnation_row(t->incarnation)];
    char how[64], words[160] = "", why[256], log[LG_PATH_BYTES];
    lg_exit_text(exit_code, how, sizeof how);
    if (row->cause[0])
        snprintf(words, sizeof words, "%.150s", row->cause);
    else if (w->said[0])
        snprintf(words, sizeof words, "%.150s", w->said);
    else if (log_path(s, w, t->index, log) == 0)
        lg_last_words(log, words, sizeof words);
    snprintf(why, sizeof why, "ended before it was ready: %s%s%s", how, *words ? ": " : "", words);
    bool ours = exit_code > 0 && exit_code <= -LG_ERR_STOP;
    fail(s, ours ? -exit_code : LG_ERR_FAILED, why);
}

int lg_swap_poll(const lg_supervisor *s, struct pollfd *p)
{
    if (!s->swap) return 0;
    for (int k = 0; k < s->swap->n; k++)
        p[k] = (struct pollfd){.fd = s->swap->stander[k].child.pidfd, .events = POLLIN};
    return s->swap->n;
}

void lg_swap_on_death(lg_supervisor *s, int which)
{
    if (!s->swap || which >= s->swap->n) return;
    struct stander *t = &s->swap->stander[which];
    if (t->child.pidfd < 0) return; /* it became the instance while deaths were handled */
    int exit_code = lg_child_reap(&t->child);
    on_stander_end(s, t, exit_code);
    lg_board_vacate(s->board, t->incarnation);
}

void lg_swap_on_event(lg_supervisor *s, const struct lg_message *m)
{
    if (!s->swap || m->level < LG_ERROR) return;
    for (int k = 0; k < s->swap->n; k++)
        if (s->swap->stander[k].incarnation == m->incarnation)
            snprintf(s->swap->said, sizeof s->swap->said, "%.250s", m->text);
}

/* ---- hand-over ---- */

bool lg_swap_succeed(lg_supervisor *s, struct lg_instance *i)
{
    struct lg_swap *w = s->swap;
    if (!w || w->phase != HANDING || w->role != i->role) return false;
    for (int k = 0; k < w->n; k++) {
        struct stander *t = &w->stander[k];
        if (t->index != i->index || t->became || t->child.pidfd < 0) continue;
        int spare = lg_incarnation_row(t->incarnation) % LG_INSTANCES_MAX;
        i->incarnation = t->became = lg_board_enlist(s->board, i->role, i->index);
        i->spawned_ns = lg_now_ns();
        i->stood_by = t->incarnation;
        i->child = t->child;
        t->child = LG_CHILD_NONE;
        /* Release: it sees its row enlisted. */
        atomic_store_explicit(&lg_board_row(s->board, i->role, spare)->takes, t->became,
                              memory_order_release);
        lg_control_nudge(s->control, i->role, spare, t->incarnation);
        return true;
    }
    return false;
}

static int put_in_force(lg_supervisor *s, struct lg_swap *w)
{
    for (int k = 0; k < w->n; k++)
        LG_TRY(lg_programs_set(&s->programs, w->role, w->stander[k].index, w->program));
    int rc = lg_programs_save(&s->programs);
    if (rc < 0)
        for (int k = 0; k < w->n; k++)
            lg_programs_revert(&s->programs, w->role, w->stander[k].index);
    LG_TRY(rc);
    return 0;
}

static void hand_over(lg_supervisor *s)
{
    struct lg_swap *w = s->swap;
    if (put_in_force(s, w) < 0) {
        fail(s, LG_ERR_IO, lg_err_message());
        lg_err_clear();
        return;
    }
    w->phase = HANDING;
    for (int k = 0; k < w->n; k++) {
        struct lg_instance *i = lg_instance_find(s, w->role, w->stander[k].index);
        if (i) lg_instance_raise(s, i, LG_INSTANCE_EVENT_yield);
    }
    /* After every row.leave (lg_trainer_may_leave). */
    if (w->role == LG_ROLE_trainer) atomic_store(&s->board->s->yield, 1);
    lg_nudge_all(s);
}

static void look_at_preparing(lg_supervisor *s)
{
    struct lg_swap *w = s->swap;
    int n_ready = 0;
    for (int k = 0; k < w->n; k++) {
        struct stander *t = &w->stander[k];
        const struct lg_board_row *row = &s->board->s->row[lg_incarnation_row(t->incarnation)];
        t->ready = atomic_load_explicit(&row->ready, memory_order_acquire) == t->incarnation;
        n_ready += t->ready;
    }
    int64_t limit_s = s->run->config->supervisor_ready_s;
    if (n_ready == w->n) {
        hand_over(s);
    } else if (lg_now_ns() - w->start_ns > limit_s * LG_S_NS) {
        char why[96];
        snprintf(why, sizeof why, "was not ready after %" PRId64 " s (supervisor.ready_s): killed",
                 limit_s);
        fail(s, LG_ERR_TIMEOUT, why);
    }
}

static void look_at_handing(lg_supervisor *s)
{
    struct lg_swap *w = s->swap;
    int n_well = 0;
    for (int k = 0; k < w->n; k++) {
        const struct stander *t = &w->stander[k];
        const struct lg_instance *i = lg_instance_find(s, w->role, t->index);
        if (!i || i->state == LG_INSTANCE_resting) {
            n_well++; /* nothing is left to do for it in this run */
        } else if (t->became && (i->incarnation != t->became || i->state == LG_INSTANCE_doomed ||
                                 i->state == LG_INSTANCE_down)) {
            fail(s, LG_ERR_FAILED, *i->said ? i->said : "ended as soon as it had taken over");
            return;
        } else {
            n_well += t->became && i->state == LG_INSTANCE_ready;
        }
    }
    if (n_well == w->n) complete(s);
}

static bool all_gone(const struct lg_swap *w)
{
    for (int k = 0; k < w->n; k++)
        if (w->stander[k].child.pidfd >= 0) return false;
    return true;
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
    if (s->swap->phase == PREPARING) look_at_preparing(s);
    if (s->swap->phase == HANDING) look_at_handing(s);
    if (s->swap->phase != OVER) return;
    for (int k = 0; k < s->swap->n; k++) /* nobody came for it: its instance is at rest */
        lg_child_signal(&s->swap->stander[k].child, SIGKILL);
    if (!all_gone(s->swap)) return;
    if (s->swap->peer.bytes) answer(s, &s->swap->peer, s->swap->code, s->swap->text);
    lg_swap_free(s);
}

/* ---- the order ---- */

static int check_order(lg_supervisor *s, lg_role role, int index)
{
    if (s->step != LG_RUN_STEP_running)
        return LG_FAIL(LG_ERR_BUSY, "the run is %s: swap while it is running",
                       lg_run_state_name((lg_run_state)atomic_load(&s->board->s->run_state)));
    if (lg_run_in_units(s->run))
        return LG_FAIL(LG_ERR_USAGE,
                       "the processes are units of systemd's, where nobody can stand by: install "
                       "the program beside lgsup and `systemctl restart '%s-%s@*'`; the same with "
                       "the former one leads back",
                       s->run->units, lg_role_name(role));
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

static int begin(lg_supervisor *s, lg_role role, int index, const char *program)
{
    lg_instances_sweep(s); /* who has just left for good needs no successor */
    LG_TRY(check_order(s, role, index));
    struct lg_swap *w = s->swap = calloc(1, sizeof *w);
    if (!w) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a swap");
    w->role = role;
    w->start_ns = lg_now_ns();
    w->phase = OVER; /* until everybody has been started */
    if (index >= 0)
        snprintf(w->what, sizeof w->what, "%s.%d", lg_role_name(role), index);
    else
        snprintf(w->what, sizeof w->what, "%s", lg_role_name(role));
    LG_TRY(choose_program(s, w, index, program));
    for (int i = 0; i < s->n_instances; i++) {
        const struct lg_instance *p = &s->instance[i];
        if (p->role == role && (index < 0 || p->index == index))
            LG_TRY(start_stander(s, w, p->index));
    }
    if (!w->n) return LG_FAIL(LG_ERR_NOTFOUND, "this run has no %s", lg_role_name(role));
    w->phase = PREPARING;
    return 0;
}

void lg_swap_order(lg_supervisor *s, const struct lg_peer *peer, lg_role role, int index,
                   const char *program)
{
    bool busy = s->swap != NULL;
    int rc = begin(s, role, index, program);
    if (rc < 0) {
        answer(s, peer, rc, lg_err_message());
        lg_err_clear();
        /* Those that were started are ended by the next look. */
        if (!busy && s->swap && !s->swap->n) lg_swap_free(s);
        return;
    }
    s->swap->peer = *peer;
    lg_progress_say(&s->progress, LG_INFO, "swap: %s is to run %s", s->swap->what,
                    s->swap->program);
}
