/* Log lines to stderr, which the supervisor points at the role's file in logs/.
 *
 * One line each: UTC time, level, role, step, text, which is made printable (printable.h): a newline
 * in it is followed by four spaces, so that no name or message can forge a line. One write(2) a line, so that lines of several
 * processes in one file do not mix. */
#pragma once
#include <stdint.h>

typedef enum lg_log_level { LG_DEBUG, LG_INFO, LG_WARN, LG_ERROR } lg_log_level;

/* "vae.1"; shown in every line of this process. The string is copied. */
void lg_log_set_role(const char *role);
/* The step shown in every line from now on; -1 (the default) shows none. */
void lg_log_set_step(int64_t step);
/* Lines below this level are dropped. Default LG_INFO. */
void lg_log_set_level(lg_log_level level);
void lg_log(lg_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Logs `what` and the current error trace at LG_ERROR, and clears the trace. */
void lg_log_error(const char *what);
