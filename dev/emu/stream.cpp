/* stream.cpp -- streams, events, host functions, and the device thread that serves them. See stream.h. */
#include "dev/emu/runtime.h"
#include <algorithm>
#include <deque>
#include <linux/futex.h>
#include <pthread.h>
#include <set>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace emu {
namespace {
thread_local bool in_host_function = false;
std::atomic<long> counters[COUNT_LAUNCH + 1];
enum { HOLD_MS = 2 }; // lazy: how long after the last call of a host thread the streams stand still
} // namespace

// ---- waiting ----------------------------------------------------------------------------------------------
void futex_wait(std::atomic<int>* word, int value, long us) {
    timespec t = {us / 1000000, us % 1000000 * 1000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, us < 0 ? nullptr : &t, nullptr, 0);
}

void futex_wake(std::atomic<int>* word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

void Lock::lock() {
    int held = 0;
    if (word.compare_exchange_strong(held, 1)) { return; }
    while (word.exchange(2)) {
        futex_wait(&word, 2, -1);
    }
}

void Lock::unlock() {
    if (word.exchange(0) == 2) { futex_wake(&word); }
}

double now_ms() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// ---- what all files use -----------------------------------------------------------------------------------
void die(const char* fmt, ...) {
    va_list args;
    char text[4096];
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fprintf(stderr, "emu: %s\n", text);
    fflush(nullptr);
    _exit(66);
}

const char* intern(const char* text) {
    static Lock* lock = new Lock();
    static std::set<std::string>* texts = new std::set<std::string>();
    Guard guard(*lock);
    return texts->insert(text).first->c_str();
}

void count(Counter what) {
    counters[what]++;
}

void touch_read(const void* p, size_t nbytes) {
    if (emu_check_range) { emu_check_range(p, nbytes, 0); }
}

void touch_write(void* p, size_t nbytes) {
    if (emu_check_range) { emu_check_range(p, nbytes, 1); }
}

namespace {
// the number that the variable holds, or what holds without it; dies if it is not one
double from_environment(const char* name, double otherwise) {
    const char* text = getenv(name);
    char* end = nullptr;
    double x = text ? strtod(text, &end) : otherwise;
    if (text && (end == text || *end || !(x >= 0.0))) { die("%s=%s: want a number, 0 or more", name, text); }
    return x;
}

void after_fork() {
    Runtime& rt = runtime();
    rt.forked = rt.device_thread;
}

Runtime* create_runtime() {
    Runtime* rt = new Runtime();
    const char* schedule = getenv("FO_EMU_SCHED");
    schedule = schedule ? schedule : "eager";
    const char* seed = strchr(schedule, ':');
    rt->random = 88172645463325252ull;
    if (!strcmp(schedule, "lazy")) {
        rt->schedule = LAZY;
    } else if (!strncmp(schedule, "random:", 7)) {
        rt->schedule = RANDOM_ORDER;
        rt->random += strtoull(seed + 1, nullptr, 10) * 0x9e3779b97f4a7c15ull;
    } else if (strcmp(schedule, "eager")) {
        die("FO_EMU_SCHED=%s: want eager, lazy or random:SEED", schedule);
    }
    rt->stall_ms = from_environment("FO_EMU_STALL_S", 120.0) * 1e3;
    rt->ndevices = (int)from_environment("FO_EMU_DEVICES", 16.0);
    if (rt->ndevices > MAX_DEVICES) { die("FO_EMU_DEVICES=%d: at most %d", rt->ndevices, MAX_DEVICES); }
    rt->memory_nbytes = (size_t)from_environment("FO_EMU_MEMORY", 8.0 * (1 << 30));
    rt->peers = from_environment("FO_EMU_PEER", 1.0) != 0.0;
    rt->driver = from_environment("FO_EMU_NO_DRIVER", 0.0) == 0.0;
    pthread_atfork(nullptr, nullptr, after_fork);
    return rt;
}
} // namespace

Runtime& runtime() {
    static Runtime* rt = create_runtime();
    return *rt;
}

Runtime& enter(const char* call) {
    Runtime& rt = runtime();
    if (in_host_function) { die("host function: it calls %s, and must not use CUDA", call); }
    rt.last_call = now_ms();
    return rt;
}

void require_stream(const char* call, cudaStream_t s) {
    if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) {
        die("legacy stream: %s on it; this project has explicit streams only", call);
    }
}

// ---- queues -----------------------------------------------------------------------------------------------
namespace {
void* device_thread(void* arg);

void wake_device_thread(Runtime& rt) {
    rt.pushed++;
    if (rt.dozing) { futex_wake(&rt.pushed); }
}

// under lock
void start_device_thread(Runtime& rt) {
    pthread_t thread;
    if (rt.forked) { die("fork: CUDA was in use before the fork, and does not work after it"); }
    if (rt.device_thread) { return; }
    rt.device_thread = true;
    if (pthread_create(&thread, nullptr, device_thread, &rt)) { die("can't start the device thread"); }
    pthread_detach(thread);
}

struct RecordOp : Op {
    std::shared_ptr<Record> record;
    bool poll() override {
        record->ms = now_ms();
        release(record.get());
        record->done = true;
        return true;
    }
};

struct WaitOp : Op {
    std::shared_ptr<Record> record;
    bool poll() override {
        if (!record->done) { return false; }
        acquire(record.get());
        return true;
    }
};
} // namespace

void push(CUstream_st* s, Op* op) {
    Runtime& rt = runtime();
    start_device_thread(rt);
    op->stream = s;
    op->turn = ++rt.turn;
    op->queued();
    release(op);
    (s->last ? s->last->next : s->first) = op;
    s->last = op;
    s->npushed++;
    wake_device_thread(rt);
}

std::shared_ptr<Record> push_record(CUstream_st* s) {
    RecordOp* op = new RecordOp();
    op->what = "event record";
    op->record = std::make_shared<Record>();
    op->record->stream = s;
    op->record->place = s->npushed + 1;
    std::shared_ptr<Record> record = op->record;
    push(s, op);
    return record;
}

void push_wait(CUstream_st* s, const std::shared_ptr<Record>& record) {
    WaitOp* op = new WaitOp();
    op->what = "event wait";
    op->record = record;
    push(s, op);
}

cudaError_t enqueue(const char* call, cudaStream_t s, Op* op) {
    Runtime& rt = enter(call);
    require_stream(call, s);
    Guard guard(rt.lock);
    if (s->capture) { return capture_op(s, op); }
    push(s, op);
    return cudaSuccess;
}

namespace {
void report_stall(Runtime& rt) {
    std::string text;
    Guard guard(rt.lock);
    for (CUstream_st* s : rt.streams) {
        if (s->first) {
            text += "; " + s->name + " of device " + std::to_string(s->device) + ": " + s->first->what;
        }
    }
    die("stall: a host thread waits, and nothing has got on for %g s%s", rt.stall_ms / 1e3, text.c_str());
}
} // namespace

void wait_for(CUstream_st* s, unsigned long target) {
    Runtime& rt = runtime();
    Wait wait;
    {
        Guard guard(rt.lock);
        if (s->ndone >= target) { return; }
        wait.stream = s;
        wait.target = target;
        rt.waits.push_back(&wait);
        wake_device_thread(rt);
    }
    unsigned long seen = rt.nfinished;
    double since = now_ms();
    while (!wait.done) {
        futex_wait(&wait.done, 0, (long)(std::min(rt.stall_ms / 4.0, 1000.0) * 1e3));
        if (rt.nfinished != seen) {
            seen = rt.nfinished;
            since = now_ms();
        }
        if (!wait.done && now_ms() - since > rt.stall_ms) { report_stall(rt); }
    }
}

void wait_for_device(int device, bool ordered) {
    Runtime& rt = runtime();
    std::deque<Wait> waits; // all at once, since a stream may be destroyed while this waits for another
    {
        Guard guard(rt.lock);
        for (CUstream_st* s : rt.streams) {
            if (s->device != device) { continue; }
            if (s->ndone < s->npushed) {
                Wait& w = waits.emplace_back();
                w.stream = s;
                w.target = s->npushed;
                rt.waits.push_back(&w);
            } else if (ordered) {
                acquire(s);
            }
        }
        wake_device_thread(rt);
    }
    for (Wait& w : waits) {
        while (!w.done) {
            futex_wait(&w.done, 0, -1);
        }
        if (ordered) { acquire(w.stream); }
    }
}

// ---- the device thread ------------------------------------------------------------------------------------
namespace {
unsigned random_number(Runtime& rt, unsigned below) {
    rt.random ^= rt.random << 13;
    rt.random ^= rt.random >> 7;
    rt.random ^= rt.random << 17;
    return (unsigned)((rt.random >> 33) % below);
}

// takes the finished operation off the stream and wakes who waits for it
void take_off(Runtime& rt, CUstream_st* s) {
    Guard guard(rt.lock);
    Op* op = s->first;
    s->first = op->next;
    if (!s->first) { s->last = nullptr; }
    s->started = false;
    s->ndone++;
    rt.nfinished++;
    auto met = [s](Wait* w) {
        if (w->stream != s || s->ndone < w->target) { return false; }
        std::atomic<int>* word = &w->done;
        *word = 1; // from here on *w may be gone; waking an address that is harms nobody
        futex_wake(word);
        return true;
    };
    rt.waits.erase(std::remove_if(rt.waits.begin(), rt.waits.end(), met), rt.waits.end());
    forget(op);
    delete op; // under lock: who destroys the stream comes after this
}

// one attempt at the stream's first operation; true if that finished it. The stream has one
bool step(Runtime& rt, CUstream_st* s) {
    Op* op = s->first;
    if (!s->context && emu_check_stream_open) {
        s->context = emu_check_stream_open(s->name.c_str(), s->device);
    }
    if (emu_check_context) { emu_check_context(s->context); }
    if (!s->started) {
        s->started = true;
        acquire(op);
        if (emu_check_name) { emu_check_name(op->what); }
        op->start();
    }
    bool done = op->poll();
    if (done) { release(s); }
    if (emu_check_context) { emu_check_context(0); }
    if (done) { take_off(rt, s); }
    return done;
}

// the streams that have something to do, the one whose first operation was pushed first in front
std::vector<CUstream_st*> busy_streams(Runtime& rt) {
    std::vector<CUstream_st*> busy;
    Guard guard(rt.lock);
    for (CUstream_st* s : rt.streams) {
        if (s->first) { busy.push_back(s); }
    }
    std::sort(busy.begin(), busy.end(),
              [](CUstream_st* a, CUstream_st* b) { return a->first->turn < b->first->turn; });
    return busy;
}

// one step on the first of these streams that gets on
bool step_any(Runtime& rt, const std::vector<CUstream_st*>& busy) {
    for (CUstream_st* s : busy) {
        if (step(rt, s)) { return true; }
    }
    return false;
}

bool is_busy(Runtime& rt, CUstream_st* s) {
    Guard guard(rt.lock);
    return s->first != nullptr;
}

// one step towards what s waits for: on s, or on the stream that s's event is recorded on, and so on
bool step_towards(Runtime& rt, CUstream_st* s) {
    for (int depth = 0; depth < 100 && is_busy(rt, s); depth++) {
        if (step(rt, s)) { return true; }
        WaitOp* wait = dynamic_cast<WaitOp*>(s->first);
        if (!wait || wait->record->done) { return false; }
        s = wait->record->stream;
    }
    return false;
}

bool lazy_round(Runtime& rt) {
    std::vector<CUstream_st*> wanted;
    {
        Guard guard(rt.lock);
        for (Wait* w : rt.waits) {
            wanted.push_back(w->stream);
        }
    }
    for (CUstream_st* s : wanted) {
        if (step_towards(rt, s)) { return true; }
    }
    // nobody waits, or for what comes another way: memory, messages, host functions
    if (wanted.empty() && now_ms() - rt.last_call < HOLD_MS) { return false; }
    std::vector<CUstream_st*> busy = busy_streams(rt);
    std::reverse(busy.begin(), busy.end());
    return step_any(rt, busy);
}

bool random_round(Runtime& rt) {
    static CUstream_st* held_back = nullptr; // for a while, unless nothing else gets on
    std::vector<CUstream_st*> busy = busy_streams(rt);
    for (size_t i = busy.size(); i > 1; i--) {
        std::swap(busy[i - 1], busy[random_number(rt, (unsigned)i)]);
    }
    if (!busy.empty() && random_number(rt, 8) == 0) { held_back = busy[0]; }
    auto held = std::find(busy.begin(), busy.end(), held_back);
    if (held != busy.end()) { std::rotate(held, held + 1, busy.end()); }
    return step_any(rt, busy);
}

bool any_busy(Runtime& rt) {
    Guard guard(rt.lock);
    return std::any_of(rt.streams.begin(), rt.streams.end(), [](CUstream_st* s) { return s->first; });
}

void* device_thread(void* arg) {
    Runtime& rt = *(Runtime*)arg;
    long nap_us = 0;
    if (emu_check_device_thread) { emu_check_device_thread(); }
    for (;;) {
        int seen = rt.pushed;
        if (rt.schedule == EAGER  ? step_any(rt, busy_streams(rt))
            : rt.schedule == LAZY ? lazy_round(rt)
                                  : random_round(rt)) {
            nap_us = 0;
            continue;
        }
        bool busy = any_busy(rt);
        nap_us = std::min(nap_us * 2 + 20, 1000l);
        rt.dozing = 1;
        futex_wait(&rt.pushed, seen, busy ? nap_us : -1);
        rt.dozing = 0;
    }
    return nullptr;
}
} // namespace

// ---- host functions ---------------------------------------------------------------------------------------
struct Helper {
    pthread_t thread;
    std::atomic<int> state{0}; // 0 idle, 1 to run, 2 has run, 3 to end
    cudaHostFn_t function;
    void* data;
};

namespace {
void* helper_thread(void* arg) {
    Helper* h = (Helper*)arg;
    in_host_function = true;
    for (;;) {
        int state = h->state;
        if (state == 3) { return nullptr; }
        if (state != 1) {
            futex_wait(&h->state, state, -1);
            continue;
        }
        acquire(h);
        h->function(h->data);
        release(h);
        h->state = 2;
        wake_device_thread(runtime());
    }
}

struct HostOp : Op {
    cudaHostFn_t function;
    void* data;
    void start() override {
        Helper*& h = stream->helper;
        if (!h) {
            h = new Helper();
            if (pthread_create(&h->thread, nullptr, helper_thread, h)) { die("can't start a helper thread"); }
        }
        h->function = function;
        h->data = data;
        release(h);
        h->state = 1;
        futex_wake(&h->state);
    }
    bool poll() override {
        Helper* h = stream->helper;
        if (h->state != 2) { return false; }
        acquire(h);
        h->state = 0;
        return true;
    }
};

void end_helper(Helper* h) {
    h->state = 3;
    futex_wake(&h->state);
    pthread_join(h->thread, nullptr);
    forget(h);
    delete h;
}
} // namespace

CUstream_st* create_stream(int device, int priority, const std::string& name) {
    Runtime& rt = runtime();
    CUstream_st* s = new CUstream_st();
    Guard guard(rt.lock);
    s->device = device;
    s->priority = priority;
    s->name = name.empty() ? "stream " + std::to_string(++rt.nstreams) : name;
    rt.streams.push_back(s);
    return s;
}

void destroy_stream(CUstream_st* s) {
    Runtime& rt = runtime();
    wait_for(s, s->npushed);
    {
        Guard guard(rt.lock);
        rt.streams.erase(std::find(rt.streams.begin(), rt.streams.end(), s));
    }
    if (s->helper) { end_helper(s->helper); }
    if (s->context) { emu_check_stream_close(s->context); }
    forget(s);
    delete s;
}
} // namespace emu

using namespace emu;

extern "C" {
long fo_emu_count(const char* what) {
    static const char* const NAMES[] = {"malloc",      "event_create", "stream_sync",
                                        "device_sync", "heuristic",    "launch"};
    for (int i = 0; i <= COUNT_LAUNCH; i++) {
        if (!strcmp(NAMES[i], what)) { return counters[i]; }
    }
    die("fo_emu_count: nothing is counted as %s", what);
}

void fo_emu_name_stream(cudaStream_t s, const char* name) {
    Guard guard(runtime().lock);
    s->name = name;
}

// ---- streams ----------------------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
    enter("cudaStreamCreateWithPriority");
    if (flags & ~(unsigned)cudaStreamNonBlocking) { return fail(cudaErrorInvalidValue); }
    *s = create_stream(current_device(), priority, "");
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    return cudaStreamCreateWithPriority(s, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
    enter("cudaStreamDestroy");
    require_stream("cudaStreamDestroy", s);
    if (s->capture) { return fail(cudaErrorStreamCaptureUnsupported); }
    destroy_stream(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    Runtime& rt = enter("cudaStreamSynchronize");
    require_stream("cudaStreamSynchronize", s);
    count(COUNT_STREAM_SYNC);
    unsigned long target;
    {
        Guard guard(rt.lock);
        if (s->capture) { return fail(refuse_in_capture_of(s)); }
        target = s->npushed;
    }
    wait_for(s, target);
    acquire(s);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t s) {
    Runtime& rt =
        runtime(); // not a call that lazy streams stand still for: a program may call until it is true
    require_stream("cudaStreamQuery", s);
    Guard guard(rt.lock);
    if (s->capture) { return fail(refuse_in_capture_of(s)); }
    if (s->ndone != s->npushed) { return cudaErrorNotReady; }
    acquire(s);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
    require_stream("cudaStreamGetPriority", s);
    *priority = s->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t s, int* device) {
    require_stream("cudaStreamGetDevice", s);
    *device = s->device;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    Runtime& rt = enter("cudaStreamWaitEvent");
    require_stream("cudaStreamWaitEvent", s);
    if (!e || flags & ~(unsigned)cudaEventWaitExternal) { return fail(cudaErrorInvalidValue); }
    Guard guard(rt.lock);
    if (s->capture || e->captured) { return capture_wait(s, e, flags & cudaEventWaitExternal); }
    if (e->record) { push_wait(s, e->record); }
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* data) {
    HostOp* op = new HostOp();
    op->what = "host function";
    op->function = function;
    op->data = data;
    return enqueue("cudaLaunchHostFunc", s, op);
}

cudaError_t cudaDeviceSynchronize(void) {
    enter("cudaDeviceSynchronize");
    count(COUNT_DEVICE_SYNC);
    cudaError_t e = refuse_in_capture();
    if (e != cudaSuccess) { return fail(e); }
    wait_for_device(current_device(), true);
    return cudaSuccess;
}

// ---- events -----------------------------------------------------------------------------------------------
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
    enter("cudaEventCreateWithFlags");
    if (flags & ~(unsigned)(cudaEventDisableTiming | cudaEventBlockingSync)) {
        return fail(cudaErrorInvalidValue);
    }
    count(COUNT_EVENT_CREATE);
    *e = new CUevent_st();
    (*e)->device = current_device();
    (*e)->timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e) {
    Runtime& rt = enter("cudaEventDestroy");
    if (!e) { return fail(cudaErrorInvalidResourceHandle); }
    Guard guard(rt.lock);
    delete e;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
    Runtime& rt = enter("cudaEventRecord");
    require_stream("cudaEventRecord", s);
    if (!e || e->device != s->device) { return fail(cudaErrorInvalidResourceHandle); }
    if (flags & ~(unsigned)cudaEventRecordExternal) { return fail(cudaErrorInvalidValue); }
    Guard guard(rt.lock);
    if (s->capture) { return capture_record(e, s, flags & cudaEventRecordExternal); }
    e->captured = false;
    e->record = push_record(s);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    return cudaEventRecordWithFlags(e, s, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
    Runtime& rt = runtime(); // as cudaStreamQuery
    if (!e) { return fail(cudaErrorInvalidResourceHandle); }
    Guard guard(rt.lock);
    if (e->captured) { return fail(cudaErrorCapturedEvent); }
    if (e->record && !e->record->done) { return cudaErrorNotReady; }
    if (e->record) { acquire(e->record.get()); }
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    Runtime& rt = enter("cudaEventSynchronize");
    std::shared_ptr<Record> record;
    if (!e) { return fail(cudaErrorInvalidResourceHandle); }
    count(COUNT_STREAM_SYNC);
    cudaError_t refused = refuse_in_capture();
    if (refused != cudaSuccess) { return fail(refused); }
    {
        Guard guard(rt.lock);
        if (e->captured) { return fail(cudaErrorCapturedEvent); }
        record = e->record;
    }
    if (!record) { return cudaSuccess; }
    if (!record->done) { wait_for(record->stream, record->place); }
    acquire(record.get());
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    Runtime& rt = enter("cudaEventElapsedTime");
    Guard guard(rt.lock);
    if (!start || !end || !start->timed || !end->timed || !start->record || !end->record) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (!start->record->done || !end->record->done) { return cudaErrorNotReady; }
    *ms = (float)(end->record->ms - start->record->ms);
    return cudaSuccess;
}
}
