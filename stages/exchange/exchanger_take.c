/* An exchanger asks: the step, and a first state. */
#include "shm/commit.h"
#include "stages/exchange/exchanger_private.h"

static struct lg_board_row *row_of(const lg_exchanger *x, lg_role role)
{
    return lg_board_row(x->spec.board, role, x->spec.rank);
}

static lg_mark look(const _Atomic(lg_mark) *m)
{
    return atomic_load_explicit(m, memory_order_acquire);
}

/* ---- questions ---- */

static bool is_free(const struct lg_question *q)
{
    for (int i = 0; i < q->n; i++)
        if (!lg_transfer_is_free(&q->message[i])) return false;
    return true;
}

/* Those that are being dropped, or asked again: id 0. */
bool lg_exchanger_is_free(const lg_exchanger *x, int peer)
{
    for (int k = 0; k < LG_ASK_KINDS && peer != x->me; k++) {
        const struct lg_question *q = &x->peer[peer].question[k];
        if (!q->ask.id && !is_free(q)) return false;
    }
    return true;
}

static void give_up(lg_exchanger *x, struct lg_question *q)
{
    if (q->ask.id)
        for (int i = 0; i < q->n; i++)
            if (!lg_transfer_is_free(&q->message[i]))
                x->spec.transport->cancel(x->transport, &q->message[i]);
    q->ask.id = 0;
}

/* Without a number, a question of the step that is being taken gets another one as soon as it has its places back. */
void lg_exchanger_ask_again(lg_exchanger *x, int peer)
{
    for (int k = 0; k < LG_ASK_KINDS && peer != x->me; k++) give_up(x, &x->peer[peer].question[k]);
}

void lg_exchanger_drop_questions(lg_exchanger *x, int peer)
{
    lg_exchanger_ask_again(x, peer);
    for (int k = 0; k < LG_ASK_KINDS && peer != x->me; k++)
        x->peer[peer].question[k].ask.step = UINT64_MAX;
}

static void expect(lg_exchanger *x, struct lg_question *q, int i, void *data, size_t bytes,
                   bool on_device)
{
    q->message[i] = (struct lg_transfer){.tag = q->ask.id << 16 | (uint64_t)i,
                                         .data = data,
                                         .bytes = bytes,
                                         .on_device = on_device,
                                         .posted = true};
    x->spec.transport->receive(x->transport, &q->message[i]);
}

static void post(lg_exchanger *x, int h, lg_ask_kind kind)
{
    struct lg_peer *p = &x->peer[h];
    struct lg_question *q = &p->question[kind];
    if (kind == LG_ASK_STATE) {
        expect(x, q, 0, p->state, lg_exchanger_state_piece(x, q->ask.step, q->ask.index).bytes,
               false);
        return;
    }
    const int of = kind == LG_ASK_PART ? x->me : h, n = lg_exchanger_messages(x, of);
    for (int i = 0; i < n; i++) {
        const struct lg_stretch m = lg_exchanger_message(x, of, i);
        float *to = kind == LG_ASK_PART ? p->parts + m.at : x->spec.incoming + m.first;
        expect(x, q, i, to, m.count * sizeof *to, x->spec.on_device);
    }
    if (kind == LG_ASK_PART) expect(x, q, n, &p->loss, sizeof p->loss, false);
}

/* Asks, or asks again where something has failed: 1 when something was done. */
static int ask(lg_exchanger *x, int h, lg_ask_kind kind, uint64_t step, uint64_t index)
{
    struct lg_peer *p = &x->peer[h];
    struct lg_question *q = &p->question[kind];
    for (int i = 0; i < q->n && q->ask.id; i++)
        if (q->message[i].done && q->message[i].failed) give_up(x, q);
    if (q->ask.id && (q->ask.step != step || q->ask.index != index)) give_up(x, q);
    if (!q->ask.id) {
        if (!is_free(q)) return 0;
        q->ask = (struct lg_ask){.id = lg_exchanger_random(x),
                                 .step = step,
                                 .kind = (uint32_t)kind,
                                 .index = (uint32_t)index};
        q->sent = false;
        post(x, h, kind);
    }
    if (q->sent || !p->greeted) return 0;
    q->sent =
        lg_exchanger_send_note(x, h, &(struct lg_note){.kind = LG_NOTE_ASK, .of.ask = q->ask});
    return q->sent;
}

static bool has_come(const struct lg_question *q, int i)
{
    return q->ask.id && q->message[i].done && !q->message[i].failed;
}

/* ---- a step ---- */

static bool others_came(const lg_exchanger *x, lg_ask_kind kind, int i)
{
    for (int h = 0; h < x->hosts; h++)
        if (h != x->me && !has_come(&x->peer[h].question[kind], i)) return false;
    return true;
}

/* The parts of all hosts, in host order. */
static void add_message(lg_exchanger *x, int i)
{
    const struct lg_stretch m = lg_exchanger_message(x, x->me, i);
    const float *of[LG_HOSTS_MAX];
    for (int h = 0; h < x->hosts; h++)
        of[h] = h == x->me ? x->spec.outgoing + m.first : x->peer[h].parts + m.at;
    x->spec.add(x->spec.arg, x->spec.incoming + m.first, of, x->hosts, m.count);
}

static bool has_totals(const lg_exchanger *x)
{
    for (int h = 0; h < x->hosts; h++) {
        const struct lg_question *q = &x->peer[h].question[LG_ASK_TOTAL];
        for (int i = 0; i < q->n && h != x->me; i++)
            if (!has_come(q, i)) return false;
    }
    return true;
}

static void end_step(lg_exchanger *x, uint64_t step)
{
    struct lg_loss_sum loss = {0};
    for (int h = 0; h < x->hosts; h++) {
        const struct lg_loss_sum *of =
            h == x->me ? &row_of(x, LG_ROLE_trainer)->loss_sum[step & 1] : &x->peer[h].loss;
        loss.all += of->all;
        loss.vb += of->vb;
    }
    lg_stamp_set(x->spec.incoming_stamp, step);
    lg_exchange_mark_exchanged(x->spec.board, x->spec.rank, step, &loss);
    x->taking = LG_MARK_NONE;
}

static int take_step(lg_exchanger *x, const char **ret_why)
{
    const uint64_t step = lg_exchange_next(x->spec.board, x->spec.rank);
    const int messages = lg_exchanger_messages(x, x->me);
    int done = 0;
    if (x->taking != lg_mark_of(step)) {
        x->taking = lg_mark_of(step);
        x->added = 0;
    }
    for (int h = 0; h < x->hosts; h++) {
        if (h == x->me) continue;
        done |= ask(x, h, LG_ASK_PART, step, 0);
        done |= ask(x, h, LG_ASK_TOTAL, step, 0);
    }
    const bool is_local = look(&row_of(x, LG_ROLE_trainer)->local) >= lg_mark_of(step);
    *ret_why = is_local ? "gradients of the other hosts" : "gradients of its rank";
    while (x->added < messages && others_came(x, LG_ASK_PART, x->added)) {
        const int may =
            lg_exchanger_has_left(x, step, lg_exchanger_message(x, x->me, x->added).first);
        LG_TRY(may);
        if (!may) break;
        add_message(x, x->added++);
        done = 1;
    }
    /* All may have left before the rank says that it is all, with the loss. */
    if (!is_local || x->added < messages || !others_came(x, LG_ASK_PART, messages) ||
        !has_totals(x))
        return done;
    end_step(x, step);
    return 1;
}

/* ---- a first state ---- */

static int take_state(lg_exchanger *x, const char **ret_why)
{
    lg_board *b = x->spec.board;
    const uint64_t step = b->s->start_step, pieces = lg_exchanger_state_pieces(x, step);
    const int from = x->record.leader;
    struct lg_peer *p = &x->peer[from];
    *ret_why = "the leading host's state";
    if (from == x->me) return 0; /* nobody has it: lgsup must find another leader */
    if (x->fetched_to == pieces) {
        /* With it come verdicts: whether this state is to be written. */
        if (!lg_hosts_has_card(b, from)) return 0;
        LG_TRY(x->spec.written(x->spec.arg));
        lg_exchange_mark_fetched(b, x->spec.rank);
        return 1;
    }
    const int asked = ask(x, from, LG_ASK_STATE, step, x->fetched_to);
    if (!has_come(&p->question[LG_ASK_STATE], 0)) return asked;
    const struct lg_exchanger_state of = lg_exchanger_state_piece(x, step, x->fetched_to);
    LG_TRY(x->spec.write(x->spec.arg, &of, p->state));
    x->fetched_to++;
    return 1;
}

int lg_exchanger_take(lg_exchanger *x, const char **ret_why)
{
    lg_board *b = x->spec.board;
    *ret_why = "a host that is missing";
    if (!lg_hosts_fetched(b, x->spec.rank) &&
        look(&row_of(x, LG_ROLE_trainer)->commit) == LG_MARK_NONE) {
        if (lg_hosts_begin(b) == LG_HOST_BEGIN_FETCH) return take_state(x, ret_why);
        *ret_why = "the first state";
    }
    return lg_hosts_is_complete(b, &x->record) ? take_step(x, ret_why) : 0;
}
