/* For those who watch; see extras.h. */
#include "supervisor/extras.h"
#include "supervisor/status.h"
#include "supervisor/supervise.h"

static void open_all(lg_supervisor *s)
{
    const lg_config *c = s->run->config;
    lg_extras *x = &s->extras;
    x->opened = true;
    for (int k = 0; k < LG_PREVIEW_KINDS; k++)
        x->preview[k] = (lg_preview){.kind = (lg_preview_kind)k, .child = LG_CHILD_NONE};
    if (c->tensorboard_enabled &&
        lg_tensorboard_open(s->run->dir, lg_status_step(s->board), &x->tensorboard) < 0)
        lg_progress_say(&s->progress, LG_WARN, "no event files for TensorBoard: %s",
                        lg_err_message());
    if (c->supervisor_prometheus_port &&
        lg_prometheus_open((int)c->supervisor_prometheus_port, &x->prometheus) < 0)
        lg_progress_say(&s->progress, LG_WARN, "no figures for Prometheus: %s", lg_err_message());
    lg_err_clear();
}

int lg_extras_poll(const lg_supervisor *s, struct pollfd ret[LG_EXTRAS_FDS_MAX])
{
    return lg_prometheus_poll(&s->extras.prometheus, ret);
}

void lg_extras_look(lg_supervisor *s)
{
    lg_extras *x = &s->extras;
    if (!x->opened) open_all(s);
    if (lg_tensorboard_look(&x->tensorboard, lg_status_step(s->board)))
        lg_progress_say(&s->progress, LG_WARN,
                        "%s cannot be written (disk full?); tried again every second",
                        x->tensorboard.path);
    for (int k = 0; k < LG_PREVIEW_KINDS; k++) lg_preview_look(s, &x->preview[k]);
    lg_prometheus_serve(&x->prometheus, s->run, s->board);
}

void lg_extras_close(lg_supervisor *s)
{
    lg_extras *x = &s->extras;
    if (!x->opened) return;
    for (int k = 0; k < LG_PREVIEW_KINDS; k++) lg_preview_stop(&x->preview[k]);
    lg_tensorboard_flush(&x->tensorboard, lg_status_step(s->board));
    lg_tensorboard_close(&x->tensorboard);
    lg_prometheus_close(&x->prometheus);
}
