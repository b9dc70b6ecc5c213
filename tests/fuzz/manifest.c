/* Fuzz target: the manifest.json of a checkpoint that holds the files "a" (1 byte) and "b" (none). */
#include "config/manifest.h"
#include "tests/fuzz/fuzz.h"
#include <stdlib.h>
#include <string.h>

LG_FUZZ_TARGET(manifest)
{
    static const char *dir;
    if (!dir) {
        lg_fuzz_write("a", "x", 1);
        lg_fuzz_write("b", "", 0);
        dir = lg_fuzz_link("manifest.json", 0);
    }
    lg_fuzz_file(0, data, bytes);
    lg_manifest m = {.step = 12345};
    if (lg_manifest_load(dir, &m) < 0) {
        LG_ASSERT(m.step == 12345 && lg_err_message()[0]);
        return;
    }
    LG_ASSERT(m.n_files >= 0 && m.n_files <= LG_MANIFEST_FILES_MAX);
    LG_ASSERT(m.ranks >= 0 && m.threads >= 0);
    LG_ASSERT(strlen(m.name) < sizeof m.name && strlen(m.isa) < sizeof m.isa);
    for (int i = 0; i < m.n_files; i++) {
        LG_ASSERT(m.file[i].path[0] != '/' && strncmp(m.file[i].path, "../", 3) != 0);
        LG_ASSERT(!strstr(m.file[i].path, "/../") && m.file[i].bytes < INT64_MAX);
    }
    (void)lg_manifest_verify(&m, dir);
}
