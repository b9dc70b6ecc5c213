/* What is done when a swap goes on; see states.def and swap_actions.h. */
#include "supervisor/core/swap_actions.h"
#include "base/clock.h"
#include "supervisor/core/scale.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int lg_swap_log(const lg_supervisor *s, int index, char ret[LG_PATH_BYTES])
{
    return lg_run_path(s->run, ret, "logs/%s.%d.next.log", lg_role_name(s->swap->role), index);
}

void lg_swap_answer(lg_supervisor *s, const struct lg_peer *peer, int code, const char *text)
{
    struct lg_message m = {
        .kind = code < 0 ? LG_MESSAGE_error : LG_MESSAGE_ok, .role = LG_ROLE_lgsup, .level = -code};
    snprintf(m.text, sizeof m.text, "%s", text);
    lg_supervisor_answer(s, peer, &m);
}

void lg_swap_await(lg_supervisor *s)
{
    (void)s; /* swap.c looks at the standbys */
}

/* ---- the hand-over ---- */

static int put_in_force(lg_supervisor *s)
{
    const struct lg_swap *w = s->swap;
    for (int k = 0; k < w->n; k++)
        LG_TRY(lg_programs_set(&s->programs, w->role, w->standby[k].index, w->program));
    return 0;
}

static void take_out_of_force(lg_supervisor *s)
{
    const struct lg_swap *w = s->swap;
    for (int k = 0; k < w->n; k++) lg_programs_revert(&s->programs, w->role, w->standby[k].index);
}

/* The disk has answered; the swap may be over by now, and another under way. */
static void on_recorded(lg_supervisor *s, uint64_t tag, int rc, const char *why)
{
    struct lg_swap *w = s->swap;
    if (!w || w->id != tag) return;
    if (rc < 0 && w->state == LG_SWAP_recording) {
        w->fault = LG_ERR_IO;
        snprintf(w->why, sizeof w->why, "%.250s", why);
    }
    lg_swap_raise(s, rc < 0 ? LG_SWAP_EVENT_unrecorded : LG_SWAP_EVENT_recorded);
}

/* Until it is on the disk an instance that dies is started again with the program that it had. */
void lg_swap_record(lg_supervisor *s)
{
    int rc = put_in_force(s);
    if (rc < 0) {
        on_recorded(s, s->swap->id, rc, lg_err_message());
        lg_err_clear();
        return;
    }
    lg_background_save_programs(s, on_recorded, s->swap->id);
    if (s->swap->state == LG_SWAP_recording) take_out_of_force(s);
}

static void on_reverted(lg_supervisor *s, uint64_t tag, int rc, const char *why)
{
    if (rc < 0) lg_progress_say(&s->progress, LG_WARN, "%s", why);
    if (s->swap && s->swap->id == tag) s->swap->reverting = false;
}

/* The swap is answered when the disk has it: a later lgsup starts what DIR/programs says. */
static void write_back(lg_supervisor *s)
{
    s->swap->reverting = true;
    lg_background_save_programs(s, on_reverted, s->swap->id);
}

/* Whether the new program stands on the disk by now is unknown: the former is written once more. */
void lg_swap_unrecord(lg_supervisor *s)
{
    write_back(s);
    lg_swap_give_up(s);
}

void lg_swap_hand_over(lg_supervisor *s)
{
    const struct lg_swap *w = s->swap;
    LG_ASSERT(put_in_force(s) == 0);
    for (int k = 0; k < w->n; k++) {
        struct lg_instance *i = lg_instance_find(s, w->role, w->standby[k].index);
        if (i) lg_instance_raise(s, i, LG_INSTANCE_EVENT_yield);
    }
    /* After every row.leave (lg_trainer_may_leave). */
    if (w->role == LG_ROLE_trainer) atomic_store(&s->board->s->yield, 1);
    lg_nudge_all(s);
}

/* ---- the end ---- */

/* Whom nobody needs any more: all of them, or those whose instance is at rest. */
void lg_swap_dismiss(lg_supervisor *s)
{
    const struct lg_swap *w = s->swap;
    for (int k = 0; k < w->n; k++) lg_child_signal(&w->standby[k].child, SIGKILL);
}

void lg_swap_complete(lg_supervisor *s)
{
    struct lg_swap *w = s->swap;
    snprintf(w->text, sizeof w->text, "%s runs %.300s", w->what, w->program);
    lg_progress_say(&s->progress, LG_INFO, "swapped: %s (%.0f ms)", w->text,
                    (double)(lg_now_ns() - w->start_ns) / LG_MS_NS);
    lg_swap_dismiss(s);
}

void lg_swap_give_up(lg_supervisor *s)
{
    struct lg_swap *w = s->swap;
    w->code = w->fault;
    lg_swap_dismiss(s);
    snprintf(w->text, sizeof w->text,
             "%s goes on with its former program: the new one, %.60s, %.235s", w->what, w->program,
             w->why);
    lg_progress_say(&s->progress, LG_WARN, "swap rolled back: %s", w->text);
}

/* What has been replaced goes back by being killed: nothing is lost by that, ever. */
void lg_swap_roll_back(lg_supervisor *s)
{
    const struct lg_swap *w = s->swap;
    for (int k = 0; k < w->n; k++) {
        lg_programs_revert(&s->programs, w->role, w->standby[k].index);
        struct lg_instance *i = lg_instance_find(s, w->role, w->standby[k].index);
        if (!w->standby[k].became || !i) continue;
        i->excused = i->child.pidfd >= 0;
        lg_instance_sigkill(i);
    }
    write_back(s);
    lg_swap_give_up(s);
}

void lg_swap_close(lg_supervisor *s)
{
    const struct lg_swap *w = s->swap;
    if (w->peer.bytes) lg_swap_answer(s, &w->peer, w->code, w->text);
    lg_swap_free(s);
}

void lg_swap_free(lg_supervisor *s)
{
    if (!s->swap) return;
    for (int k = 0; k < s->swap->n; k++)
        if (s->swap->standby[k].child.pidfd >= 0) close(s->swap->standby[k].child.pidfd);
    free(s->swap);
    s->swap = NULL;
}
