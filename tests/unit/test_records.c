/* metrics.jsonl and ledger under a disk that refuses: what could not be written is written later,
 * once. The refusing disk is a limit on the size of files. */
#include "stages/trainer/records.h"
#include "tests/unit/scratch.h"
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

enum { FAR = 2000 }; /* a step whose record lies behind SMALL bytes, while few lines do not */
enum { SMALL = 32 << 10 };
enum { LINEAGE = 0x77 };

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
        .ledger = {.step = step, .first = (step - 1) * 8, .last = step * 8 - 1, .lineage = LINEAGE},
        .loss = 0.5};
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
    assert_int_equal(lg_ledger_verify(scratch_path("ledger"),
                                      &(struct lg_ledger_check){from - 1, to, 8, LINEAGE}),
                     0);
}

/* The parts of a loss are there where a variance is learned, numbers or null. */
static void test_loss_parts(void **state)
{
    (void)state;
    static const struct {
        double loss, vb;
        bool has_vb;
        const char *text;
    } of[] = {{2.5, 0.5, false, "\"loss\": 2.5, \"grad_norm\": "},
              {2.5, 0.5, true, "\"loss\": 2.5, \"loss_mse\": 2, \"loss_vb\": 0.5, \"grad_norm\": "},
              {NAN, NAN, true, "\"loss\": null, \"loss_mse\": null, \"loss_vb\": null, "}};
    lg_records *r = NULL;
    char *text;
    size_t bytes;
    assert_int_equal(lg_records_open(scratch_path(""), 0, &r), 0);
    for (size_t i = 0; i < LG_ARRAY_LEN(of); i++) {
        const struct lg_step_record s = {.ledger = {.step = i + 1, .lineage = LINEAGE},
                                         .loss = of[i].loss,
                                         .loss_vb = of[i].vb,
                                         .has_vb = of[i].has_vb};
        assert_int_equal(lg_records_append(r, &s), 0);
    }
    lg_records_close(&r);
    assert_int_equal(lg_read_file(scratch_path("metrics.jsonl"), 1 << 20, &text, &bytes), 0);
    for (size_t i = 0; i < LG_ARRAY_LEN(of); i++)
        if (!strstr(text, of[i].text)) fail_msg("no %s in %s", of[i].text, text);
    free(text);
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

/* ---- where a start goes on ---- */

static void write_lines(uint64_t from, uint64_t to, const char *behind)
{
    FILE *f = fopen(scratch_path("metrics.jsonl"), "a");
    assert_non_null(f);
    for (uint64_t s = from; s <= to; s++)
        fprintf(f, "{\"step\": %llu, \"loss\": 0.%llu}\n", (unsigned long long)s,
                (unsigned long long)(s * 7919 % 1000));
    fputs(behind, f);
    fclose(f);
}

/* The last step of metrics.jsonl after a start at `committed`; 0: it is empty. */
static uint64_t last_after(uint64_t committed)
{
    lg_records *r = NULL;
    char *text;
    size_t bytes;
    assert_int_equal(lg_records_open(scratch_path(""), committed, &r), 0);
    assert_int_equal(lg_records_cut(r), 0);
    lg_records_close(&r);
    assert_int_equal(lg_read_file(scratch_path("metrics.jsonl"), 1 << 24, &text, &bytes), 0);
    uint64_t last = 0;
    if (bytes) {
        assert_int_equal(text[bytes - 1], '\n');
        text[bytes - 1] = 0;
        const char *line = strrchr(text, '\n');
        last = strtoull((line ? line + 1 : text) + strlen("{\"step\": "), NULL, 10);
    }
    free(text);
    return last;
}

static void test_cut(void **state)
{
    (void)state;
    write_lines(1, 100, "");
    assert_int_equal(last_after(1000000000), 100);
    assert_int_equal(last_after(100), 100);
    assert_int_equal(last_after(73), 73);
    write_lines(80, 90, ""); /* lines in between were never written: the disk was full */
    assert_int_equal(last_after(79), 73);
    write_lines(74, 90, "{\"step\": 91, \"lo"); /* torn */
    assert_int_equal(last_after(95), 90);
    write_lines(91, 93, "{\"step\": 94");
    assert_int_equal(last_after(92), 92);
    assert_int_equal(last_after(0), 0);
    assert_int_equal(last_after(5), 0);
    write_lines(7, 9, "\n\n"); /* of a run that went on from another's checkpoint */
    assert_int_equal(last_after(8), 8);
    assert_int_equal(last_after(6), 0);
    write_lines(1, 3, "nonsense\n{}\n[]\n{\"step\": -1}\n{\"step\": \"4\"}\n{\"step\": 1e300}\n");
    assert_int_equal(last_after(100), 3);
}

/* Somebody's editor, or a machine without power: what is no line of ours is cut when it is at the end, and
 * left in peace where it is not. */
static void test_cut_strange_lines(void **state)
{
    (void)state;
    enum { LONG = 100000 };
    char *longest = calloc(1, LONG + 2);
    memset(longest, 'x', LONG);
    write_lines(1, 4, "# a note\n");
    write_lines(5, 6, longest);
    assert_int_equal(last_after(100), 6);
    longest[LONG] = '\n';
    write_lines(7, 8, longest);
    assert_int_equal(last_after(100), 8);
    free(longest);
    /* The seam of two lives, whose line reads as one of step 2. */
    write_lines(9, 60, "{\"step\": 2, \"loss\": 0.5}\n");
    write_lines(62, 70, "");
    assert_int_equal(last_after(20), 20);
    FILE *f = fopen(scratch_path("metrics.jsonl"), "a"); /* a hole where a power cut tore it */
    for (int i = 0; i < 3000; i++) fputc(0, f);
    fputs("{\"step\": 3}\n", f);
    fclose(f);
    assert_int_equal(last_after(20), 20);
    /* A small one: what is left of the line would be a whole one of the next step. */
    f = fopen(scratch_path("metrics.jsonl"), "a");
    fwrite("\0\0\0{\"step\": 21}\n", 1, 16, f);
    fclose(f);
    assert_int_equal(last_after(30), 20);
}

/* The ledger too: what was never committed, or comes from a later step than this life begins with, goes. */
static void test_ledger_is_cut(void **state)
{
    (void)state;
    lg_records *r = NULL;
    struct stat st;
    assert_int_equal(lg_records_open(scratch_path(""), 0, &r), 0);
    for (uint64_t s = 1; s <= 9; s++) assert_int_equal(append(r, s), 0);
    lg_records_close(&r);
    assert_int_equal(last_after(6), 6);
    assert_int_equal(stat(scratch_path("ledger"), &st), 0);
    assert_int_equal(st.st_size, 6 * sizeof(struct lg_ledger_record));
    assert_steps(1, 6);
    assert_int_equal(last_after(8), 6); /* nothing is made longer */
    assert_int_equal(stat(scratch_path("ledger"), &st), 0);
    assert_int_equal(st.st_size, 6 * sizeof(struct lg_ledger_record));
}

/* A start that goes back far, say since another run's checkpoints lie there, and is refused by a loader
 * before the first step has taken nothing away. */
static void test_cut_with_the_first_record(void **state)
{
    (void)state;
    lg_records *r = NULL;
    assert_int_equal(lg_records_open(scratch_path(""), 0, &r), 0);
    for (uint64_t s = 1; s <= 9; s++) assert_int_equal(append(r, s), 0);
    lg_records_close(&r);
    assert_int_equal(lg_records_open(scratch_path(""), 4, &r), 0);
    lg_records_close(&r);
    assert_steps(1, 9);
    assert_int_equal(lg_records_open(scratch_path(""), 4, &r), 0);
    assert_int_equal(append(r, 5), 0);
    lg_records_close(&r);
    assert_steps(1, 5);
}

/* A start reads what it cuts, not what it keeps. */
static int64_t bytes_read(void)
{
    char *text, *at;
    size_t bytes;
    FILE *f = fopen("/proc/self/io", "r");
    assert_non_null(f);
    text = calloc(1, 4096);
    bytes = fread(text, 1, 4095, f);
    fclose(f);
    at = bytes ? strstr(text, "rchar: ") : NULL;
    int64_t n = at ? atoll(at + strlen("rchar: ")) : -1;
    free(text);
    return n;
}

static void test_cut_reads_the_end_alone(void **state)
{
    (void)state;
    lg_records *r = NULL;
    write_lines(1, 200000, "");
    int64_t before = bytes_read();
    assert_int_equal(lg_records_open(scratch_path(""), 199990, &r), 0);
    int64_t read = bytes_read() - before;
    lg_records_close(&r);
    if (before >= 0) assert_in_range(read, 1, 32 << 10); /* of 6.5 MB */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_loss_parts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ledger_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_written_at_the_end, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ledger_tries_at_once, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cut_with_the_first_record, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cut_strange_lines, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ledger_is_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cut_reads_the_end_alone, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
