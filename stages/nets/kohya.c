/* See kohya.h. A file is made and read linear by linear of the original, in the order in which the first of its parts stands in
 * the adapter's table; to write, that is walked through twice, to declare and to write. */
#include "base/fs.h"
#include "base/heartbeat.h"
#include "stages/nets/kohya_private.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "lora_unet_"
#define DOWN   ".lora_down.weight"
#define UP     ".lora_up.weight"
#define ALPHA  ".alpha"

struct full {
    char text[LG_PARAM_NAME_BYTES + 48];
};

/* "lora_unet_NAME" with a tail. */
static const char *full_name(const struct lg_kohya_linear *l, const char *tail, struct full *ret)
{
    snprintf(ret->text, sizeof ret->text, PREFIX "%s%s", l->name, tail);
    return ret->text;
}

/* Where row i of the parts' B, one below the other, stands in the original's. */
static int64_t row_of(const struct lg_kohya_linear *l, int64_t i)
{
    return l->is_swapped ? (i + l->outputs / 2) % l->outputs : i;
}

/* ---- writing ---- */

static int declare(lg_st_writer *w, const struct lg_kohya_linear *l)
{
    struct full name;
    const int64_t n = l->adapted * l->rank;
    LG_TRY(
        lg_st_writer_declare(w, full_name(l, DOWN, &name), LG_F32, 2, (int64_t[]){n, l->inputs}));
    LG_TRY(lg_st_writer_declare(w, full_name(l, UP, &name), LG_F32, 2, (int64_t[]){l->outputs, n}));
    return lg_st_writer_declare(w, full_name(l, ALPHA, &name), LG_F32, 0, NULL);
}

static void place_up(const struct lg_kohya_linear *l, const float *weights, float *ret)
{
    const int64_t n = l->adapted * l->rank;
    int64_t row = 0, column = 0;
    for (int i = 0; i < l->parts; row += l->part[i++].outputs) {
        const struct lg_kohya_part *p = &l->part[i];
        if (!p->up) continue;
        const float *up = weights + p->up->offset;
        for (int64_t r = 0; r < p->outputs; r++)
            memcpy(ret + row_of(l, row + r) * n + column, up + r * l->rank,
                   (size_t)l->rank * sizeof *ret);
        column += l->rank;
    }
}

static int write_linear(lg_st_writer *w, const struct lg_kohya *k, const struct lg_kohya_linear *l,
                        const float *weights)
{
    const size_t n = (size_t)(l->adapted * l->rank) * (size_t)l->outputs;
    const float alpha = (float)(k->adapter->alpha * l->adapted);
    for (int i = 0; i < l->parts; i++) {
        const struct lg_param *down = l->part[i].down;
        if (!down) continue;
        LG_TRY(lg_st_writer_data(w, weights + down->offset, down->count * sizeof(float)));
    }
    float *up = calloc(n, sizeof *up);
    if (!up) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu weights of an adapter", n);
    place_up(l, weights, up);
    int rc = lg_st_writer_data(w, up, n * sizeof *up);
    free(up);
    LG_TRY(rc);
    LG_TRY(lg_st_writer_data(w, &alpha, sizeof alpha));
    lg_heartbeat();
    return 0;
}

static int write_all(lg_st_writer *w, const struct lg_kohya *k, const float *weights)
{
    struct lg_kohya_linear l;
    bool begins;
    LG_TRY(lg_st_writer_metadata(w, "format", "pt"));
    LG_TRY(lg_st_writer_metadata(w, "ss_network_module", "networks.lora"));
    for (int i = 0; i < k->t->n; i++) {
        LG_TRY(lg_kohya_linear_at(k, i, &l, &begins));
        if (begins) LG_TRY(declare(w, &l));
    }
    for (int i = 0; i < k->t->n; i++) {
        LG_TRY(lg_kohya_linear_at(k, i, &l, &begins));
        if (begins) LG_TRY(write_linear(w, k, &l, weights));
    }
    return 0;
}

int lg_kohya_save(const struct lg_kohya *k, const float *weights, const char *path)
{
    lg_st_writer *w;
    LG_TRY(lg_st_writer_open(path, &w));
    int rc = write_all(w, k, weights);
    if (rc < 0) {
        lg_st_writer_abort(&w);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    LG_TRY(lg_st_writer_finish(&w, NULL));
    return 0;
}

/* ---- reading ---- */

/* A linear as a file has it. */
struct stored {
    const struct lg_st_entry *down, *up, *alpha;
    float *a, *b;  /* (rank, inputs), (outputs, rank) */
    int64_t rank;  /* of the one linear */
    bool is_apart; /* each part has rows of A of its own */
    double scale;  /* of B, for the adapter's alpha */
};

static int find_stored(const struct lg_kohya_linear *l, const lg_st_file *f, const char *path,
                       struct stored *ret)
{
    struct full name;
    ret->alpha = lg_st_find(f, full_name(l, ALPHA, &name));
    ret->down = lg_st_find(f, full_name(l, DOWN, &name));
    if (ret->down) ret->up = lg_st_find(f, full_name(l, UP, &name));
    if (!ret->down || !ret->up)
        return LG_FAIL(LG_ERR_MISMATCH, "%s: tensor %s is missing", path, name.text);
    const int64_t n = ret->rank = ret->down->dim[0];
    const bool fits = ret->down->rank == 2 && ret->up->rank == 2 &&
                      ret->down->dim[1] == l->inputs && ret->up->dim[0] == l->outputs &&
                      ret->up->dim[1] == n;
    if (!fits || (n != l->rank && n != l->rank * l->adapted))
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s: %s is not (%lld, n), n = %lld or, of %d linears in one, %lld, as the "
                       "adapter's rank and the model want it",
                       path, name.text, (long long)l->outputs, (long long)l->rank, l->adapted,
                       (long long)(l->rank * l->adapted));
    if (ret->alpha && (ret->alpha->bytes != lg_dtype_bytes(ret->alpha->dtype)))
        return LG_FAIL(LG_ERR_MISMATCH, "%s: %s%s is not one number", path, PREFIX, l->name);
    ret->is_apart = n != l->rank;
    return 0;
}

static int read_stored(const struct lg_kohya *k, const struct lg_kohya_linear *l, const char *path,
                       struct stored *s)
{
    const size_t rank = (size_t)s->rank, na = rank * (size_t)l->inputs,
                 nb = rank * (size_t)l->outputs;
    const double own = k->adapter->alpha * (double)s->rank / (double)l->rank;
    float alpha = (float)s->rank; /* as sd-scripts takes it without one */
    if (s->alpha) LG_TRY(lg_st_read_f32(s->alpha, &alpha, 0, 1));
    s->scale = alpha == (float)own ? 1 : (double)alpha / own;
    if (!isfinite(s->scale))
        return LG_FAIL(LG_ERR_MISMATCH, "%s: " PREFIX "%s" ALPHA " = %g cannot become alpha = %g",
                       path, l->name, (double)alpha, k->adapter->alpha);
    s->a = malloc(na * sizeof *s->a);
    s->b = malloc(nb * sizeof *s->b);
    if (!s->a || !s->b)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu weights of an adapter", na + nb);
    LG_TRY(lg_st_read_f32(s->down, s->a, 0, na));
    return lg_st_read_f32(s->up, s->b, 0, nb);
}

/* Part i's B (outputs, r) and A (r, inputs) of the whole's; first: of its rows, block: which of A's, if they are apart. */
static void take_part(const struct lg_kohya_linear *l, const struct stored *s, int i, int64_t first,
                      int64_t block, float *ret)
{
    const struct lg_kohya_part *p = &l->part[i];
    const int64_t column = s->is_apart ? block * l->rank : 0;
    memcpy(ret + p->down->offset, s->a + column * l->inputs, p->down->count * sizeof *ret);
    for (int64_t r = 0; r < p->outputs; r++) {
        float *row = s->b + row_of(l, first + r) * s->rank + column;
        for (int64_t j = 0; j < l->rank; j++) {
            ret[p->up->offset + (size_t)(r * l->rank + j)] = (float)(s->scale * (double)row[j]);
            row[j] = 0; /* taken */
        }
    }
}

/* What no part takes would be lost. */
static int check_taken(const struct lg_kohya_linear *l, const struct stored *s, const char *path)
{
    for (int64_t i = 0; i < l->outputs * s->rank; i++)
        if (s->b[i] != 0)
            return LG_FAIL(
                LG_ERR_MISMATCH,
                "%s: " PREFIX "%s" UP " is not zero in row %lld, column %lld, which belongs to "
                "none of the adapter's linears: it adapts more of them, or has rank %lld",
                path, l->name, (long long)(i / s->rank), (long long)(i % s->rank),
                (long long)s->rank);
    return 0;
}

static int split(const struct lg_kohya *k, const struct lg_kohya_linear *l, const char *path,
                 struct stored *s, float *ret)
{
    int64_t row = 0, block = 0;
    LG_TRY(read_stored(k, l, path, s));
    for (int i = 0; i < l->parts; row += l->part[i++].outputs)
        if (l->part[i].down) take_part(l, s, i, row, block++, ret);
    lg_heartbeat();
    return check_taken(l, s, path);
}

static bool is_own(const struct lg_st_entry *e)
{
    return !strncmp(e->name, PREFIX, sizeof PREFIX - 1);
}

bool lg_kohya_is(const lg_st_file *f)
{
    for (int i = 0; i < lg_st_count(f); i++)
        if (is_own(lg_st_at(f, i))) return true;
    return false;
}

int lg_kohya_load(const struct lg_kohya *k, const lg_st_file *f, const char *path, float *ret)
{
    struct lg_kohya_linear l;
    bool begins;
    int taken = 0;
    memset(ret, 0, k->t->count * sizeof *ret);
    for (int i = 0; i < lg_st_count(f); i++)
        if (!is_own(lg_st_at(f, i)))
            return LG_FAIL(LG_ERR_MISMATCH,
                           "%s: tensor %.200s is no adapter's of a transformer (" PREFIX
                           "..): take a file without it",
                           path, lg_st_at(f, i)->name);
    for (int i = 0; i < k->t->n; i++) {
        struct stored s = {0};
        LG_TRY(lg_kohya_linear_at(k, i, &l, &begins));
        if (!begins) continue;
        LG_TRY(find_stored(&l, f, path, &s));
        int rc = split(k, &l, path, &s, ret);
        free(s.a);
        free(s.b);
        LG_TRY(rc);
        taken += s.alpha ? 3 : 2;
    }
    if (taken == lg_st_count(f)) return 0;
    return LG_FAIL(LG_ERR_MISMATCH,
                   "%s has %d tensors, the adapter has %d of them: it adapts other linears", path,
                   lg_st_count(f), taken);
}
