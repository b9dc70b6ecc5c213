/* What exchange r of a host does with those of the other hosts (shm/hosts.h has the marks and epochs), over any
 * transport. Whoever needs something asks for it, and who is asked answers when he has it, from memory that outlives both:
 *
 *   PART(s)    of host k: this host's part of k's `outgoing` of step s, and the loss of k's rank. Answered slice by slice
 *              as these leave k's rank (shm/leaving.h), the loss when k has local(s).
 *   TOTAL(s)   of host k: the sum of k's part, piece by piece as k has added it.
 *   STATE(i)   of the leader: piece i of its state, to a host that has none.
 *
 * Shard r is cut into slices, of a message each. Counted from the shard's end, where the backward begins, they are dealt
 * out to the hosts in turn: that is a host's part. It adds its own, of all hosts in host order, into `incoming`, and takes the
 * sums of the others into `incoming` too. So bits depend on no cut, and while units are still being made all hosts have work.
 * All is asked for a step ahead, so nobody waits for a
 * question; and since questions change nothing they are simply asked again by, and of, whoever comes anew. So a process
 * that dies needs no epoch: its successor asks, the others answer again. An answer carries the number of its question,
 * drawn at random, and only meets a place that was posted for that: what belongs to another life finds none.
 *
 * Why what is sent is not being overwritten: `outgoing` of s is overwritten in step s + 1 of the rank, after its UPDATE(s), and
 * so after every member of the epoch has exchanged s; a slice of the own part of `incoming` when that slice of s + 1 has left
 * the ranks of all hosts, which is later still, and then no rank of this host reads s there any more. Who would still
 * ask for s then does not live any more, or has asked in a life before and takes no answer.
 *
 * Notes say whom their writer hears: a connection that is lost in silence, which a transport may never tell, is made again by
 * who is not heard (exchanger.c). A note may be lost all the same, or come when a later one has: those of a connection that
 * was given up may still be under way. So all is said again after a while, and of a card's words, which only grow, the
 * greatest counts.
 *
 * A host's exchange 0 also carries the cards. */
#pragma once
#include "shm/board.h"
#include "shm/leaving.h"
#include "shm/stamp.h"
#include "stages/exchange/transport.h"

struct lg_exchanger_state {
    uint64_t state;
    size_t at, bytes;
};

struct lg_exchanger_spec {
    lg_board *board;
    int rank;
    const struct lg_transport_kind *transport;
    void *transport_arg;
    const char *interface;      /* hosts.interface */
    float *outgoing, *incoming; // (count), trainer/gradients.h
    struct lg_stamp *outgoing_stamp, *incoming_stamp;
    const struct lg_leaving *leaving; /* NULL: all leaves at once, with row.local */
    size_t count;
    float *parts;         // (lg_exchanger_parts): what other hosts send of the own part
    bool on_device;       /* these three are memory of the transport's device */
    size_t message_bytes; /* the longest message; a multiple of 4 */
    void *arg;
    /* y = x[0] + x[1] + .., n of them, each of count elements. */
    void (*add)(void *arg, float *y, const float *const x[], int n, size_t count);
    /* Of a state, as a row of bytes that is the same on all hosts: how many they are. */
    size_t (*state_bytes)(void *arg, uint64_t state);
    /* One that the host has, for another: is it here, whole? And bytes [at, at + bytes) of it. */
    bool (*has_state)(void *arg, uint64_t state);
    int (*read)(void *arg, const struct lg_exchanger_state *of, void *to);
    /* State start_step of another host: bytes of it, and, when all have come, their stamps. */
    int (*write)(void *arg, const struct lg_exchanger_state *of, const void *from);
    int (*written)(void *arg);
    int64_t (*now)(void); /* ns; lg_now_ns */
    uint64_t life;        /* of this process, never used before */
};

typedef struct lg_exchanger lg_exchanger;
int lg_exchanger_open(const struct lg_exchanger_spec *spec, lg_exchanger **ret);
void lg_exchanger_close(lg_exchanger **x);
/* What can be done now: 1: something was done, 0: nothing, *ret_why says what it waits for. LG_ERR_TIMEOUT: the transport does
 * not give back a place, and the process must end, for that alone makes it; LG_ERR_CORRUPT: `outgoing` is not
 * that of which the mark speaks. */
int lg_exchanger_step(lg_exchanger *x, const char **ret_why);
/* May the caller sleep until fd is readable, or the board changes? */
bool lg_exchanger_sleeps(lg_exchanger *x);
int lg_exchanger_fd(lg_exchanger *x);
/* This process ends: sends what it has to say, for at most so long. */
void lg_exchanger_end(lg_exchanger *x, int ms);
/* Elements of `parts`, and bytes of its own private memory. */
size_t lg_exchanger_parts(size_t count, int hosts, size_t message_bytes);
size_t lg_exchanger_bytes(int hosts, size_t message_bytes);
