/* What `lgsup top` gets from NVIDIA's management library, which this program plays: GPUs that answer,
 * that are lost or keep something to themselves, a library that fails or is another one. The library is
 * opened once, so each case is a process of its own. */
#include "base/check.h"
#include "supervisor/views/nvml.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* ---- the library (linked with -rdynamic) ---- */

static struct {
    int init, count_rc;
    unsigned count;
    unsigned lost, nameless, memoryless, idle, busy; /* bits: GPUs that refuse, or say 200 % */
} g_played;
static unsigned g_index[32];

#define EXPORT __attribute__((visibility("default")))
EXPORT int nvmlInit_v2(void);
EXPORT int nvmlDeviceGetCount_v2(unsigned int *);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int, void **);
EXPORT int nvmlDeviceGetName(void *, char *, unsigned int);
EXPORT int nvmlDeviceGetMemoryInfo(void *, unsigned long long[3]);
EXPORT int nvmlDeviceGetUtilizationRates(void *, unsigned int[2]);

static int refuses(unsigned bits, const void *device)
{
    return bits >> *(const unsigned *)device & 1 ? 15 : 0;
}
int nvmlInit_v2(void)
{
    return g_played.init;
}
int nvmlDeviceGetCount_v2(unsigned int *ret)
{
    *ret = g_played.count;
    return g_played.count_rc;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **ret)
{
    g_index[i] = i;
    *ret = &g_index[i];
    return refuses(g_played.lost, *ret);
}
int nvmlDeviceGetName(void *d, char *ret, unsigned int bytes)
{
    snprintf(ret, bytes, "Played %u", *(unsigned *)d);
    return refuses(g_played.nameless, d);
}
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long ret[3])
{
    ret[0] = 80, ret[1] = 60, ret[2] = 20;
    return refuses(g_played.memoryless, d);
}
int nvmlDeviceGetUtilizationRates(void *d, unsigned int ret[2])
{
    ret[0] = g_played.busy >> *(unsigned *)d & 1 ? 200 : 40, ret[1] = 1;
    return refuses(g_played.idle, d);
}

/* ---- tests ---- */

/* lg_gpus_read in a fresh process. */
static int read_gpus(const char *library, struct lg_gpu ret[LG_NVML_MAX])
{
    int fds[2], n = -1;
    fflush(NULL);
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        lg_gpus_read(library, ret);
        n = lg_gpus_read("libm.so.6", ret) /* only the first name counts */;
        LG_ASSERT(write(fds[1], &n, sizeof n) == sizeof n);
        LG_ASSERT(write(fds[1], ret, LG_NVML_MAX * sizeof *ret) > 0);
        scratch_exit(0);
    }
    close(fds[1]);
    assert_int_equal(read(fds[0], &n, sizeof n), sizeof n);
    assert_int_equal(read(fds[0], ret, LG_NVML_MAX * sizeof *ret), LG_NVML_MAX * sizeof *ret);
    close(fds[0]);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    return n;
}

static void test_gpus(void **state)
{
    (void)state;
    struct lg_gpu g[LG_NVML_MAX] = {0};
    memset(&g_played, 0, sizeof g_played);
    g_played.count = 5;
    g_played.lost = 1 << 0;
    g_played.memoryless = 1 << 1;
    g_played.nameless = 1 << 3;
    g_played.idle = 1 << 3;
    g_played.busy = 1 << 4;
    assert_int_equal(read_gpus("", g), 3); /* who does not tell its memory is left out */
    assert_string_equal(g[0].name, "Played 2");
    assert_int_equal(g[0].total_bytes, 80);
    assert_int_equal(g[0].used_bytes, 20);
    assert_int_equal(g[0].busy_percent, 40);
    assert_string_equal(g[1].name, "GPU");
    assert_int_equal(g[1].busy_percent, -1);
    assert_int_equal(g[2].busy_percent, 100);
    g_played.lost = 0;
    g_played.count = 30;
    assert_int_equal(read_gpus("", g), LG_NVML_MAX);
}

static void test_no_gpus(void **state)
{
    (void)state;
    struct lg_gpu g[LG_NVML_MAX] = {0};
    memset(&g_played, 0, sizeof g_played);
    assert_int_equal(read_gpus("", g), 0);
    g_played.count = 2;
    assert_int_equal(read_gpus("", g), 2);
    g_played.count_rc = 999;
    assert_int_equal(read_gpus("", g), 0);
    g_played.count_rc = 0;
    g_played.init = 9; /* no driver */
    assert_int_equal(read_gpus("", g), 0);
    assert_int_equal(read_gpus("/nowhere/libnvidia-ml.so.1", g), 0);
    assert_int_equal(read_gpus("libm.so.6", g), 0); /* another library */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gpus), cmocka_unit_test(test_no_gpus)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
