/* What the plan knows of each denoiser. */
#pragma once
#include <stdbool.h>

typedef enum lg_denoiser_kind {
#define LG_DENOISER(constant, ...) constant,
#include "config/denoisers.def"
#undef LG_DENOISER
    LG_DENOISER_KINDS
} lg_denoiser_kind;

/* A text encoder, by config.json's model_type (stages/nets/text_encoder.h). */
typedef enum lg_text_encoder_kind {
    LG_TEXT_T5,
    LG_TEXT_CLIP,
    LG_TEXT_KINDS /* in a denoiser's table: either */
} lg_text_encoder_kind;

/* What a text encoder can tell of B captions of L tokens. */
typedef enum lg_text_output {
    LG_TEXT_STATES, // (B, L, D): after the final norm
    LG_TEXT_PENULTIMATE, // (B, L, D): what goes into the last layer, no final norm. CLIP: hidden_states[-2]
    LG_TEXT_POOLED, // (B, D): the states of the caption's end. CLIP: pooler_output
    LG_TEXT_EMBEDS, // (B, P): pooled, projected. CLIP with a projection: text_embeds
    LG_TEXT_OUTPUTS /* in a denoiser's table: none */
} lg_text_output;
#define LG_TEXT_BIT(output) (1u << (output))

/* What lies behind a caption's end. */
typedef enum lg_padding {
    LG_PADDING_SEEN,   /* is as good as any token */
    LG_PADDING_MASKED, /* is attended to by nobody */
    LG_PADDING_ENCODED /* the encoder attends to it, the net does not */
} lg_padding;

/* A text that a denoiser wants of each sample: which encoder makes it, and what of that it takes. */
struct lg_denoiser_text_info {
    lg_denoiser_kind of;
    const char *name;             /* [text.NAME] */
    lg_text_encoder_kind encoder; /* LG_TEXT_KINDS: any that has the outputs */
    lg_text_output states;        /* one value for each token; LG_TEXT_OUTPUTS: none is wanted */
    lg_text_output pooled;        /* one value for each caption; LG_TEXT_OUTPUTS: none is wanted */
    lg_padding padding;
    bool is_optional; /* without an encoder its states are zeros; the last of its denoiser's */
    int length;       /* tokens, unless text.length says another number */
};

enum { LG_TEXTS_MAX = 4 };

struct lg_denoiser_info {
    const char *name; /* model.kind */
    bool labels, text;
    bool is_square;   /* reads squares alone: no data.buckets */
    bool is_split;    /* a sequence of tokens, which several ranks may share: parallel.sp */
    bool clips;       /* its latents may have frames: data.frames */
    const char *part; /* what diffusers' pipelines call it: the name of its folder */
};
const struct lg_denoiser_info *lg_denoiser_info(lg_denoiser_kind kind);
/* Its texts, in the order in which window, config and net have them (denoiser_texts.def); the number of them. */
int lg_denoiser_texts(lg_denoiser_kind kind, const struct lg_denoiser_text_info **ret);
/* name: one of model.kind's choices. */
lg_denoiser_kind lg_denoiser_kind_of(const char *name);
