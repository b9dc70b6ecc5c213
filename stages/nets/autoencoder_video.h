/* A net for clips, of which autoencoder_video.c makes the plan and autoencoder_video_run.c runs it. */
#pragma once
#include "stages/nets/autoencoder_private.h"
#include "stages/nets/tiles.h"

enum { LG_VIDEO_KINDS_MAX = 3 };
/* One half. */
struct lg_video_side {
    lg_aekl_half half;
    int n_kinds;
    struct lg_video_slice kind[LG_VIDEO_KINDS_MAX];
    lg_program *program[LG_VIDEO_KINDS_MAX];
    int64_t carried; /* elements that a slice hands the next one */
    int64_t noise;   /* elements that a tile's slices read, all the same */
};

/* Where things lie: bytes from the arena's start. */
struct lg_video_places {
    size_t carried[2], patches;           /* of a slice */
    size_t pixels, latent, logvar, image; /* of a tile */
    size_t noise, noise32, timestep; /* of the decoder: a tile's, in fp32 and as the net takes it */
    size_t whole;                    /* the decoder's pictures, where its caller wants none */
    size_t rows, columns;            /* weights of a tile */
};

struct lg_video_net {
    lg_device *device;
    struct lg_autoencoder_config c;
    struct lg_autoencoder_shape shape;
    lg_dtype dtype, stats;
    lg_params table;
    struct lg_video_side encoder, decoder; /* without kinds: there is none */
    struct lg_tiles rows, columns;
    struct lg_video_shape tile; /* of pixels; the whole clip's where it is not cut */
    bool is_tiled;
    struct lg_video_places at;
    struct lg_decoding decoding;
    char *arena, *scratch;
    struct lg_net_memory need;
};

/* The slice from frame *at on, which then is where the next one begins; false behind the last one. */
bool lg_video_next_slice(const lg_video_net *net, lg_aekl_half half, int *at,
                         struct lg_video_slice *ret);
/* Its kind; n_kinds: it is none. */
int lg_video_kind(const struct lg_video_side *side, const struct lg_video_slice *slice);
/* Pixels on a side of the decoder's patches; 1 of an AutoencoderKL. */
int lg_video_patch(const struct lg_autoencoder_config *c);
/* Latent frames of so many frames, the clip's first ones or of a slice behind them. */
int lg_video_latents(const struct lg_autoencoder_config *c, int frames);
