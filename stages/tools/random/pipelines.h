/* The pipelines whose shapes are known. */
#pragma once
#include "stages/nets/denoiser.h"
#include <stdbool.h>

enum { LG_RANDOM_CLIPS_MAX = 2 };

/* What all pipelines of one class have in common. */
struct lg_random_family {
    const char *class, *denoiser, *scheduler; /* names of diffusers' classes */
    int t5_length;                            /* tokens of a caption; 0: it has no T5 */
};

struct lg_random_pipeline {
    const char *name;
    const struct lg_random_family *family;
    /* The other parts, by their presets. */
    const char *vae;
    const char *clip[LG_RANDOM_CLIPS_MAX], *t5; /* NULL: it has none */
    struct lg_denoiser_config net;              /* without what follows from the other parts */
};

/* LG_ERR_USAGE: there is none of this name. */
int lg_random_pipeline_find(const char *name, const struct lg_random_pipeline **ret);
bool lg_random_pipeline_is_unet(const struct lg_random_pipeline *p); /* else a transformer */
int lg_random_pipeline_clips(const struct lg_random_pipeline *p);
