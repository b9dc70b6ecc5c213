/* metrics.jsonl and ledger under a disk that refuses: what could not be written is written later,
 * once. The refusing disk is a limit on the size of files. */
#include "stages/trainer/records.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

enum { FAR = 2000 }; /* a step whose record lies behind SMALL bytes, while few lines do not */
enum { SMALL = 32 << 10 };

/* In place of libc's: the next g_failing calls fail. */
static int g_failing;
ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
    if (g_failing <= 0) return syscall(SYS_pwrite64, fd, p, n, at);
    g_failing--;
    errno = EIO;
    return -1;
}

static int setup(void **state)
{
    (void)state;
    scratch_make();
    signal(SIGXFSZ, SIG_IGN);
    return 0;
}

static void limit(rlim_t bytes)
{
    struct rlimit l;
    getrlimit(RLIMIT_FSIZE, &l);
    l.rlim_cur = bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &l), 0);
}

static int teardown(void **state)
{
    (void)state;
    limit(RLIM_INFINITY);
    scratch_remove();
    return 0;
}

static int append(lg_records *r, uint64_t step)
{
    struct lg_step_record s = {
        .ledger = {.step = step, .first = (step - 1) * 8, .last = step * 8 - 1}, .loss = 0.5};
    return lg_records_append(r, &s);
}

/* Steps [from, to] stand in metrics.jsonl once, and in the ledger. */
static void assert_steps(uint64_t from, uint64_t to)
{
    char *text, *line, *rest = NULL;
    size_t bytes;
    assert_int_equal(lg_read_file(scratch_path("metrics.jsonl"), 1 << 20, &text, &bytes), 0);
    uint64_t step = from;
    for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        assert_int_equal(strtoull(line + strlen("{\"step\": "), NULL, 10), step++);
    assert_int_equal(step, to + 1);
    free(text);
    assert_int_equal(lg_ledger_verify(scratch_path("ledger"), from - 1, to, 8), 0);
}

static void test_ledger_refused(void **state)
{
    (void)state;
    lg_records *r = NULL;
    assert_int_equal(lg_records_open(scratch_path(""), FAR, &r), 0);
    limit(SMALL);
    assert_int_equal(append(r, FAR), 1);
    assert_int_equal(append(r, FAR + 1), 1);
    limit(RLIM_INFINITY);
    assert_int_equal(append(r, FAR + 2), 0);
    lg_records_close(&r);
    assert_steps(FAR, FAR + 2);
}

static void test_written_at_the_end(void **state)
{
    (void)state;
    lg_records *r = NULL;
    assert_int_equal(lg_records_open(scratch_path(""), 0, &r), 0);
    limit(1);
    assert_int_equal(append(r, 1), 1);
    assert_int_equal(lg_records_retry(r), 1);
    limit(RLIM_INFINITY);
    lg_records_close(&r);
    assert_steps(1, 1);
}

/* The process dies right after: a record must not depend on another try later. */
static void test_ledger_tries_at_once(void **state)
{
    (void)state;
    lg_records *r = NULL;
    assert_int_equal(lg_records_open(scratch_path(""), 0, &r), 0);
    assert_int_equal(append(r, 1), 0);
    g_failing = 1;
    assert_int_equal(append(r, 2), 0);
    assert_int_equal(g_failing, 0);
    assert_steps(1, 2);
    g_failing = 100; /* it gives up, and goes on */
    assert_int_equal(append(r, 3), 1);
    assert_true(g_failing > 90);
    g_failing = 0;
    lg_records_close(&r);
    assert_steps(1, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_ledger_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_written_at_the_end, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ledger_tries_at_once, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
