/* Recomputation (kernels/graph/recompute.c): what is dropped is made again, bit for bit, and nothing else is. On the
 * host backend, with each instruction set. */
#include "base/check.h"
#include "kernels/graph/fuse.h"
#include "kernels/graph/recompute.h"
#include "tests/unit/isas.h"
#include "tests/unit/small_graph.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = SMALL_B, T = SMALL_T, D = SMALL_D, BLOCKS = 3 };
enum { NORMS = LG_DROP_NORMS, MLP = LG_DROP_MLP, ALL = LG_DROP_ALL };
enum { START = ALL | LG_DROP_RESULTS, GROUP = START | LG_DROP_ENTRY }; /* the group's others */
enum { APART = ALL | LG_DROP_APART };

static struct small_graph small, *const f = &small;
static const unsigned nothing[BLOCKS];

static int setup(void **state)
{
    (void)state;
    small_open(f, "host", NULL);
    small_begin(f, 1);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    small_close(f);
    return 0;
}

/* Blocks that one condition modulates, with a norm behind them. */
static void describe_blocks(int n)
{
    lg_tensor mod = small_act(f, small_wanted(f, "condition", small_t2(f, B, n * 6 * D)));
    lg_tensor x = small_act(f, small_wanted(f, "x", small_t3(f, B, T, D)));
    for (int i = 0; i < n; i++) {
        lg_graph_begin_block(f->g);
        x = small_block(f, x, lg_slice(mod, 1, i * 6 * D, 6 * D));
        lg_graph_end_block(f->g);
    }
    x = small_norm(f, x, LG_NONE, LG_NONE);
    small_act_into(f, x, small_out(f, x));
}

static void describe_net(void)
{
    describe_blocks(BLOCKS);
}

static void build(void (*describe)(void), bool fuse, const unsigned *drop)
{
    small_begin(f, 1);
    describe();
    small_grad(f);
    if (fuse) lg_graph_fuse(f->g);
    lg_graph_recompute(f->g, drop);
    small_compile(f);
}

/* ---- the same bits ---- */

/* What lies in the result and the gradients, one behind the other; the caller frees it. */
static char *results(size_t *ret_bytes)
{
    char *all = NULL;
    *ret_bytes = 0;
    for (int i = 0; i < f->n; i++) {
        int of = i == f->out ? i : f->gradient[i];
        if (of < 0) continue;
        size_t bytes = lg_tensor_bytes(&f->on[i]);
        all = realloc(all, *ret_bytes + bytes);
        LG_ASSERT(all);
        memcpy(all + *ret_bytes, f->data[of], bytes);
        *ret_bytes += bytes;
    }
    return all;
}

/* A forward, a backward by itself; then once more, adding. */
static char *run_twice(size_t *ret_bytes)
{
    small_fill_gradients(f);
    for (int add = 0; add < 2; add++) {
        small_run(f, LG_PROGRAM_FORWARD, add);
        small_run(f, LG_PROGRAM_BACKWARD, add);
    }
    return results(ret_bytes);
}

static int differ(void (*describe)(void), bool fuse, const unsigned *drop)
{
    size_t n, m;
    build(describe, fuse, nothing);
    char *kept = run_twice(&n);
    build(describe, fuse, drop);
    char *again = run_twice(&m);
    assert_int_equal(n, m);
    int differs = memcmp(kept, again, n) != 0;
    if (differs)
        printf("  dropping %u, %u, %u%s gives other bits\n", drop[0], drop[1], drop[2],
               fuse ? ", fused," : "");
    free(kept);
    free(again);
    return differs;
}

static int compare_on(const char *isa)
{
    static const unsigned some[][BLOCKS] = {
        {NORMS, MLP, ALL},     {ALL, NORMS, MLP},     {MLP, ALL, NORMS},
        {ALL, 0, ALL},         {0, ALL, 0},           {0, NORMS, 0},
        {0, 0, MLP},           {ALL, ALL, 0},         {0, ALL, ALL},
        {NORMS | MLP, 0, 0},   {0, ALL | NORMS, MLP}, {START, START, START},
        {START, GROUP, GROUP}, {START, GROUP, START}, {START, START, GROUP},
        {START, START, ALL},   {ALL, START, GROUP},   {START, 0, START},
        {NORMS, START, GROUP}, {START, GROUP, MLP},   {START, NORMS, START},
        {START, GROUP, NORMS}, {APART, APART, APART}, {START | APART, GROUP | APART, 0},
        {0, APART, ALL}};
    int failures = 0;
    small_open(f, "host", isa);
    for (int fuse = 0; fuse < 2; fuse++) {
        for (unsigned mask = 1; mask <= (NORMS | MLP | ALL); mask++)
            failures += differ(describe_net, fuse, (const unsigned[BLOCKS]){mask, mask, mask});
        for (size_t i = 0; i < LG_ARRAY_LEN(some); i++)
            failures += differ(describe_net, fuse, some[i]);
    }
    small_close(f);
    return failures;
}

/* No device is open yet: each process has one instruction set. */
static void test_bits_are_the_same(void **state)
{
    (void)state;
    for_each_isa(compare_on);
}

/* For block i of a random graph; a group is of blocks that are all made again whole. */
static void random_drops(uint64_t seed, unsigned *ret, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        const uint64_t bits = (seed * 0x9E3779B97F4A7C15u + i * 0xBF58476D1CE4E5B9u) >> 20;
        ret[i] = seed / 2 % 2 ? (unsigned)(bits % (2 * (NORMS | MLP | ALL)))
                              : 1 + (unsigned)(seed / 4 + i) % (NORMS | MLP | ALL);
        if (ret[i] & LG_DROP_RESULTS) ret[i] |= ALL;
        if ((ret[i] & ALL) && bits / 256 % 2) ret[i] |= LG_DROP_APART;
        if (i && bits / 64 % 4 && (ret[i] & ret[i - 1] & START) == START) ret[i] |= LG_DROP_ENTRY;
    }
}

/* Graphs whose blocks end anywhere: a value may be made in one, or outside, and read in others. */
static void test_random_graphs(void **state)
{
    (void)state;
    const char *seeds = getenv("LG_SEEDS");
    uint64_t first = seeds ? strtoull(seeds, NULL, 10) : 1;
    for (uint64_t seed = first; seed < first + 300; seed++) {
        char *bits[2];
        size_t n[2];
        for (int drop = 0; drop < 2; drop++) {
            unsigned what[16] = {0};
            if (drop) random_drops(seed, what, LG_ARRAY_LEN(what));
            small_random(f, seed);
            small_grad(f);
            if (seed % 2) lg_graph_fuse(f->g);
            lg_graph_recompute(f->g, what);
            small_compile(f);
            bits[drop] = run_twice(&n[drop]);
        }
        assert_int_equal(n[0], n[1]);
        if (memcmp(bits[0], bits[1], n[0]) != 0)
            fail_msg("seed %llu gives other bits", (unsigned long long)seed);
        free(bits[0]);
        free(bits[1]);
    }
}

/* ---- what is repeated ---- */

struct counts {
    int norm, residual, residual_norm, linear, attention, all;
};

static struct counts count(const unsigned *drop)
{
    build(describe_net, true, drop);
    char *text = small_text(f);
    const char *nodes = strstr(text, " nodes, ");
    while (nodes[-1] != '\n') nodes--;
    struct counts c = {.norm = small_count(text, "norm_modulate_forward"),
                       .residual = small_count(text, "gate_residual_forward"),
                       .residual_norm = small_count(text, "residual_norm_forward"),
                       .linear = small_count(text, "linear_forward"),
                       .attention = small_count(text, "attention_forward"),
                       .all = atoi(nodes)};
    free(text);
    return c;
}

/* By the text of two programs: how many nodes of each kind the second one has more. */
static void assert_repeated(const unsigned *drop, struct counts want)
{
    struct counts was = count(nothing), is = count(drop);
    assert_int_equal(is.norm - was.norm, want.norm);
    assert_int_equal(is.residual - was.residual, want.residual);
    assert_int_equal(is.residual_norm - was.residual_norm, want.residual_norm);
    assert_int_equal(is.linear - was.linear, want.linear);
    assert_int_equal(is.attention - was.attention, want.attention);
    assert_int_equal(is.all - was.all,
                     want.norm + want.residual + want.residual_norm + want.linear + want.attention);
}

/* Fused, a block has two norms, of which that of the first block stands alone and the others hold the residual before
 * them, which is their block's: where its sum is kept, the norm alone is made again. */
static void test_nodes_that_are_repeated(void **state)
{
    (void)state;
    assert_repeated(nothing, (struct counts){0});
    assert_repeated((unsigned[]){NORMS, 0, 0}, (struct counts){.norm = 2});
    assert_repeated((unsigned[]){0, NORMS, 0}, (struct counts){.norm = 2});
    assert_repeated((unsigned[]){NORMS, NORMS, NORMS}, (struct counts){.norm = 6});
    assert_repeated((unsigned[]){0, MLP, 0}, (struct counts){.linear = 1});
    assert_repeated((unsigned[]){MLP, MLP, MLP}, (struct counts){.linear = 3});
    assert_repeated((unsigned[]){0, NORMS | MLP, 0}, (struct counts){.norm = 2, .linear = 1});
    /* Not the last linear, whose result the next block reads. */
    assert_repeated((unsigned[]){ALL, 0, 0},
                    (struct counts){.norm = 2, .linear = 3, .attention = 1});
    assert_repeated((unsigned[]){0, ALL, 0},
                    (struct counts){.norm = 1, .residual_norm = 1, .linear = 3, .attention = 1});
}

/* What the next block begins with is made up to the last linear, and its norm alone is repeated; the net's last norm, in no
 * block, is not. A group's forward is repeated once more, up to what enters its last block. */
static void test_nodes_of_groups(void **state)
{
    (void)state;
    assert_repeated((unsigned[]){START, START, START},
                    (struct counts){.norm = 3, .residual_norm = 3, .linear = 12, .attention = 3});
    assert_repeated(
        (unsigned[]){START, GROUP, GROUP},
        (struct counts){.norm = 4, .residual_norm = 3 + 2 + 2, .linear = 12 + 8, .attention = 5});
    assert_repeated(
        (unsigned[]){START, GROUP, START},
        (struct counts){.norm = 4, .residual_norm = 3 + 1 + 1, .linear = 12 + 4, .attention = 4});
    /* Its results are joined to a block that repeats its sum from them. */
    assert_repeated((unsigned[]){START, ALL, 0},
                    (struct counts){.norm = 3, .residual_norm = 1, .linear = 6, .attention = 2});
}

/* The residual stream and the last projection of a block belong to the next one, too. */
static void test_boundaries_are_kept(void **state)
{
    (void)state;
    build(describe_net, false, (unsigned[]){0, ALL, 0});
    char *text = small_text(f);
    /* Unfused the residual that ends the block is not repeated: the next block and the norm behind it read it. */
    assert_int_equal(small_count(text, "gate_residual_forward"), 2 * BLOCKS + 1);
    assert_int_equal(small_count(text, "norm_modulate_forward"), 2 * BLOCKS + 1 + 2);
    free(text);
}

/* ---- memory ---- */

static size_t arena_bytes(const unsigned *drop)
{
    build(describe_net, true, drop);
    return lg_program_arena_bytes(f->p);
}

static void test_memory_shrinks(void **state)
{
    (void)state;
    size_t none = arena_bytes(nothing), norms = arena_bytes((unsigned[]){NORMS, NORMS, NORMS});
    size_t mlp = arena_bytes((unsigned[]){MLP, MLP, MLP});
    size_t both = arena_bytes((unsigned[]){NORMS | MLP, NORMS | MLP, NORMS | MLP});
    size_t all = arena_bytes((unsigned[]){ALL, ALL, ALL});
    assert_true(norms < none && mlp < none && both < norms && both < mlp && all < both);
}

enum { DEEP = 12 };
static void describe_deep(void)
{
    describe_blocks(DEEP);
}

static size_t deep_bytes(const unsigned *drop)
{
    build(describe_deep, true, drop);
    return lg_program_arena_bytes(f->p);
}

/* With whole blocks two values of each, of which one is left; but up to six more are there at once in a block's backward,
 * since the next one's waits for them. Of groups of three a third of those, and two in the group. */
static void test_what_is_kept(void **state)
{
    (void)state;
    enum { VALUE = 128 }; /* (B, T, D) in fp32, on 64 bytes */
    unsigned block[DEEP], start[DEEP], three[DEEP];
    for (int i = 0; i < DEEP; i++)
        block[i] = ALL, start[i] = START, three[i] = i % 3 ? GROUP : START;
    const size_t of_block = deep_bytes(block), of_start = deep_bytes(start);
    assert_true(of_start + (DEEP - 1 - 6) * VALUE <= of_block);
    assert_true(of_start <= 67 * VALUE && 2 * of_block <= 145 * VALUE); /* what they have been */
    assert_true(deep_bytes(three) + (DEEP - DEEP / 3 - 2) * VALUE <= of_start);
}

/* ---- a print ---- */

/* c, which is read outside, is kept. Of the others the backward reads the sum alone; what that is made of is made
 * again, too, from what was made outside. */
static void test_print(void **state)
{
    (void)state;
    lg_tensor x = small_act(f, small_wanted(f, "x", small_t2(f, 2, 4)));
    lg_graph_begin_block(f->g);
    lg_tensor a = small_act(f, x), c = small_act(f, small_add(f, a, x)), d = small_act(f, c);
    lg_graph_end_block(f->g);
    lg_tensor y = small_mul(f, c, d);
    small_act_into(f, y, small_out(f, y));
    small_grad(f);
    lg_graph_recompute(f->g, (unsigned[]){ALL});
    small_assert_print(
        f, "v0 x f32 2,4: 32 bytes, bound 0, used up to n16\n"
           "v1 act f32 2,4: 32 bytes at 0, made by n0, used up to n15\n"
           "v2 act f32 2,4: 32 bytes at 64, made by n1, used up to n2\n"
           "v3 sum f32 2,4: 32 bytes at 64 in place of v2, made by n2, used up to n3\n"
           "v4 act f32 2,4: 32 bytes at 64 in place of v2, made by n3, used up to n10\n"
           "v5 act f32 2,4: 32 bytes at 128, made by n4, used up to n8\n"
           "v6 product f32 2,4: 32 bytes at 192, made by n5, used up to n7\n"
           "v7 out f32 2,4: 32 bytes, bound 1, made by n6, used up to n6\n"
           "v8 d out f32 2,4: 32 bytes, bound 2, used up to n7\n"
           "v9 gradient f32 2,4: 32 bytes, bound 3, made by n16, used up to n16\n"
           "v10 d product f32 2,4: 32 bytes at 256, made by n7, used up to n9\n"
           "v11 d act f32 2,4: 32 bytes at 128 in place of v5, made by n8, used up to n10\n"
           "v12 d act f32 2,4: 32 bytes at 256 in place of v10, made by n9, used up to n10\n"
           "v13 d act f32 2,4: 32 bytes at 128 in place of v5, made by n10, used up to n13\n"
           "v14 d sum f32 2,4: 32 bytes at 128 in place of v5, made by n13, used up to n15\n"
           "v15 d act f32 2,4: 32 bytes at 64, made by n14, used up to n15\n"
           "v16 d act f32 2,4: 32 bytes at 64 in place of v15, made by n15, used up to n16\n"
           "v17 act f32 2,4: 32 bytes at 64, made by n11, used up to n12\n"
           "v18 sum f32 2,4: 32 bytes at 64 in place of v17, made by n12, used up to n13\n"
           "n0 act_forward act=1 | x=v0(2,4) >y=v1(2,4)\n"
           "n1 b0 act_forward act=1 | x=v1(2,4) >y=v2(2,4)\n"
           "n2 b0 add_forward | a=v2(2,4) b=v1(2,4) >y=v3(2,4)\n"
           "n3 b0 act_forward act=1 | x=v3(2,4) >y=v4(2,4)\n"
           "n4 b0 act_forward act=1 | x=v4(2,4) >y=v5(2,4)\n"
           "n5 mul_forward | a=v4(2,4) b=v5(2,4) >y=v6(2,4)\n"
           "n6 act_forward act=1 | x=v6(2,4) >y=v7(2,4)\n"
           "n7 backward act_backward act=1 accumulate=0 | x=v6(2,4) dy=v8(2,4) >dx=v10(2,4)\n"
           "n8 backward mul_forward | a=v10(2,4) b=v5(2,4) >y=v11(2,4)\n"
           "n9 backward mul_forward | a=v10(2,4) b=v4(2,4) >y=v12(2,4)\n"
           "n10 b0 backward act_backward act=1 accumulate=1 | x=v4(2,4) dy=v12(2,4) >dx=v13(2,4)\n"
           "n11 b0 backward act_forward act=1 | x=v1(2,4) >y=v17(2,4)\n"
           "n12 b0 backward add_forward | a=v17(2,4) b=v1(2,4) >y=v18(2,4)\n"
           "n13 b0 backward act_backward act=1 accumulate=0 | x=v18(2,4) dy=v13(2,4) >dx=v14(2,4)\n"
           "n14 b0 backward combine c=1,0,0,0 count=1 | x[0]=v14(2,4) >y=v15(2,4)\n"
           "n15 b0 backward act_backward act=1 accumulate=1 | x=v1(2,4) dy=v14(2,4) >dx=v16(2,4)\n"
           "n16 backward act_backward act=1 accumulate=0 | x=v0(2,4) dy=v16(2,4) >dx=v9(2,4)\n"
           "17 nodes, 19 values, arena 320 bytes, of which n7 uses 160\n");
}

/* A residual is no result of the norm that it is fused with: it is kept, and what is made again is a norm of it alone. */
static void test_print_of_a_residual(void **state)
{
    (void)state;
    lg_tensor x = small_wanted(f, "x", small_t3(f, 1, 2, 4)), y = small_wanted(f, "y", x);
    lg_graph_begin_block(f->g);
    lg_tensor r = small_residual(f, x, y, LG_NONE), n = small_norm(f, r, LG_NONE, LG_NONE);
    lg_tensor z = small_mul(f, n, small_act(f, r));
    lg_graph_end_block(f->g);
    small_act_into(f, z, small_out(f, z));
    small_grad(f);
    lg_graph_fuse(f->g);
    lg_graph_recompute(f->g, (unsigned[]){NORMS});
    small_assert_print(
        f, "v0 x f32 1,2,4: 32 bytes, bound 0, used up to n0\n"
           "v1 y f32 1,2,4: 32 bytes, bound 1, used up to n0\n"
           "v2 residual f32 1,2,4: 32 bytes at 0, made by n0, used up to n9\n"
           "v3 norm f32 1,2,4: 32 bytes at 64, made by n0, used up to n2\n"
           "v4 mean f32 1,2: 8 bytes at 128, made by n0, used up to n0\n"
           "v5 rstd f32 1,2: 8 bytes at 192, made by n0, used up to n0\n"
           "v6 act f32 1,2,4: 32 bytes at 128, made by n1, used up to n5\n"
           "v7 product f32 1,2,4: 32 bytes at 64 in place of v3, made by n2, used up to n4\n"
           "v8 out f32 1,2,4: 32 bytes, bound 2, made by n3, used up to n3\n"
           "v9 d out f32 1,2,4: 32 bytes, bound 3, used up to n4\n"
           "v10 gradient f32 1,2,4: 32 bytes, bound 4, made by n11, used up to n11\n"
           "v11 gradient f32 1,2,4: 32 bytes, bound 5, made by n10, used up to n10\n"
           "v12 d product f32 1,2,4: 32 bytes at 192, made by n4, used up to n7\n"
           "v13 d norm f32 1,2,4: 32 bytes at 128 in place of v6, made by n5, used up to n9\n"
           "v14 d act f32 1,2,4: 32 bytes at 192 in place of v12, made by n7, used up to n8\n"
           "v15 d residual f32 1,2,4: 32 bytes at 192 in place of v12, made by n8, used up to n9\n"
           "v16 d residual f32 1,2,4: 32 bytes at 192 in place of v12, made by n9, used up to n11\n"
           "v17 norm f32 1,2,4: 32 bytes at 64, made by n6, used up to n7\n"
           "v18 mean f32 1,2: 8 bytes at 256, made by n6, used up to n9\n"
           "v19 rstd f32 1,2: 8 bytes at 320, made by n6, used up to n9\n"
           "n0 b0 residual_norm_forward norm.eps=0.01 norm.rms=0 | residual.x=v0(1,2,4) "
           "residual.y=v1(1,2,4) "
           ">residual.out=v2(1,2,4) norm.x=v2(1,2,4) >norm.y=v3(1,2,4) >norm.mean=v4(1,2) "
           ">norm.rstd=v5(1,2)\n"
           "n1 b0 act_forward act=1 | x=v2(1,2,4) >y=v6(1,2,4)\n"
           "n2 b0 mul_forward | a=v3(1,2,4) b=v6(1,2,4) >y=v7(1,2,4)\n"
           "n3 act_forward act=1 | x=v7(1,2,4) >y=v8(1,2,4)\n"
           "n4 backward act_backward act=1 accumulate=0 | x=v7(1,2,4) dy=v9(1,2,4) >dx=v12(1,2,4)\n"
           "n5 b0 backward mul_forward | a=v12(1,2,4) b=v6(1,2,4) >y=v13(1,2,4)\n"
           "n6 b0 backward norm_modulate_forward eps=0.01 rms=0 | x=v2(1,2,4) >y=v17(1,2,4) "
           ">mean=v18(1,2) >rstd=v19(1,2)\n"
           "n7 b0 backward mul_forward | a=v12(1,2,4) b=v17(1,2,4) >y=v14(1,2,4)\n"
           "n8 b0 backward act_backward act=1 accumulate=0 | x=v2(1,2,4) dy=v14(1,2,4) "
           ">dx=v15(1,2,4)\n"
           "n9 b0 backward norm_modulate_backward accumulate=1 rms=0 accumulate_dbias=0 | "
           "dy=v13(1,2,4) x=v2(1,2,4) "
           "mean=v18(1,2) rstd=v19(1,2) >dx=v16(1,2,4)\n"
           "n10 b0 backward sum_rows accumulate=0 | x=v16(1,8) >y=v11(8)\n"
           "n11 b0 backward sum_rows accumulate=0 | x=v16(1,8) >y=v10(8)\n"
           "12 nodes, 20 values, arena 384 bytes, of which n6 uses 144\n");
}

/* One half of a value is the block's, the other is not: what is made again would have one half only. */
static void describe_halves(void)
{
    lg_tensor half = small_t1(f, D), y = lg_graph_value(f->g, "y", small_t2(f, 2, D));
    lg_tensor x = small_act(f, small_wanted(f, "x", half));
    small_act_into(f, x, lg_at(y, 0, half));
    lg_graph_begin_block(f->g);
    small_act_into(f, small_act(f, x), lg_at(y, D, half));
    lg_tensor z = small_act(f, y);
    lg_graph_end_block(f->g);
    small_act_into(f, z, small_out(f, z));
}

static void test_a_value_made_in_and_outside_a_block(void **state)
{
    (void)state;
    assert_int_equal(differ(describe_halves, false, (unsigned[]){ALL, 0, 0}), 0);
}

/* A node that makes what is dropped and what is the caller's: the second time its result goes nowhere. The backward
 * needs no place for it. */
static void describe_result(void)
{
    lg_tensor rows = small_t2(f, B * T, D), x = small_wanted(f, "x", rows);
    lg_graph_begin_block(f->g);
    lg_linear_forward(f->s,
                      &(struct lg_linear_forward_args){.x = small_act(f, x),
                                                       .w = small_wanted(f, "w", small_t2(f, D, D)),
                                                       .y = small_out(f, rows),
                                                       .act = LG_ACT_SILU});
    lg_graph_end_block(f->g);
}

static void test_a_result_is_written_once(void **state)
{
    (void)state;
    assert_int_equal(differ(describe_result, true, (unsigned[]){MLP, 0, 0}), 0);
    assert_int_equal(differ(describe_result, true, (unsigned[]){ALL, 0, 0}), 0);
    char *text = small_text(f);
    assert_int_equal(small_count(text, "linear_forward"), 2);
    free(text);
    small_run(f, LG_PROGRAM_FORWARD, false);
    void *out = f->data[f->out];
    f->data[f->out] = NULL;
    small_run(f, LG_PROGRAM_BACKWARD, false);
    f->data[f->out] = out;
}

/* A graph without blocks, or without a backward, stays as it is. */
static void test_nothing_to_repeat(void **state)
{
    (void)state;
    describe_net();
    small_compile(f);
    char *before = small_text(f);
    lg_graph_recompute(f->g, (unsigned[]){ALL, ALL, ALL});
    small_compile(f);
    char *after = small_text(f);
    assert_string_equal(before, after);
    free(before);
    free(after);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(t) cmocka_unit_test_setup_teardown(t, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_are_the_same),
        TEST(test_random_graphs),
        TEST(test_nodes_that_are_repeated),
        TEST(test_nodes_of_groups),
        TEST(test_boundaries_are_kept),
        TEST(test_memory_shrinks),
        TEST(test_what_is_kept),
        TEST(test_print),
        TEST(test_print_of_a_residual),
        TEST(test_a_value_made_in_and_outside_a_block),
        TEST(test_a_result_is_written_once),
        TEST(test_nothing_to_repeat),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
