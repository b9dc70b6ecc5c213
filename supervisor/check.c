/* `lgsup check`; see check.h. */
#include "supervisor/check.h"
#include "config/plan.h"
#include "supervisor/child.h"
#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>

enum { OUTPUT_BYTES_MAX = 1 << 20, ARGS_MAX = 2 * 256 + 4, DEVICES_MAX = 16 };

struct check {
    const char *file;
    const char *const *set;
    int n_set;
    const lg_plan *plan;
    struct {
        char name[32];
        double bytes;
    } device[DEVICES_MAX];
    int n_devices;
    double private_bytes;
    cJSON *role[LG_ROLE_COUNT]; /* what each role has printed, NULL: not in this run */
};

static const char *blast_radius(lg_role r)
{
    switch (r) {
    case LG_ROLE_loader:
    case LG_ROLE_text:
    case LG_ROLE_vae:
        return "its claimed chunks pass to the siblings or its replacement";
    case LG_ROLE_trainer:
        return "its part of the step in flight is computed again; the others wait";
    case LG_ROLE_ema:
        return "nothing; catches up from the committed weights";
    case LG_ROLE_ckpt:
        return "nothing; its replacement writes what is staged";
    case LG_ROLE_keeper:
        return "nothing; refilled from lgsup's copies";
    case LG_ROLE_lgsup:
        return "nothing; training goes on, `lgsup start` adopts it";
    case LG_ROLE_COUNT:
        break;
    }
    return "";
}

/* "1.5 GiB" */
static const char *human(double bytes, char ret[32])
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t u = 0;
    while (bytes >= 1024 && u + 1 < LG_ARRAY_LEN(unit)) bytes /= 1024, u++;
    snprintf(ret, 32, u ? "%.1f %s" : "%.0f %s", bytes, unit[u]);
    return ret;
}

static int ask_role(struct check *k, lg_role r)
{
    char program[LG_PATH_BYTES], how[64], *text = NULL;
    char *argv[ARGS_MAX] = {program, (char *)"--plan", (char *)k->file};
    int n = 3, code;
    LG_TRY(lg_program_path(lg_role_program(r), program));
    for (int i = 0; i < k->n_set; i++) {
        argv[n++] = (char *)"--set";
        argv[n++] = (char *)k->set[i];
    }
    LG_TRY(lg_child_capture(program, argv, OUTPUT_BYTES_MAX, &text, &code));
    const char *json = strchr(text, '{');
    k->role[r] = code == 0 && json ? cJSON_Parse(json) : NULL;
    int rc = 0;
    if (!k->role[r]) {
        lg_exit_text(code, how, sizeof how);
        rc = LG_FAIL(code > 0 && code < LG_EXIT_SIGNAL ? -code : LG_ERR_FAILED,
                     "%s --plan: %s: %.800s", lg_role_program(r), how, text);
    }
    free(text);
    return rc;
}

static double number(const cJSON *j, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    return cJSON_IsNumber(v) ? v->valuedouble : 0;
}

static const char *string(const cJSON *j, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    return cJSON_IsString(v) ? v->valuestring : "?";
}

static void add_device(struct check *k, const char *name, double bytes)
{
    int d = 0;
    while (d < k->n_devices && strcmp(k->device[d].name, name) != 0) d++;
    if (d == DEVICES_MAX) return;
    if (d == k->n_devices) snprintf(k->device[k->n_devices++].name, 32, "%s", name);
    k->device[d].bytes += bytes;
}

static void print_processes(struct check *k)
{
    char size[32];
    printf("%-8s %9s %7s %12s  %s\n", "role", "processes", "threads", "private", "when one dies");
    for (int r = 0; r < LG_ROLE_COUNT; r++) {
        int n = k->plan->instances[r];
        if (n == 0) continue;
        double private_bytes = k->role[r] ? number(k->role[r], "private_bytes") : 0;
        k->private_bytes += private_bytes;
        printf("%-8s %9d %7d %12s  %s\n", lg_role_name((lg_role)r), n, k->plan->threads[r],
               k->role[r] ? human(private_bytes, size) : "small", blast_radius((lg_role)r));
    }
}

/* A region that several roles map is listed by the first that names it. */
static bool listed_before(const struct check *k, int role, const char *name)
{
    for (int r = 0; r < role; r++) {
        const cJSON *region;
        cJSON_ArrayForEach(region, cJSON_GetObjectItemCaseSensitive(
                                       k->role[r], "regions")) if (!strcmp(string(region, "name"),
                                                                           name)) return true;
    }
    return false;
}

static void print_regions(struct check *k)
{
    char size[32];
    printf("\n%-40s %-8s %12s\n", "region", "device", "bytes");
    for (int r = 0; r < LG_ROLE_COUNT; r++) {
        const cJSON *region;
        cJSON_ArrayForEach(region, cJSON_GetObjectItemCaseSensitive(k->role[r], "regions"))
        {
            const char *name = string(region, "name"), *device = string(region, "device");
            if (listed_before(k, r, name)) continue;
            add_device(k, device, number(region, "bytes"));
            printf("%-40s %-8s %12s\n", name, device, human(number(region, "bytes"), size));
        }
    }
}

static void print_sums(const struct check *k)
{
    char size[32], available[32];
    printf("\n");
    double host = k->private_bytes;
    for (int d = 0; d < k->n_devices; d++) {
        printf("regions on %-8s %12s\n", k->device[d].name, human(k->device[d].bytes, size));
        if (!strcmp(k->device[d].name, "host")) host += k->device[d].bytes;
    }
    printf("private memory      %12s\n", human(k->private_bytes, size));
    struct sysinfo info;
    if (sysinfo(&info) != 0) return;
    double total = (double)info.totalram * info.mem_unit;
    printf("host, together      %12s of %s\n", human(host, size), human(total, available));
    if (host > total) printf("warning: that is more memory than this machine has\n");
}

static void print_plan(const lg_config *c, const lg_plan *p)
{
    printf("%s: %s, %" PRId64 " steps of %" PRId64 " samples (%d ranks, micro-batch %" PRId64
           "), %s\n",
           c->job_name, c->model_kind, c->trainer_max_steps, p->batch,
           p->instances[LG_ROLE_trainer], p->micro_batch, p->isa);
    printf("run directory %s\n", c->job_dir);
    printf("window of %" PRId64 " samples; latents (%d, %d, %d)", p->window_slots,
           p->latent_channels, p->latent_size, p->latent_size);
    if (p->text_dim) printf("; text (%d, %d)", p->text_length, p->text_dim);
    if (p->num_classes) printf("; %d classes", p->num_classes);
    printf("\nplan %016" PRIx64 "\n\n", p->hash);
}

static int check_plan(struct check *k, const lg_config *c)
{
    lg_plan plan;
    LG_TRY(lg_config_check(c));
    LG_TRY(lg_plan_make(c, NULL, &plan));
    k->plan = &plan;
    for (int r = 0; r < LG_ROLE_keeper; r++)
        if (plan.instances[r]) LG_TRY(ask_role(k, (lg_role)r));
    print_plan(c, &plan);
    print_processes(k);
    print_regions(k);
    print_sums(k);
    return 0;
}

int lg_check(const char *file, const char *const *set, int n_set)
{
    struct check k = {.file = file, .set = set, .n_set = n_set};
    lg_config *c;
    LG_TRY(lg_config_load(file, set, n_set, &c));
    int rc = check_plan(&k, c);
    for (int r = 0; r < LG_ROLE_COUNT; r++) cJSON_Delete(k.role[r]);
    lg_config_free(&c);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
