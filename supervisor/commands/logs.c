/* `lgsup logs`; see logs.h. Every log line begins with its UTC time, so sorting lines by their first
 * 24 bytes merges files; a line without a time stays with the one before it. Libraries write into
 * these files too, so every line is made printable. */
#include "supervisor/commands/logs.h"
#include "base/fs.h"
#include "base/printable.h"
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILES_MAX = 1024, LOG_BYTES_MAX = 256 << 20, STAMP_BYTES = 24, FOLLOW_MS = 200 };

struct file {
    char name[64];
    char path[LG_PATH_BYTES];
    size_t shown;
};

struct line {
    const char *stamp; /* of this line or the nearest one above with a stamp; "" */
    const char *text;
    size_t bytes, order;
};

struct lines {
    struct line *v;
    size_t n, cap;
};

/* "vae" takes vae.0.log and vae.1.log; "vae.1" and "lgsup" their own file. */
static bool wanted(const char *file, const char *role)
{
    size_t n = strlen(file);
    if (n < 5 || strcmp(file + n - 4, ".log") != 0) return false;
    if (!role) return true;
    size_t r = strlen(role);
    return strncmp(file, role, r) == 0 && file[r] == '.';
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct file *)a)->name, ((const struct file *)b)->name);
}

/* Adds files that are not known yet. */
static int find_files(const char *dir, const char *role, struct file *f, int *n)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/logs", dir));
    DIR *d = opendir(path);
    if (!d)
        return LG_FAIL(LG_ERR_NOTFOUND, "%s is not a run directory: no logs/ in it (%s)", dir,
                       strerror(errno));
    struct dirent *e;
    while (*n < FILES_MAX && (e = readdir(d))) {
        bool known = strlen(e->d_name) >= sizeof f->name || !wanted(e->d_name, role);
        for (int i = 0; i < *n && !known; i++) known = !strcmp(f[i].name, e->d_name);
        if (known) continue;
        struct file *p = &f[(*n)++];
        *p = (struct file){0};
        memcpy(p->name, e->d_name, strlen(e->d_name) + 1);
        if (lg_path(p->path, "%s/%s", path, e->d_name) < 0) break;
    }
    closedir(d);
    qsort(f, (size_t)*n, sizeof *f, by_name);
    return 0;
}

/* What is new in a file, in whole lines when more may come; the text stays owned by the caller's list. */
static char *read_new(struct file *f, bool follow, size_t *ret_bytes)
{
    int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    off_t end = lseek(fd, 0, SEEK_END);
    size_t bytes = end > (off_t)f->shown ? (size_t)end - f->shown : 0;
    if (bytes > LOG_BYTES_MAX) { /* only the newest part */
        f->shown += bytes - LOG_BYTES_MAX;
        bytes = LOG_BYTES_MAX;
    }
    char *text = bytes ? malloc(bytes) : NULL;
    ssize_t n = text ? pread(fd, text, bytes, (off_t)f->shown) : 0;
    close(fd);
    while (follow && n > 0 && text[n - 1] != '\n') n--;
    if (n <= 0) {
        free(text);
        return NULL;
    }
    f->shown += (size_t)n;
    *ret_bytes = (size_t)n;
    return text;
}

static bool has_stamp(const char *text, size_t bytes)
{
    return bytes > STAMP_BYTES && text[4] == '-' && text[10] == 'T' && text[23] == 'Z';
}

static void cut_lines(const char *text, size_t bytes, struct lines *l)
{
    const char *stamp = "";
    for (const char *at = text, *end = text + bytes; at < end;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t n = stop ? (size_t)(stop - at) + 1 : (size_t)(end - at);
        if (has_stamp(at, n)) stamp = at;
        if (l->n == l->cap) {
            l->cap = l->cap ? 2 * l->cap : 1024;
            l->v = realloc(l->v, l->cap * sizeof *l->v);
            LG_ASSERT(l->v);
        }
        l->v[l->n] = (struct line){.stamp = stamp, .text = at, .bytes = n, .order = l->n};
        l->n++;
        at += n;
    }
}

static int by_time(const void *a, const void *b)
{
    const struct line *x = a, *y = b;
    int c = strncmp(x->stamp, y->stamp, STAMP_BYTES);
    return c ? c : (x->order > y->order) - (x->order < y->order);
}

static void show_new(struct file *f, int n, bool follow)
{
    char **text = calloc((size_t)n + 1, sizeof *text);
    struct lines l = {0};
    LG_ASSERT(text);
    for (int i = 0; i < n; i++) {
        size_t bytes = 0;
        text[i] = read_new(&f[i], follow, &bytes);
        if (text[i]) cut_lines(text[i], bytes, &l);
    }
    if (l.n) qsort(l.v, l.n, sizeof *l.v, by_time);
    for (size_t i = 0; i < l.n; i++) {
        size_t bytes = l.v[i].bytes;
        bytes -= l.v[i].text[bytes - 1] == '\n'; /* not there: a process's last words */
        lg_print_text(stdout, l.v[i].text, bytes, LG_NEWLINES_ESCAPED);
        putchar('\n');
    }
    fflush(stdout);
    for (int i = 0; i < n; i++) free(text[i]);
    free(text);
    free(l.v);
}

int lg_logs(const char *dir, const char *role, bool follow)
{
    struct file *f = calloc(FILES_MAX, sizeof *f);
    int n = 0;
    if (!f) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the list of logs");
    int rc = find_files(dir, role, f, &n);
    if (rc == 0 && n == 0 && !follow)
        rc = LG_FAIL(LG_ERR_NOTFOUND, "no log of %s in %s/logs", role ? role : "any process", dir);
    if (rc == 0) show_new(f, n, follow);
    while (rc == 0 && follow && !ferror(stdout)) {
        poll(NULL, 0, FOLLOW_MS);
        rc = find_files(dir, role, f, &n);
        if (rc == 0) show_new(f, n, follow);
    }
    free(f);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
