/* The command line of lgsup. */
#pragma once

/* Runs one command; returns the process's exit code (docs/exit-codes.md). Messages of errors go to
 * stderr, one trace when LG_TRACE is set. */
int lg_cli_main(int argc, char **argv);
