/* Latent shards of a data set; see encode.h.
 *
 * Pictures are gathered until a batch is full (or the shard ends), encoded together, and written in
 * the data set's order. A shard appears under its name when it is complete; a run that was killed
 * leaves whole shards, which is why a folder that already holds some is refused: nobody could tell
 * where they came from.
 *
 * Invariant: members of a sample stand together, the latent first; keys are the item's number in the
 * data set, so they grow and are unique whatever the original keys were. */
#include "base/fs.h"
#include "base/log.h"
#include "stages/encode/batches.h"
#include "stages/encode/encode.h"
#include "stages/io/picture.h"
#include "stages/io/resize.h"
#include "stages/io/safetensors.h"
#include "stages/io/source.h"
#include "stages/io/tar.h"
#include <cjson/cJSON.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 64, VOIDS_SHOWN_MAX = 20 };

/* A picture that waits for its batch, with what will stand beside its latent. */
struct waiting {
    uint64_t item;
    char *key, *text; /* text: of the .txt or .json; NULL: no caption */
    bool is_json;
    int64_t label; /* -1: none */
};

struct job {
    const struct lg_encode_dataset_spec *spec;
    struct lg_autoencoder_config config;
    lg_source *source;
    lg_vae_batches *vae;
    lg_item item;
    lg_picture picture;
    lg_resize_scratch scratch;
    struct waiting *waiting;
    int n_waiting;
    uint8_t *pixels;      // (batch, 3, S, S)
    float *mean, *logvar; // (batch, C, h, w)
    lg_tar_writer *shard; /* NULL between shards */
    int in_shard, shards;
    uint64_t encoded, voids;
};

/* ---- writing ---- */

static int64_t latent_dim(const struct job *j, int64_t dim[3])
{
    dim[0] = j->config.latent_channels;
    dim[1] = dim[2] = j->spec->size / j->config.factor;
    return dim[0] * dim[1] * dim[2];
}

static int add_latent(struct job *j, int i, const char *stem)
{
    char name[NAME_BYTES];
    int64_t dim[3];
    size_t count = (size_t)latent_dim(j, dim), bytes = 0;
    void *data = NULL;
    lg_st_writer *w = NULL;
    int rc;
    snprintf(name, sizeof name, "%s.latent.safetensors", stem);
    LG_TRY(lg_st_writer_open_memory(&w));
    LG_TRY_GOTO(rc, lg_st_writer_metadata(w, "key", j->waiting[i].key), out);
    LG_TRY_GOTO(rc, lg_st_writer_declare(w, "latent_mean", LG_F32, 3, dim), out);
    LG_TRY_GOTO(rc, lg_st_writer_declare(w, "latent_logvar", LG_F32, 3, dim), out);
    LG_TRY_GOTO(rc, lg_st_writer_data(w, j->mean + (size_t)i * count, count * sizeof(float)), out);
    LG_TRY_GOTO(rc, lg_st_writer_data(w, j->logvar + (size_t)i * count, count * sizeof(float)),
                out);
    LG_TRY_GOTO(rc, lg_st_writer_finish_memory(&w, &data, &bytes), out);
    rc = lg_tar_writer_add(j->shard, name, data, bytes);
out:
    lg_st_writer_abort(&w);
    free(data);
    return rc;
}

static int add_sample(struct job *j, int i)
{
    const struct waiting *s = &j->waiting[i];
    char stem[24], name[NAME_BYTES], label[24];
    snprintf(stem, sizeof stem, "%09llu", (unsigned long long)s->item);
    LG_TRY(add_latent(j, i, stem));
    if (s->text) {
        snprintf(name, sizeof name, "%s.%s", stem, s->is_json ? "json" : "txt");
        LG_TRY(lg_tar_writer_add(j->shard, name, s->text, strlen(s->text)));
    }
    if (s->label >= 0) {
        snprintf(name, sizeof name, "%s.cls", stem);
        int n = snprintf(label, sizeof label, "%lld", (long long)s->label);
        LG_TRY(lg_tar_writer_add(j->shard, name, label, (size_t)n));
    }
    return 0;
}

static int finish_shard(struct job *j)
{
    if (!j->shard) return 0;
    LG_TRY(lg_tar_writer_finish(&j->shard));
    j->shards++;
    j->in_shard = 0;
    lg_log(LG_INFO, "shard %d: %llu of %llu pictures encoded, %llu left out", j->shards - 1,
           (unsigned long long)j->encoded, (unsigned long long)lg_source_count(j->source),
           (unsigned long long)j->voids);
    return 0;
}

static void forget(struct job *j)
{
    for (int i = 0; i < j->n_waiting; i++) {
        free(j->waiting[i].key);
        free(j->waiting[i].text);
    }
    j->n_waiting = 0;
}

/* Encodes what waits and writes it. */
static int flush(struct job *j)
{
    if (!j->n_waiting) return 0;
    char path[LG_PATH_BYTES];
    lg_vae_batches_encode(j->vae, j->pixels, j->n_waiting, j->mean, j->logvar);
    if (!j->shard) {
        LG_TRY(lg_path(path, "%s/%05d.tar", j->spec->out, j->shards));
        LG_TRY(lg_tar_writer_open(path, &j->shard));
    }
    for (int i = 0; i < j->n_waiting; i++) LG_TRY(add_sample(j, i));
    j->in_shard += j->n_waiting;
    j->encoded += (uint64_t)j->n_waiting;
    forget(j);
    return j->in_shard == j->spec->shard_size ? finish_shard(j) : 0;
}

/* ---- reading ---- */

/* One caption becomes .txt, several .json, as the source reads them. */
static int keep_captions(const lg_item *item, struct waiting *s)
{
    s->is_json = item->n_captions > 1;
    if (!item->n_captions) return 0;
    if (!s->is_json)
        s->text = strdup(item->caption[0]);
    else {
        cJSON *j = cJSON_CreateObject();
        cJSON *list = cJSON_CreateStringArray(item->caption, item->n_captions);
        if (cJSON_AddItemToObject(j, "captions", list)) s->text = cJSON_PrintUnformatted(j);
        cJSON_Delete(j);
    }
    return s->text ? 0 : LG_FAIL(LG_ERR_NOSPACE, "no memory for the captions of %s", item->key);
}

static int gather(struct job *j, uint64_t item)
{
    int size = j->spec->size;
    struct waiting *s = &j->waiting[j->n_waiting];
    LG_TRY(lg_source_read(j->source, item, &j->item));
    LG_TRY(lg_picture_decode(j->item.picture, j->item.picture_bytes, 2 * size, &j->picture));
    LG_TRY(lg_fit(&(struct lg_fit_args){.rgb = j->picture.rgb,
                                        .width = j->picture.width,
                                        .height = j->picture.height,
                                        .out_w = size,
                                        .out_h = size,
                                        .crop_x = -1,
                                        .crop_y = -1,
                                        .out = j->pixels + (size_t)j->n_waiting * 3 * (size_t)size *
                                                               (size_t)size},
                  &j->scratch));
    *s = (struct waiting){.item = item, .label = j->item.label, .key = strdup(j->item.key)};
    j->n_waiting++; /* from here on forget() frees it */
    if (!s->key) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the key of %s", j->item.key);
    return keep_captions(&j->item, s);
}

static int encode_all(struct job *j)
{
    const struct lg_encode_dataset_spec *s = j->spec;
    uint64_t count = lg_source_count(j->source);
    for (uint64_t item = 0; item < count; item++) {
        int rc = gather(j, item);
        if (rc == LG_ERR_VOID) {
            if (j->voids++ < VOIDS_SHOWN_MAX)
                lg_log(LG_WARN, "left out: %s: %s", j->item.key ? j->item.key : "?",
                       lg_err_message());
            lg_err_clear();
            continue;
        }
        LG_TRY(rc);
        if (j->n_waiting == s->o.batch || j->in_shard + j->n_waiting == s->shard_size)
            LG_TRY(flush(j));
    }
    LG_TRY(flush(j));
    LG_TRY(finish_shard(j));
    if (!j->encoded)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: none of its %llu pictures decodes", s->data,
                       (unsigned long long)count);
    return 0;
}

/* ---- the job ---- */

static int check_out(const char *out)
{
    char pattern[LG_PATH_BYTES];
    LG_TRY(lg_mkdirs(out));
    LG_TRY(lg_path(pattern, "%s/*.tar", out));
    glob_t found = {0};
    int rc = glob(pattern, 0, NULL, &found);
    globfree(&found);
    if (rc == 0)
        return LG_FAIL(LG_ERR_BUSY, "%s already holds .tar files: name an empty folder with --out",
                       out);
    return 0;
}

static int allocate(struct job *j)
{
    int64_t dim[3], count = latent_dim(j, dim);
    size_t batch = (size_t)j->spec->o.batch, side = (size_t)j->spec->size;
    j->waiting = calloc(batch, sizeof *j->waiting);
    j->pixels = malloc(batch * 3 * side * side);
    j->mean = malloc(batch * (size_t)count * sizeof(float));
    j->logvar = malloc(batch * (size_t)count * sizeof(float));
    if (!j->waiting || !j->pixels || !j->mean || !j->logvar)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for a batch of %zu pictures", batch);
    return 0;
}

static int job_run(struct job *j)
{
    const struct lg_encode_dataset_spec *s = j->spec;
    LG_TRY(lg_autoencoder_config_load(s->o.model, &j->config));
    LG_TRY(lg_source_open(s->data, NULL, &j->source));
    if (lg_source_has_latents(j->source))
        return LG_FAIL(LG_ERR_CONFIG, "%s holds latents already", s->data);
    LG_TRY(check_out(s->out));
    LG_TRY(lg_vae_batches_open(&(struct lg_vae_batches_spec){.device = s->o.device,
                                                             .dir = s->o.model,
                                                             .config = j->config,
                                                             .shape = {.half = LG_AEKL_ENCODER,
                                                                       .batch = s->o.batch,
                                                                       .height = s->size,
                                                                       .width = s->size,
                                                                       .slice = s->o.slice}},
                               &j->vae));
    LG_TRY(allocate(j));
    return encode_all(j);
}

int lg_encode_dataset(const struct lg_encode_dataset_spec *s, struct lg_encode_dataset_result *ret)
{
    struct job j = {.spec = s};
    int rc = job_run(&j);
    forget(&j);
    lg_tar_writer_abort(&j.shard);
    lg_vae_batches_close(&j.vae);
    lg_source_close(&j.source);
    lg_item_free(&j.item);
    lg_picture_free(&j.picture);
    lg_resize_free(&j.scratch);
    free(j.waiting);
    free(j.pixels);
    free(j.mean);
    free(j.logvar);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    *ret = (struct lg_encode_dataset_result){j.encoded, j.voids, j.shards};
    return 0;
}
