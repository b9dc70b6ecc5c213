/* What `lgsup top` shows, from readings made by hand; reading metrics.jsonl; the GPU library by name
 * (this program plays it). The command itself on living processes: test_supervise_views. */
#include "base/check.h"
#include "base/clock.h"
#include "supervisor/views/metrics.h"
#include "supervisor/views/top.h"
#include "tests/unit/scratch.h"
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* ---- the library, played by this program (linked with -rdynamic) ---- */

#define EXPORT __attribute__((visibility("default")))
EXPORT int nvmlInit_v2(void);
EXPORT int nvmlDeviceGetCount_v2(unsigned int *);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int, void **);
EXPORT int nvmlDeviceGetName(void *, char *, unsigned int);
EXPORT int nvmlDeviceGetMemoryInfo(void *, unsigned long long[3]);
EXPORT int nvmlDeviceGetUtilizationRates(void *, unsigned int[2]);
static int g_devices[3];

int nvmlInit_v2(void)
{
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned int *ret)
{
    *ret = 3;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **ret)
{
    *ret = &g_devices[i];
    return i == 1 ? 15 : 0; /* the second one is lost */
}
int nvmlDeviceGetName(void *d, char *ret, unsigned int bytes)
{
    snprintf(ret, bytes, "Pretended %d", (int)((int *)d - g_devices));
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long ret[3])
{
    ret[0] = 80ull << 30, ret[1] = 60ull << 30, ret[2] = 20ull << 30;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *d, unsigned int ret[2])
{
    ret[0] = 97, ret[1] = 40;
    return d == &g_devices[2] ? 3 : 0; /* not supported there */
}

/* ---- tests ---- */

static void test_gpus(void **state)
{
    (void)state;
    struct lg_gpu gpu[LG_NVML_MAX];
    assert_int_equal(lg_gpus_read("", gpu), 2);
    assert_string_equal(gpu[0].name, "Pretended 0");
    assert_string_equal(gpu[1].name, "Pretended 2");
    assert_true(gpu[0].total_bytes == 80ull << 30 && gpu[0].used_bytes == 20ull << 30);
    assert_int_equal(gpu[0].busy_percent, 97);
    assert_int_equal(gpu[1].busy_percent, -1);
}

static char *lines_of(int from, int to, const char *tail)
{
    char *text = malloc((size_t)(to - from + 1) * 64 + strlen(tail) + 1);
    size_t at = 0;
    LG_ASSERT(text);
    for (int s = from; s <= to; s++)
        at += (size_t)sprintf(text + at, "{\"step\": %d, \"loss\": %s}\n", s,
                              s % 10 == 3 ? "null" : "0.5");
    strcpy(text + at, tail);
    return text;
}

static void write_lines(int from, int to, const char *tail)
{
    char *text = lines_of(from, to, tail);
    scratch_write("run/metrics.jsonl", text);
    free(text);
}

static void test_metrics_tail(void **state)
{
    (void)state;
    static struct lg_metric rows[50];
    char run[LG_PATH_BYTES];
    snprintf(run, sizeof run, "%s", scratch_path("run"));
    assert_int_equal(lg_metrics_tail(run, rows, 50), 0);
    scratch_write("run/metrics.jsonl", "");
    assert_int_equal(lg_metrics_tail(run, rows, 50), 0);
    write_lines(1, 30, "{\"step\": 31, \"lo"); /* half a line does not count */
    assert_int_equal(lg_metrics_tail(run, rows, 50), 30);
    assert_true(rows[0].step == 1 && rows[29].step == 30);
    assert_true(isnan(rows[2].loss) && rows[3].loss == 0.5);
    write_lines(1, 40000, "");
    assert_int_equal(lg_metrics_tail(run, rows, 50), 50);
    assert_true(rows[0].step == 39951 && rows[49].step == 40000);
}

static void expect_steps(uint64_t after, uint64_t last)
{
    lg_metrics m;
    struct lg_metric row;
    assert_int_equal(lg_metrics_open(scratch_path("run"), after, &m), 0);
    for (uint64_t s = after + 1; s <= last; s++) {
        assert_true(lg_metrics_next(&m, last, &row));
        assert_int_equal(row.step, s);
    }
    assert_false(lg_metrics_next(&m, last, &row));
    lg_metrics_close(&m);
}

static void test_metrics_from_a_step(void **state)
{
    (void)state;
    lg_metrics m;
    struct lg_metric row;
    assert_int_equal(lg_metrics_open(scratch_path("run"), 0, &m), LG_ERR_NOTFOUND);
    write_lines(1, 3000, "");
    for (uint64_t after = 0; after < 3000; after += after < 20 || after > 2980 ? 1 : 117)
        expect_steps(after, 3000);
    expect_steps(3000, 3000);
    expect_steps(10, 20);
    write_lines(81, 90, ""); /* a run that was continued in another folder */
    assert_int_equal(lg_metrics_open(scratch_path("run"), 0, &m), 0);
    assert_true(lg_metrics_next(&m, 90, &row) && row.step == 81);
    lg_metrics_close(&m);
}

/* What rank 0 does after its death: the line of a step that was not committed is cut off and written
 * again. A reader that stands before it sees the new one. */
static void test_metrics_grow(void **state)
{
    (void)state;
    lg_metrics m;
    struct lg_metric row;
    write_lines(1, 3, "{\"step\": 4, \"loss\": 7}\n");
    assert_int_equal(lg_metrics_open(scratch_path("run"), 0, &m), 0);
    for (int s = 1; s <= 3; s++) assert_true(lg_metrics_next(&m, 3, &row));
    assert_false(lg_metrics_next(&m, 3, &row));
    FILE *f = fopen(scratch_path("run/metrics.jsonl"), "r+");
    char *text = lines_of(1, 3, "");
    fseek(f, (long)strlen(text), SEEK_SET);
    fputs("{\"step\": 4, \"loss\": 8}\n{\"step\": 5, \"lo", f);
    fclose(f);
    free(text);
    assert_true(lg_metrics_next(&m, 5, &row) && row.step == 4 && row.loss == 8);
    assert_false(lg_metrics_next(&m, 5, &row));
    f = fopen(scratch_path("run/metrics.jsonl"), "a");
    fputs("ss\": 9}\nnonsense\n{\"step\": 6, \"loss\": 10}\n", f);
    fclose(f);
    assert_true(lg_metrics_next(&m, 6, &row) && row.step == 5 && row.loss == 9);
    assert_true(lg_metrics_next(&m, 6, &row) && row.step == 6 && row.loss == 10);
    lg_metrics_close(&m);
}

static struct lg_top *reading(void)
{
    struct lg_top *t = calloc(1, sizeof *t);
    LG_ASSERT(t);
    t->has_board = true;
    t->batch = 16;
    t->status = (struct lg_status){.job = "j", .state = "running", .step = 40, .max_steps = 100};
    for (int i = 0; i < 40; i++)
        t->metric[t->n_metrics++] = (struct lg_metric){.step = (uint64_t)i + 1,
                                                       .loss = i == 39 ? 1 : 2,
                                                       .grad_norm = 1.5,
                                                       .lr = 1e-3,
                                                       .samples_per_s = i ? 160 : 0,
                                                       .data_wait_s = 0.02,
                                                       .ckpt_wait_s = i == 39 ? 0.2 : 0};
    t->status.instance[0] = (struct lg_status_instance){.role = LG_ROLE_vae,
                                                        .index = 1,
                                                        .pid = 4711,
                                                        .state = "setup",
                                                        .beat_age_ns = 1500 * LG_MS_NS};
    t->status.n_instances = 1;
    t->row[0] = lg_row(LG_ROLE_vae, 1);
    t->process[t->row[0]] = (struct lg_top_process){
        .is = t->status.instance[0],
        .private_bytes = 512u << 20,
        .shared_bytes = 5u << 20,
        .n_points = 2,
        .point = {
            {.at_ns = 0, .samples = 7},
            {.at_ns = 4 * LG_S_NS, .samples = 107, .busy_ns = 3 * LG_S_NS, .cpu_ns = 2 * LG_S_NS}}};
    return t;
}

static lg_top_line g_line[LG_TOP_LINES_MAX];
static int g_lines;

static void make_text(const struct lg_top *t, bool utf8)
{
    int heading;
    g_lines = lg_top_text(t, &(struct lg_top_look){.columns = 100, .utf8 = utf8}, g_line, &heading);
    assert_true(heading > 0 && heading < g_lines);
    assert_memory_equal(g_line[heading], "process", 7);
}

static void assert_line(const char *part)
{
    for (int i = 0; i < g_lines; i++)
        if (strstr(g_line[i], part)) return;
    for (int i = 0; i < g_lines; i++) fprintf(stderr, "%s\n", g_line[i]);
    fail_msg("no line has \"%s\"", part);
}

static void test_text(void **state)
{
    (void)state;
    struct lg_top *t = reading();
    make_text(t, false);
    assert_line("j: running  step 40/100  ETA 6.0 s");
    assert_line("loss 1.0000  gradient norm 1.5  lr 0.001  160.0 samples/s");
    t->metric[t->n_metrics - 1].has_vb = true;
    t->metric[t->n_metrics - 1].loss_vb = 0.25;
    make_text(t, false);
    assert_line(
        "loss 1.0000 (mse 0.7500, vb 0.2500)  gradient norm 1.5  lr 0.001  160.0 samples/s");
    assert_line("100.0 ms = data wait 20.0 ms (20%) + compute 70.0 ms (70%) + checkpoint wait "
                "10.0 ms (10%)  mean of 20");
    assert_line("#_  1.0000 to 2.0000, steps 1 to 40");
    assert_line("not readable");
    assert_line("vae.1           4711  setup           0       25.0    75%    50%    512 MiB    "
                "5.0 MiB     1.5 s");
    make_text(t, true);
    assert_line("\u2588\u2581  1.0000 to 2.0000");
    free(t);
}

/* Columns begin where those of the longest name do. */
static void test_text_of_long_names(void **state)
{
    (void)state;
    struct lg_top *t = reading();
    struct lg_status_instance *p = &t->status.instance[0];
    assert_int_equal(lg_status_columns(&t->status, 11), 11);
    p->role = LG_ROLE_text_clip_l, p->index = 12;
    t->process[t->row[0]].is = *p;
    assert_int_equal(lg_status_columns(&t->status, 11), 14);
    make_text(t, false);
    assert_line("process             pid  state");
    assert_line("text.clip_l.12     4711  setup");
    free(t);
}

static void test_text_of_odd_readings(void **state)
{
    (void)state;
    struct lg_top *t = reading();
    t->n_metrics = 0;
    t->process[t->row[0]].n_points = 1;
    make_text(t, true);
    assert_line("step time   not known yet");
    assert_line("vae.1           4711  setup           0          -      -      -");
    for (int i = 0; i < 3; i++) /* losses that are not finite */
        t->metric[t->n_metrics++] = (struct lg_metric){.step = 1, .loss = NAN, .grad_norm = NAN};
    make_text(t, true);
    assert_line("loss        xxx  nan to nan");
    struct lg_slot slot = {0};
    t->slot = &slot;
    t->window = (struct lg_window_geometry){.slots = 64,
                                            .chunk = {[LG_FIELD_SOURCE] = 8, [LG_FIELD_TEXT] = 8}};
    t->ready[LG_FIELD_SOURCE] = 64;
    t->ready[LG_FIELD_TEXT] = 16;
    t->n_gpus = 1;
    t->gpu[0] = (struct lg_gpu){
        .name = "G", .used_bytes = 1 << 30, .total_bytes = 80ull << 30, .busy_percent = 97};
    snprintf(t->event[t->n_events++], sizeof t->event[0], "something happened");
    make_text(t, false);
    assert_line("window      source 64/64 [##########]  text 16/64 [##        ]  batch 16");
    assert_line("gpu 0       G  busy 97%  memory 1.0 GiB of 80.0 GiB");
    assert_line("something happened");
    free(t);
}

static void assert_step_time(double samples_per_s, const char *says)
{
    struct lg_top *t = reading();
    t->metric[0] = (struct lg_metric){.step = 40, .samples_per_s = samples_per_s, .loss = 1};
    t->metric[1] =
        (struct lg_metric){.step = 41, .samples_per_s = 1, .loss = 1}; /* not committed */
    t->n_metrics = 2;
    make_text(t, false);
    assert_line(says);
    free(t);
}

/* Figures of every size stay readable, and none is made up where one is missing. */
static void test_text_of_extremes(void **state)
{
    (void)state;
    assert_step_time(16.0 / 90, "step time   1m30s = ");
    assert_step_time(16.0 / 7260, "step time   2h01m = ");
    assert_step_time(16.0 / 1e9, "step time   - = ");
    struct lg_top *t = reading();
    struct lg_top_process *p = &t->process[t->row[0]];
    t->status.state = "parked";
    t->status.step = 120; /* further than asked for: no time is left */
    snprintf(t->status.cause, sizeof t->status.cause, "a lens is missing");
    for (int i = 0; i < t->n_metrics; i++) {
        t->metric[i].data_wait_s = 7; /* longer than the step */
        t->metric[i].loss = i % 2 ? (double)NAN : 1;
    }
    p->is.role = LG_ROLE_keeper;
    p->is.beat_age_ns = -1;
    p->private_bytes = UINT64_C(5000) << 40;
    p->point[1].cpu_ns = 0;
    p->point[0].cpu_ns = 1; /* counted backwards: not known */
    t->n_gpus = 1;
    t->gpu[0] = (struct lg_gpu){.name = "G", .busy_percent = -1};
    make_text(t, false);
    assert_line("cause       a lens is missing");
    assert_line(
        "100.0 ms = data wait 100.0 ms (100%) + compute 0.0 ms (0%) + checkpoint wait 0.0 ms");
    assert_line("gpu 0       G  busy -  memory 0 B of 0 B");
    assert_line("keeper.1        4711  setup           0          -      -      -   5000 TiB");
    snprintf(t->status.cause, sizeof t->status.cause, "void: \x1b[31m\nstate done.png \xc3\xa9");
    make_text(t, false);
    assert_line("cause       void: \\x1b[31m\\x0astate done.png \xc3\xa9");
    t->status.state = "running";
    make_text(t, false);
    for (int i = 0; i < g_lines; i++) assert_null(strstr(g_line[i], "ETA"));
    p->point[1] = p->point[0]; /* two readings at once */
    p->is.role = LG_ROLE_vae;
    p->is.pid = 0;
    make_text(t, false);
    assert_line("vae.1              -  setup           0          -      -      -          -");
    t->has_board = false; /* after a restart of the machine */
    make_text(t, false);
    for (int i = 0; i < g_lines; i++) assert_null(strstr(g_line[i], "vae.1"));
    free(t);
}

/* A screen has an end, however many processes there are. */
static void test_text_that_is_too_long(void **state)
{
    (void)state;
    struct lg_top *t = reading();
    t->n_gpus = LG_NVML_MAX;
    for (int i = 0; i < LG_STATUS_INSTANCES_MAX; i++) {
        t->status.instance[i] = t->status.instance[0];
        t->row[i] = t->row[0];
    }
    t->status.n_instances = LG_STATUS_INSTANCES_MAX;
    for (t->n_events = 0; t->n_events < LG_TOP_EVENTS; t->n_events++)
        snprintf(t->event[t->n_events], sizeof t->event[0], "event %d", t->n_events);
    make_text(t, false);
    assert_true(g_lines <= LG_TOP_LINES_MAX);
    free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpus),
        cmocka_unit_test_setup_teardown(test_metrics_tail, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_metrics_from_a_step, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_metrics_grow, scratch_setup, scratch_teardown),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_text_of_long_names),
        cmocka_unit_test(test_text_of_odd_readings),
        cmocka_unit_test(test_text_of_extremes),
        cmocka_unit_test(test_text_that_is_too_long),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
