// test_emu_exec.cu -- kernels: indices, shared memory, barriers, warp operations, atomics; divergence reports
#include "dev/emu/test/emu_test.h"

enum { ALL = 0xffffffff };

static cudaStream_t stream;

// downloads n of them
template <class T> static void fetch(T* out, const T* in, size_t n) {
    OK(cudaMemcpyAsync(out, in, n * sizeof(T), cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
}

// ---- indices ----------------------------------------------------------------------------------------------
static __global__ void write_index(int* out) {
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned nthreads = blockDim.x * blockDim.y * blockDim.z;
    out[block * nthreads + thread] = (int)(block * 1000 + thread);
}

static void indices(void) {
    enum { THREADS = 3 * 5 * 7, BLOCKS = 4 * 3 * 2 };
    static int got[THREADS * BLOCKS];
    int* out = new_array<int>(THREADS * BLOCKS);
    launch(write_index, dim3(4, 3, 2), dim3(3, 5, 7), 0, stream, out);
    fetch(got, out, THREADS * BLOCKS);
    int wrong = 0;
    for (int i = 0; i < THREADS * BLOCKS; i++) {
        wrong += got[i] != i / THREADS * 1000 + i % THREADS;
    }
    CHECK(wrong == 0);
}

// ---- shared memory and barriers ---------------------------------------------------------------------------
static __global__ void reverse_in_shared(int* out, const int* in) {
    int* dynamic = (int*)fo_emu_dynamic_shared();
    __shared__ int fixed[1024];
    int i = (int)threadIdx.x, n = (int)blockDim.x, base = (int)blockIdx.x * n;
    fixed[i] = in[base + i];
    __syncthreads();
    dynamic[i] = fixed[n - 1 - i];
    __syncthreads();
    for (int d = 1; d < 8; d *= 2) { // rotates by 7, in three steps
        int x = dynamic[(i + d) % n];
        __syncthreads();
        dynamic[i] = x;
        __syncthreads();
    }
    out[base + i] = dynamic[i];
}

static __global__ void votes_of_block(int* out, int n) {
    int i = (int)threadIdx.x;
    if (i >= n) { return; } // those that are left make up the barrier
    int count = __syncthreads_count(i % 3 == 0), all = __syncthreads_and(i < n),
        any = __syncthreads_or(i == n);
    out[i] = count * 100 + all * 10 + any;
}

static void barriers(void) {
    static const int SIZES[] = {32, 96, 256, 1024};
    static int in[8192], got[8192];
    int *a = new_array<int>(8192), *b = new_array<int>(8192);
    for (int i = 0; i < 8192; i++) {
        in[i] = i * 7 + 1;
    }
    OK(cudaMemcpyAsync(a, in, sizeof in, cudaMemcpyHostToDevice, stream));
    for (int n : SIZES) {
        launch(reverse_in_shared, 8, n, (size_t)n * 4, stream, b, (const int*)a);
        fetch(got, b, (size_t)n * 8);
        int wrong = 0;
        for (int i = 0; i < n * 8; i++) {
            wrong += got[i] != in[i / n * n + n - 1 - (i % n + 7) % n];
        }
        CHECK(wrong == 0);
    }
    launch(votes_of_block, 1, 64, 0, stream, b, 40);
    fetch(got, b, 40);
    CHECK(got[0] == 1410 && got[39] == 1410);
}

// ---- warp operations --------------------------------------------------------------------------------------
static __global__ void shuffles(int* out) {
    int lane = (int)threadIdx.x % 32, x = lane * 3 + (int)threadIdx.x / 32;
    int* o = out + threadIdx.x * 16;
    o[0] = __shfl_sync(ALL, x, 5);
    o[1] = __shfl_sync(ALL, x, lane + 1); // beyond 31 it comes round again
    o[2] = __shfl_up_sync(ALL, x, 3);
    o[3] = __shfl_down_sync(ALL, x, 3);
    o[4] = __shfl_xor_sync(ALL, x, 5);
    o[5] = __shfl_sync(ALL, x, 1, 8);
    o[6] = __shfl_up_sync(ALL, x, 2, 8);
    o[7] = __shfl_down_sync(ALL, x, 2, 8);
    o[8] = __shfl_xor_sync(ALL, x, 1, 8);
    o[9] = (int)__ballot_sync(ALL, lane % 3 == 0);
    o[10] = __any_sync(ALL, lane == 31) * 10 + __all_sync(ALL, lane < 31);
    o[11] = (int)__match_any_sync(ALL, (unsigned)lane / 10);
    o[12] =
        __reduce_add_sync(ALL, lane - 16) + __reduce_max_sync(ALL, -lane - 1) + __reduce_min_sync(ALL, -lane);
    o[13] = (int)(__reduce_max_sync(ALL, (unsigned)x) + __reduce_or_sync(ALL, 1u << lane % 4));
    double wide = __shfl_xor_sync(ALL, 1.0 / (lane + 1), 31);
    o[14] = (int)rint(1.0 / wide);
    int half = lane < 16 ? __shfl_down_sync(0xffffu, x, 1, 16) : __reduce_add_sync(0xffff0000u, 2);
    __syncwarp();
    o[15] = half;
}

static void warps(void) {
    enum { N = 96 };
    static int got[N][16];
    int* out = new_array<int>(N * 16);
    launch(shuffles, 1, N, 0, stream, out);
    fetch(&got[0][0], out, N * 16);
    int wrong[16] = {0};
    for (int t = 0; t < N; t++) {
        int l = t % 32, w = t / 32, third = 0, same = 0;
        for (int i = 0; i < 32; i++) {
            third |= (i % 3 == 0) << i;
            same |= (int)((unsigned)(i / 10 == l / 10) << i);
        }
#define X(lane) ((lane)*3 + w)
        const int want[16] = {X(5),
                              X((l + 1) % 32),
                              X(l < 3 ? l : l - 3),
                              X(l > 28 ? l : l + 3),
                              X(l ^ 5),
                              X(l / 8 * 8 + 1),
                              X(l % 8 < 2 ? l : l - 2),
                              X(l % 8 > 5 ? l : l + 2),
                              X(l ^ 1),
                              third,
                              10,
                              same,
                              -16 - 1 - 31,
                              X(31) + 15,
                              (l ^ 31) + 1,
                              l < 15    ? X(l + 1)
                              : l == 15 ? X(15)
                                        : 32};
        for (int i = 0; i < 16; i++) {
            wrong[i] += got[t][i] != want[i];
        }
    }
    for (int i = 0; i < 16; i++) {
        CHECK_AT("warp operation %d", i);
        CHECK(wrong[i] == 0);
    }
}

static __global__ void count_up(unsigned* counter, int* old_sum, unsigned* last) {
    unsigned old = atomicAdd(counter, 1u);
    atomicAdd(old_sum, (int)old);
    atomicMax(counter + 1, threadIdx.x);
    __threadfence();
    if (atomicInc(last, gridDim.x * blockDim.x - 1) == gridDim.x * blockDim.x - 1) { counter[2] = 77; }
}

static void atomics(void) {
    unsigned got[4];
    unsigned* c = new_array<unsigned>(4);
    OK(cudaMemsetAsync(c, 0, 16, stream));
    launch(count_up, 5, 64, 0, stream, c, (int*)(c + 3), c + 2);
    fetch(got, c, 4);
    CHECK(got[0] == 320 && got[1] == 63 && got[2] == 77 && got[3] == 320 * 319 / 2);
}

// ---- launches ---------------------------------------------------------------------------------------------
template <class T> static __global__ void fill(T* out, T value) {
    out[threadIdx.x] = value;
}

static __global__ void read_shared(float* out) {
    out[threadIdx.x] = ((float*)fo_emu_dynamic_shared())[threadIdx.x];
}

static cudaError_t try_launch(unsigned grid, unsigned block, size_t shared_nbytes, float* out) {
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(1, grid);
    c.blockDim = block;
    c.dynamicSmemBytes = shared_nbytes;
    c.stream = stream;
    return cudaLaunchKernelEx(&c, read_shared, out);
}

static void limits(void) {
    float got[32], *out = new_array<float>(1024);
    cudaFuncAttributes attributes;
    CHECK(try_launch(1, 1025, 0, out) == cudaErrorInvalidConfiguration);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
    CHECK(try_launch(0, 32, 0, out) == cudaErrorInvalidConfiguration);
    CHECK(try_launch(65536, 32, 0, out) == cudaErrorInvalidConfiguration);
    CHECK(try_launch(1, 32, 49153, out) == cudaErrorInvalidValue);
    OK(cudaFuncSetAttribute(read_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000));
    if (!checked()) {
        CHECK(try_launch(1, 32, 100000, out) == cudaSuccess);
        fetch(got, out, 32);
        CHECK(got[0] != got[0] && got[31] != got[31]); // NaN: nobody wrote it
    }
    CHECK(cudaFuncSetAttribute(read_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 300000) !=
          cudaSuccess);
    OK(cudaFuncGetAttributes(&attributes, read_shared));
    CHECK(attributes.maxDynamicSharedSizeBytes == 100000 && attributes.maxThreadsPerBlock == 1024);
    int nblocks;
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&nblocks, read_shared, 256, 100000));
    CHECK(nblocks == 2);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&nblocks, read_shared, 1024, 0));
    CHECK(nblocks == 2);
    launch(fill<float>, 1, 32, 0, stream, out, 2.5f);
    fetch(got, out, 32);
    CHECK(got[31] == 2.5f);
}

static __global__ void one_thread(int* out) {
    __syncthreads();
    *out = (int)(blockDim.x + threadIdx.x);
}

static void all_kernels(void) {
    int got, *out = new_array<int>(1);
    stream = new_stream();
    launch(one_thread, 1, 1, 0, stream, out); // the first launch of all
    fetch(&got, out, 1);
    CHECK(got == 1);
    indices();
    barriers();
    warps();
    atomics();
    limits();
}

// ---- what must be reported --------------------------------------------------------------------------------
static __global__ void half_barrier(float*) {
    if (threadIdx.x < 32) { __syncthreads(); }
    __syncwarp();
    if (threadIdx.x >= 32) { __syncthreads(); }
}
static __global__ void deadlock(float* x) {
    if (threadIdx.x < 16) { x[0] = __shfl_down_sync(ALL, x[1], 1); }
}
static __global__ void lacking_mask(float* x) {
    x[threadIdx.x] = __shfl_xor_sync(0xffffu, x[1], 1);
}
static __global__ void two_operations(float* x) {
    x[0] = threadIdx.x < 16 ? __shfl_xor_sync(ALL, x[1], 1) : (float)__any_sync(ALL, 1);
}
static __global__ void absent_lane(float* x) {
    if (threadIdx.x < 16) { x[0] = __shfl_xor_sync(0xffffu, x[1], 16); }
}
static __global__ void recurse(float* x, int depth) {
    volatile char room[4096];
    void (*volatile again)(float*, int) = recurse;
    room[depth & 4095] = 1;
    if (depth < 1000000) { again(x, depth + 1); }
    x[0] = room[depth & 4095]; // so that it is not a loop
}
static __global__ void wild_pointer(float*) {
    volatile uintptr_t nowhere = 64;
    if (threadIdx.x == 3) { *(float*)nowhere = 1.0f; }
}

static void run(void (*kernel)(float*)) {
    cudaStream_t s = new_stream();
    float* x = new_array<float>(64);
    OK(cudaMemsetAsync(x, 0, 64 * sizeof(float), s));
    launch(kernel, 2, 64, 0, s, x);
    OK(cudaStreamSynchronize(s));
}

static void run_recursion(void) {
    cudaStream_t s = new_stream();
    launch(recurse, 1, 1, 0, s, new_array<float>(1), 0);
    OK(cudaStreamSynchronize(s));
}

int main(void) {
    static const char* const ORDERS[] = {"forward", "reverse", "random:1", "random:2"};
    CHECK_DIES(run(half_barrier), "meet in different __syncthreads, in kernel half_barrier");
    CHECK_DIES(run(deadlock),
               "deadlock: threads wait for others that will not come, in kernel deadlock, block (0");
    CHECK_DIES(run(deadlock), "from thread 0 on: in __shfl_down_sync of line ");
    CHECK_DIES(run(deadlock), "from thread 16 on: exited");
    CHECK_DIES(run(lacking_mask), "the mask of a warp operation lacks the caller's lane");
    CHECK_DIES(run(two_operations), "lanes of one warp meet in different warp operations");
    CHECK_DIES(run(absent_lane), "a shuffle reads a lane that takes no part");
    if (!ASAN && !checked()) { // it says more itself
        CHECK_DIES(run_recursion(), "fault: kernel recurse, block (0, 0, 0), thread 0 has used up its stack");
        CHECK_DIES(run(wild_pointer),
                   "fault: kernel wild_pointer, block (0, 0, 0), thread 3 uses address 0x40");
    }
    CHECK_DIES((setenv("FO_EMU_ORDER", "sideways", 1), run(half_barrier)), "FO_EMU_ORDER=sideways: want");
    for (const char* order : ORDERS) {
        IN_CHILD(all_kernels, "FO_EMU_ORDER", order);
    }
    return check_report();
}
