/* cuDNN's graph API in our words: tensors, operations, graphs, plans. Only cudnn*.c include this.
 *
 * A graph owns every descriptor made for it; once something failed, every further call does nothing and
 * the graph counts as failed: so building code needs no checks. Virtual tensors (uid 0) never touch
 * memory. */
#pragma once
#include "kernels/cuda/cuda.h"
#include <cudnn.h>
#include <pthread.h>

enum { CUDNN_MADE_MAX = 256, CUDNN_OPS_MAX = 32, CUDNN_PLANS_MAX = 1024, CUDNN_BINDINGS_MAX = 16 };

/* What decides a plan. Compared as bytes: zero it first. */
struct cudnn_key {
    int64_t op; /* lg_op_id */
    int64_t n[20];
};
struct cudnn_plan {
    struct cudnn_key key;
    cudnnBackendDescriptor_t plan; /* NULL: cuDNN does not do this */
    int64_t workspace;
};

struct lg_cudnn {
    lg_cuda_device *device;
    void *dl;
    cudnnHandle_t handle;
    pthread_mutex_t mutex; /* of plans and handle */
    struct cudnn_plan *plans;
    int n_plans;
    struct {
        __typeof__(cudnnCreate) *Create;
        __typeof__(cudnnDestroy) *Destroy;
        __typeof__(cudnnSetStream) *SetStream;
        __typeof__(cudnnGetVersion) *GetVersion;
        __typeof__(cudnnGetLastErrorString) *GetLastErrorString;
        __typeof__(cudnnBackendCreateDescriptor) *BackendCreateDescriptor;
        __typeof__(cudnnBackendDestroyDescriptor) *BackendDestroyDescriptor;
        __typeof__(cudnnBackendSetAttribute) *BackendSetAttribute;
        __typeof__(cudnnBackendGetAttribute) *BackendGetAttribute;
        __typeof__(cudnnBackendFinalize) *BackendFinalize;
        __typeof__(cudnnBackendExecute) *BackendExecute;
    } api;
};

/* ---- building ---- */

struct cudnn_graph {
    struct lg_cudnn *c;
    bool failed;
    int n_made, n_ops;
    int64_t virtual_uid;
    cudnnBackendDescriptor_t made[CUDNN_MADE_MAX], ops[CUDNN_OPS_MAX];
};
void cudnn_graph_free(struct cudnn_graph *g);
void cudnn_drop(struct lg_cudnn *c, cudnnBackendDescriptor_t *d);
cudnnBackendDescriptor_t cudnn_make(struct cudnn_graph *g, cudnnBackendDescriptorType_t type);
void cudnn_set(struct cudnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
               cudnnBackendAttributeType_t type, int64_t count, const void *value);
/* NULL values are left out. */
void cudnn_set_desc(struct cudnn_graph *g, cudnnBackendDescriptor_t d,
                    cudnnBackendAttributeName_t name, cudnnBackendDescriptor_t value);
void cudnn_finish(struct cudnn_graph *g, cudnnBackendDescriptor_t d);

struct cudnn_tensor_spec {
    int64_t uid; /* 0: virtual */
    cudnnDataType_t type;
    int64_t dim[5], stride[5];
    int rank;      /* 0: 4 */
    bool by_value; /* on the host */
};
cudnnBackendDescriptor_t cudnn_tensor(struct cudnn_graph *g, const struct cudnn_tensor_spec *t);

/* c = a b; m, n, k: tensors with the true sizes per sample, or NULL. */
struct cudnn_matmul_spec {
    cudnnBackendDescriptor_t a, b, c, m, n, k;
};
void cudnn_matmul(struct cudnn_graph *g, const struct cudnn_matmul_spec *m);
struct cudnn_pointwise_spec {
    cudnnPointwiseMode_t mode;
    cudnnDataType_t precision;
    cudnnBackendDescriptor_t x, b, t, y;
    int64_t axis; /* of GEN_INDEX */
};
void cudnn_pointwise(struct cudnn_graph *g, const struct cudnn_pointwise_spec *p);
/* Sum or maximum over the dimensions that y has not. */
void cudnn_reduce(struct cudnn_graph *g, cudnnReduceTensorOp_t how, cudnnBackendDescriptor_t x,
                  cudnnBackendDescriptor_t y);
/* The same memory in another shape. */
void cudnn_reshape(struct cudnn_graph *g, cudnnBackendDescriptor_t x, cudnnBackendDescriptor_t y);
/* Any other operation, its attributes set, not finished. */
void cudnn_operation(struct cudnn_graph *g, cudnnBackendDescriptor_t op);

/* ---- plans ---- */

cudnnBackendDescriptor_t cudnn_operation_graph(struct cudnn_graph *g);
/* Engine configurations for the graph, best guess first; returns how many. */
int cudnn_configurations(struct cudnn_graph *g, cudnnBackendDescriptor_t graph,
                         cudnnBackendHeurMode_t mode, cudnnBackendDescriptor_t *ret, int max);
bool cudnn_compile(struct lg_cudnn *c, cudnnBackendDescriptor_t configuration,
                   cudnnBackendDescriptor_t *ret, int64_t *ret_workspace);
/* The first configuration that compiles: the same one every time for one version and GPU. */
bool cudnn_first_plan(struct cudnn_graph *g, cudnnBackendDescriptor_t *ret, int64_t *ret_workspace);
/* The plan of key, built at first sight; NULL when cuDNN does not do it. */
struct cudnn_plan *cudnn_plan_of(struct lg_cudnn *c, const struct cudnn_key *key,
                                 bool (*build)(struct lg_cudnn *, const struct cudnn_key *,
                                               struct cudnn_plan *));

/* ---- running ---- */

struct cudnn_binding {
    int count;
    int64_t uid[CUDNN_BINDINGS_MAX];
    void *data[CUDNN_BINDINGS_MAX];
};
static inline void cudnn_bind(struct cudnn_binding *b, int64_t uid, const void *data)
{
    LG_ASSERT(b->count < CUDNN_BINDINGS_MAX);
    b->uid[b->count] = uid;
    b->data[b->count++] = (void *)data;
}
/* Aborts on an error. */
void cudnn_run(struct lg_cudnn *c, cudnnBackendDescriptor_t plan, const struct cudnn_binding *b,
               void *workspace, cudaStream_t stream);
/* The same with the error returned, the caller holding the mutex. */
cudnnStatus_t cudnn_execute(struct lg_cudnn *c, cudnnBackendDescriptor_t plan,
                            const struct cudnn_binding *b, void *workspace, cudaStream_t stream);

cudnnDataType_t cudnn_type(lg_dtype t);
