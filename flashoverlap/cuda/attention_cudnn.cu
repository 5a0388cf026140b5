/* attention_cudnn.cu -- the attention functions of fo_ops.h by calls of an engine, and cuDNN as that engine.
 *
 * attention_calls.h says which calls; here rows are put into the order that they want, addresses are found,
 * and what an engine leaves in an order of its own (lse, dq) goes to its rows. The engine is an argument:
 * all but cuDNN itself is tested without it. cuDNN's graphs: cudnn_graph.cu.
 */
#include "flashoverlap/cuda/attention.cuh"
#include "flashoverlap/cuda/attention_calls.h"
#if FO_CUDNN
#include <stdio.h>
#include <stdlib.h>
#include "flashoverlap/cuda/cudnn_graph.h"
#endif

enum { THREADS = 256, EIGHTH = 16 / sizeof(floatX) }; // EIGHTH: what is moved at once, 8 in bf16
typedef Vec<floatX, EIGHTH> Moved;

// ---- rows -------------------------------------------------------------------------------------------------
/* Rows of positions t0 ... t0+nt-1 of sequences seq0 ..., between an array in the order of rows and one in
 * the order of positions, [B, T, ...]; a warp a row. Widths are counted in Moved.
 */
template <int TO_POSITIONS>
static __global__ void order_kernel(Moved* dst, size_t dst_row, const Moved* src, size_t src_row, int width,
                                    FoLayout l, int seq0, int t0, int nt, size_t nrows) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (i >= nrows) { return; }
    int b = seq0 + (int)(i / (size_t)nt), t = t0 + (int)(i % (size_t)nt);
    size_t row = layout_row(l, b, t), position = (size_t)b * (size_t)l.T + (size_t)t;
    dst += (TO_POSITIONS ? position : row) * dst_row;
    src += (TO_POSITIONS ? row : position) * src_row;
    for (int c = (int)threadIdx.x % WARP; c < width; c += WARP) {
        dst[c] = src[c];
    }
}

// some rows of a width in elements, which lie dst_row and src_row elements apart
typedef struct {
    FoLayout l;
    int seq0, nseq, t0, nt;
} Rows;

template <int TO_POSITIONS>
static void order(floatX* dst, size_t dst_row, const floatX* src, size_t src_row, size_t width, Rows r,
                  FoStream* s) {
    size_t nrows = (size_t)r.nseq * (size_t)r.nt;
    launch(order_kernel<TO_POSITIONS>, cdiv(nrows, THREADS / WARP), THREADS, 0, s, (Moved*)dst,
           dst_row / EIGHTH, (const Moved*)src, src_row / EIGHTH, (int)(width / EIGHTH), r.l, r.seq0, r.t0,
           r.nt, nrows);
}

// lse between rows, [N, NH], and a call's [nseq, NH, queries]
template <int TO_ROWS>
static __global__ void lse_kernel(float* dst, const float* src, FoLayout l, int seq0, int t0, int queries,
                                  int NH, size_t nelem) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= nelem) { return; }
    int h = (int)(i % (size_t)NH), t = (int)(i / (size_t)NH % (size_t)queries);
    size_t b = i / (size_t)NH / (size_t)queries;
    size_t at_row = layout_row(l, seq0 + (int)b, t0 + t) * (size_t)NH + (size_t)h;
    size_t at_call = (b * (size_t)NH + (size_t)h) * (size_t)queries + (size_t)t;
    dst[TO_ROWS ? at_row : at_call] = src[TO_ROWS ? at_call : at_row];
}

template <int TO_ROWS>
static void move_lse(float* dst, const float* src, const FoSdpaCall* c, FoLayout l, FoStream* s) {
    size_t nelem = (size_t)(c->sdpa.nseq * c->sdpa.queries * c->sdpa.heads);
    launch(lse_kernel<TO_ROWS>, cdiv(nelem, THREADS), THREADS, 0, s, dst, src, l, c->seq0, c->q_first,
           (int)c->sdpa.queries, (int)c->sdpa.heads, nelem);
}

/* dq, rows of fp32, += a call's dq, [nseq, queries, NH*hs]. Four elements a thread: hs is a multiple of 8.
 * (cuDNN's fp32 sums of dq are not read: in what order they lie is its own affair.)
 */
static __global__ void add_dq_kernel(float* dq, const floatX* add, FoLayout l, int seq0, int t0, int queries,
                                     size_t quads_a_row, size_t nquads) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= nquads) { return; }
    size_t query = i / quads_a_row, b = query / (size_t)queries, t = query % (size_t)queries;
    float* to = dq + (layout_row(l, seq0 + (int)b, t0 + (int)t) * quads_a_row + i % quads_a_row) * 4;
    Vec<float, 4> sum = load<float, 4>(to);
    Vec<floatX, 4> x = load<floatX, 4>(add + i * 4);
    for (int k = 0; k < 4; k++) {
        sum.v[k] += to_float(x.v[k]);
    }
    store(to, sum);
}

static void add_dq(float* dq, const floatX* add, const FoSdpaCall* c, FoLayout l, FoStream* s) {
    const FoSdpa* x = &c->sdpa;
    size_t quads_a_row = (size_t)(x->heads * x->hs / 4);
    size_t nquads = (size_t)(x->nseq * x->queries) * quads_a_row;
    launch(add_dq_kernel, cdiv(nquads, THREADS), THREADS, 0, s, dq, add, l, c->seq0, c->q_first,
           (int)x->queries, quads_a_row, nquads);
}

// ---- memory -----------------------------------------------------------------------------------------------
typedef struct {
    FoSdpaCall calls[FO_SDPA_CALLS];
    int ncalls;
    FoSdpaGather gather;
    int wants_dq_sum;
    size_t nlse, ndq, workspace_nbytes; // the most that a call has or needs
} Plan;

static int make_plan(Plan* p, const FoSdpaEngine* e, FoSdpaKind kind, size_t row0, size_t n, FoLayout l,
                     int NH, int hs) {
    p->ncalls = fo__sdpa_calls(p->calls, &p->gather, kind, row0, n, l, NH, hs);
    p->nlse = p->ndq = p->workspace_nbytes = 0;
    p->wants_dq_sum = 0;
    for (int i = 0; i < p->ncalls; i++) {
        const FoSdpa* c = &p->calls[i].sdpa;
        FoSdpaNeeds needs = {0, 0};
        if (!e->plan(e->ctx, c, &needs)) { return 0; }
        p->wants_dq_sum = needs.wants_dq_sum; // the same for all
        size_t nlse = (size_t)(c->nseq * c->heads * c->queries);
        if (nlse > p->nlse) { p->nlse = nlse; }
        if (nlse * (size_t)hs > p->ndq) { p->ndq = nlse * (size_t)hs; }
        if (needs.workspace_nbytes > p->workspace_nbytes) { p->workspace_nbytes = needs.workspace_nbytes; }
    }
    return 1;
}

// the stream's scratch is had in one piece: first all sizes are added up, then the pieces are found
typedef struct {
    char* base;
    size_t nbytes;
} Carver;

static void* carve(Carver* c, size_t nbytes) {
    char* p = c->base ? c->base + c->nbytes : NULL;
    c->nbytes += (nbytes + 255) / 256 * 256;
    return p;
}

// ---- forward ----------------------------------------------------------------------------------------------
// keys that the calls want of sequence b
static int keys_wanted(const Plan* p, int b) {
    int64_t keys = 0;
    for (int i = 0; i < p->ncalls; i++) {
        const FoSdpaCall* c = &p->calls[i];
        if (b >= c->seq0 && b < c->seq0 + c->sdpa.nseq && c->sdpa.keys > keys) { keys = c->sdpa.keys; }
    }
    return (int)keys;
}

// k and v of as many positions as are wanted: others may not be there yet. Sequences that want as many go
// together
static void gather_keys(floatX* kv, const floatX* qkv, const Plan* p, FoLayout l, size_t C, FoStream* s) {
    for (int b = 0, nseq; b < l.B; b += nseq) {
        int keys = keys_wanted(p, b);
        for (nseq = 1; b + nseq < l.B && keys_wanted(p, b + nseq) == keys; nseq++) {}
        Rows r = {l, b, nseq, 0, keys};
        if (keys > 0) { order<1>(kv, 2 * C, qkv + C, 3 * C, 2 * C, r, s); }
    }
}

int fo__sdpa_forward(const FoSdpaEngine* e, floatX* out, float* lse, const floatX* qkv, size_t row0, size_t n,
                     FoLayout l, int NH, int hs, FoStream* s) {
    Plan p;
    size_t C = (size_t)NH * (size_t)hs, N = (size_t)l.B * (size_t)l.T;
    if (hs % 8 != 0 || !aligned16(out, qkv)) { return 0; }
    if (!make_plan(&p, e, FO_SDPA_FORWARD, row0, n, l, NH, hs)) { return 0; }
    Carver c = {NULL, 0};
    FoSdpaArrays a;
    floatX* kv;
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1) { c.base = (char*)fo__scratch(s, c.nbytes), c.nbytes = 0; }
        memset(&a, 0, sizeof a);
        a.lse = (float*)carve(&c, p.nlse * sizeof(float));
        a.workspace = carve(&c, p.workspace_nbytes);
        kv = (floatX*)carve(&c, p.gather == FO_SDPA_KEYS ? N * 2 * C * sizeof(floatX) : 0);
    }
    if (p.gather == FO_SDPA_KEYS) { gather_keys(kv, qkv, &p, l, C, s); }
    for (int i = 0; i < p.ncalls; i++) {
        const FoSdpaCall* call = &p.calls[i];
        a.q = qkv + call->q_at * 3 * C;
        a.out = out + call->q_at * C;
        a.k = p.gather == FO_SDPA_KEYS ? kv + call->kv_at * 2 * C : qkv + call->kv_at * 3 * C + C;
        a.v = a.k + C;
        e->run(e->ctx, &call->sdpa, &a, s);
        move_lse<1>(lse, a.lse, call, l, s);
    }
    return 1;
}

// ---- backward ---------------------------------------------------------------------------------------------
typedef struct {
    floatX* dqkv; // of FO_SDPA_BACKWARD
    float* dq;    // of FO_SDPA_BACKWARD_KV, as dkv
    floatX* dkv;
    const floatX *dout, *qkv, *out;
    const float* lse;
    FoLayout l;
    size_t C;
} Backward;

// arrays in the order of positions
typedef struct {
    floatX *q, *out, *dout; // q: or qkv, which keeps its width
    floatX* grads;          // dqkv or dkv
    floatX* dq;             // packed
} Ordered;

static void carve_backward(Carver* c, FoSdpaArrays* a, Ordered* o, const Plan* p, const Backward* x) {
    size_t N = (size_t)x->l.B * (size_t)x->l.T, row = N * x->C * sizeof(floatX);
    int all = p->gather == FO_SDPA_ALL, some = all || p->gather == FO_SDPA_QUERIES;
    memset(a, 0, sizeof *a);
    a->lse = (float*)carve(c, p->nlse * sizeof(float));
    a->delta = (float*)carve(c, p->nlse * sizeof(float));
    a->dq_sum = (float*)carve(c, p->wants_dq_sum ? p->ndq * sizeof(float) : 0);
    a->workspace = carve(c, p->workspace_nbytes);
    o->q = (floatX*)carve(c, all ? 3 * row : some ? row : 0);
    o->out = (floatX*)carve(c, some ? row : 0);
    o->dout = (floatX*)carve(c, some ? row : 0);
    o->grads = (floatX*)carve(c, !all ? 0 : x->dqkv ? 3 * row : 2 * row);
    o->dq = (floatX*)carve(c, x->dqkv ? 0 : p->ndq * sizeof(floatX));
}

static void gather(const Ordered* o, const Plan* p, const Backward* x, FoStream* s) {
    int first = p->calls[0].q_first; // calls begin with the earliest
    Rows r = {x->l, 0, x->l.B, first, x->l.T - first};
    size_t C = x->C, q = p->gather == FO_SDPA_ALL ? 3 * C : C;
    order<1>(o->q, q, x->qkv, 3 * C, q, r, s);
    order<1>(o->out, C, x->out, C, C, r, s);
    order<1>(o->dout, C, x->dout, C, C, r, s);
}

static void find_arrays(FoSdpaArrays* a, const FoSdpaCall* call, const Ordered* o, FoSdpaGather gathered,
                        const Backward* x) {
    size_t C = x->C, q_row = gathered == FO_SDPA_QUERIES ? C : 3 * C;
    int all = gathered == FO_SDPA_ALL, some = gathered != FO_SDPA_NONE;
    a->q = (some ? o->q : x->qkv) + call->q_at * q_row;
    a->out = (some ? o->out : (floatX*)x->out) + call->q_at * C;
    a->dout = (some ? o->dout : x->dout) + call->q_at * C;
    a->k = (all ? o->q : x->qkv) + call->kv_at * 3 * C + C;
    a->v = a->k + C;
    if (x->dqkv) {
        a->dq = (all ? o->grads : x->dqkv) + call->q_at * 3 * C;
        a->dk = a->dq + C;
    } else {
        a->dq = o->dq;
        a->dk = (all ? o->grads : x->dkv) + call->kv_at * 2 * C;
    }
    a->dv = a->dk + C;
}

static int backward(const FoSdpaEngine* e, FoSdpaKind kind, const Backward* x, size_t row0, size_t n, int NH,
                    int hs, FoStream* s) {
    Plan p;
    Carver c = {NULL, 0};
    FoSdpaArrays a;
    Ordered o;
    size_t C = x->C;
    if (hs % 8 != 0 || !aligned16(x->dqkv, x->dq, x->dkv, x->dout) || !aligned16(x->qkv, x->out)) {
        return 0;
    }
    if (!make_plan(&p, e, kind, row0, n, x->l, NH, hs)) { return 0; }
    carve_backward(&c, &a, &o, &p, x);
    c.base = (char*)fo__scratch(s, c.nbytes), c.nbytes = 0;
    carve_backward(&c, &a, &o, &p, x);
    if (p.gather != FO_SDPA_NONE) { gather(&o, &p, x, s); }
    for (int i = 0; i < p.ncalls; i++) {
        const FoSdpaCall* call = &p.calls[i];
        find_arrays(&a, call, &o, p.gather, x);
        move_lse<0>(a.lse, x->lse, call, x->l, s);
        e->run(e->ctx, &call->sdpa, &a, s);
        if (x->dq) { add_dq(x->dq, a.dq, call, x->l, s); }
    }
    if (p.gather == FO_SDPA_ALL) {
        Rows r = {x->l, 0, x->l.B, 0, x->l.T};
        size_t width = x->dqkv ? 3 * C : 2 * C;
        order<0>(x->dqkv ? x->dqkv : x->dkv, width, o.grads, width, width, r, s);
    }
    return 1;
}

int fo__sdpa_backward(const FoSdpaEngine* e, floatX* dqkv, const floatX* dout, const floatX* qkv,
                      const floatX* out, const float* lse, size_t row0, size_t n, FoLayout l, int NH, int hs,
                      FoStream* s) {
    Backward x = {dqkv, NULL, NULL, dout, qkv, out, lse, l, (size_t)NH * (size_t)hs};
    return backward(e, FO_SDPA_BACKWARD, &x, row0, n, NH, hs, s);
}

int fo__sdpa_backward_kv(const FoSdpaEngine* e, float* dq, floatX* dkv, const floatX* dout, const floatX* qkv,
                         const floatX* out, const float* lse, size_t row0, size_t n, FoLayout l, int NH,
                         int hs, FoStream* s) {
    Backward x = {NULL, dq, dkv, dout, qkv, out, lse, l, (size_t)NH * (size_t)hs};
    return backward(e, FO_SDPA_BACKWARD_KV, &x, row0, n, NH, hs, s);
}

// ---- cuDNN ------------------------------------------------------------------------------------------------
#if FO_CUDNN
typedef struct PlanEntry {
    FoCudnnPlan plan; // plan.plan NULL: refused
    struct PlanEntry* next;
} PlanEntry;

// of a rank
struct FoAttention {
    cudnnHandle_t handle; // NULL: cuDNN can't be used, state says why
    cudaStream_t stream;  // that the handle was last set to
    size_t version;       // 91900: 9.19.0
    int sm_major, deterministic;
    PlanEntry* plans;
    char state[160];
};

// A plan takes half a second, and a short sequence gains nothing from it: own kernels do those.
enum { SHORTEST = 128 };
// Deterministic plans store a number for each pair of a query and a key.
static const size_t MOST_WORKSPACE = (size_t)2 << 30;

static struct FoAttention* attention_of(FoDevice* d) {
    if (d->attention) { return d->attention; }
    struct FoAttention* x = (struct FoAttention*)calloc(1, sizeof *x);
    fo_require(x != NULL, "out of memory");
    d->attention = x;
    size_t v = x->version = cudnnGetVersion();
    x->sm_major = d->sm_major;
    int n = snprintf(x->state, sizeof x->state, "cuDNN %zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
    char* more = x->state + n;
    size_t room = sizeof x->state - (size_t)n;
    if (FO_FLOATX != FO_BF16) {
        snprintf(more, room, " not used: it has no attention in fp32");
    } else if (v < FO_CUDNN_OLDEST) {
        snprintf(more, room, " not used: 9.6 is needed");
    } else if (v == 91000 || v == 91001) {
        snprintf(more, room, " not used: its attention has bugs, 9.10.2 is needed");
    } else {
        cudnnStatus_t st = cudnnCreate(&x->handle);
        if (st != CUDNN_STATUS_SUCCESS) {
            x->handle = NULL;
            snprintf(more, room, " not used: %s", cudnnGetErrorString(st));
        }
    }
    return x;
}

const char* fo__cudnn_state(FoDevice* d) {
    return attention_of(d)->state;
}

static PlanEntry* find_plan(struct FoAttention* x, const FoSdpa* c) {
    PlanEntry* p = x->plans;
    int deterministic = c->backward ? x->deterministic : 0;
    while (p && (p->plan.deterministic != deterministic || memcmp(&p->plan.sdpa, c, sizeof *c) != 0)) {
        p = p->next;
    }
    return p;
}

/* Calls for which there are plans that compute wrongly, or that nobody has tried: NVIDIA's own frontend
 * refuses them too, or goes round them.
 */
static int known_bad(const struct FoAttention* x, const FoSdpa* c, int deterministic) {
    if (c->hs > 128) { return 1; }
    if (!c->backward) { return c->queries == 1 && x->version <= 90900; }
    if (c->queries == 1 && c->keys == 1) { return 1; }
    if (c->keys % 128 != 0 && x->version <= 91500) { return 1; }
    return deterministic && x->sm_major == 10 && x->version < 91800;
}

static int cudnn_plan(void* ctx, const FoSdpa* c, FoSdpaNeeds* needs) {
    struct FoAttention* x = (struct FoAttention*)ctx;
    int deterministic = c->backward ? x->deterministic : 0;
    size_t pairs_nbytes = (size_t)(c->nseq * c->heads * c->queries * c->keys) * 2;
    if (deterministic && pairs_nbytes > MOST_WORKSPACE) { return 0; }
    if (known_bad(x, c, deterministic)) { return 0; }
    PlanEntry* p = find_plan(x, c);
    if (!p) {
        p = (PlanEntry*)calloc(1, sizeof *p);
        fo_require(p != NULL, "out of memory");
        if (!fo__cudnn_plan(&p->plan, c, deterministic, x->handle, NULL)) { fo__cudnn_plan_free(&p->plan); }
        p->next = x->plans;
        x->plans = p;
    }
    needs->workspace_nbytes = (size_t)p->plan.workspace_nbytes;
    needs->wants_dq_sum = c->backward && !deterministic;
    return p->plan.plan != NULL && needs->workspace_nbytes <= MOST_WORKSPACE;
}

static void cudnn_run(void* ctx, const FoSdpa* c, const FoSdpaArrays* a, FoStream* s) {
    struct FoAttention* x = (struct FoAttention*)ctx;
    cudnnStatus_t st = CUDNN_STATUS_SUCCESS;
    if (x->stream != s->stream) { st = cudnnSetStream(x->handle, s->stream); }
    x->stream = s->stream;
    if (st == CUDNN_STATUS_SUCCESS) { st = fo__cudnn_plan_run(&find_plan(x, c)->plan, a, x->handle); }
    fo_require(st == CUDNN_STATUS_SUCCESS,
               "cuDNN's attention, %lld sequences, %lld heads of %lld, %lld queries, %lld keys: %s",
               (long long)c->nseq, (long long)c->heads, (long long)c->hs, (long long)c->queries,
               (long long)c->keys, cudnnGetErrorString(st));
}

// 0: cuDNN isn't asked
static int engine_for(FoSdpaEngine* e, FoLayout l, FoStream* s) {
    struct FoAttention* x = attention_of(s->device);
    if (!x->handle || l.T < SHORTEST) { return 0; }
    x->deterministic = s->device->deterministic;
    e->ctx = x, e->plan = cudnn_plan, e->run = cudnn_run;
    return 1;
}

int fo__cudnn_forward(floatX* out, float* lse, const floatX* qkv, size_t row0, size_t n, FoLayout l, int NH,
                      int hs, FoStream* s) {
    FoSdpaEngine e;
    return engine_for(&e, l, s) && fo__sdpa_forward(&e, out, lse, qkv, row0, n, l, NH, hs, s);
}

int fo__cudnn_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                       const float* lse, size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s) {
    FoSdpaEngine e;
    return engine_for(&e, l, s) && fo__sdpa_backward(&e, dqkv, dout, qkv, out, lse, row0, n, l, NH, hs, s);
}

int fo__cudnn_backward_kv(float* dq, floatX* dkv, const floatX* dout, const floatX* qkv, const floatX* out,
                          const float* lse, size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s) {
    FoSdpaEngine e;
    return engine_for(&e, l, s) &&
           fo__sdpa_backward_kv(&e, dq, dkv, dout, qkv, out, lse, row0, n, l, NH, hs, s);
}

void fo__cudnn_free(struct FoAttention* x) {
    while (x->plans) {
        PlanEntry* p = x->plans;
        x->plans = p->next;
        fo__cudnn_plan_free(&p->plan);
        free(p);
    }
    if (x->handle) { cudnnDestroy(x->handle); }
    free(x);
}
#endif
