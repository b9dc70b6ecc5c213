/* A device that does everything as late as it may: work that is enqueued waits until somebody waits for it. What reads
 * a result too early, or gives memory to another use before a copy has left it, then meets the old bytes, or the new
 * ones, in every run and not only in an unlucky one.
 *
 * Work of a stream is done in order when the stream or a later event of it is waited for, when another stream's work
 * that waits for such an event is done, or when memory is given back. */
#pragma once
#include "kernels/backend.h"

/* Puts itself in front of the functions of d. */
void late_device(lg_device *d);
