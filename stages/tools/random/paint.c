/* See paint.h. */
#include "stages/tools/random/paint.h"
#include "base/check.h"
#include "base/philox.h"
#include <math.h>
#include <string.h>

enum {
    GRID = 24,  /* random colours on a side of a picture */
    GRAIN = 25, /* range of the noise on each pixel */
    DISCS = 12,
    DISC_DRAWS = 1 << 22, /* where a clip's draws begin: pictures have those before it */
};

void lg_random_paint_picture(uint64_t seed, uint64_t n, struct lg_random_sides s, uint8_t *rgb)
{
    uint8_t grid[(GRID + 1) * (GRID + 1) * 3 + 16];
    for (size_t i = 0; i < (GRID + 1) * (GRID + 1) * 3; i += 16) {
        lg_philox_out p = lg_philox(seed, LG_PURPOSE_TEST, n, i / 16);
        memcpy(grid + i, p.v, 16);
    }
    uint32_t noise = (uint32_t)(n * 2654435761u) ^ (uint32_t)seed;
    for (int y = 0; y < s.height; y++)
        for (int x = 0; x < s.width; x++) {
            int gx = x * GRID * 256 / s.width, gy = y * GRID * 256 / s.height;
            int fx = gx & 255, fy = gy & 255;
            const uint8_t *a = grid + 3 * ((gy >> 8) * (GRID + 1) + (gx >> 8));
            const uint8_t *b = a + 3 * (GRID + 1);
            noise = noise * 1664525u + 1013904223u;
            int grain = (int)((noise >> 16) % GRAIN) - GRAIN / 2;
            for (int c = 0; c < 3; c++) {
                int top = a[c] * (256 - fx) + a[3 + c] * fx;
                int low = b[c] * (256 - fx) + b[3 + c] * fx;
                int v = ((top * (256 - fy) + low * fy) >> 16) + grain;
                *rgb++ = (uint8_t)LG_MAX(0, LG_MIN(255, v));
            }
        }
}

struct disc {
    double x, y, dx, dy; /* its centre, in pixels, and how far it moves from frame to frame */
    double radius;
    uint8_t colour[3];
};

static struct disc draw_disc(uint64_t seed, uint64_t n, int i, struct lg_random_sides s)
{
    const double side = LG_MIN(s.width, s.height);
    lg_philox_out place = lg_philox(seed, LG_PURPOSE_TEST, n, DISC_DRAWS + (uint64_t)i * 2);
    lg_philox_out look = lg_philox(seed, LG_PURPOSE_TEST, n, DISC_DRAWS + (uint64_t)i * 2 + 1);
    struct disc d = {
        .x = s.width * lg_uniform_f64(place.v[0]),
        .y = s.height * lg_uniform_f64(place.v[1]),
        .dx = side * 0.02 * (2 * lg_uniform_f64(place.v[2]) - 1),
        .dy = side * 0.02 * (2 * lg_uniform_f64(place.v[3]) - 1),
        .radius = side * (0.04 + 0.16 * lg_uniform_f64(look.v[1])),
    };
    memcpy(d.colour, &look.v[0], sizeof d.colour);
    return d;
}

static double wrapped(double v, double period)
{
    return v - period * floor(v / period);
}

static void paint_disc(const struct disc *d, int frame, struct lg_random_sides s, uint8_t *rgb)
{
    const double r = d->radius, cx = wrapped(d->x + d->dx * frame + r, s.width + 2 * r) - r;
    const double cy = wrapped(d->y + d->dy * frame + r, s.height + 2 * r) - r;
    const int top = (int)LG_MAX(ceil(cy - r), 0), end = (int)LG_MIN(floor(cy + r) + 1, s.height);
    for (int y = top; y < end; y++) {
        const double half = sqrt(LG_MAX(r * r - (y - cy) * (y - cy), 0));
        const int from = (int)LG_MAX(ceil(cx - half), 0);
        const int to = (int)LG_MIN(floor(cx + half) + 1, s.width);
        for (int x = from; x < to; x++)
            memcpy(rgb + 3 * ((size_t)y * (size_t)s.width + (size_t)x), d->colour, 3);
    }
}

void lg_random_paint_clip(uint64_t seed, uint64_t n, struct lg_random_sides s, int frames,
                          uint8_t *rgb)
{
    const size_t pixels = (size_t)s.width * (size_t)s.height;
    const struct disc ground = draw_disc(seed, n, DISCS, s);
    for (int f = 0; f < frames; f++, rgb += 3 * pixels) {
        for (size_t i = 0; i < pixels; i++) memcpy(rgb + 3 * i, ground.colour, 3);
        for (int i = 0; i < DISCS; i++) {
            const struct disc d = draw_disc(seed, n, i, s);
            paint_disc(&d, f, s, rgb);
        }
    }
}
