/* The file of pinned algorithms; see algos.h.
 *
 * Design: the whole file is in memory as a list of pairs; it has some hundred lines. Before a pin, the
 * lines that others have added since are read, under flock. */
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
};
struct lg_cuda_algos {
    pthread_mutex_t mutex;
    char path[4096];
    int fd; /* -1: no file */
    off_t read_to;
    struct pair *pairs;
};

static const struct pair *find(const struct lg_cuda_algos *a, const char *key)
{
    for (const struct pair *p = a->pairs; p; p = p->next)
        if (!strcmp(p->key, key)) return p;
    return NULL;
}

static const char *add(struct lg_cuda_algos *a, const char *key, const char *value)
{
    struct pair *p = calloc(1, sizeof *p);
    LG_ASSERT(p);
    p->key = strdup(key);
    p->value = strdup(value);
    LG_ASSERT(p->key && p->value);
    p->next = a->pairs;
    a->pairs = p;
    return p->value;
}

static void take_line(struct lg_cuda_algos *a, char *line)
{
    char *sign = strstr(line, " = ");
    if (!sign || line[0] == '#') return;
    *sign = 0;
    if (!find(a, line)) add(a, line, sign + 3);
}

/* Takes the whole lines behind read_to. */
static void read_on(struct lg_cuda_algos *a)
{
    char line[LG_CUDA_KEY_BYTES + LG_CUDA_VALUE_BYTES + 8];
    ssize_t n;
    while (a->fd >= 0 && (n = pread(a->fd, line, sizeof line - 1, a->read_to)) > 0) {
        line[n] = 0;
        char *end = strchr(line, '\n');
        if (!end) {
            if ((size_t)n < sizeof line - 1) return; /* being written, or cut short */
            end = line + n - 1;                      /* longer than any line of ours: skipped */
        }
        a->read_to += end + 1 - line;
        *end = 0;
        take_line(a, line);
    }
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

static void choose_path(struct lg_cuda_algos *a, const char *gpu, size_t cublaslt, size_t cudnn)
{
    const char *named = getenv("LG_CUDA_CACHE"), *home = getenv("HOME");
    if (named && *named) {
        snprintf(a->path, sizeof a->path, "%s", named);
        return;
    }
    char name[64];
    snprintf(name, sizeof name, "%s", gpu);
    for (char *c = name; *c; c++)
        if (!isalnum((unsigned char)*c)) *c = '-';
    snprintf(a->path, sizeof a->path, "%s/.cache/lg/cuda-%s-%zu-%zu.txt",
             home && *home ? home : "/tmp", name, cublaslt, cudnn);
}

int lg_cuda_algos_open(const char *gpu, size_t cublaslt, size_t cudnn, struct lg_cuda_algos **ret)
{
    struct lg_cuda_algos *a = calloc(1, sizeof *a);
    if (!a) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the pinned algorithms");
    pthread_mutex_init(&a->mutex, NULL);
    choose_path(a, gpu, cublaslt, cudnn);
    make_folders(a->path);
    a->fd = open(a->path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (a->fd < 0)
        lg_log(LG_WARN,
               "cannot write %s: algorithms are chosen anew at each start, "
               "and bits may differ between starts (set LG_CUDA_CACHE)",
               a->path);
    read_on(a);
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
    if ((*a)->fd >= 0) close((*a)->fd);
    pthread_mutex_destroy(&(*a)->mutex);
    free(*a);
    *a = NULL;
}

const char *lg_cuda_algos_find(struct lg_cuda_algos *a, const char *key)
{
    pthread_mutex_lock(&a->mutex);
    const struct pair *p = find(a, key);
    const char *value = p ? p->value : NULL;
    pthread_mutex_unlock(&a->mutex);
    return value;
}

const char *lg_cuda_algos_pin(struct lg_cuda_algos *a, const char *key, const char *value)
{
    LG_ASSERT(strlen(key) < LG_CUDA_KEY_BYTES && strlen(value) < LG_CUDA_VALUE_BYTES);
    LG_ASSERT(!strchr(key, '=') && !strchr(value, '\n'));
    pthread_mutex_lock(&a->mutex);
    if (a->fd >= 0) flock(a->fd, LOCK_EX);
    read_on(a);
    const struct pair *there = find(a, key);
    const char *counts = there ? there->value : NULL;
    if (!counts) {
        char line[LG_CUDA_KEY_BYTES + LG_CUDA_VALUE_BYTES + 8];
        int n = snprintf(line, sizeof line, "%s = %s\n", key, value);
        if (a->fd >= 0 && write(a->fd, line, (size_t)n) != n)
            lg_log(LG_WARN, "cannot add to %s", a->path);
        counts = add(a, key, value);
    }
    if (a->fd >= 0) flock(a->fd, LOCK_UN);
    pthread_mutex_unlock(&a->mutex);
    return counts;
}
