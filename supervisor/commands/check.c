/* `lgsup check`; see check.h. */
#include "base/cgroup.h"
#include "supervisor/commands/check_private.h"
#include "supervisor/commands/memory_tip.h"
#include "supervisor/run/child.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>

enum { OUTPUT_BYTES_MAX = 1 << 20, ARGS_MAX = 2 * 256 + 8 };
enum { GPU_ROLE_MS = 900000 }; /* choosing the algorithms of a large net, once per machine */

/* ---- asking ---- */

/* They reach each other, unless the config says otherwise. */
static int describe_gpus(struct check *k, const int *number, int n)
{
    char name[LG_DEVICE_TEXT_BYTES];
    for (int i = 0; i < n; i++) {
        k->gpus.gpu[k->gpus.n++].number = number[i];
        snprintf(name, sizeof name, "cuda:%d", number[i]);
        LG_TRY(lg_memory_room(&k->memory, &(struct lg_memory_room){.device = name,
                                                                   .product = "described",
                                                                   .total_bytes = k->described,
                                                                   .free_bytes = k->described}));
    }
    return 0;
}

/* First, while no role has a context on them: what is free counts. */
static int ask_gpus(struct check *k)
{
    int number[LG_RUN_GPUS_MAX], n = lg_run_gpus_used(k->config, k->plan, number);
    char name[LG_DEVICE_TEXT_BYTES];
    LG_TRY(n);
    if (n == 0) return 0;
    if (k->described) return describe_gpus(k, number, n);
    LG_TRY(lg_run_gpus_ask(number, n, &k->gpus));
    LG_TRY(lg_run_gpus_check(k->config, k->plan, &k->gpus));
    k->plan->apart = lg_run_gpus_apart(k->config, k->plan, &k->gpus, &k->from, &k->to);
    for (int i = 0; i < k->gpus.n; i++) {
        const struct lg_run_gpu *g = &k->gpus.gpu[i];
        snprintf(name, sizeof name, "cuda:%d", g->number);
        LG_TRY(lg_memory_room(&k->memory, &(struct lg_memory_room){.device = name,
                                                                   .product = g->name,
                                                                   .total_bytes = g->total_bytes,
                                                                   .free_bytes = g->free_bytes}));
    }
    return 0;
}

/* What could be had without swapping; /proc/meminfo, in KiB. */
static uint64_t host_available(void)
{
    unsigned long long kib = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "re");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1) break;
    if (f) fclose(f);
    return kib << 10;
}

/* The machine's memory, or what the control groups leave of it. */
static int ask_host(struct check *k, const char *own_group)
{
    struct sysinfo info;
    struct lg_cgroup_limit limit;
    char group[LG_PATH_BYTES];
    if (sysinfo(&info) != 0) return 0;
    uint64_t total = (uint64_t)info.totalram * info.mem_unit;
    k->launcher->run_group(k->run, own_group, group);
    lg_cgroup_limit(group, &limit);
    struct lg_memory_room room = {.device = "host",
                                  .product = "",
                                  .group = limit.bytes < total ? limit.group : NULL,
                                  .total_bytes = LG_MIN(total, limit.bytes),
                                  .free_bytes = LG_MIN(host_available(), limit.free_bytes)};
    LG_TRY(lg_memory_room(&k->memory, &room));
    return 0;
}

/* Where each process has a control group of its own, that has a limit of its own. */
static void ask_limits(struct check *k, const char *own_group)
{
    char group[LG_PATH_BYTES];
    struct lg_cgroup_limit limit;
    for (int r = 0; r < LG_ROLE_keeper; r++)
        for (int i = 0; i < k->plan->instances[r]; i++) {
            k->launcher->process_group(k->run, own_group, (lg_role)r, i, group);
            lg_cgroup_limit(group, &limit);
            if (limit.bytes != LG_CGROUP_NONE)
                lg_memory_limit(&k->memory, (lg_role)r, limit.group, limit.bytes);
        }
}

/* more: settings beside the run's own; they count. */
static int begin_role(const struct check *k, lg_role r, const char *const *more, int n_more,
                      struct lg_capture *ret)
{
    char program[LG_PATH_BYTES];
    char *argv[ARGS_MAX] = {program, (char *)(k->described ? "--described" : "--plan"),
                            (char *)k->file};
    int n = 3;
    LG_TRY(lg_program_path(lg_role_program(r), program));
    if (lg_role_is_text(r) && r != LG_ROLE_text) { /* one program for several roles */
        argv[n++] = (char *)"--role";
        argv[n++] = (char *)lg_role_name(r);
    }
    LG_ASSERT(n + 2 * (k->n_set + n_more) + 2 < ARGS_MAX);
    for (int i = 0; i < k->n_set + n_more; i++) {
        argv[n++] = (char *)"--set";
        argv[n++] = (char *)(i < k->n_set ? k->set[i] : more[i - k->n_set]);
    }
    if (k->plan->apart) {
        argv[n++] = (char *)"--set";
        argv[n++] = (char *)"parallel.exchange=host";
    }
    LG_TRY(lg_capture_begin(program, argv, ret));
    return 0;
}

static int end_role(struct check *k, lg_role r, struct lg_capture *c)
{
    char how[64], *text = NULL;
    int code = 0;
    LG_TRY(lg_capture_end(c, OUTPUT_BYTES_MAX, &text, &code));
    int rc;
    if (code == 0) {
        rc = lg_memory_add(&k->memory, r, text);
        k->said[r] = text;
        text = NULL;
    } else {
        lg_exit_text(code, how, sizeof how);
        rc = LG_FAIL(code > 0 && code < LG_EXIT_SIGNAL ? -code : LG_ERR_FAILED,
                     "%s --plan: %s: %.800s", lg_role_program(r), how, text);
    }
    free(text);
    LG_TRY(rc);
    return 0;
}

/* On the host all at once. On GPUs one by one: a role times algorithms there when it meets a shape for
 * the first time, and must be alone to choose well. The first error counts. */
static int ask_roles(struct check *k)
{
    struct lg_capture capture[LG_ROLE_COUNT];
    bool begun[LG_ROLE_COUNT] = {false};
    int rc = 0;
    for (int r = 0; r < LG_ROLE_keeper && rc == 0; r++) {
        if (!k->plan->instances[r]) continue;
        rc = begin_role(k, (lg_role)r, NULL, 0, &capture[r]);
        begun[r] = rc == 0;
        if (!begun[r] || k->gpus.n == 0) continue;
        capture[r].timeout_ms = GPU_ROLE_MS;
        rc = end_role(k, (lg_role)r, &capture[r]);
        begun[r] = false;
    }
    for (int r = 0; r < LG_ROLE_keeper; r++) {
        if (!begun[r]) continue;
        if (rc < 0) lg_child_signal(&capture[r].child, SIGKILL);
        if (rc == 0) {
            rc = end_role(k, (lg_role)r, &capture[r]);
        } else {
            char *text = NULL;
            int ignored;
            lg_capture_end(&capture[r], OUTPUT_BYTES_MAX, &text, &ignored);
            free(text);
        }
    }
    return rc;
}

static int ask(struct check *k)
{
    char own_group[LG_PATH_BYTES];
    lg_cgroup_self(own_group);
    LG_TRY(ask_host(k, own_group));
    ask_limits(k, own_group);
    LG_TRY(ask_gpus(k));
    LG_TRY(ask_roles(k));
    return 0;
}

/* ---- what would fit ---- */

/* What role r says with these settings, for the caller to free; NULL: it ends with an error. */
static char *ask_with(const struct check *k, lg_role r, const char *const *set, int n)
{
    struct lg_capture capture;
    char *text = NULL;
    int code;
    if (begin_role(k, r, set, n, &capture) < 0) return NULL;
    capture.timeout_ms = GPU_ROLE_MS;
    if (lg_capture_end(&capture, OUTPUT_BYTES_MAX, &text, &code) == 0 && code == 0) return text;
    free(text);
    return NULL;
}

/* The settings are about the trainer and the average. */
static bool fits_with(void *of, const char *const *set, int n)
{
    struct check *k = of;
    struct lg_memory m = {0};
    bool fits = true;
    memcpy(m.process_limit, k->memory.process_limit, sizeof m.process_limit);
    for (int i = 0; i < k->memory.n_devices && fits; i++) {
        const struct lg_memory_device *d = &k->memory.device[i];
        fits = lg_memory_room(&m, &(struct lg_memory_room){.device = d->name,
                                                           .product = d->product,
                                                           .group = d->group[0] ? d->group : NULL,
                                                           .total_bytes = d->total_bytes,
                                                           .free_bytes = d->free_bytes}) == 0;
    }
    for (int r = 0; r < LG_ROLE_COUNT && fits; r++) {
        if (!k->said[r]) continue;
        const bool again = r == LG_ROLE_trainer || r == LG_ROLE_ema || r == LG_ROLE_ckpt;
        char *text = again ? ask_with(k, (lg_role)r, set, n) : k->said[r];
        fits = text && lg_memory_add(&m, (lg_role)r, text) == 0;
        if (again) free(text);
    }
    fits = fits && lg_memory_fits(&m, "") == 0;
    lg_memory_free(&m);
    return fits;
}

static int fits(struct check *k)
{
    char tip[LG_MEMORY_TIP_BYTES];
    lg_memory_tip(&k->memory, fits_with, k, tip);
    LG_TRY(lg_memory_fits(&k->memory, tip));
    return 0;
}

/* Recomputation costs time: is there room for less of it? */
static void print_room(struct check *k)
{
    const struct lg_strlist *words = &k->config->memory_recompute;
    char word[LG_MEMORY_TIP_BYTES];
    if (!words->n || !strcmp(words->v[0], "none")) return;
    lg_memory_less_recomputed(&k->memory, fits_with, k, word);
    if (*word)
        printf("note: memory.recompute = \"%s\" fits, too, with less computed twice (no bits "
               "change)\n",
               word);
}

static void free_check(struct check *k)
{
    lg_memory_free(&k->memory);
    for (int r = 0; r < LG_ROLE_COUNT; r++) free(k->said[r]);
    free(k);
}

static int check_plan(struct check *k)
{
    lg_plan plan;
    LG_TRY(lg_config_check(k->config));
    LG_TRY(lg_plan_make(k->config, NULL, &plan));
    k->plan = &plan;
    LG_TRY(ask(k));
    lg_check_print(k);
    LG_TRY(fits(k));
    print_room(k);
    return 0;
}

int lg_check(const struct lg_check_args *a)
{
    size_t described = 0;
    if (a->memory && (!lg_bytes_parse(a->memory, &described) || !described))
        return LG_FAIL(LG_ERR_USAGE, "--memory %s is no size like 24GiB", a->memory);
    struct check *k = calloc(1, sizeof *k);
    lg_config *c;
    if (!k) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the check");
    *k = (struct check){.file = a->file,
                        .set = a->set,
                        .n_set = a->n_set,
                        .described = described,
                        .launcher = &lg_launcher_fork,
                        .from = -1,
                        .to = -1};
    int rc = lg_config_load(a->file, a->set, a->n_set, &c);
    if (rc == 0) {
        k->config = c;
        rc = check_plan(k);
        lg_config_free(&c);
    }
    free_check(k);
    LG_TRY(rc);
    return 0;
}

int lg_check_room(const char *file, lg_run *r)
{
    struct check *k = calloc(1, sizeof *k);
    if (!k) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the check");
    *k = (struct check){.file = file,
                        .config = r->config,
                        .plan = &r->plan,
                        .launcher = lg_launcher_of(r),
                        .run = r};
    int rc = ask(k);
    if (rc == 0) rc = fits(k);
    free_check(k);
    LG_TRY(rc);
    return 0;
}
