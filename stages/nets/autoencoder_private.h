/* What the files of the autoencoders tell one another. */
#pragma once
#include "stages/nets/autoencoder.h"
#include "stages/nets/encoders.h"

/* Bytes of device memory that a net runs in. */
struct lg_net_memory {
    size_t arena, scratch;
};

/* autoencoder_kl_run.c: a net for pictures whose memory is its caller's. */
int lg_aekl_make(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                 lg_aekl **ret);
struct lg_net_memory lg_aekl_memory(const lg_aekl *net);
void lg_aekl_lend(lg_aekl *net, char *arena, char *scratch);
void lg_aekl_print_programs(const lg_aekl *net, FILE *to);
double lg_aekl_flops(const lg_aekl *net);

/* ---- autoencoder_video.c: a net for clips ---- */

/* Frames of pixels of a slice. */
struct lg_video_slice {
    int frames;
    bool is_first, is_last;
};
/* A clip, or a tile of one: frames of pixels, and their size. */
struct lg_video_shape {
    int frames, height, width;
    lg_dtype pixels; /* LG_U8, or of a tile the compute type, in [-1, 1] */
};
struct lg_video lg_video_of(const struct lg_autoencoder_config *c, lg_aekl_half half,
                            const struct lg_video_slice *slice);
/* What a slice of so many frames, from the first on, reads and writes of a clip, without data. */
struct lg_video_ends lg_video_ends_of(const struct lg_autoencoder_config *c, lg_aekl_half half,
                                      const struct lg_video_shape *clip, int frames, lg_dtype type);
void lg_video_describe(lg_net *n, const struct lg_autoencoder_config *c, lg_aekl_half half,
                       struct lg_video *clip, const struct lg_video_ends *ends);

typedef struct lg_video_net lg_video_net;
/* As lg_autoencoder_*, with memory that is the caller's. */
int lg_video_net_make(lg_device *d, const struct lg_autoencoder_config *c,
                      const struct lg_autoencoder_shape *shape, lg_video_net **ret);
struct lg_net_memory lg_video_net_memory(const lg_video_net *net);
void lg_video_net_lend(lg_video_net *net, char *arena, char *scratch);
void lg_video_net_close(lg_video_net **net);
void lg_video_net_print(const lg_video_net *net, FILE *to);
double lg_video_net_flops(const lg_video_net *net);
void lg_video_net_encode(lg_video_net *net, lg_stream *s, const void *weights, lg_tensor pixels,
                         lg_tensor mean, lg_tensor logvar);
void lg_video_net_set_decoding(lg_video_net *net, const struct lg_decoding *d);
void lg_video_net_decode(lg_video_net *net, lg_stream *s, const void *weights, lg_tensor latent,
                         lg_tensor image, lg_tensor pixels);
