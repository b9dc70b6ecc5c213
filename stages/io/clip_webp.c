/* Animated WebP through libwebpdemux; see clip_decoder.h. Each frame is laid over the one before it, so decoding begins with
 * the first; only the first counts as a key frame. A frame that stands for 10 ms or less stands for 100, as in browsers. */
#include "base/heartbeat.h"
#include "stages/io/clip_decoder.h"
#include <stdlib.h>
#include <webp/demux.h>

enum { QUICK_MS = 10, SLOW_MS = 100, PIECE_BYTES = 1 << 20 };

struct webp {
    uint8_t *data;
    WebPData file;
    WebPDemuxer *demuxer;
    int width, height;
};

static void close_webp(struct webp *w)
{
    WebPDemuxDelete(w->demuxer);
    free(w->data);
}

static int open_webp(const struct lg_clip_file *f, struct webp *w)
{
    const struct lg_clip_input *in = f->in;
    *w = (struct webp){0};
    if (in->bytes > LG_WEBP_BYTES_MAX)
        return LG_FAIL(LG_ERR_VOID, "WebP of %llu bytes; the bound is %d MiB",
                       (unsigned long long)in->bytes, LG_WEBP_BYTES_MAX >> 20);
    w->data = malloc(in->bytes);
    if (!w->data)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for the %llu bytes of a clip",
                       (unsigned long long)in->bytes);
    for (uint64_t at = 0, n; at < in->bytes; at += n) {
        n = LG_MIN(in->bytes - at, (uint64_t)PIECE_BYTES);
        LG_TRY(in->read(in->arg, at, w->data + at, n));
    }
    w->file = (WebPData){w->data, in->bytes};
    w->demuxer = WebPDemux(&w->file);
    if (!w->demuxer) return LG_FAIL(LG_ERR_VOID, "animated WebP is cut off or damaged");
    w->width = (int)WebPDemuxGetI(w->demuxer, WEBP_FF_CANVAS_WIDTH);
    w->height = (int)WebPDemuxGetI(w->demuxer, WEBP_FF_CANVAS_HEIGHT);
    const uint32_t frames = WebPDemuxGetI(w->demuxer, WEBP_FF_FRAME_COUNT);
    if (frames >
        LG_CLIP_READ_DECODED_MAX) /* libwebpdemux finds each by walking over all before it */
        return LG_FAIL(LG_ERR_VOID, "animated WebP of %u frames; the bound is %d", frames,
                       LG_CLIP_READ_DECODED_MAX);
    return 0;
}

static int add_frames(struct webp *w, struct lg_clip_index *x)
{
    WebPIterator frame;
    int64_t time = 0;
    x->width = w->width;
    x->height = w->height;
    x->unit_num = 1;
    x->unit_den = 1000;
    if (!WebPDemuxGetFrame(w->demuxer, 1, &frame)) return 0;
    int rc = 0;
    do {
        rc = lg_clip_index_add(
            x, &(struct lg_clip_packet){.time = time, .is_shown = true, .is_key = x->n == 0});
        time += frame.duration <= QUICK_MS ? SLOW_MS : frame.duration;
        lg_heartbeat();
    } while (rc == 0 && WebPDemuxNextFrame(&frame));
    WebPDemuxReleaseIterator(&frame);
    return rc;
}

static int index_webp(const struct lg_clip_file *f, struct lg_clip_index *ret)
{
    struct webp w;
    int rc = open_webp(f, &w);
    if (rc == 0) rc = add_frames(&w, ret);
    close_webp(&w);
    LG_TRY(rc);
    return 0;
}

static int decode_frames(struct webp *w, lg_clip_on_decoded on_decoded, void *arg)
{
    WebPAnimDecoderOptions options;
    if (!WebPAnimDecoderOptionsInit(&options))
        return LG_FAIL(LG_ERR_FAILED, "libwebpdemux: other version");
    options.color_mode = MODE_RGBA;
    options.use_threads = 0;
    WebPAnimDecoder *d = WebPAnimDecoderNew(&w->file, &options);
    if (!d) return LG_FAIL(LG_ERR_VOID, "animated WebP is damaged");
    int rc = 0;
    for (size_t i = 0; rc == 0 && WebPAnimDecoderHasMoreFrames(d); i++) {
        uint8_t *rgba;
        int time;
        if (!WebPAnimDecoderGetNext(d, &rgba, &time)) {
            rc = LG_FAIL(LG_ERR_VOID, "animated WebP is damaged in frame %zu", i + 1);
            break;
        }
        struct lg_clip_planes p = {.width = w->width,
                                   .height = w->height,
                                   .colours = LG_CLIP_RGB,
                                   .is_full = true,
                                   .n = 4};
        for (int c = 0; c < 4; c++)
            p.of[c] = (struct lg_clip_component){
                .data = rgba + c, .stride = (ptrdiff_t)w->width * 4, .step = 4, .depth = 8};
        rc = on_decoded(arg, i, &p);
        lg_heartbeat();
    }
    WebPAnimDecoderDelete(d);
    return rc;
}

/* The bounds have been looked at when the index was closed. */
static int decode_webp(const struct lg_clip_file *f, const struct lg_clip_run *run,
                       lg_clip_on_decoded on_decoded, void *arg)
{
    struct webp w;
    LG_ASSERT(run->first == 0);
    int rc = open_webp(f, &w);
    if (rc == 0) rc = decode_frames(&w, on_decoded, arg);
    close_webp(&w);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return rc;
}

const struct lg_clip_decoder lg_clip_webp = {.index = index_webp, .decode = decode_webp};
