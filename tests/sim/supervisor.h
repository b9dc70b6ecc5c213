/* A machine under the real supervisor: clock, processes, signals, messages and the keeper are
 * pretended (calls in supervisor.calls), the poll loop, the tables of states.def, intensity, hang
 * looks and adoption are lgsup's own, and so are board, window and step protocol, on which the
 * stages of sim_stages.c work as processes that lgsup has started.
 *
 * Whatever may happen to a machine happens, drawn from the seed: processes die of signals, exit with
 * errors before and after they are ready, hang, cannot be started; pids are used again, also by
 * strangers; lgsup dies between any two of its calls and another adopts, stands still, or the whole
 * machine sleeps; the keeper dies; messages come late, twice, never.
 *
 * What must hold: lgsup signals only processes that are its own, and kills for a hang only what has
 * not moved; a row never has two processes that work; the run ends, with the bytes of an undisturbed
 * run, and nobody is left. */
#pragma once
#include "tests/unit/sim.h"

/* Machine troubles that the supervisor must not survive silently: each shall be noticed. */
enum sim_trouble {
    SIM_NO_TROUBLE,
    SIM_DEAF_PIDFD,  /* one process's pidfd never fires: a standstill */
    SIM_DOUBLE_JOIN, /* a process joins although its row does not want it */
    SIM_EARLY_FIRE,  /* pidfds fire while the process still lives */
    SIM_WRONG_START, /* start times cannot be told apart: pids that are used again deceive */
    SIM_TROUBLES
};

struct sim_machine_options {
    struct sim_options run;
    enum sim_trouble trouble;
};

struct sim_machine_result {
    struct sim_result run;
    uint64_t starts, hangs, sleeps, lgsup_deaths, keeper_deaths, messages, parks, memory_losses,
        memory_resumes, scales;
};

void sim_machine_run(const struct sim_machine_options *options, struct sim_machine_result *ret);
