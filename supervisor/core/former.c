/* Judging what an earlier start has left; see former.h. */
#include "supervisor/core/former.h"
#include "base/clock.h"
#include "supervisor/core/supervise.h"
#include "supervisor/launch/launcher.h"
#include "supervisor/views/status.h"
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { HELD_MS_MAX = 3000, LOOK_MS = 20 };

/* After the message of what is wrong: how to end what runs. */
static int refuse(const lg_run *r, int code)
{
    char units[LG_UNITS_BYTES], why[1024];
    snprintf(why, sizeof why, "%s", lg_err_message());
    LG_TRY(lg_launcher_recorded_units(r, units));
    if (units[0])
        return LG_FAIL(code,
                       "%s; its processes may live: use the build that started the run, or end "
                       "them by `systemctl stop %s.slice` and then `lgsup stop --kill %s`; a start "
                       "then goes on from the newest checkpoint",
                       why, units, r->dir);
    return LG_FAIL(code,
                   "%s; its processes may live: use the build that started the run, or end them "
                   "without a checkpoint by `lgsup stop --kill %s`; a start then goes on from the "
                   "newest checkpoint",
                   why, r->dir);
}

static int refuse_held(const lg_run *r, const char *where)
{
    return LG_FAIL(LG_ERR_BUSY,
                   "processes of %s live where they cannot be seen from here (%s): end the run "
                   "there by `lgsup stop`",
                   r->dir, where);
}

/* Our lock says that no lgsup has the run in hand; unless the file of the lock was replaced. */
static int check_lgsup(const lg_run *r, lg_board *b)
{
    const struct lg_board_row *row = lg_board_row(b, LG_ROLE_lgsup, 0);
    int pid = (int)atomic_load(&row->pid);
    if (pid == getpid() || !lg_status_row_alive(row)) return 0;
    return LG_FAIL(LG_ERR_BUSY,
                   "lgsup (pid %d) supervises %s, although its %s/lock is not held: the file was "
                   "removed or replaced; end that lgsup first (`kill -HUP %d` finishes the step "
                   "and publishes a checkpoint)",
                   pid, r->dir, r->dir, pid);
}

/* Held, and by nobody who stands on the board. A process that is just ending may be seen no more and
 * still have the file open: that passes. */
static bool stays_held(lg_board *b, const char *path)
{
    int64_t began_ns = lg_now_ns();
    while (!lg_leftovers_live(b) && lg_board_is_held(path)) {
        if (lg_now_ns() - began_ns > HELD_MS_MAX * LG_MS_NS) return true;
        poll(NULL, 0, LOOK_MS);
    }
    return false;
}

static int check_fitting(const lg_run *r, const char *path)
{
    lg_board *b = NULL;
    int rc = lg_board_open(path, 0, &b);
    if (rc < 0) return refuse(r, rc);
    rc = check_lgsup(r, b);
    bool over = b->s->preamble.ended == LG_BOARD_ENDED;
    if (rc == 0 && !over && stays_held(b, path)) rc = refuse_held(r, "in another container?");
    lg_board_close(&b);
    return rc;
}

/* It names processes of the directory that it was copied from: dead or alive, they are not ours. */
static int refuse_copy(const lg_run *r, const char *path)
{
    lg_err_clear();
    return LG_FAIL(LG_ERR_MISMATCH,
                   "%s is a copy: %s was copied from the directory of a run, whose processes may "
                   "live. Remove %s and %s/runtime here to go on from the newest checkpoint in "
                   "this copy, or start the run in its own directory",
                   path, r->dir, path, r->dir);
}

int lg_former_check_copy(const lg_run *r)
{
    char path[LG_PATH_BYTES];
    struct lg_board_preamble p;
    int code;
    LG_TRY(lg_run_path(r, path, "board"));
    if (lg_board_look(path, &p, &code) == LG_BOARD_COPY) return refuse_copy(r, path);
    lg_err_clear();
    return 0;
}

int lg_former_check(const lg_run *r)
{
    char path[LG_PATH_BYTES];
    struct lg_board_preamble p;
    int code = 0;
    LG_TRY(lg_run_path(r, path, "board"));
    switch (lg_board_look(path, &p, &code)) {
    case LG_BOARD_MISSING:
    case LG_BOARD_OVER:
        break;
    case LG_BOARD_OTHER_BOOT:
        if (lg_board_is_held(path)) return refuse_held(r, "on another machine");
        break;
    case LG_BOARD_FITS:
        LG_TRY(check_fitting(r, path));
        break;
    case LG_BOARD_COPY:
        return refuse_copy(r, path);
    case LG_BOARD_OTHER_BUILD:
    case LG_BOARD_UNREADABLE:
        return refuse(r, code);
    }
    lg_err_clear();
    return 0;
}

int lg_former_open(const lg_run *r, lg_board **ret)
{
    char path[LG_PATH_BYTES];
    struct lg_board_preamble p;
    int code = 0;
    LG_TRY(lg_run_path(r, path, "board"));
    lg_board_standing standing = lg_board_look(path, &p, &code);
    lg_err_clear();
    if (standing == LG_BOARD_MISSING || standing == LG_BOARD_OVER ||
        standing == LG_BOARD_OTHER_BOOT)
        return LG_ERR_NOTFOUND;
    LG_TRY(lg_board_open(path, 0, ret));
    return 0;
}
