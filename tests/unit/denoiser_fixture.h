/* A tiny DiT or PixArt with everything it needs, the same on every device, and the golden values of
 * tests/golden/denoiser.safetensors. Weights and inputs come from a hash of (name, element), as in
 * tests/golden/make_denoiser.py: all of them non-zero, also those that start at zero in a real run.
 * Failures end the test program. Only for devices whose memory the host can read. */
#pragma once
#include "stages/nets/denoiser.h"

/* Element e: hash of (name, e) in scale * (-1, 1), rounded to fp32. */
void golden_fill(const char *name, size_t count, double scale, double *ret);
/* Values of a tensor of the golden file; the caller frees them. */
double *golden_read(const char *name, size_t count);
double *golden_read_of(const char *path, const char *name, size_t count);

/* hidden 32, 2 heads, 2 blocks, 4x8x8 latents, 5 classes. */
struct lg_denoiser_config denoiser_fixture_dit(void);
/* hidden 48, 3 heads, 2 blocks, 4x8x12 latents, 6 text tokens of width 20. */
struct lg_denoiser_config denoiser_fixture_pixart(void);

/* hidden 48, 3 heads, 3 blocks, two of them dual, 4x8x12 latents, texts of 3, 3 and 5 tokens. */
struct lg_denoiser_config denoiser_fixture_sd3(void);

/* hidden 48, 3 heads, 2 double blocks and 3 single ones, 4x8x12 latents, T5's text of 5 tokens, guidance. */
struct lg_denoiser_config denoiser_fixture_flux(void);

/* 3 levels of 8, 16 and 16 channels, the first two with attention, 4x7x9 latents, 5 text tokens of width 20. */
struct lg_denoiser_config denoiser_fixture_sd2(void);
/* 2 levels of 8 and 16 channels, transformers of 2 blocks in the second, 4x5x6 latents, texts of widths 12 and 20. */
struct lg_denoiser_config denoiser_fixture_sdxl(void);

/* hidden 24, 3 heads, 2 blocks, latents of 3 frames of 4x6x10, 6 text tokens of width 20. */
struct lg_denoiser_config denoiser_fixture_latte(void);
/* hidden 32, 2 heads, 2 blocks, latents of 3 frames of 4x5x7, 6 text tokens of width 20. */
struct lg_denoiser_config denoiser_fixture_ltx(void);

/* Where element i of a parameter of the file lies behind its offset (lg_param_layout). */
size_t denoiser_fixture_place(const struct lg_param *p, size_t i);

/* What all models have, as an initial value. */
#define DENOISER_SHAPE(k, C, h, w, p, D, n, H, ratio, classes, L, E, eps)                          \
    {                                                                                              \
        .kind = k, .channels = C, .height = h, .width = w, .patch = p, .hidden = D, .depth = n,    \
        .heads = H, .mlp_ratio = ratio, .num_classes = classes, .n_texts = (L) > 0,                \
        .text = {{.length = L, .width = E}}, .norm_eps = eps                                       \
    }

enum { DENOISER_FIXTURE_BATCH = 3 };

struct denoiser_fixture {
    struct lg_denoiser_config config;
    lg_params params;
    lg_device *device;
    lg_stream *stream;
    lg_denoiser *net;
    lg_dtype type;
    void *weights, *grads; /* flat; weights as stages/nets/storage.h has them */
    struct lg_denoiser_input in;
    lg_tensor out, dout; // (B, C or 2C, H, W)
    bool
        frame_times; /* frame i of F has i / (F - 1) of its sample's timestep: the first one is clean */
};
/* device: "host", "ref64"; isa may be NULL. Batch DENOISER_FIXTURE_BATCH. */
void denoiser_fixture_open(struct denoiser_fixture *f, const char *device, const char *isa,
                           const struct lg_denoiser_config *c, bool train);
/* The same, of a clip whose frames have timesteps of their own. */
void denoiser_fixture_open_frames(struct denoiser_fixture *f, const char *device,
                                  const struct lg_denoiser_config *c);
/* The same as mode says, of its first mode->batch samples. */
void denoiser_fixture_open_mode(struct denoiser_fixture *f, const char *device,
                                const struct lg_denoiser_config *c,
                                const struct lg_denoiser_mode *mode);
/* The same, trained as this says: `params` is that table, weights are those of their names all the same. */
void denoiser_fixture_open_trained(struct denoiser_fixture *f, const char *device,
                                   const struct lg_denoiser_config *c,
                                   const struct lg_training *training,
                                   const char *const *recompute);
/* Timestep of frame i of sample b. */
double denoiser_fixture_frame_time(const struct denoiser_fixture *f, int64_t b, int64_t i);
/* The net anew, with these words of memory.recompute; weights and inputs stay. Its error, if any: then the net is
 * gone. */
int denoiser_fixture_recompute(struct denoiser_fixture *f, const char *const *words);
/* The same with memory.mlp_chunks. */
int denoiser_fixture_chunks(struct denoiser_fixture *f, const char *const *words, int chunks);
void denoiser_fixture_close(struct denoiser_fixture *f);
void denoiser_fixture_forward(struct denoiser_fixture *f);
/* From f->dout into f->grads. */
void denoiser_fixture_backward(struct denoiser_fixture *f, bool accumulate);
/* Element i of a tensor or of a flat buffer of the device's type. */
double denoiser_fixture_get(const struct denoiser_fixture *f, const void *data, size_t i);
void denoiser_fixture_set(const struct denoiser_fixture *f, void *data, size_t i, double value);
/* Is a net's output NET.out of a golden file, and its gradients NET.grad.PARAMETER? Says which are not; how many. The gradient of a
 * to_k.bias may be zero but for rounding, so norms below 0.3 count as that. */
struct denoiser_golden {
    const char *path, *net;
    bool gradients, frame_times;
    double tolerance;
};
int denoiser_fixture_compare(const char *device, const struct lg_denoiser_config *c,
                             const struct denoiser_golden *g);
/* ||a - b|| and ||b|| over count elements; a NaN anywhere makes the distance NaN. */
struct distance {
    double diff, norm;
};
struct distance denoiser_fixture_distance(const struct denoiser_fixture *f, const void *data,
                                          const double *want, size_t count);
