/* metrics.jsonl and the ledger; see records.h.
 *
 * A metrics line is one write() at a known offset; a short write is cut off again, so the file
 * always ends with a whole line. The ledger is written by position: writing a step twice is
 * harmless. So the ledger goes first: what fails after it is done again as a whole.
 *
 * What waits for room is lost when the process dies. For a line of figures that may be; for the
 * ledger, which proves what was trained, room is reserved for 16,384 steps ahead, and a write that
 * fails is tried again at once, before the commit. */
#include "stages/trainer/records.h"
#include "base/log.h"
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PENDING_MAX = 4096, LINE_BYTES = 512, LEDGER_AHEAD_BYTES = 1 << 20, LEDGER_TRIES = 3 };

struct lg_records {
    int metrics, ledger; /* fds */
    off_t end;           /* of metrics.jsonl: after the last whole line */
    off_t ledger_end;    /* of what is committed */
    bool is_cut;         /* behind these two there is nothing of a former life any more */
    off_t reserved;      /* the ledger has room on the disk up to here, or a try has failed */
    struct lg_step_record *pending;
    int n_pending;
};

static int open_file(const char *dir, const char *name, int *ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/%s", dir, name));
    *ret = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (*ret < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    return 0;
}

/* ---- where a start goes on ---- */

struct line {
    off_t begin;
    uint64_t step; /* NO_STEP: not one whole line of ours */
};
#define NO_STEP UINT64_MAX

/* NUL: a hole of a power cut, which the parser would take for white space. */
static uint64_t step_of(const char *line, size_t bytes)
{
    if (!bytes || line[bytes - 1] != '\n' || memchr(line, 0, bytes)) return NO_STEP;
    cJSON *j = cJSON_ParseWithLength(line, bytes);
    const cJSON *step = cJSON_GetObjectItemCaseSensitive(j, "step");
    bool is_count = cJSON_IsNumber(step) && step->valuedouble >= 0 && step->valuedouble < 9e15;
    uint64_t n = is_count ? (uint64_t)step->valuedouble : NO_STEP;
    cJSON_Delete(j);
    return n;
}

/* The line that ends at `end` > 0. What is longer than a line of ours is passed in pieces. */
static int line_before(int fd, off_t end, struct line *ret)
{
    char text[LINE_BYTES];
    size_t n = (size_t)LG_MIN(end, (off_t)sizeof text);
    ssize_t got = pread(fd, text, n, end - (off_t)n);
    if (got != (ssize_t)n)
        return LG_FAIL(LG_ERR_IO, "reading metrics.jsonl: %s",
                       got < 0 ? strerror(errno) : "the file became shorter");
    const char *newline = memrchr(text, '\n', n - 1);
    size_t at = newline ? (size_t)(newline + 1 - text) : 0;
    bool is_whole = newline || end == (off_t)n;
    ret->begin = end - (off_t)(n - at);
    ret->step = is_whole ? step_of(text + at, n - at) : NO_STEP;
    return 0;
}

/* Where the last line ends whose step is at most `committed`. Read backwards, since a run of a million
 * steps has 200 MB of lines and mostly none to cut. A power cut may leave, behind the lines that were
 * made durable, a mixture of two lives whose seam reads as a smaller step: so steps must have grown up
 * to the line. */
static int find_end(int fd, uint64_t committed, off_t *ret)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return LG_FAIL(LG_ERR_IO, "cannot look at metrics.jsonl: %s", strerror(errno));
    off_t end = st.st_size;
    while (end > 0) {
        struct line at, before = {0};
        LG_TRY(line_before(fd, end, &at));
        bool keep = at.step <= committed && at.step != NO_STEP;
        if (keep && at.begin) LG_TRY(line_before(fd, at.begin, &before));
        if (keep && (at.begin == 0 || before.step < at.step)) break;
        end = at.begin;
    }
    *ret = end;
    return 0;
}

static int cut(int fd, const char *name, off_t end)
{
    struct stat st;
    if (fstat(fd, &st) == 0 && st.st_size <= end) return 0;
    if (ftruncate(fd, end) < 0)
        return LG_FAIL(LG_ERR_IO, "cannot cut %s: %s", name, strerror(errno));
    return 0;
}

int lg_records_open(const char *run_dir, uint64_t committed, lg_records **ret)
{
    lg_records *r = calloc(1, sizeof *r);
    LG_ASSERT(r);
    r->metrics = r->ledger = -1;
    int rc;
    r->pending = calloc(PENDING_MAX, sizeof *r->pending);
    LG_ASSERT(r->pending);
    LG_TRY_GOTO(rc, open_file(run_dir, "metrics.jsonl", &r->metrics), fail);
    LG_TRY_GOTO(rc, open_file(run_dir, "ledger", &r->ledger), fail);
    LG_TRY_GOTO(rc, find_end(r->metrics, committed, &r->end), fail);
    r->ledger_end = (off_t)(committed * sizeof(struct lg_ledger_record));
    *ret = r;
    return 0;
fail:
    lg_records_close(&r);
    return rc;
}

/* JSON has no NaN: null. */
static const char *number(char buf[32], double v)
{
    if (!isfinite(v)) return "null";
    snprintf(buf, 32, "%.9g", v);
    return buf;
}

/* Seconds since 1970. */
static double wall_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Best effort: not every file system can. The file's size stays. */
static void reserve_ledger(lg_records *r, off_t at)
{
    if (at < r->reserved) return;
    bool can = fallocate(r->ledger, FALLOC_FL_KEEP_SIZE, at, LEDGER_AHEAD_BYTES) == 0;
    r->reserved = at + (can ? LEDGER_AHEAD_BYTES : LEDGER_AHEAD_BYTES / 64);
}

static bool write_ledger(lg_records *r, const struct lg_step_record *s)
{
    off_t at = (off_t)((s->ledger.step - 1) * sizeof s->ledger);
    reserve_ledger(r, at);
    for (int i = 0; i < LEDGER_TRIES; i++)
        if (pwrite(r->ledger, &s->ledger, sizeof s->ledger, at) == (ssize_t)sizeof s->ledger)
            return true;
    return false;
}

static bool write_one(lg_records *r, const struct lg_step_record *s)
{
    char line[LINE_BYTES], a[32], b[32], c[32], scale[48] = "", parts[112] = "";
    if (s->has_vb)
        snprintf(parts, sizeof parts, "\"loss_mse\": %s, \"loss_vb\": %s, ",
                 number(a, s->loss - s->loss_vb), number(b, s->loss_vb));
    if (s->loss_scale > 1) snprintf(scale, sizeof scale, "\"loss_scale\": %.0f, ", s->loss_scale);
    int n = snprintf(
        line, sizeof line,
        "{\"step\": %" PRIu64 ", \"loss\": %s, %s\"grad_norm\": %s, \"lr\": %s, "
        "\"samples_per_s\": %.2f, \"data_wait_s\": %.6f, \"ckpt_wait_s\": %.6f, \"voids\": %u, "
        "\"skipped\": %u, %s\"time\": %.3f}\n",
        s->ledger.step, number(a, s->loss), parts, number(b, s->grad_norm), number(c, s->lr),
        s->samples_per_s, s->data_wait_s, s->ckpt_wait_s, s->ledger.voids, s->ledger.skipped, scale,
        wall_s());
    LG_ASSERT(n > 0 && n < LINE_BYTES);
    if (!write_ledger(r, s)) return false;
    if (pwrite(r->metrics, line, (size_t)n, r->end) != n) {
        if (ftruncate(r->metrics, r->end) < 0)
            lg_log(LG_WARN, "cannot cut metrics.jsonl: %s", strerror(errno));
        return false;
    }
    r->end += n;
    return true;
}

int lg_records_cut(lg_records *r)
{
    if (r->is_cut) return 0;
    LG_TRY(cut(r->metrics, "metrics.jsonl", r->end));
    LG_TRY(cut(r->ledger, "the ledger", r->ledger_end));
    r->is_cut = true;
    return 0;
}

static bool may_write(lg_records *r)
{
    if (lg_records_cut(r) < 0) lg_err_clear();
    return r->is_cut;
}

int lg_records_retry(lg_records *r)
{
    int done = 0;
    if (!may_write(r)) return r->n_pending ? 1 : 0;
    while (done < r->n_pending && write_one(r, &r->pending[done])) done++;
    r->n_pending -= done;
    memmove(r->pending, r->pending + done, (size_t)r->n_pending * sizeof *r->pending);
    return r->n_pending ? 1 : 0;
}

int lg_records_append(lg_records *r, const struct lg_step_record *record)
{
    /* When thousands are waiting the oldest go: the disk has been full for a very long time. */
    if (r->n_pending == PENDING_MAX)
        memmove(r->pending, r->pending + 1, (size_t)--r->n_pending * sizeof *r->pending);
    r->pending[r->n_pending] = *record;
    lg_ledger_seal(&r->pending[r->n_pending].ledger);
    if (may_write(r) && r->n_pending)
        write_ledger(r, &r->pending[r->n_pending]); /* need not wait for the lines */
    r->n_pending++;
    return lg_records_retry(r);
}

void lg_records_close(lg_records **r)
{
    if (!*r) return;
    if ((*r)->n_pending) lg_records_retry(*r);
    if ((*r)->metrics >= 0) close((*r)->metrics);
    if ((*r)->ledger >= 0) close((*r)->ledger);
    free((*r)->pending);
    free(*r);
    *r = NULL;
}
