/* The models' config.json, read with cJSON. Absent keys have the defaults of the library that
 * writes them (diffusers' AutoencoderKL); sizes are checked before they are used. */
#include "config/models.h"
#include "base/fs.h"
#include "base/json_tree.h"
#include "config/tokenizer_files.h"
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { CONFIG_BYTES_MAX = 1 << 20, CONFIG_TOKENS_MAX = 1 << 17, EDGE_BYTES = 64 << 10 };
enum { BLOCKS_MAX = 8, DIM_MAX = 65536, LAYERS_MAX = 1024 };

static int read_config(const char *dir, cJSON **ret, uint64_t *ret_hash)
{
    char path[LG_PATH_BYTES], *data = NULL;
    size_t bytes = 0;
    LG_TRY(lg_path(path, "%s/config.json", dir));
    if (!lg_path_exists(path) && errno == EACCES)
        return LG_FAIL(LG_ERR_CONFIG, "cannot look at %s: %s", path, strerror(errno));
    if (!lg_path_exists(path))
        return LG_FAIL(LG_ERR_CONFIG, "%s does not exist: expected a model's folder", path);
    LG_TRY(lg_read_file(path, CONFIG_BYTES_MAX, &data, &bytes));
    cJSON *json = NULL;
    int rc = lg_json_tree(path, data, bytes, CONFIG_TOKENS_MAX, &json);
    *ret_hash = lg_hash(data, bytes);
    free(data);
    if (rc == LG_ERR_CORRUPT)
        return LG_FAIL(LG_ERR_CONFIG, "%s is not a JSON object: %s", path, lg_err_message());
    LG_TRY(rc);
    if (!cJSON_IsObject(json)) {
        cJSON_Delete(json);
        return LG_FAIL(LG_ERR_CONFIG, "%s is not a JSON object", path);
    }
    *ret = json;
    return 0;
}

/* A whole number in [min, max]; fallback < 0: the key must be there. */
static int read_int(const cJSON *json, const char *dir, const char *key, int fallback, int min,
                    int max, int *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(json, key);
    if ((!v || cJSON_IsNull(v)) && fallback >= 0) {
        *ret = fallback;
        return 0;
    }
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= min && v->valuedouble <= max) ||
        v->valuedouble != (int)v->valuedouble)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s/config.json: %s %s: expected a whole number from %d to %d", dir, key,
                       v ? "is wrong" : "is missing", min, max);
    *ret = (int)v->valuedouble;
    return 0;
}

static int read_num(const cJSON *json, const char *dir, const char *key, double fallback,
                    double *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(json, key);
    *ret = fallback;
    if (!v || cJSON_IsNull(v)) return 0;
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= -1e6 && v->valuedouble <= 1e6))
        return LG_FAIL(LG_ERR_CONFIG, "%s/config.json: %s is not a number", dir, key);
    *ret = v->valuedouble;
    return 0;
}

/* ---- identity ---- */

static int read_edge(int fd, off_t at, size_t bytes, XXH3_state_t *state, char *buf)
{
    ssize_t n = pread(fd, buf, bytes, at);
    if (n < 0 || (size_t)n != bytes) return -1;
    XXH3_64bits_update(state, buf, bytes);
    return 0;
}

static int hash_weights_file(const char *dir, const char *name, XXH3_state_t *state)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/%s", dir, name));
    int fd;
    uint64_t bytes;
    LG_TRY(lg_open_file(path, &fd, &bytes));
    int64_t size = (int64_t)bytes;
    size_t edge = (size_t)LG_MIN(size, EDGE_BYTES);
    char *buf = malloc(EDGE_BYTES);
    LG_ASSERT(buf);
    XXH3_64bits_update(state, name, strlen(name));
    XXH3_64bits_update(state, &size, sizeof size);
    int bad = read_edge(fd, 0, edge, state, buf);
    if (!bad) bad = read_edge(fd, size - (off_t)edge, edge, state, buf);
    free(buf);
    close(fd);
    if (bad) return LG_FAIL(LG_ERR_IO, "cannot read %s", path);
    return 0;
}

/* STEM-00001-of-00002.safetensors, or the variant STEM.fp16.safetensors, STEM.fp16-00001-of-00002.safetensors */
static bool is_part(const char *name, const char *stem)
{
    size_t n = strlen(name), s = strlen(stem), ext = strlen(".safetensors");
    return n > s + 1 + ext && strncmp(name, stem, s) == 0 &&
           (name[s] == '-' || strncmp(name + s, ".fp16", 5) == 0) &&
           strcmp(name + n - ext, ".safetensors") == 0;
}

static int compare_names(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name); /* not alphasort: it follows the locale */
}

/* STEM-00002-of-00005.safetensors says how many there have to be: all of them, of which a download may have left some out. */
static int check_parts(const char *dir, const char *name)
{
    char path[LG_PATH_BYTES];
    int number = 0, count = 0, end = 0;
    const char *of = strstr(name, "-of-"), *dash = of;
    while (dash && dash > name && dash[-1] != '-') dash--;
    if (!of || dash == name ||
        sscanf(dash, "%5d-of-%5d.safetensors%n", &number, &count, &end) < 2 || !end || dash[end])
        return 0;
    for (int k = 1; k <= count; k++) {
        LG_TRY(lg_path(path, "%s/%.*s%05d-of-%05d.safetensors", dir, (int)(dash - name), name, k,
                       count));
        if (!lg_path_exists(path))
            return LG_FAIL(LG_ERR_CONFIG, "%s does not exist; the weights are in %d parts", path,
                           count);
    }
    return 0;
}

static int hash_parts(const char *dir, const char *stem, XXH3_state_t *state, int *ret_parts)
{
    struct dirent **entries = NULL;
    int n = scandir(dir, &entries, NULL, compare_names), rc = 0, parts = 0;
    if (n < 0) return LG_FAIL(lg_err_from_errno(errno), "cannot list %s: %s", dir, strerror(errno));
    for (int i = 0; i < n; i++) {
        if (rc == 0 && is_part(entries[i]->d_name, stem)) {
            if (!parts) rc = check_parts(dir, entries[i]->d_name);
            if (rc == 0) rc = hash_weights_file(dir, entries[i]->d_name, state);
            parts++;
        }
        free(entries[i]);
    }
    free(entries);
    *ret_parts = parts;
    return rc;
}

/* Names the weights that lie there instead: pickles of PyTorch, which can run any code and are not read. */
static int fail_no_weights(const char *dir, const char *stem, const char *wanted)
{
    static const char *const ENDS[] = {".bin", ".fp16.bin", ".bin.index.json"};
    char path[LG_PATH_BYTES];
    for (size_t i = 0; i < 2 * LG_ARRAY_LEN(ENDS); i++) {
        LG_TRY(lg_path(path, "%s/%s%s%s", dir, i % 2 ? "pytorch_" : "", stem, ENDS[i / 2]));
        if (lg_path_exists(path))
            return LG_FAIL(LG_ERR_CONFIG,
                           "%s does not exist, but %s, which is a pickle and not read: fetch the "
                           "weights as .safetensors, or save the model once with diffusers' or "
                           "transformers' save_pretrained",
                           wanted, path);
    }
    return LG_FAIL(LG_ERR_CONFIG, "%s does not exist, nor parts of it", wanted);
}

/* tokenizer: files that belong to the model's bits, or NULL. */
static int hash_model(const char *dir, const char *stem, const struct lg_tokenizer_files *tokenizer,
                      uint64_t config_hash, uint64_t *ret)
{
    char path[LG_PATH_BYTES];
    XXH3_state_t *state = XXH3_createState();
    LG_ASSERT(state);
    XXH3_64bits_reset(state);
    XXH3_64bits_update(state, &config_hash, sizeof config_hash);
    int rc = 0, parts = 0;
    if (tokenizer) {
        uint64_t hash = 0;
        LG_TRY_GOTO(rc, lg_tokenizer_files_hash(tokenizer, &hash), out);
        XXH3_64bits_update(state, &hash, sizeof hash);
    }
    LG_TRY_GOTO(rc, lg_path(path, "%s/%s.safetensors", dir, stem), out);
    if (lg_path_exists(path)) {
        char name[NAME_MAX];
        snprintf(name, sizeof name, "%s.safetensors", stem);
        LG_TRY_GOTO(rc, hash_weights_file(dir, name, state), out);
    } else {
        LG_TRY_GOTO(rc, hash_parts(dir, stem, state, &parts), out);
        if (parts == 0) {
            rc = fail_no_weights(dir, stem, path);
            goto out;
        }
    }
    *ret = XXH3_64bits_digest(state);
out:
    XXH3_freeState(state);
    return rc;
}

/* ---- the two kinds of model ---- */

static int read_kl(const cJSON *json, const char *dir, struct lg_vae_info *info)
{
    const cJSON *blocks = cJSON_GetObjectItemCaseSensitive(json, "block_out_channels");
    int n = blocks ? cJSON_GetArraySize(blocks) : 1;
    if ((blocks && !cJSON_IsArray(blocks)) || n < 1 || n > BLOCKS_MAX)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s/config.json: block_out_channels: expected a list of 1 to %d entries",
                       dir, BLOCKS_MAX);
    info->factor = 1 << (n - 1);
    info->factor_time = 1;
    LG_TRY(read_int(json, dir, "latent_channels", 4, 1, 1024, &info->latent_channels));
    LG_TRY(read_num(json, dir, "scaling_factor", 0.18215, &info->scaling_factor));
    LG_TRY(read_num(json, dir, "shift_factor", 0, &info->shift_factor));
    return 0;
}

/* What block i makes smaller: in space, in time, or, by diffusers' default, both. */
static void shrink(const cJSON *types, int i, struct lg_vae_info *info)
{
    const cJSON *type = cJSON_GetArrayItem(types, i);
    const char *name = cJSON_IsString(type) ? type->valuestring : "conv";
    if (strcmp(name, "temporal") != 0) info->factor *= 2;
    if (strcmp(name, "spatial") != 0) info->factor_time *= 2;
}

static int read_ltx(const cJSON *json, const char *dir, struct lg_vae_info *info)
{
    const cJSON *scales = cJSON_GetObjectItemCaseSensitive(json, "spatio_temporal_scaling");
    const cJSON *types = cJSON_GetObjectItemCaseSensitive(json, "downsample_type");
    const int n = scales ? cJSON_GetArraySize(scales) : 3;
    if ((scales && !cJSON_IsArray(scales)) || n > BLOCKS_MAX)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s/config.json: spatio_temporal_scaling: expected a list of at most %d "
                       "entries",
                       dir, BLOCKS_MAX);
    LG_TRY(read_int(json, dir, "patch_size", 4, 1, 64, &info->factor));
    info->factor_time = 1;
    for (int i = 0; i < n; i++)
        if (!scales || cJSON_IsTrue(cJSON_GetArrayItem(scales, i))) shrink(types, i, info);
    LG_TRY(read_int(json, dir, "latent_channels", 128, 1, 1024, &info->latent_channels));
    LG_TRY(read_num(json, dir, "scaling_factor", 1, &info->scaling_factor));
    return 0;
}

static int read_vae(const cJSON *json, const char *dir, struct lg_vae_info *info)
{
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(json, "_class_name");
    const char *class = cJSON_IsString(name) ? name->valuestring : "AutoencoderKL";
    info->kind = strcmp(class, "AutoencoderKLLTXVideo") ? LG_VAE_KL : LG_VAE_LTX;
    if (info->kind == LG_VAE_KL && strcmp(class, "AutoencoderKL") != 0)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s/config.json: _class_name is %.60s: expected AutoencoderKL or "
                       "AutoencoderKLLTXVideo",
                       dir, class);
    LG_TRY((info->kind == LG_VAE_LTX ? read_ltx : read_kl)(json, dir, info));
    if (info->scaling_factor == 0)
        return LG_FAIL(LG_ERR_CONFIG, "%s/config.json: scaling_factor is 0", dir);
    return 0;
}

int lg_vae_latent_frames(const struct lg_vae_info *vae, int frames)
{
    if (frames < 1 || (frames - 1) % vae->factor_time) return 0;
    return (frames - 1) / vae->factor_time + 1;
}

static int vae_info(const char *dir, struct lg_vae_info *ret, uint64_t *ret_config_hash)
{
    cJSON *json = NULL;
    *ret = (struct lg_vae_info){0};
    LG_TRY(read_config(dir, &json, ret_config_hash));
    int rc = read_vae(json, dir, ret);
    cJSON_Delete(json);
    return rc;
}

int lg_vae_info_read(const char *dir, struct lg_vae_info *ret)
{
    struct lg_vae_info info;
    uint64_t hash;
    LG_TRY(vae_info(dir, &info, &hash));
    *ret = info;
    return 0;
}

int lg_vae_info_load(const char *dir, struct lg_vae_info *ret)
{
    struct lg_vae_info info;
    uint64_t config_hash = 0;
    LG_TRY(vae_info(dir, &info, &config_hash));
    LG_TRY(hash_model(dir, "diffusion_pytorch_model", NULL, config_hash, &info.identity));
    *ret = info;
    return 0;
}

/* What a CLIP's config leaves out has CLIPTextConfig's defaults. */
static int read_text(const cJSON *json, const char *dir, struct lg_text_info *info,
                     lg_tokenizer_kind *ret)
{
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "model_type");
    const char *name = cJSON_IsString(type) ? type->valuestring : "t5";
    *ret = strcmp(name, "clip_text_model") ? LG_TOKENIZER_SPIECE : LG_TOKENIZER_BPE;
    if (*ret == LG_TOKENIZER_BPE) {
        LG_TRY(read_int(json, dir, "hidden_size", 512, 1, DIM_MAX, &info->dim));
        LG_TRY(read_int(json, dir, "num_hidden_layers", 12, 1, LAYERS_MAX, &info->layers));
        LG_TRY(read_int(json, dir, "max_position_embeddings", 77, 2, DIM_MAX, &info->length_max));
        info->kind = LG_TEXT_CLIP;
        const cJSON *class =
            cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(json, "architectures"), 0);
        if (cJSON_IsString(class) && !strcmp(class->valuestring, "CLIPTextModelWithProjection"))
            LG_TRY(read_int(json, dir, "projection_dim", 512, 1, DIM_MAX, &info->projection));
        return 0;
    }
    if (strcmp(name, "t5") != 0)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s/config.json: model_type is %.60s: t5 and clip_text_model can be read",
                       dir, name);
    info->kind = LG_TEXT_T5;
    LG_TRY(read_int(json, dir, "d_model", -1, 1, DIM_MAX, &info->dim));
    LG_TRY(read_int(json, dir, "num_layers", -1, 1, LAYERS_MAX, &info->layers));
    return 0;
}

int lg_text_info_load(const char *dir, struct lg_text_info *ret)
{
    cJSON *json = NULL;
    uint64_t config_hash = 0;
    struct lg_text_info info = {0};
    struct lg_tokenizer_files tokenizer;
    lg_tokenizer_kind kind;
    LG_TRY(read_config(dir, &json, &config_hash));
    int rc = read_text(json, dir, &info, &kind);
    cJSON_Delete(json);
    LG_TRY(rc);
    if (lg_tokenizer_files_find(dir, kind, &tokenizer) < 0)
        return LG_FAIL(LG_ERR_CONFIG, "%s", lg_err_message());
    LG_TRY(hash_model(dir, "model", &tokenizer, config_hash, &info.identity));
    *ret = info;
    return 0;
}

int lg_denoiser_shape_identity(const char *dir, uint64_t *ret)
{
    cJSON *json = NULL;
    LG_TRY(read_config(dir, &json, ret));
    cJSON_Delete(json);
    return 0;
}

int lg_denoiser_identity(const char *dir, uint64_t *ret)
{
    cJSON *json = NULL;
    uint64_t config_hash = 0;
    LG_TRY(read_config(dir, &json, &config_hash));
    cJSON_Delete(json);
    LG_TRY(hash_model(dir, "diffusion_pytorch_model", NULL, config_hash, ret));
    return 0;
}
