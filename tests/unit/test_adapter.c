/* Low-rank adapters: what a net computes with one is what it computes with the product added to its weights; gradients against
 * finite differences; files that come back, and those that cannot be used. */
#include "base/fs.h"
#include "stages/io/safetensors.h"
#include "stages/nets/adapter_file.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/scratch.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const ATTENTION[] = {NULL}, *const LINEAR[] = {"linear", NULL},
                         *const SOME[] = {"*.0.attn1.to_v", "*.1.ff.net.0.proj", "*norm1.linear",
                                          "*.attn2.to_k",   "*.attn1.to_out.0",  NULL},
                         *const DIT_SOME[] = {"*.0.attn1.to_v", "*.1.norm1.linear", NULL};

static struct lg_training training_of(const char *const *targets, double alpha)
{
    return (struct lg_training){.adapter = {.rank = 2, .alpha = alpha, .targets = targets}};
}

static const struct lg_param *find(const lg_params *t, const char *fmt, const char *module)
{
    char name[2 * LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, fmt, module);
    int i = lg_params_find(t, name);
    assert_true(i >= 0);
    return &t->p[i];
}

/* Every linear's W of the plain net becomes W + scale B A of the adapted one. Returns how many. */
static int merge(const struct denoiser_fixture *adapted, const struct denoiser_fixture *plain,
                 double scale)
{
    int merged = 0;
    const lg_params *t = &adapted->params;
    for (int i = 0; i < t->trained; i++) {
        char module[LG_PARAM_NAME_BYTES];
        const size_t n = strlen(t->p[i].name), tail = sizeof LG_ADAPTER_DOWN - 1;
        if (strcmp(t->p[i].name + n - tail, LG_ADAPTER_DOWN)) continue;
        snprintf(module, sizeof module, "%.*s", (int)(n - tail), t->p[i].name);
        const struct lg_param *a = &t->p[i], *b = find(t, "%s" LG_ADAPTER_UP, module),
                              *w = find(&plain->params, "%s.weight", module);
        for (int64_t r = 0; r < w->dim[0]; r++)
            for (int64_t k = 0; k < w->dim[1]; k++) {
                const size_t at = w->offset + (size_t)(r * w->dim[1] + k);
                double sum = denoiser_fixture_get(plain, plain->weights, at);
                for (int64_t j = 0; j < a->dim[0]; j++)
                    sum += scale *
                           denoiser_fixture_get(adapted, adapted->weights,
                                                b->offset + (size_t)(r * a->dim[0] + j)) *
                           denoiser_fixture_get(adapted, adapted->weights,
                                                a->offset + (size_t)(j * a->dim[1] + k));
                denoiser_fixture_set(plain, plain->weights, at, sum);
            }
        merged++;
    }
    return merged;
}

static void compare_outs(const struct denoiser_fixture *a, const struct denoiser_fixture *b,
                         double most)
{
    double norm = 0, diff = 0;
    for (size_t i = 0; i < (size_t)lg_numel(&a->out); i++) {
        const double x = denoiser_fixture_get(a, a->out.data, i),
                     y = denoiser_fixture_get(b, b->out.data, i);
        norm += x * x;
        diff += (x - y) * (x - y);
    }
    if (!(sqrt(diff) <= most * sqrt(norm))) fail_msg("%g of %g", sqrt(diff), sqrt(norm));
}

static void check_merged(const char *device, const struct lg_denoiser_config *c,
                         const char *const *targets, int linears)
{
    const struct lg_training training = training_of(targets, 3);
    struct denoiser_fixture adapted, plain;
    denoiser_fixture_open_trained(&adapted, device, c, &training, NULL);
    denoiser_fixture_open(&plain, device, NULL, c, false);
    assert_int_equal(merge(&adapted, &plain, 1.5), linears);
    assert_int_equal(adapted.params.trained, 2 * linears);
    denoiser_fixture_forward(&adapted);
    denoiser_fixture_forward(&plain);
    compare_outs(&adapted, &plain, adapted.type == LG_F64 ? 1e-12 : 1e-5);
    denoiser_fixture_close(&adapted);
    denoiser_fixture_close(&plain);
}

static void test_is_an_addition_to_weights(void **state)
{
    (void)state;
    const struct lg_denoiser_config dit = denoiser_fixture_dit(),
                                    pixart = denoiser_fixture_pixart(),
                                    sd3 = denoiser_fixture_sd3(), flux = denoiser_fixture_flux(),
                                    sd2 = denoiser_fixture_sd2(), sdxl = denoiser_fixture_sdxl();
    static const char *const devices[] = {"ref64", "host"};
    for (int d = 0; d < 2; d++) {
        check_merged(devices[d], &dit, ATTENTION, 4 * dit.depth);
        check_merged(devices[d], &dit, LINEAR, 7 * dit.depth + 2); /* the embedder is block 0's */
        check_merged(devices[d], &dit, DIT_SOME, 2);
        check_merged(devices[d], &pixart, ATTENTION, 8 * pixart.depth);
        check_merged(devices[d], &pixart, LINEAR, 10 * pixart.depth);
        /* Both streams; a second attention in the first two blocks; no text leaves the last. */
        check_merged(devices[d], &sd3, ATTENTION, 8 * 3 + 4 * 2 - 2);
        check_merged(devices[d], &sd3, LINEAR, 14 * 3 + 4 * 2 - 4);
        check_merged(devices[d], &flux, ATTENTION,
                     8 * 2 + 3 * 3); /* blocks of two streams, of one */
        check_merged(devices[d], &flux, LINEAR, 14 * 2 + 6 * 3);
        /* Seven transformers of a block; six of two. */
        check_merged(devices[d], &sd2, ATTENTION, 8 * 7);
        check_merged(devices[d], &sd2, LINEAR, (10 + 2) * 7);
        check_merged(devices[d], &sdxl, LINEAR, (20 + 2) * 6);
    }
}

static double loss_of(struct denoiser_fixture *f)
{
    double sum = 0;
    denoiser_fixture_forward(f);
    for (size_t i = 0; i < (size_t)lg_numel(&f->out); i++)
        sum += denoiser_fixture_get(f, f->out.data, i) * denoiser_fixture_get(f, f->dout.data, i);
    return sum;
}

/* Of every parameter's gradient along one direction in which no element is left out. */
static double direction(size_t k)
{
    return (k * 2654435761u >> 16 & 1) ? 1 : -1;
}

static void move(struct denoiser_fixture *f, const struct lg_param *p, double step)
{
    const double by = step / sqrt((double)p->count);
    for (size_t k = 0; k < p->count; k++)
        denoiser_fixture_set(f, f->weights, p->offset + k,
                             denoiser_fixture_get(f, f->weights, p->offset + k) +
                                 by * direction(k));
}

static void check_gradients(const struct lg_denoiser_config *c, const char *const *targets,
                            const char *const *recompute)
{
    const double step = 1e-5;
    const struct lg_training training = training_of(targets, 3);
    struct denoiser_fixture f;
    denoiser_fixture_open_trained(&f, "ref64", c, &training, recompute);
    denoiser_fixture_forward(&f);
    denoiser_fixture_backward(&f, false);
    for (int i = 0; i < f.params.trained; i++) {
        const struct lg_param *p = &f.params.p[i];
        double got = 0;
        for (size_t k = 0; k < p->count; k++)
            got += denoiser_fixture_get(&f, f.grads, p->offset + k) * direction(k) /
                   sqrt((double)p->count);
        move(&f, p, step);
        double up = loss_of(&f);
        move(&f, p, -2 * step);
        double fd = (up - loss_of(&f)) / (2 * step);
        move(&f, p, step);
        if (!(fabs(got - fd) <= 1e-6 * (1 + fabs(fd))))
            fail_msg("%s: %.12g, by differences %.12g", p->name, got, fd);
    }
    denoiser_fixture_close(&f);
}

static void test_gradients(void **state)
{
    (void)state;
    static const char *const block[] = {"block", NULL};
    const struct lg_denoiser_config dit = denoiser_fixture_dit(),
                                    pixart = denoiser_fixture_pixart(),
                                    sd3 = denoiser_fixture_sd3(), flux = denoiser_fixture_flux();
    check_gradients(&sd3, ATTENTION, block);
    check_gradients(&sd3, LINEAR, NULL);
    check_gradients(&flux, ATTENTION, block);
    check_gradients(&flux, LINEAR, NULL);
    check_gradients(&dit, LINEAR, NULL);
    check_gradients(&dit, DIT_SOME, block);
    check_gradients(&pixart, ATTENTION, NULL);
    check_gradients(&pixart, LINEAR, block);
}

static void test_changes_nothing_at_first(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = denoiser_fixture_pixart();
    const struct lg_training training = training_of(LINEAR, 16);
    struct denoiser_fixture adapted, plain;
    denoiser_fixture_open_trained(&adapted, "ref64", &c, &training, NULL);
    denoiser_fixture_open(&plain, "ref64", NULL, &c, false);
    const lg_params t = lg_params_trained(&adapted.params);
    float *first = malloc(t.count * sizeof *first);
    lg_params_init(&t, 7, first, 0, t.count);
    double most = 0;
    for (int i = 0; i < t.n; i++)
        for (size_t e = 0; e < t.p[i].count; e++) {
            const double v = (double)first[t.p[i].offset + e];
            denoiser_fixture_set(&adapted, adapted.weights, t.p[i].offset + e, v);
            if (strstr(t.p[i].name, "attn1.to_q" LG_ADAPTER_DOWN)) most = fmax(most, fabs(v));
        }
    assert_true(most <= 1 / sqrt(c.hidden) && most > 0.9 / sqrt(c.hidden));
    denoiser_fixture_forward(&adapted);
    denoiser_fixture_forward(&plain);
    compare_outs(&adapted, &plain, 1e-14);
    free(first);
    denoiser_fixture_close(&adapted);
    denoiser_fixture_close(&plain);
}

static void test_targets(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = denoiser_fixture_dit();
    struct lg_training training =
        training_of((const char *const[]){"*.attn1.to_q", "*.attn2.to_q", NULL}, 2);
    lg_params t;
    assert_int_equal(lg_denoiser_table(&c, &training, &t), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "\"*.attn2.to_q\" fits none of the model's linears"));
    training = training_of(SOME, 2);
    assert_int_equal(lg_denoiser_table(&c, &training, &t), LG_ERR_CONFIG);
    training = (struct lg_training){.groups = (const char *const[]){"* frozen", NULL}};
    assert_int_equal(lg_denoiser_table(&c, &training, &t), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "everything is frozen"));
    /* The adapter's own parameters can be trained in groups. */
    training = training_of(ATTENTION, 2);
    training.groups = (const char *const[]){"*.lora_B.weight lr=16", NULL};
    assert_int_equal(lg_denoiser_table(&c, &training, &t), 0);
    for (int i = 0; i < t.trained; i++)
        assert_int_equal(t.p[i].group, strstr(t.p[i].name, LG_ADAPTER_UP) ? 1 : 0);
    lg_params_free(&t);
    lg_err_clear();
}

/* ---- files ---- */

struct files {
    struct lg_denoiser_config c;
    struct lg_training training;
    lg_params all, t, whole;
    float *w, *base; /* the adapter's, the net's */
    char dir[LG_PATH_BYTES], base_dir[LG_PATH_BYTES];
    bool older_names; /* write_file: diffusers' before peft */
};

static float *random_floats(const lg_params *t)
{
    float *w = calloc(t->count, sizeof *w);
    for (int i = 0; i < t->n; i++) {
        double *v = malloc(t->p[i].count * sizeof *v);
        golden_fill(t->p[i].name, t->p[i].count, 0.5, v);
        for (size_t e = 0; e < t->p[i].count; e++) w[t->p[i].offset + e] = (float)v[e];
        free(v);
    }
    return w;
}

static void files_open(struct files *f)
{
    *f = (struct files){.c = denoiser_fixture_dit(), .training = training_of(LINEAR, 3)};
    scratch_make();
    snprintf(f->dir, sizeof f->dir, "%s", scratch_path("adapter"));
    snprintf(f->base_dir, sizeof f->base_dir, "%s", scratch_path("base"));
    assert_int_equal(lg_mkdirs(f->dir), 0);
    assert_int_equal(lg_mkdirs(f->base_dir), 0);
    assert_int_equal(lg_denoiser_table(&f->c, &f->training, &f->all), 0);
    assert_int_equal(lg_denoiser_params(&f->c, &f->whole), 0);
    f->t = lg_params_trained(&f->all);
    f->w = random_floats(&f->t);
    f->base = random_floats(&f->whole);
    assert_int_equal(
        lg_denoiser_save(&f->c, f->base_dir,
                         &(struct lg_denoiser_weights){.t = &f->whole, .trained = f->base}),
        0);
    assert_int_equal(lg_adapter_save(&f->training.adapter, f->base_dir, &f->t, f->dir, f->w), 0);
}

static void files_close(struct files *f)
{
    free(f->w);
    free(f->base);
    lg_params_free(&f->all);
    lg_params_free(&f->whole);
    scratch_remove();
    lg_err_clear();
}

static void test_files(void **state)
{
    (void)state;
    struct files f;
    files_open(&f);
    float *back = malloc(f.whole.count * sizeof *back);
    char base[LG_PATH_BYTES], path[LG_PATH_BYTES];
    assert_true(lg_adapter_is(f.dir));
    assert_false(lg_adapter_is(f.base_dir));
    assert_int_equal(lg_adapter_load(&f.t, f.dir, back), 0);
    assert_memory_equal(back, f.w, f.t.count * sizeof *back);
    assert_int_equal(lg_adapter_base(f.dir, base), 0);
    assert_string_equal(base, f.base_dir);
    assert_int_equal(lg_path(path, "%s/" LG_ADAPTER_WEIGHTS, f.dir), 0);
    lg_st_file *st;
    assert_int_equal(lg_st_open(path, &st), 0);
    const struct lg_st_entry *e =
        lg_st_find(st, "transformer.transformer_blocks.1.ff.net.0.proj.lora_B.weight");
    assert_non_null(e);
    assert_int_equal(e->dim[0], 4 * f.c.hidden);
    assert_int_equal(e->dim[1], 2);
    const char *meta = lg_st_metadata(st, "lora_adapter_metadata");
    assert_non_null(strstr(meta, "\"transformer.lora_alpha\":3,"));
    assert_non_null(strstr(meta, "\"transformer_blocks.0.attn1.to_q\""));
    lg_st_close(&st);
    /* Merged: a linear that is adapted, and one that is not. */
    assert_int_equal(lg_whole_load(&f.c, f.dir, back), 0);
    const struct lg_param *w = find(&f.whole, "%s.weight", "transformer_blocks.1.ff.net.2"),
                          *a = find(&f.t, "%s" LG_ADAPTER_DOWN, "transformer_blocks.1.ff.net.2"),
                          *b = find(&f.t, "%s" LG_ADAPTER_UP, "transformer_blocks.1.ff.net.2");
    for (int64_t r = 0; r < w->dim[0]; r++)
        for (int64_t k = 0; k < w->dim[1]; k++) {
            const size_t at = w->offset + (size_t)(r * w->dim[1] + k);
            double want = (double)f.base[at];
            for (int j = 0; j < 2; j++)
                want += 1.5 * (double)f.w[b->offset + (size_t)(2 * r + j)] *
                        (double)f.w[a->offset + (size_t)(j * w->dim[1] + k)];
            assert_true(fabs((double)back[at] - want) <= 1e-6);
        }
    w = find(&f.whole, "%s.weight", "proj_out_1");
    assert_memory_equal(back + w->offset, f.base + w->offset, w->count * sizeof *back);
    free(back);
    files_close(&f);
}

/* ---- the file that a run begins with ---- */

struct tensor {
    const char *name;
    int rank;
    int64_t dim[2];
    const float *data;
};

/* f's adapter in diffusers' layout, with tensors beside. */
static const char *write_file(const struct files *f, const char *metadata,
                              const struct tensor *more, int n)
{
    const char *path = scratch_path("begin.safetensors");
    lg_st_writer *w;
    assert_int_equal(lg_st_writer_open(path, &w), 0);
    if (metadata) assert_int_equal(lg_st_writer_metadata(w, "lora_adapter_metadata", metadata), 0);
    for (int i = 0; i < f->t.n; i++) {
        char name[LG_PARAM_NAME_BYTES + 16];
        const char *own = f->t.p[i].name;
        const size_t half = strlen(own) - strlen(LG_ADAPTER_DOWN);
        if (f->older_names)
            snprintf(name, sizeof name, "transformer.%.*s%s", (int)half, own,
                     strcmp(own + half, LG_ADAPTER_DOWN) ? ".lora.up.weight" : ".lora.down.weight");
        else
            snprintf(name, sizeof name, "transformer.%s", own);
        assert_int_equal(lg_st_writer_declare(w, name, LG_F32, 2, f->t.p[i].dim), 0);
    }
    for (int i = 0; i < n; i++)
        assert_int_equal(lg_st_writer_declare(w, more[i].name, LG_F32, more[i].rank, more[i].dim),
                         0);
    for (int i = 0; i < f->t.n; i++)
        assert_int_equal(
            lg_st_writer_data(w, f->w + f->t.p[i].offset, f->t.p[i].count * sizeof(float)), 0);
    for (int i = 0; i < n; i++) assert_int_equal(lg_st_writer_data(w, more[i].data, 4), 0);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
    return path;
}

/* What it becomes in a run of the files' rank, 2, and alpha, 3: A as it is, B of `module` times `own`, of the others times
 * `scale`. */
static void expect_begin(const struct files *f, const char *path, double scale, const char *module,
                         double own)
{
    const struct lg_adapter_start s = {&f->c, &f->training.adapter, path};
    float *got = malloc(f->t.count * sizeof *got);
    if (lg_adapter_begin(&s, &f->t, got) < 0) fail_msg("%s", lg_err_text());
    for (int i = 0; i < f->t.n; i++) {
        const struct lg_param *p = &f->t.p[i];
        const bool up = strstr(p->name, LG_ADAPTER_UP), named = module && strstr(p->name, module);
        const double factor = !up ? 1 : named ? own : scale;
        for (size_t e = p->offset; e < p->offset + p->count; e++)
            if (got[e] != (float)(factor * (double)f->w[e]))
                fail_msg("%s: %g, not %g times %g", p->name, (double)got[e], factor,
                         (double)f->w[e]);
    }
    free(got);
}

static void refused_begin(const struct files *f, const char *path, const char *why)
{
    const struct lg_adapter_start s = {&f->c, &f->training.adapter, path};
    float *got = malloc(f->t.count * sizeof *got);
    assert_int_equal(lg_adapter_begin(&s, &f->t, got), LG_ERR_MISMATCH);
    if (!strstr(lg_err_message(), why)) fail_msg("%s: not %s", lg_err_message(), why);
    lg_err_clear();
    free(got);
}

static void test_begins_with_a_file(void **state)
{
    (void)state;
    static const char q[] = "transformer_blocks.0.attn1.to_q";
    static const float one = 1;
    const struct tensor alpha[] =
        {{"transformer.transformer_blocks.0.attn1.to_q.alpha", 0, {0}, &one}},
                        text[] = {{"text_encoder.x.lora_A.weight", 1, {1}, &one}},
                        magnitude[] = {{"transformer.transformer_blocks.0.attn1.to_q."
                                        "lora_magnitude_vector",
                                        1,
                                        {1},
                                        &one}};
    struct files f;
    char path[LG_PATH_BYTES];
    files_open(&f);
    assert_int_equal(lg_path(path, "%s/" LG_ADAPTER_WEIGHTS, f.dir), 0);
    expect_begin(&f, path, 1, NULL, 0);
    /* alpha / rank is 1 in a file that says nothing, 3 / 2 in the run. */
    expect_begin(&f, write_file(&f, NULL, NULL, 0), 2.0 / 3, NULL, 0);
    expect_begin(&f, write_file(&f, "{\"transformer.r\":2,\"transformer.lora_alpha\":12}", NULL, 0),
                 4, NULL, 0);
    expect_begin(&f,
                 write_file(&f, "{\"transformer.r\":2,\"transformer.lora_alpha\":12}", alpha, 1), 4,
                 q, 1.0 / 3);
    f.older_names = true;
    expect_begin(&f, write_file(&f, NULL, alpha, 1), 2.0 / 3, q, 1.0 / 3);
    refused_begin(&f, write_file(&f, NULL, text, 1), "text_encoder.x.lora_A.weight is none");
    f.older_names = false;
    refused_begin(&f, write_file(&f, NULL, text, 1),
                  "tensor text_encoder.x.lora_A.weight is none of this adapter's");
    refused_begin(&f, write_file(&f, NULL, magnitude, 1), "lora_magnitude_vector is none");
    refused_begin(&f, write_file(&f, "{\"transformer.alpha_pattern\":{\"to_q\":3}}", NULL, 0),
                  "has transformer.alpha_pattern, which cannot be read");
    refused_begin(&f, write_file(&f, "{\"transformer.use_rslora\":true}", NULL, 0), "use_rslora");
    refused_begin(&f, write_file(&f, "alpha", NULL, 0), "is no JSON");
    /* In kohya's layout, of another alpha than the run's. */
    assert_int_equal(lg_adapter_export_kohya(f.dir, scratch_path("kohya.safetensors")), 0);
    expect_begin(&f, scratch_path("kohya.safetensors"), 1, NULL, 0);
    f.training.adapter.alpha = 6;
    expect_begin(&f, scratch_path("kohya.safetensors"), 0.5, NULL, 0);
    expect_begin(&f, path, 0.5, NULL, 0);
    /* Of other linears, or another rank: by name. */
    f.training.adapter.targets = (const char *const[]){"*.to_k", "*.to_q", NULL};
    refused_begin(&f, path, "does adapter.targets leave its linear out");
    files_close(&f);
}

static void test_begins_otherwise(void **state)
{
    (void)state;
    struct files f;
    char path[LG_PATH_BYTES];
    files_open(&f);
    assert_int_equal(lg_path(path, "%s/" LG_ADAPTER_WEIGHTS, f.dir), 0);
    struct lg_training more = f.training;
    lg_params all;
    more.adapter.rank = 4;
    assert_int_equal(lg_denoiser_table(&f.c, &more, &all), 0);
    const lg_params t = lg_params_trained(&all);
    const struct lg_adapter_start s = {&f.c, &more.adapter, path};
    float *got = malloc(t.count * sizeof *got);
    assert_int_equal(lg_adapter_begin(&s, &t, got), LG_ERR_MISMATCH);
    assert_non_null(strstr(lg_err_message(), "as the adapter's rank and the model want it"));
    lg_err_clear();
    free(got);
    lg_params_free(&all);
    /* Another layout of the table, that of moments in blocks, gets the same. */
    more = f.training;
    more.is_8_bit = true;
    assert_int_equal(lg_denoiser_table(&f.c, &more, &all), 0);
    const lg_params blocks = lg_params_trained(&all);
    bool moved = false;
    for (int i = 0; i < blocks.n; i++)
        moved |= blocks.p[i].offset != f.t.p[lg_params_find(&f.t, blocks.p[i].name)].offset;
    assert_true(moved);
    got = malloc(blocks.count * sizeof *got);
    assert_int_equal(
        lg_adapter_begin(&(struct lg_adapter_start){&f.c, &more.adapter, path}, &blocks, got), 0);
    for (int i = 0; i < blocks.n; i++)
        assert_memory_equal(got + blocks.p[i].offset,
                            f.w + f.t.p[lg_params_find(&f.t, blocks.p[i].name)].offset,
                            blocks.p[i].count * sizeof *got);
    free(got);
    lg_params_free(&all);
    files_close(&f);
}

static void test_files_of_others(void **state)
{
    (void)state;
    struct files f;
    files_open(&f);
    float *back = malloc(f.whole.count * sizeof *back);
    lg_params all;
    struct lg_training other = training_of(ATTENTION, 3);
    assert_int_equal(lg_denoiser_table(&f.c, &other, &all), 0);
    lg_params t = lg_params_trained(&all);
    assert_int_equal(lg_adapter_load(&t, f.dir, back), LG_ERR_MISMATCH);
    assert_non_null(strstr(lg_err_message(), "adapts other linears"));
    lg_params_free(&all);
    other = f.training;
    other.adapter.rank = 4;
    assert_int_equal(lg_denoiser_table(&f.c, &other, &all), 0);
    t = lg_params_trained(&all);
    assert_int_equal(lg_adapter_load(&t, f.dir, back), LG_ERR_MISMATCH);
    assert_non_null(strstr(lg_err_message(), "as the adapter's rank and the model want it"));
    lg_params_free(&all);
    static const char *const bad[][2] = {
        {"{\"r\": 0, \"base_model_name_or_path\": \"x\", \"target_modules\": [\"a\"]}", "\"r\""},
        {"{\"r\": 2, \"base_model_name_or_path\": \"x\", \"target_modules\": []}",
         "target_modules"},
        {"{\"r\": 2, \"base_model_name_or_path\": \"x\", \"target_modules\": [1]}",
         "target_modules"},
        {"{\"r\": 2, \"target_modules\": [\"a\"]}", "base_model_name_or_path"},
    };
    char path[LG_PATH_BYTES], base[LG_PATH_BYTES];
    assert_int_equal(lg_path(path, "%s/" LG_ADAPTER_CONFIG, f.dir), 0);
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        assert_int_equal(lg_publish_file(path, bad[i][0], strlen(bad[i][0])), 0);
        assert_true(lg_adapter_base(f.dir, base) < 0);
        assert_non_null(strstr(lg_err_message(), bad[i][1]));
    }
    free(back);
    files_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_is_an_addition_to_weights),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_changes_nothing_at_first),
        cmocka_unit_test(test_targets),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_begins_with_a_file),
        cmocka_unit_test(test_begins_otherwise),
        cmocka_unit_test(test_files_of_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
