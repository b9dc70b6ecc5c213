/* See control_groups.h. */
#include "tests/sim/control_groups.h"
#include "base/fs.h"
#include "tests/sim/wrap.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <string.h>

static char g_root[LG_PATH_BYTES]; /* "": the machine's own */

REAL(int, open, const char *path, int flags, mode_t mode);
WRAP(int, open, const char *path, int flags, mode_t mode)
{
    char told[2 * LG_PATH_BYTES];
    bool ours = !strncmp(path, "/sys/fs/cgroup/", 15) || !strcmp(path, "/proc/self/cgroup");
    if (!g_root[0] || !ours) return __real_open(path, flags, mode);
    snprintf(told, sizeof told, "%s%s", g_root, path);
    return __real_open(told, flags, mode);
}

void control_groups_begin(void)
{
    snprintf(g_root, sizeof g_root, "%s", scratch_path("machine"));
}

void control_groups_end(void)
{
    g_root[0] = 0;
}

int control_groups_setup(void **state)
{
    int rc = scratch_setup(state);
    control_groups_begin();
    return rc;
}

int control_groups_teardown(void **state)
{
    control_groups_end();
    return scratch_teardown(state);
}

void control_group_is(const char *text)
{
    scratch_write("machine/proc/self/cgroup", text);
}

void control_group(const char *group, const char *file, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "machine/sys/fs/cgroup%s/%s", group, file);
    scratch_write(path, text);
}
