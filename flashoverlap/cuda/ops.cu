/* ops.cu -- the layer operations of fo_ops.h on the GPU. matmul.cu and attention.cu have the other two.
 *
 * All of them are bound by memory: a kernel is as fast as it keeps bytes in flight. A thread takes 16 bytes
 * of an array at a time and starts several such loads before it uses the first. bf16 becomes fp32 only where
 * it is computed with.
 *
 * Where a vector can't be loaded at once (the width of a row is no multiple of it, or an array does not begin
 * at a multiple of 16 bytes) elements are loaded one by one. In sums each thread has the same elements either
 * way, so that both give the same bits. The order of a sum is decided by the shape, and over rows by the
 * number of SMs too.
 *
 * Order of the file: vectors, rows, layer norm, elementwise operations, loss, optimizer. A public function
 * checks, chooses the widest way that fits, and launches.
 */
#include <math.h>
#include "flashoverlap/cuda/cuda_common.cuh"
#include "flashoverlap/fo_ops.h"

enum {
    VEC = 16 / (int)sizeof(floatX), // elements of floatX that a thread takes at once
    AHEAD = 4,                      // vectors that it loads before it uses the first
    THREADS = 256,                  // of a block, where nothing speaks for another number
    ROW_WARPS = 8,                  // rows of a block, where each has a warp
};

// what an operation adds up: an array of pointers in a kernel's arguments
typedef struct {
    const void* p[FO_MAX_RANKS];
} Parts;

// ---- vectors ----------------------------------------------------------------------------------------------
template <int N> static __device__ inline void add_to(Vec<float, N>* sum, const Vec<float, N>& x) {
    #pragma unroll
    for (int k = 0; k < N; k++) {
        sum->v[k] += x.v[k];
    }
}

/* load_part, store_part -- the first `count` elements of a vector; those beyond are 0, or stay as they are.
 *
 * WHOLE: all N are there if count > 0, and p is aligned to them: one access does it.
 */
template <bool WHOLE, int N, class T> static __device__ inline Packed<T, N> load_part(const T* p, int count) {
    Packed<T, N> x = {};
    if constexpr (WHOLE) {
        if (count > 0) { x = load_packed<T, N>(p); }
    } else {
        T each[N] = {};
        #pragma unroll
        for (int k = 0; k < N; k++) {
            if (k < count) { each[k] = p[k]; }
        }
        memcpy(&x, each, sizeof x);
    }
    return x;
}

template <bool WHOLE, int N, class T>
static __device__ inline void store_part(T* p, const Packed<T, N>& x, int count) {
    if constexpr (WHOLE) {
        if (count > 0) { store(p, x); }
    } else {
        T each[N];
        memcpy(each, &x, sizeof x);
        #pragma unroll
        for (int k = 0; k < N; k++) {
            if (k < count) { p[k] = each[k]; }
        }
    }
}

// AHEAD vectors: those at i, i + step, ... that begin before `end`
template <class T, int N> struct Strip { Packed<T, N> v[AHEAD]; };

template <int N, class T>
static __device__ inline Strip<T, N> load_strip(const T* p, size_t i, size_t end, size_t step) {
    Strip<T, N> x = {};
    #pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        if (i + j * step < end) { x.v[j] = load_packed<T, N>(p + i + j * step); }
    }
    return x;
}

// can rows of C elements of floatX, in arrays that begin here, be loaded in whole vectors?
static int whole_rows(int C, const void* a, const void* b, const void* c = NULL, const void* d = NULL) {
    return C % VEC == 0 && aligned16(a, b, c, d);
}

// whole warps with a thread for each of so many vectors, at most `most` threads
static unsigned threads_for(size_t nvecs, unsigned most) {
    return nvecs == 0 ? (unsigned)WARP : nvecs < most ? cdiv(nvecs, WARP) * WARP : most;
}

// ---- rows -------------------------------------------------------------------------------------------------
// A warp has a row, its lanes the row's vectors of N elements: N divides C.
static __device__ inline size_t row_of_warp(void) {
    return (size_t)blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
}

static __device__ inline int lane_of_warp(void) {
    return (int)threadIdx.x % WARP;
}

template <int N>
static __global__ void gather_rows_kernel(floatX* out, const floatX* inp, const int* idx, size_t n, int C) {
    const size_t i = row_of_warp(), step = WARP * N;
    if (i >= n) { return; }
    const floatX* from = inp + (size_t)idx[i] * C;
    floatX* to = out + i * C;
    for (size_t c = lane_of_warp() * N; c < (size_t)C; c += AHEAD * step) {
        Strip<floatX, N> x = load_strip<N>(from, c, C, step);
        #pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (c + j * step < (size_t)C) { store(to + c + j * step, x.v[j]); }
        }
    }
}

void fo_gather_rows(floatX* out, const floatX* inp, const int* idx, size_t n, int C, FoStream* s) {
    FO_OP(s);
    if (n == 0) { return; }
    launch(whole_rows(C, out, inp) ? gather_rows_kernel<VEC> : gather_rows_kernel<1>, cdiv(n, ROW_WARPS),
           ROW_WARPS * WARP, 0, s, out, inp, idx, n, C);
}

/* A block has a destination. Some tokens are a twentieth of any text, and the rows of each are added one
 * after the other: what counts is how many of them are being loaded, so vectors are small and many.
 */
enum { SCATTER_VEC = 4, SCATTER_AHEAD = 32 / (int)sizeof(floatX) };

template <int N>
static __global__ void __launch_bounds__(THREADS, 3)
    scatter_add_rows_kernel(float* out, const floatX* rows, const int* dst, const int* start,
                            const int* order, int C) {
    const int u = (int)blockIdx.x, first = start[u], end = start[u + 1];
    float* to = out + (size_t)dst[u] * C;
    for (int c = (int)threadIdx.x * N; c < C; c += (int)blockDim.x * N) {
        const Vec<float, N> old = load<float, N>(to + c);
        Vec<float, N> sum = {};
        for (int k = first; k < end; k += SCATTER_AHEAD) {
            Packed<floatX, N> x[SCATTER_AHEAD] = {};
            #pragma unroll
            for (int j = 0; j < SCATTER_AHEAD; j++) {
                if (k + j < end) { x[j] = load_packed<floatX, N>(rows + (size_t)order[k + j] * C + c); }
            }
            #pragma unroll
            for (int j = 0; j < SCATTER_AHEAD; j++) {
                add_to(&sum, to_floats(x[j])); // beyond the end 0, which changes nothing
            }
        }
        Vec<float, N> y;
        #pragma unroll
        for (int e = 0; e < N; e++) {
            y.v[e] = old.v[e] + sum.v[e];
        }
        store(to + c, y);
    }
}

void fo_scatter_add_rows(float* out, const floatX* rows, const int* dst, const int* start, const int* order,
                         size_t nuniq, int C, FoStream* s) {
    FO_OP(s);
    if (nuniq == 0) { return; }
    const int whole = C % SCATTER_VEC == 0 && aligned16(out, rows);
    launch(whole ? scatter_add_rows_kernel<SCATTER_VEC> : scatter_add_rows_kernel<1>, (unsigned)nuniq,
           threads_for(whole ? C / SCATTER_VEC : C, THREADS), 0, s, out, rows, dst, start, order, C);
}

template <int N>
static __global__ void add_rows_kernel(float* out, const float* rows, const int* dst, size_t n, int C) {
    const size_t i = row_of_warp(), step = WARP * N;
    if (i >= n) { return; }
    const float* from = rows + i * C;
    float* to = out + (size_t)dst[i] * C;
    for (size_t c = lane_of_warp() * N; c < (size_t)C; c += AHEAD * step) {
        Strip<float, N> x = load_strip<N>(from, c, C, step), y = load_strip<N>(to, c, C, step);
        #pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            Vec<float, N> sum = to_floats(y.v[j]);
            add_to(&sum, to_floats(x.v[j]));
            if (c + j * step < (size_t)C) { store(to + c + j * step, sum); }
        }
    }
}

void fo_add_rows(float* out, const float* rows, const int* dst, size_t n, int C, FoStream* s) {
    FO_OP(s);
    if (n == 0) { return; }
    const int whole = C % 4 == 0 && aligned16(out, rows);
    launch(whole ? add_rows_kernel<4> : add_rows_kernel<1>, cdiv(n, ROW_WARPS), ROW_WARPS * WARP, 0, s, out,
           rows, dst, n, C);
}

template <int N>
static __global__ void encoder_forward_kernel(floatX* out, const floatX* rows, const floatX* wpe,
                                              const int* tok, const int* pos, size_t n, int C) {
    const size_t i = row_of_warp(), step = WARP * N;
    if (i >= n) { return; }
    const size_t row = (size_t)tok[i];
    const floatX *from = rows + i * C, *position = wpe + (size_t)pos[row] * C;
    floatX* to = out + row * C;
    for (size_t c = lane_of_warp() * N; c < (size_t)C; c += AHEAD * step) {
        Strip<floatX, N> x = load_strip<N>(from, c, C, step), p = load_strip<N>(position, c, C, step);
        #pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            Vec<float, N> sum = to_floats(x.v[j]);
            add_to(&sum, to_floats(p.v[j]));
            if (c + j * step < (size_t)C) { store(to + c + j * step, from_floats<floatX>(sum)); }
        }
    }
}

void fo_encoder_forward(floatX* out, const floatX* rows, const floatX* wpe, const int* tok, const int* pos,
                        size_t n, int C, FoStream* s) {
    FO_OP(s);
    if (n == 0) { return; }
    launch(whole_rows(C, out, rows, wpe) ? encoder_forward_kernel<VEC> : encoder_forward_kernel<1>,
           cdiv(n, ROW_WARPS), ROW_WARPS * WARP, 0, s, out, rows, wpe, tok, pos, n, C);
}

// ---- layer norm, forward ----------------------------------------------------------------------------------
static __device__ inline float sum_of(const Packed<floatX, VEC>& packed, float sum) {
    const Vec<float, VEC> x = to_floats(packed);
    #pragma unroll
    for (int e = 0; e < VEC; e++) {
        sum += x.v[e];
    }
    return sum;
}

// of (x - mean)^2: from the mean, since the sum of squares minus the square of the sum loses digits
static __device__ inline float square_sum_of(const Packed<floatX, VEC>& packed, float mean, int count,
                                             float sum) {
    const Vec<float, VEC> x = to_floats(packed);
    #pragma unroll
    for (int e = 0; e < VEC; e++) {
        float d = x.v[e] - mean;
        if (e < count) { sum = fmaf(d, d, sum); }
    }
    return sum;
}

static __device__ inline Packed<floatX, VEC> normed(const Packed<floatX, VEC>& packed, float mean, float rstd,
                                                    const Packed<floatX, VEC>& weight,
                                                    const Packed<floatX, VEC>& bias) {
    const Vec<float, VEC> x = to_floats(packed), w = to_floats(weight), b = to_floats(bias);
    Vec<float, VEC> y;
    #pragma unroll
    for (int e = 0; e < VEC; e++) {
        y.v[e] = fmaf((x.v[e] - mean) * rstd, w.v[e], b.v[e]);
    }
    return from_floats<floatX>(y);
}

static __device__ inline float rstd_of(float square_sum, int C) {
    return 1.0f / sqrtf(square_sum / (float)C + 1e-5f);
}

// a warp a row, which stays in registers: K vectors a lane
template <bool WHOLE, int K>
static __global__ void __launch_bounds__(ROW_WARPS* WARP, K == 8 ? 2 : 3)
    layernorm_forward_kernel(floatX* __restrict__ out, float* mean, float* rstd,
                             const floatX* __restrict__ inp, const floatX* __restrict__ weight,
                             const floatX* __restrict__ bias, size_t n, int C) {
    const size_t i = row_of_warp();
    const int first = lane_of_warp() * VEC;
    if (i >= n) { return; }
    Packed<floatX, VEC> x[K];
    float sum = 0.0f, square_sum = 0.0f;
    #pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * WARP * VEC;
        x[k] = load_part<WHOLE, VEC>(inp + i * C + c, C - c);
    }
    #pragma unroll
    for (int k = 0; k < K; k++) {
        sum = sum_of(x[k], sum);
    }
    const float mu = warp_reduce(sum, Sum()) / (float)C;
    #pragma unroll
    for (int k = 0; k < K; k++) {
        square_sum = square_sum_of(x[k], mu, C - first - k * WARP * VEC, square_sum);
    }
    const float rs = rstd_of(warp_reduce(square_sum, Sum()), C);
    #pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * WARP * VEC;
        Packed<floatX, VEC> w = load_part<WHOLE, VEC>(weight + c, C - c);
        Packed<floatX, VEC> b = load_part<WHOLE, VEC>(bias + c, C - c);
        store_part<WHOLE>(out + i * C + c, normed(x[k], mu, rs, w, b), C - c);
    }
    if (first == 0) {
        mean[i] = mu;
        rstd[i] = rs;
    }
}

// wide rows: a block a row, which is read three times, the second and third from a cache
template <bool WHOLE>
static __global__ void __launch_bounds__(THREADS)
    layernorm_forward_wide_kernel(floatX* __restrict__ out, float* mean, float* rstd,
                                  const floatX* __restrict__ inp, const floatX* __restrict__ weight,
                                  const floatX* __restrict__ bias, int C) {
    const size_t i = blockIdx.x;
    const floatX* x = inp + i * C;
    const int first = (int)threadIdx.x * VEC, step = THREADS * VEC;
    float sum = 0.0f, square_sum = 0.0f;
    for (int c = first; c < C; c += step) {
        sum = sum_of(load_part<WHOLE, VEC>(x + c, C - c), sum);
    }
    const float mu = block_reduce(sum, Sum(), 0.0f) / (float)C;
    for (int c = first; c < C; c += step) {
        square_sum = square_sum_of(load_part<WHOLE, VEC>(x + c, C - c), mu, C - c, square_sum);
    }
    const float rs = rstd_of(block_reduce(square_sum, Sum(), 0.0f), C);
    for (int c = first; c < C; c += step) {
        Packed<floatX, VEC> v = load_part<WHOLE, VEC>(x + c, C - c);
        Packed<floatX, VEC> w = load_part<WHOLE, VEC>(weight + c, C - c);
        Packed<floatX, VEC> b = load_part<WHOLE, VEC>(bias + c, C - c);
        store_part<WHOLE>(out + i * C + c, normed(v, mu, rs, w, b), C - c);
    }
    if (threadIdx.x == 0) {
        mean[i] = mu;
        rstd[i] = rs;
    }
}

template <bool WHOLE>
static void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                              const floatX* bias, size_t n, int C, FoStream* s) {
    const unsigned per_lane = cdiv(cdiv(C, VEC), WARP);
    if (per_lane > 8) {
        launch(layernorm_forward_wide_kernel<WHOLE>, (unsigned)n, THREADS, 0, s, out, mean, rstd, inp, weight,
               bias, C);
        return;
    }
    launch(per_lane > 4   ? layernorm_forward_kernel<WHOLE, 8>
           : per_lane > 2 ? layernorm_forward_kernel<WHOLE, 4>
           : per_lane > 1 ? layernorm_forward_kernel<WHOLE, 2>
                          : layernorm_forward_kernel<WHOLE, 1>,
           cdiv(n, ROW_WARPS), ROW_WARPS * WARP, 0, s, out, mean, rstd, inp, weight, bias, n, C);
}

void fo_layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                          const floatX* bias, size_t n, int C, FoStream* s) {
    FO_OP(s);
    if (n == 0) { return; }
    if (whole_rows(C, out, inp, weight, bias)) {
        layernorm_forward<true>(out, mean, rstd, inp, weight, bias, n, C, s);
    } else {
        layernorm_forward<false>(out, mean, rstd, inp, weight, bias, n, C, s);
    }
}

// ---- layer norm, backward ---------------------------------------------------------------------------------
/* With norm = (inp - mean) * rstd and dnorm = dout * weight,
 *
 *     dinp += (dnorm - mean of dnorm - norm * mean of dnorm * norm) * rstd
 *     dweight += sum over rows of dout * norm,  dbias += sum over rows of dout
 *
 * A block takes some rows one after the other, a thread of it one vector of columns, for which it keeps the
 * two sums over the block's rows. These go to scratch, [blocks, 2, C], and are added up by a second kernel.
 */
enum {
    BACK_THREADS = 224,  // of such a block, at most, if three are to run on an SM
    BACK_MOST = 512,     // at most; wider rows have a kernel of their own
    BACK_RESIDENT = 768, // threads that an SM has room for
    BACK_MIN_ROWS = 8,   // of a block, so that the second kernel has little to add
    PARTS_WARPS = 16,    // of the second kernel's blocks
};

typedef struct {
    float dnorm, dnorm_norm; // sums over a row
} RowSums;

static __device__ inline RowSums row_sums_of(const Packed<floatX, VEC>& dout, const Packed<floatX, VEC>& inp,
                                             const Packed<floatX, VEC>& weight, float mean, float rstd,
                                             RowSums sums) {
    const Vec<float, VEC> dy = to_floats(dout), x = to_floats(inp), w = to_floats(weight);
    #pragma unroll
    for (int e = 0; e < VEC; e++) {
        float dnorm = dy.v[e] * w.v[e];
        sums.dnorm += dnorm;
        sums.dnorm_norm = fmaf(dnorm, (x.v[e] - mean) * rstd, sums.dnorm_norm);
    }
    return sums;
}

// dinp of a vector of columns, and what they add to dweight and dbias. means: of the row's sums
static __device__ inline Packed<floatX, VEC>
layernorm_dinp(const Packed<floatX, VEC>& dinp, const Packed<floatX, VEC>& dout,
               const Packed<floatX, VEC>& inp, const Packed<floatX, VEC>& weight, float mean, float rstd,
               RowSums means, Vec<float, VEC>* dweight, Vec<float, VEC>* dbias) {
    const Vec<float, VEC> dy = to_floats(dout), x = to_floats(inp), w = to_floats(weight);
    Vec<float, VEC> y = to_floats(dinp);
    #pragma unroll
    for (int e = 0; e < VEC; e++) {
        float norm = (x.v[e] - mean) * rstd;
        float d = fmaf(-norm, means.dnorm_norm, fmaf(dy.v[e], w.v[e], -means.dnorm));
        y.v[e] = fmaf(d, rstd, y.v[e]);
        dweight->v[e] = fmaf(dy.v[e], norm, dweight->v[e]);
        dbias->v[e] += dy.v[e];
    }
    return from_floats<floatX>(y);
}

template <bool WHOLE, int MOST>
static __global__ void __launch_bounds__(MOST, MOST == BACK_THREADS ? 3 : 1)
    layernorm_backward_kernel(floatX* __restrict__ dinp, float* parts, const floatX* __restrict__ dout,
                              const floatX* __restrict__ inp, const floatX* __restrict__ weight,
                              const float* __restrict__ mean, const float* __restrict__ rstd, size_t n, int C,
                              size_t rows) {
    __shared__ RowSums by_warp[2][MOST / WARP]; // taken in turn, so that a row needs one barrier
    const int c = (int)threadIdx.x * VEC, warp = (int)threadIdx.x / WARP, nwarps = (int)blockDim.x / WARP;
    const size_t first = blockIdx.x * rows, end = first + rows < n ? first + rows : n;
    const Packed<floatX, VEC> w = load_part<WHOLE, VEC>(weight + c, C - c);
    Vec<float, VEC> dweight = {}, dbias = {};
    int turn = 0;
    for (size_t i = first; i < end; i++, turn ^= 1) {
        const float mu = mean[i], rs = rstd[i];
        Packed<floatX, VEC> dy = load_part<WHOLE, VEC>(dout + i * C + c, C - c);
        Packed<floatX, VEC> x = load_part<WHOLE, VEC>(inp + i * C + c, C - c);
        Packed<floatX, VEC> dx = load_part<WHOLE, VEC>(dinp + i * C + c, C - c);
        RowSums sums = row_sums_of(dy, x, w, mu, rs, RowSums{0.0f, 0.0f});
        sums.dnorm = warp_reduce(sums.dnorm, Sum());
        sums.dnorm_norm = warp_reduce(sums.dnorm_norm, Sum());
        if (lane_of_warp() == 0) { by_warp[turn][warp] = sums; }
        __syncthreads();
        sums = by_warp[turn][0];
        for (int k = 1; k < nwarps; k++) {
            sums.dnorm += by_warp[turn][k].dnorm;
            sums.dnorm_norm += by_warp[turn][k].dnorm_norm;
        }
        const RowSums means = {sums.dnorm / (float)C, sums.dnorm_norm / (float)C};
        dx = layernorm_dinp(dx, dy, x, w, mu, rs, means, &dweight, &dbias);
        store_part<WHOLE>(dinp + i * C + c, dx, C - c);
    }
    float* part = parts + (size_t)blockIdx.x * 2 * C + c;
    store_part<WHOLE>(part, from_floats<float>(dweight), C - c);
    store_part<WHOLE>(part + C, from_floats<float>(dbias), C - c);
}

// wide rows: each is read twice, the second time from a cache, and the sums over rows stay in scratch
template <bool WHOLE>
static __global__ void __launch_bounds__(THREADS)
    layernorm_backward_wide_kernel(floatX* __restrict__ dinp, float* parts, const floatX* __restrict__ dout,
                                   const floatX* __restrict__ inp, const floatX* __restrict__ weight,
                                   const float* __restrict__ mean, const float* __restrict__ rstd, size_t n,
                                   int C, size_t rows) {
    const int step = THREADS * VEC;
    const size_t first = blockIdx.x * rows, end = first + rows < n ? first + rows : n;
    float* part = parts + (size_t)blockIdx.x * 2 * C;
    for (size_t i = first; i < end; i++) {
        const float mu = mean[i], rs = rstd[i];
        RowSums sums = {0.0f, 0.0f};
        for (int c = (int)threadIdx.x * VEC; c < C; c += step) {
            Packed<floatX, VEC> dy = load_part<WHOLE, VEC>(dout + i * C + c, C - c);
            Packed<floatX, VEC> x = load_part<WHOLE, VEC>(inp + i * C + c, C - c);
            Packed<floatX, VEC> w = load_part<WHOLE, VEC>(weight + c, C - c);
            sums = row_sums_of(dy, x, w, mu, rs, sums);
        }
        const RowSums means = {block_reduce(sums.dnorm, Sum(), 0.0f) / (float)C,
                               block_reduce(sums.dnorm_norm, Sum(), 0.0f) / (float)C};
        for (int c = (int)threadIdx.x * VEC; c < C; c += step) {
            const int old = i > first ? C - c : 0;
            Vec<float, VEC> dweight = to_floats(load_part<WHOLE, VEC>(part + c, old));
            Vec<float, VEC> dbias = to_floats(load_part<WHOLE, VEC>(part + C + c, old));
            Packed<floatX, VEC> dy = load_part<WHOLE, VEC>(dout + i * C + c, C - c);
            Packed<floatX, VEC> x = load_part<WHOLE, VEC>(inp + i * C + c, C - c);
            Packed<floatX, VEC> w = load_part<WHOLE, VEC>(weight + c, C - c);
            Packed<floatX, VEC> dx = load_part<WHOLE, VEC>(dinp + i * C + c, C - c);
            dx = layernorm_dinp(dx, dy, x, w, mu, rs, means, &dweight, &dbias);
            store_part<WHOLE>(dinp + i * C + c, dx, C - c);
            store_part<WHOLE>(part + c, from_floats<float>(dweight), C - c);
            store_part<WHOLE>(part + C + c, from_floats<float>(dbias), C - c);
        }
    }
}

// dweight, dbias += sum of parts [nparts, 2, C]. A lane has a column, a warp every PARTS_WARPS-th part
static __global__ void __launch_bounds__(PARTS_WARPS* WARP)
    add_parts_kernel(float* dweight, float* dbias, const float* parts, int nparts, int C) {
    __shared__ float by_warp[PARTS_WARPS][WARP];
    const int lane = lane_of_warp(), warp = (int)threadIdx.x / WARP;
    const size_t c = (size_t)blockIdx.x * WARP + lane, width = 2 * (size_t)C;
    float sum = 0.0f;
    if (c < width) {
        #pragma unroll 8
        for (int p = warp; p < nparts; p += PARTS_WARPS) {
            sum += parts[p * width + c];
        }
    }
    by_warp[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && c < width) {
        float* to = c < (size_t)C ? dweight + c : dbias + (c - C);
        for (int k = 1; k < PARTS_WARPS; k++) {
            sum += by_warp[k][lane];
        }
        *to += sum;
    }
}

void fo_layernorm_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                           const floatX* weight, const float* mean, const float* rstd, size_t n, int C,
                           FoStream* s) {
    FO_OP(s);
    if (n == 0) { return; }
    const size_t nvecs = cdiv(C, VEC);
    const int whole = whole_rows(C, dinp, dout, inp, weight), wide = nvecs > BACK_MOST;
    const unsigned threads = wide ? (unsigned)THREADS : threads_for(nvecs, BACK_MOST);
    const size_t most = (size_t)s->device->nsm * (BACK_RESIDENT / threads); // all blocks run at once
    size_t rows = cdiv(n, most);
    rows = rows < (size_t)BACK_MIN_ROWS ? (size_t)BACK_MIN_ROWS : rows;
    const unsigned nblocks = cdiv(n, rows);
    float* parts = (float*)fo__scratch(s, (size_t)nblocks * 2 * C * sizeof(float));
    auto* kernel =
        whole ? layernorm_backward_kernel<true, BACK_MOST> : layernorm_backward_kernel<false, BACK_MOST>;
    if (threads <= BACK_THREADS) {
        kernel = whole ? layernorm_backward_kernel<true, BACK_THREADS>
                       : layernorm_backward_kernel<false, BACK_THREADS>;
    }
    if (wide) {
        kernel = whole ? layernorm_backward_wide_kernel<true> : layernorm_backward_wide_kernel<false>;
    }
    launch(kernel, nblocks, threads, 0, s, dinp, parts, dout, inp, weight, mean, rstd, n, C, rows);
    launch(add_parts_kernel, cdiv(2 * (size_t)C, WARP), PARTS_WARPS * WARP, 0, s, dweight, dbias, parts,
           (int)nblocks, C);
}

// ---- elementwise ------------------------------------------------------------------------------------------
// the first element of a thread, whose AHEAD vectors are THREADS * N apart
template <int N> static __device__ inline size_t element_of(size_t first) {
    return first + ((size_t)blockIdx.x * AHEAD * THREADS + threadIdx.x) * N;
}

/* elementwise -- launches a kernel for the elements [0, nelem): in vectors of n if `aligned`, and one by one
 * what is left over or not aligned. A kernel's first two arguments are its first element and its end.
 */
template <class... P, class... A>
static void elementwise(void (*vectors)(size_t, size_t, P...), void (*single)(size_t, size_t, P...), int n,
                        int aligned, size_t nelem, FoStream* s, A... args) {
    const size_t cut = aligned ? nelem / n * n : 0;
    if (cut > 0) {
        launch(vectors, cdiv(cut, (size_t)AHEAD * THREADS * n), THREADS, 0, s, (size_t)0, cut, args...);
    }
    if (cut < nelem) {
        launch(single, cdiv(nelem - cut, AHEAD * THREADS), THREADS, 0, s, cut, nelem, args...);
    }
}

/* gelu(x) = x / (1 + e), e = exp(-2 sqrt(2/pi) (x + 0.044715 x^3)): as the tanh form says, with one
 * exponential, and without loss of digits where x is negative. Here the exponent is to base 2.
 */
#define GELU_LINEAR (-2.302208198f)  // -2 sqrt(2/pi) / ln 2
#define GELU_CUBIC  (-0.1029432397f) // that times 0.044715

static __device__ inline float gelu_exponent(float x) {
    return x * fmaf(GELU_CUBIC, x * x, GELU_LINEAR);
}

template <int N>
static __global__ void __launch_bounds__(THREADS)
    gelu_forward_kernel(size_t first, size_t end, floatX* out, const floatX* inp) {
    const size_t i = element_of<N>(first), step = THREADS * N;
    Strip<floatX, N> x = load_strip<N>(inp, i, end, step);
    #pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        Vec<float, N> y = to_floats(x.v[j]);
        #pragma unroll
        for (int k = 0; k < N; k++) {
            y.v[k] = __fdividef(y.v[k], 1.0f + exp2f(gelu_exponent(y.v[k])));
        }
        if (i + j * step < end) { store(out + i + j * step, from_floats<floatX>(y)); }
    }
}

void fo_gelu_forward(floatX* out, const floatX* inp, size_t nelem, FoStream* s) {
    FO_OP(s);
    elementwise(gelu_forward_kernel<VEC>, gelu_forward_kernel<1>, VEC, aligned16(out, inp), nelem, s, out,
                inp);
}

/* gelu'(x) = g + x g (1 - g) u', g = 1 / (1 + e), u' the slope of the exponent to base e. 1 - g is e g, which
 * loses no digits; e is held where g is not yet 0, and the product no NaN.
 */
static __device__ inline float gelu_slope(float x) {
    const float ln2 = 0.693147181f, e = exp2f(fminf(gelu_exponent(x), 126.0f));
    const float g = __fdividef(1.0f, 1.0f + e);
    const float du = fmaf(-3.0f * ln2 * GELU_CUBIC, x * x, -ln2 * GELU_LINEAR);
    return fmaf(x * du, g * (e * g), g);
}

template <int N>
static __global__ void __launch_bounds__(THREADS)
    gelu_backward_kernel(size_t first, size_t end, floatX* dinp, const floatX* dout, const floatX* inp) {
    const size_t i = element_of<N>(first), step = THREADS * N;
    Strip<floatX, N> x = load_strip<N>(inp, i, end, step), d = load_strip<N>(dout, i, end, step);
    #pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        Vec<float, N> y = to_floats(x.v[j]), dy = to_floats(d.v[j]);
        #pragma unroll
        for (int k = 0; k < N; k++) {
            y.v[k] = dy.v[k] * gelu_slope(y.v[k]);
        }
        if (i + j * step < end) { store(dinp + i + j * step, from_floats<floatX>(y)); }
    }
}

void fo_gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t nelem, FoStream* s) {
    FO_OP(s);
    elementwise(gelu_backward_kernel<VEC>, gelu_backward_kernel<1>, VEC, aligned16(dinp, dout, inp), nelem, s,
                dinp, dout, inp);
}

static int aligned_parts(const void* const parts[], int P) {
    uintptr_t bits = 0;
    for (int p = 0; p < P; p++) {
        bits |= (uintptr_t)parts[p];
    }
    return (bits & 15) == 0;
}

// a warp a row, so that the column of the bias is at hand
template <int N, class T>
static __global__ void __launch_bounds__(ROW_WARPS* WARP)
    accumulate_kernel(floatX* out, GRID_CONSTANT Parts parts, const floatX* residual, const floatX* bias,
                      size_t n, int C, int P) {
    const size_t i = row_of_warp();
    if (i >= n) { return; }
    for (int c = lane_of_warp() * N; c < C; c += WARP * N) {
        const size_t at = i * C + c;
        Vec<float, N> sum = {};
        if (residual) { add_to(&sum, to_floats(load_packed<floatX, N>(residual + at))); }
        if (bias) { add_to(&sum, to_floats(load_packed<floatX, N>(bias + c))); }
        for (int p = 0; p < P; p += AHEAD) {
            Packed<T, N> x[AHEAD] = {};
            #pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                if (p + j < P) { x[j] = load_packed<T, N>((const T*)parts.p[p + j] + at); }
            }
            #pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                add_to(&sum, to_floats(x[j])); // beyond the last 0, which changes nothing
            }
        }
        store(out + at, from_floats<floatX>(sum));
    }
}

void fo_accumulate(floatX* out, const void* const parts[], const floatX* residual, const floatX* bias,
                   size_t n, int C, int P, FoDtype part_type, FoStream* s) {
    fo_require(P >= 1 && P <= FO_MAX_RANKS, "P=%d, want 1 to %d", P, FO_MAX_RANKS);
    FO_OP(s);
    if (n == 0) { return; }
    Parts a = {};
    memcpy(a.p, parts, (size_t)P * sizeof a.p[0]);
    const int whole = whole_rows(C, out, residual, bias) && aligned_parts(parts, P);
    launch(part_type == FO_FP32 ? whole ? accumulate_kernel<VEC, float> : accumulate_kernel<1, float>
           : whole ? accumulate_kernel<VEC, FoBf16>
                                : accumulate_kernel<1, FoBf16>,
           cdiv(n, ROW_WARPS), ROW_WARPS * WARP, 0, s, out, a, residual, bias, n, C, P);
}

template <int N, class T>
static __global__ void __launch_bounds__(THREADS)
    add_kernel(size_t first, size_t end, T* acc, const T* part) {
    const size_t i = element_of<N>(first), step = THREADS * N;
    Strip<T, N> x = load_strip<N>(acc, i, end, step), y = load_strip<N>(part, i, end, step);
    #pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        Vec<float, N> sum = to_floats(x.v[j]);
        add_to(&sum, to_floats(y.v[j]));
        if (i + j * step < end) { store(acc + i + j * step, from_floats<T>(sum)); }
    }
}

void fo_add(void* acc, const void* part, size_t nelem, FoDtype type, FoStream* s) {
    FO_OP(s);
    const int aligned = aligned16(acc, part);
    if (type == FO_FP32) {
        elementwise(add_kernel<4, float>, add_kernel<1, float>, 4, aligned, nelem, s, (float*)acc,
                    (const float*)part);
    } else {
        elementwise(add_kernel<8, FoBf16>, add_kernel<1, FoBf16>, 8, aligned, nelem, s, (FoBf16*)acc,
                    (const FoBf16*)part);
    }
}

// out may be any of the parts: a thread has read all it needs before it writes
template <int N>
static __global__ void __launch_bounds__(THREADS)
    sum_kernel(size_t first, size_t end, float* out, GRID_CONSTANT Parts parts, int P) {
    const size_t i = element_of<N>(first), step = THREADS * N;
    Vec<float, N> sum[AHEAD] = {};
    for (int p = 0; p < P; p++) {
        Strip<float, N> x = load_strip<N>((const float*)parts.p[p], i, end, step);
        #pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            add_to(&sum[j], to_floats(x.v[j]));
        }
    }
    #pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        if (i + j * step < end) { store(out + i + j * step, sum[j]); }
    }
}

void fo_sum(float* out, const float* const parts[], size_t nelem, int P, FoStream* s) {
    fo_require(P >= 1 && P <= FO_MAX_RANKS, "P=%d, want 1 to %d", P, FO_MAX_RANKS);
    FO_OP(s);
    Parts a = {};
    memcpy(a.p, parts, (size_t)P * sizeof a.p[0]);
    elementwise(sum_kernel<4>, sum_kernel<1>, 4, aligned16(out) && aligned_parts(a.p, P), nelem, s, out, a,
                P);
}

// ---- loss -------------------------------------------------------------------------------------------------
// A block has a row, a thread AHEAD vectors of it at a time; a short row has few threads.
static unsigned loss_threads(int V) {
    return threads_for(cdiv(V, VEC * AHEAD), THREADS);
}

// exp(x), x <= 0: to base 2, which is what a GPU has
static __device__ inline float exp_of(float x) {
    return exp2f(x * 1.44269504f);
}

/* The largest of the columns that a thread has seen and the sum of exp(x - max), as columns come. The sum is
 * scaled anew once for AHEAD vectors. A maximum of -inf has a sum of 0.
 */
typedef struct {
    float max, sum;
} Softmax;

static __device__ inline float finite_or_0(float max) {
    return max == -INFINITY ? 0.0f : max;
}

template <bool WHOLE>
static __device__ inline void softmax_add(Softmax* s, const floatX* row, int c, int step, int valid) {
    Vec<float, VEC> x[AHEAD];
    float max = s->max;
    Packed<floatX, VEC> raw[AHEAD];
    #pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        raw[j] = load_part<WHOLE, VEC>(row + c + j * step, valid - c - j * step);
    }
    #pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        x[j] = to_floats(raw[j]);
        // padding, and what lies beyond the row
        if (valid - c - j * step < VEC) {
            #pragma unroll
            for (int e = 0; e < VEC; e++) {
                x[j].v[e] = e < valid - c - j * step ? x[j].v[e] : -INFINITY;
            }
        }
        #pragma unroll
        for (int e = 0; e < VEC; e++) {
            max = fmaxf(max, x[j].v[e]);
        }
    }
    const float base = finite_or_0(max);
    float sum = s->sum * exp_of(s->max - base);
    #pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        float part = 0.0f;
        if (c + j * step < valid) {
            #pragma unroll
            for (int e = 0; e < VEC; e++) {
                part += exp_of(x[j].v[e] - base);
            }
        }
        sum += part;
    }
    s->max = max, s->sum = sum;
}

template <bool WHOLE>
static __global__ void __launch_bounds__(THREADS)
    softmax_stats_kernel(FoSoftmaxStat* stats, const floatX* logits, const int* targets, int V, int valid,
                         int v0) {
    const size_t i = blockIdx.x;
    const floatX* row = logits + i * V;
    const int step = (int)blockDim.x * VEC;
    Softmax s = {-INFINITY, 0.0f};
    for (int c = (int)threadIdx.x * VEC; c < valid; c += AHEAD * step) {
        softmax_add<WHOLE>(&s, row, c, step, valid);
    }
    const float max = block_reduce(s.max, Max(), -INFINITY);
    const float sum = block_reduce(s.sum * exp_of(s.max - finite_or_0(max)), Sum(), 0.0f);
    if (threadIdx.x == 0) {
        const int target = targets[i] - v0;
        FoSoftmaxStat stat = {max, sum, target >= 0 && target < valid ? to_float(row[target]) : 0.0f};
        stats[i] = stat;
    }
}

void fo_softmax_stats(FoSoftmaxStat* stats, const floatX* logits, const int* targets, size_t n, int V,
                      int valid, int v0, FoStream* s) {
    fo_require(valid >= 0 && valid <= V, "valid=%d, want 0 to V=%d", valid, V);
    FO_OP(s);
    if (n == 0) { return; }
    launch(V % VEC == 0 && aligned16(logits) ? softmax_stats_kernel<true> : softmax_stats_kernel<false>,
           (unsigned)n, loss_threads(V), 0, s, stats, logits, targets, V, valid, v0);
}

// a row's softmax over all ranks, in rank order
static __device__ inline FoSoftmaxStat all_ranks(const FoSoftmaxStat* stats, size_t i, size_t n, int P) {
    FoSoftmaxStat all = {-INFINITY, 0.0f, 0.0f};
    #pragma unroll 4
    for (int p = 0; p < P; p++) {
        all.max = fmaxf(all.max, stats[p * n + i].max);
    }
    #pragma unroll 4
    for (int p = 0; p < P; p++) {
        FoSoftmaxStat stat = stats[p * n + i];
        all.sum = fmaf(stat.sum, exp_of(stat.max - all.max), all.sum); // only padding: 0 * exp(-inf)
        all.target += stat.target;                                     // all but one are 0
    }
    return all;
}

static __device__ inline float loss_of(FoSoftmaxStat all) {
    return logf(all.sum) + (all.max - all.target);
}

static __global__ void __launch_bounds__(THREADS)
    losses_kernel(float* losses, const FoSoftmaxStat* stats, size_t n, int P) {
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) { losses[i] = loss_of(all_ranks(stats, i, n, P)); }
}

// one vector of logits becomes its gradient
static __device__ inline Packed<floatX, VEC> softmax_gradient(const Packed<floatX, VEC>& packed, float max,
                                                              float scale, int count) {
    Vec<float, VEC> x = to_floats(packed);
    #pragma unroll
    for (int e = 0; e < VEC; e++) {
        x.v[e] = scale * exp_of(x.v[e] - max);
    }
    // padding
    if (count < VEC) {
        #pragma unroll
        for (int e = 0; e < VEC; e++) {
            x.v[e] = e < count ? x.v[e] : 0.0f;
        }
    }
    return from_floats<floatX>(x);
}

template <bool WHOLE>
static __global__ void __launch_bounds__(THREADS)
    softmax_loss_kernel(float* losses, floatX* logits, const FoSoftmaxStat* stats, const int* targets,
                        float dscale, float z, size_t n, int V, int valid, int v0, int P) {
    __shared__ float max, scale, target_gradient;
    const size_t i = blockIdx.x;
    const int step = (int)blockDim.x * VEC, target = targets[i] - v0;
    const bool has_target = target >= 0 && target < valid;
    floatX* row = logits + i * V;
    if (threadIdx.x == 0) {
        const FoSoftmaxStat all = all_ranks(stats, i, n, P);
        losses[i] = loss_of(all);
        max = all.max;
        const float more = 1.0f + 2.0f * z * (logf(all.sum) + max);
        scale = dscale * more / all.sum;
        if (has_target) {
            target_gradient = dscale * (more * (exp_of(to_float(row[target]) - max) / all.sum) - 1.0f);
        }
    }
    __syncthreads(); // and the target's logit is read before any is written
    for (int c = (int)threadIdx.x * VEC; c < V; c += AHEAD * step) {
        Packed<floatX, VEC> x[AHEAD];
        #pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            x[j] = load_part<WHOLE, VEC>(row + c + j * step, valid - c - j * step);
        }
        #pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int at = c + j * step;
            if (at < V) {
                store_part<WHOLE>(row + at, softmax_gradient(x[j], max, scale, valid - at), V - at);
            }
        }
    }
    // by the thread that has written the target's vector: its own writes stay in order
    if (has_target && target / VEC % (int)blockDim.x == (int)threadIdx.x) {
        row[target] = from_float<floatX>(target_gradient);
    }
}

void fo_softmax_loss(float* losses, floatX* logits, const FoSoftmaxStat* stats, const int* targets,
                     float dscale, float z, size_t n, int V, int valid, int v0, int P, FoStream* s) {
    fo_require(P >= 1, "P=%d, want at least 1", P);
    fo_require(valid >= 0 && valid <= V, "valid=%d, want 0 to V=%d", valid, V);
    FO_OP(s);
    if (n == 0) { return; }
    if (dscale == 0.0f) {
        launch(losses_kernel, cdiv(n, THREADS), THREADS, 0, s, losses, stats, n, P);
        return;
    }
    launch(V % VEC == 0 && aligned16(logits) ? softmax_loss_kernel<true> : softmax_loss_kernel<false>,
           (unsigned)n, loss_threads(V), 0, s, losses, logits, stats, targets, dscale, z, n, V, valid, v0, P);
}

// ---- optimizer --------------------------------------------------------------------------------------------
// What a step reads once and writes once passes the caches by.
template <int N> static __device__ inline Vec<float, N> load_once(const float* p) {
    Vec<float, N> x;
    if constexpr (N == 4) {
        const float4 y = __ldcs(reinterpret_cast<const float4*>(p));
        x.v[0] = y.x, x.v[1] = y.y, x.v[2] = y.z, x.v[3] = y.w;
    } else {
        x.v[0] = __ldcs(p);
    }
    return x;
}

template <int N, class T> static __device__ inline void store_once(T* p, const Vec<float, N>& floats) {
    const Packed<T, N> x = from_floats<T>(floats);
    if constexpr (sizeof x == sizeof(uint4)) {
        __stcs(reinterpret_cast<uint4*>(p), make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]));
    } else if constexpr (sizeof x == sizeof(uint2)) {
        __stcs(reinterpret_cast<uint2*>(p), make_uint2(x.w[0], x.w[1]));
    } else {
        store(p, x);
    }
}

// blocks of an SM; vectors that a thread loads before it uses the first
enum { ADAMW_BLOCKS = 4, ADAMW_AHEAD = 2 };

// scales: of m and v, which began at 0
typedef struct {
    FoAdamw a;
    float m_scale, v_scale;
} AdamwStep;

// one weight. Products and sums are put into one here, as the compiler might do it in several ways
static __device__ inline void adamw(float* w, float* m, float* v, float grad, const AdamwStep& u) {
    const FoAdamw& a = u.a;
    const float g = grad * a.grad_scale;
    *m = fmaf(a.beta1, *m, (1.0f - a.beta1) * g);
    *v = fmaf(a.beta2, *v, (1.0f - a.beta2) * (g * g));
    const float step = *m * u.m_scale / (sqrtf(*v * u.v_scale) + a.eps);
    *w = fmaf(-a.lr, fmaf(a.weight_decay, *w, step), *w);
}

// in blocks that all run at once, each of which goes through the arrays in strides. param may be master
template <int N>
static __global__ void __launch_bounds__(THREADS, ADAMW_BLOCKS)
    adamw_update_kernel(size_t first, size_t end, floatX* param, float* master, float* m, float* v,
                        const float* grad, AdamwStep u) {
    const size_t step = (size_t)gridDim.x * THREADS * N;
    for (size_t i = first + ((size_t)blockIdx.x * THREADS + threadIdx.x) * N; i < end;
         i += ADAMW_AHEAD * step) {
        Vec<float, N> w[ADAMW_AHEAD] = {}, mi[ADAMW_AHEAD] = {}, vi[ADAMW_AHEAD] = {}, g[ADAMW_AHEAD] = {};
        #pragma unroll
        for (int j = 0; j < ADAMW_AHEAD; j++) {
            const size_t at = i + j * step;
            if (at >= end) { continue; }
            w[j] = load_once<N>(master + at), mi[j] = load_once<N>(m + at);
            vi[j] = load_once<N>(v + at), g[j] = load_once<N>(grad + at);
        }
        #pragma unroll
        for (int j = 0; j < ADAMW_AHEAD; j++) {
            const size_t at = i + j * step;
            if (at >= end) { continue; }
            #pragma unroll
            for (int e = 0; e < N; e++) {
                adamw(&w[j].v[e], &mi[j].v[e], &vi[j].v[e], g[j].v[e], u);
            }
            store_once(m + at, mi[j]);
            store_once(v + at, vi[j]);
            store_once(master + at, w[j]);
            store_once(param + at, w[j]);
        }
    }
}

void fo_adamw_update(floatX* param, float* master, float* m, float* v, const float* grad, size_t nelem,
                     FoAdamw a, FoStream* s) {
    fo_require(a.t >= 1, "t=%d, want the step counted from 1", a.t);
    FO_OP(s);
    const AdamwStep u = {a, (float)(1.0 / (1.0 - pow((double)a.beta1, a.t))),
                         (float)(1.0 / (1.0 - pow((double)a.beta2, a.t)))};
    const size_t cut = aligned16(param, master, m, v) && aligned16(grad) ? nelem / 4 * 4 : 0;
    const unsigned most = (unsigned)s->device->nsm * ADAMW_BLOCKS;
    if (cut > 0) {
        const unsigned blocks = cdiv(cut, THREADS * 4);
        launch(adamw_update_kernel<4>, blocks < most ? blocks : most, THREADS, 0, s, (size_t)0, cut, param,
               master, m, v, grad, u);
    }
    if (cut < nelem) {
        const unsigned blocks = cdiv(nelem - cut, THREADS);
        launch(adamw_update_kernel<1>, blocks < most ? blocks : most, THREADS, 0, s, cut, nelem, param,
               master, m, v, grad, u);
    }
}

// elements of which a block of square_sum_kernel makes one number; a thread has every THREADS-th four of them
enum { SQUARE_BLOCK = 16384, SQUARE_THREADS = 1024 };

template <bool WHOLE>
static __global__ void __launch_bounds__(THREADS)
    square_sum_kernel(double* parts, const float* x, size_t nelem) {
    const size_t first = (size_t)blockIdx.x * SQUARE_BLOCK;
    const int count = nelem - first < SQUARE_BLOCK ? (int)(nelem - first) : (int)SQUARE_BLOCK;
    double sum[4] = {};
    #pragma unroll 4
    for (int i = (int)threadIdx.x * 4; i < SQUARE_BLOCK; i += THREADS * 4) {
        Vec<float, 4> y = to_floats(load_part<WHOLE, 4>(x + first + i, count - i));
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            sum[e] = fma((double)y.v[e], (double)y.v[e], sum[e]);
        }
    }
    const double total = block_reduce((sum[0] + sum[1]) + (sum[2] + sum[3]), Sum(), 0.0);
    if (threadIdx.x == 0) { parts[blockIdx.x] = total; }
}

// *out += sum of parts
static __global__ void __launch_bounds__(SQUARE_THREADS)
    add_doubles_kernel(double* out, const double* parts, size_t nparts) {
    double sum = 0.0;
    #pragma unroll 4
    for (size_t p = threadIdx.x; p < nparts; p += SQUARE_THREADS) {
        sum += parts[p];
    }
    const double total = block_reduce(sum, Sum(), 0.0);
    if (threadIdx.x == 0) { *out += total; }
}

void fo_square_sum(double* out, const float* x, size_t nelem, FoStream* s) {
    FO_OP(s);
    if (nelem == 0) { return; }
    const size_t nblocks = cdiv(nelem, SQUARE_BLOCK), whole = aligned16(x) ? nelem / SQUARE_BLOCK : 0;
    double* parts = (double*)fo__scratch(s, nblocks * sizeof(double));
    if (whole > 0) { launch(square_sum_kernel<true>, (unsigned)whole, THREADS, 0, s, parts, x, nelem); }
    if (whole < nblocks) {
        launch(square_sum_kernel<false>, (unsigned)(nblocks - whole), THREADS, 0, s, parts + whole,
               x + whole * SQUARE_BLOCK, nelem - whole * SQUARE_BLOCK);
    }
    launch(add_doubles_kernel, 1, SQUARE_THREADS, 0, s, out, parts, nblocks);
}
