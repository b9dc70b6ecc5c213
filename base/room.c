/* See room.h. */
#include "base/room.h"
#include "base/check.h"
#include <time.h>

int lg_room_wait_ms = 10;

bool lg_room_may_come(int rc, int *tries)
{
    if (rc != LG_ERR_NOSPACE || ++*tries > LG_ROOM_TRIES_MAX) return false;
    lg_err_clear();
    nanosleep(&(struct timespec){0, lg_room_wait_ms * 1000000L}, NULL);
    return true;
}
