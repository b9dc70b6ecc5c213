/* PixArt: see pixart.c. Internal to stages/nets; use denoiser.h. */
#pragma once
#include "stages/nets/transformer.h"

struct lg_pixart;
/* The table, in the order of the flat buffer. */
void lg_pixart_params(const struct lg_denoiser_config *c, lg_params *t);
/* A net without memory; lay it out before use. */
struct lg_pixart *lg_pixart_new(const struct lg_denoiser_config *c, int batch, bool train);
void lg_pixart_free(struct lg_pixart **net);
void lg_pixart_layout(struct lg_pixart *net, struct lg_tf_arena *a);
/* The fixed positions, to be filled once after the layout: (T, D). */
lg_tensor lg_pixart_positions(const struct lg_pixart *net);
void lg_pixart_forward(struct lg_pixart *net, const struct lg_tf_pass *p,
                       const struct lg_denoiser_input *in, lg_tensor out);
void lg_pixart_backward(struct lg_pixart *net, const struct lg_tf_pass *p,
                        const struct lg_denoiser_input *in, lg_tensor dout);
