/* Taking over what an earlier lgsup has left. It was kill -9'd, or the machine's owner replaced it;
 * the data plane went on. What is so stands on the board:
 *
 *   STARTING or RUNNING  -> its pidfd, by pid and start time: alive: ours to watch, whether it has joined
 *                or not; else -> DEAD. STARTING that names nobody -> DEAD: its program never began.
 *
 * Who is a member of the run stands there too: every row that is not empty, but for the standby
 * processes of a swap, which are ended first (shm/board.h, rule 8). Of the loaders and encoders that were told to leave, as many as are
 * more than wanted were leaving for good; the others make place for a successor.
 *
 * We are not the parent of what we adopt: only the pidfd speaks of its end, and the exit code stays
 * unknown. */
#include "base/clock.h"
#include "supervisor/core/keep_jobs.h"
#include "supervisor/core/scale.h"
#include "supervisor/core/supervise.h"
#include "supervisor/views/status.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/pidfd.h>
#include <unistd.h>

/* A driver can take a minute to let go of a process's memory. */
enum { KILL_MS_MAX = 60000, KILL_TRIES = 3, REFRESH_TRIES = 6 };

/* Nobody has seen how it ended; what it wrote may tell. */
static void say_dead(lg_supervisor *s, const struct lg_instance *i)
{
    char name[32], log[LG_PATH_BYTES], last[256] = "";
    lg_instance_name(i, name);
    if (lg_instance_log(s, i, log) == 0) lg_last_words(log, last, sizeof last);
    lg_progress_say(&s->progress, LG_WARN, "%s: died while no lgsup was there%s%s; restarted", name,
                    last[0] ? ", its log ends with: " : "", last);
}

static int adopt_process(lg_supervisor *s, struct lg_instance *i)
{
    struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    int pidfd = lg_board_pidfd(s->board, i->role, i->index);
    if (pidfd == LG_ERR_BUSY)
        return LG_FAIL(LG_ERR_IO, "cannot tell whether %s.%d (pid %u) lives; start again",
                       lg_role_name(i->role), i->index, atomic_load(&row->pid));
    if (pidfd < 0) {
        lg_board_bury(s->board, i->incarnation);
        atomic_fetch_add(&row->restarts, 1);
        say_dead(s, i);
        return 0;
    }
    i->child = (struct lg_child){.pid = (int)atomic_load(&row->pid), .pidfd = pidfd};
    i->state =
        atomic_load(&row->ready) == i->incarnation ? LG_INSTANCE_ready : LG_INSTANCE_starting;
    return 0;
}

static int adopt_one(lg_supervisor *s, struct lg_instance *i)
{
    const struct lg_board_row *row = lg_board_row(s->board, i->role, i->index);
    lg_life state;
    i->incarnation = lg_board_life(s->board, i->role, i->index, &state);
    i->spawned_ns = lg_now_ns();
    if (state == LG_LIFE_STARTING && !atomic_load(&row->start_time))
        lg_board_bury(s->board, i->incarnation);
    else if (state == LG_LIFE_STARTING || state == LG_LIFE_RUNNING)
        LG_TRY(adopt_process(s, i));
    return 0;
}

static bool is_ours(int role)
{
    return role != LG_ROLE_lgsup;
}

/* Not proven dead: who cannot be looked at (no fds left, say) may live, and nothing may be started
 * over it. */
static bool may_live(const struct lg_board_row *row)
{
    int pid = (int)atomic_load(&row->pid);
    int pidfd = pid > 0 ? pidfd_open(pid, 0) : -1;
    if (pidfd < 0) return pid > 0 && errno != ESRCH;
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    uint64_t start = lg_process_start_time(pid); /* 0: unknown */
    bool may = (!start || start == atomic_load(&row->start_time)) && poll(&p, 1, 0) <= 0;
    close(pidfd);
    return may;
}

bool lg_leftovers_live(lg_board *b)
{
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        for (int k = 0; k < LG_INSTANCES_MAX; k++)
            if (is_ours(r) && may_live(lg_board_row(b, (lg_role)r, k))) return true;
    return false;
}

static void kill_row(const struct lg_board_row *row, int wait_ms)
{
    int pid = (int)atomic_load(&row->pid);
    struct lg_child c = {.pid = pid, .pidfd = pidfd_open(pid, 0)};
    if (c.pidfd < 0) return;
    if (lg_status_row_alive(row)) { /* looked at after the pidfd was opened: it is that process */
        lg_child_signal(&c, SIGKILL);
        lg_child_wait(&c, wait_ms);
    }
    lg_child_reap(&c);
}

/* The standby processes of a swap that nobody carries on. Who has left its spare row meanwhile is a member now. One of
 * them may be the last who has a region. */
static void end_standbys(lg_supervisor *s, int role)
{
    lg_board *b = s->board;
    for (int k = 0; k < LG_INSTANCES_MAX; k++) {
        const struct lg_board_row *row = lg_board_row(b, (lg_role)role, k);
        lg_life life;
        lg_incarnation who = lg_board_life(b, (lg_role)role, k, &life);
        if (life == LG_LIFE_NONE || atomic_load(&row->standby) != who) continue;
        if (lg_status_row_alive(row))
            lg_keep_salvage(&s->keep, (int)atomic_load(&row->pid), b->s->preamble.run_id);
        kill_row(row, KILL_MS_MAX);
        lg_board_vacate(b, who);
    }
}

static int add_members(lg_supervisor *s, int role, int *ret_n)
{
    *ret_n = 0;
    for (int k = 0; k < LG_INSTANCES_MAX; k++) {
        lg_life life;
        lg_board_life(s->board, (lg_role)role, k, &life);
        if (life == LG_LIFE_NONE) continue;
        LG_TRY(adopt_one(s, lg_instance_add(s, (lg_role)role, k)));
        ++*ret_n;
    }
    return 0;
}

static bool told_to_leave(lg_supervisor *s, const struct lg_instance *i)
{
    return atomic_load(&lg_board_row(s->board, i->role, i->index)->leave) == i->incarnation;
}

/* Ranks leave at a YIELD verdict alone (board.h, rule 7), for which the former lgsup may not have come
 * to ask. */
static void yield(lg_supervisor *s, struct lg_instance *i)
{
    lg_instance_raise(s, i, LG_INSTANCE_EVENT_yield);
    if (i->role == LG_ROLE_trainer) atomic_store(&s->board->s->yield, 1);
}

static int adopt_role(lg_supervisor *s, int role)
{
    int wanted = (int)atomic_load(&s->board->s->wanted[role]), n_members;
    end_standbys(s, role);
    LG_TRY(add_members(s, role, &n_members));
    int surplus = n_members - wanted, missing = -surplus;
    for (int n = s->n_instances - 1; n >= 0; n--) {
        struct lg_instance *i = &s->instance[n];
        if ((int)i->role != role || !told_to_leave(s, i)) continue;
        if (surplus-- > 0)
            lg_instance_raise(s, i, LG_INSTANCE_EVENT_drain);
        else if (i->state != LG_INSTANCE_down)
            yield(s, i);
    }
    lg_instances_sweep(s);
    for (int k = 0; k < wanted && missing > 0; k++) /* rows that the former lgsup has not come to */
        if (!lg_instance_find(s, (lg_role)role, k)) {
            lg_instance_add(s, (lg_role)role, k);
            missing--;
        }
    return 0;
}

/* Who is just starting finds at the latest when it joins that it is not wanted. */
static void close_row(struct lg_board_row *row)
{
    uint64_t life = atomic_load(&row->life);
    uint64_t dead = (life & ~(uint64_t)0xff) | LG_LIFE_DEAD;
    if ((life & 0xff) == LG_LIFE_STARTING) atomic_compare_exchange_strong(&row->life, &life, dead);
}

/* First the board is closed to newcomers, then rows that wait for one; see supervisor/launch/role.c. */
static void close_board(lg_board *b)
{
    if (atomic_load(&b->s->run_state) < LG_RUN_DONE) atomic_store(&b->s->run_state, LG_RUN_FAILED);
    atomic_thread_fence(memory_order_seq_cst);
    for (int r = 0; r < LG_ROLE_keeper; r++)
        for (int k = 0; k < LG_INSTANCES_MAX; k++) close_row(lg_board_row(b, (lg_role)r, k));
}

static void kill_rows(lg_board *b, bool keeper, int wait_ms)
{
    for (int r = 0; r < LG_ROLE_COUNT; r++) {
        if (!is_ours(r) || (r == LG_ROLE_keeper && !keeper)) continue;
        for (int k = 0; k < LG_INSTANCES_MAX; k++)
            for (int n = 0; n < KILL_TRIES && may_live(lg_board_row(b, (lg_role)r, k)); n++)
                kill_row(lg_board_row(b, (lg_role)r, k), wait_ms);
    }
}

void lg_leftovers_kill(lg_board *b, bool keeper)
{
    close_board(b);
    kill_rows(b, keeper, 0); /* all, before any is waited for */
    kill_rows(b, keeper, KILL_MS_MAX);
    if (!lg_leftovers_live(b)) atomic_store(&b->s->preamble.ended, LG_BOARD_ENDED);
}

/* Without the old keeper: every region must still be in the hands of some stage. */
static int adopt_without_keeper(lg_supervisor *s)
{
    char missing[LG_REGION_NAME_BYTES] = "";
    bool unused = lg_keep_is_first(s->board); /* there is no memory yet */
    for (int i = 0; i < s->n_instances; i++)
        if (s->instance[i].child.pidfd >= 0)
            lg_keep_salvage(&s->keep, s->instance[i].child.pid, s->board->s->preamble.run_id);
    if (!unused && !lg_keep_is_whole(&s->keep, missing)) {
        s->run->memory_lost = true;
        return LG_FAIL(LG_ERR_NOTFOUND, "the keeper is dead and region %s is in nobody's hands",
                       missing);
    }
    s->keep.complete = true;
    LG_TRY(lg_keep_start(&s->keep, s->board));
    lg_progress_say(&s->progress, LG_WARN,
                    "keeper: died while no lgsup was there; restarted with %d regions",
                    s->keep.n_copies);
    return 0;
}

/* Whatever of a decision the former lgsup has come to store, the rest follows. */
static void take_over_decision(lg_supervisor *s)
{
    uint32_t state = atomic_load(&s->board->s->run_state);
    if (atomic_load(&s->board->s->drain) || state == LG_RUN_DRAINING) {
        s->step = LG_RUN_STEP_draining;
        lg_run_raise(s, LG_RUN_EVENT_stop);
    } else {
        s->step = state == LG_RUN_RUNNING ? LG_RUN_STEP_running : LG_RUN_STEP_starting;
    }
}

/* A keeper that lives and that nobody reaches: its socket was removed, or the former lgsup has died before it
 * could put it in its predecessor's place. Its memory is copied from its fds, then it is ended, and what
 * follows is as after its death. */
static void end_unreachable_keeper(lg_supervisor *s)
{
    struct lg_board_row *row = lg_board_row(s->board, LG_ROLE_keeper, 0);
    int pid = (int)atomic_load(&row->pid);
    if (!lg_status_row_alive(row)) return;
    bool ready = lg_keep_is_ready(s->board), removed = !lg_keep_is_reachable(&s->keep);
    if (!removed && (ready || lg_keep_answers(&s->keep, pid))) return;
    lg_keep_salvage(&s->keep, pid, s->board->s->preamble.run_id);
    lg_progress_say(
        &s->progress, LG_WARN, "keeper: %s: %d regions copied from it, another takes its place",
        ready ? "its socket was removed" : "lgsup died while it started it", s->keep.n_copies);
    kill_row(row, KILL_MS_MAX);
}

/* Copies of all that a living keeper holds. One that cannot be asked may be dying with everybody else, and
 * then nothing would be found later: so its end is waited for, or its fds are read instead. */
static int copy_from_keeper(lg_supervisor *s)
{
    char missing[LG_REGION_NAME_BYTES];
    int rc = lg_keep_refresh(&s->keep);
    for (int i = 0; rc < 0 && rc != LG_ERR_TIMEOUT && !s->keep.complete && i < REFRESH_TRIES; i++) {
        if (lg_child_wait(&s->keep.child, 10 * i * i) == 0) {
            lg_child_reap(&s->keep.child);
            return LG_ERR_NOTFOUND;
        }
        rc = lg_keep_refresh(&s->keep);
    }
    lg_err_clear();
    if (s->keep.complete) return 0;
    lg_keep_salvage(&s->keep, s->keep.child.pid, s->board->s->preamble.run_id);
    s->keep.complete = lg_keep_is_whole(&s->keep, missing); /* else again at the first look */
    return 0;
}

int lg_adopt_instances(lg_supervisor *s, bool parked)
{
    int alive = 0;
    for (int r = 0; r < LG_ROLE_keeper; r++) LG_TRY(adopt_role(s, r));
    for (int i = 0; i < s->n_instances; i++) alive += s->instance[i].child.pidfd >= 0;
    end_unreachable_keeper(s);
    int rc = lg_keep_adopt(&s->keep, s->board);
    if (rc == 0) rc = copy_from_keeper(s);
    if (rc == LG_ERR_NOTFOUND) {
        lg_err_clear();
        rc = adopt_without_keeper(s);
    }
    LG_TRY(rc);
    s->copies_due = true;
    lg_progress_say(&s->progress, LG_INFO, "%sadopted %d of %d processes and %d regions",
                    parked ? "" : "an earlier lgsup has died: ", alive, s->n_instances,
                    s->keep.n_copies);
    take_over_decision(s);
    return 0;
}
