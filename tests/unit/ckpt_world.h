/* A run around the checkpoint writer: run directory, keeper and board are real, the trainer ranks and
 * the EMA keeper are played by the test, by the rules of shm/commit.h. Their numbers follow from the
 * state, so every byte of a checkpoint can be told. Failures of the set-up are assertions. */
#pragma once
#include "stages/stage.h"
#include "stages/trainer/state.h"
#include "supervisor/run/run.h"
#include "tests/unit/shm_fixture.h"

enum { CKPT_EVERY = 3, CKPT_KEEP = 2, CKPT_STEPS = 100000 };

struct ckpt_world {
    struct shm_fixture f; /* its directory is the runtime directory */
    lg_run run;
    lg_board *board;
    lg_stage player; /* maps what the trainer ranks and the EMA keeper map */
    lg_trainer_state *trainer;
    lg_region *ema[LG_INSTANCES_MAX][2];
};

struct ckpt_world_spec {
    const char *device; /* "host", "cuda" */
    int ranks;
    uint64_t steps;    /* 0: CKPT_STEPS */
    int hidden, depth; /* of the net; 0: a small one */
    const char *more;  /* sections of the config besides, or NULL */
};
/* Starts from the repository's root; makes the scratch folder. */
void ckpt_world_open(struct ckpt_world *w, const struct ckpt_world_spec *spec);
void ckpt_world_close(struct ckpt_world *w);

/* The ranks and the EMA keeper go on until state `until` is committed or they wait for the writer. */
void ckpt_world_play(struct ckpt_world *w, uint64_t until);
/* States by the board: */
uint64_t ckpt_world_staged(const struct ckpt_world *w); /* 0: none */
uint64_t ckpt_world_published(const struct ckpt_world *w);

/* Is RUN/checkpoints/<name>_step<state> complete, with the bytes of that state and nothing else? NULL,
 * or what is wrong. */
const char *ckpt_world_wrong(const struct ckpt_world *w, uint64_t state);
bool ckpt_world_has(const struct ckpt_world *w, uint64_t state);

/* A writer inside this process, without its loop: everything that lg_stage_main would open for it. */
int ckpt_writer_open(struct ckpt_world *w, lg_stage *st);
void ckpt_writer_close(lg_stage *st);
/* The whole writer in a process of its own. */
pid_t ckpt_writer_start(struct ckpt_world *w);
