/* Errors and assertions.
 *
 * Environment failures (files, peers, user input) return a negative lg_err and leave a trace: the
 * function that notices calls LG_FAIL with what, where and what to do; each caller passes it on with
 * LG_TRY, which adds a frame. Whoever handles the error prints lg_err_text() and calls
 * lg_err_clear(). The trace is thread-local.
 *
 * Programmer errors are LG_ASSERT: always on, print, abort; the supervisor restarts the process.
 */
#pragma once
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The codes double as documented exit codes (negated): see docs/exit-codes.md. */
typedef enum lg_err {
    LG_OK = 0,
    LG_ERR_FAILED = -1,    /* anything without a better name */
    LG_ERR_USAGE = -2,     /* wrong command line */
    LG_ERR_CONFIG = -3,    /* wrong key, type, range or file in a pipeline.toml */
    LG_ERR_IO = -4,        /* the system refused a file, socket or mapping */
    LG_ERR_CORRUPT = -5,   /* a file's content is not what its format says */
    LG_ERR_NOSPACE = -6,   /* disk or memory is full */
    LG_ERR_BUSY = -7,      /* somebody else holds it (a second start, a lost race) */
    LG_ERR_NOTFOUND = -8,  /* a name that does not exist */
    LG_ERR_TIMEOUT = -9,   /* a bounded wait ended */
    LG_ERR_MISMATCH = -10, /* other build, layout, plan or fingerprint */
    LG_ERR_PARKED = -11,   /* the run is parked: a crash loop or bad data; state is kept */
    LG_ERR_VOID = -12,     /* this sample does not decode: it becomes void */
    LG_ERR_STOP = -13,     /* asked to stop while waiting: not a failure, no text */
} lg_err;

/* Exported by the program, so that a backend loaded at run time adds to the same trace. */
#pragma GCC visibility push(default)
/* Start a new trace: code and message. Always returns code. */
int lg_err_fail(int code, const char *file, int line, const char *func, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
/* Add a frame to the trace. Always returns code. */
int lg_err_frame(int code, const char *file, int line, const char *func);
/* The message and its frames, one per line, or "" when there is none. Valid until the next call. */
const char *lg_err_text(void);
/* The message alone, without frames. */
const char *lg_err_message(void);
void lg_err_clear(void);
/* "NOSPACE" for LG_ERR_NOSPACE, "?" for an unknown code. */
const char *lg_err_name(int code);
/* LG_ERR_NOSPACE for ENOSPC/EDQUOT/ENOMEM, LG_ERR_NOTFOUND for ENOENT, LG_ERR_IO else. */
int lg_err_from_errno(int e);

void lg_assert_failed(const char *expr, const char *file, int line, const char *func)
    __attribute__((noreturn)); /* not _Noreturn: C++ shims include this header */
#pragma GCC visibility pop

/* (The value is the code itself, not the call's result: so the compiler sees that a constant code is
 * negative and does not warn about results that were left unset.) */
#define LG_FAIL(code, ...)                                                                         \
    ({                                                                                             \
        const int lg_code_ = (code);                                                               \
        lg_err_fail(lg_code_, __FILE__, __LINE__, __func__, __VA_ARGS__);                          \
        lg_code_;                                                                                  \
    })

#define LG_TRY(expr)                                                                               \
    do {                                                                                           \
        int lg_try_rc_ = (expr);                                                                   \
        if (lg_try_rc_ < 0) {                                                                      \
            lg_err_frame(lg_try_rc_, __FILE__, __LINE__, __func__);                                \
            return lg_try_rc_;                                                                     \
        }                                                                                          \
    } while (0)

/* The same for functions with something to release: sets rc and jumps. */
#define LG_TRY_GOTO(rc, expr, label)                                                               \
    do {                                                                                           \
        (rc) = (expr);                                                                             \
        if ((rc) < 0) {                                                                            \
            lg_err_frame((rc), __FILE__, __LINE__, __func__);                                      \
            goto label;                                                                            \
        }                                                                                          \
    } while (0)

#define LG_ASSERT(expr) ((expr) ? (void)0 : lg_assert_failed(#expr, __FILE__, __LINE__, __func__))

#define LG_ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))

/* Each argument is evaluated once: it may be a load of a word that another process changes meanwhile, and of two loads
 * the second would be taken unseen. */
#define LG_MIN(a, b)               LG_PICK_(a, <, b, LG_NAME_(lg_a_, __COUNTER__), LG_NAME_(lg_b_, __COUNTER__))
#define LG_MAX(a, b)               LG_PICK_(a, >, b, LG_NAME_(lg_a_, __COUNTER__), LG_NAME_(lg_b_, __COUNTER__))
#define LG_NAME_(name, n)          LG_NAME_PASTED_(name, n)
#define LG_NAME_PASTED_(name, n)   name##n
#define LG_PICK_(a, than, b, x, y) LG_PICK_NAMED_(a, than, b, x, y)
#define LG_PICK_NAMED_(a, than, b, x, y)                                                           \
    __extension__({                                                                                \
        __typeof__(1 ? (a) : (b)) x = (a), y = (b);                                                \
        x than y ? x : y;                                                                          \
    })
