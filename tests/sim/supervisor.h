/* A machine under the real supervisor: clock, processes, signals, messages and the keeper are
 * pretended (calls in supervisor.calls), the poll loop, the tables of states.def, intensity, hang
 * looks and adoption are lgsup's own, and so are board, window and step protocol, on which the
 * stages of sim_stages.c work as processes that lgsup has started.
 *
 * Whatever may happen to a machine happens, drawn from the seed: processes die of signals, exit with
 * errors before and after they are ready, hang, also before they have joined, cannot be started; pids are used again, also by
 * strangers; lgsup dies between any two of its calls and another adopts, stands still, or the whole
 * machine sleeps; the keeper dies, also together with all who hold the training state; messages come late, twice, never. `lgsup swap` is ordered of any
 * role at any moment, and more often while a checkpoint is written, with programs that are good, that
 * crash or hang before or after they have taken over, that have another layout or are missing.
 *
 * What must hold: lgsup signals only processes that are its own, and kills for a hang only what has
 * not moved; nobody is started for a row as long as a process of it lives, whoever started that and however far
 * it has come; a row never has two processes that work, and nobody works beside the rows; the run ends,
 * with the bytes of an undisturbed run and every checkpoint written once, and nobody is left; memory in
 * which somebody has worked is there until then, or its loss is said. Of a
 * swap: nobody is told to leave before who follows is ready; it is answered once; then its instances
 * run the new program or, if it says that it was rolled back, the former one, also after each further
 * death of theirs and of lgsup. */
#pragma once
#include "config/plan.h"
#include "tests/unit/sim.h"

/* X(name, what): machine troubles that the supervisor must not survive silently: each shall be
 * noticed. */
#define SIM_MACHINE_TROUBLES(X)                                                                    \
    X(DEAF_PIDFD, "one process's pidfd never fires: a standstill")                                 \
    X(UNHELD, "a process begins although lgsup has died before it was named")                      \
    X(EARLY_FIRE, "pidfds fire while the process still lives")                                     \
    X(WRONG_START, "start times cannot be told apart: pids that are used again deceive")           \
    X(USE_UNCOPIED, "a stage works in memory of which lgsup has no copy yet")                      \
    X(LEAVE_BUSY, "a process that is told to leave leaves in the middle of its work")
enum sim_trouble {
    SIM_NO_TROUBLE,
#define X(name, what) SIM_##name,
    SIM_MACHINE_TROUBLES(X)
#undef X
        SIM_TROUBLES
};

struct sim_machine_options {
    struct sim_options run;
    enum sim_trouble trouble;
};

struct sim_machine_result {
    struct sim_result run;
    uint64_t starts, hangs, sleeps, lgsup_deaths, keeper_deaths, messages, parks, memory_losses,
        memory_resumes, scales, stuck_parks, gentle_kills, unreachables, unjoined;
    /* swaps: orders that lgsup has read; of these carried out (by role), or answered with an error;
     * given while a checkpoint was written; under way when lgsup died; processes that took over */
    uint64_t swap_orders, swaps[LG_ROLE_keeper], swap_errors, swaps_in_write, swap_deaths,
        successions;
    uint64_t disasters, waits; /* of keeper and training state; of processes, for copies */
    uint64_t spared;           /* disasters that left none but the processes of a swap */
};

void sim_machine_run(const struct sim_machine_options *options, struct sim_machine_result *ret);
