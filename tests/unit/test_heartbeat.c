/* Long work beats while it makes progress: on a machine where everything takes minutes (tests/sim/slow.h)
 * no heartbeat is older than supervisor.hang_s, so lgsup kills nobody; a call that hangs gives none. */
#include "base/clock.h"
#include "base/fs.h"
#include "base/heartbeat.h"
#include "kernels/ops.h"
#include "stages/ckpt/checkpoint.h"
#include "stages/io/safetensors.h"
#include "stages/io/source.h"
#include "stages/roles.h"
#include "tests/sim/slow.h"
#include "tests/unit/ckpt_world.h"
#include "tests/unit/scratch.h"
#include "tests/unit/source_fixture.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define HANG_NS (120 * LG_S_NS) /* the default of supervisor.hang_s and ready_s */
enum { DISK = 200000 };         /* bytes a second */

static void assert_beats(const char *what)
{
    printf("%s: %.0f s, the oldest heartbeat %.0f s\n", what, (double)slow_elapsed_ns() / LG_S_NS,
           (double)slow_oldest_ns() / LG_S_NS);
    assert_true(slow_elapsed_ns() > 2 * HANG_NS); /* else nothing is shown */
    assert_true(slow_oldest_ns() <= HANG_NS);
    slow_end();
}

/* ---- the checkpoint writer, and who reads what it has written ---- */

static struct ckpt_world w;
static lg_stage st;

/* 3 M parameters: 13 MB of weights, as much of EMA, 39 MB for the optimizer. */
static void open_writer(void)
{
    ckpt_world_open(
        &w, &(struct ckpt_world_spec){.device = "host", .ranks = 1, .hidden = 256, .depth = 3});
    assert_int_equal(ckpt_writer_open(&w, &st), 0);
    lg_stage_beats(&st);
    ckpt_world_play(&w, 3);
    lg_board_beat(st.row, LG_PHASE_WORKING);
}

static void stage_state(void)
{
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED); /* the moments */
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_int_equal(ckpt_world_staged(&w), 3);
    lg_board_beat(st.row, LG_PHASE_WORKING);
}

static void close_writer(void)
{
    lg_heartbeat_set(NULL, NULL);
    ckpt_writer_close(&st);
    ckpt_world_close(&w);
}

static void test_state_is_staged(void **state)
{
    (void)state;
    open_writer();
    slow_begin(&(struct slow_machine){.copied_per_s = DISK}, st.row);
    stage_state();
    assert_true(slow_elapsed_ns() > 2 * HANG_NS);
    assert_true(slow_oldest_ns() <= HANG_NS);
    slow_end();
    close_writer();
}

static void test_checkpoint_is_written(void **state)
{
    (void)state;
    open_writer();
    stage_state();
    slow_begin(&(struct slow_machine){.bytes_per_s = DISK}, st.row);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_beats("writing a checkpoint");
    assert_int_equal(ckpt_world_published(&w), 3);
    assert_int_equal(atomic_load(&st.row->phase), LG_PHASE_WORKING);
    const char *wrong = ckpt_world_wrong(&w, 3);
    if (wrong) fail_msg("%s", wrong);
    close_writer();
}

/* One write that does not come back is a hang, whatever came before it. */
static void test_write_that_hangs(void **state)
{
    (void)state;
    open_writer();
    stage_state();
    slow_begin(&(struct slow_machine){.hangs_ns = 2 * HANG_NS}, st.row);
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_true(slow_oldest_ns() >= 2 * HANG_NS);
    slow_end();
    close_writer();
}

static void test_checkpoint_is_read(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES], ema[LG_PATH_BYTES];
    const lg_params *p;
    open_writer();
    stage_state();
    assert_int_equal(lg_ckpt_def.step(&st), LG_STEP_WORKED);
    assert_int_equal(lg_path(dir, "%s/checkpoints/world_step3", w.run.dir), 0);
    assert_int_equal(lg_path(ema, "%s/ema", dir), 0);
    p = &w.trainer->params;
    float *v = calloc(3 * p->count, sizeof *v);
    lg_board_beat(st.row, LG_PHASE_WORKING);
    slow_begin(&(struct slow_machine){.bytes_per_s = DISK / 4, .mapped = true}, st.row);
    assert_int_equal(
        lg_checkpoint_read_optimizer(dir, p, 0, p->count, v, v + p->count, v + 2 * p->count), 0);
    assert_beats("reading weights and moments");
    lg_board_beat(st.row, LG_PHASE_WORKING);
    slow_begin(&(struct slow_machine){.bytes_per_s = DISK / 4, .mapped = true}, st.row);
    assert_int_equal(lg_denoiser_load(&w.trainer->net, ema, v), 0);
    assert_beats("reading the EMA");
    free(v);
    close_writer();
}

/* ---- everything else, in the row of nobody in particular ---- */

static struct shm_fixture f;
static struct lg_board_row *row;

static void beat(void *arg)
{
    (void)arg;
    lg_board_beat_on(row);
}

static int setup(void **state)
{
    source_setup(state);
    shm_fixture_open(&f, 1);
    shm_fixture_start_keeper(&f);
    row = lg_board_row(f.board, LG_ROLE_loader, 0);
    lg_board_beat(row, LG_PHASE_SETUP);
    lg_heartbeat_set(beat, NULL);
    return 0;
}

static int teardown(void **state)
{
    slow_end();
    lg_heartbeat_set(NULL, NULL);
    shm_fixture_close(&f);
    return source_teardown(state);
}

static void test_large_tensor(void **state)
{
    (void)state;
    enum { COUNT = 8 << 20 };
    const lg_dtype type[] = {LG_F32, LG_F16, LG_BF16};
    float *v = calloc(COUNT, sizeof *v);
    for (size_t i = 0; i < LG_ARRAY_LEN(type); i++) {
        lg_st_writer *out;
        lg_st_file *in;
        void *data;
        size_t bytes;
        assert_int_equal(lg_st_writer_open_memory(&out), 0);
        assert_int_equal(lg_st_writer_declare(out, "t", type[i], 1, (int64_t[]){COUNT}), 0);
        assert_int_equal(lg_st_writer_data(out, v, COUNT * lg_dtype_bytes(type[i])), 0);
        assert_int_equal(lg_st_writer_finish_memory(&out, &data, &bytes), 0);
        assert_int_equal(lg_st_open_memory("t", data, bytes, &in), 0);
        lg_board_beat(row, LG_PHASE_SETUP);
        slow_begin(&(struct slow_machine){.bytes_per_s = DISK / 4, .mapped = true}, row);
        assert_int_equal(lg_st_read_f32(lg_st_find(in, "t"), v, 0, COUNT), 0);
        if (type[i] == LG_F32) assert_beats("reading one large tensor"); /* the others: no memcpy */
        slow_end();
        lg_st_close(&in);
        free(data);
    }
    free(v);
}

static void test_files(void **state)
{
    (void)state;
    enum { BYTES = 30 << 20, FILES = 5 };
    char name[32], *data = calloc(1, BYTES);
    size_t bytes;
    assert_int_equal(lg_publish_file(scratch_path("large"), data, BYTES), 0);
    free(data);
    slow_begin(&(struct slow_machine){.bytes_per_s = DISK / 2}, row);
    assert_int_equal(lg_read_file(scratch_path("large"), BYTES, &data, &bytes), 0);
    assert_beats("reading a file");
    free(data);
    lg_board_beat(row, LG_PHASE_SETUP);
    slow_begin(&(struct slow_machine){.call_ns = 70 * LG_S_NS}, row);
    lg_mkdirs(scratch_path("many"));
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "many/%d", i);
        assert_int_equal(lg_publish_file(scratch_path(name), name, sizeof name), 0);
    }
    assert_beats("small files on a slow disk");
    lg_board_beat(row, LG_PHASE_SETUP);
    slow_begin(&(struct slow_machine){.call_ns = 70 * LG_S_NS}, row);
    assert_int_equal(lg_remove_tree(scratch_path("many")), 0);
    assert_beats("removing a folder");
}

/* Nothing is copied: only the time counts. */
static void test_upload(void **state)
{
    (void)state;
    float nothing[1];
    lg_device *d;
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    slow_begin(&(struct slow_machine){.copied_per_s = 1000000}, row);
    assert_int_equal(lg_stage_upload(d, nothing, nothing, (size_t)80 << 20), 0);
    assert_beats("bringing weights to a device");
    lg_device_close(&d);
}

static void test_indexing(void **state)
{
    (void)state;
    enum { FILES = 40, BYTES = 20000 };
    char name[32], *text = malloc(BYTES + 1);
    memset(text, 'x', BYTES);
    text[BYTES] = 0;
    lg_tar_writer *tar = tar_open("a.tar");
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "folder/%03d.txt", i);
        scratch_write(name, "a caption");
        snprintf(name, sizeof name, "%03d.bin", i); /* larger than what is read at a time */
        put_text(tar, name, text);
    }
    put_png(tar, "000.png", 7);
    write_png("folder/000.png", 7);
    assert_int_equal(lg_tar_writer_finish(&tar), 0);
    free(text);
    const char *const data[] = {"folder", "a.tar"};
    for (size_t i = 0; i < LG_ARRAY_LEN(data); i++) {
        lg_board_beat(row, LG_PHASE_SETUP);
        slow_begin(&(struct slow_machine){.call_ns = 10 * LG_S_NS}, row);
        lg_source *s = open_source(scratch_path(data[i]));
        assert_beats(data[i]);
        lg_source_close(&s);
    }
}

static void test_memory_is_taken(void **state)
{
    (void)state;
    lg_region *r = NULL;
    struct lg_region_spec spec = {.keeper = f.keeper,
                                  .name = "trainer/0/state/a",
                                  .bytes = (size_t)1 << 30,
                                  .run_id = f.board->s->preamble.run_id};
    slow_begin(&(struct slow_machine){.pages_per_s = 4000000}, row);
    assert_int_equal(lg_region_open(&spec, &r), 0);
    assert_beats("taking memory");
    lg_region_close(&r);
}

static void test_initial_values(void **state)
{
    (void)state;
    lg_params t = {0};
    lg_params_add(
        &t,
        &(struct lg_param){
            .name = "w", .rank = 2, .dim = {4096, 4096}, .init = LG_INIT_NORMAL, .init_scale = 1});
    float *v = calloc(t.count, sizeof *v);
    slow_begin(&(struct slow_machine){.values_per_s = 50000}, row);
    lg_params_init(&t, 1, v, 0, t.count);
    assert_beats("drawing initial values");
    free(v);
    lg_params_free(&t);
}

/* In pieces or not, whatever their bounds: the same values. */
static void test_pieces_change_nothing(void **state)
{
    (void)state;
    enum { COUNT = (4 << 20) + 1003 };
    lg_params t = {0};
    struct lg_param normal = {
        .name = "n", .rank = 1, .dim = {COUNT}, .init = LG_INIT_NORMAL, .init_scale = 2};
    struct lg_param uniform = normal;
    uniform.name[0] = 'u';
    uniform.init = LG_INIT_UNIFORM;
    lg_params_add(&t, &normal);
    lg_params_add(&t, &uniform);
    float *all = calloc(t.count, sizeof *all), *part = calloc(t.count, sizeof *part);
    lg_params_init(&t, 5, all, 0, t.count);
    for (size_t at = 0, n; at < t.count; at += n) { /* cut elsewhere */
        n = LG_MIN((size_t)1999993, t.count - at);
        lg_params_init(&t, 5, part + at, at, n);
    }
    assert_memory_equal(all, part, t.count * sizeof *all);
    free(all);
    free(part);
    lg_params_free(&t);
}

static int g_beats;

static void count(void *arg)
{
    (void)arg;
    g_beats++;
}

/* Whatever a net does, it does by operations; so a stage's first work on a slow machine beats, too. */
static void test_operations(void **state)
{
    (void)state;
    enum { N = 64 };
    float x[N] = {0};
    lg_device *d;
    lg_stream *s[2];
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    assert_int_equal(lg_stream_open(d, &s[0]), 0);
    assert_int_equal(lg_stream_open_dry(d, &s[1]), 0);
    for (int dry = 0; dry < 2; dry++) {
        g_beats = 0;
        lg_heartbeat_set(count, NULL);
        lg_act_forward(s[dry], &(struct lg_act_forward_args){.x = lg_t1(x, LG_F32, N),
                                                             .y = lg_t1(x, LG_F32, N),
                                                             .act = LG_ACT_SILU});
        assert_int_equal(g_beats, 1);
        lg_stream_close(&s[dry]);
    }
    lg_device_close(&d);
}

/* ---- waiting ---- */

static int load_nothing(lg_stage *stage, size_t first, size_t count, float *ret, void *arg)
{
    (void)stage, (void)first, (void)count, (void)ret, (void)arg;
    fail_msg("another has filled it");
    return 0;
}

static void filled(void *arg)
{
    lg_region_fill_end(arg);
}

/* Another fills a region, and takes as long as it takes: who waits beats, as one that waits. */
static void test_another_fills(void **state)
{
    (void)state;
    lg_region *r = NULL;
    static lg_stage waiter;
    struct lg_region_spec spec = {.keeper = f.keeper,
                                  .name = "text/0/weights",
                                  .bytes = 4096,
                                  .run_id = f.board->s->preamble.run_id};
    lg_incarnation other = shm_fixture_join(f.board, LG_ROLE_text, 1);
    waiter = (lg_stage){.role = LG_ROLE_text, .board = f.board, .plan = f.plan};
    waiter.me = shm_fixture_join(f.board, LG_ROLE_text, 0);
    waiter.row = lg_board_row(f.board, LG_ROLE_text, 0);
    lg_stage_beats(&waiter);
    assert_int_equal(lg_region_open(&spec, &r), 0);
    assert_int_equal(lg_region_fill_begin(r, f.board, other), 1);
    slow_begin(&(struct slow_machine){.call_ns = LG_S_NS}, waiter.row);
    slow_at(3000 * LG_S_NS, filled, r);
    assert_int_equal(
        lg_stage_fill(&waiter, r, &(struct lg_stage_weights){.count = 1, .load = load_nothing}), 0);
    assert_beats("waiting for the one that fills");
    assert_int_equal(atomic_load(&waiter.row->phase), LG_PHASE_SETUP);
    lg_region_close(&r);
}

/* Another thread's work is not this one's heartbeat; tools have none. */
static void test_nobody_listens(void **state)
{
    (void)state;
    g_beats = 0;
    lg_heartbeat_set(count, NULL);
    lg_heartbeat();
    lg_heartbeat_set(NULL, NULL);
    lg_heartbeat();
    assert_int_equal(g_beats, 1);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_state_is_staged),
        cmocka_unit_test(test_checkpoint_is_written),
        cmocka_unit_test(test_write_that_hangs),
        cmocka_unit_test(test_checkpoint_is_read),
        TEST(test_large_tensor),
        TEST(test_files),
        TEST(test_upload),
        TEST(test_indexing),
        TEST(test_memory_is_taken),
        TEST(test_initial_values),
        TEST(test_pieces_change_nothing),
        TEST(test_operations),
        TEST(test_another_fills),
        TEST(test_nobody_listens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
