/* See notify.h. The watchdog is fed at the word of the loop itself: a loop that hangs starves it. */
#include "supervisor/views/notify.h"
#include "base/clock.h"
#include "supervisor/views/status.h"
#include "supervisor/views/view.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
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

/* ---- jobs ---- */

struct notice {
    struct lg_job job;
    char text[STATUS_BYTES + 32];
};

static void send_notice(struct lg_job *job)
{
    sd_notify(0, ((struct notice *)job)->text);
}

/* A function of its own, so that it takes the place of one that still waits and of nothing else. */
static void send_status(struct lg_job *job)
{
    send_notice(job);
}

static void send_alive(struct lg_job *job)
{
    send_notice(job);
}

/* False: too many wait, and it has not been given. */
static bool tell(lg_worker *w, void (*work)(struct lg_job *), const char *text)
{
    if (!getenv("NOTIFY_SOCKET")) return true;
    struct notice *n = calloc(1, sizeof *n);
    if (!n) return false;
    n->job = (struct lg_job){.work = work, .latest = work != send_notice};
    snprintf(n->text, sizeof n->text, "%s", text);
    return lg_worker_give(w, &n->job);
}

/* ---- what is due ---- */

static bool alive_is_due(void)
{
    uint64_t us = 0;
    if (!told.asked && sd_watchdog_enabled(0, &us) > 0)
        told.watchdog_ns = (int64_t)(us / WATCHDOG_SHARE) * 1000;
    told.asked = true;
    int64_t now_ns = lg_now_ns();
    if (!told.watchdog_ns || now_ns - told.alive_ns < told.watchdog_ns) return false;
    told.alive_ns = now_ns;
    return true;
}

void lg_notify_alive(void)
{
    if (alive_is_due()) sd_notify(0, "WATCHDOG=1");
}

static void say_status(lg_worker *w, const struct lg_view *v)
{
    char text[STATUS_BYTES];
    int64_t now_ns = lg_now_ns();
    if (now_ns - told.status_ns < LG_S_NS) return;
    told.status_ns = now_ns;
    snprintf(text, sizeof text, "STATUS=%s: step %" PRIu64 " of %" PRIu64,
             lg_run_state_name((lg_run_state)atomic_load(&v->board->s->run_state)),
             lg_status_step(v->board), v->board->s->max_steps);
    if (strcmp(text, told.status) && tell(w, send_status, text))
        memcpy(told.status, text, sizeof text);
}

void lg_notify_stopping(lg_worker *w, const char *why)
{
    char text[STATUS_BYTES];
    snprintf(text, sizeof text, "STOPPING=1\nSTATUS=%s", why);
    told.stopping = tell(w, send_notice, text);
}

void lg_notify_look(lg_worker *w, const struct lg_view *v)
{
    if (alive_is_due()) tell(w, send_alive, "WATCHDOG=1");
    if (!told.stopping) say_status(w, v);
    if (!told.ready && v->announced) told.ready = tell(w, send_notice, "READY=1");
    if (!told.stopping && v->leaving) lg_notify_stopping(w, "ending");
}
