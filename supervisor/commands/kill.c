/* `lgsup stop --kill`; see start.h. Needs nothing of the build that started the run: its processes are
 * found by what does not change (supervisor/run/processes.h). lgsup goes first, so that nothing is
 * started again, then stages and keeper, and only then are they waited for: a driver can take a minute to let go of
 * one's memory. Once their lgsup has ended, looks that find nobody more. The memory is gone with them, and the board is
 * removed: it would speak of the dead. */
#include "supervisor/commands/start.h"
#include "supervisor/core/former.h"
#include "supervisor/launch/launcher.h"
#include "supervisor/run/processes.h"
#include "supervisor/run/waiting.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LOOKS_MAX = 20 };

static void say_wait(const struct lg_process *p, const char *place)
{
    printf("waiting     for the end of %s (pid %d): %s\n", p->name, p->pid, place);
    fflush(stdout);
}

/* Kills whom a look finds, lgsup before the others, then waits for them. *ret_n: how many. */
static int end_all(const lg_run *r, struct lg_process *found, int *ret_n)
{
    LG_TRY(lg_processes_find(r, found, ret_n));
    lg_processes_only(found, *ret_n, LG_PROCESS_lgsup);
    lg_processes_kill(found, *ret_n);
    for (int i = 0; i < *ret_n; i++)
        printf("killed      %s (pid %d)\n", found[i].name, found[i].pid);
    int rc = lg_processes_wait(found, *ret_n, say_wait);
    lg_processes_close(found, *ret_n);
    return rc;
}

/* systemd would start them again. */
static int check_units(const lg_run *r, struct lg_process *found)
{
    char units[LG_UNITS_BYTES];
    int n;
    LG_TRY(lg_launcher_recorded_units(r, units));
    if (!units[0]) return 0;
    LG_TRY(lg_processes_find(r, found, &n));
    int stages = 0;
    for (int i = 0; i < n; i++) stages += found[i].kind != LG_PROCESS_keeper;
    lg_processes_close(found, n);
    if (!stages) return 0;
    return LG_FAIL(LG_ERR_BUSY,
                   "the processes of %s are units of systemd's, which starts them again: end them "
                   "by `systemctl stop %s.slice`",
                   r->dir, units);
}

static int kill_all(lg_run *r, struct lg_process *found, int *ret_n)
{
    int n;
    LG_TRY(check_units(r, found));
    LG_TRY(end_all(r, found, ret_n));
    LG_TRY(lg_run_lock(r)); /* nobody starts anything from here on */
    for (int look = 0; look < LOOKS_MAX; look++) {
        LG_TRY(end_all(r, found, &n));
        *ret_n += n;
        if (n == 0) return 0;
    }
    return LG_FAIL(LG_ERR_BUSY,
                   "processes of %s come back as fast as they are killed: who starts "
                   "them?",
                   r->dir);
}

static int remove_traces(lg_run *r)
{
    static const char *const names[] = {"board", "regions"};
    char path[LG_PATH_BYTES];
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) {
        LG_TRY(lg_run_path(r, path, "%s", names[i]));
        if (unlink(path) < 0 && errno != ENOENT)
            return LG_FAIL(lg_err_from_errno(errno), "cannot remove %s: %s", path, strerror(errno));
    }
    LG_TRY(lg_fsync_dir(r->dir));
    lg_run_runtime_remove(r);
    return 0;
}

static int stop_kill(lg_run *r, struct lg_process *found)
{
    int n;
    struct lg_waiting waiting;
    if (!lg_waiting_read(r->dir, &waiting)) LG_TRY(lg_run_is_there(r->dir));
    LG_TRY(lg_former_check_copy(r));
    LG_TRY(kill_all(r, found, &n));
    LG_TRY(remove_traces(r));
    if (n)
        printf("%s: killed without a checkpoint; a start goes on from the newest one\n", r->dir);
    else
        printf("%s: nothing runs here\n", r->dir);
    return 0;
}

int lg_stop_kill(const char *dir)
{
    lg_run *r = malloc(sizeof *r);
    struct lg_process *found = calloc(LG_PROCESSES_MAX, sizeof *found);
    int rc = LG_ERR_NOSPACE;
    if (r && found) {
        lg_run_init(r, dir);
        rc = stop_kill(r, found);
        lg_run_close(r);
    } else {
        LG_FAIL(rc, "no memory for the run");
    }
    free(found);
    free(r);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
