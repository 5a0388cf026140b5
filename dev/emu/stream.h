/* stream.h -- streams as queues of operations, served by one device thread. What cuBLASLt and NCCL build on.
 *
 * A host thread pushes operations; the device thread polls the first one of each stream until it is done. The
 * order in which it goes round is the schedule, FO_EMU_SCHED: eager (oldest first), lazy (as late as a host
 * thread's wait allows), random:SEED.
 */
#ifndef EMU_STREAM_H
#define EMU_STREAM_H
#include "dev/emu/emu.h"
#include <cuda_runtime.h>

namespace emu {
/* Op -- one operation on a stream. In a captured graph the same object runs again and again.
 *
 * queued   by the host thread that queues it (or launches its graph), once a run, in the order of the queue.
 *          A graph may be launched again before its last run: then several calls come before the first start
 * start    by the device thread once a run, when all before it on the stream is done
 * poll     by the device thread after start, until it says true: done. Must not wait for anything itself. A
 *          kernel, a copy, a GEMM does all of its work in one poll
 */
struct Op {
    Op* next = nullptr;            // on the stream
    const char* what = "";         // for messages and the checker: text that stays valid (see intern)
    cudaStream_t stream = nullptr; // that it runs on, from start to the end
    unsigned long turn = 0;        // its place in the order of all that was pushed
    virtual void queued() {}
    virtual void start() {}
    virtual bool poll() = 0;
    virtual ~Op() {}
};

/* enqueue -- puts op on the stream, or into the graph that the stream is being captured into; takes it over.
 *
 * `call` is the API function, for messages. Deletes op and returns an error if the stream's capture has
 * failed. Dies on the legacy stream: this project has none.
 */
cudaError_t enqueue(const char* call, cudaStream_t s, Op* op);

// what the running operation reads or writes in code that is not instrumented, told before it does
void touch_read(const void* p, size_t nbytes);
void touch_write(void* p, size_t nbytes);

// a copy of the text that lives for ever, the same for the same text
const char* intern(const char* text);

// one line on stderr, "emu: ...", then the process ends with status 66
[[noreturn]] void die(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

// adds one to a counter that fo_emu_count(what) shows
enum Counter {
    COUNT_MALLOC,
    COUNT_EVENT_CREATE,
    COUNT_STREAM_SYNC,
    COUNT_DEVICE_SYNC,
    COUNT_HEURISTIC,
    COUNT_LAUNCH
};
void count(Counter what);
} // namespace emu
#endif
