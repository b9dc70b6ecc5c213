/* What falls on a run; the list is faults.def.
 *
 * Signals go by pidfd, after the start time was compared, so they reach the process that the board
 * names or nobody. Of one role at most DEATHS_MAX processes are killed between two commits: more
 * would, rightly, park the run (supervisor.restarts_max). */
#include "base/clock.h"
#include "base/philox.h"
#include "tests/chaos/chaos.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/pidfd.h>
#include <unistd.h>

enum {
    DEATHS_MAX = 4,
    PAUSE_MS_MIN = 20,
    PAUSE_MS_MAX = 400,
    DISK_MS_MIN = 100,
    DISK_MS_MAX = 600,
    ARMED_MS_BEFORE_KILL = 60, /* a site that is not reached by itself: a process is started anew */
    ARMED_MS_BEFORE_POWER = 700, /* nor by that: everything is */
    ARMED_MS_MAX = 2500,
    PASS_MAX = 40, /* calls of an armed site that go well before the one that fails */
    TRIES_MAX = 32
};

const char *const chaos_fault_name[CHAOS_FAULTS] = {
#define FAULT(name, cards, doc) #name,
#include "tests/chaos/faults.def"
#undef FAULT
};
const char *const chaos_fault_doc[CHAOS_FAULTS] = {
#define FAULT(name, cards, doc) doc,
#include "tests/chaos/faults.def"
#undef FAULT
};

uint32_t chaos_draw(struct chaos_run *r, uint32_t below)
{
    uint32_t word = lg_philox(r->seed, LG_PURPOSE_TEST, r->drawn++, 0).v[0];
    return (uint32_t)((uint64_t)word * below >> 32);
}

void chaos_shuffle(struct chaos_run *r)
{
    static const int cards[CHAOS_FAULTS] = {
#define FAULT(name, n, doc) n,
#include "tests/chaos/faults.def"
#undef FAULT
    };
    r->cards = r->card = 0;
    for (int f = 0; f < CHAOS_FAULTS; f++) {
        bool needs_shim = f == CHAOS_disk || f == CHAOS_syscall;
        if (r->o->only ? strcmp(r->o->only, chaos_fault_name[f]) != 0 : needs_shim && !r->preload)
            continue;
        for (int k = 0; k < cards[f]; k++) r->deck[r->cards++] = (uint8_t)f;
    }
    LG_ASSERT(r->cards > 0 && r->cards <= (int)sizeof r->deck);
    for (int i = r->cards - 1; i > 0; i--) { /* Fisher-Yates */
        uint32_t j = chaos_draw(r, (uint32_t)i + 1);
        uint8_t swap = r->deck[i];
        r->deck[i] = r->deck[j];
        r->deck[j] = swap;
    }
}

/* ---- processes ---- */

struct victim {
    int role, index, pidfd;
    lg_incarnation incarnation;
};

static int keeper_pidfd(lg_board *b)
{
    struct lg_board_row *row = lg_board_row(b, LG_ROLE_keeper, 0);
    int pid = (int)atomic_load(&row->pid);
    int fd = pid > 0 ? pidfd_open(pid, 0) : -1;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (fd < 0 ||
        (lg_process_start_time(pid) == atomic_load(&row->start_time) && poll(&p, 1, 0) == 0))
        return fd;
    close(fd);
    return -1;
}

/* False: no such process just now. */
static bool find_victim(struct chaos_run *r, int role, int index, struct victim *ret)
{
    *ret = (struct victim){.role = role, .index = index, .pidfd = -1};
    ret->incarnation = lg_board_life(r->board, (lg_role)role, index, NULL);
    if (role == LG_ROLE_lgsup)
        ret->pidfd = r->pid ? pidfd_open(r->pid, 0) : -1;
    else if (role == LG_ROLE_keeper)
        ret->pidfd = keeper_pidfd(r->board);
    else
        ret->pidfd = lg_board_pidfd(r->board, (lg_role)role, index);
    return ret->pidfd >= 0;
}

static int instances(struct chaos_run *r, int role)
{
    int n = 0;
    while (n < LG_INSTANCES_MAX && lg_board_life(r->board, (lg_role)role, n, NULL) != 0) n++;
    return n;
}

/* Any process that lives and may die once more, of the roles up to `last`. */
static bool draw_victim(struct chaos_run *r, lg_role last, struct victim *ret)
{
    struct {
        int role, index;
    } all[LG_ROWS];
    int n = 0;
    for (int role = 0; role <= (int)last; role++)
        for (int k = 0; k < instances(r, role); k++) {
            all[n].role = role;
            all[n++].index = k;
        }
    for (int t = 0; n && t < TRIES_MAX; t++) {
        uint32_t i = chaos_draw(r, (uint32_t)n);
        if (r->role_kills[all[i].role] < DEATHS_MAX &&
            find_victim(r, all[i].role, all[i].index, ret))
            return true;
    }
    return false;
}

/* Nothing that waits still is alone any more, and what comes now is not either. */
static struct chaos_event *note(struct chaos_run *r, chaos_fault f, int role, int index)
{
    bool alone = true;
    for (int i = 0; i < r->n_events; i++) {
        if (!r->event[i].waits) continue;
        alone = r->event[i].alone = false;
    }
    if (r->n_events == CHAOS_EVENTS_MAX) r->n_events--;
    struct chaos_event *e = &r->event[r->n_events++];
    *e = (struct chaos_event){.fault = f,
                              .role = role,
                              .index = index,
                              .at_ns = lg_now_ns(),
                              .commit = r->commit,
                              .run_id = r->board ? r->board->s->run_id : 0,
                              .commit_ms = -1,
                              .ready_ms = -1,
                              .adopt_ms = -1,
                              .alone = alone,
                              .waits = true};
    return e;
}

/* All at one moment: the signals follow each other without anything in between. */
static void kill_all(struct chaos_run *r, chaos_fault f, struct victim *v, int n)
{
    r->commit = lg_board_global_commit(r->board);
    for (int i = 0; i < n; i++) {
        struct chaos_event *e = note(r, f, v[i].role, v[i].index);
        e->incarnation = v[i].incarnation;
        e->killed = true;
        e->alone = e->alone || (i > 0 && r->event[r->n_events - 2].fault == f);
        if (v[i].role == LG_ROLE_lgsup) r->killed_lgsup = true;
    }
    for (int i = 0; i < n; i++)
        if (pidfd_send_signal(v[i].pidfd, SIGKILL, NULL, 0) == 0) r->kills++;
    for (int i = 0; i < n; i++) {
        r->role_kills[v[i].role]++;
        close(v[i].pidfd);
    }
}

static bool strike_roles(struct chaos_run *r, chaos_fault f, int first, int second)
{
    struct victim v[2];
    if (!find_victim(r, first, 0, &v[0])) return false;
    if (second >= 0 && !find_victim(r, second, 0, &v[1])) {
        close(v[0].pidfd);
        return false;
    }
    kill_all(r, f, v, second >= 0 ? 2 : 1);
    return true;
}

static bool strike_drawn(struct chaos_run *r, chaos_fault f, int n)
{
    struct victim v[2];
    if (!draw_victim(r, f == CHAOS_pair ? LG_ROLE_lgsup : LG_ROLE_ckpt, &v[0])) return false;
    if (n == 2 && (!draw_victim(r, LG_ROLE_lgsup, &v[1]) ||
                   (v[0].role == v[1].role && v[0].index == v[1].index))) {
        close(v[0].pidfd);
        return false;
    }
    kill_all(r, f, v, n);
    return true;
}

static bool strike_lgsup_and_stage(struct chaos_run *r)
{
    struct victim v[2];
    if (!find_victim(r, LG_ROLE_lgsup, 0, &v[0])) return false;
    if (!draw_victim(r, LG_ROLE_ckpt, &v[1])) {
        close(v[0].pidfd);
        return false;
    }
    kill_all(r, CHAOS_lgsup_and_stage, v, 2);
    return true;
}

/* lgsup first, else it would start others; then all that the board names, then orphans that were too
 * new to stand there. */
static bool strike_power(struct chaos_run *r, chaos_fault f)
{
    struct victim v[LG_ROWS];
    int n = 0;
    if (!find_victim(r, LG_ROLE_lgsup, 0, &v[n++])) return false;
    for (int role = 0; role < LG_ROLE_lgsup; role++)
        for (int k = 0; k < instances(r, role); k++)
            if (find_victim(r, role, k, &v[n])) n++;
    kill_all(r, f, v, n);
    for (int i = 1; i < n; i++)
        r->event[r->n_events - i].incarnation = 0; /* back at a checkpoint */
    return true;
}

/* ---- what lasts ---- */

static bool strike_pause(struct chaos_run *r, int64_t now_ns)
{
    struct victim v;
    if (r->stopped_fd >= 0 || !draw_victim(r, LG_ROLE_lgsup, &v)) return false;
    pidfd_send_signal(v.pidfd, SIGSTOP, NULL, 0);
    note(r, CHAOS_pause, v.role, v.index);
    r->stopped_fd = v.pidfd;
    r->continue_ns =
        now_ns + (PAUSE_MS_MIN + (int64_t)chaos_draw(r, PAUSE_MS_MAX - PAUSE_MS_MIN)) * LG_MS_NS;
    return true;
}

static bool strike_hang(struct chaos_run *r)
{
    struct victim v;
    if (!draw_victim(r, LG_ROLE_keeper, &v)) return false;
    note(r, CHAOS_hang, v.role, v.index)->incarnation = v.incarnation;
    pidfd_send_signal(v.pidfd, SIGSTOP, NULL, 0);
    r->role_kills[v.role]++;
    close(v.pidfd);
    return true;
}

static bool strike_disk(struct chaos_run *r, int64_t now_ns)
{
    if (r->disk_ns) return false;
    atomic_store(&r->control->disk_full, 1);
    r->disk_ns =
        now_ns + (DISK_MS_MIN + (int64_t)chaos_draw(r, DISK_MS_MAX - DISK_MS_MIN)) * LG_MS_NS;
    return true;
}

static uint32_t known(const struct chaos_site *s)
{
    return atomic_load(&s->fails) + atomic_load(&s->missed);
}

bool chaos_arm(struct chaos_run *r, int64_t now_ns)
{
    struct chaos_control *c = r->control;
    uint32_t least = UINT32_MAX, n = 0, pick;
    if (r->armed) return false;
    for (int i = 0; i < CHAOS_SITES_MAX; i++)
        if (atomic_load(&c->site[i].key)) least = LG_MIN(least, known(&c->site[i]));
    for (int i = 0; i < CHAOS_SITES_MAX; i++)
        n += atomic_load(&c->site[i].key) && known(&c->site[i]) == least;
    if (!n) return false;
    pick = chaos_draw(r, n);
    for (int i = 0; i < CHAOS_SITES_MAX; i++) {
        if (!atomic_load(&c->site[i].key) || known(&c->site[i]) != least || pick-- > 0) continue;
        r->armed = (uint32_t)i + 1;
        break;
    }
    r->armed_ns = now_ns;
    r->armed_kills = 0;
    atomic_store(&c->other_errno, chaos_draw(r, 2));
    atomic_store(&c->pass, chaos_draw(r, 4) == 0 ? chaos_draw(r, PASS_MAX) : 0);
    atomic_store(&c->armed, r->armed);
    return true;
}

static int role_of_site(const struct chaos_run *r)
{
    return (int)(atomic_load(&r->control->site[r->armed - 1].key) >> 56 & 0xf);
}

/* Only a start reaches many sites: so somebody has to start. */
static void kill_for_site(struct chaos_run *r)
{
    struct victim v;
    int role = role_of_site(r), n = r->board ? instances(r, role) : 0;
    if (!n || r->role_kills[role] >= DEATHS_MAX) return;
    if (!find_victim(r, role, (int)chaos_draw(r, (uint32_t)n), &v)) return;
    kill_all(r, CHAOS_syscall, &v, 1);
    r->armed_kills++;
}

static void follow_site(struct chaos_run *r, int64_t now_ns)
{
    struct chaos_control *c = r->control;
    if (atomic_load(&c->armed) == 0) {
        r->sites_failed++;
        note(r, CHAOS_syscall, role_of_site(r), 0);
        r->armed = 0;
        return;
    }
    if (now_ns - r->armed_ns > ARMED_MS_MAX * LG_MS_NS) {
        uint32_t armed = r->armed;
        if (!atomic_compare_exchange_strong(&c->armed, &armed, 0)) return; /* just now */
        atomic_fetch_add(&c->site[r->armed - 1].missed, 1);
        r->sites_missed++;
        r->armed = 0;
    } else if (r->armed_kills == 1 && now_ns - r->armed_ns > ARMED_MS_BEFORE_POWER * LG_MS_NS) {
        r->armed_kills += r->board && strike_power(r, CHAOS_syscall);
    } else if (r->armed_kills == 0 && now_ns - r->armed_ns > ARMED_MS_BEFORE_KILL * LG_MS_NS) {
        kill_for_site(r);
    }
}

void chaos_follow(struct chaos_run *r, int64_t now_ns)
{
    if (r->stopped_fd >= 0 && now_ns >= r->continue_ns) {
        pidfd_send_signal(r->stopped_fd, SIGCONT, NULL, 0);
        close(r->stopped_fd);
        r->stopped_fd = -1;
    }
    if (r->disk_ns && now_ns >= r->disk_ns) {
        atomic_store(&r->control->disk_full, 0);
        r->disk_ns = 0;
        note(r, CHAOS_disk, -1, 0);
    }
    if (r->armed) follow_site(r, now_ns);
}

bool chaos_lasts(const struct chaos_run *r)
{
    return r->stopped_fd >= 0 || r->disk_ns || r->armed;
}

/* ---- one card ---- */

static bool strike(struct chaos_run *r, chaos_fault f, int64_t now_ns)
{
    switch (f) {
    case CHAOS_kill:
        return strike_drawn(r, f, 1);
    case CHAOS_pair:
        return strike_drawn(r, f, 2);
    case CHAOS_lgsup:
        return strike_roles(r, f, LG_ROLE_lgsup, -1);
    case CHAOS_lgsup_and_stage:
        return strike_lgsup_and_stage(r);
    case CHAOS_keeper:
        return r->role_kills[LG_ROLE_keeper] < DEATHS_MAX && strike_roles(r, f, LG_ROLE_keeper, -1);
    case CHAOS_lgsup_and_keeper:
        return strike_roles(r, f, LG_ROLE_lgsup, LG_ROLE_keeper);
    case CHAOS_power:
        return strike_power(r, f);
    case CHAOS_pause:
        return strike_pause(r, now_ns);
    case CHAOS_hang:
        return strike_hang(r);
    case CHAOS_garbage:
        chaos_garbage(r);
        note(r, f, -1, 0);
        return true;
    case CHAOS_disk:
        return strike_disk(r, now_ns);
    case CHAOS_syscall:
        return chaos_arm(r, now_ns);
    default:
        return false;
    }
}

bool chaos_strike(struct chaos_run *r, int64_t now_ns)
{
    if (r->card == r->cards) chaos_shuffle(r);
    chaos_fault f = (chaos_fault)r->deck[r->card];
    if (!strike(r, f, now_ns)) {
        /* not possible now: another card, this one later */
        uint32_t other = (uint32_t)r->card + chaos_draw(r, (uint32_t)(r->cards - r->card));
        r->deck[r->card] = r->deck[other];
        r->deck[other] = (uint8_t)f;
        return false;
    }
    r->card++;
    r->count[f]++;
    return true;
}
