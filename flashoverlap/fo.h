/* fo.h -- READ FIRST. Numbers, errors, devices, memory, streams and events: part one of the cut.
 *
 * Three headers are the cut between what exists once and what exists for each device: this one, fo_ops.h
 * (operations of the layers) and fo_comm.h (ranks, and bytes between them). A device defines their names in a
 * folder of its own, flashoverlap/cpu/ or flashoverlap/cuda/; the build links one device. Everything above,
 * each schedule included, is plain C that exists once.
 *
 * The vocabulary is CUDA's: work is queued on streams and runs in the order of its stream; events order one
 * stream after another; nothing else does. On the cpu a stream is a thread with a queue.
 */
#ifndef FO_H
#define FO_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __cplusplus
extern "C" {
#endif

// ---- numbers ----------------------------------------------------------------------------------------------
// floatX holds weights, activations and their gradients: bf16, or fp32 in a PRECISION=FP32 build. bf16 is a
// struct, so that C and C++ see the same type and no arithmetic happens on it by accident.
typedef struct {
    uint16_t bits;
} FoBf16;

typedef enum { FO_BF16, FO_FP32 } FoDtype;

#ifdef FO_PRECISION_FP32
typedef float floatX;
#define FO_FLOATX FO_FP32
#else
typedef FoBf16 floatX;
#define FO_FLOATX FO_BF16
#endif

static inline size_t fo_dtype_nbytes(FoDtype t) {
    return t == FO_BF16 ? 2 : 4;
}

static inline float fo_bf16_to_float(FoBf16 b) {
    uint32_t u = (uint32_t)b.bits << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

// rounds to nearest, ties to even; a NaN stays a NaN
static inline FoBf16 fo_bf16_from_float(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
    rounded = f != f ? u | 0x400000u : rounded;
    FoBf16 b = {(uint16_t)(rounded >> 16)};
    return b;
}

#ifdef FO_PRECISION_FP32
static inline float fo_float(floatX x) {
    return x;
}
static inline floatX fo_floatx(float f) {
    return f;
}
#else
static inline float fo_float(floatX x) {
    return fo_bf16_to_float(x);
}
static inline floatX fo_floatx(float f) {
    return fo_bf16_from_float(f);
}
#endif

// ---- errors -----------------------------------------------------------------------------------------------
/* fo_die -- prints one line on stderr, then ends every rank with exit status 1.
 *
 * For bugs of the caller, a broken machine, a failed library call. The first to die prints; others stay
 * silent. Ranks that are threads end with the process, processes by the transport's abort. Never returns.
 */
void fo_die(const char* file, int line, const char* func, const char* fmt, ...)
    __attribute__((format(printf, 4, 5), noreturn));

/* fo_quit -- the same for a user's error: prints the text alone, without its place, and ends every rank with
 * `status`.
 */
void fo_quit(int status, const char* fmt, ...) __attribute__((format(printf, 2, 3), noreturn));

// names the calling thread's rank in fo_die's message (-1: none); serves messages alone
void fo_die_rank(int rank);
// what fo_die and fo_quit do to end ranks that are other processes, before this one ends; set by a transport
void fo_die_abort(void (*abort_all)(int status));

#define fo_require(cond, ...)                                               \
    do {                                                                    \
        if (!(cond)) { fo_die(__FILE__, __LINE__, __func__, __VA_ARGS__); } \
    } while (0)

// seconds on a clock that all ranks of a machine share
double fo_now(void);

// ---- a rank's device --------------------------------------------------------------------------------------
typedef struct FoDevice FoDevice;
typedef struct FoStream FoStream;
typedef struct FoEvent FoEvent;

/* fo_device_open -- the part of the machine on which one rank computes.
 *
 * nlocal   ranks on this machine. cpu: a rank's operations use max(1, cores / nlocal) threads, so that
 *          results do not depend on whether ranks are threads or processes. cuda: the rank's GPU is number
 *          rank modulo their count; the calling thread's from now on.
 * Errors: cuda: no driver or GPU, one too old, more ranks than GPUs (unless FO_SHARE_GPUS=1 is set in the
 * environment): one line, exit status 1.
 * fo_device_close waits for nothing: destroy the device's streams first.
 */
FoDevice* fo_device_open(int rank, int nlocal);
void fo_device_close(FoDevice* d);

// one line for people, e.g. "cpu, AMD EPYC, oneDNN 2.6.3, 2 threads a rank"; valid until the device is closed
const char* fo_device_name(const FoDevice* d);
// a line worth telling the user once about this device and build, or NULL; cpu: bf16 without bf16
// instructions
const char* fo_device_hint(const FoDevice* d);
// TFLOP/s of floatX that the device can do at most; cpu: a large GEMM, measured at the first call
double fo_device_peak_tflops(FoDevice* d);
/* fo_device_deterministic -- on 1: the same input gives the same bits each time, whatever it costs. cpu:
 * always. cuda: cuDNN's attention adds up dq in any order otherwise. Call it before the first operation.
 */
void fo_device_deterministic(FoDevice* d, int on);
/* fo_device_fuse_gelu -- level 1: fo_matmul_gelu_forward is one kernel where the library has one, 2:
 * fo_matmul_gelu_dgrad, too. Faster or slower, that depends on the GPU; off unless told. GELU then sees sums
 * before they are rounded, so other last bits come out, and one recomputed from what was stored has yet
 * others. cpu: no effect.
 */
void fo_device_fuse_gelu(FoDevice* d, int level);
/* fo_device_tf32 -- on 1: matmuls of fp32 may round what they multiply to TF32, which has 11 bits, and then
 * run on tensor cores; sums stay fp32. cuda: FP32 builds alone. cpu: no effect. Call it before the first
 * operation.
 */
void fo_device_tf32(FoDevice* d, int on);

// One line about the machine as it is now. cuda: the GPU's clocks, power, temperature and what slows it
// down, by NVML, or why they are not known; cpu: load, and memory of the process.
void fo_device_state(const FoDevice* d, char* text, size_t nbytes);
// a profiler that was told to wait for the program (nsys -c cudaProfilerApi) looks from on 1 to on 0; cpu: no
// effect
void fo_device_profiler(FoDevice* d, int on);

// does the device emulate speeds: fo_device_pace and fo_group_link? cpu: 1, cuda: 0
int fo_device_emulates(void);
/* fo_device_pace -- makes each GEMM and attention last at least flops / (tflops * 1e12) seconds; 0: as fast
 * as it goes.
 *
 * The arithmetic stays real; what remains of the time is slept, on a virtual clock of the stream, so that
 * lateness of a wake-up does not add up. Call it while nothing is queued.
 * Errors: dies if tflops is not 0 where !fo_device_emulates().
 */
void fo_device_pace(FoDevice* d, double tflops);

// ---- memory -----------------------------------------------------------------------------------------------
// Zeroed; dies when there is none. cpu: aligned to 2 MiB with huge pages where large, else to 64 bytes.
void* fo_malloc(FoDevice* d, size_t nbytes);
void fo_free(FoDevice* d, void* p);
// bytes handed out by fo_malloc on this device: now, and at most so far
size_t fo_device_nbytes(const FoDevice* d);
size_t fo_device_peak_nbytes(const FoDevice* d);
// bytes that a rank can still have here, if all ranks of this machine want as many; as the system tells it
// now
size_t fo_device_free_nbytes(const FoDevice* d);

// host -> device and back. Queued on s: host memory must stay as it is (upload), and may be read (download),
// only after s has passed the call (fo_stream_sync).
void fo_upload(void* dst, const void* host_src, size_t nbytes, FoStream* s);
void fo_download(void* host_dst, const void* src, size_t nbytes, FoStream* s);
// device -> device. Queued on s. The two must not overlap.
void fo_copy(void* dst, const void* src, size_t nbytes, FoStream* s);
void fo_zero(void* dst, size_t nbytes, FoStream* s);

// ---- streams and events -----------------------------------------------------------------------------------
// name appears in traces and debuggers; it is copied. cuda: one that begins with "comm" has the device's
// highest priority, so that an exchange is not held up by computation
FoStream* fo_stream_create(FoDevice* d, const char* name);
// waits for what is queued, then ends the stream
void fo_stream_destroy(FoStream* s);
// the calling thread waits until all that is queued on s is done
void fo_stream_sync(FoStream* s);
FoDevice* fo_stream_device(const FoStream* s);

FoEvent* fo_event_create(void);
// the caller sees to it that no stream still waits for it
void fo_event_destroy(FoEvent* e);
// marks the point of s at which the call stands; an event may be recorded again and again
void fo_event_record(FoEvent* e, FoStream* s);
/* fo_stream_wait -- what is queued on s from now on starts after the last recording of e (recorded before
 * this call; one never recorded does not hold s back).
 *
 * waited_ms  unless NULL, the milliseconds that s stood still here are added to it, by the time s has passed
 *            the call: read it after fo_stream_sync(s).
 */
void fo_stream_wait(FoStream* s, FoEvent* e, double* waited_ms);

/* fo_stream_call -- queues fn(copy of args) on s: it runs on a thread of the host, what is queued on s
 * afterwards once it has returned. For tests and tools. fn calls nothing of a device. nbytes at most
 * FO_MAX_CALL_ARGS.
 */
void fo_stream_call(FoStream* s, void (*fn)(void* args), const void* args, size_t nbytes);
#define FO_MAX_CALL_ARGS 64

// ---- graphs -----------------------------------------------------------------------------------------------
/* A graph is what a rank has queued on all its streams between begin and end, kept to be queued again and
 * again by one call, which costs the host next to nothing. cuda alone (fo_device_graphs() tells; cpu: 0).
 *
 * fo_graph_begin   everything queued so far on any stream of the rank comes before the graph. From here to
 *                  the end calls queue into the graph, nothing runs: no upload, download or sync, no scratch
 *                  that an operation has not asked for before; each call's arguments are kept as they are.
 * fo_graph_end     ends that. The graph has not run.
 * fo_graph_launch  queues the whole of it: after all that is queued on any stream of the rank, and before all
 *                  that is queued later. waited_ms of the waits within are added each time.
 * Ranks of a group begin, end and launch the same graphs in the same order. Free graphs before the streams.
 */
typedef struct FoGraph FoGraph;
int fo_device_graphs(void);
FoGraph* fo_graph_begin(FoStream* s);
void fo_graph_end(FoGraph* g);
void fo_graph_launch(FoGraph* g);
void fo_graph_free(FoGraph* g);

// ---- what ran when ----------------------------------------------------------------------------------------
// What fo_trace.h makes a timeline of. Off, which it is at first, it costs a few words an operation.

// an exchange as this rank sees it: bytes, and peers; bit r stands for rank r of the world
typedef struct {
    size_t nsent, nreceived;
    uint32_t to, from;
} FoMessages;

typedef enum {
    FO_SPAN_OPERATION, // exchanges and copies, too
    FO_SPAN_WAIT       // an fo_stream_wait with waited_ms that had to wait, for as long as was added
} FoSpanKind;

// a stretch of a stream's time; those of a stream follow each other
typedef struct {
    FoSpanKind kind;
    const char* name;        // of the device's function, matmul_forward_op or fo_matmul_forward; it lives on
    const char* label;       // as fo_stream_label set it when this was queued, or NULL
    double start_s, seconds; // on fo_now's clock; of a paced stream, on its virtual one
    double flops;            // 0: the device does not know
    FoMessages messages;     // of an exchange; else zeros
} FoSpan;

// on 1: from now on all streams of d keep their spans; 0: no more. Call it while nothing is queued.
void fo_device_trace(FoDevice* d, int on);
/* fo_stream_spans -- takes out the oldest spans that s has kept, `max` at most; returns how many. Call it
 * after fo_stream_sync(s).
 */
int fo_stream_spans(FoStream* s, FoSpan spans[], int max);
// What is queued on s from now on belongs to `label`, a row of doc/overlap.md such as "F1"; NULL: to nothing.
// It must live until the spans are taken out. Returns the label before, to be set again.
const char* fo_stream_label(FoStream* s, const char* label);
// the next operation that is queued on s is this exchange; for fo_comm_end alone
void fo_stream_messages(FoStream* s, FoMessages m);

#ifdef __cplusplus
}
#endif
#endif
