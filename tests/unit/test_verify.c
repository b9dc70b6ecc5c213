/* `lgsup verify` of runs and checkpoints made by hand: what it confirms, and how it names what is
 * damaged or missing. */
#include "config/ledger.h"
#include "tests/unit/command_fixture.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static lg_run g_run;
static char g_dir[LG_PATH_BYTES];
static uint64_t g_lineage[2]; /* of the records up to g_seam, and after it; by default the run's */
static uint64_t g_seam;

static int setup(void **state)
{
    command_setup(state);
    command_run(command_pipeline(""), &g_run, NULL);
    snprintf(g_dir, sizeof g_dir, "%s", g_run.dir);
    g_lineage[0] = g_lineage[1] = g_run.lineage;
    g_seam = 0;
    return 0;
}

static int teardown(void **state)
{
    lg_run_close(&g_run);
    return command_teardown(state);
}

static void test_run(void **state)
{
    (void)state;
    EXPECT(0, "run has no complete checkpoint yet\n", "verify", g_dir);
    command_checkpoint(&g_run, 20);
    EXPECT(0, "made_step20: step 20, 1 files\n", "verify", g_dir);
    command_also("run/ledger: steps 0 to 20, each sample once\n");
    /* What is half-written, or no checkpoint, is none. */
    scratch_write("run/checkpoints/.made_step99/manifest.json", "{");
    scratch_write("run/checkpoints/made_step98/state", "half");
    scratch_write("run/checkpoints/notes/manifest.json", "{");
    EXPECT(0, "steps 0 to 20", "verify", g_dir);
    EXPECT(0, "made_step20: step 20, 1 files\n", "verify",
           scratch_path("run/checkpoints/made_step20"));
    command_never("ledger"); /* of a checkpoint alone */
    EXPECT(8, "run/checkpoints is neither a complete checkpoint (no manifest.json) nor a run",
           "verify", scratch_path("run/checkpoints"));
    assert_int_equal(lg_remove_tree(scratch_path("run/checkpoints")), 0);
    EXPECT(0, "run has no complete checkpoint yet\n", "verify", g_dir);
}

static void test_damaged_checkpoints(void **state)
{
    (void)state;
    command_checkpoint(&g_run, 20);
    scratch_write("run/checkpoints/made_step20/state", "b state\n"); /* as long as it was */
    EXPECT(5, "made_step20/state", "verify", g_dir);
    EXPECT(5, "made_step20/state", "verify", scratch_path("run/checkpoints/made_step20"));
    scratch_write("run/checkpoints/made_step20/state", "short");
    EXPECT(5, "state", "verify", g_dir);
    unlink(scratch_path("run/checkpoints/made_step20/state"));
    EXPECT(5, "state", "verify", g_dir);
    scratch_write("run/checkpoints/made_step20/manifest.json", "{");
    EXPECT(5, "made_step20/manifest.json", "verify", g_dir);
}

static void write_records(uint64_t first, uint64_t n)
{
    FILE *f = fopen(scratch_path("run/ledger"), "w");
    for (uint64_t s = 0; s < n; s++) {
        struct lg_ledger_record r = {
            .step = s + 1, .first = s * 16, .last = s * 16 + 15, .lineage = g_lineage[s >= g_seam]};
        if (s < first) r = (struct lg_ledger_record){0};
        if (s >= first) lg_ledger_seal(&r);
        assert_int_equal(fwrite(&r, sizeof r, 1, f), 1);
    }
    fclose(f);
}

static void test_damaged_ledger(void **state)
{
    (void)state;
    command_checkpoint(&g_run, 20);
    write_records(0, 19);
    EXPECT(5, "run/ledger", "verify", g_dir);
    write_records(5, 20); /* a hole */
    EXPECT(5, "run/ledger", "verify", g_dir);
    unlink(scratch_path("run/ledger"));
    EXPECT(8, "run/ledger", "verify", g_dir);
}

/* A run that went on from another's checkpoint has no records of the steps before. */
static void test_resumed_from_another_run(void **state)
{
    (void)state;
    static char more[1 << 16];
    char *text, path[LG_PATH_BYTES];
    size_t bytes;
    command_checkpoint(&g_run, 20);
    snprintf(path, sizeof path, "%s", scratch_path("run/config.toml"));
    assert_int_equal(lg_read_file(path, 1 << 20, &text, &bytes), 0);
    char *at = strstr(text, "resume_from = \"\"");
    assert_non_null(at);
    snprintf(more, sizeof more, "%.*sresume_from = \"other\"%s", (int)(at - text), text,
             at + strlen("resume_from = \"\""));
    scratch_write("run/config.toml", more);
    free(text);
    write_records(5, 20);
    EXPECT(0, "run/ledger: steps 5 to 20, each sample once\n", "verify", g_dir);
    unlink(scratch_path("run/ledger"));
    EXPECT(8, "cannot open ", "verify", g_dir);
    command_also("run/ledger: No such file");
}

/* One history: a ledger of two runs has each step once, and proves nothing. */
static void test_ledger_of_two_runs(void **state)
{
    (void)state;
    command_checkpoint(&g_run, 20);
    g_seam = 12;
    g_lineage[1]++;
    write_records(0, 20);
    EXPECT(5, "ledger is of two runs: the record of step 13", "verify", g_dir);
    g_lineage[0]++; /* wholly another's */
    write_records(0, 20);
    EXPECT(5, "ledger is of two runs: the record of step 1 ", "verify", g_dir);
    g_lineage[0] = 0; /* begun by a build that knew no lineages */
    g_lineage[1] = g_run.lineage;
    write_records(0, 20);
    EXPECT(0, "steps 0 to 20, each sample once", "verify", g_dir);
    g_lineage[0] = g_run.lineage; /* which no later record is of */
    g_lineage[1] = 0;
    write_records(0, 20);
    EXPECT(5, "ledger is of two runs: the record of step 13", "verify", g_dir);
    g_lineage[0] = 0;
    write_records(0, 20);
    EXPECT(5, "ledger is of another run", "verify", g_dir);
}

static void test_checkpoints_of_two_runs(void **state)
{
    (void)state;
    lg_run other = g_run;
    other.lineage++;
    command_checkpoint(&other, 10);
    command_checkpoint(&g_run, 20);
    EXPECT(5, "made_step10 is of another run: of lineage", "verify", g_dir);
    other.lineage = 0; /* of a build that knew no lineages */
    command_checkpoint(&other, 10);
    command_checkpoint(&g_run, 20);
    EXPECT(0, "steps 0 to 20, each sample once", "verify", g_dir);
    /* Under another name it is somebody's own business, but whole it has to be. */
    assert_int_equal(rename(scratch_path("run/checkpoints/made_step10"),
                            scratch_path("run/checkpoints/base_step10")),
                     0);
    EXPECT(0, "steps 0 to 20, each sample once", "verify", g_dir);
    scratch_write("run/checkpoints/base_step10/state", "b state\n");
    EXPECT(5, "base_step10/state", "verify", g_dir);
}

static void test_damaged_run(void **state)
{
    (void)state;
    scratch_write("run/plan.json", "{");
    EXPECT(5, "plan.json", "verify", g_dir);
    scratch_write("run/config.toml", "[job\n");
    EXPECT(3, "config.toml:", "verify", g_dir);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_run),
        TEST(test_damaged_checkpoints),
        TEST(test_damaged_ledger),
        TEST(test_resumed_from_another_run),
        TEST(test_ledger_of_two_runs),
        TEST(test_checkpoints_of_two_runs),
        TEST(test_damaged_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
