/* What the user sees; see progress.h. */
#include "supervisor/views/progress.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/printable.h"
#include "supervisor/run/terminal.h"
#include "supervisor/views/status.h"
#include "supervisor/views/view.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define WAIT_WEIGHT 0.1 /* of the newest step */
enum { TERMINAL_MS = 250, PLAIN_MS = 5000, LOG_MS = 30000, POINT_MS = 1000, LINE_BYTES = 512 };

/* ---- the log ---- */

/* A line for the log, with an fd of its own: the worker may be stuck in its write for as long as it
 * likes. */
struct log_line {
    struct lg_job job;
    int fd;
    size_t bytes;
    char text[];
};

static void write_line(struct lg_job *job)
{
    const struct log_line *l = (struct log_line *)job;
    ssize_t ignored = write(l->fd, l->text, l->bytes); /* one write a line; a full disk: lost */
    (void)ignored;
}

static void close_log(struct lg_job *job)
{
    close(((struct log_line *)job)->fd);
}

static struct log_line *make_line(int fd, void (*work)(struct lg_job *), size_t bytes)
{
    struct log_line *l = calloc(1, sizeof *l + bytes);
    if (!l) return NULL;
    l->job.work = work;
    l->fd = fd;
    l->bytes = bytes;
    return l;
}

static bool give_line(lg_progress *p, const char *text, size_t bytes)
{
    struct log_line *l = make_line(p->log_fd, write_line, bytes);
    if (!l) return false;
    memcpy(l->text, text, bytes);
    return lg_worker_give(p->disk, &l->job);
}

void lg_progress_open(lg_progress *p, const struct lg_progress_spec *spec)
{
    char path[LG_PATH_BYTES];
    *p = (lg_progress){.quiet = spec->quiet,
                       .terminal = !spec->quiet && isatty(STDOUT_FILENO),
                       .log_fd = -1,
                       .disk = spec->disk};
    if (lg_path(path, "%s/logs/lgsup.log", spec->run_dir) == 0)
        p->log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    struct log_line *closing = p->log_fd >= 0 ? make_line(p->log_fd, close_log, 0) : NULL;
    if (!closing && p->log_fd >= 0) {
        close(p->log_fd);
        p->log_fd = -1;
    }
    p->closing = closing ? &closing->job : NULL;
}

/* The fd is closed behind its last line; it stays open with a disk that does not even take that. */
void lg_progress_close(lg_progress *p)
{
    if (p->closing) lg_worker_give(p->disk, p->closing);
    p->closing = NULL;
    p->log_fd = -1;
}

static void write_log(lg_progress *p, lg_log_level level, const char *line)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    char stamp[40], step[32] = "", missing[64] = "", text[3 * LINE_BYTES];
    struct timespec ts;
    struct tm tm;
    if (p->log_fd < 0) return;
    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &tm);
    if (strncmp(line, "step ", 5)) snprintf(step, sizeof step, "step %" PRIu64 " ", p->step);
    if (p->log_dropped)
        snprintf(missing, sizeof missing, " (%u lines before this one are missing)",
                 p->log_dropped);
    int n = snprintf(text, sizeof text, "%s.%03ldZ %-5s lgsup %s%s%s\n", stamp,
                     ts.tv_nsec / 1000000, names[level], step, line, missing);
    bool taken = give_line(p, text, LG_MIN((size_t)n, sizeof text - 1));
    p->log_dropped = taken ? 0 : p->log_dropped + 1;
}

/* ---- events ---- */

void lg_progress_say(lg_progress *p, lg_log_level level, const char *fmt, ...)
{
    static const char *const prefix[] = {"", "", "warning: ", "error: "};
    char text[2 * LINE_BYTES], line[2 * LINE_BYTES], shown[2 * LINE_BYTES + 32];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    lg_printable(line, sizeof line, text, strlen(text), LG_NEWLINES_INDENTED);
    LG_ASSERT((size_t)level < LG_ARRAY_LEN(prefix));
    write_log(p, level, line);
    if (p->quiet) return;
    int n = snprintf(shown, sizeof shown, "%s%s%s\n", p->line_shown ? "\r\033[K" : "",
                     prefix[level], line);
    if (lg_terminal_write(STDOUT_FILENO, shown, (size_t)n)) p->line_shown = false;
}

/* ---- the line ---- */

/* Steps per second over the last minute, from points a second apart. */
static double step_rate(lg_progress *p, uint64_t step, int64_t now_ns)
{
    int n = p->n_points;
    if (n == 0 || now_ns - p->point[n - 1].ns >= POINT_MS * LG_MS_NS) {
        if (n == LG_RATE_POINTS) memmove(p->point, p->point + 1, sizeof p->point[0] * --n);
        p->point[n].ns = now_ns;
        p->point[n].step = step;
        p->n_points = n + 1;
    }
    int64_t ns = now_ns - p->point[0].ns;
    return ns > 0 ? (double)(step - p->point[0].step) * 1e9 / (double)ns : 0;
}

static void duration(double s, char *ret, size_t bytes)
{
    long t = (long)(s + 0.5);
    if (!(s < 1e7))
        snprintf(ret, bytes, "-");
    else if (t >= 3600)
        snprintf(ret, bytes, "%ldh%02ldm", t / 3600, t / 60 % 60);
    else if (t >= 60)
        snprintf(ret, bytes, "%ldm%02lds", t / 60, t % 60);
    else
        snprintf(ret, bytes, "%lds", t);
}

/* "loader 1 text 2 vae 1/2 trainer 2 ema ok ckpt ok" */
static void roles_text(const struct lg_view *v, char *ret, size_t bytes)
{
    size_t at = 0;
    for (int r = 0; r < LG_ROLE_keeper; r++) {
        int all = v->role[r].all, well = v->role[r].well;
        if (!all || at >= bytes) continue;
        const char *name = lg_role_name((lg_role)r);
        if (well < all)
            at += (size_t)snprintf(ret + at, bytes - at, " %s %d/%d", name, well, all);
        else if (r == LG_ROLE_ema || r == LG_ROLE_ckpt)
            at += (size_t)snprintf(ret + at, bytes - at, " %s ok", name);
        else
            at += (size_t)snprintf(ret + at, bytes - at, " %s %d", name, all);
    }
}

static void follow_waiting(lg_progress *p, const struct lg_board_shared *b)
{
    uint64_t step = atomic_load(&b->metrics.step);
    double rate = atomic_load(&b->metrics.samples_per_s); /* of this step alone */
    if (step == p->wait_step || !(rate > 0)) return;
    double share = atomic_load(&b->metrics.data_wait_s) * rate / (double)b->batch;
    double weight = p->wait_step ? WAIT_WEIGHT : 1;
    p->wait_share += weight * (LG_MIN(share, 1.0) - p->wait_share);
    p->wait_step = step;
}

/* "step 120/1000  loss 0.5320  58.1 samples/s  ETA 6m20s  data wait 0%"; returns its length. */
static size_t figures_text(lg_progress *p, const struct lg_view *v, char *ret, size_t bytes)
{
    const struct lg_board_shared *b = v->board->s;
    uint64_t step = lg_status_step(v->board);
    double rate = step_rate(p, step, lg_now_ns());
    char eta[32];
    int n = snprintf(ret, bytes, "step %" PRIu64 "/%" PRIu64, step, b->max_steps);
    if (step == b->start_step || !(rate > 0)) return (size_t)n;
    duration((double)(b->max_steps - LG_MIN(step, b->max_steps)) / rate, eta, sizeof eta);
    n += snprintf(ret + n, bytes - (size_t)n,
                  "  loss %.4f  %.1f samples/s  ETA %s  data wait %.0f%%",
                  atomic_load(&b->metrics.loss), rate * (double)b->batch, eta, p->wait_share * 100);
    return (size_t)n;
}

static int terminal_columns(void)
{
    struct winsize w;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 1 ? w.ws_col - 1 : 79;
}

static void put_line(lg_progress *p, const char *line)
{
    char shown[LINE_BYTES + 16];
    if (p->quiet) return;
    int n = p->terminal ? snprintf(shown, sizeof shown, "\r%.*s\033[K", terminal_columns(), line)
                        : snprintf(shown, sizeof shown, "%s\n", line);
    n = LG_MIN(n, (int)sizeof shown - 1);
    if (lg_terminal_write(STDOUT_FILENO, shown, (size_t)n) && p->terminal) p->line_shown = true;
}

void lg_progress_show(lg_progress *p, const struct lg_view *v)
{
    char line[LINE_BYTES];
    int64_t now_ns = lg_now_ns();
    p->step = lg_status_step(v->board);
    follow_waiting(p, v->board->s);
    bool show = now_ns >= p->next_ns && !p->quiet, log = now_ns >= p->next_log_ns;
    if (p->terminal && !lg_terminal_is_idle()) show = false; /* it would be old when it is seen */
    if (!show && !log) return;
    size_t n = figures_text(p, v, line, sizeof line);
    n += (size_t)snprintf(line + n, sizeof line - n, " |");
    roles_text(v, line + n, sizeof line - n);
    if (show) {
        p->next_ns = now_ns + (p->terminal ? TERMINAL_MS : PLAIN_MS) * LG_MS_NS;
        put_line(p, line);
    }
    if (log) {
        p->next_log_ns = now_ns + LOG_MS * LG_MS_NS;
        write_log(p, LG_INFO, line);
    }
}

void lg_progress_last(lg_progress *p, const struct lg_view *v)
{
    char line[LINE_BYTES];
    figures_text(p, v, line, sizeof line);
    write_log(p, LG_INFO, line);
    put_line(p, line);
    if (p->line_shown) lg_terminal_write(STDOUT_FILENO, "\n", 1);
    p->line_shown = false;
}
