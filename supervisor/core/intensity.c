/* Restart intensity; see intensity.h. */
#include "supervisor/core/intensity.h"
#include "base/clock.h"
#include "config/texts.h"
#include "supervisor/run/child.h"
#include <signal.h>
#include <stdlib.h>

struct lg_restart_policy lg_restart_policy(const lg_config *c, lg_role role)
{
    struct lg_restart_policy own[LG_ROLE_keeper] = {
#define OWN(role, section)                                                                         \
    [LG_ROLE_##role] = {c->section##_restarts_max, c->section##_restart_window_s}
        OWN(loader, loader), OWN(vae, vae),         OWN(trainer, trainer),
        OWN(ema, ema),       OWN(ckpt, checkpoint),
#undef OWN
    };
    LG_ASSERT(role < LG_ROLE_keeper);
    if (lg_role_is_text(role)) {
        const struct lg_text_config text = lg_text_keys(c, role);
        own[role] = (struct lg_restart_policy){text.restarts_max, text.restart_window_s};
    }
    return (struct lg_restart_policy){
        .deaths_max = own[role].deaths_max ? own[role].deaths_max : c->supervisor_restarts_max,
        .window_s = own[role].window_s ? own[role].window_s : c->supervisor_restart_window_s};
}

int lg_intensity_init(struct lg_intensity *t, int64_t deaths_max, int64_t window_s)
{
    *t = (struct lg_intensity){.deaths_max = (int)deaths_max, .window_ns = window_s * LG_S_NS};
    t->death_ns = calloc((size_t)deaths_max, sizeof *t->death_ns);
    if (!t->death_ns) return LG_FAIL(LG_ERR_NOSPACE, "no memory to count restarts");
    return 0;
}

void lg_intensity_free(struct lg_intensity *t)
{
    free(t->death_ns);
    t->death_ns = NULL;
}

bool lg_intensity_exceeded(struct lg_intensity *t, int64_t now_ns, uint64_t commit)
{
    if (commit > t->commit) t->count = 0;
    t->commit = commit;
    while (t->count && now_ns - t->death_ns[t->first] > t->window_ns) {
        t->first = (t->first + 1) % t->deaths_max;
        t->count--;
    }
    if (t->count == t->deaths_max) return true;
    t->death_ns[(t->first + t->count) % t->deaths_max] = now_ns;
    t->count++;
    return false;
}

bool lg_death_is_failure(const struct lg_death *d)
{
    bool killed = d->exit_code == LG_EXIT_SIGNAL + SIGKILL || d->exit_code == LG_EXIT_UNKNOWN;
    bool idle = d->phase == LG_PHASE_WAITING || d->phase == LG_PHASE_DONE;
    if (d->late || !d->ready) return true;
    return d->exit_code != 0 && !(killed && idle);
}

static uint64_t mark(const _Atomic(lg_mark) *m)
{
    return atomic_load_explicit(m, memory_order_acquire);
}

/* A sum: each of these only grows. A rank's samples do not count, a micro-batch is lost with it. */
uint64_t lg_own_progress(const struct lg_board_row *row, lg_role role)
{
    if (lg_role_scales(role)) return atomic_load_explicit(&row->samples, memory_order_relaxed);
    return mark(&row->grads) + mark(&row->partial) + mark(&row->commit) +
           mark(&row->staged_moments) + mark(&row->staged) + mark(&row->published);
}

bool lg_failures_exceeded(struct lg_failures *t, int max, const struct lg_death *d)
{
    if (d->progress != t->progress) t->count = 0;
    t->progress = d->progress;
    if (!lg_death_is_failure(d)) return false;
    if (t->count == 0) {
        t->shortest_ns = INT64_MAX;
        t->longest_ns = 0;
    } else {
        t->shortest_ns = LG_MIN(t->shortest_ns, d->lived_ns);
        t->longest_ns = LG_MAX(t->longest_ns, d->lived_ns);
    }
    return ++t->count > max;
}
