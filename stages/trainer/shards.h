/* How what is trained is cut over the ranks (ZeRO; Rajbhandari et al. 2020).
 *
 * A group of `shards` ranks holds one copy of the state; there are ranks / shards such groups, all with the same bits,
 * and rank r holds shard r mod shards of its group's copy. Each unit of the parameters (nets/params.h) is cut alone,
 * into pieces of equal length; a shard is its piece of every unit, one behind the other, so that a unit is gathered, and
 * its gradient scattered, by itself:
 *
 *     flat buffer   [ unit 0: p0 p1 p2 ][ unit 1: p0 p1 p2 ] ..
 *     shard 1       [ p1 of unit 0 | p1 of unit 1 | .. ]
 *
 * Pieces begin at multiples of LG_UNIT_ALIGN elements, the last ones of a unit are shorter or empty. So the pieces of
 * the gradient's squares (lg_reduce_ranks) are the same ones for every number of shards. */
#pragma once
#include "stages/nets/params.h"

struct lg_piece {
    size_t first, count; /* elements of what is cut; count may be 0 */
    size_t at;           /* element of the shard */
};

/* Piece `shard` of `shards` of a stretch of `count` elements; `at` is 0. */
struct lg_piece lg_piece_of(size_t count, int shard, int shards);
/* The piece of a unit of the table, in the flat buffer and in the shard. */
struct lg_piece lg_shard_piece(const lg_params *t, int unit, int shard, int shards);
/* What of a piece lies in elements [first, first + count) of the shard. */
struct lg_piece lg_piece_within(struct lg_piece p, size_t first, size_t count);
/* Elements of a whole shard. */
size_t lg_shard_count(const lg_params *t, int shard, int shards);
