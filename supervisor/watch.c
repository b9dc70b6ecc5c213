/* Looks at the board and at what was sent, and raises what follows; see states.def.
 *
 * What is so stands on the board: a ready or hello message only makes the look come sooner.
 *
 * A stage that waits, or has nothing left to do, still looks around many times a second, so a late
 * heartbeat tells of a hang in every phase. It is believed only after two looks, a second apart,
 * between which lgsup ran normally itself: after a suspended machine or a stopped lgsup every
 * heartbeat looks old. */
#include "base/clock.h"
#include "shm/commit.h"
#include "supervisor/scale.h"
#include "supervisor/status.h"
#include "supervisor/swap.h"
#include "supervisor/units.h"
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum {
    HANG_LOOK_MS = 1000,
    HANG_LOOK_GAP_MS_MAX = 3000,
    HANG_LOOKS = 2,
    STATUS_MS = 10000,
    CONTROL_BATCH_MAX = 256
};

static void look_at_setup(lg_supervisor *s, struct lg_instance *i, int64_t now_ns)
{
    if (i->child.pidfd < 0 && lg_run_in_units(s->run)) {
        lg_units_look(s, i, now_ns);
        return;
    }
    struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    if (atomic_load_explicit(&row->ready, memory_order_acquire) == i->incarnation)
        lg_instance_raise(s, i, LG_INSTANCE_EVENT_ready);
    else if (now_ns - i->spawned_ns > s->run->config->supervisor_ready_s * LG_S_NS)
        lg_instance_raise(s, i, LG_INSTANCE_EVENT_late);
}

static void look_for_hang(lg_supervisor *s, struct lg_instance *i, int64_t now_ns)
{
    struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    const lg_config *c = s->run->config;
    /* One that was told to leave during its setup leaves after it: it has as long as any other. */
    bool set_up = atomic_load(&row->ready) == i->incarnation;
    int64_t beat_ns = atomic_load_explicit(&row->heartbeat_ns, memory_order_relaxed);
    int64_t since_ns = set_up ? beat_ns : i->spawned_ns;
    bool late =
        now_ns - since_ns > (set_up ? c->supervisor_hang_s : c->supervisor_ready_s) * LG_S_NS;
    i->late_looks = late ? i->late_looks + 1 : 0;
    if (i->late_looks >= HANG_LOOKS) lg_instance_raise(s, i, LG_INSTANCE_EVENT_late);
}

/* The keeper has no heartbeat: it is asked for something. One that does not answer (5 s, in which
 * lgsup waits, too) holds up everybody who starts, until the run is parked; a new one knows all that it
 * knew. */
static void look_at_keeper(lg_supervisor *s)
{
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    if (s->keep.child.pidfd < 0 || s->step >= LG_RUN_STEP_leaving) return;
    int rc = lg_keeper_list(s->keep.socket, LG_KEEPER_REGIONS_MAX, name, &bytes);
    lg_err_clear(); /* NOTFOUND: it is well */
    if (rc != LG_ERR_TIMEOUT) return;
    lg_progress_say(&s->progress, LG_WARN, "keeper: killed: it does not answer");
    lg_child_signal(&s->keep.child, SIGKILL);
}

static void look_for_hangs(lg_supervisor *s, int64_t now_ns)
{
    int64_t gap_ns = now_ns - s->last_hang_look_ns;
    if (gap_ns < HANG_LOOK_MS * LG_MS_NS) return;
    s->last_hang_look_ns = now_ns;
    bool normal = gap_ns < HANG_LOOK_GAP_MS_MAX * LG_MS_NS;
    for (int i = 0; i < s->n_instances; i++) {
        if (!normal) s->instance[i].late_looks = 0;
        lg_instance_state state = s->instance[i].state;
        if (normal && (state == LG_INSTANCE_ready || state == LG_INSTANCE_yielding ||
                       state == LG_INSTANCE_draining))
            look_for_hang(s, &s->instance[i], now_ns);
    }
    look_at_keeper(s);
}

static void look_at_instances(lg_supervisor *s, int64_t now_ns)
{
    for (int i = 0; i < s->n_instances; i++) {
        struct lg_instance *p = &s->instance[i];
        if (p->state == LG_INSTANCE_starting) look_at_setup(s, p, now_ns);
        if (p->state == LG_INSTANCE_down && now_ns >= p->retry_ns)
            lg_instance_raise(s, p, LG_INSTANCE_EVENT_start);
    }
    look_for_hangs(s, now_ns);
}

static bool all_settled(const lg_supervisor *s)
{
    for (int i = 0; i < s->n_instances; i++)
        if (s->instance[i].state < LG_INSTANCE_ready || s->instance[i].state == LG_INSTANCE_doomed)
            return false;
    return true;
}

static bool all_gone(const lg_supervisor *s)
{
    for (int i = 0; i < s->n_instances; i++)
        if (s->instance[i].child.pidfd >= 0) return false;
    return !s->swap;
}

void lg_watch_look(lg_supervisor *s)
{
    int64_t now_ns = lg_now_ns();
    look_at_instances(s, now_ns);
    lg_swap_look(s);
    lg_scale_look(s);
    if (!s->announced && all_settled(s)) {
        s->announced = true;
        lg_run_raise(s, LG_RUN_EVENT_all_ready);
    }
    if (lg_commit_complete(s->board)) lg_run_raise(s, LG_RUN_EVENT_complete);
    if (all_gone(s))
        lg_run_raise(s, LG_RUN_EVENT_all_gone);
    else if (s->leave_by_ns && now_ns > s->leave_by_ns)
        lg_run_raise(s, LG_RUN_EVENT_overdue);
    if (now_ns - s->last_status_ns > STATUS_MS * LG_MS_NS) {
        s->last_status_ns = now_ns;
        lg_status_save(s->run->dir, s->board);
    }
}

void lg_nudge_all(lg_supervisor *s)
{
    for (int i = 0; i < s->n_instances; i++)
        lg_control_nudge(s->control, s->instance[i].role, s->instance[i].index,
                         s->instance[i].incarnation);
}

static struct lg_instance *find(lg_supervisor *s, const struct lg_message *m)
{
    for (int i = 0; i < s->n_instances; i++) {
        struct lg_instance *p = &s->instance[i];
        if (p->role == m->role && p->index == m->index && p->incarnation == m->incarnation)
            return p;
    }
    return NULL;
}

static void on_event(lg_supervisor *s, const struct lg_message *m)
{
    struct lg_instance *i = find(s, m);
    lg_swap_on_event(s, m);
    if (i && m->level >= LG_ERROR) snprintf(i->said, sizeof i->said, "%.250s", m->text);
    /* An error is repeated with the death that follows it. */
    if (m->level < LG_ERROR)
        lg_progress_say(&s->progress, (lg_log_level)m->level, "%s.%d: %s", lg_role_name(m->role),
                        m->index, m->text);
}

static void on_message(lg_supervisor *s, const struct lg_peer *peer, const struct lg_message *m)
{
    struct lg_message answer = {.kind = LG_MESSAGE_ok, .role = LG_ROLE_lgsup};
    switch (m->kind) {
    case LG_MESSAGE_event:
        on_event(s, m);
        return;
    case LG_MESSAGE_stop:
        lg_run_raise(s, LG_RUN_EVENT_stop);
        break;
    case LG_MESSAGE_scale: /* answered when it is carried out */
        lg_scale_order(s, peer, m->role, m->level);
        return;
    case LG_MESSAGE_swap:
        lg_swap_order(s, peer, m->role, m->level ? m->index : -1, m->text);
        return;
    case LG_MESSAGE_ping:
        break;
    default:
        return; /* hello, ready: the board says it */
    }
    snprintf(answer.text, sizeof answer.text, "%s",
             lg_run_state_name((lg_run_state)atomic_load(&s->board->s->run_state)));
    lg_control_answer(s->control, peer, &answer);
}

void lg_control_handle(lg_supervisor *s)
{
    struct lg_peer peer;
    struct lg_message m;
    for (int n = 0; n < CONTROL_BATCH_MAX && lg_control_receive(s->control, &peer, &m); n++)
        on_message(s, &peer, &m);
}
