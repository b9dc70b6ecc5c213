/* Fuzz target: a film in memory: its frames, and some of them decoded. libav itself is not instrumented; what is looked for are
 * promises that our half breaks, memory that it loses, and work without a bound. */
#include "stages/io/clip_read.h"
#include "tests/fuzz/fuzz.h"
#include <stdlib.h>
#include <string.h>

enum { FRAMES = 4, PIXELS_MAX = 1 << 18 /* larger frames take a sanitizer seconds to convert */ };

struct seen {
    int n;
};

static int on_frame(void *arg, int first, int end, const lg_picture *p)
{
    struct seen *s = arg;
    LG_ASSERT(first == s->n && end > first && end <= FRAMES);
    LG_ASSERT(p->width >= 1 && p->width <= LG_CLIP_READ_SIDE_MAX);
    LG_ASSERT(p->height >= 1 && p->height <= LG_CLIP_READ_SIDE_MAX);
    LG_ASSERT(p->capacity >= 3 * (size_t)p->width * (size_t)p->height);
    s->n = end;
    return 0;
}

/* What can be read has been counted alike, and comes whole. */
static void read_at(const struct lg_clip_input *in, const struct lg_clip_info *info, bool is_film,
                    const struct lg_clip_choice *c)
{
    struct lg_clip_info again;
    struct seen s = {0};
    int rc = lg_clip_read(in, c, on_frame, &s, &again);
    LG_ASSERT(rc == 0 || rc == LG_ERR_VOID);
    LG_ASSERT(rc < 0 || s.n == FRAMES);
    LG_ASSERT(rc < 0 || (is_film && !memcmp(info, &again, sizeof again)));
    LG_ASSERT(rc < 0 || lg_clip_frames_at(info, &c->rate) >= FRAMES);
    lg_err_clear();
}

LG_FUZZ_TARGET(clip)
{
    uint8_t *copy = malloc(bytes ? bytes : 1); /* exactly as large */
    LG_ASSERT(copy);
    if (bytes) memcpy(copy, data, bytes);
    struct lg_clip_memory memory = {.data = copy, .bytes = bytes};
    const struct lg_clip_input in = lg_clip_memory(&memory);
    struct lg_clip_info info = {0};
    int rc = lg_clip_look(&in, &info);
    LG_ASSERT(rc == 0 || rc == LG_ERR_VOID);
    LG_ASSERT(rc < 0 || (info.frames >= 1 && info.frames <= LG_CLIP_READ_FRAMES_MAX));
    LG_ASSERT(rc < 0 || lg_clip_is(copy, bytes));
    lg_err_clear();
    if (info.width * info.height <= PIXELS_MAX) {
        read_at(&in, &info, rc == 0, &(struct lg_clip_choice){.frames = FRAMES, .start = 0.9});
        read_at(&in, &info, rc == 0,
                &(struct lg_clip_choice){.frames = FRAMES, .rate = {.fps = 15}});
    }
    free(copy);
}
