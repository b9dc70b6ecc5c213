/* What `lgsup check` prints; see check.h. */
#include "base/printable.h"
#include "config/texts.h"
#include "supervisor/commands/check_private.h"
#include "supervisor/core/intensity.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *blast_radius(lg_role r)
{
    if (lg_role_scales(r)) return "its claimed chunks pass to the siblings or its replacement";
    switch (r) {
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
    default:
        return "";
    }
}

/* "host", "cuda:0,1". EMA keeper and checkpoint writer work where the ranks' state is. */
static void places_of(const struct check *k, lg_role r, char *ret, size_t bytes)
{
    const bool on_gpus = !k->config->memory_offload_optimizer;
    if ((r == LG_ROLE_ema || r == LG_ROLE_ckpt) && on_gpus) r = LG_ROLE_trainer;
    FILE *out = fmemopen(ret, bytes, "w");
    LG_ASSERT(out);
    const char *before = "cuda:";
    for (int g = 0; g < k->gpus.n; g++)
        for (int i = 0; i < k->plan->instances[r]; i++) {
            if (lg_plan_gpu(k->config, r, i) != k->gpus.gpu[g].number) continue;
            fprintf(out, "%s%d", before, k->gpus.gpu[g].number);
            before = ",";
            break;
        }
    if (*before == 'c') fputs("host", out);
    fclose(out);
    ret[bytes - 1] = 0;
}

/* "5 in 60 s": more without a committed step park the run. */
static void restarts_of(const lg_config *c, lg_role r, char *ret, size_t bytes)
{
    snprintf(ret, bytes, "-");
    if (r >= LG_ROLE_keeper) return;
    struct lg_restart_policy p = lg_restart_policy(c, r);
    snprintf(ret, bytes, "%" PRId64 " in %" PRId64 " s", p.deaths_max, p.window_s);
}

static void print_processes(const struct check *k)
{
    char places[LG_RUN_GPUS_MAX * 3 + 8], restarts[48];
    const int width = k->plan->n_texts > 1 ? 11 : 8; /* "text.clip_l" */
    printf("%-*s %9s %7s  %-10s %-12s %s\n", width, "role", "processes", "threads", "device",
           "restarts", "when one dies");
    for (int r = 0; r < LG_ROLE_COUNT; r++) {
        int n = k->plan->instances[r];
        if (n == 0) continue;
        places_of(k, (lg_role)r, places, sizeof places);
        restarts_of(k->config, (lg_role)r, restarts, sizeof restarts);
        printf("%-*s %9d %7d  %-10s %-12s %s\n", width, lg_role_name((lg_role)r), n,
               k->plan->threads[r], places, restarts, blast_radius((lg_role)r));
    }
}

static void print_gpus(const struct check *k)
{
    if (k->described && k->gpus.n) {
        printf("\nGPUs are described, none is asked: kernels of 8.0; workspaces are bounds of what "
               "libraries "
               "may want\n");
        return;
    }
    for (int i = 0; i < k->gpus.n; i++) {
        const struct lg_run_gpu *g = &k->gpus.gpu[i];
        lg_print(stdout,
                 "%scuda:%d %s, kernels of %s, CUDA %s of the driver, %s of this build, "
                 "cuDNN %s\n",
                 i ? "" : "\n", g->number, g->name, g->kernels, g->driver, g->runtime,
                 g->cudnn[0] ? g->cudnn : "is missing");
        if (!g->cudnn[0])
            printf("note: without cuDNN attention and convolutions run on slower kernels: install "
                   "it, or name libcudnn.so.9 in $LG_CUDNN\n");
    }
}

static void print_way(const struct check *k)
{
    if (k->plan->apart)
        printf("what ranks and encoders hand each other goes through host memory");
    else if (k->gpus.n > 1)
        printf("what ranks and encoders hand each other goes straight from GPU to GPU");
    else
        return;
    if (k->plan->apart && k->from >= 0)
        printf(": cuda:%d cannot reach the memory of cuda:%d", k->from, k->to);
    printf("\n");
}

static void print_warnings(const struct check *k)
{
    const struct lg_memory_device *host = &k->memory.device[0]; /* of ask_host */
    if (host->total_bytes && lg_memory_need(host) > host->free_bytes)
        printf("warning: the host has less than that free now: it will swap, or end processes\n");
}

/* How many pictures or clips each has, the data set knows. */
static void print_buckets(const lg_plan *p)
{
    const struct lg_buckets *b = &p->buckets;
    printf("\nbuckets of %d shapes, %sheight x width * samples of a micro-batch (what each holds: "
           "lgsup data):",
           b->n, p->frames > 1 ? "(frames x) " : "");
    for (int k = 0; k < b->n; k++) {
        char shape[LG_BUCKET_TEXT_BYTES];
        printf("%s%s*%d", k % 8 ? "  " : "\n    ", lg_bucket_text(&b->of[k], shape), b->of[k].rows);
    }
}

static void print_text(const struct lg_plan_text *t)
{
    printf("; %s", lg_role_name(t->role));
    if (t->dim) printf(" (%d, %d)", t->length, t->dim);
    if (t->pooled) printf("%s pooled (%d)", t->dim ? "," : "", t->pooled);
}

/* The text for which no encoder is named. */
static void print_zeros(const lg_config *c, const lg_plan *p)
{
    struct lg_text_config text[LG_TEXTS_MAX] = {0};
    lg_config_texts(c, text);
    if (p->n_texts && p->n_texts < LG_TEXTS_MAX && text[p->n_texts].info)
        printf("; %" PRId64 " zeros in place of %s, which has no model", text[p->n_texts].length,
               text[p->n_texts].section);
}

static void print_plan(const lg_config *c, const lg_plan *p)
{
    lg_print(stdout,
             "%s: %s, %" PRId64 " steps of %" PRId64 " samples (%d ranks, micro-batch %" PRId64
             "), %s, %s\n",
             c->job_name, c->model_kind, c->trainer_max_steps, p->batch,
             p->instances[LG_ROLE_trainer], p->micro_batch, p->isa, p->precision);
    lg_print(stdout, "run directory %s\n", c->job_dir);
    printf("window of %" PRId64 " samples", p->window_slots);
    if (p->frames > 1) printf(" of %d frames", p->frames);
    printf("; latents (%d, ", p->latent_channels);
    if (p->latent_frames > 1) printf("%d, ", p->latent_frames);
    printf("%d, %d)", p->latent_height, p->latent_width);
    for (int k = 0; k < p->n_texts; k++) print_text(&p->text[k]);
    print_zeros(c, p);
    if (p->num_classes) printf("; %d classes", p->num_classes);
    if (p->buckets.n) print_buckets(p);
    printf("\nplan %016" PRIx64 "\n\n", p->hash);
}

/* What a published model decided, and the file that says so. */
static void print_chosen(const lg_config *c)
{
    bool any = false;
    for (int i = 0; i < lg_config_keys(); i++) {
        if (!c->chosen[i]) continue;
        char *line = lg_config_key_text(c, i);
        lg_print(stdout, "%-50s from %s\n", line, c->chosen[i]);
        free(line);
        any = true;
    }
    if (any) printf("\n");
}

void lg_check_print(const struct check *k)
{
    print_plan(k->config, k->plan);
    print_chosen(k->config);
    print_processes(k);
    print_gpus(k);
    print_way(k);
    printf("\n");
    lg_memory_print(&k->memory, stdout);
    print_warnings(k);
    fflush(stdout);
}
