/* `lgsup units`: writes the unit files of a run (supervisor/launch/systemd.h). The templates lie in
 * systemd/ and are part of the program. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

struct lg_units_args {
    const char *file; /* the pipeline.toml */
    const char *const *set;
    int n_set;
    const char *dir;    /* where to; NULL: job.dir/units */
    const char *prefix; /* of the units' names; NULL: "lg" */
};
/* Checks the config and writes the unit files; says what to do with them. */
int lg_units_write(const struct lg_units_args *args);
/* One unit's text, every @KEY@ of the template replaced. Caller
 * frees *ret_text. */
struct lg_units_value {
    const char *key, *text;
};
int lg_units_fill(const char *template_text, const struct lg_units_value *values, int n,
                  char **ret_text);
/* A word of a command line, or a path of a setting, as a unit file writes it: quoted, % (and in
 * commands $) doubled. LG_ERR_CONFIG when it cannot stand there (a control character). */
int lg_units_quote(const char *word, bool command, char *ret, size_t bytes);
/* 1 to 32 of a-z, 0-9 and _, beginning with a letter. */
bool lg_units_is_prefix(const char *prefix);
