/* `lgsup doctor` on machines that lack something: kernels and containers that refuse a call, programs
 * and backends that are missing or do not load, GPUs as lg-device (a script here) tells of them. */
#include "base/fs.h"
#include "tests/unit/command_fixture.h"
#include "tests/unit/scratch.h"
#include <errno.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* Programs of shell, the host backend of this build, and files for sockets: nothing is missing. */
static int setup(void **state)
{
    char host[LG_PATH_BYTES], here[LG_PATH_BYTES];
    command_setup(state);
    command_roles();
    command_program("lg-sample", "exit 0");
    command_program("lg-encode", "exit 0");
    assert_int_equal(lg_mkdirs(scratch_path("backends")), 0);
    assert_int_equal(lg_program_dir(here), 0);
    assert_int_equal(lg_path(host, "%s/../lib/liblg-host.so", here), 0);
    assert_int_equal(symlink(host, scratch_path("backends/liblg-host.so")), 0);
    setenv("LG_BACKEND_DIR", scratch_path("backends"), 1);
    unsetenv("XDG_RUNTIME_DIR");
    return 0;
}

static int teardown(void **state)
{
    unsetenv("LG_BACKEND_DIR");
    unsetenv("XDG_RUNTIME_DIR");
    return command_teardown(state);
}

static void test_all_well(void **state)
{
    (void)state;
    EXPECT(0, "\nall well\n", "doctor");
    command_also("ok       memfd_create ");
    command_also("ok       pidfd_open, _send_signal ");
    command_also("ok       /proc ");
    command_also("ok       lg-trainer ");
    const char *text =
        strstr(command_said(), " lg-text "); /* a role for each encoder, one program */
    assert_true(text && !strstr(text + 1, " lg-text "));
    command_also("ok       backend host ");
    command_also("note     backend cuda ");
    command_also("make cuda");
    command_also("ok       memory ");
    command_also("ok       directory for sockets        /tmp\n");
    command_never("MISSING");
    setenv("LG_BACKEND_DIR", "", 1); /* then those beside the programs */
    EXPECT(0, "ok       backend host ", "doctor");
}

static void test_programs(void **state)
{
    (void)state;
    unlink(scratch_path("bin/lg-vae"));
    EXPECT(8, "\nMISSING  lg-vae ", "doctor");
    command_also("bin/lg-vae is missing or not executable");
    command_also("run `make`, or reinstall");
    command_also("something that is needed is missing\n");
    command_roles();
    unlink(scratch_path("bin/lg-sample")); /* a run can do without */
    EXPECT(0, "\nnote     lg-sample ", "doctor");
}

static void no_memfd(void)
{
    command_refuse(SYS_memfd_create, EPERM);
}
static void no_pidfd(void)
{
    command_refuse(SYS_pidfd_open, ENOSYS);
}
static void no_signal(void)
{
    command_refuse(SYS_pidfd_send_signal, EPERM);
}

/* A call that a container's filter refuses is named, with its error and what to do. */
static void test_refused_calls(void **state)
{
    (void)state;
    g_command_before = no_memfd;
    EXPECT(8, "MISSING  memfd_create                 Operation not permitted\n", "doctor");
    command_also("a container that allows the call");
    g_command_before = no_pidfd;
    EXPECT(8, "MISSING  pidfd_open, _send_signal     Function not implemented\n", "doctor");
    command_also("Linux 5.3 or newer");
    g_command_before = no_signal;
    EXPECT(8, "MISSING  pidfd_open, _send_signal     Operation not permitted\n", "doctor");
}

static void test_backends(void **state)
{
    (void)state;
    scratch_write("backends/liblg-cuda.so", "no library");
    EXPECT(0, "note     backend cuda                 ", "doctor");
    command_also("liblg-cuda.so: file too short");
    unlink(scratch_path("backends/liblg-host.so"));
    EXPECT(8, "MISSING  a backend                    none can be loaded\n", "doctor");
    command_also("note     backend host ");
    command_also("run `make deps` and `make`");
}

static void few_files(void)
{
    struct rlimit files = {.rlim_cur = 512, .rlim_max = 512};
    setrlimit(RLIMIT_NOFILE, &files);
}

static void test_limits(void **state)
{
    (void)state;
    char deep[LG_PATH_BYTES];
    g_command_before = few_files;
    EXPECT(8, "MISSING  open files (ulimit -Hn)      512\n", "doctor");
    command_also("raise the hard limit to 4096");
    g_command_before = NULL;
    assert_int_equal(lg_mkdirs(scratch_path("sockets")), 0);
    setenv("XDG_RUNTIME_DIR", scratch_path("sockets"), 1);
    EXPECT(0, "/sockets\n", "doctor");
    snprintf(deep, sizeof deep, "sockets/%050d", 0); /* a socket's path would not fit */
    assert_int_equal(lg_mkdirs(scratch_path(deep)), 0);
    setenv("XDG_RUNTIME_DIR", scratch_path(deep), 1);
    EXPECT(0, "ok       directory for sockets        /tmp\n", "doctor");
    setenv("XDG_RUNTIME_DIR", scratch_path("nowhere"), 1);
    EXPECT(0, "ok       directory for sockets        /tmp\n", "doctor");
    setenv("XDG_RUNTIME_DIR", "", 1);
    EXPECT(0, "ok       directory for sockets        /tmp\n", "doctor");
}

/* ---- GPUs: the backend loads, and lg-device says what it is told to ---- */

static void gpus(const char *script)
{
    unlink(scratch_path("backends/liblg-cuda.so"));
    assert_int_equal(symlink("liblg-host.so", scratch_path("backends/liblg-cuda.so")), 0);
    command_program("lg-device", script);
}
#define GPU(number, free_bytes, cudnn, peers)                                                      \
    "{\"device\": \"cuda:" #number "\", \"name\": \"NVIDIA H200\", \"capability\": \"9.0\", "      \
    "\"kernels\": \"9.0\", \"driver\": \"13.1\", \"runtime\": \"13.0\", \"cudnn\": \"" cudnn       \
    "\", \"total_bytes\": 150323855360, \"free_bytes\": " #free_bytes ", \"peers\": [" peers "]}"
#define GPUS(text) "echo '{\"gpus\": [" text "]}'"

static void test_gpus(void **state)
{
    (void)state;
    gpus(GPUS(GPU(0, 149250113536, "9.14.0", "\"cuda:1\", \"cuda:2\"") "," GPU(
        1, 149250113536, "9.14.0", "\"cuda:0\"") "," GPU(2, 1073741824, "9.14.0", "")));
    EXPECT(0,
           "ok       cuda:0                       NVIDIA H200, 139.0 GiB of 140.0 GiB free, "
           "kernels of "
           "9.0, CUDA 13.1 of the driver, 13.0 of this build, reaches cuda:1,2\n",
           "doctor");
    command_also("note     cuda:2                       NVIDIA H200, 1.0 GiB of 140.0 GiB free");
    command_also("others hold the rest of its memory: see with nvidia-smi who");
    command_also("note     cuda:0 and cuda:2            do not reach each other's memory\n");
    command_also("note     cuda:1 and cuda:2            do not reach each other's memory\n");
    command_never("cuda:0 and cuda:1");
    command_also("ok       cuDNN                        9.14.0\n");
}

static void test_gpus_that_are_unfit(void **state)
{
    (void)state;
    gpus(GPUS(GPU(0, 149250113536, "", "") ",{\"device\": \"cuda:1\", \"error\": \"cuda:1 is an "
                                           "A100\", \"code\": -10}"));
    EXPECT(0, "note     cuda:1                       cuda:1 is an A100\n", "doctor");
    command_also("note     cuDNN                        missing\n");
    command_also("$LG_CUDNN");
    command_never("cuda:0 and cuda:1"); /* nothing is known of the second */
    gpus("echo 'lg-device: no NVIDIA driver here: install one' >&2; exit 8");
    EXPECT(0, "note     GPUs                         no NVIDIA driver here: install one\n",
           "doctor");
    gpus("echo no driver; exit 8");
    EXPECT(0, "note     GPUs                         no driver\n", "doctor");
    gpus("echo Ouch; kill -SEGV $$");
    EXPECT(0, "lg-device, which asks for the GPUs: signal 11 (Segmentation fault): Ouch\n",
           "doctor");
    gpus("exit 0");
    EXPECT(0, "lg-device, which asks for the GPUs: exit 0: ", "doctor");
    gpus("echo '{\"gpus\": 3}'");
    EXPECT(0, "lg-device: not the list of GPUs that was asked for\n", "doctor");
    unlink(scratch_path("bin/lg-device"));
    EXPECT(0, "bin/lg-device is missing or not executable", "doctor");
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_all_well),
        TEST(test_programs),
        TEST(test_refused_calls),
        TEST(test_backends),
        TEST(test_limits),
        TEST(test_gpus),
        TEST(test_gpus_that_are_unfit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
