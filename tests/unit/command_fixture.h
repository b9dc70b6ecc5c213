/* Commands of lgsup, each called in a process of its own, in a scratch folder: what the user reads, and
 * the exit code. For commands that need no living run; for those that do: supervise_fixture.h.
 *
 * $LG_BIN_DIR is the folder's bin/, empty at first. */
#pragma once
#include "shm/board.h"
#include "supervisor/run/run.h"

int command_setup(void **state);
int command_teardown(void **state);
#define COMMAND_TEST(f) cmocka_unit_test_setup_teardown(f, command_setup, command_teardown)

/* Exit code of `lgsup words...` (ended by NULL); 128 + n: signal n. What it prints replaces
 * command_said(). */
int command(const char *const *words);
const char *command_said(void);
/* Fails the test unless `lgsup words...` ends with `code` and says `part`. */
void command_expect(int code, const char *part, const char *const *words);
#define EXPECT(code, part, ...)                                                                    \
    command_expect((code), (part), (const char *const[]){__VA_ARGS__ __VA_OPT__(, ) NULL})
/* Did the last one say that, too? */
void command_also(const char *part);
void command_never(const char *part);

/* Called in the command's process before the command; setup makes it NULL. */
extern void (*g_command_before)(void);
/* For it: this system call fails from here on, as where a container's filter refuses it. */
void command_refuse(int call, int error);

/* bin/NAME, run by sh. */
void command_program(const char *name, const char *script);
/* bin/NAME for every role, the keeper and lg-device: prints an empty plan, ends well. */
void command_roles(void);
/* The scratch folder's pipeline.toml, of a run in its run/; more: lines of TOML after it (its own
 * sections). Models are those of the emoji example. */
const char *command_pipeline(const char *more);

/* The run of `file` as a start leaves it before any process: directories, config, plan, and the board
 * unless NULL. The caller closes both. */
void command_run(const char *file, lg_run *ret, lg_board **ret_board);
/* A complete checkpoint of `step` in it, of one file, and the ledger up to there. */
void command_checkpoint(const lg_run *r, uint64_t step);
