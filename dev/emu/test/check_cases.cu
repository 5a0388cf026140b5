/* check_cases.cu -- small programs with one mistake each, and the same without it, for check_test.sh.
 *
 *   check_cases NAME wrong|right
 *   check_cases list                  "NAME KIND" of each, KIND being what must be reported
 *
 * The right ones must be silent in every schedule, the wrong ones be reported in every schedule.
 */
#include <cuda.h>
#include <cuda_runtime.h>
#include <pthread.h>
#include <atomic>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CUDA(call)                                                                      \
    do {                                                                                \
        cudaError_t err_ = (call);                                                      \
        if (err_ != cudaSuccess) {                                                      \
            fprintf(stderr, "%d: %s: %s\n", __LINE__, #call, cudaGetErrorString(err_)); \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)
#ifdef FO_EMU
#define DYNAMIC_SHARED(type, name) type* name = (type*)fo_emu_dynamic_shared()
#else
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

enum { N = 1000, THREADS = 128, BLOCKS = 8 };
static bool wrong;    // with the mistake
static float* x;      // [N] device memory
static float* y;      // likewise
static float* pinned; // [N] host memory
static cudaStream_t a, b, c;
static cudaEvent_t e, e2;

template <class... P, class... A>
static void launch(void (*kernel)(P...), unsigned grid, unsigned block, size_t shared_nbytes, cudaStream_t s,
                   A... args) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = shared_nbytes;
    config.stream = s;
    CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

// ---- kernels ----------------------------------------------------------------------------------------------
__global__ void produce(float* out, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) { out[i] = (float)i; }
}
// out[i] = in[i] + the block's sum: with shuffles and a barrier, so that threads are switched
__global__ void consume(float* out, const float* in, int n) {
    __shared__ float part[32];
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    float v = i < n ? in[i] : 0.0f, sum = v;
    for (int d = 16; d > 0; d /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
    }
    if (threadIdx.x % 32 == 0) { part[threadIdx.x / 32] = sum; }
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; w++) {
        v += part[w];
    }
    if (i < n) { out[i] = v; }
}
__global__ void add_one(float* p, int n) { // reads what it writes
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) { p[i] += 1.0f; }
}
__global__ void read_all(float* out, const float* in, int n) { // each thread reads all of it
    float sum = 0.0f;
    for (int i = 0; i < n; i++) {
        sum += in[i];
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
__global__ void turn_round(float* out, int barrier) { // through shared memory, warps exchange
    __shared__ float s[THREADS];
    s[THREADS - 1 - threadIdx.x] = 0.0f;
    __syncthreads();
    s[threadIdx.x] = (float)threadIdx.x;
    if (barrier) { __syncthreads(); }
    out[blockIdx.x * blockDim.x + threadIdx.x] = s[THREADS - 1 - threadIdx.x];
}
__global__ void turn_warp(float* out, int barrier) { // lanes of a warp exchange
    __shared__ float s[32];
    s[31 - threadIdx.x] = 0.0f;
    __syncwarp();
    s[threadIdx.x] = (float)threadIdx.x;
    if (barrier) { __syncwarp(); }
    out[blockIdx.x * blockDim.x + threadIdx.x] = s[31 - threadIdx.x];
}
__global__ void use_twice(float* out, int barrier) { // shared memory is written again while others read it
    __shared__ float s;
    for (int i = 0; i < 3; i++) {
        if (threadIdx.x == 0) { s = (float)i; }
        __syncthreads();
        out[threadIdx.x] = s;
        if (barrier) { __syncthreads(); }
    }
}
__global__ void count_plain(int* count) {
    count[threadIdx.x % 8] += 1;
}
__global__ void count_atomic(int* count) {
    atomicAdd(&count[threadIdx.x % 8], 1);
}
__global__ void same_cell(float* out, int own) { // every block writes, to its own element or to that of all
    if (threadIdx.x == 0) { out[own ? blockIdx.x : 0] = 1.0f; }
}
__global__ void dynamic(float* out, int n) {
    DYNAMIC_SHARED(float, s);
    s[threadIdx.x] = 1.0f;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < n; i++) {
        sum += s[i];
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
__global__ void shared_unset(float* out, int n) {
    __shared__ float s[THREADS];
    if ((int)threadIdx.x < n) { s[threadIdx.x] = 1.0f; }
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = s[THREADS - 1 - threadIdx.x];
}
struct Sixteen {
    float v[4];
};
struct Large {
    float v[64];
};
template <class T>
__global__ void copy_structs(T* out, const T* in, int n) { // by what the compiler makes of an assignment
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) { out[i] = in[i]; }
}

// ---- streams ----------------------------------------------------------------------------------------------
static void missing_wait(void) {
    launch(produce, BLOCKS, THREADS, 0, a, x, N);
    CUDA(cudaEventRecord(e, a));
    if (!wrong) { CUDA(cudaStreamWaitEvent(b, e, 0)); }
    launch(consume, BLOCKS, THREADS, 0, b, y, x, N);
}
static void early_record(void) {
    if (wrong) { CUDA(cudaEventRecord(e, a)); }
    launch(produce, BLOCKS, THREADS, 0, a, x, N);
    if (!wrong) { CUDA(cudaEventRecord(e, a)); }
    CUDA(cudaStreamWaitEvent(b, e, 0));
    launch(consume, BLOCKS, THREADS, 0, b, y, x, N);
}
static void write_after_read(void) {
    for (int i = 0; i < 3; i++) {
        if (i && !wrong) { CUDA(cudaStreamWaitEvent(a, e2, 0)); }
        launch(produce, BLOCKS, THREADS, 0, a, x, N);
        CUDA(cudaEventRecord(e, a));
        CUDA(cudaStreamWaitEvent(b, e, 0));
        launch(consume, BLOCKS, THREADS, 0, b, y, x, N);
        CUDA(cudaEventRecord(e2, b));
    }
}
static void copy_on_wrong_stream(void) {
    launch(produce, BLOCKS, THREADS, 0, a, x, N);
    CUDA(cudaMemcpyAsync(y, x, N * 4, cudaMemcpyDeviceToDevice, wrong ? b : a));
}
// three streams read; the writer waits for two of them, or for all
static void three_readers(void) {
    cudaEvent_t read[3];
    cudaStream_t s[3] = {a, b, c};
    launch(produce, BLOCKS, THREADS, 0, a, x, N);
    CUDA(cudaEventRecord(e, a));
    for (int i = 0; i < 3; i++) {
        float* out;
        CUDA(cudaMalloc((void**)&out, THREADS * 4));
        CUDA(cudaEventCreateWithFlags(&read[i], cudaEventDisableTiming));
        CUDA(cudaStreamWaitEvent(s[i], e, 0));
        launch(read_all, 1, THREADS, 0, s[i], out, x, N);
        CUDA(cudaEventRecord(read[i], s[i]));
    }
    CUDA(cudaStreamWaitEvent(c, read[0], 0));
    if (!wrong) { CUDA(cudaStreamWaitEvent(c, read[1], 0)); }
    CUDA(cudaMemsetAsync(x, 0, N * 4, c));
}
static void host_reads_early(void) {
    launch(produce, BLOCKS, THREADS, 0, a, x, N);
    CUDA(cudaMemcpyAsync(pinned, x, N * 4, cudaMemcpyDeviceToHost, a));
    if (!wrong) { CUDA(cudaStreamSynchronize(a)); }
    if (pinned[5] > 1e30f) { printf("huge\n"); }
}
static void upload_changed(void) {
    CUDA(cudaMemcpyAsync(x, pinned, N * 4, cudaMemcpyHostToDevice, a));
    CUDA(cudaEventRecord(e, a));
    if (!wrong) { CUDA(cudaEventSynchronize(e)); }
    pinned[7] = 1.0f;
}
static void CUDART_CB write_pinned(void* p) {
    ((float*)p)[3] = 5.0f;
}
static void host_function(void) {
    CUDA(cudaLaunchHostFunc(a, write_pinned, pinned));
    CUDA(cudaEventRecord(e, a));
    if (!wrong) { CUDA(cudaStreamWaitEvent(b, e, 0)); }
    CUDA(cudaMemcpyAsync(x, pinned, N * 4, cudaMemcpyHostToDevice, b));
}
static void CUDART_CB set_flag(void* p) {
    std::atomic_store_explicit((std::atomic<int>*)p, 1, std::memory_order_release);
}
// a host function tells the host that its stream has come so far
static void host_function_flag(void) {
    static std::atomic<int> flag;
    if (wrong) { CUDA(cudaLaunchHostFunc(a, set_flag, &flag)); }
    CUDA(cudaMemcpyAsync(pinned, x, N * 4, cudaMemcpyDeviceToHost, a));
    if (!wrong) { CUDA(cudaLaunchHostFunc(a, set_flag, &flag)); }
    while (!atomic_load_explicit(&flag, std::memory_order_acquire)) {}
    if (pinned[5] > 1e30f) { printf("huge\n"); }
}
static void memory_operations(void) {
    typedef CUresult (*BatchMemOp)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
    void* f = NULL;
    cudaDriverEntryPointQueryResult found;
    CUDA(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &f, 12050, cudaEnableDefault, &found));
    BatchMemOp batch = (BatchMemOp)f;
    unsigned* flag;
    CUDA(cudaMalloc((void**)&flag, 4));
    CUDA(cudaMemsetAsync(flag, 0, 4, a));
    CUDA(cudaStreamSynchronize(a));
    CUstreamBatchMemOpParams write = {}, wait = {};
    write.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    write.writeValue.address = (CUdeviceptr)flag;
    write.writeValue.value = 1;
    wait.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    wait.waitValue.address = (CUdeviceptr)flag;
    wait.waitValue.value = 1;
    wait.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    if (wrong) { batch(a, 1, &write, 0); }
    launch(produce, BLOCKS, THREADS, 0, a, x, N);
    if (!wrong) { batch(a, 1, &write, 0); }
    write.writeValue.value = 2; // the wait is for 1, and does not come after what is between the two writes
    batch(a, 1, &write, 0);
    batch(b, 1, &wait, 0);
    launch(consume, BLOCKS, THREADS, 0, b, y, x, N);
}

// ---- host threads -----------------------------------------------------------------------------------------
static pthread_barrier_t barrier;
static float* peer_buffer; // the receiver's
static cudaEvent_t ready;  // it is read
static std::atomic<int> recorded;

// sends to the receiver's buffer again and again
static void* sender(void* arg) {
    (void)arg;
    cudaStream_t s;
    float* mine;
    CUDA(cudaSetDevice(0));
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void**)&mine, N * 4));
    for (int i = 0; i < 3; i++) {
        launch(produce, BLOCKS, THREADS, 0, s, mine, N);
        while (atomic_load(&recorded) <= i) {}
        if (!wrong) { CUDA(cudaStreamWaitEvent(s, ready, 0)); }
        CUDA(cudaMemcpyPeerAsync(peer_buffer, 1, mine, 0, N * 4, s));
        CUDA(cudaEventRecord(e, s));
        pthread_barrier_wait(&barrier); // e is recorded | the receiver waits for it
        pthread_barrier_wait(&barrier); // it does | e is recorded again
    }
    CUDA(cudaStreamSynchronize(s));
    return NULL;
}
static void peer_copy(void) { // the receiver
    pthread_t thread;
    cudaStream_t s;
    float* out;
    CUDA(cudaSetDevice(1));
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void**)&peer_buffer, N * 4));
    CUDA(cudaMalloc((void**)&out, N * 4));
    CUDA(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    CUDA(cudaMemsetAsync(peer_buffer, 0, N * 4, s));
    pthread_create(&thread, NULL, sender, NULL);
    for (int i = 0; i < 3; i++) {
        CUDA(cudaEventRecord(ready, s));
        atomic_store(&recorded, i + 1);
        pthread_barrier_wait(&barrier);
        CUDA(cudaStreamWaitEvent(s, e, 0));
        launch(consume, BLOCKS, THREADS, 0, s, out, peer_buffer, N);
        pthread_barrier_wait(&barrier);
    }
    pthread_join(thread, NULL);
    CUDA(cudaStreamSynchronize(s));
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static int told;
static void*
waiter(void* arg) { // reads the pinned memory once the first thread says so, in one of three ways
    int how = *(int*)arg;
    if (how == 0) { pthread_barrier_wait(&barrier); }
    if (how == 1) {
        while (!atomic_load_explicit(&recorded, std::memory_order_acquire)) {}
    }
    if (how == 2) {
        pthread_mutex_lock(&mutex);
        while (!told) {
            pthread_cond_wait(&cond, &mutex);
        }
        pthread_mutex_unlock(&mutex);
    }
    if (pinned[5] > 1e30f) { printf("huge\n"); }
    pinned[5] = 0.0f;
    return NULL;
}
// one thread synchronises, another reads: right if the first tells the second
static void hand_over(int how) {
    pthread_t thread;
    pthread_create(&thread, NULL, waiter, &how);
    CUDA(cudaMemcpyAsync(pinned, x, N * 4, cudaMemcpyDeviceToHost, a));
    if (!wrong) { CUDA(cudaStreamSynchronize(a)); }
    if (how == 0) { pthread_barrier_wait(&barrier); }
    if (how == 1) { atomic_store_explicit(&recorded, 1, std::memory_order_release); }
    if (how == 2) {
        pthread_mutex_lock(&mutex);
        told = 1;
        pthread_cond_signal(&cond);
        pthread_mutex_unlock(&mutex);
    }
    pthread_join(thread, NULL);
    CUDA(cudaMemcpyAsync(x, pinned, N * 4, cudaMemcpyHostToDevice, a)); // after the thread's write
}
static void hand_over_barrier(void) {
    hand_over(0);
}
static void hand_over_atomic(void) {
    hand_over(1);
}
static void hand_over_condition(void) {
    hand_over(2);
}

// ---- memory -----------------------------------------------------------------------------------------------
static void out_of_bounds(void) {
    launch(produce, BLOCKS, THREADS, 0, a, x, wrong ? N + 1 : N);
}
static void out_of_bounds_copy(void) {
    launch(copy_structs<Large>, 1, THREADS, 0, a, (Large*)y, (const Large*)x, N / 64 + wrong);
}
static void freed(void) {
    float* z;
    CUDA(cudaMalloc((void**)&z, N * 4));
    if (wrong) { CUDA(cudaFree(z)); }
    launch(produce, BLOCKS, THREADS, 0, a, z, N);
    if (!wrong) { CUDA(cudaFree(z)); }
}
static void uninitialised(void) {
    float* z;
    CUDA(cudaMalloc((void**)&z, N * 4));
    launch(produce, BLOCKS, THREADS, 0, a, z, wrong ? N - 1 : N);
    launch(add_one, BLOCKS, THREADS, 0, a, z, N);
}
static void uninitialised_copy(void) { // the copy is right, its use is not
    float* z;
    CUDA(cudaMalloc((void**)&z, N * 4));
    if (!wrong) { CUDA(cudaMemsetAsync(z, 0, N * 4, a)); }
    CUDA(cudaMemcpyAsync(y, z, N * 4, cudaMemcpyDeviceToDevice, a));
    CUDA(cudaMemcpyAsync(x, y, N * 4, cudaMemcpyDeviceToDevice, a));
    launch(copy_structs<Sixteen>, 4, THREADS, 0, a, (Sixteen*)y, (const Sixteen*)x, N / 4);
}
static void host_access(void) {
    launch(produce, BLOCKS, THREADS, 0, a, x, N);
    CUDA(cudaStreamSynchronize(a));
    const float* p = x;
    if (!wrong) {
        CUDA(cudaMemcpyAsync(pinned, x, N * 4, cudaMemcpyDeviceToHost, a));
        CUDA(cudaStreamSynchronize(a));
        p = pinned;
    }
    if (p[3] > 1e30f) { printf("huge\n"); }
}
static void host_copies(void) { // by memcpy
    float here[8];
    memcpy(here, wrong ? x : pinned, sizeof here);
    if (here[3] > 1e30f) { printf("huge\n"); }
}
static void kernel_uses_host(void) {
    float* p = (float*)calloc(N, 4);
    launch(consume, BLOCKS, THREADS, 0, a, y, wrong ? p : x, N);
    CUDA(cudaStreamSynchronize(a));
    free(p);
}
static void no_peer_access(void) {
    float* z;
    CUDA(cudaSetDevice(1));
    CUDA(cudaMalloc((void**)&z, N * 4));
    CUDA(cudaSetDevice(0));
    if (!wrong) { CUDA(cudaDeviceEnablePeerAccess(1, 0)); }
    launch(produce, BLOCKS, THREADS, 0, a, z, N);
}

// ---- inside kernels ---------------------------------------------------------------------------------------
static void no_syncthreads(void) {
    launch(turn_round, 2, THREADS, 0, a, x, wrong ? 0 : 1);
}
static void no_second_syncthreads(void) {
    launch(use_twice, 1, THREADS, 0, a, x, wrong ? 0 : 1);
}
static void no_syncwarp(void) {
    launch(turn_warp, 2, 32, 0, a, x, wrong ? 0 : 1);
}
static void no_atomic(void) {
    CUDA(cudaMemsetAsync(x, 0, N * 4, a));
    launch(wrong ? count_plain : count_atomic, 4, 64, 0, a, (int*)x);
}
static void blocks_race(void) {
    launch(same_cell, BLOCKS, THREADS, 0, a, x, wrong ? 0 : 1);
}
static void dynamic_too_small(void) {
    launch(dynamic, 2, THREADS, THREADS * 4 - (wrong ? 4 : 0), a, x, wrong ? THREADS - 1 : THREADS);
}
static void shared_uninitialised(void) {
    launch(shared_unset, 2, THREADS, 0, a, x, wrong ? THREADS - 1 : THREADS);
}

// the first is reported, and the others if the program may go on
static void three_mistakes(void) {
    for (int i = 0; wrong && i < 3; i++) { // each is one, however often
        out_of_bounds();
        launch(same_cell, BLOCKS, THREADS, 0, a, y, 0);
        launch(consume, BLOCKS, THREADS, 0, b, y, y, N);
        CUDA(cudaStreamSynchronize(b));
    }
}

static const struct {
    const char *name, *kind;
    void (*run)(void);
} cases[] = {
    {"missing_wait", "missing wait", missing_wait},
    {"early_record", "missing wait", early_record},
    {"write_after_read", "missing wait", write_after_read},
    {"copy_on_wrong_stream", "missing wait", copy_on_wrong_stream},
    {"three_readers", "missing wait", three_readers},
    {"host_reads_early", "missing wait", host_reads_early},
    {"upload_changed", "missing wait", upload_changed},
    {"host_function", "missing wait", host_function},
    {"host_function_flag", "missing wait", host_function_flag},
    {"memory_operations", "missing wait", memory_operations},
    {"peer_copy", "missing wait", peer_copy},
    {"hand_over_barrier", "missing wait", hand_over_barrier},
    {"hand_over_atomic", "missing wait", hand_over_atomic},
    {"hand_over_condition", "missing wait", hand_over_condition},
    {"out_of_bounds", "out of bounds", out_of_bounds},
    {"out_of_bounds_copy", "out of bounds", out_of_bounds_copy},
    {"freed", "freed memory", freed},
    {"uninitialised", "uninitialised memory", uninitialised},
    {"uninitialised_copy", "uninitialised memory", uninitialised_copy},
    {"host_access", "host access to device memory", host_access},
    {"host_copies", "host access to device memory", host_copies},
    {"kernel_uses_host", "host memory in a kernel", kernel_uses_host},
    {"no_peer_access", "no peer access", no_peer_access},
    {"no_syncthreads", "race in shared memory", no_syncthreads},
    {"no_second_syncthreads", "race in shared memory", no_second_syncthreads},
    {"no_syncwarp", "race in shared memory", no_syncwarp},
    {"no_atomic", "race in a kernel", no_atomic},
    {"blocks_race", "race in a kernel", blocks_race},
    {"dynamic_too_small", "beyond dynamic shared memory", dynamic_too_small},
    {"three_mistakes", "out of bounds", three_mistakes},
    {"shared_uninitialised", "uninitialised shared memory", shared_uninitialised},
};

int main(int argc, char** argv) {
    size_t at = 0, ncases = sizeof cases / sizeof cases[0];
    if (argc == 2 && strcmp(argv[1], "list") == 0) {
        for (at = 0; at < ncases; at++) {
            printf("%s %s\n", cases[at].name, cases[at].kind);
        }
        return 0;
    }
    while (argc == 3 && at < ncases && strcmp(argv[1], cases[at].name) != 0) {
        at++;
    }
    if (argc != 3 || at == ncases) {
        fprintf(stderr, "usage: check_cases NAME wrong|right, or list\n");
        return 1;
    }
    wrong = strcmp(argv[2], "wrong") == 0;
    pthread_barrier_init(&barrier, NULL, 2);
    CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&c, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&e2, cudaEventDisableTiming));
    CUDA(cudaMalloc((void**)&x, N * 4));
    CUDA(cudaMalloc((void**)&y, N * 4));
    CUDA(cudaMallocHost((void**)&pinned, N * 4));
    memset(pinned, 0, N * 4);
    CUDA(cudaMemsetAsync(x, 0, N * 4, a));
    CUDA(cudaMemsetAsync(y, 0, N * 4, a));
    CUDA(cudaStreamSynchronize(a));
    cases[at].run();
    CUDA(cudaSetDevice(0));
    CUDA(cudaDeviceSynchronize());
    return 0;
}
