/* A run of the supervisor with real processes that do not compute (fake_stage.h): for the programs
 * test_supervise_* and test_units. The program itself plays every stage, in a scratch folder.
 *
 * Every wait is for a condition. It is bounded by a number of looks, not by the clock: on a machine
 * with far more to do than it can, a look comes as late as everything that it waits for, and a
 * limit in seconds would fail the test for the load alone. What lgsup says is collected in g_out.
 * */
#pragma once
#include "base/fs.h"
#include "supervisor/views/status.h"
#include <stdbool.h>
#include <sys/types.h>

enum { LOOK_US = 2000, LOOKS_MAX = 30000 }; /* 60 s of an idle machine */

extern char g_file[LG_PATH_BYTES], g_run[LG_PATH_BYTES], g_out[LG_PATH_BYTES];
extern pid_t g_lgsup;             /* the one in the foreground, 0: none */
extern struct lg_status g_status; /* of the last read_status */

/* First of main: a stage's program runs as that stage and ends here; a word chooses tests. */
void lgsup_tests_begin(int argc, char **argv);
int lgsup_setup(void **state);
/* Kills whatever is left. */
int lgsup_teardown(void **state);
#define LGSUP_TEST(f) cmocka_unit_test_setup_teardown(f, lgsup_setup, lgsup_teardown)

/* ---- lgsup ---- */

/* Starts `lgsup words...` in a process of its own; its output is added to g_out. */
pid_t launch(const char *const *words);
#define LAUNCH(...) launch((const char *const[]){__VA_ARGS__, NULL})
/* Waits for its end. 128 + n: by signal n. */
int exit_of(pid_t pid);
#define RUN(...) exit_of(LAUNCH(__VA_ARGS__))
void assert_exit(int got, int want);
void show_output(void);
/* Of any file. */
/* The log has its own writer: what the terminal shows need not be in it yet. */
void wait_for_log(const char *part);
bool file_has(const char *path, const char *part);
void assert_has(const char *path, const char *part);
bool output_has(const char *part);
void assert_output(const char *part);
void wait_for_output(const char *part);
/* g_lgsup runs for very long: every role is ready, some steps are done. */
void start_long(void);
/* Ends g_lgsup by `lgsup stop`. */
void end_by_stop(void);
/* With SIGKILL; what it has said is forgotten. */
void kill_lgsup(void);
/* lgsup and every process of the run, as after a loss of power. */
void kill_run(void);

/* ---- the run ---- */

bool read_status(void);
/* In g_status; NULL: none. */
const struct lg_status_instance *instance(const char *role, int index);
int count_of(const char *role);
void assert_state(const char *state, uint64_t step);
void assert_nobody_left(void);
void wait_for_step(uint64_t step);
void wait_until_ready(const char *role, int index);
/* Kills one process and returns its pid. */
int kill_one(const char *role, int index);
