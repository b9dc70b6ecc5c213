/* See ltx_vae.h. The sizes of the published ones are those of their files. */
#include "stages/tools/random/ltx_vae.h"
#include <stddef.h>
#include <string.h>

#define HEAD                                                                                       \
    "{\n  \"_class_name\": \"AutoencoderKLLTXVideo\",\n  \"in_channels\": 3,\n"                    \
    "  \"out_channels\": 3,\n  \"patch_size_t\": 1,\n  \"resnet_norm_eps\": 1e-06,\n"              \
    "  \"scaling_factor\": 1.0,\n  \"encoder_causal\": true,\n  \"decoder_causal\": false,\n"
#define FOUR(word) "[\"" word "\", \"" word "\", \"" word "\", \"" word "\"]"

static const struct {
    const char *name, *text;
} PRESET[] = {
    {"ltx", HEAD "  \"latent_channels\": 128,\n  \"patch_size\": 4,\n"
                 "  \"block_out_channels\": [128, 256, 512, 512],\n"
                 "  \"decoder_block_out_channels\": [128, 256, 512, 512],\n"
                 "  \"layers_per_block\": [4, 3, 3, 3, 4],\n"
                 "  \"decoder_layers_per_block\": [4, 3, 3, 3, 4],\n"
                 "  \"spatio_temporal_scaling\": [true, true, true, false],\n"
                 "  \"decoder_spatio_temporal_scaling\": [true, true, true, false],\n"
                 "  \"timestep_conditioning\": false\n}\n"},
    {"ltx-095", HEAD
     "  \"latent_channels\": 128,\n  \"patch_size\": 4,\n"
     "  \"block_out_channels\": [128, 256, 512, 1024, 2048],\n"
     "  \"down_block_types\": " FOUR(
         "LTXVideo095DownBlock3D") ",\n"
                                   "  \"downsample_type\": [\"spatial\", \"temporal\", "
                                   "\"spatiotemporal\", \"spatiotemporal\"],\n"
                                   "  \"decoder_block_out_channels\": [256, 512, 1024],\n"
                                   "  \"layers_per_block\": [4, 6, 6, 2, 2],\n"
                                   "  \"decoder_layers_per_block\": [5, 5, 5, 5],\n"
                                   "  \"spatio_temporal_scaling\": [true, true, true, true],\n"
                                   "  \"decoder_spatio_temporal_scaling\": [true, true, true],\n"
                                   "  \"decoder_inject_noise\": [false, false, false, false],\n"
                                   "  \"upsample_residual\": [true, true, true],\n  "
                                   "\"upsample_factor\": [2, 2, 2],\n"
                                   "  \"timestep_conditioning\": true\n}\n"},
    {"tiny-ltx", HEAD "  \"latent_channels\": 8,\n  \"patch_size\": 2,\n"
                      "  \"block_out_channels\": [16, 24, 32],\n"
                      "  \"down_block_types\": [\"LTXVideoDownBlock3D\", \"LTXVideoDownBlock3D\", "
                      "\"LTXVideoDownBlock3D\"],\n"
                      "  \"downsample_type\": [\"conv\", \"conv\", \"conv\"],\n"
                      "  \"decoder_block_out_channels\": [16, 24, 32],\n"
                      "  \"layers_per_block\": [1, 1, 1, 1],\n"
                      "  \"decoder_layers_per_block\": [1, 1, 1, 1],\n"
                      "  \"spatio_temporal_scaling\": [true, true, false],\n"
                      "  \"decoder_spatio_temporal_scaling\": [true, true, false],\n"
                      "  \"decoder_inject_noise\": [false, false, false, false],\n"
                      "  \"upsample_residual\": [false, false, false],\n"
                      "  \"upsample_factor\": [1, 1, 1],\n"
                      "  \"timestep_conditioning\": false\n}\n"},
    {"tiny-ltx-095",
     HEAD "  \"latent_channels\": 8,\n  \"patch_size\": 2,\n"
          "  \"block_out_channels\": [16, 16, 32, 64],\n"
          "  \"down_block_types\": [\"LTXVideo095DownBlock3D\", \"LTXVideo095DownBlock3D\", "
          "\"LTXVideo095DownBlock3D\"],\n"
          "  \"downsample_type\": [\"spatial\", \"temporal\", \"spatiotemporal\"],\n"
          "  \"decoder_block_out_channels\": [16, 32],\n  \"layers_per_block\": [1, 1, 1, 1],\n"
          "  \"decoder_layers_per_block\": [1, 1, 1],\n"
          "  \"spatio_temporal_scaling\": [true, true, true],\n"
          "  \"decoder_spatio_temporal_scaling\": [true, true],\n"
          "  \"decoder_inject_noise\": [false, false, false],\n"
          "  \"upsample_residual\": [true, true],\n  \"upsample_factor\": [2, 2],\n"
          "  \"timestep_conditioning\": true\n}\n"},
};

const char *lg_random_ltx_vae(const char *preset)
{
    for (size_t i = 0; i < sizeof PRESET / sizeof *PRESET; i++)
        if (!strcmp(preset, PRESET[i].name)) return PRESET[i].text;
    return NULL;
}
