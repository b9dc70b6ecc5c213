/* The keeper's second home: the fd store of the service manager that started it (systemd, unit with
 * FileDescriptorStoreMax=). What lies there comes back when the manager starts the unit's process
 * again, so a keeper that dies needs nobody's help. It lies there until the unit is stopped.
 *
 * In the store a region is called "NAME=BYTES"; BYTES as in the keeper's own table. */
#pragma once
#include "shm/layout.h"

/* May this name lie in the store? Printable, without the separators ':' and '='. */
bool lg_store_fits(const char *name);
/* Hands a copy of fd to the manager and returns when it has taken it (a barrier; 3 s at most).
 * LG_ERR_TIMEOUT, LG_ERR_IO: it cannot be told whether the store has it; put again does no harm. */
int lg_store_put(const char *name, uint64_t bytes, int fd);
/* Takes it out again; the same wait, the same errors. */
int lg_store_drop(const char *name, uint64_t bytes);
/* What an earlier process of the unit has stored: take() gets each fd, which is its own from then
 * on. Returns how many there were. To be called once, at start. */
int lg_store_reclaim(void (*take)(void *arg, const char *name, uint64_t bytes, int fd), void *arg);
/* Tells the manager that the unit is ready, with a line for `systemctl status`. */
void lg_store_ready(const char *status);
