/* lgsup's side of the keeper: start it, hold a second copy of every fd, fill a new one.
 *
 * A new keeper listens at RUNTIME/keeper.new until it has everything that the old one had; then its
 * socket is renamed to RUNTIME/keeper. Nobody can therefore find a keeper that has forgotten a
 * region, and make it anew while others still use the old memory.
 *
 * Nobody uses a region before it is copied here (shm/region.h, `copied`): what was opened and never copied
 * may be lost with whoever opened it. Its name stands in DIR/regions before that, so that a later lgsup,
 * which has no copies yet, knows what there must be. So a region that stands there and that neither the
 * keeper nor a stage nor we hold has been lost, and one that does not stand there was never used.
 *
 * Under systemd (`service`) the keeper is a unit of its own with an fd store, and it is the manager
 * who starts it: what is "started" here is then waited for. It comes back at RUNTIME/keeper with all
 * that was ever acknowledged, or, when its store was empty, at RUNTIME/keeper.new as above. It
 * outlives runs: a new one begins by making it forget.
 *
 * Every call here may wait: 5 s for a keeper that hangs, and lg_keep_refresh for the disk, where there are
 * new names. The loop makes none of them: before it begins and after it has ended lgsup calls them
 * itself, in between the keeper's worker does (keep_jobs.h). `child` and `lost` belong to the loop all the
 * time; the rest belongs to the worker while the loop runs. */
#pragma once
#include "shm/board.h"
#include "shm/keeper.h"
#include "supervisor/run/child.h"

struct lg_keep_copy {
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int fd;
    bool noted; /* the region's head says that we have it */
};

typedef struct lg_keep {
    char socket[LG_PATH_BYTES];  /* RUNTIME/keeper */
    char log[LG_PATH_BYTES];     /* DIR/logs/keeper.0.log */
    char regions[LG_PATH_BYTES]; /* DIR/regions: names of all regions, one a line */
    bool service;
    struct lg_child child;
    struct lg_keep_copy copy[LG_KEEPER_REGIONS_MAX];
    int n_copies;
    int n_recorded; /* of the copies, in DIR/regions */
    bool complete;  /* we hold every region that anybody uses */
    bool lost;      /* one of them is in nobody's hands */
} lg_keep;

/* Paths only; no process, no copies. */
int lg_keep_init(lg_keep *k, const char *run_dir, const char *runtime_dir, bool service);
/* Gives the keeper's row to the next one, which is named there before it begins (shm/board.h, rule 2). */
lg_incarnation lg_keep_enlist(lg_board *board);
/* Starts lg-keeper, enlisted, fills it with the copies, makes it visible. first: of this run; a service then
 * forgets what it holds of another. Fails on the first thing that goes wrong, and nothing is left. The
 * board's row of the keeper is its, and nobody else's while it runs. */
int lg_keep_launch(const lg_keep *k, lg_board *board, bool first, struct lg_child *ret);
/* Takes a keeper that has been launched over: `child`, `ready`; raises keeper_epoch when it replaces another.
 * Waits for nobody. */
void lg_keep_enter(lg_keep *k, lg_board *board, const struct lg_child *c);
/* Has there been no keeper that was ready? Then nobody has used any memory. */
bool lg_keep_is_first(lg_board *board);
/* Is the one that the board names in its predecessor's place? */
bool lg_keep_is_ready(lg_board *board);
enum { LG_KEEP_STARTS_MAX = 3 };
/* Launches one and takes it over; begins DIR/regions for the first of a run. One that ends or hangs before it listens is
 * followed by another, LG_KEEP_STARTS_MAX in all. */
int lg_keep_start(lg_keep *k, lg_board *board);
/* Takes over the keeper that the board names, or the service's next. LG_ERR_NOTFOUND when it is dead,
 * or has nothing. */
int lg_keep_adopt(lg_keep *k, lg_board *board);
/* Is its socket there? A keeper without one lives and holds its memory, but nobody reaches it any more. */
bool lg_keep_is_reachable(const lg_keep *k);
/* Is it process `pid` that listens there? One that does has all that its predecessor had. */
bool lg_keep_answers(const lg_keep *k, int pid);
/* Copies what the keeper holds and we do not, records the names, then says so in the regions. All or an error:
 * ask again later. LG_ERR_BUSY, without a text: the keeper does not have the payload of a region on a GPU yet. */
int lg_keep_refresh(lg_keep *k);
/* Copies the regions of run `run_id` that process `pid` holds and we do not, through /proc. For when
 * the keeper is dead and our copies may not be complete. */
void lg_keep_salvage(lg_keep *k, int pid, uint64_t run_id);
/* Do the copies cover every region of DIR/regions? *ret_missing gets the first that is not there. */
bool lg_keep_is_whole(const lg_keep *k, char ret_missing[LG_REGION_NAME_BYTES]);
/* Ends keepers that an lgsup which died in the middle of a start has left in this runtime directory,
 * unknown to any board. */
void lg_keep_end_strays(const char *runtime_dir);
/* Makes the service's keeper of this runtime directory forget everything; no keeper: fine. */
void lg_keep_forget(const char *runtime_dir);
/* Closes the copies and lets the keeper live on alone with the memory. */
void lg_keep_leave(lg_keep *k);
/* Ends the keeper (a service only forgets), closes the copies: the memory is gone when the last stage
 * is. */
void lg_keep_end(lg_keep *k);
