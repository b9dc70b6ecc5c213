/* See denoisers.h. */
#include "config/denoisers.h"
#include "base/check.h"
#include <string.h>

static const struct lg_denoiser_info INFO[] = {
#define LG_DENOISER(constant, ...) {__VA_ARGS__},
#include "config/denoisers.def"
#undef LG_DENOISER
};

static const struct lg_denoiser_text_info TEXT[] = {
#define LG_DENOISER_TEXT(denoiser, name, encoder, states, pooled, padding, optional, length)       \
    {denoiser, name, encoder, states, pooled, padding, optional, length},
#include "config/denoiser_texts.def"
#undef LG_DENOISER_TEXT
};

const struct lg_denoiser_info *lg_denoiser_info(lg_denoiser_kind kind)
{
    LG_ASSERT((size_t)kind < LG_ARRAY_LEN(INFO));
    return &INFO[kind];
}

int lg_denoiser_texts(lg_denoiser_kind kind, const struct lg_denoiser_text_info **ret)
{
    size_t first = 0, end;
    while (first < LG_ARRAY_LEN(TEXT) && TEXT[first].of != kind) first++;
    for (end = first; end < LG_ARRAY_LEN(TEXT) && TEXT[end].of == kind;) end++;
    LG_ASSERT(end - first <= LG_TEXTS_MAX && (end > first) == lg_denoiser_info(kind)->text);
    *ret = &TEXT[first];
    return (int)(end - first);
}

lg_denoiser_kind lg_denoiser_kind_of(const char *name)
{
    int kind = 0;
    while (strcmp(INFO[kind].name, name)) LG_ASSERT(++kind < LG_DENOISER_KINDS);
    return (lg_denoiser_kind)kind;
}
