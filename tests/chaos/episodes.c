/* Faults that last and have several parts: one at a time, nothing else on top; see chaos.h. */
#include "base/clock.h"
#include "tests/chaos/chaos.h"
#include <string.h>
#include <sys/wait.h>

struct functions {
    bool (*begin)(struct chaos_run *r, int64_t now_ns);
    void (*follow)(struct chaos_run *r, int64_t now_ns);
};
static const struct functions of[CHAOS_FAULTS] = {
#define FAULT(name, kind, needs, cards, doc) kind(name)
#define STROKE(name)
#define EPISODE(name) [CHAOS_##name] = {chaos_begin_##name, chaos_follow_##name},
#include "tests/chaos/faults.def"
#undef EPISODE
#undef STROKE
#undef FAULT
};

bool chaos_is_episode(chaos_fault f)
{
    return of[f].begin != NULL;
}

bool chaos_episode_begin(struct chaos_run *r, chaos_fault f, int64_t now_ns)
{
    LG_ASSERT(chaos_is_episode(f) && !r->episode.on);
    if (!r->pid || !r->spoke_ns || r->commit == LG_MARK_NONE || !chaos_is_calm(r)) return false;
    chaos_look_for_board(
        r); /* of this lgsup, and with memory that is in use: a start is no run yet */
    if ((int)atomic_load(&lg_board_row(r->board, LG_ROLE_lgsup, 0)->pid) != r->pid ||
        lg_board_global_commit(r->board) == LG_MARK_NONE)
        return false;
    memset(&r->episode, 0, sizeof r->episode);
    r->episode.fault = f;
    r->episode.began_ns = now_ns;
    r->episode.commit = r->commit;
    r->episode.run_id = chaos_run_id(r->board);
    r->episode.on = of[f].begin(r, now_ns);
    return r->episode.on;
}

void chaos_episode_follow(struct chaos_run *r, int64_t now_ns)
{
    if (r->episode.on) of[r->episode.fault].follow(r, now_ns);
}

void chaos_episode_next(struct chaos_run *r, int64_t now_ns, int64_t ms)
{
    r->episode.phase++;
    r->episode.until_ns = now_ns + ms * LG_MS_NS;
}

void chaos_episode_over(struct chaos_run *r)
{
    if (r->episode.takes_end && r->episode.ended && r->start_at_ns == INT64_MAX) r->start_at_ns = 0;
    r->episode.on = r->episode.takes_end = false;
}

bool chaos_episode_late(struct chaos_run *r, int64_t now_ns, const char *what)
{
    if (now_ns < r->episode.until_ns) return false;
    chaos_fail(r, "%s: %s within %.0f s", chaos_fault_name[r->episode.fault], what,
               (double)(r->episode.until_ns - r->episode.began_ns) / LG_S_NS);
    return true;
}

void chaos_child_ended(struct chaos_run *r, int status)
{
    r->episode.child = 0;
    r->episode.child_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool chaos_episode_kill(struct chaos_run *r, lg_role last)
{
    struct chaos_victim v;
    if (!chaos_draw_victim(r, last, &v)) return false;
    r->episode.victim = v;
    chaos_kill_all(r, r->episode.fault, &v, 1);
    return true;
}

bool chaos_episode_is_replaced(const struct chaos_run *r)
{
    const struct chaos_victim *v = &r->episode.victim;
    uint32_t ready = atomic_load(&lg_board_row(r->board, (lg_role)v->role, v->index)->ready);
    return ready && (ready != v->incarnation || chaos_run_id(r->board) != r->episode.run_id);
}
