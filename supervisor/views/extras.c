/* For those who watch; see extras.h. */
#include "supervisor/views/extras.h"
#include "supervisor/views/status.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void lg_news_add(struct lg_news *news, lg_log_level level, const char *fmt, ...)
{
    va_list ap;
    if (news->n == LG_NEWS_MAX) return;
    va_start(ap, fmt);
    vsnprintf(news->item[news->n].text, LG_NEWS_BYTES, fmt, ap);
    va_end(ap);
    news->item[news->n++].level = level;
}

bool lg_extras_are_wanted(const lg_config *c)
{
    return c->tensorboard_enabled || c->supervisor_prometheus_port || c->sample_every ||
           c->tensorboard_histograms_every;
}

lg_extras *lg_extras_make(const char *run_dir)
{
    lg_extras *x = calloc(1, sizeof *x);
    if (!x) return NULL;
    snprintf(x->dir, sizeof x->dir, "%s", run_dir);
    lg_run_init(&x->run, run_dir);
    for (int k = 0; k < LG_PREVIEW_KINDS; k++)
        x->preview[k] = (lg_preview){.kind = (lg_preview_kind)k, .child = LG_CHILD_NONE};
    return x;
}

static int open_run(lg_extras *x)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_run_load(&x->run));
    LG_TRY(lg_run_path(&x->run, path, "board"));
    LG_TRY(lg_board_open(path, 0, &x->board));
    return 0;
}

static void open_all(lg_extras *x, struct lg_news *news)
{
    x->opened = true;
    if (open_run(x) < 0) {
        lg_news_add(news, LG_WARN, "no previews, event files and figures: %s", lg_err_message());
        lg_err_clear();
        return;
    }
    const lg_config *c = x->run.config;
    if (c->tensorboard_enabled &&
        lg_tensorboard_open(x->run.dir, lg_status_step(x->board), &x->tensorboard) < 0)
        lg_news_add(news, LG_WARN, "no event files for TensorBoard: %s", lg_err_message());
    if (c->supervisor_prometheus_port &&
        lg_prometheus_open((int)c->supervisor_prometheus_port, &x->prometheus) < 0)
        lg_news_add(news, LG_WARN, "no figures for Prometheus: %s", lg_err_message());
    lg_err_clear();
}

int lg_extras_poll(const lg_extras *x, struct pollfd ret[LG_EXTRAS_FDS_MAX])
{
    return lg_prometheus_poll(&x->prometheus, ret);
}

/* The end is near: nothing but it matters. */
static bool is_ending(const lg_extras *x)
{
    const struct lg_board_shared *s = x->board->s;
    return atomic_load(&s->drain) || atomic_load(&s->quit) ||
           atomic_load(&s->run_state) >= LG_RUN_DRAINING;
}

void lg_extras_look(lg_extras *x, struct lg_news *news)
{
    if (!x->opened) open_all(x, news);
    if (!x->board) return;
    if (lg_tensorboard_look(&x->tensorboard, lg_status_step(x->board)))
        lg_news_add(news, LG_WARN, "%s cannot be written (disk full?); tried again every second",
                    x->tensorboard.path);
    for (int k = 0; k < LG_PREVIEW_KINDS; k++)
        lg_preview_look(&x->preview[k], &x->run, is_ending(x) || !lg_hosts_is_leader(x->board),
                        news);
    lg_prometheus_serve(&x->prometheus, &x->run, x->board);
}

void lg_extras_close(lg_extras *x)
{
    if (!x) return;
    for (int k = 0; k < LG_PREVIEW_KINDS; k++) lg_preview_stop(&x->preview[k]);
    if (x->board) lg_tensorboard_flush(&x->tensorboard, lg_status_step(x->board));
    lg_tensorboard_close(&x->tensorboard);
    lg_prometheus_close(&x->prometheus);
    lg_board_close(&x->board);
    lg_run_close(&x->run);
    free(x);
}
