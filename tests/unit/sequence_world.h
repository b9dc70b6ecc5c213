/* The ranks of a split sequence as nets of one process, beside the unsplit net: they run in lockstep from exchange to
 * exchange. The bytes of one are brought as early as kernels/graph/exchange.h allows: where they are to lie there is NaN
 * from the exchange before on. Failures end the test. */
#pragma once
#include "tests/unit/denoiser_fixture.h"

enum { WORLD_RANKS_MAX = 4 };

struct rank {
    lg_denoiser *net;
    struct lg_band band;
    struct lg_denoiser_input in;
    lg_tensor out, dout;
    void *grads, *exchanged;
};

struct world {
    struct denoiser_fixture f; /* the unsplit net, and the device */
    struct rank rank[WORLD_RANKS_MAX];
    int n, exchanges; /* ranks; of a forward and its backward */
    size_t offloaded;
};

/* mode: of all ranks, whose number is filled in. Weights and inputs are the fixture's. */
void world_open(struct world *w, const char *device, const struct lg_denoiser_config *c,
                const struct lg_denoiser_mode *mode);
void world_close(struct world *w);
/* A forward and its backward, from the ranks' inputs, into their gradients. */
void world_run(struct world *w, bool accumulate);
/* In parts: events [from, to) of all ranks; exchanges: how many there are until the end of the backward. */
void world_begin_forward(struct world *w);
void world_go(struct world *w, int from, int to, int exchanges);
/* The rank's part of a whole latent; element by element, of tensors of one shape. */
lg_tensor world_band(const struct rank *r, lg_tensor whole);
void world_copy(const lg_tensor *from, const lg_tensor *to);
