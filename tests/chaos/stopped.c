/* Episodes in which somebody stands still: the terminal that lgsup writes to, lgsup itself, the whole
 * machine. What must go on goes on, and nobody who only stood still is taken for dead. */
#include "base/clock.h"
#include "tests/chaos/chaos.h"
#include <signal.h>
#include <sys/pidfd.h>
#include <unistd.h>

enum {
    FROZEN_MS_MAX =
        15000, /* until a stage that was killed is back, or the run has ended: lgsup gives those who
                            * leave 10 s */
    STOP_MS_MAX = 60000, /* `lgsup stop`: a step and a checkpoint */
    STEPS_LEFT_MIN = 60,
    STOPPED_MS_MIN = 1000,
    STOPPED_MS_MAX = 3000,
    START_MS_MAX = 20000,
    AFTER_SPAWN_MS_MAX = 150,
    SUSPENDED_MS_MIN = 500,
    SUSPENDED_MS_MAX = 5000,
    AWAKE_MS_MIN = 1500,
    AWAKE_MS_MAX = 20000
};

static int64_t draw_ms(struct chaos_run *r, int min, int max)
{
    return min + (int64_t)chaos_draw(r, (uint32_t)(max - min));
}

/* ---- a frozen terminal ---- */

bool chaos_begin_frozen(struct chaos_run *r, int64_t now)
{
    chaos_freeze_terminal(r, true);
    r->episode.todo = 1 + (int)chaos_draw(r, 3); /* more deaths */
    if (!chaos_episode_kill(r, LG_ROLE_ckpt)) {
        chaos_freeze_terminal(r, false);
        return false;
    }
    chaos_episode_next(r, now, FROZEN_MS_MAX);
    return true;
}

static void stop_while_frozen(struct chaos_run *r, int64_t now)
{
    r->episode.takes_end = true;
    r->episode.child = chaos_stop_lgsup(r);
    r->stops++;
    chaos_episode_next(r, now, STOP_MS_MAX);
}

static void follow_stop(struct chaos_run *r, int64_t now)
{
    if (r->episode.child || !r->episode.ended) {
        chaos_episode_late(r, now, "`lgsup stop` did not end the run");
        return;
    }
    if (r->episode.child_code || r->code)
        chaos_fail(r, "frozen: `lgsup stop` ended with %d, lgsup with %d", r->episode.child_code,
                   r->code);
    r->done = chaos_is_final(r);
    chaos_episode_over(r);
}

void chaos_follow_frozen(struct chaos_run *r, int64_t now)
{
    if (r->episode.phase == 2) {
        follow_stop(r, now);
    } else if (!r->pid) { /* at its end already, or it has failed */
        chaos_episode_over(r);
    } else if (!chaos_episode_is_replaced(r)) {
        chaos_episode_late(r, now, "a killed stage was not replaced, nor did the run end");
    } else if (r->episode.todo-- > 0 && chaos_episode_kill(r, LG_ROLE_ckpt)) {
        r->episode.until_ns = now + FROZEN_MS_MAX * LG_MS_NS;
    } else if (chaos_steps_left(r) > STEPS_LEFT_MIN && chaos_draw(r, 3) == 0) {
        stop_while_frozen(r, now);
    } else {
        chaos_freeze_terminal(r, false);
        chaos_note(r, CHAOS_frozen, -1, 0);
        chaos_episode_over(r);
    }
}

/* ---- lgsup stopped while others die ---- */

static bool stop_lgsup(struct chaos_run *r)
{
    struct chaos_victim v;
    if (!chaos_find_victim(r, LG_ROLE_lgsup, 0, &v)) return false;
    pidfd_send_signal(v.pidfd, SIGSTOP, NULL, 0);
    r->episode.stopped[r->episode.n_stopped++] = v.pidfd;
    return true;
}

static void continue_all(struct chaos_run *r)
{
    for (int i = 0; i < r->episode.n_stopped; i++) {
        pidfd_send_signal(r->episode.stopped[i], SIGCONT, NULL, 0);
        close(r->episode.stopped[i]);
    }
    r->episode.n_stopped = 0;
}

static bool among(const struct chaos_victim *v, int n, const struct chaos_victim *one)
{
    for (int i = 0; i < n; i++)
        if (v[i].role == one->role && v[i].index == one->index) return true;
    return false;
}

bool chaos_begin_lgsup_stopped(struct chaos_run *r, int64_t now)
{
    struct chaos_victim v[3], one;
    int n = 0, wanted = 1 + (int)chaos_draw(r, (uint32_t)LG_ARRAY_LEN(v));
    if (!stop_lgsup(r)) return false;
    for (int i = 0; i < wanted && chaos_draw_victim(r, LG_ROLE_keeper, &one); i++)
        if (among(v, n, &one))
            close(one.pidfd);
        else
            v[n++] = one;
    chaos_kill_all(r, CHAOS_lgsup_stopped, v, n);
    chaos_episode_next(r, now, draw_ms(r, STOPPED_MS_MIN, STOPPED_MS_MAX));
    return true;
}

void chaos_follow_lgsup_stopped(struct chaos_run *r, int64_t now)
{
    if (now < r->episode.until_ns) return;
    continue_all(r);
    chaos_episode_over(r);
}

/* ---- stopped right behind a start's last spawn ---- */

bool chaos_begin_start_stopped(struct chaos_run *r, int64_t now)
{
    for (int role = 0; role <= LG_ROLE_keeper; role++)
        r->episode.instances[role] = chaos_instances(r, role);
    if (!chaos_has_published(r) || !chaos_strike_power(r, CHAOS_start_stopped)) return false;
    r->episode.until_ns = now + START_MS_MAX * LG_MS_NS;
    return true;
}

static bool all_spawned(struct chaos_run *r)
{
    chaos_look_for_board(r);
    if (!r->pid || chaos_run_id(r->board) == r->episode.run_id) return false;
    for (int role = 0; role <= LG_ROLE_keeper; role++)
        for (int k = 0; k < r->episode.instances[role]; k++)
            if (!atomic_load(&lg_board_row(r->board, (lg_role)role, k)->pid)) return false;
    return true;
}

/* The keeper, and of those who own state each with three chances in four. */
static void kill_owners(struct chaos_run *r)
{
    static const int roles[] = {LG_ROLE_keeper, LG_ROLE_trainer, LG_ROLE_ema, LG_ROLE_ckpt};
    struct chaos_victim v[LG_ROWS];
    int n = 0;
    for (size_t i = 0; i < LG_ARRAY_LEN(roles); i++)
        for (int k = 0; k < r->episode.instances[roles[i]]; k++)
            if ((i == 0 || chaos_draw(r, 4) > 0) && chaos_find_victim(r, roles[i], k, &v[n])) n++;
    chaos_kill_all(r, CHAOS_start_stopped, v, n);
}

void chaos_follow_start_stopped(struct chaos_run *r, int64_t now)
{
    struct chaos_episode *e = &r->episode;
    switch (e->phase) {
    case 0:
        if (all_spawned(r))
            chaos_episode_next(r, now, chaos_draw(r, 2) ? 0 : chaos_draw(r, AFTER_SPAWN_MS_MAX));
        else if (now > e->until_ns) /* a start that a failing call has ended, say */
            chaos_episode_over(r);
        break;
    case 1:
        if (now < e->until_ns) return;
        if (stop_lgsup(r))
            chaos_episode_next(r, now, chaos_draw(r, AFTER_SPAWN_MS_MAX));
        else
            chaos_episode_over(r);
        break;
    case 2:
        if (now < e->until_ns) return;
        kill_owners(r);
        chaos_episode_next(r, now, draw_ms(r, STOPPED_MS_MIN, STOPPED_MS_MAX));
        break;
    default:
        if (now < e->until_ns) return;
        continue_all(r);
        chaos_episode_over(r);
    }
}

/* ---- a machine that was suspended ---- */

static uint32_t restarts(const struct chaos_run *r)
{
    uint32_t n = 0;
    for (int i = 0; i < LG_ROWS; i++) n += atomic_load(&r->board->s->row[i].restarts);
    return n;
}

/* lgsup first: what it has not reaped keeps its pid. */
bool chaos_begin_suspend(struct chaos_run *r, int64_t now)
{
    struct chaos_episode *e = &r->episode;
    int pid[CHAOS_STOPPED_MAX];
    e->restarts = restarts(r);
    if (!stop_lgsup(r)) return false;
    int n = chaos_children(r->pid, pid, CHAOS_STOPPED_MAX / 2);
    n += chaos_children(getpid(), pid + n, CHAOS_STOPPED_MAX / 2);
    for (int i = 0; i < n && e->n_stopped < CHAOS_STOPPED_MAX; i++) {
        int fd = pid[i] == r->pid ? -1 : pidfd_open(pid[i], 0);
        if (fd < 0) continue;
        pidfd_send_signal(fd, SIGSTOP, NULL, 0);
        e->stopped[e->n_stopped++] = fd;
    }
    chaos_episode_next(r, now, draw_ms(r, SUSPENDED_MS_MIN, SUSPENDED_MS_MAX));
    return true;
}

void chaos_follow_suspend(struct chaos_run *r, int64_t now)
{
    struct chaos_episode *e = &r->episode;
    if (e->phase == 1 && now >= e->until_ns) {
        chaos_note(r, CHAOS_suspend, -1, 0);
        continue_all(r); /* lgsup first: the others look late to it */
        e->commit = r->commit;
        e->began_ns = now;
        chaos_episode_next(r, now, AWAKE_MS_MAX);
    } else if (e->phase == 2) {
        bool moved = r->commit > e->commit + 1 || chaos_is_final(r) || !r->pid;
        if (!moved && now < e->until_ns) return; /* it is stuck's matter */
        if (now < e->began_ns + AWAKE_MS_MIN * LG_MS_NS && r->pid) return;
        /* Of another run: lgsup was about to go back to a checkpoint. */
        uint32_t n = chaos_run_id(r->board) == e->run_id ? restarts(r) - e->restarts : 0;
        if (n && r->pid)
            chaos_fail(r, "suspend: %u processes that only stood still were replaced", n);
        chaos_episode_over(r);
    }
}
