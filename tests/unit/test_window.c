/* The window's rules one by one, and its geometry: what lg_window_check() accepts never comes to a
 * standstill. */
#include "base/clock.h"
#include "shm/window.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SLOTS_MAX = 512 };
#define S LG_FIELD_SOURCE
#define L LG_FIELD_LATENT
#define T LG_FIELD_TEXT

static struct lg_board_shared shared;
static lg_board board = {&shared, -1};
static struct lg_slot slots[SLOTS_MAX];
static lg_window window, *w = &window;

static void begin(struct lg_window_geometry g, uint64_t start_step)
{
    memset(&shared, 0, sizeof shared);
    memset(slots, 0, sizeof slots);
    shared.batch = g.batch;
    shared.ranks = 1;
    shared.start_step = start_step;
    atomic_store(&shared.next_counter, 1);
    LG_ASSERT(g.slots <= SLOTS_MAX);
    window = (lg_window){.g = g, .slot = slots};
}

/* A life word without a pid: alive until it is buried. */
static lg_incarnation alive(lg_role role, int index)
{
    lg_incarnation i = lg_board_enlist(&board, role, index);
    atomic_store(&lg_board_row(&board, role, index)->life, (uint64_t)i << 8 | LG_LIFE_RUNNING);
    return i;
}

static void commit(uint64_t state)
{
    atomic_store(&lg_board_row(&board, LG_ROLE_trainer, 0)->commit, lg_mark_of(state));
}

static int claim(lg_incarnation me, lg_field f, unsigned needs, uint64_t end, struct lg_claim *c)
{
    return lg_window_claim(w, &board, me, f, needs, end, c);
}

static void fill(const struct lg_claim *c, lg_field f)
{
    for (uint64_t n = c->n; n < c->n + c->count; n++)
        if (lg_window_wanted(w, c, f, n)) lg_window_publish(w, f, n);
}

static void test_order_and_needs(void **state)
{
    struct lg_claim c;
    begin((struct lg_window_geometry){.slots = 16, .batch = 4, .chunk = {4, 2, 8}}, 0);
    lg_incarnation a = alive(LG_ROLE_loader, 0), v = alive(LG_ROLE_vae, 0);
    assert_int_equal(claim(v, L, 1u << S, 100, &c), LG_ERR_BUSY);
    assert_int_equal(claim(a, S, 0, 100, &c), 0);
    assert_int_equal(c.n, 0);
    assert_int_equal(c.count, 4);
    assert_true(lg_window_wanted(w, &c, S, 3));
    lg_window_publish(w, S, 0);
    lg_window_publish(w, S, 1);
    assert_false(lg_window_wanted(w, &c, S, 1));
    assert_true(lg_window_ready(w, S, 1));
    assert_false(lg_window_ready(w, S, 2));
    assert_int_equal(claim(v, L, 1u << S, 100, &c), 0); /* [0, 2) has its pictures */
    assert_int_equal(c.n, 0);
    assert_int_equal(claim(v, L, 1u << S, 100, &c), LG_ERR_BUSY); /* [2, 4) has not */
    assert_true(lg_window_range_ready(w, 1u << S, 0, 2));
    assert_false(lg_window_range_ready(w, 1u << S, 0, 3));
    assert_false(lg_window_range_ready(w, 1u << S | 1u << L, 0, 2));
}

static void test_takeover(void **state)
{
    struct lg_claim c;
    begin((struct lg_window_geometry){.slots = 8, .batch = 4, .chunk = {4, 4, 4}}, 0);
    lg_incarnation a = alive(LG_ROLE_loader, 0), b = alive(LG_ROLE_loader, 1);
    assert_int_equal(claim(a, S, 0, 100, &c), 0);
    lg_window_publish(w, S, 0);
    assert_int_equal(claim(b, S, 0, 100, &c), 0);
    assert_int_equal(c.n, 4);
    assert_int_equal(claim(b, S, 0, 100, &c), LG_ERR_BUSY); /* a lives, and has not finished */
    lg_board_bury(&board, a);
    assert_int_equal(claim(b, S, 0, 100, &c), 0);
    assert_int_equal(c.n, 0);
    assert_false(lg_window_wanted(w, &c, S, 0)); /* ready: hands off */
    assert_true(lg_window_wanted(w, &c, S, 1));
    fill(&c, S);
    assert_true(lg_window_range_ready(w, 1u << S, 0, 4));
    a = alive(LG_ROLE_loader, 0);
    assert_int_equal(claim(a, S, 0, 100, &c), LG_ERR_BUSY); /* [4, 8) is b's */
}

static void test_laps(void **state)
{
    struct lg_claim c;
    begin((struct lg_window_geometry){.slots = 8, .batch = 4, .chunk = {4, 4, 4}}, 0);
    lg_incarnation a = alive(LG_ROLE_loader, 0);
    for (uint64_t n = 0; n < 8; n += 4) {
        assert_int_equal(claim(a, S, 0, 100, &c), 0);
        fill(&c, S);
    }
    assert_int_equal(claim(a, S, 0, 100, &c), LG_ERR_BUSY); /* the window is full */
    commit(0);
    assert_int_equal(claim(a, S, 0, 100, &c), LG_ERR_BUSY);
    commit(1);
    assert_int_equal(lg_window_first(&board), 4);
    assert_int_equal(claim(a, S, 0, 100, &c), 0);
    assert_int_equal(c.n, 8); /* over its own claim of the lap before */
    assert_true(lg_window_ready(w, S, 0));
    assert_false(lg_window_ready(w, S, 8));
    fill(&c, S);
    assert_true(lg_window_ready(w, S, 8));
}

/* A resumed run begins in the middle of a chunk; the last chunk is cut by the end. */
static void test_cut_chunks(void **state)
{
    struct lg_claim c;
    begin((struct lg_window_geometry){.slots = 24, .batch = 3, .chunk = {8, 8, 8}}, 3);
    lg_incarnation a = alive(LG_ROLE_loader, 0);
    assert_int_equal(lg_window_first(&board), 9);
    assert_int_equal(claim(a, S, 0, 18, &c), 0);
    assert_int_equal(c.n, 8);
    assert_int_equal(c.from, 9);
    assert_false(lg_window_wanted(w, &c, S, 8));
    assert_true(lg_window_wanted(w, &c, S, 9));
    fill(&c, S);
    assert_int_equal(claim(a, S, 0, 18, &c), 0);
    assert_int_equal(c.n, 16);
    assert_int_equal(c.to, 18);
    assert_false(lg_window_wanted(w, &c, S, 18));
    assert_int_equal(claim(a, S, 0, 18, &c), LG_ERR_BUSY); /* may die before it has finished */
    c = (struct lg_claim){16, 8, 16, 18};
    fill(&c, S);
    assert_int_equal(claim(a, S, 0, 18, &c), LG_ERR_STOP);
    assert_int_equal(claim(a, S, 0, 9, &c), LG_ERR_STOP);
    lg_board_bury(&board, a);
    a = alive(LG_ROLE_loader, 0);
    assert_int_equal(claim(a, S, 0, 24, &c), 0); /* nothing was remembered about a part */
    assert_int_equal(c.n, 16);
}

/* A claimant that slept since it looked at F: the claim word is of a later lap by now. */
static void test_old_view(void **state)
{
    struct lg_claim c;
    begin((struct lg_window_geometry){.slots = 8, .batch = 4, .chunk = {4, 4, 4}}, 0);
    lg_incarnation a = alive(LG_ROLE_loader, 0);
    atomic_store(&slots[0].claim[S], (uint64_t)99 << 32 | 2); /* of [8, 12) */
    assert_int_equal(claim(a, S, 0, 4, &c), LG_ERR_BUSY);
    assert_int_equal(atomic_load(&slots[0].claim[S]), (uint64_t)99 << 32 | 2);
}

/* Two chunks whose slots are the same: the later, cut by the end, must not take the claim word while
 * the earlier is unfinished. */
static void test_cut_chunk_waits_for_its_claim_word(void **state)
{
    struct lg_claim c;
    begin((struct lg_window_geometry){.slots = 8, .batch = 1, .chunk = {8, 8, 1}}, 0);
    lg_incarnation a = alive(LG_ROLE_loader, 0), b = alive(LG_ROLE_loader, 1);
    assert_int_equal(claim(a, S, 0, 9, &c), 0);
    lg_window_publish(w, S, 0);
    lg_window_publish(w, S, 1);
    commit(2); /* F = 2: slot 0 is free */
    assert_int_equal(claim(b, S, 0, 9, &c), LG_ERR_BUSY);
    lg_board_bury(&board, a);
    assert_int_equal(claim(b, S, 0, 9, &c), 0);
    assert_int_equal(c.n, 0);
    assert_int_equal(c.from, 2);
}

static void test_geometry_messages(void **state)
{
    struct lg_window_geometry g = {.slots = 16, .batch = 3, .chunk = {4, 4, 4}};
    assert_int_equal(lg_window_check(&g), LG_ERR_CONFIG);
    g.batch = 4;
    assert_int_equal(lg_window_check(&g), 0);
    g.chunk[L] = 5;
    assert_int_equal(lg_window_check(&g), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "vae's chunk of 5"));
    g.chunk[L] = 0; /* not used */
    assert_int_equal(lg_window_check(&g), 0);
    g.chunk[S] = 0;
    assert_int_equal(lg_window_check(&g), LG_ERR_CONFIG);
    g = (struct lg_window_geometry){.slots = 12, .batch = 12, .chunk = {4, 4, 4}};
    assert_int_equal(lg_window_check(&g), 0);
    lg_err_clear();
}

/* What no window can be is refused by name, before anything is divided by it. */
static void test_impossible_geometries(void **state)
{
    static const struct {
        struct lg_window_geometry g;
        const char *says;
    } bad[] = {
        {{.slots = 12, .batch = 0, .chunk = {4, 4, 4}}, "12 slots for a batch of 0"},
        {{.slots = 0, .batch = 4, .chunk = {4, 4, 4}}, "0 slots for a batch of 4"},
        {{.slots = UINT64_C(1) << 32, .batch = 4, .chunk = {4, 4, 4}}, "4294967296 slots"},
        {{.slots = 12, .batch = 4, .ranks = -1, .chunk = {4, 4, 4}}, "among -1 ranks"},
        {{.slots = 130, .batch = 65, .ranks = 65, .chunk = {1, 1, 1}}, "among 65 ranks"},
        {{.slots = 12, .batch = 4, .ranks = 3, .chunk = {4, 4, 4}}, "among 3 ranks"},
        {{.slots = 12, .batch = 4, .chunk = {4, -4, 4}}, "vae's chunk of -4"},
        {{.slots = 12, .batch = 4, .chunk = {4, 4, 8}}, "text's chunk of 8"},
    };
    char memory[64];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lg_window *none = NULL;
        assert_int_equal(lg_window_check(&bad[i].g), LG_ERR_CONFIG);
        assert_int_equal(lg_window_over(memory, &bad[i].g, &none), LG_ERR_CONFIG);
        assert_null(none);
        if (!strstr(lg_err_message(), bad[i].says)) fail_msg("%zu: %s", i, lg_err_message());
    }
    lg_err_clear();
}

/* Everybody does all they can until nobody can do anything. True when the run gets to its end. */
static bool run_dry(struct lg_window_geometry g, uint64_t start, uint64_t steps)
{
    static const lg_role role[] = {LG_ROLE_loader,      LG_ROLE_vae,         LG_ROLE_text,
                                   LG_ROLE_text_clip_l, LG_ROLE_text_clip_g, LG_ROLE_text_t5};
    begin(g, start);
    lg_incarnation me[LG_FIELD_COUNT];
    uint64_t s = start, end = (start + steps) * g.batch;
    unsigned all = 0;
    for (int f = 0; f < LG_FIELD_COUNT; f++) {
        me[f] = alive(role[f], 0);
        if (g.chunk[f]) all |= 1u << f;
    }
    commit(s);
    for (bool moved = true; moved;) {
        moved = false;
        for (int f = 0; f < LG_FIELD_COUNT; f++) {
            struct lg_claim c;
            if (!g.chunk[f]) continue;
            while (claim(me[f], (lg_field)f, f == S ? 0 : 1u << S, end, &c) == 0) {
                fill(&c, (lg_field)f);
                moved = true;
            }
        }
        if (s < start + steps && lg_window_range_ready(w, all, s * g.batch, g.batch)) {
            commit(++s);
            moved = true;
        }
    }
    return s == start + steps;
}

static void test_no_standstill(void **state)
{
    static const int chunk[] = {1, 2, 3, 4, 5, 6, 8, 12};
    enum { N = sizeof chunk / sizeof *chunk };
    int accepted = 0, refused = 0, stood = 0;
    for (int i = 0; i < N * N * N * 12; i++) {
        struct lg_window_geometry g = {
            .batch = (uint64_t)(i / (N * N * N)) + 1,
            .chunk = {chunk[i % N], chunk[i / N % N], i % 5 ? chunk[i / N / N % N] : 0}};
        for (g.slots = g.batch; g.slots <= 72; g.slots += g.batch) {
            bool good = lg_window_check(&g) == 0;
            if (!good && ++refused % 16) continue; /* of these, some will do */
            uint64_t steps = 2 * g.slots / g.batch + 1;
            bool ran = run_dry(g, (uint64_t)i % 7, steps);
            if (good && !ran)
                fail_msg("batch %d, chunks %d %d %d, %d slots: a standstill", (int)g.batch,
                         g.chunk[0], g.chunk[1], g.chunk[2], (int)g.slots);
            accepted += good;
            stood += !ran;
        }
    }
    print_message("%d geometries accepted and run; of %d refused, %d of %d tried come to a "
                  "standstill\n",
                  accepted, refused, stood, refused / 16);
    assert_true(accepted > 1000 && stood > 0); /* stood: the test can tell */
    lg_err_clear();
}

/* Each text has its regions: states of all places of a rank, then pooled values; a text may have one of them alone. */
static void several_texts(const lg_plan *one)
{
    lg_plan plan = *one;
    struct lg_window_geometry g;
    lg_window *v;
    plan.n_texts = 3;
    plan.text[0] = (struct lg_plan_text){LG_ROLE_text_clip_l, 7, 0, 5, 8, 1}; /* pooled alone */
    plan.text[1] = (struct lg_plan_text){LG_ROLE_text_clip_g, 7, 3, 6, 2, 1};
    plan.text[2] = (struct lg_plan_text){LG_ROLE_text_t5, 9, 4, 0, 4, 1}; /* states alone */
    plan.instances[LG_ROLE_trainer] = 2;
    lg_window_geometry_of(&plan, &g);
    assert_int_equal(lg_window_check(&g), 0);
    assert_string_equal(g.text[1].name, ".clip_g");
    assert_int_equal(g.chunk[lg_field_text(0)], 8);
    assert_int_equal(g.chunk[lg_field_text(1)], 2);
    assert_int_equal(g.chunk[lg_field_text(3)], 0);
    const size_t bytes = lg_window_bytes(&g), e = (size_t)plan.element_bytes;
    uint8_t *memory = aligned_alloc(LG_PAGE_BYTES, bytes);
    assert_int_equal(lg_window_over(memory, &g, &v), 0);
    memset(memory, 0, bytes);
    const size_t states[] = {0, 7 * 3 * e, 9 * 4 * e}, pooled[] = {5 * e, 6 * e, 0};
    const size_t tokens[] = {28, 28, 36};
    for (uint64_t n = 0; n < 16; n++) /* each byte has one owner */
        for (int k = 0; k < 3; k++) {
            uint8_t *part[] = {lg_window_tokens(v, k, n), lg_window_states(v, k, n),
                               lg_window_pooled(v, k, n)};
            const size_t size[] = {tokens[k], states[k], pooled[k]};
            for (int i = 0; i < 3; i++)
                for (size_t b = 0; b < size[i]; b++) {
                    assert_true(part[i] >= memory + LG_PAGE_BYTES &&
                                part[i] + size[i] <= memory + bytes);
                    assert_int_equal(part[i][b], 0);
                    part[i][b] = (uint8_t)(1 + n);
                }
        }
    /* The samples of a rank's share are one tensor of states and one of pooled values. */
    assert_ptr_equal(lg_window_states(v, 1, 1), lg_window_states(v, 1, 0) + states[1]);
    assert_ptr_equal(lg_window_pooled(v, 0, 3), lg_window_pooled(v, 0, 2) + pooled[0]);
    lg_window_close(&v);
    free(memory);
}

static void test_memory(void **state)
{
    lg_plan plan = {.sequence = 1,
                    .frames = 1,
                    .image_height = 8,
                    .image_width = 8,
                    .latent_channels = 4,
                    .latent_frames = 1,
                    .latent_height = 2,
                    .latent_width = 2,
                    .factor_time = 1,
                    .n_texts = 1,
                    .text = {{LG_ROLE_text, 6, 16, 0, 8, 1}},
                    .batch = 4,
                    .window_slots = 16,
                    .loader_chunk = 4,
                    .vae_chunk = 2,
                    .element_bytes = 4};
    struct lg_window_geometry g, half;
    lg_window_geometry_of(&plan, &g);
    plan.element_bytes = 2;
    lg_window_geometry_of(&plan, &half);
    assert_int_equal(half.latent_bytes, g.latent_bytes / 2);
    assert_int_equal(half.text[0].states_bytes, g.text[0].states_bytes / 2);
    assert_int_equal(half.pixels_bytes, g.pixels_bytes);
    assert_int_equal(half.text[0].tokens_bytes, g.text[0].tokens_bytes);
    assert_int_equal(g.pixels_bytes, 3 * 8 * 8);
    assert_int_equal(g.text[0].tokens_bytes, 24);
    assert_int_equal(g.latent_bytes, 2 * 4 * 2 * 2 * 4);
    assert_int_equal(g.text[0].states_bytes, 6 * 16 * 4);
    assert_int_equal(g.chunk[L], 2);
    size_t bytes = lg_window_bytes(&g);
    uint8_t *memory = aligned_alloc(LG_PAGE_BYTES, bytes);
    lg_window *v;
    assert_int_equal(lg_window_over(memory, &g, &v), 0);
    assert_ptr_equal(v->slot, memory);
    assert_true(v->text[0][0] + 16 * g.text[0].states_bytes <= memory + bytes);
    assert_true(v->pixels + 16 * g.pixels_bytes <= v->tokens[0]);
    lg_window_close(&v);
    assert_null(v);
    free(memory);
    several_texts(&plan);
    plan.image_height = plan.n_texts = 0; /* latents from the data set, no text */
    lg_window_geometry_of(&plan, &g);
    assert_int_equal(g.pixels_bytes, 0);
    assert_int_equal(g.chunk[L], 4);
    assert_int_equal(g.chunk[T], 0);
}

static void test_speed(void **state)
{
    enum { STEPS = 4000 };
    struct lg_window_geometry g = {.slots = 512, .batch = 16, .chunk = {8, 8, 8}};
    int64_t t = lg_now_ns();
    assert_true(run_dry(g, 0, STEPS));
    print_message("claim and publish: %.0f ns a sample and field, chunks of 8\n",
                  (double)(lg_now_ns() - t) / (STEPS * 16 * 3));
}

/* Samples in flight have places of their own, within the memory of the rank that trains on them. */
static void test_places(void **state)
{
    lg_window v = {.g = {.slots = 24, .batch = 6, .ranks = 3}};
    for (uint64_t first = 0; first < 60; first += 6) {
        bool taken[3][8] = {{false}};
        for (uint64_t n = first; n < first + v.g.slots; n++) {
            int rank = lg_window_rank(&v, n);
            size_t place = lg_window_place(&v, n);
            assert_int_equal(rank, n % 6 / 2);
            assert_true(place < 8 && !taken[rank][place]);
            taken[rank][place] = true;
        }
    }
}

/* ---- buckets ---- */

/* Two ranks with three micro-batches of four places; shapes with 4, 2, 1 samples in one. */
static lg_plan bucket_plan(void)
{
    return (lg_plan){.sequence = 1,
                     .instances = {[LG_ROLE_trainer] = 2},
                     .frames = 1,
                     .image_height = 16,
                     .image_width = 16,
                     .latent_channels = 4,
                     .latent_frames = 1,
                     .latent_height = 4,
                     .latent_width = 4,
                     .factor_time = 1,
                     .n_texts = 1,
                     .text = {{LG_ROLE_text, 6, 16, 0, 4, 1}},
                     .batch = 24,
                     .rank_batch = 12,
                     .micro_batch = 4,
                     .window_slots = 48,
                     .loader_chunk = 8,
                     .vae_chunk = 2,
                     .element_bytes = 2,
                     .buckets = {.n = 3, .of = {{1, 16, 16, 4}, {1, 32, 20, 2}, {1, 36, 32, 1}}}};
}

/* A span of memory, and who has it. */
struct span {
    const uint8_t *from, *to;
    uint64_t micro;
};

/* Of each micro-batch one tensor: samples follow each other, and lie in no other micro-batch's memory. */
static void test_packed(void **state)
{
    lg_plan plan = bucket_plan();
    struct lg_window_geometry g;
    lg_window *v;
    static struct span span[3 * 48];
    lg_window_geometry_of(&plan, &g);
    const size_t bytes = lg_window_bytes(&g);
    uint8_t *memory = aligned_alloc(LG_PAGE_BYTES, bytes);
    memset(memory, 0, bytes);
    assert_int_equal(lg_window_over(memory, &g, &v), 0);
    assert_int_equal(g.micro, 4);
    for (uint64_t n = 0; n < 48; n++) v->slot[n].bucket = (uint32_t)(n / 4 * 5 % 3);
    int spans = 0;
    for (uint64_t n = 48; n < 96; n++) {
        const struct lg_window_shape s = lg_window_shape(v, n);
        const struct lg_bucket *b = &plan.buckets.of[v->slot[n % 48].bucket];
        assert_int_equal(s.rows, b->rows);
        assert_int_equal(s.pixels_bytes, 3 * b->height * b->width);
        assert_int_equal(s.half_bytes, 4 * (b->height / 4) * (b->width / 4) * 2);
        assert_int_equal(lg_window_has_place(v, n), n % 4 < (uint64_t)s.rows);
        assert_int_equal(lg_window_run(v, n, 96), 4 - n % 4);
        if (!lg_window_has_place(v, n)) continue;
        const uint8_t *first[] = {lg_window_pixels(v, n / 4 * 4), lg_window_mean(v, n / 4 * 4),
                                  lg_window_logvar(v, n / 4 * 4)};
        const uint8_t *at[] = {lg_window_pixels(v, n), lg_window_mean(v, n),
                               lg_window_logvar(v, n)};
        const size_t size[] = {s.pixels_bytes, s.half_bytes, s.half_bytes};
        for (int k = 0; k < 3; k++) {
            assert_ptr_equal(at[k], first[k] + n % 4 * size[k]);
            assert_true(k == 0 || (uintptr_t)first[k] % 64 == 0);
            assert_true(at[k] >= memory && at[k] + size[k] <= memory + bytes);
            span[spans++] = (struct span){at[k], at[k] + size[k], n};
        }
    }
    for (int i = 0; i < spans; i++)
        for (int k = 0; k < i; k++)
            assert_true(span[i].to <= span[k].from || span[k].to <= span[i].from);
    /* The largest micro-batch is what memory is taken for: 2 of 32 x 20, not 1 of 36 x 32. */
    assert_true(g.pixels_bytes >= 2 * 3 * 32 * 20 / 4 && g.pixels_bytes < 2 * 3 * 32 * 20 / 4 + 64);
    lg_window_close(&v);
    free(memory);
}

/* Where a chunk has no memory at all it is published without work; not where one sample has some. */
static void test_absent_chunk(void **state)
{
    lg_plan plan = bucket_plan();
    struct lg_window_geometry g;
    struct lg_claim c;
    lg_window_geometry_of(&plan, &g);
    begin(g, 0);
    lg_incarnation me = alive(LG_ROLE_vae, 0), loader = alive(LG_ROLE_loader, 0);
    for (uint64_t n = 0; n < 48; n++) slots[n].bucket = (uint32_t)(n / 4 % 3);
    for (int k = 0; k < 6; k++) {
        assert_int_equal(claim(loader, S, 0, 100, &c), 0);
        fill(&c, S);
    }
    /* Chunks of two places: of 4 rows both are there, of 2 the first, of 1 half of the first. */
    static const bool absent[] = {false, false, false, true, false, true};
    for (int k = 0; k < 6; k++) {
        assert_int_equal(claim(me, L, 1 << S, 100, &c), 0);
        assert_int_equal(c.n, 2 * k);
        assert_int_equal(lg_window_publish_absent(w, L, &c), absent[k]);
        assert_int_equal(lg_window_range_ready(w, 1 << L, c.n, 2), absent[k]);
        if (!absent[k]) fill(&c, L);
    }
}

static void test_geometry_of_buckets(void **state)
{
    lg_plan plan = bucket_plan();
    struct lg_window_geometry g;
    lg_window_geometry_of(&plan, &g);
    assert_int_equal(lg_window_check(&g), 0);
    g.chunk[L] = 3;
    assert_int_equal(lg_window_check(&g), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "the vae's chunk of 3 a micro-batch"));
    g.chunk[L] = 8; /* crosses a micro-batch */
    assert_int_equal(lg_window_check(&g), LG_ERR_CONFIG);
    g.chunk[L] = 2;
    g.micro = 8; /* no part of a rank's 12 */
    assert_int_equal(lg_window_check(&g), LG_ERR_CONFIG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_absent_chunk),
        cmocka_unit_test(test_geometry_of_buckets),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_order_and_needs),
        cmocka_unit_test(test_takeover),
        cmocka_unit_test(test_laps),
        cmocka_unit_test(test_cut_chunks),
        cmocka_unit_test(test_old_view),
        cmocka_unit_test(test_cut_chunk_waits_for_its_claim_word),
        cmocka_unit_test(test_geometry_messages),
        cmocka_unit_test(test_impossible_geometries),
        cmocka_unit_test(test_no_standstill),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_speed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
