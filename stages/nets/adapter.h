/* Low-rank adapters (LoRA; Hu et al. 2021). Beside a linear of a frozen net, y = x W^T + b, lie two narrow ones that are
 * trained:
 *
 *     y = x W^T + b + (alpha / rank) (x A^T) B^T        A (rank, in), B (out, rank)
 *
 * A starts uniform in (-1, 1) / sqrt(in), B at zero, as in peft: at first the net is what it was. Parameters are named as
 * in peft, MODULE.lora_A.weight and MODULE.lora_B.weight, and belong to the unit of the linear; all others are frozen. Of linears
 * that are one product (q, k, v), all of which it takes, the A lie behind each other as one matrix, and so do the B. */
#pragma once
#include "base/check.h"

#define LG_ADAPTER_DOWN ".lora_A.weight"
#define LG_ADAPTER_UP   ".lora_B.weight"

struct lg_adapter {
    int rank; /* 0: there is none */
    double alpha;
    /* Which linears, up to NULL: names of modules as in the file, as a shell's patterns ("*.attn1.to_q"); or "attention":
     * queries, keys, values and outputs; or "linear": all of the blocks'. None: "attention". */
    const char *const *targets;
};

bool lg_adapter_takes(const struct lg_adapter *a, const char *module);
static inline double lg_adapter_scale(const struct lg_adapter *a)
{
    return a->alpha / a->rank;
}
/* Is it one of an adapter's parameters? */
bool lg_adapter_owns(const char *param);
