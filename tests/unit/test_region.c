/* Regions: created once, checked when attached, filled once, deposited again. */
#include "base/clock.h"
#include "base/room.h"
#include "shm/keeper.h"
#include "shm/region.h"
#include "shm/window.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct shm_fixture f;
static struct lg_region_spec spec;

static int setup(void **state)
{
    shm_fixture_open(&f, 1);
    shm_fixture_start_keeper(&f);
    spec = (struct lg_region_spec){.keeper = f.keeper,
                                   .name = "trainer/0/master/0",
                                   .bytes = 10000,
                                   .plan_hash = 7,
                                   .run_id = f.board->s->preamble.run_id};
    return 0;
}

static const char *g_told; /* folder that stands for /proc and the control group's; NULL: these */

static int teardown(void **state)
{
    g_told = NULL;
    shm_fixture_close(&f);
    lg_err_clear();
    return 0;
}

static void test_same_memory(void **state)
{
    lg_region *a, *b;
    assert_int_equal(lg_region_open(&spec, &a), 0);
    assert_int_equal((uintptr_t)a->payload % LG_PAGE_BYTES, 0);
    uint8_t *bytes = a->payload;
    for (size_t i = 0; i < spec.bytes; i++) assert_int_equal(bytes[i], 0);
    memset(a->payload, 0x5a, spec.bytes);
    assert_int_equal(lg_region_open(&spec, &b), 0);
    assert_ptr_not_equal(a->payload, b->payload);
    assert_memory_equal(a->payload, b->payload, spec.bytes);
    lg_region_close(&a);
    lg_region_close(&b);
    assert_null(a);
    assert_int_equal(lg_region_open(&spec, &a), 0); /* nobody had it mapped in between */
    assert_int_equal(((uint8_t *)a->payload)[9999], 0x5a);
    assert_true(fcntl(a->fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(ftruncate(a->fd, 4096), -1);
    assert_int_equal(ftruncate(a->fd, 1 << 20), -1);
    lg_region_close(&a);
    lg_region_close(&a);
}

static void assert_refused(const struct lg_region_spec *s, int code, const char *says)
{
    lg_region *r = NULL;
    assert_int_equal(lg_region_open(s, &r), code);
    assert_null(r);
    if (!strstr(lg_err_message(), says)) fail_msg("no \"%s\" in: %s", says, lg_err_message());
}

static void test_refusals(void **state)
{
    lg_region *r;
    assert_int_equal(lg_region_open(&spec, &r), 0);
    struct lg_region_spec other = spec;
    other.bytes = 20000;
    assert_refused(&other, LG_ERR_MISMATCH, "20000");
    other.bytes = 10001; /* the same number of pages */
    assert_refused(&other, LG_ERR_MISMATCH, "10001");
    other = spec;
    other.plan_hash = 8;
    assert_refused(&other, LG_ERR_MISMATCH, "plan");
    other = spec;
    other.run_id ^= 1;
    assert_refused(&other, LG_ERR_MISMATCH, "another start");
    r->head->layout_hash ^= UINT64_C(1) << 32;
    assert_refused(&spec, LG_ERR_MISMATCH, "lg_slot");
    lg_region_close(&r);
    other = spec;
    other.name = "x/0/too-large";
    other.bytes = (size_t)1 << 50;
    assert_refused(&other, LG_ERR_NOSPACE, "1125899906842624 bytes");
    other.name = "";
    assert_refused(&other, LG_ERR_CONFIG, "name");
    int fd = memfd_create("plain", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, 16384), 0);
    assert_int_equal(lg_keeper_put(f.keeper, "x/0/plain", 10000, fd), 0);
    close(fd);
    other = spec;
    other.name = "x/0/plain";
    assert_refused(&other, LG_ERR_MISMATCH, "sealed");
}

/* Many processes open the same new region at once: all must see one memory. */
static void test_put_if_absent(void **state)
{
    enum { CHILDREN = 8, ROUNDS = 10 };
    for (int round = 0; round < ROUNDS; round++) {
        char name[32];
        snprintf(name, sizeof name, "race/%d/x", round);
        spec.name = name;
        int go[2];
        assert_int_equal(pipe(go), 0);
        pid_t child[CHILDREN];
        for (int i = 0; i < CHILDREN; i++) {
            child[i] = fork();
            if (child[i]) continue;
            char byte;
            lg_region *r;
            close(go[1]);
            if (read(go[0], &byte, 1) != 0) scratch_exit(2);
            if (lg_region_open(&spec, &r) < 0) scratch_exit(3);
            atomic_fetch_add((_Atomic(uint64_t) *)r->payload, 1);
            scratch_exit(0);
        }
        close(go[0]);
        close(go[1]); /* all start */
        for (int i = 0; i < CHILDREN; i++) {
            int status;
            waitpid(child[i], &status, 0);
            assert_int_equal(status, 0);
        }
        lg_region *r;
        assert_int_equal(lg_region_open(&spec, &r), 0);
        assert_int_equal(*(uint64_t *)r->payload, CHILDREN);
        lg_region_close(&r);
    }
}

static void test_new_keeper(void **state)
{
    lg_region *a, *b;
    assert_int_equal(lg_region_open(&spec, &a), 0);
    strcpy(a->payload, "kept");
    assert_int_equal(lg_region_deposit(f.keeper, a), 0); /* it is there already */
    shm_fixture_kill_keeper(&f);
    assert_int_equal(lg_region_deposit(f.keeper, a), LG_ERR_IO);
    shm_fixture_start_keeper(&f);
    assert_int_equal(lg_region_deposit(f.keeper, a), 0);
    assert_int_equal(lg_region_deposit(f.keeper, a), 0);
    assert_int_equal(lg_region_open(&spec, &b), 0);
    assert_string_equal(b->payload, "kept");
    lg_region_close(&b);
    shm_fixture_kill_keeper(&f);
    shm_fixture_start_keeper(&f);
    assert_int_equal(lg_region_open(&spec, &b), 0); /* somebody was too quick: other memory */
    assert_int_equal(lg_region_deposit(f.keeper, a), LG_ERR_MISMATCH);
    lg_region_close(&a);
    lg_region_close(&b);
}

/* A "GPU" whose memory is a memfd and whose mappings are counted. */
static int made, mapped;

static int fake_create(const struct lg_region_place *p, size_t bytes, int *ret_fd)
{
    int fd = memfd_create(p->name, MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    made++;
    *ret_fd = fd;
    return 0;
}

static int fake_map(const struct lg_region_place *p, int fd, size_t bytes, void **ret)
{
    assert_ptr_equal(p->device, &made);
    *ret = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(*ret != MAP_FAILED);
    mapped++;
    return 0;
}

static void fake_unmap(const struct lg_region_place *p, void *at, size_t bytes)
{
    assert_int_equal(munmap(at, bytes), 0);
    mapped--;
}

static const struct lg_region_place fake = {
    .name = "cuda:3", .device = &made, .create = fake_create, .map = fake_map, .unmap = fake_unmap};

static void test_device_payload(void **state)
{
    lg_region *a, *b;
    made = mapped = 0;
    spec.place = &fake;
    spec.front_bytes = 100;
    assert_int_equal(lg_region_open(&spec, &a), 0);
    assert_int_equal(lg_region_open(&spec, &b), 0);
    assert_int_equal(made, 1);
    assert_int_equal(mapped, 2);
    strcpy(a->payload, "on the device");
    strcpy(a->front, "in front");
    assert_string_equal(b->payload, "on the device");
    assert_string_equal(b->front, "in front");
    lg_region_close(&b);
    assert_int_equal(mapped, 1);
    /* Another place or front is another region. */
    struct lg_region_spec other = spec;
    other.front_bytes = 0;
    assert_int_equal(lg_region_open(&other, &b), LG_ERR_MISMATCH);
    struct lg_region_place elsewhere = fake;
    strcpy(elsewhere.name, "cuda:1");
    other = spec;
    other.place = &elsewhere;
    assert_int_equal(lg_region_open(&other, &b), LG_ERR_MISMATCH);
    assert_non_null(strstr(lg_err_message(), "lies on cuda:3"));
    lg_region_close(&a);
}

/* Another process has made it at the same time, and there is no room for two: its deposit comes, or its memory goes. */
static int without_room, rival_at;
static int crowded_create(const struct lg_region_place *p, size_t bytes, int *ret_fd)
{
    int rival;
    if (!without_room) return fake_create(p, bytes, ret_fd);
    if (without_room-- == rival_at) {
        assert_int_equal(fake_create(p, bytes, &rival), 0);
        assert_true(lg_keeper_put(f.keeper, "trainer/0/master/0@", bytes, rival) >= 0);
        close(rival);
    }
    return LG_FAIL(LG_ERR_NOSPACE, "no room for a second one");
}

static void test_no_room_for_two(void **state)
{
    lg_region *a;
    struct lg_region_place crowded = fake;
    crowded.create = crowded_create;
    spec.place = &crowded;
    made = 0, without_room = 3, rival_at = 2;
    assert_int_equal(lg_region_open(&spec, &a), 0);
    assert_int_equal(made, 1); /* the rival's */
    assert_int_equal(without_room, 1);
    lg_region_close(&a);
}

static void test_room_that_comes(void **state)
{
    lg_region *a;
    struct lg_region_place crowded = fake;
    crowded.create = crowded_create;
    spec.place = &crowded;
    made = 0, without_room = 5, rival_at = 0;
    assert_int_equal(lg_region_open(&spec, &a), 0);
    assert_int_equal(made, 1);
    assert_int_equal(without_room, 0);
    lg_region_close(&a);
}

static void test_room_that_does_not_come(void **state)
{
    lg_region *a;
    struct lg_region_place crowded = fake;
    crowded.create = crowded_create;
    spec.place = &crowded;
    made = 0, without_room = 1000, rival_at = 0;
    assert_int_equal(lg_region_open(&spec, &a), LG_ERR_NOSPACE);
    assert_non_null(strstr(lg_err_message(), "no room for a second one"));
    assert_int_equal(made, 0);
}

/* A process that uses the front alone makes nothing on the GPU, and has no second copy to tell of. */
static void test_front_alone(void **state)
{
    lg_region *a, *b;
    struct lg_region_place front = fake;
    front.map = NULL;
    made = mapped = 0;
    spec.front_bytes = 100;
    spec.place = &front;
    assert_int_equal(lg_region_open(&spec, &a), 0);
    assert_null(a->payload);
    assert_int_equal(made, 0);
    strcpy(a->front, "in front");
    spec.place = &fake;
    assert_int_equal(lg_region_open(&spec, &b), 0);
    assert_int_equal(made, 1);
    assert_string_equal(b->front, "in front");
    assert_int_equal(lg_region_deposit(f.keeper, a), 0);
    assert_false(lg_region_is_copied(a));
    lg_region_close(&a);
    assert_int_equal(mapped, 1);
    lg_region_close(&b);
}

static int fake_map_host(const struct lg_region_place *p, void *host, size_t bytes, void **ret)
{
    assert_ptr_equal(p->device, &made);
    assert_int_equal(bytes, spec.bytes);
    *ret = (char *)host + 64; /* where this device sees it */
    mapped++;
    return 0;
}

/* Host memory that a device reaches is the region of those that need none. */
static void test_host_payload_of_a_device(void **state)
{
    lg_region *a, *b;
    const struct lg_region_place host = {.device = &made, .map_host = fake_map_host};
    made = mapped = 0;
    spec.place = &host;
    assert_int_equal(lg_region_open(&spec, &a), 0);
    spec.place = NULL;
    assert_int_equal(lg_region_open(&spec, &b), 0);
    assert_int_equal(made, 0);
    assert_int_equal(mapped, 1);
    strcpy((char *)a->payload - 64, "with the host");
    assert_string_equal(b->payload, "with the host");
    assert_int_equal(lg_region_deposit(f.keeper, a), 0);
    lg_region_close(&a);
    lg_region_close(&b);
}

/* A new keeper that knows the head but not yet the payload: nobody makes a second one. */
static void test_device_payload_is_never_made_twice(void **state)
{
    lg_region *a, *b;
    made = mapped = 0;
    spec.place = &fake;
    assert_int_equal(lg_region_open(&spec, &a), 0);
    strcpy(a->payload, "kept");
    assert_int_equal(lg_keeper_drop(f.keeper, "trainer/0/master/0@"), 0);
    pid_t child = fork();
    if (!child) {
        usleep(100000);
        scratch_exit(lg_region_deposit(f.keeper, a) == 0 ? 0 : 1);
    }
    assert_int_equal(lg_region_open(&spec, &b), 0);
    assert_string_equal(b->payload, "kept");
    assert_int_equal(made, 1);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    lg_region_close(&a);
    lg_region_close(&b);
}

/* Nobody has a second copy before lgsup says so, which takes both fds of a payload on a GPU. */
static void test_copies(void **state)
{
    lg_region *a, *b;
    assert_int_equal(lg_region_open(&spec, &a), 0);
    assert_false(lg_region_is_copied(a));
    assert_int_equal(lg_region_deposit(f.keeper, a), 0); /* a keeper without a store is one copy */
    assert_false(lg_region_is_copied(a));
    assert_int_equal(lg_region_note_copy(-1, false), LG_ERR_IO); /* not said, so asked again */
    lg_err_clear();
    assert_int_equal(lg_region_note_copy(a->fd, false), 0);
    assert_true(lg_region_is_copied(a));
    lg_region_close(&a);
    assert_int_equal(lg_region_open(&spec, &a), 0); /* it is the memory's own word */
    assert_true(lg_region_is_copied(a));
    lg_region_close(&a);
    spec.name = "trainer/0/master/1";
    spec.place = &fake;
    assert_int_equal(lg_region_open(&spec, &b), 0);
    assert_int_equal(lg_region_note_copy(b->fd, false), LG_ERR_BUSY);
    assert_string_equal(lg_err_message(), "");
    assert_false(lg_region_is_copied(b));
    assert_int_equal(lg_region_note_copy(b->fd, true), 0);
    assert_true(lg_region_is_copied(b));
    lg_region_close(&b);
    int plain = memfd_create("plain", MFD_CLOEXEC);
    assert_int_equal(lg_region_note_copy(plain, false), 0); /* nothing to say it in */
    assert_int_equal(ftruncate(plain, 8192), 0);
    assert_int_equal(lg_region_note_copy(plain, false), 0);
    char bytes[8192], zero[8192] = {0};
    assert_int_equal(pread(plain, bytes, sizeof bytes, 0), sizeof bytes);
    assert_memory_equal(bytes, zero, sizeof zero);
    close(plain);
}

/* What a mark speaks of is found or lost, and never made anew. */
static void test_lost(void **state)
{
    lg_region *r;
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    spec.is_made = true;
    assert_refused(&spec, LG_ERR_NOTFOUND, "is lost");
    assert_int_equal(lg_keeper_list(f.keeper, 0, name, &bytes), LG_ERR_NOTFOUND);
    spec.is_made = false;
    assert_int_equal(lg_region_open(&spec, &r), 0);
    lg_region_close(&r);
    spec.is_made = true;
    assert_int_equal(lg_region_open(&spec, &r), 0);
    lg_region_close(&r);
}

/* Payloads under control words that speak of them, whatever the board says. */
static void test_lost_window(void **state)
{
    struct lg_window_geometry g = {
        .slots = 8,
        .batch = 4,
        .ranks = 1,
        .chunk = {4, 4, 4, 4},
        .pixels_bytes = 64,
        .latent_bytes = 64,
        .text = {{.states_bytes = 64, .name = ".clip_l"}, {.pooled_bytes = 64, .name = ".t5"}}};
    struct lg_window_places places = {0};
    lg_window *w;
    assert_int_equal(lg_window_open(&spec, &g, &places, &w), 0);
    lg_window_publish(w, LG_FIELD_LATENT, 5);
    lg_window_close(&w);
    assert_int_equal(lg_keeper_drop(f.keeper, "window/0/text.clip_l"),
                     0); /* not published: made anew */
    assert_int_equal(lg_window_open(&spec, &g, &places, &w), 0);
    lg_window_publish(w, lg_field_text(1), 2); /* each text by itself */
    lg_window_close(&w);
    assert_int_equal(lg_keeper_drop(f.keeper, "window/0/text.clip_l"), 0);
    assert_int_equal(lg_window_open(&spec, &g, &places, &w), 0);
    lg_window_close(&w);
    assert_int_equal(lg_keeper_drop(f.keeper, "window/0/text.t5"), 0);
    assert_int_equal(lg_window_open(&spec, &g, &places, &w), LG_ERR_NOTFOUND);
    assert_non_null(strstr(lg_err_message(), "window/0/text.t5"));
    assert_int_equal(lg_keeper_drop(f.keeper, "window/0/latent"), 0);
    assert_int_equal(lg_window_open(&spec, &g, &places, &w), LG_ERR_NOTFOUND);
    assert_non_null(strstr(lg_err_message(), "window/0/latent"));
    assert_int_equal(lg_keeper_drop(f.keeper, "window/0/control"),
                     0); /* nothing is ready: harmless */
    assert_int_equal(lg_window_open(&spec, &g, &places, &w), 0);
    lg_window_close(&w);
    spec.is_made = true; /* but not after a rank's first commit */
    assert_int_equal(lg_keeper_drop(f.keeper, "window/0/control"), 0);
    assert_int_equal(lg_window_open(&spec, &g, &places, &w), LG_ERR_NOTFOUND);
}

/* ---- what a device and a keeper can do to an opening ---- */

static int g_code;      /* of the next create or map of the failing device */
static bool g_creating; /* which of them fails */

static int failing_create(const struct lg_region_place *p, size_t bytes, int *ret_fd)
{
    if (g_creating) return LG_FAIL(g_code, "the device has no memory");
    return fake_create(p, bytes, ret_fd);
}

static int failing_map(const struct lg_region_place *p, int fd, size_t bytes, void **ret)
{
    (void)p, (void)fd, (void)bytes, (void)ret;
    return LG_FAIL(g_code, "the device maps nothing");
}

/* Nothing is left open or mapped, and the next process gets memory as if nobody had tried. */
static void test_device_refuses(void **state)
{
    struct lg_region_place failing = fake;
    lg_region *r;
    made = mapped = 0;
    failing.create = failing_create;
    failing.map = failing_map;
    spec.place = &failing;
    g_code = LG_ERR_NOSPACE;
    g_creating = true;
    assert_refused(&spec, LG_ERR_NOSPACE, "has no memory");
    g_creating = false;
    assert_refused(&spec, LG_ERR_NOSPACE, "maps nothing");
    assert_int_equal(made, 1);
    spec.place = &fake;
    assert_int_equal(lg_region_open(&spec, &r), 0);
    assert_int_equal(made, 1); /* the one that could not be mapped there */
    assert_int_equal(mapped, 1);
    lg_region_close(&r);
}

static int quicker_create(const struct lg_region_place *p, size_t bytes, int *ret_fd)
{
    assert_int_equal(shm_fixture_put(&f, "trainer/0/master/0@", "the other's"), 0);
    return fake_create(p, bytes, ret_fd);
}

static int gone_create(const struct lg_region_place *p, size_t bytes, int *ret_fd)
{
    shm_fixture_kill_keeper(&f);
    return fake_create(p, bytes, ret_fd);
}

/* Two make the payload at once: both map that of the one who was quicker. A keeper that dies between is
 * said. */
static void test_device_payload_race(void **state)
{
    struct lg_region_place racing = fake;
    lg_region *r;
    char text[16] = {0};
    made = mapped = 0;
    racing.create = quicker_create;
    spec.bytes = 11;
    spec.place = &racing;
    assert_int_equal(lg_region_open(&spec, &r), 0);
    assert_int_equal(pread(r->payload_fd, text, 11, 0), 11);
    assert_string_equal(text, "the other's");
    lg_region_close(&r);
    racing.create = gone_create;
    spec.name = "trainer/0/master/1";
    assert_refused(&spec, LG_ERR_IO, "no keeper");
    assert_int_equal(mapped, 0);
}

/* The keeper's fd carries the right seals and size, but not what was asked for. */
static void test_other_heads(void **state)
{
    lg_region *r;
    assert_int_equal(lg_region_open(&spec, &r), 0);
    struct lg_region_head *h = r->head, was = *r->head;
    struct lg_region_spec other = spec;
    h->magic ^= 1;
    assert_refused(&spec, LG_ERR_MISMATCH, "not a region of layout");
    h->magic ^= 1;
    h->version++;
    assert_refused(&spec, LG_ERR_MISMATCH, "not a region of layout");
    h->version--;
    h->name[0] ^= 1;
    assert_refused(&spec, LG_ERR_MISMATCH, "the keeper's fd for trainer/0/master/0 is region");
    h->name[0] ^= 1;
    h->front_bytes = 1;
    assert_refused(&spec, LG_ERR_MISMATCH, "on host with a front of 1 bytes");
    h->front_bytes = 0;
    strcpy(h->place, "cuda:1");
    assert_refused(&spec, LG_ERR_MISMATCH, "lies on cuda:1");
    memset(h->place, 0, sizeof h->place);
    assert_memory_equal(h, &was, sizeof was);
    lg_region_close(&r);
    /* Sealed half-way only. */
    int fd = memfd_create("half", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 16384), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    assert_int_equal(lg_keeper_put(f.keeper, "x/0/half", 10000, fd), 0);
    close(fd);
    other.name = "x/0/half";
    assert_refused(&other, LG_ERR_MISMATCH, "sealed");
    other.front_bytes = SIZE_MAX / 2;
    other.name = "x/0/front";
    assert_refused(&other, LG_ERR_NOSPACE, "more than there is");
    char name[LG_REGION_NAME_BYTES];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    other.name = name;
    assert_refused(&other, LG_ERR_CONFIG, "1 to 62 bytes");
}

/* ---- how much room there is: /proc and the control group, as this test tells them ---- */

int __real_open(const char *path, int flags, mode_t mode);
int __wrap_open(const char *path, int flags, mode_t mode);
int __wrap_open(const char *path, int flags, mode_t mode)
{
    static const char groups[] = "/sys/fs/cgroup/";
    const char *name = !strncmp(path, groups, sizeof groups - 1) ? path + sizeof groups - 1
                       : !strcmp(path, "/proc/meminfo")          ? "meminfo"
                       : !strcmp(path, "/proc/self/cgroup")      ? "cgroup"
                                                                 : NULL;
    char told[512], *at = told;
    if (!g_told || !name) return __real_open(path, flags, mode);
    at += snprintf(told, sizeof told, "%s/", g_told);
    snprintf(at, sizeof told - (size_t)(at - told), "%s", name);
    while ((at = strchr(at, '/'))) *at = '-'; /* "lg.slice-memory.max" */
    return __real_open(told, flags, mode);
}

static void tell(const char *name, const char *text)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", f.dir, name);
    FILE *file = fopen(path, "w");
    assert_true(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void assert_room(const char *says)
{
    struct lg_region_spec huge = spec;
    huge.bytes = SIZE_MAX / 2; /* refused before any of it is asked for, whatever room is told */
    assert_refused(&huge, LG_ERR_NOSPACE, says);
}

/* The smaller of what the machine and the control group have; a cache that the kernel would give back is
 * room; what is not told does not count. */
static void test_room(void **state)
{
    lg_region *r;
    g_told = f.dir;
    assert_room("18446744073709551615 bytes are available");
    tell("meminfo", "MemTotal: 4 kB\nMemAvailable:      1000 kB\n");
    assert_room("; 1024000 bytes are available");
    tell("memory.max", "max\n");
    tell("memory.current", "400000\n");
    assert_room("; 1024000 bytes");
    tell("memory.max", "500000\n");
    assert_room("; 100000 bytes");
    tell("memory.stat", "anon 1\ninactive_file 50000\n");
    assert_room("; 150000 bytes");
    tell("memory.stat", "anon 1\ninactive_file 900000\n");
    assert_room("; 500000 bytes");
    tell("cgroup", "0::/lg.slice/lg-vae@0.service\n");
    tell("lg.slice-memory.max", "30000\n"); /* one below counts as well */
    tell("lg.slice-memory.current", "10000\n");
    assert_room("; 20000 bytes");
    tell("lg.slice-memory.max", "max\n");
    tell("memory.stat", "anon 1\n");
    tell("memory.current", "600000\n");
    assert_room("; 0 bytes");
    assert_refused(&spec, LG_ERR_NOSPACE, "Make the run smaller or the machine larger");
    tell("memory.current", "");
    assert_room("; 1024000 bytes");
    tell("meminfo", "MemAvailable: few\n");
    assert_room("18446744073709551615 bytes");
    tell("meminfo", "MemAvailable: 14 kB\n"); /* one page short */
    assert_refused(&spec, LG_ERR_NOSPACE, "10000 bytes of memory for region trainer/0/master/0");
    tell("meminfo", "MemAvailable: 16 kB\n");
    assert_int_equal(lg_region_open(&spec, &r), 0);
    lg_region_close(&r);
}

static void test_fill_once(void **state)
{
    lg_region *r;
    assert_int_equal(lg_region_open(&spec, &r), 0);
    lg_incarnation a = shm_fixture_join(f.board, LG_ROLE_text, 0);
    lg_incarnation b = shm_fixture_join(f.board, LG_ROLE_text, 1);
    assert_int_equal(lg_region_fill_begin(r, f.board, a), 1);
    assert_int_equal(lg_region_fill_begin(r, f.board, a), 1);
    assert_int_equal(lg_region_fill_begin(r, f.board, b), LG_ERR_BUSY);
    lg_board_bury(f.board, a);
    assert_int_equal(lg_region_fill_begin(r, f.board, b), 1);
    lg_region_fill_end(r);
    lg_board_bury(f.board, b);
    a = shm_fixture_join(f.board, LG_ROLE_text, 2);
    assert_int_equal(lg_region_fill_begin(r, f.board, a), 0);
    lg_region_close(&r);
}

static void test_speed(void **state)
{
    enum { N = 200 };
    lg_region *r;
    spec.bytes = 64 << 20;
    int64_t t = lg_now_ns();
    assert_int_equal(lg_region_open(&spec, &r), 0);
    print_message("region of 64 MiB: created in %lld us", (long long)(lg_now_ns() - t) / 1000);
    lg_region_close(&r);
    t = lg_now_ns();
    for (int i = 0; i < N; i++) {
        assert_int_equal(lg_region_open(&spec, &r), 0);
        lg_region_close(&r);
    }
    print_message(", opened and closed again in %lld us\n",
                  (long long)(lg_now_ns() - t) / N / 1000);
}

int main(void)
{
    lg_room_wait_ms = 0;
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_same_memory),
        T(test_refusals),
        T(test_put_if_absent),
        T(test_new_keeper),
        T(test_device_refuses),
        T(test_device_payload_race),
        T(test_other_heads),
        T(test_room),
        T(test_fill_once),
        T(test_speed),
        T(test_device_payload),
        T(test_copies),
        T(test_no_room_for_two),
        T(test_room_that_comes),
        T(test_room_that_does_not_come),
        T(test_front_alone),
        T(test_host_payload_of_a_device),
        T(test_lost),
        T(test_lost_window),
        T(test_device_payload_is_never_made_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
