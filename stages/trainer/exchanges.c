/* Exchanges within a sequence group; see exchanges.h. */
#include "stages/trainer/exchanges.h"
#include <stdlib.h>

enum { NO_EXCHANGE = -1, LOOKS = 2000 /* about 0.1 ms, where a GPU computes meanwhile */ };

struct lg_exchanges {
    lg_stage *st;
    lg_stream *compute;
    int me, first, degree;
    uint64_t numbers; /* of a micro-batch: one for each exchange, and one for its end */
    lg_region *region[LG_INSTANCES_MAX]; /* by rank */
    char *arrived;  /* the own region; with a plan that is apart, what has come is copied here */
    uint64_t epoch; /* 0: none yet */
    bool begun;
    int looks;     /* at what others have done, before it waits for them */
    int sent;      /* the exchange that has been sent, and that is waited for */
    uint64_t made; /* step + 1 whose gradient is made in this epoch */
};

static bool has_members(const lg_exchanges *x)
{
    return x->degree > 1;
}

/* Whoever has begun had opened the memory of all members before. */
static bool has_begun(lg_stage *st, int first, int degree)
{
    for (int r = first; r < first + degree; r++)
        if (atomic_load_explicit(&lg_board_row(st->board, LG_ROLE_trainer, r)->commit,
                                 memory_order_acquire) != LG_MARK_NONE)
            return true;
    return false;
}

static int open_regions(lg_exchanges *x, lg_device *d, lg_denoiser *const *nets, int n)
{
    for (int r = x->first; r < x->first + x->degree; r++) {
        const struct lg_stage_memory m = {
            .bytes = LG_MAX(lg_denoiser_bytes_of_all(nets, n).exchanged, (size_t)1),
            .device = d,
            .role = LG_ROLE_trainer,
            .index = r,
            .is_made = has_begun(x->st, x->first, x->degree),
            .is_handed = true};
        LG_TRY(lg_stage_region(x->st, &m, &x->region[r], "trainer/%d/exchanged", r));
    }
    void *arrived = x->region[x->me]->payload;
    if (x->st->plan.apart) LG_TRY(lg_device_alloc(d, x->region[x->me]->bytes, &arrived));
    x->arrived = arrived;
    for (int k = 0; k < n; k++) lg_denoiser_set_exchanged(nets[k], arrived);
    return 0;
}

static uint64_t count_exchanges(const lg_denoiser *net)
{
    int n, n_forward;
    uint64_t count = 0;
    const struct lg_denoiser_event *e = lg_denoiser_events(net, &n, &n_forward);
    for (int i = 0; i < n; i++) count += e[i].kind == LG_EVENT_EXCHANGE;
    return count;
}

int lg_exchanges_open(lg_stage *st, lg_device *d, lg_stream *compute, lg_denoiser *const *nets,
                      int n, lg_exchanges **ret)
{
    lg_exchanges *x = calloc(1, sizeof *x);
    LG_ASSERT(x);
    *ret = x; /* half-built objects may be closed */
    *x = (lg_exchanges){.st = st,
                        .compute = compute,
                        .me = st->index,
                        .first = st->index / st->plan.sequence * st->plan.sequence,
                        .degree = st->plan.sequence,
                        .numbers = count_exchanges(nets[0]) + 1,
                        .looks = lg_device_is_host(d) ? 1 : LOOKS,
                        .sent = NO_EXCHANGE};
    if (!has_members(x)) return 0;
    LG_TRY(open_regions(x, d, nets, n));
    lg_sequence_enter(st->board, st->index);
    return 0;
}

void lg_exchanges_close(lg_exchanges **x)
{
    free(*x);
    *x = NULL;
}

/* ---- epochs ---- */

bool lg_exchanges_is_late(const lg_exchanges *x)
{
    return has_members(x) && lg_sequence_epoch(x->st->board, x->me) != x->epoch;
}

void lg_exchanges_join(lg_exchanges *x, uint64_t micro)
{
    x->epoch = lg_sequence_epoch(x->st->board, x->me);
    x->begun = false;
    x->sent = NO_EXCHANGE;
    x->made = 0;
    lg_sequence_join(x->st->board, x->me, x->epoch, micro);
    lg_bus_notify(x->st->bus);
}

bool lg_exchanges_begin(lg_exchanges *x, uint64_t first, uint64_t *ret_micro)
{
    if (!has_members(x) || x->begun) return false;
    if (!lg_sequence_begins(x->st->board, x->me, x->epoch, first, ret_micro)) return false;
    x->begun = true;
    lg_sequence_send(x->st->board, x->me, x->epoch, *ret_micro * x->numbers);
    lg_bus_notify(x->st->bus);
    return true;
}

bool lg_exchanges_has_begun(const lg_exchanges *x)
{
    return !has_members(x) || x->begun;
}

/* ---- a micro-batch ---- */

static void send_all(lg_exchanges *x, const lg_denoiser *net, int i)
{
    for (int r = x->first; r < x->first + x->degree; r++)
        lg_send(x->compute, lg_denoiser_sends(net, i, r - x->first, x->region[r]->payload));
    lg_stream_sync(x->compute);
}

/* Others write exchange i + 1 into the region as soon as they have all of i, but at another place (graph/exchange.h); what
 * may take this one's they send when this rank has sent i + 1, behind the copy. */
static void take(lg_exchanges *x, const lg_denoiser *net, int i)
{
    const struct lg_arrival a = lg_denoiser_arrival(net, i);
    const char *region = x->region[x->me]->payload;
    if (x->arrived != region) lg_stream_copy(x->compute, x->arrived + a.at, region + a.at, a.bytes);
}

/* Asks for a moment: the others are seldom far behind, and a sleep costs more than what they lack. */
static bool have_sent(const lg_exchanges *x, uint64_t number)
{
    for (int i = 0; i < x->looks; i++)
        if (lg_sequence_sent(x->st->board, x->me, x->epoch, number)) return true;
    return false;
}

bool lg_exchanges_go(lg_exchanges *x, const lg_denoiser *net, uint64_t micro, int i)
{
    lg_board *b = x->st->board;
    const uint64_t number = micro * x->numbers + (uint64_t)i;
    LG_ASSERT(has_members(x));
    if (x->sent != i) {
        if (!lg_sequence_sent(b, x->me, x->epoch, number)) return false;
        send_all(x, net, i);
        x->sent = i;
        lg_sequence_send(b, x->me, x->epoch, number + 1);
        lg_bus_notify(x->st->bus);
    }
    if (!have_sent(x, number + 1)) return false;
    take(x, net, i);
    return true;
}

void lg_exchanges_end_micro(lg_exchanges *x, uint64_t micro)
{
    if (!has_members(x)) return;
    x->sent = NO_EXCHANGE;
    lg_sequence_send(x->st->board, x->me, x->epoch, (micro + 1) * x->numbers);
    lg_bus_notify(x->st->bus);
}

/* ---- the end of a step ---- */

void lg_exchanges_mark_made(lg_exchanges *x, uint64_t step)
{
    if (!has_members(x) || x->made == step + 1)
        return; /* who waits would wake those who wait, for ever */
    x->made = step + 1;
    lg_sequence_mark_made(x->st->board, x->me, x->epoch, step);
    lg_bus_notify(x->st->bus);
}

bool lg_exchanges_is_made(const lg_exchanges *x, uint64_t step)
{
    return !has_members(x) || lg_sequence_is_made(x->st->board, x->me, step);
}
