/* Philox4x32-10; see philox.h for the source. */
#include "base/philox.h"
#include "base/check.h"
#include <math.h>

enum { ROUNDS = 10 };
#define M0 0xD2511F53u
#define M1 0xCD9E8D57u
#define W0 0x9E3779B9u
#define W1 0xBB67AE85u

lg_philox_out lg_philox4x32(const uint32_t counter[4], const uint32_t key[2])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t p0 = (uint64_t)M0 * c0, p1 = (uint64_t)M1 * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0, c1 = (uint32_t)p1, c2 = n2, c3 = (uint32_t)p0;
        k0 += W0, k1 += W1;
    }
    return (lg_philox_out){{c0, c1, c2, c3}};
}

lg_philox_out lg_philox(uint64_t seed, lg_purpose purpose, uint64_t n, uint64_t block)
{
    uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)n,
                           (uint32_t)(n >> 32)};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32) ^ (uint32_t)purpose * 0x9E3779B9u};
    return lg_philox4x32(counter, key);
}

float lg_uniform_f32(uint32_t u)
{
    return (float)(u >> 8) * 0x1p-24f;
}

double lg_uniform_f64(uint32_t u)
{
    return ((double)u + 0.5) * 0x1p-32;
}

void lg_normal_pair(uint32_t a, uint32_t b, double ret[2])
{
    double r = sqrt(-2.0 * log(lg_uniform_f64(a))), t = 6.283185307179586476925 * lg_uniform_f64(b);
    ret[0] = r * cos(t);
    ret[1] = r * sin(t);
}

void lg_philox_normal_f64(double *out, size_t count, uint64_t seed, lg_purpose purpose, uint64_t n,
                          uint64_t first)
{
    for (size_t i = 0; i < count;) {
        uint64_t e = first + i;
        lg_philox_out p = lg_philox(seed, purpose, n, e / 4);
        double z[4];
        lg_normal_pair(p.v[0], p.v[1], z);
        lg_normal_pair(p.v[2], p.v[3], z + 2);
        for (uint64_t lane = e % 4; lane < 4 && i < count; lane++) out[i++] = z[lane];
    }
}

void lg_philox_normal_f32(float *out, size_t count, uint64_t seed, lg_purpose purpose, uint64_t n,
                          uint64_t first)
{
    for (size_t i = 0; i < count;) {
        double z[4];
        uint64_t e = first + i;
        size_t lanes = LG_MIN((size_t)(4 - e % 4), count - i);
        lg_philox_normal_f64(z, lanes, seed, purpose, n, e);
        for (size_t l = 0; l < lanes; l++) out[i++] = (float)z[l];
    }
}
