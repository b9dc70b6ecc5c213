/* What falls on a run: the deck of cards, and the faults that are done at once or last for a moment; the
 * list is faults.def. */
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
    PAUSE_MS_MIN = 20,
    PAUSE_MS_MAX = 400,
    DISK_MS_MIN = 100,
    DISK_MS_MAX = 600,
    ARMED_MS_BEFORE_KILL = 60, /* a site that is not reached by itself: a process is started anew */
    ARMED_MS_BEFORE_POWER = 700, /* nor by that: everything is */
    ARMED_MS_MAX = 2500,
    PASS_MAX = 40, /* calls of an armed site that go well before the one that fails */
};

const char *const chaos_fault_name[CHAOS_FAULTS] = {
#define FAULT(name, kind, needs, cards, doc) #name,
#include "tests/chaos/faults.def"
#undef FAULT
};
const char *const chaos_fault_doc[CHAOS_FAULTS] = {
#define FAULT(name, kind, needs, cards, doc) doc,
#include "tests/chaos/faults.def"
#undef FAULT
};

uint32_t chaos_draw(struct chaos_run *r, uint32_t below)
{
    uint32_t word = lg_philox(r->seed, LG_PURPOSE_TEST, r->drawn++, 0).v[0];
    return (uint32_t)((uint64_t)word * below >> 32);
}

enum needs { NOTHING, SHIM, DATA, CGROUP };
static const struct {
    int cards;
    enum needs needs;
} row[CHAOS_FAULTS] = {
#define FAULT(name, kind, needs, cards, doc) {cards, needs},
#include "tests/chaos/faults.def"
#undef FAULT
};

bool chaos_needs_shim(chaos_fault f)
{
    return row[f].needs == SHIM;
}

bool chaos_is_possible(const struct chaos_run *r, chaos_fault f)
{
    return row[f].needs != DATA && row[f].needs != CGROUP ? true
           : row[f].needs == DATA                         ? r->data[0] != 0
                                                          : r->cgroup[0] != 0;
}

void chaos_shuffle(struct chaos_run *r)
{
    r->cards = r->card = 0;
    for (int f = 0; f < CHAOS_FAULTS; f++) {
        bool wanted = r->o->only ? !strcmp(r->o->only, chaos_fault_name[f])
                                 : r->preload || !chaos_needs_shim((chaos_fault)f);
        if (!wanted || !chaos_is_possible(r, (chaos_fault)f)) continue;
        for (int k = 0; k < row[f].cards; k++) r->deck[r->cards++] = (uint8_t)f;
    }
    LG_ASSERT(r->cards <= (int)sizeof r->deck);
    for (int i = r->cards - 1; i > 0; i--) { /* Fisher-Yates */
        uint32_t j = chaos_draw(r, (uint32_t)i + 1);
        uint8_t swap = r->deck[i];
        r->deck[i] = r->deck[j];
        r->deck[j] = swap;
    }
}

/* ---- deaths ---- */

static bool strike_roles(struct chaos_run *r, chaos_fault f, int first, int second)
{
    struct chaos_victim v[2];
    if (!chaos_find_victim(r, first, 0, &v[0])) return false;
    if (second >= 0 && !chaos_find_victim(r, second, 0, &v[1])) {
        close(v[0].pidfd);
        return false;
    }
    chaos_kill_all(r, f, v, second >= 0 ? 2 : 1);
    return true;
}

static bool strike_drawn(struct chaos_run *r, chaos_fault f, int n)
{
    struct chaos_victim v[2];
    if (!chaos_draw_victim(r, f == CHAOS_pair ? LG_ROLE_lgsup : LG_ROLE_ckpt, &v[0])) return false;
    if (n == 2 && (!chaos_draw_victim(r, LG_ROLE_lgsup, &v[1]) ||
                   (v[0].role == v[1].role && v[0].index == v[1].index))) {
        close(v[0].pidfd);
        return false;
    }
    chaos_kill_all(r, f, v, n);
    return true;
}

static bool strike_lgsup_and_stage(struct chaos_run *r)
{
    struct chaos_victim v[2];
    if (!chaos_find_victim(r, LG_ROLE_lgsup, 0, &v[0])) return false;
    if (!chaos_draw_victim(r, LG_ROLE_ckpt, &v[1])) {
        close(v[0].pidfd);
        return false;
    }
    chaos_kill_all(r, CHAOS_lgsup_and_stage, v, 2);
    return true;
}

/* lgsup first, else it would start others; then all that the board names, then orphans that were too
 * new to stand there. */
bool chaos_strike_power(struct chaos_run *r, chaos_fault f)
{
    struct chaos_victim v[LG_ROWS];
    int n = 0;
    if (!chaos_find_victim(r, LG_ROLE_lgsup, 0, &v[n++])) return false;
    for (int role = 0; role < LG_ROLE_lgsup; role++)
        for (int k = 0; k < chaos_instances(r, role); k++)
            if (chaos_find_victim(r, role, k, &v[n])) n++;
    chaos_kill_all(r, f, v, n);
    for (int i = 1; i < n; i++)
        r->event[r->n_events - i].incarnation = 0; /* back at a checkpoint */
    return true;
}

/* ---- what lasts ---- */

static bool strike_pause(struct chaos_run *r, int64_t now_ns)
{
    struct chaos_victim v;
    if (r->stopped_fd >= 0 || !chaos_draw_victim(r, LG_ROLE_lgsup, &v)) return false;
    pidfd_send_signal(v.pidfd, SIGSTOP, NULL, 0);
    chaos_note(r, CHAOS_pause, v.role, v.index);
    r->stopped_fd = v.pidfd;
    r->continue_ns =
        now_ns + (PAUSE_MS_MIN + (int64_t)chaos_draw(r, PAUSE_MS_MAX - PAUSE_MS_MIN)) * LG_MS_NS;
    return true;
}

static bool strike_hang(struct chaos_run *r)
{
    struct chaos_victim v;
    if (!chaos_draw_victim(r, LG_ROLE_keeper, &v)) return false;
    chaos_note(r, CHAOS_hang, v.role, v.index)->incarnation = v.incarnation;
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
    struct chaos_victim v;
    int role = role_of_site(r), n = r->board ? chaos_instances(r, role) : 0;
    if (!n || !chaos_may_die(r, role)) return;
    if (!chaos_find_victim(r, role, (int)chaos_draw(r, (uint32_t)n), &v)) return;
    chaos_kill_all(r, CHAOS_syscall, &v, 1);
    r->armed_kills++;
}

static void follow_site(struct chaos_run *r, int64_t now_ns)
{
    struct chaos_control *c = r->control;
    if (atomic_load(&c->armed) == 0) {
        r->sites_failed++;
        chaos_note(r, CHAOS_syscall, role_of_site(r), 0);
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
        r->armed_kills += r->board && chaos_strike_power(r, CHAOS_syscall);
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
        chaos_note(r, CHAOS_disk, -1, 0);
    }
    if (r->armed) follow_site(r, now_ns);
    chaos_episode_follow(r, now_ns);
}

bool chaos_lasts(const struct chaos_run *r)
{
    return r->stopped_fd >= 0 || r->disk_ns || r->armed || r->episode.on;
}

/* ---- one card ---- */

static bool strike(struct chaos_run *r, chaos_fault f, int64_t now_ns)
{
    if (chaos_is_episode(f)) return chaos_episode_begin(r, f, now_ns);
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
        return chaos_may_die(r, LG_ROLE_keeper) && strike_roles(r, f, LG_ROLE_keeper, -1);
    case CHAOS_lgsup_and_keeper:
        return strike_roles(r, f, LG_ROLE_lgsup, LG_ROLE_keeper);
    case CHAOS_power:
        return chaos_strike_power(r, f);
    case CHAOS_pause:
        return strike_pause(r, now_ns);
    case CHAOS_hang:
        return strike_hang(r);
    case CHAOS_garbage:
        chaos_garbage(r);
        chaos_note(r, f, -1, 0);
        return true;
    case CHAOS_disk:
        return strike_disk(r, now_ns);
    case CHAOS_syscall:
        return chaos_arm(r, now_ns);
    case CHAOS_clock:
        chaos_set_clock(r);
        return true;
    default:
        return false;
    }
}

bool chaos_strike(struct chaos_run *r, int64_t now_ns)
{
    if (r->episode.on) return false;
    if (r->card == r->cards) chaos_shuffle(r);
    if (!r->cards) return false;
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
