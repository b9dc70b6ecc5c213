/* What libav says of a frame's pixels, in our words. */
#pragma once
#include "stages/io/clip_rgb.h"
#include <libavutil/frame.h>

/* Points into the frame. LG_ERR_VOID: pixels or colours of a kind that is not read. */
int lg_av_planes(const AVFrame *f, struct lg_clip_planes *ret);
