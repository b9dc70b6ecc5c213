/* The thread-local error trace behind LG_FAIL and LG_TRY.
 *
 * A trace is one message and at most FRAMES_MAX frames; deeper frames are dropped, the innermost
 * stay, since they say what happened. Messages quote names and texts of others: they are made
 * printable here, once, wherever they go from here. LG_ERR_STOP carries no trace: it is not a failure. */
#include "base/check.h"
#include "base/printable.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A message may list the 20 errors of a pipeline.toml. */
enum { MESSAGE_BYTES = 16384, FRAMES_MAX = 16, TEXT_BYTES = 20480 };

static _Thread_local struct {
    char message[MESSAGE_BYTES];
    struct {
        const char *file, *func;
        int line;
    } frame[FRAMES_MAX];
    int n_frames;
    char text[TEXT_BYTES];
} t_err;

int lg_err_fail(int code, const char *file, int line, const char *func, const char *fmt, ...)
{
    char message[MESSAGE_BYTES]; /* the arguments may point into the old message */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    lg_printable(t_err.message, sizeof t_err.message, message, strlen(message), LG_NEWLINES_KEPT);
    t_err.n_frames = 0;
    return lg_err_frame(code, file, line, func);
}

int lg_err_frame(int code, const char *file, int line, const char *func)
{
    if (code != LG_ERR_STOP && t_err.n_frames < FRAMES_MAX) {
        t_err.frame[t_err.n_frames].file = file;
        t_err.frame[t_err.n_frames].func = func;
        t_err.frame[t_err.n_frames].line = line;
        t_err.n_frames++;
    }
    return code;
}

const char *lg_err_message(void)
{
    return t_err.message;
}

const char *lg_err_text(void)
{
    size_t at = 0;
    at += (size_t)snprintf(t_err.text, sizeof t_err.text, "%s", t_err.message);
    for (int i = 0; i < t_err.n_frames && at < sizeof t_err.text; i++)
        at += (size_t)snprintf(t_err.text + at, sizeof t_err.text - at, "\n    at %s (%s:%d)",
                               t_err.frame[i].func, t_err.frame[i].file, t_err.frame[i].line);
    return t_err.text;
}

void lg_err_clear(void)
{
    t_err.message[0] = 0;
    t_err.n_frames = 0;
}

const char *lg_err_name(int code)
{
    static const char *const names[] = {"OK",       "FAILED",  "USAGE", "CONFIG",   "IO",
                                        "CORRUPT",  "NOSPACE", "BUSY",  "NOTFOUND", "TIMEOUT",
                                        "MISMATCH", "PARKED",  "VOID",  "STOP"};
    return code <= 0 && -code < (int)LG_ARRAY_LEN(names) ? names[-code] : "?";
}

int lg_err_from_errno(int e)
{
    switch (e) {
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
        return LG_ERR_NOSPACE;
    case ENOENT:
        return LG_ERR_NOTFOUND;
    default:
        return LG_ERR_IO;
    }
}

_Noreturn void lg_assert_failed(const char *expr, const char *file, int line, const char *func)
{
    fprintf(stderr, "bug: assertion failed: %s\n    at %s (%s:%d)\n", expr, func, file, line);
    fflush(stderr);
    abort();
}
