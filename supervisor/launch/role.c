/* A role's life under systemd; see role.h.
 *
 * Who gives out incarnations: systemd runs one process of a unit at a time, and starts the next when
 * the former is gone. So `lgsup role` may do here what lgsup does elsewhere (board.h, rule 2): bury
 * the former one, when the kernel says that it is dead, and enlist the next. Counters come from the
 * board, so no incarnation is ever given twice. It needs no lgsup for that: a stage that dies while
 * lgsup is away comes back all the same.
 *
 * Leaving an old board for a new one: lgsup stores a final run_state, then buries and kills whom the
 * rows name; `lgsup role` enlists, then looks at run_state. With a full fence on both sides at least
 * one of them sees the other, so nobody is left on a board that has been given up. The same with
 * `wanted` when it is scaled down; who enlists just before is found as a stray (scale.c). */
#include "supervisor/launch/role.h"
#include "base/clock.h"
#include "shm/board.h"
#include "shm/keeper.h"
#include "supervisor/run/child.h"
#include "supervisor/run/run.h"
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LOOK_MS = 20, ORPHAN_S_MAX = 60 };

struct seat {
    lg_role role;
    int index;
    const char *dir, *runtime;
    char board[LG_PATH_BYTES], runtime_record[LG_PATH_BYTES], keeper[LG_PATH_BYTES];
};

static int take_seat(const char *role, const char *index, const char *dir, struct seat *ret)
{
    char *end;
    int r = lg_role_find(role);
    long k = strtol(index, &end, 10);
    if (r < 0 || r >= LG_ROLE_keeper)
        return LG_FAIL(LG_ERR_USAGE, "there is no role %s that stages have", role);
    if (!*index || *end || k < 0 || k >= LG_INSTANCES_MAX)
        return LG_FAIL(LG_ERR_USAGE, "an instance is a number from 0 to %d, not %s",
                       LG_INSTANCES_MAX - 1, index);
    *ret = (struct seat){.role = (lg_role)r, .index = (int)k, .dir = dir};
    ret->runtime = getenv("RUNTIME_DIRECTORY");
    if (!ret->runtime)
        return LG_FAIL(LG_ERR_USAGE, "lgsup role is for the units that `lgsup units` writes: "
                                     "RUNTIME_DIRECTORY is not set");
    LG_TRY(lg_path(ret->board, "%s/board", dir));
    LG_TRY(lg_path(ret->runtime_record, "%s/runtime", dir));
    LG_TRY(lg_path(ret->keeper, "%s/keeper", ret->runtime));
    return 0;
}

/* Is the run on this board one that goes on, here? */
static bool is_open(const struct seat *seat, lg_board *b)
{
    char runtime[LG_PATH_BYTES];
    int pid;
    return atomic_load(&b->s->run_state) < LG_RUN_DONE && !atomic_load(&b->s->quit) &&
           (uint32_t)seat->index < atomic_load(&b->s->wanted[seat->role]) &&
           atomic_load(&lg_board_row(b, LG_ROLE_keeper, 0)->ready) &&
           lg_read_line(seat->runtime_record, runtime, sizeof runtime) == 0 &&
           !strcmp(runtime, seat->runtime) && lg_path_exists(seat->keeper) &&
           lg_keeper_pid(seat->keeper, &pid) == 0;
}

/* The row's former process: gone, and buried? A STARTING row is our unit's last attempt. */
static bool bury_former(const struct seat *seat, lg_board *b)
{
    lg_life state;
    lg_incarnation former = lg_board_life(b, seat->role, seat->index, &state);
    if (state == LG_LIFE_NONE || state == LG_LIFE_DEAD) return true;
    if (state == LG_LIFE_RUNNING && !lg_board_is_dead(b, former)) return false;
    lg_board_bury(b, former);
    return true;
}

/* 0 when there is nothing to join (yet). */
static lg_incarnation enlist(const struct seat *seat)
{
    lg_board *b = NULL;
    lg_incarnation me = 0;
    if (lg_path_exists(seat->board) && lg_board_open(seat->board, 0, &b) == 0 && is_open(seat, b) &&
        bury_former(seat, b)) {
        lg_board_row(b, seat->role, seat->index)->cause[0] = 0;
        me = lg_board_enlist_self(b, seat->role, seat->index);
        atomic_thread_fence(memory_order_seq_cst);
        if (me && (atomic_load(&b->s->run_state) >= LG_RUN_DONE ||
                   (uint32_t)seat->index >= atomic_load(&b->s->wanted[seat->role]))) {
            lg_board_retract(b, me);
            me = 0;
        }
    }
    lg_board_close(&b);
    lg_err_clear();
    return me;
}

/* stdout and stderr to the role's own log, as lgsup's children have them. */
static void open_log(const struct seat *seat)
{
    char path[LG_PATH_BYTES];
    if (lg_path(path, "%s/logs/%s.%d.log", seat->dir, lg_role_name(seat->role), seat->index) < 0)
        return;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0) return; /* then the journal has it */
    dup2(fd, 1);
    dup2(fd, 2);
    close(fd);
}

static int become(const struct seat *seat, lg_incarnation me)
{
    char program[LG_PATH_BYTES], index[16], incarnation[16];
    LG_TRY(lg_program_path(lg_role_program(seat->role), program));
    snprintf(index, sizeof index, "%d", seat->index);
    snprintf(incarnation, sizeof incarnation, "%" PRIu32, me);
    open_log(seat);
    execl(program, program, "--run", seat->dir, "--index", index, "--incarnation", incarnation,
          NULL);
    return LG_FAIL(LG_ERR_IO, "cannot run %s: %s", program, strerror(errno));
}

static bool has_lgsup(const char *dir)
{
    int pidfd = lg_run_holder(dir, NULL);
    if (pidfd >= 0) close(pidfd);
    return pidfd >= 0;
}

int lg_units_role(const char *role, const char *index, const char *dir)
{
    struct seat seat;
    LG_TRY(take_seat(role, index, dir, &seat));
    int64_t supervised_ns = lg_now_ns();
    while (lg_now_ns() - supervised_ns < ORPHAN_S_MAX * LG_S_NS) {
        lg_incarnation me = enlist(&seat);
        if (me) LG_TRY(become(&seat, me));
        if (has_lgsup(dir)) supervised_ns = lg_now_ns();
        poll(NULL, 0, LOOK_MS);
    }
    return 0;
}
