/* Whose files a run directory holds (supervisor/run/folder.h): which starts are refused, by which words,
 * and that an old run's files can be put aside, cut off wherever it may be. */
#include "config/ledger.h"
#include "config/lineage.h"
#include "config/manifest.h"
#include "supervisor/run/folder.h"
#include "tests/unit/run_fixture.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static lg_run r;

/* In place of libc's: the g_dies-th rename from here, and every later one, fails, as if the process had died
 * before it; 0: none. */
static int g_dies;
static bool g_died;
int rename(const char *from, const char *to)
{
    if (g_died || (g_dies && --g_dies == 0)) {
        g_died = true;
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

static int setup(void **state)
{
    (void)state;
    g_dies = g_died = 0;
    run_fixture_open(&r, "");
    LG_ASSERT(lg_run_create(&r) == 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    g_dies = g_died = 0;
    run_fixture_close(&r);
    return 0;
}

static void assert_says(int rc, int code, const char *part)
{
    if (rc != code) fail_msg("result %d, expected %d: %s", rc, code, lg_err_message());
    if (!strstr(lg_err_message(), part)) fail_msg("\"%s\" lacks \"%s\"", lg_err_message(), part);
    lg_err_clear();
}

static int check(const char *const *set)
{
    lg_config_free(&r.config);
    LG_TRY(lg_run_decide(&r, run_fixture_config(set)));
    return lg_folder_check(&r);
}
#define CHECK(...) check((const char *const[]){__VA_ARGS__, NULL})
#define FRESH      "trainer.auto_resume=false"

/* A run that has begun here, with records of `steps` steps. */
static void begin(const char *const *set, uint64_t steps)
{
    assert_int_equal(check(set), 0);
    assert_int_equal(lg_run_save(&r), 0);
    FILE *f = fopen(scratch_path("run/ledger"), "w");
    for (uint64_t s = 0; s < steps; s++) {
        struct lg_ledger_record record = {.step = s + 1, .lineage = r.lineage};
        lg_ledger_seal(&record);
        assert_int_equal(fwrite(&record, sizeof record, 1, f), 1);
    }
    fclose(f);
    scratch_write("run/metrics.jsonl", "{\"step\": 1}\n");
}

static void checkpoint(uint64_t step)
{
    run_fixture_checkpoint(&r, r.dir, step);
}

static void damage(uint64_t step)
{
    char path[64];
    snprintf(path, sizeof path, "run/checkpoints/fake_step%" PRIu64 "/state", step);
    scratch_write(path, "short");
}

/* ---- the id ---- */

static uint64_t lineage_of(const char *const *set)
{
    assert_int_equal(lg_run_decide(&r, run_fixture_config(set)), 0);
    return r.lineage;
}
#define LINEAGE(...) lineage_of((const char *const[]){__VA_ARGS__, NULL})

static void test_what_a_lineage_is(void **state)
{
    (void)state;
    uint64_t id = lineage_of(NULL);
    assert_true(id != 0);
    assert_int_equal(lineage_of(NULL), id);
    /* What decides the result is in it, */
    assert_true(LINEAGE("trainer.lr=0.5") != id);
    assert_true(LINEAGE("job.seed=5") != id);
    assert_true(LINEAGE("job.name=other") != id);
    assert_true(LINEAGE("trainer.lr_schedule=cosine") !=
                LINEAGE("trainer.lr_schedule=cosine", "trainer.max_steps=90"));
    /* what does not is not. */
    assert_int_equal(LINEAGE("trainer.max_steps=90", "vae.instances=3", "checkpoint.keep=9"), id);
    /* The weights it begins with: their content, wherever they lie. */
    char a[LG_PATH_BYTES], b[LG_PATH_BYTES];
    scratch_write("a/config.json", "{}");
    scratch_write("a/diffusion_pytorch_model.safetensors", "weights");
    scratch_write("b/ema/config.json", "{}");
    scratch_write("b/ema/diffusion_pytorch_model.safetensors", "weights");
    snprintf(a, sizeof a, "trainer.init_from=%s", scratch_path("a"));
    snprintf(b, sizeof b, "trainer.init_from=%s", scratch_path("b"));
    uint64_t with = LINEAGE(a);
    assert_true(with != id);
    assert_int_equal(LINEAGE(b), with);
    scratch_write("b/ema/diffusion_pytorch_model.safetensors", "WEIGHTS");
    assert_true(LINEAGE(b) != with);
}

/* A resume carries it on; a folder of a build that knew none gets one, and keeps it. */
static void test_a_resume_carries_it_on(void **state)
{
    (void)state;
    char set[LG_PATH_BYTES + 32];
    begin(NULL, 20);
    r.lineage = 0x1234;
    checkpoint(20);
    assert_int_equal(lineage_of(NULL), 0x1234);
    snprintf(set, sizeof set, "trainer.resume_from=%s",
             scratch_path("run/checkpoints/fake_step20"));
    assert_int_equal(LINEAGE(set, FRESH, "job.name=other"), 0x1234);
    assert_int_equal(lineage_of(NULL), 0x1234);
    r.lineage = 0;
    checkpoint(40);
    uint64_t adopted = lineage_of(NULL);
    assert_int_equal(r.start_step, 40);
    assert_int_equal(adopted, lg_lineage_new(r.config, &r.plan, 0));
}

/* ---- refusals ---- */

static void test_a_run_in_its_own_folder(void **state)
{
    (void)state;
    assert_int_equal(check(NULL), 0); /* nothing is there */
    begin(NULL, 30);
    assert_int_equal(check(NULL), 0); /* it lost power before its first checkpoint */
    assert_int_equal(CHECK(FRESH), 0);
    checkpoint(20);
    checkpoint(40);
    assert_int_equal(check(NULL), 0);
    assert_int_equal(r.start_step, 40);
    assert_int_equal(CHECK("trainer.max_steps=90"), 0);
    /* The newest is damaged, or gone: back, in the same lineage. */
    damage(40);
    assert_int_equal(check(NULL), 0);
    assert_int_equal(r.start_step, 20);
    assert_int_equal(lg_remove_tree(scratch_path("run/checkpoints/fake_step40")), 0);
    assert_int_equal(check(NULL), 0);
    assert_int_equal(r.start_step, 20);
    run_fixture_checkpoint(&r, scratch_path("not"), 10); /* somebody's copy, under another name */
    assert_int_equal(rename(scratch_path("not/checkpoints/fake_step10"),
                            scratch_path("run/checkpoints/base_step10")),
                     0);
    assert_int_equal(check(NULL), 0);
}

static void test_a_new_run_in_a_used_folder(void **state)
{
    (void)state;
    char id[32];
    begin(NULL, 30);
    snprintf(id, sizeof id, "%016" PRIx64, r.lineage);
    assert_says(CHECK("job.seed=9"), LG_ERR_MISMATCH, "(30 steps, lineage ");
    assert_says(CHECK("job.seed=9"), LG_ERR_MISMATCH, id);
    assert_says(CHECK("job.seed=9"), LG_ERR_MISMATCH, "--set-aside");
    assert_says(CHECK("job.name=other"), LG_ERR_MISMATCH, "choose another job.dir");
    assert_int_equal(lg_run_decide(&r, run_fixture_config(NULL)), 0);
    checkpoint(20);
    checkpoint(40);
    assert_says(CHECK(FRESH), LG_ERR_MISMATCH, "fake_step");
    assert_says(CHECK(FRESH), LG_ERR_MISMATCH,
                "a later step than the 0 that this start would begin");
    assert_says(CHECK(FRESH), LG_ERR_MISMATCH, "trainer.auto_resume = true");
    assert_says(CHECK(FRESH, "job.seed=9"), LG_ERR_MISMATCH, "holds another run: the checkpoint");
    assert_says(CHECK("job.name=other"), LG_ERR_MISMATCH, "of job \"fake\"");
    unlink(scratch_path("run/ledger"));
    unlink(scratch_path("run/metrics.jsonl"));
    unlink(scratch_path("run/lineage"));
    assert_says(CHECK(FRESH), LG_ERR_MISMATCH, "a later step");
}

/* All that is there is damaged: not a word of it, and a new run would begin over it. */
static void test_all_damaged(void **state)
{
    (void)state;
    begin(NULL, 30);
    checkpoint(20);
    damage(20);
    assert_says(check(NULL), LG_ERR_MISMATCH, "fake_step20, damaged (");
    scratch_write("run/checkpoints/fake_step20/manifest.json", "{");
    assert_says(check(NULL), LG_ERR_MISMATCH, "restore it to go on from it");
    unlink(scratch_path("run/checkpoints/fake_step20/manifest.json")); /* no checkpoint at all */
    assert_int_equal(check(NULL), 0);
}

static void test_a_branch(void **state)
{
    (void)state;
    char set[LG_PATH_BYTES + 32], other[LG_PATH_BYTES + 32];
    begin(NULL, 60);
    checkpoint(20);
    checkpoint(40);
    snprintf(set, sizeof set, "trainer.resume_from=%s",
             scratch_path("run/checkpoints/fake_step20"));
    assert_says(CHECK(set, FRESH), LG_ERR_MISMATCH, "fake_step40");
    assert_says(CHECK(set, FRESH), LG_ERR_MISMATCH, "than the 20 that this start would go back to");
    snprintf(set, sizeof set, "trainer.resume_from=%s",
             scratch_path("run/checkpoints/fake_step40"));
    assert_int_equal(CHECK(set, FRESH), 0); /* a resume, said another way */
    /* From elsewhere: of another run. */
    lg_run stranger = r;
    stranger.lineage++;
    run_fixture_checkpoint(&stranger, scratch_path("other"), 80);
    snprintf(other, sizeof other, "trainer.resume_from=%s",
             scratch_path("other/checkpoints/fake_step80"));
    assert_says(CHECK(other, FRESH), LG_ERR_MISMATCH, "holds another run");
    assert_int_equal(lg_remove_tree(scratch_path("run/checkpoints")), 0);
    assert_says(CHECK(other), LG_ERR_MISMATCH, "ledger and metrics of another run (60 steps");
}

/* Somebody has copied another run's checkpoint here: the highest number of the name. */
static void test_a_stranger_among_ours(void **state)
{
    (void)state;
    begin(NULL, 60);
    checkpoint(20);
    lg_run stranger = r;
    stranger.lineage++;
    run_fixture_checkpoint(&stranger, r.dir, 80);
    assert_says(check(NULL), LG_ERR_MISMATCH, "holds another run: the checkpoint fake_step20");
    assert_int_equal(lg_remove_tree(scratch_path("run/checkpoints/fake_step20")), 0);
    assert_says(check(NULL), LG_ERR_MISMATCH, "ledger and metrics of another run");
}

/* Files of a build that knew no lineages. */
static void test_an_old_folder(void **state)
{
    (void)state;
    begin(NULL, 30);
    unlink(scratch_path("run/lineage"));
    assert_int_equal(check(NULL), 0);
    assert_says(CHECK("job.seed=9"), LG_ERR_MISMATCH, "lineage 0000000000000000");
    assert_int_equal(lg_run_decide(&r, run_fixture_config(NULL)), 0);
    r.lineage = 0;
    checkpoint(20);
    checkpoint(40);
    assert_int_equal(check(NULL), 0);
    assert_int_equal(r.start_step, 40);
    uint64_t adopted = r.lineage;
    assert_int_equal(lg_run_save(&r), 0);
    checkpoint(60); /* the first with an id */
    assert_int_equal(check(NULL), 0);
    assert_int_equal(r.lineage, adopted);
    assert_says(CHECK(FRESH, "job.seed=9"), LG_ERR_MISMATCH, "holds another run");
}

/* ---- setting aside ---- */

static const char *const g_files[] = {
    "metrics.jsonl",      "ledger",         "config.toml",
    "plan.json",          "lineage",        "checkpoints/fake_step20/manifest.json",
    "samples/step20.png", "logs/vae.0.log", "histograms/step20.json",
    "tensorboard/events"};

static void old_run(void)
{
    begin(NULL, 30);
    checkpoint(20);
    scratch_write("run/samples/step20.png", "png");
    scratch_write("run/logs/vae.0.log", "words\n");
    scratch_write("run/histograms/step20.json", "{}");
    scratch_write("run/tensorboard/events", "events");
    scratch_write("run/lock", "1 1\n");
}

static void assert_moved(const char *to)
{
    char path[LG_PATH_BYTES];
    for (size_t i = 0; i < LG_ARRAY_LEN(g_files); i++) {
        assert_int_equal(lg_path(path, "%s/%s", to, g_files[i]), 0);
        if (!lg_path_exists(path)) fail_msg("no %s", path);
        assert_int_equal(lg_path(path, "%s/%s", r.dir, g_files[i]), 0);
        if (lg_path_exists(path)) fail_msg("%s is still there", path);
    }
    assert_true(lg_path_exists(scratch_path("run/lock")));
    assert_true(lg_path_exists(scratch_path("run/logs")));
    assert_true(lg_path_exists(scratch_path("run/checkpoints")));
    assert_false(lg_path_exists(scratch_path("run/setting-aside")));
}

static void test_set_aside(void **state)
{
    (void)state;
    char to[LG_PATH_BYTES], again[LG_PATH_BYTES], want[LG_PATH_BYTES], set[LG_PATH_BYTES + 32];
    lg_config *c = run_fixture_config(NULL);
    assert_int_equal(lg_folder_set_aside(&r, c, to), 0);
    assert_string_equal(to, ""); /* nothing is there */
    lg_config_free(&c);
    old_run();
    snprintf(set, sizeof set, "trainer.resume_from=%s",
             scratch_path("run/checkpoints/fake_step20"));
    c = run_fixture_config((const char *const[]){set, FRESH, NULL});
    assert_int_equal(lg_folder_set_aside(&r, c, to), 0);
    assert_moved(to);
    assert_int_equal(lg_path(want, "%s/aside/%016" PRIx64, r.dir, r.lineage), 0);
    assert_string_equal(to, want);
    assert_int_equal(lg_path(want, "%s/checkpoints/fake_step20", to), 0);
    assert_string_equal(c->trainer_resume_from, want); /* the path has moved along */
    assert_int_equal(lg_run_decide(&r, c), 0);
    assert_int_equal(lg_folder_check(&r), 0);
    assert_int_equal(r.start_step, 20);
    /* Another of the same lineage gets a place of its own. */
    old_run();
    c = run_fixture_config(NULL);
    assert_int_equal(lg_folder_set_aside(&r, c, again), 0);
    lg_config_free(&c);
    assert_moved(again);
    assert_int_equal(lg_path(want, "%s.2", to), 0);
    assert_string_equal(again, want);
}

/* Cut off before each rename, any start ends it first, and nothing is lost or mixed. */
static void test_set_aside_cut_off(void **state)
{
    (void)state;
    for (int dies = 1;; dies++) {
        char to[LG_PATH_BYTES], path[LG_PATH_BYTES];
        assert_int_equal(lg_remove_tree(scratch_path("run")), 0);
        lg_config_free(&r.config);
        assert_int_equal(lg_run_create(&r), 0);
        old_run();
        lg_config *c = run_fixture_config(NULL);
        g_dies = dies;
        int rc = lg_folder_set_aside(&r, c, to);
        bool died = g_died;
        g_dies = g_died = 0;
        lg_config_free(&c);
        lg_err_clear();
        assert_int_equal(rc < 0, died);
        if (!died) {
            assert_true(dies > 10);
            break;
        }
        lg_config_free(&r.config);
        assert_int_equal(lg_run_create(&r), 0);                   /* as the next start does */
        if (!lg_path_exists(scratch_path("run/setting-aside"))) { /* not begun */
            for (size_t i = 0; i < LG_ARRAY_LEN(g_files); i++) {
                assert_int_equal(lg_path(path, "%s/%s", r.dir, g_files[i]), 0);
                assert_true(lg_path_exists(path));
            }
            continue;
        }
        assert_int_equal(lg_folder_finish_aside(&r), 0);
        assert_moved(to);
        assert_int_equal(lg_folder_finish_aside(&r), 0); /* nothing more to do */
        assert_int_equal(CHECK("job.seed=9"), 0);
    }
}

/* The record of a set-aside is a file like others: it must not lead out of the folder. */
static void test_set_aside_leads_nowhere_else(void **state)
{
    (void)state;
    static const char *const bad[] = {"/tmp\n",      "aside/\n", "aside/../..\n",
                                      "aside/a/b\n", "x\n",      ""};
    old_run();
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        scratch_write("run/setting-aside", bad[i]);
        assert_says(lg_folder_finish_aside(&r), LG_ERR_CORRUPT, "setting-aside");
        assert_true(lg_path_exists(scratch_path("run/ledger")));
    }
    /* Links are moved themselves, not what they lead to. */
    unlink(scratch_path("run/setting-aside"));
    assert_int_equal(rename(scratch_path("run/checkpoints"), scratch_path("disk")), 0);
    assert_int_equal(symlink(scratch_path("disk"), scratch_path("run/checkpoints")), 0);
    char to[LG_PATH_BYTES];
    lg_config *c = run_fixture_config(NULL);
    assert_int_equal(lg_folder_set_aside(&r, c, to), 0);
    lg_config_free(&c);
    assert_true(lg_path_exists(scratch_path("disk/fake_step20/manifest.json")));
    assert_moved(to);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_what_a_lineage_is),
        T(test_a_resume_carries_it_on),
        T(test_a_run_in_its_own_folder),
        T(test_a_new_run_in_a_used_folder),
        T(test_all_damaged),
        T(test_a_branch),
        T(test_a_stranger_among_ours),
        T(test_an_old_folder),
        T(test_set_aside),
        T(test_set_aside_cut_off),
        T(test_set_aside_leads_nowhere_else),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
