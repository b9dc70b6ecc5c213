/* GIF89a (CompuServe, "Graphics Interchange Format, version 89a", 1990), by own code: equal frames give equal bytes
 * everywhere. One palette for the clip; each frame is the rectangle that differs from the one before; it repeats for ever. */
#include "stages/io/clip_write_private.h"
#include "stages/io/palette.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    CODE_BITS_MAX = 12,
    CODES = 1 << CODE_BITS_MAX,
    BLOCK_MAX = 255, /* bytes of a data sub-block */
};

struct rectangle {
    int x0, y0, x1, y1; /* the ends are outside */
};

/* Codes to bits, the least first, to sub-blocks. */
struct sink {
    struct lg_clip_bytes *out;
    uint32_t bits;
    int n_bits;
    uint8_t block[1 + BLOCK_MAX]; /* its length first */
    int rc;
};

static void flush(struct sink *s)
{
    if (s->block[0] && s->rc == 0) s->rc = lg_clip_put(s->out, s->block, 1u + s->block[0]);
    s->block[0] = 0;
}

static void put_byte(struct sink *s, uint8_t byte)
{
    s->block[++s->block[0]] = byte;
    if (s->block[0] == BLOCK_MAX) flush(s);
}

static void put_code(struct sink *s, unsigned code, int bits)
{
    s->bits |= code << s->n_bits;
    s->n_bits += bits;
    for (; s->n_bits >= 8; s->n_bits -= 8, s->bits >>= 8) put_byte(s, (uint8_t)s->bits);
}

static void end_codes(struct sink *s)
{
    if (s->n_bits) put_byte(s, (uint8_t)s->bits);
    flush(s);
    if (s->rc == 0) s->rc = lg_clip_put(s->out, "", 1);
}

/* What LZW knows: the code of (code, index), 0: none, since code 0 is no continuation of anything. */
typedef uint16_t table[CODES][LG_PALETTE_MAX];

/* Appendix F of the standard. The table is begun again when it is full. */
static int compress(const uint8_t *index, int width, const struct rectangle *r, int depth,
                    table *next, struct lg_clip_bytes *out)
{
    struct sink s = {.out = out};
    const unsigned clear = 1u << depth, end = clear + 1;
    const uint8_t least = (uint8_t)depth;
    unsigned codes = end + 1;
    int bits = depth + 1, code = -1;
    LG_TRY(lg_clip_put(out, &least, 1));
    memset(next, 0, sizeof *next);
    put_code(&s, clear, bits);
    for (int y = r->y0; y < r->y1; y++)
        for (int x = r->x0; x < r->x1; x++) {
            const uint8_t value = index[(size_t)y * (size_t)width + (size_t)x];
            if (code < 0) {
                code = value;
                continue;
            }
            if ((*next)[code][value]) {
                code = (*next)[code][value];
                continue;
            }
            put_code(&s, (unsigned)code, bits);
            (*next)[code][value] = (uint16_t)codes;
            code = value;
            if (codes == (1u << bits) && bits < CODE_BITS_MAX) bits++;
            if (++codes < CODES) continue;
            put_code(&s, clear, bits);
            memset(next, 0, sizeof *next);
            codes = end + 1;
            bits = depth + 1;
        }
    put_code(&s, (unsigned)code, bits);
    if (codes == (1u << bits) && bits < CODE_BITS_MAX) bits++; /* as the reader does after it */
    put_code(&s, end, bits);
    end_codes(&s);
    return s.rc;
}

/* What differs between two frames; a pixel when nothing does. */
static struct rectangle difference(const uint8_t *a, const uint8_t *b, int width, int height)
{
    struct rectangle r = {.x0 = width, .y0 = height};
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x++) {
            const size_t at = (size_t)y * (size_t)width + (size_t)x;
            if (a[at] == b[at]) continue;
            r.x0 = LG_MIN(r.x0, x);
            r.y0 = LG_MIN(r.y0, y);
            r.x1 = LG_MAX(r.x1, x + 1);
            r.y1 = LG_MAX(r.y1, y + 1);
        }
    return r.x0 < r.x1 ? r : (struct rectangle){0, 0, 1, 1};
}

#define LITTLE(v) (uint8_t)((v)&255), (uint8_t)((v) >> 8 & 255)

static int put_head(const struct lg_clip *c, const struct lg_palette *p, int depth,
                    struct lg_clip_bytes *out)
{
    const uint8_t screen[] = {
        'G',
        'I',
        'F',
        '8',
        '9',
        'a',
        LITTLE(c->width),
        LITTLE(c->height),
        (uint8_t)(0xf0 | (depth - 1)), /* a palette of 8-bit colours, of 2^depth entries */
        0,
        0};
    static const uint8_t repeat[] = {0x21, 0xff, 11,  'N', 'E', 'T', 'S', 'C', 'A', 'P',
                                     'E',  '2',  '.', '0', 3,   1,   0,   0,   0}; /* for ever */
    LG_TRY(lg_clip_put(out, screen, sizeof screen));
    LG_TRY(lg_clip_put(out, p->rgb, (size_t)3 << depth));
    if (c->frames > 1) LG_TRY(lg_clip_put(out, repeat, sizeof repeat));
    return 0;
}

/* Frame f lasts until (f + 1) / fps, in hundredths of a second; what lasts less than two viewers show for ten. */
static int delay(const struct lg_clip *c, int f)
{
    long d = lround(100.0 * (f + 1) / c->fps) - lround(100.0 * f / c->fps);
    return (int)LG_MIN(LG_MAX(d, 2), 65535);
}

static int put_frame(const struct lg_clip *c, int f, const struct rectangle *r,
                     struct lg_clip_bytes *out)
{
    const int wait = delay(c, f);
    const uint8_t control[] = {0x21, 0xf9, 4, 4 /* stays */, LITTLE(wait), 0, 0};
    const uint8_t place[] = {
        0x2c, LITTLE(r->x0), LITTLE(r->y0), LITTLE(r->x1 - r->x0), LITTLE(r->y1 - r->y0), 0};
    if (c->frames > 1) LG_TRY(lg_clip_put(out, control, sizeof control));
    LG_TRY(lg_clip_put(out, place, sizeof place));
    return 0;
}

static int put_frames(const struct lg_clip *c, uint8_t *index, table *next,
                      struct lg_clip_bytes *out)
{
    const size_t pixels = (size_t)c->width * (size_t)c->height;
    struct lg_palette p;
    int depth = 2; /* LZW wants two bits at least */
    LG_TRY(lg_palette_of(c->rgb, pixels * (size_t)c->frames, &p, index));
    while (1 << depth < p.n) depth++;
    LG_TRY(put_head(c, &p, depth, out));
    for (int f = 0; f < c->frames; f++) {
        const uint8_t *at = index + pixels * (size_t)f;
        struct rectangle r = {0, 0, c->width, c->height};
        if (f) r = difference(at - pixels, at, c->width, c->height);
        LG_TRY(put_frame(c, f, &r, out));
        LG_TRY(compress(at, c->width, &r, depth, next, out));
    }
    LG_TRY(lg_clip_put(out, ";", 1));
    return 0;
}

int lg_clip_write_gif(const struct lg_clip *c, struct lg_clip_bytes *out)
{
    uint8_t *index = malloc((size_t)c->width * (size_t)c->height * (size_t)c->frames);
    table *next = malloc(sizeof *next);
    int rc = index && next ? put_frames(c, index, next, out)
                           : LG_FAIL(LG_ERR_NOSPACE, "no memory for a GIF of %d frames", c->frames);
    free(index);
    free(next);
    return rc;
}
