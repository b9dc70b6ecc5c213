/* Tables, positions, time, patches. */
#include "base/check.h"
#include "kernels/ref64/ref64.h"
#include <math.h>

static int64_t checked_id(const lg_tensor *ids, int64_t m, int64_t V)
{
    int32_t id = ((const int32_t *)ids->data)[m];
    LG_ASSERT(id >= 0 && id < V);
    return id;
}

void ref64_embedding_forward(lg_stream *s, const struct lg_embedding_forward_args *a)
{
    int64_t M = a->y.dim[0], D = a->y.dim[1], V = a->table.dim[0];
    for (int64_t m = 0; m < M; m++) {
        int64_t id = checked_id(&a->ids, m, V);
        for (int64_t i = 0; i < D; i++)
            ref64_data(a->y)[m * D + i] = ref64_data(a->table)[id * D + i];
    }
}

void ref64_embedding_backward(lg_stream *s, const struct lg_embedding_backward_args *a)
{
    int64_t M = a->dy.dim[0], D = a->dy.dim[1], V = a->dtable.dim[0];
    double *dtable = ref64_data(a->dtable);
    for (int64_t i = 0; !a->accumulate && i < V * D; i++) dtable[i] = 0;
    for (int64_t m = 0; m < M; m++) {
        int64_t id = checked_id(&a->ids, m, V);
        for (int64_t i = 0; i < D; i++) dtable[id * D + i] += ref64_data(a->dy)[m * D + i];
    }
}

/* Half the buckets for each direction; of these the first half for one distance each, the rest in
 * logarithmic steps up to max_distance. Raffel et al., "Exploring the Limits of Transfer Learning
 * with a Unified Text-to-Text Transformer", section 2.1. */
static int64_t t5_bucket(int64_t key_minus_query, int64_t buckets, int64_t max_distance)
{
    int64_t half = buckets / 2, exact = half / 2;
    int64_t base = key_minus_query > 0 ? half : 0;
    int64_t distance = key_minus_query < 0 ? -key_minus_query : key_minus_query;
    if (distance < exact) return base + distance;
    double steps = log((double)distance / (double)exact) /
                   log((double)max_distance / (double)exact) * (double)(half - exact);
    return base + LG_MIN(exact + (int64_t)steps, half - 1);
}

void ref64_t5_bias_forward(lg_stream *s, const struct lg_t5_bias_forward_args *a)
{
    int64_t buckets = a->table.dim[0], H = a->table.dim[1], T = a->out.dim[1];
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < T; i++)
            for (int64_t j = 0; j < T; j++)
                ref64_data(a->out)[(h * T + i) * T + j] =
                    ref64_data(a->table)[t5_bucket(j - i, buckets, a->max_distance) * H + h];
}

void ref64_timestep_embedding_forward(lg_stream *s,
                                      const struct lg_timestep_embedding_forward_args *a)
{
    int64_t B = a->out.dim[0], half = a->out.dim[1] / 2;
    for (int64_t b = 0; b < B; b++) {
        double t = ref64_data(a->t)[b];
        double *out = ref64_data(a->out) + b * 2 * half;
        for (int64_t i = 0; i < half; i++) {
            double f = exp(-log(10000.0) * (double)i / ((double)half - a->freq_shift));
            out[i] = cos(t * f);
            out[half + i] = sin(t * f);
        }
    }
}

/* Where pixel e of a (B, C, H, W) image lies in its tokens (B, T, C p p). */
struct patch_place {
    int64_t token; /* b T + t */
    int64_t c, i, j;
};

static struct patch_place place(const lg_tensor *image, int64_t p, int64_t e)
{
    int64_t C = image->dim[1], H = image->dim[2], W = image->dim[3];
    int64_t w = e % W, h = e / W % H, c = e / (W * H) % C, b = e / (W * H * C);
    return (struct patch_place){(b * (H / p) + h / p) * (W / p) + w / p, c, h % p, w % p};
}

/* (c p + i) p + j within a token. */
void ref64_patchify_forward(lg_stream *s, const struct lg_patchify_forward_args *a)
{
    int64_t p = a->patch, width = a->y.dim[2];
    for (int64_t e = 0; e < lg_numel(&a->x); e++) {
        struct patch_place at = place(&a->x, p, e);
        ref64_data(a->y)[at.token * width + (at.c * p + at.i) * p + at.j] = ref64_data(a->x)[e];
    }
}

/* (i p + j) C + c within a token: the other order, as diffusers has it. */
static int64_t feature(const struct patch_place *at, int64_t p, int64_t C, bool channels_first)
{
    return channels_first ? (at->c * p + at->i) * p + at->j : (at->i * p + at->j) * C + at->c;
}

void ref64_unpatchify_forward(lg_stream *s, const struct lg_unpatchify_forward_args *a)
{
    int64_t p = a->patch, width = a->x.dim[2], C = a->y.dim[1];
    for (int64_t e = 0; e < lg_numel(&a->y); e++) {
        struct patch_place at = place(&a->y, p, e);
        ref64_data(a->y)[e] =
            ref64_data(a->x)[at.token * width + feature(&at, p, C, a->channels_first)];
    }
}

void ref64_unpatchify_backward(lg_stream *s, const struct lg_unpatchify_backward_args *a)
{
    int64_t p = a->patch, width = a->dx.dim[2], C = a->dy.dim[1];
    for (int64_t e = 0; e < lg_numel(&a->dy); e++) {
        struct patch_place at = place(&a->dy, p, e);
        ref64_data(a->dx)[at.token * width + feature(&at, p, C, a->channels_first)] =
            ref64_data(a->dy)[e];
    }
}
