/* Chunks of the moments; see moments.h. */
#include "stages/trainer/moments.h"

/* Whole pieces of units, so that no kernel meets a shorter row than without chunks. */
size_t lg_moments_chunk_count(size_t shard)
{
    const size_t per = (shard + LG_MOMENTS_CHUNKS - 1) / LG_MOMENTS_CHUNKS;
    return LG_MAX((per + LG_UNIT_ALIGN - 1) / LG_UNIT_ALIGN, (size_t)1) * LG_UNIT_ALIGN;
}

int lg_moments_chunks(size_t shard)
{
    const size_t chunk = lg_moments_chunk_count(shard);
    return (int)((shard + chunk - 1) / chunk);
}

size_t lg_moments_bytes(size_t shard)
{
    return (size_t)(lg_moments_chunks(shard) + 1) * 2 * lg_moments_chunk_count(shard) *
           sizeof(float);
}

struct lg_chunk lg_moments_chunk(float *payload, size_t shard, int k, uint64_t t)
{
    const int n = lg_moments_chunks(shard);
    const size_t chunk = lg_moments_chunk_count(shard), first = (size_t)k * chunk;
    LG_ASSERT(k >= 0 && k < n);
    float *m = payload + (size_t)lg_moments_place(n, k, t) * 2 * chunk;
    return (struct lg_chunk){
        .first = first, .count = LG_MIN(chunk, shard - first), .m = m, .v = m + chunk};
}
