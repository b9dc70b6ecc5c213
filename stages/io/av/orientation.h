/* How a track says that its frames are to be turned. */
#pragma once
#include "base/check.h"
#include <libavformat/avformat.h>

/* As in Exif (stages/io/picture.h), from 1 to 8. LG_ERR_VOID: by an angle that is no quarter turn. */
int lg_av_orientation(const AVStream *s, int *ret);
