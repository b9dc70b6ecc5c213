/* Reading a pipeline.toml: what is accepted, and the text of every kind of refusal. */
#include "config/config.h"
#include "config/denoisers.h"
#include "config/sample.h"
#include "config/schema.h"
#include "config/texts.h"
#include "config/toml.h"
#include "tests/unit/scratch.h"
#include <limits.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static int setup(void **state)
{
    (void)state;
    scratch_make();
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

static lg_config *load(const char *text, const char *set)
{
    lg_config *c = NULL;
    if (lg_config_load(scratch_write("p.toml", text), &set, set != NULL, &c) < 0)
        fail_msg("%s", lg_err_text());
    return c;
}

/* text does not load and the message has all the parts, up to NULL. */
static void refuses_set(const char *text, const char *set, const char *const *parts)
{
    lg_config *c = NULL;
    assert_int_equal(lg_config_load(scratch_write("p.toml", text), &set, set != NULL, &c),
                     LG_ERR_CONFIG);
    assert_null(c);
    for (; *parts; parts++) assert_message(*parts);
}
#define REFUSES(text, ...)    refuses_set(text, NULL, (const char *const[]){__VA_ARGS__, NULL})
#define REFUSES_SET(set, ...) refuses_set("", set, (const char *const[]){__VA_ARGS__, NULL})

/* ---- what is accepted ---- */

static void test_defaults(void **state)
{
    (void)state;
    lg_config *c = load("", NULL);
    assert_string_equal(c->_device, "host");
    assert_int_equal(c->trainer_max_steps, 1000);
    assert_true(c->trainer_lr == 1e-4);
    assert_true(c->trainer_auto_resume);
    assert_string_equal(c->trainer_objective, "flow");
    assert_string_equal(c->vae_model, "");
    assert_string_equal(c->job_dir, scratch_path("run"));
    assert_int_equal(c->sample_captions.n, 0);
    lg_config_free(&c);
    assert_null(c);
    lg_config_free(&c);
}

static void test_values(void **state)
{
    (void)state;
    lg_config *c = load("device = 'cuda'\n[job]\nseed = 9223372036854775807\n"
                        "[trainer]\nlr = 1\nauto_resume = false\n"
                        "[sample]\ncaptions = ['a \"b\"', '\\u00e9', \"z\\n\"]\n",
                        NULL);
    assert_string_equal(c->_device, "cuda");
    assert_int_equal(c->job_seed, INT64_MAX);
    assert_true(c->trainer_lr == 1.0);
    assert_false(c->trainer_auto_resume);
    assert_int_equal(c->sample_captions.n, 3);
    assert_string_equal(c->sample_captions.v[0], "a \"b\"");
    assert_string_equal(c->sample_captions.v[2], "z\n");
    lg_config_free(&c);
}

static void test_paths(void **state)
{
    (void)state;
    char cwd[PATH_MAX], expected[2 * PATH_MAX];
    lg_config *c = load("[data]\npath = './d//x/,/abs,y'\n[vae]\nmodel='../v'\n", NULL);
    snprintf(expected, sizeof expected, "%s,/abs,%s", scratch_path("d/x"), scratch_path("y"));
    assert_string_equal(c->data_path, expected);
    assert_string_equal(c->vae_model, scratch_path("../v"));
    lg_config_free(&c);

    assert_non_null(getcwd(cwd, sizeof cwd));
    c = load("[vae]\nmodel = 'v'\n", "vae.model=w,1");
    snprintf(expected, sizeof expected, "%s/w,1", cwd);
    assert_string_equal(c->vae_model, expected);
    lg_config_free(&c);

    c = load("[vae]\nmodel = 'v'\n", "vae.model=");
    assert_string_equal(c->vae_model, "");
    lg_config_free(&c);

    c = load("", "job.dir=/");
    assert_string_equal(c->job_dir, "/");
    lg_config_free(&c);
}

static void test_overrides(void **state)
{
    (void)state;
    const char *const sets[] = {
        "trainer.max_steps=80", "trainer.lr=2e-3",       "data.flip=true",
        "job.name=42",          "job.name=\"a#b\"",      "trainer.objective=v",
        "data.path=x # y",      "sample.captions=a cat", "trainer.max_steps=90"};
    lg_config *c = NULL;
    assert_int_equal(lg_config_load(scratch_write("p.toml", "[trainer]\nmax_steps = 7\n"), sets,
                                    LG_ARRAY_LEN(sets), &c),
                     0);
    assert_int_equal(c->trainer_max_steps, 90);
    assert_true(c->trainer_lr == 2e-3);
    assert_true(c->data_flip);
    assert_string_equal(c->job_name, "a#b");
    assert_string_equal(c->trainer_objective, "v");
    assert_string_equal(strrchr(c->data_path, '/'), "/x # y");
    assert_int_equal(c->sample_captions.n, 1);
    assert_string_equal(c->sample_captions.v[0], "a cat");
    lg_config_free(&c);

    c = load("", "sample.captions=[\"a\", \"b\"]");
    assert_int_equal(c->sample_captions.n, 2);
    lg_config_free(&c);
    c = load("", "job.name=42");
    assert_string_equal(c->job_name, "42");
    lg_config_free(&c);
}

/* A list as one text: "a|b". */
static void assert_list(const struct lg_strlist *list, const char *expected)
{
    char text[200] = "";
    for (int i = 0; i < list->n; i++) {
        size_t at = strlen(text);
        snprintf(text + at, sizeof text - at, "%s%s", i ? "|" : "", list->v[i]);
    }
    assert_string_equal(text, expected);
}

/* A number in a list is its text; a text or a number alone is a list of one. */
static void test_lists(void **state)
{
    (void)state;
    const struct {
        const char *value, *list;
        int n;
    } accepted[] = {{"[]", "", 0},
                    {"['a', 'b, c']", "a|b, c", 2},
                    {"[207, -3, 0x10]", "207|-3|16", 3},
                    {"['x', 9223372036854775807]", "x|9223372036854775807", 2},
                    {"'a cat'", "a cat", 1},
                    {"'[a]'", "[a]", 1},
                    {"''", "", 1},
                    {"207", "207", 1},
                    {"-9223372036854775808", "-9223372036854775808", 1}};
    for (size_t i = 0; i < LG_ARRAY_LEN(accepted); i++) {
        char text[100], set[100];
        snprintf(text, sizeof text, "[sample]\ncaptions = %s\n", accepted[i].value);
        snprintf(set, sizeof set, "sample.captions=%s", accepted[i].value);
        lg_config *c[] = {load(text, NULL), load("", set)};
        for (size_t j = 0; j < LG_ARRAY_LEN(c); j++) {
            assert_list(&c[j]->sample_captions, accepted[i].list);
            assert_int_equal(c[j]->sample_captions.n, accepted[i].n);
            lg_config_free(&c[j]);
        }
    }
    lg_config *c = load("", "sample.captions=a, b");
    assert_int_equal(c->sample_captions.n, 1);
    assert_list(&c->sample_captions, "a, b");
    lg_config_free(&c);
}

static void test_round_trip(void **state)
{
    (void)state;
    lg_config *a = load("[job]\nname = \"q\\\"\\\\\\t\\u0001\\u00e9\"\n[trainer]\nlr = 0.1\n"
                        "adam_eps = 1.2345678901234567e-9\nclip_norm = 3\n"
                        "[data]\npath = 'a,b'\n[sample]\ncaptions = ['x', \"y\\n\"]\n"
                        "[memory]\nrecompute = [0, 3]\n",
                        NULL);
    char *first = lg_config_to_toml(a), *second;
    lg_config *b = load(first, NULL);
    second = lg_config_to_toml(b);
    assert_string_equal(first, second);
    assert_true(a->trainer_adam_eps == b->trainer_adam_eps);
    assert_string_equal(a->job_name, b->job_name);
    assert_string_equal(a->data_path, b->data_path);
    assert_string_equal(b->sample_captions.v[1], "y\n");
    assert_list(&b->memory_recompute, "0|3");
    assert_int_equal(lg_config_compatible(a, b, NULL, NULL), 0);
    free(first);
    free(second);
    lg_config_free(&a);
    lg_config_free(&b);
}

/* ---- what is refused ---- */

static void test_syntax(void **state)
{
    (void)state;
    REFUSES("[trainer]\nlr = \n", "p.toml:2:", "rror while parsing");
    REFUSES("[trainer\nlr = 1\n", "p.toml:1:");
    REFUSES("[job]\nname = \"x\n", "p.toml:2:");
    REFUSES("[job]\n[job]\n", "p.toml:2:");
    REFUSES("[job]\nseed = 1\nseed = 2\n", "p.toml:3:");
    REFUSES("[job]\nname = \"\xff\"\n", "p.toml:2:");
    lg_config *c = NULL;
    assert_int_equal(lg_config_load(scratch_path("none.toml"), NULL, 0, &c), LG_ERR_NOTFOUND);
    assert_message("none.toml");
}

static void test_deep_nesting(void **state)
{
    (void)state;
    char *text = malloc(200010);
    assert_non_null(text);
    strcpy(text, "a = ");
    memset(text + 4, '[', 200000);
    text[200004] = 0;
    REFUSES(text, "p.toml:1:");
    free(text);
}

static void test_types_and_ranges(void **state)
{
    (void)state;
    REFUSES(
        "[vae]\nslice = -1\n",
        "vae.slice is out of range: expected \"auto\" or a whole number from 0 to 4096, got -1");
    REFUSES("[vae]\nslice = \"all\"\n", "expected \"auto\" or a whole number from 0 to 4096");
    REFUSES("[vae]\nchunk = \"auto\"\n", "expected a whole number from 1 to 4096");
    REFUSES("[trainer]\n\nlr = 'fast'\n",
            "p.toml:3:1: trainer.lr: expected a number from 0 to 10, got the text \"fast\"");
    REFUSES("[trainer]\nlr = 20\n",
            "p.toml:2:1: trainer.lr is out of range: expected a number from 0 to 10, got 20");
    REFUSES("[trainer]\nlr = nan\n", "trainer.lr is out of range", "got nan");
    REFUSES("[vae]\ninstances = 1.5\n",
            "p.toml:2:1: vae.instances: expected a whole number from 1 to 64, got 1.5");
    REFUSES("[vae]\n  instances = 0\n", "p.toml:2:3: vae.instances is out of range", "got 0");
    REFUSES("[job]\nseed = -1\n", "job.seed is out of range: expected a whole number, at least 0");
    REFUSES("[data]\nflip = 'yes'\n", "p.toml:2:1: data.flip: expected true or false");
    REFUSES("[job]\nname = 5\n", "p.toml:2:1: job.name: expected a text in quotes, got 5");
    REFUSES("[job]\nname = \"a\\u0000b\"\n", "p.toml:2:1: job.name: expected a text in quotes");
    REFUSES("[job]\ndir = 2024-01-01\n", "job.dir: expected a path in quotes, got a date");
    REFUSES(
        "[trainer]\nobjective = 'x'\n",
        "p.toml:2:1: trainer.objective is out of range: expected one of \"eps\", \"v\", \"flow\", "
        "got the text \"x\"");
    REFUSES("[sample]\ncaptions = 1.5\n",
            "p.toml:2:1: sample.captions: expected a text, a whole number, or a list of them like "
            "[\"a\", 2], got 1.5");
    REFUSES("[sample]\ncaptions = true\n", "sample.captions: expected a text, ", "got true");
    REFUSES("[sample.captions]\na = 'x'\n", "sample.captions: expected a text, ", "got a table");
    static const char *const lists[] = {"['x', 1.5]", "['x', ['y']]", "[true]", "[{a = 1}]",
                                        "[\"a\\u0000b\"]"};
    for (size_t i = 0; i < LG_ARRAY_LEN(lists); i++) {
        char text[80];
        snprintf(text, sizeof text, "[sample]\ncaptions = %s\n", lists[i]);
        REFUSES(text, "p.toml:2:1: sample.captions: expected a text, ",
                lists[i][1] == '{'
                    ? "got a list of tables"
                    : "got a date, or a list of something else than texts and whole numbers");
    }
    REFUSES("[trainer]\nlr = [1]\n", "trainer.lr: expected a number from 0 to 10, got a list");
    REFUSES("[trainer.lr]\nx = 1\n", "p.toml:1:", "trainer.lr: expected a number", "got a table");
    REFUSES("trainer = 5\n", "p.toml:1:1: trainer is a section: write [trainer] once");
    REFUSES("[[vae]]\ninstances = 1\n", "vae is a section: write [vae] once");
}

static void test_unknown_names(void **state)
{
    (void)state;
    REFUSES("[trainer]\nmax_step = 5\n",
            "p.toml:2:1: unknown key trainer.max_step: the nearest known key is trainer.max_steps");
    REFUSES("[trainer]\nwarumup_steps = 5\n", "nearest known key is trainer.warmup_steps");
    REFUSES("[vae]\nranks = 2\n", "unknown key vae.ranks: the nearest known key is trainer.ranks");
    REFUSES("[vae]\nintsances = 2\n", "the nearest known key is vae.instances");
    REFUSES("[sample]\nsetp = 2\n",
            "the nearest known key is sample.steps"); /* a swap is one edit */
    REFUSES("devise = 'host'\n", "p.toml:1:1: unknown key devise: the nearest known key is device");
    REFUSES("[trainner]\nlr = 1\nfoo = 2\n",
            "p.toml:1:2: unknown section [trainner]: the nearest known section is [trainer]");
    assert_null(strchr(lg_err_message(), '\n')); /* its keys are not reported again */
    REFUSES("\"trainer.lr\" = 1\n", "unknown key \"trainer.lr\"");
    REFUSES("learning_rate = 1\n", "learning_rate: it is called trainer.lr here");
    REFUSES("[trainer]\nbatch_size = 1\n",
            "trainer.batch_size: it is called trainer.global_batch_size");
#define LG_SCRIPT(theirs, ours, note)                                                              \
    assert_true(lg_key_find(ours) >= 0 && !strchr(theirs, '.')); /* a key that is there */
#include "config/scripts.def"
#undef LG_SCRIPT
    REFUSES("exp_name = 'x'\n", "LiteGen's exp_name is called job.name here");
    REFUSES("zero_degree = 3\n", "LiteGen's zero_degree is called parallel.zero here");
    REFUSES("grad_precision = 'fp32'\n", "LiteGen's grad_precision is not in this version");
    REFUSES("max_steps = 5\n", "LiteGen's max_steps is called trainer.max_steps here");
    REFUSES("selective_ratio = 0.2\n", "LiteGen's selective_ratio is called memory.recompute here");
}

static void test_bad_overrides(void **state)
{
    (void)state;
    REFUSES_SET("trainer.max_steps", "--set: expected key=value, got \"trainer.max_steps\"");
    REFUSES_SET("=5", "--set: expected key=value");
    REFUSES_SET("trainer.max_step=5",
                "--set: unknown key trainer.max_step: the nearest known key is "
                "trainer.max_steps");
    REFUSES_SET("trainer.max_steps=many", "--set: trainer.max_steps: expected a whole number");
    REFUSES_SET("trainer.max_steps=", "--set: trainer.max_steps: expected a whole number");
    REFUSES_SET("trainer.max_steps=0", "--set: trainer.max_steps is out of range");
    REFUSES_SET("trainer.max_steps=5\nlr = 3", "--set: trainer.max_steps: expected a whole number");
    static const char *const not_utf8[] = {
        "\xff",     "\xc0\x80", "\xed\xa0\x80",        "\xf4\x90\x80\x80",
        "\xe2\x82", "\x80",     "\xf8\x88\x80\x80\x80"};
    for (size_t i = 0; i < LG_ARRAY_LEN(not_utf8); i++) {
        char set[32];
        snprintf(set, sizeof set, "job.name=%s", not_utf8[i]);
        REFUSES_SET(set, "--set: job.name is not valid UTF-8");
    }
    lg_config *c = load("", "job.name=\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    lg_config_free(&c);
    REFUSES_SET("sample.captions=[1.5]", "--set: sample.captions: expected a text, a whole number");
    REFUSES_SET("sample.captions=[a, b]",
                "sample.captions: [a, b] is no list: expected one like [\"a\", 2]");
}

static void test_collects(void **state)
{
    (void)state;
    char text[2000] = "[trainer]\n";
    REFUSES("[trainer]\nlr = 20\nrank = 1\n[vae]\nslice = 'a'\n",
            "p.toml: 3 errors:", "p.toml:2:1: trainer.lr", "p.toml:3:1: unknown key trainer.rank",
            "p.toml:5:1: vae.slice");
    for (int i = 0; i < 30; i++) sprintf(text + strlen(text), "unknown_%02d = 1\n", i);
    REFUSES(text, "30 errors, the first 20:", "trainer.unknown_00", "trainer.unknown_19");
    assert_null(strstr(lg_err_message(), "trainer.unknown_20"));
}

/* ---- rules between keys ---- */

/* A config that passes every rule; models' files are small inventions. */
static void write_models(void)
{
    scratch_write("data/a.tar", "x");
    scratch_write("t5/config.json", "{\"d_model\": 192, \"num_layers\": 4}");
    scratch_write("t5/spiece.model", "x");
    scratch_write("t5/model.safetensors", "x");
    scratch_write("vae/config.json", "{\"block_out_channels\": [32, 64, 128]}");
    scratch_write("vae/diffusion_pytorch_model.safetensors", "x");
}
static const char good[] = "[data]\npath = 'data'\n[text]\nmodel = 't5'\n[vae]\nmodel = 'vae'\n";

static int check_with(const char *const *sets, int n)
{
    lg_config *c = NULL;
    if (lg_config_load(scratch_write("p.toml", good), sets, n, &c) < 0)
        fail_msg("%s", lg_err_text());
    int rc = lg_config_check(c);
    lg_config_free(&c);
    return rc;
}
#define CHECK(...)                                                                                 \
    check_with((const char *const[]){__VA_ARGS__},                                                 \
               (int)LG_ARRAY_LEN(((const char *const[]){__VA_ARGS__})))
#define BREAKS(message, ...)                                                                       \
    do {                                                                                           \
        assert_int_equal(CHECK(__VA_ARGS__), LG_ERR_CONFIG);                                       \
        assert_message(message);                                                                   \
        assert_null(strchr(lg_err_message(), '\n'));                                               \
    } while (0)

static void test_rules_hold(void **state)
{
    (void)state;
    write_models();
    if (check_with(NULL, 0) < 0) fail_msg("%s", lg_err_text());
    assert_int_equal(CHECK("trainer.ranks=2", "trainer.micro_batch_size=4"), 0);
    assert_int_equal(CHECK("model.kind=dit", "text.model=", "sample.captions=[\"0\", \"999\"]"), 0);
    assert_int_equal(CHECK("model.kind=dit", "text.model=", "sample.captions=[0, 999]"), 0);
    assert_int_equal(CHECK("model.kind=dit", "text.model=", "sample.captions=207"), 0);
    assert_int_equal(CHECK("trainer.min_snr_gamma=5", "trainer.objective=v"), 0);
    assert_int_equal(CHECK("vae.model=", "data.latent_size=16"), 0);
    scratch_write("ck/manifest.json", "{}");
    scratch_write("ck/model/config.json", "{}");
    char init[300], resume[300], glob[300];
    snprintf(init, sizeof init, "trainer.init_from=%s", scratch_path("ck"));
    snprintf(resume, sizeof resume, "trainer.resume_from=%s", scratch_path("ck"));
    snprintf(glob, sizeof glob, "data.path=%s,%s", scratch_path("data/*.tar"),
             scratch_path("data"));
    if (CHECK(init, resume, glob, "trainer.auto_resume=true") < 0) fail_msg("%s", lg_err_text());
}

static void test_sides(void **state)
{
    (void)state;
    lg_config *a = load("[data]\nsize = [512, 768]\nlatent_size = 4\n", NULL);
    for (int round = 0; round < 2; round++) { /* as written, and as saved */
        assert_true(a->data_size.height == 512 && a->data_size.width == 768);
        assert_true(a->data_latent_size.height == 4 && a->data_latent_size.width == 4);
        char *saved = lg_config_to_toml(a);
        assert_non_null(strstr(saved, "\nsize = [512, 768]\n"));
        assert_non_null(strstr(saved, "\nlatent_size = 4\n"));
        lg_config_free(&a);
        a = load(saved, NULL);
        free(saved);
    }
    lg_config_free(&a);
    a = load("", "data.size=[96, 64]");
    assert_true(a->data_size.height == 96 && a->data_size.width == 64);
    assert_int_equal(lg_config_latent_size(a).height, 12);
    assert_int_equal(lg_config_latent_size(a).width, 8);
    lg_config_free(&a);
    REFUSES("[data]\nsize = [64]\n",
            "data.size is out of range: expected a whole number from 8 to 4096, or a list of two");
    REFUSES("[data]\nsize = [64, 64, 64]\n", "data.size is out of range");
    REFUSES("[data]\nsize = [64, 4097]\n", "data.size is out of range");
    REFUSES("[data]\nsize = 7\n", "data.size is out of range");
    REFUSES("[data]\nsize = [\"64\", \"a\"]\n", "data.size is out of range");
    REFUSES("[data]\nsize = 64.5\n",
            "data.size: expected a whole number from 8 to 4096, or a list of two");
    REFUSES("[data]\nsize = \"64\"\n", "data.size: expected a whole number");
}

static void test_rules_clips(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(
        CHECK("model.kind=latte", "data.frames=5", "data.fps=8", "data.size=[64, 128]"), 0);
    assert_int_equal(CHECK("model.kind=latte", "data.frames=5", "data.stride=3",
                           "data.buckets=[\"64x64\", \"1x64x64\"]", "vae.chunk=4"),
                     0);
    BREAKS(
        "data.stride = 3 is for the file's own frames, data.fps = 8 chooses frames by their times",
        "model.kind=latte", "data.frames=5", "data.fps=8", "data.stride=3");
    BREAKS("data.fps and data.stride are for clips, and data.frames = 1", "data.fps=8");
    BREAKS("data.fps and data.stride are for clips, and data.frames = 1", "data.stride=2");
    BREAKS("data.buckets has a shape of 9 frames, data.frames = 5", "model.kind=latte",
           "data.frames=5", "data.buckets=[\"9x64x64\"]", "vae.chunk=4");
    BREAKS("data.latent_frames is for a data set of latents", "model.kind=latte", "data.frames=5",
           "data.latent_frames=5");
    assert_int_equal(CHECK("model.kind=latte", "data.frames=5", "trainer.clean_first_frame=0.1"),
                     0);
    assert_int_equal(CHECK("model.kind=latte", "data.frames=5", "vae.slice=auto"), 0);
    assert_int_equal(CHECK("model.kind=latte", "data.frames=5", "vae.slice=5"), 0);
    BREAKS("sample.first_frame with latents of one frame", "sample.first_frame=Makefile");
    BREAKS("sample.first_frame: /nowhere.png does not exist", "model.kind=latte", "data.frames=5",
           "sample.first_frame=/nowhere.png");
    BREAKS("sample.first_frame has no meaning with trainer.objective = \"eps\"", "model.kind=latte",
           "data.frames=5", "trainer.objective=eps", "sample.first_frame=Makefile");
    BREAKS("trainer.clean_first_frame = 0.1 with latents of one frame",
           "trainer.clean_first_frame=0.1");
    BREAKS("trainer.clean_first_frame has no meaning with trainer.objective = \"eps\"",
           "model.kind=latte", "data.frames=5", "trainer.objective=eps",
           "trainer.clean_first_frame=0.1");
    BREAKS("data.size = [64, 128] with model.kind = \"dit\", which is defined for squares only",
           "model.kind=dit", "data.size=[64, 128]");
    BREAKS("data.size = [64, 68] does not divide by 8", "data.size=[64, 68]");
    BREAKS("latents of 8 x 7 cells (data.latent_size) do not divide by model.patch = 2",
           "vae.model=", "data.latent_size=[8, 7]");
}

static void test_rules_batch(void **state)
{
    (void)state;
    write_models();
    BREAKS("--set: trainer.global_batch_size = 16 does not divide by trainer.ranks = 3",
           "trainer.ranks=3", "trainer.global_batch_size=16");
    BREAKS("share of 8 samples (trainer.global_batch_size = 16 over trainer.ranks = 2) does not "
           "divide by trainer.micro_batch_size = 3",
           "trainer.ranks=2", "trainer.micro_batch_size=3");
    BREAKS(
        "the window of 64 samples (window.batches = 4 x trainer.global_batch_size = 16) is not a "
        "multiple of vae.chunk = 5",
        "vae.chunk=5");
    BREAKS("not a multiple of text.chunk = 7", "text.chunk=7");
    BREAKS("not a multiple of loader.chunk = 24", "loader.chunk=24");
    BREAKS("the window of 64 samples is too small: two batches of 16 and a chunk for every vae "
           "instance (vae.instances = 5 x vae.chunk = 8) need 72: set window.batches to at least 5",
           "vae.instances=5");
    BREAKS("for every text instance", "text.instances=5");
    BREAKS("for every loader instance", "loader.instances=5");
    BREAKS("--set: vae.slice = 9 is larger than vae.chunk = 8", "vae.slice=9");
    BREAKS("--set: vae.slice = 6 is larger than data.frames = 5", "model.kind=latte",
           "data.frames=5", "vae.slice=6");
    assert_int_equal(CHECK("model.kind=latte", "data.frames=9", "vae.slice=9"), 0);
    assert_int_equal(CHECK("text.chunk=7", "model.kind=dit"), 0); /* no such role, no rule */
}

static void test_rules_hosts(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(CHECK("hosts.count=2", "hosts.key=k", "hosts.list=['a','b']"), 0);
    assert_int_equal(CHECK("hosts.count=2", "hosts.spare=1", "hosts.key=k"), 0); /* Slurm's */
    BREAKS("hosts.count = 2 without hosts.key", "hosts.count=2", "hosts.list=['a','b']");
    BREAKS("hosts.list names 1 machines, hosts.count + hosts.spare is 3", "hosts.count=2",
           "hosts.spare=1", "hosts.key=k", "hosts.list=['a']");
    BREAKS("hosts.number = 3, but the list has places 0 to 2", "hosts.count=2", "hosts.spare=1",
           "hosts.key=k", "hosts.number=3");
    BREAKS("hosts.count + hosts.spare = 65: at most 64 machines", "hosts.count=2", "hosts.spare=63",
           "hosts.key=k");
    BREAKS("a run of one host has no list and no spares", "hosts.spare=1");
    assert_int_equal(CHECK("hosts.count=2", "hosts.key=k", "device=cuda", "hosts.transport=nccl"),
                     0);
    BREAKS("hosts.transport = \"nccl\" with device = \"host\"", "hosts.count=2", "hosts.key=k",
           "hosts.transport=nccl");
    assert_int_equal(CHECK("hosts.count=3", "hosts.key=k"), LG_ERR_CONFIG);
    assert_message("does not divide by hosts.count = 3"); /* nor does the window, then */
    assert_int_equal(CHECK("hosts.count=64", "hosts.key=k"), LG_ERR_CONFIG);
    assert_message("does not divide by hosts.count = 64"); /* no sample for each */
}

static void test_rules_buckets(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(CHECK("data.buckets=square", "vae.chunk=16", "trainer.micro_batch_size=4"), 0);
    assert_int_equal(CHECK("data.buckets=[\"square\"]", "vae.model=", "data.latent_size=16"), 0);
    assert_int_equal(CHECK("data.buckets=ratio", "vae.chunk=4"), 0);
    assert_int_equal(CHECK("data.buckets=[\"64x64\", \"128x64\"]", "loader.chunk=16"), 0);
    BREAKS("--set: data.buckets: \"both\": expected HEIGHTxWIDTH in pixels", "data.buckets=both");
    BREAKS("data.buckets: 64x66: sides must be multiples of", "data.buckets=[\"64x66\"]");
    BREAKS("data.buckets: \"pixart\" is a table for data.size = 256, 512 or 1024, not 64",
           "data.buckets=pixart");
    BREAKS("data.buckets with model.kind = \"dit\", which is defined for squares only",
           "data.buckets=ratio", "model.kind=dit");
    assert_int_equal(CHECK("model.kind=sdxl", "parallel.sp=2", "trainer.ranks=2"), LG_ERR_CONFIG);
    assert_message("model.kind = \"sdxl\" has no sequence that several ranks could share");
    assert_message("model.kind = \"sdxl\" takes its shape from model.from, which is empty");
    BREAKS("model.fresh is for the shape of model.from, which is empty", "model.fresh=true");
    assert_int_equal(
        CHECK("model.from=examples/emoji-unet/unet", "model.fresh=true", "adapter.kind=lora"),
        LG_ERR_CONFIG);
    assert_message("adapts a model that is there");
    /* Each shape is split: 16 pixels are two rows of patches. */
    assert_int_equal(
        CHECK("data.buckets=[\"16x32\",\"32x16\"]", "parallel.sp=2", "trainer.ranks=2"), 0);
    BREAKS("data.buckets: 16x32 with parallel.sp = 4, which is more than the 2 rows of patches of "
           "its latents",
           "data.buckets=[\"16x32\",\"32x16\"]", "parallel.sp=4", "trainer.ranks=4");
    BREAKS("data.buckets without vae.model: latents of a data set have one shape",
           "data.buckets=ratio", "vae.model=", "data.latent_size=16");
    BREAKS("data.flip without vae.model: a latent is not mirrored", "data.flip=true",
           "vae.model=", "data.latent_size=16");
    BREAKS("data.crop = \"random\" without vae.model: latents are taken whole", "data.crop=random",
           "vae.model=", "data.latent_size=16");
    BREAKS("vae.chunk = 8 does not divide trainer.micro_batch_size = 4", "data.buckets=ratio",
           "vae.chunk=8", "trainer.micro_batch_size=4");
}

static void test_rules_model(void **state)
{
    (void)state;
    write_models();
    BREAKS("model.hidden = 128 does not divide by model.heads = 3", "model.heads=3");
    BREAKS(
        "model.hidden = 126 does not divide by 4, as the position embedding needs: set it to 128",
        "model.hidden=126", "model.heads=2");
    BREAKS("data.size = 68 does not divide by 8 (the VAE's factor 4 x model.patch = 2)",
           "data.size=68");
    BREAKS("model.kind = \"pixart\" needs text.model", "text.model=");
    BREAKS("sample.captions[1] = \"cat\": with model.kind = \"dit\" expected a label from 0 to 999",
           "model.kind=dit", "sample.captions=[\"1\", \"cat\"]");
    BREAKS("latents of 7 x 7 cells (data.latent_size) do not divide by model.patch = 2",
           "vae.model=", "data.latent_size=7");
    BREAKS("latents of 9 x 9 cells (data.size / 8, since vae.model is empty)",
           "vae.model=", "data.size=72");
}

static void test_rules_device(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(CHECK("device=cuda"), 0);
    assert_int_equal(CHECK("device=cuda", "precision=bf16", "trainer.gpus=0, 1,1023"), 0);
    BREAKS("--set: precision = \"bf16\" needs device = \"cuda\"", "precision=bf16");
    BREAKS("the host computes in fp32 alone; set precision = \"fp32\"", "precision=tf32");
    BREAKS("--set: trainer.gpus = \"1\" has no meaning with device = \"host\"", "trainer.gpus=1");
    BREAKS("vae.gpus = \"0,1\" has no meaning", "vae.gpus=0,1");
    static const char *const wrong[] = {"", "a", "0,", ",0", "0;1", "-1", "1024", "99999", "0 1"};
    for (size_t i = 0; i < LG_ARRAY_LEN(wrong); i++) {
        char set[32];
        snprintf(set, sizeof set, "text.gpus=%s", wrong[i]);
        BREAKS("\": expected GPU numbers from 0 to 1023", "device=cuda", set);
        BREAKS("--set: text.gpus = \"", set);
    }
}

static void test_rules_training(void **state)
{
    (void)state;
    write_models();
    BREAKS("model.frozen = \"int8\" is for weights that are not trained, but all are",
           "model.frozen=int8", "trainer.groups=['* lr=0.5']");
    assert_int_equal(CHECK("model.frozen=int8", "trainer.groups=['* lr=0.5', '*.bias frozen']"), 0);
    assert_int_equal(CHECK("model.kind=flux", "text.model="), LG_ERR_CONFIG);
    assert_message("model.kind = \"flux\" needs text.t5.model");
    assert_int_equal(CHECK("adapter.kind=lora", "adapter.from=/tmp"), LG_ERR_CONFIG);
    assert_message("adapter.from: /tmp is a directory: expected the file of an adapter's weights");
    assert_int_equal(CHECK("adapter.kind=lora", "adapter.from=/tmp/none"), LG_ERR_CONFIG);
    assert_message("adapter.from: /tmp/none does not exist");
    BREAKS("adapter.from has no meaning without an adapter", "adapter.from=/proc/self/exe");
    BREAKS("\"*.bias storage=int8\" has a storage, which is for weights that are not trained",
           "trainer.groups=['*.bias storage=int8']");
    assert_int_equal(
        CHECK("trainer.groups=['*.ff.* frozen storage=int8', '* optimizer=adamw8bit']"), 0);
    BREAKS("trainer.min_snr_gamma = 5 has no meaning with trainer.objective = \"flow\"",
           "trainer.min_snr_gamma=5");
    BREAKS("trainer.beta1 = 1: expected less than 1", "trainer.beta1=1");
    BREAKS("trainer.loss_scale = 1000: expected a power of two", "trainer.loss_scale=1000");
    BREAKS("trainer.beta2 = 1: expected less than 1", "trainer.beta2=1");
    BREAKS("trainer.warmup_steps = 50 leaves nothing of the 50 steps (trainer.lr_steps)",
           "trainer.warmup_steps=50", "trainer.lr_steps=50", "trainer.lr_schedule=cosine");
}

/* What is wrong in every way: test_recompute.c. */
static void test_rules_memory(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(CHECK("memory.recompute=[0, 3]"), 0);
    assert_int_equal(CHECK("memory.recompute=every:2"), 0);
    BREAKS("--set: memory.recompute: there is no block 4: the net has 4, from 0 on",
           "memory.recompute=[0, 4]");
    assert_int_equal(CHECK("memory.recompute=[0, 4]", "model.depth=5"), 0);
    BREAKS("--set: memory.recompute: \"ratio:2\" has no number from 0 to 1",
           "memory.recompute=ratio:2");
    lg_config *c = load("[memory]\n\nrecompute = 'blocks'\n[data]\npath = '/'\n"
                        "[model]\nkind = 'dit'\n",
                        NULL);
    assert_int_equal(lg_config_check(c), LG_ERR_CONFIG);
    assert_message("p.toml:3: memory.recompute: \"blocks\" is unknown; expected \"none\"");
    lg_config_free(&c);
    assert_int_equal(CHECK("memory.cast_weights=true"), 0);
    BREAKS("memory.cast_weights = true casts weights where the GPU has them",
           "memory.cast_weights=true", "memory.offload_optimizer=true");
}

static void test_rules_previews(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(CHECK("sample.captions=['a']", "checkpoint.every=20", "sample.every=40"), 0);
    BREAKS("sample.every = 30 is not a multiple of checkpoint.every = 20", "sample.every=30",
           "sample.captions=['a']", "checkpoint.every=20");
    BREAKS("set it to one, and checkpoint.every above 0", "sample.every=30",
           "sample.captions=['a']");
    BREAKS("--set: sample.every = 20, but there is nothing to draw", "sample.every=20",
           "checkpoint.every=20");
    BREAKS("sample.every = 20 needs vae.model", "sample.every=20", "checkpoint.every=20",
           "sample.captions=['a']", "vae.model=");
}

/* What previews are written as, and how fast they play. */
static void test_previews_of_clips(void **state)
{
    (void)state;
    static const struct {
        const char *sets[3];
        const char *format;
        double fps;
    } cases[] = {{{"data.frames=1"}, "png", 8},
                 {{"data.frames=9"}, "gif", 8},
                 {{"data.latent_frames=2"}, "gif", 8},
                 {{"data.frames=9", "data.fps=24"}, "gif", 24},
                 {{"data.frames=9", "data.fps=24", "sample.fps=12"}, "gif", 12},
                 {{"data.frames=9", "sample.format=\"webm\""}, "webm", 8},
                 {{"sample.format=\"gif\""}, "gif", 8}};
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        int n = 0;
        while (n < 3 && cases[i].sets[n]) n++;
        lg_config *c = NULL;
        if (lg_config_load(scratch_write("p.toml", ""), cases[i].sets, n, &c) < 0)
            fail_msg("%s", lg_err_text());
        assert_string_equal(lg_sample_format(c), cases[i].format);
        assert_true(lg_sample_fps(c) == cases[i].fps);
        lg_config_free(&c);
    }
}

static void test_rules_histograms(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(
        CHECK("tensorboard.enabled=true", "checkpoint.every=20", "tensorboard.histograms_every=40"),
        0);
    BREAKS("--set: tensorboard.histograms_every = 30 is not a multiple of checkpoint.every = 20",
           "tensorboard.histograms_every=30", "checkpoint.every=20", "tensorboard.enabled=true");
    BREAKS("tensorboard.histograms_every = 20 without event files: set tensorboard.enabled = true",
           "tensorboard.histograms_every=20", "checkpoint.every=20");
}

static void test_rules_restarts(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(CHECK("vae.restarts_max=1", "text.restart_window_s=5"), 0);
    BREAKS("--set: text.restarts_max = 2 has no meaning: model.kind is \"dit\", so this run has no "
           "such role; remove it",
           "text.restarts_max=2", "model.kind=dit", "text.model=");
    BREAKS("vae.restart_window_s = 9 has no meaning: vae.model is empty", "vae.restart_window_s=9",
           "vae.model=", "data.latent_size=16");
    REFUSES(
        "[ema]\nrestarts_max = -1\n[checkpoint]\nrestart_window_s = 86401\n",
        "p.toml:2:1: ema.restarts_max is out of range: expected a whole number from 0 to 1000000",
        "p.toml:4:1: checkpoint.restart_window_s is out of range");
}

static void test_rules_captions(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(CHECK("data.caption=random", "data.shuffle_tags=true", "data.keep_tags=2"), 0);
    BREAKS("--set: data.keep_tags = 2, but all tags keep their places", "data.keep_tags=2");
    BREAKS("data.shuffle_tags has no meaning with model.kind = \"dit\"", "data.shuffle_tags=true",
           "model.kind=dit", "text.model=");
    BREAKS("data.caption has no meaning with model.kind = \"dit\"", "data.caption=first",
           "model.kind=dit", "text.model=");
}

static void test_sources(void **state)
{
    (void)state;
    lg_config *a = load("[data]\nflip = true\n[[data.source]]\npath = './a,/b'\nweight = 0.9\n"
                        "[[data.source]]\nrepeats = 10\npath = 'c'\n[job]\nname = 'x'\n",
                        NULL);
    char want[2 * PATH_MAX];
    snprintf(want, sizeof want, "%s,/b", scratch_path("a"));
    for (int round = 0; round < 2; round++) { /* as written, and as saved */
        assert_int_equal(a->data_source.n, 2);
        assert_string_equal(a->data_source.v[0].path, want);
        assert_true(a->data_source.v[0].weight == 0.9 && a->data_source.v[0].repeats == 1);
        assert_string_equal(a->data_source.v[1].path, scratch_path("c"));
        assert_true(a->data_source.v[1].weight == 0 && a->data_source.v[1].repeats == 10);
        assert_true(a->data_flip);
        assert_string_equal(a->job_name, "x");
        char *saved = lg_config_to_toml(a);
        lg_config_free(&a);
        a = load(saved, NULL);
        free(saved);
    }
    lg_config_free(&a);
    a = load("[[data.source]]\npath = 'a'\n", "data.source=[{path = '/x'}, {path = '/y'}]");
    assert_int_equal(a->data_source.n, 2);
    assert_string_equal(a->data_source.v[1].path, "/y");
    lg_config_free(&a);
    a = load("[[data.source]]\npath = 'a'\n", "data.source=[]");
    assert_int_equal(a->data_source.n, 0);
    lg_config_free(&a);
    REFUSES("[[data.source]]\npath = 'a'\nwieght = 1\n[[data.source]]\nweight = 0\npath = 'b'\n"
            "[[data.source]]\nrepeats = 1.5\n",
            "p.toml:3:1: unknown key data.source[0].wieght: a source has path, weight and repeats",
            "p.toml:5:1: data.source[1].weight is out of range: expected a number from 1e-06 to "
            "1e+06, got 0",
            "p.toml:8:1: data.source[2].repeats: expected a whole number from 1 to 10000, got "
            "1.5",
            "p.toml:1:8: data.source[2] has no path");
    REFUSES("[data.source]\npath = 'a'\n",
            "data.source: expected tables [[data.source]], got a table");
    REFUSES("[[data.source]]\npath = 'a'\nweight = -1\nrepeats = 0\n",
            "data.source[0].weight is out of range", "data.source[0].repeats is out of range");
    REFUSES("[[trainer]]\nlr = 1\n", "trainer is a section: write [trainer] once");
    const char *const sets[] = {"data.source.0.weight=1"};
    assert_int_equal(lg_config_load(scratch_write("p.toml", ""), sets, 1, &a), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "--set: data.source.0.weight cannot be set alone"));
}

static void test_rules_sources(void **state)
{
    (void)state;
    write_models();
    char sources[3 * PATH_MAX], other[3 * PATH_MAX];
    scratch_write("s/x.tar", "");
    snprintf(sources, sizeof sources, "data.source=[{path='%s',weight=0.9},{path='%s/*.tar'}]",
             scratch_path("s"), scratch_path("s"));
    assert_int_equal(CHECK("data.path=", sources), 0);
    BREAKS("and data.source: name all data sets as sources", sources);
    BREAKS("with data.buckets, where an epoch holds each item a whole number of times",
           "data.path=", "data.buckets=ratio", sources);
    snprintf(other, sizeof other, "data.source=[{path='%s',weight=1},{path='%s'}]",
             scratch_path("s"), scratch_path("s"));
    BREAKS("add up to 1, which leaves nothing for the 1 sources without one", "data.path=", other);
    snprintf(other, sizeof other, "data.source=[{path='%s',weight=1,repeats=2}]",
             scratch_path("s"));
    BREAKS("data.source[0] has a weight of 1, which says how often its items come, and repeats = 2",
           "data.path=", other);
    BREAKS("data.source[1].path: /no/such does not exist",
           "data.path=", "data.source=[{path='/tmp'},{path='/no/such,/tmp'}]");
}

/* Told from a name that is wrong. */
static void test_rules_of_closed_folders(void **state)
{
    (void)state;
    static const char *const set[] = {"vae.model", "data.path"};
    char text[LG_PATH_BYTES + 32];
    lg_config *c[2];
    write_models();
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof text, "%s=%s", set[i], scratch_path("closed/x"));
        c[i] = load("", text);
    }
    scratch_write("closed/x/config.json", "{}");
    assert_int_equal(chmod(scratch_path(""), 0755) + chmod(scratch_path("closed"), 0), 0);
    const uid_t us = geteuid();
    if (us == 0) assert_int_equal(seteuid(65534), 0);
    int rc[2];
    for (int i = 0; i < 2; i++) {
        rc[i] = lg_config_check(c[i]);
        assert_message(i == 0 ? "closed/x/config.json: Permission denied"
                              : "closed/x: Permission denied");
        lg_config_free(&c[i]);
    }
    if (us == 0) assert_int_equal(seteuid(us), 0);
    assert_int_equal(chmod(scratch_path("closed"), 0700), 0);
    assert_true(rc[0] == LG_ERR_CONFIG && rc[1] == LG_ERR_CONFIG);
}

static void test_rules_files(void **state)
{
    (void)state;
    write_models();
    BREAKS("data.path is empty", "data.path=");
    BREAKS("/no/such does not exist", "data.path=/no/such,/tmp");
    BREAKS("/no/such/*.tar does not exist", "data.path=/no/such/*.tar");
    BREAKS("--set: vae.model: /no/config.json does not exist", "vae.model=/no");
    BREAKS("--set: text.model: /no/config.json does not exist", "text.model=/no");
    BREAKS("job.name = \"a/b\"", "job.name=a/b");
    BREAKS("hold a slash or a control character", "job.name=a\nb");
    char longest[16 + 101] = "job.name=", too_long[16 + 4096] = "job.dir=/";
    memset(longest + strlen(longest), 'n', 101);
    BREAKS("or be longer than 100 bytes", longest);
    BREAKS("job.dir is empty: name the directory of the run", "job.dir=");
    BREAKS("has a control character in it: choose another", "job.dir=/tmp/a\nb");
    BREAKS("has a folder called ~", "job.dir=~/run");
    BREAKS("has a folder called ~", "job.dir=/tmp/~");
    memset(too_long + strlen(too_long), 'd', 3796);
    BREAKS("job.dir has 3797 bytes: expected at most 3796", too_long);
    BREAKS("trainer.resume_from: /tmp/a?b has a control character",
           "trainer.resume_from=/tmp/a\nb");
    BREAKS("trainer.init_from: /no does not exist", "trainer.init_from=/no");
    BREAKS("trainer.resume_from: /tmp has no manifest.json", "trainer.resume_from=/tmp");
    BREAKS("job.dir: /dev/null exists and is not a directory", "job.dir=/dev/null");
    scratch_write("t5/config.json", "{\"num_layers\": 4}");
    BREAKS("p.toml:4: text.model: ", "trainer.ranks=1");
    assert_message("t5/config.json: d_model is missing");
    scratch_write("t5/config.json", "{\"d_model\": 1.5, \"num_layers\": 4}");
    BREAKS("d_model is wrong: expected a whole number from 1 to", "trainer.ranks=1");
    scratch_write("t5/config.json", "{");
    BREAKS("t5/config.json is not a JSON object", "trainer.ranks=1");
    write_models();
    assert_int_equal(unlink(scratch_path("t5/spiece.model")), 0);
    BREAKS("t5/spiece.model, or tokenizer.json, does not exist", "trainer.ranks=1");
    write_models();
    assert_int_equal(unlink(scratch_path("t5/model.safetensors")), 0);
    BREAKS("t5/model.safetensors does not exist", "trainer.ranks=1");
    scratch_write("t5/model-00001-of-00001.safetensors", "x");
    assert_int_equal(CHECK("trainer.ranks=1"), 0);
    assert_int_equal(unlink(scratch_path("t5/model-00001-of-00001.safetensors")), 0);
    scratch_write("t5/model-00001-of-00003.safetensors", "x");
    scratch_write("t5/model-00003-of-00003.safetensors", "x");
    BREAKS("t5/model-00002-of-00003.safetensors does not exist; the weights are in 3 parts",
           "trainer.ranks=1");
    scratch_write("t5/model-00002-of-00003.safetensors", "x");
    assert_int_equal(CHECK("trainer.ranks=1"), 0);
    assert_int_equal(unlink(scratch_path("vae/diffusion_pytorch_model.safetensors")), 0);
    BREAKS("vae/diffusion_pytorch_model.safetensors does not exist", "trainer.ranks=1");
    scratch_write("vae/diffusion_pytorch_model.bin", "x");
    BREAKS("vae/diffusion_pytorch_model.bin, which is a pickle and not read: fetch",
           "trainer.ranks=1");
    scratch_write("vae/diffusion_pytorch_model.safetensors", "x");
    for (int i = 1; i <= 3; i++) {
        char part[64];
        snprintf(part, sizeof part, "t5/model-%05d-of-00003.safetensors", i);
        assert_int_equal(unlink(scratch_path(part)), 0);
    }
    scratch_write("t5/pytorch_model.bin.index.json", "{}");
    BREAKS("t5/pytorch_model.bin.index.json, which is a pickle", "trainer.ranks=1");
    scratch_write("t5/model.safetensors", "x");
    scratch_write("vae/config.json", "{\"_class_name\": \"VQModel\"}");
    BREAKS("_class_name is VQModel: expected AutoencoderKL or AutoencoderKLLTXVideo",
           "trainer.ranks=1");
}

/* A CLIP, whose tokenizer lies beside it as in a folder of diffusers'. */
static void test_rules_clip(void **state)
{
    (void)state;
    char model[300];
    write_models();
    snprintf(model, sizeof model, "text.model=%s", scratch_path("pipeline/text_encoder"));
    scratch_write("pipeline/text_encoder/config.json", "{\"model_type\": \"clip_text_model\"}");
    scratch_write("pipeline/text_encoder/model.safetensors", "x");
    BREAKS("text_encoder/vocab.json with merges.txt, or tokenizer.json, does not exist, nor in ",
           model);
    scratch_write("pipeline/tokenizer/vocab.json", "{}");
    scratch_write("pipeline/tokenizer/merges.txt", "");
    if (CHECK(model, "text.length=77") < 0) fail_msg("%s", lg_err_text());
    BREAKS("text.length = 78: the text encoder in text.model takes 77 tokens", model,
           "text.length=78");
    scratch_write("pipeline/text_encoder/config.json",
                  "{\"model_type\": \"clip_text_model\", \"max_position_embeddings\": 20}");
    BREAKS("text.length = 24: the text encoder in text.model takes 20 tokens", model);
    scratch_write("pipeline/text_encoder/config.json", "{\"model_type\": \"umt5\"}");
    BREAKS("model_type is umt5: t5 and clip_text_model can be read", model);
}

static void test_rules_collect(void **state)
{
    (void)state;
    write_models();
    assert_int_equal(CHECK("model.heads=3", "vae.slice=9", "trainer.min_snr_gamma=5"),
                     LG_ERR_CONFIG);
    assert_message("3 errors:");
}

/* ---- resume, documents, the example ---- */

static void test_compatible(void **state)
{
    (void)state;
    lg_config *a = load("[trainer]\nmax_steps = 60\n[vae]\ninstances = 1\n", NULL);
    lg_config *b =
        load("[trainer]\nmax_steps = 80\n[vae]\ninstances = 3\n[job]\nname = 'n'\n", NULL);
    assert_int_equal(lg_config_compatible(a, b, NULL, NULL), 0);
    assert_int_equal(lg_config_compatible(b, a, NULL, NULL), LG_ERR_MISMATCH);
    assert_message("p.toml:2: trainer.max_steps was 80 when the run began and is 60 now");
    lg_config_free(&b);
    b = load("[trainer]\nmax_steps = 60\n[memory]\nrecompute = 'block'\n", NULL);
    assert_int_equal(lg_config_compatible(a, b, NULL, NULL), 0);
    lg_config_free(&b);
    b = load("[text]\nlength = 32\n[trainer]\nmax_steps = 60\nlr=1e-3\n", NULL);
    assert_int_equal(lg_config_compatible(a, b, NULL, NULL), LG_ERR_MISMATCH);
    assert_message("p.toml:2: text.length was 24 when the run began and is 32 now");
    assert_message("p.toml:5: trainer.lr was 0.0001 when the run began and is 0.001 now");
    /* One decides on GPUs alone. */
    static const struct {
        const char *before, *now;
        int rc;
    } offload[] = {
        {"device = 'host'", "device = 'host'\n[memory]\noffload_optimizer = true", 0},
        {"device = 'cuda'", "device = 'cuda'\n[memory]\noffload_optimizer = true", LG_ERR_MISMATCH},
        {"device = 'cuda'\n[memory]\noffload_optimizer = true", "device = 'cuda'", LG_ERR_MISMATCH},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(offload); i++) {
        lg_config *before = load(offload[i].before, NULL), *now = load(offload[i].now, NULL);
        assert_int_equal(lg_config_compatible(before, now, NULL, NULL), offload[i].rc);
        if (offload[i].rc) assert_message("memory.offload_optimizer was ");
        lg_config_free(&before);
        lg_config_free(&now);
    }
    /* Some may, when they are named. */
    char *named[] = {(char *)"trainer.ranks", NULL};
    const struct lg_strlist except = {.v = named, .n = 1};
    bool changed = true;
    lg_config_free(&b);
    b = load("[trainer]\nmax_steps = 60\n", NULL);
    assert_int_equal(lg_config_compatible(a, b, &except, &changed), 0);
    assert_false(changed);
    lg_config_free(&b);
    b = load("[trainer]\nmax_steps = 60\nranks = 2\n", NULL);
    assert_int_equal(lg_config_compatible(a, b, &except, &changed), 0);
    assert_true(changed);
    lg_config_free(&b);
    b = load("[trainer]\nmax_steps = 60\nranks = 2\nthreads = 2\n", NULL);
    assert_int_equal(lg_config_compatible(a, b, &except, &changed), LG_ERR_MISMATCH);
    assert_message("trainer.threads was 1 when the run began and is 2 now");
    lg_config_free(&a);
    lg_config_free(&b);
}

/* Each choice of model.kind has a row in denoisers.def, in that order. */
static void test_denoisers(void **state)
{
    (void)state;
    char choices[256] = "";
    for (int i = 0; i < LG_DENOISER_KINDS; i++) {
        const char *name = lg_denoiser_info((lg_denoiser_kind)i)->name;
        assert_int_equal(lg_denoiser_kind_of(name), i);
        snprintf(choices + strlen(choices), sizeof choices - strlen(choices), "%s%s", i ? "|" : "",
                 name);
    }
    assert_string_equal(choices, lg_key_at(lg_key_find("model.kind"))->choices);
}

static void test_document(void **state)
{
    (void)state;
    const char *path = "docs/config.md";
    char *expected = lg_config_markdown(), *found = NULL;
    size_t bytes;
    if (getenv("LG_REGENERATE"))
        assert_int_equal(lg_publish_file(path, expected, strlen(expected)), 0);
    if (lg_read_file(path, 1 << 20, &found, &bytes) < 0 || strcmp(found, expected) != 0)
        fail_msg("%s is not what config/schema.def says; regenerate it from the repository's root "
                 "with LG_REGENERATE=1 build/tests/test_config",
                 path);
    free(found);
    free(expected);
}

static void test_exit_codes(void **state)
{
    (void)state;
    char *doc = NULL, row[64];
    size_t bytes;
    assert_int_equal(lg_read_file("docs/exit-codes.md", 1 << 20, &doc, &bytes), 0);
    for (int code = 0; strcmp(lg_err_name(code), "?") != 0; code--) {
        snprintf(row, sizeof row, "\n| %d | %s |", -code, lg_err_name(code));
        if (!strstr(doc, row)) fail_msg("docs/exit-codes.md has no row \"%s\"", row + 1);
    }
    free(doc);
}

/* The examples are right, with models and data that a user gets first put in their place. */
static void test_examples(void **state)
{
    (void)state;
    char data[LG_PATH_BYTES]; /* made by `make example-data` */
    snprintf(data, sizeof data, "data.path=%s", scratch_write("x.tar", ""));
    const char *vae = "vae.model=examples/emoji/vae";
    const struct {
        const char *file, *sets[3];
        int n_sets, ranks, batch;
    } example[] = {
        {"examples/emoji/pipeline.toml", {data}, 1, 2, 16},
        {"examples/emoji/pipeline-gpu.toml", {data}, 1, 1, 512},
        {"examples/emoji-video/pipeline.toml", {data}, 1, 2, 16},
        {"examples/emoji-video/gpu.toml", {data}, 1, 1, 128},
        {"examples/dit-xl2/pipeline-class.toml", {data, vae}, 2, 1, 256},
        {"examples/dit-xl2/pipeline-text.toml",
         {data, vae, "text.model=examples/emoji/text_encoder"},
         3,
         1,
         256},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(example); i++) {
        lg_config *c = NULL;
        if (lg_config_load(example[i].file, example[i].sets, example[i].n_sets, &c) < 0 ||
            lg_config_check(c) < 0)
            fail_msg("%s", lg_err_text());
        assert_int_equal(c->trainer_ranks, example[i].ranks);
        assert_int_equal(c->trainer_global_batch_size, example[i].batch);
        lg_config_free(&c);
    }
}

/* A section of an encoder: of the only one, another word for [text]; of one that the model lacks, refused. */
static void test_encoders(void **state)
{
    (void)state;
    lg_config *c =
        load("[text]\nlength = 9\nchunk = 2\n[text.t5]\nlength = 11\nmodel = 'here'\n", NULL);
    assert_int_equal(c->text_length, 11);
    assert_int_equal(c->text_chunk, 2);
    assert_string_equal(c->text_model, scratch_path("here"));
    char *text = lg_config_to_toml(c);
    assert_null(strstr(text, "[text.t5]")); /* it is said once */
    assert_non_null(strstr(text, "length = 11"));
    free(text);
    lg_config_free(&c);
    c = load("", "text.t5.length=13");
    assert_int_equal(c->text_length, 13);
    lg_config_free(&c);
    struct lg_text_config of[LG_TEXTS_MAX];
    c = load("[text]\ndropout = 0.25\n", NULL);
    assert_int_equal(lg_config_texts(c, of), 1);
    assert_true(of[0].role == LG_ROLE_text && of[0].dropout == 0.25 &&
                of[0].info->padding == LG_PADDING_MASKED);
    assert_string_equal(of[0].section, "text");
    lg_config_free(&c);
    REFUSES("[text.clip_l]\nlength = 7\n",
            "p.toml:2: text.clip_l.length: model.kind = \"pixart\" has no such text encoder",
            "its text encoders are: t5");
    REFUSES("[model]\nkind = 'dit'\n[text.t5]\nlength = 7\n", "its text encoders are: none");
    REFUSES("[text.clip]\nlength = 7\n",
            "unknown section [text.clip]: text encoders have these: [text.clip_l]");
    REFUSES_SET("text.t5.lenght=7", "unknown key text.t5.lenght", "text.t5.length");
    /* SD3 may go without T5, of which then the length counts. */
    c = load("[model]\nkind = 'sd3'\n[text]\nchunk = 2\n[text.clip_l]\nmodel = "
             "'l'\n[text.t5]\nlength = 77\n",
             NULL);
    assert_int_equal(lg_config_texts(c, of), 2);
    assert_string_equal(of[2].section, "text.t5");
    assert_int_equal(of[2].length, 77);
    text = lg_config_to_toml(c);
    lg_config_free(&c);
    scratch_write("again.toml", text);
    free(text);
    assert_int_equal(lg_config_load(scratch_path("again.toml"), NULL, 0, &c), 0);
    assert_int_equal(lg_config_texts(c, of), 2);
    assert_int_equal(of[2].length, 77);
    lg_config_free(&c);
    REFUSES("[model]\nkind = 'sd3'\n[text.t5]\nstorage = 'fp8'\n",
            "p.toml:4: text.t5.storage without text.t5.model: name the encoder's folder");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_defaults),
        TEST(test_values),
        TEST(test_paths),
        TEST(test_overrides),
        TEST(test_lists),
        TEST(test_round_trip),
        TEST(test_syntax),
        TEST(test_deep_nesting),
        TEST(test_types_and_ranges),
        TEST(test_unknown_names),
        TEST(test_bad_overrides),
        TEST(test_collects),
        TEST(test_rules_hold),
        TEST(test_rules_batch),
        TEST(test_rules_hosts),
        TEST(test_rules_clips),
        TEST(test_sides),
        TEST(test_rules_buckets),
        TEST(test_rules_model),
        TEST(test_rules_training),
        TEST(test_rules_device),
        TEST(test_rules_captions),
        TEST(test_sources),
        TEST(test_rules_sources),
        TEST(test_rules_of_closed_folders),
        TEST(test_rules_files),
        TEST(test_rules_previews),
        TEST(test_previews_of_clips),
        TEST(test_rules_memory),
        TEST(test_rules_restarts),
        TEST(test_rules_histograms),
        TEST(test_rules_clip),
        TEST(test_encoders),
        TEST(test_rules_collect),
        TEST(test_compatible),
        TEST(test_denoisers),
        TEST(test_document),
        TEST(test_exit_codes),
        TEST(test_examples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
