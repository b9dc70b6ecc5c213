/* The fuzz targets (tests/fuzz) without a fuzzer: every seed as it is, cut at several places, and with
 * changed bytes, the same ones each time. Under the sanitizers of `make check` this finds again what
 * fuzzing found once. */
#include "base/clock.h"
#include "base/fs.h"
#include "base/philox.h"
#include "tests/fuzz/fuzz.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define LG_FUZZ(target, folder) void lg_fuzz_##target(const uint8_t *data, size_t bytes);
#include "tests/fuzz/targets.def"
#undef LG_FUZZ

/* CHANGES and CUTS are tried for each seed until TARGET_NS are used up; the seeds themselves always. */
enum { SEED_BYTES_MAX = 1 << 16, CUTS = 8, CHANGES = 24, CHANGED_BYTES_MAX = 4 };
#define TARGET_NS (150 * LG_MS_NS)

typedef void (*target_fn)(const uint8_t *data, size_t bytes);
struct target {
    const char *name, *folder;
    target_fn run;
};

/* In memory of exactly that size, so that a sanitizer sees a read past the end. */
static void run_copy(target_fn run, const char *data, size_t bytes)
{
    uint8_t *copy = malloc(bytes ? bytes : 1);
    assert_non_null(copy);
    memcpy(copy, data, bytes);
    run(copy, bytes);
    lg_err_clear();
    free(copy);
}

static void run_variants(target_fn run, char *data, size_t bytes, int64_t end_ns)
{
    uint64_t seed = lg_hash(data, bytes);
    for (size_t i = 0; i < CUTS && bytes && lg_now_ns() < end_ns; i++)
        run_copy(run, data, lg_philox(seed, LG_PURPOSE_CROP, i, 0).v[0] % bytes);
    for (size_t i = 0; i < CHANGES && bytes && lg_now_ns() < end_ns; i++) {
        char was[CHANGED_BYTES_MAX];
        size_t at[CHANGED_BYTES_MAX];
        for (unsigned k = 0; k < CHANGED_BYTES_MAX; k++) {
            uint32_t word = lg_philox(seed, LG_PURPOSE_FLIP, i, k).v[0];
            at[k] = lg_philox(seed, LG_PURPOSE_FLIP, i, k).v[1] % bytes;
            was[k] = data[at[k]];
            if (k <= i % CHANGED_BYTES_MAX)
                data[at[k]] =
                    (char)(word & 1 ? word >> 8 : 1u << (word >> 8) % 8 ^ (unsigned char)was[k]);
        }
        run_copy(run, data, bytes);
        for (unsigned k = CHANGED_BYTES_MAX; k-- > 0;) data[at[k]] = was[k];
    }
}

static int run_folder(const struct target *t, const char *folder, int64_t end_ns)
{
    struct dirent **entries = NULL;
    int n = scandir(folder, &entries, NULL, alphasort), seeds = 0;
    for (int i = 0; i < n; i++) {
        char path[LG_PATH_BYTES], *data = NULL;
        size_t bytes;
        assert_int_equal(lg_path(path, "%s/%s", folder, entries[i]->d_name), 0);
        if (entries[i]->d_name[0] != '.') {
            if (lg_read_file(path, SEED_BYTES_MAX, &data, &bytes) < 0)
                fail_msg("%s", lg_err_text());
            run_copy(t->run, data, bytes);
            run_variants(t->run, data, bytes, end_ns);
            free(data);
            seeds++;
        }
        free(entries[i]);
    }
    free(entries);
    return seeds;
}

static void replay(void **state)
{
    const struct target *t = *state;
    char folder[LG_PATH_BYTES];
    int64_t end_ns = lg_now_ns() + TARGET_NS;
    run_copy(t->run, "", 0);
    assert_int_equal(lg_path(folder, "tests/fuzz/corpus/%s", t->name), 0);
    int seeds = run_folder(t, folder, end_ns);
    if (t->folder[0]) seeds += run_folder(t, t->folder, end_ns);
    assert_true(seeds >= 3);
}

int main(void)
{
    static struct target targets[] = {
#define LG_FUZZ(target, folder) {#target, folder, lg_fuzz_##target},
#include "tests/fuzz/targets.def"
#undef LG_FUZZ
    };
    struct CMUnitTest tests[LG_ARRAY_LEN(targets)];
    for (size_t i = 0; i < LG_ARRAY_LEN(targets); i++)
        tests[i] = (struct CMUnitTest){
            .name = targets[i].name, .test_func = replay, .initial_state = &targets[i]};
    lg_fuzz_quiet();
    return _cmocka_run_group_tests("fuzz corpora", tests, LG_ARRAY_LEN(tests), NULL, NULL);
}
