/* A temporary folder for a test, and small files in it. Failures end the test program. */
#pragma once
#include <stddef.h>
#include <sys/types.h>

enum { SCRATCH_BYTES = 64 };

/* A fresh folder in $TMPDIR, or /tmp where that is not set or too long for the paths of sockets. */
void scratch_folder(char ret[SCRATCH_BYTES]);
/* The folder of this test; its path is valid until the next call. */
const char *scratch_make(void);
void scratch_remove(void);
/* The same two as cmocka's setup and teardown. */
int scratch_setup(void **state);
int scratch_teardown(void **state);
/* "FOLDER/name", in one of eight rotating buffers. */
const char *scratch_path(const char *name);
/* Creates or replaces FOLDER/name, parents included. */
const char *scratch_write(const char *name, const char *text);
/* Ends a forked child as _exit() does, but leaves its share of a coverage count (tests/coverage.sh). */
void scratch_exit(int code) __attribute__((noreturn));
/* kill -9 of a child and its end. In a build for coverage a child that has called scratch_mortal first
 * leaves its share of the count. */
void scratch_mortal(void);
void scratch_kill(pid_t pid);
