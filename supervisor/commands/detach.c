/* Going into the background; see detach.h. On the pipe: one byte 0 = ready; or one byte 1, the exit
 * code, and the message up to the end. */
#include "supervisor/commands/detach.h"
#include "base/log.h"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MESSAGE_BYTES_MAX = 8192 };

void lg_detach_log(const char *dir)
{
    char log[LG_PATH_BYTES];
    int out = -1;
    if (lg_path(log, "%s/logs/lgsup.log", dir) == 0)
        out = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (out < 0) out = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (out < 0) return;
    dup2(out, 1);
    dup2(out, 2);
    if (out > 2) close(out);
}

static void leave_terminal(const char *dir)
{
    int in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (in >= 0) dup2(in, 0);
    if (in > 2) close(in);
    lg_detach_log(dir);
    signal(SIGPIPE, SIG_IGN);
}

int lg_detach(const char *dir, struct lg_detached *ret)
{
    int fds[2];
    LG_TRY(lg_path(ret->log, "%s/logs/lgsup.log", dir));
    fflush(NULL);
    if (pipe2(fds, O_CLOEXEC) < 0) return LG_FAIL(LG_ERR_IO, "pipe: %s", strerror(errno));
    pid_t first = fork();
    if (first < 0) return LG_FAIL(LG_ERR_IO, "fork: %s", strerror(errno));
    ret->is_parent = first > 0;
    if (first > 0) {
        close(fds[1]);
        ret->fd = fds[0];
        waitpid(first, NULL, 0);
        return 0;
    }
    setsid();
    if (fork() != 0) _exit(0); /* not a session leader: never gets a terminal again */
    close(fds[0]);
    ret->fd = fds[1];
    leave_terminal(dir);
    return 0;
}

int lg_detach_wait(struct lg_detached *d, int *ret_exit)
{
    unsigned char text[MESSAGE_BYTES_MAX + 1];
    size_t at = 0;
    for (;;) {
        ssize_t n = read(d->fd, text + at, MESSAGE_BYTES_MAX - at);
        if (n < 0 && errno == EINTR) continue;
        if (n > 0) at += (size_t)n;
        if (n <= 0 || text[0] == 0 || at == MESSAGE_BYTES_MAX) break;
    }
    close(d->fd);
    text[at] = 0;
    if (at > 0 && text[0] == 0) {
        *ret_exit = 0;
        return 0;
    }
    if (at < 2)
        return LG_FAIL(LG_ERR_FAILED, "lgsup ended before the run was ready; see %s", d->log);
    *ret_exit = text[1];
    if (text[1] != 0) return LG_FAIL(-(int)text[1], "%s", (char *)text + 2);
    return 0;
}

void lg_detach_end(struct lg_detached *d, int exit_code, const char *message)
{
    char text[MESSAGE_BYTES_MAX];
    int n = snprintf(text, sizeof text, "%c%c%s", 1, exit_code, message);
    ssize_t ignored = write(d->fd, text, (size_t)LG_MIN(n, (int)sizeof text - 1));
    (void)ignored;
    exit(exit_code);
}
