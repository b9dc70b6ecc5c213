/* The machine's processes; see machine.h. A stage's life is stages/stage.c's: join the board or leave,
 * set up, say ready, work; as a standby: wait, be told whom to become, leave the spare row,
 * join the other. One step of the simulation is one of these, so a death may come between any two. */
#include "tests/sim/machine.h"
#include <signal.h>
#include <string.h>

struct proc *by_serial(uint32_t serial)
{
    struct proc *p = &g.proc[serial % PROCS_MAX];
    return serial && p->serial == serial ? p : NULL;
}

bool lives(const struct proc *p)
{
    return p && p->state != GONE && p->state != ZOMBIE;
}

struct proc *by_pid(int pid)
{
    for (int i = 0; i < PROCS_MAX; i++)
        if (g.proc[i].state != GONE && g.proc[i].pid == pid) return &g.proc[i];
    return NULL;
}

static int free_pid(void)
{
    /* Often one that was used before. */
    int pid = sim_random(&g.w, 3) && g.next_pid > PID_FIRST
                  ? PID_FIRST + (int)sim_random(&g.w, (uint64_t)(g.next_pid - PID_FIRST))
                  : g.next_pid++;
    while (by_pid(pid)) pid = g.next_pid++;
    return pid;
}

/* Steps; now and then far longer than READY_S. */
static int draw_setup(void)
{
    return sim_random(&g.w, 300) ? 1 + (int)sim_random(&g.w, 6) : 1000;
}

struct proc *new_proc(lg_role role, int index, lg_incarnation me)
{
    do g.serial++;
    while (g.serial == 0 || g.proc[g.serial % PROCS_MAX].state != GONE);
    struct proc *p = &g.proc[g.serial % PROCS_MAX];
    *p = (struct proc){.serial = g.serial,
                       .pid = free_pid(),
                       .state = BORN,
                       .start = g.trouble == SIM_WRONG_START ? 1 : ++g.starts,
                       .role = role,
                       .index = index,
                       .me = me,
                       .parent = g.generation,
                       .setup_left = draw_setup(),
                       .born_ns = g.now_ns,
                       .moved_ns = g.now_ns - g.slept_ns};
    return p;
}

struct actor *actor_of(const struct proc *p)
{
    for (int i = 0; i < g.w.n_actors; i++)
        if (g.w.actor[i].role == p->role && g.w.actor[i].index == p->index) return &g.w.actor[i];
    return NULL;
}

void die(struct proc *p, int exit_code)
{
    struct actor *a = p->stranger ? NULL : actor_of(p);
    if (a && a->me == p->me && a->life == UP) sim_actor_end(a, exit_code == 0);
    if (a) sim_trace(&g.w, a, "%u (pid %d) ends: %d", p->me, p->pid, exit_code);
    p->exit_code = exit_code;
    /* A parent that has died leaves the reaping to init. */
    p->state = p->parent == g.generation && !p->stranger ? ZOMBIE : GONE;
    note_what_nobody_holds(g.lgsup_kills);
}

void kill_proc(struct proc *p)
{
    g.w.result->kills++;
    die(p, LG_EXIT_SIGNAL + SIGKILL);
}

bool send_letter(const struct letter *l)
{
    if (g.n_letters == MESSAGES_MAX) return false;
    g.letter[g.n_letters++] = *l;
    return true;
}

static int row_index(const struct proc *p)
{
    return lg_incarnation_row(p->me) % LG_INSTANCES_MAX;
}

static struct lg_board_row *row_of(const struct proc *p)
{
    return lg_board_row(&g.w.board, p->role, row_index(p));
}

void post(const struct proc *p, lg_message_kind kind)
{
    uint64_t copies = sim_random(&g.w, 8);
    copies = copies == 0 ? 0 : copies == 1 ? 2 : 1;
    for (; copies; copies--)
        send_letter(&(struct letter){
            .due_ns = g.now_ns + (int64_t)sim_random(&g.w, 3) * (int64_t)sim_random(&g.w, LG_S_NS),
            .m = {.kind = kind, .role = p->role, .index = row_index(p), .incarnation = p->me}});
}

static bool join(const struct proc *p)
{
    int rc = lg_board_join(&g.w.board, p->me);
    lg_err_clear();
    return rc == 0;
}

bool is_member(const struct proc *p)
{
    return lives(p) && !p->stranger && row_index(p) == p->index;
}

static bool crashes(const struct proc *p)
{
    return p->doomed || p->program == PROGRAM_exits ||
           ((int)p->role == g.crash_role && g.w.result->steps >= g.crash_from);
}

static void step_born(struct proc *p, struct actor *a)
{
    if (p->program == PROGRAM_other_layout || !join(p)) {
        die(p, -LG_ERR_MISMATCH);
        return;
    }
    p->state = p->as_standby && p->role == LG_ROLE_trainer ? STANDBY : UP_SETUP;
    post(p, LG_MESSAGE_hello);
    if (p->as_standby) {
        if (p->state == STANDBY) atomic_store(&row_of(p)->ready, p->me);
        return;
    }
    if (a->life == UP) sim_fail(&g.w, "two processes work as %s", sim_actor_name(a));
    a->me = p->me;
    sim_actor_begin(a);
}

static void say_ready(struct proc *p, enum state next)
{
    if (!open_memory(p)) return;
    bool asks = !memory_is_copied(p);
    atomic_store(&row_of(p)->uncopied, asks ? p->me : 0);
    g.result->waits += asks;
    p->state = next;
    atomic_store(&row_of(p)->ready, p->me);
    post(p, LG_MESSAGE_ready);
    sim_trace(&g.w, actor_of(p), "%u (pid %d) is ready", p->me, p->pid);
}

static void step_setup(struct proc *p)
{
    bool stands = row_index(p) != p->index;
    lg_board_beat(row_of(p), LG_PHASE_SETUP);
    if (crashes(p)) {
        post(p, LG_MESSAGE_event);
        die(p, 1 + (int)sim_random(&g.w, 9));
    } else if (p->program == PROGRAM_hangs && p->as_standby) {
        p->hung = true;
    } else if (p->setup_left-- <= 0) {
        say_ready(p, stands ? STANDBY : UP_READY);
    }
}

static void step_standby(struct proc *p)
{
    const struct lg_board_row *row = row_of(p);
    lg_incarnation as = atomic_load(&row->takes);
    if (!as) {
        lg_board_beat(row_of(p), LG_PHASE_WAITING);
        return;
    }
    if (lg_incarnation_row(as) != lg_row((int)p->role, p->index))
        sim_fail(&g.w, "%s.%d is a standby and is told to take row %d", lg_role_name(p->role),
                 p->index, lg_incarnation_row(as) % LG_INSTANCES_MAX);
    lg_board_vacate(&g.w.board, p->me);
    p->me = as;
    p->state = TAKING;
    if (g.hang_every && sim_random(&g.w, 8) == 0) { /* stopped before it can join */
        p->hung = true;
        g.result->unjoined++;
    }
}

static void step_taking(struct proc *p, struct actor *a)
{
    if (!join(p)) {
        die(p, -LG_ERR_MISMATCH);
        return;
    }
    if (a->life == UP) sim_fail(&g.w, "two processes work as %s", sim_actor_name(a));
    a->me = p->me;
    sim_actor_begin(a);
    g.result->successions++;
    sim_trace(&g.w, a, "%u (pid %d) has taken over", p->me, p->pid);
    p->state = UP_SETUP;
    p->setup_left = p->role == LG_ROLE_trainer ? 3 : 0; /* its memory is opened only now */
    p->hung = p->program == PROGRAM_hangs_later;
    if (p->program == PROGRAM_dies_later) die(p, 1 + (int)sim_random(&g.w, 9));
}

static bool told_to_leave(const struct actor *a)
{
    struct lg_board *b = &g.w.board;
    bool busy = a->p.task && g.trouble != SIM_LEAVE_BUSY;
    return atomic_load(&lg_board_row(b, a->role, a->index)->leave) == a->me && !busy &&
           (a->role != LG_ROLE_trainer || lg_trainer_may_leave(b, a->index));
}

static void step_ready(struct proc *p, struct actor *a)
{
    bool quit = atomic_load(&g.w.board.s->quit);
    if (quit || told_to_leave(a)) {
        if (!quit) check_successor(p);
        atomic_store(&actor_row(a)->phase, LG_PHASE_DONE);
        die(p, 0);
        return;
    }
    check_rank_leaves(p);
    if (!deposit_memory(p)) {
        die(p, -LG_ERR_MISMATCH);
        return;
    }
    if (!memory_is_copied(p)) {
        lg_board_beat(actor_row(a), LG_PHASE_WAITING);
        return;
    }
    atomic_store(&actor_row(a)->uncopied, 0);
    lg_board_beat(actor_row(a), LG_PHASE_WORKING);
    use_memory(p);
    sim_actor_step(a);
    if (!a->p.task) lg_board_beat(actor_row(a), LG_PHASE_WAITING);
    if ((int)p->role == g.stuck_role && g.w.result->steps >= g.stuck_from) p->hung = a->p.task;
}

static void live_on(struct proc *p, struct actor *a)
{
    bool quit = atomic_load(&g.w.board.s->quit);
    switch (p->state) {
    case BORN:
        step_born(p, a);
        return;
    case UP_SETUP:
    case STANDBY:
        if (quit)
            die(p, 0);
        else if (p->state == UP_SETUP)
            step_setup(p);
        else
            step_standby(p);
        return;
    case TAKING:
        step_taking(p, a);
        return;
    case UP_READY:
        step_ready(p, a);
        return;
    default:
        return;
    }
}

/* What an instance has brought about. */
static uint64_t brought_about(struct actor *a)
{
    const struct lg_board_row *r = actor_row(a);
    if (a->role < LG_ROLE_trainer) return atomic_load(&r->samples);
    if (a->role == LG_ROLE_ckpt)
        return atomic_load(&r->staged_moments) + atomic_load(&r->staged) +
               atomic_load(&r->published);
    return atomic_load(&r->grads) + atomic_load(&r->partial) + atomic_load(&r->commit);
}

/* In a gentle machine: one that is idle, or has brought something about since its instance's last death. */
static bool may_fall(const struct proc *p, struct actor *a)
{
    bool idle = p->state == UP_READY && atomic_load(&actor_row(a)->phase) == LG_PHASE_WAITING;
    uint64_t *got_to = &g.got_to[p->role][p->index], now = brought_about(a);
    if (!g.gentle) return true;
    if (!is_member(p) || (!idle && now == *got_to)) return false;
    *got_to = now;
    g.result->gentle_kills++;
    return true;
}

void step_proc(struct proc *p)
{
    struct actor *a = actor_of(p);
    if (!a || p->hung || p->held) return;
    g.getpid = p->pid;
    p->moved_ns = g.now_ns - g.slept_ns;
    live_on(p, a);
    if (!lives(p)) return;
    if (g.hang_every && sim_random(&g.w, g.hang_every) == 0) {
        p->hung = true;
        g.result->hangs++;
        sim_trace(&g.w, a, "%u hangs", p->me);
    } else if (g.kills_left && sim_random(&g.w, g.kill_every) == 0 && may_fall(p, a)) {
        g.kills_left--;
        kill_proc(p);
    }
}
