/* What packets of H.264 and H.265 say of how they hang together. */
#pragma once
#include "base/check.h"
#include <libavcodec/avcodec.h>

/* Of a key frame of H.264: is it no IDR picture, which alone makes a decoder forget all that was before it (ITU-T H.264, 7.4.1.2.4)?
 * False of other codecs. */
bool lg_av_is_open(const AVCodecParameters *codec, const AVPacket *key);
/* Of H.265: a leading picture that refers to nothing before its key frame (RADL; ITU-T H.265, 7.4.2.2). */
bool lg_av_is_whole_leading(const AVCodecParameters *codec, const AVPacket *packet);
