/* What lgsup does for those who watch, beside its work: see each member's header. Nothing here decides
 * anything, and nothing that fails here harms the run: the user is told once. */
#pragma once
#include "supervisor/tensorboard.h"

struct lg_supervisor;

typedef struct lg_extras {
    bool opened;
    lg_tensorboard tensorboard; /* [tensorboard] enabled */
} lg_extras;

/* One bounded look; the first one opens what the config asks for. */
void lg_extras_look(struct lg_supervisor *s);
/* The processes are gone. Safe when nothing was opened. */
void lg_extras_close(struct lg_supervisor *s);
