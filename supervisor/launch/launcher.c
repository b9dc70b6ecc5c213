/* Which row a run has, and whose its processes are; see launcher.h. */
#include "supervisor/launch/launcher.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const struct lg_launcher *lg_launcher_of(const lg_run *r)
{
    return r->units[0] ? &lg_launcher_systemd : &lg_launcher_fork;
}

int lg_launcher_recorded_units(const lg_run *r, char ret[LG_UNITS_BYTES])
{
    char path[LG_PATH_BYTES];
    ret[0] = 0;
    LG_TRY(lg_run_path(r, path, "systemd"));
    bool missing = access(path, F_OK) < 0 && errno == ENOENT;
    if (!missing) LG_TRY(lg_read_line(path, ret, LG_UNITS_BYTES));
    return 0;
}

int lg_launcher_record_owner(const lg_run *r)
{
    char path[LG_PATH_BYTES], line[LG_UNITS_BYTES + 1];
    LG_TRY(lg_run_path(r, path, "systemd"));
    int n = snprintf(line, sizeof line, "%s\n", r->units);
    if (r->units[0])
        LG_TRY(lg_publish_file(path, line, (size_t)n));
    else
        unlink(path);
    return 0;
}

int lg_launcher_check_owner(const lg_run *r)
{
    char units[LG_UNITS_BYTES];
    LG_TRY(lg_launcher_recorded_units(r, units));
    if (!strcmp(units, r->units)) return 0;
    if (units[0])
        return LG_FAIL(LG_ERR_BUSY,
                       "the processes of %s are units of systemd's: use `systemctl start %ssup` "
                       "and `systemctl stop %ssup`",
                       r->dir, units, units);
    return LG_FAIL(LG_ERR_BUSY,
                   "the processes of %s were not started by systemd: end them with `lgsup stop "
                   "%s` first",
                   r->dir, r->dir);
}
