/* Log lines; see log.h. */
#include "base/log.h"
#include "base/check.h"
#include "base/printable.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE_BYTES = 6000 };

static char g_role[32] = "-";
static int64_t g_step = -1;
static lg_log_level g_level = LG_INFO;

void lg_log_set_role(const char *role)
{
    snprintf(g_role, sizeof g_role, "%s", role);
}

void lg_log_set_step(int64_t step)
{
    g_step = step;
}

void lg_log_set_level(lg_log_level level)
{
    g_level = level;
}

void lg_log(lg_log_level level, const char *fmt, ...)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    if (level < g_level) return;
    char text[LINE_BYTES], line[LINE_BYTES];
    struct timespec ts;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    size_t at = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &tm);
    at += (size_t)snprintf(line + at, sizeof line - at, ".%03ldZ %-5s %s ", ts.tv_nsec / 1000000,
                           names[level], g_role);
    if (g_step >= 0)
        at += (size_t)snprintf(line + at, sizeof line - at, "step %lld ", (long long)g_step);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    at += lg_printable(line + at, sizeof line - at - 1, text, strlen(text), LG_NEWLINES_INDENTED);
    line[at++] = '\n';
    ssize_t ignored = write(STDERR_FILENO, line, at);
    (void)ignored;
}

void lg_log_error(const char *what)
{
    lg_log(LG_ERROR, "%s: %s", what, lg_err_text());
    lg_err_clear();
}
