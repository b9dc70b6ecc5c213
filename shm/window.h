/* The window: W slots for samples in flight. Sample n lives in slot n mod W.
 *
 * Fields of a slot: SOURCE (pixels, tokens, label ... by a loader), LATENT (by a VAE instance, or
 * by the loader when the data set holds latents), TEXT (by a text instance). Work is claimed by
 * aligned chunks: chunk k of a field covers samples [k c, (k + 1) c); the claim word is that of its
 * first slot. W is a multiple of every chunk and of the batch.
 *
 * Access rules:
 *  1. ready[f] = n + 1: field f of sample n is complete. Written with release by the chunk's
 * claimant, after the payload and after a full fence; read with acquire before the payload. It
 * never decreases: n + 1 is followed by n + W + 1.
 *  2. claim[f] = incarnation << 32 | lap + 1, lap = n / W. Taken by compare-and-swap from a value
 * of an older lap, or from the same lap by a dead incarnation (board.h, rule 3). Nobody clears it.
 * It ends by ready or by death: a process that cannot finish a chunk exits.
 *  3. Slot n may be written by the claimant of n only while n < first + W, where first = first
 * sample of the step after the global commit. (Every rank has then committed the step that read n -
 * W.)
 *  4. Nobody looks at a payload before its ready word, nor after the step of n is globally
 * committed.
 *  5. A claimant that dies before ready leaves a half-written payload; rule 1 hides it, rule 2
 * passes it on, and the next one writes the same bytes. Dying between two ready words of one chunk:
 * the next one writes the ready ones again? No: it must not touch a sample whose ready word is set,
 * since a rank may be reading it. The claimant skips ready samples.
 */
#pragma once
#include "shm/board.h"
#include "shm/region.h"

typedef enum lg_field { LG_FIELD_SOURCE, LG_FIELD_LATENT, LG_FIELD_TEXT, LG_FIELD_COUNT } lg_field;

struct lg_slot {
    _Atomic(uint64_t) ready[LG_FIELD_COUNT];
    _Atomic(uint64_t) claim[LG_FIELD_COUNT];
    /* SOURCE's small payload */
    uint64_t item;     /* index in the data set */
    uint64_t key_hash; /* of the sample's key */
    int32_t label;
    int32_t text_length; /* number of tokens, >= 1 */
    uint32_t is_void;    /* keeps its place with weight 0 */
    uint32_t reserved[13];
};
static_assert(sizeof(struct lg_slot) == 128, "two cache lines");

struct lg_window_geometry {
    uint64_t slots;            /* W */
    uint64_t batch;            /* samples per step */
    int chunk[LG_FIELD_COUNT]; /* samples per claim; 0: the field is not used in this run */
    size_t pixels_bytes;       /* per slot: 3 S S u8; 0 when unused */
    size_t tokens_bytes;       /* per slot: L i32 */
    size_t latent_bytes;       /* per slot: (2, C, h, h) fp32: mean, then logvar */
    size_t text_bytes;         /* per slot: (L, E) fp32 */
};
/* From the plan: which fields exist and how large they are. */
void lg_window_geometry_of(const lg_plan *p, struct lg_window_geometry *ret);

typedef struct lg_window {
    struct lg_window_geometry g;
    struct lg_slot *slot;                     /* (W) */
    uint8_t *pixels, *tokens, *latent, *text; /* (W, bytes per slot) or NULL */
    lg_region *region[5];
} lg_window;

/* Regions window/0/{control,pixels,tokens,latent,text}; spec's name and bytes are ignored. */
int lg_window_open(const struct lg_region_spec *spec, const struct lg_window_geometry *g,
                   lg_window **ret);
/* The same over plain memory of the caller (tests, simulation): zeroed, lg_window_bytes() long. */
size_t lg_window_bytes(const struct lg_window_geometry *g);
int lg_window_over(void *memory, const struct lg_window_geometry *g, lg_window **ret);
void lg_window_close(lg_window **w);

static inline struct lg_slot *lg_window_slot(lg_window *w, uint64_t n)
{
    return &w->slot[n % w->g.slots];
}
bool lg_window_ready(lg_window *w, lg_field f, uint64_t n);
/* Are fields `mask` (1 << field) of samples [n, n + count) ready? */
bool lg_window_range_ready(lg_window *w, unsigned mask, uint64_t n, uint64_t count);

struct lg_claim {
    uint64_t n;     /* first sample of the chunk */
    uint64_t count; /* chunk size */
};
/* Claims the earliest chunk of field f that is free, whose `needs` fields (mask) are ready, within
 * [first, min(first + W, end)). first = board's global commit * batch (0 marks: start_step *
 * batch); a chunk that begins before `first` but reaches beyond it counts. LG_ERR_BUSY: nothing to
 * claim now; LG_ERR_STOP: everything below `end` is ready or claimed by living ones and past... see
 * .c. */
int lg_window_claim(lg_window *w, lg_board *b, lg_incarnation me, lg_field f, unsigned needs,
                    uint64_t end, struct lg_claim *ret);
/* Rule 1, for one sample of a claimed chunk. */
void lg_window_publish(lg_window *w, lg_field f, uint64_t n);
