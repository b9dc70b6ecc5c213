/* What a loader does with each pixel: frames of clips to RGB, and pictures to the size that is trained on. One JSON line
 * for each case: {"bench": "pixels", "case": .., "wide": .., "ms": ..}, the least of RUNS in milliseconds; wide: with the
 * vectors that this processor has, or with those that each x86-64 has. */
#include "base/clock.h"
#include "stages/io/clip_rgb.h"
#include "stages/io/resize.h"
#include "stages/io/wide.h"
#include <stdio.h>
#include <stdlib.h>

enum { RUNS = 20, BYTES = 4000 * 3000 * 3 };

static uint8_t *noise;

/* A picture that is cut elsewhere each time, as samples are. */
static void fit(int width, int height, int side, int run)
{
    static lg_resize_scratch scratch;
    static uint8_t out[3 * 1024 * 1024];
    const struct lg_fit_args a = {.rgb = noise,
                                  .width = width,
                                  .height = height,
                                  .out_w = side,
                                  .out_h = side,
                                  .crop_x = (run + 0.5) / RUNS,
                                  .crop_y = 0.5,
                                  .flip = run % 2,
                                  .out = out};
    LG_ASSERT(lg_fit(&a, &scratch) == 0);
}

/* n = 3: Y, Cb and Cr, of which a sample of the last two covers four pixels; n = 4: R, G, B and opacity side by side. */
static void colours(int width, int height, int depth, int n)
{
    static lg_picture picture;
    const int bytes = depth > 8 ? 2 : 1;
    struct lg_clip_planes p = {.width = width,
                               .height = height,
                               .colours = n == 4 ? LG_CLIP_RGB : LG_CLIP_BT709,
                               .is_full = n == 4,
                               .n = n};
    for (int c = 0; c < n; c++)
        p.of[c] = n == 4 ? (struct lg_clip_component){noise + c, 4 * width, 4, 8, 0, 0, 0}
                         : (struct lg_clip_component){noise + c * bytes * width * height,
                                                      bytes * (c ? (width + 1) / 2 : width),
                                                      bytes,
                                                      depth,
                                                      0,
                                                      c > 0,
                                                      c > 0};
    LG_ASSERT(lg_clip_rgb(&p, &picture) == 0);
}

static const struct bench {
    const char *name;
    int width, height;
    int side;     /* to this; 0: colours */
    int depth, n; /* of colours */
} CASES[] = {{"frame of its size", 448, 448, 448, 0, 0},
             {"1024 x 768 to 512", 1024, 768, 512, 0, 0},
             {"1280 x 720 to 256", 1280, 720, 256, 0, 0},
             {"4000 x 3000 to 1024", 4000, 3000, 1024, 0, 0},
             {"256 x 256 to 512", 256, 256, 512, 0, 0},
             {"RGB with opacity, 448 x 448", 448, 448, 0, 8, 4},
             {"4:2:0 of 8 bits, 448 x 448", 448, 448, 0, 8, 3},
             {"4:2:0 of 8 bits, 1280 x 720", 1280, 720, 0, 8, 3},
             {"4:2:0 of 10 bits, 448 x 448", 448, 448, 0, 10, 3}};

static void measure(const struct bench *b)
{
    int64_t least = INT64_MAX;
    for (int run = 0; run < RUNS; run++) {
        const int64_t begin = lg_now_ns();
        if (b->side)
            fit(b->width, b->height, b->side, run);
        else
            colours(b->width, b->height, b->depth, b->n);
        least = LG_MIN(least, lg_now_ns() - begin);
    }
    printf("{\"bench\": \"pixels\", \"case\": \"%s\", \"wide\": %s, \"ms\": %.3f}\n", b->name,
           lg_wide() ? "true" : "false", (double)least / LG_MS_NS);
}

int main(void)
{
    uint32_t seed = 1;
    noise = malloc(BYTES);
    LG_ASSERT(noise);
    for (int i = 0; i < BYTES; i++) {
        seed = seed * 1664525u + 1013904223u;
        noise[i] = (uint8_t)(seed >> 24);
    }
    for (int wide = 1; wide >= 0; wide--) {
        lg_wide_allow(wide);
        if (wide && !lg_wide()) continue;
        for (size_t i = 0; i < LG_ARRAY_LEN(CASES); i++) measure(&CASES[i]);
    }
    free(noise);
    return 0;
}
