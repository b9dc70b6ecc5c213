/* The text encoders of CLIP (Radford et al. 2021; OpenCLIP's H and bigG) in Hugging Face layout, as CLIPTextModel and
 * CLIPTextModelWithProjection: DIR/config.json and DIR/model.safetensors (or sharded with index). It runs by
 * text_encoder.h; its tokens come from stages/io/bpe.h. */
#pragma once
#include "kernels/ops.h"
#include <stdint.h>

struct lg_clip_config {
    int vocab, hidden, mlp, heads, layers;
    int positions; /* the longest caption in tokens, its begin and end included: 77 */
    lg_act act;
    double eps;
    int eos; /* a caption ends at its first token of this id; -1: at the first of its largest id */
    int projection; /* features of text_embeds; 0: the model has no projection */
};
/* dir/config.json; refuses what is not a CLIP text encoder, by key and value. Absent keys have CLIPTextConfig's
 * defaults. */
int lg_clip_config_load(const char *dir, struct lg_clip_config *ret);
/* The place of the token at which a caption of `length` ids ends: the one that is pooled. */
int lg_clip_end(const struct lg_clip_config *c, const int32_t *ids, int length);
