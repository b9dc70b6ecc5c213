/* What is made again in a backward: memory.recompute's words (config/recompute.h) as what each block drops
 * (kernels/graph/recompute.h), and the least of it that keeps within a budget, which is found by compiling. */
#include "config/recompute.h"
#include "kernels/graph/recompute.h"
#include "stages/nets/denoiser_private.h"
#include <stdlib.h>

/* Only what enters each group of blocks is kept. */
static void drop_uniformly(int group, int blocks, unsigned *ret)
{
    for (int b = 0; b < blocks; b++)
        ret[b] = LG_DROP_ALL | LG_DROP_RESULTS | (b % group ? LG_DROP_ENTRY : 0);
}

/* Steps of dropping more, those first that free the most bytes per operation that is made again: norms cost next to
 * nothing, a feed-forward's hidden layer one product of the forward. Step k of class c: the first k blocks drop c, and all
 * blocks what comes before it. Behind the last class: groups of 1, 2 ... blocks, while the group's own entries are not more than
 * those of all groups. */
enum { CLASSES = 3 };
static int steps_of(int blocks)
{
    int group = 1;
    while ((group + 1) * (group + 1) <= blocks) group++;
    return CLASSES * blocks + group;
}
static void drop_for_step(int step, int blocks, unsigned *ret)
{
    static const unsigned classes[CLASSES] = {LG_DROP_NORMS, LG_DROP_MLP, LG_DROP_ALL};
    if (step > CLASSES * blocks) {
        drop_uniformly(step - CLASSES * blocks, blocks, ret);
        return;
    }
    for (int b = 0; b < blocks; b++) {
        ret[b] = 0;
        for (int c = 0; c < CLASSES; c++)
            if (step > c * blocks + b) ret[b] |= classes[c];
    }
}

static size_t activations(const lg_denoiser *net)
{
    return lg_program_arena_bytes(net->program) + lg_program_exchanged_bytes(net->program);
}

/* Bytes of activations with this step, which is compiled. */
static int try_step(lg_denoiser *net, unsigned *drop, int step, size_t *ret)
{
    drop_for_step(step, net->config.depth, drop);
    LG_TRY(lg_denoiser_compile_dropping(net, drop));
    *ret = activations(net);
    return 0;
}

/* The first step from `low` on that keeps within the budget; more steps of the classes never take more memory. -1: none does;
 * *ret_least: bytes of the one with the fewest that was tried. */
static int find_step(lg_denoiser *net, size_t budget, unsigned *drop, int low, int *ret,
                     size_t *ret_least)
{
    const int classes = CLASSES * net->config.depth;
    size_t bytes;
    for (int high = classes; low < high;) {
        int step = low + (high - low) / 2;
        LG_TRY(try_step(net, drop, step, &bytes));
        if (bytes <= budget)
            high = step;
        else
            low = step + 1;
    }
    *ret = low;
    if (low < classes) return 0;
    *ret_least = SIZE_MAX;
    for (; *ret <= steps_of(net->config.depth); ++*ret) {
        LG_TRY(try_step(net, drop, *ret, &bytes));
        *ret_least = LG_MIN(*ret_least, bytes);
        if (bytes <= budget) return 0;
    }
    *ret = -1;
    return 0;
}

/* The ranks of a sequence take the same step, that all of them need: their exchanges must be the same. */
static int fit(lg_denoiser *net, size_t budget, unsigned *drop)
{
    const struct lg_denoiser_mode mode = net->mode;
    const struct lg_band band = net->band;
    size_t least = 0;
    int step = 0;
    for (int r = 0; r < LG_MAX(mode.sequence.degree, 1) && step >= 0; r++) {
        if (lg_sequence_is_split(&mode.sequence)) net->mode.sequence.rank = r;
        struct lg_band of_rank;
        LG_TRY(lg_denoiser_band(&net->config, &net->mode.sequence, &of_rank));
        lg_denoiser_set_band(net, &of_rank);
        LG_TRY(find_step(net, budget, drop, step, &step, &least));
    }
    net->mode = mode;
    lg_denoiser_set_band(net, &band);
    if (step >= 0) LG_TRY(try_step(net, drop, step, &least));
    if (least > budget)
        return LG_FAIL(
            LG_ERR_CONFIG,
            "memory.recompute: a budget of %.2f MiB; with everything recomputed the activations of "
            "a micro-batch of %d still take %.2f MiB: give more, or lower "
            "trainer.micro_batch_size",
            (double)budget * 0x1p-20, net->mode.batch, (double)least * 0x1p-20);
    return 0;
}

static int count_dropped(const unsigned *drop, int blocks, unsigned mask, unsigned of)
{
    int n = 0;
    for (int b = 0; b < blocks; b++) n += (drop[b] & mask) == of;
    return n;
}

static void say_recomputed(const unsigned *drop, int blocks, char ret[LG_RECOMPUTED_BYTES])
{
    const struct {
        const char *what;
        unsigned mask, of; /* those of the mask that are dropped */
    } said[] = {
        {"everything", LG_DROP_ALL, LG_DROP_ALL},
        {"norms", LG_DROP_ALL | LG_DROP_NORMS, LG_DROP_NORMS},
        {"mlp", LG_DROP_ALL | LG_DROP_MLP, LG_DROP_MLP},
    };
    int at = 0;
    const int entries =
        count_dropped(drop, blocks, LG_DROP_RESULTS | LG_DROP_ENTRY, LG_DROP_RESULTS);
    if (entries) {
        snprintf(ret, LG_RECOMPUTED_BYTES, "everything but what enters %d of %d blocks", entries,
                 blocks);
        return;
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(said); i++) {
        int n = count_dropped(drop, blocks, said[i].mask, said[i].of);
        if (n)
            at += snprintf(ret + at, LG_RECOMPUTED_BYTES - (size_t)at, "%s%s in %d of %d blocks",
                           at ? ", " : "", said[i].what, n, blocks);
    }
}

int lg_denoiser_compile_mode(lg_denoiser *net)
{
    const int blocks = net->config.depth;
    struct lg_recompute r;
    LG_TRY(lg_recompute_parse(net->mode.recompute, blocks, &r));
    unsigned *drop = calloc((size_t)blocks, sizeof *drop);
    LG_ASSERT(drop);
    for (int b = 0; b < blocks; b++)
        drop[b] = r.kind == LG_RECOMPUTE_NORMS ? LG_DROP_NORMS
                  : r.kind == LG_RECOMPUTE_MLP ? LG_DROP_MLP
                  : r.block[b]                 ? LG_DROP_ALL
                                               : 0;
    if (r.kind == LG_RECOMPUTE_UNIFORM) drop_uniformly(r.group, blocks, drop);
    int rc = r.kind == LG_RECOMPUTE_BUDGET && net->mode.train
                 ? fit(net, r.budget, drop)
                 : lg_denoiser_compile_dropping(net, drop);
    if (net->mode.train) say_recomputed(drop, blocks, net->bytes.recomputed);
    free(drop);
    lg_recompute_free(&r);
    return rc;
}
