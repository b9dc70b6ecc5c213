/* See stuck.h. A process has ended when its last thread has; the first is a zombie by then. */
#include "supervisor/run/stuck.h"
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { THREADS_MAX = 4096 };

static const struct {
    char state;
    const char *name;
} states[] = {{'D', "uninterruptible"}, {'R', "running"}, {'S', "sleeping"},
              {'T', "stopped"},         {'t', "traced"},  {'Z', "zombie"}};

static void read_some(const char *path, char *ret, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, ret, bytes - 1) : 0;
    if (fd >= 0) close(fd);
    ret[n > 0 ? n : 0] = 0;
}

/* The letter behind the name in parentheses, which may hold anything. */
static char state_of(int pid, const char *thread)
{
    char path[300], text[512];
    snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, thread);
    read_some(path, text, sizeof text);
    const char *after = strrchr(text, ')');
    return after && after[1] == ' ' ? after[2] : 0;
}

/* A kernel function's name, "" where the kernel keeps it for itself. */
static void function_of(int pid, const char *thread, char *ret, size_t bytes)
{
    char path[300];
    snprintf(path, sizeof path, "/proc/%d/task/%s/wchan", pid, thread);
    read_some(path, ret, bytes);
    for (const char *c = ret; *c; c++)
        if (!isalnum((unsigned char)*c) && *c != '_' && *c != '.') ret[0] = 0;
    if (!strcmp(ret, "0")) ret[0] = 0;
}

void lg_process_place(int pid, char *ret, size_t bytes)
{
    char path[64], worst[256] = "", where[64], state = 0;
    const char *name = "?";
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *d = opendir(path);
    ret[0] = 0;
    for (int n = 0; d && n < THREADS_MAX && state != 'D'; n++) {
        const struct dirent *e = readdir(d);
        if (!e) break;
        char s = isdigit((unsigned char)e->d_name[0]) ? state_of(pid, e->d_name) : 0;
        if (!s || (state && s == 'Z')) continue;
        state = s;
        snprintf(worst, sizeof worst, "%.255s", e->d_name);
    }
    if (d) closedir(d);
    if (!state) return;
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++)
        if (states[i].state == state) name = states[i].name;
    function_of(pid, worst, where, sizeof where);
    snprintf(ret, bytes, "state %c (%s)%s%s", state, name, *where ? " in " : "", where);
}
