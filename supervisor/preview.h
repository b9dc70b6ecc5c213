/* Pictures of [sample] captions, DIR/samples/step<N>.png, drawn by lg-sample from the EMA weights of a
 * published checkpoint: so sample.every is a multiple of checkpoint.every, and nobody who trains waits
 * for a reader.
 *
 * What is to be drawn follows from the files: complete checkpoints whose picture is missing or older.
 * So a preview that was cut off by a death is drawn at the next look or the next start, to the same
 * bytes; one that cannot be drawn is given up after a few attempts until the next start. A checkpoint
 * that checkpoint.keep has removed before its turn has no preview. */
#pragma once
#include "supervisor/child.h"
#include "supervisor/run.h"

struct lg_supervisor;

typedef struct lg_preview {
    struct lg_child child;
    uint64_t step; /* that `child` draws */
    uint64_t past; /* up to this step everything is drawn or given up */
    int attempts;  /* at `step` that failed */
    int64_t next_ns, deadline_ns;
} lg_preview;
#define LG_PREVIEW_NONE ((lg_preview){.child = LG_CHILD_NONE})

/* The least step > past that is to be drawn, with its checkpoint. False: none. */
bool lg_preview_next(const lg_run *r, uint64_t past, uint64_t *ret_step,
                     char ret_checkpoint[LG_PATH_BYTES]);
/* Starts lg-sample, at a lower priority. It ends when this process dies. */
int lg_preview_spawn(const lg_run *r, const char *checkpoint, uint64_t step, struct lg_child *ret);
/* After its end: LG_ERR_FAILED with what it said last, unless exit_code is 0. */
int lg_preview_result(const lg_run *r, int exit_code);

/* Never waits: starts the next one, or looks whether the running one has ended. */
void lg_preview_look(struct lg_supervisor *s);
/* Ends the running one; it is drawn later. */
void lg_preview_stop(lg_preview *p);
