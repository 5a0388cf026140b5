/* matmul.cu -- the matmuls of fo_ops.h on CUDA: cuBLASLt with a cache of plans, the bias gradient, and the
 * device's peak rate.
 *
 * cuBLASLt thinks in column-major matrices. A row-major [rows, cols] array is a column-major cols x rows one,
 * so each operation is written the other way round: the weight (or the activation of a weight gradient) is
 * A, rows of activations are columns of B and D, and a slice of rows is a moved pointer with the same plan.
 *
 * A row's bits and the number of rows: the library may choose another kernel for another number of rows.
 * Where rows are the result no split of the sum is allowed, so that what is left are kernels that add
 * products in the order of k, in the steps of the tensor cores' instruction; test_matmul.c looks whether the
 * bits are the same on the machine it runs on. Besides, schedules cut rows in the same way in every mode. A
 * weight gradient may be split: its sum is over the tokens, long, and its result small.
 *
 * FO_PLAIN_GEMM=1 in the environment takes the plain kernel below for everything: slow, and tells whether a
 * wrong number is the library's. Otherwise it serves what the library declines.
 */
#include "flashoverlap/cuda/cuda_common.cuh"
#include "flashoverlap/fo_ops.h"
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <type_traits>

// a call of cuBLASLt that can't fail but by a bug or a broken machine
#define LT(call)                                                         \
    do {                                                                 \
        cublasStatus_t lt_status_ = (call);                              \
        fo_require(lt_status_ == CUBLAS_STATUS_SUCCESS, "%s: %s", #call, \
                   cublasLtGetStatusString(lt_status_));                 \
    } while (0)

enum { WORKSPACE_NBYTES = 32 << 20, NBUCKETS = 256 };

enum Gelu { NO_GELU, GELU, GELU_SLOPE };

/* d = op(a) @ op(b) + bias, or d += op(a) @ op(b), column-major: op(a) is m x k, op(b) k x n, d m x n. a, b
 * and bias (one for each of the m) are floatX. The library alone, d floatX: with GELU the sum goes to aux and
 * its GELU to d, with GELU_SLOPE the sum is multiplied by GELU'(aux).
 */
struct Gemm {
    void* d; // of d_type
    const floatX *a, *b, *bias;
    floatX* aux; // like d
    int64_t m, n, k, lda, ldb, ldd;
    int transpose_a, transpose_b, accumulate, split_k;
    FoDtype d_type;
    Gelu gelu;
};

// ---- plain kernel -----------------------------------------------------------------------------------------
enum { TILE = 64, DEPTH = 16, PLAIN_THREADS = 256 };

// tile[k][i] = x[i * stride_i + k * stride_k] of TILE x DEPTH elements, zeros beyond the edge
static __device__ void load_tile(float tile[DEPTH][TILE + 1], const floatX* x, int64_t i0, int64_t k0,
                                 int64_t ni, int64_t nk, int64_t stride_i, int64_t stride_k) {
    for (int e = (int)threadIdx.x; e < TILE * DEPTH; e += PLAIN_THREADS) {
        // neighbouring threads take neighbouring elements
        int i = stride_i == 1 ? e % TILE : e / DEPTH, k = stride_i == 1 ? e / TILE : e % DEPTH;
        int inside = i0 + i < ni && k0 + k < nk;
        tile[k][i] = inside ? to_float(x[(i0 + i) * stride_i + (k0 + k) * stride_k]) : 0.0f;
    }
}

// a block computes TILE x TILE results, a thread 4 x 4 of them. k runs in order: a result's bits depend on
// nothing else
template <class T> static __global__ void plain_gemm_kernel(Gemm g) {
    __shared__ float a[DEPTH][TILE + 1], b[DEPTH][TILE + 1];
    int64_t m0 = (int64_t)blockIdx.x * TILE, n0 = (int64_t)blockIdx.y * TILE;
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < g.k; k0 += DEPTH) {
        load_tile(a, g.a, m0, k0, g.m, g.k, g.transpose_a ? g.lda : 1, g.transpose_a ? 1 : g.lda);
        load_tile(b, g.b, n0, k0, g.n, g.k, g.transpose_b ? 1 : g.ldb, g.transpose_b ? g.ldb : 1);
        __syncthreads();
        for (int k = 0; k < DEPTH; k++) {
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) {
                    sum[i][j] += a[k][x + 16 * i] * b[k][y + 16 * j];
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            int64_t m = m0 + x + 16 * i, n = n0 + y + 16 * j;
            if (m >= g.m || n >= g.n) { continue; }
            T* d = (T*)g.d + n * g.ldd + m;
            float v = sum[i][j];
            if (g.bias) { v += to_float(g.bias[m]); }
            if (g.accumulate) { v += to_float(*d); }
            *d = from_float<T>(v);
        }
    }
}

static void plain_gemm(const Gemm& g, FoStream* s) {
    dim3 grid(cdiv((size_t)g.m, TILE), cdiv((size_t)g.n, TILE));
    // CUDA allows 65,535 blocks along y: so many columns at a time
    const int64_t most = (int64_t)65535 * TILE;
    for (int64_t n0 = 0; n0 < g.n; n0 += most) {
        Gemm part = g;
        part.n = g.n - n0 < most ? g.n - n0 : most;
        part.b = g.b + n0 * (g.transpose_b ? 1 : g.ldb);
        part.d = (char*)g.d + (size_t)(n0 * g.ldd) * fo_dtype_nbytes(g.d_type);
        grid.y = cdiv((size_t)part.n, TILE);
        launch(g.d_type == FO_FP32 ? plain_gemm_kernel<float> : plain_gemm_kernel<floatX>, grid,
               PLAIN_THREADS, 0, s, part);
    }
}

// ---- plans ------------------------------------------------------------------------------------------------
// what makes two GEMMs the same plan; compared as bytes
struct Key {
    int64_t m, n, k, lda, ldb, ldd;
    int32_t transpose_a, transpose_b, accumulate, split_k, d_type, epilogue;
    int32_t align_a, align_b, align_d, align_bias; // of all columns, in bytes, at most 256
    int32_t align_aux, sm_target;                  // sm_target: SMs to use, 0: all
};
static_assert(std::has_unique_object_representations_v<Key>, "padding would be compared");

struct Plan {
    Plan* next; // of its bucket
    Key key;
    int declined; // the library has nothing for it
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    size_t workspace_nbytes;
};

// a rank's; only the rank's thread uses it, so it has no lock
struct FoMatmul {
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    int plain; // FO_PLAIN_GEMM
    int tf32;  // of an FP32 build
    Plan* buckets[NBUCKETS];
};

static FoMatmul* matmul_of(FoDevice* d) {
    if (d->matmul) { return d->matmul; }
    FoMatmul* m = (FoMatmul*)calloc(1, sizeof *m);
    fo_require(m != NULL, "out of memory");
    const char* plain = getenv("FO_PLAIN_GEMM");
    m->tf32 = d->tf32 && FO_FLOATX == FO_FP32;
    m->plain = plain != NULL && strcmp(plain, "1") == 0;
    LT(cublasLtCreate(&m->handle));
    LT(cublasLtMatmulPreferenceCreate(&m->preference));
    d->matmul = m;
    return m;
}

static void plan_free(Plan* p) {
    cublasLtMatrixLayoutDestroy(p->a);
    cublasLtMatrixLayoutDestroy(p->b);
    cublasLtMatrixLayoutDestroy(p->d);
    cublasLtMatmulDescDestroy(p->desc);
    free(p);
}

void fo__matmul_free(FoMatmul* m) {
    for (int i = 0; i < NBUCKETS; i++) {
        for (Plan *p = m->buckets[i], *next; p; p = next) {
            next = p->next;
            plan_free(p);
        }
    }
    cublasLtMatmulPreferenceDestroy(m->preference);
    cublasLtDestroy(m->handle);
    free(m);
}

// of a matrix whose first column is at p, the next one nbytes on
static int32_t alignment(const void* p, int64_t nbytes) {
    uintptr_t bits = (uintptr_t)p | (uintptr_t)nbytes | 256;
    return (int32_t)(bits & (~bits + 1));
}

static cudaDataType_t data_type(FoDtype t) {
    return t == FO_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

template <class T> static void desc_set(Plan* p, cublasLtMatmulDescAttributes_t attribute, T value) {
    LT(cublasLtMatmulDescSetAttribute(p->desc, attribute, &value, sizeof value));
}

template <class T>
static void preference_set(FoMatmul* m, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    LT(cublasLtMatmulPreferenceSetAttribute(m->preference, attribute, &value, sizeof value));
}

static cublasLtEpilogue_t epilogue_of(const Gemm& g) {
    switch (g.gelu) {
    case GELU: return g.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case GELU_SLOPE: return CUBLASLT_EPILOGUE_DGELU;
    default: return g.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    }
}

static void set_pointers(Plan* p, const Gemm& g) {
    if (g.bias) { desc_set(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (const void*)g.bias); }
    if (g.aux) { desc_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void*)g.aux); }
}

// Bias and aux have D's type: the library knows no other. Their pointers are set at each call, and here too:
// the heuristic looks at their alignment.
static void plan_describe(Plan* p, const Gemm& g, int tf32) {
    const Key& k = p->key;
    const cudaDataType_t type = data_type(FO_FLOATX);
    LT(cublasLtMatmulDescCreate(&p->desc, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                CUDA_R_32F));
    desc_set(p, CUBLASLT_MATMUL_DESC_TRANSA, k.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    desc_set(p, CUBLASLT_MATMUL_DESC_TRANSB, k.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    desc_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE, (cublasLtEpilogue_t)k.epilogue);
    set_pointers(p, g);
    if (g.aux) { desc_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, k.ldd); }
    if (k.sm_target > 0) { desc_set(p, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, k.sm_target); }
    LT(cublasLtMatrixLayoutCreate(&p->a, type, (uint64_t)(k.transpose_a ? k.k : k.m),
                                  (uint64_t)(k.transpose_a ? k.m : k.k), k.lda));
    LT(cublasLtMatrixLayoutCreate(&p->b, type, (uint64_t)(k.transpose_b ? k.n : k.k),
                                  (uint64_t)(k.transpose_b ? k.k : k.n), k.ldb));
    LT(cublasLtMatrixLayoutCreate(&p->d, data_type(g.d_type), (uint64_t)k.m, (uint64_t)k.n, k.ldd));
}

static Plan* plan_create(FoMatmul* m, const Key& key, const Gemm& g) {
    Plan* p = (Plan*)calloc(1, sizeof *p);
    fo_require(p != NULL, "out of memory");
    p->key = key;
    plan_describe(p, g, m->tf32);
    preference_set(m, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)WORKSPACE_NBYTES);
    preference_set(m, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)key.align_a);
    preference_set(m, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)key.align_b);
    preference_set(m, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)key.align_d);
    preference_set(m, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)key.align_d);
    // of the ways to split, the one that adds fp32 parts in a fixed order in a kernel of its own
    preference_set(
        m, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        (uint32_t)(key.split_k ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE));
    cublasLtMatmulHeuristicResult_t result;
    int nresults = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(m->handle, p->desc, p->a, p->b, p->d, p->d,
                                                           m->preference, 1, &result, &nresults);
    fo_require(status == CUBLAS_STATUS_SUCCESS || status == CUBLAS_STATUS_NOT_SUPPORTED,
               "cuBLASLt has no plan for m=%lld n=%lld k=%lld: %s", (long long)key.m, (long long)key.n,
               (long long)key.k, cublasLtGetStatusString(status));
    p->declined = status != CUBLAS_STATUS_SUCCESS || nresults < 1;
    if (p->declined) { return p; }
    p->algo = result.algo;
    p->workspace_nbytes = result.workspaceSize;
    return p;
}

static Plan* plan_of(FoMatmul* m, const Gemm& g, int sm_target) {
    Key key = {};
    key.m = g.m, key.n = g.n, key.k = g.k, key.lda = g.lda, key.ldb = g.ldb, key.ldd = g.ldd;
    key.transpose_a = g.transpose_a, key.transpose_b = g.transpose_b;
    key.accumulate = g.accumulate, key.split_k = g.split_k, key.d_type = g.d_type;
    key.epilogue = epilogue_of(g);
    key.align_a = alignment(g.a, g.lda * (int64_t)sizeof(floatX));
    key.align_b = alignment(g.b, g.ldb * (int64_t)sizeof(floatX));
    key.align_d = alignment(g.d, g.ldd * (int64_t)fo_dtype_nbytes(g.d_type));
    key.align_bias = g.bias ? alignment(g.bias, 0) : 0;
    key.align_aux = g.aux ? alignment(g.aux, 0) : 0;
    key.sm_target = sm_target;
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < sizeof key; i++) {
        hash = (hash ^ ((const unsigned char*)&key)[i]) * 1099511628211u;
    }
    Plan** bucket = &m->buckets[(hash >> 32) % NBUCKETS];
    for (Plan* p = *bucket; p; p = p->next) {
        if (memcmp(&p->key, &key, sizeof key) == 0) { return p; }
    }
    Plan* p = plan_create(m, key, g);
    p->next = *bucket;
    *bucket = p;
    return p;
}

// ---- a GEMM -----------------------------------------------------------------------------------------------
static __global__ void add_bias_kernel(float* out, const floatX* bias, size_t nelem, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < nelem) { out[i] += to_float(bias[i % (size_t)OC]); }
}

static void* workspace(FoStream* s) {
    if (!s->workspace) { s->workspace = fo__alloc(s->device, WORKSPACE_NBYTES, "cuBLASLt's workspace"); }
    return s->workspace;
}

// NULL: the library declines
static Plan* library_plan(const Gemm& g, FoStream* s) {
    FoDevice* d = s->device;
    FoMatmul* m = matmul_of(d);
    if (m->plain) { return NULL; }
    Plan* p = plan_of(m, g, d->reserved_sms > 0 ? d->nsm - d->reserved_sms : 0);
    return p->declined ? NULL : p;
}

static void library_gemm(Plan* p, const Gemm& g, FoStream* s) {
    float one = 1.0f, beta = g.accumulate ? 1.0f : 0.0f;
    set_pointers(p, g);
    LT(cublasLtMatmul(s->device->matmul->handle, p->desc, &one, g.a, p->a, g.b, p->b, &beta, g.d, p->d, g.d,
                      p->d, &p->algo, workspace(s), p->workspace_nbytes, s->stream));
}

static void gemm(const Gemm& g, FoStream* s) {
    if (g.m == 0 || g.n == 0 || g.k == 0) { return; }
    Gemm library = g;
    int bias_apart = g.bias && g.d_type != FO_FLOATX; // the library's bias would have to be fp32
    if (bias_apart) { library.bias = NULL; }
    Plan* p = library_plan(library, s);
    if (!p) {
        plain_gemm(g, s);
        return;
    }
    library_gemm(p, library, s);
    if (bias_apart) {
        size_t nelem = (size_t)g.m * (size_t)g.n;
        launch(add_bias_kernel, cdiv(nelem, 256), 256, 0, s, (float*)g.d, g.bias, nelem, (int)g.m);
    }
}

// with the GELU. NULL: the device is not told to fuse it, or the library declines, or what it demands of aux
static Plan* fused_plan(const Gemm& g, int level, FoStream* s) {
    if (s->device->fuse_gelu < level || g.n == 0 || g.m % 8 != 0 || !aligned16(g.aux)) { return NULL; }
    return library_plan(g, s);
}

// ---- fo_ops.h ---------------------------------------------------------------------------------------------
static void check_sizes(int K, int OC, FoDtype out_type) {
    fo_require(K > 0 && OC > 0, "K=%d and OC=%d, want both above 0", K, OC);
    fo_require(out_type == FO_FLOATX || out_type == FO_FP32, "out_type %d, want floatX or fp32",
               (int)out_type);
}

// out = inp @ weight^T
static Gemm forward_gemm(void* out, const floatX* inp, const floatX* weight, size_t n, int K, int OC,
                         FoDtype out_type) {
    check_sizes(K, OC, out_type);
    Gemm g = {};
    g.d = out, g.a = weight, g.b = inp, g.d_type = out_type;
    g.m = OC, g.n = (int64_t)n, g.k = K;
    g.lda = K, g.ldb = K, g.ldd = OC;
    g.transpose_a = 1;
    return g;
}

// dinp = dout @ weight
static Gemm dgrad_gemm(void* dinp, const floatX* dout, const floatX* weight, size_t n, int K, int OC,
                       FoDtype out_type) {
    check_sizes(K, OC, out_type);
    Gemm g = {};
    g.d = dinp, g.a = weight, g.b = dout, g.d_type = out_type;
    g.m = K, g.n = (int64_t)n, g.k = OC;
    g.lda = K, g.ldb = OC, g.ldd = K;
    return g;
}

void fo_matmul_forward(void* out, const floatX* inp, const floatX* weight, const floatX* bias, size_t n,
                       int K, int OC, FoDtype out_type, FoStream* s) {
    Gemm g = forward_gemm(out, inp, weight, n, K, OC, out_type);
    g.bias = bias;
    FO_OP(s);
    gemm(g, s);
}

void fo_matmul_gelu_forward(floatX* out, floatX* gelu, const floatX* inp, const floatX* weight,
                            const floatX* bias, size_t n, int K, int OC, FoStream* s) {
    Gemm g = forward_gemm(gelu, inp, weight, n, K, OC, FO_FLOATX);
    g.bias = bias, g.aux = out, g.gelu = GELU;
    Plan* p = fused_plan(g, 1, s);
    if (p) {
        FO_OP(s);
        library_gemm(p, g, s);
        return;
    }
    fo_matmul_forward(out, inp, weight, bias, n, K, OC, FO_FLOATX, s);
    fo_gelu_forward(gelu, out, n * (size_t)OC, s);
}

void fo_matmul_forward_add(float* out, const floatX* inp, const floatX* weight, size_t n, int K, int OC,
                           FoStream* s) {
    Gemm g = forward_gemm(out, inp, weight, n, K, OC, FO_FP32);
    g.accumulate = 1;
    FO_OP(s);
    gemm(g, s);
}

void fo_matmul_dgrad(void* dinp, const floatX* dout, const floatX* weight, size_t n, int K, int OC,
                     FoDtype out_type, FoStream* s) {
    Gemm g = dgrad_gemm(dinp, dout, weight, n, K, OC, out_type);
    FO_OP(s);
    gemm(g, s);
}

void fo_matmul_gelu_dgrad(floatX* dinp, const floatX* dout, const floatX* weight, const floatX* pregelu,
                          size_t n, int K, int OC, FoStream* s) {
    Gemm g = dgrad_gemm(dinp, dout, weight, n, K, OC, FO_FLOATX);
    g.aux = (floatX*)pregelu, g.gelu = GELU_SLOPE;
    Plan* p = fused_plan(g, 2, s);
    if (p) {
        FO_OP(s);
        library_gemm(p, g, s);
        return;
    }
    fo_matmul_dgrad(dinp, dout, weight, n, K, OC, FO_FLOATX, s);
    fo_gelu_backward(dinp, dinp, pregelu, n * (size_t)K, s);
}

void fo_matmul_dgrad_add(float* dinp, const floatX* dout, const floatX* weight, size_t n, int K, int OC,
                         FoStream* s) {
    Gemm g = dgrad_gemm(dinp, dout, weight, n, K, OC, FO_FP32);
    g.accumulate = 1;
    FO_OP(s);
    gemm(g, s);
}

void fo_matmul_wgrad(float* dweight, float* dbias, const floatX* dout, const floatX* inp, size_t n, int K,
                     int OC, FoStream* s) {
    fo_matmul_wgrad_rows(dweight, dout, inp, 0, (size_t)OC, n, K, OC, s);
    if (dbias) { fo_bias_backward(dbias, dout, n, OC, s); }
}

void fo_matmul_wgrad_rows(float* dweight, const floatX* dout, const floatX* inp, size_t row0, size_t nrows,
                          size_t n, int K, int OC, FoStream* s) {
    check_sizes(K, OC, FO_FP32);
    fo_require(row0 + nrows <= (size_t)OC, "rows %zu to %zu of %d", row0, row0 + nrows, OC);
    Gemm g = {};
    g.d = dweight + row0 * (size_t)K, g.a = inp, g.b = dout + row0, g.d_type = FO_FP32;
    g.m = K, g.n = (int64_t)nrows, g.k = (int64_t)n;
    g.lda = K, g.ldb = OC, g.ldd = K;
    g.transpose_b = 1, g.accumulate = 1, g.split_k = 1;
    FO_OP(s);
    gemm(g, s);
}

// ---- bias gradient ----------------------------------------------------------------------------------------
enum { SUM_WARPS = 8 };

/* column_sums_kernel -- out[y, c] = sum of the rows y*per_block ... of column c (add: what is there first).
 *
 * A thread has V neighbouring columns; the warps of a block take rows in turn, and their sums are added in
 * order. The order, and with it the bits, depends on n and per_block alone.
 */
template <class T, int V>
static __global__ void column_sums_kernel(float* out, const T* inp, size_t n, int C, size_t per_block,
                                          int add) {
    __shared__ float by_warp[SUM_WARPS][WARP * V];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, first = (int)blockIdx.x * WARP * V;
    size_t begin = (size_t)blockIdx.y * per_block, end = begin + per_block < n ? begin + per_block : n;
    float sum[V] = {};
    if (first + lane * V < C) { // V divides C
        const T* column = inp + first + lane * V;
        #pragma unroll 4
        for (size_t row = begin + (size_t)warp; row < end; row += SUM_WARPS) {
            Vec<T, V> x = load<T, V>(column + row * (size_t)C);
            for (int i = 0; i < V; i++) {
                sum[i] += to_float(x.v[i]);
            }
        }
    }
    for (int i = 0; i < V; i++) {
        by_warp[warp][lane * V + i] = sum[i];
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < WARP * V && first + i < C; i += SUM_WARPS * WARP) {
        float total = 0.0f;
        for (int w = 0; w < SUM_WARPS; w++) {
            total += by_warp[w][i];
        }
        float* to = out + (size_t)blockIdx.y * (size_t)C + first + i;
        *to = add ? *to + total : total;
    }
}

/* Two rounds: blocks of rows, then over the blocks. Enough blocks to fill the largest chip, and rows enough
 * for each that the second round's bytes are a few percent of the first's.
 */
void fo_bias_backward(float* dbias, const floatX* dout, size_t n, int C, FoStream* s) {
    const int V = 16 / (int)sizeof(floatX);
    if (n == 0) { return; }
    FO_OP(s);
    size_t blocks = cdiv(512, cdiv((size_t)C, (size_t)(WARP * V))), most = cdiv(n, 64);
    size_t per_block = cdiv(n, blocks < most ? blocks : most);
    blocks = cdiv(n, per_block);
    float* sums = (float*)fo__scratch(s, blocks * (size_t)C * sizeof(float));
    dim3 threads(SUM_WARPS * WARP);
    if (C % V == 0 && aligned16(dout)) {
        launch(column_sums_kernel<floatX, V>, dim3(cdiv((size_t)C, (size_t)(WARP * V)), (unsigned)blocks),
               threads, 0, s, sums, dout, n, C, per_block, 0);
    } else {
        launch(column_sums_kernel<floatX, 1>, dim3(cdiv((size_t)C, WARP), (unsigned)blocks), threads, 0, s,
               sums, dout, n, C, per_block, 0);
    }
    launch(column_sums_kernel<float, 1>, cdiv((size_t)C, WARP), threads, 0, s, dbias, sums, blocks, C, blocks,
           1);
}

// ---- library and peak -------------------------------------------------------------------------------------
namespace {
struct Version {
    char text[48];
    Version() {
        int v = (int)cublasLtGetVersion();
        snprintf(text, sizeof text, "cuBLASLt %d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    }
};
} // namespace

const char* fo__matmul_version(void) {
    static const Version version;
    return version.text;
}

// numbers like weights: with zeros a chip draws less power and runs faster than it ever will
static __global__ void fill_kernel(floatX* out, size_t nelem) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned x = (unsigned)i * 2654435761u;
    x = (x ^ (x >> 15)) * 2246822519u;
    if (i < nelem) { out[i] = from_float<floatX>((float)(x >> 8) / (float)(1 << 23) - 1.0f); }
}

static double time_square(FoStream* s, size_t size) {
    enum { RUNS = 20 };
    FoDevice* d = fo_stream_device(s);
    size_t nelem = size * size;
    floatX* x[3];
    for (int i = 0; i < 3; i++) {
        x[i] = (floatX*)fo_malloc(d, nelem * sizeof(floatX));
        launch(fill_kernel, cdiv(nelem, 256), 256, 0, s, x[i], nelem);
    }
    double begin = 0.0;
    for (int i = -1; i < RUNS; i++) { // the first loads the kernel and is not counted
        if (i == 0) {
            fo_stream_sync(s);
            begin = fo_now();
        }
        gemm(forward_gemm(x[0], x[1], x[2], size, (int)size, (int)size, FO_FLOATX), s);
    }
    fo_stream_sync(s);
    double seconds = (fo_now() - begin) / RUNS;
    for (int i = 0; i < 3; i++) {
        fo_free(d, x[i]);
    }
    return seconds;
}

/* TFLOP/s of a large square GEMM of floatX: the size is doubled until 20 runs take 20 ms, or 8,192 is
 * reached, or its matrices would take half of what is free. Not while the rank's calls are captured.
 */
double fo__matmul_tflops(FoDevice* d) {
    FoStream* s = fo_stream_create(d, "peak");
    size_t size = 128;
    double seconds = 0.0;
    const size_t most = fo_device_free_nbytes(d) / 2;
    while (seconds == 0.0 || (seconds < 1e-3 && size < 8192 && 12 * size * size * sizeof(floatX) <= most)) {
        size *= 2;
        seconds = time_square(s, size);
    }
    fo_stream_destroy(s);
    return 2e-12 * (double)size * (double)size * (double)size / seconds;
}
