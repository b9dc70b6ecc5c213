/* The keeper's second home: the fd store of the service manager that started it (systemd, unit with
 * FileDescriptorStoreMax=). What lies there comes back when the manager starts the unit's process
 * again, so a keeper that dies needs nobody's help. It lies there until the unit is stopped.
 *
 * Nothing here blocks: the manager may be slow, or hear nothing for a while. What it does not take
 * now is LG_ERR_BUSY (without a text), and the caller tries again; what it has taken it does in
 * order. Who wants to know that it is done sends a barrier. keeper_table.h is that caller.
 *
 * In the store a region is called "NAME=BYTES"; BYTES as in the keeper's own table. */
#pragma once
#include "shm/layout.h"
#include <sys/socket.h>
#include <sys/un.h>

struct lg_store {
    int socket; /* -1: no manager, NOTIFY_SOCKET is not set */
    struct sockaddr_un at;
    socklen_t at_bytes;
};

/* May this name lie in the store? Printable, without the separators ':' and '='. */
bool lg_store_fits(const char *name);
int lg_store_open(struct lg_store *ret);
void lg_store_close(struct lg_store *s);
/* Hand a copy of fd over; take it out again. LG_ERR_BUSY: not now. LG_ERR_IO: no manager. */
int lg_store_put(const struct lg_store *s, const char *name, uint64_t bytes, int fd);
int lg_store_drop(const struct lg_store *s, const char *name, uint64_t bytes);
/* *ret_fd hangs up (POLLHUP) when the manager has read all that was handed over before. Should it
 * die first, all that it had not read is lost without a sign; but then its services are dead as
 * well. */
int lg_store_barrier(const struct lg_store *s, int *ret_fd);
/* Tells that the unit is ready, with a line for `systemctl status`. */
int lg_store_ready(const struct lg_store *s, const char *status);
/* What an earlier process of the unit has stored: take() gets each fd, which is its own from then
 * on. Returns how many there were. To be called once, at start. */
int lg_store_reclaim(void (*take)(void *arg, const char *name, uint64_t bytes, int fd), void *arg);
