/* What [sample] comes to for clips, for the programs that draw, start drawing, or show what was drawn. */
#pragma once
#include "config/config.h"
#include <string.h>

#define LG_SAMPLE_FPS 8 /* where neither sample.fps nor data.fps says */

static inline bool lg_sample_is_clip(const lg_config *c)
{
    return LG_MAX(c->data_frames, c->data_latent_frames) > 1;
}
/* The ending of the files in DIR/samples: stages/io/clip_formats.def. */
static inline const char *lg_sample_format(const lg_config *c)
{
    if (strcmp(c->sample_format, "auto") != 0) return c->sample_format;
    return lg_sample_is_clip(c) ? "gif" : "png";
}
static inline double lg_sample_fps(const lg_config *c)
{
    return c->sample_fps > 0 ? c->sample_fps : c->data_fps > 0 ? c->data_fps : LG_SAMPLE_FPS;
}
