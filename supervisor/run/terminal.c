/* The terminal's worker; see terminal.h. */
#include "supervisor/run/terminal.h"
#include "base/check.h"
#include "base/printable.h"
#include "supervisor/run/worker.h"
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINES_MAX = 256, PATIENCE_MS = 1000, LOOK_MS = 1000, TEXT_BYTES = 8192 };

struct text {
    struct lg_job job;
    int fd;
    size_t bytes;
    char at[];
};

static lg_worker *g_worker;
static unsigned g_dropped;

/* What cannot be written (the reader has gone) is lost; a reader that left the pipe's other end in
 * non-blocking mode is waited for. */
static void write_text(struct lg_job *job)
{
    const struct text *t = (struct text *)job;
    for (size_t at = 0; at < t->bytes;) {
        ssize_t n = write(t->fd, t->at + at, t->bytes - at);
        if (n > 0) at += (size_t)n;
        if (n >= 0 || errno == EINTR) continue;
        if (errno != EAGAIN) return;
        poll(&(struct pollfd){.fd = t->fd, .events = POLLOUT}, 1, LOOK_MS);
    }
}

/* The thread is not there in a child of fork(). */
static void forget(void)
{
    g_worker = NULL;
    g_dropped = 0;
}

static bool begin(void)
{
    static bool asked;
    if (!asked) pthread_atfork(NULL, NULL, forget);
    asked = true;
    if (g_worker) return true;
    fflush(stdout); /* what was printed before comes first */
    int rc = lg_worker_open(
        &(struct lg_worker_spec){.name = "lg-terminal", .jobs_max = LINES_MAX, .wake_fd = -1},
        &g_worker);
    if (rc < 0) lg_err_clear();
    return rc == 0;
}

static bool give(int fd, const char *text, size_t bytes)
{
    struct text *t = begin() ? calloc(1, sizeof *t + bytes) : NULL;
    if (!t) return false;
    t->job.work = write_text;
    t->fd = fd;
    t->bytes = bytes;
    memcpy(t->at, text, bytes);
    bool taken = lg_worker_give(g_worker, &t->job);
    lg_worker_collect(g_worker, NULL); /* writes it where no thread could be had */
    return taken;
}

bool lg_terminal_write(int fd, const char *text, size_t bytes)
{
    char note[96];
    if (g_dropped) {
        int n = snprintf(note, sizeof note, "(%u lines were not shown; see logs/lgsup.log)\n",
                         g_dropped);
        if (!lg_terminal_is_idle() || !give(fd, note, (size_t)n)) {
            g_dropped++;
            return false;
        }
        g_dropped = 0;
    }
    bool taken = give(fd, text, bytes);
    g_dropped += !taken;
    return taken;
}

void lg_terminal_say(int fd, const char *fmt, ...)
{
    char text[TEXT_BYTES], shown[TEXT_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    size_t n = lg_printable(shown, sizeof shown, text, strlen(text), LG_NEWLINES_KEPT);
    if (n) lg_terminal_write(fd, shown, n);
}

bool lg_terminal_is_idle(void)
{
    return !g_worker || lg_worker_is_idle(g_worker);
}

bool lg_terminal_finish(void)
{
    return lg_worker_close(&g_worker, PATIENCE_MS);
}
