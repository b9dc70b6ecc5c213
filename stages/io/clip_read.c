/* Reading clips; see clip_read.h. What takes files apart is clip_webp.c, and stages/io/av in a shared object. */
#include "stages/io/clip_read.h"
#include "base/heartbeat.h"
#include "stages/io/av.h"
#include "stages/io/clip_decoder.h"
#include <stdlib.h>
#include <string.h>

/* ---- kinds ---- */

static lg_clip_kind kind_of(const uint8_t *p, size_t bytes)
{
    static const char *const boxes[] = {"ftyp", "moov", "mdat", "free", "skip", "wide", "pnot"};
    if (bytes >= 21 && !memcmp(p, "RIFF", 4) && !memcmp(p + 8, "WEBPVP8X", 8) && p[20] & 2)
        return LG_CLIP_WEBP;
    if (bytes >= 6 && (!memcmp(p, "GIF87a", 6) || !memcmp(p, "GIF89a", 6))) return LG_CLIP_GIF;
    if (bytes >= 4 && !memcmp(p, "\x1a\x45\xdf\xa3", 4)) return LG_CLIP_MATROSKA;
    for (size_t i = 0; i < LG_ARRAY_LEN(boxes); i++)
        if (bytes >= 8 && !memcmp(p + 4, boxes[i], 4)) return LG_CLIP_MOV;
    return LG_CLIP_NONE;
}

bool lg_clip_is(const void *head, size_t bytes)
{
    return kind_of(head, bytes) != LG_CLIP_NONE;
}

static int read_memory(void *arg, uint64_t at, void *dst, size_t bytes)
{
    const struct lg_clip_memory *m = arg;
    LG_ASSERT(at <= m->bytes && bytes <= m->bytes - at);
    memcpy(dst, (const uint8_t *)m->data + at, bytes);
    return 0;
}

struct lg_clip_input lg_clip_memory(struct lg_clip_memory *m)
{
    return (struct lg_clip_input){.read = read_memory, .arg = m, .bytes = m->bytes};
}

/* ---- reading ---- */

static int open_file(const struct lg_clip_input *in, struct lg_clip_file *f,
                     const struct lg_clip_decoder **ret)
{
    uint8_t head[LG_CLIP_READ_HEAD_BYTES];
    const size_t n = LG_MIN(in->bytes, sizeof head);
    if (in->bytes > LG_CLIP_READ_BYTES_MAX)
        return LG_FAIL(LG_ERR_VOID, "clip of %llu bytes; the bound is %d MiB",
                       (unsigned long long)in->bytes, LG_CLIP_READ_BYTES_MAX >> 20);
    LG_TRY(in->read(in->arg, 0, head, n));
    *f = (struct lg_clip_file){.in = in, .kind = kind_of(head, n)};
    if (f->kind == LG_CLIP_NONE)
        return LG_FAIL(LG_ERR_VOID,
                       "clip is none of MP4, QuickTime, Matroska, WebM, GIF and animated WebP");
    *ret = &lg_clip_webp;
    if (f->kind != LG_CLIP_WEBP) LG_TRY(lg_av_find(LG_CLIP_AV, (const void **)ret));
    return 0;
}

static int look(const struct lg_clip_decoder *d, const struct lg_clip_file *f,
                struct lg_clip_index *x, struct lg_clip_info *ret)
{
    *x = (struct lg_clip_index){0};
    LG_TRY(d->index(f, x));
    LG_TRY(lg_clip_index_close(x, ret));
    return 0;
}

int lg_clip_look(const struct lg_clip_input *in, struct lg_clip_info *ret)
{
    const struct lg_clip_decoder *d;
    struct lg_clip_index x;
    struct lg_clip_file f;
    LG_TRY(open_file(in, &f, &d));
    int rc = look(d, &f, &x, ret);
    lg_clip_index_free(&x);
    LG_TRY(rc);
    return 0;
}

/* What is decoded, on its way to who asked for it. */
struct delivery {
    const struct lg_clip_index *index;
    const struct lg_clip_wanted *wanted;
    int done; /* frames of the clip */
    lg_picture picture;
    lg_clip_on_frame on_frame;
    void *arg;
};

static int deliver(void *arg, size_t packet, const struct lg_clip_planes *p)
{
    struct delivery *d = arg;
    const struct lg_clip_index *x = d->index;
    const uint32_t *wanted = d->wanted->packet;
    int end = d->done;
    lg_heartbeat();
    if (packet >= x->n) return LG_FAIL(LG_ERR_VOID, "clip has more frames than packets");
    if (p->width != x->width || p->height != x->height)
        return LG_FAIL(LG_ERR_VOID, "clip has a frame of %d x %d, its container says %d x %d",
                       p->width, p->height, x->width, x->height);
    while (end < d->wanted->n && wanted[end] == packet) end++;
    if (end == d->done) {
        if (x->packet[packet].time > x->packet[wanted[end]].time)
            return LG_FAIL(LG_ERR_VOID, "clip is damaged: packet %u makes no frame", wanted[end]);
        return 0;
    }
    LG_TRY(lg_clip_rgb(p, &d->picture));
    LG_TRY(lg_picture_orient(&d->picture, LG_MAX(x->orientation, 1)));
    LG_TRY(d->on_frame(d->arg, d->done, end, &d->picture));
    d->done = end;
    return d->done == d->wanted->n;
}

static int decode_run(const struct lg_clip_decoder *d, const struct lg_clip_file *f,
                      const struct lg_clip_run *run, struct delivery *to)
{
    LG_TRY(d->decode(f, run, deliver, to));
    if (to->done < to->wanted->n)
        return LG_FAIL(LG_ERR_VOID, "clip is damaged: packet %u makes no frame",
                       to->wanted->packet[to->done]);
    return 0;
}

static int decode(const struct lg_clip_decoder *d, const struct lg_clip_file *f,
                  struct delivery *to)
{
    const struct lg_clip_wanted *w = to->wanted;
    int rc = decode_run(d, f, &w->run[0], to);
    for (int i = 1; rc == LG_ERR_VOID && i < w->n_runs; i++) {
        lg_err_clear();
        rc = decode_run(d, f, &w->run[i], to); /* goes on with the frames that are not done */
    }
    LG_TRY(rc);
    return 0;
}

int lg_clip_read(const struct lg_clip_input *in, const struct lg_clip_choice *c,
                 lg_clip_on_frame on_frame, void *arg, struct lg_clip_info *ret)
{
    const struct lg_clip_decoder *d;
    struct lg_clip_index x;
    struct lg_clip_file f;
    struct lg_clip_wanted wanted = {0};
    struct delivery to = {.index = &x, .wanted = &wanted, .on_frame = on_frame, .arg = arg};
    LG_TRY(open_file(in, &f, &d));
    int rc = look(d, &f, &x, ret);
    f.reordered = x.reordered;
    if (rc == 0) rc = lg_clip_pick(&x, ret, c, &wanted);
    if (rc == 0) rc = decode(d, &f, &to);
    lg_picture_free(&to.picture);
    free(wanted.packet);
    lg_clip_index_free(&x);
    LG_TRY(rc);
    return 0;
}
