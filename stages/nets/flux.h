/* FLUX, in two files: flux.c describes the net, flux_file.c has its keys of config.json and its angles. */
#pragma once
#include "stages/nets/models.h"

enum { LG_FLUX_CLIP, LG_FLUX_T5, LG_FLUX_TEXTS };

void lg_flux_describe(lg_net *n, const struct lg_denoiser_config *c,
                      const struct lg_model_input *in, lg_tensor out);
