/* attention.cu -- causal self-attention of fo_ops.h on cuda: who computes it, and one token at a time. Read
 * attention.cuh first.
 */
#include "flashoverlap/cuda/attention.cuh"

// ---- what a device keeps ----------------------------------------------------------------------------------

void fo__attention_free(struct FoAttention* a) {
#if FO_CUDNN
    if (a) { fo__cudnn_free(a); }
#else
    (void)a; // nothing is kept
#endif
}

const char* fo__attention_version(FoDevice* d) {
#if FO_CUDNN
    return fo__cudnn_state(d);
#else
    (void)d;
    return "own attention kernels";
#endif
}

// ---- sum of dout * out ------------------------------------------------------------------------------------
enum { DELTA_THREADS = 256 };

/* of heads i0 ... i0+nheads-1, each by nlanes lanes, a power of two, which take N elements at once. The heads
 * of all rows follow each other in out.
 */
template <int N>
static __global__ void __launch_bounds__(DELTA_THREADS)
    attention_delta_kernel(float* delta, const floatX* dout, const floatX* out, size_t i0, size_t nheads,
                           int hs, int nlanes) {
    size_t thread = (size_t)blockIdx.x * DELTA_THREADS + threadIdx.x, i = i0 + thread / (size_t)nlanes;
    int lane = (int)(thread % (size_t)nlanes);
    float sum = 0.0f;
    for (int c = lane * N; c < hs && i < i0 + nheads; c += nlanes * N) {
        Vec<floatX, N> x = load<floatX, N>(dout + i * (size_t)hs + c);
        Vec<floatX, N> y = load<floatX, N>(out + i * (size_t)hs + c);
        for (int k = 0; k < N; k++) {
            sum = fmaf(to_float(x.v[k]), to_float(y.v[k]), sum);
        }
    }
    for (int d = nlanes / 2; d > 0; d /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
    }
    if (lane == 0 && i < i0 + nheads) { delta[i] = sum; }
}

static void compute_delta(float* delta, const AttentionArgs* a, size_t row0, size_t nrows, FoStream* s) {
    constexpr int N = 16 / sizeof(floatX);
    size_t nheads = nrows * (size_t)a->NH;
    int nlanes = 1;
    while (nlanes < WARP && nlanes * (a->vec ? N : 1) < a->hs) {
        nlanes *= 2;
    }
    launch(a->vec ? attention_delta_kernel<N> : attention_delta_kernel<1>,
           cdiv(nheads * (size_t)nlanes, DELTA_THREADS), DELTA_THREADS, 0, s, delta, a->dout, a->out,
           row0 * (size_t)a->NH, nheads, a->hs, nlanes);
}

// ---- forward and backward ---------------------------------------------------------------------------------
static void check_shape(size_t row0, size_t n, FoLayout l, int NH, int hs) {
    fo_require(NH > 0 && hs > 0 && l.B > 0 && l.T > 0, "B=%d T=%d NH=%d hs=%d, want all above 0", l.B, l.T,
               NH, hs);
    fo_require(hs <= FO_ATTENTION_MAX_HS, "hs=%d, want at most %d", hs, FO_ATTENTION_MAX_HS);
    fo_require(NH <= 65535, "NH=%d, want at most 65535", NH);
    fo_require(!l.zigzag || (l.P > 0 && l.T % (2 * l.P) == 0), "T=%d is not a multiple of 2P, P=%d", l.T,
               l.P);
    fo_require(row0 + n <= (size_t)l.B * (size_t)l.T, "rows %zu to %zu of %zu", row0, row0 + n,
               (size_t)l.B * (size_t)l.T);
}

// what is common to the calls
static AttentionArgs args_of(const floatX* qkv, size_t row0, size_t n, FoLayout l, int NH, int hs) {
    AttentionArgs a = {};
    a.qkv = qkv, a.row0 = row0, a.n = n, a.l = l, a.NH = NH, a.hs = hs;
    a.scale = 1.0f / sqrtf((float)hs);
    return a;
}

// are heads of hs elements that follow each other aligned to 16 bytes, in all these arrays?
static int aligned_heads(int hs, const void* a, const void* b, const void* c = NULL, const void* d = NULL,
                         const void* e = NULL) {
    return (size_t)hs * sizeof(floatX) % 16 == 0 && aligned16(a, b, c, d) && aligned16(e);
}

static int on_tensor_cores(const AttentionArgs& a) {
#ifdef FO_PRECISION_FP32
    (void)a;
    return 0;
#else
    return a.vec && a.hs <= FO_ATTENTION_MMA_MAX_HS;
#endif
}

void fo_attention_forward(floatX* out, float* lse, const floatX* qkv, size_t row0, size_t n, FoLayout l,
                          int NH, int hs, FoStream* s) {
    check_shape(row0, n, l, NH, hs);
    if (n == 0) { return; }
    FO_OP(s);
#if FO_CUDNN
    if (!s->device->own_attention && fo__cudnn_forward(out, lse, qkv, row0, n, l, NH, hs, s)) { return; }
#endif
    AttentionArgs a = args_of(qkv, row0, n, l, NH, hs);
    a.out = out, a.lse = lse;
    a.vec = aligned_heads(hs, qkv, out);
    (on_tensor_cores(a) ? fo__mma_forward : fo__plain_forward)(&a, s);
}

// a has the arrays and the rows of the call, which are those of keys. Queries: of all rows with zigzag, else
// of the same
static void own_backward(AttentionArgs* a, FoStream* s) {
    size_t N = (size_t)a->l.B * (size_t)a->l.T, row0 = a->l.zigzag ? 0 : a->row0, n = a->l.zigzag ? N : a->n;
    float* delta = (float*)fo__scratch(s, N * (size_t)a->NH * sizeof *delta);
    compute_delta(delta, a, row0, n, s);
    a->delta = delta;
    (on_tensor_cores(*a) ? fo__mma_dkv : fo__plain_dkv)(a, s);
    a->key_row0 = a->row0, a->key_n = a->n;
    a->row0 = row0, a->n = n;
    (on_tensor_cores(*a) ? fo__mma_dq : fo__plain_dq)(a, s);
}

void fo_attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                           const float* lse, size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s) {
    check_shape(row0, n, l, NH, hs);
    size_t T = (size_t)l.T;
    fo_require(l.zigzag ? row0 == 0 && n == (size_t)l.B * T : row0 % T == 0 && n % T == 0,
               "rows %zu to %zu are not whole sequences of %zu", row0, row0 + n, T);
    if (n == 0) { return; }
    FO_OP(s);
#if FO_CUDNN
    if (!s->device->own_attention && fo__cudnn_backward(dqkv, dout, qkv, out, lse, row0, n, l, NH, hs, s)) {
        return;
    }
#endif
    AttentionArgs a = args_of(qkv, row0, n, l, NH, hs);
    a.dqkv = dqkv, a.dout = dout;
    a.out = (floatX*)out, a.lse = (float*)lse; // read only
    a.vec = aligned_heads(hs, qkv, dout, out, dqkv);
    a.dk_row = 3 * (size_t)NH * (size_t)hs;
    a.dk = dqkv + a.dk_row / 3;
    own_backward(&a, s);
}

void fo_attention_backward_kv(float* dq, floatX* dkv, const floatX* dout, const floatX* qkv,
                              const floatX* out, const float* lse, size_t row0, size_t n, FoLayout l, int NH,
                              int hs, FoStream* s) {
    check_shape(row0, n, l, NH, hs);
    size_t shard = l.zigzag ? (size_t)l.B * (size_t)(l.T / l.P) : (size_t)l.T;
    fo_require(row0 % shard == 0 && n % shard == 0, "rows %zu to %zu are not whole %s of %zu", row0, row0 + n,
               l.zigzag ? "shards" : "sequences", shard);
    if (n == 0) { return; }
    FO_OP(s);
#if FO_CUDNN
    if (!s->device->own_attention &&
        fo__cudnn_backward_kv(dq, dkv, dout, qkv, out, lse, row0, n, l, NH, hs, s)) {
        return;
    }
#endif
    AttentionArgs a = args_of(qkv, row0, n, l, NH, hs);
    a.dq = dq, a.dk = dkv, a.dout = dout;
    a.out = (floatX*)out, a.lse = (float*)lse; // read only
    a.vec = aligned_heads(hs, qkv, dout, out, dkv, dq);
    a.dk_row = 2 * (size_t)NH * (size_t)hs;
    own_backward(&a, s);
}

// ---- one token at a time ----------------------------------------------------------------------------------
enum { DECODE_THREADS = 256, DECODE_KEYS = 256 }; // a head size is at most as many as threads

// N elements of a key or a value at once; blocks are positions, then sequences
template <int N>
static __global__ void __launch_bounds__(256)
    attention_cache_kernel(floatX* cache, const floatX* qkv, FoLayout l, int room, int C) {
    int t = (int)blockIdx.x;
    for (int b = (int)blockIdx.y; b < l.B; b += (int)gridDim.y) {
        const floatX* k = qkv + layout_row(l, b, t) * 3 * (size_t)C + C;
        for (int part = 0; part < 2; part++) {
            floatX* to =
                cache + (((size_t)part * (size_t)l.B + (size_t)b) * (size_t)room + (size_t)t) * (size_t)C;
            for (int c = (int)threadIdx.x * N; c < C; c += (int)blockDim.x * N) {
                store<floatX, N>(to + c, load<floatX, N>(k + (size_t)part * (size_t)C + c));
            }
        }
    }
}

struct DecodeArgs {
    floatX *out, *cache;
    const floatX* qkv;
    const int* pos;
    int B, room, NH, hs;
};

// keys (part 0) or values (1) of head blockIdx.x of sequence blockIdx.y; positions are NH*hs apart
static __device__ inline floatX* cache_of(const DecodeArgs& a, int part) {
    size_t b = (size_t)part * (size_t)a.B + blockIdx.y;
    return a.cache + (b * (size_t)a.room * (size_t)a.NH + blockIdx.x) * (size_t)a.hs;
}

/* One head of one sequence. DECODE_KEYS keys at a time: each warp computes scores, one after the other, then
 * all threads the softmax so far, then each thread sums one channel over some of the keys.
 */
static __global__ void __launch_bounds__(DECODE_THREADS) attention_decode_kernel(DecodeArgs a) {
    __shared__ float q[DECODE_THREADS], p[DECODE_KEYS], sums[DECODE_THREADS];
    int i = (int)threadIdx.x, hs = a.hs, pos = a.pos[blockIdx.y];
    size_t C = (size_t)a.NH * (size_t)hs;
    floatX* out = a.out + blockIdx.y * C + blockIdx.x * (size_t)hs;
    const floatX* qkv = a.qkv + blockIdx.y * 3 * C + blockIdx.x * (size_t)hs;
    floatX *keys = cache_of(a, 0), *values = cache_of(a, 1);
    if (pos < 0) {
        if (i < hs) { out[i] = from_float<floatX>(0.0f); }
        return;
    }
    if (pos >= a.room) { __trap(); } // the caller's bug; the next call into CUDA dies of it
    if (i < hs) {
        q[i] = to_float(qkv[i]);
        keys[(size_t)pos * C + (size_t)i] = qkv[C + (size_t)i];
        values[(size_t)pos * C + (size_t)i] = qkv[2 * C + (size_t)i];
    }
    int ngroups = DECODE_THREADS / hs, group = i / hs, channel = i % hs; // of threads that sum values
    float scale = 1.0f / sqrtf((float)hs), max = -INFINITY, sum = 0.0f, acc = 0.0f;
    for (int t = 0; t <= pos; t += DECODE_KEYS) {
        int n = min(DECODE_KEYS, pos + 1 - t);
        __syncthreads(); // q, the new key and value are there; the last p is read
        for (int k = i / WARP; k < n; k += DECODE_THREADS / WARP) {
            float s = 0.0f;
            for (int c = i % WARP; c < hs; c += WARP) {
                s += q[c] * to_float(keys[(size_t)(t + k) * C + (size_t)c]);
            }
            s = warp_reduce(s, Sum());
            if (i % WARP == 0) { p[k] = s * scale; }
        }
        __syncthreads();
        float score = i < n ? p[i] : -INFINITY, last = max;
        max = fmaxf(max, block_reduce(score, Max(), -INFINITY));
        float e = expf(score - max), factor = expf(last - max);
        sum = sum * factor + block_reduce(e, Sum(), 0.0f);
        p[i] = round_to_floatx(e);
        __syncthreads();
        acc *= factor;
        for (int k = group; k < n && group < ngroups; k += ngroups) {
            acc += p[k] * to_float(values[(size_t)(t + k) * C + (size_t)channel]);
        }
    }
    sums[i] = acc;
    __syncthreads();
    if (i < hs) {
        float total = 0.0f;
        for (int g = 0; g < ngroups; g++) {
            total += sums[g * hs + i];
        }
        out[i] = from_float<floatX>(total / sum);
    }
}

static void check_cache(int B, int room, int NH, int hs) {
    fo_require(B > 0 && room > 0 && NH > 0 && hs > 0, "B=%d room=%d NH=%d hs=%d, want all above 0", B, room,
               NH, hs);
}

void fo_attention_cache(floatX* cache, const floatX* qkv, FoLayout l, int room, int NH, int hs, FoStream* s) {
    check_shape(0, 0, l, NH, hs);
    check_cache(l.B, room, NH, hs);
    fo_require(l.T <= room, "T=%d, the cache has room for %d", l.T, room);
    FO_OP(s);
    constexpr int N = 16 / sizeof(floatX);
    int C = NH * hs;
    dim3 blocks((unsigned)l.T, (unsigned)min(l.B, 65535));
    int vec = C % N == 0 && aligned16(cache, qkv);
    launch(vec ? attention_cache_kernel<N> : attention_cache_kernel<1>, blocks, 256, 0, s, cache, qkv, l,
           room, C);
}

void fo_attention_decode(floatX* out, floatX* cache, const floatX* qkv, const int* pos, int B, int room,
                         int NH, int hs, FoStream* s) {
    check_cache(B, room, NH, hs);
    fo_require(hs <= DECODE_THREADS && B <= 65535, "hs=%d B=%d, want at most %d and 65535", hs, B,
               DECODE_THREADS);
    FO_OP(s);
    DecodeArgs a = {out, cache, qkv, pos, B, room, NH, hs};
    launch(attention_decode_kernel, dim3((unsigned)NH, (unsigned)B), DECODE_THREADS, 0, s, a);
}
