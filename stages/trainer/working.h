/* What a rank computes with: weights in the type of the computation.
 *
 * Whole (zero = 0, 1, 2): all of them, always there.
 *
 *   trainer/<r>/working   front: lg_working_front; the flat buffer. UPDATE writes a rank's shard into those of all of
 *                         its group, so that nothing is gathered before the next FORWARD. None where a rank that owns
 *                         the whole state computes in the state's own type, where it lies
 *
 * of[k] is the stamp of the state whose shard k lies there. Writer: its rank q of the group, release, when its UPDATE has
 * written the shard and its stream is done, before the commit. Reader: rank r, acquire, in FORWARD(s), which follows
 * every commit of s: a shard of another state (a run's first step, after a skipped update) it makes itself, from the
 * state, and knows by itself that it did. Rank q writes its shard in UPDATE(s), after every partial of s, so after the
 * last FORWARD(s); rank r reads it, and may write it, in FORWARD alone. UPDATE begins its shard in each by "being made"
 * (lg_stamp_begin), because a successor that goes on in the middle writes the later chunks only (moments.h): the shard is
 * of the new state where that still stands. Memory that had to be made anew, in the middle or not, says something else,
 * and the shard is made there from the state again.
 *
 * Gathered (zero = 3): unit by unit, from their owners, into private memory, by copies on a lane beside the
 * computation, a unit ahead; each has a place there from its gathering until forward or backward are done with it.
 *
 *   trainer/<r>/working   front: lg_working_front, of which of[0] counts; rank r's shard (shards.h), which its peers read
 *                         in FORWARD(s). Written in INIT and UPDATE as above, before the commit: who sees every commit
 *                         of s finds state s there, or it is lost. None in fp32: the state itself is read, where it
 *                         lies on the devices.
 *
 * Cast (memory.cast_weights): gathered, too, with any zero, but by the lane's casts from the owners' states, so that there is
 * no region. State s lies in side s & 1, which nobody writes before the UPDATE(s + 1) that follows every FORWARD(s + 1): it
 * is read as in fp32. A cast rounds as AdamW's kernel rounds a copy (ops.def), so the bits are the same.
 *
 * With a plan that is `apart`, where the state is cut, all modes gather: with zero = 1 and 2 once a step, and all stay. The
 * region, which then is there in fp32 too, is host memory: UPDATE writes the shard there, the lane reads it from there.
 *
 * With a state in host memory (lg_state_device) working weights are the only ones on the device, so there are always
 * some, and whatever is cast from the state goes up for it, piece by piece (transfer.h). What has gone up is written by
 * this device's `compute`: a shard counts when that is done, too. */
#pragma once
#include "stages/nets/denoiser.h"
#include "stages/stage.h"
#include "stages/trainer/state.h"
#include "stages/trainer/transfer.h"

struct lg_working_front {
    struct lg_stamp of[LG_INSTANCES_MAX];
};

struct lg_working_bytes {
    size_t region;   /* of a rank; 0: it has none */
    size_t gathered; /* private */
    size_t
        traffic; /* read from others, or written to them, in a step; of a plan that is apart: read from the host */
};
/* net: compiled, on a device of this type. Without the transfer. */
struct lg_working_bytes lg_working_bytes_of(const lg_config *c, const lg_plan *p, lg_dtype type,
                                            const lg_params *t, const lg_denoiser *net, int shard);

/* Do gathered weights lie in the memory of the net (denoiser.h, `places_weights`, `ahead`), which then is compiled so? */
bool lg_working_lies_in_net(const lg_config *c, const lg_plan *p);

typedef struct lg_working lg_working;
/* For rank st->index on device d, which computes on `compute`; maps the peers' regions. All must outlive it. The stage
 * closes the regions. */
int lg_working_open(lg_stage *st, lg_device *d, lg_stream *compute, const lg_trainer_state *s,
                    const lg_denoiser *net, lg_working **ret);
void lg_working_close(lg_working **w);

/* FORWARD: a micro-batch of this step begins. 0, or as lg_stage_lost. */
int lg_working_begin(lg_working *w, uint64_t state);
/* A unit's weights, in the order of the net's events; what is enqueued from now on finds them there. */
const void *lg_working_unit(lg_working *w, int unit);

/* INIT, or an update that was skipped: the own shard of a state that is there, where others expect it. */
void lg_working_make(lg_working *w, uint64_t state);
/* UPDATE: where the own piece of a unit is to be written as well; returns how many (0: none). */
int lg_working_copies(const lg_working *w, int unit, lg_tensor ret[LG_RANKS_MAX]);
/* With a state in host memory, else NULL: the way up and down, which the update uses too. */
lg_transfer *lg_working_transfer(const lg_working *w);
/* UPDATE with it: elements [first, first + count) of the own shard, with which lg_transfer_load's memory has been filled,
 * go up and to where lg_working_copies says, in the order of `compute`. */
void lg_working_send(lg_working *w, size_t first, size_t count);
/* Before the first byte of the first chunk that is written there. */
void lg_working_begin_copies(lg_working *w, uint64_t state);
/* They are written, with `state`, and the stream is done. */
void lg_working_mark_copies(lg_working *w, uint64_t state);
