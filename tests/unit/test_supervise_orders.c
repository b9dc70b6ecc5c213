/* `lgsup scale` and `lgsup swap` of a run that lives. */
#include "supervisor/core/supervise.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervise_fixture.h"
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static void test_scale(void **state)
{
    (void)state;
    static const struct {
        const char *role, *n;
        int code;
        const char *says;
    } order[] = {{"vae", "5", 0, "vae: 5 ready"},
                 {"text", "1", 0, "text: 1 ready"},
                 {"loader", "3", 0, "loader: 3 ready"},
                 {"vae", "1", 0, "vae: 1 ready"},
                 {"vae", "0", 2, "1 to 64"},
                 {"vae", "65", 2, "1 to 64"},
                 {"vae", "2x", 2, "not a number"},
                 {"trainer", "3", 2, "decides how sums are rounded"},
                 {"ema", "2", 2, "one ema process"},
                 {"ckpt", "2", 2, "one ckpt process"},
                 {"keeper", "2", 2, "cannot be scaled"},
                 {"lvae", "2", 2, "no role"}};
    assert_exit(RUN("scale", "vae", "2", g_run), 8);
    start_long();
    for (size_t i = 0; i < LG_ARRAY_LEN(order); i++) {
        assert_exit(RUN("scale", order[i].role, order[i].n, g_run), order[i].code);
        assert_output(order[i].says);
    }
    assert_int_equal(count_of("vae"), 1); /* what has left is forgotten */
    assert_int_equal(count_of("text"), 1);
    assert_int_equal(count_of("loader"), 3);
    assert_int_equal(g_status.wanted[LG_ROLE_loader], 3);
    assert_int_equal(instance("loader", 2)->restarts, 0);
    kill_lgsup();
    assert_exit(RUN("scale", "vae", "2", g_run), 8);
    assert_output("no lgsup is in charge");
    kill_one("loader", 1); /* wanted, and dead */
    start_long();
    assert_int_equal(count_of("vae"), 1);
    assert_int_equal(count_of("loader"), 3);
    assert_exit(RUN("scale", "loader", "2", g_run), 0);
    assert_int_equal(count_of("loader"), 2);
    assert_non_null(instance("loader", 1));
    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

/* In a container systemd's units may be shown another boot id than a shell is. */
static void test_scale_from_where_the_boot_id_is_another(void **state)
{
    (void)state;
    char line[256], *boot;
    int n;
    start_long();
    FILE *lock = fopen(scratch_path("run/lock"), "r+");
    assert_true(lock && fgets(line, sizeof line, lock));
    assert_int_equal(sscanf(line, "%*d %*d %n", &n), 0);
    boot = line + n;
    *boot = *boot == 'f' ? 'e' : 'f';
    rewind(lock);
    assert_true(fputs(line, lock) > 0 && fclose(lock) == 0);
    assert_exit(RUN("scale", "vae", "3", g_run), 0);
    assert_output("vae: 3 ready");
    scratch_kill(g_lgsup);
    assert_exit(RUN("scale", "vae", "2", g_run), 8);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("adopted");
    end_by_stop();
}

/* lgsup dies when the order is on the board, but nothing has been done for it. */
static void test_scale_survives_lgsup(void **state)
{
    (void)state;
    lg_board *b = NULL;
    start_long();
    kill_lgsup();
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    atomic_store(&b->s->wanted[LG_ROLE_vae], 4);
    atomic_store(&b->s->wanted[LG_ROLE_text], 1);
    lg_incarnation text = lg_board_life(b, LG_ROLE_text, 1, NULL);
    atomic_store(&lg_board_row(b, LG_ROLE_text, 1)->leave, text); /* it may be gone by then */
    lg_board_close(&b);
    start_long();
    for (int i = 0; i < 1000 && (count_of("vae") != 4 || count_of("text") != 1); i++) usleep(5000);
    assert_int_equal(count_of("vae"), 4);
    assert_int_equal(count_of("text"), 1);
    end_by_stop();
}

static void test_swap(void **state)
{
    (void)state;
    static const char *const all[] = {"loader", "text", "vae", "ema", "ckpt", "trainer"};
    assert_exit(RUN("swap", "ckpt", g_run), 8);
    start_long();
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) {
        int before = instance(all[i], 0)->pid;
        assert_exit(RUN("swap", all[i], g_run), 0);
        assert_true(read_status());
        assert_int_not_equal(instance(all[i], 0)->pid, before);
        assert_int_equal(instance(all[i], 0)->restarts, 0);
    }
    wait_for_step(g_status.step + 10); /* on the same memory, or it would park */
    assert_exit(RUN("swap", "vae.1", "--bin", scratch_path("bin/lg-vae"), g_run), 0);
    assert_exit(RUN("swap", "vae.7", g_run), 8);
    assert_exit(RUN("swap", "trainer.0", g_run), 2);
    assert_exit(RUN("swap", "keeper", g_run), 2);
    assert_exit(RUN("swap", "nobody", g_run), 2);
    assert_exit(RUN("swap", "vae.x", g_run), 2);
    assert_exit(RUN("swap", "vae", "--bin", scratch_path("none"), g_run), 8);
    assert_int_equal(count_of("vae"), 2); /* no standby any more */
    int vae = instance("vae", 1)->pid;
    kill_lgsup();
    start_long();
    assert_int_equal(instance("vae", 1)->pid, vae);
    assert_non_null(strstr(instance("vae", 1)->program, "bin/lg-vae"));

    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_swap_is_rolled_back(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000", "--set",
                     "supervisor.ready_s=4");
    wait_for_output("every role is ready");
    wait_for_step(3);
    int ckpt = instance("ckpt", 0)->pid;
    scratch_write("run/fault", "ckpt 0 crash");
    assert_exit(RUN("swap", "ckpt", g_run), 5);
    assert_output("the weights are damaged");
    scratch_write("run/fault", "ckpt 0 unready");
    assert_exit(RUN("swap", "ckpt", g_run), 9);
    assert_output("without a heartbeat for 4 s (supervisor.ready_s)");
    assert_true(read_status());
    assert_int_equal(instance("ckpt", 0)->pid, ckpt);
    /* One of the two sets up well: neither is put in place. */
    int vae = instance("vae", 0)->pid;
    scratch_write("run/fault", "vae 1 crash");
    assert_exit(RUN("swap", "vae", g_run), 5);
    unlink(scratch_path("run/fault"));
    assert_int_equal(count_of("vae"), 2);
    assert_int_equal(instance("vae", 0)->pid, vae);
    /* A rank opens its memory when it has taken over: both ranks go back. */
    scratch_write("run/fault", "trainer 1 unready");
    assert_exit(RUN("swap", "trainer", "--bin", scratch_path("bin/lg-trainer"), g_run), 1);
    assert_output("trainer goes on with its former program");
    wait_for_step(g_status.step + 20);
    assert_int_equal(count_of("trainer"), 2);
    assert_string_equal(instance("trainer", 0)->program, "");
    assert_string_equal(instance("trainer", 1)->program, "");
    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

/* A program that ran well when it was swapped in and dies again and again later is taken out again
 * before the run is parked for it. */
static void test_swapped_program_that_dies_later(void **state)
{
    (void)state;
    char text[2 * LG_PATH_BYTES];
    snprintf(text, sizeof text, "#!/bin/sh\n[ -e %s ] && exit 5\nexec %s \"$@\"\n",
             scratch_path("crash"), scratch_path("bin/lg-trainer"));
    chmod(scratch_write("new", text), 0700);
    start_long();
    assert_exit(RUN("swap", "trainer", "--bin", scratch_path("new"), g_run), 0);
    scratch_write("crash", "");
    kill_one("trainer", 1);
    wait_for_output("trainer.1 died too often with the program");
    assert_output("that was swapped in: back to the former one");
    wait_for_step(g_status.step + 10);
    read_status();
    assert_string_equal(instance("trainer", 1)->program, "");
    assert_string_equal(instance("trainer", 0)->program, scratch_path("new"));
    end_by_stop();
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        LGSUP_TEST(test_scale),
        LGSUP_TEST(test_scale_from_where_the_boot_id_is_another),
        LGSUP_TEST(test_scale_survives_lgsup),
        LGSUP_TEST(test_swap),
        LGSUP_TEST(test_swap_is_rolled_back),
        LGSUP_TEST(test_swapped_program_that_dies_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
