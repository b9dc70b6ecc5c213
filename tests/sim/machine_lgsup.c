/* lgsup's calls of its own modules, as the machine answers them: board, children, messages,
 * and what people see. lgsup may die at each, before and after. */
#include "tests/sim/machine.h"
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

REAL(lg_incarnation, lg_board_enlist, lg_board *, lg_role, int);
REAL(lg_incarnation, lg_board_enlist_standby, lg_board *, lg_role, int);
REAL(void, lg_board_bury, lg_board *, lg_incarnation);
REAL(void, lg_board_vacate, lg_board *, lg_incarnation);
REAL(void, lg_background_collect, lg_supervisor *);
extern int __wrap_poll(struct pollfd *p, nfds_t n, int timeout_ms);

/* Whoever a row was given to before is dead, joined or not. */
static void check_row_is_free(lg_role role, int index)
{
    for (int i = 0; i < PROCS_MAX; i++) {
        const struct proc *p = &g.proc[i];
        if (lives(p) && !p->stranger && lg_incarnation_row(p->me) == lg_row((int)role, index))
            sim_fail(&g.w, "%s.%d is started anew, and %u (pid %d) of its row lives",
                     lg_role_name(role), index, p->me, p->pid);
    }
}

WRAP(lg_incarnation, lg_board_enlist, lg_board *b, lg_role role, int index)
{
    lgsup_calls();
    if (role < LG_ROLE_keeper) check_row_is_free(role, index);
    lg_incarnation i = __real_lg_board_enlist(b, role, index);
    lgsup_calls();
    return i;
}
WRAP(lg_incarnation, lg_board_enlist_standby, lg_board *b, lg_role role, int index)
{
    lgsup_calls();
    check_row_is_free(role, index);
    lg_incarnation i = __real_lg_board_enlist_standby(b, role, index);
    lgsup_calls();
    return i;
}
WRAP(void, lg_board_bury, lg_board *b, lg_incarnation who)
{
    lgsup_calls();
    __real_lg_board_bury(b, who);
    lgsup_calls();
}
WRAP(void, lg_board_vacate, lg_board *b, lg_incarnation who)
{
    lgsup_calls();
    __real_lg_board_vacate(b, who);
    lgsup_calls();
}
WRAP(int, lg_program_path, const char *name, char ret_path[LG_PATH_BYTES])
{
    snprintf(ret_path, LG_PATH_BYTES, "%s", program_path(PROGRAM_beside));
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
    struct proc *p =
        new_proc((lg_role)(row / LG_INSTANCES_MAX), number_after(s->argv, "--index"), me);
    p->program = program_of_path(s->program);
    p->as_standby = row % LG_INSTANCES_MAX != p->index;
    check_program(p);
    p->doomed = sim_random(&g.w, 30) == 0 && !g.gentle;
    g.result->starts++;
    if (g.trouble == SIM_DEAF_PIDFD && sim_random(&g.w, 20) == 0) g.deaf = p->serial;
    struct lg_child child = {.pid = p->pid, .pidfd = PIDFD_FIRST + (int)p->serial, .mine = true};
    p->held = s->enter != NULL;
    lgsup_calls();
    if (s->enter && s->enter(s->where, &child) < 0) sim_fail(&g.w, "a child cannot be named");
    lgsup_calls();
    p->held = false;
    if (g.hang_every && sim_random(&g.w, 20) == 0) { /* stopped before it can join */
        p->hung = true;
        g.result->unjoined++;
    }
    lgsup_calls();
    *ret = child;
    return 0;
}
WRAP(int, lg_child_reap, struct lg_child *c)
{
    struct proc *p = by_serial((uint32_t)(c->pidfd - PIDFD_FIRST));
    int code = c->mine && p && p->state == ZOMBIE ? p->exit_code : LG_EXIT_UNKNOWN;
    if (lives(p) && c->mine && g.trouble != SIM_EARLY_FIRE)
        sim_fail(&g.w, "a living process is reaped");
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
    if (may_be_rolled_back(p)) return;
    if (atomic_load(&g.w.board.s->quit) || p->role == LG_ROLE_keeper) return;
    if (atomic_load(&g.w.board.s->run_state) >= LG_RUN_DONE)
        return; /* a later lgsup ends what is left */
    if (p->state == UP_READY && still_ns < 2 * LG_S_NS)
        sim_fail(&g.w, "%s.%d is killed, though it moved %lld ms ago", lg_role_name(p->role),
                 p->index, (long long)(still_ns / LG_MS_NS));
    if (p->state == UP_READY && g.now_ns - row->heartbeat_ns <= HANG_S * LG_S_NS)
        sim_fail(&g.w, "%s.%d is killed, though it beats", lg_role_name(p->role), p->index);
    int64_t beat_ns = p->state == UP_SETUP ? row->heartbeat_ns : p->born_ns;
    if ((p->state == BORN || p->state == UP_SETUP) && g.now_ns - beat_ns <= READY_S * LG_S_NS)
        sim_fail(&g.w, "%s.%d is killed, though its setup goes on", lg_role_name(p->role),
                 p->index);
}

WRAP(void, lg_child_signal, const struct lg_child *c, int sig)
{
    if (c->pidfd < 0) return;
    struct proc *p = by_serial((uint32_t)(c->pidfd - PIDFD_FIRST));
    if (lives(p)) judge(p); /* as of lgsup's look; the process may move until the signal comes */
    lgsup_calls();
    g.lgsup_kills = true;
    if (lives(p)) die(p, LG_EXIT_SIGNAL + sig);
    g.lgsup_kills = false;
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

/* What the workers have done, or not yet. */
WRAP(void, lg_background_collect, lg_supervisor *s)
{
    lgsup_calls();
    if (sim_random(&g.w, 3)) __real_lg_background_collect(s);
    lgsup_calls();
}
WRAP(void, lg_process_place, int pid, char *ret, size_t bytes)
{
    ret[0] = 0;
}

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
    for (int i = 0; i < g.n_letters; i++) {
        if (g.letter[i].due_ns > g.now_ns) continue;
        *ret = g.letter[i].m;
        if (ret->kind == LG_MESSAGE_event) {
            ret->level = (int)sim_random(&g.w, 4);
            snprintf(ret->text, sizeof ret->text, "something");
        }
        *peer = (struct lg_peer){.bytes = sizeof g.letter[i].id};
        memcpy(peer->id, &g.letter[i].id, sizeof g.letter[i].id);
        if (ret->kind == LG_MESSAGE_swap) order_received(&g.letter[i]);
        g.letter[i] = g.letter[--g.n_letters];
        g.result->messages++;
        return 1;
    }
    return 0;
}
WRAP(void, lg_control_answer, lg_control *c, const struct lg_peer *peer, const struct lg_message *m)
{
    uint64_t id;
    lgsup_calls();
    memcpy(&id, peer->id, sizeof id);
    if (id) order_answered(id, m);
    lgsup_calls();
}
WRAP(void, lg_control_nudge, lg_control *c, lg_role role, int index, lg_incarnation incarnation)
{
    lgsup_calls();
}

/* What people see. */

WRAP(void, lg_progress_open, lg_progress *p, const struct lg_progress_spec *spec) {}
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
WRAP(void, lg_progress_show, lg_progress *p, const struct lg_view *v) {}
WRAP(void, lg_progress_last, lg_progress *p, const struct lg_view *v) {}
WRAP(void, lg_status_save, const char *dir, lg_board *b)
{
    lgsup_calls();
}
