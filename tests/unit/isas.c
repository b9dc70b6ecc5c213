/* A child per instruction set, since oneDNN fixes the set at its first use. */
#include "tests/unit/isas.h"
#include "base/check.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

bool isa_is_here(const char *isa)
{
    if (!strstr(ISAS, isa)) return false;
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!strcmp(isa, "sse2")) return true;
    if (!strcmp(isa, "avx2")) return avx2;
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

void for_each_isa(int (*check)(const char *isa))
{
    static const char *const NAMES[] = {"sse2", "avx2", "avx512"};
    int failed = 0;
    for (size_t k = 0; k < LG_ARRAY_LEN(NAMES); k++) {
        if (!isa_is_here(NAMES[k])) {
            printf("  this machine, or this build, has no %s\n", NAMES[k]);
            continue;
        }
        fflush(NULL);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            int failures = check(NAMES[k]);
            fflush(NULL);
            _exit(failures ? 1 : 0);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (status != 0) printf("  %s: wait status 0x%x\n", NAMES[k], status);
        failed += status != 0;
    }
    assert_int_equal(failed, 0);
}
