/* The models' config.json, read with cJSON. Absent keys have the defaults of the library that
 * writes them (diffusers' AutoencoderKL); sizes are checked before they are used. */
#include "config/models.h"
#include "base/fs.h"
#include "base/json_tree.h"
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

static int hash_parts(const char *dir, const char *stem, XXH3_state_t *state, int *ret_parts)
{
    struct dirent **entries = NULL;
    int n = scandir(dir, &entries, NULL, compare_names), rc = 0, parts = 0;
    if (n < 0) return LG_FAIL(lg_err_from_errno(errno), "cannot list %s: %s", dir, strerror(errno));
    for (int i = 0; i < n; i++) {
        if (rc == 0 && is_part(entries[i]->d_name, stem)) {
            rc = hash_weights_file(dir, entries[i]->d_name, state);
            parts++;
        }
        free(entries[i]);
    }
    free(entries);
    *ret_parts = parts;
    return rc;
}

/* tokenizer: the path of a file that belongs to the model's bits, or NULL. */
static int hash_model(const char *dir, const char *stem, const char *tokenizer,
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
        if (!lg_path_exists(tokenizer)) {
            rc = LG_FAIL(LG_ERR_CONFIG, "%s does not exist", tokenizer);
            goto out;
        }
        LG_TRY_GOTO(rc, lg_hash_file(tokenizer, &hash, NULL), out);
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
            rc = LG_FAIL(LG_ERR_CONFIG, "%s does not exist, nor parts of it", path);
            goto out;
        }
    }
    *ret = XXH3_64bits_digest(state);
out:
    XXH3_freeState(state);
    return rc;
}

/* ---- the tokenizer ---- */

int lg_tokenizer_file(const char *dir, char ret[LG_PATH_BYTES])
{
    char beside[LG_PATH_BYTES];
    const char *name = strrchr(dir, '/');
    const char part[] = "text_encoder";
    LG_TRY(lg_path(ret, "%s/spiece.model", dir));
    name = name ? name + 1 : dir;
    if (lg_path_exists(ret) || strncmp(name, part, sizeof part - 1)) return 0;
    LG_TRY(lg_path(beside, "%.*stokenizer%s/spiece.model", (int)(name - dir), dir,
                   name + sizeof part - 1));
    if (lg_path_exists(beside)) LG_TRY(lg_path(ret, "%s", beside));
    return 0;
}

/* ---- the two kinds of model ---- */

static int read_vae(const cJSON *json, const char *dir, struct lg_vae_info *info)
{
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(json, "_class_name");
    if (cJSON_IsString(name) && strcmp(name->valuestring, "AutoencoderKL") != 0)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s/config.json: _class_name is %.60s: expected AutoencoderKL", dir,
                       name->valuestring);
    const cJSON *blocks = cJSON_GetObjectItemCaseSensitive(json, "block_out_channels");
    int n = blocks ? cJSON_GetArraySize(blocks) : 1;
    if ((blocks && !cJSON_IsArray(blocks)) || n < 1 || n > BLOCKS_MAX)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s/config.json: block_out_channels: expected a list of 1 to %d entries",
                       dir, BLOCKS_MAX);
    info->factor = 1 << (n - 1);
    LG_TRY(read_int(json, dir, "latent_channels", 4, 1, 1024, &info->latent_channels));
    LG_TRY(read_num(json, dir, "scaling_factor", 0.18215, &info->scaling_factor));
    LG_TRY(read_num(json, dir, "shift_factor", 0, &info->shift_factor));
    if (info->scaling_factor == 0)
        return LG_FAIL(LG_ERR_CONFIG, "%s/config.json: scaling_factor is 0", dir);
    return 0;
}

int lg_vae_info_load(const char *dir, struct lg_vae_info *ret)
{
    cJSON *json = NULL;
    uint64_t config_hash = 0;
    struct lg_vae_info info = {0};
    LG_TRY(read_config(dir, &json, &config_hash));
    int rc = read_vae(json, dir, &info);
    cJSON_Delete(json);
    LG_TRY(rc);
    LG_TRY(hash_model(dir, "diffusion_pytorch_model", NULL, config_hash, &info.identity));
    *ret = info;
    return 0;
}

int lg_text_info_load(const char *dir, struct lg_text_info *ret)
{
    cJSON *json = NULL;
    uint64_t config_hash = 0;
    struct lg_text_info info = {0};
    char tokenizer[LG_PATH_BYTES];
    LG_TRY(lg_tokenizer_file(dir, tokenizer));
    LG_TRY(read_config(dir, &json, &config_hash));
    int rc = read_int(json, dir, "d_model", -1, 1, DIM_MAX, &info.dim);
    if (rc == 0) rc = read_int(json, dir, "num_layers", -1, 1, LAYERS_MAX, &info.layers);
    cJSON_Delete(json);
    LG_TRY(rc);
    LG_TRY(hash_model(dir, "model", tokenizer, config_hash, &info.identity));
    *ret = info;
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
