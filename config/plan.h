/* The plan: everything that follows from the config and the models' config.json, before anything
 * starts: dimensions, the split of a batch, window geometry, who runs. It is written to
 * RUN/plan.json, sealed by its hash, which the board carries: a process that computes another hash
 * refuses to attach.
 *
 * Pure function of (config, model config.json files, machine's instruction set at the first start).
 */
#pragma once
#include "config/buckets.h"
#include "config/config.h"
#include "config/denoisers.h"

typedef enum lg_role {
#define LG_ROLE(name, program) LG_ROLE_##name,
#define LG_ENCODER(name)       LG_ROLE_text_##name,
#include "config/roles.def"
#undef LG_ENCODER
#undef LG_ROLE
    LG_ROLE_COUNT
} lg_role;
const char *lg_role_name(lg_role r);    /* "vae", "text.t5" */
const char *lg_role_program(lg_role r); /* "lg-vae" */
/* -1 when unknown. */
int lg_role_find(const char *name);
/* Text encoders: the role text and those of encoders.def. */
static inline bool lg_role_is_text(lg_role r)
{
    return r >= LG_ROLE_text && r < LG_ROLE_vae;
}
/* Loaders and encoders: they claim samples in the window, and their number may change while a run lives. */
static inline bool lg_role_scales(lg_role r)
{
    return r <= LG_ROLE_vae;
}

/* A text that the ranks get of each sample (config/denoiser_texts.def), and how it is encoded. */
struct lg_plan_text {
    lg_role role; /* of its encoder */
    int length;   /* tokens of a caption */
    int dim;      /* width of a token's state; 0: states are not wanted */
    int pooled;   /* width of the pooled value; 0: it is not wanted */
    int chunk;
    int shards;
};

typedef struct lg_plan {
    /* pictures and latents */
    int frames; /* F; 1: pictures. A clip's frames lie below one another wherever they are */
    int image_height, image_width;      /* H, W: pixels are (3, F, H, W) u8; 0 without a VAE */
    int latent_channels, latent_frames; /* latents are (C, f, h, w) mean + the same of logvar */
    int latent_height, latent_width;
    int factor_time; /* frames of a latent frame, but the first, which is one itself; 1: each is */
    struct lg_buckets buckets; /* samples have these shapes instead; n 0: all have the above */
    double scaling_factor, shift_factor;
    /* conditioning */
    int n_texts;
    struct lg_plan_text text[LG_TEXTS_MAX]; /* (n_texts), in the order of the model's table */
    int num_classes;                        /* 0 without labels */
    /* batch: step s trains n in [s B, (s + 1) B); rank r's share is the r-th of R equal parts */
    int64_t batch, rank_batch, micro_batch;
    int hosts,
        host; /* several hosts (shm/hosts.h), and which of them this plan is of; each has the h-th of H equal parts
                      * of the batch, and R ranks for it */
    /* ranks that hold one copy of the state together; the others hold the same (stages/trainer/shards.h) */
    int shards;
    int sequence; /* ranks that compute a micro-batch together, each on its part of the tokens */
    int scatters; /* 1: gradients leave unit by unit (ZeRO-2, 3) */
    int gathers;  /* 1: weights come so (ZeRO-3, or memory.cast_weights) */
    int apart; /* 1: what ranks and encoders hand each other goes through host memory (parallel.exchange);
                   * with "auto" lgsup finds out, once it has asked for the GPUs */
    int sums_micro_batches; /* 1: each is added up over the ranks, else each rank adds up its own first */
    /* window */
    int64_t window_slots;
    int loader_chunk, vae_chunk;
    /* instances at the first start; 0: the role does not exist in this run */
    int instances[LG_ROLE_COUNT];
    int threads[LG_ROLE_COUNT];
    char isa[16];      /* host instruction set, fixed for the life of the run: "avx512" ... */
    char precision[8]; /* "fp32", "tf32", "bf16" */
    /* of a latent and a text value in the window and of a number in compute: 4, with bf16 2 */
    int element_bytes;
    int64_t lr_steps;
    bool
        is_described; /* its GPUs are not there: their memory is bounded (lg_device_describe); in no file */
    uint64_t bits_hash; /* of the [bits] keys and of the models' identity (config/models.h) */
    /* Of bits_hash and all of the above that decides bits: dimensions, batch, chunks, isa, threads.
     * Not of host, window_slots, shards, scatters, gathers, apart, shards of texts, lr_steps and instances, which may change at a resume. */
    uint64_t hash;
} lg_plan;

/* Samples of a step on one host. */
static inline int64_t lg_plan_host_batch(const lg_plan *p)
{
    return p->batch / LG_MAX(p->hosts, 1);
}
/* Which text this role encodes; -1: the run has no such role, or it is none of a text encoder. */
int lg_plan_text_of(const lg_plan *p, lg_role role);

/* The shapes that samples have, at least one: bucket k's, or the plan's own. */
struct lg_plan_shape {
    int frames, height, width;                      /* pixels; height and width 0 without a VAE */
    int latent_frames, latent_height, latent_width; /* cells */
    int rows;                                       /* samples of it in a micro-batch */
};
/* Elements of one channel. */
static inline size_t lg_plan_shape_pixels(const struct lg_plan_shape *s)
{
    return (size_t)s->frames * (size_t)s->height * (size_t)s->width;
}
static inline size_t lg_plan_shape_cells(const struct lg_plan_shape *s)
{
    return (size_t)s->latent_frames * (size_t)s->latent_height * (size_t)s->latent_width;
}
static inline int lg_plan_shapes(const lg_plan *p)
{
    return LG_MAX(p->buckets.n, 1);
}
struct lg_plan_shape lg_plan_shape(const lg_plan *p, int k);

/* isa: NULL for the machine's best (a first start), else what a resumed run's plan says;
 * LG_ERR_MISMATCH when this machine lacks it. c has passed lg_config_check. */
int lg_plan_make(const lg_config *c, const char *isa, lg_plan *ret);
/* The plan of a run that goes on: keeps old's isa, lr_steps (trainer.max_steps may have grown) and
 * the texts' shards. LG_ERR_MISMATCH, naming the first field, when what decides bits has changed; call
 * lg_config_compatible before, which names keys. */
int lg_plan_resume(const lg_config *c, const lg_plan *old, lg_plan *ret);
/* Writes and reads RUN/plan.json. Read checks the hash. */
int lg_plan_save(const lg_plan *p, const char *path);
int lg_plan_load(const char *path, lg_plan *ret);
/* GPU number that instance `index` of a role computes on; -1 for roles without a device and for all
 * with device = "host". EMA keeper r is with trainer rank r, the checkpoint writer with rank 0; with
 * memory.offload_optimizer they have no device.
 * Does not decide bits: a resumed run may lie on other GPUs. c has passed lg_config_check. */
int lg_plan_gpu(const lg_config *c, lg_role role, int index);
/* Which of the board's turns (shm/turns.h) this instance takes when it computes, with so many instances
 * of each role: its GPU's number, with turns = "always" on the host 0. -1 for none: it computes there
 * alone, its role does not compute much (EMA keeper and checkpoint writer copy), or turns = "never".
 * Below LG_GPUS_MAX. */
int lg_plan_turn(const lg_config *c, const int instances[LG_ROLE_COUNT], lg_role role, int index);
/* GPU numbers are below it, and so is the length of a list of them. */
enum { LG_GPUS_MAX = 1024 };
/* Entry (index mod count) of a list as in trainer.gpus, "0" or "0, 1"; LG_ERR_CONFIG, without an
 * error text, when it is none. */
int lg_gpus_at(const char *list, int index);
/* Best host instruction set: "avx512", "avx2" or "sse2". */
const char *lg_plan_machine_isa(void);
