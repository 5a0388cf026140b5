/* attention_kernels.cu -- own attention kernels in plain CUDA C, bf16 and fp32, any head size up to 256.
 *
 * The fallback of attention_mma.cu, and all there is for fp32. Read attention.cuh first. A block is 8 x 16
 * threads: thread (y, x) has rows 4*y ... 4*y+3 of the block's tile and every 16th column from x on, be they
 * rows of the other side (scores) or channels (results). All products are made by two functions, dots and
 * add_product, of tiles that lie in shared memory as floats.
 */
#include "flashoverlap/cuda/attention.cuh"

enum { TILE = 32, NTX = 16, NTHREADS = 128, ROWS = TILE / (NTHREADS / NTX), COLS = TILE / NTX };
enum { LDP = TILE + 1 }; // of a tile of scores
enum { DOUT = 3 };       // beside q, k and v, the parts 0, 1 and 2 of qkv
// launch bounds say 1 block: else nvcc spills registers, to have room for more blocks

template <int HS> struct Tile {
    float v[TILE][HS + 4]; // 16 bytes more, so that equal columns of following rows lie in different banks
};
struct Scores {
    float v[TILE][LDP];
};

static __device__ inline int thread_x() {
    return (int)threadIdx.x % NTX;
}
static __device__ inline int thread_y() {
    return (int)threadIdx.x / NTX;
}

// one part of a head at the positions of a span; what is left of the tile is zeros
template <int HS>
static __device__ void load_rows(Tile<HS>* tile, const AttentionArgs& a, const Span& span, int part) {
    constexpr int N = 16 / sizeof(floatX);
    size_t C = (size_t)a.NH * (size_t)a.hs, width = part == DOUT ? C : 3 * C;
    const floatX* x = (part == DOUT ? a.dout : a.qkv + (size_t)part * C) + blockIdx.y * (size_t)a.hs;
    for (int i = (int)threadIdx.x; i < TILE * (HS / N); i += NTHREADS) {
        int r = i / (HS / N), c = i % (HS / N) * N;
        Vec<floatX, N> in = {};
        if (r < span.nt && c < a.hs) {
            const floatX* row = x + span_row(span, a.l, r) * width + c;
            if (a.vec) {
                in = load<floatX, N>(row);
            } else {
                for (int k = 0; k < N && c + k < a.hs; k++) {
                    in.v[k] = row[k];
                }
            }
        }
        for (int k = 0; k < N; k++) {
            tile->v[r][c + k] = to_float(in.v[k]);
        }
    }
}

// s[i][j] = (row 4*y+i of a) . (row x+16*j of b)
template <int HS>
static __device__ void dots(float s[ROWS][COLS], const Tile<HS>* a, const Tile<HS>* b, int hs) {
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < COLS; j++) {
            s[i][j] = 0.0f;
        }
    }
    for (int d = 0; d < hs; d += 4) {
        Vec<float, 4> right[COLS];
        for (int j = 0; j < COLS; j++) {
            right[j] = load<float, 4>(&b->v[thread_x() + NTX * j][d]);
        }
        for (int i = 0; i < ROWS; i++) {
            Vec<float, 4> left = load<float, 4>(&a->v[thread_y() * ROWS + i][d]);
            for (int j = 0; j < COLS; j++) {
                for (int k = 0; k < 4; k++) {
                    s[i][j] = fmaf(left.v[k], right[j].v[k], s[i][j]);
                }
            }
        }
    }
}

// acc[i][j] += (row 4*y+i of p) . (column x+16*j of x)
template <int HS>
static __device__ void add_product(float acc[ROWS][HS / NTX], const Scores* p, const Tile<HS>* x) {
    for (int k = 0; k < TILE; k++) {
        float left[ROWS];
        for (int i = 0; i < ROWS; i++) {
            left[i] = p->v[thread_y() * ROWS + i][k];
        }
        for (int j = 0; j < HS / NTX; j++) {
            float right = x->v[k][thread_x() + NTX * j];
            for (int i = 0; i < ROWS; i++) {
                acc[i][j] = fmaf(left[i], right, acc[i][j]);
            }
        }
    }
}

// over the 16 threads that share rows
template <class Op> static __device__ inline float row_reduce(float x, Op op) {
    for (int d = NTX / 2; d > 0; d /= 2) {
        x = op(x, __shfl_xor_sync(0xffffffffu, x, d));
    }
    return x;
}

// this thread's part of a row of hs channels, times factor
template <int HS>
static __device__ inline void store_row(floatX* row, const float acc[HS / NTX], float factor, int hs) {
    for (int j = 0; j < HS / NTX; j++) {
        int c = thread_x() + NTX * j;
        if (c < hs) { row[c] = from_float<floatX>(acc[j] * factor); }
    }
}

// ---- forward ----------------------------------------------------------------------------------------------
// a row's softmax so far: the largest score, unscaled, and this thread's share of the sum of exp(score - max)
struct Softmax {
    float max, sum;
};

/* softmax_step -- scores of row i of this thread, unscaled, become p. Returns what earlier sums have to be
 * multiplied by. The sum is of the exponentials before they are rounded.
 */
static __device__ inline float softmax_step(Softmax* m, Scores* p, const float s[COLS], int row, int nvisible,
                                            float scale) {
    float x[COLS], max = m->max;
    for (int j = 0; j < COLS; j++) {
        x[j] = thread_x() + NTX * j < nvisible ? s[j] : -INFINITY;
        max = fmaxf(max, x[j]);
    }
    max = row_reduce(max, Max());
    float factor = expf((m->max - max) * scale), sum = 0.0f;
    for (int j = 0; j < COLS; j++) {
        float e = expf(fmaf(x[j], scale, -max * scale));
        sum += e;
        p->v[row][thread_x() + NTX * j] = round_to_floatx(e);
    }
    m->max = max;
    m->sum = fmaf(m->sum, factor, sum);
    return factor;
}

template <int HS>
static __global__ void __launch_bounds__(NTHREADS, 1) attention_forward_kernel(AttentionArgs a) {
    DYNAMIC_SHARED(Tile<HS>, tiles);
    Tile<HS>*q = tiles, *k = tiles + 1, *v = tiles + 2;
    Scores* p = (Scores*)(tiles + 3);
    Span rows = span_of_block(a, TILE, 1);
    if (rows.nt <= 0) { return; }
    float acc[ROWS][HS / NTX] = {}, scale = a.scale;
    Softmax m[ROWS];
    for (int i = 0; i < ROWS; i++) {
        m[i].max = -INFINITY;
        m[i].sum = 0.0f;
    }
    load_rows(q, a, rows, 0);
    int end = rows.t0 + rows.nt; // what later positions hold may be incomplete: never read
    for (int t = 0; t < end; t += TILE) {
        Span keys = span_of_positions(a.l, rows.b, t, min(TILE, end - t));
        __syncthreads(); // the last keys and values are read
        load_rows(k, a, keys, 1);
        load_rows(v, a, keys, 2);
        __syncthreads();
        float s[ROWS][COLS];
        dots(s, q, k, a.hs);
        for (int i = 0; i < ROWS; i++) {
            int row = thread_y() * ROWS + i;
            float factor = softmax_step(&m[i], p, s[i], row, rows.t0 + row + 1 - t, scale);
            for (int j = 0; j < HS / NTX; j++) {
                acc[i][j] *= factor;
            }
        }
        __syncwarp(); // rows of p are written | and read by the same half of a warp
        add_product<HS>(acc, p, v);
    }
    size_t C = (size_t)a.NH * (size_t)a.hs;
    for (int i = 0; i < ROWS; i++) {
        int r = thread_y() * ROWS + i;
        float sum = row_reduce(m[i].sum, Sum());
        if (r >= rows.nt) { continue; }
        store_row<HS>(a.out + (rows.row + (size_t)r) * C + blockIdx.y * (size_t)a.hs, acc[i], 1.0f / sum,
                      a.hs);
        if (thread_x() == 0) {
            a.lse[(rows.row + (size_t)r) * (size_t)a.NH + blockIdx.y] = fmaf(m[i].max, scale, logf(sum));
        }
    }
}

// ---- backward ---------------------------------------------------------------------------------------------
// of the queries of a tile: lse, and sum of dout * out
struct Stats {
    float lse[TILE], delta[TILE];
};

static __device__ inline void load_stats(Stats* st, const AttentionArgs& a, const Span& queries) {
    int i = (int)threadIdx.x;
    if (i < TILE) {
        size_t at = i < queries.nt ? span_row(queries, a.l, i) * (size_t)a.NH + blockIdx.y : 0;
        st->lse[i] = i < queries.nt ? a.lse[at] : 0.0f;
        st->delta[i] = i < queries.nt ? a.delta[at] : 0.0f;
    }
}

// p of a query and a key from their score, and the gradient of the score
struct Gradient {
    float p, ds;
};
static __device__ inline Gradient gradient_of(float score, float dp, int visible, float lse, float delta,
                                              float scale) {
    float p = visible ? expf(fmaf(score, scale, -lse)) : 0.0f;
    Gradient g = {round_to_floatx(p), visible ? round_to_floatx(p * (dp - delta) * scale) : 0.0f};
    return g;
}

template <int HS>
static __global__ void __launch_bounds__(NTHREADS, 1) attention_dkv_kernel(AttentionArgs a) {
    DYNAMIC_SHARED(Tile<HS>, tiles);
    Tile<HS>*k = tiles, *v = tiles + 1, *q = tiles + 2, *dout = tiles + 3;
    Scores *p = (Scores*)(tiles + 4), *ds = p + 1;
    Stats* st = (Stats*)(p + 2);
    Span keys = span_of_block(a, TILE, 0);
    if (keys.nt <= 0) { return; }
    float dk[ROWS][HS / NTX] = {}, dv[ROWS][HS / NTX] = {}, scale = a.scale;
    load_rows(k, a, keys, 1);
    load_rows(v, a, keys, 2);
    for (int t = keys.t0 / TILE * TILE; t < a.l.T; t += TILE) {
        Span queries = span_of_positions(a.l, keys.b, t, min(TILE, a.l.T - t));
        __syncthreads(); // the last queries are read
        load_rows(q, a, queries, 0);
        load_rows(dout, a, queries, DOUT);
        load_stats(st, a, queries);
        __syncthreads();
        float s[ROWS][COLS], dp[ROWS][COLS];
        dots(s, k, q, a.hs);
        dots(dp, v, dout, a.hs);
        for (int i = 0; i < ROWS; i++) {
            for (int j = 0; j < COLS; j++) {
                int r = thread_y() * ROWS + i, c = thread_x() + NTX * j;
                int visible = keys.t0 + r <= t + c && c < queries.nt;
                Gradient g = gradient_of(s[i][j], dp[i][j], visible, st->lse[c], st->delta[c], scale);
                p->v[r][c] = g.p;
                ds->v[r][c] = g.ds;
            }
        }
        __syncwarp(); // rows of p and ds are written | and read by the same half of a warp
        add_product<HS>(dv, p, dout);
        add_product<HS>(dk, ds, q);
    }
    size_t C = (size_t)a.NH * (size_t)a.hs;
    for (int i = 0; i < ROWS; i++) {
        int r = thread_y() * ROWS + i;
        if (r >= keys.nt) { continue; }
        floatX* row = a.dk + (keys.row + (size_t)r) * a.dk_row + blockIdx.y * (size_t)a.hs;
        store_row<HS>(row, dk[i], 1.0f, a.hs);
        store_row<HS>(row + C, dv[i], 1.0f, a.hs);
    }
}

template <int HS> static __global__ void __launch_bounds__(NTHREADS, 1) attention_dq_kernel(AttentionArgs a) {
    DYNAMIC_SHARED(Tile<HS>, tiles);
    Tile<HS>*q = tiles, *dout = tiles + 1, *k = tiles + 2, *v = tiles + 3;
    Scores* ds = (Scores*)(tiles + 4);
    Stats* st = (Stats*)(ds + 1);
    Span queries = span_of_block(a, TILE, 1);
    if (queries.nt <= 0) { return; }
    float dq[ROWS][HS / NTX] = {}, scale = a.scale;
    load_rows(q, a, queries, 0);
    load_rows(dout, a, queries, DOUT);
    load_stats(st, a, queries);
    for (int t = 0; t < queries.t0 + queries.nt; t += TILE) {
        Span keys = span_of_positions(a.l, queries.b, t, min(TILE, a.l.T - t));
        if (!any_key_counts(a, keys)) { continue; }
        __syncthreads(); // the last keys are read
        load_rows(k, a, keys, 1);
        load_rows(v, a, keys, 2);
        __syncthreads();
        float s[ROWS][COLS], dp[ROWS][COLS];
        dots(s, q, k, a.hs);
        dots(dp, dout, v, a.hs);
        for (int j = 0; j < COLS; j++) {
            int c = thread_x() + NTX * j;
            int counts = c < keys.nt && key_counts(a, span_row(keys, a.l, c));
            for (int i = 0; i < ROWS; i++) {
                int r = thread_y() * ROWS + i, visible = counts && t + c <= queries.t0 + r;
                ds->v[r][c] = gradient_of(s[i][j], dp[i][j], visible, st->lse[r], st->delta[r], scale).ds;
            }
        }
        __syncwarp(); // rows of ds are written | and read by the same half of a warp
        add_product<HS>(dq, ds, k);
    }
    size_t C = (size_t)a.NH * (size_t)a.hs, at = blockIdx.y * (size_t)a.hs;
    for (int i = 0; i < ROWS; i++) {
        int r = thread_y() * ROWS + i;
        if (r >= queries.nt) { continue; }
        size_t row = queries.row + (size_t)r;
        if (!a.dq) {
            store_row<HS>(a.dqkv + row * 3 * C + at, dq[i], 1.0f, a.hs);
            continue;
        }
        for (int j = 0; j < HS / NTX; j++) {
            int c = thread_x() + NTX * j;
            if (c < a.hs) { a.dq[row * C + at + (size_t)c] += dq[i][j]; }
        }
    }
}

// ---- launches ---------------------------------------------------------------------------------------------
// the same for each of the three: the smallest instance that holds a head
#define LAUNCH(kernel, HS, ntiles, nscores, a, s)            \
    launch_tiles(kernel<HS>, tiles_of(*(a), TILE), NTHREADS, \
                 (ntiles) * sizeof(Tile<HS>) + (nscores) * sizeof(Scores) + sizeof(Stats), s, a)
#define LAUNCH_FOR_HS(kernel, ntiles, nscores, a, s)    \
    do {                                                \
        if ((a)->hs <= 64) {                            \
            LAUNCH(kernel, 64, ntiles, nscores, a, s);  \
        } else if ((a)->hs <= 128) {                    \
            LAUNCH(kernel, 128, ntiles, nscores, a, s); \
        } else {                                        \
            LAUNCH(kernel, 256, ntiles, nscores, a, s); \
        }                                               \
    } while (0)

void fo__plain_forward(const AttentionArgs* a, FoStream* s) {
    LAUNCH_FOR_HS(attention_forward_kernel, 3, 1, a, s);
}
void fo__plain_dkv(const AttentionArgs* a, FoStream* s) {
    LAUNCH_FOR_HS(attention_dkv_kernel, 4, 2, a, s);
}
void fo__plain_dq(const AttentionArgs* a, FoStream* s) {
    LAUNCH_FOR_HS(attention_dq_kernel, 4, 1, a, s);
}
