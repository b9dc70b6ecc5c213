/* Fuzz target: a pipeline.toml, then overrides, each after a NUL byte.
 *
 * What loads must print as TOML that loads again and prints the same; what passes the rules must
 * give a plan, or an error, but no failed assertion. */
#include "config/config.h"
#include "base/log.h"
#include "config/plan.h"
#include "tests/fuzz/fuzz.h"
#include <stdlib.h>
#include <string.h>

enum { OVERRIDES_MAX = 8 };

static void check_round_trip(const lg_config *c)
{
    lg_config *again = NULL;
    char *text = lg_config_to_toml(c);
    LG_ASSERT(text);
    if (lg_config_load(lg_fuzz_file(1, text, strlen(text)), NULL, 0, &again) < 0) {
        lg_log_error("a printed config does not load");
        LG_ASSERT(!"round trip");
    }
    char *text_again = lg_config_to_toml(again);
    LG_ASSERT(text_again && strcmp(text, text_again) == 0);
    LG_ASSERT(lg_config_compatible(c, again, NULL, NULL) == 0);
    lg_config_free(&again);
    free(text);
    free(text_again);
}

/* Patterns could make the rules walk the whole machine. */
static bool has_pattern(const lg_config *c)
{
    return strpbrk(c->data_path, "*?[") != NULL;
}

LG_FUZZ_TARGET(config)
{
    struct lg_fuzz_input in = {data, bytes};
    char *file = lg_fuzz_text(&in), *overrides[OVERRIDES_MAX];
    int n = 0;
    lg_config *c = NULL;
    lg_plan plan;
    while (in.bytes && n < OVERRIDES_MAX) overrides[n++] = lg_fuzz_text(&in);
    if (lg_config_load(lg_fuzz_file(0, file, strlen(file)), (const char *const *)overrides, n,
                       &c) == 0) {
        check_round_trip(c);
        if (!has_pattern(c) && lg_config_check(c) == 0 && lg_plan_make(c, NULL, &plan) == 0)
            LG_ASSERT(plan.batch >= 1 && plan.window_slots % plan.batch == 0);
    } else {
        LG_ASSERT(!c && lg_err_message()[0]);
    }
    lg_config_free(&c);
    while (n) free(overrides[--n]);
    free(file);
}
