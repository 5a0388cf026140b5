/* attention.cuh -- what the files of attention on cuda share.
 *
 * attention.cu          the functions of fo_ops.h: they ask cuDNN first, then choose an own kernel
 * attention_cudnn.cu    cuDNN
 * attention_kernels.cu  own kernels for any number format, plain CUDA C
 * attention_mma.cu      own kernels for bf16, on tensor cores
 *
 * Own kernels go through tiles: a block of threads holds one tile of the call's rows and walks over tiles of
 * the other side, keys for queries, queries for keys, in the order of their positions. Those begin at
 * multiples of a tile's size whatever the call is; no row meets another one's sums: so a row's bits do not
 * depend on how rows are cut into calls. That needs fmaf wherever a product is added, or the compiler would
 * fuse the two for one row of a thread and not for another.
 */
#ifndef FO_CUDA_ATTENTION_CUH
#define FO_CUDA_ATTENTION_CUH
#include "flashoverlap/cuda/cuda_common.cuh"
#include "flashoverlap/fo_ops.h"

// ---- cuDNN ------------------------------------------------------------------------------------------------
/* Asked first, in bf16 builds that have it (FO_CUDNN=1), unless the device's own_attention is set. Arguments
 * are those of fo_ops.h, already checked, with at least one row. The functions return 1 once they have queued
 * the work on s, and 0, with nothing queued, where cuDNN refuses the case; then own kernels do it. Whether it
 * is refused must depend on the shape, not on the rows of the call, or a row's bits would depend on the cut.
 */
#if FO_CUDNN
int fo__cudnn_forward(floatX* out, float* lse, const floatX* qkv, size_t row0, size_t n, FoLayout l, int NH,
                      int hs, FoStream* s);
int fo__cudnn_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                       const float* lse, size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s);
int fo__cudnn_backward_kv(float* dq, floatX* dkv, const floatX* dout, const floatX* qkv, const floatX* out,
                          const float* lse, size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s);
// "cuDNN 9.19.0", or with it why it isn't used; for people
const char* fo__cudnn_state(FoDevice* d);
// the device's cuDNN handle and plans, which the functions above make and keep in device->attention
void fo__cudnn_free(struct FoAttention* a);
#endif

// ---- own kernels ------------------------------------------------------------------------------------------
// what a kernel is given; NULL where it has no use for it
struct AttentionArgs {
    floatX* out;              // [N, C], C = NH*hs
    float* lse;               // [N, NH]
    const floatX *qkv, *dout; // [N, 3C], [N, C]
    const float* delta;       // [N, NH], sum of dout * out
    floatX* dqkv;             // [N, 3C], where dq goes, unless
    float* dq;                // [N, C], what it is added to
    floatX* dk;               // rows of dk_row elements; dv lies C further
    size_t dk_row;
    size_t row0, n;         // rows of the call: of queries, or of keys in a kernel for dk and dv
    size_t key_row0, key_n; // for dq: the keys that count
    FoLayout l;
    int NH, hs;
    float scale; // 1/sqrt(hs)
    int vec;     // are rows and heads of all matrices aligned to 16 bytes?
};

// any hs up to FO_ATTENTION_MAX_HS; attention_kernels.cu
enum { FO_ATTENTION_MAX_HS = 256 };
void fo__plain_forward(const AttentionArgs* a, FoStream* s);
void fo__plain_dkv(const AttentionArgs* a, FoStream* s);
void fo__plain_dq(const AttentionArgs* a, FoStream* s);
// bf16, vec, and hs up to FO_ATTENTION_MMA_MAX_HS; attention_mma.cu
enum { FO_ATTENTION_MMA_MAX_HS = 128 };
void fo__mma_forward(const AttentionArgs* a, FoStream* s);
void fo__mma_dkv(const AttentionArgs* a, FoStream* s);
void fo__mma_dq(const AttentionArgs* a, FoStream* s);

// ---- rows and positions -----------------------------------------------------------------------------------
// fo_layout_row, on the device
static __device__ inline size_t layout_row(FoLayout l, int b, int t) {
    if (!l.zigzag) { return (size_t)b * (size_t)l.T + (size_t)t; }
    int block = l.T / (2 * l.P), k = t / block;
    int p = k < l.P ? k : 2 * l.P - 1 - k;
    size_t per_shard = (size_t)l.B * (size_t)(2 * block);
    return (size_t)p * per_shard + (size_t)b * (size_t)(2 * block) + (size_t)(k < l.P ? 0 : block) +
           (size_t)(t % block);
}

static __host__ __device__ inline int layout_run(FoLayout l) {
    return l.zigzag ? l.T / (2 * l.P) : l.T;
}

// positions t0 ... t0+nt-1 of sequence b, at most a tile of them
struct Span {
    int b, t0, nt;
    int straight; // do their rows follow each other?
    size_t row;   // of t0
};

static __device__ inline size_t span_row(const Span& s, FoLayout l, int i) {
    return s.straight ? s.row + (size_t)i : layout_row(l, s.b, s.t0 + i);
}

static __device__ inline Span span_of_positions(FoLayout l, int b, int t0, int nt) {
    int run = layout_run(l);
    Span s = {b, t0, nt, t0 / run == (t0 + nt - 1) / run, layout_row(l, b, t0)};
    return s;
}

// runs of the layout that the call's rows touch, and the blocks that its tiles need
static __host__ __device__ inline size_t nruns_of(const AttentionArgs& a) {
    size_t run = (size_t)layout_run(a.l);
    return (a.row0 + a.n - 1) / run - a.row0 / run + 1;
}
static inline dim3 tiles_of(const AttentionArgs& a, int tile) {
    return dim3((unsigned)nruns_of(a) * cdiv((size_t)layout_run(a.l), (size_t)tile), (unsigned)a.NH);
}

/* this block's tile of the call's rows: within one run, so that positions follow each other too. nt is 0
 * where the call has none of them. late_first: tiles late in their run come first, as their blocks take
 * longest.
 */
static __device__ inline Span span_of_block(const AttentionArgs& a, int tile, int late_first) {
    size_t run = (size_t)layout_run(a.l), nruns = nruns_of(a);
    size_t i = blockIdx.x / nruns, u = a.row0 / run + blockIdx.x % nruns;
    if (late_first) { i = gridDim.x / nruns - 1 - i; }
    size_t begin = u * run + i * (size_t)tile, end = begin + (size_t)tile;
    end = end < (u + 1) * run ? end : (u + 1) * run;
    begin = begin > a.row0 ? begin : a.row0;
    end = end < a.row0 + a.n ? end : a.row0 + a.n;
    int b = (int)u, first = 0; // position of the run's first row
    if (a.l.zigzag) {
        int p = (int)u / (2 * a.l.B), within = (int)u % (2 * a.l.B);
        b = within / 2;
        first = (within % 2 ? 2 * a.l.P - 1 - p : p) * (int)run;
    }
    Span s = {b, first + (int)(begin - u * run), begin < end ? (int)(end - begin) : 0, 1, begin};
    return s;
}

static __device__ inline int key_counts(const AttentionArgs& a, size_t row) {
    return row >= a.key_row0 && row < a.key_row0 + a.key_n;
}

// are there keys that count among these? They do by whole runs
static __device__ inline int any_key_counts(const AttentionArgs& a, const Span& s) {
    int run = layout_run(a.l), any = 0;
    for (int t = s.t0; t < s.t0 + s.nt; t = (t / run + 1) * run) {
        any |= key_counts(a, layout_row(a.l, s.b, t));
    }
    return any;
}

static __device__ inline float round_to_floatx(float f) {
    return to_float(from_float<floatX>(f));
}

// more than 48 KiB of shared memory have to be asked for
template <class... P>
static inline void launch_tiles(void (*kernel)(P...), dim3 grid, int nthreads, size_t shared_nbytes,
                                FoStream* s, const AttentionArgs* a) {
    if (shared_nbytes > 48 * 1024) {
        CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_nbytes));
    }
    launch(kernel, grid, dim3((unsigned)nthreads), shared_nbytes, s, *a);
}
#endif
