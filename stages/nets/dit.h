/* DiT: see dit.c. Internal to stages/nets; use denoiser.h. */
#pragma once
#include "stages/nets/transformer.h"

struct lg_dit;
/* The table, in the order of the flat buffer. */
void lg_dit_params(const struct lg_denoiser_config *c, lg_params *t);
/* A net without memory; lay it out before use. */
struct lg_dit *lg_dit_new(const struct lg_denoiser_config *c, int batch, bool train);
void lg_dit_free(struct lg_dit **net);
void lg_dit_layout(struct lg_dit *net, struct lg_tf_arena *a);
/* The fixed positions, to be filled once after the layout: (T, D). */
lg_tensor lg_dit_positions(const struct lg_dit *net);
void lg_dit_forward(struct lg_dit *net, const struct lg_tf_pass *p,
                    const struct lg_denoiser_input *in, lg_tensor out);
void lg_dit_backward(struct lg_dit *net, const struct lg_tf_pass *p,
                     const struct lg_denoiser_input *in, lg_tensor dout);
