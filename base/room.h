/* Memory for which there is no room at the moment. Processes that start together make regions each for itself, and those that
 * come too late drop what they made (shm/region.c): until then a device that the plan fills has no room. */
#pragma once
#include <stdbool.h>

enum { LG_ROOM_TRIES_MAX = 200 };
extern int lg_room_wait_ms; /* 10; tests do not wait */

/* After a call that failed with rc: is it worth another try? Then its error is cleared and some milliseconds have passed.
 * tries: of the caller, 0 at first. Not after 200 of them, 2 s: what has no room then has none. */
bool lg_room_may_come(int rc, int *tries);
