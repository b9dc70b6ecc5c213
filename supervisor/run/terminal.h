/* What `lgsup start` says on stdout and stderr while a run is in its hands.
 *
 * A terminal may stop taking anything: Ctrl-S, a hanging ssh session, a pipe that nobody reads. So a
 * thread writes (worker.h), a bounded number of lines waits, what comes on top is dropped and counted,
 * and the end of the process waits a second for it, not for ever. Everything that is said to people in
 * the loop stands in logs/lgsup.log as well.
 *
 * One per process, begun by the first line. From then until lg_terminal_finish stdio's stdout is not
 * used: whoever wants to print by printf first calls that. A child of fork() begins anew. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* Copies `bytes` of text and returns at once. False: too much waits already, and it is dropped. */
bool lg_terminal_write(int fd, const char *text, size_t bytes);
/* A line or a few, of 8 KiB together at most, made printable (base/printable.h); fd: STDOUT_FILENO or STDERR_FILENO. */
void lg_terminal_say(int fd, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Everything has been written. */
bool lg_terminal_is_idle(void);
/* Waits until everything is written, for a second after the last that was; what is left then is lost.
 * False: that happened. */
bool lg_terminal_finish(void);
