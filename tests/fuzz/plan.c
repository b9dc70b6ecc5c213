/* Fuzz target: a run's plan.json. Its seal keeps changed plans out, so mostly refusals are tried. */
#include "config/plan.h"
#include "tests/fuzz/fuzz.h"
#include <string.h>

LG_FUZZ_TARGET(plan)
{
    lg_plan p = {.batch = 12345};
    if (lg_plan_load(lg_fuzz_file(0, data, bytes), &p) < 0) {
        LG_ASSERT(p.batch == 12345 && lg_err_message()[0]);
        return;
    }
    LG_ASSERT(p.batch >= 0 && p.window_slots >= 0 && strlen(p.isa) < sizeof p.isa);
    for (int r = 0; r < LG_ROLE_COUNT; r++) LG_ASSERT(p.instances[r] >= 0 && p.threads[r] >= 0);
}
