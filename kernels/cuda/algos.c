/* The files of pinned algorithms; see algos.h.
 *
 * Design: all of both files is in memory as a list of pairs; they have some hundred lines. The run's file
 * is read first, so its lines count. Before a line is added, the lines that others have added since are
 * read, under flock. */
#include "kernels/cuda/algos.h"
#include "base/check.h"
#include "base/log.h"
#include <ctype.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct pair {
    struct pair *next;
    char *key, *value;
    bool in_run;
};
struct file {
    char path[4096];
    int fd; /* -1: no file */
    off_t read_to;
};
struct lg_cuda_algos {
    pthread_mutex_t mutex;
    struct file run, shared;
    struct pair *pairs;
};

static struct pair *find(const struct lg_cuda_algos *a, const char *key)
{
    for (struct pair *p = a->pairs; p; p = p->next)
        if (!strcmp(p->key, key)) return p;
    return NULL;
}

static struct pair *add(struct lg_cuda_algos *a, const char *key, const char *value)
{
    struct pair *p = calloc(1, sizeof *p);
    LG_ASSERT(p);
    p->key = strdup(key);
    p->value = strdup(value);
    LG_ASSERT(p->key && p->value);
    p->next = a->pairs;
    a->pairs = p;
    return p;
}

static void take_line(struct lg_cuda_algos *a, const struct file *f, char *line)
{
    char *sign = strstr(line, " = ");
    if (!sign || line[0] == '#') return;
    *sign = 0;
    struct pair *p = find(a, line);
    if (!p) p = add(a, line, sign + 3);
    if (f == &a->run) p->in_run = true;
}

/* Takes the whole lines behind read_to. */
static void read_on(struct lg_cuda_algos *a, struct file *f)
{
    char line[LG_CUDA_KEY_BYTES + LG_CUDA_VALUE_BYTES + 8];
    ssize_t n;
    while (f->fd >= 0 && (n = pread(f->fd, line, sizeof line - 1, f->read_to)) > 0) {
        line[n] = 0;
        char *end = strchr(line, '\n');
        if (!end) {
            if ((size_t)n < sizeof line - 1) return; /* being written, or cut short */
            end = line + n - 1;                      /* longer than any line of ours: skipped */
        }
        f->read_to += end + 1 - line;
        *end = 0;
        take_line(a, f, line);
    }
}

static void append(struct file *f, const struct pair *p)
{
    char line[LG_CUDA_KEY_BYTES + LG_CUDA_VALUE_BYTES + 8];
    int n = snprintf(line, sizeof line, "%s = %s\n", p->key, p->value);
    if (write(f->fd, line, (size_t)n) != n) lg_log(LG_WARN, "cannot add to %s", f->path);
}

/* What this run uses, the run keeps. */
static void keep(struct lg_cuda_algos *a, struct pair *p)
{
    if (a->run.fd < 0 || p->in_run) return;
    flock(a->run.fd, LOCK_EX);
    read_on(a, &a->run);
    if (!p->in_run) append(&a->run, p);
    p->in_run = true;
    flock(a->run.fd, LOCK_UN);
}

static void make_folders(char *path)
{
    for (char *p = path + 1; *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        mkdir(path, 0777);
        *p = '/';
    }
}

static void choose_path(struct file *f, const char *gpu, size_t cublaslt, size_t cudnn)
{
    const char *named = getenv("LG_CUDA_CACHE"), *home = getenv("HOME");
    if (named && *named) {
        snprintf(f->path, sizeof f->path, "%s", named);
        return;
    }
    char name[64];
    snprintf(name, sizeof name, "%s", gpu);
    for (char *c = name; *c; c++)
        if (!isalnum((unsigned char)*c)) *c = '-';
    snprintf(f->path, sizeof f->path, "%s/.cache/lg/cuda-%s-%zu-%zu.txt",
             home && *home ? home : "/tmp", name, cublaslt, cudnn);
}

static void open_file(struct file *f)
{
    f->fd = open(f->path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (f->fd < 0)
        lg_log(LG_WARN,
               "cannot write %s: algorithms are chosen anew at each start, "
               "and bits may differ between starts (set LG_CUDA_CACHE)",
               f->path);
}

int lg_cuda_algos_open(const char *gpu, size_t cublaslt, size_t cudnn, struct lg_cuda_algos **ret)
{
    struct lg_cuda_algos *a = calloc(1, sizeof *a);
    if (!a) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the pinned algorithms");
    pthread_mutex_init(&a->mutex, NULL);
    const char *run = getenv(LG_CUDA_RUN_FILE);
    snprintf(a->run.path, sizeof a->run.path, "%s", run ? run : "");
    a->run.fd = -1;
    if (a->run.path[0]) open_file(&a->run);
    choose_path(&a->shared, gpu, cublaslt, cudnn);
    make_folders(a->shared.path);
    open_file(&a->shared);
    read_on(a, &a->run);
    read_on(a, &a->shared);
    *ret = a;
    return 0;
}

void lg_cuda_algos_close(struct lg_cuda_algos **a)
{
    if (!*a) return;
    while ((*a)->pairs) {
        struct pair *p = (*a)->pairs;
        (*a)->pairs = p->next;
        free(p->key);
        free(p->value);
        free(p);
    }
    if ((*a)->run.fd >= 0) close((*a)->run.fd);
    if ((*a)->shared.fd >= 0) close((*a)->shared.fd);
    pthread_mutex_destroy(&(*a)->mutex);
    free(*a);
    *a = NULL;
}

const char *lg_cuda_algos_find(struct lg_cuda_algos *a, const char *key)
{
    pthread_mutex_lock(&a->mutex);
    struct pair *p = find(a, key);
    if (p) keep(a, p);
    pthread_mutex_unlock(&a->mutex);
    return p ? p->value : NULL;
}

const char *lg_cuda_algos_pin(struct lg_cuda_algos *a, const char *key, const char *value)
{
    LG_ASSERT(strlen(key) < LG_CUDA_KEY_BYTES && strlen(value) < LG_CUDA_VALUE_BYTES);
    LG_ASSERT(!strchr(key, '=') && !strchr(value, '\n'));
    pthread_mutex_lock(&a->mutex);
    if (a->shared.fd >= 0) flock(a->shared.fd, LOCK_EX);
    read_on(a, &a->run);
    read_on(a, &a->shared);
    struct pair *p = find(a, key);
    if (!p) {
        p = add(a, key, value);
        if (a->shared.fd >= 0) append(&a->shared, p);
    }
    keep(a, p);
    if (a->shared.fd >= 0) flock(a->shared.fd, LOCK_UN);
    pthread_mutex_unlock(&a->mutex);
    return p->value;
}
