/* What the machine does to a run: a slow disk, a clock that is set, memory that is not there. */
#include "base/clock.h"
#include "tests/chaos/chaos.h"

enum {
    PUBLISHED_MS_MAX = 120000,
    CLOCK_HOURS_MAX = 48,
    HOUR_S = 3600,
    MEMORY_MS_MAX = 1000,
    MEMORY_KILLS_MAX = 3,
};

/* ---- a slow disk: every fsync takes long, each less than supervisor.hang_s, a checkpoint's more ---- */

static lg_mark published(const struct chaos_run *r)
{
    return atomic_load(&lg_board_row(r->board, LG_ROLE_ckpt, 0)->published);
}

bool chaos_begin_slow_disk(struct chaos_run *r, int64_t now)
{
    int64_t hang_ms = r->hang_s * 1000;
    uint32_t ms = (uint32_t)(hang_ms / 5 + chaos_draw(r, (uint32_t)hang_ms / 4));
    if (chaos_steps_left(r) < 1) return false;
    atomic_store(&r->control->slow_ms, ms);
    chaos_episode_next(r, now, PUBLISHED_MS_MAX);
    return true;
}

/* Until a checkpoint that was begun under it is there. */
void chaos_follow_slow_disk(struct chaos_run *r, int64_t now)
{
    if (published(r) <= r->episode.commit) {
        chaos_episode_late(r, now, "no checkpoint was published on a slow disk");
        return;
    }
    atomic_store(&r->control->slow_ms, 0);
    chaos_note(r, CHAOS_slow_disk, -1, 0);
    chaos_episode_over(r);
}

/* ---- the clock of the day: from now on as many hours off, until it is set again ---- */

void chaos_set_clock(struct chaos_run *r)
{
    int64_t s = (int64_t)chaos_draw(r, 2 * CLOCK_HOURS_MAX * HOUR_S) - CLOCK_HOURS_MAX * HOUR_S;
    atomic_store(&r->control->clock_s, chaos_draw(r, 3) ? s : 0);
    chaos_note(r, CHAOS_clock, -1, 0);
}

/* ---- memory: the kernel kills somebody when a replacement wants to come ---- */

bool chaos_begin_memory(struct chaos_run *r, int64_t now)
{
    r->episode.restarts = chaos_cgroup_kills(r);
    r->episode.todo = 1 + (int)chaos_draw(r, MEMORY_KILLS_MAX);
    if (chaos_cgroup_tighten(r) < 0) return false;
    chaos_episode_kill(r, LG_ROLE_ckpt);
    chaos_episode_next(r, now, MEMORY_MS_MAX);
    return true;
}

void chaos_follow_memory(struct chaos_run *r, int64_t now)
{
    uint32_t kills = chaos_cgroup_kills(r) - r->episode.restarts;
    if (!r->pid) r->start_at_ns = LG_MAX(r->start_at_ns, now + LG_MS_NS);
    if ((int)kills < r->episode.todo && now < r->episode.until_ns) return;
    chaos_cgroup_loosen(r);
    r->kills += kills;
    r->oom_kills += kills;
    for (int role = 0; role < LG_ROLE_COUNT; role++) r->role_kills[role] += (int)kills;
    chaos_note(r, CHAOS_memory, -1, 0);
    chaos_episode_over(r);
}
