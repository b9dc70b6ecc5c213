/* What a run needs on each device against what is there: the sum over what the roles print
 * (`lg-<role> --plan`), and the sentence when it does not fit. Asks nobody itself.
 *
 * A role prints
 *     {"regions": [{"name": "vae/0/weights", "device": "cuda:0", "bytes": 1}, ...],
 *      "private": [{"device": "cuda:0", "bytes": 2, "instances": 3, "activations": 1, "note": "for people"}, ...]}
 * A region that several roles name counts once. Private memory is that of these instances together; on
 * a GPU each of them has a CUDA context too, which is counted apart. Activations are a part of what a trainer rank has of it. */
#pragma once
#include "base/bytes.h"
#include "config/plan.h"
#include "shm/layout.h"
#include <stdio.h>

enum {
    LG_MEMORY_DEVICES_MAX = 66,
    LG_DEVICE_TEXT_BYTES = 16,
    LG_GROUP_TEXT_BYTES = 256,
    LG_NOTE_BYTES = 512
};
/* A context with the libraries' handles, as nvidia-smi shows it for a process that has allocated
 * nothing: 530 MiB on an H200 with CUDA 13.0 and its driver, rounded up. */
#define LG_CUDA_CONTEXT_BYTES (544ull << 20)

/* GPU memory behind an fd comes in whole pieces of this size (cuMemGetAllocationGranularity). */
#define LG_CUDA_PIECE_BYTES (2ull << 20)

struct lg_memory_device {
    char name[LG_DEVICE_TEXT_BYTES]; /* "host", "cuda:1" */
    char product[64];                /* "NVIDIA H200"; "" for the host or unknown */
    uint64_t region_bytes, private_bytes[LG_ROLE_COUNT];
    uint64_t contexts;                /* processes with a CUDA context on it */
    uint64_t activations, ranks;      /* of the ranks on it together; how many they are */
    uint64_t total_bytes, free_bytes; /* what is there; total 0: unknown */
    char group[LG_GROUP_TEXT_BYTES];  /* the control group whose limit total_bytes is; "": none */
};

struct lg_memory_region {
    char name[LG_REGION_NAME_BYTES];
    int device;     /* place in the list below */
    uint64_t bytes; /* on a GPU in whole pieces */
};

/* What one process of a role may have on the host. */
struct lg_memory_limit {
    uint64_t bytes;
    char group[LG_GROUP_TEXT_BYTES]; /* whose limit it is; "": there is none */
};

struct lg_memory {
    struct lg_memory_device device[LG_MEMORY_DEVICES_MAX];
    int n_devices;
    struct lg_memory_region *region;
    int n_regions, regions_cap;
    bool asked[LG_ROLE_COUNT];               /* whose answers are in it */
    char note[LG_ROLE_COUNT][LG_NOTE_BYTES]; /* on its private memory, for people; "": none */
    uint64_t process_bytes[LG_ROLE_COUNT];   /* private memory of one process on the host */
    struct lg_memory_limit process_limit[LG_ROLE_COUNT];
};

/* m begins as {0}; free it in any case. */
void lg_memory_free(struct lg_memory *m);
/* Adds what role r has printed, once; log lines may stand around the JSON. LG_ERR_CORRUPT for text that is
 * not as above, LG_ERR_MISMATCH when two roles tell different things of one region. */
int lg_memory_add(struct lg_memory *m, lg_role r, const char *output);
/* What is there. */
struct lg_memory_room {
    const char *device, *product;
    const char *group; /* as in struct lg_memory_device; NULL: none */
    uint64_t total_bytes, free_bytes;
};
int lg_memory_room(struct lg_memory *m, const struct lg_memory_room *room);
/* A limit of one process of role r; of several the least counts. */
void lg_memory_limit(struct lg_memory *m, lg_role r, const char *group, uint64_t bytes);

uint64_t lg_memory_private(const struct lg_memory_device *d);
uint64_t lg_memory_contexts(const struct lg_memory_device *d);
uint64_t lg_memory_need(const struct lg_memory_device *d); /* all of it */
/* A GPU that has less than is needed of it, whoever else uses it; NULL: none. */
const struct lg_memory_device *lg_memory_small_gpu(const struct lg_memory *m);
/* LG_ERR_NOSPACE, naming device, need, room and what to change, when a GPU's free memory or all of
 * the host's is less than the need; or when one process needs more private memory than it may have.
 * tip: of a GPU that is too small, what to change first, "set ..."; "": nothing is known. */
int lg_memory_fits(const struct lg_memory *m, const char *tip);
/* Regions, then a block for each device. */
void lg_memory_print(const struct lg_memory *m, FILE *out);
