/* Layers of clips, for descriptions (layers.h): convolutions over time and space, and norms of channels, on
 * (frames, h, w, channels) of one clip.
 *
 * A causal net may be described for a slice of a clip's frames. Before the clip's first frame a convolution sees that frame
 * again; before a slice's it sees the frames that the slice before it ended with, which are carried from one run to the
 * next. So a slice computes what the whole would, and in the same bits. */
#pragma once
#include "stages/nets/layers.h"

/* What is described. carried, carries: flat memory of lg_video.at elements once the description has run; a slice reads the one,
 * which the slice before it wrote, and writes the other. */
struct lg_video {
    bool is_first, is_last; /* the slice begins, or ends, the clip */
    bool is_causal; /* else it is whole, and a convolution sees as many frames behind as before */
    int64_t at;     /* elements of what has been described so far */
    lg_tensor carried, carries;
    /* Of a decoder that has them: its timestep, (1), and flat noise of noise_at elements once the description has run. */
    lg_tensor timestep, noise;
    int64_t noise_at;
};

/* Room for frames that a convolution reads, among those that it sees beside them. */
struct lg_frames {
    lg_tensor all, own; /* own: a part of all, which somebody writes */
    int before, after, keep;
};
struct lg_video_conv {
    int64_t out;        /* channels */
    int stride;         /* in time and space; 0: 1 */
    lg_tensor residual; /* added to the result, or LG_NONE */
    lg_tensor y;        /* where it writes; LG_NONE: a new value */
};
enum { LG_VIDEO_KERNEL = 3 }; /* frames, rows and columns of every filter here */

/* For own (frames, h, w, channels) and a convolution of this stride. extra: so many more of its first frame before the
 * clip. */
struct lg_frames lg_video_room(lg_net *n, const struct lg_video *clip, lg_tensor own, int stride,
                               int extra);
/* NAME.weight and NAME.bias over frames whose own are written: what lies beside these is written here. */
lg_tensor lg_video_conv(lg_net *n, struct lg_video *clip, const struct lg_frames *f,
                        struct lg_video_conv c, const char *name);
/* RMSNorm over channels, modulated where shift and scale (channels) are there, then SiLU, to y (LG_NONE: a new value). */
struct lg_video_norm {
    double eps;
    lg_tensor shift, scale;
};
lg_tensor lg_video_norm_silu(lg_net *n, lg_tensor x, struct lg_video_norm norm, lg_tensor y);
/* x (frames, h, w, channels) + the next h w elements of the clip's noise, the same in all frames, times NAME (channels, 1, 1); y: where
 * to, or LG_NONE: a new value. */
lg_tensor lg_video_add_noise(lg_net *n, struct lg_video *clip, lg_tensor x, lg_tensor y,
                             const char *name);
/* LayerNorm over channels, then a linear: NORM.weight, NORM.bias; NAME.weight (out, in, 1, 1, 1), NAME.bias. */
lg_tensor lg_video_shortcut(lg_net *n, lg_tensor x, int64_t out, double eps, const char *norm,
                            const char *name);
