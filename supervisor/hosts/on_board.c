/* Epochs and promises on the board; see on_board.h. */
#include "supervisor/hosts/on_board.h"
#include <string.h>

void lg_group_read_facts(lg_board *b, struct lg_group_facts *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->has_state = lg_board_global_commit(b) != LG_MARK_NONE;
    ret->settled = lg_hosts_settled(b, &ret->rest.step);
    if (ret->settled) ret->rest.n_data = lg_data_parts(b, ret->rest.data);
}

static void to_record(const struct lg_epoch *e, struct lg_hosts_record *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->formation = e->formation;
    ret->number = e->number;
    ret->first_step = e->first_step;
    ret->members = e->members;
    ret->leader = e->leader;
    for (int h = 0; h < LG_HOSTS_MAX; h++) {
        ret->member[h].place = e->place[h];
        ret->member[h].life = e->life[h];
    }
}

static void from_record(const struct lg_hosts_record *r, struct lg_epoch *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->formation = r->formation;
    ret->number = r->number;
    ret->first_step = r->first_step;
    ret->members = r->members;
    ret->leader = r->leader;
    for (int h = 0; h < LG_HOSTS_MAX; h++) {
        ret->place[h] = (uint8_t)r->member[h].place;
        ret->life[h] = r->member[h].life;
    }
}

void lg_group_write_epoch(lg_board *b, const struct lg_epoch *e, const struct lg_group_addresses *a)
{
    static struct lg_hosts_record r; /* of the one thread that writes epochs */
    if (e->number <= lg_hosts_epoch(b, NULL)) return;
    to_record(e, &r);
    for (int h = 0; h < LG_HOSTS_MAX; h++) {
        if (!(e->members >> h & 1)) continue;
        memcpy(r.member[h].address, a->address[e->place[h]], LG_HOST_ADDRESS_BYTES);
        r.member[h].port = a->port;
    }
    lg_hosts_enter(b, &r);
}

void lg_group_write_votes(lg_board *b, const struct lg_beat *own)
{
    struct lg_board_hosts *s = &b->s->hosts;
    const uint32_t at = atomic_load_explicit(&s->vote_at, memory_order_relaxed) ^ 1;
    struct lg_hosts_vote *v = &s->vote[at & 1];
    v->base = own->epoch.number;
    v->promised = own->promised;
    v->accepted = own->accepted;
    to_record(&own->accepted_epoch, &v->record);
    atomic_store_explicit(&s->vote_at, at, memory_order_release);
}

bool lg_group_read_before(lg_board *b, struct lg_group_before *ret)
{
    static struct lg_hosts_record r;
    const struct lg_board_hosts *s = &b->s->hosts;
    memset(ret, 0, sizeof *ret);
    if (!lg_hosts_epoch(b, &r)) return false;
    from_record(&r, &ret->epoch);
    ret->number = s->host;
    ret->comes = s->comes;
    ret->start_step = b->s->start_step;
    const struct lg_hosts_vote *v =
        &s->vote[atomic_load_explicit(&s->vote_at, memory_order_acquire) & 1];
    if (v->base != r.number) return true; /* of an epoch that is over */
    ret->promised = v->promised;
    ret->accepted = v->accepted;
    from_record(&v->record, &ret->accepted_epoch);
    return true;
}
