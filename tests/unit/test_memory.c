/* What a run needs on each device: adding up what roles print, refusing what is no such thing, and the
 * sentences when it does not fit; what lg-device tells of GPUs. */
#include "supervisor/run/gpus.h"
#include "supervisor/commands/memory_tip.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define GIB ((uint64_t)1 << 30)

static int setup(void **state)
{
    *state = calloc(1, sizeof(struct lg_memory));
    return *state ? 0 : -1;
}

static int teardown(void **state)
{
    lg_memory_free(*state);
    free(*state);
    lg_err_clear();
    return 0;
}

static void assert_message(const char *part)
{
    if (!strstr(lg_err_message(), part))
        fail_msg("expected \"%s\" in:\n%s", part, lg_err_message());
}

static const struct lg_memory_device *device(const struct lg_memory *m, const char *name)
{
    for (int i = 0; i < m->n_devices; i++)
        if (!strcmp(m->device[i].name, name)) return &m->device[i];
    fail_msg("no device %s", name);
    return NULL;
}

static void add(struct lg_memory *m, lg_role r, const char *output)
{
    if (lg_memory_add(m, r, output) < 0) fail_msg("%s", lg_err_text());
}

static void room(struct lg_memory *m, const char *name, uint64_t total, uint64_t available)
{
    assert_int_equal(lg_memory_room(m, &(struct lg_memory_room){.device = name,
                                                                .product = "NVIDIA H200",
                                                                .total_bytes = total,
                                                                .free_bytes = available}),
                     0);
}

static const char vae[] =
    "2026-01-01T00:00:00.000Z WARN vae no cuDNN {none}\n"
    "{\"regions\": [{\"name\": \"window/0/latent\", \"device\": \"cuda:0\", \"bytes\": 1000},\n"
    "  {\"name\": \"vae/0/weights\", \"device\": \"cuda:1\", \"bytes\": 20}],\n"
    " \"private\": [{\"device\": \"cuda:1\", \"bytes\": 300, \"instances\": 2},\n"
    "  {\"device\": \"host\", \"bytes\": 7, \"instances\": 2, \"note\": \"half of it\"}], "
    "\"role\": \"vae\"}\n";
static const char trainer[] =
    "{\"regions\": [{\"name\": \"window/0/latent\", \"device\": \"cuda:0\", \"bytes\": 1000},\n"
    "  {\"name\": \"trainer/0/grad\", \"device\": \"cuda:0\", \"bytes\": 50}],\n"
    " \"private\": [{\"device\": \"cuda:0\", \"bytes\": 4000, \"instances\": 1},\n"
    "  {\"device\": \"cuda:1\", \"bytes\": 5000, \"instances\": 1}]}\n";

static void test_sums(void **state)
{
    struct lg_memory *m = *state;
    add(m, LG_ROLE_vae, vae);
    add(m, LG_ROLE_trainer, trainer);
    assert_int_equal(m->n_regions, 3); /* the window's counts once */
    const struct lg_memory_device *a = device(m, "cuda:0"), *b = device(m, "cuda:1");
    assert_int_equal(a->region_bytes, 2 * LG_CUDA_PIECE_BYTES); /* 1000 and 50, in whole pieces */
    assert_int_equal(b->region_bytes, LG_CUDA_PIECE_BYTES);
    assert_int_equal(lg_memory_private(a), 4000);
    assert_int_equal(lg_memory_private(b), 5300);
    assert_int_equal(b->private_bytes[LG_ROLE_vae], 300);
    assert_int_equal(a->contexts, 1);
    assert_int_equal(b->contexts, 3);
    assert_int_equal(lg_memory_need(b), 5300 + LG_CUDA_PIECE_BYTES + 3 * LG_CUDA_CONTEXT_BYTES);
    assert_int_equal(lg_memory_need(device(m, "host")), 7); /* no contexts, no pieces there */
    assert_int_equal(device(m, "host")->contexts, 0);
}

static void test_print(void **state)
{
    struct lg_memory *m = *state;
    char *text = NULL;
    size_t bytes;
    add(m, LG_ROLE_vae, vae);
    room(m, "cuda:1", 141 * GIB, 140 * GIB);
    FILE *out = open_memstream(&text, &bytes);
    lg_memory_print(m, out);
    fclose(out);
    static const char *const lines[] = {
        "vae/0/weights                            cuda:1        2.0 MiB\n",
        "\ncuda:1  NVIDIA H200\n",
        "\n  regions                     2.0 MiB\n",
        "\n  vae, private                  300 B\n    half of it\n",
        "\n  together                    2.0 MiB\n",
        "\n  2 CUDA contexts             1.1 GiB\n",
        "\n  with them                   1.1 GiB\n",
        "\n  free now                  140.0 GiB of 141.0 GiB\n",
        "\nhost\n  regions                         0 B\n  vae, private                    7 B\n"
        "    half of it\n"
        "  together                        7 B\n",
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(lines); i++)
        if (!strstr(text, lines[i])) fail_msg("expected \"%s\" in:\n%s", lines[i], text);
    free(text);
}

static void refuses(void **state, int code, const char *output, const char *message)
{
    struct lg_memory m = {0};
    assert_int_equal(lg_memory_add(&m, LG_ROLE_ema, output), code);
    assert_message("lg-ema --plan: ");
    assert_message(message);
    lg_memory_free(&m);
    lg_err_clear();
}
#define REGION(text)  "{\"regions\": [" text "], \"private\": []}"
#define PRIVATE(text) "{\"regions\": [], \"private\": [" text "]}"

#define LONG "0123456789012345678901234567890123456789012345678901234567890123456789"

static void test_refuses(void **state)
{
    static const struct {
        const char *output, *message;
    } wrong[] = {
        {"", "no JSON"},
        {"lg-ema: something else\n", "no JSON"},
        {"{\"regions\": [", "no JSON"},
        {"[1]", "no JSON"},
        {"{\"regions\": []}", "\"private"},
        {"{\"regions\": 5, \"private\": []}", "no JSON with the lists"},
        {REGION("{\"name\": \"a\", \"device\": \"host\"}"), "\"bytes\" is missing"},
        {REGION("{\"name\": \"a\", \"device\": \"host\", \"bytes\": -1}"), "\"bytes\""},
        {REGION("{\"name\": \"a\", \"device\": \"host\", \"bytes\": 1.5}"), "\"bytes\""},
        {REGION("{\"name\": \"a\", \"device\": \"host\", \"bytes\": 1e16}"), "\"bytes\""},
        {REGION("{\"name\": \"a\", \"device\": \"host\", \"bytes\": 1e999}"), "\"bytes\""},
        {REGION("{\"name\": \"a\", \"device\": \"host\", \"bytes\": \"1\"}"), "\"bytes\""},
        {REGION("{\"device\": \"host\", \"bytes\": 1}"), "\"name\" is missing"},
        {REGION("{\"name\": \"\", \"device\": \"host\", \"bytes\": 1}"), "no region's name"},
        {REGION("{\"name\": \"a\", \"bytes\": 1}"), "\"device\" is missing"},
        {REGION("{\"name\": \"a\", \"device\": \"\", \"bytes\": 1}"), "no device"},
        {REGION("{\"name\": \"a\", \"device\": \"cuda:00000000000\", \"bytes\": 1}"), "no device"},
        {PRIVATE("{\"device\": \"host\", \"bytes\": 1}"), "\"instances\""},
        {PRIVATE("{\"device\": \"host\", \"bytes\": 1, \"instances\": 65}"), "\"instances\""},
        {PRIVATE("3"), "\"device\" is missing"},
        {PRIVATE("{\"device\": \"host\", \"bytes\": \"1\", \"instances\": 1}"), "\"bytes\""},
        {PRIVATE("{\"device\": \"\", \"bytes\": 1, \"instances\": 1}"), "no device"},
        {REGION("{\"name\": \"" LONG LONG "\", \"device\": \"host\", \"bytes\": 1}"),
         "no region's name"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(wrong); i++)
        refuses(state, LG_ERR_CORRUPT, wrong[i].output, wrong[i].message);
    refuses(state, LG_ERR_MISMATCH,
            REGION("{\"name\": \"a\", \"device\": \"host\", \"bytes\": 1},"
                   "{\"name\": \"a\", \"device\": \"host\", \"bytes\": 2}"),
            "region a has 2 bytes on host, but another role says 1 on host");
    refuses(state, LG_ERR_MISMATCH,
            REGION("{\"name\": \"a\", \"device\": \"host\", \"bytes\": 1},"
                   "{\"name\": \"a\", \"device\": \"cuda:0\", \"bytes\": 1}"),
            "region a has 2097152 bytes on cuda:0, but another role says 1 on host");
}

/* More regions than the list is made for at first; every size has its unit. */
static void test_many_regions(void **state)
{
    struct lg_memory *m = *state;
    enum { REGIONS = 200, ENTRY_BYTES = 80 };
    char *text = malloc((REGIONS + 2) * ENTRY_BYTES), *at = text, size[32];
    at += sprintf(at, "{\"regions\": [");
    for (int i = 0; i < REGIONS; i++)
        at += sprintf(at, "%s{\"name\": \"r%d\", \"device\": \"host\", \"bytes\": %d}",
                      i ? "," : "", i, i);
    sprintf(at, "], \"private\": []}");
    add(m, LG_ROLE_loader, text);
    free(text);
    assert_int_equal(m->n_regions, REGIONS);
    assert_int_equal(lg_memory_need(device(m, "host")), REGIONS * (REGIONS - 1) / 2);
    static const char *const texts[] = {"1 B",     "1.0 KiB",    "1.0 MiB",      "1.0 GiB",
                                        "1.0 TiB", "1024.0 TiB", "1048576.0 TiB"};
    for (size_t i = 0; i < LG_ARRAY_LEN(texts); i++)
        assert_string_equal(lg_bytes_text(1ull << (10 * i), size), texts[i]);
}

/* The largest numbers that are taken, as many as are taken: the sum is still right. */
static void test_largest(void **state)
{
    struct lg_memory *m = *state;
    enum { ENTRIES = 1024, ENTRY_BYTES = 80 };
    char *text = malloc((ENTRIES + 2) * ENTRY_BYTES), *at = text;
    at += sprintf(at, "{\"regions\": [], \"private\": [");
    for (int i = 0; i < ENTRIES; i++)
        at += sprintf(at, "%s{\"device\": \"cuda:0\", \"bytes\": %llu, \"instances\": 64}",
                      i ? "," : "", 1ull << 49);
    sprintf(at, "]}");
    for (int r = 0; r < LG_ROLE_COUNT; r++) add(m, (lg_role)r, text);
    const struct lg_memory_device *d = device(m, "cuda:0");
    assert_true(lg_memory_private(d) == (uint64_t)LG_ROLE_COUNT * ENTRIES << 49);
    assert_true(lg_memory_need(d) > lg_memory_private(d));
    sprintf(at, ",{\"device\": \"cuda:0\", \"bytes\": 0, \"instances\": 0}]}");
    refuses(state, LG_ERR_CORRUPT, text, "more than 1024 entries");
    free(text);
}

static void test_devices(void **state)
{
    struct lg_memory *m = *state;
    char name[16];
    for (int i = 0; i < LG_MEMORY_DEVICES_MAX; i++) {
        snprintf(name, sizeof name, "cuda:%d", i);
        room(m, name, 1, 1);
    }
    assert_int_equal(lg_memory_room(m, &(struct lg_memory_room){.device = "host", .product = ""}),
                     LG_ERR_CORRUPT);
    assert_message("more than 66 devices");
}

static void test_fits(void **state)
{
    struct lg_memory *m = *state;
    add(m, LG_ROLE_trainer, trainer);
    assert_int_equal(lg_memory_fits(m, ""), 0); /* nothing known of what is there */
    uint64_t need = lg_memory_need(device(m, "cuda:0"));
    room(m, "cuda:0", 2 * need, need);
    assert_int_equal(lg_memory_fits(m, ""), 0); /* to the byte */
    room(m, "cuda:0", 2 * need, need - 1);
    assert_int_equal(lg_memory_fits(m, ""), LG_ERR_NOSPACE);
    assert_message(
        "the run needs 548.0 MiB of cuda:0 (NVIDIA H200), where 548.0 MiB of 1.1 GiB are "
        "free: others hold 548.0 MiB: see with nvidia-smi who, end them, or take another "
        "GPU with trainer.gpus");
    room(m, "cuda:0", need - 1, need - 1);
    assert_int_equal(lg_memory_fits(m, ""), LG_ERR_NOSPACE);
    assert_message("of cuda:0 (NVIDIA H200), which has 548.0 MiB: lower trainer.micro_batch_size");
    assert_int_equal(lg_memory_fits(m, "set this"), LG_ERR_NOSPACE);
    assert_message("which has 548.0 MiB: set this, or lower trainer.micro_batch_size");
    room(m, "cuda:0", 141 * GIB, 141 * GIB);
    room(m, "cuda:1", GIB / 2, GIB / 2);
    assert_int_equal(lg_memory_fits(m, ""), LG_ERR_NOSPACE);
    assert_message("of cuda:1");
    room(m, "cuda:1", 141 * GIB, 140 * GIB);
    add(m, LG_ROLE_loader, PRIVATE("{\"device\": \"host\", \"bytes\": 4096, \"instances\": 1}"));
    room(m, "host", 4096, 0); /* what is free there comes and goes: a warning, no refusal */
    assert_int_equal(lg_memory_fits(m, ""), 0);
    room(m, "host", 4095, 4095);
    assert_int_equal(lg_memory_fits(m, ""), LG_ERR_NOSPACE);
    assert_message("the run needs 4.0 KiB of the host's memory, this machine has 4.0 KiB: lower");
}

/* ---- what would fit ---- */

/* The n-th way that is tried is enough; what was tried. */
struct tries {
    int n, enough;
    char said[512];
};
static bool try(void *of, const char *const *set, int n)
{
    struct tries *t = of;
    for (int i = 0; i < n; i++) {
        strcat(t->said, set[i]);
        strcat(t->said, i + 1 < n ? " " : "; ");
    }
    return ++t->n == t->enough;
}

/* A rank that needs `bytes` of a GPU of `total` for itself, of which `activations` are such. */
static void check_tip(uint64_t bytes, uint64_t activations, int ranks, uint64_t total, int enough,
                      const char *tried, const char *tip)
{
    struct lg_memory m = {0};
    struct tries t = {.enough = enough};
    char json[512], got[LG_MEMORY_TIP_BYTES];
    snprintf(json, sizeof json,
             "{\"regions\": [], \"private\": [{\"device\": \"cuda:0\", \"bytes\": %llu, "
             "\"instances\": 1, \"activations\": %llu}%s]}",
             (unsigned long long)bytes, (unsigned long long)activations,
             ranks > 1 ? ", {\"device\": \"cuda:0\", \"bytes\": 1, \"instances\": 1, "
                         "\"activations\": 1}"
                       : "");
    add(&m, LG_ROLE_trainer, json);
    room(&m, "cuda:0", total + (uint64_t)ranks * LG_CUDA_CONTEXT_BYTES, 0);
    lg_memory_tip(&m, try, &t, got);
    assert_string_equal(t.said, tried);
    assert_string_equal(got, tip);
    lg_memory_free(&m);
}

#define BLOCK   "memory.recompute=block; "
#define OFFLOAD "memory.recompute=block memory.offload_activations=true; "
#define AVERAGE "memory.recompute=block memory.offload_activations=true memory.offload_ema=true; "
#define CHUNKS                                                                                     \
    "memory.recompute=block memory.offload_activations=true memory.offload_ema=true "              \
    "memory.mlp_chunks=8; "
static void test_tip(void **state)
{
    (void)state;
    check_tip(10 * GIB, 8 * GIB, 1, 10 * GIB, 1, "", ""); /* large enough */
    check_tip(10 * GIB, 8 * GIB, 1, 5 * GIB, 1, "memory.recompute=budget:3.0GiB; ",
              "set memory.recompute = \"budget:3.0GiB\", with which it fits (no bits change)");
    /* Down to what is offered. */
    check_tip(10 * GIB + 1, 8 * GIB, 1, 5 * GIB, 1, "memory.recompute=budget:2.9GiB; ",
              "set memory.recompute = \"budget:2.9GiB\", with which it fits (no bits change)");
    check_tip(10 * GIB, 8 * GIB, 1, 2 * GIB + (5 << 20), 1, "memory.recompute=budget:5MiB; ",
              "set memory.recompute = \"budget:5MiB\", with which it fits (no bits change)");
    check_tip(10 * GIB, 8 * GIB, 1, 5 * GIB, 2, "memory.recompute=budget:3.0GiB; " BLOCK,
              "set memory.recompute = \"block\", with which it fits (no bits change)");
    check_tip(10 * GIB, 8 * GIB, 1, 2 * GIB, 2, BLOCK OFFLOAD,
              "set memory.recompute = \"block\" and memory.offload_activations = true, with which "
              "it fits (no bits change)");
    check_tip(10 * GIB, 8 * GIB, 1, 1 * GIB, 3, BLOCK OFFLOAD AVERAGE,
              "set memory.recompute = \"block\", memory.offload_activations = true and "
              "memory.offload_ema = true, with which it fits (no bits change)");
    check_tip(10 * GIB, 8 * GIB, 1, 1 * GIB, 4, BLOCK OFFLOAD AVERAGE CHUNKS,
              "set memory.recompute = \"block\", memory.offload_activations = true, "
              "memory.offload_ema = true and "
              "memory.mlp_chunks = 8, with which it fits (the last one decides bits: another run)");
    check_tip(10 * GIB, 8 * GIB, 1, 1 * GIB, 9, BLOCK OFFLOAD AVERAGE CHUNKS, "");
    /* Two ranks on one GPU, each with half of what is too much. */
    check_tip(12 * GIB - 1, 8 * GIB - 1, 2, 9 * GIB, 1, "memory.recompute=budget:2.5GiB; ",
              "set memory.recompute = \"budget:2.5GiB\", with which it fits (no bits change)");
    check_tip(10 * GIB, 0, 1, 5 * GIB, 1, "", ""); /* nobody trains there */
}

/* A rank that has `bytes` for itself, `activations` of them, on a GPU of which `unused` more are there. */
static void check_less(uint64_t bytes, uint64_t activations, uint64_t unused, int enough,
                       const char *tried, const char *less)
{
    struct lg_memory m = {0};
    struct tries t = {.enough = enough};
    char json[256], got[LG_MEMORY_TIP_BYTES];
    snprintf(json, sizeof json,
             "{\"regions\": [], \"private\": [{\"device\": \"cuda:0\", \"bytes\": %llu, "
             "\"instances\": 1, \"activations\": %llu}]}",
             (unsigned long long)bytes, (unsigned long long)activations);
    add(&m, LG_ROLE_trainer, json);
    const uint64_t there = lg_memory_need(device(&m, "cuda:0")) + unused;
    room(&m, "cuda:0", 2 * there, there);
    lg_memory_less_recomputed(&m, try, &t, got);
    assert_string_equal(t.said, tried);
    assert_string_equal(got, less);
    lg_memory_free(&m);
}

static void test_less_recomputed(void **state)
{
    (void)state;
    const uint64_t context = LG_CUDA_CONTEXT_BYTES;
    /* Of 50 GiB one is to stay free. */
    check_less(20 * GIB, 10 * GIB, 30 * GIB - context, 1, "memory.recompute=none; ", "none");
    check_less(20 * GIB, 10 * GIB, 30 * GIB - context, 2,
               "memory.recompute=none; memory.recompute=budget:38.4GiB; ", "budget:38.4GiB");
    check_less(20 * GIB, 10 * GIB, 30 * GIB - context, 9,
               "memory.recompute=none; memory.recompute=budget:38.4GiB; ", "");
    check_less(45 * GIB, 40 * GIB, 4 * GIB, 1, "", ""); /* less than a tenth more */
    check_less(45 * GIB, 10 * GIB, GIB / 2, 1, "", "");
    check_less(45 * GIB, 0, 40 * GIB, 1, "", "");
}

/* ---- GPUs ---- */

#define GOOD(number, peers)                                                                        \
    "{\"device\": \"cuda:" #number "\", \"name\": \"NVIDIA H200\", \"capability\": \"9.0\", "      \
    "\"kernels\": \"9.0\", \"driver\": \"13.0\", \"runtime\": \"13.0\", \"cudnn\": \"9.14.0\", "   \
    "\"total_bytes\": 2000, "                                                                      \
    "\"free_bytes\": 1000, \"peers\": [" peers "]}"
#define GPUS(text) "{\"gpus\": [" text "]}"

static lg_config *config(const char *const *sets, int n)
{
    lg_config *c = NULL;
    if (lg_config_load(scratch_write("p.toml", "device = 'cuda'\n"), sets, n, &c) < 0)
        fail_msg("%s", lg_err_text());
    return c;
}

static const lg_plan PLAN = {.instances = {[LG_ROLE_loader] = 3,
                                           [LG_ROLE_text] = 2,
                                           [LG_ROLE_vae] = 2,
                                           [LG_ROLE_trainer] = 2,
                                           [LG_ROLE_ema] = 1,
                                           [LG_ROLE_ckpt] = 1}};

static void test_used(void **state)
{
    (void)state;
    int number[LG_RUN_GPUS_MAX];
    static const char *const sets[] = {"trainer.gpus=5", "vae.gpus=7,2,9"};
    scratch_make();
    lg_config *c = config(sets, 2);
    assert_int_equal(lg_run_gpus_used(c, &PLAN, number), 4);
    static const int expected[] = {0, 2, 5, 7}; /* text by default 0; 9 has no instance */
    assert_memory_equal(number, expected, sizeof expected);
    lg_config_free(&c);
    static const char *const host[] = {"device=host"};
    c = config(host, 1);
    assert_int_equal(lg_run_gpus_used(c, &PLAN, number), 0);
    lg_config_free(&c);
    scratch_remove();
}

static void test_parse(void **state)
{
    (void)state;
    struct lg_run_gpus g;
    assert_int_equal(
        lg_run_gpus_parse(
            "a warning\n" GPUS(
                GOOD(0, "\"cuda:1\", \"cuda:63\", \"cuda:99\"") ", {\"device\": \"cuda:1\", "
                                                                "\"error\": \"old\", "
                                                                "\"code\": -10}"),
            &g),
        0);
    assert_int_equal(g.n, 2);
    assert_string_equal(g.gpu[0].name, "NVIDIA H200");
    assert_string_equal(g.gpu[0].cudnn, "9.14.0");
    assert_int_equal(g.gpu[0].total_bytes, 2000);
    assert_true(g.gpu[0].peers == ((uint64_t)1 << 63 | 2));
    assert_int_equal(g.gpu[1].number, 1);
    assert_int_equal(g.gpu[1].code, LG_ERR_MISMATCH);
    assert_string_equal(g.gpu[1].error, "old");
    static const char *const wrong[] = {
        "",
        "{}",
        GPUS("1"),
        GPUS("{\"device\": \"cuda:1\"}"),
        GPUS("{\"device\": \"cuda:1x\", \"error\": \"\", \"code\": -1}"),
        GPUS("{\"device\": \"cuda:1024\", \"error\": \"\", \"code\": -1}"),
        GPUS("{\"device\": \"cuda:1\", \"error\": \"\", \"code\": 0}"),
        GPUS("{\"device\": \"cuda:1\", \"error\": \"\", \"code\": -1e9}"),
        GPUS("{\"device\": \"cuda:1\", \"code\": -1}"),
        GPUS(GOOD(0, "\"host\"")),
        GPUS(GOOD(0, "1")),
        GPUS("{\"device\": \"host\", \"error\": \"\", \"code\": -1}"),
        GPUS("{\"device\": \"cuda:-1\", \"error\": \"\", \"code\": -1}"),
        GPUS("{\"device\": \"cuda:1\", \"error\": \"\", \"code\": \"no\"}"),
        GPUS("{\"device\": \"cuda:1\", \"error\": \"\", \"code\": 1}"),
        "[1]",
    };
    /* Every field is needed, in its type and range. */
    static const char *const fields[][2] = {
        {"\"name\": \"NVIDIA H200\"", "\"name\": 3"},
        {"\"name\": \"NVIDIA H200\"",
         "\"name\": \"a name of more than 63 characters, which no GPU has, and none ever should, "
         "really\""},
        {"\"capability\": \"9.0\"", "\"capability\": 9"},
        {"\"driver\": \"13.0\"", "\"driver\": null"},
        {"\"runtime\": \"13.0\"", "\"runtime\": 13"},
        {"\"cudnn\": \"9.14.0\"", "\"cudnn\": false"},
        {"\"total_bytes\": 2000", "\"total_bytes\": -1"},
        {"\"total_bytes\": 2000", "\"total_bytes\": 1e17"},
        {"\"total_bytes\": 2000", "\"total_bytes\": 999"}, /* less than is free */
        {"\"free_bytes\": 1000", "\"free_bytes\": \"much\""},
        {"\"peers\": []", "\"peers\": {}"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(fields); i++) {
        char text[1024];
        static const char good[] = GPUS(GOOD(0, ""));
        const char *at = strstr(good, fields[i][0]);
        assert_non_null(at);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good), good, fields[i][1],
                 at + strlen(fields[i][0]));
        if (lg_run_gpus_parse(text, &g) != LG_ERR_CORRUPT) fail_msg("taken: %s", text);
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(wrong); i++)
        if (lg_run_gpus_parse(wrong[i], &g) != LG_ERR_CORRUPT) fail_msg("taken: %s", wrong[i]);
    assert_int_equal(g.n, 2); /* untouched */
}

/* As many as a run may have, and one more. */
static void test_parse_many(void **state)
{
    (void)state;
    struct lg_run_gpus g;
    static char text[16384];
    char *at = text + sprintf(text, "{\"gpus\": [");
    for (int i = 0; i < LG_RUN_GPUS_MAX; i++)
        at += sprintf(at, "%s{\"device\": \"cuda:%d\", \"error\": \"old\", \"code\": -10}",
                      i ? "," : "", i);
    strcpy(at, "]}");
    assert_int_equal(lg_run_gpus_parse(text, &g), 0);
    assert_int_equal(g.n, LG_RUN_GPUS_MAX);
    strcpy(at, ",{\"device\": \"cuda:64\", \"error\": \"old\", \"code\": -10}]}");
    assert_int_equal(lg_run_gpus_parse(text, &g), LG_ERR_CORRUPT);
}

static void checks_out(const lg_config *c, const char *answer, int code, const char *message)
{
    struct lg_run_gpus g;
    if (lg_run_gpus_parse(answer, &g) < 0) fail_msg("%s", lg_err_text());
    assert_int_equal(lg_run_gpus_check(c, &PLAN, &g), code);
    if (message) assert_message(message);
    lg_err_clear();
}

static void test_check(void **state)
{
    (void)state;
    scratch_make();
    static const char *const sets[] = {"trainer.gpus=0", "vae.gpus=1,2", "text.gpus=0",
                                       "parallel.exchange=gpu"};
    lg_config *c = config(sets, 4);
    checks_out(
        c,
        GPUS(GOOD(0, "\"cuda:1\", \"cuda:2\"") "," GOOD(1, "\"cuda:0\"") "," GOOD(2, "\"cuda:0\"")),
        0, NULL); /* VAE instances need not reach each other */
    checks_out(
        c, GPUS(GOOD(0, "\"cuda:1\", \"cuda:2\"") "," GOOD(1, "\"cuda:0\"") "," GOOD(2, "")),
        LG_ERR_CONFIG,
        "cuda:2 cannot reach the memory of cuda:0, as parallel.exchange = \"gpu\" asks: leave it "
        "out, put all on one GPU with trainer.gpus");
    checks_out(c,
               GPUS(GOOD(0, "") ",{\"device\": \"cuda:1\", \"error\": \"it is too old\", "
                                "\"code\": -10}," GOOD(2, "")),
               LG_ERR_MISMATCH, "it is too old");
    checks_out(c, GPUS(GOOD(0, "") "," GOOD(2, "")), LG_ERR_CORRUPT, "nothing of cuda:1");
    lg_config_free(&c);
    scratch_remove();
}

/* Is this the way by which these GPUs hand over what they do? sets[0]: the way that is asked for. */
static void goes_apart(const char *const *sets, const lg_plan *p, const char *answer, bool expected)
{
    struct lg_run_gpus g;
    int from, to;
    lg_config *c = config(sets, 4);
    assert_int_equal(lg_run_gpus_parse(answer, &g), 0);
    assert_int_equal(lg_run_gpus_check(c, p, &g), 0);
    assert_int_equal(lg_run_gpus_apart(c, p, &g, &from, &to), expected);
    lg_config_free(&c);
}

static void test_apart(void **state)
{
    (void)state;
    scratch_make();
    const char *sets[] = {"parallel.exchange=auto", "trainer.gpus=0", "vae.gpus=1,2",
                          "text.gpus=0"};
    const char *whole =
        GPUS(GOOD(0, "\"cuda:1\", \"cuda:2\"") "," GOOD(1, "\"cuda:0\"") "," GOOD(2, "\"cuda:0\""));
    const char *one_way =
        GPUS(GOOD(0, "\"cuda:1\", \"cuda:2\"") "," GOOD(1, "\"cuda:0\"") "," GOOD(2, ""));
    goes_apart(sets, &PLAN, whole, false);
    goes_apart(sets, &PLAN, one_way, true);
    assert_int_equal(setenv("LG_CUDA_NO_PEER", "1", 1), 0);
    goes_apart(sets, &PLAN, whole, true);
    assert_int_equal(setenv("LG_CUDA_NO_PEER", "0", 1), 0);
    goes_apart(sets, &PLAN, whole, false);
    assert_int_equal(unsetenv("LG_CUDA_NO_PEER"), 0);
    sets[0] = "parallel.exchange=gpu";
    goes_apart(sets, &PLAN, whole, false);
    sets[0] = "parallel.exchange=host";
    goes_apart(sets, &PLAN, whole, true);
    /* Without ranks: VAE instances hand each other nothing, text encoders' shards lie on both. */
    lg_plan lonely = PLAN;
    lonely.instances[LG_ROLE_trainer] = lonely.instances[LG_ROLE_ema] = 0;
    lonely.instances[LG_ROLE_ckpt] = 0;
    sets[0] = "parallel.exchange=auto";
    goes_apart(sets, &lonely, GPUS(GOOD(0, "") "," GOOD(1, "") "," GOOD(2, "")), false);
    sets[2] = "vae.gpus=0";
    sets[3] = "text.gpus=0,1";
    goes_apart(sets, &lonely, GPUS(GOOD(0, "") "," GOOD(1, "")), true);
    scratch_remove();
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sums),    TEST(test_print),           TEST(test_refuses),
        TEST(test_largest), TEST(test_many_regions),    TEST(test_devices),
        TEST(test_fits),    cmocka_unit_test(test_tip), cmocka_unit_test(test_less_recomputed),
        TEST(test_used),    TEST(test_parse),           TEST(test_check),
        TEST(test_apart),   TEST(test_parse_many),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
