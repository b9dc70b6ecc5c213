/* DIR/waiting; see waiting.h. */
#include "supervisor/run/waiting.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES_MAX = 1024 };

void lg_waiting_say(const lg_run *r, const char *what)
{
    char path[LG_PATH_BYTES], text[BYTES_MAX];
    const int n = snprintf(text, sizeof text, "%s\n%s\n", r->config->job_name, what);
    if (lg_run_path(r, path, "waiting") == 0) lg_publish_file(path, text, (size_t)n);
    lg_err_clear();
}

void lg_waiting_forget(const lg_run *r)
{
    char path[LG_PATH_BYTES];
    if (lg_run_path(r, path, "waiting") == 0)
        unlink(path);
    else
        lg_err_clear();
}

bool lg_waiting_was_last(const char *dir)
{
    char path[LG_PATH_BYTES];
    const bool is = lg_path(path, "%s/waiting", dir) == 0 && lg_path_exists(path);
    lg_err_clear();
    return is;
}

int lg_waiting_refuse(const char *dir)
{
    struct lg_waiting w;
    if (!lg_waiting_read(dir, &w)) return 0;
    return LG_FAIL(LG_ERR_BUSY, "nothing runs in %s yet: %s", dir, w.what);
}

bool lg_waiting_read(const char *dir, struct lg_waiting *ret)
{
    char path[LG_PATH_BYTES], *text = NULL;
    size_t bytes;
    *ret = (struct lg_waiting){0};
    const int pidfd = lg_run_holder(dir, &ret->pid);
    if (pidfd < 0) return false;
    close(pidfd);
    const bool waits = lg_path(path, "%s/waiting", dir) == 0 &&
                       lg_read_file(path, BYTES_MAX, &text, &bytes) == 0 &&
                       sscanf(text, "%127[^\n]\n%299[^\n]", ret->job, ret->what) == 2;
    lg_err_clear();
    free(text);
    return waits;
}
