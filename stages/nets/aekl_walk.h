/* The layers of AutoencoderKL in the order in which data passes them; only autoencoder_kl.c
 * includes this. One walk serves three ends, so that they cannot disagree:
 * - declare: the parameter table is built, nothing runs (stream NULL);
 * - plan: the stream is dry, the needs of the buffers are recorded;
 * - run. */
#pragma once
#include "stages/nets/autoencoder_kl.h"

enum { LG_AEKL_BUFFERS = 3 }; /* what a residual block needs at once */

struct lg_aekl_walk {
    const struct lg_aekl_config *c;
    lg_params *table;    /* declare: rows are added; else taken one after the other */
    int next;            /* plan and run: the row of the next parameter */
    const char *weights; /* run: the flat buffer */
    lg_stream *s;
    lg_dtype dtype;
    void *buffer[LG_AEKL_BUFFERS]; /* run */
    size_t need[LG_AEKL_BUFFERS];  /* plan: elements */
    void *mean_var;                /* run: (n, norm_groups, 2) f64 */
    int measured;                  /* the buffer whose map they are of, -1: none */
    /* The feature map (n, h, w, channels) and the buffer that holds it. */
    int at;
    int64_t n, h, w, channels;
};

/* pixels (n, in_channels, h, w) u8 to the posterior's parameters (n, h', w', 2 latent_channels). In: n, h, w. Returns
 * these, which lie in a buffer. */
lg_tensor lg_aekl_walk_encoder(struct lg_aekl_walk *k, lg_tensor pixels);
/* latent (n, latent_channels, h, w) to a picture (n, h', w', out_channels), in a buffer. */
lg_tensor lg_aekl_walk_decoder(struct lg_aekl_walk *k, lg_tensor latent);
