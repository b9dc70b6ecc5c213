/* The encoder of T5 (Raffel et al. 2020), v1.0 (ReLU) and v1.1 (gated GELU), in Hugging Face
 * layout: DIR/config.json, DIR/model.safetensors (or sharded with index), DIR/spiece.model.
 *
 * Weights come in shards: contiguous runs of layers, one flat buffer each, placed by the plan; a
 * net maps all of them and owns none. The embedding lies in the first shard, the final norm in the
 * last.
 */
#pragma once
#include "kernels/device.h"
#include "kernels/ops.h"
#include "stages/nets/params.h"
#include <stdio.h>

struct lg_t5_config {
    int vocab, d_model, d_kv, d_ff, heads, layers;
    int buckets, max_distance;
    bool gated; /* gated-gelu against relu */
    double eps;
};
/* dir/config.json; refuses what is not a T5 encoder, by key and value. */
int lg_t5_config_load(const char *dir, struct lg_t5_config *ret);
enum { LG_T5_SHARDS_MAX = 64 };
/* Parameter table of shard `shard` of `shards` (1 <= shards <= layers). */
int lg_t5_params(const struct lg_t5_config *c, int shard, int shards, lg_params *ret);
/* Reads shard's parameters from dir into a host fp32 flat buffer. */
int lg_t5_load(const struct lg_t5_config *c, const char *dir, int shard, int shards, float *ret);

typedef struct lg_t5 lg_t5;
/* A net for a fixed batch and length. *ret_bytes of the plan: activations + scratch. */
int lg_t5_plan(lg_device *d, const struct lg_t5_config *c, int batch, int length,
               size_t *ret_bytes);
int lg_t5_open(lg_device *d, const struct lg_t5_config *c, int batch, int length, int shards,
               lg_t5 **ret);
void lg_t5_close(lg_t5 **net);
/* Its program as text (kernels/graph/program.h), for people. */
int lg_t5_print(lg_device *d, const struct lg_t5_config *c, int batch, int length, FILE *to);
/* ids (B, L) i32 on the device; mask is ids != 0; length (B) i32 on the device, the number of ids
 * before the padding; out (B, L, d_model). Rows of padding are computed too. weights: one flat
 * buffer per shard. */
void lg_t5_forward(lg_t5 *net, lg_stream *s, const void *const *weights, lg_tensor ids,
                   lg_tensor length, lg_tensor out);
