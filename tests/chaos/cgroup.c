/* A control group of the run's own, whose memory can be made scarce: version 2, or the memory
 * hierarchy of version 1. Where this user may make none, runs live without and the fault is left out. */
#include "tests/chaos/chaos.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TRIES_MAX = 8, SLACK_BYTES = 64 << 10, LESS_SHARE = 24 };

struct names {
    const char *limit, *none, *usage, *events;
};
static const struct names version[] = {
    {"memory.limit_in_bytes", "-1", "memory.usage_in_bytes", "memory.oom_control"},
    {"memory.max", "max", "memory.current", "memory.events"},
};

static int write_word(const char *dir, const char *name, const char *word)
{
    char path[LG_PATH_BYTES];
    LG_ASSERT(lg_path(path, "%s/%s", dir, name) == 0);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    int rc = fd >= 0 && write(fd, word, strlen(word)) == (ssize_t)strlen(word) ? 0 : -1;
    if (fd >= 0) close(fd);
    return rc;
}

static int read_text(const char *dir, const char *name, char *ret, size_t bytes)
{
    char path[LG_PATH_BYTES];
    LG_ASSERT(lg_path(path, "%s/%s", dir, name) == 0);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, ret, bytes - 1);
    if (fd >= 0) close(fd);
    if (n < 0) return -1;
    ret[n] = 0;
    return 0;
}

/* Our own group in the hierarchy that /proc/self/cgroup names by `key`. */
static void own_group(const char *key, char *ret, size_t bytes)
{
    char line[LG_PATH_BYTES];
    FILE *f = fopen("/proc/self/cgroup", "re");
    snprintf(ret, bytes, "/");
    while (f && fgets(line, sizeof line, f)) {
        char *name = strchr(line, ':'), *path = name ? strchr(name + 1, ':') : NULL;
        if (!path) continue;
        *path = 0;
        path[1 + strcspn(path + 1, "\n")] = 0;
        if (!strcmp(name + 1, key)) snprintf(ret, bytes, "%.3900s", path + 1);
    }
    if (f) fclose(f);
}

/* A group below `parent` whose memory limit can be written. */
static bool make(struct chaos_run *r, int v, const char *parent)
{
    char dir[LG_PATH_BYTES], path[LG_PATH_BYTES];
    if (v == 1) write_word(parent, "cgroup.subtree_control", "+memory");
    if (lg_path(dir, "%s/lgx.%d", parent, (int)getpid()) < 0 || mkdir(dir, 0755) < 0) return false;
    LG_ASSERT(lg_path(path, "%s/%s", dir, version[v].limit) == 0);
    if (access(path, W_OK) < 0 || write_word(dir, version[v].limit, version[v].none) < 0) {
        rmdir(dir);
        return false;
    }
    write_word(dir, "memory.oom.group", "0");
    write_word(dir, "memory.swap.max", "0");
    snprintf(r->cgroup, sizeof r->cgroup, "%s", dir);
    r->cgroup_version = v;
    return true;
}

bool chaos_cgroup_open(struct chaos_run *r)
{
    static const struct {
        const char *at, *key;
        int version;
    } hierarchy[] = {{"/sys/fs/cgroup", "", 1}, {"/sys/fs/cgroup/memory", "memory", 0}};
    char group[LG_PATH_BYTES], parent[LG_PATH_BYTES];
    r->cgroup[0] = 0;
    for (size_t i = 0; i < LG_ARRAY_LEN(hierarchy) && !r->cgroup[0]; i++) {
        own_group(hierarchy[i].key, group, sizeof group);
        if (lg_path(parent, "%s%s", hierarchy[i].at, group) < 0) continue;
        if (!make(r, hierarchy[i].version, parent)) make(r, hierarchy[i].version, hierarchy[i].at);
    }
    lg_err_clear();
    return r->cgroup[0];
}

void chaos_cgroup_enter(const struct chaos_run *r)
{
    if (r->cgroup[0]) write_word(r->cgroup, "cgroup.procs", "0");
}

void chaos_cgroup_close(struct chaos_run *r)
{
    for (int i = 0; r->cgroup[0] && rmdir(r->cgroup) < 0 && errno == EBUSY && i < 1000; i++)
        usleep(2000);
    r->cgroup[0] = 0;
}

/* Version 2 kills until usage is below the limit, version 1 when somebody asks for more. */
int chaos_cgroup_tighten(struct chaos_run *r)
{
    const struct names *names = &version[r->cgroup_version];
    char text[64];
    for (int i = 0; i < TRIES_MAX; i++) {
        if (read_text(r->cgroup, names->usage, text, sizeof text) < 0) return -1;
        int64_t usage = strtoll(text, NULL, 10);
        int64_t limit = r->cgroup_version
                            ? usage - chaos_draw(r, (uint32_t)(usage / LESS_SHARE) + 1)
                            : usage + i * SLACK_BYTES;
        snprintf(text, sizeof text, "%" PRId64, limit);
        if (write_word(r->cgroup, names->limit, text) == 0) return 0;
    }
    return -1;
}

void chaos_cgroup_loosen(struct chaos_run *r)
{
    const struct names *names = &version[r->cgroup_version];
    if (write_word(r->cgroup, names->limit, names->none) < 0)
        chaos_fail(r, "memory: the driver could not lift the limit: %s", strerror(errno));
}

uint32_t chaos_cgroup_kills(const struct chaos_run *r)
{
    char text[1024];
    if (!r->cgroup[0] ||
        read_text(r->cgroup, version[r->cgroup_version].events, text, sizeof text) < 0)
        return 0;
    const char *at = strstr(text, "oom_kill ");
    return at ? (uint32_t)strtoul(at + 9, NULL, 10) : 0;
}

bool chaos_cgroup_has_killed(const struct chaos_run *r)
{
    return chaos_cgroup_kills(r) > 0;
}
