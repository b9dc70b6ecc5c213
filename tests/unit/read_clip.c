#include "tests/unit/read_clip.h"
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <webp/demux.h>
// clang-format off
#include <cmocka.h>
// clang-format on

struct memory {
    const uint8_t *data;
    size_t bytes, at;
};

static int take(void *ctx, uint8_t *to, int n)
{
    struct memory *m = ctx;
    size_t some = LG_MIN((size_t)n, m->bytes - m->at);
    memcpy(to, m->data + m->at, some);
    m->at += some;
    return some ? (int)some : AVERROR_EOF;
}

static int64_t seek(void *ctx, int64_t to, int whence)
{
    struct memory *m = ctx;
    if (whence == AVSEEK_SIZE) return (int64_t)m->bytes;
    if (whence != SEEK_SET || to < 0 || to > (int64_t)m->bytes) return -1;
    m->at = (size_t)to;
    return to;
}

static uint8_t level(double v)
{
    return (uint8_t)LG_MIN(LG_MAX(v + 0.5, 0), 255);
}

static void to_rgb(const AVFrame *f, int x, int y, uint8_t rgb[3])
{
    const uint8_t *p = f->data[0] + y * f->linesize[0];
    if (f->format == AV_PIX_FMT_YUV420P) {
        assert_int_equal(f->colorspace, AVCOL_SPC_SMPTE170M);
        double Y = (p[x] - 16) * 255 / 219.0;
        double b = (f->data[1][y / 2 * f->linesize[1] + x / 2] - 128) * 255 / 224.0;
        double r = (f->data[2][y / 2 * f->linesize[2] + x / 2] - 128) * 255 / 224.0;
        rgb[0] = level(Y + 1.402 * r);
        rgb[1] = level(Y - 0.344136 * b - 0.714136 * r);
        rgb[2] = level(Y + 1.772 * b);
        return;
    }
    assert_true(f->format == AV_PIX_FMT_BGRA || f->format == AV_PIX_FMT_BGR0);
    for (int c = 0; c < 3; c++) rgb[c] = p[4 * x + 2 - c];
}

static void add_frame(struct seen_clip *s, const AVFrame *f)
{
    const size_t bytes = (size_t)f->height * (size_t)f->width * 3;
    s->height = f->height;
    s->width = f->width;
    s->rgb = realloc(s->rgb, bytes * (size_t)(s->frames + 1));
    assert_non_null(s->rgb);
    for (int y = 0; y < f->height; y++)
        for (int x = 0; x < f->width; x++)
            to_rgb(f, x, y,
                   s->rgb + bytes * (size_t)s->frames +
                       3 * ((size_t)y * (size_t)f->width + (size_t)x));
    s->frames++;
}

static void drain(AVCodecContext *d, AVFrame *f, struct seen_clip *s)
{
    while (avcodec_receive_frame(d, f) == 0) add_frame(s, f);
}

static struct seen_clip read_by_libav(const uint8_t *data, size_t bytes)
{
    struct memory m = {data, bytes, 0};
    struct seen_clip s = {0};
    AVFormatContext *file = avformat_alloc_context();
    file->pb = avio_alloc_context(av_malloc(4096), 4096, 0, &m, take, NULL, seek);
    assert_int_equal(avformat_open_input(&file, NULL, NULL, NULL), 0);
    assert_true(avformat_find_stream_info(file, NULL) >= 0);
    assert_int_equal(file->nb_streams, 1);
    AVStream *stream = file->streams[0];
    AVCodecContext *d = avcodec_alloc_context3(avcodec_find_decoder(stream->codecpar->codec_id));
    assert_true(avcodec_parameters_to_context(d, stream->codecpar) >= 0);
    assert_int_equal(avcodec_open2(d, NULL, NULL), 0);
    AVPacket *p = av_packet_alloc();
    AVFrame *f = av_frame_alloc();
    while (av_read_frame(file, p) == 0) {
        assert_int_equal(avcodec_send_packet(d, p), 0);
        av_packet_unref(p);
        drain(d, f, &s);
    }
    avcodec_send_packet(d, NULL);
    drain(d, f, &s);
    s.fps = s.frames * (double)AV_TIME_BASE / (double)file->duration;
    av_frame_free(&f);
    av_packet_free(&p);
    avcodec_free_context(&d);
    av_freep(&file->pb->buffer);
    avio_context_free(&file->pb);
    avformat_close_input(&file);
    return s;
}

static struct seen_clip read_webp(const uint8_t *data, size_t bytes)
{
    WebPAnimInfo info;
    uint8_t *rgba;
    int end_ms = 0;
    WebPAnimDecoder *d = WebPAnimDecoderNew(&(WebPData){.bytes = data, .size = bytes}, NULL);
    assert_non_null(d);
    assert_true(WebPAnimDecoderGetInfo(d, &info));
    assert_int_equal(info.loop_count, 0);
    struct seen_clip s = {.height = (int)info.canvas_height, .width = (int)info.canvas_width};
    const size_t pixels = (size_t)s.height * (size_t)s.width;
    s.rgb = malloc(pixels * 3 * info.frame_count);
    assert_non_null(s.rgb);
    for (; WebPAnimDecoderHasMoreFrames(d); s.frames++) {
        assert_true(WebPAnimDecoderGetNext(d, &rgba, &end_ms));
        for (size_t i = 0; i < pixels; i++) {
            assert_int_equal(rgba[4 * i + 3], 255);
            memcpy(s.rgb + 3 * (pixels * (size_t)s.frames + i), rgba + 4 * i, 3);
        }
    }
    s.fps = 1000.0 * s.frames / end_ms;
    WebPAnimDecoderDelete(d);
    return s;
}

struct seen_clip read_clip(const uint8_t *data, size_t bytes, const char *name)
{
    return strcmp(name, "webp") == 0 ? read_webp(data, bytes) : read_by_libav(data, bytes);
}
