/* The status of a run: read from its board, whoever lives. After the end, and after a restart of the
 * machine, from DIR/status.json. Its JSON is described by docs/status.schema.json. */
#pragma once
#include "shm/board.h"
#include <cjson/cJSON.h>
#include <stdio.h>

enum { LG_STATUS_FORMAT = 1, LG_STATUS_INSTANCES_MAX = LG_ROWS };

struct lg_status_instance {
    lg_role role;
    int index;
    int pid; /* 0: none */
    /* "setup", "working", "waiting", "done", "starting", "dead", "gone"; "leaving" when it was told
     * to; "standby" while it waits to take over from another instance of the role */
    const char *state;
    uint32_t restarts;
    uint64_t samples;    /* dealt with by this instance */
    int64_t beat_age_ns; /* since its heartbeat; -1: no process, or one without heartbeats */
    char program[LG_CAUSE_BYTES]; /* that was swapped in; "": the one beside lgsup */
};

struct lg_status {
    char job[128];
    const char *state; /* lg_run_state_name; "waiting" for the other hosts, as `cause` says */
    uint64_t step, max_steps;                               /* both 0 while it waits */
    double loss, grad_norm, lr, samples_per_s, data_wait_s; /* of the newest step */
    bool has_vb;                                            /* a variance is learned: */
    double loss_vb;                                         /* of the loss, its variational bound */
    uint64_t voids, skipped;
    char cause[LG_CAUSE_BYTES];
    bool memory_kept;               /* parked, and the next start goes on from `step` in memory */
    uint32_t wanted[LG_ROLE_COUNT]; /* instances that shall run; 0: no such role, or no board */
    char checkpoint[LG_PATH_BYTES]; /* newest complete one, or "" */
    struct lg_status_instance instance[LG_STATUS_INSTANCES_MAX];
    int n_instances;
};

/* "0.5320", or, of a learned variance whose bound is *vb of it, "0.5320 (mse 0.5300, vb 0.0020)". */
enum { LG_LOSS_TEXT_BYTES = 1200 }; /* of any double */
void lg_loss_text(double loss, const double *vb, char ret[LG_LOSS_TEXT_BYTES]);
/* Committed steps: the state that every rank has committed. */
uint64_t lg_status_step(lg_board *b);
/* Is the process that the row names alive? By pid and start time. */
bool lg_status_row_alive(const struct lg_board_row *row);

/* "text.clip_l.0"; returns ret. */
enum { LG_STATUS_NAME_BYTES = 32 };
const char *lg_status_name(const struct lg_status_instance *p, char ret[LG_STATUS_NAME_BYTES]);
/* Of the column with their names: at least `least`, and as wide as the longest. */
int lg_status_columns(const struct lg_status *st, int least);

/* LG_ERR_NOTFOUND when DIR is no run directory. */
int lg_status_read(const char *dir, struct lg_status *ret);
/* DIR/status.json. A full disk is no reason to fail: best effort. */
void lg_status_save(const char *dir, lg_board *b);
/* The JSON of `lgsup status --json`; the caller deletes it. A number that is not finite is null. */
cJSON *lg_status_json(const struct lg_status *st);
/* For people. */
void lg_status_print(const struct lg_status *st, FILE *to);
