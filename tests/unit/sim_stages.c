/* The pretended stages. A task is a function that continues where it left off: STEP() ends one step
 * of the simulation, and a kill may come there. No local variable lives across a STEP(): what must
 * survive is in the actor's private memory, which a kill erases.
 */
#include "tests/unit/sim_world.h"
#include <string.h>

/* Writing: garbage over everything first, as a kernel that accumulates would, then word by word. */
void begin_write(struct actor *a, uint64_t *to, const uint64_t *value, int count)
{
    a->p.io.to = to;
    a->p.io.count = count;
    a->p.io.i = -1;
    memcpy(a->p.io.value, value, (size_t)count * sizeof *value);
}

bool write_more(struct actor *a)
{
    a->w->stores++;
    if (a->p.io.i < 0)
        for (int i = 0; i < a->p.io.count; i++) a->p.io.to[i] = GARBAGE;
    else
        a->p.io.to[a->p.io.i] = a->p.io.value[a->p.io.i];
    return ++a->p.io.i < a->p.io.count;
}

/* Checks one word that was read, and folds it into the reader's accumulator. */
void read_word(struct actor *a, const char *what, uint64_t of, uint64_t got, uint64_t want)
{
    if (got != want)
        sim_fail(a->w, "%s read a wrong word of %s %llu: %016llx, not %016llx", sim_actor_name(a),
                 what, (unsigned long long)of, (unsigned long long)got, (unsigned long long)want);
    a->p.acc = sim_mix(a->p.acc, got);
}

static uint64_t *payload(struct actor *a, lg_field f, uint64_t n)
{
    const lg_window *w = &a->p.window;
    return (uint64_t *)(f == LG_FIELD_SOURCE   ? lg_window_pixels(w, n)
                        : f == LG_FIELD_LATENT ? lg_window_mean(w, n)
                        : w->g.text[f - LG_FIELD_TEXT].states_bytes
                            ? lg_window_states(w, f - LG_FIELD_TEXT, n)
                            : lg_window_pooled(w, f - LG_FIELD_TEXT, n));
}

/* What a mark speaks of does not lie there. Then the run is over for all. */
static void lost(struct actor *a, uint64_t state)
{
    struct world *w = a->w;
    if (!w->has_lost)
        sim_fail(w, "%s takes state %llu for lost, and it is not", sim_actor_name(a),
                 (unsigned long long)state);
    w->result->losses_seen++;
    sim_trace(w, a, "finds that state %llu is lost", (unsigned long long)state);
    longjmp(w->failed, 1);
}

/* Is that not what lies there of which the mark speaks? */
void expect(struct actor *a, const struct lg_stamp *s, uint64_t state, enum sim_plant unseen)
{
    if (!planted(a->w, unseen) && !lg_stamp_is(s, state)) lost(a, state);
}

void stamp(struct actor *a, struct lg_stamp *s, uint64_t state)
{
    a->w->stores++;
    lg_stamp_set(s, state);
}

void expect_states(struct actor *a, uint64_t state, enum sim_plant unseen)
{
    for (int r = 0; r < a->w->ranks; r++)
        expect(a, &a->w->weights_stamp[state & 1][r], state, unseen);
}

static void read_sample(struct actor *a, lg_field f, uint64_t n, int i)
{
    static const char *const what[] = {"the picture of sample", "latent", "text"};
    read_word(a, what[LG_MIN(f, LG_FIELD_TEXT)], n, payload(a, f, n)[i], sim_sample_word(f, n, i));
}

/* Loaders, VAE and text instances. */

static void begin_fill(struct actor *a, lg_field f)
{
    uint64_t value[FIELD_WORDS];
    for (int i = 0; i < FIELD_WORDS; i++) value[i] = sim_sample_word(f, a->p.n, i);
    begin_write(a, payload(a, f, a->p.n), value, FIELD_WORDS);
}

static void publish(struct actor *a, lg_field f)
{
    lg_window_publish(&a->p.window, f, a->p.n);
    atomic_fetch_add_explicit(&actor_row(a)->samples, 1, memory_order_relaxed);
    a->w->stores++;
    sim_trace(a->w, a, "field %d of %llu is ready", (int)f, (unsigned long long)a->p.n);
}

static bool skip(struct actor *a)
{
    if (planted_in(a, SIM_REWRITE_READY))
        return a->p.n < a->p.claim.from || a->p.n >= a->p.claim.to;
    return !lg_window_wanted(&a->p.window, &a->p.claim, a->p.field, a->p.n);
}

static void set_bucket(struct actor *a)
{
    lg_window_slot(&a->p.window, a->p.n)->bucket = sim_bucket(a->w, a->p.n);
}

static bool load(struct actor *a)
{
    BEGIN(a);
    for (a->p.n = a->p.claim.n; a->p.n < a->p.claim.n + a->p.claim.count; a->p.n++) {
        if (skip(a)) continue;
        if (!planted_in(a, SIM_BUCKET_LATE)) set_bucket(a);
        if (planted_in(a, SIM_SOURCE_EARLY)) publish(a, LG_FIELD_SOURCE);
        if (a->w->loader_latents) {
            begin_fill(a, LG_FIELD_LATENT);
            while (write_more(a)) STEP(a);
        }
        begin_fill(a, LG_FIELD_SOURCE);
        while (write_more(a)) STEP(a);
        STEP(a);
        set_bucket(a);
        begin_write(a, &lg_window_slot(&a->p.window, a->p.n)->key_hash,
                    (uint64_t[]){sim_mix(a->p.n, 99)}, 1);
        while (write_more(a)) STEP(a);
        if (a->w->loader_latents) {
            publish(a, LG_FIELD_LATENT);
            STEP(a);
        }
        if (!lg_window_ready(&a->p.window, LG_FIELD_SOURCE, a->p.n)) publish(a, LG_FIELD_SOURCE);
        STEP(a);
    }
    END(a);
}

static bool encode(struct actor *a)
{
    BEGIN(a);
    for (a->p.n = a->p.claim.n; a->p.n < a->p.claim.n + a->p.claim.count; a->p.n++) {
        if (skip(a)) continue;
        if (a->p.field == LG_FIELD_LATENT && planted_in(a, SIM_PUBLISH_EARLY))
            publish(a, a->p.field);
        read_sample(a, LG_FIELD_SOURCE, a->p.n, 0);
        STEP(a);
        read_sample(a, LG_FIELD_SOURCE, a->p.n, 1);
        begin_fill(a, a->p.field);
        while (write_more(a)) STEP(a);
        STEP(a);
        if (!lg_window_ready(&a->p.window, a->p.field, a->p.n)) publish(a, a->p.field);
        STEP(a);
    }
    END(a);
}

/* Is there a living claimant, other than a, whose claim word this is? */
static void check_takeover(struct actor *a, uint64_t word)
{
    struct world *w = a->w;
    for (int i = 0; i < w->n_actors; i++) {
        struct actor *o = &w->actor[i];
        if (o == a || o->me != (lg_incarnation)(word >> 32)) continue;
        if (o->life == UP)
            sim_fail(w, "%s took a chunk from %s, which lives", sim_actor_name(a),
                     sim_actor_name(o));
        w->result->takeovers++;
    }
}

/* Planted: the chunk behind the window's end, or one that somebody else holds. */
static bool claim_by_force(struct actor *a, uint64_t n, bool from_holder)
{
    uint64_t c = (uint64_t)a->w->g.chunk[a->p.field], first = lg_window_first(&a->w->board);
    n = n / c * c;
    uint64_t end = sim_end(a->w);
    if (n >= end) return false;
    a->p.claim = (struct lg_claim){n, c, LG_MAX(n, first), LG_MIN(n + c, end)};
    for (uint64_t i = a->p.claim.from; i < a->p.claim.to; i++)
        if (lg_window_ready(&a->p.window, a->p.field, i)) return false;
    _Atomic(uint64_t) *word = &lg_window_slot(&a->p.window, n)->claim[a->p.field];
    if (!from_holder && (atomic_load(word) & UINT32_MAX) > n / a->w->g.slots) return false;
    atomic_store(word, (uint64_t)a->me << 32 | (n / a->w->g.slots + 1));
    return true;
}

static void claim(struct actor *a)
{
    struct world *w = a->w;
    lg_field f = a->role == LG_ROLE_loader ? LG_FIELD_SOURCE
                 : a->role == LG_ROLE_vae  ? LG_FIELD_LATENT
                                           : lg_field_text((int)a->role - LG_ROLE_text);
    a->p.field = f;
    unsigned needs = f == LG_FIELD_SOURCE ? 0 : 1u << LG_FIELD_SOURCE;
    if (planted(w, SIM_NO_NEEDS) && f == LG_FIELD_LATENT) needs = 0;
    uint64_t before[SLOTS_MAX];
    for (uint64_t i = 0; i < w->g.slots; i++)
        before[i] = atomic_load(&a->p.window.slot[i].claim[f]);
    int rc = lg_window_claim(&a->p.window, &w->board, a->me, f, needs, sim_end(w), &a->p.claim);
    uint64_t first = lg_window_first(&w->board);
    if (rc < 0 && planted(w, SIM_TAKE_FROM_LIVING) && f == LG_FIELD_LATENT &&
        lg_window_range_ready(&a->p.window, needs, first, (uint64_t)w->g.chunk[f]))
        rc = claim_by_force(a, first, true) ? 0 : rc;
    if (rc < 0 && planted(w, SIM_REUSE_EARLY) && f == LG_FIELD_SOURCE)
        rc = claim_by_force(a, first + w->g.slots, false) ? 0 : rc;
    if (rc < 0) return;
    uint64_t old = before[a->p.claim.n % w->g.slots];
    if ((old & UINT32_MAX) == a->p.claim.n / w->g.slots + 1) check_takeover(a, old);
    w->stores++;
    sim_trace(w, a, "claims [%llu, %llu)", (unsigned long long)a->p.claim.from,
              (unsigned long long)a->p.claim.to);
    a->p.task = f == LG_FIELD_SOURCE ? load : encode;
}

/* Trainer ranks. */

static uint64_t *weights_of(struct world *w, uint64_t state, int rank)
{
    return &w->weights[state & 1][rank * SHARD_WORDS];
}

/* Words of shard q of rank r's working weights. */
static uint64_t *working_of(struct world *w, int r, int q)
{
    return &w->working[r][q * SHARD_WORDS];
}

void mark(struct actor *a, const char *what)
{
    a->w->stores++;
    sim_trace(a->w, a, "%s %llu", what, (unsigned long long)a->p.act.step);
}

static bool train_init(struct actor *a)
{
    struct world *w = a->w;
    uint64_t s = a->p.act.step;
    BEGIN(a);
    if (planted(w, SIM_INIT_EARLY)) lg_trainer_mark_init(&w->board, a->index);
    lg_stamp_clear(&w->weights_stamp[s & 1][a->index]);
    lg_stamp_clear(&w->moments_stamp[a->index]);
    begin_write(a, weights_of(w, s, a->index), &w->want[s].weights[a->index * SHARD_WORDS],
                SHARD_WORDS);
    while (write_more(a)) STEP(a);
    STEP(a);
    if (w->gathers) {
        lg_stamp_clear(&w->working_stamp[a->index][a->index]);
        begin_write(a, working_of(w, a->index, a->index), weights_of(w, s, a->index), SHARD_WORDS);
        while (write_more(a)) STEP(a);
        stamp(a, &w->working_stamp[a->index][a->index], s);
        STEP(a);
    }
    w->optimizer_steps[s & 1][a->index] = w->want[s].optimizer_steps;
    for (a->p.q = 0; a->p.q < CHUNKS; a->p.q++) {
        begin_write(a, sim_chunk(w, a->index, a->p.q, w->want[s].optimizer_steps),
                    &w->want[s].moments[a->index * SHARD_WORDS + a->p.q], 1);
        while (write_more(a)) STEP(a);
        STEP(a);
    }
    stamp(a, &w->moments_stamp[a->index], s);
    STEP(a);
    stamp(a, &w->weights_stamp[s & 1][a->index], s);
    STEP(a);
    if (!planted(w, SIM_INIT_EARLY)) lg_trainer_mark_init(&w->board, a->index);
    mark(a, "made state");
    END(a);
}

static bool train_decide(struct actor *a)
{
    lg_commit_decide(&a->w->board, a->p.act.step);
    mark(a, "decided step");
    return true;
}

uint64_t share(const struct world *w, const struct actor *a, uint64_t step, uint64_t i)
{
    return step * w->g.batch + (uint64_t)(a->index / w->sequence) * share_count(w) + i;
}

/* Word i of a sample of the rank's share; behind the words its key. */
void read_share(struct actor *a, uint64_t step, uint64_t i, int word)
{
    const uint64_t n = share(a->w, a, step, i);
    if (word == FIELD_WORDS) {
        read_word(a, "the key of sample", n, lg_window_slot(&a->p.window, n)->key_hash,
                  sim_mix(n, 99));
        if (lg_window_slot(&a->p.window, n)->bucket != sim_bucket(a->w, n))
            sim_fail(a->w, "sample %llu is in another bucket than its micro-batch",
                     (unsigned long long)n);
        return;
    }
    read_sample(a, LG_FIELD_LATENT, n, word);
    for (int f = LG_FIELD_TEXT; f < LG_FIELD_COUNT; f++)
        if (a->w->fields >> f & 1) read_sample(a, (lg_field)f, n, word);
}

/* Nothing is to be made when rank q has written its shard of state s. */
bool begin_make(struct actor *a, int q, uint64_t s)
{
    struct world *w = a->w;
    if (lg_stamp_is(&w->working_stamp[a->index][q], s) || planted(w, SIM_WORKING_UNSEEN))
        return false;
    begin_write(a, working_of(w, a->index, q), weights_of(w, s, q), SHARD_WORDS);
    return true;
}

static bool train_forward(struct actor *a)
{
    struct world *w = a->w;
    uint64_t s = a->p.act.step, count = share_count(w);
    uint64_t value[WORDS_MAX];
    BEGIN(a);
    a->p.acc = 0;
    expect_states(a, s, SIM_STATE_UNSEEN);
    lg_stamp_clear(&w->grads_stamp[a->index]);
    for (a->p.n = 0; a->p.n < count; a->p.n++) {
        for (a->p.q = 0; a->p.q < FIELD_WORDS; a->p.q++) {
            read_share(a, s, a->p.n, a->p.q);
            STEP(a);
        }
        read_share(a, s, a->p.n, FIELD_WORDS);
    }
    a->p.loss = (double)(a->p.acc & 0xffff);
    a->p.sum[0] = a->p.acc;
    a->p.acc = 0;
    for (a->p.q = 0; a->p.q < w->ranks; a->p.q++)
        if (begin_make(a, a->p.q, s))
            while (write_more(a)) STEP(a);
    for (a->p.q = 0; a->p.q < w->words; a->p.q++) {
        read_word(a, "working weights of state", s, w->working[a->index][a->p.q],
                  w->want[s].weights[a->p.q]);
        STEP(a);
    }
    if (planted(w, SIM_GRADS_EARLY))
        lg_trainer_mark_grads(&w->board, a->index, s, sim_loss(a->p.loss));
    for (int i = 0; i < w->words; i++) value[i] = sim_grad(a->p.sum[0], a->p.acc, i);
    begin_write(a, w->grads[a->index], value, w->words);
    while (write_more(a)) STEP(a);
    actor_row(a)->loss_sum[s & 1] = sim_loss(a->p.loss + 1); /* torn, until the mark */
    STEP(a);
    stamp(a, &w->grads_stamp[a->index], s);
    STEP(a);
    if (atomic_load(&actor_row(a)->grads) != lg_mark_of(s))
        lg_trainer_mark_grads(&w->board, a->index, s, sim_loss(a->p.loss));
    else /* planted: the mark is there already */
        actor_row(a)->loss_sum[s & 1] = sim_loss(a->p.loss);
    mark(a, "gradients of step");
    END(a);
}

/* Adds the rank's shard over all ranks, one rank's gradients a step. */
static bool add(struct actor *a)
{
    struct world *w = a->w;
    uint64_t s = a->p.act.step;
    const uint64_t *grads = &w->grads[a->p.q][a->index * SHARD_WORDS];
    if (!planted(w, SIM_REDUCE_EARLY)) expect(a, &w->grads_stamp[a->p.q], s, SIM_GRADS_UNSEEN);
    for (int i = 0; i < SHARD_WORDS; i++) {
        read_word(a, "gradients of step", s, grads[i],
                  w->want[s].grads[a->p.q][a->index * SHARD_WORDS + i]);
        a->p.sum[i] += grads[i];
    }
    a->p.sum_step = s + 1;
    return ++a->p.q < w->ranks;
}

static void begin_add(struct actor *a)
{
    a->p.q = 0;
    memset(a->p.sum, 0, sizeof a->p.sum);
}

static struct lg_exact_sum exact(double x)
{
    struct lg_exact_sum s = {0};
    lg_exact_sum_add(&s, x);
    return s;
}

static bool train_reduce(struct actor *a)
{
    struct world *w = a->w;
    struct lg_exact_sum sums, torn = {.nonfinite = 1};
    uint64_t s = a->p.act.step;
    BEGIN(a);
    begin_add(a);
    if (w->scatters) sim_scatter_sum(a, s);
    while (!w->scatters && add(a)) STEP(a);
    a->p.norm = 0;
    for (int i = 0; i < SHARD_WORDS; i++) a->p.norm += (double)(a->p.sum[i] & 0xffff);
    if (planted(w, SIM_PARTIAL_EARLY)) lg_trainer_mark_partial(&w->board, a->index, s, &torn);
    actor_row(a)->sum_squares[s & 1] = torn; /* until the mark */
    STEP(a);
    if (planted(w, SIM_PARTIAL_EARLY))
        actor_row(a)->sum_squares[s & 1] = exact(a->p.norm);
    else
        sums = exact(a->p.norm), lg_trainer_mark_partial(&w->board, a->index, s, &sums);
    mark(a, "sums of step");
    END(a);
}

static void write_record(struct actor *a)
{
    struct world *w = a->w;
    uint64_t s = a->p.act.step;
    double loss = 0, want = 0;
    for (int r = 0; r < w->ranks; r++) {
        loss += sim_loss_of(lg_board_row(&w->board, LG_ROLE_trainer, r)->loss_sum[s & 1]);
        want += w->want[s].loss[r];
    }
    if (loss != want)
        sim_fail(w, "the record of step %llu has a wrong loss", (unsigned long long)s);
    memcpy(&w->record[s].loss, &loss, sizeof loss);
    memcpy(&w->record[s].norm, &a->p.norm, sizeof a->p.norm);
}

static void commit(struct actor *a)
{
    lg_trainer_mark_commit(&a->w->board, a->index, a->p.act.step);
    a->w->result->commits++;
}

/* Of the update of step s, how many chunks a former life has made. */
static int chunks_done(struct actor *a, uint64_t s)
{
    struct world *w = a->w;
    const struct lg_stamp *moments = &w->moments_stamp[a->index];
    int done = lg_stamp_is(moments, s + 1) ? CHUNKS : lg_stamp_parts(moments, s);
    if (planted(w, SIM_CHUNK_AGAIN)) return 0;
    if (done < 0 && planted(w, SIM_MOMENTS_UNSEEN)) return 0;
    if (done < 0) lost(a, s);
    if (done > 0 && !planted(w, SIM_SIDE_UNSEEN) &&
        !lg_stamp_is_begun(&w->weights_stamp[(s + 1) & 1][a->index], s + 1))
        lost(a, s + 1);
    return done;
}

/* From here on so many chunks of the update of step s count. */
static void count_chunks(struct actor *a, uint64_t s, int done)
{
    a->w->stores++;
    if (done < CHUNKS)
        lg_stamp_set_parts(&a->w->moments_stamp[a->index], s, done);
    else
        lg_stamp_set(&a->w->moments_stamp[a->index], s + 1);
}

/* What chunk a->p.chunk is to hold, from the place where its moments lie. */
static void compute_chunk(struct actor *a, uint64_t s)
{
    struct world *w = a->w;
    int k = a->p.chunk, i = a->index * SHARD_WORDS + k;
    uint64_t moment = *sim_chunk(w, a->index, k, w->optimizer_steps[s & 1][a->index]);
    read_word(a, "moments of state", s, moment, w->want[s].moments[i]);
    a->p.moment = sim_moment(moment, a->p.sum[k], a->p.norm, s);
    a->p.weight = sim_weight(weights_of(w, s, a->index)[k], a->p.moment);
}

/* Where the weights of state s + 1 are written. */
static uint64_t *to_weights(struct actor *a, uint64_t s)
{
    return weights_of(a->w, planted_in(a, SIM_IN_PLACE) ? s : s + 1, a->index);
}

/* Does rank a->p.q hold this rank's working weights? Where they are gathered others come for them. */
static bool has_copy(const struct actor *a)
{
    return !a->w->gathers || a->p.q == a->index;
}

static bool train_update(struct actor *a)
{
    struct world *w = a->w;
    uint64_t s = a->p.act.step, steps = w->optimizer_steps[s & 1][a->index];
    BEGIN(a);
    if (a->p.sum_step != s + 1 && !planted(w, SIM_SUM_LOST)) {
        begin_add(a);
        if (w->scatters) sim_scatter_sum(a, s);
        while (!w->scatters && add(a)) STEP(a);
    }
    a->p.norm = 0;
    for (a->p.q = 0; a->p.q < w->ranks; a->p.q++) {
        a->p.norm += lg_exact_sum_total(
            &lg_board_row(&w->board, LG_ROLE_trainer, a->p.q)->sum_squares[s & 1]);
        STEP(a);
    }
    if (a->p.norm != w->want[s].norm)
        sim_fail(w, "%s has a wrong norm at step %llu", sim_actor_name(a), (unsigned long long)s);
    if (a->index == 0) {
        write_record(a);
        STEP(a);
    }
    if (planted(w, SIM_COMMIT_EARLY)) commit(a);
    expect(a, &w->weights_stamp[s & 1][a->index], s, SIM_OWN_UNSEEN);
    a->p.chunk = chunks_done(a, s);
    lg_stamp_begin(&w->weights_stamp[(s + 1) & 1][a->index], s + 1);
    STEP(a);
    w->optimizer_steps[(s + 1) & 1][a->index] = steps + !w->want[s].skipped;
    STEP(a);
    if (w->want[s].skipped) {
        begin_write(a, to_weights(a, s), weights_of(w, s, a->index), SHARD_WORDS);
        while (write_more(a)) STEP(a);
        STEP(a);
        if (w->gathers) {
            lg_stamp_clear(&w->working_stamp[a->index][a->index]);
            begin_write(a, working_of(w, a->index, a->index), to_weights(a, s), SHARD_WORDS);
            while (write_more(a)) STEP(a);
            stamp(a, &w->working_stamp[a->index][a->index], s + 1);
            STEP(a);
        }
        if (!planted(w, SIM_SKIP_UNSAID)) count_chunks(a, s, CHUNKS);
        STEP(a);
    } else {
        for (a->p.q = 0; a->p.q < w->ranks && !a->p.chunk; a->p.q++) {
            if (!has_copy(a)) continue;
            lg_stamp_begin(&w->working_stamp[a->p.q][a->index], s + 1);
            STEP(a);
        }
        for (; a->p.chunk < CHUNKS; a->p.chunk++) {
            if (planted(w, SIM_CHUNK_COUNTED_EARLY)) count_chunks(a, s, a->p.chunk + 1);
            compute_chunk(a, s);
            STEP(a);
            begin_write(a, &to_weights(a, s)[a->p.chunk], &a->p.weight, 1);
            while (write_more(a)) STEP(a);
            STEP(a);
            begin_write(a, sim_chunk(w, a->index, a->p.chunk, steps + !planted(w, SIM_ROTATE_NOT)),
                        &a->p.moment, 1);
            while (write_more(a)) STEP(a);
            STEP(a);
            for (a->p.q = 0; a->p.q < w->ranks && !planted(w, SIM_WORKING_LATE); a->p.q++) {
                if (!has_copy(a)) continue;
                begin_write(a, &working_of(w, a->p.q, a->index)[a->p.chunk], &a->p.weight, 1);
                while (write_more(a)) STEP(a);
                STEP(a);
            }
            if (planted(w, SIM_CHUNK_EARLY) && a->p.chunk < CHUNKS - 1)
                count_chunks(a, s, a->p.chunk);
            else
                count_chunks(a, s, a->p.chunk + 1);
            STEP(a);
        }
    }
    if (planted(w, SIM_WORKING_LATE)) commit(a);
    for (a->p.q = 0; a->p.q < w->ranks && !w->want[s].skipped; a->p.q++) {
        if (!has_copy(a)) continue;
        if (planted(w, SIM_WORKING_LATE)) {
            begin_write(a, working_of(w, a->p.q, a->index), to_weights(a, s), SHARD_WORDS);
            while (write_more(a)) STEP(a);
        }
        if (planted(w, SIM_WORKING_MARKED) ||
            lg_stamp_is_begun(&w->working_stamp[a->p.q][a->index], s + 1))
            stamp(a, &w->working_stamp[a->p.q][a->index], s + 1);
        STEP(a);
    }
    if (planted(w, SIM_IN_PLACE)) /* at the end both sides hold it */
        memcpy(weights_of(w, s + 1, a->index), weights_of(w, s, a->index),
               SHARD_WORDS * sizeof(uint64_t));
    if (!planted(w, SIM_STAMP_LATE)) stamp(a, &w->weights_stamp[(s + 1) & 1][a->index], s + 1);
    STEP(a);
    if (!planted(w, SIM_COMMIT_EARLY) && !planted(w, SIM_WORKING_LATE)) commit(a);
    STEP(a);
    if (planted(w, SIM_STAMP_LATE)) stamp(a, &w->weights_stamp[(s + 1) & 1][a->index], s + 1);
    mark(a, "committed step");
    END(a);
}

/* Is the state whose moments it would move on yet to be staged, the moments of it? */
static bool waits_for_moments(struct actor *a)
{
    struct world *w = a->w;
    uint64_t s = a->p.act.step;
    return s > w->board.s->start_step &&
           (lg_commit_verdict(&w->board, s - 1) & LG_VERDICT_CHECKPOINT) &&
           atomic_load(&lg_board_row(&w->board, LG_ROLE_ckpt, 0)->staged_moments) < lg_mark_of(s);
}

static void break_trainer_rule(struct actor *a)
{
    struct world *w = a->w;
    struct lg_action *act = &a->p.act;
    struct lg_board_row *row = actor_row(a);
    bool waits = act->kind == LG_DO_WAIT;
    bool is_new = !a->p.claim.count; /* first action of this incarnation */
    a->p.claim.count = 1;
    if (is_new && planted(w, SIM_REPEAT_GRADS) && w->sequence == 1 && act->kind != LG_DO_INIT &&
        atomic_load(&row->grads) == atomic_load(&row->commit))
        act->kind = LG_DO_FORWARD;
    if (is_new && planted(w, SIM_DECIDE_AGAIN) && lg_commit_verdict(&w->board, act->step)) {
        unsigned flags = LG_VERDICT_GO | (sim_random(w, 2) ? LG_VERDICT_CHECKPOINT : 0u);
        atomic_store(&w->board.s->verdict[act->step % LG_VERDICTS],
                     act->step << LG_VERDICT_BITS | flags);
    }
    if (!waits) return;
    if (planted(w, SIM_FORWARD_EARLY) && strstr(act->why, "commits")) {
        lg_commit_decide(&w->board, act->step);
        act->kind = LG_DO_FORWARD;
    }
    if (planted(w, SIM_REDUCE_EARLY) && strstr(act->why, "gradients")) act->kind = LG_DO_REDUCE;
    if (planted(w, SIM_UPDATE_EARLY) && strstr(act->why, "sums")) act->kind = LG_DO_UPDATE;
    if (planted(w, SIM_IGNORE_EMA) && strstr(act->why, "ema")) act->kind = LG_DO_UPDATE;
    if (strstr(act->why, "staging") &&
        planted(w, waits_for_moments(a) ? SIM_IGNORE_MOMENTS : SIM_IGNORE_STAGING))
        act->kind = LG_DO_UPDATE;
}

static void train(struct actor *a)
{
    struct world *w = a->w;
    if (sim_sequence_enter(a)) return;
    a->p.act = lg_trainer_next(&w->board, a->index);
    break_trainer_rule(a);
    switch (a->p.act.kind) {
    case LG_DO_INIT:
        a->p.task = train_init;
        return;
    case LG_DO_DECIDE:
        a->p.task = train_decide;
        return;
    case LG_DO_FORWARD:
        if (w->sequence > 1)
            a->p.task = sim_sequence_forward;
        else if (lg_window_range_ready(&a->p.window, w->fields, share(w, a, a->p.act.step, 0),
                                       share_count(w)) ||
                 planted(w, SIM_READ_UNREADY))
            a->p.task = w->scatters ? sim_scatter_forward : train_forward;
        return;
    case LG_DO_ADD:
        a->p.task = sim_scatter_add;
        return;
    case LG_DO_REDUCE:
        a->p.task = train_reduce;
        return;
    case LG_DO_UPDATE:
        a->p.task = train_update;
        return;
    case LG_DO_WAIT:
    case LG_DO_DONE:
        return;
    default:
        sim_fail(w, "a rank was told to do %d", (int)a->p.act.kind);
    }
}

/* EMA. */

static bool ema_make(struct actor *a)
{
    struct world *w = a->w;
    uint64_t e = a->p.act.step, value[WORDS_MAX];
    BEGIN(a);
    if (planted(w, SIM_EMA_EARLY)) lg_ema_mark(&w->board, e);
    expect_states(a, e, SIM_EMA_UNSEEN);
    if (e > w->board.s->start_step) expect(a, &w->ema_stamp[(e - 1) & 1], e - 1, SIM_EMA_UNSEEN);
    lg_stamp_clear(&w->ema_stamp[e & 1]);
    for (a->p.q = 0; a->p.q < w->words; a->p.q++) {
        read_word(a, "weights of state", e, w->weights[e & 1][a->p.q], w->want[e].weights[a->p.q]);
        STEP(a);
    }
    for (int i = 0; i < w->words; i++)
        value[i] = e == w->board.s->start_step
                       ? w->weights[e & 1][i]
                       : sim_mix(w->ema[(e - 1) & 1][i], w->weights[e & 1][i]);
    begin_write(a, w->ema[e & 1], value, w->words);
    while (write_more(a)) STEP(a);
    STEP(a);
    stamp(a, &w->ema_stamp[e & 1], e);
    STEP(a);
    if (!planted(w, SIM_EMA_EARLY)) lg_ema_mark(&w->board, e);
    mark(a, "made EMA state");
    END(a);
}

static void average(struct actor *a)
{
    struct world *w = a->w;
    struct lg_action *act = &a->p.act;
    *act = lg_ema_next(&w->board);
    bool waits = act->kind == LG_DO_WAIT;
    if (waits && planted(w, SIM_EMA_AHEAD) && strcmp(act->why, "trainer") == 0 &&
        atomic_load(&lg_board_row(&w->board, LG_ROLE_trainer, 0)->commit) >= lg_mark_of(act->step))
        act->kind = LG_DO_ADVANCE;
    if (act->kind == LG_DO_INIT || act->kind == LG_DO_ADVANCE) a->p.task = ema_make;
}

/* Checkpoint writer. */

static bool write_stage_moments(struct actor *a)
{
    struct world *w = a->w;
    uint64_t s = a->p.act.step, word;
    struct lg_board_row *row = actor_row(a);
    BEGIN(a);
    expect_states(a, s, SIM_STAGE_UNSEEN);
    for (int r = 0; r < w->ranks; r++) expect(a, &w->moments_stamp[r], s, SIM_STAGE_UNSEEN);
    lg_stamp_clear(&w->staged_moments_stamp);
    memset(w->staging_moments, 0xee, sizeof w->staging_moments);
    if (planted(w, SIM_STAGED_MOMENTS_EARLY)) lg_ckpt_mark_staged_moments(&w->board, s);
    for (a->p.q = 0; a->p.q < w->words; a->p.q++) {
        w->stores++;
        word = *sim_chunk(w, a->p.q / SHARD_WORDS, a->p.q % SHARD_WORDS,
                          w->optimizer_steps[s & 1][a->p.q / SHARD_WORDS]);
        if (!planted(w, SIM_STAGE_UNSEEN)) /* which shows when it is written */
            read_word(a, "moments of state", s, word, w->want[s].moments[a->p.q]);
        w->staging_moments[a->p.q] = word;
        STEP(a);
    }
    stamp(a, &w->staged_moments_stamp, s);
    STEP(a);
    if (atomic_load(&row->staged_moments) != lg_mark_of(s))
        lg_ckpt_mark_staged_moments(&w->board, s);
    mark(a, "staged the moments of");
    END(a);
}

static bool write_stage(struct actor *a)
{
    struct world *w = a->w;
    uint64_t s = a->p.act.step;
    BEGIN(a);
    expect_states(a, s, SIM_STAGE_UNSEEN);
    if (w->board.s->has_ema && !planted(w, SIM_STAGE_EARLY))
        expect(a, &w->ema_stamp[s & 1], s, SIM_STAGE_UNSEEN);
    lg_stamp_clear(&w->staging_stamp);
    memset(w->staging_weights, 0xee, sizeof w->staging_weights);
    memset(w->staging_ema, 0xee, sizeof w->staging_ema);
    if (planted(w, SIM_STAGED_EARLY)) lg_ckpt_mark_staged(&w->board, s);
    for (a->p.q = 0; a->p.q < w->words; a->p.q++) {
        w->stores++;
        w->staging_weights[a->p.q] = w->weights[s & 1][a->p.q];
        STEP(a);
        w->staging_ema[a->p.q] = w->ema[s & 1][a->p.q];
        STEP(a);
    }
    stamp(a, &w->staging_stamp, s);
    STEP(a);
    if (!planted(w, SIM_STAGED_EARLY)) lg_ckpt_mark_staged(&w->board, s);
    mark(a, "staged");
    END(a);
}

static bool write_publish(struct actor *a)
{
    struct world *w = a->w;
    uint64_t s = a->p.act.step;
    struct checkpoint *c = &w->disk[s];
    BEGIN(a);
    if (w->writing || atomic_load(&actor_row(a)->published) >= lg_mark_of(s))
        sim_fail(w, "checkpoint %llu is written twice", (unsigned long long)s);
    if (!planted(w, SIM_STAGED_UNSEEN))
        expect(a, &w->staged_moments_stamp, s, SIM_STAGED_MOMENTS_UNSEEN);
    if (!planted(w, SIM_STAGED_EARLY)) expect(a, &w->staging_stamp, s, SIM_STAGED_UNSEEN);
    w->writing = s;
    if (planted(w, SIM_PUBLISHED_EARLY)) lg_ckpt_mark_published(&w->board, s);
    memset(c, 0xee, sizeof *c);
    c->words = 0;
    for (a->p.q = 0; a->p.q < w->words; a->p.q++) {
        w->stores++;
        read_word(a, "staged weights of state", s, w->staging_weights[a->p.q],
                  w->want[s].weights[a->p.q]);
        c->weights[a->p.q] = w->staging_weights[a->p.q];
        STEP(a);
        read_word(a, "staged moments of state", s, w->staging_moments[a->p.q],
                  w->want[s].moments[a->p.q]);
        c->moments[a->p.q] = w->staging_moments[a->p.q];
        STEP(a);
        if (w->board.s->has_ema)
            read_word(a, "staged EMA of state", s, w->staging_ema[a->p.q], w->want[s].ema[a->p.q]);
        c->ema[a->p.q] = w->staging_ema[a->p.q];
        c->words++;
        STEP(a);
    }
    if (!planted(w, SIM_PUBLISHED_EARLY)) lg_ckpt_mark_published(&w->board, s);
    w->writing = 0;
    w->result->checkpoints++;
    mark(a, "published");
    END(a);
}

static void break_writer_rule(struct actor *a)
{
    struct world *w = a->w;
    struct lg_action *act = &a->p.act;
    uint64_t next = act->step + 1;
    bool is_new = !a->p.claim.count; /* first action of this incarnation */
    a->p.claim.count = 1;
    if (is_new && planted(w, SIM_MOMENTS_AGAIN) && act->kind == LG_DO_STAGE)
        act->kind = LG_DO_STAGE_MOMENTS;
    if (act->kind != LG_DO_WAIT) return;
    if (planted(w, SIM_STAGE_EARLY) && strcmp(act->why, "ema") == 0) act->kind = LG_DO_STAGE;
    if (planted(w, SIM_STAGE_AHEAD) && strstr(act->why, "to come") &&
        (lg_commit_verdict(&w->board, act->step) & LG_VERDICT_CHECKPOINT) &&
        atomic_load(&lg_board_row(&w->board, LG_ROLE_trainer, 0)->commit) >= lg_mark_of(next))
        *act = (struct lg_action){.kind = LG_DO_STAGE_MOMENTS, .step = next};
}

static void keep(struct actor *a)
{
    struct lg_action *act = &a->p.act;
    *act = lg_ckpt_next(&a->w->board);
    break_writer_rule(a);
    if (act->kind == LG_DO_STAGE_MOMENTS) a->p.task = write_stage_moments;
    if (act->kind == LG_DO_STAGE) a->p.task = write_stage;
    if (act->kind == LG_DO_WRITE) a->p.task = write_publish;
}

void sim_actor_step(struct actor *a)
{
    if (a->p.task) {
        if (a->p.task(a)) a->p.task = NULL;
        return;
    }
    switch (a->role) {
    case LG_ROLE_trainer:
        train(a);
        return;
    case LG_ROLE_ema:
        average(a);
        return;
    case LG_ROLE_ckpt:
        keep(a);
        return;
    default:
        claim(a);
        return;
    }
}
