/* Links over NCCL (https://github.com/NVIDIA/nccl): a communicator of two for each, in which one sends and the other
 * receives, so that a link waits for no other and dies alone.
 *
 * Design: opened with dlopen, since machines without it train as well; what is called of it is declared here, as its
 * documentation has it (2.18 and later). Communicators do not block: every call may return "in progress", and then nothing
 * else may be called of that communicator than what asks how it goes, and abort. So one message is begun at a time, and its
 * event is recorded when the call is over. A peer that is gone makes NCCL wait for ever: then abort ends the kernel. */
#include "base/log.h"
#include "kernels/cuda/cuda.h"
#include "kernels/link.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef enum { ncclSuccess = 0, ncclInProgress = 7 } ncclResult_t;
enum { ncclInt8 = 0 };
/* Its beginning; NCCL takes what lies behind `size` as not said. */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} ncclConfig_t;
enum { NCCL_CONFIG_MAGIC = (int)0xcafebeef, NCCL_CONFIG_VERSION = 21400 };

_Static_assert(sizeof(ncclUniqueId) == sizeof(struct lg_link_id), "an id of NCCL's");

static struct {
    ncclResult_t (*GetUniqueId)(ncclUniqueId *);
    ncclResult_t (*CommInitRankConfig)(ncclComm_t *, int ranks, ncclUniqueId, int rank,
                                       ncclConfig_t *);
    ncclResult_t (*CommGetAsyncError)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*CommAbort)(ncclComm_t);
    ncclResult_t (*Send)(const void *, size_t, int type, int peer, ncclComm_t, cudaStream_t);
    ncclResult_t (*Recv)(void *, size_t, int type, int peer, ncclComm_t, cudaStream_t);
    const char *(*GetErrorString)(ncclResult_t);
} nccl;
static bool nccl_is_open;
static char nccl_missing[256];

static const char *nccl_path(void)
{
    const char *named = getenv("LG_NCCL");
    return named && *named ? named : "libnccl.so.2";
}

static void open_nccl(void)
{
    /* Multicast between GPUs of a machine is nothing that two processes need. */
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    void *dl = dlopen(nccl_path(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    const char *why = dl ? "it lacks functions of NCCL 2.18" : dlerror();
    nccl_is_open = dl != NULL;
#define FIND(name)                                                                                 \
    if (dl) *(void **)&nccl.name = dlsym(dl, "nccl" #name);                                        \
    nccl_is_open = nccl_is_open && nccl.name
    FIND(GetUniqueId);
    FIND(CommInitRankConfig);
    FIND(CommGetAsyncError);
    FIND(CommAbort);
    FIND(Send);
    FIND(Recv);
    FIND(GetErrorString);
#undef FIND
    if (!nccl_is_open) snprintf(nccl_missing, sizeof nccl_missing, "%s", why);
}

static int need_nccl(lg_device *d)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_nccl);
    if (!nccl_is_open)
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "no NCCL (%s: %s): install it, name libnccl.so.2 in $LG_NCCL, or set "
                       "hosts.transport = \"ucx\"",
                       nccl_path(), nccl_missing);
    LG_CUDA(cudaSetDevice(((lg_cuda_device *)d)->index));
    return 0;
}

struct cuda_link {
    lg_link base;
    bool sends;
    ncclComm_t comm;
    cudaStream_t stream;
    cudaEvent_t event[LG_LINK_DEPTH]; /* behind a message */
    uint64_t begun;    /* messages that NCCL has been given; recorded <= begun <= recorded + 1 */
    uint64_t recorded; /* and whose events are recorded */
};

static int failure(ncclResult_t r, const char *what)
{
    return LG_FAIL(LG_ERR_IO, "NCCL: %s: %s", what, nccl.GetErrorString(r));
}

static int link_new_id(lg_device *d, struct lg_link_id *ret)
{
    ncclUniqueId id;
    LG_TRY(need_nccl(d));
    const ncclResult_t r = nccl.GetUniqueId(&id);
    if (r != ncclSuccess) return failure(r, "ncclGetUniqueId");
    memcpy(ret->bytes, id.internal, sizeof ret->bytes);
    return 0;
}

static void link_close(lg_link *base)
{
    struct cuda_link *l = (struct cuda_link *)base;
    LG_CUDA(cudaSetDevice(((lg_cuda_device *)base->device)->index));
    if (l->comm) nccl.CommAbort(l->comm);
    LG_CUDA(cudaStreamSynchronize(l->stream));
    for (int i = 0; i < LG_LINK_DEPTH; i++) LG_CUDA(cudaEventDestroy(l->event[i]));
    LG_CUDA(cudaStreamDestroy(l->stream));
    free(l);
}

static int link_open(lg_device *d, const struct lg_link_id *id, bool sends, lg_link **ret)
{
    ncclConfig_t config = {.size = sizeof config,
                           .magic = (unsigned)NCCL_CONFIG_MAGIC,
                           .version = NCCL_CONFIG_VERSION,
                           .blocking = 0};
    ncclUniqueId name;
    LG_TRY(need_nccl(d));
    struct cuda_link *l = calloc(1, sizeof *l);
    if (!l) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a link");
    l->base.device = d;
    l->sends = sends;
    LG_CUDA(cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking));
    for (int i = 0; i < LG_LINK_DEPTH; i++)
        LG_CUDA(cudaEventCreateWithFlags(&l->event[i], cudaEventDisableTiming));
    memcpy(name.internal, id->bytes, sizeof name.internal);
    const ncclResult_t r = nccl.CommInitRankConfig(&l->comm, 2, name, sends ? 0 : 1, &config);
    if (r != ncclSuccess && r != ncclInProgress) {
        link_close(&l->base);
        return failure(r, "ncclCommInitRankConfig");
    }
    *ret = &l->base;
    return 0;
}

/* 1: NCCL has done what it was asked to begin. */
static int is_at_rest(struct cuda_link *l)
{
    ncclResult_t state = ncclSuccess;
    const ncclResult_t r = nccl.CommGetAsyncError(l->comm, &state);
    if (r != ncclSuccess) return failure(r, "ncclCommGetAsyncError");
    if (state != ncclSuccess && state != ncclInProgress) return failure(state, "a link");
    return state == ncclSuccess;
}

static int begin(struct cuda_link *l)
{
    const struct lg_link_place *p = &l->base.place[l->begun % LG_LINK_DEPTH];
    const ncclResult_t r = l->sends ? nccl.Send(p->data, p->bytes, ncclInt8, 1, l->comm, l->stream)
                                    : nccl.Recv(p->data, p->bytes, ncclInt8, 0, l->comm, l->stream);
    if (r != ncclSuccess && r != ncclInProgress)
        return failure(r, l->sends ? "ncclSend" : "ncclRecv");
    l->begun++;
    return 0;
}

static void look_at_done(struct cuda_link *l)
{
    while (l->base.done < l->recorded) {
        const cudaError_t e = cudaEventQuery(l->event[l->base.done % LG_LINK_DEPTH]);
        if (e == cudaErrorNotReady) return;
        LG_CUDA(e);
        l->base.done++;
    }
}

static int link_progress(lg_link *base)
{
    struct cuda_link *l = (struct cuda_link *)base;
    LG_CUDA(cudaSetDevice(((lg_cuda_device *)base->device)->index));
    while (l->recorded < l->begun || l->begun < base->given) {
        const int rests = is_at_rest(l);
        LG_TRY(rests);
        if (!rests) break;
        if (l->recorded < l->begun)
            LG_CUDA(cudaEventRecord(l->event[l->recorded++ % LG_LINK_DEPTH], l->stream));
        else
            LG_TRY(begin(l));
    }
    const int rests = is_at_rest(l);
    LG_TRY(rests);
    look_at_done(l);
    return 0;
}

extern const struct lg_link_calls lg_backend_links;
__attribute__((visibility("default"))) const struct lg_link_calls lg_backend_links = {
    .new_id = link_new_id, .open = link_open, .close = link_close, .progress = link_progress};
