/* The pretended machine; see supervisor.h.
 *
 * lgsup runs on this thread's stack. Whenever it sleeps in poll(), and now and then when it calls
 * anything else, the machine steps: one process does one step, the clock moves. lgsup's death is a
 * longjmp out of such a call; what it had allocated is freed, its fds are nobody's. */
#include "tests/sim/supervisor.h"
#include "base/clock.h"
#include "supervisor/park.h"
#include "supervisor/supervise.h"
#include "tests/unit/sim_world.h"
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    PROCS_MAX = 128,
    PID_FIRST = 2000,
    PIDFD_FIRST = 1 << 24,
    SIGNAL_FD = 1 << 22,
    CONTROL_FD,
    STAT_FD, /* of the process g_stat_pid */
    MESSAGES_MAX = 64,
    ALLOCATIONS_MAX = 32,
    STEPS_LIMIT = 3000000,
    HANG_S = 3,
    READY_S = 4,
    LGSUP_DEATHS_MAX = 60
};

enum state { GONE, BORN, UP_SETUP, UP_READY, ZOMBIE };

struct proc {
    uint32_t serial; /* its pidfd is PIDFD_FIRST + serial */
    enum state state;
    int pid;
    uint64_t start;
    lg_role role;
    int index;
    lg_incarnation me;
    bool stranger, hung, doomed; /* doomed: dies before it is ready */
    int setup_left, exit_code;
    unsigned parent;  /* generation of lgsup */
    int64_t moved_ns; /* machine time of its last step, sleeps not counted */
};

struct letter {
    int64_t due_ns;
    struct lg_message m;
};

struct machine {
    struct world w;
    struct sim_machine_result *result;
    enum sim_trouble trouble;
    struct proc proc[PROCS_MAX];
    uint32_t serial, deaf;
    int next_pid;
    uint64_t starts;
    int64_t now_ns, slept_ns;
    /* lgsup */
    bool in_lgsup, ending; /* ending: it was told or has decided to end everything */
    unsigned generation;
    jmp_buf lgsup_dies;
    void *allocation[ALLOCATIONS_MAX];
    uint64_t deaths_left, kills_left, kill_every, speed_every, hang_every, lgsup_every, drain_at;
    uint64_t fail_every; /* spawns */
    int crash_role;      /* from a step on every process of it dies before it is ready; -1: none */
    uint64_t crash_from;
    int signals; /* pending: bit 0 SIGHUP, bit 1 SIGINT */
    struct letter letter[MESSAGES_MAX];
    int n_letters;
    /* keeper */
    uint32_t keeper; /* serial; 0: none */
    bool memory_lost;
    int getpid, stat_pid;
    lg_run run;
    lg_config config;
};

static struct machine g;

/* ---- processes ---- */

static struct proc *by_serial(uint32_t serial)
{
    struct proc *p = &g.proc[serial % PROCS_MAX];
    return serial && p->serial == serial ? p : NULL;
}

static bool lives(const struct proc *p)
{
    return p && p->state != GONE && p->state != ZOMBIE;
}

static struct proc *by_pid(int pid)
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

static struct proc *new_proc(lg_role role, int index, lg_incarnation me)
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
                       .setup_left = 1 + (int)sim_random(&g.w, 6),
                       .moved_ns = g.now_ns - g.slept_ns};
    return p;
}

static struct actor *actor_of(const struct proc *p)
{
    for (int i = 0; i < g.w.n_actors; i++)
        if (g.w.actor[i].role == p->role && g.w.actor[i].index == p->index) return &g.w.actor[i];
    return NULL;
}

static void die(struct proc *p, int exit_code)
{
    struct actor *a = p->stranger ? NULL : actor_of(p);
    if (a && a->me == p->me && a->life == UP) {
        a->life = KILLED;
        memset(&a->p, 0xdd, sizeof a->p);
    }
    if (a) sim_trace(&g.w, a, "%u (pid %d) ends: %d", p->me, p->pid, exit_code);
    p->exit_code = exit_code;
    /* A parent that has died leaves the reaping to init. */
    p->state = p->parent == g.generation && !p->stranger ? ZOMBIE : GONE;
}

static void kill_proc(struct proc *p)
{
    g.w.result->kills++;
    die(p, LG_EXIT_SIGNAL + SIGKILL);
}

static void post(const struct proc *p, lg_message_kind kind)
{
    uint64_t copies = sim_random(&g.w, 8);
    copies = copies == 0 ? 0 : copies == 1 ? 2 : 1;
    for (; copies && g.n_letters < MESSAGES_MAX; copies--)
        g.letter[g.n_letters++] = (struct letter){
            .due_ns = g.now_ns + (int64_t)sim_random(&g.w, 3) * (int64_t)sim_random(&g.w, LG_S_NS),
            .m = {.kind = kind, .role = p->role, .index = p->index, .incarnation = p->me}};
}

static bool join(const struct proc *p, struct actor *a)
{
    int rc = lg_board_join(&g.w.board, p->me);
    lg_err_clear();
    if (rc < 0 && g.trouble == SIM_DOUBLE_JOIN) {
        atomic_store(&actor_row(a)->life,
                     (uint64_t)p->pid << 40 | (uint64_t)p->me << 8 | LG_LIFE_RUNNING);
        rc = 0;
    }
    return rc == 0;
}

/* As stages/stage.c: join or leave; some setup; ready; then the role's work. */
static void step_born(struct proc *p, struct actor *a)
{
    if (!join(p, a)) {
        die(p, -LG_ERR_MISMATCH);
        return;
    }
    if (a->life == UP) sim_fail(&g.w, "two processes work as %s", sim_actor_name(a));
    a->me = p->me;
    sim_actor_begin(a);
    p->state = UP_SETUP;
    post(p, LG_MESSAGE_hello);
}

static void step_setup(struct proc *p, struct actor *a)
{
    lg_board_beat(actor_row(a), LG_PHASE_SETUP);
    if (p->doomed || ((int)p->role == g.crash_role && g.w.result->steps >= g.crash_from)) {
        post(p, LG_MESSAGE_event);
        die(p, 1 + (int)sim_random(&g.w, 9));
        return;
    }
    if (p->setup_left-- > 0) return;
    p->state = UP_READY;
    atomic_store(&actor_row(a)->ready, p->me);
    post(p, LG_MESSAGE_ready);
    sim_trace(&g.w, a, "%u (pid %d) is ready", p->me, p->pid);
}

static bool told_to_leave(const struct actor *a)
{
    struct lg_board *b = &g.w.board;
    if (atomic_load(&b->s->quit)) return true;
    return atomic_load(&lg_board_row(b, a->role, a->index)->leave) == a->me && !a->p.task &&
           (a->role != LG_ROLE_trainer || lg_trainer_may_leave(b, a->index));
}

static void step_ready(struct proc *p, struct actor *a)
{
    if (told_to_leave(a)) {
        atomic_store(&actor_row(a)->phase, LG_PHASE_DONE);
        die(p, 0);
        return;
    }
    lg_board_beat(actor_row(a), LG_PHASE_WORKING);
    sim_actor_step(a);
}

static void step_proc(struct proc *p)
{
    struct actor *a = actor_of(p);
    if (!a || p->hung) return;
    g.getpid = p->pid;
    p->moved_ns = g.now_ns - g.slept_ns;
    if (p->state == BORN)
        step_born(p, a);
    else if (atomic_load(&g.w.board.s->quit) && p->state == UP_SETUP)
        die(p, 0);
    else if (p->state == UP_SETUP)
        step_setup(p, a);
    else if (p->state == UP_READY)
        step_ready(p, a);
    if (!lives(p)) return;
    if (g.hang_every && sim_random(&g.w, g.hang_every) == 0) {
        p->hung = true;
        g.result->hangs++;
        sim_trace(&g.w, a, "%u hangs", p->me);
    } else if (g.kills_left && sim_random(&g.w, g.kill_every) == 0) {
        g.kills_left--;
        kill_proc(p);
    }
}

/* ---- the machine goes on ---- */

static void trouble_the_keeper(void)
{
    struct proc *k = by_serial(g.keeper);
    if (!k || !lives(k) || !g.kills_left || sim_random(&g.w, g.kill_every * 40)) return;
    g.kills_left--;
    g.result->keeper_deaths++;
    kill_proc(k);
}

/* Among the instances that the machine has been drawn with. */
static void scale_somebody(void)
{
    static const lg_role roles[] = {LG_ROLE_loader, LG_ROLE_text, LG_ROLE_vae};
    lg_role role = roles[sim_random(&g.w, 3)];
    if (!g.run.plan.instances[role] || g.n_letters == MESSAGES_MAX) return;
    g.result->scales++;
    g.letter[g.n_letters++] = (struct letter){
        .due_ns = g.now_ns,
        .m = {.kind = LG_MESSAGE_scale,
              .role = role,
              .level = 1 + (int)sim_random(&g.w, (uint64_t)g.run.plan.instances[role])}};
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
    if (atomic_load(&w->board.s->drain) && atomic_load(&w->board.s->run_state) < LG_RUN_DRAINING)
        sim_fail(w, "a run that is draining says that it runs");
    if (sim_random(w, 3000) == 0) scale_somebody();
    trouble_the_keeper();
}

static void machine_step(void)
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
    g.result->lgsup_deaths++;
    g.w.result->kills++;
    longjmp(g.lgsup_dies, 1);
}

/* Between any two calls of lgsup: others move, or it dies. */
static void lgsup_calls(void)
{
    if (!g.in_lgsup) return;
    if (sim_random(&g.w, 8) == 0) {
        g.in_lgsup = false;
        for (uint64_t n = sim_random(&g.w, 12); n; n--) machine_step();
        g.in_lgsup = true;
        g.getpid = PID_FIRST - 1;
    }
    if (g.deaths_left && sim_random(&g.w, g.lgsup_every) == 0) kill_lgsup();
}

/* ---- system calls ---- */

#define REAL(type, name, ...) extern type __real_##name(__VA_ARGS__)
#define WRAP(type, name, ...)                                                                      \
    type __wrap_##name(__VA_ARGS__);                                                               \
    type __wrap_##name(__VA_ARGS__)

REAL(int, poll, struct pollfd *, nfds_t, int);
REAL(long, syscall, long, ...);
REAL(int, open, const char *, int, ...);
REAL(ssize_t, read, int, void *, size_t);
REAL(int, close, int);
REAL(void *, calloc, size_t, size_t);
REAL(void, free, void *);
REAL(lg_incarnation, lg_board_enlist, lg_board *, lg_role, int);
REAL(void, lg_board_bury, lg_board *, lg_incarnation);

WRAP(int64_t, lg_now_ns, void)
{
    return g.now_ns;
}

static bool letter_is_due(void)
{
    for (int i = 0; i < g.n_letters; i++)
        if (g.letter[i].due_ns <= g.now_ns) return true;
    return false;
}

static bool is_ready(int fd)
{
    if (fd == SIGNAL_FD) return g.signals != 0;
    if (fd == CONTROL_FD) return letter_is_due();
    if (fd < PIDFD_FIRST) return false;
    const struct proc *p = by_serial((uint32_t)(fd - PIDFD_FIRST));
    if (g.trouble == SIM_DEAF_PIDFD && p && p->serial == g.deaf) return false;
    if (g.trouble == SIM_EARLY_FIRE && lives(p) && sim_random(&g.w, 400) == 0) return true;
    return !lives(p);
}

static int look(struct pollfd *p, nfds_t n)
{
    int ready = 0;
    for (nfds_t i = 0; i < n; i++) {
        p[i].revents = p[i].fd >= 0 && is_ready(p[i].fd) ? POLLIN : 0;
        ready += p[i].revents != 0;
    }
    return ready;
}

WRAP(int, poll, struct pollfd *p, nfds_t n, int timeout_ms)
{
    int ready = look(p, n);
    if (!g.in_lgsup || timeout_ms == 0) return ready;
    int64_t until = g.now_ns + timeout_ms * LG_MS_NS;
    if (sim_random(&g.w, 3000) == 0) until += (int64_t)sim_random(&g.w, 6) * LG_S_NS; /* SIGSTOP */
    while ((ready == 0 || until > g.now_ns + timeout_ms * LG_MS_NS) && g.now_ns < until) {
        g.in_lgsup = false;
        machine_step();
        g.in_lgsup = true;
        ready = look(p, n);
    }
    lgsup_calls();
    return ready;
}

WRAP(int, __poll_chk, struct pollfd *p, nfds_t n, int timeout_ms, size_t room)
{
    return __wrap_poll(p, n, timeout_ms);
}

static int pidfd_of(int pid)
{
    const struct proc *p = by_pid(pid);
    if (p) return PIDFD_FIRST + (int)p->serial;
    errno = ESRCH;
    return -1;
}

WRAP(int, pidfd_open, pid_t pid, unsigned flags)
{
    return pidfd_of(pid);
}
WRAP(long, syscall, long number, long a, long b, long c)
{
    return number == SYS_pidfd_open ? pidfd_of((int)a) : __real_syscall(number, a, b, c);
}
WRAP(int, pidfd_send_signal, int fd, int sig, siginfo_t *info, unsigned flags)
{
    sim_fail(&g.w, "a signal by other means than lg_child_signal");
}
WRAP(int, getpid, void)
{
    return g.getpid;
}
WRAP(int, signalfd, int fd, const sigset_t *set, int flags)
{
    return SIGNAL_FD;
}
WRAP(int, sigprocmask, int how, const sigset_t *set, sigset_t *old)
{
    return 0;
}
WRAP(__sighandler_t, signal, int sig, __sighandler_t handler)
{
    return SIG_DFL;
}

WRAP(int, open, const char *path, int flags, mode_t mode)
{
    int pid;
    if (sscanf(path, "/proc/%d/stat", &pid) != 1) return __real_open(path, flags, mode);
    g.stat_pid = pid;
    return by_pid(pid) ? STAT_FD : -1;
}
WRAP(ssize_t, read, int fd, void *to, size_t bytes)
{
    if (fd == STAT_FD) {
        const struct proc *p = by_pid(g.stat_pid);
        return snprintf(to, bytes, "%d (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %llu 0",
                        g.stat_pid, (unsigned long long)(p ? p->start : 0));
    }
    if (fd != SIGNAL_FD) return __real_read(fd, to, bytes);
    if (!g.signals) return -1;
    int sig = g.signals & 1 ? SIGHUP : SIGINT;
    g.signals &= sig == SIGHUP ? ~1 : ~2;
    *(struct signalfd_siginfo *)to = (struct signalfd_siginfo){.ssi_signo = (uint32_t)sig};
    return sizeof(struct signalfd_siginfo);
}
WRAP(ssize_t, __read_chk, int fd, void *to, size_t bytes, size_t room)
{
    return __wrap_read(fd, to, bytes);
}
WRAP(int, close, int fd)
{
    return fd >= SIGNAL_FD ? 0 : __real_close(fd);
}
WRAP(uint64_t, lg_process_start_time, int pid)
{
    const struct proc *p = by_pid(pid);
    return p ? p->start : 0;
}

/* lgsup's memory, so that its death frees it. */
WRAP(void *, calloc, size_t n, size_t bytes)
{
    void *at = __real_calloc(n, bytes);
    for (int i = 0; g.in_lgsup && i < ALLOCATIONS_MAX; i++)
        if (!g.allocation[i]) {
            g.allocation[i] = at;
            break;
        }
    return at;
}
WRAP(void, free, void *at)
{
    for (int i = 0; at && g.in_lgsup && i < ALLOCATIONS_MAX; i++)
        if (g.allocation[i] == at) g.allocation[i] = NULL;
    __real_free(at);
}

/* ---- what lgsup calls ---- */

WRAP(lg_incarnation, lg_board_enlist, lg_board *b, lg_role role, int index)
{
    lgsup_calls();
    lg_incarnation i = __real_lg_board_enlist(b, role, index);
    lgsup_calls();
    return i;
}
WRAP(void, lg_board_bury, lg_board *b, lg_incarnation who)
{
    lgsup_calls();
    __real_lg_board_bury(b, who);
    lgsup_calls();
}
WRAP(int, lg_program_path, const char *name, char ret_path[LG_PATH_BYTES])
{
    snprintf(ret_path, LG_PATH_BYTES, "%s", name);
    return 0;
}

static int number_after(char *const *argv, const char *option)
{
    for (; *argv; argv++)
        if (!strcmp(*argv, option)) return atoi(argv[1]);
    return -1;
}

WRAP(int, lg_child_spawn, const struct lg_spawn *s, struct lg_child *ret)
{
    lgsup_calls();
    if (g.fail_every && sim_random(&g.w, g.fail_every) == 0)
        return LG_FAIL(LG_ERR_NOSPACE, "cannot start %s: no process left", s->program);
    lg_incarnation me = (lg_incarnation)number_after(s->argv, "--incarnation");
    int row = lg_incarnation_row(me);
    struct proc *p = new_proc((lg_role)(row / LG_INSTANCES_MAX), row % LG_INSTANCES_MAX, me);
    LG_ASSERT(p->index == number_after(s->argv, "--index"));
    p->doomed = sim_random(&g.w, 30) == 0;
    g.result->starts++;
    if (g.trouble == SIM_DEAF_PIDFD && sim_random(&g.w, 20) == 0) g.deaf = p->serial;
    struct lg_child child = {.pid = p->pid, .pidfd = PIDFD_FIRST + (int)p->serial, .mine = true};
    lgsup_calls();
    *ret = child;
    return 0;
}
WRAP(int, lg_child_reap, struct lg_child *c)
{
    struct proc *p = by_serial((uint32_t)(c->pidfd - PIDFD_FIRST));
    int code = c->mine && p && p->state == ZOMBIE ? p->exit_code : LG_EXIT_UNKNOWN;
    if (lives(p) && g.trouble != SIM_EARLY_FIRE) sim_fail(&g.w, "a living process is reaped");
    if (p && p->state == ZOMBIE) p->state = GONE;
    *c = LG_CHILD_NONE;
    lgsup_calls();
    return code;
}

/* May lgsup kill it? For a hang only when it has not moved during two looks, a second apart. */
static void judge(const struct proc *p)
{
    int64_t still_ns = g.now_ns - g.slept_ns - p->moved_ns;
    const struct lg_board_row *row = lg_board_row(&g.w.board, p->role, p->index);
    if (p->stranger) sim_fail(&g.w, "a stranger is killed");
    if (atomic_load(&g.w.board.s->quit) || p->role == LG_ROLE_keeper) return;
    if (p->state == UP_READY && still_ns < 2 * LG_S_NS)
        sim_fail(&g.w, "%s.%d is killed, though it moved %lld ms ago", lg_role_name(p->role),
                 p->index, (long long)(still_ns / LG_MS_NS));
    if (p->state == UP_READY && g.now_ns - row->heartbeat_ns <= HANG_S * LG_S_NS)
        sim_fail(&g.w, "%s.%d is killed, though it beats", lg_role_name(p->role), p->index);
}

WRAP(void, lg_child_signal, const struct lg_child *c, int sig)
{
    if (c->pidfd < 0) return;
    struct proc *p = by_serial((uint32_t)(c->pidfd - PIDFD_FIRST));
    if (lives(p)) judge(p); /* as of lgsup's look; the process may move until the signal comes */
    lgsup_calls();
    if (lives(p)) die(p, LG_EXIT_SIGNAL + sig);
}
WRAP(int, lg_child_wait, const struct lg_child *c, int timeout_ms)
{
    struct pollfd p = {.fd = c->pidfd, .events = POLLIN};
    return __wrap_poll(&p, 1, timeout_ms) > 0 ? 0 : LG_ERR_TIMEOUT;
}
WRAP(void, lg_last_words, const char *path, char *ret, size_t bytes)
{
    ret[0] = 0;
}

/* The keeper. Memory lives while it does, or lgsup with its copies, or any stage that maps it. */

WRAP(int, lg_keep_init, lg_keep *k, const char *run_dir, const char *runtime_dir, bool service)
{
    k->child = LG_CHILD_NONE;
    return 0;
}
WRAP(int, lg_keep_start, lg_keep *k, lg_board *b)
{
    lgsup_calls();
    struct proc *old = by_serial(g.keeper);
    if (lives(old)) sim_fail(&g.w, "two keepers");
    struct lg_board_row *row = lg_board_row(b, LG_ROLE_keeper, 0);
    lg_life state;
    lg_incarnation former = lg_board_life(b, LG_ROLE_keeper, 0, &state);
    if (state != LG_LIFE_NONE) __wrap_lg_board_bury(b, former);
    struct proc *p = new_proc(LG_ROLE_keeper, 0, __wrap_lg_board_enlist(b, LG_ROLE_keeper, 0));
    p->state = UP_READY;
    g.keeper = p->serial;
    k->child =
        (struct lg_child){.pid = p->pid, .pidfd = PIDFD_FIRST + (int)p->serial, .mine = true};
    k->n_copies = 1;
    atomic_store(&row->pid, (uint32_t)p->pid);
    atomic_store(&row->start_time, p->start);
    return 0;
}
WRAP(int, lg_keep_adopt, lg_keep *k, lg_board *b)
{
    const struct proc *p = by_serial(g.keeper);
    if (!lives(p)) return LG_FAIL(LG_ERR_NOTFOUND, "the keeper is dead");
    k->child = (struct lg_child){.pid = p->pid, .pidfd = PIDFD_FIRST + (int)p->serial};
    lgsup_calls();
    return 0;
}
WRAP(void, lg_keep_refresh, lg_keep *k)
{
    lgsup_calls();
    if (lives(by_serial(g.keeper))) k->n_copies = 1;
}
WRAP(void, lg_keep_salvage, lg_keep *k, int pid, uint64_t run_id)
{
    const struct proc *p = by_pid(pid);
    if (p && (p->state == UP_READY || p->state == UP_SETUP)) k->n_copies = 1;
}
WRAP(bool, lg_keep_is_whole, const lg_keep *k, char ret_missing[LG_REGION_NAME_BYTES])
{
    g.memory_lost = k->n_copies == 0;
    return !g.memory_lost;
}
WRAP(void, lg_keep_end, lg_keep *k)
{
    struct proc *p = by_serial(g.keeper);
    if (lives(p)) die(p, 0);
    if (p && p->state == ZOMBIE) p->state = GONE;
}

WRAP(void, lg_keep_leave, lg_keep *k) {}

/* Messages. */

WRAP(int, lg_control_open, const char *runtime_dir, lg_control **ret)
{
    *ret = NULL;
    return 0;
}
WRAP(void, lg_control_close, lg_control **c) {}
WRAP(int, lg_control_fd, lg_control *c)
{
    return CONTROL_FD;
}
WRAP(int, lg_control_receive, lg_control *c, struct lg_peer *peer, struct lg_message *ret)
{
    lgsup_calls();
    *peer = (struct lg_peer){.bytes = 1};
    for (int i = 0; i < g.n_letters; i++) {
        if (g.letter[i].due_ns > g.now_ns) continue;
        *ret = g.letter[i].m;
        if (ret->kind == LG_MESSAGE_event) {
            ret->level = (int)sim_random(&g.w, 4);
            snprintf(ret->text, sizeof ret->text, "something");
        }
        g.letter[i] = g.letter[--g.n_letters];
        g.result->messages++;
        return 1;
    }
    return 0;
}
WRAP(void, lg_control_answer, lg_control *c, const struct lg_peer *peer, const struct lg_message *m)
{
    lgsup_calls();
}
WRAP(void, lg_control_nudge, lg_control *c, lg_role role, int index, lg_incarnation incarnation)
{
    lgsup_calls();
}

/* What people see. */

WRAP(void, lg_progress_open, lg_progress *p, const char *run_dir, bool quiet) {}
WRAP(void, lg_progress_close, lg_progress *p) {}
WRAP(void, lg_progress_say, lg_progress *p, lg_log_level level, const char *fmt, ...)
{
    lgsup_calls();
    if (!g.w.options->trace) return;
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%7llu %.3f s    lgsup: ", (unsigned long long)g.w.result->steps,
            (double)g.now_ns / LG_S_NS);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
}
WRAP(void, lg_progress_show, lg_progress *p, struct lg_supervisor *s) {}
WRAP(void, lg_progress_last, lg_progress *p, struct lg_supervisor *s) {}
WRAP(void, lg_status_save, const char *dir, lg_board *b)
{
    lgsup_calls();
}

/* ---- runs ---- */

static void draw_machine(void)
{
    static const uint64_t kill_every[] = {30, 60, 120, 400};
    struct world *w = &g.w;
    g.now_ns = LG_S_NS;
    g.next_pid = PID_FIRST;
    g.getpid = PID_FIRST - 1;
    g.kills_left = sim_random(w, 400);
    g.kill_every = kill_every[sim_random(w, 4)];
    g.speed_every = 200 + sim_random(w, 1000);
    g.hang_every = sim_random(w, 6) ? 0 : 3000;
    g.deaths_left = sim_random(w, 3) ? sim_random(w, LGSUP_DEATHS_MAX) : 0;
    g.lgsup_every = 20 + sim_random(w, 400);
    g.fail_every = sim_random(w, 3) ? 0 : 30;
    g.drain_at = sim_random(w, 3) ? UINT64_MAX : sim_random(w, 6000);
    g.crash_role =
        sim_random(w, 40) ? -1 : (int)w->actor[sim_random(w, (uint64_t)w->n_actors)].role;
    g.crash_from = sim_random(w, 2) ? 0 : sim_random(w, 4000);
    g.config.supervisor_hang_s = HANG_S;
    g.config.supervisor_ready_s = READY_S;
    g.config.supervisor_restarts_max = g.crash_role < 0 ? 100000 : 3;
    g.config.supervisor_restart_window_s = 600;
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
    for (int i = 0; i < ALLOCATIONS_MAX; i++) {
        __real_free(g.allocation[i]);
        g.allocation[i] = NULL;
    }
    g.generation++;
    for (int i = 0; i < PROCS_MAX; i++)
        if (g.proc[i].state == ZOMBIE) g.proc[i].state = GONE;
    for (uint64_t n = sim_random(&g.w, 400); n; n--) machine_step();
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
        if (p->state == BORN) continue; /* of a dead lgsup: it will find its row dead and exit */
        sim_fail(&g.w, "%s.%d (pid %d) is left", lg_role_name(p->role), p->index, p->pid);
    }
}

/* As supervisor/start.c, when the board says that the run is over: nothing to adopt. */
static lg_run_state end_leftovers(void)
{
    for (int i = 0; i < PROCS_MAX; i++)
        if (lives(&g.proc[i]) && !g.proc[i].stranger) die(&g.proc[i], LG_EXIT_SIGNAL + SIGKILL);
    return (lg_run_state)atomic_load(&g.w.board.s->run_state);
}

/* As supervisor/park.c: the cause has been removed, the memory is there. */
static bool goes_on_from_memory(void)
{
    if (!lives(by_serial(g.keeper))) return false;
    g.result->memory_resumes++;
    g.crash_role = -1;
    g.config.supervisor_restarts_max = 100000;
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
        keeper_was_started = g.keeper != 0;
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
    if (outcome == LG_RUN_PARKED) {
        if (g.crash_role < 0) sim_fail(&g.w, "parked: %s", g.w.board.s->cause);
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
        for (int i = 0; i < ALLOCATIONS_MAX; i++) __real_free(g.allocation[i]);
    } else {
        supervise(false);
    }
    lg_err_clear();
}
