/* See notify.h. The watchdog is fed from the loop itself: a loop that hangs starves it. */
#include "supervisor/views/notify.h"
#include "base/clock.h"
#include "supervisor/views/status.h"
#include "supervisor/views/view.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <systemd/sd-daemon.h>

enum { STATUS_BYTES = 200, WATCHDOG_SHARE = 4 };

struct told {
    bool asked, ready, stopping;
    int64_t watchdog_ns; /* between two signs of life; 0: nobody asked */
    int64_t alive_ns, status_ns;
    char status[STATUS_BYTES];
};
static struct told told; /* one service manager per process */

void lg_notify_alive(void)
{
    uint64_t us = 0;
    if (!told.asked && sd_watchdog_enabled(0, &us) > 0)
        told.watchdog_ns = (int64_t)(us / WATCHDOG_SHARE) * 1000;
    told.asked = true;
    int64_t now_ns = lg_now_ns();
    if (!told.watchdog_ns || now_ns - told.alive_ns < told.watchdog_ns) return;
    told.alive_ns = now_ns;
    sd_notify(0, "WATCHDOG=1");
}

static void say_status(const struct lg_view *v)
{
    char text[STATUS_BYTES];
    int64_t now_ns = lg_now_ns();
    if (now_ns - told.status_ns < LG_S_NS) return;
    told.status_ns = now_ns;
    snprintf(text, sizeof text, "%s: step %" PRIu64 " of %" PRIu64,
             lg_run_state_name((lg_run_state)atomic_load(&v->board->s->run_state)),
             lg_status_step(v->board), v->board->s->max_steps);
    if (!strcmp(text, told.status)) return;
    memcpy(told.status, text, sizeof text);
    sd_notifyf(0, "STATUS=%s", text);
}

void lg_notify_stopping(const char *why)
{
    sd_notifyf(0, "STOPPING=1\nSTATUS=%s", why);
    told.stopping = true;
}

void lg_notify_look(const struct lg_view *v)
{
    lg_notify_alive();
    if (!told.stopping) say_status(v);
    if (!told.ready && v->announced) {
        told.ready = true;
        sd_notify(0, "READY=1");
    }
    if (!told.stopping && v->leaving) lg_notify_stopping("ending");
}
