/* A run as systemd units (systemd/README.md): systemd starts every process and starts it again, lgsup
 * keeps the plan, the membership, the policy and the figures.
 *
 *     PREFIXsup.service       `lgsup start FILE --units PREFIX`
 *     PREFIX-end.service      `lgsup stop --units PREFIX DIR`, when PREFIXsup is stopped
 *     PREFIX-keeper.service   `lg-keeper --store`: memory outlives even the keeper, in the fd store
 *     PREFIX-ROLE@K.service   `lgsup role ROLE K DIR`: takes an incarnation, becomes lg-ROLE
 *     PREFIX.slice            the limits of all of them together
 *
 * lgsup starts no stage then; it looks for them on the board. The templates lie in systemd/ and are
 * part of the program. */
#pragma once
#include "supervisor/run.h"

struct lg_supervisor;
struct lg_instance;

struct lg_units_args {
    const char *file; /* the pipeline.toml */
    const char *const *set;
    int n_set;
    const char *dir;    /* where to; NULL: job.dir/units */
    const char *prefix; /* of the units' names; NULL: "lg" */
};
/* `lgsup units`: checks the config and writes the unit files; says what to do with them. */
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

/* `lgsup role ROLE K DIR`: waits until the run of this runtime directory ($RUNTIME_DIRECTORY) can
 * be joined, takes an incarnation for instance K and becomes its program. Ends with 0 when there has
 * been no lgsup for a minute and nothing to join. Does not return when it has become the program. */
int lg_units_role(const char *role, const char *index, const char *dir);

/* Is SIGTERM half of a `systemctl restart` of our own unit? Else it asks for the end. */
bool lg_units_is_restart(const lg_run *r);
/* What systemd has in mind for the unit PREFIXsup. */
typedef enum {
    LG_UNITS_DOWN,     /* nothing; also where systemd does not answer */
    LG_UNITS_UP,       /* it is started, or will be */
    LG_UNITS_CHANGING, /* it is being stopped, or a job for it waits: see again */
} lg_units_intent;
lg_units_intent lg_units_look_at_lgsup(const lg_run *r);
/* Is the unit PREFIX-end restarted, not stopped? */
bool lg_units_end_comes_back(const lg_run *r);
/* An instance without a process: is there one on the board now? Its death, and its being late for
 * long, are dealt with here as well. */
void lg_units_look(struct lg_supervisor *s, struct lg_instance *i, int64_t now_ns);
/* `lgsup scale` in units. Starts the unit of an instance that is to come; LG_ERR_FAILED with what
 * systemctl says (who is not root needs a polkit rule). It waits until the board wants it. */
int lg_units_start(const lg_run *r, lg_role role, int index);
/* An instance that is to be forgotten: stops its unit, where systemd has started it again meanwhile,
 * and takes over what is left of it in its row. */
void lg_units_forget(struct lg_supervisor *s, struct lg_instance *i);
