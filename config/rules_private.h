/* What the files of the rules share: rules.c has the order in which rules are looked at, which is that
 * of the messages, and each rules_*.c the rules of one subject. */
#pragma once
#include "config/config.h"
#include "config/models.h"
#include "config/problems.h"
#include "config/texts.h"

struct lg_rules {
    const lg_config *c;
    struct lg_problems problems;
};

/* A rule is broken. key: where in the file the reader should look. */
void lg_broken(struct lg_rules *r, const char *key, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
bool lg_rules_is_dir(const char *path);
/* Does the model read captions? */
bool lg_rules_has_text(const lg_config *c);
/* "text.t5.gpus": a key of a text encoder's section. */
const char *lg_rules_key_of(const struct lg_text_config *t, const char *key, char ret[48]);

/* Each looks at the rules of a subject.
 * rules_roles.c: devices, GPUs, restarts and memos; then each role's chunk against the window. */
void lg_rules_roles(struct lg_rules *r);
void lg_rules_window(struct lg_rules *r);
/* rules_data.c: what data sets are named; then what is in them against the model, of which
 * lg_rules_model calls one: pictures and clips that go through this VAE, or latents without one. */
void lg_rules_data(struct lg_rules *r);
void lg_rules_geometry(struct lg_rules *r, const struct lg_vae_info *vae);
void lg_rules_latents(struct lg_rules *r);
/* rules_model.c: the model, its text encoders and captions. */
void lg_rules_model(struct lg_rules *r);
/* rules_ranks.c: a batch's shares, parallel, hosts, and changes at a resume. */
void lg_rules_ranks(struct lg_rules *r);
/* rules_training.c: trainer, adapter, frozen weights, objective, memory and previews. */
void lg_rules_training(struct lg_rules *r);
