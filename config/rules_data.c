/* Rules of the data sets, and of the shapes of what is in them: pictures, clips, latents, buckets. */
#include "config/buckets.h"
#include "config/denoisers.h"
#include "config/rules_private.h"
#include <glob.h>
#include <string.h>

static bool wants_buckets(const lg_config *c)
{
    const struct lg_strlist *l = &c->data_buckets;
    return l->n > 1 || (l->n == 1 && strcmp(l->v[0], "square") != 0);
}

/* ---- data sets ---- */

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
static void check_paths(struct lg_rules *r, const char *key, const char *name, const char *paths)
{
    char part[LG_PATH_BYTES];
    for (;;) {
        size_t len = lg_path_list_part(paths);
        if (len >= sizeof part) {
            lg_broken(r, key, "%s names a path longer than %d bytes", name, LG_PATH_BYTES);
        } else {
            snprintf(part, sizeof part, "%.*s", (int)len, paths);
            if (!lg_path_exists(part) && errno == EACCES)
                lg_broken(r, key, "%s: cannot look at %s: %s", name, part, strerror(errno));
            else if (!matches_something(part))
                lg_broken(r, key, "%s: %s does not exist: name tar shards or a folder of pictures",
                          name, part);
        }
        if (!paths[len]) return;
        paths += len + 1;
    }
}

/* Shares that leave something for everybody. */
static void check_weights(struct lg_rules *r)
{
    const struct lg_data_sources *l = &r->c->data_source;
    double sum = 0;
    int weighted = 0;
    for (int i = 0; i < l->n; i++) {
        sum += l->v[i].weight;
        weighted += l->v[i].weight > 0;
        if (l->v[i].weight > 0 && l->v[i].repeats > 1)
            lg_broken(
                r, "data.source",
                "data.source[%d] has a weight of %g, which says how often its items come, and "
                "repeats = %lld: remove one of them",
                i, l->v[i].weight, (long long)l->v[i].repeats);
    }
    if (weighted && weighted < l->n && sum > 1 - 1e-6)
        lg_broken(
            r, "data.source",
            "the weights of data.source add up to %g, which leaves nothing for the %d sources "
            "without one: make them smaller, or give every source a weight",
            sum, l->n - weighted);
    if (weighted && wants_buckets(r->c))
        lg_broken(
            r, "data.source",
            "a weight in data.source with data.buckets, where an epoch holds each item a whole "
            "number of times: use repeats, or set data.buckets to \"square\"");
}

/* Of clips, beside their shapes. */
static void check_clip_keys(struct lg_rules *r)
{
    const lg_config *c = r->c;
    if (c->data_fps > 0 && c->data_stride > 1)
        lg_broken(
            r, "data.stride",
            "data.stride = %lld is for the file's own frames, data.fps = %g chooses frames by "
            "their "
            "times: remove one of them",
            (long long)c->data_stride, c->data_fps);
    if (c->data_frames == 1 && (c->data_fps > 0 || c->data_stride > 1))
        lg_broken(
            r, c->data_fps > 0 ? "data.fps" : "data.stride",
            "data.fps and data.stride are for clips, and data.frames = 1: remove them, or set "
            "data.frames");
    if (c->data_latent_frames && c->vae_model[0])
        lg_broken(
            r, "data.latent_frames",
            "data.latent_frames is for a data set of latents, and vae.model is set: remove one "
            "of them");
}

void lg_rules_data(struct lg_rules *r)
{
    const lg_config *c = r->c;
    check_clip_keys(r);
    if (!c->data_path[0] && !c->data_source.n)
        lg_broken(r, "data.path",
                  "data.path is empty: name tar shards or a folder of pictures, or tables "
                  "[[data.source]]");
    if (c->data_path[0] && c->data_source.n)
        lg_broken(r, "data.source",
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

/* ---- shapes ---- */

/* Every rank of a sequence group has something of it. */
static void check_sequence(struct lg_rules *r, int64_t rows)
{
    const lg_config *c = r->c;
    if (c->parallel_sp > 1 && !lg_denoiser_info(lg_denoiser_kind_of(c->model_kind))->is_split) {
        lg_broken(
            r, "parallel.sp",
            "parallel.sp = %lld: model.kind = \"%s\" has no sequence that several ranks could "
            "share: set it to 1",
            (long long)c->parallel_sp, c->model_kind);
        return;
    }
    if (c->parallel_sp > c->model_heads)
        lg_broken(r, "parallel.sp", "parallel.sp = %lld is more than model.heads = %lld",
                  (long long)c->parallel_sp, (long long)c->model_heads);
    if (c->parallel_sp > rows)
        lg_broken(r, "parallel.sp",
                  "parallel.sp = %lld is more than the %lld rows of patches of a latent",
                  (long long)c->parallel_sp, (long long)rows);
}

/* What models say of clips whose latents have so many frames. */
static void check_clips(struct lg_rules *r, int64_t frames)
{
    const lg_config *c = r->c;
    const lg_denoiser_kind kind = lg_denoiser_kind_of(c->model_kind);
    if ((c->data_frames > 1 || frames > 1) && !lg_denoiser_info(kind)->clips)
        lg_broken(
            r, "data.frames",
            "data.frames = %lld with model.kind = \"%s\", which takes pictures: set it to 1, or "
            "use a model of clips, \"latte\" or \"ltx\"",
            (long long)c->data_frames, c->model_kind);
    if (c->trainer_clean_first_frame > 0 && frames < 2)
        lg_broken(
            r, "trainer.clean_first_frame",
            "trainer.clean_first_frame = %g with latents of one frame: it is for clips, of which "
            "the frames behind the first are trained on; remove it, or set data.frames",
            c->trainer_clean_first_frame);
    if (c->sample_first_frame[0] && frames < 2)
        lg_broken(
            r, "sample.first_frame",
            "sample.first_frame with latents of one frame: it is for clips, of which the frames "
            "behind the first are drawn; remove it, or set data.frames");
    if (c->sample_first_frame[0] && !lg_path_exists(c->sample_first_frame))
        lg_broken(r, "sample.first_frame", "sample.first_frame: %s does not exist",
                  c->sample_first_frame);
    if (kind == LG_LATTE && c->parallel_sp > frames)
        lg_broken(
            r, "parallel.sp",
            "parallel.sp = %lld with model.kind = \"latte\", whose frames stay whole: latents "
            "have %lld frames, which is the most",
            (long long)c->parallel_sp, (long long)frames);
    if (kind != LG_LTX) return;
    if (c->parallel_sp > 1 && !strcmp(c->parallel_sp_kind, "fastseq"))
        lg_broken(
            r, "parallel.sp_kind",
            "parallel.sp_kind = \"fastseq\" with model.kind = \"ltx\", whose queries and keys "
            "are normed over all heads at once: set it to \"ulysses\"");
    if (c->model_patch != 1)
        lg_broken(
            r, "model.patch",
            "model.patch = %lld with model.kind = \"ltx\", whose tokens are the latent's cells: "
            "set it to 1",
            (long long)c->model_patch);
}

static void sides_text(const struct lg_sides *s, char ret[64])
{
    if (s->height == s->width)
        snprintf(ret, 64, "%lld", (long long)s->height);
    else
        snprintf(ret, 64, "[%lld, %lld]", (long long)s->height, (long long)s->width);
}

/* Has every rank of a sequence group something of this bucket, too? unit: pixels of a patch. */
static void check_bucket_sequence(struct lg_rules *r, const struct lg_bucket *b, int64_t unit,
                                  int factor_time)
{
    const lg_config *c = r->c;
    const int64_t frames = (b->frames + factor_time - 1) / factor_time;
    const bool whole = lg_denoiser_kind_of(c->model_kind) == LG_LATTE;
    const int64_t most = whole ? frames : frames * (b->height / unit);
    char text[LG_BUCKET_TEXT_BYTES];
    if (c->parallel_sp > most)
        lg_broken(r, "data.buckets",
                  "data.buckets: %s with parallel.sp = %lld, which is more than the %lld %s of its "
                  "latents: set parallel.sp to at most that, or remove this shape",
                  lg_bucket_text(b, text), (long long)c->parallel_sp, (long long)most,
                  whole ? "frames" : "rows of patches");
}

/* unit: pixels of a patch. */
static void check_buckets(struct lg_rules *r, int64_t unit, int factor_time)
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
        lg_broken(r, "data.buckets", "data.buckets: %s", lg_err_message());
        lg_err_clear();
    }
    const bool is_square = lg_denoiser_info(lg_denoiser_kind_of(c->model_kind))->is_square;
    char sides[64];
    sides_text(&c->data_size, sides);
    if (is_square && c->data_size.height != c->data_size.width)
        lg_broken(
            r, "data.size",
            "data.size = %s with model.kind = \"%s\", which is defined for squares only: set it to "
            "one number, or use a model that reads other shapes, as \"pixart\"",
            sides, c->model_kind);
    if (!b.n) return;
    if (b.of[b.n - 1].frames > c->data_frames) /* sorted by them */
        lg_broken(r, "data.buckets",
                  "data.buckets has a shape of %d frames, data.frames = %lld: set that to the most "
                  "frames that a sample has",
                  b.of[b.n - 1].frames, (long long)c->data_frames);
    if (is_square)
        lg_broken(
            r, "data.buckets",
            "data.buckets with model.kind = \"%s\", which is defined for squares only: remove "
            "it, or use a model that reads other shapes, as \"pixart\"",
            c->model_kind);
    for (int k = 0; k < b.n; k++) check_bucket_sequence(r, &b.of[k], unit, factor_time);
    if (c->trainer_micro_batch_size % c->vae_chunk)
        lg_broken(r, "vae.chunk",
                  "vae.chunk = %lld does not divide trainer.micro_batch_size = %lld: with "
                  "data.buckets each micro-batch has a shape of its own, which a chunk must not "
                  "cross; set it to a divisor",
                  (long long)c->vae_chunk, (long long)c->trainer_micro_batch_size);
}

void lg_rules_geometry(struct lg_rules *r, const struct lg_vae_info *vae)
{
    const lg_config *c = r->c;
    const int64_t unit = vae->factor * c->model_patch;
    const struct lg_sides size = c->data_size;
    const int frames = lg_vae_latent_frames(vae, (int)c->data_frames);
    char sides[64];
    sides_text(&size, sides);
    if (size.height % unit || size.width % unit)
        lg_broken(r, "data.size",
                  "data.size = %s does not divide by %lld (the VAE's factor %lld x model.patch = "
                  "%lld): set it to a multiple of %lld",
                  sides, (long long)unit, (long long)vae->factor, (long long)c->model_patch,
                  (long long)unit);
    else
        check_sequence(r, size.height / unit * LG_MAX(frames, 1));
    if (!frames)
        lg_broken(
            r, "data.frames",
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
void lg_rules_latents(struct lg_rules *r)
{
    const lg_config *c = r->c;
    const struct lg_sides cells = lg_config_latent_size(c);
    const bool given = c->data_latent_size.height;
    const int64_t frames = c->data_latent_frames ? c->data_latent_frames : c->data_frames;
    if (wants_buckets(c))
        lg_broken(r, "data.buckets",
                  "data.buckets without vae.model: latents of a data set have one shape; set "
                  "vae.model and name pictures in data.path, or set data.buckets to \"square\"");
    if (c->data_flip)
        lg_broken(
            r, "data.flip",
            "data.flip without vae.model: a latent is not mirrored, since the mirrored picture "
            "has another; set "
            "vae.model and name pictures in data.path, or set data.flip to false");
    if (!strcmp(c->data_crop, "random"))
        lg_broken(
            r, "data.crop",
            "data.crop = \"random\" without vae.model: latents are taken whole; set vae.model "
            "and name pictures in "
            "data.path, or set data.crop to \"center\"");
    if (cells.height < 1 || cells.width < 1 || cells.height % c->model_patch ||
        cells.width % c->model_patch)
        lg_broken(r, given ? "data.latent_size" : "data.size",
                  "latents of %lld x %lld cells (%s) do not divide by model.patch = %lld: set "
                  "data.latent_size to the side of the data set's latents",
                  (long long)cells.height, (long long)cells.width,
                  given ? "data.latent_size" : "data.size / 8, since vae.model is empty",
                  (long long)c->model_patch);
    else
        check_sequence(r, cells.height / c->model_patch * frames);
    check_clips(r, frames);
}
