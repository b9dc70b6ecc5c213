/* schema.def as a table: how the modules of config/ walk over all keys. Internal to config/. */
#pragma once
#include "config/config.h"
#include <stdio.h>

typedef enum lg_key_type {
    LG_KEY_INT,
    LG_KEY_NUM,
    LG_KEY_BOOL,
    LG_KEY_SIDES,
    LG_KEY_STR,
    LG_KEY_PATH,
    LG_KEY_ENUM,
    LG_KEY_LIST,
    LG_KEY_TABLES, /* struct lg_data_sources, of the keys of source.def */
} lg_key_type;

typedef struct lg_key {
    const char *section, *key, *name; /* "trainer", "lr", "trainer.lr" */
    const char *raw_doc;              /* as in schema.def: see lg_key_bits, lg_key_doc */
    lg_key_type type;
    size_t offset; /* of the field in lg_config, or in struct lg_data_source */
    int64_t int_def, int_min, int_max;
    bool has_auto; /* INT: may be "auto", LG_AUTO */
    double num_def, num_min, num_max;
    bool bool_def;
    const char *text_def; /* STR, PATH, ENUM */
    const char *choices;  /* ENUM: "a|b" */
} lg_key;

typedef struct lg_section {
    const char *name, *doc;
} lg_section;

extern const lg_section lg_sections[];
extern const int lg_section_count;

int lg_key_count(void);
const lg_key *lg_key_at(int i);
/* NAME of a key of [text.NAME]; NULL: it is none of them. */
const char *lg_key_encoder(const lg_key *k);
/* Does it say something of this config's run, beyond what it says in every other? Not: keys of encoders that the model does
 * not have, those of [text] where each encoder has a section of its own, text.dropout = 0. */
bool lg_key_applies(const lg_config *c, const lg_key *k);
bool lg_key_bits(const lg_key *k);       /* decides the result */
const char *lg_key_doc(const lg_key *k); /* without the mark */
/* -1 when there is no such key: "trainer.lr". */
int lg_key_find(const char *name);
/* Known names nearest to a wrong one by edit distance; never NULL. For keys the name without its
 * section counts too, so that a key in the wrong section is found. */
const char *lg_key_nearest(const char *name);
const char *lg_section_nearest(const char *name);
bool lg_section_known(const char *name);
/* LiteGen's name -> our key ("" when not in this version), or NULL when it is none of LiteGen's. */
const char *lg_key_from_litegen(const char *name);
/* What training scripts call it, in any section ("trainer.learning_rate") -> our key; NULL: it is no such name. */
const char *lg_key_from_script(const char *name);

/* Key i of a table [[data.source]], NULL behind the last. */
const lg_key *lg_source_key_at(int i);

/* of: the config, or the source whose key it is */
static inline void *lg_key_field(const void *of, const lg_key *k)
{
    return (char *)of + k->offset;
}
struct lg_toml_item;
struct lg_problems;
/* Sets it to what `file` says, checked as if it were written. */
void lg_config_set(lg_config *c, const lg_key *k, const struct lg_toml_item *item, const char *file,
                   struct lg_problems *p);
/* "0 to 10", "at least 1", "eps, v, flow": what a key accepts. */
void lg_key_expected(const lg_key *k, char *ret, size_t bytes);
/* The value as TOML ("0.1", "\"flow\"", "[\"a\"]") into out. */
void lg_key_print(FILE *out, const void *of, const lg_key *k);
/* "pipeline.toml:12: ", "--set: " or "pipeline.toml: " for a default. */
void lg_key_where(const lg_config *c, const char *name, char *ret, size_t bytes);
