/* What a call must keep to: the rows of ops.def, and what a table cannot say. A call that does not is a bug of
 * the caller: LG_ASSERT, with the operation, the operand and what is wrong with it. */
#pragma once
#include "kernels/backend.h"

void lg_op_check(const lg_stream *s, lg_op_id op, const void *args);
