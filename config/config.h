/* A pipeline.toml, read, checked against config/schema.def and completed with defaults. */
#pragma once
#include "base/check.h"
#include "base/fs.h"

enum { LG_LIST_MAX = 256 };
enum { LG_AUTO = -1 }; /* of a whole number that may be "auto" */
/* Sample numbers (steps x global batch) stay far below 2^63. */
#define LG_STEPS_MAX INT64_C(1000000000000)

enum { LG_FRAMES_MAX = 4096 }; /* of a sample */

struct lg_strlist {
    char **v;
    int n;
};

struct lg_sides {
    int64_t height, width;
};

/* A table [[data.source]]. */
struct lg_data_source {
#define LG_PATH(key, def, doc)          char *key;
#define LG_NUM(key, def, min, max, doc) double key;
#define LG_INT(key, def, min, max, doc) int64_t key;
#include "config/source.def"
#undef LG_PATH
#undef LG_NUM
#undef LG_INT
};
enum { LG_DATA_SOURCES_MAX = 64 };
struct lg_data_sources {
    struct lg_data_source *v;
    int n;
};

typedef struct lg_config {
    char *file; /* where it came from, for messages */
    int *lines; /* per key in the schema's order: its line in file, 0: default, -1: --set */
    char *
        *chosen; /* likewise: the file of a published model that says it (pretrained.h), or NULL */
#define LG_SECTION(section, doc)
#define LG_INT(section, key, def, min, max, doc)   int64_t section##_##key;
#define LG_NUM(section, key, def, min, max, doc)   double section##_##key;
#define LG_BOOL(section, key, def, doc)            bool section##_##key;
#define LG_SIDES(section, key, def, min, max, doc) struct lg_sides section##_##key;
#define LG_STR(section, key, def, doc)             char *section##_##key;
#define LG_PATH(section, key, def, doc)            char *section##_##key; /* absolute, or "" */
#define LG_ENUM(section, key, def, choices, doc)   char *section##_##key;
#define LG_LIST(section, key, doc)                 struct lg_strlist section##_##key;
#define LG_TABLES(section, key, doc)               struct lg_data_sources section##_##key;
#define LG_ENCODER(name)
#include "config/schema.def"
#undef LG_ENCODER
    struct { /* texts.h reads them */
#define LG_ENCODER(name) LG_TEXT_KEYS(name)
#include "config/encoders.def"
#undef LG_ENCODER
    } text;
#undef LG_TEXT_KEYS
#undef LG_RESTARTS
#undef LG_SECTION
#undef LG_INT
#undef LG_NUM
#undef LG_BOOL
#undef LG_SIDES
#undef LG_STR
#undef LG_PATH
#undef LG_ENUM
#undef LG_LIST
#undef LG_TABLES
} lg_config;

/* Reads file and applies the overrides ("trainer.max_steps=80", in order; values are TOML, a bare
 * word is taken as text; relative paths in them start at the working directory). Every error names
 * file, line and key; unknown keys name the nearest known one. Collects all schema errors before it
 * fails (the message lists up to 20). Free with lg_config_free. */
int lg_config_load(const char *file, const char *const *overrides, int n_overrides,
                   lg_config **ret);
void lg_config_free(lg_config **c);
/* Rules between keys (micro batches divide the batch, min_snr with flow, window and chunks, existing
 * files ...). Each message names the keys and what to change. */
int lg_config_check(const lg_config *c);
/* The effective config as TOML, every key, absolute paths: loading it again gives the same config.
 * Caller frees. */
char *lg_config_to_toml(const lg_config *c);
/* Number of keys, and key i as a line of TOML, "trainer.lr = 0.1". Caller frees. */
int lg_config_keys(void);
char *lg_config_key_text(const lg_config *c, int i);
/* The weights that a new run begins with: trainer.init_from, else model.from, else "" (from the seed). */
const char *lg_config_begins_with(const lg_config *c);
/* Of several hosts with hosts.shared: all write their checkpoints into one folder there. */
bool lg_config_shares_checkpoints(const lg_config *c);
/* Cells of latents that a data set holds: data.latent_size, or what it stands for. */
struct lg_sides lg_config_latent_size(const lg_config *c);
/* What a run is trained on, for messages: data.path, or "data.source". */
const char *lg_config_data(const lg_config *c);
/* Does memory.offload_optimizer decide bits? It does where it moves work from a GPU to the host. */
bool lg_config_updates_for_gpu(const lg_config *c);
/* May a checkpoint be gone on from with another value, when trainer.resume_changes names the key? */
bool lg_config_may_change(const char *key);
/* Compares the keys that decide bits; when one differs: LG_ERR_MISMATCH naming key, old and new value.
 * Counts (instances) and max_steps may differ, max_steps only grow below lg_config max. except: keys that may
 * differ as well, or NULL; *ret_changed, unless NULL: one of them does. */
int lg_config_compatible(const lg_config *old_config, const lg_config *new_config,
                         const struct lg_strlist *except, bool *ret_changed);
/* The reference page docs/config.md in Markdown, from the schema. Caller frees. */
char *lg_config_markdown(void);
