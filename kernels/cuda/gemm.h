/* Matrix products by cuBLASLt. */
#pragma once
#include "kernels/cuda/cuda.h"

/* What the product does beside multiplying. */
enum lg_cuda_epilogue { PLAIN, BIAS, BIAS_GELU, BIAS_GRADIENT };

struct lg_cuda_product {
    struct cuda_any_gemm g; /* .bias is not read here */
    enum lg_cuda_epilogue epilogue;
    void *bias; /* (n) of type g.in; BIAS_GRADIENT: written, (m) of bias_type: sums of a over k */
    void *pre;  /* BIAS_GELU with keep_pre: (m, n), the sum before GELU */
    bool keep_pre;                  /* counts, with pre NULL, when planning */
    lg_dtype bias_type;             /* BIAS_GRADIENT */
    void *workspace;                /* NULL: at the start of the stream's scratch memory */
    bool split_k;                   /* k may be split; the partial sums are added in order */
    int batch;                      /* as many equal products, 0: one; not with an epilogue */
    int64_t next_a, next_b, next_d; /* elements from one product's operand to the next one's */
    bool exact; /* in fp32 where the precision is tf32, as small ones are anyway */
};

int lg_cuda_gemm_open(lg_cuda_device *d, struct lg_cuda_gemm **ret);
void lg_cuda_gemm_close(struct lg_cuda_gemm **g);
size_t lg_cuda_gemm_version(void);
/* False when cuBLASLt does not do it, or, with the last two epilogues, not faster than two launches. */
bool lg_cuda_gemm_plan(lg_cuda_device *d, const struct lg_cuda_product *x, size_t *ret_workspace);
/* The same; else enqueues it. The stream's scratch holds the workspace. */
bool lg_cuda_gemm_run(lg_stream *s, const struct lg_cuda_product *x);
