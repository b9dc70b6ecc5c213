/* The inside of the simulation, shared by its scheduler (sim.c) and its stages (sim_stages.c). */
#pragma once
#include "shm/commit.h"
#include "shm/sequence.h"
#include "shm/stamp.h"
#include "shm/window.h"
#include "stages/trainer/moments.h"
#include "tests/unit/sim.h"
#include <setjmp.h>
#include <stdio.h>

enum {
    SHARD_WORDS = 3,
    CHUNKS = SHARD_WORDS, /* of a shard's moments: a word each */
    RANKS_MAX = 4,
    WORDS_MAX = SHARD_WORDS * RANKS_MAX,
    STEPS_MAX = 12,
    STATES_MAX = STEPS_MAX + 8, /* including the first state's number */
    SLOTS_MAX = 128,
    UNITS = SHARD_WORDS, /* of scattered gradients: each has one word of every shard */
    PLACES = 2,          /* of a ring; unit u lies at u % PLACES */
    MICROS_MAX = 2,
    EXCHANGES_MAX = 3, /* of a micro-batch; they use PLACES places in turn */
    SENT_WORDS = 2,    /* from one member to another */
    ACTORS_MAX = 24,
    FIELD_WORDS = 2, /* payload words of a slot and field */
};

/* What is carried of a loss; both parts of it, or neither. */
static inline struct lg_loss_sum sim_loss(double all)
{
    return (struct lg_loss_sum){.all = all, .vb = all / 2};
}
static inline double sim_loss_of(struct lg_loss_sum sum)
{
    LG_ASSERT(sum.vb == sum.all / 2);
    return sum.all;
}

enum life { UP, KILLED, BURIED, ENLISTED };

struct world;
struct actor {
    struct world *w;
    lg_role role;
    int index;
    enum life life;
    lg_incarnation me;
    unsigned speed;       /* weight in the scheduler; 0: stopped for now, but alive */
    struct private_memory /* lost at a kill */
    {
        bool (*task)(struct actor *); /* one step; true when finished */
        int pc;
        lg_window window;
        struct lg_claim claim;
        lg_field field;
        struct lg_action act;
        uint64_t n, acc, sum[SHARD_WORDS], sum_step; /* sum_step: step + 1 of the sums */
        double norm, loss;
        int q, chunk;
        uint64_t weight, moment;            /* that the chunk is to hold */
        uint64_t micro, unit, given_before; /* scattered gradients */
        struct {                            /* an addition under way */
            bool active;
            uint64_t n, sum, *to;
            int r;
        } adding;
        struct { /* of a sequence group (sim_sequence.c) */
            int pc;
            bool entered, begun;
            uint64_t epoch, begin_with, forward_of, micro_done; /* forward_of: step + 1; 0: none */
            uint64_t weights;                                   /* what they come to */
            int x, to, from;
            int pending; /* a unit + 1 that is written, but not given */
            /* planted: words from late[later] on are yet to arrive; NULL: none are */
            uint64_t *later_to, late[SENT_WORDS];
            int later;
        } seq;
        struct { /* a piecewise write or read */
            uint64_t *to, value[WORDS_MAX];
            int count, i;
        } io;
    } p;
};

struct checkpoint {
    uint64_t weights[WORDS_MAX], moments[WORDS_MAX], ema[WORDS_MAX];
    int words; /* written so far, of both together */
};

struct record {
    uint64_t loss, norm;
};

struct world {
    bool supervised; /* set before sim_open: no process lives until a supervisor starts it */
    const struct sim_options *options;
    struct sim_result *result;
    jmp_buf failed;
    uint64_t rng, stores; /* stores: grows with every change, for the standstill alarm */
    lg_board board;
    lg_window window; /* the handle that incarnations start from */
    struct lg_window_geometry g;
    int ranks, words;
    bool scatters, gathers; /* gathers: each rank has the working weights of its own shard alone */
    int micros;
    int sequence, exchanges; /* ranks of a sequence group; of each of its micro-batches */
    bool loader_latents;     /* no VAE: loaders provide LATENT */
    unsigned fields;         /* mask of fields in use */
    /* regions */
    uint64_t weights[2][WORDS_MAX], grads[RANKS_MAX][WORDS_MAX], ema[2][WORDS_MAX];
    uint64_t optimizer_steps[2][RANKS_MAX];  /* beside the weights */
    uint64_t moments[RANKS_MAX][CHUNKS + 1]; /* [place] */
    uint64_t working[RANKS_MAX][WORDS_MAX];
    uint64_t exchanged[RANKS_MAX][PLACES][RANKS_MAX][SENT_WORDS]; /* [receiver][place][sender] */
    /* scattered gradients: of unit u, word [q] is shard q's */
    uint64_t ring[RANKS_MAX][PLACES][RANKS_MAX], sum[RANKS_MAX][2][SHARD_WORDS];
    struct lg_stamp sum_stamp[RANKS_MAX];
    uint64_t staging_weights[WORDS_MAX], staging_moments[WORDS_MAX], staging_ema[WORDS_MAX];
    struct lg_stamp weights_stamp[2][RANKS_MAX], moments_stamp[RANKS_MAX], grads_stamp[RANKS_MAX],
        working_stamp[RANKS_MAX][RANKS_MAX], /* [r][q]: of shard q in the memory of rank r */
        ema_stamp[2], staging_stamp, staged_moments_stamp;
    bool has_lost; /* memory has been lost; see sim_lose */
    struct checkpoint disk[STATES_MAX];
    uint64_t writing; /* the state whose checkpoint a living writer is in the middle of; 0: none */
    struct record record[STATES_MAX];
    /* what an undisturbed run holds */
    struct {
        uint64_t weights[WORDS_MAX], moments[WORDS_MAX], ema[WORDS_MAX]; /* of state s */
        uint64_t optimizer_steps;                                        /* of state s */
        bool skipped;                                                    /* step s */
        uint64_t grads[RANKS_MAX][WORDS_MAX];                            /* of step s */
        uint64_t micro[MICROS_MAX][RANKS_MAX][WORDS_MAX];     /* and of its micro-batches */
        double loss[RANKS_MAX], sum_squares[RANKS_MAX], norm; /* of step s */
    } want[STATES_MAX];
    struct actor actor[ACTORS_MAX];
    int n_actors;
};

/* Ends the run with a message; does not return. */
void sim_fail(struct world *w, const char *fmt, ...)
    __attribute__((format(printf, 2, 3), noreturn));
void sim_trace(struct world *w, const struct actor *a, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
uint64_t sim_random(struct world *w, uint64_t below);
static inline bool planted(const struct world *w, enum sim_plant p)
{
    return w->options->plant == p;
}

uint64_t sim_mix(uint64_t a, uint64_t b);
uint64_t sim_sample_word(lg_field f, uint64_t n, int i);
/* What an update makes of a word of the moments, given that of the summed gradient, and then of the weight. */
uint64_t sim_moment(uint64_t old, uint64_t sum, double norm, uint64_t step);
uint64_t sim_weight(uint64_t old, uint64_t moment);
/* Chunk k of a rank's moments after t optimizer steps. */
static inline uint64_t *sim_chunk(struct world *w, int rank, int k, uint64_t t)
{
    return &w->moments[rank][lg_moments_place(CHUNKS, k, t)];
}
uint64_t sim_grad(uint64_t samples, uint64_t weights, int i);

static inline struct lg_board_row *actor_row(struct actor *a)
{
    return lg_board_row(&a->w->board, a->role, a->index);
}
static inline bool planted_in(const struct actor *a, enum sim_plant p)
{
    return planted(a->w, p);
}
const char *sim_actor_name(const struct actor *a);
/* Of sample n; 0 without buckets. */
enum { SHAPES = 2 };
uint32_t sim_bucket(const struct world *w, uint64_t n);
uint64_t sim_end(struct world *w); /* first sample that the run does not need */
/* A world from the options' seed. */
void sim_open(struct world *w, const struct sim_options *options, struct sim_result *ret);
/* One more instance, which nobody fills yet. NULL: there is no room. */
struct actor *sim_add_actor(struct world *w, lg_role role, int index);
/* The next to step, by speed; NULL: everybody stands still. */
struct actor *sim_pick(struct world *w);
/* Somebody becomes faster, slower or stands still (but lives); everybody at once now and then. */
void sim_change_speeds(struct world *w);
/* One piece of memory is lost with all who map it, and there is new memory in its place. */
void sim_lose(struct world *w);
/* Compares with the undisturbed run. */
void sim_check_end(struct world *w);
/* A new process: nothing in its private memory. */
void sim_actor_begin(struct actor *a);
/* Its process has ended: everything private is lost. in_order: it chose to, so it must not be in the
 * middle of a checkpoint. */
void sim_actor_end(struct actor *a, bool in_order);
/* One step of a living actor. */
void sim_actor_step(struct actor *a);

/* For those who write tasks. A task is a function that continues where it left off: STEP() ends one step of the
 * simulation, and a kill may come there. No local variable lives across a STEP(). */
#define BEGIN(a)                                                                                   \
    switch ((a)->p.pc) {                                                                           \
    case 0:
#define STEP(a)                                                                                    \
    do {                                                                                           \
        (a)->p.pc = __LINE__;                                                                      \
        return false;                                                                              \
    case __LINE__:;                                                                                \
    } while (0)
#define END(a)                                                                                     \
    }                                                                                              \
    (a)->p.pc = 0;                                                                                 \
    return true

#define GARBAGE UINT64_C(0xdeadbeefdeadbeef)

/* Writing: garbage over everything first, as a kernel that accumulates would, then word by word. */
void begin_write(struct actor *a, uint64_t *to, const uint64_t *value, int count);
bool write_more(struct actor *a);
/* Checks one word that was read, and folds it into the reader's accumulator. */
void read_word(struct actor *a, const char *what, uint64_t of, uint64_t got, uint64_t want);
/* Is that not what lies there of which the mark speaks? Then the run is over for all. */
void expect(struct actor *a, const struct lg_stamp *s, uint64_t state, enum sim_plant unseen);
void expect_states(struct actor *a, uint64_t state, enum sim_plant unseen);
void stamp(struct actor *a, struct lg_stamp *s, uint64_t state);
void mark(struct actor *a, const char *what);
/* Sample i of a rank's share of a step. */
uint64_t share(const struct world *w, const struct actor *a, uint64_t step, uint64_t i);
void read_share(struct actor *a, uint64_t step, uint64_t i, int word);
/* How many it has, and those of its group with it. */
static inline uint64_t share_count(const struct world *w)
{
    return w->g.batch / (uint64_t)(w->ranks / w->sequence);
}
/* False: rank q has written its shard of state s of the working weights; else the write begins. */
bool begin_make(struct actor *a, int q, uint64_t s);

/* Scattered gradients (sim_scatter.c): tasks, and the sum of a step into a->p.sum. */
bool sim_scatter_forward(struct actor *a);
bool sim_scatter_add(struct actor *a);
void sim_scatter_sum(struct actor *a, uint64_t step);
/* And their parts, for FORWARD of a sequence group. */
uint64_t sim_scatter_units(const struct world *w); /* of a step */
bool sim_scatter_add_some(struct actor *a, uint64_t step);
bool sim_scatter_is_free(struct actor *a, uint64_t step);
bool sim_scatter_make_working(struct actor *a, uint64_t step);
uint64_t sim_scatter_working(const struct actor *a, int i);

/* Sequence groups (sim_sequence.c). */
bool sim_sequence_enter(struct actor *a); /* false: that was done before */
bool sim_sequence_forward(struct actor *a);
/* A rank whose group has made its gradients, but which has not marked its own; -1: none. */
int sim_sequence_made(struct world *w);
/* Of what a rank's gradient of unit u is made, when its samples and weights come to `samples`. */
uint64_t sim_sequence_want(const struct world *w, uint64_t step, uint64_t micro, int rank, int unit,
                           uint64_t samples);
