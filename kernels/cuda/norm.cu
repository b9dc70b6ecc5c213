/* LayerNorm with modulation, gated residual. (rms_norm.cu: RMSNorm; layer_norm.cu: LayerNorm with affine.)
 *
 * Rows (B T, D): one warp per row; each lane takes packs lane, lane + 32, ... The row is read three
 * times, from L1 after the first: mean, variance about it, result. Statistics are fp32.
 * 16-bit rows that norm_forward.cu and norm_backward.cu take are done there, read once.
 * Sums over T (dshift, dscale, dgate): a block takes 32 packs of columns of a piece of a sample's rows; 8 warps take
 * every eighth row; the 8 partial sums are added in order, and behind that those of the pieces. */
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/packs.cuh"

enum { WARPS = 8, THREADS = WARP * WARPS };

template <typename T, int N>
__global__ void norm_forward_kernel(const T *x, const T *shift, const T *scale, int64_t stride,
                                    T *y, float *mean, float *rstd, float eps, bool rms,
                                    int64_t rows, int64_t tokens, int64_t D)
{
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    int first = threadIdx.x % WARP * N;
    const T *in = x + row * D;
    float v[N], sum = 0, squares = 0;
    for (int64_t i = first; i < D; i += WARP * N) {
        load<T, N>(in + i, v);
#pragma unroll
        for (int e = 0; e < N; e++) sum += v[e];
    }
    float average = rms ? 0 : warp_sum(sum) / (float)D;
    for (int64_t i = first; i < D; i += WARP * N) {
        load<T, N>(in + i, v);
#pragma unroll
        for (int e = 0; e < N; e++) squares += (v[e] - average) * (v[e] - average);
    }
    float r = 1 / sqrtf(warp_sum(squares) / (float)D + eps);
    int64_t mod = row / tokens * stride;
    for (int64_t i = first; i < D; i += WARP * N) {
        load<T, N>(in + i, v);
#pragma unroll
        for (int e = 0; e < N; e++) v[e] = (v[e] - average) * r;
        if (scale) {
            float sh[N], sc[N];
            load<T, N>(shift + mod + i, sh);
            load<T, N>(scale + mod + i, sc);
#pragma unroll
            for (int e = 0; e < N; e++) v[e] = v[e] * (1 + sc[e]) + sh[e];
        }
        store<T, N>(y + row * D + i, v);
    }
    if (first == 0) {
        mean[row] = average;
        rstd[row] = r;
    }
}
void cuda_norm_modulate_forward(lg_stream *s, const struct lg_norm_modulate_forward_args *a)
{
    int64_t tokens = a->x.dim[1], D = a->x.dim[2], rows = a->x.dim[0] * tokens;
    const void *p[] = {a->x.data, a->y.data, a->shift.data, a->scale.data};
    int64_t stride = a->scale.data ? lg_row_stride(&a->scale, 1) : 0;
    bool fits = rows_fit(a->x.dtype, D, stride, p, 4);
    cudaStream_t stream = lg_cuda_stream_of(s);
    if (cuda_norm_forward_of_rows(stream, NULL, a)) return;
    WITH_TYPE(
        a->x.dtype, T,
        {WITH_PACK(
            fits, T, N,
            (norm_forward_kernel<T, N><<<(unsigned)ceil_div(rows, WARPS), THREADS, 0, stream>>>(
                (const T *)a->x.data, (const T *)a->shift.data, (const T *)a->scale.data, stride,
                (T *)a->y.data, (float *)a->mean.data, (float *)a->rstd.data, (float)a->eps, a->rms,
                rows, tokens, D)))})
    LG_CUDA_LAUNCHED();
}

/* With n = (x - mean) rstd and g = dy (1 + scale): dx = rstd (g - avg(g) - n avg(g n)), of an RMSNorm without avg(g). */
template <typename T, int N>
__global__ void norm_backward_kernel(const T *dy, const T *x, const float *mean, const float *rstd,
                                     const T *scale, int64_t stride, T *dx, bool accumulate,
                                     bool rms, int64_t rows, int64_t tokens, int64_t D)
{
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    int first = threadIdx.x % WARP * N;
    float average = mean[row], r = rstd[row], sum_g = 0, sum_gn = 0, g[N], n[N], sc[N];
    int64_t mod = row / tokens * stride;
#define LOAD_G_N(i)                                                                                \
    load<T, N>(dy + row * D + (i), g);                                                             \
    load<T, N>(x + row * D + (i), n);                                                              \
    if (scale) load<T, N>(scale + mod + (i), sc);                                                  \
    _Pragma("unroll") for (int e = 0; e < N; e++)                                                  \
    {                                                                                              \
        n[e] = (n[e] - average) * r;                                                               \
        if (scale) g[e] *= 1 + sc[e];                                                              \
    }
    for (int64_t i = first; i < D; i += WARP * N) {
        LOAD_G_N(i)
#pragma unroll
        for (int e = 0; e < N; e++) {
            sum_g += g[e];
            sum_gn += g[e] * n[e];
        }
    }
    float avg_g = rms ? 0 : warp_sum(sum_g) / (float)D, avg_gn = warp_sum(sum_gn) / (float)D;
    for (int64_t i = first; i < D; i += WARP * N) {
        LOAD_G_N(i)
        float old[N];
        if (accumulate) load<T, N>(dx + row * D + i, old);
#pragma unroll
        for (int e = 0; e < N; e++) {
            float v = r * (g[e] - avg_g - n[e] * avg_gn);
            g[e] = accumulate ? old[e] + v : v;
        }
        store<T, N>(dx + row * D + i, g);
    }
#undef LOAD_G_N
}

/* Adds the warps' partial sums in order; the first warp stores them. Call with all threads. */
template <typename T, int N> __device__ void store_column_sums(float (&sum)[N], T *out, bool active)
{
    constexpr int AT_ONCE = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
    __shared__ float partial[WARPS][WARP * N + 1];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < N; e++) partial[warp][lane * N + e] = sum[e];
    __syncthreads();
    if (warp > 0 || !active) return;
    for (int w = 1; w < WARPS; w++)
#pragma unroll
        for (int e = 0; e < N; e++) sum[e] += partial[w][lane * N + e];
#pragma unroll
    for (int e = 0; e < N; e += AT_ONCE) {
        float part[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) part[i] = sum[e + i];
        store<T, AT_ONCE>(out + e, part);
    }
}

/* This block's place among the pieces, of a kind. */
__device__ static float *piece_of(float *pieces, int64_t D, int kind)
{
    return pieces + ((blockIdx.y * (int64_t)gridDim.z + blockIdx.z) * SUM_KINDS + kind) * D;
}

/* Samples of a block at once: eight warps have every eighth piece of one, and their sums are added in order. A block of `all` samples
 * goes through them in order and adds up the bias's; else it has its four alone, which are many blocks then. */
enum { PIECE_WARPS = 8, SAMPLES_AT_ONCE = 4, SAMPLES_TO_A_BLOCK = 8 };
template <typename T, typename W>
__global__ void __launch_bounds__(WARP *PIECE_WARPS *SAMPLES_AT_ONCE)
    add_pieces_kernel(const struct token_sums p, bool all)
{
    __shared__ float sums[SAMPLES_AT_ONCE][SUM_KINDS][PIECE_WARPS][WARP];
    __shared__ float biases[SAMPLES_AT_ONCE][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % PIECE_WARPS;
    const int of_block = threadIdx.x / (WARP * PIECE_WARPS);
    const int64_t i = (int64_t)blockIdx.x * WARP + lane, pieces = sum_pieces(p.tokens);
    const int64_t first = (int64_t)blockIdx.y * SAMPLES_AT_ONCE;
    const int64_t last = all ? p.B : min(p.B, first + SAMPLES_AT_ONCE);
    const bool wanted[SUM_KINDS] = {p.dshift != nullptr, p.dscale != nullptr, p.dgate != nullptr,
                                    p.bias_sums != nullptr};
    float bias = 0;
    for (int64_t from = first; from < last; from += SAMPLES_AT_ONCE) {
        const int64_t b = from + of_block;
        const bool there = b < last && i < p.D;
        float sum[SUM_KINDS] = {};
        const float *at = p.pieces + b * pieces * SUM_KINDS * p.D + i;
#pragma unroll 5
        for (int64_t k = warp; there && k < pieces; k += PIECE_WARPS)
#pragma unroll
            for (int kind = 0; kind < SUM_KINDS; kind++)
                if (wanted[kind]) sum[kind] += at[(k * SUM_KINDS + kind) * p.D];
#pragma unroll
        for (int kind = 0; kind < SUM_KINDS; kind++) sums[of_block][kind][warp][lane] = sum[kind];
        __syncthreads();
        if (there && warp < SUM_KINDS && wanted[warp]) {
            float of_kind = 0;
            for (int w = 0; w < PIECE_WARPS; w++) of_kind += sums[of_block][warp][w][lane];
            if (warp == SUM_SHIFT) ((T *)p.dshift)[b * p.mod_stride + i] = from_float<T>(of_kind);
            if (warp == SUM_SCALE) ((T *)p.dscale)[b * p.mod_stride + i] = from_float<T>(of_kind);
            if (warp == SUM_GATE) ((T *)p.dgate)[b * p.gate_stride + i] = from_float<T>(of_kind);
            if (warp == SUM_BIAS) {
                if (p.gate) of_kind *= to_float(((const T *)p.gate)[b * p.gate_stride + i]);
                biases[of_block][lane] = of_kind;
                if (!all) p.bias_sums[b * p.D + i] = of_kind;
            }
        }
        __syncthreads();
        for (int k = 0; wanted[SUM_BIAS] && k < SAMPLES_AT_ONCE && from + k < last; k++)
            bias += biases[k][lane];
    }
    if (!all || !wanted[SUM_BIAS] || threadIdx.x >= WARP || i >= p.D) return;
    W *dbias = (W *)p.dbias.data + i;
    *dbias = from_float<W>(p.accumulate_dbias ? to_float(*dbias) + bias : bias);
}
void cuda_add_token_sums(cudaStream_t stream, lg_dtype type, const struct token_sums *p)
{
    const bool all = p->B <= SAMPLES_TO_A_BLOCK;
    const bool wanted = p->dshift || p->dgate || p->bias_sums;
    if (p->pieces && wanted) {
        const dim3 grid((unsigned)ceil_div(p->D, WARP),
                        all ? 1 : (unsigned)ceil_div(p->B, SAMPLES_AT_ONCE));
        WITH_TYPES(type, p->bias_sums ? p->dbias.dtype : type, T, W,
                   (add_pieces_kernel<T, W>
                    <<<grid, WARP * PIECE_WARPS * SAMPLES_AT_ONCE, 0, stream>>>(*p, all)))
        LG_CUDA_LAUNCHED();
    }
    if (p->bias_sums && !(p->pieces && all))
        cuda_add_partial_sums(stream, p->bias_sums, p->B, p->dbias, p->accumulate_dbias);
}

/* dshift = sum over T of dy, dscale = sum over T of dy n. */
template <typename T, int N>
__global__ void modulation_backward_kernel(const T *dy, const T *x, const float *mean,
                                           const float *rstd, T *dshift, T *dscale, int64_t stride,
                                           int64_t tokens, int64_t D, float *pieces)
{
    int64_t b = blockIdx.y, i = ((int64_t)blockIdx.x * WARP + threadIdx.x % WARP) * N;
    bool active = i < D;
    float shift[N] = {}, scale[N] = {}, g[N], n[N];
    const piece_tokens piece = tokens_of(tokens, blockIdx.z, gridDim.z);
    for (int64_t t = piece.begin + threadIdx.x / WARP; active && t < piece.end; t += WARPS) {
        int64_t row = b * tokens + t;
        float average = mean[row], r = rstd[row];
        load<T, N>(dy + row * D + i, g);
        load<T, N>(x + row * D + i, n);
#pragma unroll
        for (int e = 0; e < N; e++) {
            shift[e] += g[e];
            scale[e] += g[e] * ((n[e] - average) * r);
        }
    }
    if (pieces) {
        store_column_sums<float, N>(shift, piece_of(pieces, D, SUM_SHIFT) + i, active);
        store_column_sums<float, N>(scale, piece_of(pieces, D, SUM_SCALE) + i, active);
        return;
    }
    store_column_sums<T, N>(shift, dshift + b * stride + i, active);
    store_column_sums<T, N>(scale, dscale + b * stride + i, active);
}
/* First the bias's sums of the samples, then those of the pieces; or afterwards, where each row is read more than once, those of
 * dx's columns. */
size_t cuda_norm_modulate_backward_scratch(const struct lg_norm_modulate_backward_args *a)
{
    const int64_t B = a->x.dim[0], tokens = a->x.dim[1], D = a->x.dim[2];
    const bool biased = a->dbias.rank != 0;
    const size_t sums = (size_t)(sum_floats(B, tokens, D) + biased * B * D) * sizeof(float);
    return biased ? LG_MAX(sums, cuda_column_sums_scratch(B * tokens, D)) : sums;
}
void cuda_norm_modulate_backward(lg_stream *s, const struct lg_norm_modulate_backward_args *a)
{
    int64_t B = a->x.dim[0], tokens = a->x.dim[1], D = a->x.dim[2], rows = B * tokens;
    const void *p[] = {a->x.data,     a->dy.data,     a->dx.data,
                       a->scale.data, a->dshift.data, a->dscale.data};
    int64_t stride = a->scale.data ? lg_row_stride(&a->scale, 1) : 0;
    bool fits = rows_fit(a->x.dtype, D, stride, p, 6);
    cudaStream_t stream = lg_cuda_stream_of(s);
    float *bias_sums = a->dbias.data ? (float *)s->scratch : NULL, *pieces = NULL;
    if (sum_pieces(tokens) > 1) pieces = (float *)s->scratch + (bias_sums ? B * D : 0);
    if (cuda_norm_backward_of_rows(s, a, NULL, pieces, bias_sums)) return;
    WITH_TYPE(
        a->x.dtype, T, {WITH_PACK(fits, T, N, {
            norm_backward_kernel<T, N><<<(unsigned)ceil_div(rows, WARPS), THREADS, 0, stream>>>(
                (const T *)a->dy.data, (const T *)a->x.data, (const float *)a->mean.data,
                (const float *)a->rstd.data, (const T *)a->scale.data, stride, (T *)a->dx.data,
                a->accumulate, a->rms, rows, tokens, D);
            dim3 grid((unsigned)ceil_div(D, WARP * N), (unsigned)B, (unsigned)sum_pieces(tokens));
            if (a->dscale.data)
                modulation_backward_kernel<T, N><<<grid, THREADS, 0, stream>>>(
                    (const T *)a->dy.data, (const T *)a->x.data, (const float *)a->mean.data,
                    (const float *)a->rstd.data, (T *)a->dshift.data, (T *)a->dscale.data, stride,
                    tokens, D, pieces);
        })})
    LG_CUDA_LAUNCHED();
    struct token_sums sums = {pieces, B, tokens, D, stride};
    sums.dshift = a->dshift.data, sums.dscale = a->dscale.data;
    cuda_add_token_sums(stream, a->x.dtype, &sums);
    if (bias_sums)
        cuda_column_sums(stream, lg_t2(a->dx.data, a->dx.dtype, rows, D), D, a->dbias,
                         a->accumulate_dbias, s->scratch);
}

/* ---- gated residual ---- */

template <typename T, int N>
__global__ void gate_forward_kernel(const T *x, const T *y, const T *gate, int64_t stride, T *out,
                                    int64_t packs, int64_t tokens, int64_t D)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (i >= packs) return;
    float u[N], v[N], g[N];
    load<T, N>(x + i * N, u);
    load<T, N>(y + i * N, v);
    if (gate) load<T, N>(gate + i * N / (tokens * D) * stride + i * N % D, g);
#pragma unroll
    for (int e = 0; e < N; e++) u[e] += gate ? g[e] * v[e] : v[e];
    store<T, N>(out + i * N, u);
}
void cuda_gate_residual_forward(lg_stream *s, const struct lg_gate_residual_forward_args *a)
{
    int64_t tokens = a->x.dim[1], D = a->x.dim[2], count = lg_numel(&a->x);
    const void *p[] = {a->x.data, a->y.data, a->out.data, a->gate.data};
    int64_t stride = a->gate.data ? lg_row_stride(&a->gate, 1) : 0;
    bool fits = rows_fit(a->x.dtype, D, stride, p, 4);
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_TYPE(a->x.dtype, T,
              {WITH_PACK(fits, T, N,
                         (gate_forward_kernel<T, N>
                          <<<(unsigned)ceil_div(count / N, THREADS), THREADS, 0, stream>>>(
                              (const T *)a->x.data, (const T *)a->y.data, (const T *)a->gate.data,
                              stride, (T *)a->out.data, count / N, tokens, D)))})
    LG_CUDA_LAUNCHED();
}

/* dy = gate dout, dgate = sum over T of dout y; dbias (B, D) = sum over T of dy. The next row is on the way meanwhile. */
template <typename T, int N>
__global__ void __launch_bounds__(THREADS, 4)
    gate_backward_kernel(const T *dout, const T *y, const T *gate, T *dy, T *dgate, int64_t stride,
                         int64_t tokens, int64_t D, float *dbias, float *pieces)
{
    int64_t b = blockIdx.y, i = ((int64_t)blockIdx.x * WARP + threadIdx.x % WARP) * N;
    bool active = i < D;
    float sum[N] = {}, plain[N] = {}, g[N] = {}, d[N], v[N];
    if (active) load<T, N>(gate + b * stride + i, g);
    const piece_tokens piece = tokens_of(tokens, blockIdx.z, gridDim.z);
    const int64_t first = piece.begin + threadIdx.x / WARP, step = WARPS * D;
    const T *from = dout + (b * tokens + first) * D + i, *from_y = y + (b * tokens + first) * D + i;
    T *to = dy + (b * tokens + first) * D + i;
    pack<T, N> next = {}, next_y = {};
    int rows = active ? (int)((piece.end - first + WARPS - 1) / WARPS) : 0; /* below 1: none */
    if (rows > 0) next = get_pack<T, N>(from);
    if (rows > 0 && y) next_y = get_pack<T, N>(from_y);
    for (; rows > 0; rows--, to += step) {
        const pack<T, N> now = next, now_y = next_y;
        from += step, from_y += step;
        if (rows > 1) next = get_pack<T, N>(from);
        if (rows > 1 && y) next_y = get_pack<T, N>(from_y);
        unpack<T, N>(now, d);
        unpack<T, N>(now_y, v);
#pragma unroll
        for (int e = 0; e < N; e++) {
            sum[e] += d[e] * v[e];
            plain[e] += d[e];
            d[e] *= g[e];
        }
        put<T, N>(to, d);
    }
    if (pieces) {
        if (dgate) store_column_sums<float, N>(sum, piece_of(pieces, D, SUM_GATE) + i, active);
        store_column_sums<float, N>(plain, piece_of(pieces, D, SUM_BIAS) + i, active);
        return;
    }
    if (dgate) store_column_sums<T, N>(sum, dgate + b * stride + i, active);
    if (!dbias) return;
#pragma unroll
    for (int e = 0; e < N; e++) plain[e] *= g[e];
    store_column_sums<float, N>(plain, dbias + b * D + i, active);
}
/* First the bias's sums of the samples, then those of the pieces. */
static int64_t bias_floats(const struct lg_gate_residual_backward_args *a)
{
    return a->dbias.rank ? a->dout.dim[0] * a->dout.dim[2] : 0;
}
size_t cuda_gate_residual_backward_scratch(const struct lg_gate_residual_backward_args *a)
{
    return (size_t)(bias_floats(a) + sum_floats(a->dout.dim[0], a->dout.dim[1], a->dout.dim[2])) *
           sizeof(float);
}
void cuda_gate_residual_backward(lg_stream *s, const struct lg_gate_residual_backward_args *a)
{
    int64_t B = a->dout.dim[0], tokens = a->dout.dim[1], D = a->dout.dim[2];
    const void *p[] = {a->dout.data, a->y.data, a->dy.data, a->gate.data, a->dgate.data};
    int64_t stride = lg_row_stride(&a->gate, 1);
    bool fits = rows_fit(a->dout.dtype, D, stride, p, 5);
    cudaStream_t stream = lg_cuda_stream_of(s);
    float *bias_sums = a->dbias.data ? (float *)s->scratch : nullptr;
    float *pieces = sum_pieces(tokens) > 1 ? (float *)s->scratch + bias_floats(a) : nullptr;
    WITH_TYPE(a->dout.dtype, T, {WITH_PACK(fits, T, N, {
                  dim3 grid((unsigned)ceil_div(D, WARP * N), (unsigned)B,
                            (unsigned)sum_pieces(tokens));
                  gate_backward_kernel<T, N><<<grid, THREADS, 0, stream>>>(
                      (const T *)a->dout.data, (const T *)a->y.data, (const T *)a->gate.data,
                      (T *)a->dy.data, (T *)a->dgate.data, stride, tokens, D, bias_sums, pieces);
              })})
    LG_CUDA_LAUNCHED();
    struct token_sums sums = {pieces, B, tokens, D};
    sums.gate = a->gate.data, sums.gate_stride = stride;
    sums.dgate = a->dgate.data, sums.bias_sums = bias_sums;
    sums.dbias = a->dbias, sums.accumulate_dbias = a->accumulate_dbias;
    cuda_add_token_sums(stream, a->dout.dtype, &sums);
}

/* ---- both ---- */

void cuda_residual_norm_forward(lg_stream *s, const struct lg_residual_norm_forward_args *a)
{
    if (cuda_norm_forward_of_rows(lg_cuda_stream_of(s), &a->residual, &a->norm)) return;
    cuda_gate_residual_forward(s, &a->residual);
    cuda_norm_modulate_forward(s, &a->norm);
}
void cuda_norm_residual_backward(lg_stream *s, const struct lg_norm_residual_backward_args *a)
{
    const struct lg_gate_residual_backward_args *r = &a->residual;
    float *bias_sums = r->dbias.data ? (float *)s->scratch : NULL, *pieces = NULL;
    if (sum_pieces(r->dout.dim[1]) > 1) pieces = (float *)s->scratch + bias_floats(r);
    if (cuda_norm_backward_of_rows(s, &a->norm, r, pieces, bias_sums)) return;
    cuda_norm_modulate_backward(s, &a->norm);
    cuda_gate_residual_backward(s, r);
}
