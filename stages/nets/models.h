/* The denoisers' models: a new one is a file with its description, a row in config/denoisers.def and one in models.c.
 * Internal to stages/nets; use denoiser.h. */
#pragma once
#include "stages/nets/denoiser.h"
#include "stages/nets/layers.h"
#include "stages/nets/model_config.h"

/* What a description gets; B the batch, (H, W) the latent's sides, T = (H / p) (W / p). */
struct lg_model_input {
    lg_tensor x;     // (B, C, H, W): a clip's frames below one another
    lg_tensor t;     // (B), of statistics' type; of clips (B k): lg_denoiser_time_rows
    lg_tensor label; // (B) i32, where the model has labels
    struct lg_text_states text[LG_TEXTS_MAX]; /* those that its table names */
    /* Fixed: sinusoidal, (T, D); of a model with a table of frames (S, D) of the S patches of a frame, and in clips behind
     * that (B F, D) of all samples' frames; or angles, (2, S + T, d / 2) of t's type, or of all channels (2, T, D / 2). */
    lg_tensor positions;
    lg_tensor guidance; // (B) of t's type, where the model has it
    lg_tensor size,
        ratio; // (k B), (B) of t's type, where the model has size_conditions: lg_denoiser_numbers, its ratio
};

struct lg_model {
    /* diffusers' config.json: _class_name, norm_type (NULL: the class has neither that nor the keys that come with it),
     * and the defaults of absent keys */
    const char *class, *norm_type;
    int sample_size, channels, depth, heads, head_dim;
    double norm_eps;
    int out_channels; /* 0: as many as in_channels */
    bool
        is_unet; /* a transformer's keys (heads, layers, patches) are none of its own: load knows its shape */
    int size_numbers; /* with size_conditions: so many numbers of a picture and no ratio; 0: two, and a ratio */
    /* Describes the forward: out (B, C or 2 C, H, W). */
    void (*describe)(lg_net *n, const struct lg_denoiser_config *c, const struct lg_model_input *in,
                     lg_tensor out);
    /* The sinusoidal positions' interpolation_scale, unless config.json says another. NULL: the model has others. */
    double (*scale)(int sample_size);
    /* Each frame has the same sinusoidal positions, and the frames have some of their own (lg_net_frame_positions). A split
     * sequence is cut between frames. */
    bool has_frame_table;
    /* Where tokens are turned (RoPE): the cosines, then the sines of all tokens, texts first, each (S + T, d / 2), d a head's
     * dimension. NULL: none are. */
    void (*angles)(const struct lg_denoiser_config *c, float *ret);
    /* They are those of all channels, (T, D / 2), turned before the heads are told apart, and q, k are normed over all of them:
     * a rank of a split sequence has its own tokens' alone, and own heads are not made by themselves (FastSeq). */
    bool turns_channels;
    /* How many tokens its texts have in a joint attention, where they are a part of the sequence; NULL: they are none. */
    int (*text_tokens)(const struct lg_denoiser_config *c);
    /* What is impossible beyond what is for all; c's other fields are possible. */
    int (*check)(const struct lg_denoiser_config *c);
    /* The keys of config.json that are the model's own. */
    int (*load)(const lg_model_config *f, struct lg_denoiser_config *c);
    void (*save)(const struct lg_denoiser_config *c, cJSON *o);
    /* A tensor that only models with size_conditions have, or NULL. */
    const char *size_tensor;
    /* The name that a parameter has in the file for block i > 0 as well, which holds the same values; false: it has none.
     * NULL: no parameter has. */
    bool (*other_name)(const char *name, int i, char ret[LG_PARAM_NAME_BYTES]);
};
const struct lg_model *lg_model_of(lg_denoiser_kind kind);
/* The kind of this class; LG_DENOISER_KINDS: none. */
lg_denoiser_kind lg_model_find(const char *class);

enum {
    LG_MODEL_KEY_MAX = 1 << 24,
    LG_MODEL_SIDE_MAX = 4096,
    LG_MODEL_ROWS_MAX = 1 << 20,
    LG_MODEL_WIDTH_MAX = 1 << 16
};

#define LG_DENOISERS_READ                                                                          \
    "DiT, PixArt, SD3, FLUX, Latte and LTX transformers and the U-Nets of SD 2 and SDXL as "       \
    "diffusers "                                                                                   \
    "has them"

/* Keys of config.json of this program's own: sizes of the texts, which diffusers knows as sums or not at all. */
#define LG_KEY_TEXT_LENGTHS "_text_lengths"
#define LG_KEY_TEXT_WIDTHS  "_text_widths"
#define LG_KEY_TEXT_POOLED  "_text_pooled"
/* And what diffusers' pipeline of LTX is told. */
#define LG_KEY_FRAMES       "_sample_frames"
#define LG_KEY_CELL_SECONDS "_cell_seconds"
#define LG_KEY_CELL_PIXELS  "_cell_pixels"

/* What diffusers' transformers have alike in a block ("transformer_blocks.3"), under its names: x (B, T, D) through attn1
 * (q, k, v as one product), or through ff (GELU between two linears). */
lg_tensor lg_model_self_attention(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                                  const char *block);
lg_tensor lg_model_feed_forward(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                                const char *block);
/* Such an attention's q, k, v. */
struct lg_layer lg_model_qkv(const struct lg_denoiser_config *c);

extern const struct lg_model lg_dit, lg_pixart, lg_sd3, lg_flux, lg_sd2, lg_sdxl, lg_latte, lg_ltx;

/* sd3.c, for sd3_file.c. */
void lg_sd3_describe(lg_net *n, const struct lg_denoiser_config *c, const struct lg_model_input *in,
                     lg_tensor out);
