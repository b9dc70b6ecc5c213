/* MP4, WebM and Matroska by libav. Everything goes to memory; one thread, and the flags that leave out what changes from
 * build to build. */
#include "stages/io/clip_write_private.h"
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/opt.h>

/* The first encoder of a format that libavcodec has is taken. x264's macroblock tree reads memory that nobody has written (164,
 * with its SIMD code): the same frames gave other bytes. FFV1's version 3 cuts frames into slices, of which a pixel has none. */
struct codec {
    lg_clip_format format;
    const char *container, *encoder;
    enum AVPixelFormat pixels;
    const char *options; /* of the encoder */
};
static const struct codec codecs[] = {
    {LG_CLIP_mp4, "mp4", "libx264", AV_PIX_FMT_YUV420P, "crf=10:mbtree=0"},
    {LG_CLIP_mp4, "mp4", "mpeg4", AV_PIX_FMT_YUV420P, "qmin=2:qmax=3"},
    {LG_CLIP_webm, "webm", "libvpx-vp9", AV_PIX_FMT_YUV420P, "b=0:crf=16:deadline=good:cpu-used=2"},
    {LG_CLIP_webm, "webm", "libvpx", AV_PIX_FMT_YUV420P, "b=8000000:crf=4:qmin=0:deadline=good"},
    {LG_CLIP_mkv, "matroska", "ffv1", AV_PIX_FMT_0RGB32, "level=1"},
};

struct writer {
    const struct lg_clip *clip;
    const struct codec *codec;
    AVFormatContext *file;
    AVCodecContext *encoder;
    AVFrame *frame;
    AVPacket *packet;
};

static int av_fail(int code, const char *what)
{
    char text[AV_ERROR_MAX_STRING_SIZE] = "";
    av_strerror(code, text, sizeof text);
    return LG_FAIL(code == AVERROR(ENOMEM) ? LG_ERR_NOSPACE : LG_ERR_FAILED, "%s: %s", what, text);
}

#define AV_TRY(expr, what)                                                                         \
    do {                                                                                           \
        int av_try_rc_ = (expr);                                                                   \
        if (av_try_rc_ < 0) return av_fail(av_try_rc_, what);                                      \
    } while (0)

static int choose(lg_clip_format format, const struct codec **ret, const AVCodec **ret_encoder)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(codecs); i++) {
        const AVCodec *e =
            codecs[i].format == format ? avcodec_find_encoder_by_name(codecs[i].encoder) : NULL;
        if (!e) continue;
        *ret = &codecs[i];
        *ret_encoder = e;
        return 0;
    }
    return LG_FAIL(LG_ERR_NOTFOUND, "this libavcodec has no encoder for such a file; write a .gif");
}

/* ---- colours ---- */

static uint8_t *pixel(const AVFrame *f, int plane, int y)
{
    return f->data[plane] + (ptrdiff_t)y * f->linesize[plane];
}

/* BT.601, limited range, in 1/65536; Cb and Cr of the sum of four pixels. Odd sides repeat their last row or column. */
static void to_yuv(const struct lg_clip *c, const uint8_t *rgb, AVFrame *f)
{
    for (int y = 0; y < f->height; y += 2)
        for (int x = 0; x < f->width; x += 2) {
            int64_t sum[3] = {0};
            for (int i = 0; i < 4; i++) {
                const int py = y + i / 2, px = x + i % 2;
                const uint8_t *p = rgb + 3 * ((size_t)LG_MIN(py, c->height - 1) * (size_t)c->width +
                                              (size_t)LG_MIN(px, c->width - 1));
                pixel(f, 0, py)[px] =
                    (uint8_t)(16 + ((16829 * p[0] + 33039 * p[1] + 6416 * p[2] + 32768) >> 16));
                for (int k = 0; k < 3; k++) sum[k] += p[k];
            }
            pixel(f, 1, y / 2)[x / 2] =
                (uint8_t)(128 +
                          ((-9714 * sum[0] - 19071 * sum[1] + 28785 * sum[2] + (2 << 16)) >> 18));
            pixel(f, 2, y / 2)[x / 2] =
                (uint8_t)(128 +
                          ((28785 * sum[0] - 24104 * sum[1] - 4681 * sum[2] + (2 << 16)) >> 18));
        }
}

static void to_rgb32(const struct lg_clip *c, const uint8_t *rgb, AVFrame *f)
{
    for (int y = 0; y < c->height; y++)
        for (int x = 0; x < c->width; x++, rgb += 3)
            ((uint32_t *)(void *)pixel(f, 0, y))[x] =
                (uint32_t)rgb[0] << 16 | (uint32_t)rgb[1] << 8 | rgb[2];
}

/* ---- the file ---- */

static int open_encoder(struct writer *w, const AVCodec *codec)
{
    const struct lg_clip *c = w->clip;
    AVCodecContext *e = w->encoder = avcodec_alloc_context3(codec);
    if (!e) return LG_FAIL(LG_ERR_NOSPACE, "no memory for an encoder");
    const bool even = w->codec->pixels == AV_PIX_FMT_YUV420P;
    e->width = even ? (c->width + 1) / 2 * 2 : c->width;
    e->height = even ? (c->height + 1) / 2 * 2 : c->height;
    e->pix_fmt = w->codec->pixels;
    e->framerate = av_d2q(c->fps, 60000);
    e->time_base = av_inv_q(e->framerate);
    e->thread_count = 1;
    e->flags |= AV_CODEC_FLAG_BITEXACT;
    if (even) {
        e->color_range = AVCOL_RANGE_MPEG;
        e->colorspace = AVCOL_SPC_SMPTE170M;
        e->color_primaries = AVCOL_PRI_SMPTE170M;
        e->color_trc = AVCOL_TRC_SMPTE170M;
    }
    if (w->file->oformat->flags & AVFMT_GLOBALHEADER) e->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
    AVDictionary *options = NULL;
    int rc = av_dict_parse_string(&options, w->codec->options, "=", ":", 0);
    if (rc >= 0) rc = avcodec_open2(e, codec, &options);
    const bool unknown = rc >= 0 && av_dict_count(options) > 0;
    av_dict_free(&options);
    AV_TRY(rc, w->codec->encoder);
    LG_ASSERT(!unknown); /* an option in the table that the encoder does not know */
    return 0;
}

static int open_file(struct writer *w, lg_clip_format format)
{
    const AVCodec *codec = NULL;
    LG_TRY(choose(format, &w->codec, &codec));
    AV_TRY(avformat_alloc_output_context2(&w->file, NULL, w->codec->container, NULL),
           w->codec->container);
    w->file->flags |= AVFMT_FLAG_BITEXACT;
    LG_TRY(open_encoder(w, codec));
    AVStream *s = avformat_new_stream(w->file, NULL);
    w->frame = av_frame_alloc();
    w->packet = av_packet_alloc();
    if (!s || !w->frame || !w->packet) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a video");
    s->time_base = w->encoder->time_base;
    s->avg_frame_rate = w->encoder->framerate;
    AV_TRY(avcodec_parameters_from_context(s->codecpar, w->encoder), w->codec->encoder);
    w->frame->format = w->encoder->pix_fmt;
    w->frame->width = w->encoder->width;
    w->frame->height = w->encoder->height;
    AV_TRY(av_frame_get_buffer(w->frame, 0), "a frame's memory");
    AV_TRY(avio_open_dyn_buf(&w->file->pb), "a file in memory");
    AV_TRY(avformat_write_header(w->file, NULL), w->codec->container);
    return 0;
}

/* What the encoder has ready. */
static int drain(struct writer *w)
{
    for (;;) {
        int rc = avcodec_receive_packet(w->encoder, w->packet);
        if (rc == AVERROR(EAGAIN) || rc == AVERROR_EOF) return 0;
        AV_TRY(rc, w->codec->encoder);
        if (!w->packet->duration) w->packet->duration = 1;
        av_packet_rescale_ts(w->packet, w->encoder->time_base, w->file->streams[0]->time_base);
        AV_TRY(av_interleaved_write_frame(w->file, w->packet), w->codec->container);
    }
}

static int put_frames(struct writer *w)
{
    const struct lg_clip *c = w->clip;
    for (int f = 0; f < c->frames; f++) {
        const uint8_t *rgb = c->rgb + (size_t)f * (size_t)c->height * (size_t)c->width * 3;
        AV_TRY(av_frame_make_writable(w->frame), "a frame's memory");
        (w->frame->format == AV_PIX_FMT_YUV420P ? to_yuv : to_rgb32)(c, rgb, w->frame);
        w->frame->pts = f;
        AV_TRY(avcodec_send_frame(w->encoder, w->frame), w->codec->encoder);
        LG_TRY(drain(w));
    }
    AV_TRY(avcodec_send_frame(w->encoder, NULL), w->codec->encoder);
    LG_TRY(drain(w));
    AV_TRY(av_write_trailer(w->file), w->codec->container);
    return 0;
}

static int write_film(const struct lg_clip *clip, lg_clip_format format, struct lg_clip_bytes *out)
{
    struct writer w = {.clip = clip};
    av_log_set_level(AV_LOG_QUIET); /* errors are said by us */
    int rc = open_file(&w, format);
    if (rc == 0) rc = put_frames(&w);
    if (w.file && w.file->pb) {
        uint8_t *data;
        int bytes = avio_close_dyn_buf(w.file->pb, &data);
        if (rc == 0) rc = lg_clip_put(out, data, (size_t)bytes);
        av_free(data);
    }
    avformat_free_context(w.file);
    avcodec_free_context(&w.encoder);
    av_frame_free(&w.frame);
    av_packet_free(&w.packet);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

__attribute__((visibility("default"))) extern const struct lg_clip_film_writer lg_clip_film_writer;
const struct lg_clip_film_writer lg_clip_film_writer = {.write = write_film};
