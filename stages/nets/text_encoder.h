/* Text encoders: token ids to states. Which net it is, config.json's model_type says; one that is new is a file with its
 * description, and a row in text_encoder.c.
 *
 * Weights come in shards: contiguous runs of layers, one flat buffer each, placed by the plan; a net maps all of them
 * and owns none. The embedding lies in the first shard, the final norm in the last.
 */
#pragma once
#include "config/denoisers.h"
#include "kernels/device.h"
#include "stages/nets/clip.h"
#include "stages/nets/storage.h"
#include "stages/nets/t5.h"
#include <stdio.h>

struct lg_text_encoder_config {
    lg_text_encoder_kind kind;
    lg_storage storage; /* of its weights (storage.h); a config.json says nothing of it: "auto" */
    union {
        struct lg_t5_config t5;
        struct lg_clip_config clip;
    };
};
/* dir/config.json; refuses what is no text encoder that is known, by key and value. */
int lg_text_encoder_config_load(const char *dir, struct lg_text_encoder_config *ret);

struct lg_text_encoder_sizes {
    int vocab, layers;
    int width;      /* D, features of a state */
    int projection; /* P, features of text_embeds; 0: none */
    int length_max; /* of a caption; 0: any */
};
struct lg_text_encoder_sizes lg_text_encoder_sizes(const struct lg_text_encoder_config *c);

/* The outputs that the model has, as bits. */
unsigned lg_text_encoder_outputs(const struct lg_text_encoder_config *c);

enum { LG_TEXT_SHARDS_MAX = 64 };
/* Parameter table of shard `shard` of `shards` (1 <= shards <= layers). */
int lg_text_encoder_params(const struct lg_text_encoder_config *c, int shard, int shards,
                           lg_params *ret);
/* Reads shard's parameters from dir into a host fp32 flat buffer; or elements [first, first + count) of them. With count 0 and ret
 * NULL the files alone are looked at, whether they hold what the config wants. */
int lg_text_encoder_load(const struct lg_text_encoder_config *c, const char *dir, int shard,
                         int shards, float *ret);
struct lg_text_range {
    int shard, shards;
    size_t first, count;
};
int lg_text_encoder_load_range(const struct lg_text_encoder_config *c, const char *dir,
                               const struct lg_text_range *range, float *ret);

typedef struct lg_text_encoder lg_text_encoder;
struct lg_text_encoder_shape {
    int batch, length;
    unsigned outputs; /* bits of those that are wanted; 0: the states */
};
/* *ret_bytes: activations + scratch. LG_ERR_CONFIG: a caption longer than the model takes, an output that it does not
 * have. */
int lg_text_encoder_plan(lg_device *d, const struct lg_text_encoder_config *c,
                         const struct lg_text_encoder_shape *shape, size_t *ret_bytes);
int lg_text_encoder_open(lg_device *d, const struct lg_text_encoder_config *c,
                         const struct lg_text_encoder_shape *shape, int shards,
                         lg_text_encoder **ret);
void lg_text_encoder_close(lg_text_encoder **net);
/* Its program as text (kernels/graph/program.h), for people. */
int lg_text_encoder_print(lg_device *d, const struct lg_text_encoder_config *c,
                          const struct lg_text_encoder_shape *shape, FILE *to);

struct lg_text_io {
    lg_tensor ids;    // (B, L) i32
    lg_tensor length; // (B) i32, the number of ids before the padding. T5; others ask for none
    /* (B) i32, each caption's row of its end among all B L: b L + lg_clip_end(); where pooled or embeds are wanted */
    lg_tensor ends;
    lg_tensor out[LG_TEXT_OUTPUTS]; /* those that are wanted, of the device's type */
};
/* All on the device. Rows of padding are computed too. weights: one flat buffer per shard, as storage.h lays it out. */
void lg_text_encoder_forward(lg_text_encoder *net, lg_stream *s, const void *const *weights,
                             const struct lg_text_io *io);
