/* driver.cpp -- devices and what they say of themselves, errors, peers, and stream memory operations, which
 * are the driver's. FO_EMU_DEVICES devices (16), FO_EMU_NO_DRIVER=1 for a machine without a driver,
 * FO_EMU_PEER=0 for one whose devices can't reach each other.
 */
#include "dev/emu/exec.h"
#include "dev/emu/runtime.h"
#include <cuda.h>
#include <stdio.h>

namespace emu {
namespace {
thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;

// what every device says of itself: about a small H100
enum { SMS = 4, MAJOR = 9, MINOR = 0, CLOCK_KHZ = 1000000, L2_NBYTES = 50 << 20 };
enum { DRIVER_VERSION = CUDART_VERSION };

struct ErrorText {
    cudaError_t error;
    const char *name, *text;
};
#define EMU_ERROR(error, text) \
    { error, #error, text }
const ErrorText ERRORS[] = {
    EMU_ERROR(cudaSuccess, "no error"),
    EMU_ERROR(cudaErrorInvalidValue, "invalid argument"),
    EMU_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    EMU_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    EMU_ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    EMU_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    EMU_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    EMU_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    EMU_ERROR(cudaErrorNotReady, "device not ready"),
    EMU_ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    EMU_ERROR(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    EMU_ERROR(cudaErrorNotSupported, "operation not supported"),
    EMU_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    EMU_ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    EMU_ERROR(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    EMU_ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    EMU_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    EMU_ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    EMU_ERROR(cudaErrorStreamCaptureWrongThread, "capture ended in a thread other than the one it began in"),
    EMU_ERROR(cudaErrorCapturedEvent,
              "operation not permitted on an event last recorded in a capturing stream"),
    EMU_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
};
#undef EMU_ERROR

const ErrorText& error_text(cudaError_t e) {
    static const ErrorText UNKNOWN = {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"};
    for (const ErrorText& t : ERRORS) {
        if (t.error == e) { return t; }
    }
    return UNKNOWN;
}

// ---- stream memory operations -----------------------------------------------------------------------------
struct WriteValueOp : Op {
    uint32_t *address, value;
    bool poll() override {
        if (emu_check_flag_write) { emu_check_flag_write(address, value); }
        __atomic_store_n(address, value, __ATOMIC_RELEASE);
        return true;
    }
};

struct WaitValueOp : Op {
    uint32_t *address, value;
    unsigned condition;
    bool poll() override {
        uint32_t now = __atomic_load_n(address, __ATOMIC_ACQUIRE);
        bool met = condition == CU_STREAM_WAIT_VALUE_EQ ? now == value : (int32_t)(now - value) >= 0;
        if (met && emu_check_flag_wait) {
            emu_check_flag_wait(address, value, condition != CU_STREAM_WAIT_VALUE_EQ);
        }
        return met;
    }
};

// a fill of few words is also a store by which a program may release a stream that waits for it
struct FillWordsOp : Op {
    uint32_t *address, value;
    size_t nwords;
    enum { MAX_FLAGS = 64 };
    bool poll() override {
        touch_write(address, nwords * 4);
        for (size_t i = 0; i < nwords; i++) {
            if (emu_check_flag_write && nwords <= MAX_FLAGS) { emu_check_flag_write(address + i, value); }
            __atomic_store_n(address + i, value, __ATOMIC_RELEASE);
        }
        return true;
    }
};

// may streams of this device use the word? Its own memory, pinned memory, and that of enabled peers
bool reachable(int from, const void* address, size_t nbytes) {
    int found = find_memory(address, nbytes);
    return (uintptr_t)address % 4 == 0 &&
           (found == PINNED || found == from || (found >= 0 && runtime().peer[from][found]));
}

CUresult result(cudaError_t e) {
    return (CUresult)e; // those that can come here have the same number in both
}

CUresult stream_batch_mem_op(CUstream s, unsigned n, CUstreamBatchMemOpParams* ops, unsigned flags) {
    require_stream("cuStreamBatchMemOp", s);
    if (n == 0 || n > 256 || flags != 0) { return CUDA_ERROR_INVALID_VALUE; }
    for (unsigned i = 0; i < n; i++) {
        bool write = ops[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
        if (!write && ops[i].operation != CU_STREAM_MEM_OP_WAIT_VALUE_32) { return CUDA_ERROR_NOT_SUPPORTED; }
        const void* address = (const void*)(write ? ops[i].writeValue.address : ops[i].waitValue.address);
        if (!reachable(s->device, address, 4)) { return CUDA_ERROR_INVALID_VALUE; }
        if (!write && ops[i].waitValue.flags > CU_STREAM_WAIT_VALUE_EQ) { return CUDA_ERROR_NOT_SUPPORTED; }
    }
    for (unsigned i = 0; i < n; i++) {
        cudaError_t e;
        if (ops[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
            WriteValueOp* op = new WriteValueOp();
            op->what = "write value";
            op->address = (uint32_t*)ops[i].writeValue.address;
            op->value = ops[i].writeValue.value;
            e = enqueue("cuStreamBatchMemOp", s, op);
        } else {
            WaitValueOp* op = new WaitValueOp();
            op->what = "wait value";
            op->address = (uint32_t*)ops[i].waitValue.address;
            op->value = ops[i].waitValue.value;
            op->condition = ops[i].waitValue.flags;
            e = enqueue("cuStreamBatchMemOp", s, op);
        }
        if (e != cudaSuccess) { return result(e); }
    }
    return CUDA_SUCCESS;
}

CUresult memset_d32(CUdeviceptr dst, unsigned value, size_t nwords, CUstream s) {
    require_stream("cuMemsetD32Async", s);
    if (!reachable(s->device, (void*)dst, nwords * 4)) { return CUDA_ERROR_INVALID_VALUE; }
    FillWordsOp* op = new FillWordsOp();
    op->what = "memset";
    op->address = (uint32_t*)dst;
    op->value = value;
    op->nwords = nwords;
    return result(enqueue("cuMemsetD32Async", s, op));
}

CUresult error_string(CUresult e, const char** text) {
    *text = error_text((cudaError_t)e).text;
    return CUDA_SUCCESS;
}

cudaError_t entry_point(const char* symbol, void** function, cudaDriverEntryPointQueryResult* status) {
    static const struct {
        const char* symbol;
        void* function;
    } KNOWN[] = {{"cuStreamBatchMemOp", (void*)stream_batch_mem_op},
                 {"cuMemsetD32Async", (void*)memset_d32},
                 {"cuGetErrorString", (void*)error_string}};
    *function = nullptr;
    for (auto& k : KNOWN) {
        if (runtime().driver && !strcmp(k.symbol, symbol)) { *function = k.function; }
    }
    if (status) { *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound; }
    return cudaSuccess;
}

// an error if there is no such device
cudaError_t find_device(int ordinal) {
    Runtime& rt = runtime();
    if (!rt.driver) { return fail(cudaErrorInsufficientDriver); }
    if (rt.ndevices == 0) { return fail(cudaErrorNoDevice); }
    return ordinal < 0 || ordinal >= rt.ndevices ? fail(cudaErrorInvalidDevice) : cudaSuccess;
}
} // namespace

cudaError_t fail(cudaError_t e) {
    if (e != cudaSuccess) { last_error = e; }
    return e;
}

int current_device() {
    return device;
}
} // namespace emu

using namespace emu;

extern "C" {
// ---- errors and versions ----------------------------------------------------------------------------------
cudaError_t cudaGetLastError(void) {
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

const char* cudaGetErrorString(cudaError_t e) {
    return error_text(e).text;
}

const char* cudaGetErrorName(cudaError_t e) {
    return error_text(e).name;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = runtime().driver ? DRIVER_VERSION : 0;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* status) {
    return entry_point(symbol, function, status);
}
#endif

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* status) {
    return entry_point(symbol, function, status);
}

// ---- devices ----------------------------------------------------------------------------------------------
cudaError_t cudaGetDeviceCount(int* n) {
    *n = 0;
    cudaError_t e = find_device(0);
    if (e == cudaSuccess) { *n = runtime().ndevices; }
    return e;
}

cudaError_t cudaSetDevice(int ordinal) {
    cudaError_t e = find_device(ordinal);
    if (e == cudaSuccess) { device = ordinal; }
    return e;
}

cudaError_t cudaGetDevice(int* ordinal) {
    *ordinal = device;
    return find_device(device);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int ordinal) {
    cudaError_t e = find_device(ordinal);
    if (e != cudaSuccess) { return e; }
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "emulated GPU");
    p->major = MAJOR;
    p->minor = MINOR;
    p->multiProcessorCount = SMS;
    p->warpSize = 32;
    p->maxThreadsPerBlock = MAX_THREADS;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = MAX_SHARED_NBYTES;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->totalGlobalMem = runtime().memory_nbytes;
    p->l2CacheSize = L2_NBYTES;
    p->memoryBusWidth = 5120;
    p->asyncEngineCount = 3;
    p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = p->streamPrioritiesSupported = 1;
    p->pciBusID = ordinal + 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
    cudaError_t e = find_device(ordinal);
    if (e != cudaSuccess) { return e; }
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = MAJOR; break;
    case cudaDevAttrComputeCapabilityMinor: *value = MINOR; break;
    case cudaDevAttrMultiProcessorCount: *value = SMS; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = MAX_THREADS; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = MAX_SHARED_NBYTES; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = L2_NBYTES; break;
    case cudaDevAttrClockRate: *value = CLOCK_KHZ; break;
    case cudaDevAttrMemoryClockRate: *value = CLOCK_KHZ; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrAsyncEngineCount: *value = 3; break;
    case cudaDevAttrPciBusId: *value = ordinal + 1; break;
    default: return fail(cudaErrorNotSupported);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* bus, int nbytes, int ordinal) {
    enter("cudaDeviceGetPCIBusId");
    snprintf(bus, static_cast<size_t>(nbytes), "0000:%02X:00.0", ordinal);
    return find_device(ordinal);
}

// there is no profiler to tell
cudaError_t cudaProfilerStart() {
    enter("cudaProfilerStart");
    return cudaSuccess;
}

cudaError_t cudaProfilerStop() {
    enter("cudaProfilerStop");
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return find_device(device);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int ordinal, int peer) {
    cudaError_t e = find_device(ordinal);
    e = e == cudaSuccess ? find_device(peer) : e;
    *can = e == cudaSuccess && ordinal != peer && runtime().peers;
    return e;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    Runtime& rt = enter("cudaDeviceEnablePeerAccess");
    cudaError_t e = find_device(peer);
    if (e != cudaSuccess) { return e; }
    if (flags != 0) { return fail(cudaErrorInvalidValue); }
    if (peer == device) { return fail(cudaErrorInvalidDevice); }
    if (!rt.peers) { return fail(cudaErrorPeerAccessUnsupported); }
    Guard guard(rt.lock);
    if (rt.peer[device][peer]) { return fail(cudaErrorPeerAccessAlreadyEnabled); }
    rt.peer[device][peer] = true;
    if (emu_check_peer) { emu_check_peer(device, peer); }
    return cudaSuccess;
}
}
