/* What several hosts read and write beside the network: Slurm's node lists, addresses, epochs as files, votes on the
 * board. */
#include "supervisor/hosts/on_board.h"
#include "supervisor/hosts/places.h"
#include "supervisor/hosts/shared.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { RACERS = 8, RACES = 20 };

static int append(void *arg, const char *name)
{
    char *all = arg;
    strcat(strcat(all, *all ? " " : ""), name);
    return 0;
}

static void test_hostlist(void **state)
{
    (void)state;
    /* As `scontrol show hostnames` says. */
    static const struct {
        const char *list, *names;
    } good[] = {{"a", "a"},
                {"a,b", "a b"},
                {"n[1-3]", "n1 n2 n3"},
                {"n[07-10,12],login", "n07 n08 n09 n10 n12 login"},
                {"n[1,3]x,m[2-2]", "n1x n3x m2"},
                {"r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"},
                {"h[008-011].cluster", "h008.cluster h009.cluster h010.cluster h011.cluster"}};
    static const char *bad[] = {"",       ",",     "a,",     "a,,b",          "n[",
                                "n]",     "n[]",   "n[1",    "n[1-]",         "n[2-1]",
                                "n[a]",   "n[1,]", "n[[1]]", "n[1-2-",        "n[-1]",
                                "n[1 2]", "n[1]]", "[1],",   "n[1-99999999]", "n[1][1][1][1][1]"};
    for (size_t i = 0; i < LG_ARRAY_LEN(good); i++) {
        char all[512] = "";
        int names = 1;
        for (const char *p = good[i].names; *p; p++) names += *p == ' ';
        assert_int_equal(lg_hostlist_expand(good[i].list, append, all), names);
        assert_string_equal(all, good[i].names);
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        char all[4096] = "";
        if (lg_hostlist_expand(bad[i], append, all) != LG_ERR_CONFIG) fail_msg("\"%s\"", bad[i]);
    }
    lg_err_clear();
}

static struct lg_epoch epoch(uint64_t number, int leader)
{
    struct lg_epoch e = {
        .formation = 77, .number = number, .first_step = 5, .members = 0xb, .leader = leader};
    for (int h = 0; h < 4; h++)
        if (e.members >> h & 1) {
            e.place[h] = (uint8_t)(h + 2);
            e.life[h] = 1000u * (unsigned)leader + (unsigned)h;
        }
    return e;
}

/* Of those who make the file of one number at the same time one is obeyed by all. */
static void test_link(void **state)
{
    (void)state;
    char folder[LG_PATH_BYTES];
    struct lg_shared_place at = {folder, 9, 0};
    assert_int_equal(lg_path(folder, "%s", scratch_path("shared")), 0);
    assert_int_equal(lg_shared_number(folder, 9, true, &at.number), 0);
    for (uint64_t n = 2; n < 2 + RACES; n++) {
        for (int i = 0; i < RACERS; i++) {
            if (fork()) continue;
            static const int leaders[] = {0, 1, 3};
            struct lg_epoch want = epoch(n, leaders[i % 3]), is;
            want.life[0] += (uint64_t)i * 100000;
            char path[64];
            snprintf(path, sizeof path, "is%d", i);
            if (lg_shared_link(&at, &want, &is) < 0) _exit(1);
            FILE *f = fopen(scratch_path(path), "w");
            _exit(!f || fwrite(&is, sizeof is, 1, f) != 1 || fclose(f) != 0);
        }
        struct lg_epoch first = {0}, is;
        for (int i = 0; i < RACERS; i++) {
            int code;
            assert_true(wait(&code) > 0);
            assert_int_equal(code, 0);
        }
        for (int i = 0; i < RACERS; i++) {
            char path[64];
            snprintf(path, sizeof path, "is%d", i);
            FILE *f = fopen(scratch_path(path), "r");
            assert_non_null(f);
            assert_int_equal(fread(&is, sizeof is, 1, f), 1);
            fclose(f);
            if (!i) first = is;
            assert_memory_equal(&first, &is, sizeof is);
            assert_int_equal(is.number, n);
            assert_int_equal(is.members, 0xb);
            assert_int_equal(is.place[3], 5);
        }
    }
}

static void test_bad_file(void **state)
{
    (void)state;
    struct lg_epoch want = epoch(2, 0), is;
    static const char *text[] = {
        "",
        "formation 77\nnumber 2\n",
        "formation 78\nnumber 2\nfirst_step 5\nleader 0\nhost 0 place 1 life 3\nend\n",
        "formation 77\nnumber 2\nfirst_step 5\nleader 1\nhost 0 place 1 life 3\nend\n",
        "formation 77\nnumber 2\nfirst_step 5\nleader 0\nhost 0 place 1 life 3\n",
        "formation 77\nnumber 2\nfirst_step 5\nleader 0\nhost 64 place 1 life 3\nend\n"};
    scratch_write("bad/epochs/0000000000000009/folder", "0123456789abcdef\n");
    for (size_t i = 0; i < LG_ARRAY_LEN(text); i++) {
        scratch_write("bad/epochs/0000000000000009/77.2", text[i]);
        assert_int_equal(
            lg_shared_link(&(struct lg_shared_place){scratch_path("bad"), 9, 0}, &want, &is),
            LG_ERR_CORRUPT);
    }
    scratch_write("file", "");
    assert_true(lg_shared_link(&(struct lg_shared_place){scratch_path("file"), 9, 0}, &want, &is) <
                0);
    lg_err_clear();
}

static uint64_t number_of(const char *folder)
{
    uint64_t n = 0;
    assert_int_equal(lg_shared_number(folder, 9, true, &n), 0);
    return n;
}

/* Where the folder is not mounted, or another one is, nothing is decided. */
static void test_other_folder(void **state)
{
    (void)state;
    struct lg_epoch want = epoch(2, 0), is;
    uint64_t n;
    char folder[LG_PATH_BYTES], away[LG_PATH_BYTES];
    assert_int_equal(lg_path(folder, "%s", scratch_path("mounted")), 0);
    assert_int_equal(lg_path(away, "%s", scratch_path("away")), 0);
    assert_int_equal(lg_shared_number(folder, 9, false, &n), LG_ERR_NOTFOUND);
    assert_int_equal(lg_mkdirs(folder), 0);
    assert_int_equal(lg_shared_number(folder, 9, false, &n), LG_ERR_NOTFOUND);
    const struct lg_shared_place at = {folder, 9, number_of(folder)}, any = {folder, 9, 0};
    assert_int_equal(number_of(folder), at.number);
    assert_int_equal(lg_shared_link(&at, &want, &is), 0);
    assert_int_equal(rename(folder, away), 0);
    assert_int_equal(lg_mkdirs(folder), 0); /* of the mount */
    want = epoch(3, 1);
    assert_int_equal(lg_shared_link(&at, &want, &is), LG_ERR_MISMATCH);
    assert_int_equal(lg_shared_link(&any, &want, &is), LG_ERR_MISMATCH);
    assert_true(number_of(folder) != at.number);
    assert_int_equal(lg_shared_link(&at, &want, &is), LG_ERR_MISMATCH);
    assert_int_equal(lg_shared_link(&any, &want, &is), 0);
    scratch_write("mounted/epochs/0000000000000009/folder", "0\n");
    assert_int_equal(lg_shared_link(&any, &want, &is), LG_ERR_CORRUPT);
    lg_err_clear();
}

static char g_first[] = "127.0.0.1", g_second[] = "127.0.0.2", g_third[] = "localhost";
static char *g_list[] = {g_first, g_second, g_third};
static char g_none[] = "", g_lo[] = "lo", g_unknown[] = "no-such0";

static void test_places(void **state)
{
    (void)state;
    struct lg_host_places p;
    lg_config c = {.hosts_count = 2, .hosts_number = -1, .hosts_interface = g_none};
    c.hosts_list.v = g_list;
    c.hosts_list.n = 2;
    if (lg_host_places_find(&c, &p) < 0)
        fail_msg("%s", lg_err_text()); /* an address that this machine has */
    assert_int_equal(p.own, 0);
    assert_string_equal(p.exchange, "127.0.0.1");
    c.hosts_number = 1;
    assert_int_equal(lg_host_places_find(&c, &p), 0);
    assert_int_equal(p.own, 1);
    assert_string_equal(p.exchange, "127.0.0.2");
    c.hosts_interface = g_lo;
    assert_int_equal(lg_host_places_find(&c, &p), 0);
    assert_string_equal(p.exchange, "127.0.0.1");
    c.hosts_interface = g_unknown;
    assert_int_equal(lg_host_places_find(&c, &p), LG_ERR_CONFIG);
    c.hosts_interface = g_none;
    c.hosts_list.n = 3; /* localhost is 127.0.0.1, or ::1 */
    c.hosts_spare = 1;
    const int rc = lg_host_places_find(&c, &p);
    assert_true(rc == LG_ERR_CONFIG || (rc == 0 && !strcmp(p.address[2], "::1")));
    unsetenv("SLURM_JOB_NODELIST");
    c.hosts_list.n = 0;
    c.hosts_number = -1;
    assert_int_equal(lg_host_places_find(&c, &p), LG_ERR_CONFIG);
    setenv("SLURM_JOB_NODELIST", "127.0.0.[1-3]", 1);
    setenv("SLURM_NODEID", "2", 1);
    setenv("SLURM_STEP_NUM_NODES", "1", 1); /* a step of its own: found by the address */
    assert_int_equal(lg_host_places_find(&c, &p), 0);
    assert_int_equal(p.own, 0);
    setenv("SLURM_STEP_NUM_NODES", "3", 1);
    assert_int_equal(lg_host_places_find(&c, &p), 0);
    assert_int_equal(p.n, 3);
    assert_int_equal(p.own, 2);
    assert_string_equal(p.address[2], "127.0.0.3");
    c.hosts_spare = 0; /* more nodes than machines */
    assert_int_equal(lg_host_places_find(&c, &p), LG_ERR_CONFIG);
    lg_err_clear();
}

/* What one supervisor has promised its successor finds, and only of the epoch that there is. */
static void test_votes(void **state)
{
    (void)state;
    lg_board *b = NULL;
    static char address[LG_PLACES_MAX][LG_HOST_ADDRESS_BYTES];
    struct lg_group_addresses a = {address, 7601};
    struct lg_group_before before;
    struct lg_beat own = {.promised = 130, .accepted = 66};
    lg_plan plan = {.hosts = 4, .host = 1, .batch = 8, .sequence = 1, .shards = 1};
    plan.instances[LG_ROLE_trainer] = plan.instances[LG_ROLE_exchange] = 1;
    struct lg_board_spec spec = {
        .plan = &plan, .start_step = 5, .max_steps = 9, .checkpoint_every = 5, .life = 12};
    assert_int_equal(lg_board_create(scratch_path("board"), &spec, &b), 0);
    assert_false(lg_group_read_before(b, &before));
    struct lg_epoch e = epoch(3, 1);
    own.epoch = e;
    own.accepted_epoch = epoch(4, 0);
    lg_group_write_epoch(b, &e, &a);
    lg_group_write_votes(b, &own);
    assert_true(lg_group_read_before(b, &before));
    assert_memory_equal(&before.epoch, &e, sizeof e);
    assert_memory_equal(&before.accepted_epoch, &own.accepted_epoch, sizeof e);
    assert_int_equal(before.promised, 130);
    assert_int_equal(before.accepted, 66);
    assert_int_equal(before.number, 1);
    e.number = 5;
    lg_group_write_epoch(b, &e, &a);
    assert_true(lg_group_read_before(b, &before));
    assert_int_equal(before.promised, 0);
    assert_int_equal(before.accepted_epoch.number, 0);
    lg_board_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostlist), cmocka_unit_test(test_link),
        cmocka_unit_test(test_bad_file), cmocka_unit_test(test_other_folder),
        cmocka_unit_test(test_places),   cmocka_unit_test(test_votes)};
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
