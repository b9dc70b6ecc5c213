/* The text encoders of a run: what the config says of each.
 *
 * A model with one text takes it from [text]; what is written in [text.NAME] with its name means the same. A model with
 * several has a section [text.NAME] for each, and what is not written there is as in [text] (length: the model's own).
 * lg_texts_settle brings this about when a config is loaded; from then on each encoder's keys are whole. */
#pragma once
#include "config/config.h"
#include "config/denoisers.h"
#include "config/plan.h"
#include "config/problems.h"

struct lg_text_config {
    lg_role role;
    const char *section; /* "text.t5", of a model's only one "text" */
    /* its keys; see schema.def */
    const char *model, *memo, *storage, *gpus;
    int64_t instances, shards, length, chunk, threads, restarts_max, restart_window_s;
    double dropout;
    const struct lg_denoiser_text_info *info; /* NULL from lg_text_keys */
};
/* Of the model, in its table's order; the number of those that are encoded. One that may go without (denoisers.h), and of which
 * no model is named, stands behind them: of it the length counts. */
int lg_config_texts(const lg_config *c, struct lg_text_config ret[LG_TEXTS_MAX]);
/* Of a role that is one of a text encoder, whether the model has it or not. */
struct lg_text_config lg_text_keys(const lg_config *c, lg_role role);

/* "clip_l, t5": the names of the model's texts; "none". */
void lg_texts_names(const lg_config *c, char *ret, size_t bytes);
/* See above. A section that the model has no use for is a problem, and so is one that says more than the length of a text for
 * which no model is named, where it may go without. Internal to config/. */
void lg_texts_settle(lg_config *c, struct lg_problems *p);
