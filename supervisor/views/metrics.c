/* Reading metrics.jsonl; see metrics.h.
 *
 * The file may have millions of lines: the place of a step is found by halving the file, since steps
 * rise, and the newest lines by reading its end alone. A reader that stands behind the line of a
 * committed step stands at a place that no restart cuts off. */
#include "supervisor/views/metrics.h"
#include "base/check.h"
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LINE_BYTES_MAX = 4096, /* a longer one is none of ours */
    BUFFER_BYTES = 65536,
    TAIL_BYTES_MAX = 1 << 20,
};

static double number(const cJSON *j, const char *key, double missing)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    if (cJSON_IsNull(v)) return NAN;
    return cJSON_IsNumber(v) ? v->valuedouble : missing;
}

bool lg_metric_parse(const char *line, size_t bytes, struct lg_metric *ret)
{
    cJSON *j = cJSON_ParseWithLength(line, bytes);
    double step = number(j, "step", 0);
    bool ours = step >= 1 && step < 9e15;
    if (ours)
        *ret = (struct lg_metric){.step = (uint64_t)step,
                                  .loss = number(j, "loss", NAN),
                                  .loss_vb = number(j, "loss_vb", NAN),
                                  .has_vb = cJSON_HasObjectItem(j, "loss_vb"),
                                  .grad_norm = number(j, "grad_norm", NAN),
                                  .lr = number(j, "lr", 0),
                                  .samples_per_s = number(j, "samples_per_s", 0),
                                  .data_wait_s = number(j, "data_wait_s", 0),
                                  .ckpt_wait_s = number(j, "ckpt_wait_s", 0),
                                  .voids = number(j, "voids", 0),
                                  .skipped = number(j, "skipped", 0),
                                  .time_s = number(j, "time", 0)};
    cJSON_Delete(j);
    return ours;
}

static int open_file(const char *run_dir, int *ret_fd)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/metrics.jsonl", run_dir));
    *ret_fd = open(path, O_RDONLY | O_CLOEXEC);
    return *ret_fd < 0 ? LG_ERR_NOTFOUND : 0;
}

/* The first whole line that begins at or after byte `at`: its start, its end and its step. False when
 * there is none. Whether a line begins at `at` itself is told by the byte before it. */
static bool line_from(int fd, uint64_t at, uint64_t *ret_start, uint64_t *ret_end,
                      uint64_t *ret_step)
{
    char text[2 * LINE_BYTES_MAX];
    uint64_t base = at ? at - 1 : 0;
    ssize_t n = pread(fd, text, sizeof text, (off_t)base);
    char *from = text, *stop;
    struct lg_metric m;
    if (n <= 0) return false;
    if (at && !(from = memchr(text, '\n', (size_t)n))) return false;
    from += at ? 1 : 0;
    if (!(stop = memchr(from, '\n', (size_t)(text + n - from)))) return false;
    if (!lg_metric_parse(from, (size_t)(stop - from), &m)) return false;
    *ret_start = base + (uint64_t)(from - text);
    *ret_end = base + (uint64_t)(stop - text) + 1;
    *ret_step = m.step;
    return true;
}

/* Byte after the last line with a step <= after. Lines that begin before `low` have such a step, lines
 * that begin at or after `high` have not. */
static uint64_t find(int fd, uint64_t after)
{
    off_t size = lseek(fd, 0, SEEK_END);
    uint64_t low = 0, high = size > 0 ? (uint64_t)size : 0;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2, start, end, step;
        if (line_from(fd, middle, &start, &end, &step) && start < high && step <= after)
            low = end;
        else
            high = middle;
    }
    return low;
}

int lg_metrics_open(const char *run_dir, uint64_t after, lg_metrics *ret)
{
    int fd, rc = open_file(run_dir, &fd);
    if (rc < 0) return rc;
    *ret = (lg_metrics){.fd = fd, .buffer = malloc(BUFFER_BYTES)};
    if (!ret->buffer) {
        close(fd);
        return LG_FAIL(LG_ERR_NOSPACE, "no memory to read metrics.jsonl");
    }
    ret->at = find(fd, after);
    return 0;
}

void lg_metrics_close(lg_metrics *m)
{
    if (!m->buffer) return;
    close(m->fd);
    free(m->buffer);
    *m = (lg_metrics){.fd = -1};
}

/* The next whole line in the buffer, which is filled when it holds none; NULL: not there yet. */
static char *line_end(lg_metrics *m)
{
    char *stop = memchr(m->buffer + m->pos, '\n', m->held - m->pos);
    if (stop) return stop;
    ssize_t n = pread(m->fd, m->buffer, BUFFER_BYTES, (off_t)m->at);
    m->pos = 0;
    m->held = n > 0 ? (size_t)n : 0;
    return memchr(m->buffer, '\n', m->held);
}

bool lg_metrics_next(lg_metrics *m, uint64_t last, struct lg_metric *ret)
{
    for (char *stop; (stop = line_end(m));) {
        struct lg_metric row;
        size_t bytes = (size_t)(stop - m->buffer) + 1 - m->pos;
        bool ours = lg_metric_parse(m->buffer + m->pos, bytes, &row);
        if (ours && row.step > last) {
            m->pos = m->held = 0; /* it may yet be cut off and written anew */
            return false;
        }
        m->at += bytes;
        m->pos += bytes;
        if (!ours) continue;
        *ret = row;
        return true;
    }
    return false;
}

static int parse_tail(const char *text, size_t bytes, struct lg_metric *rows, int cap)
{
    int n = 0;
    for (const char *end = text + bytes, *stop; n < cap && end > text; end = stop) {
        /* backwards: the line that ends before `end` (which stands behind its '\n') */
        stop = memrchr(text, '\n', (size_t)(end - text) - 1);
        stop = stop ? stop + 1 : text;
        if (lg_metric_parse(stop, (size_t)(end - stop), &rows[n])) n++;
    }
    for (int i = 0; i < n / 2; i++) {
        struct lg_metric swap = rows[i];
        rows[i] = rows[n - 1 - i];
        rows[n - 1 - i] = swap;
    }
    return n;
}

int lg_metrics_tail(const char *run_dir, struct lg_metric *rows, int cap)
{
    int fd, n = 0;
    if (open_file(run_dir, &fd) < 0) {
        lg_err_clear();
        return 0;
    }
    off_t size = lseek(fd, 0, SEEK_END), from = LG_MAX(size - TAIL_BYTES_MAX, 0);
    char *text = size > 0 ? malloc((size_t)(size - from)) : NULL;
    ssize_t got = text ? pread(fd, text, (size_t)(size - from), from) : 0;
    close(fd);
    const char *end = got > 0 ? memrchr(text, '\n', (size_t)got) : NULL;
    if (end) n = parse_tail(text, (size_t)(end - text) + 1, rows, cap);
    free(text);
    return n;
}
