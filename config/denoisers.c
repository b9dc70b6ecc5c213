/* See denoisers.h. */
#include "config/denoisers.h"
#include "base/check.h"
#include <string.h>

static const struct lg_denoiser_info INFO[] = {
#define LG_DENOISER(constant, name, labels, text, square) {name, labels, text, square},
#include "config/denoisers.def"
#undef LG_DENOISER
};

const struct lg_denoiser_info *lg_denoiser_info(lg_denoiser_kind kind)
{
    LG_ASSERT((size_t)kind < LG_ARRAY_LEN(INFO));
    return &INFO[kind];
}

lg_denoiser_kind lg_denoiser_kind_of(const char *name)
{
    int kind = 0;
    while (strcmp(INFO[kind].name, name)) LG_ASSERT(++kind < LG_DENOISER_KINDS);
    return (lg_denoiser_kind)kind;
}
