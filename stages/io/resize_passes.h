/* The two passes of a resize over rows of floats; see resize.c, which includes this once for each width of vectors, with
 * VECTOR (floats in one), TARGET (what a function is compiled for) and PASS(name) (its name). */

typedef float PASS(vector) __attribute__((vector_size(4 * VECTOR), may_alias));

/* Bytes [0, n) of GROUP rows to columns of GROUP floats. */
TARGET static void PASS(gather)(const uint8_t *const *row, int n, float *columns)
{
    _Alignas(16) float part[GROUP][CHUNK] = {0};
    for (int at = 0; at < n; at += CHUNK) {
        const int m = LG_MIN(n - at, CHUNK);
        for (int r = 0; r < GROUP; r++)
            if (m == CHUNK) /* whole vectors */
                for (int i = 0; i < CHUNK; i++) part[r][i] = row[r][at + i];
            else
                for (int i = 0; i < m; i++) part[r][i] = row[r][at + i];
        for (int i = 0; i < m; i += 4)
            for (int r = 0; r < GROUP; r += 4)
                transpose(&part[r][i], CHUNK, columns + (at + i) * GROUP + r, GROUP);
    }
}

/* Each output pixel is the weighted sum of its taps' columns, three for each of them. */
TARGET static void PASS(sum_columns)(const float *columns, const struct axis *a, int out_w,
                                     float *sums)
{
    enum { N = 3 * GROUP / VECTOR };
    for (int o = 0; o < out_w; o++) {
        const PASS(vector) *in =
            (const PASS(vector) *)(columns + (size_t)(a->first[o] - a->first[0]) * 3 * GROUP);
        const float *w = a->weight + (size_t)o * (size_t)a->taps_max;
        PASS(vector) sum[N];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) sum[i] = in[i] * w[0];
        for (int k = 1; k < a->n[o]; k++) {
            in += N;
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) sum[i] += in[i] * w[k];
        }
        PASS(vector) *out = (PASS(vector) *)(sums + (size_t)o * 3 * GROUP);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) out[i] = sum[i];
    }
}

/* GROUP rows of the picture from y on (the last one again behind its end) to rows of whole levels. */
TARGET static void PASS(horizontal)(const struct work *w, const struct lg_resize_args *a, int y,
                                    float *rows)
{
    const int n = 3 * a->out_w;
    const uint8_t *row[GROUP];
    for (int r = 0; r < GROUP; r++)
        row[r] =
            a->rgb +
            ((size_t)LG_MIN(y + r, a->height - 1) * (size_t)a->width + (size_t)w->x.first[0]) * 3;
    if (a->width == a->full_w) {
        for (int r = 0; r < GROUP; r++)
            for (int i = 0; i < n; i++) rows[(size_t)r * w->stride + (size_t)i] = row[r][i];
        return;
    }
    PASS(gather)(row, 3 * (axis_end(&w->x, a->out_w) - w->x.first[0]), w->columns);
    PASS(sum_columns)(w->columns, &w->x, a->out_w, w->sums);
    for (int i = 0; i < n * GROUP; i++) w->sums[i] = (float)to_level(w->sums[i]);
    for (int i = 0; i < n; i += 4)
        for (int r = 0; r < GROUP; r += 4)
            transpose(w->sums + i * GROUP + r, GROUP, rows + (size_t)r * w->stride + i, w->stride);
}

/* Output row y, of n numbers: the weighted sum of its taps' rows, a block at a time. */
TARGET static void PASS(vertical)(const struct work *w, int y, int n)
{
    enum { N = 4, BLOCK = N * VECTOR };
    const float *const *tap = w->tap, *weight = w->y.weight + (size_t)y * (size_t)w->y.taps_max;
    const int n_taps = w->y.n[y];
    float *sums = w->row_sums;
    uint8_t *row = w->row;
    for (int at = 0; at < n; at += BLOCK) {
        PASS(vector) sum[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) sum[i] = ((const PASS(vector) *)(tap[0] + at))[i] * weight[0];
        for (int k = 1; k < n_taps; k++)
#pragma GCC unroll 4
            for (int i = 0; i < N; i++)
                sum[i] += ((const PASS(vector) *)(tap[k] + at))[i] * weight[k];
        PASS(vector) *out = (PASS(vector) *)(sums + at);
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) out[i] = sum[i];
    }
    for (int i = 0; i < n; i++) row[i] = (uint8_t)to_level(sums[i]);
}

TARGET static void PASS(resize)(const struct work *w, const struct lg_resize_args *a,
                                lg_resize_row *on_row, void *arg)
{
    const int top = w->y.first[0];
    int made = 0; /* rows from `top` on that the horizontal pass is done with */
    for (int y = 0; y < a->out_h; y++) {
        const int first = w->y.first[y] - top, end = first + w->y.n[y];
        for (; made < end; made += GROUP) PASS(horizontal)(w, a, top + made, ring_row(w, made));
        for (int k = first; k < end; k++) w->tap[k - first] = ring_row(w, k);
        PASS(vertical)(w, y, 3 * a->out_w);
        on_row(arg, y, w->row);
    }
}
