/* Which frames a clip is; see clip_times.h. */
#include "stages/io/clip_times.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RUN_UP = 64 /* packets: 16 pictures that are kept, each with three that are not */ };

static int64_t time_of(const struct lg_clip_index *x, uint32_t rank)
{
    return x->packet[x->shown[rank]].time;
}

static int by_time(const void *a, const void *b, void *arg)
{
    const struct lg_clip_packet *p = arg;
    const int64_t x = p[*(const uint32_t *)a].time, y = p[*(const uint32_t *)b].time;
    return (x > y) - (x < y);
}

/* Seconds times `scale`, rounded down, of a time. Times are differences of 64-bit numbers, units are of 32 bits each. */
static __int128 scaled(const struct lg_clip_index *x, __int128 time, int64_t scale)
{
    return time * x->unit_num * scale / x->unit_den;
}

static int find_duration(const struct lg_clip_index *x, struct lg_clip_info *ret)
{
    const __int128 spacings = x->n_shown - 1;
    const __int128 span = (__int128)time_of(x, x->n_shown - 1) - time_of(x, 0);
    const __int128 us = scaled(x, span, 1000000);
    if (us > spacings * 1000000 / LG_CLIP_READ_RATE_MIN ||
        us < spacings * 1000000 / LG_CLIP_READ_RATE_MAX)
        return LG_FAIL(LG_ERR_VOID,
                       "clip has %u frames in %.6g s: a film has %d to %d frames a second",
                       x->n_shown, (double)us / 1e6, LG_CLIP_READ_RATE_MIN, LG_CLIP_READ_RATE_MAX);
    ret->duration_ms = (uint32_t)(scaled(x, span * x->n_shown, 1000) / spacings);
    return 0;
}

static int find_reordered(const struct lg_clip_index *x)
{
    int most = 0;
    for (size_t i = 1; i < x->n; i++) {
        int later = 0;
        for (size_t j = i - LG_MIN(i, (size_t)LG_CLIP_REORDERED_MAX); j < i; j++)
            later += x->packet[j].time > x->packet[i].time;
        most = LG_MAX(most, later);
    }
    return most;
}

int lg_clip_index_close(struct lg_clip_index *x, struct lg_clip_info *ret)
{
    LG_ASSERT(!x->shown);
    LG_TRY(lg_picture_check_bounds(x->width, x->height));
    if (x->width > LG_CLIP_READ_SIDE_MAX || x->height > LG_CLIP_READ_SIDE_MAX ||
        (int64_t)x->width * x->height > LG_CLIP_READ_PIXELS_MAX)
        return LG_FAIL(LG_ERR_VOID,
                       "clip of %d x %d pixels; the bounds are %d a side and %d Mpixel", x->width,
                       x->height, LG_CLIP_READ_SIDE_MAX, LG_CLIP_READ_PIXELS_MAX >> 20);
    x->shown = malloc((x->n + 1) * sizeof *x->shown);
    if (!x->shown) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the frames of a clip");
    for (size_t i = 0; i < x->n; i++)
        if (x->packet[i].is_shown) x->shown[x->n_shown++] = (uint32_t)i;
    if (!x->n_shown) return LG_FAIL(LG_ERR_VOID, "clip has no frames");
    if (x->unit_num < 1 || x->unit_den < 1 || x->unit_num > INT32_MAX || x->unit_den > INT32_MAX)
        return LG_FAIL(LG_ERR_VOID, "clip has no unit of time");
    qsort_r(x->shown, x->n_shown, sizeof *x->shown, by_time, x->packet);
    for (uint32_t i = 1; i < x->n_shown; i++)
        if (time_of(x, i) == time_of(x, i - 1))
            return LG_FAIL(LG_ERR_VOID, "clip has two frames at one time, %.6g s after its first",
                           (double)scaled(x, (__int128)time_of(x, i) - time_of(x, 0), 1000000) /
                               1e6);
    const bool is_turned = x->orientation >= LG_ORIENTATION_TURNED;
    x->reordered = find_reordered(x);
    *ret = (struct lg_clip_info){.width = is_turned ? x->height : x->width,
                                 .height = is_turned ? x->width : x->height,
                                 .frames = x->n_shown};
    if (x->n_shown > 1) LG_TRY(find_duration(x, ret));
    return 0;
}

/* ---- choosing ---- */

static int stride_of(const struct lg_clip_rate *rate)
{
    return LG_MAX(rate->stride, 1);
}

/* Microseconds from the clip's beginning to its frame j. */
static int64_t frame_us(double fps, int64_t j)
{
    return (int64_t)floor((double)j * 1e6 / fps);
}

uint32_t lg_clip_frames_at(const struct lg_clip_info *info, const struct lg_clip_rate *rate)
{
    if (info->frames <= 1) return 1;
    if (rate->fps <= 0) return (info->frames - 1) / (uint32_t)stride_of(rate) + 1;
    const int64_t end = (int64_t)info->duration_ms * 1000;    /* frame j has to begin before it */
    int64_t n = (int64_t)((double)end / 1e6 * rate->fps) + 1; /* or one more, or less */
    while (n > 1 && frame_us(rate->fps, n - 1) >= end) n--;
    while (frame_us(rate->fps, n) < end) n++;
    return (uint32_t)LG_MIN(n, (int64_t)UINT32_MAX);
}

/* The last frame at or before `us` after the first, at or behind `from`. */
static uint32_t frame_at(const struct lg_clip_index *x, int64_t us, uint32_t from)
{
    uint32_t i = from;
    while (i + 1 < x->n_shown &&
           scaled(x, (__int128)time_of(x, i + 1) - time_of(x, 0), 1000000) <= us)
        i++;
    return i;
}

/* By how much a frame may begin too late, since its container rounds times: a unit, yet never near the distance between frames. */
static int64_t slack_us(const struct lg_clip_index *x, const struct lg_clip_info *info)
{
    const int64_t unit = (x->unit_num * 1000000 + x->unit_den - 1) / x->unit_den;
    return LG_MIN(unit, (int64_t)info->duration_ms * 1000 / info->frames / 4);
}

/* The clip begins with a frame, so that at the film's own rate each comes once, whatever times are rounded to. */
static void pick_by_time(const struct lg_clip_index *x, const struct lg_clip_info *info,
                         const struct lg_clip_choice *c, struct lg_clip_wanted *w)
{
    const int64_t last = frame_us(c->rate.fps, c->frames - 1);
    const int64_t places = (int64_t)info->duration_ms * 1000 - last; /* >= 1: one a microsecond */
    const int64_t start = LG_MIN((int64_t)(c->start * (double)places), places - 1);
    uint32_t at = frame_at(x, start, 0);
    const int64_t begin =
        (int64_t)scaled(x, (__int128)time_of(x, at) - time_of(x, 0), 1000000) + slack_us(x, info);
    for (int j = 0; j < c->frames; j++) {
        if (j) at = frame_at(x, begin + frame_us(c->rate.fps, j), at);
        w->packet[j] = x->shown[at];
    }
}

static void pick_by_number(const struct lg_clip_index *x, const struct lg_clip_choice *c,
                           struct lg_clip_wanted *w)
{
    const int64_t stride = stride_of(&c->rate);
    const int64_t places = (int64_t)x->n_shown - (c->frames - 1) * stride; /* >= 1 */
    const int64_t start = LG_MIN((int64_t)(c->start * (double)places), places - 1);
    for (int j = 0; j < c->frames; j++) w->packet[j] = x->shown[start + j * stride];
}

/* The last key frame in the file that is shown no later than the first that is wanted: what follows it in the file needs
 * nothing before it. The first packet counts as one. */
static size_t find_key(const struct lg_clip_index *x, uint32_t wanted)
{
    const int64_t time = x->packet[wanted].time;
    for (size_t i = wanted; i > 0; i--)
        if (x->packet[i].is_key && x->packet[i].time <= time) return i;
    return 0;
}

/* Behind an open key frame a film that was begun with it may still name a picture before it, if only to forget it, which
 * looks like damage. Then decoding begins earlier, with a key frame that is not open or far enough for all the pictures that a decoder
 * keeps; a film that was cut has none at its beginning, where the decoder's word is not taken for damage until it has them. */
static struct lg_clip_run find_run_up(const struct lg_clip_index *x, size_t key)
{
    struct lg_clip_run r = {.first = key, .strict = key};
    while (r.first > 0 &&
           !(x->packet[r.first].is_key && (!x->packet[r.first].is_open || key - r.first >= RUN_UP)))
        r.first--;
    if (!x->packet[r.first].is_open) return r;
    while (r.strict < x->n && !(x->packet[r.strict].is_key && r.strict - r.first >= RUN_UP))
        r.strict++;
    return r;
}

/* Frames that are decoded from packet `first` on. */
static int64_t frames_from(const struct lg_clip_wanted *w, size_t first)
{
    size_t end = 0;
    for (int j = 0; j < w->n; j++) end = LG_MAX(end, (size_t)w->packet[j] + 1);
    return (int64_t)(end - first);
}

static bool is_too_much(const struct lg_clip_index *x, int64_t frames)
{
    return frames > LG_CLIP_READ_DECODED_MAX ||
           frames * x->width * x->height > LG_CLIP_READ_WORK_MAX;
}

static int find_runs(const struct lg_clip_index *x, struct lg_clip_wanted *w)
{
    const size_t key = find_key(x, w->packet[0]);
    const int64_t frames = frames_from(w, key);
    if (is_too_much(x, frames))
        return LG_FAIL(LG_ERR_VOID,
                       "clip asks for too much work: %lld frames of %d x %d are to be decoded from "
                       "its key frame on; the bounds are %d frames and %lld Gpixel",
                       (long long)frames, x->width, x->height, LG_CLIP_READ_DECODED_MAX,
                       (long long)(LG_CLIP_READ_WORK_MAX >> 30));
    w->run[w->n_runs++] = (struct lg_clip_run){.first = key, .strict = key};
    const struct lg_clip_run run_up = find_run_up(x, key);
    if (x->packet[key].is_open && !is_too_much(x, frames_from(w, run_up.first)))
        w->run[w->n_runs++] = run_up;
    return 0;
}

int lg_clip_pick(const struct lg_clip_index *x, const struct lg_clip_info *info,
                 const struct lg_clip_choice *c, struct lg_clip_wanted *ret)
{
    struct lg_clip_wanted w = {.n = c->frames};
    const uint32_t have = lg_clip_frames_at(info, &c->rate);
    LG_ASSERT(c->frames >= 1 && c->start >= 0 && c->start < 1);
    if (have < (uint32_t)c->frames)
        return LG_FAIL(LG_ERR_VOID,
                       "clip is too short: %u frames in %.3f s make %u of the %d that are wanted",
                       info->frames, info->duration_ms / 1e3, have, c->frames);
    w.packet = malloc((size_t)w.n * sizeof *w.packet);
    if (!w.packet) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the frames of a clip");
    if (c->rate.fps > 0 && info->frames > 1)
        pick_by_time(x, info, c, &w);
    else
        pick_by_number(x, c, &w);
    int rc = find_runs(x, &w);
    if (rc < 0) {
        free(w.packet);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = w;
    return 0;
}
