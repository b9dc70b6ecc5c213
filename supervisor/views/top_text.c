/* The screen of `lgsup top` as lines of text; see top.h. Pure: the same reading gives the same lines. */
#include "base/clock.h"
#include "base/printable.h"
#include "supervisor/views/top.h"
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LABEL_COLUMNS = 12, BAR_CELLS = 10, SPARK_CELLS_MAX = 120 };

struct page {
    lg_top_line *line;
    int n;
};

__attribute__((format(printf, 2, 3))) static void put(struct page *p, const char *fmt, ...)
{
    LG_ASSERT(p->n < LG_TOP_LINES_MAX);
    char text[LG_TOP_LINE_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    lg_printable(p->line[p->n++], LG_TOP_LINE_BYTES, text, strlen(text), LG_NEWLINES_ESCAPED);
}

/* ---- small texts ---- */

static const char *bytes_text(char ret[24], uint64_t bytes)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    size_t u = 0;
    for (; v >= 1000 && u + 1 < LG_ARRAY_LEN(unit); u++) v /= 1024;
    snprintf(ret, 24, u && v < 100 ? "%.1f %s" : "%.0f %s", v, unit[u]);
    return ret;
}

static const char *duration_text(char ret[24], double s)
{
    if (!(s >= 0 && s < 1e8))
        snprintf(ret, 24, "-");
    else if (s >= 3600)
        snprintf(ret, 24, "%.0fh%02.0fm", floor(s / 3600), floor(fmod(s, 3600) / 60));
    else if (s >= 60)
        snprintf(ret, 24, "%.0fm%02.0fs", floor(s / 60), floor(fmod(s, 60)));
    else if (s >= 1)
        snprintf(ret, 24, "%.1f s", s);
    else
        snprintf(ret, 24, "%.1f ms", s * 1e3);
    return ret;
}

/* Level 0 to 8 of one cell. */
static const char *cell(int level, bool utf8)
{
    static const char *const blocks[] = {" ",      "\u2581", "\u2582", "\u2583", "\u2584",
                                         "\u2585", "\u2586", "\u2587", "\u2588"};
    static const char *const ascii[] = {" ", "_", ".", ",", "-", "~", "+", "*", "#"};
    return (utf8 ? blocks : ascii)[LG_MIN(LG_MAX(level, 0), 8)];
}

static void bar(char *ret, size_t bytes, double share, bool utf8)
{
    size_t at = 0;
    for (int i = 0; i < BAR_CELLS; i++)
        at += (size_t)snprintf(ret + at, bytes - at, "%s",
                               cell(i + 0.5 < share * BAR_CELLS ? 8 : 0, utf8));
}

/* ---- the step ---- */

struct step_time {
    double step_s, data_s, ckpt_s;
    int steps;
};

/* Means over the newest steps whose length is known. */
static struct step_time mean_step(const struct lg_top *t)
{
    struct step_time m = {0};
    for (int i = t->n_metrics - 1; i >= 0 && m.steps < LG_TOP_MEAN_STEPS; i--) {
        const struct lg_metric *row = &t->metric[i];
        if (!(row->samples_per_s > 0) || row->step > t->status.step) continue;
        m.step_s += (double)t->batch / row->samples_per_s;
        m.data_s += row->data_wait_s;
        m.ckpt_s += row->ckpt_wait_s;
        m.steps++;
    }
    if (!m.steps) return m;
    m.step_s /= m.steps;
    m.data_s = LG_MIN(m.data_s / m.steps, m.step_s);
    m.ckpt_s = LG_MIN(m.ckpt_s / m.steps, m.step_s - m.data_s);
    return m;
}

static void put_step_time(struct page *p, const struct step_time *m)
{
    char all[24], data[24], work[24], ckpt[24];
    double work_s = m->step_s - m->data_s - m->ckpt_s, percent = 100 / m->step_s;
    if (!m->steps) {
        put(p, "%-*snot known yet", LABEL_COLUMNS, "step time");
        return;
    }
    put(p,
        "%-*s%s = data wait %s (%.0f%%) + compute %s (%.0f%%) + checkpoint wait %s (%.0f%%)  "
        "mean of %d",
        LABEL_COLUMNS, "step time", duration_text(all, m->step_s), duration_text(data, m->data_s),
        m->data_s * percent, duration_text(work, work_s), work_s * percent,
        duration_text(ckpt, m->ckpt_s), m->ckpt_s * percent, m->steps);
}

/* Mean loss of each of `cells` equal parts of the newest steps; NaN where none is finite. */
static void loss_parts(const struct lg_top *t, int cells, double *mean)
{
    for (int c = 0; c < cells; c++) {
        int from = (int)((int64_t)t->n_metrics * c / cells), n = 0;
        int to = (int)((int64_t)t->n_metrics * (c + 1) / cells);
        double sum = 0;
        for (int i = from; i < to; i++) {
            if (!isfinite(t->metric[i].loss)) continue;
            sum += t->metric[i].loss;
            n++;
        }
        mean[c] = n ? sum / n : NAN;
    }
}

static void put_loss(struct page *p, const struct lg_top *t, const struct lg_top_look *look)
{
    double mean[SPARK_CELLS_MAX], low = INFINITY, high = -INFINITY;
    char spark[4 * SPARK_CELLS_MAX + 1] = "";
    int cells = LG_MIN(LG_MAX(look->columns - LABEL_COLUMNS - 44, 10), SPARK_CELLS_MAX);
    cells = LG_MIN(cells, t->n_metrics);
    size_t at = 0;
    if (!cells) return;
    loss_parts(t, cells, mean);
    for (int c = 0; c < cells; c++) {
        if (isnan(mean[c])) continue;
        low = LG_MIN(low, mean[c]);
        high = LG_MAX(high, mean[c]);
    }
    for (int c = 0; c < cells; c++) {
        double share = high > low ? (mean[c] - low) / (high - low) : 0.5;
        at += (size_t)snprintf(spark + at, sizeof spark - at, "%s",
                               isnan(mean[c]) ? "x" : cell(1 + (int)(share * 7 + 0.5), look->utf8));
    }
    put(p, "%-*s%s  %.4f to %.4f, steps %" PRIu64 " to %" PRIu64, LABEL_COLUMNS, "loss", spark,
        low <= high ? low : NAN, low <= high ? high : NAN, t->metric[0].step,
        t->metric[t->n_metrics - 1].step);
}

/* ---- the run ---- */

static void put_head(struct page *p, const struct lg_top *t, const struct step_time *m)
{
    const struct lg_status *s = &t->status;
    char eta[24] = "", clock[32];
    struct tm tm;
    bool runs = !strcmp(s->state, "running") && m->steps && s->max_steps >= s->step;
    if (runs) duration_text(eta, (double)(s->max_steps - s->step) * m->step_s);
    strftime(clock, sizeof clock, "%H:%M:%S", localtime_r(&t->now, &tm));
    put(p, "lgsup top  %s: %s  step %" PRIu64 "/%" PRIu64 "%s%s  %s", s->job, s->state, s->step,
        s->max_steps, runs ? "  ETA " : "", eta, clock);
    if (s->cause[0]) put(p, "%-*s%s", LABEL_COLUMNS, "cause", s->cause);
    const struct lg_metric *last = t->n_metrics ? &t->metric[t->n_metrics - 1] : NULL;
    char loss[LG_LOSS_TEXT_BYTES];
    if (last) lg_loss_text(last->loss, last->has_vb ? &last->loss_vb : NULL, loss);
    if (last)
        put(p,
            "%-*sloss %s  gradient norm %.4g  lr %.3g  %.1f samples/s  void samples %" PRIu64
            "  skipped steps %" PRIu64,
            LABEL_COLUMNS, "training", loss, last->grad_norm, last->lr,
            m->steps ? (double)t->batch / m->step_s : 0, s->voids, s->skipped);
}

static void put_window(struct page *p, const struct lg_top *t, const struct lg_top_look *look)
{
    char line[LG_TOP_LINE_BYTES], fill[4 * BAR_CELLS + 1];
    size_t at = 0;
    if (!t->slot) {
        put(p, "%-*snot readable (no keeper answers)", LABEL_COLUMNS, "window");
        return;
    }
    for (int f = 0; f < LG_FIELD_COUNT; f++) {
        if (!t->window.chunk[f]) continue;
        double share = (double)t->ready[f] / (double)t->window.slots;
        bar(fill, sizeof fill, share, look->utf8);
        at += (size_t)snprintf(line + at, sizeof line - at, "%s%s %" PRIu64 "/%" PRIu64 " [%s]  ",
                               f == LG_FIELD_SOURCE   ? "source"
                               : f == LG_FIELD_LATENT ? "latent"
                                                      : "text",
                               f < LG_FIELD_TEXT ? "" : t->window.text[f - LG_FIELD_TEXT].name,
                               t->ready[f], t->window.slots, fill);
    }
    put(p, "%-*s%sbatch %" PRIu64, LABEL_COLUMNS, "window", line, t->batch);
}

static void put_memory(struct page *p, const struct lg_top *t)
{
    char own[24], regions[24], used[24], all[24];
    uint64_t sum = 0;
    for (int i = 0; i < t->status.n_instances; i++)
        if (t->has_board) sum += t->process[t->row[i]].private_bytes;
    put(p, "%-*sprocesses %s  regions %s (%d)  host %s of %s in use", LABEL_COLUMNS, "memory",
        bytes_text(own, sum), bytes_text(regions, t->region_bytes), t->n_regions,
        bytes_text(used, t->host_used_bytes), bytes_text(all, t->host_bytes));
    for (int g = 0; g < t->n_gpus; g++) {
        char name[32], busy[16] = "-";
        snprintf(name, sizeof name, "gpu %d", g);
        if (t->gpu[g].busy_percent >= 0)
            snprintf(busy, sizeof busy, "%d%%", t->gpu[g].busy_percent);
        put(p, "%-*s%s  busy %s  memory %s of %s", LABEL_COLUMNS, name, t->gpu[g].name, busy,
            bytes_text(used, t->gpu[g].used_bytes), bytes_text(all, t->gpu[g].total_bytes));
    }
}

/* ---- processes ---- */

/* What grew per second between the oldest and the newest reading; negative: not known. */
static double per_second(const struct lg_top_process *p, size_t field)
{
    if (p->n_points < 2) return -1;
    const struct lg_top_counters *a = &p->point[0], *b = &p->point[p->n_points - 1];
    uint64_t from = *(const uint64_t *)((const char *)a + field);
    uint64_t to = *(const uint64_t *)((const char *)b + field);
    double s = (double)(b->at_ns - a->at_ns) / LG_S_NS;
    return s > 0 && to >= from ? (double)(to - from) / s : -1;
}
#define PER_SECOND(p, field) per_second((p), offsetof(struct lg_top_counters, field))

static const char *share_text(char ret[16], double ns_per_s)
{
    snprintf(ret, 16, ns_per_s < 0 ? "-" : "%.0f%%", ns_per_s / LG_S_NS * 100);
    return ret;
}

static bool counts_samples(lg_role r)
{
    return lg_role_scales(r) || r == LG_ROLE_trainer;
}

static void put_process(struct page *page, const struct lg_top_process *p, int columns)
{
    char name[LG_STATUS_NAME_BYTES], pid[16] = "-", rate[16] = "-", busy[16] = "-", cpu[16],
                                     own[24] = "-", shared[24] = "-", beat[24] = "-";
    double samples = counts_samples(p->is.role) ? PER_SECOND(p, samples) : -1;
    bool lives = p->is.pid != 0, stage = p->is.role < LG_ROLE_keeper;
    if (lives) snprintf(pid, sizeof pid, "%d", p->is.pid);
    if (samples >= 0) snprintf(rate, sizeof rate, "%.1f", samples);
    /* a long piece of work is counted at its end, so the share may seem to exceed 1 */
    if (stage) share_text(busy, LG_MIN(PER_SECOND(p, busy_ns), (double)LG_S_NS));
    if (lives) bytes_text(own, p->private_bytes), bytes_text(shared, p->shared_bytes);
    if (stage && p->is.beat_age_ns >= 0) duration_text(beat, (double)p->is.beat_age_ns / LG_S_NS);
    put(page, "%-*s %8s  %-8s %8u %10s %6s %6s %10s %10s %9s", columns,
        lg_status_name(&p->is, name), pid, p->is.state, p->is.restarts, rate, busy,
        share_text(cpu, PER_SECOND(p, cpu_ns)), own, shared, beat);
}

static void put_processes(struct page *page, const struct lg_top *t, int *ret_heading)
{
    const int columns = lg_status_columns(&t->status, 11);
    put(page, "%s", "");
    *ret_heading = page->n;
    put(page, "%-*s %8s  %-8s %8s %10s %6s %6s %10s %10s %9s", columns, "process", "pid", "state",
        "restarts", "samples/s", "busy", "cpu", "memory", "shared", "last beat");
    for (int i = 0; i < t->status.n_instances && t->has_board; i++)
        put_process(page, &t->process[t->row[i]], columns);
}

int lg_top_text(const struct lg_top *t, const struct lg_top_look *look,
                lg_top_line line[LG_TOP_LINES_MAX], int *ret_heading)
{
    struct page page = {.line = line};
    struct step_time mean = mean_step(t);
    put_head(&page, t, &mean);
    put_step_time(&page, &mean);
    put_loss(&page, t, look);
    put_window(&page, t, look);
    put_memory(&page, t);
    put(&page, "%-*s%s", LABEL_COLUMNS, "checkpoint",
        t->status.checkpoint[0] ? t->status.checkpoint : "none yet");
    put_processes(&page, t, ret_heading);
    if (t->n_events) put(&page, "%s", "");
    for (int i = 0; i < t->n_events; i++) put(&page, "%s", t->event[i]);
    return page.n;
}
