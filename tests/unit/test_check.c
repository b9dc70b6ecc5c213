/* `lgsup check`, and the same questions at a start: what it prints, and what it says when a role, the
 * GPUs or the memory are not as the run needs them. Roles and lg-device are scripts here. */
#include "base/check.h"
#include "base/fs.h"
#include "tests/sim/control_groups.h"
#include "tests/unit/command_fixture.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static char g_file[LG_PATH_BYTES];

static int setup(void **state)
{
    command_setup(state);
    command_roles();
    control_groups_begin(); /* without limits */
    snprintf(g_file, sizeof g_file, "%s", command_pipeline(""));
    return 0;
}

static int teardown(void **state)
{
    control_groups_end();
    return command_teardown(state);
}

#define PRIVATE(device, bytes, instances)                                                          \
    "{\"device\": \"" device "\", \"bytes\": " bytes ", \"instances\": " instances "}"
#define PLAN(regions, own) "echo '{\"regions\": [" regions "], \"private\": [" own "]}'"

static void test_host(void **state)
{
    (void)state;
    command_program("lg-vae", "echo a warning\n" PLAN("{\"name\": \"vae/0/weights\", \"device\": "
                                                      "\"host\", \"bytes\": 1048576}",
                                                      PRIVATE("host", "2097152", "2")));
    EXPECT(0, "made: pixart, 60 steps of 16 samples (2 ranks, ", "check", g_file);
    char where[LG_PATH_BYTES];
    assert_int_equal(lg_path(where, "run directory %s\n", scratch_path("run")), 0);
    command_also(where);
    command_also("; text (");
    command_also("\nvae              2 ");
    command_also("\nvae/0/weights                            host          1.0 MiB\n");
    command_also("\n  vae, private                2.0 MiB\n");
    command_also("\n  together                    3.0 MiB\n");
    command_never("warning");
    assert_false(lg_path_exists(scratch_path("run"))); /* it creates nothing */
}

/* Sizes are said with their frames, where there are some. */
static void test_clips(void **state)
{
    (void)state;
    EXPECT(0, " samples; latents (4, 16, 16); text (", "check", g_file);
    EXPECT(0, " samples of 3 frames; latents (4, 3, 16, 16); text (", "check", g_file, "--set",
           "model.kind=latte", "--set", "data.frames=3");
    EXPECT(0, "buckets of 2 shapes, (frames x) height x width * samples", "check", g_file, "--set",
           "model.kind=latte", "--set", "data.frames=3", "--set",
           "data.buckets=[\"3x64x64\", \"1x64x32\"]");
    command_also("\n    64x32*8  3x64x64*");
}

/* Each role gets the file and every --set, so that all speak of the same run. */
static void test_roles_are_asked_for_the_same_run(void **state)
{
    (void)state;
    command_program("lg-text", "echo \"$*\" >\"$LG_BIN_DIR/asked\"\n" PLAN("", ""));
    EXPECT(0, "steps of 32", "check", g_file, "--set", "trainer.global_batch_size=32", "--set",
           "job.seed=5");
    char want[2 * LG_PATH_BYTES], *asked;
    size_t bytes;
    snprintf(want, sizeof want, "--plan %s --set trainer.global_batch_size=32 --set job.seed=5\n",
             g_file);
    assert_int_equal(lg_read_file(scratch_path("bin/asked"), 4096, &asked, &bytes), 0);
    assert_string_equal(asked, want);
    free(asked);
}

static void test_classes(void **state)
{
    (void)state;
    EXPECT(0, "made: dit, ", "check", g_file, "--set", "model.kind=dit", "--set",
           "model.num_classes=7", "--set", "text.model=");
    command_also("; 7 classes");
    command_never("; text (");
    command_never("\ntext ");
}

/* A role that cannot answer: its own code and words; one that dies or talks nonsense: what it was. */
static void test_roles_that_fail(void **state)
{
    (void)state;
    static const struct {
        const char *script, *says;
        int code;
    } cases[] = {
        {"echo 'lg-vae: the weights are damaged'; exit 5",
         "lg-vae --plan: exit 5 CORRUPT: lg-vae: the weights are damaged", 5},
        {"echo Ouch; kill -SEGV $$", "lg-vae --plan: signal 11 (Segmentation fault): Ouch", 1},
        {"exit 0", "lg-vae --plan: no JSON with the lists \"regions\" and \"private\"", 5},
        {"head -c 1100000 /dev/zero", "more than 1048576 bytes of output", 5},
        {"echo '{\"regions\": [], \"private\": [3]}'", "lg-vae --plan: \"device\" is missing", 5},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        command_program("lg-vae", cases[i].script);
        EXPECT(cases[i].code, cases[i].says, "check", g_file);
        EXPECT(cases[i].code, cases[i].says, "start", g_file);
        assert_false(lg_path_exists(scratch_path("run/board")));
    }
    unlink(scratch_path("bin/lg-vae"));
    EXPECT(8, "bin/lg-vae is missing or not executable", "check", g_file);
    scratch_write("bin/lg-vae", "not executable");
    EXPECT(8, "bin/lg-vae is missing or not executable", "check", g_file);
}

/* What fits the machine but not what is free: a warning. What does not fit the machine: refused. */
static void test_room_on_the_host(void **state)
{
    (void)state;
    char script[256];
    struct sysinfo info;
    assert_int_equal(sysinfo(&info), 0);
    unsigned long long total = (unsigned long long)info.totalram * info.mem_unit;
    snprintf(script, sizeof script, PLAN("", PRIVATE("host", "%llu", "1")), total);
    command_program("lg-loader", script);
    EXPECT(0, "warning: the host has less than that free now", "check", g_file);
    snprintf(script, sizeof script, PLAN("", PRIVATE("host", "%llu", "1")), total + 1);
    command_program("lg-loader", script);
    EXPECT(6, "of the host's memory, this machine has ", "check", g_file);
    command_also("lower window.batches");
    EXPECT(6, "of the host's memory, this machine has ", "start", g_file);
    assert_false(lg_path_exists(scratch_path("run/board")));
}

/* A limit of a control group is all there is, for the run and for what is free now; it is named. */
static void test_limit_of_the_group(void **state)
{
    (void)state;
    command_program("lg-loader", PLAN("", PRIVATE("host", "10485760", "1")));
    control_group_is("0::/user.slice/shell.scope\n");
    control_group("/user.slice", "memory.max", "10485760\n");
    control_group("/user.slice", "memory.current", "1048576\n");
    EXPECT(0, "warning: the host has less than that free now", "check", g_file);
    command_also("9.0 MiB of 10.0 MiB, the limit of the control group /user.slice\n");
    control_group("/user.slice", "memory.current", "0\n");
    EXPECT(0, "10.0 MiB of 10.0 MiB", "check", g_file);
    command_never("warning");
    control_group("/user.slice/shell.scope", "memory.max", "10485759\n");
    static const char *const how[] = {"check", "start"};
    for (size_t i = 0; i < LG_ARRAY_LEN(how); i++) {
        EXPECT(6, "its control group /user.slice/shell.scope may have 10.0 MiB", how[i], g_file);
        command_also("MemoryMax=");
        assert_false(lg_path_exists(scratch_path("run/board")));
    }
    control_group("/user.slice/shell.scope", "memory.max", "9223372036854771712\n");
    control_group("/user.slice", "memory.max", "max\n");
    EXPECT(0, "made: pixart", "check", g_file);
    command_never("control group"); /* more than the machine has */
}

/* In units the slice bounds the run, and a role's own unit each of its processes; not lgsup's unit. */
static void test_limit_of_a_unit(void **state)
{
    (void)state;
    command_program("lg-vae", PLAN("", PRIVATE("host", "2097152", "2")));
    control_group_is("0::/job.slice/jobsup.service\n");
    control_group("/job.slice/jobsup.service", "memory.max", "4096\n");
    control_group("/job.slice/job-vae@0.service", "memory.max", "1048576\n");
    control_group("/job.slice/job-vae@1.service", "memory.max", "1048575\n");
    EXPECT(6,
           "a process of vae needs 1.0 MiB of memory for itself, and its control group "
           "/job.slice/job-vae@1.service may have 1024.0 KiB: raise that limit (MemoryMax=)",
           "start", g_file, "--units", "job");
    control_group("/job.slice", "memory.max", "2097151\n");
    EXPECT(6,
           "the run needs 2.0 MiB of the host's memory, and its control group /job.slice may "
           "have 2.0 MiB",
           "start", g_file, "--units", "job");
    assert_false(lg_path_exists(scratch_path("run/board")));
    /* With room the start goes on, to what is not there in this test. */
    control_group("/job.slice", "memory.max", "2097152\n");
    control_group("/job.slice/job-vae@1.service", "memory.max", "1048576\n");
    EXPECT(3, "RUNTIME_DIRECTORY is not set", "start", g_file, "--units", "job");
}

/* ---- GPUs ---- */

#define GPU(number, cudnn, peers)                                                                  \
    "{\"device\": \"cuda:" #number "\", \"name\": \"NVIDIA H200\", \"capability\": \"9.0\", "      \
    "\"kernels\": \"9.0\", \"driver\": \"13.1\", \"runtime\": \"13.0\", \"cudnn\": \"" cudnn       \
    "\", \"total_bytes\": 10737418240, \"free_bytes\": 8589934592, \"peers\": [" peers "]}"
#define GPUS(text)  "echo '{\"gpus\": [" text "]}'"
#define BOTH(cudnn) GPUS(GPU(0, cudnn, "\"cuda:1\"") "," GPU(1, cudnn, "\"cuda:0\""))
#define ON_GPUS                                                                                    \
    g_file, "--set", "device=cuda", "--set", "vae.gpus=0,1", "--set", "text.gpus=1", "--set",      \
        "trainer.gpus=0"

static void test_gpus(void **state)
{
    (void)state;
    command_program("lg-device", "echo \"$*\" >\"$LG_BIN_DIR/asked\"\n" BOTH("9.14.0"));
    command_program("lg-trainer", PLAN("", PRIVATE("cuda:0", "1073741824", "2")));
    EXPECT(0, "\nvae              2 ", "check", ON_GPUS);
    static const char *const places[] = {" cuda:0,1  ", " cuda:1     ", " cuda:0     ",
                                         " host       "};
    static const char *const roles[] = {"\nvae ", "\ntext ", "\nema ", "\nloader "};
    for (size_t i = 0; i < LG_ARRAY_LEN(roles); i++) {
        const char *line = strstr(command_said(), roles[i]), *end = strchr(line + 1, '\n');
        const char *place = strstr(line, places[i]);
        if (!place || place > end) fail_msg("%s is not%s:\n%s", roles[i], places[i], line);
    }
    command_also("cuda:0 NVIDIA H200, kernels of 9.0, CUDA 13.1 of the driver, 13.0 of this build");
    command_also("\n  2 CUDA contexts             1.1 GiB\n");
    command_also("\n  free now                    8.0 GiB of 10.0 GiB\n");
    command_never("note: without cuDNN");
    char *asked;
    size_t bytes;
    assert_int_equal(lg_read_file(scratch_path("bin/asked"), 4096, &asked, &bytes), 0);
    assert_string_equal(asked, "--json cuda:0 cuda:1\n"); /* those of the run, no others */
    free(asked);
    command_program("lg-device", BOTH(""));
    EXPECT(0, "note: without cuDNN attention and convolutions run on slower", "check", ON_GPUS);
    EXPECT(0, "\nema              1       1  cuda:0,1 ", "check", ON_GPUS, "--set",
           "trainer.gpus=0,1"); /* where the ranks are */
}

/* GPUs that do not reach each other: said, and the roles are asked for the bytes of that. */
static void test_gpus_apart(void **state)
{
    (void)state;
    command_program("lg-device", BOTH("9.14.0"));
    command_program("lg-trainer", "echo \"$*\" >\"$LG_BIN_DIR/asked\"\n" PLAN("", ""));
    EXPECT(0, "goes straight from GPU to GPU\n", "check", ON_GPUS);
    char *asked;
    size_t bytes;
    assert_int_equal(lg_read_file(scratch_path("bin/asked"), 4096, &asked, &bytes), 0);
    assert_null(strstr(asked, "exchange"));
    free(asked);
    command_program("lg-device", GPUS(GPU(0, "", "") "," GPU(1, "", "")));
    EXPECT(0, "goes through host memory: cuda:0 cannot reach the memory of cuda:1\n", "check",
           ON_GPUS);
    assert_int_equal(lg_read_file(scratch_path("bin/asked"), 4096, &asked, &bytes), 0);
    assert_non_null(strstr(asked, "--set parallel.exchange=host\n"));
    free(asked);
}

static void test_gpus_that_are_unfit(void **state)
{
    (void)state;
    command_program("lg-device", "echo 'lg-device: no NVIDIA driver here' >&2; exit 8");
    EXPECT(8, "lgsup: no NVIDIA driver here\n", "check", ON_GPUS);
    command_program("lg-device", GPUS(GPU(0, "", "") "," GPU(1, "", "")));
    EXPECT(3, "cannot reach the memory of cuda:", "check", ON_GPUS, "--set",
           "parallel.exchange=gpu");
    command_program("lg-device", BOTH(""));
    command_program("lg-trainer", PLAN("", PRIVATE("cuda:0", "8053063680", "2")));
    EXPECT(6, "where 8.0 GiB of 10.0 GiB are free: others hold 2.0 GiB", "check", ON_GPUS);
    EXPECT(6, "where 8.0 GiB of 10.0 GiB are free: others hold 2.0 GiB", "start", ON_GPUS);
    command_program("lg-trainer",
                    "echo no algorithm; exit 1"); /* roles are asked one by one there */
    EXPECT(1, "lg-trainer --plan: exit 1 FAILED: no algorithm", "check", ON_GPUS);
}

/* 65 GPUs: more than a run may have. */
static void test_too_many_gpus(void **state)
{
    (void)state;
    char list[512] = "vae.gpus=0", *at = list + strlen(list);
    for (int i = 1; i <= 64; i++) at += sprintf(at, ",%d", i);
    EXPECT(3, "name more than 64 GPUs", "check", g_file, "--set", "device=cuda", "--set", list,
           "--set", "vae.instances=64", "--set", "window.batches=40", "--set", "trainer.gpus=100",
           "--set", "text.gpus=0");
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_host),
        TEST(test_clips),
        TEST(test_roles_are_asked_for_the_same_run),
        TEST(test_classes),
        TEST(test_roles_that_fail),
        TEST(test_room_on_the_host),
        TEST(test_limit_of_the_group),
        TEST(test_limit_of_a_unit),
        TEST(test_gpus),
        TEST(test_gpus_apart),
        TEST(test_gpus_that_are_unfit),
        TEST(test_too_many_gpus),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
