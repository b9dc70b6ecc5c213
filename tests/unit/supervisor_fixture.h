/* A supervisor without its loop, over a run directory, a board and sockets: a test does a turn at a time.
 * Programs of stages are shell scripts that do nothing; what a stage would write on the board the test
 * writes. */
#pragma once
#include "supervisor/core/supervise.h"

enum { LOOK_US = 1000, LOOKS_MAX = 20000 }; /* waits are bounded by looks, not by the clock */

extern lg_run g_super_run;    /* locked */
extern lg_supervisor g_super; /* running; no instances, none wanted */

int supervisor_setup(void **state);
int supervisor_teardown(void **state);
/* A shell script as a program in the scratch folder. */
void script(const char *name, const char *text);
/* An instance that is ready; its process only sleeps. One more is wanted. */
struct lg_instance *add(lg_role role, int index);
struct lg_instance *vae(int index);
/* Its process ends in order. */
void leaves(struct lg_instance *i);
/* What the loop has given to workers is done, and so is what follows from it. */
void workers_are_done(void);
/* What the loop does beside deaths of instances. */
void turn(void);
/* A file of the scratch folder has this in it. */
void assert_text(const char *file, const char *part);
