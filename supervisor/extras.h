/* What lgsup does for those who watch, beside its work: see each member's header. Nothing here decides
 * anything, and nothing that fails here harms the run: the user is told once. */
#pragma once
#include "supervisor/preview.h"
#include "supervisor/prometheus.h"
#include "supervisor/tensorboard.h"

struct lg_supervisor;

typedef struct lg_extras {
    bool opened;
    lg_preview preview[LG_PREVIEW_KINDS]; /* [sample] every, [tensorboard] histograms_every */
    lg_tensorboard tensorboard;           /* [tensorboard] enabled */
    lg_prometheus prometheus;             /* [supervisor] prometheus_port */
} lg_extras;

/* What the loop waits for on our behalf; returns how many. */
enum { LG_EXTRAS_FDS_MAX = LG_PROMETHEUS_FDS_MAX };
int lg_extras_poll(const struct lg_supervisor *s, struct pollfd ret[LG_EXTRAS_FDS_MAX]);
/* One bounded look; the first one opens what the config asks for. */
void lg_extras_look(struct lg_supervisor *s);
/* The processes are gone. Safe when nothing was opened. */
void lg_extras_close(struct lg_supervisor *s);
