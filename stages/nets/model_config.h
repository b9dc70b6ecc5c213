/* Reading a model's config.json: each key with its range, errors that name file, key and value. */
#pragma once
#include "base/check.h"
#include <cjson/cJSON.h>

typedef struct lg_model_config {
    char *path;
    cJSON *root;
} lg_model_config;

/* Zero it before; close it after, also after an error. */
int lg_model_config_open(const char *path, lg_model_config *ret);
void lg_model_config_close(lg_model_config *c);
/* Opens it, has it parsed, and closes it. */
int lg_model_config_read(const char *path, int (*parse)(const lg_model_config *c, void *ret),
                         void *ret);

/* An absent key or null gives the fallback; a negative integer fallback means "required". */
int lg_model_config_int(const lg_model_config *c, const char *key, int min, int max, int fallback,
                        int *ret);
int lg_model_config_double(const lg_model_config *c, const char *key, double fallback, double *ret);
int lg_model_config_bool(const lg_model_config *c, const char *key, bool fallback, bool *ret);
/* NULL fallback: required. *ret points into the config. */
int lg_model_config_string(const lg_model_config *c, const char *key, const char *fallback,
                           const char **ret);
/* The key must be absent, null, or this string. `kind` says what this program reads. */
int lg_model_config_expect(const lg_model_config *c, const char *key, const char *value,
                           const char *kind);
/* Says that the key's value cannot be used, and why. */
int lg_model_config_refuse(const lg_model_config *c, const char *key, const char *why);
/* A non-empty list of integers in [min, max]; at most room. */
int lg_model_config_ints(const lg_model_config *c, const char *key, int min, int max, int room,
                         int *ret, int *ret_count);
