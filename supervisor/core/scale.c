/* `lgsup scale`; see scale.h. */
#include "supervisor/core/scale.h"
#include "supervisor/core/launch_jobs.h"
#include <stdio.h>
#include <string.h>

int lg_scale_check(lg_role role, int n)
{
    switch (role) {
    case LG_ROLE_trainer:
        return LG_FAIL(LG_ERR_USAGE,
                       "the number of trainer ranks decides how sums are rounded and where state "
                       "lies, so it stays while a run lives (trainer.ranks): scale loader, text "
                       "or vae");
    case LG_ROLE_ema:
    case LG_ROLE_ckpt:
        return LG_FAIL(LG_ERR_USAGE,
                       "there is one %s process, which owns its state alone: scale "
                       "loader, text or vae; `lgsup swap %s` replaces it",
                       lg_role_name(role), lg_role_name(role));
    default:
        if (lg_role_scales(role)) break;
        return LG_FAIL(LG_ERR_USAGE, "%s cannot be scaled: loader, text and vae can",
                       lg_role_name(role));
    }
    if (n < 1 || n > LG_INSTANCES_MAX)
        return LG_FAIL(LG_ERR_USAGE, "%d instances: 1 to %d of a role can run", n,
                       LG_INSTANCES_MAX);
    return 0;
}

/* ---- the table ---- */

struct lg_instance *lg_instance_find(lg_supervisor *s, lg_role role, int index)
{
    for (int i = 0; i < s->n_instances; i++)
        if (s->instance[i].role == role && s->instance[i].index == index) return &s->instance[i];
    return NULL;
}

struct lg_instance *lg_instance_add(lg_supervisor *s, lg_role role, int index)
{
    LG_ASSERT(s->n_instances < LG_INSTANCE_TABLE && !lg_instance_find(s, role, index));
    int at = s->n_instances;
    while (at > 0 && lg_row((int)s->instance[at - 1].role, s->instance[at - 1].index) >
                         lg_row((int)role, index))
        at--;
    memmove(&s->instance[at + 1], &s->instance[at],
            sizeof *s->instance * (size_t)(s->n_instances - at));
    s->n_instances++;
    s->instance[at] = (struct lg_instance){.role = role, .index = index, .child = LG_CHILD_NONE};
    return &s->instance[at];
}

void lg_instances_sweep(lg_supervisor *s)
{
    int n = 0;
    for (int i = 0; i < s->n_instances; i++) {
        if (s->instance[i].state == LG_INSTANCE_absent) continue;
        if (n != i) s->instance[n] = s->instance[i];
        n++;
    }
    s->n_instances = n;
}

static bool stays(const struct lg_instance *i)
{
    return i->state != LG_INSTANCE_draining && i->state != LG_INSTANCE_absent;
}

static int count(const lg_supervisor *s, lg_role role)
{
    int n = 0;
    for (int i = 0; i < s->n_instances; i++)
        n += s->instance[i].role == role && stays(&s->instance[i]);
    return n;
}

/* -1: every row is taken, perhaps by one that is still leaving. Who joins unasked does so below the
 * wanted number alone: the indices stay those of a run of this size. */
static int free_index(lg_supervisor *s, lg_role role)
{
    int rows = s->launcher->joins_unasked ? (int)atomic_load(&s->board->s->wanted[role])
                                          : LG_INSTANCES_MAX;
    for (int k = 0; k < rows; k++) {
        lg_life life;
        lg_board_life(s->board, role, k, &life);
        if (life == LG_LIFE_NONE && !lg_instance_find(s, role, k)) return k;
    }
    return -1;
}

static struct lg_instance *highest(lg_supervisor *s, lg_role role)
{
    for (int i = s->n_instances - 1; i >= 0; i--)
        if (s->instance[i].role == role && stays(&s->instance[i])) return &s->instance[i];
    return NULL;
}

/* A process that has joined unasked may be on the board and not have been looked at: it is told to
 * leave when it has. */
static bool can_leave(lg_supervisor *s, const struct lg_instance *i)
{
    lg_life life;
    if (i->child.pidfd >= 0) return true;
    lg_board_life(s->board, i->role, i->index, &life);
    return life != LG_LIFE_STARTING && life != LG_LIFE_RUNNING;
}

/* Who has joined unasked just when it was not wanted any more becomes an instance, which then leaves. */
static void find_strays(lg_supervisor *s, lg_role role)
{
    int wanted = (int)atomic_load(&s->board->s->wanted[role]);
    for (int k = wanted; k < LG_INSTANCES_MAX; k++) {
        lg_life life;
        lg_board_life(s->board, role, k, &life);
        if (life == LG_LIFE_NONE || lg_instance_find(s, role, k)) continue;
        lg_instance_raise(s, lg_instance_add(s, role, k), LG_INSTANCE_EVENT_start);
        atomic_fetch_add(&s->board->s->members_epoch, 1);
    }
}

void lg_scale_adjust(lg_supervisor *s, lg_role role)
{
    int wanted = (int)atomic_load(&s->board->s->wanted[role]), k;
    if (s->launcher->joins_unasked) find_strays(s, role);
    while (count(s, role) > wanted && can_leave(s, highest(s, role)))
        lg_instance_raise(s, highest(s, role), LG_INSTANCE_EVENT_drain);
    while (count(s, role) < wanted && (k = free_index(s, role)) >= 0) {
        lg_instance_raise(s, lg_instance_add(s, role, k), LG_INSTANCE_EVENT_start);
        atomic_fetch_add(&s->board->s->members_epoch, 1);
    }
}

/* ---- orders ---- */

static void answer(lg_supervisor *s, lg_role role, lg_message_kind kind, int code, const char *text)
{
    struct lg_message m = {.kind = kind, .role = LG_ROLE_lgsup, .level = -code};
    if (!s->scale_peer[role].bytes) return;
    snprintf(m.text, sizeof m.text, "%s", text);
    lg_supervisor_answer(s, &s->scale_peer[role], &m);
    s->scale_peer[role].bytes = 0;
}

/* Of text encoders it names those that the run has. */
static int fail_absent(const lg_plan *p, lg_role role)
{
    char names[LG_TEXTS_MAX * 16] = "";
    size_t at = 0;
    for (int k = 0; lg_role_is_text(role) && k < p->n_texts && at < sizeof names; k++)
        at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", k ? ", " : "",
                               lg_role_name(p->text[k].role));
    if (*names)
        return LG_FAIL(LG_ERR_USAGE, "this run has no %s: its text encoders are %s",
                       lg_role_name(role), names);
    return LG_FAIL(LG_ERR_USAGE, "this run has no %s: its pipeline.toml names no %s.model",
                   lg_role_name(role), lg_role_name(role));
}

static int check_order(const lg_supervisor *s, lg_role role, int n)
{
    LG_TRY(lg_scale_check(role, n));
    if (s->run->plan.instances[role] == 0) return fail_absent(&s->run->plan, role);
    if (s->step != LG_RUN_STEP_running)
        return LG_FAIL(LG_ERR_BUSY, "the run is %s: scale it while it is running",
                       lg_run_state_name((lg_run_state)atomic_load(&s->board->s->run_state)));
    if (s->swap) return LG_FAIL(LG_ERR_BUSY, "a swap is under way: scale when it is over");
    return 0;
}

static void refuse(lg_supervisor *s, lg_role role, int rc, const char *why)
{
    answer(s, role, LG_MESSAGE_error, rc, why);
    lg_err_clear();
}

/* The instances can come: the order is carried out, unless another has come after it, or the run has
 * changed meanwhile. */
static void on_prepared(lg_supervisor *s, const struct lg_launch_order *o, int rc, const char *why)
{
    lg_role role = o->role;
    if (o->order != s->scale_order[role]) return;
    s->scale_waits[role] = false;
    if (rc == 0 && (rc = check_order(s, role, o->n)) < 0) why = lg_err_message();
    if (rc < 0) {
        refuse(s, role, rc, why);
        return;
    }
    int before = (int)atomic_exchange(&s->board->s->wanted[role], (uint32_t)o->n);
    lg_progress_say(&s->progress, LG_INFO, "%s: scaled from %d to %d instances", lg_role_name(role),
                    before, o->n);
    lg_scale_adjust(s, role);
}

void lg_scale_order(lg_supervisor *s, const struct lg_peer *peer, lg_role role, int n)
{
    if ((int)role < 0 || role >= LG_ROLE_COUNT) return;
    if (s->scale_peer[role].bytes)
        answer(s, role, LG_MESSAGE_error, LG_ERR_BUSY, "another scale of this role came after it");
    s->scale_peer[role] = *peer;
    s->scale_order[role]++;
    s->scale_waits[role] = false;
    int rc = check_order(s, role, n);
    if (rc < 0) {
        refuse(s, role, rc, lg_err_message());
        return;
    }
    s->scale_waits[role] = true;
    lg_launch_prepare(
        s, &(struct lg_launch_order){.role = role,
                                     .first = (int)atomic_load(&s->board->s->wanted[role]),
                                     .n = n,
                                     .order = s->scale_order[role],
                                     .then = on_prepared});
}

static bool is_settled(const lg_supervisor *s, lg_role role)
{
    int well = 0;
    for (int i = 0; i < s->n_instances; i++) {
        const struct lg_instance *p = &s->instance[i];
        if (p->role != role || p->state == LG_INSTANCE_absent) continue;
        if (p->state != LG_INSTANCE_ready && p->state != LG_INSTANCE_resting) return false;
        well++;
    }
    return well == (int)atomic_load(&s->board->s->wanted[role]);
}

void lg_scale_look(lg_supervisor *s)
{
    for (lg_role role = 0; lg_role_scales(role); role++) {
        char text[64];
        /* A row may have been in the way of one that is wanted: look again. */
        if (s->step == LG_RUN_STEP_running) lg_scale_adjust(s, role);
        if (s->step != LG_RUN_STEP_running) {
            answer(s, role, LG_MESSAGE_error, LG_ERR_BUSY,
                   "the run ends before it was carried out");
        } else if (s->scale_peer[role].bytes && !s->scale_waits[role] && is_settled(s, role)) {
            snprintf(text, sizeof text, "%s: %u ready", lg_role_name(role),
                     atomic_load(&s->board->s->wanted[role]));
            answer(s, role, LG_MESSAGE_ok, 0, text);
        }
    }
}
