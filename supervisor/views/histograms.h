/* What lg-histogram has counted (RUN/histograms/step<N>.json), as a record of an event file. */
#pragma once
#include "supervisor/views/tfevents.h"

/* text: NUL-terminated. Appends one record with a histogram per group, its tag "ema/GROUP", to *ret,
 * whose data is allocated here and freed by the caller. LG_ERR_CORRUPT when it is not what
 * lg-histogram writes. */
int lg_histograms_record(const char *text, double wall_s, uint64_t step, struct lg_tf_buffer *ret);
