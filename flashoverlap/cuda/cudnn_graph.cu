// cudnn_graph.cu -- see cudnn_graph.h. Read forward_graph and backward_graph; each line is an operation.
#if FO_CUDNN
#include "flashoverlap/cuda/cudnn_graph.h"
#include <math.h>
#include <stdio.h>

typedef cudnnBackendDescriptor_t Descriptor;

// ---- descriptors ------------------------------------------------------------------------------------------
// Each function does nothing after a failure: the first one's text stays, and the plan is not made.
static void check(FoCudnnPlan* p, cudnnStatus_t status, const char* what) {
    if (p->status != CUDNN_STATUS_SUCCESS || status == CUDNN_STATUS_SUCCESS) { return; }
    char text[160] = {0};
    cudnnGetLastErrorString(text, sizeof text);
    p->status = status;
    snprintf(p->error, sizeof p->error, "%s: %s: %.150s", what, cudnnGetErrorString(status), text);
}

static Descriptor make(FoCudnnPlan* p, cudnnBackendDescriptorType_t type) {
    Descriptor d = NULL;
    if (p->status != CUDNN_STATUS_SUCCESS) { return NULL; }
    if (p->nmade == (int)(sizeof p->made / sizeof *p->made)) {
        check(p, CUDNN_STATUS_INTERNAL_ERROR, "too many descriptors");
        return NULL;
    }
    check(p, cudnnBackendCreateDescriptor(type, &d), "create");
    if (d) { p->made[p->nmade++] = d; }
    return d;
}

static void set(FoCudnnPlan* p, Descriptor d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t n, const void* value) {
    if (p->status != CUDNN_STATUS_SUCCESS) { return; }
    char what[32];
    snprintf(what, sizeof what, "attribute %d", (int)name);
    check(p, cudnnBackendSetAttribute(d, name, type, n, value), what);
}
static void set_descriptor(FoCudnnPlan* p, Descriptor d, cudnnBackendAttributeName_t name, Descriptor value) {
    set(p, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}
static void set_type(FoCudnnPlan* p, Descriptor d, cudnnBackendAttributeName_t name, cudnnDataType_t value) {
    set(p, d, name, CUDNN_TYPE_DATA_TYPE, 1, &value);
}

static void finalize(FoCudnnPlan* p, Descriptor d, const char* what) {
    if (p->status == CUDNN_STATUS_SUCCESS) { check(p, cudnnBackendFinalize(d), what); }
}

// ---- tensors ----------------------------------------------------------------------------------------------
// by which the arrays of a call are named; what lies between operations is numbered from OWN_UIDS on
enum {
    Q = 1,
    K,
    V,
    OUT,
    LSE,
    DOUT,
    DQ,
    DK,
    DV,
    DELTA,
    DQ_SUM,
    SCALE,
    ONE,
    MINUS_INFINITY,
    QUERIES,
    KEYS,
    OWN_UIDS = 64
};

static const cudnnDataType_t BF16 = CUDNN_DATA_BFLOAT16, FP32 = CUDNN_DATA_FLOAT, INT32 = CUDNN_DATA_INT32;

typedef struct {
    int64_t v[4];
} Four; // of sequences, heads, rows, columns: how many, or elements from one to the next

static Four packed(Four n) {
    return Four{{n.v[1] * n.v[2] * n.v[3], n.v[2] * n.v[3], n.v[3], 1}};
}
static Four transposed(Four x) {
    return Four{{x.v[0], x.v[1], x.v[3], x.v[2]}};
}
// heads side by side in a row
static Four rows(const FoSdpa* c, int64_t seq, int64_t row) {
    return Four{{seq, c->hs, row, 1}};
}

enum Where { MEMORY, BETWEEN, BY_VALUE }; // BETWEEN operations of the graph: never stored

static Descriptor tensor(FoCudnnPlan* p, Where where, int64_t uid, cudnnDataType_t type, Four n,
                         Four stride) {
    Descriptor d = make(p, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t alignment = 16;
    bool yes = true;
    if (where == BETWEEN) { uid = p->next_uid++; }
    set_type(p, d, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
    set(p, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, n.v);
    set(p, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride.v);
    set(p, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set(p, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    if (where == BETWEEN) { set(p, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes); }
    if (where == BY_VALUE) { set(p, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes); }
    finalize(p, d, "tensor");
    return d;
}
static Descriptor between(FoCudnnPlan* p, cudnnDataType_t type, Four n) {
    return tensor(p, BETWEEN, 0, type, n, packed(n));
}
static Descriptor scalar(FoCudnnPlan* p, int64_t uid, cudnnDataType_t type) {
    Four one = {{1, 1, 1, 1}};
    return tensor(p, BY_VALUE, uid, type, one, one);
}

// ---- operations -------------------------------------------------------------------------------------------
static Descriptor operation(FoCudnnPlan* p, Descriptor op, Descriptor result) {
    finalize(p, op, "operation");
    if (p->nops < (int)(sizeof p->ops / sizeof *p->ops)) { p->ops[p->nops++] = op; }
    return result;
}

// y = x, or x with b, or b and t; axis: -1 for none
static Descriptor pointwise(FoCudnnPlan* p, cudnnPointwiseMode_t mode, cudnnDataType_t type, int64_t axis,
                            Descriptor x, Descriptor b, Descriptor t, Descriptor y) {
    Descriptor d = make(p, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(p, d, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set_type(p, d, CUDNN_ATTR_POINTWISE_MATH_PREC, type);
    if (axis >= 0) { set(p, d, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis); }
    finalize(p, d, "pointwise");
    Descriptor op = make(p, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, d);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b) { set_descriptor(p, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b); }
    if (t) { set_descriptor(p, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t); }
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    return operation(p, op, y);
}
// in fp32, of the given shape
static Descriptor with(FoCudnnPlan* p, cudnnPointwiseMode_t mode, Descriptor x, Descriptor b, Four n) {
    return pointwise(p, mode, FP32, -1, x, b, NULL, between(p, FP32, n));
}

static Descriptor matmul(FoCudnnPlan* p, Descriptor a, Descriptor b, Descriptor c) {
    Descriptor d = make(p, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set_type(p, d, CUDNN_ATTR_MATMUL_COMP_TYPE, FP32);
    finalize(p, d, "matmul");
    Descriptor op = make(p, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, d);
    return operation(p, op, c);
}

// over columns
static Descriptor reduce(FoCudnnPlan* p, cudnnReduceTensorOp_t how, Descriptor x, Descriptor y) {
    Descriptor d = make(p, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(p, d, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
    set_type(p, d, CUDNN_ATTR_REDUCTION_COMP_TYPE, FP32);
    finalize(p, d, "reduction");
    Descriptor op = make(p, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, d);
    return operation(p, op, y);
}

static Descriptor reshape(FoCudnnPlan* p, Descriptor x, Four n, Four stride) {
    Descriptor y = tensor(p, BETWEEN, 0, BF16, n, stride);
    Descriptor op = make(p, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_descriptor(p, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    return operation(p, op, y);
}

// ---- graphs -----------------------------------------------------------------------------------------------
// s where the query's position is at least the key's, else minus infinity
static Descriptor causal(FoCudnnPlan* p, const FoSdpa* c, Descriptor s, Four n) {
    Descriptor row = pointwise(p, CUDNN_POINTWISE_GEN_INDEX, FP32, 2, s, NULL, NULL, between(p, INT32, n));
    Descriptor col = pointwise(p, CUDNN_POINTWISE_GEN_INDEX, FP32, 3, s, NULL, NULL, between(p, INT32, n));
    if (c->bottom_right) {
        row = pointwise(p, CUDNN_POINTWISE_ADD, INT32, 3, row, scalar(p, KEYS, INT32), NULL,
                        between(p, INT32, n));
        row = pointwise(p, CUDNN_POINTWISE_SUB, INT32, 3, row, scalar(p, QUERIES, INT32), NULL,
                        between(p, INT32, n));
    }
    Descriptor seen = pointwise(p, CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, -1, row, col, NULL,
                                between(p, CUDNN_DATA_BOOLEAN, n));
    return pointwise(p, CUDNN_POINTWISE_BINARY_SELECT, FP32, -1, s, scalar(p, MINUS_INFINITY, FP32), seen,
                     between(p, FP32, n));
}

static void forward_graph(FoCudnnPlan* p, const FoSdpa* c) {
    Four nq = {{c->nseq, c->heads, c->queries, c->hs}}, nk = {{c->nseq, c->heads, c->keys, c->hs}};
    Four ns = {{c->nseq, c->heads, c->queries, c->keys}}, n1 = {{c->nseq, c->heads, c->queries, 1}};
    Four kv = rows(c, c->kv_seq, c->kv_row);
    Descriptor q = tensor(p, MEMORY, Q, BF16, nq, rows(c, c->q_seq, c->q_row));
    Descriptor kt = tensor(p, MEMORY, K, BF16, transposed(nk), transposed(kv));
    Descriptor v = tensor(p, MEMORY, V, BF16, nk, kv);
    Descriptor out = tensor(p, MEMORY, OUT, BF16, nq, rows(c, c->out_seq, c->out_row));
    Descriptor lse = tensor(p, MEMORY, LSE, FP32, n1, packed(n1));

    Descriptor s = matmul(p, q, kt, between(p, FP32, ns));
    s = with(p, CUDNN_POINTWISE_MUL, s, scalar(p, SCALE, FP32), ns);
    s = causal(p, c, s, ns);
    Descriptor max = reduce(p, CUDNN_REDUCE_TENSOR_MAX, s, between(p, FP32, n1));
    Descriptor e = with(p, CUDNN_POINTWISE_SUB, s, max, ns);
    e = with(p, CUDNN_POINTWISE_EXP, e, NULL, ns);
    Descriptor sum = reduce(p, CUDNN_REDUCE_TENSOR_ADD, e, between(p, FP32, n1));
    Descriptor log = with(p, CUDNN_POINTWISE_LOG, sum, NULL, n1);
    pointwise(p, CUDNN_POINTWISE_ADD, FP32, -1, max, log, NULL, lse);
    Descriptor prob = pointwise(p, CUDNN_POINTWISE_DIV, FP32, -1, e, sum, NULL, between(p, BF16, ns));
    matmul(p, prob, v, out);
}

static void backward_graph(FoCudnnPlan* p, const FoSdpa* c) {
    Four nq = {{c->nseq, c->heads, c->queries, c->hs}}, nk = {{c->nseq, c->heads, c->keys, c->hs}};
    Four ns = {{c->nseq, c->heads, c->queries, c->keys}}, n1 = {{c->nseq, c->heads, c->queries, 1}};
    Four kv = rows(c, c->kv_seq, c->kv_row), dkv = rows(c, c->dkv_seq, c->dkv_row);
    Four o = rows(c, c->out_seq, c->out_row);
    Descriptor q = tensor(p, MEMORY, Q, BF16, nq, rows(c, c->q_seq, c->q_row));
    Descriptor kt = tensor(p, MEMORY, K, BF16, transposed(nk), transposed(kv));
    Descriptor vt = tensor(p, MEMORY, V, BF16, transposed(nk), transposed(kv));
    Descriptor out = tensor(p, MEMORY, OUT, BF16, nq, o), dout = tensor(p, MEMORY, DOUT, BF16, nq, o);
    Descriptor lse = tensor(p, MEMORY, LSE, FP32, n1, packed(n1));
    Descriptor dq = tensor(p, MEMORY, DQ, BF16, nq, rows(c, c->dq_seq, c->dq_row));
    Descriptor dk = tensor(p, MEMORY, DK, BF16, nk, dkv), dv = tensor(p, MEMORY, DV, BF16, nk, dkv);
    Descriptor scale = scalar(p, SCALE, FP32);

    Descriptor delta = with(p, CUDNN_POINTWISE_MUL, dout, out, nq);
    delta = reduce(p, CUDNN_REDUCE_TENSOR_ADD, delta, between(p, FP32, n1));
    delta = pointwise(p, CUDNN_POINTWISE_MUL, FP32, -1, delta, scalar(p, ONE, FP32), NULL,
                      tensor(p, MEMORY, DELTA, FP32, n1, packed(n1)));
    Descriptor s = matmul(p, q, kt, between(p, FP32, ns));
    s = with(p, CUDNN_POINTWISE_MUL, s, scale, ns);
    s = with(p, CUDNN_POINTWISE_SUB, s, lse, ns);
    s = causal(p, c, s, ns);
    Descriptor prob = with(p, CUDNN_POINTWISE_EXP, s, NULL, ns);
    Four nst = transposed(ns), columns = transposed(packed(ns));
    matmul(p, reshape(p, prob, nst, columns), dout, dv);
    Descriptor ds = matmul(p, dout, vt, between(p, FP32, ns));
    ds = with(p, CUDNN_POINTWISE_SUB, ds, delta, ns);
    ds = with(p, CUDNN_POINTWISE_MUL, ds, prob, ns);
    ds = pointwise(p, CUDNN_POINTWISE_MUL, FP32, -1, ds, scale, NULL, between(p, BF16, ns));
    matmul(p, reshape(p, ds, nst, columns), q, dk);
    Descriptor k = reshape(p, kt, nk, kv);
    if (p->deterministic) {
        matmul(p, ds, k, dq);
    } else {
        Descriptor sum = matmul(p, ds, k, tensor(p, MEMORY, DQ_SUM, FP32, nq, packed(nq)));
        pointwise(p, CUDNN_POINTWISE_IDENTITY, FP32, -1, sum, NULL, NULL, dq);
    }
}

// ---- plans ------------------------------------------------------------------------------------------------
// the first of the configurations that becomes a plan; 0: none does, or there is none
static int first_plan(FoCudnnPlan* p, Descriptor graph, cudnnBackendHeurMode_t mode, cudnnHandle_t handle,
                      Descriptor properties) {
    enum { CONFIGS = 16 };
    Descriptor heuristic = make(p, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR), configs[CONFIGS];
    int64_t n = 0;
    set_descriptor(p, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(p, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
#if FO_CUDNN_DESCRIBES
    if (!handle) { set_descriptor(p, heuristic, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, properties); }
#endif
    finalize(p, heuristic, "heuristic");
    for (int i = 0; i < CONFIGS; i++) {
        configs[i] = make(p, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    }
    if (p->status == CUDNN_STATUS_SUCCESS) {
        check(p,
              cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                       CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGS, &n, configs),
              "heuristic");
    }
    for (int64_t i = 0; i < n && p->status == CUDNN_STATUS_SUCCESS; i++) {
        Descriptor plan = make(p, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set_descriptor(p, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
#if FO_CUDNN_DESCRIBES
        if (!handle) { set_descriptor(p, plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, properties); }
#endif
        if (handle) { set(p, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle); }
        finalize(p, plan, "plan");
        if (p->status == CUDNN_STATUS_SUCCESS) {
            p->plan = plan;
            Descriptor engine = make(p, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
            check(p,
                  cudnnBackendGetAttribute(configs[i], CUDNN_ATTR_ENGINECFG_ENGINE,
                                           CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &engine),
                  "engine");
            check(p,
                  cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &n,
                                           &p->engine),
                  "engine");
            check(p,
                  cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64,
                                           1, &n, &p->workspace_nbytes),
                  "workspace");
            return p->status == CUDNN_STATUS_SUCCESS;
        }
        if (i + 1 < n) { p->status = CUDNN_STATUS_SUCCESS; } // the next one may
    }
    if (p->status == CUDNN_STATUS_SUCCESS) { check(p, CUDNN_STATUS_NOT_SUPPORTED, "no engine"); }
    return 0;
}

int fo__cudnn_plan(FoCudnnPlan* p, const FoSdpa* call, int deterministic, cudnnHandle_t handle,
                   cudnnBackendDescriptor_t properties) {
    memset(p, 0, sizeof *p);
    p->sdpa = *call;
    p->deterministic = deterministic;
    p->next_uid = OWN_UIDS;
    if (call->backward) {
        backward_graph(p, call);
    } else {
        forward_graph(p, call);
    }
    Descriptor graph = make(p, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(p, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, p->nops, p->ops);
    if (handle) { set(p, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle); }
    finalize(p, graph, "graph");
    if (p->status != CUDNN_STATUS_SUCCESS) { return 0; }
    if (first_plan(p, graph, CUDNN_HEUR_MODE_A, handle, properties)) { return 1; }
    p->status = CUDNN_STATUS_SUCCESS;
    return first_plan(p, graph, CUDNN_HEUR_MODE_FALLBACK, handle, properties);
}

cudnnStatus_t fo__cudnn_plan_run(const FoCudnnPlan* p, const FoSdpaArrays* a, cudnnHandle_t handle) {
    const FoSdpa* c = &p->sdpa;
    float scale = 1.0f / sqrtf((float)c->hs), one = 1.0f, minus_infinity = -INFINITY;
    int32_t queries = (int32_t)c->queries, keys = (int32_t)c->keys;
    struct {
        int64_t uid;
        int used;
        const void* p;
    } all[] = {{Q, 1, a->q},
               {K, 1, a->k},
               {V, 1, a->v},
               {OUT, 1, a->out},
               {LSE, 1, a->lse},
               {SCALE, 1, &scale},
               {MINUS_INFINITY, 1, &minus_infinity},
               {QUERIES, c->bottom_right != 0, &queries},
               {KEYS, c->bottom_right != 0, &keys},
               {DOUT, c->backward != 0, a->dout},
               {DQ, c->backward != 0, a->dq},
               {DK, c->backward != 0, a->dk},
               {DV, c->backward != 0, a->dv},
               {DELTA, c->backward != 0, a->delta},
               {ONE, c->backward != 0, &one},
               {DQ_SUM, c->backward && !p->deterministic, a->dq_sum}};
    int64_t uids[16], n = 0;
    void* pointers[16];
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (all[i].used) { uids[n] = all[i].uid, pointers[n++] = (void*)all[i].p; }
    }
    Descriptor pack = NULL;
    cudnnStatus_t st = cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    if (st != CUDNN_STATUS_SUCCESS) { return st; }
    st = cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, uids);
    if (st == CUDNN_STATUS_SUCCESS) {
        st = cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n,
                                      pointers);
    }
    if (st == CUDNN_STATUS_SUCCESS) {
        st = cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1,
                                      &a->workspace);
    }
    if (st == CUDNN_STATUS_SUCCESS) { st = cudnnBackendFinalize(pack); }
    if (st == CUDNN_STATUS_SUCCESS) { st = cudnnBackendExecute(handle, p->plan, pack); }
    cudnnBackendDestroyDescriptor(pack);
    return st;
}

void fo__cudnn_plan_free(FoCudnnPlan* p) {
    while (p->nmade > 0) {
        cudnnBackendDestroyDescriptor(p->made[--p->nmade]);
    }
    p->plan = NULL;
}
#endif
