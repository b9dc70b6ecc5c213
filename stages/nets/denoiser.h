/* The nets that the trainer trains and the sampler runs: DiT (class conditioning,
 * adaLN-Zero; Peebles & Xie 2023), PixArt (text by cross-attention, adaLN-single; Chen et al.
 * 2023), SD3 and FLUX (text and image in one attention; Esser et al. 2024), the U-Nets of Stable Diffusion 2 and SDXL
 * (Rombach et al. 2022; Podell et al. 2023), and of clips Latte (blocks in a frame, then along time; Ma et al. 2024) and LTX
 * (attention among all tokens; HaCohen et al. 2024). Parameters are named and shaped as diffusers'. dit.c, pixart.c, sd3.c,
 * flux.c, unet.c, latte.c and ltx.c describe one net each; denoiser.c runs them.
 *
 * A net owns no weights: forward and backward get a flat buffer cut by lg_denoiser_params(). It
 * owns its activations, planned once for a fixed batch; a smaller batch is padded by the caller.
 */
#pragma once
#include "config/denoisers.h"
#include "config/unet.h"
#include "kernels/device.h"
#include "kernels/graph/exchange.h"
#include "kernels/ops.h"
#include "stages/io/safetensors.h"
#include "stages/nets/adapter.h"
#include "stages/nets/params.h"
#include "stages/nets/sequence.h"
#include <stdio.h>

enum { LG_DENOISER_DEPTH_MAX = 1024, LG_FLUX_AXES = 3 };
#define LG_DIT_MODULATION_WEIGHTS (256 << 20)
struct lg_denoiser_config {
    lg_denoiser_kind kind;
    int channels; /* of the latent */
    int frames;   /* of the latent; 0: as 1, a picture */
    int height;   /* of a frame of the latent */
    int width;    /* of a frame of the latent */
    int patch;    /* patch size p: tokens T = frames (height / p) (width / p) */
    int hidden;   /* D = heads * head_dim */
    int depth;    /* blocks */
    int heads;
    int mlp_ratio;   /* 4 */
    int num_classes; /* DiT: labels 0..num_classes - 1; num_classes is the null label */
    int64_t
        modulation_weights; /* DiT: of one product of modulations (dit.c); 0: LG_DIT_MODULATION_WEIGHTS. For tests. */
    /* Its texts, in the order of its table (lg_denoiser_texts), as many as that has; or one less, where the last may go
     * without an encoder: then its states are zeros that nobody gives, of this length and width all the same. */
    int n_texts;
    struct lg_denoiser_text {
        int length, width; /* L, and E of the states; 0, 0: only pooled is wanted */
        int pooled;        /* P; 0: none is wanted */
    } text[LG_TEXTS_MAX];
    double norm_eps; /* 1e-6 */
    bool
        learned_variance; /* behind the latent's channels of the output come as many of a variance */
    /* Side of the latent over whose patches both axes of the positions are spread (diffusers' sample_size), whatever height
     * and width are, so that a model sees other shapes as it sees its own; 0: height. */
    int sample_size;
    double
        interpolation; /* positions are divided by it; 0: the model's max(sample_size / 64, 1) or 1 */
    bool
        size_conditions; /* PixArt-alpha 1024, SDXL: numbers of the picture are conditions (lg_denoiser_numbers) */
    bool no_attention_bias; /* q, k, v have none */
    /* SD3: */
    int positions_side; /* its table has positions of so many by so many patches, of which the middle is used */
    bool qk_norm; /* RMSNorm of queries and keys */
    uint64_t dual[LG_DENOISER_DEPTH_MAX /
                  64]; /* bits: blocks with a second attention, of the image alone */
    /* FLUX: */
    int singles;            /* the last so many blocks have one stream */
    int axes[LG_FLUX_AXES]; /* features of a head that are turned by a token's text, row, column */
    bool guidance;          /* its scale is a condition */
    /* LTX: a cell of the latent is a frame of so many seconds, and so many pixels wide and high; 0: 8 / 25, 32. */
    double cell_seconds, cell_pixels;
    /* U-Nets: hidden, heads are those of the first level, depth is lg_unet_blocks. */
    struct lg_unet unet;
};
static inline bool lg_denoiser_is_dual(const struct lg_denoiser_config *c, int block)
{
    return c->dual[block / 64] >> block % 64 & 1;
}
static inline int lg_denoiser_frames(const struct lg_denoiser_config *c)
{
    return c->frames ? c->frames : 1;
}
/* A clip is a picture whose frames lie below one another: its height is that of all frames. */
static inline int lg_denoiser_rows(const struct lg_denoiser_config *c)
{
    return lg_denoiser_frames(c) * c->height;
}
static inline int lg_denoiser_out_channels(const struct lg_denoiser_config *c)
{
    return c->channels * (c->learned_variance ? 2 : 1);
}

/* How many numbers of a picture are conditions of each sample: 0; 2, its original height and width in pixels; 6, those,
 * then the top and left edge of what was cut out of it once it had been scaled, then height and width of that. */
int lg_denoiser_numbers(const struct lg_denoiser_config *c);
/* Is the ratio of what is trained on one of them, too? */
bool lg_denoiser_has_ratio(const struct lg_denoiser_config *c);

/* Says which field is impossible and why (hidden % heads, height % patch ...). */
int lg_denoiser_config_check(const struct lg_denoiser_config *c);
/* Reads/writes diffusers' config.json, also those of the old class Transformer2DModel. Absent keys have the class's
 * defaults; whether size_conditions are there is asked of the weights beside it, if any are. height and width: sample_size,
 * or what a model trained here at another size says in keys of its own. */
int lg_denoiser_config_load(const char *path, struct lg_denoiser_config *ret);
/* With those keys of `source`, another config.json of diffusers, that are none of ours. NULL: none. */
int lg_denoiser_config_save(const struct lg_denoiser_config *c, const char *source,
                            const char *path);
/* The parameter table, in a fixed order, everything trained but what never is. Free with lg_params_free. */
int lg_denoiser_params(const struct lg_denoiser_config *c, lg_params *ret);

/* What of a net is trained, and how; points into what the caller keeps. */
struct lg_training {
    const char *const *groups; /* struct lg_params_grouping; NULL: all alike */
    struct lg_adapter adapter; /* with one nothing else is trained */
    bool is_8_bit;             /* the moments of those that no group says otherwise of */
    lg_storage frozen;         /* the same: storage of what is not trained (storage.h) */
};
/* The table of a net that is trained so: what is trained, then what is frozen (lg_params_split). LG_ERR_CONFIG: what groups
 * or adapter name is not there. */
int lg_denoiser_table(const struct lg_denoiser_config *c, const struct lg_training *t,
                      lg_params *ret);
/* Floating-point operations of one forward per sample (multiply-adds count two). */
double lg_denoiser_flops(const struct lg_denoiser_config *c);

/* Loading and saving in diffusers layout: DIR/config.json +
 * DIR/diffusion_pytorch_model.safetensors. The DiT's single timestep/label embedder is saved under
 * every block's name, and unequal ones are refused at load. Read are also sharded weights and the variant .fp16.
 * (weights.h), of f32, f16 or bf16. weights: host fp32, the whole flat buffer. source: as above. Save writes into an existing directory, with fsync of each file; it is the caller who
 * publishes the directory. */
int lg_denoiser_load(const struct lg_denoiser_config *c, const char *dir, float *ret_weights);
/* Elements [first, first + count) of another of its tables, or of a part of one. With count 0 and ret NULL the
 * files alone are looked at, whether they hold the table's tensors. */
int lg_denoiser_load_range(const struct lg_denoiser_config *c, const lg_params *t, const char *dir,
                           float *ret, size_t first, size_t count);
/* trained, frozen: the two parts of table t; frozen NULL: it lies behind `trained`, if there is any. */
struct lg_denoiser_weights {
    const lg_params *t;
    const float *trained, *frozen;
    const char *source; /* as above */
};
int lg_denoiser_save(const struct lg_denoiser_config *c, const char *dir,
                     const struct lg_denoiser_weights *w);
/* The next data of a file: values of parameter p, or their gradients, in the order of diffusers' files (filters lie (O, H, W, I) in memory). */
int lg_denoiser_write_values(lg_st_writer *w, const struct lg_param *p, const float *values);

typedef struct lg_denoiser lg_denoiser;

struct lg_denoiser_mode {
    int batch;
    bool train;                   /* with a backward */
    const char *const *recompute; /* config/recompute.h; NULL: nothing is */
    bool offload;                 /* kernels/graph/offload.h */
    int offload_keep;             /* what it calls keep */
    int mlp_chunks;               /* of a feed-forward's tokens: lg_net_mlp; 0: 1 */
    bool frame_times; /* frames of a clip have timesteps of their own: lg_denoiser_time_rows */
    /* Activations may lie where gradients will: in the flat buffer of them, which lg_denoiser_set_lent names, until the
     * backward comes to write them. Then no backward may accumulate. */
    bool lends;
    /* Weights of what is trained come for each use alone, and the net has places for them (lg_denoiser_weights_place); `ahead`:
     * from when those of the unit before come. */
    bool places_weights, ahead;
    struct lg_training training;
    struct lg_sequence sequence; /* a rank of several: see lg_band */
};

/* A rank's band of the latent, when the sequence is split: x, out and d out are (B, C, height, W) of rows
 * [first, first + height) of lg_denoiser_rows(), by lg_send from a whole one (noise is drawn by the element's number in that). All other
 * inputs are those of the whole net, and so are weights. Means over the band times `share` are its terms of means over the
 * latent: that of the loss, and lg_mse_loss and lg_learned_range_loss get a sample's weight times `share`. */
struct lg_band {
    int first, height;
    double share;
};
/* LG_ERR_CONFIG where there are fewer rows of patches, or heads, than ranks. */
int lg_denoiser_band(const struct lg_denoiser_config *c, const struct lg_sequence *s,
                     struct lg_band *ret);

/* With frame_times a clip has, instead of one timestep, one for each so many rows of its band, in their order: for a frame, or,
 * where the band begins or ends within one, for the largest part of a frame of which the band has whole ones. Of a picture,
 * and without frame_times: for the whole band. */
int lg_denoiser_time_rows(const struct lg_denoiser_config *c, const struct lg_band *band,
                          bool frame_times);

enum { LG_RECOMPUTED_BYTES = 96 };
struct lg_denoiser_bytes {
    size_t activations, scratch;
    size_t host;      /* in host memory: what is offloaded */
    size_t exchanged; /* in memory of the caller: what comes from the other ranks of a sequence */
    size_t lent;      /* and activations where gradients will lie */
    size_t traffic;   /* what goes to them in a forward and its backward */
    /* "norms in 28 of 28 blocks, mlp in 3 of 28 blocks"; "": nothing is */
    char recomputed[LG_RECOMPUTED_BYTES];
};
/* A net without memory, for what can be known before: its bytes and its events. */
int lg_denoiser_compile(lg_device *d, const struct lg_denoiser_config *c,
                        const struct lg_denoiser_mode *mode, lg_denoiser **ret);
/* What lg_denoiser_open allocates. */
int lg_denoiser_plan(lg_device *d, const struct lg_denoiser_config *c,
                     const struct lg_denoiser_mode *mode, struct lg_denoiser_bytes *ret);
const struct lg_denoiser_bytes *lg_denoiser_bytes_of(const lg_denoiser *net);
int lg_denoiser_open(lg_device *d, const struct lg_denoiser_config *c,
                     const struct lg_denoiser_mode *mode, lg_denoiser **ret);
/* Nets on one device that never run at the same time, compiled: gives them memory, one arena, one scratch and one pool in host
 * memory for all, each as large as the largest needs. The first owns it and is closed last. */
int lg_denoiser_open_all(lg_denoiser *const *nets, int n);
/* What that takes, positions of all included. */
struct lg_denoiser_bytes lg_denoiser_bytes_of_all(lg_denoiser *const *nets, int n);
/* Do their events name the same units and exchanges in the same order? Then what follows the events of one (rings, places
 * of gathered weights) serves the other. */
bool lg_denoiser_same_events(const lg_denoiser *a, const lg_denoiser *b);
/* What is recomputed, and its program (kernels/graph/program.h), as text. */
int lg_denoiser_print(lg_device *d, const struct lg_denoiser_config *c,
                      const struct lg_denoiser_mode *mode, FILE *to);
void lg_denoiser_close(lg_denoiser **net);

/* What an encoder has made of a batch's captions; LG_NONE for what the denoiser's table does not want. */
struct lg_text_states {
    lg_tensor states; // (B, L, E)
    lg_tensor pooled; // (B, P)
    lg_tensor
        length; // (B) i32, >= 1, where the net does not see padding: keys beyond it are masked; not read elsewhere
};

/* One batch of inputs, on the device, in its compute type. */
struct lg_denoiser_input {
    lg_tensor x; // (B, C, H, W): x_t
    lg_tensor
        t; // (B): timestep as the net sees it (flow: 1000 t), of the gradients' type; frame_times: (B k)
    lg_tensor label;                          // (B) i32: DiT
    struct lg_text_states text[LG_TEXTS_MAX]; /* the config's */
    lg_tensor
        size; // (B, k) of t's type: with size_conditions, the k = lg_denoiser_numbers of each picture
    lg_tensor
        ratio; // (B) of t's type: with lg_denoiser_has_ratio, height / width of what is trained on
    lg_tensor guidance; // (B) of t's type: with guidance, 1000 times its scale
};
/* out (B, C or 2C, H, W), as dout, H = lg_denoiser_rows(). With train, keeps what the backward needs. Forward and backward give the stream
 * the net's own scratch memory: a caller whose other operations need some sets it again. */
void lg_denoiser_forward(lg_denoiser *net, lg_stream *s, const void *weights,
                         const struct lg_denoiser_input *in, lg_tensor out);
/* Type of the flat gradients: the compute type, fp32 where that has 16 bits. */
lg_dtype lg_denoiser_grad_type(const lg_device *d);
/* Gradients of the last forward's parameters (flat buffer cut like the weights): overwritten, or
 * added to when accumulate; cut like the part of the table that is trained. Once after each forward: it uses up what that
 * kept. dout (B, C, H, W). The inputs of the forward must be unchanged. */
void lg_denoiser_backward(lg_denoiser *net, lg_stream *s, const void *weights,
                          const struct lg_denoiser_input *in, lg_tensor dout, void *grads,
                          bool accumulate);

/* The same in stretches, for weights and gradients whose units come and go (ZeRO): the events of a forward, then those of
 * its backward, in the order in which they must be gone through. A unit's weights and gradient need a place, set below,
 * between its two events only, in forward and backward apart; with the second its gradient is whole. Gaps between
 * parameters are written by nobody. Units are those of the table of the net's training. */
enum lg_denoiser_event_kind {
    LG_EVENT_RUN, /* lg_denoiser_run */
    LG_EVENT_WEIGHTS,
    LG_EVENT_WEIGHTS_DONE,
    LG_EVENT_GRADIENT, /* each trained unit has one, and one that is done, in the backward */
    LG_EVENT_GRADIENT_DONE,
    LG_EVENT_EXCHANGE /* the caller's: below */
};
struct lg_denoiser_event {
    enum lg_denoiser_event_kind kind;
    int unit;     /* of weights and gradients */
    int from, to; /* of RUN */
    int exchange; /* its number, from 0 in this order */
};
/* The net's; *ret_forward: how many of them are the forward's. */
const struct lg_denoiser_event *lg_denoiser_events(const lg_denoiser *net, int *ret_n,
                                                   int *ret_forward);
/* Before the first event of a part; arguments as above. */
void lg_denoiser_begin_forward(lg_denoiser *net, const struct lg_denoiser_input *in, lg_tensor out);
void lg_denoiser_begin_backward(lg_denoiser *net, const struct lg_denoiser_input *in,
                                lg_tensor dout, bool accumulate);
/* With mode.lends, once, before the first forward: the flat buffer into which every backward writes, cut as the part of the
 * table that is trained, 64-byte aligned. Its gaps are written by nobody. */
void lg_denoiser_set_lent(lg_denoiser *net, void *gradients);
/* With mode.places_weights: where a unit's weights may lie in the net's memory in the forward, or in the backward, from their
 * event to that which says that they are done. */
void *lg_denoiser_weights_place(const lg_denoiser *net, int unit, bool backward);
void lg_denoiser_set_weights(lg_denoiser *net, int unit, const void *weights);
void lg_denoiser_set_gradient(lg_denoiser *net, int unit, void *gradient);
void lg_denoiser_run(lg_denoiser *net, lg_stream *s, const struct lg_denoiser_event *e);

/* A rank of a split sequence runs in stretches only. At EXCHANGE it gives each rank, itself too, its part, and goes on
 * when all ranks' parts have come to it. What must have happened before the memory of another may be written
 * stands in kernels/graph/exchange.h; the memory keeps what the backward needs, and lies at the same places on all ranks. */
/* 64-byte aligned, bytes_of()->exchanged; the caller's. Before the first event of a forward. */
void lg_denoiser_set_exchanged(lg_denoiser *net, void *memory);
/* theirs: rank `to`'s, as it is mapped here. */
struct lg_sent lg_denoiser_sends(const lg_denoiser *net, int exchange, int to, void *theirs);
/* Where it arrives. */
struct lg_arrival lg_denoiser_arrival(const lg_denoiser *net, int exchange);
