/* device.cu -- devices, memory, streams, events and graphs of the cuda device (fo.h).
 *
 * A stream is a non-blocking stream of CUDA; nothing is ever queued on the legacy one. What the host wants to
 * know of times (how long a stream stood waiting) is taken by pairs of timing events from a pool, and added
 * up
 * when the host next waits for the stream.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "flashoverlap/cuda/comm.h"
#if __has_include(<nvtx3/nvToolsExt.h>) && !FO_EMU
#include <nvtx3/nvToolsExt.h>
#define RANGE_PUSH(name) nvtxRangePushA(name)
#define RANGE_POP()      nvtxRangePop()
#else
#define RANGE_PUSH(name) (void)(name)
#define RANGE_POP()      (void)0
#endif

extern "C" cudaError_t CUDARTAPI cudaProfilerStart(void); // not every toolkit brings cuda_profiler_api.h
extern "C" cudaError_t CUDARTAPI cudaProfilerStop(void);

// fo_malloc's blocks, so that fo_free knows their sizes
typedef struct Block {
    void* p;
    size_t nbytes;
    struct Block* next;
} Block;

struct FoSpanPending {
    cudaEvent_t begin, end; // with times
    double* waited_ms;      // that the stretch is added to, or NULL
    FoSpan span;            // what the timeline is told of it; its times are not known yet
    int traced;
    FoStream* stream;
    FoSpanPending* next;
};

// stretches whose times are known, the oldest first from `taken` on
struct FoSpans {
    FoSpan* span;
    int n, room, taken;
};

struct FoEvent {
    cudaEvent_t event; // made when it is first recorded, on the rank's device
    FoGraph* graph;    // that it was last recorded in, else NULL
};

struct FoGraph {
    FoDevice* device;
    FoStream* stream; // that it is launched on
    cudaGraphExec_t exec;
    cudaEvent_t done, fork;
    FoSpanPending* timed; // stretches of each launch
    int launched;         // and its times not yet added up
    FoGraph* next;
};

// ---- device -----------------------------------------------------------------------------------------------
static pthread_once_t environment_once = PTHREAD_ONCE_INIT;

/* CUDA reads it when a process first uses a GPU. With one connection all streams share a queue: an exchange
 * that waits for a peer would hold up the computation behind it.
 */
static void set_environment(void) {
    const char* n = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (n && atoi(n) == 1) {
        fo_quit(
            1,
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets an exchange hold up computation: unset it, or set 2 to 32");
    }
    if (!n) { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1); }
}

static int count_devices(void) {
    int n = 0, driver = 0;
    pthread_once(&environment_once, set_environment);
    cudaError_t err = cudaGetDeviceCount(&n);
    cudaDriverGetVersion(&driver);
    if (err == cudaErrorInsufficientDriver && driver > 0) {
        fo_quit(1,
                "the NVIDIA driver is for CUDA %d.%d, this program for %d.%d: a newer driver, or build with "
                "DEVICE=cpu",
                driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    }
    if (err != cudaSuccess || n == 0) {
        fo_quit(1, "no NVIDIA GPU here (%s): build with DEVICE=cpu, the default without CUDA",
                err != cudaSuccess ? cudaGetErrorString(err) : "the driver finds none");
    }
    return n;
}

static void describe(FoDevice* d) {
    cudaDeviceProp p;
    CUDA(cudaGetDeviceProperties(&p, d->ordinal));
    d->nsm = p.multiProcessorCount;
    d->sm_major = p.major;
    if (p.major < 8) {
        fo_quit(1, "GPU %d (%s) has compute capability %d.%d, this program wants 8.0 or newer", d->ordinal,
                p.name, p.major, p.minor);
    }
    snprintf(d->name, sizeof d->name, "cuda, %.60s, %d SMs, %s, %s", p.name, d->nsm, fo__matmul_version(),
             fo__attention_version(d));
}

int fo__ordinal(int rank, int nlocal) {
    const char* share = getenv("FO_SHARE_GPUS");
    int n = count_devices();
    if (nlocal > n && !(share && atoi(share))) {
        fo_quit(1,
                "%d ranks on this machine, %d GPU%s: start %d rank%s, or set FO_SHARE_GPUS=1 to let ranks "
                "that are threads share one",
                nlocal, n, n == 1 ? "" : "s", n, n == 1 ? "" : "s");
    }
    return fo__local_rank(rank) % n;
}

FoDevice* fo_device_open(int rank, int nlocal) {
    int n = count_devices();
    FoDevice* d = (FoDevice*)calloc(1, sizeof *d);
    fo_require(d != NULL, "out of memory");
    d->rank = rank;
    d->ordinal = fo__ordinal(rank, nlocal);
    d->nsharing = (nlocal + n - 1) / n;
    CUDA(cudaSetDevice(d->ordinal));
    describe(d);
    const char* attention = getenv("FO_ATTENTION");
    d->own_attention = attention && strcmp(attention, "own") == 0;
    d->stream = fo_stream_create(d, "memory");
    return d;
}

void fo_device_close(FoDevice* d) {
    if (d->matmul) { fo__matmul_free(d->matmul); }
    if (d->attention) { fo__attention_free(d->attention); }
    fo_stream_destroy(d->stream);
    if (d->epoch) { CUDA(cudaEventDestroy(d->epoch)); }
    free(d);
}

const char* fo_device_name(const FoDevice* d) {
    return d->name;
}

const char* fo_device_hint(const FoDevice* d) {
    return d->hint[0] ? d->hint : NULL;
}

// TFLOP/s of dense bf16 with fp32 sums, of NVIDIA's data sheets
static const struct {
    const char* name;
    double tflops;
} PEAKS[] = {{"B200", 2250.0}, {"B100", 1750.0}, {"GH200", 989.0}, {"H200", 989.0},   {"H100 PCIe", 756.0},
             {"H100", 989.0},  {"H800", 989.0},  {"A100", 312.0},  {"A800", 312.0},   {"RTX 4090", 165.2},
             {"L40S", 362.0},  {"A40", 149.7},   {"A6000", 154.8}, {"RTX 3090", 71.0}};

double fo_device_peak_tflops(FoDevice* d) {
    for (size_t i = 0; i < sizeof PEAKS / sizeof *PEAKS && d->peak_tflops == 0.0 && FO_FLOATX == FO_BF16;
         i++) {
        if (strstr(d->name, PEAKS[i].name)) { d->peak_tflops = PEAKS[i].tflops; }
    }
    if (d->peak_tflops == 0.0) { d->peak_tflops = fo__matmul_tflops(d); }
    return d->peak_tflops;
}

void fo_device_fuse_gelu(FoDevice* d, int level) {
    d->fuse_gelu = level;
}

void fo_device_deterministic(FoDevice* d, int on) {
    d->deterministic = on;
}

void fo_device_tf32(FoDevice* d, int on) {
    d->tf32 = on;
}

void fo_device_profiler(FoDevice* d, int on) {
    (void)d;
    CUDA(on ? cudaProfilerStart() : cudaProfilerStop());
}

int fo_device_emulates(void) {
    return 0;
}

void fo_device_pace(FoDevice* d, double tflops) {
    fo_require(tflops == 0.0, "a GPU is not paced (%g TFLOP/s, device '%s'): build with DEVICE=cpu for that",
               tflops, d->name);
}

// ---- what NVML tells --------------------------------------------------------------------------------------
/* The driver's library, which need not be there, and whose header many toolkits lack: opened when it is asked
 * (and kept by the system from then on), its functions declared here. All return 0 on success.
 */
typedef struct {
    int (*init)(void);
    int (*by_bus)(const char* bus, void** gpu);
    int (*clock)(void* gpu, int domain, unsigned* mhz); // 1: SMs, 2: memory
    int (*power)(void* gpu, unsigned* milliwatts);
    int (*limit)(void* gpu, unsigned* milliwatts);
    int (*temperature)(void* gpu, int sensor, unsigned* celsius); // 0: the GPU's
    int (*slowed)(void* gpu, unsigned long long* reasons);
} Nvml;

// NULL, or what is missing
static const char* nvml_open(Nvml* n) {
    void* lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!lib) { return "there is no libnvidia-ml.so.1"; }
    const struct {
        void* at;
        const char* name;
    } wanted[] = {{&n->init, "nvmlInit_v2"},
                  {&n->by_bus, "nvmlDeviceGetHandleByPciBusId_v2"},
                  {&n->clock, "nvmlDeviceGetClockInfo"},
                  {&n->power, "nvmlDeviceGetPowerUsage"},
                  {&n->limit, "nvmlDeviceGetEnforcedPowerLimit"},
                  {&n->temperature, "nvmlDeviceGetTemperature"},
                  {&n->slowed, "nvmlDeviceGetCurrentClocksThrottleReasons"}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void* function = dlsym(lib, wanted[i].name);
        if (!function) { return wanted[i].name; }
        memcpy(wanted[i].at, &function, sizeof function);
    }
    return n->init() == 0 ? NULL : "nvmlInit_v2 fails";
}

static void name_reasons(unsigned long long reasons, char* text, size_t nbytes) {
    static const struct {
        unsigned long long bits;
        const char* name;
    } known[] = {{0x4, "power cap"},
                 {0x20 | 0x40, "heat"},
                 {0x8 | 0x80, "hardware"},
                 {0x2 | 0x100, "set clocks"},
                 {0x10, "sync boost"}};
    snprintf(text, nbytes, "nothing");
    for (size_t i = 0, at = 0; i < sizeof known / sizeof *known; i++) {
        if (!(reasons & known[i].bits) || at >= nbytes) { continue; }
        at += (size_t)snprintf(text + at, nbytes - at, "%s%s", at ? ", " : "", known[i].name);
    }
}

void fo_device_state(const FoDevice* d, char* text, size_t nbytes) {
    Nvml n;
    char bus[32] = "", slowed[96];
    void* gpu = NULL;
    unsigned sm = 0, memory = 0, power = 0, limit = 0, celsius = 0;
    unsigned long long reasons = 0;
    const char* missing = nvml_open(&n);
    if (!missing &&
        (cudaDeviceGetPCIBusId(bus, sizeof bus, d->ordinal) != cudaSuccess || n.by_bus(bus, &gpu))) {
        missing = "it does not know the GPU";
    }
    if (missing) {
        snprintf(text, nbytes, "GPU %d: clocks and power are not known: %s", d->ordinal, missing);
        return;
    }
    // what a board doesn't have stays 0
    (void)(n.clock(gpu, 1, &sm) + n.clock(gpu, 2, &memory) + n.power(gpu, &power) + n.limit(gpu, &limit));
    (void)(n.temperature(gpu, 0, &celsius) + n.slowed(gpu, &reasons));
    name_reasons(reasons, slowed, sizeof slowed);
    snprintf(text, nbytes, "GPU %d: SMs %u MHz, memory %u MHz, %u of %u W, %u C, slowed down by %s",
             d->ordinal, sm, memory, power / 1000, limit / 1000, celsius, slowed);
}

// ---- memory -----------------------------------------------------------------------------------------------
static void check_alloc(const FoDevice* d, cudaError_t err, size_t nbytes, const char* what) {
    if (err == cudaErrorMemoryAllocation) {
        size_t nfree = 0, total = 0;
        cudaMemGetInfo(&nfree, &total);
        fo_quit(
            1,
            "rank %d: no %zu MiB on GPU %d for %s: this rank has %zu MiB in arrays, %zu of %zu MiB are free; "
            "a smaller batch, more recomputation or more ranks would take less",
            d->rank, nbytes >> 20, d->ordinal, what, d->nbytes >> 20, nfree >> 20, total >> 20);
    }
    CUDA(err);
}

void* fo__alloc(FoDevice* d, size_t nbytes, const char* what) {
    void* p = NULL;
    check_alloc(d, cudaMalloc(&p, nbytes), nbytes, what);
    return p;
}

void* fo_malloc(FoDevice* d, size_t nbytes) {
    void* p = NULL;
    Block* b = (Block*)malloc(sizeof *b);
    fo_require(b != NULL, "out of memory");
    size_t n = nbytes > 0 ? nbytes : 1;
    p = fo__nccl_malloc(n);
    cudaError_t err = p ? cudaSuccess : cudaMalloc(&p, n);
    check_alloc(d, err, nbytes, "an array");
    b->p = p, b->nbytes = nbytes, b->next = d->blocks;
    d->blocks = b;
    fo_zero(p, nbytes, d->stream);
    fo_stream_sync(d->stream);
    d->nbytes += nbytes;
    if (d->nbytes > d->peak_nbytes) { d->peak_nbytes = d->nbytes; }
    return p;
}

void fo_free(FoDevice* d, void* p) {
    if (!p) { return; }
    Block** at = &d->blocks;
    while (*at && (*at)->p != p) {
        at = &(*at)->next;
    }
    Block* b = *at;
    fo_require(b != NULL, "memory that this device did not hand out");
    *at = b->next;
    d->nbytes -= b->nbytes;
    if (!fo__nccl_free(d, p)) { CUDA(cudaFree(p)); }
    free(b);
}

size_t fo_device_nbytes(const FoDevice* d) {
    return d->nbytes;
}
size_t fo_device_peak_nbytes(const FoDevice* d) {
    return d->peak_nbytes;
}

// less what is had later beside fo_malloc: workspaces, scratch, a measuring's buffers, what libraries load
size_t fo_device_free_nbytes(const FoDevice* d) {
    size_t nfree = 0, total = 0;
    CUDA(cudaMemGetInfo(&nfree, &total));
    nfree /= (size_t)d->nsharing;
    const size_t later = ((size_t)384 << 20) + nfree / 32;
    return nfree > later ? nfree - later : 0;
}

void fo_upload(void* dst, const void* host_src, size_t nbytes, FoStream* s) {
    FO_OP(s);
    if (nbytes > 0) { CUDA(cudaMemcpyAsync(dst, host_src, nbytes, cudaMemcpyHostToDevice, s->stream)); }
}

void fo_download(void* host_dst, const void* src, size_t nbytes, FoStream* s) {
    FO_OP(s);
    if (nbytes > 0) { CUDA(cudaMemcpyAsync(host_dst, src, nbytes, cudaMemcpyDeviceToHost, s->stream)); }
}

void fo_copy(void* dst, const void* src, size_t nbytes, FoStream* s) {
    FO_OP(s);
    if (nbytes > 0) { CUDA(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDeviceToDevice, s->stream)); }
}

void fo_zero(void* dst, size_t nbytes, FoStream* s) {
    FO_OP(s);
    if (nbytes > 0) { CUDA(cudaMemsetAsync(dst, 0, nbytes, s->stream)); }
}

// graphs go on using it; otherwise cudaFree waits for what still does
static void drop_scratch(FoStream* s) {
    FoDevice* d = s->device;
    if (!s->scratch) { return; }
    if (!d->graphs) {
        CUDA(cudaFree(s->scratch));
        return;
    }
    Block* b = (Block*)malloc(sizeof *b);
    fo_require(b != NULL, "out of memory");
    b->p = s->scratch, b->nbytes = s->scratch_nbytes, b->next = d->old_scratch;
    d->old_scratch = b;
}

void* fo__scratch(FoStream* s, size_t nbytes) {
    if (nbytes > s->scratch_nbytes) {
        fo_require(!s->device->capturing,
                   "an operation of stream '%s' wants %zu bytes of scratch in a graph, %zu are there",
                   s->name, nbytes, s->scratch_nbytes);
        drop_scratch(s);
        s->scratch_nbytes = (nbytes + 0xfffff) & ~(size_t)0xfffff;
        s->scratch = fo__alloc(s->device, s->scratch_nbytes, "an operation's scratch");
    }
    return s->scratch;
}

// ---- times ------------------------------------------------------------------------------------------------
static FoSpanPending* span_begin(FoStream* s, FoSpanKind kind, const char* name, double* waited_ms) {
    FoDevice* d = s->device;
    FoSpanPending* x = d->spans;
    if (x) {
        d->spans = x->next;
    } else {
        x = (FoSpanPending*)calloc(1, sizeof *x);
        fo_require(x != NULL, "out of memory");
        CUDA(cudaEventCreateWithFlags(&x->begin, cudaEventDefault));
        CUDA(cudaEventCreateWithFlags(&x->end, cudaEventDefault));
    }
    x->stream = s;
    x->waited_ms = waited_ms;
    x->traced = d->tracing;
    memset(&x->span, 0, sizeof x->span);
    x->span.kind = kind, x->span.name = name, x->span.label = s->label;
    x->span.messages = s->messages;
    memset(&s->messages, 0, sizeof s->messages);
    const unsigned flags = d->capturing ? cudaEventRecordExternal : cudaEventRecordDefault;
    CUDA(cudaEventRecordWithFlags(x->begin, s->stream, flags));
    return x;
}

static void span_end(FoSpanPending* x) {
    FoStream* s = x->stream;
    FoGraph* g = s->device->capturing;
    CUDA(cudaEventRecordWithFlags(x->end, s->stream, g ? cudaEventRecordExternal : cudaEventRecordDefault));
    FoSpanPending** at = g ? &g->timed : s->pending ? &s->last_pending->next : &s->pending;
    x->next = g ? *at : NULL;
    *at = x;
    if (!g) { s->last_pending = x; }
}

static void keep_span(FoSpanPending* x, double seconds) {
    FoStream* s = x->stream;
    FoSpans* k = s->kept;
    float ms = 0.0f;
    if (!k) {
        k = s->kept = (FoSpans*)calloc(1, sizeof *k);
        fo_require(k != NULL, "out of memory");
    }
    if (k->n == k->room) {
        k->room = 2 * k->room + 256;
        k->span = (FoSpan*)realloc(k->span, (size_t)k->room * sizeof *k->span);
        fo_require(k->span != NULL, "out of memory");
    }
    CUDA(cudaEventElapsedTime(&ms, s->device->epoch, x->begin));
    x->span.start_s = s->device->epoch_s + 1e-3 * (double)ms;
    x->span.seconds = seconds;
    int i =
        k->n++; // those of a graph are read when its stream is waited for, later ones may have come already
    for (; i > k->taken && k->span[i - 1].start_s > x->span.start_s; i--) {
        k->span[i] = k->span[i - 1];
    }
    k->span[i] = x->span;
}

static void add_up(FoSpanPending* x) {
    float ms = 0.0f;
    CUDA(cudaEventElapsedTime(&ms, x->begin, x->end));
    if (x->waited_ms) { *x->waited_ms += (double)ms; }
    if (x->traced) { keep_span(x, 1e-3 * (double)ms); }
}

static void free_spans(FoSpanPending* x) {
    while (x) {
        FoSpanPending* next = x->next;
        CUDA(cudaEventDestroy(x->begin));
        CUDA(cudaEventDestroy(x->end));
        free(x);
        x = next;
    }
}

OpScope::OpScope(FoStream* s, const char* name) : span(NULL) {
    RANGE_PUSH(name);
    if (s->device->tracing) { span = span_begin(s, FO_SPAN_OPERATION, name, NULL); }
}

OpScope::~OpScope() {
    if (span) { span_end(span); }
    RANGE_POP();
}

void fo_device_trace(FoDevice* d, int on) {
    d->tracing = on;
    if (!on) { return; }
    if (!d->epoch) { CUDA(cudaEventCreateWithFlags(&d->epoch, cudaEventDefault)); }
    fo_stream_sync(d->stream);
    // again if the host was late: the event is recorded some time between the two looks at its clock
    double before = 0.0, after = 1.0;
    for (int again = 0; after - before > 200e-6 && again < 20; again++) {
        before = fo_now();
        CUDA(cudaEventRecord(d->epoch, d->stream->stream));
        fo_stream_sync(d->stream);
        after = fo_now();
        d->epoch_s = 0.5 * (before + after);
    }
}

int fo_stream_spans(FoStream* s, FoSpan spans[], int max) {
    FoSpans* k = s->kept;
    int n = k ? k->n - k->taken : 0;
    n = n < max ? n : max;
    if (n > 0) {
        memcpy(spans, k->span + k->taken, (size_t)n * sizeof *spans);
        k->taken += n;
    }
    if (k && k->taken == k->n) { k->taken = k->n = 0; }
    return n;
}

const char* fo_stream_label(FoStream* s, const char* label) {
    const char* before = s->label;
    s->label = label;
    return before;
}

void fo_stream_messages(FoStream* s, FoMessages m) {
    s->messages = m;
}

// ---- words in memory --------------------------------------------------------------------------------------
// The driver's function comes through the runtime: a program linked with libcuda does not even start without
// it.
void fo__mem_ops(FoStream* s, unsigned n, CUstreamBatchMemOpParams ops[]) {
    typedef CUresult (*BatchMemOp)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
    const char* const name = "cuStreamBatchMemOp";
    FoDevice* d = s->device;
    if (!d->batch_mem_op) {
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        CUDA(cudaGetDriverEntryPointByVersion(name, &d->batch_mem_op, 12000, cudaEnableDefault, &found));
#else
        CUDA(cudaGetDriverEntryPoint(name, &d->batch_mem_op, cudaEnableDefault, &found));
#endif
        fo_require(found == cudaDriverEntryPointSuccess, "the driver has no %s", name);
    }
    CUresult err = ((BatchMemOp)d->batch_mem_op)((CUstream)s->stream, n, ops, 0);
    fo_require(err == CUDA_SUCCESS, "%s failed with %d", name, (int)err);
}

static void mem_op(FoStream* s, void* word, uint32_t value, CUstreamBatchMemOpType type) {
    CUstreamBatchMemOpParams p;
    memset(&p, 0, sizeof p);
    p.operation = type;
    if (type == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
        p.writeValue.address = (CUdeviceptr)(uintptr_t)word;
        p.writeValue.value = value;
    } else {
        p.waitValue.address = (CUdeviceptr)(uintptr_t)word;
        p.waitValue.value = value;
        p.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    }
    fo__mem_ops(s, 1, &p);
}

void fo__write32(FoStream* s, void* word, uint32_t value) {
    mem_op(s, word, value, CU_STREAM_MEM_OP_WRITE_VALUE_32);
}

void fo__wait32(FoStream* s, void* word, uint32_t value) {
    mem_op(s, word, value, CU_STREAM_MEM_OP_WAIT_VALUE_32);
}

// ---- calls of the host ------------------------------------------------------------------------------------
typedef struct Call {
    void (*fn)(void* args);
    alignas(16) unsigned char args[FO_MAX_CALL_ARGS];
    struct Call* next;
} Call;

/* A thread of the stream's own, since CUDA may run host functions of all streams one after the other, and a
 * test's may wait for another's. The stream writes how many calls it has come to, and waits for as many to
 * have returned.
 */
struct FoCaller {
    pthread_t thread;
    pthread_mutex_t mutex; // of what follows, to `quit`
    pthread_cond_t cond;
    Call *first, *last;
    int quit;
    uint32_t nqueued;          // of the host's thread
    uint32_t *started, *ended; // pinned memory, which the stream writes and waits for
};

static Call* next_call(FoCaller* c) {
    pthread_mutex_lock(&c->mutex);
    while (!c->first && !c->quit) {
        pthread_cond_wait(&c->cond, &c->mutex);
    }
    Call* call = c->first;
    if (call) { c->first = call->next; }
    pthread_mutex_unlock(&c->mutex);
    return call;
}

static void* caller_main(void* p) {
    FoCaller* c = (FoCaller*)p;
    Call* call;
    for (uint32_t k = 1; (call = next_call(c)) != NULL; k++) {
        while (__atomic_load_n(c->started, __ATOMIC_ACQUIRE) < k) {
            usleep(50);
        }
        call->fn(call->args);
        free(call);
        __atomic_store_n(c->ended, k, __ATOMIC_RELEASE);
    }
    return NULL;
}

static FoCaller* caller_open(void) {
    FoCaller* c = (FoCaller*)calloc(1, sizeof *c);
    fo_require(c != NULL, "out of memory");
    CUDA(cudaHostAlloc((void**)&c->started, 2 * sizeof *c->started, cudaHostAllocPortable));
    c->ended = c->started + 1;
    *c->started = *c->ended = 0;
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->cond, NULL);
    int err = pthread_create(&c->thread, NULL, caller_main, c);
    fo_require(err == 0, "no thread for calls of the host: %s", strerror(err));
    return c;
}

static void caller_close(FoCaller* c) {
    if (!c) { return; }
    pthread_mutex_lock(&c->mutex);
    c->quit = 1;
    pthread_cond_signal(&c->cond);
    pthread_mutex_unlock(&c->mutex);
    pthread_join(c->thread, NULL);
    pthread_mutex_destroy(&c->mutex);
    pthread_cond_destroy(&c->cond);
    CUDA(cudaFreeHost(c->started));
    free(c);
}

void fo_stream_call(FoStream* s, void (*fn)(void* args), const void* args, size_t nbytes) {
    fo_require(nbytes <= FO_MAX_CALL_ARGS, "a call with %zu bytes of arguments, at most %d", nbytes,
               FO_MAX_CALL_ARGS);
    fo_require(!s->device->capturing, "a call of the host in a graph, on stream '%s'", s->name);
    if (!s->caller) { s->caller = caller_open(); }
    FoCaller* c = s->caller;
    Call* call = (Call*)calloc(1, sizeof *call);
    fo_require(call != NULL, "out of memory");
    call->fn = fn;
    memcpy(call->args, args, nbytes);
    pthread_mutex_lock(&c->mutex);
    if (c->first) {
        c->last->next = call;
    } else {
        c->first = call;
    }
    c->last = call;
    pthread_cond_signal(&c->cond);
    pthread_mutex_unlock(&c->mutex);
    c->nqueued++;
    fo__write32(s, c->started, c->nqueued);
    fo__wait32(s, c->ended, c->nqueued);
}

// ---- streams ----------------------------------------------------------------------------------------------
FoStream* fo_stream_create(FoDevice* d, const char* name) {
    FoStream* s = (FoStream*)calloc(1, sizeof *s);
    int lowest = 0, highest = 0;
    fo_require(s != NULL, "out of memory");
    s->device = d;
    snprintf(s->name, sizeof s->name, "%s", name);
    CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA(cudaStreamCreateWithPriority(&s->stream, cudaStreamNonBlocking,
                                      strncmp(name, "comm", 4) == 0 ? highest : lowest));
#if FO_EMU
    fo_emu_name_stream(s->stream, name);
#endif
    s->next = d->streams;
    d->streams = s;
    return s;
}

void fo_stream_destroy(FoStream* s) {
    FoDevice* d = s->device;
    FoStream** at = &d->streams;
    fo_stream_sync(s);
    while (*at != s) {
        at = &(*at)->next;
    }
    *at = s->next;
    if (!d->streams) { // the last one: nothing is timed any more
        free_spans(d->spans);
        d->spans = NULL;
    }
    caller_close(s->caller);
    if (s->kept) { free(s->kept->span); }
    free(s->kept);
    if (s->scratch) { CUDA(cudaFree(s->scratch)); }
    if (s->workspace) { CUDA(cudaFree(s->workspace)); }
    CUDA(cudaStreamDestroy(s->stream));
    free(s);
}

void fo_stream_sync(FoStream* s) {
    CUDA(cudaStreamSynchronize(s->stream));
    while (s->pending) {
        FoSpanPending* x = s->pending;
        s->pending = x->next;
        add_up(x);
        x->next = s->device->spans;
        s->device->spans = x;
    }
    for (FoGraph* g = s->device->graphs; g; g = g->next) {
        if (g->launched && g->stream == s) {
            g->launched = 0;
            for (FoSpanPending* x = g->timed; x; x = x->next) {
                add_up(x);
            }
        }
    }
}

FoDevice* fo_stream_device(const FoStream* s) {
    return s->device;
}

// ---- events -----------------------------------------------------------------------------------------------
FoEvent* fo_event_create(void) {
    FoEvent* e = (FoEvent*)calloc(1, sizeof *e);
    fo_require(e != NULL, "out of memory");
    return e;
}

void fo_event_destroy(FoEvent* e) {
    if (e->event) { CUDA(cudaEventDestroy(e->event)); }
    free(e);
}

void fo_event_record(FoEvent* e, FoStream* s) {
    if (!e->event) { CUDA(cudaEventCreateWithFlags(&e->event, cudaEventDisableTiming)); }
    CUDA(cudaEventRecord(e->event, s->stream));
    e->graph = s->device->capturing;
}

void fo_stream_wait(FoStream* s, FoEvent* e, double* waited_ms) {
    // What was recorded outside this graph came before it, what was recorded in a graph is behind its launch:
    // fo_graph_launch sees to both
    if (!e->event || e->graph != s->device->capturing) { return; }
    FoSpanPending* x = waited_ms ? span_begin(s, FO_SPAN_WAIT, "wait", waited_ms) : NULL;
    CUDA(cudaStreamWaitEvent(s->stream, e->event, 0));
    if (x) { span_end(x); }
}

// ---- graphs -----------------------------------------------------------------------------------------------
int fo_device_graphs(void) {
    return 1;
}

// all that is queued on the rank's streams so far comes before what is queued on s from now on
static void join_all(FoStream* s, cudaEvent_t event) {
    for (FoStream* t = s->device->streams; t; t = t->next) {
        if (t != s) {
            CUDA(cudaEventRecord(event, t->stream));
            CUDA(cudaStreamWaitEvent(s->stream, event, 0));
        }
    }
}

// what is queued on any of them from now on comes after all that is queued on s
static void fork_all(FoStream* s, cudaEvent_t event) {
    CUDA(cudaEventRecord(event, s->stream));
    for (FoStream* t = s->device->streams; t; t = t->next) {
        if (t != s) { CUDA(cudaStreamWaitEvent(t->stream, event, 0)); }
    }
}

FoGraph* fo_graph_begin(FoStream* s) {
    FoDevice* d = s->device;
    fo_require(!d->capturing, "a graph within a graph, on stream '%s'", s->name);
    FoGraph* g = (FoGraph*)calloc(1, sizeof *g);
    fo_require(g != NULL, "out of memory");
    g->device = d;
    g->stream = s;
    CUDA(cudaEventCreateWithFlags(&g->done, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&g->fork, cudaEventDisableTiming));
    // ranks are threads that capture at the same time: what one of them calls must not end another's capture
    CUDA(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal));
    d->capturing = g;
    fork_all(s, g->fork);
    return g;
}

void fo_graph_end(FoGraph* g) {
    cudaGraph_t graph;
    join_all(g->stream, g->fork);
    CUDA(cudaStreamEndCapture(g->stream->stream, &graph));
    CUDA(cudaGraphInstantiate(&g->exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    g->device->capturing = NULL;
    g->next = g->device->graphs;
    g->device->graphs = g;
}

void fo_graph_launch(FoGraph* g) {
    fo_require(!g->launched || !g->timed, "a graph launched twice without a wait: its times would be lost");
    join_all(g->stream, g->done);
    void* watched = fo__watch_begin(g->stream);
    CUDA(cudaGraphLaunch(g->exec, g->stream->stream));
    fo__watch_end(watched);
    fork_all(g->stream, g->done);
    g->launched = 1;
}

void fo_graph_free(FoGraph* g) {
    FoGraph** at = &g->device->graphs;
    fo_stream_sync(g->stream);
    while (*at != g) {
        at = &(*at)->next;
    }
    *at = g->next;
    while (!g->device->graphs && g->device->old_scratch) {
        Block* b = g->device->old_scratch;
        g->device->old_scratch = b->next;
        CUDA(cudaFree(b->p));
        free(b);
    }
    CUDA(cudaGraphExecDestroy(g->exec));
    CUDA(cudaEventDestroy(g->done));
    CUDA(cudaEventDestroy(g->fork));
    free_spans(g->timed);
    free(g);
}
