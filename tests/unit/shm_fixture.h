/* A small run for tests: a directory in /tmp, a plan, a board and, if wanted, a keeper process.
 * Failures are assertions: a test without its fixture has nothing to say. */
#pragma once
#include "shm/board.h"
#include "tests/unit/scratch.h"
#include <sys/types.h>

struct shm_fixture {
    char dir[SCRATCH_BYTES], board_path[128], keeper[128];
    lg_plan plan;
    lg_board *board;
    pid_t keeper_pid; /* 0: none */
};

void shm_fixture_open(struct shm_fixture *f, int ranks);
void shm_fixture_start_keeper(struct shm_fixture *f);
/* SIGKILL, and waits for the death. */
void shm_fixture_kill_keeper(struct shm_fixture *f);
/* SIGTERM; it must end by itself, with 0. */
void shm_fixture_end_keeper(struct shm_fixture *f);
/* Waits for its end in any case; -1 when it has to be killed, else waitpid's status. */
int shm_fixture_await_keeper(struct shm_fixture *f);
void shm_fixture_close(struct shm_fixture *f);

/* Memory with a text, as a region for the keeper; the caller closes it. */
int shm_fixture_memory(const char *text);
/* lg_keeper_put of such memory: its result. */
int shm_fixture_put(const struct shm_fixture *f, const char *name, const char *text);
/* Does the keeper give it back, close-on-exec and with these bytes? */
bool shm_fixture_holds(const struct shm_fixture *f, const char *name, const char *text);
/* Does it say that it has no such region? */
bool shm_fixture_lacks(const struct shm_fixture *f, const char *name);

/* enlist + join as this process. */
lg_incarnation shm_fixture_join(lg_board *b, lg_role role, int index);
