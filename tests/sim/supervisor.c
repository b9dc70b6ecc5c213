/* What happens to the pretended machine, and one run on it; see supervisor.h and machine.h.
 *
 * lgsup runs on this thread's stack. Whenever it sleeps in poll(), and now and then when it calls
 * anything else, the machine steps: one process does one step, the clock moves. lgsup's death is a
 * longjmp out of such a call; what it had allocated is freed, its fds are nobody's. */
#include "supervisor/core/park.h"
#include "tests/sim/machine.h"
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { STEPS_LIMIT = 3000000, RESTARTS_MAX = 500 };

struct machine g;

/* ---- the machine goes on ---- */

static void trouble_the_keeper(void)
{
    struct proc *k = by_serial(g.keeper);
    if (k && lives(k) && !g.unreachable && sim_random(&g.w, 6000) == 0) {
        g.unreachable = true;
        g.result->unreachables++;
    }
    /* With an lgsup that dies as well it is often the end of the run: what one process maps is lost with it. */
    uint64_t every = g.kill_every * (g.deaths_left ? 160 : 40);
    if (!k || !lives(k) || !g.kills_left || sim_random(&g.w, every)) return;
    g.kills_left--;
    g.result->keeper_deaths++;
    kill_proc(k);
}

/* One that a swap has started, and that waits for its place; it has its memory, unless it is to be a rank. */
static bool is_waiting_standby(const struct proc *p)
{
    return lives(p) && p->state == STANDBY;
}

/* The keeper and all who hold the training state, at once; most often when the run is young. Or lgsup, too, and all but the
 * processes that a swap has started beside them. */
static void strike(void)
{
    uint64_t every = g.w.result->steps < 600 ? 150 : 5000;
    bool is_end = g.without_lgsup || g.deaths_left, spares = false;
    for (int i = 0; i < PROCS_MAX && g.deaths_left && !g.without_lgsup; i++)
        spares = spares || is_waiting_standby(&g.proc[i]);
    if (spares) every = 2;
    if (!g.disasters_left || sim_random(&g.w, is_end ? 30 * every : every)) return;
    g.disasters_left--;
    g.lgsup_doomed = spares;
    g.result->spared += spares;
    g.result->disasters++;
    if (lives(by_serial(g.keeper))) kill_proc(by_serial(g.keeper));
    bool all = sim_random(&g.w, 4) == 0;
    for (int i = 0; i < PROCS_MAX; i++) {
        struct proc *p = &g.proc[i];
        bool holds =
            p->role == LG_ROLE_trainer || p->role == LG_ROLE_ema || p->role == LG_ROLE_ckpt;
        if (lives(p) && !p->stranger && (all || holds) && !(spares && is_waiting_standby(p)))
            kill_proc(p);
    }
}

/* Among the instances that the machine has been drawn with. */
static void scale_somebody(void)
{
    static const lg_role roles[] = {LG_ROLE_loader, LG_ROLE_text, LG_ROLE_vae};
    lg_role role = roles[sim_random(&g.w, 3)];
    if (!g.run.plan.instances[role]) return;
    g.result->scales += send_letter(&(struct letter){
        .due_ns = g.now_ns,
        .m = {.kind = LG_MESSAGE_scale,
              .role = role,
              .level = 1 + (int)sim_random(&g.w, (uint64_t)g.run.plan.instances[role])}});
}

static void drawn_events(void)
{
    struct world *w = &g.w;
    if (sim_random(w, g.speed_every) == 0) sim_change_speeds(w);
    if (sim_random(w, 8000) == 0) {                              /* the machine sleeps */
        int64_t ns = (int64_t)(4 + sim_random(w, 20)) * LG_S_NS; /* longer than a look is late */
        g.now_ns += ns;
        g.slept_ns += ns;
        g.result->sleeps++;
    }
    if (w->result->steps >= g.drain_at) {
        g.drain_at = w->result->steps + 2000; /* asked again: the first may have been lost */
        w->result->drains++;
        if (sim_random(w, 2))
            g.signals |= 1;
        else
            post(&(struct proc){.role = LG_ROLE_lgsup}, LG_MESSAGE_stop);
    }
    if (!atomic_load(&w->board.s->drain) && atomic_load(&w->board.s->run_state) == LG_RUN_DRAINING)
        sim_fail(w, "a run says that it is draining, and nobody was asked to");
    if (sim_random(w, 3000) == 0) scale_somebody();
    if (sim_random(w, w->writing ? g.swap_every / 4 : g.swap_every) == 0) draw_swap();
    trouble_the_keeper();
    strike();
}

void machine_step(void)
{
    struct world *w = &g.w;
    int64_t pace = sim_random(w, 16) ? LG_MS_NS : 10 * LG_MS_NS;
    g.now_ns += (int64_t)sim_random(w, (uint64_t)pace);
    if (++w->result->steps > STEPS_LIMIT) sim_fail(w, "no end after %d steps", STEPS_LIMIT);
    drawn_events();
    struct actor *a = sim_pick(w);
    if (!a) return;
    for (int i = 0; i < PROCS_MAX; i++) {
        struct proc *p = &g.proc[i];
        if (lives(p) && !p->stranger && p->role == a->role && p->index == a->index) step_proc(p);
    }
    g.getpid = PID_FIRST - 1;
}

static void kill_lgsup(void)
{
    g.deaths_left--;
    g.lgsup_doomed = false;
    g.result->lgsup_deaths++;
    g.w.result->kills++;
    longjmp(g.lgsup_dies, 1);
}

void lgsup_calls(void)
{
    if (!g.in_lgsup) return;
    if (sim_random(&g.w, 8) == 0) {
        g.in_lgsup = false;
        for (uint64_t n = sim_random(&g.w, 12); n; n--) machine_step();
        g.in_lgsup = true;
        g.getpid = PID_FIRST - 1;
    }
    if (g.deaths_left && (g.lgsup_doomed || sim_random(&g.w, g.lgsup_every) == 0)) kill_lgsup();
}

/* ---- runs ---- */

/* Now and then a role hangs in each of its tries, slower than any window, while all others go on: that
 * has to park. Or nobody fails, and whoever is killed was idle or had got something done: that must not. */
static void draw_failures(void)
{
    uint64_t kind = sim_random(&g.w, 40);
    if (kind > 3) return;
    g.gentle = kind > 0;
    if (!g.gentle) {
        g.stuck_role = (int)g.w.actor[sim_random(&g.w, (uint64_t)g.w.n_actors)].role;
        g.stuck_from = sim_random(&g.w, 4000);
        g.kills_left = 0;
        g.deaths_left = LG_MIN(g.deaths_left, UINT64_C(2)); /* a new lgsup counts anew */
    }
    g.hang_every = g.fail_every = 0;
    g.swap_every = UINT64_MAX;
    if (g.gentle) g.speed_every = UINT64_MAX; /* who stands still for long hangs */
    g.config.supervisor_restarts_max = 3;
    g.config.supervisor_restart_window_s =
        -1; /* a crash loop is another matter, four ranks at once, too */
}

static void draw_machine(void)
{
    static const uint64_t kill_every[] = {30, 60, 120, 400};
    struct world *w = &g.w;
    g.now_ns = LG_S_NS;
    g.next_pid = PID_FIRST;
    g.getpid = PID_FIRST - 1;
    g.kills_left = sim_random(w, 400);
    g.disasters_left = sim_random(w, 4);
    g.kill_every = kill_every[sim_random(w, 4)];
    g.speed_every = 200 + sim_random(w, 1000);
    g.hang_every = sim_random(w, 6) ? 0 : 3000;
    g.deaths_left = sim_random(w, 3) ? sim_random(w, LGSUP_DEATHS_MAX) : 0;
    g.lgsup_every = 20 + sim_random(w, 400);
    g.fail_every = sim_random(w, 3) ? 0 : 30;
    g.swap_every = 400 + sim_random(w, 4000);
    for (int r = 0; r < LG_ROLE_keeper; r++)
        for (int k = 0; k < LG_INSTANCES_MAX; k++) g.may_run[r][k] = 1u << PROGRAM_beside;
    g.drain_at = sim_random(w, 3) ? UINT64_MAX : sim_random(w, 6000);
    g.crash_role =
        sim_random(w, 40) ? -1 : (int)w->actor[sim_random(w, (uint64_t)w->n_actors)].role;
    g.crash_from = sim_random(w, 2) ? 0 : sim_random(w, 4000);
    g.config.supervisor_hang_s = HANG_S;
    g.config.supervisor_ready_s = READY_S;
    g.config.supervisor_restarts_max = g.crash_role < 0 ? RESTARTS_MAX : 3;
    g.config.supervisor_restart_window_s = 100 * RESTARTS_MAX;
    g.stuck_role = -1;
    if (g.crash_role < 0) draw_failures();
    g.run.config = &g.config;
    snprintf(g.run.dir, sizeof g.run.dir, "/nowhere");
    for (int i = 0; i < w->n_actors; i++) g.run.plan.instances[w->actor[i].role]++;
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        atomic_store(&w->board.s->wanted[r], (uint32_t)g.run.plan.instances[r]);
}

/* A dead lgsup's children are init's; a pid that is free may be a stranger's now. */
static void after_lgsup(void)
{
    g.in_lgsup = false;
    free_all();
    memory_of_lgsup_ends();
    orders_forgotten();
    g.generation++;
    for (int i = 0; i < PROCS_MAX; i++) {
        struct proc *p = &g.proc[i];
        bool unheld = p->held && g.trouble == SIM_UNHELD;
        if (p->state == ZOMBIE || (p->held && !unheld)) p->state = GONE; /* held: by a pipe */
        if (unheld) p->held = false;
    }
    g.without_lgsup = true;
    for (uint64_t n = sim_random(&g.w, 400); n; n--) machine_step();
    g.without_lgsup = false;
    if (sim_random(&g.w, 2)) {
        struct proc *p = new_proc(LG_ROLE_lgsup, 0, 0);
        p->stranger = true;
        p->state = UP_READY;
    }
    sim_trace(&g.w, &g.w.actor[0], "(another lgsup)");
}

/* Returns lg_supervise's result, or 1: it died. */
static int one_lgsup(bool adopt, int *ret_exit, lg_run_state *ret_outcome)
{
    if (setjmp(g.lgsup_dies)) return 1;
    g.in_lgsup = true;
    int rc = lg_supervise(
        &(struct lg_supervise_spec){
            .run = &g.run, .board = &g.w.board, .adopt = adopt, .ready_fd = -1},
        ret_exit, ret_outcome);
    g.in_lgsup = false;
    return rc;
}

static void check_nobody_is_left(void)
{
    for (int i = 0; i < PROCS_MAX; i++) {
        const struct proc *p = &g.proc[i];
        if (p->state == GONE || p->stranger) continue;
        if (p->serial == g.keeper && atomic_load(&g.w.board.s->run_state) == LG_RUN_PARKED)
            continue;
        sim_fail(&g.w, "%s.%d (pid %d) is left", lg_role_name(p->role), p->index, p->pid);
    }
}

/* As supervisor/commands/start.c, when the board says that the run is over: nothing to adopt. */
static lg_run_state end_leftovers(void)
{
    lg_leftovers_kill(&g.w.board, true);
    return (lg_run_state)atomic_load(&g.w.board.s->run_state);
}

/* As supervisor/commands/park_resume.c: the cause has been removed, the memory is there. */
static bool goes_on_from_memory(void)
{
    if (!lives(by_serial(g.keeper))) return false;
    g.result->memory_resumes++;
    g.crash_role = g.stuck_role = -1;
    g.config.supervisor_restarts_max = RESTARTS_MAX;
    lg_park_reopen(&g.w.board);
    after_lgsup();
    return true;
}

static void supervise(bool keeper_was_started)
{
    int exit_code = 0, rc;
    lg_run_state outcome = LG_RUN_FAILED;
    while ((rc = one_lgsup(keeper_was_started, &exit_code, &outcome)) == 1) {
        after_lgsup();
        keeper_was_started = g.keeper != 0 || lg_leftovers_live(&g.w.board);
        if (atomic_load(&g.w.board.s->run_state) < LG_RUN_DONE) continue;
        outcome = end_leftovers();
        exit_code = -LG_ERR_PARKED;
        rc = 0;
        break;
    }
    if (rc < 0 && g.memory_lost && !lives(by_serial(g.keeper))) {
        g.result->memory_losses++;
        return;
    }
    if (rc < 0) sim_fail(&g.w, "lgsup failed: %s", lg_err_text());
    check_nobody_is_left();
    check_orders();
    if (outcome == LG_RUN_PARKED && g.memory_lost) {
        if (atomic_load(&g.w.board.s->memory_kept))
            sim_fail(&g.w, "what is left of lost memory is kept");
        g.result->memory_losses++;
        return;
    }
    if (outcome == LG_RUN_PARKED) {
        if (g.crash_role < 0 && g.stuck_role < 0) sim_fail(&g.w, "parked: %s", g.w.board.s->cause);
        if (g.stuck_role >= 0) g.result->stuck_parks++;
        if (exit_code != -LG_ERR_PARKED || !g.w.board.s->cause[0])
            sim_fail(&g.w, "parked without a cause");
        g.result->parks++;
        if (goes_on_from_memory()) supervise(true);
        return;
    }
    if (outcome != LG_RUN_DONE && outcome != LG_RUN_STOPPED)
        sim_fail(&g.w, "the run ends as %s", lg_run_state_name(outcome));
    sim_check_end(&g.w);
}

void sim_machine_run(const struct sim_machine_options *options, struct sim_machine_result *ret)
{
    memset(ret, 0, sizeof *ret);
    memset(&g, 0, sizeof g);
    g.result = ret;
    g.trouble = options->trouble;
    g.w.supervised = true;
    sim_open(&g.w, &options->run, &ret->run);
    draw_machine();
    if (setjmp(g.w.failed)) {
        g.in_lgsup = false;
        free_all();
    } else {
        supervise(false);
    }
    lg_err_clear();
}
