/* What devices there are and what they can do, told without opening one for work: for `lg-device`,
 * which `lgsup doctor` and `check` ask. Backends without such devices (host, ref64) have nothing to
 * tell. */
#pragma once
#include <stdint.h>

enum { LG_DEVICE_PEERS_MAX = 64 };

struct lg_device_info {
    char name[64];       /* "NVIDIA H200" */
    char capability[16]; /* its compute capability, "9.0" */
    char kernels[64]; /* whose path it gets: "9.0"; "8.0, compiled by the driver from PTX of 8.0" */
    char driver[16];  /* the newest CUDA that the driver knows, "13.0" */
    char runtime[16]; /* the CUDA of this build */
    char cudnn[16];   /* "9.14.0"; "" where it is not installed: slower kernels stand in */
    uint64_t total_bytes;
    uint64_t free_bytes; /* at this moment, while this process has a context on it too */
    uint64_t peers; /* bit k: it reads and writes the memory of device k < LG_DEVICE_PEERS_MAX */
};

/* name: "cuda:1". The message says what is missing and what to do: LG_ERR_NOTFOUND (backend, driver or
 * device not there), LG_ERR_MISMATCH (driver too old, device of another kind than this build is for),
 * LG_ERR_NOSPACE or LG_ERR_BUSY (somebody else holds its memory or all of it). */
int lg_device_info(const char *name, struct lg_device_info *ret);
/* How many devices the backend of that name sees, at least one; errors as above. */
int lg_device_count(const char *backend, int *ret);
