/* The command line of lgsup. */
#pragma once

/* First of all in main(): what lgsup has from whoever starts it (base/inherit.h, supervisor/run/signals.h). */
void lg_cli_inherit(void);
/* Runs one command; returns the process's exit code (docs/exit-codes.md). Messages of errors go to
 * stderr, one trace when LG_TRACE is set. */
int lg_cli_main(int argc, char **argv);
