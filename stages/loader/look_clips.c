/* Clips of a data set; see look_clips.h. */
#include "stages/loader/look_clips.h"
#include "base/heartbeat.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

enum { PIECE_BYTES = 1 << 20 };

static int by_number(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

struct lg_spread lg_spread_of(uint32_t *v, uint64_t n)
{
    if (!n) return (struct lg_spread){0, 0, 0};
    qsort(v, n, sizeof *v, by_number);
    return (struct lg_spread){v[0], v[n / 2], v[n - 1]};
}

static int hash_bytes(const struct lg_clip_input *in, struct lg_clip_hash *ret)
{
    XXH3_state_t *h = XXH3_createState();
    uint8_t *piece = malloc(PIECE_BYTES);
    int rc = h && piece ? 0 : LG_FAIL(LG_ERR_NOSPACE, "no memory to read a clip");
    if (rc == 0) XXH3_64bits_reset(h);
    for (uint64_t at = 0, n; rc == 0 && at < in->bytes; at += n) {
        n = LG_MIN(in->bytes - at, (uint64_t)PIECE_BYTES);
        rc = in->read(in->arg, at, piece, n);
        if (rc == 0) XXH3_64bits_update(h, piece, n);
        lg_heartbeat();
    }
    if (rc == 0) *ret = (struct lg_clip_hash){XXH3_64bits_digest(h), in->bytes};
    XXH3_freeState(h);
    free(piece);
    return rc;
}

static int drop_frame(void *arg, int first, int end, const lg_picture *p)
{
    (void)arg, (void)first, (void)end, (void)p;
    return 0;
}

int lg_look_at_clip(const struct lg_clip_input *in, int frames, struct lg_item_size *ret_size,
                    struct lg_clip_hash *ret_hash)
{
    struct lg_clip_info info;
    LG_TRY(hash_bytes(in, ret_hash));
    LG_TRY(lg_clip_look(in, &info));
    *ret_size = (struct lg_item_size){.width = (uint16_t)info.width,
                                      .height = (uint16_t)info.height,
                                      .frames = info.frames,
                                      .duration_ms = info.duration_ms};
    const struct lg_clip_choice middle = {.frames = (int)LG_MIN((uint32_t)frames, info.frames),
                                          .start = 0.5};
    LG_TRY(lg_clip_read(in, &middle, drop_frame, NULL, &info));
    return 0;
}

static uint32_t per_mille(const struct lg_item_size *s) /* frames in 1000 s */
{
    return s->duration_ms ? (uint32_t)((uint64_t)s->frames * 1000000 / s->duration_ms) : 0;
}

/* Figures of all clips; in what they are counted, and how many of the number are one of the unit. */
struct figure {
    const char *name, *unit;
    uint32_t (*of)(const struct lg_item_size *s);
    double scale;
};

static uint32_t frames_of(const struct lg_item_size *s)
{
    return s->frames;
}

static uint32_t duration_of(const struct lg_item_size *s)
{
    return s->duration_ms;
}

static void print_figures(const struct lg_look_clips *l, uint64_t clips)
{
    static const struct figure figures[] = {{"frames", "", frames_of, 1},
                                            {"duration", " s", duration_of, 1000},
                                            {"frames a second", "", per_mille, 1000}};
    printf("clips: %" PRIu64 " of %" PRIu64 " samples\n", clips, l->count);
    for (size_t k = 0; k < LG_ARRAY_LEN(figures); k++) {
        const struct figure *f = &figures[k];
        uint64_t n = 0;
        for (uint64_t i = 0; i < l->count; i++)
            if (l->size[i].frames > 1) l->v[n++] = f->of(&l->size[i]);
        const struct lg_spread s = lg_spread_of(l->v, n);
        printf("%s: %.4g to %.4g%s, median %.4g\n", f->name, s.least / f->scale, s.most / f->scale,
               f->unit, s.median / f->scale);
    }
}

void lg_look_print_clips(const struct lg_look_clips *l)
{
    uint64_t clips = 0, pictures = 0, too_short = 0;
    for (uint64_t i = 0; i < l->count; i++) {
        const struct lg_item_size *s = &l->size[i];
        const struct lg_clip_info info = {.frames = s->frames, .duration_ms = s->duration_ms};
        pictures += s->frames == 1;
        clips += s->frames > 1;
        too_short += s->frames > 1 && lg_clip_frames_at(&info, &l->rate) < (uint32_t)l->frames;
    }
    if (clips) print_figures(l, clips);
    if (too_short)
        printf("    %" PRIu64 " clips are too short for %d frames, and would be trained with "
               "weight 0\n",
               too_short, l->frames);
    if (l->frames && pictures && !l->has_pictures)
        printf("    %" PRIu64
               " pictures, and no bucket of one frame in data.buckets: they would be "
               "trained with weight 0\n",
               pictures);
}
