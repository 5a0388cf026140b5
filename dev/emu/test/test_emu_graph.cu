// test_emu_graph.cu -- captures of several streams, their replay, and what a capture refuses
#include "dev/emu/test/emu_test.h"
#include <atomic>
#include <cuda.h>

enum { N = 64 };

static __global__ void add(int* x, int addend) {
    x[threadIdx.x] += addend;
}
static __global__ void multiply(int* x, int factor) {
    x[threadIdx.x] *= factor;
}
static __global__ void sum(int* out, const int* a, const int* b) {
    out[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
}

static int fetch(const int* x, cudaStream_t s) {
    int got[N];
    OK(cudaMemcpyAsync(got, x, sizeof got, cudaMemcpyDeviceToHost, s));
    OK(cudaStreamSynchronize(s));
    for (int i = 1; i < N; i++) {
        CHECK(got[i] == got[0]);
    }
    return got[0];
}

static int* zeros(cudaStream_t s) {
    int* x = new_array<int>(N);
    OK(cudaMemsetAsync(x, 0, N * sizeof(int), s));
    return x;
}

static std::atomic<int> ncalled;
static void call(void*) {
    ncalled++;
}

// what the tests launch: x = 3 (x + 1) on one stream, y += 2 and a host function on another, z = x + y
struct Work {
    cudaStream_t a, b;
    cudaEvent_t fork, join;
    int *x, *y, *z;
};

static Work new_work(void) {
    Work w = {};
    w.a = new_stream();
    w.b = new_stream();
    w.fork = new_event();
    w.join = new_event();
    w.x = zeros(w.a);
    w.y = zeros(w.a);
    w.z = zeros(w.a);
    OK(cudaStreamSynchronize(w.a));
    return w;
}

static void queue(const Work& w) {
    launch(add, 1, N, 0, w.a, w.x, 1);
    OK(cudaEventRecord(w.fork, w.a));
    OK(cudaStreamWaitEvent(w.b, w.fork, 0));
    launch(add, 1, N, 0, w.b, w.y, 2);
    OK(cudaLaunchHostFunc(w.b, call, nullptr));
    OK(cudaEventRecord(w.join, w.b));
    launch(multiply, 1, N, 0, w.a, w.x, 3);
    OK(cudaStreamWaitEvent(w.a, w.join, 0));
    launch(sum, 1, N, 0, w.a, w.z, (const int*)w.x, (const int*)w.y);
}

static cudaGraphExec_t capture(const Work& w) {
    cudaGraph_t graph;
    cudaGraphExec_t exec = nullptr;
    cudaStreamCaptureStatus status;
    OK(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeThreadLocal));
    queue(w);
    OK(cudaStreamIsCapturing(w.b, &status));
    CHECK(status == cudaStreamCaptureStatusActive);
    CHECK(cudaEventQuery(w.fork) == cudaErrorCapturedEvent);
    OK(cudaStreamEndCapture(w.a, &graph));
    OK(cudaStreamIsCapturing(w.b, &status));
    CHECK(status == cudaStreamCaptureStatusNone);
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

static void replay(void) {
    Work w = new_work();
    cudaGraphExec_t exec = capture(w);
    cudaStream_t other = new_stream();
    ncalled = 0;
    CHECK(fetch(w.x, w.a) == 0); // captured, not run
    int x = 0;
    for (int i = 1; i <= 6; i++) {
        launch(add, 1, N, 0, w.a, w.x, 1); // comes before
        x = (x + 1 + 1) * 3;
        OK(cudaGraphLaunch(exec, w.a));
        launch(add, 1, N, 0, w.a, w.z, 1000); // comes after
        if (i % 3 == 0) {
            CHECK(fetch(w.z, w.a) == x + 2 * i + 1000);
            CHECK(ncalled == i);
        }
    }
    OK(cudaGraphLaunch(exec, other)); // after the last launch, though on another stream
    CHECK(fetch(w.x, other) == (x + 1) * 3);
    OK(cudaGraphExecDestroy(exec));
}

// nothing follows the join: the next launch, on another stream, comes after the branch all the same
static void join_last(void) {
    Work w = new_work();
    cudaStream_t other = new_stream();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeThreadLocal));
    launch(add, 1, N, 0, w.a, w.x, 1);
    OK(cudaEventRecord(w.fork, w.a));
    OK(cudaStreamWaitEvent(w.b, w.fork, 0));
    launch(multiply, 1, N, 0, w.b, w.x, 3);
    OK(cudaEventRecord(w.join, w.b));
    OK(cudaStreamWaitEvent(w.a, w.join, 0));
    OK(cudaStreamEndCapture(w.a, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    int want = 0;
    for (int i = 0; i < 10; i++) {
        OK(cudaGraphLaunch(exec, i % 2 ? w.a : other));
        want = (want + 1) * 3;
    }
    CHECK(fetch(w.x, w.a) == want);
}

// events recorded and awaited across the border
static void across_the_border(void) {
    Work w = new_work();
    cudaStream_t outside = new_stream();
    cudaEvent_t in, out;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaEventCreateWithFlags(&in, cudaEventDefault));
    OK(cudaEventCreateWithFlags(&out, cudaEventDefault));
    OK(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeThreadLocal));
    OK(cudaStreamWaitEvent(w.a, in, cudaEventWaitExternal));
    launch(multiply, 1, N, 0, w.a, w.x, 10);
    OK(cudaEventRecordWithFlags(out, w.a, cudaEventRecordExternal));
    OK(cudaStreamEndCapture(w.a, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) {
        launch(add, 1, N, 0, outside, w.x, 7);
        OK(cudaEventRecord(in, outside));
        OK(cudaGraphLaunch(exec, w.a));
        OK(cudaStreamWaitEvent(outside, out, 0));
    }
    CHECK(fetch(w.x, outside) == 7770);
    OK(cudaEventSynchronize(out));
    CHECK(cudaEventQuery(out) == cudaSuccess);
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphExecDestroy(exec));
}

// two graphs that wait for each other by flags in device memory, constant values, replayed
static void memory_operations(void) {
    CUresult (*batch)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
    cudaDriverEntryPointQueryResult found;
    OK(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", (void**)&batch, 12000, cudaEnableDefault,
                                        &found));
    Work w = new_work();
    int* flags = zeros(w.a);
    cudaGraph_t graph[2];
    cudaGraphExec_t exec[2];
    cudaStream_t streams[2] = {w.a, w.b};
    OK(cudaStreamSynchronize(w.a));
    for (int k = 0; k < 2;
         k++) { // ping (0): x += 1, flag 0, wait for flag 1. pong (1): wait for 0, x *= 2, flag 1
        CUstreamBatchMemOpParams give = {}, take[2] = {};
        give.writeValue.operation = take[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        give.writeValue.address = (CUdeviceptr)(flags + k);
        give.writeValue.value = 1;
        take[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        take[0].waitValue.address = take[1].writeValue.address = (CUdeviceptr)(flags + 1 - k);
        take[0].waitValue.value = 1;
        take[0].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
        OK(cudaStreamBeginCapture(streams[k], cudaStreamCaptureModeThreadLocal));
        if (k == 1) { CHECK(batch(streams[k], 2, take, 0) == CUDA_SUCCESS); }
        k == 0 ? launch(add, 1, N, 0, streams[k], w.x, 1) : launch(multiply, 1, N, 0, streams[k], w.x, 2);
        CHECK(batch(streams[k], 1, &give, 0) == CUDA_SUCCESS);
        if (k == 0) { CHECK(batch(streams[k], 2, take, 0) == CUDA_SUCCESS); }
        OK(cudaStreamEndCapture(streams[k], &graph[k]));
        OK(cudaGraphInstantiate(&exec[k], graph[k], 0));
    }
    int want = 0;
    for (int i = 0; i < 8; i++) {
        OK(cudaGraphLaunch(exec[1], w.b));
        OK(cudaGraphLaunch(exec[0], w.a));
        want = (want + 1) * 2;
    }
    CHECK(fetch(w.x, w.a) == want);
}

// ---- what a capture refuses -------------------------------------------------------------------------------
static void refuse_outside_event(void) {
    Work w = new_work();
    cudaGraph_t graph;
    OK(cudaEventRecord(w.fork, w.b));
    OK(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaStreamWaitEvent(w.a, w.fork, 0) == cudaErrorStreamCaptureIsolation);
    CHECK(cudaGetLastError() == cudaErrorStreamCaptureIsolation);
    CHECK(cudaMemsetAsync(w.x, 0, 4, w.a) == cudaErrorStreamCaptureInvalidated);
    CHECK(cudaStreamEndCapture(w.a, &graph) == cudaErrorStreamCaptureInvalidated && !graph);
    OK(cudaMemsetAsync(w.x, 0, 4, w.a)); // and the stream is as before
    OK(cudaStreamSynchronize(w.a));
}

static void refuse_unjoined(void) {
    Work w = new_work();
    cudaGraph_t graph;
    OK(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeThreadLocal));
    OK(cudaEventRecord(w.fork, w.a));
    OK(cudaStreamWaitEvent(w.b, w.fork, 0));
    launch(add, 1, N, 0, w.b, w.y, 2);
    OK(cudaEventRecord(w.join, w.b));
    launch(add, 1, N, 0, w.b, w.y, 2); // after the event
    OK(cudaStreamWaitEvent(w.a, w.join, 0));
    CHECK(cudaStreamEndCapture(w.a, &graph) == cudaErrorStreamCaptureUnjoined);
    CHECK(cudaStreamWaitEvent(w.a, w.join, 0) == cudaErrorCapturedEvent);
    CHECK(fetch(w.y, w.b) == 0);
}

static void refuse_merge(void) {
    Work w = new_work();
    cudaGraph_t graph;
    OK(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeThreadLocal));
    OK(cudaStreamBeginCapture(w.b, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaStreamBeginCapture(w.b, cudaStreamCaptureModeThreadLocal) == cudaErrorIllegalState);
    OK(cudaEventRecord(w.fork, w.a));
    CHECK(cudaStreamWaitEvent(w.b, w.fork, 0) == cudaErrorStreamCaptureMerge);
    CHECK(cudaStreamEndCapture(w.a, &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK(cudaStreamEndCapture(w.b, &graph) == cudaErrorStreamCaptureInvalidated);
}

static void refuse_unsafe_calls(void) {
    Work w = new_work();
    for (int i = 0; i < 6; i++) {
        cudaGraph_t graph;
        void* p;
        OK(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeThreadLocal));
        CHECK_AT("call %d", i);
        cudaError_t e = i == 0   ? cudaMalloc(&p, 4)
                        : i == 1 ? cudaFree(w.x)
                        : i == 2 ? cudaStreamSynchronize(w.a)
                        : i == 3 ? cudaStreamQuery(w.a)
                        : i == 4 ? cudaDeviceSynchronize()
                                 : cudaEventSynchronize(w.join);
        CHECK(e == cudaErrorStreamCaptureUnsupported);
        CHECK(cudaStreamEndCapture(w.a, &graph) == cudaErrorStreamCaptureInvalidated);
    }
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(w.a, &graph) == cudaErrorIllegalState);
    OK(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeRelaxed));
    OK(cudaFree(w.x));
    OK(cudaStreamEndCapture(w.a, &graph));
    CHECK(graph != nullptr);
}

static void refuse_other_stream(void) {
    Work w = new_work();
    cudaGraph_t graph;
    OK(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeThreadLocal));
    OK(cudaEventRecord(w.fork, w.a));
    OK(cudaStreamWaitEvent(w.b, w.fork, 0));
    CHECK(cudaStreamEndCapture(w.b, &graph) == cudaErrorStreamCaptureUnmatched);
    CHECK(cudaStreamEndCapture(w.a, &graph) == cudaErrorStreamCaptureInvalidated);
}

static void refusals(void) {
    refuse_outside_event();
    refuse_unjoined();
    refuse_merge();
    refuse_unsafe_calls();
    refuse_other_stream();
}

int main(void) {
    IN_SCHEDULES(replay);
    IN_SCHEDULES(join_last);
    IN_SCHEDULES(across_the_border);
    IN_SCHEDULES(memory_operations);
    IN_CHILD(refusals, "FO_EMU_SCHED", "eager");
    return check_report();
}
