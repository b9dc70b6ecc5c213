/* See memory_tip.h. */
#include "supervisor/commands/memory_tip.h"
#include "base/check.h"

#define TENTHS (0x1p30 / 10)

/* What a rank's activations may be for the GPU to be large enough, as "budget:33.9GiB"; false: nothing of them. */
static bool find_budget(const struct lg_memory_device *d, char *ret, size_t bytes)
{
    const uint64_t over = lg_memory_need(d) - d->total_bytes;
    const uint64_t each = d->activations / d->ranks, less = (over + d->ranks - 1) / d->ranks;
    if (less >= each) return false;
    const uint64_t budget = each - less;
    if (budget >= 1u << 30)
        snprintf(ret, bytes, "budget:%.1fGiB", (double)(uint64_t)((double)budget / TENTHS) / 10);
    else
        snprintf(ret, bytes, "budget:%lluMiB", (unsigned long long)(budget >> 20));
    return budget >= 1u << 20;
}

/* From what costs least. */
static const struct {
    const char *set[3], *text;
} WAYS[] = {
    {{"memory.recompute=block"}, "memory.recompute = \"block\""},
    {{"memory.recompute=block", "memory.offload_activations=true"},
     "memory.recompute = \"block\" and memory.offload_activations = true"},
    {{"memory.recompute=block", "memory.offload_activations=true", "memory.offload_ema=true"},
     "memory.recompute = \"block\", memory.offload_activations = true and memory.offload_ema = "
     "true"},
};

void lg_memory_tip(const struct lg_memory *m, lg_memory_try *fits, void *of,
                   char ret[LG_MEMORY_TIP_BYTES])
{
    const struct lg_memory_device *d = lg_memory_small_gpu(m);
    char budget[32], set[64], text[LG_MEMORY_TIP_BYTES - 64] = "";
    *ret = 0;
    if (!d || !d->ranks) return;
    if (find_budget(d, budget, sizeof budget)) {
        snprintf(set, sizeof set, "memory.recompute=%s", budget);
        if (fits(of, (const char *const[]){set}, 1))
            snprintf(text, sizeof text, "memory.recompute = \"%s\"", budget);
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(WAYS) && !*text; i++)
        if (fits(of, WAYS[i].set, (int)i + 1)) snprintf(text, sizeof text, "%s", WAYS[i].text);
    if (*text)
        snprintf(ret, LG_MEMORY_TIP_BYTES, "set %s, with which it fits (no bits change)", text);
}
