// test_emu_stream.cu -- order on and between streams, events, host functions, copies, memory, peers, stream
// memory operations, several host threads; what the schedules show; messages
#include "dev/emu/test/emu_test.h"
#include <atomic>
#include <cuda.h>
#include <pthread.h>
#include <time.h>

enum { N = 256 };

static __global__ void set(int* x, int value) {
    x[threadIdx.x] = value;
}
static __global__ void multiply_add(int* x, int factor, int addend) {
    __syncthreads();
    x[threadIdx.x] = (x[threadIdx.x] * factor + addend) % 10007;
}
static __global__ void add_to(int* out, const int* a, const int* b) {
    out[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
}

static int all_equal(const int* x, int value) {
    for (int i = 0; i < N; i++) {
        if (x[i] != value) { return 0; }
    }
    return 1;
}

static void fetch(int* out, const int* in, cudaStream_t s) {
    OK(cudaMemcpyAsync(out, in, N * sizeof(int), cudaMemcpyDeviceToHost, s));
    OK(cudaStreamSynchronize(s));
}

// ---- order ------------------------------------------------------------------------------------------------
static void order_on_a_stream(void) {
    cudaStream_t s = new_stream();
    int *x = new_array<int>(N), got[N], want = 1;
    launch(set, 1, N, 0, s, x, 1);
    for (int i = 0; i < 50; i++) {
        launch(multiply_add, 1, N, 0, s, x, 3, i);
        want = (want * 3 + i) % 10007;
    }
    fetch(got, x, s);
    CHECK(all_equal(got, want));
    OK(cudaStreamDestroy(s));
    OK(cudaFree(x));
}

// a producer and two consumers, back and forth, with waits for reads and for writes
static void order_by_events(void) {
    cudaStream_t a = new_stream(), b = new_stream(), c = new_stream(-5);
    cudaEvent_t made = new_event(), taken_b = new_event(), taken_c = new_event();
    int *x = new_array<int>(N), *sum_b = new_array<int>(N), *sum_c = new_array<int>(N), got[N];
    OK(cudaMemsetAsync(sum_b, 0, N * sizeof(int), b));
    OK(cudaMemsetAsync(sum_c, 0, N * sizeof(int), c));
    for (int i = 0; i < 20; i++) {
        OK(cudaStreamWaitEvent(a, taken_b,
                               0)); // the first time it was never recorded, and holds nothing back
        OK(cudaStreamWaitEvent(a, taken_c, 0));
        launch(set, 1, N, 0, a, x, i);
        OK(cudaEventRecord(made, a));
        OK(cudaStreamWaitEvent(b, made, 0));
        OK(cudaStreamWaitEvent(c, made, 0));
        launch(add_to, 1, N, 0, b, sum_b, (const int*)sum_b, (const int*)x);
        OK(cudaEventRecord(taken_b, b));
        launch(add_to, 1, N, 0, c, sum_c, (const int*)sum_c, (const int*)x);
        OK(cudaEventRecord(taken_c, c));
    }
    fetch(got, sum_c, c);
    CHECK(all_equal(got, 190));
    fetch(got, sum_b, b);
    CHECK(all_equal(got, 190));
    OK(cudaDeviceSynchronize());
    CHECK(cudaStreamQuery(a) == cudaSuccess && cudaStreamQuery(b) == cudaSuccess);
}

// ---- host functions ---------------------------------------------------------------------------------------
static std::atomic<int> gate, step_count;

static void wait_for_gate(void* data) {
    while (gate.load() < (int)(intptr_t)data) {
        struct timespec t = {0, 100000};
        nanosleep(&t, NULL);
    }
    step_count++;
}
static void open_gate(void* data) {
    gate = (int)(intptr_t)data;
}

// a host function holds up its own stream alone, and may wait for one on another stream
static void host_functions(void) {
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t before, after;
    int *x = new_array<int>(N), got[N];
    float ms;
    OK(cudaEventCreateWithFlags(&before, cudaEventDefault));
    OK(cudaEventCreateWithFlags(&after, cudaEventDefault));
    gate = step_count = 0;
    OK(cudaEventRecord(before, a));
    OK(cudaLaunchHostFunc(a, wait_for_gate, (void*)1));
    launch(set, 1, N, 0, a, x, 5);
    OK(cudaEventRecord(after, a));
    CHECK(cudaEventQuery(after) == cudaErrorNotReady && cudaStreamQuery(a) == cudaErrorNotReady);
    CHECK(cudaEventElapsedTime(&ms, before, after) == cudaErrorNotReady);
    OK(cudaStreamSynchronize(b)); // empty
    CHECK(step_count == 0);
    OK(cudaLaunchHostFunc(b, open_gate, (void*)1));
    OK(cudaEventSynchronize(after));
    CHECK(step_count == 1 && cudaEventQuery(after) == cudaSuccess);
    OK(cudaEventElapsedTime(&ms, before, after));
    CHECK(ms >= 0.0f && ms < 60e3f);
    fetch(got, x, a);
    CHECK(all_equal(got, 5));
    while (cudaStreamQuery(b) == cudaErrorNotReady) {}
    CHECK(gate == 1);
}

static void* open_gate_later(void*) {
    struct timespec t = {0, 20000000};
    nanosleep(&t, NULL);
    gate = 1;
    return NULL;
}

// both wait for all streams of the device, and for those alone
static void device_waits(void) {
    int* x = new_array<int>(N);
    cudaStream_t s = new_stream();
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        gate = step_count = 0;
        OK(cudaLaunchHostFunc(s, wait_for_gate, (void*)1));
        OK(cudaSetDevice(1));
        OK(cudaDeviceSynchronize());
        OK(cudaSetDevice(0));
        CHECK(step_count == 0);
        pthread_create(&thread, NULL, open_gate_later, NULL);
        i == 0 ? OK(cudaDeviceSynchronize()) : OK(cudaFree(x));
        CHECK(step_count == 1);
        pthread_join(thread, NULL);
    }
}

// ---- copies and memory ------------------------------------------------------------------------------------
static void copies(void) {
    enum { ROWS = 5, WIDTH = 3, PITCH = 8 };
    cudaStream_t s = new_stream();
    int *x = new_array<int>(N), *y = new_array<int>(N), *pinned = new_pinned<int>(N), got[N];
    if (!checked()) {
        fetch(got, x, s);
        CHECK(all_equal(got, -1)); // new memory is NaN
    }
    for (int i = 0; i < N; i++) {
        pinned[i] = i;
    }
    OK(cudaMemcpyAsync(x, pinned, N * sizeof(int), cudaMemcpyHostToDevice, s));
    OK(cudaMemsetAsync(y, 0, N * sizeof(int), s));
    OK(cudaMemcpy2DAsync(y + 1, PITCH * sizeof(int), x, WIDTH * sizeof(int), WIDTH * sizeof(int), ROWS,
                         cudaMemcpyDeviceToDevice, s));
    OK(cudaMemset2DAsync(y + 3, PITCH * sizeof(int), 0x11, sizeof(int), ROWS, s));
    fetch(got, y, s);
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        int row = i / PITCH, column = i % PITCH, want = 0;
        if (row < ROWS && (column == 1 || column == 2)) { want = row * WIDTH + column - 1; }
        if (row < ROWS && column == 3) { want = 0x11111111; }
        wrong += got[i] != want;
    }
    CHECK(wrong == 0);
    CHECK(cudaMemcpyAsync(x, y, (N + 1) * sizeof(int), cudaMemcpyDeviceToDevice, s) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(x, got, sizeof got, cudaMemcpyDeviceToHost, s) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(x, got, sizeof got, cudaMemcpyDefault, s) == cudaSuccess);
    CHECK(cudaMemsetAsync(got, 0, sizeof got, s) == cudaErrorInvalidValue);
    CHECK(cudaMemsetAsync(x + 1, 0, N * sizeof(int), s) == cudaErrorInvalidValue);
    OK(cudaStreamSynchronize(s));
    CHECK(cudaFree(pinned) == cudaErrorInvalidValue && cudaFreeHost(x) == cudaErrorInvalidValue);
    OK(cudaFreeHost(pinned));
    OK(cudaFree(nullptr));
}

static void memory(void) {
    size_t unused, total;
    void *a, *b, *c;
    OK(cudaMemGetInfo(&unused, &total));
    CHECK(total == 1000000 && unused == total);
    OK(cudaMalloc(&a, 600000));
    CHECK(cudaMalloc(&b, 400001) == cudaErrorMemoryAllocation);
    OK(cudaMalloc(&b, 400000));
    OK(cudaMemGetInfo(&unused, &total));
    CHECK(unused == 0);
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&c, 1000000)); // each device has its own
    OK(cudaFree(c));
    OK(cudaFree(a));
    OK(cudaSetDevice(0));
    OK(cudaMemGetInfo(&unused, &total));
    CHECK(unused == 600000);
    for (int i = 0; i < 200; i++) { // what is freed is used again, whatever the order and the sizes
        void* p[8];
        for (int k = 0; k < 8; k++) {
            OK(cudaMalloc(&p[k], (size_t)((i * 7919 + k * 104729) % 70000)));
            CHECK(((uintptr_t)p[k] & 255) == 0);
        }
        for (int k = 0; k < 8; k++) {
            OK(cudaFree(p[(k * 3 + i) % 8]));
        }
    }
    OK(cudaMemGetInfo(&unused, &total));
    CHECK(unused == 600000);
    CHECK(fo_emu_count("malloc") == 4 + 1600);
}

// ---- devices ----------------------------------------------------------------------------------------------
static void devices(void) {
    int n, can, version, least, greatest, value;
    cudaDeviceProp p;
    OK(cudaGetDeviceCount(&n));
    CHECK(n == 3);
    CHECK(cudaSetDevice(3) == cudaErrorInvalidDevice && cudaSetDevice(-1) == cudaErrorInvalidDevice);
    OK(cudaGetDeviceProperties(&p, 2));
    CHECK(p.major == 9 && p.multiProcessorCount > 0 && p.warpSize == 32);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1));
    CHECK(value == p.multiProcessorCount);
    OK(cudaDriverGetVersion(&version));
    CHECK(version == CUDART_VERSION);
    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(least == 0 && greatest < 0);
    OK(cudaDeviceCanAccessPeer(&can, 0, 2));
    CHECK(can == 1);
    OK(cudaDeviceCanAccessPeer(&can, 1, 1));
    CHECK(can == 0);
    OK(cudaDeviceEnablePeerAccess(2, 0));
    CHECK(cudaDeviceEnablePeerAccess(2, 0) == cudaErrorPeerAccessAlreadyEnabled);
    CHECK(cudaDeviceEnablePeerAccess(3, 0) == cudaErrorInvalidDevice);
    CHECK(!strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory"));
    CHECK(!strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady"));
}

static void peer_copies(void) {
    int *x0 = new_array<int>(N), got[N];
    cudaStream_t s0 = new_stream();
    cudaEvent_t e0 = new_event();
    OK(cudaSetDevice(1));
    int* x1 = new_array<int>(N);
    cudaStream_t s1 = new_stream();
    cudaEvent_t e1 = new_event();
    launch(set, 1, N, 0, s1, x1, 11);
    OK(cudaEventRecord(e1, s1));
    OK(cudaStreamWaitEvent(s0, e1, 0)); // of another device
    OK(cudaMemcpyPeerAsync(x0, 0, x1, 1, N * sizeof(int), s0));
    CHECK(cudaMemcpyPeerAsync(x0, 1, x1, 1, N * sizeof(int), s0) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyPeerAsync(x0, 0, x1, 99, N * sizeof(int), s0) == cudaErrorInvalidDevice);
    CHECK(cudaEventRecord(e0, s1) == cudaErrorInvalidResourceHandle);
    cudaLaunchConfig_t c = {};
    c.gridDim = c.blockDim = 1;
    c.stream = s0; // of device 0, while 1 is the thread's
    CHECK(cudaLaunchKernelEx(&c, set, x0, 1) == cudaErrorInvalidResourceHandle);
    fetch(got, x0, s0);
    CHECK(all_equal(got, 11));
}

static void no_peers(void) {
    int can;
    OK(cudaDeviceCanAccessPeer(&can, 0, 1));
    CHECK(can == 0);
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessUnsupported);
    peer_copies();
}

static void no_driver(void) {
    int n = 7, version;
    void* p;
    CHECK(cudaGetDeviceCount(&n) == cudaErrorInsufficientDriver && n == 0);
    OK(cudaDriverGetVersion(&version));
    CHECK(version == 0);
    CHECK(cudaSetDevice(0) == cudaErrorInsufficientDriver &&
          cudaMalloc(&p, 4) == cudaErrorInsufficientDriver);
}

static void no_device(void) {
    int n = 7;
    CHECK(cudaGetDeviceCount(&n) == cudaErrorNoDevice && n == 0);
}

// ---- stream memory operations -----------------------------------------------------------------------------
typedef CUresult (*BatchMemOp)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
typedef CUresult (*MemsetD32)(CUdeviceptr, unsigned, size_t, CUstream);

template <class F> static F entry_point(const char* name) {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    OK(cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &found));
    CHECK(f && found == cudaDriverEntryPointSuccess);
    return (F)f;
}

static CUstreamBatchMemOpParams memory_op(CUstreamBatchMemOpType type, const void* address, unsigned value,
                                          unsigned flags) {
    CUstreamBatchMemOpParams p;
    memset(&p, 0, sizeof p);
    p.waitValue.operation = type; // both kinds lie alike
    p.waitValue.address = (CUdeviceptr)address;
    p.waitValue.value = value;
    p.waitValue.flags = flags;
    return p;
}

static void memory_operations(void) {
    BatchMemOp batch = entry_point<BatchMemOp>("cuStreamBatchMemOp");
    MemsetD32 memset_d32 = entry_point<MemsetD32>("cuMemsetD32Async");
    void* f;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuNoSuchThing", &f, 12000, cudaEnableDefault, &found);
    CHECK(!f && found == cudaDriverEntryPointSymbolNotFound);
    const CUstreamBatchMemOpType WAIT = CU_STREAM_MEM_OP_WAIT_VALUE_32,
                                 WRITE = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    cudaStream_t a = new_stream(), b = new_stream(), c = new_stream();
    int *x = new_array<int>(N), *flags = new_array<int>(4), got[N];
    OK(cudaMemsetAsync(flags, 0, 16, a));
    OK(cudaStreamSynchronize(a));
    for (int i = 0; i < 5; i++) { // values are constant: a wait resets its flag
        CUstreamBatchMemOpParams ready = memory_op(WRITE, flags, 1, 0),
                                 done = memory_op(WRITE, flags + 1, 1, 0);
        CUstreamBatchMemOpParams take[2] = {memory_op(WAIT, flags, 1, CU_STREAM_WAIT_VALUE_EQ),
                                            memory_op(WRITE, flags, 0, 0)};
        CUstreamBatchMemOpParams end[2] = {memory_op(WAIT, flags + 1, 1, CU_STREAM_WAIT_VALUE_EQ),
                                           memory_op(WRITE, flags + 1, 0, 0)};
        CHECK(batch(b, 2, take, 0) == CUDA_SUCCESS);
        launch(set, 1, N, 0, b, x, i);
        CHECK(batch(b, 1, &done, 0) == CUDA_SUCCESS);
        CHECK(batch(a, 1, &ready, 0) == CUDA_SUCCESS);
        CHECK(batch(a, 2, end, 0) == CUDA_SUCCESS);
        fetch(got, x, a);
        CHECK(all_equal(got, i));
    }
    CUstreamBatchMemOpParams at_least = memory_op(WAIT, flags + 2, 5, CU_STREAM_WAIT_VALUE_GEQ);
    CHECK(batch(b, 1, &at_least, 0) == CUDA_SUCCESS);
    CHECK(memset_d32((CUdeviceptr)(flags + 2), 4, 1, c) == CUDA_SUCCESS);
    OK(cudaStreamSynchronize(c));
    CHECK(cudaStreamQuery(b) == cudaErrorNotReady);
    CHECK(memset_d32((CUdeviceptr)(flags + 2), 6, 1, c) == CUDA_SUCCESS); // how a host lets a stuck stream go
    OK(cudaStreamSynchronize(b));
    CUstreamBatchMemOpParams outside = memory_op(WRITE, got, 1, 0);
    CHECK(batch(a, 1, &outside, 0) == CUDA_ERROR_INVALID_VALUE);
    OK(cudaSetDevice(1));
    cudaStream_t other = new_stream();
    CUstreamBatchMemOpParams remote = memory_op(WRITE, flags, 1, 0);
    CHECK(batch(other, 1, &remote, 0) == CUDA_ERROR_INVALID_VALUE);
    OK(cudaDeviceEnablePeerAccess(0, 0));
    CHECK(batch(other, 1, &remote, 0) == CUDA_SUCCESS);
    OK(cudaStreamSynchronize(other));
}

// ---- several host threads ---------------------------------------------------------------------------------
enum { RANKS = 4, ROUNDS = 20 };
static struct {
    int* x[RANKS];
    int* from_left[RANKS];
    cudaStream_t stream[RANKS];
    cudaEvent_t sent[RANKS], added[RANKS];
    pthread_barrier_t barrier;
    int sum[RANKS][N];
} ring;

// each round: x of the left neighbour comes here, and is added to the own x
static void* rank_main(void* arg) {
    int r = (int)(intptr_t)arg, right = (r + 1) % RANKS, left = (r + RANKS - 1) % RANKS;
    OK(cudaSetDevice(r));
    ring.x[r] = new_array<int>(N);
    ring.from_left[r] = new_array<int>(N);
    cudaStream_t s = ring.stream[r] = new_stream();
    ring.sent[r] = new_event();
    ring.added[r] = new_event();
    launch(set, 1, N, 0, s, ring.x[r], r);
    OK(cudaEventRecord(ring.added[r], s));
    for (int i = 0; i < ROUNDS; i++) {
        pthread_barrier_wait(&ring.barrier); // the neighbours' events are recorded
        OK(cudaStreamWaitEvent(s, ring.added[right], 0));
        OK(cudaMemcpyPeerAsync(ring.from_left[right], right, ring.x[r], r, N * sizeof(int), s));
        OK(cudaEventRecord(ring.sent[r], s));
        pthread_barrier_wait(&ring.barrier);
        OK(cudaStreamWaitEvent(s, ring.sent[left], 0));
        launch(add_to, 1, N, 0, s, ring.x[r], (const int*)ring.x[r], (const int*)ring.from_left[r]);
        OK(cudaEventRecord(ring.added[r], s));
    }
    fetch(ring.sum[r], ring.x[r], s);
    return NULL;
}

static void host_threads(void) {
    pthread_t threads[RANKS];
    int want[RANKS], next[RANKS];
    pthread_barrier_init(&ring.barrier, NULL, RANKS);
    for (int r = 0; r < RANKS; r++) {
        pthread_create(&threads[r], NULL, rank_main, (void*)(intptr_t)r);
        want[r] = r;
    }
    for (int i = 0; i < ROUNDS; i++) {
        for (int r = 0; r < RANKS; r++) {
            next[r] = want[r] + want[(r + RANKS - 1) % RANKS];
        }
        memcpy(want, next, sizeof want);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(threads[r], NULL);
        CHECK(all_equal(ring.sum[r], want[r]));
    }
}

// ---- schedules --------------------------------------------------------------------------------------------
// how often of 20 a consumer on another stream, which does not wait for the producer, finds nothing written;
// both are queued before either can run
static int nmissed(void) {
    cudaStream_t a = new_stream(), b = new_stream(), c = new_stream();
    cudaEvent_t opened = new_event();
    int *x = new_array<int>(N), *y = new_array<int>(N), got[N], n = 0;
    for (int i = 0; i < 20; i++) {
        gate = 0;
        OK(cudaMemsetAsync(x, 0xff, N * sizeof(int), a));
        OK(cudaStreamSynchronize(a));
        OK(cudaLaunchHostFunc(c, wait_for_gate, (void*)1));
        OK(cudaEventRecord(opened, c));
        OK(cudaStreamWaitEvent(a, opened, 0));
        OK(cudaStreamWaitEvent(b, opened, 0));
        launch(set, 1, N, 0, a, x, 1);
        launch(add_to, 1, N, 0, b, y, (const int*)x, (const int*)x);
        gate = 1;
        fetch(got, y, b);
        n += got[0] == -2;
        OK(cudaDeviceSynchronize());
    }
    return n;
}
static void lazy_shows_it(void) {
    CHECK(nmissed() > 15); // the 2 ms may be over before all is queued, on a machine that is busy
}
static void eager_hides_it(void) {
    CHECK(nmissed() == 0);
}
static void random_shows_it_now_and_then(void) {
    int n = nmissed();
    CHECK(n > 0 && n < 20);
}
// without anybody waiting, lazy streams get on too
static void lazy_gets_on(void) {
    cudaStream_t s = new_stream();
    gate = 0;
    OK(cudaLaunchHostFunc(s, open_gate, (void*)3));
    for (int i = 0; i < 2000 && gate != 3; i++) {
        struct timespec t = {0, 1000000};
        nanosleep(&t, NULL);
    }
    CHECK(gate == 3);
}

static void counters(void) {
    cudaStream_t s = new_stream();
    int* x = new_array<int>(N);
    cudaEvent_t e = new_event();
    for (int i = 0; i < 3; i++) {
        launch(set, 1, N, 0, s, x, 1);
        OK(cudaEventRecord(e, s));
        OK(cudaStreamSynchronize(s));
    }
    OK(cudaDeviceSynchronize());
    CHECK(fo_emu_count("launch") == 3 && fo_emu_count("stream_sync") == 3 &&
          fo_emu_count("device_sync") == 1);
    CHECK(fo_emu_count("malloc") == 1 && fo_emu_count("event_create") == 1 && fo_emu_count("heuristic") == 0);
}

// ---- what must be reported --------------------------------------------------------------------------------
static void legacy_copy(void) {
    int* x = new_array<int>(N);
    cudaMemsetAsync(x, 0, 4, nullptr);
}
static void legacy_launch(void) {
    launch(set, 1, N, 0, nullptr, new_array<int>(N), 1);
}
static void call_cuda(void*) {
    void* p;
    cudaMalloc(&p, 1);
}
static void cuda_in_host_function(void) {
    cudaStream_t s = new_stream();
    OK(cudaLaunchHostFunc(s, call_cuda, nullptr));
    OK(cudaStreamSynchronize(s));
}
static void stall(void) {
    setenv("FO_EMU_STALL_S", "0.2", 1);
    cudaStream_t s = new_stream();
    fo_emu_name_stream(s, "comm tp");
    int* flag = new_array<int>(1);
    CUstreamBatchMemOpParams wait =
        memory_op(CU_STREAM_MEM_OP_WAIT_VALUE_32, flag, 1, CU_STREAM_WAIT_VALUE_EQ);
    entry_point<BatchMemOp>("cuStreamBatchMemOp")(s, 1, &wait, 0);
    cudaStreamSynchronize(s);
}
static __global__ void never_ends(int* x) {
    while (atomicOr(x, 0) != 7) {}
}
static void endless_kernel(void) {
    setenv("FO_EMU_STALL_S", "0.2", 1);
    cudaStream_t s = new_stream();
    int* x = new_array<int>(1);
    OK(cudaMemsetAsync(x, 0, sizeof(int), s));
    launch(never_ends, 1, 1, 0, s, x);
    OK(cudaStreamSynchronize(s));
}
static void wrong_variable(const char* name, const char* value) {
    setenv(name, value, 1);
    new_stream();
}

int main(void) {
    CHECK_DIES(legacy_copy(), "emu: legacy stream: cudaMemsetAsync on it");
    CHECK_DIES(legacy_launch(), "emu: legacy stream: set on it");
    CHECK_DIES(cuda_in_host_function(), "emu: host function: it calls cudaMalloc");
    CHECK_DIES(stall(), "nothing has got on for 0.2 s; comm tp of device 0: wait value");
    CHECK_DIES(endless_kernel(), "got on for 0.2 s; stream 1 of device 0: never_ends");
    CHECK_DIES(wrong_variable("FO_EMU_SCHED", "threads"),
               "FO_EMU_SCHED=threads: want eager, lazy or random:SEED");
    CHECK_DIES(wrong_variable("FO_EMU_DEVICES", "many"), "FO_EMU_DEVICES=many: want a number");
    IN_CHILD(devices, "FO_EMU_DEVICES", "3");
    IN_CHILD(no_peers, "FO_EMU_PEER", "0");
    IN_CHILD(no_driver, "FO_EMU_NO_DRIVER", "1");
    IN_CHILD(no_device, "FO_EMU_DEVICES", "0");
    IN_CHILD(memory, "FO_EMU_MEMORY", "1000000");
    IN_CHILD(counters, "FO_EMU_SCHED", "eager");
    if (!checked()) { // it finds each, whatever the schedule
        IN_CHILD(lazy_shows_it, "FO_EMU_SCHED", "lazy");
        IN_CHILD(eager_hides_it, "FO_EMU_SCHED", "eager");
        IN_CHILD(random_shows_it_now_and_then, "FO_EMU_SCHED", "random:5");
    }
    IN_CHILD(lazy_gets_on, "FO_EMU_SCHED", "lazy");
    IN_SCHEDULES(order_on_a_stream);
    IN_SCHEDULES(order_by_events);
    IN_SCHEDULES(host_functions);
    IN_SCHEDULES(device_waits);
    IN_SCHEDULES(copies);
    IN_SCHEDULES(peer_copies);
    IN_SCHEDULES(memory_operations);
    IN_SCHEDULES(host_threads);
    return check_report();
}
