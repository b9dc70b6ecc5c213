/* The window of samples in flight; the rules stand in window.h.
 *
 * Design: a slot's control words are 192 bytes in one region, the payloads lie in one region per
 * kind. Scanning starts at the first sample that is not globally committed, or at the first chunk
 * that this process has not yet seen complete: readiness never goes back, so remembering it is
 * safe.
 *
 * Why a stale view is harmless in lg_window_claim():
 *  - F read too small: fewer chunks may be claimed, never more.
 *  - ready words read too early: the compare-and-swap of the claim succeeds only if nobody else has
 *    taken the chunk since, and lg_window_wanted() looks again after it. If the former claimant
 *    finished and died in between, its words are visible by then: its death was learnt from the
 *    board (acquire) or from its pidfd.
 *  - claim word read too early: the compare-and-swap fails. A value never comes back, since an
 *    incarnation takes a chunk of a lap once, and only while it lives.
 */
#include "shm/window.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHARE_ALIGN = 64 /* bytes: where a micro-batch begins */ };

/* Parts of a window: those of all ranks, then those of each. */
enum { CONTROL, PIXELS, TOKENS, OF_ALL = TOKENS + LG_TEXTS_MAX };
enum { LATENT, TEXT, OF_RANK = TEXT + LG_TEXTS_MAX };

/* A slot's share of `bytes`, which a micro-batch takes. */
static size_t share_of(size_t bytes, uint64_t micro)
{
    const size_t share = (bytes + micro - 1) / micro;
    return (share + SHARE_ALIGN - 1) / SHARE_ALIGN * SHARE_ALIGN;
}

static void add_shapes(const lg_plan *p, struct lg_window_geometry *g)
{
    size_t pixels = 0, half = 0;
    g->n_shapes = p->buckets.n;
    g->micro = (uint64_t)p->micro_batch;
    for (int k = 0; k < g->n_shapes; k++) {
        const struct lg_plan_shape s = lg_plan_shape(p, k);
        const size_t cells = lg_plan_shape_cells(&s);
        g->shape[k] = (struct lg_window_shape){.rows = s.rows,
                                               .pixels_bytes = 3 * lg_plan_shape_pixels(&s),
                                               .half_bytes = (size_t)p->latent_channels * cells *
                                                             (size_t)p->element_bytes};
        pixels = LG_MAX(pixels, (size_t)s.rows * g->shape[k].pixels_bytes);
        half = LG_MAX(half, (size_t)s.rows * g->shape[k].half_bytes);
    }
    g->pixels_bytes = share_of(pixels, g->micro);
    g->latent_bytes = 2 * share_of(half, g->micro);
}

static struct lg_window_text text_of(const lg_plan *p, int k)
{
    const struct lg_plan_text *t = &p->text[k];
    const size_t L = (size_t)t->length, element = (size_t)p->element_bytes;
    struct lg_window_text ret = {.tokens_bytes = L * sizeof(int32_t),
                                 .states_bytes = L * (size_t)t->dim * element,
                                 .pooled_bytes = (size_t)t->pooled * element};
    /* "text" or "text.t5": what is behind "text" */
    snprintf(ret.name, sizeof ret.name, "%s", lg_role_name(t->role) + strlen("text"));
    return ret;
}

void lg_window_geometry_of(const lg_plan *p, struct lg_window_geometry *ret)
{
    const size_t pixels = (size_t)p->frames * (size_t)p->image_height * (size_t)p->image_width;
    const size_t cells =
        (size_t)p->latent_frames * (size_t)p->latent_height * (size_t)p->latent_width;
    const size_t latent_element = p->image_height ? (size_t)p->element_bytes : sizeof(float);
    *ret = (struct lg_window_geometry){
        .slots = (uint64_t)p->window_slots,
        .batch = (uint64_t)lg_plan_host_batch(p),
        .ranks = p->instances[LG_ROLE_trainer] / p->sequence,
        .pixels_bytes = 3 * pixels,
        .latent_bytes = 2 * (size_t)p->latent_channels * cells * latent_element,
    };
    if (p->buckets.n) add_shapes(p, ret);
    ret->chunk[LG_FIELD_SOURCE] = p->loader_chunk;
    /* Without a VAE the loader provides the latents. */
    ret->chunk[LG_FIELD_LATENT] = p->image_height ? p->vae_chunk : p->loader_chunk;
    for (int k = 0; k < p->n_texts; k++) {
        ret->text[k] = text_of(p, k);
        ret->chunk[lg_field_text(k)] = p->text[k].chunk;
    }
}

static uint64_t up_to_multiple(uint64_t n, uint64_t of)
{
    return (n + of - 1) / of * of;
}

int lg_window_check(const struct lg_window_geometry *g)
{
    if (!g->batch || !g->slots || g->slots > UINT32_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "a window of %llu slots for a batch of %llu is impossible",
                       (unsigned long long)g->slots, (unsigned long long)g->batch);
    if (g->ranks < 0 || g->ranks > LG_INSTANCES_MAX || (g->ranks && g->batch % (uint64_t)g->ranks))
        return LG_FAIL(LG_ERR_CONFIG, "a batch of %llu samples does not divide among %d ranks",
                       (unsigned long long)g->batch, g->ranks);
    if (g->slots % g->batch)
        return LG_FAIL(LG_ERR_CONFIG,
                       "the window has %llu slots, which is not a multiple of the batch of %llu",
                       (unsigned long long)g->slots, (unsigned long long)g->batch);
    if (g->chunk[LG_FIELD_SOURCE] < 1)
        return LG_FAIL(LG_ERR_CONFIG, "the loader's chunk is %d samples; it must be at least 1",
                       g->chunk[LG_FIELD_SOURCE]);
    if (g->n_shapes && (!g->micro || g->batch / (uint64_t)LG_MAX(g->ranks, 1) % g->micro ||
                        g->micro % (uint64_t)LG_MAX(g->chunk[LG_FIELD_LATENT], 1)))
        return LG_FAIL(LG_ERR_CONFIG,
                       "with buckets a micro-batch of %llu samples must divide a rank's share, and "
                       "the vae's chunk of %d a micro-batch",
                       (unsigned long long)g->micro, g->chunk[LG_FIELD_LATENT]);
    for (int f = 0; f < LG_FIELD_COUNT; f++) {
        if (g->chunk[f] == 0) continue;
        if (g->chunk[f] < 0 || g->slots % (uint64_t)g->chunk[f])
            return LG_FAIL(LG_ERR_CONFIG,
                           "the window has %llu slots, which is not a multiple of the %s%s's chunk "
                           "of %d",
                           (unsigned long long)g->slots,
                           f == LG_FIELD_SOURCE   ? "loader"
                           : f == LG_FIELD_LATENT ? "vae"
                                                  : "text",
                           f < LG_FIELD_TEXT ? "" : g->text[f - LG_FIELD_TEXT].name, g->chunk[f]);
    }
    return 0;
}

static int region_count(const struct lg_window_geometry *g)
{
    return OF_ALL + OF_RANK * g->ranks;
}

static size_t region_bytes(const struct lg_window_geometry *g, int which_region)
{
    if (which_region == CONTROL) return g->slots * sizeof(struct lg_slot);
    if (which_region == PIXELS) return g->slots * g->pixels_bytes;
    if (which_region < OF_ALL) return g->slots * g->text[which_region - TOKENS].tokens_bytes;
    const int which = (which_region - OF_ALL) % OF_RANK;
    const size_t places = g->slots / (uint64_t)g->ranks;
    if (which == LATENT) return places * g->latent_bytes;
    return places * (g->text[which - TEXT].states_bytes + g->text[which - TEXT].pooled_bytes);
}

static void set_region(lg_window *w, int which_region, void *memory)
{
    const int rank = (which_region - OF_ALL) / OF_RANK, which = (which_region - OF_ALL) % OF_RANK;
    if (which_region == CONTROL)
        w->slot = memory;
    else if (which_region == PIXELS)
        w->pixels = memory;
    else if (which_region < OF_ALL)
        w->tokens[which_region - TOKENS] = memory;
    else if (which == LATENT)
        w->latent[rank] = memory;
    else
        w->text[which - TEXT][rank] = memory;
}

static int window_new(const struct lg_window_geometry *g, lg_window **ret)
{
    LG_TRY(lg_window_check(g));
    lg_window *w = calloc(1, sizeof *w);
    if (!w) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a window's handle");
    w->g = *g;
    if (!w->g.ranks) w->g.ranks = 1;
    *ret = w;
    return 0;
}

static lg_field field_of(int which_region)
{
    if (which_region < OF_ALL) return LG_FIELD_SOURCE;
    const int which = (which_region - OF_ALL) % OF_RANK;
    return which == LATENT ? LG_FIELD_LATENT : lg_field_text(which - TEXT);
}

/* Rule 10: has anything of it been published? */
static bool was_used(const lg_window *w, int which_region)
{
    lg_field f = field_of(which_region);
    for (uint64_t i = 0; i < w->g.slots; i++)
        if (atomic_load_explicit(&w->slot[i].ready[f], memory_order_acquire)) return true;
    return false;
}

static int open_part(lg_window *w, const struct lg_region_spec *spec,
                     const struct lg_window_places *places, int which_region)
{
    const int rank = (which_region - OF_ALL) / OF_RANK, which = (which_region - OF_ALL) % OF_RANK;
    if (which_region >= OF_ALL && (which == LATENT ? places->skip_latent : places->skip_text))
        return 0;
    char name[LG_REGION_NAME_BYTES];
    struct lg_region_spec s = *spec;
    s.bytes = region_bytes(&w->g, which_region);
    s.name = name;
    s.place = NULL;
    s.is_made = spec->is_made || (which_region != CONTROL && was_used(w, which_region));
    if (which_region < TOKENS) {
        snprintf(name, sizeof name, "window/0/%s", which_region == CONTROL ? "control" : "pixels");
    } else if (which_region < OF_ALL) {
        snprintf(name, sizeof name, "window/0/tokens%s", w->g.text[which_region - TOKENS].name);
    } else {
        const struct lg_region_place *p = which == LATENT ? places->latent : places->text;
        snprintf(name, sizeof name, "window/%d/%s%s", rank, which == LATENT ? "latent" : "text",
                 which == LATENT ? "" : w->g.text[which - TEXT].name);
        s.place = p ? &p[rank] : NULL;
    }
    LG_TRY(lg_region_open(&s, &w->region[which_region]));
    set_region(w, which_region, w->region[which_region]->payload);
    return 0;
}

int lg_window_open(const struct lg_region_spec *spec, const struct lg_window_geometry *g,
                   const struct lg_window_places *places, lg_window **ret)
{
    lg_window *w;
    LG_TRY(window_new(g, &w));
    int rc = 0;
    for (int i = 0; i < region_count(&w->g); i++)
        if (region_bytes(&w->g, i)) LG_TRY_GOTO(rc, open_part(w, spec, places, i), fail);
    *ret = w;
    return 0;
fail:
    lg_window_close(&w);
    return rc;
}

size_t lg_window_bytes(const struct lg_window_geometry *geometry)
{
    struct lg_window_geometry g = *geometry;
    size_t sum = 0;
    if (!g.ranks) g.ranks = 1;
    for (int i = 0; i < region_count(&g); i++)
        sum += up_to_multiple(region_bytes(&g, i), LG_PAGE_BYTES);
    return sum;
}

int lg_window_over(void *memory, const struct lg_window_geometry *g, lg_window **ret)
{
    lg_window *w;
    LG_TRY(window_new(g, &w));
    uint8_t *at = memory;
    for (int i = 0; i < region_count(&w->g); i++) {
        if (region_bytes(&w->g, i)) set_region(w, i, at);
        at += up_to_multiple(region_bytes(&w->g, i), LG_PAGE_BYTES);
    }
    *ret = w;
    return 0;
}

void lg_window_close(lg_window **w)
{
    if (!*w) return;
    for (int i = 0; i < LG_WINDOW_REGIONS_MAX; i++) lg_region_close(&(*w)->region[i]);
    free(*w);
    *w = NULL;
}

bool lg_window_range_ready(lg_window *w, unsigned mask, uint64_t n, uint64_t count)
{
    for (uint64_t i = n; i < n + count; i++)
        for (int f = 0; f < LG_FIELD_COUNT; f++)
            if ((mask >> f & 1) && !lg_window_ready(w, (lg_field)f, i)) return false;
    return true;
}

uint64_t lg_window_first(lg_board *b)
{
    lg_mark m = lg_board_global_commit(b);
    return (m == LG_MARK_NONE ? b->s->start_step : lg_mark_state(m)) * b->s->batch;
}

/* Rows whose incarnation was seen alive during one claim call: asking the kernel once is enough. */
struct living {
    uint64_t row[(LG_ROWS + 63) / 64];
};

static bool holder_is_dead(lg_board *b, lg_incarnation who, struct living *seen)
{
    int row = lg_incarnation_row(who);
    uint64_t bit = UINT64_C(1) << (row % 64);
    if (seen->row[row / 64] & bit) return false;
    if (lg_board_is_dead(b, who)) return true;
    seen->row[row / 64] |= bit;
    return false;
}

/* Rule 2. */
static bool take(_Atomic(uint64_t) *word, lg_board *b, lg_incarnation me, uint64_t lap,
                 struct living *seen)
{
    uint64_t old = atomic_load_explicit(word, memory_order_acquire);
    uint64_t old_lap = old & UINT32_MAX; /* + 1; 0: never claimed */
    LG_ASSERT(lap < UINT32_MAX - 1);
    if (old_lap > lap + 1) return false; /* our view is old */
    if (old_lap == lap + 1) {
        lg_incarnation who = (lg_incarnation)(old >> 32);
        if (who == me || !holder_is_dead(b, who, seen)) return false;
    }
    uint64_t mine = (uint64_t)me << 32 | (lap + 1);
    return atomic_compare_exchange_strong_explicit(word, &old, mine, memory_order_acq_rel,
                                                   memory_order_acquire);
}

int lg_window_claim(lg_window *w, lg_board *b, lg_incarnation me, lg_field f, unsigned needs,
                    uint64_t end, struct lg_claim *ret)
{
    LG_ASSERT(w->g.chunk[f] > 0 && me != 0);
    const uint64_t c = (uint64_t)w->g.chunk[f], slots = w->g.slots, first = lg_window_first(b);
    struct living seen = {{0}};
    bool all_ready = true;
    uint64_t at = LG_MAX(first / c * c, w->done[f]);
    for (; at < end; at += c) {
        struct lg_claim k = {at, c, LG_MAX(at, first), LG_MIN(at + c, end)};
        /* Rule 3, for the whole chunk, also where `end` cuts it: its claim word must be free, and
         * that belongs to the chunk W before until all of that is finished. */
        if (at + c > first + slots) {
            all_ready = false;
            break;
        }
        if (lg_window_range_ready(w, 1u << f, k.from, k.to - k.from)) {
            if (all_ready && k.to == at + c) w->done[f] = at + c;
            continue;
        }
        all_ready = false;
        if (!lg_window_range_ready(w, needs, k.from, k.to - k.from)) continue;
        if (!take(&lg_window_slot(w, at)->claim[f], b, me, at / slots, &seen)) continue;
        *ret = k;
        return 0;
    }
    return all_ready ? LG_ERR_STOP : LG_ERR_BUSY;
}

void lg_window_publish(lg_window *w, lg_field f, uint64_t n)
{
    _Atomic(uint64_t) *ready = &lg_window_slot(w, n)->ready[f];
    uint64_t old = atomic_load_explicit(ready, memory_order_relaxed);
    if (old == n + 1) { /* rule 7: a predecessor died between LATENT and SOURCE */
        LG_ASSERT(f == LG_FIELD_LATENT);
        return;
    }
    LG_ASSERT(old == 0 || old + w->g.slots == n + 1);
    /* Release orders plain stores; the full fence also drains non-temporal ones. */
    __sync_synchronize();
    atomic_store_explicit(ready, n + 1, memory_order_release);
}

bool lg_window_publish_absent(lg_window *w, lg_field f, const struct lg_claim *c)
{
    for (uint64_t n = c->from; n < c->to; n++)
        if (lg_window_wanted(w, c, f, n) && lg_window_has_place(w, n)) return false;
    for (uint64_t n = c->from; n < c->to; n++)
        if (lg_window_wanted(w, c, f, n)) lg_window_publish(w, f, n);
    return true;
}
