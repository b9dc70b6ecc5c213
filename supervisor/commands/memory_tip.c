/* See memory_tip.h. */
#include "supervisor/commands/memory_tip.h"
#include "base/check.h"
#include <string.h>

#define TENTHS (0x1p30 / 10)

/* "budget:33.9GiB", rounded down; false: it is none. */
static bool budget_word(uint64_t budget, char *ret, size_t bytes)
{
    if (budget >= 1u << 30)
        snprintf(ret, bytes, "budget:%.1fGiB", (double)(uint64_t)((double)budget / TENTHS) / 10);
    else
        snprintf(ret, bytes, "budget:%lluMiB", (unsigned long long)(budget >> 20));
    return budget >= 1u << 20;
}

/* What a rank's activations may be for the GPU to be large enough; false: nothing. */
static bool find_budget(const struct lg_memory_device *d, char *ret, size_t bytes)
{
    const uint64_t over = lg_memory_need(d) - d->total_bytes;
    const uint64_t each = d->activations / d->ranks, less = (over + d->ranks - 1) / d->ranks;
    return less < each && budget_word(each - less, ret, bytes);
}

#define NO_BITS "no bits change"
/* From what costs least. */
static const struct {
    const char *set[4], *text, *bits;
} WAYS[] = {
    {{"memory.recompute=block"}, "memory.recompute = \"block\"", NO_BITS},
    {{"memory.recompute=block", "memory.offload_activations=true"},
     "memory.recompute = \"block\" and memory.offload_activations = true",
     NO_BITS},
    {{"memory.recompute=block", "memory.offload_activations=true", "memory.offload_ema=true"},
     "memory.recompute = \"block\", memory.offload_activations = true and memory.offload_ema = "
     "true",
     NO_BITS},
    {{"memory.recompute=block", "memory.offload_activations=true", "memory.offload_ema=true",
      "memory.mlp_chunks=8"},
     "memory.recompute = \"block\", memory.offload_activations = true, memory.offload_ema = true "
     "and memory.mlp_chunks = 8",
     "the last one decides bits: another run"},
};

void lg_memory_tip(const struct lg_memory *m, lg_memory_try *fits, void *of,
                   char ret[LG_MEMORY_TIP_BYTES])
{
    const struct lg_memory_device *d = lg_memory_small_gpu(m);
    char budget[32], set[64], text[LG_MEMORY_TIP_BYTES - 96] = "";
    const char *bits = NO_BITS;
    *ret = 0;
    if (!d || !d->ranks) return;
    if (find_budget(d, budget, sizeof budget)) {
        snprintf(set, sizeof set, "memory.recompute=%s", budget);
        if (fits(of, (const char *const[]){set}, 1))
            snprintf(text, sizeof text, "memory.recompute = \"%s\"", budget);
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(WAYS) && !*text; i++) {
        if (!fits(of, WAYS[i].set, (int)i + 1)) continue;
        snprintf(text, sizeof text, "%s", WAYS[i].text);
        bits = WAYS[i].bits;
    }
    if (*text) snprintf(ret, LG_MEMORY_TIP_BYTES, "set %s, with which it fits (%s)", text, bits);
}

void lg_memory_less_recomputed(const struct lg_memory *m, lg_memory_try *fits, void *of,
                               char ret[LG_MEMORY_TIP_BYTES])
{
    uint64_t budget = UINT64_MAX, each = 0;
    char word[32], set[64];
    *ret = 0;
    for (int i = 0; i < m->n_devices; i++) {
        const struct lg_memory_device *d = &m->device[i];
        if (!d->ranks || !d->total_bytes || !strcmp(d->name, "host")) continue;
        const uint64_t room = LG_MIN(d->free_bytes, d->total_bytes) / 50 * 49;
        const uint64_t need = lg_memory_need(d);
        if (need > room) return;
        each = LG_MAX(each, d->activations / d->ranks);
        budget = LG_MIN(budget, (d->activations + room - need) / d->ranks);
    }
    if (!each || budget / 11 < each / 10) return;
    if (fits(of, (const char *const[]){"memory.recompute=none"}, 1)) {
        snprintf(ret, LG_MEMORY_TIP_BYTES, "none");
        return;
    }
    if (!budget_word(budget, word, sizeof word)) return;
    snprintf(set, sizeof set, "memory.recompute=%s", word);
    if (fits(of, (const char *const[]){set}, 1)) snprintf(ret, LG_MEMORY_TIP_BYTES, "%s", word);
}
