/* Where a program's time on the GPU goes, operation by operation, in the run itself: with the clock, the
 * power and the caches that the operations before have left. An event is recorded before every operation
 * (1 to 2 us each); what lies between two of them, the gap before the next launch too, counts for the
 * first. Operations of one name and of the same first two shapes are one row; those of them with an
 * activation, or that halve a map, are another. */
#pragma once
#include "kernels/device.h"

/* From here on every operation on this device is timed, on one stream alone. */
void op_times_start(lg_device *device);
/* Ends it. Waits for the stream, prints a row for each kind of operation, the longest first, per turn of
 * `turns` equal ones, and their sum. */
void op_times_print(lg_stream *stream, int turns);
