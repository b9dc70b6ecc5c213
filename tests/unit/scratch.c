/* See scratch.h. */
#include "tests/unit/scratch.h"
#include "base/check.h"
#include "base/fs.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[SCRATCH_BYTES];

void scratch_folder(char ret[SCRATCH_BYTES])
{
    enum { BASE_BYTES_MAX = 24 };
    const char *base = getenv("TMPDIR");
    if (!base || base[0] != '/' || strlen(base) > BASE_BYTES_MAX) base = "/tmp";
    snprintf(ret, SCRATCH_BYTES, "%s/lg-test-XXXXXX", base);
    LG_ASSERT(mkdtemp(ret));
}

const char *scratch_make(void)
{
    scratch_folder(folder);
    return folder;
}

void scratch_remove(void)
{
    LG_ASSERT(folder[0]);
    LG_ASSERT(lg_remove_tree(folder) == 0);
    folder[0] = 0;
}

int scratch_setup(void **state)
{
    (void)state;
    scratch_make();
    return 0;
}

int scratch_teardown(void **state)
{
    (void)state;
    scratch_remove();
    return 0;
}

const char *scratch_path(const char *name)
{
    static char paths[8][LG_PATH_BYTES];
    static int next;
    char *path = paths[next++ % 8];
    LG_ASSERT(lg_path(path, "%s/%s", folder, name) == 0);
    return path;
}

const char *scratch_write(const char *name, const char *text)
{
    char parent[LG_PATH_BYTES];
    const char *path = scratch_path(name);
    LG_ASSERT(lg_path(parent, "%s", path) == 0);
    *strrchr(parent, '/') = 0;
    LG_ASSERT(lg_mkdirs(parent) == 0);
    FILE *f = fopen(path, "w");
    LG_ASSERT(f && fputs(text, f) >= 0 && fclose(f) == 0);
    return path;
}

extern void __gcov_exit(void) __attribute__((weak));
extern void __gcov_dump(void) __attribute__((weak));

static void count_and_die(int sig)
{
    (void)sig;
    alarm(2); /* should it have been interrupted in the allocator */
    __gcov_dump();
    kill(getpid(), SIGKILL);
}

void scratch_mortal(void)
{
    if (__gcov_dump) signal(SIGUSR2, count_and_die);
}

void scratch_kill(pid_t pid)
{
    kill(pid, __gcov_dump ? SIGUSR2 : SIGKILL);
    waitpid(pid, NULL, 0);
}

void scratch_exit(int code)
{
    if (__gcov_exit) __gcov_exit();
    _exit(code);
}
