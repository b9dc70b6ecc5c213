/* A region is memory behind an fd; a process that maps it is disposable. On the host a sealed,
 * fully allocated memfd. The keeper holds a copy of every fd, so the memory outlives its users.
 *
 * Layout: one page of struct lg_region_head, the front (whole pages of small host words, may be
 * none), then the payload. The size never changes.
 *
 * On a GPU the payload is an allocation of its own behind a second fd, which the keeper holds as
 * "<name>@"; head and front stay in the host's memfd. So every word that processes compare lies in
 * host memory. The second fd cannot be looked into:
 *   made: 1 once the keeper has been given it. Writer: whoever deposited or found it, release.
 *         Dying before it: the next one finds the fd at the keeper, or none and makes new memory,
 *         which nobody has used. From then on a keeper without it has lost it for a moment (a new
 *         one): never make another, wait until those who map it have deposited it again.
 *
 * A region that has contents of its own (weights read from a file) is filled once:
 *   filler: incarnation that fills. Writer: whoever wins the compare-and-swap from 0 or from a dead
 *           incarnation. Dying before or after it leaves a claim that the next one takes over.
 *   filled: 1 when the payload is complete. Writer: the filler, release, after the last byte.
 *           Readers: acquire, before the first byte. Dying before it: filled again from the start.
 * Regions whose contents follow the commit words (state, grads, window, staging) do not use them.
 *
 * Memory of which there is one copy is not used: one death would take it away, and whoever opens the name
 * next would get zeroed memory under marks that say what lies there. A second copy of the fd is lgsup's;
 * or the service manager's store, where the keeper has one (keeper.h).
 *   copied: 1 when that second copy is there, of the payload's fd too. Writers, release: lgsup, when it holds
 *           both and has recorded the region's name in DIR/regions, by which a later lgsup sees what is
 *           missing (supervisor/core/keep.h); or whoever was told by the keeper that its store has both.
 *           All store 1; nobody takes it back. Readers: every process that has opened the region, acquire,
 *           before it stores anything in it or relies on what stands there; but for what is filled once.
 *           Dying before the store: the next one stores it. lgsup dying after it: its successor copies
 *           from the keeper; should that be dead as well, it takes what living stages hold, and by the
 *           record it knows whether that is all.
 * What is filled once may be used, and filled, before: memory that is made anew says that it is not
 * filled, and is filled with the same.
 */
#pragma once
#include "shm/board.h"
#include "shm/layout.h"

struct lg_region_head {
    uint64_t magic, version, layout_hash, bytes, plan_hash, run_id;
    char name[LG_REGION_NAME_BYTES];
    _Atomic(uint32_t) filler;
    _Atomic(uint32_t) filled;
    uint64_t front_bytes;
    char place[16]; /* where the payload lies: "" (host) or "cuda:0" */
    _Atomic(uint32_t) made;
    _Atomic(uint32_t) copied;
};

/* A device's own memory, made and mapped by who has the device; or the host's, which a device is to reach. The functions
 * return lg_err codes. */
struct lg_region_place {
    char name
        [16]; /* "cuda:0": where new memory is made; mapping works from other GPUs too; "": the host's memory */
    void *device; /* handed to the functions, with */
    int gpu;
    int (*create)(const struct lg_region_place *, size_t bytes, int *ret_fd); /* zeroed */
    /* NULL: this process uses head and front alone; others make the payload. */
    int (*map)(const struct lg_region_place *, int fd, size_t bytes, void **ret);
    void (*unmap)(const struct lg_region_place *, void *at, size_t bytes);
    /* Of the host's memory: where the device has it, until the process ends; NULL: no device needs it. */
    int (*map_host)(const struct lg_region_place *, void *host, size_t bytes, void **ret);
};

typedef struct lg_region {
    char name[LG_REGION_NAME_BYTES]; /* "<role>/<index>/<what>[/<side>]" */
    size_t bytes;                    /* of the payload */
    size_t front_bytes;
    int fd;         /* close-on-exec; kept to deposit again at a new keeper */
    int payload_fd; /* of a payload on a GPU; -1 */
    struct lg_region_head *head;
    void *front;   /* host memory, page aligned; NULL when there is none */
    void *payload; /* page aligned; the device's address when the spec has a place */
    struct lg_region_place place;
} lg_region;

struct lg_region_spec {
    const char *keeper; /* path of the keeper's socket */
    const char *name;
    size_t bytes; /* payload */
    size_t front_bytes;
    uint64_t plan_hash;
    uint64_t run_id; /* of the board: an older run's region of the same name is refused */
    const struct lg_region_place *place; /* NULL: the host */
    bool is_made; /* a mark says what lies there: never make new memory in its place */
};
/* Gets the region from the keeper, or creates and deposits it when it is not there (put-if-absent:
 * of two creators one wins, both get the same memory). New memory is zero. Size, plan hash and run
 * are compared. LG_ERR_NOSPACE when the machine cannot allocate it, LG_ERR_MISMATCH for another
 * plan. LG_ERR_NOTFOUND when it is lost: it should be there (is_made), or the keeper lacks a GPU payload
 * that was made and for 20 s nobody deposits it. */
int lg_region_open(const struct lg_region_spec *spec, lg_region **ret);
/* Unmaps and closes; the keeper's copy stays. */
void lg_region_close(lg_region **r);
/* Is there a second copy? */
bool lg_region_is_copied(const lg_region *r);
/* lgsup: stores `copied` in the region behind fd, of which it holds a copy; payload: of the payload's as
 * well. Nothing where no region of this build lies there. LG_ERR_BUSY, without a text: its payload lies on
 * a GPU and payload is false. */
int lg_region_note_copy(int fd, bool payload);
/* Deposits again (a new keeper). Idempotent; LG_ERR_MISMATCH when the keeper already holds other
 * memory under this name (somebody opened the region before it was deposited again). */
int lg_region_deposit(const char *keeper, const lg_region *r);

/* Fill-once. Returns 1: you are the filler: fill the payload, then lg_region_filled(). 0: it is
 * filled. LG_ERR_BUSY: a living incarnation fills it; look again later (never blocks). */
int lg_region_fill_begin(lg_region *r, lg_board *board, lg_incarnation me);
void lg_region_fill_end(lg_region *r);
