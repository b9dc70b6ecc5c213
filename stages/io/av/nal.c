/* NAL units (ITU-T H.264 and H.265, 7.3.1), behind their lengths (ISO/IEC 14496-15, 5.3 and 8.3) or behind start codes (B.1). */
#include "stages/io/av/nal.h"

enum { H264_SLICE_FIRST = 1, H264_IDR = 5, H265_SLICE_LAST = 31, H265_RADL_N = 6, H265_RADL_R = 7 };

static int type_of(enum AVCodecID codec, uint8_t first_byte)
{
    return codec == AV_CODEC_ID_HEVC ? first_byte >> 1 & 0x3f : first_byte & 0x1f;
}

static bool is_slice(enum AVCodecID codec, int type)
{
    return codec == AV_CODEC_ID_HEVC ? type <= H265_SLICE_LAST
                                     : type >= H264_SLICE_FIRST && type <= H264_IDR;
}

/* Bytes of the length before each unit; 0: start codes. */
static size_t length_bytes(const AVCodecParameters *c)
{
    const int at = c->codec_id == AV_CODEC_ID_HEVC ? 21 : 4; /* in hvcC and avcC */
    return c->extradata_size > at && c->extradata[0] == 1 ? 1 + (c->extradata[at] & 3) : 0;
}

/* Where the unit begins that stands at or behind `at`; p->size: none does. */
static size_t find_unit(const AVPacket *p, size_t at, size_t length, size_t *ret_bytes)
{
    const size_t end = (size_t)p->size;
    size_t n = 0;
    if (length) {
        if (end - at <= length) return end;
        for (size_t i = 0; i < length; i++) n = n << 8 | p->data[at++];
        *ret_bytes = LG_MIN(n, end - at);
        return at;
    }
    for (at += 3; at < end; at++)
        if (!p->data[at - 3] && !p->data[at - 2] && p->data[at - 1] == 1) break;
    *ret_bytes = 0;
    return LG_MIN(at, end);
}

/* The type of the packet's first slice; -1: it has none. */
static int slice_type(const AVCodecParameters *c, const AVPacket *p)
{
    const size_t length = length_bytes(c), end = (size_t)p->size;
    size_t bytes = 0;
    for (size_t at = 0; (at = find_unit(p, at, length, &bytes)) < end; at += bytes) {
        const int type = type_of(c->codec_id, p->data[at]);
        if ((!length || bytes) && is_slice(c->codec_id, type)) return type;
    }
    return -1;
}

bool lg_av_is_open(const AVCodecParameters *codec, const AVPacket *key)
{
    return codec->codec_id == AV_CODEC_ID_H264 && slice_type(codec, key) != H264_IDR;
}

bool lg_av_is_whole_leading(const AVCodecParameters *codec, const AVPacket *packet)
{
    if (codec->codec_id != AV_CODEC_ID_HEVC) return false;
    const int type = slice_type(codec, packet);
    return type == H265_RADL_N || type == H265_RADL_R;
}
