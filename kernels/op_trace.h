/* A record of the operations that a process runs, one line a call, for comparing what two programs compute.
 * Where the environment has LG_TRACE_OPS=FILE it goes to FILE.<pid>; else nothing is done.
 *
 *     linear_forward act=0 | x f32 8,48 memory.2+0 | w f32 96,48 trainer/0/working+640 | y f32 8,96 memory.2+1536
 *
 * Scalars as name=value (a double with all its digits), tensors with type, dimensions, the rows' stride
 * behind a slash where they have one, and their place: the name of a buffer and the offset in bytes. A buffer is
 * called by the file that is mapped there (a region by its name), else in the order in which device.c has got
 * them. An absent tensor is "-". A file that cannot be written ends the process. */
#pragma once
#include "kernels/backend.h"

void lg_trace_op(lg_op_id op, const void *args);
/* device.c: memory that operations may be given, and its end. */
void lg_trace_memory(const void *at, size_t bytes);
void lg_trace_forget(const void *at);
