/* What sample n is: the random choices, all keyed by n, and the work on the pixels; see source.h.
 */
#include "base/philox.h"
#include "stages/io/picture.h"
#include "stages/io/resize.h"
#include "stages/io/safetensors.h"
#include "stages/io/source.h"
#include <stdlib.h>
#include <string.h>

struct lg_sample_work {
    lg_picture picture;
    lg_resize_scratch scratch;
    lg_caption caption;
    size_t latent_capacity; /* elements of each latent */
};

static uint32_t draw(const struct lg_sample_rule *rule, lg_purpose purpose, uint64_t n, int word)
{
    return lg_philox(rule->seed, purpose, n, 0).v[word];
}

static int choose_text(const struct lg_sample_rule *rule, lg_sample *s)
{
    const lg_item *item = &s->stored;
    s->dropped = lg_uniform_f64(draw(rule, LG_PURPOSE_DROPOUT, s->n, 0)) < rule->dropout;
    s->caption = "";
    s->label = -1;
    if (!s->dropped)
        LG_TRY(lg_caption_choose(&rule->caption, rule->seed, s->n, item->caption, item->n_captions,
                                 &s->work->caption, &s->caption));
    if (rule->num_classes > 0) {
        if (item->label >= rule->num_classes)
            return LG_FAIL(LG_ERR_VOID, "%s: class %lld, but the model has %d classes", s->key,
                           (long long)item->label, rule->num_classes);
        s->label = s->dropped ? rule->num_classes : item->label;
    }
    return 0;
}

/* A failure to decode, with the sample's name before the reason. */
static int with_key(int rc, const lg_sample *s)
{
    if (rc == LG_ERR_VOID) return LG_FAIL(LG_ERR_VOID, "%s: %s", s->key, lg_err_message());
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : rc;
}

static struct lg_sample_shape shape_of(const struct lg_sample_rule *rule, const lg_sample *s)
{
    if (!rule->order) return rule->shape;
    const struct lg_bucket *b = &rule->buckets->of[s->bucket];
    return (struct lg_sample_shape){b->frames, b->height, b->width};
}

/* To which the JPEG decoder may shrink the shorter side. Half of the reduction is left to the Lanczos filter, so this
 * shortcut costs no quality. */
static int side_min(const struct lg_sample_rule *rule, const lg_sample *s,
                    const struct lg_sample_shape *shape)
{
    struct lg_picture_size size;
    size_t need;
    if (!rule->order && shape->height == shape->width) return 2 * shape->height;
    if (lg_picture_size(s->stored.picture, s->stored.picture_bytes, &need, &size) < 0 ||
        !size.width) {
        lg_err_clear();
        return 0;
    }
    const struct lg_fit_size full =
        lg_fit_cover(size.width, size.height, shape->width, shape->height);
    return 2 * LG_MIN(full.width, full.height);
}

/* Scaled, cut and mirrored, as all frames of its sample are. */
struct fit {
    const struct lg_sample_rule *rule;
    lg_sample *sample;
    struct lg_sample_shape shape;
    uint8_t *pixels; /* (3, F, H, W) */
};

static int fit_frame(const struct fit *f, const lg_picture *p, int frame)
{
    const struct lg_sample_rule *rule = f->rule;
    lg_sample *s = f->sample;
    const size_t pixels = (size_t)f->shape.height * (size_t)f->shape.width;
    double x = -1, y = -1;
    if (rule->random_crop) {
        x = lg_uniform_f64(draw(rule, LG_PURPOSE_CROP, s->n, 0));
        y = lg_uniform_f64(draw(rule, LG_PURPOSE_CROP, s->n, 1));
    }
    const struct lg_fit_args fit = {
        .rgb = p->rgb,
        .width = p->width,
        .height = p->height,
        .out_w = f->shape.width,
        .out_h = f->shape.height,
        .crop_x = x,
        .crop_y = y,
        .flip = rule->random_flip && (draw(rule, LG_PURPOSE_FLIP, s->n, 0) & 1),
        .out = f->pixels + (size_t)frame * pixels,
        .plane = (size_t)f->shape.frames * pixels,
    };
    const struct lg_fit_corner corner = lg_fit_corner(&fit);
    s->stored_height = p->stored_height;
    s->stored_width = p->stored_width;
    s->crop_top = corner.top;
    s->crop_left = corner.left;
    LG_TRY(lg_fit(&fit, &s->work->scratch));
    return 0;
}

static int on_frame(void *arg, int first, int end, const lg_picture *p)
{
    for (int i = first; i < end; i++) LG_TRY(fit_frame(arg, p, i));
    return 0;
}

static int make_clip(struct fit *f)
{
    lg_sample *s = f->sample;
    const struct lg_clip_choice choice = {
        .frames = f->shape.frames,
        .rate = f->rule->rate,
        .start = lg_uniform_f64(draw(f->rule, LG_PURPOSE_CLIP, s->n, 0))};
    struct lg_clip_info info;
    LG_TRY(with_key(lg_clip_read(s->stored.clip, &choice, on_frame, f, &info), s));
    return 0;
}

static int make_pixels(const struct lg_sample_rule *rule, lg_sample *s, uint8_t *pixels)
{
    struct fit f = {.rule = rule, .sample = s, .shape = shape_of(rule, s), .pixels = pixels};
    lg_picture *p = &s->work->picture;
    if (s->stored.clip) {
        LG_TRY(make_clip(&f));
        return 0;
    }
    if (f.shape.frames > 1)
        return LG_FAIL(LG_ERR_VOID, "%s: a picture, and there is no bucket of one frame", s->key);
    LG_TRY(with_key(lg_picture_decode(s->stored.picture, s->stored.picture_bytes,
                                      side_min(rule, s, &f.shape), p),
                    s));
    LG_TRY(fit_frame(&f, p, 0));
    return 0;
}

/* (C, h, w), of clips (C, f, h, w), or (1, ..) as encoders write batches of one. To (C, f, h, w). */
static int latent_shape(const struct lg_st_entry *e, const char *name, bool is_clip, int ret_dim[4])
{
    const int rank = is_clip ? 4 : 3, skip = e && e->rank == rank + 1 && e->dim[0] == 1;
    if (!e || e->rank - skip != rank)
        return LG_FAIL(LG_ERR_VOID, "its latent has no %s of shape (C, %sh, w)", name,
                       is_clip ? "f, " : "");
    ret_dim[1] = 1;
    for (int i = 0; i < rank; i++) {
        if (e->dim[skip + i] < 1 || e->dim[skip + i] > 65536)
            return LG_FAIL(LG_ERR_VOID, "its %s has a dimension out of range", name);
        ret_dim[i > 0 && !is_clip ? i + 1 : i] = (int)e->dim[skip + i];
    }
    return 0;
}

static int read_latents(lg_sample *s, bool is_clip, const lg_st_file *f)
{
    const struct lg_st_entry *mean = lg_st_find(f, "latent_mean");
    const struct lg_st_entry *logvar = lg_st_find(f, "latent_logvar");
    int dim[4];
    LG_TRY(latent_shape(mean, "latent_mean", is_clip, s->latent_dim));
    LG_TRY(latent_shape(logvar, "latent_logvar", is_clip, dim));
    if (memcmp(dim, s->latent_dim, sizeof dim) != 0)
        return LG_FAIL(LG_ERR_VOID, "its latent_mean and latent_logvar differ in shape");
    size_t count = (size_t)dim[0] * (size_t)dim[1] * (size_t)dim[2] * (size_t)dim[3];
    if (count > s->work->latent_capacity) {
        free(s->latent_mean);
        s->work->latent_capacity = 0;
        s->latent_logvar = NULL;
        s->latent_mean = malloc(2 * count * sizeof(float));
        if (!s->latent_mean) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a latent");
        s->work->latent_capacity = count;
    }
    s->latent_logvar = s->latent_mean + count;
    LG_TRY(lg_st_read_f32(mean, s->latent_mean, 0, count));
    LG_TRY(lg_st_read_f32(logvar, s->latent_logvar, 0, count));
    return 0;
}

static int make_latents(const struct lg_sample_rule *rule, lg_sample *s)
{
    lg_st_file *f = NULL;
    int rc =
        lg_st_open_memory("its .latent.safetensors", s->stored.latent, s->stored.latent_bytes, &f);
    if (rc == 0) rc = read_latents(s, rule->latents_have_frames, f);
    lg_st_close(&f);
    /* Whatever is wrong with the file (no safetensors, another type) stays wrong. */
    if (rc < 0 && rc != LG_ERR_NOSPACE) rc = LG_ERR_VOID;
    LG_TRY(with_key(rc, s));
    return 0;
}

int lg_source_sample(lg_source *s, const struct lg_sample_rule *rule, uint64_t n, uint8_t *pixels,
                     lg_sample *ret)
{
    const struct lg_order_place place = lg_source_place(s, rule, n);
    ret->n = n;
    ret->bucket = place.bucket;
    ret->is_absent = place.item == LG_ITEM_ABSENT;
    if (ret->is_absent) {
        ret->item = LG_ITEM_ABSENT;
        ret->key_hash = 0;
        return 0;
    }
    if (!ret->work) ret->work = calloc(1, sizeof *ret->work);
    if (!ret->work) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a sample");
    ret->item = place.item;
    ret->is_latent = lg_source_has_latents(s);
    ret->caption = "";
    ret->stored_height = ret->stored_width = 0;
    ret->crop_top = ret->crop_left = 0;
    int rc = lg_source_read(s, ret->item, &ret->stored);
    ret->key = ret->stored.key ? ret->stored.key : "";
    ret->key_hash = ret->stored.key_hash;
    LG_TRY(rc);
    LG_TRY(choose_text(rule, ret));
    if (ret->is_latent)
        LG_TRY(make_latents(rule, ret));
    else
        LG_TRY(make_pixels(rule, ret, pixels));
    return 0;
}

void lg_sample_free(lg_sample *s)
{
    lg_item_free(&s->stored);
    if (s->work) {
        lg_picture_free(&s->work->picture);
        lg_resize_free(&s->work->scratch);
        lg_caption_free(&s->work->caption);
    }
    free(s->work);
    free(s->latent_mean);
    *s = (lg_sample){0};
}
