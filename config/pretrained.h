/* What a published model says of itself, in diffusers' layout, becomes what a config's unwritten keys hold:
 *
 *   pipeline    DIR/model_index.json: the folders of its parts (model.from, vae.model, text.model, or of several encoders
 *               text.NAME.model), and for the
 *               pipelines it knows text.length and the sampler's steps and guidance;
 *               DIR/scheduler/scheduler_config.json: the objective, its noise schedule, the sampler
 *   model.from  DIR/config.json: the keys of [model]. The nets read the rest of it (stages/nets/denoiser.h)
 *
 * A file is read only if a key that it could fill is unwritten: the saved config of a run, where all are written, needs
 * none of them to be loaded. Internal to config/. */
#pragma once
#include "config/config.h"
#include "config/problems.h"

/* Fills what is not written, and notes in c->chosen where it comes from. */
void lg_pretrained_choose(lg_config *c, struct lg_problems *p);
/* What the keys of [model] say and model.from's config.json says otherwise, each a problem. */
void lg_pretrained_compare(const lg_config *c, struct lg_problems *p);
