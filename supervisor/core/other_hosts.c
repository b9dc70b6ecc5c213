/* The loop's side of several hosts (supervisor/hosts/cluster.h): says what is new, and stops a host that has lost. */
#include "supervisor/core/supervise.h"
#include <stdio.h>

enum { NEWS_BATCH_MAX = 16 };

/* Answers of orders go back to the host whose command it was, whoever carries them out. */
static void take_order(lg_supervisor *s, const struct lg_question *q, uint64_t order)
{
    const struct lg_peer peer = {.bytes = sizeof order, .order = order};
    struct lg_message m = {.role = (lg_role)q->role};
    if (q->kind == LG_QUESTION_scale) {
        m.kind = LG_MESSAGE_scale;
        m.level = q->number;
    } else {
        m.kind = LG_MESSAGE_swap;
        m.level = q->index >= 0;
        m.index = LG_MAX(q->index, 0);
        snprintf(m.text, sizeof m.text, "%.*s", LG_MESSAGE_TEXT_MAX, q->text);
    }
    lg_control_message(s, &peer, &m);
}

void lg_supervisor_answer(lg_supervisor *s, const struct lg_peer *peer, const struct lg_message *m)
{
    if (!peer->order)
        lg_control_answer(s->control, peer, m);
    else if (s->cluster)
        lg_cluster_answer(s->cluster, peer->order, m->kind == LG_MESSAGE_ok ? 0 : -m->level,
                          m->text);
}

void lg_cluster_look(lg_supervisor *s)
{
    struct lg_cluster_news n;
    struct lg_question q;
    uint64_t order;
    if (!s->cluster) return;
    while (lg_cluster_order(s->cluster, &q, &order)) take_order(s, &q, order);
    if (s->step >= LG_RUN_STEP_leaving) return;
    for (int i = 0; i < NEWS_BATCH_MAX && lg_cluster_news(s->cluster, &n); i++) {
        if (n.lost) {
            snprintf(s->cause, sizeof s->cause, "this host is not one of the run any more: %.180s",
                     n.text);
            lg_run_raise(s, LG_RUN_EVENT_lost);
            return;
        }
        lg_progress_say(&s->progress, n.bad ? LG_WARN : LG_INFO, "hosts: %s", n.text);
        lg_nudge_all(s);
    }
}

bool lg_cluster_lets_go(lg_supervisor *s)
{
    return !s->cluster || lg_cluster_finish(s->cluster);
}

void lg_cluster_on_take(lg_supervisor *s, struct lg_message *ret_answer)
{
    if (s->cluster && lg_cluster_take(s->cluster) == 0) {
        snprintf(ret_answer->text, sizeof ret_answer->text, "the hosts that are there go on");
        return;
    }
    ret_answer->kind = LG_MESSAGE_error;
    ret_answer->level = -LG_ERR_FAILED;
    snprintf(ret_answer->text, sizeof ret_answer->text,
             s->cluster ? "no host of the present epoch is missing, or none that is left has the "
                          "run's state: nothing to take"
                        : "this is a run of one host");
}
