/* The encoder of T5 (Raffel et al. 2020), v1.0 (ReLU) and v1.1 (gated GELU), in Hugging Face
 * layout: DIR/config.json, DIR/model.safetensors (or sharded with index), DIR/spiece.model. It runs by
 * text_encoder.h. */
#pragma once
#include <stdbool.h>

struct lg_t5_config {
    int vocab, d_model, d_kv, d_ff, heads, layers;
    int buckets, max_distance;
    bool gated; /* gated-gelu against relu */
    double eps;
};
/* dir/config.json; refuses what is not a T5 encoder, by key and value. */
int lg_t5_config_load(const char *dir, struct lg_t5_config *ret);
