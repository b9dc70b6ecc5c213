/* See the header. The hash must stay what make_denoiser.py has. */
#include "tests/unit/denoiser_fixture.h"
#include "stages/io/safetensors.h"
#include "stages/stored.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void need(int rc)
{
    if (rc == 0) return;
    fprintf(stderr, "fixture: %s\n", lg_err_text());
    abort();
}

void golden_fill(const char *name, size_t count, double scale, double *ret)
{
    uint32_t seed = 2166136261u;
    for (const char *c = name; *c; c++) seed = (seed ^ (uint8_t)*c) * 16777619u;
    for (size_t i = 0; i < count; i++) {
        uint32_t h = (uint32_t)(i + 1) * 2654435761u + seed;
        h ^= h >> 15, h *= 2246822519u;
        h ^= h >> 13, h *= 3266489917u;
        h ^= h >> 16;
        ret[i] = (float)(scale * (2.0 * (((double)h + 0.5) * 0x1p-32) - 1.0));
    }
}

double *golden_read(const char *name, size_t count)
{
    return golden_read_of("tests/golden/denoiser.safetensors", name, count);
}

double *golden_read_of(const char *path, const char *name, size_t count)
{
    lg_st_file *f;
    need(lg_st_open(path, &f));
    const struct lg_st_entry *e = lg_st_find(f, name);
    size_t size = e && e->dtype == LG_F64 ? sizeof(double) : sizeof(float);
    if (!e || e->bytes != count * size || (e->dtype != LG_F64 && e->dtype != LG_F32)) {
        fprintf(stderr, "golden %s: %s\n", name, e ? "another size or type" : "missing");
        abort();
    }
    double *out = malloc(count * sizeof *out);
    LG_ASSERT(out);
    for (size_t i = 0; i < count; i++) {
        float v;
        if (e->dtype == LG_F64) {
            memcpy(&out[i], (const char *)e->data + i * size, size);
        } else {
            memcpy(&v, (const char *)e->data + i * size, size);
            out[i] = v;
        }
    }
    lg_st_close(&f);
    return out;
}

struct lg_denoiser_config denoiser_fixture_dit(void)
{
    return (struct lg_denoiser_config){.kind = LG_DIT,
                                       .channels = 4,
                                       .height = 8,
                                       .width = 8,
                                       .patch = 2,
                                       .hidden = 32,
                                       .depth = 2,
                                       .heads = 2,
                                       .mlp_ratio = 4,
                                       .num_classes = 5,
                                       .norm_eps = 1e-5};
}

struct lg_denoiser_config denoiser_fixture_pixart(void)
{
    return (struct lg_denoiser_config){.kind = LG_PIXART,
                                       .channels = 4,
                                       .height = 8,
                                       .width = 12,
                                       .patch = 2,
                                       .hidden = 48,
                                       .depth = 2,
                                       .heads = 3,
                                       .mlp_ratio = 4,
                                       .n_texts = 1,
                                       .text = {{.length = 6, .width = 20}},
                                       .norm_eps = 1e-6};
}

struct lg_denoiser_config denoiser_fixture_sd3(void)
{
    return (struct lg_denoiser_config){.kind = LG_SD3,
                                       .channels = 4,
                                       .height = 8,
                                       .width = 12,
                                       .patch = 2,
                                       .hidden = 48,
                                       .depth = 3,
                                       .heads = 3,
                                       .mlp_ratio = 4,
                                       .n_texts = 3,
                                       .text = {{.length = 3, .width = 12, .pooled = 10},
                                                {.length = 3, .width = 20, .pooled = 14},
                                                {.length = 5, .width = 40}},
                                       .norm_eps = 1e-6,
                                       .sample_size = 8,
                                       .positions_side = 9,
                                       .qk_norm = true,
                                       .dual = {3}};
}

double denoiser_fixture_get(const struct denoiser_fixture *f, const void *data, size_t i)
{
    return f->type == LG_F64 ? ((const double *)data)[i] : (double)((const float *)data)[i];
}

void denoiser_fixture_set(const struct denoiser_fixture *f, void *data, size_t i, double value)
{
    if (f->type == LG_F64)
        ((double *)data)[i] = value;
    else
        ((float *)data)[i] = (float)value;
}

static void *alloc(struct denoiser_fixture *f, size_t bytes)
{
    void *p;
    need(lg_device_alloc(f->device, bytes, &p));
    return p;
}

static void fill(const struct denoiser_fixture *f, void *data, const char *name, size_t count,
                 double scale)
{
    double *v = malloc(count * sizeof *v);
    LG_ASSERT(v);
    golden_fill(name, count, scale, v);
    for (size_t i = 0; i < count; i++) denoiser_fixture_set(f, data, i, v[i]);
    free(v);
}

size_t denoiser_fixture_place(const struct lg_param *p, size_t i)
{
    if (p->layout == LG_LAYOUT_FILE) return i;
    const size_t in = (size_t)p->dim[1], pixels = (size_t)(p->dim[2] * p->dim[3]);
    return (i / (in * pixels) * pixels + i % pixels) * in + i / pixels % in;
}

static double scale_of(const struct lg_param *p)
{
    return p->rank > 1 ? sqrt(3.0 / ((double)p->count / (double)p->dim[0])) : 0.3;
}

static void fill_stored(struct denoiser_fixture *f)
{
    const lg_params *t = &f->params;
    float *w = calloc(t->count, sizeof *w);
    LG_ASSERT(w);
    for (const struct lg_param *p = t->p; p < t->p + t->n; p++) {
        double *v = malloc(p->count * sizeof *v);
        LG_ASSERT(v);
        golden_fill(p->name, p->count, scale_of(p), v);
        for (size_t i = 0; i < p->count; i++)
            w[p->offset + denoiser_fixture_place(p, i)] = (float)v[i];
        free(v);
    }
    need(lg_stored_put(f->device,
                       &(struct lg_stored_piece){
                           .table = t, .values = w, .count = t->count, .memory = f->weights}));
    free(w);
}

static void fill_weights(struct denoiser_fixture *f)
{
    if (lg_storage_any(&f->params)) {
        fill_stored(f);
        return;
    }
    for (int i = 0; i < f->params.n; i++) {
        const struct lg_param *p = &f->params.p[i];
        double *v = malloc(p->count * sizeof *v);
        LG_ASSERT(v);
        golden_fill(p->name, p->count, scale_of(p), v);
        for (size_t e = 0; e < p->count; e++)
            denoiser_fixture_set(f, f->weights, p->offset + denoiser_fixture_place(p, e), v[e]);
        free(v);
    }
}

static void set_i32(lg_tensor t, const int32_t *v)
{
    memcpy(t.data, v, DENOISER_FIXTURE_BATCH * sizeof *v);
}

static void fill_sizes(struct denoiser_fixture *f)
{
    static const double sizes[] = {1024, 768, 333, 517, 64, 4096}, ratios[] = {1.3125, 0.5, 2.25};
    static const double all[] = {1024, 768, 0,   96, 512,  512, 333, 517,  40,
                                 0,    768, 512, 64, 4096, 7,   1,   1024, 1024};
    const size_t size = lg_dtype_bytes(f->type), k = (size_t)lg_denoiser_numbers(&f->config);
    enum { B = DENOISER_FIXTURE_BATCH };
    f->in.size = lg_t2(alloc(f, k * B * size), f->type, B, (int64_t)k);
    for (size_t i = 0; i < k * B; i++)
        denoiser_fixture_set(f, f->in.size.data, i, k == 2 ? sizes[i] : all[i]);
    if (!lg_denoiser_has_ratio(&f->config)) return;
    f->in.ratio = lg_t1(alloc(f, B * size), f->type, B);
    for (size_t i = 0; i < B; i++) denoiser_fixture_set(f, f->in.ratio.data, i, ratios[i]);
}

struct lg_denoiser_config denoiser_fixture_flux(void)
{
    return (struct lg_denoiser_config){.kind = LG_FLUX,
                                       .channels = 4,
                                       .height = 8,
                                       .width = 12,
                                       .patch = 2,
                                       .hidden = 48,
                                       .depth = 5,
                                       .heads = 3,
                                       .mlp_ratio = 4,
                                       .n_texts = 2,
                                       .text = {{.pooled = 10}, {.length = 5, .width = 40}},
                                       .norm_eps = 1e-6,
                                       .singles = 3,
                                       .axes = {4, 4, 8},
                                       .guidance = true};
}

struct lg_denoiser_config denoiser_fixture_sd2(void)
{
    struct lg_denoiser_config c = {.kind = LG_SD2,
                                   .channels = 4,
                                   .height = 7,
                                   .width = 9,
                                   .patch = 1,
                                   .hidden = 8,
                                   .heads = 1,
                                   .mlp_ratio = 4,
                                   .n_texts = 1,
                                   .text = {{.length = 5, .width = 20}},
                                   .norm_eps = 1e-5,
                                   .sample_size = 8,
                                   .unet = {.levels = 3,
                                            .layers = 1,
                                            .channels = {8, 16, 16},
                                            .heads = {1, 2, 4},
                                            .depths = {1, 1, 0},
                                            .middle_depth = 1,
                                            .groups = 4}};
    c.depth = lg_unet_blocks(&c.unet);
    return c;
}

struct lg_denoiser_config denoiser_fixture_sdxl(void)
{
    struct lg_denoiser_config c = {
        .kind = LG_SDXL,
        .channels = 4,
        .height = 5,
        .width = 6,
        .patch = 1,
        .hidden = 8,
        .heads = 1,
        .mlp_ratio = 4,
        .n_texts = 2,
        .text = {{.length = 5, .width = 12}, {.length = 5, .width = 20, .pooled = 14}},
        .norm_eps = 1e-5,
        .sample_size = 8,
        .size_conditions = true,
        .unet = {.levels = 2,
                 .layers = 2,
                 .channels = {8, 16},
                 .heads = {1, 2},
                 .depths = {0, 2},
                 .middle_depth = 2,
                 .groups = 4,
                 .number_waves = 6}};
    c.depth = lg_unet_blocks(&c.unet);
    return c;
}

struct lg_denoiser_config denoiser_fixture_latte(void)
{
    return (struct lg_denoiser_config){.kind = LG_LATTE,
                                       .channels = 4,
                                       .frames = 3,
                                       .height = 6,
                                       .width = 10,
                                       .patch = 2,
                                       .hidden = 24,
                                       .depth = 2,
                                       .heads = 3,
                                       .mlp_ratio = 4,
                                       .n_texts = 1,
                                       .text = {{.length = 6, .width = 20}},
                                       .norm_eps = 1e-6,
                                       .learned_variance = true,
                                       .sample_size = 8};
}

struct lg_denoiser_config denoiser_fixture_ltx(void)
{
    return (struct lg_denoiser_config){.kind = LG_LTX,
                                       .channels = 4,
                                       .frames = 3,
                                       .height = 5,
                                       .width = 7,
                                       .patch = 1,
                                       .hidden = 32,
                                       .depth = 2,
                                       .heads = 2,
                                       .mlp_ratio = 4,
                                       .n_texts = 1,
                                       .text = {{.length = 6, .width = 20}},
                                       .norm_eps = 1e-6};
}

/* "text", "text1" .., "pooled", "pooled1" .. */
static lg_tensor new_text(struct denoiser_fixture *f, const char *what, int k, lg_tensor shape)
{
    char name[16];
    snprintf(name, sizeof name, k ? "%s%d" : "%s", what, k);
    shape.data = alloc(f, lg_tensor_bytes(&shape));
    fill(f, shape.data, name, (size_t)lg_numel(&shape), 1.0);
    return shape;
}

static void fill_texts(struct denoiser_fixture *f, const int32_t *lengths)
{
    enum { B = DENOISER_FIXTURE_BATCH };
    const struct lg_denoiser_text_info *has;
    lg_denoiser_texts(f->config.kind, &has);
    for (int k = 0; k < f->config.n_texts; k++) {
        const struct lg_denoiser_text *c = &f->config.text[k];
        struct lg_text_states *t = &f->in.text[k];
        if (c->length)
            t->states = new_text(f, "text", k, lg_t3(NULL, f->type, B, c->length, c->width));
        if (c->pooled) t->pooled = new_text(f, "pooled", k, lg_t2(NULL, f->type, B, c->pooled));
        if (has[k].padding == LG_PADDING_SEEN) continue;
        t->length = lg_t1(alloc(f, B * sizeof *lengths), LG_I32, B);
        set_i32(t->length, lengths);
    }
}

double denoiser_fixture_frame_time(const struct denoiser_fixture *f, int64_t b, int64_t i)
{
    static const double dit_t[] = {999, 0, 421}, pixart_t[] = {812.5, 3.25, 500};
    const double t = f->config.kind == LG_DIT ? dit_t[b] : pixart_t[b];
    return f->frame_times ? t * (double)i / (f->config.frames - 1) : t;
}

static void fill_inputs(struct denoiser_fixture *f)
{
    static const int32_t labels[] = {2, 5, 0}, lengths[] = {6, 1, 4};
    const struct lg_denoiser_config *c = &f->config;
    const int64_t B = DENOISER_FIXTURE_BATCH, rows = lg_denoiser_rows(c);
    size_t size = lg_dtype_bytes(f->type), n = (size_t)(c->channels * rows * c->width);
    size_t bytes = (size_t)B * n * size;
    f->in.x = lg_t4(alloc(f, bytes), f->type, B, c->channels, rows, c->width);
    f->out = lg_t4(NULL, f->type, B, lg_denoiser_out_channels(c), rows, c->width);
    f->dout = f->out;
    f->out.data = alloc(f, lg_tensor_bytes(&f->out));
    f->dout.data = alloc(f, lg_tensor_bytes(&f->dout));
    fill(f, f->in.x.data, "x", (size_t)B * n, 1.5);
    fill(f, f->dout.data, "dout", (size_t)lg_numel(&f->dout), 1.0);
    if (c->size_conditions) fill_sizes(f);
    if (c->guidance) {
        static const double scales[] = {3500, 1000, 0};
        f->in.guidance = lg_t1(alloc(f, (size_t)B * size), f->type, B);
        for (size_t i = 0; i < (size_t)B; i++)
            denoiser_fixture_set(f, f->in.guidance.data, i, scales[i]);
    }
    const int64_t times = f->frame_times ? c->frames : 1;
    f->in.t = lg_t1(alloc(f, (size_t)(B * times) * size), f->type, B * times);
    for (int64_t i = 0; i < B * times; i++)
        denoiser_fixture_set(f, f->in.t.data, (size_t)i,
                             denoiser_fixture_frame_time(f, i / times, i % times));
    if (c->kind == LG_DIT) {
        f->in.label = lg_t1(alloc(f, sizeof labels), LG_I32, B);
        set_i32(f->in.label, labels);
        return;
    }
    fill_texts(f, lengths);
}

static void keep_first(lg_tensor *t, int64_t batch)
{
    if (t->rank) *t = lg_slice(*t, 0, 0, t->dim[0] / DENOISER_FIXTURE_BATCH * batch);
}

static void keep_samples(struct denoiser_fixture *f, int64_t batch)
{
    struct lg_denoiser_input *in = &f->in;
    lg_tensor *const all[] = {&in->x,     &in->t,        &in->label, &in->size,
                              &in->ratio, &in->guidance, &f->out,    &f->dout};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) keep_first(all[i], batch);
    for (size_t k = 0; k < LG_ARRAY_LEN(in->text); k++) {
        keep_first(&in->text[k].states, batch);
        keep_first(&in->text[k].pooled, batch);
        keep_first(&in->text[k].length, batch);
    }
}

static void open_mode(struct denoiser_fixture *f, const char *device, const char *isa,
                      const struct lg_denoiser_config *c, const struct lg_denoiser_mode *mode)
{
    *f = (struct denoiser_fixture){.config = *c, .frame_times = mode->frame_times};
    need(lg_device_open(device, &(struct lg_device_options){.threads = 1, .isa = isa}, &f->device));
    LG_ASSERT(lg_device_is_host(f->device));
    f->type = lg_device_dtype(f->device);
    need(lg_stream_open(f->device, &f->stream));
    need(lg_denoiser_table(c, &mode->training, &f->params));
    need(lg_denoiser_open(f->device, c, mode, &f->net));
    f->weights = alloc(f, lg_stored_bytes(&f->params, f->type));
    f->grads = alloc(f, f->params.count * lg_dtype_bytes(f->type));
    fill_weights(f);
    fill_inputs(f);
    keep_samples(f, mode->batch);
}

void denoiser_fixture_open_mode(struct denoiser_fixture *f, const char *device,
                                const struct lg_denoiser_config *c,
                                const struct lg_denoiser_mode *mode)
{
    open_mode(f, device, NULL, c, mode);
}

void denoiser_fixture_open(struct denoiser_fixture *f, const char *device, const char *isa,
                           const struct lg_denoiser_config *c, bool train)
{
    const struct lg_denoiser_mode mode = {.batch = DENOISER_FIXTURE_BATCH, .train = train};
    open_mode(f, device, isa, c, &mode);
}

void denoiser_fixture_open_frames(struct denoiser_fixture *f, const char *device,
                                  const struct lg_denoiser_config *c)
{
    const struct lg_denoiser_mode mode = {
        .batch = DENOISER_FIXTURE_BATCH, .train = true, .frame_times = true};
    open_mode(f, device, NULL, c, &mode);
}

void denoiser_fixture_open_trained(struct denoiser_fixture *f, const char *device,
                                   const struct lg_denoiser_config *c,
                                   const struct lg_training *training, const char *const *recompute)
{
    const struct lg_denoiser_mode mode = {.batch = DENOISER_FIXTURE_BATCH,
                                          .train = true,
                                          .training = *training,
                                          .recompute = recompute};
    open_mode(f, device, NULL, c, &mode);
}

int denoiser_fixture_recompute(struct denoiser_fixture *f, const char *const *words)
{
    return denoiser_fixture_chunks(f, words, 1);
}

int denoiser_fixture_chunks(struct denoiser_fixture *f, const char *const *words, int chunks)
{
    const struct lg_denoiser_mode mode = {.batch = DENOISER_FIXTURE_BATCH,
                                          .train = true,
                                          .recompute = words,
                                          .mlp_chunks = chunks,
                                          .frame_times = f->frame_times};
    lg_denoiser_close(&f->net);
    return lg_denoiser_open(f->device, &f->config, &mode, &f->net);
}

void denoiser_fixture_close(struct denoiser_fixture *f)
{
    lg_denoiser_close(&f->net);
    lg_params_free(&f->params);
    lg_stream_close(&f->stream);
    lg_device_close(&f->device);
}

void denoiser_fixture_forward(struct denoiser_fixture *f)
{
    lg_denoiser_forward(f->net, f->stream, f->weights, &f->in, f->out);
    lg_stream_sync(f->stream);
}

void denoiser_fixture_backward(struct denoiser_fixture *f, bool accumulate)
{
    lg_denoiser_backward(f->net, f->stream, f->weights, &f->in, f->dout, f->grads, accumulate);
    lg_stream_sync(f->stream);
}

struct distance denoiser_fixture_distance(const struct denoiser_fixture *f, const void *data,
                                          const double *want, size_t count)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        double e = denoiser_fixture_get(f, data, i) - want[i];
        diff += e * e;
        norm += want[i] * want[i];
    }
    return (struct distance){sqrt(diff), sqrt(norm)};
}

/* ---- golden files ---- */

/* The values of a parameter's gradient, in the order of the golden file. */
static double *gradient_of(const struct denoiser_fixture *f, const struct lg_param *p)
{
    double *v = malloc(p->count * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < p->count; i++)
        v[i] = denoiser_fixture_get(f, f->grads, p->offset + denoiser_fixture_place(p, i));
    return v;
}

static int check_golden(const struct denoiser_golden *g, const char *what, const double *got,
                        size_t count)
{
    char name[2 * LG_PARAM_NAME_BYTES];
    double diff = 0, norm = 0;
    snprintf(name, sizeof name, "%s.%s", g->net, what);
    double *want = golden_read_of(g->path, name, count);
    for (size_t i = 0; i < count; i++) {
        diff += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    free(want);
    if (sqrt(diff) <= g->tolerance * fmax(sqrt(norm), 0.3)) return 0;
    printf("  %s: distance %.3e, norm %.3e\n", name, sqrt(diff), sqrt(norm));
    return 1;
}

static int check_gradients(const struct denoiser_fixture *f, const struct denoiser_golden *g)
{
    int wrong = 0;
    for (int i = 0; i < f->params.trained; i++) {
        const struct lg_param *p = &f->params.p[i];
        char what[LG_PARAM_NAME_BYTES + 8];
        double *v = gradient_of(f, p);
        snprintf(what, sizeof what, "grad.%s", p->name);
        wrong += check_golden(g, what, v, p->count);
        free(v);
    }
    return wrong;
}

static int check_output(const struct denoiser_fixture *f, const struct denoiser_golden *g)
{
    const size_t n = (size_t)lg_numel(&f->out);
    double *v = malloc(n * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < n; i++) v[i] = denoiser_fixture_get(f, f->out.data, i);
    int wrong = check_golden(g, "out", v, n);
    free(v);
    return wrong;
}

int denoiser_fixture_compare(const char *device, const struct lg_denoiser_config *c,
                             const struct denoiser_golden *g)
{
    struct denoiser_fixture f;
    if (g->frame_times)
        denoiser_fixture_open_frames(&f, device, c);
    else
        denoiser_fixture_open(&f, device, NULL, c, true);
    denoiser_fixture_forward(&f);
    int wrong = check_output(&f, g);
    denoiser_fixture_backward(&f, false);
    if (g->gradients) wrong += check_gradients(&f, g);
    denoiser_fixture_close(&f);
    return wrong;
}
