/* Every call of shm and bus that can fail fails once: see tests/sim/faults.h. */
#include "bus/control.h"
#include "bus/wake.h"
#include "shm/keeper.h"
#include "shm/region.h"
#include "shm/window.h"
#include "tests/sim/faults.h"
#include "tests/unit/shm_fixture.h"
#include "tests/unit/store_manager.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static struct shm_fixture f;
static struct store_manager g_manager; /* of keeper_stored */

static int board(void)
{
    lg_board *a = NULL, *b = NULL;
    char path[LG_PATH_BYTES];
    struct lg_board_spec spec = {.plan = &f.plan, .max_steps = 10};
    snprintf(path, sizeof path, "%s/board2", f.dir);
    faults_begin();
    int rc = lg_board_create(path, &spec, &a);
    if (rc == 0) rc = lg_board_open(path, f.plan.hash, &b);
    if (rc == 0) {
        lg_incarnation me = lg_board_enlist(a, LG_ROLE_vae, 0);
        rc = lg_board_join(a, me);
        int fd = rc == 0 ? lg_board_pidfd(a, LG_ROLE_vae, 0) : -1;
        if (fd >= 0) close(fd);
        if (rc == 0) (void)lg_board_is_dead(b, me); /* may not know, and says so by "alive" */
    }
    TIDY(lg_board_close(&a), lg_board_close(&b));
    return rc;
}

static struct lg_region_spec region_spec(void)
{
    return (struct lg_region_spec){.keeper = f.keeper,
                                   .name = "faults/0/x",
                                   .bytes = 5000,
                                   .plan_hash = f.plan.hash,
                                   .run_id = f.board->s->preamble.run_id};
}

static int region(void)
{
    struct lg_region_spec spec = region_spec();
    lg_region *r = NULL, *again = NULL;
    lg_keeper_drop(f.keeper, spec.name);
    faults_begin();
    int rc = lg_region_open(&spec, &r);
    if (rc == 0) rc = lg_region_deposit(f.keeper, r);
    if (rc == 0) rc = lg_region_open(&spec, &again);
    TIDY(lg_region_close(&r), lg_region_close(&again));
    return rc;
}

static int device_create(const struct lg_region_place *p, size_t bytes, int *ret_fd)
{
    (void)bytes;
    *ret_fd = memfd_create(p->name, MFD_CLOEXEC);
    return *ret_fd < 0 ? LG_FAIL(LG_ERR_NOSPACE, "no memory on %s", p->name) : 0;
}

static int device_map(const struct lg_region_place *p, int fd, size_t bytes, void **ret)
{
    void *at = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return LG_FAIL(LG_ERR_IO, "cannot map on %s", p->name);
    *ret = at;
    return 0;
}

static void device_unmap(const struct lg_region_place *p, void *at, size_t bytes)
{
    (void)p;
    munmap(at, bytes);
}

static int device_region(void)
{
    static const struct lg_region_place place = {
        .name = "cuda:0", .create = device_create, .map = device_map, .unmap = device_unmap};
    struct lg_region_spec spec = region_spec();
    lg_region *r = NULL, *again = NULL;
    spec.place = &place;
    lg_keeper_drop(f.keeper, spec.name);
    lg_keeper_drop(f.keeper, "faults/0/x@");
    faults_begin();
    int rc = lg_region_open(&spec, &r);
    if (rc == 0) rc = lg_region_deposit(f.keeper, r);
    if (rc == 0) rc = lg_region_open(&spec, &again);
    TIDY(lg_region_close(&r), lg_region_close(&again));
    return rc;
}

static int window(void)
{
    struct lg_window_geometry g = {.slots = 8,
                                   .batch = 4,
                                   .chunk = {4, 4, 4},
                                   .pixels_bytes = 48,
                                   .latent_bytes = 16,
                                   .text = {{.states_bytes = 16}}};
    struct lg_region_spec spec = region_spec();
    struct lg_window_places nowhere = {0};
    lg_window *w = NULL;
    faults_begin();
    int rc = lg_window_open(&spec, &g, &nowhere, &w);
    TIDY(lg_window_close(&w));
    return rc;
}

static int keeper_client(void)
{
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int fd = -1, null = open("/dev/null", O_RDWR | O_CLOEXEC);
    lg_keeper_drop(f.keeper, "faults/fd");
    faults_begin();
    int rc = lg_keeper_put(f.keeper, "faults/fd", 1, null);
    if (rc == 0) rc = lg_keeper_get(f.keeper, "faults/fd", &bytes, &fd);
    if (fd >= 0) close(fd);
    if (rc == 0) rc = lg_keeper_list(f.keeper, 0, name, &bytes);
    if (rc == 0) rc = lg_keeper_drop(f.keeper, "faults/fd");
    TIDY(close(null));
    return rc;
}

/* The other end: a client insists until the keeper has ended. */
static void insist(const char *socket)
{
    uint64_t bytes;
    int fd = -1, mine = shm_fixture_memory("a");
    for (int i = 0; i < 1000 && !lg_path_exists(socket); i++) usleep(1000);
    for (int i = 0; i < 3; i++) {
        lg_keeper_put(socket, "a", 1, mine);
        if (lg_keeper_get(socket, "a", &bytes, &fd) == 0) close(fd);
        lg_keeper_get(socket, "b", &bytes, &fd);
        lg_keeper_drop(socket, "c");
    }
    for (int i = 0; i < 50 && lg_keeper_drop(socket, "") < 0 && lg_path_exists(socket); i++)
        usleep(1000);
}

static int serve_to_one(const char *name, bool stored)
{
    char socket[LG_PATH_BYTES], waits[LG_PATH_BYTES + 8];
    int status, ready[2];
    snprintf(socket, sizeof socket, "%s/%s", f.dir, name);
    snprintf(waits, sizeof waits, "%s%s", socket,
             stored ? ".new" : ""); /* nothing is in the store */
    unlink(waits);
    LG_ASSERT(pipe(ready) == 0);
    pid_t client = fork();
    if (client == 0) {
        insist(waits);
        _exit(0);
    }
    sigset_t old;
    sigprocmask(SIG_BLOCK, NULL, &old);
    faults_begin();
    int rc = stored ? lg_keeper_serve_stored(socket) : lg_keeper_serve(socket, ready[1]);
    faults_end();
    close(ready[0]);
    close(ready[1]);
    kill(client, SIGKILL);
    waitpid(client, &status, 0);
    sigprocmask(SIG_SETMASK, &old, NULL);
    return rc;
}

static int keeper_server(void)
{
    return serve_to_one("keeper2", false);
}

static int keeper_stored(void)
{
    return serve_to_one("keeper4", true);
}

/* Two fds of one name must never lie there: the next keeper would not know which is meant. */
static int store_is_sane(void)
{
    store_manager_clear(&g_manager);
    return g_manager.doubled ? LG_FAIL(LG_ERR_FAILED, "the store had two fds of one name") : 0;
}

static int control(void)
{
    lg_control *c = NULL;
    lg_bus *bus = NULL;
    struct lg_peer peer;
    struct lg_message m, answer, ping = {.kind = LG_MESSAGE_ping, .role = LG_ROLE_lgsup};
    struct lg_bus_spec spec = {
        .runtime_dir = f.dir, .role = LG_ROLE_ema, .incarnation = 77, .plan = &f.plan};
    faults_begin();
    int rc = lg_control_open(f.dir, &c);
    if (rc == 0) rc = lg_bus_open(&spec, &bus);
    if (rc == 0) {
        lg_bus_hello(bus);
        lg_bus_notify(bus);
        lg_bus_event(bus, 1, "something");
        lg_bus_wait(bus, 5);
        for (int i = 0; i < 3; i++)
            if (lg_control_receive(c, &peer, &m)) lg_control_answer(c, &peer, &m);
        lg_control_nudge(c, LG_ROLE_ema, 0, 77);
        lg_bus_wait(bus, 5);
        rc = lg_control_ask(f.dir, &ping, 10, &answer); /* nobody answers: we are lgsup */
        if (rc == LG_ERR_TIMEOUT) rc = 0;
    }
    TIDY(lg_bus_close(&bus), lg_control_close(&c));
    return rc;
}

static int setup(void **state)
{
    (void)state;
    shm_fixture_open(&f, 2);
    shm_fixture_start_keeper(&f);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    shm_fixture_close(&f);
    return 0;
}

SCENARIO(board, 1)
SCENARIO(region, 1)
SCENARIO(device_region, 1)
SCENARIO(window, 1)
SCENARIO(keeper_client, 1)
SCENARIO(keeper_server, 1)
static void test_keeper_stored(void **state)
{
    (void)state;
    store_manager_start(&g_manager, f.dir);
    int n = faults_each(&(struct fault_scenario){
        .name = "keeper_stored", .run = keeper_stored, .after = store_is_sane});
    store_manager_stop(&g_manager);
    print_message("%d faults\n", n);
    assert_true(n > 0);
}
SCENARIO(control, 1)

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_board),         cmocka_unit_test(test_region),
        cmocka_unit_test(test_window),        cmocka_unit_test(test_device_region),
        cmocka_unit_test(test_keeper_client), cmocka_unit_test(test_keeper_server),
        cmocka_unit_test(test_keeper_stored), cmocka_unit_test(test_control),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
