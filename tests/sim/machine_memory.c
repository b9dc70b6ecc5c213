/* The memory of the pretended machine: which of its regions is in whose hands, lgsup's side of the keeper
 * (supervisor/core/keep.h), and what a stage does with it (stages/stage.c): open it, wait until it is copied,
 * deposit it at a new keeper.
 *
 * A region that was lost and opened again is another version of it. Whoever works shall do so in the version in
 * which work was begun. */
#include "tests/sim/machine.h"
#include <signal.h>
#include <stdio.h>
#include <string.h>

static unsigned opened_by(lg_role role)
{
    static const unsigned of[] = {
        [LG_ROLE_loader] = 1u << REGION_WINDOW,
        [LG_ROLE_text] = 1u << REGION_WINDOW,
        [LG_ROLE_vae] = 1u << REGION_WINDOW,
        [LG_ROLE_trainer] = 1u << REGION_WINDOW | 1u << REGION_TRAINER,
        [LG_ROLE_ema] = 1u << REGION_TRAINER | 1u << REGION_EMA,
        [LG_ROLE_ckpt] = 1u << REGION_TRAINER | 1u << REGION_EMA | 1u << REGION_STAGING,
    };
    return of[role];
}

static bool keeper_lives(void)
{
    return lives(by_serial(g.keeper));
}

/* Nobody new reaches a keeper whose socket was removed. */
static bool keeper_is_reached(void)
{
    return keeper_lives() && !g.unreachable;
}

/* Who maps what is in use of a region; a keeper whose socket was removed has it, too. */
static const struct proc *holder_of(int r)
{
    unsigned version = g.used[r] ? g.used[r] : g.versions[r];
    if (keeper_lives() && g.keeper_has[r] == version) return by_serial(g.keeper);
    for (int i = 0; i < PROCS_MAX; i++) {
        const struct proc *p = &g.proc[i];
        if (lives(p) && !p->stranger && p->maps[r] == version) return p;
    }
    return NULL;
}
void note_what_nobody_holds(bool lgsup_killed)
{
    for (int r = 0; r < REGIONS; r++) {
        bool held = g.lgsup_has[r] || holder_of(r);
        if (held || !g.unheld[r])
            g.unheld[r] = held ? HELD : lgsup_killed ? BY_LGSUP : BY_THE_MACHINE;
    }
}

/* ---- stages ---- */

bool open_memory(struct proc *p)
{
    unsigned mine = opened_by(p->role);
    if (!keeper_is_reached()) return false;
    p->keeper_epoch = atomic_load(&g.w.board.s->keeper_epoch);
    for (int r = 0; r < REGIONS; r++) {
        if (!(mine >> r & 1) || p->maps[r]) continue;
        if (!g.keeper_has[r]) {
            g.keeper_has[r] = ++g.versions[r];
            LG_ASSERT(g.versions[r] < REGION_VERSIONS_MAX);
        }
        p->maps[r] = g.keeper_has[r];
    }
    return true;
}

bool memory_is_copied(const struct proc *p)
{
    for (int r = 0; r < REGIONS; r++)
        if (p->maps[r] && !g.copied[r][p->maps[r]]) return g.trouble == SIM_USE_UNCOPIED;
    return true;
}

bool deposit_memory(struct proc *p)
{
    uint32_t epoch = atomic_load(&g.w.board.s->keeper_epoch);
    if (!keeper_is_reached() || p->keeper_epoch == epoch) return true;
    p->keeper_epoch = epoch;
    for (int r = 0; r < REGIONS; r++) {
        if (!p->maps[r]) continue;
        if (!g.keeper_has[r]) g.keeper_has[r] = p->maps[r];
        if (g.keeper_has[r] != p->maps[r]) return false;
    }
    return true;
}

void use_memory(const struct proc *p)
{
    static const char *const name[] = {"the window", "the state", "the average", "the staging"};
    for (int r = 0; r < REGIONS; r++) {
        if (!p->maps[r]) continue;
        if (!g.used[r]) g.used[r] = p->maps[r];
        if (g.used[r] != p->maps[r])
            sim_fail(&g.w, "%s.%d works in new memory for %s, which was lost in silence",
                     lg_role_name(p->role), p->index, name[r]);
    }
}

/* ---- lgsup's side of the keeper ---- */

void memory_of_lgsup_ends(void)
{
    memset(g.lgsup_has, 0, sizeof g.lgsup_has);
    note_what_nobody_holds(false);
}

WRAP(int, lg_keep_init, lg_keep *k, const char *run_dir, const char *runtime_dir, bool service)
{
    k->child = LG_CHILD_NONE;
    return 0;
}
/* Is it the one that the board names? */
static bool is_on_board(const struct proc *p)
{
    const struct lg_board_row *row = lg_board_row(&g.w.board, LG_ROLE_keeper, 0);
    return (int)atomic_load(&row->pid) == p->pid && atomic_load(&row->start_time) == p->start;
}
/* lgsup may die before it is named, before it listens, before it has the memory and before lgsup has it. */
static void launch_keeper(lg_board *b, struct lg_child *ret)
{
    if (lives(by_serial(g.keeper))) sim_fail(&g.w, "two keepers");
    lg_incarnation who = lg_keep_enlist(b);
    struct proc *p = new_proc(LG_ROLE_keeper, 0, who);
    p->held = true;
    lgsup_calls();
    lg_board_enter(b, who, p->pid, p->start);
    lgsup_calls();
    p->held = false;
    lgsup_calls();
    p->state = UP_READY;
    g.keeper = p->serial;
    g.unreachable = false;
    memcpy(g.keeper_has, g.lgsup_has, sizeof g.keeper_has);
    lgsup_calls();
    *ret = (struct lg_child){.pid = p->pid, .pidfd = PIDFD_FIRST + (int)p->serial, .mine = true};
}
/* Does not fail twice in a row: a keeper that cannot be started parks the run. */
WRAP(int, lg_keep_launch, const lg_keep *k, lg_board *b, bool first, struct lg_child *ret)
{
    lgsup_calls();
    *ret = LG_CHILD_NONE;
    g.launch_failed = !g.launch_failed && g.fail_every && sim_random(&g.w, g.fail_every) == 0;
    if (g.launch_failed) return LG_FAIL(LG_ERR_NOSPACE, "cannot start the keeper: no process left");
    launch_keeper(b, ret);
    return 0;
}
WRAP(int, lg_keep_start, lg_keep *k, lg_board *b)
{
    struct lg_child c;
    lgsup_calls();
    if (lg_keep_is_first(b)) k->complete = true;
    launch_keeper(b, &c);
    lg_keep_enter(k, b, &c);
    return 0;
}
WRAP(int, lg_keep_adopt, lg_keep *k, lg_board *b)
{
    const struct proc *p = by_serial(g.keeper);
    if (!lives(p) || !is_on_board(p)) return LG_FAIL(LG_ERR_NOTFOUND, "the keeper is dead");
    k->child = (struct lg_child){.pid = p->pid, .pidfd = PIDFD_FIRST + (int)p->serial};
    lgsup_calls();
    if (!lg_keep_is_ready(b)) lg_keep_enter(k, b, &k->child);
    return 0;
}
/* The keeper may die at each question, or lgsup run out of fds. */
WRAP(int, lg_keep_refresh, lg_keep *k)
{
    for (int r = 0; r < REGIONS; r++) {
        lgsup_calls();
        if (!keeper_is_reached() || sim_random(&g.w, 100) == 0)
            return LG_FAIL(LG_ERR_IO, "the keeper does not answer");
        if (!g.lgsup_has[r]) g.lgsup_has[r] = g.keeper_has[r];
    }
    k->complete = true;
    lgsup_calls();
    for (int r = 0; r < REGIONS; r++) g.recorded[r] |= g.lgsup_has[r] != 0;
    for (int r = 0; r < REGIONS; r++) {
        lgsup_calls();
        if (g.lgsup_has[r]) g.copied[r][g.lgsup_has[r]] = true;
    }
    return 0;
}
WRAP(void, lg_keep_salvage, lg_keep *k, int pid, uint64_t run_id)
{
    const struct proc *p = by_pid(pid);
    if (!lives(p) || p->stranger) return;
    for (int r = 0; r < REGIONS; r++)
        if (!g.lgsup_has[r]) g.lgsup_has[r] = p->serial == g.keeper ? g.keeper_has[r] : p->maps[r];
}
WRAP(bool, lg_keep_is_reachable, const lg_keep *k)
{
    lgsup_calls();
    return !g.unreachable;
}
WRAP(bool, lg_keep_answers, const lg_keep *k, int pid)
{
    const struct proc *p = by_serial(g.keeper);
    lgsup_calls();
    return !g.unreachable && lives(p) && p->pid == pid;
}
/* As supervisor/core/sockets.c, without its files. */
WRAP(void, lg_sockets_look, lg_supervisor *s)
{
    if (!g.unreachable || s->keep.child.pidfd < 0 || s->step >= LG_RUN_STEP_leaving) return;
    __wrap_lg_keep_salvage(&s->keep, s->keep.child.pid, 0);
    lg_child_signal(&s->keep.child, SIGKILL);
}
WRAP(bool, lg_sockets_were_lost, lg_supervisor *s, int64_t since_ns)
{
    (void)s, (void)since_ns;
    return false; /* a stage of this machine waits for its keeper instead */
}
WRAP(bool, lg_keep_is_whole, const lg_keep *k, char ret_missing[LG_REGION_NAME_BYTES])
{
    bool whole = true;
    for (int r = 0; r < REGIONS; r++) whole = whole && (!g.recorded[r] || g.lgsup_has[r]);
    g.memory_lost = !whole;
    for (int r = 0; r < REGIONS; r++) {
        const struct proc *p = holder_of(r);
        if (!g.recorded[r] || g.lgsup_has[r]) continue;
        if (p)
            sim_fail(&g.w, "region %d is given up, and %s.%d has it", r, lg_role_name(p->role),
                     p->index);
        if (g.unheld[r] == BY_LGSUP)
            sim_fail(&g.w, "lgsup has killed the last who had region %d", r);
    }
    return whole;
}
WRAP(void, lg_keep_end, lg_keep *k)
{
    struct proc *p = by_serial(g.keeper);
    if (lives(p)) die(p, 0);
    if (p && p->state == ZOMBIE) p->state = GONE;
}
WRAP(void, lg_keep_leave, lg_keep *k) {}
