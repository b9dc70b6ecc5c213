/* What lgsup does for those who watch, beside its work: see each member's header. Nothing here decides
 * anything, and nothing that fails here harms the run: the user is told once.
 *
 * It reads and writes files of the run directory and serves connections, so it is done by a worker
 * (supervisor/core/view_jobs.h), with a view of the run of its own: DIR/config.toml, DIR/plan.json
 * and DIR/board, as another process would open them. Whatever becomes of it, it holds nothing that the
 * loop needs or frees. */
#pragma once
#include "supervisor/views/news.h"
#include "supervisor/views/preview.h"
#include "supervisor/views/prometheus.h"
#include "supervisor/views/tensorboard.h"

typedef struct lg_extras {
    char dir[LG_PATH_BYTES];
    bool opened;
    lg_run run;                           /* config and plan */
    lg_board *board;                      /* NULL: could not be opened */
    lg_preview preview[LG_PREVIEW_KINDS]; /* [sample] every, [tensorboard] histograms_every */
    lg_tensorboard tensorboard;           /* [tensorboard] enabled */
    lg_prometheus prometheus;             /* [supervisor] prometheus_port */
} lg_extras;

/* Does the config ask for any of it? */
bool lg_extras_are_wanted(const lg_config *c);
/* NULL: no memory. Nothing is opened yet. */
lg_extras *lg_extras_make(const char *run_dir);
/* What to wait for between two looks; returns how many. */
enum { LG_EXTRAS_FDS_MAX = LG_PROMETHEUS_FDS_MAX };
int lg_extras_poll(const lg_extras *x, struct pollfd ret[LG_EXTRAS_FDS_MAX]);
/* One look; the first one opens what the config asks for. It may wait for the disk. */
void lg_extras_look(lg_extras *x, struct lg_news *news);
/* The processes are gone: writes what is left and frees it. NULL is fine. */
void lg_extras_close(lg_extras *x);
