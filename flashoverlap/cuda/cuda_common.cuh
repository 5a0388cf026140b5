/* cuda_common.cuh -- what the files of the cuda device share: errors, streams, launches, vectors of 16 bytes,
 * reductions. Nothing above the cut sees it.
 *
 * Rules, which dev/test/lint.sh checks: kernels are launched by launch() alone, shared memory of a size known
 * at run time is had by DYNAMIC_SHARED, PTX stands in ptx.cuh, no float is added atomically, nothing is
 * queued
 * on the legacy stream. Shuffles have full masks, and blocks are multiples of 32 threads. So the same lines
 * run in dev/emu.
 */
#ifndef FO_CUDA_COMMON_CUH
#define FO_CUDA_COMMON_CUH
#include <cuda.h> // types alone: libcuda is not linked
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include "flashoverlap/fo.h"

// ---- errors -----------------------------------------------------------------------------------------------
// a CUDA call that can't fail but by a bug or a broken machine
#define CUDA(call)                                                                            \
    do {                                                                                      \
        cudaError_t cuda_err_ = (call);                                                       \
        fo_require(cuda_err_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(cuda_err_)); \
    } while (0)

// ---- device and streams -----------------------------------------------------------------------------------
struct FoDevice {
    int rank, ordinal, nsm; // ordinal: which of CUDA's devices; several ranks may share one
    int nsharing;           // ranks on this GPU, at most
    int sm_major;
    int reserved_sms;  // held free of GEMMs that run under an exchange, by a transport that needs SMs
    int own_attention; // cuDNN is not asked
    int fuse_gelu;     // into GEMMs
    int deterministic; // attention's gradients have the same bits each time
    int tf32;          // GEMMs of fp32 may round their inputs
    size_t nbytes, peak_nbytes;
    char name[192], hint[192];
    double peak_tflops;            // 0: not yet known
    struct Block* blocks;          // of fo_malloc
    struct Block* old_scratch;     // too small by now, but graphs use it
    struct FoMatmul* matmul;       // cuBLASLt and its plans, matmul.cu; made at first use
    struct FoAttention* attention; // cuDNN and its plans, attention.cu; made at first use
    FoStream* stream;              // for clearing fresh memory
    FoStream* streams;             // all that are open
    struct FoSpanPending* spans;   // a pool
    void* batch_mem_op;            // the driver's cuStreamBatchMemOp, when it was needed
    int tracing;                   // operations are timed
    cudaEvent_t epoch;             // recorded at epoch_s on fo_now's clock
    double epoch_s;
    FoGraph* graphs;    // that can be launched
    FoGraph* capturing; // that the rank's calls are put into, else NULL
};

struct FoSpanPending; // a stretch of time between two events of CUDA, not yet read

struct FoStream {
    FoDevice* device;
    cudaStream_t stream;
    char name[16];
    void* scratch; // device memory
    size_t scratch_nbytes;
    void* workspace; // cuBLASLt's, matmul.cu; freed with the stream
    // stretches that are timed and not yet added up, the oldest first
    struct FoSpanPending *pending, *last_pending;
    struct FoSpans* kept;    // stretches for the timeline
    struct FoCaller* caller; // runs calls of the host; made at the first
    const char* label;       // of what is queued, for the timeline
    FoMessages messages;     // of the exchange that is queued next
    FoStream* next;          // of the device's
};

// cudaMalloc's memory, beside fo_malloc's; where there is no more, quits with a line that says what it is for
void* fo__alloc(FoDevice* d, size_t nbytes, const char* what);

// device memory for the operations queued on s from now on; kept and grown, contents undefined. Valid until
// the
// next call for s: an operation that needs two areas asks once for both.
void* fo__scratch(FoStream* s, size_t nbytes);

// queued on s: writes a 32-bit word of device or pinned memory; waits until it has a value
void fo__write32(FoStream* s, void* word, uint32_t value);
void fo__wait32(FoStream* s, void* word, uint32_t value);

/* OpScope -- at the top of each public operation: its name for NVTX and, with tracing on, its time on the
 * stream. (A destructor ends it, so that every return does.)
 */
struct OpScope {
    struct FoSpanPending* span; // NULL: not traced
    OpScope(FoStream* s, const char* name);
    ~OpScope();
};
#define FO_OP(s) OpScope op_scope_((s), __func__)

// "cuBLASLt 13.1.0", for people
const char* fo__matmul_version(void);
// TFLOP/s that a large GEMM of floatX reaches, measured; some milliseconds
double fo__matmul_tflops(FoDevice* d);
void fo__matmul_free(struct FoMatmul* m); // by fo_device_close
// "cuDNN 9.19.0", or why it isn't used, for people
const char* fo__attention_version(FoDevice* d);
void fo__attention_free(struct FoAttention* a); // by fo_device_close

// ---- launches ---------------------------------------------------------------------------------------------
static inline unsigned cdiv(size_t a, size_t b) {
    return (unsigned)((a + b - 1) / b);
}

// the one way to start a kernel: launch(kernel, blocks, threads, bytes of dynamic shared memory, s,
// arguments...)
template <class... P, class... A>
static inline void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_nbytes, FoStream* s,
                          A... args) {
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared_nbytes;
    c.stream = s->stream;
    CUDA(cudaLaunchKernelEx(&c, kernel, static_cast<P>(args)...));
}

// a struct among a kernel's arguments that is indexed at run time: read where it lies, no thread copies it
#ifdef FO_EMU
#define GRID_CONSTANT const
#else
#define GRID_CONSTANT const __grid_constant__
#endif

#ifdef FO_EMU
#define DYNAMIC_SHARED(type, name) type* name = (type*)fo_emu_dynamic_shared()
#else
#define DYNAMIC_SHARED(type, name)                         \
    extern __shared__ __align__(16) unsigned char smem_[]; \
    type* name = (type*)smem_
#endif

// ---- numbers on the device --------------------------------------------------------------------------------
static __device__ inline float to_float(float x) {
    return x;
}
static __device__ inline float to_float(FoBf16 x) {
    return __uint_as_float((unsigned)x.bits << 16);
}
template <class T> static __device__ inline T from_float(float f);
template <> __device__ inline float from_float<float>(float f) {
    return f;
}
template <> __device__ inline FoBf16 from_float<FoBf16>(float f) { // to nearest, ties to even
    FoBf16 b = {__bfloat16_as_ushort(__float2bfloat16_rn(f))};
    return b;
}

// N elements that are loaded and stored at once, in pieces of 16 bytes if they are more
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vec { T v[N]; };
template <class T, int N> static __device__ inline Vec<T, N> load(const T* p) {
    return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <class T, int N> static __device__ inline void store(T* p, const Vec<T, N>& x) {
    *reinterpret_cast<Vec<T, N>*>(p) = x;
}

/* Packed -- N elements in registers as they lie in memory, by words: two bf16 in each. Kernels compute with
 * to_floats of them. (Of a Vec of bf16 nvcc takes the halves apart, and puts them together again.)
 */
template <class T, int N> struct alignas(Vec<T, N>) Packed { unsigned w[N * sizeof(T) / sizeof(unsigned)]; };
template <> struct Packed<FoBf16, 1> { FoBf16 w[1]; };

template <class T, int N> static __device__ inline Packed<T, N> load_packed(const T* p) {
    return *reinterpret_cast<const Packed<T, N>*>(p);
}
template <class T, int N> static __device__ inline void store(T* p, const Packed<T, N>& x) {
    *reinterpret_cast<Packed<T, N>*>(p) = x;
}

template <class T, int N> static __device__ inline Vec<float, N> to_floats(const Packed<T, N>& x) {
    Vec<float, N> y;
    if constexpr (sizeof x.w[0] < sizeof(unsigned)) {
        y.v[0] = to_float(x.w[0]);
    } else {
        #pragma unroll
        for (int k = 0; k < N; k++) {
            const unsigned w = x.w[k * sizeof(T) / sizeof(unsigned)];
            y.v[k] = __uint_as_float(sizeof(T) == 4 ? w : k % 2 == 0 ? w << 16 : w & 0xffff0000u);
        }
    }
    return y;
}

template <class T, int N> static __device__ inline Packed<T, N> from_floats(const Vec<float, N>& x) {
    Packed<T, N> y;
    if constexpr (sizeof y.w[0] < sizeof(unsigned)) {
        y.w[0] = from_float<T>(x.v[0]);
    } else if constexpr (sizeof(T) == 4) {
        memcpy(&y, &x, sizeof y);
    } else {
        #pragma unroll
        for (int k = 0; k < N; k += 2) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(x.v[k], x.v[k + 1]);
            memcpy(&y.w[k / 2], &pair, sizeof pair);
        }
    }
    return y;
}

// are all of these 16-byte aligned? (rows too, if the row's bytes are asked about as if they were a pointer)
static inline int aligned16(const void* a, const void* b = NULL, const void* c = NULL, const void* d = NULL) {
    return (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}

// ---- reductions -------------------------------------------------------------------------------------------
enum { WARP = 32 };

struct Sum {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// over the 32 lanes; every lane gets it. The order is the same each time
template <class T, class Op> static __device__ inline T warp_reduce(T x, Op op) {
    for (int d = WARP / 2; d > 0; d /= 2) {
        x = op(x, __shfl_xor_sync(0xffffffffu, x, d));
    }
    return x;
}

/* block_reduce -- over all threads of a one-dimensional block of whole warps, 1,024 at most; every thread
 * gets
 * it. `identity` is what the operation does nothing with.
 */
template <class T, class Op> static __device__ inline T block_reduce(T x, Op op, T identity) {
    __shared__ T by_warp[WARP];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, nwarps = (int)blockDim.x / WARP;
    x = warp_reduce(x, op);
    __syncthreads(); // the last reduction's values have been read
    if (lane == 0) { by_warp[warp] = x; }
    __syncthreads();
    return warp_reduce(lane < nwarps ? by_warp[lane] : identity, op);
}
#endif
