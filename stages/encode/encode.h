/* Encoding and decoding files, and whole data sets, away from a run: what lg-encode does. */
#pragma once
#include "kernels/device.h"

struct lg_encode_options {
    lg_device *device;
    const char *model; /* folder */
    int batch;         /* samples at once */
    int slice;         /* of them, or of a clip's frames, in flight in the autoencoder; 0: chosen */
    int tile;          /* pixels, as in lg_autoencoder_shape */
    int length; /* token ids of a caption in a text file; 0: the longest that a CLIP takes, of a T5 120 */
    const char *spiece; /* sentencepiece model, NULL: the model's own */
};
/* in: safetensors with pixels (N, 3, H, W) u8, or of clips (N, 3, F, H, W). out: latent_mean and latent_logvar (N, C, h, w) or
 * (N, C, f, h, w), of LTX-Video without the latents' statistics. */
int lg_encode_pictures(const struct lg_encode_options *o, const char *in, const char *out);
/* in: safetensors with latent_mean as above, not scaled. out: decoded (N, 3, H, W) or (N, 3, F, H, W), in [-1, 1] as far as
 * the model keeps to it. */
int lg_decode_pictures(const struct lg_encode_options *o, const char *in, const char *out);
/* in: safetensors with token_ids (N, L) i32, or a text file (NAME.txt) with a caption per line. out:
 * text_hidden (N, L, d_model) and token_ids. */
int lg_encode_captions(const struct lg_encode_options *o, const char *in, const char *out);

/* Latent shards of a data set, for training without a VAE: OUT/NNNNN.tar with, per sample in the data
 * set's order, <item>.latent.safetensors (latent_mean, latent_logvar; the original key in its
 * metadata), .txt or .json with the captions, .cls with the class. Pictures are resized and cropped
 * at the centre as the loader does without augmentation. A picture that does not decode is left out,
 * logged and counted; a data set without any usable one is an error. */
struct lg_encode_dataset_spec {
    struct lg_encode_options o;
    const char *data; /* see stages/io/source.h */
    const char *out;  /* folder; created; must hold no .tar yet */
    int shard_size;   /* samples in a shard */
    int size;         /* side of the pictures, pixels */
};
struct lg_encode_dataset_result {
    uint64_t encoded, left_out;
    int shards;
};
int lg_encode_dataset(const struct lg_encode_dataset_spec *s, struct lg_encode_dataset_result *ret);
