/* What the user sees; see progress.h. */
#include "supervisor/progress.h"
#include "base/clock.h"
#include "base/fs.h"
#include "supervisor/status.h"
#include "supervisor/supervise.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define WAIT_WEIGHT 0.1 /* of the newest step */
enum { TERMINAL_MS = 250, PLAIN_MS = 5000, LOG_MS = 30000, POINT_MS = 1000, LINE_BYTES = 512 };

void lg_progress_open(lg_progress *p, const char *run_dir, bool quiet)
{
    char path[LG_PATH_BYTES];
    *p = (lg_progress){.quiet = quiet, .terminal = !quiet && isatty(STDOUT_FILENO), .log_fd = -1};
    if (lg_path(path, "%s/logs/lgsup.log", run_dir) == 0)
        p->log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

void lg_progress_close(lg_progress *p)
{
    if (p->log_fd >= 0) close(p->log_fd);
    p->log_fd = -1;
}

static void write_log(lg_progress *p, lg_log_level level, const char *line)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    char stamp[40], step[32] = "";
    struct timespec ts;
    struct tm tm;
    if (p->log_fd < 0) return;
    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &tm);
    if (strncmp(line, "step ", 5)) snprintf(step, sizeof step, "step %" PRIu64 " ", p->step);
    dprintf(p->log_fd, "%s.%03ldZ %-5s lgsup %s%s\n", stamp, ts.tv_nsec / 1000000, names[level],
            step, line);
}

static void clear_line(lg_progress *p)
{
    if (p->line_shown) fputs("\r\033[K", stdout);
    p->line_shown = false;
}

void lg_progress_say(lg_progress *p, lg_log_level level, const char *fmt, ...)
{
    static const char *const prefix[] = {"", "", "warning: ", "error: "};
    char line[2 * LINE_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    LG_ASSERT((size_t)level < LG_ARRAY_LEN(prefix));
    write_log(p, level, line);
    if (p->quiet) return;
    clear_line(p);
    printf("%s%s\n", prefix[level], line);
    fflush(stdout);
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
static void roles_text(struct lg_supervisor *s, char *ret, size_t bytes)
{
    size_t at = 0;
    for (int r = 0; r < LG_ROLE_keeper; r++) {
        int all = 0, well = 0;
        for (int i = 0; i < s->n_instances; i++) {
            if ((int)s->instance[i].role != r || s->instance[i].state >= LG_INSTANCE_draining)
                continue;
            all++;
            well += s->instance[i].state == LG_INSTANCE_ready ||
                    s->instance[i].state == LG_INSTANCE_resting;
        }
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
static size_t figures_text(lg_progress *p, struct lg_supervisor *s, char *ret, size_t bytes)
{
    const struct lg_board_shared *b = s->board->s;
    uint64_t step = lg_status_step(s->board);
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
    if (p->quiet) return;
    if (p->terminal)
        printf("\r%.*s\033[K", terminal_columns(), line);
    else
        printf("%s\n", line);
    p->line_shown = p->terminal;
    fflush(stdout);
}

void lg_progress_show(lg_progress *p, struct lg_supervisor *s)
{
    char line[LINE_BYTES];
    int64_t now_ns = lg_now_ns();
    p->step = lg_status_step(s->board);
    follow_waiting(p, s->board->s);
    bool show = now_ns >= p->next_ns && !p->quiet, log = now_ns >= p->next_log_ns;
    if (!show && !log) return;
    size_t n = figures_text(p, s, line, sizeof line);
    n += (size_t)snprintf(line + n, sizeof line - n, " |");
    roles_text(s, line + n, sizeof line - n);
    if (show) {
        p->next_ns = now_ns + (p->terminal ? TERMINAL_MS : PLAIN_MS) * LG_MS_NS;
        put_line(p, line);
    }
    if (log) {
        p->next_log_ns = now_ns + LOG_MS * LG_MS_NS;
        write_log(p, LG_INFO, line);
    }
}

void lg_progress_last(lg_progress *p, struct lg_supervisor *s)
{
    char line[LINE_BYTES];
    figures_text(p, s, line, sizeof line);
    write_log(p, LG_INFO, line);
    put_line(p, line);
    if (p->line_shown) putchar('\n');
    p->line_shown = false;
    fflush(stdout);
}
