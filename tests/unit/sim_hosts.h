/* Deterministic simulation of several hosts in one thread: production's exchangers, step protocol and hosts' functions
 * (stages/exchange, shm/commit, shm/hosts), over a pretended network and under pretended ranks, writers and supervisors.
 *
 * What happens follows from the seed: who goes on, when what is sent arrives and how much of it, which notes are lost or come
 * again, which connections fail, and whether their makers hear of it, who cannot reach whom for a while and in which direction,
 * which process dies (an exchange process in the middle of a turn,
 * between any two calls of its transport), which host with all its memory. The pretended supervisors notice deaths late,
 * tell the hosts of an epoch one after the other, shut out hosts that still live and go on for a while, and take in
 * new ones with the number of those that are gone.
 *
 * At each step every rank compares its state, the sum over all hosts, the loss and the samples' hash, bit for bit,
 * with those of a run without hosts. What a host believes of another is no more than that one has done. At the end every host
 * has the last state and its checkpoint is written. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum sim_hosts_plant {
    SIM_HOSTS_HONEST,
#define SIM_HOSTS_PLANT(name, what) SIM_HOSTS_##name,
#include "tests/unit/sim_hosts_plants.def"
#undef SIM_HOSTS_PLANT
    SIM_HOSTS_PLANTS
};

struct sim_hosts_options {
    uint64_t seed;
    enum sim_hosts_plant plant;
    bool trace;
};

struct sim_hosts_result {
    bool failed;
    char why[512];
    uint64_t turns, commits, kills, host_deaths, shut_out, epochs, taken_in, cuts, failures, drains;
    uint64_t leaders, lost; /* leaders that died; runs in which the last host with a state did */
};

void sim_hosts_run(const struct sim_hosts_options *options, struct sim_hosts_result *ret);
const char *sim_hosts_plant_name(enum sim_hosts_plant p);
const char *sim_hosts_plant_what(enum sim_hosts_plant p);
