/* Does what moves in clips go where their captions say? Of the clips that `lgsup sample` has drawn of captions like "a red heart
 * moves left" (stages/tools/emoji/motions.def), by the centre of mass of what is not white.
 *
 * usage: clip_motion STRIPS.png SIZE CAPTIONS.txt [MISSES]
 *
 * STRIPS.png: a row for each caption (sample.columns = 1), frames of SIZE x SIZE side by side, each with a border of 2 pixels.
 * Per clip: the mass of a pixel is how much darker than white it is, where that is more than NOISE; the centre of a frame is
 * weighted by it; the way is the slope of the centres over the frames (least squares) times their number. A clip follows its
 * caption when that way's larger part goes in the caption's direction and is at least SIZE / 8 long (what it was made of goes
 * 0.38 SIZE). Captions of other motions are counted by themselves: grows, shrinks and fades by the slope of the mass, which has
 * to change by a quarter of its mean at least, with that sign; turns are not measured.
 *
 * Prints a line for each kind, "left 15 of 16", then "followed N of M" of the directions. Exits with 0 when at most MISSES
 * (default: a fifth) of these do not follow, else with 1. */
#include "base/fs.h"
#include "stages/io/picture.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BORDER = 2, NOISE = 24 /* levels: what the autoencoder leaves on white */ };

typedef enum motion {
#define LG_MOTION(name, caption) MOTION_##name,
#include "stages/tools/emoji/motions.def"
#undef LG_MOTION
    MOTIONS
} motion;
static const char *const names[MOTIONS] = {
#define LG_MOTION(name, caption) #name,
#include "stages/tools/emoji/motions.def"
#undef LG_MOTION
};
static const char *const captions[MOTIONS] = {
#define LG_MOTION(name, caption) caption,
#include "stages/tools/emoji/motions.def"
#undef LG_MOTION
};

/* MOTIONS: the caption says none. */
static motion motion_of(const char *caption)
{
    for (int i = 0; i < MOTIONS; i++) {
        const size_t all = strlen(caption), end = strlen(captions[i]);
        if (all > end && !strcmp(caption + all - end, captions[i])) return (motion)i;
    }
    return MOTIONS;
}

struct centre {
    double x, y, mass; /* pixels from the frame's corner; mass 0: nothing is seen */
};

static struct centre centre_of(const lg_picture *p, int left, int top, int size)
{
    struct centre c = {0};
    for (int y = 0; y < size; y++)
        for (int x = 0; x < size; x++) {
            const uint8_t *rgb =
                p->rgb + 3 * ((size_t)(top + y) * (size_t)p->width + (size_t)(left + x));
            const int dark = 255 - LG_MIN(LG_MIN(rgb[0], rgb[1]), rgb[2]);
            if (dark <= NOISE) continue;
            c.mass += dark, c.x += dark * (x + 0.5), c.y += dark * (y + 0.5);
        }
    if (c.mass > 0) c.x /= c.mass, c.y /= c.mass;
    return c;
}

/* Slopes over the frames times their number; mass: relative to its mean. Frames where nothing is seen have no centre. */
static struct centre way_of(const lg_picture *p, int row, int size)
{
    const int cell = size + 2 * BORDER, frames = p->width / cell;
    double n = 0, t = 0, tt = 0, x = 0, y = 0, tx = 0, ty = 0, mass = 0, tmass = 0;
    for (int f = 0; f < frames; f++) {
        const struct centre c = centre_of(p, f * cell + BORDER, row * cell + BORDER, size);
        const double at = f - (frames - 1) / 2.0;
        mass += c.mass, tmass += at * c.mass;
        if (c.mass == 0) continue;
        n++, t += at, tt += at * at;
        x += c.x, y += c.y, tx += at * c.x, ty += at * c.y;
    }
    const double spread = n * tt - t * t, all = frames * (frames * (double)frames - 1) / 12;
    struct centre way = {0};
    if (spread > 0) {
        way.x = (n * tx - t * x) / spread * frames;
        way.y = (n * ty - t * y) / spread * frames;
    }
    if (mass > 0) way.mass = tmass / all * frames / (mass / frames);
    return way;
}

static bool follows(motion m, const struct centre *way, int size)
{
    const double least = size / 8.0;
    const bool level = fabs(way->x) > fabs(way->y);
    switch (m) {
    case MOTION_left:
        return level && way->x <= -least;
    case MOTION_right:
        return level && way->x >= least;
    case MOTION_up:
        return !level && way->y <= -least;
    case MOTION_down:
        return !level && way->y >= least;
    case MOTION_grows:
        return way->mass >= 0.25;
    case MOTION_shrinks:
    case MOTION_fades:
        return way->mass <= -0.25;
    case MOTION_turns:
    case MOTIONS:
        break;
    }
    return false;
}

struct count {
    int n, followed;
};

static int measure(const lg_picture *p, int size, char *list, struct count count[MOTIONS])
{
    const int cell = size + 2 * BORDER, rows = p->height / cell;
    char *save = NULL;
    int row = 0;
    if (p->width % cell || p->height % cell)
        return LG_FAIL(LG_ERR_USAGE, "%d x %d pixels are no strips of frames of %d x %d", p->height,
                       p->width, size, size);
    for (char *line = strtok_r(list, "\n", &save); line;
         line = strtok_r(NULL, "\n", &save), row++) {
        const motion m = motion_of(line);
        if (row >= rows) return LG_FAIL(LG_ERR_USAGE, "more captions than the %d strips", rows);
        if (m == MOTIONS) return LG_FAIL(LG_ERR_USAGE, "\"%s\" says no motion", line);
        if (m == MOTION_turns) continue;
        const struct centre way = way_of(p, row, size);
        const bool well = follows(m, &way, size);
        count[m].n++;
        count[m].followed += well;
        if (!well)
            printf("  not: %s: by %.1f, %.1f pixels, mass %+.0f %%\n", line, way.x, way.y,
                   100 * way.mass);
    }
    return row == rows ? 0 : LG_FAIL(LG_ERR_USAGE, "%d captions for %d strips", row, rows);
}

static int run(char **argv, const char *misses)
{
    char *png, *list;
    size_t bytes, list_bytes;
    lg_picture p = {0};
    struct count count[MOTIONS] = {0}, all = {0};
    LG_TRY(lg_read_file(argv[1], LG_PICTURE_BYTES_MAX, &png, &bytes));
    LG_TRY(lg_picture_decode(png, bytes, 0, &p));
    LG_TRY(lg_read_file(argv[3], 1 << 20, &list, &list_bytes));
    const int size = atoi(argv[2]);
    if (size < 1) return LG_FAIL(LG_ERR_USAGE, "\"%s\" is no size", argv[2]);
    LG_TRY(measure(&p, size, list, count));
    for (int i = 0; i < MOTIONS; i++) {
        if (count[i].n) printf("%s %d of %d\n", names[i], count[i].followed, count[i].n);
        if (i > MOTION_down) continue;
        all.n += count[i].n;
        all.followed += count[i].followed;
    }
    printf("followed %d of %d\n", all.followed, all.n);
    lg_picture_free(&p);
    free(png);
    free(list);
    return all.n - all.followed > (misses ? atoi(misses) : all.n / 5);
}

int main(int argc, char **argv)
{
    if (argc != 4 && argc != 5) {
        fprintf(stderr, "usage: clip_motion STRIPS.png SIZE CAPTIONS.txt [MISSES]\n");
        return -LG_ERR_USAGE;
    }
    int rc = run(argv, argv[4]);
    if (rc < 0) fprintf(stderr, "clip_motion: %s\n", lg_err_text());
    return abs(rc);
}
