/* The operations: argument structs and functions, made from kernels/ops.def, where each is described.
 *
 *     lg_linear_forward(stream, &(struct lg_linear_forward_args){.x = x, .w = w, .y = y});
 *
 * Shapes, types and aliasing are checked once (op_check.c; a wrong one is a bug: LG_ASSERT), then the backend
 * is called. Operations never allocate: a backend that needs scratch memory says how much for given
 * arguments, and finds it in the stream (see device.h, dry streams). fp16 and bf16 are accumulated in fp32.
 *
 * Gradients of parameters are added to what is there when .accumulate is set, else overwritten;
 * gradients of activations likewise. Outputs may not overlap inputs except where ops.def says so.
 * Every operation gives the same bits for the same arguments, and a row (sample) of a batch the same
 * bits whatever the other rows hold. Every tensor begins on a multiple of its elements' bytes.
 */
#pragma once
#include "base/philox.h"
#include "kernels/device.h"
#include "kernels/rows8.h"
#include "kernels/tensor.h"

typedef enum lg_act {
    LG_ACT_NONE,
    LG_ACT_SILU,
    LG_ACT_GELU_TANH, /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), T5's gelu_new */
    LG_ACT_RELU,
    LG_ACT_GELU_ERF, /* x Phi(x), Phi the standard normal distribution's: PyTorch's default gelu */
    LG_ACT_QUICK_GELU, /* x sigmoid(1.702 x), OpenAI's CLIP */
    LG_ACT_COUNT,
} lg_act;

enum { LG_COMBINE_MAX = 4, LG_RANKS_MAX = 64, LG_SQUARES_PIECE = 4096 };

#define LG_OP(name, ...)                                                                           \
    struct lg_##name##_args {                                                                      \
        __VA_ARGS__                                                                                \
    };
#define IN(field, ...)            lg_tensor field;
#define OUT(field, ...)           lg_tensor field;
#define INS(field, max, ...)      lg_tensor field[max];
#define OUTS(field, max, ...)     lg_tensor field[max];
#define SCALAR(type, field)       type field;
#define SCALARS(type, field, max) type field[max];
#define SIZE(field, letter)       int field;
#define PART(operation, field)    struct lg_##operation##_args field;
#define SAME(field, other)
#define MAY_BE(field, other)
#include "kernels/ops.def"
#undef LG_OP
#undef IN
#undef OUT
#undef INS
#undef OUTS
#undef SCALAR
#undef SCALARS
#undef SIZE
#undef PART
#undef SAME
#undef MAY_BE

#define LG_OP(name, ...) void lg_##name(lg_stream *stream, const struct lg_##name##_args *args);
#include "kernels/ops.def"
#undef LG_OP
