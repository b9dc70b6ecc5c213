/* Pieces of units; see shards.h. */
#include "stages/trainer/shards.h"

struct lg_piece lg_piece_of(size_t count, int shard, int shards)
{
    size_t per = (count + (size_t)shards - 1) / (size_t)shards;
    per = (per + LG_UNIT_ALIGN - 1) / LG_UNIT_ALIGN * LG_UNIT_ALIGN;
    size_t first = LG_MIN(per * (size_t)shard, count);
    return (struct lg_piece){.first = first, .count = LG_MIN(per, count - first)};
}

struct lg_piece lg_piece_within(struct lg_piece p, size_t first, size_t count)
{
    const size_t from = LG_MAX(p.at, first), to = LG_MIN(p.at + p.count, first + count);
    if (from >= to) return (struct lg_piece){.first = p.first, .at = p.at};
    return (struct lg_piece){.first = p.first + (from - p.at), .count = to - from, .at = from};
}

static struct lg_piece piece_of_unit(const lg_params *t, int unit, int shard, int shards)
{
    struct lg_piece p = lg_piece_of(t->unit[unit].count, shard, shards);
    p.first += t->unit[unit].first;
    return p;
}

size_t lg_shard_count(const lg_params *t, int shard, int shards)
{
    size_t count = 0;
    for (int u = 0; u < t->n_units; u++) count += piece_of_unit(t, u, shard, shards).count;
    return count;
}

struct lg_piece lg_shard_piece(const lg_params *t, int unit, int shard, int shards)
{
    struct lg_piece p = piece_of_unit(t, unit, shard, shards);
    for (int u = 0; u < unit; u++) p.at += piece_of_unit(t, u, shard, shards).count;
    return p;
}
