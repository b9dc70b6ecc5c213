/* What lies in a checkpoint's folder: reading back what was written, the shape of what is damaged or
 * somebody else's, and which checkpoints retention may remove. */
#include "config/manifest.h"
#include "stages/ckpt/publish.h"
#include "stages/ckpt/retention.h"
#include "stages/io/safetensors.h"
#include "tests/unit/scratch.h"
#include "tests/unit/seeds.h"
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const struct lg_denoiser_config net = {.kind = LG_DIT,
                                              .channels = 1,
                                              .height = 2,
                                              .width = 2,
                                              .patch = 1,
                                              .hidden = 4,
                                              .depth = 1,
                                              .heads = 1,
                                              .mlp_ratio = 4,
                                              .num_classes = 1,
                                              .norm_eps = 1e-6};
static lg_params params;
static float *values, *got; /* w, m, v, ema */
static lg_manifest m;
static uint64_t g_lineage;
static const char *g_writer;

static int setup(void **state)
{
    (void)state;
    scratch_make();
    g_lineage = 0x0a;
    LG_ASSERT(lg_denoiser_params(&net, &params) == 0);
    values = calloc(4 * params.count, sizeof *values);
    got = calloc(4 * params.count, sizeof *got);
    LG_ASSERT(values && got);
    for (size_t i = 0; i < 4 * params.count; i++) values[i] = (float)(i * 3 % 4093);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    free(values);
    free(got);
    lg_params_free(&params);
    scratch_remove();
    lg_err_clear();
    return 0;
}

/* Are elements [first, first + count) of array k what was written, as far as they belong to parameters
 * (between these the flat buffer has gaps)? */
static bool are_read(const float *part, size_t k, size_t first, size_t count)
{
    for (int p = 0; p < params.n; p++) {
        size_t from = LG_MAX(params.p[p].offset, first);
        size_t to = LG_MIN(params.p[p].offset + params.p[p].count, first + count);
        for (size_t i = from; i < to; i++)
            if (!(part[i - first] == values[k * params.count + i])) return false;
    }
    return true;
}

static int publish(uint64_t step, char ret_dir[LG_PATH_BYTES])
{
    size_t n = params.count;
    m = (lg_manifest){.name = "files",
                      .step = step,
                      .lineage = g_lineage,
                      .isa = "sse2",
                      .ranks = 1,
                      .threads = 1};
    struct lg_publishing p = {
        .run_dir = scratch_path("run"),
        .writer = g_writer,
        .contents = {.net = &net,
                     .params = &params,
                     .state = {.w = values,
                               .moments = {.m = values + n, .v = values + 2 * n},
                               .ema = values + 3 * n}}};
    return lg_checkpoint_publish(&p, &m, ret_dir);
}

static const char *place_of(uint64_t step)
{
    char name[64];
    snprintf(name, sizeof name, "run/checkpoints/files_step%" PRIu64, step);
    return scratch_path(name);
}

static void assert_says(int rc, int code, const char *words)
{
    assert_int_equal(rc, code);
    if (!strstr(lg_err_message(), words)) fail_msg("no \"%s\" in: %s", words, lg_err_message());
    lg_err_clear();
}

/* A rank reads its shard and nothing else, wherever the cut falls (`make check-all`: at more places); what it does not
 * want it may leave. */
static void test_any_part_is_read(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES];
    size_t n = params.count;
    assert_int_equal(publish(1, dir), 0);
    const size_t next = checks_everything() ? 7 : 17, longer = checks_everything() ? 61 : 157;
    for (size_t first = 0; first < n; first += next)
        for (size_t count = 1; first + count <= n; count += longer) {
            for (size_t i = 0; i < 3 * n; i++) got[i] = -1;
            assert_int_equal(
                lg_checkpoint_read_optimizer(dir, &params, first, count, got, got + n, got + 2 * n),
                0);
            for (size_t k = 0; k < 3; k++) {
                assert_true(are_read(got + k * n, k, first, count));
                if (count < n) assert_true(got[k * n + count] == -1);
            }
        }
    assert_int_equal(lg_checkpoint_read_optimizer(dir, &params, 0, n, NULL, got, NULL), 0);
    assert_true(are_read(got, 1, 0, n));
}

/* ---- moments of 8 bits ---- */

/* Products of which the second part begins in the middle of a block, small tensors, a whole number of blocks and not. */
static lg_params table_in_blocks(bool in_blocks)
{
    lg_params t = {.in_blocks = in_blocks};
    lg_params_begin_unit(&t, "one");
    lg_params_add(&t, &(struct lg_param){.name = "q", .rank = 2, .dim = {50, 90}});
    lg_params_add_packed(&t, &(struct lg_param){.name = "k", .rank = 2, .dim = {50, 90}});
    lg_params_add(&t, &(struct lg_param){.name = "bias", .rank = 1, .dim = {100}});
    lg_params_begin_unit(&t, "two");
    lg_params_add(&t, &(struct lg_param){.name = "small", .rank = 1, .dim = {4095}});
    lg_params_add(&t, &(struct lg_param){.name = "large", .rank = 1, .dim = {4096}});
    return t;
}

struct moments {
    lg_params t;
    lg_moments_layout l;
    char *memory;
    struct lg_chunk c;
};

static struct moments moments_of_table(lg_params t)
{
    struct moments r = {.t = t};
    r.l = lg_moments_layout_of(&r.t, 0, 1);
    r.memory = calloc(1, lg_moments_whole_bytes(&r.l));
    LG_ASSERT(r.memory);
    r.c = lg_moments_whole(&r.l, r.memory);
    lg_moments_clear(&r.c);
    return r;
}

static struct moments moments_of(bool in_blocks)
{
    return moments_of_table(table_in_blocks(in_blocks));
}

static void free_moments(struct moments *r)
{
    lg_params_free(&r->t);
    lg_moments_layout_free(&r->l);
    free(r->memory);
}

/* Anything, but nothing in gaps, which a file does not have. */
static void fill_moments(struct moments *r)
{
    for (int i = 0; i < r->t.n; i++) {
        const struct lg_param *p = &r->t.p[i];
        const size_t full = lg_moments_full_before(&r->l, p->offset);
        for (size_t e = 0; e < p->count; e++) {
            const size_t at = p->offset + e;
            if (!lg_params_is_coded(&r->t, i)) {
                r->c.m[full + e] = (float)at - 5000;
                r->c.v[full + e] = (float)at;
                continue;
            }
            r->c.m_code[at] = (uint8_t)(at * 7 % 251);
            r->c.v_code[at] = (uint8_t)(at * 11 % 253);
            r->c.m_max[at / LG_ADAMW8_BLOCK] = (float)(1 + at / LG_ADAMW8_BLOCK);
            r->c.v_max[at / LG_ADAMW8_BLOCK] = (float)(100 + at / LG_ADAMW8_BLOCK);
        }
    }
}

static void write_moments(const struct moments *r)
{
    static const float weights[20480];
    lg_st_writer *w;
    const struct lg_snapshot s = {
        .w = weights, .ema = weights, .moments = r->c, .layout = r->t.in_blocks ? &r->l : NULL};
    LG_ASSERT(r->t.count <= LG_ARRAY_LEN(weights));
    assert_int_equal(lg_st_writer_open(scratch_path("optimizer.safetensors"), &w), 0);
    assert_int_equal(lg_checkpoint_write_optimizer(w, &r->t, &s), 0);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
}

/* What any number of ranks read of it, together. */
static void read_shards(struct moments *to, int shards)
{
    for (int shard = 0; shard < shards; shard++)
        for (int u = 0; u < to->t.n_units; u++) {
            const struct lg_piece p = lg_shard_piece(&to->t, u, shard, shards);
            if (!p.count) continue;
            const struct lg_chunk c = lg_moments_part(&to->l, &to->c, p.first, p.count);
            assert_int_equal(
                lg_checkpoint_read_moments(scratch_path(""), &to->t, p.first, p.count, &c), 0);
        }
}

/* The bytes come back, however they are cut. */
static void test_codes(void **state)
{
    (void)state;
    struct moments was = moments_of(true);
    fill_moments(&was);
    write_moments(&was);
    for (int shards = 1; shards <= 4; shards++) {
        struct moments is = moments_of(true);
        memset(is.memory, 0x55, lg_moments_whole_bytes(&is.l));
        read_shards(&is, shards);
        assert_memory_equal(is.memory, was.memory, lg_moments_whole_bytes(&is.l));
        free_moments(&is);
    }
    free_moments(&was);
}

/* Codes as fp32, and fp32 as codes: what each value stands for, and the nearest to it. */
static void test_conversion(void **state)
{
    (void)state;
    struct moments coded = moments_of(true), full = moments_of(false), again = moments_of(true);
    struct lg_adamw8_map m_map;
    lg_adamw8_map_f32(true, &m_map);
    fill_moments(&coded);
    write_moments(&coded);
    read_shards(&full, 2);
    for (int i = 0; i < coded.t.n; i++) {
        const struct lg_param *p = &coded.t.p[i], *q = &full.t.p[i];
        if (!lg_params_is_coded(&coded.t, i)) continue;
        for (size_t e = 0; e < p->count; e++) {
            const size_t at = p->offset + e;
            assert_true(full.c.m[q->offset + e] ==
                        m_map.value[coded.c.m_code[at]] * coded.c.m_max[at / LG_ADAMW8_BLOCK]);
        }
    }
    write_moments(&full);
    read_shards(&again, 3);
    for (size_t at = 0; at < coded.t.p[1].offset + coded.t.p[1].count; at++) {
        const float want = m_map.value[coded.c.m_code[at]] * coded.c.m_max[at / LG_ADAMW8_BLOCK];
        const float most = again.c.m_max[at / LG_ADAMW8_BLOCK];
        const float is = m_map.value[again.c.m_code[at]] * most;
        /* Half of the widest step of the map, 0.9 / 64 of the block's absmax; below -0.993 there is none. */
        if (!(fabsf(want - is) <= 0.0071f * most)) fail_msg("%zu: %g, not %g", at, is, want);
    }
    free_moments(&coded);
    free_moments(&full);
    free_moments(&again);
}

/* Of neighbours some were codes and some fp32: groups had other optimizers. */
static void test_mixed(void **state)
{
    (void)state;
    static const char *const groups[] = {"A optimizer=adamw", NULL};
    struct moments was = {.t = {.in_blocks = true}}, is = {.t = {.in_blocks = true}};
    for (int k = 0; k < 2; k++) {
        lg_params *t = k ? &is.t : &was.t;
        lg_params_begin_unit(t, "one");
        lg_params_add(t, &(struct lg_param){.name = "B", .rank = 1, .dim = {4500}});
        lg_params_add(t, &(struct lg_param){.name = "A", .rank = 1, .dim = {4100}});
        lg_params_add(t, &(struct lg_param){.name = "C", .rank = 1, .dim = {4097}});
        assert_int_equal(lg_params_group(t, &(struct lg_params_grouping){.texts = k ? NULL : groups,
                                                                         .is_8_bit = true}),
                         0);
    }
    was = moments_of_table(was.t);
    fill_moments(&was);
    write_moments(&was);
    for (int shards = 1; shards <= 3; shards++) {
        struct moments to = moments_of_table(is.t);
        memset(to.memory, 0x55, lg_moments_whole_bytes(&to.l));
        read_shards(&to, shards);
        for (int i = 0; i < to.t.n; i++) {
            const struct lg_param *p = &to.t.p[i];
            const size_t full = lg_moments_full_before(&was.l, p->offset);
            for (size_t e = 0; e < p->count; e++) {
                const size_t at = p->offset + e, block = at / LG_ADAMW8_BLOCK;
                assert_true(lg_params_is_coded(&to.t, i));
                if (lg_params_is_coded(&was.t, i)) {
                    assert_int_equal(to.c.m_code[at], was.c.m_code[at]);
                    assert_true(to.c.v_max[block] == was.c.v_max[block]);
                } else { /* half of the widest step of v's map, 0.9 / 128 of the absmax */
                    assert_true(to.c.v_max[block] >= was.c.v[full + e]);
                    struct lg_adamw8_map map;
                    lg_adamw8_map_f32(false, &map);
                    const float v = map.value[to.c.v_code[at]] * to.c.v_max[block];
                    assert_true(fabsf(v - was.c.v[full + e]) <= 0.0036f * to.c.v_max[block]);
                }
            }
        }
        lg_moments_layout_free(&to.l);
        free(to.memory);
    }
    lg_params_free(&is.t);
    free_moments(&was);
}

/* An absmax too few, or one beside fp32. */
static void test_other_codes(void **state)
{
    (void)state;
    struct moments r = moments_of(true);
    lg_st_writer *w;
    const int64_t shape[] = {50, 90}, blocks[] = {17};
    static const char big[18 * sizeof(float) + 4500 * sizeof(float) + 4500];
    assert_int_equal(lg_st_writer_open(scratch_path("optimizer.safetensors"), &w), 0);
    assert_int_equal(lg_st_writer_declare(w, "exp_avg_absmax.q", LG_F32, 1, blocks), 0);
    assert_int_equal(lg_st_writer_declare(w, "exp_avg.q", LG_U8, 2, shape), 0);
    assert_int_equal(lg_st_writer_data(w, values, 17 * sizeof(float) + 4500), 0);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
    assert_says(lg_checkpoint_read_moments(scratch_path(""), &r.t, 0, r.t.count, &r.c),
                LG_ERR_MISMATCH, "exp_avg_absmax.q has 17 values, the net has 18");
    float m1[256];
    assert_says(lg_checkpoint_read_optimizer(scratch_path(""), &r.t, 0, 256, NULL, m1, NULL),
                LG_ERR_MISMATCH, "exp_avg_absmax.q has 17 values, the net has 18");
    const int64_t all[] = {18};
    assert_int_equal(lg_st_writer_open(scratch_path("optimizer.safetensors"), &w), 0);
    assert_int_equal(lg_st_writer_declare(w, "exp_avg_absmax.q", LG_F32, 1, all), 0);
    assert_int_equal(lg_st_writer_declare(w, "exp_avg.k", LG_F32, 2, shape), 0);
    assert_int_equal(lg_st_writer_declare(w, "exp_avg.q", LG_U8, 2, shape), 0);
    assert_int_equal(lg_st_writer_data(w, big, sizeof big), 0);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
    assert_says(lg_checkpoint_read_moments(scratch_path(""), &r.t, 0, r.t.count, &r.c),
                LG_ERR_MISMATCH, "exp_avg is codes and fp32 within one block");
    free_moments(&r);
}

/* An optimizer file of another net, of another program, or cut short: said, with the tensor's name. */
static void write_tensor(const char *name, lg_dtype type, int64_t count)
{
    lg_st_writer *w;
    const int64_t dim[] = {count};
    assert_int_equal(lg_st_writer_open(scratch_path("optimizer.safetensors"), &w), 0);
    assert_int_equal(lg_st_writer_declare(w, name, type, 1, dim), 0);
    assert_int_equal(lg_st_writer_data(w, values, (size_t)count * lg_dtype_bytes(type)), 0);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
}

static int read_all(const char *dir)
{
    return lg_checkpoint_read_optimizer(dir, &params, 0, params.count, got, NULL, NULL);
}

static void test_other_optimizers(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES], name[LG_PARAM_NAME_BYTES + 16];
    const char *folder = scratch_path("");
    snprintf(name, sizeof name, "master.%s", params.p[0].name);
    int64_t count = (int64_t)params.p[0].count;
    write_tensor("master.something_else", LG_F32, count);
    assert_says(read_all(folder), LG_ERR_MISMATCH, name);
    write_tensor(name, LG_F32, count + 1);
    assert_says(read_all(folder), LG_ERR_MISMATCH, "values, the net has");
    write_tensor(name, LG_I32, count);
    assert_says(read_all(folder), LG_ERR_CORRUPT, name);
    assert_int_equal(unlink(scratch_path("optimizer.safetensors")), 0);
    assert_says(read_all(folder), LG_ERR_NOTFOUND, "optimizer.safetensors");

    assert_int_equal(publish(1, dir), 0);
    struct stat st;
    const char *file = scratch_path("run/checkpoints/files_step1/optimizer.safetensors");
    assert_int_equal(stat(file, &st), 0);
    for (off_t bytes = st.st_size - 1; bytes >= 0; bytes = bytes * 2 / 3 - 1) {
        assert_int_equal(truncate(file, bytes), 0);
        assert_says(read_all(dir), LG_ERR_CORRUPT, "optimizer.safetensors");
    }
}

/* A folder of weights is a diffusers folder, a checkpoint, or refused by what was looked for. */
static void test_weights_folders(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES], found[LG_PATH_BYTES], want[LG_PATH_BYTES];
    assert_int_equal(publish(1, dir), 0);
    static const char *const which[] = {"model", "ema"};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(lg_checkpoint_weights_dir(dir, which[i], found), 0);
        assert_int_equal(lg_path(want, "%s/%s", dir, which[i]), 0);
        assert_string_equal(found, want);
        assert_int_equal(lg_checkpoint_weights_dir(want, which[i], found), 0); /* itself */
        assert_string_equal(found, want);
    }
    /* Without an EMA (a pipeline of diffusers) the model's own. */
    scratch_write("pipeline/transformer/config.json", "{}");
    assert_int_equal(lg_checkpoint_weights_dir(scratch_path("pipeline"), "ema", found), 0);
    assert_string_equal(found, scratch_path("pipeline/transformer"));
    assert_says(lg_checkpoint_weights_dir(scratch_path("run"), "ema", found), LG_ERR_NOTFOUND,
                "ema/config.json");
}

/* What lies under the name already is kept only when it is the same to the byte. */
static void damage(const char *file)
{
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "!", 1, 9), 1);
    close(fd);
}

static void assert_whole(const char *dir)
{
    static lg_manifest there;
    assert_int_equal(lg_manifest_load(dir, &there), 0);
    assert_int_equal(lg_manifest_verify(&there, dir), 0);
    assert_int_equal(read_all(dir), 0);
    assert_true(are_read(got, 0, 0, params.count));
}

static void test_published_again(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES];
    struct stat was, is;
    assert_int_equal(publish(1, dir), 0);
    assert_int_equal(stat(dir, &was), 0);
    assert_int_equal(publish(1, dir), 0);
    assert_int_equal(stat(dir, &is), 0);
    assert_int_equal(is.st_ino, was.st_ino); /* a predecessor's: left as it is */
    damage(scratch_path("run/checkpoints/files_step1/optimizer.safetensors"));
    assert_int_equal(publish(1, dir), 0);
    assert_whole(dir);
    assert_int_equal(unlink(scratch_path("run/checkpoints/files_step1/manifest.json")), 0);
    assert_int_equal(publish(1, dir), 0);
    assert_whole(dir);
    values[0] += 1; /* of another run with the same name */
    assert_int_equal(publish(1, dir), 0);
    assert_whole(dir);
    /* A manifest of another step, or of fewer files, under this name. */
    m.step = 2;
    assert_int_equal(lg_manifest_save(&m, dir), 0);
    assert_int_equal(publish(1, dir), 0);
    assert_whole(dir);
    m.n_files--;
    assert_int_equal(lg_manifest_save(&m, dir), 0);
    assert_int_equal(publish(1, dir), 0);
    assert_whole(dir);
    assert_int_equal(m.n_files, 5);
}

static int left_over(const char *part)
{
    int n = 0;
    DIR *d = opendir(scratch_path("run/checkpoints"));
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) n += strstr(e->d_name, part) != NULL;
    closedir(d);
    return n;
}

/* Another host of the same run. Says with a byte that it has published, or not. */
static void race(int host, int start_fd)
{
    static char name[16], dir[LG_PATH_BYTES];
    char byte;
    snprintf(name, sizeof name, "%d", host);
    g_writer = name;
    const bool began = read(start_fd, &byte, 1) == 0;
    const int rc = publish(1, dir);
    if (rc < 0) fprintf(stderr, "%s\n", lg_err_message());
    /* From here on it is there for good, whoever else still publishes it. */
    bool stays = rc == 0;
    for (int i = 0; i < 20 && stays; i++) stays = lg_manifest_exists(dir);
    scratch_exit(!(began && stays));
}

/* Several hosts publish one state into one folder at the same time: one of them does, all are done. */
static void test_writers_of_several_hosts(void **state)
{
    (void)state;
    enum { WRITERS = 6, RACES = 25 };
    char dir[LG_PATH_BYTES];
    for (int n = 0; n < RACES; n++) {
        int start[2], status;
        struct stat was, is;
        assert_int_equal(pipe(start), 0);
        for (int i = 0; i < WRITERS; i++)
            if (fork() == 0) {
                close(start[1]);
                race(i, start[0]);
            }
        close(start[0]);
        close(start[1]); /* all begin */
        for (int i = 0; i < WRITERS; i++) {
            assert_true(wait(&status) > 0);
            assert_int_equal(status, 0);
        }
        assert_int_equal(stat(place_of(1), &was), 0);
        assert_int_equal(left_over(".tmp-"), 0);
        g_writer = "later"; /* finds it there */
        assert_int_equal(publish(1, dir), 0);
        assert_whole(dir);
        assert_int_equal(stat(dir, &is), 0);
        assert_int_equal(is.st_ino, was.st_ino);
        g_writer = NULL;
        assert_int_equal(lg_remove_tree(scratch_path("run/checkpoints")), 0);
    }
}

/* ---- retention ---- */

static bool is_there(const char *name)
{
    char path[LG_PATH_BYTES];
    assert_int_equal(lg_path(path, "%s/%s", scratch_path("run/checkpoints"), name), 0);
    return lg_path_exists(path);
}

static int retain(int keep)
{
    return lg_retention_apply(
        &(struct lg_retention){.dir = scratch_path("run/checkpoints"), .newest = &m, .keep = keep});
}

static void test_retention_keeps(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES];
    for (uint64_t step = 8; step <= 12; step++) assert_int_equal(publish(step, dir), 0);
    scratch_write("run/checkpoints/.tmp-files_step13/model/config.json", "{}");
    scratch_write("run/checkpoints/.old-files_step1/model/config.json", "{}");
    scratch_write("run/checkpoints/files_step7/model/config.json", "{}");   /* without a manifest */
    scratch_write("run/checkpoints/files_step6/manifest.json", "{}");       /* whose? */
    scratch_write("run/checkpoints/.tmp-others_step1/manifest.json", "{}"); /* is being written */
    scratch_write("run/checkpoints/files_step/manifest.json", "{}");
    scratch_write("run/checkpoints/files_step4x/manifest.json", "{}");
    scratch_write("run/checkpoints/files_step007/manifest.json", "{}");
    scratch_write("run/checkpoints/others_step1/manifest.json", "{}");
    scratch_write("run/checkpoints/notes.txt", "mine");
    assert_int_equal(retain(3), 0);
    static const char *const stay[] = {"files_step12",  "files_step11",     "files_step10",
                                       "files_step7",   "files_step",       "files_step4x",
                                       "files_step007", "others_step1",     "notes.txt",
                                       "files_step6",   ".tmp-others_step1"};
    static const char *const go[] = {"files_step9", "files_step8", ".tmp-files_step13",
                                     ".old-files_step1"};
    for (size_t i = 0; i < LG_ARRAY_LEN(stay); i++) assert_true(is_there(stay[i]));
    for (size_t i = 0; i < LG_ARRAY_LEN(go); i++) assert_false(is_there(go[i]));
    assert_int_equal(retain(0), 0); /* the newest never goes */
    assert_true(is_there("files_step12"));
    assert_false(is_there("files_step11"));
    assert_says(
        lg_retention_apply(&(struct lg_retention){scratch_path("none"), .newest = &m, .keep = 3}),
        LG_ERR_NOTFOUND, "none");
}

/* A damaged one is no checkpoint, however new: a start passes it over, so it must not count in the
 * place of the one that the start goes on from. */
/* What another host may be writing stays; what nobody writes any more goes. */
static void test_retention_of_several_hosts(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES];
    assert_int_equal(publish(4, dir), 0);
    scratch_write("run/checkpoints/.tmp-files_step4.aa/x", "of one that has died");
    scratch_write("run/checkpoints/.tmp-files_step3/x", "of a build that named no writer");
    scratch_write("run/checkpoints/.tmp-files_step5.bb/x", "of one that is ahead");
    scratch_write("run/checkpoints/.tmp-files_step5.bb_step2.c/x", "somebody else's name");
    const struct lg_retention r = {
        .dir = scratch_path("run/checkpoints"), .newest = &m, .keep = 1, .shared = true};
    assert_int_equal(lg_retention_apply(&r), 0);
    assert_false(is_there(".tmp-files_step4.aa"));
    assert_false(is_there(".tmp-files_step3"));
    assert_true(is_there(".tmp-files_step5.bb"));
    assert_true(is_there(".tmp-files_step5.bb_step2.c"));
}

static void test_retention_counts_what_a_start_takes(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES];
    static lg_manifest newest;
    for (uint64_t step = 1; step <= 5; step++) assert_int_equal(publish(step, dir), 0);
    assert_int_equal(truncate(scratch_path("run/checkpoints/files_step5/optimizer.safetensors"), 9),
                     0);
    assert_int_equal(unlink(scratch_path("run/checkpoints/files_step4/model/config.json")), 0);
    assert_int_equal(retain(1), 0);
    assert_int_equal(lg_manifest_newest(scratch_path("run/checkpoints"), "files", dir, &newest), 0);
    assert_int_equal(newest.step, 3);
    assert_false(is_there("files_step2"));
    assert_true(is_there("files_step4")); /* for people to look at, */
    assert_true(is_there("files_step5"));
    for (uint64_t step = 6; step <= 7; step++) assert_int_equal(publish(step, dir), 0);
    assert_int_equal(retain(2), 0);
    assert_true(is_there("files_step6"));
    assert_false(is_there("files_step5")); /* but not for ever */
    assert_false(is_there("files_step4"));
}

/* Two names of one number must not stop it for ever. */
static void test_retention_of_two_names(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES];
    for (uint64_t step = 1; step <= 3; step++) assert_int_equal(publish(step, dir), 0);
    assert_int_equal(rename(place_of(2), scratch_path("run/checkpoints/files_step01")), 0);
    for (int i = 0; i < 2; i++) assert_int_equal(retain(1), 0);
    assert_true(is_there("files_step3"));
    assert_true(is_there("files_step01"));
    assert_false(is_there("files_step1"));
}

static void publish_all(uint64_t lineage, uint64_t first, uint64_t last)
{
    char dir[LG_PATH_BYTES];
    g_lineage = lineage;
    for (uint64_t step = first; step <= last; step++) assert_int_equal(publish(step, dir), 0);
}

/* A new run's first checkpoints beside an old run's later and earlier ones: the old ones neither push them
 * out nor are removed. */
static void test_retention_of_two_runs(void **state)
{
    (void)state;
    publish_all(0x0b, 1, 2);
    publish_all(0x0b, 8, 9);
    publish_all(0x0a, 4, 6);
    assert_int_equal(retain(1), 0);
    static const char *const stay[] = {"files_step9", "files_step8", "files_step6", "files_step2",
                                       "files_step1"};
    for (size_t i = 0; i < LG_ARRAY_LEN(stay); i++) assert_true(is_there(stay[i]));
    assert_false(is_there("files_step5"));
    assert_false(is_there("files_step4"));
    /* Of a build that knew no lineages: ours when it is of our plan. */
    publish_all(0, 3, 3);
    m.plan_hash = 7;
    assert_int_equal(lg_manifest_save(&m, place_of(3)), 0);
    publish_all(0x0a, 6, 6);
    assert_int_equal(retain(1), 0);
    assert_true(is_there("files_step3"));
    m.plan_hash = 7;
    assert_int_equal(retain(1), 0);
    assert_false(is_there("files_step3"));
}

/* A run that went back: what it has left of later steps does not count as newer than what it makes. */
static void test_retention_of_later_steps(void **state)
{
    (void)state;
    publish_all(0x0a, 7, 8);
    publish_all(0x0a, 1, 3);
    assert_int_equal(retain(1), 0);
    static const char *const stay[] = {"files_step8", "files_step7", "files_step3"};
    for (size_t i = 0; i < LG_ARRAY_LEN(stay); i++) assert_true(is_there(stay[i]));
    assert_false(is_there("files_step2"));
    publish_all(0x0a, 4, 8);
    assert_int_equal(retain(1), 0);
    assert_false(is_there("files_step7"));
}

/* A checkpoint that was moved to another disk and linked to: the link goes, its target stays. */
static void test_links_are_not_followed(void **state)
{
    (void)state;
    char target[LG_PATH_BYTES];
    publish_all(0x0a, 1, 3);
    snprintf(target, sizeof target, "%s", scratch_path("elsewhere"));
    assert_int_equal(rename(place_of(1), target), 0);
    assert_int_equal(symlink(target, place_of(1)), 0);
    assert_int_equal(symlink(target, scratch_path("run/checkpoints/.old-files_step9")), 0);
    assert_int_equal(retain(2), 0);
    struct stat st;
    assert_int_equal(lstat(place_of(1), &st), -1);
    assert_int_equal(lstat(scratch_path("run/checkpoints/.old-files_step9"), &st), -1);
    assert_whole(target);
    assert_int_equal(symlink(target, place_of(4)), 0); /* in the way of the next */
    publish_all(0x0a, 4, 4);
    assert_int_equal(lstat(place_of(4), &st), 0);
    assert_true(S_ISDIR(st.st_mode));
    assert_whole(target);
}

/* Somebody has put another run's checkpoint under the name that is to come. */
static void test_anothers_in_the_way(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES];
    publish_all(0x0b, 4, 4);
    publish_all(0x0a, 4, 4);
    static lg_manifest there;
    assert_int_equal(lg_manifest_load(place_of(4), &there), 0);
    assert_int_equal(there.lineage, 0x0a);
    const char *aside = "run/checkpoints/files_step4.of-000000000000000b.0";
    assert_whole(scratch_path(aside));
    assert_int_equal(rename(place_of(4), scratch_path("ours")), 0);
    publish_all(0x0b, 4, 4);
    publish_all(0x0a, 4, 4);
    assert_whole(scratch_path("run/checkpoints/files_step4.of-000000000000000b.1"));
    assert_int_equal(retain(1), 0);
    assert_whole(scratch_path(aside));
    assert_int_equal(lg_manifest_newest(scratch_path("run/checkpoints"), "files", dir, &there), 0);
    assert_int_equal(there.lineage, 0x0a);
}

/* What a start would go on from: not from nothing, nor from what was given another number. */
static void test_no_checkpoints(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES];
    static lg_manifest there;
    publish_all(0x0a, 1, 2);
    m.n_files = 0;
    assert_int_equal(lg_manifest_save(&m, place_of(2)), 0);
    assert_says(lg_manifest_load(place_of(2), &there), LG_ERR_CORRUPT, "lists no files");
    assert_int_equal(lg_manifest_newest(scratch_path("run/checkpoints"), "files", dir, &there), 0);
    assert_int_equal(there.step, 1);
    assert_int_equal(lg_remove_tree(place_of(2)), 0);
    assert_int_equal(rename(place_of(1), place_of(5)), 0);
    assert_says(lg_manifest_newest(scratch_path("run/checkpoints"), "files", dir, &there),
                LG_ERR_MISMATCH, "is a checkpoint of step 1");
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_codes),
        T(test_conversion),
        T(test_mixed),
        T(test_other_codes),
        T(test_any_part_is_read),
        T(test_other_optimizers),
        T(test_weights_folders),
        T(test_published_again),
        T(test_writers_of_several_hosts),
        T(test_retention_of_several_hosts),
        T(test_retention_keeps),
        T(test_retention_counts_what_a_start_takes),
        T(test_retention_of_two_names),
        T(test_retention_of_two_runs),
        T(test_retention_of_later_steps),
        T(test_links_are_not_followed),
        T(test_anothers_in_the_way),
        T(test_no_checkpoints),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
