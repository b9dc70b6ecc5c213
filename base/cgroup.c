/* See cgroup.h. */
#include "base/cgroup.h"
#include "base/check.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOUNT "/sys/fs/cgroup"
enum { TEXT_BYTES = 8192 };

/* A small file of the kernel's, whole. False: there is none. */
static bool read_text(const char *path, char ret[TEXT_BYTES])
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, ret, TEXT_BYTES - 1);
    close(fd);
    if (n <= 0) return false;
    ret[n] = 0;
    return true;
}

/* The number behind `key` ("": at the start) in a file of the group; LG_CGROUP_NONE for "max", or none. */
static uint64_t number_of(const char *group, const char *file, const char *key)
{
    char path[2 * LG_PATH_BYTES], text[TEXT_BYTES], *end;
    snprintf(path, sizeof path, MOUNT "%s/%s", strcmp(group, "/") ? group : "", file);
    if (!read_text(path, text)) return LG_CGROUP_NONE;
    const char *at = *key ? strstr(text, key) : text;
    if (!at) return LG_CGROUP_NONE;
    at += strlen(key);
    uint64_t value = strtoull(at, &end, 10);
    return end == at ? LG_CGROUP_NONE : value;
}

static uint64_t free_of(const char *group, uint64_t limit)
{
    uint64_t used = number_of(group, "memory.current", "");
    uint64_t cache = number_of(group, "memory.stat", "\ninactive_file ");
    if (used == LG_CGROUP_NONE) return LG_CGROUP_NONE;
    used -= cache == LG_CGROUP_NONE ? 0 : LG_MIN(cache, used);
    return limit > used ? limit - used : 0;
}

void lg_cgroup_self(char ret[LG_PATH_BYTES])
{
    char text[TEXT_BYTES], *rest = NULL;
    snprintf(ret, LG_PATH_BYTES, "/");
    if (!read_text("/proc/self/cgroup", text)) return;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        const char *group = line + 3;
        if (strncmp(line, "0::/", 4) != 0) continue; /* of the first version */
        if (strlen(group) >= LG_PATH_BYTES || strstr(group, "/.."))
            return; /* outside of our view */
        snprintf(ret, LG_PATH_BYTES, "%s", group);
        return;
    }
}

void lg_cgroup_parent(const char *group, char ret[LG_PATH_BYTES])
{
    const char *last = strrchr(group, '/');
    int n = last && last > group ? (int)(last - group) : 0;
    snprintf(ret, LG_PATH_BYTES, "%.*s", n ? n : 1, n ? group : "/");
}

static void add(const char *group, struct lg_cgroup_limit *to)
{
    uint64_t limit = number_of(group, "memory.max", "");
    if (limit == LG_CGROUP_NONE) return;
    to->free_bytes = LG_MIN(to->free_bytes, free_of(group, limit));
    if (limit >= to->bytes) return;
    to->bytes = limit;
    snprintf(to->group, sizeof to->group, "%s", group);
}

void lg_cgroup_limit(const char *group, struct lg_cgroup_limit *ret)
{
    char now[LG_PATH_BYTES], above[LG_PATH_BYTES];
    *ret = (struct lg_cgroup_limit){.bytes = LG_CGROUP_NONE, .free_bytes = LG_CGROUP_NONE};
    snprintf(now, sizeof now, "%s", group);
    add(now, ret);
    while (strcmp(now, "/") != 0) {
        lg_cgroup_parent(now, above);
        memcpy(now, above, sizeof now);
        add(now, ret);
    }
}
