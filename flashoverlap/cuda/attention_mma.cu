/* attention_mma.cu -- own attention kernels for bf16 on tensor cores: head sizes up to 128, multiples of 8.
 *
 * Read attention.cuh and the fragments of ptx.cuh first. A block has four warps; each owns 16 rows of the
 * block's tile (forward, small heads: 32) and needs no other for its results. What all walk over comes
 * through shared memory in two stages, so that the next tile is copied while this one is worked on. All
 * products are made by two functions: dots, of rows by rows, and add_product, of scores in registers by rows.
 */
#ifndef FO_PRECISION_FP32
#include "flashoverlap/cuda/attention.cuh"
#include "flashoverlap/cuda/ptx.cuh"
#include <limits.h>

enum { WARPS = 4, NTHREADS = WARPS * WARP, DOUT = 3 }; // DOUT: beside q, k and v, parts 0, 1 and 2 of qkv
#define LOG2E 1.44269504f

// 16 bytes more a row, so that equal columns of 8 rows that follow each other lie in different banks
template <int HS, int NROWS> struct Tile { FoBf16 v[NROWS][HS + 8]; };

static __device__ inline int lane_id() {
    return (int)threadIdx.x % WARP;
}
static __device__ inline int warp_id() {
    return (int)threadIdx.x / WARP;
}

// starts to copy one part of a head at the positions of a span; what is left of the tile becomes zeros
template <int HS, int NROWS>
static __device__ inline void copy_rows(Copies* copies, Tile<HS, NROWS>* tile, const AttentionArgs& a,
                                        const Span& span, int part) {
    constexpr int N = 8, CHUNKS = HS / N;
    size_t C = (size_t)a.NH * (size_t)a.hs, width = part == DOUT ? C : 3 * C;
    const floatX* x = (part == DOUT ? a.dout : a.qkv + (size_t)part * C) + blockIdx.y * (size_t)a.hs;
    for (int i = (int)threadIdx.x; i < NROWS * CHUNKS; i += NTHREADS) {
        int r = i / CHUNKS, c = i % CHUNKS * N, there = r < span.nt && c < a.hs;
        const floatX* from = there ? x + span_row(span, a.l, r) * width + c : x;
        copies->start(&tile->v[r][c], from, there);
    }
}

// ---- products ---------------------------------------------------------------------------------------------
// 16 x 16 at p, whose rows are `width` apart, as fragment A; or, transposed, as fragments B of two times 8
// columns
static __device__ inline const FoBf16* row_of_lane(const FoBf16* p, int width) {
    return p + lane_id() % 16 * width + lane_id() / 16 * 8;
}

// 16 rows from `row` on, as the left factor
template <int HS, int NROWS>
static __device__ inline void load_left(unsigned f[HS / 16][4], const Tile<HS, NROWS>* tile, int row) {
    #pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        load_matrices(f[k], row_of_lane(&tile->v[row][k * 16], HS + 8));
    }
}

// s += rows of the left factor by all rows of b
template <int M, int HS, int N>
static __device__ inline void dots(float s[M][N / 8][4], const unsigned left[M][HS / 16][4],
                                   const Tile<HS, N>* b) {
    int row = lane_id() / 16 * 8 + lane_id() % 8, column = lane_id() / 8 % 2 * 8;
    #pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        #pragma unroll
        for (int j = 0; j < N / 16; j++) {
            unsigned right[4];
            load_matrices(right, &b->v[j * 16 + row][k * 16 + column]);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                mma_bf16(s[m][2 * j], left[m][k], right);
                mma_bf16(s[m][2 * j + 1], left[m][k], right + 2);
            }
        }
    }
}

// acc += p, rounded to bf16, by x: scores lie in registers such that two times 8 columns are a left factor
template <int M, int HS, int N>
static __device__ inline void add_product(float acc[M][HS / 8][4], const float p[M][N / 8][4],
                                          const Tile<HS, N>* x) {
    #pragma unroll
    for (int k = 0; k < N / 16; k++) {
        unsigned left[M][4];
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &p[m][2 * k + i / 2][i % 2 * 2];
                left[m][i] = pack_bf16(pair[0], pair[1]);
            }
        }
        #pragma unroll
        for (int d = 0; d < HS / 16; d++) {
            unsigned right[4];
            load_matrices_transposed(right, row_of_lane(&x->v[k * 16][d * 16], HS + 8));
            #pragma unroll
            for (int m = 0; m < M; m++) {
                mma_bf16(acc[m][2 * d], left[m], right);
                mma_bf16(acc[m][2 * d + 1], left[m], right + 2);
            }
        }
    }
}

// over the four lanes that share rows of a result
template <class Op> static __device__ inline float row_reduce(float x, Op op) {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return op(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* store_rows -- the first nrows of 16 rows of a result to out, times factor[0] (the upper 8) and factor[1].
 * They pass through rows of a tile that this warp alone reads, to be stored 16 bytes at once.
 */
template <int HS, int NROWS>
static __device__ inline void store_rows(floatX* out, size_t width, int nrows, int hs,
                                         const float acc[HS / 8][4], const float factor[2],
                                         Tile<HS, NROWS>* tile, int row) {
    __syncwarp(); // all lanes have read the tile's rows
    #pragma unroll
    for (int j = 0; j < HS / 8; j++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned pair = pack_bf16(acc[j][2 * half] * factor[half], acc[j][2 * half + 1] * factor[half]);
            memcpy(&tile->v[row + lane_id() / 4 + 8 * half][j * 8 + lane_id() % 4 * 2], &pair, sizeof pair);
        }
    }
    __syncwarp();
    for (int i = lane_id(); i < 16 * (HS / 8); i += WARP) {
        int r = i / (HS / 8), c = i % (HS / 8) * 8;
        if (r < nrows && c < hs) {
            store(out + (size_t)r * width + c, load<floatX, 8>(&tile->v[row + r][c]));
        }
    }
}

// ---- forward ----------------------------------------------------------------------------------------------
// of a lane's two rows, the upper and the lower: the largest score, unscaled, and the lane's share of the sum
// of exponentials
struct Softmax {
    float max[2], sum[2];
};

/* softmax_step -- scores of 16 queries from position t0 on and N keys from position t on become p; acc, the
 * result so far, is made to fit a new maximum. The sum is of the exponentials before they are rounded.
 */
template <int HS, int N>
static __device__ inline void softmax_step(Softmax* st, float s[N / 8][4], float acc[HS / 8][4], int t0,
                                           int t, float scale) {
    if (t + N - 1 > t0) { // there may be keys that a query does not see
        #pragma unroll
        for (int j = 0; j < N / 8; j++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = t + j * 8 + lane_id() % 4 * 2 + i % 2, query = t0 + lane_id() / 4 + i / 2 * 8;
                s[j][i] = key <= query ? s[j][i] : -INFINITY;
            }
        }
    }
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = st->max[half], sum = 0.0f;
        #pragma unroll
        for (int j = 0; j < N / 8; j++) {
            max = fmaxf(max, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
        }
        max = row_reduce(max, Max());
        float factor = exp2_fast((st->max[half] - max) * scale), shift = max * scale;
        #pragma unroll
        for (int j = 0; j < N / 8; j++) {
            #pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                s[j][i] = exp2_fast(fmaf(s[j][i], scale, -shift));
                sum += s[j][i];
            }
        }
        st->max[half] = max;
        st->sum[half] = fmaf(st->sum[half], factor, sum);
        #pragma unroll
        for (int j = 0; j < HS / 8; j++) {
            acc[j][2 * half] *= factor;
            acc[j][2 * half + 1] *= factor;
        }
    }
}

template <int HS> struct ForwardShared {
    static constexpr int M = HS <= 64 ? 2 : 1, ROWS = WARPS * 16 * M, STEP = 32;
    Tile<HS, ROWS> q;
    Tile<HS, STEP> k[2], v[2];
};

template <int HS>
static __global__ void __launch_bounds__(NTHREADS) attention_forward_mma_kernel(AttentionArgs a) {
    typedef ForwardShared<HS> Shared;
    constexpr int M = Shared::M, STEP = Shared::STEP;
    DYNAMIC_SHARED(Shared, sh);
    Span rows = span_of_block(a, Shared::ROWS, 1);
    if (rows.nt <= 0) { return; }
    Copies copies;
    int end = rows.t0 + rows.nt; // what later positions hold may be incomplete: never read
    Span keys = span_of_positions(a.l, rows.b, 0, min(STEP, end));
    copy_rows(&copies, &sh->q, a, rows, 0);
    copy_rows(&copies, &sh->k[0], a, keys, 1);
    copy_rows(&copies, &sh->v[0], a, keys, 2);
    copies.wait();
    __syncthreads();
    int row = warp_id() * 16 * M; // this warp's first
    unsigned q[M][HS / 16][4];
    float acc[M][HS / 8][4] = {}, scale = a.scale;
    Softmax st[M];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        load_left(q[m], &sh->q, row + 16 * m);
        st[m] = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    }
    for (int t = 0, stage = 0; t < end; t += STEP, stage ^= 1) {
        if (t + STEP < end) {
            keys = span_of_positions(a.l, rows.b, t + STEP, min(STEP, end - t - STEP));
            copy_rows(&copies, &sh->k[stage ^ 1], a, keys, 1);
            copy_rows(&copies, &sh->v[stage ^ 1], a, keys, 2);
        }
        if (t <= rows.t0 + row + 16 * M - 1) { // else none of the warp's queries sees these keys
            float s[M][STEP / 8][4] = {};
            dots<M, HS, STEP>(s, q, &sh->k[stage]);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                softmax_step<HS, STEP>(&st[m], s[m], acc[m], rows.t0 + row + 16 * m, t, scale * LOG2E);
            }
            add_product<M, HS, STEP>(acc, s, &sh->v[stage]);
        }
        copies.wait();
        __syncthreads(); // the next keys are there | this tile is read
    }
    size_t C = (size_t)a.NH * (size_t)a.hs;
    #pragma unroll
    for (int m = 0; m < M; m++) {
        int r = row + 16 * m;
        float inverse[2];
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = row_reduce(st[m].sum[half], Sum());
            int mine = r + lane_id() / 4 + 8 * half;
            inverse[half] = 1.0f / sum;
            if (lane_id() % 4 == 0 && mine < rows.nt) {
                a.lse[(rows.row + (size_t)mine) * (size_t)a.NH + blockIdx.y] =
                    fmaf(st[m].max[half], scale, logf(sum));
            }
        }
        floatX* out = a.out + (rows.row + (size_t)r) * C + blockIdx.y * (size_t)a.hs;
        store_rows(out, C, rows.nt - r, a.hs, acc[m], inverse, &sh->q, r);
    }
}

// ---- backward ---------------------------------------------------------------------------------------------
// of queries: lse in powers of two, and sum of dout * out
template <int N> struct Stats { float lse[N], delta[N]; };

// of those that are not there, lse is such that p is 0
template <int N>
static __device__ inline void load_stats(Stats<N>* st, const AttentionArgs& a, const Span& queries) {
    int i = (int)threadIdx.x;
    if (i < N) {
        size_t at = i < queries.nt ? span_row(queries, a.l, i) * (size_t)a.NH + blockIdx.y : 0;
        st->lse[i] = i < queries.nt ? a.lse[at] * LOG2E : INFINITY;
        st->delta[i] = i < queries.nt ? a.delta[at] : 0.0f;
    }
}

template <int HS> struct BackwardShared {
    static constexpr int ROWS = WARPS * 16, STEP = HS <= 64 ? 64 : 32;
    Tile<HS, ROWS> own[2];     // k and v; or q and dout
    Tile<HS, STEP> step[2][2]; // of each stage: q and dout; or k and v
    Stats<STEP> stats[2];      // of each stage, if they are q and dout
    int position[2][STEP]; // else those of the keys; INT_MAX, which no query sees, where one doesn't count
};

template <int HS>
static __device__ inline void copy_queries(Copies* copies, BackwardShared<HS>* sh, int stage,
                                           const AttentionArgs& a, int b, int t) {
    Span queries = span_of_positions(a.l, b, t, min((int)BackwardShared<HS>::STEP, a.l.T - t));
    copy_rows(copies, &sh->step[stage][0], a, queries, 0);
    copy_rows(copies, &sh->step[stage][1], a, queries, DOUT);
    load_stats(&sh->stats[stage], a, queries);
}

template <int HS>
static __global__ void __launch_bounds__(NTHREADS) attention_dkv_mma_kernel(AttentionArgs a) {
    typedef BackwardShared<HS> Shared;
    constexpr int STEP = Shared::STEP;
    DYNAMIC_SHARED(Shared, sh);
    Span keys = span_of_block(a, Shared::ROWS, 0);
    if (keys.nt <= 0) { return; }
    Copies copies;
    int row = warp_id() * 16, key0 = keys.t0 + row; // this warp's first
    float dk[1][HS / 8][4] = {}, dv[1][HS / 8][4] = {}, scale = a.scale;
    int t0 = keys.t0 / STEP * STEP;
    copy_rows(&copies, &sh->own[0], a, keys, 1);
    copy_rows(&copies, &sh->own[1], a, keys, 2);
    copy_queries(&copies, sh, 0, a, keys.b, t0);
    copies.wait();
    __syncthreads();
    for (int t = t0, stage = 0; t < a.l.T; t += STEP, stage ^= 1) {
        if (t + STEP < a.l.T) { copy_queries(&copies, sh, stage ^ 1, a, keys.b, t + STEP); }
        if (t + STEP - 1 >= key0) { // else none of these queries sees the warp's keys
            float s[1][STEP / 8][4] = {}, dp[1][STEP / 8][4] = {};
            unsigned left[1][HS / 16][4];
            load_left(left[0], &sh->own[0], row);
            dots<1, HS, STEP>(s, left, &sh->step[stage][0]);
            load_left(left[0], &sh->own[1], row);
            dots<1, HS, STEP>(dp, left, &sh->step[stage][1]);
            int all = t >= key0 + 15; // does each query see each key?
            #pragma unroll
            for (int j = 0; j < STEP / 8; j++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    int c = j * 8 + lane_id() % 4 * 2 + i % 2, key = key0 + lane_id() / 4 + i / 2 * 8;
                    float p = exp2_fast(fmaf(s[0][j][i], scale * LOG2E, -sh->stats[stage].lse[c]));
                    p = all || key <= t + c ? p : 0.0f;
                    s[0][j][i] = p;
                    dp[0][j][i] = p * (dp[0][j][i] - sh->stats[stage].delta[c]) * scale;
                }
            }
            add_product<1, HS, STEP>(dv, s, &sh->step[stage][1]);
            add_product<1, HS, STEP>(dk, dp, &sh->step[stage][0]);
        }
        copies.wait();
        __syncthreads(); // the next queries are there | these are read
    }
    const float as_it_is[2] = {1.0f, 1.0f};
    floatX* to = a.dk + (keys.row + (size_t)row) * a.dk_row + blockIdx.y * (size_t)a.hs;
    store_rows(to, a.dk_row, keys.nt - row, a.hs, dk[0], as_it_is, &sh->own[0], row);
    store_rows(to + (size_t)a.NH * (size_t)a.hs, a.dk_row, keys.nt - row, a.hs, dv[0], as_it_is, &sh->own[1],
               row);
}

// the first step of keys from t on, below end, in which some count, else one at or beyond end
static __device__ inline int next_keys(const AttentionArgs& a, int b, int t, int end, int step) {
    while (t < end && !any_key_counts(a, span_of_positions(a.l, b, t, min(step, a.l.T - t)))) {
        t += step;
    }
    return t;
}

template <int HS>
static __device__ inline void copy_keys(Copies* copies, BackwardShared<HS>* sh, int stage,
                                        const AttentionArgs& a, int b, int t) {
    Span keys = span_of_positions(a.l, b, t, min((int)BackwardShared<HS>::STEP, a.l.T - t));
    copy_rows(copies, &sh->step[stage][0], a, keys, 1);
    copy_rows(copies, &sh->step[stage][1], a, keys, 2);
    int i = (int)threadIdx.x;
    if (i < BackwardShared<HS>::STEP) {
        int counts = i < keys.nt && key_counts(a, span_row(keys, a.l, i));
        sh->position[stage][i] = counts ? t + i : INT_MAX;
    }
}

// dq[r] += of 16 rows, of which there are nrows
template <int HS>
static __device__ inline void add_rows(float* dq, size_t width, int nrows, int hs,
                                       const float acc[HS / 8][4]) {
    #pragma unroll
    for (int j = 0; j < HS / 8; j++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = lane_id() / 4 + 8 * half, c = j * 8 + lane_id() % 4 * 2;
            if (r < nrows && c < hs) {
                float* to = dq + (size_t)r * width + c;
                Vec<float, 2> sum = load<float, 2>(to);
                sum.v[0] += acc[j][2 * half];
                sum.v[1] += acc[j][2 * half + 1];
                store(to, sum);
            }
        }
    }
}

template <int HS>
static __global__ void __launch_bounds__(NTHREADS) attention_dq_mma_kernel(AttentionArgs a) {
    typedef BackwardShared<HS> Shared;
    constexpr int STEP = Shared::STEP;
    DYNAMIC_SHARED(Shared, sh);
    Span queries = span_of_block(a, Shared::ROWS, 1);
    int end = queries.t0 + queries.nt, t = next_keys(a, queries.b, 0, end, STEP);
    if (queries.nt <= 0 || t >= end) { return; }
    Copies copies;
    int row = warp_id() * 16, query0 = queries.t0 + row; // this warp's first
    float dq[1][HS / 8][4] = {}, scale = a.scale, lse[2], delta[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int r = min(row + lane_id() / 4 + 8 * half, queries.nt - 1);
        size_t at = (queries.row + (size_t)r) * (size_t)a.NH + blockIdx.y;
        lse[half] = a.lse[at] * LOG2E;
        delta[half] = a.delta[at];
    }
    copy_rows(&copies, &sh->own[0], a, queries, 0);
    copy_rows(&copies, &sh->own[1], a, queries, DOUT);
    copy_keys(&copies, sh, 0, a, queries.b, t);
    copies.wait();
    __syncthreads();
    for (int stage = 0; t < end; stage ^= 1) {
        int next = next_keys(a, queries.b, t + STEP, end, STEP);
        if (next < end) { copy_keys(&copies, sh, stage ^ 1, a, queries.b, next); }
        if (t <= query0 + 15) { // else none of the warp's queries sees these keys
            float s[1][STEP / 8][4] = {}, dp[1][STEP / 8][4] = {};
            unsigned left[1][HS / 16][4];
            load_left(left[0], &sh->own[0], row);
            dots<1, HS, STEP>(s, left, &sh->step[stage][0]);
            load_left(left[0], &sh->own[1], row);
            dots<1, HS, STEP>(dp, left, &sh->step[stage][1]);
            #pragma unroll
            for (int j = 0; j < STEP / 8; j++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    int c = j * 8 + lane_id() % 4 * 2 + i % 2, query = query0 + lane_id() / 4 + i / 2 * 8;
                    float p = exp2_fast(fmaf(s[0][j][i], scale * LOG2E, -lse[i / 2]));
                    dp[0][j][i] =
                        sh->position[stage][c] <= query ? p * (dp[0][j][i] - delta[i / 2]) * scale : 0.0f;
                }
            }
            add_product<1, HS, STEP>(dq, dp, &sh->step[stage][0]);
        }
        copies.wait();
        __syncthreads(); // the next keys are there | these are read
        t = next;
    }
    size_t C = (size_t)a.NH * (size_t)a.hs, at = blockIdx.y * (size_t)a.hs, first = queries.row + (size_t)row;
    if (a.dq) {
        add_rows<HS>(a.dq + first * C + at, C, queries.nt - row, a.hs, dq[0]);
    } else {
        const float as_it_is[2] = {1.0f, 1.0f};
        store_rows(a.dqkv + first * 3 * C + at, 3 * C, queries.nt - row, a.hs, dq[0], as_it_is, &sh->own[0],
                   row);
    }
}

// ---- launches ---------------------------------------------------------------------------------------------
template <int HS> static void launch_forward(const AttentionArgs* a, FoStream* s) {
    typedef ForwardShared<HS> Shared;
    launch_tiles(attention_forward_mma_kernel<HS>, tiles_of(*a, Shared::ROWS), NTHREADS, sizeof(Shared), s,
                 a);
}
template <int HS> static void launch_dkv(const AttentionArgs* a, FoStream* s) {
    typedef BackwardShared<HS> Shared;
    launch_tiles(attention_dkv_mma_kernel<HS>, tiles_of(*a, Shared::ROWS), NTHREADS, sizeof(Shared), s, a);
}
template <int HS> static void launch_dq(const AttentionArgs* a, FoStream* s) {
    typedef BackwardShared<HS> Shared;
    launch_tiles(attention_dq_mma_kernel<HS>, tiles_of(*a, Shared::ROWS), NTHREADS, sizeof(Shared), s, a);
}

// the smallest instance that holds a head
typedef void (*Launch)(const AttentionArgs* a, FoStream* s);
static void launch_for_hs(Launch hs32, Launch hs64, Launch hs96, Launch hs128, const AttentionArgs* a,
                          FoStream* s) {
    (a->hs <= 32 ? hs32 : a->hs <= 64 ? hs64 : a->hs <= 96 ? hs96 : hs128)(a, s);
}

void fo__mma_forward(const AttentionArgs* a, FoStream* s) {
    launch_for_hs(launch_forward<32>, launch_forward<64>, launch_forward<96>, launch_forward<128>, a, s);
}
void fo__mma_dkv(const AttentionArgs* a, FoStream* s) {
    launch_for_hs(launch_dkv<32>, launch_dkv<64>, launch_dkv<96>, launch_dkv<128>, a, s);
}
void fo__mma_dq(const AttentionArgs* a, FoStream* s) {
    launch_for_hs(launch_dq<32>, launch_dq<64>, launch_dq<96>, launch_dq<128>, a, s);
}
#endif
