/* The GPUs that a run is to use: what `lg-device` says of them, and whether that is enough. lgsup asks
 * that program because it loads no driver itself. */
#pragma once
#include "config/plan.h"
#include "supervisor/run/run.h"

enum { LG_RUN_GPUS_MAX = 64 };

struct lg_run_gpu {
    int number;                                              /* 2 of "cuda:2" */
    char name[64];                                           /* "NVIDIA H200" */
    char kernels[64];                                        /* kernels/info.h */
    char capability[16], driver[16], runtime[16], cudnn[16]; /* kernels/info.h; cudnn may be "" */
    uint64_t total_bytes, free_bytes, peers;
    int code;        /* 0, or why it cannot be used, */
    char error[512]; /* and in words */
};
struct lg_run_gpus {
    struct lg_run_gpu gpu[LG_RUN_GPUS_MAX];
    int n;
};

/* The numbers that this config's instances run on, each once, growing; returns how many. 0: on the
 * host. LG_ERR_CONFIG when there are more than LG_RUN_GPUS_MAX. */
int lg_run_gpus_used(const lg_config *c, const lg_plan *p, int ret[LG_RUN_GPUS_MAX]);
/* Runs lg-device for these numbers; n = 0: for every GPU of the machine. Fails when it has no list to
 * give (no driver, no GPU, no backend); what is wrong with one GPU stands in its entry. */
int lg_run_gpus_ask(const int *number, int n, struct lg_run_gpus *ret);
/* What lg-device --json has printed, with log lines around it. */
int lg_run_gpus_parse(const char *output, struct lg_run_gpus *ret);
/* Can every GPU of the run be used? With parallel.exchange = "gpu": and do those that work together reach each other's
 * memory? Two do when a trainer rank is on one of them (gradients, latents, embeddings), or text encoders on both (weight
 * shards). */
int lg_run_gpus_check(const lg_config *c, const lg_plan *p, const struct lg_run_gpus *g);
/* The plan's `apart`: must what they hand each other go through host memory? With "auto" where two that work together do
 * not reach each other; and, for tests, where $LG_CUDA_NO_PEER says that none does, even if all work on one GPU.
 * *ret_from, *ret_to: two of them, where there are; else -1. */
bool lg_run_gpus_apart(const lg_config *c, const lg_plan *p, const struct lg_run_gpus *g,
                       int *ret_from, int *ret_to);

/* May a run that lives have n instances of a role? Would they be on GPUs that cannot reach those that they work with, and the
 * run hands over straight from GPU to GPU (which way it takes is decided when it begins, for the instances that it has then), why
 * not: LG_ERR_CONFIG. r: loaded. Asks lg-device, which takes seconds, unless lg_run_gpus_are_new says that there is nothing to ask. */
int lg_run_gpus_scale(const lg_run *r, lg_role role, int n);
bool lg_run_gpus_are_new(const lg_config *c, const lg_plan *p, lg_role role, int n);
