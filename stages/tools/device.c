/* lg-device: what GPUs this machine has and what each can do. A program of its own, so that lgsup,
 * which runs it for `doctor`, `check` and `start`, never loads a driver's library. */
#include "base/check.h"
#include "kernels/info.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage_text[] =
    "usage: lg-device [--json] [cuda:K ...]     default: every GPU of the machine\n"
    "  prints name, compute capability, the path of kernels that it gets, CUDA of driver and "
    "build, cuDNN, memory, reachable GPUs;\n"
    "  exit code: of the first GPU that cannot be used (docs/exit-codes.md)";

enum { GPUS_MAX = LG_DEVICE_PEERS_MAX, NAME_BYTES = 16 };

static cJSON *as_json(const char *device, const struct lg_device_info *g)
{
    char peer[NAME_BYTES];
    cJSON *j = cJSON_CreateObject(), *peers = cJSON_CreateArray();
    cJSON_AddStringToObject(j, "device", device);
    cJSON_AddStringToObject(j, "name", g->name);
    cJSON_AddStringToObject(j, "capability", g->capability);
    cJSON_AddStringToObject(j, "kernels", g->kernels);
    cJSON_AddStringToObject(j, "driver", g->driver);
    cJSON_AddStringToObject(j, "runtime", g->runtime);
    cJSON_AddStringToObject(j, "cudnn", g->cudnn);
    cJSON_AddNumberToObject(j, "total_bytes", (double)g->total_bytes);
    cJSON_AddNumberToObject(j, "free_bytes", (double)g->free_bytes);
    for (int k = 0; k < LG_DEVICE_PEERS_MAX; k++) {
        if (!(g->peers >> k & 1)) continue;
        snprintf(peer, sizeof peer, "cuda:%d", k);
        cJSON_AddItemToArray(peers, cJSON_CreateString(peer));
    }
    cJSON_AddItemToObject(j, "peers", peers);
    return j;
}

static void print_plain(const char *device, const struct lg_device_info *g)
{
    const double gib = 1 << 30;
    printf("%s  %s, compute capability %s, kernels of %s\n", device, g->name, g->capability,
           g->kernels);
    printf("        %.1f of %.1f GiB are free\n", (double)g->free_bytes / gib,
           (double)g->total_bytes / gib);
    printf("        CUDA %s of the driver, %s of this build; cuDNN %s\n", g->driver, g->runtime,
           g->cudnn[0] ? g->cudnn : "is missing");
    printf("        reaches");
    for (int k = 0; k < LG_DEVICE_PEERS_MAX; k++)
        if (g->peers >> k & 1) printf(" cuda:%d", k);
    printf("%s\n", g->peers ? "" : " no other GPU");
}

/* The exit code that one GPU gives; what is wrong with it becomes part of the answer. */
static int tell(const char *device, cJSON *list)
{
    struct lg_device_info info;
    int rc = lg_device_info(device, &info);
    if (rc == 0 && list)
        cJSON_AddItemToArray(list, as_json(device, &info));
    else if (rc == 0)
        print_plain(device, &info);
    else if (list) {
        cJSON *j = cJSON_CreateObject();
        cJSON_AddStringToObject(j, "device", device);
        cJSON_AddStringToObject(j, "error", lg_err_message());
        cJSON_AddNumberToObject(j, "code", rc);
        cJSON_AddItemToArray(list, j);
    } else {
        printf("%s  cannot be used: %s\n", device, lg_err_message());
    }
    lg_err_clear();
    return -rc;
}

static int usage(void)
{
    fprintf(stderr, "%s\n", usage_text);
    return -LG_ERR_USAGE;
}

int main(int argc, char **argv)
{
    char all[GPUS_MAX][NAME_BYTES];
    const char *device[GPUS_MAX];
    int n = 0, count, exit_code = 0;
    bool json = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--json"))
            json = true;
        else if (argv[i][0] == '-' || n == GPUS_MAX)
            return usage();
        else
            device[n++] = argv[i];
    }
    const bool all_of_them = n == 0;
    int rc = lg_device_count("cuda", &count);
    if (rc < 0) {
        fprintf(stderr, "lg-device: %s\n", lg_err_message());
        return -rc;
    }
    for (int k = 0; all_of_them && k < LG_MIN(count, GPUS_MAX); k++) {
        snprintf(all[k], sizeof all[k], "cuda:%d", k);
        device[n++] = all[k];
    }
    cJSON *j = json ? cJSON_CreateObject() : NULL, *list = cJSON_AddArrayToObject(j, "gpus");
    for (int i = 0; i < n; i++) {
        int code = tell(device[i], list);
        if (!exit_code) exit_code = code;
    }
    char *text = cJSON_Print(j);
    if (text) puts(text);
    free(text);
    cJSON_Delete(j);
    return exit_code;
}
