/* `lgsup stop`; see start.h. */
#include "base/clock.h"
#include "base/printable.h"
#include "bus/control.h"
#include "shm/board.h"
#include "supervisor/commands/park_resume.h"
#include "supervisor/commands/start.h"
#include "supervisor/core/former.h"
#include "supervisor/core/park.h"
#include "supervisor/launch/systemd.h"
#include "supervisor/run/signals.h"
#include "supervisor/run/waiting.h"
#include "supervisor/views/status.h"
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <unistd.h>

enum {
    ASK_MS = 3000,
    SAY_MS = 10000,
    LOOK_MS = 50,
    REST_S_MAX = 1000 /* > lgsup.service's TimeoutStopSec= */
};

/* By message, and by signal when nobody answers. Either asks for the same drain. */
static void ask_to_stop(lg_run *r, int pidfd)
{
    struct lg_message stop = {.kind = LG_MESSAGE_stop, .role = LG_ROLE_lgsup}, answer;
    if (lg_run_runtime_load(r) == 0 && lg_control_ask(r->runtime_dir, &stop, ASK_MS, &answer) == 0)
        return;
    lg_err_clear();
    lg_signals_ask_drain(pidfd);
}

/* lgsup leaves last, after its processes and the keeper. A drain takes as long as a step and a
 * checkpoint take, so there is no limit here; the user can interrupt the waiting. */
static void wait_for_end(const lg_run *r, int pidfd)
{
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    while (poll(&p, 1, SAY_MS) == 0)
        lg_print(stdout, "waiting for the last step and its checkpoint (%s)\n", r->dir),
            fflush(stdout);
}

static int report(const char *dir, int *ret_exit)
{
    if (lg_waiting_was_last(dir)) {
        lg_print(stdout, "%s: it waited for the other hosts, and made no step\n", dir);
        return 0;
    }
    struct lg_status *st = malloc(sizeof *st);
    if (!st) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the status");
    int rc = lg_status_read(dir, st);
    if (rc == LG_ERR_NOTFOUND) { /* a first start that had come to no process yet */
        lg_err_clear();
        lg_print(stdout, "%s: ended before the run had begun\n", dir);
        rc = 0;
    } else if (rc == 0) {
        printf("%s: %s at step %llu of %llu\n", st->job, st->state, (unsigned long long)st->step,
               (unsigned long long)st->max_steps);
        if (st->cause[0]) lg_print(stdout, "cause: %s\n", st->cause);
        bool well = !strcmp(st->state, lg_run_state_name(LG_RUN_STOPPED)) ||
                    !strcmp(st->state, lg_run_state_name(LG_RUN_DONE));
        bool parked = !strcmp(st->state, lg_run_state_name(LG_RUN_PARKED));
        *ret_exit = well ? 0 : parked ? -LG_ERR_PARKED : -LG_ERR_FAILED;
    }
    free(st);
    return rc;
}

/* Nobody has it in hand, and we have its lock. */
static int stop_orphan(lg_run *r, int *ret_exit)
{
    bool adopted;
    uint64_t step;
    LG_TRY(lg_former_check(r));
    if (lg_park_is_kept(r->dir, &step)) {
        LG_TRY(lg_park_release(r));
        lg_print(stdout,
                 "%s: it was parked at step %" PRIu64
                 "; its memory has been let go, a start goes on "
                 "from the newest checkpoint\n",
                 r->dir, step);
        return 0;
    }
    LG_TRY(lg_start_adopt(r, true, false, -1, &adopted, ret_exit));
    if (!adopted) lg_print(stdout, "%s: nothing runs here\n", r->dir);
    return 0;
}

/* systemd stops or restarts lgsup's unit, or starts it again after a death, and does not say which of
 * these ends the run; nor is the first answer the last: a stop may come in the middle of a start. So
 * this waits until the unit is at rest: up, with an lgsup that holds the run and from then on deals
 * with a stop itself (the launcher's lock, launch/systemd.c), or down with the run in nobody's hands. *ret_lgsup:
 * it is up. Otherwise we have the lock. */
static int wait_for_rest(lg_run *r, bool *ret_lgsup)
{
    for (int64_t began_ns = lg_now_ns(); lg_now_ns() - began_ns < REST_S_MAX * LG_S_NS;) {
        lg_units_intent intent =
            lg_units_look_at_lgsup(r); /* first: a holder of later is another */
        struct pollfd holder = {.fd = lg_run_holder(r->dir, NULL), .events = POLLIN};
        if (intent != LG_UNITS_CHANGING && holder.fd >= 0) {
            close(holder.fd);
            *ret_lgsup = true;
            return 0;
        }
        if (intent == LG_UNITS_DOWN) {
            int rc = lg_run_lock(r);
            *ret_lgsup = false;
            if (rc != LG_ERR_BUSY) return rc;
            lg_err_clear(); /* somebody was quicker: look again */
        }
        poll(&holder, 1, LOOK_MS); /* a negative fd is only waited with */
        if (holder.fd >= 0) close(holder.fd);
    }
    return LG_FAIL(LG_ERR_TIMEOUT, "%ssup.service has not come to rest in %d s", r->units,
                   (int)REST_S_MAX);
}

/* lgsup's unit is stopped or restarted. */
static int stop_unit(lg_run *r, int *ret_exit)
{
    char path[LG_PATH_BYTES];
    bool lgsup = false;
    LG_TRY(lg_run_path(r, path, "config.toml"));
    bool begun = lg_path_exists(path);
    if (begun) LG_TRY(wait_for_rest(r, &lgsup));
    const char *why_not = !begun                          ? "it has never begun"
                          : lgsup                         ? "it is in the hands of lgsup"
                          : lg_park_is_kept(r->dir, NULL) ? "parked by hand, it keeps its memory"
                          : lg_units_end_comes_back(r)
                              ? "started again, lgsup has ended: see its log"
                              : NULL;
    if (why_not)
        lg_print(stdout, "%s: %s\n", r->dir, why_not);
    else
        LG_TRY(stop_orphan(r, ret_exit));
    return 0;
}

static int stop(lg_run *r, int *ret_exit)
{
    int pidfd = lg_run_holder(r->dir, NULL);
    if (pidfd < 0) {
        LG_TRY(lg_run_is_there(r->dir));
        LG_TRY(lg_run_lock(r));
        LG_TRY(stop_orphan(r, ret_exit));
        return 0;
    }
    ask_to_stop(r, pidfd);
    wait_for_end(r, pidfd);
    close(pidfd);
    LG_TRY(report(r->dir, ret_exit));
    return 0;
}

int lg_stop(const char *dir, const char *units, int *ret_exit)
{
    lg_run *r = malloc(sizeof *r);
    if (!r) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the run");
    if (lg_raise_open_files() < 0) lg_err_clear(); /* then with as many as there are */
    lg_run_init(r, dir);
    if (units) snprintf(r->units, sizeof r->units, "%s", units);
    *ret_exit = 0;
    int rc = units ? stop_unit(r, ret_exit) : stop(r, ret_exit);
    lg_run_close(r);
    free(r);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
