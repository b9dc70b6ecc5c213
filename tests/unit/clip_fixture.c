#include "tests/unit/clip_fixture.h"
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/opt.h>
#include <libavutil/pixdesc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <webp/encode.h>
#include <webp/mux.h>

enum { STEP = 7, LEAST = 20, LEVELS = 31, SOUND_RATE = 8000 };

static void must(bool well, const char *what)
{
    if (well) return;
    fprintf(stderr, "clip fixture: %s\n", what);
    abort();
}

int film_level(int i)
{
    return LEAST + STEP * (i % LEVELS);
}

int film_number(int level)
{
    return (level - LEAST + STEP / 2) / STEP;
}

struct film_levels film_levels_of(const lg_picture *p)
{
    int64_t sum[2] = {0}, n[2] = {0};
    for (int y = 0; y < p->height; y++)
        for (int x = 0; x < p->width; x++) {
            const int side = x >= p->width / 2;
            const bool is_edge = abs(x - p->width / 2) < 3; /* where codecs blur */
            if (is_edge) continue;
            for (int c = 0; c < 3; c++) sum[side] += p->rgb[3 * (y * p->width + x) + c];
            n[side] += 3;
        }
    return (struct film_levels){(int)((sum[0] + n[0] / 2) / n[0]),
                                (int)((sum[1] + n[1] / 2) / n[1])};
}

static int level_at(const struct film_spec *s, int i, int x)
{
    return x < s->width / 2 ? film_level(i) : 255 - film_level(i);
}

void film_free(struct film *f)
{
    free(f->data);
    *f = (struct film){0};
}

static int time_of(const struct film_spec *s, int i)
{
    return s->at ? s->at[i] : i;
}

/* ---- animated WebP ---- */

static struct film make_webp(const struct film_spec *s)
{
    WebPAnimEncoderOptions options;
    WebPConfig config;
    WebPPicture p;
    must(WebPAnimEncoderOptionsInit(&options) && WebPConfigInit(&config) && WebPPictureInit(&p),
         "libwebp");
    config.lossless = 1;
    WebPAnimEncoder *e = WebPAnimEncoderNew(s->width, s->height, &options);
    uint8_t *rgb = malloc(3 * (size_t)s->width * (size_t)s->height);
    must(e && rgb, "memory");
    p.width = s->width, p.height = s->height, p.use_argb = 1;
    for (int i = 0; i < s->frames; i++) {
        for (int k = 0; k < s->width * s->height; k++)
            memset(rgb + 3 * k, level_at(s, i, k % s->width), 3);
        must(WebPPictureImportRGB(&p, rgb, 3 * s->width), "a picture");
        must(WebPAnimEncoderAdd(e, &p, time_of(s, i) * 1000 / s->rate, &config), "a frame");
    }
    must(WebPAnimEncoderAdd(e, NULL, (time_of(s, s->frames - 1) + 1) * 1000 / s->rate, NULL),
         "the end");
    WebPData data;
    WebPDataInit(&data);
    must(WebPAnimEncoderAssemble(e, &data), "a file");
    struct film f = {malloc(data.size), data.size};
    must(f.data, "memory");
    memcpy(f.data, data.bytes, data.size);
    WebPDataClear(&data);
    WebPPictureFree(&p);
    WebPAnimEncoderDelete(e);
    free(rgb);
    return f;
}

/* ---- libav ---- */

struct maker {
    const struct film_spec *s;
    AVFormatContext *file;
    AVCodecContext *encoder;
    AVStream *film, *sound;
    AVFrame *frame;
    AVPacket *packet;
    int keys; /* key frames so far */
    int64_t begin;
};

static int scaled(const AVComponentDescriptor *c, bool is_full, int level)
{
    const int v = is_full ? level : 16 + (level * 219 + 127) / 255;
    return v << (c->depth - 8) << c->shift;
}

static void draw(struct maker *m, int i)
{
    AVFrame *f = m->frame;
    const AVPixFmtDescriptor *d = av_pix_fmt_desc_get((enum AVPixelFormat)f->format);
    const bool is_rgb = d->flags & AV_PIX_FMT_FLAG_RGB;
    const bool is_full = is_rgb || d->nb_components == 1; /* grey: of a GIF */
    must(av_frame_make_writable(f) >= 0, "a frame");
    for (int c = 0; c < d->nb_components; c++) {
        const AVComponentDescriptor *k = &d->comp[c];
        const bool is_chroma = !is_rgb && (c == 1 || c == 2);
        const int shift_x = is_chroma ? d->log2_chroma_w : 0;
        const int shift_y = is_chroma ? d->log2_chroma_h : 0;
        for (int y = 0; y < AV_CEIL_RSHIFT(f->height, shift_y); y++)
            for (int x = 0; x < AV_CEIL_RSHIFT(f->width, shift_x); x++) {
                const int v = c == 3      ? 255 << (k->depth - 8)
                              : is_chroma ? 128 << (k->depth - 8)
                                          : scaled(k, is_full,
                                                   y < m->s->black_rows ? 0 : level_at(m->s, i, x));
                uint8_t *at =
                    f->data[k->plane] + y * f->linesize[k->plane] + x * k->step + k->offset;
                at[0] = (uint8_t)v;
                if (k->depth + k->shift > 8) at[1] = (uint8_t)(v >> 8);
            }
    }
    f->pts = time_of(m->s, i);
}

static void write_packets(struct maker *m)
{
    while (avcodec_receive_packet(m->encoder, m->packet) == 0) {
        av_packet_rescale_ts(m->packet, m->encoder->time_base, m->film->time_base);
        m->packet->stream_index = m->film->index;
        if (m->packet->flags & AV_PKT_FLAG_KEY && ++m->keys == 2) m->begin = m->packet->pts;
        if (m->s->is_cut && m->keys < 2) continue;
        if (m->s->is_cut) m->packet->pts -= m->begin, m->packet->dts -= m->begin;
        must(av_interleaved_write_frame(m->file, m->packet) >= 0, "a packet");
    }
}

static void add_sound(struct maker *m)
{
    m->sound = avformat_new_stream(m->file, NULL);
    must(m->sound, "a stream");
    AVCodecParameters *p = m->sound->codecpar;
    p->codec_type = AVMEDIA_TYPE_AUDIO;
    p->codec_id = AV_CODEC_ID_PCM_S16LE;
    p->format = AV_SAMPLE_FMT_S16;
    p->sample_rate = SOUND_RATE;
    av_channel_layout_default(&p->ch_layout, 1);
    p->block_align = 2;
    p->bits_per_coded_sample = 16;
    m->sound->time_base = (AVRational){1, SOUND_RATE};
}

static void write_sound(struct maker *m, int first, int samples)
{
    must(av_new_packet(m->packet, 2 * samples) == 0, "sound");
    memset(m->packet->data, 0x55, 2 * (size_t)samples);
    m->packet->pts = m->packet->dts =
        av_rescale_q(first, (AVRational){1, SOUND_RATE}, m->sound->time_base);
    m->packet->duration = av_rescale_q(samples, (AVRational){1, SOUND_RATE}, m->sound->time_base);
    m->packet->stream_index = m->sound->index;
    m->packet->flags |= AV_PKT_FLAG_KEY;
    must(av_interleaved_write_frame(m->file, m->packet) >= 0, "sound");
}

static void open_encoder(struct maker *m)
{
    const struct film_spec *s = m->s;
    const AVCodec *codec = avcodec_find_encoder_by_name(s->encoder);
    must(codec, s->encoder);
    m->encoder = avcodec_alloc_context3(codec);
    must(m->encoder, "memory");
    AVCodecContext *e = m->encoder;
    e->width = s->width, e->height = s->height;
    e->time_base = (AVRational){1, s->rate};
    e->framerate = (AVRational){s->rate, 1};
    e->pix_fmt = av_get_pix_fmt(s->pixels ? s->pixels : "yuv420p");
    e->thread_count = 1;
    e->bit_rate = 4000000;
    if (s->key_every) e->gop_size = s->key_every;
    if (m->file->oformat->flags & AVFMT_GLOBALHEADER) e->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
    AVDictionary *options = NULL;
    must(av_dict_parse_string(&options, s->options ? s->options : "", "=", ":", 0) >= 0, "options");
    must(avcodec_open2(e, codec, &options) >= 0, "the encoder does not open");
    must(av_dict_count(options) == 0, "an option that the encoder does not know");
    av_dict_free(&options);
}

static struct film make_film(const struct film_spec *s)
{
    struct maker m = {.s = s, .frame = av_frame_alloc(), .packet = av_packet_alloc()};
    av_log_set_level(AV_LOG_ERROR);
    must(avformat_alloc_output_context2(&m.file, NULL, s->container, NULL) >= 0, s->container);
    m.file->flags |= AVFMT_FLAG_BITEXACT;
    open_encoder(&m);
    m.film = avformat_new_stream(m.file, NULL);
    must(m.film && m.frame && m.packet, "memory");
    m.film->time_base = m.encoder->time_base;
    m.film->avg_frame_rate = m.encoder->framerate;
    must(avcodec_parameters_from_context(m.film->codecpar, m.encoder) >= 0, "parameters");
    if (s->has_sound) add_sound(&m);
    if (s->is_cut) m.file->avoid_negative_ts = AVFMT_AVOID_NEG_TS_DISABLED;
    must(avio_open_dyn_buf(&m.file->pb) >= 0, "memory");
    AVDictionary *muxing = NULL;
    must(av_dict_parse_string(&muxing, s->muxing ? s->muxing : "", "=", ":", 0) >= 0, "options");
    must(avformat_write_header(m.file, &muxing) >= 0, "a header");
    must(av_dict_count(muxing) == 0, "an option that the container does not know");
    av_dict_free(&muxing);
    m.frame->format = m.encoder->pix_fmt;
    m.frame->width = s->width, m.frame->height = s->height;
    must(av_frame_get_buffer(m.frame, 0) >= 0, "memory");
    for (int i = 0; i < s->frames; i++) {
        draw(&m, i);
        must(avcodec_send_frame(m.encoder, m.frame) >= 0, "a frame");
        write_packets(&m);
        if (s->has_sound) write_sound(&m, i * SOUND_RATE / s->rate, SOUND_RATE / s->rate);
    }
    must(avcodec_send_frame(m.encoder, NULL) >= 0, "the end");
    write_packets(&m);
    must(av_write_trailer(m.file) >= 0, "a trailer");
    uint8_t *data;
    const int bytes = avio_close_dyn_buf(m.file->pb, &data);
    struct film f = {malloc((size_t)bytes), (size_t)bytes};
    must(f.data, "memory");
    memcpy(f.data, data, f.bytes);
    av_free(data);
    av_frame_free(&m.frame);
    av_packet_free(&m.packet);
    avcodec_free_context(&m.encoder);
    avformat_free_context(m.file);
    av_log_set_level(AV_LOG_QUIET);
    return f;
}

/* There in a build for AddressSanitizer. x265 loses memory of its own; readers are what is tested. */
__attribute__((weak)) void __lsan_disable(void);
__attribute__((weak)) void __lsan_enable(void);

struct film film_make(const struct film_spec *s)
{
    if (__lsan_disable) __lsan_disable();
    struct film f = strcmp(s->container, "webp") ? make_film(s) : make_webp(s);
    if (__lsan_enable) __lsan_enable();
    return f;
}
