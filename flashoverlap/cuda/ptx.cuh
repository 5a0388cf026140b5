/* ptx.cuh -- what CUDA C has no name for: all inline PTX of the project.
 *
 * Each function has a twin in C++ that does the same in dev/emu, by the layouts of the PTX manual. All 32
 * lanes of a warp call those of tensor cores together.
 */
#ifndef FO_CUDA_PTX_CUH
#define FO_CUDA_PTX_CUH
#include "flashoverlap/cuda/cuda_common.cuh"

// ---- exp --------------------------------------------------------------------------------------------------
// 2^x within 2 units in the last place; 0 below -126
static __device__ inline float exp2_fast(float x) {
#ifdef FO_EMU
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// ---- tensor cores -----------------------------------------------------------------------------------------
/* Fragments of bf16, two of a row in a register, the left one in the low half. Lane i has
 *
 *   of 8 x 8    row i/4, columns 2*(i%4) and 2*(i%4)+1
 *   A, 16 x 16  four 8 x 8: top left, bottom left, top right, bottom right
 *   B, 16 x 8   two 8 x 8 that are transposed: of its upper rows, of its lower
 *   D, 16 x 8   fp32, two 8 x 8: upper rows in d[0] and d[1], lower in d[2] and d[3]
 */

// two floats rounded to bf16 in a register
static __device__ inline unsigned pack_bf16(float left, float right) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(left, right);
    unsigned bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

#ifdef FO_EMU
// what the lanes of a warp show each other: bits, or an address in shared memory
struct WarpBoard {
    union {
        unsigned bits[6];
        const uint16_t* row;
    } of[WARP];
    __device__ inline unsigned element(int m, int row, int column) const { // of an 8 x 8 whose rows are shown
        return of[8 * m + row].row[column];
    }
};
static __device__ inline WarpBoard* warp_board() {
    __shared__ WarpBoard boards[1024 / WARP];
    return &boards[threadIdx.x / WARP];
}
#endif

// d += a @ b
static __device__ inline void mma_bf16(float d[4], const unsigned a[4], const unsigned b[2]) {
#ifdef FO_EMU
    int lane = (int)threadIdx.x % WARP;
    WarpBoard* board = warp_board();
    memcpy(board->of[lane].bits, a, 4 * sizeof *a);
    memcpy(board->of[lane].bits + 4, b, 2 * sizeof *b);
    __syncwarp();
    for (int i = 0; i < 4; i++) {     // d[i]: half i/2 of the rows, column i%2
        for (int k = 0; k < 8; k++) { // elements 2*k and 2*k+1 of a's row and b's column
            unsigned x = board->of[lane / 4 * 4 + k % 4].bits[i / 2 + k / 4 * 2];
            unsigned y = board->of[(lane % 4 * 2 + i % 2) * 4 + k % 4].bits[4 + k / 4];
            d[i] = fmaf(__uint_as_float(x << 16), __uint_as_float(y << 16), d[i]);
            d[i] = fmaf(__uint_as_float(x & 0xffff0000u), __uint_as_float(y & 0xffff0000u), d[i]);
        }
    }
    __syncwarp();
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// four 8 x 8 matrices from shared memory; lane i has the address of row i%8 of matrix i/8, 16 bytes aligned
static __device__ inline void load_matrices(unsigned r[4], const void* row) {
#ifdef FO_EMU
    int lane = (int)threadIdx.x % WARP;
    WarpBoard* board = warp_board();
    if ((uintptr_t)row % 16 != 0) { __trap(); }
    board->of[lane].row = (const uint16_t*)row;
    __syncwarp();
    for (int m = 0; m < 4; m++) {
        r[m] = board->element(m, lane / 4, lane % 4 * 2) | board->element(m, lane / 4, lane % 4 * 2 + 1)
                                                               << 16;
    }
    __syncwarp();
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
#endif
}

// the same, and each is transposed
static __device__ inline void load_matrices_transposed(unsigned r[4], const void* row) {
#ifdef FO_EMU
    int lane = (int)threadIdx.x % WARP;
    WarpBoard* board = warp_board();
    if ((uintptr_t)row % 16 != 0) { __trap(); }
    board->of[lane].row = (const uint16_t*)row;
    __syncwarp();
    for (int m = 0; m < 4; m++) {
        r[m] = board->element(m, lane % 4 * 2, lane / 4) | board->element(m, lane % 4 * 2 + 1, lane / 4)
                                                               << 16;
    }
    __syncwarp();
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
#endif
}

// ---- copies into shared memory ----------------------------------------------------------------------------
/* Copies -- of 16 bytes each from global to shared memory, both aligned, that run while the thread goes on.
 * What a thread has started is there for it after its wait(); for the block's others after a __syncthreads()
 * too. In dev/emu nothing is copied before wait(), so that a wait left out shows.
 */
struct Copies {
#ifdef FO_EMU
    enum { MOST = 128 };
    void* to[MOST];
    const void* from[MOST];
    int n = 0;
#endif

    // there: else zeros are written, and nothing is read
    __device__ inline void start(void* dst, const void* src, int there) {
#ifdef FO_EMU
        if (n == MOST || (uintptr_t)dst % 16 != 0 || (uintptr_t)src % 16 != 0) { __trap(); }
        to[n] = dst;
        from[n++] = there ? src : NULL;
#else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"((unsigned)__cvta_generic_to_shared(dst)), "l"(__cvta_generic_to_global(src)),
                       "r"(there ? 16 : 0)
                     : "memory");
#endif
    }

    __device__ inline void wait() {
#ifdef FO_EMU
        for (int i = 0; i < n; i++) {
            static const uint64_t zeros[2] = {0, 0};
            memcpy(to[i], from[i] ? from[i] : zeros, 16);
        }
        n = 0;
#else
        asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    }
};
#endif
