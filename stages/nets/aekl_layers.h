/* The layers of AutoencoderKL, described once; only autoencoder_kl.c includes this. Without a graph the same
 * description only declares: it adds the rows of the parameter table, so that the two cannot disagree. */
#pragma once
#include "kernels/graph/graph.h"
#include "stages/nets/autoencoder_kl.h"

struct lg_aekl_build {
    const struct lg_aekl_config *c;
    lg_params *table;  /* declare: rows are added; else taken one after the other */
    int next;          /* the row of the next parameter */
    lg_graph *g;       /* NULL: declare */
    lg_tensor weights; /* the flat buffer */
    lg_dtype t;
};

/* pixels (n, in_channels, h, w) u8 to the posterior's parameters (n, h', w', 2 latent_channels). */
lg_tensor lg_aekl_encoder(struct lg_aekl_build *b, lg_tensor pixels);
/* latent (n, latent_channels, h, w) to the picture (n, h', w', out_channels), which is written to `picture`. */
void lg_aekl_decoder(struct lg_aekl_build *b, lg_tensor latent, lg_tensor picture);
