/* Deterministic simulation of a whole run in one thread: the real window, board and step protocol,
 * under pretended stages that die.
 *
 * Every stage (loaders, text and VAE instances, trainer ranks, EMA, checkpoint writer) is a state
 * machine whose steps are single stores or loads of shared memory. A scheduler drawn from the seed
 * picks who steps next, at changing speeds; kills a stage between any two of its steps; lets the
 * supervisor bury it and enlist a successor some time later; asks for a drain. Payloads are
 * functions of the sample and the state, written word by word over garbage, and every word is
 * checked by everybody who reads it. At the end, weights, EMA and checkpoints must be those of an
 * undisturbed run.
 *
 * Now and then memory is lost, though by shm/region.h it cannot be: one state, gradient, average or the
 * staging region is new, and so are the processes that had it mapped. Then the run must end in order, with
 * somebody who says so, or with the right bytes if what was lost was not needed any more.
 *
 * `plant` makes the pretended stages break one rule of the protocol: the simulation must notice.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* SIM_PLANT(name, what): violations. */
enum sim_plant {
    SIM_HONEST,
#define SIM_PLANT(name, what) SIM_##name,
#include "tests/unit/sim_plants.def"
#undef SIM_PLANT
    SIM_PLANTS
};

struct sim_options {
    uint64_t seed;
    enum sim_plant plant;
    bool trace; /* every kill, claim, mark and start on stderr */
};

struct sim_result {
    bool failed;
    char why[512];
    uint64_t steps, kills, takeovers, commits, checkpoints, drains, losses, losses_seen;
    uint64_t repeats; /* times that a rank has begun again with its sequence group */
};

void sim_run(const struct sim_options *options, struct sim_result *ret);
const char *sim_plant_name(enum sim_plant p);
const char *sim_plant_what(enum sim_plant p);
