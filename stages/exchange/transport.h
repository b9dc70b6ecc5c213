/* How bytes get from an exchange process to those of the same rank on other hosts: a table, one row a transport.
 *
 * Messages have tags, and are received into places that were posted for their tags; nothing writes into another's memory
 * by itself. A message with LG_TAG_NOTE waits for a place; one without that meets none is dropped: it is an answer that
 * nobody waits for any more. Each pair of hosts has two connections, one for each direction: what a process sends
 * to host h goes by the connection that it has made, and it takes what comes by those that others have made to it.
 *
 * A transport neither finds out who lives nor tries again: a connection may fail when the other process has died, or never.
 * Nothing here blocks. Whoever calls is one thread. */
#pragma once
#include "base/check.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LG_TAG_NOTE (UINT64_C(1) << 63)
/* With LG_TAG_NOTE: a note of a transport that is built on another one. */
#define LG_TAG_INNER (UINT64_C(1) << 62)

/* A message under way; it is the caller's, and stays where it is until it is done. */
struct lg_transfer {
    uint64_t tag;
    void *data;
    size_t bytes;      /* of a receive: exactly so many must come */
    bool on_device;    /* data is memory of the device that the transport was opened with */
    bool posted, done; /* posted by the caller; done: it is over */
    bool failed; /* with done: cancelled, or the connection has failed, or another size has come */
    struct lg_transport *of;
    void *request; /* the transport's */
};

typedef struct lg_transport lg_transport;

struct lg_transport_spec {
    int hosts, host;
    const char *address; /* to listen at, numeric */
    uint32_t port;
    const char
        *interface; /* network device; NULL or "": that of the address, or as the transport finds */
    void *arg;      /* nccl: the lg_device whose memory messages lie in; of a test's transport */
};

struct lg_transport_kind {
    const char *name;
    int (*open)(const struct lg_transport_spec *spec, lg_transport **ret);
    void (*close)(lg_transport **t); /* everything is cut off first */
    /* Begins to connect to host `peer`; messages may be sent at once. An error: it cannot even be tried. Only from
     * addresses that were connected to are connections taken. */
    int (*connect)(lg_transport *t, int peer, const char *address, uint32_t port);
    /* By force: what is being sent is done soon, as failed. No effect without a connection. */
    void (*disconnect)(lg_transport *t, int peer);
    bool (*has_failed)(lg_transport *t, int peer); /* since connect */
    /* By force, all connections that others have made: what has begun to come by them is done soon, as failed. Who is
     * still there may find that his has failed. */
    void (*cut_off)(lg_transport *t);
    void (*send)(lg_transport *t, int peer, struct lg_transfer *m);
    /* Notes go to the places that are posted with LG_TAG_NOTE, in the order in which these were; one comes whole or not
     * at all. */
    void (*receive)(lg_transport *t, struct lg_transfer *m);
    /* Of a receive: it is done soon, perhaps by what has come; when its message has begun to come, by its end or by
     * cut_off. */
    void (*cancel)(lg_transport *t, struct lg_transfer *m);
    /* Moves what can be moved; true: something has happened. */
    bool (*progress)(lg_transport *t);
    /* A descriptor that becomes readable when something happens; -1: there is none. After sleeps() has said that nothing is
     * left to do. */
    int (*fd)(lg_transport *t);
    bool (*sleeps)(lg_transport *t);
};

/* Over UCX: tag messages between memory of the hosts (ucx.c). */
extern const struct lg_transport_kind lg_transport_ucx;
/* Over NCCL what lies on a device, over UCX all else (nccl.c). */
extern const struct lg_transport_kind lg_transport_nccl;
