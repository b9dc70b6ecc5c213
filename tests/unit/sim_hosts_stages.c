/* Pretended ranks and writers of several hosts, and the run without hosts that they are compared with. Gradients are floats
 * whose sum depends on its order. */
#include "tests/unit/sim_hosts_world.h"
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static float drawn(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t x = (a * 1000003 + b) * 1000003 + c;
    x ^= x >> 31;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 29;
    return (float)(int32_t)(x >> 40) * 1e-5f;
}

static bool is_void(uint64_t n)
{
    return n % 11 == 3;
}

/* Of a host in a step: shard r of the gradient of its samples. */
static float gradient(const float *w, uint64_t first, int r, int j, double divisor)
{
    float g = w[j] * 0.01f;
    for (uint64_t n = first; n < first + SAMPLES; n++)
        if (!is_void(n)) g += drawn(n, (uint64_t)r, (uint64_t)j) / (float)divisor;
    return g;
}

static struct lg_loss_sum loss_of(uint64_t first, int r, double divisor)
{
    struct lg_loss_sum l = {0};
    for (uint64_t n = first; n < first + SAMPLES; n++)
        if (!is_void(n)) l.all += drawn(n, 77, (uint64_t)r) / divisor;
    l.vb = l.all / 3;
    return l;
}

static struct lg_host_sums sums_of(uint64_t first)
{
    struct lg_host_sums s = {0};
    uint64_t keys[SAMPLES];
    for (uint64_t n = first; n < first + SAMPLES; n++) {
        keys[n - first] = n * 7919 + 1;
        s.voids += is_void(n);
        s.valid += !is_void(n);
    }
    s.keys_hash = XXH3_64bits(keys, sizeof keys);
    return s;
}

static float first_weight(int r, int j)
{
    return drawn(12345, (uint64_t)r, (uint64_t)j);
}

static void make_step(struct world *w, uint64_t s)
{
    struct reference *f = &w->ref;
    const uint64_t batch = (uint64_t)w->hosts * SAMPLES;
    uint64_t keys[HOSTS];
    f->valid[s] = f->voids[s] = 0;
    f->loss[s] = (struct lg_loss_sum){0};
    for (int h = 0; h < w->hosts; h++) {
        const struct lg_host_sums k = sums_of(s * batch + (uint64_t)h * SAMPLES);
        keys[h] = k.keys_hash;
        f->valid[s] += k.valid;
        f->voids[s] += k.voids;
    }
    f->keys[s] = XXH3_64bits(keys, (size_t)w->hosts * sizeof *keys);
    const double divisor = (double)LG_MAX(f->valid[s], UINT64_C(1));
    for (int r = 0; r < w->ranks; r++) {
        struct lg_loss_sum of_rank = {0};
        for (int h = 0; h < w->hosts; h++) {
            const struct lg_loss_sum l = loss_of(s * batch + (uint64_t)h * SAMPLES, r, divisor);
            of_rank.all += l.all;
            of_rank.vb += l.vb;
        }
        f->loss[s].all += of_rank.all;
        f->loss[s].vb += of_rank.vb;
        for (int j = 0; j < COUNT; j++) {
            float sum = gradient(f->w[s][r], s * batch, r, j, divisor);
            for (int h = 1; h < w->hosts; h++)
                sum += gradient(f->w[s][r], s * batch + (uint64_t)h * SAMPLES, r, j, divisor);
            f->total[s][r][j] = sum;
            f->w[s + 1][r][j] = f->w[s][r][j] * 0.75f - 0.1f * sum;
        }
    }
}

void sim_hosts_make_reference(struct world *w)
{
    for (int r = 0; r < w->ranks; r++)
        for (int j = 0; j < COUNT; j++) w->ref.w[0][r][j] = first_weight(r, j);
    for (uint64_t s = 0; s < STEPS; s++) make_step(w, s);
}

/* ---- what exchange 0 does beside ---- */

void sim_hosts_info_turn(struct life *h)
{
    lg_board *b = &h->board;
    const lg_mark commit = lg_board_global_commit(b);
    uint64_t step = commit == LG_MARK_NONE ? b->s->start_step : lg_mark_state(commit);
    struct lg_host_place place = lg_hosts_place(b);
    if (sim_hosts_is(h->w, SIM_HOSTS_LOCAL_SAMPLES)) place.host = 0;
    if (lg_hosts_has_info(b, step)) step++;
    if (step >= STEPS || lg_hosts_has_info(b, step)) return;
    const struct lg_host_sums own = sums_of(lg_host_sample(place, step * SAMPLES));
    lg_hosts_set_info(b, step, &own);
}

/* ---- a rank ---- */

static struct lg_board_row *row_of(struct life *h, lg_role role, int r)
{
    return lg_board_row(&h->board, role, r);
}

static double divisor_of(struct life *h, uint64_t s, bool *ret_known)
{
    struct lg_host_sums sums;
    *ret_known = lg_hosts_sums(&h->board, s, &sums);
    if (!*ret_known && sim_hosts_is(h->w, SIM_HOSTS_DIVISOR_OWN)) {
        *ret_known = true;
        return SAMPLES * h->w->hosts;
    }
    return *ret_known ? (double)LG_MAX(sums.valid, UINT64_C(1)) : 1;
}

static uint64_t first_sample(struct life *h, uint64_t s)
{
    struct lg_host_place place = lg_hosts_place(&h->board);
    if (sim_hosts_is(h->w, SIM_HOSTS_LOCAL_SAMPLES)) place.host = 0;
    return lg_host_sample(place, s * SAMPLES);
}

static void expect_weights(struct life *h, int r, uint64_t s, const char *who)
{
    const struct rank_memory *m = &h->rank[r];
    if (!lg_stamp_is(&m->stamp[s & 1], s))
        sim_hosts_fail(h->w, "%s: host %d rank %d: no stamp of state %d", who, h->host, r, (int)s);
    if (memcmp(m->w[s & 1], h->w->ref.w[s][r], sizeof m->w[0]) != 0)
        sim_hosts_fail(h->w, "%s: host %d rank %d: state %d is another one", who, h->host, r,
                       (int)s);
}

static void expect_total(struct life *h, int r, uint64_t s, const char *who)
{
    const struct rank_memory *m = &h->rank[r];
    if (!lg_stamp_is(&m->in, s))
        sim_hosts_fail(h->w, "%s: host %d rank %d: no sum of step %d", who, h->host, r, (int)s);
    if (memcmp(m->incoming, h->w->ref.total[s][r], sizeof m->incoming) != 0)
        sim_hosts_fail(h->w, "%s: host %d rank %d: the sum of step %d is another one", who, h->host,
                       r, (int)s);
}

/* Half of it a turn. */
static bool init(struct life *h, int r, uint64_t s)
{
    struct rank_memory *m = &h->rank[r];
    if (lg_hosts_fetched(&h->board, r)) {
        if (!lg_stamp_is(&m->stamp[s & 1], s))
            sim_hosts_fail(h->w, "host %d rank %d begins with a state that is not stamped", h->host,
                           r);
        lg_trainer_mark_init(&h->board, r);
        return true;
    }
    if (h->task[r].pc++ == 0) {
        lg_stamp_clear(&m->stamp[s & 1]);
        return false;
    }
    for (int j = 0; j < COUNT; j++) m->w[s & 1][j] = first_weight(r, j);
    lg_stamp_set(&m->stamp[s & 1], s);
    lg_trainer_mark_init(&h->board, r);
    return true;
}

static bool forward(struct life *h, int r, uint64_t s)
{
    bool known;
    const double divisor = divisor_of(h, s, &known);
    if (!known) return true;
    expect_weights(h, r, s, "FORWARD");
    lg_trainer_mark_grads(&h->board, r, s, loss_of(first_sample(h, s), r, divisor));
    return true;
}

static bool reduce(struct life *h, int r, uint64_t s)
{
    struct rank_memory *m = &h->rank[r];
    bool known;
    const double divisor = divisor_of(h, s, &known);
    const bool early = sim_hosts_is(h->w, SIM_HOSTS_LOCAL_EARLY);
    const bool leaves_early = sim_hosts_is(h->w, SIM_HOSTS_LEAVES_EARLY);
    const int half = h->task[r].pc++; /* the later one leaves first */
    if (half == 2) {
        if (!early) lg_trainer_mark_local(&h->board, r, s);
        return true;
    }
    lg_stamp_set(&m->out, s);
    if (half == 0 && early) lg_trainer_mark_local(&h->board, r, s);
    for (int j = (1 - half) * COUNT / 2; j < (2 - half) * COUNT / 2 && !leaves_early; j++)
        m->outgoing[j] = gradient(m->w[s & 1], first_sample(h, s), r, j, divisor);
    for (int j = 0; j < COUNT && leaves_early && half == 1; j++)
        m->outgoing[j] = gradient(m->w[s & 1], first_sample(h, s), r, j, divisor);
    lg_leaving_mark(&m->leaving, s, (size_t)((half + 1) * COUNT / 2));
    return false;
}

static void check_record(struct life *h, uint64_t s)
{
    struct world *w = h->w;
    const unsigned verdict = lg_commit_verdict(&h->board, s);
    if (w->verdict[s] && w->verdict[s] != verdict)
        sim_hosts_fail(w, "host %d obeys another verdict of step %d: %x, not %x", h->host, (int)s,
                       verdict, w->verdict[s]);
    w->verdict[s] = verdict;
    struct lg_loss_sum loss = {0};
    struct lg_host_sums sums;
    for (int r = 0; r < w->ranks; r++) {
        const struct lg_board_row *row = row_of(h, LG_ROLE_exchange, r);
        loss.all += row->loss_sum[s & 1].all;
        loss.vb += row->loss_sum[s & 1].vb;
    }
    if (memcmp(&loss, &w->ref.loss[s], sizeof loss) != 0)
        sim_hosts_fail(w, "host %d: the loss of step %d is another one", h->host, (int)s);
    if (!lg_hosts_sums(&h->board, s, &sums) || sums.keys_hash != w->ref.keys[s] ||
        sums.voids != w->ref.voids[s])
        sim_hosts_fail(w, "host %d: step %d has other samples", h->host, (int)s);
}

static bool update(struct life *h, int r, uint64_t s)
{
    struct rank_memory *m = &h->rank[r];
    float *to = m->w[(s + 1) & 1];
    expect_total(h, r, s, "UPDATE");
    if (h->task[r].pc == 0) {
        check_record(h, s);
        lg_stamp_clear(&m->stamp[(s + 1) & 1]);
    }
    for (int j = h->task[r].pc * COUNT / 2; j < (h->task[r].pc + 1) * COUNT / 2; j++)
        to[j] = m->w[s & 1][j] * 0.75f - 0.1f * m->incoming[j];
    if (++h->task[r].pc < 2) return false;
    lg_stamp_set(&m->stamp[(s + 1) & 1], s + 1);
    lg_trainer_mark_commit(&h->board, r, s);
    h->w->result->commits++;
    h->w->last_progress = h->w->result->turns;
    return true;
}

static bool decides_wrongly(struct life *h, const struct lg_action *a)
{
    struct world *w = h->w;
    if (a->kind != LG_DO_WAIT || strcmp(a->why, "the leading host's word") != 0) return false;
    return sim_hosts_is(w, SIM_HOSTS_DECIDE_ANYWHERE) && !lg_hosts_is_leader(&h->board);
}

void sim_hosts_rank_turn(struct world *w, struct life *h, int r)
{
    bool ends = true;
    struct lg_action *a = &h->task[r].act;
    if (h->task[r].pc == 0) {
        *a = lg_trainer_next(&h->board, r);
        if (decides_wrongly(h, a)) a->kind = LG_DO_DECIDE;
        if (a->kind == LG_DO_WAIT && !strcmp(a->why, "the other hosts") &&
            sim_hosts_is(w, SIM_HOSTS_UPDATE_ALONE) &&
            atomic_load(&row_of(h, LG_ROLE_trainer, r)->partial) == lg_mark_of(a->step))
            a->kind = LG_DO_UPDATE;
    }
    switch (a->kind) {
    case LG_DO_INIT:
        ends = init(h, r, a->step);
        break;
    case LG_DO_DECIDE:
        lg_commit_decide(&h->board, a->step);
        break;
    case LG_DO_FORWARD:
        ends = forward(h, r, a->step);
        break;
    case LG_DO_REDUCE:
        ends = reduce(h, r, a->step);
        break;
    case LG_DO_TOTAL:
        expect_total(h, r, a->step, "TOTAL");
        lg_trainer_mark_partial(&h->board, r, a->step, &(struct lg_exact_sum){0});
        break;
    case LG_DO_UPDATE:
        ends = update(h, r, a->step);
        break;
    default:
        break;
    }
    if (ends) h->task[r].pc = 0;
}

/* ---- a writer ---- */

void sim_hosts_writer_turn(struct world *w, struct life *h)
{
    struct lg_action a = lg_ckpt_next(&h->board);
    if (a.kind == LG_DO_WAIT && !strcmp(a.why, "the leading host's files") &&
        sim_hosts_is(w, SIM_HOSTS_WRITE_ALONE)) {
        const uint64_t staged = lg_mark_state(atomic_load(&row_of(h, LG_ROLE_ckpt, 0)->staged));
        lg_ckpt_mark_published(&h->board, staged); /* without files */
        return;
    }
    switch (a.kind) {
    case LG_DO_STAGE_MOMENTS:
        lg_ckpt_mark_staged_moments(&h->board, a.step);
        break;
    case LG_DO_STAGE:
        for (int r = 0; r < w->ranks; r++) expect_weights(h, r, a.step, "STAGE");
        lg_ckpt_mark_staged(&h->board, a.step);
        break;
    case LG_DO_WRITE:
        if (lg_hosts_write(&h->board, a.step) == LG_HOST_WRITE)
            w->has_written[a.step] = true;
        else if (!w->has_written[a.step])
            sim_hosts_fail(w, "host %d takes state %d for written, but it is not", h->host,
                           (int)a.step);
        lg_ckpt_mark_published(&h->board, a.step);
        break;
    default:
        break;
    }
}

/* ---- an exchanger's memory ---- */

static struct rank_memory *memory_of(void *arg)
{
    const struct node *n = arg;
    return &n->of->rank[n->rank];
}

static void add(void *arg, float *y, const float *const x[], int n, size_t count)
{
    const struct node *of = arg;
    const int me = of->of->host;
    for (size_t i = 0; i < count; i++) {
        float sum = x[0][i];
        if (sim_hosts_is(of->w, SIM_HOSTS_ARRIVAL_ORDER)) {
            sum = x[me][i];
            for (int k = 0; k < n; k++)
                if (k != me) sum += x[k][i];
        } else {
            for (int k = 1; k < n; k++) sum += x[k][i];
        }
        y[i] = sum;
    }
}

static size_t state_bytes(void *arg, uint64_t state)
{
    (void)state;
    return sizeof memory_of(arg)->w[0];
}

static bool has_state(void *arg, uint64_t state)
{
    return lg_stamp_is(&memory_of(arg)->stamp[state & 1], state);
}

static int read_state(void *arg, const struct lg_exchanger_state *of, void *to)
{
    memcpy(to, (const char *)memory_of(arg)->w[of->state & 1] + of->at, of->bytes);
    return 0;
}

static int written(void *arg)
{
    struct node *n = arg;
    const uint64_t s = n->of->board.s->start_step;
    lg_stamp_set(&memory_of(arg)->stamp[s & 1], s);
    return 0;
}

static int write_state(void *arg, const struct lg_exchanger_state *of, const void *from)
{
    struct node *n = arg;
    memcpy((char *)memory_of(arg)->w[of->state & 1] + of->at, from, of->bytes);
    if (sim_hosts_is(n->w, SIM_HOSTS_TORN_STATE) && !of->at && n->of->number >= n->w->hosts) {
        written(arg);
        lg_exchange_mark_fetched(&n->of->board, n->rank);
    }
    return 0;
}

static struct world *g_clock;

static int64_t now(void)
{
    return (int64_t)g_clock->now;
}

int sim_hosts_exchanger(struct node *n, lg_exchanger **ret)
{
    struct rank_memory *m = &n->of->rank[n->rank];
    g_clock = n->w;
    return lg_exchanger_open(
        &(struct lg_exchanger_spec){.board = &n->of->board,
                                    .rank = n->rank,
                                    .transport = &sim_hosts_transport,
                                    .transport_arg = n,
                                    .outgoing = m->outgoing,
                                    .incoming = m->incoming,
                                    .outgoing_stamp = &m->out,
                                    .incoming_stamp = &m->in,
                                    .count = COUNT,
                                    .parts = m->parts,
                                    .leaving = &m->leaving,
                                    .message_bytes = MESSAGE_BYTES,
                                    .state_bytes = state_bytes,
                                    .arg = n,
                                    .add = add,
                                    .has_state = has_state,
                                    .read = read_state,
                                    .write = write_state,
                                    .written = written,
                                    .now = now,
                                    .life = 1 + sim_hosts_random(n->w, UINT64_MAX - 1)},
        ret);
}
