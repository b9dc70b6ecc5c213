/* Starting programs and learning of their end, by pidfd.
 *
 * Programs are looked for in $LG_BIN_DIR (tests, trial builds) or else beside the running one. A
 * child gets its own session, stdin from /dev/null, stdout and stderr appended to a log file, every
 * other fd closed, default signal handling with SIGPIPE ignored, and no parent-death signal: it
 * outlives lgsup. */
#pragma once
#include "base/check.h"
#include "base/fs.h"

struct lg_child {
    int pid;
    int pidfd; /* -1: no process */
    bool mine; /* our own child (waitid works) or adopted (only its pidfd speaks) */
};
#define LG_CHILD_NONE ((struct lg_child){.pidfd = -1})

enum { LG_EXIT_UNKNOWN = -1, LG_EXIT_SIGNAL = 128 }; /* 128 + n: ended by signal n, as in shells */

/* ret_path: where program `name` ("lg-vae") lies. LG_ERR_NOTFOUND when it is not executable. */
int lg_program_path(const char *name, char ret_path[LG_PATH_BYTES]);

struct lg_spawn {
    const char *program; /* path */
    char *const *argv;
    const char *log; /* file for stdout and stderr; NULL: inherit both */
    int pass_fd;     /* becomes fd 3 of the child; -1: none */
    /* NULL, or called with the child before its program begins, to write down who it is; < 0: the child is
     * ended and the start fails. A caller that dies before this returns leaves nothing behind: the child ends,
     * and the program never began; should it be stopped just then, it still has all files of the caller open,
     * by which it is found (lock.c). Without it there is a moment in which the program runs and nobody knows
     * of it. */
    int (*enter)(void *where, const struct lg_child *child);
    void *where;
};
int lg_child_spawn(const struct lg_spawn *s, struct lg_child *ret);
/* The pidfd is readable: collects the exit code (LG_EXIT_*), closes the pidfd. */
int lg_child_reap(struct lg_child *c);
void lg_child_signal(const struct lg_child *c, int sig);
/* Waits until the pidfd fires. LG_ERR_TIMEOUT (no trace). */
int lg_child_wait(const struct lg_child *c, int timeout_ms);
/* Runs a program to its end and collects its stdout and stderr, bytes_max of them at most (longer:
 * LG_ERR_CORRUPT). *ret_exit as of lg_child_reap. Caller frees *ret_text. */
int lg_child_capture(const char *program, char *const *argv, size_t bytes_max, char **ret_text,
                     int *ret_exit);
/* The same in two parts, so that several programs run at once: every begin needs its end. */
struct lg_capture {
    struct lg_child child;
    int fd;
    int timeout_ms; /* of its output; a minute unless changed before the end */
};
int lg_capture_begin(const char *program, char *const *argv, struct lg_capture *ret);
int lg_capture_end(struct lg_capture *c, size_t bytes_max, char **ret_text, int *ret_exit);
/* The JSON object in such an output: from the first line that begins with a brace (warnings may come
 * before it), "" when there is none. */
const char *lg_child_json(const char *output);
/* "exit 11" or "signal 9 (Killed)" or "ended". */
void lg_exit_text(int exit_code, char *ret, size_t bytes);
/* What a process said last in its log: the newest log line without its time, level and role (an
 * error's message rather than its trace), else the last line. "" when there is none. */
void lg_last_words(const char *path, char *ret, size_t bytes);
