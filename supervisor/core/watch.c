/* Looks at the board and at what was sent, and raises what follows; see states.def.
 *
 * What is so stands on the board: a ready or hello message only makes the look come sooner.
 *
 * A stage that waits, or has nothing left to do, still looks around many times a second, and long work
 * beats while it makes progress (base/heartbeat.h), so a late heartbeat tells of a hang in every phase, the
 * setup included, which may take as long as it likes. It is believed only after two looks, a second apart,
 * between which lgsup ran normally itself: after a suspended machine or a stopped lgsup every
 * heartbeat looks old. */
#include "base/clock.h"
#include "shm/commit.h"
#include "supervisor/core/keep_jobs.h"
#include "supervisor/core/launch_jobs.h"
#include "supervisor/core/scale.h"
#include "supervisor/core/swap.h"
#include "supervisor/run/stuck.h"
#include "supervisor/views/status.h"
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum {
    REQUEST_AFTER_MS = 1000,
    REQUEST_AGAIN_MS = 30000,
    HANG_LOOK_MS = 1000,
    HANG_LOOK_GAP_MS_MAX = 3000,
    HANG_LOOKS = 2,
    KILLED_S_MAX = 5,
    STATUS_MS = 10000,
    CONTROL_BATCH_MAX = 256
};

static void request(lg_supervisor *s, struct lg_instance *i, int64_t now_ns)
{
    if (now_ns - i->spawned_ns < REQUEST_AFTER_MS * LG_MS_NS) return;
    i->spawned_ns = now_ns + (REQUEST_AGAIN_MS - REQUEST_AFTER_MS) * LG_MS_NS;
    lg_launch_request(s, i->role, i->index);
}

/* An instance whose process comes to the board by itself. */
static void look_for_process(lg_supervisor *s, struct lg_instance *i, int64_t now_ns)
{
    struct lg_sighting seen = s->launcher->look(s->board, i->role, i->index);
    switch (seen.what) {
    case LG_SEEN_NOBODY:
        request(s, i, now_ns);
        return;
    case LG_SEEN_UNCLEAR:
        return;
    case LG_SEEN_SOMEBODY:
        i->child = seen.child;
        i->incarnation = seen.who;
        i->spawned_ns = now_ns;
        return;
    case LG_SEEN_DEAD:
        i->incarnation = seen.who;
        i->exit_code = LG_EXIT_UNKNOWN;
        lg_instance_raise(s, i, LG_INSTANCE_EVENT_died);
        return;
    }
}

/* Is its heartbeat late? During the setup the limit is ready_s, also for one that was told to leave,
 * which it does afterwards; its first heartbeat may be still to come, and the row has its predecessor's. */
static bool is_late(lg_supervisor *s, const struct lg_instance *i, int64_t now_ns)
{
    const struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    const lg_config *c = s->run->config;
    bool set_up = atomic_load(&row->ready) == i->incarnation;
    int64_t beat_ns = atomic_load_explicit(&row->heartbeat_ns, memory_order_relaxed);
    if (!set_up) beat_ns = LG_MAX(beat_ns, i->spawned_ns);
    return now_ns - beat_ns > (set_up ? c->supervisor_hang_s : c->supervisor_ready_s) * LG_S_NS;
}

static void look_at_setup(lg_supervisor *s, struct lg_instance *i, int64_t now_ns)
{
    if (i->child.pidfd < 0) {
        look_for_process(s, i, now_ns);
        return;
    }
    struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    if (atomic_load_explicit(&row->ready, memory_order_acquire) == i->incarnation)
        lg_instance_raise(s, i, LG_INSTANCE_EVENT_ready);
}

static void look_for_hang(lg_supervisor *s, struct lg_instance *i, int64_t now_ns)
{
    i->late_looks = is_late(s, i, now_ns) ? i->late_looks + 1 : 0;
    if (i->late_looks >= HANG_LOOKS) lg_instance_raise(s, i, LG_INSTANCE_EVENT_late);
}

/* SIGKILL ends a process unless the kernel itself waits for something on its behalf: a disk, a network
 * file system, a driver. Nobody can be put in its place before it has gone, for it may still write
 * (shm/board.h, rule 3); so the user is told what everything waits for. Once; while the
 * run ends also in its status. */
static void look_for_stuck(lg_supervisor *s, struct lg_instance *i, int64_t now_ns)
{
    char name[32], place[96], what[320];
    if (i->child.pidfd < 0 || !i->killed_ns || i->stuck ||
        now_ns - i->killed_ns < KILLED_S_MAX * LG_S_NS)
        return;
    i->stuck = true;
    lg_instance_name(i, name);
    lg_process_place(i->child.pid, place, sizeof place);
    snprintf(what, sizeof what,
             "%s (pid %d) was killed %d s ago and is still there%s%s; it is waited for: a disk, a "
             "network file system or a driver does not answer",
             name, i->child.pid, KILLED_S_MAX, *place ? ", in " : "", place);
    lg_progress_say(&s->progress, LG_WARN, "%s", what);
    if (s->step < LG_RUN_STEP_leaving || s->cause[0]) return;
    snprintf(s->board->s->cause, sizeof s->board->s->cause, "%.400s", what);
    lg_background_save_status(s);
}

/* Where a process comes to the board by itself, an instance may be starting before it has one. */
static bool is_watched(const struct lg_instance *i)
{
    return (i->state == LG_INSTANCE_starting && i->child.pidfd >= 0) ||
           i->state == LG_INSTANCE_ready || i->state == LG_INSTANCE_yielding ||
           i->state == LG_INSTANCE_draining;
}

static void look_for_hangs(lg_supervisor *s, int64_t now_ns)
{
    int64_t gap_ns = now_ns - s->last_hang_look_ns;
    if (gap_ns < HANG_LOOK_MS * LG_MS_NS) return;
    s->last_hang_look_ns = now_ns;
    bool normal = gap_ns < HANG_LOOK_GAP_MS_MAX * LG_MS_NS;
    for (int i = 0; i < s->n_instances; i++) {
        if (!normal) s->instance[i].late_looks = 0;
        look_for_stuck(s, &s->instance[i], now_ns);
        if (normal && is_watched(&s->instance[i])) look_for_hang(s, &s->instance[i], now_ns);
    }
    if (s->step < LG_RUN_STEP_leaving) lg_keep_look(s);
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
    return !s->swap && !s->asks_keeper;
}

void lg_watch_look(lg_supervisor *s)
{
    int64_t now_ns = lg_now_ns();
    look_at_instances(s, now_ns);
    lg_keep_look_at_copies(s);
    lg_swap_look(s);
    lg_scale_look(s);
    if (!s->announced && all_settled(s)) {
        s->announced = true;
        lg_run_raise(s, LG_RUN_EVENT_all_ready);
    }
    if (lg_commit_complete(s->board) && lg_cluster_lets_go(s))
        lg_run_raise(s, LG_RUN_EVENT_complete);
    if (all_gone(s))
        lg_run_raise(s, LG_RUN_EVENT_all_gone);
    else if (s->leave_by_ns && now_ns > s->leave_by_ns)
        lg_run_raise(s, LG_RUN_EVENT_overdue);
    if (now_ns - s->last_status_ns > STATUS_MS * LG_MS_NS) {
        s->last_status_ns = now_ns;
        lg_background_save_status(s);
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
    if (i && m->level >= LG_ERROR) snprintf(i->said, sizeof i->said, "%.400s", m->text);
    /* An error is repeated with the death that follows it. */
    if (m->level < LG_ERROR)
        lg_progress_say(&s->progress, (lg_log_level)m->level, "%s.%d: %s", lg_role_name(m->role),
                        m->index, m->text);
}

void lg_control_message(lg_supervisor *s, const struct lg_peer *peer, const struct lg_message *m)
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
    case LG_MESSAGE_take:
        lg_cluster_on_take(s, &answer);
        lg_supervisor_answer(s, peer, &answer);
        return;
    case LG_MESSAGE_ping:
        break;
    default:
        return; /* hello, ready: the board says it */
    }
    snprintf(answer.text, sizeof answer.text, "%s",
             lg_run_state_name((lg_run_state)atomic_load(&s->board->s->run_state)));
    lg_supervisor_answer(s, peer, &answer);
}

void lg_control_handle(lg_supervisor *s)
{
    struct lg_peer peer;
    struct lg_message m;
    for (int n = 0; n < CONTROL_BATCH_MAX && lg_control_receive(s->control, &peer, &m); n++)
        lg_control_message(s, &peer, &m);
}
