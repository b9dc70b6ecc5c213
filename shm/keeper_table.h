/* The keeper's table: fds by name, and for a keeper that is a service what the manager's fd store
 * has of them. No call waits. What needs the store's word is LG_TABLE_LATER: the asker (any pointer
 * that stands for it) asks the same again after lg_table_turn, until there is an answer or it
 * leaves.
 *
 * The life of an entry beside a store; without one it goes from nothing to KEPT and back:
 *
 *     put --> UNSENT --handed over--> SENT --barrier--> KEPT      put is answered, others see it
 *                |                      |                |
 *        3 s, no manager               3 s              drop      its fd is closed here
 *                v                      v                v
 *             FAILED                 UNDROPPED <---------+
 *                |                      |
 *         put is answered           handed over --> DROPPING --barrier--> gone    drop is answered
 *
 * The table is the queue of what the manager is still to be told, so the queue is as bounded as the
 * table, and nothing in it is forgotten while the keeper lives: a drop is tried again until it has
 * been taken. A name has one entry, so a second fd of a name is never handed over before the first
 * is out: a put waits for the drop of its name. Dying in UNSENT loses what nobody was told of; in
 * SENT, UNDROPPED and DROPPING the next keeper may find the region in the store: a put of the name
 * is told BUSY, and who gets it sees by its head whose it is. */
#pragma once
#include "shm/keeper.h"
#include "shm/keeper_store.h"

enum { LG_TABLE_LATER = 1 };

struct lg_keeper_entry {
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int fd; /* -1 from UNDROPPED on, and when FAILED */
    enum {
        LG_ENTRY_KEPT,
        LG_ENTRY_UNSENT,
        LG_ENTRY_SENT,
        LG_ENTRY_FAILED,
        LG_ENTRY_UNDROPPED,
        LG_ENTRY_DROPPING
    } state;
    bool covered;      /* SENT, DROPPING: by the barrier under way */
    int64_t since_ns;  /* of the put */
    const void *asker; /* of the put, who has not been answered; NULL: nobody */
    int code;          /* what it will be told, when the put failed */
};

struct lg_keeper_table {
    struct lg_keeper_entry entry[LG_KEEPER_REGIONS_MAX]; /* [0, count): dense, names are unique */
    int count;
    bool stored;
    struct lg_store store;
    int barrier;      /* -1: none under way */
    bool unreachable; /* the last word to the manager was refused; it is tried again */
    char ready[64];   /* READY=1 with this status has not been sent yet; "": it has */
};

/* With the store that the environment names, when `stored`. */
int lg_table_open(struct lg_keeper_table *t, bool stored);
/* Takes what lies in the store; returns how many entries. */
int lg_table_reclaim(struct lg_keeper_table *t);
/* Closes the fds here; the store keeps its own. */
void lg_table_close(struct lg_keeper_table *t);

/* Takes *fd (sets it to -1) when it enters it. `late`: the asker has waited long enough. */
int lg_table_put(struct lg_keeper_table *t, const void *asker, const char *name, uint64_t bytes,
                 int *fd, bool late);
/* "": all of them. `late`: the store follows when it can. */
int lg_table_drop(struct lg_keeper_table *t, const char *name, bool late);
/* NULL: there is none that could be given. */
const struct lg_keeper_entry *lg_table_get(const struct lg_keeper_table *t, const char *name);
const struct lg_keeper_entry *lg_table_kth(const struct lg_keeper_table *t, int k);
/* The asker is gone, or was told something else. */
void lg_table_leave(struct lg_keeper_table *t, const void *asker);

/* Goes on with the store as far as it goes without waiting. */
void lg_table_turn(struct lg_keeper_table *t);
/* How long poll() may wait beside t->barrier (POLLIN); -1: for ever. */
int lg_table_wait_ms(const struct lg_keeper_table *t);
