/* See weights.h. */
#include "stages/tools/random/weights.h"
#include "base/fs.h"
#include "stages/io/safetensors.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 1 << 16 }; /* elements that are made at once */

void lg_random_set_deviation(struct lg_param *p, double deviation)
{
    p->init = LG_INIT_UNIFORM;
    p->init_scale = deviation * sqrt(3.0);
}

double lg_random_fan_in(const struct lg_param *p)
{
    double n = 1;
    for (int i = 1; i < p->rank; i++) n *= (double)p->dim[i];
    return n;
}

bool lg_random_ends_with(const struct lg_param *p, const char *end)
{
    size_t n = strlen(p->name), e = strlen(end);
    return n >= e && !strcmp(p->name + n - e, end);
}

/* Round to nearest, ties to even. */
static uint16_t bf16_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static const void *convert(const float *x, size_t n, lg_dtype to, void *room)
{
    if (to == LG_F32) return x;
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        if (to == LG_BF16) {
            h = bf16_of(x[i]);
        } else {
            _Float16 f = (_Float16)x[i];
            memcpy(&h, &f, sizeof h);
        }
        memcpy((char *)room + 2 * i, &h, sizeof h);
    }
    return room;
}

/* In file order. */
static int write_data(lg_st_writer *w, const struct lg_random_model *m, const lg_params *t)
{
    float *x = malloc(CHUNK * sizeof *x);
    uint16_t *room = malloc(CHUNK * sizeof *room);
    LG_ASSERT(x && room);
    int rc = 0;
    for (int i = 0; i < t->n && rc == 0; i++) {
        const struct lg_param *p = &t->p[i];
        for (size_t from = 0, n; from < p->count && rc == 0; from += n) {
            n = LG_MIN(p->count - from, (size_t)CHUNK);
            lg_params_init(t, m->seed, x, p->offset + from, n);
            rc = lg_st_writer_data(w, convert(x, n, m->dtype, room), n * lg_dtype_bytes(m->dtype));
        }
    }
    free(x);
    free(room);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

int lg_random_weights_write(const struct lg_random_model *m, const char *name, const lg_params *t)
{
    char path[LG_PATH_BYTES];
    lg_st_writer *w = NULL;
    int rc;
    LG_TRY(lg_path(path, "%s/%s", m->dir, name));
    LG_TRY(lg_st_writer_open(path, &w));
    LG_TRY_GOTO(rc, lg_st_writer_metadata(w, "format", "pt"), fail);
    for (int i = 0; i < t->n; i++)
        LG_TRY_GOTO(rc, lg_st_writer_declare(w, t->p[i].name, m->dtype, t->p[i].rank, t->p[i].dim),
                    fail);
    LG_TRY_GOTO(rc, write_data(w, m, t), fail);
    LG_TRY(lg_st_writer_finish(&w, NULL));
    return 0;
fail:
    lg_st_writer_abort(&w);
    return rc;
}
