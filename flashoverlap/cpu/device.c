/* device.c -- memory, streams and events of the cpu device (fo.h).
 *
 * A stream is a thread with a queue of operations; an event is a counter under a mutex: the host numbers each
 * recording, the recording stream's thread marks that number done, a waiting stream's thread waits for it.
 * The queue's locks would order, for ThreadSanitizer, what a schedule forgot to order; so the runtime's own
 * synchronisation is hidden from it and only what CUDA promises is announced (hide, show, ACQUIRE, RELEASE).
 */
#include "flashoverlap/cpu/cpu.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>
#if FO_ONEDNN
#include <dnnl.h>
#endif

#ifdef __SANITIZE_THREAD__
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_acquire(void* p);
void __tsan_release(void* p);
static void hide(void) {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
static void show(void) {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
}
#define ACQUIRE(p) __tsan_acquire(p)
#define RELEASE(p) __tsan_release(p)
#else
static void hide(void) {}
static void show(void) {}
#define ACQUIRE(p) (void)(p)
#define RELEASE(p) (void)(p)
#endif

enum { QUEUE_SLOTS = 2048 };
/* A thread that wakes up later than this has lost the time: its stream's clock goes on from now. A paced
 * stream makes up for more, by sleeping less afterwards: a few slices of the scheduler, when others use the
 * cores too.
 */
static const double LATENESS_S = 2e-3, PACED_LATENESS_S = 20e-3;

typedef struct {
    FoOp op;
    const char* name;
    double queued; // by the host, as fo_now
    const char* label;
    FoMessages messages;
    _Alignas(16) unsigned char args[FO_MAX_ARGS];
} Slot;

struct FoStream {
    FoDevice* device;
    char name[16];
    pthread_t thread;
    // of the host's thread: of what it queues next
    const char* label;
    FoMessages messages;
    pthread_mutex_t mutex; // of what follows, to `quit`
    pthread_cond_t queued, done;
    Slot* slots;
    uint64_t nqueued, ndone;
    int sleeping, quit;
    // of the stream's thread alone
    double clock;       // virtual end of the last operation
    int clock_is_set;   // by the operation itself
    double paced_flops; // of the operation that runs
    void* scratch;
    size_t scratch_nbytes;
    FoOpTime times[FO_MAX_OP_NAMES];
    int ntimes;
    int span_kind; // of the operation that runs, as it says; -1: it is none
    FoSpan* spans; // [span_room], of which nspans are there and ntaken were taken out; read after a sync
    int nspans, ntaken, span_room;
};

struct FoEvent {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint64_t done;     // highest recording that is done
    double clock;      // the recording stream's clock then
    uint64_t recorded; // of the host's thread alone
};

// ---- time -------------------------------------------------------------------------------------------------
void fo__sleep_until(double t) {
    struct timespec ts = {(time_t)t, (long)((t - (double)(time_t)t) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR) {}
}

// ---- device -----------------------------------------------------------------------------------------------
static int usable_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) { return CPU_COUNT(&set); }
    return 1;
}

static void device_name(FoDevice* d) {
    char line[256], model[80] = "unknown processor", lib[32] = "plain loops";
    FILE* f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "model name : %79[^\n]", model) == 1) { break; }
    }
    if (f) { fclose(f); }
#if FO_ONEDNN
    const dnnl_version_t* v = dnnl_version();
    snprintf(lib, sizeof lib, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
#endif
    snprintf(d->name, sizeof d->name, "cpu, %.60s, %s, %d thread%s a rank", model, lib, d->nthreads,
             d->nthreads == 1 ? "" : "s");
}

FoDevice* fo_device_open(int rank, int nlocal) {
    FoDevice* d = calloc(1, sizeof *d);
    fo_require(d != NULL, "out of memory");
    int online = (int)sysconf(_SC_NPROCESSORS_ONLN), usable = usable_cores();
    d->rank = rank;
    d->nlocal = nlocal > 0 ? nlocal : 1;
    d->nthreads = nlocal > 0 ? online / nlocal : online;
    if (d->nthreads > usable) { d->nthreads = usable; }
    if (d->nthreads < 1) { d->nthreads = 1; }
#if !FO_OPENMP
    d->nthreads = 1;
#endif
    device_name(d);
    return d;
}

void fo_device_close(FoDevice* d) {
    if (d->matmul) { fo__matmul_free(d->matmul); }
    free(d);
}

const char* fo_device_name(const FoDevice* d) {
    return d->name;
}

const char* fo_device_hint(const FoDevice* d) {
    (void)d;
#if defined(__x86_64__) && !defined(FO_PRECISION_FP32)
    if (!__builtin_cpu_supports("avx512bf16")) {
        return "this processor has no bf16 instructions: a PRECISION=FP32 build is faster here";
    }
#endif
    return NULL;
}

void fo_device_fuse_gelu(FoDevice* d, int level) {
    (void)d, (void)level;
}

void fo_device_deterministic(FoDevice* d, int on) {
    (void)d;
    (void)on;
}

void fo_device_tf32(FoDevice* d, int on) {
    (void)d, (void)on;
}

void fo_device_profiler(FoDevice* d, int on) {
    (void)d, (void)on;
}

void fo_device_state(const FoDevice* d, char* text, size_t nbytes) {
    char line[256];
    double load = 0.0;
    unsigned long long now = 0, most = 0;
    FILE* f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f)) {
        (void)(sscanf(line, "VmHWM: %llu", &most) == 1 || sscanf(line, "VmRSS: %llu", &now) == 1);
    }
    if (f) { fclose(f); }
    (void)getloadavg(&load, 1);
    const size_t left = fo_device_free_nbytes(d);
    int n = snprintf(text, nbytes,
                     "cpu: load %.2f on %ld cores, memory of the process %llu MiB, at most %llu MiB so far",
                     load, sysconf(_SC_NPROCESSORS_ONLN), now >> 10, most >> 10);
    if (left != SIZE_MAX && n > 0 && (size_t)n < nbytes) {
        snprintf(text + n, nbytes - (size_t)n, ", %zu MiB free", left * (size_t)d->nlocal >> 20);
    }
}

int fo_device_emulates(void) {
    return 1;
}

void fo_device_pace(FoDevice* d, double tflops) {
    d->pace_tflops = tflops;
}

void fo_device_trace(FoDevice* d, int on) {
    d->tracing = on;
}

// ---- memory -----------------------------------------------------------------------------------------------
enum { HUGE_PAGE = 2 << 20, SMALL_ALIGN = 64 };

// the size of an allocation stands in the bytes before it, which a large one spends an alignment unit on
static size_t align_of(size_t nbytes) {
    return nbytes >= HUGE_PAGE ? HUGE_PAGE : SMALL_ALIGN;
}

void* fo_malloc(FoDevice* d, size_t nbytes) {
    size_t align = align_of(nbytes);
    void* raw = NULL;
    fo_require(nbytes < SIZE_MAX / 2 && posix_memalign(&raw, align, align + nbytes) == 0,
               "no memory for %zu bytes (%zu MiB) beside the %zu MiB in use", nbytes, nbytes >> 20,
               d->nbytes >> 20);
    // copies between 2 MiB-aligned arenas on huge pages were measured 3 times faster than on 4 KiB pages
    if (align == HUGE_PAGE) { madvise((char*)raw + align, nbytes, MADV_HUGEPAGE); }
    memset((char*)raw + align, 0, nbytes);
    size_t* head = (size_t*)((char*)raw + align - SMALL_ALIGN);
    head[0] = nbytes;
    d->nbytes += nbytes;
    if (d->nbytes > d->peak_nbytes) { d->peak_nbytes = d->nbytes; }
    return (char*)raw + align;
}

void fo_free(FoDevice* d, void* p) {
    if (!p) { return; }
    size_t nbytes = *(size_t*)((char*)p - SMALL_ALIGN);
    d->nbytes -= nbytes;
    free((char*)p - align_of(nbytes));
}

size_t fo_device_nbytes(const FoDevice* d) {
    return d->nbytes;
}
size_t fo_device_peak_nbytes(const FoDevice* d) {
    return d->peak_nbytes;
}

size_t fo_device_free_nbytes(const FoDevice* d) {
    char line[256];
    unsigned long long kib = 0;
    FILE* f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f) && sscanf(line, "MemAvailable: %llu kB", &kib) != 1) {}
    if (f) { fclose(f); }
    return kib ? (size_t)(kib << 10) / (size_t)d->nlocal : SIZE_MAX; // a system that doesn't tell
}

// ---- streams ----------------------------------------------------------------------------------------------
static double later(double a, double b) {
    return a > b ? a : b;
}

// the virtual time t at which s should have been here, unless its thread was too late for that
static double on_time(const FoStream* s, double t, double now) {
    return now - t < (s->device->pace_tflops > 0.0 ? PACED_LATENESS_S : LATENESS_S) ? t : now;
}

static void add_time(FoStream* s, const char* name, double seconds) {
    int i = 0;
    while (i < s->ntimes && s->times[i].name != name) {
        i++;
    }
    if (i == FO_MAX_OP_NAMES) { return; }
    if (i == s->ntimes) { s->times[s->ntimes++].name = name; }
    s->times[i].seconds += seconds;
    s->times[i].ncalls++;
}

int fo__op_times(const FoStream* s, FoOpTime times[FO_MAX_OP_NAMES]) {
    memcpy(times, s->times, (size_t)s->ntimes * sizeof *times);
    return s->ntimes;
}

// from, begin, start: when it could have begun on the stream's clock, when it did so there, and in real time
static void keep_span(FoStream* s, const Slot* op, double from, double begin, double start) {
    // a paced stream lives on its clock, on which waits have been counted, too; an emulated link does as well
    const int paced = s->device->pace_tflops > 0.0, exchange = (op->messages.to | op->messages.from) != 0;
    const double end = paced ? s->clock : fo_now();
    from = !paced ? start : exchange && s->clock_is_set ? from : begin;
    if (s->nspans == s->span_room) {
        s->span_room = s->span_room ? 2 * s->span_room : 1024;
        s->spans = realloc(s->spans, (size_t)s->span_room * sizeof *s->spans);
        fo_require(s->spans != NULL, "out of memory for the timeline of '%s'", s->name);
    }
    s->spans[s->nspans++] = (FoSpan){.kind = (FoSpanKind)s->span_kind,
                                     .name = op->name,
                                     .label = op->label,
                                     .start_s = from,
                                     .seconds = end - from,
                                     .flops = s->paced_flops,
                                     .messages = op->messages};
}

int fo_stream_spans(FoStream* s, FoSpan spans[], int max) {
    const int left = s->nspans - s->ntaken, n = left < max ? left : max;
    if (n > 0) { memcpy(spans, s->spans + s->ntaken, (size_t)n * sizeof *spans); }
    s->ntaken += n;
    if (s->ntaken == s->nspans) { s->nspans = s->ntaken = 0; }
    return n;
}

// runs one operation and moves the stream's clock by what it took, or by what pacing says that it takes
static void run_op(FoStream* s, Slot* op) {
    double start = fo_now();
    s->clock = later(s->clock, op->queued); // a stream that had nothing to do saved no time by it
    double from = s->clock, begin = on_time(s, from, start);
    s->paced_flops = 0.0;
    s->clock_is_set = 0;
    s->span_kind = FO_SPAN_OPERATION;
    op->op(s, op->args);
    double seconds = fo_now() - start;
    add_time(s, op->name, seconds);
    if (!s->clock_is_set) {
        double pace = s->device->pace_tflops;
        double nominal = pace > 0.0 ? s->paced_flops / (pace * 1e12) : 0.0;
        s->clock = begin + (nominal > seconds ? nominal : seconds);
        if (nominal > 0.0) { fo__sleep_until(s->clock); }
    }
    if (s->device->tracing && s->span_kind >= 0) { keep_span(s, op, from, begin, start); }
}

static void* stream_main(void* arg) {
    FoStream* s = arg;
    Slot op;
    fo_die_rank(s->device->rank);
    pthread_setname_np(pthread_self(), s->name);
    prctl(PR_SET_TIMERSLACK, 1000UL); // nanoseconds; the default of 50 us would be added to each sleep
#if FO_OPENMP
    omp_set_num_threads(s->device->nthreads);
#endif
    for (;;) {
        hide();
        pthread_mutex_lock(&s->mutex);
        s->sleeping = 1;
        while (s->ndone == s->nqueued && !s->quit) {
            pthread_cond_wait(&s->queued, &s->mutex);
        }
        s->sleeping = 0;
        int quit = s->ndone == s->nqueued;
        if (!quit) { op = s->slots[s->ndone % QUEUE_SLOTS]; }
        pthread_mutex_unlock(&s->mutex);
        show();
        if (quit) { return NULL; }
        ACQUIRE(&s->slots[s->ndone % QUEUE_SLOTS]);
        run_op(s, &op);
        RELEASE(s);
        hide();
        pthread_mutex_lock(&s->mutex);
        s->ndone++;
        pthread_cond_broadcast(&s->done);
        pthread_mutex_unlock(&s->mutex);
        show();
    }
}

FoStream* fo_stream_create(FoDevice* d, const char* name) {
    FoStream* s = calloc(1, sizeof *s);
    fo_require(s != NULL, "out of memory");
    s->device = d;
    s->slots = malloc(QUEUE_SLOTS * sizeof *s->slots);
    fo_require(s->slots != NULL, "out of memory");
    snprintf(s->name, sizeof s->name, "%s %d", name, d->rank);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->queued, NULL);
    pthread_cond_init(&s->done, NULL);
    int err = pthread_create(&s->thread, NULL, stream_main, s);
    fo_require(err == 0, "no thread for stream '%s': %s", name, strerror(err));
    return s;
}

void fo_stream_destroy(FoStream* s) {
    hide();
    pthread_mutex_lock(&s->mutex);
    s->quit = 1;
    pthread_cond_signal(&s->queued);
    pthread_mutex_unlock(&s->mutex);
    show();
    pthread_join(s->thread, NULL);
    pthread_mutex_destroy(&s->mutex);
    pthread_cond_destroy(&s->queued);
    pthread_cond_destroy(&s->done);
    free(s->scratch);
    free(s->spans);
    free(s->slots);
    free(s);
}

FoDevice* fo_stream_device(const FoStream* s) {
    return s->device;
}

const char* fo_stream_label(FoStream* s, const char* label) {
    const char* before = s->label;
    s->label = label;
    return before;
}

void fo_stream_messages(FoStream* s, FoMessages m) {
    s->messages = m;
}

void fo__enqueue_named(FoStream* s, FoOp op, const char* name, const void* args, size_t nbytes) {
    fo_require(nbytes <= FO_MAX_ARGS, "an operation with %zu bytes of arguments, at most %d", nbytes,
               FO_MAX_ARGS);
    RELEASE(&s->slots[s->nqueued % QUEUE_SLOTS]);
    hide();
    pthread_mutex_lock(&s->mutex);
    while (s->nqueued - s->ndone == QUEUE_SLOTS) {
        pthread_cond_wait(&s->done, &s->mutex);
    }
    Slot* slot = &s->slots[s->nqueued % QUEUE_SLOTS];
    slot->op = op;
    slot->name = name;
    slot->queued = fo_now();
    slot->label = s->label;
    slot->messages = s->messages;
    memcpy(slot->args, args, nbytes);
    s->nqueued++;
    if (s->sleeping) { pthread_cond_signal(&s->queued); }
    pthread_mutex_unlock(&s->mutex);
    show();
    s->messages = (FoMessages){0, 0, 0, 0};
}

void fo_stream_sync(FoStream* s) {
    hide();
    pthread_mutex_lock(&s->mutex);
    while (s->ndone != s->nqueued) {
        pthread_cond_wait(&s->done, &s->mutex);
    }
    pthread_mutex_unlock(&s->mutex);
    show();
    ACQUIRE(s);
}

void* fo__scratch(FoStream* s, size_t nbytes) {
    if (nbytes > s->scratch_nbytes) {
        free(s->scratch);
        s->scratch_nbytes = (nbytes + 4095) / 4096 * 4096;
        fo_require(posix_memalign(&s->scratch, SMALL_ALIGN, s->scratch_nbytes) == 0,
                   "no memory for %zu bytes of scratch", nbytes);
    }
    return s->scratch;
}

void fo__pace(FoStream* s, double flops) {
    s->paced_flops += flops;
}

double fo__clock(const FoStream* s) {
    return s->clock;
}

void fo__clock_set(FoStream* s, double t) {
    s->clock = t;
    s->clock_is_set = 1;
}

typedef struct {
    void (*fn)(void* args);
    _Alignas(16) unsigned char args[FO_MAX_CALL_ARGS];
} CallArgs;

static void call_op(FoStream* s, void* args) {
    CallArgs* a = args;
    (void)s;
    a->fn(a->args);
}

void fo_stream_call(FoStream* s, void (*fn)(void* args), const void* args, size_t nbytes) {
    CallArgs a = {.fn = fn};
    fo_require(nbytes <= FO_MAX_CALL_ARGS, "a call with %zu bytes of arguments, at most %d", nbytes,
               FO_MAX_CALL_ARGS);
    memcpy(a.args, args, nbytes);
    fo__enqueue(s, call_op, &a, sizeof a);
}

// ---- graphs -----------------------------------------------------------------------------------------------
int fo_device_graphs(void) {
    return 0;
}

FoGraph* fo_graph_begin(FoStream* s) {
    fo_die(__FILE__, __LINE__, __func__, "the cpu device has no graphs (stream '%s')", s->name);
}

void fo_graph_end(FoGraph* g) {
    (void)g;
}

void fo_graph_launch(FoGraph* g) {
    (void)g;
}

void fo_graph_free(FoGraph* g) {
    (void)g;
}

// ---- events -----------------------------------------------------------------------------------------------
typedef struct {
    FoEvent* event;
    uint64_t number;
    double* waited_ms;
} EventArgs;

FoEvent* fo_event_create(void) {
    FoEvent* e = calloc(1, sizeof *e);
    fo_require(e != NULL, "out of memory");
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->cond, NULL);
    return e;
}

void fo_event_destroy(FoEvent* e) {
    pthread_mutex_destroy(&e->mutex);
    pthread_cond_destroy(&e->cond);
    free(e);
}

static void record_op(FoStream* s, void* args) {
    EventArgs* a = args;
    FoEvent* e = a->event;
    RELEASE(e);
    hide();
    pthread_mutex_lock(&e->mutex);
    e->done = a->number;
    e->clock = s->clock;
    pthread_cond_broadcast(&e->cond);
    pthread_mutex_unlock(&e->mutex);
    show();
    s->span_kind = -1;
    fo__clock_set(s, s->clock);
}

void fo_event_record(FoEvent* e, FoStream* s) {
    EventArgs a = {e, ++e->recorded, NULL};
    fo__enqueue(s, record_op, &a, sizeof a);
}

static void wait_op(FoStream* s, void* args) {
    EventArgs* a = args;
    FoEvent* e = a->event;
    double start = fo_now();
    int waited = 0;
    hide();
    pthread_mutex_lock(&e->mutex);
    while (e->done < a->number) {
        waited = 1;
        pthread_cond_wait(&e->cond, &e->mutex);
    }
    double then = e->clock;
    pthread_mutex_unlock(&e->mutex);
    show();
    ACQUIRE(e);
    double now = fo_now(), before = on_time(s, s->clock, start);
    double clock = on_time(s, later(then, before), now);
    s->span_kind = -1;
    if (a->waited_ms) {
        // a paced stream lives on its virtual clock: a late wake-up that it makes up for is no waiting
        double waited_s = s->device->pace_tflops > 0.0 ? clock - before : waited ? now - start : 0.0;
        *a->waited_ms += 1e3 * waited_s;
        if (waited_s > 0.0) { s->span_kind = FO_SPAN_WAIT; }
    }
    fo__clock_set(s, clock);
}

void fo_stream_wait(FoStream* s, FoEvent* e, double* waited_ms) {
    EventArgs a = {e, e->recorded, waited_ms};
    if (a.number > 0) { fo__enqueue(s, wait_op, &a, sizeof a); }
}

// ---- copies -----------------------------------------------------------------------------------------------
typedef struct {
    void* dst;
    const void* src;
    size_t nbytes;
} CopyArgs;

static void copy_op(FoStream* s, void* args) {
    CopyArgs* a = args;
    (void)s;
    memcpy(a->dst, a->src, a->nbytes);
}

static void zero_op(FoStream* s, void* args) {
    CopyArgs* a = args;
    (void)s;
    memset(a->dst, 0, a->nbytes);
}

void fo_copy(void* dst, const void* src, size_t nbytes, FoStream* s) {
    CopyArgs a = {dst, src, nbytes};
    if (nbytes > 0) { fo__enqueue(s, copy_op, &a, sizeof a); }
}

void fo_upload(void* dst, const void* host_src, size_t nbytes, FoStream* s) {
    fo_copy(dst, host_src, nbytes, s);
}

void fo_download(void* host_dst, const void* src, size_t nbytes, FoStream* s) {
    fo_copy(host_dst, src, nbytes, s);
}

void fo_zero(void* dst, size_t nbytes, FoStream* s) {
    CopyArgs a = {dst, NULL, nbytes};
    if (nbytes > 0) { fo__enqueue(s, zero_op, &a, sizeof a); }
}
