/* Pinned algorithms: which one was chosen for a problem, kept in a text file so that every later run and
 * every other process takes the same one. Changing an algorithm changes bits.
 *
 * The file is $LG_CUDA_CACHE, or ~/.cache/lg/cuda-<gpu>-<versions>.txt. The processes of a run have a
 * second one, $LG_CUDA_RUN_FILE, which counts before it: what the run has used is kept there, so that a
 * run that is resumed takes the same algorithms whatever became of the other file. A line is KEY =
 * VALUE; a key has no '='. The first line of a key counts. Lines are only ever appended, under a lock: of two
 * processes that tune one key at a time, the second takes the first one's choice. */
#pragma once
#include <stddef.h>

struct lg_cuda_algos;
#define LG_CUDA_RUN_FILE "LG_CUDA_RUN_FILE"
enum { LG_CUDA_KEY_BYTES = 192, LG_CUDA_VALUE_BYTES = 512 };

int lg_cuda_algos_open(const char *gpu, size_t cublaslt, size_t cudnn, struct lg_cuda_algos **ret);
void lg_cuda_algos_close(struct lg_cuda_algos **a);
/* The value of key, or NULL. Valid until close. */
const char *lg_cuda_algos_find(struct lg_cuda_algos *a, const char *key);
/* Proposes a value; returns the one that counts from now on (another process may have been first).
 * A file that cannot be written is said once; the choice then holds for this process. */
const char *lg_cuda_algos_pin(struct lg_cuda_algos *a, const char *key, const char *value);
