/* Films through libav; the shared object liblg-av.so. See clip_read.h and clip_decoder.h.
 *
 * Nothing is probed: the demuxer is the one of the file's kind, streams are what its header says, no parser and no guess
 * of times stands between it and us. A packet's number goes through the decoder in the place of its time, so that a
 * frame says which packet made it, whatever the times are.
 *
 * Work is bounded by counts. A demuxer that goes in circles ends when it has read sixteen times the file, where each call counts as
 * CALL_BYTES at least; one piece of memory has LG_CLIP_READ_ALLOC_MAX bytes at most, which is why memory that libav
 * does not get makes a file void unless the machine has none. */
#include "base/heartbeat.h"
#include "stages/io/av/nal.h"
#include "stages/io/av/orientation.h"
#include "stages/io/av/planes.h"
#include "stages/io/clip_decoder.h"
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/mem.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { BUFFER_BYTES = 64 << 10, CALL_BYTES = 4096, STREAMS_MAX = 64, READS_OF_FILE = 16 };
enum { REORDERED_MAX = 32 /* packets before the first frame */ };
enum { LENIENT = AV_EF_CRCCHECK | AV_EF_BITSTREAM | AV_EF_BUFFER | AV_EF_CAREFUL };
#define SPARE_BYTES (UINT64_C(64) << 20)

static const enum AVCodecID codecs[] = {AV_CODEC_ID_H264, AV_CODEC_ID_HEVC, AV_CODEC_ID_VP8,
                                        AV_CODEC_ID_VP9,  AV_CODEC_ID_AV1,  AV_CODEC_ID_MPEG4,
                                        AV_CODEC_ID_FFV1, AV_CODEC_ID_GIF};

struct film {
    const struct lg_clip_file *file;
    uint64_t at, left; /* position; bytes that may still be read */
    int io;            /* what in->read returned, when it failed */
    bool went_round;   /* left was used up */
    AVIOContext *bytes;
    AVFormatContext *demuxer;
    AVCodecContext *decoder;
    AVPacket *packet;
    AVFrame *frame;
    int stream; /* of pictures */
    size_t n;   /* its packets so far */
};

/* ---- bytes ---- */

static int read_bytes(void *arg, uint8_t *dst, int size)
{
    struct film *f = arg;
    const struct lg_clip_input *in = f->file->in;
    const uint64_t n = f->at < in->bytes ? LG_MIN((uint64_t)size, in->bytes - f->at) : 0;
    const uint64_t cost = LG_MAX(n, (uint64_t)CALL_BYTES);
    lg_heartbeat();
    if (f->io) return AVERROR(EIO);
    f->went_round |= cost > f->left;
    if (f->went_round) return AVERROR_EXIT;
    f->left -= cost;
    if (!n) return AVERROR_EOF;
    f->io = in->read(in->arg, f->at, dst, (size_t)n);
    if (f->io < 0) return AVERROR(EIO);
    f->at += n;
    return (int)n;
}

static int64_t seek_bytes(void *arg, int64_t offset, int whence)
{
    struct film *f = arg;
    const int64_t bytes = (int64_t)f->file->in->bytes;
    switch (whence & ~AVSEEK_FORCE) {
    case AVSEEK_SIZE:
        return bytes;
    case SEEK_CUR:
        offset += (int64_t)f->at;
        break;
    case SEEK_END:
        offset += bytes;
        break;
    case SEEK_SET:
        break;
    default:
        return AVERROR(EINVAL);
    }
    if (offset < 0 || offset > bytes) return AVERROR(EINVAL);
    f->at = (uint64_t)offset;
    return offset;
}

static int refuse_file(AVFormatContext *s, AVIOContext **ret, const char *url, int flags,
                       AVDictionary **options)
{
    (void)s, (void)ret, (void)url, (void)flags, (void)options;
    return AVERROR(EACCES);
}

static int interrupted(void *arg)
{
    const struct film *f = arg;
    return f->io || f->went_round;
}

/* ---- errors ---- */

/* Why libav gave up, which is the file's fault unless bytes or memory did not come. */
static int film_error(struct film *f, int code, const char *what)
{
    char why[AV_ERROR_MAX_STRING_SIZE] = "";
    if (f->io) return lg_err_frame(f->io, __FILE__, __LINE__, __func__);
    if (f->went_round)
        return LG_FAIL(LG_ERR_VOID, "clip is damaged: %s reads it again and again", what);
    if (code == AVERROR(ENOMEM)) {
        void *most = malloc(LG_CLIP_READ_ALLOC_MAX);
        const bool is_there = most != NULL;
        free(most);
        if (!is_there) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read a clip");
    }
    av_strerror(code, why, sizeof why);
    return LG_FAIL(LG_ERR_VOID, "clip is damaged, cut off or too large: %s: %s", what, why);
}

/* ---- opening ---- */

static void close_film(struct film *f)
{
    av_frame_free(&f->frame);
    av_packet_free(&f->packet);
    avcodec_free_context(&f->decoder);
    avformat_close_input(&f->demuxer);
    if (f->bytes) av_freep(&f->bytes->buffer);
    avio_context_free(&f->bytes);
}

static void set_up(void)
{
    av_log_set_level(AV_LOG_QUIET);
    av_max_alloc(LG_CLIP_READ_ALLOC_MAX);
}

static int find_stream(struct film *f)
{
    for (unsigned i = 0; i < f->demuxer->nb_streams; i++) {
        AVStream *s = f->demuxer->streams[i];
        const bool is_film = s->codecpar->codec_type == AVMEDIA_TYPE_VIDEO &&
                             !(s->disposition & AV_DISPOSITION_ATTACHED_PIC);
        if (is_film && f->stream < 0)
            f->stream = (int)i;
        else
            s->discard = AVDISCARD_ALL;
    }
    if (f->stream < 0) return LG_FAIL(LG_ERR_VOID, "clip has no track of pictures");
    const enum AVCodecID id = f->demuxer->streams[f->stream]->codecpar->codec_id;
    for (size_t i = 0; i < LG_ARRAY_LEN(codecs); i++)
        if (codecs[i] == id) return 0;
    return LG_FAIL(LG_ERR_VOID, "clip is coded as %s, which is none of those that are read",
                   avcodec_get_name(id));
}

static int open_film(const struct lg_clip_file *file, struct film *f)
{
    static const char *const demuxers[] = {
        [LG_CLIP_GIF] = "gif", [LG_CLIP_MOV] = "mov", [LG_CLIP_MATROSKA] = "matroska"};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_up);
    *f = (struct film){
        .file = file, .left = READS_OF_FILE * file->in->bytes + SPARE_BYTES, .stream = -1};
    const AVInputFormat *format = av_find_input_format(demuxers[file->kind]);
    if (!format)
        return LG_FAIL(LG_ERR_NOTFOUND, "this libavformat does not read %s", demuxers[file->kind]);
    uint8_t *buffer = av_malloc(BUFFER_BYTES);
    if (buffer)
        f->bytes = avio_alloc_context(buffer, BUFFER_BYTES, 0, f, read_bytes, NULL, seek_bytes);
    if (buffer && !f->bytes) av_free(buffer);
    f->packet = av_packet_alloc();
    f->frame = av_frame_alloc();
    f->demuxer = avformat_alloc_context();
    if (!f->bytes || !f->packet || !f->frame || !f->demuxer)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory to read a clip");
    f->demuxer->pb = f->bytes;
    f->demuxer->flags |= AVFMT_FLAG_NOPARSE | AVFMT_FLAG_NOFILLIN | AVFMT_FLAG_BITEXACT;
    f->demuxer->io_open = refuse_file;
    f->demuxer->interrupt_callback = (AVIOInterruptCB){interrupted, f};
    f->demuxer->max_streams = STREAMS_MAX;
    int rc = avformat_open_input(&f->demuxer, "", format, NULL);
    if (rc < 0) return film_error(f, rc, "its beginning");
    LG_TRY(find_stream(f));
    return 0;
}

/* The next packet of the film; > 0: there is none. */
static int next_packet(struct film *f)
{
    for (;;) {
        av_packet_unref(f->packet);
        int rc = av_read_frame(f->demuxer, f->packet);
        if (f->io || f->went_round || (rc < 0 && rc != AVERROR_EOF))
            return film_error(f, rc, "its packets");
        if (rc == AVERROR_EOF) return 1;
        if (f->packet->stream_index != f->stream) continue;
        if (f->packet->flags & AV_PKT_FLAG_CORRUPT)
            return LG_FAIL(LG_ERR_VOID, "clip is cut off or damaged in packet %zu", f->n);
        f->n++;
        return 0;
    }
}

/* ---- decoding ---- */

static int open_decoder(struct film *f)
{
    const AVStream *s = f->demuxer->streams[f->stream];
    const AVCodec *codec = avcodec_find_decoder(s->codecpar->codec_id);
    if (!codec)
        return LG_FAIL(LG_ERR_NOTFOUND, "this libavcodec does not decode %s",
                       avcodec_get_name(s->codecpar->codec_id));
    f->decoder = avcodec_alloc_context3(codec);
    if (!f->decoder) return LG_FAIL(LG_ERR_NOSPACE, "no memory to decode a clip");
    AVCodecContext *d = f->decoder;
    int rc = avcodec_parameters_to_context(d, s->codecpar);
    if (rc < 0) return film_error(f, rc, "its codec's parameters");
    /* H.264 may leave unsaid how many frames wait for others, and libav then shows the first ones too early. */
    if (d->codec_id == AV_CODEC_ID_H264)
        d->has_b_frames = LG_MAX(d->has_b_frames, f->file->reordered);
    d->thread_count = 1;
    d->flags |= AV_CODEC_FLAG_BITEXACT;
    d->idct_algo = FF_IDCT_SIMPLE;
    d->err_recognition = LENIENT | AV_EF_EXPLODE;
    /* H.264's decoder takes frames of several slices for damaged unless it is to conceal damage; what it conceals it says. */
    d->error_concealment = d->codec_id == AV_CODEC_ID_H264 ? FF_EC_GUESS_MVS : 0;
    d->max_pixels = LG_CLIP_READ_PIXELS_MAX;
    rc = avcodec_open2(d, codec, NULL);
    if (rc < 0) return film_error(f, rc, "its decoder");
    return 0;
}

/* ---- the index ---- */

/* VP8 has frames that are there to be referred to: bit 4 of the first byte says whether one is shown (RFC 6386, 9.1). */
static bool is_shown(const struct film *f)
{
    const AVPacket *p = f->packet;
    if (p->flags & AV_PKT_FLAG_DISCARD) return false; /* an edit list leaves it out */
    const bool is_vp8 = f->demuxer->streams[f->stream]->codecpar->codec_id == AV_CODEC_ID_VP8;
    return !is_vp8 || !p->size || p->data[0] & 0x10;
}

/* MPEG-4 in MP4: libav leaves the size to the decoder, which has the first packets until it has said it. */
static int learn_size(struct film *f, struct lg_clip_index *x)
{
    if (x->n >= REORDERED_MAX) return LG_FAIL(LG_ERR_VOID, "clip has no size");
    if (!f->decoder) LG_TRY(open_decoder(f));
    int rc = avcodec_send_packet(f->decoder, f->packet);
    if (rc == 0) rc = avcodec_receive_frame(f->decoder, f->frame);
    if (rc == AVERROR(EAGAIN)) return 0;
    if (rc < 0) return film_error(f, rc, "its first frame");
    x->width = f->frame->width;
    x->height = f->frame->height;
    av_frame_unref(f->frame);
    return 0;
}

/* Leading pictures of a film that was cut within an open group of pictures, shown before the key frame that it begins with: they
 * refer to what was cut off, and no player shows them. Matroska says no time that is negative. */
static bool is_orphan(const struct film *f, const struct lg_clip_index *x, int64_t time)
{
    const AVCodecParameters *codec = f->demuxer->streams[f->stream]->codecpar;
    if (!x->n) return false;
    if (time == AV_NOPTS_VALUE) return x->n == 1 || !x->packet[x->n - 1].is_shown;
    return time < x->packet[0].time && !lg_av_is_whole_leading(codec, f->packet);
}

static int add_packets(struct film *f, struct lg_clip_index *x)
{
    const AVStream *s = f->demuxer->streams[f->stream];
    int64_t next = 0; /* a GIF's frames have durations alone */
    int rc;
    x->width = s->codecpar->width;
    x->height = s->codecpar->height;
    LG_TRY(lg_av_orientation(s, &x->orientation));
    x->unit_num = s->time_base.num;
    x->unit_den = s->time_base.den;
    while ((rc = next_packet(f)) == 0) {
        const bool is_gif = f->file->kind == LG_CLIP_GIF;
        const int64_t shown = f->packet->pts == AV_NOPTS_VALUE
                                  ? f->packet->dts
                                  : f->packet->pts; /* old AVI in Matroska */
        const bool is_key = f->packet->flags & AV_PKT_FLAG_KEY && !is_gif;
        struct lg_clip_packet p = {.time = is_gif ? next : shown,
                                   .is_shown = is_shown(f),
                                   .is_key = is_key,
                                   .is_open = is_key && lg_av_is_open(s->codecpar, f->packet)};
        if (is_orphan(f, x, p.time)) {
            p.is_shown = false;
            if (p.time == AV_NOPTS_VALUE) p.time = x->packet[0].time - 1;
        }
        if (p.time == AV_NOPTS_VALUE)
            return LG_FAIL(LG_ERR_VOID, "clip has no time for packet %zu", x->n);
        if (!x->width) LG_TRY(learn_size(f, x));
        LG_TRY(lg_clip_index_add(x, &p));
        if (is_gif) next += LG_MIN(LG_MAX(f->packet->duration, 0), INT32_MAX);
    }
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int index_film(const struct lg_clip_file *file, struct lg_clip_index *ret)
{
    struct film f;
    int rc = open_film(file, &f);
    if (rc == 0) rc = add_packets(&f, ret);
    close_film(&f);
    LG_TRY(rc);
    return 0;
}

/* ---- frames ---- */

static bool is_strict(const struct film *f)
{
    return f->decoder->err_recognition & AV_EF_EXPLODE;
}

/* Frames that are ready; > 0: no more are needed. */
static int take_frames(struct film *f, size_t strict, lg_clip_on_decoded on_decoded, void *arg)
{
    for (;;) {
        struct lg_clip_planes p;
        int rc = avcodec_receive_frame(f->decoder, f->frame);
        if (rc == AVERROR(EAGAIN) || rc == AVERROR_EOF) return 0;
        if (rc == AVERROR_INVALIDDATA && !is_strict(f)) continue;
        if (rc < 0) return film_error(f, rc, "its frames");
        if (f->frame->flags & AV_FRAME_FLAG_CORRUPT || f->frame->decode_error_flags ||
            f->frame->pts < 0) {
            if (f->frame->pts >= 0 && (size_t)f->frame->pts < strict) continue;
            return LG_FAIL(LG_ERR_VOID, "clip is damaged in frame %lld", (long long)f->frame->pts);
        }
        LG_TRY(lg_av_planes(f->frame, &p));
        rc = on_decoded(arg, (size_t)f->frame->pts, &p);
        av_frame_unref(f->frame);
        if (rc) return rc;
    }
}

static int decode_packets(struct film *f, const struct lg_clip_run *run,
                          lg_clip_on_decoded on_decoded, void *arg)
{
    int rc, ended = 0;
    while (!ended) {
        ended = next_packet(f);
        if (ended < 0) return lg_err_frame(ended, __FILE__, __LINE__, __func__);
        if (!ended && f->n <= run->first) continue;
        f->packet->pts = f->packet->dts = (int64_t)f->n - 1;
        f->decoder->err_recognition = LENIENT | (f->n > run->strict ? AV_EF_EXPLODE : 0);
        rc = avcodec_send_packet(f->decoder, ended ? NULL : f->packet);
        if (rc < 0 && (is_strict(f) || rc != AVERROR_INVALIDDATA))
            return film_error(f, rc, "its frames");
        rc = take_frames(f, run->strict, on_decoded, arg);
        if (rc) return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : rc;
    }
    return 0;
}

static int decode_film(const struct lg_clip_file *file, const struct lg_clip_run *run,
                       lg_clip_on_decoded on_decoded, void *arg)
{
    struct film f;
    int rc = open_film(file, &f);
    if (rc == 0) rc = open_decoder(&f);
    if (rc == 0) rc = decode_packets(&f, run, on_decoded, arg);
    close_film(&f);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return rc;
}

__attribute__((visibility("default"))) extern const struct lg_clip_decoder lg_clip_av;
const struct lg_clip_decoder lg_clip_av = {.index = index_film, .decode = decode_film};
