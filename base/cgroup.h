/* Limits of memory that control groups set: a systemd unit's MemoryMax=, its slice's, a container's.
 *
 * Of the second version of control groups (mounted at /sys/fs/cgroup), whose memory.max holds for a group
 * and all below it. So what bounds a process is the least of its own group's and of all above it. Where
 * groups of the first version count memory nothing is known here, and no limit is reported. */
#pragma once
#include "base/fs.h"
#include <stdint.h>

#define LG_CGROUP_NONE UINT64_MAX /* no limit */

struct lg_cgroup_limit {
    uint64_t bytes;            /* the least of the limits; LG_CGROUP_NONE: there is none */
    char group[LG_PATH_BYTES]; /* whose it is: "/lg.slice"; "/": the container's; "": nobody's */
    /* What is left of each of them, at least; a cache that the kernel would give back is not counted as
     * used. LG_CGROUP_NONE: not known. */
    uint64_t free_bytes;
};

/* The group of this process, as "/lg.slice/lgsup.service"; "/" when it is not known. */
void lg_cgroup_self(char ret[LG_PATH_BYTES]);
/* The group above; "/" is above itself. */
void lg_cgroup_parent(const char *group, char ret[LG_PATH_BYTES]);
/* What `group` and all above it set. A group that is not there sets nothing. */
void lg_cgroup_limit(const char *group, struct lg_cgroup_limit *ret);
