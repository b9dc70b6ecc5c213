/* The window: W slots for samples in flight. Sample n lives in slot n mod W.
 *
 * Fields of a slot: SOURCE (pixels, tokens, label ... by a loader), LATENT (by a VAE instance, or
 * by the loader when the data set holds latents), TEXT + k (the plan's text k, by an instance of its encoder). Each is
 * claimed and published by itself, so no encoder waits for another. Work is claimed by
 * aligned chunks: chunk k of a field covers samples [k c, (k + 1) c), always, so that a sample has
 * the same place in its batch whoever encodes it. The claim word of a chunk is that of its first
 * slot. W is a multiple of every chunk and of the batch.
 *
 * Write F for the first sample of the step after the global commit: all before it are finished.
 *
 * Access rules:
 *  1. ready[f] >= n + 1: field f of sample n is complete. Stored (= n + 1) with release by the
 *     claimant of n's chunk, after the payload and a full fence; read with acquire before the
 *     payload. It never decreases: n + 1 is followed by n + W + 1.
 *  2. claim[f] = incarnation << 32 | lap + 1, lap = n / W. Taken by compare-and-swap from a
 *     value of an older lap, or of the same lap and a dead incarnation (board.h, rule 3). Nobody
 *     clears it. It ends by ready or by death: a process that cannot finish a chunk exits.
 *  3. The claimant of n may write slot n only while n < F + W: every rank has then committed the
 *     step that read n - W. F only grows, so what was true at the claim stays true. A chunk is
 *     claimed when this holds for all of it, also for places that rule 5 leaves empty: only then
 *     is the chunk W before it, whose claim word it takes over, finished as a whole.
 *  4. Nobody looks at a payload before its ready word, nor after the step of n is globally
 *     committed. An encoder reads and writes only the samples of its chunk that it has to fill.
 *  5. To fill: those n of the chunk with F <= n < end whose ready word is not set, as seen
 *     after the claim (lg_window_wanted). The others are left alone: a ready sample may be read by a rank at
 *     this moment, a finished one's slot may already belong to n + W, one beyond `end` is never
 *     asked for. An encoder still runs the whole chunk: what stands in the other places is zero.
 *  6. A claimant that dies before ready leaves a half-written payload: rule 1 hides it, rule 2
 *     passes the chunk on, and the next one writes the same bytes. If it dies between two ready
 *     words of a chunk, rule 5 keeps its successor off the samples that are ready.
 *  7. A loader that provides LATENT itself fills it under its SOURCE claim and publishes LATENT
 *     before SOURCE; readers of LATENT wait for SOURCE too, so a successor may fill it again.
 *  8. No standstill: the step at F needs the chunks that overlap [F, F + batch), and the SOURCE
 *     chunks under them. Let M be the least multiple of W that is >= F + batch: no such chunk
 *     crosses it, as W is a multiple of every chunk; and M <= F + W, as M - W < F + batch and both
 *     are multiples of the batch. So rule 3 lets all of them be claimed.
 *  9. With buckets a sample's shape stands in its slot (`bucket`), a part of SOURCE's payload: whoever reads or writes
 *     pixels or latents of n has seen SOURCE of n, or claims it. All of a micro-batch have the same one; a chunk of
 *     LATENT never crosses a micro-batch. An absent sample is published like any other; where it has no memory
 *     (lg_window_has_place) nothing is read or written for it.
 * 10. Payloads are never made anew under control words that speak of them: once a ready word of a field is
 *     set, its regions must be there (LG_ERR_NOTFOUND); after a rank's first commit all of them must. New
 *     control words alone would be harmless: nothing is ready, and samples from F on are made again.
 */
#pragma once
#include "shm/board.h"
#include "shm/region.h"

typedef enum lg_field {
    LG_FIELD_SOURCE,
    LG_FIELD_LATENT,
    LG_FIELD_TEXT, /* + k */
    LG_FIELD_COUNT = LG_FIELD_TEXT + LG_TEXTS_MAX
} lg_field;
static inline lg_field lg_field_text(int k)
{
    return (lg_field)(LG_FIELD_TEXT + k);
}

struct lg_slot {
    _Atomic(uint64_t) ready[LG_FIELD_COUNT];
    _Atomic(uint64_t) claim[LG_FIELD_COUNT];
    /* SOURCE's small payload */
    uint64_t item;     /* index in the data set */
    uint64_t key_hash; /* of the sample's key */
    int32_t label;
    int32_t text_length[LG_TEXTS_MAX]; /* number of tokens, >= 1 */
    uint32_t is_void;                  /* keeps its place with weight 0 */
    uint32_t is_absent; /* no item stands here (config/buckets.h): weight 0, and no void */
    uint32_t bucket;    /* of the plan; the same throughout a micro-batch of all ranks */
    /* of the picture as it was stored, in pixels; without one, of what latents stand for */
    uint32_t original_height, original_width;
    /* of what was cut out of it once it had been scaled: its edges, in pixels of the sample, 0 of latents */
    uint32_t crop_top, crop_left;
    uint32_t reserved[8];
};
static_assert(sizeof(struct lg_slot) == 192, "three cache lines");

/* Payload of a sample of one bucket, in bytes. */
struct lg_window_shape {
    int rows;            /* samples of it in a micro-batch */
    size_t pixels_bytes; /* (3, F, H, W) u8 */
    size_t half_bytes;   /* (C, f, h, w): the mean, or the logvar */
};

/* Payload of one text of a sample, in bytes. */
struct lg_window_text {
    size_t tokens_bytes; /* (L) i32, of SOURCE */
    size_t states_bytes; /* (L, E) of the plan's elements; 0: none is wanted */
    size_t pooled_bytes; /* (P) of the plan's elements; 0: none is wanted */
    /* what its regions are called: window/0/tokens, window/<rank>/text, with ".NAME" behind them where there are several */
    char name[32];
};

struct lg_window_geometry {
    uint64_t slots;            /* W */
    uint64_t batch;            /* samples per step, of this host */
    int chunk[LG_FIELD_COUNT]; /* samples per claim; 0: the field is not used in this run */
    size_t pixels_bytes;       /* per slot: (3, F, H, W) u8; 0 when unused */
    size_t latent_bytes; /* per slot: (2, C, f, h, w) of the plan's elements: mean and logvar; fp32
                          * where a loader provides them */
    struct lg_window_text text[LG_TEXTS_MAX]; /* per slot; all 0: there is none */
    int ranks; /* trainer ranks, those of a sequence group as one; 0: 1. It divides batch */
    /* With buckets: pixels and latents of a micro-batch lie packed at its beginning, so that it is one tensor of its
     * bucket's shape; the bytes per slot above are then a share of what the largest micro-batch takes. n_shapes 0: all
     * samples are alike. */
    int n_shapes;
    uint64_t micro; /* places of a micro-batch; it divides a rank's share of the batch */
    struct lg_window_shape shape[LG_BUCKETS_MAX];
};
/* From the plan: which fields exist and how large they are. */
void lg_window_geometry_of(const lg_plan *p, struct lg_window_geometry *ret);
/* LG_ERR_CONFIG when W is not a multiple of batch and chunks, or so small that the run could come
 * to a standstill (rule 8). The plan asks this. */
int lg_window_check(const struct lg_window_geometry *g);

enum { LG_WINDOW_REGIONS_MAX = (1 + LG_TEXTS_MAX) * (1 + LG_INSTANCES_MAX) + 1 };

/* A process's own view; not for two threads at a time. Latents and text states lie with the rank
 * that trains on them, W / ranks places each: a rank's share of a batch is contiguous there, so that
 * it can be used where it lies. */
typedef struct lg_window {
    struct lg_window_geometry g;
    struct lg_slot *slot;          /* (W) */
    uint8_t *pixels;               /* (W, bytes per slot) or NULL */
    uint8_t *tokens[LG_TEXTS_MAX]; /* likewise, of each text */
    uint8_t
        *latent[LG_INSTANCES_MAX]; /* per rank: means of all its places, then logvars; or NULL */
    /* of each text per rank: states of all its places, then pooled values; or NULL */
    uint8_t *text[LG_TEXTS_MAX][LG_INSTANCES_MAX];
    lg_region *region[LG_WINDOW_REGIONS_MAX];
    uint64_t done[LG_FIELD_COUNT]; /* chunks that begin below it are ready: a memory of the scan */
} lg_window;

/* Regions window/0/{control,pixels,tokens...} and window/<rank>/{latent,text...}; spec's name, bytes and
 * place are ignored; is_made is for all of them. */
struct lg_window_places {
    const struct lg_region_place *latent, *text; /* (ranks) each, or NULL: the host */
    bool skip_latent, skip_text;                 /* this process does not map them */
};
int lg_window_open(const struct lg_region_spec *spec, const struct lg_window_geometry *g,
                   const struct lg_window_places *places, lg_window **ret);
/* The same over plain memory of the caller (tests, simulation): zeroed, lg_window_bytes() long. */
size_t lg_window_bytes(const struct lg_window_geometry *g);
int lg_window_over(void *memory, const struct lg_window_geometry *g, lg_window **ret);
void lg_window_close(lg_window **w);

static inline struct lg_slot *lg_window_slot(lg_window *w, uint64_t n)
{
    return &w->slot[n % w->g.slots];
}
/* The rank that trains on n, and n's place in the rank's regions. */
static inline int lg_window_rank(const lg_window *w, uint64_t n)
{
    return (int)(n % w->g.batch / (w->g.batch / (uint64_t)w->g.ranks));
}
static inline size_t lg_window_place(const lg_window *w, uint64_t n)
{
    uint64_t share = w->g.batch / (uint64_t)w->g.ranks;
    return n % w->g.slots / w->g.batch * share + n % share;
}
/* With buckets: the first place of n's micro-batch. */
static inline uint64_t lg_window_micro(const lg_window *w, uint64_t n)
{
    return n / w->g.micro * w->g.micro;
}
/* The shape of sample n, whose SOURCE is ready, or its claimant has set the bucket. */
static inline struct lg_window_shape lg_window_shape(const lg_window *w, uint64_t n)
{
    if (w->g.n_shapes) return w->g.shape[w->slot[n % w->g.slots].bucket];
    return (struct lg_window_shape){
        .rows = INT32_MAX, .pixels_bytes = w->g.pixels_bytes, .half_bytes = w->g.latent_bytes / 2};
}
/* Is there memory for pixels and latents of sample n? Only of an absent one there may be none. */
static inline bool lg_window_has_place(const lg_window *w, uint64_t n)
{
    return !w->g.n_shapes || n % w->g.micro < (uint64_t)lg_window_shape(w, n).rows;
}
/* Payloads of sample n. Those of the next n follow without a gap, as far as lg_window_run says. */
static inline uint8_t *lg_window_pixels(const lg_window *w, uint64_t n)
{
    if (!w->g.n_shapes) return w->pixels + n % w->g.slots * w->g.pixels_bytes;
    const uint64_t first = lg_window_micro(w, n);
    return w->pixels + first % w->g.slots * w->g.pixels_bytes +
           (n - first) * lg_window_shape(w, n).pixels_bytes;
}
static inline uint8_t *lg_window_tokens(const lg_window *w, int text, uint64_t n)
{
    return w->tokens[text] + n % w->g.slots * w->g.text[text].tokens_bytes;
}
static inline uint8_t *lg_window_mean(const lg_window *w, uint64_t n)
{
    const uint64_t first = w->g.n_shapes ? lg_window_micro(w, n) : n;
    return w->latent[lg_window_rank(w, n)] + lg_window_place(w, first) * (w->g.latent_bytes / 2) +
           (n - first) * lg_window_shape(w, n).half_bytes;
}
static inline uint8_t *lg_window_logvar(const lg_window *w, uint64_t n)
{
    return lg_window_mean(w, n) + w->g.slots / (uint64_t)w->g.ranks * (w->g.latent_bytes / 2);
}
static inline uint8_t *lg_window_states(const lg_window *w, int text, uint64_t n)
{
    return w->text[text][lg_window_rank(w, n)] +
           lg_window_place(w, n) * w->g.text[text].states_bytes;
}
static inline uint8_t *lg_window_pooled(const lg_window *w, int text, uint64_t n)
{
    const struct lg_window_text *t = &w->g.text[text];
    return w->text[text][lg_window_rank(w, n)] +
           w->g.slots / (uint64_t)w->g.ranks * t->states_bytes +
           lg_window_place(w, n) * t->pooled_bytes;
}
/* How many of the samples [n, to) lie behind each other, n < to: up to the end of a rank's share, with buckets of a
 * micro-batch. */
static inline uint64_t lg_window_run(const lg_window *w, uint64_t n, uint64_t to)
{
    uint64_t share = w->g.n_shapes ? w->g.micro : w->g.batch / (uint64_t)w->g.ranks;
    return LG_MIN(to, (n / share + 1) * share) - n;
}
static inline bool lg_window_ready(lg_window *w, lg_field f, uint64_t n)
{
    return atomic_load_explicit(&lg_window_slot(w, n)->ready[f], memory_order_acquire) >= n + 1;
}
/* Are fields `mask` (1 << field) of samples [n, n + count) ready? */
bool lg_window_range_ready(lg_window *w, unsigned mask, uint64_t n, uint64_t count);
/* F: first sample of the step after the global commit (0 marks: of start_step). Acquire. */
uint64_t lg_window_first(lg_board *b);

struct lg_claim {
    uint64_t n;        /* first sample of the chunk; sample i of the batch is n + i */
    uint64_t count;    /* chunk size */
    uint64_t from, to; /* [from, to): its samples that belong to the run and are not finished */
};
/* Claims the earliest chunk of field f that is free (rule 2), may be written (rule 3) and whose
 * samples to fill have all fields of `needs` (mask). `end`: first sample that the run does not
 * need; it may become smaller during a run, never larger. At most W / chunk looks.
 *
 * 0: it is yours until every sample of it is ready. LG_ERR_BUSY: nothing to claim now (wait for a
 * wake-up, then ask again). LG_ERR_STOP: every sample below `end` is ready, nothing will ever be
 * left to claim. Both without an error text: they are no failures. */
int lg_window_claim(lg_window *w, lg_board *b, lg_incarnation me, lg_field f, unsigned needs,
                    uint64_t end, struct lg_claim *ret);
/* Rule 5: is sample n of a claimed chunk the claimant's to fill? */
static inline bool lg_window_wanted(lg_window *w, const struct lg_claim *c, lg_field f, uint64_t n)
{
    return n >= c->from && n < c->to && !lg_window_ready(w, f, n);
}
/* Where no sample that is to be filled has memory for pixels and latents (rule 9): publishes them and says so. Nothing of
 * such a sample is ever read, of its text neither. */
bool lg_window_publish_absent(lg_window *w, lg_field f, const struct lg_claim *c);
/* Rule 1, for one sample that lg_window_wanted(). */
void lg_window_publish(lg_window *w, lg_field f, uint64_t n);
