/* Where a process is that does not end. */
#pragma once
#include <stddef.h>

/* "state D (uninterruptible) in io_schedule": of the thread that holds it up. In the kernel's own words
 * (/proc/PID/task), as far as it tells them; "" when the process is gone. Never waits. */
void lg_process_place(int pid, char *ret, size_t bytes);
