/* Files of logs; see log_files.h. */
#include "supervisor/commands/log_files.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LOG_BYTES_MAX = 256 << 20,
    ELSEWHERE_BYTES_MAX = 64 << 20, /* of a file that another host sees for the first time */
    ELSEWHERE_PIECE_MAX = 64 << 10,
    ELSEWHERE_PIECE_MIN = 16 << 10 /* where less room is left the next answer has more */
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
    return strcmp(((const struct lg_log_file *)a)->name, ((const struct lg_log_file *)b)->name);
}

int lg_log_files_find(const char *dir, const char *role, struct lg_log_file *f, int *n)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/logs", dir));
    DIR *d = opendir(path);
    if (!d && errno == EACCES)
        return LG_FAIL(LG_ERR_IO, "cannot look into %s: %s", path, strerror(errno));
    if (!d)
        return LG_FAIL(LG_ERR_NOTFOUND, "%s is not a run directory: no logs/ in it (%s)", dir,
                       strerror(errno));
    struct dirent *e;
    while (*n < LG_LOG_FILES_MAX && (e = readdir(d))) {
        bool known = strlen(e->d_name) >= sizeof f->name || !wanted(e->d_name, role);
        for (int i = 0; i < *n && !known; i++) known = !strcmp(f[i].name, e->d_name);
        if (known) continue;
        struct lg_log_file *p = &f[(*n)++];
        *p = (struct lg_log_file){0};
        memcpy(p->name, e->d_name, strlen(e->d_name) + 1);
        if (lg_path(p->path, "%s/%s", path, e->d_name) < 0) break;
    }
    closedir(d);
    qsort(f, (size_t)*n, sizeof *f, by_name);
    return 0;
}

/* How much of a file there is behind what is shown, `most` at most: of more only the newest part. */
static int open_new(struct lg_log_file *f, size_t most, size_t *ret_bytes)
{
    const int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    const off_t end = lseek(fd, 0, SEEK_END);
    *ret_bytes = end > (off_t)f->shown ? (size_t)end - f->shown : 0;
    if (*ret_bytes > most) {
        f->shown += *ret_bytes - most;
        *ret_bytes = most;
    }
    return fd;
}

/* The bytes of whole lines at the beginning of text, or all where more will not come. A line that is longer than all
 * the room is cut. */
static size_t whole_lines(const char *text, size_t n, bool more, size_t room)
{
    size_t whole = n;
    while (more && whole > 0 && text[whole - 1] != '\n') whole--;
    return whole || n < room ? whole : n;
}

char *lg_log_file_read(struct lg_log_file *f, bool follow, size_t *ret_bytes)
{
    size_t bytes = 0;
    const int fd = open_new(f, LOG_BYTES_MAX, &bytes);
    if (fd < 0) return NULL;
    char *text = bytes ? malloc(bytes) : NULL;
    ssize_t n = text ? pread(fd, text, bytes, (off_t)f->shown) : 0;
    close(fd);
    if (n > 0) n = (ssize_t)whole_lines(text, (size_t)n, follow, LOG_BYTES_MAX);
    if (n <= 0) {
        free(text);
        return NULL;
    }
    f->shown += (size_t)n;
    *ret_bytes = (size_t)n;
    return text;
}

struct pieces {
    const struct lg_question *q;
    char *text;
    size_t n;
    bool more;
};

static void find_shown(const struct lg_question *q, struct lg_log_file *f)
{
    const uint64_t name = lg_hash(f->name, strlen(f->name));
    for (uint32_t k = 0; k < q->n_files; k++)
        if (q->file[k].name == name)
            f->shown = (size_t)LG_MIN(q->file[k].shown, (uint64_t)INT64_MAX);
}

static void put_piece(struct pieces *p, struct lg_log_file *f)
{
    size_t bytes = 0, room = LG_ANSWER_TEXT_MAX - p->n;
    if (room < sizeof(struct lg_log_piece) + ELSEWHERE_PIECE_MIN) {
        p->more = true;
        return;
    }
    room = LG_MIN(room - sizeof(struct lg_log_piece), (size_t)ELSEWHERE_PIECE_MAX);
    find_shown(p->q, f);
    const int fd = open_new(f, ELSEWHERE_BYTES_MAX, &bytes);
    if (fd < 0) return;
    const bool all = bytes <= room;
    char *to = p->text + p->n + sizeof(struct lg_log_piece);
    const ssize_t n = bytes ? pread(fd, to, LG_MIN(bytes, room), (off_t)f->shown) : 0;
    close(fd);
    if (n <= 0) return;
    struct lg_log_piece head = {.bytes = whole_lines(to, (size_t)n, !all || p->q->flag, room)};
    p->more |= !all;
    if (!head.bytes) return;
    head.shown = f->shown + head.bytes;
    snprintf(head.name, sizeof head.name, "%s", f->name);
    memcpy(p->text + p->n, &head, sizeof head);
    p->n += sizeof head + head.bytes;
}

int lg_logs_answer(const char *dir, const struct lg_question *q, struct lg_reply *ret)
{
    struct lg_log_file *f = calloc(LG_LOG_FILES_MAX, sizeof *f);
    struct pieces p = {.q = q, .text = malloc(LG_ANSWER_TEXT_MAX)};
    int n = 0;
    int rc = f && p.text ? lg_log_files_find(dir, q->text[0] ? q->text : NULL, f, &n)
                         : LG_FAIL(LG_ERR_NOSPACE, "no memory for logs");
    for (int i = 0; i < n && rc == 0; i++) put_piece(&p, &f[i]);
    free(f);
    *ret = (struct lg_reply){p.text, p.n, p.more};
    LG_TRY(rc);
    return 0;
}
