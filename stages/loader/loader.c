/* The loader: picture files and captions -> pixels, token ids and labels in the window.
 *
 * It claims aligned chunks of sample numbers, makes each sample from (seed, n) alone and publishes
 * it. An unreadable sample becomes void: it keeps its place, with black pixels and the empty
 * caption, so that encoders and ranks need no special case beyond a weight of zero. So does an absent one
 * (stages/io/order.h), for which nothing is read. A failing disk is not a void: reads are tried again, then the process
 * exits and is restarted. */
#include "base/clock.h"
#include "base/log.h"
#include "base/philox.h"
#include "config/texts.h"
#include "config/tokenizer_files.h"
#include "stages/io/source.h"
#include "stages/io/tokenizer.h"
#include "stages/loader/look.h"
#include "stages/roles.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { IO_TRIES = 5, IO_WAIT_MS = 200, VOID_EVENTS_MAX = 20, VOID_LINES_MAX = 1000 };

struct loader {
    lg_source *source;
    lg_tokenizer *tokenizer[LG_TEXTS_MAX]; /* of each text */
    double dropout[LG_TEXTS_MAX];          /* [text.NAME] dropout */
    lg_window *window;
    lg_order *order;    /* NULL without buckets */
    uint64_t data_hash; /* by which the run knows the data set */
    struct lg_sample_rule rule;
    lg_sample sample;
    uint64_t void_events;
    bool latents; /* the data set holds latents: LATENT is published too */
};

static void add_text(const lg_config *c, const lg_plan *p, const struct lg_window_geometry *g,
                     int k, struct lg_stage_bytes *rows, int cap, int *n)
{
    const struct lg_window_text *t = &g->text[k];
    if (*n < cap) {
        snprintf(rows[*n].name, sizeof rows[*n].name, "window/0/tokens%s", t->name);
        rows[(*n)++].bytes = g->slots * t->tokens_bytes;
    }
    for (int r = 0; r < g->ranks && *n < cap; r++, (*n)++) {
        snprintf(rows[*n].name, sizeof rows[*n].name, "window/%d/text%s", r, t->name);
        if (!p->apart) lg_stage_device_name(c, LG_ROLE_trainer, r * p->sequence, rows[*n].device);
        rows[*n].bytes = g->slots / (uint64_t)g->ranks * (t->states_bytes + t->pooled_bytes);
    }
}

static int loader_bytes(const lg_config *c, const lg_plan *p, lg_role role,
                        struct lg_stage_bytes *rows, int cap, int *ret_n)
{
    struct lg_window_geometry g;
    lg_window_geometry_of(p, &g);
    const struct {
        const char *name;
        size_t per_slot;
        bool of_rank, host;
    } field[] = {{"control", sizeof(struct lg_slot), false, true},
                 {"pixels", g.pixels_bytes, false, true},
                 {"latent", g.latent_bytes, true, p->apart || lg_stage_latents_on_host(p)}};
    int n = 0;
    for (size_t i = 0; i < LG_ARRAY_LEN(field); i++) {
        if (!field[i].per_slot) continue;
        int parts = field[i].of_rank ? g.ranks : 1;
        for (int r = 0; r < parts && n < cap; r++) {
            snprintf(rows[n].name, sizeof rows[n].name, "window/%d/%s", r, field[i].name);
            if (!field[i].host)
                lg_stage_device_name(c, LG_ROLE_trainer, r * p->sequence, rows[n].device);
            rows[n++].bytes = g.slots / (uint64_t)parts * field[i].per_slot;
        }
    }
    for (int k = 0; k < p->n_texts; k++) add_text(c, p, &g, k, rows, cap, &n);
    *ret_n = n;
    return 0;
}

static int check_source(lg_stage *st, struct loader *l)
{
    l->latents = lg_source_has_latents(l->source);
    bool wants = st->plan.instances[LG_ROLE_vae] == 0;
    if (l->latents != wants)
        return lg_stage_park(st, "%s holds %s, but vae.model is %s: %s", lg_config_data(st->config),
                             l->latents ? "latents" : "pictures", wants ? "empty" : "set",
                             wants ? "set vae.model, or encode the data set first"
                                   : "write vae.model = \"\"");
    lg_log(LG_INFO, "data set %s: %" PRIu64 " items, fingerprint %016" PRIx64,
           lg_config_data(st->config), lg_source_count(l->source), lg_source_hash(l->source));
    for (int i = 0; i < st->config->data_source.n; i++) {
        const struct lg_source_part part = lg_source_part(l->source, i);
        lg_log(LG_INFO, "data.source[%d] %s: %" PRIu64 " items, %.4g %% of the samples", i,
               st->config->data_source.v[i].path, part.count, 100 * part.share);
    }
    return 0;
}

static int refuse_data(lg_stage *st, struct loader *l, const struct lg_data_part *was)
{
    char path[LG_PATH_BYTES], where[128], count[32] = "?";
    LG_TRY(lg_path(path, "%s/data.json", st->run_dir));
    lg_source_parts_compare(l->source, path, was->hash, where, sizeof where);
    const char *also = l->order ? " (with data.buckets also the sizes of pictures, trainer.ranks "
                                  "and trainer.micro_batch_size decide the order of samples)"
                                : "";
    if (was->items) snprintf(count, sizeof count, "%" PRIu64, was->items);
    atomic_store_explicit(&st->board->s->data.changed, 1, memory_order_release);
    return lg_stage_park(st,
                         "the data set has changed: %s items, now %" PRIu64
                         "%s%s%s. Restore it, or go "
                         "on with it from the newest checkpoint: --set data.allow_changed=true",
                         count, lg_source_count(l->source), *where ? "; " : "", where, also);
}

static void log_buckets(const struct loader *l, const lg_plan *p)
{
    for (int k = 0; k < p->buckets.n; k++) {
        const struct lg_bucket *b = &p->buckets.of[k];
        const struct lg_order_bucket o = lg_order_bucket(l->order, k);
        char shape[LG_BUCKET_TEXT_BYTES];
        if (!o.items) continue;
        lg_log(LG_INFO,
               "bucket %s: %" PRIu64 " items (it is the nearest to %" PRIu64 "), %" PRIu64
               " times %d samples of a rank in an epoch",
               lg_bucket_text(b, shape), o.items, o.nearest, o.groups, b->rows);
    }
}

/* With buckets: the sizes of all pictures, and what follows from them. */
static int open_order(lg_stage *st, struct loader *l)
{
    const lg_plan *p = &st->plan;
    char path[LG_PATH_BYTES];
    struct lg_item_size *size = NULL;
    l->data_hash = lg_source_hash(l->source);
    if (!p->buckets.n) return 0;
    LG_TRY(lg_path(path, "%s/sizes", st->run_dir));
    LG_TRY(lg_source_sizes(l->source, path, &size));
    int rc = lg_loader_order(st->config, p, l->source, size, &l->order);
    free(size);
    LG_TRY(rc);
    l->data_hash = lg_order_hash(l->order, l->data_hash);
    l->rule.order = l->order;
    l->rule.buckets = &p->buckets;
    log_buckets(l, p);
    return 0;
}

/* The same as everybody else's in this run; what that means for the order of samples. */
static int agree_on_data(lg_stage *st, struct loader *l)
{
    struct lg_data_part part[LG_DATA_PARTS_MAX];
    char path[LG_PATH_BYTES];
    if (lg_data_agree(st->board, lg_source_count(l->source), l->data_hash, part) < 0)
        return refuse_data(st, l, part);
    int n = lg_data_parts(st->board, part);
    l->rule.first = part[n - 1].first;
    l->rule.epoch = part[n - 1].epoch;
    if (l->rule.first)
        lg_log(LG_INFO, "this data set from sample %" PRIu64 " on, where epoch %" PRIu64 " begins",
               l->rule.first, l->rule.epoch);
    LG_TRY(lg_path(path, "%s/data.json", st->run_dir));
    if (lg_source_parts_save(l->source, l->data_hash, path) < 0) /* it serves a message alone */
        lg_log_error("the list of the data set's parts could not be written");
    lg_err_clear();
    return 0;
}

static int open_tokenizer(lg_stage *st, struct loader *l, int k)
{
    const struct lg_text_config text = lg_text_keys(st->config, st->plan.text[k].role);
    char path[LG_PATH_BYTES];
    struct lg_tokenizer_files files;
    uint64_t hash = 0;
    if (lg_tokenizer_files_find(text.model, LG_TOKENIZER_KINDS, &files) == 0 &&
        lg_tokenizer_files_path(&files, path) == 0 && lg_tokenizer_files_hash(&files, &hash) == 0 &&
        !lg_data_same_tokenizer(st->board, k, hash ? hash : 1))
        return lg_stage_park(st, "%.160s has changed since the run began: put the old file back",
                             path);
    lg_err_clear(); /* a file that cannot be read is told below */
    int rc = lg_tokenizer_open(text.model, &l->tokenizer[k]);
    if (rc == LG_ERR_CORRUPT || rc == LG_ERR_MISMATCH || rc == LG_ERR_NOTFOUND)
        return lg_stage_park(st, "%s", lg_err_message()); /* no restart would mend the file */
    LG_TRY(rc);
    l->dropout[k] = text.dropout;
    return 0;
}

static int loader_open(lg_stage *st)
{
    struct loader *l = calloc(1, sizeof *l);
    LG_ASSERT(l);
    st->state = l;
    const lg_config *c = st->config;
    LG_TRY(lg_stage_window(st, NULL, &l->window));
    int rc =
        lg_source_open_data(c,
                            &(struct lg_source_options){.need_caption = st->plan.n_texts > 0,
                                                        .need_label = st->plan.num_classes > 0},
                            &l->source);
    if (rc == LG_ERR_CONFIG || rc == LG_ERR_CORRUPT || rc == LG_ERR_NOTFOUND)
        return lg_stage_park(st, "%s", lg_err_message());
    LG_TRY(rc);
    LG_TRY(check_source(st, l));
    for (int k = 0; k < st->plan.n_texts; k++) LG_TRY(open_tokenizer(st, l, k));
    l->rule = (struct lg_sample_rule){
        .seed = (uint64_t)c->job_seed,
        .shape = {st->plan.frames, (int)c->data_size.height, (int)c->data_size.width},
        .rate = lg_loader_rate(c),
        .latents_have_frames = st->plan.latent_frames > 1,
        .random_crop = !strcmp(c->data_crop, "random"),
        .random_flip = c->data_flip,
        .caption = {.choice = lg_caption_choice_of(c->data_caption),
                    .shuffle_tags = c->data_shuffle_tags,
                    .keep_tags = c->data_keep_tags},
        .dropout = c->trainer_cond_dropout,
        .num_classes = st->plan.num_classes,
        .no_shuffle = !c->data_shuffle};
    LG_TRY(open_order(st, l));
    LG_TRY(agree_on_data(st, l));
    return 0;
}

static void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){ms / 1000, (ms % 1000) * 1000000L}, NULL);
}

/* 0, LG_ERR_VOID (not an error here) or a failure that outlived its retries. */
static int read_sample(lg_stage *st, struct loader *l, uint64_t n, uint8_t *pixels)
{
    for (int tries = 1;; tries++) {
        int rc = lg_source_sample(l->source, &l->rule, lg_stage_sample(st, n), pixels, &l->sample);
        if (rc == 0 || rc == LG_ERR_VOID) return rc;
        if (rc != LG_ERR_IO || tries == IO_TRIES)
            return lg_err_frame(rc, __FILE__, __LINE__, __func__);
        lg_log(LG_WARN, "sample %" PRIu64 ": %s; trying again", lg_stage_sample(st, n),
               lg_err_message());
        lg_board_beat(st->row, LG_PHASE_WAITING);
        sleep_ms(IO_WAIT_MS << tries);
    }
}

static void report_void(lg_stage *st, struct loader *l, uint64_t n)
{
    const uint64_t before = l->void_events++;
    if (before < VOID_LINES_MAX || before % VOID_LINES_MAX == 0)
        lg_log(LG_WARN, "sample %" PRIu64 " is void: %s%s", n, lg_err_message(),
               before < VOID_LINES_MAX - 1 ? "" : " (from here on one in a thousand is named)");
    if (before < VOID_EVENTS_MAX) {
        char text[400];
        snprintf(text, sizeof text, "void sample %" PRIu64 ": %s", n, lg_err_message());
        lg_bus_event(st->bus, LG_WARN, text);
    }
    lg_err_clear();
}

static int check_latent(lg_stage *st, struct loader *l)
{
    const int *dim = l->sample.latent_dim;
    const lg_plan *p = &st->plan;
    char keys[160] = "";
    size_t n = 0;
    if (dim[0] == p->latent_channels && dim[1] == p->latent_frames && dim[2] == p->latent_height &&
        dim[3] == p->latent_width)
        return 0;
    if (dim[0] != p->latent_channels)
        n += (size_t)snprintf(keys + n, sizeof keys - n, ", data.latent_channels = %d", dim[0]);
    if (dim[1] != p->latent_frames)
        n += (size_t)snprintf(keys + n, sizeof keys - n, ", data.latent_frames = %d", dim[1]);
    if (dim[2] != p->latent_height || dim[3] != p->latent_width)
        snprintf(keys + n, sizeof keys - n, ", data.latent_size = [%d, %d]", dim[2], dim[3]);
    return lg_stage_park(st,
                         "%s: the latent is (%d, %d, %d, %d), channels, frames, height and width; "
                         "the plan says (%d, %d, %d, %d): set %s",
                         l->sample.key, dim[0], dim[1], dim[2], dim[3], p->latent_channels,
                         p->latent_frames, p->latent_height, p->latent_width, keys + 2);
}

/* Does text k alone do without its caption? Each is drawn by itself, and beside trainer.cond_dropout, which empties the
 * caption for all. */
static bool is_dropped(const struct loader *l, int k, uint64_t n)
{
    const lg_philox_out draw = lg_philox(l->rule.seed, LG_PURPOSE_TEXT_DROPOUT, n, (uint64_t)k);
    return lg_uniform_f64(draw.v[0]) < l->dropout[k];
}

static int fill_slot(lg_stage *st, struct loader *l, uint64_t n)
{
    lg_window *w = l->window;
    struct lg_slot *slot = lg_window_slot(w, n);
    slot->bucket = (uint32_t)lg_source_place(l->source, &l->rule, lg_stage_sample(st, n)).bucket;
    const struct lg_window_shape shape = lg_window_shape(w, n);
    const size_t half = shape.half_bytes;
    uint8_t *pixels = shape.pixels_bytes ? lg_window_pixels(w, n) : NULL; /* latents need none */
    int rc = read_sample(st, l, n, pixels);
    if (rc < 0 && rc != LG_ERR_VOID) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    const bool is_void = rc == LG_ERR_VOID, is_empty = is_void || l->sample.is_absent;
    if (is_void) report_void(st, l, lg_stage_sample(st, n));
    if (is_empty && shape.pixels_bytes && lg_window_has_place(w, n))
        memset(pixels, 0, shape.pixels_bytes);
    slot->is_void = is_void;
    slot->is_absent = l->sample.is_absent;
    const bool known = !is_empty && l->sample.stored_height > 0;
    slot->original_height = (uint32_t)(known ? l->sample.stored_height : l->rule.shape.height);
    slot->original_width = (uint32_t)(known ? l->sample.stored_width : l->rule.shape.width);
    slot->crop_top = (uint32_t)(known ? l->sample.crop_top : 0);
    slot->crop_left = (uint32_t)(known ? l->sample.crop_left : 0);
    slot->item = l->sample.item;
    slot->key_hash = l->sample.key_hash;
    slot->label = is_empty ? st->plan.num_classes : (int32_t)l->sample.label;
    for (int k = 0; k < st->plan.n_texts; k++) {
        int length;
        const bool none = is_empty || is_dropped(l, k, lg_stage_sample(st, n));
        LG_TRY(lg_tokenizer_encode(l->tokenizer[k], none ? "" : l->sample.caption,
                                   st->plan.text[k].length, (int32_t *)lg_window_tokens(w, k, n),
                                   &length));
        slot->text_length[k] = length;
    }
    if (l->latents) {
        if (is_void) {
            memset(lg_window_mean(w, n), 0, half);
            memset(lg_window_logvar(w, n), 0, half);
        } else {
            LG_TRY(check_latent(st, l));
            memcpy(lg_window_mean(w, n), l->sample.latent_mean, half);
            memcpy(lg_window_logvar(w, n), l->sample.latent_logvar, half);
        }
    }
    return 0;
}

static int loader_step(lg_stage *st)
{
    struct loader *l = st->state;
    struct lg_claim claim;
    uint64_t end = lg_stage_end(st);
    int rc = lg_window_claim(l->window, st->board, st->me, LG_FIELD_SOURCE, 0, end, &claim);
    if (rc == LG_ERR_BUSY || rc == LG_ERR_STOP) return LG_STEP_IDLE;
    LG_TRY(rc);
    lg_log_set_step((int64_t)(claim.n / st->board->s->batch));
    for (uint64_t n = claim.n; n < claim.n + claim.count; n++) {
        if (!lg_window_wanted(l->window, &claim, LG_FIELD_SOURCE, n)) continue;
        LG_TRY(fill_slot(st, l, n));
        if (l->latents) lg_window_publish(l->window, LG_FIELD_LATENT, n);
        lg_window_publish(l->window, LG_FIELD_SOURCE, n);
        atomic_fetch_add_explicit(&st->row->samples, 1, memory_order_relaxed);
        lg_board_beat(st->row, LG_PHASE_WORKING);
    }
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static void loader_close(lg_stage *st)
{
    struct loader *l = st->state;
    lg_source_close(&l->source);
    lg_sample_free(&l->sample);
    for (int k = 0; k < LG_TEXTS_MAX; k++) lg_tokenizer_close(&l->tokenizer[k]);
    lg_window_close(&l->window);
    lg_order_free(&l->order);
    free(l);
    st->state = NULL;
}

const struct lg_stage_def lg_loader_def = {
    .role = LG_ROLE_loader,
    .bytes = loader_bytes,
    .open = loader_open,
    .step = loader_step,
    .close = loader_close,
};
