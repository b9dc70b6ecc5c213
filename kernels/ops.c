/* The operations: check, trace, scratch accounting, dispatch.
 *
 * On a dry stream an operation only raises the scratch need, on a graph's it is recorded; else the stream must have enough, and the backend
 * is called, which trusts what was checked here.
 *
 * An operation is a bounded piece of work: a heartbeat follows it (base/heartbeat.h), on a dry stream too,
 * since a backend may choose its algorithm there. */
#include "base/check.h"
#include "base/heartbeat.h"
#include "kernels/op_check.h"
#include "kernels/op_table.h"
#include "kernels/op_trace.h"

/* True when the operation is to run now. */
static bool is_ready(lg_stream *s, lg_op_id op, const void *args)
{
    lg_op_check(s, op, args);
    if (s->record) {
        s->record(s, op, args);
        return false;
    }
    size_t need = s->device->scratch_bytes(s->device, op, args);
    if (s->dry) {
        if (need > s->scratch_need) s->scratch_need = need;
        return false;
    }
    LG_ASSERT(need <= s->scratch_bytes);
    lg_trace_op(op, args);
    return true;
}

#define LG_OP(name, ...)                                                                           \
    void lg_##name(lg_stream *s, const struct lg_##name##_args *a)                                 \
    {                                                                                              \
        if (is_ready(s, LG_OP_##name, a)) s->device->ops->name(s, a);                              \
        lg_heartbeat();                                                                            \
    }
#include "kernels/ops.def"
#undef LG_OP

void lg_op_call(lg_stream *s, lg_op_id op, const void *args)
{
    switch (op) {
#define LG_OP(name, ...)                                                                           \
    case LG_OP_##name:                                                                             \
        lg_##name(s, args);                                                                        \
        return;
#include "kernels/ops.def"
#undef LG_OP
    case LG_OP_COUNT:
        break;
    }
    LG_ASSERT(!"an operation");
}
