/* Between unet.c, which describes the U-Nets, and unet_file.c, which knows their keys of config.json. */
#pragma once
#include "stages/nets/models.h"

/* Whether it is the config.json of an SDXL among U-Nets. */
bool lg_unet_is_sdxl(const lg_model_config *f);
void lg_unet_describe(lg_net *n, const struct lg_denoiser_config *c,
                      const struct lg_model_input *in, lg_tensor out);
