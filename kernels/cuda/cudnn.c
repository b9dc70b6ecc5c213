/* cuDNN: opening it, and the machinery that its operations share; see cudnn_api.h for the words.
 *
 * Design: dlopen, so that a machine without cuDNN runs everything (slower) and so that the user can
 * point to another version. A graph is a list of operations over tensors that are known by number (uid);
 * a plan is a graph compiled for one engine. Building fails softly: a graph that this cuDNN does not
 * take is remembered as "none" and own kernels do the work. */
#include "kernels/cuda/cudnn.h"
#include "base/log.h"
#include "kernels/cuda/cudnn_api.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening ---- */

static bool resolve(struct lg_cudnn *c)
{
#define FIND(name)                                                                                 \
    *(void **)&c->api.name = dlsym(c->dl, "cudnn" #name);                                          \
    if (!c->api.name) return false
    FIND(Create);
    FIND(Destroy);
    FIND(SetStream);
    FIND(GetVersion);
    FIND(GetLastErrorString);
    FIND(BackendCreateDescriptor);
    FIND(BackendDestroyDescriptor);
    FIND(BackendSetAttribute);
    FIND(BackendGetAttribute);
    FIND(BackendFinalize);
    FIND(BackendExecute);
#undef FIND
    return true;
}

const char *lg_cudnn_file(void)
{
    const char *named = getenv("LG_CUDNN");
    if (!named || !*named) return "libcudnn.so.9";
    return strcmp(named, "none") ? named : NULL;
}

int lg_cudnn_open(lg_cuda_device *d, struct lg_cudnn **ret)
{
    const char *named = getenv("LG_CUDNN"), *path = lg_cudnn_file();
    *ret = NULL;
    if (!path) return 0;
    struct lg_cudnn *c = calloc(1, sizeof *c);
    if (!c) return LG_FAIL(LG_ERR_NOSPACE, "no memory for cuDNN's plans");
    pthread_mutex_init(&c->mutex, NULL);
    c->device = d;
    c->dl = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!c->dl) {
        const char *why = dlerror();
        free(c);
        if (named && *named) return LG_FAIL(LG_ERR_NOTFOUND, "cannot open $LG_CUDNN: %s", why);
        lg_log(LG_WARN,
               "no cuDNN (%s): attention and convolutions run on slower kernels; install it "
               "or name libcudnn.so.9 in $LG_CUDNN",
               why);
        return 0;
    }
    if (!resolve(c) || c->api.Create(&c->handle) != CUDNN_STATUS_SUCCESS) {
        dlclose(c->dl);
        free(c);
        return LG_FAIL(LG_ERR_FAILED,
                       "%s does not start as cuDNN 9 (\"none\" in $LG_CUDNN runs "
                       "without)",
                       path);
    }
    *ret = c;
    return 0;
}

void lg_cudnn_close(struct lg_cudnn **c)
{
    if (!*c) return;
    for (int i = 0; i < (*c)->n_plans; i++) cudnn_drop(*c, &(*c)->plans[i].plan);
    free((*c)->plans);
    (*c)->api.Destroy((*c)->handle);
    dlclose((*c)->dl);
    pthread_mutex_destroy(&(*c)->mutex);
    free(*c);
    *c = NULL;
}

size_t lg_cudnn_version(const struct lg_cudnn *c)
{
    return c ? c->api.GetVersion() : 0;
}

/* ---- descriptors ---- */

void cudnn_drop(struct lg_cudnn *c, cudnnBackendDescriptor_t *d)
{
    if (*d) c->api.BackendDestroyDescriptor(*d);
    *d = NULL;
}

cudnnBackendDescriptor_t cudnn_make(struct cudnn_graph *g, cudnnBackendDescriptorType_t type)
{
    cudnnBackendDescriptor_t d = NULL;
    if (g->failed) return NULL;
    if (g->n_made == CUDNN_MADE_MAX || g->c->api.BackendCreateDescriptor(type, &d)) {
        g->failed = true;
        return NULL;
    }
    return g->made[g->n_made++] = d;
}

void cudnn_set(struct cudnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
               cudnnBackendAttributeType_t type, int64_t count, const void *value)
{
    if (g->failed) return;
    if (g->c->api.BackendSetAttribute(d, name, type, count, value)) g->failed = true;
}

void cudnn_finish(struct cudnn_graph *g, cudnnBackendDescriptor_t d)
{
    if (!g->failed && g->c->api.BackendFinalize(d)) g->failed = true;
}

void cudnn_graph_free(struct cudnn_graph *g)
{
    while (g->n_made) cudnn_drop(g->c, &g->made[--g->n_made]);
}

cudnnBackendDescriptor_t cudnn_tensor(struct cudnn_graph *g, const struct cudnn_tensor_spec *t)
{
    cudnnBackendDescriptor_t d = cudnn_make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t alignment = 16, uid = t->uid ? t->uid : 1000 + g->virtual_uid++;
    bool is_virtual = t->uid == 0, by_value = t->by_value;
    cudnn_set(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &t->type);
    const int64_t rank = t->rank ? t->rank : 4;
    cudnn_set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, rank, t->dim);
    cudnn_set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, rank, t->stride);
    cudnn_set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    cudnn_set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    cudnn_set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    cudnn_set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    cudnn_finish(g, d);
    return d;
}

/* ---- operations ---- */

static void add_operation(struct cudnn_graph *g, cudnnBackendDescriptor_t op)
{
    cudnn_finish(g, op);
    if (g->failed) return;
    LG_ASSERT(g->n_ops < CUDNN_OPS_MAX);
    g->ops[g->n_ops++] = op;
}

void cudnn_set_desc(struct cudnn_graph *g, cudnnBackendDescriptor_t d,
                    cudnnBackendAttributeName_t name, cudnnBackendDescriptor_t value)
{
    if (value) cudnn_set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

void cudnn_matmul(struct cudnn_graph *g, const struct cudnn_matmul_spec *m)
{
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t kind = cudnn_make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    cudnn_set(g, kind, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    cudnn_finish(g, kind);
    cudnnBackendDescriptor_t op = cudnn_make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, m->a);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, m->b);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, m->c);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, kind);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, m->m);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, m->n);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, m->k);
    add_operation(g, op);
}

void cudnn_pointwise(struct cudnn_graph *g, const struct cudnn_pointwise_spec *p)
{
    cudnnDataType_t precision = p->precision;
    cudnnBackendDescriptor_t kind = cudnn_make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    cudnn_set(g, kind, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &p->mode);
    cudnn_set(g, kind, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &precision);
    if (p->mode == CUDNN_POINTWISE_GEN_INDEX)
        cudnn_set(g, kind, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &p->axis);
    cudnn_finish(g, kind);
    cudnnBackendDescriptor_t op = cudnn_make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, p->x);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, p->b);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, p->t);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, p->y);
    add_operation(g, op);
}

void cudnn_reduce(struct cudnn_graph *g, cudnnReduceTensorOp_t how, cudnnBackendDescriptor_t x,
                  cudnnBackendDescriptor_t y)
{
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t kind = cudnn_make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    cudnn_set(g, kind, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
    cudnn_set(g, kind, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    cudnn_finish(g, kind);
    cudnnBackendDescriptor_t op = cudnn_make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add_operation(g, op);
}

void cudnn_reshape(struct cudnn_graph *g, cudnnBackendDescriptor_t x, cudnnBackendDescriptor_t y)
{
    cudnnBackendDescriptor_t op = cudnn_make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    cudnn_set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_operation(g, op);
}

void cudnn_operation(struct cudnn_graph *g, cudnnBackendDescriptor_t op)
{
    add_operation(g, op);
}

/* ---- plans ---- */

cudnnBackendDescriptor_t cudnn_operation_graph(struct cudnn_graph *g)
{
    cudnnBackendDescriptor_t d = cudnn_make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cudnn_set(g, d, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_ops, g->ops);
    cudnn_set(g, d, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->c->handle);
    cudnn_finish(g, d);
    return d;
}

int cudnn_configurations(struct cudnn_graph *g, cudnnBackendDescriptor_t graph,
                         cudnnBackendHeurMode_t mode, cudnnBackendDescriptor_t *ret, int max)
{
    int64_t count = 0;
    cudnnBackendDescriptor_t h = cudnn_make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnn_set_desc(g, h, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    cudnn_set(g, h, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (g->failed || g->c->api.BackendFinalize(h)) return 0;
    if (g->c->api.BackendGetAttribute(h, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                      CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, NULL))
        return 0;
    if (count > max) count = max;
    for (int64_t i = 0; i < count; i++) ret[i] = cudnn_make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (g->failed ||
        g->c->api.BackendGetAttribute(h, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                      CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count, ret))
        return 0;
    return (int)count;
}

bool cudnn_compile(struct lg_cudnn *c, cudnnBackendDescriptor_t configuration,
                   cudnnBackendDescriptor_t *ret, int64_t *ret_workspace)
{
    cudnnBackendDescriptor_t plan = NULL;
    int64_t got;
    if (c->api.BackendCreateDescriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan))
        return false;
    if (c->api.BackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1,
                                   &c->handle) ||
        c->api.BackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &configuration) ||
        c->api.BackendFinalize(plan) ||
        c->api.BackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64,
                                   1, &got, ret_workspace)) {
        cudnn_drop(c, &plan);
        return false;
    }
    *ret = plan;
    return true;
}

bool cudnn_first_plan(struct cudnn_graph *g, cudnnBackendDescriptor_t *ret, int64_t *ret_workspace)
{
    enum { CONFIGURATIONS_MAX = 16 };
    static const cudnnBackendHeurMode_t MODES[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
    cudnnBackendDescriptor_t graph = cudnn_operation_graph(g), found[CONFIGURATIONS_MAX];
    for (size_t m = 0; !g->failed && m < LG_ARRAY_LEN(MODES); m++) {
        int n = cudnn_configurations(g, graph, MODES[m], found, CONFIGURATIONS_MAX);
        for (int i = 0; i < n; i++)
            if (cudnn_compile(g->c, found[i], ret, ret_workspace)) return true;
    }
    return false;
}

cudnnStatus_t cudnn_execute(struct lg_cudnn *c, cudnnBackendDescriptor_t plan,
                            const struct cudnn_binding *b, void *workspace, cudaStream_t stream)
{
    cudnnBackendDescriptor_t pack = NULL;
    cudnnStatus_t s = c->api.SetStream(c->handle, stream);
    if (!s) s = c->api.BackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    if (!s)
        s = c->api.BackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
                                       CUDNN_TYPE_VOID_PTR, b->count, b->data);
    if (!s)
        s = c->api.BackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64,
                                       b->count, b->uid);
    if (!s)
        s = c->api.BackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR,
                                       1, &workspace);
    if (!s) s = c->api.BackendFinalize(pack);
    if (!s) s = c->api.BackendExecute(c->handle, plan, pack);
    cudnn_drop(c, &pack);
    return s;
}

void cudnn_run(struct lg_cudnn *c, cudnnBackendDescriptor_t plan, const struct cudnn_binding *b,
               void *workspace, cudaStream_t stream)
{
    pthread_mutex_lock(&c->mutex);
    cudnnStatus_t s = cudnn_execute(c, plan, b, workspace, stream);
    pthread_mutex_unlock(&c->mutex);
    if (s == CUDNN_STATUS_SUCCESS) return;
    char why[512];
    c->api.GetLastErrorString(why, sizeof why);
    lg_cuda_fatal("cuDNN", why, __FILE__, __LINE__);
}

struct cudnn_plan *cudnn_plan_of(struct lg_cudnn *c, const struct cudnn_key *key,
                                 bool (*build)(struct lg_cudnn *, const struct cudnn_key *,
                                               struct cudnn_plan *))
{
    pthread_mutex_lock(&c->mutex);
    struct cudnn_plan *found = NULL;
    for (int i = 0; i < c->n_plans && !found; i++)
        if (!memcmp(&c->plans[i].key, key, sizeof *key)) found = &c->plans[i];
    if (!found) {
        if (!c->plans) c->plans = calloc(CUDNN_PLANS_MAX, sizeof *c->plans);
        LG_ASSERT(c->plans && c->n_plans < CUDNN_PLANS_MAX);
        found = &c->plans[c->n_plans++];
        found->key = *key;
        LG_CUDA(cudaSetDevice(c->device->index));
        if (!build(c, key, found)) cudnn_drop(c, &found->plan);
    }
    pthread_mutex_unlock(&c->mutex);
    return found->plan ? found : NULL;
}

cudnnDataType_t cudnn_type(lg_dtype t)
{
    return t == LG_BF16 ? CUDNN_DATA_BFLOAT16 : t == LG_F16 ? CUDNN_DATA_HALF : CUDNN_DATA_FLOAT;
}
