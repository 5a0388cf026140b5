/* cuda_runtime.h -- stands before CUDA's own header when a C++ compiler compiles the cuda sources.
 *
 * The C API, its numbers and the vector types are NVIDIA's. Added here is what nvcc itself supplies: builtin
 * variables, barriers, shuffles, atomics, intrinsics, and the launch with the kernel's own argument types.
 */
#ifndef EMU_CUDA_RUNTIME_H
#define EMU_CUDA_RUNTIME_H
#define cudaLaunchKernelEx \
    emu_untyped_launch // NVIDIA's template for the host loses the types of the arguments
#include_next <cuda_runtime.h>
#undef cudaLaunchKernelEx
#ifdef __cplusplus
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tuple>
#include <type_traits>
#include <utility>

// One block runs at a time, on one thread. AddressSanitizer puts redzones round what is static; the checker
// knows shared memory by its being thread-local.
#undef __shared__
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ thread_local // at block scope this implies static
#endif
#undef __launch_bounds__
#define __launch_bounds__(...)

// ---- inside a kernel --------------------------------------------------------------------------------------
// variables, not macros: cudaLaunchConfig_t has members called gridDim and blockDim
extern uint3 threadIdx, blockIdx, blockDim, gridDim;
static constexpr int warpSize = 32;

enum EmuWarpOp {
    EMU_SYNC,
    EMU_INDEX,
    EMU_UP,
    EMU_DOWN,
    EMU_XOR,
    EMU_MATCH,
    EMU_BALLOT, // from here on every lane gets the same
    EMU_ADD,
    EMU_MIN_UNSIGNED,
    EMU_MAX_UNSIGNED,
    EMU_MIN_SIGNED,
    EMU_MAX_SIGNED,
    EMU_AND,
    EMU_OR,
};
enum EmuBlockOp { EMU_BARRIER, EMU_BARRIER_AND, EMU_BARRIER_OR, EMU_BARRIER_COUNT };

extern "C" {
uint64_t emu_warp(EmuWarpOp op, unsigned mask, uint64_t value, int arg, int width, int line);
int emu_block(EmuBlockOp op, int predicate, int line);
cudaError_t emu_launch(const cudaLaunchConfig_t* config, const void* kernel, void (*call)(void*), void* pack,
                       void (*drop)(void*));
// the launch's dynamic shared memory, 128-byte aligned
void* fo_emu_dynamic_shared(void);
// what messages call the stream; copied
void fo_emu_name_stream(cudaStream_t s, const char* name);
}

// ---- barriers and warp operations -------------------------------------------------------------------------
inline void __syncthreads(int line = __builtin_LINE()) {
    emu_block(EMU_BARRIER, 0, line);
}
inline int __syncthreads_and(int p, int line = __builtin_LINE()) {
    return emu_block(EMU_BARRIER_AND, p, line);
}
inline int __syncthreads_or(int p, int line = __builtin_LINE()) {
    return emu_block(EMU_BARRIER_OR, p, line);
}
inline int __syncthreads_count(int p, int line = __builtin_LINE()) {
    return emu_block(EMU_BARRIER_COUNT, p, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    emu_warp(EMU_SYNC, mask, 0, 0, 32, line);
}
template <class T> inline T emu_shuffle(EmuWarpOp op, unsigned mask, T v, int arg, int width, int line) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    bits = emu_warp(op, mask, bits, arg, width, line);
    memcpy(&v, &bits, sizeof v);
    return v;
}
template <class T>
inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32, int line = __builtin_LINE()) {
    return emu_shuffle(EMU_INDEX, mask, v, lane, width, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32, int line = __builtin_LINE()) {
    return emu_shuffle(EMU_UP, mask, v, (int)d, width, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32, int line = __builtin_LINE()) {
    return emu_shuffle(EMU_DOWN, mask, v, (int)d, width, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int x, int width = 32, int line = __builtin_LINE()) {
    return emu_shuffle(EMU_XOR, mask, v, x, width, line);
}
inline unsigned __ballot_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return (unsigned)emu_warp(EMU_BALLOT, mask, p != 0, 0, 32, line);
}
inline int __any_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return __ballot_sync(mask, p, line) != 0;
}
inline int __all_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return __ballot_sync(mask, !p, line) == 0;
}
inline unsigned __match_any_sync(unsigned mask, unsigned v, int line = __builtin_LINE()) {
    return (unsigned)emu_warp(EMU_MATCH, mask, v, 0, 32, line);
}
#define EMU_REDUCE(name, type, op)                                                     \
    inline type name(unsigned mask, type v, int line = __builtin_LINE()) {             \
        return (type)(unsigned)emu_warp(op, mask, (uint64_t)(unsigned)v, 0, 32, line); \
    }
EMU_REDUCE(__reduce_add_sync, unsigned, EMU_ADD)
EMU_REDUCE(__reduce_add_sync, int, EMU_ADD)
EMU_REDUCE(__reduce_min_sync, unsigned, EMU_MIN_UNSIGNED)
EMU_REDUCE(__reduce_min_sync, int, EMU_MIN_SIGNED)
EMU_REDUCE(__reduce_max_sync, unsigned, EMU_MAX_UNSIGNED)
EMU_REDUCE(__reduce_max_sync, int, EMU_MAX_SIGNED)
EMU_REDUCE(__reduce_and_sync, unsigned, EMU_AND)
EMU_REDUCE(__reduce_or_sync, unsigned, EMU_OR)
#undef EMU_REDUCE

// ---- memory and atomics -----------------------------------------------------------------------------------
#define EMU_LOAD(name)                             \
    template <class T> inline T name(const T* p) { \
        return *p;                                 \
    }
#define EMU_STORE(name)                              \
    template <class T> inline void name(T* p, T v) { \
        *p = v;                                      \
    }
EMU_LOAD(__ldg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldlu)
EMU_STORE(__stcs)
EMU_STORE(__stcg)
EMU_STORE(__stwb)
#undef EMU_LOAD
#undef EMU_STORE
inline void __threadfence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block() {
    __threadfence();
}
inline void __threadfence_system() {
    __threadfence();
}

// *p = f(*p) as one atomic access; the old value
template <class T, class F> inline T emu_atomic(T* p, F f) {
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    static_assert(sizeof(T) == sizeof(Bits), "atomics have 4 or 8 bytes");
    Bits old = __atomic_load_n((Bits*)p, __ATOMIC_RELAXED), bits;
    T before, after;
    do {
        memcpy(&before, &old, sizeof before);
        after = f(before);
        memcpy(&bits, &after, sizeof bits);
    } while (!__atomic_compare_exchange_n((Bits*)p, &old, bits, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}
#define EMU_ATOMICS(T)                                                            \
    inline T atomicAdd(T* p, T v) {                                               \
        return emu_atomic(p, [v](T a) { return (T)(a + v); });                    \
    }                                                                             \
    inline T atomicExch(T* p, T v) {                                              \
        return emu_atomic(p, [v](T) { return v; });                               \
    }                                                                             \
    inline T atomicMax(T* p, T v) {                                               \
        return emu_atomic(p, [v](T a) { return a > v ? a : v; });                 \
    }                                                                             \
    inline T atomicMin(T* p, T v) {                                               \
        return emu_atomic(p, [v](T a) { return a < v ? a : v; });                 \
    }                                                                             \
    inline T atomicOr(T* p, T v) {                                                \
        return emu_atomic(p, [v](T a) { return (T)(a | v); });                    \
    }                                                                             \
    inline T atomicAnd(T* p, T v) {                                               \
        return emu_atomic(p, [v](T a) { return (T)(a & v); });                    \
    }                                                                             \
    inline T atomicCAS(T* p, T compare, T v) {                                    \
        return emu_atomic(p, [compare, v](T a) { return a == compare ? v : a; }); \
    }
EMU_ATOMICS(int)
EMU_ATOMICS(unsigned)
EMU_ATOMICS(unsigned long long)
#undef EMU_ATOMICS
inline unsigned atomicInc(unsigned* p, unsigned limit) {
    return emu_atomic(p, [limit](unsigned a) { return a >= limit ? 0u : a + 1; });
}

// ---- arithmetic -------------------------------------------------------------------------------------------
#define EMU_FUNCTION(T, name, parameters, value) \
    inline T name parameters {                   \
        return value;                            \
    }
EMU_FUNCTION(float, rsqrtf, (float x), 1.0f / sqrtf(x))
EMU_FUNCTION(double, rsqrt, (double x), 1.0 / sqrt(x))
EMU_FUNCTION(float, __expf, (float x), expf(x))
EMU_FUNCTION(float, __exp10f, (float x), powf(10.0f, x))
EMU_FUNCTION(float, __logf, (float x), logf(x))
EMU_FUNCTION(float, __log2f, (float x), log2f(x))
EMU_FUNCTION(float, __sinf, (float x), sinf(x))
EMU_FUNCTION(float, __cosf, (float x), cosf(x))
EMU_FUNCTION(float, __powf, (float x, float y), powf(x, y))
EMU_FUNCTION(float, __fdividef, (float a, float b), a / b)
EMU_FUNCTION(float, __frcp_rn, (float x), 1.0f / x)
EMU_FUNCTION(float, __fsqrt_rn, (float x), sqrtf(x))
EMU_FUNCTION(float, __frsqrt_rn, (float x), 1.0f / sqrtf(x))
EMU_FUNCTION(float, __fmaf_rn, (float a, float b, float c), fmaf(a, b, c))
EMU_FUNCTION(float, __fadd_rn, (float a, float b), a + b)
EMU_FUNCTION(float, __fsub_rn, (float a, float b), a - b)
EMU_FUNCTION(float, __fmul_rn, (float a, float b), a* b)
EMU_FUNCTION(float, __fdiv_rn, (float a, float b), a / b)
EMU_FUNCTION(double, __fma_rn, (double a, double b, double c), fma(a, b, c))
EMU_FUNCTION(double, __dadd_rn, (double a, double b), a + b)
EMU_FUNCTION(double, __dmul_rn, (double a, double b), a* b)
EMU_FUNCTION(float, __saturatef, (float x), x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)
EMU_FUNCTION(int, __float2int_rn, (float x), (int)rintf(x))
EMU_FUNCTION(int, __float2int_rz, (float x), (int)x)
EMU_FUNCTION(float, __int2float_rn, (int x), (float)x)
EMU_FUNCTION(float, __uint2float_rn, (unsigned x), (float)x)
EMU_FUNCTION(int, __popc, (unsigned x), __builtin_popcount(x))
EMU_FUNCTION(int, __ffs, (int x), __builtin_ffs(x))
EMU_FUNCTION(int, __clz, (int x), x ? __builtin_clz((unsigned)x) : 32)
EMU_FUNCTION(unsigned, __umulhi, (unsigned a, unsigned b), (unsigned)(((uint64_t)a * b) >> 32))
EMU_FUNCTION(unsigned, __funnelshift_l, (unsigned low, unsigned high, unsigned n),
             (unsigned)((((uint64_t)high << 32 | low) << (n & 31)) >> 32))
template <class To, class From> inline To emu_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "the same bits in another type");
    memcpy(&to, &from, sizeof to);
    return to;
}
EMU_FUNCTION(int, __float_as_int, (float x), emu_bits<int>(x))
EMU_FUNCTION(unsigned, __float_as_uint, (float x), emu_bits<unsigned>(x))
EMU_FUNCTION(float, __int_as_float, (int x), emu_bits<float>(x))
EMU_FUNCTION(float, __uint_as_float, (unsigned x), emu_bits<float>(x))
EMU_FUNCTION(long long, __double_as_longlong, (double x), emu_bits<long long>(x))
EMU_FUNCTION(double, __longlong_as_double, (long long x), emu_bits<double>(x))
#undef EMU_FUNCTION
#define EMU_MIN_MAX(T)        \
    inline T max(T a, T b) {  \
        return a > b ? a : b; \
    }                         \
    inline T min(T a, T b) {  \
        return a < b ? a : b; \
    }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
EMU_MIN_MAX(double)
#undef EMU_MIN_MAX
// a NaN loses, as on the GPU
inline float max(float a, float b) {
    return fmaxf(a, b);
}
inline float min(float a, float b) {
    return fminf(a, b);
}
[[noreturn]] inline void __trap() {
    abort();
}
inline void __nanosleep(unsigned) {}

// ---- launches ---------------------------------------------------------------------------------------------
template <class... P, class... A>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... args) {
    using Arguments = std::tuple<std::remove_cv_t<P>...>;
    struct Pack {
        void (*kernel)(P...);
        Arguments args;
    };
    Pack* pack = new Pack{kernel, Arguments(static_cast<P>(std::forward<A>(args))...)};
    return emu_launch(
        config, (const void*)kernel, [](void* p) { std::apply(((Pack*)p)->kernel, ((Pack*)p)->args); }, pack,
        [](void* p) { delete (Pack*)p; });
}
template <class F>
inline cudaError_t cudaFuncSetAttribute(F* kernel, cudaFuncAttribute attribute, int value) {
    return ::cudaFuncSetAttribute((const void*)kernel, attribute, value);
}
template <class F> inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, F* kernel) {
    return ::cudaFuncGetAttributes(attributes, (const void*)kernel);
}
template <class F>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* nblocks, F* kernel, int nthreads,
                                                                 size_t shared_nbytes) {
    return ::cudaOccupancyMaxActiveBlocksPerMultiprocessor(nblocks, (const void*)kernel, nthreads,
                                                           shared_nbytes);
}
#endif
#endif
