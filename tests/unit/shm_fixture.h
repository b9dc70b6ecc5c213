/* A small run for tests: a directory in /tmp, a plan, a board and, if wanted, a keeper process.
 * Failures are assertions: a test without its fixture has nothing to say. */
#pragma once
#include "shm/board.h"
#include <sys/types.h>

struct shm_fixture {
    char dir[64], board_path[128], keeper[128];
    lg_plan plan;
    lg_board *board;
    pid_t keeper_pid; /* 0: none */
};

void shm_fixture_open(struct shm_fixture *f, int ranks);
void shm_fixture_start_keeper(struct shm_fixture *f);
/* SIGKILL, and waits for the death. */
void shm_fixture_kill_keeper(struct shm_fixture *f);
void shm_fixture_close(struct shm_fixture *f);

/* enlist + join as this process. */
lg_incarnation shm_fixture_join(lg_board *b, lg_role role, int index);
