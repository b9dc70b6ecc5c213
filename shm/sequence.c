/* Words of a sequence group; the rules stand in sequence.h. */
#include "shm/sequence.h"

static struct lg_board_row *row_of(lg_board *b, int rank)
{
    LG_ASSERT(rank >= 0 && rank < b->s->ranks);
    return lg_board_row(b, LG_ROLE_trainer, rank);
}

static int first_of(const lg_board *b, int rank)
{
    return rank / b->s->sequence * b->s->sequence;
}

static uint64_t word(uint64_t epoch, uint64_t number)
{
    LG_ASSERT(number >> LG_SEQUENCE_EPOCH_SHIFT == 0 &&
              epoch >> (64 - LG_SEQUENCE_EPOCH_SHIFT) == 0);
    return epoch << LG_SEQUENCE_EPOCH_SHIFT | number;
}

static uint64_t epoch_of(uint64_t w)
{
    return w >> LG_SEQUENCE_EPOCH_SHIFT;
}

static uint64_t number_of(uint64_t w)
{
    return w & ((UINT64_C(1) << LG_SEQUENCE_EPOCH_SHIFT) - 1);
}

static uint64_t look(const _Atomic(uint64_t) *w)
{
    return atomic_load_explicit(w, memory_order_acquire);
}

static void store(_Atomic(uint64_t) *at, uint64_t value)
{
    LG_ASSERT(atomic_load_explicit(at, memory_order_relaxed) <= value);
    __sync_synchronize(); /* drains non-temporal stores, too */
    atomic_store_explicit(at, value, memory_order_release);
}

void lg_sequence_enter(lg_board *b, int rank)
{
    struct lg_board_row *row = row_of(b, rank);
    store(&row->lives, atomic_load_explicit(&row->lives, memory_order_relaxed) + 1);
}

uint64_t lg_sequence_epoch(lg_board *b, int rank)
{
    uint64_t sum = 0;
    for (int r = first_of(b, rank), i = 0; i < b->s->sequence; i++)
        sum += look(&row_of(b, r + i)->lives);
    return sum;
}

void lg_sequence_join(lg_board *b, int rank, uint64_t epoch, uint64_t micro)
{
    store(&row_of(b, rank)->joined, word(epoch, micro));
}

bool lg_sequence_begins(lg_board *b, int rank, uint64_t epoch, uint64_t first, uint64_t *ret_micro)
{
    uint64_t least = UINT64_MAX;
    for (int r = first_of(b, rank), i = 0; i < b->s->sequence; i++) {
        uint64_t w = look(&row_of(b, r + i)->joined);
        if (epoch_of(w) != epoch) return false;
        least = LG_MIN(least, number_of(w));
    }
    *ret_micro = LG_MAX(least, first);
    return true;
}

void lg_sequence_send(lg_board *b, int rank, uint64_t epoch, uint64_t number)
{
    store(&row_of(b, rank)->sent, word(epoch, number));
}

bool lg_sequence_sent(lg_board *b, int rank, uint64_t epoch, uint64_t number)
{
    for (int r = first_of(b, rank), i = 0; i < b->s->sequence; i++) {
        uint64_t w = look(&row_of(b, r + i)->sent);
        if (epoch_of(w) != epoch || number_of(w) < number) return false;
    }
    return true;
}

void lg_sequence_mark_made(lg_board *b, int rank, uint64_t epoch, uint64_t step)
{
    store(&row_of(b, rank)->made, word(epoch, step + 1));
    __sync_synchronize(); /* of two who store it and then look at the other's, one sees both */
}

bool lg_sequence_is_made(lg_board *b, int rank, uint64_t step)
{
    const int first = first_of(b, rank);
    const uint64_t w = look(&row_of(b, first)->made);
    if (number_of(w) != step + 1) return false;
    for (int i = 1; i < b->s->sequence; i++)
        if (look(&row_of(b, first + i)->made) != w) return false;
    return true;
}
