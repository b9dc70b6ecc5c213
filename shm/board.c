/* The board: a file that every process maps; the rules stand in board.h.
 *
 * Liveness is decided by one 64-bit word per row, {pid, incarnation, state}, so that a look at it
 * is always consistent, whatever a child that comes too late or a second lgsup does. The kernel is
 * asked (pidfd) only when the word says that somebody should be there.
 *
 * Invariants: an incarnation enters a row once and leaves it for good; pid and start_time name its
 * process before that joins, and are written for it by who starts it, then by itself.
 */
#include "shm/board.h"
#include "base/clock.h"
#include "base/fs.h"
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PID_SHIFT = 40, INCARNATION_SHIFT = 8, STATE_MASK = 0xff, STAT_BYTES = 1024 };
/* Counters that fit into an incarnation. A board's begin in their first half, so that the other is left for restarts. */
enum { COUNTER_MAX = UINT32_MAX / LG_ROWS, COUNTER_START_MAX = COUNTER_MAX / 2 };

static uint64_t life_of(uint64_t pid, lg_incarnation i, lg_life state)
{
    return pid << PID_SHIFT | (uint64_t)i << INCARNATION_SHIFT | (uint64_t)state;
}

static lg_incarnation life_incarnation(uint64_t life)
{
    return (lg_incarnation)(life >> INCARNATION_SHIFT);
}

static lg_life life_state(uint64_t life)
{
    return (lg_life)(life & STATE_MASK);
}

const char *lg_run_state_name(lg_run_state s)
{
    static const char *const name[] = {"starting", "running", "draining", "done",
                                       "stopped",  "parked",  "failed"};
    return (size_t)s < LG_ARRAY_LEN(name) ? name[s] : "unknown";
}

static int map_board(int fd, lg_board **ret)
{
    lg_board *b = calloc(1, sizeof *b);
    if (!b) {
        close(fd);
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for a board's handle");
    }
    b->fd = fd;
    void *at = mmap(NULL, sizeof *b->s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        int e = errno;
        lg_board_close(&b);
        return LG_FAIL(lg_err_from_errno(e), "cannot map the board: %s", strerror(e));
    }
    b->s = at;
    *ret = b;
    return 0;
}

static int describe_preamble(lg_board *b, uint64_t plan_hash)
{
    struct lg_board_preamble *p = &b->s->preamble;
    struct stat st;
    LG_TRY(lg_boot_id(p->boot_id));
    if (fstat(b->fd, &st) < 0 || getrandom(&p->run_id, sizeof p->run_id, 0) < 0)
        return LG_FAIL(LG_ERR_IO, "fstat or getrandom: %s", strerror(errno));
    p->version = LG_LAYOUT_VERSION;
    p->layout_hash = lg_layout_hash();
    p->bytes = sizeof *b->s;
    p->plan_hash = plan_hash;
    p->inode = st.st_ino;
    return 0;
}

static int describe(lg_board *b, const struct lg_board_spec *spec)
{
    struct lg_board_shared *s = b->s;
    const lg_plan *p = spec->plan;
    LG_ASSERT(p->instances[LG_ROLE_trainer] >= 1 && p->sequence >= 1);
    LG_ASSERT(p->instances[LG_ROLE_trainer] <= LG_INSTANCES_MAX && p->batch > 0);
    LG_TRY(describe_preamble(b, p->hash));
    s->lineage = spec->lineage;
    LG_ASSERT(spec->n_data <= LG_DATA_PARTS_MAX);
    if (spec->n_data) memcpy(s->data.known, spec->data, sizeof *spec->data * (size_t)spec->n_data);
    s->data.n_known = (uint32_t)spec->n_data;
    s->data.may_change = spec->data_may_change;
    s->start_step = spec->start_step;
    s->max_steps = spec->max_steps;
    s->batch = (uint64_t)lg_plan_host_batch(p);
    s->hosts.count = LG_MAX(p->hosts, 1);
    s->hosts.host = p->host;
    s->hosts.comes = spec->comes;
    s->hosts.life = spec->life;
    s->checkpoint_every = spec->checkpoint_every;
    s->ranks = p->instances[LG_ROLE_trainer];
    s->sequence = p->sequence;
    s->scatters = p->scatters;
    s->has_ema = p->instances[LG_ROLE_ema] > 0;
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        atomic_store_explicit(&s->wanted[r], (uint32_t)p->instances[r], memory_order_relaxed);
    for (int i = 0; i < LG_TURNS_MAX; i++) LG_TRY(lg_turn_create(&s->turn[i]));
    /* A process that the lgsup of an earlier board started, and that comes only now, must not carry
     * an incarnation of this one: so boards begin their numbers at different places. */
    atomic_store(&s->next_counter, 1 + (uint32_t)(s->preamble.run_id % COUNTER_START_MAX));
    s->preamble.magic = LG_BOARD_MAGIC;
    return 0;
}

/* Durable before anybody starts: zeros after a loss of power would tell neither boot nor run. */
static int make_durable(const lg_board *b, const char *path)
{
    if (fsync(b->fd) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "fsync of the board %s: %s", path,
                       strerror(errno));
    return 0;
}

/* Made beside the path and renamed: whoever still maps a former board keeps that one whole. */
int lg_board_create(const char *path, const struct lg_board_spec *spec, lg_board **ret)
{
    char tmp[LG_PATH_BYTES];
    LG_TRY(lg_path(tmp, "%s.tmp.%d", path, (int)getpid()));
    int fd = open(tmp, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot create the board %s: %s", tmp,
                       strerror(errno));
    lg_board *b = NULL;
    int rc = 0, e = posix_fallocate(fd, 0, sizeof(struct lg_board_shared));
    if (e) {
        close(fd);
        rc = LG_FAIL(lg_err_from_errno(e), "cannot allocate %zu bytes for the board %s: %s",
                     sizeof(struct lg_board_shared), tmp, strerror(e));
        goto fail;
    }
    LG_TRY_GOTO(rc, map_board(fd, &b), fail);
    LG_TRY_GOTO(rc, describe(b, spec), fail);
    LG_TRY_GOTO(rc, make_durable(b, tmp), fail);
    if (rename(tmp, path) < 0) {
        rc = LG_FAIL(lg_err_from_errno(errno), "cannot rename %s to %s: %s", tmp, path,
                     strerror(errno));
        goto fail;
    }
    *ret = b;
    return 0;
fail:
    lg_board_close(&b);
    unlink(tmp);
    return rc;
}

/* Numbers that bound loops and divide: a damaged file must not lead astray. */
static int check_content(const char *path, const struct lg_board_shared *s, uint64_t plan_hash)
{
    if (s->ranks < 1 || s->ranks > LG_INSTANCES_MAX || s->batch == 0)
        return LG_FAIL(LG_ERR_CORRUPT, "%s is a damaged board: %d ranks, %llu samples a step", path,
                       s->ranks, (unsigned long long)s->batch);
    if (s->hosts.count < 1 || s->hosts.count > LG_HOSTS_MAX || s->hosts.host < 0 ||
        s->hosts.host >= s->hosts.count)
        return LG_FAIL(LG_ERR_CORRUPT, "%s is a damaged board: host %d of %d", path, s->hosts.host,
                       s->hosts.count);
    if (plan_hash && s->preamble.plan_hash != plan_hash)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s belongs to plan %016llx, this process has plan %016llx: the "
                       "configuration was changed while the run lives",
                       path, (unsigned long long)s->preamble.plan_hash,
                       (unsigned long long)plan_hash);
    return 0;
}

int lg_board_open(const char *path, uint64_t plan_hash, lg_board **ret)
{
    struct lg_board_preamble preamble;
    lg_board *b = NULL;
    int rc;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open the board %s: %s", path,
                       strerror(errno));
    if (lg_board_look_fd(path, fd, &preamble, &rc) != LG_BOARD_FITS) {
        close(fd);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    LG_TRY(map_board(fd, &b));
    rc = check_content(path, b->s, plan_hash);
    if (rc < 0) {
        lg_board_close(&b);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = b;
    return 0;
}

void lg_board_close(lg_board **b)
{
    if (!*b) return;
    if ((*b)->s) munmap((*b)->s, sizeof *(*b)->s);
    if ((*b)->fd >= 0) close((*b)->fd);
    free(*b);
    *b = NULL;
}

static struct lg_board_row *row_of(lg_board *b, lg_incarnation i)
{
    return &b->s->row[lg_incarnation_row(i)];
}

/* Start time last: without it a pid says nothing. */
static void name_process(struct lg_board_row *row, int pid, uint64_t start_time)
{
    atomic_store_explicit(&row->start_time, 0, memory_order_release);
    atomic_store_explicit(&row->pid, (uint32_t)pid, memory_order_release);
    atomic_store_explicit(&row->start_time, start_time, memory_order_release);
}

/* pid 0: it is named later. */
static lg_incarnation enlist(lg_board *b, lg_role role, int index, bool standby, int pid,
                             uint64_t start_time)
{
    LG_ASSERT((int)role >= 0 && (int)role < LG_ROLES_MAX);
    LG_ASSERT(index >= 0 && index < LG_INSTANCES_MAX);
    struct lg_board_row *row = lg_board_row(b, role, index);
    lg_life state;
    lg_board_life(b, role, index, &state);
    LG_ASSERT(state == LG_LIFE_NONE || state == LG_LIFE_DEAD);
    uint32_t counter = atomic_fetch_add(&b->s->next_counter, 1);
    LG_ASSERT(counter > 0 && counter < COUNTER_MAX);
    lg_incarnation i = counter * LG_ROWS + (uint32_t)lg_row((int)role, index);
    name_process(row, pid, start_time);
    atomic_store_explicit(&row->standby, standby ? i : 0, memory_order_relaxed);
    atomic_store_explicit(&row->takes, 0, memory_order_relaxed);
    lg_board_beat(row, LG_PHASE_SETUP);
    /* Release: whoever sees the new incarnation does not see the former's start time, and what it is for. */
    atomic_store_explicit(&row->life, life_of(0, i, LG_LIFE_STARTING), memory_order_release);
    return i;
}

lg_incarnation lg_board_enlist(lg_board *b, lg_role role, int index)
{
    return enlist(b, role, index, false, 0, 0);
}

lg_incarnation lg_board_enlist_standby(lg_board *b, lg_role role, int index)
{
    return enlist(b, role, index, true, 0, 0);
}

lg_incarnation lg_board_enlist_self(lg_board *b, lg_role role, int index)
{
    uint64_t start_time = lg_process_start_time(getpid());
    return start_time ? enlist(b, role, index, false, getpid(), start_time) : 0;
}

void lg_board_enter(lg_board *b, lg_incarnation who, int pid, uint64_t start_time)
{
    LG_ASSERT(pid > 0 && start_time);
    name_process(row_of(b, who), pid, start_time);
}

int lg_board_join(lg_board *b, lg_incarnation me)
{
    struct lg_board_row *row = row_of(b, me);
    uint64_t pid = (uint64_t)getpid(), start = lg_process_start_time(getpid());
    uint64_t expected = life_of(0, me, LG_LIFE_STARTING);
    lg_board_hold(b->fd); /* before the row says so; a process that is not wanted ends at once */
    if (!atomic_compare_exchange_strong_explicit(&row->life, &expected,
                                                 life_of(pid, me, LG_LIFE_RUNNING),
                                                 memory_order_acq_rel, memory_order_acquire))
        return LG_FAIL(LG_ERR_MISMATCH,
                       "incarnation %u is not wanted: its row carries %u in state %d", me,
                       life_incarnation(expected), (int)life_state(expected));
    atomic_store_explicit(&row->pid, (uint32_t)pid, memory_order_relaxed);
    if (start) atomic_store_explicit(&row->start_time, start, memory_order_release);
    return 0;
}

void lg_board_bury(lg_board *b, lg_incarnation who)
{
    _Atomic(uint64_t) *life = &row_of(b, who)->life;
    uint64_t old = atomic_load_explicit(life, memory_order_acquire);
    while (life_incarnation(old) == who && life_state(old) != LG_LIFE_DEAD) {
        /* Release: what the dead one stored was seen by lgsup when its pidfd fired. */
        if (atomic_compare_exchange_weak_explicit(life, &old, life_of(0, who, LG_LIFE_DEAD),
                                                  memory_order_acq_rel, memory_order_acquire))
            return;
    }
}

void lg_board_retract(lg_board *b, lg_incarnation me)
{
    name_process(row_of(b, me), 0, 0);
    lg_board_bury(b, me);
}

void lg_board_vacate(lg_board *b, lg_incarnation who)
{
    struct lg_board_row *row = row_of(b, who);
    uint64_t old = atomic_load_explicit(&row->life, memory_order_acquire);
    if (life_incarnation(old) != who) return;
    /* Before the life word: once that is empty the row may be given to another. */
    atomic_store_explicit(&row->pid, 0, memory_order_relaxed);
    atomic_store_explicit(&row->start_time, 0, memory_order_relaxed);
    while (life_incarnation(old) == who)
        if (atomic_compare_exchange_weak_explicit(&row->life, &old, life_of(0, 0, LG_LIFE_NONE),
                                                  memory_order_acq_rel, memory_order_acquire))
            return;
}

lg_incarnation lg_board_life(lg_board *b, lg_role role, int index, lg_life *ret_state)
{
    uint64_t life = atomic_load_explicit(&lg_board_row(b, role, index)->life, memory_order_acquire);
    if (ret_state) *ret_state = life_state(life);
    return life_incarnation(life);
}

uint64_t lg_process_start_time(int pid)
{
    char path[64], text[STAT_BYTES];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    /* Field 2 is the command in parentheses and may hold anything; field 3 follows the last one. */
    char *at = strrchr(text, ')');
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

enum { PROCESS_DEAD = -1, PROCESS_UNKNOWN = -2 };

/* A pidfd of the process that has this pid and start time (0: any); or one of the above.
 *
 * Order matters: the pidfd first, then the start time, then a look whether the pidfd still shows a
 * living process. If it does, the start time was that of the pidfd's process. */
static int open_process(int pid, uint64_t start_time)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0) return errno == ESRCH ? PROCESS_DEAD : PROCESS_UNKNOWN;
    uint64_t start = lg_process_start_time(pid);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    bool dead = poll(&p, 1, 0) == 1 && (p.revents & POLLIN);
    if (start_time && start && start != start_time) dead = true;
    if (!dead) return fd;
    close(fd);
    return PROCESS_DEAD;
}

bool lg_board_is_dead(lg_board *b, lg_incarnation who)
{
    struct lg_board_row *row = row_of(b, who);
    uint64_t life = atomic_load_explicit(&row->life, memory_order_acquire);
    if (life_incarnation(life) != who || life_state(life) == LG_LIFE_DEAD) return true;
    int pid = (int)(life >> PID_SHIFT);
    if (life_state(life) != LG_LIFE_RUNNING || pid == 0) return false;
    int fd = open_process(pid, atomic_load_explicit(&row->start_time, memory_order_acquire));
    if (fd >= 0) close(fd);
    return fd == PROCESS_DEAD;
}

int lg_board_pidfd(lg_board *b, lg_role role, int index)
{
    struct lg_board_row *row = lg_board_row(b, role, index);
    uint64_t life = atomic_load_explicit(&row->life, memory_order_acquire);
    uint64_t start_time = atomic_load_explicit(&row->start_time, memory_order_acquire);
    int pid = (int)(life >> PID_SHIFT);
    if (life_state(life) == LG_LIFE_STARTING && start_time)
        pid = (int)atomic_load_explicit(&row->pid, memory_order_acquire);
    else if (life_state(life) != LG_LIFE_RUNNING)
        pid = 0;
    if (pid == 0) return -1;
    int fd = open_process(pid, start_time);
    return fd == PROCESS_UNKNOWN ? LG_ERR_BUSY : fd;
}

lg_mark lg_board_global_commit(lg_board *b)
{
    lg_mark least = UINT64_MAX;
    for (int r = 0; r < b->s->ranks; r++) {
        lg_mark m = atomic_load_explicit(&lg_board_row(b, LG_ROLE_trainer, r)->commit,
                                         memory_order_acquire);
        least = LG_MIN(least, m);
    }
    return least;
}

void lg_board_beat(struct lg_board_row *row, lg_phase phase)
{
    atomic_store_explicit(&row->phase, (uint32_t)phase, memory_order_relaxed);
    atomic_store_explicit(&row->heartbeat_ns, lg_now_ns(), memory_order_relaxed);
}

void lg_board_beat_on(struct lg_board_row *row)
{
    atomic_store_explicit(&row->heartbeat_ns, lg_now_ns(), memory_order_relaxed);
}
