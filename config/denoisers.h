/* What the plan knows of each denoiser. */
#pragma once
#include <stdbool.h>

typedef enum lg_denoiser_kind {
#define LG_DENOISER(constant, ...) constant,
#include "config/denoisers.def"
#undef LG_DENOISER
    LG_DENOISER_KINDS
} lg_denoiser_kind;

struct lg_denoiser_info {
    const char *name; /* model.kind */
    bool labels, text;
    bool is_square; /* reads squares alone: no data.buckets */
};
const struct lg_denoiser_info *lg_denoiser_info(lg_denoiser_kind kind);
/* name: one of model.kind's choices. */
lg_denoiser_kind lg_denoiser_kind_of(const char *name);
