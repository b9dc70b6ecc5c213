/* Wake-ups between stages and the line to lgsup, over ZeroMQ (ipc:// in the runtime directory).
 *
 * Messages only wake people up; what is so stands in shared memory. A lost message costs one
 * timeout (every wait has one), a doubled or late one a look.
 *
 * Edges: each instance binds one PUB socket, RUNTIME/wake.<role>.<index>, and subscribes to the
 * roles that edges.def lists for it (all instances that the plan knows; later ones by
 * lg_bus_follow). Each instance has one DEALER to lgsup's ROUTER, RUNTIME/lgsup. All sockets have
 * a high-water mark and linger 0; reconnects are tried every 10 ms.
 */
#pragma once
#include "base/fs.h"
#include "config/plan.h"
#include "shm/layout.h"

typedef struct lg_bus lg_bus;

struct lg_bus_spec {
    const char *runtime_dir;
    lg_role role;
    int index;
    lg_incarnation incarnation;
    const lg_plan *plan; /* instance counts of the roles this one listens to */
};
int lg_bus_open(const struct lg_bus_spec *spec, lg_bus **ret);
void lg_bus_close(lg_bus **b);
/* Path of the socket that an instance binds. */
int lg_bus_socket(const char *runtime_dir, lg_role role, int index, char ret[LG_PATH_BYTES]);
/* Listens to one more instance, one that the plan did not count, or, with there = false, no longer to
 * one that has left. Without effect where no edge leads from that role to this one, or when it is so
 * already. */
int lg_bus_follow(lg_bus *b, lg_role role, int index, bool there);
/* Wakes everybody who listens to this instance. Never blocks. */
void lg_bus_notify(lg_bus *b);
/* From now on lg_bus_wait also wakes when this descriptor is readable; -1: no more. */
void lg_bus_also(lg_bus *b, int fd);
/* Sleeps until somebody notifies, lgsup sends something, or timeout_ms is over. Drains all pending
 * wake-ups. Returns 1 when woken, 0 on timeout. */
int lg_bus_wait(lg_bus *b, int timeout_ms);

/* To lgsup; best effort, never blocks. */
void lg_bus_hello(lg_bus *b);
void lg_bus_ready(lg_bus *b);
/* A line for the user ("warning: picture x is unreadable"), at most 400 bytes. */
void lg_bus_event(lg_bus *b, int level, const char *text);
