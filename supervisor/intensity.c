/* Restart intensity; see intensity.h. */
#include "supervisor/intensity.h"
#include "base/clock.h"
#include <stdlib.h>

struct lg_restart_policy lg_restart_policy(const lg_config *c, lg_role role)
{
    const struct lg_restart_policy own[LG_ROLE_keeper] = {
#define OWN(role, section)                                                                         \
    [LG_ROLE_##role] = {c->section##_restarts_max, c->section##_restart_window_s}
        OWN(loader, loader),   OWN(text, text), OWN(vae, vae),
        OWN(trainer, trainer), OWN(ema, ema),   OWN(ckpt, checkpoint),
#undef OWN
    };
    LG_ASSERT(role < LG_ROLE_keeper);
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
