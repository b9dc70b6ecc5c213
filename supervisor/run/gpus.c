/* Asking lg-device; see gpus.h. */
#include "supervisor/run/gpus.h"
#include "supervisor/run/child.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OUTPUT_BYTES_MAX = 1 << 18 };
#define BYTES_MAX 9007199254740992.0 /* 2^53: JSON numbers are doubles */

/* Has the role a process there, or a shard, of which a text's encoder may have more than processes? */
static bool role_uses(const lg_config *c, const lg_plan *p, lg_role r, int number)
{
    int n = p->instances[r];
    if (lg_role_is_text(r) && n > 0) {
        const int k = lg_plan_text_of(p, r);
        n = LG_MAX(n, k >= 0 ? p->text[k].shards : 0);
    }
    for (int i = 0; i < n; i++)
        if (lg_plan_gpu(c, r, i) == number) return true;
    return false;
}

int lg_run_gpus_used(const lg_config *c, const lg_plan *p, int ret[LG_RUN_GPUS_MAX])
{
    int n = 0;
    for (int number = 0; number < LG_GPUS_MAX; number++) {
        bool used = false;
        for (int r = 0; r < LG_ROLE_COUNT; r++) used |= role_uses(c, p, (lg_role)r, number);
        if (!used) continue;
        if (n == LG_RUN_GPUS_MAX)
            return LG_FAIL(LG_ERR_CONFIG,
                           "trainer.gpus, vae.gpus and text.gpus name more than %d GPUs",
                           LG_RUN_GPUS_MAX);
        ret[n++] = number;
    }
    return n;
}

/* ---- the answer ---- */

static bool get_text(const cJSON *j, const char *key, char *ret, size_t bytes)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    if (!cJSON_IsString(v) || strlen(v->valuestring) >= bytes) return false;
    strcpy(ret, v->valuestring);
    return true;
}

static bool get_bytes(const cJSON *j, const char *key, uint64_t *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0 && v->valuedouble <= BYTES_MAX)) return false;
    *ret = (uint64_t)v->valuedouble;
    return true;
}

/* "cuda:12" */
static bool get_number(const cJSON *device, int *ret)
{
    int end = 0;
    if (!cJSON_IsString(device) || sscanf(device->valuestring, "cuda:%4d%n", ret, &end) != 1)
        return false;
    return !device->valuestring[end] && *ret >= 0 && *ret < LG_GPUS_MAX;
}

static bool get_peers(const cJSON *list, uint64_t *ret)
{
    const cJSON *entry;
    int k;
    if (!cJSON_IsArray(list)) return false;
    cJSON_ArrayForEach(entry, list)
    {
        if (!get_number(entry, &k)) return false;
        if (k < 64) *ret |= (uint64_t)1 << k;
    }
    return true;
}

static bool get_gpu(const cJSON *j, struct lg_run_gpu *g)
{
    const cJSON *code = cJSON_GetObjectItemCaseSensitive(j, "code");
    if (!get_number(cJSON_GetObjectItemCaseSensitive(j, "device"), &g->number)) return false;
    if (code) {
        if (!cJSON_IsNumber(code) || !(code->valuedouble < 0 && code->valuedouble > -126))
            return false;
        g->code = (int)code->valuedouble;
        const cJSON *error = cJSON_GetObjectItemCaseSensitive(j, "error");
        if (!cJSON_IsString(error)) return false;
        snprintf(g->error, sizeof g->error, "%s", error->valuestring);
        return true;
    }
    return get_text(j, "name", g->name, sizeof g->name) &&
           get_text(j, "capability", g->capability, sizeof g->capability) &&
           get_text(j, "kernels", g->kernels, sizeof g->kernels) &&
           get_text(j, "driver", g->driver, sizeof g->driver) &&
           get_text(j, "runtime", g->runtime, sizeof g->runtime) &&
           get_text(j, "cudnn", g->cudnn, sizeof g->cudnn) &&
           get_bytes(j, "total_bytes", &g->total_bytes) &&
           get_bytes(j, "free_bytes", &g->free_bytes) && g->free_bytes <= g->total_bytes &&
           get_peers(cJSON_GetObjectItemCaseSensitive(j, "peers"), &g->peers);
}

int lg_run_gpus_parse(const char *output, struct lg_run_gpus *ret)
{
    cJSON *json = cJSON_Parse(lg_child_json(output));
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "gpus"), *entry;
    struct lg_run_gpus g = {0};
    bool well = cJSON_IsArray(list);
    cJSON_ArrayForEach(entry, list)
    {
        well = well && g.n < LG_RUN_GPUS_MAX && get_gpu(entry, &g.gpu[g.n]);
        if (well) g.n++;
    }
    cJSON_Delete(json);
    if (!well) return LG_FAIL(LG_ERR_CORRUPT, "lg-device: not the list of GPUs that was asked for");
    *ret = g;
    return 0;
}

/* An error's message without the program's name in front of it, or what else it said. */
static const char *complaint(char *output)
{
    static const char prefix[] = "lg-device: ";
    char *at = strstr(output, prefix);
    at = at ? at + strlen(prefix) : output;
    at[strcspn(at, "\n")] = 0;
    return at;
}

int lg_run_gpus_ask(const int *number, int n, struct lg_run_gpus *ret)
{
    char program[LG_PATH_BYTES], name[LG_RUN_GPUS_MAX][16], *text, how[64];
    char *argv[LG_RUN_GPUS_MAX + 3] = {program, (char *)"--json"};
    int code;
    LG_ASSERT(n <= LG_RUN_GPUS_MAX);
    for (int i = 0; i < n; i++) {
        snprintf(name[i], sizeof name[i], "cuda:%d", number[i]);
        argv[2 + i] = name[i];
    }
    LG_TRY(lg_program_path("lg-device", program));
    LG_TRY(lg_child_capture(program, argv, OUTPUT_BYTES_MAX, &text, &code));
    int rc = 0;
    if (*lg_child_json(text)) {
        rc = lg_run_gpus_parse(text, ret);
    } else if (code > 0 && code < LG_EXIT_SIGNAL) {
        rc = LG_FAIL(-code, "%s", complaint(text));
    } else {
        lg_exit_text(code, how, sizeof how);
        rc = LG_FAIL(LG_ERR_FAILED, "lg-device, which asks for the GPUs: %s: %.800s", how, text);
    }
    free(text);
    return rc;
}

/* ---- is it enough ---- */

static const struct lg_run_gpu *find(const struct lg_run_gpus *g, int number)
{
    for (int i = 0; i < g->n; i++)
        if (g->gpu[i].number == number) return &g->gpu[i];
    return NULL;
}

/* Must one reach the other's memory, and cannot? */
static bool is_pair_apart(const lg_config *c, const lg_plan *p, const struct lg_run_gpu *a,
                          const struct lg_run_gpu *b)
{
    bool works =
        role_uses(c, p, LG_ROLE_trainer, a->number) || role_uses(c, p, LG_ROLE_trainer, b->number);
    for (lg_role r = LG_ROLE_text; lg_role_is_text(r); r++) /* an encoder's shards lie on both */
        works = works || (role_uses(c, p, r, a->number) && role_uses(c, p, r, b->number));
    return works && !(b->number < 64 && (a->peers >> b->number & 1));
}

static bool find_apart(const lg_config *c, const lg_plan *p, const struct lg_run_gpus *g,
                       int *ret_from, int *ret_to)
{
    int number[LG_RUN_GPUS_MAX];
    const int n = lg_run_gpus_used(c, p, number);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++) {
            if (k == i || !is_pair_apart(c, p, find(g, number[i]), find(g, number[k]))) continue;
            *ret_from = number[i];
            *ret_to = number[k];
            return true;
        }
    return false;
}

bool lg_run_gpus_apart(const lg_config *c, const lg_plan *p, const struct lg_run_gpus *g,
                       int *ret_from, int *ret_to)
{
    const char *no_peer = getenv("LG_CUDA_NO_PEER");
    *ret_from = *ret_to = -1;
    if (!strcmp(c->parallel_exchange, "host")) return true;
    const bool apart = find_apart(c, p, g, ret_from, ret_to);
    const bool forced = g->n > 0 && no_peer && *no_peer && strcmp(no_peer, "0") != 0;
    return !strcmp(c->parallel_exchange, "auto") && (apart || forced);
}

int lg_run_gpus_check(const lg_config *c, const lg_plan *p, const struct lg_run_gpus *g)
{
    int number[LG_RUN_GPUS_MAX], n = lg_run_gpus_used(c, p, number);
    LG_TRY(n);
    for (int i = 0; i < n; i++) {
        const struct lg_run_gpu *a = find(g, number[i]);
        if (!a) return LG_FAIL(LG_ERR_CORRUPT, "lg-device says nothing of cuda:%d", number[i]);
        if (a->code) return LG_FAIL(a->code, "%s", a->error);
    }
    int from, to;
    if (strcmp(c->parallel_exchange, "gpu") != 0 || !find_apart(c, p, g, &from, &to)) return 0;
    return LG_FAIL(
        LG_ERR_CONFIG,
        "cuda:%d cannot reach the memory of cuda:%d, as parallel.exchange = \"gpu\" asks: "
        "leave it out, put all on one GPU with trainer.gpus, vae.gpus and text.gpus, or "
        "take GPUs of one NVLink or PCIe group (nvidia-smi topo -p2p r shows them)",
        from, to);
}

bool lg_run_gpus_are_new(const lg_config *c, const lg_plan *p, lg_role role, int n)
{
    return n > p->instances[role] && lg_plan_gpu(c, role, 0) >= 0;
}

int lg_run_gpus_scale(const lg_run *r, lg_role role, int n)
{
    struct lg_run_gpus gpus;
    int number[LG_RUN_GPUS_MAX], from, to;
    lg_plan plan = r->plan;
    if (!lg_run_gpus_are_new(r->config, &plan, role, n)) return 0;
    plan.instances[role] = n;
    const int used = lg_run_gpus_used(r->config, &plan, number);
    LG_TRY(used);
    LG_TRY(lg_run_gpus_ask(number, used, &gpus));
    LG_TRY(lg_run_gpus_check(r->config, &plan, &gpus));
    if (plan.apart || !lg_run_gpus_apart(r->config, &plan, &gpus, &from, &to) || from < 0) return 0;
    return LG_FAIL(
        LG_ERR_CONFIG,
        "%d instances of %s would be on GPUs of which cuda:%d cannot reach the memory of "
        "cuda:%d, and this run hands over straight from GPU to GPU: name others in "
        "%s.gpus, or `lgsup stop` it, and start it with so many instances, which takes "
        "the way through host memory",
        n, lg_role_name(role), from, to, lg_role_name(role));
}
