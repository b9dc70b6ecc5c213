/* config.json of the AutoencoderKLLTXVideos that lg-random-model makes. */
#pragma once

/* The text of a preset: "ltx" (LTX-Video 0.9.0), "ltx-095" (0.9.5), "tiny-ltx", "tiny-ltx-095"; NULL: there is none. The tiny
 * ones have 8 channels of the latent, 8 pixels a cell and 4 frames a latent frame. */
const char *lg_random_ltx_vae(const char *preset);
