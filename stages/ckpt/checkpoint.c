/* Checkpoint files; see checkpoint.h. */
#include "stages/ckpt/checkpoint.h"
#include "stages/io/safetensors.h"
#include "stages/nets/adapter_file.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The tensors of a parameter, in the file's order. */
static const struct kind {
    const char *name;
    bool is_absmax;
} KINDS[] = {
    {"exp_avg", false},          {"exp_avg_absmax", true}, {"exp_avg_sq", false},
    {"exp_avg_sq_absmax", true}, {"master", false},
};
enum { M, M_MAX, V, V_MAX, MASTER, N_KINDS, NAME_BYTES = LG_PARAM_NAME_BYTES + 24 };

static bool is_adapter(const struct lg_contents *c)
{
    return c->adapter && c->adapter->rank;
}

/* Blocks that have elements of the parameter. */
static size_t blocks_of(const lg_params *t, int i)
{
    const size_t in = lg_params_in_tensor(t, i) % LG_ADAMW8_BLOCK;
    return (in + t->p[i].count + LG_ADAMW8_BLOCK - 1) / LG_ADAMW8_BLOCK;
}

/* One tensor of the file; data NULL: the parameter has none of this kind and type. */
struct tensor {
    const void *data;
    size_t bytes;
    int rank;
    const int64_t *dim;
    int64_t blocks;
};

static struct tensor tensor_of(const lg_params *t, int i, int kind, lg_dtype type,
                               const struct lg_snapshot *s)
{
    const struct lg_param *p = &t->p[i];
    const struct lg_chunk *m = &s->moments;
    const bool coded = lg_params_is_coded(t, i), is_code = coded && (kind == M || kind == V);
    const size_t block = p->offset / LG_ADAMW8_BLOCK;
    const size_t full = s->layout ? lg_moments_full_before(s->layout, p->offset) : p->offset;
    struct tensor r = {.rank = p->rank, .dim = p->dim, .bytes = p->count * lg_dtype_bytes(type)};
    if ((KINDS[kind].is_absmax && !coded) || is_code != (type == LG_U8)) return r;
    if (kind == MASTER) r.data = s->w + p->offset;
    if (kind == M) r.data = coded ? (const void *)(m->m_code + p->offset) : m->m + full;
    if (kind == V) r.data = coded ? (const void *)(m->v_code + p->offset) : m->v + full;
    if (!KINDS[kind].is_absmax) return r;
    r.blocks = (int64_t)blocks_of(t, i);
    r.rank = 1;
    r.data = (kind == M_MAX ? m->m_max : m->v_max) + block;
    r.bytes = (size_t)r.blocks * sizeof(float);
    return r;
}

/* Codes behind all that is fp32, which so is aligned. */
static const lg_dtype TYPES[] = {LG_F32, LG_U8};

/* Declares them, or writes their data. */
static int each_tensor(lg_st_writer *w, const lg_params *params, const struct lg_snapshot *s,
                       bool declare)
{
    for (size_t type = 0; type < LG_ARRAY_LEN(TYPES); type++)
        for (int k = 0; k < N_KINDS; k++)
            for (int i = 0; i < params->n; i++) {
                char name[NAME_BYTES];
                struct tensor t = tensor_of(params, i, k, TYPES[type], s);
                if (t.blocks) t.dim = &t.blocks;
                if (!t.data) continue;
                snprintf(name, sizeof name, "%s.%s", KINDS[k].name, params->p[i].name);
                if (declare)
                    LG_TRY(lg_st_writer_declare(w, name, TYPES[type], t.rank, t.dim));
                else
                    LG_TRY(lg_st_writer_data(w, t.data, t.bytes));
            }
    return 0;
}

int lg_checkpoint_write_optimizer(lg_st_writer *w, const lg_params *params,
                                  const struct lg_snapshot *s)
{
    LG_TRY(each_tensor(w, params, s, true));
    LG_TRY(each_tensor(w, params, s, false));
    return 0;
}

static int write_optimizer(const char *path, const lg_params *params, const struct lg_snapshot *s)
{
    lg_st_writer *w = NULL;
    int rc;
    LG_TRY_GOTO(rc, lg_st_writer_open(path, &w), fail);
    LG_TRY_GOTO(rc, lg_st_writer_metadata(w, "format", "pt"), fail);
    LG_TRY_GOTO(rc, lg_checkpoint_write_optimizer(w, params, s), fail);
    LG_TRY(lg_st_writer_finish(&w, NULL));
    return 0;
fail:
    lg_st_writer_abort(&w);
    return rc;
}

/* One set of weights, in a folder of its own. */
static int write_weights(const char *dir, const struct lg_contents *c, const float *trained)
{
    const struct lg_denoiser_weights w = {
        .t = c->params, .trained = trained, .frozen = c->frozen, .source = c->source};
    LG_TRY(lg_mkdirs(dir));
    if (is_adapter(c)) {
        const lg_params t = lg_params_trained(c->params);
        LG_TRY(lg_adapter_save(c->adapter, c->base, &t, dir, trained));
    } else {
        LG_TRY(lg_denoiser_save(c->net, dir, &w));
    }
    LG_TRY(lg_fsync_dir(dir));
    return 0;
}

int lg_checkpoint_write(const char *dir, const struct lg_contents *c, lg_manifest *manifest)
{
    static const char *const whole[] = {
        "model/config.json",     "model/diffusion_pytorch_model.safetensors",
        "ema/config.json",       "ema/diffusion_pytorch_model.safetensors",
        "optimizer.safetensors", NULL};
    static const char *const adapter[] = {
        "adapter/" LG_ADAPTER_CONFIG, "adapter/" LG_ADAPTER_WEIGHTS, "ema/" LG_ADAPTER_CONFIG,
        "ema/" LG_ADAPTER_WEIGHTS,    "optimizer.safetensors",       NULL};
    const lg_params trained = lg_params_trained(c->params);
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/%s", dir, is_adapter(c) ? "adapter" : "model"));
    LG_TRY(write_weights(path, c, c->state.w));
    LG_TRY(lg_path(path, "%s/ema", dir));
    LG_TRY(write_weights(path, c, c->state.ema));
    LG_TRY(lg_path(path, "%s/optimizer.safetensors", dir));
    LG_TRY(write_optimizer(path, &trained, &c->state));
    for (const char *const *f = is_adapter(c) ? adapter : whole; *f; f++)
        LG_TRY(lg_manifest_add(manifest, dir, *f));
    return 0;
}

/* ---- reading ---- */

/* Of a parameter. NULL: none, which says so only if it must be there. */
static const struct lg_st_entry *find(const lg_st_file *f, int kind, const struct lg_param *p)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%s.%s", KINDS[kind].name, p->name);
    return lg_st_find(f, name);
}

/* With so many elements. */
static int find_whole(const lg_st_file *f, int kind, const struct lg_param *p, size_t count,
                      const struct lg_st_entry **ret)
{
    const struct lg_st_entry *e = find(f, kind, p);
    if (!e)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "optimizer.safetensors has no tensor %s.%s; if trainer.groups froze %s when "
                       "the checkpoint was made it has to freeze it still",
                       KINDS[kind].name, p->name, p->name);
    size_t elements = 1;
    for (int d = 0; d < e->rank; d++) elements *= (size_t)e->dim[d];
    if (elements != count)
        return LG_FAIL(LG_ERR_MISMATCH, "optimizer.safetensors: %s has %zu values, the net has %zu",
                       e->name, elements, count);
    *ret = e;
    return 0;
}

/* What of a parameter lies in [first, first + count) of the flat buffer. */
struct part {
    const lg_params *t;
    int i;
    size_t first, from, to; /* elements of the flat buffer */
};

static struct part part_of(const lg_params *t, int i, size_t first, size_t count)
{
    const struct lg_param *p = &t->p[i];
    return (struct part){.t = t,
                         .i = i,
                         .first = first,
                         .from = LG_MAX(p->offset, first),
                         .to = LG_MIN(p->offset + p->count, first + count)};
}

/* Its codes, and, for each block that one of them lies in, the absmax; `to` begins where the range does. */
static int read_codes(const lg_st_file *f, int kind, const struct part *part, uint8_t *to_code,
                      float *to_max)
{
    const struct lg_param *p = &part->t->p[part->i];
    const struct lg_st_entry *code, *absmax;
    const size_t block = part->from / LG_ADAMW8_BLOCK;
    const size_t blocks = (part->to - 1) / LG_ADAMW8_BLOCK - block + 1;
    LG_TRY(find_whole(f, kind, p, p->count, &code));
    LG_TRY(find_whole(f, kind + 1, p, blocks_of(part->t, part->i), &absmax));
    if (code->dtype != LG_U8)
        return LG_FAIL(LG_ERR_MISMATCH, "optimizer.safetensors: %s is %s, beside an absmax of u8",
                       code->name, lg_dtype_name(code->dtype));
    memcpy(to_code + (part->from - part->first),
           (const uint8_t *)code->data + (part->from - p->offset), part->to - part->from);
    LG_TRY(lg_st_read_f32(absmax, to_max + (block - part->first / LG_ADAMW8_BLOCK),
                          block - p->offset / LG_ADAMW8_BLOCK, blocks));
    return 0;
}

/* What codes stand for; where the tensor begins may be no multiple of a block. */
static int decode(const lg_st_file *f, int kind, const struct part *part, float *dst)
{
    const struct lg_param *p = &part->t->p[part->i];
    const struct lg_st_entry *code, *absmax;
    const size_t in = lg_params_in_tensor(part->t, part->i) % LG_ADAMW8_BLOCK;
    struct lg_adamw8_map map;
    LG_TRY(find_whole(f, kind, p, p->count, &code));
    LG_TRY(find_whole(f, kind + 1, p, blocks_of(part->t, part->i), &absmax));
    lg_adamw8_map_f32(kind == M, &map);
    for (size_t at = part->from; at < part->to; at++) {
        const size_t e = at - p->offset;
        float unit;
        LG_TRY(lg_st_read_f32(absmax, &unit, (in + e) / LG_ADAMW8_BLOCK, 1));
        dst[at - part->from] = map.value[((const uint8_t *)code->data)[e]] * unit;
    }
    return 0;
}

static bool is_coded(const lg_st_file *f, int kind, const struct lg_param *p)
{
    const struct lg_st_entry *e = find(f, kind, p);
    return e && e->dtype == LG_U8 && kind != MASTER;
}

/* Elements [first, first + count) of one kind, in fp32. */
static int read_full(const lg_st_file *f, int kind, const lg_params *t, size_t first, size_t count,
                     float *dst)
{
    if (!dst) return 0;
    for (int i = 0; i < t->n; i++) {
        const struct lg_param *p = &t->p[i];
        const struct lg_st_entry *e;
        const struct part part = part_of(t, i, first, count);
        if (part.from >= part.to) continue;
        float *to = dst + (part.from - first);
        if (is_coded(f, kind, p)) {
            LG_TRY(decode(f, kind, &part, to));
            continue;
        }
        LG_TRY(find_whole(f, kind, p, p->count, &e));
        LG_TRY(lg_st_read_f32(e, to, part.from - p->offset, part.to - part.from));
    }
    return 0;
}

static int open_optimizer(const char *dir, lg_st_file **ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/optimizer.safetensors", dir));
    LG_TRY(lg_st_open(path, ret));
    return 0;
}

int lg_checkpoint_read_optimizer(const char *dir, const lg_params *params, size_t first,
                                 size_t count, float *w, float *m, float *v)
{
    lg_st_file *f;
    LG_TRY(open_optimizer(dir, &f));
    int rc = read_full(f, M, params, first, count, m);
    if (rc == 0) rc = read_full(f, V, params, first, count, v);
    if (rc == 0) rc = read_full(f, MASTER, params, first, count, w);
    lg_st_close(&f);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* A kind of moments of a whole number of blocks that have codes, all of which the file has in fp32. */
static int encode(const lg_st_file *f, int kind, const lg_params *t, size_t first, size_t count,
                  uint8_t *to_code, float *to_max)
{
    struct lg_adamw8_map map;
    float *x = calloc(count, sizeof *x);
    if (!x) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu moments", count);
    lg_adamw8_map_f32(kind == M, &map);
    int rc = read_full(f, kind, t, first, count, x);
    for (size_t at = 0; rc == 0 && at < count; at += LG_ADAMW8_BLOCK) {
        float most = 0;
        for (int i = 0; i < LG_ADAMW8_BLOCK; i++) most = LG_MAX(most, fabsf(x[at + (size_t)i]));
        to_max[at / LG_ADAMW8_BLOCK] = most;
        lg_adamw8_encode(&map, kind == M, x + at, LG_ADAMW8_BLOCK, most, to_code + at);
    }
    free(x);
    return rc;
}

/* Which of these has the file as codes? Returns where that changes, at most `end`: groups may have had other optimizers when it
 * was written. */
static size_t kept_end(const lg_st_file *f, int kind, const lg_params *t, size_t first, size_t end,
                       bool *ret_coded)
{
    bool known = false;
    *ret_coded = false;
    for (int i = 0; i < t->n; i++) {
        const struct part part = part_of(t, i, first, end - first);
        if (part.from >= part.to || !find(f, kind, &t->p[i]))
            continue; /* missing: said by who reads it */
        const bool coded = is_coded(f, kind, &t->p[i]);
        if (known && coded != *ret_coded) return part.from;
        *ret_coded = coded;
        known = true;
    }
    return end;
}

/* Of elements [first, first + count), which all have codes. */
static int read_coded(const lg_st_file *f, int kind, const lg_params *t, size_t first, size_t count,
                      uint8_t *to_code, float *to_max)
{
    const size_t end = first + count;
    for (size_t at = first, next; at < end; at = next) {
        bool coded;
        next = kept_end(f, kind, t, at, end, &coded);
        if (next % LG_ADAMW8_BLOCK)
            return LG_FAIL(LG_ERR_MISMATCH,
                           "optimizer.safetensors: %s is codes and fp32 within one block",
                           KINDS[kind].name);
        uint8_t *code = to_code + (at - first);
        float *max = to_max + (at - first) / LG_ADAMW8_BLOCK;
        if (!coded) LG_TRY(encode(f, kind, t, at, next - at, code, max));
        for (int i = 0; i < t->n && coded; i++) {
            const struct part part = part_of(t, i, at, next - at);
            if (part.from < part.to) LG_TRY(read_codes(f, kind, &part, code, max));
        }
    }
    return 0;
}

static int read_moments(const lg_st_file *f, const lg_params *t, size_t first, size_t count,
                        const struct lg_chunk *to)
{
    size_t full = 0;
    for (size_t at = first, next; at < first + count; at = next) {
        bool coded;
        next = lg_params_coded_end(t, at, first + count, &coded);
        const size_t in = at - first, block = in / LG_ADAMW8_BLOCK, n = next - at;
        if (coded) {
            LG_TRY(read_coded(f, M, t, at, n, to->m_code + in, to->m_max + block));
            LG_TRY(read_coded(f, V, t, at, n, to->v_code + in, to->v_max + block));
            continue;
        }
        LG_TRY(read_full(f, M, t, at, n, to->m + full));
        LG_TRY(read_full(f, V, t, at, n, to->v + full));
        full += n;
    }
    return 0;
}

int lg_checkpoint_read_moments(const char *dir, const lg_params *params, size_t first, size_t count,
                               const struct lg_chunk *to)
{
    lg_st_file *f;
    LG_ASSERT(to->count == count);
    LG_TRY(open_optimizer(dir, &f));
    lg_moments_clear(to);
    int rc = read_moments(f, params, first, count, to);
    lg_st_close(&f);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
