/* The figures of a run in Prometheus' text format, version 0.0.4; see prometheus.h.
 *
 * Everything is read from the board. A counter may begin anew when the run is started again, which
 * Prometheus expects of counters. */
#include "base/clock.h"
#include "base/fs.h"
#include "supervisor/views/prometheus.h"
#include "supervisor/views/status.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* A label's value: \, " and newline are escaped. */
static void put_label(FILE *f, const char *text)
{
    for (; *text; text++) {
        if (*text == '\n')
            fputs("\\n", f);
        else if (*text == '\\' || *text == '"')
            fprintf(f, "\\%c", *text);
        else
            fputc(*text, f);
    }
}

static void put_value(FILE *f, double v)
{
    if (isnan(v))
        fputs(" NaN\n", f);
    else if (isinf(v))
        fputs(v > 0 ? " +Inf\n" : " -Inf\n", f);
    else
        fprintf(f, " %.17g\n", v);
}

static void put_head(FILE *f, const char *name, const char *type, const char *help)
{
    fprintf(f, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void put_one(FILE *f, const char *name, const char *type, const char *help, double v)
{
    put_head(f, name, type, help);
    fputs(name, f);
    put_value(f, v);
}

static void put_run(FILE *f, const lg_run *run, lg_board *b)
{
    uint32_t now = atomic_load(&b->s->run_state);
    put_head(f, "lg_run_info", "gauge", "The run; always 1.");
    fputs("lg_run_info{job=\"", f);
    put_label(f, run->config->job_name);
    fputs("\",dir=\"", f);
    put_label(f, run->dir);
    fputs("\"} 1\n", f);
    put_head(f, "lg_run_state", "gauge", "1 for the state that the run is in.");
    for (uint32_t s = 0; s <= LG_RUN_FAILED; s++)
        fprintf(f, "lg_run_state{state=\"%s\"} %d\n", lg_run_state_name((lg_run_state)s), s == now);
}

static void put_training(FILE *f, lg_board *b)
{
    const struct lg_board_metrics *m = &b->s->metrics;
    lg_mark published = atomic_load(&lg_board_row(b, LG_ROLE_ckpt, 0)->published);
    put_one(f, "lg_step", "gauge", "Committed steps.", (double)lg_status_step(b));
    put_one(f, "lg_max_steps", "gauge", "Steps of the run.", (double)b->s->max_steps);
    put_one(f, "lg_batch_samples", "gauge", "Samples of a step.", (double)b->s->batch);
    if (atomic_load(&m->step)) {
        put_one(f, "lg_loss", "gauge", "Loss of the newest step.", atomic_load(&m->loss));
        if (atomic_load(&m->has_vb)) {
            const double vb = atomic_load(&m->loss_vb);
            put_one(f, "lg_loss_mse", "gauge", "Of it, the noise's squared error.",
                    atomic_load(&m->loss) - vb);
            put_one(f, "lg_loss_vb", "gauge",
                    "Of it, the variational bound of the learned variance, in bits.", vb);
        }
        put_one(f, "lg_gradient_norm", "gauge", "2-norm of the newest step's gradient.",
                atomic_load(&m->grad_norm));
        put_one(f, "lg_learning_rate", "gauge", "Learning rate of the newest step.",
                atomic_load(&m->lr));
        put_one(f, "lg_samples_per_second", "gauge", "Speed of the newest step.",
                atomic_load(&m->samples_per_s));
        put_one(f, "lg_data_wait_seconds", "gauge",
                "Time for which rank 0 waited for samples in the newest step.",
                atomic_load(&m->data_wait_s));
    }
    put_one(f, "lg_void_samples_total", "counter", "Unreadable samples.",
            (double)atomic_load(&m->voids));
    put_one(f, "lg_skipped_steps_total", "counter",
            "Steps without an update: loss or gradient not finite.",
            (double)atomic_load(&m->skipped));
    if (published != LG_MARK_NONE)
        put_one(f, "lg_checkpoint_step", "gauge", "Step of the newest checkpoint.",
                (double)lg_mark_state(published));
}

/* ---- processes ---- */

static double up(const struct lg_board_row *row)
{
    return lg_status_row_alive(row);
}

static double restarts(const struct lg_board_row *row)
{
    return atomic_load(&row->restarts);
}

static double samples(const struct lg_board_row *row)
{
    return (double)atomic_load(&row->samples);
}

static double busy_s(const struct lg_board_row *row)
{
    return (double)atomic_load(&row->busy_ns) / LG_S_NS;
}

static double wait_s(const struct lg_board_row *row)
{
    return (double)atomic_load(&row->wait_ns) / LG_S_NS;
}

static double beat_age_s(const struct lg_board_row *row)
{
    return (double)LG_MAX(lg_now_ns() - atomic_load(&row->heartbeat_ns), 0) / LG_S_NS;
}

static const struct {
    const char *name, *type, *help;
    double (*value)(const struct lg_board_row *);
    bool stages_only; /* else also keeper and lgsup */
} of_process[] = {
    {"lg_process_up", "gauge", "1: the process lives.", up, false},
    {"lg_process_restarts_total", "counter", "Restarts since the run was started.", restarts,
     false},
    {"lg_process_samples_total", "counter", "Samples dealt with.", samples, true},
    {"lg_process_busy_seconds_total", "counter", "Time spent working.", busy_s, true},
    {"lg_process_wait_seconds_total", "counter", "Time spent waiting.", wait_s, true},
    {"lg_process_heartbeat_age_seconds", "gauge", "Time since the last heartbeat.", beat_age_s,
     true},
};

static void put_processes(FILE *f, lg_board *b)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(of_process); i++) {
        put_head(f, of_process[i].name, of_process[i].type, of_process[i].help);
        int roles = of_process[i].stages_only ? LG_ROLE_keeper : LG_ROLE_COUNT;
        for (int r = 0; r < roles; r++)
            for (int k = 0; k < LG_INSTANCES_MAX; k++) {
                lg_life life;
                lg_board_life(b, (lg_role)r, k, &life);
                if (life == LG_LIFE_NONE) continue;
                fprintf(f, "%s{role=\"%s\",index=\"%d\"}", of_process[i].name,
                        lg_role_name((lg_role)r), k);
                put_value(f, of_process[i].value(lg_board_row(b, (lg_role)r, k)));
            }
    }
}

char *lg_prometheus_text(const lg_run *run, lg_board *b)
{
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return NULL;
    put_run(f, run, b);
    put_training(f, b);
    put_processes(f, b);
    if (lg_close_text(f) == 0) return text;
    free(text);
    return NULL;
}
