/* The simulation of several hosts: scheduler, deaths, and pretended supervisors. */
#include "tests/unit/sim_hosts_world.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TURNS_LIMIT = 1200000,
    STANDSTILL = 120000,        /* turns of a calm world without a commit */
    STANDSTILL_SILENT = 500000, /* where silence must be noticed first */
    DISTURBED = 600,            /* turns until nothing is disturbed any more, or up to 64 times */
    TURN_NS = 20000,
};

const char *sim_hosts_plant_name(enum sim_hosts_plant p)
{
    static const char *const name[] = {
        "HONEST",
#define SIM_HOSTS_PLANT(name, what) #name,
#include "tests/unit/sim_hosts_plants.def"
#undef SIM_HOSTS_PLANT
    };
    return name[p];
}

const char *sim_hosts_plant_what(enum sim_hosts_plant p)
{
    static const char *const text[] = {
        "nothing",
#define SIM_HOSTS_PLANT(name, what) what,
#include "tests/unit/sim_hosts_plants.def"
#undef SIM_HOSTS_PLANT
    };
    return text[p];
}

void sim_hosts_fail(struct world *w, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(w->result->why, sizeof w->result->why, fmt, ap);
    va_end(ap);
    w->result->failed = true;
    longjmp(w->failed, 1);
}

void sim_hosts_trace(struct world *w, const char *fmt, ...)
{
    if (!w->options->trace) return;
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%7llu ", (unsigned long long)w->result->turns);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
}

uint64_t sim_hosts_random(struct world *w, uint64_t below)
{
    w->rng += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t x = w->rng;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (x ^ x >> 31) % below;
}

/* ---- lives ---- */

static void start_exchange(struct life *h, int r)
{
    struct world *w = h->w;
    struct node *n = calloc(1, sizeof *n);
    LG_ASSERT(n && w->n_nodes < (int)LG_ARRAY_LEN(w->all));
    *n = (struct node){.w = w, .of = h, .rank = r, .alive = true};
    w->all[w->n_nodes++] = n;
    LG_ASSERT(sim_hosts_exchanger(n, &n->x) == 0);
    h->node[r] = n;
}

static struct life *bear(struct world *w, int host, uint64_t start, bool comes)
{
    struct life *h = calloc(1, sizeof *h);
    struct lg_board_shared *s = calloc(1, sizeof *s);
    LG_ASSERT(h && s && w->n_lives < LIVES);
    *h = (struct life){.w = w, .host = host, .number = w->n_lives, .up = true, .board = {s, -1}};
    *s = (struct lg_board_shared){.start_step = start,
                                  .max_steps = STEPS,
                                  .batch = SAMPLES,
                                  .checkpoint_every = w->checkpoint_every,
                                  .ranks = w->ranks,
                                  .sequence = 1,
                                  .hosts = {.count = w->hosts, .host = host, .comes = comes}};
    w->life[w->n_lives++] = w->host[host] = h;
    for (int r = 0; r < w->ranks; r++) start_exchange(h, r);
    sim_hosts_trace(w, "host %d lives as %d, from state %d", host, h->number, (int)start);
    return h;
}

static void kill_exchange(struct life *h, int r, bool with_host)
{
    struct node *n = h->node[r];
    if (!n) return;
    sim_hosts_net_died(h->w, n, with_host);
    lg_exchanger_close(&n->x);
    h->node[r] = NULL;
    h->down_until[r] = h->w->result->turns + 20 + sim_hosts_random(h->w, 400);
}

static void kill_host(struct world *w, struct life *h)
{
    sim_hosts_trace(w, "host %d (life %d) dies", h->host, h->number);
    h->up = false;
    for (int r = 0; r < w->ranks; r++) kill_exchange(h, r, true);
    h->dies_at = w->result->turns + 50 + sim_hosts_random(w, 1500);
    if (w->epoch.leader == h->host) w->result->leaders++;
}

/* ---- supervisors ---- */

static bool has_state(struct life *h)
{
    return lg_board_global_commit(&h->board) != LG_MARK_NONE;
}

static void new_epoch(struct world *w, uint64_t members)
{
    struct lg_hosts_record *e = &w->epoch;
    int leader = -1, any = -1;
    for (int h = w->hosts - 1; h >= 0; h--) {
        if (!(members >> h & 1)) continue;
        any = h;
        if (has_state(w->host[h])) leader = h;
    }
    if (members >> e->leader & 1 && e->number && (leader < 0 || has_state(w->host[e->leader])))
        leader = e->leader;
    if (sim_hosts_is(w, SIM_HOSTS_LEADER_WITHOUT))
        for (int h = 0; h < w->hosts; h++)
            if ((members >> h & 1) && !has_state(w->host[h])) leader = h;
    if (leader < 0) leader = any;
    e->number++;
    e->members = members;
    e->leader = leader;
    for (int h = 0; h < w->hosts; h++) {
        const struct life *l = w->host[h];
        snprintf(e->member[h].address, sizeof e->member[h].address, "%d", l->number);
        e->member[h].life = (uint64_t)l->number + 1;
    }
    w->result->epochs++;
    sim_hosts_trace(w, "epoch %d: members %x, leader %d", (int)e->number, (unsigned)members,
                    leader);
}

static void shut_out(struct world *w, struct life *h)
{
    h->shut_out = true;
    w->result->shut_out++;
    sim_hosts_trace(w, "host %d (life %d) is shut out", h->host, h->number);
}

static bool may_be_shut_out(struct world *w, struct life *h)
{
    for (int k = 0; k < w->hosts; k++)
        if (w->host[k] != h && w->host[k]->up && !w->host[k]->shut_out && has_state(w->host[k]))
            return true;
    return false;
}

/* Who is gone, as far as it has been noticed. */
static void notice(struct world *w)
{
    uint64_t members = w->epoch.members;
    for (int h = 0; h < w->hosts; h++) {
        struct life *l = w->host[h];
        if (!l->up && w->result->turns >= l->dies_at) members &= ~(UINT64_C(1) << h);
        if (l->shut_out) members &= ~(UINT64_C(1) << h);
    }
    if (members == w->epoch.members) return;
    if (!members) sim_hosts_fail(w, "nobody is left");
    new_epoch(w, members);
}

static void take_in(struct world *w)
{
    struct life *leader = w->host[w->epoch.leader];
    struct lg_hosts_record seen;
    uint64_t start, members = w->epoch.members;
    if (members == lg_hosts_all(w->hosts) || !leader->up) return;
    if (lg_hosts_epoch(&leader->board, &seen) != w->epoch.number) return;
    if (!lg_hosts_settled(&leader->board, &start)) {
        if (!sim_hosts_is(w, SIM_HOSTS_UNSETTLED) || !has_state(leader)) return;
        start = lg_mark_state(lg_board_global_commit(&leader->board));
    }
    if (sim_hosts_is(w, SIM_HOSTS_FETCH_AGAIN_OTHER)) start++;
    for (int h = 0; h < w->hosts; h++) {
        if (members >> h & 1 || w->n_lives == LIVES) continue;
        if (sim_hosts_random(w, 4) == 0) continue; /* that one comes later */
        bear(w, h, start, !sim_hosts_is(w, SIM_HOSTS_OWN_ORIGIN));
        w->result->taken_in++;
        members |= UINT64_C(1) << h;
    }
    if (members == w->epoch.members) return;
    new_epoch(w, members);
    if (sim_hosts_is(w, SIM_HOSTS_OWN_ORIGIN))
        for (int h = 0; h < w->hosts; h++)
            if (!has_state(w->host[h])) w->epoch.leader = h;
}

/* Each host hears of an epoch at a moment of its own; who is shut out late, or never. */
static void spread(struct world *w)
{
    struct life *l = w->life[sim_hosts_random(w, (uint64_t)w->n_lives)];
    if (!l->up || l->told) return;
    if (l->shut_out) {
        if (sim_hosts_random(w, 40) && !w->calm) return;
        lg_hosts_lose(&l->board);
        l->told = true;
        return;
    }
    if (w->host[l->host] != l || !(w->epoch.members >> l->host & 1)) return;
    if (lg_hosts_epoch(&l->board, NULL) < w->epoch.number) lg_hosts_enter(&l->board, &w->epoch);
}

static void supervise(struct world *w)
{
    switch (sim_hosts_random(w, 4)) {
    case 0:
        notice(w);
        break;
    case 1:
        take_in(w);
        break;
    default:
        spread(w);
    }
}

/* ---- disturbances ---- */

static bool may_die(struct world *w, struct life *h)
{
    return h->up && may_be_shut_out(w, h) && w->n_lives <= LIVES - 4;
}

static void die(struct world *w, struct life *h)
{
    if (!may_die(w, h)) return;
    kill_host(w, h);
    w->result->host_deaths++;
}

/* What a host says does not reach one of the others, and one dies before it does: what the survivors know of each other, and
 * of what the dead one has said, differs. */
static void part_and_die(struct world *w, struct life *h)
{
    const int to = (h->host + 1 + (int)sim_hosts_random(w, 2)) % HOSTS;
    if (w->hosts < HOSTS || w->victim) return;
    w->cut[h->host][to] = true;
    w->result->cuts++;
    w->victim = sim_hosts_random(w, 2) ? h : w->host[HOSTS - h->host - to];
    w->victim_dies = w->result->turns + sim_hosts_random(w, 800);
    w->heals_at = UINT64_MAX;
}

static void end_victim(struct world *w)
{
    struct life *h = w->victim;
    if (!h || w->result->turns < w->victim_dies) return;
    w->victim = NULL;
    die(w, h);
    w->heals_at = LG_MAX(h->dies_at, w->result->turns) + sim_hosts_random(w, 400);
}

static void disturb(struct world *w)
{
    struct life *h = w->host[sim_hosts_random(w, (uint64_t)w->hosts)];
    const int r = (int)sim_hosts_random(w, (uint64_t)w->ranks);
    if (!h->up) return;
    switch (sim_hosts_random(w, 20)) {
    case 0:
    case 1:
    case 2:
        if (h->node[r]) kill_exchange(h, r, false);
        break;
    case 3:
    case 4:
    case 5:
        h->task[r].pc = 0;
        h->rank_down_until[r] = w->result->turns + sim_hosts_random(w, 400);
        break;
    case 6:
        h->writer_down_until = w->result->turns + sim_hosts_random(w, 2000);
        break;
    case 7:
    case 8:
    case 9:
        sim_hosts_net_fail_one(w);
        return;
    case 10: {
        const int to = (int)sim_hosts_random(w, (uint64_t)w->hosts);
        w->cut[h->host][to] = true;
        if (sim_hosts_random(w, 2)) w->cut[to][h->host] = true;
        w->heals_at = w->result->turns + (sim_hosts_random(w, 3000) << 2 * sim_hosts_random(w, 3));
        w->result->cuts++;
        return;
    }
    case 11:
        die(w, h);
        return;
    case 12:
        if (!may_die(w, h) || h->shut_out) return;
        if (!(w->epoch.members >> h->host & 1)) return;
        shut_out(w, h);
        return;
    case 13:
        if (sim_hosts_random(w, 8)) return;
        atomic_store(&h->board.s->drain, 1);
        w->result->drains++;
        return;
    case 14:
        part_and_die(w, h);
        return;
    default:
        return;
    }
    w->result->kills++;
}

/* ---- the scheduler ---- */

static void exchange_turn(struct world *w, struct life *h, int r)
{
    struct node *volatile n = h->node[r];
    const char *why;
    if (!n) {
        if (w->result->turns >= h->down_until[r]) start_exchange(h, r);
        return;
    }
    w->may_die = !w->calm && sim_hosts_random(w, 400) == 0;
    w->dies_in = 1 + (int)sim_hosts_random(w, 12);
    if (setjmp(w->died)) {
        w->result->kills++;
        kill_exchange(h, r, false);
        return;
    }
    const int rc = lg_exchanger_step(n->x, &why);
    w->may_die = false;
    if (rc < 0) sim_hosts_fail(w, "host %d exchange %d: %s", h->host, r, lg_err_message());
}

static void host_turn(struct world *w, struct life *h)
{
    const uint64_t what = sim_hosts_random(w, (uint64_t)(2 * w->ranks + 1));
    const int r = (int)what % w->ranks;
    if (!h->up) return;
    if (what == (uint64_t)(2 * w->ranks)) {
        sim_hosts_info_turn(h);
        if (w->result->turns >= h->writer_down_until) sim_hosts_writer_turn(w, h);
    } else if (what >= (uint64_t)w->ranks) {
        exchange_turn(w, h, r);
    } else if (w->result->turns >= h->rank_down_until[r]) {
        sim_hosts_rank_turn(w, h, r);
    }
}

static bool is_over(struct world *w)
{
    for (int h = 0; h < w->hosts; h++) {
        struct life *l = w->host[h];
        if (!l->up || l->shut_out || !lg_commit_complete(&l->board)) return false;
    }
    return true;
}

static void check_end(struct world *w)
{
    uint64_t final = 0;
    for (int h = 0; h < w->hosts; h++) {
        uint64_t at;
        LG_ASSERT(lg_commit_final(&w->host[h]->board, &at));
        if (h && at != final)
            sim_hosts_fail(w, "hosts end at states %d and %d", (int) final, (int)at);
        final = at;
        for (int r = 0; r < w->ranks; r++)
            if (memcmp(w->host[h]->rank[r].w[at & 1], w->ref.w[at][r], sizeof w->ref.w[0][0]) != 0)
                sim_hosts_fail(w, "host %d: the last state is another one", h);
    }
    if (!w->has_written[final]) sim_hosts_fail(w, "the last state is not written");
}

/* What is known of a host is what it has done, or less. */
static void check_cards(struct world *w)
{
    struct life *knows = w->host[sim_hosts_random(w, (uint64_t)w->hosts)];
    lg_board *b = &knows->board;
    const uint64_t epoch = lg_hosts_epoch(b, NULL);
    for (int h = 0; h < w->hosts && knows->up; h++) {
        const struct lg_host_card *c = &b->s->hosts.card[h];
        struct lg_host_said is;
        if (!epoch || !w->host[h]->up || atomic_load(&c->said_in) != epoch) continue;
        if (lg_hosts_epoch(&w->host[h]->board, NULL) != epoch) continue;
        if (!lg_hosts_say(&w->host[h]->board, epoch, &is)) continue;
        if (atomic_load(&c->commit) > is.commit || atomic_load(&c->exchanged) > is.exchanged ||
            atomic_load(&c->published) > is.published)
            sim_hosts_fail(w, "host %d believes more of host %d than it has done", knows->host, h);
    }
}

static void turn(struct world *w)
{
    w->now += TURN_NS;
    w->result->turns++;
    if (w->result->turns == w->calm_at) {
        w->calm = true;
        w->last_progress = w->result->turns;
    }
    if (w->calm) w->victim = NULL;
    if (w->calm || w->result->turns >= w->heals_at) memset(w->cut, 0, sizeof w->cut);
    if (!w->calm && sim_hosts_random(w, 120) == 0) disturb(w);
    end_victim(w);
    if (sim_hosts_random(w, 12) == 0) supervise(w);
    if (sim_hosts_random(w, 12) == 0) check_cards(w);
    if (sim_hosts_random(w, 3) == 0) {
        sim_hosts_net_turn(w);
        return;
    }
    /* Lives that have been shut out go on, too. */
    struct life *h = sim_hosts_random(w, 12) ? w->host[sim_hosts_random(w, (uint64_t)w->hosts)]
                                             : w->life[sim_hosts_random(w, (uint64_t)w->n_lives)];
    host_turn(w, h);
}

static void open_world(struct world *w)
{
    w->rng = w->options->seed * UINT64_C(0x2545f4914f6cdd1d) + 1;
    w->hosts = 2 + (int)sim_hosts_random(w, HOSTS - 1);
    w->ranks = 1 + (int)sim_hosts_random(w, RANKS);
    w->checkpoint_every = 1 + (int64_t)sim_hosts_random(w, 3);
    w->is_silent = sim_hosts_random(w, 2);
    w->calm_at = (uint64_t)DISTURBED << sim_hosts_random(w, 7);
    sim_hosts_make_reference(w);
    for (int h = 0; h < w->hosts; h++) bear(w, h, 0, false);
    new_epoch(w, lg_hosts_all(w->hosts));
}

static void close_world(struct world *w)
{
    for (int i = 0; i < w->n_lives; i++) {
        for (int r = 0; r < w->ranks; r++)
            if (w->life[i]->node[r]) lg_exchanger_close(&w->life[i]->node[r]->x);
        free(w->life[i]->board.s);
        free(w->life[i]);
    }
    sim_hosts_net_free(w);
    free(w);
}

/* Where everybody stands, for a trace of a standstill. */
static void tell_all(struct world *w)
{
    const char *why = "";
    for (int h = 0; h < w->hosts; h++) {
        struct life *l = w->host[h];
        sim_hosts_trace(w, "host %d (life %d)%s%s: epoch %d", h, l->number, l->up ? "" : " dead",
                        l->shut_out ? " shut out" : "", (int)lg_hosts_epoch(&l->board, NULL));
        for (int r = 0; r < w->ranks && l->up; r++) {
            const struct lg_action a = lg_trainer_next(&l->board, r);
            const struct lg_board_row *row = lg_board_row(&l->board, LG_ROLE_exchange, r);
            if (l->node[r]) lg_exchanger_step(l->node[r]->x, &why);
            sim_hosts_trace(w,
                            "  rank %d: action %d %s of %d; exchange: %s, marks %d %d %d, epoch %d",
                            r, (int)a.kind, a.why ? a.why : "", (int)a.step, why,
                            (int)atomic_load(&lg_board_row(&l->board, LG_ROLE_trainer, r)->local),
                            (int)atomic_load(&row->exchanged), (int)atomic_load(&row->fetched),
                            (int)atomic_load(&row->entered));
        }
        const struct lg_action a = lg_ckpt_next(&l->board);
        sim_hosts_trace(w, "  writer: action %d %s of %d", (int)a.kind, a.why ? a.why : "",
                        (int)a.step);
        for (int k = 0; k < w->hosts; k++) {
            const struct lg_host_card *c = &l->board.s->hosts.card[k];
            sim_hosts_trace(w, "  card of %d: said in %d, commit %d, exchanged %d", k,
                            (int)c->said_in, (int)c->commit, (int)c->exchanged);
        }
    }
}

void sim_hosts_run(const struct sim_hosts_options *options, struct sim_hosts_result *ret)
{
    struct world *w = calloc(1, sizeof *w);
    LG_ASSERT(w);
    *ret = (struct sim_hosts_result){0};
    w->options = options;
    w->result = ret;
    if (!setjmp(w->failed)) {
        open_world(w);
        while (!is_over(w)) {
            turn(w);
            if (w->calm &&
                ret->turns - w->last_progress > (w->is_silent ? STANDSTILL_SILENT : STANDSTILL)) {
                tell_all(w);
                sim_hosts_fail(w, "standstill");
            }
            if (ret->turns > TURNS_LIMIT) sim_hosts_fail(w, "it does not come to its end");
        }
        check_end(w);
    }
    close_world(w);
}
