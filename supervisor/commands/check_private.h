/* What check.c asks and check_print.c prints. */
#pragma once
#include "supervisor/commands/check.h"
#include "supervisor/run/gpus.h"
#include "supervisor/commands/memory.h"
#include "supervisor/launch/launcher.h"

struct check {
    const char *file;
    const char *const *set;
    int n_set;
    const lg_config *config;
    lg_plan *plan;
    const struct lg_launcher *launcher; /* of `run`, or of one that lgsup would start by itself */
    const lg_run *run;                  /* NULL: none yet */
    struct lg_run_gpus gpus;
    int from, to;     /* two that do not reach each other; -1: there are none */
    size_t described; /* bytes of each GPU, which is not asked; 0: they are */
    struct lg_memory memory;
    char *said[LG_ROLE_COUNT]; /* by each role of itself */
};

/* The plan, what a published model decided, processes, GPUs, the way between them, memory: on stdout. */
void lg_check_print(const struct check *k);
