/* The world of test_sim_disk: processes that train and publish on the disk of disk.h, and a start
 * that looks at what is left. A promise that is broken leaves by longjmp to `failed`, with `why`.
 * */
#pragma once
#include "config/ledger.h"
#include "config/manifest.h"
#include "stages/ckpt/publish.h"
#include "stages/trainer/records.h"
#include "supervisor/run/run.h"
#include "tests/sim/disk.h"
#include <setjmp.h>

enum { DISK_STEPS_MAX = 24 };

struct world {
    uint64_t seed, rng;
    bool trace, writing; /* writing: a checkpoint, while which the trainer goes on */
    int every, keep;
    struct lg_denoiser_config net;
    lg_params params;
    float *values; /* w, m, v, ema of one state */
    struct life {  /* what a start begins with */
        lg_run run;
        lg_records *records;
        uint64_t committed, staged, published; /* published: reported as such; 0: none */
        int others; /* checkpoints of another run that stood in the way of ours and have to stay */
        bool no_board; /* after a power cut, until the disk has been asked */
    } now;
    uint64_t hash[DISK_STEPS_MAX + 1][LG_MANIFEST_FILES_MAX];
    lg_manifest manifest, found; /* to be published; of a start */
    uint64_t die_at;             /* the change that ends this life */
    uint64_t refused;
    uint32_t world;
    const int *fate; /* of the futures that are looked at */
    int n_fates;
    bool lost_power; /* in the future that is looked at */
    struct counts {
        uint64_t cuts, kills;                   /* that ended a life */
        uint64_t futures, future_deaths, known; /* at a change; known: nothing new in them */
        uint64_t choices_known, publishes, resumes;
    } count;
    jmp_buf failed;
    char why[512];
};

/* As that seed draws it; the disk is made anew. */
void open_world(struct world *w, uint64_t seed, enum disk_lie lie);
void make_net(struct world *w);
/* As `lgsup start` does, checking what it finds. false: the run is over. */
bool start(struct world *w, bool machine_lost_power);
/* Trains and publishes until it dies or all steps are made. */
void live(struct world *w);
/* Starts in copies of the disk, cut now, in each way that w->fate names. */
void look_at_futures(struct world *w);
/* Lives in a row, up to the last step. */
void live_on(struct world *w);
