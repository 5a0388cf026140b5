/* cublaslt.cpp -- the part of cuBLASLt that the cuda device uses, on the CPU.
 *
 * Stricter than the library where that finds bugs: an algorithm fits the problem it was chosen for and no
 * other, pointers must be aligned as the heuristic was told, every GEMM writes to its workspace (so that two
 * streams that share one are a race), and what would be undefined is an error. Each error says why on stderr.
 * FO_EMU_GEMM_ALIGN=N: nothing is found for matrices that are aligned to less than N bytes.
 *
 * A result is the sum over k in order, in fp32, whatever the shape of the rest.
 */
#include "dev/emu/stream.h"
#include <cublasLt.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

namespace {
struct Desc {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    cublasOperation_t transpose_a, transpose_b;
    cublasLtEpilogue_t epilogue;
    const void* bias;
    void* aux;
    int64_t aux_ld;
    int32_t bias_type, aux_type, sm_target; // types: -1 for that of D
};

struct Layout {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
};

struct Preference {
    uint64_t workspace_nbytes;
    uint32_t align[4]; // of A, B, C, D
    uint32_t reductions;
};

struct Handle {
    int device;
};

// what cublasLtMatmulAlgo_t holds: the problem it is for
struct Algo {
    uint64_t hash;
    uint32_t align[4];
    uint64_t workspace_nbytes;
};
static_assert(sizeof(Algo) <= sizeof(cublasLtMatmulAlgo_t), "an algorithm is too large");

Desc* of(cublasLtMatmulDesc_t d) {
    return reinterpret_cast<Desc*>(d);
}
Layout* of(cublasLtMatrixLayout_t l) {
    return reinterpret_cast<Layout*>(l);
}
Preference* of(cublasLtMatmulPreference_t p) {
    return reinterpret_cast<Preference*>(p);
}

#define REFUSE(status, ...) \
    return (fprintf(stderr, "emu: cuBLASLt: " __VA_ARGS__), fputc('\n', stderr), status)
#define INVALID(...)     REFUSE(CUBLAS_STATUS_INVALID_VALUE, __VA_ARGS__)
#define UNSUPPORTED(...) REFUSE(CUBLAS_STATUS_NOT_SUPPORTED, __VA_ARGS__)

// ---- numbers ----------------------------------------------------------------------------------------------
size_t width(cudaDataType_t t) {
    return t == CUDA_R_16BF ? 2 : 4;
}

float get(const void* p, size_t i, cudaDataType_t t) {
    if (t == CUDA_R_32F) { return static_cast<const float*>(p)[i]; }
    uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(p)[i]) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

void put(void* p, size_t i, cudaDataType_t t, float f) {
    if (t == CUDA_R_32F) {
        static_cast<float*>(p)[i] = f;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    static_cast<uint16_t*>(p)[i] = f != f ? 0x7fff : static_cast<uint16_t>(rounded >> 16);
}

float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

float gelu_slope(float x) {
    float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
}

// ---- a GEMM -----------------------------------------------------------------------------------------------
/* A tile of MR x NR results is summed over all of k at once, from panels of fp32 in the order in which it
 * reads them, with zeros beyond the edge. So each result is computed alike, wherever it lies.
 */
enum { MR = 32, NR = 8, LANES = 16 };
typedef float Lane __attribute__((vector_size(LANES * 4), aligned(4)));

// panel[k][i] = op(x)[first + i][k], i < size; element [i][k] is at i*stride_i + k*stride_k
void pack(float* panel, const void* x, cudaDataType_t t, size_t first, size_t n, size_t K, size_t size,
          size_t stride_i, size_t stride_k) {
    for (size_t k = 0; k < K; k++) {
        for (size_t i = 0; i < size; i++) {
            panel[k * size + i] = first + i < n ? get(x, (first + i) * stride_i + k * stride_k, t) : 0.0f;
        }
    }
}

// to TF32's 10 bits behind the point, as a tensor core sees a number
void round_tf32(std::vector<float>& panel) {
    for (float& f : panel) {
        uint32_t u;
        memcpy(&u, &f, sizeof u);
        u = (u + 0x1000u) & ~0x1fffu;
        memcpy(&f, &u, sizeof u);
    }
}

void tile(float out[NR][MR], const float* a, const float* b, size_t K) {
    Lane sum[NR][MR / LANES] = {};
    for (size_t k = 0; k < K; k++) {
        for (int j = 0; j < NR; j++) {
            for (int i = 0; i < MR / LANES; i++) {
                Lane x;
                memcpy(&x, a + k * MR + static_cast<size_t>(i * LANES), sizeof x);
                sum[j][i] += x * b[k * NR + static_cast<size_t>(j)];
            }
        }
    }
    memcpy(out, sum, sizeof sum);
}

// tells the checker of a matrix column by column, where columns have gaps between them
void touch(const void* p, const Layout& l, int write) {
    const size_t size = width(l.type), column = l.rows * size;
    const bool dense = l.ld == static_cast<int64_t>(l.rows);
    for (uint64_t c = 0; c < (dense ? 1 : l.cols); c++) {
        const char* at = static_cast<const char*>(p) + c * static_cast<uint64_t>(l.ld) * size;
        const size_t nbytes = dense ? column * l.cols : column;
        if (write) {
            emu::touch_write(const_cast<char*>(at), nbytes);
        } else {
            emu::touch_read(at, nbytes);
        }
    }
}

bool has(cublasLtEpilogue_t epilogue, int part) {
    return (static_cast<int>(epilogue) & part) != 0;
}

struct Gemm : emu::Op {
    Desc desc;
    Layout a, b, c, d;
    const void *A, *B, *C;
    void *D, *workspace;
    size_t workspace_nbytes;
    float alpha, beta;
    size_t k;
    bool poll() override;
    void touch_all();
    void store(float sums[NR][MR], size_t m0, size_t n0);
};

void Gemm::touch_all() {
    touch(A, a, 0);
    touch(B, b, 0);
    if (beta != 0.0f) { touch(C, c, 0); }
    if (has(desc.epilogue, CUBLASLT_EPILOGUE_BIAS)) { emu::touch_read(desc.bias, d.rows * width(d.type)); }
    if (has(desc.epilogue, 128)) {
        Layout aux = {d.type, d.rows, d.cols, desc.aux_ld};
        touch(desc.aux, aux, desc.epilogue != CUBLASLT_EPILOGUE_DGELU);
    }
    touch(D, d, 1);
    emu::touch_write(workspace, workspace_nbytes);
}

void Gemm::store(float sums[NR][MR], size_t m0, size_t n0) {
    for (size_t j = 0; j < NR && n0 + j < d.cols; j++) {
        for (size_t i = 0; i < MR && m0 + i < d.rows; i++) {
            const size_t m = m0 + i, n = n0 + j, at_d = n * static_cast<size_t>(d.ld) + m;
            const size_t at_aux = n * static_cast<size_t>(desc.aux_ld) + m;
            float v = alpha * sums[j][i];
            if (beta != 0.0f) { v += beta * get(C, n * static_cast<size_t>(c.ld) + m, c.type); }
            if (has(desc.epilogue, CUBLASLT_EPILOGUE_BIAS)) { v += get(desc.bias, m, d.type); }
            if (desc.epilogue == CUBLASLT_EPILOGUE_DGELU) { v *= gelu_slope(get(desc.aux, at_aux, d.type)); }
            if (has(desc.epilogue, CUBLASLT_EPILOGUE_GELU)) {
                put(desc.aux, at_aux, d.type, v);
                v = gelu(v);
            }
            put(D, at_d, d.type, v);
        }
    }
}

bool Gemm::poll() {
    const bool ta = desc.transpose_a != CUBLAS_OP_N, tb = desc.transpose_b != CUBLAS_OP_N;
    const size_t lda = static_cast<size_t>(a.ld), ldb = static_cast<size_t>(b.ld);
    const size_t npanels = (d.cols + NR - 1) / NR;
    touch_all();
    std::vector<float> a_panel(k * MR), b_panels(npanels * k * NR);
    for (size_t p = 0; p < npanels; p++) {
        pack(&b_panels[p * k * NR], B, b.type, p * NR, d.cols, k, NR, tb ? 1 : ldb, tb ? ldb : 1);
    }
    const bool tf32 = desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (tf32) { round_tf32(b_panels); }
    for (size_t m0 = 0; m0 < d.rows; m0 += MR) {
        pack(a_panel.data(), A, a.type, m0, d.rows, k, MR, ta ? lda : 1, ta ? 1 : lda);
        if (tf32) { round_tf32(a_panel); }
        for (size_t p = 0; p < npanels; p++) {
            float sums[NR][MR];
            tile(sums, a_panel.data(), &b_panels[p * k * NR], k);
            store(sums, m0, p * NR);
        }
    }
    memset(workspace, 0xff, workspace_nbytes); // NaN for whoever takes it for theirs
    return true;
}

// ---- what fits together -----------------------------------------------------------------------------------
cublasStatus_t check_epilogue(const Desc& x, const Layout& d) {
    switch (x.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU: break;
    default: UNSUPPORTED("epilogue %d is not emulated", static_cast<int>(x.epilogue));
    }
    if (has(x.epilogue, CUBLASLT_EPILOGUE_BIAS)) {
        if (!x.bias) { INVALID("a bias epilogue without a bias"); }
        if (x.bias_type != -1 && x.bias_type != static_cast<int32_t>(d.type)) {
            INVALID("a bias of type %d, D is of type %d", x.bias_type, static_cast<int>(d.type));
        }
    }
    if (has(x.epilogue, 128)) {
        if (!x.aux || reinterpret_cast<uintptr_t>(x.aux) % 16 != 0) {
            INVALID("aux %p: want 16 bytes", x.aux);
        }
        if (x.aux_ld % 8 != 0 || x.aux_ld < static_cast<int64_t>(d.rows)) {
            INVALID("aux_ld %lld, want a multiple of 8, at least %llu", static_cast<long long>(x.aux_ld),
                    static_cast<unsigned long long>(d.rows));
        }
        if (x.aux_type != -1 && x.aux_type != static_cast<int32_t>(d.type)) {
            INVALID("aux of type %d, D is of type %d", x.aux_type, static_cast<int>(d.type));
        }
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_problem(const Desc& x, const Layout& a, const Layout& b, const Layout& c,
                             const Layout& d) {
    const bool ta = x.transpose_a != CUBLAS_OP_N, tb = x.transpose_b != CUBLAS_OP_N;
    const uint64_t m = ta ? a.cols : a.rows, k = ta ? a.rows : a.cols;
    const uint64_t kb = tb ? b.cols : b.rows, n = tb ? b.rows : b.cols;
    if (k != kb || d.rows != m || d.cols != n || c.rows != m || c.cols != n || m == 0 || n == 0 || k == 0) {
        INVALID("op(A) %llu x %llu, op(B) %llu x %llu, C %llu x %llu, D %llu x %llu",
                static_cast<unsigned long long>(m), static_cast<unsigned long long>(k),
                static_cast<unsigned long long>(kb), static_cast<unsigned long long>(n),
                static_cast<unsigned long long>(c.rows), static_cast<unsigned long long>(c.cols),
                static_cast<unsigned long long>(d.rows), static_cast<unsigned long long>(d.cols));
    }
    for (const Layout* l : {&a, &b, &c, &d}) {
        if (l->ld < static_cast<int64_t>(l->rows)) {
            INVALID("ld %lld of a matrix with %llu rows", static_cast<long long>(l->ld),
                    static_cast<unsigned long long>(l->rows));
        }
    }
    const bool tf32 = x.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a.type == CUDA_R_32F;
    if ((x.compute != CUBLAS_COMPUTE_32F && !tf32) || x.scale != CUDA_R_32F || a.type != b.type ||
        c.type != d.type || (a.type == CUDA_R_32F && d.type != CUDA_R_32F)) {
        UNSUPPORTED("A of type %d, B %d, C %d, D %d is not emulated", static_cast<int>(a.type),
                    static_cast<int>(b.type), static_cast<int>(c.type), static_cast<int>(d.type));
    }
    return check_epilogue(x, d);
}

// of all that decides a plan; pointers are not part of it
uint64_t problem_hash(const Desc& x, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    uint64_t hash = 14695981039346656037u;
    std::vector<int64_t> words = {x.transpose_a, x.transpose_b, x.epilogue, x.sm_target, x.aux_ld, x.compute};
    for (const Layout* l : {&a, &b, &c, &d}) {
        words.insert(words.end(),
                     {l->type, static_cast<int64_t>(l->rows), static_cast<int64_t>(l->cols), l->ld});
    }
    for (int64_t word : words) {
        hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211u;
        hash ^= hash >> 29;
    }
    return hash;
}

// v is of type T, or it is an error
template <class T> cublasStatus_t take(T* to, const void* v, size_t nbytes) {
    if (!v || nbytes != sizeof *to) { INVALID("an attribute of %zu bytes, want %zu", nbytes, sizeof *to); }
    memcpy(to, v, nbytes);
    return CUBLAS_STATUS_SUCCESS;
}
} // namespace

// ---- the library's functions ------------------------------------------------------------------------------
extern "C" {
size_t cublasLtGetVersion() {
    return CUBLAS_VERSION;
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "not initialized";
    case CUBLAS_STATUS_INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the functionality requested is not supported";
    default: return "the function failed";
    }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    Handle* h = new Handle();
    if (cudaGetDevice(&h->device) != cudaSuccess) {
        delete h;
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    *handle = reinterpret_cast<cublasLtHandle_t>(h);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete reinterpret_cast<Handle*>(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    Desc* x = new Desc();
    x->compute = compute;
    x->scale = scale;
    x->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    x->bias_type = x->aux_type = -1;
    *desc = reinterpret_cast<cublasLtMatmulDesc_t>(x);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    delete of(desc);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, const void* v,
                                              size_t nbytes) {
    Desc* x = of(desc);
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return take(&x->transpose_a, v, nbytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return take(&x->transpose_b, v, nbytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return take(&x->epilogue, v, nbytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return take(&x->bias, v, nbytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return take(&x->bias_type, v, nbytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return take(&x->aux, v, nbytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return take(&x->aux_ld, v, nbytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return take(&x->aux_type, v, nbytes);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: return take(&x->sm_target, v, nbytes);
    default: INVALID("attribute %d of an operation is not emulated", static_cast<int>(attribute));
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    if (type != CUDA_R_16BF && type != CUDA_R_32F) {
        INVALID("type %d is not emulated", static_cast<int>(type));
    }
    *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, cols, ld});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete of(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* pref) {
    *pref = reinterpret_cast<cublasLtMatmulPreference_t>(
        new Preference{0, {256, 256, 256, 256}, CUBLASLT_REDUCTION_SCHEME_MASK});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t pref) {
    delete of(pref);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* v, size_t nbytes) {
    Preference* x = of(pref);
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return take(&x->workspace_nbytes, v, nbytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return take(&x->align[0], v, nbytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return take(&x->align[1], v, nbytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return take(&x->align[2], v, nbytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return take(&x->align[3], v, nbytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return take(&x->reductions, v, nbytes);
    default: INVALID("attribute %d of a preference is not emulated", static_cast<int>(attribute));
    }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t pref, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* nresults) {
    emu::count(emu::COUNT_HEURISTIC);
    *nresults = 0;
    if (requested < 1) { INVALID("%d results are asked for", requested); }
    cublasStatus_t status = check_problem(*of(desc), *of(a), *of(b), *of(c), *of(d));
    if (status != CUBLAS_STATUS_SUCCESS) { return status; }
    const char* least = getenv("FO_EMU_GEMM_ALIGN");
    Algo algo = {problem_hash(*of(desc), *of(a), *of(b), *of(c), *of(d)), {}, 0};
    for (int i = 0; i < 4; i++) {
        const uint32_t told = of(pref)->align[i];
        if (least && told < static_cast<uint32_t>(atoi(least))) { return CUBLAS_STATUS_NOT_SUPPORTED; }
        algo.align[i] = told < 16 ? told : 16; // no kernel wants more
    }
    algo.workspace_nbytes = of(pref)->workspace_nbytes < 4096 ? of(pref)->workspace_nbytes : 4096;
    memset(results, 0, sizeof *results);
    memcpy(&results->algo, &algo, sizeof algo);
    results->workspaceSize = algo.workspace_nbytes;
    results->state = CUBLAS_STATUS_SUCCESS;
    results->wavesCount = 1.0f;
    *nresults = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t a, const void* B,
                              cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_nbytes,
                              cudaStream_t stream) {
    const Desc& x = *of(desc);
    Algo chosen;
    int device = -1;
    cublasStatus_t status = check_problem(x, *of(a), *of(b), *of(c), *of(d));
    if (status != CUBLAS_STATUS_SUCCESS) { return status; }
    if (!algo) { INVALID("no algorithm given: that asks the heuristic at each call"); }
    memcpy(&chosen, algo, sizeof chosen);
    if (chosen.hash != problem_hash(x, *of(a), *of(b), *of(c), *of(d))) {
        INVALID("the algorithm was chosen for another problem");
    }
    const void* pointers[4] = {A, B, C, D};
    for (int i = 0; i < 4; i++) {
        if (!pointers[i] || reinterpret_cast<uintptr_t>(pointers[i]) % chosen.align[i] != 0) {
            INVALID("%c at %p, the heuristic was told of %u bytes", "ABCD"[i], pointers[i], chosen.align[i]);
        }
    }
    if (workspace_nbytes < chosen.workspace_nbytes || !workspace ||
        reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
        INVALID("a workspace of %zu bytes at %p, want %llu", workspace_nbytes, workspace,
                static_cast<unsigned long long>(chosen.workspace_nbytes));
    }
    if (cudaGetDevice(&device) != cudaSuccess || device != reinterpret_cast<Handle*>(handle)->device) {
        INVALID("a handle of device %d on device %d", reinterpret_cast<Handle*>(handle)->device, device);
    }
    Gemm* g = new Gemm();
    g->what = "cublasLtMatmul";
    g->desc = x;
    g->a = *of(a), g->b = *of(b), g->c = *of(c), g->d = *of(d);
    g->A = A, g->B = B, g->C = C, g->D = D;
    g->workspace = workspace;
    g->workspace_nbytes = chosen.workspace_nbytes;
    memcpy(&g->alpha, alpha, sizeof g->alpha);
    memcpy(&g->beta, beta, sizeof g->beta);
    g->k = x.transpose_a != CUBLAS_OP_N ? g->a.rows : g->a.cols;
    return emu::enqueue("cublasLtMatmul", stream, g) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                                    : CUBLAS_STATUS_EXECUTION_FAILED;
}
}
