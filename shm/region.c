/* Regions: sealed, fully allocated memfds that the keeper holds too, and their payloads on GPUs.
 *
 * Order of creation: allocate, write the head, seal, map, deposit. Whoever gets the fd from the
 * keeper finds a finished head, and a creator that dies before the deposit leaves nothing.
 *
 * fallocate() takes real pages, so that no later store can fail (SIGBUS) or be killed for memory.
 * The kernel refuses only what is absurd and would rather start killing, so the room is looked up
 * before: what the machine and the control groups have available.
 */
#include "shm/region.h"
#include "base/cgroup.h"
#include "base/heartbeat.h"
#include "base/room.h"
#include "shm/keeper.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define REGION_MAGIC UINT64_C(0x6e6f69676572676c) /* "lgregion" */
enum { TAKE_BYTES = 256 << 20, OPEN_TRIES_MAX = 8, LOST_WAIT_MS = 10, LOST_TRIES_MAX = 2000 };
enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };
static_assert(sizeof(struct lg_region_head) <= LG_PAGE_BYTES, "the head fits its page");

static size_t pages_of(size_t bytes)
{
    return (bytes + LG_PAGE_BYTES - 1) / LG_PAGE_BYTES * LG_PAGE_BYTES;
}

static const char *place_of(const struct lg_region_spec *s)
{
    return s->place ? s->place->name : "";
}

static bool is_remote(const struct lg_region_spec *s)
{
    return place_of(s)[0] != 0;
}

/* Of the memfd. */
static size_t total_bytes(const struct lg_region_spec *s)
{
    return LG_PAGE_BYTES + pages_of(s->front_bytes) + (is_remote(s) ? 0 : pages_of(s->bytes));
}

/* What /proc/meminfo calls available; UINT64_MAX when it does not say. */
static uint64_t available_bytes(void)
{
    static const char key[] = "MemAvailable:";
    char text[4096], *end;
    int fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return UINT64_MAX;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return UINT64_MAX;
    text[n] = 0;
    const char *at = strstr(text, key);
    if (!at) return UINT64_MAX;
    at += sizeof key - 1;
    uint64_t kib = strtoull(at, &end, 10);
    return end == at ? UINT64_MAX : kib * 1024;
}

static uint64_t room_bytes(void)
{
    uint64_t room = available_bytes();
    char group[LG_PATH_BYTES];
    struct lg_cgroup_limit limit;
    lg_cgroup_self(group);
    lg_cgroup_limit(group, &limit);
    return LG_MIN(room, limit.free_bytes);
}

static int no_space(const struct lg_region_spec *spec, const char *why)
{
    return LG_FAIL(LG_ERR_NOSPACE,
                   "cannot allocate %zu bytes of memory for region %s: %s; %llu bytes are "
                   "available. Make the run smaller or the machine larger (`lgsup check` lists "
                   "the bytes)",
                   spec->bytes, spec->name, why, (unsigned long long)room_bytes());
}

static int check_name(const char *name)
{
    size_t n = strlen(name);
    if (n == 0 || n >= LG_REGION_NAME_BYTES - 1) /* room for the @ */
        return LG_FAIL(LG_ERR_CONFIG, "a region's name has 1 to %d bytes: \"%.80s\"",
                       LG_REGION_NAME_BYTES - 2, name);
    return 0;
}

/* Maps the whole fd, which the region owns from now on (also on failure). */
static int map_region(int fd, const struct lg_region_spec *spec, lg_region **ret)
{
    lg_region *r = calloc(1, sizeof *r);
    if (!r) {
        close(fd);
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for the handle of region %s", spec->name);
    }
    r->fd = fd;
    r->payload_fd = -1;
    r->bytes = spec->bytes;
    r->front_bytes = spec->front_bytes;
    snprintf(r->name, sizeof r->name, "%s", spec->name);
    if (spec->place) r->place = *spec->place;
    uint8_t *at = mmap(NULL, total_bytes(spec), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        int e = errno;
        lg_region_close(&r);
        return LG_FAIL(lg_err_from_errno(e), "cannot map the %zu bytes of region %s: %s",
                       total_bytes(spec), spec->name, strerror(e));
    }
    r->head = (struct lg_region_head *)at;
    if (spec->front_bytes) r->front = at + LG_PAGE_BYTES;
    if (!is_remote(spec)) r->payload = at + LG_PAGE_BYTES + pages_of(spec->front_bytes);
    *ret = r;
    return 0;
}

/* Piece by piece: the kernel clears each page. -1 with errno. */
static int take_pages(int fd, off_t bytes)
{
    for (off_t at = 0; at < bytes;) {
        off_t n = LG_MIN(bytes - at, (off_t)TAKE_BYTES);
        if (fallocate(fd, 0, at, n) == 0) {
            at += n;
            lg_heartbeat();
        } else if (errno != EINTR) {
            return -1;
        }
    }
    return 0;
}

static int allocate(const struct lg_region_spec *spec, int *ret_fd)
{
    if (spec->bytes > SIZE_MAX / 4 || spec->front_bytes > SIZE_MAX / 4 ||
        total_bytes(spec) > room_bytes())
        return no_space(spec, "that is more than there is");
    int fd = memfd_create(spec->name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "memfd_create for region %s: %s", spec->name,
                       strerror(errno));
    if (take_pages(fd, (off_t)total_bytes(spec)) < 0) {
        int e = errno;
        close(fd);
        if (lg_err_from_errno(e) == LG_ERR_NOSPACE) return no_space(spec, strerror(e));
        return LG_FAIL(LG_ERR_IO, "fallocate of %zu bytes for region %s: %s", spec->bytes,
                       spec->name, strerror(e));
    }
    *ret_fd = fd;
    return 0;
}

static int create(const struct lg_region_spec *spec, lg_region **ret)
{
    int fd = -1;
    lg_region *r;
    LG_TRY(allocate(spec, &fd));
    LG_TRY(map_region(fd, spec, &r));
    struct lg_region_head *h = r->head;
    h->version = LG_LAYOUT_VERSION;
    h->layout_hash = lg_layout_hash();
    h->bytes = spec->bytes;
    h->front_bytes = spec->front_bytes;
    snprintf(h->place, sizeof h->place, "%s", place_of(spec));
    h->plan_hash = spec->plan_hash;
    h->run_id = spec->run_id;
    snprintf(h->name, sizeof h->name, "%s", spec->name);
    h->magic = REGION_MAGIC;
    if (fcntl(fd, F_ADD_SEALS, SEALS) < 0) {
        int e = errno;
        lg_region_close(&r);
        return LG_FAIL(LG_ERR_IO, "cannot seal the size of region %s: %s", spec->name, strerror(e));
    }
    *ret = r;
    return 0;
}

/* An fd that came from the keeper is looked at before it is mapped, and its head before it is used:
 * without the seals a store could meet a hole. */
static int check_fd(const struct lg_region_spec *spec, int fd)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &st) < 0 || seals < 0 || (seals & SEALS) != SEALS)
        return LG_FAIL(LG_ERR_MISMATCH, "the keeper's fd for %s is not a sealed region",
                       spec->name);
    if ((uint64_t)st.st_size != total_bytes(spec))
        return LG_FAIL(LG_ERR_MISMATCH,
                       "region %s has %lld bytes, heads included, this process expects %zu for %zu "
                       "of payload: it belongs to another plan",
                       spec->name, (long long)st.st_size, total_bytes(spec), spec->bytes);
    return 0;
}

static int check_head(const struct lg_region_spec *spec, const struct lg_region_head *h)
{
    if (h->magic != REGION_MAGIC || h->version != LG_LAYOUT_VERSION)
        return LG_FAIL(LG_ERR_MISMATCH, "%s is not a region of layout version %d", spec->name,
                       LG_LAYOUT_VERSION);
    const char *differs = lg_layout_difference(h->layout_hash, lg_layout_hash());
    if (differs)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "region %s was made by another build: the layout of %s differs", spec->name,
                       differs);
    if (strncmp(h->name, spec->name, sizeof h->name) != 0)
        return LG_FAIL(LG_ERR_MISMATCH, "the keeper's fd for %s is region %.64s", spec->name,
                       h->name);
    if (h->bytes != spec->bytes)
        return LG_FAIL(LG_ERR_MISMATCH, "region %s has %llu bytes, this process expects %zu",
                       spec->name, (unsigned long long)h->bytes, spec->bytes);
    if (h->front_bytes != spec->front_bytes ||
        strncmp(h->place, place_of(spec), sizeof h->place) != 0)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "region %s lies on %.15s with a front of %llu bytes, this process expects "
                       "%s with %zu",
                       spec->name, h->place[0] ? h->place : "host",
                       (unsigned long long)h->front_bytes,
                       is_remote(spec) ? place_of(spec) : "host", spec->front_bytes);
    if (h->plan_hash != spec->plan_hash)
        return LG_FAIL(
            LG_ERR_MISMATCH, "region %s belongs to plan %016llx, this process has plan %016llx",
            spec->name, (unsigned long long)h->plan_hash, (unsigned long long)spec->plan_hash);
    if (h->run_id != spec->run_id)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "region %s belongs to another start of the run: stop its keeper first",
                       spec->name);
    return 0;
}

static int adopt(const struct lg_region_spec *spec, int fd, lg_region **ret)
{
    int rc = check_fd(spec, fd);
    if (rc < 0) {
        close(fd);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    lg_region *r;
    LG_TRY(map_region(fd, spec, &r));
    LG_TRY_GOTO(rc, check_head(spec, r->head), fail);
    *ret = r;
    return 0;
fail:
    lg_region_close(&r);
    return rc;
}

/* Get, else create and put; who loses the put gets the winner's. More rounds are needed only when
 * somebody drops the name in between. */
static int open_host_part(const struct lg_region_spec *spec, lg_region **ret, bool *ret_stored)
{
    int no_room = 0;
    for (int i = 0; i < OPEN_TRIES_MAX + no_room; i++) {
        int fd;
        uint64_t bytes;
        int rc = lg_keeper_get(spec->keeper, spec->name, &bytes, &fd);
        *ret_stored = rc == LG_KEEPER_STORED;
        if (rc >= 0) {
            LG_TRY(adopt(spec, fd, ret));
            return 0;
        }
        if (rc != LG_ERR_NOTFOUND) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
        if (spec->is_made)
            return LG_FAIL(LG_ERR_NOTFOUND, "region %s is lost: the keeper does not have it",
                           spec->name);
        lg_region *r;
        rc = create(spec, &r);
        if (lg_room_may_come(rc, &no_room)) continue; /* perhaps somebody else's is there now */
        LG_TRY(rc);
        rc = lg_keeper_put(spec->keeper, spec->name, spec->bytes, r->fd);
        if (rc >= 0) {
            *ret_stored = rc == LG_KEEPER_STORED;
            lg_err_clear();
            *ret = r;
            return 0;
        }
        lg_region_close(&r);
        if (rc != LG_ERR_BUSY) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    return LG_FAIL(LG_ERR_BUSY, "region %s is created and dropped again and again", spec->name);
}

/* ---- copies ---- */

static void note_copy(struct lg_region_head *h)
{
    atomic_store_explicit(&h->copied, 1, memory_order_release);
}

bool lg_region_is_copied(const lg_region *r)
{
    return atomic_load_explicit(&r->head->copied, memory_order_acquire) != 0;
}

int lg_region_note_copy(int fd, bool payload)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return LG_FAIL(LG_ERR_IO, "cannot look at a region: %s", strerror(errno));
    if (st.st_size < LG_PAGE_BYTES) return 0; /* a payload */
    struct lg_region_head *h = mmap(NULL, LG_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (h == MAP_FAILED)
        return LG_FAIL(lg_err_from_errno(errno), "cannot map the head of a region: %s",
                       strerror(errno));
    int rc = 0;
    if (h->magic == REGION_MAGIC && h->version == LG_LAYOUT_VERSION) {
        if (h->place[0] && !payload)
            rc = LG_ERR_BUSY;
        else
            note_copy(h);
    }
    munmap(h, LG_PAGE_BYTES);
    return rc;
}

static void payload_name(const char *name, char ret[LG_REGION_NAME_BYTES])
{
    snprintf(ret, LG_REGION_NAME_BYTES, "%.*s@", LG_REGION_NAME_BYTES - 2, name);
}

/* The fd of the payload on a GPU: from the keeper, else made and deposited. See `made` in region.h
 * for why it is made at most once in the life of a region. */
static int payload_fd(const char *keeper, lg_region *r, int *ret_fd, bool *ret_stored)
{
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int rc = LG_ERR_NOTFOUND, no_room = 0;
    payload_name(r->name, name);
    for (int i = 0; i < LOST_TRIES_MAX; i++) {
        rc = lg_keeper_get(keeper, name, &bytes, ret_fd);
        if (rc >= 0) break;
        if (rc != LG_ERR_NOTFOUND) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
        lg_err_clear();
        if (atomic_load_explicit(&r->head->made, memory_order_acquire)) {
            nanosleep(&(struct timespec){0, LOST_WAIT_MS * 1000000L}, NULL);
            continue;
        }
        rc = r->place.create(&r->place, r->bytes, ret_fd);
        if (lg_room_may_come(rc, &no_room)) continue; /* perhaps somebody else's is there now */
        LG_TRY(rc);
        rc = lg_keeper_put(keeper, name, r->bytes, *ret_fd);
        if (rc >= 0) break;
        close(*ret_fd);
        *ret_fd = -1;
        if (rc != LG_ERR_BUSY) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
        lg_err_clear(); /* somebody else was quicker */
    }
    if (*ret_fd < 0)
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "region %s is lost: the keeper does not have its memory on %s, and no "
                       "process that maps it gave it back",
                       r->name, r->place.name);
    *ret_stored = rc == LG_KEEPER_STORED;
    atomic_store_explicit(&r->head->made, 1, memory_order_release);
    return 0;
}

static int map_payload(const char *keeper, lg_region *r, bool *ret_stored)
{
    const struct lg_region_place *p = &r->place;
    if (!p->name[0] && p->map_host) LG_TRY(p->map_host(p, r->payload, r->bytes, &r->payload));
    if (!p->name[0] || !p->map) return 0;
    LG_TRY(payload_fd(keeper, r, &r->payload_fd, ret_stored));
    LG_TRY(p->map(p, r->payload_fd, r->bytes, &r->payload));
    return 0;
}

int lg_region_open(const struct lg_region_spec *spec, lg_region **ret)
{
    lg_region *r = NULL;
    bool head_stored = false, payload_stored = !is_remote(spec);
    int rc;
    LG_TRY(check_name(spec->name));
    LG_TRY(open_host_part(spec, &r, &head_stored));
    LG_TRY_GOTO(rc, map_payload(spec->keeper, r, &payload_stored), fail);
    if (head_stored && payload_stored) note_copy(r->head);
    *ret = r;
    return 0;
fail:
    lg_region_close(&r);
    return rc;
}

void lg_region_close(lg_region **r)
{
    if (!*r) return;
    struct lg_region_spec spec = {
        .bytes = (*r)->bytes, .front_bytes = (*r)->front_bytes, .place = &(*r)->place};
    if (is_remote(&spec) && (*r)->payload)
        (*r)->place.unmap(&(*r)->place, (*r)->payload, (*r)->bytes);
    if ((*r)->head) munmap((*r)->head, total_bytes(&spec));
    if ((*r)->fd >= 0) close((*r)->fd);
    if ((*r)->payload_fd >= 0) close((*r)->payload_fd);
    free(*r);
    *r = NULL;
}

/* Puts fd under the name; what is there already must be the same memory. LG_KEEPER_STORED or 0. */
static int deposit(const char *keeper, const char *name, size_t size, int mine_fd)
{
    int rc = lg_keeper_put(keeper, name, size, mine_fd);
    if (rc != LG_ERR_BUSY) {
        LG_TRY(rc);
        return rc;
    }
    lg_err_clear();
    int fd;
    uint64_t bytes;
    LG_TRY(rc = lg_keeper_get(keeper, name, &bytes, &fd));
    struct stat mine, theirs;
    bool same = fstat(mine_fd, &mine) == 0 && fstat(fd, &theirs) == 0 &&
                mine.st_dev == theirs.st_dev && mine.st_ino == theirs.st_ino;
    close(fd);
    if (!same)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "the keeper holds other memory under the name %s: it was opened there "
                       "before this process could deposit it again",
                       name);
    return rc;
}

int lg_region_deposit(const char *keeper, const lg_region *r)
{
    char name[LG_REGION_NAME_BYTES];
    /* The payload first: whoever finds the head finds the rest. */
    payload_name(r->name, name);
    int payload = r->place.name[0] ? 0 : LG_KEEPER_STORED, head;
    if (r->payload_fd >= 0) LG_TRY(payload = deposit(keeper, name, r->bytes, r->payload_fd));
    LG_TRY(head = deposit(keeper, r->name, r->bytes, r->fd));
    if (payload == LG_KEEPER_STORED && head == LG_KEEPER_STORED) note_copy(r->head);
    return 0;
}

int lg_region_fill_begin(lg_region *r, lg_board *board, lg_incarnation me)
{
    struct lg_region_head *h = r->head;
    LG_ASSERT(me != 0);
    if (atomic_load_explicit(&h->filled, memory_order_acquire)) return 0;
    uint32_t old = atomic_load_explicit(&h->filler, memory_order_acquire);
    if (old == me) return 1;
    if (old && !lg_board_is_dead(board, old)) return LG_ERR_BUSY;
    if (!atomic_compare_exchange_strong_explicit(&h->filler, &old, me, memory_order_acq_rel,
                                                 memory_order_acquire))
        return LG_ERR_BUSY;
    /* The former filler may have finished before it died. */
    return atomic_load_explicit(&h->filled, memory_order_acquire) ? 0 : 1;
}

void lg_region_fill_end(lg_region *r)
{
    LG_ASSERT(!atomic_load_explicit(&r->head->filled, memory_order_relaxed));
    __sync_synchronize();
    atomic_store_explicit(&r->head->filled, 1, memory_order_release);
}
