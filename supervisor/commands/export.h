/* `lgsup export RUN|CHECKPOINT -o DIR`: a whole pipeline in diffusers layout. All parts are those of the config's `pipeline`,
 * as hard links where that is possible, else copies; the transformer, or U-Net, is the checkpoint's. Of an adapter with --merge, in a run
 * without `pipeline`: its folder alone. With --format kohya: the adapter alone, one file in that layout. */
#pragma once
#include "base/check.h"

struct lg_export_args {
    const char *from;    /* a run directory (its newest checkpoint) or a checkpoint */
    const char *out;     /* must not exist; is there complete or not at all */
    const char *weights; /* "ema" or "model" */
    const char *format;  /* NULL, or "kohya": of an adapter; `out` is a file */
    bool merge;          /* of an adapter: added to the model that it adapts (lg-merge) */
};
int lg_export(const struct lg_export_args *args);
