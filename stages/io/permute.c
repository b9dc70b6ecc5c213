/* A Feistel network over the smallest power of two that holds `count`, with cycle walking.
 *
 * Design: the position's b bits are cut into a low part of b/2 bits and a high part with the rest.
 * Each round xors one part with a keyed function (Philox) of the other, alternating: whatever the
 * function, that can be undone, so the network is a bijection of [0, 2^b). Unequal parts allow
 * every b, hence 2^b < 2 * count (for count >= 3). A result outside [0, count) is fed in again:
 * following the cycle of a bijection from a point inside [0, count) must come back inside, at the
 * latest at that point itself, and two different starts meet different ends. On average fewer than
 * two applications are needed.
 *
 * The function's input is (seed, SHUFFLE, epoch; round, part), so epochs and seeds are unrelated.
 * ROUNDS: four rounds are the least for a pseudorandom permutation (Luby and Rackoff); small
 * domains want more, and eight cost 0.3 us, nothing beside decoding a picture. */
#include "stages/io/permute.h"
#include "base/check.h"
#include "base/philox.h"

enum { ROUNDS = 8, BITS_MIN = 2 };

struct halves {
    unsigned low_bits, high_bits;
};

static struct halves halves_of(uint64_t count)
{
    unsigned bits = BITS_MIN;
    while (bits < 64 && count > 1ULL << bits) bits++;
    return (struct halves){.low_bits = bits / 2, .high_bits = bits - bits / 2};
}

static uint64_t network(uint64_t seed, uint64_t epoch, uint64_t x, struct halves h)
{
    uint64_t low = x & ((1ULL << h.low_bits) - 1), high = x >> h.low_bits;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint64_t from = round & 1 ? low : high; /* at most 32 bits */
        uint32_t f = lg_philox(seed, LG_PURPOSE_SHUFFLE, epoch, round << 32 | from).v[0];
        if (round & 1)
            high ^= f & ((1ULL << h.high_bits) - 1);
        else
            low ^= f & ((1ULL << h.low_bits) - 1);
    }
    return high << h.low_bits | low;
}

uint64_t lg_permute_walk(uint64_t seed, uint64_t epoch, uint64_t position, uint64_t count,
                         uint32_t *ret_applied)
{
    LG_ASSERT(count >= 1 && position < count);
    struct halves h = halves_of(count);
    uint64_t x = position;
    uint32_t applied = 0;
    do {
        x = network(seed, epoch, x, h);
        applied++; /* ends: see the head of this file */
    } while (x >= count);
    *ret_applied = applied;
    return x;
}

uint64_t lg_permute(uint64_t seed, uint64_t epoch, uint64_t position, uint64_t count)
{
    uint32_t applied;
    return lg_permute_walk(seed, epoch, position, count, &applied);
}
