/* TOML 1.0 behind a plain C face: a file becomes a flat list of dotted keys with typed values and
 * places, in the order of the file. toml++ does the parsing; no exception leaves this module. */
#pragma once
#include "base/check.h"

typedef enum lg_toml_type {
    LG_TOML_TEXT,
    LG_TOML_INT,
    LG_TOML_NUM,
    LG_TOML_BOOL,
    LG_TOML_LIST,   /* of texts and whole numbers, as texts; an empty array too */
    LG_TOML_TABLE,  /* an entry of its own, before those of its keys */
    LG_TOML_TABLES, /* [[a]], or a = [{..}, {..}]: not empty */
    LG_TOML_OTHER,  /* dates, other arrays: nothing that a pipeline.toml uses */
} lg_toml_type;

typedef struct lg_toml {
    struct lg_toml_item *items;
    int n;
} lg_toml;

struct lg_toml_item {
    char *key; /* "trainer.lr"; a part that holds a dot itself stays in quotes */
    lg_toml_type type;
    char *text;
    int64_t i;
    double d;
    bool b;
    char **list;
    int n_list;
    lg_toml *tables; /* (n_tables) of TABLES: their keys without `key` */
    int n_tables;
    int line, column; /* of the key, from 1 */
};

enum { LG_TOML_BYTES_MAX = 1 << 20 };

/* Errors: LG_ERR_CONFIG "file:line:column: what was expected", LG_ERR_NOTFOUND / LG_ERR_IO for the
 * file itself. Free with lg_toml_free. */
int lg_toml_parse_file(const char *path, lg_toml **ret);
/* One value as it may stand behind "=": the list has one item, key "value". LG_ERR_CONFIG when text
 * is anything else. */
int lg_toml_parse_value(const char *text, lg_toml **ret);
void lg_toml_free(lg_toml **t);
/* "text", "a whole number" ... for messages. */
const char *lg_toml_type_name(lg_toml_type type);
