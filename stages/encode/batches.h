/* The encoders over any number of samples: fixed batches, the last one padded, so that a sample's
 * bits depend on neither how many there are nor what stands beside it. For tools; the stages of a
 * run have the window instead. Everything on the caller's side is host memory in fp32. */
#pragma once
#include "stages/nets/autoencoder.h"
#include "stages/nets/text_encoder.h"

typedef struct lg_vae_batches lg_vae_batches;
struct lg_vae_batches_spec {
    lg_device *device; /* must outlive the batches */
    const char *dir;   /* the model's folder, diffusers layout */
    struct lg_autoencoder_config config;
    struct lg_autoencoder_shape shape; /* one half; slice 0: as many pictures as make a megapixel,
                                          of clips lg_autoencoder_slice's frames */
    struct lg_decoding decoding;       /* sample i is first + i */
};
/* Loads the weights. Allocates on the device what a batch needs. */
int lg_vae_batches_open(const struct lg_vae_batches_spec *spec, lg_vae_batches **ret);
void lg_vae_batches_close(lg_vae_batches **b);
/* pixels (n, 3, F H, W); mean and logvar (n, C, f h, w); F and f are 1 of pictures. */
void lg_vae_batches_encode(lg_vae_batches *b, const uint8_t *pixels, int64_t n, float *ret_mean,
                           float *ret_logvar);
/* latent (n, C, f h, w); image (n, 3, F H, W) about [-1, 1] and pixels, the same in u8, either may be NULL. */
void lg_vae_batches_decode(lg_vae_batches *b, const float *latent, int64_t n, float *ret_image,
                           uint8_t *ret_pixels);

typedef struct lg_text_batches lg_text_batches;
struct lg_text_batches_spec {
    lg_device *device;
    const char *dir; /* the model's folder, Hugging Face layout */
    struct lg_text_encoder_config config;
    int batch, length;
    unsigned outputs;     /* bits of what is wanted; 0: the states */
    bool attends_padding; /* as if a caption's padding belonged to it */
};
int lg_text_batches_open(const struct lg_text_batches_spec *spec, lg_text_batches **ret);
void lg_text_batches_close(lg_text_batches **b);
/* ids (n, L), of a T5 each row at least one id that is not 0 followed by padding; states (n, L, D). */
void lg_text_batches_encode(lg_text_batches *b, const int32_t *ids, int64_t n, float *ret_states);
/* The same for all outputs that are wanted: (n, L, D) of those of tokens, else (n, D) or (n, P). */
void lg_text_batches_encode_all(lg_text_batches *b, const int32_t *ids, int64_t n,
                                float *const ret[LG_TEXT_OUTPUTS]);
