/* Chunks of the moments; see moments.h. */
#include "stages/trainer/moments.h"
#include <stdlib.h>
#include <string.h>

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

size_t lg_moments_full_before(const lg_moments_layout *l, size_t element)
{
    if (!l->in_blocks) return element;
    size_t before = 0;
    for (const struct lg_full_part *p = l->part; p < l->part + l->n_parts; p++) {
        if (element <= p->first) break;
        before = p->before + LG_MIN(element - p->first, p->count);
    }
    return before;
}

static void add_part(lg_moments_layout *l, size_t first, size_t count)
{
    l->part = realloc(l->part, (size_t)(l->n_parts + 1) * sizeof *l->part);
    LG_ASSERT(l->part);
    const struct lg_full_part *last = l->n_parts ? &l->part[l->n_parts - 1] : NULL;
    l->part[l->n_parts++] = (struct lg_full_part){
        .first = first, .count = count, .before = last ? last->before + last->count : 0};
}

lg_moments_layout lg_moments_layout_of(const lg_params *t, int shard, int shards)
{
    lg_moments_layout l = {.count = lg_shard_count(t, shard, shards), .in_blocks = t->in_blocks};
    for (int u = 0; l.in_blocks && u < t->n_units; u++) {
        const struct lg_piece p = lg_shard_piece(t, u, shard, shards);
        for (size_t at = p.first, next; at < p.first + p.count; at = next) {
            bool coded;
            next = lg_params_coded_end(t, at, p.first + p.count, &coded);
            if (!coded) add_part(&l, p.at + (at - p.first), next - at);
        }
    }
    const size_t chunk = lg_moments_chunk_count(l.count);
    for (size_t at = 0; at < l.count; at += chunk)
        l.full = LG_MAX(l.full, lg_moments_full_before(&l, LG_MIN(at + chunk, l.count)) -
                                    lg_moments_full_before(&l, at));
    return l;
}

void lg_moments_layout_free(lg_moments_layout *l)
{
    free(l->part);
    *l = (lg_moments_layout){0};
}

/* Of m and v of so many elements. */
static size_t bytes_of(const lg_moments_layout *l, size_t count, size_t full)
{
    const size_t coded = l->in_blocks ? count + count / LG_ADAMW8_BLOCK * sizeof(float) : 0;
    return 2 * (full * sizeof(float) + coded);
}

/* With room for `count` elements, `full` of them fp32. */
static struct lg_chunk laid_out(const lg_moments_layout *l, void *memory, size_t count, size_t full)
{
    struct lg_chunk c = {.m = memory};
    c.v = c.m + full;
    if (!l->in_blocks) return c;
    c.m_max = c.v + full;
    c.v_max = c.m_max + count / LG_ADAMW8_BLOCK;
    c.m_code = (uint8_t *)(c.v_max + count / LG_ADAMW8_BLOCK);
    c.v_code = c.m_code + count;
    return c;
}

struct lg_chunk lg_moments_part(const lg_moments_layout *l, const struct lg_chunk *of, size_t first,
                                size_t count)
{
    const size_t in = first - of->first, full = lg_moments_full_before(l, first);
    const size_t skip = full - lg_moments_full_before(l, of->first);
    struct lg_chunk c = *of;
    LG_ASSERT(first >= of->first && in + count <= of->count);
    c.first = first;
    c.count = count;
    c.full = lg_moments_full_before(l, first + count) - full;
    c.m += skip;
    c.v += skip;
    if (!l->in_blocks) return c;
    LG_ASSERT(in % LG_ADAMW8_BLOCK == 0 && count % LG_ADAMW8_BLOCK == 0);
    c.m_max += in / LG_ADAMW8_BLOCK;
    c.v_max += in / LG_ADAMW8_BLOCK;
    c.m_code += in;
    c.v_code += in;
    return c;
}

size_t lg_moments_whole_bytes(const lg_moments_layout *l)
{
    return bytes_of(l, l->count, lg_moments_full_before(l, l->count));
}

struct lg_chunk lg_moments_whole(const lg_moments_layout *l, void *memory)
{
    const size_t full = lg_moments_full_before(l, l->count);
    struct lg_chunk c = laid_out(l, memory, l->count, full);
    c.count = l->count;
    c.full = full;
    return c;
}

void lg_moments_clear(const struct lg_chunk *c)
{
    memset(c->m, 0, c->full * sizeof *c->m);
    memset(c->v, 0, c->full * sizeof *c->v);
    if (!c->m_code) return;
    memset(c->m_max, 0, c->count / LG_ADAMW8_BLOCK * sizeof *c->m_max);
    memset(c->v_max, 0, c->count / LG_ADAMW8_BLOCK * sizeof *c->v_max);
    memset(c->m_code, LG_ADAMW8_ZERO_M, c->count);
    memset(c->v_code, LG_ADAMW8_ZERO_V, c->count);
}

static size_t place_bytes(const lg_moments_layout *l)
{
    const size_t chunk = lg_moments_chunk_count(l->count);
    return bytes_of(l, chunk, l->in_blocks ? l->full : chunk);
}

size_t lg_moments_bytes(const lg_moments_layout *l)
{
    return (size_t)(lg_moments_chunks(l->count) + 1) * place_bytes(l);
}

struct lg_chunk lg_moments_chunk(const lg_moments_layout *l, void *payload, int k, uint64_t t)
{
    const int n = lg_moments_chunks(l->count);
    const size_t chunk = lg_moments_chunk_count(l->count), first = (size_t)k * chunk;
    LG_ASSERT(k >= 0 && k < n);
    void *place = (char *)payload + (size_t)lg_moments_place(n, k, t) * place_bytes(l);
    struct lg_chunk c = laid_out(l, place, chunk, l->in_blocks ? l->full : chunk);
    c.first = first;
    c.count = LG_MIN(chunk, l->count - first);
    c.full = lg_moments_full_before(l, first + c.count) - lg_moments_full_before(l, first);
    return c;
}
