/* An exchanger answers, from memory that outlives it. */
#include "shm/commit.h"
#include "stages/exchange/exchanger_private.h"

static lg_mark look(const _Atomic(lg_mark) *m)
{
    return atomic_load_explicit(m, memory_order_acquire);
}

void lg_exchanger_asked(lg_exchanger *x, int peer, const struct lg_ask *ask)
{
    if (ask->kind >= LG_ASK_KINDS || !ask->id || ask->id >> 47) return;
    struct lg_answer *a = &x->peer[peer].answer[ask->kind];
    if (a->asked.id == ask->id) return;
    a->asked = *ask;
}

void lg_exchanger_drop_answers(lg_exchanger *x, int peer)
{
    for (int k = 0; k < LG_ASK_KINDS && peer != x->me; k++)
        x->peer[peer].answer[k].asked.id = x->peer[peer].answer[k].ask.id = 0;
}

static bool is_free(const struct lg_answer *a)
{
    for (int i = 0; i < a->n; i++)
        if (!lg_transfer_is_free(&a->message[i])) return false;
    return true;
}

static void send(lg_exchanger *x, int peer, struct lg_answer *a, const void *data, size_t bytes,
                 bool on_device)
{
    struct lg_transfer *m = &a->message[a->next];
    *m = (struct lg_transfer){.tag = a->ask.id << 16 | (uint64_t)a->next,
                              .data = (void *)data,
                              .bytes = bytes,
                              .on_device = on_device,
                              .posted = true};
    a->next++;
    x->spec.transport->send(x->transport, peer, m);
}

/* Of the part of `host`. */
static int send_floats(lg_exchanger *x, int peer, struct lg_answer *a, int host, const float *of)
{
    const struct lg_stretch m = lg_exchanger_message(x, host, a->next);
    send(x, peer, a, of + m.first, m.count * sizeof *of, x->spec.on_device);
    return 1;
}

int lg_exchanger_has_left(const lg_exchanger *x, uint64_t step, size_t from)
{
    const lg_mark local = look(&lg_board_row(x->spec.board, LG_ROLE_trainer, x->spec.rank)->local);
    const size_t left = x->spec.leaving ? lg_leaving_of(x->spec.leaving, step) : 0;
    const bool is_all = local == lg_mark_of(step);
    if (!is_all && (!left || from < x->spec.count - left)) return 0;
    if (lg_stamp_is(x->spec.outgoing_stamp, step)) return 1;
    /* The next step is leaving: everybody has this one. */
    if (lg_stamp_is(x->spec.outgoing_stamp, step + 1)) return 0;
    return LG_FAIL(LG_ERR_CORRUPT, "trainer/%d/outgoing does not hold step %llu", x->spec.rank,
                   (unsigned long long)step);
}

/* Of the rank's sum over this host, what `peer` adds; and its loss. */
static int answer_part(lg_exchanger *x, int peer, struct lg_answer *a)
{
    struct lg_board_row *row = lg_board_row(x->spec.board, LG_ROLE_trainer, x->spec.rank);
    const bool is_loss = a->next + 1 == a->n;
    const int has_left = lg_exchanger_has_left(
        x, a->ask.step, is_loss ? 0 : lg_exchanger_message(x, peer, a->next).first);
    if (has_left <= 0) return has_left;
    if (!is_loss) return send_floats(x, peer, a, peer, x->spec.outgoing);
    if (look(&row->local) != lg_mark_of(a->ask.step)) return 0;
    send(x, peer, a, &row->loss_sum[a->ask.step & 1], sizeof row->loss_sum[0], false);
    return 1;
}

/* Of the own part, what is added. */
static int answer_total(lg_exchanger *x, int peer, struct lg_answer *a)
{
    const lg_mark of = lg_mark_of(a->ask.step);
    const bool all =
        look(&lg_board_row(x->spec.board, LG_ROLE_exchange, x->spec.rank)->exchanged) == of;
    if (!all && (x->taking != of || a->next >= x->added)) return 0;
    return send_floats(x, peer, a, x->me, x->spec.incoming);
}

static int answer_state(lg_exchanger *x, int peer, struct lg_answer *a)
{
    lg_board *b = x->spec.board;
    if (lg_board_global_commit(b) != lg_mark_of(a->ask.step) ||
        !x->spec.has_state(x->spec.arg, a->ask.step) ||
        a->ask.index >= lg_exchanger_state_pieces(x, a->ask.step))
        return 0;
    const struct lg_exchanger_state of = lg_exchanger_state_piece(x, a->ask.step, a->ask.index);
    LG_TRY(x->spec.read(x->spec.arg, &of, x->peer[peer].state));
    send(x, peer, a, x->peer[peer].state, of.bytes, false);
    return 1;
}

static int answer(lg_exchanger *x, int peer, struct lg_answer *a)
{
    switch ((lg_ask_kind)a->ask.kind) {
    case LG_ASK_PART:
        return answer_part(x, peer, a);
    case LG_ASK_TOTAL:
        return answer_total(x, peer, a);
    case LG_ASK_STATE:
        return answer_state(x, peer, a);
    case LG_ASK_KINDS:
        break;
    }
    return 0;
}

int lg_exchanger_answer(lg_exchanger *x)
{
    int done = 0;
    for (int h = 0; h < x->hosts; h++)
        for (int k = 0; k < LG_ASK_KINDS && x->peer[h].connected; k++) {
            struct lg_answer *a = &x->peer[h].answer[k];
            if (a->asked.id != a->ask.id && is_free(a)) {
                a->ask = a->asked;
                a->next = 0;
            }
            int more = 1;
            while (more > 0 && a->ask.id && a->ask.id == a->asked.id && a->next < a->n) {
                more = answer(x, h, a);
                done |= more > 0;
            }
            LG_TRY(more);
        }
    return done;
}
