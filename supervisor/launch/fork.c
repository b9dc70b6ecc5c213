/* Processes that lgsup starts as its own children: the launcher's first row; see launcher.h. */
#include "supervisor/launch/launcher.h"
#include <inttypes.h>
#include <stdio.h>

int lg_launch_enter(void *where, const struct lg_child *child)
{
    const struct lg_launch_seat *seat = where;
    uint64_t start_time = lg_process_start_time(child->pid);
    if (!start_time)
        return LG_FAIL(LG_ERR_IO, "cannot tell when process %d was started", child->pid);
    lg_board_enter(seat->board, seat->who, child->pid, start_time);
    return 0;
}

static int exec_program(const struct lg_launch *l, lg_incarnation who, struct lg_child *ret)
{
    char program[LG_PATH_BYTES], index[16], incarnation[16];
    if (l->program)
        LG_TRY(lg_path(program, "%s", l->program));
    else
        LG_TRY(lg_program_path(lg_role_program(l->role), program));
    snprintf(index, sizeof index, "%d", l->index);
    snprintf(incarnation, sizeof incarnation, "%" PRIu32, who);
    char *argv[] = {program, (char *)"--run",         (char *)l->run->dir, (char *)"--index",
                    index,   (char *)"--incarnation", incarnation,         NULL};
    LG_TRY(lg_child_spawn(&(struct lg_spawn){.program = program,
                                             .argv = argv,
                                             .log = l->log,
                                             .pass_fd = -1,
                                             .enter = lg_launch_enter,
                                             .where = &(struct lg_launch_seat){l->board, who}},
                          ret));
    return 0;
}

static int fork_start(const struct lg_launch *l, struct lg_launched *ret)
{
    ret->child = LG_CHILD_NONE;
    lg_board_row(l->board, l->role, l->index)->cause[0] = 0;
    ret->incarnation = lg_board_enlist(l->board, l->role, l->index);
    int rc = exec_program(l, ret->incarnation, &ret->child);
    if (rc < 0) lg_board_bury(l->board, ret->incarnation);
    LG_TRY(rc);
    return 0;
}

/* A child is known from its start on. */
static struct lg_sighting fork_look(lg_board *b, lg_role role, int index)
{
    (void)b, (void)role, (void)index;
    return (struct lg_sighting){.what = LG_SEEN_NOBODY, .child = LG_CHILD_NONE};
}

static lg_incarnation fork_last_of(lg_board *b, lg_role role, int index, lg_incarnation last)
{
    (void)b, (void)role, (void)index;
    return last;
}

static int fork_request(const char *units, lg_role role, int index)
{
    (void)units, (void)role, (void)index;
    return 0;
}

static int fork_prepare(const char *units, lg_role role, int first, int last)
{
    (void)units, (void)role, (void)first, (void)last;
    return 0;
}

static void fork_dismiss(const char *units, lg_role role, int index)
{
    (void)units, (void)role, (void)index;
}

static int fork_check_standby(const lg_run *r, lg_role role)
{
    (void)r, (void)role;
    return 0;
}

static int fork_start_standby(const struct lg_launch *l, int spare, struct lg_launched *ret)
{
    struct lg_board_row *row = lg_board_row(l->board, l->role, spare);
    ret->child = LG_CHILD_NONE;
    row->cause[0] = 0;
    ret->incarnation = lg_board_enlist_standby(l->board, l->role, spare);
    int rc = exec_program(l, ret->incarnation, &ret->child);
    if (rc < 0) lg_board_vacate(l->board, ret->incarnation);
    LG_TRY(rc);
    return 0;
}

static bool fork_is_restart(const char *units)
{
    (void)units;
    return false;
}

static int fork_lock(lg_run *r)
{
    LG_TRY(lg_run_lock(r));
    return 0;
}

/* Children stay in the group of their parent. */
static void fork_run_group(const lg_run *r, const char *own, char ret[LG_PATH_BYTES])
{
    (void)r;
    snprintf(ret, LG_PATH_BYTES, "%s", own);
}

static void fork_process_group(const lg_run *r, const char *own, lg_role role, int index,
                               char ret[LG_PATH_BYTES])
{
    (void)role, (void)index;
    fork_run_group(r, own, ret);
}

static int fork_runtime_create(lg_run *r)
{
    LG_TRY(lg_run_runtime_create(r));
    return 0;
}

static void fork_runtime_remove(lg_run *r)
{
    lg_run_runtime_remove(r);
}

const struct lg_launcher lg_launcher_fork = {
#define LG_LAUNCHER(result, function, arguments) .function = fork_##function,
#include "supervisor/launch/launcher.def"
#undef LG_LAUNCHER
};
