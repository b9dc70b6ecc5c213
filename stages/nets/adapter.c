/* See adapter.h. */
#include "stages/nets/adapter.h"
#include <fnmatch.h>
#include <string.h>

static const struct {
    const char *name;
    const char *pattern[12];
} presets[] = {
    {"attention",
     {"*.to_q", "*.to_k", "*.to_v", "*.to_out.0", "*.add_q_proj", "*.add_k_proj", "*.add_v_proj",
      "*.to_add_out"}},
    {"linear", {"transformer_blocks.*", "single_transformer_blocks.*", "*.attentions.*"}},
};

static bool target_takes(const char *target, const char *module)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(presets); i++) {
        if (strcmp(target, presets[i].name)) continue;
        for (const char *const *p = presets[i].pattern; *p; p++)
            if (!fnmatch(*p, module, 0)) return true;
        return false;
    }
    return !fnmatch(target, module, 0);
}

bool lg_adapter_takes(const struct lg_adapter *a, const char *module)
{
    if (!a->rank) return false;
    if (!a->targets || !*a->targets) return target_takes(presets[0].name, module);
    for (const char *const *t = a->targets; *t; t++)
        if (target_takes(*t, module)) return true;
    return false;
}

bool lg_adapter_owns(const char *param)
{
    const size_t n = strlen(param), tail = sizeof LG_ADAPTER_UP - 1;
    return n > tail &&
           (!strcmp(param + n - tail, LG_ADAPTER_UP) || !strcmp(param + n - tail, LG_ADAPTER_DOWN));
}
