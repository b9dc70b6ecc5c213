/* Rules between keys, and the files a config names. Each rule is a few lines that know their keys,
 * their values and the way out; all are looked at, so that one `lgsup check` shows everything.
 *
 * The schema has already made every single value sane, so products here do not overflow. */
#include "base/bytes.h"
#include "config/buckets.h"
#include "config/config.h"
#include "config/denoisers.h"
#include "config/models.h"
#include "config/param_groups.h"
#include "config/plan.h"
#include "config/pretrained.h"
#include "config/problems.h"
#include "config/recompute.h"
#include "config/schema.h"
#include "config/texts.h"
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct rules {
    const lg_config *c;
    struct lg_problems problems;
};

/* key: where in the file the reader should look. */
static void broken(struct rules *r, const char *key, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void broken(struct rules *r, const char *key, const char *fmt, ...)
{
    char where[LG_PROBLEM_BYTES / 2], text[LG_PROBLEM_BYTES];
    lg_key_where(r->c, key, where, sizeof where);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    lg_problem(&r->problems, "%s%s", where, text);
}

static bool is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static bool has_text(const lg_config *c)
{
    return lg_denoiser_info(lg_denoiser_kind_of(c->model_kind))->text;
}

/* "text.t5.gpus": a key of a text encoder's section. */
static const char *key_of(const struct lg_text_config *t, const char *key, char ret[48])
{
    snprintf(ret, 48, "%s.%s", t->section, key);
    return ret;
}

/* ---- device ---- */

static void check_gpus(struct rules *r, const char *key, const char *list)
{
    if (lg_gpus_at(list, 0) < 0)
        broken(
            r, key,
            "%s = \"%.60s\": expected GPU numbers from 0 to %d with commas between them, at most "
            "%d, as \"0\" or \"0,1\"",
            key, list, LG_GPUS_MAX - 1, LG_GPUS_MAX);
    else if (strcmp(r->c->_device, "host") == 0 && strcmp(list, "0") != 0)
        broken(r, key,
               "%s = \"%.60s\" has no meaning with device = \"host\": remove it, or set device = "
               "\"cuda\"",
               key, list);
}

static void check_device(struct rules *r)
{
    const lg_config *c = r->c;
    if (strcmp(c->_device, "host") == 0 && strcmp(c->_precision, "fp32") != 0)
        broken(r, "precision",
               "precision = \"%s\" needs device = \"cuda\": the host computes in fp32 alone; set "
               "precision = \"fp32\"",
               c->_precision);
    struct lg_text_config text[LG_TEXTS_MAX];
    const int n = lg_config_texts(c, text);
    char key[48];
    if (!n) check_gpus(r, "text.gpus", c->text_gpus);
    for (int k = 0; k < n; k++) check_gpus(r, key_of(&text[k], "gpus", key), text[k].gpus);
    check_gpus(r, "vae.gpus", c->vae_gpus);
    check_gpus(r, "trainer.gpus", c->trainer_gpus);
}

/* ---- restarts ---- */

static void check_restarts(struct rules *r)
{
    const lg_config *c = r->c;
    const struct {
        const char *key, *why;
        int64_t value;
        bool absent;
    } of[] = {
        {"text.restarts_max", "model.kind is \"dit\"", c->text_restarts_max, !has_text(c)},
        {"text.restart_window_s", "model.kind is \"dit\"", c->text_restart_window_s, !has_text(c)},
        {"vae.restarts_max", "vae.model is empty", c->vae_restarts_max, !c->vae_model[0]},
        {"vae.restart_window_s", "vae.model is empty", c->vae_restart_window_s, !c->vae_model[0]},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(of); i++)
        if (of[i].absent && of[i].value)
            broken(r, of[i].key,
                   "%s = %lld has no meaning: %s, so this run has no such role; remove it",
                   of[i].key, (long long)of[i].value, of[i].why);
}

/* ---- memos ---- */

static void check_memo(struct rules *r, const char *key, const char *text)
{
    size_t bytes;
    if (strcmp(text, "auto") && strcmp(text, "0") && !lg_bytes_parse(text, &bytes))
        broken(r, key, "%s = \"%.60s\": expected \"auto\", \"0\" or a size, as \"512MiB\"", key,
               text);
}

static void check_text_memos(struct rules *r)
{
    struct lg_text_config text[LG_TEXTS_MAX];
    const int n = lg_config_texts(r->c, text);
    char key[48];
    if (!n) check_memo(r, "text.memo", r->c->text_memo);
    for (int k = 0; k < n; k++) check_memo(r, key_of(&text[k], "memo", key), text[k].memo);
}

/* ---- batch and window ---- */

static void check_batch(struct rules *r)
{
    const lg_config *c = r->c;
    int64_t batch = c->trainer_global_batch_size, ranks = c->trainer_ranks;
    int64_t micro = c->trainer_micro_batch_size;
    if (c->trainer_ranks % c->parallel_sp) {
        broken(r, "parallel.sp",
               "parallel.sp = %lld does not divide trainer.ranks = %lld: set it to a divisor",
               (long long)c->parallel_sp, (long long)ranks);
        return;
    }
    if (c->hosts_count > 1 && batch % c->hosts_count) {
        broken(
            r, "trainer.global_batch_size",
            "trainer.global_batch_size = %lld does not divide by hosts.count = %lld: set it to a "
            "multiple of %lld",
            (long long)batch, (long long)c->hosts_count, (long long)c->hosts_count);
        return;
    }
    batch /= c->hosts_count;
    ranks /= c->parallel_sp; /* those of a sequence group have one share */
    if (batch % ranks != 0) {
        broken(
            r, "trainer.global_batch_size",
            "trainer.global_batch_size = %lld does not divide by trainer.ranks = %lld: set it to "
            "a multiple of %lld",
            (long long)batch, (long long)ranks, (long long)ranks);
        return;
    }
    if (batch / ranks % micro != 0)
        broken(
            r, "trainer.micro_batch_size",
            "a rank's share of %lld samples (trainer.global_batch_size = %lld over trainer.ranks "
            "= %lld) does not divide by trainer.micro_batch_size = %lld: set that to a divisor of "
            "%lld",
            (long long)(batch / ranks), (long long)batch, (long long)ranks, (long long)micro,
            (long long)(batch / ranks));
}

/* Every rank of a sequence group has something of it. */
static void check_sequence(struct rules *r, int64_t rows)
{
    const lg_config *c = r->c;
    if (c->parallel_sp > 1 && !lg_denoiser_info(lg_denoiser_kind_of(c->model_kind))->is_split) {
        broken(r, "parallel.sp",
               "parallel.sp = %lld: model.kind = \"%s\" has no sequence that several ranks could "
               "share: set it to 1",
               (long long)c->parallel_sp, c->model_kind);
        return;
    }
    if (c->parallel_sp > c->model_heads)
        broken(r, "parallel.sp", "parallel.sp = %lld is more than model.heads = %lld",
               (long long)c->parallel_sp, (long long)c->model_heads);
    if (c->parallel_sp > rows)
        broken(r, "parallel.sp",
               "parallel.sp = %lld is more than the %lld rows of patches of a latent",
               (long long)c->parallel_sp, (long long)rows);
}

/* What models say of clips whose latents have so many frames. */
static void check_clips(struct rules *r, int64_t frames)
{
    const lg_config *c = r->c;
    const lg_denoiser_kind kind = lg_denoiser_kind_of(c->model_kind);
    if ((c->data_frames > 1 || frames > 1) && !lg_denoiser_info(kind)->clips)
        broken(r, "data.frames",
               "data.frames = %lld with model.kind = \"%s\", which takes pictures: set it to 1, or "
               "use a model of clips, \"latte\" or \"ltx\"",
               (long long)c->data_frames, c->model_kind);
    if (c->trainer_clean_first_frame > 0 && frames < 2)
        broken(
            r, "trainer.clean_first_frame",
            "trainer.clean_first_frame = %g with latents of one frame: it is for clips, of which "
            "the frames behind the first are trained on; remove it, or set data.frames",
            c->trainer_clean_first_frame);
    if (c->sample_first_frame[0] && frames < 2)
        broken(r, "sample.first_frame",
               "sample.first_frame with latents of one frame: it is for clips, of which the frames "
               "behind the first are drawn; remove it, or set data.frames");
    if (c->sample_first_frame[0] && !lg_path_exists(c->sample_first_frame))
        broken(r, "sample.first_frame", "sample.first_frame: %s does not exist",
               c->sample_first_frame);
    if (kind == LG_LATTE && c->parallel_sp > frames)
        broken(r, "parallel.sp",
               "parallel.sp = %lld with model.kind = \"latte\", whose frames stay whole: latents "
               "have %lld frames, which is the most",
               (long long)c->parallel_sp, (long long)frames);
    if (kind != LG_LTX) return;
    if (c->parallel_sp > 1 && !strcmp(c->parallel_sp_kind, "fastseq"))
        broken(r, "parallel.sp_kind",
               "parallel.sp_kind = \"fastseq\" with model.kind = \"ltx\", whose queries and keys "
               "are normed over all heads at once: set it to \"ulysses\"");
    if (c->model_patch != 1)
        broken(r, "model.patch",
               "model.patch = %lld with model.kind = \"ltx\", whose tokens are the latent's cells: "
               "set it to 1",
               (long long)c->model_patch);
}

enum {
    LG_TRAINER_RANKS_SCATTER_MAX = 64 /* a sum has 64 parts at most, one of them the sum so far */
};

static void check_parallel(struct rules *r)
{
    const lg_config *c = r->c;
    if (!c->parallel_reshard && c->parallel_zero < 3)
        broken(r, "parallel.reshard",
               "parallel.reshard = false with parallel.zero = %lld, where no weights are gathered: "
               "remove it, or set parallel.zero = 3",
               (long long)c->parallel_zero);
    if (c->parallel_zero >= 2 && c->trainer_ranks >= LG_TRAINER_RANKS_SCATTER_MAX)
        broken(r, "parallel.zero", "parallel.zero = %lld is made for fewer than %d ranks",
               (long long)c->parallel_zero, LG_TRAINER_RANKS_SCATTER_MAX);
    if (c->parallel_group && c->trainer_ranks % c->parallel_group)
        broken(
            r, "parallel.group",
            "parallel.group = %lld does not divide trainer.ranks = %lld: set it to a divisor, or "
            "to 0 for all ranks",
            (long long)c->parallel_group, (long long)c->trainer_ranks);
    else if (c->parallel_group > 1 && !c->parallel_zero)
        broken(r, "parallel.group",
               "parallel.group = %lld with parallel.zero = 0, where every rank holds the whole "
               "state: remove one of them",
               (long long)c->parallel_group);
}

static void check_hosts(struct rules *r)
{
    const lg_config *c = r->c;
    const int64_t places = c->hosts_count + c->hosts_spare;
    if (c->hosts_count == 1) {
        if (c->hosts_spare || c->hosts_list.n)
            broken(r, "hosts.count",
                   "hosts.count = 1: a run of one host has no list and no spares");
        return;
    }
    if (places > 64)
        broken(r, "hosts.spare", "hosts.count + hosts.spare = %lld: at most 64 machines",
               (long long)places);
    if (c->hosts_list.n && c->hosts_list.n != places)
        broken(r, "hosts.list",
               "hosts.list names %d machines, hosts.count + hosts.spare is %lld: one for each",
               c->hosts_list.n, (long long)places);
    if (c->hosts_number >= places)
        broken(r, "hosts.number", "hosts.number = %lld, but the list has places 0 to %lld",
               (long long)c->hosts_number, (long long)places - 1);
    if (!c->hosts_key[0])
        broken(r, "hosts.key",
               "hosts.count = %lld without hosts.key: hosts talk to each other by a key alone; "
               "`lgsup keys cluster.key` makes one, which all of them get a copy of",
               (long long)c->hosts_count);
    if (!strcmp(c->hosts_transport, "nccl") && strcmp(c->_device, "cuda") != 0)
        broken(r, "hosts.transport",
               "hosts.transport = \"nccl\" with device = \"%s\": NCCL carries what lies on GPUs "
               "alone; \"ucx\" carries the hosts' memory",
               c->_device);
}

/* What changes the order of sums, and no state. */
static void check_resume_changes(struct rules *r)
{
    const struct lg_strlist *l = &r->c->trainer_resume_changes;
    for (int i = 0; i < l->n; i++) {
        if (!lg_config_may_change(l->v[i]))
            broken(r, "trainer.resume_changes",
                   "trainer.resume_changes: %.80s is not one of trainer.ranks, trainer.threads, "
                   "trainer.micro_batch_size, parallel.zero, parallel.sp, parallel.sp_kind, "
                   "memory.offload_optimizer, trainer.optimizer, trainer.groups: other keys cannot "
                   "change "
                   "at a resume",
                   l->v[i]);
    }
}

static void check_window_role(struct rules *r, const char *role, int64_t instances, int64_t chunk)
{
    char key[48];
    snprintf(key, sizeof key, "%s.chunk", role);
    int64_t batch = r->c->trainer_global_batch_size / r->c->hosts_count;
    int64_t batches = r->c->window_batches;
    int64_t window = batches * batch, need = 2 * batch + instances * chunk;
    if (window % chunk != 0)
        broken(r, key,
               "the window of %lld samples (window.batches = %lld x trainer.global_batch_size = "
               "%lld) is not a multiple of %s = %lld: choose a chunk that divides %lld",
               (long long)window, (long long)batches, (long long)batch, key, (long long)chunk,
               (long long)window);
    if (window < need)
        broken(r, "window.batches",
               "the window of %lld samples is too small: two batches of %lld and a chunk for every "
               "%s instance (%s.instances = %lld x %s = %lld) need %lld: set window.batches to at "
               "least %lld",
               (long long)window, (long long)batch, role, role, (long long)instances, key,
               (long long)chunk, (long long)need, (long long)((need + batch - 1) / batch));
}

static void check_window(struct rules *r)
{
    const lg_config *c = r->c;
    check_window_role(r, "loader", c->loader_instances, c->loader_chunk);
    struct lg_text_config text[LG_TEXTS_MAX];
    const int n = lg_config_texts(c, text);
    for (int k = 0; k < n; k++)
        check_window_role(r, text[k].section, text[k].instances, text[k].chunk);
    if (c->vae_model[0]) check_window_role(r, "vae", c->vae_instances, c->vae_chunk);
    const bool clips = c->data_frames > 1; /* of which slices are frames */
    const long long most = clips ? c->data_frames : c->vae_chunk;
    if (c->vae_slice > most)
        broken(r, "vae.slice", "vae.slice = %lld is larger than %s = %lld: set it to at most %lld",
               (long long)c->vae_slice, clips ? "data.frames" : "vae.chunk", most, most);
}

/* ---- model and training ---- */

static void sides_text(const struct lg_sides *s, char ret[64])
{
    if (s->height == s->width)
        snprintf(ret, 64, "%lld", (long long)s->height);
    else
        snprintf(ret, 64, "[%lld, %lld]", (long long)s->height, (long long)s->width);
}

/* Has every rank of a sequence group something of this bucket, too? unit: pixels of a patch. */
static void check_bucket_sequence(struct rules *r, const struct lg_bucket *b, int64_t unit,
                                  int factor_time)
{
    const lg_config *c = r->c;
    const int64_t frames = (b->frames + factor_time - 1) / factor_time;
    const bool whole = lg_denoiser_kind_of(c->model_kind) == LG_LATTE;
    const int64_t most = whole ? frames : frames * (b->height / unit);
    char text[LG_BUCKET_TEXT_BYTES];
    if (c->parallel_sp > most)
        broken(r, "data.buckets",
               "data.buckets: %s with parallel.sp = %lld, which is more than the %lld %s of its "
               "latents: set parallel.sp to at most that, or remove this shape",
               lg_bucket_text(b, text), (long long)c->parallel_sp, (long long)most,
               whole ? "frames" : "rows of patches");
}

/* unit: pixels of a patch. */
static void check_buckets(struct rules *r, int64_t unit, int factor_time)
{
    const lg_config *c = r->c;
    struct lg_buckets b;
    if (lg_buckets_make(&c->data_buckets,
                        &(struct lg_buckets_spec){.height = (int)c->data_size.height,
                                                  .width = (int)c->data_size.width,
                                                  .frames = (int)c->data_frames,
                                                  .unit = (int)unit,
                                                  .factor_time = factor_time,
                                                  .micro_batch = (int)c->trainer_micro_batch_size},
                        &b) < 0) {
        broken(r, "data.buckets", "data.buckets: %s", lg_err_message());
        lg_err_clear();
    }
    const bool is_square = lg_denoiser_info(lg_denoiser_kind_of(c->model_kind))->is_square;
    char sides[64];
    sides_text(&c->data_size, sides);
    if (is_square && c->data_size.height != c->data_size.width)
        broken(
            r, "data.size",
            "data.size = %s with model.kind = \"%s\", which is defined for squares only: set it to "
            "one number, or use a model that reads other shapes, as \"pixart\"",
            sides, c->model_kind);
    if (!b.n) return;
    if (b.of[b.n - 1].frames > c->data_frames) /* sorted by them */
        broken(r, "data.buckets",
               "data.buckets has a shape of %d frames, data.frames = %lld: set that to the most "
               "frames that a sample has",
               b.of[b.n - 1].frames, (long long)c->data_frames);
    if (is_square)
        broken(r, "data.buckets",
               "data.buckets with model.kind = \"%s\", which is defined for squares only: remove "
               "it, or use a model that reads other shapes, as \"pixart\"",
               c->model_kind);
    for (int k = 0; k < b.n; k++) check_bucket_sequence(r, &b.of[k], unit, factor_time);
    if (c->trainer_micro_batch_size % c->vae_chunk)
        broken(r, "vae.chunk",
               "vae.chunk = %lld does not divide trainer.micro_batch_size = %lld: with "
               "data.buckets each micro-batch has a shape of its own, which a chunk must not "
               "cross; set it to a divisor",
               (long long)c->vae_chunk, (long long)c->trainer_micro_batch_size);
}

static bool wants_buckets(const lg_config *c)
{
    const struct lg_strlist *l = &c->data_buckets;
    return l->n > 1 || (l->n == 1 && strcmp(l->v[0], "square") != 0);
}

static void check_geometry(struct rules *r, const struct lg_vae_info *vae)
{
    const lg_config *c = r->c;
    const int64_t unit = vae->factor * c->model_patch;
    const struct lg_sides size = c->data_size;
    const int frames = lg_vae_latent_frames(vae, (int)c->data_frames);
    char sides[64];
    sides_text(&size, sides);
    if (size.height % unit || size.width % unit)
        broken(r, "data.size",
               "data.size = %s does not divide by %lld (the VAE's factor %lld x model.patch = "
               "%lld): set it to a multiple of %lld",
               sides, (long long)unit, (long long)vae->factor, (long long)c->model_patch,
               (long long)unit);
    else
        check_sequence(r, size.height / unit * LG_MAX(frames, 1));
    if (!frames)
        broken(r, "data.frames",
               "data.frames = %lld: frames must be a multiple of %d (the VAE's factor in time) and "
               "one more, as %lld",
               (long long)c->data_frames, vae->factor_time,
               (long long)(c->data_frames + vae->factor_time - 2) / vae->factor_time *
                       vae->factor_time +
                   1);
    check_clips(r, LG_MAX(frames, 1));
    check_buckets(r, unit, vae->factor_time);
}

/* The latents of a data set, without a VAE. */
static void check_latents(struct rules *r)
{
    const lg_config *c = r->c;
    const struct lg_sides cells = lg_config_latent_size(c);
    const bool given = c->data_latent_size.height;
    const int64_t frames = c->data_latent_frames ? c->data_latent_frames : c->data_frames;
    if (wants_buckets(c))
        broken(r, "data.buckets",
               "data.buckets without vae.model: latents of a data set have one shape; set "
               "vae.model and name pictures in data.path, or set data.buckets to \"square\"");
    if (c->data_flip)
        broken(r, "data.flip",
               "data.flip without vae.model: a latent is not mirrored, since the mirrored picture "
               "has another; set "
               "vae.model and name pictures in data.path, or set data.flip to false");
    if (!strcmp(c->data_crop, "random"))
        broken(r, "data.crop",
               "data.crop = \"random\" without vae.model: latents are taken whole; set vae.model "
               "and name pictures in "
               "data.path, or set data.crop to \"center\"");
    if (cells.height < 1 || cells.width < 1 || cells.height % c->model_patch ||
        cells.width % c->model_patch)
        broken(r, given ? "data.latent_size" : "data.size",
               "latents of %lld x %lld cells (%s) do not divide by model.patch = %lld: set "
               "data.latent_size to the side of the data set's latents",
               (long long)cells.height, (long long)cells.width,
               given ? "data.latent_size" : "data.size / 8, since vae.model is empty",
               (long long)c->model_patch);
    else
        check_sequence(r, cells.height / c->model_patch * frames);
    check_clips(r, frames);
}

static void check_model(struct rules *r)
{
    const lg_config *c = r->c;
    struct lg_vae_info vae;
    if (c->model_from[0]) lg_pretrained_compare(c, &r->problems);
    if (c->model_fresh && !c->model_from[0])
        broken(r, "model.fresh",
               "model.fresh is for the shape of model.from, which is empty: name a folder with a "
               "config.json, or remove it");
    if (!c->model_from[0] && (!strcmp(c->model_kind, "sd2") || !strcmp(c->model_kind, "sdxl")))
        broken(r, "model.from",
               "model.kind = \"%s\" takes its shape from model.from, which is empty: name a "
               "published folder, or one that lg-random-model has made",
               c->model_kind);
    if (c->model_hidden % c->model_heads != 0)
        broken(r, "model.hidden",
               "model.hidden = %lld does not divide by model.heads = %lld: change one of them",
               (long long)c->model_hidden, (long long)c->model_heads);
    if (c->model_hidden % 4 != 0)
        broken(
            r, "model.hidden",
            "model.hidden = %lld does not divide by 4, as the position embedding needs: set it to "
            "%lld",
            (long long)c->model_hidden, (long long)(c->model_hidden + 3) / 4 * 4);
    if (c->vae_model[0]) {
        if (lg_vae_info_load(c->vae_model, &vae) < 0) {
            broken(r, "vae.model", "vae.model: %s", lg_err_message());
            lg_err_clear();
            return;
        }
        check_geometry(r, &vae);
        return;
    }
    check_latents(r);
}

/* What is done with captions, and whether there are any. */
static void check_captions(struct rules *r)
{
    const lg_config *c = r->c;
    const struct {
        const char *key;
        bool is_set;
    } keys[] = {{"data.caption", strcmp(c->data_caption, "listed") != 0},
                {"data.shuffle_tags", c->data_shuffle_tags},
                {"data.keep_tags", c->data_keep_tags > 0}};
    for (size_t i = 0; i < LG_ARRAY_LEN(keys); i++)
        if (keys[i].is_set && !has_text(c))
            broken(r, keys[i].key,
                   "%s has no meaning with model.kind = \"%s\", which reads no captions: remove it",
                   keys[i].key, c->model_kind);
    if (c->data_keep_tags && !c->data_shuffle_tags)
        broken(r, "data.keep_tags",
               "data.keep_tags = %lld, but all tags keep their places: set data.shuffle_tags = "
               "true, or remove it",
               (long long)c->data_keep_tags);
}

/* Is it an encoder of the kind that the denoiser was made for, with the outputs that it takes? */
static void check_encoder(struct rules *r, const struct lg_text_config *t,
                          const struct lg_text_info *is)
{
    static const char *const name[LG_TEXT_KINDS] = {[LG_TEXT_T5] = "T5", [LG_TEXT_CLIP] = "CLIP"};
    const struct lg_denoiser_text_info *want = t->info;
    char key[48];
    key_of(t, "model", key);
    if (want->encoder != LG_TEXT_KINDS && want->encoder != is->kind)
        broken(r, key, "%s: %s is a %s, but model.kind = \"%s\" has a %s there", key, t->model,
               name[is->kind], r->c->model_kind, name[want->encoder]);
    else if ((want->states == LG_TEXT_EMBEDS || want->pooled == LG_TEXT_EMBEDS) && !is->projection)
        broken(r, key,
               "%s: %s has no projection (\"architectures\" of its config.json names no "
               "CLIPTextModelWithProjection), which model.kind = \"%s\" takes",
               key, t->model, r->c->model_kind);
}

static void check_text(struct rules *r, const struct lg_text_config *t)
{
    struct lg_text_info is = {0};
    char key[48];
    key_of(t, "model", key);
    if (!t->model[0]) {
        broken(r, "model.kind",
               "model.kind = \"%s\" needs %s: name the text encoder's folder, or set "
               "model.kind = \"dit\" for class labels",
               r->c->model_kind, key);
        return;
    }
    if (lg_text_info_load(t->model, &is) < 0) {
        broken(r, key, "%s: %s", key, lg_err_message());
        lg_err_clear();
        return;
    }
    check_encoder(r, t, &is);
    if (is.length_max && t->length > is.length_max) {
        char length[48];
        key_of(t, "length", length);
        broken(r, length,
               "%s = %lld: the text encoder in %s takes %d tokens at most "
               "(max_position_embeddings of its config.json)",
               length, (long long)t->length, key, is.length_max);
    }
}

static void check_conditioning(struct rules *r)
{
    const lg_config *c = r->c;
    struct lg_text_config text[LG_TEXTS_MAX];
    const int texts = lg_config_texts(c, text);
    for (int k = 0; k < texts; k++) check_text(r, &text[k]);
    check_captions(r);
    if (texts) return;
    for (int i = 0; i < c->sample_captions.n; i++) {
        const char *label = c->sample_captions.v[i];
        char *end = NULL;
        errno = 0;
        long long n = strtoll(label, &end, 10);
        if (errno || end == label || *end || n < 0 || n >= c->model_num_classes)
            broken(
                r, "sample.captions",
                "sample.captions[%d] = \"%.40s\": with model.kind = \"dit\" expected a label from "
                "0 to %lld (model.num_classes = %lld)",
                i, label, (long long)c->model_num_classes - 1, (long long)c->model_num_classes);
    }
}

/* Previews and histograms are made of checkpoints. */
static void check_multiple(struct rules *r, const char *key, int64_t every)
{
    int64_t checkpoint = r->c->checkpoint_every;
    if (every && (checkpoint == 0 || every % checkpoint != 0))
        broken(r, key,
               "%s = %lld is not a multiple of checkpoint.every = %lld, and it needs a checkpoint "
               "each time: set it to one%s",
               key, (long long)every, (long long)checkpoint,
               checkpoint ? "" : ", and checkpoint.every above 0");
}

static void check_previews(struct rules *r)
{
    const lg_config *c = r->c;
    int64_t every = c->sample_every;
    check_multiple(r, "sample.every", every);
    check_multiple(r, "tensorboard.histograms_every", c->tensorboard_histograms_every);
    if (c->tensorboard_histograms_every && !c->tensorboard_enabled)
        broken(r, "tensorboard.histograms_every",
               "tensorboard.histograms_every = %lld without event files: set tensorboard.enabled "
               "= true, or remove it",
               (long long)c->tensorboard_histograms_every);
    if (!every) return;
    if (c->sample_captions.n == 0)
        broken(r, "sample.every",
               "sample.every = %lld, but there is nothing to draw: name some sample.captions",
               (long long)every);
    if (!c->vae_model[0])
        broken(r, "sample.every",
               "sample.every = %lld needs vae.model, whose decoder draws the pictures: name it, or "
               "set sample.every to 0",
               (long long)every);
}

static void check_adapter(struct rules *r)
{
    const lg_config *c = r->c;
    if (c->adapter_from[0] && (is_dir(c->adapter_from) || !lg_path_exists(c->adapter_from)))
        broken(r, "adapter.from",
               "adapter.from: %s %s: expected the file of an adapter's weights, .safetensors",
               c->adapter_from, is_dir(c->adapter_from) ? "is a directory" : "does not exist");
    if (strcmp(c->adapter_kind, "none")) {
        if (!lg_config_begins_with(c)[0])
            broken(
                r, "adapter.kind",
                "adapter.kind = \"%s\" adapts a model that is there: name its folder as model.from "
                "or pipeline, or a checkpoint as trainer.init_from",
                c->adapter_kind);
        return;
    }
    const struct {
        const char *key;
        bool is_set;
    } keys[] = {{"adapter.targets", c->adapter_targets.n > 0},
                {"adapter.from", c->adapter_from[0] != 0}};
    for (size_t i = 0; i < LG_ARRAY_LEN(keys); i++)
        if (keys[i].is_set)
            broken(
                r, keys[i].key,
                "%s has no meaning without an adapter: set adapter.kind = \"lora\", or remove it",
                keys[i].key);
}

static void check_frozen(struct rules *r)
{
    const lg_config *c = r->c;
    const bool adapts = strcmp(c->adapter_kind, "none") != 0;
    bool freezes = adapts;
    for (int i = 0; i < c->trainer_groups.n; i++) {
        struct lg_param_group g;
        if (lg_param_group_parse(c->trainer_groups.v[i], &g) < 0) continue;
        freezes = freezes || g.is_frozen;
        if (g.has_storage && !g.is_frozen && !adapts)
            broken(
                r, "trainer.groups",
                "trainer.groups: \"%s\" has a storage, which is for weights that are not trained: "
                "freeze them, or remove it",
                c->trainer_groups.v[i]);
    }
    lg_err_clear();
    if (!strcmp(c->model_frozen, "auto") || freezes) return;
    broken(r, "model.frozen",
           "model.frozen = \"%s\" is for weights that are not trained, but all are: set "
           "adapter.kind = \"lora\", freeze some with trainer.groups, or remove it",
           c->model_frozen);
}

static void check_training(struct rules *r)
{
    const lg_config *c = r->c;
    int64_t steps = c->trainer_lr_steps ? c->trainer_lr_steps : c->trainer_max_steps;
    if (c->trainer_min_snr_gamma > 0 && strcmp(c->trainer_objective, "flow") == 0)
        broken(
            r, "trainer.min_snr_gamma",
            "trainer.min_snr_gamma = %g has no meaning with trainer.objective = \"flow\": set it "
            "to 0, or the objective to \"eps\" or \"v\"",
            c->trainer_min_snr_gamma);
    for (int i = 0; i < c->trainer_groups.n; i++) {
        struct lg_param_group g;
        if (lg_param_group_parse(c->trainer_groups.v[i], &g) < 0)
            broken(r, "trainer.groups", "%s", lg_err_message());
    }
    if (c->trainer_loss_scale & (c->trainer_loss_scale - 1))
        broken(r, "trainer.loss_scale",
               "trainer.loss_scale = %lld: expected a power of two, as 65536; another factor "
               "would round every gradient",
               (long long)c->trainer_loss_scale);
    if (c->trainer_beta1 >= 1)
        broken(r, "trainer.beta1", "trainer.beta1 = %g: expected less than 1, usually 0.9",
               c->trainer_beta1);
    if (c->trainer_beta2 >= 1)
        broken(r, "trainer.beta2", "trainer.beta2 = %g: expected less than 1, usually 0.999",
               c->trainer_beta2);
    if (strcmp(c->trainer_lr_schedule, "constant") != 0 && c->trainer_warmup_steps >= steps)
        broken(r, "trainer.warmup_steps",
               "trainer.warmup_steps = %lld leaves nothing of the %lld steps (%s) to "
               "trainer.lr_schedule = \"%s\": make the warm-up shorter",
               (long long)c->trainer_warmup_steps, (long long)steps,
               c->trainer_lr_steps ? "trainer.lr_steps" : "trainer.max_steps",
               c->trainer_lr_schedule);
}

static bool is_objective(const lg_config *c, const char *name)
{
    return strcmp(c->trainer_objective, name) == 0;
}

/* What belongs to some objectives alone. */
static void check_noise(struct rules *r)
{
    const lg_config *c = r->c;
    const bool flow = is_objective(c, "flow"), linear = !strcmp(c->trainer_beta_schedule, "linear");
    const struct {
        const char *key, *of;
        bool is_set, fits;
    } keys[] = {
        {"trainer.flow_shift", "flow", c->trainer_flow_shift != 1, flow},
        {"trainer.flow_shift_by", "flow", strcmp(c->trainer_flow_shift_by, "constant") != 0, flow},
        {"sample.flow_end", "flow", c->sample_flow_end > 0, flow},
        {"trainer.loss_weighting", "flow", strcmp(c->trainer_loss_weighting, "none") != 0, flow},
        {"trainer.clean_first_frame", "flow", c->trainer_clean_first_frame > 0, flow},
        {"trainer.beta_schedule", "eps or v", !linear, !flow},
        {"trainer.beta_start", "eps or v", c->trainer_beta_start != 1e-4, !flow},
        {"trainer.beta_end", "eps or v", c->trainer_beta_end != 0.02, !flow},
        {"trainer.zero_snr", "v", c->trainer_zero_snr, is_objective(c, "v")},
        {"sample.first_frame", "flow", c->sample_first_frame[0] != 0, flow},
        {"sample.sampler", "flow", !strcmp(c->sample_sampler, "euler"), flow},
        {"sample.sampler", "eps or v",
         !strcmp(c->sample_sampler, "ddim") || !strcmp(c->sample_sampler, "dpm++"), !flow},
    };
    if (strcmp(c->trainer_flow_shift_by, "constant") && c->trainer_flow_shift != 1)
        broken(r, "trainer.flow_shift",
               "trainer.flow_shift = %g with trainer.flow_shift_by = \"%s\", which says what the "
               "shift is: remove it",
               c->trainer_flow_shift, c->trainer_flow_shift_by);
    for (size_t i = 0; i < LG_ARRAY_LEN(keys); i++)
        if (keys[i].is_set && !keys[i].fits)
            broken(r, keys[i].key,
                   "%s has no meaning with trainer.objective = \"%s\", it is for %s: remove it",
                   keys[i].key, c->trainer_objective, keys[i].of);
    if (c->trainer_beta_start > c->trainer_beta_end)
        broken(r, "trainer.beta_start",
               "trainer.beta_start = %g is above trainer.beta_end = %g: noise grows with time",
               c->trainer_beta_start, c->trainer_beta_end);
}

static void check_variance(struct rules *r)
{
    const lg_config *c = r->c;
    const bool trained = strcmp(c->trainer_variance_loss, "none") != 0;
    if (!c->model_learned_variance && !trained)
        broken(r, "trainer.variance_loss",
               "trainer.variance_loss = \"none\" without model.learned_variance: remove it");
    if (c->model_learned_variance && trained && !is_objective(c, "eps"))
        broken(r, "trainer.variance_loss",
               "trainer.objective = \"%s\", but a learned variance is trained with \"eps\" alone: "
               "set the objective to that, or trainer.variance_loss to \"none\"",
               c->trainer_objective);
}

static void check_memory(struct rules *r)
{
    const lg_config *c = r->c;
    struct lg_recompute recompute;
    if (lg_recompute_parse((const char *const *)c->memory_recompute.v, (int)c->model_depth,
                           &recompute) < 0) {
        broken(r, "memory.recompute", "%s", lg_err_message());
        lg_err_clear();
        return;
    }
    lg_recompute_free(&recompute);
    if (c->memory_cast_weights && c->memory_offload_optimizer)
        broken(r, "memory.cast_weights",
               "memory.cast_weights = true casts weights where the GPU has them, which with "
               "memory.offload_optimizer lie in host memory: set one of the two to false");
}

/* ---- files ---- */

static bool has_file(const char *dir, const char *name)
{
    char path[LG_PATH_BYTES];
    int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    return n < (int)sizeof path && lg_path_exists(path);
}

static bool matches_something(const char *pattern)
{
    if (lg_path_exists(pattern)) return true;
    if (strchr(pattern, '{')) return true; /* the loader expands braces and names what is missing */
    glob_t g = {0};
    bool found = glob(pattern, GLOB_NOSORT, NULL, &g) == 0 && g.gl_pathc > 0;
    globfree(&g);
    return found;
}

/* key: as it stands in the schema; name: "data.path", "data.source[1].path" */
static void check_paths(struct rules *r, const char *key, const char *name, const char *paths)
{
    char part[LG_PATH_BYTES];
    for (;;) {
        size_t len = lg_path_list_part(paths);
        if (len >= sizeof part) {
            broken(r, key, "%s names a path longer than %d bytes", name, LG_PATH_BYTES);
        } else {
            snprintf(part, sizeof part, "%.*s", (int)len, paths);
            if (!matches_something(part))
                broken(r, key, "%s: %s does not exist: name tar shards or a folder of pictures",
                       name, part);
        }
        if (!paths[len]) return;
        paths += len + 1;
    }
}

/* Shares that leave something for everybody. */
static void check_weights(struct rules *r)
{
    const struct lg_data_sources *l = &r->c->data_source;
    double sum = 0;
    int weighted = 0;
    for (int i = 0; i < l->n; i++) {
        sum += l->v[i].weight;
        weighted += l->v[i].weight > 0;
        if (l->v[i].weight > 0 && l->v[i].repeats > 1)
            broken(r, "data.source",
                   "data.source[%d] has a weight of %g, which says how often its items come, and "
                   "repeats = %lld: remove one of them",
                   i, l->v[i].weight, (long long)l->v[i].repeats);
    }
    if (weighted && weighted < l->n && sum > 1 - 1e-6)
        broken(r, "data.source",
               "the weights of data.source add up to %g, which leaves nothing for the %d sources "
               "without one: make them smaller, or give every source a weight",
               sum, l->n - weighted);
    if (weighted && wants_buckets(r->c))
        broken(r, "data.source",
               "a weight in data.source with data.buckets, where an epoch holds each item a whole "
               "number of times: use repeats, or set data.buckets to \"square\"");
}

/* Of clips, beside their shapes. */
static void check_clip_keys(struct rules *r)
{
    const lg_config *c = r->c;
    if (c->data_fps > 0 && c->data_stride > 1)
        broken(r, "data.stride",
               "data.stride = %lld is for the file's own frames, data.fps = %g chooses frames by "
               "their "
               "times: remove one of them",
               (long long)c->data_stride, c->data_fps);
    if (c->data_frames == 1 && (c->data_fps > 0 || c->data_stride > 1))
        broken(r, c->data_fps > 0 ? "data.fps" : "data.stride",
               "data.fps and data.stride are for clips, and data.frames = 1: remove them, or set "
               "data.frames");
    if (c->data_latent_frames && c->vae_model[0])
        broken(r, "data.latent_frames",
               "data.latent_frames is for a data set of latents, and vae.model is set: remove one "
               "of them");
}

static void check_data(struct rules *r)
{
    const lg_config *c = r->c;
    check_clip_keys(r);
    if (!c->data_path[0] && !c->data_source.n)
        broken(r, "data.path",
               "data.path is empty: name tar shards or a folder of pictures, or tables "
               "[[data.source]]");
    if (c->data_path[0] && c->data_source.n)
        broken(r, "data.source",
               "data.path = %.200s and data.source: name all data sets as sources, or remove "
               "these",
               c->data_path);
    if (c->data_path[0]) check_paths(r, "data.path", "data.path", c->data_path);
    for (int i = 0; i < c->data_source.n; i++) {
        char name[40];
        snprintf(name, sizeof name, "data.source[%d].path", i);
        check_paths(r, "data.source", name, c->data_source.v[i].path);
    }
    check_weights(r);
}

static void check_files(struct rules *r)
{
    const lg_config *c = r->c;
    check_data(r);
    if (!c->job_name[0] || c->job_name[0] == '.' || strchr(c->job_name, '/'))
        broken(
            r, "job.name",
            "job.name = \"%.60s\" becomes part of file names: it must not be empty, begin with a "
            "dot or hold a slash",
            c->job_name);
    if (lg_path_exists(c->job_dir) && !is_dir(c->job_dir))
        broken(r, "job.dir", "job.dir: %s exists and is not a directory", c->job_dir);
    if (c->trainer_init_from[0] && !has_file(c->trainer_init_from, "config.json") &&
        !has_file(c->trainer_init_from, "model/config.json"))
        broken(r, "trainer.init_from",
               "trainer.init_from: %s %s: expected a checkpoint or a diffusers folder",
               c->trainer_init_from,
               is_dir(c->trainer_init_from) ? "has no config.json" : "does not exist");
    if (c->trainer_resume_from[0] && !has_file(c->trainer_resume_from, "manifest.json"))
        broken(r, "trainer.resume_from",
               "trainer.resume_from: %s %s: expected a checkpoint (weights alone: "
               "trainer.init_from)",
               c->trainer_resume_from,
               is_dir(c->trainer_resume_from) ? "has no manifest.json" : "does not exist");
}

int lg_config_check(const lg_config *c)
{
    struct rules r = {.c = c};
    check_device(&r);
    check_restarts(&r);
    check_text_memos(&r);
    check_memo(&r, "vae.memo", c->vae_memo);
    check_files(&r);
    check_model(&r);
    check_conditioning(&r);
    check_batch(&r);
    check_parallel(&r);
    check_hosts(&r);
    check_resume_changes(&r);
    check_window(&r);
    check_training(&r);
    check_adapter(&r);
    check_frozen(&r);
    check_noise(&r);
    check_variance(&r);
    check_memory(&r);
    check_previews(&r);
    return lg_problems_end(&r.problems, LG_ERR_CONFIG, c->file);
}
