/* A denoiser from inside: denoiser.c makes it, denoiser_run.c runs it. */
#pragma once
#include "kernels/graph/program.h"
#include "stages/nets/denoiser.h"
#include "stages/nets/models.h"

/* The order in which values are bound; behind them the units' weights, then their gradients. */
enum {
    BOUND_X,
    BOUND_T,
    BOUND_LABEL,
    BOUND_SIZE,
    BOUND_RATIO,
    BOUND_GUIDANCE,
    BOUND_POSITIONS,
    BOUND_TEXT, /* of each text three: states, pooled, lengths */
    BOUND_TEXT_END = BOUND_TEXT + 3 * LG_TEXTS_MAX - 1,
    BOUND_OUT,
    BOUND_DOUT,
    BOUND_WEIGHTS
};

struct lg_denoiser {
    struct lg_denoiser_config config;
    const struct lg_model *model;
    lg_device *device;
    struct lg_denoiser_mode mode;
    lg_params params;
    lg_program *program;
    void **bound; /* of a run: by the numbers above */
    void *arena, *scratch, *positions;
    void *exchanged; /* the caller's */
    void *lent;      /* the caller's */
    struct lg_band band;
    int64_t times; /* timesteps of a sample */
    void *host;    /* pinned, where offloaded values wait; NULL: none are */
    bool borrows;  /* arena, scratch and host are another net's */
    size_t host_bytes;
    struct lg_denoiser_bytes bytes;
    bool is_pinned;
    struct lg_denoiser_event *event; /* the forward's, then the backward's */
    int n_events, n_forward;
    bool kept; /* the arena holds what a backward needs */
    bool adds; /* the backward that runs */
};

/* The program of net->mode and net->band, of whose blocks each drops what `drop` says. */
int lg_denoiser_compile_dropping(lg_denoiser *net, const unsigned *drop);
/* The same as mode.recompute says (denoiser_recompute.c). A budget that cannot be kept: LG_ERR_CONFIG. */
int lg_denoiser_compile_mode(lg_denoiser *net);
void lg_denoiser_set_band(lg_denoiser *net, const struct lg_band *band);

/* Once it is compiled. */
void lg_denoiser_find_events(lg_denoiser *net);
