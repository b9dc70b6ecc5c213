/* Words of scattered gradients; the rules stand in scatter.h. */
#include "shm/scatter.h"

static struct lg_board_row *row_of(lg_board *b, int rank)
{
    LG_ASSERT(rank >= 0 && rank < b->s->ranks);
    return lg_board_row(b, LG_ROLE_trainer, rank);
}

uint64_t lg_scatter_given_by_all(lg_board *b)
{
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < b->s->ranks; r++)
        least = LG_MIN(least, atomic_load_explicit(&row_of(b, r)->given, memory_order_acquire));
    return least;
}

uint64_t lg_scatter_added_by_all(lg_board *b)
{
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < b->s->ranks; r++)
        least = LG_MIN(least, atomic_load_explicit(&row_of(b, r)->added, memory_order_acquire));
    return least;
}

uint64_t lg_scatter_given(lg_board *b, int rank)
{
    return atomic_load_explicit(&row_of(b, rank)->given, memory_order_relaxed);
}

uint64_t lg_scatter_added(lg_board *b, int rank)
{
    return atomic_load_explicit(&row_of(b, rank)->added, memory_order_relaxed);
}

static void store(_Atomic(uint64_t) *word, uint64_t number)
{
    LG_ASSERT(atomic_load_explicit(word, memory_order_relaxed) < number);
    __sync_synchronize(); /* drains non-temporal stores, too */
    atomic_store_explicit(word, number, memory_order_release);
}

void lg_scatter_mark_given(lg_board *b, int rank, uint64_t number)
{
    store(&row_of(b, rank)->given, number);
}

void lg_scatter_mark_added(lg_board *b, int rank, uint64_t number)
{
    LG_ASSERT(number <= lg_scatter_given_by_all(b));
    store(&row_of(b, rank)->added, number);
}

void lg_scatter_keep_loss(lg_board *b, int rank, uint64_t micros, struct lg_loss_sum loss_sum)
{
    row_of(b, rank)->loss_so_far[micros & 1] = loss_sum;
}

struct lg_loss_sum lg_scatter_loss(lg_board *b, int rank, uint64_t micros)
{
    return micros ? row_of(b, rank)->loss_so_far[micros & 1] : (struct lg_loss_sum){0};
}
