/* The control groups of a machine that a test makes up: what the code under test opens below
 * /sys/fs/cgroup, and /proc/self/cgroup, lies in the scratch folder instead. Nothing is there at first. */
#pragma once

/* With a scratch folder of their own, as cmocka's setup and teardown; or for one that is there. */
int control_groups_setup(void **state);
int control_groups_teardown(void **state);
void control_groups_begin(void);
void control_groups_end(void);
/* What /proc/self/cgroup says. */
void control_group_is(const char *text);
/* A file of a group: "/lg.slice", "memory.max". */
void control_group(const char *group, const char *file, const char *text);
