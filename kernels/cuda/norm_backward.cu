/* Backward of the modulated LayerNorm for 16-bit rows of at most WIDE_ROW_MAX elements, also with that of the
 * gated residual before it; each row is read once (norm.cu has the general ones).
 *
 * Per row n = (x - mean) rstd, g = dy (1 + scale): dx (+)= rstd (g - avg(g) - n avg(g n)), of an RMSNorm without avg(g), and behind it
 * below = gate dx. Per sample dshift = sum over T of dy, dscale of dy n, dgate of dx y, and dbias of below; without the residual
 * dbias is that of dx.
 *
 * A row is a team's: one warp, or for rows wider than ROW_MAX two or four, that add up what each has of a row's sums. A block
 * owns a sample's rows that lie as far apart as it has blocks (sum_pieces()), so that blocks that run side by side read what lies
 * side by side; its teams have every eighth (fourth, second) of them. A lane keeps the sums of its columns in
 * registers over all its rows; at the end the teams' sums are added in order, and behind that those of a sample's blocks. Rows
 * come through shared memory, one ahead; a lane copies just what it will read itself, so no team waits for another. What no lane copies
 * stays 0: packs behind the row's end, dx where nothing is added to it, and y where dgate is not wanted.
 *
 * Instructions are what this kernel is short of (8 warps a multiprocessor, since the sums take 160
 * registers): elements are converted in pairs, and n is never formed in the second pass.
 *
 * Where nobody wants the sums, as when an adapter is trained and the modulation is frozen, a block owns fewer rows.
 *
 * Bytes when accumulating: 4 B T D elements, with the residual 6: 0.91 GB at B = 256, T = 256, D = 1152. */
#include "kernels/cuda/norm.cuh"

enum { WARPS = 8, THREADS = WARP * WARPS, STAGES = 2, TOKENS_MIN = 64 };
/* Blocks of a sample. */
template <bool SUMS> static int blocks_of(int tokens)
{
    return SUMS ? sum_pieces(tokens) : (int)ceil_div(tokens, 16);
}

template <typename T> struct rows_args {
    const T *dy, *x, *scale, *y, *gate;
    const float *mean, *rstd;
    T *dx, *dshift, *dscale, *below, *dgate;
    float *pieces;    // (B, blocks of a sample, SUM_KINDS, D), or NULL: a sample is one block
    float *bias_sums; // (B, D), or NULL
    int64_t mod_stride, gate_stride;
    int tokens, D;
    float inverse_D;
    bool accumulate, rms;
};

/* What comes behind the norm: nothing, the sum of dx over the rows, or the residual with its sums. */
enum behind { ALONE, BIAS, RESIDUAL };

/* Who does a row: LANES, of which each has packs l, l + LANES ... of it. */
template <int WARPS_IN_IT, int PACKS_OF_A_LANE> struct team {
    static constexpr int SIZE = WARPS_IN_IT, PACKS = PACKS_OF_A_LANE, LANES = SIZE * WARP;
    static constexpr int TEAMS = WARPS / SIZE, STEP = LANES * ROW_PACK;
    static constexpr int WIDE = PACKS * STEP, SUMS = TEAMS * WIDE; /* floats */
    static constexpr int PACK_BYTES = LANES * 16, ROW = PACKS * PACK_BYTES;
};
/* What lies in shared memory, in bytes: scale and gate (ROW each), then the teams' rings of STAGES
 * times the rows DY, X, DX and Y, then what warps tell their team. Afterwards, in the rings' place, the teams' sums, two
 * kinds at a time. */
enum { DY, X, DX, Y };
template <typename G, behind THEN> struct layout {
    static constexpr int KINDS = THEN == RESIDUAL ? 4 : 3, STAGE = KINDS * G::ROW;
    static constexpr int RINGS = 2 * G::ROW, RING = STAGES * STAGE;
    static constexpr int TOLD = RINGS + G::TEAMS * RING;
    static constexpr int BYTES = TOLD + (G::SIZE > 1 ? 2 * WARPS * (int)sizeof(float2) : 0);
    static_assert(2 * G::SUMS * (int)sizeof(float) <= G::TEAMS * RING, "the sums fit");
};

/* Packs of row t to `to`, for this lane; `last`: it has one of the last. */
template <typename G, behind THEN, typename T>
static __device__ __forceinline__ void fetch(const T *const (&from)[4], int64_t at, uint32_t to,
                                             bool accumulate, bool with_y, bool last)
{
#pragma unroll
    for (int w = 0; w < layout<G, THEN>::KINDS; w++) {
        if (w == DX && !accumulate || w == Y && !with_y) continue;
#pragma unroll
        for (int j = 0; j < G::PACKS; j++)
            if (j + 1 < G::PACKS || last)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + w * G::ROW +
                                                                               j * G::PACK_BYTES),
                             "l"(from[w] + at + j * G::STEP)
                             : "memory");
    }
}
/* volatile: what was read for the first pass would fill the registers until the second. */
static __device__ __forceinline__ quad get(uint32_t at)
{
    quad q;
    asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3])
                 : "r"(at));
    return q;
}

/* This lane's sums of its columns. */
template <typename G> struct column_sums {
    float first[G::PACKS][ROW_PACK], second[G::PACKS][ROW_PACK];
};
/* All lanes' to shared memory: (TEAMS, WIDE) of the first kind, then of the second. */
template <typename G>
static __device__ __forceinline__ void put_sums(float *sums, const column_sums<G> &s)
{
    int lane = threadIdx.x % G::LANES, team = threadIdx.x / G::LANES;
#pragma unroll
    for (int j = 0; j < G::PACKS; j++)
#pragma unroll
        for (int e = 0; e < ROW_PACK; e += 4) {
            const float *u = &s.first[j][e], *v = &s.second[j][e];
            float *to = sums + team * G::WIDE + (lane + G::LANES * j) * ROW_PACK + e;
            *(float4 *)to = make_float4(u[0], u[1], u[2], u[3]);
            *(float4 *)(to + G::SUMS) = make_float4(v[0], v[1], v[2], v[3]);
        }
}
/* Four columns of all teams, in order. */
template <typename G> static __device__ __forceinline__ float4 add_teams(const float *sums, int i)
{
    float4 sum = {};
    for (int w = 0; w < G::TEAMS; w++) {
        float4 v = *(const float4 *)(sums + w * G::WIDE + i);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
}
template <typename T> static __device__ __forceinline__ void store_four(T *to, float4 v)
{
    *(uint2 *)to = make_uint2(from_two<T>(v.x, v.y), from_two<T>(v.z, v.w));
}

/* A row in the ring, and the sample's scale and gate: addresses in shared memory of this lane's packs. */
struct row_in_ring {
    uint32_t row, scales, gates;
};

/* The sums of a team's warps, added in order, of its row number k. Places alternate, so that one barrier is enough: a place is
 * written again behind the barrier of the next row, to which all come when they have read it. */
template <typename G>
static __device__ __forceinline__ float2 team_sum(float2 v, float2 *told, int k)
{
    v = make_float2(warp_sum(v.x), warp_sum(v.y));
    if (G::SIZE == 1) return v;
    const int team = threadIdx.x / G::LANES, warp = threadIdx.x / WARP;
    told += k % 2 * WARPS;
    if (threadIdx.x % WARP == 0) told[warp] = v;
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(G::LANES) : "memory");
    v = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < G::SIZE; w++)
        v.x += told[team * G::SIZE + w].x, v.y += told[team * G::SIZE + w].y;
    return v;
}

/* Sums of g and of g n over this lane's elements, with n = x r + c; to the columns' sums dy and dy n. */
template <typename T, typename G, bool SUMS>
static __device__ __forceinline__ float2 first_pass(const row_in_ring &in, float r, float c,
                                                    column_sums<G> &sums)
{
    float sum_g = 0, sum_gn = 0;
#pragma unroll
    for (int j = 0; j < G::PACKS; j++) {
        int at = j * G::PACK_BYTES;
        quad dy = get(in.row + DY * G::ROW + at), x = get(in.row + X * G::ROW + at);
        quad scale = get(in.scales + at);
#pragma unroll
        for (int e = 0; e < ROW_PACK; e += 2) {
            float2 d = two<T>(dy.v[e / 2]), n = two<T>(x.v[e / 2]), s = two<T>(scale.v[e / 2]);
            n.x = n.x * r + c, n.y = n.y * r + c;
            if (SUMS) {
                sums.first[j][e] += d.x, sums.first[j][e + 1] += d.y;
                sums.second[j][e] += d.x * n.x, sums.second[j][e + 1] += d.y * n.y;
            }
            d.x = d.x * s.x + d.x, d.y = d.y * s.y + d.y;
            sum_g += d.x, sum_gn += d.x * n.x;
            sum_g += d.y, sum_gn += d.y * n.y;
        }
    }
    return make_float2(sum_g, sum_gn);
}

/* dx (+)= g r + x slope + offset, and the residual's part of it; `at`: the lane's place in the tensors. */
struct line {
    float r, slope, offset;
};
template <typename T, typename G, behind THEN, bool SUMS>
static __device__ __forceinline__ void second_pass(const rows_args<T> &a, const row_in_ring &in,
                                                   const line &l, int64_t at, bool last,
                                                   column_sums<G> &sums)
{
    constexpr int ROW = G::ROW;
#pragma unroll
    for (int j = 0; j < G::PACKS; j++) {
        int p = j * G::PACK_BYTES;
        quad dy = get(in.row + DY * ROW + p), x = get(in.row + X * ROW + p);
        quad scale = get(in.scales + p), old = get(in.row + DX * ROW + p), y = {}, gate = {};
        if (THEN == RESIDUAL) y = get(in.row + Y * ROW + p), gate = get(in.gates + p);
#pragma unroll
        for (int e = 0; e < ROW_PACK; e += 2) {
            float2 d = two<T>(dy.v[e / 2]), n = two<T>(x.v[e / 2]), s = two<T>(scale.v[e / 2]);
            float2 o = two<T>(old.v[e / 2]);
            d.x = d.x * s.x + d.x, d.y = d.y * s.y + d.y;
            n.x = n.x * l.slope + l.offset, n.y = n.y * l.slope + l.offset;
            dy.v[e / 2] = from_two<T>(d.x * l.r + n.x + o.x, d.y * l.r + n.y + o.y);
            if (THEN == ALONE) continue;
            d = two<T>(dy.v[e / 2]);
            if (SUMS) sums.second[j][e] += d.x, sums.second[j][e + 1] += d.y;
            if (THEN == BIAS) continue;
            float2 w = two<T>(y.v[e / 2]), g = two<T>(gate.v[e / 2]);
            if (SUMS) sums.first[j][e] += d.x * w.x, sums.first[j][e + 1] += d.y * w.y;
            y.v[e / 2] = from_two<T>(d.x * g.x, d.y * g.y);
        }
        if (j + 1 == G::PACKS && !last) break;
        *(quad *)(a.dx + at + j * G::STEP) = dy;
        if (THEN == RESIDUAL) *(quad *)(a.below + at + j * G::STEP) = y;
    }
}

/* The teams' sums, added in order, to this block's place among the pieces. */
template <typename G>
static __device__ __forceinline__ void store_piece(float *to, const float *sums, int D)
{
    for (int i = threadIdx.x * 4; i < D; i += THREADS * 4) {
        *(float4 *)(to + i) = add_teams<G>(sums, i);
        *(float4 *)(to + D + i) = add_teams<G>(sums + G::SUMS, i);
    }
}

/* The teams' sums, added in order, to dshift and dscale; to dgate and, with the gate where there is one, to dbias' part. */
template <typename T, typename G, behind THEN>
static __device__ __forceinline__ void store_sums(const rows_args<T> &a, char *shared,
                                                  const column_sums<G> &norm,
                                                  const column_sums<G> &residual)
{
    typedef layout<G, THEN> L;
    int64_t b = blockIdx.y;
    float *sums = (float *)(shared + L::RINGS);
    __syncthreads();
    put_sums<G>(sums, norm);
    __syncthreads();
    if (a.pieces) {
        float *piece = a.pieces + (b * gridDim.x + blockIdx.x) * SUM_KINDS * a.D;
        store_piece<G>(piece, sums, a.D);
        if (THEN == ALONE) return;
        __syncthreads();
        put_sums<G>(sums, residual);
        __syncthreads();
        return store_piece<G>(piece + SUM_GATE * a.D, sums, a.D);
    }
    for (int i = threadIdx.x * 4; a.dscale && i < a.D; i += THREADS * 4) {
        store_four<T>(a.dshift + b * a.mod_stride + i, add_teams<G>(sums, i));
        store_four<T>(a.dscale + b * a.mod_stride + i, add_teams<G>(sums + G::SUMS, i));
    }
    if (THEN == ALONE) return;
    __syncthreads();
    put_sums<G>(sums, residual);
    __syncthreads();
    for (int i = threadIdx.x * 4; i < a.D; i += THREADS * 4) {
        if (a.dgate) store_four<T>(a.dgate + b * a.gate_stride + i, add_teams<G>(sums, i));
        if (!a.bias_sums) continue;
        float4 sum = add_teams<G>(sums + G::SUMS, i);
        if (THEN == RESIDUAL) {
            uint2 gate = *(const uint2 *)((const T *)(shared + G::ROW) + i);
            float2 low = two<T>(gate.x), high = two<T>(gate.y);
            sum = make_float4(sum.x * low.x, sum.y * low.y, sum.z * high.x, sum.w * high.y);
        }
        *(float4 *)(a.bias_sums + b * a.D + i) = sum;
    }
}

template <typename T, typename G, behind THEN, bool SUMS>
static __global__ void __launch_bounds__(THREADS, 1) rows_kernel(const rows_args<T> a)
{
    typedef layout<G, THEN> L;
    extern __shared__ __align__(128) char shared[];
    int lane = threadIdx.x % G::LANES, team = threadIdx.x / G::LANES, place = threadIdx.x % WARP;
    int64_t b = blockIdx.y, base = b * a.tokens * a.D + lane * ROW_PACK;
    const int apart = (int)gridDim.x, first = (int)blockIdx.x + team * apart;
    const bool last = (lane + G::LANES * (G::PACKS - 1)) * ROW_PACK < a.D;
    const T *const from[4] = {a.dy + base, a.x + base, a.dx + base, a.y ? a.y + base : nullptr};
    for (int i = threadIdx.x; i < L::BYTES / 16; i += THREADS) ((quad *)shared)[i] = quad{};
    __syncthreads();
    uint32_t scales = (uint32_t)__cvta_generic_to_shared(shared) + lane * 16;
    uint32_t ring = scales + L::RINGS + team * L::RING;
    if (first < a.tokens) fetch<G, THEN>(from, (int64_t)first * a.D, ring, a.accumulate, a.y, last);
    asm volatile("cp.async.commit_group;" ::: "memory");
    for (int i = threadIdx.x; i * ROW_PACK < a.D; i += THREADS) {
        const T *scale = a.scale + b * a.mod_stride, *gate = a.gate + b * a.gate_stride;
        ((quad *)shared)[i] = *(const quad *)(scale + i * ROW_PACK);
        if (THEN == RESIDUAL) ((quad *)(shared + G::ROW))[i] = *(const quad *)(gate + i * ROW_PACK);
    }
    __syncthreads();
    column_sums<G> norm = {}, residual = {};
    float mean = 0, rstd = 0;
    for (int t = first, k = 0; t < a.tokens; t += G::TEAMS * apart, k++) {
        uint32_t row = ring + k % STAGES * L::STAGE, next = ring + (k + 1) % STAGES * L::STAGE;
        if (t + G::TEAMS * apart < a.tokens)
            fetch<G, THEN>(from, (int64_t)(t + G::TEAMS * apart) * a.D, next, a.accumulate, a.y,
                           last);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const int other = t + place * G::TEAMS * apart;
        if (k % WARP == 0 && other < a.tokens) { /* of this team's next 32 rows */
            mean = a.mean[b * a.tokens + other];
            rstd = a.rstd[b * a.tokens + other];
        }
        float r = __shfl_sync(0xffffffff, rstd, k % WARP);
        float c = -r * __shfl_sync(0xffffffff, mean, k % WARP);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        row_in_ring in = {row, scales, scales + G::ROW};
        float2 sum =
            team_sum<G>(first_pass<T, G, SUMS>(in, r, c, norm), (float2 *)(shared + L::TOLD), k);
        float avg_g = a.rms ? 0 : sum.x * a.inverse_D, avg_gn = sum.y * a.inverse_D;
        /* r (g - avg(g) - n avg(g n)) */
        line l = {r, -r * r * avg_gn, -r * (avg_g + c * avg_gn)};
        second_pass<T, G, THEN, SUMS>(a, in, l, base + (int64_t)t * a.D, last, residual);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    if (SUMS) store_sums<T, G, THEN>(a, shared, norm, residual);
}

template <typename T, typename G, behind THEN, bool SUMS>
static void launch(cudaStream_t stream, int64_t B, const rows_args<T> &r)
{
    typedef layout<G, THEN> L;
    LG_CUDA(cudaFuncSetAttribute(rows_kernel<T, G, THEN, SUMS>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, L::BYTES));
    dim3 grid((unsigned)blocks_of<SUMS>(r.tokens), (unsigned)B);
    rows_kernel<T, G, THEN, SUMS><<<grid, THREADS, L::BYTES, stream>>>(r);
    LG_CUDA_LAUNCHED();
}

/* False: a block of the GPU may not have so much shared memory. */
template <typename T, typename G>
static bool run(lg_stream *s, const struct lg_norm_modulate_backward_args *a,
                const struct lg_gate_residual_backward_args *then, float *pieces, float *bias_sums)
{
    const int64_t B = a->x.dim[0];
    size_t shared = then ? layout<G, RESIDUAL>::BYTES : layout<G, BIAS>::BYTES;
    cudaStream_t stream = lg_cuda_stream_of(s);
    if (shared > lg_cuda_device_of(s)->shared_max) return false;
    rows_args<T> r = {};
    r.dy = (const T *)a->dy.data;
    r.x = (const T *)a->x.data;
    r.scale = (const T *)a->scale.data;
    r.mean = (const float *)a->mean.data;
    r.rstd = (const float *)a->rstd.data;
    r.dx = (T *)a->dx.data;
    r.dshift = (T *)a->dshift.data;
    r.dscale = (T *)a->dscale.data;
    r.mod_stride = lg_row_stride(&a->scale, 1);
    r.tokens = (int)a->x.dim[1];
    r.D = (int)a->x.dim[2];
    r.inverse_D = 1 / (float)r.D;
    r.accumulate = a->accumulate;
    r.rms = a->rms;
    r.pieces = pieces;
    r.bias_sums = bias_sums;
    struct token_sums sums = {pieces, B, r.tokens, r.D, r.mod_stride};
    sums.dshift = r.dshift, sums.dscale = r.dscale, sums.bias_sums = bias_sums;
    sums.dbias = then ? then->dbias : a->dbias;
    sums.accumulate_dbias = then ? then->accumulate_dbias : a->accumulate_dbias;
    if (!then) {
        if (bias_sums)
            launch<T, G, BIAS, true>(stream, B, r);
        else if (r.dscale)
            launch<T, G, ALONE, true>(stream, B, r);
        else
            launch<T, G, ALONE, false>(stream, B, r);
        cuda_add_token_sums(stream, a->x.dtype, &sums);
        return true;
    }
    r.y = (const T *)then->y.data;
    r.gate = (const T *)then->gate.data;
    r.below = (T *)then->dy.data;
    r.dgate = (T *)then->dgate.data;
    r.gate_stride = lg_row_stride(&then->gate, 1);
    if (!r.dscale && !r.dgate && !bias_sums) {
        launch<T, G, RESIDUAL, false>(stream, B, r);
        return true;
    }
    launch<T, G, RESIDUAL, true>(stream, B, r);
    sums.gate = r.gate, sums.gate_stride = r.gate_stride;
    sums.dgate = r.dgate;
    cuda_add_token_sums(stream, a->x.dtype, &sums);
    return true;
}

template <typename T>
static bool run_width(lg_stream *s, const struct lg_norm_modulate_backward_args *a,
                      const struct lg_gate_residual_backward_args *then, float *pieces,
                      float *bias_sums)
{
    const int64_t D = a->x.dim[2];
#define RUN(size, packs) run<T, team<size, packs>>(s, a, then, pieces, bias_sums)
    if (D <= ROW_MAX) {
        WITH_PACKS(D, PACKS, return RUN(1, PACKS))
        return false;
    }
    const int size = D <= 2 * ROW_MAX ? 2 : 4, packs = (int)ceil_div(D, size * ROW_STEP);
    LG_ASSERT(packs >= 3 && packs <= ROW_PACKS_MAX);
    if (size == 2) return packs == 3 ? RUN(2, 3) : packs == 4 ? RUN(2, 4) : RUN(2, 5);
    return packs == 3 ? RUN(4, 3) : packs == 4 ? RUN(4, 4) : RUN(4, 5);
#undef RUN
}

bool cuda_norm_backward_of_rows(lg_stream *s, const struct lg_norm_modulate_backward_args *a,
                                const struct lg_gate_residual_backward_args *then, float *pieces,
                                float *bias_sums)
{
    lg_dtype t = a->x.dtype;
    int64_t D = a->x.dim[2];
    const void *p[] = {a->x.data,     a->dy.data,     a->dx.data,
                       a->scale.data, a->dshift.data, a->dscale.data};
    if (t == LG_F32 || D > WIDE_ROW_MAX || a->x.dim[1] < TOKENS_MIN || !a->scale.data ||
        !rows_fit(t, D, lg_row_stride(&a->scale, 1), p, 6))
        return false;
    if (then) {
        const void *q[] = {then->y.data, then->dy.data, then->gate.data, then->dgate.data};
        if (!rows_fit(t, D, lg_row_stride(&then->gate, 1), q, 4)) return false;
    }
    return t == LG_BF16 ? run_width<bf16>(s, a, then, pieces, bias_sums)
                        : run_width<fp16>(s, a, then, pieces, bias_sums);
}
