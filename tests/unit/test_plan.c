/* The plan: dimensions from the models' config.json, what its hash covers, plan.json. */
#include "config/plan.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static int setup(void **state)
{
    (void)state;
    scratch_make();
    scratch_write("t5/config.json", "{\"d_model\": 192, \"num_layers\": 4}");
    scratch_write("t5/spiece.model", "x");
    scratch_write("t5/model.safetensors", "weights");
    scratch_write("vae/config.json",
                  "{\"block_out_channels\": [32, 64, 128], \"latent_channels\": 16, "
                  "\"scaling_factor\": 0.3611, \"shift_factor\": 0.1159}");
    scratch_write("vae/diffusion_pytorch_model.safetensors", "weights");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    scratch_remove();
    lg_err_clear();
    return 0;
}

static void assert_message(const char *part)
{
    if (!strstr(lg_err_message(), part))
        fail_msg("expected \"%s\" in:\n%s", part, lg_err_message());
}

static lg_config *load(const char *const *sets, int n)
{
    lg_config *c = NULL;
    if (lg_config_load(scratch_write("p.toml", "[text]\nmodel = 't5'\n[vae]\nmodel = 'vae'\n"),
                       sets, n, &c) < 0)
        fail_msg("%s", lg_err_text());
    return c;
}

static lg_plan make(const char *const *sets, int n)
{
    lg_plan p;
    lg_config *c = load(sets, n);
    if (lg_plan_make(c, "sse2", &p) < 0) fail_msg("%s", lg_err_text());
    lg_config_free(&c);
    return p;
}
#define MAKE(...)                                                                                  \
    make((const char *const[]){__VA_ARGS__},                                                       \
         (int)LG_ARRAY_LEN(((const char *const[]){__VA_ARGS__})))

static void test_roles(void **state)
{
    (void)state;
    assert_string_equal(lg_role_name(LG_ROLE_vae), "vae");
    assert_string_equal(lg_role_program(LG_ROLE_vae), "lg-vae");
    for (int r = 0; r < LG_ROLE_COUNT; r++) assert_int_equal(lg_role_find(lg_role_name(r)), r);
    assert_int_equal(lg_role_find("foo"), -1);
}

/* Factors with all digits of a double, as a program computes them, come back as they are. */
static void test_factors(void **state)
{
    (void)state;
    static const char *const factors[] = {"0.30000000000000004", "0.33333333333333331",
                                          "0.13025000000000003", "1.0000000000000002"};
    for (size_t i = 0; i < LG_ARRAY_LEN(factors); i++) {
        char config[256];
        lg_plan p, q;
        snprintf(config, sizeof config,
                 "{\"block_out_channels\": [32, 64, 128], \"latent_channels\": 16, "
                 "\"scaling_factor\": %s, \"shift_factor\": %s}",
                 factors[i], factors[LG_ARRAY_LEN(factors) - 1 - i]);
        scratch_write("vae/config.json", config);
        p = MAKE("trainer.ranks=1");
        assert_true(p.scaling_factor == strtod(factors[i], NULL));
        assert_int_equal(lg_plan_save(&p, scratch_path("plan.json")), 0);
        if (lg_plan_load(scratch_path("plan.json"), &q) < 0) fail_msg("%s", lg_err_text());
        assert_true(q.scaling_factor == p.scaling_factor && q.shift_factor == p.shift_factor);
    }
}

static void test_dimensions(void **state)
{
    (void)state;
    lg_plan p = MAKE("trainer.ranks=2", "text.instances=6", "vae.threads=3", "trainer.threads=2",
                     "trainer.micro_batch_size=4");
    assert_int_equal(p.image_height, 64);
    assert_int_equal(p.latent_channels, 16);
    assert_int_equal(p.latent_height, 16);
    assert_true(p.scaling_factor == 0.3611 && p.shift_factor == 0.1159);
    assert_int_equal(p.text[0].length, 24);
    assert_int_equal(p.text[0].dim, 192);
    assert_int_equal(p.text[0].shards, 4); /* six instances, four layers */
    assert_int_equal(p.num_classes, 0);
    assert_int_equal(p.batch, 16);
    assert_int_equal(p.rank_batch, 8);
    assert_int_equal(p.micro_batch, 4);
    assert_int_equal(p.window_slots, 64);
    assert_int_equal(p.lr_steps, 1000);
    assert_string_equal(p.isa, "sse2");
    assert_int_equal(p.instances[LG_ROLE_text], 6);
    assert_int_equal(p.instances[LG_ROLE_trainer], 2);
    assert_int_equal(p.instances[LG_ROLE_ema], 1);
    assert_int_equal(p.instances[LG_ROLE_keeper], 1);
    assert_int_equal(p.threads[LG_ROLE_vae], 3);
    assert_int_equal(p.threads[LG_ROLE_trainer], 2);
    assert_int_equal(p.threads[LG_ROLE_ckpt], 1);
    assert_int_equal(MAKE("text.shards=2", "text.instances=6").text[0].shards, 2);
    assert_int_equal(MAKE("trainer.lr_steps=70").lr_steps, 70);
}

static void test_vae_defaults(void **state)
{
    (void)state;
    scratch_write("vae/config.json", "{\"shift_factor\": null, \"block_out_channels\": [8]}");
    lg_plan p = make(NULL, 0);
    assert_int_equal(p.latent_channels, 4);
    assert_int_equal(p.latent_height, 64);
    assert_true(p.scaling_factor == 0.18215 && p.shift_factor == 0);
}

static void test_absent_roles(void **state)
{
    (void)state;
    lg_plan p = MAKE("model.kind=dit", "vae.model=", "data.latent_scaling=0.5");
    assert_int_equal(p.instances[LG_ROLE_text], 0);
    assert_int_equal(p.instances[LG_ROLE_vae], 0);
    assert_int_equal(p.image_height, 0);
    assert_int_equal(p.text[0].length, 0);
    assert_int_equal(p.text[0].dim, 0);
    assert_int_equal(p.text[0].shards, 0);
    assert_int_equal(p.num_classes, 1000);
    assert_int_equal(p.latent_channels, 4);
    assert_int_equal(p.latent_height, 8);
    assert_true(p.scaling_factor == 0.5 && p.shift_factor == 0);
    assert_int_equal(MAKE("vae.model=", "data.latent_size=32").latent_height, 32);
}

static void write_clip(const char *dir, int width, int projection)
{
    char path[64], text[256];
    snprintf(path, sizeof path, "%s/config.json", dir);
    snprintf(text, sizeof text,
             "{\"model_type\": \"clip_text_model\", \"hidden_size\": %d, "
             "\"num_hidden_layers\": 3, \"projection_dim\": %d, "
             "\"architectures\": [\"CLIPTextModelWithProjection\"]}",
             width, projection);
    scratch_write(path, text);
    static const char *const rest[] = {"vocab.json", "merges.txt", "model.safetensors"};
    for (size_t i = 0; i < LG_ARRAY_LEN(rest); i++) {
        snprintf(path, sizeof path, "%s/%s", dir, rest[i]);
        scratch_write(path, "x");
    }
}

static void expect_text(const struct lg_plan_text *t, const struct lg_plan_text *want)
{
    assert_int_equal(t->role, want->role);
    assert_int_equal(t->length, want->length);
    assert_int_equal(t->dim, want->dim);
    assert_int_equal(t->pooled, want->pooled);
    assert_int_equal(t->chunk, want->chunk);
    assert_int_equal(t->shards, want->shards);
}

/* SD3 has three, each with its own section; what one leaves out stands in [text]. */
static void test_texts(void **state)
{
    (void)state;
    write_clip("l", 48, 20);
    write_clip("g", 80, 36);
    char l[300], g[300];
    snprintf(l, sizeof l, "text.clip_l.model=%s", scratch_path("l"));
    snprintf(g, sizeof g, "text.clip_g.model=%s", scratch_path("g"));
#define SD3(...) MAKE("model.kind=sd3", "text.chunk=4", l, g, __VA_ARGS__)
    lg_plan p = SD3("text.t5.instances=2", "text.clip_g.chunk=8");
    assert_int_equal(p.n_texts, 3);
    expect_text(&p.text[0], &(struct lg_plan_text){LG_ROLE_text_clip_l, 77, 48, 20, 4, 1});
    expect_text(&p.text[1], &(struct lg_plan_text){LG_ROLE_text_clip_g, 77, 80, 36, 8, 1});
    expect_text(&p.text[2], &(struct lg_plan_text){LG_ROLE_text_t5, 256, 192, 0, 4, 2});
    assert_int_equal(p.instances[LG_ROLE_text], 0);
    assert_int_equal(p.instances[LG_ROLE_text_t5], 2);
    assert_int_equal(lg_plan_text_of(&p, LG_ROLE_text_clip_g), 1);
    assert_int_equal(lg_plan_text_of(&p, LG_ROLE_text), -1);
    assert_int_equal(lg_plan_text_of(&p, LG_ROLE_vae), -1);
    /* Numbers of processes and shards decide nothing; a length, a model, a chunk do. */
    const uint64_t hash = p.bits_hash;
    assert_true(SD3("text.t5.shards=4", "text.t5.instances=4", "text.clip_g.chunk=8").bits_hash ==
                hash);
    assert_true(SD3("text.t5.length=77", "text.clip_g.chunk=8").bits_hash != hash);
    assert_true(SD3("text.clip_g.chunk=4").bits_hash != hash);
    scratch_write("g/model.safetensors", "another");
    assert_true(SD3("text.clip_g.chunk=8").bits_hash != hash);
    /* Saved and read again. */
    lg_plan q;
    assert_int_equal(lg_plan_save(&p, scratch_path("plan.json")), 0);
    if (lg_plan_load(scratch_path("plan.json"), &q) < 0) fail_msg("%s", lg_err_text());
    assert_true(q.hash == p.hash && q.bits_hash == hash && q.n_texts == 3);
    for (int k = 0; k < 3; k++) expect_text(&q.text[k], &p.text[k]);
    /* Without T5 the number of its zeros decides, and nothing else of its section. */
    const uint64_t without = SD3("text.model=").bits_hash;
    p = SD3("text.model=");
    assert_int_equal(p.n_texts, 2);
    assert_int_equal(p.instances[LG_ROLE_text_t5], 0);
    assert_true(without != hash && SD3("text.model=", "text.t5.length=77").bits_hash != without);
    assert_true(
        SD3("text.model=", "text.threads=3", "text.clip_l.threads=1", "text.clip_g.threads=1")
            .bits_hash == without);
#undef SD3
}

static void test_isa(void **state)
{
    (void)state;
    lg_plan p;
    lg_config *c = load(NULL, 0);
    assert_int_equal(lg_plan_make(c, NULL, &p), 0);
    assert_string_equal(p.isa, lg_plan_machine_isa());
    assert_int_equal(lg_plan_make(c, "avx10", &p), LG_ERR_MISMATCH);
    assert_message("instruction set avx10, which this machine lacks");
    lg_config_free(&c);
}

static void test_precision(void **state)
{
    (void)state;
    assert_string_equal(make(NULL, 0).precision, "fp32");
    assert_int_equal(make(NULL, 0).element_bytes, 4);
    assert_int_equal(MAKE("precision=tf32").element_bytes, 4);
    assert_string_equal(MAKE("precision=bf16").precision, "bf16");
    assert_int_equal(MAKE("precision=bf16").element_bytes, 2);
}

static void test_placement(void **state)
{
    (void)state;
    static const char *const sets[] = {"device=cuda", "trainer.gpus=3, 1", "vae.gpus=1023,0,2"};
    lg_config *c = load(sets, 3);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_trainer, 0), 3);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_trainer, 1), 1);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_trainer, 2), 3);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_ema, 1), 1);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_ckpt, 1), 3);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_vae, 3), 1023);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_vae, 5), 2);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_text, 7), 0); /* the default */
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_loader, 0), -1);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_keeper, 0), -1);
    lg_config_free(&c);
    static const char *const on_host[] = {"device=cuda", "memory.offload_optimizer=true"};
    c = load(on_host, 2);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_trainer, 1), 0);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_ema, 1), -1);
    assert_int_equal(lg_plan_gpu(c, LG_ROLE_ckpt, 0), -1);
    lg_config_free(&c);
    c = load(NULL, 0);
    for (int r = 0; r < LG_ROLE_COUNT; r++) assert_int_equal(lg_plan_gpu(c, (lg_role)r, 0), -1);
    lg_config_free(&c);
}

static void test_turns(void **state)
{
    (void)state;
    static const char *const sets[] = {"device=cuda", "trainer.gpus=0,1", "vae.gpus=1,2,2",
                                       "text.gpus=3", "turns=auto"};
    int n[LG_ROLE_COUNT] = {[LG_ROLE_loader] = 4,  [LG_ROLE_text] = 1, [LG_ROLE_vae] = 2,
                            [LG_ROLE_trainer] = 2, [LG_ROLE_ema] = 2,  [LG_ROLE_ckpt] = 1};
    lg_config *c = load(sets, 5);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_trainer, 0), -1); /* alone */
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_trainer, 1), 1);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_vae, 0), 1);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_vae, 1), -1);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_text, 0), -1);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_ema, 1), -1); /* only copies */
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_loader, 0), -1);
    n[LG_ROLE_vae] = 3; /* `lgsup scale` */
    n[LG_ROLE_text] = 2;
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_vae, 1), 2);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_vae, 2), 2);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_text, 1), 3);
    lg_config_free(&c);
    static const char *const never[] = {"device=cuda", "turns=never"};
    c = load(never, 2);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_trainer, 0), -1);
    lg_config_free(&c);
    c = load(NULL, 0); /* the host */
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_trainer, 0), -1);
    lg_config_free(&c);
    static const char *const always[] = {"turns=always"};
    c = load(always, 1);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_trainer, 0), 0);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_vae, 2), 0);
    assert_int_equal(lg_plan_turn(c, n, LG_ROLE_ema, 0), -1);
    lg_config_free(&c);
}

static void test_hash(void **state)
{
    (void)state;
    uint64_t base = make(NULL, 0).hash;
    assert_true(base == make(NULL, 0).hash);
    /* What may change at a resume. */
    assert_true(base == MAKE("vae.instances=3").hash);
    assert_true(base == MAKE("text.instances=2").hash);
    assert_true(base == MAKE("loader.instances=2").hash);
    assert_true(base == MAKE("trainer.max_steps=5").hash);
    assert_true(base == MAKE("window.batches=8").hash);
    assert_true(base == MAKE("job.dir=/elsewhere").hash);
    assert_true(MAKE("device=cuda").hash == MAKE("device=cuda", "trainer.gpus=1").hash);
    /* Who updates, the host or a GPU, decides bits. */
    assert_true(base == MAKE("memory.offload_optimizer=true").hash);
    assert_true(MAKE("device=cuda").hash !=
                MAKE("device=cuda", "memory.offload_optimizer=true").hash);
    /* What decides bits. */
    static const char *const sets[] = {
        "trainer.lr=1e-3",     "trainer.ranks=2",  "job.seed=1",         "text.length=25",
        "trainer.threads=2",   "vae.threads=2",    "vae.slice=2",        "data.size=128",
        "trainer.lr_steps=10", "ema.decay=0.9",    "model.depth=5",      "trainer.objective=eps",
        "text.chunk=4",        "data.flip=true",   "model.kind=dit",     "vae.model=",
        "device=cuda",         "precision=tf32",   "data.caption=first", "data.shuffle_tags=true",
        "data.keep_tags=1",    "text.storage=fp8",
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(sets); i++)
        if (base == MAKE(sets[i]).hash) fail_msg("%s does not change the hash", sets[i]);
    /* How frozen weights are stored does where they are not as they always were. */
    const char *frozen = "trainer.groups=['* frozen']";
    assert_true(MAKE(frozen).hash != MAKE(frozen, "model.frozen=fp8").hash);
    assert_true(MAKE(frozen, "model.frozen=int8").hash != MAKE(frozen, "model.frozen=fp8").hash);
    lg_plan p;
    lg_config *c = load(NULL, 0);
    assert_int_equal(lg_plan_make(c, NULL, &p), 0);
    if (strcmp(lg_plan_machine_isa(), "sse2") != 0) assert_true(base != p.hash);
    lg_config_free(&c);
}

static void test_hash_models(void **state)
{
    (void)state;
    static const struct {
        const char *file, *before, *after;
    } files[] = {
        {"t5/spiece.model", "x", "y"},
        {"t5/model.safetensors", "weights", "weightz"},
        {"vae/diffusion_pytorch_model.safetensors", "weights", "longer weights"},
        {"t5/config.json", "{\"d_model\": 192, \"num_layers\": 4}",
         "{\"d_model\": 192, \"num_layers\": 4, \"num_heads\": 6}"},
    };
    uint64_t base = make(NULL, 0).hash;
    for (size_t i = 0; i < LG_ARRAY_LEN(files); i++) {
        scratch_write(files[i].file, files[i].after);
        if (base == make(NULL, 0).hash) fail_msg("%s does not change the hash", files[i].file);
        scratch_write(files[i].file, files[i].before);
        assert_true(base == make(NULL, 0).hash);
    }
    /* Another place, the same files. */
    assert_int_equal(rename(scratch_path("vae"), scratch_path("moved")), 0);
    char set[300];
    snprintf(set, sizeof set, "vae.model=%s", scratch_path("moved"));
    assert_true(base == MAKE(set).hash);
}

static void test_resume(void **state)
{
    (void)state;
    lg_plan old = MAKE("trainer.max_steps=60", "text.instances=2"), p;
    const char *grown[] = {"trainer.max_steps=80", "text.instances=3", "vae.instances=2"};
    lg_config *c = load(grown, 3);
    if (lg_plan_resume(c, &old, &p) < 0) fail_msg("%s", lg_err_text());
    lg_config_free(&c);
    assert_true(p.hash == old.hash);
    assert_int_equal(p.lr_steps, 60);
    assert_int_equal(p.text[0].shards, 2);
    assert_int_equal(p.instances[LG_ROLE_text], 3);
    assert_string_equal(p.isa, "sse2");

    const char *wider[] = {"trainer.global_batch_size=32"};
    c = load(wider, 1);
    assert_int_equal(lg_plan_resume(c, &old, &p), LG_ERR_MISMATCH);
    assert_message("batch=16; before, batch=32; now");
    lg_config_free(&c);

    scratch_write("vae/diffusion_pytorch_model.safetensors", "retrained");
    c = load(grown, 3);
    assert_int_equal(lg_plan_resume(c, &old, &p), LG_ERR_MISMATCH);
    assert_message("model that an adapter adapts, is not what it was");
    lg_config_free(&c);
}

static void replace_in_plan(const char *from, const char *to)
{
    char *text = NULL, changed[8192];
    size_t bytes;
    assert_int_equal(lg_read_file(scratch_path("plan.json"), 4096, &text, &bytes), 0);
    char *at = strstr(text, from);
    assert_non_null(at);
    snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    scratch_write("bad.json", changed);
    free(text);
}

/* What lgsup found out of the GPUs is kept where the config leaves it open. */
static void test_apart(void **state)
{
    (void)state;
    lg_plan host = MAKE("parallel.exchange=host", "trainer.ranks=2"), p;
    lg_plan open = MAKE("parallel.exchange=auto", "trainer.ranks=2");
    assert_true(host.apart && !open.apart && host.hash == open.hash);
    open.apart = 1;
    const char *ways[] = {"auto", "gpu", "host"};
    for (size_t i = 0; i < LG_ARRAY_LEN(ways); i++) {
        char set[40];
        const char *sets[] = {set, "trainer.ranks=2"};
        snprintf(set, sizeof set, "parallel.exchange=%s", ways[i]);
        lg_config *c = load(sets, 2);
        if (lg_plan_resume(c, &open, &p) < 0) fail_msg("%s", lg_err_text());
        assert_int_equal(p.apart, strcmp(ways[i], "gpu") != 0);
        lg_config_free(&c);
    }
    assert_int_equal(lg_plan_save(&open, scratch_path("plan.json")), 0);
    if (lg_plan_load(scratch_path("plan.json"), &p) < 0) fail_msg("%s", lg_err_text());
    assert_memory_equal(&open, &p, sizeof p);
    replace_in_plan("\"apart\":\t1", "\"apart\":\t2");
    assert_int_equal(lg_plan_load(scratch_path("bad.json"), &p), LG_ERR_CORRUPT);
    assert_message("apart is missing or wrong");
    replace_in_plan("\"apart\":\t1,", "");
    assert_int_equal(lg_plan_load(scratch_path("bad.json"), &p), LG_ERR_CORRUPT);
    assert_message("was changed after it was written");
}

static void test_save_load(void **state)
{
    (void)state;
    lg_plan p = MAKE("trainer.max_steps=1000000000000", "trainer.ranks=2"), q;
    assert_int_equal(lg_plan_save(&p, scratch_path("plan.json")), 0);
    if (lg_plan_load(scratch_path("plan.json"), &q) < 0) fail_msg("%s", lg_err_text());
    assert_memory_equal(&p, &q, sizeof p);

    static const struct {
        const char *from, *to, *message;
        int code;
    } damages[] = {
        {"\"batch\":\t16", "\"batch\":\t17", "was changed after it was written", LG_ERR_CORRUPT},
        {"\"window_slots\":\t64", "\"window_slots\":\t65", "was changed", LG_ERR_CORRUPT},
        {"\"vae\":\t1", "\"vae\":\t2", "was changed", LG_ERR_CORRUPT},
        {"\"batch\":", "\"botch\":", "batch is missing or wrong", LG_ERR_CORRUPT},
        {"\"image_size\":\t64", "\"image_size\":\t1e300", "image_size is missing or wrong",
         LG_ERR_CORRUPT},
        {"\"isa\":\t\"sse2\"", "\"isa\":\t\"sse2sse2sse2sse2\"", "isa is missing", LG_ERR_CORRUPT},
        {"\"format\":\t2", "\"format\":\t1", "has format 1, this build reads 2", LG_ERR_MISMATCH},
        {"\"precision\":\t\"fp32\"", "\"precision\":\t\"fp32fp32\"", "precision is missing",
         LG_ERR_CORRUPT},
        {"{", "[", "is not a plan", LG_ERR_CORRUPT},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(damages); i++) {
        replace_in_plan(damages[i].from, damages[i].to);
        assert_int_equal(lg_plan_load(scratch_path("bad.json"), &q), damages[i].code);
        assert_message(damages[i].message);
    }
    assert_int_equal(lg_plan_load(scratch_path("none.json"), &q), LG_ERR_NOTFOUND);
    assert_memory_equal(&p, &q, sizeof p); /* untouched by the failures */
}

static void test_buckets(void **state)
{
    lg_plan p = MAKE("data.buckets=[\"64x64\",\"128x64\",\"32x96\"]", "trainer.micro_batch_size=4"),
            q;
    struct lg_plan_shape s = lg_plan_shape(&p, 2);
    assert_int_equal(lg_plan_shapes(&p), 3);
    assert_int_equal(s.height, 128);
    assert_int_equal(s.width, 64);
    assert_int_equal(s.latent_height, 32);
    assert_int_equal(s.latent_width, 16);
    assert_int_equal(s.rows, 2);
    assert_int_equal(lg_plan_shape(&p, 0).rows, 4);
    assert_int_equal(p.image_height, 64); /* of previews */
    assert_int_equal(lg_plan_save(&p, scratch_path("plan.json")), 0);
    if (lg_plan_load(scratch_path("plan.json"), &q) < 0) fail_msg("%s", lg_err_text());
    assert_memory_equal(&p.buckets, &q.buckets, sizeof p.buckets);
    replace_in_plan("128x64*2", "128x64*3");
    assert_int_equal(lg_plan_load(scratch_path("bad.json"), &q), LG_ERR_CORRUPT);
    assert_message("was changed");
    replace_in_plan("128x64*2", "128x64*");
    assert_int_equal(lg_plan_load(scratch_path("bad.json"), &q), LG_ERR_CORRUPT);
    assert_message("buckets is missing or wrong");
    /* None are those of a build that knew none. */
    lg_plan square = MAKE("data.buckets=square", "trainer.micro_batch_size=4");
    lg_plan none = MAKE("trainer.micro_batch_size=4");
    assert_true(square.hash == none.hash && square.bits_hash == none.bits_hash);
    assert_int_equal(lg_plan_save(&none, scratch_path("plan.json")), 0);
    replace_in_plan("\"buckets\":\t\"\",", "");
    if (lg_plan_load(scratch_path("bad.json"), &q) < 0) fail_msg("%s", lg_err_text());
    assert_true(q.hash == none.hash && q.buckets.n == 0);
    assert_int_equal(lg_plan_shapes(&square), 1);
    s = lg_plan_shape(&square, 0);
    assert_true(s.height == 64 && s.width == 64 && s.latent_height == 16 && s.latent_width == 16);
    assert_int_equal(s.rows, 4);
    assert_true(p.hash != square.hash);
}

/* Rectangles and frames; squares of one frame have the hash that they had before there were others. */
static void test_clips(void **state)
{
    (void)state;
    lg_plan p = MAKE("model.kind=latte", "data.size=[64, 96]", "data.frames=9",
                     "data.buckets=[\"64x96\", \"1x64x64\", \"5x128x64\"]",
                     "trainer.micro_batch_size=2"),
            q;
    const lg_plan one = MAKE("model.kind=latte", "data.size=[64, 96]", "data.frames=9");
    assert_int_equal(p.image_height, 64);
    assert_int_equal(p.image_width, 96);
    assert_int_equal(p.latent_height, 16);
    assert_int_equal(p.latent_width, 24);
    assert_int_equal(p.frames, 9);
    assert_int_equal(p.latent_frames, 9);
    struct lg_plan_shape s = lg_plan_shape(&p, 1);
    assert_true(s.frames == 5 && s.height == 128 && s.width == 64);
    assert_true(s.latent_frames == 5 && s.latent_height == 32 && s.latent_width == 16);
    assert_int_equal(lg_plan_shape_pixels(&s), 5 * 128 * 64);
    assert_int_equal(lg_plan_shape_cells(&s), 5 * 32 * 16);
    assert_int_equal(s.rows, 2);
    s = lg_plan_shape(&one, 0);
    assert_true(s.frames == 9 && s.width == 96 && s.latent_frames == 9 && s.latent_width == 24);
    assert_int_equal(lg_plan_save(&p, scratch_path("plan.json")), 0);
    if (lg_plan_load(scratch_path("plan.json"), &q) < 0) fail_msg("%s", lg_err_text());
    assert_memory_equal(&p, &q, sizeof p);
    replace_in_plan("\"frames\":\t9", "\"frames\":\t8");
    assert_int_equal(lg_plan_load(scratch_path("bad.json"), &q), LG_ERR_CORRUPT);
    assert_message("was changed");
    /* Each decides bits. */
    const lg_plan others[] = {
        MAKE("model.kind=latte", "data.size=[64, 96]", "data.frames=8"),
        MAKE("model.kind=latte", "data.size=[96, 64]", "data.frames=9"),
        MAKE("model.kind=latte", "data.size=64", "data.frames=9"),
        MAKE("model.kind=latte", "data.size=[64, 96]", "data.frames=9", "data.fps=8"),
        MAKE("model.kind=latte", "data.size=[64, 96]", "data.frames=9", "data.stride=2")};
    for (size_t i = 0; i < LG_ARRAY_LEN(others); i++) assert_true(others[i].hash != one.hash);
    const lg_plan square = MAKE("data.size=[64, 64]", "data.frames=1", "data.stride=1"),
                  plain = make(NULL, 0);
    assert_true(square.hash == plain.hash && square.bits_hash == plain.bits_hash);
    assert_int_equal(lg_plan_save(&plain, scratch_path("plan.json")), 0);
    char *text = NULL;
    size_t bytes;
    assert_int_equal(lg_read_file(scratch_path("plan.json"), 1 << 16, &text, &bytes), 0);
    static const char *const none[] = {"image_width", "\"frames", "latent_width", "latent_frames",
                                       "factor_time"};
    for (size_t i = 0; i < LG_ARRAY_LEN(none); i++) assert_null(strstr(text, none[i]));
    free(text);
    /* Latents of a data set; frames of an autoencoder that takes several for one. */
    p = MAKE("model.kind=latte", "vae.model=", "data.latent_size=[8, 12]", "data.frames=9",
             "data.latent_frames=2");
    assert_true(p.latent_height == 8 && p.latent_width == 12 && p.latent_frames == 2 &&
                p.frames == 9);
    scratch_write("vae/config.json", "{\"_class_name\": \"AutoencoderKLLTXVideo\"}");
    p = MAKE("model.kind=latte", "data.size=[64, 96]", "data.frames=17",
             "data.buckets=[\"64x96\", \"1x64x64\"]", "model.patch=1");
    assert_true(p.factor_time == 8 && p.latent_frames == 3 && p.latent_height == 2 &&
                p.latent_width == 3);
    assert_true(lg_plan_shape(&p, 0).latent_frames == 1 && lg_plan_shape(&p, 1).latent_frames == 3);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_roles),        TEST(test_dimensions), TEST(test_vae_defaults),
        TEST(test_absent_roles), TEST(test_isa),        TEST(test_hash),
        TEST(test_precision),    TEST(test_placement),  TEST(test_turns),
        TEST(test_hash_models),  TEST(test_resume),     TEST(test_apart),
        TEST(test_save_load),    TEST(test_buckets),    TEST(test_texts),
        TEST(test_clips),        TEST(test_factors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
