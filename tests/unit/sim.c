/* The simulation's world: geometry from a seed, the undisturbed run, the scheduler, the kills, the
 * supervisor, and the final comparison. Single-threaded; memory is static, so no run pays for
 * allocation. */
#include "tests/unit/sim_world.h"
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum {
    STEPS_LIMIT = 400000,     /* of the scheduler, for one run */
    STANDSTILL_STEPS = 30000, /* without a store to shared memory */
    SPEED_MAX = 12,
};

const char *sim_plant_name(enum sim_plant p)
{
    static const char *const name[] = {
        "HONEST",
#define SIM_PLANT(name, what) #name,
#include "tests/unit/sim_plants.def"
#undef SIM_PLANT
    };
    return name[p];
}

const char *sim_plant_what(enum sim_plant p)
{
    static const char *const text[] = {
        "nothing",
#define SIM_PLANT(name, what) what,
#include "tests/unit/sim_plants.def"
#undef SIM_PLANT
    };
    return text[p];
}

void sim_fail(struct world *w, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(w->result->why, sizeof w->result->why, fmt, ap);
    va_end(ap);
    w->result->failed = true;
    longjmp(w->failed, 1);
}

const char *sim_actor_name(const struct actor *a)
{
    static char text[4][32];
    static int k;
    char *at = text[k++ % 4];
    snprintf(at, sizeof text[0], "%s.%d", lg_role_name(a->role), a->index);
    return at;
}

void sim_trace(struct world *w, const struct actor *a, const char *fmt, ...)
{
    if (!w->options->trace) return;
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%7llu %-10s ", (unsigned long long)w->result->steps, sim_actor_name(a));
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
}

uint64_t sim_mix(uint64_t a, uint64_t b)
{
    uint64_t x = (a ^ (b + UINT64_C(0x9e3779b97f4a7c15))) * UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 29;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 32;
}

uint64_t sim_random(struct world *w, uint64_t below)
{
    w->rng += UINT64_C(0x9e3779b97f4a7c15);
    return sim_mix(w->rng, 1) % below;
}

uint64_t sim_sample_word(lg_field f, uint64_t n, int i)
{
    return sim_mix(n, (uint64_t)f * 16 + (uint64_t)i + 1);
}

uint64_t sim_grad(uint64_t samples, uint64_t weights, int i)
{
    return sim_mix(sim_mix(samples, weights), (uint64_t)i);
}

uint64_t sim_moment(uint64_t old, uint64_t sum, double norm, uint64_t step)
{
    return sim_mix(sim_mix(old, sum), (uint64_t)norm + step);
}

uint64_t sim_weight(uint64_t old, uint64_t moment)
{
    return sim_mix(old, moment);
}

uint64_t sim_end(struct world *w)
{
    uint64_t final = w->board.s->max_steps;
    lg_commit_final(&w->board, &final);
    return final * w->g.batch;
}

/* The undisturbed run: the same arithmetic, one after the other. */

/* What the samples [from, to) of a rank's share come to. */
static uint64_t want_samples(struct world *w, uint64_t s, int r, uint64_t from, uint64_t to)
{
    uint64_t acc = 0, count = share_count(w);
    for (uint64_t k = from; k < to; k++) {
        uint64_t n = s * w->g.batch + (uint64_t)(r / w->sequence) * count + k;
        for (int i = 0; i < FIELD_WORDS; i++) {
            acc = sim_mix(acc, sim_sample_word(LG_FIELD_LATENT, n, i));
            for (int f = LG_FIELD_TEXT; f < LG_FIELD_COUNT; f++)
                if (w->fields >> f & 1) acc = sim_mix(acc, sim_sample_word((lg_field)f, n, i));
        }
        acc = sim_mix(acc, sim_mix(n, 99));
    }
    return acc;
}

static void want_step(struct world *w, uint64_t s)
{
    uint64_t weights = 0, micro = share_count(w) / (uint64_t)w->micros;
    for (int i = 0; i < w->words; i++) weights = sim_mix(weights, w->want[s].weights[i]);
    for (int r = 0; r < w->ranks; r++)
        for (int m = 0; m < w->micros; m++) {
            uint64_t acc = want_samples(w, s, r, (uint64_t)m * micro, (uint64_t)(m + 1) * micro);
            uint64_t of[UNITS]; /* what the gradients of a unit are made of */
            for (int u = 0; u < UNITS; u++) of[u] = sim_sequence_want(w, s, (uint64_t)m, r, u, acc);
            w->want[s].loss[r] += (double)(of[UNITS - 1] & 0xffff);
            for (int i = 0; i < w->words; i++) {
                w->want[s].micro[m][r][i] = sim_grad(of[i % UNITS], weights, i);
                w->want[s].grads[r][i] += w->want[s].micro[m][r][i];
            }
        }
    uint64_t sum[WORDS_MAX] = {0};
    w->want[s].norm = 0;
    for (int i = 0; i < w->words; i++) {
        for (int r = 0; r < w->ranks; r++) sum[i] += w->want[s].grads[r][i];
        w->want[s].norm += (double)(sum[i] & 0xffff);
    }
    w->want[s].skipped = sim_mix(w->options->seed, s + 1000) % 4 == 0;
    w->want[s + 1].optimizer_steps = w->want[s].optimizer_steps + !w->want[s].skipped;
    for (int i = 0; i < w->words; i++) {
        uint64_t moment = w->want[s].moments[i], weight = w->want[s].weights[i];
        if (!w->want[s].skipped) {
            moment = sim_moment(moment, sum[i], w->want[s].norm, s);
            weight = sim_weight(weight, moment);
        }
        w->want[s + 1].moments[i] = moment;
        w->want[s + 1].weights[i] = weight;
        w->want[s + 1].ema[i] = sim_mix(w->want[s].ema[i], weight);
    }
}

static void want_all(struct world *w)
{
    uint64_t s = w->board.s->start_step;
    w->want[s].optimizer_steps = sim_mix(w->options->seed, 3) % (2 * CHUNKS);
    for (int i = 0; i < w->words; i++) {
        w->want[s].weights[i] = w->want[s].ema[i] = sim_mix(w->options->seed, (uint64_t)i + 7);
        w->want[s].moments[i] = sim_mix(w->options->seed, (uint64_t)i + 77);
    }
    for (; s < w->board.s->max_steps; s++) want_step(w, s);
}

/* Geometry. */

static void enlist(struct world *w, struct actor *a)
{
    a->me = lg_board_enlist(&w->board, a->role, a->index);
    a->life = ENLISTED;
}

void sim_actor_begin(struct actor *a)
{
    memset(&a->p, 0, sizeof a->p);
    a->p.window = a->w->window;
    a->life = UP;
}

void sim_actor_end(struct actor *a, bool in_order)
{
    struct world *w = a->w;
    a->life = KILLED;
    memset(&a->p, 0xdd, sizeof a->p);
    if (a->role != LG_ROLE_ckpt || !w->writing) return;
    if (in_order && !atomic_load(&w->board.s->quit))
        sim_fail(w, "%s leaves in the middle of checkpoint %llu", sim_actor_name(a),
                 (unsigned long long)w->writing);
    w->writing = 0;
}

/* What lg_board_join() does, without a process: a life word without a pid counts by its state. */
static void join(struct world *w, struct actor *a)
{
    struct lg_board_row *row = actor_row(a);
    uint64_t life = atomic_load(&row->life);
    LG_ASSERT((lg_incarnation)(life >> 8) == a->me && (life & 0xff) == LG_LIFE_STARTING);
    atomic_store(&row->life, (uint64_t)a->me << 8 | LG_LIFE_RUNNING);
    sim_actor_begin(a);
}

struct actor *sim_add_actor(struct world *w, lg_role role, int index)
{
    if (w->n_actors == ACTORS_MAX) return NULL;
    struct actor *a = &w->actor[w->n_actors++];
    *a = (struct actor){
        .w = w, .role = role, .index = index, .speed = SPEED_MAX / 2, .life = BURIED};
    return a;
}

static void add_actors(struct world *w, lg_role role, int count)
{
    for (int i = 0; i < count; i++) {
        struct actor *a = sim_add_actor(w, role, i);
        LG_ASSERT(a);
        if (w->supervised) continue;
        enlist(w, a);
        join(w, a);
    }
}

/* Half of those that can be are sequence groups, of two or three ranks; two of them are two groups at times. */
static void draw_ranks(struct world *w)
{
    w->ranks = 1 + (int)sim_random(w, RANKS_MAX - 1);
    w->sequence = w->ranks > 1 && sim_random(w, 2) ? w->ranks : 1;
    if (w->sequence == 2 && sim_random(w, 2)) w->ranks = 2 * w->sequence;
    w->exchanges = 2 + (int)sim_random(w, EXCHANGES_MAX - 1);
}

/* A third of the runs have buckets: two shapes, one twice as large. Not drawn, so that all others stay what they were. */
static void add_shapes(struct world *w)
{
    struct lg_window_geometry *g = &w->g;
    const uint64_t micro = share_count(w) / (uint64_t)w->micros;
    if (sim_mix(w->options->seed, 77) % 3 || w->loader_latents) return;
    if (micro % (uint64_t)g->chunk[LG_FIELD_LATENT]) return; /* no chunk crosses a micro-batch */
    g->n_shapes = SHAPES;
    g->micro = micro;
    for (int k = 0; k < SHAPES; k++) {
        const size_t bytes = (size_t)(k + 1) * FIELD_WORDS * sizeof(uint64_t);
        g->shape[k] = (struct lg_window_shape){(int)micro, bytes, bytes};
    }
    g->pixels_bytes *= SHAPES;
    g->latent_bytes *= SHAPES;
}

/* The same for the micro-batches of all ranks that begin together. */
uint32_t sim_bucket(const struct world *w, uint64_t n)
{
    if (!w->g.n_shapes) return 0;
    const uint64_t share = share_count(w), micros = share / w->g.micro;
    return (uint32_t)(sim_mix(n / w->g.batch * micros + n % share / w->g.micro, 55) % SHAPES);
}

/* A third of the runs have more texts than one, each with chunks of its own, one of pooled values alone. Not drawn
 * either. */
static void add_texts(struct world *w)
{
    static const int chunk[] = {4, 1, 6};
    const uint64_t draw = sim_mix(w->options->seed, 78);
    const int more = (int)(draw >> 8) % 3 + 1;
    if (draw % 3 || w->supervised || !(w->fields >> LG_FIELD_TEXT & 1)) return;
    for (int k = 1; k <= more; k++) {
        const size_t bytes = FIELD_WORDS * sizeof(uint64_t);
        w->g.text[k] = k == 2 ? (struct lg_window_text){.pooled_bytes = bytes}
                              : (struct lg_window_text){.states_bytes = bytes};
        w->g.chunk[lg_field_text(k)] = chunk[k - 1];
        w->fields |= 1u << lg_field_text(k);
    }
}

static void draw_geometry(struct world *w)
{
    static const int chunk[] = {1, 2, 3, 4, 6, 8, 5};
    static uint64_t memory[SLOTS_MAX * 256];
    for (;;) {
        struct lg_window_geometry *g = &w->g;
        draw_ranks(w);
        const int groups = w->ranks / w->sequence;
        *g = (struct lg_window_geometry){.batch = (uint64_t)groups * (1 + sim_random(w, 4)),
                                         .ranks = groups};
        for (int f = 0; f <= LG_FIELD_TEXT; f++)
            g->chunk[f] = chunk[sim_random(w, LG_ARRAY_LEN(chunk))];
        w->scatters = sim_random(w, 3) == 0;
        w->gathers = w->scatters && sim_random(w, 2);
        w->micros =
            (w->scatters || w->sequence > 1) && share_count(w) % MICROS_MAX == 0 ? MICROS_MAX : 1;
        w->loader_latents = sim_random(w, 5) == 0;
        w->fields = 7;
        if (w->loader_latents) g->chunk[LG_FIELD_LATENT] = g->chunk[LG_FIELD_SOURCE];
        if (sim_random(w, 4) == 0) {
            g->chunk[LG_FIELD_TEXT] = 0;
            w->fields = 3;
        }
        g->pixels_bytes = g->text[0].states_bytes = FIELD_WORDS * sizeof(uint64_t);
        g->latent_bytes = 2 * g->pixels_bytes;
        add_texts(w);
        add_shapes(w);
        g->slots = g->batch * (1 + sim_random(w, 8));
        lg_window *window;
        if (g->slots > SLOTS_MAX || lg_window_bytes(g) > sizeof memory) continue;
        if (lg_window_over(memory, g, &window) < 0) continue;
        memset(memory, 0, lg_window_bytes(g));
        w->window = *window;
        lg_window_close(&window);
        return;
    }
}

void sim_open(struct world *w, const struct sim_options *options, struct sim_result *ret)
{
    static struct lg_board_shared shared;
    struct lg_board_shared *s = &shared;
    bool supervised = w->supervised;
    memset(s, 0, sizeof *s);
    memset(w, 0, sizeof *w);
    memset(ret, 0, sizeof *ret);
    w->supervised = supervised;
    w->options = options;
    w->result = ret;
    w->rng = options->seed * UINT64_C(0x2545f4914f6cdd1d);
    w->board = (lg_board){.s = s, .fd = -1};
    draw_geometry(w);
    w->words = w->ranks * SHARD_WORDS;
    s->batch = w->g.batch;
    s->ranks = w->ranks;
    s->sequence = w->sequence;
    s->scatters = w->scatters;
    s->has_ema = sim_random(w, 6) > 0;
    s->start_step = sim_random(w, 6);
    s->max_steps = s->start_step + 1 + sim_random(w, STEPS_MAX);
    s->checkpoint_every = (int64_t)sim_random(w, 4);
    atomic_store(&s->next_counter, 1);
    want_all(w);
    memset(w->weights, 0xee, sizeof w->weights);
    memset(w->moments, 0xee, sizeof w->moments);
    memset(w->ema, 0xee, sizeof w->ema);
    add_actors(w, LG_ROLE_loader, 1 + (int)sim_random(w, 2));
    if (!w->loader_latents) add_actors(w, LG_ROLE_vae, 1 + (int)sim_random(w, 2));
    if (w->g.chunk[LG_FIELD_TEXT]) add_actors(w, LG_ROLE_text, 1 + (int)sim_random(w, 2));
    for (int k = 1; k < LG_TEXTS_MAX; k++) /* text k is that of role text + k */
        if (w->g.chunk[lg_field_text(k)]) add_actors(w, LG_ROLE_text + k, 1 + k % 2);
    add_actors(w, LG_ROLE_trainer, w->ranks);
    if (s->has_ema) add_actors(w, LG_ROLE_ema, 1);
    add_actors(w, LG_ROLE_ckpt, 1);
}

/* The scheduler. */

struct chances {
    uint64_t kill_every, kills_left, speed_every, drain_at, lose_at;
    enum {
        LOSE_AT_ONCE,
        LOSE_IN_UPDATE,
        LOSE_BETWEEN_HALVES,
        LOSE_WHEN_MADE,
        LOSE_WHENS
    } lose_when;
};

/* Memory is lost from lose_at on when some chunks of a rank's update count, when half a snapshot is staged, or when a
 * sequence group has made gradients that are not marked: moments that a draw alone would seldom hit. */
static bool is_time_to_lose(struct world *w, const struct chances *c)
{
    const struct lg_board_row *row = lg_board_row(&w->board, LG_ROLE_ckpt, 0);
    if (w->result->steps < c->lose_at || w->has_lost) return false;
    if (c->lose_when == LOSE_AT_ONCE) return true;
    if (c->lose_when == LOSE_BETWEEN_HALVES)
        return atomic_load(&row->staged_moments) > atomic_load(&row->staged);
    if (c->lose_when == LOSE_WHEN_MADE && w->sequence > 1) return sim_sequence_made(w) >= 0;
    for (int r = 0; r < w->ranks; r++)
        if (atomic_load(&w->moments_stamp[r].of) >> LG_STAMP_PARTS_SHIFT) return true;
    return false;
}

struct actor *sim_pick(struct world *w)
{
    unsigned sum = 0;
    for (int i = 0; i < w->n_actors; i++) sum += w->actor[i].speed;
    if (!sum) return NULL;
    uint64_t at = sim_random(w, sum);
    for (int i = 0; i < w->n_actors; i++) {
        if (at < w->actor[i].speed) return &w->actor[i];
        at -= w->actor[i].speed;
    }
    return NULL;
}

void sim_change_speeds(struct world *w)
{
    bool all = sim_random(w, 4) == 0;
    int one = (int)sim_random(w, (uint64_t)w->n_actors);
    for (int i = 0; i < w->n_actors; i++)
        if (all || i == one) w->actor[i].speed = (unsigned)sim_random(w, SPEED_MAX + 1);
}

static void kill_one(struct world *w, struct actor *a)
{
    sim_actor_end(a, false);
    w->result->kills++;
    sim_trace(w, a, "is killed");
}

/* index -1: all of the role. */
static void kill_role(struct world *w, lg_role role, int index)
{
    for (int i = 0; i < w->n_actors; i++) {
        struct actor *a = &w->actor[i];
        if (a->role == role && (index < 0 || a->index == index) && a->life == UP) kill_one(w, a);
    }
}

/* New memory is zero, and so is its stamp. */
static void forget(uint64_t *words, int count, struct lg_stamp *stamp)
{
    memset(words, 0, (size_t)count * sizeof *words);
    atomic_store(&stamp->of, LG_MARK_NONE);
}

void sim_lose(struct world *w)
{
    enum { WEIGHTS, MOMENTS, GRADS, WORKING, AVERAGE, STAGING, SUM, KINDS };
    uint64_t what = sim_random(w, w->scatters ? KINDS : SUM), side = sim_random(w, 2);
    int r = (int)sim_random(w, (uint64_t)w->ranks);
    if (sim_sequence_made(w) >= 0) what = GRADS, r = sim_sequence_made(w);
    w->has_lost = true;
    w->result->losses++;
    if (what == WEIGHTS || what == GRADS || what == WORKING || what == SUM)
        kill_role(w, LG_ROLE_trainer, -1);
    if (what == MOMENTS) kill_role(w, LG_ROLE_trainer, r); /* the others go on */
    if (what != GRADS && what != WORKING && what != SUM) kill_role(w, LG_ROLE_ckpt, -1);
    if (what == WEIGHTS || what == AVERAGE) kill_role(w, LG_ROLE_ema, -1);
    switch (what) {
    case WEIGHTS:
        forget(&w->weights[side][r * SHARD_WORDS], SHARD_WORDS, &w->weights_stamp[side][r]);
        w->optimizer_steps[side][r] = 0;
        break;
    case MOMENTS:
        forget(w->moments[r], CHUNKS + 1, &w->moments_stamp[r]);
        break;
    case GRADS:
        forget(w->grads[r], w->words, &w->grads_stamp[r]);
        memset(w->ring[r], 0, sizeof w->ring[r]);
        break;
    case WORKING: /* is made from the state again, unless it is gathered: the run goes on */
        for (int q = 0; q < w->ranks; q++)
            forget(&w->working[r][q * SHARD_WORDS], SHARD_WORDS, &w->working_stamp[r][q]);
        break;
    case AVERAGE:
        forget(w->ema[side], w->words, &w->ema_stamp[side]);
        break;
    case SUM:
        forget(w->sum[r][0], 2 * SHARD_WORDS, &w->sum_stamp[r]);
        break;
    default:
        forget(w->staging_weights, w->words, &w->staging_stamp);
        forget(w->staging_moments, w->words, &w->staged_moments_stamp);
        forget(w->staging_ema, w->words, &w->staging_stamp);
        break;
    }
}

static void step(struct world *w, struct actor *a)
{
    switch (a->life) {
    case UP:
        sim_actor_step(a);
        return;
    case KILLED: /* the supervisor sees the pidfd fire */
        lg_board_bury(&w->board, a->me);
        a->life = BURIED;
        break;
    case BURIED:
        enlist(w, a);
        break;
    case ENLISTED:
        join(w, a);
        sim_trace(w, a, "is back as %u", a->me);
        break;
    }
    w->stores++;
}

static bool is_over(struct world *w)
{
    if (!lg_commit_complete(&w->board)) return false;
    for (int i = 0; i < w->n_actors; i++)
        if (w->actor[i].life != UP || w->actor[i].p.task) return false;
    return true;
}

static void trace_window(struct world *w)
{
    uint64_t first = lg_window_first(&w->board), end = sim_end(w);
    if (!w->options->trace) return;
    fprintf(stderr, "window of %llu slots, batch %llu, chunks %d %d %d, F %llu, end %llu\n",
            (unsigned long long)w->g.slots, (unsigned long long)w->g.batch, w->g.chunk[0],
            w->g.chunk[1], w->g.chunk[2], (unsigned long long)first, (unsigned long long)end);
    for (uint64_t n = first; n < LG_MIN(first + w->g.slots, end); n++) {
        struct lg_slot *s = lg_window_slot(&w->window, n);
        fprintf(stderr, "%4llu", (unsigned long long)n);
        for (int f = 0; f < LG_FIELD_COUNT; f++)
            fprintf(stderr, "  ready %3llu claim %u/%u", (unsigned long long)s->ready[f],
                    (unsigned)(s->claim[f] >> 32), (unsigned)s->claim[f]);
        fputc('\n', stderr);
    }
}

static void standstill(struct world *w)
{
    trace_window(w);
    for (int i = 0; i < w->n_actors; i++) {
        struct actor *a = &w->actor[i];
        sim_trace(w, a, "life %d, task %s, action %d, waits for %s", (int)a->life,
                  a->p.task ? "yes" : "no", (int)a->p.act.kind,
                  a->life == UP && a->p.act.kind == LG_DO_WAIT ? a->p.act.why : "-");
    }
    sim_fail(w, "nothing has changed for %d steps: a standstill", STANDSTILL_STEPS);
}

static void schedule(struct world *w, struct chances *c)
{
    uint64_t quiet = 0, seen = 0;
    for (uint64_t *now = &w->result->steps; *now < STEPS_LIMIT; ++*now) {
        if (*now % 64 == 0 && is_over(w)) return;
        if (sim_random(w, c->speed_every) == 0) sim_change_speeds(w);
        if (*now == c->drain_at) {
            atomic_store(&w->board.s->drain, 1);
            w->result->drains++;
        }
        if (is_time_to_lose(w, c)) sim_lose(w);
        struct actor *a = sim_pick(w);
        if (!a) continue;
        step(w, a);
        if (c->kills_left && a->life == UP && sim_random(w, c->kill_every) == 0) {
            kill_one(w, a);
            c->kills_left--;
        }
        quiet = w->stores == seen ? quiet + 1 : 0;
        seen = w->stores;
        if (quiet > STANDSTILL_STEPS) standstill(w);
    }
    sim_fail(w, "not finished after %d steps", STEPS_LIMIT);
}

/* The end. */

static void compare(struct world *w, const char *what, uint64_t state, const uint64_t *got,
                    const uint64_t *want)
{
    if (memcmp(got, want, (size_t)w->words * sizeof *got) != 0)
        sim_fail(w, "%s of state %llu differ from those of the undisturbed run", what,
                 (unsigned long long)state);
}

void sim_check_end(struct world *w)
{
    struct lg_board_shared *s = w->board.s;
    uint64_t final = 0;
    if (!lg_commit_final(&w->board, &final)) sim_fail(w, "no final state");
    if (!w->result->drains && final != s->max_steps) sim_fail(w, "the run ended early");
    if (!w->has_lost) { /* else it may be what nobody needs any more; the disk has it */
        compare(w, "weights", final, w->weights[final & 1], w->want[final].weights);
        if (s->has_ema) compare(w, "EMA", final, w->ema[final & 1], w->want[final].ema);
        uint64_t moments[WORDS_MAX];
        for (int i = 0; i < w->words; i++)
            moments[i] =
                *sim_chunk(w, i / SHARD_WORDS, i % SHARD_WORDS, w->want[final].optimizer_steps);
        compare(w, "moments", final, moments, w->want[final].moments);
    }
    if (w->result->commits != (final - s->start_step) * (uint64_t)w->ranks)
        sim_fail(w, "a rank committed a step twice or never");
    for (uint64_t k = s->start_step; k < final; k++) {
        double norm;
        memcpy(&norm, &w->record[k].norm, sizeof norm);
        if (norm != w->want[k].norm)
            sim_fail(w, "wrong record of step %llu", (unsigned long long)k);
        if (!(lg_commit_verdict(&w->board, k) & LG_VERDICT_CHECKPOINT)) continue;
        if (w->disk[k + 1].words != w->words)
            sim_fail(w, "checkpoint %llu is not complete", (unsigned long long)k + 1);
        compare(w, "a checkpoint's weights", k + 1, w->disk[k + 1].weights, w->want[k + 1].weights);
        compare(w, "a checkpoint's moments", k + 1, w->disk[k + 1].moments, w->want[k + 1].moments);
        if (!s->has_ema) continue;
        compare(w, "a checkpoint's EMA", k + 1, w->disk[k + 1].ema, w->want[k + 1].ema);
    }
    for (int i = 0; i < w->n_actors; i++) {
        struct actor *a = &w->actor[i];
        struct lg_claim c;
        if (a->role > LG_ROLE_vae) continue;
        if (w->supervised) { /* nobody is left: ask as one that comes too late */
            a->p = (struct private_memory){.window = w->window};
            a->me = lg_board_enlist(&w->board, a->role, a->index);
        }
        if (lg_window_claim(&a->p.window, &w->board, a->me, a->p.field, 0, sim_end(w), &c) !=
            LG_ERR_STOP)
            sim_fail(w, "%s is not told that nothing is left", sim_actor_name(a));
    }
}

void sim_run(const struct sim_options *options, struct sim_result *ret)
{
    static struct world world;
    struct world *w = &world;
    sim_open(w, options, ret);
    static const uint64_t kill_every[] = {30, 60, 120, 400};
    struct chances c = {
        .kill_every = kill_every[sim_random(w, LG_ARRAY_LEN(kill_every))],
        .kills_left = sim_random(w, 80),
        .speed_every = 50 + sim_random(w, 500),
        .drain_at = sim_random(w, 3) ? UINT64_MAX : sim_random(w, 4000),
        .lose_at = sim_random(w, 3) ? UINT64_MAX : sim_random(w, 4000),
        .lose_when = sim_random(w, 2) ? LOSE_AT_ONCE : (int)sim_random(w, LOSE_WHENS),
    };
    if (setjmp(w->failed)) return;
    schedule(w, &c);
    sim_check_end(w);
}
